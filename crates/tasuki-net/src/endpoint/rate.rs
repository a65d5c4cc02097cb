//! Limits on how much a node sends and receives: bytes and frames a second, with bursts.
//!
//! A frame that a node sends waits in the node's own ring or queue until its turn comes. A frame for a node is dropped:
//! it would hold a ring of its sender, and the sender's frames to others behind it.

use std::time::{Duration, Instant};

/// A limit on one direction. Each 0 stands for none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limit {
    /// Bits a second, of whole frames without check sequence.
    pub bits: u64,
    /// Frames a second. A segment of up to 64 KiB counts as one.
    pub frames: u64,
    /// How long a node that has sent nothing may send as fast as it can, as if it had spread that over this time.
    pub burst: Duration,
}

/// The generic cell rate algorithm (ITU-T I.371, annex A). Bytes and frames each have a time: that at which all frames so
/// far would have gone at exactly this rate. Frames go while neither time lies ahead, so one frame of any length may
/// exceed a burst.
#[derive(Debug)]
pub struct Rate {
    began: Instant,
    /// Time of the last [`look`](Self::look), and the two times of the algorithm, in ps.
    now: u128,
    dues: [u128; 2],
    /// Cost of a byte, and of a frame, in ps.
    costs: [u64; 2],
    burst: u128,
}

impl Rate {
    /// Returns the rate of a limit, or `None` if there is none.
    pub fn of(limit: Limit) -> Option<Self> {
        let Limit { bits, frames, burst } = limit;
        let cost = |unit: u64, rate: u64| unit.checked_div(rate).unwrap_or(0);
        let burst = burst.as_nanos() * 1000;
        let costs = [cost(8_000_000_000_000, bits), cost(1_000_000_000_000, frames)];
        // The clock begins late enough for a whole burst at once.
        let rate = Rate { began: Instant::now(), now: burst, dues: [0; 2], costs, burst };
        (costs != [0; 2]).then_some(rate)
    }

    /// Reads the clock.
    pub fn look(&mut self) {
        self.now = self.burst + self.began.elapsed().as_nanos() * 1000;
    }

    /// Returns whether a frame may go.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.due() <= self.now
    }

    fn due(&self) -> u128 {
        self.dues[0].max(self.dues[1])
    }

    /// Counts a frame of `len` bytes that went.
    #[inline]
    pub fn charge(&mut self, len: usize) {
        let amounts = [len as u64, 1];
        for ((due, cost), amount) in self.dues.iter_mut().zip(self.costs).zip(amounts) {
            *due = (*due).max(self.now - self.burst) + u128::from(amount) * u128::from(cost);
        }
    }

    /// Returns how long to wait if no frame may go: until several may, so that a sleeper is not woken for each.
    pub fn opens_in(&self) -> Option<Duration> {
        (!self.is_open()).then(|| {
            let ns = (self.due() - self.now + self.burst / 8) / 1000;
            Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
        })
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
    /// Reads the clock, if a rate needs it.
    #[inline]
    pub(super) fn look(&mut self) {
        for rate in [&mut self.sends, &mut self.receives].into_iter().flatten() {
            rate.look();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends frames of `len` bytes as fast as may be for `time`; returns their number.
    fn sent(rate: &mut Rate, len: usize, time: Duration) -> u64 {
        let (mut count, end) = (0, rate.now + time.as_nanos() * 1000);
        while rate.now <= end {
            match rate.opens_in() {
                Some(left) => rate.now += left.as_nanos() * 1000,
                None => {
                    rate.charge(len);
                    count += 1;
                }
            }
        }
        count
    }

    const SECOND: Duration = Duration::from_secs(1);
    const BURST: Duration = Duration::from_millis(10);

    #[test]
    fn a_second_carries_what_the_rate_says_and_a_burst() {
        for (bits, frames, len, expected) in [
            (8_000_000, 0, 1000, 1000),
            (8_000_000_000, 0, 1000, 1_000_000),
            (100_000_000_000, 0, 60, 208_333_333),
            (0, 5000, 60, 5000),
            // The tighter of the two holds.
            (8_000_000, 5000, 1000, 1000),
            (8_000_000, 500, 1000, 500),
            // A segment is longer than what goes within a burst.
            (8_000_000, 0, 65_000, 15),
        ] {
            let mut rate = Rate::of(Limit { bits, frames, burst: BURST }).expect("a limit");
            let sent = sent(&mut rate, len, SECOND);
            let burst = expected / 100;
            assert!((expected - burst - 1..=expected + 2 * burst + 1).contains(&sent), "{bits} {frames} {len}: {sent}");
        }
    }

    #[test]
    fn a_pause_is_worth_one_burst_however_long_it_was() {
        let mut rate = Rate::of(Limit { bits: 0, frames: 1000, burst: BURST }).expect("a limit");
        let at_once = |rate: &mut Rate| {
            let mut count = 0;
            while rate.is_open() {
                rate.charge(60);
                count += 1;
            }
            count
        };
        assert_eq!(at_once(&mut rate), 11);
        rate.now += 3_600_000_000_000_000;
        assert_eq!(at_once(&mut rate), 11);
        rate.now += 1_000_000_000;
        assert_eq!(at_once(&mut rate), 1);
        assert!(rate.opens_in().is_some_and(|left| left > Duration::from_millis(1)), "not for each frame");
    }

    #[test]
    fn no_limit_is_no_rate() {
        assert!(Rate::of(Limit { burst: BURST, ..Limit::default() }).is_none());
    }
}
