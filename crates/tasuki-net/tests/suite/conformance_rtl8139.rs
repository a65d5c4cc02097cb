//! Runs the suite of all NIC drivers for the RTL8139C+ on QEMU's model.
//!
//! The model never holds a frame back: frames that come while its ring is full, or its receiver off, are lost. So
//! the wire here is a partner that keeps frames to itself while the card has no descriptors for them, like a partner
//! that received PAUSE. Promises about frames that come while a card is parked are left out.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use tasuki_net::nic::bus::{Bus, Iova, Registers};
use tasuki_net::nic::rtl8139::Rtl8139;
use tasuki_net::nic::{Mac, NicMemory};
use tasuki_shm::region::{Region, Span};

use crate::conformance::World;
use crate::qemu::{MEMORY_AT, Machine, QtestBus, regions};
use crate::suite;
use tasuki_testing::polled;

/// Bytes in which the card writes its counters for us: behind everything that the driver has in its memory for
/// rings.
const TALLY_LEN: usize = 64;

/// QEMU's model.
struct OnQemu {
    machine: Machine,
    /// The driver's receive ring.
    ring: Span<AtomicU64>,
    tally: Span<AtomicU64>,
    tally_at: Iova,
}

impl OnQemu {
    /// Returns whether the card has a descriptor left.
    fn has_room(&self) -> bool {
        // OWN, bit 31 of the first word of each descriptor; EOR, bit 30, is in the last.
        let mut last = false;
        let statuses = self.ring.iter().step_by(2).map(|word| word.load(Acquire));
        let mut ring = statuses.take_while(|status| !std::mem::replace(&mut last, status >> 30 & 1 == 1));
        ring.any(|status| status >> 31 & 1 == 1)
    }

    /// Returns the card's own count of frames it has seen, whether it let them in or not.
    fn seen(&self) -> u64 {
        let registers = self.bus().registers(1).expect("BAR 1");
        let [low, high] =
            [self.tally_at.0 & 0xffff_ffff, self.tally_at.0 >> 32].map(|half| half.try_into().expect("32 bits"));
        registers.write32(0x14, high);
        registers.write32(0x10, low | 1 << 3);
        polled("the card's counters", || (registers.read32(0x10) & 1 << 3 == 0).then_some(()));
        // Received without an error, and the rest.
        self.tally[1].load(Acquire) + (self.tally[3].load(Acquire) & 0xffff_ffff)
    }
}

impl World for OnQemu {
    type Nic = Rtl8139<QtestBus>;
    type Bus = QtestBus;

    const MEMORY_AT: Iova = MEMORY_AT;
    const QUEUES: u8 = 1;
    const MTU_MAX: u16 = 1500;
    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x57]);
    const HOLDS_WHILE_PARKED: bool = false;

    fn new(memory: &NicMemory) -> Option<Self> {
        let machine = Machine::start("rtl8139", &format!("mac={}", Self::MAC), &regions(memory))?;
        let copy = memory.rings().fd().try_clone_to_owned().expect("a descriptor is free");
        let rings = Region::adopt(copy).expect("memory of ours");
        let ring = rings.span(0, 128).expect("64 descriptors");
        let at = rings.len() - TALLY_LEN;
        let tally = rings.span(at, TALLY_LEN / 8).expect("the end of it");
        Some(OnQemu { machine, ring, tally, tally_at: memory.rings_at() + at as u64 })
    }

    fn bus(&self) -> QtestBus {
        self.machine.bus()
    }

    fn try_send(&self, frame: &[u8]) -> bool {
        if !self.has_room() {
            return false;
        }
        let before = self.seen();
        self.machine.wire().send_frame(frame);
        polled("the frame", || (self.seen() > before).then_some(()));
        true
    }

    fn sender(&self) -> Box<dyn Fn(&[u8]) + Send> {
        let wire = self.machine.wire().try_clone();
        Box::new(move |frame| wire.send_frame(frame))
    }

    fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        self.machine.wire().receive_frame(limit)
    }

    fn set_link(&mut self, up: bool) {
        self.machine.set_link(up);
    }

    fn pull(&mut self) {
        self.machine.end();
    }
}

// All but these cases:
// - `a_hundred_successors_lose_nothing_under_traffic` and `a_parked_nic_touches_no_memory`, in which frames come while
//   the card is parked (rtl8139.rs has its own);
// - `memory_that_is_too_small_is_refused`, which uses longer rings than this card's;
// - `interrupts_do_not_block`, because the bus has none for this card.
suite!(rtl8139_on_qemu, super::OnQemu, and
    only_what_is_let_in_arrives
    a_new_filter_replaces_the_old_one
    flows_stay_in_order_over_all_queues
    options_that_the_card_cannot_do_are_refused
);
