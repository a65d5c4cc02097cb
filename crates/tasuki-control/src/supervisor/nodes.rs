//! Adds and removes nodes while the daemon runs. The registry remembers added nodes for the next daemon until they
//! are removed, or until the daemon stops everything and starts anew with no worker to adopt. The configuration
//! counts more.

use tasuki_shm::crash;

use super::deposits::Key;
use super::door::{Answer, Refusal, why};
use super::drains::Draining;
use super::endpoints::Endpoint;
use super::taps::TapEnd;
use super::worker::Stage;
use super::{About, Node, Supervisor, now};
use crate::api::types::{NodeView, Removed};
use crate::config::{self, Config};
use crate::registry::{Change, NodeRecord};

/// A node being removed: it is gone once its workers have ended.
#[derive(Debug)]
pub struct Leaving {
    node: String,
    answer: Option<Answer<Removed>>,
    /// The queue that it drives. Its workers end when that is empty.
    draining: Option<Draining>,
    /// Whether an earlier daemon began with it, and a worker of it has yet to answer.
    waits: bool,
}

/// Returns that a node is there, and will not be in a moment.
fn removing(name: &str) -> Refusal {
    Refusal::Busy(format!("node {name} is being removed; ask again when it is gone"))
}

impl Supervisor {
    /// A running node keeps the settings it was made with, even if the file has changed: its workers and memory were
    /// built from them.
    pub(super) fn go_by_what_was_made(&mut self, records: &[(String, NodeRecord)]) {
        let made = |node: &config::Node| records.iter().find(|(name, _)| *name == node.name)?.1.as_made();
        let now = |node: &config::Node| made(node).map_or_else(|| node.clone(), |made| node.with_what_stays(made));
        let mut as_made = Config { node: self.config.node.iter().map(now).collect(), ..self.config.clone() };
        // A queue of an interface that is to be made anew comes with that, unless it is there already; and goes with it.
        let interface = |config: &Config, node: &config::Node| config.node(node.queue_of()?).map(|it| it.work.clone());
        let waits =
            |node: &config::Node| made(node).is_none() && interface(&self.config, node) != interface(&as_made, node);
        let waiting: Vec<String> = as_made.node.iter().filter(|it| waits(it)).map(|it| it.name.clone()).collect();
        as_made.node.retain(|node| !waiting.contains(&node.name));
        let is_odd = |node: &config::Node| node.queue_of().is_some() && as_made.odd_queue(node).is_some();
        let odd: Vec<String> = as_made.node.iter().filter(|it| is_odd(it)).map(|it| it.name.clone()).collect();
        as_made.node.retain(|node| !odd.contains(&node.name));
        let Some(why) = as_made.senseless_beside(&self.config) else { return self.config = as_made };
        let other = as_made.node.iter().filter(|made| self.config.node(&made.name) != Some(made));
        let other: Vec<&str> = other.map(|made| &made.name[..]).collect();
        let sentence = format!(
            "what the configuration has anew of node {} counts for nothing yet, and beside what it was made with makes no sense ({why}): remove it (tasuki node remove) and apply the configuration ({})",
            other.join(", node "),
            self.current.command()
        );
        self.note(About::default(), sentence);
    }

    /// Adds the nodes that were added by hand while an earlier daemon ran. One that contradicts the configuration goes. One that
    /// this version refuses for itself stays as it is: another version took it, and it is at work.
    pub(super) fn add_nodes_of_before(&mut self, added: Vec<config::Node>) {
        let find = |name: &str| self.config.node(name).or_else(|| added.iter().find(|node| node.name == name));
        let alone = |node: &config::Node| {
            let interface = node.queue_of().map(find);
            if interface == Some(None) {
                return Vec::new();
            }
            // To name another node is no fault of its own.
            let trusts = node.trusts.iter().filter(|name| **name == node.name).cloned().collect();
            let its = config::Node { trusts, ..node.clone() };
            let nodes = interface.flatten().cloned().into_iter().chain([its]).collect();
            let faults = Config { node: nodes, ..Config::default() }.faults().into_iter();
            faults.filter(|fault| fault.starts_with(&format!("node {:?}", node.name))).collect()
        };
        let odd: Vec<_> = added.iter().map(|node| (node.name.clone(), alone(node))).collect();
        let known = [self.config.faults(), odd.iter().flat_map(|(_, faults)| faults.clone()).collect()].concat();
        let mut rest = added;
        loop {
            let count = rest.len();
            let refused = self.add_nodes_but_for(rest, &known);
            if refused.is_empty() || refused.len() == count {
                for (config::Node { name, .. }, why) in refused {
                    let sentence = format!("node {name}, which had been added by hand, is not there any more: {why}");
                    self.note(About::default(), sentence);
                    self.changes.push(Change::Removed(name));
                }
                break;
            }
            // One of them may have named a node that came after it.
            rest = refused.into_iter().map(|(node, _)| node).collect();
        }
        for (name, faults) in odd {
            if !faults.is_empty() && self.by_hand.contains(&name) {
                let head = format!("node {name:?}");
                let bare = |fault: &String| {
                    fault.strip_prefix(&head).unwrap_or(fault).trim_start_matches([':', ',', ' ']).to_owned()
                };
                let why: Vec<String> = faults.iter().map(bare).collect();
                let why = why.join("; ");
                self.leave_out(
                    &name,
                    &format!("this version of tasukid refuses it ({why}): it goes on as it was made"),
                );
            }
        }
    }

    /// Adds those of the nodes that have no faults but `known` ones, and returns the others, each with its fault. Half by half, the
    /// checks are few if few are at fault: to check all others beside each of hundreds of containers' nodes would keep the daemon
    /// from beginning.
    fn add_nodes_but_for(&mut self, mut added: Vec<config::Node>, known: &[String]) -> Vec<(config::Node, String)> {
        let (config, now) = self.with_nodes(&added);
        let fault = now.senseless_but(known);
        match (&added[..], fault) {
            ([], _) => Vec::new(),
            (_, None) => {
                self.config = config;
                self.by_hand.extend(added.into_iter().map(|node| node.name));
                Vec::new()
            }
            ([node], Some(why)) => vec![(node.clone(), why)],
            (_, Some(_)) => {
                let rest = added.split_off(added.len() / 2);
                let mut refused = self.add_nodes_but_for(added, known);
                refused.extend(self.add_nodes_but_for(rest, known));
                refused
            }
        }
    }

    /// Notes what does not count of a node's settings, and until when.
    pub(super) fn leave_out(&mut self, name: &str, what: &str) {
        let is_containers = self.config.node(name).is_some_and(|node| node.container.is_some());
        let until = match self.by_hand.contains(name) {
            true if is_containers => "its container is started anew".to_owned(),
            true => format!("you remove it (tasuki node remove {name}) and add it anew"),
            false => format!("that is mended, and the configuration applied ({})", self.current.command()),
        };
        let why = format!("{what}, until {until}");
        self.note(About::node(name), format!("node {name}: {why}"));
        let all = self.left_out.entry(name.to_owned()).or_default();
        *all = if all.is_empty() { why } else { format!("{all}; {why}") };
    }

    /// Goes on with the removals that the last daemon did not live to end: their nodes are as they were, and on no VNI.
    pub(super) fn begin_removals_of_before(&mut self) {
        let leaving = self.nodes.iter().filter(|(_, node)| node.record.leaves);
        let leaving =
            leaving.map(|(name, _)| Leaving { node: name.clone(), answer: None, draining: None, waits: true });
        self.leaving.extend(leaving);
    }

    /// Ends the workers of the nodes of those removals, once all workers of the node have answered or are dead.
    pub(super) fn end_removals_of_before(&mut self) {
        let waiting = self.leaving.iter().filter(|leaving| leaving.waits && !self.has_unheard(&leaving.node));
        for name in waiting.map(|leaving| leaving.node.clone()).collect::<Vec<_>>() {
            self.leaving.iter_mut().filter(|leaving| leaving.node == name).for_each(|leaving| leaving.waits = false);
            self.end_workers(&name);
        }
    }

    /// Returns the configuration with one more node.
    pub(super) fn with_node(&self, node: config::Node) -> Result<Config, String> {
        if self.config.node(&node.name).is_some() {
            return Err(format!(
                "there is a node {:?} already; give one another name, or remove that first (tasuki node remove)",
                node.name
            ));
        }
        let (config, now) = self.with_nodes(&[node]);
        now.senseless_beside(&self.config).map_or(Ok(config), Err)
    }

    /// Returns the configuration with more nodes, and the same with its NICs where they are.
    fn with_nodes(&self, nodes: &[config::Node]) -> (Config, Config) {
        let mut config = self.config.clone();
        config.node.extend_from_slice(nodes);
        let mut now = config.clone();
        for nic in &mut now.nic {
            // Where it is counts, and not where the configuration has it. Its stand-by was checked when it was named.
            let card = self.cards.values().find(|card| card.name() == nic.name);
            card.into_iter().for_each(|card| card.node().clone_into(&mut nic.node));
            nic.standby = None;
        }
        (config, now)
    }

    pub(super) fn add_node(&mut self, node: config::Node) -> Result<NodeView, Refusal> {
        if self.stopping.is_some() {
            return Err(Refusal::Ending);
        }
        let name = node.name.clone();
        if self.leaves(&name) {
            return Err(removing(&name));
        }
        if node.work == config::Work::Uplink {
            return Err(Refusal::Malformed(format!(
                "node {name:?}: a NIC comes by the configuration alone, and an uplink needs one; write both there, and apply it ({})",
                self.current.command()
            )));
        }
        let config = self.with_node(node.clone()).map_err(Refusal::Malformed)?;
        if let Some(why) = config::stray_cpu(&config, |cpu| self.usable_cpus.contains(&cpu)) {
            return Err(Refusal::Malformed(why));
        }
        self.make_whole_node(&node)?;
        crash::point("daemon.adding");
        self.by_hand.insert(name.clone());
        self.changes.push(Change::Added(node));
        // A caller that hears of the node must find it there, even if this daemon dies.
        self.flush();
        crash::point("daemon.added");
        self.node_view(&name).ok_or(Refusal::Ending)
    }

    /// Makes a node that was checked, with its endpoint and its end of a VNI.
    pub(super) fn make_whole_node(&mut self, node: &config::Node) -> Result<(), Refusal> {
        let name = node.name.clone();
        let is_like = |other: &&config::Node| node.label().is_some_and(|label| other.label() == Some(label));
        let on_vni = |other: &&config::Node| node.vni.is_some() || other.vni.is_some();
        if let Some(other) = self.config.node.iter().filter(is_like).find(on_vni) {
            let (label, other) = (node.label().unwrap_or_default(), &other.name);
            return Err(Refusal::conflict(format!("node {name:?} was not added: {label} is node {other:?}'s by now")));
        }
        // Another node may have the same one, which is gone.
        let has = |label: &String| self.taps.get(label).is_some_and(|tap| !tap.is_gone);
        if let Some((label, mut tap)) = TapEnd::of(node).filter(|(label, _)| !has(label)) {
            let (_, why) = tap
                .make(&mut self.shortcuts)
                .map_err(|error| Refusal::conflict(format!("node {name:?} has no TAP {label}: {error}")))?;
            let has_it = |node: &&config::Node| node.tap().is_some_and(|tap| tap.label() == label);
            let others = self.config.node.iter().filter(has_it).map(|node| node.name.clone());
            tap.makes_stale(others.filter(|_| self.taps.contains_key(&label)));
            self.taps.insert(label, tap).into_iter().for_each(TapEnd::close);
            why.into_iter().for_each(|why| self.note(About::node(&name), why));
        }
        if let Some(tap) = node.tap().and_then(|tap| self.taps.get_mut(&tap.label())) {
            tap.is_fresh_for(&name);
        }
        self.make_queue(node)
            .map_err(|error| Refusal::conflict(format!("node {name:?} was not added: {}", why(&error))))?;
        if let Some((label, mut end)) = Endpoint::of(node) {
            self.make_alone(&mut end)
                .map_err(|error| Refusal::conflict(format!("node {name:?} was not added: {}", why(&error))))?;
            let why = end.why_flooded();
            self.endpoints.insert(label, end);
            why.into_iter().for_each(|why| self.note(About::node(&name), why));
        }
        match self.make_node(node) {
            Ok(()) => {}
            Err(error) => {
                self.forget_endpoint(node);
                return Err(Refusal::conflict(format!("node {name:?} was not added: {}", why(&error))));
            }
        }
        self.config.node.push(node.clone());
        if node.cpu.is_some() {
            self.update_housekeeping_cpus();
        }
        let whose = node.container.iter().map(|container| format!(", for container {container}")).collect::<String>();
        self.note(About::node(&name), format!("node {name} was added{whose}"));
        Ok(())
    }

    /// Keeps all that runs for no node off the nodes' CPUs.
    pub(super) fn update_housekeeping_cpus(&mut self) {
        let is_nobodys = |cpu: &u32| self.config.node.iter().all(|node| node.cpu != Some(*cpu));
        self.housekeeping_cpus = self.own_cpus.iter().copied().filter(is_nobodys).collect();
        crate::housekeeping_cpus::pin_this_thread(&self.housekeeping_cpus);
        crate::log::pin(&self.housekeeping_cpus);
        self.apply_cpu_division();
    }

    fn make_node(&mut self, node: &config::Node) -> anyhow::Result<()> {
        let number = self.next_number(super::adopt::FIRST_END, &std::collections::BTreeSet::new()).unwrap_or(u32::MAX);
        let end = self.end_of(node, number)?;
        let record = NodeRecord::of(node);
        self.nodes.insert(node.name.clone(), Node::new(record.clone())?);
        self.changes.push(Change::Node(node.name.clone(), record));
        end.into_iter().for_each(|card| self.cards.insert(number, card));
        self.mark_deposit(Key::ProgramState(node.name.clone()));
        Ok(())
    }

    fn forget_endpoint(&mut self, node: &config::Node) {
        if let Some(label) = node.endpoint().map(|kind| kind.label()) {
            let end = self.endpoints.remove(&label);
            self.sockets.forget(&label);
            self.mark_deposit(Key::Endpoint(label.clone()));
            self.mark_deposit(Key::Client(label));
            end.into_iter().for_each(Endpoint::close);
        }
        self.forget_queue(node);
        let label = node.tap().map(config::Tap::label);
        let is_shared = |label: &String| {
            self.config
                .node
                .iter()
                .any(|other| other.name != node.name && other.tap().is_some_and(|tap| tap.label() == *label))
        };
        if let Some(label) = label.filter(|label| !is_shared(label)) {
            let tap = self.taps.remove(&label);
            self.mark_deposit(Key::Tap(label));
            tap.into_iter().for_each(TapEnd::close);
        }
        if let Some(vni) =
            node.vni.as_ref().filter(|vni| !self.config.node.iter().any(|node| self.config.is_on(&node.name, vni)))
        {
            self.shortcuts.forget(vni);
        }
    }

    /// Has a node's workers end once its queue, if it drives one, is empty; the answer comes when they have.
    pub(super) fn begin_removing(&mut self, name: &str, answer: Answer<Removed>) {
        if let Err(refusal) = self.may_be_removed(name) {
            return drop(answer.send(Err(refusal)));
        }
        let draining = self.begin_draining(name);
        let is_drained = draining.is_none();
        self.leaving.push(Leaving { node: name.to_owned(), answer: Some(answer), draining, waits: false });
        if is_drained {
            self.end_workers(name);
        }
    }

    fn end_workers(&mut self, name: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.record.leaves = true;
            self.changes.push(Change::Node(name.to_owned(), node.record.clone()));
        }
        // The neighbours forget it. A daemon that adopted it would have it talk where nobody listens.
        self.flush();
        let ends: Vec<u32> = self.cards.of(name).filter(|card| card.vni().is_some()).map(|card| card.number).collect();
        ends.into_iter().for_each(|nic| self.leave(nic));
        crash::point("daemon.left");
        self.detach_queue(name);
        for worker in self.workers.values_mut().filter(|worker| worker.record.node == name) {
            worker.stage = Stage::Leaving(now());
            worker.tell_to_end();
        }
    }

    pub(super) fn may_be_removed(&self, name: &str) -> Result<(), Refusal> {
        if !self.nodes.contains_key(name) {
            return Err(self.no_node(name));
        }
        if self.leaves(name) {
            return Err(Refusal::conflict(format!("node {name} is being removed already")));
        }
        self.is_free(name, &[])?;
        if let Some(card) = self.nic_of(name).filter(|card| !self.has_standby(card)) {
            return Err(Refusal::conflict(format!(
                "node {name} has NIC {}; give that to another node first (tasuki nic give)",
                card.name()
            )));
        }
        if let Some(queue) = self.config.node.iter().find(|node| node.queue_of() == Some(name)) {
            return Err(Refusal::conflict(format!(
                "node {} serves a queue of node {name}; remove that first (tasuki node remove {})",
                queue.name, queue.name
            )));
        }
        let trusts = self.config.node.iter().find(|node| node.trusts.iter().any(|trusted| trusted == name));
        match trusts {
            Some(node) => Err(Refusal::conflict(format!(
                "node {} trusts node {name} by its name; change that in the configuration first",
                node.name
            ))),
            None => Ok(()),
        }
    }

    /// Returns that a node of the configuration, or one that `desired` names, is being removed: it would seem to be there. Of
    /// other nodes that were added by hand, those of containers for example, no step depends on it.
    pub(super) fn is_removing_one_of(&self, desired: &Config) -> Result<(), Refusal> {
        let going = self.leaving.iter().map(|it| &it.node).chain(self.emptying.iter().map(|it| &it.node));
        let counts = |name: &&String| !self.by_hand.contains(*name) || desired.node(name).is_some();
        going.into_iter().find(counts).map_or(Ok(()), |name| Err(removing(name)))
    }

    /// Notes that a removal goes on, once its caller waits for it no more: nobody else hears of it.
    fn note_what_goes_on(&mut self) {
        let is_alone = |leaving: &&mut Leaving| leaving.answer.as_ref().is_some_and(Answer::is_closed);
        let mut alone = Vec::new();
        for leaving in self.leaving.iter_mut().filter(is_alone) {
            leaving.answer = None;
            alone.push(leaving.node.clone());
        }
        for name in alone {
            self.note(
                About::node(&name),
                format!("node {name} is still being removed, though its caller waits no more"),
            );
        }
    }

    /// Returns whether a node is being removed.
    pub(super) fn leaves(&self, name: &str) -> bool {
        self.leaving.iter().any(|leaving| leaving.node == name)
    }

    /// Returns whether a node is being removed, and has no queue to drain: its workers end.
    pub(super) fn ends(&self, name: &str) -> bool {
        self.leaving.iter().any(|leaving| leaving.node == name && leaving.draining.is_none())
    }

    /// Ends the workers of the nodes whose queues are empty, and removes the nodes whose workers have ended.
    pub(super) fn go_on_removing(&mut self) {
        if self.adopting {
            return;
        }
        for at in 0..self.leaving.len() {
            let Some(mut draining) = self.leaving[at].draining.take() else { continue };
            let name = self.leaving[at].node.clone();
            if self.go_on_draining(&name, &mut draining) {
                self.end_workers(&name);
            } else {
                self.leaving[at].draining = Some(draining);
            }
        }
        self.note_what_goes_on();
        let stays = |leaving: &Leaving| {
            leaving.waits || leaving.draining.is_some() || self.workers.of(&leaving.node).next().is_some()
        };
        let (rest, gone): (Vec<_>, Vec<_>) = std::mem::take(&mut self.leaving).into_iter().partition(stays);
        self.leaving = rest;
        for Leaving { node: name, answer, .. } in gone {
            self.lose_loans(&name);
            let ends = self.cards.of(&name).filter(|card| card.vni().is_some());
            for nic in ends.map(|card| card.number).collect::<Vec<_>>() {
                self.cards.remove(&nic);
                self.changes.push(Change::NoNic(nic));
                self.mark_deposit(Key::Card(nic));
            }
            self.nodes.remove(&name);
            // A node of this name that comes later is another. Arbiters know it as the same while a lease page is its as well.
            if !self.cards.values().any(|card| card.page_of.contains(&name)) {
                self.node_numbers.remove(&name);
            }
            self.left_out.remove(&name);
            self.cells.forget_node(&name);
            self.mark_deposit(Key::ProgramState(name.clone()));
            if let Some(at) = self.config.node.iter().position(|node| node.name == name) {
                let node = self.config.node.remove(at);
                self.forget_endpoint(&node);
                if !self.by_hand.remove(&name) {
                    self.changes.extend(self.current.removed_by_hand(&name, self.applying.is_some()));
                }
                if node.cpu.is_some() {
                    self.update_housekeeping_cpus();
                }
                self.changes.push(Change::Removed(name.clone()));
            }
            let sentence = format!("node {name} is gone");
            self.note(About::node(&name), sentence.clone());
            self.flush();
            crash::point("daemon.removed");
            answer.into_iter().for_each(|answer| drop(answer.send(Ok(Removed { sentence: sentence.clone() }))));
        }
    }
}
