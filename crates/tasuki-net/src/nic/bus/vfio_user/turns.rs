//! One connection, several processes: they take turns at sending requests.
//!
//! Twins share the connection, and an answer goes to the process that reads first. So a process holds a record lock
//! (POSIX, `F_SETLKW`) from its request until it has read the answer. The lock belongs to the process: it ends with
//! the process, however the process ends. Posted messages need no lock: a message of ours goes into the socket as a
//! whole, or not at all.
//!
//! A process that dies between request and answer leaves the answer behind, for the next one to find and skip.
//! Requests are therefore numbered by one count, which is in the locked memory.
//!
//! Beside that count is a flag: whether a message was posted that the server may not have processed yet. A process
//! that died after posting leaves the flag set for its successor, whose stores to doorbell memory would overtake
//! that message.
//!
//! # Effects of a request whose sender died
//!
//! The request was sent or not. If it was, the server executes it once, before any later request. No process repeats
//! it. The consequences depend on the request:
//!
//! | request | if a successor sends it again |
//! |---|---|
//! | reading configuration space, registers, descriptions of regions and interrupts | the same, but for registers that reading clears: the values that a dead driver read there are lost, counters and causes among them. Drivers look at their rings after taking over, never at causes alone |
//! | writing configuration space or registers | each value is the whole value: writing it again changes nothing, except where a write is an order (a tail, a PAUSE frame): tails are written from the ledger |
//! | mapping memory | refused, since it is mapped: a process that maps anew unmaps first |
//! | unmapping memory | refused, since it is gone; the caller ignores that |
//! | setting the eventfds of interrupts | the same |
//! | asking for doorbells | makes new ones, and older ones no longer ring: only the process that opens the device asks |
//! | a reset | another reset |
//!
//! # Limits
//!
//! A process that is stopped while it has the lock keeps it until it goes on or is killed: its supervisor notices
//! that by its heartbeat. And closing *any* descriptor of the lock's memory releases a lock that the process has. So
//! a process whose threads use twins of one connection must close spare descriptors (those of a
//! [`Twin`](super::Twin) that it has passed on) only while none of these threads waits for an answer. Dropping a bus
//! ensures that by itself.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};

/// Serialises the threads of this process: record locks do not separate them, and closing a descriptor releases the
/// lock.
static HERE: Mutex<()> = Mutex::new(());

fn here() -> MutexGuard<'static, ()> {
    HERE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State that the processes of a connection share.
#[derive(Debug)]
pub struct Turns {
    /// `None` only during the drop.
    memory: Option<Region>,
    /// Number of the last request; and 1 while the driver of the device is [`Behind`].
    words: Span<AtomicU32>,
}

const LAST: usize = 0;
const BEHIND: usize = 1;

/// Whether a message was posted that the server may not have processed yet. A store to doorbell memory would
/// overtake it.
#[derive(Debug, Default)]
pub struct Behind {
    /// Set if this process posted one.
    here: AtomicBool,
    /// Set if any driver of the device posted one.
    shared: OnceLock<Span<AtomicU32>>,
}

impl Behind {
    /// Shares the flag: from now on, other processes have the connection, too.
    fn share(&self, words: Span<AtomicU32>) {
        if self.here.load(Relaxed) {
            words[BEHIND].store(1, Relaxed);
        }
        // A second call passes the same memory, so ignore the error.
        let _ = self.shared.set(words);
    }

    /// Returns whether such a message may exist.
    #[inline]
    pub fn is(&self) -> bool {
        self.here.load(Relaxed) || self.shared.get().is_some_and(|words| words[BEHIND].load(Relaxed) != 0)
    }

    /// Notes that a message is about to be posted.
    pub fn posting(&self) {
        self.here.store(true, Relaxed);
        if let Some(words) = self.shared.get() {
            words[BEHIND].store(1, Relaxed);
        }
    }

    /// Notes an answer: the server has processed our earlier messages. Nothing is known about messages of other
    /// processes.
    pub fn answered(&self) {
        if self.here.swap(false, Relaxed) {
            self.settled();
        }
    }

    /// Notes an answer to a request sent since this driver took over: no other process posts any more.
    pub fn settled(&self) {
        if let Some(words) = self.shared.get() {
            words[BEHIND].store(0, Relaxed);
        }
    }
}

impl Turns {
    /// Creates the state for a connection that is not shared so far. `last` is the number of its last request.
    pub fn create(last: u16) -> Result<Self, RegionError> {
        let turns = Self::over(Region::create("tasuki-vfio-user-turns", PAGE_LEN, Pages::Small)?)?;
        turns.words[LAST].store(last.into(), Relaxed);
        Ok(turns)
    }

    /// Adopts the state in another process.
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

    /// Makes `behind` share its flag with the other processes.
    pub fn tell(&self, behind: &Behind) {
        if let Ok(words) = self.memory().span(0, 2) {
            behind.share(words);
        }
    }

    /// Returns a descriptor for another process.
    pub fn copy(&self) -> io::Result<OwnedFd> {
        self.memory().fd().try_clone_to_owned()
    }

    /// Waits until it is our turn to send `count` requests, for as long as the others need.
    pub fn take(&self, count: u16) -> Result<Turn<'_>, Errno> {
        let here = here();
        loop {
            match fcntl_lock(self.memory().fd(), FlockOperation::LockExclusive) {
                // The kernel reports a deadlock if threads of the same two processes use two NICs' connections, but
                // it is none.
                Err(Errno::INTR | Errno::DEADLK) => {}
                other => break other?,
            }
        }
        let last = self.words[LAST].load(Relaxed);
        // Count before sending: a process that finds our answers must not use the same numbers.
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

/// Permission to send a number of requests.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    number: u32,
    /// Released last.
    _here: MutexGuard<'static, ()>,
}

impl Turn<'_> {
    /// Returns the number of the first request.
    #[expect(clippy::cast_possible_truncation, reason = "numbers go round: the last of a few are told apart")]
    pub fn number(&self) -> u16 {
        self.number as u16
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // This could fail only without a descriptor, and we have one.
        let _ = fcntl_lock(self.turns.memory().fd(), FlockOperation::Unlock);
    }
}
