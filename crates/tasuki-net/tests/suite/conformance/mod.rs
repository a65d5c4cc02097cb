//! The suite of all NIC drivers: the promises of every driver, for any card.
//!
//! To run it for another driver on QEMU's model of its card, add to a file like conformance_e1000e.rs:
//!
//! ```ignore
//! impl Model for E1000e<QtestBus> {
//!     type Nic = Self;
//!
//!     const NAME: &'static str = "e1000e";
//!     const QUEUES: u8 = 2;
//!     const MTU_MAX: u16 = 9000;
//! }
//! suite!(e1000e_on_qemu, OnQemu<E1000e<QtestBus>>);
//! ```
//!
//! Anything else that has a bus and a wire implements [`World`].

pub mod cases;
pub mod failing;
pub mod frames;
pub mod in_place;
pub mod last_owner;
pub mod on_qemu;
pub mod on_sim;
pub mod repoint;
pub mod traffic;
pub mod tricks;
pub mod tricks_virtio;

use std::time::{Duration, Instant};

use tasuki_net::nic::bus::{Bus, Iova};
use tasuki_net::nic::{DriverState, Filter, Link, Mac, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::{Armed, Burst, Frame, Port};
use tasuki_shm::arena::{Arena, Geometry};

use crate::wait::readable;
use tasuki_testing::{PATIENCE, polled};

/// Puts frames on a wire from another thread, and waits for room.
pub type Sender = Box<dyn Fn(&[u8]) + Send>;

/// A card, its wire, and its driver.
pub trait World: Sized {
    type Nic: Nic<Bus = Self::Bus>;
    type Bus: Bus;

    /// Address at which the card sees its memory.
    const MEMORY_AT: Iova;
    /// Number of receive queues of the card.
    const QUEUES: u8;
    /// Longest payload of the card, in bytes.
    const MTU_MAX: u16;
    /// Longest payload that can be sent here, where that is less.
    const MTU_SENT: u16 = Self::MTU_MAX;
    /// MAC address of the card.
    const MAC: Mac;
    /// Whether frames to a parked card wait without a request by the card.
    const HOLDS_WHILE_PARKED: bool;
    /// Why the card cannot be pulled out here, if it cannot.
    const CANNOT_PULL: Option<&'static str> = None;

    /// Makes a fresh card, which can be made to see `memory`. If there is none, prints the reason.
    fn new(memory: &NicMemory) -> Option<Self>;
    /// Opens a bus to the card.
    fn bus(&self) -> Self::Bus;
    /// Puts a frame on the wire, if there is room; returns whether there was.
    fn try_send(&self, frame: &[u8]) -> bool;
    /// Returns a function for another thread that puts frames on the wire and waits for room.
    fn sender(&self) -> Sender;
    /// Returns the next frame that the card has put on the wire, if one comes within `limit`.
    fn take(&self, limit: Duration) -> Option<Vec<u8>>;
    /// Gives the mover of frames the chance to bring the `_sent` frames under way to the card.
    fn let_frames_move(&self, bus: &mut Self::Bus, _sent: usize) {
        // The process that moves frames answers each of these after it had the chance to move them.
        for _ in 0..200 {
            bus.read_config(0).expect("the card is there");
        }
    }
    /// Waits until the parked card has done all that it does by itself, writes to memory among it.
    fn let_rest(&self, bus: &mut Self::Bus) {
        self.let_frames_move(bus, 0);
    }
    /// Plugs the wire in or out.
    fn set_link(&mut self, up: bool);
    /// Pulls the card out.
    fn pull(&mut self);
    /// Called before the card is started once more.
    fn expect_start(&mut self) {}
}

/// A started card in its world.
pub struct Bench<W: World> {
    pub world: W,
    /// `None` only while the card is parked.
    nic: Option<W::Nic>,
    arena: Arena,
}

/// Makes memory that suffices for `options`, with many more slots than descriptors.
pub fn memory<W: World>(options: &NicOptions) -> NicMemory {
    let slot_len = if options.mtu > 1500 { 16384 } else { 4096 };
    let count = u32::from(options.ring) * (u32::from(options.queues) + 1) + 256;
    NicMemory::create(Geometry { slot_len, count }, 256 << 10, W::MEMORY_AT).expect("a little memory")
}

impl<W: World> Bench<W> {
    /// Starts a card and waits for its link. Returns `None` if there is no such world here.
    pub fn start(options: &NicOptions) -> Option<Bench<W>> {
        Self::start_with(memory::<W>(options), options)
    }

    /// Like [`start`](Self::start), with this memory.
    pub fn start_with(memory: NicMemory, options: &NicOptions) -> Option<Bench<W>> {
        let world = W::new(&memory)?;
        let arena = memory.arena().clone();
        let nic = W::Nic::start(world.bus(), memory, options).expect("the card starts");
        Some(Self::over(world, nic, arena))
    }

    /// Wraps a started card, and waits for its link.
    pub fn over(world: W, nic: W::Nic, arena: Arena) -> Bench<W> {
        let mut bench = Bench { world, nic: Some(nic), arena };
        bench.wait_for_link(true);
        bench
    }

    /// Takes the driver out; [`put`](Self::put) puts one back.
    pub fn take(&mut self) -> W::Nic {
        self.nic.take().expect("a bench whose card is parked is not used")
    }

    /// Puts a driver and its memory in.
    pub fn put(&mut self, nic: W::Nic, arena: Arena) {
        (self.nic, self.arena) = (Some(nic), arena);
    }

    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    pub fn nic(&mut self) -> &mut W::Nic {
        self.nic.as_mut().expect("a bench whose card is parked is not used")
    }

    pub fn wait_for_link(&mut self, up: bool) {
        polled("the link", || (up != (self.nic().link().expect("the card is there") == Link::Down)).then_some(()));
    }

    /// Replaces the driver by another one, with `meanwhile` in between.
    pub fn replace(&mut self, meanwhile: impl FnOnce(&W, &mut W::Bus, &NicMemory)) {
        self.hand_over(|world, mut bus, memory| {
            meanwhile(world, &mut bus, memory);
            bus
        });
    }

    /// Replaces the driver by a successor on the bus that `way` makes of its predecessor's bus.
    pub fn hand_over(&mut self, way: impl FnOnce(&W, W::Bus, &NicMemory) -> W::Bus) {
        let nic = self.take();
        let (bus, memory, driver_state) = nic.park().expect("the card can be parked");
        let bus = way(&self.world, bus, &memory);
        self.go_on(bus, memory, &driver_state);
    }

    /// Replaces the driver, with `meanwhile` handling the parked card in between.
    pub fn replace_by(
        &mut self,
        meanwhile: impl FnOnce(&W, W::Bus, NicMemory, &<W::Nic as Nic>::DriverState) -> (W::Bus, NicMemory),
    ) {
        let nic = self.take();
        let (bus, memory, driver_state) = nic.park().expect("the card can be parked");
        let (bus, memory) = meanwhile(&self.world, bus, memory, &driver_state);
        self.go_on(bus, memory, &driver_state);
    }

    /// Resumes a parked card. Its driver state crosses as bytes.
    fn go_on(&mut self, bus: W::Bus, memory: NicMemory, driver_state: &<W::Nic as Nic>::DriverState) {
        let bytes = driver_state.bytes().to_vec();
        let driver_state = DriverState::read(&bytes).expect("bytes of a driver state");
        self.nic = Some(W::Nic::resume(bus, memory, &driver_state).expect("another goes on"));
    }

    /// Starts the card afresh with another driver, on the same bus and the same memory.
    pub fn start_anew(&mut self, options: &NicOptions) {
        let nic = self.take();
        let (bus, memory, _) = nic.park().expect("the card can be parked");
        self.world.expect_start();
        self.nic = Some(W::Nic::start(bus, memory, options).expect("the card starts anew"));
        self.wait_for_link(true);
    }

    /// Waits for frames and returns them.
    pub fn receive(&mut self) -> Vec<Vec<u8>> {
        polled("a frame", || {
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

    /// Returns the frames that are there, without waiting.
    pub fn poll(&mut self) -> Vec<Vec<u8>> {
        let mut burst = Burst::new();
        self.nic().receive(&mut burst).expect("the card works");
        burst.iter().map(|frame| frame.bytes().to_vec()).collect()
    }

    /// Puts `frames` on the wire, and receives until the last of them has come; returns the received frames.
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
            if Instant::now() > deadline {
                let unread = self.poll().len();
                panic!("{} frames came, and not the last; {unread} lie there, and nothing has woken us", came.len());
            }
        }
        came
    }

    /// Sends `frames`, and takes them from the wire; returns the frames that arrived there.
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

    /// Fills a slot with these bytes.
    pub fn fill(&self, bytes: &[u8]) -> Frame {
        let mut slot = self.arena.take().expect("more slots than descriptors");
        slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        Frame { slot, len: u16::try_from(bytes.len()).expect("a frame") }
    }

    /// Returns a counter by its name.
    pub fn counter(&mut self, name: &str) -> Option<u64> {
        self.nic().statistics().into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    pub fn set_filter(&mut self, filter: Filter) {
        self.nic().set_filter(&filter).expect("the card works");
    }
}

/// Parks a card that is gone, and returns the error.
pub fn park_fails<W: World>(mut bench: Bench<W>) -> (NicError, W) {
    let nic = bench.take();
    (nic.park().err().expect("a card that is not there").error, bench.world)
}

/// Makes tests of the suite's cases, one each, for a [`World`]: of all, of those that every card passes and some more
/// (`and`), or of some.
#[macro_export]
macro_rules! suite {
    ($name:ident, $world:ty) => {
        $crate::suite!($name, $world, and
            only_what_is_let_in_arrives
            a_new_filter_replaces_the_old_one
            flows_stay_in_order_over_all_queues
            a_parked_nic_touches_no_memory
            a_hundred_successors_lose_nothing_under_traffic
            options_that_the_card_cannot_do_are_refused
            memory_that_is_too_small_is_refused
            interrupts_do_not_block
        );
    };
    ($name:ident, $world:ty, and $($more:ident)*) => {
        $crate::suite!($name, $world:
            frames_arrive_whole_and_in_order
            frames_leave_whole_and_in_order
            a_full_port_leaves_the_rest_to_the_caller
            a_burst_is_not_filled_beyond_its_end
            a_frame_that_arrives_while_arming_is_not_slept_through
            who_sleeps_is_woken_by_each_frame
            the_link_goes_down_and_up
            long_frames_pass_as_far_as_the_mtu_says
            what_cannot_be_sent_is_dropped_and_counted
            counters_add_up
            a_successor_goes_on_exactly
            a_card_that_is_pulled_out_is_gone
            a_wrong_driver_state_is_refused_and_the_right_one_goes_on
            a_refused_driver_state_changes_no_memory
            after_a_start_that_failed_a_good_one_works
            a_parked_card_can_be_started_anew
            $($more)*
        );
    };
    ($name:ident, $world:ty: $($case:ident)*) => {
        mod $name {
            $(#[test]
            fn $case() {
                #[allow(unused_imports, reason = "not every list has cases of both kinds")]
                use $crate::conformance::{cases::*, failing::*, in_place::*, last_owner::*, repoint::*};
                $case::<$world>();
            })*
        }
    };
}

/// Makes tests of the cases for drivers that hand running cards on.
#[macro_export]
macro_rules! suite_in_place {
    ($name:ident, $world:ty) => {
        $crate::suite!($name, $world:
            drivers_take_turns_under_traffic_without_a_loss
            who_goes_on_is_woken
            a_driver_that_went_on_can_be_parked
            who_leaves_no_driver_state_is_followed_without_a_loss
        );
    };
}

/// Makes tests of the cases for cards with an untrusted last owner, whose drivers point them elsewhere all the same.
#[macro_export]
macro_rules! suite_last_owner {
    ($name:ident, $world:ty) => {
        $crate::suite!($name, $world:
            what_a_last_owner_leaves_is_undone_or_refused
            whatever_stands_in_any_register_the_next_owner_works_or_refuses
            a_cold_start_undoes_what_a_last_owner_leaves
        );
    };
}

/// Makes tests of the cases for drivers that point a card at another owner's memory.
#[macro_export]
macro_rules! suite_repoint {
    ($name:ident, $world:ty) => {
        $crate::suite!($name, $world:
            owners_take_turns_under_traffic_without_a_loss
            all_queues_go_to_another_owner
            an_owner_with_other_memory_is_woken
            who_gives_up_is_not_missed
            a_card_goes_back_to_its_giver
            a_card_goes_back_from_a_taker_that_had_its_givers_memory_forgotten
        );
    };
}
