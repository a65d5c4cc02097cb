//! Finds the node that a frame goes to, from its destination address.
//!
//! The daemon records in a [directory] which node has which address; every worker reads it. An address that is not in
//! the directory lies behind an uplink: a node with other stations behind it (a bridge, or a NIC). Each node learns
//! from the frames it receives which uplink that is.
//!
//! # Rules
//!
//! - **W1** The directory decides: no node can take an address that the directory gives to another. Of nodes that share
//!   an address, each gets the frames of other flows; they send nothing to each other.
//! - **W2** A node learns addresses only from nodes that the directory calls uplinks. An uplink whose worker checks its
//!   frames (all but one with a NIC) also learns those of its own side, so that frames between them do not leave it.
//! - **W3** A node sends only from addresses that the directory gives to it. An uplink has others behind it: it may
//!   also send from an address that the directory gives to no node. The receiver checks this on its own copy and passes
//!   on the bytes it checked, because a sender's worker may write anything into its ring and its pool at any time.
//! - **W4** No frame crosses to an address that is reserved for a single link (IEEE 802.1Q-2018, 8.6.3): PAUSE, spanning
//!   tree, LACP, LLDP. A node could stop all that comes to an uplink's card, or have a switch shut its port.
//!
//! [directory]: tasuki_shm::vni::directory

use std::collections::HashMap;
use std::ops::Deref;
use std::time::{Duration, Instant};

use tasuki_shm::line::Line;
use tasuki_shm::region::Span;
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::directory::{Lookup, Mac, NodeSet, OWNERS_MAX};

use crate::own::CHECKED_MAX;
use crate::vni::Incoming;

/// How long a node remembers a learnt address after it last saw it, from IEEE 802.1Q-2018, 8.8.3.
pub const AGEING: Duration = Duration::from_secs(300);

/// Maximum number of learnt addresses.
pub const LEARNT_MAX: usize = 4096;

/// Destination of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum To {
    /// The node with this number.
    Node(u16),
    /// One of these nodes, by the frame's [flow](crate::flow).
    OneOf(Owners),
    /// All nodes except this one.
    All,
    /// All uplinks except this node: the address is unknown.
    Uplinks,
    /// No node: the address is on this node's own side, reserved for a link, or unknown and there is no uplink.
    Nobody,
}

/// Nodes that share an address, lowest number first: each drives a queue of one interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owners {
    nodes: [u16; OWNERS_MAX],
    count: usize,
}

impl Owners {
    fn of(all: impl Iterator<Item = u16>) -> Self {
        let mut owners = Owners { nodes: [u16::MAX; OWNERS_MAX], count: 0 };
        for (place, node) in owners.nodes.iter_mut().zip(all) {
            *place = node;
            owners.count += 1;
        }
        owners.nodes.sort_unstable();
        owners
    }

    /// Returns the nodes.
    pub fn all(&self) -> &[u16] {
        &self.nodes[..self.count]
    }

    /// Returns the node that gets the frames of a flow.
    pub fn of_flow(&self, flow: u32) -> u16 {
        // By the high bits: a guest chooses its ring by the low ones.
        let which = (u64::from(flow) * self.count as u64) >> 32;
        self.nodes[usize::try_from(which).expect("less than their count")]
    }
}

/// What a node knows about addresses and their nodes. `M` is the memory of the directory.
#[derive(Debug)]
pub struct Switch<M = Span<Line>> {
    us: u16,
    /// Our address, if other nodes may share it.
    shared: Option<Mac>,
    directory: Lookup<M>,
    /// Version of the directory that the cached fields below come from.
    version: u64,
    last: Option<(Mac, To)>,
    nodes: NodeSet,
    uplinks: NodeSet,
    /// Whether this node is an uplink.
    is_uplink: bool,
    /// For each node, the address that the directory last confirmed as the node's own, as a [number](number_of).
    own: Box<[u64]>,
    /// For each uplink, the source address that was accepted last; for this node, the one that it sent from last. Forgotten
    /// when addresses are [aged](Self::age), so that `learnt` knows which are still seen.
    passing: Box<[u64]>,
    learnt: HashMap<Mac, (u16, Instant)>,
    /// Addresses of this node's own side, if it is an uplink, and when they were seen last. An address can be on two sides, in
    /// two VLANs: then the other side counts.
    own_side: HashMap<Mac, Instant>,
    /// First bytes of the frame that was admitted last.
    front: Box<[u8; CHECKED_MAX]>,
}

/// Number of an address that no node owns: a group address.
const NONE: u64 = number_of([0xff; 6]);

/// Returns an address as a number.
const fn number_of(mac: Mac) -> u64 {
    let [a, b, c, d, e, f] = mac;
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

/// Returns the address that a number stands for.
fn address_of(number: u64) -> Mac {
    let [mac @ .., _, _] = number.to_le_bytes();
    mac
}

/// Returns whether this is the number of an address that is reserved for a link (W4), 01:80:c2:00:00:00 to :0f. Higher bytes
/// do not count.
#[inline]
const fn is_for_link(number: u64) -> bool {
    number & 0xf0ff_ffff_ffff == number_of([0x01, 0x80, 0xc2, 0, 0, 0])
}

/// Number of first bytes of a frame that hold its two addresses.
pub const ADDRESSES_LEN: usize = 12;

/// The two addresses of a frame, as they were read, in registers: a load of another width would stall the CPU's store
/// forwarding (`tasuki_shm::region::copy`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    /// Bytes 0 to 7, little-endian.
    pub(crate) first: u64,
    /// Bytes 8 to 11, little-endian.
    pub(crate) rest: u32,
}

impl Addresses {
    /// Takes the addresses out of checked bytes, if they are no more than those.
    #[inline]
    pub(crate) fn of(front: &CheckedPrefix) -> Option<Self> {
        let (first, rest) = front.split_first_chunk()?;
        let rest = <[u8; ADDRESSES_LEN - 8]>::try_from(rest).ok()?;
        Some(Addresses { first: u64::from_le_bytes(*first), rest: u32::from_le_bytes(rest) })
    }

    /// Returns the number of the source address.
    fn source(self) -> u64 {
        self.first >> 48 | u64::from(self.rest) << 16
    }
}

/// The first bytes of a frame, in the receiver's memory, where it checked them: the sender can still change its own.
pub type CheckedPrefix = [u8];

impl<M: Deref<Target = [Line]>> Switch<M> {
    /// Makes the switch of node `us`.
    pub fn new(us: u16, directory: Lookup<M>) -> Self {
        let nodes = NodeSet::default();
        let own = vec![NONE; NODES_MAX.into()].into_boxed_slice();
        let passing = own.clone();
        let (uplinks, learnt, own_side) = (nodes, HashMap::new(), HashMap::new());
        let mut switch = Switch {
            us,
            shared: None,
            directory,
            version: 0,
            last: None,
            nodes,
            uplinks,
            is_uplink: false,
            own,
            passing,
            learnt,
            own_side,
            front: Box::new([0; CHECKED_MAX]),
        };
        switch.look();
        switch
    }

    /// Sends nothing to the nodes that share this address, which is ours.
    #[must_use]
    pub fn sharing(mut self, mac: Option<Mac>) -> Self {
        self.shared = mac;
        self.look();
        self
    }

    /// Returns whether the directory shows our address, if other nodes may share it. Those that receive from us go by it.
    pub fn is_shown(&mut self) -> bool {
        self.shared.is_none_or(|mac| self.may_send(mac))
    }

    fn look(&mut self) {
        self.version = self.directory.version();
        (self.nodes, self.uplinks) = (self.directory.nodes(), self.directory.uplinks());
        self.is_uplink = self.uplinks.contains(self.us);
        self.nodes.remove(self.us);
        self.uplinks.remove(self.us);
        let alike = self.shared.into_iter().flat_map(|mac| self.directory.owners(mac));
        alike.for_each(|node| self.nodes.remove(node));
        self.last = None;
        self.own.fill(NONE);
        self.passing.fill(NONE);
    }

    /// Returns the destination of a frame to this address.
    #[inline]
    pub fn find(&mut self, mac: Mac) -> To {
        if self.directory.version() != self.version {
            self.look();
        }
        match self.last {
            Some((last, to)) if last == mac => to,
            _ => self.find_anew(mac),
        }
    }

    fn find_anew(&mut self, mac: Mac) -> To {
        let is_group = mac[0] & 1 == 1;
        let to = match self.directory.find(mac) {
            _ if is_for_link(number_of(mac)) => To::Nobody,
            _ if is_group => To::All,
            Some((_, true)) => self.one_of(mac),
            Some((node, false)) if node == self.us => To::Nobody,
            Some((node, false)) => To::Node(node),
            None => match self.learnt.get(&mac) {
                Some((node, _)) if self.uplinks.contains(*node) => To::Node(*node),
                _ if self.uplinks == NodeSet::default() => To::Nobody,
                _ if self.is_uplink && self.own_side.contains_key(&mac) => To::Nobody,
                _ => To::Uplinks,
            },
        };
        self.last = Some((mac, to));
        to
    }

    /// Returns the destination of a frame to an address that several nodes share.
    #[cold]
    fn one_of(&self, mac: Mac) -> To {
        let owners = Owners::of(self.directory.owners(mac));
        match owners.all() {
            nodes if nodes.contains(&self.us) => To::Nobody,
            [node] => To::Node(*node),
            // They may have gone meanwhile.
            [] => To::Nobody,
            [_, ..] => To::OneOf(owners),
        }
    }

    /// Returns the first bytes of a received frame if its sender may send it (W3), and learns its source address. The
    /// caller passes these bytes on, not the ones in the sender's memory.
    #[inline]
    pub fn admits(&mut self, incoming: &Incoming<'_>) -> Option<&CheckedPrefix> {
        let addresses = incoming.front()?;
        if is_for_link(addresses.first) {
            return None;
        }
        if !incoming.own.is_empty() {
            return self.admits_by_ip(incoming);
        }
        if !self.may_be_from(addresses.source(), incoming.from) {
            return None;
        }
        self.front[..8].copy_from_slice(&addresses.first.to_le_bytes());
        self.front[8..ADDRESSES_LEN].copy_from_slice(&addresses.rest.to_le_bytes());
        Some(&self.front[..ADDRESSES_LEN])
    }

    /// Like [`admits`](Self::admits), for a node whose IP addresses are known.
    #[cold]
    fn admits_by_ip(&mut self, incoming: &Incoming<'_>) -> Option<&CheckedPrefix> {
        // Copy the checked bytes once, and only those: the source must not change between the check and the use.
        let len = incoming.copy_front(&mut self.front[..]);
        let from = number_of(source(self.front.first_chunk().expect("it has room for more")));
        let may = self.may_be_from(from, incoming.from) && incoming.own.may_send(&self.front[..len]);
        (may && !is_for_link(first_of(&self.front[..]))).then_some(&self.front[..len])
    }

    /// Like [`admits`](Self::admits), for a frame that was copied into our own memory, from byte 0 on.
    #[inline]
    pub fn admits_copy(&mut self, frame: &[u8], incoming: &Incoming<'_>) -> bool {
        frame.first_chunk().is_some_and(|front| self.may_be_from(number_of(source(front)), incoming.from))
            && !is_for_link(first_of(frame))
            && incoming.own.may_send(&frame[..frame.len().min(CHECKED_MAX)])
    }

    /// Returns whether the programs of this node may send from this address (W3). A malicious worker skips this check;
    /// its receivers check too.
    #[inline]
    pub fn may_send(&mut self, from: Mac) -> bool {
        self.may_be_from(number_of(from), self.us)
    }

    #[inline]
    fn may_be_from(&mut self, mac: u64, node: u16) -> bool {
        if self.directory.version() != self.version {
            self.look();
        }
        // A group address never matches.
        let known = [&self.own, &self.passing].map(|of| of[usize::from(node)]);
        (known.contains(&mac) && mac != NONE) || self.may_be_anew(address_of(mac), node)
    }

    #[cold]
    fn may_be_anew(&mut self, mac: Mac, node: u16) -> bool {
        if mac[0] & 1 == 1 {
            return false;
        }
        match self.directory.find(mac) {
            Some((owner, _)) if owner == node => self.own[usize::from(node)] = number_of(mac),
            Some((_, true)) if self.directory.owners(mac).any(|owner| owner == node) => {
                self.own[usize::from(node)] = number_of(mac);
            }
            Some(_) => return false,
            None if node == self.us && self.is_uplink => {
                let has_room = self.own_side.len() < LEARNT_MAX || self.own_side.contains_key(&mac);
                // With no other uplink, an unknown address is nobody's anyway.
                if has_room && self.uplinks != NodeSet::default() {
                    self.own_side.insert(mac, Instant::now());
                    self.last = None;
                }
                self.passing[usize::from(node)] = number_of(mac);
            }
            None if self.uplinks.contains(node) => {
                self.learn(mac, node, Instant::now());
                self.passing[usize::from(node)] = number_of(mac);
            }
            None => return false,
        }
        true
    }

    /// Learns the address of a frame that an uplink sent from an address that the directory gives to no node (W1, W2).
    fn learn(&mut self, mac: Mac, node: u16, now: Instant) {
        if self.learnt.len() >= LEARNT_MAX && !self.learnt.contains_key(&mac) {
            return;
        }
        let before = self.learnt.insert(mac, (node, now)).map(|(before, _)| before);
        if before != Some(node) {
            self.last = None;
            // The station has moved: if it moves back, that is to be learnt.
            before.into_iter().for_each(|before| self.passing[usize::from(before)] = NONE);
        }
    }

    /// Forgets learnt addresses that are too old, and reads changes of the directory even if nothing is sent. Call it
    /// from time to time.
    pub fn age(&mut self, now: Instant) {
        if self.directory.version() != self.version {
            self.look();
        }
        let is_recent = |seen: &Instant| now.saturating_duration_since(*seen) < AGEING;
        self.learnt.retain(|_, (_, seen)| is_recent(seen));
        self.own_side.retain(|_, seen| is_recent(seen));
        self.passing.fill(NONE);
        self.last = None;
    }

    /// Returns the nodes of a destination that covers several; for any other, none.
    pub fn nodes_of(&self, to: To) -> NodeSet {
        match to {
            To::All => self.nodes,
            To::Uplinks => self.uplinks,
            To::Node(_) | To::OneOf(_) | To::Nobody => NodeSet::default(),
        }
    }
}

/// Returns the first eight bytes of a frame, little-endian.
#[inline]
fn first_of(frame: &[u8]) -> u64 {
    frame.first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
}

/// Returns the source address that a frame states.
#[inline]
fn source(front: &[u8; ADDRESSES_LEN]) -> Mac {
    let [.., a, b, c, d, e, f] = *front;
    [a, b, c, d, e, f]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;
    use tasuki_shm::line::Claims;
    use tasuki_shm::vni::directory::{Directory, directory_lines};

    type Lines = Arc<[Line]>;

    fn pair(us: u16) -> (Directory<Lines>, Switch<Lines>) {
        let lines: Lines = (0..directory_lines(64)).map(|_| Line::default()).collect();
        let directory = Directory::new(Arc::clone(&lines));
        (directory, Switch::new(us, Lookup::new(Claims::of(lines))))
    }

    fn set(nodes: &[u16]) -> NodeSet {
        let mut set = NodeSet::default();
        nodes.iter().for_each(|node| set.insert(*node));
        set
    }

    /// Whether the switch admits a frame that `node` sent from this address.
    fn hears(switch: &mut Switch<Lines>, mac: Mac, node: u16) -> bool {
        switch.may_be_from(number_of(mac), node)
    }

    const ONE: Mac = [2, 0, 0, 0, 0, 1];
    const STRANGER: Mac = [2, 9, 9, 9, 9, 9];

    #[test]
    fn a_frame_goes_to_whoever_has_the_address() {
        let (mut directory, mut switch) = pair(0);
        directory.set_nodes(&set(&[0, 1, 2]));
        directory.add(ONE, 1).unwrap();
        assert_eq!(switch.find(ONE), To::Node(1));
        assert_eq!(switch.find([0xff; 6]), To::All);
        assert_eq!(switch.nodes_of(To::All), set(&[1, 2]), "not to us");
        assert_eq!(switch.find(STRANGER), To::Nobody);
        directory.remove(ONE, 1);
        directory.add(ONE, 2).unwrap();
        assert_eq!(switch.find(ONE), To::Node(2), "what was found before is forgotten");
        directory.remove(ONE, 2);
        directory.add(ONE, 0).unwrap();
        assert_eq!(switch.find(ONE), To::Nobody, "it is ours");
    }

    #[test]
    fn w2_a_stranger_is_learnt_from_uplinks_alone() {
        let (mut directory, mut switch) = pair(0);
        directory.set_nodes(&set(&[0, 1, 2, 3]));
        directory.set_uplinks(&set(&[0, 2, 3]));
        assert_eq!(switch.find(STRANGER), To::Uplinks);
        assert_eq!(switch.nodes_of(To::Uplinks), set(&[2, 3]));
        assert!(!hears(&mut switch, STRANGER, 1));
        assert_eq!(switch.find(STRANGER), To::Uplinks);
        assert!(hears(&mut switch, STRANGER, 2));
        assert_eq!(switch.find(STRANGER), To::Node(2));
        assert!(hears(&mut switch, STRANGER, 3));
        assert_eq!(switch.find(STRANGER), To::Node(3), "it moved");
        assert!(hears(&mut switch, STRANGER, 2));
        assert_eq!(switch.find(STRANGER), To::Node(2), "it moved back");
        switch.age(Instant::now() + AGEING);
        assert_eq!(switch.find(STRANGER), To::Uplinks);
    }

    /// A bridge shows its packet socket also frames between two of its own ports.
    #[test]
    fn w2_what_an_uplinks_own_stations_send_each_other_goes_nowhere() {
        let (mut directory, mut switch) = pair(0);
        directory.set_nodes(&set(&[0, 1, 2]));
        directory.set_uplinks(&set(&[0, 2]));
        assert_eq!(switch.find(STRANGER), To::Uplinks);
        assert!(switch.may_send(STRANGER));
        assert_eq!(switch.find(STRANGER), To::Nobody);
        assert!(hears(&mut switch, STRANGER, 2));
        assert_eq!(switch.find(STRANGER), To::Node(2), "it moved, or is there in another VLAN");
        assert!(switch.may_send(STRANGER));
        assert_eq!(switch.find(STRANGER), To::Node(2));
        switch.age(Instant::now() + AGEING);
        assert_eq!(switch.find(STRANGER), To::Uplinks);
    }

    #[test]
    fn w4_no_frame_crosses_to_an_address_of_a_link() {
        let (mut directory, mut switch) = pair(0);
        directory.set_nodes(&set(&[0, 1]));
        directory.set_uplinks(&set(&[1]));
        for last in 0..=0xff {
            let to = if last < 16 { To::Nobody } else { To::All };
            assert_eq!(switch.find([1, 0x80, 0xc2, 0, 0, last]), to, "{last:#x}");
        }
        assert_eq!(switch.find([1, 0x80, 0xc2, 0, 1, 0]), To::All);
        let [pause, of_all] = [1, 0x21].map(|last| [1, 0x80, 0xc2, 0, 0, last, 2, 0]);
        assert!(is_for_link(first_of(&pause)) && !is_for_link(first_of(&of_all)) && !is_for_link(NONE));
    }

    #[test]
    fn w1_nobody_takes_an_address_that_another_has() {
        let (mut directory, mut switch) = pair(0);
        directory.set_nodes(&set(&[0, 1, 2]));
        directory.set_uplinks(&set(&[2]));
        directory.add(ONE, 1).unwrap();
        assert_eq!(switch.find(ONE), To::Node(1));
        assert!(!hears(&mut switch, ONE, 2));
        assert!(!hears(&mut switch, [0xff; 6], 2));
        assert_eq!((switch.find(ONE), switch.find([0xff; 6])), (To::Node(1), To::All));
    }

    #[test]
    fn w3_a_node_sends_in_its_own_address_and_an_uplink_in_nobodys() {
        let (mut directory, mut switch) = pair(0);
        let two: Mac = [2, 0, 0, 0, 0, 2];
        directory.set_nodes(&set(&[0, 1, 2, 3]));
        directory.set_uplinks(&set(&[3]));
        directory.add(ONE, 1).unwrap();
        directory.add(two, 2).unwrap();
        for (mac, node, may) in [
            (ONE, 1, true),
            (two, 1, false),
            (STRANGER, 1, false),
            ([0xff; 6], 1, false),
            ([0; 6], 1, false),
            (two, 2, true),
            (ONE, 3, false),
            (STRANGER, 3, true),
            ([3, 0, 0, 0, 0, 1], 3, false),
            (ONE, 0, false),
            (STRANGER, 0, false),
            ([0xff; 6], 99, false),
        ] {
            // The second call tests the remembered result.
            assert_eq!(
                [hears(&mut switch, mac, node), hears(&mut switch, mac, node)],
                [may; 2],
                "{mac:02x?} of node {node}"
            );
        }
        directory.remove(ONE, 1);
        assert!(!hears(&mut switch, ONE, 1), "it is nobody's any more");
        directory.add(ONE, 2).unwrap();
        assert!(hears(&mut switch, ONE, 2) && hears(&mut switch, two, 2), "a node may have several");
        directory.set_uplinks(&set(&[0]));
        assert!(switch.may_send(STRANGER) && !switch.may_send(ONE), "there are others behind us");
    }

    #[test]
    fn an_address_that_is_seen_on_and_on_is_not_too_old() {
        let (mut directory, mut switch) = pair(0);
        directory.set_uplinks(&set(&[2]));
        assert!(hears(&mut switch, STRANGER, 2));
        let long_ago = Instant::now().checked_sub(Duration::from_millis(1)).expect("the machine runs for longer");
        switch.learnt.get_mut(&STRANGER).expect("it was learnt").1 = long_ago;
        assert!(hears(&mut switch, STRANGER, 2));
        switch.age(Instant::now());
        assert!(hears(&mut switch, STRANGER, 2));
        assert!(switch.learnt[&STRANGER].1 > long_ago, "seen after it was aged");
    }

    #[test]
    fn w1_flows_spread_over_the_nodes_that_share_an_address() {
        let lines: Lines = (0..directory_lines(64)).map(|_| Line::default()).collect();
        let mut directory = Directory::new(Arc::clone(&lines));
        let of = |us| Switch::new(us, Lookup::new(Claims::of(Arc::clone(&lines))));
        let mut switch = of(0);
        directory.set_nodes(&set(&[0, 1, 4]));
        directory.add(ONE, 1).unwrap();
        assert_eq!(switch.find(ONE), To::Node(1));
        directory.share(ONE, 2).unwrap();
        let To::OneOf(owners) = switch.find(ONE) else { panic!("{:?}", switch.find(ONE)) };
        assert_eq!(owners.all(), [1, 2]);
        let mut counts = [0; 3];
        (0..1000_u32).for_each(|flow| counts[usize::from(owners.of_flow(flow.wrapping_mul(0x9e37_79b9)))] += 1);
        assert!(counts[1] > 400 && counts[2] > 400, "{counts:?}");
        assert!(hears(&mut switch, ONE, 1) && hears(&mut switch, ONE, 2) && !hears(&mut switch, ONE, 3));
        // A node among them sends nothing to the others, and what is for all goes once to each interface.
        let mut among = of(2).sharing(Some(ONE));
        assert_eq!(among.find(ONE), To::Nobody);
        assert!(among.may_send(ONE));
        assert_eq!(among.nodes_of(To::All), set(&[0, 4]));
        directory.remove(ONE, 2);
        assert_eq!(switch.find(ONE), To::Node(1), "one is left");
        assert!(!hears(&mut switch, ONE, 2));
    }

    #[test]
    fn an_uplink_that_is_none_any_more_is_not_sent_to() {
        let (mut directory, mut switch) = pair(0);
        directory.set_uplinks(&set(&[2]));
        switch.find(STRANGER);
        assert!(hears(&mut switch, STRANGER, 2));
        assert_eq!(switch.find(STRANGER), To::Node(2));
        directory.set_uplinks(&set(&[]));
        assert_eq!(switch.find(STRANGER), To::Nobody);
    }

    proptest! {
        /// Compares the switch with a simple table.
        #[test]
        fn it_says_what_a_plain_table_says(steps in prop::collection::vec((0_u8..12, 0_u16..5, 0_u8..5), 1..300)) {
            let (mut directory, mut switch) = pair(0);
            let (mut known, mut learnt, mut uplinks) = (HashMap::new(), HashMap::new(), NodeSet::default());
            let mut own_side = std::collections::HashSet::new();
            directory.set_nodes(&set(&[0, 1, 2, 3, 4]));
            for (number, node, what) in steps {
                let mac = [2, 0, 0, 0, 0, number];
                match what {
                    0 if directory.add(mac, node).is_ok() => {
                        known.insert(mac, node);
                    }
                    1 => known.remove(&mac).into_iter().for_each(|owner| directory.remove(mac, owner)),
                    2 => {
                        // Look up first, as a receiver has done: the switch notices the daemon's changes when it is
                        // asked.
                        switch.find(mac);
                        let may = known.get(&mac).map_or(uplinks.contains(node), |owner| *owner == node);
                        prop_assert_eq!(hears(&mut switch, mac, node), may);
                        let mut others = uplinks;
                        others.remove(0);
                        let may_learn = uplinks.contains(node) && others != NodeSet::default();
                        if may_learn && !known.contains_key(&mac) {
                            if node == 0 { own_side.insert(mac); } else { learnt.insert(mac, node); }
                        }
                    }
                    3 => { if uplinks.contains(node) { uplinks.remove(node) } else { uplinks.insert(node) }; directory.set_uplinks(&uplinks); }
                    _ => {}
                }
                let mut others = uplinks;
                others.remove(0);
                let expected = match (known.get(&mac), learnt.get(&mac)) {
                    (Some(0), _) => To::Nobody,
                    (Some(node), _) => To::Node(*node),
                    (None, Some(node)) if others.contains(*node) => To::Node(*node),
                    _ if others == NodeSet::default() => To::Nobody,
                    _ if uplinks.contains(0) && own_side.contains(&mac) => To::Nobody,
                    _ => To::Uplinks,
                };
                prop_assert_eq!(switch.find(mac), expected);
            }
        }
    }
}
