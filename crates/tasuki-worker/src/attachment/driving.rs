//! A NIC as the worker's loop sees it: its part of the data path, its periodic checks, and its sleep.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use tasuki_net::capture::Captures;
use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::{InPlace, Link, NicError, Repoint, Scrub};
use tasuki_net::port::Armed;
use tasuki_relay::message::{ToDaemon, heartbeat};
use tasuki_relay::wire::{Order, Plan};
use tasuki_relay::worker::{Input, Side, Worker};
use tasuki_relay::{After, taker};
use tasuki_shm::arena::Arena;

use super::{Attachment, CALLED, Card, Common, FENCED_WITHIN, Given, LAST_BURST};
use crate::attached::Attached;
use crate::bundle;
use crate::handler::FrameHandler;

/// Time between two looks at a link that is up, and the longest sleep of a driver.
const LINK_EVERY: Duration = Duration::from_secs(1);
/// Time for the link of a card that was started, and time between two looks at it meanwhile: the pause lasts until it is up.
const LINK_TIME: Duration = Duration::from_secs(10);
const LINK_SOON: Duration = Duration::from_millis(10);

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attachment<N, D>
where
    N::Bus: BundleBus,
{
    /// Returns the bell: while the NIC is driven, the card rings it; while we wait for the lease, the giver does.
    fn bell(&self, can_work: bool) -> Option<BorrowedFd<'_>> {
        match &self.card {
            // One that cannot work empties no bell.
            Card::Driven(nic) if self.drives() && !self.gone && can_work => Some(nic.fd()),
            _ if self.waits_since.is_some() => self.wake.as_ref().map(AsFd::as_fd),
            _ => None,
        }
    }

    /// Asks the card for its link, and notes the answer for takers and users.
    pub(super) fn ask_for_link(&mut self) -> Result<(), NicError> {
        let Card::Driven(nic) = &mut self.card else { return Ok(()) };
        let is_up = nic.link()? != Link::Down;
        let was_up = std::mem::replace(&mut self.link_is_up, is_up);
        if !was_up {
            // A second register read: the driver's writes since then have reached the card, and doorbells are stores
            // again.
            nic.link()?;
        }
        self.given.lease_page.found_link(self.link_is_up);
        // One that comes up much later was no part of the pause.
        let is_pause = self.link_is_up && self.awaits_link.take().is_some_and(|at| at.elapsed() < LINK_TIME);
        if is_pause {
            self.given.lease_page.frames_can_flow();
        }
        Ok(())
    }

    /// Marks the card as gone and reports it. No other worker can drive it either.
    #[cold]
    pub(super) fn lose(&mut self, common: &mut Common, error: &NicError) {
        if !self.gone {
            self.gone = true;
            if matches!(error, NicError::Gone) {
                self.given.lease_page.found_gone();
            }
            let help = match error {
                NicError::Gone if common.joins => {
                    "; when it is there again, take the NIC and its node out of the configuration, apply that, and put both back"
                }
                NicError::Gone => {
                    "; when it is there again, take the NIC out of the configuration, apply that, and put it back"
                }
                _ => "; to have it reset, take the NIC out of the configuration, apply that, and put it back",
            };
            common.channel.tell(Some(self.given.number), format!("{error}{help}"));
        }
    }
}

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attached<D> for Attachment<N, D>
where
    N::Bus: BundleBus,
{
    fn given(&self) -> &Given {
        &self.given
    }

    fn worker(&self) -> &Worker {
        &self.worker
    }

    fn is_ready(&self) -> bool {
        !self.is_left() && !matches!(self.card, Card::Unknown | Card::Passed(_))
    }

    fn waits(&self) -> Option<Instant> {
        self.waits_since
    }

    fn is_apart(&self) -> bool {
        match self.card {
            Card::Apart(_) => true,
            Card::Cold(..) => self.own.is_some(),
            _ => false,
        }
    }

    fn awaits_fence(&self) -> bool {
        self.passed.is_some_and(|since| since.elapsed() < FENCED_WITHIN)
    }

    fn plan(&mut self, plan: Plan) {
        // When a taker that is ready receives the plan again, the giver has released the NIC and is being fenced.
        self.called = (plan.fenced && matches!(self.card, Card::Apart(_))).then(Instant::now);
        self.plan = Some(plan);
    }

    fn is_called(&self) -> bool {
        self.called.is_some_and(|since| since.elapsed() < CALLED)
    }

    fn stored(&mut self, memory: Option<OwnedFd>) {
        if memory.is_none() {
            // It will not come. The ledger says where to go on.
            self.awaits_driver_state = None;
            self.plan.iter_mut().for_each(|plan| plan.store = None);
        }
        self.stored = memory;
    }

    fn tell_counts(&mut self, common: &mut Common) {
        let Card::Driven(nic) = &mut self.card else { return };
        let mut counts: Vec<_> = nic.statistics().into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
        // Slots of the arena that the card has. If this count keeps growing, slots are lost for good.
        let slots = self.arena.as_ref().map(Arena::census);
        counts.extend(slots.map(|slots| ("slots_with_card".to_owned(), slots.peer.into())));
        counts.extend(self.handler.counts());
        common.channel.write(&ToDaemon::Counts { nic: self.given.number, counts }, Vec::new());
    }

    fn hear(&mut self, common: &mut Common, input: Input) {
        if let Input::Order(Order::Prepare { kind, version, method, .. }) = input {
            (self.asked, self.method) = ((kind, version), method);
        }
        if let Input::Order(Order::Take { epoch, after, .. }) = input {
            self.called = None;
            // An earlier owner had this eventfd, and may have set it to blocking, for all who have it. None that we do not trust runs
            // by now.
            self.wake.iter().for_each(|wake| _ = rustix::io::ioctl_fionbio(wake, true));
            // The plan to store counts once. If the relay comes to nothing, the lease is granted anew and the ledger
            // says where to go on.
            let stores = self.plan.as_mut().is_some_and(|plan| plan.store.take().is_some());
            self.awaits_driver_state = (stores && after == After::Passed).then_some(epoch);
        }
        if matches!(input, Input::Order(Order::StandDown)) {
            // A driver state stored for a relay that came to nothing is not valid for the next relay.
            (self.stored, self.awaits_driver_state) = (None, None);
            self.plan.iter_mut().for_each(|plan| plan.store = None);
        }
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            match self.worker.hear(&common.tables, input) {
                Ok(todo) => inputs.extend(todo.into_iter().filter_map(|what| self.act(common, what))),
                Err(refused) => common.channel.tell(Some(self.given.number), format!("{input:?} was {refused}")),
            }
        }
        let waits = matches!(self.worker.side(), Side::Taker(taker::State::Waiting));
        self.waits_since = if waits { self.waits_since.or_else(|| Some(Instant::now())) } else { None };
    }

    #[inline]
    fn word(&self) -> Option<Input> {
        let now = self.given.lease_page.tenure();
        let is_news = if self.waits_since.is_some() { !self.is_early(now) } else { now != self.tenure };
        is_news.then_some(Input::Word(now))
    }

    fn park(&mut self, common: &mut Common) {
        self.burst.clear();
        self.give_up();
        if let Card::Driven(nic) = std::mem::replace(&mut self.card, Card::Unknown)
            && let Err(failed) = nic.park()
        {
            common.channel.tell(Some(self.given.number), failed.error.to_string());
        }
    }

    #[inline]
    fn turn(&mut self, common: &mut Common) -> usize {
        let (Card::Driven(nic), Some(arena), false) = (&mut self.card, &self.arena, self.gone) else { return 0 };
        match self.handler.turn(nic, &mut common.context(arena, self.given.number), &mut self.burst) {
            Ok(moved) => moved,
            Err(error) => {
                self.lose(common, &error);
                0
            }
        }
    }

    fn now_and_then(&mut self, common: &mut Common) {
        if self.gone {
            return;
        }
        if self.is_hung_up() {
            return self.lose(common, &NicError::Gone);
        }
        self.forget_old(common);
        let (at, before) = self.link_looked;
        if self.link_is_up && at.elapsed() < LINK_EVERY {
            return;
        }
        let received = common.heartbeat.get(heartbeat::RECEIVED);
        self.link_looked = (Instant::now(), received);
        // No driver has an interrupt for its link. Frames that came are as good as an answer, and cost no question.
        let is_heard = common.drives_one && received != before;
        // A worker that polls arms no card, so this question alone finds that its card is gone.
        if !(self.link_is_up && is_heard)
            && let Err(error) = self.ask_for_link()
        {
            return self.lose(common, &error);
        }
        if let Card::Driven(nic) = &mut self.card {
            nic.now_and_then();
        }
    }

    fn arm(&mut self, common: &mut Common) -> bool {
        if self.drives() && !self.handler.can_work(common.uplink.is_some()) {
            return true;
        }
        // If a namespace goes on sending and the card takes nothing, the link is down, and the worker may sleep. Its
        // pending frames then have not come from the card.
        if self.drives() && !self.gone && !self.burst.is_empty() && !self.handler.holds_its_own() {
            // Arming a ring without slots would count the pending frames as handled.
            return false;
        }
        self.remember(&common.program_state);
        let Card::Driven(nic) = &mut self.card else { return true };
        if self.gone {
            return true;
        }
        match nic.arm() {
            Ok(Armed::Idle) => true,
            Ok(Armed::Busy) => false,
            Err(error) => {
                self.lose(common, &error);
                true
            }
        }
    }

    fn rest(&mut self, _: &mut Common) -> Option<Duration> {
        let is_stuck = self.handler.holds_its_own() && !self.burst.is_empty();
        let is_soon = self.awaits_link.is_some_and(|at| at.elapsed() < LINK_TIME);
        let until_look = if is_soon { LINK_SOON } else { LINK_EVERY };
        let rest = self.handler.rest().or(is_stuck.then_some(LAST_BURST)).unwrap_or(until_look);
        (self.drives() && !self.gone).then_some(rest.min(until_look))
    }

    fn fds<'a>(&'a self, common: &'a Common) -> [Option<BorrowedFd<'a>>; 2] {
        let can_work = self.handler.can_work(common.uplink.is_some());
        let takes = self.drives() && !self.gone && self.burst.is_empty();
        [self.bell(can_work), self.handler.bell().filter(|_| takes)]
    }

    fn line(&self) -> Option<BorrowedFd<'_>> {
        let is_used = self.drives() && !self.gone;
        self.given.fds.get(bundle::DEVICE).filter(|_| is_used).map(AsFd::as_fd)
    }

    fn wake(&mut self, _: &mut Common) {
        if let (Some(_), Some(wake)) = (self.waits_since, &self.wake) {
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
    }

    fn captures<'a>(&'a mut self, _: &'a mut Common) -> &'a mut Option<Box<Captures>> {
        self.own_captures()
    }
}
