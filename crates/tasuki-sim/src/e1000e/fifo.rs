//! The receive packet buffer: frames that came from the wire and are not yet in the host's memory.

use std::collections::VecDeque;

/// What the buffer takes for a frame besides its bytes, and the unit in which it is used. The data sheet does not say; a
/// status word of 16 bytes and lines of 16 bytes make 13 full frames or 256 of the shortest in 20 KB.
const UNIT: usize = 16;

/// More than the largest buffer that PBA can ask for, so that a frame which must not wrap finds room behind those that wait.
const STORE_LEN: usize = 128 << 10;

/// A frame that waits. What is known about it was found out when it came.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    at: usize,
    /// Bytes in the store: the frame, and its check sequence if that is kept.
    pub len: usize,
    /// Bytes of the buffer that it takes.
    cost: usize,
    /// Bytes that are in the host's memory already.
    pub done: usize,
    /// Which receive queue it goes to.
    pub queue: u8,
    /// RSS type, and the hash, or 0.
    pub rss: (u8, u32),
    /// Status and error bits of the descriptor of its last byte, without DD and EOP.
    pub status: u32,
    /// Its VLAN tag, if that was taken out.
    pub vlan: u16,
}

/// What the receiver found out about a frame.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    pub queue: u8,
    pub rss: (u8, u32),
    pub status: u32,
    pub vlan: u16,
}

#[derive(Debug)]
pub struct Fifo {
    store: Box<[u8]>,
    /// Where the next frame is stored.
    next: usize,
    waiting: VecDeque<Waiting>,
    /// How many of them go to each queue.
    of_queue: [u32; 2],
    used: usize,
    capacity: usize,
}

impl Fifo {
    pub fn new(capacity: usize) -> Self {
        // 64 KB is the most that the register can say; the shortest frame takes five units.
        let waiting = VecDeque::with_capacity((64 << 10) / (4 * UNIT));
        Fifo { store: vec![0; STORE_LEN].into_boxed_slice(), next: 0, waiting, of_queue: [0; 2], used: 0, capacity }
    }

    /// Empties it; it holds `capacity` bytes from now on.
    pub fn reset(&mut self, capacity: usize) {
        self.waiting.clear();
        self.of_queue = [0; 2];
        self.next = 0;
        self.used = 0;
        self.capacity = capacity.min(64 << 10);
    }

    /// What a frame of `len` bytes, check sequence included, takes of the buffer.
    fn cost(len: usize) -> usize {
        UNIT + len.next_multiple_of(UNIT)
    }

    pub fn fits(&self, wire_len: usize) -> bool {
        self.used + Self::cost(wire_len) <= self.capacity
    }

    /// Bytes of it that are taken.
    pub fn used(&self) -> usize {
        self.used
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Frames that wait for descriptors of a queue.
    pub fn of_queue(&self, queue: usize) -> u32 {
        self.of_queue[queue]
    }

    /// Stores a frame that [fits](Self::fits): `parts` one after the other, padded with zeroes to `len` bytes.
    #[inline]
    pub fn push(&mut self, parts: [&[u8]; 3], len: usize, wire_len: usize, found: Found) {
        if self.next + len > STORE_LEN {
            self.next = 0;
        }
        let to = &mut self.store[self.next..self.next + len];
        let mut filled = 0;
        for part in parts {
            to[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
        }
        to[filled..].fill(0);
        let Found { queue, rss, status, vlan } = found;
        let cost = Self::cost(wire_len);
        self.waiting.push_back(Waiting { at: self.next, len, cost, done: 0, queue, rss, status, vlan });
        self.of_queue[usize::from(queue)] += 1;
        self.used += cost;
        self.next += len;
    }

    /// The frame that came first.
    #[inline]
    pub fn front(&self) -> Option<Waiting> {
        self.waiting.front().copied()
    }

    /// Bytes of a waiting frame from what is done already, at most `len`.
    #[inline]
    pub fn bytes(&self, waiting: &Waiting, len: usize) -> &[u8] {
        let end = (waiting.done + len).min(waiting.len);
        &self.store[waiting.at + waiting.done..waiting.at + end]
    }

    /// So many more bytes of the frame that came first are done. With its last byte it is gone.
    #[inline]
    pub fn advance(&mut self, len: usize) {
        if let Some(front) = self.waiting.front_mut() {
            front.done += len;
            if front.done >= front.len {
                self.used -= front.cost;
                self.of_queue[usize::from(front.queue)] -= 1;
                self.waiting.pop_front();
            }
        }
    }
}
