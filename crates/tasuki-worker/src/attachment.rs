//! One NIC of a worker: a function for each action of the relay's tables, and the NIC's part of the data path.

mod apart;
pub mod captured;
mod driving;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Resource;
use tasuki_net::capture::Captures;
use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::ledger::Ledger;
use tasuki_net::nic::{DriverState, InPlace, Link, MemoryLayout, NicError, NicMemory, Repoint, Scrub};
use tasuki_net::port::Burst;
use tasuki_relay::message::{self, ToDaemon, heartbeat};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Plan, Reason, Report};
use tasuki_relay::worker::{Do, Input, Tables, Worker};
use tasuki_relay::{After, Party, Tenure};
use tasuki_shm::arena::Arena;

use crate::bundle::{self, Opened, Refused, Text};
use crate::channel::DaemonChannel;
use crate::cpus::Cpus;
use crate::endpoint::Endpoint;
use crate::handler::{FrameHandler, HandlerContext};
use crate::lease_page::{Heartbeat, LeasePage, ProgramState};
use crate::spin::Spin;
use crate::tap::Tap;
use crate::uplink::Uplink;
use crate::{fail, store};

/// Time for which a called taker stays awake for the order to take.
const CALLED: Duration = Duration::from_millis(1);

/// Time for which a giver that is about to be fenced stays awake for the fence.
const FENCED_WITHIN: Duration = Duration::from_millis(2);

/// Time for which a giver waits for its card to take its pending frames, if a successor can have the rest.
const LAST_BURST: Duration = Duration::from_millis(1);

/// The same time, if no successor can have the rest.
const EMPTY_HANDS: Duration = Duration::from_millis(100);

/// State that all NICs of a worker share.
#[derive(Debug)]
pub struct Common {
    /// The relay's tables.
    pub tables: Tables,
    /// Channel to the daemon.
    pub channel: DaemonChannel,
    /// Heartbeat page of this worker.
    pub heartbeat: Heartbeat,
    /// Program state of the node.
    pub program_state: ProgramState,
    /// Number of this worker as a party to leases.
    pub party: Party,
    /// TAP that stands for the node's NIC, if it has one.
    pub tap: Option<&'static Tap>,
    /// Endpoint of a node on a VNI, if it has one.
    pub endpoint: Option<Endpoint>,
    /// Whether the node is an uplink.
    pub joins: bool,
    /// The uplink's end of a VNI, while this worker drives that end.
    pub uplink: Option<Box<Uplink>>,
    /// CPUs on which the worker runs.
    pub cpus: Cpus,
    /// How long the worker looks on before it sleeps.
    pub spin: Spin,
    /// Whether the worker drives exactly one NIC. When it passes the lease on that NIC, it has no more work on the
    /// node's CPU.
    pub drives_one: bool,
}

impl Common {
    /// Moves the worker to the CPU on which it drives NICs. On failure it drives them on the CPU where it is, and
    /// tells the daemon.
    pub fn go_home(&mut self) {
        if let Err(error) = self.cpus.go_home() {
            self.channel.tell(None, format!("{error:#}"));
        }
    }

    /// Returns the context in which a handler works on frames of NIC `nic`, which lie in `arena`.
    #[inline]
    pub fn context<'a>(&'a mut self, arena: &'a Arena, nic: u32) -> HandlerContext<'a> {
        HandlerContext {
            arena,
            heartbeat: &self.heartbeat,
            program_state: &self.program_state,
            nic,
            uplink: self.uplink.as_deref_mut(),
        }
    }
}

/// Stage at which this worker has a card.
enum Card<N: InPlace + Repoint> {
    /// Nothing is prepared.
    Unknown,
    /// Everything is prepared but the driver state.
    Ready(N::Prepared),
    /// The bus and memory of our own for a cold start, when the former owner is not trusted.
    Cold(N::Bus, NicMemory),
    /// This worker drives the card, or could at once.
    Driven(N),
    /// A successor has gone on. This worker no longer touches the card, and takes it apart when there is time.
    Passed(N),
    /// Rings in memory of our own. The card does not use them yet.
    Apart(N::Ready),
}

/// A NIC as the daemon described it to this worker.
#[derive(Debug)]
pub struct Given {
    /// Number of the NIC.
    pub number: u32,
    /// Name of the NIC.
    pub name: String,
    /// Bus address at which the card may see memory that this worker makes.
    pub iova: u64,
    /// Whether the present owner is not trusted and will be fenced.
    pub fenced: bool,
    /// Device bundle of the NIC.
    pub bundle: message::DeviceBundle,
    /// Descriptors of the device bundle.
    pub fds: Vec<OwnedFd>,
    /// Lease page of the NIC.
    pub lease_page: LeasePage,
    /// Parsed text of the device bundle, or the reason why this worker does not understand it.
    pub text: Result<Text, Refused>,
}

/// A NIC that this worker drives or may be ordered to drive.
pub struct Attachment<N: InPlace + Repoint, D: FrameHandler> {
    given: Given,
    worker: Worker,
    /// Tenure under which we hold the lease, or last held it.
    tenure: Tenure,
    card: Card<N>,
    /// Handler of the NIC's frames.
    handler: D,
    burst: Burst,
    arena: Option<Arena>,
    /// Eventfd that a giver rings after it has passed the lease.
    wake: Option<OwnedFd>,
    /// Ledger of the NIC's present driver.
    ledger: Option<Ledger>,
    /// Driver state for the store.
    driver_state: Box<N::DriverState>,
    /// Plan for the next order to release, and the driver state for the next order to take.
    plan: Option<Plan>,
    stored: Option<OwnedFd>,
    /// Epoch of an order to take that goes by a stored driver state. We do not take the lease before that driver
    /// state has arrived.
    awaits_driver_state: Option<u32>,
    /// Kind and version of the driver state that the order to prepare named, and the method.
    asked: (u32, u32),
    method: Method,
    waits_since: Option<Instant>,
    link_is_up: bool,
    /// When we started the card, if its link has not come up since.
    awaits_link: Option<Instant>,
    /// When it looked last whether the link is up, and the frames that this worker had received by then.
    link_looked: (Instant, u64),
    /// Whether the card is gone and we have reported it.
    gone: bool,
    /// Whether the card is released for a successor with memory of its own.
    halted: bool,
    /// Whether we are fenced once we have passed the lease.
    is_last: bool,
    /// When we passed the lease, if we are fenced after that.
    passed: Option<Instant>,
    /// When we heard that the giver is being fenced; the order to take comes after that.
    called: Option<Instant>,
    /// Whether the end of the last burst is already noted, although the lease is not passed yet.
    stamped: bool,
    /// Device bundle of the NIC once its rings are in memory that we made.
    own: Option<apart::Own>,
    /// Memory of a former owner that the card can still reach.
    old: Option<MemoryLayout>,
    /// Descriptors of the NIC's former device bundle.
    spent: Vec<OwnedFd>,
    /// Number of frames that were dropped by order and not yet reported.
    dropped: u64,
    /// Captures of a NIC that is not driven here. While it is driven, its driver holds them.
    captures: Option<Box<Captures>>,
}

/// Timeout of zero.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attachment<N, D>
where
    N::Bus: BundleBus,
{
    /// Creates an attachment that has received no order yet.
    pub fn new(given: Given, common: &Common, told: &D::Told) -> Self {
        Attachment {
            given,
            worker: Worker::new(common.party),
            tenure: Tenure::free(0),
            card: Card::Unknown,
            // The predecessor's program state is read once the predecessor is gone.
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
            awaits_link: None,
            link_looked: (Instant::now(), 0),
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

    /// Returns whether this worker drives the NIC.
    #[inline]
    pub fn drives(&self) -> bool {
        self.worker.drives()
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
                // The lease word may already be the one we wait for.
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

    /// Maps everything, and checks whether this worker reads the driver state.
    fn map(&mut self, common: &mut Common) -> Input {
        fail::point("map.begun");
        let mapped = self.open(common);
        if mapped.is_ok() {
            self.given.lease_page.come(|| common.go_home());
            // Code that has run once on that CPU is faster when time matters.
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
            return Err(Reason::OtherDriverState { kind: kind.into(), version: version.into() }.into());
        }
        let text = self.given.text.as_ref().map_err(Refused::clone)?;
        if self.is_hung_up() {
            return Err(Refused { reason: Reason::CardGone, sentence: NicError::Gone.to_string() });
        }
        let how = apart::how(self.method);
        let is_apart = how.is_some() || cold && self.given.fenced;
        if is_apart {
            let may = rustix::process::getrlimit(Resource::Memlock).current;
            bundle::may_lock(text.locks(), may)?;
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

    /// Returns whether the device's server has hung up.
    fn is_hung_up(&self) -> bool {
        // The descriptors of the way to the card follow those of the relay.
        let Some(device) = self.given.fds.get(bundle::DEVICE) else { return false };
        let mut poll = [PollFd::new(device, PollFlags::empty())];
        rustix::event::poll(&mut poll, Some(&AT_ONCE)) == Ok(1) && poll[0].revents().contains(PollFlags::HUP)
    }

    /// Ends the burst. Frames that the card does not take in time stay pending, and the successor receives them as
    /// we received them. A stored driver state speaks of no pending frames, so there none may be left.
    fn stop(&mut self, common: &mut Common) -> Input {
        if let Some(plan) = &self.plan {
            match apart::planned(plan) {
                Some(how) => return self.halt(common, how),
                None if plan.handover && plan.store.is_none() => return self.stop_clean(common),
                None => {}
            }
        }
        self.stamped = false;
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else {
            return Input::Stuck(Reason::CardGone);
        };
        // An uplink's frames may be for its VNI.
        let joins = common.joins;
        let mut context = common.context(arena, self.given.number);
        if self.gone {
            return Input::Stuck(Reason::CardGone);
        }
        let stores = self.plan.as_ref().is_some_and(|plan| plan.store.is_some());
        let is_own = self.handler.holds_its_own();
        let patience = if stores || is_own { EMPTY_HANDS } else { LAST_BURST };
        let end = Instant::now() + patience;
        while !self.burst.is_empty() {
            match self.handler.send(nic, &mut context, &mut self.burst) {
                Err(_) => return Input::Stuck(Reason::CardGone),
                Ok(0) if Instant::now() > end && stores && (joins || matches!(nic.link(), Ok(Link::Up { .. }))) => {
                    let limit_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
                    return Input::Stuck(Reason::CardStuck { limit_ms });
                }
                Ok(0) if Instant::now() > end && (is_own || stores) => {
                    // The link is down, or the partner pauses for good. No successor finds these frames.
                    context.heartbeat.add(heartbeat::REFUSED, self.burst.len() as u64);
                    self.burst.clear();
                }
                Ok(0) if Instant::now() > end => break,
                Ok(_) => {}
            }
        }
        fail::point("give.stopped");
        Input::Stopped
    }

    /// Commits the handled frames, which is the state that a successor reads in place. If the plan says so, also
    /// writes the driver state for the store.
    fn write_driver_state(&mut self, common: &mut Common, epoch: u32) {
        let plan = self.plan.take();
        let stores = plan.as_ref().and_then(|plan| plan.store);
        let leaves = plan.is_some_and(|plan| plan.handover);
        self.is_last = plan.is_some_and(|plan| plan.fenced);
        if self.halted {
            // The position was committed before the card was stopped, and no other process reads it.
            self.close_program_state(&common.program_state);
            fail::point("give.written");
            return;
        }
        self.remember(&common.program_state);
        let Card::Driven(nic) = &mut self.card else { return };
        match stores {
            // A stored driver state speaks of no pending frames.
            Some(_) => nic.driver_state(&mut self.driver_state),
            None => self.handler.conclude(nic, &self.burst),
        }
        if leaves {
            self.close_program_state(&common.program_state);
        }
        if let Some(version) = stores {
            match store::write(&*self.driver_state, version, epoch) {
                Ok(memory) => common.channel.write(&ToDaemon::DriverState { nic: self.given.number }, vec![memory]),
                Err(error) => common.channel.tell(Some(self.given.number), error.to_string()),
            }
        }
        fail::point("give.written");
    }

    /// Writes the program state that is valid with the next commit.
    #[inline]
    fn remember(&mut self, program_state: &ProgramState) {
        if let Card::Driven(nic) = &self.card {
            self.handler.remember(program_state, self.given.number, nic.turns().wrapping_add(1));
        }
    }

    /// Compare-and-swap of the lease word.
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
            // A taker that does not trust us takes when the daemon says so, so we ring no bell. We stay on this CPU
            // to be fenced: the daemon, which checks that we stand still, runs on the CPUs aside.
            if !self.is_last {
                if let Some(wake) = &self.wake {
                    // It does not block: this worker made it so when it was ordered to take. A full one wakes the taker, too.
                    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
                }
                // The taker may wait for this CPU. The rest of our work can wait, and runs on the CPUs aside.
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

    /// Takes apart the driver with which a successor has gone on, so that this worker could go on in its turn.
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
        // A giver that is to have the lease back has stepped aside; bring it home.
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
        // Going on is a turn of its own. The predecessor's program state is valid before it and after it.
        let turns = self.ledger.as_ref().map_or(0, Ledger::turns);
        self.handler.go_on(&common.program_state, self.given.number, Some(turns))?;
        self.handler.remember(&common.program_state, self.given.number, turns.wrapping_add(1));
        fail::point("take.booked");
        let nic = match self.stored.take().filter(|_| after == After::Passed) {
            Some(stored) => {
                self.driver_state = store::read(stored, wrote)?;
                N::go_on(prepared, &self.driver_state)
            }
            // The ledger and rings say the same whether the last driver passed the lease or died.
            None => N::pick_up(prepared),
        };
        let mut nic = nic.map_err(|failed| store::refused(&failed.error))?;
        if self.scrubs() {
            nic.keep_clean();
        }
        self.drive(nic);
        (self.gone, self.link_is_up, self.halted) = (false, self.given.lease_page.link_was_up(), false);
        self.awaits_link = None;
        Ok(())
    }

    /// Looks at the rings once, even if no bell has rung, and reports that this worker drives.
    fn look_once(&mut self, common: &mut Common) {
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else { return };
        let looked = self.handler.look(nic, &mut common.context(arena, self.given.number), &mut self.burst);
        self.given.lease_page.driving(common.cpus.cpu());
        fail::point("take.looked");
        // Replies to frames that waited do not wait for the remaining work.
        let looked = looked.and_then(|()| self.send(common));
        if looked.is_ok() {
            self.await_partner(common);
        }
        // Do this before any other process hears that we drive. Bus addresses are used again, and memory that a
        // later taker has mapped there must not be mistaken for the old memory.
        self.forget_old(common);
        fail::point("take.forgot");
        if let Err(error) = looked {
            self.lose(common, &error);
        }
    }

    /// Sends the pending frames. Returns the number of frames sent.
    fn send(&mut self, common: &mut Common) -> Result<usize, NicError> {
        if self.burst.is_empty() {
            return Ok(0);
        }
        self.remember(&common.program_state);
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else { return Ok(0) };
        self.handler.send(nic, &mut common.context(arena, self.given.number), &mut self.burst)
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

    /// Has a giver that passed the lease receive, send and ring as before. Only a fence ends it.
    #[cfg(feature = "crash-points")]
    fn drive_for_ever(&mut self, common: &mut Common) {
        use crate::attached::Attached as _;

        if let Card::Passed(nic) = std::mem::replace(&mut self.card, Card::Unknown) {
            self.card = Card::Driven(nic);
            while !self.gone {
                self.turn(common);
            }
        }
    }

    /// Returns whether `now` is the word we wait for while the driver state for it has not arrived.
    fn is_early(&self, now: Tenure) -> bool {
        self.stored.is_none() && now.holder.is_none() && self.awaits_driver_state == Some(now.epoch)
    }
}
