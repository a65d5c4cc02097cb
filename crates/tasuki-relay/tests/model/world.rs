//! The world of the model: three workers, an arbiter, the lease word, a card whose ring is handled position by position, and faults.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use stateright::{Model, Property};
use tasuki_relay::arbiter::{self, Arbiter, Ask};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Positions, Reason, Report, Use};
use tasuki_relay::worker::{self, Side, Tables, Worker};
use tasuki_relay::{ARBITER, After, Party, Tenure, giver, taker};

/// The worker that drives, the one that is to, and the warm stand-by.
pub const WORKERS: usize = 3;
pub const GIVER: usize = 0;
pub const TAKER: usize = 1;
pub const SPARE: usize = 2;

pub fn party(index: usize) -> Party {
    Party(NonZeroU32::new(u32::try_from(index).unwrap() + 1).unwrap())
}

fn index(party: Party) -> usize {
    party.0.get() as usize - 1
}

/// What is explored: a use of the protocol, its tables, and how much goes wrong.
#[derive(Debug, Clone)]
pub struct Relay {
    pub workers: Tables,
    pub arbiter: arbiter::Table,
    /// What somebody asks for, once; nothing for a takeover.
    pub ask: Option<(Use, bool)>,
    /// How many faults there may be, of any kind, at any time.
    pub faults: u8,
    /// Positions of the ring.
    pub positions: u8,
    /// Whether a sash is found stale by its epoch. Without it only the positions show what the order of write and pass is for.
    pub epochs_checked: bool,
}

impl Relay {
    pub fn new(ask: Option<(Use, bool)>, faults: u8) -> Self {
        let (workers, arbiter) = (Tables::default(), arbiter::TABLE.to_vec());
        Relay { workers, arbiter, ask, faults, positions: 2, epochs_checked: true }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Life {
    Alive,
    /// It does nothing any more, and is there.
    Hung,
    Dead,
}

/// A worker as a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Process {
    pub worker: Worker,
    pub life: Life,
    /// Nothing that it stores reaches the device, the sash or the lease.
    pub fenced: bool,
    todo: VecDeque<worker::Do>,
    inbox: VecDeque<Order>,
    outbox: VecDeque<Report>,
    /// The next position, in its own memory.
    at: u8,
    gone_told: bool,
    silent_told: bool,
    /// The arbiter's fence is up, and it has not heard so.
    fence_told: bool,
}

impl Process {
    /// Whether it can do harm: a driver is whoever believes that it holds the lease, and was not fenced.
    pub fn drives(&self) -> bool {
        self.life != Life::Dead && !self.fenced && self.worker.believes()
    }

    /// Whether it could go on, if somebody told it to.
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
    /// Who was recorded as fenced: it survives the daemon.
    record: [bool; WORKERS],
    /// Positions that the ring says are done.
    pub handled: u8,
    /// What the sash says, and of which epoch it is.
    sash: (u8, u32),
    pub faults: u8,
    /// What should not have happened.
    pub wrong: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    /// The worker does the next thing that it has to do.
    Do(usize),
    /// It hears an order.
    Hear(usize),
    /// It looks at the lease word.
    Look(usize),
    /// It handles a position.
    Drive(usize),
    /// The arbiter does the next thing that it has to do.
    Decide,
    /// It hears a worker.
    Report(usize),
    /// It learns from a pidfd that a worker is dead.
    Gone(usize),
    /// It misses a heartbeat.
    Silent(usize),
    /// It hears that a fence is up.
    FenceUp(usize),
    Ask,
    Restart,
    /// Faults. The time that was set is over, whoever was only slow.
    Deadline,
    Die(usize),
    Hang(usize),
    /// A heartbeat of somebody who lives is missed.
    Slow(usize),
    /// What the worker does next goes wrong.
    Fail(usize),
    DaemonDies,
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
                // Said at once where nothing is to be done before. Who dies or hangs before it can say so loses what was not heard.
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
            Do::WriteSash { epoch } => {
                if !fenced {
                    world.sash = (at, epoch);
                }
                return;
            }
            Do::Swap { from, to } => {
                // Whoever is fenced finds the lease withdrawn with the rest.
                let won = world.word == from && !fenced;
                if won {
                    world.word = to;
                }
                Input::Swapped { won }
            }
            Do::Read { .. } if fails => Input::Broken(Reason::WrongSash { value: 0 }),
            Do::Read { after: After::Passed, wrote } if wrote != world.sash.1 && self.epochs_checked => {
                world.wrong = Some("the lease was passed, and the sash that was read is another's");
                Input::Broken(Reason::WrongSash { value: 1 })
            }
            Do::Read { after, .. } => {
                process.at = if after == After::Passed { world.sash.0 } else { world.handled };
                Input::Sound
            }
            Do::Say(report) => {
                if world.daemon.is_some() {
                    process.outbox.push_back(report);
                }
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
            Do::Say(_) => {}
        }
    }

    fn drive(world: &mut World, i: usize) {
        let process = &mut world.processes[i];
        if process.fenced {
            return;
        }
        if process.at != world.handled {
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

    fn restart(world: &mut World) {
        let fenced: Vec<_> = (0..WORKERS).filter(|&i| world.record[i]).map(party).collect();
        let (arbiter, doing) = Arbiter::begin(&(0..WORKERS).map(party).collect::<Vec<_>>(), &fenced);
        world.daemon = Some(Daemon { arbiter, todo: doing.into(), deadline: None });
    }

    /// A driver, a stand-by that is ready, somebody who has just begun, and an arbiter that knows them.
    fn beginning(&self) -> World {
        let word = Tenure { holder: Some(party(GIVER)), epoch: 1 };
        let processes = (0..WORKERS).map(|i| Process {
            worker: if i == GIVER { Worker::first(party(i), word) } else { Worker::new(party(i)) },
            life: Life::Alive,
            fenced: false,
            todo: VecDeque::new(),
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            at: 0,
            gone_told: false,
            silent_told: false,
            fence_told: true,
        });
        let (processes, sash) = (processes.collect(), (0, 0));
        let record = [false; WORKERS];
        let (handled, wrong) = (0, None);
        let mut world = World { word, processes, daemon: None, record, handled, sash, faults: 0, wrong };
        let honest = Relay::new(None, 0);
        Relay::restart(&mut world);
        let order = Order::Prepare {
            purpose: Use::Takeover,
            method: Method::Keep,
            kind: 0,
            version: 0,
            carries: Positions::default(),
        };
        world.processes[SPARE].inbox.push_back(order);
        loop {
            let mut acts = Vec::new();
            honest.steps(&world, &mut acts);
            acts.retain(|act| !matches!(act, Act::Drive(_)));
            let Some(&act) = acts.first() else { break };
            honest.apply(&mut world, act);
        }
        assert_eq!(world.daemon.as_ref().unwrap().arbiter.driver(), Some(party(GIVER)));
        assert!(world.processes[SPARE].candidate());
        world.faults = self.faults;
        if self.ask.is_some() {
            self.apply(&mut world, Act::Ask);
        }
        world
    }

    /// What happens without a fault.
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
            let sees = worker.hear(&self.workers, worker::Input::Word(world.word)).is_ok();
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
    }

    fn faults(world: &World, acts: &mut Vec<Act>) {
        if world.faults == 0 {
            return;
        }
        for (i, process) in world.processes.iter().enumerate().filter(|(_, process)| process.life == Life::Alive) {
            acts.extend([Act::Die(i), Act::Hang(i)]);
            if world.daemon.as_ref().is_some_and(|daemon| daemon.todo.is_empty()) && !process.silent_told {
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
            world.faults -= 1;
        }
        match act {
            Act::Do(i) => self.worker_does(world, i, false),
            Act::Fail(i) => self.worker_does(world, i, true),
            Act::Hear(i) => {
                if let Some(order) = world.processes[i].inbox.pop_front() {
                    self.worker_hears(world, i, worker::Input::Order(order));
                }
            }
            Act::Look(i) => _ = self.worker_hears(world, i, worker::Input::Word(world.word)),
            Act::Drive(i) => Relay::drive(world, i),
            Act::Decide => self.daemon_does(world),
            Act::Report(i) => {
                if let Some(report) = world.processes[i].outbox.pop_front() {
                    world.processes[i].silent_told = false;
                    self.daemon_hears(world, Input::Report(party(i), report));
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
                    world.processes[i].outbox.push_back(Report::Beat { bursts: 1 });
                }
            }
            Act::FenceUp(i) => {
                world.processes[i].fence_told = true;
                self.daemon_hears(world, Input::Fenced(party(i)));
            }
            Act::Ask => {
                let (purpose, fence_first) = self.ask.expect("only where something is asked for");
                let (to, method, carries) = (party(TAKER), Method::Keep, Positions::default());
                let ask = Ask { purpose, to, method, fence_first, kind: 0, version: 0, carries };
                self.daemon_hears(world, Input::Asked(ask));
            }
            Act::Restart => Relay::restart(world),
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
        }
    }

    /// Whether all is as it should be when nothing happens any more.
    pub fn settled(world: &World) -> bool {
        let Some(daemon) = &world.daemon else { return false };
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
                let nobody = !world.processes.iter().any(Process::candidate);
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
    }

    fn next_state(&self, world: &World, act: Act) -> Option<World> {
        let mut next = world.clone();
        self.apply(&mut next, act);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("never two drivers", |_, world: &World| {
                world.processes.iter().filter(|process| process.drives()).count() <= 1
            }),
            Property::always("each position once, from a true sash", |_, world: &World| world.wrong.is_none()),
            // Each round that ends where it began takes the lease a time more: a relay that never ends shows here.
            Property::always("nothing goes round and round", |_, world: &World| world.word.epoch < 20),
            Property::always("every relay settles", |relay: &Relay, world: &World| {
                let mut acts = Vec::new();
                relay.steps(world, &mut acts);
                !acts.is_empty() || world.wrong.is_some() || world.word.epoch >= 20 || Relay::settled(world)
            }),
        ]
    }
}
