//! What tests of this crate's own modules give the nodes of a VNI besides their estates.

use std::sync::Arc;

use tasuki_shm::line::Line;
use tasuki_shm::vni::directory::{Directory, Mac, NodeSet, directory_lines};

/// A directory's memory, in one process.
pub type Lines = Arc<[Line]>;

/// The station address of a node.
pub fn mac(node: u16) -> Mac {
    [2, 0, 0, 0, 0, node.to_le_bytes()[0]]
}

/// A directory of so many nodes, and its memory.
pub fn directory(nodes: u16) -> (Lines, Directory<Lines>) {
    let lines: Lines = (0..directory_lines(64)).map(|_| Line::default()).collect();
    let mut directory = Directory::new(Arc::clone(&lines));
    let mut set = NodeSet::default();
    for number in 0..nodes {
        set.insert(number);
        directory.add(mac(number), number).unwrap();
    }
    directory.set_nodes(&set);
    (lines, directory)
}
