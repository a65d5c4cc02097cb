//! Set-up of VNI nodes for the tests of this crate's modules.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tasuki_shm::line::{Claims, LINE_LEN, Line};
use tasuki_shm::pool::Pool;
use tasuki_shm::region::{Pages, Region, Span};
use tasuki_shm::vni::directory::{Directory, Lookup, Mac, NodeSet, directory_lines};
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds, PeerNodeMemory};
use tasuki_shm::wake::BellSender;

use super::{PeerDescriptor, Vni};
use crate::switch::Switch;

/// Memory of a directory, in one process.
type Lines = Span<Line>;

/// Returns the station address of a node.
pub fn mac(node: u16) -> Mac {
    [2, 0, 0, 0, 0, node.to_le_bytes()[0]]
}

/// Makes a directory of `nodes` nodes, and its memory.
fn directory(nodes: u16) -> (Lines, Directory<Lines>) {
    let count = directory_lines(64);
    let lines = Region::create("directory", count * LINE_LEN, Pages::Small).unwrap().span(0, count).unwrap();
    let mut directory = Directory::new(lines.clone());
    let mut set = NodeSet::default();
    for number in 0..nodes {
        set.insert(number);
        directory.add(mac(number), number).unwrap();
    }
    directory.set_nodes(&set);
    (lines, directory)
}

/// What a daemon keeps for the nodes of a VNI: their memories and bells, and the directory.
pub struct Nodes {
    kept: Vec<Kept>,
    lines: Lines,
    directory: Directory<Lines>,
}

struct Kept {
    node_memory: NodeMemoryFds,
    bell_receiver: OwnedFd,
    bell: OwnedFd,
}

impl Nodes {
    pub fn new(count: u16) -> Self {
        let kept = (0..count).map(|number| {
            let (bell_receiver, bell) = tasuki_shm::wake::bell_pipe().unwrap();
            Kept { node_memory: NodeMemoryFds::create(&format!("test-{number}"), 512).unwrap(), bell_receiver, bell }
        });
        let (kept, (lines, directory)) = (kept.collect(), directory(count));
        Nodes { kept, lines, directory }
    }

    /// Has node `number` share the address of another, or takes it away.
    pub fn share(&mut self, number: u16, other: u16, is_shown: bool) {
        if is_shown {
            self.directory.share(mac(other), number).unwrap();
        } else {
            self.directory.remove(mac(other), number);
        }
    }

    /// Returns what a worker of node `number` gets of its own.
    pub fn own(&self, number: u16) -> ((NodeMemory, Pool), OwnedFd) {
        let kept = &self.kept[usize::from(number)];
        let [control, pool] = kept.node_memory.fds().map(|fd| fd.try_clone_to_owned().unwrap());
        let memory = NodeMemory::adopt(NodeMemoryFds { control, pool }).unwrap();
        (memory, kept.bell_receiver.try_clone().unwrap())
    }

    /// Returns what a worker of node `number` gets of all others.
    pub fn peers_of(&self, number: u16) -> Vec<PeerDescriptor> {
        let others = (0..).zip(&self.kept).filter(|(other, _)| *other != number);
        let peer = |(number, kept): (u16, &Kept)| PeerDescriptor {
            number,
            node_memory: PeerNodeMemory::map(&kept.node_memory.to_read().unwrap()).unwrap(),
            bell: BellSender::from_peer(kept.bell.try_clone().unwrap()),
            own: Default::default(),
        };
        others.map(peer).collect()
    }

    /// Opens the end of node `number`, with all other nodes.
    pub fn end(&self, number: u16) -> Vni {
        self.made_by(Vni::new, number)
    }

    /// Like [`end`](Self::end), for an endpoint whose turns are committed as a whole.
    pub fn exact_end(&self, number: u16) -> Vni {
        self.made_by(Vni::exact, number)
    }

    fn made_by(&self, make: Make, number: u16) -> Vni {
        let (memory, bell_receiver) = self.own(number);
        let mut vni = make(number, memory, bell_receiver);
        self.peers_of(number).into_iter().for_each(|peer| vni.add(peer).unwrap());
        vni.settle();
        vni
    }

    /// Makes the switch of node `number`.
    pub fn switch(&self, number: u16) -> Switch {
        Switch::new(number, Lookup::new(Claims::of(self.lines.clone())))
    }
}

type Make = fn(u16, (NodeMemory, Pool), OwnedFd) -> Vni;

/// Listens at `path`, as a daemon does for an endpoint.
pub fn listen(path: &Path, kind: SocketType) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&listener, 4).unwrap();
    listener
}

/// Returns a frame that carries its number; its length follows from the number.
pub fn frame(to: u16, from: u16, number: usize) -> Vec<u8> {
    let len = [60, 100, 700, 1514, 4000][number % 5] + number % 7;
    let mut frame = [&mac(to)[..], &mac(from), &[0x88, 0xb5], &number.to_le_bytes()].concat();
    frame.extend((22..len).map(|i| i.wrapping_mul(37).wrapping_add(number).to_le_bytes()[0]));
    frame
}

/// Returns the frames that have reached a node.
pub fn received(vni: &mut Vni) -> Vec<Vec<u8>> {
    let mut came = Vec::new();
    for _ in 0..16 {
        vni.wake();
        vni.receive(|incoming| {
            let mut bytes = vec![0; incoming.len()];
            incoming.copy_to(&mut bytes).expect("nothing was taken back");
            came.push(bytes);
        });
    }
    came
}
