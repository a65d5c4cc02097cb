//! Real programs in two namespaces, at every MTU; Wireshark checks the checksums of their frames.

use std::net::UdpSocket;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::place::capture::{Capture, Seen, Sum, is_possible};
use crate::place::two::with_two;
use crate::place::{Place, pattern};
use crate::process::is_installed;
use tasuki_testing::{PATIENCE, Program};

const FILE: usize = 3 << 20;

/// Lets curl fetch a file from a web server, and compares every byte.
fn fetch(places: [&Place; 2], host: &str, folder: &Path) {
    let mut server = places[1].command("python3");
    server.args(["-m", "http.server", "8000", "--bind", host.trim_matches(['[', ']']), "--directory"]).arg(folder);
    let server = server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut server = Program(server.expect("it starts"));
    let got = folder.join("got");
    let start = Instant::now();
    // Retry until the server listens.
    loop {
        let mut curl = places[0].command("curl");
        curl.args(["-s", "-S", "--noproxy", "*", "--max-time", "60", "-o"]).arg(&got);
        let done = curl.arg(format!("http://{host}:8000/file")).output().expect("curl starts");
        if done.status.success() {
            break;
        }
        let why = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(start.elapsed() < PATIENCE, "nothing is fetched from {host}: {why}");
        assert_eq!(server.0.try_wait().expect("it is our child"), None, "the server has ended");
        std::thread::sleep(Duration::from_millis(20));
    }
    let got = std::fs::read(got).expect("it was written");
    assert!(got.len() == FILE && got.iter().enumerate().all(|(at, byte)| *byte == pattern(at)), "{} bytes", got.len());
}

/// Sends datagrams of many lengths, up to the longest in one frame and beyond.
fn datagrams(places: [&Place; 2], mtu: usize) {
    let [here, there] = [(places[0], "192.0.2.1:0"), (places[1], "192.0.2.2:7778")]
        .map(|(place, at)| place.within(|| UdpSocket::bind(at)).expect("it binds"));
    there.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    let mut room = vec![0; 70_000];
    for len in (0..mtu - 28).step_by(mtu / 40).chain([mtu - 28, mtu - 27, 20_000]) {
        let sent: Vec<u8> = (0..len).map(|at| pattern(at + len)).collect();
        here.send_to(&sent, "192.0.2.2:7778").expect("it is sent");
        let got = there.recv(&mut room).expect("it comes");
        assert!(room[..got] == sent, "{len} bytes were sent, and {got} came, or others");
    }
}

/// Checks that no checksum is wrong, neither of a whole segment nor of a header. Returns the number of good
/// ones, of partial ones, and the length of the longest frame.
fn judge(what: &str, seen: &[Seen]) -> (usize, usize, usize) {
    let wrong = seen.iter().find(|seen| seen.sum == Sum::Bad || seen.header == Sum::Bad);
    assert!(wrong.is_none(), "{what}: {wrong:?}");
    let count = |sum| seen.iter().filter(|seen| seen.sum == sum).count();
    let longest = seen.iter().map(|seen| seen.len).max().unwrap_or(0);
    let (good, partial) = (count(Sum::Good), count(Sum::Partial));
    println!("{what}: {good} good, {partial} left to be done, the longest of {longest} bytes");
    (good, partial, longest)
}

fn is_runnable() -> bool {
    let missing: Vec<_> = ["python3", "curl", "ethtool"].into_iter().filter(|program| !is_installed(program)).collect();
    if !missing.is_empty() {
        println!("skipped: needs {}", missing.join(", "));
    }
    missing.is_empty() && is_possible()
}

#[test]
fn at_every_mtu_programs_get_every_byte_and_no_check_sum_is_made_wrong() {
    if !is_runnable() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file"), (0..FILE).map(pattern).collect::<Vec<_>>()).expect("it is written");
    let nodes = with_two(512, |places| {
        for (mtu, leaves) in [(9000, true), (1500, true), (1500, false), (1280, true), (576, true), (576, false)] {
            for (place, address) in places.iter().zip(["fd00::1/64", "fd00::2/64"]) {
                assert!(place.ip(&["link", "set", "nic0", "mtu", &mtu.to_string()]));
                // With "off", the kernel computes its checksums itself, and received frames can be marked as
                // checked.
                let on = if leaves { "on" } else { "off" };
                let done = place.command("ethtool").args(["-K", "nic0", "tx", on]).output().expect("ethtool starts");
                assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
                if mtu >= 1280 {
                    assert!(place.ip(&["addr", "replace", address, "dev", "nic0", "nodad"]));
                }
            }
            let captures = places.map(|place| Capture::start(place, folder.path()));
            fetch(places, "192.0.2.2", folder.path());
            if mtu >= 1280 {
                fetch(places, "[fd00::2]", folder.path());
            }
            datagrams(places, mtu);
            for (capture, end) in captures.into_iter().zip(["who asks", "who serves"]) {
                let (good, partial, longest) =
                    judge(&format!("MTU {mtu}, sums left: {leaves}, {end}"), &capture.finish());
                if leaves {
                    assert!(partial > 20 && longest > 2 * mtu, "segments cross as they are");
                } else {
                    assert!(good > 1000 && partial == 0 && longest <= mtu + 14, "frames cross finished");
                }
            }
        }
    });
    let nodes = nodes.into_iter().flatten();
    nodes.for_each(|node| assert_eq!((node.dropped.refused, node.dropped.too_late), (0, 0), "{:?}", node.dropped));
}
