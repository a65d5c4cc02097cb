//! The daemon's side of the [`crate::keeper`]: each descriptor that must outlive the daemon is given to it before anybody else has it, and the
//! next daemon takes it from there.
//!
//! What is to be kept is named by a `Key`; what that is now is looked up when it is said. So it may be named as often as one likes, and a keeper that
//! was started anew is told everything.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};
use tasuki_relay::message;

use super::card::Card;
use super::{About, Supervisor, Token, now, watch};
use crate::channel::{self, Nothing};
use crate::keeper::{self, Word};
use crate::process::Process;

/// How long a keeper may take to say what it has.
const SAYS_WITHIN: Duration = Duration::from_secs(10);
/// From one try to start one to the next.
const RETRY: Duration = Duration::from_secs(1);

/// What is kept.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Key {
    /// A NIC's lease page and device bundle.
    Card(u32),
    /// The page that will take the place of its lease page.
    Page(u32),
    /// The memory that it will lie in.
    Coming(u32),
    /// A node's program state.
    ProgramState(String),
    /// A worker's heartbeat, and what it was given.
    Worker(u32),
    /// A TAP.
    Tap(String),
    /// Where clients of memif connect.
    Memif(String),
    /// The client that is connected there.
    Client(String),
}

/// Of a NIC.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CardText {
    pub name: String,
    pub device: String,
    pub made_by: u32,
    /// Whose the page of its lease is,
    pub page_of: BTreeSet<String>,
    /// and how often it was turned until this one came.
    pub turns: u64,
    pub bundle: message::DeviceBundle,
}

/// Of memory that comes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ComingText {
    pub party: u32,
    pub lies: String,
}

/// What a daemon before us has left with the keeper.
pub(super) type Found = BTreeMap<Key, (String, Vec<OwnedFd>)>;

/// The keeper, and what it is still to be told.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    way: Option<Way>,
    due: BTreeSet<Key>,
    /// What a daemon before us has left there.
    left: Vec<Key>,
    not_before: Duration,
    pub trouble: Option<String>,
}

#[derive(Debug)]
struct Way {
    socket: OwnedFd,
    process: Process,
}

impl Way {
    /// That of a daemon before us, if it is there.
    fn find(path: &std::path::Path) -> Option<Self> {
        let socket = channel::connect(path).ok()?;
        let peer = rustix::net::sockopt::socket_peercred(&socket).ok()?;
        let process = Process::by_pid(peer.pid)?;
        (peer.uid == rustix::process::geteuid()).then_some(Way { socket, process })
    }

    fn start(folder: &std::path::Path, path: &std::path::Path) -> Result<Self> {
        let listener = channel::listen(path).with_context(|| format!("{} cannot be listened at", path.display()))?;
        // Also if our own file was replaced by a newer one meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("tasukid").arg("keep").arg(folder);
        command.stdin(Stdio::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
        let process = Process::spawn(&mut command).context("its process does not start")?;
        let socket = channel::connect(path).context("it is not to be reached")?;
        Ok(Way { socket, process })
    }

    /// All that it has.
    fn list(&self) -> Result<Found> {
        let until = now() + SAYS_WITHIN;
        let (mut found, mut room) = (Found::new(), Vec::new());
        keeper::say(self.socket.as_fd(), &Word::List, &[])?;
        loop {
            match channel::receive(self.socket.as_fd(), &mut room) {
                Ok(message) => match serde_json::from_slice(&message.bytes)? {
                    Word::Keep { name, what } => {
                        // What another version kept, of which we know nothing, goes.
                        if let Ok(key) = serde_json::from_str(&name) {
                            found.insert(key, (what, message.fds.trust()));
                        }
                    }
                    Word::Listed => return Ok(found),
                    other => bail!("it says {other:?}"),
                },
                Err(Nothing::Yet) => {
                    let left = until.saturating_sub(now());
                    ensure!(!left.is_zero(), "it does not answer");
                    let limit = Timespec::try_from(left)?;
                    let _ = rustix::event::poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&limit));
                }
                Err(nothing) => bail!("{nothing}"),
            }
        }
    }
}

impl Supervisor {
    /// Finds the keeper of a daemon before us, or starts one; what it has.
    pub(super) fn begin_keeping(&mut self) -> Found {
        let Some(way) = Way::find(&self.place.keeper_socket()) else {
            self.start_keeper();
            return Found::new();
        };
        match way.list() {
            Ok(found) => {
                self.use_keeper(way);
                self.keeping.left = found.keys().cloned().collect();
                found
            }
            Err(error) => {
                way.process.kill();
                self.note(
                    About::default(),
                    format!("what the tasukid before this one had is lost with its keeper: {error:#}"),
                );
                self.start_keeper();
                Found::new()
            }
        }
    }

    fn use_keeper(&mut self, way: Way) {
        let watched = watch(&self.epoll, way.socket.as_fd(), Token::KeeperSays);
        self.keeping.trouble = watched.err().map(|error| format!("the keeper is not watched: {error:#}"));
        self.keeping.way = Some(way);
    }

    fn start_keeper(&mut self) {
        self.keeping.not_before = now() + RETRY;
        match Way::start(self.place.folder(), &self.place.keeper_socket()) {
            Ok(way) => {
                self.use_keeper(way);
                self.keep_all();
            }
            Err(error) => {
                let trouble = format!(
                    "there is no keeper ({error:#}): if tasukid dies now, its workers end with it, and cards are opened anew"
                );
                if self.keeping.trouble.as_ref() != Some(&trouble) {
                    self.note(About::default(), trouble.clone());
                }
                self.keeping.trouble = Some(trouble);
            }
        }
    }

    /// It says nothing unasked: its end is closed.
    pub(super) fn keeper_says(&mut self) {
        let Some(Way { socket, mut process }) = self.keeping.way.take() else { return };
        drop(socket);
        process.kill();
        let how = process.ended();
        self.note(About::default(), format!("the keeper {how}; another is told everything anew"));
    }

    /// Starts one if there is none. Not while something is urgent.
    pub(super) fn mend_keeper(&mut self) {
        if self.keeping.way.is_none() && now() >= self.keeping.not_before {
            self.start_keeper();
            self.deposit();
        }
    }

    /// What is named so is to be kept as it is now, if there is such a thing.
    pub(super) fn keep(&mut self, key: Key) {
        self.keeping.due.insert(key);
    }

    /// Everything is to be kept as it is now, and nothing else.
    pub(super) fn keep_all(&mut self) {
        if self.adopting {
            return;
        }
        let mut due = std::mem::take(&mut self.keeping.due);
        due.extend(std::mem::take(&mut self.keeping.left));
        due.extend(self.cards.keys().flat_map(|nic| [Key::Card(*nic), Key::Page(*nic), Key::Coming(*nic)]));
        due.extend(self.nodes.keys().cloned().map(Key::ProgramState));
        due.extend(self.workers.keys().copied().map(Key::Worker));
        due.extend(self.taps.keys().cloned().map(Key::Tap));
        due.extend(self.memifs.keys().flat_map(|label| [Key::Memif(label.clone()), Key::Client(label.clone())]));
        self.keeping.due = due;
    }

    /// Whether it is still to be told something.
    pub(super) fn is_depositing(&self) -> bool {
        self.keeping.way.is_none() || !self.keeping.due.is_empty()
    }

    /// Tells the keeper what is due, as far as it has room. What another daemon left stays as it is until all have been adopted.
    pub(super) fn deposit(&mut self) {
        while let Some(key) = self.keeping.due.first().cloned() {
            if !self.deposit_one(&key) {
                return;
            }
        }
    }

    /// Tells it of one thing; says whether it has room for more.
    pub(super) fn deposit_one(&mut self, key: &Key) -> bool {
        let Some(way) = self.keeping.way.as_ref().filter(|_| !self.adopting) else { return false };
        let name = text(key);
        let said = match self.kept_as(key) {
            Some((what, fds)) => keeper::say(way.socket.as_fd(), &Word::Keep { name, what }, &fds),
            None => keeper::say(way.socket.as_fd(), &Word::Forget { name }, &[]),
        };
        // If its end is closed, that comes as an event. Else it has no room, or we have none for what is under way.
        said.is_ok() && {
            self.keeping.due.remove(key);
            true
        }
    }

    /// Whether the keeper has all of these as they are now.
    pub(super) fn knows(&self, keys: &[Key]) -> bool {
        self.keeping.way.is_some() && !keys.iter().any(|key| self.keeping.due.contains(key))
    }

    /// What there is of that name now.
    fn kept_as(&self, key: &Key) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        Some(match key {
            Key::Card(nic) => {
                let card = self.cards.get(nic)?;
                let kept = card.kept.as_ref()?;
                let what = CardText {
                    name: card.name().to_owned(),
                    device: card.config.device.to_string(),
                    made_by: kept.made_by,
                    page_of: card.page_of.clone(),
                    turns: card.turns.load(0),
                    bundle: kept.bundle.clone(),
                };
                let ours = [&card.lease_page.words, &card.turns].map(|words| words.region().fd());
                (text(&what), ours.into_iter().chain(channel::lend(&kept.fds)).collect())
            }
            Key::Page(nic) => {
                let (node, lease_page) = self.cards.get(nic)?.coming_lease_page.as_ref()?;
                (node.clone(), vec![lease_page.words.region().fd()])
            }
            Key::Coming(nic) => {
                let (party, memory) = self.cards.get(nic)?.coming.as_ref()?;
                (text(&ComingText { party: *party, lies: memory.lies.clone() }), channel::lend(&memory.fds))
            }
            Key::ProgramState(node) => (String::new(), vec![self.nodes.get(node)?.program_state.region().fd()]),
            Key::Worker(number) => {
                let worker = self.workers.get(number)?;
                (text(&worker.given), vec![worker.heartbeat.as_ref()?.region().fd()])
            }
            Key::Tap(label) => (String::new(), vec![self.taps.get(label)?.fd()?]),
            Key::Memif(label) => self.memifs.get(label)?.to_keep()?,
            Key::Client(label) => self.memifs.get(label)?.client_to_keep()?,
        })
    }

    /// Nothing need be kept any more.
    pub(super) fn end_keeper(&mut self) {
        if let Some(Way { socket, mut process }) = self.keeping.way.take() {
            let _ = keeper::say(socket.as_fd(), &Word::End, &[]);
            drop(socket);
            process.kill();
            process.ended();
        }
        let _ = std::fs::remove_file(self.place.keeper_socket());
    }
}

/// Plain data.
fn text<T: Serialize>(what: &T) -> String {
    serde_json::to_string(what).expect("plain data")
}

impl Card {
    /// What it is made of, if a daemon before us has left that with the keeper. Of a card that is no more there is only a socket that was hung up.
    pub(super) fn restore(&mut self, found: &mut Found, is_used: bool) {
        use super::card::{Kept, LeasePage, Memory, Opening};
        use super::worker::Words;
        let Some((what, mut fds)) = found.remove(&Key::Card(self.number)) else { return };
        let Ok(CardText { name, device, made_by, page_of, turns, bundle }) = serde_json::from_str(&what) else {
            return;
        };
        let is_it = name == self.name() && device == self.config.device.to_string() && fds.len() == bundle.fds + 2;
        if !is_it || (!is_used && fds.iter().any(is_hung_up)) {
            return;
        }
        let lease_page = fds.remove(0);
        let Ok(turned) = Words::adopt(fds.remove(0), size_of::<u64>()) else { return };
        // Where the count differs, the daemon before us turned to the coming page, and died before it told the keeper.
        let (lease_page, page_of) = match (turned.load(0) == turns, found.remove(&Key::Page(self.number))) {
            (true, _) => (lease_page, page_of),
            (false, Some((node, mut page))) if page.len() == 1 => (page.remove(0), BTreeSet::from([node])),
            (false, _) => return,
        };
        let Ok(lease_page) = LeasePage::adopt(lease_page) else { return };
        (self.page_of, self.turns) = (page_of, turned);
        (self.lease_page, self.kept, self.opening) = (lease_page, Some(Kept { bundle, fds, made_by }), Opening::Open);
        let coming = found.remove(&Key::Coming(self.number));
        self.coming = coming.and_then(|(what, fds)| {
            let ComingText { party, lies } = serde_json::from_str(&what).ok()?;
            Some((party, Memory { lies, fds }))
        });
    }
}

/// Whether nobody is at the other end of this socket.
fn is_hung_up(fd: &OwnedFd) -> bool {
    let mut poll = [PollFd::new(fd, PollFlags::empty())];
    let looked = rustix::event::poll(&mut poll, Some(&Timespec::default()));
    looked.is_ok() && poll[0].revents().contains(PollFlags::HUP)
}
