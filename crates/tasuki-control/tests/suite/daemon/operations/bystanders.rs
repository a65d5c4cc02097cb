//! Nodes that no operation touches, and their numbered traffic: a NIC, native nodes on a VNI of their own and on that of
//! all others, two namespaces, a program on memif with limits that it never reaches, and a virtual machine with two pairs of
//! queues. Nothing of theirs may be lost or doubled, no connection may end, and nothing may be replaced but by an upgrade of
//! all.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::Method;
use rustix::process::Signal;
use serde_json::Value;
use tasuki_control::api::client;

use super::{machine, within};
use crate::daemon::memifs;
use crate::daemon::rig::Rig;
use crate::daemon::rooms::{Exchange, Room};
use crate::daemon::storm::Model;

/// Frames a second of each path: all processors are busy with other things.
const RATE: &str = "300";
/// The names of bystanders begin so.
const OURS: &str = "by-";
/// The nodes that count, and those that send to them: on the VNI of all others, and on their own.
const NATIVES: [(&str, &str, &str); 2] = [("by-sink", "by-source", "lan"), ("by-tub", "by-tap", "still")];
/// Addresses for documentation (RFC 5737), of the namespaces.
const ADDRESSES: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
/// Rest between windows of datagrams or of a program's frames.
const REST: Duration = Duration::from_millis(50);
/// The node with limits, and the limits: hundreds of times its own rate, since what others send to all counts as well.
const LIMITED: &str = "by-memif";
const LIMITS: &str = "{ send = { kpps = 100 }, receive = { kpps = 100 } }";

/// The bystanders, and the programs that send their frames.
pub struct Bystanders {
    socket: PathBuf,
    card: Model,
    rooms: Option<[Room; 2]>,
    talk: Option<Exchange>,
    /// Programs on memif and in the machine, and how many frames they had back at the last look.
    programs: Vec<(&'static str, memifs::Program, u64)>,
    /// Whether the machine's rings are packed.
    is_packed: bool,
    /// Their workers: node and number.
    workers: BTreeSet<(String, u64)>,
    /// What each node of [`NATIVES`] had seen at the last look.
    seen: [u64; NATIVES.len()],
}

impl Bystanders {
    /// Makes all that they need before the daemon begins. With `few`, only the NIC and the native nodes are there.
    pub fn new(folder: &Path, few: bool, is_packed: bool) -> Self {
        let socket = folder.join("by-card.sock");
        let card = Model::start(&socket, &["--source", &u64::MAX.to_string(), "--rate", RATE]);
        let rooms = (!few).then(|| [Room::new(), Room::new()]);
        Bystanders {
            socket,
            card,
            rooms,
            talk: None,
            programs: Vec::new(),
            is_packed,
            workers: BTreeSet::new(),
            seen: Default::default(),
        }
    }

    /// Returns the path of a node's socket.
    fn socket_of(&self, node: &str) -> PathBuf {
        self.socket.with_file_name(format!("{node}.sock"))
    }

    /// Returns their part of a configuration file.
    pub fn text(&self, with_shortcut: bool) -> String {
        let mut text = format!(
            "[[node]]\nname = \"by-nic\"\nwork = \"echo\"\n\n[[nic]]\nname = \"by-eth\"\ndevice = \"vfio-user:{}\"\nnode = \"by-nic\"\nring = 1024\n\n",
            self.socket.display()
        );
        let mut node = |name: &str, vni: &str, work: &str, more: &str| {
            text += &format!("[[node]]\nname = {name:?}\nvni = {vni:?}\nwork = {work}\n{more}\n");
        };
        for (sink, source, vni) in NATIVES {
            let to = format!("02:00:00:00:00:{}", if vni == "lan" { 88 } else { 89 });
            node(sink, vni, "\"sink\"", &format!("mac = {to:?}\n"));
            node(source, vni, &format!("{{ source = {{ to = {to:?}, rate = {RATE} }} }}"), "");
        }
        let Some(rooms) = &self.rooms else { return text };
        for ((name, room), address) in ["by-near", "by-far"].iter().zip(rooms).zip(ADDRESSES) {
            let tap = format!("netns = \"{}\", name = \"lan\", address = \"{address}/24\"", room.path());
            node(name, "lan", &format!("{{ tap = {{ {tap}, shortcut = {with_shortcut} }} }}"), "");
        }
        node("by-echo", "lan", "\"echo\"", "mac = \"02:00:00:00:00:99\"\n");
        let memif =
            format!("{{ memif = {{ socket = {:?}, secret = {:?} }} }}", self.socket_of(LIMITED), memifs::SECRET);
        node(LIMITED, "lan", &memif, &format!("mac = \"02:00:00:00:00:77\"\nlimits = {LIMITS}\n"));
        let vm = format!("{{ vm = {{ socket = {:?} }} }}", self.socket_of("by-vm"));
        node("by-vm", "lan", &vm, "mac = \"02:00:00:00:00:76\"\n");
        text
    }

    /// Returns the names of their nodes and NICs in the daemon's lists.
    pub fn is_one(name: &str) -> bool {
        name.starts_with(OURS)
    }

    /// Begins their traffic, once all of them are there; returns what is wrong.
    pub fn begin(&mut self, rig: &Rig) -> Vec<String> {
        if let Some([near, far]) = &self.rooms {
            let talk = Exchange::resting([(near, ADDRESSES[0]), (far, ADDRESSES[1])], REST);
            talk.goes_on(rig, 30);
            self.talk = Some(talk);
            let program = memifs::Program::resting(&self.socket_of(LIMITED), REST);
            let machine = machine::begin(&self.socket_of("by-vm"), REST, self.is_packed);
            self.programs = vec![("program on memif", program, 0), ("virtual machine", machine, 0)];
        }
        self.workers = workers(rig);
        self.look(rig, false)
    }

    /// Returns what is wrong by now. Workers may be others only if all `were_upgraded`.
    pub fn look(&mut self, rig: &Rig, were_upgraded: bool) -> Vec<String> {
        let mut wrong = Vec::new();
        let now = workers(rig);
        let is_right = if were_upgraded {
            now.iter().map(|(node, _)| node).eq(self.workers.iter().map(|(node, _)| node))
        } else {
            now == self.workers
        };
        if !is_right {
            wrong.push(format!("workers of bystanders are others: {:?} and not {:?}", now, self.workers));
        }
        self.workers = now;
        for ((sink, ..), before) in NATIVES.iter().zip(&mut self.seen) {
            // A gap shows only by a frame after it.
            let seen = |sink| numbers(&rig.dir(), sink).map_or(0, |[seen, ..]| seen);
            if !within(|| seen(sink) > *before + 30) {
                wrong.push(format!("{sink}: no frame comes any more, after {before}"));
            }
            *before = seen(sink);
            match numbers(&rig.dir(), sink) {
                Some([_, 0, 0, _]) => {}
                counts => wrong.push(format!("{sink}: seen, missing, late, next: {counts:?}")),
            }
        }
        for (name, program, before) in &mut self.programs {
            if !within(|| program.has_failed() || program.back() > *before + 30) || program.has_failed() {
                wrong.push(format!(
                    "the bystanders' {name} has failed, or no frame comes back any more, after {before}"
                ));
            }
            *before = program.back();
        }
        let over = self.rooms.as_ref().map(|_| counts(&rig.dir(), LIMITED, "lan", ["dropped_over_rate"]));
        if over.is_some_and(|over| over != Some([0])) {
            wrong.push(format!("{LIMITED}: dropped by a limit that it does not reach: {over:?}"));
        }
        wrong
    }

    /// Ends their traffic; returns their counts, and what is wrong. The daemon is still there.
    pub fn end(&mut self, rig: &Rig) -> (Vec<String>, Vec<String>) {
        let (mut counted, mut wrong) = (Vec::new(), self.look(rig, true));
        if let Some(tally) = self.talk.take().map(Exchange::end) {
            if tally.back != tally.sent || tally.twice + tally.twice_there > 0 {
                wrong.push(format!("datagrams of bystanders: {tally:?}"));
            }
            counted.push(format!("datagrams: {tally:?}"));
        }
        for (name, program, _) in self.programs.drain(..) {
            match program.ends() {
                Ok(tally) if tally.twice == 0 => counted.push(format!("{name}: {tally:?}")),
                said => wrong.push(format!("frames of the bystanders' {name}: {said:?}")),
            }
        }
        for (sink, source, _) in NATIVES {
            let removed = rig.tasuki(&["node", "remove", source]);
            if !removed.status.success() {
                wrong.push(format!("{source} is not to be removed: {}", String::from_utf8_lossy(&removed.stderr)));
            }
            let last = std::cell::Cell::new(None);
            let is_quiet = within(|| {
                let now = numbers(&rig.dir(), sink);
                now.is_some() && last.replace(now) == now
            });
            let all = last.get().filter(|_| is_quiet);
            if all.is_none_or(|[seen, missing, late, next]| (missing, late, seen) != (0, 0, next)) {
                wrong.push(format!("{sink}: seen, missing, late, next: {all:?}"));
            }
            counted.push(format!("{sink}: {all:?}"));
        }
        if let Err(said) = self.card.all_come_back() {
            wrong.push(format!("frames of the bystanders' NIC: {said}"));
        }
        (counted, wrong)
    }

    /// Returns what the card's model counted, once the daemon has ended, and what is wrong with it.
    pub fn card(&mut self) -> (String, Option<String>) {
        // Without a driver it would look at itself only now and then.
        self.card.signal(Signal::TERM);
        let said = self.card.ends().trim().to_owned();
        let is_right = ["lost 0", "twice 0, out of order 0, damaged 0"].iter().all(|part| said.contains(part));
        let wrong = (!is_right).then(|| format!("frames of the bystanders' NIC: {said}"));
        (said, wrong)
    }
}

/// Returns the bystanders' workers: node and number.
fn workers(rig: &Rig) -> BTreeSet<(String, u64)> {
    let listed = client::ask(&rig.dir(), Method::GET, "/v1/workers", None);
    let listed = listed.ok().and_then(|it| it.as_array().cloned()).unwrap_or_default();
    let its = |worker: &Value| Some((worker["node"].as_str()?.to_owned(), worker["worker"].as_u64()?));
    listed.iter().filter_map(its).filter(|(node, _)| Bystanders::is_one(node)).collect()
}

/// Returns a native node's counts of frames: seen, missing, late, the next number.
fn numbers(dir: &Path, sink: &str) -> Option<[u64; 4]> {
    let (_, _, vni) = NATIVES.iter().find(|(its, ..)| *its == sink)?;
    counts(dir, sink, vni, ["numbered", "missing", "late", "next"])
}

/// Returns these counts of a node.
fn counts<const N: usize>(dir: &Path, node: &str, vni: &str, names: [&str; N]) -> Option<[u64; N]> {
    let said = client::ask(dir, Method::GET, &format!("/v1/nics/{node}@{vni}/counts"), None).ok()?;
    let counts = said["counts"].as_array()?;
    let count = |name| counts.iter().find(|count| count[0] == name).and_then(|count| count[1].as_u64());
    names.into_iter().map(count).collect::<Option<Vec<_>>>()?.try_into().ok()
}
