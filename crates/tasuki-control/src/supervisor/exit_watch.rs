//! Learns early that a worker has ended.
//!
//! A killed process takes itself apart before its pidfd reports the death: half a millisecond in which no worker
//! drives its NIC. But the kernel marks the robust futex in the worker's heartbeat (`message::heartbeat::LIFE`) as
//! soon as its thread begins to end. A thread of the daemon sleeps on each futex, and reports the mark.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::futex;
use tasuki_relay::message::heartbeat;
use tasuki_shm::region::Span;

use super::Supervisor;
use super::worker::Words;

/// Interval of looks at a futex that its worker has not yet marked as its own.
const UNMARKED_POLL_EVERY: Duration = Duration::from_millis(50);

/// Interval of looks whether the watch is over, where the worker's processes see to it that no wake-up comes.
const OVER_POLL_EVERY: Duration = Duration::from_secs(10);

/// The pipe that reports ended workers.
#[derive(Debug)]
pub struct ExitWatch {
    told: std::io::PipeReader,
    tell: Arc<OwnedFd>,
    /// Whether the watch of each worker is over. Processes of a worker can write its futex, and this they cannot.
    over: BTreeMap<u32, Arc<AtomicBool>>,
}

fn life(heartbeat: &Words) -> Option<Span<AtomicU32>> {
    heartbeat.region().span(8 * heartbeat::LIFE, 1).ok()
}

impl ExitWatch {
    pub fn new() -> Result<Self> {
        let (told, tell) = std::io::pipe().context("the kernel has no pipes left")?;
        rustix::io::ioctl_fionbio(&told, true)?;
        Ok(ExitWatch { told, tell: Arc::new(tell.into()), over: BTreeMap::new() })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }

    /// Starts watching for the end of worker `number`, whose heartbeat this is.
    pub fn watch(&mut self, number: u32, heartbeat: &Words) {
        let (Some(life), tell) = (life(heartbeat), Arc::clone(&self.tell)) else { return };
        let over = Arc::new(AtomicBool::new(false));
        self.over.insert(number, Arc::clone(&over));
        // Without a thread, the pidfd reports the death.
        let _ = std::thread::Builder::new().name(format!("exit of {number}")).spawn(move || {
            crate::spawn::hold_signals();
            await_end(&life[0], &over);
            let _ = rustix::io::write(&*tell, &number.to_ne_bytes());
        });
    }

    /// Ends the watch of a worker that is gone by now, whether the kernel has marked its futex or not.
    pub fn close(&mut self, number: u32, heartbeat: &Words) {
        self.over.remove(&number).into_iter().for_each(|over| over.store(true, Release));
        if let Some(life) = life(heartbeat) {
            life[0].fetch_or(heartbeat::ENDED, AcqRel);
            let _ = futex::wake(&life[0], futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Returns the workers that have ended.
    fn take(&mut self) -> Vec<u32> {
        let mut bytes = [0; 4 * 64];
        let len = self.told.read(&mut bytes).unwrap_or(0);
        bytes[..len].as_chunks().0.iter().map(|number| u32::from_ne_bytes(*number)).collect()
    }
}

/// Sleeps until the word says that its thread has ended, or the watch is `over`. The word changes once before that: its
/// thread marks it as its own. One that is changed again is a lie, and counts as the end.
fn await_end(life: &AtomicU32, over: &AtomicBool) {
    let mut mark = 0;
    loop {
        let word = life.load(Acquire);
        if over.load(Acquire) || word & heartbeat::ENDED != 0 || mark != 0 && word != mark {
            return;
        }
        mark = word;
        let most = if word == 0 { UNMARKED_POLL_EVERY } else { OVER_POLL_EVERY };
        // Ignore the result: the loop reads the word again.
        let _ = futex::wait(life, futex::Flags::empty(), word, Some(&most.try_into().expect("seconds at most")));
    }
}

impl Supervisor {
    /// Handles ended threads, reported by the kernel or by the workers themselves. A worker that claims it and lives
    /// is killed before the daemon acts on it.
    pub(super) fn on_exit_marks(&mut self) {
        let ended: Vec<_> =
            self.exit_watch.take().into_iter().filter(|number| self.workers.contains_key(number)).collect();
        for number in &ended {
            let Some(worker) = self.workers.get(number) else { continue };
            worker.process.kill();
            self.driver_ended(*number);
        }
        for number in ended {
            // The successor needs that CPU now.
            if let Some(worker) = self.workers.get(&number) {
                worker.process.send_to(&self.housekeeping_cpus);
            }
            // A worker takes its time to end, and its NIC may go to a stranger meanwhile.
            self.end_what_it_started(number, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process of the worker may write its futex after the worker's end, and take wake-ups.
    #[test]
    fn a_watch_ends_with_any_value_in_the_word() {
        let (life, over) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| await_end(&life, &over));
            over.store(true, Release);
            watch.join().expect("it ends");
        });
        over.store(false, Release);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| await_end(&life, &over));
            // Each value but the first is a lie.
            for value in (1..heartbeat::ENDED).cycle().take_while(|_| !watch.is_finished()) {
                life.store(value, Release);
                let _ = futex::wake(&life, futex::Flags::empty(), 1);
            }
            watch.join().expect("it ends");
        });
    }
}
