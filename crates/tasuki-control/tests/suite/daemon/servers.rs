//! Malicious servers of cards, against the opener that connects to them and the worker that drives their card. They
//! put their own NIC out of use, and the NIC beside it loses no frame.
//!
//! Attacks of docs/design/threat-model.md.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use serde_json::Value;
use tasuki_testing::{Program, descriptors, process};

use super::real::{moves, stop_whole, with_model};
use super::rig::{Rig, pid, until};
use super::storm;

const REGION_READ: u16 = 9;
const DMA_READ: u16 = 11;
const REPLY: u32 = 1;
const REFUSED: u32 = 1 << 5;

/// Makes a message (QEMU's docs/interop/vfio-user.rst): number, command, flags, and the bytes after the header.
fn message(number: u16, command: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(16 + body.len()).expect("short");
    let head = [&number.to_ne_bytes()[..], &command.to_ne_bytes(), &len.to_ne_bytes(), &flags.to_ne_bytes()];
    [&head.concat()[..], &[0; 4], body].concat()
}

/// Reads the next request; returns its number and command.
fn asked(mut stream: &UnixStream) -> io::Result<(u16, u16)> {
    let mut head = [0; 16];
    stream.read_exact(&mut head)?;
    let short = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
    let len = u32::from_ne_bytes([head[4], head[5], head[6], head[7]]);
    stream.read_exact(&mut vec![0; (len as usize).saturating_sub(16)])?;
    Ok((short(0), short(2)))
}

fn answer(mut stream: &UnixStream, body: &[u8]) -> io::Result<()> {
    let (number, command) = asked(stream)?;
    stream.write_all(&message(number, command, REPLY, body))
}

/// Agrees on a version, with these limits.
fn meet(stream: &UnixStream, limits: &str) -> io::Result<()> {
    answer(stream, &[&[0, 0, 1, 0], limits.as_bytes(), &[0]].concat())
}

const LIMITS: &str = "{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576}}";

/// Presents a PCI device with `many` regions and kinds of interrupts.
fn device(stream: &UnixStream, flags: u32, many: u32) -> io::Result<()> {
    let words = [16, flags, many, many];
    answer(stream, &words.iter().flat_map(|word: &u32| word.to_ne_bytes()).collect::<Vec<_>>())
}

/// A server's attack on a client, until the client hangs up.
type Trick = fn(&UnixStream) -> io::Result<()>;

/// Tricks at the opening, each with its row of the threat model.
const AT_ONCE: &[(&str, &str, Trick)] = &[
    ("T31", "hangs up", |_| Ok(())),
    ("T31", "hangs up in a header", |mut it| asked(it).and_then(|_| it.write_all(&[1, 0, 1]))),
    ("T31", "hangs up in an answer", |mut it| {
        let (number, command) = asked(it)?;
        it.write_all(&message(number, command, REPLY, &[0; 64])[..40])
    }),
    ("T31", "says that it answers with 4 GiB", |mut it| {
        let (number, command) = asked(it)?;
        let mut told = message(number, command, REPLY, &[]);
        told[4..8].copy_from_slice(&[0xff; 4]);
        it.write_all(&told)?;
        let much = vec![0; 1 << 20];
        (0..64).try_for_each(|_| it.write_all(&much))
    }),
    ("T31", "says that it answers with less than a header", |mut it| {
        let (number, command) = asked(it)?;
        let mut told = message(number, command, REPLY, &[]);
        told[4..8].copy_from_slice(&3_u32.to_ne_bytes());
        it.write_all(&told)
    }),
    ("T31", "answers what was not asked", |mut it| {
        let (number, command) = asked(it)?;
        it.write_all(&message(number.wrapping_add(7), command, REPLY, &[0; 16]))
    }),
    ("T31", "answers to another command", |mut it| {
        let (number, command) = asked(it)?;
        it.write_all(&message(number, command + 1, REPLY, &[0; 16]))
    }),
    ("T31", "has a version that is no text", |it| answer(it, &[0xff; 4000])),
    ("T31", "has a version that is nested without end", |it| meet(it, &"[".repeat(4000))),
    ("T31", "speaks another version", |it| answer(it, &[7, 0, 9, 0, b'{', b'}', 0])),
    ("T31", "has limits of nothing", |it| {
        meet(it, "{\"capabilities\":{\"max_msg_fds\":0,\"max_data_xfer_size\":0}}").and_then(|()| device(it, 2, 9))
    }),
    ("T31", "has more regions than there are numbers", |it| meet(it, LIMITS).and_then(|()| device(it, 2, u32::MAX))),
    ("T31", "is no PCI device", |it| meet(it, LIMITS).and_then(|()| device(it, 0, 9))),
    ("T31", "answers all with ones", |it| {
        meet(it, LIMITS).and_then(|()| device(it, 3, 9))?;
        loop {
            answer(it, &[0xff; 64])?;
        }
    }),
    ("T31", "answers all with zeros", |it| {
        meet(it, LIMITS).and_then(|()| device(it, 3, 9))?;
        loop {
            answer(it, &[0; 32])?;
        }
    }),
    ("T31", "refuses all", |mut it| {
        meet(it, LIMITS)?;
        loop {
            let (number, command) = asked(it)?;
            let mut told = message(number, command, REPLY | REFUSED, &[]);
            told[12..16].copy_from_slice(&(-1_i32).to_ne_bytes());
            it.write_all(&told)?;
        }
    }),
    ("T31", "asks without end", |mut it| {
        asked(it)?;
        loop {
            it.write_all(&message(9, DMA_READ, 0, &[0; 16]))?;
        }
    }),
    ("T31", "sends descriptors that nobody asked for", |it| {
        let (number, command) = asked(it)?;
        let pipes: Vec<_> = (0..32).map(|_| io::pipe().expect("a pipe")).collect();
        let fds: Vec<_> = pipes.iter().flat_map(|(one, other)| [one.as_fd(), other.as_fd()]).collect();
        descriptors::send(it, &message(number, command, REPLY, &[0, 0, 1, 0, 0]), &fds)?;
        answer(it, &[0; 16])
    }),
    ("T31", "says nothing", |mut it| it.read_to_end(&mut Vec::new()).map(drop)),
];

/// Plays this trick on every client.
fn serve(path: &Path, trick: Trick) {
    let listener = UnixListener::bind(path).expect("a place");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let _ = stream.set_write_timeout(Some(Duration::from_secs(20)));
                let _ = trick(&stream);
                let _ = stream.shutdown(Shutdown::Both);
            });
        }
    });
}

/// A server's attack on a worker that already drives its card.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Later {
    HangsUp,
    SaysNothing,
    WritesNonsense,
    AsksWithoutEnd,
    AnswersOthers,
    /// As if the card were pulled out.
    ReadsAsOnes,
}

/// Later attacks, each with its row of the threat model.
const LATER: &[(&str, &str, Later)] = &[
    ("T32", "hangs up", Later::HangsUp),
    ("T32", "says nothing", Later::SaysNothing),
    ("T32", "writes nonsense", Later::WritesNonsense),
    ("T32", "asks without end", Later::AsksWithoutEnd),
    ("T32", "answers what was not asked", Later::AnswersOthers),
];

/// A model of a card, and a proxy that forwards messages between it and its driver until the attack begins.
pub struct Between {
    _model: storm::Model,
    pub turns: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
}

impl Between {
    pub fn serve(path: PathBuf, wire: &[&str], later: Later) -> Self {
        let behind = path.with_extension("model");
        let model = storm::Model::start(&behind, wire);
        let (turns, ends) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let listener = UnixListener::bind(path).expect("a place");
        let flags = (Arc::clone(&turns), Arc::clone(&ends));
        std::thread::spawn(move || {
            for driver in listener.incoming().flatten() {
                let Ok(card) = UnixStream::connect(&behind) else { continue };
                let (driver, card) = (Arc::new(driver), Arc::new(card));
                for stream in [&driver, &card] {
                    stream.set_read_timeout(Some(Duration::from_millis(20))).expect("a limit");
                }
                let (from, to) = (Arc::clone(&driver), Arc::clone(&card));
                let (turns, ends) = flags.clone();
                let (also, over) = flags.clone();
                std::thread::spawn(move || hand_on(&from, &to, None, &also, &over));
                std::thread::spawn(move || hand_on(&card, &driver, Some(later), &turns, &ends));
            }
        });
        Between { _model: model, turns, ends }
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.ends.store(true, Relaxed);
    }
}

fn hand_on(from: &UnixStream, mut to: &UnixStream, later: Option<Later>, turns: &AtomicBool, ends: &AtomicBool) {
    let mut bytes = vec![0; 1 << 16];
    while !ends.load(Relaxed) {
        let has_turned = turns.load(Relaxed);
        match later.filter(|_| has_turned) {
            Some(Later::HangsUp) => break,
            Some(Later::WritesNonsense) => _ = to.write_all(&[0xa5; 4096]),
            Some(Later::AsksWithoutEnd) => _ = to.write_all(&message(9, DMA_READ, 0, &[0; 16])),
            _ => {}
        }
        let (len, fds) = match descriptors::receive(from, &mut bytes) {
            Ok((0, _)) => break,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_) => break,
            Ok(came) => came,
        };
        match later.filter(|_| has_turned) {
            Some(Later::SaysNothing) => continue,
            // Corrupt the number of the request that it answers.
            Some(Later::AnswersOthers) => bytes[0] ^= 0x55,
            Some(Later::ReadsAsOnes) => read_as_ones(&mut bytes[..len]),
            _ => {}
        }
        if descriptors::send(to, &bytes[..len], &fds).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Overwrites what was read of registers in these messages, which are whole.
fn read_as_ones(mut messages: &mut [u8]) {
    while let Some(&[_, _, command, _, a, b, c, d]) = messages.first_chunk() {
        let len = u32::from_ne_bytes([a, b, c, d]) as usize;
        let Some((message, rest)) = messages.split_at_mut_checked(len) else { break };
        // After the header: offset, region and count.
        if let Some(read) = message.get_mut(32..)
            && u16::from(command) == REGION_READ
        {
            read.fill(0xff);
        }
        messages = rest;
    }
}

pub fn nic(rig: &Rig, name: &str) -> Value {
    let nics = rig.json(&["nic", "list"]);
    nics.as_array().expect("a list").iter().find(|nic| nic["name"] == name).expect("it is there").clone()
}

/// Returns the configuration of a node that has this NIC.
fn node_with(name: &str, socket: &Path) -> String {
    let device = format!("vfio-user:{}", socket.display());
    format!(
        "\n[[node]]\nname = \"of-{name}\"\nwork = \"echo\"\nstandby = false\n\n\
         [[nic]]\nname = {name:?}\ndevice = {device:?}\nnode = \"of-{name}\"\n"
    )
}

const VICTIM: &str = "[[node]]\nname = \"red\"\nwork = \"echo\"\n\n[[nic]]\nname = \"eth0\"\ndevice = \"vfio-user:/nowhere/card.sock\"\nnode = \"red\"\n";

/// rows: in the tables; and of a server that accepts no connection, row: T31
#[test]
fn a_server_of_a_card_that_means_harm_has_its_own_nic_out_of_use_and_no_other() {
    let Some((mut rig, model)) = with_model(VICTIM, &u64::MAX.to_string(), "1000") else { return };
    let path = |kind: &str, number: usize| rig.path(&format!("{kind}{number}.sock"));
    let mut nodes = String::new();
    for (number, (_, _, trick)) in AT_ONCE.iter().enumerate() {
        serve(&path("bad", number), *trick);
        nodes += &node_with(&format!("bad{number}"), &path("bad", number));
    }
    // A server that accepts no connection: its queue is full.
    let deaf = UnixListener::bind(rig.path("deaf.sock")).expect("a place");
    rustix::net::listen(&deaf, 0).expect("a socket");
    let waiting = UnixStream::connect(rig.path("deaf.sock"));
    nodes += &node_with("deaf", &rig.path("deaf.sock"));
    let between: Vec<_> = { LATER.iter().enumerate() }
        .map(|(number, (_, _, later))| {
            nodes += &node_with(&format!("late{number}"), &path("late", number));
            Between::serve(path("late", number), &[], *later)
        })
        .collect();
    rig.configure(|text| text + &nodes);
    rig.start();
    let victim = pid(&rig.await_pair("red").0);
    until(&rig, "frames flow", || moves(&rig) > 0);
    for (number, (_, what, _)) in LATER.iter().enumerate() {
        until(&rig, what, || nic(&rig, &format!("late{number}"))["is"] == "driven");
    }
    between.iter().for_each(|between| between.turns.store(true, Relaxed));
    // A fresh worker has to ask the server.
    let upgrade = |number: usize| {
        let mut command = Command::new(super::rig::TASUKI);
        command.arg("--dir").arg(rig.dir()).args(["worker", "upgrade", &format!("of-late{number}")]);
        Program::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))
    };
    let upgrades: Vec<_> = (0..LATER.len()).map(upgrade).collect();
    let names = { 0..AT_ONCE.len() }.map(|number| (format!("bad{number}"), AT_ONCE[number].1));
    for (name, what) in names.chain([("deaf".to_owned(), "takes no connection")]) {
        until(&rig, what, || nic(&rig, &name)["trouble"].is_string());
        let bad = nic(&rig, &name);
        println!("a server that {what}: {}", bad["trouble"]);
        assert_eq!(bad["is"], "not open", "{what}: {bad}");
        assert!(!bad["trouble"].to_string().contains("did not say why"), "{what}: {bad}");
    }
    for (number, (_, what, _)) in LATER.iter().enumerate() {
        println!("a server that {what} while its card is driven: {}", nic(&rig, &format!("late{number}")));
    }
    let before = moves(&rig);
    until(&rig, "frames flow still", || moves(&rig) > before + 100);
    assert_eq!(pid(&rig.await_worker("red", "drives")), victim, "{}", rig.log());
    drop((between, waiting, upgrades));
    stop_whole(&mut rig, model);
    let folder = rig.path("").display().to_string();
    let opens = |words: &str| words.contains("\0open\0") && words.contains(&folder);
    until(&rig, "no opener is left", || !process::running().any(|(_, words)| opens(&words)));
}
