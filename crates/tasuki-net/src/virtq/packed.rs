//! A packed ring.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, 2.8.
//!
//! A used descriptor overwrites an available one, so nothing is written here before [`Packed::show`]. Until then the
//! completions are words in private memory. A successor that has a copy of them [shows them again](Packed::show_again).

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use arrayvec::ArrayVec;
use tasuki_shm::region::Span;

use super::{
    Broken, Chain, Descriptor, DriverMemory, Head, INDIRECT, Layout, NEXT, PIECES_MAX, Piece, Place, Ring, SIZE_MAX,
    Table, WRITE, add,
};
use crate::vni::ledger::point;

/// Maximum number of chains that are completed and not shown.
pub const COMPLETIONS_MAX: usize = 495;

/// Length in bytes of the structure in the driver area and in the device area (2.8.14).
pub(super) const EVENT_LEN: usize = 4;

/// Flags of a descriptor by which it is available or used (2.8.1).
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// `flags` of the structures of 2.8.14: events are wanted; they are not; the one of a certain descriptor is.
const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
const DESCRIPTOR: u16 = 2;

/// What the place in the device area has while all kicks are wanted, where it counts for nothing: with that, the area is
/// never 0 in a ring that was served, as it is in a new one.
const SERVED: u32 = 1;

/// Bits in which the marks of two laps differ, in the upper half of a [`Position`].
const OTHER_LAP: u32 = 0x8080 << 16;

/// A place in a ring, with the wrap counter there (2.8.1).
///
/// Its upper half is how an available descriptor is marked there: [`AVAILABLE`] if the wrap counter is 1, and [`USED`] if
/// not. It is one word for the reason of the [split ring's index](super::split).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position(u32);

impl Position {
    /// Reads a position as it is in messages and in event structures: the wrap counter in bit 15.
    fn of(word: u16) -> Self {
        let mark = if word >> 15 != 0 { AVAILABLE } else { USED };
        Position(u32::from(word & 0x7fff) | u32::from(mark) << 16)
    }

    #[expect(clippy::cast_possible_truncation, reason = "it has 15 bits")]
    fn get(self) -> u16 {
        self.index() as u16 | u16::from(self.mark() == AVAILABLE) << 15
    }

    fn index(self) -> u32 {
        self.0 & 0xffff
    }

    fn mark(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Returns the position `count` places on, which are no more than the ring of `size` has.
    #[inline]
    fn plus(self, count: u16, size: u32) -> Self {
        let on = Position(self.0 + u32::from(count));
        if on.index() < size { on } else { Position((on.0 - size) ^ OTHER_LAP) }
    }

    /// Returns the position so many places before.
    fn minus(self, count: u16, size: u32) -> Self {
        let count = u32::from(count);
        Position(if self.index() >= count { self.0 } else { (self.0 ^ OTHER_LAP) + size } - count)
    }

    /// Returns how a used descriptor is marked there.
    fn used_mark(self) -> u16 {
        if self.mark() == AVAILABLE { AVAILABLE | USED } else { 0 }
    }

    /// Returns how far it is behind `other`, in a ring of `size`.
    fn since(self, other: Self, size: u32) -> u32 {
        let place = |it: Self| it.index() + if it.mark() == AVAILABLE { 0 } else { size };
        (place(self) + 2 * size - place(other)) % (2 * size)
    }
}

/// Reads a descriptor (2.8.13).
#[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
fn descriptor([address, rest]: [u64; 2]) -> Descriptor {
    let rest = u64::from_le(rest);
    Descriptor {
        address: u64::from_le(address),
        len: rest as u32,
        flags: (rest >> 48) as u16 & !(AVAILABLE | USED),
        next: (rest >> 32) as u16,
    }
}

/// Builds the word of a completion: length, id, and number of descriptors.
fn completion(len: u32, Head { id, slots }: Head) -> u64 {
    u64::from(len) | u64::from(id) << 32 | u64::from(slots) << 48
}

/// Returns the number of descriptors of a completion.
fn slots_of(completion: u64) -> u16 {
    (completion >> 48) as u16
}

/// Returns the second word of a used descriptor at a position (2.8.3): the first one counts for nothing there.
fn used_word(completion: u64, at: Position) -> u64 {
    let is_written = completion & u64::from(u32::MAX) != 0;
    let flags = at.used_mark() | if is_written { WRITE } else { 0 };
    (completion & !(0xffff << 48) | u64::from(flags) << 48).to_le()
}

/// The device's end of a packed ring.
#[derive(Debug)]
pub struct Packed {
    size: u32,
    descriptors: Span<AtomicU64>,
    /// The structures by which the driver says when it wants interrupts, and we when we want kicks: 2.8.14.
    driver: Span<AtomicU32>,
    device: Span<AtomicU32>,
    has_event_index: bool,
    /// Whether one used descriptor stands for all chains in a row into which we wrote nothing (2.8.8).
    is_in_order: bool,
    /// The driver's addresses of the descriptors and of the device area.
    addresses: [u64; 2],
    /// Whether writes are noted, and whether all of them are.
    is_logged: bool,
    is_noted: bool,
    /// Whether the last look ahead in this turn found a chain.
    sees_ahead: bool,
    /// The next chain that we take, and the place of the next used descriptor (Q1).
    next: Position,
    done: Position,
    /// Number of descriptors that are taken and not shown (Q2).
    taken: u32,
    /// Number of chains that are taken and not completed.
    open: usize,
    completions: Box<ArrayVec<u64, COMPLETIONS_MAX>>,
    /// How far the driver sees it.
    shown: Position,
    progress: u16,
}

/// Where a ring is.
#[derive(Debug, Clone, Copy)]
pub struct State {
    next: Position,
    done: Position,
    taken: u32,
    open: usize,
    completions: usize,
    /// More chains may have been added to the last completion since.
    last: Option<u64>,
}

impl Packed {
    /// Position at which a driver begins (2.8.1).
    pub const BEGINNING: u16 = 0x8000;

    /// Opens a ring at a position: a ring in which each chain that was taken was also completed has only one.
    pub fn new(
        memory: &DriverMemory,
        place: Place,
        position: u16,
        has_event_index: bool,
        is_in_order: bool,
    ) -> Result<Self, Broken> {
        let size = place.size;
        if size == 0 || size > SIZE_MAX {
            return Err(Broken::Size(size.into()));
        }
        let position = Position::of(position);
        if position.index() >= size.into() {
            return Err(Broken::Start(position.get() & 0x7fff));
        }
        let [descriptors, driver, device] = place.parts(Layout::Packed);
        let event = |part| {
            let (region, at) = memory.lend(part)?;
            region.span::<AtomicU32>(at, 1).map_err(|_| Broken::Ring)
        };
        let (driver, device) = (event(driver)?, event(device)?);
        let (region, at) = memory.lend(descriptors)?;
        let descriptors = region.span::<AtomicU64>(at, descriptors.1 / 8).map_err(|_| Broken::Ring)?;
        let address = |user| memory.guest_address(user).ok_or(Broken::Ring);
        Ok(Packed {
            size: size.into(),
            descriptors,
            driver,
            device,
            has_event_index,
            is_in_order,
            addresses: [address(place.descriptors)?, address(place.used)?],
            is_logged: false,
            is_noted: true,
            sees_ahead: true,
            next: position,
            done: position,
            taken: 0,
            open: 0,
            completions: Box::default(),
            shown: position,
            progress: 0,
        })
    }

    /// Returns the word of a descriptor that says whether it is available, with all but the address.
    #[inline]
    fn rest(&self, at: Position) -> &AtomicU64 {
        &self.descriptors[2 * at.index() as usize + 1]
    }

    /// Returns that word of the next descriptor, if the driver has made it available (Q2).
    #[inline]
    fn available(&self) -> Option<u64> {
        if self.taken == self.size || self.left() == 0 {
            return None;
        }
        let rest = self.rest(self.next).load(Acquire);
        is_available(rest, self.next).then_some(rest)
    }

    /// Reads the other word of a descriptor.
    #[inline]
    fn descriptor(&self, at: Position, rest: u64) -> Descriptor {
        descriptor([self.descriptors[2 * at.index() as usize].load(Relaxed), rest])
    }

    /// Walks a table of descriptors, which lie in their order and have no flag but [`WRITE`]: others count for nothing
    /// (2.8.7).
    fn walk_table(memory: &DriverMemory, named: Descriptor, chain: &mut Chain) -> Result<(), Broken> {
        let table = Table::of(memory, named)?;
        if table.count > PIECES_MAX {
            return Err(Broken::Chain);
        }
        (0..table.count).try_for_each(|at| add(memory, descriptor(table.words(memory, at)), chain))
    }

    /// Returns the position of the next chain, and that of the next used descriptor.
    pub fn positions(&self) -> (u16, u16) {
        (self.next.get(), self.done.get())
    }

    pub(super) fn progress(&self) -> u16 {
        self.progress
    }

    /// Returns what is completed and not shown, and the position of the first.
    pub fn completions(&self) -> (u16, &[u64]) {
        (self.shown.get(), &self.completions)
    }

    /// Writes used descriptors, the first one's flags last: the driver reads them in their order. Returns the number of
    /// descriptors that they complete.
    #[inline]
    fn write(&self, first: Position, completions: &[u64]) -> u32 {
        let [now, rest @ ..] = completions else { return 0 };
        let mut at = first.plus(slots_of(*now), self.size);
        for completion in rest {
            self.rest(at).store(used_word(*completion, at), Relaxed);
            at = at.plus(slots_of(*completion), self.size);
        }
        point("virtq.written");
        self.rest(first).store(used_word(*now, first), Release);
        at.since(first, self.size)
    }

    /// Shows the completed chains to the driver. Returns whether it wants an interrupt for them (2.8.10).
    #[inline]
    pub fn show(&mut self) -> bool {
        if self.completions.is_empty() {
            return false;
        }
        let before = self.shown;
        let count = self.write(before, &self.completions);
        self.completions.clear();
        self.shown = self.done;
        self.taken -= count;
        self.sees_ahead = true;
        self.progress = self.progress.wrapping_add(u16::try_from(count).expect("no more than the ring has"));
        self.is_noted = false;
        fence(SeqCst);
        let [event, flags] = halves(self.driver[0].load(Relaxed));
        match flags & 3 {
            DISABLE => false,
            DESCRIPTOR if self.has_event_index => Position::of(event).since(before, self.size) < count,
            _ => true,
        }
    }

    /// Shows a predecessor's completions, of which `first` is the position of the first, if they lead to where we are
    /// and the driver may not have seen them. One that has seen them may have made the descriptors available anew.
    pub fn show_again(&mut self, first: u16, completions: &[u64]) {
        // What it wrote is to be noted, and whether it did is not known.
        self.is_noted = false;
        let first = Position::of(first);
        let count: u32 = completions.iter().map(|completion| u32::from(slots_of(*completion))).sum();
        let is_known = first.index() < self.size && (1..=self.size).contains(&count);
        if is_known && self.done.since(first, self.size) == count && is_available(self.rest(first).load(Acquire), first)
        {
            self.write(first, completions);
        }
    }

    /// Returns whether a device has served this ring since its driver made it.
    pub fn was_served(&self) -> bool {
        self.device[0].load(Relaxed) != 0
    }

    /// Returns where the ring stands by its descriptors, if all its chains have one: then the used flag of those that the
    /// device has passed in this lap is that of the lap, and that of the others is the other. A driver that makes
    /// descriptors available leaves this flag as it is. In a ring of longer chains the device passes over descriptors, and
    /// the flags seldom fit together.
    pub fn standing(&self) -> Option<u16> {
        let rests = self.descriptors.iter().skip(1).step_by(2);
        let mut laps = rests.map(|rest| u64::from_le(rest.load(Relaxed)) >> 48 & u64::from(USED) != 0);
        let first = laps.next()?;
        let passed = 1 + laps.by_ref().take_while(|lap| *lap == first).count();
        let is_whole = passed == self.size as usize;
        let (at, lap) = if is_whole { (0, !first) } else { (u16::try_from(passed).ok()?, first) };
        laps.all(|lap| lap != first).then_some(at | u16::from(lap) << 15)
    }

    pub(super) fn set_log(&mut self, log: Option<u64>) {
        self.is_logged = log.is_some();
    }

    /// Notes the descriptors and the device area. The front end's own address for that is of no use: QEMU's is of the
    /// device area, and used descriptors lie elsewhere.
    #[inline]
    pub(super) fn note_used(&mut self, memory: &DriverMemory) {
        if let Some(log) = memory.log.as_ref().filter(|_| self.is_logged)
            && !std::mem::replace(&mut self.is_noted, true)
        {
            log.note(self.addresses[0], 8 * self.descriptors.len());
            log.note(self.addresses[1], EVENT_LEN);
        }
    }

    /// Tells the driver whether to kick (2.8.10).
    pub fn want_kicks(&mut self, yes: bool) {
        self.is_noted = false;
        let event = match (yes, self.has_event_index) {
            (false, _) => u32::from(DISABLE) << 16,
            (true, false) => u32::from(ENABLE) << 16 | SERVED,
            // The driver kicks when it makes this descriptor available.
            (true, true) => u32::from(DESCRIPTOR) << 16 | u32::from(self.next.get()),
        };
        self.device[0].store(event.to_le(), Relaxed);
        if yes {
            fence(SeqCst);
        }
    }
}

/// Returns whether this word is that of an available descriptor there.
#[inline]
fn is_available(rest: u64, at: Position) -> bool {
    u64::from_le(rest) >> 48 & u64::from(AVAILABLE | USED) == u64::from(at.mark())
}

/// Returns the position and the flags of an event structure.
#[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
fn halves(event: u32) -> [u16; 2] {
    let event = u32::from_le(event);
    [event as u16, (event >> 16) as u16]
}

impl Ring for Packed {
    type State = State;

    fn size(&self) -> u16 {
        u16::try_from(self.size).expect("a queue has no more")
    }

    #[inline]
    fn look(&mut self) -> Result<bool, Broken> {
        self.sees_ahead = true;
        Ok(self.available().is_some())
    }

    #[inline]
    fn take(&mut self, memory: &DriverMemory, chain: &mut Chain) -> Result<bool, Broken> {
        let Some(mut rest) = self.available() else { return Ok(false) };
        chain.readable.clear();
        chain.writable.clear();
        let (mut at, mut slots) = (self.next, 0);
        let left = PIECES_MAX.min((self.size - self.taken) as usize);
        loop {
            let descriptor = self.descriptor(at, rest);
            at = at.plus(1, self.size);
            slots += 1;
            let is_last = descriptor.flags & NEXT == 0;
            if descriptor.flags & INDIRECT == 0 {
                add(memory, descriptor, chain)?;
            } else if slots == 1 && is_last {
                Self::walk_table(memory, descriptor, chain)?;
            } else {
                return Err(Broken::Indirect);
            }
            if is_last {
                chain.head = Head { id: descriptor.next, slots };
                break;
            }
            if usize::from(slots) == left {
                return Err(Broken::Chain);
            }
            // The driver made the chain's first descriptor available last (2.8.6).
            rest = self.rest(at).load(Relaxed);
        }
        self.next = at;
        self.taken += u32::from(slots);
        self.open += 1;
        Ok(true)
    }

    #[inline]
    fn address_ahead(&mut self, ahead: u16) -> Option<u64> {
        // The driver writes the lines behind its last chain: do not ask for each of them.
        if !self.sees_ahead || u32::from(ahead) >= self.size - self.taken {
            return None;
        }
        let at = self.next.plus(ahead, self.size);
        self.sees_ahead = is_available(self.rest(at).load(Relaxed), at);
        self.sees_ahead.then(|| u64::from_le(self.descriptors[2 * at.index() as usize].load(Relaxed)))
    }

    #[inline]
    fn next_plain(&mut self, memory: &DriverMemory, len: usize) -> Result<Option<(Head, Piece)>, Broken> {
        let Some(rest) = self.available() else { return Ok(None) };
        let descriptor = self.descriptor(self.next, rest);
        if descriptor.flags != WRITE || (descriptor.len as usize) < len {
            return Ok(None);
        }
        let piece = memory.piece(descriptor.address, descriptor.len as usize);
        Ok(piece
            .filter(|piece| piece.len == descriptor.len as usize)
            .map(|piece| (Head { id: descriptor.next, slots: 1 }, piece)))
    }

    #[inline]
    fn complete_next(&mut self, head: Head, len: u32) {
        self.next = self.next.plus(1, self.size);
        self.taken += 1;
        self.open += 1;
        self.complete(head, len);
    }

    #[inline]
    fn complete(&mut self, head: Head, len: u32) {
        let is_whole = |completion: u64| completion & u64::from(u32::MAX) == 0;
        match self.completions.last_mut() {
            Some(last) if self.is_in_order && len == 0 && is_whole(*last) => {
                *last = completion(0, Head { slots: slots_of(*last) + head.slots, ..head });
            }
            _ => self.completions.push(completion(len, head)),
        }
        self.open -= 1;
        self.done = self.done.plus(head.slots, self.size);
    }

    #[inline]
    fn left(&self) -> usize {
        COMPLETIONS_MAX - self.open - self.completions.len()
    }

    #[inline]
    fn put_back(&mut self, head: Head) {
        self.next = self.next.minus(head.slots, self.size);
        self.taken -= u32::from(head.slots);
        self.open -= 1;
    }

    fn state(&self) -> State {
        let Self { next, done, taken, open, ref completions, .. } = *self;
        State { next, done, taken, open, completions: completions.len(), last: completions.last().copied() }
    }

    fn rewind(&mut self, to: State) {
        (self.next, self.done, self.taken, self.open) = (to.next, to.done, to.taken, to.open);
        self.completions.truncate(to.completions);
        if let (Some(last), Some(was)) = (self.completions.last_mut(), to.last) {
            *last = was;
        }
    }
}
