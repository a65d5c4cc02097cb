//! A card whose rings are elsewhere from now on, in another owner's memory, while its link stays up.
//!
//! A card with one queue is pointed elsewhere, with nobody's rings between the old and the new (the method `repoint`). A card with a queue to spare
//! gets that one filled by the new owner first, and then what comes is steered there (`mbb`, make before break).

use super::bus::Iova;
use super::{Failed, Mac, MemoryLayout, Nic, NicError, NicMemory, NicOptions};

/// How a card's traffic gets to its next owner's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Its queue is pointed at them: `repoint`.
    Point,
    /// The same, from an owner that is not trusted and was fenced: nothing of what it left is believed, and the memory is mapped after the fence. The
    /// card's address is this one.
    Fenced(Mac),
    /// Its spare queue has them already, and is what it steers to from then on: `mbb`.
    Steer,
}

/// How a giver has left its card to who is to point it elsewhere, in a word that travels beside the lease. Who reads it believes nothing that the card does not
/// say, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left(pub u64);

impl Left {
    /// It has stopped it, or has not said how it left it.
    pub const STOPPED: Left = Left(0);
}

/// What a card can do of being left to an owner that has memory of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Can {
    /// [`How::Point`],
    pub point: bool,
    /// with a partner that pauses meanwhile;
    pub pauses: bool,
    /// [`How::Fenced`]: all that an owner can leave in it is written anew, or read back;
    pub fenced: bool,
    /// and [`How::Steer`].
    pub steer: bool,
}

impl Can {
    /// Whether it can go this way, and if not, why.
    pub fn go(self, how: How) -> Result<(), NicError> {
        let refuse = |field, must| Err(NicError::Options { field, value: 0, must });
        match how {
            How::Point if !self.point => {
                refuse("repoint", "its rings cannot be elsewhere while it runs; take keep or cold")
            }
            How::Fenced(_) if !self.fenced => refuse(
                "repoint",
                "what an owner that is not trusted has left in it cannot be read back while it runs; take cold",
            ),
            How::Steer if !self.steer => {
                refuse("mbb", "it has no queue to spare that it can be told to steer to; take keep or cold")
            }
            How::Point | How::Fenced(_) | How::Steer => Ok(()),
        }
    }
}

/// A driver that can point its card at the rings of a successor which has memory of its own, or take it back.
///
/// ```text
///   giver    quiesce ─► receive, handle, transmit … is_quiet ─► leave ──► (could go back) ──► stand_down
///                                                              │  how it left it: a word, and nothing else
///   taker    prepare_rings .......... waits .................. repoint ───► running
/// ```
///
/// The partner is asked to pause, if the card can do that, from `quiesce` until the taker has gone on. The giver handles what had come before. Nothing
/// of the card is initialised but where its rings are; interrupts ring the same eventfds. As the memory is another, what the giver had in its frames the taker cannot see.
///
/// A card that can have nobody pause loses what comes from `leave` on.
///
/// Whoever calls sees to it that only one of the two drives; both have a way to the card, one the twin of the other.
pub trait Repoint: Nic {
    /// A taker whose rings are posted, and which the card does not know yet.
    type Ready;

    /// Maps `memory`, which the card does not reach so far and which nobody else uses, and puts free slots into rings there. The card is asked for what it
    /// is set up for, and nothing of it is changed but a queue to spare: the giver drives meanwhile, and must not change its filter from now
    /// on. Its rings begin at `from`: a card with several queues is asked which it is.
    ///
    /// # Errors
    /// `options` are not what the card was started with (ring, queues, payload; others are the card's), the memory cannot be mapped, or the card cannot
    /// go this way.
    fn prepare_rings(
        bus: Self::Bus,
        memory: NicMemory,
        options: &NicOptions,
        how: How,
        from: Iova,
    ) -> Result<Self::Ready, Failed<Self::Bus>>;

    /// What this card can do of it.
    fn can(&self) -> Can;

    /// It comes to nothing: takes the memory away from the card.
    fn give_up(ready: Self::Ready) -> (Self::Bus, NicMemory);

    /// Has the partner pause, if that is possible; or has the card steer what comes to the successor's queue. Frames go on coming for a while, and are
    /// received and sent as before, also in `between`, while the card is asked for one thing after the other.
    fn quiesce(&mut self, how: How, between: impl FnMut(&mut Self));

    /// Whether nothing is left to be done by a giver that goes on receiving and sending: to be asked whenever a call of `receive` gave nothing. True, too, when
    /// the partner does not pause, or does not take what is to be sent, for too long.
    fn is_quiet(&mut self) -> bool;

    /// Leaves a card that is [quiet](Self::is_quiet): how, [`left`](Self::left) says. If its partner pauses it runs on, and what comes once the pause is over comes into our
    /// rings, for whoever drives it by then: a taker that is late has nothing lost. Else it is stopped, and touches no memory. If this says no, frames
    /// have come at the last moment: they are to be received and handled, and this is to be called again.
    fn leave(&mut self) -> Result<bool, NicError>;

    /// How the card was left.
    fn left(&self) -> Left;

    /// Drives the card again after `leave`, whatever a taker has done that is no more: its memory may be gone.
    fn go_back(&mut self) -> Result<(), NicError>;

    /// Points the card, which its giver has `left` so, at the prepared rings, and drives it.
    ///
    /// # Errors
    /// The card is not as it was left, because frames have come for a giver that is not fenced, or it is gone. It goes on as it was then.
    fn repoint(ready: Self::Ready, left: Left) -> Result<Self, Failed<Self::Bus>>;

    /// Frames that came, by what `repoint` was told and has found, between a giver's [`leave`](Self::leave) and its fence, and which nobody has therefore.
    fn came_too_late(&self) -> u64 {
        0
    }

    /// Keeps the card from memory of a former owner's that lies there, and that it uses no longer: whether that owner is alive or not. Asks the card
    /// and the bus, and waits for their answers; after each, whoever drives sees in `between` to the frames that have come meanwhile.
    ///
    /// # Errors
    /// Nothing is mapped there, or the card or the bus refuses.
    fn forget(&mut self, old: &MemoryLayout, between: impl FnMut(&mut Self)) -> Result<(), NicError>;
}
