//! The baseline: the buffers that Mint's virtual network interface had before it was improved (S2).
//!
//! All nodes share one *packet buffer*, cut into areas. A *buffer manager* marks the areas in use. An *offset
//! manager* lists, in order, the areas that hold frames for a node. All nodes write all three, so each use of them
//! excludes all others. The document says that the old interface needed that exclusion and did not have it; here one
//! spin lock provides it. The document does not say how far the exclusion has to reach. We measure both ways, with
//! the copies under the lock and without, and count the faster one.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tasuki_shm::line::{LINE_LEN, LINE_WORDS, Line};
use tasuki_shm::region::{Pages, Region, Span};
use tasuki_shm::sync::AtomicU64;

use super::pair::{in_turn, private_frames};
use super::shared::Shared;
use crate::case::Ends;
use crate::orders::Orders;
use crate::sample::Sample;

/// Bytes of the packet buffer (S2).
const PACKETS: usize = 392_200;

/// Bytes of an area: a frame of 1,518 bytes and its origin.
const AREA: usize = 1532;
const AREAS: usize = PACKETS / AREA;

/// Bytes of a frame.
const LEN: usize = 1518;

/// The receiving node of the two.
const SINK: usize = 0;

/// Lines of the managers: the lock; the hint of the buffer manager; the node's two offsets; the areas' in-use marks;
/// the areas of the frames.
const LOCK: usize = 0;
const HINT: usize = 1;
const OFFSETS: usize = 2;
const IN_USE: usize = 3;
const QUEUE: usize = IN_USE + AREAS / LINE_WORDS;
const LINES: usize = QUEUE + AREAS / LINE_WORDS;
const _: () = assert!(AREAS.is_multiple_of(LINE_WORDS));

/// Makes the packet buffer and the two managers.
pub fn memory() -> Result<Ends> {
    let packets = Shared::create(PACKETS)?;
    let managers = Region::create("tasuki-bench managers", LINES * LINE_LEN, Pages::Small)?.into_fd();
    let copies = [managers.try_clone(), packets.try_clone()].into_iter().collect::<Result<Vec<_>, _>>();
    Ok(Ends { server: copies.context("no descriptor is left for a case")?, client: vec![managers, packets] })
}

/// Mappings of a node. The managers are loaded and stored under the lock, except where a comment says otherwise.
struct Node {
    managers: Span<Line>,
    packets: Shared,
}

impl Node {
    fn new(orders: &mut Orders) -> Result<Self> {
        let managers = Region::adopt(orders.next_fd()?)?.span(0, LINES)?;
        Ok(Node { managers, packets: Shared::map(&orders.next_fd()?, PACKETS)? })
    }

    fn word(&self, first: usize, index: usize) -> &AtomicU64 {
        self.managers[first + index / LINE_WORDS].word(index % LINE_WORDS)
    }

    fn lock(&self) {
        let lock = self.word(LOCK, 0);
        while lock.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            while lock.load(Relaxed) != 0 {
                std::hint::spin_loop();
            }
        }
    }

    fn unlock(&self) {
        self.word(LOCK, 0).store(0, Release);
    }

    /// The buffer manager: takes an unused area and marks it as used.
    fn take_area(&self) -> Option<usize> {
        let hint = usize::try_from(self.word(HINT, 0).load(Relaxed)).expect("an area's number");
        let area = (0..AREAS).map(|i| (hint + i) % AREAS).find(|&area| self.word(IN_USE, area).load(Relaxed) == 0)?;
        self.word(IN_USE, area).store(1, Relaxed);
        self.word(HINT, 0).store(((area + 1) % AREAS) as u64, Relaxed);
        Some(area)
    }

    /// The offset manager: returns the number of frames put for the node, and the number it has taken.
    fn offsets(&self) -> (&AtomicU64, &AtomicU64) {
        (self.word(OFFSETS, 2 * SINK), self.word(OFFSETS, 2 * SINK + 1))
    }

    fn entry(&self, number: u64) -> &AtomicU64 {
        self.word(QUEUE, usize::try_from(number).expect("a number of frames") % AREAS)
    }

    /// Sends a frame; returns whether there was room.
    fn send<const COPIES_LOCKED: bool>(&self, frame: &[u8]) -> bool {
        let (put, _) = self.offsets();
        self.lock();
        let Some(area) = self.take_area() else {
            self.unlock();
            return false;
        };
        if !COPIES_LOCKED {
            self.unlock();
        }
        self.packets.copy_in(area * AREA, frame);
        if !COPIES_LOCKED {
            self.lock();
        }
        let number = put.load(Relaxed);
        self.entry(number).store(area as u64, Relaxed);
        put.store(number + 1, Relaxed);
        self.unlock();
        true
    }

    /// Receives a frame; returns whether there was one.
    fn receive<const COPIES_LOCKED: bool>(&self, into: &mut [u8]) -> bool {
        let (put, taken) = self.offsets();
        // Load without the lock: in Mint an interrupt announces a frame.
        if put.load(Relaxed) == taken.load(Relaxed) {
            return false;
        }
        self.lock();
        let number = taken.load(Relaxed);
        let area = usize::try_from(self.entry(number).load(Relaxed)).expect("an area's number");
        if !COPIES_LOCKED {
            self.unlock();
        }
        self.packets.copy_out(area * AREA, into);
        if !COPIES_LOCKED {
            self.lock();
        }
        self.word(IN_USE, area).store(0, Relaxed);
        taken.store(number + 1, Relaxed);
        self.unlock();
        true
    }
}

pub fn receive<const COPIES_LOCKED: bool>(mut orders: Orders) -> Result<()> {
    let total = orders.total();
    let node = Node::new(&mut orders)?;
    let mut buffers = private_frames(LEN);
    let mut wrong = 0_u64;
    for number in 0..total {
        let buffer = buffers[in_turn(number)].bytes();
        while !node.receive::<COPIES_LOCKED>(buffer) {
            std::hint::spin_loop();
        }
        wrong += u64::from(usize::from(buffer[0]) != in_turn(number));
    }
    ensure!(wrong == 0, "{wrong} frames are not as they were sent");
    Ok(())
}

/// Sends all frames; notes frames a second.
pub fn send<const COPIES_LOCKED: bool>(mut orders: Orders) -> Result<Sample> {
    let (warmup, total) = (orders.warmup, orders.total());
    let node = Node::new(&mut orders)?;
    let mut frames = private_frames(LEN);
    let (_, taken) = node.offsets();
    let mut sample = Sample::new();
    let mut number = 0;
    for until in [warmup, total] {
        let (start, first) = (Instant::now(), number);
        while number < until {
            let frame = frames[in_turn(number)].bytes();
            while !node.send::<COPIES_LOCKED>(frame) {
                std::hint::spin_loop();
            }
            number += 1;
        }
        while taken.load(Relaxed) < until {
            std::hint::spin_loop();
        }
        if until == total {
            sample.rate(number - first, start.elapsed())?;
        }
    }
    Ok(sample)
}
