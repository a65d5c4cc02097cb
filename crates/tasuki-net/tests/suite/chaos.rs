//! Sixty-four nodes, each a process, that send each other frames at random while some join, leave, are killed, stop
//! and are replaced. Each frame carries its path. At the end the accounts of both ends agree, and everything that
//! was held is free again.
//!
//! The test prints its seed; `TASUKI_SEED` replays it, as far as the kernel's scheduler lets it.
//! `TASUKI_CHAOS_SECONDS` sets the duration.

mod daemon;
mod lease_page;
mod node;
mod orders;
mod path;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::fs::SeekFrom;
use tasuki_net::vni::{PIECE_MAX, Vni};
use tasuki_shm::region::PAGE_LEN;
use tasuki_shm::vni::node_memory::NodeMemory;

use crate::process;
use daemon::{Daemon, Member};
use lease_page::{Between, Of, Tally};
use orders::Deed;
use tasuki_testing::{Dice, alone};

/// Most and fewest nodes.
const NODES: usize = 64;
const FEWEST: usize = 40;

/// Number of events, unless `TASUKI_CHAOS_SECONDS` sets a duration.
const EVENTS: u32 = 100;

/// Frames between two events.
const BETWEEN: u64 = 1500;

/// Most nodes that are stopped at a time, and most that no process drives.
const STILL: usize = 2;

#[test]
fn child_role() {
    if process::role().as_deref() == Some(daemon::NODE) {
        node::be(process::socket());
    }
}

/// Chooses the pages of a pool. A staging node gets a small one: only then can the test tell how much the node
/// holds for its next frame.
fn pages(dice: &mut Dice, stages: bool) -> u32 {
    let more = dice.below(if stages { 7 } else { 449 });
    64 + u32::try_from(more).unwrap()
}

struct Story {
    daemon: Daemon,
    dice: Dice,
    /// Number of occurrences of each event.
    told: BTreeMap<&'static str, u32>,
    /// Stopped nodes, and the number of frames taken back from each before.
    still: Vec<(u32, u64)>,
}

impl Story {
    fn new() -> Self {
        let dice = Dice::new("chaos");
        Story { daemon: Daemon::new(), dice, told: BTreeMap::new(), still: Vec::new() }
    }

    fn tell(&mut self, what: &'static str) {
        *self.told.entry(what).or_default() += 1;
    }

    fn place_of(&self, id: u32) -> Option<usize> {
        self.daemon.members.iter().position(|member| member.id == id)
    }

    /// Chooses a node that is driven and not stopped.
    fn one(&mut self) -> usize {
        let is_fit = |member: &Member| member.process.as_ref().is_some_and(|process| !process.is_stopped);
        let fit: Vec<_> = (0..self.daemon.members.len()).filter(|at| is_fit(&self.daemon.members[*at])).collect();
        fit[self.dice.below(fit.len())]
    }

    fn join(&mut self) {
        let stages = self.dice.once_in(3);
        let (pages, seed) = (pages(&mut self.dice, stages), self.dice.next());
        if self.daemon.join(pages, stages, seed) {
            self.tell("joins");
        }
    }

    fn next(&mut self) {
        let few = self.daemon.members.len() < FEWEST;
        match self.dice.below(12) {
            _ if few => self.join(),
            0..4 if self.daemon.members.len() < NODES => self.join(),
            4 | 5 => {
                let at = self.one();
                self.daemon.end(at);
                self.daemon.remove(at);
                self.tell("leaves");
            }
            6 => {
                let at = self.one();
                self.daemon.kill(at);
                self.daemon.remove(at);
                self.tell("killed and removed");
            }
            7 | 8 if self.dead().len() < STILL => {
                let at = self.one();
                match self.dice.below(3) {
                    0 => {
                        self.daemon.kill(at);
                        self.tell("killed");
                    }
                    1 => {
                        self.daemon.have_die(at, Deed::DieReading);
                        self.tell("killed reading");
                    }
                    _ => {
                        self.daemon.have_die(at, Deed::DieSending);
                        self.tell("killed sending");
                    }
                }
            }
            9 | 10 => {
                let (at, seed) = (self.one(), self.dice.next());
                self.daemon.end(at);
                self.daemon.start(at, false, seed);
                self.tell("handed on");
            }
            _ if self.still.len() < STILL => {
                let at = self.one();
                let member = &mut self.daemon.members[at];
                let (id, number) = (member.id, member.number);
                member.process.as_mut().expect("it is driven").stop();
                self.still.push((id, self.daemon.taken_back_from(number)));
                self.tell("stands still");
            }
            _ => {}
        }
        if self.dice.once_in(2) {
            self.revive();
        }
        self.let_go(false);
    }

    fn dead(&self) -> Vec<usize> {
        let members = &self.daemon.members;
        (0..members.len()).filter(|at| members[*at].process.is_none()).collect()
    }

    /// Starts a successor for a node that was killed.
    fn revive(&mut self) {
        if let [at, ..] = self.dead()[..] {
            let seed = self.dice.next();
            self.daemon.start(at, true, seed);
            self.tell("taken over");
        }
    }

    /// Lets nodes go on from which something was taken back while they were stopped; now and then kills one
    /// instead.
    fn let_go(&mut self, all: bool) {
        for (id, before) in std::mem::take(&mut self.still) {
            let Some(at) = self.place_of(id) else { continue };
            if !all && self.daemon.taken_back_from(self.daemon.members[at].number) <= before {
                self.still.push((id, before));
                continue;
            }
            if self.dice.once_in(4) {
                self.daemon.kill(at);
                self.tell("killed standing still");
            } else {
                self.daemon.members[at].process.as_mut().expect("it stood still").go_on();
                self.tell("goes on");
            }
        }
    }

    /// Waits while frames flow.
    fn pass(&mut self) {
        let before = self.daemon.came();
        // A node that leaves takes its counts along.
        self.daemon.until("frames come", |daemon| daemon.came() >= before + BETWEEN);
    }
}

/// Compares the accounts of both ends of a pair.
fn compare(daemon: &Daemon, from: &Member, to: &Member) -> Result<[u64; 5], String> {
    let get = |what| daemon.lease_page.get(from.number, to.number, what);
    let (one, all) = (get(Between::One), get(Between::All));
    let [came_one, came_all] = [Between::CameOne, Between::CameAll].map(|what| Tally::of(get(what)));
    let (late, doubtful, taken_back) = (get(Between::Late), get(Between::Doubtful), get(Between::TakenBack));
    let (sent, came) = (one + all, u64::from(came_one.count) + u64::from(came_all.count));
    let is_right = match (from.kills, to.kills) {
        (0, 0) if late == 0 => (one, all) == (came_one.count.into(), came_all.count.into()),
        (0, 0) => came + late == sent,
        // A reader's successor also finds taken back what its predecessor had read. A killed sender does not
        // report which nodes had already received its last frame for all.
        _ => came + late + doubtful >= sent && came <= sent + from.kills,
    };
    if is_right && (late == 0 || taken_back > 0) {
        return Ok([sent, came, late, taken_back, get(Between::Again)]);
    }
    Err(format!(
        "from {} to {} ({} and {} killed): {one} and {all} sent, {doubtful} in doubt, {came_one:?} and {came_all:?} came, {late} late, taken back {taken_back} times",
        from.number, to.number, from.kills, to.kills
    ))
}

/// Waits until everything has been read, and the accounts of all pairs agree.
fn settle(daemon: &mut Daemon) {
    let pairs = |daemon: &Daemon| {
        let members = &daemon.members;
        let pairs = members.iter().flat_map(|from| members.iter().map(move |to| (from, to)));
        pairs
            .filter(|(from, to)| from.id != to.id)
            .map(|(from, to)| compare(daemon, from, to))
            .collect::<Result<Vec<_>, _>>()
    };
    let start = Instant::now();
    while let Err(wrong) = pairs(daemon) {
        assert!(start.elapsed() < Duration::from_secs(60), "{wrong}");
        daemon.all_live();
        std::thread::sleep(Duration::from_millis(5));
    }
    let of_pairs = pairs(daemon).expect("just seen");
    let sum = |what: usize| of_pairs.iter().map(|pair| pair[what]).sum::<u64>();
    let [sent, came, late, taken_back, again] = [0, 1, 2, 3, 4].map(sum);
    println!(
        "{} pairs that are left: {sent} frames sent, {came} came, {late} too late, after {taken_back} times that all was taken back; {again} came twice",
        of_pairs.len()
    );
}

/// Returns the bytes of control memory that the kernel has allocated.
fn allocated(member: &Member) -> u64 {
    let stat = rustix::fs::fstat(&member.node_memory.control).unwrap();
    u64::try_from(stat.st_blocks).unwrap() * 512
}

/// Returns the allocated pages of a node's control memory, whether each has nonzero bytes, and the node's marks
/// of the nodes it talks to.
fn pages_of(member: &Member) -> (Vec<(u64, bool)>, Vec<u8>) {
    let (mut pages, mut at, memory) = (Vec::new(), 0, &member.node_memory.control);
    while let Ok(data) = rustix::fs::seek(memory, SeekFrom::Data(at)) {
        let mut bytes = vec![0; PAGE_LEN];
        rustix::io::pread(memory, &mut bytes[..], data).unwrap();
        pages.push((data / PAGE_LEN as u64, bytes.iter().any(|byte| *byte != 0)));
        at = data + PAGE_LEN as u64;
    }
    let mut talks = vec![0; 16];
    rustix::io::pread(memory, &mut talks[..], 128).unwrap();
    (pages, talks)
}

/// Memory of a silent node: the bell, counters and the generations of 512 pages; and a line for each other node
/// that exists or existed, in whole pages.
fn of_a_silent_node() -> u64 {
    let lines = u64::from(lease_page::NUMBERS) * 64;
    PAGE_LEN as u64 + lines.next_multiple_of(PAGE_LEN as u64)
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the descriptors of a node's process and its mappings of node memories, without those of its
/// neighbours.
fn of_itself(daemon: &Daemon, member: &Member) -> (usize, usize) {
    let others = daemon.members.len() - 1;
    let folder = format!("/proc/{}", member.process.as_ref().expect("it is driven").pid().as_raw_nonzero());
    let files = std::fs::read_dir(format!("{folder}/fd")).unwrap().count();
    let maps = std::fs::read_to_string(format!("{folder}/maps")).unwrap();
    let node_memories = maps.lines().filter(|line| line.contains("memfd:chaos-")).count();
    (files - others, node_memories - 2 * others)
}

#[test]
fn sixty_four_nodes_that_come_and_go_lose_no_page_and_mix_up_no_frame() {
    if !alone(sixty_four_nodes_that_come_and_go_lose_no_page_and_mix_up_no_frame) {
        return;
    }
    let files = open_files();
    let mut story = Story::new();
    while story.daemon.members.len() < NODES {
        story.join();
    }
    let (start, seconds) = (Instant::now(), std::env::var("TASUKI_CHAOS_SECONDS").ok());
    let until = seconds.map(|seconds| start + Duration::from_secs(seconds.parse().expect("a number of seconds")));
    let mut events = 0;
    while until.map_or(events < EVENTS, |until| Instant::now() < until) {
        story.next();
        // Now and then the next event happens at once.
        if !story.dice.once_in(4) {
            story.pass();
        }
        events += 1;
    }
    story.let_go(true);
    while !story.dead().is_empty() {
        story.revive();
    }
    println!("{events} events in {:?}: {:?}", start.elapsed(), story.told);
    let Story { mut daemon, .. } = story;
    daemon.tell_all(Deed::Quiesce);
    settle(&mut daemon);
    daemon.tell_all(Deed::Rest);
    // A node may hold its last frame for all, or room for the next staged one: as much as the longest frame
    // takes.
    let held = u64::try_from(PIECE_MAX.div_ceil(PAGE_LEN)).unwrap();
    let lack = |member: &Member| {
        let rested = daemon.lease_page.of_node(member.number, Of::Rested).load(SeqCst);
        rested.checked_sub(1).map(|left| i64::from(member.pages) - i64::try_from(left + held).unwrap())
    };
    let start = Instant::now();
    while let Some(member) = daemon.members.iter().find(|member| lack(member) != Some(0)) {
        let (number, lack) = (member.number, lack(member));
        assert!(start.elapsed() < Duration::from_secs(60), "node {number} lacks {lack:?} pages");
        std::thread::sleep(Duration::from_millis(5));
    }
    for member in &daemon.members {
        let (number, kills, start) = (member.number, member.kills, Instant::now());
        while allocated(member) > of_a_silent_node() {
            let pages = pages_of(member);
            let waits = start.elapsed() < Duration::from_secs(20);
            assert!(waits, "node {number}, of which {kills} were killed, has pages {pages:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let of_all = daemon.members.iter().map(|member| of_itself(&daemon, member)).collect::<Vec<_>>();
    assert!(of_all.iter().all(|of_one| of_one == &of_all[0] && of_one.1 == 2), "{of_all:?}");
    (0..daemon.members.len()).for_each(|at| daemon.end(at));
    for member in std::mem::take(&mut daemon.members) {
        let (number, pages, node_memory, bell_receiver) = member.give_up();
        let mut vni = Vni::new(number, NodeMemory::adopt(node_memory).unwrap(), bell_receiver);
        vni.settle();
        assert_eq!(vni.pages_left(), pages, "a successor of node {number} finds every page free");
    }
    drop(daemon);
    assert_eq!(open_files(), files, "no descriptor is left");
}
