//! Shared parts of the test files: a server with known methods, child processes that die with their test, a
//! watchdog.
//!
//! A child and its test exchange data through a [`Board`]: shared memory that the child opens by way of `/proc`.

use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tasuki_call::{
    CallError, Client, ClientOptions, Deadline, Deferred, Failure, Request, Server, ServerOptions, State, Successor,
    Turn,
};
use tasuki_shm::arena::{Detach, Geometry};
use tasuki_shm::region::{Pages, Region, Span};
use tasuki_shm::sync::AtomicU64;

pub use tasuki_testing::{Dice, PATIENCE, until};
use tasuki_testing::{Program, process};

/// Answers with the request.
pub const ECHO: u16 = 1;
/// Records the run of the call whose number the request begins with, then acts as [`ECHO`].
pub const COUNT: u16 = 2;
/// Records the run of the call, keeps the server busy until the board's [`GATE`] is open, then acts as [`ECHO`].
pub const HOLD: u16 = 3;
/// Records the run of the call, then kills the server.
pub const DIE: u16 = 4;
/// Records the run of the call, and defers its answer, which is [`ECHO`]'s, until the board's [`RELEASE`] grows.
pub const DEFER: u16 = 5;
/// Drops the request without an answer.
pub const DROP: u16 = 6;
/// Defers the request, then drops it without an answer.
pub const DROP_DEFERRED: u16 = 7;
/// Writes the answer in place, in a slot of the server's. It fills the slot with the request's first byte.
pub const FILL: u16 = 8;
/// Answers with as many bytes as the request's first eight bytes say.
pub const LONG: u16 = 9;
/// Answers with the number of reply slots that the server has free for the calling client.
pub const AUDIT: u16 = 10;

/// Acts as [`COUNT`], but takes so long that a waiting client goes to sleep.
pub const SLOW: u16 = 11;

/// The server's list of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    NoSuchMethod = 404,
}

impl From<Trouble> for u16 {
    fn from(trouble: Trouble) -> u16 {
        match trouble {
            Trouble::NoSuchMethod => 404,
        }
    }
}

/// Board word: [`HOLD`] continues when it is not 0.
pub const GATE: usize = 0;
/// Board word: how often [`HOLD`] was begun.
pub const HELD: usize = 1;
/// Board word: whenever it grows, the server answers the deferred requests, the last one first.
pub const RELEASE: usize = 2;
/// Board word: number of deferred requests.
pub const DEFERRED: usize = 3;
/// First of the board words for the children's marks.
pub const MARKS: usize = 16;
/// First of the board words that count the runs of each call, used if the server has no state for that.
pub const LEDGER: usize = 512;
const BOARD_WORDS: usize = LEDGER + (1 << 16);

/// A child's mark: it has the listening socket and the state.
pub const APPROACHED: u64 = 1;
/// A child's mark: it serves.
pub const SERVING: u64 = 2;
/// A child's mark: it failed to serve.
pub const FAILED: u64 = 3;

/// Arguments of this program that make it a child.
pub const CHILD_ROLE: [&str; 4] = ["--exact", "child_role", "--nocapture", "--test-threads=1"];

/// Returns a deadline that only a hang passes.
pub fn ample() -> Deadline {
    Deadline::within(PATIENCE)
}

/// Returns `len` bytes that differ from call to call and from place to place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut dice = Dice::of(seed);
    let mut bytes: Vec<u8> = seed.to_le_bytes().into();
    while bytes.len() < len {
        bytes.extend(dice.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Returns the reason of a failure. Panics on a reply.
pub fn why<T: std::fmt::Debug>(outcome: Result<T, Failure>) -> CallError {
    outcome.expect_err("the call has no reply").why
}

/// A temporary folder.
#[derive(Debug)]
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Folder(tempfile::Builder::new().prefix("tsk").tempdir().unwrap())
    }

    pub fn socket(&self) -> PathBuf {
        self.join("s")
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Returns a path at which a child finds a descriptor of this process.
pub fn path_of(fd: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()).into()
}

fn open(path: &Path) -> OwnedFd {
    std::fs::File::options().read(true).write(true).open(path).unwrap().into()
}

/// Words that a test and its children share.
#[derive(Debug)]
pub struct Board {
    region: Region,
    words: Span<AtomicU64>,
}

impl Board {
    pub fn new() -> Arc<Self> {
        Self::of(Region::create("test-board", BOARD_WORDS * 8, Pages::Small).unwrap())
    }

    fn of(region: Region) -> Arc<Self> {
        let words = region.span(0, BOARD_WORDS).unwrap();
        Arc::new(Board { region, words })
    }

    pub fn get(&self, word: usize) -> u64 {
        self.words[word].load(SeqCst)
    }

    pub fn set(&self, word: usize, value: u64) {
        self.words[word].store(value, SeqCst);
    }

    pub fn add(&self, word: usize, count: u64) -> u64 {
        self.words[word].fetch_add(count, SeqCst) + count
    }

    pub fn wait(&self, word: usize, value: u64) {
        until(&format!("word {word} is {value}"), || self.get(word) == value);
    }
}

/// The server's handler: implements the methods above.
#[derive(Debug)]
pub struct Worker {
    board: Arc<Board>,
    /// Number of runs of each call.
    ledger: Span<AtomicU64>,
    deferred: Vec<Deferred>,
    released: u64,
}

impl Worker {
    pub fn new(board: &Arc<Board>, state: Option<&State>) -> Self {
        let of_board = || board.region.span(LEDGER * 8, BOARD_WORDS - LEDGER).unwrap();
        let ledger = state.map_or_else(of_board, State::words);
        Worker { board: Arc::clone(board), ledger, deferred: Vec::new(), released: 0 }
    }

    pub fn handle(&mut self, request: Request<'_>) {
        match request.method() {
            ECHO => echo(request),
            COUNT => {
                self.record(&request);
                echo(request);
            }
            SLOW => {
                self.record(&request);
                std::thread::sleep(Duration::from_micros(300));
                echo(request);
            }
            HOLD => {
                self.record(&request);
                self.board.add(HELD, 1);
                let board = Arc::clone(&self.board);
                until("the gate is open", || board.get(GATE) != 0);
                echo(request);
            }
            DIE => {
                self.record(&request);
                rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
                std::thread::park();
            }
            DEFER => {
                self.record(&request);
                self.deferred.push(request.defer());
                self.board.add(DEFERRED, 1);
            }
            DROP => drop(request),
            DROP_DEFERRED => drop(request.defer()),
            FILL => fill(request),
            LONG => {
                let len = usize::try_from(number(&request)).unwrap();
                let _ = request.reply(&pattern(7, len));
            }
            AUDIT => {
                let slots: Vec<_> = std::iter::from_fn(|| request.take_slot().ok()).collect();
                let free = slots.len() as u64;
                drop(slots);
                let _ = request.reply(&free.to_le_bytes());
            }
            other => request.refuse(Trouble::NoSuchMethod, &format!("there is no method {other}")),
        }
    }

    fn record(&self, request: &Request<'_>) {
        self.ledger[usize::try_from(number(request)).unwrap()].fetch_add(1, SeqCst);
    }

    /// Answers the deferred requests between two turns, if the test asks for it.
    pub fn between(&mut self, server: &mut Server) {
        let release = self.board.get(RELEASE);
        if release == self.released {
            return;
        }
        self.released = release;
        while let Some(deferred) = self.deferred.pop() {
            if let Some(request) = server.resume(deferred) {
                echo(request);
            }
        }
    }
}

/// Returns the number that a request begins with.
fn number(request: &Request<'_>) -> u64 {
    let mut bytes = [0; 8];
    request.copy_to(&mut bytes);
    u64::from_le_bytes(bytes)
}

fn echo(request: Request<'_>) {
    let bytes = request.to_vec();
    let _ = request.reply(&bytes);
}

fn fill(request: Request<'_>) {
    let first = request.to_vec().first().copied().unwrap_or_default();
    match request.take_slot() {
        Ok(mut slot) => {
            slot.bytes_mut().fill(first);
            let len = slot.len();
            request.reply_slot(slot, len);
        }
        Err(why) => request.refuse(507_u16, &why.to_string()),
    }
}

type Errand = Box<dyn FnOnce(&mut Server) + Send>;

#[derive(Debug)]
pub struct Host {
    pub path: PathBuf,
    pub board: Arc<Board>,
    stop: Arc<AtomicBool>,
    errands: Sender<Errand>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    pub fn start(path: impl AsRef<Path>, options: ServerOptions) -> Self {
        let board = Board::new();
        let server = Server::bind(&path, options).unwrap();
        let worker = Worker::new(&board, server.state());
        Self::of(server, worker)
    }

    pub fn of(server: Server, worker: Worker) -> Self {
        let (stop, path, board) = (Arc::default(), server.path().to_owned(), Arc::clone(&worker.board));
        let (errands, inbox) = channel();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || host(server, worker, &inbox, &stopped)).into();
        Host { path, board, stop, errands, thread }
    }

    /// Runs a closure on the server, between two of its turns.
    pub fn with<T: Send + 'static>(&self, what: impl FnOnce(&mut Server) -> T + Send + 'static) -> T {
        let (answer, answered) = channel();
        self.errands.send(Box::new(move |server| answer.send(what(server)).unwrap())).unwrap();
        answered.recv_timeout(PATIENCE).unwrap()
    }

    /// Waits until all reply slots are back. Dropped slots go back with later requests.
    pub fn replies_come_back(&self, client: &mut Client) {
        until("all reply slots are back", || {
            let reply = client.call(tasuki_call::Ask::new(ECHO, b"anything to return?"), ample());
            assert_eq!(reply.unwrap().to_vec(), b"anything to return?");
            let census = self.with(|server| server.reply_census());
            (census.owner, census.peer) == (0, 0)
        });
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(ended, Some(Ok(()))), "the server's thread panicked");
        }
    }
}

fn host(mut server: Server, mut worker: Worker, errands: &Receiver<Errand>, stop: &AtomicBool) {
    while !stop.load(SeqCst) {
        while let Ok(errand) = errands.try_recv() {
            errand(&mut server);
        }
        worker.between(&mut server);
        let turn = server.turn(Some(Duration::from_millis(1)), |request| worker.handle(request)).unwrap();
        if turn == Turn::Succeeded {
            return;
        }
    }
}

/// Options of a server that hardly spins, since many tests share two CPUs.
pub fn options() -> ServerOptions {
    ServerOptions { spin: Some(Duration::from_micros(20)), ..ServerOptions::default() }
}

/// A small client: 16 slots in each direction, 64 calls.
pub fn small() -> ClientOptions {
    let pool = Geometry { slot_len: 4096, count: 16 };
    let spin = Some(Duration::from_micros(20));
    ClientOptions {
        ring: 64,
        arena: pool,
        replies: pool,
        spin,
        handshake: Duration::from_secs(20),
        ..ClientOptions::default()
    }
}

pub fn detached(detach: Detach) -> ClientOptions {
    ClientOptions { detach, ..small() }
}

/// Asserts that all slots of this client's arena are free.
pub fn assert_whole(client: &Client) {
    let census = client.census();
    assert_eq!((census.owner, census.peer), (0, 0), "every slot is free: {census:?}");
}

/// A child process. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct Child(Program);

/// Description of a child to start.
#[derive(Debug)]
pub struct Role<'a> {
    /// A role that [`child_role`](crate::child_role) knows.
    pub name: &'a str,
    pub socket: &'a Path,
    pub board: &'a Board,
    /// Index of the board word for the child's mark.
    pub mark: usize,
    pub state: Option<&'a State>,
    /// `TASUKI_CRASH`, and other environment variables for the child.
    pub vars: &'a [(&'a str, String)],
}

impl Role<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(CHILD_ROLE);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.env_remove("TASUKI_CRASH").env_remove("RUST_BACKTRACE");
        command.env("TASUKI_ROLE", self.name).env("TASUKI_PARENT", std::process::id().to_string());
        command.env("TASUKI_SOCKET", self.socket).env("TASUKI_MARK", self.mark.to_string());
        command.env("TASUKI_BOARD", path_of(self.board.region.fd()));
        if let Some(state) = self.state {
            command.env("TASUKI_STATE", path_of(state.fd()));
        }
        command.envs(self.vars.iter().map(|(key, value)| (key, value)));
        command
    }

    /// Starts the child. It dies with this thread at the latest.
    pub fn spawn(&self) -> Child {
        self.board.set(MARKS + self.mark, 0);
        Child(Program::start(&mut self.command()))
    }
}

impl Child {
    pub fn pid(&self) -> Pid {
        self.0.id()
    }

    /// Sends SIGKILL, without waiting for the end.
    pub fn strike(&self) {
        let _ = rustix::process::kill_process(self.pid(), Signal::KILL);
    }

    /// Stops the child, and waits until the kernel reports it as stopped.
    pub fn stop(&self) {
        self.0.signal(Signal::STOP);
        until("it has stopped", || process::stat(self.pid()).is_some_and(|(_, fields)| fields[0] == "T"));
    }

    /// Lets a stopped child continue.
    pub fn go_on(&self) {
        self.0.signal(Signal::CONT);
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.0.0.wait().unwrap()
    }

    pub fn kill(&mut self) {
        self.0.kill();
    }

    /// Returns the exit status if the child has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.0.try_wait().unwrap()
    }

    /// Waits for the child's end, which must be by SIGKILL.
    pub fn was_killed(&mut self) {
        let status = self.wait();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{status}");
    }

    /// Waits for the child's end, which must be a success.
    pub fn succeeded(&mut self) {
        let status = self.wait();
        assert!(status.success(), "{status}");
    }
}

/// A child's instructions from its test.
#[derive(Debug)]
pub struct Told {
    pub role: String,
    pub socket: PathBuf,
    pub board: Arc<Board>,
    pub mark: usize,
    pub state: Option<State>,
}

impl Told {
    /// Reads the instructions. Returns `None` in a process that is not a child.
    pub fn hear() -> Option<Self> {
        let role = std::env::var("TASUKI_ROLE").ok()?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        if std::env::var("TASUKI_PARENT").unwrap() != rustix::process::getppid().unwrap().as_raw_nonzero().to_string() {
            std::process::exit(1);
        }
        let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let board = Board::of(Region::adopt(open(&path("TASUKI_BOARD").unwrap())).unwrap());
        let state = path("TASUKI_STATE").map(|path| State::adopt(open(&path)).unwrap());
        let mark = std::env::var("TASUKI_MARK").unwrap().parse().unwrap();
        Some(Told { role, socket: path("TASUKI_SOCKET").unwrap(), board, mark, state })
    }

    pub fn mark(&self, what: u64) {
        self.board.set(MARKS + self.mark, what);
    }

    pub fn var(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    /// Plays one of the roles that all tests share.
    ///
    /// `server` binds and serves; `standby` serves when the server has died; `taker` makes the server let go within
    /// `TASUKI_LIMIT` ms and serves.
    pub fn act(self) {
        match self.role.as_str() {
            "server" => {
                let options = ServerOptions { state: self.state.as_ref().map(again), ..self.options() };
                let server = Server::bind(&self.socket, options);
                self.serve(server.map_err(|error| error.to_string()));
            }
            "standby" => {
                let successor = self.approach();
                self.serve(successor.stand_by(self.options()).map_err(|error| error.to_string()));
            }
            "taker" => {
                let limit = self.var("TASUKI_LIMIT").and_then(|limit| limit.parse().ok()).unwrap_or(20_000);
                let successor = self.approach();
                let server = successor.take_over(self.options(), Duration::from_millis(limit));
                self.serve(server.map_err(|error| error.to_string()));
            }
            other => panic!("no such role: {other}"),
        }
    }

    pub fn options(&self) -> ServerOptions {
        let spin = self.var("TASUKI_SPIN_US").and_then(|spin| spin.parse().ok()).unwrap_or(20);
        ServerOptions { spin: Some(Duration::from_micros(spin)), ..ServerOptions::default() }
    }

    fn approach(&self) -> Successor {
        match Successor::approach(&self.socket) {
            Ok(successor) => {
                self.mark(APPROACHED);
                successor
            }
            Err(error) => self.fail(&error.to_string()),
        }
    }

    fn fail(&self, why: &str) -> ! {
        if self.var("TASUKI_QUIET").is_none() {
            eprintln!("{}: {why}", self.role);
        }
        self.mark(FAILED);
        std::process::exit(3)
    }

    fn serve(&self, server: Result<Server, String>) {
        let mut server = match server {
            Ok(server) => server,
            Err(why) => self.fail(&why),
        };
        let mut worker = Worker::new(&self.board, server.state());
        self.mark(SERVING);
        let idle = self.var("TASUKI_IDLE_MS").and_then(|idle| idle.parse().ok()).unwrap_or(2);
        loop {
            worker.between(&mut server);
            let wait = Some(Duration::from_millis(idle));
            if server.turn(wait, |request| worker.handle(request)).unwrap() == Turn::Succeeded {
                return;
            }
        }
    }
}

/// Maps the same state again.
pub fn again(state: &State) -> State {
    State::adopt(state.fd().try_clone_to_owned().unwrap()).unwrap()
}

/// A server in a child process, with the memory that it shares with the test.
#[derive(Debug)]
pub struct Stage {
    pub folder: Folder,
    pub board: Arc<Board>,
    pub state: Option<State>,
    next_mark: std::cell::Cell<usize>,
}

impl Stage {
    pub fn new(state_words: usize) -> Self {
        let state = (state_words > 0).then(|| State::create(state_words * 8).unwrap());
        Stage { folder: Folder::new(), board: Board::new(), state, next_mark: 0.into() }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.socket()
    }

    /// Starts a child. Returns it with the index of its mark.
    pub fn spawn(&self, name: &str, vars: &[(&str, String)]) -> (Child, usize) {
        let mark = self.next_mark.replace((self.next_mark.get() + 1) % (LEDGER - MARKS));
        let socket = self.socket();
        let role = Role { name, socket: &socket, board: &self.board, mark, state: self.state.as_ref(), vars };
        (role.spawn(), MARKS + mark)
    }

    /// Starts a child and waits until it sets `mark`.
    pub fn spawn_until(&self, name: &str, mark: u64, vars: &[(&str, String)]) -> Child {
        let (mut child, word) = self.spawn(name, vars);
        until(&format!("{name} says {mark}"), || {
            let ended = child.ended();
            assert!(ended.is_none() || self.board.get(word) == mark, "{name} has ended: {ended:?}");
            self.board.get(word) == mark
        });
        child
    }

    pub fn server(&self) -> Child {
        self.spawn_until("server", SERVING, &[])
    }

    pub fn client(&self, options: &ClientOptions) -> Client {
        Client::connect(self.socket(), options).unwrap()
    }

    /// Returns how often the call `number` was run.
    pub fn runs(&self, number: u64) -> u64 {
        let number = usize::try_from(number).unwrap();
        match &self.state {
            Some(state) => state.words()[number].load(SeqCst),
            None => self.board.get(LEDGER + number),
        }
    }
}

/// Ends the whole test process, and by that its children, unless dropped in time: a hang cannot fail by itself.
#[derive(Debug)]
pub struct Watchdog {
    over: Arc<(Mutex<bool>, Condvar)>,
}

impl Watchdog {
    pub fn new(test: &'static str, limit: Duration) -> Self {
        let over = Arc::new((Mutex::new(false), Condvar::new()));
        let watched = Arc::clone(&over);
        std::thread::spawn(move || {
            let (over, changed) = &*watched;
            let guard = over.lock().unwrap_or_else(PoisonError::into_inner);
            let (guard, _) =
                changed.wait_timeout_while(guard, limit, |over| !*over).unwrap_or_else(PoisonError::into_inner);
            if !*guard {
                // Not a macro: the test harness would capture its output, and the output would be lost.
                let _ = writeln!(std::io::stderr(), "watchdog: {test} took longer than {limit:?}");
                std::process::exit(101);
            }
        });
        Watchdog { over }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.over.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.over.1.notify_all();
    }
}

/// A watchdog named after the test.
#[macro_export]
macro_rules! watched {
    () => {
        $crate::watched!(90)
    };
    ($seconds:expr) => {
        let name = std::thread::current().name().unwrap_or("test").to_owned().leak();
        let _watchdog = $crate::common::Watchdog::new(name, std::time::Duration::from_secs($seconds));
    };
}

/// Returns the variable `TASUKI_CRASH` for a child.
pub fn crash_at(point: &str, nth: u64) -> (&'static str, String) {
    ("TASUKI_CRASH", format!("{point}:{nth}"))
}

pub fn var(name: &'static str, value: impl ToString) -> (&'static str, String) {
    (name, value.to_string())
}

/// Returns the CPU time of all threads of a process.
pub fn cpu_time(pid: Pid) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap();
    let of_task = |task: std::fs::DirEntry| -> u64 {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        stat.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
    };
    Duration::from_nanos(tasks.flatten().map(of_task).sum())
}

/// Returns the resident memory of a process in bytes.
pub fn resident(pid: Pid) -> u64 {
    process::status_bytes(pid, "VmRSS")
}
