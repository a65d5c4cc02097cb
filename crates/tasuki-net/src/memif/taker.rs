//! Moves frames from a client to their destinations.

use std::ops::Deref;
use std::time::Instant;

use tasuki_shm::line::Line;
use tasuki_shm::vni::directory::Mac;

use super::Dropped;
use crate::slow::Slow;
use crate::switch::{Switch, To};
use crate::vni::offload::HEADER_LEN;
use crate::vni::{PIECE_MAX, SendError, Vni};

/// Sends a client's frames to their destinations.
pub(super) struct Taker<'a, M> {
    pub(super) vni: &'a mut Vni,
    pub(super) switch: &'a mut Switch<M>,
    pub(super) taken: &'a mut u64,
    pub(super) dropped: &'a mut Dropped,
    pub(super) slow: &'a mut Slow,
    pub(super) waits: &'a mut Option<Instant>,
}

impl<M: Deref<Target = [Line]>> Taker<'_, M> {
    /// Sends a frame of `len` bytes; `copy` copies its front. Returns false if the frame must wait.
    ///
    /// The client may change the frame at any time. The addresses read first decide where it goes, and the sent frame
    /// carries the same ones.
    #[inline]
    pub(super) fn pass_on(&mut self, len: usize, copy: impl Fn(&mut [u8])) -> bool {
        if !(14..=PIECE_MAX - HEADER_LEN).contains(&len) {
            self.dropped.length += 1;
            return true;
        }
        let mut addresses = [0; 14];
        copy(&mut addresses);
        let fill = |room: &mut [u8]| {
            copy(room);
            room[..14].copy_from_slice(&addresses);
        };
        let [mac, from] = [0, 6].map(|at| Mac::try_from(&addresses[at..at + 6]).expect("six bytes"));
        if !self.switch.may_send(from) {
            self.dropped.not_own += 1;
            return true;
        }
        let several = match self.switch.find(mac) {
            To::Node(node) => return self.pass_to(node, len, fill),
            To::Nobody => {
                self.dropped.nobody += 1;
                return true;
            }
            several => self.switch.nodes_of(several),
        };
        match self.vni.send_to_all(several.iter(), len, false, fill) {
            Ok(_) => *self.taken += 1,
            Err(_) => self.dropped.no_room += 1,
        }
        true
    }

    /// Like [`pass_on`](Self::pass_on), to one node.
    #[inline]
    fn pass_to(&mut self, node: u16, len: usize, fill: impl FnOnce(&mut [u8])) -> bool {
        let waited = self.waits.take();
        match self.vni.draft(node, len) {
            Ok(room) => {
                fill(room);
                self.vni.post(node, len, false);
                *self.taken += 1;
                self.slow.had_room(node);
            }
            Err(SendError::NoRoom(_)) => {
                let since = waited.unwrap_or_else(Instant::now);
                if self.slow.may_wait(node, since) {
                    // The node has no room: let it see the frames that are already there.
                    self.vni.flush();
                    *self.waits = Some(since);
                    return false;
                }
                self.dropped.no_room += 1;
            }
            Err(_) => self.dropped.nobody += 1,
        }
        true
    }
}
