//! A packed ring as VIRTIO 1.2, 2.8 describes it, written as plainly as it can be, as the judge: `virtio-queue` has none.
//!
//! The specification leaves open, and both are right:
//!
//! - **D1** Chains of more than 256 descriptors or pieces are refused (Q4), in the ring and in a table.
//! - **D2** A device that does not know what it may use at once takes no more than 495 chains that it has not shown.
//! - **D3** A driver that asks for an interrupt at a descriptor which does not exist gets one, or none.
//! - **D4** With IN_ORDER, one used descriptor may stand for several chains into which nothing was written (2.8.8): it does
//!   wherever it can.

use std::collections::VecDeque;

use tasuki_net::virtq::{COMPLETIONS_MAX, Head, PIECES_MAX};
use vm_memory::{Bytes, GuestAddress};

use super::memory::{Memory, Places};
use super::{Broken, Judge, Taken};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A place in the ring, and the wrap counter there.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Position {
    at: u16,
    wraps: bool,
}

impl Position {
    fn of(word: u16) -> Self {
        Position { at: word & 0x7fff, wraps: word >> 15 == 1 }
    }

    fn word(self) -> u16 {
        self.at | u16::from(self.wraps) << 15
    }

    fn on(self, size: u16) -> Self {
        match self.at + 1 {
            end if end == size => Position { at: 0, wraps: !self.wraps },
            at => Position { at, ..self },
        }
    }

    fn plus(self, count: u16, size: u16) -> Self {
        (0..count).fold(self, |position, _| position.on(size))
    }
}

/// A used descriptor that is not written yet.
#[derive(Clone, Copy)]
struct Used {
    head: Head,
    len: u32,
}

#[derive(Clone)]
pub struct Ring {
    next: Position,
    done: Position,
    shown: Position,
    /// Chains that are taken and not completed, and completed ones that are not shown.
    taken: VecDeque<Head>,
    used: Vec<Used>,
}

pub struct Packed {
    size: u16,
    /// Addresses of the descriptors, the driver area and the device area.
    places: [u64; 3],
    has_event_index: bool,
    is_in_order: bool,
    ring: Ring,
}

/// Address, length, id and flags.
type Descriptor = (u64, u32, u16, u16);

impl Packed {
    /// Opens a ring at a position. `features`: event index, IN_ORDER.
    pub fn new(size: u16, places: [u64; 3], at: u16, features: [bool; 2]) -> Result<Self, Broken> {
        let is_aligned = places.into_iter().zip([8, 4, 4]).all(|(at, to)| at % to == 0);
        let lengths = [16 * u64::from(size), 4, 4];
        let is_there = places.into_iter().zip(lengths).all(|(at, len)| Memory::is_in_one(at, len));
        let position = Position::of(at);
        if !(1..=32768).contains(&size) || position.at >= size || !is_aligned || !is_there {
            return Err(Broken);
        }
        let (taken, used) = (VecDeque::new(), Vec::new());
        let ring = Ring { next: position, done: position, shown: position, taken, used };
        Ok(Packed { size, places, has_event_index: features[0], is_in_order: features[1], ring })
    }

    fn read(memory: &Memory, at: u64) -> Descriptor {
        let bytes: [u8; 16] = memory.theirs.read_obj(GuestAddress(at)).expect("it was checked");
        let word = u128::from_le_bytes(bytes);
        (word as u64, (word >> 64) as u32, (word >> 96) as u16, (word >> 112) as u16)
    }

    fn descriptor(&self, memory: &Memory, at: Position) -> Descriptor {
        Self::read(memory, self.places[0] + 16 * u64::from(at.at))
    }

    /// Returns the number of descriptors that the driver can have made available.
    fn left(&self) -> u16 {
        let held = |heads: &mut dyn Iterator<Item = u16>| heads.sum::<u16>();
        let [taken, used] = [
            held(&mut self.ring.taken.iter().map(|head| head.slots)),
            held(&mut self.ring.used.iter().map(|used| used.head.slots)),
        ];
        self.size - taken - used
    }

    /// Returns whether the descriptor there is available (2.8.1).
    fn is_available(&self, memory: &Memory, at: Position) -> bool {
        let (.., flags) = self.descriptor(memory, at);
        (flags & AVAILABLE != 0) == at.wraps && (flags & USED != 0) != at.wraps
    }

    fn chain(&self, memory: &Memory) -> Result<Taken, Broken> {
        let (mut readable, mut writable) = (Places::new(), Places::new());
        let mut add = |(address, len, _, flags): Descriptor| {
            let places = if flags & WRITE == 0 { &mut readable } else { &mut writable };
            memory.add_to(places, (address, len)).map_err(|()| Broken)
        };
        let (mut at, mut slots) = (self.ring.next, 0);
        let id = loop {
            if slots == self.left() || usize::from(slots) == PIECES_MAX {
                return Err(Broken);
            }
            let named = self.descriptor(memory, at);
            let (address, len, id, flags) = named;
            (at, slots) = (at.on(self.size), slots + 1);
            if flags & INDIRECT == 0 {
                add(named)?;
            } else if slots > 1 || flags & NEXT != 0 {
                return Err(Broken);
            } else {
                let count = len / 16;
                if len % 16 != 0 || count == 0 || count as usize > PIECES_MAX || !memory.is_there(address, len) {
                    return Err(Broken);
                }
                for entry in 0..u64::from(count) {
                    add(Self::read(memory, address + 16 * entry))?;
                }
            }
            if flags & NEXT == 0 {
                break id;
            }
        };
        if readable.len() > PIECES_MAX || writable.len() > PIECES_MAX {
            return Err(Broken);
        }
        Ok((Head { id, slots }, readable, writable))
    }

    /// Writes used descriptors, of which the first one goes there (2.8.3). Returns the number of descriptors that they
    /// stand for.
    fn write(&self, memory: &Memory, first: Position, used: &[Used]) -> u16 {
        let mut at = first;
        for Used { head, len } in used {
            let marks = if at.wraps { AVAILABLE | USED } else { 0 };
            let flags = marks | if *len > 0 { WRITE } else { 0 };
            let word = u64::from(*len) | u64::from(head.id) << 32 | u64::from(flags) << 48;
            let place = self.places[0] + 16 * u64::from(at.at) + 8;
            memory.theirs.write_obj(word.to_le(), GuestAddress(place)).expect("it was checked");
            at = at.plus(head.slots, self.size);
        }
        used.iter().map(|used| used.head.slots).sum()
    }

    /// Returns what a successor knows: the position of the first completion that was not shown, and all of them.
    pub fn noted(&self) -> (u16, Vec<(Head, u32)>) {
        (self.ring.shown.word(), self.ring.used.iter().map(|used| (used.head, used.len)).collect())
    }

    /// Shows a predecessor's completions, if they lead to where the ring is and the first of them is available still.
    pub fn show_again(&mut self, memory: &Memory, (first, completions): &(u16, Vec<(Head, u32)>)) {
        let first = Position::of(*first);
        let used: Vec<_> = completions.iter().map(|(head, len)| Used { head: *head, len: *len }).collect();
        let count = used.iter().map(|used| used.head.slots).sum();
        let leads_here = first.at < self.size && count > 0 && first.plus(count, self.size) == self.ring.done;
        if leads_here && self.is_available(memory, first) {
            self.write(memory, first, &used);
        }
    }
}

impl Judge for Packed {
    type State = Ring;

    fn look(&mut self, memory: &Memory) -> Result<bool, Broken> {
        // D2
        let has_room = self.ring.taken.len() + self.ring.used.len() < COMPLETIONS_MAX;
        Ok(self.left() > 0 && has_room && self.is_available(memory, self.ring.next))
    }

    fn take(&mut self, memory: &Memory) -> Result<Option<Taken>, Broken> {
        if !self.look(memory)? {
            return Ok(None);
        }
        let taken = self.chain(memory)?;
        self.ring.next = self.ring.next.plus(taken.0.slots, self.size);
        self.ring.taken.push_back(taken.0);
        Ok(Some(taken))
    }

    fn put_back(&mut self, head: Head) {
        assert_eq!(self.ring.taken.pop_back(), Some(head), "the last one is put back");
        // A lap is two rounds.
        self.ring.next = self.ring.next.plus(2 * self.size - head.slots, self.size);
    }

    fn complete(&mut self, _: &Memory, head: Head, len: u32) {
        assert_eq!(self.ring.taken.pop_front(), Some(head), "the oldest one is completed (Q5)");
        self.ring.done = self.ring.done.plus(head.slots, self.size);
        match self.ring.used.last_mut() {
            // D4
            Some(last) if self.is_in_order && last.len == 0 && len == 0 => {
                last.head = Head { slots: last.head.slots + head.slots, ..head };
            }
            _ => self.ring.used.push(Used { head, len }),
        }
    }

    fn show(&mut self, memory: &Memory) -> Option<bool> {
        if self.ring.used.is_empty() {
            return Some(false);
        }
        let used = std::mem::take(&mut self.ring.used);
        let before = std::mem::replace(&mut self.ring.shown, self.ring.done);
        let count = self.write(memory, before, &used);
        let [event, flags] = [0, 2].map(|at| memory.half(self.places[1] + at));
        let event = Position::of(event);
        match flags & 3 {
            1 => Some(false),
            // D3
            2 if self.has_event_index && event.at >= self.size => None,
            2 if self.has_event_index => Some((0..count).any(|passed| before.plus(passed, self.size) == event)),
            _ => Some(true),
        }
    }

    fn want_kicks(&mut self, memory: &Memory, yes: bool) {
        let [event, flags] = match (yes, self.has_event_index) {
            (false, _) => [0, 1],
            // The first number counts for nothing; 0 is what no device has served.
            (true, false) => [1, 0],
            (true, true) => [self.ring.next.word(), 2],
        };
        let word = u32::from(event) | u32::from(flags) << 16;
        memory.theirs.write_obj(word.to_le(), GuestAddress(self.places[2])).expect("it was checked");
    }

    fn positions(&self) -> (u16, u16) {
        (self.ring.next.word(), self.ring.done.word())
    }

    fn state(&self) -> Ring {
        self.ring.clone()
    }

    fn rewind(&mut self, _: &Memory, to: Ring) {
        self.ring = to;
    }
}
