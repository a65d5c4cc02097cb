//! Drives one NIC by hand: receives frames, sends frames, or sends received frames back.

use std::fs::File;
use std::io::{BufWriter, IsTerminal};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pcap_file::pcap::{PcapPacket, PcapWriter};
use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_net::nic::{Link, Mac, Nic};
use tasuki_net::port::{Armed, BURST_MAX, Burst, Frame};
use tasuki_shm::arena::Arena;

use crate::numbered::{self, Account};
use crate::pace::Pace;

/// Number of idle looks at the card before it goes to sleep.
const LOOKS: u32 = 4096;

/// Longest sleep: it then checks for a signal.
const NAP: Duration = Duration::from_millis(100);

/// Time for which it waits at the end for frames under way, and its sleep between two looks at the card meanwhile.
const DRAIN: Duration = Duration::from_millis(500);
const DRAIN_NAP: Duration = Duration::from_micros(50);

/// Work to do with the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Receives frames and counts them.
    Sink,
    /// Sends numbered frames.
    Source,
    /// Sends every frame back to its sender.
    Echo,
}

/// The work and its parameters.
#[derive(Debug)]
pub struct Orders {
    /// Kind of work.
    pub work: Work,
    /// Number of frames after which it ends; by default a signal ends it.
    pub count: Option<u64>,
    /// Rate of a source, in frames per second.
    pub rate: Option<u64>,
    /// Length of a source's frames in bytes, without check sequence.
    pub size: u16,
    /// Destination of a source's frames.
    pub to: Mac,
    /// File to which received frames are written.
    pub pcap: Option<PathBuf>,
    /// Whether it never sleeps.
    pub poll: bool,
}

/// Counts so far.
#[derive(Debug, Default)]
struct Tally {
    received: u64,
    received_bytes: u64,
    sent: u64,
    sent_bytes: u64,
    account: Account,
}

struct Run<'a, N> {
    nic: &'a mut N,
    orders: &'a Orders,
    arena: Arena,
    pcap: Option<PcapWriter<BufWriter<File>>>,
    pace: Pace,
    tally: Tally,
    start: Instant,
    /// Slots that the card had before anything was sent: its slots for receiving.
    posted: u32,
}

/// Runs the work until the count is reached or `stop` is set; then prints the counts on standard output.
pub fn run<N: Nic>(nic: &mut N, arena: Arena, orders: &Orders, stop: &Arc<AtomicBool>) -> Result<()> {
    let pcap = match &orders.pcap {
        Some(path) => {
            let file = File::create(path)
                .with_context(|| format!("{} cannot be written; choose another file", path.display()))?;
            Some(PcapWriter::new(BufWriter::new(file))?)
        }
        None => None,
    };
    wait_for_link(nic, stop)?;
    let posted = arena.census().peer;
    let start = Instant::now();
    let pace = Pace::new(orders.rate, start);
    let mut run = Run { nic, orders, arena, pcap, pace, tally: Tally::default(), start, posted };
    run.work(stop)?;
    run.report();
    Ok(())
}

/// Waits until the link is up: a card that still negotiates carries no frames, however long it takes.
fn wait_for_link<N: Nic>(nic: &mut N, stop: &AtomicBool) -> Result<()> {
    while nic.link()? == Link::Down {
        ensure!(
            !stop.load(Relaxed),
            "the link did not come up before you ended it: is a cable plugged in, and the partner switched on?"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

impl<N: Nic> Run<'_, N> {
    fn work(&mut self, stop: &AtomicBool) -> Result<()> {
        let mut burst = Burst::new();
        let mut idle = 0;
        let mut progress = Progress::new(self.start);
        while !stop.load(Relaxed) && !self.is_done() {
            let moved = self.turn(&mut burst)?;
            idle = if moved > 0 { 0 } else { idle + 1 };
            if idle >= LOOKS {
                idle = 0;
                progress.show(&self.tally);
                self.nic.now_and_then();
                self.rest()?;
            } else if moved > 0 && progress.is_time() {
                progress.show(&self.tally);
                self.nic.now_and_then();
            }
        }
        progress.clear();
        self.drain(burst)
    }

    fn is_done(&self) -> bool {
        let done = if self.orders.work == Work::Source { self.tally.sent } else { self.tally.received };
        self.orders.count.is_some_and(|count| done >= count)
    }

    /// Receives a burst and sends a burst. Returns the number of frames moved.
    fn turn(&mut self, burst: &mut Burst) -> Result<usize> {
        match self.orders.work {
            Work::Sink => {
                let came = self.receive(burst)?;
                burst.clear();
                Ok(came)
            }
            Work::Echo => {
                // Frames that found no room in the last turn go first. Receive no new frames until they are gone.
                let came = if burst.is_empty() { self.receive(burst)? } else { 0 };
                for frame in &mut burst[..came] {
                    turn_round(frame);
                }
                Ok(came + self.transmit(burst)?)
            }
            Work::Source => {
                self.fill(burst);
                let went = self.transmit(burst)?;
                // A source has no use for received frames, but must not let them fill the card's buffer.
                let mut came = Burst::new();
                Ok(went + self.receive(&mut came)?)
            }
        }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<usize> {
        let came = self.nic.receive(burst)?;
        let first = burst.len() - came;
        for frame in &burst[first..] {
            self.tally.received += 1;
            self.tally.received_bytes += u64::from(frame.len);
            if let Some(number) = numbered::number(frame.bytes()) {
                self.tally.account.count(number);
            }
            if let Some(pcap) = &mut self.pcap {
                pcap.write_packet(&PcapPacket::new(self.start.elapsed(), frame.len.into(), frame.bytes()))?;
            }
        }
        Ok(came)
    }

    fn transmit(&mut self, burst: &mut Burst) -> Result<usize> {
        let bytes = |burst: &Burst| burst.iter().map(|frame| u64::from(frame.len)).sum::<u64>();
        let before = bytes(burst);
        let went = self.nic.transmit(burst)?;
        self.tally.sent += went as u64;
        self.tally.sent_bytes += before - bytes(burst);
        self.pace.sent(if self.orders.work == Work::Source { went as u64 } else { 0 });
        Ok(went)
    }

    /// Adds as many frames to the burst as are due.
    fn fill(&mut self, burst: &mut Burst) {
        let left = self.orders.count.map_or(u64::MAX, |count| count - self.tally.sent);
        let most = left.min(BURST_MAX as u64);
        let due = self.pace.due(Instant::now(), most);
        while (burst.len() as u64) < due {
            let Some(mut slot) = self.arena.take() else { return };
            let number = self.tally.sent + burst.len() as u64;
            numbered::write(&mut slot.bytes_mut()[..self.orders.size.into()], self.orders.to, self.nic.mac(), number);
            burst.push(Frame { slot, len: self.orders.size });
        }
    }

    /// Sleeps until a frame arrives or is due.
    fn rest(&mut self) -> Result<()> {
        if self.orders.poll {
            return Ok(());
        }
        if self.orders.work == Work::Source {
            std::thread::sleep(self.pace.rest(Instant::now()).min(NAP));
            return Ok(());
        }
        if self.nic.arm()? == Armed::Busy {
            return Ok(());
        }
        let fd = self.nic.fd();
        let nap = Timespec { tv_sec: 0, tv_nsec: i64::from(NAP.subsec_nanos()) };
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)], Some(&nap)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno).context("the kernel refused to wait for the card"),
        }
    }

    /// Sends the rest of the burst, and lets the card empty its ring, within a time limit.
    fn drain(&mut self, mut burst: Burst) -> Result<()> {
        let until = Instant::now() + DRAIN;
        while self.orders.work != Work::Sink && Instant::now() < until {
            // Takes back the slots of sent frames, also when nothing is left to send.
            self.transmit(&mut burst)?;
            if burst.is_empty() && self.arena.census().peer <= self.posted {
                break;
            }
            std::thread::sleep(DRAIN_NAP);
        }
        if let Some(pcap) = self.pcap.take() {
            use std::io::Write;
            pcap.into_writer().flush().context("the capture could not be written to its end")?;
        }
        Ok(())
    }

    fn report(&mut self) {
        let Tally { received, received_bytes, sent, sent_bytes, account } = &self.tally;
        let took = self.start.elapsed();
        let per_second = |count: u64| count as f64 / took.as_secs_f64().max(1e-9);
        println!("{:.3} s", took.as_secs_f64());
        for (what, frames, bytes) in [("received", *received, *received_bytes), ("sent", *sent, *sent_bytes)] {
            if frames > 0 {
                let megabits = per_second(bytes) * 8.0 / 1e6;
                println!(
                    "{what:<9}{frames} frames, {bytes} bytes ({:.0} frames/s, {megabits:.1} Mb/s)",
                    per_second(frames)
                );
            }
        }
        if account.seen > 0 {
            println!("numbered {} frames: {} missing, {} late or twice", account.seen, account.missing, account.late);
        }
        for (name, value) in self.nic.statistics() {
            if value > 0 {
                println!("{name:>24} {value}");
            }
        }
    }
}

/// Swaps the two addresses at the head of a frame.
pub fn turn_round(frame: &mut Frame) {
    if frame.len >= 12 {
        let (to, rest) = frame.slot.bytes_mut().split_at_mut(6);
        to.swap_with_slice(&mut rest[..6]);
    }
}

/// Progress line on a terminal.
struct Progress {
    start: Instant,
    last: Instant,
    on_terminal: bool,
    calls: u32,
}

impl Progress {
    fn new(start: Instant) -> Self {
        Progress { start, last: start, on_terminal: std::io::stderr().is_terminal(), calls: 0 }
    }

    /// Returns whether the clock is worth a look: at every 1024th call only.
    fn is_time(&mut self) -> bool {
        self.calls = self.calls.wrapping_add(1);
        self.calls.is_multiple_of(1024)
    }

    fn show(&mut self, tally: &Tally) {
        if !self.on_terminal || self.last.elapsed() < Duration::from_millis(200) {
            return;
        }
        self.last = Instant::now();
        let seconds = self.start.elapsed().as_secs();
        eprint!(
            "\r{seconds:>4} s  received {}  sent {}  missing {} ",
            tally.received, tally.sent, tally.account.missing
        );
    }

    fn clear(&self) {
        if self.on_terminal {
            eprint!("\r\x1b[K");
        }
    }
}
