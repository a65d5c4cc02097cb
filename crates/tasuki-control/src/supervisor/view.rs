//! Builds the API's views for users.

use tasuki_relay::arbiter::State;
use tasuki_relay::message::{heartbeat, lease_page};

use super::card::{Card, Opening};
use super::worker::{Readiness, Stage, Worker};
use super::{Supervisor, now};
use crate::api::metrics::Metrics;
use crate::api::types::{ClientView, NicView, NodeView, Status, VmView, WorkerView};
use crate::config::{self, Kind, StationAddress, Work};

impl Supervisor {
    pub(super) fn status_view(&self) -> Status {
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            up_ms: u64::try_from(now().saturating_sub(self.since).as_millis()).unwrap_or(u64::MAX),
            adopted: self.adopted,
            trouble: self.trouble(),
            not_replaced: self.not_replaced.clone(),
            configuration: self.configuration_view(),
            nodes: self.node_views(),
            nics: self.nic_views(),
        }
    }

    pub(super) fn metrics(&self) -> Metrics {
        let talks = |vni: &crate::api::types::VniView| Some((vni.name.clone(), self.vni_stats(&vni.name).ok()?));
        let vnis = self.vni_views().iter().filter_map(talks).collect();
        Metrics { status: self.status_view(), workers: self.worker_views(), vnis, last_event: self.last_event }
    }

    /// Returns the troubles of the daemon itself.
    fn trouble(&self) -> Option<String> {
        let of_file = self.current.trouble();
        let others = self.registry.trouble().into_iter().chain(self.deposits.trouble.as_deref());
        let own = of_file.as_deref().into_iter().chain(self.not_scraped.as_deref());
        let troubles: Vec<&str> = own.chain(others).collect();
        (!troubles.is_empty()).then(|| troubles.join("\n"))
    }

    pub(super) fn node_views(&self) -> Vec<NodeView> {
        self.nodes.keys().filter_map(|name| self.node_view(name)).collect()
    }

    pub(super) fn node_view(&self, name: &str) -> Option<NodeView> {
        let node = self.nodes.get(name)?;
        let config = self.config.node(name);
        Some(NodeView {
            name: name.to_owned(),
            work: config.map(work_of).unwrap_or_default(),
            workers: self.workers.of(name).map(Worker::party).collect(),
            nics: self.cards.of(name).map(|card| card.name().to_owned()).collect(),
            generation: node.record.generation,
            trouble: self.trouble_of(name),
            left_out: self.left_out.get(name).cloned(),
            captured: self.is_captured(name),
            container: config.and_then(|config| config.container.clone()),
            netns: config.and_then(|config| config.tap()).and_then(|tap| tap.netns.clone()),
            unconfined: { self.workers.of(name) }.flat_map(|worker| worker.record.unconfined.iter().cloned()).collect(),
            client: self.client_view(name),
            vm: config.and_then(vm_of).map(|vm| VmView {
                pairs: self.running_pairs(name),
                queues: self.queues_of(name),
                ..vm
            }),
        })
    }

    fn client_view(&self, name: &str) -> Option<ClientView> {
        let kind = self.config.node(name)?.endpoint().filter(|kind| kind.socket().is_some())?;
        let end = self.endpoints.get(&kind.label())?;
        let is = match self.running_pairs(name) {
            _ if !end.has_client() => "away",
            Some(1..) => "runs",
            _ => "connected",
        };
        Some(ClientView { is: is.to_owned(), process: end.process() })
    }

    pub(super) fn worker_views(&self) -> Vec<WorkerView> {
        self.workers.values().map(|worker| self.worker_view(worker)).collect()
    }

    fn worker_view(&self, worker: &Worker) -> WorkerView {
        let number = worker.party();
        let held = self.cards.values().filter(|card| card.holder() == Some(number));
        let drives: Vec<String> = held.map(|card| card.name().to_owned()).collect();
        let is = match worker.stage {
            _ if !drives.is_empty() => "drives",
            Stage::Starting(_) | Stage::Asked(_) => "starting",
            Stage::Leaving(_) | Stage::Excluded(_) => "leaves",
            _ if worker.hung_up_since.is_some() => "leaves",
            Stage::Begun if worker.nics.values().any(|it| matches!(it, Readiness::Preparing(_))) => "prepares",
            Stage::Begun if worker.record.staged.is_some() => "staged",
            Stage::Begun if worker.nics.values().any(|it| *it == Readiness::Ready) => "stands by",
            Stage::Begun => "idle",
        };
        let count = |word| worker.heartbeat.as_ref().map_or(0, |heartbeat| heartbeat.load(word));
        let reasons = heartbeat::REASONS.into_iter().enumerate();
        let dropped = reasons.map(|(at, reason)| (reason.to_owned(), count(heartbeat::DROPPED_FOR + at)));
        WorkerView {
            worker: number,
            pid: worker.process.name().pid,
            node: worker.record.node.clone(),
            is: is.to_owned(),
            drives,
            binary: worker.binary().display().to_string(),
            generation: worker.record.generation,
            received: count(heartbeat::RECEIVED),
            sent: count(heartbeat::SENT),
            missing: count(heartbeat::MISSING),
            late: count(heartbeat::LATE),
            refused: count(heartbeat::REFUSED),
            dropped: dropped.filter(|(_, count)| *count > 0).collect(),
            dropped_by_order: count(heartbeat::DROPPED),
            unconfined: worker.record.unconfined.clone(),
        }
    }

    pub(super) fn nic_views(&self) -> Vec<NicView> {
        self.cards.values().map(|card| self.nic_view(card)).collect()
    }

    pub(super) fn nic_view_of(&self, nic: u32) -> Option<NicView> {
        self.cards.get(&nic).map(|card| self.nic_view(card))
    }

    fn nic_view(&self, card: &Card) -> NicView {
        let holder = card.holder().filter(|holder| self.workers.contains_key(holder));
        let state = card.arbiter.as_ref().map(|arbiter| arbiter.state());
        let is = match (state, holder) {
            _ if card.closing.is_some() => "is being closed",
            _ if card.opened.is_none() || !matches!(card.opening, Opening::Open | Opening::Opener(_)) => "not open",
            (Some(State::Steady), Some(_)) if card.is_gone() => "gone",
            (Some(State::Steady), Some(_)) => "driven",
            (Some(State::Parked), _) => "parked",
            (None, _) => "waits for a worker",
            _ => "changes hands",
        };
        let relays = card.lease_page.words.load(lease_page::RELAYS);
        let by_kernel = self.dropped_by_kernel(card.number).into_iter();
        NicView {
            name: card.name().to_owned(),
            device: card.config.device.to_string(),
            node: card.node().to_owned(),
            worker: holder,
            is: is.to_owned(),
            link: holder.and_then(|_| card.link().or_else(|| self.link_behind(card))).map(str::to_owned),
            epoch: card.lease_page.tenure().epoch,
            relays,
            driving_at_ns: holder.map(|_| card.lease_page.words.load(lease_page::DRIVING_AT)),
            pause_ns: card.lease_page.pause_ns().filter(|_| relays > 1),
            trouble: self.waits_for(card).or_else(|| card.waits.clone()).or_else(|| card.trouble.clone()),
            standby: card.config.standby.clone(),
            failed_over: card.failed_over().cloned(),
            dropped_by_kernel: by_kernel.map(|(reason, count)| (reason.to_owned(), count)).collect(),
        }
    }
}

fn vm_of(node: &config::Node) -> Option<VmView> {
    let Work::Vm(vm) = &node.work else { return None };
    Some(VmView {
        socket: vm.socket.clone(),
        mac: StationAddress(node.mac()).to_string(),
        mtu: vm.mtu,
        pairs: None,
        queues: Vec::new(),
    })
}

/// Returns a node's work in words.
fn work_of(node: &config::Node) -> String {
    let what = match &node.work {
        Work::Echo => "echo".to_owned(),
        Work::Sink => "sink".to_owned(),
        Work::Answer(answer) => format!("answers ping at {}", answer.address),
        Work::Tap(tap) if node.vni.is_some() => tap.label(),
        Work::Tap(tap) => format!("the NIC of {}", tap.label()),
        Work::Queue(queue) => format!("a queue of {}", queue.of),
        Work::Memif(_) | Work::Interface(_) | Work::Vm(_) => node.endpoint().map(Kind::shown).unwrap_or_default(),
        Work::Uplink => "uplink".to_owned(),
        Work::Source(source) => format!("source of {} bytes, {} a second", source.size, source.rate),
        Work::Program(program) => program.path.display().to_string(),
    };
    match &node.vni {
        Some(vni) => format!("{what} on VNI {vni}"),
        None => what,
    }
}
