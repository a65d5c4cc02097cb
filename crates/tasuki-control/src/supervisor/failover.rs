//! A NIC that goes to its stand-by node by itself, because the node that has it is lost. When it goes is a pure function of
//! what the daemon sees ([`LostTimer::look`]):
//!
//! | the NIC                                                   | then             | because                                           |
//! |-----------------------------------------------------------|------------------|---------------------------------------------------|
//! | has no stand-by node, or is there                         | nothing          | it never comes back by itself                     |
//! | is driven, or is not open, or the card is why it is not   | nothing          | the node is not lost                              |
//! | has no driver, and a worker of its node was never there   | nothing          | the first worker is still starting                |
//! | has had no driver for less than `failover_after_ms`       | wait             | a worker and its stand-by are replaced in a moment |
//! | the same, and not much of that is left                    | the other one gets ready | making memory for a card takes some ms     |
//! | has, but the daemon itself did not run for a part of it   | wait anew, once  | it has heard no worker meanwhile                  |
//! | has had none for so long                                  | the node is lost | five fresh workers have been tried by then        |
//! | the same, and the stand-by node has no worker either      | wait, and say so | the first of the two that is back has it          |
//! | the same, and something else is under way with it         | wait             | that has a limit of its own                       |
//!
//! From then on it is a handover like one on request, with two differences: there is no giver; and if a worker of the lost
//! node drives first, the NIC stays. The registry has the record before the handover begins: the next daemon goes on at
//! once.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tasuki_relay::arbiter::Input;
use tasuki_relay::message::lease_page;
use tasuki_shm::crash;
use utoipa::ToSchema;

use super::card::Card;
use super::deeds::time;
use super::door::{Answer, Refusal};
use super::jobs::Job;
use super::{About, Supervisor, is_news, now, policy};
use crate::api::types::{NicView, Removed, Standby};
use crate::config;

/// How late the daemon may be with its decision that a node is lost; if it is later, it did not run meanwhile.
const LATENESS_MAX: Duration = Duration::from_millis(100);

/// The stand-by node's worker begins to get ready for a NIC this long before the NIC's node counts as lost: that takes some
/// ms, and some tens of ms on a busy machine.
const PREPARATION_TIME: Duration = Duration::from_millis(100);

/// How a NIC came to its stand-by node, or is about to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailOver {
    /// The node that lost it.
    pub from: String,
    /// The node that has it instead.
    pub to: String,
    /// Why, as the end of a sentence that begins with the NIC.
    pub why: String,
    /// When that was so, in ms since 1970.
    pub at_ms: u64,
    /// The same, in ns of `CLOCK_MONOTONIC`.
    pub met_ns: u64,
    /// Time from then until it was driven there, in ns; none while it is not.
    pub took_ns: Option<u64>,
}

/// What the daemon sees of a NIC and its two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// It has a stand-by node, and is not there.
    pub is_armed: bool,
    /// No worker drives it though it is open, and its node is to be blamed.
    pub is_undriven: bool,
    /// A worker of its node was lost, or could not be started; or it was driven before.
    pub has_lost: bool,
    /// The stand-by node has a worker that could take it.
    pub has_taker: bool,
    /// Something else is under way with it, or with the stand-by node.
    pub is_busy: bool,
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Nothing.
    Rest,
    /// Look again at this time.
    Wait(Duration),
    /// A worker of the stand-by node is to get ready.
    GetReady,
    /// The node is lost, and so is its stand-by node.
    NoTaker,
    /// The node is lost, and something else has to end first.
    Busy,
    /// The NIC is to go to its stand-by node.
    Go,
}

/// What the daemon remembers of a NIC for that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LostTimer {
    /// Since when it has had no driver.
    since: Option<Duration>,
    /// When its node was lost.
    pub met: Option<Duration>,
    /// Whether the daemon has come late once, and waits anew: on a machine that is always late, it waits once.
    has_stalled: bool,
    /// Number of times that it could not go, and when to try again.
    tries: usize,
    not_before: Duration,
}

impl LostTimer {
    /// Decides what follows.
    pub fn look(&mut self, seen: Observation, limit: Duration, now: Duration) -> Then {
        let Observation { is_armed, is_undriven, has_lost, has_taker, is_busy } = seen;
        if !(is_armed && is_undriven && (has_lost || self.met.is_some())) {
            *self = LostTimer::default();
            return Then::Rest;
        }
        let due = *self.since.get_or_insert(now) + limit;
        if self.met.is_none() && now < due {
            let ready_by = due - PREPARATION_TIME.min(limit / 2);
            return match () {
                () if now < ready_by => Then::Wait(ready_by),
                () if has_taker && !is_busy => Then::GetReady,
                () => Then::Wait(due),
            };
        }
        if self.met.is_none() && now > due + LATENESS_MAX && !self.has_stalled {
            // The daemon itself did not run, so that it has neither replaced nor heard a worker meanwhile.
            (self.since, self.has_stalled) = (Some(now), true);
            return Then::Wait(now + limit);
        }
        self.met.get_or_insert(due);
        match () {
            () if is_busy => Then::Busy,
            () if !has_taker => Then::NoTaker,
            () if now < self.not_before => Then::Wait(self.not_before),
            () => Then::Go,
        }
    }

    /// Notes that it could not go.
    pub fn failed(&mut self, now: Duration) {
        self.tries += 1;
        self.not_before = now + policy::retry(self.tries);
    }

    /// Returns when to look again if nothing happens.
    pub fn due(&self, limit: Duration, now: Duration) -> Option<Duration> {
        let of = |since: Duration| [since + limit - PREPARATION_TIME.min(limit / 2), since + limit, self.not_before];
        self.since.into_iter().flat_map(of).filter(|at| *at > now).min()
    }
}

/// A node to remove once its NICs have gone to their stand-by nodes.
#[derive(Debug)]
pub struct Emptying {
    pub(super) node: String,
    /// NICs whose handover was begun.
    begun: Vec<u32>,
    answer: Answer<Removed>,
}

impl Card {
    /// Returns the node that gets the NIC if the one that has it is lost.
    fn standby(&self) -> Option<&str> {
        let is_open = self.vni().is_none() && self.closing.is_none();
        self.config.standby.as_deref().filter(|standby| is_open && *standby != self.node())
    }

    /// Returns how the NIC came where it is, if it came there by itself.
    pub(super) fn failed_over(&self) -> Option<&FailOver> {
        self.fail_over.as_ref().filter(|it| it.took_ns.is_some() && it.to == self.node())
    }

    /// Records a fail-over that is to begin. Returns whether it was recorded already.
    fn is_recorded(&mut self, from: &str, to: &str, why: &str, met: Duration) -> bool {
        let is_it = |it: &FailOver| it.took_ns.is_none() && (&it.from[..], &it.to[..]) == (from, to);
        if self.fail_over.as_ref().is_some_and(is_it) {
            return true;
        }
        let (from, to, why) = (from.to_owned(), to.to_owned(), why.to_owned());
        let met_ns = super::nanoseconds(met);
        self.fail_over = Some(FailOver { from, to, why, at_ms: super::ms_since_1970(), met_ns, took_ns: None });
        false
    }
}

impl Supervisor {
    /// Has NICs whose node is lost go to their stand-by nodes.
    pub(super) fn fail_over(&mut self) {
        if self.adopting || self.stopping.is_some() {
            return;
        }
        self.go_on_emptying();
        for nic in self.cards.keys().copied().collect::<Vec<_>>() {
            let goes = self.jobs.iter().any(|job| job.fails_over() && job.is_about(nic));
            if !goes {
                self.note_where(nic);
            }
            let (Some(seen), limit) = (self.observe(nic, goes), self.config.daemon.failover_after()) else {
                continue;
            };
            let Some(card) = self.cards.get_mut(&nic) else { continue };
            let then = card.lost.look(seen, limit, now());
            if let (Some(met), Some(to)) = (card.lost.met, card.standby().map(str::to_owned)) {
                self.is_lost_with_its_node(nic, &to, met);
            }
            self.show_what_it_waits_for(nic, then);
            match then {
                Then::Go if goes => self.jobs.iter_mut().filter(|job| job.is_about(nic)).for_each(Job::may_go),
                Then::Go => self.go_to_standby(nic),
                // If it cannot get ready now, that is tried again, and told, when its node is lost.
                Then::GetReady if !goes => _ = self.begin_fail_over(nic, false),
                _ => {}
            }
        }
    }

    /// Returns what there is to see of a NIC, with a job that is to bring it to its stand-by node or without; nothing while
    /// its lease is on its way, or a worker that may have it has yet to answer this daemon.
    fn observe(&self, nic: u32, goes: bool) -> Option<Observation> {
        let card = self.cards.get(&nic)?;
        let standby = card.standby().filter(|name| self.nodes.contains_key(*name) && !self.leaves(name));
        let is_held = self.is_held(nic);
        if self.unheard.contains(&nic) || !is_held && card.arbiter.is_some() && !card.is_parked() {
            return None;
        }
        let is_there = card.opened.is_some() && !card.has_lost_its_model() && self.is_lost(nic).is_none();
        let node = self.nodes.get(card.node());
        let has_died = node.is_some_and(|node| node.trouble.is_some() || !node.deaths.is_empty());
        let takes = |name: &str| self.taker_of(name).is_ok_and(|taker| taker.is_some());
        let is_busy = |name: &str| {
            self.is_applying() || self.is_free(name, &[nic]).is_err() || self.is_free(card.node(), &[nic]).is_err()
        };
        Some(Observation {
            is_armed: standby.is_some(),
            is_undriven: is_there && !is_held,
            has_lost: has_died || card.lease_page.words.load(lease_page::RELAYS) > 0,
            has_taker: goes || standby.is_some_and(takes),
            is_busy: !goes && (standby.is_some_and(is_busy) || self.has_strangers(card)),
        })
    }

    /// Records that a NIC is to go to its stand-by node, since its node is lost.
    fn is_lost_with_its_node(&mut self, nic: u32, to: &str, met: Duration) {
        let limit = self.config.daemon.failover_after_ms;
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let (from, name) = (card.node().to_owned(), card.name().to_owned());
        let why = format!("no worker of node {from} had driven it for {limit} ms");
        if !card.is_recorded(&from, to, &why, met) {
            let about = About::node(&from).of_nic(&name);
            self.note(about, format!("node {from} is lost: none of its workers has driven {name} for {limit} ms, and it is to go to node {to}"));
            self.record_nic(nic);
            self.flush();
            crash::point("daemon.node-lost");
        }
    }

    /// Shows that a NIC waits for the first of its two nodes that is back.
    fn show_what_it_waits_for(&mut self, nic: u32, then: Then) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        match then {
            Then::Rest => return card.waits = None,
            Then::NoTaker => {}
            // It could not go when that was tried last.
            Then::Wait(_) | Then::GetReady | Then::Busy | Then::Go => return,
        }
        let Some(to) = card.standby() else { return };
        let (name, from) = (card.name().to_owned(), card.node().to_owned());
        let sentence = format!(
            "node {from} is lost, and its stand-by, node {to}, has no worker or no interface either: {name} goes to the first of the two that is back; tasuki events says what became of them"
        );
        if is_news(&mut card.waits, &sentence) {
            self.note(About::node(&from).of_nic(&name), sentence);
        }
    }

    fn go_to_standby(&mut self, nic: u32) {
        if let Err(refusal) = self.begin_fail_over(nic, true) {
            self.did_not_fail_over(nic, &crate::api::types::Refused::from(refusal).error);
        }
    }

    /// Shows why a NIC has not come to its stand-by node, for which it is tried again after a while.
    pub(super) fn did_not_fail_over(&mut self, nic: u32, why: &str) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.lost.failed(now());
        if card.fail_over.is_none() {
            // Its node is not lost.
            return;
        }
        let name = card.name().to_owned();
        let sentence = format!("{name} has not come to its stand-by node, and is tried again: {why}");
        if is_news(&mut card.waits, &sentence) {
            self.note(About::nic(&name), sentence);
        }
    }

    /// Notes where a NIC has come to that was to go to its stand-by node, or had gone there.
    fn note_where(&mut self, nic: u32) {
        let is_held = self.is_held(nic);
        let Some(card) = self.cards.get_mut(&nic).filter(|card| is_held && card.is_settled()) else { return };
        let (name, node, holder) = (card.name().to_owned(), card.node().to_owned(), card.holder());
        let driving_at = card.lease_page.words.load(lease_page::DRIVING_AT);
        let Some(it) = &mut card.fail_over else { return };
        let sentence = match it.took_ns {
            Some(_) if it.to == node => return,
            None if it.to == node => {
                let took = driving_at.saturating_sub(it.met_ns);
                it.took_ns = Some(took);
                let FailOver { from, why, .. } = &*it;
                format!(
                    "{name} failed over from node {from} to node {node}, and is driven there {} after that was due: {why}; back: tasuki nic give {name} --to {from}",
                    time(took)
                )
            }
            was => {
                card.fail_over = None;
                if was.is_some() {
                    return self.record_nic(nic);
                }
                format!("{name} stays with node {node}: a worker of it drives")
            }
        };
        self.note(About::node(&node).of_nic(&name).of_worker(holder), sentence);
        self.record_nic(nic);
    }

    /// Lets a node's NICs that have a stand-by node go there, and removes the node then.
    pub(super) fn begin_emptying(&mut self, name: &str, answer: Answer<Removed>) {
        let may = self.may_be_removed(name).and_then(|()| self.is_nobodys_standby(name));
        match may {
            Err(refusal) => drop(answer.send(Err(refusal))),
            Ok(()) => self.emptying.push(Emptying { node: name.to_owned(), begun: Vec::new(), answer }),
        }
    }

    fn is_nobodys_standby(&self, name: &str) -> Result<(), Refusal> {
        let of = self.cards.values().find(|card| card.config.standby.as_deref() == Some(name) && card.node() != name);
        of.map_or(Ok(()), |card| {
            let nic = card.name();
            Err(Refusal::conflict(format!(
                "node {name} is the stand-by of {nic}; name another first (tasuki nic standby {nic} --node NODE), or none (--none)"
            )))
        })
    }

    /// Returns the NIC of a node, beside its end of a VNI.
    pub(super) fn nic_of(&self, node: &str) -> Option<&Card> {
        self.cards.of(node).find(|card| card.closing.is_none() && card.vni().is_none())
    }

    /// Returns whether a NIC could go to its stand-by node.
    pub(super) fn has_standby(&self, card: &Card) -> bool {
        card.standby().is_some_and(|standby| self.nodes.contains_key(standby))
    }

    fn go_on_emptying(&mut self) {
        if self.is_applying() {
            return;
        }
        for mut it in std::mem::take(&mut self.emptying) {
            let Some(card) = self.nic_of(&it.node) else {
                self.begin_removing(&it.node, it.answer);
                continue;
            };
            let (nic, name, to) = (card.number, card.name().to_owned(), card.standby().map(str::to_owned));
            if self.jobs.iter().any(|job| job.is_about(nic) || job.node() == it.node) {
                self.emptying.push(it);
                continue;
            }
            let begun = match to {
                _ if it.begun.contains(&nic) => Err(Refusal::conflict("tasuki events says why")),
                Some(to) => self.leaves_its_node(nic, &to),
                None => Err(Refusal::conflict("it has no stand-by any more")),
            };
            match begun {
                Ok(()) => {
                    it.begun.push(nic);
                    self.emptying.push(it);
                }
                Err(refusal) => {
                    let why = crate::api::types::Refused::from(refusal).error;
                    let sentence =
                        format!("node {} was not removed: {name} did not go to its stand-by node ({why})", it.node);
                    drop(it.answer.send(Err(Refusal::conflict(sentence))));
                }
            }
        }
    }

    fn leaves_its_node(&mut self, nic: u32, to: &str) -> Result<(), Refusal> {
        let card = self.cards.get_mut(&nic).ok_or(Refusal::Ending)?;
        let from = card.node().to_owned();
        card.is_recorded(&from, to, &format!("node {from} was removed"), now());
        self.record_nic(nic);
        self.flush();
        self.begin_fail_over(nic, true)
    }

    /// Has a worker of the stand-by node get ready for the NIC, and take it if it `may_go` by now.
    fn begin_fail_over(&mut self, nic: u32, may_go: bool) -> Result<(), Refusal> {
        let card = self.cards.get_mut(&nic).ok_or(Refusal::Ending)?;
        let (name, to) = (card.name().to_owned(), card.standby().map(str::to_owned).ok_or(Refusal::Ending)?);
        if card.is_parked() || card.arbiter.is_none() {
            // Its last driver left the card in no state.
            card.lease_page.words.store(lease_page::LEFT, 0);
        }
        self.begin_giving(&name, &to, may_go)
    }

    /// Begins an arbiter for a NIC that no living worker has.
    pub(super) fn begin_arbiter(&mut self, nic: u32) {
        let Some(card) = self.cards.get(&nic).filter(|card| card.arbiter.is_none()) else { return };
        let (home, page) = (card.node().to_owned(), card.page_of.iter().cloned().collect::<Vec<_>>());
        let page: Vec<_> = page.iter().map(|node| self.node_number(node)).collect();
        let (arbiter, doing) = tasuki_relay::arbiter::Arbiter::begin(self.node_number(&home), &page, &[], &[]);
        self.cards.get_mut(&nic).into_iter().for_each(|card| card.arbiter = Some(arbiter.clone()));
        self.do_all(nic, doing);
        // It has nobody to ask, so the time for answers is over.
        self.tell_arbiter(nic, Input::Deadline(0));
    }

    /// Names a NIC's stand-by node by hand.
    pub(super) fn set_standby_by_hand(&mut self, name: &str, Standby { node }: Standby) -> Result<NicView, Refusal> {
        let nic = self.nic_by_name(name)?;
        let card = &self.cards[&nic];
        if let Some(vni) = card.vni() {
            return Err(Refusal::conflict(format!("{name} is an end of VNI {vni}, and no other node's")));
        }
        if card.closing.is_some() {
            return Err(Refusal::conflict(format!("{name} is being closed")));
        }
        if let Some(standby) = &node {
            if !self.nodes.contains_key(standby) {
                return Err(self.no_node(standby));
            }
            if *standby == card.node() {
                return Err(Refusal::conflict(format!("node {standby} has {name} already; name another node")));
            }
            if self.config.node(card.node()).is_some_and(|node| node.work == config::Work::Uplink) {
                return Err(Refusal::conflict(format!(
                    "node {} is an uplink, whose NIC goes to no other node",
                    card.node()
                )));
            }
            let longer = self.config.too_long_for(&card.config, standby).map(|why| format!("nic {name:?}: {why}"));
            if let Some(why) = self.config.no_standby(standby).or(longer) {
                return Err(Refusal::conflict(why));
            }
        }
        self.set_standby(name, node.clone());
        let sentence = match &node {
            Some(standby) => format!("the stand-by node of {name} is node {standby}"),
            None => format!("{name} has no stand-by node any more"),
        };
        if let Some(card) = self.cards.get_mut(&nic) {
            card.by_hand = Some(Standby { node });
        }
        self.note(About::nic(name), sentence);
        self.record_nic(nic);
        // A caller that hears of it must find it so, even if this daemon dies.
        self.flush();
        self.nic_view_of(nic).ok_or(Refusal::Ending)
    }

    /// Names a NIC's stand-by node.
    pub(super) fn set_standby(&mut self, name: &str, standby: Option<String>) {
        let entries = self.config.nic.iter_mut().filter(|nic| nic.name == name);
        let cards = self.cards.values_mut().map(|card| &mut card.config).filter(|nic| nic.name == name);
        entries.chain(cards).for_each(|nic| nic.standby.clone_from(&standby));
    }

    /// Restores what was named by hand, and the fail-overs of before.
    pub(super) fn restore_standby(&mut self, nic: u32, by_hand: Option<Standby>, fail_over: Option<FailOver>) {
        let is_there = |it: &Standby| it.node.as_ref().is_none_or(|node| self.config.node(node).is_some());
        let by_hand = by_hand.filter(is_there);
        let Some(card) = self.cards.get_mut(&nic) else { return };
        if let Some(it) = fail_over.as_ref().filter(|it| it.took_ns.is_none() && it.from == card.node()) {
            card.lost.met = Some(Duration::from_nanos(it.met_ns));
        }
        (card.by_hand, card.fail_over) = (by_hand.clone(), fail_over);
        let name = card.name().to_owned();
        by_hand.into_iter().for_each(|Standby { node }| self.set_standby(&name, node));
    }

    /// Returns the NICs that failed over and are where they went, each with the node that lost it.
    pub(super) fn all_failed_over(&self) -> BTreeMap<String, String> {
        let its = |card: &Card| Some((card.name().to_owned(), card.failed_over()?.from.clone()));
        self.cards.values().filter_map(its).collect()
    }

    /// Forgets what the configuration, which is applied by now, has settled.
    pub(super) fn settle_nics(&mut self, desired: &config::Config) {
        let mut changed = Vec::new();
        for new in &desired.nic {
            let entries = self.config.nic.iter_mut().filter(|nic| nic.name == new.name);
            entries.for_each(|nic| nic.node.clone_from(&new.node));
            let Some(card) = self.cards.values_mut().find(|card| card.config.name == new.name) else { continue };
            card.config.node.clone_from(&new.node);
            let is_there = new.node == card.node();
            let had = (card.by_hand.take(), card.fail_over.take_if(|_| is_there));
            changed.extend((had != (None, None)).then_some(card.number));
        }
        changed.into_iter().for_each(|nic| self.record_nic(nic));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOST: Observation =
        Observation { is_armed: true, is_undriven: true, has_lost: true, has_taker: true, is_busy: false };
    const LIMIT: Duration = Duration::from_millis(1000);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns what follows from what is seen at these times.
    fn looks(observations: &[(u64, Observation)]) -> Vec<Then> {
        let mut timer = LostTimer::default();
        observations.iter().map(|(at, seen)| timer.look(*seen, LIMIT, ms(*at))).collect()
    }

    #[test]
    fn a_node_is_lost_when_nobody_has_driven_for_so_long() {
        use Then::*;
        let driven = Observation { is_undriven: false, ..LOST };
        assert_eq!(looks(&[(5, LOST), (1004, LOST), (1005, LOST)]), [Wait(ms(905)), GetReady, Go]);
        assert_eq!(looks(&[(5, LOST), (900, driven), (1005, LOST)]), [Wait(ms(905)), Rest, Wait(ms(1905))]);
        let late = [(5, LOST), (1300, LOST), (2299, LOST), (2300, LOST)];
        assert_eq!(looks(&late), [Wait(ms(905)), Wait(ms(2300)), GetReady, Go], "the daemon stood still");
        assert_eq!(looks(&[(5, LOST), (1300, LOST), (9999, LOST)])[2], Go, "it is always late");
        let begins = Observation { has_lost: false, ..LOST };
        assert_eq!(looks(&[(0, begins), (5000, begins)]), [Rest; 2], "its first worker is starting");
        let home = Observation { is_armed: false, ..LOST };
        assert_eq!(looks(&[(0, home), (5000, home)]), [Rest; 2], "it is at its stand-by node, or has none");
    }

    #[test]
    fn it_waits_for_the_first_node_that_is_back_and_for_what_is_under_way() {
        use Then::*;
        let (alone, busy) = (Observation { has_taker: false, ..LOST }, Observation { is_busy: true, ..LOST });
        assert_eq!(
            looks(&[(0, alone), (950, alone), (1000, alone), (9000, LOST)]),
            [Wait(ms(900)), Wait(LIMIT), NoTaker, Go]
        );
        let back = Observation { is_undriven: false, ..alone };
        assert_eq!(looks(&[(0, alone), (1000, alone), (9000, back)])[1..], [NoTaker, Rest]);
        assert_eq!(looks(&[(0, LOST), (950, busy), (1000, busy), (1500, LOST)])[1..], [Wait(LIMIT), Busy, Go]);
        let forgot = Observation { has_lost: false, ..alone };
        assert_eq!(looks(&[(0, LOST), (1000, alone), (1500, forgot)])[2], NoTaker, "lost is lost");
    }

    #[test]
    fn what_could_not_go_is_tried_again_after_pauses_that_grow() {
        let mut timer = LostTimer::default();
        timer.look(LOST, LIMIT, ms(0));
        assert_eq!(timer.look(LOST, LIMIT, ms(1000)), Then::Go);
        let mut pauses = Vec::new();
        let mut now = ms(1000);
        for _ in 0..10 {
            timer.failed(now);
            let Then::Wait(at) = timer.look(LOST, LIMIT, now) else { panic!("{timer:?}") };
            assert_eq!(timer.due(LIMIT, now), Some(at));
            pauses.push((at - now).as_millis());
            now = at;
            assert_eq!(timer.look(LOST, LIMIT, now), Then::Go);
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000, 10_000]);
        assert_eq!(timer.met, Some(LIMIT), "that was when the rule was met");
    }

    /// A machine on paper: two nodes that die and come back, and what moves the NIC.
    #[derive(Debug, Clone, Copy)]
    enum Deed {
        Dies(usize),
        ComesBack(usize),
        /// The NIC is given to its first node by hand.
        Back,
        /// The next daemon: the record is all that is left.
        Daemon,
        Passes(u64),
    }

    fn deed() -> impl Strategy<Value = Deed> {
        prop_oneof![
            3 => (0..2_usize).prop_map(Deed::Dies),
            3 => (0..2_usize).prop_map(Deed::ComesBack),
            1 => Just(Deed::Back),
            1 => Just(Deed::Daemon),
            4 => (1..1500_u64).prop_map(Deed::Passes),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// It goes only when its node has been dead for the limit and the other is alive; it never comes back by itself;
        /// and if one of the two that may have it lives for long enough, it is driven.
        #[test]
        fn whatever_dies_it_goes_once_and_is_driven_where_somebody_is(deeds in prop::collection::vec(deed(), 1..40)) {
            let (mut now, mut at, mut alive, mut dead_since) = (ms(0), 0, [true, true], Some(ms(0)).filter(|_| false));
            let mut timer = LostTimer::default();
            for deed in deeds.into_iter().chain([Deed::Passes(1000), Deed::Passes(1000), Deed::Passes(1)]) {
                match deed {
                    Deed::Dies(node) => alive[node] = false,
                    Deed::ComesBack(node) => alive[node] = true,
                    Deed::Back if alive[0] => at = 0,
                    Deed::Back => {}
                    Deed::Daemon => timer = LostTimer { met: timer.met, ..LostTimer::default() },
                    Deed::Passes(time) => now += ms(time),
                }
                let is_undriven = !alive[at];
                dead_since = dead_since.filter(|_| is_undriven && at == 0).or(Some(now).filter(|_| is_undriven && at == 0));
                let seen = Observation { is_armed: at == 0, is_undriven, has_lost: true, has_taker: alive[1], is_busy: false };
                match timer.look(seen, LIMIT, now) {
                    Then::Go => {
                        prop_assert!(at == 0 && alive == [false, true]);
                        prop_assert!(dead_since.is_some_and(|since| now >= since + LIMIT), "{dead_since:?} {now:?}");
                        at = 1;
                    }
                    Then::NoTaker => prop_assert_eq!((at, alive), (0, [false, false])),
                    Then::Busy => prop_assert!(false, "nothing else is under way"),
                    Then::Rest | Then::Wait(_) | Then::GetReady => {}
                }
            }
            prop_assert!(at == 1 || alive[0] || !alive[1], "nobody drives, and one node could");
        }
    }
}
