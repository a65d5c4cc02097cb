//! The node that has each Ethernet address: a table that one process writes and many read.
//!
//! An entry is one word, so no reader sees half of one. An entry never moves: it lies in one of the two lines that its
//! address hashes to, or in one of the next few. A reader that looks while the writer adds or removes an entry finds the old
//! state or the new one, and nothing else.
//!
//! # Rules
//!
//! - **T1** Only the writer stores; readers map the table read-only.
//! - **T2** An entry is 0 (free), or an address in bits 16 to 63 and, in the bits below, the number of the node that
//!   has it plus 1, and bit 15 if other entries for the address may be there.
//! - **T3** An entry lies less than [`REACH`] lines behind the first line that its address hashes to, or behind the
//!   second one if all these places were occupied. Workers of before 30 November 2026 look behind the first line alone,
//!   and take such an address for one that no node has.
//! - **T5** An address has several entries if several nodes share it, each of which drives a queue of one interface:
//!   up to [`OWNERS_MAX`].
//! - **T4** The version grows with every change, after the change. A reader that caches a result drops it when the
//!   version differs.

use std::ops::Deref;

use super::NODES_MAX;
use crate::line::{Claims, LINE_WORDS, Line};
use crate::sync::{Acquire, Relaxed, Release, fence};

/// An Ethernet address.
pub type Mac = [u8; 6];

/// Number of lines from each of the two that an address hashes to in which it can lie.
pub const REACH: usize = 4;

/// Maximum number of nodes that share an address.
pub const OWNERS_MAX: usize = 8;

/// Bit of an entry: a reader that found it looks for others of the same address, too.
const SHARED: u64 = 1 << 15;
const _: () = assert!((NODES_MAX as u64) < SHARED);

/// Words of a set of nodes: one bit per node.
pub const SET_WORDS: usize = NODES_MAX as usize / 64;

/// Lines of a set of nodes.
const SET_LINES: usize = SET_WORDS / LINE_WORDS;

/// Line 0 holds the version in word 0, and the number of lines with entries in word 1. The sets follow it.
const NODES_AT: usize = 1;
const UPLINKS_AT: usize = NODES_AT + SET_LINES;

/// Number of lines before the entries.
const HEAD: usize = 8;
const _: () = assert!(UPLINKS_AT + SET_LINES <= HEAD);

/// Returns the number of lines of a directory for `addresses` addresses. It has room for twice as many, so that a
/// search is short.
pub fn directory_lines(addresses: usize) -> usize {
    HEAD + (2 * addresses).div_ceil(LINE_WORDS).next_power_of_two().max(REACH)
}

/// Reasons why an address was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// Another node has the address.
    #[error("node {owner} has this address already")]
    Taken {
        /// Number of that node.
        owner: u16,
    },
    /// As many nodes share the address as may.
    #[error("{OWNERS_MAX} nodes share this address, and no more may")]
    Shared,
    /// All places that the address could take are occupied.
    #[error("the directory has no room left for this address; it has {entries} entries in all")]
    Full {
        /// Capacity of the directory in entries.
        entries: usize,
    },
}

/// Returns an address as the upper 48 bits of a word.
#[inline]
fn key(mac: Mac) -> u64 {
    let [a, b, c, d, e, f] = mac;
    u64::from_be_bytes([a, b, c, d, e, f, 0, 0])
}

fn entry(mac: Mac, node: u16) -> u64 {
    key(mac) | (u64::from(node) + 1)
}

/// Returns the node of an entry, if the entry is for `mac`.
#[inline]
fn node_of(word: u64, mac: Mac) -> Option<u16> {
    let low = u16::try_from(word & 0xffff & !SHARED).expect("16 bits");
    (word & !0xffff == key(mac) && (1..=NODES_MAX).contains(&low)).then(|| low - 1)
}

/// Returns the number of lines that hold entries: a power of two, for memory of any length.
fn buckets(lines: usize) -> usize {
    let room = lines.saturating_sub(HEAD);
    assert!(room >= REACH, "a directory needs at least {} lines, not {lines}", HEAD + REACH);
    1 << room.ilog2()
}

/// Returns the lines in which `mac` can lie, the likeliest first, and each once (T3).
#[inline]
fn places(mac: Mac, buckets: usize) -> impl Iterator<Item = usize> {
    // Fibonacci hashing.
    let hashed = |key: u64| usize::try_from(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).expect("32 bits");
    // The first line depends on the last bytes of the address alone: addresses that differ in others share it.
    let first = hashed(key(mac));
    // The second one lies behind these places, and not so far that it meets them again.
    let room = buckets.checked_sub(2 * REACH);
    let others = room.into_iter().flat_map(move |room| {
        let second = first + REACH + hashed(key(mac) ^ (key(mac) >> 32)) % (room + 1);
        second..second + REACH
    });
    (0..REACH).map(move |i| first + i).chain(others).map(move |line| HEAD + (line & (buckets - 1)))
}

/// A set of nodes, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSet([u64; SET_WORDS]);

impl NodeSet {
    /// Adds a node.
    pub fn insert(&mut self, node: u16) {
        self.0[usize::from(node / 64)] |= 1 << (node % 64);
    }

    /// Removes a node.
    pub fn remove(&mut self, node: u16) {
        self.0[usize::from(node / 64)] &= !(1 << (node % 64));
    }

    /// Whether the set contains the node.
    pub fn contains(&self, node: u16) -> bool {
        self.0[usize::from(node / 64)] >> (node % 64) & 1 == 1
    }

    /// Returns the number of nodes.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the nodes, lowest number first. It takes a step for each node, not for each that there could be: each frame
    /// for all nodes takes these.
    pub fn iter(&self) -> impl Iterator<Item = u16> {
        (0_u16..).step_by(64).zip(self.0).flat_map(|(first, word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(first + u16::try_from(bit).expect("less than 64"))
            })
        })
    }
}

/// The writing side. `M` is the writer's own memory.
#[derive(Debug)]
pub struct Directory<M> {
    lines: M,
    buckets: usize,
}

impl<M: Deref<Target = [Line]>> Directory<M> {
    /// Opens the directory in `lines` with its present entries. Fresh memory has none.
    pub fn new(lines: M) -> Self {
        let buckets = buckets(lines.len());
        lines[0].word(1).store(buckets as u64, Relaxed);
        Directory { lines, buckets }
    }

    fn changed(&self) {
        // T4: store the change before the version that announces it.
        fence(Release);
        let version = self.lines[0].word(0);
        version.store(version.load(Relaxed).wrapping_add(1), Relaxed);
    }

    fn words(&self, mac: Mac) -> impl Iterator<Item = &crate::sync::AtomicU64> {
        let lines = places(mac, self.buckets).map(|line| &self.lines[line]);
        lines.flat_map(|line| (0..LINE_WORDS).map(|i| line.word(i)))
    }

    /// Records that `node` has the address `mac`. If the entry exists already, nothing changes.
    pub fn add(&mut self, mac: Mac, node: u16) -> Result<(), AddError> {
        assert!(node < NODES_MAX, "a VNI has no node {node}");
        match self.words(mac).find_map(|word| node_of(word.load(Relaxed), mac)) {
            Some(owner) if owner == node => return Ok(()),
            Some(owner) => return Err(AddError::Taken { owner }),
            None => {}
        }
        self.put(mac, entry(mac, node))
    }

    /// Records that `node` has the address `mac` too, beside the nodes that have it (T5). If it is one of them, nothing
    /// changes.
    pub fn share(&mut self, mac: Mac, node: u16) -> Result<(), AddError> {
        assert!(node < NODES_MAX, "a VNI has no node {node}");
        let owners = || self.words(mac).filter_map(|word| node_of(word.load(Relaxed), mac));
        if owners().any(|owner| owner == node) {
            return Ok(());
        }
        if owners().count() >= OWNERS_MAX {
            return Err(AddError::Shared);
        }
        for word in self.words(mac).filter(|word| node_of(word.load(Relaxed), mac).is_some()) {
            word.store(word.load(Relaxed) | SHARED, Relaxed);
        }
        self.put(mac, entry(mac, node) | SHARED)
    }

    fn put(&mut self, mac: Mac, entry: u64) -> Result<(), AddError> {
        let free = self.words(mac).find(|word| word.load(Relaxed) == 0);
        let free = free.ok_or(AddError::Full { entries: self.buckets * LINE_WORDS })?;
        free.store(entry, Relaxed);
        self.changed();
        Ok(())
    }

    /// Takes the address `mac` from `node`. Other nodes that share it keep it.
    pub fn remove(&mut self, mac: Mac, node: u16) {
        if let Some(word) = self.words(mac).find(|word| node_of(word.load(Relaxed), mac) == Some(node)) {
            word.store(0, Relaxed);
            self.changed();
        }
    }

    /// Sets the nodes of the VNI: the receivers of a broadcast frame.
    pub fn set_nodes(&mut self, nodes: &NodeSet) {
        self.set(NODES_AT, nodes);
    }

    /// Sets the uplinks: nodes with hosts behind them whose addresses are unknown until they send. Uplinks get
    /// frames for unknown addresses.
    pub fn set_uplinks(&mut self, nodes: &NodeSet) {
        self.set(UPLINKS_AT, nodes);
    }

    fn set(&mut self, at: usize, nodes: &NodeSet) {
        for (i, word) in nodes.0.iter().enumerate() {
            self.lines[at + i / LINE_WORDS].word(i % LINE_WORDS).store(*word, Relaxed);
        }
        self.changed();
    }
}

/// The reading side.
#[derive(Debug)]
pub struct Lookup<M> {
    claims: Claims<M>,
    buckets: usize,
}

impl<M: Deref<Target = [Line]>> Lookup<M> {
    /// Opens the directory in `claims`, which may have more lines than the directory uses.
    pub fn new(claims: Claims<M>) -> Self {
        let most = buckets(claims.len());
        let said = usize::try_from(claims.load(0, 1)).unwrap_or(0);
        let buckets = if said.is_power_of_two() { said.clamp(REACH, most) } else { most };
        Lookup { claims, buckets }
    }

    /// Returns the number of changes so far. Every result of a later look-up is at least as new (T4).
    #[inline]
    pub fn version(&self) -> u64 {
        let version = self.claims.load(0, 0);
        fence(Acquire);
        version
    }

    /// Returns the node that has the address `mac`, or one of several; and whether there may be several
    /// ([`owners`](Self::owners)).
    #[inline]
    pub fn find(&self, mac: Mac) -> Option<(u16, bool)> {
        self.words(mac).find_map(|word| Some((node_of(word, mac)?, word & SHARED != 0)))
    }

    /// Returns all nodes that have the address `mac` (T5), in no order.
    pub fn owners(&self, mac: Mac) -> impl Iterator<Item = u16> {
        self.words(mac).filter_map(move |word| node_of(word, mac))
    }

    #[inline]
    fn words(&self, mac: Mac) -> impl Iterator<Item = u64> {
        let lines = places(mac, self.buckets);
        lines.flat_map(move |line| (0..LINE_WORDS).map(move |word| self.claims.load(line, word)))
    }

    /// Returns the nodes of the VNI.
    pub fn nodes(&self) -> NodeSet {
        self.set(NODES_AT)
    }

    /// Returns the nodes that get frames for addresses that no node has.
    pub fn uplinks(&self) -> NodeSet {
        self.set(UPLINKS_AT)
    }

    fn set(&self, at: usize) -> NodeSet {
        NodeSet(std::array::from_fn(|i| self.claims.load(at + i / LINE_WORDS, i % LINE_WORDS)))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::sync::Arc;

    type Lines = Arc<[Line]>;

    fn pair(addresses: usize) -> (Directory<Lines>, Lookup<Lines>) {
        let lines: Lines = (0..directory_lines(addresses)).map(|_| Line::default()).collect();
        (Directory::new(Arc::clone(&lines)), Lookup::new(Claims::of(lines)))
    }

    fn mac(number: u32) -> Mac {
        let [a, b, c, d] = number.to_be_bytes();
        [2, 0, a, b, c, d]
    }

    #[test]
    fn two_nodes_cannot_have_one_address() {
        let (mut directory, lookup) = pair(8);
        directory.add(mac(1), 7).unwrap();
        let version = lookup.version();
        assert_eq!(directory.add(mac(1), 8), Err(AddError::Taken { owner: 7 }));
        directory.add(mac(1), 7).unwrap();
        assert_eq!((lookup.find(mac(1)), lookup.version()), (Some((7, false)), version), "nothing has changed");
        directory.remove(mac(1), 8);
        assert_eq!(lookup.find(mac(1)), Some((7, false)), "it is another's");
        directory.remove(mac(1), 7);
        assert_eq!(lookup.find(mac(1)), None);
        assert_ne!(lookup.version(), version);
        directory.add(mac(1), 8).unwrap();
        assert_eq!(lookup.find(mac(1)), Some((8, false)));
    }

    #[test]
    fn t5_nodes_share_an_address_if_that_is_said() {
        let (mut directory, lookup) = pair(8);
        let owners = || {
            let mut owners: Vec<u16> = lookup.owners(mac(1)).collect();
            owners.sort_unstable();
            owners
        };
        directory.add(mac(1), 7).unwrap();
        directory.share(mac(1), 9).unwrap();
        let version = lookup.version();
        directory.share(mac(1), 9).unwrap();
        assert_eq!((owners(), lookup.version()), (vec![7, 9], version), "nothing has changed");
        assert!(lookup.find(mac(1)).is_some_and(|(node, is_shared)| [7, 9].contains(&node) && is_shared));
        directory.remove(mac(1), 7);
        assert_eq!(owners(), [9]);
        (10..17).for_each(|node| directory.share(mac(1), node).unwrap());
        assert_eq!(directory.share(mac(1), 17), Err(AddError::Shared));
        assert_eq!(owners().len(), OWNERS_MAX);
    }

    #[test]
    fn as_many_addresses_fit_as_were_promised() {
        for addresses in [1, 8, 100, 1024, 5000] {
            let (mut directory, lookup) = pair(addresses);
            for number in 0..u32::try_from(addresses).unwrap() {
                directory.add(mac(number), u16::try_from(number % 1024).unwrap()).unwrap();
            }
            assert!((0..u32::try_from(addresses).unwrap()).all(|number| lookup.find(mac(number)).is_some()));
        }
    }

    #[test]
    fn addresses_that_differ_in_any_one_byte_fit() {
        for byte in 0..6 {
            let (mut directory, lookup) = pair(1024);
            let mac = |number: u8| std::array::from_fn(|i| if i == byte { number } else { 0x52 });
            for number in 0..=255 {
                directory.add(mac(number), number.into()).unwrap();
            }
            assert!((0..=255).all(|number| lookup.find(mac(number)) == Some((number.into(), false))), "{byte}");
        }
    }

    #[test]
    fn memory_may_be_longer_than_its_directory() {
        let lines: Lines = (0..64).map(|_| Line::default()).collect();
        let part: Lines = (0..directory_lines(8)).map(|_| Line::default()).collect();
        let mut directory = Directory::new(Arc::clone(&part));
        (0..8).for_each(|number| directory.add(mac(number), 3).unwrap());
        for (to, from) in lines.iter().zip(part.iter()) {
            (0..8).for_each(|word| to.word(word).store(from.word(word).load(Relaxed), Relaxed));
        }
        let lookup = Lookup::new(Claims::of(lines));
        assert!((0..8).all(|number| lookup.find(mac(number)) == Some((3, false))));
    }

    #[test]
    fn a_full_directory_says_so() {
        let (mut directory, _) = pair(1);
        let refused = (0..1000).find_map(|number| directory.add(mac(number), 1).err());
        assert_eq!(refused, Some(AddError::Full { entries: 32 }));
    }

    #[test]
    fn a_set_of_nodes_arrives_as_it_was_said() {
        let (mut directory, lookup) = pair(1);
        let mut nodes = NodeSet::default();
        [0, 63, 64, 1023].into_iter().for_each(|node| nodes.insert(node));
        directory.set_nodes(&nodes);
        nodes.remove(64);
        directory.set_uplinks(&nodes);
        assert_eq!(lookup.nodes().iter().collect::<Vec<_>>(), [0, 63, 64, 1023]);
        assert_eq!(lookup.uplinks().iter().collect::<Vec<_>>(), [0, 63, 1023]);
    }

    proptest! {
        #[test]
        fn what_was_said_last_is_found(steps in prop::collection::vec((0_u32..40, 0_u16..4, any::<bool>()), 1..300)) {
            let (mut directory, lookup) = pair(40);
            let mut expected = HashMap::new();
            for (number, node, adds) in steps {
                if adds {
                    let owner = *expected.entry(number).or_insert(node);
                    let said = directory.add(mac(number), node);
                    prop_assert_eq!(said, if owner == node { Ok(()) } else { Err(AddError::Taken { owner }) });
                } else {
                    expected.remove(&number).into_iter().for_each(|owner| directory.remove(mac(number), owner));
                }
                for number in 0..40 {
                    prop_assert_eq!(lookup.find(mac(number)), expected.get(&number).map(|node| (*node, false)));
                }
            }
        }

        #[test]
        fn whatever_stands_there_is_a_node_or_none(words in prop::collection::vec(any::<u64>(), 8 * (HEAD + REACH)), number in any::<u32>()) {
            let lines: Arc<[Line]> = (0..HEAD + REACH).map(|_| Line::default()).collect();
            words.iter().enumerate().for_each(|(i, word)| lines[i / 8].word(i % 8).store(*word, Relaxed));
            let lookup = Lookup::new(Claims::of(lines));
            let key = key(mac(number));
            let is_there = |node: u16| [0, SHARED].iter().any(|bit| words.contains(&(key | (u64::from(node) + 1) | bit)));
            prop_assert!(lookup.find(mac(number)).is_none_or(|(node, _)| node < NODES_MAX && is_there(node)));
        }
    }
}
