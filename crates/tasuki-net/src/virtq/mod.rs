//! The device's end of a split virtqueue, in memory that its driver can write at any time.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, 2.6 and 2.7.
//!
//! # Rules
//!
//! - **Q1** Our two indices are private. They are stored for the driver to see, and loaded from its memory only when a
//!   queue starts.
//! - **Q2** The driver's index is at most a queue ahead of ours.
//! - **Q3** The values of a descriptor come from one read, and are used only after a check that its bytes lie in memory
//!   that was announced.
//! - **Q4** A chain has at most [`PIECES_MAX`] descriptors and pieces, so that a loop ends, and soon.
//! - **Q5** Chains complete in the order in which they were made available.
//!
//! The model of the card (`tasuki-sim`) has an end of its own: a judge of drivers must share no code with them.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

use arrayvec::ArrayVec;
use tasuki_shm::region::Span;

pub use memory::{DriverMemory, Log, Piece, STRETCHES_MAX, Stretch};

mod memory;

/// Maximum number of pieces of a chain.
pub const PIECES_MAX: usize = 256;

/// Maximum number of descriptors of a queue (2.7).
pub const SIZE_MAX: u16 = 32768;

/// Length of a descriptor in bytes.
const DESCRIPTOR_LEN: usize = 16;
/// Flags of a descriptor (2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Index in words of 2 bytes (2.7.6, 2.7.8).
const FLAGS: usize = 0;
const INDEX: usize = 1;
const RING: usize = 2;
/// `flags` of the available ring: the driver wants no interrupts. `flags` of the used ring: we want no kicks.
const SILENT: u16 = 1;

/// The rule that a driver broke. Its device needs a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A number of descriptors that no queue has.
    #[error("a queue of {0} descriptors is none: the number is a power of two up to {SIZE_MAX}")]
    Size(u16),
    /// A part of the queue is not aligned, or not in memory that was announced.
    #[error("a ring lies outside the memory that was announced, or is not aligned")]
    Ring,
    /// Q2.
    #[error("the available index is more than a queue ahead")]
    Overrun,
    /// The available ring names a descriptor that does not exist.
    #[error("the available ring names a descriptor that does not exist")]
    Head,
    /// Q3.
    #[error("a descriptor lies outside the memory that was announced")]
    Outside,
    /// Q4.
    #[error("a chain has more than {PIECES_MAX} descriptors or pieces, or is a loop")]
    Chain,
    /// A table of descriptors in a descriptor is odd: in itself, with a successor, or of no whole number.
    #[error("an indirect table is within another, is followed by a descriptor, or has a broken descriptor")]
    Indirect,
    /// The memory went away.
    #[error("the driver's memory was taken away")]
    Gone,
}

/// A chain of descriptors.
#[derive(Debug, Default)]
pub struct Chain {
    /// Index of its first descriptor, by which the driver knows it.
    pub head: u16,
    /// Pieces for us to read.
    pub readable: ArrayVec<Piece, PIECES_MAX>,
    /// Pieces for us to write.
    pub writable: ArrayVec<Piece, PIECES_MAX>,
}

/// Returns the number of bytes of these pieces.
#[inline]
pub fn len_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.len).sum()
}

/// Where a queue lies, as the front end names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Place {
    /// Number of descriptors.
    pub size: u16,
    /// The front end's address of the descriptor table.
    pub descriptors: u64,
    /// The front end's address of the available ring.
    pub available: u64,
    /// The front end's address of the used ring.
    pub used: u64,
}

/// A descriptor, read once.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    #[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
    fn of(address: u64, rest: u64) -> Self {
        Descriptor {
            address: u64::from_le(address),
            len: u64::from_le(rest) as u32,
            flags: (u64::from_le(rest) >> 32) as u16,
            next: (u64::from_le(rest) >> 48) as u16,
        }
    }
}

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

/// Returns the length in bytes of the descriptor table of a queue of `size` descriptors.
fn table_len(size: usize) -> usize {
    DESCRIPTOR_LEN * size
}

/// Returns the length in bytes of the available ring of a queue of `size` descriptors.
fn available_len(size: usize) -> usize {
    2 * (RING + size + 1)
}

/// Returns the length in bytes of the used ring of a queue of `size` descriptors.
pub fn used_len(size: usize) -> usize {
    2 * (RING + 4 * size + 1)
}

/// The device's end of a queue.
#[derive(Debug)]
pub struct Queue {
    size: u32,
    descriptors: Span<AtomicU64>,
    available: Span<AtomicU16>,
    used: Span<AtomicU16>,
    used_ring: Span<AtomicU32>,
    has_event_index: bool,
    /// The driver's address of the used ring, if writes to it are noted.
    pub used_log: Option<u64>,
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

impl Queue {
    /// Opens a queue. `next` is the index of the next chain, and `done` that of the next place in the used ring: that in
    /// the driver's memory, if none is given.
    pub fn new(
        memory: &DriverMemory,
        place: Place,
        next: u16,
        done: Option<u16>,
        has_event_index: bool,
    ) -> Result<Self, Broken> {
        let Place { size, descriptors, available, used } = place;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(Broken::Size(size));
        }
        let count = usize::from(size);
        let lend = |address: u64, len: usize| {
            let (stretch, offset) =
                memory.place(len, |stretch| address.checked_sub(stretch.user)).ok_or(Broken::Ring)?;
            Ok((&memory.stretches[usize::from(stretch)].region, offset))
        };
        let odd = |_| Broken::Ring;
        let (region, at) = lend(descriptors, table_len(count))?;
        let descriptors = region.span::<AtomicU64>(at, table_len(count) / 8).map_err(odd)?;
        let (region, at) = lend(available, available_len(count))?;
        let available = region.span::<AtomicU16>(at, available_len(count) / 2).map_err(odd)?;
        let (region, at) = lend(used, used_len(count))?;
        let used_ring = region.span::<AtomicU32>(at + 2 * RING, 2 * count).map_err(odd)?;
        let used = region.span::<AtomicU16>(at, used_len(count) / 2).map_err(odd)?;
        let done = done.unwrap_or_else(|| u16::from_le(used[INDEX].load(Acquire)));
        Ok(Queue {
            size: size.into(),
            descriptors,
            available,
            used,
            used_ring,
            has_event_index,
            used_log: None,
            is_noted: true,
            next: Index::of(next),
            known: Index::of(next),
            done: Index::of(done),
            shown: Index::of(done),
        })
    }

    /// Returns the number of descriptors.
    pub fn size(&self) -> u16 {
        u16::try_from(self.size).expect("a queue has no more")
    }

    /// Returns the place of an index in a ring.
    fn place(&self, index: Index) -> usize {
        (index.0 & (self.size - 1)) as usize
    }

    /// Returns the index of the next chain, and that of the next place in the used ring.
    pub fn indices(&self) -> (u16, u16) {
        (self.next.get(), self.done.get())
    }

    /// Looks whether the driver has made more chains available. Returns the number of chains that we have not taken
    /// (Q2).
    #[inline]
    pub fn look(&mut self) -> Result<u16, Broken> {
        self.known = Index::of(u16::from_le(self.available[INDEX].load(Acquire)));
        let there = self.known.since(self.next);
        if u32::from(there) > self.size { Err(Broken::Overrun) } else { Ok(there) }
    }

    /// Takes the next chain. Returns false if there was none at the last look, which it repeats once.
    #[inline]
    pub fn take(&mut self, memory: &DriverMemory, chain: &mut Chain) -> Result<bool, Broken> {
        if self.known == self.next && self.look()? == 0 {
            return Ok(false);
        }
        let at = RING + self.place(self.next);
        chain.head = u16::from_le(self.available[at].load(Relaxed));
        chain.readable.clear();
        chain.writable.clear();
        if u32::from(chain.head) >= self.size {
            return Err(Broken::Head);
        }
        self.walk(memory, chain)?;
        self.next = self.next.plus(1);
        Ok(true)
    }

    /// Returns the address of the first bytes of the chain that is `ahead` behind the next, if the driver had made it
    /// available at the last look. It is unchecked: a hint.
    #[inline]
    pub fn address_ahead(&self, ahead: u16) -> Option<u64> {
        if self.known.since(self.next) <= ahead {
            return None;
        }
        let at = RING + self.place(self.next.plus(ahead));
        let head = self.place(Index::of(u16::from_le(self.available[at].load(Relaxed))));
        Some(u64::from_le(self.descriptors[2 * head].load(Relaxed)))
    }

    /// Returns the head of the next chain and its piece, if it is plain: one descriptor with at least `len` bytes for us
    /// to write, in one stretch. Does not take it: [`complete_next`](Self::complete_next) does.
    #[inline]
    pub fn next_plain(&mut self, memory: &DriverMemory, len: usize) -> Result<Option<(u16, Piece)>, Broken> {
        if self.known == self.next && self.look()? == 0 {
            return Ok(None);
        }
        let at = RING + self.place(self.next);
        let head = u16::from_le(self.available[at].load(Relaxed));
        if u32::from(head) >= self.size {
            return Err(Broken::Head);
        }
        let [address, rest] = [0, 1].map(|word| self.descriptors[2 * usize::from(head) + word].load(Relaxed));
        let descriptor = Descriptor::of(address, rest);
        if descriptor.flags != WRITE || (descriptor.len as usize) < len {
            return Ok(None);
        }
        let piece = memory.piece(descriptor.address, descriptor.len as usize);
        Ok(piece.filter(|piece| piece.len >= len).map(|piece| (head, piece)))
    }

    /// Takes the next chain, which has this head, and [completes](Self::complete) it.
    #[inline]
    pub fn complete_next(&mut self, head: u16, len: u32) {
        self.next = self.next.plus(1);
        self.complete(head, len);
    }

    /// Puts the last `count` chains that were taken back.
    pub fn put_back(&mut self, count: u16) {
        self.next = self.next.minus(count);
    }

    #[inline]
    fn walk(&self, memory: &DriverMemory, chain: &mut Chain) -> Result<(), Broken> {
        let mut at = chain.head;
        for _ in 0..PIECES_MAX {
            let first = 2 * usize::from(at);
            let words = [0, 1].map(|word| self.descriptors[first + word].load(Relaxed));
            let descriptor = Descriptor::of(words[0], words[1]);
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

    /// Walks a table of descriptors that a descriptor names (2.7.5.3).
    fn walk_table(&self, memory: &DriverMemory, table: Descriptor, chain: &mut Chain) -> Result<(), Broken> {
        let len = table.len as usize;
        let count = len / DESCRIPTOR_LEN;
        if !len.is_multiple_of(DESCRIPTOR_LEN) || count == 0 || count > self.size as usize {
            return Err(Broken::Indirect);
        }
        let mut lies = ArrayVec::new();
        memory.pieces(table.address, table.len, &mut lies)?;
        let mut at = 0;
        for _ in 0..count.min(PIECES_MAX) {
            let mut bytes = [0; DESCRIPTOR_LEN];
            memory.copy_to(&lies, at * DESCRIPTOR_LEN, &mut bytes);
            let [address, rest] =
                [0, 8].map(|at| u64::from_ne_bytes(*bytes[at..].first_chunk().expect("16 bytes are two words")));
            let descriptor = Descriptor::of(address, rest);
            if descriptor.flags & INDIRECT != 0 {
                return Err(Broken::Indirect);
            }
            add(memory, descriptor, chain)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            at = usize::from(descriptor.next);
            if at >= count {
                return Err(Broken::Head);
            }
        }
        Err(Broken::Chain)
    }

    /// Completes the chain with this head, into which we wrote `len` bytes (Q5). The driver sees it after
    /// [`show`](Self::show).
    #[inline]
    pub fn complete(&mut self, head: u16, len: u32) {
        let at = 2 * self.place(self.done);
        self.used_ring[at].store(u32::from(head).to_le(), Relaxed);
        self.used_ring[at + 1].store(len.to_le(), Relaxed);
        self.done = self.done.plus(1);
    }

    /// Takes the last `count` completions back. The driver has not seen them.
    pub fn undo(&mut self, count: u16) {
        self.done = self.done.minus(count);
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

    /// Notes all of the used ring, a few pages, if it was written since the last time and such notes are taken.
    #[inline]
    pub fn note_used(&mut self, memory: &DriverMemory) {
        if let (Some(log), Some(address)) = (&memory.log, self.used_log)
            && !std::mem::replace(&mut self.is_noted, true)
        {
            log.note(address, used_len(self.size as usize));
        }
    }

    /// Tells the driver whether to kick when it makes chains available (2.7.10). This is a hint: look once more
    /// afterwards.
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

#[inline]
fn add(memory: &DriverMemory, descriptor: Descriptor, chain: &mut Chain) -> Result<(), Broken> {
    let pieces = if descriptor.flags & WRITE == 0 { &mut chain.readable } else { &mut chain.writable };
    memory.pieces(descriptor.address, descriptor.len, pieces)
}
