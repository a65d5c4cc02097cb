//! The device bundle of a NIC, which one worker sends to another through the daemon: text that only workers read,
//! and descriptors.
//!
//! Descriptors, in order: the eventfd that a giver rings after it has passed the lease; then those of the way to the
//! card and of its memory, in the order of `tasuki_net::nic::bundle`.

use std::os::fd::OwnedFd;

use rustix::event::EventfdFlags;
use serde::{Deserialize, Serialize};
use tasuki_net::nic::bundle::{self, BundleBus, BundleError, BusText, Fds, What};
use tasuki_net::nic::ledger::Ledger;
use tasuki_net::nic::{DriverState, Filter, InPlace, MemoryLayout, NicMemory, NicOptions, Parts};
use tasuki_relay::message;
use tasuki_relay::wire::{Position, Reason};
use tasuki_shm::region::Region;

use crate::device::Driver;

/// Position of the first descriptor of the way to the card.
pub const DEVICE: usize = 1;

/// Number of descriptors at the end that belong to the NIC's memory.
const MEMORY: usize = 3;

/// Version of the text of a NIC for payloads of any length. Workers of version 1 start each card for the usual 1,500 bytes.
const VERSION: u32 = 2;

/// Text of a device bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// The least version that a worker has to read.
    pub version: u32,
    /// Driver of the card.
    pub driver: Driver,
    /// Number of descriptors in each ring. This and the next four are the options with which the card was started, for
    /// a worker that starts it anew.
    pub ring: u16,
    /// Maximum payload of a frame in bytes.
    #[serde(default = "usual_mtu", skip_serializing_if = "is_usual_mtu")]
    pub mtu: u16,
    /// Whether the card accepts every frame.
    pub promiscuous: bool,
    /// Whether the card accepts every multicast frame.
    #[serde(default)]
    pub all_multicast: bool,
    /// Whether the card's memory is kept clean of handled frames.
    #[serde(default)]
    pub scrub: bool,
    /// The way to the card, and the layout of its memory.
    pub nic: bundle::Text,
}

fn usual_mtu() -> u16 {
    NicOptions::default().mtu
}

fn is_usual_mtu(mtu: &u16) -> bool {
    *mtu == usual_mtu()
}

/// Refusal of a device bundle, for the daemon and for a person.
#[derive(Debug, Clone)]
pub struct Refused {
    /// Reason for the daemon.
    pub reason: Reason,
    /// Sentence for a person.
    pub sentence: String,
}

impl From<Reason> for Refused {
    fn from(reason: Reason) -> Self {
        Refused { reason, sentence: reason.to_string() }
    }
}

impl From<BundleError> for Refused {
    fn from(error: BundleError) -> Self {
        let at = |what| {
            let position = match what {
                What::Device | What::Turns | What::Doorbells => Position::Device,
                What::Iommu => Position::Iommu,
                What::Vector => Position::Bell,
                What::Rings => Position::Rings,
                What::Frames => Position::Arena,
                What::Ledger => Position::DriverState,
            };
            position as u64
        };
        let reason = match &error {
            BundleError::Missing(what) => Reason::Missing { position: at(*what) },
            BundleError::Odd(what) => Reason::Odd { position: at(*what) },
            BundleError::Memory(_) => Reason::Odd { position: Position::Arena as u64 },
            BundleError::Extra(_) | BundleError::Text { .. } | BundleError::Bus(_) => {
                Reason::Odd { position: Position::Device as u64 }
            }
        };
        Refused { reason, sentence: error.to_string() }
    }
}

/// An opened device bundle.
#[derive(Debug)]
pub struct Opened<B> {
    /// Eventfd that a giver rings after it has passed the lease.
    pub wake: OwnedFd,
    /// Ledger of the NIC's driver, for us to read.
    pub ledger: Ledger,
    /// The way to the card.
    pub bus: B,
    /// Memory of the card.
    pub memory: NicMemory,
}

/// Packs the device bundle of a running card, for other workers to go on with. Returns the message and its
/// descriptors.
pub fn pack<N: InPlace>(
    nic: &N,
    driver: Driver,
    options: &NicOptions,
    (parts, layout): (Parts, MemoryLayout),
    wake: &OwnedFd,
    can: message::Can,
) -> anyhow::Result<(message::DeviceBundle, Vec<OwnedFd>)>
where
    N::Bus: BundleBus,
{
    let (text, fds) = bundle::pack(nic.bus(), parts, &layout)?;
    let text = serde_json::to_string(&Text {
        version: if is_usual_mtu(&options.mtu) { 1 } else { VERSION },
        driver,
        ring: options.ring,
        mtu: options.mtu,
        promiscuous: options.filter.promiscuous,
        all_multicast: options.filter.all_multicast,
        scrub: options.scrub,
        nic: text,
    })?;
    let mut all = vec![wake.try_clone()?];
    all.extend(fds);
    let (kind, version) = (N::DriverState::KIND, N::DriverState::VERSION);
    let bundle = message::DeviceBundle {
        kind,
        version,
        can,
        text,
        layout: None,
        fds: all.len(),
        memory: MEMORY,
        partial: false,
        made_by: None,
        mac: Some(nic.mac().0),
    };
    Ok((bundle, all))
}

/// Device bundle of a NIC whose rings have moved to other memory.
#[derive(Debug)]
pub struct Moved {
    /// The message to the next worker.
    pub bundle: message::DeviceBundle,
    /// Descriptors of the bundle.
    pub fds: Vec<OwnedFd>,
    /// Text of the bundle, parsed.
    pub text: Text,
}

impl Moved {
    /// Returns the parts of the bundle that the daemon must learn: the layout of the memory, and its descriptors.
    pub fn memory(&self) -> std::io::Result<(String, Vec<OwnedFd>)> {
        let memory = &self.fds[self.fds.len() - MEMORY..];
        Ok((
            self.bundle.layout.clone().unwrap_or_default(),
            memory.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>()?,
        ))
    }
}

/// Builds the device bundle of a card whose rings will be in memory that `party` has made. The way to the card stays
/// as it is.
pub fn moved(
    (bundle, text, fds): (&message::DeviceBundle, &Text, &[OwnedFd]),
    (parts, layout): (Parts, MemoryLayout),
    party: u32,
) -> anyhow::Result<Moved> {
    let mut text = text.clone();
    text.nic.memory = bundle::MemoryText::of(&layout);
    let mut all = way(bundle, fds).iter().map(OwnedFd::try_clone).collect::<Result<Vec<_>, _>>()?;
    all.extend([parts.rings, parts.frames, parts.ledger]);
    let bundle = message::DeviceBundle {
        layout: Some(serde_json::to_string(&text.nic.memory)?),
        fds: all.len(),
        memory: MEMORY,
        partial: false,
        made_by: Some(party),
        ..bundle.clone()
    };
    Ok(Moved { bundle, fds: all, text })
}

/// Returns the descriptors of a device bundle without those of its memory.
fn way<'a>(bundle: &message::DeviceBundle, fds: &'a [OwnedFd]) -> &'a [OwnedFd] {
    let memory = if bundle.partial { 0 } else { bundle.memory };
    &fds[..fds.len().saturating_sub(memory)]
}

/// Opens the bell and the way to the card, for a worker with memory of its own. Touches nothing on the card, and
/// leaves none of `fds` over.
pub fn open_way<B: BundleBus>(
    text: &Text,
    bundle: &message::DeviceBundle,
    fds: Vec<OwnedFd>,
) -> Result<(OwnedFd, B), Refused> {
    let mut fds = fds;
    fds.truncate(way(bundle, &fds).len());
    let mut fds = Fds::new(fds);
    let wake = fds.take(What::Vector)?;
    let bus = B::unpack(&text.nic.bus, &mut fds)?;
    fds.end()?;
    Ok((wake, bus))
}

/// Reads the text of a device bundle, if a worker of this version can go on with its card.
pub fn read(bundle: &message::DeviceBundle) -> Result<Text, Refused> {
    let device = Position::Device as u64;
    let odd = |sentence| Refused { reason: Reason::Odd { position: device }, sentence };
    let none =
        |error| odd(format!("this worker does not understand the device bundle's text ({error}); rebuild the older"));
    let mut text: Text = serde_json::from_str(&bundle.text).map_err(none)?;
    if let Some(layout) = &bundle.layout {
        text.nic.memory = serde_json::from_str(layout).map_err(none)?;
    }
    if !(1..=VERSION).contains(&text.version) {
        return Err(odd(format!(
            "the device bundle's text is of version {}, and this worker reads {VERSION}; rebuild the older",
            text.version
        )));
    }
    if text.driver == Driver::Rtl8139 {
        return Err(odd(
            "an RTL8139 cannot be gone on with while it runs; drive it by hand with `tasuki nic run`".to_owned()
        ));
    }
    Ok(text)
}

/// Opens the way to the card and its memory, ready for a successor. Touches nothing on the card, and leaves none of
/// `fds` over.
pub fn open<B: BundleBus>(text: &Text, fds: Vec<OwnedFd>) -> Result<Opened<B>, Refused> {
    let ledger = fds.last().map(OwnedFd::try_clone);
    let mut fds = Fds::new(fds);
    let wake = fds.take(What::Vector)?;
    let (bus, memory) = bundle::unpack(&text.nic, fds)?;
    // The ledger is the last descriptor, and its memory has the right length: it was just mapped.
    let ledger = ledger.and_then(|memory| {
        let region = Region::adopt(memory.ok()?).ok()?;
        region.populate();
        Ledger::over(&region).ok()
    });
    let ledger = ledger.ok_or_else(|| Refused::from(BundleError::Missing(What::Ledger)))?;
    Ok(Opened { wake, ledger, bus, memory })
}

impl Text {
    /// Returns the options with which the card is started anew.
    pub fn options(&self) -> NicOptions {
        let (promiscuous, all_multicast) = (self.promiscuous, self.all_multicast);
        let filter = Filter { promiscuous, all_multicast, ..Filter::default() };
        NicOptions { ring: self.ring, mtu: self.mtu, filter, scrub: self.scrub, ..NicOptions::default() }
    }

    /// Returns the number of bytes of memory that are locked when a card behind VFIO is started anew; 0 for other
    /// cards.
    pub fn locks(&self) -> u64 {
        let layout = self.nic.memory.layout();
        if is_vfio(self) { (layout.rings_len as u64).saturating_add(layout.slots.len() as u64) } else { 0 }
    }
}

/// Checks that a worker that may lock `may` bytes can give a device access to `needs` bytes.
pub fn may_lock(needs: u64, may: Option<u64>) -> Result<(), Reason> {
    match may {
        Some(may) if may < needs => Err(Reason::MemLock { may, needs }),
        _ => Ok(()),
    }
}

/// Returns whether the way to the card is the kernel's VFIO.
pub fn is_vfio(text: &Text) -> bool {
    matches!(text.nic.bus, BusText::Vfio { .. })
}

/// Creates the eventfd that a giver rings after it has passed the lease.
pub fn wake() -> anyhow::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_too_low_is_said_with_both_numbers() {
        assert_eq!(may_lock(4 << 20, None), Ok(()));
        assert_eq!(may_lock(4 << 20, Some(4 << 20)), Ok(()));
        assert_eq!(may_lock(0, Some(0)), Ok(()), "a card that a server serves needs none");
        let reason = may_lock(4 << 20, Some(64 << 10)).unwrap_err();
        assert_eq!(reason.to_string(), "the worker may lock 65536 bytes and needs 4194304; raise RLIMIT_MEMLOCK");
    }
}
