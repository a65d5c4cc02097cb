//! Frames from one node: its ring to us, which we read, and its pool, in which the frames lie.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use tasuki_shm::line::{Line, halves};
use tasuki_shm::pool::{NoSuchPiece, PeerPool, Piece};
use tasuki_shm::region::{CommonRegion, RegionError, Span};
use tasuki_shm::ring::{Broken, Consumer};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::finish::{GSO_ECN, GSO_UDP_L4, finish};
use super::ledger::point;
use super::offload::{HEADER_LEN, NEEDS_CSUM, Offload};
use super::outbox::{WITH_HEADER, piece_of};
use crate::own::{CHECKED_MAX, Own};
use crate::switch::{ADDRESSES_LEN, Addresses, CheckedPrefix};

/// Length in bytes of the offload header.
#[expect(clippy::cast_possible_truncation, reason = "10")]
const HEADER: u32 = HEADER_LEN as u32;

/// The sender took the frame back before it was read: the reader was too slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the frame was taken back by its sender before it was read")]
pub struct TakenBack;

/// A rule that the other node broke. Its ring is no longer looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// A rule of the ring.
    #[error(transparent)]
    Ring(#[from] Broken),
    /// A rule of the pool.
    #[error(transparent)]
    Piece(#[from] NoSuchPiece),
}

/// A frame in another node's memory. The frame is the sender's again when this value is gone.
///
/// A sender that is malicious, or that has waited for us too long, can write to it at any time: copy the frame before
/// looking at its contents.
#[derive(Debug)]
pub struct Incoming<'a> {
    pool: &'a PeerPool,
    piece: Piece,
    /// Length in bytes of the offload header before the frame.
    header: u32,
    /// Number of the node that sent it.
    pub from: u16,
    /// Index of its message in that node's ring to us.
    pub(crate) index: u32,
    /// IP addresses of that node.
    pub(crate) own: &'a Own,
    /// Count of that node's frames with an address that is not its own.
    forged: &'a Cell<u64>,
}

impl Incoming<'_> {
    /// Returns the length of the frame in bytes, without its check sequence.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "no frame is empty")]
    pub fn len(&self) -> usize {
        (self.piece.len - self.header) as usize
    }

    fn frame(&self) -> Piece {
        Piece { offset: self.piece.offset + self.header, len: self.piece.len - self.header, ..self.piece }
    }

    /// Returns a copy of the frame's first bytes, or `None` if it is too short to be a frame.
    #[inline]
    pub(crate) fn front(&self) -> Option<Addresses> {
        (self.len() >= 14).then(|| {
            let [first, second] = [0, ADDRESSES_LEN - 8].map(|at| u64::from_le(self.pool.word(self.frame(), at)));
            Addresses { first, rest: halves(second).1 }
        })
    }

    /// Returns whether work is left to do on the frame.
    #[inline]
    pub(crate) fn is_finished(&self) -> bool {
        self.header == 0
    }

    /// Copies as much of the frame as fits to the front of `into`, whether its sender has taken it back meanwhile or not.
    /// Returns the number of bytes.
    pub(crate) fn copy_front(&self, into: &mut [u8]) -> usize {
        let len = self.len().min(into.len());
        self.pool.copy_to(self.frame(), &mut into[..len]);
        len
    }

    /// Counts the frame as `forged`: not from the node that sent it. If its sender has taken it back meanwhile, counts
    /// it as `too_late`.
    #[cold]
    pub fn refuse(&self, forged: &mut u64, too_late: &mut u64) {
        if self.is_whole() {
            *forged += 1;
            self.forged.set(self.forged.get() + 1);
        } else {
            *too_late += 1;
        }
    }

    /// Copies as much of the frame as fits to the front of `into`. Returns the number of bytes copied.
    #[inline]
    pub fn copy_to(&self, into: &mut [u8]) -> Result<usize, TakenBack> {
        let len = self.len().min(into.len());
        self.pool.copy_to(self.frame(), &mut into[..len]);
        self.check().map(|()| len)
    }

    /// Copies `len` bytes of the frame, from byte `at` on, into memory that another process can write. Trust the copy
    /// only if the frame [is whole](Self::is_whole) afterwards.
    ///
    /// # Panics
    /// If the frame has fewer bytes.
    #[inline]
    pub fn copy_to_common(&self, at: usize, len: usize, into: &CommonRegion, offset: usize) -> Result<(), RegionError> {
        self.pool.copy_to_common(self.frame(), at, len, into, offset)
    }

    /// Returns the work that is left to do on the frame.
    pub fn offload(&self) -> Result<Offload, TakenBack> {
        let mut offload = Offload::new_zeroed();
        if self.header > 0 {
            self.pool.copy_to(Piece { len: self.header, ..self.piece }, offload.as_mut_bytes());
        }
        self.check().map(|()| offload)
    }

    /// Returns whether a receiver that finishes the frame leaves alone what decided that its sender may have sent it.
    /// `front` was checked.
    #[inline]
    pub(crate) fn spares(&self, offload: &Offload, front: &CheckedPrefix) -> bool {
        offload.flags & NEEDS_CSUM == 0 || self.own.decided_by(front).is_some_and(|first| offload.sum_at() >= first)
    }

    /// Writes the offload header and the frame behind it to a descriptor, in one call. The kernel copies the frame out
    /// of the sender's memory, except for `front`, which was checked. Returns the number of frames written: more than one
    /// where the kernel cuts no UDP, none if the sender took the frame back.
    ///
    /// # Errors
    /// The kernel refuses it; or `InvalidData`, if the kernel would write a checksum into what was checked.
    #[inline]
    pub fn write_with_header(&self, fd: BorrowedFd<'_>, front: &CheckedPrefix) -> io::Result<usize> {
        let mut before = [0; HEADER_LEN + CHECKED_MAX];
        if self.header > 0 {
            self.pool.copy_to(self.piece, &mut before[..HEADER_LEN]);
            let (offload, _) = Offload::ref_from_prefix(&before).expect("it is longer");
            if !self.spares(offload, front) {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        let before = &mut before[..HEADER_LEN + front.len()];
        before[HEADER_LEN..].copy_from_slice(front);
        let Piece { offset, len, generation } = self.frame();
        let checked = u32::try_from(front.len()).expect("no longer than the frame");
        let rest = Piece { offset: offset + checked, len: len - checked, generation };
        match self.pool.write_to(fd, before, rest) {
            Ok(_) => Ok(1),
            Err(error) => self.write_in_parts(fd, before, front, error),
        }
    }

    /// Cuts a frame of several UDP datagrams and writes each part, where the kernel did not take it whole: before
    /// Linux 6.2 none does (`virtio_net_hdr_to_skb`). Returns any other frame's error. `before` begins with the offload
    /// header.
    #[cold]
    fn write_in_parts(
        &self,
        fd: BorrowedFd<'_>,
        before: &[u8],
        front: &CheckedPrefix,
        error: io::Error,
    ) -> io::Result<usize> {
        let (offload, _) = Offload::ref_from_prefix(before).expect("it is longer");
        if Errno::from_io_error(&error) != Some(Errno::INVAL) || offload.gso_type & !GSO_ECN != GSO_UDP_L4 {
            return Err(error);
        }
        let mut frame = vec![0; self.len()];
        if self.copy_to(&mut frame).is_err() {
            return Ok(0);
        }
        frame[..front.len()].copy_from_slice(front);
        let (mut count, mut refused) = (0, None);
        let made = finish(offload, &mut frame, |headers, payload| {
            if refused.is_none() {
                let part = [&[0; HEADER_LEN][..], headers, payload].map(IoSlice::new);
                match rustix::io::writev(fd, &part) {
                    Ok(_) => count += 1,
                    Err(errno) => refused = Some(errno),
                }
            }
        });
        made.map_err(|_| io::ErrorKind::InvalidData)?;
        match refused {
            Some(errno) if count == 0 => Err(errno.into()),
            _ => Ok(count),
        }
    }

    /// Returns the frame's bytes where they lie, as 64-bit words in native order; loads each once. Bytes behind the
    /// frame fill up the last word. `None` if the frame does not begin on a whole word, as behind an offload header:
    /// copy it instead.
    ///
    /// Use it only for senders that are trusted not to change what they sent. They too take a frame back from a reader
    /// that is too slow: trust the words only if the frame [is whole](Self::is_whole) afterwards.
    #[inline]
    pub fn words(&self) -> Option<impl ExactSizeIterator<Item = u64>> {
        self.pool.words(self.frame())
    }

    /// Returns whether the frame was still there after it had been read.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.pool.is_whole(self.piece)
    }

    fn check(&self) -> Result<(), TakenBack> {
        if self.is_whole() { Ok(()) } else { Err(TakenBack) }
    }
}

/// Consumer of received frames: a function of each frame, or a type that must also know when they go.
pub trait Reader {
    /// Takes a frame that has arrived.
    fn frame(&mut self, incoming: Incoming<'_>);

    /// Called before the frames of the last look go back to their sender; no successor receives them.
    #[inline]
    fn before_they_go(&mut self) {}
}

impl<F: FnMut(Incoming<'_>)> Reader for F {
    #[inline]
    fn frame(&mut self, incoming: Incoming<'_>) {
        self(incoming);
    }
}

/// Frames from one node.
#[derive(Debug)]
pub(super) struct Inbox {
    ring: Consumer<Span<Line>, Span<Line>, 1>,
    pool: PeerPool,
    /// Index of a message, and how many of its parts a predecessor handled; a GSO packet is cut into parts.
    begun: (u32, u32),
    /// IP addresses of the node.
    pub(super) own: Own,
    /// Number of frames with an address that is not the node's, and that are not counted yet.
    pub(super) forged: Cell<u64>,
    /// The rule that the node broke, until the caller [takes](Self::breach) it.
    ///
    /// Not a result of every look: the code would write that to memory and at once read it back as a whole. The CPU
    /// would then wait until all earlier stores, a burst of frames, are in its cache.
    breach: Option<Breach>,
}

impl Inbox {
    /// `parts` of the first message were handled.
    pub(super) fn new(ring: Consumer<Span<Line>, Span<Line>, 1>, pool: PeerPool, parts: u32, own: Own) -> Self {
        let begun = (ring.head(), parts);
        Inbox { ring, pool, begun, own, forged: Cell::new(0), breach: None }
    }

    /// Marks everything before `head` as handled, and `parts` parts of the message at `head`.
    pub(super) fn retire_to(&mut self, head: u32, parts: u32) {
        self.begun = (head, parts);
        self.ring.retire_to(head, parts);
    }

    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.ring.is_ready()
    }

    /// Passes up to `most` frames to the reader. Returns their number, up to the first [breach](Self::breach).
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

    /// Passes up to `most` frames to `each`; the sender must keep them until they are [retired](Self::retire_to). The
    /// first that `each` refuses, and all behind it, come again. `each` also gets the number of parts that a
    /// predecessor handled, if the frame is one that is cut.
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

    /// Returns whether a look found a broken rule.
    #[inline]
    pub(super) fn is_broken(&self) -> bool {
        self.breach.is_some()
    }

    /// Takes the rule that was broken.
    pub(super) fn breach(&mut self) -> Option<Breach> {
        self.breach.take()
    }
}
