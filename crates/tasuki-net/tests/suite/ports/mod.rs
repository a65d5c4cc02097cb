//! A suite for every kind of node beside every other: it checks the guarantees for frames on their way from program
//! to program. All nodes are in one thread, where the test gives each turn.

pub mod cases;
mod connected;
mod native;
mod tap_end;

use std::time::{Duration, Instant};

use tasuki_net::endpoint::{Bridge, Dropped, Endpoint};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::vni::Vni;
use tasuki_shm::line::Claims;
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet};

use crate::memif::client::Client;
use crate::memif::port::{Lines, directory_memory, mac};
use crate::net::Net;
use crate::vm::Machine;
use crate::wait::any_readable;
use tasuki_testing::PATIENCE;

/// How programs reach their node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The program is the node: it uses the library.
    Native,
    /// By an interface in their namespace.
    Tap,
    /// By rings in their memory.
    Memif,
    /// By an interface that its kernel has already.
    Link,
    /// By the virtqueues of a virtual machine.
    Vm,
}

/// Counts of frames that a node did not forward, or did not deliver to its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lost {
    /// The destination node had no room.
    pub no_room: u64,
    /// No node has the destination address.
    pub nobody: u64,
    /// The length is invalid. (A namespace's kernel refuses such a frame.)
    pub length: u64,
    /// No program was attached.
    pub away: u64,
    /// The node's program sent it with a source address that is not the node's own.
    pub not_own: u64,
    /// Another node's worker sent it with a source address that is not its own.
    pub forged: u64,
    /// Its offload header contradicts the frame, or would have receivers write what was checked.
    pub malformed: u64,
}

impl Lost {
    /// Takes an endpoint's counts; panics if one is counted that no case expects.
    pub fn of(dropped: Dropped) -> Lost {
        let Dropped { no_room, nobody, length, away, not_own, forged, .. } = dropped;
        let malformed = dropped.malformed + dropped.refused;
        assert_eq!(dropped.sum(), no_room + nobody + length + away + not_own + forged + malformed, "{dropped:?}");
        Lost { no_room, nobody, length, away, not_own, forged, malformed }
    }
}

/// Returns whether an armed node wakes within this time: by its bell, by its programs, or at the end of a nap in which it is
/// deaf to one of them.
fn is_woken<E: Endpoint + ?Sized>(node: &Bridge<E>, within: Duration) -> bool {
    let heard: Vec<_> = [node.bell(), node.source()].into_iter().flatten().collect();
    let nap = node.waits().filter(|nap| heard.len() < 2 && *nap < within);
    any_readable(&heard, nap.unwrap_or(within)) || nap.is_some()
}

/// A node and the program behind it.
pub trait End {
    /// Sends as the program; returns false if the program has to wait, or learns that the frame is invalid.
    fn send(&mut self, frame: &[u8]) -> bool;

    /// Reads all frames for the program.
    fn receive(&mut self) -> Vec<Vec<u8>>;

    /// Gives the node a turn, as if it had been woken; returns how many frames moved.
    fn turn(&mut self) -> usize;

    /// Prepares the node for sleep, with a last look for work.
    fn arm(&mut self) -> Armed;

    /// Returns whether an armed node is woken in time.
    fn is_woken(&self, within: Duration) -> bool;

    fn lost(&self) -> Lost;

    fn vni(&mut self) -> &mut Vni;

    /// Ends the worker; returns the rest of the node. The worker is told to end, or killed.
    fn end(self: Box<Self>, told: bool) -> Box<dyn Rest>;
}

/// The parts of a node that outlive its worker, other than the node memory.
pub trait Rest {
    fn succeed(self: Box<Self>, vni: Vni, switch: Switch) -> Box<dyn End>;
}

pub struct World {
    net: Net,
    lines: Lines,
    directory: Directory<Lines>,
    ends: Vec<Option<Box<dyn End>>>,
    /// Nodes that get no turns.
    pub still: Vec<usize>,
    /// Frames received by each node's program.
    pub came: Vec<Vec<Vec<u8>>>,
}

impl World {
    /// Makes a node of each of these kinds. Where that is impossible, prints a sentence and returns `None`.
    pub fn new(kinds: &[Kind]) -> Option<Self> {
        if kinds.iter().any(|kind| matches!(kind, Kind::Tap | Kind::Link)) && !crate::place::is_possible() {
            return None;
        }
        let count = u16::try_from(kinds.len()).expect("few nodes");
        let lines = directory_memory();
        let mut directory = Directory::new(lines.clone());
        (0..count).for_each(|node| directory.add(mac(node), node).expect("there is room"));
        directory.set_nodes(&set(0..count));
        let mut world = World {
            net: Net::of(count),
            lines,
            directory,
            ends: Vec::new(),
            still: Vec::new(),
            came: vec![Vec::new(); kinds.len()],
        };
        for (number, kind) in kinds.iter().enumerate() {
            let short = u16::try_from(number).expect("few nodes");
            let vni = if *kind == Kind::Vm { world.net.take_exact(short) } else { world.net.take(number) };
            let switch = world.switch(number);
            world.ends.push(Some(match kind {
                Kind::Native => Box::new(native::Native::new(vni, switch)),
                Kind::Tap => Box::new(tap_end::TapEnd::with_tap(vni, switch)?),
                Kind::Link => Box::new(tap_end::TapEnd::with_packets(vni, switch)?),
                Kind::Memif => Box::new(connected::Connected::<Client>::new(vni, switch)),
                Kind::Vm => Box::new(connected::Connected::<Machine>::new(vni, switch)),
            }));
        }
        Some(world)
    }

    fn switch(&self, number: usize) -> Switch {
        let number = u16::try_from(number).expect("few nodes");
        Switch::new(number, Lookup::new(Claims::of(self.lines.clone())))
    }

    pub fn end(&mut self, node: usize) -> &mut dyn End {
        self.ends[node].as_mut().expect("it is there").as_mut()
    }

    pub fn set_uplinks(&mut self, uplinks: &[u16]) {
        self.directory.set_uplinks(&set(uplinks.iter().copied()));
    }

    /// Replaces a node's worker, which is told to end or killed.
    pub fn replace(&mut self, node: usize, told: bool) {
        let rest = self.ends[node].take().expect("it is there").end(told);
        self.net.replace(node);
        let (vni, switch) = (self.net.take(node), self.switch(node));
        self.ends[node] = Some(rest.succeed(vni, switch));
    }

    /// Gives each driven node a turn; its program reads its frames.
    pub fn round(&mut self) -> usize {
        let mut moved = 0;
        for node in 0..self.ends.len() {
            if !self.still.contains(&node) {
                moved += self.end(node).turn();
                let came = self.end(node).receive();
                self.came[node].extend(came);
            }
        }
        moved
    }

    /// Gives turns until `holds` returns true.
    pub fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !holds(self) {
            self.round();
            let came: Vec<_> = self.came.iter().map(Vec::len).collect();
            assert!(start.elapsed() < PATIENCE, "waited in vain until {what}; {came:?} frames have come");
        }
    }

    /// Sends a frame as a node's program, as soon as possible.
    pub fn send(&mut self, from: usize, frame: &[u8]) {
        self.until("a frame is taken", |world| world.end(from).send(frame));
    }

    /// Gives turns until no frame moves any more.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 3 {
            quiet = if self.round() == 0 { quiet + 1 } else { 0 };
        }
    }

    /// Waits until `count` frames have come to a node, and for further ones that should not come; returns them all.
    pub fn take(&mut self, node: usize, count: usize) -> Vec<Vec<u8>> {
        self.until(&format!("{count} frames have come to node {node}"), |world| world.came[node].len() >= count);
        self.settle();
        std::mem::take(&mut self.came[node])
    }
}

fn set(nodes: impl IntoIterator<Item = u16>) -> NodeSet {
    let mut set = NodeSet::default();
    nodes.into_iter().for_each(|node| set.insert(node));
    set
}

/// Generates the tests for one pair of kinds: of the cases that depend on both, or of some.
macro_rules! suite {
    ($name:ident, $from:expr, $to:expr) => {
        suite!($name, $from, $to;
            frames_of_all_lengths_arrive_whole_and_in_order
            a_burst_longer_than_a_ring_arrives_in_order
            a_frame_for_several_reaches_all_others_once
            a_vlan_tag_is_carried_untouched
            a_node_that_is_not_driven_holds_up_nobody_else
            a_frame_for_several_for_which_none_has_room_is_not_sent
            a_successor_loses_nothing
            an_idle_node_is_woken_by_a_frame
        );
    };
    ($name:ident, $from:expr, $to:expr; $($case:ident)*) => {
        mod $name {
            use $crate::ports::{Kind, cases};
            const PAIR: [Kind; 2] = [$from, $to];

            $(#[test]
            fn $case() {
                cases::$case(PAIR);
            })*
        }
    };
}

/// Generates the tests of what the sender alone decides, or the receiver, for a kind. The other end is native.
macro_rules! suite_of_one_end {
    ($from:ident, $to:ident, $kind:expr) => {
        suite!($from, $kind, Kind::Native;
            a_frame_for_a_stranger_goes_to_uplinks_or_nowhere
            what_is_no_frame_is_refused_and_counted
            a_program_that_sends_in_anothers_address_is_not_heard
        );
        suite!($to, Kind::Native, $kind;
            a_frame_for_a_stranger_goes_to_uplinks_or_nowhere
            a_worker_that_sends_in_anothers_address_is_not_heard
            a_worker_that_sends_in_anothers_address_of_ip_is_not_heard
            an_uplink_sends_in_nobodys_address_and_in_no_nodes
        );
    };
}

suite_of_one_end!(from_native, to_native, Kind::Native);
suite_of_one_end!(from_tap, to_tap, Kind::Tap);
suite_of_one_end!(from_link, to_link, Kind::Link);
suite_of_one_end!(from_memif, to_memif, Kind::Memif);
suite_of_one_end!(from_vm, to_vm, Kind::Vm);
suite!(native_to_native, Kind::Native, Kind::Native);
suite!(native_to_tap, Kind::Native, Kind::Tap);
suite!(native_to_memif, Kind::Native, Kind::Memif);
suite!(tap_to_native, Kind::Tap, Kind::Native);
suite!(tap_to_tap, Kind::Tap, Kind::Tap);
suite!(tap_to_memif, Kind::Tap, Kind::Memif);
suite!(memif_to_native, Kind::Memif, Kind::Native);
suite!(memif_to_tap, Kind::Memif, Kind::Tap);
suite!(memif_to_memif, Kind::Memif, Kind::Memif);
suite!(link_to_native, Kind::Link, Kind::Native);
suite!(link_to_tap, Kind::Link, Kind::Tap);
suite!(link_to_memif, Kind::Link, Kind::Memif);
suite!(link_to_link, Kind::Link, Kind::Link);
suite!(native_to_link, Kind::Native, Kind::Link);
suite!(tap_to_link, Kind::Tap, Kind::Link);
suite!(memif_to_link, Kind::Memif, Kind::Link);
suite!(vm_to_native, Kind::Vm, Kind::Native);
suite!(vm_to_tap, Kind::Vm, Kind::Tap);
suite!(vm_to_memif, Kind::Vm, Kind::Memif);
suite!(vm_to_link, Kind::Vm, Kind::Link);
suite!(vm_to_vm, Kind::Vm, Kind::Vm);
suite!(native_to_vm, Kind::Native, Kind::Vm);
suite!(tap_to_vm, Kind::Tap, Kind::Vm);
suite!(memif_to_vm, Kind::Memif, Kind::Vm);
suite!(link_to_vm, Kind::Link, Kind::Vm);
