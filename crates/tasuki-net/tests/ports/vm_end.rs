//! A virtual machine on a VNI.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tasuki_net::endpoint::guest::Guest;
use tasuki_net::endpoint::{Bridge, Connection as _, Parts};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::vni::Vni;

use super::{End, Lost, Rest};
use crate::machine::{EVENT_IDX, MRG_RXBUF, Machine, PROTOCOL, VERSION_1};
use crate::net::any_readable;

pub struct VmEnd {
    node: Bridge<Guest>,
    machine: Machine,
    listener: OwnedFd,
    folder: tempfile::TempDir,
}

/// The parts that a daemon keeps, and the machine.
struct Kept {
    parts: Parts,
    machine: Machine,
    listener: OwnedFd,
    folder: tempfile::TempDir,
}

fn node(listener: &OwnedFd, vni: Vni, switch: Switch) -> Bridge<Guest> {
    let listener = listener.try_clone().expect("a descriptor is left");
    Bridge::new(Box::new(Guest::new(listener).expect("descriptors are left")), vni, switch)
}

impl VmEnd {
    pub fn new(vni: Vni, switch: Switch) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vm.sock");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 4).unwrap();
        let mut node = node(&listener, vni, switch);
        let features = VERSION_1 | MRG_RXBUF | EVENT_IDX | PROTOCOL;
        let machine = Machine::start(&path, features, 256, || {
            node.rest(Duration::ZERO);
            node.turn();
        });
        assert!(node.end.is_running(), "{:?}", node.end);
        VmEnd { node, machine, listener, folder }
    }
}

impl End for VmEnd {
    fn send(&mut self, frame: &[u8]) -> bool {
        self.machine.send(frame)
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.machine.was_rung(0);
        self.machine.receive()
    }

    fn turn(&mut self) -> usize {
        self.node.rest(Duration::ZERO);
        self.node.turn()
    }

    fn arm(&mut self) -> Armed {
        self.node.arm()
    }

    fn is_woken(&self, within: Duration) -> bool {
        let ends = [self.node.bell().expect("it is ready"), self.node.source().expect("nothing waits")];
        any_readable(&ends, within)
    }

    fn lost(&self) -> Lost {
        Lost::of(self.node.dropped)
    }

    fn vni(&mut self) -> &mut Vni {
        self.node.vni()
    }

    fn end(mut self: Box<Self>, told: bool) -> Box<dyn Rest> {
        let parts = self.node.end.parts().expect("descriptors are left").expect("it runs");
        if told {
            self.node.finish();
        }
        Box::new(Kept { parts, machine: self.machine, listener: self.listener, folder: self.folder })
    }
}

impl Rest for Kept {
    fn succeed(self: Box<Self>, vni: Vni, switch: Switch) -> Box<dyn End> {
        let Kept { parts, machine, listener, folder } = *self;
        let mut node = node(&listener, vni, switch);
        node.end.go_on(parts).expect("parts of a machine");
        assert!(node.end.is_running(), "{:?}", node.end);
        Box::new(VmEnd { node, machine, listener, folder })
    }
}
