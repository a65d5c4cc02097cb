//! Storms of deaths. Processes are killed at any time, alone or together. The promise of each path holds, and
//! everything recovers without intervention.
//!
//! The suite kills some; `cargo xtask campaign kills` kills thousands, by `TASUKI_KILLS`, measures, and writes its
//! observations to a file (`TASUKI_CAMPAIGN_JSON`).

mod field;

use std::time::Duration;

use serde_json::{Value, json};
use tasuki_testing::Dice;

use field::{ENDS, Field, Outcome, Sight, Traffic, Who, now};

use super::storm::need_storm;
use super::times::{Times, asked, record};

/// Parts of a campaign.
const KINDS: &[&str] = &["singles", "doubles", "storm", "triples"];
/// Traffic where single faults must lose nothing: frames a second to the NIC and from the native source.
const BUSY: Traffic = Traffic { card: "82574l", nic: "4000", native: "2000", rest: Duration::from_millis(2) };
/// Traffic where a node waits for its next worker, and a ring of 1,024 has to last.
const CALM: Traffic = Traffic { card: "82574l", nic: "800", native: "800", rest: Duration::from_millis(10) };
/// Number of single faults in the suite.
const FEW: usize = 30;
/// Number of single faults on one field, before a fresh field.
const A_FIELD: usize = 250;
/// Time after which the pause before the next worker no longer counts a death.
const QUIET: Duration = Duration::from_millis(10_100);

/// Kills one process at a time, and waits each time until all are back.
fn single_faults(field: &mut Field, count: usize) {
    // Chances out of twenty.
    let chances = [(Who::Driver, 10), (Who::Standby, 4), (Who::Daemon, 3), (Who::Keeper, 2), (Who::Opener, 1)];
    let chances: Vec<Who> = chances.iter().flat_map(|(who, times)| vec![*who; *times]).collect();
    let mut killed = 0;
    while killed < count {
        field.settle();
        let who = *field.dice.pick(&chances);
        let (node, end) = *field.dice.pick(ENDS);
        field.wait(20);
        let pair = field.look().and_then(|sight| sight.pair(node, end));
        let victim = match who {
            Who::Driver => pair.map(|(driver, _)| driver),
            Who::Standby => pair.map(|(_, standby)| standby),
            Who::Opener => field.opener(),
            Who::Keeper => field.rig.keeper(),
            Who::Daemon => None,
        };
        match victim {
            Some(victim) => field.kill(who, node, victim),
            None if who == Who::Daemon => {
                field.kill_daemon();
                field.start_daemon();
            }
            None => continue,
        }
        killed += 1;
        field.natives_are_exact(&format!("the death of {who:?} ({node})"));
    }
}

/// Kills only a stand-by; returns how long one start takes.
fn start(field: &mut Field, (node, end): (&str, &str)) -> Duration {
    let (driver, standby) = field.until(node, |sight| sight.pair(node, end));
    field.kill(Who::Standby, node, standby);
    let since = now();
    let is_new = |(one, other): (u32, u32)| one == driver && other != standby;
    field.until(node, |sight| sight.pair(node, end).filter(|pair| is_new(*pair)));
    now() - since
}

/// Kills all workers of a node, one right after the other; returns the time until another drives.
fn double_fault(field: &mut Field, (node, end): (&str, &str)) -> Duration {
    let its = |sight: &Sight| Some((sight.workers_of(node), sight.driver(end))).filter(|(its, _)| !its.is_empty());
    let (its, driver) = field.until(node, its);
    let (dead, since) = kill_all(field, node, its, driver);
    let took = field.is_driven(end, &dead).saturating_sub(since);
    field.was_without_driver(took);
    took
}

/// Kills the victims one right after the other; returns them, and the time of the last kill.
fn kill_all(
    field: &mut Field,
    node: &str,
    mut victims: Vec<u32>,
    driver: Option<(u32, Duration)>,
) -> (Vec<u32>, Duration) {
    if field.dice.once_in(2) {
        victims.reverse();
    }
    let mut since = now();
    for victim in &victims {
        field.wait(2);
        let who = if driver.is_some_and(|(driver, _)| driver == *victim) { Who::Driver } else { Who::Standby };
        field.kill(who, node, *victim);
        since = now();
    }
    (victims, since)
}

/// Measures single starts and double faults. With `pauses`, it waits before each fault until earlier deaths no
/// longer count.
fn double_faults(field: &mut Field, count: usize, pauses: bool) -> (Times, Times) {
    let (mut starts, mut doubles) = (Times::default(), Times::default());
    let mut quiet_from = vec![Duration::ZERO; ENDS.len()];
    for number in 0.. {
        if doubles.0.len() >= count {
            break;
        }
        let at = number % ENDS.len();
        if pauses {
            std::thread::sleep(quiet_from[at].saturating_sub(now()));
        }
        field.settle();
        field.wait(20);
        // Each sixth round over all nodes measures single starts.
        let is_start = (number / ENDS.len()).is_multiple_of(6);
        match is_start {
            true => starts.0.push(start(field, ENDS[at])),
            false => doubles.0.push(double_fault(field, ENDS[at])),
        }
        quiet_from[at] = now() + QUIET;
    }
    (starts, doubles)
}

/// Measures double faults of nodes without quiet time: each begins as soon as a worker drives. Returns how long each
/// took.
fn storm(field: &mut Field, count: usize) -> Times {
    let mut times = Times::default();
    while times.0.len() < count {
        let victim = *field.dice.pick(&ENDS[..3]);
        if field.dice.once_in(8) {
            field.kill_daemon();
            field.start_daemon();
        }
        if field.dice.once_in(16)
            && let Some(keeper) = field.rig.keeper()
        {
            field.kill(Who::Keeper, "", keeper);
        }
        times.0.push(double_fault(field, victim));
    }
    times
}

/// Durations of triple faults.
#[derive(Debug, Default)]
struct Triples {
    /// A single start.
    start: Times,
    /// From the next daemon's start until it serves.
    serves: Times,
    /// From then until another worker drives.
    driven: Times,
    /// Sum of `serves` and `driven`.
    all: Times,
}

impl Triples {
    fn to_json(&self) -> Value {
        json!({
            "start": self.start.to_json(),
            "serves": self.serves.to_json(),
            "driven_after_that": self.driven.to_json(),
            "of_a_start": of_a_start(&self.driven, &self.start),
            "driven_after_its_start": self.all.to_json(),
        })
    }
}

/// Returns the median, the 99th percentile and the maximum of `times`, as multiples of the median start.
fn of_a_start(times: &Times, starts: &Times) -> [f64; 3] {
    let ratio = |thousandths| times.at(thousandths).as_secs_f64() / starts.at(500).as_secs_f64();
    [500, 990, 1000].map(ratio).map(|ratio| (ratio * 100.0).round() / 100.0)
}

/// Kills worker, stand-by and daemon together, and then starts another daemon.
fn triple_faults(field: &mut Field, count: usize) -> Triples {
    let mut times = Triples::default();
    for number in 0..count {
        field.settle();
        let (node, end) = *field.dice.pick(ENDS);
        if number % 6 == 0 {
            // This daemon knows of no earlier death.
            times.start.0.push(start(field, (node, end)));
            field.settle();
        }
        let its = |sight: &Sight| Some((sight.workers_of(node), sight.driver(end)));
        let (victims, driver) = field.until(node, its);
        let daemon_first = field.dice.once_in(2);
        if daemon_first {
            field.kill_daemon();
            field.wait(3);
        }
        let (dead, killed) = kill_all(field, node, victims, driver);
        if !daemon_first {
            field.kill_daemon();
        }
        field.wait(10);
        let since = now();
        field.start_daemon();
        let serves = now();
        let driven = field.is_driven(end, &dead);
        field.was_without_driver(driven.saturating_sub(killed));
        times.serves.0.push(serves - since);
        times.driven.0.push(driven.saturating_sub(serves));
        times.all.0.push(driven.saturating_sub(since));
    }
    times
}

fn said(outcome: &Outcome) -> Value {
    let talk = |[sent, back, twice, there]: [u64; 4]| json!({ "sent": sent, "back": back, "twice": twice + there });
    let talks: Vec<Value> = outcome.talks.iter().copied().map(talk).collect();
    let [seen, missing, late, _] = outcome.native;
    json!({
        "nic": outcome.nic,
        "native": { "seen": seen, "missing": missing, "late": late },
        "shortcut": talks[0],
        "by_workers": talks[1],
        "by_workers_pardoned": outcome.pardoned,
    })
}

/// Ends a field; returns its kills and the outcome of its paths.
fn close(field: Field, more: Value) -> Value {
    let outcome = field.end();
    let kills: Value = outcome.kills.iter().map(|(who, count)| (format!("{who:?}"), json!(count))).collect();
    json!({ "kills": kills, "paths": said(&outcome), "times": more })
}

/// A few faults of each kind.
fn some(mut field: Field) {
    single_faults(&mut field, FEW);
    let (starts, doubles) = double_faults(&mut field, ENDS.len(), false);
    let storm = storm(&mut field, 2);
    let triples = triple_faults(&mut field, 6);
    println!("{}", [starts, doubles, storm].map(|times| times.to_json().to_string()).join("\n"));
    println!("{}", triples.to_json());
    field.end();
}

/// Runs thousands of faults, of all kinds or of one; returns the observations.
fn campaign(kills: usize, only: Option<&str>, mut next: impl FnMut(Traffic) -> Option<Field>) -> Option<Value> {
    let part = |of: usize| (kills * of).div_ceil(2000);
    let mut seen = serde_json::Map::new();
    for kind in KINDS.iter().filter(|kind| only.is_none_or(|only| only == **kind)) {
        let its = match *kind {
            "singles" => {
                let mut fields = Vec::new();
                for done in (0..kills).step_by(A_FIELD) {
                    let is_virtio = (done / A_FIELD) % 2 == 1;
                    let mut field = next(if is_virtio { Traffic { card: "virtio-net", ..BUSY } } else { BUSY })?;
                    single_faults(&mut field, A_FIELD.min(kills - done));
                    fields.push(close(field, Value::Null));
                }
                Value::from(fields)
            }
            "doubles" => {
                let mut field = next(CALM)?;
                let (starts, doubles) = double_faults(&mut field, part(300), true);
                let ratios = of_a_start(&doubles, &starts);
                let times = json!({ "start": starts.to_json(), "driven": doubles.to_json(), "of_a_start": ratios });
                close(field, times)
            }
            "storm" => {
                let mut field = next(CALM)?;
                let times = storm(&mut field, part(100));
                close(field, json!({ "driven": times.to_json() }))
            }
            _ => {
                let mut field = next(CALM)?;
                let times = triple_faults(&mut field, part(100));
                close(field, times.to_json())
            }
        };
        seen.insert((*kind).to_owned(), its);
    }
    Some(Value::from(seen))
}

#[test]
fn whoever_dies_alone_or_with_others_nothing_is_lost_and_nobody_is_asked() {
    need_storm!();
    let mut dice = Dice::new("deaths");
    let mut next = |traffic| Field::new(Dice::of(dice.next()), traffic);
    let Some(kills) = asked("TASUKI_KILLS") else {
        next(CALM).into_iter().for_each(some);
        return;
    };
    let only = std::env::var("TASUKI_KILLS_ONLY").ok();
    campaign(kills, only.as_deref(), next).iter().for_each(record);
}
