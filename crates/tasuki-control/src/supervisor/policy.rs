//! When a dead worker is replaced: a pure function of when workers of its node died. The daemon never gives a node
//! up.
//!
//! | deaths                                              | a fresh worker           | because                                             |
//! |-----------------------------------------------------|--------------------------|-----------------------------------------------------|
//! | 1 or 2 deaths within 10 s                           | at once                  | driver and stand-by may die of one accident         |
//! | 3, 4, 5, 6                                          | after 0.1, 0.2, 0.4, 0.8 s | the cause may persist: machine and log get time  |
//! | 7 and more                                          | after 1 s                | no caller waits longer for a node than that         |
//! | 7 and more in a row that never began                | after 1.6, 3.2, 6.4, 10 s | the program must be mended, and may be any time    |
//! | any number that began, with `restart = "always"`    | at once                  | an operator kills workers on purpose                |
//!
//! A pause counts from the last death. Other failures that are retried (a device that does not open, an uplink that
//! stays split) wait by the same numbers, up to 10 s.

use std::time::Duration;

use crate::config::Restart;

/// Only deaths within this time count.
pub const DEATH_WINDOW: Duration = Duration::from_secs(10);
/// This many deaths at once are one accident: a driver and its stand-by.
const ACCIDENT_DEATH_COUNT: usize = 2;
/// This many recent deaths are trouble, and users see it.
const STORM_DEATH_COUNT: usize = 6;
/// This many in a row that never began are trouble, too.
const STILLBORN_COUNT: usize = 3;
/// The first pause; each is twice the one before.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest wait of a node whose program begins.
pub const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest wait before any retry.
pub const RETRY_MAX: Duration = Duration::from_secs(10);
/// Deaths of a node worth remembering: with more, all pauses are the longest already.
const DEATHS_MAX: usize = 32;

/// The end of a worker that was not meant to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    /// Time of death, on the caller's clock.
    pub at: Duration,
    /// Whether the worker had reported that it accepts orders.
    pub had_begun: bool,
}

/// The trouble, shown to users, of a node whose workers die.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Its program ends before it hears an order.
    NeverBegins,
    /// Its workers die one after the other.
    Dies,
}

/// Appends a death, and drops the oldest beyond `DEATHS_MAX`.
pub fn remember(deaths: &mut Vec<Death>, death: Death) {
    deaths.push(death);
    let extra = deaths.len().saturating_sub(DEATHS_MAX);
    deaths.drain(..extra);
}

/// Returns the time from which a fresh worker may start after these deaths, oldest first.
pub fn due(restart: Restart, deaths: &[Death]) -> Duration {
    let Some(last) = deaths.last() else { return Duration::ZERO };
    let lately = match restart {
        Restart::Always => 0,
        Restart::Careful => count_lately(deaths, last.at),
    };
    last.at + pause(lately, PAUSE_MAX).max(pause(stillborn(deaths), RETRY_MAX))
}

/// Returns how long to wait after this many failures in a row.
pub fn retry(failures: usize) -> Duration {
    if failures == 0 { Duration::ZERO } else { pause(failures.saturating_add(ACCIDENT_DEATH_COUNT), RETRY_MAX) }
}

/// Returns a node's trouble after these deaths, if it has any.
pub fn trouble(deaths: &[Death], now: Duration) -> Option<Trouble> {
    if stillborn(deaths) >= STILLBORN_COUNT {
        return Some(Trouble::NeverBegins);
    }
    (count_lately(deaths, now) >= STORM_DEATH_COUNT).then_some(Trouble::Dies)
}

fn stillborn(deaths: &[Death]) -> usize {
    deaths.iter().rev().take_while(|death| !death.had_begun).count()
}

fn count_lately(deaths: &[Death], now: Duration) -> usize {
    deaths.iter().filter(|death| now.saturating_sub(death.at) < DEATH_WINDOW).count()
}

fn pause(count: usize, longest: Duration) -> Duration {
    let doublings = match count.checked_sub(ACCIDENT_DEATH_COUNT + 1) {
        None => return Duration::ZERO,
        Some(doublings) => u32::try_from(doublings).unwrap_or(u32::MAX),
    };
    2_u32.checked_pow(doublings).map_or(longest, |factor| PAUSE_MIN.saturating_mul(factor).min(longest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn deaths(at: &[u64]) -> Vec<Death> {
        at.iter().map(|&at| Death { at: Duration::from_millis(at), had_begun: true }).collect()
    }

    #[test]
    fn the_table() {
        let pauses = |restart, had_begun| {
            let of = |count: usize| due(restart, &vec![Death { at: Duration::ZERO, had_begun }; count]).as_millis();
            (0..12).map(of).collect::<Vec<_>>()
        };
        assert_eq!(pauses(Restart::Careful, true), [0, 0, 0, 100, 200, 400, 800, 1000, 1000, 1000, 1000, 1000]);
        assert_eq!(pauses(Restart::Careful, false), [0, 0, 0, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(pauses(Restart::Always, true), [0; 12]);
        assert_eq!(pauses(Restart::Always, false), pauses(Restart::Careful, false), "its program does not even start");
        assert_eq!(due(Restart::Careful, &deaths(&[1, 2, 3, 4, 11_000])), Duration::from_secs(11), "that is long ago");
        assert_eq!(
            [0, 1, 2, 7, 8, 99].map(|failures| retry(failures).as_millis()),
            [0, 100, 200, 6400, 10_000, 10_000]
        );
    }

    #[test]
    fn people_are_told_of_a_storm_and_of_a_program_that_does_not_begin() {
        let ms = Duration::from_millis;
        let many = deaths(&[1, 2, 3, 4, 5, 6]);
        assert_eq!(trouble(&many[1..], ms(6)), None);
        assert_eq!(trouble(&many, ms(6)), Some(Trouble::Dies));
        assert_eq!(trouble(&many, ms(10_001)), None, "it is over");
        let still = [Death { at: ms(7), had_begun: false }; 3];
        assert_eq!(trouble(&still[1..], ms(7)), None);
        assert_eq!(trouble(&still, ms(1_000_000)), Some(Trouble::NeverBegins), "until one begins");
        assert_eq!(trouble(&[&still[..], &many[..1]].concat(), ms(7)), None);
    }

    /// Deaths in the order of time, up to a minute apart.
    fn histories() -> impl Strategy<Value = Vec<Death>> {
        prop::collection::vec((0_u64..60_000, any::<bool>()), 0..50).prop_map(|steps| {
            let mut at = 0;
            let death = |(after, had_begun): (u64, bool)| {
                at += after;
                Death { at: Duration::from_millis(at), had_begun }
            };
            steps.into_iter().map(death).collect()
        })
    }

    proptest! {
        #[test]
        fn no_node_is_given_up(history in histories(), is_always in any::<bool>()) {
            let restart = if is_always { Restart::Always } else { Restart::Careful };
            let Some(last) = history.last() else { return Ok(()) };
            let waits = due(restart, &history) - last.at;
            prop_assert!(waits <= RETRY_MAX);
            prop_assert!(!last.had_begun || waits <= PAUSE_MAX, "one that begins is replaced within a second: {waits:?}");
        }

        #[test]
        fn an_accident_after_a_quiet_time_is_mended_at_once(history in histories()) {
            let at = history.last().map_or(Duration::ZERO, |death| death.at) + DEATH_WINDOW;
            let mut both = history;
            both.extend([Death { at, had_begun: true }; ACCIDENT_DEATH_COUNT]);
            prop_assert_eq!(due(Restart::Careful, &both), at);
        }

        #[test]
        fn one_death_more_never_makes_a_pause_shorter(history in histories(), had_begun in any::<bool>()) {
            let Some(last) = history.last().copied() else { return Ok(()) };
            let mut more = history.clone();
            more.push(Death { had_begun, ..last });
            // A worker that began ends a row of workers that did not: then the storm alone counts.
            prop_assume!(!had_begun || last.had_begun);
            prop_assert!(due(Restart::Careful, &more) >= due(Restart::Careful, &history));
        }

        /// However fast workers die, the machine starts few of them, and the node gets the next one.
        #[test]
        fn a_program_that_always_dies_costs_little(lives in prop::collection::vec((0_u64..50, any::<bool>()), 200)) {
            let (mut history, mut now, mut starts) = (Vec::new(), Duration::ZERO, Vec::new());
            for (ms, had_begun) in lives {
                starts.push(now);
                now += Duration::from_millis(ms);
                remember(&mut history, Death { at: now, had_begun });
                now = now.max(due(Restart::Careful, &history));
            }
            let crowded = starts.windows(18).find(|some| some[17] - some[0] < DEATH_WINDOW);
            prop_assert!(crowded.is_none(), "{crowded:?}");
        }

        #[test]
        fn what_is_remembered_is_enough(history in histories()) {
            let mut short = Vec::new();
            history.iter().for_each(|death| remember(&mut short, *death));
            let now = history.last().map_or(Duration::ZERO, |death| death.at);
            prop_assert_eq!(due(Restart::Careful, &short), due(Restart::Careful, &history));
            prop_assert_eq!(trouble(&short, now), trouble(&history, now));
        }
    }
}
