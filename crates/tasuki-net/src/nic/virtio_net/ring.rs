//! The driver's end of a split virtqueue (virtio 1.2, §2.7).
//!
//! # Rules
//!
//! - **V1** What the driver has published it remembers where the device cannot write: its own index, how many chains are out, and (in
//!   [`super::chains`]) which. Nothing is read back from memory that the device can write.
//! - **V2** What the device writes is loaded once, checked against V1, and then used. A successor checks what it reads again, whatever its
//!   predecessor saw there.
//! - **V3** Indices are counted in 64 bits, and never go round; the device sees the low 16.
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

use super::driver_state::Cursor;
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

    /// The addresses that the device is told of a ring in such memory: descriptors, available ring, used ring.
    pub fn addresses(&self, memory: &NicMemory) -> [Iova; 3] {
        self.addresses_from(memory.rings_at())
    }

    /// The same where the rings' region begins there.
    pub fn addresses_from(&self, rings_at: Iova) -> [Iova; 3] {
        [self.descriptors, self.available, self.used].map(|at| rings_at + at as u64)
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
    available_index: u64,
    /// Our index as the device was last shown it.
    shown: u64,
    /// Our index when the device was last notified or did not want to be.
    notified: u64,
    /// Chains of the device's that we have taken back.
    used_index: u64,
    /// The device's index as last checked.
    claimed: u64,
}

impl SplitRing {
    /// A ring that goes on at `cursor`. Changes nothing in it.
    pub fn new(memory: &NicMemory, place: Place, size: u16, event_index: bool, cursor: Cursor) -> Self {
        let fits = "the layout was checked against the region";
        let words = usize::from(size);
        SplitRing {
            descriptors: memory.rings().span(place.descriptors, 2 * words).expect(fits),
            available: memory.rings().span(place.available, 2 + words / 2).expect(fits),
            used: memory.rings().span(place.used, 2 + 2 * words).expect(fits),
            size,
            event_index,
            flags: if event_index { 0 } else { NO_INTERRUPT },
            available_index: cursor.available,
            shown: cursor.available,
            notified: cursor.available,
            used_index: cursor.used,
            claimed: cursor.used,
        }
    }

    /// Its predecessor may have asked for an interrupt, and sleep: that holds until the next [`disarm`](Self::disarm).
    pub fn armed(mut self) -> Self {
        self.flags = 0;
        self
    }

    /// Where a successor goes on.
    #[inline]
    pub fn cursor(&self) -> Cursor {
        Cursor { available: self.available_index, used: self.used_index }
    }

    /// Our index as the device was last shown it.
    #[inline]
    pub fn shown(&self) -> u64 {
        self.shown
    }

    /// The device, which does not know the ring, is to begin with the entry at index `base` (a multiple of 2¹⁶); these chains, with so many bytes
    /// written, stand in the used ring before it.
    pub fn begin_at(&mut self, base: u64, come: impl ExactSizeIterator<Item = Used>) {
        self.used.iter().for_each(|word| word.store(0, Relaxed));
        let first = base - come.len() as u64;
        for (index, Used { head, len }) in (first..).zip(come) {
            let entry = self.used_entry(index);
            self.used[entry].store(head, Relaxed);
            self.used[entry + 1].store(len, Relaxed);
        }
        (self.available_index, self.shown, self.notified) = (base, base, base);
        (self.used_index, self.claimed) = (first, first);
        self.tell();
    }

    /// Writes descriptor `index`.
    #[inline]
    pub fn describe(&self, index: u16, at: Iova, len: u32, flags: u16, next: u16) {
        let i = 2 * usize::from(index);
        let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        if let Some([address, rest]) = self.descriptors.get(i..i + 2) {
            address.store(at.0, Relaxed);
            rest.store(word, Relaxed);
        }
    }

    /// Puts the chain from descriptor `head` on into the available ring. The device sees it after [`publish`](Self::publish).
    /// There are never more chains than descriptors, so there is room.
    #[inline]
    pub fn push(&mut self, head: u16) {
        let entry = low(self.available_index) & (self.size - 1);
        let (word, shift) = (&self.available[1 + usize::from(entry / 2)], 16 * (entry & 1));
        // Only we write here, so this need not be one step.
        let other = word.load(Relaxed) & !(0xffff << shift);
        word.store(other | u32::from(head) << shift, Relaxed);
        self.available_index += 1;
    }

    /// Shows the device what was pushed.
    #[inline]
    pub fn publish(&mut self) {
        self.shown = self.available_index;
        self.tell();
    }

    /// Of a ring with one chain at a time: the last may not be used yet, which the device says.
    pub fn unless_used(&mut self) {
        let [_, used] = halves(self.used[0].load(Acquire));
        if self.available_index > 0 && used == low(self.available_index - 1) {
            (self.used_index, self.claimed) = (self.available_index - 1, self.available_index - 1);
        }
    }

    /// Flags and index, of what the device was shown.
    #[inline]
    fn tell(&self) {
        // AVAILABLE.
        self.available[0].store(u32::from(self.flags) | u32::from(low(self.shown)) << 16, Release);
    }

    /// Whether the device wants to be notified of what was published since it last was.
    pub fn wants_notification(&mut self) -> bool {
        let (new, old) = (self.shown, self.notified);
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
        low(new).wrapping_sub(event).wrapping_sub(1) < low(new).wrapping_sub(low(old))
    }

    /// Where the entry of `index` stands in the used ring.
    #[inline]
    fn used_entry(&self, index: u64) -> usize {
        1 + 2 * usize::from(low(index) & (self.size - 1))
    }

    /// The oldest chain that the device has used and we have not [taken](Self::take).
    #[inline]
    pub fn peek(&mut self) -> Result<Option<Used>, NicError> {
        if self.claimed == self.used_index {
            // USED.
            let [_, claimed] = halves(self.used[0].load(Acquire));
            let more = u64::from(claimed.wrapping_sub(low(self.used_index)));
            if more > self.shown - self.used_index {
                return Err(NicError::Absurd { what: "more buffers used than it had", value: claimed.into() });
            }
            self.claimed += more;
            if more == 0 {
                return Ok(None);
            }
        }
        let entry = self.used_entry(self.used_index);
        Ok(self
            .used
            .get(entry..entry + 2)
            .map(|words| Used { head: words[0].load(Relaxed), len: words[1].load(Relaxed) }))
    }

    /// The chain that was peeked at is ours again.
    #[inline]
    pub fn take(&mut self) {
        self.used_index += 1;
    }

    /// Asks for an interrupt when the next chain is used, and looks once more: whether there is one already.
    pub fn arm(&mut self) -> Result<bool, NicError> {
        if self.event_index {
            // At the index that the next used chain has. Our own half of the word; nobody reads the other.
            self.available[1 + usize::from(self.size) / 2].store(low(self.used_index).into(), Relaxed);
        } else {
            self.flags = 0;
            self.tell();
        }
        // EVENT.
        fence(SeqCst);
        Ok(self.peek()?.is_some())
    }

    /// No interrupts are wanted for now. With indices there are none anyhow until the next [`arm`](Self::arm), but one in 65,536.
    #[inline]
    pub fn disarm(&mut self) {
        if !self.event_index && self.flags != NO_INTERRUPT {
            self.flags = NO_INTERRUPT;
            self.tell();
        }
    }
}

/// As the device counts.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "V3")]
pub fn low(index: u64) -> u16 {
    index as u16
}

/// The lower and the upper half of a word.
#[expect(clippy::cast_possible_truncation, reason = "halves")]
fn halves(word: u32) -> [u16; 2] {
    [word as u16, (word >> 16) as u16]
}
