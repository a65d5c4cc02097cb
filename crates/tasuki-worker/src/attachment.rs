//! One NIC of a worker: what the tables of the relay have it do, each thing in a function of its own, and its part of the data path.

mod apart;
pub mod captured;
mod driving;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Resource;
use tasuki_net::capture::Captures;
use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::ledger::Ledger;
use tasuki_net::nic::{DriverState, InPlace, MemoryLayout, NicError, NicMemory, Repoint, Scrub};
use tasuki_net::port::Burst;
use tasuki_relay::message::{self, ToDaemon, heartbeat};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Plan, Reason, Report};
use tasuki_relay::worker::{Do, Input, Side, Tables, Worker};
use tasuki_relay::{After, Party, Tenure, taker};
use tasuki_shm::arena::Arena;

use crate::bundle::{self, Opened, Refused, Text};
use crate::channel::DaemonChannel;
use crate::cpus::Cpus;
use crate::handler::{FrameHandler, HandlerContext};
use crate::lease_page::{Heartbeat, LeasePage, ProgramState};
use crate::memif::Memif;
use crate::tap::Tap;
use crate::vni::Joint;
use crate::{fail, store};

/// A taker that was called stays awake for the order to take so long.
const CALLED: Duration = Duration::from_millis(1);

/// A giver that is to be fenced stays awake for it so long.
const FENCED_WITHIN: Duration = Duration::from_millis(2);

/// How long a giver waits for its card to take the frames that it has in hand: where a successor can have them,
const LAST_BURST: Duration = Duration::from_millis(1);

/// and where it cannot.
const EMPTY_HANDS: Duration = Duration::from_millis(100);

/// What all NICs of a worker share.
#[derive(Debug)]
pub struct Common {
    /// The relay's.
    pub tables: Tables,
    /// To the daemon.
    pub channel: DaemonChannel,
    /// The worker's.
    pub heartbeat: Heartbeat,
    /// The node's.
    pub program_state: ProgramState,
    /// The worker's number.
    pub party: Party,
    /// The node's TAP, if it has one.
    pub tap: Option<&'static Tap>,
    /// Where clients of memif connect, if the node serves it.
    pub memif: Option<Memif>,
    /// Whether the node is an uplink,
    pub joins: bool,
    /// and its end of a VNI, while that is driven here.
    pub joint: Option<Rc<RefCell<Joint>>>,
    /// Where the worker runs.
    pub cpus: Cpus,
    /// Whether one NIC is driven and no more: whoever passes that one has nothing left to do on the node's CPU.
    pub drives_one: bool,
}

impl Common {
    /// To where NICs are driven. They are driven elsewhere rather than not at all.
    pub fn go_home(&mut self) {
        if let Err(error) = self.cpus.go_home() {
            self.channel.tell(None, format!("{error:#}"));
        }
    }

    /// For whoever handles frames of this NIC, which lie there.
    #[inline]
    pub fn context<'a>(&'a self, arena: &'a Arena, nic: u32) -> HandlerContext<'a> {
        HandlerContext {
            arena,
            heartbeat: &self.heartbeat,
            program_state: &self.program_state,
            nic,
            joint: self.joint.as_deref(),
        }
    }
}

/// What is left to do of a card.
enum Card<N: InPlace + Repoint> {
    /// Nothing is known of it.
    Unknown,
    /// Everything but the driver state.
    Ready(N::Prepared),
    /// All that is needed to start it anew: from an owner that is not trusted, in memory of our own.
    Cold(N::Bus, NicMemory),
    /// It is driven, or could be at once.
    Driven(N),
    /// A successor has gone on: not touched any more, and taken apart when there is time.
    Passed(N),
    /// Rings in memory of our own, which the card does not know yet.
    Apart(N::Ready),
}

/// What the daemon gave us of a NIC.
#[derive(Debug)]
pub struct Given {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Where its card may see memory that we make.
    pub iova: u64,
    /// Whoever has it is not trusted, and will be fenced.
    pub fenced: bool,
    /// What it is made of.
    pub bundle: message::DeviceBundle,
    /// The descriptors of it.
    pub fds: Vec<OwnedFd>,
    /// The lease page.
    pub lease_page: LeasePage,
    /// What the device bundle says, if it is one that we understand.
    pub text: Result<Text, Refused>,
}

/// A NIC that this worker drives, or may be told to.
pub struct Attachment<N: InPlace + Repoint, D: FrameHandler> {
    given: Given,
    worker: Worker,
    /// What we hold the lease by, or held last.
    tenure: Tenure,
    card: Card<N>,
    /// What is done with frames.
    handler: D,
    burst: Burst,
    arena: Option<Arena>,
    /// Rung by a giver after it has passed the lease.
    wake: Option<OwnedFd>,
    /// Where its driver stands, whoever that is.
    ledger: Option<Ledger>,
    /// For the store.
    driver_state: Box<N::DriverState>,
    /// How the next order to release is meant, and the driver state that the next order to take is to go by.
    plan: Option<Plan>,
    stored: Option<OwnedFd>,
    /// With the epoch of the order to take that goes by it: before it is there the lease is not taken.
    awaits_driver_state: Option<u32>,
    /// The driver state of which the order to prepare spoke, and the method.
    asked: (u32, u32),
    method: Method,
    waits_since: Option<Instant>,
    link_is_up: bool,
    /// The card is gone, and was said to be.
    gone: bool,
    /// The card is left to a successor with memory of its own.
    halted: bool,
    /// We are fenced once the lease is passed,
    is_last: bool,
    /// which was then.
    passed: Option<Instant>,
    /// The giver is being fenced, after which we are to take.
    called: Option<Instant>,
    /// It is noted when the last burst ended, though the lease is not passed yet.
    stamped: bool,
    /// What it is made of once its rings are in memory that we have made.
    own: Option<apart::Own>,
    /// Memory of a former owner's of which the card has not been told yet that it is over.
    old: Option<MemoryLayout>,
    /// Descriptors of a NIC that is made of others by now.
    spent: Vec<OwnedFd>,
    /// Frames that were dropped by order, and nobody has been told of.
    dropped: u64,
    /// Whoever looks on, while it is not driven.
    captures: Option<Box<Captures>>,
}

/// A rest of no time.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attachment<N, D>
where
    N::Bus: BundleBus,
{
    /// Of a NIC that nothing was asked of yet.
    pub fn new(given: Given, common: &Common, told: &D::Told) -> Self {
        Attachment {
            given,
            worker: Worker::new(common.party),
            tenure: Tenure::free(0),
            card: Card::Unknown,
            // What a predecessor remembered is read when it is over.
            handler: D::new(told),
            burst: Burst::new(),
            arena: None,
            wake: None,
            ledger: None,
            driver_state: N::DriverState::blank(),
            plan: None,
            stored: None,
            awaits_driver_state: None,
            asked: (N::DriverState::KIND, N::DriverState::VERSION),
            method: Method::Keep,
            waits_since: None,
            link_is_up: false,
            gone: false,
            halted: false,
            is_last: false,
            passed: None,
            called: None,
            stamped: false,
            own: None,
            old: None,
            spent: Vec::new(),
            dropped: 0,
            captures: None,
        }
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.given.number
    }

    /// Whether it is driven.
    #[inline]
    pub fn drives(&self) -> bool {
        self.worker.drives()
    }

    /// Whether the worker was told to leave it.
    pub fn is_left(&self) -> bool {
        matches!(self.worker.side(), Side::Taker(taker::State::Left))
    }

    /// Whether it is about to be driven from memory of our own: that the daemon which ordered it knows, and no other.
    pub fn is_apart(&self) -> bool {
        match self.card {
            Card::Apart(_) => true,
            Card::Cold(..) => self.own.is_some(),
            _ => false,
        }
    }

    /// Whether it is driven, or could be at once.
    pub fn is_ready(&self) -> bool {
        !self.is_left() && !matches!(self.card, Card::Unknown | Card::Passed(_))
    }

    /// Since when it waits for the lease, if it does.
    pub fn waits(&self) -> Option<Instant> {
        self.waits_since
    }

    /// Whether a taker may look at the lease word without a rest: whoever drives stays on another CPU than ours.
    pub fn may_spin(&self, cpu: Option<u32>) -> bool {
        matches!((self.given.lease_page.driver_cpu(), cpu), (Some(its), Some(ours)) if its != ours)
    }

    /// Whether it was passed to a node that has us fenced for it: a matter of microseconds.
    pub fn awaits_fence(&self) -> bool {
        self.passed.is_some_and(|since| since.elapsed() < FENCED_WITHIN)
    }

    /// Whether a worker that gets ready for this NIC waits for our CPU.
    pub fn is_awaited(&self) -> bool {
        self.drives() && self.given.lease_page.is_awaited()
    }

    /// How the next order to release is meant.
    pub fn plan(&mut self, plan: Plan) {
        // Heard once more by a taker that is ready, it says that the giver has let go, and is being fenced.
        self.called = (plan.fenced && matches!(self.card, Card::Apart(_))).then(Instant::now);
        self.plan = Some(plan);
    }

    /// Whether an order to take is a matter of microseconds.
    pub fn is_called(&self) -> bool {
        self.called.is_some_and(|since| since.elapsed() < CALLED)
    }

    /// The driver state by which the next order to take is to go.
    pub fn stored(&mut self, memory: Option<OwnedFd>) {
        self.stored = memory;
    }

    /// What it has counted, if it is driven.
    pub fn tell_counts(&mut self, channel: &mut DaemonChannel) {
        let Card::Driven(nic) = &mut self.card else { return };
        let mut counts: Vec<_> = nic.statistics().into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
        // Of the arena: what grows here is lost for good.
        let slots = self.arena.as_ref().map(Arena::census);
        counts.extend(slots.map(|slots| ("slots_with_card".to_owned(), slots.peer.into())));
        counts.extend(self.handler.counts());
        channel.write(&ToDaemon::Counts { nic: self.given.number, counts }, Vec::new());
    }

    /// Hears something, and does what follows from it.
    pub fn hear(&mut self, common: &mut Common, input: Input) {
        if let Input::Order(Order::Prepare { kind, version, method, .. }) = input {
            (self.asked, self.method) = ((kind, version), method);
        }
        if let Input::Order(Order::Take { epoch, after, .. }) = input {
            self.called = None;
            // Once only: where that comes to nothing, the lease is granted anew and the ledger says where to go on.
            let stores = self.plan.as_mut().is_some_and(|plan| std::mem::take(&mut plan.store));
            self.awaits_driver_state = (stores && after == After::Passed).then_some(epoch);
        }
        if matches!(input, Input::Order(Order::StandDown)) {
            // What was stored for a relay that came to nothing is not for the next.
            (self.stored, self.awaits_driver_state) = (None, None);
        }
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            match self.worker.hear(&common.tables, input) {
                Ok(todo) => inputs.extend(todo.into_iter().filter_map(|what| self.act(common, what))),
                Err(refused) => common.channel.tell(Some(self.given.number), format!("{input:?} was {refused}")),
            }
        }
        let waits = matches!(self.worker.side(), Side::Taker(taker::State::Waiting));
        self.waits_since = if waits { self.waits_since.or_else(|| Some(Instant::now())) } else { None };
    }

    fn act(&mut self, common: &mut Common, what: Do) -> Option<Input> {
        match what {
            Do::Map => Some(self.map(common)),
            Do::Stop => Some(self.stop(common)),
            Do::Resume => None,
            Do::WriteDriverState { epoch } => {
                self.write_driver_state(common, epoch);
                None
            }
            Do::Swap { from, to } => Some(self.swap(common, from, to)),
            Do::Look => {
                self.get_ready(common);
                // The word may be the one already.
                let now = self.given.lease_page.tenure();
                (!self.is_early(now)).then_some(Input::Word(now))
            }
            Do::Read { after, wrote } => Some(self.read(common, after, wrote)),
            Do::LookOnce => {
                self.look_once(common);
                None
            }
            Do::Yield => {
                self.keep_captures();
                self.card = Card::Unknown;
                self.burst.clear();
                None
            }
            Do::Go => {
                self.give_up();
                None
            }
            Do::Say(report) => {
                self.say(common, report);
                None
            }
        }
    }

    /// Maps everything, and looks whether the driver state is one that we read.
    fn map(&mut self, common: &mut Common) -> Input {
        fail::point("map.begun");
        let mapped = self.open(common);
        if mapped.is_ok() {
            self.given.lease_page.come(|| common.go_home());
            // What is run there once is the faster when it counts.
            if let Card::Ready(prepared) = &mut self.card {
                N::rehearse(prepared);
            }
        }
        fail::point("map.done");
        match mapped {
            Ok(()) => {
                self.tell_own(&mut common.channel);
                Input::Prepared
            }
            Err(Refused { reason, sentence }) => {
                common.channel.tell(Some(self.given.number), sentence);
                Input::Unfit(reason)
            }
        }
    }

    fn open(&mut self, common: &Common) -> Result<(), Refused> {
        let (kind, version) = self.asked;
        let cold = self.method == Method::Cold;
        if !cold && !store::reads::<N::DriverState>(kind, version) {
            let reason = Reason::OtherDriverState { kind: kind.into(), version: version.into() };
            return Err(Refused { reason, sentence: reason.to_string() });
        }
        let text = match &self.given.text {
            Ok(text) => text,
            Err(Refused { reason, sentence }) => {
                return Err(Refused { reason: *reason, sentence: sentence.clone() });
            }
        };
        if self.is_hung_up() {
            return Err(Refused { reason: Reason::CardGone, sentence: NicError::Gone.to_string() });
        }
        let how = apart::how(self.method);
        let is_apart = how.is_some() || cold && self.given.fenced;
        if is_apart {
            let may = rustix::process::getrlimit(Resource::Memlock).current;
            bundle::may_lock(text.locks(), may).map_err(|reason| Refused { reason, sentence: reason.to_string() })?;
        }
        let copies = self.given.fds.iter().map(OwnedFd::try_clone).collect::<std::io::Result<Vec<_>>>();
        let copies = copies.map_err(|error| Refused {
            reason: Reason::Missing { position: 0 },
            sentence: format!("the NIC's descriptors cannot be copied ({error}); raise RLIMIT_NOFILE"),
        })?;
        if is_apart {
            D::may_go_on(&common.program_state, self.given.number, None, text.ring)?;
            return self.open_apart(common.party, how, copies);
        }
        let Opened { wake, ledger, bus, memory } = bundle::open::<N::Bus>(text, copies)?;
        D::may_go_on(&common.program_state, self.given.number, Some(ledger.turns()), text.ring)?;
        (self.wake, self.ledger, self.arena) = (Some(wake), Some(ledger), Some(memory.arena().clone()));
        self.card = match cold {
            true => Card::Cold(bus, memory),
            false => Card::Ready(N::prepare(bus, memory).map_err(|failed| store::refused(&failed.error))?),
        };
        Ok(())
    }

    /// Whether whoever serves the device has hung up.
    fn is_hung_up(&self) -> bool {
        // The way to the card comes after what is the relay's.
        let Some(device) = self.given.fds.get(bundle::DEVICE) else { return false };
        let mut poll = [PollFd::new(device, PollFlags::empty())];
        rustix::event::poll(&mut poll, Some(&AT_ONCE)) == Ok(1) && poll[0].revents().contains(PollFlags::HUP)
    }

    /// Ends the burst. What the card does not take in time stays in hand, and comes to the successor as it came to us; but a driver state that is
    /// stored speaks of none.
    fn stop(&mut self, common: &Common) -> Input {
        if let Some(plan) = &self.plan {
            match apart::planned(plan) {
                Some(how) => return self.halt(common, how),
                None if plan.handover && !plan.store => return self.stop_clean(common),
                None => {}
            }
        }
        self.stamped = false;
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else {
            return Input::Stuck(Reason::CardGone);
        };
        let context = common.context(arena, self.given.number);
        if self.gone {
            return Input::Stuck(Reason::CardGone);
        }
        let stores = self.plan.as_ref().is_some_and(|plan| plan.store);
        let is_own = self.handler.holds_its_own();
        let patience = if stores || is_own { EMPTY_HANDS } else { LAST_BURST };
        let end = Instant::now() + patience;
        while !self.burst.is_empty() {
            match self.handler.send(nic, &context, &mut self.burst) {
                Err(_) => return Input::Stuck(Reason::CardGone),
                Ok(0) if Instant::now() > end && stores => {
                    let limit_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
                    return Input::Stuck(Reason::CardStuck { limit_ms });
                }
                Ok(0) if Instant::now() > end && is_own => {
                    // The link is down, or the partner pauses for good: no successor finds them.
                    common.heartbeat.add(heartbeat::REFUSED, self.burst.len() as u64);
                    self.burst.clear();
                }
                Ok(0) if Instant::now() > end => break,
                Ok(_) => {}
            }
        }
        fail::point("give.stopped");
        Input::Stopped
    }

    /// Commits what is handled: that is what a successor reads in place. For the store, writes the driver state.
    fn write_driver_state(&mut self, common: &mut Common, epoch: u32) {
        let plan = self.plan.take();
        let stores = plan.as_ref().is_some_and(|plan| plan.store);
        let leaves = plan.is_some_and(|plan| plan.handover);
        self.is_last = plan.is_some_and(|plan| plan.fenced);
        if self.halted {
            // Where it stands was committed before the card was stopped, and nobody else reads it.
            self.close_program_state(&common.program_state);
            fail::point("give.written");
            return;
        }
        self.remember(&common.program_state);
        let Card::Driven(nic) = &mut self.card else { return };
        match stores {
            // For the store nothing is in hand any more.
            true => nic.driver_state(&mut self.driver_state),
            false => self.handler.conclude(nic, &self.burst),
        }
        if leaves {
            self.close_program_state(&common.program_state);
        }
        if stores {
            match store::write(&*self.driver_state, epoch) {
                Ok(memory) => common.channel.write(&ToDaemon::DriverState { nic: self.given.number }, vec![memory]),
                Err(error) => common.channel.tell(Some(self.given.number), error.to_string()),
            }
        }
        fail::point("give.written");
    }

    /// What must be remembered exactly is true with the next commit.
    #[inline]
    fn remember(&mut self, program_state: &ProgramState) {
        if let Card::Driven(nic) = &self.card {
            self.handler.remember(program_state, self.given.number, nic.turns().wrapping_add(1));
        }
    }

    /// Compare-and-swap of the lease.
    fn swap(&mut self, common: &Common, from: Tenure, to: Tenure) -> Input {
        let gives = to.holder.is_none() && matches!(self.card, Card::Driven(_));
        if gives && !std::mem::take(&mut self.stamped) {
            self.given.lease_page.stopped();
        }
        let won = self.given.lease_page.swap(from, to);
        if won && to.holder == Some(common.party) {
            self.tenure = to;
            fail::point("take.won");
        }
        if won && gives {
            self.passed = self.is_last.then(Instant::now);
            // A stranger takes when the daemon says so. We stay on this CPU to be fenced: the daemon, which looks whether we stand still, runs on those aside.
            if !self.is_last {
                if let Some(wake) = &self.wake {
                    // Full it cannot be before it was rung as often as there are numbers.
                    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
                }
                // The taker may wait for this CPU, and what is left to do can wait: it is done aside.
                std::thread::yield_now();
                if common.drives_one {
                    common.cpus.step_aside();
                }
            }
            fail::point("give.passed");
            self.keep_captures();
            self.card = match std::mem::replace(&mut self.card, Card::Unknown) {
                Card::Driven(nic) => Card::Passed(nic),
                other => other,
            };
        }
        Input::Swapped { won }
    }

    /// Takes apart what a successor has gone on with, so that we could go on in our turn.
    fn get_ready(&mut self, common: &mut Common) {
        fail::point("take.waiting");
        self.card = match std::mem::replace(&mut self.card, Card::Unknown) {
            Card::Passed(nic) => {
                self.burst.clear();
                let (bus, memory) = nic.stand_down();
                match N::prepare(bus, memory) {
                    Ok(prepared) => Card::Ready(prepared),
                    Err(failed) => {
                        common.channel.tell(Some(self.given.number), failed.error.to_string());
                        Card::Unknown
                    }
                }
            }
            other => other,
        };
    }

    /// Reads the driver state and goes on.
    fn read(&mut self, common: &mut Common, after: After, wrote: u32) -> Input {
        let outcome = self.go_on(common, after, wrote);
        fail::point("take.read");
        match outcome {
            Ok(()) => Input::Sound,
            Err(Refused { reason, sentence }) => {
                common.channel.tell(Some(self.given.number), sentence);
                Input::Broken(reason)
            }
        }
    }

    fn go_on(&mut self, common: &mut Common, after: After, wrote: u32) -> Result<(), Refused> {
        // Who has passed it, and is to have it back, has stepped aside.
        common.go_home();
        let gone = |sentence| Refused { reason: Reason::CardGone, sentence };
        let prepared = match std::mem::replace(&mut self.card, Card::Unknown) {
            Card::Ready(prepared) => prepared,
            Card::Cold(bus, memory) => return self.start(common, bus, memory),
            Card::Apart(ready) => return self.point(common, ready),
            _ => return Err(gone("the worker has no way to the card any more; start another".to_owned())),
        };
        if after == After::Lost {
            if self.is_hung_up() {
                return Err(gone(NicError::Gone.to_string()));
            }
            N::settle(&prepared).map_err(|error| store::refused(&error))?;
        }
        // To go on is a turn: what a predecessor remembered is true before and after.
        let turns = self.ledger.as_ref().map_or(0, Ledger::turns);
        self.handler.go_on(&common.program_state, self.given.number, Some(turns))?;
        self.handler.remember(&common.program_state, self.given.number, turns.wrapping_add(1));
        fail::point("take.booked");
        let nic = match self.stored.take().filter(|_| after == After::Passed) {
            Some(stored) => {
                self.driver_state = store::read(stored, wrote)?;
                N::go_on(prepared, &self.driver_state)
            }
            // Whether its last driver passed it or died, what it left says the same in both cases.
            None => N::pick_up(prepared),
        };
        let mut nic = nic.map_err(|failed| store::refused(&failed.error))?;
        if self.scrubs() {
            nic.keep_clean();
        }
        self.drive(nic);
        (self.gone, self.link_is_up, self.halted) = (false, self.given.lease_page.link_was_up(), false);
        Ok(())
    }

    /// Looks at the rings, whatever has rung, and says that it drives.
    fn look_once(&mut self, common: &mut Common) {
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else { return };
        let looked = self.handler.look(nic, &common.context(arena, self.given.number), &mut self.burst);
        self.given.lease_page.driving(common.cpus.cpu());
        fail::point("take.looked");
        // Answers to what has waited do not wait for what is left to do.
        let looked = looked.and_then(|()| self.send(common));
        if looked.is_ok() {
            self.await_partner(common);
        }
        // Before anybody hears that we drive: addresses are used again, and what a later taker has mapped there must not be taken for the old.
        self.forget_old(common);
        if let Err(error) = looked {
            self.lose(common, &error);
        }
    }

    /// Sends what is in hand; says how many frames went.
    fn send(&mut self, common: &Common) -> Result<usize, NicError> {
        if self.burst.is_empty() {
            return Ok(0);
        }
        self.remember(&common.program_state);
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else { return Ok(0) };
        self.handler.send(nic, &common.context(arena, self.given.number), &mut self.burst)
    }

    fn say(&mut self, common: &mut Common, report: Report) {
        common.channel.report(self.given.number, report);
        if matches!(report, Report::Released { .. }) {
            fail::point("give.said");
            self.tell_dropped(&mut common.channel);
            #[cfg(feature = "crash-points")]
            if fail::goes_on() {
                self.drive_for_ever(common);
            }
        }
    }

    /// Passed the lease, and receives, sends and rings as before: what only a fence ends.
    #[cfg(feature = "crash-points")]
    fn drive_for_ever(&mut self, common: &mut Common) {
        if let Card::Passed(nic) = std::mem::replace(&mut self.card, Card::Unknown) {
            self.card = Card::Driven(nic);
            while !self.gone {
                self.turn(common);
            }
        }
    }

    /// Whether this is the word that is waited for, and the driver state has not come by which it is gone on.
    fn is_early(&self, now: Tenure) -> bool {
        self.stored.is_none() && now.holder.is_none() && self.awaits_driver_state == Some(now.epoch)
    }

    /// What the lease word says, if that is not what we believe.
    #[inline]
    pub fn word(&self) -> Option<Input> {
        let now = self.given.lease_page.tenure();
        let is_news = if self.waits_since.is_some() { !self.is_early(now) } else { now != self.tenure };
        is_news.then_some(Input::Word(now))
    }

    /// Parks the card, if it is driven.
    pub fn park(&mut self, common: &mut Common) {
        self.burst.clear();
        self.give_up();
        if let Card::Driven(nic) = std::mem::replace(&mut self.card, Card::Unknown)
            && let Err(failed) = nic.park()
        {
            common.channel.tell(Some(self.given.number), failed.error.to_string());
        }
    }
}
