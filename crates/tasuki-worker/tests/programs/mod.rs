//! Programs that a test starts and waits for. They end with the test, whatever becomes of it.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// A wait longer than this is a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the command `tasuki-worker nic`.
pub fn worker() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki-worker"));
    command.arg("nic");
    command
}

/// Returns the path of the model, if it is there. The tests of the whole workspace have built it beside the worker.
/// Cargo builds it for the tests of its own package; to test this package alone, build it before.
pub fn model_program() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_tasuki-worker")).with_file_name("tasuki-sim");
    path.exists().then_some(path)
}

/// A program that runs until this value is dropped.
pub struct Program {
    child: Child,
    said: Option<JoinHandle<String>>,
    errors: Option<JoinHandle<String>>,
}

/// Outcome of a program.
#[derive(Debug)]
pub struct Ended {
    /// Exit code; nothing if a signal ended the program.
    pub code: Option<i32>,
    pub said: String,
    pub errors: String,
}

impl Ended {
    /// Returns its standard error, which must be one line that begins with its name.
    pub fn sentence(&self) -> &str {
        assert_eq!(self.errors.lines().count(), 1, "one sentence: {}", self.errors);
        assert!(self.errors.starts_with("tasuki: "), "{}", self.errors);
        self.errors.trim_end()
    }

    /// Checks that it was refused for this reason, and printed nothing else.
    pub fn is_refused(&self, code: i32, why: &str) {
        assert_eq!((self.code, self.said.is_empty()), (Some(code), code == 2 || self.said.is_empty()), "{self:?}");
        assert!(self.errors.contains(why), "{why:?} is not in {}", self.errors);
        assert!(!self.errors.contains("panicked"), "{}", self.errors);
        // The command-line parser reports its own errors, with the usage.
        if code == 1 {
            self.sentence();
        }
    }
}

fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = String::new();
        from.read_to_string(&mut text).expect("a program that writes UTF-8");
        text
    })
}

impl Program {
    pub fn start(command: &mut Command) -> Self {
        let mut program = Self::start_with(command);
        program.said = program.child.stdout.take().map(read_all);
        program
    }

    /// Leaves its standard output unread.
    fn start_with(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("a program that was built");
        let errors = child.stderr.take().map(read_all);
        Program { child, said: None, errors }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child of ours").is_none()
    }

    pub fn signal(&mut self, signal: Signal) {
        assert!(self.is_running(), "it has ended already");
        let id = Pid::from_raw(self.id().try_into().expect("a number of a process")).expect("not 0");
        rustix::process::kill_process(id, signal).expect("a child of ours");
    }

    /// Returns whether it has a handler of its own for `signal`.
    pub fn handles(&mut self, signal: Signal) -> bool {
        assert!(self.is_running(), "it has ended already");
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let bits = caught.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
        bits >> (signal.as_raw() - 1) & 1 == 1
    }

    pub fn end(mut self) -> Ended {
        until("the end of a program", || !self.is_running());
        let status = self.child.wait().expect("a child of ours");
        // A child of the program may hold its pipes, and must not outlive it either.
        let is_read = |thread: &Option<JoinHandle<String>>| thread.as_ref().is_none_or(JoinHandle::is_finished);
        until("the end of what it started", || is_read(&self.said) && is_read(&self.errors));
        let text =
            |thread: Option<JoinHandle<String>>| thread.map_or(String::new(), |thread| thread.join().expect("text"));
        let (said, errors) = (text(self.said.take()), text(self.errors.take()));
        assert!(status.code().is_some() || status.signal().is_some());
        Ended { code: status.code(), said, errors }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A model that listens.
pub struct Model {
    pub program: Program,
    pub socket: PathBuf,
}

impl Model {
    pub fn start(folder: &Path, words: &[&str]) -> Self {
        let socket = folder.join("nic");
        let mut command = Command::new(model_program().expect("looked for before"));
        let mut program = Program::start_with(command.args(["sim", "nic", "--socket"]).arg(&socket).args(words));
        let mut out = BufReader::new(program.child.stdout.take().expect("it was asked for"));
        let mut line = String::new();
        // It listens once it has printed its socket, or it ends.
        out.read_line(&mut line).expect("a pipe");
        program.said = Some(read_all(out));
        assert!(line.contains("an 82574L at"), "{:?}", program.end());
        Model { program, socket }
    }
}

/// Returns the children of a process, with their names.
pub fn children_of(id: u32) -> Vec<(u32, String)> {
    let all = Path::new("/proc").read_dir().expect("/proc").flatten();
    let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter_map(|child: u32| {
        let (name, state) = stat(child)?;
        let parent: u32 = state.get(1)?.parse().ok()?;
        (parent == id).then_some((child, name))
    })
    .collect()
}

/// Returns whether a process exists and is not a zombie.
pub fn is_running(id: u32) -> bool {
    stat(id).is_some_and(|(name, state)| name == "tasuki-sim" && state[0] != "Z" && state[0] != "X")
}

/// Returns the name of a process, and the fields that follow it in the kernel's file: its state, its parent, and
/// more.
fn stat(id: u32) -> Option<(String, Vec<String>)> {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let (name, state) = text.rsplit_once(')')?;
    Some((name.split_once('(')?.1.to_owned(), state.split_whitespace().map(str::to_owned).collect()))
}
