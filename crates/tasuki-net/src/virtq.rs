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
use tasuki_shm::region::{CommonRegion, RegionError, Span};

/// Maximum number of pieces of a chain.
pub const PIECES_MAX: usize = 256;

/// Maximum number of stretches of a driver's memory.
pub const STRETCHES_MAX: usize = 8;

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

/// A stretch of a driver's memory.
#[derive(Debug)]
pub struct Stretch {
    /// First address, as descriptors have it.
    pub guest: u64,
    /// First address, as the front end has it.
    pub user: u64,
    /// Length in bytes.
    pub len: u64,
    /// The memory that holds it.
    pub region: CommonRegion,
    /// Offset of the stretch in that memory, in bytes.
    pub offset: u64,
}

/// Bytes of a page, as the log of written pages counts them.
const LOG_PAGE: u64 = 4096;

/// A log of written pages: a bit for each page of a driver's memory, in memory of the front end.
///
/// Source: QEMU, `docs/interop/vhost-user.rst` (7.2), "Migration".
#[derive(Debug)]
pub struct Log {
    region: CommonRegion,
    words: Span<AtomicU64>,
}

impl Log {
    /// Opens the log of `len` bytes that begins at byte `offset` of the region. Returns nothing if it does not lie there
    /// as whole words.
    pub fn new(region: CommonRegion, offset: u64, len: u64) -> Option<Self> {
        let (offset, count) = (usize::try_from(offset).ok()?, usize::try_from(len / 8).ok()?);
        let words = region.span(offset, count).ok()?;
        Some(Log { region, words })
    }

    /// Returns whether it has a bit for each byte from 0 up to this address.
    pub fn covers(&self, end: u64) -> bool {
        end.div_ceil(LOG_PAGE) <= 64 * self.words.len() as u64
    }

    /// Notes that `len` bytes at the driver's address `address` were written. They must have been.
    fn note(&self, address: u64, len: usize) {
        let Some(last) = address.checked_add((len as u64).saturating_sub(1)) else { return };
        for page in address / LOG_PAGE..=last / LOG_PAGE {
            let word = usize::try_from(page / 64).ok().and_then(|word| self.words.get(word));
            // The page's bytes come before its bit: the front end clears the bit, and then reads the bytes.
            word.iter().for_each(|word| _ = word.fetch_or((1_u64 << (page % 64)).to_le(), Release));
        }
    }
}

/// All memory of a driver.
#[derive(Debug, Default)]
pub struct DriverMemory {
    /// Stretches, in the order of their announcement: a [`Piece`] counts on it.
    pub stretches: ArrayVec<Stretch, STRETCHES_MAX>,
    /// Where we note the pages that we write, while the machine is copied to another place.
    pub log: Option<Log>,
}

/// Bytes that lie within a stretch (Q3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    stretch: u8,
    /// Offset in the memory of the stretch.
    offset: usize,
    /// Number of bytes.
    pub len: usize,
}

impl DriverMemory {
    /// Returns whether any of it was taken away.
    pub fn is_gone(&self) -> bool {
        let log = self.log.iter().map(|log| &log.region);
        self.stretches.iter().map(|stretch| &stretch.region).chain(log).any(CommonRegion::is_gone)
    }

    fn place(&self, len: usize, offset_of: impl Fn(&Stretch) -> Option<u64>) -> Option<(u8, usize)> {
        (0_u8..).zip(&self.stretches).find_map(|(at, stretch)| {
            let offset = offset_of(stretch)?;
            let fits = offset.checked_add(len as u64)? <= stretch.len;
            fits.then_some((at, usize::try_from(stretch.offset + offset).ok()?))
        })
    }

    /// Returns as much of `len` bytes at the driver's address `address` as lies in one stretch.
    #[inline]
    fn piece(&self, address: u64, len: usize) -> Option<Piece> {
        (0_u8..).zip(&self.stretches).find_map(|(at, stretch)| {
            let offset = address.checked_sub(stretch.guest).filter(|offset| *offset < stretch.len)?;
            let len = usize::try_from(stretch.len - offset).map_or(len, |rest| rest.min(len));
            Some(Piece { stretch: at, offset: usize::try_from(stretch.offset + offset).ok()?, len })
        })
    }

    /// Puts the pieces of `len` bytes at the driver's address `address` into `pieces`.
    fn pieces(&self, mut address: u64, len: u32, pieces: &mut ArrayVec<Piece, PIECES_MAX>) -> Result<(), Broken> {
        let mut left = len as usize;
        while left > 0 {
            let piece = self.piece(address, left).ok_or(Broken::Outside)?;
            pieces.try_push(piece).map_err(|_| Broken::Chain)?;
            address = address.checked_add(piece.len as u64).ok_or(Broken::Outside)?;
            left -= piece.len;
        }
        Ok(())
    }

    fn at(&self, address: u64) -> Option<(&CommonRegion, usize)> {
        let stretch = self.stretches.iter().find(|it| address.wrapping_sub(it.guest) < it.len)?;
        let offset = stretch.offset.wrapping_add(address - stretch.guest);
        Some((&stretch.region, usize::try_from(offset).ok()?))
    }

    /// Brings `len` bytes at the driver's address `address` nearer, to be read soon.
    #[inline]
    pub fn prefetch_to_read(&self, address: u64, len: usize) {
        if let Some((region, offset)) = self.at(address) {
            region.prefetch_to_read(offset, len);
        }
    }

    /// Brings `len` bytes at the driver's address `address` nearer, to be written soon.
    #[inline]
    pub fn prefetch_to_write(&self, address: u64, len: usize) {
        if let Some((region, offset)) = self.at(address) {
            region.prefetch_to_write(offset, len);
        }
    }

    /// Returns the memory in which a piece lies, and its offset there in bytes.
    #[inline]
    pub fn place_of(&self, piece: Piece) -> (&CommonRegion, usize) {
        (self.region(piece), piece.offset)
    }

    /// Notes that the first `len` bytes of a piece were written, if such notes are taken.
    #[inline]
    pub fn note(&self, piece: Piece, len: usize) {
        if let Some(log) = &self.log {
            let stretch = &self.stretches[usize::from(piece.stretch)];
            log.note((piece.offset as u64).wrapping_sub(stretch.offset).wrapping_add(stretch.guest), len);
        }
    }

    fn region(&self, piece: Piece) -> &CommonRegion {
        &self.stretches[usize::from(piece.stretch)].region
    }

    /// Copies bytes from the pieces, from byte `from` on, as many as `into` has. Returns whether there were as many.
    #[inline]
    pub fn copy_to(&self, pieces: &[Piece], mut from: usize, into: &mut [u8]) -> bool {
        let mut done = 0;
        for piece in pieces {
            if from >= piece.len {
                from -= piece.len;
                continue;
            }
            let len = (piece.len - from).min(into.len() - done);
            let room = &mut into[done..done + len];
            self.region(*piece).copy_to(piece.offset + from, room).expect("the piece was checked");
            done += len;
            from = 0;
            if done == into.len() {
                return true;
            }
        }
        done == into.len()
    }

    /// Has `copy` fill the pieces with `len` bytes, from their byte `from` on, and notes them. Its arguments: offset among the `len`
    /// bytes, number of bytes, region, and offset in the region.
    #[inline]
    pub fn fill(
        &self,
        pieces: &[Piece],
        mut from: usize,
        len: usize,
        mut copy: impl FnMut(usize, usize, &CommonRegion, usize) -> Result<(), RegionError>,
    ) {
        let mut done = 0;
        for piece in pieces {
            if from >= piece.len {
                from -= piece.len;
                continue;
            }
            let part = (piece.len - from).min(len - done);
            copy(done, part, self.region(*piece), piece.offset + from).expect("the piece was checked");
            self.note(Piece { offset: piece.offset + from, ..*piece }, part);
            done += part;
            from = 0;
            if done == len {
                return;
            }
        }
    }
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
        let (region, at) = lend(descriptors, DESCRIPTOR_LEN * count)?;
        let descriptors = region.span::<AtomicU64>(at, 2 * count).map_err(odd)?;
        let words = RING + count + 1;
        let (region, at) = lend(available, 2 * words)?;
        let available = region.span::<AtomicU16>(at, words).map_err(odd)?;
        let words = RING + 4 * count + 1;
        let (region, at) = lend(used, 2 * words)?;
        let used_ring = region.span::<AtomicU32>(at + 2 * RING, 2 * count).map_err(odd)?;
        let used = region.span::<AtomicU16>(at, words).map_err(odd)?;
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
