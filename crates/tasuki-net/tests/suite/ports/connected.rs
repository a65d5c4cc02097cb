//! Programs on a VNI that connect to their node's socket: with a memif, or in a virtual machine.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::SocketType;
use tasuki_net::endpoint::guest::Guest;
use tasuki_net::endpoint::memif::Memif;
use tasuki_net::endpoint::memif::control::Terms;
use tasuki_net::endpoint::{Bridge, Connection, Endpoint, Parts};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::vni::Vni;

use super::{End, Lost, Rest, is_woken};
use crate::memif::client::{Client, Shape};
use crate::memif::port::{SECRET, listen};
use crate::vm::{EVENT_IDX, MRG_RXBUF, Machine, PROTOCOL, VERSION_1};

/// A program, and the endpoint to which it connects.
pub trait Program: Sized + 'static {
    type Served: Endpoint + Connection;
    const SOCKET: SocketType;

    fn serve(listener: OwnedFd) -> Self::Served;
    /// Returns whether a program is connected.
    fn is_served(endpoint: &Self::Served) -> bool;
    /// Connects; `turn` gives the node a turn.
    fn connect(path: &Path, turn: impl FnMut()) -> Self;
    fn send(&mut self, frame: &[u8]) -> bool;
    /// Reads all frames, and takes back the ring for them.
    fn receive(&mut self) -> Vec<Vec<u8>>;
}

impl Program for Client {
    type Served = Memif;
    const SOCKET: SocketType = SocketType::SEQPACKET;

    fn serve(listener: OwnedFd) -> Memif {
        Memif::new(listener, Terms::new(0, SECRET, "a test").expect("a secret")).expect("descriptors are left")
    }

    fn is_served(memif: &Memif) -> bool {
        memif.client().is_some()
    }

    /// A quarter of its ring holds the frames of one turn: 32 frames of each of four nodes, in five buffers each.
    fn connect(path: &Path, turn: impl FnMut()) -> Self {
        Client::connect(path, Shape { log2: 12, buffer: 2048 }, SECRET, turn)
    }

    fn send(&mut self, frame: &[u8]) -> bool {
        self.send(frame)
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.was_rung();
        self.receive()
    }
}

impl Program for Machine {
    type Served = Guest;
    const SOCKET: SocketType = SocketType::STREAM;

    fn serve(listener: OwnedFd) -> Guest {
        Guest::new(listener).expect("descriptors are left")
    }

    fn is_served(guest: &Guest) -> bool {
        guest.is_running()
    }

    fn connect(path: &Path, turn: impl FnMut()) -> Self {
        Machine::start(path, VERSION_1 | MRG_RXBUF | EVENT_IDX | PROTOCOL, 256, turn)
    }

    fn send(&mut self, frame: &[u8]) -> bool {
        self.send(frame)
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.was_rung(0);
        self.receive()
    }
}

pub struct Connected<P: Program> {
    node: Bridge<P::Served>,
    program: P,
    listener: OwnedFd,
    folder: tempfile::TempDir,
}

/// The parts that a daemon keeps, and the program.
struct Kept<P> {
    parts: Parts,
    program: P,
    listener: OwnedFd,
    folder: tempfile::TempDir,
}

fn node<P: Program>(listener: &OwnedFd, vni: Vni, switch: Switch) -> Bridge<P::Served> {
    Bridge::new(Box::new(P::serve(listener.try_clone().expect("a descriptor is left"))), vni, switch)
}

impl<P: Program> Connected<P> {
    pub fn new(vni: Vni, switch: Switch) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listener = listen(&path, P::SOCKET);
        let mut node = node::<P>(&listener, vni, switch);
        let program = P::connect(&path, || {
            node.rest(Duration::ZERO);
            node.turn();
        });
        assert!(P::is_served(&node.endpoint));
        Connected { node, program, listener, folder }
    }
}

impl<P: Program> End for Connected<P> {
    fn send(&mut self, frame: &[u8]) -> bool {
        self.program.send(frame)
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.program.receive()
    }

    fn turn(&mut self) -> usize {
        self.node.rest(Duration::ZERO);
        self.node.turn()
    }

    fn arm(&mut self) -> Armed {
        self.node.arm()
    }

    fn is_woken(&self, within: Duration) -> bool {
        is_woken(&self.node, within)
    }

    fn lost(&self) -> Lost {
        Lost::of(self.node.dropped)
    }

    fn vni(&mut self) -> &mut Vni {
        self.node.vni()
    }

    fn end(mut self: Box<Self>, told: bool) -> Box<dyn Rest> {
        let parts = self.node.endpoint.parts().expect("descriptors are left").expect("it is connected");
        if told {
            self.node.finish();
        }
        Box::new(Kept { parts, program: self.program, listener: self.listener, folder: self.folder })
    }
}

impl<P: Program> Rest for Kept<P> {
    fn succeed(self: Box<Self>, vni: Vni, switch: Switch) -> Box<dyn End> {
        let Kept { parts, program, listener, folder } = *self;
        let mut node = node::<P>(&listener, vni, switch);
        node.endpoint.go_on(parts).expect("parts of a program");
        assert!(P::is_served(&node.endpoint));
        Box::new(Connected { node, program, listener, folder })
    }
}
