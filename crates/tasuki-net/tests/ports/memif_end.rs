//! A program with a memif on a VNI.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tasuki_net::endpoint::memif::Memif;
use tasuki_net::endpoint::memif::control::Terms;
use tasuki_net::endpoint::{Bridge, Connection as _, Parts};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::vni::Vni;

use super::{End, Lost, Rest};
use crate::memif_client::{Client, Shape};
use crate::memif_port::{Node, SECRET, listen};
use crate::net::any_readable;

/// A quarter of its ring holds the frames of one turn: 32 frames of each of four nodes, in five buffers each.
const SHAPE: Shape = Shape { log2: 12, buffer: 2048 };

pub struct MemifEnd {
    node: Node,
    client: Client,
    listener: OwnedFd,
    folder: tempfile::TempDir,
}

/// The parts that a daemon keeps, and the client.
struct Kept {
    parts: Parts,
    client: Client,
    listener: OwnedFd,
    folder: tempfile::TempDir,
}

fn node(listener: &OwnedFd, vni: Vni, switch: Switch) -> Node {
    let listener = listener.try_clone().expect("a descriptor is left");
    let terms = Terms::new(0, SECRET, "a test").expect("a secret");
    Bridge::new(Box::new(Memif::new(listener, terms).expect("descriptors are left")), vni, switch)
}

impl MemifEnd {
    pub fn new(vni: Vni, switch: Switch) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("memif.sock");
        let listener = listen(&path);
        let mut node = node(&listener, vni, switch);
        let client = Client::connect(&path, SHAPE, SECRET, || {
            node.rest(Duration::ZERO);
            node.turn();
        });
        MemifEnd { node, client, listener, folder }
    }
}

impl End for MemifEnd {
    fn send(&mut self, frame: &[u8]) -> bool {
        self.client.send(frame)
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.client.was_rung();
        self.client.receive()
    }

    fn turn(&mut self) -> usize {
        self.node.rest(Duration::ZERO);
        self.node.turn()
    }

    fn arm(&mut self) -> Armed {
        self.node.arm()
    }

    fn is_woken(&self, within: Duration) -> bool {
        any_readable(&[self.node.bell().expect("it is ready"), self.node.source().expect("nothing waits")], within)
    }

    fn lost(&self) -> Lost {
        Lost::of(self.node.dropped)
    }

    fn vni(&mut self) -> &mut Vni {
        self.node.vni()
    }

    fn end(mut self: Box<Self>, told: bool) -> Box<dyn Rest> {
        let parts = self.node.end.parts().expect("descriptors are left").expect("it is connected");
        if told {
            self.node.finish();
        }
        Box::new(Kept { parts, client: self.client, listener: self.listener, folder: self.folder })
    }
}

impl Rest for Kept {
    fn succeed(self: Box<Self>, vni: Vni, switch: Switch) -> Box<dyn End> {
        let Kept { parts, client, listener, folder } = *self;
        let mut node = node(&listener, vni, switch);
        node.end.go_on(parts).expect("parts of a client");
        Box::new(MemifEnd { node, client, listener, folder })
    }
}
