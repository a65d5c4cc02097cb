//! A namespace on a VNI, by a TAP or by a packet socket. Its program is connected like a virtual machine: by a TAP of its
//! own, and a bridge between that and the node's interface, so that frames pass unchanged, with their tags.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use tasuki_net::endpoint::packet::Packet;
use tasuki_net::endpoint::tap::Tap;
use tasuki_net::endpoint::{Bridge, Endpoint};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::vni::Vni;
use tasuki_shm::line::Claims;
use tasuki_shm::vni::directory::{Directory, Lookup};
use tasuki_tap::device::Before;
use tasuki_tap::namespace::Namespace;
use tasuki_tap::packet;

use super::{End, Lost, Rest, is_woken};
use crate::memif::port::{directory_memory, mac};
use crate::net::Net;
use crate::place::Place;
use tasuki_testing::PATIENCE;

/// Frames that the program may send ahead of the node: the kernel keeps up to 500.
const AHEAD: u64 = 400;

pub struct TapEnd {
    node: Bridge,
    rest: Kept,
}

/// Opens the node's interface.
type Open = fn(OwnedFd) -> Box<dyn Endpoint>;

struct Kept {
    /// A copy of the node's TAP or packet socket.
    fd: OwnedFd,
    open: Open,
    program: OwnedFd,
    /// Number of frames that the program has sent.
    ahead: u64,
    _place: Place,
}

impl TapEnd {
    /// Makes one with a TAP.
    pub fn with_tap(vni: Vni, switch: Switch) -> Option<Self> {
        Self::new(vni, switch, |fd| Box::new(Tap::new(fd)), |place| place.tap("nic0", None, Before::Offload).device)
    }

    /// Makes one with a packet socket, at one end of a pair of interfaces.
    pub fn with_packets(vni: Vni, switch: Switch) -> Option<Self> {
        Self::new(
            vni,
            switch,
            |fd| Box::new(Packet::new(fd)),
            |place| {
                assert!(place.ip(&["link", "add", "nic0", "type", "veth", "peer", "name", "nic1"]), "a pair is made");
                assert!(place.ip(&["link", "set", "nic1", "up", "mtu", "9100"]), "it is set up");
                packet::open(&Namespace::named(&place.0), "nic1").expect("root opens a packet socket")
            },
        )
    }

    fn new(vni: Vni, switch: Switch, open: Open, make: impl FnOnce(&Place) -> OwnedFd) -> Option<Self> {
        let place = Place::new("ports");
        // The kernel must send no frames of its own.
        let quiet = place.within(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        assert!(quiet.is_ok() || !std::fs::exists("/proc/sys/net/ipv6").expect("it can be looked at"));
        if !place.ip(&["link", "add", "bridge0", "type", "bridge", "mcast_snooping", "0"]) {
            println!("skipped: the kernel has no bridge");
            return None;
        }
        let node = make(&place);
        let program = place.tap("program0", None, Before::Nothing);
        for (name, what) in [("bridge0", None), ("nic0", Some("bridge0")), ("program0", Some("bridge0"))] {
            let master = what.map_or(vec![], |bridge| vec!["master", bridge]);
            // The longest frame of the suite, and another tag.
            assert!(place.ip(&[&["link", "set", name, "up", "mtu", "9100"], &master[..]].concat()), "{name} is set up");
        }
        let fd = node.try_clone().expect("a descriptor is left");
        let rest = Kept { fd, open, program: program.device, ahead: 0, _place: place };
        let mut end = TapEnd { node: Bridge::new(open(node), vni, switch), rest };
        // A bridge forwards once its ports are ready: send until a frame gets through.
        let start = Instant::now();
        while end.node.dropped.not_own == 0 {
            assert!(start.elapsed() < PATIENCE, "no frame gets through a bridge");
            let _ =
                rustix::io::write(&end.rest.program, &[[2, 9, 9, 9, 9, 9, 2, 9, 9, 9, 9, 8, 0x88, 0xb5]; 5].concat());
            end.node.rest(Duration::from_millis(1));
            end.node.turn();
        }
        while end.node.turn() > 0 {}
        end.node.dropped = Default::default();
        Some(end)
    }

    fn read(&self) -> u64 {
        let dropped = self.node.dropped;
        self.node.taken + dropped.no_room + dropped.nobody + dropped.not_own
    }
}

impl End for TapEnd {
    fn send(&mut self, frame: &[u8]) -> bool {
        if self.rest.ahead - self.read() >= AHEAD {
            return false;
        }
        let sent = rustix::io::write(&self.rest.program, frame) == Ok(frame.len());
        self.rest.ahead += u64::from(sent);
        sent
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        let (mut came, mut room) = (Vec::new(), vec![0; 1 << 16]);
        while let Ok(len) = rustix::io::read(&self.rest.program, &mut room[..]) {
            came.push(room[..len].to_vec());
        }
        came
    }

    fn turn(&mut self) -> usize {
        self.node.wake();
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
        if told {
            self.node.finish();
        }
        let read = self.read();
        let mut rest = self.rest;
        rest.ahead -= read;
        Box::new(rest)
    }
}

#[test]
fn what_the_kernel_drops_for_a_slow_worker_is_counted() {
    if !crate::place::is_possible() {
        return;
    }
    let switch = Switch::new(0, Lookup::new(Claims::of(directory_memory())));
    let Some(mut end) = TapEnd::with_packets(Net::of(1).take(0), switch) else { return };
    let frame = [[2, 9, 9, 9, 9, 9, 2, 9, 9, 9, 9, 8, 0x88, 0xb5].as_slice(), &[0; 9000]].concat();
    let start = Instant::now();
    while end.node.dropped.by_socket == 0 {
        assert!(start.elapsed() < PATIENCE, "the socket has room without end");
        (0..100).for_each(|_| _ = rustix::io::write(&end.rest.program, &frame));
        end.node.tick(start);
    }
    let dropped = end.node.dropped.by_socket;
    while end.node.turn() > 0 {}
    end.node.tick(start);
    assert!(end.node.dropped.by_socket >= dropped && end.node.dropped.not_own > 0, "{:?}", end.node.dropped);
}

/// Its kernel asks by broadcast for neighbours that are not there.
#[test]
fn a_broadcast_of_a_node_that_is_alone_is_no_lost_frame() {
    if !crate::place::is_possible() {
        return;
    }
    let lines = directory_memory();
    Directory::new(lines.clone()).add(mac(0), 0).expect("room");
    let switch = Switch::new(0, Lookup::new(Claims::of(lines)));
    let Some(mut end) = TapEnd::with_packets(Net::of(1).take(0), switch) else { return };
    let frame = [[0xff; 6].as_slice(), &mac(0)[..], &[0x88, 0xb5], &[0; 46]].concat();
    rustix::io::write(&end.rest.program, &frame).expect("room");
    let start = Instant::now();
    while end.node.taken == 0 {
        assert!(start.elapsed() < PATIENCE && end.node.dropped.sum() == 0, "{:?}", end.node.dropped);
        end.node.turn();
    }
}

impl Rest for Kept {
    fn succeed(self: Box<Self>, vni: Vni, switch: Switch) -> Box<dyn End> {
        let fd = self.fd.try_clone().expect("a descriptor is left");
        Box::new(TapEnd { node: Bridge::new((self.open)(fd), vni, switch), rest: *self })
    }
}
