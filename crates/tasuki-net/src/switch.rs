//! Where a frame goes: whose the address is that it is sent to.
//!
//! The daemon says who has which address, in a [directory] that everybody reads. Addresses that it does not know are behind a node that has
//! others behind it (an uplink: a bridge, or a NIC); each node learns by itself behind which, from the frames that come.
//!
//! # Rules
//!
//! - **W1** What the directory says stands: nobody can take an address that it gives to another.
//! - **W2** An address is learnt only from a node that the directory calls an uplink.
//!
//! [directory]: tasuki_shm::vni::directory

use std::collections::HashMap;
use std::ops::Deref;
use std::time::{Duration, Instant};

use tasuki_shm::line::Line;
use tasuki_shm::vni::directory::{Lookup, Mac, NodeSet};

use crate::vni::Incoming;

/// How long an address that was learnt is remembered after it was seen last, as IEEE 802.1Q-2018, 8.8.3 has it.
pub const AGEING: Duration = Duration::from_secs(300);

/// Addresses that are learnt at most.
pub const LEARNT_MAX: usize = 4096;

/// Where a frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum To {
    /// To this node.
    Node(u16),
    /// To all nodes but us.
    All,
    /// To all nodes with others behind them but us: nobody knows the address.
    Uplinks,
    /// Nowhere: it is ours already, or nobody's.
    Nobody,
}

/// What a node knows of who is where. `M` is the memory of the directory.
#[derive(Debug)]
pub struct Switch<M> {
    us: u16,
    directory: Lookup<M>,
    /// What is remembered of the directory is of this version.
    version: u64,
    last: Option<(Mac, To)>,
    nodes: NodeSet,
    uplinks: NodeSet,
    learnt: HashMap<Mac, (u16, Instant)>,
}

impl<M: Deref<Target = [Line]>> Switch<M> {
    /// What node `us` knows.
    pub fn new(us: u16, directory: Lookup<M>) -> Self {
        let nodes = NodeSet::default();
        let mut switch =
            Switch { us, directory, version: 0, last: None, nodes, uplinks: nodes, learnt: HashMap::new() };
        switch.look();
        switch
    }

    fn look(&mut self) {
        self.version = self.directory.version();
        (self.nodes, self.uplinks) = (self.directory.nodes(), self.directory.uplinks());
        self.nodes.remove(self.us);
        self.uplinks.remove(self.us);
        self.last = None;
    }

    /// Where a frame to this address goes.
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
            _ if is_group => To::All,
            Some(node) if node == self.us => To::Nobody,
            Some(node) => To::Node(node),
            None => match self.learnt.get(&mac) {
                Some((node, _)) if self.uplinks.contains(*node) => To::Node(*node),
                _ if self.uplinks == NodeSet::default() => To::Nobody,
                _ => To::Uplinks,
            },
        };
        self.last = Some((mac, to));
        to
    }

    /// Whether there is anything to be [learnt](Self::learn) from frames of this node.
    #[inline]
    pub fn learns_from(&self, node: u16) -> bool {
        self.uplinks.contains(node)
    }

    /// A frame came from `node` that says it is from `mac`.
    #[inline]
    pub fn learn(&mut self, mac: Mac, node: u16, now: Instant) {
        if self.uplinks.contains(node) {
            self.learn_from_uplink(mac, node, now);
        }
    }

    /// The same of a frame that lies where its sender wrote it.
    #[inline]
    pub fn learn_of(&mut self, incoming: &Incoming<'_>) {
        if self.learns_from(incoming.from) {
            let mut addresses = [0; 12];
            if incoming.copy_to(&mut addresses) == Ok(addresses.len()) {
                let from: Mac = addresses[6..].try_into().expect("six bytes");
                self.learn(from, incoming.from, Instant::now());
            }
        }
    }

    #[cold]
    fn learn_from_uplink(&mut self, mac: Mac, node: u16, now: Instant) {
        // W1; and nobody is a group.
        if mac[0] & 1 == 1 || self.directory.find(mac).is_some() {
            return;
        }
        if self.learnt.len() >= LEARNT_MAX && !self.learnt.contains_key(&mac) {
            return;
        }
        if self.learnt.insert(mac, (node, now)).is_none_or(|(before, _)| before != node) {
            self.last = None;
        }
    }

    /// Forgets what was learnt too long ago, and hears of changes, also if nothing is sent. Due now and then.
    pub fn age(&mut self, now: Instant) {
        if self.directory.version() != self.version {
            self.look();
        }
        self.learnt.retain(|_, (_, seen)| now.saturating_duration_since(*seen) < AGEING);
        self.last = None;
    }

    /// The nodes of a destination that is several.
    pub fn nodes_of(&self, to: To) -> NodeSet {
        match to {
            To::All => self.nodes,
            To::Uplinks => self.uplinks,
            To::Node(_) | To::Nobody => NodeSet::default(),
        }
    }
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
        directory.remove(ONE);
        directory.add(ONE, 2).unwrap();
        assert_eq!(switch.find(ONE), To::Node(2), "what was found before is forgotten");
        directory.remove(ONE);
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
        let now = Instant::now();
        switch.learn(STRANGER, 1, now);
        assert_eq!(switch.find(STRANGER), To::Uplinks);
        switch.learn(STRANGER, 2, now);
        assert_eq!(switch.find(STRANGER), To::Node(2));
        switch.learn(STRANGER, 3, now);
        assert_eq!(switch.find(STRANGER), To::Node(3), "it moved");
        switch.age(now + AGEING);
        assert_eq!(switch.find(STRANGER), To::Uplinks);
    }

    #[test]
    fn w1_nobody_takes_an_address_that_another_has() {
        let (mut directory, mut switch) = pair(0);
        directory.set_nodes(&set(&[0, 1, 2]));
        directory.set_uplinks(&set(&[2]));
        directory.add(ONE, 1).unwrap();
        assert_eq!(switch.find(ONE), To::Node(1));
        switch.learn(ONE, 2, Instant::now());
        switch.learn([0xff; 6], 2, Instant::now());
        assert_eq!((switch.find(ONE), switch.find([0xff; 6])), (To::Node(1), To::All));
    }

    #[test]
    fn an_uplink_that_is_none_any_more_is_not_sent_to() {
        let (mut directory, mut switch) = pair(0);
        directory.set_uplinks(&set(&[2]));
        switch.find(STRANGER);
        switch.learn(STRANGER, 2, Instant::now());
        assert_eq!(switch.find(STRANGER), To::Node(2));
        directory.set_uplinks(&set(&[]));
        assert_eq!(switch.find(STRANGER), To::Nobody);
    }

    proptest! {
        /// Against a table that is written without any haste.
        #[test]
        fn it_says_what_a_plain_table_says(steps in prop::collection::vec((0_u8..12, 0_u16..5, 0_u8..5), 1..300)) {
            let (mut directory, mut switch) = pair(0);
            let (mut known, mut learnt, mut uplinks) = (HashMap::new(), HashMap::new(), NodeSet::default());
            let now = Instant::now();
            directory.set_nodes(&set(&[0, 1, 2, 3, 4]));
            for (number, node, what) in steps {
                let mac = [2, 0, 0, 0, 0, number];
                match what {
                    0 if directory.add(mac, node).is_ok() => {
                        known.insert(mac, node);
                    }
                    1 => { directory.remove(mac); known.remove(&mac); }
                    2 => {
                        // Looks first, as who receives a frame has, for what the daemon says is heard when somebody looks.
                        switch.find(mac);
                        switch.learn(mac, node, now);
                        if uplinks.contains(node) && node != 0 && !known.contains_key(&mac) { learnt.insert(mac, node); }
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
                    _ => To::Uplinks,
                };
                prop_assert_eq!(switch.find(mac), expected);
            }
        }
    }
}
