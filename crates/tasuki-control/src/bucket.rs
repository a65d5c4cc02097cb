//! A token bucket: a number of tokens at once, and one more per interval after that. It counts the refusals.

use std::time::Duration;

/// How much one party may say.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// Number of tokens at once.
    most: u32,
    /// Time until one more token comes.
    each: Duration,
    left: u32,
    /// Time up to which the tokens that came back are counted.
    since: Duration,
    left_out: u64,
}

impl Bucket {
    /// Creates a bucket of `most` tokens, and one more after each `each`. It is full at `now`.
    pub fn new(most: u32, each: Duration, now: Duration) -> Self {
        Bucket { most, each, left: most, since: now, left_out: 0 }
    }

    /// Takes a token. If there is none, counts a refusal and returns false.
    pub fn take(&mut self, now: Duration) -> bool {
        self.fill(now);
        let has = self.left > 0;
        match has {
            true => self.left -= 1,
            false => self.left_out += 1,
        }
        has
    }

    /// Returns the refusals since the last call, once there is room again to report them. To be called before
    /// [`Self::take`].
    pub fn left_out(&mut self, now: Duration) -> Option<u64> {
        self.fill(now);
        let has_room = self.left > 0 && self.left_out > 0;
        has_room.then(|| std::mem::take(&mut self.left_out))
    }

    /// Returns the refusals not reported yet, whether there is room or not: for a party that says no more.
    pub fn finish(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }

    /// Returns whether it is as one that is new.
    pub fn is_full(&mut self, now: Duration) -> bool {
        self.fill(now);
        self.left == self.most
    }

    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.since);
        // A party that floods us must not cost a division each time.
        if passed < self.each && self.left < self.most {
            return;
        }
        let come = passed.as_nanos() / self.each.as_nanos().max(1);
        let come = u32::try_from(come).unwrap_or(u32::MAX);
        if come >= self.most - self.left {
            (self.left, self.since) = (self.most, now.max(self.since));
        } else {
            self.left += come;
            self.since += self.each * come;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn so_many_go_at_once_and_one_more_after_each_time() {
        let mut bucket = Bucket::new(3, 10 * MS, 5 * MS);
        let taken: Vec<bool> = (0..5).map(|_| bucket.take(5 * MS)).collect();
        assert_eq!(taken, [true, true, true, false, false]);
        assert!(!bucket.take(14 * MS), "not a moment earlier");
        assert_eq!(bucket.left_out(14 * MS), None, "there is no room to say so");
        assert_eq!(bucket.left_out(15 * MS), Some(3));
        assert_eq!(bucket.left_out(15 * MS), None, "it is said once");
        assert!(bucket.take(15 * MS));
        assert!(!bucket.take(24 * MS));
        assert_eq!(bucket.finish(), 1);
        assert_eq!(bucket.finish(), 0);
    }

    #[test]
    fn what_is_not_used_does_not_add_up() {
        let mut bucket = Bucket::new(2, MS, Duration::ZERO);
        let hour = Duration::from_secs(3600);
        assert_eq!((0..5).filter(|_| bucket.take(hour)).count(), 2);
        // A clock that stands still, or goes back, gives nothing.
        assert!(!bucket.take(hour) && !bucket.take(Duration::ZERO));
        assert!(bucket.take(hour + MS));
    }

    #[test]
    fn over_any_time_no_more_pass_than_the_two_numbers_say() {
        let mut bucket = Bucket::new(10, 7 * MS, Duration::ZERO);
        let passed = (0..100_000_u32).filter(|step| bucket.take(*step * MS / 10)).count();
        assert_eq!(passed, 10 + 9999 / 7);
        // Nor where the first come late.
        let mut bucket = Bucket::new(2, 10 * MS, Duration::ZERO);
        let passed: Vec<bool> = [90, 91, 92, 100, 190].iter().map(|&step| bucket.take(step * MS / 10)).collect();
        assert_eq!(passed, [true, true, false, false, true]);
    }
}
