//! Connects the namespaces of a VNI without their workers: the kernel passes a frame from one to another, out of the
//! sender's call into the receiver's namespace, without a copy.
//!
//! ```text
//!   namespace A                     the VNI's hub namespace                          namespace B
//!   ┌───────────┐        ┌───────────────────────────────────────────┐        ┌───────────┐
//!   │    lan ───┼─ veth ─┼─ veth_end1 ─ sorter ─ is it for B? ───────┼─ veth ─┼─▶ lan     │
//!   │           │        │              └── else ─▶ tap1 ─▶ worker A │        │           │
//!   │       ◀───┼─ veth ─┼──────────── forwarder ─ tap1 ◀─ worker A  │        │           │
//!   └───────────┘        └───────────────────────────────────────────┘        └───────────┘
//! ```
//!
//! A namespace has one end of a veth pair. The other end, its *veth end*, is in a network namespace without a name,
//! the *hub namespace*, beside a TAP whose descriptor the node's worker has. The [sorter](Program::sorter) sends all
//! frames there that it cannot pass on: broadcasts, frames for a node that is no namespace, and frames with another
//! source address than the node's.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use crate::device::{self, Queues};
use crate::interface::Interface;
use crate::namespace::{Namespace, Unnamed};
use crate::program::{Program, Sender, Ways};
use crate::{Settings, TapError, is_name};

/// Most namespaces of a VNI, with some to spare for those being removed.
const WAYS: u32 = 2048;

/// MTU, in bytes behind the header, of a TAP and of a veth end: each the largest possible, so that a veth end takes any
/// MTU of its namespace.
const TAP_MTU: u32 = 65_521;
const PAIR_MTU: u32 = 65_535;

/// Name prefixes of the interfaces in a hub namespace; a number follows.
const VETH_END: &str = "veth_end";
const TAP: &str = "tap";

/// The shortcut of one VNI: its hub namespace and its table of ways.
#[derive(Debug)]
pub struct Shortcut {
    hub: Unnamed,
    ways: Arc<Ways>,
    /// Number of the next veth end.
    next: u32,
}

/// One namespace's connection to the hub. Dropping this keeps the connection, since a worker may still use it. It
/// goes by [`remove`](Self::remove), with the namespace, or when the last holder of the hub namespace is gone.
#[derive(Debug)]
pub struct VethEnd {
    /// Our end of the pair.
    pair: Interface,
    /// The TAP beside it.
    tap: Interface,
    sender: Sender,
    /// The table of its VNI.
    ways: Arc<Ways>,
    /// Destination address of frames for the namespace.
    mac: [u8; 6],
    /// Frames received until its way was last closed.
    received: u64,
    is_open: bool,
    /// Whether its way may ever be open: not if it is in another hub namespace than its VNI's others.
    may_open: bool,
}

/// Frames of a namespace that bypassed the workers; a GSO packet of up to 64 KiB counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Crossed {
    /// Number of frames sent.
    pub sent: u64,
    /// Number of frames received.
    pub received: u64,
}

/// Frames that the kernel dropped between a namespace and its worker, since the namespace was connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lost {
    /// Number of frames that the namespace sent: the TAP had no room for more.
    pub sent: u64,
    /// Number of frames for the namespace that the veth pair did not take: the namespace's interface was down, or its MTU
    /// is smaller. Linux before 6.11 counts no frame for an interface that is down. Frames for the namespace's own address
    /// do not go through the pair, and are not in it.
    pub received: u64,
}

/// Finds the veth end of this number in the caller's network namespace.
fn veth_end_at(number: u32) -> Result<Option<Interface>, TapError> {
    Interface::if_there(&format!("{VETH_END}{number}"))
}

/// Finds the TAP of this number in the caller's network namespace.
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

    /// Creates a hub namespace without veth ends.
    pub fn new() -> Result<Self, TapError> {
        let hub = Unnamed::new()?;
        // Interfaces of the hub must send nothing of their own accord: a veth end would carry it to a namespace.
        // Without IPv6 this file does not exist.
        let quiet = || Ok(std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        let _ = hub.within(quiet)?;
        Self::at(hub)
    }

    /// Finds the hub namespace that an earlier daemon made, by the TAP of one of its veth ends. The result knows no
    /// veth end until each is [adopted](Self::adopt); until then they work as before. Fails for any other TAP: its
    /// namespace may be under another owner's control.
    pub fn around(device: &OwnedFd) -> Result<Self, TapError> {
        Self::at(Found::by(device)?.hub)
    }

    /// Creates the interface `name` with the MAC address `mac` in the namespace, and a veth end. Returns the veth
    /// end, and the descriptor that its worker reads and writes.
    pub fn connect(
        &mut self,
        place: &Namespace,
        name: &str,
        settings: &Settings,
        mac: [u8; 6],
    ) -> Result<(VethEnd, OwnedFd), TapError> {
        if !is_name(name) {
            return Err(TapError::Name(name.to_owned()));
        }
        let made = match self.plug(place, name, mac, settings.queues) {
            // The name may belong to one of our veth ends whose worker died while no daemon ran.
            Err(TapError::Taken(_)) if self.sweep()? => self.plug(place, name, mac, settings.queues),
            made => made,
        };
        let (veth_end, device) = made?;
        let set_up = place.within(|| settings.apply(&Interface::find(name)?));
        match set_up {
            Ok(()) => Ok((veth_end, device)),
            Err(error) => {
                veth_end.remove();
                Err(error)
            }
        }
    }

    fn plug(
        &mut self,
        place: &Namespace,
        name: &str,
        mac: [u8; 6],
        queues: Queues,
    ) -> Result<(VethEnd, OwnedFd), TapError> {
        let there = place.open()?;
        let number = self.free_number()?;
        let sender = Sender::new().map_err(no_program)?;
        let (pair, tap, device) = self.hub.within(|| {
            let tap_name = format!("{TAP}{number}");
            let device = device::open_beside_veth_end(&tap_name, queues)?;
            let tap = Interface::find(&tap_name)?;
            let pair = Interface::create_pair(&format!("{VETH_END}{number}"), PAIR_MTU, (name, mac), there.as_fd())?;
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
                // The TAP of a veth end that went with its namespace may still exist.
                if veth_end_at(number)?.is_none() && tap_at(number)?.is_none() {
                    return Ok(number);
                }
            }
            Err(TapError::Crowded)
        })
    }

    /// Removes the veth ends whose TAP is gone; returns whether there were any.
    pub fn sweep(&self) -> Result<bool, TapError> {
        self.hub.within(|| {
            let names = Interface::names()?;
            let numbers = names.iter().filter_map(|name| name.strip_prefix(VETH_END)?.parse().ok());
            let mut swept = false;
            for number in numbers.filter(|number| !names.contains(&format!("{TAP}{number}"))) {
                // A list that the kernel makes while interfaces go may lack others.
                if tap_at(number)?.is_none()
                    && let Some(veth_end) = veth_end_at(number)?
                {
                    veth_end.delete()?;
                    swept = true;
                }
            }
            Ok(swept)
        })
    }

    /// Adopts a veth end that an earlier daemon made, by its TAP, and gives it programs that read this table. All
    /// its frames go through its worker until that is [ended](VethEnd::set_detour) if it may not take the shortcut
    /// (`may`), and for good if it is in another hub namespace.
    pub fn adopt(&mut self, device: &OwnedFd, mac: [u8; 6], may: bool) -> Result<VethEnd, TapError> {
        let Found { hub, number, pair, tap } = Found::by(device)?;
        let is_here = hub.is(&self.hub);
        let mut veth_end = self.veth_end(pair, tap, Sender::new().map_err(no_program)?, mac, may && is_here);
        if is_here {
            self.next = self.next.max(number + 1);
        }
        veth_end.sort()?;
        veth_end.set_detour(!may)?;
        Ok(veth_end)
    }
}

/// A veth end, found by its TAP.
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
                // It went with its namespace: removing the TAP shows that to its reader.
                None => tap.delete().and(Err(TapError::NoVethEnd(name.clone()))),
            }
        })?;
        Ok(Found { hub, number, pair, tap })
    }
}

/// Removes the veth end beside this TAP, with its namespace's interface, and the TAP, even if the veth end could not
/// be [adopted](Shortcut::adopt). Does nothing for any other TAP.
pub fn remove_beside(device: &OwnedFd) {
    if let Ok(found) = Found::by(device) {
        // Best effort: an interface that is gone already is no error.
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

    /// Attaches the programs for received frames: until its way is open, all go through its worker.
    fn sort(&mut self) -> Result<(), TapError> {
        // Frames that the worker writes carry this address as destination, so the kernel knows that they are for
        // this host.
        self.tap.set_mac(self.mac)?;
        let forwarder = Program::forwarder(self.mac, self.pair.index()).map_err(no_program)?;
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

    /// Changes the address of the namespace.
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

    /// Sends all frames of the namespace, in both directions, through its worker from now on, or ends that. If the
    /// veth end is in another hub namespace, its frames go through the worker anyway.
    pub fn set_detour(&mut self, detour: bool) -> Result<(), TapError> {
        match (self.is_open, detour || !self.may_open) {
            (true, true) => self.close(),
            (false, false) => self.open(),
            _ => Ok(()),
        }
    }

    /// Returns how many frames took the shortcut.
    pub fn crossed(&self) -> Crossed {
        let now = if self.is_open { self.ways.get(self.mac).map_or(0, |way| way.frames) } else { 0 };
        Crossed { sent: self.sender.frames(), received: self.received + now }
    }

    /// Returns how many frames the kernel dropped; `None` if it does not say.
    pub fn lost(&self) -> Option<Lost> {
        Some(Lost { sent: self.tap.dropped().ok()?, received: self.pair.dropped().ok()? })
    }

    /// Returns whether its namespace's interface is up; `None` if the kernel does not say.
    pub fn has_link(&self) -> Option<bool> {
        self.pair.has_carrier().ok()
    }

    /// Returns whether its interface still exists.
    pub fn is_there(&self) -> bool {
        self.pair.is_there()
    }

    /// Returns whether its namespace's interface is in `place`; `None` if the kernel does not say.
    pub fn is_in(&self, place: &Namespace) -> Option<bool> {
        self.pair.other_end_is_in(place.open().ok()?.as_fd()).ok()
    }

    /// Removes the veth end with its namespace's interface, if that is there, and its TAP, which shows that to the
    /// TAP's reader.
    pub fn remove(mut self) {
        // Best effort: an interface that is gone already is no error.
        let _ = self.close();
        let _ = self.pair.delete();
        let _ = self.tap.delete();
    }
}
