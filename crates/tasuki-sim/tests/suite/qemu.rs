//! QEMU at the other end of our datagram wire: it forwards our frames from one socket to another.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tasuki_sim::wire::{Datagram, Wire};
use tasuki_testing::Program;

/// Starts a QEMU without a machine, whose two datagram sockets lead to the same hub.
fn hub(folder: &Path) -> std::io::Result<Program> {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-machine", "none", "-display", "none", "-nodefaults", "-nic", "none"]);
    for name in ["a", "b"] {
        let path = |end: &str| folder.join(format!("{name}.{end}")).display().to_string();
        let (theirs, ours) = (path("qemu"), path("wire"));
        let socket = format!("dgram,id={name},local.type=unix,local.path={theirs},remote.type=unix,remote.path={ours}");
        qemu.args(["-netdev", &socket, "-netdev", &format!("hubport,id=hub{name},hubid=0,netdev={name}")]);
    }
    qemu.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map(Program)
}

#[test]
fn qemu_takes_our_frames_and_sends_us_its() {
    let folder = tempfile::tempdir().unwrap();
    let wire = |name: &str| {
        let path = |end: &str| folder.path().join(format!("{name}.{end}"));
        Datagram::bind(&path("wire"), &path("qemu")).unwrap()
    };
    let (mut first, mut second) = (wire("a"), wire("b"));
    let mut qemu = match hub(folder.path()) {
        Ok(qemu) => qemu,
        Err(error) => return println!("skipped: needs qemu-system-x86_64 ({error})"),
    };
    let start = Instant::now();
    let frame = |number: u8| [&[0xff; 6][..], &[2, 0, 0, 0, 0, number, 0x88, 0xb5], &[number; 50]].concat();
    // Frames sent before QEMU has made its sockets are lost.
    while second.receive(0).is_none() {
        if let Some(status) = qemu.0.try_wait().unwrap() {
            let said = std::io::read_to_string(qemu.0.stderr.take().unwrap()).unwrap();
            return println!("skipped: this QEMU has no `-netdev dgram` ({status}): {}", said.trim());
        }
        assert!(start.elapsed() < Duration::from_secs(60), "QEMU passes nothing on");
        first.send(&frame(0), 0);
        std::thread::yield_now();
    }
    for number in 1..=100 {
        second.send(&frame(number), 0);
        let back = std::iter::repeat_with(|| first.receive(0).map(<[u8]>::to_vec)).flat_map(|came| {
            assert!(start.elapsed() < Duration::from_secs(60), "frame {number} did not come");
            came
        });
        // Whole, and in order.
        assert_eq!(back.into_iter().next(), Some(frame(number)));
    }
}
