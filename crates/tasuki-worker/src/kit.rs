//! What a NIC is made of, as one worker tells another through the daemon: text that only workers read, and descriptors.
//!
//! Descriptors, in order: the eventfd that a giver rings after it has passed the lease; those of the way to the card and of its memory, as
//! `tasuki_net::nic::kit` has them.

use std::os::fd::OwnedFd;

use rustix::event::EventfdFlags;
use serde::{Deserialize, Serialize};
use tasuki_net::nic::kit::{self, BusText, Fds, KitBus, KitError, What};
use tasuki_net::nic::ledger::Ledger;
use tasuki_net::nic::{InPlace, MemoryLayout, NicMemory, Parts, Sash};
use tasuki_relay::letter;
use tasuki_relay::wire::{Position, Reason};
use tasuki_shm::region::Region;

/// Where, among the descriptors, the way to the card begins.
pub const DEVICE: usize = 1;

/// Of the text.
const VERSION: u32 = 1;

/// The driver of the Intel 82574L, in a kit's text.
pub const E1000E: &str = "e1000e";

/// A kit's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// [`VERSION`] of whoever wrote it.
    pub version: u32,
    /// Which driver drives it.
    pub driver: String,
    /// The way to the card, and its memory.
    pub nic: kit::Text,
}

/// Why a kit is refused: for the daemon, and for a person.
#[derive(Debug)]
pub struct Refused {
    /// For the daemon.
    pub reason: Reason,
    /// For a person.
    pub sentence: String,
}

impl From<KitError> for Refused {
    fn from(error: KitError) -> Self {
        let at = |what| {
            let position = match what {
                What::Device | What::Turns | What::Doorbells => Position::Device,
                What::Iommu => Position::Iommu,
                What::Vector => Position::Bell,
                What::Rings => Position::Rings,
                What::Frames => Position::Arena,
                What::Ledger => Position::Sash,
            };
            position as u64
        };
        let reason = match &error {
            KitError::Missing(what) => Reason::Missing { position: at(*what) },
            KitError::Odd(what) => Reason::Odd { position: at(*what) },
            KitError::Memory(_) => Reason::Odd { position: Position::Arena as u64 },
            KitError::Extra(_) | KitError::Text { .. } | KitError::Bus(_) => {
                Reason::Odd { position: Position::Device as u64 }
            }
        };
        Refused { reason, sentence: error.to_string() }
    }
}

/// A kit that was opened.
#[derive(Debug)]
pub struct Opened<B> {
    /// Rung by a giver that has passed the lease.
    pub wake: OwnedFd,
    /// Where its driver stands, for us to read.
    pub ledger: Ledger,
    /// The way to the card.
    pub bus: B,
    /// Its memory.
    pub memory: NicMemory,
}

/// Of a card that runs, for others to go on with: the letter, and its descriptors.
pub fn pack<N: InPlace>(
    nic: &N,
    driver: &str,
    (parts, layout): (Parts, MemoryLayout),
    wake: &OwnedFd,
    can: letter::Can,
) -> anyhow::Result<(letter::Kit, Vec<OwnedFd>)>
where
    N::Bus: KitBus,
{
    let (text, fds) = kit::pack(nic.bus(), parts, &layout)?;
    let text = serde_json::to_string(&Text { version: VERSION, driver: driver.to_owned(), nic: text })?;
    let mut all = vec![wake.try_clone()?];
    all.extend(fds);
    let kit = letter::Kit { kind: N::Sash::KIND, version: N::Sash::VERSION, can, text, fds: all.len() };
    Ok((kit, all))
}

/// What a kit's text says, if it is one of a card that a worker of this version can go on with.
pub fn read(kit: &letter::Kit) -> Result<Text, Refused> {
    let device = Position::Device as u64;
    let odd = |sentence| Refused { reason: Reason::Odd { position: device }, sentence };
    let text: Text = serde_json::from_str(&kit.text)
        .map_err(|error| odd(format!("the kit's text is none that this worker reads ({error}); rebuild the older")))?;
    if text.version != VERSION {
        return Err(odd(format!(
            "the kit's text is of version {}, and this worker reads {VERSION}; rebuild the older",
            text.version
        )));
    }
    if text.driver != E1000E {
        return Err(odd(format!(
            "a card of driver {:?} cannot be gone on with while it runs; hand it over cold",
            text.driver
        )));
    }
    Ok(text)
}

/// The way to the card and its memory, ready for a successor. Nothing is touched, and not one of `fds` is left over.
pub fn open<B: KitBus>(text: &Text, fds: Vec<OwnedFd>) -> Result<Opened<B>, Refused> {
    let ledger = fds.last().map(OwnedFd::try_clone);
    let mut fds = Fds::new(fds);
    let wake = fds.take(What::Vector)?;
    let (bus, memory) = kit::unpack(&text.nic, fds)?;
    // The last one, and memory of the right length: it was just mapped.
    let ledger = ledger.and_then(|memory| Ledger::over(&Region::adopt(memory.ok()?).ok()?).ok());
    let ledger = ledger.ok_or_else(|| Refused::from(KitError::Missing(What::Ledger)))?;
    Ok(Opened { wake, ledger, bus, memory })
}

/// Whether the way to the card is the kernel's.
pub fn is_vfio(text: &Text) -> bool {
    matches!(text.nic.bus, BusText::Vfio { .. })
}

/// What rings when the lease is passed.
pub fn wake() -> anyhow::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}
