//! Frames: where they enter, leave and cross.
//!
//! | module   | what it is                                                    |
//! |----------|---------------------------------------------------------------|
//! | [`port`] | where frames enter or leave: the trait of the data path       |
//! | [`nic`]  | drivers of network cards, and the buses over which they reach them |
//! | [`vni`]  | Ethernet between nodes through memory                         |
//! | [`switch`] | where a frame goes: who has which address                   |
//! | [`own`] | whether what a frame says of IP is true of its sender         |
//! | [`tap`]  | a network namespace on a VNI                                  |
//! | [`memif`] | a program of DPDK's or VPP's on a VNI                        |
//! | [`capture`] | copies of the frames that pass a port, for whoever looks on |
//!
//! docs/design/nic.md says what a driver is, and what is promised of it; docs/design/vni.md the same of a VNI.

pub mod capture;
pub mod memif;
pub mod nic;
pub mod own;
pub mod port;
mod slow;
pub mod switch;
pub mod tap;
pub mod vni;
