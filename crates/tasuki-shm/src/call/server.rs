//! The server: one thread that looks at doorbells, and at the rings of those who rang lately.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::process::Resource;

use super::Breach;
use super::segment::SegmentError;
use super::session::{ClientId, Deferred, Desk, Handover, Peer, Request, Session, SessionError};
use super::state::{State, random_word};
use super::wire::{self, Hello, Packet, Received, Refusal, Service, Welcome};
use crate::crash;
use crate::enforce::{self, Enforcer};
use crate::lease::{Lost, Tenure};
use crate::region::RegionError;
use crate::slots::Census;
use crate::wake::{Clapper, bell_pipe, drain, nap_cost, this_cpu, timespec};

/// Looks at the rings in a row, with nothing else in between.
const LOOKS_PER_ROUND: u32 = 8;

/// Rounds of looks at the rings between two looks at the clock.
const ROUNDS_PER_CLOCK: u32 = 16;

/// Rounds without fruit after which a client on our own CPU is let run.
const FRUITLESS_ROUNDS: u32 = 1;

/// How long a server that spins leaves its descriptors unlooked at: new clients, first rings, deaths.
const DOORBELLS_EVERY: Duration = Duration::from_micros(100);

/// Connections whose handshake is not finished. More push out the oldest.
const HANDSHAKES_MAX: usize = 64;

/// How long a server that has no descriptors for one more client leaves new ones waiting.
const DEAF_FOR: Duration = Duration::from_millis(100);

/// How long another server may keep us from its folder, which it needs for less than a millisecond; and how often we ask.
const CLAIM_FOR: Duration = Duration::from_secs(1);
const CLAIM_PAUSE: Duration = Duration::from_micros(200);

/// Events taken from epoll at once.
const EVENTS: usize = 64;

/// Who may connect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Peers {
    /// The server's own user, and root.
    #[default]
    SameUser,
    /// These users, by id, and root.
    Users(Vec<u32>),
    /// Everybody whom the socket's mode lets in.
    Any,
}

/// How a server serves.
#[derive(Debug)]
pub struct ServerOptions {
    /// The mode of the socket file.
    pub mode: u32,
    /// Who may connect.
    pub peers: Peers,
    /// Most clients at a time.
    pub clients_max: usize,
    /// Most entries in a client's rings.
    pub ring_max: u32,
    /// Most bytes in a client's two arenas together.
    pub arenas_max: u64,
    /// How long to spin for requests before parking; `None` measures what a nap costs and spins as long.
    pub spin: Option<Duration>,
    /// What a successor takes over. Without it the server can be followed, but not succeeded.
    pub state: Option<State>,
}

impl Default for ServerOptions {
    /// Mode 0600, the same user, 4,096 clients with rings of up to 4,096 entries and 256 MiB of arenas each (touched only when used).
    fn default() -> Self {
        ServerOptions {
            mode: 0o600,
            peers: Peers::SameUser,
            clients_max: 4096,
            ring_max: 4096,
            arenas_max: 256 << 20,
            spin: None,
            state: None,
        }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A server is there already.
    #[error("a server already listens at {}; stop it, succeed it, or choose another path", path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// Something else is there, and stays.
    #[error("{} exists and is not a socket; remove it or choose another path", path.display())]
    Foreign {
        /// Where.
        path: PathBuf,
    },
    /// The folder does not exist.
    #[error("the folder of {} does not exist; create it or choose another path", path.display())]
    NoFolder {
        /// Where.
        path: PathBuf,
    },
    /// We may not create it.
    #[error("this user may not create {}; choose a folder that it may write", path.display())]
    Forbidden {
        /// Where.
        path: PathBuf,
    },
    /// The path does not fit into a socket address.
    #[error("{} is too long: the path of a socket, with its folder, may have 90 bytes; use a shorter one", path.display())]
    PathTooLong {
        /// Where.
        path: PathBuf,
    },
    /// Another server of the same state is alive.
    #[error("another server holds the lease on this state: {0}")]
    Leased(#[from] Lost),
    /// The kernel refused for a reason of its own.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// The step.
        doing: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// Why a server cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The kernel refused to wait.
    #[error("the kernel refused while waiting for clients: {0}")]
    Kernel(#[from] io::Error),
}

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// So many messages were taken from clients' rings.
    Served(u32),
    /// Clients came or left; [`Server::tally`] and [`Server::clients`] say how many.
    Changed,
    /// Nothing came in the time given.
    Idle,
    /// A successor serves now. Nothing will ever come again.
    Succeeded,
}

/// What an epoll event is about.
#[derive(Debug, Clone, Copy)]
enum Source {
    Listener,
    Desk,
    Successor,
    Handshake(u32),
    Session(u32),
}

impl Source {
    fn data(self) -> EventData {
        EventData::new_u64(match self {
            Source::Listener => 0,
            Source::Desk => 1,
            Source::Successor => 2,
            Source::Handshake(index) => 1 << 32 | u64::from(index),
            Source::Session(index) => 2 << 32 | u64::from(index),
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
    fn from_data(data: u64) -> Self {
        match (data >> 32, data as u32) {
            (0, 0) => Source::Listener,
            (0, 1) => Source::Desk,
            (0, _) => Source::Successor,
            (1, index) => Source::Handshake(index),
            (_, index) => Source::Session(index),
        }
    }
}

/// How far a replacement has gone: the giver's table in [`super::successor`].
#[derive(Debug)]
enum Giving {
    Serving,
    Watched(OwnedFd),
    Draining(OwnedFd),
    Passed(OwnedFd),
    Over,
}

/// A client whose Hello has come and whose word that it is detached has not; or whose Hello has not come.
#[derive(Debug)]
struct Handshake {
    socket: OwnedFd,
    index: u32,
    hello: Option<(Hello, Vec<OwnedFd>)>,
}

/// A server.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    /// The inode of our socket file, so that we remove no other.
    inode: Option<u64>,
    /// Taken away when a successor serves: a copy that nobody listens to would keep clients waiting for a dead one.
    listener: Option<OwnedFd>,
    listening: bool,
    epoll: OwnedFd,
    options: ServerOptions,
    spin: Duration,
    service: Service,
    tenure: Tenure,
    giving: Giving,
    desk: Arc<Desk>,
    desk_pipe: OwnedFd,
    handshakes: Vec<Handshake>,
    next_handshake: u32,
    sessions: Vec<Option<Box<Session>>>,
    vacant: Vec<u32>,
    clients: usize,
    next_life: u32,
    /// The sessions whose rings are looked at: those that rang and have not been idle for long.
    hot: Vec<u32>,
    looks: u32,
    /// Looks since one bore fruit.
    fruitless: u32,
    last_doorbells: Instant,
    tally: Tally,
    /// Whether clients came or left since a turn said so.
    changed: bool,
}

/// What a server has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Clients that connected.
    pub accepted: u64,
    /// Clients that died or closed.
    pub departed: u64,
    /// Clients that were expelled for a breach.
    pub expelled: u64,
    /// Messages taken from clients' rings.
    pub served: u64,
}

impl Server {
    /// Serves at `path`. Raises this process's limit of open descriptors to what is allowed: a client takes four.
    pub fn bind(path: impl AsRef<Path>, options: ServerOptions) -> Result<Self, BindError> {
        let path = path.as_ref().to_owned();
        let _ours = claim_folder(&path);
        let tenure = match &options.state {
            // Whoever was given the state and finds nobody at the path is its next server.
            Some(state) => {
                clear_the_way(&path)?;
                state.take(state.tenure())?
            }
            None => Tenure { holder: None, epoch: 1 },
        };
        let (listener, inode) = listen(&path, options.mode)?;
        Self::new(path, Some(inode), listener, tenure, options)
    }

    /// Serves on a socket and a state that another server listened on and kept.
    pub(crate) fn assume(
        path: &Path,
        listener: OwnedFd,
        state: State,
        tenure: Tenure,
        options: ServerOptions,
    ) -> Result<Self, BindError> {
        let inode = std::fs::metadata(path).ok().map(|meta| meta.ino());
        Self::new(path.to_owned(), inode, listener, tenure, ServerOptions { state: Some(state), ..options })
    }

    fn new(
        path: PathBuf,
        inode: Option<u64>,
        listener: OwnedFd,
        tenure: Tenure,
        options: ServerOptions,
    ) -> Result<Self, BindError> {
        raise_descriptor_limit();
        let kernel = |source: io::Error| BindError::Kernel { doing: "setting up the server", source };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| kernel(errno.into()))?;
        let (desk_pipe, clapper) = bell_pipe().map_err(kernel)?;
        let add = |fd: BorrowedFd<'_>, source: Source| {
            epoll::add(&epoll, fd, source.data(), EventFlags::IN).map_err(|errno| kernel(errno.into()))
        };
        add(listener.as_fd(), Source::Listener)?;
        add(desk_pipe.as_fd(), Source::Desk)?;
        let service = options
            .state
            .as_ref()
            .map_or_else(|| Service(u128::from(random_word()) << 64 | u128::from(random_word())), State::service);
        Ok(Server {
            path,
            inode,
            listener: Some(listener),
            listening: true,
            epoll,
            spin: options.spin.unwrap_or_else(nap_cost),
            options,
            service,
            tenure,
            giving: Giving::Serving,
            desk: Arc::new(Desk { dropped: Vec::new().into(), clapper: Clapper::own(clapper) }),
            desk_pipe,
            handshakes: Vec::new(),
            next_handshake: 0,
            sessions: Vec::new(),
            vacant: Vec::new(),
            clients: 0,
            next_life: 0,
            hot: Vec::new(),
            looks: 0,
            fruitless: 0,
            last_doorbells: Instant::now(),
            tally: Tally::default(),
            changed: false,
        })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many servers of this state there were before, and this one.
    pub fn generation(&self) -> u32 {
        self.tenure.epoch
    }

    /// What its successor takes over.
    pub fn state(&self) -> Option<&State> {
        self.options.state.as_ref()
    }

    /// Clients that are connected.
    pub fn clients(&self) -> usize {
        self.clients
    }

    /// What it has done so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Where the reply slots of all clients are.
    pub fn reply_census(&self) -> Census {
        self.sessions.iter().flatten().map(|session| session.replies()).fold(Census::default(), |a, b| Census {
            free: a.free + b.free,
            owner: a.owner + b.owner,
            peer: a.peer + b.peer,
        })
    }

    /// The descriptor that becomes readable when a client rings whom the server does not look at by itself.
    ///
    /// A server that waits in another epoll [arms](Self::arm) itself before, and takes a turn after.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Tells every client to ring; says whether that holds (false: requests are here already, take a turn).
    pub fn arm(&mut self) -> bool {
        self.cool(|_| true);
        self.hot.is_empty()
    }

    /// Serves until a successor has taken over.
    pub fn serve(&mut self, mut handler: impl FnMut(Request<'_>)) -> Result<(), ServerError> {
        while self.turn(None, &mut handler)? != Turn::Succeeded {}
        Ok(())
    }

    /// Serves what is there; if nothing is, waits for it, at most `wait`: spinning, then asleep.
    pub fn turn(&mut self, wait: Option<Duration>, mut handler: impl FnMut(Request<'_>)) -> Result<Turn, ServerError> {
        let mut until = None;
        self.go_on_giving();
        loop {
            if matches!(self.giving, Giving::Over) {
                return Ok(Turn::Succeeded);
            }
            let served = if self.is_serving() { self.serve_hot(&mut handler) } else { 0 };
            let clock = self.look_around(served)?;
            if served > 0 {
                return Ok(Turn::Served(served));
            }
            if std::mem::take(&mut self.changed) {
                return Ok(Turn::Changed);
            }
            if let (Some(now), Some(wait)) = (clock, wait)
                && now >= *until.get_or_insert(now + wait)
            {
                return Ok(Turn::Idle);
            }
            if self.hot.is_empty() || !self.is_serving() {
                let until = wait.map(|wait| *until.get_or_insert_with(|| Instant::now() + wait));
                if self.doorbells(until)? == 0 && until.is_some_and(|until| Instant::now() >= until) {
                    return Ok(Turn::Idle);
                }
            }
        }
    }

    fn is_serving(&self) -> bool {
        matches!(self.giving, Giving::Serving | Giving::Watched(_))
    }

    /// Gives back a request whose answer was put off; `None` when its client is gone.
    pub fn resume(&mut self, mut deferred: Deferred) -> Option<Request<'_>> {
        let open = deferred.open.take()?;
        let desk = &self.desk;
        let session = self.sessions.get_mut(deferred.client.index as usize)?.as_mut()?;
        (session.peer.id == deferred.client).then(|| Request::resume(open, session, desk))
    }

    /// Serves the hot sessions once round; says how many messages there were.
    fn serve_hot<H: FnMut(Request<'_>)>(&mut self, handler: &mut H) -> u32 {
        if !self.any_ready() {
            return 0;
        }
        let mut served = 0;
        let mut position = 0;
        while let Some(&index) = self.hot.get(position) {
            let session = self.sessions[index as usize].as_mut().expect("a hot session exists");
            match session.serve(&self.desk, handler) {
                Ok(count) => {
                    served += count;
                    position += 1;
                }
                Err(breach) => self.expel(index, breach),
            }
        }
        self.tally.served += u64::from(served);
        served
    }

    /// Whether a hot session has a request, after a few looks at each.
    #[inline]
    fn any_ready(&self) -> bool {
        let ready = |index: &u32| self.sessions[*index as usize].as_ref().is_some_and(|session| session.is_ready());
        (0..LOOKS_PER_ROUND).any(|_| self.hot.iter().any(ready))
    }

    /// Now and then, looks at the clock (and says so): parks sessions that have been idle for long, and looks at the
    /// descriptors.
    fn look_around(&mut self, served: u32) -> Result<Option<Instant>, ServerError> {
        self.looks = self.looks.wrapping_add(1);
        self.fruitless = if served > 0 { 0 } else { self.fruitless.saturating_add(1) };
        if self.fruitless == FRUITLESS_ROUNDS {
            // Who shares our CPU cannot ask while we look.
            let here = this_cpu();
            self.cool(|session| session.is_on(here));
        }
        if !self.looks.is_multiple_of(ROUNDS_PER_CLOCK) {
            return Ok(None);
        }
        let now = Instant::now();
        let spin = self.spin;
        self.cool(|session| session.idle_at(now) >= spin);
        if now.duration_since(self.last_doorbells) >= DOORBELLS_EVERY {
            self.doorbells(Some(now))?;
        }
        Ok(Some(now))
    }

    /// Parks the hot sessions that `idle` names and that have nothing to be served.
    fn cool(&mut self, mut idle: impl FnMut(&mut Session) -> bool) {
        let mut position = 0;
        while let Some(&index) = self.hot.get(position) {
            let session = self.sessions[index as usize].as_mut().expect("a hot session exists");
            if !idle(session) {
                position += 1;
                continue;
            }
            match session.park() {
                Ok(true) => {
                    session.hot = false;
                    self.hot.swap_remove(position);
                }
                Ok(false) => position += 1,
                Err(breach) => self.expel(index, breach),
            }
        }
    }

    /// Waits until `until` for something to happen at the descriptors and does what is needed; says how much happened.
    fn doorbells(&mut self, until: Option<Instant>) -> Result<usize, ServerError> {
        let deaf = (!self.listening).then(|| Instant::now() + DEAF_FOR);
        let until = [until, deaf].into_iter().flatten().min();
        let left = until.map(|until| timespec(until.saturating_duration_since(Instant::now())));
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; EVENTS];
        let count = match epoll::wait(&self.epoll, &mut events, left.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        self.last_doorbells = Instant::now();
        if deaf.is_some_and(|until| until <= self.last_doorbells) {
            self.listen_again();
        }
        for event in &events[..count] {
            let (flags, data) = (event.flags, event.data);
            match Source::from_data(data.u64()) {
                Source::Listener => self.accept(),
                Source::Desk => self.clear_desk(),
                Source::Successor => self.hear_successor(),
                Source::Handshake(index) => self.shake_hands(index),
                Source::Session(index) if flags.contains(EventFlags::HUP) => self.depart(index),
                Source::Session(index) => self.heat(index),
            }
        }
        self.go_on_giving();
        Ok(count)
    }

    /// A client rang.
    fn heat(&mut self, index: u32) {
        let Some(session) = self.sessions.get_mut(index as usize).and_then(Option::as_mut) else { return };
        session.heard(self.last_doorbells);
        if !std::mem::replace(&mut session.hot, true) {
            self.hot.push(index);
        }
    }

    /// A client died or closed. Its slots in our arena are gone with the arena.
    fn depart(&mut self, index: u32) {
        if self.remove(index).is_some() {
            self.tally.departed += 1;
        }
    }

    fn expel(&mut self, index: u32, breach: Breach) {
        if let Some(session) = self.remove(index) {
            session.expel(breach);
            self.tally.expelled += 1;
        }
    }

    fn remove(&mut self, index: u32) -> Option<Box<Session>> {
        let session = self.sessions.get_mut(index as usize)?.take()?;
        self.hot.retain(|hot| *hot != index);
        self.vacant.push(index);
        self.clients -= 1;
        self.changed = true;
        self.listen_again();
        Some(session)
    }

    /// There may be descriptors again.
    fn listen_again(&mut self) {
        // Who connects after the lease was passed waits for the successor.
        if let (false, Some(listener), false) =
            (self.listening, &self.listener, matches!(self.giving, Giving::Passed(_)))
        {
            self.listening = epoll::add(&self.epoll, listener, Source::Listener.data(), EventFlags::IN).is_ok();
        }
    }

    fn stop_listening(&mut self) {
        let Some(listener) = &self.listener else { return };
        self.listening = self.listening && epoll::delete(&self.epoll, listener).is_err();
    }

    fn clear_desk(&mut self) {
        drain(self.desk_pipe.as_fd());
        for (client, open) in self.desk.take_dropped() {
            if let Some(session) = self.sessions.get_mut(client.index as usize).and_then(Option::as_mut)
                && session.peer.id == client
            {
                session.answer_dropped(open);
            }
        }
    }

    fn accept(&mut self) {
        // One at a time: the listener stays readable while more wait, and clients have their turn in between.
        let Some(listener) = &self.listener else { return };
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => self.begin_handshake(socket),
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) if !self.handshakes.is_empty() => {
                // Who has connected and says nothing makes place.
                self.handshakes.remove(0);
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                // They wait in the backlog for a while.
                self.stop_listening();
            }
            Err(_) => {}
        }
    }

    fn begin_handshake(&mut self, socket: OwnedFd) {
        if self.handshakes.len() == HANDSHAKES_MAX {
            self.handshakes.remove(0);
        }
        let index = self.next_handshake;
        self.next_handshake = self.next_handshake.wrapping_add(1);
        if epoll::add(&self.epoll, &socket, Source::Handshake(index).data(), EventFlags::IN).is_ok() {
            self.handshakes.push(Handshake { socket, index, hello: None });
        }
    }

    fn shake_hands(&mut self, index: u32) {
        let Some(position) = self.handshakes.iter().position(|shake| shake.index == index) else { return };
        let mut shake = self.handshakes.remove(position);
        let received = match wire::receive(shake.socket.as_fd()) {
            Ok(Some(received)) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.handshakes.insert(position, shake),
            Ok(None) | Err(_) => return,
        };
        let Received { packet, fds } = received;
        let answer = match (packet, shake.hello.take()) {
            (Ok(Packet::Succeed), None) => return self.show_estate(shake.socket),
            (Ok(Packet::Hello(hello)), None) if hello.enforced_base.is_some() => {
                shake.hello = Some((hello, fds));
                return self.handshakes.push(shake);
            }
            (Ok(Packet::Hello(hello)), None) => self.admit(&shake.socket, &hello, fds),
            (Ok(Packet::Detached), Some((hello, fds))) => self.admit(&shake.socket, &hello, fds),
            (Err(wire::Malformed::Version(client)), _) => {
                Err(Refusal::WrongVersion { server: wire::VERSION.into(), client: client.into() })
            }
            _ => Err(Refusal::BadMemory),
        };
        if let Err(refusal) = answer {
            let _ = wire::send(shake.socket.as_fd(), &Packet::Refused(refusal), &[]);
        }
    }

    /// Makes a session of a Hello and welcomes the client.
    fn admit(&mut self, socket: &OwnedFd, hello: &Hello, fds: Vec<OwnedFd>) -> Result<(), Refusal> {
        crash::point("server.accept.hello");
        let creds = rustix::net::sockopt::socket_peercred(socket).map_err(|_| Refusal::BadMemory)?;
        let (pid, uid) = (creds.pid.as_raw_nonzero().get(), creds.uid.as_raw());
        self.check(hello, uid)?;
        let mut fds = fds.into_iter();
        let (Some(segment), Some(arena)) = (fds.next(), fds.next()) else { return Err(Refusal::BadMemory) };
        let enforcer = match (hello.enforced_base, fds.next()) {
            (None, _) => None,
            (Some(base), Some(uffd)) => {
                enforce::inspect(pid.cast_unsigned(), base, uffd.as_fd()).map_err(|_| Refusal::NotEnforceable)?;
                Some(Enforcer::new(uffd, base, hello.arena.slot_len))
            }
            (Some(_), None) => return Err(Refusal::BadMemory),
        };
        let index = self
            .vacant
            .last()
            .copied()
            .unwrap_or_else(|| u32::try_from(self.sessions.len()).expect("below clients_max"));
        let peer = Peer { id: ClientId { index, life: self.next_life }, uid };
        let (session, theirs) =
            Session::new(peer, hello, [segment.as_fd(), arena.as_fd()], enforcer).map_err(|error| match error {
                // Mapping theirs takes address space of ours.
                SessionError::Theirs(SegmentError::Memory(RegionError::NoMemory { .. })) => Refusal::NoMemory,
                SessionError::Theirs(_) => Refusal::BadMemory,
                SessionError::Memory(_) | SessionError::Pipes(_) => Refusal::NoMemory,
            })?;
        let data = Source::Session(index).data();
        epoll::add(&self.epoll, session.pipe(), data, EventFlags::IN | EventFlags::ET)
            .map_err(|_| Refusal::NoMemory)?;
        self.welcome(socket, hello, &session, theirs)?;
        self.seat(index, session);
        crash::point("server.accept.welcomed");
        Ok(())
    }

    fn check(&self, hello: &Hello, uid: u32) -> Result<(), Refusal> {
        let options = &self.options;
        let allowed = match &options.peers {
            Peers::Any => true,
            Peers::SameUser => uid == rustix::process::geteuid().as_raw() || uid == 0,
            Peers::Users(users) => users.contains(&uid) || uid == 0,
        };
        if !allowed {
            return Err(Refusal::NotAllowed { uid: uid.into() });
        }
        if hello.resumes.is_some_and(|service| service != self.service) {
            return Err(Refusal::OtherService);
        }
        if self.clients >= options.clients_max {
            return Err(Refusal::TooManyClients { max: options.clients_max as u64 });
        }
        if !hello.ring.is_power_of_two() || hello.ring < 2 || hello.ring > options.ring_max {
            return Err(Refusal::RingSize { asked: hello.ring.into(), max: options.ring_max.into() });
        }
        let asked = (hello.arena.len() as u64).saturating_add(hello.replies.len() as u64);
        if asked > options.arenas_max || !hello.arena.is_sound() || !hello.replies.is_sound() {
            return Err(Refusal::ArenaSize { asked, max: options.arenas_max });
        }
        Ok(())
    }

    fn welcome(&self, socket: &OwnedFd, hello: &Hello, session: &Session, theirs: Handover) -> Result<(), Refusal> {
        let welcome =
            Welcome { service: self.service, generation: self.tenure.epoch, ring: hello.ring, replies: hello.replies };
        let [segment, replies] = session.memory();
        let fds = [segment, replies, theirs.ring_end.as_fd(), theirs.sleep_end.as_fd()];
        wire::send(socket.as_fd(), &Packet::Welcome(welcome), &fds).map_err(|_| Refusal::NoMemory)
    }

    fn seat(&mut self, index: u32, session: Session) {
        match self.vacant.pop() {
            Some(_) => self.sessions[index as usize] = Some(Box::new(session)),
            None => self.sessions.push(Some(Box::new(session))),
        }
        self.next_life = self.next_life.wrapping_add(1);
        self.clients += 1;
        self.changed = true;
        self.tally.accepted += 1;
    }

    /// Serving → Watched: gives a stand-by the listening socket and the state.
    fn show_estate(&mut self, socket: OwnedFd) {
        let refuse = |refusal| drop(wire::send(socket.as_fd(), &Packet::Refused(refusal), &[]));
        let (Some(state), Some(listener)) = (&self.options.state, &self.listener) else {
            return refuse(Refusal::NoEstate);
        };
        let uid = rustix::net::sockopt::socket_peercred(&socket).map(|creds| creds.uid.as_raw());
        if !uid.is_ok_and(|uid| uid == rustix::process::geteuid().as_raw() || uid == 0) {
            return refuse(Refusal::NoEstate);
        }
        if !matches!(self.giving, Giving::Serving) {
            return refuse(Refusal::Watched);
        }
        let estate = Packet::Estate { generation: self.tenure.epoch };
        let sent = wire::send(socket.as_fd(), &estate, &[listener.as_fd(), state.fd()]);
        // It was watched as a handshake.
        let watched = epoll::modify(&self.epoll, &socket, Source::Successor.data(), EventFlags::IN);
        if sent.is_ok() && watched.is_ok() {
            self.giving = Giving::Watched(socket);
        }
    }

    /// What the successor says, by the giver's table.
    fn hear_successor(&mut self) {
        let (Giving::Watched(socket) | Giving::Draining(socket) | Giving::Passed(socket)) = &self.giving else {
            return;
        };
        let heard = match wire::receive(socket.as_fd()) {
            Ok(Some(received)) => received.packet.ok(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Ok(None) | Err(_) => None,
        };
        self.giving = match (std::mem::replace(&mut self.giving, Giving::Serving), heard) {
            (Giving::Watched(socket), Some(Packet::Release)) => Giving::Draining(socket),
            (Giving::Passed(_), Some(Packet::Taken)) => Giving::Over,
            (Giving::Passed(_), None) => self.take_back(),
            (Giving::Watched(_) | Giving::Draining(_), None) => Giving::Serving,
            // Anything else is out of turn and says nothing.
            (giving, _) => giving,
        };
        match self.giving {
            Giving::Over => self.leave(),
            _ => self.listen_again(),
        }
    }

    /// Draining → Passed, once every request that was begun is answered.
    fn go_on_giving(&mut self) {
        if !matches!(self.giving, Giving::Draining(_)) {
            return;
        }
        if self.sessions.iter().flatten().any(|session| session.unanswered() > 0) {
            return;
        }
        let Giving::Draining(socket) = std::mem::replace(&mut self.giving, Giving::Over) else {
            unreachable!("just looked")
        };
        let state = self.options.state.as_ref().expect("only a server with state is watched");
        if state.pass(self.tenure).is_err() {
            // Somebody else took the lease by force: we are no longer the server.
            return self.leave();
        }
        crash::point("giver.passed");
        // Who is still shaking hands starts again with the successor.
        self.stop_listening();
        self.handshakes.clear();
        let _ = wire::send(socket.as_fd(), &Packet::Released, &[]);
        crash::point("giver.released");
        self.giving = Giving::Passed(socket);
    }

    /// The successor died before it said that it had taken over: whatever the lease says, nobody else serves.
    fn take_back(&mut self) -> Giving {
        let state = self.options.state.as_ref().expect("only a server with state is watched");
        match state.take(state.tenure()) {
            Ok(tenure) => {
                self.tenure = tenure;
                Giving::Serving
            }
            Err(_) => Giving::Over,
        }
    }

    /// The successor serves: our clients learn it by the end of their pipes.
    fn leave(&mut self) {
        self.hot.clear();
        self.sessions.clear();
        self.vacant.clear();
        self.clients = 0;
        self.handshakes.clear();
        self.inode = None;
        self.stop_listening();
        self.listener = None;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A stand-by goes on listening at the path.
        if !matches!(self.giving, Giving::Serving) {
            return;
        }
        let _ours = claim_folder(&self.path);
        if self.inode.is_some() && std::fs::metadata(&self.path).ok().map(|meta| meta.ino()) == self.inode {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Keeps other servers from binding or removing a socket in the same folder while the result lives: between finding a dead
/// server's socket and removing it, somebody else could have put a living one there.
///
/// Who cannot have the lock, or not soon, goes on without: anybody who may read the folder could hold it for ever.
fn claim_folder(path: &Path) -> Option<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    let until = Instant::now() + CLAIM_FOR;
    while let Err(Errno::WOULDBLOCK) = rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        if Instant::now() >= until {
            return None;
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
    Some(folder)
}

/// Removes a socket file that a dead server left behind; leaves everything else alone.
fn clear_the_way(path: &Path) -> Result<(), BindError> {
    let at = || path.to_owned();
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(BindError::Foreign { path: at() }),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(BindError::Forbidden { path: at() });
        }
        Err(_) => return Ok(()),
    }
    let probe = wire::socket().map_err(|source| BindError::Kernel { doing: "making a socket", source })?;
    // A server that hangs, with a full backlog, is there too.
    rustix::io::ioctl_fionbio(&probe, true)
        .map_err(|errno| BindError::Kernel { doing: "making a socket", source: errno.into() })?;
    let address = wire::address(path).map_err(|_| BindError::PathTooLong { path: at() })?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => drop(std::fs::remove_file(path)),
        Err(Errno::NOENT) => {}
        _ => return Err(BindError::InUse { path: at() }),
    }
    Ok(())
}

/// A listening socket at `path`, and its inode. It appears there with its mode set and listening already.
fn listen(path: &Path, mode: u32) -> Result<(OwnedFd, u64), BindError> {
    clear_the_way(path)?;
    let at = || path.to_owned();
    let kernel = |doing| move |errno: Errno| BindError::Kernel { doing, source: errno.into() };
    let listener = wire::socket().map_err(|source| BindError::Kernel { doing: "making a socket", source })?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let draft = path.with_file_name(name);
    let _ = std::fs::remove_file(&draft);
    let address = wire::address(&draft).map_err(|_| BindError::PathTooLong { path: at() })?;
    rustix::net::bind(&listener, &address).map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => BindError::NoFolder { path: at() },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => BindError::Forbidden { path: at() },
        errno => kernel("binding the socket")(errno),
    })?;
    let placed = place(&listener, &draft, path, mode);
    let _ = std::fs::remove_file(&draft);
    placed.map(|inode| (listener, inode))
}

/// Opens the drafted socket for business, under its real name, unless somebody was quicker.
fn place(listener: &OwnedFd, draft: &Path, path: &Path, mode: u32) -> Result<u64, BindError> {
    let kernel = |doing| move |source: io::Error| BindError::Kernel { doing, source };
    std::fs::set_permissions(draft, Permissions::from_mode(mode)).map_err(kernel("setting the socket's mode"))?;
    rustix::net::listen(listener, 1024).map_err(|errno| kernel("listening")(errno.into()))?;
    rustix::io::ioctl_fionbio(listener, true).map_err(|errno| kernel("listening")(errno.into()))?;
    std::fs::hard_link(draft, path).map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => BindError::InUse { path: path.to_owned() },
        _ => kernel("naming the socket")(source),
    })?;
    Ok(std::fs::metadata(path).map_err(kernel("looking at the socket"))?.ino())
}

/// As many descriptors as the hard limit allows. Where that fails, fewer clients fit, and they are told.
fn raise_descriptor_limit() {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        let _ = rustix::process::setrlimit(Resource::Nofile, limit);
    }
}
