//! A machine with as many pairs of queues as there can be, whose front end is our own: from its last message of a set-up
//! until each of its rings has moved a frame, and from the kill of its worker until each has again.
//!
//! It sends a frame by each pair to a second machine, which sends all back: the flow of each is chosen so that it comes by
//! that pair, too. So all rings have been looked at when all frames are back, and the way to the second machine and back
//! is in the figures.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tasuki_net::endpoint::guest::device::{FROM_GUEST, PAIRS_MAX, TO_GUEST};
use tasuki_shm::clock::now_ns;

use super::front::{FRAME, Front, PORT, frame, turn};
use super::machine::node;
use crate::interrupt::Interrupt;
use crate::program::PATIENCE;
use crate::relay::system::System;
use crate::report::Row;
use crate::sample::Sample;
use crate::workplace::Workplace;

/// Names of the cases.
pub const NAMES: [&str; 2] = ["guest-queues-start", "guest-queues-takeover"];

/// Bar of both, in ns.
const BAR: f64 = 5e6;

/// Names of the nodes, and of the first one's end.
const NODE: &str = "vm";
const END: &str = "vm@lan";
const OTHER: &str = "other";

/// Number of descriptors of a ring, and bytes of a buffer.
const SIZE: u16 = 64;
const BUFFER: usize = 256;

/// Both machines.
struct Pair {
    front: Front,
    other: Front,
    /// What the second machine got and has not sent back.
    held: Vec<[u8; FRAME]>,
    /// Source port of the frame that goes by each pair.
    ports: Vec<u16>,
}

impl Pair {
    /// Sends back what the second machine got, once that is `count` frames: by then all pairs run, among which a flow chooses.
    fn answer(&mut self, count: usize) -> Result<()> {
        while let Some(mut frame) = self.other.receive(0)? {
            turn(&mut frame);
            self.held.push(frame);
        }
        if self.held.len() >= count {
            std::mem::take(&mut self.held).iter().try_for_each(|frame| self.other.send(0, frame))?;
        }
        Ok(())
    }

    /// Starts the first machine anew. A frame waits in each ring by which it sends. Returns the time of the last message.
    fn start(&mut self, socket: &Path) -> Result<Instant> {
        self.front.socket.shutdown(std::net::Shutdown::Both)?;
        self.front = Front::connect(socket, PAIRS_MAX, SIZE, BUFFER)?;
        self.front.post_all()?;
        self.send_all()?;
        self.front.describe_rings()?;
        let last = Instant::now();
        self.front.enable(self.front.rings() - 1)?;
        Ok(last)
    }

    fn send_all(&mut self) -> Result<()> {
        (0..PAIRS_MAX).try_for_each(|pair| self.front.send(pair, &frame(self.ports[pair])))
    }

    /// Returns the next frame that came back, and the pair by which it came.
    fn next(&mut self) -> Result<Option<(usize, [u8; FRAME])>> {
        for pair in 0..PAIRS_MAX {
            if let Some(frame) = self.front.receive(pair)? {
                return Ok(Some((pair, frame)));
            }
        }
        Ok(None)
    }

    /// Waits until each ring has moved a frame.
    fn await_all(&mut self, interrupt: &Interrupt) -> Result<()> {
        let mut left: Vec<usize> = (0..self.front.rings()).collect();
        let began = Instant::now();
        while !left.is_empty() {
            self.answer(PAIRS_MAX)?;
            let mut still = Vec::new();
            for ring in left {
                let moved = if ring % 2 == TO_GUEST {
                    self.front.receive(ring / 2)?.is_some()
                } else {
                    self.front.is_used(ring)
                };
                if !moved {
                    still.push(ring);
                }
            }
            left = still;
            // A front end that only looks would take one of two CPUs from those that serve it.
            std::thread::yield_now();
            interrupt.check()?;
            ensure!(began.elapsed() < PATIENCE, "rings {left:?} are not served");
        }
        Ok(())
    }

    /// Finds for each pair a flow whose frames come back by it. The machine has just started.
    fn find_ports(&mut self, interrupt: &Interrupt) -> Result<()> {
        let began = Instant::now();
        let mut came = 0;
        while came < PAIRS_MAX {
            interrupt.check()?;
            ensure!(began.elapsed() < PATIENCE, "{came} of {PAIRS_MAX} frames come back");
            self.answer(PAIRS_MAX)?;
            came += usize::from(self.next()?.is_some());
        }
        for pair in 0..PAIRS_MAX {
            while !self.front.is_used(2 * pair + FROM_GUEST) {}
        }
        let mut ports = [None; PAIRS_MAX];
        for port in 1_u16.. {
            self.front.send(0, &frame(port))?;
            let by = loop {
                interrupt.check()?;
                ensure!(
                    began.elapsed() < PATIENCE,
                    "a frame does not come back, or no flow comes by some of the pairs"
                );
                self.answer(1)?;
                if let Some((pair, frame)) = self.next()? {
                    ensure!(frame[PORT..PORT + 2] == port.to_be_bytes(), "another frame came back");
                    break pair;
                }
            };
            while !self.front.is_used(FROM_GUEST) {}
            ports[by].get_or_insert(port);
            if let Some(all) = ports.iter().copied().collect() {
                self.ports = all;
                break;
            }
        }
        Ok(())
    }
}

/// Waits until the stand-by has heard of the machine, and all are asleep.
fn await_quiet(system: &System) -> Result<()> {
    system.await_pair(NODE)?;
    std::thread::sleep(Duration::from_millis(100));
    Ok(())
}

/// Measures, and makes the rows.
pub fn rows(is_quick: bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let place = Workplace::new()?;
    let [socket, others] = [NODE, OTHER].map(|name| place.directory().join(format!("{name}.sock")));
    let system = System::configured(place.directory(), &(node(NODE, &socket) + &node(OTHER, &others)))?;
    system.await_pair(NODE)?;
    system.await_pair(OTHER)?;
    let mut other = Front::connect(&others, 1, SIZE, BUFFER)?;
    other.post_all()?;
    other.describe_rings()?;
    other.enable(1)?;
    let ports = (0..PAIRS_MAX).map(u16::try_from).collect::<Result<_, _>>()?;
    let mut pair = Pair { front: Front::connect(&socket, PAIRS_MAX, SIZE, BUFFER)?, other, held: Vec::new(), ports };
    pair.start(&socket)?;
    pair.find_ports(interrupt)?;
    let [mut starts, mut takeovers] = std::array::from_fn(|_| Sample::new());
    for _ in 0..if is_quick { 10 } else { 200 } {
        interrupt.check()?;
        await_quiet(&system)?;
        let last = pair.start(&socket)?;
        pair.await_all(interrupt)?;
        starts.record(last.elapsed());
        await_quiet(&system)?;
        let at = system.kill(END)?;
        pair.send_all()?;
        pair.await_all(interrupt)?;
        takeovers.record(Duration::from_nanos(now_ns().saturating_sub(at)));
        ensure!(!pair.front.is_hung_up()?, "the front end was sent away: {}", system.log("sent away"));
    }
    let mut rows = Vec::new();
    for (name, sample) in NAMES.into_iter().zip([starts, takeovers]) {
        let sample = sample.summary();
        for (metric, value) in [("p50", sample.p50), ("p99", sample.p99), ("worst", sample.max)] {
            rows.push(Row::lower(name, metric, "ns", value as f64).bar_at(BAR));
        }
    }
    let note = "64 rings: from the last message of the set-up, or from the kill, until each has moved a frame";
    rows.first_mut().context("there are cases")?.note = Some(note.to_owned());
    Ok(rows)
}
