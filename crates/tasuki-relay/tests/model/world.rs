//! The world of the model: three workers, an arbiter, the lease word, a card whose ring is handled position by
//! position, and faults.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use stateright::{Model, Property};
use tasuki_relay::arbiter::{self, Arbiter, Ask, Node};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Reason, Report, Standing, Use};
use tasuki_relay::worker::{self, Side, Tables, Worker};
use tasuki_relay::{ARBITER, After, Party, Tenure, giver, taker};

/// The driver, the worker that is to drive, and the warm stand-by.
pub const WORKERS: usize = 3;
pub const GIVER: usize = 0;
pub const TAKER: usize = 1;
pub const SPARE: usize = 2;

/// Returns the order to a worker that is to be ready for the death of another.
fn stand_by() -> Order {
    let (purpose, method) = (Use::Takeover, Method::Keep);
    Order::Prepare { purpose, method, kind: 0, version: 0 }
}

pub fn party(index: usize) -> Party {
    Party(NonZeroU32::new(u32::try_from(index).unwrap() + 1).unwrap())
}

fn index(party: Party) -> usize {
    party.0.get() as usize - 1
}

/// A run to explore: a use of the protocol, its tables, and the number of faults.
#[derive(Debug, Clone)]
pub struct Relay {
    pub workers: Tables,
    pub arbiter: arbiter::Table,
    /// The single request, and whether the taker is of a node that does not trust the giver's; nothing for a
    /// takeover.
    pub ask: Option<(Use, bool)>,
    /// A worker that reports and stores any values, and how often it may do so.
    pub liar: Option<usize>,
    pub lies: u8,
    /// Number of times that a worker that is ordered to leave is given the device anew, as a worker is that drives
    /// another device.
    pub again: u8,
    /// Number of times that a taker of another node that has refused the device is given it anew, and asked for once
    /// more.
    pub anew: u8,
    /// Number of faults that may happen, of any kind, at any time.
    pub faults: u8,
    /// Number of positions of the ring.
    pub positions: u8,
    /// Whether the epoch shows that a driver state is stale. Without it only the positions show why a giver writes
    /// before it passes.
    pub epochs_checked: bool,
}

impl Relay {
    pub fn new(ask: Option<(Use, bool)>, faults: u8) -> Self {
        let (workers, arbiter) = (Tables::default(), arbiter::Table::default());
        Relay {
            workers,
            arbiter,
            ask,
            liar: None,
            lies: 0,
            again: 0,
            anew: 0,
            faults,
            positions: 2,
            epochs_checked: true,
        }
    }

    pub fn with_liar(self, liar: usize, lies: u8) -> Self {
        Relay { liar: Some(liar), lies, ..self }
    }

    pub fn giving_again(self) -> Self {
        Relay { again: 1, ..self }
    }

    pub fn asking_anew(self) -> Self {
        Relay { anew: 1, ..self }
    }

    fn strangers(&self) -> bool {
        self.ask.is_some_and(|(_, strangers)| strangers)
    }

    pub fn node(&self, i: usize) -> Node {
        Node(u32::from(i == TAKER && self.strangers()))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Life {
    Alive,
    /// The process exists and does nothing any more.
    Hung,
    Dead,
}

/// A worker as a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Process {
    pub worker: Worker,
    pub life: Life,
    /// Whether none of its stores reaches the device, the driver state or the lease.
    pub fenced: bool,
    todo: VecDeque<worker::Do>,
    inbox: VecDeque<Order>,
    /// Whether it is given the device anew after the order to leave.
    is_given_anew: bool,
    outbox: VecDeque<Report>,
    /// Next position, in its own memory.
    at: u8,
    gone_told: bool,
    silent_told: bool,
    /// Whether the arbiter has heard that its fence is up.
    fence_told: bool,
}

impl Process {
    /// Returns whether it can do harm: a driver is a worker that believes that it holds the lease, and was not
    /// fenced.
    pub fn drives(&self) -> bool {
        self.life != Life::Dead && !self.fenced && self.worker.believes()
    }

    /// Returns whether it could go on if it were ordered to.
    pub fn candidate(&self) -> bool {
        self.life == Life::Alive && !self.fenced && self.worker.side() == Side::Taker(taker::State::Ready)
    }
}

/// The daemon as a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Daemon {
    pub arbiter: Arbiter,
    todo: VecDeque<arbiter::Do>,
    deadline: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    pub word: Tenure,
    pub processes: Vec<Process>,
    pub daemon: Option<Daemon>,
    /// Workers that were recorded as fenced; the record survives the daemon.
    record: [bool; WORKERS],
    /// Node that owns the page with the lease word, and workers that were given the device, as in the daemon's
    /// registry.
    pub page: Node,
    given: [bool; WORKERS],
    pub lies: u8,
    pub again: u8,
    anew: u8,
    /// Whether the device may be asked for once more.
    asks: bool,
    /// Number of positions that the ring shows as done.
    pub handled: u8,
    /// Position in the driver state, and its epoch.
    driver_state: (u8, u32),
    pub faults: u8,
    /// A violation, if one has happened.
    pub wrong: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    /// The worker does its next action.
    Do(usize),
    /// The worker hears an order.
    Hear(usize),
    /// The worker reads the lease word.
    Look(usize),
    /// The worker handles a position.
    Drive(usize),
    /// The arbiter does its next action.
    Decide,
    /// The arbiter hears a worker.
    Report(usize),
    /// The arbiter learns from a pidfd that a worker is dead.
    Gone(usize),
    /// The arbiter misses a heartbeat.
    Silent(usize),
    /// The arbiter hears that a fence is up.
    FenceUp(usize),
    Ask,
    /// The daemon gives the device anew to a worker that it has ordered to leave.
    Again(usize),
    /// A taker that has refused a device which no worker drives is to leave it, and to be given it anew.
    Dismiss,
    /// That taker is ready, and is to have the device.
    AskAnew,
    Restart,
    /// Faults. The deadline is over, although the worker was only slow.
    Deadline,
    Die(usize),
    Hang(usize),
    /// The heartbeat of a living worker is missed.
    Slow(usize),
    /// The worker's next action fails.
    Fail(usize),
    DaemonDies,
    /// The liar sends this report.
    Lie(Report),
    /// The liar writes this to the lease word.
    Store(Tenure),
}

impl Act {
    fn is_fault(self) -> bool {
        use Act::*;
        matches!(self, Deadline | Die(_) | Hang(_) | Slow(_) | Fail(_) | DaemonDies)
    }
}

impl Relay {
    fn worker_hears(&self, world: &mut World, i: usize, input: worker::Input) -> bool {
        let process = &mut world.processes[i];
        let Ok(doing) = process.worker.hear(&self.workers, input) else { return false };
        for doing in doing {
            match doing {
                // Send the report at once if no action is due before it. A worker that dies or hangs before that
                // loses the reports that were not heard.
                worker::Do::Say(report) if process.todo.is_empty() => {
                    process.outbox.extend(world.daemon.is_some().then_some(report));
                }
                worker::Do::Look | worker::Do::Resume | worker::Do::LookOnce | worker::Do::Yield => {}
                doing => process.todo.push_back(doing),
            }
        }
        true
    }

    fn daemon_hears(&self, world: &mut World, input: arbiter::Input) {
        let Some(daemon) = &mut world.daemon else { return };
        if let Ok(doing) = daemon.arbiter.hear(&self.arbiter, input) {
            Relay::daemon_is_to(world, doing);
        }
    }

    fn daemon_is_to(world: &mut World, doing: Vec<arbiter::Do>) {
        let Some(daemon) = &mut world.daemon else { return };
        for doing in doing {
            match doing {
                arbiter::Do::Tell(to, order) if daemon.todo.is_empty() => {
                    let process = &mut world.processes[index(to)];
                    process.inbox.extend((process.life == Life::Alive).then_some(order));
                }
                arbiter::Do::Watch(number) if daemon.todo.is_empty() => daemon.deadline = Some(number),
                arbiter::Do::Say(_) => {}
                doing => daemon.todo.push_back(doing),
            }
        }
    }

    fn asked(&self) -> arbiter::Input {
        let (purpose, _) = self.ask.expect("only where something is asked for");
        let (to, method) = (party(TAKER), Method::Keep);
        arbiter::Input::Asked(Ask { purpose, to, method, kind: 0, version: 0 })
    }

    fn worker_does(&self, world: &mut World, i: usize, fails: bool) {
        use worker::{Do, Input};
        let process = &mut world.processes[i];
        let Some(doing) = process.todo.pop_front() else { return };
        let (fenced, at) = (process.fenced, process.at);
        let input = match doing {
            Do::Map if fails => Input::Unfit(Reason::CardGone),
            Do::Map => Input::Prepared,
            Do::Stop if fails => Input::Stuck(Reason::CardStuck { limit_ms: 1 }),
            Do::Stop => Input::Stopped,
            Do::WriteDriverState { epoch } => {
                if !fenced {
                    world.driver_state = (at, epoch);
                }
                return;
            }
            Do::Swap { from, to } => {
                // A fenced worker finds the lease withdrawn with the rest. A page of another node does not hold this
                // word.
                let won = world.word == from && !fenced && world.page == self.node(i);
                if won {
                    world.word = to;
                }
                Input::Swapped { won }
            }
            Do::Read { .. } if fails => Input::Broken(Reason::WrongDriverState { value: 0 }),
            Do::Read { after: After::Passed, wrote }
                if wrote != world.driver_state.1 && self.epochs_checked && self.liar.is_none() =>
            {
                world.wrong = Some("the lease was passed, and the driver state that was read is another's");
                Input::Broken(Reason::WrongDriverState { value: 1 })
            }
            Do::Read { after, .. } => {
                process.at = if after == After::Passed { world.driver_state.0 } else { world.handled };
                Input::Sound
            }
            Do::Say(report) => {
                if world.daemon.is_some() {
                    process.outbox.push_back(report);
                }
                return;
            }
            Do::Go if std::mem::take(&mut process.is_given_anew) => {
                process.worker = Worker::new(party(i));
                return;
            }
            Do::Go => {
                process.life = Life::Dead;
                return;
            }
            Do::Look | Do::Resume | Do::LookOnce | Do::Yield => return,
        };
        self.worker_hears(world, i, input);
    }

    fn daemon_does(&self, world: &mut World) {
        use arbiter::{Do, Input};
        let Some(daemon) = &mut world.daemon else { return };
        let Some(doing) = daemon.todo.pop_front() else { return };
        match doing {
            Do::Look => self.daemon_hears(world, Input::Word(world.word)),
            Do::Tell(to, order) => {
                let process = &mut world.processes[index(to)];
                process.inbox.extend((process.life == Life::Alive).then_some(order));
            }
            Do::Watch(number) => daemon.deadline = Some(number),
            Do::Fence(whom) if !world.record[index(whom)] => {
                world.record[index(whom)] = true;
                daemon.todo.push_front(doing);
            }
            Do::Fence(whom) => {
                let process = &mut world.processes[index(whom)];
                (process.fenced, process.fence_told) = (true, false);
            }
            Do::Swap { from, to } => {
                let result = if world.word == from { Ok(()) } else { Err(world.word) };
                if result.is_ok() {
                    world.word = to;
                }
                self.daemon_hears(world, Input::Swapped(result));
            }
            Do::Breach(whom, because) => {
                let i = index(whom);
                // Within its own node a liar can make any worker look like a liar, by the word.
                if self.liar.is_none_or(|liar| self.node(liar) != self.node(i)) {
                    world.wrong = Some(because);
                }
                world.record[i] = true;
                let process = &mut world.processes[i];
                (process.fenced, process.fence_told) = (true, false);
            }
            Do::Renew { node, word } => (world.page, world.word) = (node, word),
            Do::Say(_) => {}
        }
    }

    fn drive(&self, world: &mut World, i: usize) {
        let process = &mut world.processes[i];
        if process.fenced {
            return;
        }
        // Memory that a liar may write is its own node's concern.
        if process.at != world.handled && self.liar.is_none() {
            world.wrong = Some("a position was handled twice, or left out");
        }
        process.at += 1;
        world.handled += 1;
    }

    fn daemon_dies(world: &mut World) {
        world.daemon = None;
        for process in &mut world.processes {
            process.inbox.clear();
            process.outbox.clear();
            (process.gone_told, process.silent_told, process.fence_told) = (false, false, true);
        }
    }

    fn restart(&self, world: &mut World) {
        // Workers of another node than the page's may have been about to get the device. Their relay is over, and
        // they are ended.
        for i in (0..WORKERS).filter(|&i| world.given[i] && self.node(i) != world.page) {
            world.processes[i].life = Life::Dead;
        }
        let fenced: Vec<_> = (0..WORKERS).filter(|&i| world.record[i]).map(party).collect();
        let have =
            (0..WORKERS).filter(|&i| world.given[i] && self.node(i) == world.page).map(|i| (party(i), self.node(i)));
        let (arbiter, doing) = Arbiter::begin(world.page, &[world.page], &have.collect::<Vec<_>>(), &fenced);
        world.daemon = Some(Daemon { arbiter, todo: doing.into(), deadline: None });
    }

    /// Returns the first state: a driver, a stand-by that is ready, a worker that has just started, and an arbiter
    /// that knows them.
    fn beginning(&self) -> World {
        let word = Tenure { holder: Some(party(GIVER)), epoch: 1 };
        let processes = (0..WORKERS).map(|i| Process {
            worker: if i == GIVER { Worker::first(party(i), word) } else { Worker::new(party(i)) },
            life: Life::Alive,
            fenced: false,
            todo: VecDeque::new(),
            inbox: VecDeque::new(),
            is_given_anew: false,
            outbox: VecDeque::new(),
            at: 0,
            gone_told: false,
            silent_told: false,
            fence_told: true,
        });
        let (processes, driver_state) = (processes.collect(), (0, 0));
        let record = [false; WORKERS];
        let (handled, wrong) = (0, None);
        let (page, mut given) = (self.node(GIVER), [true; WORKERS]);
        given[TAKER] = false;
        let mut world = World {
            word,
            processes,
            daemon: None,
            record,
            page,
            given,
            lies: 0,
            again: 0,
            anew: 0,
            asks: false,
            handled,
            driver_state,
            faults: 0,
            wrong,
        };
        let honest = Relay::new(None, 0);
        self.restart(&mut world);
        world.processes[SPARE].inbox.push_back(stand_by());
        loop {
            let mut acts = Vec::new();
            honest.steps(&world, &mut acts);
            acts.retain(|act| !matches!(act, Act::Drive(_)));
            let Some(&act) = acts.first() else { break };
            honest.apply(&mut world, act);
        }
        assert_eq!(world.daemon.as_ref().unwrap().arbiter.driver(), Some(party(GIVER)));
        assert!(world.processes[SPARE].candidate());
        (world.faults, world.lies, world.again) = (self.faults, self.lies, self.again);
        (world.anew, world.asks) = (self.anew, self.anew > 0);
        if self.ask.is_some() {
            self.apply(&mut world, Act::Ask);
        }
        world
    }

    /// Adds the steps that happen without a fault.
    pub fn steps(&self, world: &World, acts: &mut Vec<Act>) {
        for (i, process) in world.processes.iter().enumerate().filter(|(_, process)| process.life == Life::Alive) {
            if !process.todo.is_empty() {
                acts.push(Act::Do(i));
                continue;
            }
            if !process.inbox.is_empty() {
                acts.push(Act::Hear(i));
            }
            let mut worker = process.worker;
            // A node's page that is not in use yet is unwritten.
            let word = if world.page == self.node(i) { world.word } else { Tenure::free(0) };
            let sees = worker.hear(&self.workers, worker::Input::Word(word)).is_ok();
            if sees && worker != process.worker && !process.fenced {
                acts.push(Act::Look(i));
            }
            if process.worker.drives() && !process.fenced && world.handled < self.positions {
                acts.push(Act::Drive(i));
            }
        }
        let Some(daemon) = &world.daemon else {
            acts.push(Act::Restart);
            return;
        };
        if !daemon.todo.is_empty() {
            acts.push(Act::Decide);
            return;
        }
        for (i, process) in world.processes.iter().enumerate() {
            if process.life == Life::Dead && !process.gone_told {
                acts.push(Act::Gone(i));
            }
            if !process.outbox.is_empty() {
                acts.push(Act::Report(i));
            }
            if process.life == Life::Hung && !process.silent_told {
                acts.push(Act::Silent(i));
            }
            if process.fenced && !process.fence_told {
                acts.push(Act::FenceUp(i));
            }
        }
        let left = |i: &usize| {
            let is_left = |member: &arbiter::Member| member.party == party(*i) && member.is == arbiter::Is::Left;
            daemon.arbiter.members().iter().any(is_left)
        };
        let leaves = |i: &usize| world.processes[*i].life == Life::Alive && !world.processes[*i].fenced;
        if world.again > 0 {
            acts.extend((0..WORKERS).filter(left).filter(leaves).map(Act::Again));
        }
        if daemon.arbiter.state() == arbiter::State::Parked && world.processes[TAKER].life == Life::Alive {
            let is =
                daemon.arbiter.members().iter().find(|member| member.party == party(TAKER)).map(|member| member.is);
            match is {
                Some(arbiter::Is::Unfit) if world.anew > 0 => acts.push(Act::Dismiss),
                Some(arbiter::Is::Ready) if world.asks => acts.push(Act::AskAnew),
                _ => {}
            }
        }
        // A liar can have all others wait for something that never comes. Without a liar, a deadline that is over is
        // a fault.
        if self.liar.is_some() && acts.is_empty() && daemon.deadline.is_some() {
            acts.push(Act::Deadline);
        }
    }

    fn faults(world: &World, acts: &mut Vec<Act>) {
        if world.faults == 0 {
            return;
        }
        for (i, process) in world.processes.iter().enumerate().filter(|(_, process)| process.life == Life::Alive) {
            acts.extend([Act::Die(i), Act::Hang(i)]);
            let is_quiet = world.daemon.as_ref().is_some_and(|daemon| daemon.todo.is_empty());
            if is_quiet && world.given[i] && !process.silent_told {
                acts.push(Act::Slow(i));
            }
            if matches!(process.todo.front(), Some(worker::Do::Map | worker::Do::Stop | worker::Do::Read { .. })) {
                acts.push(Act::Fail(i));
            }
        }
        if let Some(daemon) = &world.daemon {
            acts.push(Act::DaemonDies);
            if daemon.deadline.is_some() && daemon.todo.is_empty() {
                acts.push(Act::Deadline);
            }
        }
    }

    pub fn apply(&self, world: &mut World, act: Act) {
        use arbiter::Input;
        if act.is_fault() {
            world.faults = world.faults.saturating_sub(1);
        }
        match act {
            Act::Do(i) => self.worker_does(world, i, false),
            Act::Fail(i) => self.worker_does(world, i, true),
            Act::Hear(i) => {
                if let Some(order) = world.processes[i].inbox.pop_front() {
                    self.worker_hears(world, i, worker::Input::Order(order));
                }
            }
            Act::Look(i) => {
                let word = if world.page == self.node(i) { world.word } else { Tenure::free(0) };
                self.worker_hears(world, i, worker::Input::Word(word));
            }
            Act::Drive(i) => self.drive(world, i),
            Act::Decide => self.daemon_does(world),
            Act::Report(i) => {
                if let Some(report) = world.processes[i].outbox.pop_front() {
                    world.processes[i].silent_told = false;
                    let word = world.word;
                    self.daemon_hears(world, Input::Report(party(i), report, word));
                }
            }
            Act::Gone(i) => {
                world.processes[i].gone_told = true;
                world.processes[i].outbox.clear();
                self.daemon_hears(world, Input::Gone(party(i)));
            }
            Act::Silent(i) | Act::Slow(i) => {
                world.processes[i].silent_told = true;
                self.daemon_hears(world, Input::Silent(party(i)));
                if let Act::Slow(i) = act {
                    let hello = world.processes[i].worker.hello();
                    world.processes[i].outbox.push_back(hello);
                }
            }
            Act::FenceUp(i) => {
                world.processes[i].fence_told = true;
                self.daemon_hears(world, Input::Fenced(party(i)));
            }
            Act::Ask => {
                world.given[TAKER] = true;
                if let Some(daemon) = &mut world.daemon {
                    daemon.arbiter.give(party(TAKER), self.node(TAKER)).expect("there is room");
                }
                self.daemon_hears(world, self.asked());
            }
            Act::Dismiss => {
                (world.anew, world.again) = (world.anew - 1, world.again + 1);
                let daemon = world.daemon.as_mut().expect("only where there is one");
                let doing = daemon.arbiter.dismiss(party(TAKER));
                Relay::daemon_is_to(world, doing);
            }
            Act::AskAnew => {
                world.asks = false;
                self.daemon_hears(world, self.asked());
            }
            Act::Again(i) => {
                world.again -= 1;
                let daemon = world.daemon.as_mut().expect("only where there is one");
                daemon.arbiter.give(party(i), self.node(i)).expect("it has left");
                world.processes[i].is_given_anew = true;
                world.processes[i].inbox.push_back(stand_by());
            }
            Act::Restart => self.restart(world),
            Act::Deadline => {
                let number = world.daemon.as_mut().and_then(|daemon| daemon.deadline.take());
                number.into_iter().for_each(|number| self.daemon_hears(world, Input::Deadline(number)));
            }
            Act::Die(i) => {
                let process = &mut world.processes[i];
                process.life = Life::Dead;
                process.todo.clear();
                process.inbox.clear();
                process.outbox.clear();
            }
            Act::Hang(i) => {
                let process = &mut world.processes[i];
                process.life = Life::Hung;
                process.inbox.clear();
                process.outbox.clear();
            }
            Act::DaemonDies => Relay::daemon_dies(world),
            Act::Lie(report) => {
                world.lies -= 1;
                let liar = self.liar.expect("only where there is one");
                world.processes[liar].outbox.push_back(report);
            }
            Act::Store(word) => {
                world.lies -= 1;
                world.word = word;
            }
        }
    }

    /// Adds the reports and words that the liar can send and store.
    fn lies(&self, world: &World, acts: &mut Vec<Act>) {
        let Some(liar) = self.liar.filter(|_| world.lies > 0) else { return };
        let process = &world.processes[liar];
        if process.life != Life::Alive || process.fenced {
            return;
        }
        let (now, next) = (world.word.epoch, world.word.epoch + 1);
        if world.daemon.is_some() && process.outbox.len() < 2 {
            let reason = Reason::CardGone;
            let standings = [Standing::Idle, Standing::Ready, Standing::Waiting, Standing::Holding, Standing::Unfit];
            acts.extend(standings.map(|standing| Act::Lie(Report::Hello { standing, epoch: now })));
            acts.extend([Act::Lie(Report::Ready), Act::Lie(Report::Unfit(reason))]);
            acts.extend([now, next].map(|epoch| Act::Lie(Report::Released { epoch })));
            acts.extend([now, next].map(|epoch| Act::Lie(Report::Kept { epoch, reason })));
            acts.extend([now, next].map(|epoch| Act::Lie(Report::Taken { epoch })));
            acts.extend([true, false].map(|ready| Act::Lie(Report::Lost { epoch: now, ready })));
            acts.extend([now, next].map(|epoch| Act::Lie(Report::Failed { epoch, reason })));
            acts.push(Act::Lie(Report::Replaced { epoch: now }));
        }
        if world.page == self.node(liar) {
            let parties = (0..WORKERS).map(party).chain([ARBITER]).map(Some).chain([None]);
            let words = parties.flat_map(|holder| [now, next].map(|epoch| Tenure { holder, epoch }));
            acts.extend(words.filter(|word| *word != world.word).map(Act::Store));
        }
    }

    /// Returns whether a worker runs beside a driver of a node that does not trust its node.
    fn is_harmed(&self, world: &World) -> bool {
        let runs = |i: &usize| world.processes[*i].life != Life::Dead && !world.processes[*i].fenced;
        let driver = (0..WORKERS).find(|&i| Some(i) != self.liar && world.processes[i].drives());
        // Until the fence is up the old owner drives, and the other node's worker prepares.
        let taken = driver.filter(|&i| world.page == self.node(i) && self.node(i) != self.node(GIVER));
        taken.is_some_and(|driver| (0..WORKERS).any(|i| self.node(i) != self.node(driver) && runs(&i)))
    }

    /// Returns whether the world is as it should be when nothing happens any more.
    pub fn settled(&self, world: &World) -> bool {
        let Some(daemon) = &world.daemon else { return false };
        // The harm that a liar does to its own node's page concerns that node alone.
        if self.liar.is_some_and(|liar| self.node(liar) == world.page) {
            return matches!(daemon.arbiter.state(), arbiter::State::Steady | arbiter::State::Parked);
        }
        let armed = |process: &Process| {
            let waits = process.worker.side() == Side::Taker(taker::State::Waiting);
            process.life == Life::Alive && !process.fenced && waits
        };
        if world.processes.iter().any(armed) {
            return false;
        }
        match daemon.arbiter.state() {
            arbiter::State::Steady => {
                let Some(holder) = world.word.holder.filter(|holder| *holder != ARBITER) else { return false };
                let process = &world.processes[index(holder)];
                let drives = process.worker.side() == Side::Giver(giver::State::Driving);
                let alive = process.life == Life::Alive && !process.fenced;
                drives && alive && daemon.arbiter.driver() == Some(holder)
            }
            arbiter::State::Parked => {
                // A taker of another node that was not ready in time has no part any more.
                let at_home = |i: &usize| self.node(*i) == daemon.arbiter.home();
                let nobody = !(0..WORKERS).filter(at_home).any(|i| world.processes[i].candidate());
                nobody && world.word.holder == Some(ARBITER) && daemon.arbiter.why().is_some()
            }
            _ => false,
        }
    }
}

impl Model for Relay {
    type State = World;
    type Action = Act;

    fn init_states(&self) -> Vec<World> {
        vec![self.beginning()]
    }

    fn actions(&self, world: &World, acts: &mut Vec<Act>) {
        if world.wrong.is_some() || world.word.epoch >= 20 {
            return;
        }
        self.steps(world, acts);
        Relay::faults(world, acts);
        self.lies(world, acts);
    }

    fn next_state(&self, world: &World, act: Act) -> Option<World> {
        let mut next = world.clone();
        self.apply(&mut next, act);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("never two drivers", |relay: &Relay, world: &World| {
                let honest = (0..WORKERS).filter(|i| relay.liar != Some(*i));
                honest.filter(|i| world.processes[*i].drives()).count() <= 1
                    || relay.liar.is_some_and(|liar| {
                        // A liar can break its own node.
                        relay.node(liar) == world.page
                    })
            }),
            Property::always("nobody runs beside a driver that does not trust it", |relay: &Relay, world: &World| {
                !relay.is_harmed(world)
            }),
            Property::always("each position once, from a true driver state", |_, world: &World| world.wrong.is_none()),
            // Each round that ends where it began takes the lease once more, so a relay that never ends shows here.
            Property::always("nothing goes round and round", |_, world: &World| world.word.epoch < 20),
            Property::always("every relay settles", |relay: &Relay, world: &World| {
                let mut acts = Vec::new();
                relay.steps(world, &mut acts);
                !acts.is_empty() || world.wrong.is_some() || world.word.epoch >= 20 || relay.settled(world)
            }),
        ]
    }
}
