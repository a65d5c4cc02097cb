//! The driver's end of a packed ring, written from VIRTIO 1.2, 2.8, and sharing nothing with the back end.

use std::collections::VecDeque;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A descriptor: address, length, and flags but those of the ring.
pub type Descriptor = (u64, u32, u16);

/// A place in the ring, and the wrap counter there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    pub at: u16,
    pub wraps: bool,
}

impl Position {
    pub fn of(word: u16) -> Self {
        Position { at: word & 0x7fff, wraps: word & 0x8000 != 0 }
    }

    /// Returns it as vhost-user's messages and the event structures have it.
    pub fn word(self) -> u16 {
        self.at | if self.wraps { 0x8000 } else { 0 }
    }

    pub fn plus(self, count: u16, size: u16) -> Self {
        let at = u32::from(self.at) + u32::from(count);
        let laps = at / u32::from(size);
        Position { at: u16::try_from(at % u32::from(size)).unwrap(), wraps: self.wraps ^ (laps % 2 == 1) }
    }
}

/// What a ring needs of memory.
pub trait Memory {
    fn put(&self, at: u64, bytes: &[u8]);
    fn get(&self, at: u64) -> u16;
}

fn word(memory: &impl Memory, at: u64) -> u32 {
    u32::from(memory.get(at)) | u32::from(memory.get(at + 2)) << 16
}

/// The driver's end.
#[derive(Debug, Clone)]
pub struct Driver {
    /// Where the descriptors, the driver area and the device area are.
    pub places: [u64; 3],
    pub size: u16,
    pub has_event_index: bool,
    /// Whether a used descriptor may stand for the chains before it.
    pub is_in_order: bool,
    /// Where the next chain goes, and where the next used descriptor comes.
    pub next: Position,
    pub used: Position,
    /// Number of descriptors that the device does not have.
    pub free: u16,
    /// Chains that the device has: buffer id, and number of descriptors.
    pub out: VecDeque<(u16, u16)>,
}

impl Driver {
    pub fn new(places: [u64; 3], size: u16, start: u16) -> Self {
        let start = Position::of(start);
        Driver {
            places,
            size,
            has_event_index: false,
            is_in_order: false,
            next: start,
            used: start,
            free: size,
            out: VecDeque::new(),
        }
    }

    /// Makes a chain available. Returns whether the device wants a kick for it (2.8.10).
    pub fn offer(&mut self, memory: &impl Memory, id: u16, chain: &[Descriptor]) -> bool {
        let count = u16::try_from(chain.len()).unwrap();
        assert!(count > 0 && count <= self.free, "the driver keeps to its ring");
        let begin = self.next;
        // The first descriptor's flags come last (2.8.6).
        for (i, (address, len, flags)) in (0..count).zip(chain).rev() {
            let at = begin.plus(i, self.size);
            let place = self.places[0] + 16 * u64::from(at.at);
            memory.put(place, &[&address.to_le_bytes()[..], &len.to_le_bytes(), &id.to_le_bytes()].concat());
            let mark = if at.wraps { AVAILABLE } else { USED };
            let next = if i + 1 < count { NEXT } else { 0 };
            memory.put(place + 14, &(flags | mark | next).to_le_bytes());
        }
        self.next = begin.plus(count, self.size);
        self.free -= count;
        self.out.push_back((id, count));
        let (event, flags) = (memory.get(self.places[2]), memory.get(self.places[2] + 2));
        match flags {
            0 => true,
            1 => false,
            2 if self.has_event_index => (0..count).any(|i| begin.plus(i, self.size).word() == event),
            _ => panic!("the device wants kicks by flags {flags}"),
        }
    }

    /// Returns the next used descriptor, if there is one: the ids of the chains that it stands for, and its length.
    pub fn reclaim(&mut self, memory: &impl Memory) -> Option<(Vec<u16>, u32)> {
        let place = self.places[0] + 16 * u64::from(self.used.at);
        let flags = memory.get(place + 14);
        let both = AVAILABLE | USED;
        if flags & both != if self.used.wraps { both } else { 0 } {
            return None;
        }
        assert_eq!(flags & !(both | WRITE), 0, "reserved flags of a used descriptor");
        let (len, id) = (word(memory, place + 8), memory.get(place + 12));
        assert_eq!(flags & WRITE != 0, len > 0, "it says whether bytes were written");
        let mut ids = Vec::new();
        loop {
            let (first, count) = self.out.pop_front().expect("the device uses what it has");
            self.used = self.used.plus(count, self.size);
            self.free += count;
            ids.push(first);
            if first == id {
                return Some((ids, len));
            }
            assert!(self.is_in_order && len == 0, "chains come back in order: {id} before {first}");
        }
    }

    /// Asks for an interrupt once the device has used the descriptor there, or for all or none.
    pub fn want_interrupt(&self, memory: &impl Memory, event: Option<Position>, all: bool) {
        let (event, flags) = match event {
            Some(event) => (event.word(), 2),
            None => (0, u16::from(!all)),
        };
        memory.put(self.places[1], &[event.to_le_bytes(), flags.to_le_bytes()].concat());
    }
}
