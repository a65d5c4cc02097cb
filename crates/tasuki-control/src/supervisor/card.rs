//! A NIC, as the daemon sees it.

use std::collections::BTreeSet;
use std::io::Read;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use tasuki_relay::arbiter::{Arbiter, RelayOutcome, State};
use tasuki_relay::message::{DeviceBundle, lease_page};
use tasuki_relay::wire::{Order, Positions, Use};
use tasuki_relay::{ARBITER, Tenure, method};
use tasuki_shm::lease::{Lease, Lost};
use tasuki_shm::line::Line;
use tasuki_shm::region::{RegionError, Span};

use super::worker::Words;
use crate::config;
use crate::jail::{self, Says, Terms};
use crate::process::Process;

/// Of what an opener or a model says, so much is heard,
const SAYS_MAX: usize = 16 << 10;
/// and so much of it told.
const SENTENCE_MAX: usize = 1000;

/// The lease word and the stamps beside it.
#[derive(Debug)]
pub struct LeasePage {
    /// All words.
    pub words: Words,
    lease: Lease<Span<Line>>,
}

impl LeasePage {
    /// A new one: a lease that nobody ever had.
    pub fn create() -> Result<Self, RegionError> {
        Self::of(Words::create("tasuki lease page", lease_page::LEN)?)
    }

    /// One that a worker kept.
    pub fn adopt(memory: OwnedFd) -> Result<Self, RegionError> {
        Self::of(Words::adopt(memory, lease_page::LEN)?)
    }

    fn of(words: Words) -> Result<Self, RegionError> {
        // It is first written while nobody drives.
        words.region().populate();
        let line = words.region().span(lease_page::LEASE_LINE, 1)?;
        Ok(LeasePage { words, lease: Lease::new(line) })
    }

    /// What the lease word says.
    pub fn tenure(&self) -> Tenure {
        of_shm(self.lease.tenure())
    }

    /// Who holds it, if that is a worker.
    pub fn holder(&self) -> Option<u32> {
        self.tenure().holder.filter(|party| *party != ARBITER).map(|party| party.0.get())
    }

    /// The arbiter's compare-and-swap: it takes, or passes what it has taken.
    pub fn swap(&self, from: Tenure, to: Tenure) -> Result<(), Tenure> {
        let swapped = match to.holder {
            Some(taker) => self.lease.take(to_shm(from), taker.0),
            None => self.lease.pass(to_shm(from)),
        };
        swapped.map(|_| ()).map_err(|Lost { now }| of_shm(now))
    }

    /// Says this from the first, on a page that nobody else has read yet.
    fn begin_with(&self, word: Tenure) {
        self.words.store(lease_page::LEASE_LINE / size_of::<u64>(), word.to_word());
    }

    /// How long nobody drove when it last changed hands.
    pub fn pause_ns(&self) -> Option<u64> {
        let (stopped, driving) = (self.words.load(lease_page::STOPPED_AT), self.words.load(lease_page::DRIVING_AT));
        (stopped != 0).then(|| driving.checked_sub(stopped)).flatten()
    }
}

fn of_shm(tenure: tasuki_shm::lease::Tenure) -> Tenure {
    Tenure { holder: tenure.holder.map(tasuki_relay::Party), epoch: tenure.epoch }
}

fn to_shm(tenure: Tenure) -> tasuki_shm::lease::Tenure {
    tasuki_shm::lease::Tenure { holder: tenure.holder.map(|party| -> NonZeroU32 { party.0 }), epoch: tenure.epoch }
}

/// How far the daemon has come with opening it.
#[derive(Debug)]
pub enum Opening {
    /// Not begun; not before this time.
    NotBefore(Duration),
    /// Its model was started, then, and is not known to be confined yet.
    Model(Duration),
    /// Somebody opens it.
    Opener(Opener),
    /// Its device bundle is here.
    Open,
}

/// The process that opens a device.
#[derive(Debug)]
pub struct Opener {
    /// It.
    pub process: Process,
    /// The way to it.
    pub socket: OwnedFd,
    /// What it says to people.
    pub speech: Speech,
    /// Why it was of no use, if we know better than it.
    pub why: Option<String>,
    /// The number that its addresses come from.
    pub party: u32,
    /// When it began.
    pub since: Duration,
}

/// What a process says that a card takes: its jail a line, and then it to people.
#[derive(Debug)]
pub struct Speech {
    pipe: std::io::PipeReader,
    heard: Vec<u8>,
    /// What it was started under, if it was.
    terms: Option<Box<Terms>>,
}

impl Speech {
    /// Of a process that says it here, and is started under these.
    pub fn new(terms: Option<Terms>) -> std::io::Result<(Self, std::io::PipeWriter)> {
        let (pipe, theirs) = std::io::pipe()?;
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok((Speech { pipe, heard: Vec::new(), terms: terms.map(Box::new) }, theirs))
    }

    fn hear(&mut self) {
        let mut text = [0; 1024];
        while let Ok(len @ 1..) = self.pipe.read(&mut text) {
            let room = SAYS_MAX.saturating_sub(self.heard.len()).min(len);
            self.heard.extend_from_slice(&text[..room]);
        }
    }

    /// Whether this process is the program by now, confined as it was to be; why not, if that is not so.
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

    /// The last that it said, once it is dead.
    pub fn last(&mut self) -> Option<String> {
        self.hear();
        let text = String::from_utf8_lossy(&self.heard);
        let last = text.lines().rev().find(|line| !line.trim().is_empty())?;
        match jail::said(last.as_bytes()) {
            Some(Says::Failed(why)) => Some(why),
            Some(Says::Waits(_) | Says::Confined(_)) => None,
            None => Some(crate::log::plain(last.trim().trim_start_matches("tasuki: "), SENTENCE_MAX)),
        }
    }
}

/// A device bundle and its descriptors.
#[derive(Debug)]
pub struct Kept {
    /// What it is.
    pub bundle: DeviceBundle,
    /// Of it.
    pub fds: Vec<OwnedFd>,
    /// Who made its memory.
    pub made_by: u32,
}

/// Memory that a worker made, and how it says that it lies.
#[derive(Debug)]
pub struct Memory {
    /// For workers.
    pub lies: String,
    /// Of it.
    pub fds: Vec<OwnedFd>,
}

impl Kept {
    /// The NIC lies in memory of this worker from now on. The way to it stays.
    fn move_to(&mut self, party: u32, Memory { lies, fds }: Memory) {
        self.fds.truncate(self.fds.len().saturating_sub(self.bundle.memory));
        self.fds.extend(fds);
        (self.bundle.lies, self.bundle.made_by, self.made_by) = (Some(lies), Some(party), party);
    }

    /// The same as somebody gets it who is to drive the NIC from memory of its own: the message, and how many descriptors go with it.
    pub fn apart(&self) -> Option<(DeviceBundle, usize)> {
        let fds = self.fds.len().checked_sub(self.bundle.memory).filter(|_| self.bundle.memory > 0)?;
        Some((DeviceBundle { fds, partial: true, ..self.bundle.clone() }, fds))
    }
}

/// A NIC.
#[derive(Debug)]
pub struct Card {
    /// In messages.
    pub number: u32,
    /// What the configuration says.
    pub config: config::Nic,
    /// Whose it is now.
    pub node: String,
    /// The node's number on its VNI, if it is an end of one and has been opened.
    pub number_on_vni: Option<u16>,
    /// The lease and the stamps.
    pub lease_page: LeasePage,
    /// The nodes whose workers can write it; all of them trust each other.
    pub page_of: BTreeSet<String>,
    /// The one that takes its place when this node has the NIC: the node does not trust those that can write the other.
    pub coming_lease_page: Option<(String, LeasePage)>,
    /// How often the page that the keeper knows as the coming one took the lease page's place. Only daemons and the keeper have this memory, so no worker can say
    /// that it did.
    pub turns: Words,
    /// What it is made of.
    pub kept: Option<Kept>,
    /// Its memory once this worker drives it.
    pub coming: Option<(u32, Memory)>,
    /// How far it is open.
    pub opening: Opening,
    /// Openers that failed.
    pub failures: usize,
    /// How often it was opened anew since somebody drove it.
    pub renewals: usize,
    /// Its model, if it is ours,
    pub model: Option<Process>,
    /// and what that says, if this daemon has started it.
    pub speech: Option<Speech>,
    /// The user of its model and its openers.
    pub uid: Option<u32>,
    /// Its arbiter, once there is a worker to ask.
    pub arbiter: Option<Arbiter>,
    /// The deadline that is set: its number and when it is over.
    pub watch: Option<(u32, Duration)>,
    /// Who is to be kept from it.
    pub condemned: BTreeSet<u32>,
    /// What the arbiter has said last, if nobody has heard it yet.
    pub said: Option<RelayOutcome>,
    /// The method of the relay that is under way.
    pub method: method::Method,
    /// The page that the lease was on before, while a relay is under way.
    pub past: Option<LeasePage>,
    /// How a relay is meant that is under way, if its giver is to be fenced.
    pub plan: Option<tasuki_relay::wire::Plan>,
    /// Why nobody drives it, or why the last relay failed.
    pub trouble: Option<String>,
}

impl Card {
    /// One that is not open.
    pub fn new(number: u32, config: config::Nic) -> Result<Self, RegionError> {
        Ok(Card {
            number,
            node: config.node.clone(),
            page_of: BTreeSet::from([config.node.clone()]),
            coming_lease_page: None,
            config,
            number_on_vni: None,
            lease_page: LeasePage::create()?,
            turns: Words::create("tasuki turns", size_of::<u64>())?,
            kept: None,
            coming: None,
            opening: Opening::NotBefore(Duration::ZERO),
            failures: 0,
            renewals: 0,
            model: None,
            speech: None,
            uid: None,
            arbiter: None,
            watch: None,
            condemned: BTreeSet::new(),
            said: None,
            method: method::Method::Keep,
            plan: None,
            past: None,
            trouble: None,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The worker that holds the lease. A word that names somebody that cannot hold it names nobody.
    pub fn holder(&self) -> Option<u32> {
        let can = |holder: &u32| {
            let named = NonZeroU32::new(*holder).map(tasuki_relay::Party);
            self.arbiter.as_ref().zip(named).is_none_or(|(arbiter, party)| arbiter.may_hold(party))
        };
        self.lease_page.holder().filter(can)
    }

    /// From here on the lease is on the page that was made for this node, and says this.
    pub fn turn_page(&mut self, node: &str, word: Tenure) -> bool {
        let Some((_, lease_page)) = self.coming_lease_page.take_if(|(of, _)| of == node) else { return false };
        lease_page.begin_with(word);
        // How long nobody drove is counted over both. How the card was left the old node says: it is believed for how long ago its partner was asked to pause.
        for stamp in [lease_page::STOPPED_AT, lease_page::RELAYS, lease_page::LEFT] {
            lease_page.words.store(stamp, self.lease_page.words.load(stamp));
        }
        // To give it back takes as long as a few frames, and nobody drives.
        self.past = Some(std::mem::replace(&mut self.lease_page, lease_page));
        self.page_of = BTreeSet::from([node.to_owned()]);
        true
    }

    /// Whether no relay is under way.
    pub fn is_settled(&self) -> bool {
        let state = self.arbiter.as_ref().map(Arbiter::state);
        matches!(state, Some(State::Steady | State::Parked))
    }

    /// Whether it was a model of ours that is no more: then the daemon knows better than its worker what that means.
    pub fn has_lost_its_model(&self) -> bool {
        self.config.device == config::Device::Sim && self.model.is_none()
    }

    /// What the choice of a method wants to know.
    pub fn can(&self) -> Option<method::Card> {
        let can = self.kept.as_ref()?.bundle.can;
        let repointing = match (can.repoint, can.pauses) {
            (true, true) => method::Repointing::Paused,
            (true, false) => method::Repointing::Unpaused,
            (false, _) => method::Repointing::Never,
        };
        Some(method::Card { own_memory: can.in_place, spare_queue: can.spare_queue, repointing, fenced: can.fenced })
    }

    /// What a worker is told that is to be ready for it.
    pub fn prepare(&self, purpose: Use, method: method::Method) -> Option<Order> {
        let DeviceBundle { kind, version, .. } = self.kept.as_ref()?.bundle;
        Some(Order::Prepare { purpose, method, kind, version, carries: Positions::default() })
    }

    /// Descriptors of the lease page and of the device bundle, as many as are to travel.
    pub fn lend(&self, count: usize, to: &str) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let bundle = self.kept.iter().flat_map(|kept| &kept.fds).take(count);
        let coming = self.coming_lease_page.as_ref().filter(|(of, _)| of == to).map(|(_, lease_page)| lease_page);
        std::iter::once(coming.unwrap_or(&self.lease_page).words.region().fd()).chain(bundle.map(AsFd::as_fd)).collect()
    }

    /// A relay has settled: if whoever has memory of its own drives now, the NIC is made of that. Whether that is so.
    pub fn settle_memory(&mut self) -> bool {
        let holder = self.holder();
        let coming = self.coming.take_if(|(party, _)| Some(*party) == holder);
        if let Some((kept, (party, memory))) = self.kept.as_mut().zip(coming) {
            kept.move_to(party, memory);
        }
        self.kept.as_ref().is_some_and(|kept| Some(kept.made_by) == holder)
    }

    /// Nobody can go on with it: it is as at the very beginning, with this lease page, and is to be opened.
    pub fn give_up(&mut self, lease_page: LeasePage, now: Duration) {
        self.opening = Opening::NotBefore(now + super::policy::retry(self.renewals));
        self.renewals = self.renewals.saturating_add(1);
        (self.lease_page, self.page_of) = (lease_page, BTreeSet::from([self.node.clone()]));
        (self.kept, self.coming, self.coming_lease_page) = (None, None, None);
        (self.arbiter, self.watch, self.said) = (None, None, None);
        self.condemned.clear();
    }

    /// This worker will not drive it, or not again: nothing will come of its memory.
    pub fn forget_memory_of(&mut self, party: u32) {
        self.coming.take_if(|(of, _)| *of == party);
    }
}
