//! A TAP device as a wire, with the kernel's own network at the other end, in a new network namespace.

use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

use tasuki_sim::wire::{Tap, TapError, Wire};
use tasuki_testing::alone_under;

const NAME: &str = "tasuki0";
const ARP: [u8; 2] = [0x08, 0x06];

#[test]
fn the_kernel_asks_and_answers_over_a_tap() {
    const UNDER: [&str; 4] = ["unshare", "--user", "--map-root-user", "--net"];
    match Command::new(UNDER[0]).args(&UNDER[1..]).arg("true").output() {
        Err(error) => println!("skipped: needs unshare ({error})"),
        Ok(output) if !output.status.success() => {
            println!("skipped: needs a network namespace ({})", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(_) if alone_under(&UNDER, the_kernel_asks_and_answers_over_a_tap) => inside(),
        Ok(_) => {}
    }
}

/// Returns the wire's time, in nanoseconds: a cable carries no two frames at once.
fn now(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).expect("centuries")
}

/// Waits for the first frame that `want` accepts.
fn wait_for(tap: &mut Tap, began: Instant, want: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        match tap.receive(now(began)) {
            Some(frame) if want(frame) => return frame.to_vec(),
            Some(_) => {}
            None => std::thread::yield_now(),
        }
    }
    panic!("no such frame in 20 s");
}

fn inside() {
    let mut tap = match Tap::open(NAME) {
        Ok(tap) => tap,
        Err(TapError::NotAllowed | TapError::Refused(_)) => return println!("skipped: no TAP device to be had here"),
        Err(error) => panic!("{error}"),
    };
    assert!(matches!(Tap::open("lo"), Err(TapError::Taken(_))), "an interface, and no TAP");
    for arguments in [["addr", "add", "10.99.0.1/24", "dev", NAME].as_slice(), &["link", "set", NAME, "up"]] {
        match Command::new("ip").args(arguments).status() {
            Ok(status) => assert!(status.success(), "ip {arguments:?}"),
            Err(error) => return println!("skipped: needs ip ({error})"),
        }
    }
    UdpSocket::bind("10.99.0.1:0").unwrap().send_to(b"hello", "10.99.0.2:9").unwrap();
    let began = Instant::now();
    let asked = wait_for(&mut tap, began, |frame| frame[12..14] == ARP && frame[38..42] == [10, 99, 0, 2]);
    assert_eq!(asked[..6], [0xff; 6], "who has 10.99.0.2?");
    // The same question the other way round.
    let mut ask = asked;
    let us = [0x02, 0, 0, 0, 0, 0x42];
    ask[6..12].copy_from_slice(&us);
    ask[22..28].copy_from_slice(&us);
    ask[28..32].copy_from_slice(&[10, 99, 0, 2]);
    ask[38..42].copy_from_slice(&[10, 99, 0, 1]);
    tap.send(&ask, now(began));
    let answer = wait_for(&mut tap, began, |frame| frame[12..14] == ARP && frame[20..22] == [0, 2]);
    assert_eq!((&answer[..6], &answer[28..32]), (&us[..], &[10, 99, 0, 1][..]));
    assert_eq!(tap.lost(), 0);
}

#[test]
fn an_interface_needs_a_name_that_fits() {
    for name in ["", "sixteen-messages!"] {
        assert!(matches!(Tap::open(name), Err(TapError::Name(_))), "{name:?}");
    }
}
