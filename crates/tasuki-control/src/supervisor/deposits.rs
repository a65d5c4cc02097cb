//! The daemon's side of the [`crate::keeper`]. The daemon deposits each descriptor that must outlive it before it
//! gives the descriptor to any other process. The next daemon takes it from there.
//!
//! A `Key` names a thing to deposit; the daemon looks up its present state when it deposits it. So a key may be marked any
//! number of times, and a keeper that was started anew is told everything.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};
use tasuki_relay::message;
use tasuki_shm::peer::Credentials;

use super::card::Card;
use super::lines::Lines;
use super::{About, Supervisor, Token, epoll_add, is_news, now};
use crate::channel::{self, Nothing};
use crate::endpoint::socket;
use crate::foreign::Foreign;
use crate::keeper::{self, Word};
use crate::process::{END_TIMEOUT, LAST_END_TIMEOUT, Process};
use crate::successor;

/// Time a keeper may take to begin, and to list its entries.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of polling for the keeper's start: the kernel has no event for it.
const KEEPER_START_POLL_EVERY: Duration = Duration::from_millis(10);
/// Interval of attempts to start a keeper.
const KEEPER_RETRY_EVERY: Duration = Duration::from_secs(1);

/// The name of something that the keeper has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Key {
    /// A NIC's lease page and device bundle.
    Card(u32),
    /// The page that will replace a NIC's lease page.
    #[serde(rename = "page")]
    NextPage(u32),
    /// The memory that a NIC will lie in.
    #[serde(rename = "coming")]
    NextMemory(u32),
    /// A node's program state.
    ProgramState(String),
    /// A worker's heartbeat, and the NICs it was given.
    Worker(u32),
    /// The TAP with this label.
    Tap(String),
    /// The queue of another node's TAP that this node drives.
    Queue(String),
    /// The descriptor of an endpoint other than a TAP.
    Endpoint(String),
    /// The client that is connected there.
    Client(String),
}

/// Text of a NIC's entry in the keeper.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CardText {
    pub name: String,
    pub device: String,
    pub made_by: u32,
    /// The nodes whose workers can write its lease page.
    pub page_of: BTreeSet<String>,
    /// How often the lease page had been replaced when this one came.
    pub turns: u64,
    pub bundle: message::DeviceBundle,
    /// The settings with which it was opened. An earlier daemon did not note them.
    pub opened: Option<OpenedText>,
}

/// The settings with which a NIC was opened. The next daemon's configuration can have others: they count once it is
/// closed and opened.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct OpenedText {
    ring: Option<u16>,
    mtu: Option<u16>,
    wire: Vec<String>,
}

/// Text of the entry for memory that a NIC will move to.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ComingText {
    pub party: u32,
    pub layout: String,
}

/// Entries that an earlier daemon left with the keeper.
pub(super) type Found = BTreeMap<Key, (String, Vec<OwnedFd>)>;

/// The keeper, and the keys whose state it has yet to get.
#[derive(Debug, Default)]
pub(super) struct Deposits {
    connection: Option<KeeperConnection>,
    due: BTreeSet<Key>,
    /// Keys that an earlier daemon left there.
    left: Vec<Key>,
    not_before: Duration,
    /// When the daemon last looked whether the next one would find the keeper.
    looked_at: Duration,
    pub trouble: Option<String>,
}

/// The error of a daemon that cannot take everything over. All of it stays with the keeper, for a daemon that can.
pub(super) const TOO_FEW_DESCRIPTORS: &str = "this tasukid may open too few descriptors to take over what the last one had, and that goes on; raise LimitNOFILE= (ulimit -Hn), and start it again";

/// Returns the error of a daemon that does not learn whether a process is there.
pub(super) fn not_found_out(error: std::io::Error) -> anyhow::Error {
    let is_lack = channel::lacks(&error);
    let error = anyhow::Error::new(error);
    if is_lack { error.context(TOO_FEW_DESCRIPTORS) } else { error }
}

#[derive(Debug)]
struct KeeperConnection {
    socket: OwnedFd,
    process: Process,
    /// [Mark](socket::mark) of the file at which it listens.
    mark: Option<String>,
}

impl KeeperConnection {
    /// Connects to the keeper of an earlier daemon, if there is one.
    ///
    /// # Errors
    /// That cannot be known: this process may open no more descriptors, or `/proc` hides the keeper.
    fn find(path: &std::path::Path) -> Result<Option<Self>> {
        let until = now() + KEEPER_TIMEOUT;
        loop {
            match channel::connect(path) {
                Ok(socket) => {
                    let peer = Credentials::of(&socket).ok();
                    let Some(peer) = peer.filter(|peer| peer.uid == rustix::process::geteuid().as_raw()) else {
                        return Ok(None);
                    };
                    let process = Process::by_pid(peer.pid).map_err(not_found_out)?;
                    if let Some(process) = process.filter(|process| process.name().pid != std::process::id()) {
                        return Ok(Some(KeeperConnection { socket, process, mark: socket::mark(path) }));
                    }
                }
                Err(error) if channel::lacks(&error) => return Err(error).context(TOO_FEW_DESCRIPTORS),
                // The keeper's listen backlog is full.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return Ok(None),
            }
            // The keeper has yet to begin: until then the kernel names the daemon that started it, which is dead, or went on
            // as this one. What that daemon sent waits in the keeper's socket.
            if now() >= until {
                return Ok(None);
            }
            std::thread::sleep(KEEPER_START_POLL_EVERY);
        }
    }

    fn start(folder: &std::path::Path, path: &std::path::Path) -> Result<Self> {
        let listener = channel::listen(path).with_context(|| format!("{} cannot be listened at", path.display()))?;
        let mark = socket::mark(path);
        let (socket, theirs) = channel::pair().context("it is not to be reached")?;
        // This works even if a newer file has replaced the daemon's own meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("tasukid").arg("keep").arg(folder);
        command.stdin(Stdio::from(listener)).stdout(Stdio::from(theirs)).stderr(Stdio::null());
        let process = Process::spawn(&mut command).context("its process does not start")?;
        Ok(KeeperConnection { socket, process, mark })
    }

    /// Ends the keeper. Returns how it ended.
    fn end(self, limit: &Timespec) -> String {
        let KeeperConnection { socket, process, .. } = self;
        drop(socket);
        process.end(limit)
    }

    /// Returns all that the keeper has.
    fn list(&self) -> Result<Found> {
        keeper::say(self.socket.as_fd(), &Word::List, &[])?;
        listed(&self.socket)
    }
}

/// Returns the list that comes by this socket.
fn listed(socket: &OwnedFd) -> Result<Found> {
    let until = now() + KEEPER_TIMEOUT;
    let (mut found, mut room) = (Found::new(), Vec::new());
    loop {
        match channel::receive(socket.as_fd(), &mut room) {
            Ok(message) => match serde_json::from_slice(&message.bytes)? {
                Word::Keep { name, what } => {
                    // Drop entries of another version, whose keys this one does not know.
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
                let _ = rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit));
            }
            Err(nothing) => return Err(nothing.into()),
        }
    }
}

impl Supervisor {
    /// Finds the keeper of an earlier daemon, or starts one. Returns its entries: if it has died, those that the program before
    /// this one in this process has `handed_on`.
    ///
    /// # Errors
    /// This process may not open all that the keeper has. It stays with the keeper, for a daemon that may.
    pub(super) fn find_or_start_keeper(&mut self, handed_on: Option<OwnedFd>) -> Result<Found> {
        let connection = KeeperConnection::find(&self.place.keeper_socket())?;
        let error = match connection.map(|connection| (connection.list(), connection)) {
            Some((Ok(found), connection)) => {
                self.use_keeper(connection);
                self.deposits.left = found.keys().cloned().collect();
                // To close what waits in it may take long.
                drop(handed_on.map(|socket| Foreign::new(vec![socket])));
                return Ok(found);
            }
            Some((Err(error), _)) if matches!(error.downcast_ref(), Some(Nothing::Lack(_))) => {
                bail!(TOO_FEW_DESCRIPTORS)
            }
            Some((Err(error), connection)) => {
                connection.process.kill();
                Some(error)
            }
            None => None,
        };
        let handed_on = handed_on.map(|socket| listed(&socket));
        let sentence = match (&handed_on, error) {
            (Some(Ok(_)), _) => Some("the keeper is dead; another is told everything anew".to_owned()),
            (_, Some(error)) => {
                Some(format!("everything that the last tasukid had is lost with its keeper: {error:#}"))
            }
            _ => None,
        };
        sentence.into_iter().for_each(|sentence| self.note(About::default(), sentence));
        self.start_keeper();
        let found = handed_on.and_then(Result::ok).unwrap_or_default();
        self.deposits.left = found.keys().cloned().collect();
        Ok(found)
    }

    /// Returns a socket in which all waits that the keeper has, behind this program's file, for the program that goes on as
    /// tasukid. Returns none if the kernel has no room for so much: then the keeper has to live until that has found it.
    pub fn hand_on(&self) -> Option<OwnedFd> {
        let (ours, theirs) = successor::hand_on()?;
        for key in self.all_keys() {
            let Some((what, fds)) = self.deposit_of(&key) else { continue };
            keeper::say(ours.as_fd(), &Word::Keep { name: text(&key), what }, &fds).ok()?;
        }
        keeper::say(ours.as_fd(), &Word::Listed, &[]).ok()?;
        Some(theirs)
    }

    fn use_keeper(&mut self, connection: KeeperConnection) {
        let watched = epoll_add(&self.epoll, connection.socket.as_fd(), Token::KeeperReadable);
        self.deposits.trouble = watched.err().map(|error| format!("the keeper is not watched: {error:#}"));
        self.cells.hold(connection.process.name());
        self.deposits.connection = Some(connection);
    }

    fn start_keeper(&mut self) {
        self.deposits.not_before = now() + KEEPER_RETRY_EVERY;
        match KeeperConnection::start(self.place.folder(), &self.place.keeper_socket()) {
            Ok(connection) => {
                self.use_keeper(connection);
                self.mark_all_deposits();
            }
            Err(error) => {
                let trouble = format!(
                    "there is no keeper ({error:#}): if tasukid dies now, its workers end with it, and cards are opened anew"
                );
                if is_news(&mut self.deposits.trouble, &trouble) {
                    self.note(About::default(), trouble);
                }
            }
        }
    }

    /// Handles a keeper whose end is closed: it never sends anything unasked.
    pub(super) fn on_keeper_hang_up(&mut self) {
        // The event may be of an earlier keeper's socket (`Process::has_ended`).
        let hung_up = |keeper: &mut KeeperConnection| {
            let mut socket = [PollFd::new(&keeper.socket, PollFlags::IN)];
            rustix::event::poll(&mut socket, Some(&Timespec::default())) == Ok(1)
        };
        let Some(connection) = self.deposits.connection.take_if(hung_up) else { return };
        let how = connection.end(&END_TIMEOUT);
        self.note(About::default(), format!("the keeper {how}; another is told everything anew"));
    }

    /// Starts a keeper if there is none, or another if the next daemon would not find it. Not while something is urgent.
    pub(super) fn mend_keeper(&mut self) {
        if now().saturating_sub(self.deposits.looked_at) >= KEEPER_RETRY_EVERY {
            self.look_for_keeper();
        }
        if self.deposits.connection.is_none() && now() >= self.deposits.not_before {
            self.start_keeper();
            self.deposit();
        }
    }

    /// Ends a keeper whose socket was deleted: no other daemon would find it.
    pub(super) fn look_for_keeper(&mut self) {
        self.deposits.looked_at = now();
        let path = self.place.keeper_socket();
        let is_lost = |keeper: &mut KeeperConnection| keeper.mark != socket::mark(&path);
        // Another daemon may have begun in a directory that was deleted: the keeper there is its own.
        if self.place.is_ours()
            && let Some(connection) = self.deposits.connection.take_if(is_lost)
        {
            connection.end(&END_TIMEOUT);
            let sentence = format!("{} was deleted; another keeper is told everything anew", path.display());
            self.note(About::default(), sentence);
        }
    }

    /// Marks this key: the keeper is to get its present state, or to forget it if there is no such thing any more.
    pub(super) fn mark_deposit(&mut self, key: Key) {
        self.deposits.due.insert(key);
    }

    /// Marks everything: the keeper is to have the present state of all, and nothing else.
    pub(super) fn mark_all_deposits(&mut self) {
        if self.adopting {
            return;
        }
        let mut due = std::mem::take(&mut self.deposits.due);
        if !self.awaiting {
            due.extend(std::mem::take(&mut self.deposits.left));
        }
        due.extend(self.all_keys());
        self.deposits.due = due;
    }

    /// Returns the keys of all that the keeper may have.
    fn all_keys(&self) -> BTreeSet<Key> {
        let mut keys = BTreeSet::new();
        keys.extend(self.cards.keys().flat_map(|nic| [Key::Card(*nic), Key::NextPage(*nic), Key::NextMemory(*nic)]));
        keys.extend(self.nodes.keys().cloned().map(Key::ProgramState));
        keys.extend(self.workers.keys().copied().map(Key::Worker));
        keys.extend(self.taps.keys().cloned().map(Key::Tap));
        keys.extend(self.queue_nodes().cloned().map(Key::Queue));
        keys.extend(self.endpoints.keys().flat_map(|label| [Key::Endpoint(label.clone()), Key::Client(label.clone())]));
        keys
    }

    /// Returns whether the keeper has yet to get something.
    pub(super) fn has_deposits_due(&self) -> bool {
        self.deposits.connection.is_none() || !self.deposits.due.is_empty()
    }

    /// Deposits the state of the keys that are due, as far as the keeper has room. Entries of an earlier daemon stay as they
    /// are until all workers have been adopted.
    pub(super) fn deposit(&mut self) {
        while let Some(key) = self.deposits.due.first().cloned() {
            if !self.deposit_one(&key) {
                return;
            }
        }
    }

    /// Deposits the state of one key. Returns whether the keeper has room for more.
    pub(super) fn deposit_one(&mut self, key: &Key) -> bool {
        let Some(connection) = self.deposits.connection.as_ref().filter(|_| !self.adopting) else { return false };
        let name = text(key);
        let said = match self.deposit_of(key) {
            Some((what, fds)) => keeper::say(connection.socket.as_fd(), &Word::Keep { name, what }, &fds),
            None => keeper::say(connection.socket.as_fd(), &Word::Forget { name }, &[]),
        };
        // If the keeper's end is closed, an event reports that. Otherwise it has no room, or the daemon has none for
        // descriptors under way.
        said.is_ok() && {
            self.deposits.due.remove(key);
            true
        }
    }

    /// Returns whether the keeper has the present state of all these keys.
    pub(super) fn is_deposited(&self, keys: &[Key]) -> bool {
        self.deposits.connection.is_some() && !keys.iter().any(|key| self.deposits.due.contains(key))
    }

    /// Returns the present state of a key: text and descriptors.
    fn deposit_of(&self, key: &Key) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        Some(match key {
            Key::Card(nic) => {
                let card = self.cards.get(nic)?;
                let opened = card.opened.as_ref()?;
                let what = CardText {
                    name: card.name().to_owned(),
                    device: card.config.device.to_string(),
                    made_by: opened.made_by,
                    page_of: card.page_of.clone(),
                    turns: card.lease_page_changes.load(0),
                    bundle: opened.bundle.clone(),
                    opened: Some(OpenedText {
                        ring: card.config.ring,
                        mtu: card.config.mtu,
                        wire: card.config.wire.clone(),
                    }),
                };
                let ours = [&card.lease_page.words, &card.lease_page_changes].map(|words| words.region().fd());
                (text(&what), ours.into_iter().chain(channel::lend(&opened.fds)).collect())
            }
            Key::NextPage(nic) => {
                let (node, lease_page) = self.cards.get(nic)?.coming_lease_page.as_ref()?;
                (node.clone(), vec![lease_page.words.region().fd()])
            }
            Key::NextMemory(nic) => {
                let (party, memory) = self.cards.get(nic)?.coming.as_ref()?;
                (text(&ComingText { party: *party, layout: memory.layout.clone() }), channel::lend(&memory.fds))
            }
            Key::ProgramState(node) => (String::new(), vec![self.nodes.get(node)?.program_state.region().fd()]),
            Key::Worker(number) => {
                let worker = self.workers.get(number)?;
                let heartbeat = worker.heartbeat.as_ref()?.region().fd();
                let lines = worker.lines.as_ref().map(Lines::fd);
                (text(&worker.given), std::iter::once(heartbeat).chain(lines).collect())
            }
            Key::Tap(label) => self.taps.get(label)?.deposit()?,
            Key::Queue(node) => {
                let (text, queue) = self.queue_deposit(node)?;
                (text, vec![queue])
            }
            Key::Endpoint(label) => self.endpoints.get(label)?.deposit()?,
            Key::Client(label) => self.endpoints.get(label)?.client_deposit()?,
        })
    }

    /// Ends the keeper: nothing need outlive the daemon any more.
    pub(super) fn end_keeper(&mut self) {
        if let Some(connection) = self.deposits.connection.take() {
            let _ = keeper::say(connection.socket.as_fd(), &Word::End, &[]);
            connection.end(&LAST_END_TIMEOUT);
        }
        let _ = std::fs::remove_file(self.place.keeper_socket());
    }
}

/// Serialises plain data.
fn text<T: Serialize>(what: &T) -> String {
    serde_json::to_string(what).expect("plain data")
}

impl Card {
    /// Restores the device bundle that an earlier daemon left with the keeper, if any. The bundle of a card that is
    /// gone holds only a hung-up socket, and is dropped.
    pub(super) fn restore(&mut self, found: &mut Found, is_used: bool) {
        use super::card::{LeasePage, Memory, Opened, Opening};
        use super::worker::Words;
        let Some((what, mut fds)) = found.remove(&Key::Card(self.number)) else { return };
        let Ok(CardText { name, device, made_by, page_of, turns, bundle, opened }) = serde_json::from_str(&what) else {
            return;
        };
        let is_it = name == self.name() && device == self.config.device.to_string() && fds.len() == bundle.fds + 2;
        if !is_it || (!is_used && fds.iter().any(is_hung_up)) {
            return;
        }
        let lease_page = fds.remove(0);
        let Ok(changes) = Words::adopt(fds.remove(0), size_of::<u64>()) else { return };
        // If the counts differ, the earlier daemon moved the lease to the coming page and died before it told the
        // keeper.
        let (lease_page, page_of) = match (changes.load(0) == turns, found.remove(&Key::NextPage(self.number))) {
            (true, _) => (lease_page, page_of),
            (false, Some((node, mut page))) if page.len() == 1 => (page.remove(0), BTreeSet::from([node])),
            (false, _) => return,
        };
        let Ok(lease_page) = LeasePage::adopt(lease_page) else { return };
        if let Some(OpenedText { ring, mtu, wire }) = opened {
            (self.config.ring, self.config.mtu, self.config.wire) = (ring, mtu, wire);
        }
        (self.page_of, self.lease_page_changes) = (page_of, changes);
        (self.lease_page, self.opened, self.opening) =
            (lease_page, Some(Opened { bundle, fds, made_by }), Opening::Open);
        let coming = found.remove(&Key::NextMemory(self.number));
        self.coming = coming.and_then(|(what, fds)| {
            let ComingText { party, layout } = serde_json::from_str(&what).ok()?;
            Some((party, Memory { layout, fds }))
        });
    }
}

/// Returns whether the other end of this socket is closed.
fn is_hung_up(fd: &OwnedFd) -> bool {
    let mut poll = [PollFd::new(fd, PollFlags::empty())];
    let looked = rustix::event::poll(&mut poll, Some(&Timespec::default()));
    looked.is_ok() && poll[0].revents().contains(PollFlags::HUP)
}
