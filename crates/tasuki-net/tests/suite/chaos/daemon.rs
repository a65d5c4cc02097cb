//! The daemon of the nodes: it makes their memory, publishes their addresses, introduces them to each other, and
//! starts a successor on the memory of a killed node.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tasuki_shm::line::LINE_LEN;
use tasuki_shm::line::Line;
use tasuki_shm::region::{Pages, Region, Span, read_only};
use tasuki_shm::vni::directory::{Directory, NodeSet, directory_lines};
use tasuki_shm::vni::node_memory::NodeMemoryFds;
use tasuki_shm::wake::{bell_pipe, open_anew};

use super::lease_page::{Between, LeasePage, NUMBERS, Of};
use super::orders::{Deed, Order};
use super::path::mac;
use crate::process::Other;

/// Role of the process of a node.
pub const NODE: &str = "node";

/// Long enough for anything that is not a hang.
const FOREVER: Duration = Duration::from_secs(60);

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < FOREVER, "waited in vain until {what}");
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Process of a node.
pub struct Process {
    other: Other,
    /// Unique number of this process.
    key: u64,
    pub is_stopped: bool,
}

impl Process {
    fn start(key: u64) -> Self {
        Process { other: Other::start("chaos::child_role", NODE, None), key, is_stopped: false }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.other.process.0)
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("it was not reaped");
    }

    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        self.is_stopped = true;
    }

    pub fn go_on(&mut self) {
        self.signal(Signal::CONT);
        self.is_stopped = false;
    }

    /// Waits for the end of the process, which was ordered.
    fn ends(mut self) {
        let status = self.other.process.0.wait().expect("it is our child");
        assert!(status.success(), "a node that was told to end {status}");
    }
}

/// The daemon's record of a node.
pub struct Member {
    pub number: u16,
    pub id: u32,
    pub pages: u32,
    pub stages: bool,
    pub node_memory: NodeMemoryFds,
    bell_receiver: OwnedFd,
    bell: OwnedFd,
    /// Process that drives the node. `None` after a kill, until another process drives it.
    pub process: Option<Process>,
    /// Number of its killed processes.
    pub kills: u64,
}

impl Member {
    fn own(&self) -> [OwnedFd; 3] {
        let [control, pool] = self.node_memory.fds();
        [control, pool, self.bell_receiver.as_fd()].map(|fd| fd.try_clone_to_owned().expect("a descriptor is left"))
    }

    fn peer_descriptor(&self) -> [OwnedFd; 3] {
        let NodeMemoryFds { control, pool } = self.node_memory.to_read().expect("it can be opened to read");
        [control, pool, open_anew(self.bell.as_fd()).expect("a bell can be opened anew")]
    }

    /// Returns its node memory and its bell receiver, for checks of what is left.
    pub fn give_up(self) -> (u16, u32, NodeMemoryFds, OwnedFd) {
        (self.number, self.pages, self.node_memory, self.bell_receiver)
    }
}

/// A number that can be reused once all nodes have heard that it is free.
struct Freed {
    number: u16,
    /// Nodes that must hear it: node, process that was told, and serial of the order.
    by: Vec<(u32, Option<u64>, u64)>,
}

pub struct Daemon {
    pub lease_page: LeasePage,
    memory: Region,
    directory: Directory<Span<Line>>,
    pub members: Vec<Member>,
    freed: Vec<Freed>,
    serial: u64,
    next_id: u32,
}

impl Daemon {
    pub fn new() -> Self {
        let lines = directory_lines(1000);
        let memory = Region::create("chaos directory", lines * LINE_LEN, Pages::Small).expect("there is memory");
        let directory = Directory::new(memory.span(0, lines).expect("all of it"));
        let freed = (0..NUMBERS).map(|number| Freed { number, by: Vec::new() }).collect();
        Daemon { lease_page: LeasePage::create(), memory, directory, members: Vec::new(), freed, serial: 0, next_id: 0 }
    }

    /// Publishes the set of nodes that get frames for all.
    fn say_who_is_there(&mut self) {
        let mut nodes = NodeSet::default();
        self.members.iter().for_each(|member| nodes.insert(member.number));
        self.directory.set_nodes(&nodes);
    }

    pub fn is_done(&self, number: u16, serial: u64) -> bool {
        self.lease_page.of_node(number, Of::Done).load(SeqCst) >= serial
    }

    /// Sends an order to a node, if it has a process; returns the order's serial.
    pub fn tell(&mut self, at: usize, deed: Deed, about: (u16, u32), fds: &[OwnedFd]) -> u64 {
        self.serial += 1;
        if let Some(process) = &self.members[at].process {
            let order = Order::new(deed, self.serial, about.0, about.1);
            order.send(&process.other.socket, fds);
        }
        self.serial
    }

    /// Returns the next number that no node attributes to another.
    fn number(&mut self) -> Option<u16> {
        let has_heard = |(id, told, serial): &(u32, Option<u64>, u64)| {
            let Some(member) = self.members.iter().find(|member| member.id == *id) else { return true };
            match &member.process {
                Some(process) => Some(process.key) != *told || self.is_done(member.number, *serial),
                None => false,
            }
        };
        let at = self.freed.iter().position(|freed| freed.by.iter().all(has_heard))?;
        Some(self.freed.remove(at).number)
    }

    /// Adds a node, if there is a number for it.
    pub fn join(&mut self, pages: u32, stages: bool, seed: u64) -> bool {
        let Some(number) = self.number() else { return false };
        self.lease_page.clear(number);
        let (bell_receiver, bell) = bell_pipe().expect("a pipe");
        let node_memory = NodeMemoryFds::create(&format!("chaos-{number}"), pages).expect("there is memory");
        self.next_id += 1;
        let id = self.next_id;
        self.members.push(Member {
            number,
            id,
            pages,
            stages,
            node_memory,
            bell_receiver,
            bell,
            process: None,
            kills: 0,
        });
        self.start(self.members.len() - 1, false, seed);
        let us = self.members.len() - 1;
        let mut told = Vec::new();
        for at in 0..us {
            let peer_descriptor = self.members[us].peer_descriptor();
            told.push((at, self.tell(at, Deed::Add, (number, id), &peer_descriptor)));
        }
        // A stopped node hears of it later, and sends it nothing before.
        for (at, serial) in told {
            let member = &self.members[at];
            if member.process.as_ref().is_some_and(|process| !process.is_stopped) {
                eventually("a node has heard of another", || self.is_done(member.number, serial));
            }
        }
        self.directory.add(mac(id), number).expect("the directory has room");
        self.say_who_is_there();
        true
    }

    /// Starts a process for a node. It goes on after a killed or ended one.
    pub fn start(&mut self, at: usize, after_death: bool, seed: u64) {
        self.serial += 1;
        let (key, member) = (self.serial, &self.members[at]);
        let process = Process::start(key);
        let mut fds = Vec::from(member.own());
        fds.push(self.lease_page.fd().try_clone_to_owned().expect("a descriptor is left"));
        fds.push(read_only(self.memory.fd()).expect("it can be opened to read"));
        let order =
            Order { seed, after_death, stages: member.stages, ..Order::new(Deed::Be, key, member.number, member.id) };
        order.send(&process.other.socket, &fds);
        drop(fds);
        let number = member.number;
        self.members[at].process = Some(process);
        eventually("a node is there", || self.is_done(number, key));
        for other in (0..self.members.len()).filter(|other| *other != at) {
            let about = (self.members[other].number, self.members[other].id);
            let peer_descriptor = self.members[other].peer_descriptor();
            self.tell(at, Deed::Add, about, &peer_descriptor);
        }
        let go = self.tell(at, Deed::Go, (0, 0), &[]);
        eventually("a node knows all others", || self.is_done(number, go));
    }

    /// Makes a node kill itself at the step of `deed`. Afterwards no process drives it.
    pub fn have_die(&mut self, at: usize, deed: Deed) {
        self.tell(at, deed, (0, 0), &[]);
        let child = &mut self.members[at].process.as_mut().expect("who is told to die is there").other.process.0;
        eventually("a node has died", || child.try_wait().expect("it is our child").is_some());
        self.kill(at);
    }

    /// Sends SIGKILL to a node. Afterwards no process drives it.
    pub fn kill(&mut self, at: usize) {
        self.members[at].process = None;
        self.members[at].kills += 1;
    }

    /// Ends the process of a node after its last frame.
    pub fn end(&mut self, at: usize) {
        self.tell(at, Deed::End, (0, 0), &[]);
        self.members[at].process.take().expect("who is told to end is there").ends();
    }

    /// Removes a node: first its address, then every other node hears of it.
    pub fn remove(&mut self, at: usize) {
        let gone = self.members.remove(at);
        self.directory.remove(mac(gone.id), gone.number);
        self.say_who_is_there();
        let about = (gone.number, gone.id);
        let by = (0..self.members.len()).map(|at| {
            let serial = self.tell(at, Deed::Remove, about, &[]);
            (self.members[at].id, self.members[at].process.as_ref().map(|process| process.key), serial)
        });
        let by = by.collect();
        self.freed.push(Freed { number: gone.number, by });
    }

    /// Asserts that no node has ended without an order.
    pub fn all_live(&mut self) {
        for member in &mut self.members {
            if let Some(process) = &mut member.process {
                let ended = process.other.process.0.try_wait().expect("it is our child");
                assert_eq!(ended, None, "node {} ({}) has ended", member.number, member.id);
            }
        }
    }

    /// Waits for a condition while all nodes live.
    pub fn until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        eventually(what, || {
            self.all_live();
            condition(self)
        });
    }

    /// Returns the number of frames received by all present nodes.
    pub fn came(&self) -> u64 {
        self.members.iter().map(|member| self.lease_page.of_node(member.number, Of::Came).load(SeqCst)).sum()
    }

    /// Returns how often something was taken back from a node.
    pub fn taken_back_from(&self, to: u16) -> u64 {
        self.members.iter().map(|from| self.lease_page.get(from.number, to, Between::TakenBack)).sum()
    }

    /// Sends all nodes the same order, and waits until they have carried it out.
    pub fn tell_all(&mut self, deed: Deed) {
        let told: Vec<_> =
            (0..self.members.len()).map(|at| (self.members[at].number, self.tell(at, deed, (0, 0), &[]))).collect();
        self.until("all have done as they were told", |daemon| {
            told.iter().all(|(number, serial)| daemon.is_done(*number, *serial))
        });
    }
}
