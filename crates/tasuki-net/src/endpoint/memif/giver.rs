//! Moves frames from the VNI into a client's buffers.

use super::client::Attached;
use super::ledger::Ledger;
use super::refusal::Refusal;
use super::ring::{Chain, Room};
use crate::endpoint::Dropped;
use crate::switch::CheckedPrefix;
use crate::vni::Incoming;
use crate::vni::finish::{finish, is_finished};

/// Puts frames into a client's buffers.
pub(super) struct Giver<'a> {
    pub(super) attached: &'a mut Attached,
    pub(super) ledger: &'a mut Ledger,
    pub(super) given: usize,
    pub(super) dropped: &'a mut Dropped,
    pub(super) copy: &'a mut [u8],
    pub(super) chain: &'a mut Chain,
    pub(super) broken: &'a mut Option<Refusal>,
}

impl Giver<'_> {
    #[inline]
    pub(super) fn give(&mut self, incoming: &Incoming<'_>, front: &CheckedPrefix) {
        match incoming.offload() {
            Err(_) => self.dropped.too_late += 1,
            Ok(offload) if is_finished(&offload) => self.give_finished(incoming, front),
            Ok(offload) if incoming.len() > self.copy.len() || !incoming.spares(&offload, front) => {
                self.dropped.malformed += 1;
            }
            Ok(offload) => match incoming.copy_to(self.copy) {
                Err(_) => self.dropped.too_late += 1,
                Ok(len) => {
                    let copy = std::mem::take(&mut self.copy);
                    copy[..front.len()].copy_from_slice(front);
                    if finish(&offload, &mut copy[..len], |front, back| self.give_parts(front, back)).is_err() {
                        self.dropped.malformed += 1;
                    }
                    self.copy = copy;
                }
            },
        }
    }

    fn give_finished(&mut self, incoming: &Incoming<'_>, front: &CheckedPrefix) {
        if !self.has_room(incoming.len()) {
            return;
        }
        let Attached { regions, to, .. } = &mut *self.attached;
        regions.fill(&self.chain.places, incoming.len(), |at, len, into, offset| {
            incoming.copy_to_common(at, len, into, offset)
        });
        // Write the bytes that were checked; the sender may have changed its copy since.
        regions.fill(&self.chain.places, front.len(), |at, len, into, offset| {
            into.copy_from(offset, &front[at..at + len])
        });
        // Otherwise the client sees none of it.
        if incoming.is_whole() {
            to.filled(&self.chain.places, incoming.len(), self.ledger);
            self.given += 1;
        } else {
            self.dropped.too_late += 1;
        }
    }

    /// Like [`give_finished`](Self::give_finished), with a frame in two parts in our own memory.
    fn give_parts(&mut self, front: &[u8], back: &[u8]) {
        let all = front.len() + back.len();
        if !self.has_room(all) {
            return;
        }
        let Attached { regions, to, .. } = &mut *self.attached;
        regions.fill(&self.chain.places, all, |at, len, into, offset| {
            let of_front = &front[at.min(front.len())..(at + len).min(front.len())];
            let of_back = &back[at.max(front.len()) - front.len()..(at + len).max(front.len()) - front.len()];
            into.copy_from(offset, of_front)?;
            into.copy_from(offset + of_front.len(), of_back)
        });
        to.filled(&self.chain.places, all, self.ledger);
        self.given += 1;
    }

    /// Looks for buffers for a frame. If there are none, counts why.
    #[inline]
    fn has_room(&mut self, len: usize) -> bool {
        if self.broken.is_some() {
            self.dropped.away += 1;
            return false;
        }
        let Attached { regions, to, .. } = &mut *self.attached;
        let mut room = to.room(regions, len, self.chain);
        if room == Ok(Room::None) {
            room = to.look().and_then(|_| to.room(regions, len, self.chain));
        }
        match room {
            Ok(Room::Enough) => return true,
            Ok(Room::None) => self.dropped.no_buffer += 1,
            Ok(Room::TooLong) => self.dropped.too_long += 1,
            Err(refusal) => {
                self.dropped.away += 1;
                *self.broken = Some(refusal);
            }
        }
        false
    }
}
