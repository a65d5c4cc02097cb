//! Processes killed at every step of a call and of a replacement, more than a thousand of them. After each death no
//! slot is lost, none has two owners, every surviving client gets an answer, and no call has run twice unless it
//! may.
//!
//! The test prints its seed; `TASUKI_SEED` replays it, as far as the kernel's scheduler lets it.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tasuki_call::{Ask, CRASH_POINTS, CallError, Client, ClientOptions, Deadline, Failure, Reply, Ticket};
use tasuki_shm::arena::{Detach, Slot};
use tasuki_testing::alone;

use crate::common::*;
use crate::watched;

/// Servers killed, and clients killed: more than a thousand together.
const SERVER_KILLS: u32 = 650;
const CLIENT_KILLS: u32 = 450;

/// Kills by the assassin thread, at any moment.
const OUTSIDE: &str = "from outside";

const WORDS: usize = 1 << 21;

/// Number of deaths at each place.
#[derive(Debug, Default)]
struct Tally(BTreeMap<&'static str, u32>);

impl Tally {
    fn add(&mut self, place: &'static str) {
        *self.0.entry(place).or_default() += 1;
    }

    fn total(&self) -> u32 {
        self.0.values().sum()
    }

    fn covers(&self, points: &[&'static str]) -> bool {
        assert!(self.total() < 5000, "points at which nobody ever dies: {:?}", self.missing(points));
        self.missing(points).is_empty()
    }

    fn missing(&self, points: &[&'static str]) -> Vec<&'static str> {
        points.iter().copied().filter(|point| !self.0.contains_key(point)).collect()
    }

    fn report(&self) {
        for (place, kills) in &self.0 {
            println!("{kills:5} killed at {place}");
        }
        println!("{:5} in all", self.total());
    }
}

/// Kills a process at a random moment.
fn assassin(dice: &mut Dice, victim: &Child, within_us: usize) -> JoinHandle<()> {
    let (pid, delay) = (victim.pid(), Duration::from_micros(dice.below(within_us) as u64));
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    })
}

// ---- servers die -------------------------------------------------------------------------------------------------------

/// A server, or a future server.
struct Victim {
    child: Child,
    mark: usize,
    point: Option<&'static str>,
    assassin: Option<JoinHandle<()>>,
}

impl Victim {
    /// Returns the end of the process, if it has ended: the place where it was killed, or `None` if it was not
    /// killed.
    fn ended(&mut self) -> Option<Option<&'static str>> {
        if self.assassin.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return None; // it is not to be reaped before its killer knows
        }
        let sent = self.assassin.is_some();
        let status = self.child.ended()?;
        match (status.signal(), status.code()) {
            (Some(signal), _) if signal == Signal::KILL.as_raw() => {
                Some(Some(if sent { OUTSIDE } else { self.point.expect("nobody else kills") }))
            }
            // A successor took over from it, or it found no server to succeed.
            (_, Some(0 | 3)) => Some(None),
            _ => panic!("a server ended with {status}"),
        }
    }
}

/// One client of the servers that die, and its detach level.
struct Survivor {
    client: Client,
    detach: Detach,
}

/// A call in flight.
struct Call {
    number: u64,
    len: usize,
    again: bool,
    deferred: bool,
    ticket: Ticket,
}

struct Matrix {
    stage: Stage,
    dice: Dice,
    tally: Tally,
    serving: Option<Victim>,
    next: Option<Victim>,
    survivors: Vec<Survivor>,
    number: u64,
    /// By call number: whether the call may run more than once.
    again: Vec<bool>,
    heard: BTreeMap<&'static str, u64>,
    points: Vec<&'static str>,
}

impl Matrix {
    fn new(dice: Dice) -> Self {
        let points = CRASH_POINTS.iter().copied().filter(|point| !point.starts_with("client")).collect();
        let (stage, tally) = (Stage::new(WORDS), Tally::default());
        let survivors = Vec::new();
        let (serving, next, heard) = (None, None, BTreeMap::new());
        Matrix { stage, dice, tally, serving, next, survivors, number: 0, again: vec![false], heard, points }
    }

    /// Picks no crash point once in four times, otherwise the rarer of two random ones that fit.
    fn point(&mut self, of: impl Fn(&str) -> bool) -> Option<&'static str> {
        if self.dice.once_in(4) {
            return None;
        }
        let fitting: Vec<_> = self.points.iter().copied().filter(|point| of(point)).collect();
        let two = [*self.dice.pick(&fitting), *self.dice.pick(&fitting)];
        two.into_iter().min_by_key(|point| self.tally.0.get(point).copied().unwrap_or(0))
    }

    fn spawn(&mut self, role: &str, point: Option<&'static str>) -> Victim {
        let passes = match point {
            Some(point) if point.starts_with("server.accept") => 1 + self.dice.below(self.survivors.len().max(1)),
            Some(point) if point.starts_with("server.serve") || point.starts_with("server.return.pushed") => {
                1 + self.dice.below(60)
            }
            Some(point) if point.starts_with("server") => 1 + self.dice.below(12),
            _ => 1,
        };
        let mut vars = vec![var("TASUKI_QUIET", 1), var("TASUKI_SPIN_US", [0, 20, 200][self.dice.below(3)])];
        vars.extend(point.map(|point| crash_at(point, passes as u64)));
        let (child, mark) = self.stage.spawn(role, &vars);
        Victim { child, mark, point, assassin: None }
    }

    /// Makes sure that a server serves, unless it dies before that.
    fn somebody_serves(&mut self) {
        if self.serving.is_none() {
            let point = self.point(|point| !point.starts_with("taker"));
            self.serving = Some(self.spawn("server", point));
        }
        if let Some(serving) = &mut self.serving {
            let (board, mark) = (&self.stage.board, serving.mark);
            until("a server serves", || board.get(mark) == SERVING || serving.ended().is_some());
        }
    }

    /// Starts a future server in some rounds.
    fn somebody_may_be_next(&mut self) {
        if self.next.is_some() || self.serving.is_none() {
            return;
        }
        let giver_dies =
            self.serving.as_ref().is_some_and(|serving| serving.point.is_some_and(|point| point.starts_with("giver")));
        if giver_dies || self.dice.once_in(4) {
            let point = if giver_dies { None } else { self.point(|point| !point.starts_with("giver")) };
            self.next = Some(self.spawn("taker", point));
        } else if !self.dice.once_in(4) {
            let point = self.point(|_| true);
            let next = self.spawn("standby", point);
            self.next = Some(next);
            let (Some(next), Some(serving)) = (&mut self.next, &mut self.serving) else { unreachable!("just set") };
            let (board, mark) = (&self.stage.board, next.mark);
            until("it stands by", || board.get(mark) != 0 || next.ended().is_some() || serving.ended().is_some());
        }
    }

    /// Counts the dead, and makes the next server the serving one. Returns whether a process was killed.
    fn bury(&mut self) -> bool {
        let mut killed = false;
        for victim in [&mut self.serving, &mut self.next] {
            if let Some(end) = victim.as_mut().and_then(Victim::ended) {
                killed |= end.is_some();
                end.into_iter().for_each(|place| self.tally.add(place));
                *victim = None;
            }
        }
        if self.serving.is_none() {
            self.serving = self.next.take();
        }
        killed
    }

    fn connect(&mut self, enforced: bool) {
        let levels = [Detach::Move, Detach::Guard, Detach::Enforced];
        for detach in &levels[..if enforced { 3 } else { 2 }] {
            for spin in [Duration::ZERO, Duration::from_micros(200)] {
                let options = ClientOptions { spin: Some(spin), ..detached(*detach) };
                let client = Client::connect(self.stage.socket(), &options).unwrap();
                self.survivors.push(Survivor { client, detach: *detach });
            }
        }
    }

    fn ask(&mut self, which: usize) -> Option<Call> {
        let len = *self.dice.pick(&[8, 30, 48, 49, 600, 4096]);
        let (again, deferred) = (self.dice.once_in(3), self.dice.once_in(12));
        let client = &mut self.survivors[which].client;
        let number = self.number + 1;
        let bytes = pattern(number, len);
        let method = match deferred {
            true => DEFER,
            false if self.dice.once_in(20) => SLOW,
            false => COUNT,
        };
        let slot: Option<Slot> = if len > 48 && self.dice.once_in(2) { client.take_slot().ok() } else { None };
        let ask = match slot {
            Some(mut slot) => {
                slot.bytes_mut()[..len].copy_from_slice(&bytes);
                Ask::with_slot(method, slot, len)
            }
            None => Ask::new(method, &bytes),
        };
        let ask = if again { ask.idempotent() } else { ask };
        let staged = if self.dice.once_in(3) { client.stage(ask) } else { client.submit(ask) };
        match staged {
            Ok(ticket) => {
                self.number = number;
                self.again.push(again);
                Some(Call { number, len, again, deferred, ticket })
            }
            Err(Failure { why: CallError::Full { .. } | CallError::NoSlot { .. }, .. }) => {
                client.flush();
                None
            }
            Err(Failure { why: CallError::ServerGone { .. }, .. }) => None,
            Err(failure) => panic!("{failure}"),
        }
    }

    /// Makes some calls of one client, and takes the answers in any order and in any way.
    fn batch(&mut self, which: usize) {
        let count = 1 + self.dice.below(16);
        let mut calls: Vec<Call> = (0..count).filter_map(|_| self.ask(which)).collect();
        self.survivors[which].client.flush();
        while !calls.is_empty() {
            let call = calls.swap_remove(self.dice.below(calls.len()));
            self.answer(which, call);
        }
    }

    fn answer(&mut self, which: usize, call: Call) {
        let client = &mut self.survivors[which].client;
        let Call { number, len, again, deferred, ticket } = call;
        let outcome = match self.dice.below(12) {
            0 => return client.abandon(ticket),
            1 => client.wait(ticket, Deadline::within(Duration::from_micros(self.dice.below(500) as u64))),
            2..=5 => poll(client, &self.stage.board, &ticket),
            _ if deferred => poll(client, &self.stage.board, &ticket),
            _ => client.wait(ticket, ample()),
        };
        let runs = self.stage.runs(number);
        let heard = match outcome {
            Ok(reply) => {
                assert!(runs == 1 || (again && runs > 1), "call {number} was answered, having run {runs} times");
                check(&reply, number, len);
                "replies"
            }
            Err(failure) => {
                assert!(runs <= 1 || again, "call {number} ran {runs} times: {failure}");
                match failure.why {
                    CallError::Retry { .. } => {
                        assert!(!again && runs <= 1, "call {number} ran {runs} times");
                        assert_eq!(failure.slot.is_some(), len > 48, "its slot came back");
                        "retries"
                    }
                    CallError::ServerGone { .. } => {
                        assert_eq!(failure.slot.is_some(), len > 48, "its slot came back");
                        "gone"
                    }
                    CallError::DeadlinePassed => "late",
                    _ => panic!("call {number}: {failure}"),
                }
            }
        };
        *self.heard.entry(heard).or_default() += 1;
    }

    /// Checks that every client either is cut off and holds all its slots, or makes calls as if nothing had
    /// happened.
    fn settle(&mut self) {
        for which in 0..self.survivors.len() {
            let Survivor { client, detach } = &mut self.survivors[which];
            let start = Instant::now();
            loop {
                assert!(
                    start.elapsed() < PATIENCE,
                    "the calls of a {detach:?} client never end: {:?}",
                    client.census()
                );
                self.stage.board.add(RELEASE, 1);
                let free = client.call(Ask::new(AUDIT, b"").idempotent(), ample());
                match free.map_err(|failure| failure.why) {
                    // All its calls are answered, and the server has all its reply slots.
                    Ok(free) if client.in_flight() == 0 && free.to_vec() == 16_u64.to_le_bytes() => break,
                    Ok(_) | Err(CallError::Full { .. }) => {}
                    Err(CallError::ServerGone { .. }) => break,
                    Err(why) => panic!("{why}"),
                }
            }
            assert_eq!(client.in_flight(), 0);
            assert_whole(client);
        }
    }

    fn reconnect(&mut self) {
        for Survivor { client, .. } in &mut self.survivors {
            // If the server dies meanwhile, the next `bury` finds it.
            let _ = client.reconnect();
        }
    }

    /// Runs one life of a server, or more.
    fn round(&mut self) {
        self.somebody_serves();
        self.reconnect();
        self.somebody_may_be_next();
        let batches = 1 + self.dice.below(12);
        for _ in 0..batches {
            let which = self.dice.below(self.survivors.len());
            self.batch(which);
            if self.bury() {
                return self.settle();
            }
        }
        let Some(serving) = &mut self.serving else { return };
        if serving.assassin.is_none() && serving.point.is_none() || self.dice.once_in(6) {
            serving.assassin.get_or_insert_with(|| assassin(&mut self.dice, &serving.child, 1500));
        }
    }
}

fn poll(client: &mut Client, board: &Board, ticket: &Ticket) -> Result<Reply, Failure> {
    let start = Instant::now();
    loop {
        board.add(RELEASE, 1);
        if let Some(outcome) = client.poll(ticket).transpose() {
            return outcome;
        }
        assert!(start.elapsed() < PATIENCE, "polled in vain");
        std::thread::yield_now();
    }
}

fn check(reply: &Reply, number: u64, len: usize) {
    assert!(reply.to_vec() == pattern(number, len), "call {number} got its own bytes back");
    assert_eq!(reply.slot().is_some(), len > 48);
}

#[test]
fn servers_killed_anywhere_leave_every_client_whole_and_answered() {
    // See death::enforced_slots_come_back_from_a_dead_server.
    if !alone(servers_killed_anywhere_leave_every_client_whole_and_answered) {
        return;
    }
    watched!(280);
    if !cfg!(feature = "crash-points") {
        println!("skipped: needs the feature crash-points");
        return;
    }
    let mut matrix = Matrix::new(Dice::new("servers_killed_anywhere"));
    matrix.serving = Some(matrix.spawn("server", None));
    matrix.somebody_serves();
    let enforced = Client::connect(matrix.stage.socket(), &detached(Detach::Enforced));
    if let Err(error) = &enforced {
        println!("skipped: server.serve.protected: {error}");
        matrix.points.retain(|point| *point != "server.serve.protected");
    }
    matrix.connect(enforced.is_ok());
    drop(enforced);
    while matrix.tally.total() < SERVER_KILLS || !matrix.tally.covers(&matrix.points) {
        matrix.round();
    }
    // From here on no process is killed.
    for mut victim in [matrix.next.take(), matrix.serving.take()].into_iter().flatten() {
        victim.child.kill();
        victim.assassin.into_iter().for_each(|thread| thread.join().unwrap());
    }
    matrix.settle();
    matrix.serving = Some(matrix.spawn("server", None));
    matrix.somebody_serves();
    for Survivor { client, .. } in &mut matrix.survivors {
        client.reconnect().unwrap();
    }
    matrix.settle();
    for number in 1..=matrix.number {
        let (runs, again) = (matrix.stage.runs(number), matrix.again[usize::try_from(number).unwrap()]);
        assert!(runs <= 1 || again, "call {number} ran {runs} times in all");
    }
    println!("{} calls: {:?}", matrix.number, matrix.heard);
    println!("the last server is of generation {}", matrix.stage.state.as_ref().unwrap().tenure().epoch);
    matrix.tally.report();
}

// ---- clients die -------------------------------------------------------------------------------------------------------

/// Points that a client passes if the server sleeps, or does not answer at once. With one CPU for all, neither is so while
/// another client calls all the time.
const PARKING: [&str; 2] = ["client.send.rung", "client.wait.parked"];

/// Rest of those that are to leave the server time to sleep.
const REST: Duration = Duration::from_millis(1);

/// A client that does all that a client can do, until it is killed.
pub fn victim(told: &Told) {
    let mut dice = Dice::of(told.var("TASUKI_DICE").unwrap().parse().unwrap());
    let detach = match told.var("TASUKI_DETACH").unwrap().as_str() {
        "Enforced" => Detach::Enforced,
        "Guard" => Detach::Guard,
        _ => Detach::Move,
    };
    let spin = Some(Duration::from_micros([0, 300][dice.below(2)]));
    let mut client = Client::connect(&told.socket, &ClientOptions { spin, ..detached(detach) }).unwrap();
    told.mark(SERVING);
    let plan = told.var("TASUKI_CRASH").unwrap_or_default();
    let rests = PARKING.iter().any(|point| plan.starts_with(point));
    let mut kept = Vec::new();
    loop {
        if rests {
            std::thread::sleep(REST);
        }
        let mut tickets = Vec::new();
        for _ in 0..=dice.below(16) {
            let bytes = pattern(dice.next() & 0xff, *dice.pick(&[8, 48, 49, 4096]));
            let bytes = [&1_u64.to_le_bytes(), &bytes[8..]].concat();
            let method = *dice.pick(&[ECHO, ECHO, FILL, DEFER, DROP]);
            tickets.extend(client.submit(Ask::new(method, &bytes)));
        }
        for ticket in tickets {
            match client.wait(ticket, Deadline::within(Duration::from_micros(200))) {
                Ok(reply) if dice.once_in(8) => kept.push(reply),
                _ => {}
            }
        }
        if kept.len() > 8 {
            kept.clear();
        }
    }
}

fn spawn_victim(
    host: &Host,
    dice: &mut Dice,
    tally: &Tally,
    points: &[&'static str],
    enforced: bool,
    mark: usize,
) -> Victim {
    let two = [*dice.pick(points), *dice.pick(points)];
    let rarest = two.into_iter().min_by_key(|point| tally.0.get(point).copied().unwrap_or(0)).unwrap();
    let point = (!dice.once_in(3)).then_some(rarest);
    let levels = [Detach::Move, Detach::Guard, Detach::Enforced];
    let detach = *dice.pick(&levels[..if enforced { 3 } else { 2 }]);
    let passes = match point {
        Some("client.connected") => 1,
        Some(point) if PARKING.contains(&point) => 1 + dice.below(5),
        _ => 1 + dice.below(60),
    };
    let mut vars = vec![var("TASUKI_DICE", dice.next()), var("TASUKI_DETACH", format!("{detach:?}"))];
    vars.extend(point.map(|point| crash_at(point, passes as u64)));
    let role = Role { name: "victim", socket: &host.path, board: &host.board, mark, state: None, vars: &vars };
    let child = role.spawn();
    let assassin = point.is_none().then(|| assassin(dice, &child, 12_000));
    Victim { child, mark, point, assassin }
}

#[test]
fn clients_killed_anywhere_leave_the_server_whole_and_serving() {
    watched!(280);
    if !cfg!(feature = "crash-points") {
        println!("skipped: needs the feature crash-points");
        return;
    }
    let mut dice = Dice::new("clients_killed_anywhere");
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let mut witness = Client::connect(&host.path, &small()).unwrap();
    let kept = witness.call(Ask::new(FILL, b"w"), ample()).unwrap();
    let enforced = Client::connect(&host.path, &detached(Detach::Enforced)).is_ok();
    let points: Vec<_> = CRASH_POINTS.iter().copied().filter(|point| point.starts_with("client")).collect();
    let mut tally = Tally::default();
    let mut answered = 0_u64;
    while tally.total() < CLIENT_KILLS || !tally.covers(&points) {
        let mut victims: Vec<_> =
            (0..4).map(|mark| spawn_victim(&host, &mut dice, &tally, &points, enforced, mark)).collect();
        let start = Instant::now();
        while !victims.is_empty() {
            assert!(
                start.elapsed() < PATIENCE,
                "a victim never came to the place where it was to die: {:?}",
                victims[0].point
            );
            let bytes = pattern(dice.next(), *dice.pick(&[10, 100, 4096]));
            assert!(witness.call(Ask::new(ECHO, &bytes), ample()).unwrap().to_vec() == bytes);
            answered += 1;
            if victims.iter().all(|victim| victim.point.is_some_and(|point| PARKING.contains(&point))) {
                std::thread::sleep(REST);
            }
            host.board.add(RELEASE, 1);
            victims.retain_mut(|victim| match victim.ended() {
                Some(end) => {
                    tally.add(end.expect("a victim ends by being killed"));
                    false
                }
                None => true,
            });
        }
        until("all are forgotten, and what they held is back", || {
            host.board.add(RELEASE, 1);
            let _ = witness.call(Ask::new(ECHO, b"x"), ample()).unwrap();
            let (clients, replies) = host.with(|server| (server.clients(), server.reply_census()));
            clients == 1 && (replies.free, replies.owner, replies.peer) == (15, 0, 1)
        });
        assert_whole(&witness);
    }
    assert_eq!(kept.to_vec(), [b'w'; 4096], "nobody else got the slot that the witness keeps");
    // The server cannot write-protect a slot of a dead client. This looks like a breach.
    let expelled = host.with(|server| server.tally().expelled);
    assert!(expelled == 0 || enforced, "{expelled} clients expelled");
    println!("{expelled} clients were dead before their slots could be write-protected");
    println!("{answered} calls of the witness were answered");
    tally.report();
}
