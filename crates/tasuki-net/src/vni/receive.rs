//! What a node receives, and whom it looks at for that.

use std::os::fd::{AsFd, BorrowedFd};

use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::wake::this_cpu;

use super::Vni;
use super::inbox::{Inbox, Incoming, Reader};
use super::neighbour::{Neighbour, number_of, says_that_it_talks};
use crate::capture::Captures;
use crate::port::Armed;

/// Frames that are taken from one ring before the next has its turn.
const BURST: usize = 32;

/// Looks in vain after which a ring is looked at only in turn with all others.
const IN_VAIN: u32 = 64;

/// Looks from one time to the next at which those come first that were not busy last.
const LATE_EVERY: u32 = 8;

/// Looks from one time to the next at which whoever has newly begun to talk is heard.
const HEAR_EVERY: u32 = 256;

impl Vni {
    /// Looks at a node's ring from now on, if it says that it talks to us (V2).
    pub(super) fn listen_to(&mut self, number: u16) {
        let us = self.number;
        let Some(neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::as_mut) else { return };
        if !neighbour.is_heard && says_that_it_talks(&neighbour.talks, us) && neighbour.breach.is_none() {
            neighbour.is_heard = true;
            self.heard.push(number);
        }
    }

    /// Hears who has rung.
    fn hear(&mut self) {
        let mut bytes = [0; 512];
        // Our end is ours alone, and does not block.
        let Ok(len @ 1..) = rustix::io::read(&self.bell_receiver, &mut bytes[..]) else { return };
        if len == bytes.len() {
            // There may be more, or none may have fitted: everybody is looked at.
            return (0..NODES_MAX).for_each(|number| self.listen_to(number));
        }
        let mut heard = &bytes[..len];
        while let [low, high, rest @ ..] = heard {
            match number_of([*low, *high]) {
                Some(number) => {
                    self.listen_to(number);
                    heard = rest;
                }
                // Somebody has written something else.
                None => heard = &heard[1..],
            }
        }
    }

    /// Hands over frames that have come, up to a burst of each node's that was looked at; says how many. Does not wait.
    ///
    /// A look costs the same however many nodes there are: at the rings that were busy last, and at one more.
    #[inline]
    pub fn receive(&mut self, mut each: impl FnMut(Incoming<'_>)) -> usize {
        self.receive_by(&mut each)
    }

    /// The same to a reader that must know when frames are given back to their sender.
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

    /// The same of up to `most` frames, which come again until they are [retired](Self::retire): also from the first on that `each` does not take. Who
    /// is looked at first changes from time to time, so that nobody has all of it.
    #[inline]
    pub(super) fn take_in(&mut self, most: usize, mut each: impl FnMut(Incoming<'_>, u32) -> bool) -> usize {
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

    /// Looks at the rings that were busy last. `look` says how many frames came.
    #[inline]
    fn look_at_active(&mut self, look: &mut impl FnMut(&mut Self, u16) -> usize) {
        let mut i = 0;
        while i < self.active.len() {
            let (from, in_vain) = self.active[i];
            let came = look(self, from);
            if self.active.get(i).is_none_or(|(active, _)| *active != from) {
                // It broke a rule, and is not among them any more.
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

    /// The same at the next of all that talk to us.
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

    /// A node broke a rule: it is not looked at any more.
    #[cold]
    fn breaks(&mut self, from: u16) {
        let neighbour = self.neighbours[usize::from(from)].as_deref_mut();
        if let Some((neighbour, breach)) = neighbour.and_then(|it| it.inbox.breach().map(|breach| (it, breach))) {
            neighbour.breaks(breach);
            self.stop_listening_to(from);
        }
    }

    /// All frames of a node's before `head` are handled, and of that there so many parts.
    pub(super) fn retire(&mut self, from: u16, head: u32, parts: u32, count: u64) {
        let Some(neighbour) = self.neighbours.get_mut(usize::from(from)).and_then(Option::as_mut) else { return };
        neighbour.inbox.retire_to(head, parts);
        neighbour.counts.received += count;
        neighbour.counts.forged += neighbour.inbox.forged.take();
        neighbour.publish();
    }

    /// Who has taken back that it talks to us is not looked at any more: its ring's memory goes back to the kernel.
    fn drop_if_silent(&mut self, from: u16) {
        let neighbour = self.neighbours[usize::from(from)].as_ref();
        if neighbour.is_none_or(|it| !says_that_it_talks(&it.talks, self.number)) {
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

    /// Says that whoever drives this node is about to sleep, and looks once more at everybody who talks to us.
    pub fn arm(&mut self) -> Armed {
        self.bell.park(this_cpu());
        let neighbours = &self.neighbours;
        let us = self.number;
        let talks_and_has = |it: &Neighbour| says_that_it_talks(&it.talks, us) && it.inbox.is_ready();
        let is_ready = |from: &u16| neighbours[usize::from(*from)].as_deref().is_some_and(talks_and_has);
        match self.heard.iter().find(|from| is_ready(from)) {
            Some(from) => {
                let at = self.heard.iter().position(|heard| heard == from).expect("just found");
                // The next look is at this one.
                self.next = at.checked_sub(1).unwrap_or(self.heard.len());
                self.bell.wake(this_cpu());
                Armed::Busy
            }
            None => Armed::Idle,
        }
    }

    /// Says that we are awake again, and hears who has rung.
    pub fn wake(&mut self) {
        self.bell.wake(this_cpu());
        self.hear();
    }

    /// The descriptor that becomes readable when somebody rings for an [armed](Self::arm) end.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell_receiver.as_fd()
    }
}

/// The same while somebody looks on.
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

/// A node whose ring to node `us` may be looked at.
#[inline]
fn talker(neighbours: &mut [Option<Box<Neighbour>>], from: u16, us: u16) -> Option<&mut Neighbour> {
    let neighbour = neighbours[usize::from(from)].as_deref_mut();
    // V2: a ring of which this is not said is not looked at, for a look would cost memory.
    neighbour.filter(|neighbour| says_that_it_talks(&neighbour.talks, us))
}
