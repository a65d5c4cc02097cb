//! The daemon's part: the arbiter orders relays, learns of dead workers, fences workers, and seizes a lease that no
//! worker can pass any more.
//!
//! It is never in the path of a frame, and a relay that has begun ends without it. If the arbiter dies, the lease
//! word and the workers tell the next one the state. The only record of its own that it needs is the record of workers
//! that it has fenced.

mod authority;
mod report;
mod table;
#[cfg(test)]
mod tests;

pub use authority::{AUTHORITY, Rule, Says, Verdict, to_markdown as authority_to_markdown};
pub use table::{Action, Event, State, TABLE};

use crate::method::Method;
use crate::table::{Refused, Row, listed, step};
use crate::wire::{Order, Reason, Report, Use};
use crate::{ARBITER, After, Party, Tenure};

/// The two tables of an arbiter: the consequence of each event, and the verdict on each report of each worker.
#[derive(Debug, Clone)]
pub struct Table {
    /// Consequences of events.
    pub rows: Vec<Row<State, Event, Action>>,
    /// Verdicts on reports of workers.
    pub authority: Vec<Rule>,
}

impl Default for Table {
    fn default() -> Self {
        Table { rows: TABLE.to_vec(), authority: AUTHORITY.to_vec() }
    }
}

/// Maximum number of workers that can have a device at a time: the driver, its stand-by, and workers that a person
/// starts.
pub const MEMBERS_MAX: usize = 8;

/// Number of failed orders to take the lease, while no other worker took it, after which a worker counts as unfit.
const LOST_MOST: u8 = 4;

/// Number of times in a row that the lease word may change under the arbiter's compare-and-swap. Honest workers
/// change it twice: one passes, one takes.
const MOVED_MOST: u8 = 8;

/// A node, by a number of the daemon's. Workers of one node may break each other; workers of two nodes only if the
/// nodes trust each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node(pub u32);

listed! {
    /// Condition of a worker, as far as the arbiter knows.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Is {
        /// It had the device under an earlier arbiter, and has not reported its standing.
        Unheard,
        /// It was given the device bundle, and has not reported that it could go on.
        Given,
        /// It could go on at once.
        Ready,
        /// It was ordered to take, and waits.
        Waiting,
        /// It holds the lease.
        Holding,
        /// It has not taken the lease by the deadline.
        Late,
        /// It cannot take this device.
        Unfit,
        /// It was ordered to leave the device. It may have kept the descriptors that it was given.
        Left,
        /// Its heartbeat is missing.
        Silent,
        /// It is recorded as fenced; whether the fence is up is not known.
        Condemned,
        /// It is kept from the device, for good.
        Fenced,
        /// Its process has ended, or its exit mark says that it has.
        Dead,
    }
}

impl Is {
    /// Returns whether the arbiter believes that the worker obeys orders.
    fn live(self) -> bool {
        !matches!(self, Is::Unheard | Is::Silent | Is::Condemned | Is::Fenced | Is::Dead)
    }

    /// Returns whether the worker can run no instruction any more.
    fn is_harmless(self) -> bool {
        matches!(self, Is::Fenced | Is::Dead)
    }
}

/// A worker that drives a device, or may drive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Member {
    /// Number of the worker.
    pub party: Party,
    /// Node of the worker.
    pub node: Node,
    /// Condition of the worker.
    pub is: Is,
    /// Whether it is staged: it takes the device when a person asks for that, and does not stand by for another
    /// worker's death.
    staged: bool,
    /// Number of times in a row that it was ordered to take and reported that it could not.
    lost: u8,
}

/// A request for an upgrade or a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ask {
    /// Upgrade or handover.
    pub purpose: Use,
    /// Worker that is to have the device.
    pub to: Party,
    /// Method of the relay.
    pub method: Method,
    /// Kind of the driver state that the giver will write: its driver.
    pub kind: u32,
    /// Version of that driver state.
    pub version: u32,
}

/// The page of memory on which a worker finds the lease word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Page {
    /// The page that the present workers have.
    Shared,
    /// A new page of the worker's own node: a node that it does not trust can write the present one.
    Fresh,
}

/// Input of the arbiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Input {
    /// A request from a person or a policy.
    Asked(Ask),
    /// A report from a worker, and the lease word at the time the daemon hears it.
    Report(Party, Report, Tenure),
    /// The worker's pidfd reports that it has ended.
    Gone(Party),
    /// The exit mark, in memory that the worker can write, says that it has ended.
    Ended(Party),
    /// The worker's heartbeat has been missing for too long ([`crate::heartbeat`]).
    Silent(Party),
    /// No store of the worker's reaches the device any more.
    Fenced(Party),
    /// The deadline with this number is over.
    Deadline(u32),
    /// The lease word.
    Word(Tenure),
    /// Outcome of the compare-and-swap: success, or the present word.
    Swapped(Result<(), Tenure>),
}

/// Action of the arbiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Do {
    /// Load the lease word. Then [`Input::Word`].
    Look,
    /// Send this order.
    Tell(Party, Order),
    /// Set a deadline, in place of the one before. Then perhaps [`Input::Deadline`].
    Watch(u32),
    /// Record the worker as fenced, then fence it. Then [`Input::Fenced`].
    Fence(Party),
    /// End the worker: it has reported or done something to which it had no right.
    Breach(Party, &'static str),
    /// From here on the lease word is on the page of this node, which no node that it does not trust can write.
    /// Write `word` there.
    Renew {
        /// Node that owns the page.
        node: Node,
        /// Word that the arbiter left on the page before.
        word: Tenure,
    },
    /// Compare-and-swap of the lease word. Then [`Input::Swapped`].
    Swap {
        /// Tenure that the word must hold.
        from: Tenure,
        /// New tenure.
        to: Tenure,
    },
    /// Tell the requester, and the log.
    Say(RelayOutcome),
}

/// Outcome of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RelayOutcome {
    /// Worker that drives now.
    pub driver: Option<Party>,
    /// Reason why that is not the requested worker.
    pub why: Option<Reason>,
}

/// The arbiter of one device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Arbiter {
    state: State,
    members: Vec<Member>,
    /// Pairs of nodes that trust each other.
    friends: Vec<(Node, Node)>,
    /// Node to which the device belongs: the arbiter looks for a stand-by there.
    home: Node,
    /// Nodes whose workers can write the page with the lease word.
    page: Vec<Node>,
    giver: Option<Party>,
    next: Option<Party>,
    /// Workers of which none may run when the lease is next given.
    fencing: Vec<Party>,
    /// Number of times in a row that the lease word had changed.
    moved: u8,
    /// The lease word as the arbiter believes it to be.
    seen: Tenure,
    after: After,
    /// Epoch of the driver state, if the last driver has passed the lease.
    wrote: u32,
    ask: Option<Ask>,
    why: Option<Reason>,
    deadline: u32,
}

impl Arbiter {
    /// Creates an arbiter for a device that belongs to `home`, and returns its first actions. `page` are the nodes
    /// whose workers can write the lease word; all of them trust each other. `workers` have the device and the page.
    /// `fenced` is the record of workers that an earlier arbiter has fenced.
    pub fn begin(home: Node, page: &[Node], workers: &[(Party, Node)], fenced: &[Party]) -> (Self, Vec<Do>) {
        let is = |party| if fenced.contains(&party) { Is::Condemned } else { Is::Unheard };
        let member = |&(party, node)| Member { party, node, is: is(party), staged: false, lost: 0 };
        let members: Vec<_> = workers.iter().map(member).collect();
        // The earlier arbiter may have died between record and fence.
        let first = |member: &Member| match member.is {
            Is::Condemned => Do::Fence(member.party),
            _ => Do::Tell(member.party, Order::Who),
        };
        let asked = members.iter().map(first).chain([Do::Watch(0)]).collect();
        let mut arbiter = Arbiter {
            state: State::Finding,
            members,
            friends: Vec::new(),
            home,
            page: page.to_vec(),
            giver: None,
            next: None,
            fencing: Vec::new(),
            moved: 0,
            seen: Tenure::free(0),
            after: After::Lost,
            wrote: 0,
            ask: None,
            why: None,
            deadline: 0,
        };
        page.iter().for_each(|node| arbiter.befriend(*node, page));
        (arbiter, asked)
    }

    /// Records that `node` and the nodes in `trusts` trust each other.
    pub fn befriend(&mut self, node: Node, trusts: &[Node]) {
        for friend in trusts.iter().filter(|friend| **friend != node) {
            let pair = (node.min(*friend), node.max(*friend));
            if !self.friends.contains(&pair) {
                self.friends.push(pair);
            }
        }
    }

    /// Records workers that had the device before this arbiter began, and left it: they may have kept the way to it, and a
    /// stranger gets it only when they are fenced.
    pub fn remember(&mut self, left: impl IntoIterator<Item = (Party, Node)>) {
        for (party, node) in left {
            if self.node(party).is_none() {
                self.members.push(Member { party, node, is: Is::Left, staged: false, lost: 0 });
            }
        }
    }

    /// Records that two nodes do not trust each other any more, and takes `other` from the page if both have it. The caller
    /// has seen to it that no process of `other` that ever had the page is left.
    pub fn estrange(&mut self, node: Node, other: Node) {
        self.friends.retain(|pair| *pair != (node.min(other), node.max(other)));
        if self.page.contains(&node) {
            self.page.retain(|it| *it != other);
        }
    }

    /// Returns whether workers of both nodes can write the lease page.
    pub fn share_page(&self, one: Node, other: Node) -> bool {
        self.page.contains(&one) && self.page.contains(&other)
    }

    /// Prepares to give the device bundle to this worker of a node. Returns the page that the worker gets. Returns
    /// nothing, and the worker must be given nothing, if there is no room for one more.
    pub fn give(&mut self, party: Party, node: Node) -> Option<Page> {
        let page = self.page_for(node);
        let has_part = [self.giver, self.next, self.seen.holder].contains(&Some(party));
        let known = self.members.iter().find(|member| member.party == party).map(|member| member.is);
        if known.is_some_and(|is| has_part || !is.live()) {
            return None;
        }
        if known.is_none_or(|is| is == Is::Left) {
            if self.is_full() {
                // Dead and fenced workers make room, except workers about which a decision is still due.
                let (kept, fencing) = ([self.giver, self.next, self.seen.holder], &self.fencing);
                let is_due = |party: Party| kept.contains(&Some(party)) || fencing.contains(&party);
                self.members.retain(|member| !member.is.is_harmless() || is_due(member.party));
            }
            if self.is_full() {
                return None;
            }
        }
        let new = Member { party, node, is: Is::Given, staged: false, lost: 0 };
        match self.members.iter_mut().find(|member| member.party == party) {
            Some(member) => *member = new,
            None => self.members.push(new),
        }
        if page == Page::Shared && !self.page.contains(&node) {
            self.page.push(node);
        }
        Some(page)
    }

    /// Returns whether there is no room for one more. Workers that have left the device take none: they live on for others,
    /// and are remembered, for a stranger gets the device only when they are fenced.
    fn is_full(&self) -> bool {
        self.members.iter().filter(|member| member.is != Is::Left).count() >= MEMBERS_MAX
    }

    /// Stages this worker: it takes the device when a person asks for it, and is not chosen before. It runs a
    /// program that no person has asked for yet.
    pub fn stage(&mut self, party: Party) {
        self.members.iter_mut().filter(|member| member.party == party).for_each(|member| member.staged = true);
    }

    /// Returns the page that a worker of this node gets.
    pub fn page_for(&self, node: Node) -> Page {
        if self.page.iter().all(|other| self.trust(node, *other)) { Page::Shared } else { Page::Fresh }
    }

    /// Returns whether this worker can possibly hold the lease.
    pub fn may_hold(&self, party: Party) -> bool {
        let on_page = |member: &Member| member.party == party && self.page.contains(&member.node);
        self.members.iter().any(on_page)
    }

    /// Returns whether each of these nodes may break the other.
    fn trust(&self, one: Node, other: Node) -> bool {
        one == other || self.friends.contains(&(one.min(other), one.max(other)))
    }

    /// Returns the workers that must not run while this worker has the device.
    fn strangers_to(&self, party: Party) -> Vec<Party> {
        let Some(node) = self.node(party) else { return Vec::new() };
        let harms = |member: &&Member| !member.is.is_harmless() && !self.trust(node, member.node);
        self.members.iter().filter(harms).map(|member| member.party).collect()
    }

    /// Returns whether the worker that is to have the device next does not trust this one: no process of it may run then.
    pub fn is_stranger_to_next(&self, party: Party) -> bool {
        self.next.is_some_and(|next| self.strangers_to(next).contains(&party))
    }

    /// Returns the worker that is to have the device next.
    pub fn next(&self) -> Option<Party> {
        self.next
    }

    /// Returns the workers, beside the giver, that will be fenced once the giver has released the device.
    pub fn fenced_next(&self) -> Vec<Party> {
        let Some(next) = self.next.filter(|_| self.state == State::Letting) else { return Vec::new() };
        self.strangers_to(next).into_iter().filter(|party| Some(*party) != self.giver).collect()
    }

    /// Returns the workers that can have written the lease word.
    fn writers(&self) -> Vec<Party> {
        let writes = |member: &&Member| !member.is.is_harmless() && self.page.contains(&member.node);
        self.members.iter().filter(writes).map(|member| member.party).collect()
    }

    /// Returns the node to which the device belongs.
    pub fn home(&self) -> Node {
        self.home
    }

    /// Returns the state of the arbiter.
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the holder of the lease, as far as the arbiter knows.
    pub fn driver(&self) -> Option<Party> {
        self.giver.filter(|_| self.state == State::Steady)
    }

    /// Returns all workers, with their conditions.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Returns the reason why the last relay did not end as requested, or why no worker drives.
    pub fn why(&self) -> Option<Reason> {
        self.why
    }

    /// Has `party` leave the device and release all that it has of it, unless it drives, is to drive, or is to be
    /// fenced.
    pub fn dismiss(&mut self, party: Party) -> Vec<Do> {
        let has_part = [self.giver, self.next].contains(&Some(party)) || self.fencing.contains(&party);
        match self.is(party) {
            Some(is) if !has_part && is.live() && is != Is::Left => {
                self.set(party, Is::Left);
                vec![Do::Tell(party, Order::Leave)]
            }
            _ => Vec::new(),
        }
    }

    /// Excludes a worker from choice, since the daemon ends it for another reason. Its death has its consequences
    /// when it is dead.
    pub fn rule_out(&mut self, party: Party) {
        if ![self.giver, self.next].contains(&Some(party)) {
            self.set(party, Is::Condemned);
        }
    }

    /// Returns the actions that follow from `input`. A refused input changes only its sender's record.
    pub fn hear(&mut self, table: &Table, input: Input) -> Result<Vec<Do>, Refused> {
        let mut doing = Vec::new();
        let mut event = self.classify(&table.authority, input, &mut doing);
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

    fn node(&self, party: Party) -> Option<Node> {
        self.members.iter().find(|member| member.party == party).map(|member| member.node)
    }

    fn set(&mut self, party: Party, is: Is) {
        // Dead and fenced workers stay so.
        let rank = |is: Is| match is {
            Is::Dead => 3,
            Is::Fenced => 2,
            Is::Condemned => 1,
            _ => 0,
        };
        let member = self.members.iter_mut().find(|member| member.party == party);
        if let Some(member) = member.filter(|member| rank(is) >= rank(member.is)) {
            member.is = is;
        }
    }

    /// Applies one row. Returns the event that follows from it at once, if any.
    fn follow(&mut self, table: &Table, event: Event, doing: &mut Vec<Do>) -> Result<Option<Event>, Refused> {
        let (next, actions) = step(&table.rows, self.state, event)?;
        if let (Event::Deadline, State::Passing | State::Granting, Some(late)) = (event, self.state, self.next) {
            self.set(late, Is::Late);
            self.why = Some(Reason::Late);
        }
        if self.state == State::Steady {
            // A deadline of the last relay is none of the next one's.
            self.why = self.why.filter(|_| next == State::Steady);
        } else if matches!(event, Event::NextGone | Event::Deadline) && self.why.is_none() {
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
                let Ask { purpose, method, kind, version, .. } = ask;
                Do::Tell(ask.to, Order::Prepare { purpose, method, kind, version })
            })),
            Action::Release => {
                (self.after, self.wrote) = (After::Passed, epoch);
                doing.extend(tell(self.giver, Order::Release { epoch }));
            }
            Action::Recall => doing.extend(tell(self.giver, Order::Recall { epoch })),
            Action::Take => {
                if self.giver.is_some() && self.seen.holder == self.giver {
                    // The taker waits until the giver releases the lease; the giver is ordered to do so next.
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
                if self.fencing.is_empty() {
                    self.fencing.extend(self.giver);
                }
                let harmful: Vec<_> = self.fencing.iter().copied().filter(|party| !self.is_harmless(*party)).collect();
                harmful.iter().for_each(|party| self.set(*party, Is::Condemned));
                self.fencing.clone_from(&harmful);
                doing.extend(harmful.iter().map(|party| Do::Fence(*party)));
                return harmful.is_empty().then_some(Event::Fenced);
            }
            Action::Seize => {
                // Y3: from a live holder, seize only a lease that it has passed.
                let from = if self.live(self.seen.holder) { self.seen.passed() } else { self.seen };
                self.seen = from;
                self.fencing.clear();
                doing.push(Do::Swap { from, to: from.taken_by(ARBITER) });
            }
            Action::Choose => return Some(self.choose()),
            Action::PassOn => {
                self.turn_page(doing);
                doing.push(Do::Swap { from: self.seen, to: self.seen.passed() });
            }
            Action::Settle => self.settle(doing),
            Action::Say => doing.push(Do::Say(RelayOutcome { driver: self.driver(), why: self.why })),
        }
        None
    }

    /// Returns whether the lease lies on a page of nodes that the device's node does not trust: a worker of theirs was
    /// granted the lease, and is not known to drive. It may have left the device in any state.
    fn is_astray(&self) -> bool {
        !self.page.contains(&self.home)
    }

    fn choose(&mut self) -> Event {
        // A worker of the device's node, or of one that this node trusts, would go on from where the last driver of that node
        // stopped, and the device is not there any more. A worker that trusts neither sets it up itself.
        let may_go_on =
            |party: &Party| !self.is_astray() || self.node(*party).is_some_and(|node| !self.trust(node, self.home));
        let can = |party: &Party| matches!(self.is(*party), Some(Is::Ready | Is::Waiting)) && may_go_on(party);
        let stands_by = |member: &&Member| member.node == self.home && !member.staged;
        let at_home = self.members.iter().filter(stands_by).map(|member| member.party);
        let next = self.next.into_iter().chain(self.giver).chain(at_home).find(can);
        self.next = next;
        let Some(next) = next else {
            // For a relay under way, the reason is known better.
            self.why = self.why.filter(|_| self.ask.is_some()).or(Some(Reason::NobodyLeft));
            return Event::NobodyLeft;
        };
        self.fencing = self.strangers_to(next);
        if self.fencing.is_empty() { Event::Chosen } else { Event::ChosenBehindFence }
    }

    /// Moves the lease to a page that no node can write that the next worker does not trust.
    fn turn_page(&mut self, doing: &mut Vec<Do>) {
        let Some(node) = self.next.and_then(|next| self.node(next)) else { return };
        if self.page_for(node) == Page::Fresh {
            doing.push(Do::Renew { node, word: self.seen });
            self.page = vec![node];
        }
    }

    fn settle(&mut self, doing: &mut Vec<Do>) {
        let new = self.next;
        let old = self.giver.filter(|_| self.ask.is_some()).filter(|old| Some(*old) != new);
        let unfit = self.ask.map(|ask| ask.to).filter(|to| Some(*to) != new && self.is(*to) == Some(Is::Unfit));
        let leaves =
            old.into_iter().chain(unfit).filter(|party| self.live(Some(*party)) && self.is(*party) != Some(Is::Left));
        for party in leaves.collect::<Vec<_>>() {
            // A worker that has left can take nothing, so it must not be chosen.
            self.set(party, Is::Left);
            doing.push(Do::Tell(party, Order::Leave));
        }
        if new == self.ask.map(|ask| ask.to) {
            self.why = None;
        }
        new.into_iter().for_each(|new| self.set(new, Is::Holding));
        self.home = new.and_then(|new| self.node(new)).unwrap_or(self.home);
        self.members.iter_mut().for_each(|member| member.lost = 0);
        (self.giver, self.after, self.moved) = (new, After::Lost, 0);
    }

    /// Notes the news of a worker in the input, and returns the event that it means.
    fn classify(&mut self, authority: &[Rule], input: Input, doing: &mut Vec<Do>) -> Option<Event> {
        match input {
            Input::Asked(ask) => self.asked(ask, doing),
            Input::Report(party, report, word) => self.report(authority, party, report, word, doing),
            Input::Gone(party) => {
                // While another worker drives, no process checks the lease word, which this worker could write until
                // its end.
                let could_write = self.may_hold(party) && ![self.giver, self.next].contains(&Some(party));
                if could_write && self.state == State::Steady {
                    doing.push(Do::Look);
                }
                self.set(party, Is::Dead);
                self.absent(party, Event::GiverGone)
            }
            // A worker's own memory is evidence within its node only.
            Input::Ended(party) if self.is_stranger_to_next(party) => None,
            Input::Ended(party) => {
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
                self.all_fenced().or_else(|| self.all_heard())
            }
            Input::Deadline(number) if number != self.deadline => None,
            Input::Deadline(_) if self.state == State::Finding => {
                // The worker was ordered to stop waiting, and does not answer: the lease word decides without it.
                let waits = self.members.iter_mut().filter(|member| member.is == Is::Waiting);
                waits.for_each(|member| member.is = Is::Late);
                self.all_heard()
            }
            Input::Deadline(_) => Some(Event::Deadline),
            Input::Word(now) if self.state == State::Steady => match now {
                now if now.holder == self.giver => None,
                // The driver could not go on, and its report is under way. Or the dead worker wrote that for it, and it
                // drives on: it ends, and no other worker does.
                now if now == self.seen.passed() => Some(Event::GiverSilent),
                _ => Some(self.forged()),
            },
            Input::Word(now) => Some(self.look(now)),
            Input::Swapped(Ok(())) if self.state == State::Granting => {
                self.seen = self.seen.passed();
                Some(Event::PassedOn)
            }
            // The arbiter holds the lease, and only the arbiter changes the word.
            Input::Swapped(Err(now)) if self.state == State::Granting => {
                self.seen = now;
                Some(self.forged())
            }
            Input::Swapped(Ok(())) => {
                self.moved = 0;
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

    /// Handles a request. The table refuses a request that does not fit; in that case nothing may be noted of it.
    fn asked(&mut self, ask: Ask, doing: &mut Vec<Do>) -> Option<Event> {
        let is = self.is(ask.to);
        let can = match self.state {
            State::Steady => matches!(is, Some(Is::Given | Is::Ready | Is::Late | Is::Unfit)),
            // The worker must be prepared already: no worker drives meanwhile.
            State::Parked => is == Some(Is::Ready),
            _ => return Some(Event::Asked),
        };
        if !can || Some(ask.to) == self.driver() {
            (self.why, self.next) = (Some(Reason::Died), None);
            doing.push(Do::Say(RelayOutcome { driver: self.driver(), why: self.why }));
            return None;
        }
        (self.ask, self.next, self.why) = (Some(ask), Some(ask.to), None);
        // A staged worker has prepared for this request. If workers must be fenced first, it is asked once more.
        let asked = self.members.iter_mut().find(|member| member.party == ask.to);
        let was_staged = asked.is_some_and(|member| std::mem::take(&mut member.staged));
        let at_once = self.state == State::Steady && is == Some(Is::Ready) && self.strangers_to(ask.to).is_empty();
        Some(if was_staged && at_once { Event::AskedStaged } else { Event::Asked })
    }

    /// Handles a worker that is dead or silent.
    fn absent(&mut self, party: Party, if_giver: Event) -> Option<Event> {
        match self.state {
            State::Finding => self.all_heard(),
            State::Fencing if self.fencing.contains(&party) => self.all_fenced(),
            _ if self.next == Some(party) => Some(Event::NextGone),
            _ if self.giver == Some(party) => Some(if_giver),
            _ => None,
        }
    }

    fn is_harmless(&self, party: Party) -> bool {
        self.is(party).is_none_or(Is::is_harmless)
    }

    fn all_fenced(&self) -> Option<Event> {
        let over = self.state == State::Fencing && self.fencing.iter().all(|party| self.is_harmless(*party));
        over.then_some(Event::Fenced)
    }

    fn all_heard(&self) -> Option<Event> {
        let waited_for = |member: &Member| matches!(member.is, Is::Unheard | Is::Waiting | Is::Condemned);
        (self.state == State::Finding && !self.members.iter().any(waited_for)).then_some(Event::Heard)
    }

    /// The lease word holds a value that no honest worker writes. All workers that can have written it are to be
    /// fenced. That the word names a worker is no reason to fence that worker.
    fn forged(&mut self) -> Event {
        (self.fencing, self.moved) = (self.writers(), 0);
        Event::Forged
    }

    /// Returns the event that the present lease word means.
    fn look(&mut self, now: Tenure) -> Event {
        self.seen = now;
        self.moved += 1;
        if self.moved > MOVED_MOST {
            return self.forged();
        }
        let Some(holder) = now.holder else { return Event::FreeNow };
        if holder == ARBITER {
            return Event::Seized;
        }
        let has_part = [self.giver, self.next].contains(&Some(holder));
        match self.is(holder) {
            Some(Is::Dead | Is::Fenced) => Event::FreeNow,
            // All living workers that have the page are known: this one died while there was no arbiter.
            None if self.state == State::Finding => Event::FreeNow,
            None => self.forged(),
            Some(_) if !self.may_hold(holder) => self.forged(),
            Some(Is::Given | Is::Left | Is::Ready | Is::Unfit) if self.state != State::Finding && !has_part => {
                self.forged()
            }
            Some(Is::Silent | Is::Unheard | Is::Condemned) => {
                self.fencing = vec![holder];
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
}
