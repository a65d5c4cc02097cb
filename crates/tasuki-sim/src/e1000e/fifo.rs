//! The receive packet buffer: frames that came from the wire and are not yet in the host's memory.

use std::collections::VecDeque;

/// Unit of allocation in bytes, and the overhead of a frame. The data sheet gives neither; a status word of 16 bytes
/// and lines of 16 bytes make 13 full frames or 256 of the shortest in 20 KB.
const UNIT: usize = 16;

/// Larger than the largest buffer that PBA can select, so that a frame, which must not wrap, fits behind the frames
/// that wait.
const STORE_LEN: usize = 128 << 10;

/// A waiting frame, with the receiver's findings at its arrival.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    at: usize,
    /// Bytes in the store: the frame, with its check sequence if that is kept.
    pub len: usize,
    /// Bytes of the packet buffer that the frame takes.
    cost: usize,
    /// Bytes already written to the host's memory.
    pub done: usize,
    /// Receive queue of the frame.
    pub queue: u8,
    /// RSS type and hash; the hash is 0 if there is none.
    pub rss: (u8, u32),
    /// Status and error bits for the frame's last descriptor, without DD and EOP.
    pub status: u32,
    /// VLAN tag, if the receiver stripped it.
    pub vlan: u16,
}

/// The receiver's findings about a frame.
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
    /// Number of waiting frames per queue.
    of_queue: [u32; 2],
    used: usize,
    capacity: usize,
}

impl Fifo {
    pub fn new(capacity: usize) -> Self {
        // 64 KB is the most that the register can select; the shortest frame takes five units.
        let waiting = VecDeque::with_capacity((64 << 10) / (4 * UNIT));
        Fifo { store: vec![0; STORE_LEN].into_boxed_slice(), next: 0, waiting, of_queue: [0; 2], used: 0, capacity }
    }

    /// Empties the buffer and sets its capacity in bytes.
    pub fn reset(&mut self, capacity: usize) {
        self.waiting.clear();
        self.of_queue = [0; 2];
        self.next = 0;
        self.used = 0;
        self.capacity = capacity.min(64 << 10);
    }

    /// Returns the bytes of the buffer that a frame of `len` bytes takes, check sequence included.
    fn cost(len: usize) -> usize {
        UNIT + len.next_multiple_of(UNIT)
    }

    pub fn fits(&self, wire_len: usize) -> bool {
        self.used + Self::cost(wire_len) <= self.capacity
    }

    /// Returns the bytes in use.
    pub fn used(&self) -> usize {
        self.used
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of frames that wait for descriptors of a queue.
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

    /// Returns the oldest frame.
    #[inline]
    pub fn front(&self) -> Option<Waiting> {
        self.waiting.front().copied()
    }

    /// Returns the next bytes of a waiting frame that are not done, at most `len`.
    #[inline]
    pub fn bytes(&self, waiting: &Waiting, len: usize) -> &[u8] {
        let end = (waiting.done + len).min(waiting.len);
        &self.store[waiting.at + waiting.done..waiting.at + end]
    }

    /// Marks `len` more bytes of the oldest frame as done, and removes the frame after its last byte.
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
