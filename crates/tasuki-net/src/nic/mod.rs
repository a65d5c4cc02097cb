//! Drivers of network cards.
//!
//! A driver is a value that owns its [`Bus`] and its [`NicMemory`] and is a [`Port`]. It keeps what it must remember
//! while it runs in a plain struct, its *driver state*. A successor needs only the driver state of a parked NIC to
//! continue where its predecessor stopped.
//!
//! ```text
//!            start (reset, initialise, wait for nothing)
//!   bus, memory ──────────────────────────────► running ──── park ───► driver state (+ the bus and memory, back)
//!                                                  ▲                      │
//!                                                  └─────── resume ◄──────┘   no reset, no PHY, no link change
//! ```
//!
//! A parked NIC touches no memory: its receive and transmit units are off and have finished what they had begun.
//!
//! Each of these steps returns the bus and the memory if it fails ([`Failed`]). [`Nic`] says what the caller can do
//! with them.

pub mod bundle;
pub mod bus;
pub mod driver;
pub mod driver_state;
pub mod e1000e;
pub mod ledger;
mod loan;
mod memory;
mod register;
mod repoint;
pub mod rtl8139;
pub mod scrub;
pub mod virtio_net;

use bus::{Bus, BusError};
pub use driver_state::DriverState;
pub use memory::{MemoryLayout, NicMemory, Parts, PartsError};
pub use repoint::{Can, How, Left, Repoint};
pub use scrub::Scrub;

use crate::capture::Captures;
use crate::port::{Port, Transactional};

/// Vendor and device ID of a card, from its configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PciId {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
}

impl std::fmt::Display for PciId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04x}:{:04x}", self.vendor, self.device)
    }
}

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Length in bytes of what a frame has around its payload: an Ethernet header, and room for a VLAN tag. The card adds
/// the check sequence, and removes it.
const AROUND_PAYLOAD: u16 = 14 + 4;
/// Minimum MTU in bytes: what IPv4 asks of a link (RFC 791, section 3.2).
const MTU_MIN: u16 = 68;

/// State of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// The link has no partner, or still negotiates.
    Down,
    /// Frames can pass.
    Up {
        /// Speed in Mb/s; 0 if the card does not say.
        speed: u32,
        /// Whether both directions can carry frames at the same time.
        full_duplex: bool,
    },
}

/// Frames that a card accepts besides broadcasts and frames for its own address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Accept every frame.
    pub promiscuous: bool,
    /// Accept every multicast frame.
    pub all_multicast: bool,
    /// Accept frames for these multicast addresses.
    pub multicast: Vec<Mac>,
}

/// Settings for [`Nic::start`].
#[derive(Debug, Clone)]
pub struct NicOptions {
    /// Number of descriptors in each receive ring and each transmit ring: a power of two within the card's limits.
    pub ring: u16,
    /// Number of receive queues.
    pub queues: u8,
    /// Maximum payload of a frame in bytes, without Ethernet header and frame check sequence.
    pub mtu: u16,
    /// Frames that the card accepts.
    pub filter: Filter,
    /// Whether the card and its link partner may pause each other instead of losing frames (IEEE 802.3, annex 31B).
    /// It takes effect if the card supports it and the partner agrees. [`Nic::link`] learns the result of the
    /// negotiation.
    pub flow_control: bool,
    /// Whether the driver wipes handled frames from the memory ([`Scrub`]), so that the memory can pass to another
    /// owner with the card.
    pub scrub: bool,
}

impl Default for NicOptions {
    /// One queue of 256 descriptors, payloads of up to 1,500 bytes, only frames addressed to the card, and flow
    /// control.
    fn default() -> Self {
        NicOptions { ring: 256, queues: 1, mtu: 1500, filter: Filter::default(), flow_control: true, scrub: false }
    }
}

/// Error of a card that cannot start or that has stopped working.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The bus does not reach the device.
    #[error("{0}")]
    Bus(#[from] BusError),
    /// The device is not one that this driver drives.
    #[error(
        "the device is {found}, and this driver drives {driver}; `tasuki nic probe` says which driver fits, if any"
    )]
    OtherCard {
        /// IDs of the device.
        found: PciId,
        /// Name of the card that the driver drives.
        driver: &'static str,
    },
    /// The card does not support a requested option.
    #[error("the card cannot have {field} = {value}; {must}")]
    Options {
        /// Name of the option.
        field: &'static str,
        /// Requested value.
        value: u64,
        /// Values that the card supports.
        must: &'static str,
    },
    /// The memory is too small for the rings or the frames.
    #[error("the card's {what} needs {need} bytes, and there are {have}; make the NIC's memory larger")]
    Memory {
        /// Part that does not fit.
        what: &'static str,
        /// Number of bytes needed.
        need: usize,
        /// Number of bytes available.
        have: usize,
    },
    /// The device's accesses to memory are not translated, though an IOMMU is there (virtio 1.2, 6.1).
    #[error(
        "the device would reach any memory, past the IOMMU: it does not offer VIRTIO_F_ACCESS_PLATFORM; give it iommu_platform=on (QEMU), or take another"
    )]
    PastIommu,
    /// The card did not finish a step in time.
    #[error("the card did not finish {step} within {limit_ms} ms; it is stuck: reset it")]
    Stuck {
        /// Step that the driver waited for.
        step: &'static str,
        /// Time that the driver waited, in milliseconds.
        limit_ms: u32,
    },
    /// The card is gone: every register reads as ones.
    #[error("the card is gone from its bus: it was removed, or whoever models it has ended")]
    Gone,
    /// The card wrote a value that no such card writes. Nothing that it says can be trusted any more.
    #[error("the card wrote what it must not: {what} ({value:#x}); reset it")]
    Absurd {
        /// Location of the value, and what is wrong with it.
        what: &'static str,
        /// Value that the card wrote.
        value: u64,
    },
    /// This driver does not understand the driver state.
    #[error(
        "the driver state is of {kind} version {version}, and this driver understands {ours}; hand the NIC over by the store, or upgrade"
    )]
    OtherDriverState {
        /// Driver that the driver state names ([`DriverState::KIND`]).
        kind: u32,
        /// Version that the driver state names.
        version: u32,
        /// Version that this driver understands.
        ours: u32,
    },
    /// The card went on receiving after its owner left it to a taker with memory of its own.
    #[error(
        "frames have come since the card's owner left it, up to descriptor {head}: they are in that owner's memory, and so the card stays there; hand it over again"
    )]
    FramesCame {
        /// Head of the card's first receive ring: the descriptor that the card uses next.
        head: u32,
    },
    /// The card's last owner was not trusted, and left a setting that only a reset undoes.
    #[error("the card's last owner has left {what} in it ({value:#x}), which only a reset undoes; hand it over cold")]
    LeftBehind {
        /// Setting that the owner left.
        what: &'static str,
        /// Value of the setting.
        value: u64,
    },
    /// The driver state cannot be true.
    #[error(
        "the driver state contradicts itself, the NIC's memory or the card: {what} ({value:#x}); start the card anew"
    )]
    BrokenDriverState {
        /// What is wrong with the driver state.
        what: &'static str,
        /// Value found in the driver state, the memory or the card.
        value: u64,
    },
}

/// A parked NIC: the bus, the memory, and the driver state for a successor.
pub type Parked<N> = (<N as Nic>::Bus, NicMemory, <N as Nic>::DriverState);

/// Error of a failed step, with the bus and the memory that the caller passed in.
pub struct Failed<B> {
    /// Reason for the failure.
    pub error: NicError,
    /// Bus of the card.
    pub bus: B,
    /// Memory of the card. Each slot is free, held as a [`Slot`](tasuki_shm::arena::Slot), or counted as lent to the
    /// card.
    pub memory: NicMemory,
}

impl<B> std::fmt::Debug for Failed<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> std::fmt::Display for Failed<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for Failed<B> {
    /// Returns the source of the inner error, since `Display` already prints the inner error itself.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<B> From<Failed<B>> for NicError {
    fn from(failed: Failed<B>) -> Self {
        failed.error
    }
}

/// A running card.
pub trait Nic: Port<Fault = NicError> + Sized {
    /// Bus by which the driver reaches the card.
    type Bus: Bus;

    /// State that a successor needs.
    type DriverState: DriverState;

    /// Resets the card, sets it up, and posts slots to every receive ring. Does not wait for the link.
    ///
    /// The reset frees all slots that the card had before, whatever a predecessor did or failed to do.
    ///
    /// # Errors
    /// Unknown options, memory that is too small and a wrong card are found before the driver touches the card: the
    /// card goes on as before. After any other error the driver has cut the card off from the memory as far as it
    /// could. Either way the caller can call `start` again with the same bus and memory.
    fn start(bus: Self::Bus, memory: NicMemory, options: &NicOptions) -> Result<Self, Failed<Self::Bus>>;

    /// Continues with a card that another driver parked. Touches neither the link nor the filters.
    ///
    /// # Errors
    /// [`NicError::OtherDriverState`] and [`NicError::BrokenDriverState`] are found before the driver touches the
    /// card or the memory, so a process with the right driver state can still resume. After any other error the card
    /// must be [started](Self::start), possibly with the same memory.
    fn resume(bus: Self::Bus, memory: NicMemory, driver_state: &Self::DriverState) -> Result<Self, Failed<Self::Bus>>;

    /// Lets the card finish what it has begun, then stops it from touching memory. Frames that came but were not
    /// received, and frames that were not sent, stay in the rings; the driver state says where.
    ///
    /// # Errors
    /// The card is gone or does not stop. It may still use the slots that it had; [`start`](Self::start) resets it
    /// and takes them back.
    fn park(self) -> Result<Parked<Self>, Failed<Self::Bus>>;

    /// Returns the giver's bus and memory after a successor took over, for the next time. Touches nothing.
    fn stand_down(self) -> (Self::Bus, NicMemory);

    /// Returns the card's own Ethernet address.
    fn mac(&self) -> Mac;

    /// Returns the state of the link. Call it whenever the link may have changed: a card whose link came up uses
    /// flow control only from this call on.
    ///
    /// # Errors
    /// The card is gone, or asks for a reset. A driver that never [arms](Port::arm) its card learns of it only here.
    fn link(&mut self) -> Result<Link, NicError>;

    /// Reads counters of the card that would be full before long. Call it about once a second, also if it is never asked
    /// for its counts.
    fn now_and_then(&mut self) {}

    /// Sets the frames that the card accepts from now on.
    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError>;

    /// Returns the counts of the card and the driver since they started, under the names that `ethtool -S` shows.
    fn statistics(&mut self) -> Vec<(&'static str, u64)>;
}

/// A driver that hands over a card while the card runs, without asking any other process. Frames keep coming into
/// the rings.
///
/// ```text
///   giver    conclude ─────────────► (stands still, and could go on) ───► stand_down
///              │  ledger, rings                                    ▲ no taker came
///   taker    prepare ........... waits ............ pick_up ───► running
///                                                      ▲
///   dead     ledger, rings ────────────────────────────┘
/// ```
///
/// Frames that the giver received before `conclude` are the giver's; later frames are the taker's. A taker with a
/// `driver_state`, which does not travel in the NIC's memory, calls `go_on` instead. The caller ensures that only
/// one of the two drives.
///
/// A giver that is killed writes no driver state. Its [ledger] says which frames it had handled, by the rule of
/// [`Transactional`].
pub trait InPlace: Nic + Transactional {
    /// A successor that has everything but the driver state.
    type Prepared;

    /// Returns the bus, so that a second one can be made for a successor. Do not use it for the card's registers.
    fn bus(&self) -> &Self::Bus;

    /// [Ends the last turn](Transactional::conclude) with no frame pending, and writes the state for a successor
    /// elsewhere into `into`. `into` must be [blank](DriverState::blank) or have been written by a driver of this
    /// card before.
    fn driver_state(&mut self, into: &mut Self::DriverState);

    /// Prepares everything that needs no driver state, without touching card or bus. `bus` must be usable without
    /// asking the device. `memory` was [prepared](NicMemory::prepare), or was used for this card before.
    fn prepare(bus: Self::Bus, memory: NicMemory) -> Result<Self::Prepared, Failed<Self::Bus>>;

    /// Waits until every write of a driver that died has reached the card, so that later stores cannot arrive before
    /// it.
    ///
    /// # Errors
    /// The card is gone.
    fn settle(prepared: &Self::Prepared) -> Result<(), NicError>;

    /// Reads what [`pick_up`](Self::pick_up) will read, while another driver still drives, so that its code and data
    /// are cached by then. Changes nothing.
    fn rehearse(prepared: &mut Self::Prepared);

    /// Continues where the last driver stopped, whether it let go or died, from its ledger and its rings. Undoes in
    /// the rings what that driver had begun. Rings the doorbells once more, since a driver that died may have been
    /// about to.
    ///
    /// # Errors
    /// No driver of this kind and version ran, or the ledger or rings contradict themselves: the card must be
    /// started anew.
    fn pick_up(prepared: Self::Prepared) -> Result<Self, Failed<Self::Bus>>;

    /// Like [`pick_up`](Self::pick_up), but from a driver state that was sent separately.
    ///
    /// # Errors
    /// A driver state that is broken or of another version is found before anything is touched: the giver can go on.
    fn go_on(prepared: Self::Prepared, driver_state: &Self::DriverState) -> Result<Self, Failed<Self::Bus>>;

    /// Returns the number of frames that the card would take now. The next [`transmit`](Port::transmit) takes a
    /// burst of up to this many frames whole. Commits nothing.
    fn room(&mut self) -> usize;

    /// Returns the captures, if any, that see each received frame and each frame that the card takes.
    fn captures(&mut self) -> &mut Option<Box<Captures>>;
}
