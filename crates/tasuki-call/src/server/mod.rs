//! The server: one thread that looks at doorbells, and at the rings of clients that rang lately.

mod admission;
mod bind;
mod giving;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};
use tasuki_shm::lease::Tenure;
use tasuki_shm::line::halves;
use tasuki_shm::slots::Census;
use tasuki_shm::wake::{BellSender, bell_pipe, drain, nap_cost, this_cpu};

use super::session::{Deferred, Desk, Request, Session};
use super::state::{State, random_word};
use super::wire::Service;
use super::{Breach, bounded};
use admission::Handshake;
pub use bind::{BindError, Peers, ServerOptions};
use bind::{claim_folder, clear_the_way, listen, raise_descriptor_limit};
use giving::Giving;

/// Number of looks at the rings in a row, with nothing in between.
const LOOKS_PER_ROUND: u32 = 8;

/// Number of rounds of looks at the rings between two looks at the clock.
const ROUNDS_PER_CLOCK: u32 = 16;

/// How often the server yields to clients on its own CPU, one round of looks each time, before they must ring. While
/// they call, two context switches carry each call, and neither side sleeps.
const YIELDS: u32 = 2;

/// Longest time for which a spinning server ignores its descriptors: new clients, first rings, deaths.
const DOORBELLS_EVERY: Duration = Duration::from_micros(100);

/// How long a server without descriptors for one more client lets new clients wait.
const DEAF_FOR: Duration = Duration::from_millis(100);

/// Most events taken from epoll at once.
const EVENTS: usize = 64;

/// Reasons why a server cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The kernel refused to wait for clients.
    #[error("the kernel refused while waiting for clients: {0}")]
    Kernel(#[from] io::Error),
}

/// The result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// The server took this many messages from clients' rings.
    Served(u32),
    /// Clients came or left; [`Server::tally`] and [`Server::clients`] give the numbers.
    Changed,
    /// Nothing happened in the time given.
    Idle,
    /// A successor serves now. This server gets no more requests.
    Succeeded,
}

/// The source of an epoll event.
#[derive(Debug, Clone, Copy)]
enum Source {
    Listener,
    Desk,
    Successor,
    Deaf,
    Handshake(u32),
    Session(u32),
}

impl Source {
    fn data(self) -> EventData {
        EventData::new_u64(match self {
            Source::Listener => 0,
            Source::Desk => 1,
            Source::Successor => 2,
            Source::Deaf => 3,
            Source::Handshake(index) => 1 << 32 | u64::from(index),
            Source::Session(index) => 2 << 32 | u64::from(index),
        })
    }

    fn from_data(data: u64) -> Self {
        match halves(data) {
            (0, 0) => Source::Listener,
            (1, 0) => Source::Desk,
            (2, 0) => Source::Successor,
            (_, 0) => Source::Deaf,
            (index, 1) => Source::Handshake(index),
            (index, _) => Source::Session(index),
        }
    }
}

/// The serving end of calls at one path.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    /// Inode of our socket file, so that we remove no other file.
    inode: Option<u64>,
    /// `None` once a successor serves: clients would wait in an unserved copy after the successor's death.
    listener: Option<OwnedFd>,
    listening: bool,
    /// Ends the time in which the server accepts no clients. In the epoll, so that it also ends in a server that
    /// waits elsewhere.
    deaf: OwnedFd,
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
    /// Sessions whose rings the server polls: those that rang and have not been idle for long.
    hot: Vec<u32>,
    looks: u32,
    /// Looks since the last one that found a request.
    fruitless: u32,
    /// Whether a polled client was on our CPU when a look first found nothing.
    crowded: bool,
    last_doorbells: Instant,
    tally: Tally,
    /// Whether clients came or left since a turn last reported it.
    changed: bool,
}

/// Totals of a server since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of clients that connected.
    pub accepted: u64,
    /// Number of clients that died or closed.
    pub departed: u64,
    /// Number of clients expelled for a breach.
    pub expelled: u64,
    /// Number of messages taken from clients' rings.
    pub served: u64,
}

impl Server {
    /// Serves at `path`. Raises this process's soft limit of open descriptors to the hard limit: a client takes four
    /// descriptors.
    pub fn bind(path: impl AsRef<Path>, options: ServerOptions) -> Result<Self, BindError> {
        let path = path.as_ref().to_owned();
        let _ours = claim_folder(&path);
        let tenure = match &options.state {
            // A process that was given the state and finds no server at the path is its next server.
            Some(state) => {
                clear_the_way(&path)?;
                state.take(state.tenure())?
            }
            None => Tenure { holder: None, epoch: 1 },
        };
        let (listener, inode) = listen(&path, options.mode)?;
        Self::new(path, Some(inode), listener, tenure, options)
    }

    /// Serves on the listening socket and the state of another server.
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
        let (desk_pipe, bell_sender) = bell_pipe().map_err(kernel)?;
        let add = |fd: BorrowedFd<'_>, source: Source| {
            epoll::add(&epoll, fd, source.data(), EventFlags::IN).map_err(|errno| kernel(errno.into()))
        };
        add(listener.as_fd(), Source::Listener)?;
        add(desk_pipe.as_fd(), Source::Desk)?;
        let deaf = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(|errno| kernel(errno.into()))?;
        add(deaf.as_fd(), Source::Deaf)?;
        let service = options
            .state
            .as_ref()
            .map_or_else(|| Service(u128::from(random_word()) << 64 | u128::from(random_word())), State::service);
        Ok(Server {
            path,
            inode,
            listener: Some(listener),
            listening: true,
            deaf,
            epoll,
            spin: options.spin.map_or_else(nap_cost, bounded),
            options,
            service,
            tenure,
            giving: Giving::Serving,
            desk: Arc::new(Desk { dropped: Vec::new().into(), bell_sender: BellSender::own(bell_sender) }),
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
            crowded: false,
            last_doorbells: Instant::now(),
            tally: Tally::default(),
            changed: false,
        })
    }

    /// Returns the path at which the server listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of servers that this state has had, this one included.
    pub fn generation(&self) -> u32 {
        self.tenure.epoch
    }

    /// Returns the state that a successor takes over.
    pub fn state(&self) -> Option<&State> {
        self.options.state.as_ref()
    }

    /// Returns the number of connected clients.
    pub fn clients(&self) -> usize {
        self.clients
    }

    /// Returns the totals so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Counts the reply slots of all clients by holder.
    pub fn reply_census(&self) -> Census {
        self.sessions.iter().flatten().map(|session| session.replies()).fold(Census::default(), |a, b| Census {
            free: a.free + b.free,
            owner: a.owner + b.owner,
            peer: a.peer + b.peer,
        })
    }

    /// Returns the descriptor that becomes readable when a client rings whose ring the server does not poll.
    ///
    /// A server that waits in another epoll must [`arm`](Self::arm) itself first and take a turn afterwards.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Tells every client to ring. Returns false if requests are here already: then take a turn.
    pub fn arm(&mut self) -> bool {
        self.cool(|_| true);
        self.hot.is_empty()
    }

    /// Serves until a successor has taken over. Panics as [`turn`](Self::turn) does.
    pub fn serve(&mut self, mut handler: impl FnMut(Request<'_>)) -> Result<(), ServerError> {
        while self.turn(None, &mut handler)? != Turn::Succeeded {}
        Ok(())
    }

    /// Serves the waiting requests. If there are none, waits for one, at most `wait`: spins first, then sleeps.
    ///
    /// # Panics
    /// If the handler panics. A program may catch that and take another turn: the client of that request is woken, and gets
    /// the reply that the handler gave, or [`STATUS_DROPPED`](super::STATUS_DROPPED).
    pub fn turn(&mut self, wait: Option<Duration>, mut handler: impl FnMut(Request<'_>)) -> Result<Turn, ServerError> {
        let (wait, mut until) = (wait.map(bounded), None);
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

    /// Returns a deferred request for its answer, or `None` if its client is gone.
    ///
    /// Also returns `None` if another server deferred it. That server then answers it with
    /// [`STATUS_DROPPED`](super::STATUS_DROPPED).
    pub fn resume(&mut self, mut deferred: Deferred) -> Option<Request<'_>> {
        // Each server counts its clients anew, so the id alone may name a client of ours.
        if !Arc::ptr_eq(&deferred.desk, &self.desk) {
            return None;
        }
        let open = deferred.open.take()?;
        let desk = &self.desk;
        let session = self.sessions.get_mut(deferred.client.index as usize)?.as_mut()?;
        (session.peer.id == deferred.client).then(|| Request::resume(open, session, desk))
    }

    /// Serves each hot session once. Returns the number of messages taken.
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
        (0..LOOKS_PER_ROUND).any(|_| self.hot_sessions().any(Session::is_ready))
    }

    /// Every [`ROUNDS_PER_CLOCK`] rounds, reads the clock and returns it; then it also parks sessions that have been
    /// idle for long, and looks at the descriptors.
    fn look_around(&mut self, served: u32) -> Result<Option<Instant>, ServerError> {
        self.looks = self.looks.wrapping_add(1);
        self.fruitless = if served > 0 { 0 } else { self.fruitless.saturating_add(1) };
        if self.fruitless == 1 {
            let here = this_cpu();
            let crowded = self.hot_sessions().any(|session| session.is_on(here));
            self.crowded = crowded;
        }
        if self.crowded {
            self.give_way();
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

    /// Yields to the clients on our own CPU, which cannot make requests while we look. If that was in vain, makes
    /// them ring from now on.
    fn give_way(&mut self) {
        match self.fruitless {
            0 => {}
            1..=YIELDS => rustix::thread::sched_yield(),
            _ => {
                let here = this_cpu();
                self.cool(|session| session.is_on(here));
                self.crowded = false;
            }
        }
    }

    fn hot_sessions(&self) -> impl Iterator<Item = &Session> {
        self.hot.iter().filter_map(|&index| self.sessions[index as usize].as_deref())
    }

    /// Parks the hot sessions for which `idle` returns true and which have no waiting request.
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

    /// Waits until `until` for events at the descriptors and handles them. Returns the number of events.
    fn doorbells(&mut self, until: Option<Instant>) -> Result<usize, ServerError> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        // A time that the kernel cannot count is no limit.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; EVENTS];
        let count = match epoll::wait(&self.epoll, &mut events, left.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        self.last_doorbells = Instant::now();
        for event in &events[..count] {
            let (flags, data) = (event.flags, event.data);
            match Source::from_data(data.u64()) {
                Source::Listener => self.accept(),
                Source::Desk => self.clear_desk(),
                Source::Successor => self.hear_successor(),
                Source::Deaf => {
                    let _ = rustix::io::read(&self.deaf, &mut [0; 8]);
                    self.listen_again();
                }
                Source::Handshake(index) => self.shake_hands(index),
                Source::Session(index) if flags.contains(EventFlags::HUP) => self.depart(index),
                Source::Session(index) => self.heat(index),
            }
        }
        self.go_on_giving();
        Ok(count)
    }

    /// Notes that a client rang, and polls its ring from now on.
    fn heat(&mut self, index: u32) {
        let Some(session) = self.sessions.get_mut(index as usize).and_then(Option::as_mut) else { return };
        session.heard(self.last_doorbells);
        if !std::mem::replace(&mut session.hot, true) {
            self.hot.push(index);
        }
    }

    /// Removes a client that died or closed. Its slots in our arena go with the arena.
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

    /// Resumes accepting clients, since descriptors may be free again.
    fn listen_again(&mut self) {
        // A client that connects after the lease was passed waits for the successor.
        if let (false, Some(listener), false) =
            (self.listening, &self.listener, matches!(self.giving, Giving::Passed(_)))
        {
            self.listening = epoll::add(&self.epoll, listener, Source::Listener.data(), EventFlags::IN).is_ok();
            if !self.listening {
                self.listen_later();
            }
        }
    }

    /// Tries to accept clients again after a while.
    fn listen_later(&self) {
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec { tv_nsec: DEAF_FOR.subsec_nanos().into(), ..none };
        let once = Itimerspec { it_interval: none, it_value };
        let _ = timerfd_settime(&self.deaf, TimerfdTimerFlags::empty(), &once);
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
}

impl Drop for Server {
    fn drop(&mut self) {
        // A stand-by continues to listen at the path.
        if !matches!(self.giving, Giving::Serving) {
            return;
        }
        let _ours = claim_folder(&self.path);
        if self.inode.is_some() && std::fs::metadata(&self.path).ok().map(|meta| meta.ino()) == self.inode {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
