//! Receives frames, and chooses the rings to look at.

use std::os::fd::{AsFd, BorrowedFd};

use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::wake::this_cpu;

use super::Vni;
use super::inbox::{Inbox, Incoming, Reader};
use super::neighbour::{Neighbour, announces, number_of};
use crate::capture::Captures;
use crate::port::Armed;

/// Maximum number of frames from one ring before the next has its turn.
const BURST: usize = 32;

/// Number of empty looks after which a ring is looked at only in turn with all others.
const IN_VAIN: u32 = 64;

/// Every so many looks, the rings that were not busy last come first.
const LATE_EVERY: u32 = 8;

/// Every so many looks, the node hears the nodes that have newly begun to talk.
const HEAR_EVERY: u32 = 256;

impl Vni {
    /// Looks at a node's ring from now on, if the node announces that it talks to us (V2).
    pub(super) fn listen_to(&mut self, number: u16) {
        let us = self.number;
        let Some(neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::as_mut) else { return };
        if !neighbour.is_heard && announces(&neighbour.talks, us) && neighbour.breach.is_none() {
            neighbour.is_heard = true;
            self.heard.push(number);
        }
    }

    /// Reads from the pipe which nodes have rung.
    fn hear(&mut self) {
        let mut bytes = [0; 512];
        // The reading end belongs to this worker alone and does not block.
        let Ok(len @ 1..) = rustix::io::read(&self.bell_receiver, &mut bytes[..]) else { return };
        if len == bytes.len() {
            // The pipe may hold more numbers, or was too full for some: check all nodes.
            return (0..NODES_MAX).for_each(|number| self.listen_to(number));
        }
        let mut heard = &bytes[..len];
        while let [low, high, rest @ ..] = heard {
            match number_of([*low, *high]) {
                Some(number) => {
                    self.listen_to(number);
                    heard = rest;
                }
                // A peer has written other bytes.
                None => heard = &heard[1..],
            }
        }
    }

    /// Passes received frames to `each`, up to a burst from each ring that it looks at. Returns their number. Does not
    /// wait.
    ///
    /// A look costs the same for any number of nodes: it covers the rings that were busy last, and one more.
    #[inline]
    pub fn receive(&mut self, mut each: impl FnMut(Incoming<'_>)) -> usize {
        self.receive_by(&mut each)
    }

    /// Like [`receive`](Self::receive), for a reader that must know when frames go back to their sender.
    #[inline]
    pub fn receive_by(&mut self, reader: &mut impl Reader) -> usize {
        self.begin_look();
        let mut came = 0;
        let mut look = |vni: &mut Self, from: u16| {
            let count = vni.receive_from(from, reader);
            came += count;
            count
        };
        self.look_at_active(&mut look);
        if self.heard.len() > self.active.len() {
            self.look_in_turn(&mut look);
        }
        came
    }

    /// Like [`receive`](Self::receive), for up to `most` frames. Frames that are not [retired](Self::retire) come
    /// again, and so do the first frame that `each` refuses and all behind it. The ring that comes first changes from
    /// time to time, so that no node has all of `most`.
    #[inline]
    pub(crate) fn take_in(&mut self, most: usize, mut each: impl FnMut(Incoming<'_>, u32) -> bool) -> usize {
        self.begin_look();
        let mut came = 0;
        let mut look = |vni: &mut Self, from: u16| {
            let count = vni.take_from(from, most.saturating_sub(came), &mut each);
            came += count;
            count
        };
        if !self.active.is_empty() {
            self.active.rotate_left(1);
        }
        let is_their_turn = self.looks.is_multiple_of(LATE_EVERY) || self.active.is_empty();
        if is_their_turn && self.heard.len() > self.active.len() {
            self.look_in_turn(&mut look);
        }
        self.look_at_active(&mut look);
        if !is_their_turn && self.heard.len() > self.active.len() {
            self.look_in_turn(&mut look);
        }
        came
    }

    #[inline]
    fn begin_look(&mut self) {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(HEAR_EVERY) {
            self.hear();
        }
    }

    /// Looks at the rings that were busy last. `look` returns the number of frames that it received.
    #[inline]
    fn look_at_active(&mut self, look: &mut impl FnMut(&mut Self, u16) -> usize) {
        let mut i = 0;
        while i < self.active.len() {
            let (from, in_vain) = self.active[i];
            let came = look(self, from);
            if self.active.get(i).is_none_or(|(active, _)| *active != from) {
                // The node broke a rule and has left the active rings.
                continue;
            }
            let in_vain = if came > 0 { 0 } else { in_vain + 1 };
            if in_vain < IN_VAIN {
                self.active[i].1 = in_vain;
                i += 1;
            } else {
                self.active.swap_remove(i);
            }
        }
    }

    /// Looks at the ring of the next node that talks to us.
    #[inline(never)]
    fn look_in_turn(&mut self, look: &mut impl FnMut(&mut Self, u16) -> usize) {
        self.next = if self.next + 1 < self.heard.len() { self.next + 1 } else { 0 };
        let from = self.heard[self.next];
        if self.active.iter().any(|(active, _)| *active == from) {
            return;
        }
        let came = look(self, from);
        if came > 0 {
            if self.active.is_full() {
                self.active.remove(0);
            }
            self.active.push((from, 0));
        } else {
            self.drop_if_silent(from);
        }
    }

    #[inline]
    fn receive_from(&mut self, from: u16, reader: &mut impl Reader) -> usize {
        let Self { neighbours, captures, .. } = self;
        let Some(neighbour) = talker(neighbours, from, self.number) else { return 0 };
        let came = match captures {
            None => neighbour.inbox.receive(from, BURST, reader),
            Some(captures) => receive_captured(&mut neighbour.inbox, captures, from, reader),
        };
        if came > 0 {
            neighbour.counts.received += came as u64;
            neighbour.counts.forged += neighbour.inbox.forged.take();
            neighbour.publish();
        }
        if neighbour.inbox.is_broken() {
            self.breaks(from);
        }
        came
    }

    #[inline]
    fn take_from(&mut self, from: u16, most: usize, each: &mut impl FnMut(Incoming<'_>, u32) -> bool) -> usize {
        let Some(neighbour) = talker(&mut self.neighbours, from, self.number) else { return 0 };
        let count = neighbour.inbox.take(from, most, each);
        if neighbour.inbox.is_broken() {
            self.breaks(from);
        }
        count
    }

    /// Stops looking at a node that broke a rule.
    #[cold]
    fn breaks(&mut self, from: u16) {
        let neighbour = self.neighbours[usize::from(from)].as_deref_mut();
        if let Some((neighbour, breach)) = neighbour.and_then(|it| it.inbox.breach().map(|breach| (it, breach))) {
            neighbour.breaks(breach);
            self.stop_listening_to(from);
        }
    }

    /// Marks all messages of node `from` before `head` as handled, and `parts` parts of the one at `head`: `count`
    /// frames more.
    pub(crate) fn retire(&mut self, from: u16, head: u32, parts: u32, count: u64) {
        let Some(neighbour) = self.neighbours.get_mut(usize::from(from)).and_then(Option::as_mut) else { return };
        neighbour.inbox.retire_to(head, parts);
        neighbour.counts.received += count;
        neighbour.counts.forged += neighbour.inbox.forged.take();
        neighbour.publish();
    }

    /// Stops looking at a node that has withdrawn its announcement: the memory of its ring goes back to the kernel.
    fn drop_if_silent(&mut self, from: u16) {
        let neighbour = self.neighbours[usize::from(from)].as_ref();
        if neighbour.is_none_or(|it| !announces(&it.talks, self.number)) {
            self.stop_listening_to(from);
        }
    }

    pub(super) fn stop_listening_to(&mut self, from: u16) {
        self.heard.retain(|heard| *heard != from);
        self.active.retain(|(active, _)| *active != from);
        if let Some(neighbour) = self.neighbours.get_mut(usize::from(from)).and_then(Option::as_mut) {
            neighbour.is_heard = false;
        }
    }

    /// Prepares this end for the caller's sleep, and looks once more at every node that talks to us.
    pub fn arm(&mut self) -> Armed {
        self.bell.park(this_cpu());
        let neighbours = &self.neighbours;
        let us = self.number;
        let talks_and_has = |it: &Neighbour| announces(&it.talks, us) && it.inbox.is_ready();
        let is_ready = |from: &u16| neighbours[usize::from(*from)].as_deref().is_some_and(talks_and_has);
        match self.heard.iter().find(|from| is_ready(from)) {
            Some(from) => {
                let at = self.heard.iter().position(|heard| heard == from).expect("just found");
                // The next look starts with this ring.
                self.next = at.checked_sub(1).unwrap_or(self.heard.len());
                self.bell.wake(this_cpu());
                Armed::Busy
            }
            None => Armed::Idle,
        }
    }

    /// Marks this end as awake again, and reads which nodes have rung.
    pub fn wake(&mut self) {
        self.bell.wake(this_cpu());
        self.hear();
    }

    /// Returns the descriptor that becomes readable when a peer rings for an [armed](Self::arm) end.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell_receiver.as_fd()
    }
}

/// Receives frames and captures them.
#[cold]
#[inline(never)]
fn receive_captured(inbox: &mut Inbox, captures: &mut Captures, from: u16, reader: &mut impl Reader) -> usize {
    inbox.receive(from, BURST, &mut Captured { captures, reader })
}

struct Captured<'a, R> {
    captures: &'a mut Captures,
    reader: &'a mut R,
}

impl<R: Reader> Reader for Captured<'_, R> {
    fn frame(&mut self, incoming: Incoming<'_>) {
        self.captures.came(&incoming);
        self.reader.frame(incoming);
    }

    fn before_they_go(&mut self) {
        self.reader.before_they_go();
    }
}

/// Returns node `from` if its ring to node `us` may be looked at.
#[inline]
fn talker(neighbours: &mut [Option<Box<Neighbour>>], from: u16, us: u16) -> Option<&mut Neighbour> {
    let neighbour = neighbours[usize::from(from)].as_deref_mut();
    // V2: do not look at a ring without an announcement, for the look would cost memory.
    neighbour.filter(|neighbour| announces(&neighbour.talks, us))
}
