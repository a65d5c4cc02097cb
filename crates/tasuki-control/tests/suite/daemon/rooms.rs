//! Network namespaces, and programs in them that count the traffic between them. Needs root.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tasuki_tap::namespace::Namespace;
use tasuki_testing::Program;

use super::rig::{Rig, until};
use super::storm::beside;

/// Size of a card's burst: the most frames that a killed worker has handled and not reported.
pub const BURST: u64 = 32;

/// A network namespace that exists as long as a process does.
pub struct Room(Program);

impl Room {
    pub fn new() -> Self {
        let mut command = Command::new("unshare");
        // It ends by itself, even if the test does not end it.
        command.args(["--net", "--", "sleep", "900"]).stdin(Stdio::null());
        let room = Room(Program::start(&mut command));
        let ours = std::fs::read_link("/proc/self/ns/net").expect("a namespace");
        tasuki_testing::until("a namespace from unshare", || {
            !std::fs::read_link(room.path()).is_ok_and(|its| its == ours)
        });
        room
    }

    /// Returns the path of the namespace.
    pub fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    /// Executes `work` in the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Namespace::named(&self.path()).within(|| Ok(work())).expect("a namespace")
    }

    /// Runs `ip` in the namespace, which must succeed; returns its output.
    pub fn ip(&self, words: &str) -> String {
        let output = self.within(|| Command::new("ip").args(words.split(' ')).output().expect("ip (iproute2)"));
        assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs `ping` in the namespace until `count` requests are answered. Returns what is wrong if one was not, or twice.
    pub fn ping(&self, count: usize, words: &[&str]) -> Option<String> {
        let count_too = count.to_string();
        // Without a deadline, ping waits for the last answers for two round trips, and heeds no `-W`: a machine without a
        // CPU stands still for longer.
        let words = [&["-c", &count_too, "-w", "120"], words].concat();
        let said = self.within(|| Command::new("ping").args(words).output().expect("ping"));
        let said = String::from_utf8_lossy(&said.stdout);
        let number = |line: &str| {
            line.split_once(" bytes from ")?.1.split_once("icmp_seq=")?.1.split(' ').next()?.parse::<usize>().ok()
        };
        let (answers, rest): (Vec<_>, Vec<_>) = said.lines().partition(|line| number(line).is_some());
        let numbers: Vec<_> = answers.into_iter().filter_map(number).collect();
        let last = numbers.iter().max().copied().unwrap_or_default();
        let times = |it: &usize| numbers.iter().filter(|number| *number == it).count();
        let none: Vec<_> = (1..=last).filter(|it| times(it) == 0).collect();
        let twice: Vec<_> = (1..=last).filter(|it| times(it) > 1).collect();
        let is_whole = numbers.len() >= count && none.is_empty() && twice.is_empty();
        (!is_whole).then(|| format!("not answered: {none:?}, answered twice: {twice:?}\n{}", rest.join("\n")))
    }
}

/// Returns the reason why the tests cannot run here, if there is one.
pub fn is_impossible() -> Option<&'static str> {
    let has_unshare = Command::new("unshare").arg("--version").stdout(Stdio::null()).status().is_ok();
    match () {
        () if !rustix::process::geteuid().is_root() => Some("making a TAP needs root"),
        () if !std::path::Path::new("/dev/net/tun").exists() => Some("there is no /dev/net/tun: modprobe tun"),
        () if !has_unshare => Some("needs unshare: apt-get install util-linux"),
        () if beside("tasuki-worker").is_none() || beside("tasuki-sim").is_none() => {
            Some("needs tasuki-worker and tasuki-sim beside tasukid: cargo build --workspace")
        }
        () => None,
    }
}

/// Returns the number of deaths in the daemon's log.
pub fn deaths(rig: &Rig) -> u64 {
    u64::try_from(rig.log().matches("was killed by signal 9").count()).expect("a count")
}

/// Counts of numbered datagrams.
#[derive(Debug, Default)]
pub struct Tally {
    pub sent: u64,
    /// Datagrams that came back.
    pub back: u64,
    /// Datagrams that came back more than once.
    pub twice: u64,
    /// Datagrams that reached the far programs more than once.
    pub twice_there: u64,
}

/// Numbered datagrams from one room to programs of another, which send each back.
pub struct Exchange {
    over: Arc<AtomicBool>,
    moved: Arc<AtomicU64>,
    near: JoinHandle<Tally>,
    far: JoinHandle<u64>,
}

/// Number of datagrams under way: less than everything between the two has room for.
const WINDOW: u64 = 16;

/// Time after which a datagram that has not come back no longer counts as under way.
const QUIET_TIME_MAX: Duration = Duration::from_secs(2);

/// Binds a socket with a short read time-out.
fn socket(room: &Room, address: &str) -> UdpSocket {
    let socket = room.within(|| UdpSocket::bind((address, 0)).expect("an address of the interface"));
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
    socket
}

/// Receives the number of the next datagram.
fn next(socket: &UdpSocket) -> Option<u64> {
    let mut bytes = [0; 64];
    let len = socket.recv(&mut bytes).ok()?;
    (len == bytes.len()).then(|| u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")))
}

fn datagram(number: u64) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

impl Exchange {
    /// Starts an exchange between programs of these rooms, which have these addresses.
    pub fn begin(between: [(&Room, &str); 2]) -> Self {
        // At the rate of an ordinary program, not at full speed.
        Self::resting(between, Duration::from_millis(1))
    }

    /// Like [`begin`](Self::begin), with a rest after each window.
    pub fn resting([(near, at_near), (far, at_far)]: [(&Room, &str); 2], rest: Duration) -> Self {
        let (over, moved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (near, far) = (socket(near, at_near), socket(far, at_far));
        for (one, other) in [(&near, &far), (&far, &near)] {
            one.connect(other.local_addr().expect("an address")).expect("an address");
        }
        let (ends, counts) = (over.clone(), moved.clone());
        let near = std::thread::spawn(move || ask(&near, rest, &ends, &counts));
        let ends = over.clone();
        let far = std::thread::spawn(move || answer(&far, &ends));
        Exchange { over, moved, near, far }
    }

    /// Waits until `count` more datagrams have come back.
    pub fn goes_on(&self, rig: &Rig, count: u64) {
        let had = self.moved.load(Relaxed);
        until(rig, "datagrams come back", || self.moved.load(Relaxed) >= had + count);
    }

    /// Ends the exchange; returns its counts.
    pub fn end(self) -> Tally {
        self.over.store(true, Relaxed);
        let tally = self.near.join().expect("who asks");
        Tally { twice_there: self.far.join().expect("who answers"), ..tally }
    }
}

fn ask(socket: &UdpSocket, rest: Duration, over: &AtomicBool, moved: &AtomicU64) -> Tally {
    let (mut tally, mut seen, mut since) = (Tally::default(), BTreeMap::<u64, u32>::new(), Instant::now());
    let mut missing = 0_u64;
    loop {
        let ends = over.load(Relaxed);
        if ends && (missing == 0 || since.elapsed() > QUIET_TIME_MAX * 2) {
            break;
        }
        if since.elapsed() > QUIET_TIME_MAX && !ends {
            (missing, since) = (0, Instant::now());
        }
        if missing == 0 && !ends {
            std::thread::sleep(rest);
            for _ in 0..WINDOW {
                // Sending fails while there is no listener or no interface.
                let _ = socket.send(&datagram(tally.sent));
                tally.sent += 1;
            }
            missing = WINDOW;
        }
        if let Some(number) = next(socket) {
            let times = seen.entry(number).or_default();
            *times += 1;
            if *times == 1 {
                (missing, since) = (missing.saturating_sub(1), Instant::now());
                moved.fetch_add(1, Relaxed);
            }
        }
    }
    tally.back = seen.len() as u64;
    tally.twice = seen.values().map(|times| u64::from(times - 1)).sum();
    tally
}

/// Sends every datagram back; returns the number of repeated ones.
fn answer(socket: &UdpSocket, over: &AtomicBool) -> u64 {
    let (mut seen, mut quiet) = (BTreeMap::<u64, u32>::new(), Instant::now());
    while !over.load(Relaxed) || quiet.elapsed() < QUIET_TIME_MAX * 2 {
        if let Some(number) = next(socket) {
            *seen.entry(number).or_default() += 1;
            quiet = Instant::now();
            // Answer a repeated datagram once, so that each direction is counted by itself.
            if seen[&number] == 1 {
                let _ = socket.send(&datagram(number));
            }
        }
    }
    seen.values().map(|times| u64::from(times - 1)).sum()
}

/// Returns the byte of a stream at this place.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// A stream from a program of one room to one of another, each byte of which is checked.
pub struct Stream {
    over: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    near: JoinHandle<u64>,
    far: JoinHandle<u64>,
}

impl Stream {
    /// Sends a piece of 4 KiB, rests for `rest`, and so on.
    pub fn begin(near: &Room, far: &Room, at_far: &str, rest: Duration) -> Self {
        let listener = far.within(|| TcpListener::bind((at_far, 7008)).expect("an address"));
        let far = std::thread::spawn(move || take_in(&listener));
        let stream = near.within(|| TcpStream::connect((at_far, 7008)).expect("a connection"));
        let (over, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, counts) = (over.clone(), sent.clone());
        let near = std::thread::spawn(move || give_out(stream, rest, &ends, &counts));
        Stream { over, sent, near, far }
    }

    /// Waits until `bytes` more bytes are sent.
    pub fn goes_on(&self, rig: &Rig, bytes: u64) {
        let had = self.sent.load(Relaxed);
        until(rig, "the stream goes on", || self.sent.load(Relaxed) >= had + bytes);
    }

    /// Ends the stream; asserts that all sent bytes have arrived.
    pub fn end(self) {
        self.over.store(true, Relaxed);
        let (sent, came) = (self.near.join().expect("who sends"), self.far.join().expect("who receives"));
        assert_eq!(sent, came);
    }
}

fn give_out(mut stream: TcpStream, rest: Duration, ends: &AtomicBool, counts: &AtomicU64) -> u64 {
    let mut at = 0_u64;
    while !ends.load(Relaxed) {
        let bytes: Vec<u8> = (at..at + 4096).map(byte).collect();
        stream.write_all(&bytes).expect("a connection that stays");
        at += 4096;
        counts.store(at, Relaxed);
        if !rest.is_zero() {
            std::thread::sleep(rest);
        }
    }
    at
}

fn take_in(listener: &TcpListener) -> u64 {
    let (mut stream, _) = listener.accept().expect("a connection");
    let (mut at, mut bytes) = (0_u64, vec![0; 1 << 16]);
    loop {
        let len = stream.read(&mut bytes).expect("a connection that stays");
        if len == 0 {
            return at;
        }
        for got in &bytes[..len] {
            assert_eq!(*got, byte(at), "byte {at} is another");
            at += 1;
        }
    }
}
