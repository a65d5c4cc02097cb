//! Frames: where they enter, leave and cross.
//!
//! | module   | contents                                                      |
//! |----------|---------------------------------------------------------------|
//! | [`port`] | the traits of the data path: places where frames enter or leave |
//! | [`nic`]  | drivers of network cards, and the buses over which they reach them |
//! | [`virtq`] | the device's end of a virtqueue                              |
//! | [`vni`]  | Ethernet between nodes through memory                         |
//! | [`switch`] | where a frame goes: which node has which address            |
//! | [`flow`] | the flow that a frame belongs to                         |
//! | [`own`] | checks that a frame's IP addresses belong to its sender        |
//! | [`endpoint`] | where a node's programs receive and send: a TAP, a Linux interface, a memif, a virtual machine; the bridge to a VNI |
//! | [`capture`] | copies of the frames that pass a port, for an observer      |
//!
//! docs/design/nic.md defines a driver and its guarantees; docs/design/vni.md does the same for a VNI.

pub mod capture;
pub mod endpoint;
pub mod flow;
pub mod nic;
pub mod own;
pub mod port;
pub mod switch;
pub mod virtq;
pub mod vni;
