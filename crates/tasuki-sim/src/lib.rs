//! Models of network cards, written from their data sheets, that report every rule a driver breaks; and wires to
//! plug the cards into.
//!
//! | module      | contents                                                                    |
//! |-------------|-----------------------------------------------------------------------------|
//! | [`e1000e`]  | the Intel 82574L, a state machine without threads, clocks or memory         |
//! | [`virtio_net`] | a virtio network device, likewise                                     |
//! | [`model`]   | the interface between a model, its server, and the host it reaches          |
//! | [`journal`] | a record of the rules that a driver broke                                   |
//! | [`memory`]  | the memory that a model reaches, and the eventfds that it rings             |
//! | [`wire`]    | the other end of a card's cable: a source and checker, a socket, a TAP, a file |
//! | [`served`]  | a model as a vfio-user device, with its wire                               |
//! | [`vfio_user`] | serves a device to a driver in another process                               |
//! | [`card`]    | model, memory and wire put together, for a driver in the same process       |
//!
//! The models share no constant with a driver, so that a register offset misread by the driver's author is not
//! misread here in the same way.

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
