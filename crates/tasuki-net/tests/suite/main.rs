//! The tests of this crate from outside: one program, which is linked once.
//!
//! The tests are threads of one process. A test that counts or changes descriptors or limits of a process runs in one
//! of its own: `tasuki_testing::alone`.
//!
//! A *world* is a card with its wire and its driver, and a *bench* a started card in it. A *stub* is a card in memory that
//! the test plays, and a *desk* a running driver of one, with the means to prepare a successor. A *cabinet* is a device of
//! nothing but registers.
#![allow(clippy::tests_outside_test_module, reason = "the whole program is tests")]

// What several tests use.
mod cabinet;
mod conformance;
mod intx;
mod net;
mod place;
mod plugged;
mod process;
mod qemu;
mod stub;
#[allow(dead_code, reason = "unit tests use the rest of it")]
mod vm;
mod wait;

// Cards: the suite of all drivers, what is particular to each driver, and how cards change hands.
mod another_process;
mod conformance_e1000e;
mod conformance_rtl8139;
mod conformance_virtio;
mod conformance_virtio_pairs;
mod conformance_virtio_sim;
mod driver_states;
mod e1000e;
mod flow_control;
mod hostile_cards;
mod in_place;
mod last_owner;
mod ledger;
mod ledger_virtio;
mod repoint;
mod residue;
mod rtl8139;
mod takeover;
mod takeover_virtio;
mod virtio_net;

// Ways to a card.
mod doorbells;
mod qemu_bus;
mod shared_connection;
mod vfio;
mod vfio_user;
mod vfio_user_peer;

// Nodes of a VNI, and programs behind them.
mod capture;
mod chaos;
mod finish;
mod memif;
mod memif_dpdk;
mod memif_kernel;
mod memif_refused;
mod ports;
mod sums;
mod tap;
mod udp_parts;
mod virtq;
mod vni;
