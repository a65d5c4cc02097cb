//! Learns early that a worker has ended.
//!
//! A killed process takes itself apart before its pidfd reports the death: half a millisecond in which no worker
//! drives its NIC. But the kernel marks the robust futex in the worker's heartbeat (`message::heartbeat::LIFE`) as
//! soon as its thread begins to end. A thread of the daemon sleeps on each futex, and reports the mark.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::futex;
use tasuki_relay::message::heartbeat;
use tasuki_shm::region::Span;

use super::Supervisor;
use super::worker::Words;

/// Interval of looks at a futex that its worker has not yet marked as its own.
const UNMARKED_POLL_EVERY: Duration = Duration::from_millis(50);

/// The pipe that reports ended workers.
#[derive(Debug)]
pub struct ExitWatch {
    told: std::io::PipeReader,
    tell: Arc<OwnedFd>,
}

fn life(heartbeat: &Words) -> Option<Span<AtomicU32>> {
    heartbeat.region().span(8 * heartbeat::LIFE, 1).ok()
}

impl ExitWatch {
    pub fn new() -> Result<Self> {
        let (told, tell) = std::io::pipe().context("the kernel has no pipes left")?;
        rustix::io::ioctl_fionbio(&told, true)?;
        Ok(ExitWatch { told, tell: Arc::new(tell.into()) })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }

    /// Starts watching for the end of worker `number`, whose heartbeat this is.
    pub fn watch(&self, number: u32, heartbeat: &Words) {
        let (Some(life), tell) = (life(heartbeat), Arc::clone(&self.tell)) else { return };
        // Without a thread, the pidfd reports the death.
        let _ = std::thread::Builder::new().name(format!("exit of {number}")).spawn(move || {
            await_end(&life[0]);
            let _ = rustix::io::write(&*tell, &number.to_ne_bytes());
        });
    }

    /// Returns the workers that have ended.
    fn take(&mut self) -> Vec<u32> {
        let mut bytes = [0; 4 * 64];
        let len = self.told.read(&mut bytes).unwrap_or(0);
        bytes[..len].as_chunks().0.iter().map(|number| u32::from_ne_bytes(*number)).collect()
    }
}

/// Sleeps until the word says that its thread has ended.
fn await_end(life: &AtomicU32) {
    loop {
        let word = life.load(Acquire);
        if word & heartbeat::ENDED != 0 {
            return;
        }
        let yet = (word == 0).then(|| UNMARKED_POLL_EVERY.try_into().expect("50 ms"));
        // Ignore the result: the loop reads the word again.
        let _ = futex::wait(life, futex::Flags::empty(), word, yet.as_ref());
    }
}

/// Ends the thread that watches a worker which is gone by now, whether the kernel has marked its futex or not.
pub fn close(heartbeat: &Words) {
    if let Some(life) = life(heartbeat) {
        life[0].fetch_or(heartbeat::ENDED, AcqRel);
        let _ = futex::wake(&life[0], futex::Flags::empty(), 1);
    }
}

impl Supervisor {
    /// Handles ended threads, reported by the kernel or by the workers themselves. A worker that claims it and lives
    /// is killed before the daemon acts on it.
    pub(super) fn on_exit_marks(&mut self) {
        for number in self.exit_watch.take() {
            let Some(worker) = self.workers.get(&number) else { continue };
            worker.process.kill();
            self.driver_ended(number);
            // The successor needs that CPU now.
            if let Some(worker) = self.workers.get(&number) {
                worker.process.send_to(&self.housekeeping_cpus);
            }
        }
    }
}
