//! `tasuki top`: nodes, NICs, rates, drops and events as they come, on a terminal; or from a recording.

mod picture;
mod terminal;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hyper::Method as Verb;
use serde::{Deserialize, Serialize};
use tasuki_shm::clock::now_ns;

use super::{Reach, show, write};
use crate::api::client;
use crate::api::metrics::Metrics;
use crate::api::types::Event;
use crate::place;
use picture::Picture;
use terminal::{Key, Terminal};

/// How to look.
#[derive(Debug, Args)]
pub struct Top {
    /// Milliseconds between two looks: 100 to an hour.
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(100..=3_600_000))]
    pub every_ms: u64,
    /// Show what `tasuki top --json` wrote to this file, instead of the daemon.
    #[arg(long, value_name = "FILE")]
    pub play: Option<PathBuf>,
}

/// All that is seen in one look.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Moment {
    /// Milliseconds since 1970.
    at_ms: u64,
    /// Milliseconds of `CLOCK_MONOTONIC`: somebody may set the other clock between two looks. Earlier versions record none.
    clock_ms: Option<u64>,
    metrics: Metrics,
    /// Milliseconds of CPU time that the daemon and the workers have used, by their process IDs.
    cpu_ms: BTreeMap<u32, u64>,
    /// Events since the look before.
    events: Vec<Event>,
}

impl Moment {
    /// Looks. `since` is the number of the last event seen.
    fn look(folder: &Path, since: u64) -> Result<Self> {
        let get = |address: &str| client::ask(folder, Verb::GET, address, None);
        let metrics: Metrics = show::read(get("/v1/snapshot")?)?;
        let events = show::read(get(&format!("/v1/events?since={since}"))?)?;
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let processes = metrics.workers.iter().map(|worker| worker.pid).chain([metrics.status.pid]);
        let cpu_ms = processes.filter_map(|pid| Some((pid, cpu_ms(pid)?))).collect();
        let at_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
        Ok(Moment { at_ms, clock_ms: Some(now_ns() / 1_000_000), metrics, cpu_ms, events })
    }

    /// Returns the milliseconds from an earlier look to this one.
    fn ms_since(&self, before: &Moment) -> u64 {
        // Of two boots of the machine, the later clock shows less.
        let by_clock = self.clock_ms.zip(before.clock_ms).and_then(|(now, before)| now.checked_sub(before));
        by_clock.unwrap_or_else(|| self.at_ms.saturating_sub(before.at_ms))
    }

    /// Returns the number of the last event seen: some may have come after the counts.
    fn last_event(&self) -> u64 {
        self.events.last().map_or(self.metrics.last_event, |event| event.number)
    }
}

/// Returns the CPU time that a process has used (proc(5), utime and stime).
fn cpu_ms(pid: u32) -> Option<u64> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = line.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Shows the daemon until a key ends it; with `--json` writes each look as a line, for a recording.
pub fn run(reach: &Reach, top: &Top) -> Result<()> {
    match (&top.play, reach.json) {
        (Some(file), _) => play(file),
        (None, true) => record(&reach.dir.clone().unwrap_or_else(place::asked), top.every_ms),
        (None, false) => watch(&reach.dir.clone().unwrap_or_else(place::asked), top.every_ms),
    }
}

/// Writes a line a look, until it has no reader. While tasukid is started anew, there are none.
fn record(folder: &Path, every_ms: u64) -> Result<()> {
    // While there is somebody to hear why it cannot be.
    let mut moment = Some(Moment::look(folder, 0)?);
    let mut since = 0;
    loop {
        if let Some(moment) = moment {
            since = moment.last_event();
            if !write(&(serde_json::to_string(&moment)? + "\n"))? {
                return Ok(());
            }
        }
        std::thread::sleep(Duration::from_millis(every_ms));
        moment = Moment::look(folder, since).ok();
    }
}

/// Looks, in a thread of its own: keys count while the daemon does not answer.
fn look_aside(folder: &Path, since: u64) -> Receiver<Result<Moment>> {
    let (seen, look) = mpsc::channel();
    let folder = folder.to_owned();
    // Fails if nobody waits for it any more.
    std::thread::spawn(move || drop(seen.send(Moment::look(&folder, since))));
    look
}

/// Times between two questions whether a look has come: soon after it was begun, and later.
const ANSWER_POLL_EVERY: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];
/// Time after which the foot says that the daemon does not answer.
const SLOW_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

fn watch(folder: &Path, every_ms: u64) -> Result<()> {
    let mut picture = Picture::default();
    // While errors still reach the terminal as it was.
    let first = Moment::look(folder, 0)?;
    let mut since = first.last_event();
    picture.take(first);
    let mut terminal = Terminal::take()?;
    let every = Duration::from_millis(every_ms);
    let (mut next, mut stands) = (Instant::now() + every, false);
    let (mut trouble, mut look) = (None, None);
    loop {
        if look.is_none() && !stands && Instant::now() >= next {
            next = Instant::now() + every;
            look = Some((look_aside(folder, since), Instant::now()));
        }
        let seen = look.as_ref().and_then(|(look, _)| look.try_recv().ok());
        if let Some(seen) = seen {
            look = None;
            match seen {
                Ok(moment) => {
                    (since, trouble) = (moment.last_event(), None);
                    picture.take(moment);
                }
                Err(error) => trouble = Some(error),
            }
        }
        let waits = look.as_ref().map(|(_, begun)| begun.elapsed());
        let foot = match (&trouble, waits.filter(|waits| *waits >= SLOW_ANSWER_TIMEOUT), stands) {
            (_, Some(waits), _) => format!("tasukid has not answered for {} s; q ends", waits.as_secs()),
            (Some(trouble), ..) => format!("{trouble:#}"),
            (None, _, true) => "stands still; space goes on, q ends".to_owned(),
            (None, _, false) => "space stops, q ends".to_owned(),
        };
        terminal.draw(|size| picture.lines(size, &foot))?;
        let pause = match waits {
            Some(waits) => ANSWER_POLL_EVERY[usize::from(waits > ANSWER_POLL_EVERY[1])],
            None if stands => Duration::from_secs(3600),
            None => next.saturating_duration_since(Instant::now()),
        };
        match terminal.key(pause)? {
            Some(Key::End) => return Ok(()),
            Some(Key::Stop) => stands = !stands,
            Some(Key::Back | Key::On | Key::Other) | None => {}
        }
    }
}

/// Longest time for which a picture of a recording is shown by itself.
const STEP_MAX: Duration = Duration::from_secs(2);

fn play(file: &Path) -> Result<()> {
    let named = file.display();
    let lines = BufReader::new(File::open(file).with_context(|| format!("{named} cannot be read"))?).lines();
    let moments = lines.enumerate().map(|(number, line)| {
        let line = line.with_context(|| format!("{named} cannot be read"))?;
        serde_json::from_str(&line).with_context(|| {
            format!("{named}:{} is no look of this version's `tasuki top --json`; record it anew", number + 1)
        })
    });
    let moments = moments.collect::<Result<Vec<Moment>>>()?;
    ensure!(!moments.is_empty(), "{named} has no looks; record some with tasuki top --json");
    let mut terminal = Terminal::take()?;
    let (mut at, mut stands) = (0, false);
    let (mut picture, mut taken) = (Picture::default(), 0);
    loop {
        if taken > at + 1 {
            (picture, taken) = (Picture::default(), 0);
        }
        moments[taken..=at].iter().cloned().for_each(|moment| picture.take(moment));
        taken = at + 1;
        let is_last = at + 1 == moments.len();
        let how = if stands || is_last { "stands still" } else { "goes on" };
        let foot = format!("look {} of {}, {how}; space, left and right, q ends", at + 1, moments.len());
        terminal.draw(|size| picture.lines(size, &foot))?;
        let pause = match moments.get(at + 1) {
            Some(next) if !stands => Duration::from_millis(next.ms_since(&moments[at])).min(STEP_MAX),
            _ => Duration::from_secs(3600),
        };
        match terminal.key(pause)? {
            Some(Key::End) => return Ok(()),
            Some(Key::Stop) => stands = !stands,
            Some(Key::Back) => (at, stands) = (at.saturating_sub(1), true),
            Some(Key::On) => (at, stands) = ((at + 1).min(moments.len() - 1), true),
            Some(Key::Other) => {}
            None if stands || is_last => {}
            None => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cni::daemon::tests::answers;

    #[test]
    fn an_event_that_comes_after_the_counts_is_not_asked_for_again() {
        let folder = tempfile::tempdir().unwrap();
        let status = json!({ "version": "", "pid": 1, "up_ms": 0, "adopted": 0, "nodes": [], "nics": [] });
        let snapshot = json!({ "status": status, "workers": [], "vnis": [], "last_event": 5 });
        let event = json!([{ "number": 6, "at_ms": 1, "sentence": "node red was added" }]);
        let asked =
            answers(folder.path(), vec![(200, snapshot.clone()), (200, event), (200, snapshot), (200, json!([]))]);
        let moment = Moment::look(folder.path(), 4).unwrap();
        assert_eq!(moment.last_event(), 6);
        Moment::look(folder.path(), moment.last_event()).unwrap();
        let since = |line: &String| line.split_once("since=").map(|(_, since)| since.to_owned());
        assert_eq!(asked.join().unwrap().iter().filter_map(since).collect::<Vec<_>>(), ["4", "6"]);
    }
}
