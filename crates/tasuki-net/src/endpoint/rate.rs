//! Limits on how much a node sends and receives: bytes and frames a second, with bursts.
//!
//! A frame that a node sends waits in the node's own ring or queue until its turn comes. A frame for a node is dropped:
//! it would hold a ring of its sender, and the sender's frames to others behind it.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tasuki_shm::clock::now_ns;
use tasuki_shm::region::Span;

/// A limit on one direction. Each 0 stands for none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limit {
    /// Bits a second, of whole frames without check sequence.
    pub bits: u64,
    /// Frames a second. A GSO packet of up to 64 KiB counts as one.
    pub frames: u64,
    /// How long a node that has sent nothing may send as fast as it can, as if it had spread that over this time.
    pub burst: Duration,
}

/// Number of words that a rate has in shared memory.
pub const WORDS: usize = 2;

/// A time further ahead, in ns, is nobody's that keeps a limit, and counts as now. Where eight queues each begin the
/// longest GSO packet at once, at the lowest limit, the time is 4.2 s ahead.
const AHEAD_MAX: u64 = 10_000_000_000;

/// The part of what may go at once that a worker takes in advance, and of a burst that a worker reserves that has to wait.
const PARTS: u64 = 8;

/// How often a worker tries to move a time that others move meanwhile.
const TRIES: usize = 64;

/// Picoseconds in a nanosecond.
const PS: u64 = 1000;

/// The generic cell rate algorithm (ITU-T I.371, annex A). Bytes and frames each have a time: that at which all frames so
/// far would have gone at exactly this rate. Frames go while neither time lies ahead, so one frame of any length may
/// exceed a burst.
///
/// The times lie in memory that all workers share which carry frames of the node: those of all queues of its interface, and
/// those that come after them. A worker moves a time before it needs that, further than for one frame, and back by
/// `settle` at the end of its turn: what a killed one had left does not go. One whose frames have to wait reserves what comes
/// next, so that one that is awake leaves something to one that sleeps. All of them may write
/// anything there. So each time is loaded once and checked, and a lie changes the rate of this node alone.
#[derive(Debug)]
pub struct Rate {
    /// The two times, in ns of `CLOCK_MONOTONIC`.
    dues: Span<AtomicU64>,
    /// Time at which the turn [began](Rates::look).
    now: u64,
    /// What was taken in advance, in ps. What is less than 1 ns stays from turn to turn.
    taken: [u64; WORDS],
    /// Whether this turn has taken some. The first time it takes no more than it needs: most turns of some loads have one frame.
    takes: [bool; WORDS],
    /// Cost of a byte, and of a frame, in ps; 0 if there is no limit.
    costs: [u64; WORDS],
    burst: u64,
    /// What is reserved, in ps, and the time from which it may be used; 0 if nothing is.
    reserved: [u64; WORDS],
    slot: u64,
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Rate {
    /// Returns the rate of a limit whose times are [`WORDS`] `dues`, or `None` if there is none.
    ///
    /// # Panics
    /// If there are fewer words.
    pub fn of(limit: Limit, dues: Span<AtomicU64>) -> Option<Self> {
        assert!(dues.len() >= WORDS, "each kind of limit has a time");
        let Limit { bits, frames, burst } = limit;
        let cost = |unit: u64, rate: u64| unit.checked_div(rate).unwrap_or(0);
        let costs = [cost(8_000_000_000_000, bits), cost(1_000_000_000_000, frames)];
        let (now, burst) = (now_ns(), ns(burst));
        let (taken, takes, reserved, slot) = ([0; WORDS], [false; WORDS], [0; WORDS], 0);
        let rate = Rate { dues, now, taken, takes, costs, burst, reserved, slot };
        (costs != [0; WORDS]).then_some(rate)
    }

    /// Returns the rate of a limit with times of its own.
    #[cfg(test)]
    pub(crate) fn alone(limit: Limit) -> Option<Self> {
        use tasuki_shm::region::{Pages, Region};
        let memory = Region::create("tasuki test", 4096, Pages::Small).expect("memory");
        Self::of(limit, memory.span(0, WORDS).expect("a page"))
    }

    /// Returns a time as it counts.
    #[inline]
    fn checked(&self, due: u64) -> u64 {
        if due > self.now.saturating_add(AHEAD_MAX) { self.now } else { due }
    }

    /// Returns how far ahead the later time is, or 0.
    #[inline]
    fn ahead(&self) -> u64 {
        let [bytes, frames] = [0, 1].map(|kind| {
            // Of a kind without a limit, the time says nothing.
            let is_paid = self.taken[kind] >= PS || self.costs[kind] == 0;
            if is_paid { 0 } else { self.checked(self.dues[kind].load(Relaxed)).saturating_sub(self.now) }
        });
        bytes.max(frames)
    }

    /// Returns whether a frame may go.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.slot == 0 && self.ahead() == 0
    }

    /// Counts a frame of `len` bytes that went.
    #[inline]
    pub fn charge(&mut self, len: usize) {
        let costs = [len as u64 * self.costs[0], self.costs[1]];
        for (kind, cost) in costs.into_iter().enumerate() {
            self.taken[kind] = match self.taken[kind].checked_sub(cost) {
                Some(left) => left,
                None => self.take(kind, cost - self.taken[kind]),
            };
        }
    }

    /// Moves a time by `least` ps, or by more if that may go now and several frames go. Returns what is left of it.
    fn take(&mut self, kind: usize, least: u64) -> u64 {
        let parts = if self.takes[kind] { PARTS } else { u64::MAX };
        self.takes[kind] = true;
        let word = &self.dues[kind];
        let mut due = word.load(Relaxed);
        for _ in 0..TRIES {
            let from = self.checked(due).max(self.now.saturating_sub(self.burst));
            let ns = least.div_ceil(PS).max(self.now.saturating_sub(from) / parts);
            match word.compare_exchange_weak(due, from + ns, Relaxed, Relaxed) {
                Ok(_) => return ns * PS - least,
                Err(is) => due = is,
            }
        }
        // Somebody writes there without end. No worker waits for that.
        0
    }

    /// Gives back what was taken in advance: the node's other workers may need it.
    #[inline]
    pub(super) fn settle(&mut self) {
        self.takes = [false; WORDS];
        for (taken, due) in self.taken.iter_mut().zip(self.dues.iter()) {
            if *taken >= PS {
                due.fetch_sub(*taken / PS, Relaxed);
                *taken %= PS;
            }
        }
    }

    /// Reads the clock, and takes what is reserved once its time has come.
    #[inline]
    fn look(&mut self, now: u64) {
        self.now = now;
        if self.slot > 0 && now >= self.slot {
            self.use_reserved();
        }
    }

    fn use_reserved(&mut self) {
        self.slot = 0;
        self.taken = [0, 1].map(|kind| self.taken[kind] + std::mem::take(&mut self.reserved[kind]));
    }

    /// Returns how long to wait if no frame may go, at the end of a turn. A node whose frames wait, as `has_frames` says,
    /// reserves what comes next, a part of a burst: so each worker of several has its turn, and a sleeper wakes for several
    /// frames. If nobody can say, it waits until several may go. If there is no frame, there is nothing to wait for.
    pub fn opens_in(&mut self, has_frames: impl FnOnce() -> Option<bool>) -> Option<Duration> {
        if self.slot == 0 {
            let ahead = Some(self.ahead()).filter(|ahead| *ahead > 0)?;
            match has_frames() {
                Some(true) => self.reserve(),
                Some(false) => return None,
                None => return Some(Duration::from_nanos(ahead + self.burst / PARTS)),
            }
        }
        Some(Duration::from_nanos(self.slot.saturating_sub(self.now)))
    }

    /// Gives back what was taken in advance and what is reserved: another worker goes on.
    fn end(&mut self) {
        self.use_reserved();
        self.settle();
    }

    /// Moves the times by a part of a burst, and notes when that may be used.
    #[cold]
    fn reserve(&mut self) {
        let part = (self.burst / PARTS).max(1);
        self.slot = self.now;
        for kind in 0..WORDS {
            if self.costs[kind] > 0 {
                let due = self.dues[kind].fetch_add(part, Relaxed);
                self.slot = self.slot.max(self.checked(due));
                self.reserved[kind] = part * PS;
            }
        }
    }
}

/// The rates of a node.
#[derive(Debug, Default)]
pub struct Rates {
    /// Frames of the node.
    pub sends: Option<Rate>,
    /// Frames for the node.
    pub receives: Option<Rate>,
}

impl Rates {
    fn each(&mut self) -> impl Iterator<Item = &mut Rate> {
        [&mut self.sends, &mut self.receives].into_iter().flatten()
    }

    /// Reads the clock, if a rate needs it.
    #[inline]
    pub(super) fn look(&mut self) {
        if self.sends.is_some() || self.receives.is_some() {
            let now = now_ns();
            self.each().for_each(|rate| rate.look(now));
        }
    }

    /// Ends a turn.
    #[inline]
    pub(super) fn settle(&mut self) {
        self.each().for_each(Rate::settle);
    }

    /// Ends the last turn.
    pub(super) fn end(&mut self) {
        self.each().for_each(Rate::end);
    }
}

#[cfg(test)]
mod tests {
    use tasuki_shm::region::{Pages, Region};

    use super::*;

    /// Sends frames of `len` bytes as fast as may be for `time`, several in a turn; returns their number. The endpoint `knows`
    /// that they wait, or does not.
    fn sent(rate: &mut Rate, len: usize, time: Duration, knows: bool) -> u64 {
        let (mut count, end) = (0, rate.now + ns(time));
        while rate.now <= end {
            match rate.opens_in(|| knows.then_some(true)) {
                Some(left) => {
                    rate.settle();
                    rate.look(rate.now + ns(left));
                }
                None => {
                    rate.charge(len);
                    count += 1;
                }
            }
        }
        count
    }

    fn at_once(rate: &mut Rate) -> u64 {
        let mut count = 0;
        while rate.is_open() {
            rate.charge(60);
            count += 1;
        }
        count
    }

    const SECOND: Duration = Duration::from_secs(1);
    const BURST: Duration = Duration::from_millis(10);
    /// A burst of ten frames.
    const THOUSAND: Limit = Limit { bits: 0, frames: 1000, burst: BURST };

    /// Returns the rates of the workers of a node.
    fn of_workers<const N: usize>(limit: Limit) -> [Rate; N] {
        let memory = Region::create("tasuki test", 4096, Pages::Small).expect("memory");
        let mut rates = [(); N].map(|()| Rate::of(limit, memory.span(0, WORDS).expect("a page")).expect("a limit"));
        let now = rates[0].now;
        rates.iter_mut().for_each(|rate| rate.now = now);
        rates
    }

    #[test]
    fn a_second_carries_what_the_rate_says_and_a_burst() {
        for (bits, frames, len, expected) in [
            (8_000_000, 0, 1000, 1000),
            (8_000_000_000, 0, 1000, 1_000_000),
            // A frame takes less than a nanosecond.
            (1_000_000_000_000, 0, 60, 2_083_333_333),
            (0, 5000, 60, 5000),
            // The tighter of the two holds.
            (8_000_000, 5000, 1000, 1000),
            (8_000_000, 500, 1000, 500),
            // A GSO packet is longer than what goes within a burst.
            (8_000_000, 0, 65_000, 15),
        ] {
            let burst = expected / 100;
            // Of very many frames, a hundredth does.
            let (expected, time) = if expected > 1_000_000_000 { (burst, BURST) } else { (expected, SECOND) };
            for knows in [false, true] {
                let mut rate = Rate::alone(Limit { bits, frames, burst: BURST }).expect("a limit");
                let sent = sent(&mut rate, len, time, knows);
                assert!(
                    (expected - burst..=expected + 2 * burst + 2).contains(&(sent + 1)),
                    "{bits} {frames} {len} {knows}: {sent}"
                );
            }
        }
    }

    #[test]
    fn a_pause_is_worth_one_burst_however_long_it_was() {
        let [mut rate] = of_workers(THOUSAND);
        assert_eq!(at_once(&mut rate), 11);
        rate.now += 3_600_000_000_000;
        assert_eq!(at_once(&mut rate), 11);
        rate.now += 1_000_000;
        assert_eq!(at_once(&mut rate), 1);
        assert!(rate.opens_in(|| None).is_some_and(|left| left > Duration::from_millis(1)), "not for each frame");
        assert_eq!(rate.opens_in(|| Some(false)), None, "there is nothing to wait for");
    }

    #[test]
    fn no_limit_is_no_rate() {
        assert!(Rate::alone(Limit { burst: BURST, ..Limit::default() }).is_none());
    }

    #[test]
    fn the_workers_of_a_node_have_one_burst_and_one_rate_together() {
        let [mut one, mut other] = of_workers(THOUSAND);
        (0..2).for_each(|_| one.charge(60));
        assert!(one.taken[1] > 0, "it takes more than it needs");
        one.settle();
        assert_eq!(at_once(&mut other), 9, "what one did not need is the other's");
        assert!(!one.is_open(), "the burst is spent");
        // A second later: whichever sends, and also if one dies after each frame and another comes in its place.
        let mut count = 0;
        let end = one.now + ns(SECOND);
        while one.now < end {
            for rate in [&mut one, &mut other] {
                if rate.is_open() {
                    rate.charge(60);
                    count += 1;
                    rate.taken = [0; WORDS];
                }
                rate.now += 100_000;
            }
        }
        assert!((800..=1001).contains(&count), "{count}");
    }

    /// Returns what each of these workers sends of frames of `len` bytes in `time`, if they have more than may go. Some are
    /// awake and take a turn each 20 us, the others sleep, and wake 60 us after they wanted to.
    fn shares<const N: usize>(limit: Limit, len: usize, are_awake: [bool; N], time: Duration) -> [u64; N] {
        let (mut rates, mut sent) = (of_workers::<N>(limit), [0; N]);
        let end = rates[0].now + ns(time);
        loop {
            let next = (0..N).min_by_key(|at| rates[*at].now).expect("there are some");
            let rate = &mut rates[next];
            if rate.now > end {
                return sent;
            }
            for _ in 0..32 {
                if rate.is_open() {
                    rate.charge(len);
                    sent[next] += 1;
                }
            }
            rate.settle();
            let wait = rate.opens_in(|| Some(true)).filter(|_| !are_awake[next]);
            rate.look(rate.now + wait.map_or(20_000, |wait| ns(wait) + 60_000));
        }
    }

    #[test]
    fn each_of_several_workers_that_have_more_than_may_go_gets_its_part() {
        for (len, mbit) in [(60, 10), (1500, 10), (1500, 1000), (65_000, 10), (65_000, 1000)] {
            for burst in [Duration::from_millis(1), BURST] {
                let limit = Limit { bits: mbit * 1_000_000, frames: 0, burst };
                // A hundred of the longest frames, at least.
                let time = Duration::from_secs(if len > 1500 && mbit == 10 { 20 } else { 1 });
                let all =
                    u64::try_from(u128::from(limit.bits) * time.as_millis() / 8000).expect("some bytes") / len as u64;
                let check = |sent: &[u64]| {
                    let least = all / sent.len() as u64 * 3 / 4;
                    assert!(sent.iter().all(|its| *its >= least), "{len} {mbit} {burst:?}: {sent:?} of {all}");
                    let sum: u64 = sent.iter().sum();
                    assert!(
                        (all * 9 / 10..=all + all / 50 + 64).contains(&sum),
                        "{len} {mbit} {burst:?}: {sum} of {all}"
                    );
                };
                for are_awake in [[true, false], [true, true], [false, false]] {
                    check(&shares(limit, len, are_awake, time));
                }
                for are_awake in
                    [[true, false, false, false], [true, true, false, false], [true, true, true, false], [false; 4]]
                {
                    check(&shares(limit, len, are_awake, time));
                }
            }
        }
    }

    #[test]
    fn a_worker_that_is_replaced_leaves_what_it_reserved_to_the_next_one() {
        let [mut one, mut next] = of_workers(THOUSAND);
        assert_eq!(at_once(&mut one), 11);
        one.settle();
        let before = next.ahead();
        assert!(one.opens_in(|| Some(true)).is_some() && next.ahead() > before, "it has reserved some");
        one.end();
        assert_eq!(next.ahead(), before);
        next.look(next.now + before);
        assert!(next.is_open());
    }

    #[test]
    fn workers_that_send_at_the_same_time_have_one_burst_together() {
        let limit = Limit { frames: 1_000_000, ..THOUSAND };
        let mut rates: [Rate; 4] = of_workers(limit);
        let sent: Vec<u64> = std::thread::scope(|scope| {
            let all: Vec<_> = rates.iter_mut().map(|rate| scope.spawn(|| at_once(rate))).collect();
            all.into_iter().map(|one| one.join().expect("a number")).collect()
        });
        let sum: u64 = sent.iter().sum();
        assert!((10_000..=10_004).contains(&sum), "{sent:?}");
    }

    #[test]
    fn a_worker_that_lies_keeps_no_other_from_sending_for_long() {
        let [mut rate, liar] = of_workers(THOUSAND);
        for lie in [u64::MAX, rate.now + AHEAD_MAX + 1, 1 << 63] {
            liar.dues[1].store(lie, Relaxed);
            assert!(rate.is_open(), "{lie}");
            assert_eq!(at_once(&mut rate), 1, "{lie}: it counts as now, and the frame puts it right");
        }
        liar.dues[1].store(rate.now + AHEAD_MAX, Relaxed);
        assert!(!rate.is_open());
        rate.now += AHEAD_MAX;
        assert!(rate.is_open(), "it says so once");
        // What is in the past is a pause; and what it takes back is no more than that.
        liar.dues[1].store(0, Relaxed);
        rate.charge(60);
        liar.dues[1].store(0, Relaxed);
        rate.settle();
        assert!(rate.is_open() && at_once(&mut rate) <= 11);
        // Of a kind without a limit nobody looks at the time.
        liar.dues[0].store(rate.now + AHEAD_MAX, Relaxed);
        rate.now += ns(BURST);
        assert!(rate.is_open());
    }
}
