//! One test for each rule of the data sheets; the models' server with clients of all kinds; wires.
#![allow(clippy::tests_outside_test_module, reason = "the whole program is tests")]
#![allow(clippy::cast_possible_truncation, reason = "fields are cut out of registers")]

mod basics;
mod bench;
mod command_line;
mod interrupts;
mod live;
mod qemu;
mod receive;
mod rig;
mod rules;
mod tap;
mod transmit;
mod vfio_user;
mod vfio_user_peer;
mod virtio;
mod virtio_net;
mod virtio_rules;
