//! The contents of a VNI's memory: each node's [`node_memory`], and the [`directory`] that maps addresses to nodes. And the
//! [`loans`] of a virtual machine's queues to other nodes.
//!
//! `tasuki_net::vni` moves frames through it, and the daemon creates it. Both take the layout from here.

pub mod directory;
#[cfg(not(loom))]
pub mod loans;
#[cfg(not(loom))]
pub mod node_memory;

/// Maximum number of nodes on one VNI. Nodes have numbers from 0.
pub const NODES_MAX: u16 = 1024;
