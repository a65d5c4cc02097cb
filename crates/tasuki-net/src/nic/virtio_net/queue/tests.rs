//! Tests of the queues, against a device's end that writes what a test says.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::Span;

use super::super::driver_state::Cursor;
use super::super::ring::{Place, SplitRing};
use super::*;
use crate::nic::bus::Iova;
use crate::port::BURST_MAX;

const SIZE: u16 = 8;
const ROOM: u32 = 1518;

/// The device's end of a queue: it can write anything.
struct Device {
    available: Span<AtomicU32>,
    used: Span<AtomicU32>,
    index: u16,
}

impl Device {
    fn of(memory: &NicMemory, place: Place) -> Self {
        let [_, available, used] = place.addresses(memory).map(|at| (at.0 - memory.rings_at().0).try_into().unwrap());
        let span = |at, words| memory.rings().span(at, words).unwrap();
        Device { available: span(available, 6), used: span(used, 18), index: 0 }
    }

    /// Returns the first descriptors of all chains that were ever made available.
    fn heads(&self) -> Vec<u32> {
        let count = self.available[0].load(Relaxed) >> 16;
        (0..count)
            .map(|i| i % u32::from(SIZE))
            .map(|i| self.available[1 + i as usize / 2].load(Relaxed) >> (16 * (i % 2)) & 0xffff)
            .collect()
    }

    /// Says that the chain at `head` is used, with `len` bytes written.
    fn use_chain(&mut self, head: u32, len: u32) {
        let entry = 1 + 2 * usize::from(self.index % SIZE);
        self.used[entry].store(head, Relaxed);
        self.used[entry + 1].store(len, Relaxed);
        self.index = self.index.wrapping_add(1);
        self.used[0].store(u32::from(self.index) << 16, Relaxed);
    }
}

fn memory() -> NicMemory {
    NicMemory::create(Geometry { slot_len: 4096, count: 16 }, 4096, Iova(1 << 32)).unwrap()
}

/// Makes the chains of queue `queue`, four of them, in this memory.
fn chains(memory: &NicMemory, queue: usize, event_index: bool, at: Cursor) -> (Chains, Place) {
    let place = Place::new(queue * 1024, SIZE);
    let ring = SplitRing::new(memory, place, SIZE, event_index, at);
    (Chains::new(memory, queue, ring, SIZE, queue == 0), place)
}

fn receiver() -> (NicMemory, Receiver, Device) {
    let memory = memory();
    let (mut chains, place) = chains(&memory, 0, true, Cursor::default());
    chains.empty();
    let mut receiver = Receiver::new(chains, ROOM);
    assert_eq!(receiver.post(&memory, usize::MAX), 0);
    receiver.chains.committed(0);
    let device = Device::of(&memory, place);
    (memory, receiver, device)
}

/// Receives, and commits all frames as handled at once. Returns their lengths.
fn receive(memory: &NicMemory, receiver: &mut Receiver) -> Result<Vec<u16>, NicError> {
    let mut burst = Burst::new();
    receiver.receive(memory.arena(), &mut burst, BURST_MAX, &mut Counts::default())?;
    let lens = burst.drain(..).map(|frame| frame.len).collect();
    commit(receiver);
    receiver.post(memory, usize::MAX);
    commit(receiver);
    Ok(lens)
}

fn commit(receiver: &mut Receiver) {
    let handled = receiver.next();
    receiver.chains.committed(handled);
}

#[test]
fn chains_come_back_in_any_order_and_go_out_again() {
    let (memory, mut receiver, mut device) = receiver();
    assert_eq!(device.heads(), [0, 2, 4, 6]);
    for (head, len) in [(4, 100), (0, 200), (6, 300)] {
        device.use_chain(head, len + HEADER_LEN);
    }
    assert_eq!(receive(&memory, &mut receiver).unwrap(), [100, 200, 300]);
    assert_eq!(device.heads(), [0, 2, 4, 6, 4, 0, 6]);
    assert_eq!(memory.arena().census().peer, 4);
}

#[test]
fn a_chain_that_the_device_does_not_have_is_an_error() {
    for head in [1, 3, 8, 9, 0xffff, 0x1_0000, u32::MAX] {
        let (memory, mut receiver, mut device) = receiver();
        device.use_chain(head, 100);
        let error = receive(&memory, &mut receiver).unwrap_err();
        assert!(matches!(error, NicError::Absurd { value, .. } if value == u64::from(head)), "{error}");
    }
}

#[test]
fn a_chain_given_back_twice_is_an_error() {
    let (memory, mut receiver, mut device) = receiver();
    device.use_chain(2, 100);
    device.use_chain(2, 100);
    assert_eq!(receive(&memory, &mut receiver).unwrap(), [88], "what came before is delivered before");
    assert!(matches!(receive(&memory, &mut receiver), Err(NicError::Absurd { value: 2, .. })));
    let (memory, mut transmitter, mut device) = transmitter();
    device.use_chain(0, 0);
    device.use_chain(0, 0);
    assert!(matches!(transmitter.reap(memory.arena()), Err(NicError::Absurd { value: 0, .. })));
}

fn transmitter() -> (NicMemory, Transmitter, Device) {
    let memory = memory();
    let (mut chains, place) = chains(&memory, 1, false, Cursor::default());
    chains.empty();
    let mut transmitter = Transmitter::new(chains, ROOM);
    send(&memory, &mut transmitter, &[60, 60]);
    let device = Device::of(&memory, place);
    (memory, transmitter, device)
}

fn send(memory: &NicMemory, transmitter: &mut Transmitter, lens: &[u16]) {
    let mut burst: Burst = lens.iter().map(|&len| Frame { slot: memory.arena().take().unwrap(), len }).collect();
    assert_eq!(transmitter.transmit(memory, &mut burst, &mut Counts::default(), &mut 0), lens.len());
    let sent = transmitter.chains.cursor().used;
    transmitter.chains.committed(sent);
}

#[test]
fn an_index_that_runs_ahead_is_an_error() {
    for index in [5, 0x8000, u16::MAX] {
        let (memory, mut receiver, device) = receiver();
        device.used[0].store(u32::from(index) << 16, Relaxed);
        let error = receive(&memory, &mut receiver).unwrap_err();
        assert!(matches!(error, NicError::Absurd { value, .. } if value == u64::from(index)), "{error}");
    }
}

#[test]
fn lengths_that_no_frame_has_are_errors() {
    let longest = ROOM + HEADER_LEN;
    for len in [0, 11, longest + 1, u32::MAX] {
        let (memory, mut receiver, mut device) = receiver();
        device.use_chain(0, len);
        let error = receive(&memory, &mut receiver).unwrap_err();
        assert!(matches!(error, NicError::Absurd { value, .. } if value == u64::from(len)), "{error}");
    }
    for len in [12, 25, 26, longest] {
        let (memory, mut receiver, mut device) = receiver();
        device.use_chain(0, len);
        assert_eq!(receive(&memory, &mut receiver).unwrap(), [u16::try_from(len - 12).unwrap().max(14)]);
    }
}

#[test]
fn a_device_gets_buffers_back_as_soon_as_there_are_slots() {
    let (memory, mut receiver, mut device) = receiver();
    let slots: Vec<_> = std::iter::from_fn(|| memory.arena().take()).collect();
    let mut burst = Burst::new();
    device.heads().iter().for_each(|&head| device.use_chain(head, 100));
    assert_eq!(receiver.receive(memory.arena(), &mut burst, BURST_MAX, &mut Counts::default()).unwrap(), 4);
    commit(&mut receiver);
    assert_ne!(receiver.post(&memory, usize::MAX), 0, "all slots are somebody's");
    commit(&mut receiver);
    assert_eq!(device.heads().len(), 4);
    drop((burst, slots));
    assert_eq!(receiver.post(&memory, usize::MAX), 0);
    commit(&mut receiver);
    assert_eq!(device.heads().len(), 8);
}

/// The two halves of EVENT: the device sees the index at which we want to be woken, and we see an earlier frame.
#[test]
fn arming_asks_for_the_next_frame_and_sees_one_that_came_before() {
    let (memory, mut receiver, mut device) = receiver();
    for round in 0..20 {
        assert!(!receiver.arm().unwrap(), "nothing has come");
        assert_eq!(device.available[1 + 4].load(Relaxed) & 0xffff, round, "an interrupt at the next one");
        let head = device.heads()[round as usize];
        device.use_chain(head, 100);
        assert!(receiver.arm().unwrap(), "one has come");
        assert_eq!(receive(&memory, &mut receiver).unwrap(), [88]);
    }
}

#[test]
fn a_device_is_notified_where_it_asks_to_be() {
    // The index at which it asks, our index before, and our index now (§2.7.10): true between the two, also across the
    // wrap.
    for (event, old, new, wanted) in [
        (0, 0, 1, true),
        (1, 0, 1, false),
        (3, 1, 4, true),
        (4, 1, 4, false),
        (0, 1, 4, false),
        (0xffff, 0xfffe, 1, true),
        (0, 0xfffe, 1, true),
        (1, 0xfffe, 1, false),
        (0xfffd, 0xfffe, 1, false),
    ] {
        let memory = NicMemory::create(Geometry { slot_len: 4096, count: 1 }, 4096, Iova(1 << 32)).unwrap();
        let place = Place::new(0, SIZE);
        let at = u64::from(old);
        let mut ring = SplitRing::new(&memory, place, SIZE, true, Cursor { available: at, used: at });
        let device = Device::of(&memory, place);
        device.used[1 + 16].store(event, Relaxed);
        (0..u16::wrapping_sub(new, old)).for_each(|_| ring.push(0));
        ring.publish();
        assert_eq!(ring.wants_notification(), wanted, "{event:#x} asked for, {old:#x} to {new:#x}");
        assert!(!ring.wants_notification(), "not twice");
    }
}

#[test]
fn unsent_frames_are_listed_in_their_order() {
    let (memory, mut transmitter, mut device) = transmitter();
    send(&memory, &mut transmitter, &[100, 101]);
    // The first two are sent, and the last two use their chains again.
    device.use_chain(2, 0);
    device.use_chain(0, 0);
    transmitter.reap(memory.arena()).unwrap();
    assert_eq!(transmitter.chains.room(), 0, "not before it is committed");
    let sent = transmitter.chains.cursor().used;
    transmitter.chains.committed(sent);
    send(&memory, &mut transmitter, &[200, 201]);
    let unsent = transmitter.harvest(memory.arena()).unwrap();
    assert_eq!(unsent.iter().map(|loan| loan.len).collect::<Vec<_>>(), [100, 101, 200, 201]);
}

proptest! {
    /// Whatever a device writes where it can, the driver neither panics nor loops, and no slot is held twice or lost.
    #[test]
    fn a_device_can_write_what_it_likes(
        writes in proptest::collection::vec((0_usize..24, prop_oneof![any::<u32>(), 0_u32..16, (0_u32..16).prop_map(|i| i << 16)]), 0..64),
    ) {
        let (memory, mut receiver, device) = receiver();
        let mut held = Vec::new();
        for (at, value) in writes {
            let mut all = device.available.iter().chain(device.used.iter());
            all.nth(at).unwrap().store(value, Relaxed);
            let mut burst = Burst::new();
            let received = receiver.receive(memory.arena(), &mut burst, BURST_MAX, &mut Counts::default());
            held.extend(burst.into_iter().map(|frame| frame.slot));
            commit(&mut receiver);
            receiver.post(&memory, usize::MAX);
            commit(&mut receiver);
            let census = memory.arena().census();
            prop_assert_eq!(census.owner as usize, held.len());
            prop_assert!(census.peer == 4 || census.free == 0);
            if received.is_err() {
                break;
            }
        }
    }
}
