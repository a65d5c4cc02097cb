//! Makes the nodes and NICs those of a configuration while the daemon runs, step by step
//! ([`plan`](crate::config::plan)).
//!
//! The registry has the text before the first step begins, and that it is applied after the last one. So the next
//! daemon begins with that text, and takes the remaining steps. It takes those to a file that has changed since as well. If a
//! step fails, that is the end: the next daemon begins with what there was then, and takes no step by itself.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tasuki_relay::message::program_state;
use tokio::sync::oneshot::{self, Receiver, error::TryRecvError};

use super::by_node::ByNode;
use super::card::Card;
use super::deeds::clock;
use super::deposits::Key;
use super::door::{Answer, Refusal};
use super::endpoints::Endpoint;
use super::shortcuts::OnVni;
use super::worker::{Stage, Words};
use super::{About, Supervisor};
use crate::api::types::{Applied, Apply, ConfigurationView, Give, Plan, Refused, Relayed, Removed, Upgrade, Written};
use crate::config::plan::{Present, Step};
use crate::config::{self, Config, StationAddress};
use crate::registry::{AppliedRecord, Change, Registry};

/// The configuration that the daemon goes by.
#[derive(Debug)]
pub struct Current {
    /// The file that the daemon began with.
    pub file: PathBuf,
    pub record: AppliedRecord,
    /// The configuration in the record.
    desired: Config,
    /// An earlier daemon has not come to all steps: it died amid them, or the file has changed since.
    resumes: bool,
    /// Why the file cannot be used, if the daemon goes by what was applied last instead.
    pub unusable: Option<String>,
    /// Why this version refuses the text in the record, which another one has applied, and what it leaves out.
    refused: Option<String>,
}

/// Returns the configuration that an earlier daemon in this directory went by, also if this version refuses it; `None` if no
/// daemon has begun.
///
/// # Errors
/// The registry cannot be read, or does not have it.
pub fn applied_last(folder: &Path) -> Result<Option<Config>> {
    let known = Registry::open(folder)?.1;
    if known.is_nothing() {
        return Ok(None);
    }
    let record = known.applied.context("the registry does not have it")?;
    Ok(Some(Config::as_applied(Path::new(&record.path), &record.text)?.0))
}

impl Current {
    /// Notes that a node of it was removed, unless that was a step of an `apply`, or one is about to go on: the next daemon leaves
    /// it out, too.
    pub fn removed_by_hand(&mut self, name: &str, is_step: bool) -> Option<Change> {
        let is_its = self.desired.node(name).is_some() || self.record.left.is_some();
        if !is_its || is_step || self.resumes {
            return None;
        }
        self.record.removed.insert(name.to_owned());
        Some(Change::Applied(self.record.clone()))
    }

    /// Returns the command that applies the configuration again.
    pub fn command(&self) -> String {
        format!("tasuki apply {}", self.record.path)
    }

    /// Returns a sentence if the next daemon would find another configuration in the file than this one did.
    pub fn has_changed(&self) -> Option<String> {
        let named = self.file.display();
        if !self.file.metadata().is_ok_and(|file| file.is_file()) {
            return Some(format!(
                "the configuration {named} is no file that another tasukid could read; put it there, and apply it"
            ));
        }
        let is_same = std::fs::read(&self.file).is_ok_and(|text| crc32c::crc32c(&text) == self.record.base);
        (!is_same).then(|| {
            format!("{named} has changed since tasukid read it; apply the change first (tasuki plan, tasuki apply), or undo it")
        })
    }

    /// Returns whether this is the file that tasukid began with.
    fn is_own(&self, file: &Path) -> bool {
        let real = |path: &Path| path.canonicalize().ok();
        file == self.file || real(file).is_some_and(|it| real(&self.file) == Some(it))
    }

    /// Returns a sentence if another file is in force, and the next daemon would go by what the daemon's own has by now.
    fn has_changed_aside(&self) -> Option<String> {
        let is_aside =
            !self.is_own(Path::new(&self.record.path)) && self.file.metadata().is_ok_and(|file| file.is_file());
        // Anything but a file might keep the loop waiting.
        let text = is_aside.then(|| std::fs::read(&self.file).ok()).flatten()?;
        (crc32c::crc32c(&text) != self.record.base).then(|| {
            let (own, path) = (self.file.display(), &self.record.path);
            format!(
                "{own} has changed since tasukid read it, and counts in place of {path} when tasukid starts anew: nodes and NICs that it does not have end then; apply it, or undo the change"
            )
        })
    }

    /// Returns the configuration to begin with: that of the daemon's file, with its text; or the one that was applied last,
    /// if the file has not changed since, or cannot be used, as the error says.
    ///
    /// A text that was applied counts also if this version refuses it: nodes live by it, and the file may have none of them.
    ///
    /// # Errors
    /// The file cannot be used, and nothing was applied; or a whole node or NIC of what was applied cannot be read.
    pub fn begin(
        file: PathBuf,
        config: Config,
        text: Result<String, String>,
        known: Option<AppliedRecord>,
    ) -> Result<(Self, Config)> {
        let path = file.display().to_string();
        // If that is as it was, it counts no more than before.
        let newer = |text: &String| known.as_ref().filter(|known| known.base != crc32c::crc32c(text.as_bytes()));
        let emptied = |text: &String| newer(text).and_then(|known| why_emptied(&path, text, &known.text));
        let text = text.and_then(|text| emptied(&text).map_or(Ok(text), Err));
        let base = text.as_ref().ok().map(|text| crc32c::crc32c(text.as_bytes()));
        let before = known.as_ref().map_or(0, |known| known.generation);
        if let Some(record) = known.filter(|known| base.is_none_or(|base| known.base == base)) {
            let read = |text: &str| {
                Config::as_applied(Path::new(&record.path), text).with_context(|| {
                    format!(
                        "this version of tasukid cannot go on with what was applied last (generation {}), and leaves its workers alone",
                        record.generation
                    )
                })
            };
            let (desired, refused) = read(&record.text)?;
            let (mut config, of_left) =
                record.left.as_ref().map_or_else(|| Ok((desired.clone(), None)), |left| read(left))?;
            // A contradiction in what is left, which a later apply mends, is none of the file's.
            let is_whole = |left: &String| toml::from_str::<Config>(left).is_ok();
            let refused = refused.or(of_left.filter(|_| !record.left.as_ref().is_some_and(is_whole)));
            let resumes = !record.is_done && record.left.is_none();
            // A NIC of the file that is elsewhere by now still names its node.
            let nics = &config.nic;
            let has_nic =
                |name: &String| nics.iter().any(|nic| [Some(&nic.node), nic.standby.as_ref()].contains(&Some(name)));
            config.node.retain(|node| !record.removed.contains(&node.name) || has_nic(&node.name));
            return Ok((Current { file, resumes, record, desired, unusable: text.err(), refused }, config));
        }
        let text = text.map_err(anyhow::Error::msg)?;
        let base = crc32c::crc32c(text.as_bytes());
        let is_done = before == 0;
        let (generation, removed) = (before + 1, BTreeSet::new());
        let record = AppliedRecord { generation, path, text, base, is_done, removed, left: None };
        Ok((
            Current { file, record, resumes: !is_done, desired: config.clone(), unusable: None, refused: None },
            config,
        ))
    }

    /// Returns a sentence if the daemon goes by another configuration than its file's, which cannot be used, or by one that it
    /// refuses.
    pub fn trouble(&self) -> Option<String> {
        let AppliedRecord { generation, path, .. } = &self.record;
        let by = format!("tasukid goes by what was applied last (generation {generation})");
        match (&self.refused, &self.unusable) {
            (None, None) => None,
            (None, Some(why)) => Some(format!("{by}, for its configuration cannot be used: {why}")),
            (Some(refused), unusable) => {
                // The file can be the one that was applied.
                let unusable = unusable.iter().filter(|why| !refused.starts_with(&why[..]));
                let file =
                    unusable.map(|why| format!(", for its configuration cannot be used: {why}")).collect::<String>();
                Some(format!(
                    "{by}{file}; this version refuses something of that: {refused}. Change that in {path}, and apply it (tasuki apply {path})"
                ))
            }
        }
    }
}

/// Returns why a text is not taken if it has no key and the `last` one had some: a full disk can empty a file, and all
/// nodes would go.
fn why_emptied(file: &impl Display, text: &str, last: &str) -> Option<String> {
    let has_keys =
        |text: &str| config::written::without_mark(text).parse::<toml::Table>().is_ok_and(|keys| !keys.is_empty());
    let sentence =
        "has no line that counts, and all its nodes and NICs would be removed; write [daemon] into it if that is meant";
    (has_keys(last) && !has_keys(text)).then(|| format!("{file} {sentence}"))
}

/// Returns how many steps there are, for users.
fn counted(steps: usize) -> String {
    match steps {
        0 => "nothing changes".to_owned(),
        1 => "1 step".to_owned(),
        steps => format!("{steps} steps"),
    }
}

/// A configuration that is being applied.
#[derive(Debug)]
pub struct Applying {
    desired: Config,
    todo: VecDeque<Step>,
    waits: Option<Waits>,
    steps: Vec<String>,
    /// Nodes that were removed to be made anew, as they were.
    removed: BTreeMap<String, config::Node>,
    /// All steps of the plan are taken, and workers that began amid them are replaced.
    is_late: bool,
    answer: Option<Answer<Applied>>,
}

/// What the step under way waits for.
#[derive(Debug)]
enum Waits {
    Removed(Receiver<Result<Removed, Refusal>>),
    Relayed(Receiver<Result<Relayed, Refusal>>),
    /// The end of this NIC.
    Closed(u32),
}

impl Waits {
    /// Returns whether it is over, or why it failed.
    fn look(&mut self, cards: &ByNode<Card>) -> Result<bool, Refusal> {
        fn of<T>(answer: &mut Receiver<Result<T, Refusal>>) -> Result<bool, Refusal> {
            match answer.try_recv() {
                Ok(answer) => answer.map(|_| true),
                Err(TryRecvError::Empty) => Ok(false),
                Err(TryRecvError::Closed) => Err(Refusal::Ending),
            }
        }
        match self {
            Waits::Removed(answer) => of(answer),
            Waits::Relayed(answer) => of(answer),
            Waits::Closed(nic) => Ok(!cards.contains_key(nic)),
        }
    }
}

impl Supervisor {
    /// Returns the configuration that `apply` names, checked, with its text and its file.
    fn desired(&self, apply: &Apply) -> Result<(Config, String, PathBuf), Refusal> {
        apply.check().map_err(Refusal::Malformed)?;
        let file = apply.path.clone().map_or_else(|| self.current.file.clone(), PathBuf::from);
        // Anything else might keep the loop waiting.
        if apply.text.is_none() && file.metadata().is_ok_and(|file| !file.is_file()) {
            return Err(Refusal::Malformed(format!("the configuration {} is not a file; name one", file.display())));
        }
        let text = apply.text.clone().map_or_else(|| Config::text(&file), Ok);
        let text = text.map_err(|error| Refusal::Malformed(error.to_string()))?;
        let desired = Config::parse(&file, &text).map_err(|error| Refusal::Malformed(error.to_string()))?;
        if let Some(why) = why_emptied(&file.display(), &text, &self.current.record.text) {
            return Err(Refusal::Malformed(why));
        }
        match self.why_not(&desired) {
            None => Ok((desired, text, file)),
            Some(why) => Err(Refusal::Malformed(format!("{}: {why}", file.display()))),
        }
    }

    /// Returns why a configuration cannot be applied to what there is.
    fn why_not(&self, desired: &Config) -> Option<String> {
        if let Some(why) = config::stray_cpu(desired, |cpu| self.usable_cpus.contains(&cpu)) {
            return Some(why);
        }
        let by_hand = self.config.node.iter().filter(|node| self.by_hand.contains(&node.name));
        let by_hand = by_hand.filter(|node| desired.node(&node.name).is_none()).cloned();
        let all = Config { node: desired.node.iter().cloned().chain(by_hand).collect(), ..desired.clone() };
        if let Some(why) = all.senseless_beside(&self.config) {
            return Some(format!(
                "with the nodes that were added by hand: {why}{}",
                self.remedy_by_hand(desired, &all)
            ));
        }
        for (number, worker) in self.workers.iter().filter(|(_, worker)| worker.stage == Stage::Begun) {
            let what = match number {
                _ if self.keeps_own_limits(*number, desired) => "an interface with several queues could have limits",
                _ if self.lends_nothing(*number, desired) => "several nodes could serve one virtual machine",
                _ => continue,
            };
            let node = &worker.record.node;
            return Some(format!(
                "worker {number} of node {node} is from before {what}; replace it by a later program (tasuki worker upgrade {node} --with PROGRAM), and apply this again"
            ));
        }
        if let Some(why) = self.would_lose_a_queue(desired) {
            return Some(why);
        }
        let own = self.current.file.display();
        let anew = if self.current.is_own(Path::new(&self.current.record.path)) {
            format!("write it into {own}, and start tasukid anew (workers go on)")
        } else {
            // Nodes and NICs that the file does not have would end.
            format!(
                "write the whole configuration into {own}, and start tasukid anew: that file counts then, and not {}",
                self.current.record.path
            )
        };
        if desired.api != self.config.api {
            return Some(format!("[api] differs from what tasukid began with, and counts only then; {anew}"));
        }
        if desired.daemon.confine != self.config.daemon.confine {
            return Some(format!("[daemon], confine: it counts only when tasukid begins; {anew}"));
        }
        None
    }

    /// Returns what to do about a contradiction in `all`, as the end of a sentence: `desired`, which has none, beside the nodes
    /// that were added by hand.
    fn remedy_by_hand(&self, desired: &Config, all: &Config) -> String {
        let without = |name: &str| {
            let others = all.node.iter().filter(|node| node.name != name).cloned();
            Config { node: others.collect(), ..all.clone() }
        };
        let mut by_hand = all.node.iter().map(|node| &node.name).filter(|name| desired.node(name).is_none());
        let at_fault = by_hand.find(|name| without(name).senseless_beside(&self.config).is_none());
        at_fault.map_or_else(String::new, |name| {
            format!("; node {name} was added by hand: remove it first (tasuki node remove {name}), or change the file")
        })
    }

    /// Returns why an interface cannot be made anew as `desired` says: a node that was added by hand drives a queue of it.
    fn would_lose_a_queue(&self, desired: &Config) -> Option<String> {
        let steps = self.steps_to(desired);
        let goes = |name: &str| steps.iter().any(|step| matches!(step, Step::Remove(node, _) if node == name));
        let of = |node: &config::Node| node.queue_of().filter(|of| goes(of) && !goes(&node.name)).map(str::to_owned);
        let (node, of) = self.config.node.iter().find_map(|node| Some((&node.name, of(node)?)))?;
        Some(format!(
            "node {of} would be made anew, and node {node}, which was added by hand, serves a queue of it: remove that first (tasuki node remove {node}), or write it into the file"
        ))
    }

    /// Returns the steps from what there is to `desired`.
    fn steps_to(&self, desired: &Config) -> Vec<Step> {
        self.plan_to(desired).0
    }

    /// Returns the steps from what there is to `desired`, and sentences about what stays otherwise than there.
    fn plan_to(&self, desired: &Config) -> (Vec<Step>, Vec<String>) {
        let is_nic = |card: &&Card| card.vni().is_none() && card.closing.is_none();
        let owners =
            self.cards.values().filter(is_nic).map(|card| (card.name().to_owned(), card.node().to_owned())).collect();
        let (stale, failed_over) = (self.stale_nodes(), self.all_failed_over());
        let (config, by_hand) = (&self.config, &self.by_hand);
        let lost = config.node.iter().filter(|node| self.why_without_interface(&node.name).is_some());
        let lost = lost.map(|node| node.name.clone()).collect();
        let present =
            Present { config, by_hand, owners: &owners, failed_over: &failed_over, stale: &stale, lost: &lost };
        let stays: Vec<_> = failed_over.keys().filter(|nic| present.stays(nic, desired)).cloned().collect();
        let steps = present.steps_to(desired);
        let mut stays =
            [self.why_they_stay(&stays), self.why_without_shortcut(desired, &steps), self.why_cut_off(desired, &steps)]
                .concat();
        if config.daemon.metrics != desired.daemon.metrics {
            stays.push("[daemon], metrics: it counts when tasukid starts anew (workers go on)".to_owned());
        }
        (steps, stays)
    }

    /// Returns which machines that are connected must have another address from now on.
    fn why_cut_off(&self, desired: &Config, steps: &[Step]) -> Vec<String> {
        let is_cut_off = |node: &&config::Node| {
            let runs =
                node.endpoint().and_then(|kind| self.endpoints.get(&kind.label())).is_some_and(Endpoint::has_client);
            matches!(node.work, config::Work::Vm(_)) && !node.has_others() && runs
        };
        let changed = steps.iter().filter_map(|step| match step {
            Step::Remove(name, keys) if keys.iter().any(|key| ["mac", "spoof"].contains(key)) => desired.node(name),
            _ => None,
        });
        let sentence = |node: &config::Node| {
            let (name, mac) = (&node.name, StationAddress(node.mac()));
            format!(
                "node {name}: the card of its machine must have the address {mac}, or all frames of the guest are dropped (spoof = \"check\"): start a machine that has another one anew, with mac={mac}"
            )
        };
        changed.filter(is_cut_off).map(sentence).collect()
    }

    /// Returns why nodes that are not made anew stay without the shortcut, where `desired` lets them have it.
    fn why_without_shortcut(&self, desired: &Config, steps: &[Step]) -> Vec<String> {
        let may = |node: &config::Node| OnVni::of(node).is_some_and(|on| on.may_shortcut);
        let was_made_without = |name: &str| {
            let made = self.nodes.get(name).and_then(|node| node.record.as_made());
            made.is_some_and(|made| !may(&made)) && self.crossed(name).is_none()
        };
        let is_made = |name: &str| {
            steps.iter().any(|step| matches!(step, Step::Remove(node, _) | Step::Add(node) if node == name))
        };
        let those =
            desired.node.iter().filter(|node| may(node) && !is_made(&node.name) && was_made_without(&node.name));
        let said = |node: &config::Node| {
            let name = &node.name;
            format!(
                "node {name} was made without the shortcut, and its frames go on by its workers; to give it that, remove it (tasuki node remove {name}) and apply the configuration ({}): frames from and to it are lost meanwhile",
                self.current.command()
            )
        };
        those.map(said).collect()
    }

    /// Returns the nodes that have workers which began with other settings, of the present program or as drivers.
    fn stale_nodes(&self) -> BTreeSet<String> {
        let is_stale = |name: &&String| {
            let settings = self.config.node(name).map(|node| node.settings(self.config.interface_node(node)));
            let drive = self.cards.of(name).filter_map(Card::holder);
            self.present_workers_of(name).into_iter().chain(drive).any(|number| {
                // Amid a handover another node's worker drives.
                let its = self.workers.get(&number).filter(|worker| worker.record.node == **name);
                let began_with = its.and_then(|worker| worker.record.settings);
                began_with.is_some() && began_with != settings
            })
        };
        self.nodes.keys().filter(is_stale).cloned().collect()
    }

    pub(super) fn plan(&mut self, apply: &Apply) -> Result<Plan, Refusal> {
        // One may have gone since the last look.
        self.look_for_lost_interfaces();
        let (desired, _, path) = self.desired(apply)?;
        let (steps, stays) = self.plan_to(&desired);
        let steps = steps.iter().map(ToString::to_string).collect();
        Ok(Plan { path: path.display().to_string(), generation: self.current.record.generation, steps, stays })
    }

    pub(super) fn begin_applying(&mut self, apply: &Apply, answer: Option<Answer<Applied>>) {
        match self.try_applying(apply, answer) {
            Err((refusal, Some(answer))) => drop(answer.send(Err(refusal))),
            Err((Refusal::Busy(why), None)) => {
                if !std::mem::replace(&mut self.is_told_to_apply, true) {
                    self.note(
                        About::default(),
                        format!(
                            "the configuration is applied later, as a signal asked: {}",
                            why.split(';').next().unwrap_or_default()
                        ),
                    );
                }
            }
            Err((refusal, None)) => {
                self.is_told_to_apply = false;
                let why = Refused::from(refusal).error;
                self.note(About::default(), format!("nothing was applied: {why}"));
            }
            Ok(()) => {}
        }
    }

    /// Applies the file that the daemon began with, as it is now.
    pub(super) fn apply_own_file(&mut self) {
        self.begin_applying(&Apply::default(), None);
    }

    /// Applies that file if the daemon was told to while it was beginning, was applying a configuration, or was removing a node of
    /// it, and that is over.
    pub(super) fn apply_own_file_if_told(&mut self) {
        let waits = self.awaiting || self.is_applying() || self.is_removing_one_of(&self.current.desired).is_err();
        if !waits && self.is_told_to_apply {
            self.apply_own_file();
        }
    }

    fn try_applying(
        &mut self,
        apply: &Apply,
        answer: Option<Answer<Applied>>,
    ) -> Result<(), (Refusal, Option<Answer<Applied>>)> {
        let generation = self.current.record.generation;
        let checked = match apply.generation {
            _ if self.stopping.is_some() => Err(Refusal::Ending),
            // A signal alone comes then: requests wait.
            _ if self.awaiting => Err(Refusal::Busy("tasukid is still beginning".to_owned())),
            _ if self.is_applying() => {
                let sentence = "another configuration is being applied; ask again when that is done";
                Err(Refusal::Busy(sentence.to_owned()))
            }
            Some(asked) if asked != generation => Err(Refusal::conflict(format!(
                "the configuration is generation {generation} by now, and not {asked}: another was applied meanwhile; look at tasuki plan again"
            ))),
            _ => self.desired(apply),
        };
        let checked = checked.and_then(|checked| self.is_removing_one_of(&checked.0).map(|()| checked));
        let (desired, text, file) = match checked {
            Ok(checked) => checked,
            Err(refusal) => return Err((refusal, answer)),
        };
        // One may have gone since the last look.
        self.look_for_lost_interfaces();
        let todo: VecDeque<Step> = self.steps_to(&desired).into();
        // It comes in place of one that an earlier daemon has not applied to its end, or that a signal asked for.
        self.current.resumes = false;
        self.is_told_to_apply = false;
        let is_own = self.current.is_own(&file);
        let record = &mut self.current.record;
        // What the daemon's file has and nobody has applied counts for the next daemon, also if another file is applied.
        let base = if is_own { crc32c::crc32c(text.as_bytes()) } else { record.base };
        let generation = generation + u64::from(record.text != text);
        if is_own {
            self.current.unusable = None;
        }
        self.current.refused = None;
        let (path, is_done) = (file.display().to_string(), todo.is_empty());
        *record = AppliedRecord { generation, path, text, base, is_done, removed: BTreeSet::new(), left: None };
        let said = counted(todo.len());
        self.note(About::default(), format!("configuration {generation}, {}, is applied: {said}", file.display()));
        self.begin_with(desired, todo, answer);
        Ok(())
    }

    /// Takes the steps that an earlier daemon did not come to.
    pub(super) fn apply_the_rest(&mut self) {
        let waits = self.awaiting || self.is_applying() || !self.leaving.is_empty();
        if waits || !std::mem::take(&mut self.current.resumes) {
            return;
        }
        let desired = self.current.desired.clone();
        let AppliedRecord { generation, path, .. } = &self.current.record;
        let which = format!("configuration {generation}, {path},");
        if let Some(why) = self.why_not(&desired) {
            self.record_what_is_left();
            return self.note(About::default(), format!("{which} is not applied to its end: {why}"));
        }
        let todo: VecDeque<Step> = self.steps_to(&desired).into();
        self.note(About::default(), format!("{which} is applied to its end: {}", counted(todo.len())));
        self.begin_with(desired, todo, None);
    }

    fn begin_with(&mut self, desired: Config, todo: VecDeque<Step>, answer: Option<Answer<Applied>>) {
        for node in &desired.node {
            // The configuration has it from now on.
            if self.by_hand.remove(&node.name) {
                self.changes.push(Change::NotAdded(node.name.clone()));
            }
        }
        self.current.desired.clone_from(&desired);
        self.changes.push(Change::Applied(self.current.record.clone()));
        self.flush();
        tasuki_shm::crash::point("daemon.applying");
        self.applying = Some(Applying {
            desired,
            todo,
            waits: None,
            steps: Vec::new(),
            removed: BTreeMap::new(),
            is_late: false,
            answer,
        });
        self.go_on_applying();
    }

    /// Takes the steps that can be taken now.
    pub(super) fn go_on_applying(&mut self) {
        while let Some(mut applying) = self.applying.take() {
            match applying.waits.as_mut().map_or(Ok(true), |waits| waits.look(&self.cards)) {
                Ok(false) => return self.applying = Some(applying),
                Ok(true) => applying.waits = None,
                Err(refusal) => return self.not_applied(applying, None, refusal),
            }
            if applying.todo.front().is_some_and(|step| self.must_wait(step)) {
                return self.applying = Some(applying);
            }
            tasuki_shm::crash::point("daemon.applied-step");
            let Some(step) = applying.todo.pop_front() else {
                // A worker that began amid the steps may have settings of before.
                let renews = self.steps_to(&applying.desired).into_iter().filter(|it| matches!(it, Step::Renew(..)));
                applying.todo = if applying.is_late { VecDeque::new() } else { renews.collect() };
                if applying.todo.is_empty() {
                    return self.is_applied(applying);
                }
                applying.is_late = true;
                self.applying = Some(applying);
                continue;
            };
            applying.steps.push(step.to_string());
            if let Step::Remove(name, keys) = &step
                && let Some(node) = self.config.node(name).filter(|_| !keys.is_empty())
            {
                applying.removed.insert(name.clone(), node.clone());
            }
            match self.take_step(&step, &applying.desired) {
                Ok(waits) => applying.waits = waits,
                Err(refusal) => return self.not_applied(applying, Some(&step), refusal),
            }
            self.applying = Some(applying);
        }
    }

    /// Returns whether a step has to wait: for an upgrade or a handover of one of its nodes, which has a limit of its own;
    /// or for the end of workers whose node is not trusted any more.
    fn must_wait(&self, step: &Step) -> bool {
        let is_busy = |node: &str| self.jobs.iter().any(|job| job.node() == node || job.fences(node));
        let card_of = |nic: &str| self.cards.values().find(|card| card.name() == nic);
        let is_going =
            |nic: &str| card_of(nic).is_some_and(|card| self.jobs.iter().any(|job| job.is_about(card.number)));
        match step {
            Step::Close(nic) => is_going(nic) || card_of(nic).is_some_and(|card| is_busy(card.node())),
            Step::Remove(node, _) | Step::Renew(node, _) => is_busy(node),
            Step::AdjustNic(nic) => is_going(nic),
            Step::Give(nic, from, to) => {
                is_going(nic)
                    || is_busy(from)
                    || is_busy(to)
                    || self.cards.values().any(|card| self.has_strangers(card))
            }
            Step::Settings | Step::Adjust(..) | Step::Add(_) | Step::Open(..) => false,
        }
    }

    pub(super) fn is_applying(&self) -> bool {
        self.applying.is_some()
    }

    /// Leaves the remaining steps to the next daemon.
    pub(super) fn end_applying(&mut self) {
        let answer = self.applying.take().and_then(|applying| applying.answer);
        answer.into_iter().for_each(|answer| drop(answer.send(Err(Refusal::Ending))));
    }

    fn is_applied(&mut self, Applying { desired, steps, answer, .. }: Applying) {
        // A node that was made anew was trusted before.
        for node in &desired.node {
            self.node_mut(&node.name).into_iter().for_each(|its| its.clone_from(node));
            self.left_out.remove(&node.name);
        }
        self.settle_nics(&desired);
        self.current.record.is_done = true;
        self.current.record.removed.clear();
        self.current.record.left = None;
        self.changes.push(Change::Applied(self.current.record.clone()));
        let generation = self.current.record.generation;
        let sentence = if steps.is_empty() {
            format!("configuration {generation} is applied already: nothing changes")
        } else {
            format!("configuration {generation} is applied")
        };
        self.note(About::default(), sentence.clone());
        self.flush();
        answer.into_iter().for_each(|answer| {
            drop(answer.send(Ok(Applied { generation, steps: steps.clone(), sentence: sentence.clone() })))
        });
    }

    /// Ends it before its last step. A node that cannot be made anew is made as it was, and so is each that was to come after
    /// it, unless it can be made anew. None of them gets an interface or an address that another node has by now.
    fn not_applied(
        &mut self,
        Applying { desired, mut steps, todo, answer, removed, .. }: Applying,
        at: Option<&Step>,
        refusal: Refusal,
    ) {
        let (mut back, mut rest) = (String::new(), todo.len());
        for step in at.into_iter().chain(&todo) {
            let Step::Add(name) = step else { continue };
            let Some(old) = removed.get(name).filter(|_| !self.nodes.contains_key(name)) else { continue };
            // If its turn had not come, nothing has spoken against its new settings.
            let new = desired.node(name).filter(|_| at != Some(step));
            if new.is_some_and(|new| self.make_where_free(new).is_ok()) {
                rest -= 1;
                back += &format!("; node {name} is made anew");
                continue;
            }
            back += &match self.make_where_free(old) {
                Ok(()) => format!("; node {name} is there as it was"),
                Err(refusal) => {
                    let why = Refused::from(refusal).error;
                    format!("; node {name} is gone, and cannot be made as it was ({why})")
                }
            };
        }
        let why = Refused::from(refusal).error;
        let failed = steps.pop().unwrap_or_default();
        let rest = match rest {
            0 => String::new(),
            1 => "; the step after it was not begun".to_owned(),
            rest => format!("; {rest} steps after it were not begun"),
        };
        let sentence = format!(
            "configuration {} is applied in part. This step failed: {failed} ({why}){back}{rest}; mend that, and apply it again",
            self.current.record.generation
        );
        self.note(About::default(), sentence.clone());
        self.record_what_is_left();
        self.flush();
        answer.into_iter().for_each(|answer| drop(answer.send(Err(Refusal::conflict(sentence.clone())))));
    }

    /// Has the next daemon begin with nodes and NICs as they are: what is applied is over before its last step.
    fn record_what_is_left(&mut self) {
        let is_its = |node: &&config::Node| self.nodes.contains_key(&node.name) && !self.by_hand.contains(&node.name);
        let node: Vec<_> = self.config.node.iter().filter(is_its).cloned().collect();
        // A stand-by node that was named by hand is noted with its NIC.
        let is_there = |standby: &String| node.iter().any(|node| node.name == *standby);
        let nic = self.config.nic.iter().cloned();
        let nic = nic.map(|nic| config::Nic { standby: nic.standby.clone().filter(is_there), ..nic }).collect();
        let left = Config { node, nic, ..self.config.clone() };
        let AppliedRecord { generation, path, text, .. } = &self.current.record;
        let origin = format!("generation {generation}, from {path}, in part");
        match config::written::file(text, &left.node, &left.nic, &left, &origin, &[]) {
            Ok(text) => self.current.record.left = Some(text),
            // The next daemon tries again.
            Err(why) => {
                let sentence = format!(
                    "nodes and NICs cannot be written as they are ({why}): the next tasukid goes on to apply the rest"
                );
                return self.note(About::default(), sentence);
            }
        }
        self.changes.push(Change::Applied(self.current.record.clone()));
    }

    /// Makes a node that another one contradicts in nothing by now.
    fn make_where_free(&mut self, node: &config::Node) -> Result<(), Refusal> {
        let mut node = node.clone();
        // Nodes that it trusts may not be there again.
        node.trusts.retain(|name| self.config.node(name).is_some());
        self.with_node(node.clone()).map_err(Refusal::Malformed)?;
        self.make_whole_node(&node)
    }

    /// Begins a step. Returns what it waits for, if it is not done at once.
    fn take_step(&mut self, step: &Step, desired: &Config) -> Result<Option<Waits>, Refusal> {
        let failed = |error: anyhow::Error| Refusal::conflict(format!("{error:#}"));
        match step {
            Step::Settings => {
                self.config.daemon = desired.daemon.clone();
            }
            Step::Adjust(name, _) => {
                let (Some(new), Some(node)) = (desired.node(name), self.node_mut(name)) else {
                    return Err(Refusal::Ending);
                };
                let (has_other_bounds, has_other_trust) = (node.bounds != new.bounds, node.trusts != new.trusts);
                (node.trusts, node.standby, node.bounds) = (new.trusts.clone(), new.standby, new.bounds);
                if has_other_bounds {
                    self.apply_cpu_division();
                }
                if has_other_trust {
                    self.estrange_those_without_shared_page();
                }
            }
            Step::Close(nic) => {
                let number = self.nic_by_name(nic)?;
                return self.begin_closing(number).map(|()| Some(Waits::Closed(number)));
            }
            Step::Remove(name, keys) => {
                let gone = |nic: &&config::Nic| keys.is_empty() && nic.standby.as_ref() == Some(name);
                let left: Vec<String> = self.config.nic.iter().filter(gone).map(|nic| nic.name.clone()).collect();
                left.iter().for_each(|nic| self.set_standby(nic, None));
                self.config.node.iter_mut().for_each(|node| node.trusts.retain(|trusted| trusted != name));
                let (answer, answered) = oneshot::channel();
                self.begin_removing(name, answer);
                return Ok(Some(Waits::Removed(answered)));
            }
            Step::Add(name) => {
                let node = desired.node(name).ok_or(Refusal::Ending)?;
                if self.nodes.contains_key(name) {
                    return Err(Refusal::conflict(format!("there is a node {name} by now")));
                }
                self.make_whole_node(node)?;
                // Those that trusted it before it was made anew do so again: it may get a NIC from them in a moment.
                for its in &mut self.config.node {
                    desired.node(&its.name).into_iter().for_each(|new| its.trusts.clone_from(&new.trusts));
                }
            }
            Step::Open(name, _) => {
                let nic = desired.nic.iter().find(|nic| nic.name == *name).ok_or(Refusal::Ending)?;
                self.open_nic(nic.clone()).map_err(failed)?;
            }
            Step::Give(nic, _, to) => return self.give_for(nic, to),
            Step::AdjustNic(name) => {
                let nic = desired.nic.iter().find(|nic| nic.name == *name).ok_or(Refusal::Ending)?;
                self.set_standby(name, nic.standby.clone());
            }
            Step::Renew(name, keys) => {
                // The interface of one that was added by hand is in the file.
                let new = desired.node(name).or_else(|| self.config.node(name)).ok_or(Refusal::Ending)?.clone();
                self.set_up_anew(&new, keys.contains(&"work")).map_err(failed)?;
                // A staged worker has begun with the old settings. If there is none, that is as well.
                let _ = self.unstage(name);
                let (answer, answered) = oneshot::channel();
                self.upgrade(name, Upgrade::default(), answer);
                return Ok(Some(Waits::Relayed(answered)));
            }
        }
        Ok(None)
    }

    fn node_mut(&mut self, name: &str) -> Option<&mut config::Node> {
        self.config.node.iter_mut().find(|node| node.name == name)
    }

    /// Gives a node these settings, with which its next workers begin.
    fn set_up_anew(&mut self, new: &config::Node, has_other_work: bool) -> Result<()> {
        let name = &new.name;
        let old = self.node_mut(name).context("there is no such node")?;
        let (was_same_work, had_cpu) =
            (std::mem::discriminant(&old.work) == std::mem::discriminant(&new.work), old.cpu);
        *old = new.clone();
        if let Some(kind) = new.endpoint() {
            let end = self.endpoints.get_mut(&kind.label());
            end.into_iter().for_each(|end| end.set(new));
        }
        if let Some(tap) = new.tap().and_then(|tap| self.taps.get_mut(&tap.label())) {
            tap.set(new);
        }
        self.reconcile_shortcuts();
        self.left_out.remove(name);
        // It waits in a jail that was made for the old settings.
        self.cells.forget_cells(name);
        let node = self.nodes.get_mut(name).context("there is no such node")?;
        if !was_same_work {
            // One kind of work does not understand the memory of another.
            node.program_state = Words::create("tasuki program state", program_state::LEN)?;
            self.mark_deposit(Key::ProgramState(name.clone()));
        }
        let node = self.nodes.get_mut(name).context("there is no such node")?;
        if has_other_work && node.record.binary.take().is_some() {
            self.changes.push(Change::Node(name.clone(), node.record.clone()));
        }
        if had_cpu != new.cpu {
            self.update_housekeeping_cpus();
        }
        Ok(())
    }

    /// Gives a NIC to a node. One that is not open goes as it is.
    fn give_for(&mut self, nic: &str, to: &str) -> Result<Option<Waits>, Refusal> {
        let number = self.nic_by_name(nic)?;
        if let Some(nic) = self.config.nic.iter_mut().find(|it| it.name == nic) {
            to.clone_into(&mut nic.node);
        }
        let card = self.cards.get_mut(&number).ok_or(Refusal::Ending)?;
        to.clone_into(&mut card.config.node);
        if card.opened.is_none() && card.arbiter.is_none() {
            card.page_of = BTreeSet::from([to.to_owned()]);
            card.fail_over = None;
            self.cards.move_by(number, |card| card.set_node(to));
            self.record_nic(number);
            return Ok(None);
        }
        let (answer, answered) = oneshot::channel();
        let give = Give { to: to.to_owned(), method: None, inflight: None, state: None };
        self.give(nic, &give, answer);
        Ok(Some(Waits::Relayed(answered)))
    }

    fn open_nic(&mut self, nic: config::Nic) -> Result<()> {
        let number = self.next_number(0, &BTreeSet::new()).context("there are too many NICs")?;
        let card = Card::new(number, nic.clone()).context("no memory for a NIC's lease page")?;
        self.cards.insert(number, card);
        self.config.nic.push(nic);
        self.record_nic(number);
        Ok(())
    }

    pub(super) fn configuration_view(&self) -> ConfigurationView {
        let AppliedRecord { generation, path, .. } = &self.current.record;
        let applying = self.is_applying() || self.current.resumes;
        // It is on its way there: what it has yet to do is no difference.
        let (steps, mut stays) = if applying { (Vec::new(), Vec::new()) } else { self.plan_to(&self.current.desired) };
        stays.extend(self.other_programs());
        stays.extend(self.endpoints.values().filter_map(Endpoint::why_flooded));
        stays.extend(self.current.has_changed_aside());
        let drift = steps.iter().map(ToString::to_string).collect();
        let by_hand = self.by_hand.iter().cloned().collect();
        ConfigurationView { generation: *generation, path: path.clone(), applying, drift, stays, by_hand }
    }

    /// Returns nodes and NICs as they are now, as a configuration.
    pub(super) fn written(&self) -> Result<Written, Refusal> {
        if self.is_applying() {
            return Err(Refusal::conflict("a configuration is being applied; ask again when that is done"));
        }
        let nodes = self.config.node.iter().filter(|node| self.nodes.contains_key(&node.name));
        // Their runtime adds those of containers, and another day's containers are others.
        let is_containers = |node: &config::Node| node.container.is_some() && self.by_hand.contains(&node.name);
        let (of_containers, nodes): (Vec<_>, Vec<_>) = nodes.cloned().partition(is_containers);
        let nics = self.cards.values().filter(|card| card.vni().is_none() && card.closing.is_none());
        let nic = |card: &Card| {
            // A node that a NIC was lost by may work by the time that this is read, and the NIC is meant for it.
            let from = card.failed_over().map(|it| &it.from).filter(|from| nodes.iter().any(|it| it.name == **from));
            let node = from.map_or(card.node(), String::as_str).to_owned();
            let standby = card.config.standby.clone().filter(|standby| *standby != node);
            config::Nic { node, standby, ..card.config.clone() }
        };
        let nics: Vec<_> = nics.map(nic).collect();
        let by_hand = |(name, node): (&String, &super::Node)| {
            let program = node.record.binary.as_ref()?.display();
            Some(format!(
                "Not in this file: node {name} was upgraded to {program} by hand (tasuki worker upgrade --with)."
            ))
        };
        let kept = |name: &String| of_containers.iter().all(|node| node.name != *name);
        let mut notes: Vec<_> = self.nodes.iter().filter(|(name, _)| kept(name)).filter_map(by_hand).collect();
        if !of_containers.is_empty() {
            let count = of_containers.len();
            notes.push(format!("Not in this file: nodes of containers, {count} of them, which their runtime adds."));
        }
        let refused = |why: &String| format!("This version of tasukid refuses something that was applied: {why}.");
        notes.extend(self.current.refused.as_ref().map(refused));
        let left_out = self.left_out.iter().filter(|(name, _)| kept(name));
        notes.extend(left_out.map(|(name, why)| format!("Node {name}: {why}.")));
        let AppliedRecord { generation, path, text, .. } = &self.current.record;
        let origin = format!("generation {generation}, from {path}");
        let text = config::written::file(text, &nodes, &nics, &self.config, &origin, &notes);
        let text = text
            .map_err(|why| Refusal::conflict(format!("nodes and NICs cannot be written as a configuration: {why}")))?;
        Ok(Written { generation: *generation, text })
    }

    /// Returns why these NICs are not where the configuration has them, and stay where they are.
    fn why_they_stay(&self, nics: &[String]) -> Vec<String> {
        let said = |card: &Card| {
            let (name, it) = (card.name(), card.failed_over()?);
            let at = clock(it.at_ms);
            Some(format!(
                "NIC {name} failed over from node {} to node {} at {at}, since {}; it stays there until you give it back: tasuki nic give {name} --to {}",
                it.from, it.to, it.why, it.from
            ))
        };
        let cards = self.cards.values().filter(|card| nics.iter().any(|nic| nic == card.name()));
        cards.filter_map(said).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_begins_with_what_was_applied_last_or_with_its_file_if_that_is_newer() {
        let (one, other) = ("[daemon]\nhang_after_ms = 1\n", "[daemon]\nhang_after_ms = 2\n");
        let begin = |text: &str, known| {
            let config = Config::parse(Path::new("t.toml"), text).unwrap();
            let (current, config) = Current::begin("t.toml".into(), config, Ok(text.to_owned()), known).unwrap();
            (current.record, config.daemon.hang_after_ms)
        };
        let (record, hang) = begin(one, None);
        assert_eq!((record.generation, record.is_done, hang), (1, true, 1));
        assert_eq!(begin(one, Some(record.clone())), (record.clone(), 1), "nothing has changed");
        let unusable = |known| Current::begin("t.toml".into(), Config::default(), Err("line 7".to_owned()), known);
        let emptied =
            |known, text: &str| Current::begin("t.toml".into(), Config::default(), Ok(text.to_owned()), known);
        let (current, config) = unusable(Some(record.clone())).unwrap();
        assert_eq!((&current.record, config.daemon.hang_after_ms), (&record, 1), "the file counts as it was");
        assert!(current.trouble().unwrap().ends_with("(generation 1), for its configuration cannot be used: line 7"));
        assert_eq!(unusable(None).unwrap_err().to_string(), "line 7");
        let (current, config) = emptied(Some(record.clone()), "# \n").unwrap();
        assert_eq!((&current.record, config.daemon.hang_after_ms), (&record, 1), "a full disk may have emptied it");
        assert!(current.trouble().unwrap().contains("t.toml has no line that counts"));
        assert_eq!(emptied(Some(record.clone()), "[daemon]").unwrap().0.record.generation, 2, "that is meant");
        assert_eq!(emptied(None, "").unwrap().0.trouble(), None);
        let comments = AppliedRecord { base: crc32c::crc32c(b"# \n"), ..record.clone() };
        assert_eq!(emptied(Some(comments), "# \n").unwrap().0.trouble(), None, "another file was applied since");
        // What an earlier version applied from another file counts also if this one refuses it: the file has none of its nodes.
        let nodes = |text: &str| {
            let applied = AppliedRecord { path: "u.toml".to_owned(), text: text.to_owned(), ..record.clone() };
            let empty = Config::parse(Path::new("t.toml"), one).unwrap();
            let (current, config) = Current::begin("t.toml".into(), empty, Ok(one.to_owned()), Some(applied.clone()))?;
            let unusable =
                Current::begin("t.toml".into(), Config::default(), Err("line 7".to_owned()), Some(applied))?.0;
            let both = unusable.trouble().unwrap_or_default();
            assert!(both.contains(", for its configuration cannot be used: line 7; this version refuses"), "{both}");
            let names = config.node.iter().map(|node| node.name.clone()).collect::<Vec<_>>();
            anyhow::Ok((names, current.trouble().unwrap_or_default()))
        };
        for (more, why) in [
            ("nonsense = 1", "goes on without nonsense of node \"a\""),
            ("nice = 5", "; this version refuses something of that: u.toml: node \"a\": nice = 5 is not in the range"),
        ] {
            let (names, trouble) = nodes(&format!("[[node]]\nname = \"a\"\nwork = \"sink\"\n{more}\n")).unwrap();
            assert!(names == ["a"] && trouble.contains(why), "{names:?} {trouble}");
            assert!(trouble.ends_with("Change that in u.toml, and apply it (tasuki apply u.toml)"), "{trouble}");
        }
        for (keys, place) in [
            ("work = \"later\"", "node \"a\""),
            ("work = \"sink\"\nbounds = { later = 1 }", "bounds.later of node \"a\""),
        ] {
            let said = format!("{:#}", nodes(&format!("[[node]]\nname = \"a\"\n{keys}\n")).unwrap_err());
            assert!(said.contains("leaves its workers alone: u.toml:"), "{said}");
            assert!(said.contains(&format!("; without {place}, a node or NIC would be")), "{said}");
            assert!(said.contains("start the version before"), "{said}");
        }
        // One that failed: what it left counts, and what was removed by hand since.
        let node = |name: &str| format!("[[node]]\nname = \"{name}\"\nwork = \"sink\"\n");
        let failed = AppliedRecord {
            path: "u.toml".to_owned(),
            text: format!("{one}{}{}", node("new"), node("a")),
            is_done: false,
            left: Some(format!("{one}{}{}", node("a"), node("old"))),
            ..record.clone()
        };
        let names = |known: &AppliedRecord| {
            let file = Config::parse(Path::new("t.toml"), one).unwrap();
            let known = serde_json::from_value(serde_json::to_value(known).unwrap()).unwrap();
            let (current, config) = Current::begin("t.toml".into(), file, Ok(one.to_owned()), Some(known)).unwrap();
            (current, config.node.into_iter().map(|node| node.name).collect::<Vec<_>>())
        };
        let (mut current, left) = names(&failed);
        assert_eq!((left, current.resumes), (vec!["a".to_owned(), "old".to_owned()], false));
        assert!(current.removed_by_hand("old", false).is_some());
        assert_eq!(names(&current.record).1, ["a"]);
        let (mut current, all) = names(&AppliedRecord { left: None, ..failed });
        assert_eq!(
            (all, current.resumes),
            (vec!["new".to_owned(), "a".to_owned()], true),
            "it has died amid the steps"
        );
        assert!(current.removed_by_hand("a", false).is_none(), "it is about to be made");
        let applied = AppliedRecord {
            generation: 2,
            path: "u.toml".to_owned(),
            text: other.to_owned(),
            is_done: false,
            ..record
        };
        assert_eq!(begin(one, Some(applied.clone())), (applied.clone(), 2), "and its remaining steps are taken");
        let (newer, hang) = begin("[daemon]\nhang_after_ms = 3\n", Some(applied));
        assert_eq!((newer.generation, &newer.path[..], newer.is_done, hang), (3, "t.toml", false, 3));
    }
}
