//! One connection, several processes: whose turn it is to ask.
//!
//! Twins have the same connection, and an answer goes to whoever reads first. So whoever asks something holds a record lock (POSIX,
//! `F_SETLKW`) from the question until the answer is read. The lock is the process's: it goes with whoever has it, however that one ends.
//! What is posted needs no lock: a message of ours goes into the socket as a whole, or not at all.
//!
//! Who dies between question and answer leaves the answer behind, for the next to find and skip. Questions are therefore numbered by one
//! count, which lies in the locked memory.
//!
//! Beside that count stands whether something was posted that the server may not have done yet: who died after that has left it to a successor,
//! whose doorbells by memory would overtake it.
//!
//! # What a dead asker has done
//!
//! Its question was sent or not, and if it was, the server does what it says, once, before anything that is said later. Nobody repeats it. What
//! becomes of that is each question's own matter:
//!
//! | question | if it is asked again by a successor |
//! |---|---|
//! | reading configuration space, registers, what regions and interrupts there are | the same, but for registers that reading clears: what a dead driver read there is lost, counters and causes that it may have seen. Drivers look at their rings after taking over, never at causes alone |
//! | writing configuration space or registers | each value is the whole value: writing it again changes nothing, except where a write is an order (a tail, a PAUSE frame): tails are written from the ledger |
//! | mapping memory | refused, since it is there: who maps anew unmaps first |
//! | unmapping memory | refused, since it is gone, and not minded |
//! | which eventfds ring | the same |
//! | where doorbells lie | makes new ones, and older ones ring nobody: asked once, by whoever opens the device |
//! | a reset | another reset |
//!
//! # What it does not do
//!
//! A process that is stopped while it has the lock has it until it goes on or is killed: whoever supervises it finds that by its heartbeat. And closing
//! *any* descriptor of the lock's memory lets go of a lock that the process has: a process whose threads use twins of one connection closes spare
//! descriptors (those of a [`Twin`](super::Twin) that it has passed on) only while none of them asks. Dropping a bus sees to that by itself.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};

/// Record locks do not keep threads of one process apart, and a descriptor that is closed takes the lock along.
static HERE: Mutex<()> = Mutex::new(());

fn here() -> MutexGuard<'static, ()> {
    HERE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the processes of a connection share.
#[derive(Debug)]
pub struct Turns {
    /// `None` only while it is dropped.
    memory: Option<Region>,
    /// The number of the last question; and 1 while whoever drives the device is [`Behind`].
    words: Span<AtomicU32>,
}

const LAST: usize = 0;
const BEHIND: usize = 1;

/// Whether something was posted that the server may not have done yet: what it learns without a message would overtake that.
#[derive(Debug, Default)]
pub struct Behind {
    /// By us.
    here: AtomicBool,
    /// By whoever drove the device.
    shared: OnceLock<Span<AtomicU32>>,
}

impl Behind {
    /// From now on others have the connection, too.
    fn share(&self, words: Span<AtomicU32>) {
        if self.here.load(Relaxed) {
            words[BEHIND].store(1, Relaxed);
        }
        // Shared twice, it is the same memory.
        let _ = self.shared.set(words);
    }

    /// Whether it is so.
    #[inline]
    pub fn is(&self) -> bool {
        self.here.load(Relaxed) || self.shared.get().is_some_and(|words| words[BEHIND].load(Relaxed) != 0)
    }

    /// Something is about to be posted.
    pub fn posting(&self) {
        self.here.store(true, Relaxed);
        if let Some(words) = self.shared.get() {
            words[BEHIND].store(1, Relaxed);
        }
    }

    /// A question was answered: what we posted before was done before. Of what others posted we know nothing.
    pub fn answered(&self) {
        if self.here.swap(false, Relaxed) {
            self.settled();
        }
    }

    /// A question was answered that was asked since we drive the device: nobody else posts.
    pub fn settled(&self) {
        if let Some(words) = self.shared.get() {
            words[BEHIND].store(0, Relaxed);
        }
    }
}

impl Turns {
    /// For a connection that nobody shared so far, on which question number `last` was asked.
    pub fn create(last: u16) -> Result<Self, RegionError> {
        let turns = Self::over(Region::create("tasuki-vfio-user-turns", PAGE_LEN, Pages::Small)?)?;
        turns.words[LAST].store(last.into(), Relaxed);
        Ok(turns)
    }

    /// The same in another process.
    pub fn adopt(memory: OwnedFd) -> Result<Self, RegionError> {
        Self::over(Region::adopt(memory)?)
    }

    fn over(memory: Region) -> Result<Self, RegionError> {
        memory.populate();
        Ok(Turns { words: memory.span(0, 2)?, memory: Some(memory) })
    }

    fn memory(&self) -> &Region {
        self.memory.as_ref().expect("it is there until the end")
    }

    /// Has others know what `behind` knows.
    pub fn tell(&self, behind: &Behind) {
        if let Ok(words) = self.memory().span(0, 2) {
            behind.share(words);
        }
    }

    /// For another process.
    pub fn copy(&self) -> io::Result<OwnedFd> {
        self.memory().fd().try_clone_to_owned()
    }

    /// Waits until it is our turn to ask `count` questions, for as long as the others need.
    pub fn take(&self, count: u16) -> Result<Turn<'_>, Errno> {
        let here = here();
        loop {
            match fcntl_lock(self.memory().fd(), FlockOperation::LockExclusive) {
                // What looks like a deadlock to the kernel is two NICs' connections, used by threads of the same two processes.
                Err(Errno::INTR | Errno::DEADLK) => {}
                other => break other?,
            }
        }
        let last = self.words[LAST].load(Relaxed);
        // Before they are asked: whoever finds our answers must not have the same numbers.
        self.words[LAST].store(last.wrapping_add(count.into()), Relaxed);
        let number = last.wrapping_add(1);
        Ok(Turn { turns: self, number, _here: here })
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        let _here = here();
        self.memory = None;
    }
}

/// The right to ask as many questions as were asked for.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    number: u32,
    /// Let go last.
    _here: MutexGuard<'static, ()>,
}

impl Turn<'_> {
    /// That of the first question.
    #[expect(clippy::cast_possible_truncation, reason = "numbers go round: the last of a few are told apart")]
    pub fn number(&self) -> u16 {
        self.number as u16
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // It fails only for want of a descriptor that we have.
        let _ = fcntl_lock(self.turns.memory().fd(), FlockOperation::Unlock);
    }
}
