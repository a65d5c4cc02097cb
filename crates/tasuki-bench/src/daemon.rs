//! tasukid itself: how fast it starts and takes over many workers, how much memory it takes, and whether workers notice
//! that it is asked many questions.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hyper::Method as Verb;
use serde_json::json;
use tasuki_control::api::client;
use tasuki_control::api::types::{Status, TalkView, WorkerView};
use tasuki_control::place;

use crate::cpus::{self, Cpus};
use crate::interrupt::Interrupt;
use crate::program::{self, PATIENCE};
use crate::queues;
use crate::relay::system::whole;
use crate::report::{Kind, Row};
use crate::sample::{Sample, median};
use crate::tasukid::Tasukid;
use crate::workplace::Workplace;

/// Time for a daemon or workers that have begun to come to rest: no event says when they have.
const SETTLES: Duration = Duration::from_secs(2);

/// Nodes of `up`, each of which has a worker and its stand-by.
const UP: usize = 32;
/// Nodes of `memory` and `takeover`.
const MANY: usize = 100;

/// Clients of `api`, and the requests a second that all of them send together.
const CLIENTS: u32 = 50;
const REQUESTS: u32 = 1000;
/// Time between two requests of one client.
const EVERY: Duration = Duration::from_millis(1000 * CLIENTS as u64 / REQUESTS as u64);

/// Names of the cases.
const NAMES: [&str; 6] = ["up", "down", "memory", "takeover", "api", "queues"];

/// How often to measure.
struct Effort {
    rounds: usize,
    /// Pairs of times with and without requests, and the length of each time.
    pairs: usize,
    time: Duration,
}

/// A daemon of this bench. Dropping it ends everything.
struct Daemon {
    tasukid: Tasukid,
    nodes: String,
    _place: Workplace,
}

impl Daemon {
    /// Starts a daemon with these nodes. It does not wait.
    fn begin(nodes: &str) -> Result<Self> {
        let place = Workplace::new()?;
        Ok(Daemon { tasukid: Tasukid::begin(place.directory(), nodes)?, nodes: nodes.to_owned(), _place: place })
    }

    fn folder(&self) -> &Path {
        self.tasukid.folder()
    }

    /// Waits until `is_so` holds for the workers.
    fn await_workers(&self, is_so: impl Fn(&[WorkerView]) -> bool) -> Result<Vec<WorkerView>> {
        // It may not serve yet.
        let ask = || Ok(self.tasukid.workers().ok().filter(|workers| is_so(workers)));
        program::found(ask, || format!("not within {PATIENCE:?}: the workers; seen: {:?}", self.tasukid.workers()))
    }

    /// Waits until each of so many nodes has a worker that drives and one that stands by.
    fn await_pairs(&self, nodes: usize) -> Result<Vec<WorkerView>> {
        let count = |workers: &[WorkerView], is: &str| workers.iter().filter(|it| it.is == is).count();
        self.await_workers(|workers| count(workers, "drives") == nodes && count(workers, "stands by") == nodes)
    }

    /// Waits until a process waits for the next worker of each of so many nodes.
    fn await_cells(&self, nodes: usize) -> Result<()> {
        let is_cell = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).nth(1) == Some(b"jail")
        };
        let count = || Ok::<_, anyhow::Error>(self.tasukid.children()?.iter().filter(|pid| is_cell(pid)).count());
        let in_vain =
            || format!("not within {PATIENCE:?}: {nodes} processes for the next workers; seen: {:?}", count());
        program::found(|| Ok((count()? == nodes).then_some(())), in_vain)
    }

    /// Ends everything; returns how long that took.
    fn end(&mut self) -> Result<Duration> {
        let began = Instant::now();
        self.tasukid.stop()?;
        Ok(began.elapsed())
    }

    /// Kills the daemon and starts another; returns how long it took until that answered with all workers.
    fn take_over(&mut self, workers: usize) -> Result<Duration> {
        self.tasukid.kill()?;
        let began = Instant::now();
        self.tasukid.begin_again(&self.nodes)?;
        loop {
            match self.tasukid.get::<Status>("/v1/status") {
                Ok(status) if status.adopted as usize == workers => return Ok(began.elapsed()),
                Ok(status) => bail!("the next tasukid took over {} of {workers} workers", status.adopted),
                Err(_) if began.elapsed() < PATIENCE => std::thread::sleep(Duration::from_micros(500)),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns the configuration of so many native nodes on one VNI.
fn nodes(count: usize) -> String {
    (0..count).map(|number| format!("[[node]]\nname = \"n{number}\"\nwork = \"echo\"\nvni = \"lan\"\n\n")).collect()
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn middle(values: &[f64]) -> Result<f64> {
    median(values).context("nothing was measured")
}

/// Measures the cases whose names begin with one of `only`, or all.
pub fn rows(is_quick: bool, only: &[String], interrupt: &Interrupt) -> Result<Vec<Row>> {
    let is_wanted = |name: &str| only.is_empty() || only.iter().any(|prefix| name.starts_with(prefix.as_str()));
    ensure!(NAMES.into_iter().any(is_wanted), "nothing was measured; the cases are {}", NAMES.join(", "));
    let effort = match is_quick {
        true => Effort { rounds: 1, pairs: 3, time: Duration::from_secs(1) },
        false => Effort { rounds: 10, pairs: 10, time: Duration::from_secs(3) },
    };
    cpus::unpin()?;
    let mut rows = Vec::new();
    if is_wanted("up") || is_wanted("down") {
        rows.extend(up(&effort, interrupt)?);
    }
    if is_wanted("memory") || is_wanted("takeover") {
        rows.extend(many(&effort, interrupt)?);
    }
    if is_wanted("api") {
        rows.extend(api(&effort, interrupt)?);
    }
    if is_wanted("queues") {
        rows.extend(queues::rows(is_quick, interrupt)?);
    }
    Ok(rows)
}

/// Starts and ends a daemon with many nodes, and beside it single workers.
fn up(effort: &Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let (mut ups, mut downs, mut starts, mut left) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for round in 1..=effort.rounds {
        interrupt.check()?;
        let began = Instant::now();
        let mut daemon = Daemon::begin(&nodes(UP))?;
        let workers = daemon.await_pairs(UP)?;
        ups.push(ms(began.elapsed()));
        daemon.await_cells(UP)?;
        for _ in 0..4 {
            // The answer comes when the worker is there, confined, and has begun.
            let began = Instant::now();
            client::ask(daemon.folder(), Verb::POST, "/v1/nodes/n0/stage", Some(&json!({ "with": null })))?;
            starts.push(ms(began.elapsed()));
            client::ask(daemon.folder(), Verb::DELETE, "/v1/nodes/n0/stage", None)?;
        }
        daemon.await_cells(UP)?;
        // Also its keeper, and the processes that wait for the next workers.
        let children = daemon.tasukid.children()?.into_iter();
        let started: BTreeSet<_> = children.chain(workers.iter().map(|it| it.pid)).collect();
        downs.push(ms(daemon.end()?));
        left += started.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).count();
        let sockets = std::fs::read_dir(daemon.folder())?.flatten().filter(|it| {
            let name = it.file_name();
            !name.to_string_lossy().ends_with(".log") && !name.to_string_lossy().ends_with(".toml")
        });
        for entry in sockets.filter(|it| it.file_name() != "tasukid.lock") {
            eprintln!("left: {}", entry.path().display());
            left += 1;
        }
        eprintln!("round {round}/{} · up {:.0} ms, down {:.0} ms", effort.rounds, ups[round - 1], downs[round - 1]);
    }
    let one = middle(&starts)?;
    let row = Row::lower("up", "time", "ms", middle(&ups)?);
    let row = row.against("64-worker-starts", Kind::Floor, 2.0 * UP as f64 * one).bar(1.5, "64-worker-starts")?;
    let note = "32 nodes, each with a worker that drives and one that stands by, from the start of tasukid";
    Ok(vec![
        Row { note: Some(note.to_owned()), ..row },
        Row::lower("up", "worker-start", "ms", one),
        Row::lower("down", "time", "ms", middle(&downs)?),
        Row { note: Some("processes and files".to_owned()), ..Row::lower("down", "left", "", left as f64).bar_at(0.0) },
    ])
}

/// Returns the private memory of a process, in MiB (proc(5), smaps_rollup).
fn private_mib(pid: u32) -> Result<f64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let private =
        rollup.lines().filter(|line| line.starts_with("Private_Clean:") || line.starts_with("Private_Dirty:"));
    let kib = private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u32>().ok());
    Ok(f64::from(kib.sum::<u32>()) / 1024.0)
}

/// Looks at a daemon with many nodes, and at those that take it over.
fn many(effort: &Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mut daemon = Daemon::begin(&nodes(MANY))?;
    let before = daemon.await_pairs(MANY)?;
    // While it starts workers, it has their messages in memory as well.
    std::thread::sleep(SETTLES);
    let memory = private_mib(daemon.tasukid.id())?;
    let (mut times, mut later) = (Vec::new(), Vec::new());
    for round in 1..=effort.rounds {
        interrupt.check()?;
        times.push(ms(daemon.take_over(2 * MANY)?));
        daemon.await_pairs(MANY)?;
        std::thread::sleep(SETTLES);
        later.push(private_mib(daemon.tasukid.id())?);
        eprintln!("round {round}/{} · {} workers taken over in {:.0} ms", effort.rounds, 2 * MANY, times[round - 1]);
    }
    let pids = |workers: &[WorkerView]| workers.iter().map(|it| it.pid).collect::<BTreeSet<_>>();
    let after = daemon.tasukid.workers()?;
    ensure!(pids(&before) == pids(&after), "workers did not live on");
    let note = Some(format!("{MANY} nodes on one VNI, {} workers", 2 * MANY));
    Ok(vec![
        Row { note: note.clone(), ..Row::lower("memory", "private", "MiB", memory).bar_at(30.0) },
        Row { note: note.clone(), ..Row::lower("memory", "private-later", "MiB", middle(&later)?).bar_at(30.0) },
        Row { note, ..Row::lower("takeover", "time", "ms", middle(&times)?).bar_at(300.0) },
    ])
}

/// Asks tasukid many questions beside workers on a CPU of their own.
fn api(effort: &Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let cpu = Cpus::choose()?.client;
    let node = |name: &str, work: &str| {
        format!("[[node]]\nname = \"{name}\"\nwork = {work}\nvni = \"lan\"\ncpu = {cpu}\nstandby = false\n\n")
    };
    let source = "{ source = { rate = 0, size = 60 } }";
    let daemon = Daemon::begin(&[node("sink", "\"sink\""), node("source", source)].concat())?;
    daemon.await_workers(|workers| workers.iter().filter(|it| it.is == "drives").count() == 2)?;
    cpus::keep_off(&[cpu])?;
    let received = || -> Result<u64> {
        let talks: Vec<TalkView> = daemon.tasukid.get("/v1/vnis/lan/stats")?;
        Ok(talks.iter().filter(|it| it.node == "sink").map(|it| it.received).sum())
    };
    let rate = || -> Result<f64> {
        let (began, before) = (Instant::now(), received()?);
        std::thread::sleep(effort.time);
        Ok((received()? - before) as f64 / began.elapsed().as_secs_f64())
    };
    std::thread::sleep(SETTLES);
    let (mut ratios, mut asked, mut answers) = (Vec::new(), Vec::new(), Sample::new());
    for pair in 1..=effort.pairs {
        interrupt.check()?;
        let quiet = rate()?;
        let (busy, took, time) = beside_clients(daemon.folder(), rate)?;
        asked.push(took.len() as f64 / time.as_secs_f64());
        took.into_iter().for_each(|time| answers.record(time));
        ratios.push(busy / quiet);
        eprintln!(
            "pair {pair}/{} · {:.2} Mframe/s quiet, {:.2} beside {:.0} requests/s",
            effort.pairs,
            quiet / 1e6,
            busy / 1e6,
            asked[pair - 1]
        );
    }
    let answers = answers.summary();
    let note = "frames between two workers on one CPU, beside clients and tasukid on others; the middle of pairs";
    Ok(vec![
        Row {
            note: Some(note.to_owned()),
            ..Row::higher("api", "rate-kept", "× quiet", middle(&ratios)?).bar_at(0.95)
        },
        Row::higher("api", "requests", "/s", middle(&asked)?).bar_at(0.95 * f64::from(REQUESTS)),
        Row::lower("api", "answer-p50", "ns", answers.p50 as f64),
        Row::lower("api", "answer-p99", "ns", answers.p99 as f64),
    ])
}

/// Measures while clients ask. Returns the figure, how long each answer took, and for how long they asked.
fn beside_clients<T>(folder: &Path, measure: impl Fn() -> Result<T>) -> Result<(T, Vec<Duration>, Duration)> {
    let over = AtomicBool::new(false);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn({
                    let over = &over;
                    move || ask(folder, began + EVERY * number / CLIENTS, over, std::thread::sleep)
                })
            })
            .collect();
        let measured = measure();
        over.store(true, Relaxed);
        let time = began.elapsed();
        let mut all = Vec::new();
        for client in clients {
            all.append(&mut client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??);
        }
        Ok((measured?, all, time))
    })
}

/// Asks for the status at a client's share of the rate, until it is over. The first request is due at `next`. Returns
/// for each how long after it was due its answer came: a request that an earlier answer held up was late, too.
fn ask(folder: &Path, mut next: Instant, over: &AtomicBool, sleep: impl Fn(Duration)) -> Result<Vec<Duration>> {
    let mut connection = UnixStream::connect(place::api_socket(folder))?;
    let mut took = Vec::new();
    loop {
        // A request that an earlier answer held up counts from when it was due, and no other from when its client should
        // have woken.
        let is_late = Instant::now() >= next;
        sleep(next.saturating_duration_since(Instant::now()));
        let due = if is_late { next } else { Instant::now() };
        if over.load(Relaxed) {
            return Ok(took);
        }
        connection.write_all(b"GET /v1/status HTTP/1.1\r\nhost: tasukid\r\n\r\n")?;
        let (mut answer, mut room) = (Vec::new(), [0; 8192]);
        while whole(&answer)?.is_none() {
            let len = connection.read(&mut room)?;
            ensure!(len > 0, "tasukid hung up");
            answer.extend_from_slice(&room[..len]);
        }
        ensure!(answer.starts_with(b"HTTP/1.1 200"), "tasukid refuses: {}", String::from_utf8_lossy(&answer));
        took.push(due.elapsed());
        // Missed requests are made up for.
        next += EVERY;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Answers all requests of one client with nothing; returns their number.
    fn answer(listener: &UnixListener) -> usize {
        let (mut connection, _) = listener.accept().unwrap();
        let (mut asked, mut room) = (Vec::new(), [0; 1024]);
        loop {
            let len = connection.read(&mut room).unwrap();
            if len == 0 {
                return asked.windows(4).filter(|four| four == b"\r\n\r\n").count();
            }
            asked.extend_from_slice(&room[..len]);
            if asked.ends_with(b"\r\n\r\n") {
                connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
            }
        }
    }

    #[test]
    fn a_client_asks_nothing_once_it_is_over_and_times_requests_from_when_they_are_due() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(place::api_socket(folder.path())).unwrap();
        let late = Duration::from_secs(1);
        let (over, slept) = (AtomicBool::new(false), std::cell::Cell::new(0));
        // It is over while the client waits for its third turn.
        let sleep = |_| {
            slept.set(slept.get() + 1);
            over.store(slept.get() == 3, Relaxed);
        };
        std::thread::scope(|scope| {
            let server = scope.spawn(|| answer(&listener));
            let due = Instant::now().checked_sub(late).unwrap();
            let took = ask(folder.path(), due, &over, sleep).unwrap();
            assert_eq!((took.len(), server.join().unwrap()), (2, 2));
            assert!(took[0] >= late && took[1] >= late - EVERY, "{took:?}");
        });
    }
}
