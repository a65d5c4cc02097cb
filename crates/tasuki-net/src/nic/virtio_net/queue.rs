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
const FRAME_MIN: u32 = 14;

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
        let free = (0..chains).rev().filter(|&k| held[usize::from(k)].is_none()).collect();
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
        match held {
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
    pub fn harvest(mut self) -> Result<(Vec<Loan>, Vec<Loan>), NicError> {
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
    pub fn harvest(mut self, memory: &NicMemory) -> Result<Vec<Loan>, NicError> {
        self.reap(memory)?;
        Ok(self.chains.loans())
    }
}
