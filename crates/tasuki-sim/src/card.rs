//! A model, the memory that it reaches and the wire it is plugged into, for a driver in the same process.
//!
//! A [`Card`] is shared: one thread calls [`step`](Card::step) or has it [run](Card::run), others access its
//! registers. As on a real bus, a write does not wait for the card: it is posted, and arrives before the next read
//! or step.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use tasuki_shm::region::Region;

use crate::e1000e;
use crate::memory::{MapError, Memory};
use crate::model::Model;
use crate::wire::Wire;

/// Nanoseconds that a read over the bus takes: a manual clock advances by this for each read.
const READ_NS: u64 = 500;

/// Most posted writes.
const POSTED: usize = 256;

/// Steps without work after which a running card sleeps, and how long it sleeps unless a write wakes it.
const IDLE_ROUNDS: u32 = 200;
const NAP: Duration = Duration::from_micros(100);

/// Source of the model's time.
#[derive(Debug)]
pub enum Clock {
    /// The machine's clock, from this instant on.
    Real(Instant),
    /// Nanoseconds, which [`Card::advance`] and register reads advance.
    Manual(AtomicU64),
}

impl Clock {
    /// Returns a clock that starts now and runs with the machine's.
    pub fn real() -> Self {
        Clock::Real(Instant::now())
    }

    /// Returns a clock that stands at 0.
    pub fn manual() -> Self {
        Clock::Manual(AtomicU64::new(0))
    }

    fn now(&self) -> u64 {
        match self {
            Clock::Real(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Clock::Manual(now) => now.load(Relaxed),
        }
    }

    fn advance(&self, ns: u64) {
        if let Clock::Manual(now) = self {
            now.fetch_add(ns, Relaxed);
        }
    }
}

#[derive(Debug)]
pub struct Parts<W, M: Model = e1000e::Device> {
    pub device: M,
    /// The memory that the card reaches.
    pub memory: Memory,
    /// The wire that the card is plugged into.
    pub wire: W,
    /// Posted writes that are being carried out.
    taken: Vec<Posted<M::Bar>>,
}

#[derive(Debug, Clone, Copy)]
struct Posted<B> {
    bar: B,
    offset: u32,
    width: u8,
    value: u32,
}

#[derive(Debug)]
struct Shared<W, M: Model> {
    parts: Mutex<Parts<W, M>>,
    /// Lock order: `parts` before `posted`.
    posted: Mutex<Vec<Posted<M::Bar>>>,
    /// Number of threads that wait for `parts`: the thread that runs the card lets them go first.
    waiting: AtomicU32,
    clock: Clock,
    /// The thread that runs the card, if there is one.
    runner: Mutex<Option<Thread>>,
    asleep: AtomicBool,
}

#[derive(Debug)]
pub struct Card<W, M: Model = e1000e::Device>(Arc<Shared<W, M>>);

impl<W, M: Model> Clone for Card<W, M> {
    fn clone(&self) -> Self {
        Card(Arc::clone(&self.0))
    }
}

/// Locks a mutex even if it is poisoned: a test can still inspect a model that panicked, as the test asked it to.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<W: Wire, M: Model> Card<W, M> {
    pub fn new(device: M, wire: W, clock: Clock) -> Self {
        let parts = Parts { device, memory: Memory::default(), wire, taken: Vec::with_capacity(POSTED) };
        Card(Arc::new(Shared {
            parts: Mutex::new(parts),
            posted: Mutex::new(Vec::with_capacity(POSTED)),
            waiting: AtomicU32::new(0),
            clock,
            runner: Mutex::new(None),
            asleep: AtomicBool::new(false),
        }))
    }

    /// Returns the card's time in nanoseconds.
    pub fn now(&self) -> u64 {
        self.0.clock.now()
    }

    /// Advances a manual clock; does nothing to a real one.
    pub fn advance(&self, ns: u64) {
        self.0.clock.advance(ns);
    }

    /// Calls `look` with the card's parts, to inspect or change them. All posted writes have arrived by then.
    pub fn with<T>(&self, look: impl FnOnce(&mut Parts<W, M>) -> T) -> T {
        self.0.waiting.fetch_add(1, Relaxed);
        let mut parts = lock(&self.0.parts);
        self.0.waiting.fetch_sub(1, Relaxed);
        self.arrive(&mut parts);
        look(&mut parts)
    }

    /// Carries out the posted writes.
    fn arrive(&self, parts: &mut Parts<W, M>) {
        std::mem::swap(&mut parts.taken, &mut lock(&self.0.posted));
        if parts.taken.is_empty() {
            return;
        }
        let now = self.now();
        for i in 0..parts.taken.len() {
            let Posted { bar, offset, width, value } = parts.taken[i];
            parts.device.write(bar, offset, width, value, now);
        }
        parts.taken.clear();
    }

    /// Reads `width` (1, 2 or 4) bytes behind a BAR.
    pub fn read(&self, bar: M::Bar, offset: u32, width: u8) -> u32 {
        self.0.clock.advance(READ_NS);
        self.with(|parts| parts.device.read(bar, offset, width, self.now()))
    }

    /// Writes `width` (1, 2 or 4) bytes behind a BAR.
    pub fn write(&self, bar: M::Bar, offset: u32, width: u8, value: u32) {
        let posted = Posted { bar, offset, width, value };
        let mut on_their_way = lock(&self.0.posted);
        // With a manual clock, a write arrives at once, before the clock advances.
        if on_their_way.len() < POSTED && matches!(self.0.clock, Clock::Real(_)) {
            on_their_way.push(posted);
            drop(on_their_way);
        } else {
            drop(on_their_way);
            self.with(|parts| parts.device.write(bar, offset, width, value, self.now()));
        }
        if self.0.asleep.load(Relaxed)
            && let Some(runner) = &*lock(&self.0.runner)
        {
            runner.unpark();
        }
    }

    /// Reads `width` bytes of the configuration space.
    pub fn read_config(&self, offset: u32, width: u8) -> u32 {
        self.with(|parts| parts.device.read_config(offset, width, self.now()))
    }

    /// Writes `width` bytes of the configuration space.
    pub fn write_config(&self, offset: u32, width: u8, value: u32) {
        self.with(|parts| parts.device.write_config(offset, width, value, self.now()));
    }

    /// Resets the card as a bus reset does.
    pub fn reset(&self) {
        self.with(|parts| parts.device.reset(self.now()));
    }

    /// Maps `region` at bus address `at`.
    pub fn map(&self, at: u64, region: &Region) -> Result<(), MapError> {
        self.with(|parts| parts.memory.map(at, region))
    }

    /// Unmaps the regions that begin within these `len` bytes.
    pub fn unmap(&self, at: u64, len: u64) {
        self.with(|parts| parts.memory.unmap(at, len));
    }

    /// Does the card's work that is due now; returns whether there was any.
    pub fn step(&self) -> bool {
        while self.0.waiting.load(Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut parts = lock(&self.0.parts);
        self.arrive(&mut parts);
        let Parts { device, memory, wire, .. } = &mut *parts;
        device.step(memory, wire, self.now())
    }

    /// Steps until no work is left, at most `limit` times.
    pub fn settle(&self, limit: usize) {
        for _ in 0..limit {
            if !self.step() {
                return;
            }
        }
    }
}

impl<W: Wire> Card<W> {
    /// Enables MSI-X as a system does for a driver. Returns an eventfd for each of the first `count` vectors.
    pub fn interrupts(&self, count: u16) -> io::Result<Vec<OwnedFd>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ours: Vec<OwnedFd> = (0..count).map(|_| eventfd(0, flags)).collect::<Result<_, _>>()?;
        let theirs = ours.iter().map(OwnedFd::try_clone).collect::<io::Result<Vec<_>>>()?;
        self.with(|parts| {
            (0..count).zip(ours).for_each(|(vector, bell)| parts.memory.set_bell(vector, Some(bell)));
            parts.device.enable_msix(true);
        });
        Ok(theirs)
    }
}

impl<W: Wire + Send + 'static, M: Model + Send + 'static> Card<W, M> {
    /// Starts a thread that steps the card until the result is dropped.
    pub fn run(&self) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let (card, stopped) = (self.clone(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || card.run_until(&stopped));
        Running { stop, thread: Some(thread) }
    }

    fn run_until(&self, stop: &AtomicBool) {
        *lock(&self.0.runner) = Some(std::thread::current());
        let mut idle = 0;
        while !stop.load(Relaxed) {
            if self.step() {
                idle = 0;
            } else if idle < IDLE_ROUNDS {
                idle += 1;
                std::hint::spin_loop();
            } else {
                // A write that arrives before the runner sleeps waits for the end of the nap, like a write that a
                // real bus holds up.
                self.0.asleep.store(true, Relaxed);
                std::thread::park_timeout(NAP);
                self.0.asleep.store(false, Relaxed);
            }
        }
        *lock(&self.0.runner) = None;
    }
}

/// The thread that runs a card. Dropping this ends it.
#[derive(Debug)]
pub struct Running {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let panicked = self.thread.take().is_some_and(|thread| {
            thread.thread().unpark();
            thread.join().is_err()
        });
        if panicked && !std::thread::panicking() {
            panic!("the model stopped because the driver broke a rule; see the message above");
        }
    }
}
