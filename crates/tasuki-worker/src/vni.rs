//! A node's end of a VNI. The lease on an end changes hands by the relay's tables, as the lease on a NIC does.
//!
//! The driver of an end passes frames between the VNI and the node's endpoint: see `tasuki_net::endpoint`.
//! Or the node's program is the driver itself.
//!
//! There is no driver state. A driver's progress is in the node memory, and it is written there before any other
//! node can rely on it. So a successor reads the same state whether its predecessor passed the lease or died.

mod client;
mod end;
mod neighbours;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tasuki_net::capture::Captures;
use tasuki_net::endpoint::{Bridge, Dismissal, Dropped, Endpoint, Recovery};
use tasuki_net::nic::Mac;
use tasuki_net::port::{Armed, Transactional};
use tasuki_net::switch::Switch;
use tasuki_net::vni::Vni;
use tasuki_net::vni::port::{Frames, VniPort};
use tasuki_relay::message::{ToDaemon, heartbeat, vni};
use tasuki_relay::wire::{Order, Position, Reason};
use tasuki_relay::worker::{Do, Input, Side, Worker};
use tasuki_relay::{After, Tenure, taker};
use tasuki_shm::line::LINE_LEN;
use tasuki_shm::pool::Pool;
use tasuki_shm::region::PeerRegion;
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::directory::Lookup;
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds};

use crate::attached::Attached;
use crate::attachment::{Common, Given};
use crate::bundle::Refused;
use crate::fail;
use crate::handler::FrameHandler;
use crate::uplink::Uplink;
use end::{End, Native, OnVni, Sleeper};
use neighbours::Known;

/// Interval between two runs of the periodic work ([`VniAttachment::tick`]).
const TICK: Duration = Duration::from_millis(250);

/// Number of turns after which `turn` reads the clock to see whether periodic work is due.
const TURNS: u32 = 256;

/// Positions of the device bundle's descriptors.
const WAKE: usize = 0;
const CONTROL: usize = 1;
const POOL: usize = 2;
const BELL_RECEIVER: usize = 3;

/// Index, in the node's program state, of the state of the end's program. A node with an end has no NICs with a
/// state of their own.
const PROGRAM_STATE: u32 = 0;

/// Minimum number of frames that the end's port takes at once. An end has no configurable ring.
const ROOM: u16 = 256;

/// Returns whether the node is native: the worker is the node's program, and passes frames to no endpoint.
fn is_native(common: &Common) -> bool {
    common.endpoint.is_none()
}

/// A node's end of a VNI that this worker drives or may be ordered to drive.
pub struct VniAttachment<D: FrameHandler> {
    given: Given,
    text: Result<vni::Text, Refused>,
    worker: Worker,
    /// Tenure under which we hold the lease, or last held it.
    tenure: Tenure,
    /// Kind and version of the device bundle that the order to prepare named.
    asked: (u32, u32),
    neighbours: BTreeMap<u16, Known>,
    is_ready: bool,
    /// Handler of the frames of a native node.
    handler: D,
    /// Memory for the frames of a native node, made in advance.
    frames: Option<Frames>,
    /// The node's memory and its switch, mapped in advance.
    memory: Option<(NodeMemory, Pool)>,
    switch: Option<Switch>,
    end: Option<End>,
    /// The node's endpoint, opened in advance, while another worker drives the end.
    endpoint: Option<Box<dyn Endpoint>>,
    /// Socket of the client that we last reported to the daemon, and the version of its parts.
    told_client: Option<(u64, u64)>,
    /// Up to when the reports so far take their share of the time: those for which no client waits, and those for which one
    /// does. And when the last one went.
    news_at: Instant,
    awaited_at: Instant,
    told_at: Instant,
    /// Whether the programs behind the endpoint are gone for good and we have reported it.
    is_gone: bool,
    /// Counts when the heartbeat was last updated: frames given, taken, dropped; and the latter by reason.
    told: (u64, u64, u64),
    told_dropped: Dropped,
    waits_since: Option<Instant>,
    turns: u32,
    ticked: Instant,
    /// Captures of an end that is not driven here. While it is driven, its port holds them.
    captures: Option<Box<Captures>>,
}

impl<D: FrameHandler> VniAttachment<D> {
    /// Creates an attachment that has received no order yet.
    pub fn new(given: Given, common: &Common, told: &D::Told) -> Self {
        let text = serde_json::from_str(&given.bundle.text).map_err(|error| Refused {
            reason: Reason::Odd { position: Position::Device as u64 },
            sentence: format!(
                "the device bundle of {} is not understood ({error}); rebuild the older of the two",
                given.name
            ),
        });
        VniAttachment {
            given,
            text,
            worker: Worker::new(common.party),
            tenure: Tenure::free(0),
            asked: (vni::KIND, vni::VERSION),
            neighbours: BTreeMap::new(),
            is_ready: false,
            handler: D::new(told),
            frames: None,
            memory: None,
            switch: None,
            end: None,
            endpoint: None,
            is_gone: false,
            told_client: None,
            news_at: Instant::now(),
            awaited_at: Instant::now(),
            told_at: Instant::now(),
            told: (0, 0, 0),
            told_dropped: Dropped::default(),
            waits_since: None,
            turns: 0,
            ticked: Instant::now(),
            captures: None,
        }
    }

    /// Returns the end, if it is driven here.
    fn sleeper<'a>(&'a mut self, common: &'a mut Common) -> Option<&'a mut dyn Sleeper> {
        self.end.as_mut()?.sleeper(&mut common.uplink)
    }

    fn on_vni<'a>(&'a mut self, common: &'a mut Common) -> Option<&'a mut dyn OnVni> {
        self.sleeper(common).map(Sleeper::on_vni)
    }

    fn act(&mut self, common: &mut Common, what: Do) -> Option<Input> {
        match what {
            Do::Map => Some(self.map(common)),
            Do::Stop => {
                self.stop(common);
                Some(Input::Stopped)
            }
            // The data path has written most of the state that a successor needs; this writes the rest.
            Do::WriteDriverState { .. } => {
                self.conclude(common);
                None
            }
            Do::Resume | Do::Go => None,
            Do::Swap { from, to } => Some(self.swap(common, from, to)),
            Do::Look => Some(Input::Word(self.given.lease_page.tenure())),
            Do::Read { after, .. } => Some(self.read(common, after)),
            Do::LookOnce => {
                self.look_once(common);
                self.given.lease_page.driving(common.cpus.cpu());
                fail::point("take.looked");
                None
            }
            Do::Yield => {
                self.drop_end(common);
                self.is_ready = false;
                None
            }
            Do::Say(report) => {
                common.channel.report(self.given.number, report);
                None
            }
        }
    }

    /// Checks whether this worker could go on with the end.
    fn map(&mut self, common: &mut Common) -> Input {
        fail::point("map.begun");
        let fits = self.fits(common);
        fail::point("map.done");
        match fits {
            Ok(()) => {
                self.given.lease_page.come(|| common.go_home());
                self.is_ready = true;
                Input::Prepared
            }
            Err(Refused { reason, sentence }) => {
                common.channel.tell(Some(self.given.number), sentence);
                Input::Unfit(reason)
            }
        }
    }

    fn fits(&mut self, common: &Common) -> Result<(), Refused> {
        let (kind, version) = self.asked;
        if kind != vni::KIND || !(vni::VERSION..=vni::WIDE_VERSION).contains(&version) {
            return Err(Reason::OtherDriverState { kind: kind.into(), version: version.into() }.into());
        }
        let odd = |sentence: String| Refused { reason: Reason::Odd { position: Position::Device as u64 }, sentence };
        if let Err(refused) = &self.text {
            return Err(refused.clone());
        }
        if self.given.fds.len() != vni::FDS {
            let have = self.given.fds.len();
            return Err(odd(format!(
                "{have} descriptors came with the node's end of a VNI, and {} belong to it; rebuild the older of the two",
                vni::FDS
            )));
        }
        if is_native(common) {
            D::may_go_on(&common.program_state, PROGRAM_STATE, None, ROOM)?;
            if self.frames.is_none() {
                let frames = Frames::new().map_err(|error| odd(format!("no memory for frames: {error}")))?;
                self.frames = Some(frames);
            }
        }
        self.get_ready(common).map_err(|error| odd(format!("{error:#}")))
    }

    /// Opens and maps in advance all that a driver needs. Touches nothing that the present driver writes.
    fn get_ready(&mut self, common: &Common) -> Result<()> {
        self.open_endpoint(common)?;
        if self.memory.is_none() {
            let node_memory = NodeMemoryFds { control: self.copy_of(CONTROL)?, pool: self.copy_of(POOL)? };
            self.memory = Some(NodeMemory::adopt(node_memory)?);
        }
        if self.switch.is_none() {
            self.switch = Some(self.new_switch()?);
        }
        Ok(())
    }

    fn copy_of(&self, fd: usize) -> Result<OwnedFd> {
        self.given.fds[fd].try_clone().context("a descriptor cannot be copied; raise RLIMIT_NOFILE")
    }

    /// Opens the node's endpoint in advance, if it has one.
    fn open_endpoint(&mut self, common: &Common) -> Result<()> {
        if let (None, None, Some(endpoint)) = (&self.end, &self.endpoint, &common.endpoint) {
            self.endpoint = Some(endpoint.open(&common.program_state, self.own_number()?)?);
        }
        Ok(())
    }

    /// Ends the burst.
    fn stop(&mut self, common: &mut Common) {
        match &mut self.end {
            Some(End::Native(native)) => native.stop(&mut self.handler, common),
            Some(End::Bridge(bridge)) => {
                bridge.finish();
                self.count(common);
            }
            Some(End::Uplink) | None => {}
        }
        self.entrust_client(common);
        fail::point("give.stopped");
    }

    /// Drops the end: this worker no longer drives it.
    fn drop_end(&mut self, common: &mut Common) {
        self.captures = self.captures(common).take();
        if let Some(End::Bridge(bridge)) = self.end.take() {
            self.endpoint = Some(bridge.into_end());
        }
        common.uplink = None;
    }

    /// Writes the last of the state from which a successor goes on.
    fn conclude(&mut self, common: &mut Common) {
        match &mut self.end {
            Some(End::Native(native)) => native.conclude(&mut self.handler, common),
            Some(End::Uplink) => common.uplink.iter_mut().for_each(|uplink| uplink.conclude()),
            Some(End::Bridge(_)) | None => {}
        }
        fail::point("give.written");
    }

    /// Looks at the rings once, even if no bell has rung.
    fn look_once(&mut self, common: &mut Common) {
        match &mut self.end {
            Some(End::Native(native)) => native.look(&mut self.handler, common),
            _ => _ = self.move_frames(common),
        }
    }

    /// Compare-and-swap of the lease word.
    fn swap(&mut self, common: &mut Common, from: Tenure, to: Tenure) -> Input {
        let gives = to.holder.is_none() && self.end.is_some();
        if gives {
            self.given.lease_page.stopped();
        }
        let won = self.given.lease_page.swap(from, to);
        if won && to.holder == Some(common.party) {
            self.tenure = to;
            fail::point("take.won");
        }
        if won && gives {
            // The eventfd cannot be full: it would have to be rung as often as its counter has values.
            let _ = rustix::io::write(&self.given.fds[WAKE], &1_u64.to_ne_bytes());
            // The taker may wait for this CPU. The rest of our work can wait, and runs on the CPUs aside.
            std::thread::yield_now();
            if common.drives_one {
                common.cpus.step_aside();
            }
            fail::point("give.passed");
            // The memory belongs to a successor, which may already write to it. Dropping the end writes nothing
            // more.
            self.drop_end(common);
        }
        Input::Swapped { won }
    }

    /// Goes on where the last driver stopped.
    fn read(&mut self, common: &mut Common, _: After) -> Input {
        common.go_home();
        let went_on = self.go_on(common);
        fail::point("take.read");
        match went_on {
            Ok(end) => {
                let captures = self.captures.take();
                (self.end, self.told, self.told_dropped) = (Some(end), (0, 0, 0), Dropped::default());
                *self.captures(common) = captures;
                Input::Sound
            }
            Err(error) => {
                common
                    .channel
                    .tell(Some(self.given.number), format!("the node's end of the VNI cannot be used: {error:#}"));
                Input::Broken(Reason::Odd { position: Position::Arena as u64 })
            }
        }
    }

    fn go_on(&mut self, common: &mut Common) -> Result<End> {
        self.get_ready(common)?;
        let memory = self.memory.take().context("the node's memory is not mapped")?;
        let switch = self.switch.take().context("the VNI's directory is not mapped")?;
        let (number, bell_receiver) = (self.own_number()?, self.copy_of(BELL_RECEIVER)?);
        if is_native(common) {
            let frames = self.frames.take().map_or_else(Frames::new, Ok)?;
            let station = Mac(self.given.bundle.mac.context("the device bundle lacks the node's station address")?);
            let mut port = VniPort::new(number, station, memory, bell_receiver, switch, frames);
            self.add_all(common, |bundle| port.add(bundle));
            port.settle();
            let turns = Some(port.turns());
            self.handler
                .go_on(&common.program_state, PROGRAM_STATE, turns)
                .map_err(|refused| anyhow::anyhow!(refused.sentence))?;
            if common.joins {
                common.uplink = Some(Box::new(Uplink::new(port)));
                return Ok(End::Uplink);
            }
            return Ok(End::Native(Box::new(Native::new(port))));
        }
        let endpoint = self.endpoint.take().context("the node has no endpoint")?;
        let is_exact = endpoint.recovery() == Recovery::Exact;
        let make = if is_exact { Vni::exact } else { Vni::new };
        let mut vni = make(number, memory, bell_receiver);
        self.add_all(common, |bundle| vni.add(bundle));
        vni.settle();
        let mut bridge = Bridge::new(endpoint, vni, switch);
        if let Some(endpoint) = &common.endpoint {
            bridge.set_rates(endpoint.rates(&common.program_state));
            bridge.set_latency(endpoint.latency());
        }
        self.news_waits();
        Ok(End::Bridge(Box::new(bridge)))
    }

    fn own_number(&self) -> Result<u16> {
        let number =
            self.text.as_ref().map(|text| text.number).map_err(|refused| anyhow::anyhow!(refused.sentence.clone()))?;
        ensure!(number < NODES_MAX, "the device bundle says that this is node {number}, and a VNI has {NODES_MAX}");
        Ok(number)
    }

    fn new_switch(&self) -> Result<Switch> {
        let directory =
            PeerRegion::map_kept_whole(self.given.fds[vni::DIRECTORY].as_fd()).context("the VNI's directory")?;
        let lines = directory.len() / LINE_LEN;
        let switch = Switch::new(self.own_number()?, Lookup::new(directory.claims(0, lines)?));
        Ok(switch.sharing(self.given.bundle.mac))
    }

    /// Passes frames on once, both ways. Returns the number of frames moved.
    #[inline]
    fn move_frames(&mut self, common: &mut Common) -> usize {
        let moved = match &mut self.end {
            Some(End::Bridge(bridge)) => bridge.turn(),
            Some(End::Native(native)) => native.turn(&mut self.handler, common),
            // The NIC's attachment moves the frames.
            Some(End::Uplink) | None => 0,
        };
        self.count(common);
        moved
    }

    /// Adds the frames since the last time to the heartbeat.
    #[inline]
    fn count(&mut self, common: &mut Common) {
        let now = match &self.end {
            Some(End::Bridge(bridge)) => (bridge.given, bridge.taken, bridge.dropped.sum()),
            // The program counts its frames itself.
            Some(End::Native(native)) => (0, 0, native.dropped()),
            // The NIC's attachment counts them.
            Some(End::Uplink) => (0, 0, common.uplink.as_ref().map_or(0, |uplink| uplink.port.dropped.sum())),
            None => return,
        };
        let (now_given, now_taken, now_dropped) = now;
        let (given, taken, dropped) = self.told;
        if now != self.told {
            common.heartbeat.add(heartbeat::RECEIVED, now_given - given);
            common.heartbeat.add(heartbeat::SENT, now_taken - taken);
            self.told = now;
            if now_dropped != dropped {
                common.heartbeat.add(heartbeat::REFUSED, now_dropped - dropped);
                self.tell_dropped(common);
            }
        }
    }

    /// Adds the frames that did not cross since the last time to the heartbeat, by reason.
    #[cold]
    fn tell_dropped(&mut self, common: &mut Common) {
        let Some(now) = self.on_vni(common).map(|end| *end.dropped()) else { return };
        let before = std::mem::replace(&mut self.told_dropped, now);
        for (at, ((_, now), (_, before))) in now.counts().into_iter().zip(before.counts()).enumerate() {
            common.heartbeat.add(heartbeat::DROPPED_FOR + at, now - before);
        }
    }

    /// Runs periodic work if it is due. Returns the time until it is due again, or nothing if no work is left.
    fn tick(&mut self, common: &mut Common) -> Option<Duration> {
        if self.end.is_none() {
            return self.connection()?.keeps_gone().then_some(TICK);
        }
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.ticked);
        if passed < TICK {
            return Some(TICK - passed);
        }
        self.ticked = now;
        let again = self.on_vni(common)?.tick(now);
        // The tick may have counted drops, and the worker may sleep next.
        self.count(common);
        again.then_some(TICK)
    }
}

impl<D: FrameHandler> Attached<D> for VniAttachment<D> {
    fn given(&self) -> &Given {
        &self.given
    }

    fn worker(&self) -> &Worker {
        &self.worker
    }

    fn vni(&mut self) -> Option<&mut VniAttachment<D>> {
        Some(self)
    }

    fn is_ready(&self) -> bool {
        self.is_ready && !self.is_left()
    }

    fn waits(&self) -> Option<Instant> {
        self.waits_since
    }

    #[inline]
    fn word(&self) -> Option<Input> {
        let now = self.given.lease_page.tenure();
        (self.waits_since.is_some() || now != self.tenure).then_some(Input::Word(now))
    }

    fn hear(&mut self, common: &mut Common, input: Input) {
        if let Input::Order(Order::Prepare { kind, version, .. }) = input {
            self.asked = (kind, version);
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

    #[inline]
    fn turn(&mut self, common: &mut Common) -> usize {
        let moved = self.move_frames(common);
        if self.end.is_some() {
            self.turns = self.turns.wrapping_add(1);
            self.tell_news_of_client(common);
            if self.turns.is_multiple_of(TURNS) {
                self.tick(common);
            }
        }
        moved
    }

    fn gathers(&mut self, common: &mut Common) -> bool {
        self.sleeper(common).is_some_and(Sleeper::gathers)
    }

    fn arm(&mut self, common: &mut Common) -> bool {
        self.tell_news_of_client(common);
        self.sleeper(common).is_none_or(|end| end.arm() == Armed::Idle)
    }

    fn rest(&mut self, common: &mut Common) -> Option<Duration> {
        let due = self.tick(common);
        let news = self.end.is_some().then(|| self.news_in()).flatten();
        let waits = self.sleeper(common).and_then(|end| end.waits());
        // A handler that waits for room has no other work.
        let works = matches!(self.end, Some(End::Native(_)) if waits.is_none()).then(|| self.handler.rest()).flatten();
        [due, news, waits, works].into_iter().flatten().min()
    }

    fn fds<'a>(&'a self, common: &'a Common) -> [Option<BorrowedFd<'a>>; 2] {
        match &self.end {
            Some(end) => end.sleeper_ref(&common.uplink).map_or([None; 2], Sleeper::fds),
            None => [self.waits_since.and_then(|_| self.given.fds.get(WAKE)).map(AsFd::as_fd), None],
        }
    }

    fn wake(&mut self, common: &mut Common) {
        let waits_since = self.waits_since;
        match (self.sleeper(common), waits_since) {
            (Some(end), _) => end.wake(),
            (None, Some(_)) => {
                let _ = rustix::io::read(&self.given.fds[WAKE], &mut [0; 8]);
            }
            (None, None) => {}
        }
    }

    fn now_and_then(&mut self, common: &mut Common) {
        if let (Some(End::Bridge(bridge)), Some(endpoint), false) = (&self.end, &common.endpoint, self.is_gone)
            && bridge.endpoint.fd().is_none()
        {
            self.is_gone = true;
            let sentence = format!(
                "the interface {} of the node is gone, with its network namespace or removed by hand: frames for it are dropped; tasuki status says what to do",
                endpoint.label()
            );
            common.channel.tell(None, sentence);
        }
        if let Some(End::Bridge(bridge)) = &mut self.end
            && let Some(trouble) = bridge.endpoint.trouble()
        {
            common.channel.tell(Some(self.given.number), trouble);
        }
    }

    fn captures<'a>(&'a mut self, common: &'a mut Common) -> &'a mut Option<Box<Captures>> {
        match self.end.as_mut().and_then(|end| end.sleeper(&mut common.uplink)) {
            Some(end) => end.on_vni().captures(),
            None => &mut self.captures,
        }
    }

    fn tell_counts(&mut self, common: &mut Common) {
        let Some(end) = self.on_vni(common) else { return };
        let mut counts: Vec<_> = end.counts().into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
        counts.extend(common.spin.counts().map(|(name, count)| (name.to_owned(), count)));
        if let Some(End::Native(_)) = self.end {
            counts.extend(self.handler.counts());
        }
        common.channel.write(&ToDaemon::Counts { nic: self.given.number, counts }, Vec::new());
    }

    fn park(&mut self, common: &mut Common) {
        if let Some(connection) = self.connection() {
            connection.dismiss(Dismissal::Over);
        }
        self.stop(common);
        self.conclude(common);
        self.drop_end(common);
    }
}
