//! The device's end of a virtqueue, in memory that its driver can write at any time.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, 2.6 to 2.8.
//!
//! A queue has one of two layouts, which the driver chooses: [`Split`] and [`Packed`]. What is done for each frame is
//! [`Ring`], so that code is made for each layout, and none asks for it within a burst.
//!
//! # Rules
//!
//! - **Q1** Our two positions are private. Those of a split ring are stored for the driver to see, and loaded from its
//!   memory only when a queue starts. Those of a packed ring are never loaded.
//! - **Q2** The driver is at most a queue ahead of us: a split ring's index says no more, and of a packed ring we take no
//!   descriptor twice before the driver has seen it used.
//! - **Q3** The values of a descriptor come from one read, and are used only after a check that its bytes lie in memory
//!   that was announced.
//! - **Q4** A chain has at most [`PIECES_MAX`] descriptors and pieces, so that a loop ends, and soon.
//! - **Q5** Chains complete in the order in which they were made available.
//!
//! The model of the card (`tasuki-sim`) has an end of its own: a judge of drivers must share no code with them.

use arrayvec::ArrayVec;

pub use memory::{DriverMemory, Log, MemoryRegion, Piece, REGIONS_MAX};
pub use packed::{COMPLETIONS_MAX, Packed};
pub use split::Split;

mod memory;
mod packed;
mod split;

/// Maximum number of pieces of a chain.
pub const PIECES_MAX: usize = 256;

/// Maximum number of descriptors of a queue (2.7, 2.8).
pub const SIZE_MAX: u16 = 32768;

/// Length of a descriptor in bytes.
const DESCRIPTOR_LEN: usize = 16;
/// Flags of a descriptor (2.7.5, 2.8.3, 2.8.6, 2.8.7).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The rule that a driver broke. Its device needs a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A number of descriptors that no queue has.
    #[error(
        "a queue of {0} descriptors is none: the number is up to {SIZE_MAX}, and for a split ring it is a power of two"
    )]
    Size(u32),
    /// A part of the queue is not aligned, or not in memory that was announced.
    #[error("a ring lies outside the memory that was announced, or is not aligned")]
    Ring,
    /// A packed ring is to start at a descriptor that does not exist.
    #[error("a ring starts at descriptor {0}, which does not exist")]
    Start(u16),
    /// Q2.
    #[error("the available index is more than a queue ahead")]
    Overrun,
    /// The available ring names a descriptor that does not exist.
    #[error("the available ring names a descriptor that does not exist")]
    Head,
    /// Q3.
    #[error("a descriptor lies outside the memory that was announced")]
    Outside,
    /// Q4.
    #[error("a chain has more than {PIECES_MAX} descriptors or pieces, or is a loop")]
    Chain,
    /// A table of descriptors in a descriptor is odd: in itself, with a successor, or of no whole number.
    #[error("an indirect table is within another, is followed by a descriptor, or has a broken descriptor")]
    Indirect,
    /// The memory went away.
    #[error("the driver's memory was taken away")]
    Gone,
}

/// What is needed to complete a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Head {
    /// By which the driver knows the chain: the index of its first descriptor in a split ring, its buffer id in a packed
    /// one.
    pub id: u16,
    /// Number of descriptors that it takes in a packed ring.
    pub slots: u16,
}

/// A chain of descriptors.
#[derive(Debug, Default)]
pub struct Chain {
    /// What completes it.
    pub head: Head,
    /// Pieces for us to read.
    pub readable: ArrayVec<Piece, PIECES_MAX>,
    /// Pieces for us to write.
    pub writable: ArrayVec<Piece, PIECES_MAX>,
}

/// Returns the number of bytes of these pieces.
#[inline]
pub fn len_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.len).sum()
}

/// How the descriptors of a queue are laid out, as the driver chose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// 2.7
    Split,
    /// 2.8
    Packed,
}

/// Where a queue lies, as the front end names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Place {
    /// Number of descriptors.
    pub size: u16,
    /// The front end's address of the descriptors.
    pub descriptors: u64,
    /// The front end's address of the available ring, or of a packed ring's driver area.
    pub available: u64,
    /// The front end's address of the used ring, or of a packed ring's device area.
    pub used: u64,
}

impl Place {
    /// Returns each part: its address, and its length in bytes.
    fn parts(&self, layout: Layout) -> [(u64, usize); 3] {
        let size = usize::from(self.size);
        let [available, used] = match layout {
            Layout::Split => [split::available_len(size), split::used_len(size)],
            Layout::Packed => [packed::EVENT_LEN; 2],
        };
        [(self.descriptors, DESCRIPTOR_LEN * size), (self.available, available), (self.used, used)]
    }

    /// Returns the number of bytes from the address at which a front end has writes to the used ring noted.
    pub fn logged_len(&self, layout: Layout) -> usize {
        self.parts(layout)[2].1
    }
}

/// A descriptor, read once.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    /// The next descriptor of a split ring, or a packed ring's buffer id.
    next: u16,
}

/// The device's end of a ring, as far as each frame needs it.
pub trait Ring {
    /// Where a ring was, to [rewind](Self::rewind) it.
    type State: Copy;

    /// Returns the number of descriptors.
    fn size(&self) -> u16;

    /// Looks whether the driver has made a chain available that we have not taken (Q2).
    fn look(&mut self) -> Result<bool, Broken>;

    /// Takes the next chain. Returns false if there is none.
    fn take(&mut self, memory: &DriverMemory, chain: &mut Chain) -> Result<bool, Broken>;

    /// Returns the address of the first bytes of the chain that is `ahead` behind the next, if the driver has made it
    /// available. It is unchecked: a hint.
    fn address_ahead(&mut self, ahead: u16) -> Option<u64>;

    /// Returns the head of the next chain and its piece, if it is plain: one descriptor with at least `len` bytes for us
    /// to write, in one region. Does not take it: [`complete_next`](Self::complete_next) does.
    fn next_plain(&mut self, memory: &DriverMemory, len: usize) -> Result<Option<(Head, Piece)>, Broken>;

    /// Takes the next chain, which has this head, and [completes](Self::complete) it.
    fn complete_next(&mut self, head: Head, len: u32);

    /// Completes the oldest chain taken (Q5), into which we wrote `len` bytes. The driver sees it when it is shown.
    fn complete(&mut self, head: Head, len: u32);

    /// Returns how many chains can be taken before completions must be shown.
    fn left(&self) -> usize;

    /// Puts back the last chain that was taken, which has this head.
    fn put_back(&mut self, head: Head);

    /// Returns where it is.
    fn state(&self) -> Self::State;

    /// Puts the chains back that were taken since, and forgets those that were completed since. None was shown.
    fn rewind(&mut self, to: Self::State);
}

/// The device's end of a queue.
#[derive(Debug)]
pub enum Queue {
    /// 2.7
    Split(Split),
    /// 2.8
    Packed(Packed),
}

/// Does the same with a queue of either layout.
macro_rules! either {
    ($queue:expr, $ring:ident => $what:expr) => {
        match $queue {
            Queue::Split($ring) => $what,
            Queue::Packed($ring) => $what,
        }
    };
}

impl Queue {
    /// Returns the number of descriptors.
    pub fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// Returns the position of the next chain, and that of the next completion.
    pub fn positions(&self) -> (u16, u16) {
        either!(self, ring => ring.positions())
    }

    /// Returns how much was shown since the queue was opened: a number that wraps, of chains or, in a packed ring, of
    /// descriptors.
    pub fn progress(&self) -> u16 {
        either!(self, ring => ring.progress())
    }

    /// Looks whether the driver has made a chain available that we have not taken (Q2).
    pub fn look(&mut self) -> Result<bool, Broken> {
        either!(self, ring => ring.look())
    }

    /// Shows the completed chains to the driver. Returns whether it wants an interrupt for them (2.7.7, 2.8.10).
    #[inline]
    pub fn show(&mut self) -> bool {
        either!(self, ring => ring.show())
    }

    /// Tells the driver whether to kick when it makes chains available (2.7.10, 2.8.10). This is a hint: look once more
    /// afterwards.
    pub fn want_kicks(&mut self, yes: bool) {
        either!(self, ring => ring.want_kicks(yes));
    }

    /// Has all writes to the ring noted, or none. `log` is the driver's address of a split ring's used ring.
    pub fn set_log(&mut self, log: Option<u64>) {
        either!(self, ring => ring.set_log(log));
    }

    /// Notes what we write in the ring, a few pages, if it was written since the last time and such notes are taken.
    #[inline]
    pub fn note_used(&mut self, memory: &DriverMemory) {
        either!(self, ring => ring.note_used(memory));
    }
}

#[inline]
fn add(memory: &DriverMemory, descriptor: Descriptor, chain: &mut Chain) -> Result<(), Broken> {
    let pieces = if descriptor.flags & WRITE == 0 { &mut chain.readable } else { &mut chain.writable };
    memory.pieces(descriptor.address, descriptor.len, pieces)
}

/// A table of descriptors that a descriptor names (2.7.5.3, 2.8.7).
struct Table {
    lies: ArrayVec<Piece, PIECES_MAX>,
    count: usize,
}

impl Table {
    fn of(memory: &DriverMemory, descriptor: Descriptor) -> Result<Self, Broken> {
        let len = descriptor.len as usize;
        if !len.is_multiple_of(DESCRIPTOR_LEN) || len == 0 {
            return Err(Broken::Indirect);
        }
        let mut lies = ArrayVec::new();
        memory.pieces(descriptor.address, descriptor.len, &mut lies)?;
        Ok(Table { lies, count: len / DESCRIPTOR_LEN })
    }

    /// Returns the words of the descriptor at `at`.
    fn words(&self, memory: &DriverMemory, at: usize) -> [u64; 2] {
        let mut bytes = [0; DESCRIPTOR_LEN];
        memory.copy_to(&self.lies, at * DESCRIPTOR_LEN, &mut bytes);
        [0, 8].map(|at| u64::from_ne_bytes(*bytes[at..].first_chunk().expect("16 bytes are two words")))
    }
}
