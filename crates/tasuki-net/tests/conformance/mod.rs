//! What every NIC driver promises, whatever card is behind it: one suite for all.
//!
//! To have another driver on QEMU's model of its card conform, say so in tests/conformance.rs:
//!
//! ```ignore
//! impl Model for Rtl8139<QtestBus> {
//!     const NAME: &'static str = "rtl8139";
//! }
//! suite!(rtl8139_on_qemu, OnQemu<Rtl8139<QtestBus>>);
//! ```
//!
//! Anything else that has a bus and a wire implements [`World`].

pub mod cases;
pub mod frames;
pub mod on_qemu;
pub mod on_sim;

use std::time::{Duration, Instant};

use tasuki_net::nic::bus::{Bus, Iova};
use tasuki_net::nic::{Filter, Link, Mac, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::{Armed, Burst, Frame, Port};
use tasuki_shm::arena::{Arena, Geometry};

use crate::qemu::readable;

/// Bounds whatever is waited for. Ends a test that hangs; decides nothing else.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Puts frames on a wire from another thread, and waits for room.
pub type Sender = Box<dyn Fn(&[u8]) + Send>;

/// A card, the wire that it is at, and the driver for it.
pub trait World: Sized {
    /// The driver.
    type Nic: Nic<Bus = Self::Bus>;
    /// The way to the card.
    type Bus: Bus;

    /// Where the card is to see its memory.
    const MEMORY_AT: Iova;
    /// Receive queues that the card has.
    const QUEUES: u8;
    /// Longest payload that the card can do.
    const MTU_MAX: u16;
    /// The card's own address.
    const MAC: Mac;
    /// Whether what is sent to a parked card waits, without the card's asking for that.
    const HOLDS_WHILE_PARKED: bool;

    /// A fresh card, which can be made to see `memory`. Says on standard output why there is none.
    fn new(memory: &NicMemory) -> Option<Self>;
    /// A way to the card.
    fn bus(&self) -> Self::Bus;
    /// Puts a frame on the wire, if there is room; says whether there was.
    fn try_send(&self, frame: &[u8]) -> bool;
    /// What does the same in another thread, and waits for room.
    fn sender(&self) -> Sender;
    /// The next frame that the card has put on the wire, if one comes within `limit`.
    fn take(&self, limit: Duration) -> Option<Vec<u8>>;
    /// Plugs the wire in or out.
    fn set_link(&mut self, up: bool);
    /// Pulls the card out.
    fn pull(&mut self);
}

/// A card that was started, in its world.
pub struct Bench<W: World> {
    pub world: W,
    /// `None` only while it is parked.
    nic: Option<W::Nic>,
    arena: Arena,
}

/// Asks until there is an answer.
pub fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Memory that suffices for `options`, and a good deal more slots than descriptors.
pub fn memory<W: World>(options: &NicOptions) -> NicMemory {
    let slot_len = if options.mtu > 1500 { 16384 } else { 4096 };
    let count = u32::from(options.ring) * (u32::from(options.queues) + 1) + 256;
    NicMemory::create(Geometry { slot_len, count }, 256 << 10, W::MEMORY_AT).expect("a little memory")
}

impl<W: World> Bench<W> {
    /// A started card with its link up, or nothing if there is no such world here.
    pub fn start(options: &NicOptions) -> Option<Bench<W>> {
        let memory = memory::<W>(options);
        let world = W::new(&memory)?;
        let arena = memory.arena().clone();
        let nic = W::Nic::start(world.bus(), memory, options).expect("the card starts");
        let mut bench = Bench { world, nic: Some(nic), arena };
        bench.wait_for_link(true);
        Some(bench)
    }

    pub fn nic(&mut self) -> &mut W::Nic {
        self.nic.as_mut().expect("a bench whose card is parked is not used")
    }

    pub fn wait_for_link(&mut self, up: bool) {
        until("the link", || (up != (self.nic().link() == Link::Down)).then_some(()));
    }

    /// Has another driver go on with the card, after `meanwhile`.
    pub fn replace(&mut self, meanwhile: impl FnOnce(&W, &mut W::Bus, &NicMemory)) {
        let nic = self.nic.take().expect("a bench whose card is parked is not used");
        let (mut bus, memory, sash) = nic.park().expect("the card can be parked");
        meanwhile(&self.world, &mut bus, &memory);
        self.nic = Some(W::Nic::resume(bus, memory, &sash).expect("another goes on"));
    }

    /// Waits until a frame comes; says which came.
    pub fn receive(&mut self) -> Vec<Vec<u8>> {
        until("a frame", || {
            let came = self.poll();
            if came.is_empty() {
                self.doze(PATIENCE);
            }
            (!came.is_empty()).then_some(came)
        })
    }

    /// Sleeps until a frame comes, or for `limit`.
    fn doze(&mut self, limit: Duration) {
        let nic = self.nic();
        if nic.arm().expect("the card works") == Armed::Idle {
            readable(&nic.fd(), limit);
        }
    }

    /// The frames that are there, without waiting.
    pub fn poll(&mut self) -> Vec<Vec<u8>> {
        let mut burst = Burst::new();
        self.nic().receive(&mut burst).expect("the card works");
        burst.iter().map(|frame| frame.bytes().to_vec()).collect()
    }

    /// Puts `frames` on the wire, and has the card receive until the last of them has come; says what came.
    pub fn bring_in(&mut self, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let last = frames.last().expect("at least one frame");
        let mut came: Vec<Vec<u8>> = Vec::new();
        let mut rest = frames.iter().peekable();
        let deadline = Instant::now() + PATIENCE;
        while came.last() != Some(last) {
            while rest.next_if(|frame| self.world.try_send(frame)).is_some() {}
            let frames = self.poll();
            if frames.is_empty() {
                // While the wire is full, it may have room again before anything comes.
                self.doze(if rest.peek().is_some() { Duration::from_millis(1) } else { PATIENCE });
            }
            came.extend(frames);
            assert!(Instant::now() < deadline, "{} frames came, and not the last", came.len());
        }
        came
    }

    /// Has the card send `frames`, and takes them from the wire; says what arrived there.
    pub fn bring_out(&mut self, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut arrived = Vec::new();
        let mut burst = Burst::new();
        let mut rest = frames.iter();
        let deadline = Instant::now() + PATIENCE;
        while arrived.len() < frames.len() {
            while !burst.is_full() {
                let Some(frame) = rest.next() else { break };
                burst.push(self.fill(frame));
            }
            self.nic().transmit(&mut burst).expect("the card works");
            arrived.extend(self.world.take(Duration::from_millis(1)));
            while let Some(frame) = self.world.take(Duration::ZERO) {
                arrived.push(frame);
            }
            assert!(Instant::now() < deadline, "{} of {} frames arrived", arrived.len(), frames.len());
        }
        arrived
    }

    /// A slot with these bytes in it.
    pub fn fill(&self, bytes: &[u8]) -> Frame {
        let mut slot = self.arena.take().expect("more slots than descriptors");
        slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        Frame { slot, len: u16::try_from(bytes.len()).expect("a frame") }
    }

    /// A counter by its name.
    pub fn counter(&mut self, name: &str) -> Option<u64> {
        self.nic().statistics().into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    pub fn set_filter(&mut self, filter: Filter) {
        self.nic().set_filter(&filter).expect("the card works");
    }
}

/// Parks a card that is gone.
pub fn park_fails<W: World>(mut bench: Bench<W>) -> (NicError, W) {
    let nic = bench.nic.take().expect("a bench whose card is parked is not used");
    (nic.park().err().expect("a card that is not there"), bench.world)
}

/// Makes tests of the suite's cases, one each, for a [`World`].
#[macro_export]
macro_rules! suite {
    ($name:ident, $world:ty) => {
        $crate::suite!($name, $world:
            frames_arrive_whole_and_in_order
            frames_leave_whole_and_in_order
            a_full_port_leaves_the_rest_to_the_caller
            a_burst_is_not_filled_beyond_its_end
            a_frame_that_arrives_while_arming_is_not_slept_through
            who_sleeps_is_woken_by_each_frame
            the_link_goes_down_and_up
            only_what_is_let_in_arrives
            a_new_filter_replaces_the_old_one
            long_frames_pass_as_far_as_the_mtu_says
            what_cannot_be_sent_is_dropped_and_counted
            flows_stay_in_order_over_all_queues
            counters_add_up
            a_parked_nic_touches_no_memory
            a_successor_goes_on_exactly
            a_hundred_successors_lose_nothing_under_traffic
            a_card_that_is_pulled_out_is_gone
            options_that_the_card_cannot_do_are_refused
            memory_that_is_too_small_is_refused
        );
    };
    ($name:ident, $world:ty: $($case:ident)*) => {
        mod $name {
            $(#[test]
            fn $case() {
                $crate::conformance::cases::$case::<$world>();
            })*
        }
    };
}
