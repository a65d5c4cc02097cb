//! Memory that a worker shares with other processes: a NIC's lease page, its own heartbeat, and its node's program
//! state. Other processes can write all of it at any time. So each word is loaded once, and no value of a word can
//! do harm.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use tasuki_net::endpoint::rate;
use tasuki_net::nic::Left;
use tasuki_relay::message::{heartbeat, lease_page, program_state};
use tasuki_relay::{Party, Tenure};
use tasuki_shm::clock::now_ns;
use tasuki_shm::lease::{self, Lease};
use tasuki_shm::line::{Line, halves};
use tasuki_shm::region::{Region, RegionError, Span};
use tasuki_shm::vni::loans;

use crate::exit_mark;
use crate::program::STATE_MAX;

/// Time for which a driver yields to a worker that comes to its CPU.
const COMES_WITHIN_NS: u64 = 10_000_000;

/// Number of words in a page.
const WORDS: usize = lease_page::LEN / 8;

/// Maps shared memory of at least `len` bytes that no process can take away.
fn adopt(memory: OwnedFd, len: usize) -> Result<Region, RegionError> {
    let region = Region::adopt(memory)?;
    if region.len() < len {
        return Err(RegionError::Truncated { have: region.len(), need: len });
    }
    // A page fault costs as much as a burst.
    region.populate();
    Ok(region)
}

/// Lease page of a NIC.
#[derive(Debug)]
pub struct LeasePage {
    lease: Lease<Span<Line>>,
    words: Span<AtomicU64>,
}

impl LeasePage {
    /// Maps the lease page that the daemon has made.
    pub fn over(memory: OwnedFd) -> Result<Self, RegionError> {
        let region = adopt(memory, lease_page::LEN)?;
        Ok(LeasePage { lease: Lease::new(region.span(lease_page::LEASE_AT, 1)?), words: region.span(0, WORDS)? })
    }

    /// Loads the lease word.
    #[inline]
    pub fn tenure(&self) -> Tenure {
        let lease::Tenure { holder, epoch } = self.lease.tenure();
        Tenure { holder: holder.map(Party), epoch }
    }

    /// Swaps the lease word from `from` to `to` and returns whether that succeeded. `to` is a tenure that a relay
    /// produces: held by the taker, or free.
    pub fn swap(&self, from: Tenure, to: Tenure) -> bool {
        let word = |tenure: Tenure| lease::Tenure { holder: tenure.holder.map(|party| party.0), epoch: tenure.epoch };
        match to.holder {
            Some(us) => self.lease.take(word(from), us.0).is_ok(),
            None => self.lease.pass(word(from)).is_ok(),
        }
    }

    /// Notes the time at which the giver ended its last burst.
    pub fn stopped(&self) {
        self.words[lease_page::STOPPED_AT].store(now_ns(), Relaxed);
    }

    /// Returns how the giver left the card, for a taker that points the card at other memory.
    pub fn left(&self) -> Left {
        Left(self.words[lease_page::LEFT].load(Acquire))
    }

    /// Notes how the giver left the card.
    pub fn leaves(&self, left: Left) {
        self.words[lease_page::LEFT].store(left.0, Release);
    }

    /// Returns whether the link was up when the driver looked last.
    pub fn link_was_up(&self) -> bool {
        self.words[lease_page::LINK].load(Relaxed) == lease_page::LINK_UP
    }

    /// Notes whether the link was found up.
    pub fn found_link(&self, up: bool) {
        self.words[lease_page::LINK].store(if up { lease_page::LINK_UP } else { lease_page::LINK_DOWN }, Relaxed);
    }

    /// Notes that a card which this driver started has a link from now on: the pause was until now.
    pub fn frames_can_flow(&self) {
        self.words[lease_page::DRIVING_AT].store(now_ns(), Relaxed);
    }

    /// Notes that the card is gone.
    pub fn found_gone(&self) {
        self.words[lease_page::LINK].store(lease_page::CARD_GONE, Relaxed);
    }

    /// Notes that the taker has looked at the rings and drives, and on which CPU.
    pub fn driving(&self, cpu: Option<u32>) {
        self.leaves(Left::STOPPED);
        self.words[lease_page::DRIVING_AT].store(now_ns(), Relaxed);
        self.words[lease_page::CPU].store(cpu.map_or(0, |cpu| u64::from(cpu) + 1), Relaxed);
        let relays = self.words[lease_page::RELAYS].load(Relaxed);
        self.words[lease_page::RELAYS].store(relays.wrapping_add(1), Release);
    }

    /// Runs `go`, which moves this worker to the driver's CPU. The worker runs there once the driver yields, and the
    /// driver [checks](Self::is_awaited) for that. Otherwise it would run at the next tick, milliseconds later.
    pub fn come(&self, go: impl FnOnce()) {
        self.words[lease_page::COMING].store(now_ns() + COMES_WITHIN_NS, Relaxed);
        go();
        self.words[lease_page::COMING].store(0, Relaxed);
    }

    /// Returns whether a worker waits for the driver's CPU. Ignores a word that is further ahead than
    /// [`COMES_WITHIN_NS`].
    pub fn is_awaited(&self) -> bool {
        let until = self.words[lease_page::COMING].load(Relaxed);
        until != 0 && until.wrapping_sub(now_ns()) <= COMES_WITHIN_NS
    }

    /// Returns the CPU on which the driver stays, if it stays on one.
    pub fn driver_cpu(&self) -> Option<u32> {
        let word = self.words[lease_page::CPU].load(Relaxed);
        word.checked_sub(1).and_then(|cpu| u32::try_from(cpu).ok())
    }
}

/// Heartbeat of a worker.
#[derive(Debug)]
pub struct Heartbeat {
    words: Span<AtomicU64>,
    region: Region,
    looks: u64,
}

impl Heartbeat {
    /// Maps the heartbeat that the daemon has made.
    pub fn over(memory: OwnedFd) -> Result<Self, RegionError> {
        let region = adopt(memory, heartbeat::LEN)?;
        Ok(Heartbeat { words: region.span(0, WORDS)?, region, looks: 0 })
    }

    /// Sets the exit mark up, by which the daemon learns early that this process ends.
    pub fn mark_life(&self) -> std::io::Result<()> {
        exit_mark::mark(self.region.span(8 * heartbeat::LIFE, 1).map_err(std::io::Error::other)?)
    }

    /// Returns the number of messages that the daemon has put into the socket.
    #[inline]
    pub fn posts(&self) -> u64 {
        self.words[heartbeat::POSTS].load(Acquire)
    }

    /// Counts one more look for work. Returns the number of looks so far.
    #[inline]
    pub fn look(&mut self) -> u64 {
        self.looks = self.looks.wrapping_add(1);
        self.words[heartbeat::LOOKS].store(self.looks, Relaxed);
        self.looks
    }

    /// Notes whether the worker sleeps on purpose.
    pub fn asleep(&self, is: bool) {
        self.words[heartbeat::ASLEEP].store(is.into(), Relaxed);
    }

    /// Returns a word.
    pub fn get(&self, word: usize) -> u64 {
        self.words[word].load(Relaxed)
    }

    /// Adds `count` to a word; most words count frames.
    #[inline]
    pub fn add(&self, word: usize, count: u64) {
        if count > 0 {
            self.set(word, self.words[word].load(Relaxed).wrapping_add(count));
        }
    }

    /// Sets a word.
    #[inline]
    pub fn set(&self, word: usize, value: u64) {
        self.words[word].store(value, Relaxed);
    }
}

/// Program state of a node: memory that outlives workers, for state that its work must keep. The stock worker's
/// works have two lines for each NIC, by its number. Behind these, a program of the user's own has
/// [`program_state::STATE`] words for each NIC.
///
/// Of a node with an endpoint, which has no such work, the first two lines have the times of its limits: of what its programs
/// send, and of what they receive; of a virtual machine's node there are also the loans of its queues. The nodes of all queues of
/// an interface or a machine have the program state of the interface's node.
#[derive(Debug)]
pub struct ProgramState {
    words: Span<AtomicU64>,
    dues: [Span<AtomicU64>; 2],
    loans: Span<Line>,
}

/// Words that a stock work keeps for a NIC.
pub const COPY: usize = program_state::WORK / 2;

const STATE_HEAD: usize = program_state::STATE / 2 - STATE_WORDS;
/// Words of a program's state.
pub const STATE_WORDS: usize = STATE_MAX / 8;

/// One copy of a program's state, with its head.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    /// Kind and version of the state; zeros if nothing was written.
    pub state: (u32, u32),
    /// Number of the write: of two copies, the later one has the larger count.
    pub count: u64,
    /// Length of the state in bytes.
    pub len: usize,
    /// The state; bytes from `len` on have no meaning.
    pub words: [u64; STATE_WORDS],
}

impl Default for Written {
    fn default() -> Self {
        Written { state: (0, 0), count: 0, len: 0, words: [0; STATE_WORDS] }
    }
}

impl ProgramState {
    /// Maps the program state that the daemon has made.
    pub fn over(memory: OwnedFd) -> Result<Self, RegionError> {
        let region = adopt(memory, program_state::LEN)?;
        let dues = [region.span(0, rate::WORDS)?, region.span(64, rate::WORDS)?];
        let loans = region.span(8 * program_state::LOANS_AT, loans::LINES)?;
        Ok(ProgramState { words: region.span(0, program_state::LEN / 8)?, dues, loans })
    }

    /// Returns the loans of a machine's queues.
    pub fn loans(&self) -> Span<Line> {
        self.loans.clone()
    }

    /// Returns the times of the limits of a node with an endpoint.
    pub fn dues(&self) -> [Span<AtomicU64>; 2] {
        self.dues.clone()
    }

    /// Reads one copy of a program's state for a NIC. Returns nothing if there is no room for so many NICs.
    pub fn state(&self, nic: u32, copy: u64) -> Option<Written> {
        let place = self.state_place(nic, copy)?;
        let word = |index: usize| place[index].load(Acquire);
        let (version, kind) = halves(word(0));
        let len = usize::try_from(word(2)).unwrap_or(usize::MAX).min(8 * STATE_WORDS);
        let words = std::array::from_fn(|index| word(STATE_HEAD + index));
        Some(Written { state: (kind, version), count: word(1), len, words })
    }

    /// Writes one copy of a program's state for a NIC.
    #[inline]
    pub fn note(&self, nic: u32, copy: u64, written: &Written) {
        let Some(place) = self.state_place(nic, copy) else { return };
        let (kind, version) = written.state;
        let head = [u64::from(kind) << 32 | u64::from(version), written.count, written.len as u64, 0];
        let words = head.iter().chain(&written.words[..written.len.div_ceil(8)]);
        place.iter().zip(words).for_each(|(to, from)| to.store(*from, Release));
    }

    fn state_place(&self, nic: u32, copy: u64) -> Option<&[AtomicU64]> {
        let [_, words] = program_state::of_nic(nic);
        self.words[words].chunks_exact(program_state::STATE / 2).nth(usize::from(copy & 1 == 1))
    }

    fn place(&self, nic: u32, copy: u64) -> Option<&[AtomicU64]> {
        let [words, _] = program_state::of_nic(nic);
        self.words[words].chunks_exact(COPY).nth(usize::from(copy & 1 == 1))
    }

    /// Reads one copy of a stock work's words for a NIC. Returns zeros if there is no room for so many NICs.
    pub fn read(&self, nic: u32, copy: u64) -> [u64; COPY] {
        let mut words = [0; COPY];
        let place = self.place(nic, copy).unwrap_or_default();
        words.iter_mut().zip(place).for_each(|(to, from)| *to = from.load(Acquire));
        words
    }

    /// Writes one copy of a stock work's words for a NIC.
    pub fn write(&self, nic: u32, copy: u64, words: [u64; COPY]) {
        let place = self.place(nic, copy).unwrap_or_default();
        place.iter().zip(words).for_each(|(to, from)| to.store(from, Release));
    }
}
