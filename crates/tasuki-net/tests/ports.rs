//! A suite for every kind of node beside every other: it checks the guarantees for frames on their way from program
//! to program.
#![allow(clippy::tests_outside_test_module, reason = "a file in tests/ is a test module")]

#[allow(dead_code, reason = "another suite uses the rest of it")]
#[path = "vm/machine.rs"]
mod machine;
#[path = "memif/client.rs"]
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod memif_client;
#[path = "memif/port.rs"]
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod memif_port;
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod net;
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod place;
#[path = "ports/mod.rs"]
mod ports;

suite!(native_to_native, Kind::Native, Kind::Native);
suite!(native_to_tap, Kind::Native, Kind::Tap);
suite!(native_to_memif, Kind::Native, Kind::Memif);
suite!(tap_to_native, Kind::Tap, Kind::Native);
suite!(tap_to_tap, Kind::Tap, Kind::Tap);
suite!(tap_to_memif, Kind::Tap, Kind::Memif);
suite!(memif_to_native, Kind::Memif, Kind::Native);
suite!(memif_to_tap, Kind::Memif, Kind::Tap);
suite!(memif_to_memif, Kind::Memif, Kind::Memif);
suite!(link_to_native, Kind::Link, Kind::Native);
suite!(link_to_tap, Kind::Link, Kind::Tap);
suite!(link_to_memif, Kind::Link, Kind::Memif);
suite!(link_to_link, Kind::Link, Kind::Link);
suite!(native_to_link, Kind::Native, Kind::Link);
suite!(tap_to_link, Kind::Tap, Kind::Link);
suite!(memif_to_link, Kind::Memif, Kind::Link);
suite!(vm_to_native, Kind::Vm, Kind::Native);
suite!(vm_to_tap, Kind::Vm, Kind::Tap);
suite!(vm_to_memif, Kind::Vm, Kind::Memif);
suite!(vm_to_link, Kind::Vm, Kind::Link);
suite!(vm_to_vm, Kind::Vm, Kind::Vm);
suite!(native_to_vm, Kind::Native, Kind::Vm);
suite!(tap_to_vm, Kind::Tap, Kind::Vm);
suite!(memif_to_vm, Kind::Memif, Kind::Vm);
suite!(link_to_vm, Kind::Link, Kind::Vm);
