//! What one node sends to us: its ring, which we read, and its pool, in which the frames lie.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;

use tasuki_shm::line::Line;
use tasuki_shm::pool::{NoSuchPiece, PeerPool, Piece};
use tasuki_shm::region::{CommonRegion, RegionError, Span};
use tasuki_shm::ring::{Broken, Consumer};
use zerocopy::{FromZeros, IntoBytes};

use super::ledger::point;
use super::offload::{HEADER_LEN, Offload};
use super::outbox::{WITH_HEADER, piece_of};
use crate::own::{FRONT_MAX, Own};
use crate::switch::{FRONT, Front};

/// Bytes before a frame that has them.
#[expect(clippy::cast_possible_truncation, reason = "10")]
const HEADER: u32 = HEADER_LEN as u32;

/// The frame was taken back before it was read: we were too slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the frame was taken back by its sender before it was read")]
pub struct TakenBack;

/// A rule that the other node broke. Its ring is looked at no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// Of the ring.
    #[error(transparent)]
    Ring(#[from] Broken),
    /// Of the pool.
    #[error(transparent)]
    Piece(#[from] NoSuchPiece),
}

/// A frame in another node's memory. It is the sender's again when this is gone.
///
/// The sender can write it at any time, if it means harm or has waited for us too long: so copy it before looking at what it says.
#[derive(Debug)]
pub struct Incoming<'a> {
    pool: &'a PeerPool,
    piece: Piece,
    /// Bytes before the frame.
    header: u32,
    /// The node that sent it.
    pub from: u16,
    /// Its place in that node's ring to us.
    pub(super) index: u32,
    /// That node's addresses of IP,
    pub(crate) own: &'a Own,
    /// and frames of it that were not from it.
    forged: &'a Cell<u64>,
}

impl Incoming<'_> {
    /// Bytes of the frame, without check sequence.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "no frame is empty")]
    pub fn len(&self) -> usize {
        (self.piece.len - self.header) as usize
    }

    fn frame(&self) -> Piece {
        Piece { offset: self.piece.offset + self.header, len: self.piece.len - self.header, ..self.piece }
    }

    /// A copy of the frame's first bytes; none of what is too short to be a frame.
    #[inline]
    pub(crate) fn front(&self) -> Option<[u8; FRONT]> {
        let mut front = [0; FRONT];
        (self.len() >= 14).then(|| self.pool.copy_to(self.frame(), &mut front))?;
        Some(front)
    }

    /// More of them, as much as says from whose address of IP the frame is.
    #[cold]
    pub(crate) fn long_front(&self) -> Front {
        let mut front = [0; FRONT_MAX];
        let len = self.len().min(FRONT_MAX);
        self.pool.copy_to(self.frame(), &mut front[..len]);
        front[..len].iter().copied().collect()
    }

    /// Counts it as a frame that is not from the node that sent it; as one that came too late, if its sender has taken it back meanwhile.
    #[cold]
    pub fn refuse(&self, forged: &mut u64, too_late: &mut u64) {
        if self.is_whole() {
            *forged += 1;
            self.forged.set(self.forged.get() + 1);
        } else {
            *too_late += 1;
        }
    }

    /// Copies the frame into the front of `into`, as much of it as fits; says how many bytes that are.
    #[inline]
    pub fn copy_to(&self, into: &mut [u8]) -> Result<usize, TakenBack> {
        let len = self.len().min(into.len());
        self.pool.copy_to(self.frame(), &mut into[..len]);
        self.check().map(|()| len)
    }

    /// Copies `len` bytes from byte `at` of the frame on to where a stranger has its memory. To be believed if the frame
    /// [is whole](Self::is_whole) afterwards.
    ///
    /// # Panics
    /// If the frame has fewer bytes.
    #[inline]
    pub fn copy_to_common(&self, at: usize, len: usize, into: &CommonRegion, offset: usize) -> Result<(), RegionError> {
        self.pool.copy_to_common(self.frame(), at, len, into, offset)
    }

    /// What is left to be done to the frame.
    pub fn offload(&self) -> Result<Offload, TakenBack> {
        let mut offload = Offload::new_zeroed();
        if self.header > 0 {
            self.pool.copy_to(Piece { len: self.header, ..self.piece }, offload.as_mut_bytes());
        }
        self.check().map(|()| offload)
    }

    /// Copies the offload header and the frame behind it into the front of `into`; says how many bytes that are in all.
    pub fn copy_with_header(&self, into: &mut [u8]) -> Result<usize, TakenBack> {
        if self.header > 0 {
            let len = (self.piece.len as usize).min(into.len());
            self.pool.copy_to(self.piece, &mut into[..len]);
            return self.check().map(|()| len);
        }
        let (header, frame) = into.split_at_mut(HEADER_LEN);
        header.fill(0);
        self.copy_to(frame).map(|len| HEADER_LEN + len)
    }

    /// Writes the offload header and the frame behind it to a descriptor in one go. The kernel copies them out of the sender's memory, but for the front,
    /// which was checked.
    #[inline]
    pub fn write_with_header(&self, fd: BorrowedFd<'_>, front: &Front) -> io::Result<usize> {
        let mut before = [0; HEADER_LEN + FRONT_MAX];
        if self.header > 0 {
            self.pool.copy_to(self.piece, &mut before[..HEADER_LEN]);
        }
        let before = &mut before[..HEADER_LEN + front.len()];
        before[HEADER_LEN..].copy_from_slice(front);
        let Piece { offset, len, generation } = self.frame();
        let checked = u32::try_from(front.len()).expect("no longer than the frame");
        self.pool.write_to(fd, before, Piece { offset: offset + checked, len: len - checked, generation })
    }

    /// The frame's bytes where they lie, as 64-bit words in native order, each loaded once. The last is filled up with what lies behind. `None`
    /// for a frame that does not begin on a whole word, as one behind an offload header: copy it.
    ///
    /// For senders that are trusted to leave alone what they have sent. They too take a frame back from a reader that is too slow: what was
    /// read is to be believed if the frame [is whole](Self::is_whole) afterwards.
    #[inline]
    pub fn words(&self) -> Option<impl ExactSizeIterator<Item = u64>> {
        self.pool.words(self.frame())
    }

    /// Whether the frame was still there when it had been read.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.pool.is_whole(self.piece)
    }

    fn check(&self) -> Result<(), TakenBack> {
        if self.is_whole() { Ok(()) } else { Err(TakenBack) }
    }
}

/// Who takes in what comes: a function of each frame, or one who must also know when they go.
pub trait Reader {
    /// A frame has come.
    fn frame(&mut self, incoming: Incoming<'_>);

    /// Those that came last are their sender's again next, and come to no successor.
    #[inline]
    fn before_they_go(&mut self) {}
}

impl<F: FnMut(Incoming<'_>)> Reader for F {
    #[inline]
    fn frame(&mut self, incoming: Incoming<'_>) {
        self(incoming);
    }
}

/// What one node sends to us.
#[derive(Debug)]
pub(super) struct Inbox {
    ring: Consumer<Span<Line>, Span<Line>, 1>,
    pool: PeerPool,
    /// Of the message at this index so many parts were handled by a predecessor: what a segment was cut into.
    begun: (u32, u32),
    /// The node's addresses of IP.
    pub(super) own: Own,
    /// Frames that were not from the node, and were not counted yet.
    pub(super) forged: Cell<u64>,
    /// The rule that was broken, until somebody [asks](Self::breach).
    ///
    /// Not a result of every look: that would be written to memory and read back as a whole at once, for which the CPU waits until all that was
    /// stored before, a burst of frames, is in its cache.
    breach: Option<Breach>,
}

impl Inbox {
    /// `parts` of the first message were handled.
    pub(super) fn new(ring: Consumer<Span<Line>, Span<Line>, 1>, pool: PeerPool, parts: u32, own: Own) -> Self {
        let begun = (ring.head(), parts);
        Inbox { ring, pool, begun, own, forged: Cell::new(0), breach: None }
    }

    /// Everything before `head` was handled, and of the message there so many parts.
    pub(super) fn retire_to(&mut self, head: u32, parts: u32) {
        self.begun = (head, parts);
        self.ring.retire_to(head, parts);
    }

    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.ring.is_ready()
    }

    /// Hands over up to `most` frames; says how many there were, before the first [breach](Self::breach).
    #[inline]
    pub(super) fn receive(&mut self, from: u16, most: usize, reader: &mut impl Reader) -> usize {
        let count = self.take(from, most, &mut |incoming, _| {
            reader.frame(incoming);
            true
        });
        if count > 0 {
            reader.before_they_go();
            point("vni.retiring");
            self.ring.retire();
        }
        count
    }

    /// Hands over up to `most` frames that stay the sender's to keep until they are [retired](Self::retire_to). From the first on that `each` does not
    /// take they come again. It is told how many parts of the frame were handled by a predecessor: of what it makes when it is cut.
    #[inline]
    pub(super) fn take(&mut self, from: u16, most: usize, each: &mut impl FnMut(Incoming<'_>, u32) -> bool) -> usize {
        let mut count = 0;
        while count < most {
            let index = self.ring.head();
            let message = match self.ring.pop() {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(broken) => {
                    self.breach = Some(broken.into());
                    break;
                }
            };
            let piece = piece_of(&message);
            let header = if message.tag.get() & WITH_HEADER == 0 { 0 } else { HEADER };
            let checked = self.pool.check(Piece { len: piece.len.saturating_sub(header), ..piece });
            if let Err(wrong) = checked.and_then(|()| self.pool.check(piece)) {
                self.breach = Some(wrong.into());
                break;
            }
            let handled = if self.begun.0 == index { self.begun.1 } else { 0 };
            if !each(
                Incoming { pool: &self.pool, piece, header, from, index, own: &self.own, forged: &self.forged },
                handled,
            ) {
                self.ring.put_back(index);
                break;
            }
            count += 1;
        }
        count
    }

    /// Whether a look found a rule broken.
    #[inline]
    pub(super) fn is_broken(&self) -> bool {
        self.breach.is_some()
    }

    /// Which.
    pub(super) fn breach(&mut self) -> Option<Breach> {
        self.breach.take()
    }
}
