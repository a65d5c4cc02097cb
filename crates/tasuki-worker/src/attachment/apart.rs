//! A NIC that goes to another node: to an owner with memory of its own (`repoint`, `mbb`), or together with its
//! memory, after all handled frames were wiped from it (`keep`).

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::bus::{Bus, Iova};
use tasuki_net::nic::ledger::Ledger;
use tasuki_net::nic::{Failed, How, InPlace, Left, Link, Mac, MemoryLayout, NicError, NicMemory, Repoint, Scrub};
use tasuki_relay::Party;
use tasuki_relay::message::{Inflight, ToDaemon, heartbeat};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Plan, Position, Reason};
use tasuki_relay::worker::Input;
use tasuki_shm::arena::Arena;
use tasuki_shm::region::{Region, RegionError};

use super::{Attachment, Card, Common, EMPTY_HANDS, LAST_BURST};
use crate::attached::Attached as _;
use crate::bundle::{self, Moved, Refused, Text};
use crate::channel::DaemonChannel;
use crate::handler::FrameHandler;
use crate::lease_page::ProgramState;
use crate::{device, fail, store};

/// Half the bus addresses that a worker has for its memory, in bytes. While the NIC's memory lies in one half, other
/// memory can be made in the other half.
const HALF: u64 = 128 << 20;

/// Time for which frames may still arrive after the partner was asked to pause; then the card is stopped all the
/// same.
const QUIESCE: Duration = Duration::from_millis(20);

/// Time for which a giver tries to stop its card. On an idle machine less would be enough.
const STOP: Duration = Duration::from_secs(1);

/// Device bundle of a NIC once its rings are in memory that we made.
#[derive(Debug)]
pub(super) struct Own {
    moved: Moved,
    ledger: Ledger,
    arena: Arena,
}

fn no_memory(error: &RegionError) -> Refused {
    let reason = Reason::Missing { position: Position::Rings as u64 };
    Refused { reason, sentence: format!("there is no memory for the NIC in this node: {error}") }
}

fn no_descriptors(error: &anyhow::Error) -> Refused {
    let reason = Reason::Missing { position: Position::Arena as u64 };
    Refused { reason, sentence: format!("the NIC's descriptors cannot be copied ({error:#}); raise RLIMIT_NOFILE") }
}

/// Returns how traffic gets to an owner with memory of its own, if `method` gives it such memory.
pub(super) fn how(method: Method) -> Option<How> {
    match method {
        Method::Repoint => Some(How::Point),
        Method::Mbb => Some(How::Steer),
        Method::Keep | Method::Cold => None,
    }
}

/// Returns the same for a giver's plan.
pub(super) fn planned(plan: &Plan) -> Option<How> {
    plan.handover.then_some(plan.method).and_then(how)
}

/// Returns the bus address for our memory, on a card whose present memory lies as `now` says.
fn place(iova: u64, now: &MemoryLayout) -> Iova {
    let is_there = (iova..iova.saturating_add(HALF)).contains(&now.rings_at.0);
    Iova(if is_there { iova.saturating_add(HALF) } else { iova })
}

/// Time within which a paused partner sends its next frame, if it has one: our frame that lets it go on, the rest of
/// its pause then, and a frame.
const GOES_ON: Duration = Duration::from_micros(60);

/// Maximum number of bursts between two register reads: a read of the card takes as long as some tens of frames.
const TURNS: u32 = 8;

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attachment<N, D>
where
    N::Bus: BundleBus,
{
    fn text(&self) -> Option<&Text> {
        self.given.text.as_ref().ok()
    }

    /// Returns whether the memory may go to an owner that must not read old frames in it.
    pub(super) fn scrubs(&self) -> bool {
        self.text().is_some_and(|text| text.scrub)
    }

    /// Makes memory, maps it for the card's bus, and posts rings there. For a card that is to start anew, only makes
    /// memory.
    pub(super) fn open_apart(&mut self, party: Party, how: Option<How>, fds: Vec<OwnedFd>) -> Result<(), Refused> {
        let Some(text) = self.text() else { return Ok(()) };
        let (wake, bus) = bundle::open_way::<N::Bus>(text, &self.given.bundle, fds)?;
        let at = place(self.given.iova, &text.nic.memory.layout());
        let memory = device::memory(text.ring, text.mtu, at).map_err(|error| no_memory(&error))?;
        memory.populate();
        let parts = || memory.parts().map_err(|error| no_descriptors(&error.into()));
        let program_state = Region::adopt(parts()?.ledger).map_err(|error| no_memory(&error))?;
        let ledger = Ledger::over(&program_state).map_err(|error| no_memory(&error))?;
        let had = (&self.given.bundle, text, &self.given.fds[..]);
        let moved = bundle::moved(had, (parts()?, memory.layout()), party.0.get());
        let moved = moved.map_err(|error| no_descriptors(&error))?;
        let arena = memory.arena().clone();
        let from = text.nic.memory.layout().rings_at;
        let how = match (how, self.given.bundle.mac) {
            (Some(How::Point), Some(mac)) if self.given.fenced => Some(How::Fenced(Mac(mac))),
            (how, _) => how,
        };
        self.card = match how {
            Some(how) => {
                let ready = N::prepare_rings(bus, memory, &text.options(), how, from);
                Card::Apart(ready.map_err(|failed| store::refused(&failed.error))?)
            }
            None => Card::Cold(bus, memory),
        };
        fail::point("map.posted");
        self.wake = Some(wake);
        self.own = Some(Own { moved, ledger, arena });
        Ok(())
    }

    /// Tells the daemon the NIC's device bundle as it will be once we drive it. The daemon must have it before, for
    /// the worker that goes on if we die.
    pub(super) fn tell_own(&self, channel: &mut DaemonChannel) {
        let Some(Own { moved, .. }) = &self.own else { return };
        let nic = self.given.number;
        match moved.memory() {
            Ok((layout, fds)) => channel.write(&ToDaemon::Memory { nic, layout }, fds),
            Err(error) => channel.tell(Some(nic), no_descriptors(&error.into()).sentence),
        }
        fail::point("map.told");
    }

    /// Starts the card anew: in memory of our own, or in the memory of an owner that trusts us and can take it back
    /// there. Frames that the last driver had not handled are lost, and so are frames that arrive before the link is
    /// up.
    pub(super) fn start(&mut self, common: &Common, mut bus: N::Bus, memory: NicMemory) -> Result<(), Refused> {
        // Memory of our own has a new ledger, as below. In the old memory, the count goes on from the old ledger.
        let old = self.ledger.as_ref().filter(|_| self.own.is_none()).map(Ledger::turns);
        if let Err(refused) = self.handler.go_on(&common.program_state, self.given.number, old) {
            self.own = None;
            return Err(refused);
        }
        self.handler.close(&common.program_state, self.given.number);
        if self.given.fenced {
            // The card's own reset leaves some state alone, so reset by the bus if it has a stronger one. Then
            // connect the interrupts anew.
            let _ = bus.reset();
            if let Err(error) = bus.renew() {
                self.own = None;
                return Err(store::refused(&error.into()));
            }
        }
        let options = self.text().map(Text::options).unwrap_or_default();
        let nic = match N::start(bus, memory, &options) {
            Ok(nic) => nic,
            Err(failed) => {
                self.own = None;
                return Err(store::refused(&failed.error));
            }
        };
        self.move_in(nic);
        (self.gone, self.link_is_up, self.halted) = (false, false, false);
        self.awaits_link = Some(Instant::now());
        // If the card is gone, the next look says so.
        let _ = self.ask_for_link();
        Ok(())
    }

    /// Points the card at our rings.
    pub(super) fn point(&mut self, common: &Common, ready: N::Ready) -> Result<(), Refused> {
        // The node's state for this NIC is from the last time it had it, with another ledger.
        if let Err(refused) = self.handler.go_on(&common.program_state, self.given.number, None) {
            drop(N::give_up(ready));
            self.own = None;
            return Err(refused);
        }
        self.handler.close(&common.program_state, self.given.number);
        let mut nic = match N::repoint(ready, self.given.lease_page.left()) {
            Ok(nic) => nic,
            Err(Failed { error, mut bus, memory }) => {
                let _ = memory.unmap(&mut bus);
                self.own = None;
                return Err(store::refused(&error));
            }
        };
        fail::point("take.pointed");
        if self.scrubs() {
            nic.keep_clean();
        }
        self.move_in(nic);
        (self.gone, self.link_is_up, self.halted) = (false, self.given.lease_page.link_was_up(), false);
        self.awaits_link = None;
        Ok(())
    }

    /// Drives a card; if we made memory for it, the card lies in that memory from here on.
    fn move_in(&mut self, nic: N) {
        if let Some(Own { moved, ledger, arena }) = self.own.take() {
            self.old = self.text().map(|text| text.nic.memory.layout());
            (self.given.bundle, self.given.text) = (moved.bundle, Ok(moved.text));
            // Closing so many descriptors takes as long as a few frames, and no worker drives yet.
            self.spent = std::mem::replace(&mut self.given.fds, moved.fds);
            (self.ledger, self.arena) = (Some(ledger), Some(arena));
        }
        self.drive(nic);
    }

    /// Cancels the move: the card no longer reaches our memory.
    pub(super) fn give_up(&mut self) {
        let is_apart = self.is_apart();
        self.own = None;
        if is_apart && let Card::Apart(ready) = std::mem::replace(&mut self.card, Card::Unknown) {
            drop(N::give_up(ready));
        }
    }

    /// Handles the first frames after the partner goes on, if a card has just come to memory of our own. Other work
    /// would delay them.
    pub(super) fn await_partner(&mut self, common: &mut Common) {
        let since = Instant::now();
        while self.old.is_some() && since.elapsed() < GOES_ON && self.turn(common) == 0 {}
    }

    /// Unmaps the memory of the former owner from the card: it is that owner's again. Handles arriving frames
    /// between two register reads.
    pub(super) fn forget_old(&mut self, common: &mut Common) {
        self.spent.clear();
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else { return };
        let Some(old) = self.old.take() else { return };
        let late = nic.came_too_late();
        if late > 0 {
            // The daemon may be dead.
            common.heartbeat.add(heartbeat::DROPPED_FOR + heartbeat::TOO_LATE, late);
            common.heartbeat.add(heartbeat::REFUSED, late);
            let sentence = format!(
                "{late} frames came after the former owner had let go and before we stopped the card: no worker has them, and they are lost"
            );
            common.channel.tell(Some(self.given.number), sentence);
        }
        if let Some(took) = nic.was_held_up() {
            let sentence = format!(
                "the machine held us up for {} ms in the middle of a handover, longer than the card's partner pauses: frames may be lost that nobody counts",
                took.as_millis()
            );
            common.channel.tell(Some(self.given.number), sentence);
        }
        let mut context = common.context(arena, self.given.number);
        let mut fault = None;
        let (handler, burst) = (&mut self.handler, &mut self.burst);
        let forgotten = nic.forget(&old, |nic| {
            for _ in 0..TURNS {
                if fault.is_some() {
                    break;
                }
                match handler.turn(nic, &mut context, burst) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => fault = Some(error),
                }
            }
        });
        if let Err(error) = forgotten {
            let sentence = format!("the former owner's memory stays mapped for the card: {error}");
            common.channel.tell(Some(self.given.number), sentence);
        }
        if let Some(fault) = fault {
            self.lose(common, &fault);
        }
    }

    /// Releases the card for a successor with memory of its own.
    pub(super) fn halt(&mut self, common: &mut Common, how: How) -> Input {
        let drops = self.plan.as_ref().is_some_and(|plan| plan.inflight == Inflight::Drop);
        self.stamped = false;
        let Card::Driven(nic) = &mut self.card else { return Input::Stuck(Reason::CardGone) };
        if self.gone {
            return Input::Stuck(Reason::CardGone);
        }
        self.given.lease_page.leaves(Left::STOPPED);
        let mut fault = None;
        let (handler, burst) = (&mut self.handler, &mut self.burst);
        let mut context = self.arena.as_ref().map(|arena| common.context(arena, self.given.number));
        nic.quiesce(how, |nic| {
            // With an order to drop frames, leave them until the card is quiet; `drain` drops them.
            if let (Some(context), None, false) = (&mut context, &fault, drops) {
                handler.remember(context.program_state, context.nic, nic.turns().wrapping_add(1));
                fault = handler.finish(nic, context, burst).err();
            }
        });
        fail::point("give.quiesced");
        let stopped = fault.map_or_else(|| self.drain(common, drops), Err);
        if matches!(stopped, Ok(true)) {
            self.halted = true;
            fail::point("give.stopped");
            return Input::Stopped;
        }
        let Card::Driven(nic) = &mut self.card else { return Input::Stuck(Reason::CardGone) };
        match nic.go_back().and(stopped) {
            Ok(_) => Input::Stuck(Reason::CardStuck { limit_ms: u64::try_from(STOP.as_millis()).unwrap_or(u64::MAX) }),
            Err(_) => Input::Stuck(Reason::CardGone),
        }
    }

    /// Handles frames until no more arrive, and stops the card. Returns whether it stopped.
    fn drain(&mut self, common: &mut Common, drops: bool) -> Result<bool, NicError> {
        let since = Instant::now();
        while since.elapsed() < STOP {
            let moved = self.last(common, drops)?;
            if moved == 0 && since.elapsed() > LAST_BURST {
                self.drop_without_link(common);
            }
            let Card::Driven(nic) = &mut self.card else { break };
            let still = moved == 0 || since.elapsed() > QUIESCE;
            if self.burst.is_empty() && still && nic.is_quiet() {
                self.given.lease_page.stopped();
                self.stamped = true;
                // To leave ends a turn.
                self.handler.remember(&common.program_state, self.given.number, nic.turns().wrapping_add(1));
                if nic.leave()? {
                    self.given.lease_page.leaves(nic.left());
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Runs one more burst of a giver. Returns the number of frames moved.
    fn last(&mut self, common: &mut Common, drops: bool) -> Result<usize, NicError> {
        let had = self.burst.len();
        if drops {
            self.handler.drop_hand(&mut self.burst);
        }
        self.remember(&common.program_state);
        let (Card::Driven(nic), Some(arena)) = (&mut self.card, &self.arena) else { return Ok(0) };
        if !drops {
            return self.handler.finish(nic, &mut common.context(arena, self.given.number), &mut self.burst);
        }
        let came = nic.receive(&mut self.burst)?;
        self.burst.clear();
        let count = (had + came) as u64;
        self.dropped += count;
        common.heartbeat.add(heartbeat::DROPPED, count);
        Ok(came)
    }

    /// Ends the last burst before the NIC's memory goes to another node. Received frames are handled, for a while,
    /// or dropped. If the other node must not read old frames, they are wiped.
    pub(super) fn stop_clean(&mut self, common: &mut Common) -> Input {
        let drops = self.plan.as_ref().is_some_and(|plan| plan.inflight == Inflight::Drop);
        self.stamped = false;
        if self.gone || !matches!(self.card, Card::Driven(_)) {
            return Input::Stuck(Reason::CardGone);
        }
        match self.wipe(common, drops) {
            Ok(true) => {
                fail::point("give.stopped");
                Input::Stopped
            }
            Ok(false) => {
                Input::Stuck(Reason::CardStuck { limit_ms: u64::try_from(EMPTY_HANDS.as_millis()).unwrap_or(u64::MAX) })
            }
            Err(_) => Input::Stuck(Reason::CardGone),
        }
    }

    /// Sends all pending frames and wipes the handled frames. Returns whether both succeeded.
    fn wipe(&mut self, common: &mut Common, drops: bool) -> Result<bool, NicError> {
        let scrubs = self.scrubs();
        // The first pass takes long, so that the second has little to do, and the last next to nothing.
        for _ in 0..2 {
            if !self.empty_hands(common)? {
                return Ok(false);
            }
            if scrubs {
                self.prepare_to_wipe(&common.program_state);
            }
            if let (Card::Driven(nic), true) = (&mut self.card, scrubs) {
                nic.wipe_free();
            }
            fail::point("give.wiped");
            self.last(common, drops)?;
        }
        let since = Instant::now();
        while self.last(common, drops)? > 0 && since.elapsed() < LAST_BURST {}
        if !self.empty_hands(common)? {
            return Ok(false);
        }
        let since = Instant::now();
        self.given.lease_page.stopped();
        self.stamped = true;
        if !scrubs {
            return Ok(true);
        }
        loop {
            self.prepare_to_wipe(&common.program_state);
            let Card::Driven(nic) = &mut self.card else { return Ok(false) };
            if nic.wipe_rest() {
                return Ok(true);
            }
            if since.elapsed() > EMPTY_HANDS {
                return Ok(false);
            }
        }
    }

    /// Prepares a wipe, which ends a turn and reaches free slots.
    fn prepare_to_wipe(&mut self, program_state: &ProgramState) {
        self.handler.let_go();
        self.remember(program_state);
    }

    /// Sends the pending frames. Returns whether all went in time.
    fn empty_hands(&mut self, common: &mut Common) -> Result<bool, NicError> {
        let since = Instant::now();
        while !self.burst.is_empty() {
            if self.send(common)? > 0 {
                continue;
            }
            if since.elapsed() > LAST_BURST {
                self.drop_without_link(common);
            }
            if !self.burst.is_empty() && since.elapsed() > EMPTY_HANDS {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Drops the pending frames, and counts them, if the link is down: the card sends none, and the cable may stay out.
    fn drop_without_link(&mut self, common: &mut Common) {
        let Card::Driven(nic) = &mut self.card else { return };
        // An uplink's frames may be for its VNI.
        if !self.burst.is_empty() && !common.joins && !matches!(nic.link(), Ok(Link::Up { .. })) {
            common.heartbeat.add(heartbeat::REFUSED, self.burst.len() as u64);
            self.handler.drop_hand(&mut self.burst);
            self.remember(&common.program_state);
        }
    }

    /// Makes the node's state for this NIC independent of the ledger, which the other node's workers go on with.
    pub(super) fn close_program_state(&self, program_state: &ProgramState) {
        self.handler.close(program_state, self.given.number);
    }

    /// Reports the number of frames that were dropped by order.
    pub(super) fn tell_dropped(&mut self, channel: &mut DaemonChannel) {
        match std::mem::take(&mut self.dropped) {
            0 => {}
            count => channel
                .tell(Some(self.given.number), format!("{count} frames that had come were dropped, as was ordered")),
        }
    }
}
