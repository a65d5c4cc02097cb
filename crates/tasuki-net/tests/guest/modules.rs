//! For what the kernel starts modprobe(8), while the caller waits.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use tasuki_tap::interface::Interface;

/// The program that the kernel starts.
const SETTING: &str = "/proc/sys/kernel/modprobe";
const PROGRAM: &str = "/tmp/modprobe";
const ASKED: &str = "/tmp/modules";

/// tasukid looks for thousands of names when it begins, each of which took modprobe(8) 10 ms.
#[test]
fn a_look_for_an_interface_that_is_not_there_starts_no_modprobe() {
    let before = fs::read_to_string(SETTING).expect("a kernel with modules");
    fs::write(PROGRAM, format!("#!/bin/sh\necho \"$*\" >>{ASKED}\n")).expect("a file");
    fs::set_permissions(PROGRAM, fs::Permissions::from_mode(0o755)).expect("a file of ours");
    fs::write(SETTING, PROGRAM).expect("it is set");
    // This is how it shows if one does.
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None);
    let _ = rustix::net::netdevice::name_to_index(socket.expect("a socket"), "loads0");
    let found = Interface::if_there("loads1").expect("a look");
    let all = Interface::names().expect("a list");
    fs::write(SETTING, before.trim()).expect("it is set back");
    let asked = fs::read_to_string(ASKED).expect("the first one loads");
    assert!(asked.contains("netdev-loads0") && !asked.contains("loads1"), "{asked}");
    assert!(found.is_none() && all.contains("lo"), "{all:?}");
}
