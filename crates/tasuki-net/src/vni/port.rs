//! A node's end of a VNI as a port, for a native program. Frames arrive and leave as bursts of slots. Each turn happens
//! wholly or not at all, even if the worker is killed (V5).
//!
//! The port copies a received frame from its sender's pool into a slot of its own. The sender must keep the frame until
//! the turn that handled it is over. The port copies a sent frame into its own pool; no peer sees it before that. A
//! program gets finished frames: the port computes missing checksums and cuts GSO packets.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use tasuki_shm::arena::{Arena, Detach, Geometry, Slot};
use tasuki_shm::line::LINE_LEN;
use tasuki_shm::pool::Pool;
use tasuki_shm::region::{Pages, Region, RegionError};
use tasuki_shm::slots::table_lines;
use tasuki_shm::vni::node_memory::NodeMemory;

use super::finish::{GSO_NONE, GSO_SEGMENTS_MAX, finish, is_finished};
use super::ledger::{HEADS_MAX, Handled, Ledger, point};
use super::{Incoming, PATIENCE, PeerDescriptor, Vni};
use crate::capture::{Captures, Direction};
use crate::endpoint::egress::Waits;
use crate::endpoint::{Dropped, Egress};
use crate::nic::Mac;
use crate::own::{CHECKED_MAX, Own};
use crate::port::{Armed, BURST_MAX, Burst, Frame, Port, Transactional};
use crate::switch::Switch;

/// Length of a slot in bytes; no frame of a program is longer. Only pages that are touched cost memory.
const SLOT_LEN: u32 = 16 * 1024;

/// Number of slots: enough for the parts of a GSO packet and some bursts.
const SLOTS: u32 = 512;
const _: () = assert!(SLOTS as usize >= GSO_SEGMENTS_MAX + 8 * BURST_MAX);

/// Maximum number of received frames that are not committed as handled.
const OPEN_MAX: usize = HEADS_MAX;

/// A received message, or a part of it, that is not committed as handled. A dropped one has no frame.
#[derive(Debug, Clone, Copy)]
struct Open {
    from: u16,
    /// Index of its message in the ring.
    index: u32,
    /// Number of this part of the message.
    part: u32,
    /// Whether this is the last part.
    is_last: bool,
    /// Slot of the frame; `None` if the frame was dropped.
    slot: Option<u32>,
}

/// A port's own memory, which holds frames while the program has them. Made in advance, because a worker that takes
/// over a node's end has no time for it.
#[derive(Debug)]
pub struct Frames {
    arena: Arena,
    open: ArrayVec<Open, OPEN_MAX>,
    /// Parts of a GSO packet that found no room in a burst.
    cut: VecDeque<(Open, Frame)>,
    /// Number of frames that the burst may hold in this call.
    full: usize,
    /// Copy of a GSO packet that is being cut.
    copy: Box<[u8]>,
}

/// A node's end of a VNI, as a port.
#[derive(Debug)]
pub struct VniPort {
    vni: Vni,
    switch: Switch,
    ledger: Ledger,
    station: Mac,
    intake: Frames,
    /// Slots of the frames that are staged and not committed: the front of the last burst that was passed in.
    staged: ArrayVec<u32, BURST_MAX>,
    waits: Waits,
    patience: Duration,
    /// Frames that did not cross, by reason.
    pub dropped: Dropped,
}

impl VniPort {
    /// Opens the end of node `number`, with the station address `station`, on memory that belongs to the node: see
    /// [`Vni::new`]. Completes what a predecessor was about to do.
    pub fn new(
        number: u16,
        station: Mac,
        memory: (NodeMemory, Pool),
        bell_receiver: OwnedFd,
        switch: Switch,
        intake: Frames,
    ) -> Self {
        let (vni, ledger) = Vni::with_ledger(number, memory, bell_receiver);
        VniPort {
            vni,
            switch,
            ledger,
            station,
            intake,
            staged: ArrayVec::new(),
            waits: Waits::default(),
            patience: PATIENCE,
            dropped: Dropped::default(),
        }
    }

    /// Returns the arena in which frames lie and the program makes new ones.
    pub fn arena(&self) -> &Arena {
        &self.intake.arena
    }

    /// Adds another node, or replaces the memory of a node that was added before.
    pub fn add(&mut self, bundle: PeerDescriptor) -> Result<(), RegionError> {
        self.forget(bundle.number);
        self.vni.add(bundle)
    }

    /// Replaces the IP addresses of a node: see [`PeerDescriptor::own`].
    pub fn set_own(&mut self, number: u16, own: Own) {
        self.vni.set_own(number, own);
    }

    /// Forgets a node that is gone.
    pub fn remove(&mut self, number: u16) {
        self.forget(number);
        self.vni.remove(number);
    }

    /// Drops the node's unhandled frames from the turn: there is no peer left to commit them to.
    fn forget(&mut self, number: u16) {
        self.intake.open.retain(|open| open.from != number);
        self.intake.cut.retain(|(open, _)| open.from != number);
    }

    /// Call it once all existing nodes are added: see [`Vni::settle`].
    pub fn settle(&mut self) {
        self.vni.settle();
    }

    /// Replaces the switch that looks addresses up.
    pub fn set_switch(&mut self, switch: Switch) {
        self.switch = switch;
    }

    /// The captures, if any. They see each received frame as the program gets it, and each sent frame. A frame that
    /// waits for room may be captured twice.
    pub fn captures(&mut self) -> &mut Option<Box<Captures>> {
        self.vni.captures()
    }

    /// Returns the number of free pages in the node's pool.
    pub fn pages_left(&self) -> u32 {
        self.vni.pages_left()
    }

    /// Does periodic work; call it a few times a second. Returns whether the next tick has work.
    pub fn tick(&mut self, now: Instant) -> bool {
        self.switch.age(now);
        self.vni.tick(now)
    }

    /// Sets how long a frame, with all frames behind it, waits for a node that has no room. The default is the time for
    /// which a node may read nothing, [`PATIENCE`].
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sends frames that this port did not receive, from the front of `burst`, as many as there is room for. Returns
    /// their number; the caller removes them. Frames of this port in `in_hand` stay pending.
    pub fn forward(&mut self, burst: &Burst, in_hand: &Burst) -> usize {
        let went = self.stage(burst);
        self.commit(in_hand);
        went
    }

    /// Returns how soon an [armed](Port::arm) port must look again without a bell, or `None`: no peer rings when there
    /// is room again.
    pub fn waits(&self) -> Option<Duration> {
        self.waits.again_in()
    }

    /// Marks an armed port as awake again.
    pub fn wake(&mut self) {
        self.vni.wake();
    }

    /// Stages the frames at the front of `burst`, as many as there is room for. Returns their number.
    #[inline]
    fn stage(&mut self, burst: &[Frame]) -> usize {
        let is_same = self.staged.iter().zip(burst).all(|(slot, frame)| *slot == frame.slot.id().index);
        if !is_same || self.staged.len() > burst.len() {
            self.unstage();
        }
        let Self { vni, switch, waits, dropped, staged, .. } = self;
        // The receivers check where its frames come from.
        let mut egress = Egress {
            vni,
            switch,
            notes: None,
            waits,
            rate: None,
            patience: self.patience,
            is_checked: false,
            posted: 0,
            most: usize::MAX,
            taken: &mut 0,
            dropped,
        };
        for frame in &burst[staged.len()..] {
            if !egress.send_bytes(frame.bytes()) {
                break;
            }
            staged.push(frame.slot.id().index);
        }
        staged.len()
    }

    #[cold]
    fn unstage(&mut self) {
        self.vni.withdraw();
        self.staged.clear();
        self.waits.clear();
    }

    /// Ends the turn if there is anything to commit: sends the staged frames, and commits all received frames except
    /// those `in_hand`.
    #[inline]
    fn commit(&mut self, in_hand: &[Frame]) {
        let handled = self.intake.handled(in_hand);
        if handled.is_empty() && self.staged.is_empty() {
            return;
        }
        self.ledger.commit(&handled, self.vni.staged(), self.staged.len() as u64, &[]);
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
    /// Makes empty memory.
    pub fn new() -> Result<Self, RegionError> {
        let table = Region::create("tasuki-vni-slots", table_lines(SLOTS) * LINE_LEN, Pages::Small)?;
        let table = table.span(0, table_lines(SLOTS))?;
        let geometry = Geometry { slot_len: SLOT_LEN, count: SLOTS };
        let arena = Arena::create("tasuki-vni-frames", geometry, table, Detach::Move)?;
        let cut = VecDeque::with_capacity(GSO_SEGMENTS_MAX);
        let copy = vec![0; super::PIECE_MAX].into_boxed_slice();
        Ok(Frames { arena, open: ArrayVec::new(), cut, full: BURST_MAX, copy })
    }

    /// Removes the handled frames from `open` and returns them: all except those `in_hand`, and later frames of the
    /// same nodes.
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

    /// Moves parts of a GSO packet into the burst, as far as there is room.
    fn give_cut(&mut self, burst: &mut Burst) {
        while burst.len() < self.full && !self.open.is_full() {
            let Some((open, frame)) = self.cut.pop_front() else { return };
            self.open.push(open);
            burst.push(frame);
        }
    }

    /// Takes in one frame. Returns false if the frame is to come again later.
    #[inline]
    fn take(
        &mut self,
        incoming: &Incoming<'_>,
        handled: u32,
        burst: &mut Burst,
        dropped: &mut Dropped,
        mut may_be: impl FnMut(&[u8]) -> bool,
    ) -> bool {
        // The program gets all parts of a GSO packet before any later frame.
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
        if !is_finished(&offload)
            && (!incoming.spares(&offload, checked(&slot.bytes_mut()[..len]))
                || finish(&offload, &mut slot.bytes_mut()[..len], |_, _| ()).is_err())
        {
            dropped.malformed += 1;
            self.open.push(whole);
            return true;
        }
        self.open.push(Open { slot: Some(slot.id().index), ..whole });
        burst.push(frame_in(slot, len));
        true
    }

    /// Like [`take`](Self::take), for a GSO packet. A predecessor may have `handled` some of its parts.
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
        if copied.is_ok_and(|len| !incoming.spares(offload, checked(&copy[..len]))) {
            dropped.malformed += 1;
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
            // There are slots for all parts, so a part was too long for a slot. No program takes such frames.
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

/// Returns the part of a frame that [`Switch::admits_copy`] checks.
#[inline]
fn checked(frame: &[u8]) -> &[u8] {
    &frame[..frame.len().min(CHECKED_MAX)]
}

#[inline]
fn frame_in(slot: Slot, len: usize) -> Frame {
    Frame { slot, len: u16::try_from(len).expect("a slot is shorter") }
}

impl Port for VniPort {
    type Fault = Infallible;

    #[inline]
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, Infallible> {
        if !self.staged.is_empty() {
            // `takes` staged these frames, and no `transmit` followed: their turn is not over, and this call ends one.
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

impl Transactional for VniPort {
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

    /// Does nothing: the frame lies in a slot of ours, and the original in its sender's pool.
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
