//! How long a worker that found nothing looks on before it sleeps.
//!
//! A sleep costs a frame the time until the worker runs again, and its sender a system call. So the worker looks on where a
//! frame is likely to come soon: where that was so in half of the last waits. That is what Linux does before a virtual CPU
//! halts (`halt_poll_ns`, `Documentation/virt/kvm/halt-polling.rst`). A frame is soon if it comes within the time that four
//! processes take to wake up: so many are on the way of an answer from the node's programs by way of another worker.
//!
//! A worker does not look on while another thread wants its CPU. It yields the CPU now and then, and sees by the clock
//! whether another thread ran.

use std::time::{Duration, Instant};

/// Number of sleeps by which a worker learns how long a wake-up takes.
const SLEEPS: usize = 5;

/// How long each of them is: as long as a wait for which looking on might pay.
const SLEEP: Duration = Duration::from_micros(50);

/// Number of wake-ups for which a worker looks on.
const WAKE_UPS: u32 = 4;

/// The longest that a worker looks on.
const MOST: Duration = Duration::from_micros(100);

/// A worker looks on if so many of its last 16 waits were short.
const SHORT_WAITS: u32 = 8;

/// Number of looks after which the worker yields.
const LOOKS: u32 = 8;

/// Another thread ran, or an interrupt was handled, if so much time passed between two looks.
const GAP: Duration = Duration::from_micros(2);

/// The lowest and the highest number of waits for which a worker leaves the CPU to other threads.
const CROWDED: [u32; 2] = [4, 256];

/// What a worker does while it waits for work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// There is work, or it is asleep so that frames gather.
    Works,
    /// It looks on, since the first time; and it has looked last at the second one.
    Looks(Instant, Instant),
    /// It sleeps now and then, and has waited since this time.
    Sleeps(Instant),
}

/// Decides whether a worker that waits looks on or sleeps.
#[derive(Debug)]
pub struct Spin {
    /// How long the measured sleeps took beyond their time.
    wake_ups: Vec<Duration>,
    /// How long the worker looks on; zero while that is not known.
    time: Duration,
    state: State,
    looks: u32,
    /// The last waits, the latest in the lowest bit: whether each was short.
    waits: u16,
    /// Number of waits for which the CPU is left to other threads, and the number next time.
    crowded: u32,
    crowds: u32,
    /// Number of waits in which the worker looked on: in all, in vain, and until another thread ran.
    count: u64,
    in_vain: u64,
    left: u64,
}

impl Default for Spin {
    fn default() -> Self {
        Spin {
            wake_ups: Vec::with_capacity(SLEEPS),
            time: Duration::ZERO,
            state: State::Works,
            looks: 0,
            waits: 0,
            crowded: 0,
            crowds: CROWDED[0],
            count: 0,
            in_vain: 0,
            left: 0,
        }
    }
}

impl Spin {
    /// Returns how long the worker shall sleep at most, while it does not know how long a wake-up takes.
    pub fn measures(&self) -> Option<Duration> {
        (self.wake_ups.len() < SLEEPS).then_some(SLEEP)
    }

    /// Takes note that a sleep of [`measures`](Self::measures), which nothing ended before its time, took so long.
    pub fn slept(&mut self, took: Duration) {
        if self.measures().is_none() {
            return;
        }
        self.wake_ups.push(took.saturating_sub(SLEEP));
        if self.measures().is_none() {
            self.wake_ups.sort_unstable();
            self.time = (self.wake_ups[SLEEPS / 2] * WAKE_UPS).min(MOST);
        }
    }

    /// Returns each count with its name.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        [("spins", self.count), ("spins_in_vain", self.in_vain), ("spins_left", self.left)]
    }

    /// Returns whether the worker waits for work.
    #[inline]
    pub fn waits(&self) -> bool {
        self.state != State::Works
    }

    /// Begins a wait. If the worker `may_look_on`, the wait counts, and the worker looks on if that is likely to pay.
    pub fn begin(&mut self, may_look_on: bool, now: Instant) {
        if !may_look_on {
            self.state = State::Works;
            return;
        }
        self.crowded = self.crowded.saturating_sub(1);
        let pays = self.crowded == 0 && self.waits.count_ones() >= SHORT_WAITS && !self.time.is_zero();
        self.count += u64::from(pays);
        self.looks = 0;
        self.state = if pays { State::Looks(now, now) } else { State::Sleeps(now) };
    }

    /// Returns whether the worker, which waits and found nothing, looks again before it sleeps.
    pub fn looks_on(&mut self, now: impl Fn() -> Instant) -> bool {
        let State::Looks(since, last) = self.state else { return false };
        if self.looks.is_multiple_of(LOOKS) {
            std::thread::yield_now();
        }
        self.looks += 1;
        let now = now();
        if now.saturating_duration_since(last) > GAP {
            self.left += 1;
            self.crowded = self.crowds;
            self.crowds = (self.crowds * 2).min(CROWDED[1]);
            self.state = State::Sleeps(since);
            return false;
        }
        self.state = State::Looks(since, now);
        if now.saturating_duration_since(since) < self.time {
            return true;
        }
        self.in_vain += 1;
        self.state = State::Sleeps(since);
        false
    }

    /// Ends a wait: there is work.
    #[cold]
    pub fn end(&mut self, now: Instant) {
        let (since, slept) = match std::mem::replace(&mut self.state, State::Works) {
            State::Works => return,
            State::Looks(since, _) => {
                self.crowds = (self.crowds / 2).max(CROWDED[0]);
                (since, Duration::ZERO)
            }
            State::Sleeps(since) => (since, self.time / WAKE_UPS),
        };
        // The last wake-up of a sleep would not have been.
        let is_short = now.saturating_duration_since(since) < self.time + slept;
        self.waits = self.waits << 1 | u16::from(is_short);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    /// A worker that is woken within 10 µs, and its clock.
    struct Worker {
        spin: Spin,
        now: Instant,
    }

    impl Worker {
        fn new() -> Self {
            let mut spin = Spin::default();
            for late in [9, 10, 300, 10, 8] {
                spin.slept(spin.measures().unwrap() + late * MICRO);
            }
            assert_eq!((spin.measures(), spin.time), (None, 40 * MICRO));
            Worker { spin, now: Instant::now() }
        }

        /// Waits for so many µs, and is away for `gap` µs after the first look. Returns for how long it looked on.
        fn wait(&mut self, long: u32, gap: u32) -> u32 {
            let began = self.now;
            self.spin.begin(true, began);
            let mut looked = 0;
            for us in 1..=long {
                self.now = began + (us + if us > 1 { gap } else { 0 }) * MICRO;
                if !self.spin.looks_on(|| self.now) {
                    break;
                }
                looked = us;
            }
            // Awake, it sees the frame at once; asleep, a wake-up later.
            let late = if looked == long { 0 } else { 10 };
            self.now = began + (long + late) * MICRO;
            self.spin.end(self.now);
            looked
        }

        /// Takes several such waits. Returns in how many it looked on to the end.
        fn waits(&mut self, count: u32, long: u32) -> usize {
            (0..count).filter(|_| self.wait(long, 0) == long).count()
        }
    }

    #[test]
    fn a_worker_looks_on_where_half_of_its_waits_are_short() {
        let mut worker = Worker::new();
        assert_eq!(worker.waits(8, 39), 0, "it does not know yet");
        assert_eq!(worker.waits(8, 39), 8);
        assert_eq!((0..16).map(|_| worker.wait(41, 0)).collect::<Vec<_>>(), [[39; 9].to_vec(), vec![0; 7]].concat());
        assert_eq!(worker.spin.counts().map(|(_, count)| count), [17, 9, 0]);
    }

    #[test]
    fn a_worker_leaves_its_cpu_to_other_threads_for_longer_each_time() {
        let mut worker = Worker::new();
        worker.waits(16, 20);
        let mut left = |waits: usize| {
            assert_eq!(worker.wait(20, 100), 1);
            (0..waits).map(|_| worker.wait(20, 0)).filter(|looked| *looked > 0).count()
        };
        assert_eq!([left(3), left(7)], [0, 0]);
        assert_eq!(worker.wait(20, 0), 20);
    }

    #[test]
    fn a_wait_that_does_not_count_changes_nothing() {
        let mut worker = Worker::new();
        worker.waits(16, 20);
        let before = worker.spin.waits;
        worker.spin.begin(false, worker.now);
        assert!(!worker.spin.waits() && !worker.spin.looks_on(|| worker.now));
        worker.spin.end(worker.now);
        assert_eq!(worker.spin.waits, before);
    }

    #[test]
    fn a_worker_that_does_not_know_its_wake_ups_sleeps() {
        let mut worker = Worker { spin: Spin::default(), now: Instant::now() };
        assert_eq!(worker.waits(32, 1), 0);
    }
}
