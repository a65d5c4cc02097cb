//! The guest's program of `cargo xtask bench guest`: it answers, counts or sends UDP datagrams through the guest's network
//! card.
//!
//! ```text
//! guest_datagrams echo PORT                       sends each datagram back to its sender
//! guest_datagrams receive PORT                    counts datagrams until none has come for a second
//! guest_datagrams send ADDRESS BYTES RATE SECONDS sends so many a second; RATE 0: as fast as it can
//! ```
//!
//! Its last line has the counts for the bench, as names and numbers. They cover the time of the traffic: `datagrams` that
//! the program received or sent, and `received`, `sent` and `interrupts` of the card, as the kernel counts them.

use std::error::Error;
use std::net::UdpSocket;
use std::process::ExitCode;
use std::time::{Duration, Instant};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Time without a datagram after which the traffic is over.
const SILENCE: Duration = Duration::from_secs(1);

/// Longest datagram.
const ROOM: usize = 64 << 10;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["echo", port] => echo(port),
        ["receive", port] => receive(port),
        ["send", address, bytes, rate, seconds] => send(address, [bytes, rate, seconds]),
        _ => Err("say `echo PORT`, `receive PORT` or `send ADDRESS BYTES RATE SECONDS`".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bind(port: &str) -> Fallible<UdpSocket> {
    Ok(UdpSocket::bind(("0.0.0.0", port.parse()?))?)
}

fn echo(port: &str) -> Fallible<()> {
    let socket = bind(port)?;
    println!("ready");
    let mut room = vec![0; ROOM];
    loop {
        let (len, from) = socket.recv_from(&mut room)?;
        socket.send_to(&room[..len], from)?;
    }
}

fn receive(port: &str) -> Fallible<()> {
    let socket = bind(port)?;
    println!("ready");
    let (mut room, mut datagrams) = (vec![0; ROOM], 0_u64);
    socket.recv(&mut room)?;
    let before = Counts::read()?;
    socket.set_read_timeout(Some(SILENCE))?;
    while socket.recv(&mut room).is_ok() {
        datagrams += 1;
    }
    before.tell(datagrams)
}

/// Sends at even distances. It spins between two datagrams: timers of a guest cost its host work that no card does.
fn send(address: &str, [bytes, rate, seconds]: [&str; 3]) -> Fallible<()> {
    let (frame, rate): (_, u32) = (vec![0; bytes.parse()?], rate.parse()?);
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(address)?;
    let gap = Duration::from_secs(1).checked_div(rate).unwrap_or_default();
    let before = Counts::read()?;
    let (mut datagrams, begun) = (0_u64, Instant::now());
    let (end, mut due) = (begun + Duration::from_secs(seconds.parse()?), begun);
    loop {
        let now = Instant::now();
        if now > end {
            break;
        }
        if now < due {
            continue;
        }
        due += gap;
        // Nobody may be listening.
        datagrams += u64::from(socket.send(&frame).is_ok());
    }
    // What is still in the ring goes now.
    std::thread::sleep(SILENCE / 4);
    before.tell(datagrams)
}

/// The card's counts.
struct Counts {
    received: u64,
    sent: u64,
    interrupts: u64,
}

impl Counts {
    fn read() -> Fallible<Self> {
        let cards = std::fs::read_to_string("/proc/net/dev")?;
        let line = cards.lines().find_map(|line| line.trim().strip_prefix("eth0:")).ok_or("there is no eth0")?;
        let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [received, sent] = [1, 9].map(|place| numbers.get(place).copied().unwrap_or_default());
        let lines = std::fs::read_to_string("/proc/interrupts")?;
        let lines = lines.lines().filter(|line| line.contains("virtio"));
        let interrupts = lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
        Ok(Counts { received, sent, interrupts })
    }

    fn tell(&self, datagrams: u64) -> Fallible<()> {
        let now = Counts::read()?;
        let [received, sent] = [now.received - self.received, now.sent - self.sent];
        let interrupts = now.interrupts - self.interrupts;
        println!("datagrams {datagrams} received {received} sent {sent} interrupts {interrupts}");
        Ok(())
    }
}
