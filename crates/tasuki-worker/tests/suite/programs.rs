//! Programs that a test starts and waits for, the model of a card among them. They end with the test, also when it
//! fails.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use rustix::process::Signal;
use tasuki_testing::{beside, process, until};

/// Returns the command `tasuki-worker nic`.
pub fn worker() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki-worker"));
    command.arg("nic");
    command
}

/// Returns the path of the model, if it is there. The tests of the whole workspace have built it beside the worker.
/// Cargo builds it for the tests of its own package; to test this package alone, build it before.
pub fn model_program() -> Option<PathBuf> {
    beside(env!("CARGO_BIN_EXE_tasuki-worker"), "tasuki-sim")
}

/// Ends a test that needs the model if the model is missing.
macro_rules! need_model {
    () => {
        if $crate::programs::model_program().is_none() {
            return println!("skipped: needs tasuki-sim beside the worker: cargo build --package tasuki-sim");
        }
    };
}
pub(crate) use need_model;

/// Creates a folder for sockets.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a place for sockets")
}

/// A program that runs until this value is dropped.
#[derive(Debug)]
pub struct Program {
    process: tasuki_testing::Program,
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
        program.said = program.process.0.stdout.take().map(read_all);
        program
    }

    /// Leaves its standard output unread.
    fn start_with(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = tasuki_testing::Program::start(command);
        let errors = process.0.stderr.take().map(read_all);
        Program { process, said: None, errors }
    }

    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    pub fn signal(&mut self, signal: Signal) {
        assert!(self.is_running(), "it has ended already");
        self.process.signal(signal);
    }

    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Returns whether it has a handler of its own for `signal`.
    pub fn handles(&mut self, signal: Signal) -> bool {
        assert!(self.is_running(), "it has ended already");
        let caught = u64::from_str_radix(&self.process.status("SigCgt"), 16).unwrap_or(0);
        caught >> (signal.as_raw() - 1) & 1 == 1
    }

    pub fn end(mut self) -> Ended {
        let code = self.process.end();
        // A child of the program may hold its pipes, and must not outlive it either.
        let is_read = |thread: &Option<JoinHandle<String>>| thread.as_ref().is_none_or(JoinHandle::is_finished);
        until("the end of what it started", || is_read(&self.said) && is_read(&self.errors));
        let text =
            |thread: Option<JoinHandle<String>>| thread.map_or(String::new(), |thread| thread.join().expect("text"));
        Ended { code, said: text(self.said.take()), errors: text(self.errors.take()) }
    }
}

/// The model of a card, and its wire.
#[derive(Debug)]
pub struct Model {
    pub program: Program,
    pub socket: PathBuf,
}

impl Model {
    /// Starts a model that listens in `folder`. Its link comes up quickly, unless `words` say otherwise.
    pub fn start(folder: &Path, words: &[&str]) -> Self {
        let socket = folder.join("card");
        let mut command = Command::new(model_program().expect("looked for before"));
        command.args(["sim", "nic", "--socket"]).arg(&socket).args(words);
        if !words.contains(&"--link-up") {
            command.args(["--link-up", "20"]);
        }
        let mut program = Program::start_with(&mut command);
        let mut out = BufReader::new(program.process.0.stdout.take().expect("it was asked for"));
        let mut line = String::new();
        // It listens once it has printed its socket, or it ends.
        out.read_line(&mut line).expect("a pipe");
        program.said = Some(read_all(out));
        assert!(line.contains("an 82574L at"), "{:?}", program.end());
        Model { program, socket }
    }

    /// Returns its report at its end. It ends when all frames have come back and no process has the card any more.
    pub fn report(mut self) -> String {
        until("the end of the model: frames are missing, or somebody has the card still", || {
            !self.program.is_running()
        });
        let ended = self.program.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.said
    }
}

/// Returns the children of a process, with their names.
pub fn children_of(id: u32) -> Vec<(u32, String)> {
    let all = Path::new("/proc").read_dir().expect("/proc").flatten();
    let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter_map(|child: u32| {
        let (name, fields) = process::stat(child)?;
        let parent: u32 = fields.get(1)?.parse().ok()?;
        (parent == id).then_some((child, name))
    })
    .collect()
}

/// Returns the frames in a capture.
pub fn frames_of(file: &Path) -> Vec<Vec<u8>> {
    let mut reader =
        pcap_file::pcap::PcapReader::new(std::fs::File::open(file).expect("the capture")).expect("a capture");
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet.expect("a whole packet");
        assert_eq!(packet.data.len(), packet.orig_len as usize, "a whole frame");
        frames.push(packet.data.into_owned());
    }
    frames
}

/// Returns the number of a frame as docs/design/sim.md lays it out: behind EtherType and mark.
pub fn number(frame: &[u8]) -> Option<u64> {
    let number = frame[12..18] == *b"\x88\xb5tsk\x01";
    number.then(|| u64::from_le_bytes(frame[18..26].try_into().expect("eight bytes")))
}

/// Returns the number of numbered frames in a capture; they must be in order, each once.
pub fn numbered_in(capture: &Path) -> u64 {
    let numbers: Vec<_> = frames_of(capture).iter().filter_map(|frame| number(frame)).collect();
    let count = numbers.len() as u64;
    assert_eq!(numbers, (0..count).collect::<Vec<_>>());
    count
}
