//! The floor: frames go between private buffers of two cores through shared memory, with only `memcpy` and two
//! counters.
//!
//! It has no address, no sleep and no check of the other side; each side trusts the other.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tasuki_shm::line::{LINE_LEN, Line};
use tasuki_shm::region::{Pages, Region, Span};

use super::pair::{Buffer, in_turn, private_frames};
use super::shared::Shared;
use crate::case::Ends;
use crate::orders::Orders;
use crate::sample::Sample;

/// Bytes of shared buffers, used in turn.
///
/// With so few that they stay in one core's own cache (256 KiB), a transfer takes three to six times as long. The
/// writer has to win the lines back from the core that has just read them. (Copying in pieces of 1 KiB makes no
/// difference.)
const WINDOW: usize = 2 << 20;

/// Most shared buffers.
const PLACES_MAX: usize = 4096;

/// Most frames to announce to the other side at once.
const BATCH: u64 = 32;

/// Returns the distance between frames in the shared memory, in bytes.
const fn stride(len: usize) -> usize {
    len.next_multiple_of(LINE_LEN)
}

/// Returns the number of shared buffers.
const fn places(len: usize) -> u64 {
    let fit = WINDOW / stride(len);
    if fit > PLACES_MAX { PLACES_MAX as u64 } else { fit as u64 }
}

/// Returns the number of frames to announce at once.
const fn batch(len: usize) -> u64 {
    let quarter = places(len) / 4;
    if quarter > BATCH { BATCH } else { quarter }
}

/// Makes the shared buffers, and a line for the count of each side.
pub fn memory<const LEN: usize>() -> Result<Ends> {
    let buffers = Shared::create(stride(LEN) * usize::try_from(places(LEN))?)?;
    let counts = Region::create("tasuki-bench counts", 2 * LINE_LEN, Pages::Small)?.into_fd();
    let copies = [counts.try_clone(), buffers.try_clone()].into_iter().collect::<Result<Vec<_>, _>>();
    Ok(Ends { server: copies.context("no descriptor is left for a case")?, client: vec![counts, buffers] })
}

/// Mappings of one side.
struct Side<const LEN: usize> {
    counts: Span<Line>,
    buffers: Shared,
}

impl<const LEN: usize> Side<LEN> {
    fn new(orders: &mut Orders) -> Result<Self> {
        let counts = Region::adopt(orders.next_fd()?)?.span(0, 2)?;
        let buffers = Shared::map(&orders.next_fd()?, stride(LEN) * usize::try_from(places(LEN))?)?;
        Ok(Side { counts, buffers })
    }

    /// Returns the number of frames written.
    fn written(&self) -> u64 {
        self.counts[0].word(0).load(Acquire)
    }

    /// Returns the number of frames read.
    fn read(&self) -> u64 {
        self.counts[1].word(0).load(Acquire)
    }

    fn place(number: u64) -> usize {
        usize::try_from(number % places(LEN)).expect("few places") * stride(LEN)
    }
}

/// Copies all frames out.
pub fn receive<const LEN: usize>(mut orders: Orders) -> Result<()> {
    let total = orders.total();
    let side = Side::<LEN>::new(&mut orders)?;
    let mut buffers: Vec<_> = private_frames(LEN);
    let (mut number, mut wrong) = (0, 0_u64);
    while number < total {
        let until = side.written().min(number + batch(LEN));
        if until == number {
            std::hint::spin_loop();
        }
        while number < until {
            let buffer: &mut Buffer = &mut buffers[in_turn(number)];
            side.buffers.copy_out(Side::<LEN>::place(number), buffer.bytes());
            wrong += u64::from(usize::from(buffer.bytes()[0]) != in_turn(number));
            number += 1;
        }
        side.counts[1].word(0).store(number, Release);
    }
    ensure!(wrong == 0, "{wrong} frames are not as they were sent");
    Ok(())
}

/// Copies all frames in; notes frames a second.
pub fn send<const LEN: usize>(mut orders: Orders) -> Result<Sample> {
    let (warmup, total) = (orders.warmup, orders.total());
    let side = Side::<LEN>::new(&mut orders)?;
    let mut frames = private_frames(LEN);
    let mut sample = Sample::new();
    let (mut number, mut read) = (0, 0);
    for until in [warmup, total] {
        let (start, first) = (Instant::now(), number);
        while number < until {
            while number - read == places(LEN) {
                std::hint::spin_loop();
                read = side.read();
            }
            side.buffers.copy_in(Side::<LEN>::place(number), frames[in_turn(number)].bytes());
            number += 1;
            if number.is_multiple_of(batch(LEN)) || number == until {
                side.counts[0].word(0).store(number, Release);
            }
        }
        while read < until {
            read = side.read();
        }
        if until == total {
            sample.rate(number - first, start.elapsed())?;
        }
    }
    Ok(sample)
}
