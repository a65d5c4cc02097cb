//! Drivers of network cards.
//!
//! A driver is a value that owns its [`Bus`] and its [`NicMemory`] and is a [`Port`]. What it must remember while it
//! runs is a plain struct, its *driver state*: a parked NIC's driver state is all that a successor needs to go on where this one stopped.
//!
//! ```text
//!            start (reset, initialise, wait for nothing)
//!   bus, memory ──────────────────────────────► running ──── park ───► driver state (+ the bus and memory, back)
//!                                                  ▲                      │
//!                                                  └─────── resume ◄──────┘   no reset, no PHY, no link change
//! ```
//!
//! A parked NIC touches no memory: its receive and transmit units are off and what they had begun is finished.
//!
//! Each of these steps, if it fails, gives bus and memory back ([`Failed`]), and says in [`Nic`] what can be done with them.

pub mod bundle;
pub mod bus;
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

/// Who a card is, as its configuration space says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PciId {
    /// Of the maker.
    pub vendor: u16,
    /// Of the card.
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

/// The state of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// No partner, or still negotiating.
    Down,
    /// Frames can pass.
    Up {
        /// In Mb/s; 0 if the card does not say.
        speed: u32,
        /// Whether both directions carry frames at the same time.
        full_duplex: bool,
    },
}

/// Which frames a card lets in, besides broadcasts and those for its own address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Every frame there is.
    pub promiscuous: bool,
    /// Every multicast.
    pub all_multicast: bool,
    /// These multicasts.
    pub multicast: Vec<Mac>,
}

/// What somebody who starts a card asks for.
#[derive(Debug, Clone)]
pub struct NicOptions {
    /// Descriptors in each receive ring and each transmit ring: a power of two, within the card's limits.
    pub ring: u16,
    /// Receive queues.
    pub queues: u8,
    /// Longest payload of a frame, in bytes, without Ethernet header and check sequence.
    pub mtu: u16,
    /// What is let in.
    pub filter: Filter,
    /// Whether card and partner have each other pause instead of losing frames (IEEE 802.3, annex 31B), if the card can and the partner
    /// agrees. What was agreed on is learnt by [`Nic::link`].
    pub flow_control: bool,
    /// Whether the memory is kept clean of frames that were handled ([`Scrub`]), so that it can go to another owner with the card.
    pub scrub: bool,
}

impl Default for NicOptions {
    /// One queue of 256 descriptors, frames of up to 1,500 bytes, only what is addressed to the card, and flow control.
    fn default() -> Self {
        NicOptions { ring: 256, queues: 1, mtu: 1500, filter: Filter::default(), flow_control: true, scrub: false }
    }
}

/// Why a card could not be started or does not work any more.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The bus does not carry us to the device.
    #[error("{0}")]
    Bus(#[from] BusError),
    /// It is another card.
    #[error(
        "the device is {found}, and this driver drives {driver}; `tasuki nic probe` says which driver fits, if any"
    )]
    OtherCard {
        /// Who it is.
        found: PciId,
        /// What the driver drives.
        driver: &'static str,
    },
    /// The card cannot do what was asked for.
    #[error("the card cannot have {field} = {value}; {must}")]
    Options {
        /// Which option.
        field: &'static str,
        /// What was asked for.
        value: u64,
        /// What it can do.
        must: &'static str,
    },
    /// The memory is too small for the rings or the frames.
    #[error("the card's {what} needs {need} bytes, and there are {have}; make the NIC's memory larger")]
    Memory {
        /// Which part.
        what: &'static str,
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// The card did not do in time what it must.
    #[error("the card did not finish {step} within {limit_ms} ms; it is stuck: reset it")]
    Stuck {
        /// The step.
        step: &'static str,
        /// How long we waited, in milliseconds.
        limit_ms: u32,
    },
    /// The card is gone: every register reads as ones.
    #[error("the card is gone from its bus: it was removed, or whoever models it has ended")]
    Gone,
    /// The card wrote what no such card writes. Nothing it says can be believed any more.
    #[error("the card wrote what it must not: {what} ({value:#x}); reset it")]
    Absurd {
        /// Where, and what is wrong with it.
        what: &'static str,
        /// What it wrote.
        value: u64,
    },
    /// The driver state is not one that this driver understands.
    #[error(
        "the driver state is of {kind} version {version}, and this driver understands {ours}; hand the NIC over by the store, or upgrade"
    )]
    OtherDriverState {
        /// The driver it names.
        kind: u32,
        /// Its version.
        version: u32,
        /// What we understand.
        ours: u32,
    },
    /// A card that was left to somebody with memory of its own has gone on receiving.
    #[error(
        "frames have come since the card's owner left it, up to descriptor {head}: they are in that owner's memory, and so the card stays there; hand it over again"
    )]
    FramesCame {
        /// Where its first receive ring is.
        head: u32,
    },
    /// Somebody who is not trusted had the card, and has left something there that cannot be undone while it runs.
    #[error("the card's last owner has left {what} in it ({value:#x}), which only a reset undoes; hand it over cold")]
    LeftBehind {
        /// What.
        what: &'static str,
        /// What stands there.
        value: u64,
    },
    /// The driver state cannot be true.
    #[error(
        "the driver state contradicts itself, the NIC's memory or the card: {what} ({value:#x}); start the card anew"
    )]
    BrokenDriverState {
        /// What is wrong with it.
        what: &'static str,
        /// What stands there.
        value: u64,
    },
}

/// A parked NIC: the way to its card, its memory, and what a successor must know.
pub type Parked<N> = (<N as Nic>::Bus, NicMemory, <N as Nic>::DriverState);

/// A step that failed, and what it was to be done with.
pub struct Failed<B> {
    /// Why.
    pub error: NicError,
    /// The way to the card.
    pub bus: B,
    /// The card's memory, whose every slot is free, in somebody's hands, or counted as the card's.
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
    /// The error's own: it speaks for itself already.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<B> From<Failed<B>> for NicError {
    fn from(failed: Failed<B>) -> Self {
        failed.error
    }
}

/// A card that runs.
pub trait Nic: Port<Fault = NicError> + Sized {
    /// How the driver reaches the card.
    type Bus: Bus;

    /// All that a successor must know.
    type DriverState: DriverState;

    /// Resets the card and sets it up, with slots posted to every receive ring. The link comes up when it comes up.
    ///
    /// Slots that the card had before are free when it has been reset, whatever a predecessor did or failed to do.
    ///
    /// # Errors
    /// Options that the driver does not know, memory that is too small and a card that is another are found before the card is
    /// touched: it goes on with what it did. After any other error it can no longer reach the memory, as far as we could bring that about.
    /// Either way another `start` is possible with the same bus and memory.
    fn start(bus: Self::Bus, memory: NicMemory, options: &NicOptions) -> Result<Self, Failed<Self::Bus>>;

    /// Goes on with a card that another driver has parked. Touches neither the link nor the filters.
    ///
    /// # Errors
    /// [`NicError::OtherDriverState`] and [`NicError::BrokenDriverState`] are found before card and memory are touched, so that whoever has the right
    /// driver state can still resume. After any other error the card must be [started](Self::start), with the same memory if one likes.
    fn resume(bus: Self::Bus, memory: NicMemory, driver_state: &Self::DriverState) -> Result<Self, Failed<Self::Bus>>;

    /// Has the card finish what it has begun and touch no memory any more. Frames that have come and were not received, and
    /// frames that were not sent, stay in the rings, and the driver state says where.
    ///
    /// # Errors
    /// The card is gone or does not stop. It may still use the slots that it had; [`start`](Self::start) resets it and takes them back.
    fn park(self) -> Result<Parked<Self>, Failed<Self::Bus>>;

    /// A successor has gone on: what the giver is left with, for the next time. Nothing is touched.
    fn stand_down(self) -> (Self::Bus, NicMemory);

    /// The card's own address.
    fn mac(&self) -> Mac;

    /// The state of the wire. Ask when it may have changed: a card whose link came up controls the flow from then on.
    fn link(&mut self) -> Link;

    /// What is let in from now on.
    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError>;

    /// What the card and the driver have counted since they started, by the names that `ethtool -S` shows.
    fn statistics(&mut self) -> Vec<(&'static str, u64)>;
}

/// A driver that hands a card on while it runs: nobody is asked, and frames go on coming into the rings.
///
/// ```text
///   giver    conclude ─────────────► (stands still, and could go on) ───► stand_down
///              │  ledger, rings                                    ▲ no taker came
///   taker    prepare ........... waits ............ pick_up ───► running
///                                                      ▲
///   dead     ledger, rings ────────────────────────────┘
/// ```
///
/// What came before `conclude` and was received is the giver's, what came later the taker's. A `driver_state`, which goes by another way than the NIC's memory, is gone on with by `go_on`. Who calls sees to it that only one of the two drives.
///
/// A giver that is killed writes no driver state. Its [ledger] says what it had handled, by the rule of [`Transactional`].
pub trait InPlace: Nic + Transactional {
    /// A successor that has everything but the driver state.
    type Prepared;

    /// The way to the card, of which a successor needs a second one. Not for the card's registers.
    fn bus(&self) -> &Self::Bus;

    /// [Ends the last turn](Transactional::conclude) with nothing in hand, and writes what a successor elsewhere must know, into a driver state that was [blank](DriverState::blank) or written by a driver of this
    /// card before.
    fn driver_state(&mut self, into: &mut Self::DriverState);

    /// Gets ready all that needs no driver state, touching neither card nor bus: `bus` is one that needs no word with the device to be used, and `memory` was
    /// [prepared](NicMemory::prepare), or was used for this card before.
    fn prepare(bus: Self::Bus, memory: NicMemory) -> Result<Self::Prepared, Failed<Self::Bus>>;

    /// Waits until all that a driver that died had sent to the card has arrived there: what is stored later must not be overtaken by it.
    ///
    /// # Errors
    /// The card is gone.
    fn settle(prepared: &Self::Prepared) -> Result<(), NicError>;

    /// Reads what [`pick_up`](Self::pick_up) will read, while somebody else drives, so that what it runs and reads is at hand then. Changes nothing.
    fn rehearse(prepared: &mut Self::Prepared);

    /// Goes on where the last driver stopped, whether it let go or died, by what it left behind: its ledger, and its rings, in which what it had begun is
    /// undone. Rings the doorbells once more, since one that died may have been about to.
    ///
    /// # Errors
    /// No driver of this kind and version ran, or what stands there contradicts itself: the card must be started anew.
    fn pick_up(prepared: Self::Prepared) -> Result<Self, Failed<Self::Bus>>;

    /// The same by a driver state, which has come here by itself.
    ///
    /// # Errors
    /// A driver state that is broken, or of another version, is found before anything is touched: the giver can go on.
    fn go_on(prepared: Self::Prepared, driver_state: &Self::DriverState) -> Result<Self, Failed<Self::Bus>>;

    /// Frames that the card would take now: a burst of no more is taken whole by the next [`transmit`](Port::transmit). Commits nothing.
    fn room(&mut self) -> usize;

    /// Whoever looks on, if anybody does: at each frame that is received, and that the card takes.
    fn captures(&mut self) -> &mut Option<Box<Captures>>;
}
