//! How long a client spins for an answer before it parks.

use std::time::Duration;

/// Multiple of a nap's cost that a client spins at first after it rang: the server has to wake as well.
const WAKES: u32 = 2;

/// Multiple of a nap's cost that a client spins at most after it rang.
const WAKES_MAX: u32 = 8;

/// The spin time of a client.
///
/// [`nap_cost`](tasuki_shm::wake::nap_cost) measures busy CPUs. A CPU that was idle for long wakes several times as
/// slowly. A client that parks shortly before such a server answers pays for a second wake-up. So the spin time after a
/// ring follows the answers that came too late, up to a limit.
#[derive(Debug, Clone, Copy)]
pub struct Spin {
    /// Spin time for a server that is awake.
    awake: Duration,
    /// Spin time for a server that we rang.
    rung: Duration,
    /// Upper limit of `rung`.
    rung_max: Duration,
}

impl Spin {
    /// Follows the answers; `nap` is the cost of parking and being woken.
    pub fn adaptive(nap: Duration) -> Self {
        Spin { rung_max: nap * WAKES_MAX, ..Spin::fixed(nap) }
    }

    /// Spins for `time` always, and twice as long after a ring.
    pub fn fixed(time: Duration) -> Self {
        Spin { awake: time, rung: time * WAKES, rung_max: time * WAKES }
    }

    /// Returns the spin time of the next wait. `rung`: whether this wait's request rang the server.
    pub fn budget(&self, rung: bool) -> Duration {
        if rung { self.rung } else { self.awake }
    }

    /// Takes in that an answer came while we slept, `after` the start of a wait that followed a ring.
    pub fn overslept(&mut self, after: Duration) {
        self.rung = match after <= self.rung_max {
            true => self.rung.max((after + after / 4).min(self.rung_max)),
            // Such a server takes long because of its work: spinning does not pay.
            false => self.awake * WAKES,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn the_spin_time_after_a_ring_follows_answers_that_came_a_little_late() {
        let mut spin = Spin::adaptive(us(5));
        assert_eq!((spin.budget(false), spin.budget(true)), (us(5), us(10)));
        spin.overslept(us(24));
        assert_eq!((spin.budget(false), spin.budget(true)), (us(5), us(30)));
        spin.overslept(us(12));
        assert_eq!(spin.budget(true), us(30), "an answer that came sooner shortens nothing");
        spin.overslept(us(40));
        assert_eq!(spin.budget(true), us(40), "the limit");
        spin.overslept(us(41));
        assert_eq!(spin.budget(true), us(10), "a slow server");
    }

    #[test]
    fn a_spin_time_that_the_caller_set_stays() {
        let mut spin = Spin::fixed(us(5));
        spin.overslept(us(8));
        assert_eq!((spin.budget(false), spin.budget(true)), (us(5), us(10)));
        let mut none = Spin::adaptive(Duration::ZERO);
        none.overslept(us(1));
        assert_eq!((none.budget(false), none.budget(true)), (us(0), us(0)));
    }
}
