//! The floor of a frame's way from machine to machine: the two copies alone, by `memcpy`. The first worker copies the frame
//! out of its machine's memory into the pool of its node, the second one from there into the memory of its own machine.
//!
//! Each copy is made on the CPU of the worker that makes it, over as much memory as that has. Where both have one CPU, they
//! take turns.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use tasuki_shm::vni::node_memory::POOL_PAGES;

use crate::cpus;
use crate::program::PATIENCE;
use crate::vni::shared::Shared;

/// Bytes of a page of a node's pool. A frame has pages of its own.
const PAGE: usize = 4096;

/// Bytes of a pool.
const POOL: usize = POOL_PAGES as usize * PAGE;

/// Frames that one copies before the other sees them.
const BATCH: usize = 32;

/// One of the two that copy.
struct Side {
    /// Whether it copies into the pool, or out of it.
    is_in: bool,
    pool: Shared,
    /// Memory of its machine: buffers of `stride` bytes.
    machine: Vec<u8>,
    stride: usize,
    len: usize,
    /// Number of batches that it has copied, and the time that took.
    batches: usize,
    took: Duration,
}

impl Side {
    /// Copies the next batch.
    fn copy(&mut self) {
        let (room, buffers) = (self.len.next_multiple_of(PAGE), self.machine.len() / self.stride);
        let began = Instant::now();
        for frame in self.batches * BATCH..(self.batches + 1) * BATCH {
            let place = frame % (POOL / room) * room;
            let bytes = &mut self.machine[frame % buffers * self.stride..][..self.len];
            if self.is_in { self.pool.copy_in(place, bytes) } else { self.pool.copy_out(place, bytes) }
        }
        self.took += began.elapsed();
        self.batches += 1;
    }

    /// Returns whether it can copy, when the other one has copied so many batches.
    fn can_copy(&self, other: usize) -> bool {
        let deep = POOL / self.len.next_multiple_of(PAGE) / BATCH;
        self.batches < if self.is_in { other + deep } else { other }
    }
}

/// Plays some of the sides until each has copied so many batches. Returns the time that the copies took.
fn play(cpu: usize, mut sides: Vec<Side>, batches: usize, copied: &[AtomicUsize; 2]) -> Result<Duration> {
    cpus::pin(cpu)?;
    let began = Instant::now();
    while sides.iter().any(|side| side.batches < batches) {
        ensure!(began.elapsed() < PATIENCE, "the thread of the other copy is gone");
        for side in &mut sides {
            let other = copied[usize::from(!side.is_in)].load(Acquire);
            if side.batches < batches && side.can_copy(other) {
                side.copy();
                copied[usize::from(side.is_in)].store(side.batches, Release);
            }
        }
    }
    Ok(sides.iter().map(|side| side.took).sum())
}

/// Returns the CPU time of both copies of a frame of `len` bytes, in ns. Each machine has `buffers` of `stride` bytes, and
/// each worker one of `cpus`.
pub fn measure(len: usize, (buffers, stride): (usize, usize), cpus: [usize; 2], frames: usize) -> Result<f64> {
    let pool = Shared::create(POOL)?;
    let side = |is_in| {
        let (pool, machine) = (Shared::map(&pool, POOL)?, vec![1; buffers * stride]);
        Ok::<_, anyhow::Error>(Side { is_in, pool, machine, stride, len, batches: 0, took: Duration::ZERO })
    };
    let (batches, copied) = (frames / BATCH, [const { AtomicUsize::new(0) }; 2]);
    let threads: &[(usize, &'static [bool])] =
        if cpus[0] == cpus[1] { &[(cpus[0], &[true, false])] } else { &[(cpus[0], &[true]), (cpus[1], &[false])] };
    let took: Duration = thread::scope(|scope| {
        let start = |(cpu, sides): &(usize, &'static [bool])| {
            let (cpu, sides, side, copied) = (*cpu, *sides, &side, &copied);
            scope.spawn(move || {
                play(cpu, sides.iter().map(|is_in| side(*is_in)).collect::<Result<_>>()?, batches, copied)
            })
        };
        let threads: Vec<_> = threads.iter().map(start).collect();
        let end = |thread: ScopedJoinHandle<'_, Result<Duration>>| {
            thread.join().map_err(|_| anyhow!("a copying thread panicked"))?
        };
        threads.into_iter().map(end).sum::<Result<_>>()
    })?;
    Ok(took.as_nanos() as f64 / (batches * BATCH) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpus::Cpus;

    #[test]
    fn two_that_copy_take_turns_or_have_a_cpu_each() {
        let Cpus { client, server } = Cpus::choose().unwrap();
        for cpus in [[client, client], [client, server]] {
            assert!(measure(9000, (64, 9024), cpus, 1000).unwrap() > 0.0);
        }
    }
}
