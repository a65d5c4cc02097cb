//! A namespace on a VNI. Its program is connected like a virtual machine: by a TAP of its own, and a bridge between
//! that and the node's TAP, so that frames pass unchanged, with their tags.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use tasuki_net::endpoint::Bridge;
use tasuki_net::endpoint::tap::Tap;
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::vni::Vni;
use tasuki_tap::device::Before;

use super::{End, Lost, Rest};
use crate::net::any_readable;
use crate::place::Place;

/// Frames that the program may send ahead of the node: the kernel keeps up to 500.
const AHEAD: u64 = 400;

pub struct TapEnd {
    node: Bridge<Tap>,
    rest: Kept,
}

struct Kept {
    /// A copy of the node's TAP.
    tap: OwnedFd,
    program: OwnedFd,
    /// Number of frames that the program has sent.
    ahead: u64,
    _place: Place,
}

impl TapEnd {
    pub fn new(vni: Vni, switch: Switch) -> Option<Self> {
        let place = Place::new("ports");
        // The kernel must send no frames of its own.
        let quiet = place.within(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        assert!(quiet.is_ok() || !std::fs::exists("/proc/sys/net/ipv6").expect("it can be looked at"));
        if !place.ip(&["link", "add", "bridge0", "type", "bridge", "mcast_snooping", "0"]) {
            println!("skipped: the kernel has no bridge");
            return None;
        }
        let [node, program] = [("nic0", Before::Offload), ("program0", Before::Nothing)]
            .map(|(name, before)| place.tap(name, None, before));
        for (name, what) in [("bridge0", None), ("nic0", Some("bridge0")), ("program0", Some("bridge0"))] {
            let master = what.map_or(vec![], |bridge| vec!["master", bridge]);
            // The longest frame of the suite, and another tag.
            assert!(place.ip(&[&["link", "set", name, "up", "mtu", "9100"], &master[..]].concat()), "{name} is set up");
        }
        let tap = node.device.try_clone().expect("a descriptor is left");
        let rest = Kept { tap, program: program.device, ahead: 0, _place: place };
        let mut end = TapEnd { node: Bridge::new(Box::new(Tap::new(node.device)), vni, switch), rest };
        // A bridge forwards once its ports are ready: send until a frame gets through.
        let start = Instant::now();
        while end.node.dropped.not_own == 0 {
            assert!(start.elapsed() < super::PATIENCE, "no frame gets through a bridge");
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
        let ends = [self.node.bell().expect("it is ready"), self.node.source().expect("its interface is there")];
        any_readable(&ends, within)
    }

    fn lost(&self) -> Lost {
        let dropped = self.node.dropped;
        assert_eq!((dropped.refused, dropped.too_late), (0, 0));
        Lost {
            no_room: dropped.no_room,
            nobody: dropped.nobody,
            not_own: dropped.not_own,
            forged: dropped.forged,
            ..Lost::default()
        }
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

impl Rest for Kept {
    fn succeed(self: Box<Self>, vni: Vni, switch: Switch) -> Box<dyn End> {
        let tap = self.tap.try_clone().expect("a descriptor is left");
        Box::new(TapEnd { node: Bridge::new(Box::new(Tap::new(tap)), vni, switch), rest: *self })
    }
}
