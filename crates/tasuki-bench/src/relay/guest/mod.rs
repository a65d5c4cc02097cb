//! A NIC that changes hands in a guest under one stream, in two ways. The kernel's driver is unloaded and loaded; or
//! our two processes hand the NIC over through VFIO, sharing the card's memory or having some each.
//!
//! The guest runs in QEMU with Debian's kernel, an IOMMU and QEMU's 82574L; `cargo xtask bench relay` prepares it.
//! In it runs `crates/tasuki-net/examples/guest_relay`, which sends frames back and makes the card change hands.
//! This process holds the wire's other end.

mod machine;
mod rows;
mod stream;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::interrupt::Interrupt;
use crate::report::Row;
use machine::Machine;
pub use machine::Recipe;
use stream::{Seen, Stream};

/// Names of the cases: the kernel's way, and our `keep` and `repoint`.
const LKM: &str = "guest-lkm";
const HANDOVER: &str = "guest-handover";
const REPOINT: &str = "guest-repoint";

/// Frames a second.
///
/// Under QEMU's translation, on an idle host, the guest carries four times as many in both directions and loses none
/// while the card does not change hands. On a host busy with other work, it carries not quite twice as many.
const RATE: u64 = 5_000;

/// Prefixes of the console lines from the guest's program, and of the line about the guest's end.
const SAYS: &str = "relay: ";
const ENDED: &str = "guest: ended with ";

/// Longest time for the guest to boot, or to get ready for its next case.
const BOOT: Duration = Duration::from_secs(180);

/// Longest time that any relay takes.
const RELAY: Duration = Duration::from_secs(30);

/// Time after the last frame by which none is under way any more.
const SILENCE: Duration = Duration::from_millis(500);

/// Number of console lines to quote when the guest fails.
const LINES_TOLD: usize = 5;

/// Number of relays of each kind.
#[derive(Debug, Clone, Copy)]
pub struct Relays {
    lkm: u32,
    /// Number of relays of each of our two ways.
    handovers: u32,
}

impl Relays {
    /// Enough to see whether something broke.
    pub const QUICK: Relays = Relays { lkm: 20, handovers: 100 };
    /// Enough for a record.
    pub const FULL: Relays = Relays { lkm: 100, handovers: 1000 };
}

/// Outcome of one case.
#[derive(Debug, Default)]
struct Outcome {
    relays: u32,
    seen: Seen,
    /// Numbers of each line that the guest reports, in ns.
    said: Vec<Vec<u64>>,
}

/// Runs all cases in the guest that `recipe` describes. Returns the rows, and the paper's figures beside them.
pub fn run(recipe: &Path, relays: Relays, interrupt: &Interrupt) -> Result<(Vec<Row>, String)> {
    let recipe = Recipe::read(recipe)?;
    let environment = [("LKM", relays.lkm), ("HANDOVERS", relays.handovers), ("REPOINTS", relays.handovers)];
    let mut guest =
        Guest { machine: Machine::boot(&recipe, &environment)?, told: VecDeque::with_capacity(LINES_TOLD), interrupt };
    guest.hear_numbers()?;
    let lkm = guest.case(LKM, relays.lkm)?;
    let handover = guest.case(HANDOVER, relays.handovers)?;
    let repoint = guest.case(REPOINT, relays.handovers)?;
    Ok((rows::rows(&lkm, &handover, &repoint), rows::paper(&lkm).to_string()))
}

/// A report of the guest.
#[derive(Debug, PartialEq)]
enum Word {
    Ready,
    Done,
    Numbers(Vec<u64>),
    Ended,
}

impl Word {
    /// Parses a line of the console; `None` if it is not for us.
    fn of(line: &str) -> Result<Option<Word>> {
        if let Some(status) = line.strip_prefix(ENDED) {
            ensure!(status == "0", "the guest's program ended with status {status}");
            return Ok(Some(Word::Ended));
        }
        let Some(said) = line.strip_prefix(SAYS) else { return Ok(None) };
        let mut words = said.split(' ');
        match words.next() {
            Some("ready") => Ok(Some(Word::Ready)),
            Some("done") => Ok(Some(Word::Done)),
            Some("steps" | "pauses") => Ok(Some(Word::Numbers(words.map(str::parse).collect::<Result<_, _>>()?))),
            _ => bail!("the guest gave up: {said}"),
        }
    }
}

struct Guest<'a> {
    machine: Machine,
    /// Last lines of its console.
    told: VecDeque<String>,
    interrupt: &'a Interrupt,
}

impl Guest<'_> {
    /// Runs one case: from the guest's readiness for it until its readiness for the next one, or its end.
    fn case(&mut self, name: &'static str, relays: u32) -> Result<Outcome> {
        let began = Instant::now();
        let mut stream = Stream::begin(self.machine.wire.try_clone()?, RATE, relays)?;
        let limit = RELAY * (relays + 2);
        loop {
            match self.hear(Duration::ZERO)? {
                Some(Word::Done) => break,
                Some(Word::Ended) => bail!("the guest ended in the middle of its relays{}", self.last_words()),
                _ => {}
            }
            ensure!(began.elapsed() < limit, "the card did not change hands {relays} times in {} s", limit.as_secs());
            stream.send()?;
            stream.receive()?;
            self.nap()?;
        }
        let mut last = Instant::now();
        while last.elapsed() < SILENCE {
            if stream.receive()? {
                last = Instant::now();
            }
            self.nap()?;
        }
        let seen = stream.end();
        let said = self.hear_numbers()?;
        // Two relays with no frame between them look like one on the wire, whose gap is that of both.
        let last = seen.rests.len().saturating_sub(1);
        ensure!(last == relays as usize, "{last} relays were seen on the wire, of {relays}");
        eprintln!("guest · {name:<22} {relays} relays · {:.1} s", began.elapsed().as_secs_f64());
        Ok(Outcome { relays, seen, said })
    }

    /// Sleeps until a frame comes back, or until another frame may be due.
    fn nap(&self) -> Result<()> {
        let limit = Timespec { tv_sec: 0, tv_nsec: i64::try_from(1_000_000_000 / RATE / 2)? };
        let mut fds = [PollFd::new(&self.machine.wire, PollFlags::IN), PollFd::new(self.interrupt, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        ensure!(fds[1].revents().is_empty(), "interrupted");
        Ok(())
    }

    /// Returns the next report, if one comes within `limit`.
    fn hear(&mut self, limit: Duration) -> Result<Option<Word>> {
        let line = match self.machine.lines.recv_timeout(limit) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("QEMU ended, and the guest had not{}", self.last_words()),
        };
        let word = Word::of(&line);
        if self.told.len() == LINES_TOLD {
            self.told.pop_front();
        }
        self.told.push_back(line);
        word
    }

    /// Returns the console's last lines, for an error message.
    fn last_words(&self) -> String {
        let lines: Vec<_> = self.told.iter().map(String::as_str).collect();
        if lines.is_empty() { ", before it said anything".to_owned() } else { format!(": {}", lines.join(" / ")) }
    }

    /// Collects the numbers that the guest reports until it is ready for its next case, or has ended.
    fn hear_numbers(&mut self) -> Result<Vec<Vec<u64>>> {
        let (began, mut said) = (Instant::now(), Vec::new());
        while began.elapsed() < BOOT {
            match self.hear(Duration::from_millis(50))? {
                Some(Word::Numbers(numbers)) => said.push(numbers),
                Some(Word::Ready | Word::Ended) => return Ok(said),
                // Check for signals.
                Some(Word::Done) | None => self.nap()?,
            }
        }
        bail!("the guest was not ready within {} s{}", BOOT.as_secs(), self.last_words())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_is_understood() {
        let word = |line| Word::of(line).unwrap();
        assert_eq!(word("[    0.1] ACPI: no idea"), None);
        assert_eq!(word("relay: ready"), Some(Word::Ready));
        assert_eq!(word("relay: steps 1 22 333"), Some(Word::Numbers(vec![1, 22, 333])));
        assert_eq!(word("guest: ended with 0"), Some(Word::Ended));
    }

    #[test]
    fn a_guest_that_fails_is_quoted() {
        let sentence = |line| Word::of(line).unwrap_err().to_string();
        assert_eq!(
            sentence("relay: failed: the guest has no 82574L"),
            "the guest gave up: failed: the guest has no 82574L"
        );
        assert_eq!(sentence("guest: ended with 137"), "the guest's program ended with status 137");
        assert!(Word::of("relay: steps 1 x").is_err());
    }
}
