//! `sim nic` from the command line: the arguments it refuses, and how it ends.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use tasuki_testing::Program;

/// Last line of a card that was given nothing to send.
const SENT_NOTHING: &str = "the card sent 0 frames to nowhere";

/// Returns the last line of a model's output. If the machine held the model up, a line about that comes before it.
fn last_of(said: &str) -> &str {
    said.lines().last().unwrap_or_default()
}

fn start(words: &[&str], stdin: Stdio) -> Program {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki-sim"));
    command.args(["sim", "nic"]).args(words).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    Program::start(&mut command)
}

/// Waits until the model has ended; returns its exit code, standard output and standard error. Neither output fills a
/// pipe.
fn end(mut model: Program) -> (Option<i32>, String, String) {
    let code = model.end();
    let said = std::io::read_to_string(model.0.stdout.take().expect("a pipe")).expect("text");
    let errors = std::io::read_to_string(model.0.stderr.take().expect("a pipe")).expect("text");
    (code, said, errors)
}

#[test]
fn what_cannot_be_is_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    std::fs::write(path("file"), "no socket").expect("a file");
    let _listener = UnixListener::bind(path("taken")).expect("a socket");
    let long = "x".repeat(120);
    for (words, code, what) in [
        (vec!["--socket", &path("file")], 1, "exists and is not a socket; choose another path"),
        (vec!["--socket", &path("taken")], 1, "a socket is at"),
        (vec!["--socket", &path("no/nic")], 1, "does not exist; create it"),
        (vec!["--socket", &path(&long)], 1, "cannot be served at"),
        (vec!["--socket", &path("s"), "--pcap", &path("no/file")], 1, "no/file cannot be written"),
        (vec!["--socket", &path("s"), "--dgram", &path("no/ours"), &path("theirs")], 1, "cannot be bound"),
        (vec!["--stdin"], 1, "standard input is not a socket"),
        (vec!["--stdin", "--lossy"], 1, "add --card virtio-net"),
        (vec!["--stdin", "--without", "mq"], 1, "add --card virtio-net"),
        (vec!["--stdin", "--card", "virtio-net", "--link-up", "5"], 1, "leave --link-up out"),
        (vec!["--stdin", "--card", "rtl8139"], 2, "[possible values: 82574l, virtio-net]"),
        (vec![], 2, "--socket <PATH>|--stdin"),
        (vec!["--socket", &path("s"), "--stdin"], 2, "cannot be used with"),
        (vec!["--stdin", "--rate", "5"], 2, "--source <COUNT>"),
        (vec!["--stdin", "--source", "5", "--rate", "0"], 2, "0 is not in 1.."),
        (vec!["--stdin", "--source", "5", "--size", "63"], 2, "63 is not in 64..=16384"),
        (vec!["--stdin", "--source", "5", "--tap", "t"], 2, "cannot be used with"),
    ] {
        let (ended, said, errors) = end(start(&words, Stdio::null()));
        assert_eq!((ended, said.as_str()), (Some(code), ""), "{words:?}: {errors}");
        assert!(errors.contains(what), "{what:?} is not in {errors}");
        if code == 1 {
            assert_eq!(errors.lines().count(), 1, "one sentence: {errors}");
            assert!(errors.starts_with("tasuki: "), "{errors}");
        }
        assert!(!folder.path().join("s").exists(), "{words:?} leaves nothing behind");
    }
}

#[test]
fn it_serves_until_it_is_told_to_end_and_takes_its_socket_away() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("nic");
    let virtio = ["--card", "virtio-net", "--without", "ring-reset,event-idx", "--lossy"];
    for (signal, card, name) in [
        (Signal::INT, &[][..], "an 82574L at /"),
        (Signal::TERM, &["--card", "82574l"], "an 82574L at /"),
        (Signal::TERM, &virtio, "a virtio network device at /"),
    ] {
        let words = [&["--socket", path.to_str().expect("UTF-8")], card].concat();
        let mut model = start(&words, Stdio::null());
        let out = model.0.stdout.as_mut().expect("a pipe");
        let mut line = [0; 64];
        let len = out.read(&mut line).expect("a pipe");
        assert!(line[..len].starts_with(name.as_bytes()), "{line:?}");
        // A client connects and leaves at once.
        drop(UnixStream::connect(&path).expect("it listens"));
        model.signal(signal);
        let (ended, said, errors) = end(model);
        assert_eq!((ended, last_of(&said), errors.as_str()), (Some(0), SENT_NOTHING, ""));
        assert!(!path.exists());
    }
}

#[test]
fn on_standard_input_it_ends_with_its_driver() {
    let (ours, its) = UnixStream::pair().expect("a pair of sockets");
    let mut model = start(&["--stdin"], OwnedFd::from(its).into());
    assert!(model.is_running());
    drop(ours);
    let (ended, said, errors) = end(model);
    assert_eq!((ended, last_of(&said), errors.as_str()), (Some(0), SENT_NOTHING, ""));
    // The model ends, too, if its client talks nonsense.
    let (mut ours, its) = UnixStream::pair().expect("a pair of sockets");
    let model = start(&["--stdin"], OwnedFd::from(its).into());
    std::io::Write::write_all(&mut ours, &[0xff; 64]).expect("it is there");
    assert_eq!(end(model).0, Some(0));
}
