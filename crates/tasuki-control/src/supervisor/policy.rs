//! Whether a worker that died is replaced, and when: a pure function of when workers of its node died.
//!
//! | deaths of the last minute           | a fresh worker    | because                                                          |
//! |-------------------------------------|-------------------|------------------------------------------------------------------|
//! | 1                                   | at once           | one death is an accident, and the node has no stand-by until then |
//! | 2, 3, 4, 5                          | after 0.1 s · 4ⁿ  | it may be the same again: machine and log get time                |
//! | 6                                   | never             | six deaths in a minute are no accident                            |
//! | 3 in a row that never heard orders  | never             | the program does not even start                                   |
//! | any number, with `restart = "always"`| at once           | somebody kills workers on purpose                                 |

use std::time::Duration;

use crate::config::Restart;

/// How far back a death counts.
pub const MEMORY: Duration = Duration::from_secs(60);
/// So many deaths within [`MEMORY`] end it.
pub const DEATHS: usize = 6;
/// So many in a row that never heard an order end it.
pub const STILLBORN: usize = 3;
/// The first pause.
pub const PAUSE: Duration = Duration::from_millis(100);

/// The end of a worker that was not meant to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    /// When, on the caller's clock.
    pub at: Duration,
    /// Whether it had said that it hears orders.
    pub had_begun: bool,
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// A fresh worker, now.
    Now,
    /// A fresh worker, at this time on the caller's clock.
    At(Duration),
    /// None, until somebody asks for it.
    GiveUp,
}

/// A verdict and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// What.
    pub verdict: Verdict,
    /// Why.
    pub because: &'static str,
}

/// Whether and when there is to be a fresh worker, after these deaths, oldest first.
pub fn decide(restart: Restart, deaths: &[Death], now: Duration) -> Decision {
    let decision = |verdict, because| Decision { verdict, because };
    let in_a_row = deaths.iter().rev().take_while(|death| !death.had_begun).count();
    if in_a_row >= STILLBORN {
        return decision(Verdict::GiveUp, "its program ended three times in a row before it heard an order");
    }
    if restart == Restart::Always {
        return decision(Verdict::Now, "the configuration says always");
    }
    let lately: Vec<_> = deaths.iter().filter(|death| now.saturating_sub(death.at) < MEMORY).collect();
    match (lately.len(), lately.last()) {
        (0, _) | (_, None) => decision(Verdict::Now, "none of its workers has died lately"),
        (1, _) => decision(Verdict::Now, "one death is an accident"),
        (count @ 2..DEATHS, Some(last)) => {
            let pause = PAUSE * 4_u32.pow(u32::try_from(count - 2).unwrap_or(0));
            match last.at + pause {
                at if at <= now => decision(Verdict::Now, "it has waited long enough since the last death"),
                at => decision(Verdict::At(at), "it may be the same again, so machine and log get time"),
            }
        }
        _ => decision(Verdict::GiveUp, "six of its workers died within a minute"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deaths(at: &[u64]) -> Vec<Death> {
        at.iter().map(|&at| Death { at: Duration::from_millis(at), had_begun: true }).collect()
    }

    #[test]
    fn the_table() {
        let ms = Duration::from_millis;
        let after = |at: &[u64], now| decide(Restart::Careful, &deaths(at), ms(now)).verdict;
        assert_eq!(after(&[], 5), Verdict::Now);
        assert_eq!(after(&[1000], 1000), Verdict::Now);
        assert_eq!(after(&[1000, 2000], 2000), Verdict::At(ms(2100)));
        assert_eq!(after(&[1000, 2000], 2100), Verdict::Now);
        assert_eq!(after(&[1000, 2000, 2100], 2100), Verdict::At(ms(2500)));
        assert_eq!(after(&[1, 2, 3, 4], 4), Verdict::At(ms(1604)));
        assert_eq!(after(&[1, 2, 3, 4, 5], 5), Verdict::At(ms(6405)));
        assert_eq!(after(&[1, 2, 3, 4, 5, 6], 6), Verdict::GiveUp);
        assert_eq!(after(&[1, 2, 3, 4, 5, 60_100], 60_100), Verdict::Now, "what is long ago is forgotten");
    }

    #[test]
    fn a_program_that_does_not_start_is_not_tried_for_ever() {
        let still = |at| Death { at: Duration::from_secs(at), had_begun: false };
        let begun = Death { at: Duration::from_secs(200), had_begun: true };
        let now = Duration::from_secs(1000);
        assert_eq!(decide(Restart::Careful, &[still(1), still(100)], now).verdict, Verdict::Now);
        assert_eq!(
            decide(Restart::Careful, &[still(1), still(100), still(200)], now).verdict,
            Verdict::GiveUp,
            "however long it takes"
        );
        assert_eq!(decide(Restart::Careful, &[still(1), still(100), begun, still(300)], now).verdict, Verdict::Now);
    }

    #[test]
    fn who_kills_workers_on_purpose_gets_fresh_ones() {
        let always = |at: &[Death]| decide(Restart::Always, at, Duration::ZERO).verdict;
        assert_eq!(always(&deaths(&[1; 100])), Verdict::Now);
        let still = Death { at: Duration::ZERO, had_begun: false };
        assert_eq!(always(&[still; 3]), Verdict::GiveUp, "a program that does not start is another matter");
    }

    #[test]
    fn a_clock_that_went_back_counts_every_death() {
        assert_eq!(
            decide(Restart::Careful, &deaths(&[10, 20, 30, 40, 50, 60]), Duration::ZERO).verdict,
            Verdict::GiveUp
        );
    }
}
