//! A memif node on a VNI with others, in one thread: the test gives each turn.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tasuki_net::endpoint::memif::Memif;
use tasuki_net::endpoint::memif::control::Terms;
use tasuki_net::endpoint::{Bridge, Connection as _};
use tasuki_net::switch::Switch;
use tasuki_shm::line::{Claims, LINE_LEN, Line};
use tasuki_shm::region::{Pages, Region, Span};
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet, directory_lines};

use super::client::{Client, Shape};
use crate::net::{Net, received};

pub type Lines = Span<Line>;
pub type Node = Bridge<Memif>;

/// Makes memory for a directory.
pub fn directory_memory() -> Lines {
    let count = directory_lines(64);
    Region::create("directory", count * LINE_LEN, Pages::Small).unwrap().span(0, count).unwrap()
}

pub const SECRET: &str = "twenty-three-bytes-here";

/// Number of the client's node, and of another.
pub const PORT: u16 = 0;
pub const OTHER: u16 = 1;

pub fn mac(node: u16) -> [u8; 6] {
    [2, 0, 0, 0, 0xee, node.to_le_bytes()[0]]
}

/// Returns a frame from one node to another that differs from every other.
pub fn frame_to(to: u16, from: u16, number: u32, len: usize) -> Vec<u8> {
    let mut frame = [&mac(to)[..], &mac(from), &[0x88, 0xb5], &number.to_le_bytes()].concat();
    frame.extend((18..len).map(|i| i.wrapping_mul(37).wrapping_add(number as usize).to_le_bytes()[0]));
    frame.truncate(len);
    frame
}

pub fn listen(path: &Path, kind: SocketType) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 4).unwrap();
    socket
}

fn node(listener: &OwnedFd, terms: &Terms, net: &mut Net, lines: &Lines) -> Node {
    let switch = Switch::new(PORT, Lookup::new(Claims::of(lines.clone())));
    let memif = Memif::new(listener.try_clone().unwrap(), terms.clone()).unwrap();
    Bridge::new(Box::new(memif), net.take(PORT.into()), switch)
}

pub struct World {
    pub net: Net,
    pub node: Node,
    /// The directory, for other parties that need it.
    pub lines: Lines,
    folder: tempfile::TempDir,
    listener: OwnedFd,
    terms: Terms,
}

impl World {
    /// Makes a VNI with `others` other nodes.
    pub fn new(others: u16) -> Self {
        Self::with(others, 512, Terms::new(0, SECRET, "a test").unwrap())
    }

    pub fn with(others: u16, pool_pages: u32, terms: Terms) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let lines = directory_memory();
        let mut directory = Directory::new(lines.clone());
        let mut nodes = NodeSet::default();
        for number in 0..=others {
            directory.add(mac(number), number).unwrap();
            nodes.insert(number);
        }
        directory.set_nodes(&nodes);
        let mut net = Net::with(others + 1, pool_pages);
        let listener = listen(&folder.path().join("memif.sock"), SocketType::SEQPACKET);
        let node = node(&listener, &terms, &mut net, &lines);
        World { net, node, lines, folder, listener, terms }
    }

    /// Replaces the worker, which is told to end, or killed between two turns.
    pub fn succeed(&mut self, told: bool) {
        let parts = self.node.endpoint.parts().unwrap();
        if told {
            self.node.finish();
        }
        self.net.replace(PORT.into());
        // The old one writes nothing when it goes.
        self.node = node(&self.listener, &self.terms, &mut self.net, &self.lines);
        parts.into_iter().for_each(|parts| self.node.endpoint.go_on(parts).unwrap());
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("memif.sock")
    }

    /// Connects a client.
    pub fn connect(&mut self, shape: Shape) -> Client {
        Client::connect(&self.path(), shape, SECRET, || {
            self.turn();
        })
    }

    /// Ends a client, which the node notices: for a moment a process that another test starts may have its socket, too.
    pub fn see_off(&mut self, client: Client) {
        drop(client);
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.node.endpoint.client().is_some() {
            self.turn();
            assert!(Instant::now() < deadline, "the node does not notice that its client has gone");
        }
        self.settle();
    }

    /// Gives a turn as if the node had been woken, so that it looks everywhere.
    pub fn turn(&mut self) -> usize {
        self.node.rest(Duration::ZERO);
        self.node.turn()
    }

    /// Gives turns until nothing moves.
    pub fn settle(&mut self) {
        while self.turn() > 0 {}
    }

    /// Returns the frames that came to another node.
    pub fn at_other(&mut self, node: u16) -> Vec<Vec<u8>> {
        received(self.net.node(node.into())).into_iter().map(|(_, frame)| frame).collect()
    }

    pub fn send(&mut self, from: u16, frame: &[u8]) -> bool {
        let other = self.net.node(from.into());
        let sent = other.send(PORT, frame).is_ok();
        other.flush();
        sent
    }
}
