//! How the namespaces of a VNI reach each other without their workers: a frame from one to another is passed on by the kernel, out of the
//! sender's call into the receiver's namespace, copied by nobody.
//!
//! ```text
//!   namespace A                     a room of the daemon's own                  namespace B
//!   ┌───────────┐        ┌───────────────────────────────────────────┐        ┌───────────┐
//!   │    lan ───┼─ veth ─┼─ leg1 ─ sorter ─ is it for B? ────────────┼─ veth ─┼─▶ lan     │
//!   │           │        │              └── else ─▶ tap1 ─▶ worker A │        │           │
//!   │       ◀───┼─ veth ─┼──────────── forwarder ─ tap1 ◀─ worker A  │        │           │
//!   └───────────┘        └───────────────────────────────────────────┘        └───────────┘
//! ```
//!
//! A namespace has one end of a pair; the other end, its *leg*, is in a network namespace without a name, with a TAP beside it whose descriptor
//! the node's worker has. Whatever the [sorter](Program::sorter) does not know goes there: broadcasts, what is for a node that is no
//! namespace, and what is sent in another's name.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use crate::device::{self, Before};
use crate::interface::Interface;
use crate::namespace::{Namespace, Room};
use crate::program::{Program, Sender, Ways};
use crate::{Address, TapError, is_name};

/// Namespaces of a VNI at most, and some that are going.
const WAYS: u32 = 2048;

/// Bytes of a frame behind its header that a TAP takes, and a pair: whatever a namespace is set to, its leg takes it.
const TAP_MTU: u32 = 65_521;
const PAIR_MTU: u32 = 65_535;

/// What the namespaces of one VNI hang together by.
#[derive(Debug)]
pub struct Shortcut {
    room: Room,
    ways: Ways,
    /// Legs are numbered.
    next: u32,
}

/// What one namespace hangs on. It stays when this is dropped, for a worker may go on with it; it goes by [`Shortcut::remove`], with the
/// namespace, or when nobody has the room any more.
#[derive(Debug)]
pub struct Leg {
    /// Our end of its pair,
    pair: Interface,
    /// and what stands beside it.
    tap: Interface,
    sender: Sender,
    /// The address that frames for it have.
    mac: [u8; 6],
}

/// Frames of a namespace that took no worker's time, segments of up to 64 KiB counted as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Crossed {
    /// Those that it sent,
    pub sent: u64,
    /// and those that it got.
    pub received: u64,
}

fn no_program(errno: Errno) -> TapError {
    TapError::NoProgram(errno.into())
}

impl Shortcut {
    fn in_room(room: Room) -> Result<Self, TapError> {
        Ok(Shortcut { room, ways: Ways::new(WAYS).map_err(no_program)?, next: 0 })
    }

    /// One with nobody on it.
    pub fn new() -> Result<Self, TapError> {
        let room = Room::new()?;
        // Nothing that lives there is to speak of itself: what a leg of the room's sent would reach a namespace. Without IPv6 there is no such file.
        let quiet = || Ok(std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        let _ = room.within(quiet)?;
        Self::in_room(room)
    }

    /// The one that a daemon before this one made, by the TAP of one of its legs. It knows of no leg until each was [adopted](Self::adopt);
    /// until then they go on as they did.
    pub fn around(device: &OwnedFd) -> Result<Self, TapError> {
        Self::in_room(Room::of(device::namespace_of(device.as_fd()).map_err(TapError::of)?))
    }

    /// Gives the namespace an interface `name` with the station address `mac`, and a leg; and returns what its worker reads and writes.
    pub fn connect(
        &mut self,
        place: &Namespace,
        name: &str,
        address: Option<Address>,
        mac: [u8; 6],
    ) -> Result<(Leg, OwnedFd), TapError> {
        if !is_name(name) {
            return Err(TapError::Name(name.to_owned()));
        }
        let made = match self.plug(place, name, mac) {
            // Perhaps by one of ours whose worker died while no daemon was there.
            Err(TapError::Taken(_)) if self.sweep()? => self.plug(place, name, mac),
            made => made,
        };
        let (leg, device) = made?;
        let set_up = place.within(|| {
            let interface = Interface::find(name)?;
            interface.set_mac(mac)?;
            if let Some(address) = address {
                interface.add_address(address)?;
            }
            interface.up()
        });
        match set_up {
            Ok(()) => Ok((leg, device)),
            Err(error) => {
                self.remove(leg);
                Err(error)
            }
        }
    }

    fn plug(&mut self, place: &Namespace, name: &str, mac: [u8; 6]) -> Result<(Leg, OwnedFd), TapError> {
        let there = place.open()?;
        let number = self.free_number()?;
        let (pair, tap, device) = self.room.within(|| {
            let tap_name = format!("tap{number}");
            let device = device::open(&tap_name, Before::Offload)?;
            let tap = Interface::find(&tap_name)?;
            let pair = Interface::create_pair(&format!("leg{number}"), PAIR_MTU, name, there.as_fd())?;
            Ok((pair, tap, device))
        })?;
        self.next = number + 1;
        let made = self.start(pair, tap, mac)?;
        Ok((made, device))
    }

    /// Switches a leg on; or there is none.
    fn start(&self, pair: Interface, tap: Interface, mac: [u8; 6]) -> Result<Leg, TapError> {
        let leg = Leg { pair, tap, sender: Sender::new().map_err(no_program)?, mac };
        let started = leg
            .tap
            .set_mtu(TAP_MTU)
            .and_then(|()| self.sort(&leg))
            .and_then(|()| leg.tap.up())
            .and_then(|()| leg.pair.up());
        match started {
            Ok(()) => Ok(leg),
            Err(error) => {
                self.remove(leg);
                Err(error)
            }
        }
    }

    /// Says what becomes of what comes in at a leg, and that its namespace can be reached.
    fn sort(&self, leg: &Leg) -> Result<(), TapError> {
        // What its worker writes has addresses that this interface is asked about: the kernel sees which frames are whose.
        leg.tap.set_mac(leg.mac)?;
        let forwarder = Program::forwarder(leg.pair.index()).map_err(no_program)?;
        leg.tap.hand_to(forwarder.as_fd())?;
        let sorter = Program::sorter(leg.mac, &leg.sender, &self.ways, leg.tap.index()).map_err(no_program)?;
        leg.pair.hand_to(sorter.as_fd())?;
        self.open_way(leg)
    }

    fn open_way(&self, leg: &Leg) -> Result<(), TapError> {
        let opened = self.ways.insert(leg.mac, leg.pair.index()).and_then(|()| leg.sender.allow(true));
        opened.map_err(no_program)
    }

    fn close_way(&self, leg: &Leg) -> Result<(), TapError> {
        let closed = leg.sender.allow(false).and_then(|()| self.ways.remove(leg.mac));
        closed.map_err(no_program)
    }

    fn free_number(&self) -> Result<u32, TapError> {
        let next = self.next;
        self.room.within(|| {
            let is_free = |number: &u32| Interface::find(&format!("leg{number}")).is_err();
            (next..WAYS).chain(0..next.min(WAYS)).find(is_free).ok_or(TapError::Crowded)
        })
    }

    /// Takes away the legs whose TAPs nobody has; says whether there were any.
    fn sweep(&self) -> Result<bool, TapError> {
        self.room.within(|| {
            let mut swept = false;
            for number in 0..WAYS {
                let Ok(leg) = Interface::find(&format!("leg{number}")) else { continue };
                if Interface::find(&format!("tap{number}")).is_err() {
                    leg.delete()?;
                    swept = true;
                }
            }
            Ok(swept)
        })
    }

    /// A leg that a daemon before this one made, by its TAP.
    pub fn adopt(&mut self, device: &OwnedFd, mac: [u8; 6]) -> Result<Leg, TapError> {
        let room = Room::of(device::namespace_of(device.as_fd()).map_err(TapError::of)?);
        let name = device::name_of(device.as_fd()).map_err(TapError::of)?;
        let number: Option<u32> = name.strip_prefix("tap").and_then(|number| number.parse().ok());
        let number = number.filter(|_| room.is(&self.room)).ok_or_else(|| TapError::NoLeg(name.clone()))?;
        let (pair, tap) =
            self.room.within(|| Ok((Interface::find(&format!("leg{number}"))?, Interface::find(&name)?)))?;
        let leg = Leg { pair, tap, sender: Sender::new().map_err(no_program)?, mac };
        self.next = self.next.max(number + 1);
        self.sort(&leg)?;
        Ok(leg)
    }

    /// Its namespace has another address from now on.
    pub fn set_mac(&self, leg: &mut Leg, mac: [u8; 6]) -> Result<(), TapError> {
        if leg.mac == mac {
            return Ok(());
        }
        self.close_way(leg)?;
        leg.mac = mac;
        self.sort(leg)
    }

    /// Whether all frames of a namespace, in both directions, take the long way from now on, through its worker.
    pub fn set_detour(&self, leg: &Leg, detour: bool) -> Result<(), TapError> {
        if detour { self.close_way(leg) } else { self.open_way(leg) }
    }

    /// How many frames took it.
    pub fn crossed(&self, leg: &Leg) -> Crossed {
        let received = self.ways.get(leg.mac).map_or(0, |way| way.frames);
        Crossed { sent: leg.sender.frames(), received }
    }

    /// Takes the namespace's interface away.
    pub fn remove(&self, leg: Leg) {
        // What is not there any more is as it should be.
        let _ = self.close_way(&leg);
        let _ = leg.pair.delete();
    }
}

impl Leg {
    /// Whether its namespace has it still. When it has not, its TAP is taken away too, so that whoever reads it sees.
    pub fn is_there(&self) -> bool {
        let is_there = self.pair.is_there();
        if !is_there {
            let _ = self.tap.delete();
        }
        is_there
    }
}
