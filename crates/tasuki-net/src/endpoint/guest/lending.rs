//! How the worker of a machine's node lends pairs, and how the worker of a further node borrows them: see [`loans`].

use tasuki_shm::vni::loans::{Loan, State};

use super::*;
use crate::vni::ledger::point;

/// How long the device has not changed before pairs of it are lent: a front end's changes come in rows.
pub(super) const LEND_AFTER: Duration = Duration::from_millis(20);

/// How long the lender waits for a borrower that is not ready, before it lends to the others alone.
const OFFER: Duration = Duration::from_millis(250);

/// How soon each side looks for the other's move, while one is expected, and for how long it is. Ticks find later ones.
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const EXPECTED: Duration = Duration::from_secs(1);

/// How long the last worker of a lender waits for the pairs, when its node ends.
const LAST_CALL: Duration = Duration::from_millis(20);

/// A lender's view of its loans.
#[derive(Debug, Default)]
pub(super) struct Lender {
    /// Pairs are lent: the front end is not heard before all are back.
    pub(super) is_out: bool,
    /// The front end waits to be heard.
    pub(super) calls: bool,
    /// The pairs that are back count once the present turn is committed.
    pub(super) settles: bool,
    /// A turn has been committed since the pairs came back.
    is_committed: bool,
    /// When the device changed last, as far as was seen.
    changed_at: Option<Instant>,
    /// Since when there are offers, and of which version.
    offered: Option<(Instant, u32)>,
    /// A move is expected soon.
    looks: bool,
    /// Since when no frame moves before pairs change hands.
    pause: Pause,
}

/// Frames of a flow go by another node's rings in the VNI once its pair has changed hands. No frame moves until all have been
/// read that went before.
#[derive(Debug, Clone, Copy, Default)]
struct Pause {
    since: Option<Instant>,
    all_read: bool,
}

impl Pause {
    /// Begins or goes on. Returns whether it is over: a node that does not read is not waited for as long as it takes.
    fn is_over(&mut self) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        self.all_read || since.elapsed() >= WAIT
    }

    fn look(&mut self, egress: &mut Egress<'_>) {
        if self.since.is_some() {
            self.all_read = !egress.vni.has_unread();
        }
    }

    fn again_in(&self) -> Option<Duration> {
        self.since.map(|_| ROOM_AGAIN)
    }
}

impl Lender {
    /// Returns whether the front end waits until pairs are back.
    pub(super) fn has_called(&self) -> bool {
        self.is_out && self.calls
    }

    /// Returns whether to look at the loans in each turn.
    #[inline]
    pub(super) fn looks(&self) -> bool {
        self.looks || self.has_called()
    }

    /// Returns how soon to look again.
    pub(super) fn again_in(&self) -> Option<Duration> {
        self.pause.again_in().or(self.looks().then_some(LOOK_AGAIN))
    }
}

/// A borrower's view of its loan.
#[derive(Debug)]
pub(super) struct Borrower {
    slot: Option<usize>,
    /// The loan when this worker looked last and had nothing more to do for it.
    seen: Option<Loan>,
    /// The loan whose pairs it serves.
    serves: Option<Loan>,
    /// The device of which it has the description: connection and version.
    described: Option<(u64, u32)>,
    /// The connection of a device that it forgets when its loan is over.
    forgets: Option<u64>,
    /// Since when it has served no pair, or since when it has the description.
    pub(super) since: Instant,
    /// It has the daemon show its node's address.
    is_ready: bool,
    /// The directory shows it.
    is_shown: bool,
    /// Since when it has been called on to give pairs back.
    pause: Pause,
    /// Its node is about to go, and other nodes are to take no frame from it for forged: it sends none.
    leaves: bool,
}

impl Borrower {
    pub(super) fn new() -> Self {
        Borrower {
            slot: None,
            seen: None,
            serves: None,
            described: None,
            forgets: None,
            since: Instant::now(),
            is_ready: false,
            is_shown: false,
            pause: Pause::default(),
            leaves: false,
        }
    }

    /// Begins to drive: nothing that it saw before counts.
    pub(super) fn begin(&mut self) {
        (self.since, self.seen, self.is_ready, self.is_shown) = (Instant::now(), None, false, false);
    }

    /// Returns whether it serves pairs.
    pub(super) fn serves_pairs(&self) -> bool {
        self.serves.is_some()
    }

    /// Returns whether it keeps a device whose front end has gone.
    pub(super) fn keeps_gone(&self) -> bool {
        self.forgets.is_some()
    }

    /// Returns whether frames of the guest stay where they are.
    #[inline]
    pub(super) fn leaves(&self) -> bool {
        self.leaves
    }

    /// Returns whether it serves pairs, or will not soon: frames for the guest wait otherwise.
    pub(super) fn takes_frames(&self) -> bool {
        self.serves.is_some() || self.since.elapsed() >= MOVE
    }

    /// Returns how soon to look for the lender's move.
    pub(super) fn again_in(&self) -> Option<Duration> {
        let expects = self.serves.is_none() && self.described.is_some() && self.since.elapsed() < EXPECTED;
        self.pause.again_in().or(expects.then_some(LOOK_AGAIN))
    }
}

impl Guest {
    /// Takes note of the frames and of the address for which a loan waits.
    #[inline]
    pub(super) fn look_for_loan(&mut self, egress: &mut Egress<'_>) {
        match &mut self.borrower {
            Some(borrower) => {
                borrower.is_shown = egress.switch.is_shown();
                borrower.pause.look(egress);
            }
            None => self.lender.pause.look(egress),
        }
    }

    /// Has the next turn look at the loans, if it may be the lender's move: a borrower wakes it.
    pub(super) fn wake_lender(&mut self) {
        let Some(loans) = &self.loans else { return };
        if self.lender.is_out {
            let is_ours = |loan: Loan| loan.state == State::Ready || loan.is_out() && !loan.is_due();
            self.lender.calls |= loans.all().any(|(_, loan)| is_ours(loan));
        } else {
            self.lender.looks |= (0..loans::SLOTS).any(|slot| loans.node(slot).is_some());
        }
    }

    /// Goes on with the loans of a predecessor.
    pub(super) fn begin_lending(&mut self) {
        let Some(loans) = &self.loans else { return };
        withdraw(loans);
        let is_out = loans.all().any(|(_, loan)| loan.is_out());
        let calls = loans.all().any(|(_, loan)| loan.is_out() && loan.state != State::Lent);
        self.lender = Lender { is_out, calls, ..Lender::default() };
        self.must_hear |= is_out;
    }

    /// Returns the bits of the pairs that are lent, or that a predecessor has not taken back.
    pub(super) fn lent(&self) -> Pairs {
        let out = self.loans.iter().flat_map(Loans::all).filter(|(_, loan)| loan.is_out());
        out.flat_map(|(_, loan)| loan.pairs()).fold(0, |bits, pair| bits | 1 << pair)
    }

    /// Returns whether pairs are lent, or came back in this turn: then the front end is not heard.
    pub(super) fn lends(&self) -> bool {
        self.lender.is_out || self.lender.settles
    }

    /// Returns whether pairs are to come back. Those that are lost do not.
    pub(super) fn awaits_pairs(&self) -> bool {
        self.lender.settles || self.loans.iter().flat_map(Loans::all).any(|(_, loan)| loan.is_due())
    }

    /// Lends pairs of a device that has not changed for a while, and calls them in for a front end that has more to say.
    pub(super) fn mind_loans(&mut self) {
        let Some(loans) = self.loans.take() else { return };
        if self.lender.is_out {
            self.have_back(&loans);
        } else {
            self.offer(&loans);
        }
        self.loans = Some(loans);
    }

    fn have_back(&mut self, loans: &Loans) {
        let says_more = self.front_end.as_ref().is_none_or(|it| it.channel.is_readable() || it.device.memory.is_gone());
        let is_late = |(slot, loan): (usize, Loan)| loan.state == State::Ready && loans.node(slot).is_some();
        self.lender.calls |= says_more || self.broken.is_some() || loans.all().any(is_late);
        self.lender.calls |= loans.all().any(|(_, loan)| loan.is_out() && !loan.is_due());
        if !self.lender.calls {
            return;
        }
        for (slot, loan) in loans.all().filter(|(_, loan)| loan.state == State::Lent) {
            point("guest.calling");
            if loans.change(slot, loan, loan.to(State::Called)) {
                self.front_end.iter().for_each(|it| {
                    // What it has to say waits there, and would keep this thread awake: a borrower's successor may need the CPU.
                    self.listener.unwatch(it.channel.socket().as_fd());
                    it.device.wake(loan.pairs().start);
                });
            }
        }
        // A machine that has to connect again takes them when it is known that it has. One that may still come must not open
        // rings that are lost.
        let is_early = self.front_end.is_none() && loans.all().any(|(_, loan)| loan.state == State::Lost);
        if is_early || self.stale.is_some() || loans.all().any(|(_, loan)| loan.is_due()) {
            return;
        }
        let is_running = self.is_running();
        let mut back = ArrayVec::<_, { device::PAIRS_MAX }>::new();
        for (slot, loan) in loans.all().filter(|(_, loan)| loan.is_out()) {
            let refusal = match loan.state {
                State::Lost => is_running.then_some(Refusal::Lost),
                // Its worker has said which rule.
                State::Broken => Some(Refusal::Left),
                _ => None,
            };
            self.broken = self.broken.take().or(refusal);
            if loan.state != State::Lost {
                loan.pairs().zip(loans.positions(slot, loan)).for_each(|it| _ = back.try_push(it));
            }
        }
        for (pair, [to, from]) in &back {
            let mark = self.marks.as_mut().and_then(|marks| marks.get_mut(*pair));
            mark.into_iter().for_each(|mark| *mark = *mark >> 32 << 32 | u64::from(*to) << 16 | u64::from(*from));
        }
        if let Some(front_end) = &mut self.front_end {
            if let Err(refusal) = front_end.device.take_back(back) {
                self.broken.get_or_insert(refusal);
            }
            front_end.device.lent = 0;
        }
        self.lender = Lender { settles: true, changed_at: Some(Instant::now()), looks: true, ..Lender::default() };
        // This turn says where the rings stand, and moves no frame.
        (self.heard, self.must_hear, self.must_watch) = (true, true, true);
        self.shortage.since = Default::default();
        self.polling.look_at_all();
    }

    /// Ends the loans that are back: the marks of the last commit say where their pairs stand. One that is lost ends a turn
    /// later: then the marks are of no machine, or of a later one, and no successor opens the pairs that nobody knows.
    pub(super) fn settle_loans(&mut self) {
        if !std::mem::take(&mut self.lender.settles) {
            return;
        }
        let is_later = std::mem::replace(&mut self.lender.is_committed, true);
        let Some(loans) = &self.loans else { return };
        for (slot, loan) in loans.all().filter(|(_, loan)| loan.is_out() && !loan.is_due()) {
            if loan.state == State::Lost && !is_later {
                (self.lender.settles, self.must_hear) = (true, true);
                continue;
            }
            point("guest.settling");
            loans.change(slot, loan, loan.to(State::Home));
            point("guest.settled");
        }
    }

    fn offer(&mut self, loans: &Loans) {
        let borrowers = (0..loans::SLOTS).filter(|slot| loans.node(*slot).is_some());
        let pairs = self.front_end.as_ref().map_or(0, |it| it.device.pairs);
        let borrowers: ArrayVec<usize, { loans::SLOTS }> = borrowers.take(pairs.saturating_sub(1)).collect();
        if borrowers.is_empty() || self.lender.settles {
            if self.lender.offered.take().is_some() {
                withdraw(loans);
            }
            (self.lender.looks, self.lender.pause) = (false, Pause::default());
            return;
        }
        let Some(front_end) = &mut self.front_end else { return };
        // A node that was added again may have the slot before another's.
        for (slot, loan) in loans.all().filter(|(slot, _)| !borrowers.contains(slot)) {
            if matches!(loan.state, State::Offered | State::Ready) {
                loans.change(slot, loan, loan.to(State::Home));
            }
        }
        let (now, version) = (Instant::now(), front_end.device.version());
        let is_settled = !self.has_news && front_end.rests() && self.broken.is_none();
        if !is_settled || self.lender.offered.is_some_and(|(_, offered)| offered != version) {
            withdraw(loans);
            self.lender = Lender { changed_at: Some(now), looks: true, ..Lender::default() };
            return;
        }
        if self.lender.changed_at.is_some_and(|at| now.saturating_duration_since(at) < self.lend_after) {
            return;
        }
        let (offered_at, _) = *self.lender.offered.get_or_insert((now, version));
        for slot in &borrowers {
            let loan = loans.loan(*slot);
            if loan.state == State::Home {
                loans.set_device(*slot, (front_end.channel.number(), version));
                let number = loan.number.wrapping_add(1).max(1);
                loans.change(*slot, loan, Loan { number, first: 0, count: 0, state: State::Offered });
            }
        }
        let is_ready = |slot: &&usize| loans.loan(**slot).state == State::Ready;
        let ready: ArrayVec<usize, { loans::SLOTS }> = borrowers.iter().filter(is_ready).copied().collect();
        let waited = now.saturating_duration_since(offered_at);
        self.lender.looks = waited < EXPECTED;
        if ready.is_empty() || ready.len() < borrowers.len() && waited < OFFER {
            return;
        }
        if !self.lender.pause.is_over() {
            (self.heard, self.lender.looks) = (true, true);
            return;
        }
        // The last pairs, in equal parts; the rest is ours.
        let each = pairs / (ready.len() + 1);
        let mut end = pairs;
        for slot in ready.into_iter().rev() {
            let (its, loan) = (end - each..end, loans.loan(slot));
            let positions = front_end.device.lend(its.clone());
            loans.set_positions(slot, positions.iter().copied());
            let [first, count] = [its.start, each].map(|pairs| u8::try_from(pairs).expect("a few"));
            point("guest.lending");
            if loan.state == State::Ready && loans.change(slot, loan, Loan { first, count, state: State::Lent, ..loan })
            {
                point("guest.lent");
                front_end.device.wake(its.start);
                (end, self.lender.is_out) = (its.start, true);
            } else if let Err(refusal) = front_end.device.take_back(its.zip(positions)) {
                self.broken.get_or_insert(refusal);
            }
        }
        self.lender = Lender { is_out: self.lender.is_out, ..Lender::default() };
        self.must_watch = true;
        self.polling.look_at_all();
    }

    /// Has all pairs back before the front end is sent away, if that takes no longer than a borrower that lives. Otherwise they
    /// stay out. Returns whether they [settle](Self::settle_loans) then.
    pub(super) fn call_in(&mut self) -> bool {
        let until = Instant::now() + LAST_CALL;
        self.lender.calls = true;
        while self.lender.is_out && Instant::now() < until {
            self.mind_loans();
            std::thread::yield_now();
        }
        std::mem::take(&mut self.lender.settles)
    }

    /// Takes a borrower's turn: looks for the lender's move.
    pub(super) fn attend_as_borrower(&mut self) {
        (self.heard, self.must_hear, self.shortage.rings) = (false, false, 0);
        self.turns = self.turns.wrapping_add(1);
        if std::mem::take(&mut self.must_ring) {
            self.front_end.iter().flat_map(|front_end| front_end.device.calls()).for_each(ring_eventfd);
        }
        if self.turns.is_multiple_of(ATTEND_EVERY)
            && self.front_end.as_ref().is_some_and(|front_end| front_end.device.memory.is_gone())
        {
            self.broken.get_or_insert(Broken::Gone.into());
        }
        // One that it forgets cannot be lent to it.
        self.forget_gone();
        let (Some(loans), Some(mut borrower)) = (self.loans.take(), self.borrower.take()) else { return };
        borrower.slot = borrower.slot.or_else(|| loans.claim(self.node));
        if let Some(slot) = borrower.slot {
            borrower.leaves = loans.leaves(slot);
            let loan = loans.loan(slot);
            if borrower.seen != Some(loan) {
                borrower.seen = self.move_loan(&loans, slot, loan, &mut borrower).then_some(loan);
            }
        }
        (self.loans, self.borrower) = (Some(loans), Some(borrower));
    }

    /// Makes the borrower's move, if it has one. Returns whether nothing is left to do for this loan.
    fn move_loan(&mut self, loans: &Loans, slot: usize, loan: Loan, borrower: &mut Borrower) -> bool {
        if let Some(serves) = borrower.serves.filter(|serves| serves.number != loan.number || !loan.is_due()) {
            // The daemon had said that this node is gone.
            self.stop_borrowing(serves, borrower);
        }
        match loan.state {
            State::Offered | State::Ready => {
                if borrower.described != Some(loans.device(slot)) {
                    return false;
                }
                if self.front_end.is_none() {
                    // Of which pairs is not known yet: all are watched.
                    self.front_end = self.inherited.take();
                    (self.must_watch, borrower.since) = (true, Instant::now());
                }
                self.has_news |= !std::mem::replace(&mut borrower.is_ready, true);
                // The lender wakes it by a kick.
                self.watch_news();
                let is_watched = !self.must_watch;
                if loan.state == State::Ready || !is_watched || !borrower.is_shown {
                    return is_watched && loan.state == State::Ready;
                }
                let changed = loans.change(slot, loan, loan.to(State::Ready));
                self.front_end.iter().for_each(|it| it.device.wake(0));
                changed
            }
            State::Lent | State::Called if borrower.serves.is_none() => {
                let is_known = borrower.described == Some(loans.device(slot));
                self.has_news |= !std::mem::replace(&mut borrower.is_ready, true);
                if !is_known || loan.state == State::Lent && !borrower.is_shown {
                    return false;
                }
                self.front_end = self.front_end.take().or_else(|| self.inherited.take());
                let Some(front_end) = &mut self.front_end else { return false };
                front_end.device.journal = self.journal.clone();
                let positions = loans.positions(slot, loan);
                let borrowed = front_end.device.borrow(loan.number, loan.pairs(), positions, self.marks.as_ref());
                self.broken = borrowed.err();
                (self.heard, self.must_ring, self.must_watch) = (true, true, true);
                self.shortage.since = Default::default();
                self.polling.look_at_all();
                borrower.serves = Some(loan);
                point("guest.borrowed");
                loan.state == State::Lent
            }
            State::Called if !borrower.pause.is_over() => {
                self.heard = true;
                false
            }
            State::Called => {
                self.give_back(loans, slot, loan, State::Returned, borrower);
                true
            }
            State::Home => {
                // The lender may sleep, and knows of no new borrower.
                self.inherited.iter().for_each(|it| it.device.wake(0));
                true
            }
            State::Lent | State::Returned | State::Broken | State::Lost => true,
        }
    }

    /// Stops the pairs, and says where they stand.
    fn give_back(&mut self, loans: &Loans, slot: usize, loan: Loan, to: State, borrower: &mut Borrower) {
        let Some(front_end) = &mut self.front_end else { return };
        if std::mem::take(&mut self.must_ring) {
            front_end.device.calls().for_each(ring_eventfd);
        }
        loans.set_positions(slot, front_end.device.lend(loan.pairs()));
        point("guest.returning");
        let mut now = loan;
        // The lender may call it in at the same time.
        while now.is_due() && !loans.change(slot, now, now.to(to)) {
            now = loans.loan(slot);
        }
        point("guest.returned");
        front_end.device.wake(0);
        self.stop_borrowing(loan, borrower);
    }

    fn stop_borrowing(&mut self, loan: Loan, borrower: &mut Borrower) {
        if let Some(mut front_end) = self.front_end.take() {
            front_end.device.forget_queues();
            // A later description may be there.
            self.inherited.get_or_insert(front_end);
        }
        (self.heard, self.must_watch, self.version) = (true, true, loan.number);
        (borrower.serves, borrower.since, borrower.pause) = (None, Instant::now(), Pause::default());
        self.shortage.kicks_on = 0;
    }

    /// Leaves the loan to a successor.
    pub(super) fn release_loan(&mut self) {
        if let Some(mut front_end) = self.front_end.take() {
            front_end.device.forget_queues();
            self.inherited.get_or_insert(front_end);
        }
        if let Some(borrower) = &mut self.borrower {
            (borrower.seen, borrower.serves, borrower.pause) = (None, None, Pause::default());
            borrower.is_shown = false;
        }
        (self.serves, self.must_watch) = (false, true);
    }

    /// Gives the borrowed pairs back: the guest broke a rule, or the node ends.
    pub(super) fn end_borrowing(&mut self, to: State) {
        if self.borrower.as_ref().is_some_and(|it| it.serves.is_none()) {
            // It may be called on to serve just now.
            self.attend_as_borrower();
        }
        let (Some(loans), Some(mut borrower)) = (self.loans.take(), self.borrower.take()) else { return };
        if let Some((slot, loan)) = borrower.slot.zip(borrower.serves) {
            self.give_back(&loans, slot, loan, to, &mut borrower);
        }
        (self.loans, self.borrower) = (Some(loans), Some(borrower));
    }

    /// Looks whether the node has had no pairs for so long that other nodes are to give it no frames. Returns whether to look
    /// again.
    pub(super) fn tick_as_borrower(&mut self) -> bool {
        let (Some(loans), Some(borrower)) = (&self.loans, &mut self.borrower) else { return false };
        if borrower.is_shown && !borrower.is_ready && borrower.serves.is_none() && borrower.takes_frames() {
            // A worker before this one was ready, and could not say that it is not any more: this one says both.
            (borrower.is_ready, self.has_news) = (true, true);
            return true;
        }
        if borrower.is_ready && borrower.serves.is_none() && borrower.takes_frames() {
            let withdraws = borrower.slot.is_none_or(|slot| {
                let loan = loans.loan(slot);
                !loan.is_due() && (loan.state != State::Ready || loans.change(slot, loan, loan.to(State::Offered)))
            });
            if withdraws {
                (borrower.is_ready, borrower.is_shown, borrower.seen) = (false, false, None);
                self.has_news = true;
            }
        }
        borrower.described.is_some() && borrower.serves.is_none()
    }

    /// Returns the parts by which the daemon is to show a borrower's node's address: none, if it is not to.
    pub(super) fn borrower_parts(&mut self) -> io::Result<Option<Parts>> {
        self.has_news = false;
        if !self.serves || self.borrower.as_ref().is_none_or(|borrower| !borrower.is_ready) {
            return Ok(None);
        }
        // The daemon wants a socket.
        let socket = self.listener.socket().try_clone()?;
        let number = rustix::fs::fstat(&socket)?.st_ino;
        let (name, text, version) = ("queues of a virtual machine".to_owned(), String::new(), self.turns.into());
        Ok(Some(Parts { name, number, version, text, fds: vec![socket] }))
    }

    /// Hears the description of the device that may be lent.
    pub(super) fn hear_of_device(&mut self, parts: Parts) -> Result<(), String> {
        let Parts { number, text, mut fds, .. } = parts;
        if fds.is_empty() {
            return Err("no socket came with a virtual machine; rebuild the older of daemon and worker".to_owned());
        }
        // The front end must find out when the lender is gone.
        drop(fds.remove(0));
        let (device, _) = Device::again(&text, fds)?;
        let described = Some((number, device.version()));
        let Some(borrower) = &mut self.borrower else { return Ok(()) };
        borrower.forgets = None;
        if borrower.described == described {
            return Ok(());
        }
        let nobody = self.listener.socket().try_clone().map_err(|error| error.to_string())?;
        let front_end = Box::new(FrontEnd::new(Channel::new(nobody), device));
        (borrower.described, borrower.seen) = (described, None);
        if borrower.serves.is_none() {
            (self.front_end, self.must_watch, borrower.since) = (None, true, Instant::now());
        }
        self.inherited = Some(front_end);
        Ok(())
    }

    /// Forgets the device that it had to keep, if it may by now.
    pub(super) fn forget_gone(&mut self) {
        let gone = self.borrower.as_ref().and_then(|borrower| borrower.forgets);
        gone.into_iter().for_each(|number| self.forget_device(number));
    }

    /// Forgets a device whose front end has gone, once no loan of it is due: its pairs stand where this node's last turn left
    /// them, and nobody else can say so.
    pub(super) fn forget_device(&mut self, number: u64) {
        let Some(borrower) = &mut self.borrower else { return };
        let is_due = self.loans.as_ref().is_some_and(|loans| {
            let is_its = |slot: usize| loans.node(slot) == Some(self.node) && loans.device(slot).0 == number;
            loans.all().any(|(slot, loan)| loan.is_due() && is_its(slot))
        });
        borrower.forgets = (is_due || borrower.serves.is_some()).then_some(number);
        if borrower.forgets.is_none() && borrower.described.take_if(|(known, _)| *known == number).is_some() {
            (self.front_end, self.inherited, self.must_watch) = (None, None, true);
        }
    }
}

/// Takes all offers back.
fn withdraw(loans: &Loans) {
    // A borrower changes one at most once meanwhile.
    for (slot, _) in (0..2).flat_map(|_| loans.all()) {
        let loan = loans.loan(slot);
        if matches!(loan.state, State::Offered | State::Ready) {
            loans.change(slot, loan, loan.to(State::Home));
        }
    }
}
