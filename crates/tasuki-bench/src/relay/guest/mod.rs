//! A NIC that changes hands in a guest: the kernel's driver unloaded and loaded, and our two processes through VFIO, that share the card's memory or have
//! some each, under the same stream.
//!
//! The guest is QEMU's, with Debian's kernel, an IOMMU and QEMU's 82574L; `cargo xtask bench relay` makes it ready. In it runs
//! `crates/tasuki-net/examples/guest_relay`, which sends back what comes and has the card change hands. Out here is the wire's other end.

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
use machine::{Machine, Recipe};
use stream::{Seen, Stream};

/// The kernel's way, and ours: `keep` and `repoint`.
const LKM: &str = "guest-lkm";
const HANDOVER: &str = "guest-handover";
const REPOINT: &str = "guest-repoint";

/// Frames a second. Translated by QEMU, the guest carries four times as many both ways on an idle host, with nothing lost while nobody
/// touches the card; on one that is busy with something else not quite twice as many.
const RATE: u64 = 5_000;

/// What the guest's program says begins with this, and the guest's end with that.
const SAYS: &str = "relay: ";
const ENDED: &str = "guest: ended with ";

/// The guest boots, and gets ready for its next case, within this.
const BOOT: Duration = Duration::from_secs(180);

/// No relay takes longer, whoever does it.
const RELAY: Duration = Duration::from_secs(30);

/// So long after the last frame nothing is under way any more.
const SILENCE: Duration = Duration::from_millis(500);

/// Lines of the console that are told when the guest fails.
const LINES_TOLD: usize = 5;

/// How many relays there are of each kind.
#[derive(Debug, Clone, Copy)]
pub struct Relays {
    lkm: u32,
    /// Of each of our two ways.
    handovers: u32,
}

impl Relays {
    /// Enough to see whether something broke.
    pub const QUICK: Relays = Relays { lkm: 20, handovers: 100 };
    /// Enough for a record.
    pub const FULL: Relays = Relays { lkm: 100, handovers: 1000 };
}

/// What came of one case.
#[derive(Debug, Default)]
struct Outcome {
    relays: u32,
    seen: Seen,
    /// What the guest says of itself: the numbers of each line, in ns.
    said: Vec<Vec<u64>>,
}

/// Runs all cases in the guest that `recipe` describes: rows, and the paper's figures beside them.
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

/// What the guest has to say.
#[derive(Debug, PartialEq)]
enum Word {
    Ready,
    Done,
    Numbers(Vec<u64>),
    Ended,
}

impl Word {
    /// What a line of the console is to us.
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
    /// The last lines of its console.
    told: VecDeque<String>,
    interrupt: &'a Interrupt,
}

impl Guest<'_> {
    /// One case: from when the guest is ready for it to when it is for the next one, or has ended.
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
        // Two between which no frame came are one on the wire, whose gap is that of both.
        let last = seen.rests.len().saturating_sub(1);
        ensure!(last == relays as usize, "{last} relays were seen on the wire, of {relays}");
        eprintln!("guest · {name:<22} {relays} relays · {:.1} s", began.elapsed().as_secs_f64());
        Ok(Outcome { relays, seen, said })
    }

    /// Sleeps until something comes back, or another frame may be due.
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

    /// The next line that says something, if it comes within `limit`.
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

    /// What the console said last.
    fn last_words(&self) -> String {
        let lines: Vec<_> = self.told.iter().map(String::as_str).collect();
        if lines.is_empty() { ", before it said anything".to_owned() } else { format!(": {}", lines.join(" / ")) }
    }

    /// The numbers that the guest says until it is ready for its next case, or has ended.
    fn hear_numbers(&mut self) -> Result<Vec<Vec<u64>>> {
        let (began, mut said) = (Instant::now(), Vec::new());
        while began.elapsed() < BOOT {
            match self.hear(Duration::from_millis(50))? {
                Some(Word::Numbers(numbers)) => said.push(numbers),
                Some(Word::Ready | Word::Ended) => return Ok(said),
                // So that a signal is noticed.
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
