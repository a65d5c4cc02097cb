//! Queues of frames: each frame is a chain of two descriptors, a header in the rings' region and a slot, so that a slot holds the
//! frame and nothing else. Chain `k` is the descriptors `2k` and `2k + 1`.
//!
//! All chains of a queue have the same header. On the way out it is zeroes: no offload. On the way in it is where the device writes
//! what we never read.

use tasuki_shm::slots::SlotId;

use super::regs::HEADER_LEN;
use super::ring::{NEXT, SplitRing, Used, WRITE};
use super::sash::{CHAINS_MAX, Counts, Cursor, Loan};
use crate::nic::bus::Iova;
use crate::nic::loan::{back, lend};
use crate::nic::{NicError, NicMemory};
use crate::port::{Burst, Frame};

/// Bytes of the shortest frame that makes sense: two addresses and a type.
pub const FRAME_MIN: u32 = 14;

/// What is in a chain that the device has.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    id: SlotId,
    /// Bytes of the frame, or for one.
    len: u32,
    /// Our index when it was posted: which is older.
    turn: u16,
}

impl Held {
    /// What the sash says of a chain; nothing if it was free.
    pub fn of(loan: &Loan) -> Option<Self> {
        (*loan != Loan::NONE).then(|| Held { id: loan.slot(), len: loan.len, turn: loan.turn })
    }

    fn loan(&self) -> Loan {
        Loan::new(self.id, self.len, self.turn)
    }
}

/// A ring of chains, and the slots in them.
#[derive(Debug)]
pub struct Chains {
    ring: SplitRing,
    /// Whether the device writes the slots.
    write: u16,
    /// V1: what is in each chain that the device has.
    held: Box<[Option<Held>]>,
    /// Chains that the device has not.
    free: Vec<u16>,
}

impl Chains {
    /// Chains of `ring`, which has `size` descriptors; those of `held` are in the device's hands already.
    pub fn new(ring: SplitRing, size: u16, header: Iova, write: bool, held: Box<[Option<Held>]>) -> Self {
        let write = if write { WRITE } else { 0 };
        let chains = size / 2;
        for k in 0..chains {
            ring.describe(2 * k, header, HEADER_LEN, NEXT | write, 2 * k + 1);
        }
        // All the room it can need, so that the data path does not allocate.
        let mut free = Vec::with_capacity(chains.into());
        free.extend((0..chains).rev().filter(|&k| held[usize::from(k)].is_none()));
        Chains { ring, write, held, free }
    }

    /// Gives the device a slot with, or for, a frame of `len` bytes. There is a free chain.
    fn post(&mut self, memory: &NicMemory, id: SlotId, len: u32) {
        let Some(k) = self.free.pop() else { return debug_assert!(false, "whoever posts has seen that there is room") };
        self.held[usize::from(k)] = Some(Held { id, len, turn: self.ring.cursor().available });
        self.ring.describe(2 * k + 1, memory.at_of(id), len, self.write, 0);
        self.ring.push(2 * k);
    }

    /// The oldest chain that the device has used: which, its slot, bytes that it is for, bytes that the device says it wrote.
    fn peek(&mut self) -> Result<Option<(u16, SlotId, u32, u32)>, NicError> {
        let Some(Used { head, len }) = self.ring.peek()? else { return Ok(None) };
        let k = u16::try_from(head / 2).ok().filter(|_| head % 2 == 0);
        let held = k.and_then(|k| Some((k, self.held.get(usize::from(k)).copied().flatten()?)));
        // One that was used twice may be posted again by now, but the device has not been shown that yet.
        match held.filter(|(_, held)| self.ring.was_shown(held.turn)) {
            Some((k, Held { id, len: room, .. })) => Ok(Some((k, id, room, len))),
            None => Err(NicError::Absurd { what: "a used buffer that it does not have", value: head.into() }),
        }
    }

    /// Chain `k`, which was peeked at, is ours.
    fn take(&mut self, k: u16) {
        self.ring.take();
        self.held[usize::from(k)] = None;
        self.free.push(k);
    }

    /// Chains that are free.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Whether the device has none.
    pub fn is_empty(&self) -> bool {
        self.room() == self.held.len()
    }

    /// What is in each chain, for a successor that goes on with the same ring.
    pub fn by_chain(&self) -> impl Iterator<Item = Loan> {
        self.held.iter().map(|held| held.as_ref().map_or(Loan::NONE, Held::loan))
    }

    /// What is in the chains, the oldest first.
    fn loans(&self) -> Vec<Loan> {
        let mut loans: Vec<_> = self.held.iter().flatten().map(Held::loan).collect();
        let now = self.ring.cursor().available;
        loans.sort_by_key(|loan| std::cmp::Reverse(now.wrapping_sub(loan.turn)));
        loans
    }

    /// Where a successor goes on.
    pub fn cursor(&self) -> Cursor {
        self.ring.cursor()
    }

    /// Shows the device what was posted; whether it wants to be notified.
    pub fn publish(&mut self) -> bool {
        self.ring.publish();
        self.ring.wants_notification()
    }
}

/// The receive queue. A slot leaves it only in exchange for another, so the device always has as many buffers.
#[derive(Debug)]
pub struct Receiver {
    pub chains: Chains,
    /// Frames that had come when the NIC was parked by a reset of its queues, the oldest first.
    come: Vec<Loan>,
    /// How many of them have been received.
    received: usize,
    /// Bytes of a slot that the device may fill.
    room: u32,
}

impl Receiver {
    /// A queue with `empty` slots for frames of up to `room` bytes, and frames that have come before.
    pub fn new(memory: &NicMemory, mut chains: Chains, room: u32, empty: &[SlotId], come: &[Loan]) -> Self {
        for &id in empty {
            chains.post(memory, id, room);
        }
        Receiver { chains, come: come.to_vec(), received: 0, room }
    }

    /// Appends frames that have come to `burst`; says how many.
    pub fn receive(&mut self, memory: &NicMemory, burst: &mut Burst, counts: &mut Counts) -> Result<usize, NicError> {
        let before = burst.len();
        self.chains.ring.disarm();
        // Bounded, so that a device that produces rubbish as fast as we throw it away does not keep us here.
        for _ in 0..burst.remaining_capacity() {
            let (chain, id, len) = match self.come.get(self.received) {
                Some(loan) => (None, loan.slot(), Ok(loan.len)),
                None => match self.chains.peek()? {
                    Some((k, id, room, written)) => (Some(k), id, frame_len(written, room)),
                    None => break,
                },
            };
            let len = len?;
            let Some(fresh) = memory.arena().take() else {
                counts.rx_no_slot += 1;
                break;
            };
            match chain {
                Some(k) => self.chains.take(k),
                None => self.received += 1,
            }
            self.chains.post(memory, lend(memory, fresh), self.room);
            counts.rx_packets += 1;
            counts.rx_bytes += u64::from(len);
            let len = u16::try_from(len).expect("a slot's room fits, and frame_len saw that this is no more");
            burst.push(Frame { slot: back(memory, id)?, len });
        }
        Ok(burst.len() - before)
    }

    /// Asks for an interrupt when the next frame comes, and looks once more: whether there is one already.
    pub fn arm(&mut self) -> Result<bool, NicError> {
        Ok(self.received < self.come.len() || self.chains.ring.arm()?)
    }

    /// Frames that have come and were not received, the oldest first, and the slots that are empty. The queue was reset.
    pub fn harvest(&mut self) -> Result<(Vec<Loan>, Vec<Loan>), NicError> {
        let mut come = self.come.split_off(self.received);
        while let Some((k, id, room, written)) = self.chains.peek()? {
            come.push(Loan::new(id, frame_len(written, room)?, 0));
            self.chains.take(k);
        }
        Ok((come, self.chains.loans()))
    }
}

/// The length of a frame in a slot with `room` bytes, of which the device says that it wrote `written`, with the header.
fn frame_len(written: u32, room: u32) -> Result<u32, NicError> {
    match written.checked_sub(HEADER_LEN) {
        Some(len) if (FRAME_MIN..=room).contains(&len) => Ok(len),
        _ => Err(NicError::Absurd { what: "the length of a used buffer", value: written.into() }),
    }
}

/// The transmit queue.
#[derive(Debug)]
pub struct Transmitter {
    pub chains: Chains,
    /// Longest frame.
    len_max: u32,
}

impl Transmitter {
    /// A queue with frames to be sent.
    pub fn new(memory: &NicMemory, mut chains: Chains, len_max: u32, unsent: &[Loan]) -> Self {
        for loan in unsent {
            chains.post(memory, loan.slot(), loan.len);
        }
        Transmitter { chains, len_max }
    }

    /// Takes back what the device has sent.
    pub fn reap(&mut self, memory: &NicMemory) -> Result<(), NicError> {
        // Bounded for the same reason as receiving.
        for _ in 0..CHAINS_MAX {
            // The length counts bytes that the device wrote, of which there are none; devices have been seen to say otherwise.
            let Some((k, id, ..)) = self.chains.peek()? else { break };
            self.chains.take(k);
            drop(back(memory, id)?);
        }
        Ok(())
    }

    /// Takes frames from the front of `burst`, as many as there is room for; says how many. Those of no length that the wire
    /// carries are taken and thrown away.
    pub fn transmit(&mut self, memory: &NicMemory, burst: &mut Burst, counts: &mut Counts) -> usize {
        let room = self.chains.room().min(burst.len());
        for frame in burst.drain(..room) {
            let len = u32::from(frame.len);
            if !(FRAME_MIN..=self.len_max).contains(&len) {
                counts.tx_dropped += 1;
                continue;
            }
            counts.tx_packets += 1;
            counts.tx_bytes += u64::from(len);
            self.chains.post(memory, lend(memory, frame.slot), len);
        }
        room
    }

    /// The frames that were not sent. The queue was reset.
    pub fn harvest(&mut self, memory: &NicMemory) -> Result<Vec<Loan>, NicError> {
        self.reap(memory)?;
        Ok(self.chains.loans())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    use proptest::prelude::*;
    use tasuki_shm::arena::Geometry;
    use tasuki_shm::region::Span;

    use super::super::ring::Place;
    use super::*;
    use crate::nic::loan;

    const SIZE: u16 = 8;
    const ROOM: u32 = 1518;

    /// The device's end of a queue: it can write what it likes.
    struct Device {
        available: Span<AtomicU32>,
        used: Span<AtomicU32>,
        index: u16,
    }

    impl Device {
        fn of(memory: &NicMemory, place: Place) -> Self {
            let [_, available, used] =
                place.addresses(memory).map(|at| (at.0 - memory.rings_at().0).try_into().unwrap());
            let span = |at, words| memory.rings().span(at, words).unwrap();
            Device { available: span(available, 6), used: span(used, 18), index: 0 }
        }

        /// The first descriptors of all chains that were ever made available.
        fn heads(&self) -> Vec<u32> {
            let count = self.available[0].load(Relaxed) >> 16;
            (0..count)
                .map(|i| i % u32::from(SIZE))
                .map(|i| self.available[1 + i as usize / 2].load(Relaxed) >> (16 * (i % 2)) & 0xffff)
                .collect()
        }

        /// Says that the chain from `head` on is used, with `len` bytes written.
        fn use_chain(&mut self, head: u32, len: u32) {
            let entry = 1 + 2 * usize::from(self.index % SIZE);
            self.used[entry].store(head, Relaxed);
            self.used[entry + 1].store(len, Relaxed);
            self.index = self.index.wrapping_add(1);
            self.used[0].store(u32::from(self.index) << 16, Relaxed);
        }
    }

    fn receiver() -> (NicMemory, Receiver, Device) {
        let memory = NicMemory::create(Geometry { slot_len: 4096, count: 16 }, 4096, Iova(1 << 32)).unwrap();
        let place = Place::new(0, SIZE);
        let ring = SplitRing::new(&memory, place, SIZE, true, Cursor::default());
        let chains = Chains::new(ring, SIZE, memory.rings_at() + 2048, true, vec![None; 4].into());
        let empty = loan::stock(&memory, 4).unwrap();
        let mut receiver = Receiver::new(&memory, chains, ROOM, &empty, &[]);
        receiver.chains.publish();
        let device = Device::of(&memory, place);
        (memory, receiver, device)
    }

    fn receive(memory: &NicMemory, receiver: &mut Receiver) -> Result<Vec<u16>, NicError> {
        let mut burst = Burst::new();
        receiver.receive(memory, &mut burst, &mut Counts::default())?;
        receiver.chains.publish();
        Ok(burst.iter().map(|frame| frame.len).collect())
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
        assert!(matches!(receive(&memory, &mut receiver), Err(NicError::Absurd { value: 2, .. })));
        let (memory, mut transmitter, mut device) = transmitter();
        device.use_chain(0, 0);
        device.use_chain(0, 0);
        assert!(matches!(transmitter.reap(&memory), Err(NicError::Absurd { value: 0, .. })));
    }

    fn transmitter() -> (NicMemory, Transmitter, Device) {
        let memory = NicMemory::create(Geometry { slot_len: 4096, count: 16 }, 4096, Iova(1 << 32)).unwrap();
        let place = Place::new(0, SIZE);
        let ring = SplitRing::new(&memory, place, SIZE, false, Cursor::default());
        let chains = Chains::new(ring, SIZE, memory.rings_at() + 2048, false, vec![None; 4].into());
        let loans: Vec<_> = loan::stock(&memory, 2).unwrap().into_iter().map(|id| Loan::new(id, 60, 0)).collect();
        let mut transmitter = Transmitter::new(&memory, chains, ROOM, &loans);
        transmitter.chains.publish();
        let device = Device::of(&memory, place);
        (memory, transmitter, device)
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
        for len in [0, 11, 12, 25, longest + 1, u32::MAX] {
            let (memory, mut receiver, mut device) = receiver();
            device.use_chain(0, len);
            let error = receive(&memory, &mut receiver).unwrap_err();
            assert!(matches!(error, NicError::Absurd { value, .. } if value == u64::from(len)), "{error}");
        }
        for len in [26, longest] {
            let (memory, mut receiver, mut device) = receiver();
            device.use_chain(0, len);
            assert_eq!(receive(&memory, &mut receiver).unwrap(), [u16::try_from(len - 12).unwrap()]);
        }
    }

    #[test]
    fn without_a_slot_to_replace_it_a_frame_waits() {
        let (memory, mut receiver, mut device) = receiver();
        let slots: Vec<_> = std::iter::from_fn(|| memory.arena().take()).collect();
        device.use_chain(6, 100);
        assert!(receive(&memory, &mut receiver).unwrap().is_empty());
        drop(slots);
        assert_eq!(receive(&memory, &mut receiver).unwrap(), [88]);
    }

    /// The two halves of EVENT: the index at which we want to be woken is there for the device, and a frame from before is seen.
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
        let come = [Loan::new(loan::stock(&memory, 1).unwrap()[0], 60, 0)];
        receiver = Receiver::new(&memory, receiver.chains, ROOM, &[], &come);
        assert!(receiver.arm().unwrap(), "one has come before the device was parked");
    }

    #[test]
    fn a_device_is_notified_where_it_asks_to_be() {
        // Where it asks, our index before, our index now (§2.7.10): between the two, around the end of the numbers too.
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
            let mut ring = SplitRing::new(&memory, place, SIZE, true, Cursor { available: old, used: old });
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
        let mut burst = Burst::new();
        let frames = |count| (0..count).map(|i| Frame { slot: memory.arena().take().unwrap(), len: 100 + i });
        burst.extend(frames(2));
        transmitter.transmit(&memory, &mut burst, &mut Counts::default());
        // The first two are sent, and their chains used again by the last.
        device.use_chain(2, 0);
        device.use_chain(0, 0);
        transmitter.reap(&memory).unwrap();
        burst.extend(frames(2).map(|frame| Frame { len: frame.len + 100, ..frame }));
        transmitter.transmit(&memory, &mut burst, &mut Counts::default());
        let unsent = transmitter.harvest(&memory).unwrap();
        assert_eq!(unsent.iter().map(|loan| loan.len).collect::<Vec<_>>(), [100, 101, 200, 201]);
    }

    proptest! {
        /// Whatever a device writes where it can write, the driver neither panics nor loops, and no slot is held twice or lost.
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
                let received = receiver.receive(&memory, &mut burst, &mut Counts::default());
                receiver.chains.publish();
                held.extend(burst.into_iter().map(|frame| frame.slot));
                let census = memory.arena().census();
                prop_assert_eq!(census.owner as usize, held.len());
                prop_assert_eq!(census.peer, 4);
                if received.is_err() {
                    break;
                }
            }
        }
    }
}
