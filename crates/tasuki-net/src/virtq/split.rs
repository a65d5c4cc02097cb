//! A split ring.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, 2.7.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

use tasuki_shm::region::Span;

use super::{
    Broken, Chain, Descriptor, DriverMemory, Head, INDIRECT, Layout, NEXT, PIECES_MAX, Piece, Place, Ring, SIZE_MAX,
    Table, WRITE, add,
};

/// Index in words of 2 bytes (2.7.6, 2.7.8).
const FLAGS: usize = 0;
const INDEX: usize = 1;
const RING: usize = 2;
/// `flags` of the available ring: the driver wants no interrupts. `flags` of the used ring: we want no kicks.
const SILENT: u16 = 1;

/// An index of a ring: 16 bits that wrap.
///
/// It lies in memory as 32 bits. Compilers load 16 bits together with their neighbours; a CPU that has just stored one of
/// those does not have it for such a load before all earlier stores are in its cache, which include a burst of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Index(u32);

impl Index {
    fn of(index: u16) -> Self {
        Index(index.into())
    }

    #[expect(clippy::cast_possible_truncation, reason = "it has 16 bits")]
    fn get(self) -> u16 {
        self.0 as u16
    }

    fn plus(self, count: u16) -> Self {
        Index::of(self.get().wrapping_add(count))
    }

    fn minus(self, count: u16) -> Self {
        Index::of(self.get().wrapping_sub(count))
    }

    /// Returns how far it is ahead of `other`.
    fn since(self, other: Self) -> u16 {
        self.get().wrapping_sub(other.get())
    }
}

/// Returns the length in bytes of the available ring of a queue of `size` descriptors.
pub(super) fn available_len(size: usize) -> usize {
    2 * (RING + size + 1)
}

/// Returns the length in bytes of the used ring of a queue of `size` descriptors.
pub(super) fn used_len(size: usize) -> usize {
    2 * (RING + 4 * size + 1)
}

/// Reads a descriptor (2.7.5).
#[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
fn descriptor([address, rest]: [u64; 2]) -> Descriptor {
    let rest = u64::from_le(rest);
    Descriptor {
        address: u64::from_le(address),
        len: rest as u32,
        flags: (rest >> 32) as u16,
        next: (rest >> 48) as u16,
    }
}

/// The device's end of a split ring.
#[derive(Debug)]
pub struct Split {
    size: u32,
    descriptors: Span<AtomicU64>,
    available: Span<AtomicU16>,
    used: Span<AtomicU16>,
    used_ring: Span<AtomicU32>,
    has_event_index: bool,
    /// The driver's address of the used ring, if writes to it are noted.
    log: Option<u64>,
    /// Whether all writes to the used ring are noted.
    is_noted: bool,
    /// The next chain that we take (Q1).
    next: Index,
    /// The driver's index at the last look (Q2).
    known: Index,
    /// The next place in the used ring (Q1), and how far the driver sees it.
    done: Index,
    shown: Index,
}

impl Split {
    /// Opens a ring. `next` is the index of the next chain, and `done` that of the next place in the used ring: that in
    /// the driver's memory, if none is given.
    pub fn new(
        memory: &DriverMemory,
        place: Place,
        next: u16,
        done: Option<u16>,
        has_event_index: bool,
    ) -> Result<Self, Broken> {
        let size = place.size;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(Broken::Size(size.into()));
        }
        let [descriptors, available, used] = place.parts(Layout::Split);
        let (region, at) = memory.lend(descriptors)?;
        let descriptors = region.span::<AtomicU64>(at, descriptors.1 / 8).map_err(|_| Broken::Ring)?;
        let (region, at) = memory.lend(available)?;
        let available = region.span::<AtomicU16>(at, available.1 / 2).map_err(|_| Broken::Ring)?;
        let (region, at) = memory.lend(used)?;
        let used_ring = region.span::<AtomicU32>(at + 2 * RING, 2 * usize::from(size)).map_err(|_| Broken::Ring)?;
        let used = region.span::<AtomicU16>(at, used.1 / 2).map_err(|_| Broken::Ring)?;
        let done = done.unwrap_or_else(|| u16::from_le(used[INDEX].load(Acquire)));
        Ok(Split {
            size: size.into(),
            descriptors,
            available,
            used,
            used_ring,
            has_event_index,
            log: None,
            is_noted: true,
            next: Index::of(next),
            known: Index::of(next),
            done: Index::of(done),
            shown: Index::of(done),
        })
    }

    /// Returns the place of an index in a ring.
    fn place(&self, index: Index) -> usize {
        (index.0 & (self.size - 1)) as usize
    }

    #[inline]
    fn words(&self, at: u16) -> [u64; 2] {
        let first = 2 * usize::from(at);
        [0, 1].map(|word| self.descriptors[first + word].load(Relaxed))
    }

    /// Returns whether there is a chain, and looks for one if none is known.
    #[inline]
    fn has_next(&mut self) -> Result<bool, Broken> {
        Ok(self.known != self.next || self.look()?)
    }

    /// Returns the index of the first descriptor of the next chain.
    #[inline]
    fn next_head(&self) -> Result<u16, Broken> {
        let at = RING + self.place(self.next);
        let head = u16::from_le(self.available[at].load(Relaxed));
        if u32::from(head) >= self.size { Err(Broken::Head) } else { Ok(head) }
    }

    #[inline]
    fn walk(&self, memory: &DriverMemory, chain: &mut Chain) -> Result<(), Broken> {
        let mut at = chain.head.id;
        for _ in 0..PIECES_MAX {
            let descriptor = descriptor(self.words(at));
            if descriptor.flags & INDIRECT != 0 {
                let is_last = descriptor.flags & NEXT == 0;
                return if is_last { self.walk_table(memory, descriptor, chain) } else { Err(Broken::Indirect) };
            }
            add(memory, descriptor, chain)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            at = descriptor.next;
            if u32::from(at) >= self.size {
                return Err(Broken::Head);
            }
        }
        Err(Broken::Chain)
    }

    /// Walks a table of descriptors (2.7.5.3).
    fn walk_table(&self, memory: &DriverMemory, named: Descriptor, chain: &mut Chain) -> Result<(), Broken> {
        let table = Table::of(memory, named)?;
        if table.count > self.size as usize {
            return Err(Broken::Indirect);
        }
        let mut at = 0;
        for _ in 0..table.count.min(PIECES_MAX) {
            let descriptor = descriptor(table.words(memory, at));
            if descriptor.flags & INDIRECT != 0 {
                return Err(Broken::Indirect);
            }
            add(memory, descriptor, chain)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            at = usize::from(descriptor.next);
            if at >= table.count {
                return Err(Broken::Head);
            }
        }
        Err(Broken::Chain)
    }

    /// Returns the index of the next chain, and that of the next place in the used ring.
    pub fn positions(&self) -> (u16, u16) {
        (self.next.get(), self.done.get())
    }

    pub(super) fn progress(&self) -> u16 {
        self.shown.get()
    }

    /// Shows the completed chains to the driver. Returns whether it wants an interrupt for them (2.7.7).
    #[inline]
    pub fn show(&mut self) -> bool {
        if self.shown == self.done {
            return false;
        }
        let before = std::mem::replace(&mut self.shown, self.done);
        self.used[INDEX].store(self.done.get().to_le(), Release);
        self.is_noted = false;
        fence(SeqCst);
        if self.has_event_index {
            let event = u16::from_le(self.available[RING + self.size as usize].load(Relaxed));
            self.done.since(Index::of(event)).wrapping_sub(1) < self.done.since(before)
        } else {
            u16::from_le(self.available[FLAGS].load(Relaxed)) & SILENT == 0
        }
    }

    /// Shows the completions of a predecessor that the driver may not have seen.
    pub fn show_again(&mut self) {
        self.used[INDEX].store(self.done.get().to_le(), Release);
        self.is_noted = false;
    }

    pub(super) fn set_log(&mut self, log: Option<u64>) {
        self.log = log;
    }

    #[inline]
    pub(super) fn note_used(&mut self, memory: &DriverMemory) {
        if let (Some(log), Some(address)) = (&memory.log, self.log)
            && !std::mem::replace(&mut self.is_noted, true)
        {
            log.note(address, used_len(self.size as usize));
        }
    }

    /// Tells the driver whether to kick (2.7.10).
    pub fn want_kicks(&mut self, yes: bool) {
        self.is_noted = false;
        if self.has_event_index {
            // The driver kicks when it passes this index. One that it has passed already keeps it silent.
            let event = if yes { self.next } else { self.next.minus(1) }.get();
            self.used[RING + 4 * self.size as usize].store(event.to_le(), Relaxed);
        } else {
            self.used[FLAGS].store(if yes { 0 } else { SILENT.to_le() }, Relaxed);
        }
        if yes {
            fence(SeqCst);
        }
    }
}

impl Ring for Split {
    /// `next` and `done`.
    type State = (u16, u16);

    fn size(&self) -> u16 {
        u16::try_from(self.size).expect("a queue has no more")
    }

    #[inline]
    fn look(&mut self) -> Result<bool, Broken> {
        let known = Index::of(u16::from_le(self.available[INDEX].load(Acquire)));
        let there = known.since(self.next);
        if u32::from(there) > self.size {
            // An index that is not believed is not kept: the chains up to it would be taken after all.
            return Err(Broken::Overrun);
        }
        self.known = known;
        Ok(there > 0)
    }

    #[inline]
    fn take(&mut self, memory: &DriverMemory, chain: &mut Chain) -> Result<bool, Broken> {
        if !self.has_next()? {
            return Ok(false);
        }
        chain.head.id = self.next_head()?;
        chain.readable.clear();
        chain.writable.clear();
        self.walk(memory, chain)?;
        self.next = self.next.plus(1);
        Ok(true)
    }

    #[inline]
    fn address_ahead(&mut self, ahead: u16) -> Option<u64> {
        if self.known.since(self.next) <= ahead {
            return None;
        }
        let at = RING + self.place(self.next.plus(ahead));
        let head = self.place(Index::of(u16::from_le(self.available[at].load(Relaxed))));
        Some(u64::from_le(self.descriptors[2 * head].load(Relaxed)))
    }

    #[inline]
    fn next_plain(&mut self, memory: &DriverMemory, len: usize) -> Result<Option<(Head, Piece)>, Broken> {
        if !self.has_next()? {
            return Ok(None);
        }
        let id = self.next_head()?;
        let descriptor = descriptor(self.words(id));
        if descriptor.flags != WRITE || (descriptor.len as usize) < len {
            return Ok(None);
        }
        let piece = memory.piece(descriptor.address, descriptor.len as usize);
        Ok(piece.filter(|piece| piece.len == descriptor.len as usize).map(|piece| (Head { id, slots: 1 }, piece)))
    }

    #[inline]
    fn complete_next(&mut self, head: Head, len: u32) {
        self.next = self.next.plus(1);
        self.complete(head, len);
    }

    #[inline]
    fn complete(&mut self, head: Head, len: u32) {
        let at = 2 * self.place(self.done);
        self.used_ring[at].store(u32::from(head.id).to_le(), Relaxed);
        self.used_ring[at + 1].store(len.to_le(), Relaxed);
        self.done = self.done.plus(1);
    }

    fn left(&self) -> usize {
        usize::MAX
    }

    #[inline]
    fn put_back(&mut self, _: Head) {
        self.next = self.next.minus(1);
    }

    fn state(&self) -> (u16, u16) {
        self.positions()
    }

    fn rewind(&mut self, (next, done): (u16, u16)) {
        (self.next, self.done) = (Index::of(next), Index::of(done));
    }
}
