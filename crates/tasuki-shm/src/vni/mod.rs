//! What lies in memory of a VNI: a node's [`node_memory`], and the [`directory`] that says which node has which address.
//!
//! How frames go through it is `tasuki_net::vni`; who makes it is the daemon. Both know it from here.

pub mod directory;
#[cfg(not(loom))]
pub mod node_memory;

/// Most nodes on one VNI: a number for each, from 0.
pub const NODES_MAX: u16 = 1024;
