//! Sends the frames of a node to their destinations. Here is the one policy for frames that find no room: a frame waits
//! for its destination for a bounded time, with all frames behind it; then it is dropped and counted.

use std::time::{Duration, Instant};

use tasuki_shm::vni::directory::Mac;
use zerocopy::IntoBytes;

use super::Dropped;
use super::notes::Notes;
use super::rate::Rate;
use super::slow::Slow;
pub use super::slow::WAIT;
use crate::flow::{FLOW_PREFIX, flow_of};
use crate::switch::{Switch, To};
use crate::vni::finish::is_finished;
use crate::vni::ledger::point;
use crate::vni::offload::{HEADER_LEN, Offload};
use crate::vni::{PIECE_MAX, SendError, Vni};

/// How soon a sender that waits looks for room again. No node rings when it has room.
pub(crate) const ROOM_AGAIN: Duration = Duration::from_micros(20);

/// How soon a node that may not send listens to its programs' control channels again.
const HEAR_AGAIN: Duration = Duration::from_millis(10);

/// What is known of frames that found no room.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// When the next frame began to wait.
    since: Option<Instant>,
    /// The frame that waits in staging: its node, and its length in bytes.
    staged: Option<(u16, usize)>,
    slow: Slow,
    /// The pool had no room to stage a frame.
    is_full: bool,
    /// Time until the node may send again, by its rate.
    pub(super) rate: Option<Duration>,
}

impl Waits {
    /// Returns whether a frame waits for room.
    pub(super) fn for_room(&self) -> bool {
        self.since.is_some()
    }

    /// Returns whether frames wait: for room, or for the time at which they may go.
    pub(crate) fn any(&self) -> bool {
        self.for_room() || self.rate.is_some()
    }

    /// Returns how soon to look again.
    pub(crate) fn again_in(&self) -> Option<Duration> {
        let is_short = self.since.is_some() || self.is_full;
        let for_room = self.staged.is_some() || self.rate.is_none() && is_short;
        if for_room { Some(ROOM_AGAIN) } else { self.rate.map(|rate| rate.min(HEAR_AGAIN)) }
    }

    /// Returns the length in bytes of the frame that waits in staging.
    pub(super) fn staged(&self) -> Option<usize> {
        self.staged.map(|(_, len)| len)
    }

    /// Forgets the frame that waits: it will not go.
    pub(crate) fn clear(&mut self) {
        (self.since, self.staged) = (None, None);
    }
}

/// Sends frames into a VNI for one turn. Their receivers see them once the VNI is [flushed](Vni::flush).
#[derive(Debug)]
pub struct Egress<'a> {
    pub(crate) vni: &'a mut Vni,
    pub(crate) switch: &'a mut Switch,
    pub(crate) notes: Option<&'a mut Notes>,
    pub(crate) waits: &'a mut Waits,
    /// The rate at which frames may go.
    pub(crate) rate: Option<&'a mut Rate>,
    /// How long a frame waits.
    pub(crate) patience: Duration,
    /// Number of messages to nodes so far, and the most of a turn: a ledger holds no more.
    pub(crate) posted: usize,
    pub(crate) most: usize,
    /// Whether frames must come from an address of this node. The receivers check that in any case.
    pub(crate) is_checked: bool,
    /// Counts the frames of the node's programs that went to other nodes.
    pub(crate) taken: &'a mut u64,
    pub(crate) dropped: &'a mut Dropped,
}

impl Egress<'_> {
    /// Returns whether a frame may go now, by the node's rate.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.rate.as_ref().is_none_or(|rate| rate.is_open())
    }

    #[inline]
    fn charge(&mut self, len: usize) {
        if let Some(rate) = &mut self.rate {
            rate.charge(len);
        }
    }

    /// Makes room for the longest frame with its offload header, to be written and then [sent](Self::send_staged).
    /// Behind it are 64 bytes that a successor [gets](super::Endpoint::mend) with the frame, if the worker dies while it
    /// reads. Returns `None` if the pool has no room, or the node may not send now.
    #[inline]
    pub fn stage(&mut self) -> Option<(&mut [u8], &mut [u8])> {
        if !self.is_open() {
            return None;
        }
        self.waits.is_full = self.vni.stage().is_none();
        if self.waits.is_full {
            return None;
        }
        if let Some(notes) = &mut self.notes {
            // A successor tells by the addresses whether a frame was written here.
            self.vni.staged_mut()[..HEADER_LEN + 12].fill(0);
            notes.reads_to(self.vni.staging_page());
        }
        Some(self.vni.staged_mut().split_at_mut(PIECE_MAX))
    }

    /// Counts a frame that is longer than the room, or that could not be read.
    pub fn drop_too_long(&mut self) {
        self.dropped.too_long += 1;
    }

    /// Has a successor leave the frame alone that is staged: it is being changed.
    pub fn forget_staged(&mut self) {
        self.notes.iter_mut().for_each(|notes| notes.reads_to(None));
    }

    /// Has a successor send the staged frame, after all: it is whole, and nothing written beside it is missing in it.
    pub fn remember_staged(&mut self) {
        if let Some(notes) = &mut self.notes {
            self.vni.staged_mut()[PIECE_MAX..].fill(0);
            notes.reads_to(self.vni.staging_page());
        }
    }

    /// Returns the room that was [staged](Self::stage) last.
    pub fn staged(&mut self) -> &mut [u8] {
        &mut self.vni.staged_mut()[..PIECE_MAX]
    }

    /// Sends the staged frame, `len` bytes with its offload header, or drops it. Returns false if it must wait: then the
    /// next turn begins with it.
    #[inline]
    pub fn send_staged(&mut self, len: usize) -> bool {
        let page = self.vni.staging_page();
        let taken = *self.taken;
        let (goes_on, is_read) = self.send_from_staging(len);
        if *self.taken > taken
            && is_read
            && let Some(notes) = &mut self.notes
        {
            notes.goes(page, len);
        }
        point("endpoint.staged");
        goes_on
    }

    /// Returns false if the frame must wait, and whether any node reads its pages.
    fn send_from_staging(&mut self, len: usize) -> (bool, bool) {
        self.charge(len.saturating_sub(HEADER_LEN));
        if len < HEADER_LEN + 14 {
            self.dropped.length += 1;
            return (true, false);
        }
        let addresses = addresses_of(&self.vni.staged_mut()[HEADER_LEN..]);
        match self.find(addresses) {
            None => (true, false),
            Some(To::Node(node)) => (self.send_staged_to(node, len), true),
            Some(To::OneOf(owners)) => {
                let flow = flow_of(begin(&self.vni.staged_mut()[HEADER_LEN..len]));
                let node = self.vni.choose(&owners, flow);
                (self.send_staged_to(node, len), true)
            }
            Some(several) => {
                let nodes = self.switch.nodes_of(several);
                let sent = self.vni.post_staged_to_all(nodes.iter(), len);
                let is_read = self.went_to_some(sent);
                if !is_read {
                    // Its pages may be another frame's before the next one is staged.
                    self.forget_staged();
                }
                (true, is_read)
            }
        }
    }

    fn send_staged_to(&mut self, node: u16, len: usize) -> bool {
        let sent = self.vni.post_staged(node, len);
        let goes_on = self.went(node, sent);
        self.waits.staged = (!goes_on).then_some((node, len));
        goes_on
    }

    /// Sends the staged frame that waits, if one does. Returns false if it must go on waiting.
    #[inline]
    pub(super) fn send_waiting(&mut self) -> bool {
        self.waits.is_full = false;
        let Some((node, len)) = self.waits.staged.take() else { return true };
        let taken = *self.taken;
        let goes_on = self.send_staged_to(node, len);
        if goes_on
            && *self.taken == taken
            && let Some(notes) = &mut self.notes
        {
            // It was dropped, and the next frame comes to its place. The only note is the one on it.
            notes.published(None);
        }
        goes_on
    }

    /// Sends a frame of `len` bytes without an offload header, or drops it; `copy` copies its front. Returns false if
    /// the frame must wait: then it stays where it is.
    ///
    /// Another process may change the frame at any time. The addresses read first decide where it goes, and the sent
    /// frame carries the same ones.
    #[inline]
    pub fn send(&mut self, len: usize, copy: impl Fn(&mut [u8])) -> bool {
        let mut front = [0; 14];
        if len >= front.len() {
            copy(&mut front);
        }
        self.send_unfinished(len, &Offload::default(), &front, copy)
    }

    /// Like [`send`](Self::send), for a frame with work left to do. Its first bytes were read before: `front`.
    #[inline]
    pub fn send_unfinished(
        &mut self,
        len: usize,
        offload: &Offload,
        front: &[u8; 14],
        copy: impl Fn(&mut [u8]),
    ) -> bool {
        let header = (!is_finished(offload)).then_some(offload.as_bytes());
        let flow = || {
            let mut begin = [0; FLOW_PREFIX];
            let begin = &mut begin[..len.min(FLOW_PREFIX)];
            copy(begin);
            flow_of(begin)
        };
        let fill = |room: &mut [u8]| {
            copy(room);
            room[..14].copy_from_slice(front);
        };
        self.send_filled(len, header, front, flow, fill)
    }

    /// Like [`send`](Self::send), for a frame in memory of our own.
    #[inline]
    pub fn send_bytes(&mut self, frame: &[u8]) -> bool {
        self.send_filled(frame.len(), None, frame, || flow_of(begin(frame)), |room| room.copy_from_slice(frame))
    }

    /// Sends a frame of `len` bytes that begins with `front` and that `fill` writes, behind its offload header if it has
    /// one. `flow` returns its flow.
    #[inline]
    fn send_filled(
        &mut self,
        len: usize,
        header: Option<&[u8]>,
        front: &[u8],
        flow: impl FnOnce() -> u32,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        if !self.is_open() {
            return false;
        }
        let is_done = self.send_drafted(len, header, front, flow, fill);
        if is_done {
            self.charge(len);
        }
        is_done
    }

    #[inline]
    fn send_drafted(
        &mut self,
        len: usize,
        header: Option<&[u8]>,
        front: &[u8],
        flow: impl FnOnce() -> u32,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        if !(14..=PIECE_MAX - HEADER_LEN).contains(&len) {
            self.dropped.length += 1;
            return true;
        }
        let before = header.map_or(0, <[u8]>::len);
        let len = before + len;
        let fill = |room: &mut [u8]| {
            if let Some(header) = header {
                room[..before].copy_from_slice(header);
            }
            fill(&mut room[before..]);
        };
        let to = match self.find(addresses_of(front)) {
            Some(To::OneOf(owners)) => Some(To::Node(self.vni.choose(&owners, flow()))),
            to => to,
        };
        match to {
            None => true,
            Some(To::Node(node)) => {
                if self.posted >= self.most {
                    return false;
                }
                let sent = self.vni.draft(node, len).map(fill);
                if sent.is_ok() {
                    self.posted += 1;
                    self.vni.post(node, len, header.is_some());
                }
                self.went(node, sent)
            }
            Some(several) => {
                let nodes = self.switch.nodes_of(several);
                let count = nodes.count();
                if self.posted > 0 && self.posted + count > self.most {
                    return false;
                }
                self.posted += count;
                let sent = self.vni.send_to_all(nodes.iter(), len, header.is_some(), fill);
                self.went_to_some(sent);
                true
            }
        }
    }

    /// Returns where a frame with these addresses goes, or counts why it goes nowhere.
    #[inline]
    fn find(&mut self, (to, from): (Mac, Mac)) -> Option<To> {
        if self.is_checked && !self.switch.may_send(from) {
            self.dropped.not_own += 1;
            return None;
        }
        let to = self.switch.find(to);
        if to == To::Nobody {
            self.dropped.nobody += 1;
            return None;
        }
        Some(to)
    }

    /// Counts what became of a frame to `node`. Returns false if it must wait.
    #[inline]
    fn went(&mut self, node: u16, sent: Result<(), SendError>) -> bool {
        let waited = self.waits.since.take();
        match sent {
            Ok(()) => {
                *self.taken += 1;
                self.waits.slow.had_room(node);
            }
            Err(SendError::NoRoom(none)) => {
                let since = waited.unwrap_or_else(Instant::now);
                if self.waits.slow.may_wait(node, since, self.patience) {
                    self.waits.since = Some(since);
                    return false;
                }
                self.vni.count_dropped(node, none);
                self.dropped.no_room += 1;
            }
            Err(_) => self.dropped.nobody += 1,
        }
        true
    }

    /// Counts a frame to several nodes, by the number of those that got it. Returns whether any did. Where there is no other
    /// node, it went to all.
    #[inline]
    fn went_to_some(&mut self, sent: Result<usize, SendError>) -> bool {
        match sent {
            Ok(_) => *self.taken += 1,
            Err(_) => self.dropped.no_room += 1,
        }
        matches!(sent, Ok(1..))
    }
}

/// Returns the bytes of a frame that tell its flow.
fn begin(frame: &[u8]) -> &[u8] {
    &frame[..frame.len().min(FLOW_PREFIX)]
}

/// Returns the two addresses at the head of a frame: destination and source.
#[inline]
fn addresses_of(frame: &[u8]) -> (Mac, Mac) {
    let [to, from] = [0, 6].map(|at| Mac::try_from(&frame[at..at + 6]).expect("six bytes"));
    (to, from)
}
