//! Pairs of rings that the worker of a machine's node lends to the workers of other nodes: words in memory that all of them
//! write, and that outlives them, in the program state of the machine's node. docs/decisions/0026-pairs-are-lent.md says why.
//!
//! A *lender* has the machine's front end. A *borrower* has a slot here, which names its node, and a loan at a time.
//!
//! | state    | the next move is    | meaning                                                                     |
//! |----------|---------------------|-----------------------------------------------------------------------------|
//! | home     | the lender's        | there is no loan                                                            |
//! | offered  | the borrower's      | the device of this version may be lent                                      |
//! | ready    | the lender's        | the borrower has its description, and watches it                            |
//! | lent     | anyone's            | the borrower serves the pairs: from these positions, or from its own mark   |
//! | called   | the borrower's      | the lender wants them back                                                  |
//! | returned | the lender's        | the borrower has shown all: the pairs stand at these positions              |
//! | broken   | the lender's        | the same, and the guest broke a rule                                        |
//! | lost     | the lender's        | the borrower's node is gone, and nobody knows where the pairs stand         |
//!
//! # Layout, in words of 8 bytes
//!
//! | words of a slot | contents                                                                        |
//! |-----------------|---------------------------------------------------------------------------------|
//! | 0               | number of the loan (32 bits), first pair, number of pairs, state (8 bits each)  |
//! | 1               | number of the borrower's node, plus 1; 0 if the slot is free                    |
//! | 2, 3            | the device: number of the front end's connection, version of its state          |
//! | 4               | 1 while the node is about to go: its worker takes no more frames from the guest |
//! | 8..             | position of each pair: as a mark has it                                         |
//!
//! Word 0 is the last to change, and always by compare-and-swap. The workers are of one machine, and each can write the
//! guest's memory: a word that lies harms this machine alone. Numbers of pairs are bounded where they are read.

use std::ops::Range;

use super::node_memory::JOURNAL_PAGES;
use crate::line::{LINE_WORDS, Line, halves};
use crate::region::Span;
use crate::sync::{AcqRel, Acquire, AtomicU64, Relaxed, Release};

/// Maximum number of pairs of a machine.
const PAIRS_MAX: usize = JOURNAL_PAGES / 2;

/// Number of slots: a machine's address is shared by as many nodes, and one of them is the lender's.
pub const SLOTS: usize = 8;

/// A line for the loan, and those for its positions.
const SLOT_LINES: usize = 1 + PAIRS_MAX / LINE_WORDS;

/// Number of lines of all loans of a machine.
pub const LINES: usize = SLOTS * SLOT_LINES;

const NODE: usize = 1;
const CONNECTION: usize = 2;
const VERSION: usize = 3;
const LEAVES: usize = 4;

/// The state of a loan: it says which side has the next move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// There is no loan.
    Home,
    /// The device may be lent.
    Offered,
    /// The borrower is ready for it.
    Ready,
    /// The borrower serves the pairs.
    Lent,
    /// The lender wants them back.
    Called,
    /// The lender has them back.
    Returned,
    /// The same, and the guest broke a rule.
    Broken,
    /// The borrower is gone.
    Lost,
}

const STATES: [State; 8] = [
    State::Home,
    State::Offered,
    State::Ready,
    State::Lent,
    State::Called,
    State::Returned,
    State::Broken,
    State::Lost,
];

/// The first word of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loan {
    /// Its number: a slot has none twice.
    pub number: u32,
    /// The first pair, and the number of pairs.
    pub first: u8,
    /// Number of pairs.
    pub count: u8,
    /// Says whose the next move is.
    pub state: State,
}

impl Loan {
    fn of(word: u64) -> Self {
        let (low, number) = halves(word);
        let [state, count, first, _] = low.to_le_bytes();
        Loan { number, first, count, state: STATES.get(usize::from(state)).copied().unwrap_or(State::Home) }
    }

    fn word(self) -> u64 {
        let Loan { number, first, count, state } = self;
        let low = u32::from_le_bytes([state as u8, count, first, 0]);
        u64::from(number) << 32 | u64::from(low)
    }

    /// Returns the same loan in another state.
    pub fn to(self, state: State) -> Self {
        Loan { state, ..self }
    }

    /// Returns its pairs.
    pub fn pairs(self) -> Range<usize> {
        let first = usize::from(self.first).min(PAIRS_MAX);
        first..(first + usize::from(self.count)).min(PAIRS_MAX)
    }

    /// Returns whether the lender does not serve the pairs.
    pub fn is_out(self) -> bool {
        !matches!(self.state, State::Home | State::Offered | State::Ready)
    }

    /// Returns whether a borrower may serve the pairs, or has not said yet where they stand.
    pub fn is_due(self) -> bool {
        matches!(self.state, State::Lent | State::Called)
    }
}

/// The loans of a machine.
#[derive(Debug, Clone)]
pub struct Loans(Span<Line>);

impl Loans {
    /// Opens the loans in these [`LINES`].
    pub fn over(lines: Span<Line>) -> Self {
        assert_eq!(lines.len(), LINES, "the loans have another length");
        Loans(lines)
    }

    fn word(&self, slot: usize, at: usize) -> &AtomicU64 {
        self.0[SLOT_LINES * slot + at / LINE_WORDS].word(at % LINE_WORDS)
    }

    /// Returns the loan of a slot.
    #[inline]
    pub fn loan(&self, slot: usize) -> Loan {
        Loan::of(self.word(slot, 0).load(Acquire))
    }

    /// Returns all loans, with their slots.
    pub fn all(&self) -> impl Iterator<Item = (usize, Loan)> {
        (0..SLOTS).map(|slot| (slot, self.loan(slot)))
    }

    /// Changes the loan of a slot. Returns false if it has changed meanwhile.
    pub fn change(&self, slot: usize, from: Loan, to: Loan) -> bool {
        self.word(slot, 0).compare_exchange(from.word(), to.word(), AcqRel, Acquire).is_ok()
    }

    /// Returns the node of a slot.
    pub fn node(&self, slot: usize) -> Option<u16> {
        u16::try_from(self.word(slot, NODE).load(Acquire).checked_sub(1)?).ok()
    }

    /// Returns the slot of this node: its own, or a free one from now on. Returns none if there is none.
    pub fn claim(&self, node: u16) -> Option<usize> {
        let its = (0..SLOTS).find(|slot| self.node(*slot) == Some(node));
        let free = |slot: &usize| {
            let is_home = self.loan(*slot).state == State::Home;
            let word = u64::from(node) + 1;
            is_home && self.word(*slot, NODE).compare_exchange(0, word, AcqRel, Acquire).is_ok()
        };
        its.or_else(|| (0..SLOTS).find(free))
    }

    /// Takes the slot of a node away that has no worker any more, and never gets one: nobody brings its pairs back.
    pub fn lose(&self, node: u16) {
        let Some(slot) = (0..SLOTS).find(|slot| self.node(*slot) == Some(node)) else { return };
        // The lender may make a move meanwhile, and no more than two of them without the borrower.
        for _ in 0..3 {
            let loan = self.loan(slot);
            let state = match loan.state {
                State::Lent | State::Called => State::Lost,
                State::Offered | State::Ready => State::Home,
                State::Home | State::Returned | State::Broken | State::Lost => break,
            };
            self.change(slot, loan, loan.to(state));
        }
        self.word(slot, LEAVES).store(0, Relaxed);
        self.word(slot, NODE).store(0, Release);
    }

    /// Sets whether a node is about to go, or not after all.
    pub fn set_leaving(&self, node: u16, leaves: bool) {
        let slot = (0..SLOTS).find(|slot| self.node(*slot) == Some(node));
        slot.into_iter().for_each(|slot| self.word(slot, LEAVES).store(leaves.into(), Relaxed));
    }

    /// Returns whether the node of a slot is about to go.
    #[inline]
    pub fn leaves(&self, slot: usize) -> bool {
        self.word(slot, LEAVES).load(Relaxed) != 0
    }

    /// Returns the device that is lent: its connection and version.
    pub fn device(&self, slot: usize) -> (u64, u32) {
        let [connection, version] = [CONNECTION, VERSION].map(|at| self.word(slot, at).load(Relaxed));
        (connection, halves(version).0)
    }

    /// Sets the device that is to be lent, before it is offered.
    pub fn set_device(&self, slot: usize, (connection, version): (u64, u32)) {
        self.word(slot, CONNECTION).store(connection, Relaxed);
        self.word(slot, VERSION).store(version.into(), Relaxed);
    }

    /// Returns where a loan's pairs stand, in their order: the position of the ring to the guest, and of the one from it.
    pub fn positions(&self, slot: usize, loan: Loan) -> impl Iterator<Item = [u16; 2]> {
        let halves_of = |word: u64| [16, 0].map(|shift| u16::try_from(word >> shift & 0xffff).expect("two bytes"));
        (0..loan.pairs().len()).map(move |at| halves_of(self.word(slot, LINE_WORDS + at).load(Relaxed)))
    }

    /// Sets where a loan's pairs stand, before its state says that they do.
    pub fn set_positions(&self, slot: usize, positions: impl IntoIterator<Item = [u16; 2]>) {
        for (at, [to, from]) in positions.into_iter().enumerate().take(PAIRS_MAX) {
            self.word(slot, LINE_WORDS + at).store(u64::from(to) << 16 | u64::from(from), Relaxed);
        }
    }
}
