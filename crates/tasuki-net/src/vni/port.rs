//! A node's end of a VNI as a port, for a native program: frames come as bursts of slots and go so, and what was done with them is done wholly or not
//! at all, also if its worker is killed (V5).
//!
//! A frame is copied out of its sender's pool into a slot of ours, and stays its sender's to keep until the turn is over in which it was
//! handled. A frame that goes is copied into our pool, and seen by nobody before that. A program gets frames that are finished: what has a check sum left, or
//! is to be cut, is finished here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use tasuki_shm::arena::{Arena, Detach, Geometry, Slot};
use tasuki_shm::line::{LINE_LEN, Line};
use tasuki_shm::region::{Pages, Region, RegionError};
use tasuki_shm::slots::table_lines;
use tasuki_shm::vni::node_memory::NodeMemoryFds;

use super::finish::{CUTS_MAX, GSO_NONE, finish, is_finished};
use super::ledger::{HEADS_MAX, Handled, Ledger, point};
use super::{Incoming, PATIENCE, PeerDescriptor, SendError, Vni};
use crate::capture::{Captures, Direction};
use crate::nic::Mac;
use crate::own::Own;
use crate::port::{Armed, BURST_MAX, Burst, Frame, Port, Transactional};
use crate::slow::Slow;
use crate::switch::{Switch, To};

/// Bytes of a slot: what no frame of a program is longer than. Only pages that are touched cost memory.
const SLOT_LEN: u32 = 16 * 1024;

/// Slots: for what a segment is cut into, and some bursts.
const SLOTS: u32 = 512;
const _: () = assert!(SLOTS as usize >= CUTS_MAX + 8 * BURST_MAX);

/// Frames that came and are not committed as handled.
const OPEN_MAX: usize = HEADS_MAX;

/// How soon a port that waits for room looks again.
const ROOM_AGAIN: Duration = Duration::from_micros(20);

/// Why frames did not cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// The node that they were for has read nothing for a second.
    pub no_room: u64,
    /// Nobody has the address.
    pub nobody: u64,
    /// Longer than a slot.
    pub too_long: u64,
    /// Not what their offload header says.
    pub malformed: u64,
    /// Their sender took them back before they were read.
    pub too_late: u64,
    /// Of no length that a frame has.
    pub length: u64,
    /// They came from a node in an address that is not its own.
    pub forged: u64,
}

impl Dropped {
    /// All of them.
    pub fn sum(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    /// Each, by name.
    pub fn counts(&self) -> [(&'static str, u64); 7] {
        let Dropped { no_room, nobody, too_long, malformed, too_late, length, forged } = *self;
        [
            ("dropped_no_room", no_room),
            ("dropped_nobody", nobody),
            ("dropped_too_long", too_long),
            ("dropped_malformed", malformed),
            ("dropped_too_late", too_late),
            ("dropped_length", length),
            ("dropped_forged", forged),
        ]
    }
}

/// A frame that came, or one that makes none, and is not committed as handled.
#[derive(Debug, Clone, Copy)]
struct Open {
    from: u16,
    /// Its message's place in the ring,
    index: u32,
    /// which part of it this is,
    part: u32,
    /// and whether it is the last.
    is_last: bool,
    /// Its slot; of what was dropped there is none.
    slot: Option<u32>,
}

/// A port's own memory, in which frames lie while its program has them. Made in advance, for whoever takes a node's end over has no time for it.
#[derive(Debug)]
pub struct Frames {
    arena: Arena,
    open: ArrayVec<Open, OPEN_MAX>,
    /// What a segment was cut into, as far as there was no room in a burst.
    cut: VecDeque<(Open, Frame)>,
    /// Frames that a burst may have by now.
    full: usize,
    /// For what is to be cut.
    copy: Box<[u8]>,
}

/// A node's end of a VNI.
#[derive(Debug)]
pub struct VniPort<M> {
    vni: Vni,
    switch: Switch<M>,
    ledger: Ledger,
    station: Mac,
    intake: Frames,
    /// Slots of the frames that are staged and not committed: the front of the burst that was looked at last.
    staged: ArrayVec<u32, BURST_MAX>,
    /// Since when the next of them waits for room.
    waits: Option<Instant>,
    slow: Slow,
    patience: Duration,
    /// Frames that did not cross.
    pub dropped: Dropped,
}

impl<M: Deref<Target = [Line]>> VniPort<M> {
    /// The end of node `number`, with the station address `station`, on memory that belongs to the node: see [`Vni::new`]. What a predecessor was
    /// about to do is done.
    pub fn new(
        number: u16,
        station: Mac,
        node_memory: NodeMemoryFds,
        bell_receiver: OwnedFd,
        switch: Switch<M>,
        intake: Frames,
    ) -> Result<Self, RegionError> {
        let (vni, ledger) = Vni::with_ledger(number, node_memory, bell_receiver)?;
        let (staged, slow, dropped) = (ArrayVec::new(), Slow::default(), Dropped::default());
        Ok(VniPort { vni, switch, ledger, station, intake, staged, waits: None, slow, patience: PATIENCE, dropped })
    }

    /// Where frames lie, and new ones are made.
    pub fn arena(&self) -> &Arena {
        &self.intake.arena
    }

    /// Makes another node known, or the same one with other memory.
    pub fn add(&mut self, bundle: PeerDescriptor) -> Result<(), RegionError> {
        self.forget(bundle.number);
        self.vni.add(bundle)
    }

    /// A node has other addresses of IP from now on: see [`PeerDescriptor::own`].
    pub fn set_own(&mut self, number: u16, own: Own) {
        self.vni.set_own(number, own);
    }

    /// Forgets a node that is there no more.
    pub fn remove(&mut self, number: u16) {
        self.forget(number);
        self.vni.remove(number);
    }

    /// What came of it and is not handled is nothing that anybody is to be told of.
    fn forget(&mut self, number: u16) {
        self.intake.open.retain(|open| open.from != number);
        self.intake.cut.retain(|(open, _)| open.from != number);
    }

    /// All nodes that there are have been added: see [`Vni::settle`].
    pub fn settle(&mut self) {
        self.vni.settle();
    }

    /// Looks addresses up elsewhere from now on.
    pub fn set_switch(&mut self, switch: Switch<M>) {
        self.switch = switch;
    }

    /// Whoever looks on, if anybody does: at each frame that comes, as the program gets it, and that is sent. One that waits for room may be seen twice.
    pub fn captures(&mut self) -> &mut Option<Box<Captures>> {
        self.vni.captures()
    }

    /// Pages of the node's pool that nobody holds.
    pub fn pages_left(&self) -> u32 {
        self.vni.pages_left()
    }

    /// Does what is due now and then, a few times a second; says whether there is more to come.
    pub fn tick(&mut self, now: Instant) -> bool {
        self.switch.age(now);
        self.vni.tick(now)
    }

    /// How long a frame waits for a node that has no room for it, and all behind it; without, as long as a node may read nothing.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sends frames that did not come from here, from the front of `burst`, as many as there is room for; says how many. What came from here and is in hand
    /// beside them stays so.
    pub fn forward(&mut self, burst: &mut Burst, in_hand: &Burst) -> usize {
        let went = self.stage(burst);
        self.commit(in_hand);
        burst.drain(..went);
        went
    }

    /// How soon an [armed](Port::arm) port must look again though nobody rings: nobody does when there is room again.
    pub fn waits(&self) -> Option<Duration> {
        self.waits.map(|_| ROOM_AGAIN)
    }

    /// Says that an armed port is awake again.
    pub fn wake(&mut self) {
        self.vni.wake();
    }

    /// Stages the frames at the front of `burst`, as many as there is room for; says how many those are.
    #[inline]
    fn stage(&mut self, burst: &[Frame]) -> usize {
        let is_same = self.staged.iter().zip(burst).all(|(slot, frame)| *slot == frame.slot.id().index);
        if !is_same || self.staged.len() > burst.len() {
            self.unstage();
        }
        for frame in &burst[self.staged.len()..] {
            if !self.stage_one(frame) {
                break;
            }
            self.staged.push(frame.slot.id().index);
        }
        self.staged.len()
    }

    /// Says no if the frame has to wait.
    #[inline]
    fn stage_one(&mut self, frame: &Frame) -> bool {
        let bytes = frame.bytes();
        let Some(mac) = bytes.first_chunk().filter(|_| bytes.len() >= 14) else {
            self.dropped.length += 1;
            return true;
        };
        let several = match self.switch.find(*mac) {
            To::Node(node) => return self.stage_for(node, bytes),
            To::Nobody => {
                self.dropped.nobody += 1;
                return true;
            }
            several => self.switch.nodes_of(several),
        };
        if self.vni.send_to_all(several.iter(), bytes.len(), false, |room| room.copy_from_slice(bytes)).is_err() {
            self.dropped.no_room += 1;
        }
        true
    }

    #[inline]
    fn stage_for(&mut self, node: u16, bytes: &[u8]) -> bool {
        let waited = self.waits.take();
        match self.vni.draft(node, bytes.len()) {
            Ok(room) => {
                room.copy_from_slice(bytes);
                self.vni.post(node, bytes.len(), false);
                self.slow.had_room(node);
            }
            Err(SendError::NoRoom(_)) => {
                let since = waited.unwrap_or_else(Instant::now);
                if self.slow.may_wait_for(node, since, self.patience) {
                    self.waits = Some(since);
                    return false;
                }
                self.dropped.no_room += 1;
            }
            Err(_) => self.dropped.nobody += 1,
        }
        true
    }

    #[cold]
    fn unstage(&mut self) {
        self.vni.withdraw();
        self.staged.clear();
        self.waits = None;
    }

    /// Ends the turn, if there is anything to be committed: what was staged goes, and all that came is handled but what is `in_hand`.
    #[inline]
    fn commit(&mut self, in_hand: &[Frame]) {
        let handled = self.intake.handled(in_hand);
        if handled.is_empty() && self.staged.is_empty() {
            return;
        }
        self.ledger.commit(&handled, self.vni.staged(), self.staged.len() as u64);
        self.staged.clear();
        self.vni.flush();
        for it in &handled {
            point("vni.retiring");
            self.vni.retire(it.from, it.head, it.parts, it.count);
        }
        self.ledger.done();
    }
}

impl Frames {
    /// With nothing in it.
    pub fn new() -> Result<Self, RegionError> {
        let table = Region::create("tasuki-vni-slots", table_lines(SLOTS) * LINE_LEN, Pages::Small)?;
        let table = table.span(0, table_lines(SLOTS))?;
        let geometry = Geometry { slot_len: SLOT_LEN, count: SLOTS };
        let arena = Arena::create("tasuki-vni-frames", geometry, table, Detach::Move)?;
        let cut = VecDeque::with_capacity(CUTS_MAX);
        let copy = vec![0; super::PIECE_MAX].into_boxed_slice();
        Ok(Frames { arena, open: ArrayVec::new(), cut, full: BURST_MAX, copy })
    }

    /// Which of what came is handled: all but what is `in_hand`, and what came from the same node behind that.
    #[inline]
    fn handled(&mut self, in_hand: &[Frame]) -> ArrayVec<Handled, HEADS_MAX> {
        let mut handled = ArrayVec::<Handled, HEADS_MAX>::new();
        if self.open.is_empty() {
            return handled;
        }
        let mut slots = [0_u64; SLOTS as usize / 64];
        for frame in in_hand {
            let index = frame.slot.id().index as usize;
            slots[index / 64] |= 1 << (index % 64);
        }
        let mut held = ArrayVec::<u16, OPEN_MAX>::new();
        self.open.retain(|open| {
            let is_in_hand = open.slot.is_some_and(|slot| slots[slot as usize / 64] >> (slot % 64) & 1 == 1);
            if is_in_hand || held.contains(&open.from) {
                held.push(open.from);
                return true;
            }
            let (head, parts) = match open.is_last {
                true => (open.index.wrapping_add(1), 0),
                false => (open.index, open.part + 1),
            };
            let count = u64::from(open.is_last);
            match handled.iter_mut().rev().find(|it| it.from == open.from) {
                Some(it) => (it.head, it.parts, it.count) = (head, parts, it.count + count),
                None => handled.push(Handled { from: open.from, head, parts, count }),
            }
            false
        });
        handled
    }

    /// Moves what was cut into the burst, as far as there is room.
    fn give_cut(&mut self, burst: &mut Burst) {
        while burst.len() < self.full && !self.open.is_full() {
            let Some((open, frame)) = self.cut.pop_front() else { return };
            self.open.push(open);
            burst.push(frame);
        }
    }

    /// Takes in one frame; says no if it is to come again later.
    #[inline]
    fn take(
        &mut self,
        incoming: &Incoming<'_>,
        handled: u32,
        burst: &mut Burst,
        dropped: &mut Dropped,
        mut may_be: impl FnMut(&[u8]) -> bool,
    ) -> bool {
        // What was cut is in the program's hands before anything that came later.
        if burst.len() >= self.full || self.open.is_full() || !self.cut.is_empty() {
            return false;
        }
        let whole = Open { from: incoming.from, index: incoming.index, part: 0, is_last: true, slot: None };
        let Ok(offload) = incoming.offload() else {
            dropped.too_late += 1;
            self.open.push(whole);
            return true;
        };
        if offload.gso_type != GSO_NONE {
            return self.cut(incoming, &offload, (whole, handled), (burst, dropped), may_be);
        }
        if incoming.len() > SLOT_LEN as usize {
            dropped.too_long += 1;
            self.open.push(whole);
            return true;
        }
        let Some(mut slot) = self.arena.take() else { return false };
        let Ok(len) = incoming.copy_to(slot.bytes_mut()) else {
            dropped.too_late += 1;
            self.open.push(whole);
            return true;
        };
        if !may_be(&slot.bytes_mut()[..len]) {
            incoming.refuse(&mut dropped.forged, &mut dropped.too_late);
            self.open.push(whole);
            return true;
        }
        if !is_finished(&offload) && finish(&offload, &mut slot.bytes_mut()[..len], |_, _| ()).is_err() {
            dropped.malformed += 1;
            self.open.push(whole);
            return true;
        }
        self.open.push(Open { slot: Some(slot.id().index), ..whole });
        burst.push(frame_in(slot, len));
        true
    }

    /// The same of a segment. A predecessor may have `handled` some of what it is cut into.
    #[cold]
    fn cut(
        &mut self,
        incoming: &Incoming<'_>,
        offload: &super::offload::Offload,
        (whole, handled): (Open, u32),
        (burst, dropped): (&mut Burst, &mut Dropped),
        mut may_be: impl FnMut(&[u8]) -> bool,
    ) -> bool {
        let Self { arena, cut, copy, .. } = self;
        let copied = incoming.copy_to(copy);
        if copied.is_ok_and(|len| !may_be(&copy[..len])) {
            incoming.refuse(&mut dropped.forged, &mut dropped.too_late);
            self.open.push(whole);
            return true;
        }
        let mut part = 0;
        let mut is_short = false;
        let made = copied.as_ref().ok().map(|len| {
            finish(offload, &mut copy[..*len], |front, back| {
                let ours = part;
                part += 1;
                let len = front.len() + back.len();
                if ours < handled || is_short {
                    return;
                }
                let Some(mut slot) = arena.take().filter(|_| len <= SLOT_LEN as usize) else {
                    is_short = true;
                    return;
                };
                slot.bytes_mut()[..front.len()].copy_from_slice(front);
                slot.bytes_mut()[front.len()..len].copy_from_slice(back);
                let open = Open { part: ours, is_last: false, slot: Some(slot.id().index), ..whole };
                cut.push_back((open, frame_in(slot, len)));
            })
        });
        match made {
            None => dropped.too_late += 1,
            Some(Err(_)) => dropped.malformed += 1,
            // Frames of such a length nobody's program takes; slots there are for all.
            Some(Ok(_)) if is_short => {
                dropped.too_long += 1;
                cut.clear();
            }
            Some(Ok(_)) => {}
        }
        match self.cut.back_mut() {
            Some((last, _)) => last.is_last = true,
            None => self.open.push(whole),
        }
        self.give_cut(burst);
        true
    }
}

#[inline]
fn frame_in(slot: Slot, len: usize) -> Frame {
    Frame { slot, len: u16::try_from(len).expect("a slot is shorter") }
}

impl<M: Deref<Target = [Line]>> Port for VniPort<M> {
    type Fault = Infallible;

    #[inline]
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, Infallible> {
        if !self.staged.is_empty() {
            // Asked for and not transmitted: that turn is not over, and this ends one.
            self.unstage();
        }
        self.commit(burst);
        let before = burst.len();
        let Self { vni, switch, intake, dropped, .. } = self;
        intake.full = before.saturating_add(most).min(BURST_MAX);
        intake.give_cut(burst);
        let most = (intake.full - burst.len()).min(intake.open.remaining_capacity());
        if most > 0 && intake.cut.is_empty() {
            vni.take_in(most, |incoming, handled| {
                intake.take(&incoming, handled, burst, dropped, |frame| switch.admits_copy(frame, &incoming))
            });
        }
        if let Some(captures) = self.vni.captures() {
            captures.frames(Direction::Inbound, &burst[before..]);
        }
        Ok(burst.len() - before)
    }

    #[inline]
    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, Infallible> {
        let went = self.stage(burst);
        self.commit(&burst[went..]);
        burst.drain(..went);
        Ok(went)
    }

    fn arm(&mut self) -> Result<Armed, Infallible> {
        if !self.intake.cut.is_empty() {
            return Ok(Armed::Busy);
        }
        Ok(self.vni.arm())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.vni.fd()
    }
}

impl<M: Deref<Target = [Line]>> Transactional for VniPort<M> {
    fn station(&self) -> Mac {
        self.station
    }

    fn conclude(&mut self, in_hand: &Burst) {
        self.unstage();
        self.commit(in_hand);
    }

    fn withdraw(&mut self) {
        self.unstage();
    }

    /// The frame lies in a slot of ours, and as it came in its sender's pool: there is nothing to keep.
    #[inline]
    fn save(&mut self, _: &Frame) {}

    #[inline]
    fn takes(&mut self, burst: &Burst) -> bool {
        self.stage(burst) == burst.len()
    }

    fn turns(&self) -> u64 {
        self.ledger.turns
    }

    fn given(&self) -> u64 {
        self.ledger.given
    }
}

#[cfg(test)]
mod tests;
