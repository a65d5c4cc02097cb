//! Renders the daemon's answers for people.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Asked, Nodes, Vnis, Workers};
use crate::api::types::{
    Applied, ConfigurationView, Counts, CrossedView, Event, NicView, NodeView, Plan, Relayed, Removed, Status, Stopped,
    TalkView, VniNodeView, VniView, WorkerView,
};
use crate::supervisor::deeds::{clock, time};

/// Reads an answer of the daemon.
pub(super) fn read<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value)
        .context("this tasuki does not understand tasukid's answer; rebuild the older of the two")
}

/// Returns the answer as text for a terminal.
pub fn show(asked: &Asked, value: Value) -> Result<String> {
    Ok(match asked {
        Asked::Status => status(&read(value)?),
        Asked::Nodes(Nodes::List) => nodes(&read::<Vec<NodeView>>(value)?),
        Asked::Nodes(Nodes::Add(add)) => {
            let NodeView { name, work, .. } = read(value)?;
            format!("node {name} is there: {work}; tasuki vni table {} lists the others\n", add.vni)
        }
        Asked::Nodes(Nodes::Remove { .. }) => format!("{}\n", read::<Removed>(value)?.sentence),
        Asked::Vnis(Vnis::List) => vnis(&read::<Vec<VniView>>(value)?),
        Asked::Vnis(Vnis::Table { .. }) => vni_table(&read::<Vec<VniNodeView>>(value)?),
        Asked::Vnis(Vnis::Stats { .. }) => vni_stats(&read::<Vec<TalkView>>(value)?),
        Asked::Workers(Workers::List) => workers(&read::<Vec<WorkerView>>(value)?),
        Asked::NicList => nics(&read::<Vec<NicView>>(value)?),
        Asked::Workers(_) | Asked::Give(_) => format!("{}\n", read::<Relayed>(value)?.sentence),
        Asked::Standby(_) => {
            let NicView { name, node, standby, .. } = read(value)?;
            match standby {
                Some(standby) => format!("{name} goes to node {standby} if node {node} is lost\n"),
                None => format!("{name} has no stand-by node: it stays with node {node}\n"),
            }
        }
        Asked::Counts(_) => counts(&read(value)?),
        Asked::Events { .. } => read::<Vec<Event>>(value)?.iter().map(event).collect(),
        Asked::Plan(_) => plan(&read(value)?),
        Asked::Apply(_) => {
            let Applied { steps, sentence, .. } = read(value)?;
            steps.iter().chain([&sentence]).map(|line| format!("{line}\n")).collect()
        }
        Asked::Stop => format!("{}\n", read::<Stopped>(value)?.sentence),
    })
}

fn plan(Plan { path, generation, steps, stays }: &Plan) -> String {
    let said: String = steps.iter().map(|step| format!("{step}\n")).collect();
    let said = if said.is_empty() { "nothing changes\n".to_owned() } else { said };
    let said: String = [said].into_iter().chain(stays.iter().map(|why| format!("{why}\n"))).collect();
    format!(
        "{said}\n{path} was compared with the present configuration (generation {generation}); nothing was changed\n"
    )
}

/// Returns a table without lines, for rows under `header`.
pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table
}

/// Returns a table as text; the columns `right` are of numbers.
pub(super) fn text(mut table: Table, right: &[usize]) -> String {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
        if right.contains(&column.index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{}\n", table.trim_fmt())
}

fn status(status: &Status) -> String {
    let up = humans(status.up_ms);
    let mut said = format!("tasukid {} (process {}), up {up}", status.version, status.pid);
    if status.adopted > 0 {
        let _ = write!(said, ", took over {} workers", status.adopted);
    }
    let ConfigurationView { generation, path, applying, drift, stays, by_hand } = &status.configuration;
    let applying = if *applying { " (is being applied)" } else { "" };
    let _ = writeln!(said, "\nconfiguration {generation}, {path}{applying}\n");
    said.push_str(&table_of_nodes(&status.nodes));
    said.push('\n');
    said.push_str(&nics(&status.nics));
    said.push_str(&troubles(&status.nodes));
    if !drift.is_empty() {
        let _ = writeln!(said, "\nnot as configured; tasuki apply {path} would take these steps:");
        said.extend(drift.iter().map(|step| format!("  {step}\n")));
    }
    said.extend(stays.iter().map(|why| format!("\n{why}\n")));
    // Their runtime knows the nodes of containers, and there may be hundreds.
    let is_containers = |name: &String| status.nodes.iter().any(|node| node.name == *name && node.container.is_some());
    let by_hand: Vec<&str> = by_hand.iter().filter(|name| !is_containers(name)).map(String::as_str).collect();
    if !by_hand.is_empty() {
        let _ = writeln!(said, "\nadded by hand: {}", by_hand.join(", "));
    }
    said.extend(status.trouble.iter().map(|trouble| format!("\n{trouble}\n")));
    said.extend(status.not_replaced.iter().map(|why| format!("\ntasukid goes on as it was: {why}\n")));
    said
}

fn table_of_nodes(nodes: &[NodeView]) -> String {
    let mut rows = table(&["node", "work", "workers", "nics", "upgrades"]);
    for node in nodes {
        let workers = node.workers.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        let client = node.client.as_ref().map(|client| format!(", {}", client.is)).unwrap_or_default();
        let work = format!("{}{client}{}", node.work, if node.captured { ", captured" } else { "" });
        rows.add_row([&node.name, &work, &workers, &node.nics.join(" "), &node.generation.to_string()]);
    }
    text(rows, &[4])
}

fn troubles(nodes: &[NodeView]) -> String {
    let troubles = nodes.iter().filter_map(|node| node.trouble.as_ref()).map(|trouble| format!("\n{trouble}\n"));
    let left_out = nodes.iter().filter_map(|node| Some(format!("\nnode {}: {}\n", node.name, node.left_out.as_ref()?)));
    // Most often it is the kernel that lacks something, for all of them.
    let mut lacking: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for node in nodes.iter().filter(|node| !node.unconfined.is_empty()) {
        let what: Vec<&str> = node.unconfined.iter().map(String::as_str).collect();
        lacking.entry(what.join("; ")).or_default().push(&node.name);
    }
    let unconfined = lacking.iter().map(|(what, names)| match names[..] {
        [name] => format!("\nnode {name} is not confined as it is to be: {what}\n"),
        _ => format!("\nnodes {} are not confined as they are to be: {what}\n", names.join(", ")),
    });
    troubles.chain(left_out).chain(unconfined).collect()
}

fn nodes(nodes: &[NodeView]) -> String {
    table_of_nodes(nodes) + &troubles(nodes)
}

fn vnis(vnis: &[VniView]) -> String {
    if vnis.is_empty() {
        return "there is no VNI; a node that names one makes it: tasuki node add NAME --netns NETNS --vni VNI\n"
            .to_owned();
    }
    let mut rows = table(&["vni", "nodes", "memory"]);
    for vni in vnis {
        rows.add_row([&vni.name, &vni.nodes.to_string(), &kib(vni.memory)]);
    }
    text(rows, &[1, 2])
}

fn kib(bytes: u64) -> String {
    format!("{} KiB", bytes.div_ceil(1024))
}

fn vni_table(nodes: &[VniNodeView]) -> String {
    let mut rows = table(&["node", "number", "address", "interface", "worker", "memory", "shortcut: sent", "received"]);
    for node in nodes {
        let worker = node.worker.map(|worker| worker.to_string()).unwrap_or_default();
        let interface = node.interface.clone().unwrap_or_default();
        let count =
            |count: fn(&CrossedView) -> u64| node.shortcut.as_ref().map_or("-".to_owned(), |it| count(it).to_string());
        let (sent, received) = (count(|it| it.sent), count(|it| it.received));
        let number = node.number.to_string();
        rows.add_row([&node.node, &number, &node.mac, &interface, &worker, &kib(node.memory), &sent, &received]);
    }
    text(rows, &[1, 4, 5, 6, 7])
}

fn vni_stats(talks: &[TalkView]) -> String {
    if talks.is_empty() {
        return "no two of its nodes have talked yet\n".to_owned();
    }
    let mut rows = table(&[
        "node",
        "to and from",
        "sent",
        "received",
        "ring full",
        "over quota",
        "pool full",
        "taken back",
        "forged",
    ]);
    for talk in talks {
        let TalkView { sent, received, ring_full, over_quota, pool_full, taken_back, forged, .. } = talk;
        let counts = [sent, received, ring_full, over_quota, pool_full, taken_back, forged];
        rows.add_row([talk.node.clone(), talk.other.clone()].into_iter().chain(counts.map(u64::to_string)));
    }
    text(rows, &[2, 3, 4, 5, 6, 7, 8])
}

pub(super) fn humans(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

fn workers(workers: &[WorkerView]) -> String {
    let mut rows = table(&["worker", "node", "is", "nics", "process", "received", "sent", "program"]);
    for worker in workers {
        rows.add_row([
            &worker.worker.to_string(),
            &worker.node,
            &worker.is,
            &worker.drives.join(" "),
            &worker.pid.to_string(),
            &worker.received.to_string(),
            &worker.sent.to_string(),
            &worker.binary,
        ]);
    }
    text(rows, &[0, 4, 5, 6])
}

fn nics(nics: &[NicView]) -> String {
    let mut rows = table(&["nic", "device", "node", "is", "worker", "relays", "last pause", "stand-by"]);
    for nic in nics {
        let worker = nic.worker.map(|worker| worker.to_string()).unwrap_or_default();
        let pause = nic.pause_ns.map(time).unwrap_or_default();
        let (relays, standby) = (nic.relays.to_string(), nic.standby.as_deref().unwrap_or_default());
        rows.add_row([&nic.name, &nic.device, &nic.node, &nic.state(), &worker, &relays, &pause, standby]);
    }
    let mut said = text(rows, &[4, 5, 6]);
    for (name, trouble) in nics.iter().filter_map(|nic| Some((&nic.name, nic.trouble.as_ref()?))) {
        let _ = writeln!(said, "\n{name}: {trouble}");
    }
    said
}

fn counts(counts: &Counts) -> String {
    let width = counts.counts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut said = format!("{}, as worker {} has counted\n", counts.nic, counts.worker);
    for (name, number) in &counts.counts {
        let _ = writeln!(said, "  {name:width$}  {number}");
    }
    said
}

pub(super) fn event(event: &Event) -> String {
    format!("{:>5}  {}  {}\n", event.number, clock(event.at_ms), event.sentence)
}
