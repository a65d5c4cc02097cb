//! The picture that `tasuki top` draws: rates between two looks, and how they went on.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::Moment;
use crate::api::types::{Event, NodeView, TalkView, WorkerView};
use crate::cli::show;
use crate::supervisor::deeds::time;

/// Looks and pauses that a curve shows.
const CURVE: usize = 30;
/// Events that are kept, for tall terminals.
const EVENTS: usize = 200;

/// What a node did between two looks.
#[derive(Debug, Clone, Default, PartialEq)]
struct Did {
    /// Frames a second.
    received: f64,
    sent: f64,
    /// Frames a second that were dropped, by reason.
    dropped: BTreeMap<String, f64>,
    /// Hundredths of one CPU.
    cpu: f64,
}

/// The looks so far, as far as a picture shows them.
#[derive(Debug, Default)]
pub struct Picture {
    last: Option<Moment>,
    nodes: BTreeMap<String, Did>,
    /// Hundredths of one CPU that the daemon takes.
    daemon: f64,
    /// Frames a second of each node, both ways together, look by look.
    frames: BTreeMap<String, VecDeque<f64>>,
    /// Pauses of each NIC in ns, relay by relay, and the number of relays.
    pauses: BTreeMap<String, (u64, VecDeque<f64>)>,
    events: VecDeque<Event>,
}

/// Returns by how much a count has grown. One that is smaller has begun anew.
fn grown(before: u64, now: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

#[expect(clippy::cast_precision_loss, reason = "a rate is shown with few digits")]
fn rate(count: u64, seconds: f64) -> f64 {
    count as f64 / seconds
}

/// Reasons why frames are dropped between two nodes of a VNI, the reason of the sender's worker that includes each, and the
/// count of each.
type Reason = (&'static str, &'static str, fn(&TalkView) -> u64);
const REASONS: [Reason; 4] = [
    ("ring full", "no_room", |it| it.ring_full),
    ("over quota", "no_room", |it| it.over_quota),
    ("pool full", "no_room", |it| it.pool_full),
    ("forged", "forged", |it| it.forged),
];

/// Returns what the nodes did between two looks, and the daemon's share of a CPU.
fn did(before: &Moment, now: &Moment) -> (BTreeMap<String, Did>, f64) {
    let seconds = rate(now.ms_since(before).max(1), 1000.0);
    let cpu = |pid: u32| {
        let used = now.cpu_ms.get(&pid).map(|used| grown(before.cpu_ms.get(&pid).copied().unwrap_or(0), *used));
        rate(used.unwrap_or(0), 10.0 * seconds)
    };
    let mut nodes: BTreeMap<String, Did> = BTreeMap::new();
    // Frames of a node that its worker counts, too, by the worker's reason.
    let mut counted: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    let former = pairs(before);
    for (pair, talk) in pairs(now) {
        let former = former.get(&pair);
        // A tasukid that begins has no VNIs yet: their counts go on from before.
        if former.is_none() && !before.metrics.vnis.iter().any(|(vni, _)| *vni == pair.0) {
            continue;
        }
        let did = nodes.entry(talk.node.clone()).or_default();
        for (reason, of_worker, count) in REASONS {
            let grown = rate(grown(former.map_or(0, |former| count(former)), count(talk)), seconds);
            *did.dropped.entry(reason.to_owned()).or_default() += grown;
            *counted.entry((&talk.node, of_worker)).or_default() += grown;
        }
    }
    let former: HashMap<u32, &WorkerView> = before.metrics.workers.iter().map(|it| (it.worker, it)).collect();
    for worker in &now.metrics.workers {
        // A number is never given again, so a worker without a former view is a fresh one.
        let former = former.get(&worker.worker);
        let since =
            |count: fn(&WorkerView) -> u64| rate(grown(former.map_or(0, |it| count(it)), count(worker)), seconds);
        let did = nodes.entry(worker.node.clone()).or_default();
        did.received += since(|it| it.received);
        did.sent += since(|it| it.sent);
        let for_reason = |worker: &WorkerView, reason: &str| worker.dropped.get(reason).copied().unwrap_or(0);
        let mut rest = since(|it| it.refused);
        for reason in worker.dropped.keys() {
            let before = former.map_or(0, |former| for_reason(former, reason));
            let grown = rate(grown(before, for_reason(worker, reason)), seconds);
            rest -= grown;
            // The counts of the VNI say more about those that they have.
            let mut none = 0.0;
            let counted = counted.get_mut(&(worker.node.as_str(), reason.as_str())).unwrap_or(&mut none);
            let known = grown.min(*counted);
            // They were read at another moment, so a small rest is none.
            let more = if grown - known < *counted / 100.0 { 0.0 } else { grown - known };
            *counted -= known;
            *did.dropped.entry(reason.replace('_', " ")).or_default() += more;
        }
        *did.dropped.entry("refused".to_owned()).or_default() += rest.max(0.0);
        did.cpu += cpu(worker.pid);
    }
    (nodes, cpu(now.metrics.status.pid))
}

/// Returns the counts of each node's talk with each other node, by VNI and both nodes.
fn pairs(moment: &Moment) -> HashMap<(&str, &str, &str), &TalkView> {
    let all = moment.metrics.vnis.iter().flat_map(|(vni, talks)| talks.iter().map(move |talk| (vni, talk)));
    all.map(|(vni, talk)| ((vni.as_str(), talk.node.as_str(), talk.other.as_str()), talk)).collect()
}

fn push<T>(into: &mut VecDeque<T>, most: usize, value: T) {
    if into.len() == most {
        into.pop_front();
    }
    into.push_back(value);
}

impl Picture {
    /// Takes one more look into account.
    pub fn take(&mut self, moment: Moment) {
        if let Some(before) = &self.last {
            (self.nodes, self.daemon) = did(before, &moment);
            for (name, did) in &self.nodes {
                push(self.frames.entry(name.clone()).or_default(), CURVE, did.received + did.sent);
            }
        }
        for nic in &moment.metrics.status.nics {
            let (relays, pauses) = self.pauses.entry(nic.name.clone()).or_default();
            if let Some(pause) = nic.pause_ns.filter(|_| *relays != nic.relays) {
                push(pauses, CURVE, rate(pause, 1.0));
            }
            *relays = nic.relays;
        }
        moment.events.iter().for_each(|event| push(&mut self.events, EVENTS, event.clone()));
        self.last = Some(moment);
    }

    /// Returns the picture for so many columns and lines; the last line is `foot`.
    pub fn lines(&self, (columns, rows): (usize, usize), foot: &str) -> Vec<String> {
        let Some(Moment { at_ms, metrics, .. }) = &self.last else { return Vec::new() };
        let (hour, minute, second) = (at_ms / 3_600_000 % 24, at_ms / 60_000 % 60, at_ms / 1000 % 60);
        let status = &metrics.status;
        let mut lines = vec![
            format!(
                "tasukid {} (process {}, {:.1} % of a CPU), up {}, {hour:02}:{minute:02}:{second:02}Z",
                status.version,
                status.pid,
                self.daemon,
                show::humans(status.up_ms)
            ),
            String::new(),
        ];
        // The head, the foot, the line before the events, and one of them.
        let room = rows.saturating_sub(lines.len() + 3);
        let mut nics = Vec::new();
        if !status.nics.is_empty() {
            nics = cut(self.table_of_nics(), room / 4, "NICs more: tasuki nic list");
            nics.insert(0, String::new());
        }
        let drops: Vec<String> = self.nodes.iter().filter_map(|(name, did)| drops(name, did)).collect();
        let troubles = status.nodes.iter().filter_map(|node| node.trouble.clone());
        let mut more: Vec<String> = status.trouble.clone().into_iter().chain(troubles).chain(drops).collect();
        if !more.is_empty() {
            more = cut(more, room / 4, "lines more");
            more.insert(0, String::new());
        }
        let rest = room.saturating_sub(nics.len() + more.len());
        lines.extend(cut(self.table_of_nodes(rest), rest, "nodes more: tasuki status"));
        lines.extend(nics);
        lines.extend(more);
        lines.push(String::new());
        let room = rows.saturating_sub(lines.len() + 1);
        let latest = self.events.iter().skip(self.events.len().saturating_sub(room));
        lines.extend(latest.map(|event| show::event(event).trim_end().to_owned()));
        lines.truncate(rows.saturating_sub(1));
        lines.push(foot.chars().take(columns).collect());
        lines
    }

    /// Returns a table of all nodes, the busiest first if there are more than `most` lines for them.
    fn table_of_nodes(&self, most: usize) -> Vec<String> {
        let Some(Moment { metrics, .. }) = &self.last else { return Vec::new() };
        let none = Did::default();
        let mut nodes: Vec<&NodeView> = metrics.status.nodes.iter().collect();
        if nodes.len() >= most {
            let frames = |node: &&NodeView| self.nodes.get(&node.name).map_or(0.0, |did| did.received + did.sent);
            nodes.sort_by(|one, other| frames(other).total_cmp(&frames(one)));
        }
        let rows = nodes.into_iter().map(|node| {
            let did = self.nodes.get(&node.name).unwrap_or(&none);
            let worker = metrics.workers.iter().find(|it| it.node == node.name && it.is == "drives");
            let worker = worker.or_else(|| metrics.workers.iter().find(|it| it.node == node.name));
            let worker = worker.map_or("none".to_owned(), |it| format!("{} {}", it.worker, it.is));
            let dropped = did.dropped.values().fold(0.0, |sum, rate| sum + rate);
            let curve = self.frames.get(&node.name).map(curve).unwrap_or_default();
            [
                node.name.clone(),
                node.work.clone(),
                worker,
                format!("{:.1} %", did.cpu),
                number(did.received),
                number(did.sent),
                number(dropped),
                curve,
            ]
        });
        let header = ["node", "work", "worker", "cpu", "received/s", "sent/s", "dropped/s", "frames"];
        table(&header, rows, &[3, 4, 5, 6])
    }

    fn table_of_nics(&self) -> Vec<String> {
        let Some(Moment { metrics, .. }) = &self.last else { return Vec::new() };
        let rows = metrics.status.nics.iter().map(|nic| {
            let worker = nic.worker.map(|worker| worker.to_string()).unwrap_or_default();
            let pause = nic.pause_ns.map(time).unwrap_or_default();
            let curve = self.pauses.get(&nic.name).map(|(_, pauses)| curve(pauses)).unwrap_or_default();
            [nic.name.clone(), nic.node.clone(), nic.state(), worker, nic.relays.to_string(), pause, curve]
        });
        table(&["nic", "node", "is", "worker", "relays", "last pause", "pauses"], rows, &[3, 4, 5])
    }
}

/// Leaves out the last lines if there are more than `most`, and says how many.
fn cut(mut lines: Vec<String>, most: usize, what: &str) -> Vec<String> {
    // A table's head, a line, and how many more there are.
    let most = most.max(3);
    if lines.len() > most {
        let more = lines.len() - (most - 1);
        lines.truncate(most - 1);
        lines.push(format!("… {more} {what}"));
    }
    lines
}

fn table<const N: usize>(header: &[&str; N], rows: impl Iterator<Item = [String; N]>, right: &[usize]) -> Vec<String> {
    let mut table = show::table(header);
    rows.for_each(|row| _ = table.add_row(row));
    show::text(table, right).lines().map(str::to_owned).collect()
}

/// Returns the frames that a node dropped, by reason, if there were any.
fn drops(name: &str, did: &Did) -> Option<String> {
    let some = did.dropped.iter().filter(|(_, rate)| **rate > 0.0);
    let some: Vec<String> = some.map(|(reason, rate)| format!("{} {reason}", number(*rate))).collect();
    (!some.is_empty()).then(|| format!("{name} drops, a second: {}", some.join(", ")))
}

/// Returns a rate with three significant digits at least, in groups of three.
fn number(rate: f64) -> String {
    if rate > 0.0 && rate < 100.0 {
        return format!("{rate:.1}");
    }
    let digits = format!("{rate:.0}");
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|it| std::str::from_utf8(it).ok()).collect();
    groups.join(",")
}

/// Returns a curve from 0 to its greatest value.
fn curve(values: &VecDeque<f64>) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().copied().fold(0.0, f64::max);
    let level = |value: &f64| {
        LEVELS.into_iter().rfind(|level| {
            let rank = LEVELS.iter().position(|it| it == level).unwrap_or(0);
            rank == 0 || most > 0.0 && value / most >= rate(rank as u64, 8.0)
        })
    };
    values.iter().filter_map(level).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn worker(number: u32, node: &str, is: &str, received: u64) -> Value {
        json!({
            "worker": number, "pid": 100 + number, "node": node, "is": is, "drives": [], "binary": "", "generation": 0,
            "received": received, "sent": received, "missing": 0, "late": 0, "refused": 0, "unconfined": [],
        })
    }

    fn talk(node: &str, other: &str, ring_full: u64) -> Value {
        json!({
            "node": node, "other": other, "sent": 0, "received": 0, "ring_full": ring_full, "over_quota": 0,
            "pool_full": 0, "taken_back": 0, "forged": 0,
        })
    }

    fn moment(at_ms: u64, workers: &[Value], ring_full: u64, relays: u64) -> Moment {
        let node = |name| json!({ "name": name, "work": "echo", "workers": [], "nics": [], "generation": 0 });
        let nic = json!({
            "name": "eth0", "device": "sim", "node": "red", "is": "driven", "epoch": 1, "relays": relays, "pause_ns": 1000 * relays,
        });
        let status = json!({
            "version": "0.1.0", "pid": 7, "up_ms": at_ms, "adopted": 0, "nodes": [node("blue"), node("red")], "nics": [nic],
        });
        let metrics = json!({
            "status": status, "workers": workers, "vnis": [["lan", [talk("blue", "red", ring_full)]]], "last_event": at_ms,
        });
        let event = json!({ "number": at_ms, "at_ms": at_ms, "node": null, "nic": null, "worker": null, "sentence": "it is so" });
        let moment = json!({ "at_ms": at_ms, "metrics": metrics, "cpu_ms": { "7": at_ms / 100, "103": at_ms }, "events": [event] });
        serde_json::from_value(moment).expect("a moment")
    }

    #[test]
    fn a_worker_that_replaces_another_counts_from_nothing() {
        let before = moment(1000, &[worker(3, "red", "drives", 5000), worker(1, "blue", "drives", 10)], 4, 1);
        let now = moment(3000, &[worker(3, "red", "leaves", 5200), worker(4, "red", "drives", 50)], 10, 2);
        let (nodes, daemon) = did(&before, &now);
        assert_eq!((nodes["red"].received, nodes["red"].sent, nodes["red"].cpu), (125.0, 125.0, 100.0));
        assert_eq!((nodes["blue"].received, nodes["blue"].dropped["ring full"], daemon), (0.0, 3.0, 1.0));
        assert_eq!(grown(5, 3), 3, "it has begun anew");
    }

    #[test]
    fn a_wall_clock_that_is_set_between_two_looks_changes_no_rate() {
        let at = |at_ms, clock_ms, received| Moment {
            clock_ms,
            ..moment(at_ms, &[worker(3, "red", "drives", received)], 0, 1)
        };
        let received = |before, now| did(&before, &now).0["red"].received;
        let hour = 3_600_000;
        assert_eq!(received(at(hour, Some(500), 0), at(0, Some(2500), 1000)), 500.0, "set back");
        assert_eq!(received(at(0, Some(500), 0), at(hour, Some(2500), 1000)), 500.0, "set forward");
        assert_eq!(received(at(500, None, 0), at(2500, Some(9), 1000)), 500.0, "an earlier version has recorded it");
        assert_eq!(received(at(500, Some(hour), 0), at(2500, Some(9), 1000)), 500.0, "the machine has booted");
    }

    #[test]
    fn frames_that_a_worker_dropped_are_shown_by_reason() {
        let dropping = |refused: u64, not_own: u64, no_room: u64| {
            let mut worker = worker(3, "red", "drives", 0);
            worker["refused"] = refused.into();
            worker["dropped"] = json!({ "not_own": not_own, "no_room": no_room });
            worker
        };
        let look = |at_ms, worker, ring_full| {
            let mut moment = moment(at_ms, &[worker], 0, 1);
            let (_, talks) = &mut moment.metrics.vnis[0];
            talks.push(serde_json::from_value(talk("red", "blue", ring_full)).unwrap());
            moment
        };
        let drops = |ring_full| {
            let (nodes, _) = did(&look(1000, dropping(9, 5, 2), 0), &look(2000, dropping(40, 15, 20), ring_full));
            drops("red", &nodes["red"]).unwrap()
        };
        // Of 18 for which there was no room, the counts of the VNI have all, some, or more: one for each node of a broadcast.
        assert_eq!(drops(18), "red drops, a second: 10.0 not own, 3.0 refused, 18.0 ring full");
        assert_eq!(drops(20), "red drops, a second: 10.0 not own, 3.0 refused, 20.0 ring full");
        assert_eq!(drops(4), "red drops, a second: 14.0 no room, 10.0 not own, 3.0 refused, 4.0 ring full");
    }

    #[test]
    fn a_picture_shows_it_and_fits() {
        let mut picture = Picture::default();
        assert!(picture.lines((80, 24), "foot").is_empty());
        for (at, relays) in [(1000, 1), (2000, 1), (3000, 2), (4000, 4)] {
            picture.take(moment(at, &[worker(3, "red", "drives", at * at)], at, relays));
        }
        let lines = picture.lines((80, 24), "foot").join("\n");
        println!("{lines}");
        for part in [
            "red   echo  3 drives",
            "7,000,000",
            "blue drops, a second: 1,000 ring full",
            "4000 ns  ▃▅█",
            "▄▆█",
            "it is so",
        ] {
            assert!(lines.contains(part), "{part}\n{lines}");
        }
        for rows in 1..30 {
            let lines = picture.lines((20, rows), "foot");
            assert!(lines.len() <= rows && lines.last().is_some_and(|last| last == "foot"), "{lines:?}");
        }
    }

    #[test]
    fn a_picture_of_many_nodes_has_the_busiest_and_says_that_there_are_more() {
        let nodes: Vec<String> = (0..100).map(|number| format!("n{number}")).collect();
        let mut picture = Picture::default();
        for at in [1000, 2000] {
            let workers = nodes.iter().enumerate().map(|(number, node)| {
                let sleeps = node != "n90";
                worker(u32::try_from(number).unwrap(), node, "drives", if sleeps { 7 } else { at })
            });
            let mut looked = moment(at, &workers.collect::<Vec<_>>(), 0, 1);
            let one = looked.metrics.status.nodes[0].clone();
            let named = |name: &String| NodeView { name: name.clone(), ..one.clone() };
            looked.metrics.status.nodes = nodes.iter().map(named).collect();
            picture.take(looked);
        }
        let lines = picture.lines((80, 24), "foot");
        println!("{}", lines.join("\n"));
        assert!(lines.len() == 24 && lines[3].starts_with("n90 "), "{lines:?}");
        assert!(lines.iter().any(|line| line.ends_with(" nodes more: tasuki status")), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("eth0 ")) && lines[22].contains("it is so"), "{lines:?}");
    }

    #[test]
    fn numbers_and_curves_are_read_at_a_glance() {
        assert_eq!([0.0, 12.34, 999.4, 1_488_095.2].map(number), ["0", "12.3", "999", "1,488,095"]);
        let curve = |values: &[f64]| curve(&values.iter().copied().collect());
        assert_eq!([curve(&[]), curve(&[0.0, 0.0]), curve(&[0.0, 1.0, 8.0])], ["", "▁▁", "▁▂█"].map(str::to_owned));
    }
}
