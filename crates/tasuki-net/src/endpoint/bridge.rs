//! Moves frames between an endpoint and a node's end of a VNI, both ways.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::egress::{Egress, ROOM_AGAIN, WAIT, Waits};
use super::gather::{Gather, LATENCY, Side};
use super::notes::{NOTED_LEN, Notes, len_of};
use super::rate::{Rate, Rates};
use super::{Dropped, Endpoint, Given, Recovery};
use crate::port::Armed;
use crate::switch::Switch;
use crate::vni::ledger::{HEADS_MAX, Handled, Ledger, MESSAGES_MAX, Marks, point};
use crate::vni::offload::HEADER_LEN;
use crate::vni::{BESIDE, Incoming, PIECE_MAX, Reader, Vni};

/// Maximum number of nodes whose frames wait for room at the endpoint.
const STALLS_MAX: usize = 32;

/// Maximum number of frames that a turn gives, if it is committed as a whole.
const GIVES: usize = 64;

/// An endpoint on a VNI.
#[derive(Debug)]
pub struct Bridge<E: ?Sized = dyn Endpoint> {
    vni: Vni,
    switch: Switch,
    /// Notes on frames that the endpoint has forgotten.
    notes: Option<Notes>,
    /// Ledger of turns that are committed as a whole.
    ledger: Option<Ledger>,
    /// The endpoint's marks in the ledger. Behind them it has words of earlier turns.
    last_marks: Marks,
    waits: Waits,
    rates: Rates,
    /// How soon to look again if the endpoint had no room, or was not ready, when the bridge was armed.
    naps: Option<Duration>,
    gather: Gather,
    /// Whose frames the armed bridge lets gather, and for how long.
    gathers: Option<(Side, Duration)>,
    /// Nodes whose next frame found no room at the endpoint, and since when.
    stalls: ArrayVec<(u16, Instant), STALLS_MAX>,
    /// Number of frames that the programs received.
    pub given: u64,
    /// Number of frames that the programs sent.
    pub taken: u64,
    /// Frames that did not cross, in either direction.
    pub dropped: Dropped,
    /// Where the programs behind it send and receive.
    pub endpoint: Box<E>,
}

impl<E: Endpoint + ?Sized> Bridge<E> {
    /// Connects the programs behind `endpoint` to a VNI. The caller has added all neighbours to `vni`, which it has made for
    /// the endpoint's [`Recovery`]. Sends the frames that a predecessor had read and not published.
    ///
    /// # Panics
    /// If `vni` was not made for such an endpoint.
    pub fn new(mut endpoint: Box<E>, mut vni: Vni, switch: Switch) -> Self {
        let page = vni.notes();
        let recovery = endpoint.recovery();
        let notes = (recovery == Recovery::Notes).then(|| Notes::over(page.clone()));
        let ledger = vni.ledger.take();
        assert_eq!(ledger.is_some(), recovery == Recovery::Exact, "the end was made for another kind of endpoint");
        match &ledger {
            Some(ledger) => endpoint.resume(ledger.marks(), vni.journal()),
            None => endpoint.begin(page),
        }
        let mut bridge = Bridge {
            vni,
            switch,
            notes,
            last_marks: ledger.as_ref().and_then(Ledger::marks).unwrap_or_default(),
            ledger,
            waits: Waits::default(),
            rates: Rates::default(),
            naps: None,
            gather: Gather::new(LATENCY, Instant::now()),
            gathers: None,
            stalls: ArrayVec::new(),
            given: 0,
            taken: 0,
            dropped: Dropped::default(),
            endpoint,
        };
        bridge.send_left();
        bridge
    }

    /// Limits what the programs send and receive, from now on.
    pub fn set_rates(&mut self, rates: Rates) {
        self.rates = rates;
    }

    /// Lets a frame wait up to `latency` for others, where many come one by one; by default for [`LATENCY`].
    pub fn set_latency(&mut self, latency: Duration) {
        self.gather = Gather::new(latency, Instant::now());
    }

    /// Ends the bridge and returns the endpoint, without its programs: a successor serves them.
    pub fn into_end(mut self) -> Box<E> {
        self.endpoint.release();
        self.endpoint
    }

    /// Sends the frames that a predecessor had read.
    fn send_left(&mut self) {
        let Some(notes) = &mut self.notes else { return };
        let (mut frames, mut kept) = (Vec::new(), Vec::new());
        for (page, len) in notes.left() {
            let was_read = len.is_none();
            // If this worker is killed, too, its successor reads them again.
            self.vni.keep_left(page, len.unwrap_or(PIECE_MAX + BESIDE), &mut kept);
            let len = len.or_else(|| len_of(&self.vni.left_at(page, NOTED_LEN)?));
            let Some(mut frame) = len.and_then(|len| self.vni.left_at(page, len)) else { continue };
            if let Some(all) = self.vni.left_at(page, PIECE_MAX + BESIDE).filter(|_| was_read) {
                self.endpoint.mend(&mut frame, &all[PIECE_MAX..]);
            }
            frames.push(frame);
        }
        let (mut egress, _) = self.split();
        // These frames are noted already.
        egress.notes = None;
        // A frame says how long it is, and may say anything.
        for frame in frames.iter().filter(|frame| (HEADER_LEN + 14..=PIECE_MAX).contains(&frame.len())) {
            let since = Instant::now();
            // Readers that see the frames so far make room for the others. They are noted until all have gone.
            while egress.stage().is_none() && since.elapsed() < WAIT {
                egress.vni.flush();
            }
            let Some((room, _)) = egress.stage() else {
                egress.dropped.no_room += 1;
                continue;
            };
            room[..frame.len()].copy_from_slice(frame);
            let mut goes_on = egress.send_staged(frame.len());
            while !goes_on {
                egress.vni.flush();
                goes_on = egress.send_waiting();
            }
        }
        self.flush();
        self.vni.give_left(kept);
    }

    fn split(&mut self) -> (Egress<'_>, &mut E) {
        let Self { vni, switch, notes, waits, rates, taken, dropped, endpoint, .. } = self;
        let rate = rates.sends.as_mut();
        let most = if self.ledger.is_some() { MESSAGES_MAX } else { usize::MAX };
        let notes = notes.as_mut();
        let egress = Egress {
            vni,
            switch,
            notes,
            waits,
            rate,
            patience: WAIT,
            is_checked: true,
            posted: 0,
            most,
            taken,
            dropped,
        };
        (egress, endpoint)
    }

    /// Publishes the frames taken, and then commits them: drops the notes on them, and lets the endpoint have them back.
    #[inline]
    fn flush(&mut self) {
        let Self { vni, notes, waits, endpoint, .. } = self;
        let staged = waits.staged().and_then(|len| Some((vni.staging_page()?, len)));
        vni.flush_with(|| {
            point("endpoint.published");
            if let Some(notes) = notes {
                notes.published(staged);
            }
            endpoint.commit();
        });
    }

    /// Returns the node's end of the VNI.
    pub fn vni(&mut self) -> &mut Vni {
        &mut self.vni
    }

    /// Replaces the switch that looks addresses up.
    pub fn set_switch(&mut self, switch: Switch) {
        self.switch = switch;
    }

    /// Takes the last turn before a handover. Drops a frame that was read and waits in vain for room: no successor would
    /// find it.
    pub fn finish(&mut self) {
        while !self.split().0.send_waiting() {}
        loop {
            let (mut egress, endpoint) = self.split();
            // They are no more than a turn's.
            egress.rate = None;
            if endpoint.send_rest(&mut egress) {
                break;
            }
            self.flush();
        }
        self.endpoint.finish();
        match self.ledger {
            // What the endpoint has heard last is committed, too.
            Some(_) => _ = self.turn_as_a_whole(),
            None => self.flush(),
        }
        self.rates.end();
    }

    /// Takes one turn in each direction. Returns the number of frames that moved.
    pub fn turn(&mut self) -> usize {
        self.endpoint.attend();
        self.rates.look();
        let moved = self.turn_both_ways();
        self.rates.settle();
        let Self { rates, endpoint, .. } = self;
        self.waits.rate = rates.sends.as_mut().and_then(|rate| rate.opens_in(|| endpoint.has_frames()));
        moved
    }

    /// Reads the clock again for the rates, if frames were given: other workers have moved their times meanwhile.
    #[inline]
    fn look_again(&mut self, gave: bool) {
        if gave {
            self.rates.look();
        }
    }

    fn turn_both_ways(&mut self) -> usize {
        if self.ledger.is_some() {
            return self.turn_as_a_whole();
        }
        let came = if self.endpoint.is_ready() { self.give() } else { 0 };
        self.look_again(came > 0);
        let (mut egress, endpoint) = self.split();
        let went = if egress.send_waiting() && egress.is_open() { endpoint.take(&mut egress) } else { 0 };
        self.flush();
        came + went
    }

    /// Takes a turn in both directions that is committed by one store: a successor carries it out, or finds that it did
    /// not happen.
    fn turn_as_a_whole(&mut self) -> usize {
        let handled = if self.endpoint.is_ready() { self.give_and_keep() } else { ArrayVec::new() };
        self.look_again(!handled.is_empty());
        let taken = self.taken;
        let (mut egress, endpoint) = self.split();
        let went = if egress.send_waiting() && egress.is_open() { endpoint.take(&mut egress) } else { 0 };
        let sent = self.taken - taken;
        let came: u64 = handled.iter().map(|it| it.count).sum();
        let Self { vni, ledger: Some(ledger), last_marks, endpoint, .. } = self else { return 0 };
        if came == 0 && went == 0 && last_marks.starts_with(endpoint.marks()) {
            endpoint.commit();
            return 0;
        }
        endpoint.note();
        let marks = endpoint.marks();
        ledger.commit(&handled, vni.staged(), sent, marks);
        last_marks.clear();
        last_marks.try_extend_from_slice(marks).expect("the ledger has a place for each");
        vni.flush_with(|| {
            endpoint.commit();
            point("endpoint.committed");
        });
        for it in &handled {
            point("vni.retiring");
            vni.retire(it.from, it.head, it.parts, it.count);
        }
        ledger.done();
        usize::try_from(came).map_or(went, |came| came + went)
    }

    /// Gives received frames to the endpoint. Their senders keep them. Returns how far the frames of each node are
    /// handled.
    fn give_and_keep(&mut self) -> ArrayVec<Handled, HEADS_MAX> {
        let Self { vni, switch, rates, given, dropped, stalls, endpoint, .. } = self;
        let mut handled = ArrayVec::<Handled, HEADS_MAX>::new();
        let mut captures = vni.captures().take();
        vni.take_in(GIVES, |incoming, _| {
            let known = handled.iter().rposition(|it| it.from == incoming.from);
            if known.is_none() && handled.is_full() {
                return false;
            }
            match give_admitted(&incoming, switch, &mut rates.receives, dropped, &mut **endpoint) {
                Given::Taken(count) => {
                    *given += count as u64;
                    if count > 0 {
                        stalls.retain(|(from, _)| *from != incoming.from);
                    }
                }
                Given::Later => return false,
                Given::NoRoom if may_wait(stalls, incoming.from) => return false,
                Given::NoRoom => {
                    dropped.no_buffer += 1;
                    endpoint.gave_up();
                }
            }
            if let Some(captures) = &mut captures {
                captures.came(&incoming);
            }
            let head = incoming.index.wrapping_add(1);
            match known {
                Some(at) => (handled[at].head, handled[at].count) = (head, handled[at].count + 1),
                None => handled.push(Handled { from: incoming.from, head, parts: 0, count: 1 }),
            }
            true
        });
        *vni.captures() = captures;
        handled
    }

    /// Gives received frames to the endpoint.
    fn give(&mut self) -> usize {
        let Self { vni, switch, rates, given, dropped, endpoint, .. } = self;
        let mut giver = Giver { switch, rate: &mut rates.receives, given: 0, dropped, endpoint: &mut **endpoint };
        let came = vni.receive_by(&mut giver);
        let gave = giver.given;
        if gave > 0 {
            *given += gave as u64;
            self.endpoint.ring();
        }
        came
    }

    /// Returns whether frames gather until the node has [rested](Self::rest) for some time: so it is no use to look for them
    /// before. A node that rests next may call this once it has found nothing.
    pub fn gathers(&mut self) -> bool {
        let is_free = !self.waits.any() && self.stalled().is_none() && self.endpoint.is_ready();
        self.gathers = self.gathers.filter(|_| is_free);
        if is_free && self.gathers.is_none() {
            self.gathers = self.gather.nap(self.taken, self.given, Instant::now);
        }
        self.gathers.is_some()
    }

    /// Returns for how much longer a frame waits for room at the endpoint, if one does.
    fn stalled(&self) -> Option<Duration> {
        let stalls = self.stalls.iter().filter_map(|(_, since)| WAIT.checked_sub(since.elapsed()));
        stalls.filter(|left| !left.is_zero()).min()
    }

    /// Prepares the node for [rest](Self::rest), and looks for frames once more.
    pub fn arm(&mut self) -> Armed {
        let stalled = self.stalled();
        self.gathers();
        if !self.gathers_of(Side::Programs) && self.endpoint.arm(self.waits.any()) == Armed::Busy {
            return Armed::Busy;
        }
        // Do not look at frames that the endpoint does not take yet: it may need this very CPU to make room.
        self.naps = match stalled {
            Some(left) if self.endpoint.is_ready() && self.endpoint.await_room() => Some(left),
            Some(_) => Some(ROOM_AGAIN),
            None => (!self.endpoint.is_ready()).then_some(ROOM_AGAIN),
        };
        if self.naps.is_some() || self.gathers_of(Side::Vni) {
            return Armed::Idle;
        }
        self.vni.arm()
    }

    fn gathers_of(&self, side: Side) -> bool {
        self.gathers.is_some_and(|(gathers, _)| gathers == side)
    }

    /// Returns the descriptor that becomes readable when a peer rings for an [armed](Self::arm) node, unless the endpoint has
    /// no room or the peers' frames gather.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        (self.naps.is_none() && !self.gathers_of(Side::Vni)).then(|| self.vni.fd())
    }

    /// Returns the descriptor that becomes readable when the programs send, unless a frame of theirs waits for room or
    /// their frames gather.
    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        let is_heard =
            self.waits.again_in().is_none() || self.waits.rate.is_some() && self.endpoint.is_heard_while_limited();
        self.endpoint.fd().filter(|_| is_heard && !self.gathers_of(Side::Programs))
    }

    /// Returns how soon an [armed](Self::arm) node must look again without a bell, or `None`.
    pub fn waits(&self) -> Option<Duration> {
        // What the endpoint would look for in between waits for the end of the nap, too.
        let gathers = self.gathers.map(|(_, long)| long);
        gathers.or_else(|| [self.waits.again_in(), self.naps, self.endpoint.again_in()].into_iter().flatten().min())
    }

    /// Marks an armed node as awake again.
    pub fn wake(&mut self) {
        (self.naps, self.gathers) = (None, None);
        self.endpoint.wake();
        self.vni.wake();
    }

    /// Sleeps until there is work, or for `most`. Call it after [`arm`](Self::arm) found no frame.
    pub fn rest(&mut self, most: Duration) {
        let most = self.waits().map_or(most, |again| most.min(again));
        let mut polled: ArrayVec<_, 2> = [self.bell(), self.source()]
            .into_iter()
            .flatten()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let most = Timespec::try_from(most).expect("seconds at most");
        // Ignore why the poll ended: the next turn looks.
        let _ = rustix::event::poll(&mut polled, Some(&most));
        drop(polled);
        self.wake();
    }

    /// Does periodic work; call it a few times a second. Returns whether the next tick has work.
    pub fn tick(&mut self, now: Instant) -> bool {
        self.switch.age(now);
        // Another node may get the number of one that is gone.
        let Self { stalls, vni, .. } = self;
        stalls.retain(|(node, _)| vni.counts(*node).is_some());
        self.vni.tick(now) | self.endpoint.tick(now, &mut self.dropped)
    }

    /// Returns each count with its name.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let mut counts = vec![("given", self.given), ("taken", self.taken)];
        counts.extend(self.dropped.counts());
        counts.extend(self.endpoint.counts());
        counts.push(("naps", self.gather.count));
        counts.push(("pages_left", self.vni.pages_left().into()));
        counts
    }
}

/// Returns whether a frame of node `from` may wait for room at the endpoint, with those behind it. Frames of others have
/// waits of their own.
#[cold]
fn may_wait(stalls: &mut ArrayVec<(u16, Instant), STALLS_MAX>, from: u16) -> bool {
    match stalls.iter().find(|(node, _)| *node == from) {
        Some((_, since)) => since.elapsed() < WAIT,
        // Where many nodes wait, a further one does not.
        None => stalls.try_push((from, Instant::now())).is_ok(),
    }
}

/// Gives a frame to the endpoint, if its sender may send it (W3) and the node may receive it now.
#[inline]
fn give_admitted<E: Endpoint + ?Sized>(
    incoming: &Incoming<'_>,
    switch: &mut Switch,
    rate: &mut Option<Rate>,
    dropped: &mut Dropped,
    endpoint: &mut E,
) -> Given {
    let Some(front) = switch.admits(incoming) else {
        incoming.refuse(&mut dropped.forged, &mut dropped.too_late);
        return Given::Taken(0);
    };
    if rate.as_ref().is_some_and(|rate| !rate.is_open()) {
        dropped.over_rate += 1;
        return Given::Taken(0);
    }
    let given = endpoint.give(incoming, front, dropped);
    if let (Given::Taken(1..), Some(rate)) = (given, rate) {
        rate.charge(incoming.len());
    }
    given
}

/// Gives frames from the VNI to an endpoint.
struct Giver<'a, E: ?Sized> {
    switch: &'a mut Switch,
    rate: &'a mut Option<Rate>,
    given: usize,
    dropped: &'a mut Dropped,
    endpoint: &'a mut E,
}

impl<E: Endpoint + ?Sized> Reader for Giver<'_, E> {
    #[inline]
    fn frame(&mut self, incoming: Incoming<'_>) {
        match give_admitted(&incoming, self.switch, self.rate, self.dropped, self.endpoint) {
            Given::Taken(count) => self.given += count,
            // Only a turn that is committed as a whole is followed by another with the same frame.
            Given::NoRoom | Given::Later => self.dropped.no_buffer += 1,
        }
    }

    #[inline]
    fn before_they_go(&mut self) {
        self.endpoint.show();
    }
}
