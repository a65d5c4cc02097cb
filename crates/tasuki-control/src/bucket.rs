//! A token bucket: so many at once, so many a second after that; what is left out is counted.

use std::time::Duration;

/// How much one party may say.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// At once,
    most: u32,
    /// and how long one more takes.
    each: Duration,
    left: u32,
    /// Up to when what has come back was counted.
    since: Duration,
    left_out: u64,
}

impl Bucket {
    /// So many at once, and one more after each of these times. Full from `now` on.
    pub fn new(most: u32, each: Duration, now: Duration) -> Self {
        Bucket { most, each, left: most, since: now, left_out: 0 }
    }

    /// Takes one; false, and counted as left out, if there is none.
    pub fn take(&mut self, now: Duration) -> bool {
        self.fill(now);
        let has = self.left > 0;
        match has {
            true => self.left -= 1,
            false => self.left_out += 1,
        }
        has
    }

    /// What was left out since this was asked last, once there is room again to say so: to be asked before [`Self::take`].
    pub fn left_out(&mut self, now: Duration) -> Option<u64> {
        self.fill(now);
        let has_room = self.left > 0 && self.left_out > 0;
        has_room.then(|| std::mem::take(&mut self.left_out))
    }

    /// What was left out and not asked for yet, whether there is room or not: of one that says no more.
    pub fn finish(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }

    fn fill(&mut self, now: Duration) {
        let come = now.saturating_sub(self.since).as_nanos() / self.each.as_nanos().max(1);
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
    }
}
