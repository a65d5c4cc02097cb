//! Reports of workers: the arbiter checks each by the table of authority and by the lease word, and derives its
//! event.

use super::authority::{Rule, Says, Verdict, verdict};
use super::{Arbiter, Do, Event, Is, LOST_MOST, State};
use crate::wire::{Order, Report, Standing};
use crate::{After, Party, Tenure};

impl Arbiter {
    /// Returns the verdict on a report, and the reason, before the report is heard.
    pub fn weigh(&self, authority: &[Rule], party: Party, report: Report, word: Tenure) -> (Verdict, &'static str) {
        let Some(is) = self.is(party) else { return (Verdict::Breach, "it was not given this NIC") };
        match verdict(authority, is, Says::of(report)) {
            (Verdict::Hear, _) if self.denies(party, report, word) => {
                (Verdict::Breach, "the lease word contradicts it")
            }
            (Verdict::Breach, _) if is == Is::Given && self.is_outdated(report) => {
                (Verdict::Stale, "it was given the device anew before this was heard")
            }
            verdict => verdict,
        }
    }

    pub(super) fn report(
        &mut self,
        authority: &[Rule],
        party: Party,
        report: Report,
        word: Tenure,
        doing: &mut Vec<Do>,
    ) -> Option<Event> {
        match (self.weigh(authority, party, report, word), self.is(party)) {
            ((Verdict::Hear, _), Some(is)) => self.heard(party, is, report, doing),
            ((Verdict::Stale, _), _) => None,
            ((_, because), _) => self.breach(party, because, doing),
        }
    }

    fn breach(&mut self, party: Party, because: &'static str, doing: &mut Vec<Do>) -> Option<Event> {
        doing.push(Do::Breach(party, because));
        self.set(party, Is::Condemned);
        self.absent(party, Event::GiverSilent)
    }

    /// Returns whether the report speaks of a tenure that is over. Taker and giver report on two sockets that one
    /// has taken the lease and the other has passed it. So a giver can be ordered to leave, and be given the device
    /// anew, before its report is heard.
    fn is_outdated(&self, report: Report) -> bool {
        match report {
            Report::Released { epoch }
            | Report::Kept { epoch, .. }
            | Report::Taken { epoch }
            | Report::Failed { epoch, .. }
            | Report::Replaced { epoch } => epoch.wrapping_sub(self.seen.epoch).cast_signed() < 0,
            Report::Hello { .. } | Report::Ready | Report::Unfit(_) | Report::Lost { .. } => false,
        }
    }

    /// Returns whether the lease word denies the report, which speaks of the worker's own swap.
    fn denies(&self, party: Party, report: Report, word: Tenure) -> bool {
        let holds = word.holder == Some(party) && self.may_hold(party);
        match report {
            Report::Taken { epoch } => {
                word.epoch == epoch && !holds || epoch.wrapping_sub(word.epoch).cast_signed() > 0
            }
            Report::Released { epoch } => holds && word.epoch == epoch,
            _ => false,
        }
    }

    fn heard(&mut self, party: Party, is: Is, report: Report, doing: &mut Vec<Do>) -> Option<Event> {
        let (is_next, is_giver) = (self.next == Some(party), self.giver == Some(party));
        if is == Is::Silent {
            // The worker was slow, not hung. Its standing is not known until it reports that it waits for nothing.
            self.set(party, Is::Late);
            doing.push(Do::Tell(party, Order::StandDown));
            return None;
        }
        match report {
            Report::Hello { standing, .. } => self.stands(party, is, standing, doing),
            Report::Ready => {
                self.set(party, Is::Ready);
                match (is_next, is_next && self.is_behind_fence()) {
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
                // While workers are being fenced, the lease word itself will say so: after the fence the arbiter seizes
                // the lease of the fenced worker.
                if is_next && epoch == self.seen.epoch.wrapping_add(1) && self.state != State::Fencing {
                    self.seen = Tenure { holder: Some(party), epoch };
                    return Some(Event::Taken);
                }
                self.all_heard()
            }
            Report::Lost { epoch, ready } => self.lost(party, epoch, ready),
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
        }
    }

    /// Notes the standing of a worker that an earlier arbiter gave the device. The standing of other workers is
    /// known.
    fn stands(&mut self, party: Party, is: Is, standing: Standing, doing: &mut Vec<Do>) -> Option<Event> {
        if is != Is::Unheard {
            return self.all_heard();
        }
        let is = match standing {
            Standing::Idle => Is::Given,
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

    fn lost(&mut self, party: Party, epoch: u32, ready: bool) -> Option<Event> {
        let is_next = self.next == Some(party);
        let now = is_next && (epoch == self.seen.epoch || self.state == State::Clearing);
        let member = self.members.iter_mut().find(|member| member.party == party)?;
        member.lost = member.lost.saturating_add(u8::from(now && self.state == State::Granting));
        match member.is {
            Is::Unfit => {}
            // Only this worker could take the lease, and it failed again and again: other workers come first from
            // here on.
            _ if member.lost >= LOST_MOST => member.is = Is::Unfit,
            _ if ready => member.is = Is::Ready,
            _ => member.is = Is::Given,
        }
        let ready = self.is(party) == Some(Is::Ready) && self.state != State::Finding;
        now.then_some(Event::Lost).or_else(|| self.all_heard()).or(ready.then_some(Event::SpareReady))
    }

    /// Returns whether the next begins only after all workers that it does not trust are fenced.
    fn is_behind_fence(&self) -> bool {
        self.next.is_some_and(|next| !self.strangers_to(next).is_empty())
    }

    /// Notes that the holder has passed the lease.
    fn passed(&mut self, epoch: u32) -> Event {
        self.seen = Tenure::free(epoch);
        if let (State::Letting, Some(next)) = (self.state, self.next) {
            // The giver's report that it has stopped is not trusted, nor is any other worker of its node.
            self.fencing = self.strangers_to(next);
        }
        Event::Released
    }
}
