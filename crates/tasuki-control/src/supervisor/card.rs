//! A NIC, as the daemon sees it.

use std::collections::BTreeSet;
use std::io::Read;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use tasuki_relay::arbiter::{Arbiter, RelayOutcome, State};
use tasuki_relay::message::{self, DeviceBundle, lease_page};
use tasuki_relay::wire::{Order, Use};
use tasuki_relay::{ARBITER, Tenure, method};
use tasuki_shm::lease::{Lease, Lost};
use tasuki_shm::line::Line;
use tasuki_shm::region::{RegionError, Span};

use super::by_node::OfNode;
use super::failover::{self, FailOver};
use super::link_news::{LOOK_AT_CABLE, LinkNews};
use super::worker::Words;
use crate::api::types::Standby;
use crate::config;
use crate::jail::{self, Says, Terms};
use crate::process::Process;

/// Bytes that the daemon reads of an opener's or a model's output.
const SAYS_MAX: usize = 16 << 10;
/// Characters of that output which the daemon passes on.
const SENTENCE_MAX: usize = 1000;

/// The lease word and the stamps beside it.
#[derive(Debug)]
pub struct LeasePage {
    /// All words of the page.
    pub words: Words,
    lease: Lease<Span<Line>>,
}

impl LeasePage {
    /// Creates a page with a lease that no party ever had.
    pub fn create() -> Result<Self, RegionError> {
        Self::of(Words::create("tasuki lease page", lease_page::LEN)?)
    }

    /// Adopts a page that an earlier daemon made.
    pub fn adopt(memory: OwnedFd) -> Result<Self, RegionError> {
        Self::of(Words::adopt(memory, lease_page::LEN)?)
    }

    fn of(words: Words) -> Result<Self, RegionError> {
        // The first write comes while no worker drives: fault the page in now.
        words.region().populate();
        let line = words.region().span(lease_page::LEASE_AT, 1)?;
        Ok(LeasePage { words, lease: Lease::new(line) })
    }

    /// Returns the tenure in the lease word.
    pub fn tenure(&self) -> Tenure {
        of_shm(self.lease.tenure())
    }

    /// Returns the worker that holds the lease, or `None` if no party or the arbiter holds it.
    pub fn holder(&self) -> Option<u32> {
        self.tenure().holder.filter(|party| *party != ARBITER).map(|party| party.0.get())
    }

    /// Does the arbiter's compare-and-swap: takes the lease, or passes on a lease it has taken. The error is the
    /// word found instead.
    pub fn swap(&self, from: Tenure, to: Tenure) -> Result<(), Tenure> {
        let swapped = match to.holder {
            Some(taker) => self.lease.take(to_shm(from), taker.0),
            None => self.lease.pass(to_shm(from)),
        };
        swapped.map(|_| ()).map_err(|Lost { now }| of_shm(now))
    }

    /// Writes the first word of a page that no other process has read yet.
    fn begin_with(&self, word: Tenure) {
        self.words.store(lease_page::LEASE_AT / size_of::<u64>(), word.to_word());
    }

    /// Returns for how many nanoseconds no worker drove when the lease last changed hands.
    pub fn pause_ns(&self) -> Option<u64> {
        let (stopped, driving) = (self.words.load(lease_page::STOPPED_AT), self.words.load(lease_page::DRIVING_AT));
        (stopped != 0).then(|| driving.checked_sub(stopped)).flatten()
    }
}

impl OfNode for Card {
    fn node(&self) -> &str {
        &self.node
    }
}

fn of_shm(tenure: tasuki_shm::lease::Tenure) -> Tenure {
    Tenure { holder: tenure.holder.map(tasuki_relay::Party), epoch: tenure.epoch }
}

fn to_shm(tenure: Tenure) -> tasuki_shm::lease::Tenure {
    tasuki_shm::lease::Tenure { holder: tenure.holder.map(|party| -> NonZeroU32 { party.0 }), epoch: tenure.epoch }
}

/// How far the daemon has come with opening a NIC.
#[derive(Debug)]
pub enum Opening {
    /// Not begun; not before this time.
    NotBefore(Duration),
    /// Its model started at this time, and is not known to be confined yet.
    Model(Duration),
    /// A process is opening it.
    Opener(Opener),
    /// The daemon has its device bundle.
    Open,
}

/// The process that opens a device.
#[derive(Debug)]
pub struct Opener {
    pub process: Process,
    /// The daemon's end of the socket to it.
    pub socket: OwnedFd,
    /// Its output for users.
    pub speech: Speech,
    /// Why it failed, if the daemon knows better than the opener.
    pub why: Option<String>,
    /// Whether it was given a connection to the card's server, and how many sentences it has told.
    pub was_connected: bool,
    pub told: usize,
    /// Number of the party from which the addresses of its memory derive.
    pub party: u32,
    /// When it began.
    pub since: Duration,
}

/// Output of a process that a card needs: one line from its jail, then sentences for users.
#[derive(Debug)]
pub struct Speech {
    pipe: std::io::PipeReader,
    heard: Vec<u8>,
    /// The terms it was started under, if any.
    terms: Option<Box<Terms>>,
}

impl Speech {
    /// Creates the pipe of a process that is started under these terms. Returns the process's end, too.
    pub fn new(terms: Option<Terms>) -> std::io::Result<(Self, std::io::PipeWriter)> {
        let (pipe, theirs) = std::io::pipe()?;
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok((Speech { pipe, heard: Vec::new(), terms: terms.map(Box::new) }, theirs))
    }

    fn hear(&mut self) {
        let mut text = [0; 1024];
        // One that writes without end does so into a full pipe.
        while self.heard.len() < SAYS_MAX
            && let Ok(len @ 1..) = self.pipe.read(&mut text)
        {
            self.heard.extend_from_slice(&text[..len]);
        }
    }

    /// Returns whether the process runs its program by now, confined as intended. The error says why it is not
    /// confined.
    pub fn is_confined(&mut self, process: &Process) -> Result<bool, String> {
        self.hear();
        let Some(terms) = &self.terms else { return Ok(true) };
        // The jail speaks before its program does.
        match { self.heard.split_inclusive(|byte| *byte == b'\n').next() }.and_then(jail::said) {
            Some(Says::Confined(lacks)) => {
                let found = jail::verify(process.name().pid, terms);
                if terms.strict && !found.is_empty() {
                    return Err(format!("it is not confined: {}", found.join("; ")));
                }
                tracing::debug!("{:?} begins; of its confinement does not hold: {lacks:?} {found:?}", terms.program);
                Ok(true)
            }
            Some(Says::Failed(why)) => Err(why),
            Some(Says::Waits(_)) | None => Ok(false),
        }
    }

    /// Returns the last sentence of a process, once it is dead.
    pub fn last(&mut self) -> Option<String> {
        self.hear();
        let text = String::from_utf8_lossy(&self.heard);
        // What clap says of a wrong option ends with advice, and begins with the fault.
        let fault = text.lines().find_map(|line| line.strip_prefix("error: "));
        let last = fault.or_else(|| text.lines().rev().find(|line| !line.trim().is_empty()))?;
        match jail::said(last.as_bytes()) {
            Some(Says::Failed(why)) => Some(why),
            Some(Says::Waits(_) | Says::Confined(_)) => None,
            None => Some(crate::log::plain(last.trim().trim_start_matches("tasuki: "), SENTENCE_MAX)),
        }
    }
}

/// An open device: its device bundle and the descriptors of that.
#[derive(Debug)]
pub struct Opened {
    pub bundle: DeviceBundle,
    /// Descriptors of the bundle.
    pub fds: Vec<OwnedFd>,
    /// Number of the party that made the NIC's memory.
    pub made_by: u32,
}

/// Memory that a worker made, and its layout as the worker describes it.
#[derive(Debug)]
pub struct Memory {
    /// The layout, for workers to read.
    pub layout: String,
    /// Descriptors of the memory.
    pub fds: Vec<OwnedFd>,
}

impl Opened {
    /// Moves the NIC to memory of this worker. The descriptors that lead to the card stay.
    fn move_to(&mut self, party: u32, Memory { layout, fds }: Memory) {
        self.fds.truncate(self.fds.len().saturating_sub(self.bundle.memory));
        self.fds.extend(fds);
        (self.bundle.layout, self.bundle.made_by, self.made_by) = (Some(layout), Some(party), party);
    }

    /// Returns the bundle for a worker that is to drive the NIC from memory of its own, and how many descriptors go
    /// with it.
    pub fn without_memory(&self) -> Option<(DeviceBundle, usize)> {
        let fds = self.fds.len().checked_sub(self.bundle.memory).filter(|_| self.bundle.memory > 0)?;
        Some((DeviceBundle { fds, partial: true, ..self.bundle.clone() }, fds))
    }
}

#[derive(Debug)]
pub struct Card {
    /// Number of the NIC in messages.
    pub number: u32,
    /// The NIC's entry in the configuration.
    pub config: config::Nic,
    /// The node that has it now.
    node: String,
    /// The node's number on its VNI, if this is an end of a VNI and has been opened.
    pub number_on_vni: Option<u16>,
    /// The lease and the stamps.
    pub lease_page: LeasePage,
    /// The nodes whose workers can write the lease page; they all trust each other.
    pub page_of: BTreeSet<String>,
    /// The page that replaces the lease page when this node gets the NIC: the node does not trust the nodes that can
    /// write the present page.
    pub coming_lease_page: Option<(String, LeasePage)>,
    /// How often the page that the keeper knows as the coming one replaced the lease page. Only daemons and the
    /// keeper have this memory, so no worker can say that it did.
    pub lease_page_changes: Words,
    /// Its device, once it is open.
    pub opened: Option<Opened>,
    /// Memory that the NIC lies in once this worker drives it.
    pub coming: Option<(u32, Memory)>,
    /// How far it is open.
    pub opening: Opening,
    /// Since when it is being closed.
    pub closing: Option<Duration>,
    /// Number of openers that failed.
    pub failures: usize,
    /// How often it was opened anew since a worker last drove it.
    pub renewals: usize,
    /// Its model, if the daemon runs one.
    pub model: Option<Process>,
    /// Output of the model, if this daemon started it.
    pub speech: Option<Speech>,
    /// User ID of its model and its openers.
    pub uid: Option<u32>,
    /// Its arbiter, once there is a worker to ask.
    pub arbiter: Option<Arbiter>,
    /// The deadline that is set: its number, and when it expires.
    pub deadline: Option<(u32, Duration)>,
    /// Workers that are being killed to keep them from the NIC: the arbiter hears when they are dead.
    pub fence_pending: BTreeSet<u32>,
    /// The last relay outcome, if no job has read it yet.
    pub last_outcome: Option<RelayOutcome>,
    /// Method of the relay under way.
    pub method: method::Method,
    /// The lease's previous page, while a relay is under way.
    pub past: Option<LeasePage>,
    /// Plan of the relay under way, if its giver is to be fenced.
    pub plan: Option<tasuki_relay::wire::Plan>,
    /// When this daemon began, in ns of `CLOCK_MONOTONIC`, if its driver died before that.
    pub found_dead: Option<u64>,
    link_news: LinkNews,
    /// [`lease_page::DRIVING_AT`] of the takeover whose pause an event has given.
    pub pause_told: u64,
    /// Why no worker drives it, or why the last relay failed.
    pub trouble: Option<String>,
    /// Whether its node is lost.
    pub lost: failover::LostTimer,
    /// How it came to its stand-by node by itself, or is about to.
    pub fail_over: Option<FailOver>,
    /// Its stand-by node, if that was named by hand.
    pub by_hand: Option<Standby>,
    /// That its stand-by node is lost as well.
    pub waits: Option<String>,
    /// The epoch for which its interrupts were routed, and the CPUs to which they come.
    pub routed: Option<(u32, Vec<u32>)>,
}

impl Card {
    /// Drops the card, as no process holds a connection to it any more, and ends its model: at once if that is late.
    pub fn let_go(&mut self, is_late: bool) {
        self.opened = None;
        match &self.model {
            Some(model) if is_late => model.kill(),
            Some(model) => model.ask_to_end(),
            None => {}
        }
    }

    /// Creates a NIC that is not open.
    pub fn new(number: u32, config: config::Nic) -> Result<Self, RegionError> {
        Ok(Card {
            number,
            node: config.node.clone(),
            page_of: BTreeSet::from([config.node.clone()]),
            coming_lease_page: None,
            config,
            number_on_vni: None,
            lease_page: LeasePage::create()?,
            lease_page_changes: Words::create("tasuki turns", size_of::<u64>())?,
            opened: None,
            coming: None,
            opening: Opening::NotBefore(Duration::ZERO),
            closing: None,
            failures: 0,
            renewals: 0,
            model: None,
            speech: None,
            uid: None,
            arbiter: None,
            deadline: None,
            fence_pending: BTreeSet::new(),
            last_outcome: None,
            method: method::Method::Keep,
            plan: None,
            past: None,
            trouble: None,
            lost: failover::LostTimer::default(),
            fail_over: None,
            by_hand: None,
            found_dead: None,
            link_news: LinkNews::new(super::now()),
            pause_told: 0,
            waits: None,
            routed: None,
        })
    }

    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns the node that has it now.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Sets the node that has it: before it is among the daemon's NICs, or in [`ByNode::move_by`](super::by_node::ByNode::move_by).
    pub fn set_node(&mut self, node: &str) {
        node.clone_into(&mut self.node);
    }

    /// Returns the worker that holds the lease. If the word names a party that cannot hold it, no worker does.
    pub fn holder(&self) -> Option<u32> {
        let can = |holder: &u32| {
            let named = NonZeroU32::new(*holder).map(tasuki_relay::Party);
            self.arbiter.as_ref().zip(named).is_none_or(|(arbiter, party)| arbiter.may_hold(party))
        };
        self.lease_page.holder().filter(can)
    }

    /// Moves the lease to the page made for this node, with `word` in it. Returns whether there was one.
    pub fn replace_lease_page(&mut self, node: &str, word: Tenure) -> bool {
        let Some((_, lease_page)) = self.coming_lease_page.take_if(|(of, _)| of == node) else { return false };
        lease_page.begin_with(word);
        // The pause is counted over both pages. The old node states how the card was left: the daemon believes it
        // about how long ago its partner was asked to pause.
        for stamp in [lease_page::STOPPED_AT, lease_page::RELAYS, lease_page::LEFT] {
            lease_page.words.store(stamp, self.lease_page.words.load(stamp));
        }
        // Keep the old page for now: giving it back takes as long as a few frames, and no worker drives meanwhile.
        self.past = Some(std::mem::replace(&mut self.lease_page, lease_page));
        self.page_of = BTreeSet::from([node.to_owned()]);
        true
    }

    /// Returns whether the lease page went to a node that the NIC's node does not trust, and the NIC did not: a worker of that
    /// node was to take the card, and may have left it in any state.
    pub fn is_astray(&self) -> bool {
        !self.page_of.contains(&self.node)
    }

    /// Returns whether no relay is under way.
    pub fn is_settled(&self) -> bool {
        let state = self.arbiter.as_ref().map(Arbiter::state);
        matches!(state, Some(State::Steady | State::Parked))
    }

    /// Returns whether the card was a model of the daemon's that is gone: the daemon then knows the reason better
    /// than its worker.
    pub fn has_lost_its_model(&self) -> bool {
        self.config.device == config::Device::Sim && self.model.is_none()
    }

    /// Returns whether there is no card any more.
    pub fn is_gone(&self) -> bool {
        self.has_lost_its_model() || self.driver_found() == Some(lease_page::CARD_GONE)
    }

    /// Returns whether the link is `up` or `down`, as the driver says; nothing if no worker drives the card, or it has not
    /// looked.
    pub fn link(&self) -> Option<&'static str> {
        match self.driver_found()? {
            lease_page::LINK_UP => Some("up"),
            lease_page::LINK_DOWN => Some("down"),
            _ => None,
        }
    }

    /// Returns what the driver noted of the card's link.
    fn driver_found(&self) -> Option<u64> {
        let is_driven = self.vni().is_none() && self.opened.is_some() && self.is_settled() && self.holder().is_some();
        is_driven.then(|| self.lease_page.words.load(lease_page::LINK))
    }

    /// Returns what users are to hear of the link now.
    pub fn news_of_link(&mut self, now: Duration) -> Option<String> {
        let link = self.link();
        let news = self.link_news.look(link, LOOK_AT_CABLE, now)?;
        Some(format!("the link of {} {news}", self.name()))
    }

    /// Returns the abilities of the card on which the choice of a method depends.
    pub fn can(&self) -> Option<method::Card> {
        let can = self.opened.as_ref()?.bundle.can;
        let repointing = match (can.repoint, can.pauses) {
            (true, true) => method::Repointing::Paused,
            (true, false) => method::Repointing::Unpaused,
            (false, _) => method::Repointing::Never,
        };
        Some(method::Card { own_memory: can.in_place, spare_queue: can.spare_queue, repointing, fenced: can.fenced })
    }

    /// Returns whether this is the end of a node whose machine has more descriptors than earlier workers take.
    pub fn needs_many_fds(&self) -> bool {
        let many = (message::vni::KIND, message::vni::WIDE_VERSION);
        self.opened.as_ref().is_some_and(|opened| (opened.bundle.kind, opened.bundle.version) == many)
    }

    /// Returns the order for a worker that is to get ready for the NIC.
    pub fn prepare(&self, purpose: Use, method: method::Method) -> Option<Order> {
        let DeviceBundle { kind, version, .. } = self.opened.as_ref()?.bundle;
        Some(Order::Prepare { purpose, method, kind, version })
    }

    /// Returns the descriptors of the lease page and of the device bundle, as many as are to travel.
    pub fn lend(&self, count: usize, to: &str) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let bundle = self.opened.iter().flat_map(|opened| &opened.fds).take(count);
        let coming = self.coming_lease_page.as_ref().filter(|(of, _)| of == to).map(|(_, lease_page)| lease_page);
        std::iter::once(coming.unwrap_or(&self.lease_page).words.region().fd()).chain(bundle.map(AsFd::as_fd)).collect()
    }

    /// Settles the memory after a relay: if a worker with memory of its own drives now, the NIC lies in that.
    /// Returns whether the driver made the NIC's memory.
    pub fn settle_memory(&mut self) -> bool {
        let holder = self.holder();
        let coming = self.coming.take_if(|(party, _)| Some(*party) == holder);
        if let Some((opened, (party, memory))) = self.opened.as_mut().zip(coming) {
            opened.move_to(party, memory);
        }
        self.opened.as_ref().is_some_and(|opened| Some(opened.made_by) == holder)
    }

    /// Gives the NIC up, as no worker can go on with it: resets it to its initial state, with this lease page, so
    /// that it is opened anew.
    pub fn give_up(&mut self, lease_page: LeasePage, now: Duration) {
        self.opening = Opening::NotBefore(now + super::policy::retry(self.renewals));
        self.renewals = self.renewals.saturating_add(1);
        (self.lease_page, self.page_of) = (lease_page, BTreeSet::from([self.node.clone()]));
        (self.opened, self.coming, self.coming_lease_page) = (None, None, None);
        (self.arbiter, self.deadline, self.last_outcome) = (None, None, None);
        self.fence_pending.clear();
    }

    /// Drops the memory this worker made for the NIC: it will not drive it, or not again.
    pub fn forget_memory_of(&mut self, party: u32) {
        self.coming.take_if(|(of, _)| *of == party);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A process that was broken into writes as fast as it can: the daemon reads no more than it keeps, row: T33
    #[test]
    fn output_without_end_keeps_nobody_waiting() {
        let (mut speech, mut theirs) = Speech::new(None).expect("a pipe");
        let writes = std::thread::spawn(move || while theirs.write_all(&[b'x'; 4096]).is_ok() {});
        while speech.heard.len() < SAYS_MAX {
            speech.hear();
        }
        speech.hear();
        assert!(speech.heard.len() < SAYS_MAX + 1024, "{}", speech.heard.len());
        drop(speech);
        writes.join().expect("its pipe is closed");
    }
}
