//! How the namespaces of a VNI reach each other without their workers: a frame from one to another is passed on by the kernel, out of the
//! sender's call into the receiver's namespace, copied by nobody.
//!
//! ```text
//!   namespace A                     the VNI's hub namespace                          namespace B
//!   ┌───────────┐        ┌───────────────────────────────────────────┐        ┌───────────┐
//!   │    lan ───┼─ veth ─┼─ leg1 ─ sorter ─ is it for B? ────────────┼─ veth ─┼─▶ lan     │
//!   │           │        │              └── else ─▶ tap1 ─▶ worker A │        │           │
//!   │       ◀───┼─ veth ─┼──────────── forwarder ─ tap1 ◀─ worker A  │        │           │
//!   └───────────┘        └───────────────────────────────────────────┘        └───────────┘
//! ```
//!
//! A namespace has one end of a pair; the other end, its *veth end*, is in a network namespace without a name, the *hub namespace*, with a TAP beside it whose
//! descriptor the node's worker has. Whatever the [sorter](Program::sorter) does not know goes there: broadcasts, what is for a node that is no
//! namespace, and what is sent in another's name.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use crate::device;
use crate::interface::Interface;
use crate::namespace::{Namespace, Unnamed};
use crate::program::{Program, Sender, Ways};
use crate::{Address, TapError, is_name};

/// Namespaces of a VNI at most, and some that are going.
const WAYS: u32 = 2048;

/// Bytes of a frame behind its header that a TAP takes, and a pair: whatever a namespace is set to, its veth end takes it.
const TAP_MTU: u32 = 65_521;
const PAIR_MTU: u32 = 65_535;

/// What interfaces of a hub namespace are called, with a number behind.
const VETH_END: &str = "veth_end";
const TAP: &str = "tap";

/// What the namespaces of one VNI hang together by.
#[derive(Debug)]
pub struct Shortcut {
    hub: Unnamed,
    ways: Arc<Ways>,
    /// Veth ends are numbered.
    next: u32,
}

/// What one namespace hangs on. It stays when this is dropped, for a worker may go on with it; it goes by [`remove`](Self::remove), with the
/// namespace, or when nobody has the hub namespace any more.
#[derive(Debug)]
pub struct VethEnd {
    /// Our end of its pair,
    pair: Interface,
    /// and what stands beside it.
    tap: Interface,
    sender: Sender,
    /// Those of its VNI.
    ways: Arc<Ways>,
    /// The address that frames for it have.
    mac: [u8; 6],
    /// What came before its way was closed last.
    received: u64,
    is_open: bool,
    /// Whether it ever may be: not where its node may not take the shortcut, nor away from the others of its VNI.
    may_open: bool,
}

/// Frames of a namespace that took no worker's time, segments of up to 64 KiB counted as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Crossed {
    /// Those that it sent,
    pub sent: u64,
    /// and those that it got.
    pub received: u64,
}

/// The veth end of this number in the caller's network namespace, if it is there,
fn veth_end_at(number: u32) -> Result<Option<Interface>, TapError> {
    Interface::if_there(&format!("{VETH_END}{number}"))
}

/// and the TAP beside it.
fn tap_at(number: u32) -> Result<Option<Interface>, TapError> {
    Interface::if_there(&format!("{TAP}{number}"))
}

fn no_program(errno: Errno) -> TapError {
    TapError::NoProgram(errno.into())
}

impl Shortcut {
    fn at(hub: Unnamed) -> Result<Self, TapError> {
        Ok(Shortcut { hub, ways: Arc::new(Ways::new(WAYS).map_err(no_program)?), next: 0 })
    }

    /// One with nobody on it.
    pub fn new() -> Result<Self, TapError> {
        let hub = Unnamed::new()?;
        // Nothing there is to speak of itself: what a veth end sent would reach a namespace. Without IPv6 there is no such file.
        let quiet = || Ok(std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        let _ = hub.within(quiet)?;
        Self::at(hub)
    }

    /// The one that a daemon before this one made, by the TAP of one of its veth ends. It knows of no veth end until each was [adopted](Self::adopt);
    /// until then they go on as they did. Around another TAP there is none: where that is, others may rule.
    pub fn around(device: &OwnedFd) -> Result<Self, TapError> {
        Self::at(Found::by(device)?.hub)
    }

    /// Gives the namespace an interface `name` with the station address `mac`, and a veth end; and returns what its worker reads and writes.
    pub fn connect(
        &mut self,
        place: &Namespace,
        name: &str,
        address: Option<Address>,
        mac: [u8; 6],
    ) -> Result<(VethEnd, OwnedFd), TapError> {
        if !is_name(name) {
            return Err(TapError::Name(name.to_owned()));
        }
        let made = match self.plug(place, name, mac) {
            // Perhaps by one of ours whose worker died while no daemon was there.
            Err(TapError::Taken(_)) if self.sweep()? => self.plug(place, name, mac),
            made => made,
        };
        let (veth_end, device) = made?;
        let set_up = place.within(|| {
            let interface = Interface::find(name)?;
            interface.set_mac(mac)?;
            if let Some(address) = address {
                interface.add_address(address)?;
            }
            interface.up()
        });
        match set_up {
            Ok(()) => Ok((veth_end, device)),
            Err(error) => {
                veth_end.remove();
                Err(error)
            }
        }
    }

    fn plug(&mut self, place: &Namespace, name: &str, mac: [u8; 6]) -> Result<(VethEnd, OwnedFd), TapError> {
        let there = place.open()?;
        let number = self.free_number()?;
        let sender = Sender::new().map_err(no_program)?;
        let (pair, tap, device) = self.hub.within(|| {
            let tap_name = format!("{TAP}{number}");
            let device = device::open_beside_veth_end(&tap_name)?;
            let tap = Interface::find(&tap_name)?;
            let pair = Interface::create_pair(&format!("{VETH_END}{number}"), PAIR_MTU, name, there.as_fd())?;
            Ok((pair, tap, device))
        })?;
        self.next = number + 1;
        let mut veth_end = self.veth_end(pair, tap, sender, mac, true);
        match veth_end.start() {
            Ok(()) => Ok((veth_end, device)),
            Err(error) => {
                veth_end.remove();
                Err(error)
            }
        }
    }

    fn veth_end(&self, pair: Interface, tap: Interface, sender: Sender, mac: [u8; 6], may_open: bool) -> VethEnd {
        VethEnd { pair, tap, sender, ways: Arc::clone(&self.ways), mac, received: 0, is_open: false, may_open }
    }

    fn free_number(&self) -> Result<u32, TapError> {
        let next = self.next;
        self.hub.within(|| {
            for number in (next..WAYS).chain(0..next.min(WAYS)) {
                // Of a veth end that went with its namespace the TAP may be there still.
                if veth_end_at(number)?.is_none() && tap_at(number)?.is_none() {
                    return Ok(number);
                }
            }
            Err(TapError::Crowded)
        })
    }

    /// Takes away the veth ends whose TAPs nobody has; says whether there were any.
    pub fn sweep(&self) -> Result<bool, TapError> {
        self.hub.within(|| {
            let mut swept = false;
            for number in 0..WAYS {
                let Some(veth_end) = veth_end_at(number)? else { continue };
                if tap_at(number)?.is_none() {
                    veth_end.delete()?;
                    swept = true;
                }
            }
            Ok(swept)
        })
    }

    /// A veth end that a daemon before this one made, by its TAP: with programs that look into this one's table. Its frames all go by its worker if it
    /// may not take the shortcut, or hangs elsewhere than the others do.
    pub fn adopt(&mut self, device: &OwnedFd, mac: [u8; 6], may: bool) -> Result<VethEnd, TapError> {
        let Found { hub, number, pair, tap } = Found::by(device)?;
        let is_here = hub.is(&self.hub);
        let mut veth_end = self.veth_end(pair, tap, Sender::new().map_err(no_program)?, mac, may && is_here);
        if is_here {
            self.next = self.next.max(number + 1);
        }
        veth_end.sort()?;
        veth_end.set_detour(false)?;
        Ok(veth_end)
    }
}

/// A veth end, as it is found by its TAP.
struct Found {
    hub: Unnamed,
    number: u32,
    pair: Interface,
    tap: Interface,
}

impl Found {
    fn by(device: &OwnedFd) -> Result<Self, TapError> {
        let (name, is_beside_veth_end) = device::identity(device.as_fd()).map_err(TapError::of)?;
        let number = name.strip_prefix(TAP).filter(|_| is_beside_veth_end).and_then(|number| number.parse().ok());
        let number: u32 = number.ok_or_else(|| TapError::NoVethEnd(name.clone()))?;
        let hub = Unnamed::of(device::namespace_of(device.as_fd()).map_err(TapError::of)?);
        let (pair, tap) = hub.within(|| {
            let tap = Interface::find(&name)?;
            match veth_end_at(number)? {
                Some(pair) => Ok((pair, tap)),
                // It went with its namespace: whoever reads the TAP is to see that.
                None => tap.delete().and(Err(TapError::NoVethEnd(name.clone()))),
            }
        })?;
        Ok(Found { hub, number, pair, tap })
    }
}

/// Takes away the veth end beside this TAP, if it is a veth end's, with its namespace's interface, and the TAP: also where it could not be
/// [adopted](Shortcut::adopt).
pub fn remove_beside(device: &OwnedFd) {
    if let Ok(found) = Found::by(device) {
        // What is not there any more is as it should be.
        let _ = found.pair.delete();
        let _ = found.tap.delete();
    }
}

impl VethEnd {
    fn start(&mut self) -> Result<(), TapError> {
        self.tap.set_mtu(TAP_MTU)?;
        self.sort()?;
        self.tap.up()?;
        self.pair.up()?;
        self.set_detour(false)
    }

    /// Says what becomes of what comes in at it: all goes by its worker until its way is open.
    fn sort(&mut self) -> Result<(), TapError> {
        // What its worker writes has addresses that this interface is asked about: the kernel sees which frames are whose.
        self.tap.set_mac(self.mac)?;
        let forwarder = Program::forwarder(self.pair.index()).map_err(no_program)?;
        self.tap.hand_to(forwarder.as_fd())?;
        let sorter = Program::sorter(self.mac, &self.sender, &self.ways, self.tap.index()).map_err(no_program)?;
        self.pair.hand_to(sorter.as_fd())
    }

    fn open(&mut self) -> Result<(), TapError> {
        let opened = self.ways.insert(self.mac, self.pair.index()).and_then(|()| self.sender.allow(true));
        self.is_open = opened.is_ok();
        opened.map_err(no_program)
    }

    fn close(&mut self) -> Result<(), TapError> {
        self.received = self.crossed().received;
        self.is_open = false;
        self.sender.allow(false).and_then(|()| self.ways.remove(self.mac)).map_err(no_program)
    }

    /// Its namespace has another address from now on.
    pub fn set_mac(&mut self, mac: [u8; 6]) -> Result<(), TapError> {
        if self.mac == mac {
            return Ok(());
        }
        let was_open = self.is_open;
        self.close()?;
        self.mac = mac;
        self.sort()?;
        self.set_detour(!was_open)
    }

    /// Whether all frames of its namespace, in both directions, take the long way from now on, through its worker. Those of one that may not
    /// take the shortcut do in any case.
    pub fn set_detour(&mut self, detour: bool) -> Result<(), TapError> {
        match (self.is_open, detour || !self.may_open) {
            (true, true) => self.close(),
            (false, false) => self.open(),
            _ => Ok(()),
        }
    }

    /// How many frames took the shortcut.
    pub fn crossed(&self) -> Crossed {
        let now = if self.is_open { self.ways.get(self.mac).map_or(0, |way| way.frames) } else { 0 };
        Crossed { sent: self.sender.frames(), received: self.received + now }
    }

    /// Whether its namespace has it still.
    pub fn is_there(&self) -> bool {
        self.pair.is_there()
    }

    /// Takes it away, with its namespace's interface, if that is there, and its TAP: whoever reads that sees.
    pub fn remove(mut self) {
        // What is not there any more is as it should be.
        let _ = self.close();
        let _ = self.pair.delete();
        let _ = self.tap.delete();
    }
}
