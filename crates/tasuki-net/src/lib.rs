//! Frames: where they enter, leave and cross.
//!
//! | module   | contents                                                      |
//! |----------|---------------------------------------------------------------|
//! | [`port`] | the trait of the data path: places where frames enter or leave |
//! | [`nic`]  | drivers of network cards, and the buses over which they reach them |
//! | [`vni`]  | Ethernet between nodes through memory                         |
//! | [`switch`] | where a frame goes: which node has which address            |
//! | [`own`] | checks that a frame's IP addresses belong to its sender        |
//! | [`tap`]  | a network namespace on a VNI                                  |
//! | [`memif`] | a DPDK or VPP program on a VNI                               |
//! | [`capture`] | copies of the frames that pass a port, for an observer      |
//!
//! docs/design/nic.md defines a driver and its guarantees; docs/design/vni.md does the same for a VNI.

pub mod capture;
pub mod memif;
pub mod nic;
pub mod own;
pub mod port;
mod slow;
pub mod switch;
pub mod tap;
pub mod vni;
