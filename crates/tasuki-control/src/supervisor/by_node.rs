//! What tasukid has of workers and NICs: by their numbers, and by their nodes. Each turn of the loop looks after each node;
//! with a look at all workers and NICs for that, a turn would take the square of their number.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

/// An entry of [`ByNode`].
pub trait OfNode {
    /// Returns the node that has it.
    fn node(&self) -> &str;
}

/// Entries by their numbers, and in that order by the nodes that have them.
#[derive(Debug)]
pub struct ByNode<T> {
    all: BTreeMap<u32, T>,
    numbers: BTreeMap<String, BTreeSet<u32>>,
}

impl<T> Default for ByNode<T> {
    fn default() -> Self {
        ByNode { all: BTreeMap::new(), numbers: BTreeMap::new() }
    }
}

impl<T> Deref for ByNode<T> {
    type Target = BTreeMap<u32, T>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl<T: OfNode> ByNode<T> {
    /// Returns the entries of a node.
    pub fn of(&self, node: &str) -> impl Iterator<Item = &T> {
        self.numbers.get(node).into_iter().flatten().map(|number| &self.all[number])
    }

    pub fn get_mut(&mut self, number: &u32) -> Option<&mut T> {
        self.all.get_mut(number)
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.all.values_mut()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&u32, &mut T)> {
        self.all.iter_mut()
    }

    pub fn insert(&mut self, number: u32, entry: T) {
        self.remove(&number);
        self.numbers.entry(entry.node().to_owned()).or_default().insert(number);
        self.all.insert(number, entry);
    }

    pub fn remove(&mut self, number: &u32) -> Option<T> {
        let entry = self.all.remove(number)?;
        if let Some(numbers) = self.numbers.get_mut(entry.node()) {
            numbers.remove(number);
            if numbers.is_empty() {
                self.numbers.remove(entry.node());
            }
        }
        Some(entry)
    }

    /// Changes an entry so that another node may have it afterwards.
    pub fn move_by(&mut self, number: u32, change: impl FnOnce(&mut T)) {
        if let Some(mut entry) = self.remove(&number) {
            change(&mut entry);
            self.insert(number, entry);
        }
    }

    /// Returns whether each entry is found by its node.
    pub fn is_whole(&self) -> bool {
        let found = |(number, entry): (&u32, &T)| self.numbers.get(entry.node()).is_some_and(|of| of.contains(number));
        self.all.iter().all(found) && self.numbers.values().map(BTreeSet::len).sum::<usize>() == self.all.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl OfNode for String {
        fn node(&self) -> &str {
            self
        }
    }

    #[test]
    fn entries_are_found_by_the_nodes_that_have_them_now() {
        let mut all = ByNode::<String>::default();
        for (number, node) in [(1, "red"), (2, "blue"), (3, "red")] {
            all.insert(number, node.to_owned());
        }
        let of = |all: &ByNode<String>, node: &str| all.of(node).count();
        assert_eq!((of(&all, "red"), of(&all, "blue"), of(&all, "green")), (2, 1, 0));
        all.move_by(1, |node| *node = "green".to_owned());
        all.move_by(9, |node| node.clear());
        assert_eq!((of(&all, "red"), of(&all, "blue"), of(&all, "green")), (1, 1, 1));
        all.insert(2, "red".to_owned());
        assert_eq!(all.remove(&3).as_deref(), Some("red"));
        assert_eq!((of(&all, "red"), of(&all, "blue"), of(&all, "green")), (1, 0, 1));
        assert!(all.is_whole());
        all.get_mut(&2).unwrap().push('s');
        assert!(!all.is_whole(), "it is under its former node");
    }
}
