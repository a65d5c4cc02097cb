//! Models of network cards, written from their data sheets, that forgive a driver nothing; and wires to plug into them.
//!
//! | module      | what it is                                                                  |
//! |-------------|-----------------------------------------------------------------------------|
//! | [`e1000e`]  | the Intel 82574L, a state machine without threads, clocks or memory         |
//! | [`virtio_net`] | a virtio network device, likewise                                     |
//! | [`model`]   | what such a model is to whoever serves it, and what it reaches              |
//! | [`journal`] | what a driver did that it must not do                                       |
//! | [`memory`]  | the memory that a model reaches, and the eventfds that it rings             |
//! | [`wire`]    | what a model is plugged into: a source and checker, a socket, a TAP, a file |
//! | [`served`]  | a model as a vfio-user device, with its wire                               |
//! | [`vfio_user`] | serves a device to a driver in another process                               |
//! | [`card`]    | model, memory and wire put together, for a driver in the same process       |
//!
//! Nothing here shares a constant with a driver: an offset that a driver's author misread is not misread here in the same way.

#![allow(missing_docs, reason = "the audience is ourselves: a comment says what a name cannot")]

pub mod card;
pub mod clock;
mod doorbells;
pub mod e1000e;
pub mod journal;
pub mod memory;
pub mod model;
mod pci;
pub mod served;
mod toeplitz;
pub mod vfio_user;
pub mod virtio_net;
pub mod wire;
