//! The daemon's part: it orders relays, learns who died, fences, and seizes a lease that nobody can pass any more.
//!
//! It is never in the way of a packet, and a relay that is under way ends without it. What it forgets when it dies, the lease word and
//! the workers tell the next one; of its own it needs only the record of whom it has fenced.

mod table;

pub use table::{Action, Event, State, TABLE};

use crate::method::Method;
use crate::table::{Refused, Row, step};
use crate::wire::{Order, Positions, Reason, Report, Standing, Use};
use crate::{ARBITER, After, Party, Tenure};

/// The table of an arbiter.
pub type Table = Vec<Row<State, Event, Action>>;

/// Most workers that a device can have at a time: one that drives, its stand-by, and those that somebody starts.
pub const MEMBERS_MAX: usize = 8;

/// What is known of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Is {
    /// It has not said who it is.
    Unheard,
    /// It has nothing of the device.
    Idle,
    /// It could go on at once.
    Ready,
    /// It was told to take, and waits.
    Waiting,
    /// It holds the lease.
    Holding,
    /// It has not taken by the deadline.
    Late,
    /// It cannot take this device.
    Unfit,
    /// Its heart does not beat.
    Silent,
    /// It is recorded as fenced, and not known to be.
    Condemned,
    /// It is kept from the device, for good.
    Fenced,
    /// It is dead.
    Dead,
}

impl Is {
    /// Whether it is believed to do what it is told.
    fn live(self) -> bool {
        !matches!(self, Is::Unheard | Is::Silent | Is::Condemned | Is::Fenced | Is::Dead)
    }
}

/// Somebody who drives a device, or may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Member {
    /// Who.
    pub party: Party,
    /// What is known of it.
    pub is: Is,
}

/// An upgrade or a handover that somebody asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ask {
    /// Which.
    pub purpose: Use,
    /// Who is to have the device.
    pub to: Party,
    /// How.
    pub method: Method,
    /// Whether the giver must be fenced before the taker begins: it is of a node that is not trusted.
    pub fence_first: bool,
    /// Whose sash the giver will write.
    pub kind: u32,
    /// Of which version.
    pub version: u32,
    /// The descriptors that go along.
    pub carries: Positions,
}

/// What the arbiter hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Input {
    /// From a person, or a policy.
    Asked(Ask),
    /// From a worker.
    Report(Party, Report),
    /// Its pidfd says that it has ended.
    Gone(Party),
    /// Its heart has not beaten for too long ([`crate::pulse`]).
    Silent(Party),
    /// No store of its reaches the device any more.
    Fenced(Party),
    /// The time of the deadline with this number is over.
    Deadline(u32),
    /// What the lease word says.
    Word(Tenure),
    /// How the compare-and-swap went: it won, or the word is this.
    Swapped(Result<(), Tenure>),
}

/// What the arbiter does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Do {
    /// Look at the lease word. Then [`Input::Word`].
    Look,
    /// Send this.
    Tell(Party, Order),
    /// Set a deadline, in place of the one before. Then perhaps [`Input::Deadline`].
    Watch(u32),
    /// Record that it is fenced, then fence it. Then [`Input::Fenced`].
    Fence(Party),
    /// Compare-and-swap of the lease. Then [`Input::Swapped`].
    Swap {
        /// Only if this is what it says.
        from: Tenure,
        /// To this.
        to: Tenure,
    },
    /// Tell whoever asked, and the log.
    Say(Told),
}

/// How a relay ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Told {
    /// Who drives now.
    pub driver: Option<Party>,
    /// Why that is not who was to.
    pub why: Option<Reason>,
}

/// The arbiter of one device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Arbiter {
    state: State,
    members: Vec<Member>,
    giver: Option<Party>,
    next: Option<Party>,
    fencing: Option<Party>,
    /// What the lease is believed to be.
    seen: Tenure,
    after: After,
    /// The epoch of the sash, where the last driver has passed the lease.
    wrote: u32,
    ask: Option<Ask>,
    why: Option<Reason>,
    deadline: u32,
}

impl Arbiter {
    /// One that has just begun, of a device with these workers, and what it must do first. `fenced` is the record of those that one
    /// before it has fenced.
    pub fn begin(workers: &[Party], fenced: &[Party]) -> (Self, Vec<Do>) {
        let is = |party| if fenced.contains(party) { Is::Condemned } else { Is::Unheard };
        let members: Vec<_> = workers.iter().map(|party| Member { party: *party, is: is(party) }).collect();
        // The one before may have died between record and fence.
        let first = |member: &Member| match member.is {
            Is::Condemned => Do::Fence(member.party),
            _ => Do::Tell(member.party, Order::Who),
        };
        let asked = members.iter().map(first).collect();
        let arbiter = Arbiter {
            state: State::Finding,
            members,
            giver: None,
            next: None,
            fencing: None,
            seen: Tenure::free(0),
            after: After::Lost,
            wrote: 0,
            ask: None,
            why: None,
            deadline: 0,
        };
        (arbiter, asked)
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// Who holds the lease, as far as it knows.
    pub fn driver(&self) -> Option<Party> {
        self.giver.filter(|_| self.state == State::Steady)
    }

    /// What it knows of everybody.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Why the last relay did not end as it was to, or why nobody drives.
    pub fn why(&self) -> Option<Reason> {
        self.why
    }

    /// Has `party` let go of what it has of the device, unless it drives or is to drive: it has no part in it any more.
    pub fn dismiss(&mut self, party: Party) -> Vec<Do> {
        let has_part = [self.giver, self.next, self.fencing].contains(&Some(party));
        match self.is(party) {
            _ if has_part => return Vec::new(),
            Some(is) if !is.live() => return Vec::new(),
            Some(_) => self.set(party, Is::Idle),
            // It was given what it takes to drive, and has not said yet that it is ready: it must not believe that for good.
            None => {}
        }
        vec![Do::Tell(party, Order::Leave)]
    }

    /// What follows. What is refused changes nothing but what is known of who said it.
    pub fn hear(&mut self, table: &Table, input: Input) -> Result<Vec<Do>, Refused> {
        let mut doing = Vec::new();
        let mut event = self.classify(input, &mut doing);
        while let Some(happened) = event {
            event = self.follow(table, happened, &mut doing)?;
        }
        Ok(doing)
    }

    fn is(&self, party: Party) -> Option<Is> {
        self.members.iter().find(|member| member.party == party).map(|member| member.is)
    }

    fn live(&self, party: Option<Party>) -> bool {
        party.and_then(|party| self.is(party)).is_some_and(Is::live)
    }

    fn set(&mut self, party: Party, is: Is) {
        // The dead and the fenced stay that.
        let rank = |is: Is| match is {
            Is::Dead => 3,
            Is::Fenced => 2,
            Is::Condemned => 1,
            _ => 0,
        };
        match self.members.iter().position(|member| member.party == party) {
            Some(at) if rank(is) >= rank(self.members[at].is) => self.members[at].is = is,
            None if self.members.len() < MEMBERS_MAX => self.members.push(Member { party, is }),
            None => {
                // The dead make room, but for those of whom something is still to be decided.
                let kept = [self.giver, self.next, self.fencing, self.seen.holder];
                let over =
                    |member: &Member| matches!(member.is, Is::Dead | Is::Fenced) && !kept.contains(&Some(member.party));
                if let Some(at) = self.members.iter().position(over) {
                    self.members[at] = Member { party, is };
                }
            }
            _ => {}
        }
    }

    /// One row, and what follows from it at once.
    fn follow(&mut self, table: &Table, event: Event, doing: &mut Vec<Do>) -> Result<Option<Event>, Refused> {
        let (next, actions) = step(table, self.state, event)?;
        if let (Event::Deadline, State::Passing | State::Granting, Some(late)) = (event, self.state, self.next) {
            self.set(late, Is::Late);
            self.why = Some(Reason::Late);
        }
        if matches!(event, Event::NextGone | Event::Deadline) && self.why.is_none() {
            self.why = Some(if event == Event::Deadline { Reason::Late } else { Reason::Died });
        }
        self.state = next;
        let mut then = None;
        for action in actions {
            then = self.act(*action, doing).or(then);
        }
        if matches!(next, State::Steady | State::Parked) {
            (self.next, self.ask) = (None, None);
        }
        Ok(then)
    }

    fn act(&mut self, action: Action, doing: &mut Vec<Do>) -> Option<Event> {
        let tell = |party: Option<Party>, order| party.map(|party| Do::Tell(party, order));
        let epoch = self.seen.epoch;
        match action {
            Action::Look => doing.push(Do::Look),
            Action::Prepare => doing.extend(self.ask.map(|ask| {
                let Ask { purpose, method, kind, version, carries, .. } = ask;
                Do::Tell(ask.to, Order::Prepare { purpose, method, kind, version, carries })
            })),
            Action::Release => {
                (self.after, self.wrote) = (After::Passed, epoch);
                doing.extend(tell(self.giver, Order::Release { epoch }));
            }
            Action::Recall => doing.extend(tell(self.giver, Order::Recall { epoch })),
            Action::Take => {
                if self.giver.is_some() && self.seen.holder == self.giver {
                    // It is waited for until that one lets go, which is to be told to next.
                    (self.after, self.wrote) = (After::Passed, epoch);
                }
                let (after, wrote) = (self.after, self.wrote);
                doing.extend(tell(self.next, Order::Take { epoch, after, wrote }));
                self.next.into_iter().for_each(|next| self.set(next, Is::Waiting));
            }
            Action::StandDown => doing.extend(tell(self.next, Order::StandDown)),
            Action::Watch => {
                self.deadline = self.deadline.wrapping_add(1);
                doing.push(Do::Watch(self.deadline));
            }
            Action::Fence => {
                let whom = self.fencing.take().or(self.giver);
                self.fencing = whom;
                whom.into_iter().for_each(|whom| self.set(whom, Is::Condemned));
                doing.extend(whom.map(Do::Fence));
            }
            Action::Seize => {
                // Y3: from whoever is live only what it has passed.
                let from = if self.live(self.seen.holder) { self.seen.passed() } else { self.seen };
                self.seen = from;
                self.fencing = None;
                doing.push(Do::Swap { from, to: from.taken_by(ARBITER) });
            }
            Action::Choose => return Some(self.choose()),
            Action::PassOn => doing.push(Do::Swap { from: self.seen, to: self.seen.passed() }),
            Action::Settle => self.settle(doing),
            Action::Say => doing.push(Do::Say(Told { driver: self.driver(), why: self.why })),
        }
        None
    }

    fn choose(&mut self) -> Event {
        let can = |party: &Party| matches!(self.is(*party), Some(Is::Ready | Is::Waiting));
        let spares = self.members.iter().map(|member| member.party);
        let all = self.next.into_iter().chain(self.giver).chain(spares);
        self.next = { all }.find(can);
        if self.next.is_none() {
            self.why = Some(Reason::NobodyLeft);
        }
        if self.next.is_some() { Event::Chosen } else { Event::NobodyLeft }
    }

    fn settle(&mut self, doing: &mut Vec<Do>) {
        let new = self.next;
        let old = self.giver.filter(|_| self.ask.is_some()).filter(|old| Some(*old) != new);
        let unfit = self.ask.map(|ask| ask.to).filter(|to| Some(*to) != new && self.is(*to) == Some(Is::Unfit));
        let leaves = old.into_iter().chain(unfit).filter(|party| self.live(Some(*party)));
        for party in leaves.collect::<Vec<_>>() {
            // Who has left can take nothing, so nobody may choose it.
            self.set(party, Is::Idle);
            doing.push(Do::Tell(party, Order::Leave));
        }
        if new == self.ask.map(|ask| ask.to) {
            self.why = None;
        }
        new.into_iter().for_each(|new| self.set(new, Is::Holding));
        self.giver = new;
        self.after = After::Lost;
    }

    /// What an input means, after what it says of somebody was noted.
    fn classify(&mut self, input: Input, doing: &mut Vec<Do>) -> Option<Event> {
        match input {
            Input::Asked(ask) => {
                // Refused by the table where it does not fit; nothing may be noted of it then.
                if self.state == State::Steady {
                    if !self.live(Some(ask.to)) || Some(ask.to) == self.giver {
                        (self.why, self.next) = (Some(Reason::Died), None);
                        doing.push(Do::Say(Told { driver: self.driver(), why: self.why }));
                        return None;
                    }
                    (self.ask, self.next, self.why) = (Some(ask), Some(ask.to), None);
                }
                Some(Event::Asked)
            }
            Input::Report(party, report) => self.report(party, report, doing),
            Input::Gone(party) => {
                self.set(party, Is::Dead);
                self.absent(party, Event::GiverGone)
            }
            Input::Silent(party)
                if self.is(party).is_some_and(|is| !matches!(is, Is::Dead | Is::Fenced | Is::Condemned)) =>
            {
                self.set(party, Is::Silent);
                self.absent(party, Event::GiverSilent)
            }
            Input::Silent(_) => None,
            Input::Fenced(party) => {
                self.set(party, Is::Fenced);
                (self.fencing == Some(party)).then_some(Event::Fenced).or_else(|| self.all_heard())
            }
            Input::Deadline(number) => (number == self.deadline).then_some(Event::Deadline),
            Input::Word(now) => Some(self.look(now)),
            Input::Swapped(Ok(())) if self.state == State::Granting => {
                self.seen = self.seen.passed();
                Some(Event::PassedOn)
            }
            Input::Swapped(Ok(())) => {
                if self.seen.holder.is_some() {
                    self.after = After::Lost;
                }
                self.seen = self.seen.taken_by(ARBITER);
                let ended = self.members.iter_mut().filter(|member| member.is == Is::Holding);
                ended.for_each(|member| member.is = Is::Ready);
                Some(Event::Seized)
            }
            Input::Swapped(Err(now)) => Some(self.look(now)),
        }
    }

    /// Somebody is dead, or silent.
    fn absent(&mut self, party: Party, if_giver: Event) -> Option<Event> {
        match self.state {
            State::Finding => self.all_heard(),
            State::Fencing if self.fencing == Some(party) => {
                (self.is(party) == Some(Is::Dead)).then_some(Event::Fenced)
            }
            _ if self.next == Some(party) => Some(Event::NextGone),
            _ if self.giver == Some(party) => Some(if_giver),
            _ => None,
        }
    }

    fn all_heard(&self) -> Option<Event> {
        let waited_for = |member: &Member| matches!(member.is, Is::Unheard | Is::Waiting | Is::Condemned);
        (self.state == State::Finding && !self.members.iter().any(waited_for)).then_some(Event::Heard)
    }

    /// Whose the lease is.
    fn look(&mut self, now: Tenure) -> Event {
        self.seen = now;
        let Some(holder) = now.holder else { return Event::FreeNow };
        if holder == ARBITER {
            return Event::Seized;
        }
        match self.is(holder) {
            Some(Is::Dead | Is::Fenced) => Event::FreeNow,
            Some(Is::Silent | Is::Unheard | Is::Condemned) | None => {
                self.fencing = Some(holder);
                Event::HeldBySilent
            }
            Some(_) if self.state == State::Finding => {
                self.giver = Some(holder);
                Event::HeldByGiver
            }
            Some(_) if self.giver == Some(holder) && self.next != Some(holder) => {
                self.set(holder, Is::Holding);
                if let Some(next) = self.next.filter(|next| self.is(*next) == Some(Is::Late)) {
                    self.set(next, Is::Waiting);
                }
                Event::HeldByGiver
            }
            Some(_) => {
                self.next = Some(holder);
                Event::HeldByNext
            }
        }
    }

    fn report(&mut self, party: Party, report: Report, doing: &mut Vec<Do>) -> Option<Event> {
        let (is_next, is_giver) = (self.next == Some(party), self.giver == Some(party));
        match self.is(party) {
            Some(Is::Dead | Is::Fenced | Is::Condemned) => return None,
            // It was slow, not hung. Where it stands is not known until it says that it waits for nothing.
            Some(Is::Silent) => {
                self.set(party, Is::Late);
                doing.push(Do::Tell(party, Order::StandDown));
                return None;
            }
            _ => {}
        }
        match report {
            Report::Hello { standing, .. } => {
                let is = match standing {
                    Standing::Idle => Is::Idle,
                    Standing::Ready => Is::Ready,
                    Standing::Waiting => Is::Waiting,
                    Standing::Holding => Is::Holding,
                    Standing::Unfit => Is::Unfit,
                };
                self.set(party, is);
                if is == Is::Waiting {
                    doing.push(Do::Tell(party, Order::StandDown));
                }
                self.all_heard().or((is == Is::Ready && self.state != State::Finding).then_some(Event::SpareReady))
            }
            Report::Ready => {
                self.set(party, Is::Ready);
                let behind = self.ask.is_some_and(|ask| ask.fence_first);
                match (is_next, behind) {
                    (true, false) => Some(Event::Ready),
                    (true, true) => Some(Event::ReadyBehindFence),
                    (false, _) => Some(Event::SpareReady),
                }
            }
            Report::Unfit(reason) => {
                self.set(party, Is::Unfit);
                self.why = is_next.then_some(reason).or(self.why);
                is_next.then_some(Event::Unfit)
            }
            Report::Released { epoch } => {
                self.set(party, Is::Ready);
                let now = is_giver && epoch == self.seen.epoch && self.state != State::Finding;
                if now {
                    (self.after, self.wrote) = (After::Passed, epoch);
                }
                now.then(|| self.passed(epoch))
            }
            Report::Kept { epoch, reason } => {
                let now = is_giver && epoch == self.seen.epoch;
                self.why = now.then_some(reason).or(self.why);
                now.then_some(if self.live(self.next) { Event::Kept } else { Event::KeptAlone })
            }
            Report::Taken { epoch } => {
                self.set(party, Is::Holding);
                // While somebody else is being fenced the word itself will say so: what is seized after the fence is what was fenced.
                if is_next && epoch == self.seen.epoch.wrapping_add(1) && self.state != State::Fencing {
                    self.seen = Tenure { holder: Some(party), epoch };
                    return Some(Event::Taken);
                }
                self.all_heard()
            }
            Report::Lost { epoch, ready } => {
                match self.is(party) {
                    Some(Is::Unfit) => {}
                    _ if ready => self.set(party, Is::Ready),
                    _ => self.set(party, Is::Idle),
                }
                let now = is_next && (epoch == self.seen.epoch || self.state == State::Clearing);
                let ready = self.is(party) == Some(Is::Ready) && self.state != State::Finding;
                now.then_some(Event::Lost).or_else(|| self.all_heard()).or(ready.then_some(Event::SpareReady))
            }
            Report::Failed { epoch, reason } => {
                self.set(party, Is::Unfit);
                self.why = Some(reason);
                if is_next && epoch == self.seen.epoch.wrapping_add(1) && self.state != State::Fencing {
                    self.seen = Tenure::free(epoch);
                    return Some(Event::Failed);
                }
                let now = is_giver && epoch == self.seen.epoch && self.state != State::Finding;
                now.then(|| self.passed(epoch)).or_else(|| self.all_heard())
            }
            Report::Replaced { .. } => {
                self.set(party, Is::Unfit);
                self.all_heard()
            }
            Report::Fenced { party, .. } => self.classify(Input::Fenced(party), doing),
            Report::Beat { .. } => None,
        }
    }

    /// Whoever held the lease has passed it.
    fn passed(&mut self, epoch: u32) -> Event {
        self.seen = Tenure::free(epoch);
        Event::Released
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn party(number: u32) -> Party {
        Party(NonZeroU32::new(number).unwrap())
    }

    fn steady() -> (Arbiter, Table) {
        let table = TABLE.to_vec();
        let (mut arbiter, _) = Arbiter::begin(&[party(1)], &[]);
        let hello = Report::Hello { standing: Standing::Holding, epoch: 1 };
        assert_eq!(arbiter.hear(&table, Input::Report(party(1), hello)), Ok(vec![Do::Look]));
        arbiter.hear(&table, Input::Word(Tenure { holder: Some(party(1)), epoch: 1 })).unwrap();
        assert_eq!(arbiter.driver(), Some(party(1)));
        (arbiter, table)
    }

    #[test]
    fn who_is_dismissed_is_told_so_and_not_chosen_any_more() {
        let (mut arbiter, table) = steady();
        arbiter.hear(&table, Input::Report(party(2), Report::Ready)).unwrap();
        assert_eq!(arbiter.dismiss(party(2)), [Do::Tell(party(2), Order::Leave)]);
        assert_eq!(arbiter.dismiss(party(1)), [], "who drives cannot be spared");
        assert_eq!(arbiter.dismiss(party(3)), [Do::Tell(party(3), Order::Leave)], "who gets ready has not said so yet");
        let doing = arbiter.hear(&table, Input::Gone(party(1))).unwrap();
        assert!(matches!(doing[..], [Do::Swap { .. }]), "{doing:?}");
        let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
        assert_eq!(doing, [Do::Say(Told { driver: None, why: Some(Reason::NobodyLeft) })]);
    }

    #[test]
    fn however_many_have_died_there_is_room_for_a_fresh_one() {
        let (mut arbiter, table) = steady();
        for number in 2..50 {
            arbiter.hear(&table, Input::Report(party(number), Report::Ready)).unwrap();
            assert_eq!(arbiter.is(party(number)), Some(Is::Ready));
            arbiter.hear(&table, Input::Gone(party(number))).unwrap();
        }
        assert!(arbiter.members().len() <= MEMBERS_MAX && arbiter.driver() == Some(party(1)));
    }
}
