//! The driver's end of a split virtqueue (virtio 1.2, §2.7).
//!
//! # Rules
//!
//! - **V1** What the driver has published it remembers privately: its own index, how many chains are out, and (in [`super::queue`])
//!   which. Nothing is read back from memory that the device can write.
//! - **V2** What the device writes is loaded once, checked against V1, and then used.
//!
//! # Orderings
//!
//! - **AVAILABLE** our index: stored (release) after the descriptors and entries that it covers.
//! - **USED** the device's index: loaded (acquire) before the entries that it covers, and the frames that they announce.
//! - **EVENT** a full fence between publishing an index or a wish and looking at what the other side has published meanwhile, so that
//!   not both miss each other (§2.7.7, §2.7.13.4.1).

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use tasuki_shm::region::Span;

use super::sash::Cursor;
use crate::nic::bus::Iova;
use crate::nic::{NicError, NicMemory};

/// Parts of a ring begin on lines.
const LINE_LEN: usize = 64;

/// In a descriptor: the chain goes on.
pub const NEXT: u16 = 1;
/// In a descriptor: the device writes.
pub const WRITE: u16 = 2;
/// In the flags of the available ring: no interrupts.
const NO_INTERRUPT: u16 = 1;
/// In the flags of the used ring: no notifications.
const NO_NOTIFY: u32 = 1;

/// Where the parts of a ring lie in the rings' region.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    descriptors: usize,
    available: usize,
    used: usize,
    /// One past the last byte.
    pub end: usize,
}

impl Place {
    /// A ring of `size` descriptors from byte `at` (a multiple of 64) on.
    pub fn new(at: usize, size: u16) -> Self {
        let size = usize::from(size);
        let available = at + 16 * size;
        let used = (available + 6 + 2 * size).next_multiple_of(LINE_LEN);
        Place { descriptors: at, available, used, end: (used + 6 + 8 * size).next_multiple_of(LINE_LEN) }
    }

    /// The addresses that the device is told: descriptors, available ring, used ring.
    pub fn addresses(&self, memory: &NicMemory) -> [Iova; 3] {
        [self.descriptors, self.available, self.used].map(|at| memory.rings_at() + at as u64)
    }
}

/// A chain that the device has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Its first descriptor, as the device says.
    pub head: u32,
    /// Bytes that the device says it wrote.
    pub len: u32,
}

/// The driver's end of a split virtqueue.
#[derive(Debug)]
pub struct SplitRing {
    /// Two words each: address; length, flags and next.
    descriptors: Span<AtomicU64>,
    /// Flags and index; entries of 16 bits; the index at which we want an interrupt.
    available: Span<AtomicU32>,
    /// Flags and index; entries of two words; the index at which the device wants a notification.
    used: Span<AtomicU32>,
    size: u16,
    /// Whether indices are negotiated, instead of flags.
    event_index: bool,
    flags: u16,
    /// Our index: chains made available so far.
    available_index: u16,
    /// Our index when the device was last notified or did not want to be.
    notified: u16,
    /// Chains of the device's that we have taken back.
    used_index: u16,
    /// The device's index as last checked.
    claimed: u16,
}

impl SplitRing {
    /// A ring that goes on at `cursor`: `Cursor::default()` for one that the device does not know yet.
    pub fn new(memory: &NicMemory, place: Place, size: u16, event_index: bool, cursor: Cursor) -> Self {
        let fits = "the layout was checked against the region";
        let words = usize::from(size);
        let mut ring = SplitRing {
            descriptors: memory.rings().span(place.descriptors, 2 * words).expect(fits),
            available: memory.rings().span(place.available, 2 + words / 2).expect(fits),
            used: memory.rings().span(place.used, 2 + 2 * words).expect(fits),
            size,
            event_index,
            flags: if event_index { 0 } else { NO_INTERRUPT },
            available_index: cursor.available,
            notified: cursor.available,
            used_index: cursor.used,
            claimed: cursor.used,
        };
        if cursor == Cursor::default() {
            ring.used.iter().for_each(|word| word.store(0, Relaxed));
        }
        ring.publish();
        ring
    }

    /// Where a successor goes on.
    pub fn cursor(&self) -> Cursor {
        Cursor { available: self.available_index, used: self.used_index }
    }

    /// Chains that the device has, or has used and we have not taken.
    fn out(&self) -> u16 {
        self.available_index.wrapping_sub(self.used_index)
    }

    /// Writes descriptor `index`.
    pub fn describe(&self, index: u16, at: Iova, len: u32, flags: u16, next: u16) {
        let i = 2 * usize::from(index);
        self.descriptors[i].store(at.0, Relaxed);
        let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.descriptors[i + 1].store(word, Relaxed);
    }

    /// Puts the chain from descriptor `head` on into the available ring. The device sees it after [`publish`](Self::publish).
    /// There are never more chains than descriptors, so there is room.
    pub fn push(&mut self, head: u16) {
        let entry = usize::from(self.available_index & (self.size - 1));
        let (word, shift) = (&self.available[1 + entry / 2], 16 * (entry & 1));
        // Only we write here, so this need not be one step.
        let other = word.load(Relaxed) & !(0xffff << shift);
        word.store(other | u32::from(head) << shift, Relaxed);
        self.available_index = self.available_index.wrapping_add(1);
    }

    /// Shows the device what was pushed.
    pub fn publish(&mut self) {
        // AVAILABLE.
        self.available[0].store(u32::from(self.flags) | u32::from(self.available_index) << 16, Release);
    }

    /// Whether the device wants to be notified of what was published since it last was.
    pub fn wants_notification(&mut self) -> bool {
        let (new, old) = (self.available_index, self.notified);
        if new == old {
            return false;
        }
        self.notified = new;
        // EVENT.
        fence(SeqCst);
        if !self.event_index {
            return self.used[0].load(Relaxed) & NO_NOTIFY == 0;
        }
        let [event, _] = halves(self.used[1 + 2 * usize::from(self.size)].load(Relaxed));
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// The oldest chain that the device has used and we have not [taken](Self::take).
    pub fn peek(&mut self) -> Result<Option<Used>, NicError> {
        if self.claimed == self.used_index {
            // USED.
            let [_, claimed] = halves(self.used[0].load(Acquire));
            if claimed.wrapping_sub(self.used_index) > self.out() {
                return Err(NicError::Absurd { what: "more buffers used than it had", value: claimed.into() });
            }
            self.claimed = claimed;
            if claimed == self.used_index {
                return Ok(None);
            }
        }
        let entry = 1 + 2 * usize::from(self.used_index & (self.size - 1));
        Ok(Some(Used { head: self.used[entry].load(Relaxed), len: self.used[entry + 1].load(Relaxed) }))
    }

    /// The chain that was peeked at is ours again.
    pub fn take(&mut self) {
        self.used_index = self.used_index.wrapping_add(1);
    }

    /// Asks for an interrupt when the next chain is used, and looks once more: whether there is one already.
    pub fn arm(&mut self) -> Result<bool, NicError> {
        if self.event_index {
            // At the index that the next used chain has. Our own half of the word; nobody reads the other.
            self.available[1 + usize::from(self.size) / 2].store(self.used_index.into(), Relaxed);
        } else {
            self.flags = 0;
            self.publish();
        }
        // EVENT.
        fence(SeqCst);
        Ok(self.peek()?.is_some())
    }

    /// No interrupts are wanted for now. With indices there are none anyhow until the next [`arm`](Self::arm), but one in 65,536.
    pub fn disarm(&mut self) {
        if !self.event_index && self.flags != NO_INTERRUPT {
            self.flags = NO_INTERRUPT;
            self.publish();
        }
    }
}

/// The lower and the upper half of a word.
#[expect(clippy::cast_possible_truncation, reason = "halves")]
fn halves(word: u32) -> [u16; 2] {
    [word as u16, (word >> 16) as u16]
}
