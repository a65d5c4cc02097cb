//! Interrupts of a guest.
//!
//! The first interrupt after a pause goes at once, so that a single frame waits for nothing. One that comes soon after
//! another is held: the chains completed meanwhile share it. The worker does not sleep past its time.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use tasuki_shm::wake::ring_eventfd;

/// The least time between two interrupts of each ring: for frames to the guest, and for those that it sent. The latter give
/// the guest its buffers back, and it waits for these only when it has no free one. Frames to the guest were coalesced
/// before they came here.
pub const EVERY: [Duration; 2] = [Duration::ZERO, Duration::from_micros(500)];

/// The interrupt of one ring.
#[derive(Debug, Default)]
pub struct Interrupt {
    /// By which the front end hears of it.
    pub eventfd: Option<OwnedFd>,
    /// When it went last, and the used index then.
    last: Option<(Instant, u16)>,
    is_held: bool,
}

impl Interrupt {
    /// Takes note of whether the guest wants an interrupt for what it was shown last; `done` is its used index now, and
    /// `size` the number of its descriptors. Interrupts the guest if that is due: `every` after the last time, or once as
    /// many chains were completed since as a quarter of its descriptors. Returns whether it did.
    #[inline]
    pub fn offer(
        &mut self,
        is_wanted: bool,
        (done, size): (u16, u16),
        every: Duration,
        now: impl FnOnce() -> Instant,
    ) -> bool {
        self.is_held |= is_wanted;
        if !self.is_held {
            return false;
        }
        let now = now();
        let is_early = self.last.is_some_and(|(at, index)| {
            now.saturating_duration_since(at) < every && done.wrapping_sub(index) < size / 4
        });
        if is_early {
            return false;
        }
        self.last = Some((now, done));
        self.flush()
    }

    /// Interrupts the guest now, if it waits for that. Returns whether it did.
    pub fn flush(&mut self) -> bool {
        let is_due = std::mem::take(&mut self.is_held);
        let eventfd = self.eventfd.iter().filter(|_| is_due);
        eventfd.map(ring_eventfd).count() > 0
    }

    /// Returns whether an interrupt is held.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Returns how soon a held interrupt is due.
    pub fn due_in(&self, every: Duration, now: Instant) -> Option<Duration> {
        let (last, _) = self.last.filter(|_| self.is_held)?;
        Some(every.saturating_sub(now.saturating_duration_since(last)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Instant, Interrupt};
    use rustix::event::{EventfdFlags, eventfd};

    const EVERY: Duration = Duration::from_micros(100);
    const SIZE: u16 = 64;

    fn ready() -> (Interrupt, Instant) {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        (Interrupt { eventfd: Some(eventfd), ..Interrupt::default() }, Instant::now())
    }

    /// Returns how often the eventfd was rung since the last call.
    fn rung(interrupt: &Interrupt) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(interrupt.eventfd.as_ref().unwrap(), &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn a_single_one_goes_at_once_and_those_that_follow_share_one() {
        let (mut interrupt, start) = ready();
        let mut offer = |wanted, done, after: u64| {
            let at = start + Duration::from_micros(after);
            let went = interrupt.offer(wanted, (done, SIZE), EVERY, || at);
            assert_eq!(rung(&interrupt), u64::from(went));
            (went, interrupt.due_in(EVERY, at).map(|due| due.as_micros()))
        };
        assert_eq!(offer(false, 0, 0), (false, None));
        assert_eq!(offer(true, 1, 0), (true, None));
        assert_eq!(offer(true, 2, 10), (false, Some(90)));
        assert_eq!(offer(false, 3, 99), (false, Some(1)), "and does not wait anew");
        assert_eq!(offer(false, 3, 100), (true, None), "although nothing new was completed");
        assert_eq!(offer(false, 4, 150), (false, None), "the guest wants none");
        assert_eq!(offer(true, 5, 300), (true, None));
    }

    #[test]
    fn a_guest_that_may_run_out_of_descriptors_does_not_wait() {
        let (mut interrupt, start) = ready();
        let start_at = u16::MAX - 3;
        let mut offer = |done: u16| interrupt.offer(true, (start_at.wrapping_add(done), SIZE), EVERY, || start);
        assert!(offer(0) && !offer(15));
        assert!(offer(16) && !offer(31) && offer(40), "across the wrap of the index, too");
    }

    #[test]
    fn a_held_one_goes_when_the_ring_closes_and_needs_no_eventfd() {
        let (mut interrupt, start) = ready();
        assert!(!interrupt.flush(), "none is held");
        assert!(interrupt.offer(true, (0, SIZE), EVERY, || start));
        assert!(!interrupt.offer(true, (1, SIZE), EVERY, || start) && interrupt.flush());
        assert_eq!((rung(&interrupt), interrupt.due_in(EVERY, start)), (2, None));
        interrupt.eventfd = None;
        assert!(!interrupt.offer(true, (2, SIZE), Duration::ZERO, || start));
        assert_eq!(interrupt.due_in(EVERY, start), None, "the driver polls");
    }
}
