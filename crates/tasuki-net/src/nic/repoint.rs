//! Hands a card's traffic to another owner's memory while its link stays up: its rings are there from then on.
//!
//! A card with one queue is pointed at the new rings directly, with no other rings in between (the method
//! `repoint`). On a card with a spare queue, the new owner fills that queue first, and then the card steers received
//! frames there (`mbb`, make before break).

use std::time::Duration;

use super::bus::Iova;
use super::{Failed, Mac, MemoryLayout, Nic, NicError, NicMemory, NicOptions};

/// Method by which a card's traffic gets to its next owner's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// `repoint`: the card's queue is pointed at the new rings.
    Point,
    /// Like `Point`, from an owner that is not trusted and was fenced. The taker trusts nothing that this owner
    /// left, and maps the memory after the fence. The field is the card's Ethernet address.
    Fenced(Mac),
    /// `mbb`: the spare queue has the new rings already, and the card steers to it from then on.
    Steer,
}

/// How a giver left its card to the taker that will point it elsewhere, as one word that travels beside the lease.
/// The reader trusts nothing in it that the card does not confirm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left(pub u64);

impl Left {
    /// The giver stopped the card, or did not say how it left it.
    pub const STOPPED: Left = Left(0);
}

/// Ways in which a card can be left to an owner that has memory of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Can {
    /// The card supports [`How::Point`].
    pub point: bool,
    /// With [`How::Point`], the card can have its link partner pause meanwhile.
    pub pauses: bool,
    /// The card supports [`How::Fenced`]: everything that an owner can leave in it is written anew or can be read
    /// back.
    pub fenced: bool,
    /// The card supports [`How::Steer`].
    pub steer: bool,
}

impl Can {
    /// Checks whether the card supports `how`; the error says why not.
    pub fn go(self, how: How) -> Result<(), NicError> {
        let refuse = |field, must| Err(NicError::Options { field, value: 0, must });
        match how {
            How::Point if !self.point => refuse("repoint", "its rings cannot be elsewhere while it runs"),
            How::Fenced(_) if !self.fenced => {
                refuse("repoint", "what an owner that is not trusted has left in it cannot be read back while it runs")
            }
            How::Steer if !self.steer => refuse("mbb", "it has no queue to spare that it can be told to steer to"),
            How::Point | How::Fenced(_) | How::Steer => Ok(()),
        }
    }
}

/// A driver that can point its card at the rings of a successor that has memory of its own, or take the card back.
///
/// ```text
///   giver    quiesce ─► receive, handle, transmit … is_quiet ─► leave ──► (could go back) ──► stand_down
///                                                              │  how it left it: a word, and nothing else
///   taker    prepare_rings .......... waits .................. repoint ───► running
/// ```
///
/// If the card supports it, the giver asks the link partner to pause, from `quiesce` until the taker has gone on.
/// The giver handles the frames that came before. The taker initialises nothing of the card but the location of its
/// rings; interrupts ring the same eventfds. Since the memory is another, the taker cannot see the contents of the
/// giver's frames.
///
/// A card that cannot have its partner pause loses the frames that come from `leave` on.
///
/// The caller ensures that only one of the two drives. Each has a bus to the card, one the twin of the other.
pub trait Repoint: Nic {
    /// A taker that has posted its rings, which the card does not know yet.
    type Ready;

    /// Maps `memory` and posts free slots to rings there. The card must not reach `memory` so far, and no other
    /// process may use it. Reads from the card how it is set up, and changes nothing of it but a spare queue. The
    /// giver drives meanwhile, and must not change its filter from now on. `from` is the address of the giver's
    /// rings: a driver whose card has several queues asks the card which of them begins there.
    ///
    /// # Errors
    /// `options` differ from those that the card was started with, the memory cannot be mapped, or the card does not
    /// support `how`. Of the options, only ring, queues and payload must match; the others are the card's.
    fn prepare_rings(
        bus: Self::Bus,
        memory: NicMemory,
        options: &NicOptions,
        how: How,
        from: Iova,
    ) -> Result<Self::Ready, Failed<Self::Bus>>;

    /// Returns which methods this card supports.
    fn can(&self) -> Can;

    /// Abandons the handover: takes the memory away from the card.
    fn give_up(ready: Self::Ready) -> (Self::Bus, NicMemory);

    /// Has the link partner pause, if the card supports it, or has the card steer received frames to the successor's
    /// queue. Frames keep coming for a while; the giver receives and sends as before. It does so in `between`, too,
    /// which is called between the requests to the card.
    fn quiesce(&mut self, how: How, between: impl FnMut(&mut Self));

    /// Returns whether a giver that keeps receiving and sending has nothing left to do. Ask whenever a call of
    /// `receive` returned no frames. Also true when, for too long, the partner does not pause, or does not take the
    /// frames that are to be sent.
    fn is_quiet(&mut self) -> bool;

    /// Leaves a [quiet](Self::is_quiet) card; [`left`](Self::left) says in what state. If its partner pauses, the
    /// card runs on. Frames that come after the pause go into our rings, for the driver that has the card by then.
    /// So a late taker loses none. Otherwise the card is stopped and touches no memory. Returns false if frames came
    /// at the last moment: receive and handle them, then call this again.
    fn leave(&mut self) -> Result<bool, NicError>;

    /// Returns how the card was left.
    fn left(&self) -> Left;

    /// Drives the card again after `leave`, whatever a taker that has ended did to it: the taker's memory may be
    /// gone.
    fn go_back(&mut self) -> Result<(), NicError>;

    /// Points the card at the prepared rings, and drives it. `left` says how the giver left the card.
    ///
    /// # Errors
    /// The card is gone, or is not as it was left, because frames have come for a giver that is not fenced. The card
    /// then goes on as it was.
    fn repoint(ready: Self::Ready, left: Left) -> Result<Self, Failed<Self::Bus>>;

    /// Number of frames that are lost because they came between a giver's [`leave`](Self::leave) and its fence, as
    /// far as `repoint` was told and has found.
    fn came_too_late(&self) -> u64 {
        0
    }

    /// How long `repoint` took, if that was longer than the partner pauses. The card loses frames that come then, and does
    /// not count them.
    fn was_held_up(&self) -> Option<Duration> {
        None
    }

    /// Cuts the card off from memory of a former owner that the card no longer uses, whether that owner is alive or
    /// not. Sends requests to the card and the bus, and waits for their answers; calls `between` after each, so that
    /// the caller can handle frames that have come meanwhile.
    ///
    /// # Errors
    /// Nothing is mapped there, or the card or the bus refuses.
    fn forget(&mut self, old: &MemoryLayout, between: impl FnMut(&mut Self)) -> Result<(), NicError>;
}
