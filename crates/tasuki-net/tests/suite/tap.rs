//! Network namespaces on a VNI: ordinary connections between them, in segments of 64 KiB without computed checksums.

use std::net::UdpSocket;
use std::time::Duration;

use crate::place::pattern;
use crate::place::two::{connection, with_two};

#[test]
fn a_connection_carries_every_byte_in_segments_that_nobody_cuts() {
    const BYTES: usize = 20_000_000;
    let Some([mut a, mut b]) = with_two(512, |places| connection(places, "192.0.2.2:7777", BYTES)) else { return };
    let sent = a.vni().counts(1).expect("they know each other").sent;
    assert!(sent < BYTES as u64 / 3000, "{sent} frames for {BYTES} bytes: segments were cut");
    assert_eq!((a.dropped.refused, a.dropped.too_late, b.dropped.refused, b.dropped.too_late), (0, 0, 0, 0));
    assert!(b.vni().counts(0).expect("they know each other").received > 0);
}

#[test]
fn a_small_pool_holds_up_a_connection_and_breaks_nothing() {
    // Room for hardly two segments.
    with_two(80, |places| connection(places, "192.0.2.2:7777", 3_000_000));
}

#[test]
fn datagrams_of_all_lengths_cross() {
    with_two(511, |places| {
        let [ours, theirs] = [(places[0], "192.0.2.1:0"), (places[1], "192.0.2.2:7778")]
            .map(|(place, at)| place.within(|| UdpSocket::bind(at)).expect("it binds"));
        theirs.set_read_timeout(Some(Duration::from_secs(20))).expect("a time limit");
        ours.connect("192.0.2.2:7778").expect("it is reachable");
        let mut buffer = vec![0; 70_000];
        for len in (1..3000).step_by(37).chain([8972, 20_000, 65_507]) {
            let sent: Vec<u8> = (0..len).map(|at| pattern(at + len)).collect();
            ours.send(&sent).expect("it is sent");
            let got = theirs.recv(&mut buffer).expect("it comes");
            assert!(buffer[..got] == sent, "{len} bytes were sent, and {got} came, or others");
        }
    });
}
