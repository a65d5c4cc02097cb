//! Network namespaces on a VNI: ordinary connections between them, in segments of 64 KiB whose check sums nobody computes.

#[cfg(test)]
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod net;
#[cfg(test)]
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod place;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use tasuki_net::port::Armed;
    use tasuki_net::switch::Switch;
    use tasuki_net::tap::TapNode;
    use tasuki_shm::line::{Claims, Line};
    use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet, directory_lines};
    use tasuki_tap::device::Before;

    use crate::net::Net;
    use crate::place::{Place, StopAtEnd, pattern};

    type Lines = Arc<[Line]>;

    /// Drives a node until it is told to stop; gives it back.
    fn drive(mut node: TapNode<Lines>, stop: &AtomicBool) -> TapNode<Lines> {
        while !stop.load(Ordering::Relaxed) {
            if node.turn() == 0 && node.arm() == Armed::Idle {
                node.rest(Duration::from_millis(50));
            }
            node.tick(Instant::now());
        }
        node
    }

    /// Two namespaces that reach each other, with 192.0.2.1 and 192.0.2.2.
    fn with_two(pool_pages: u32, what: impl FnOnce([&Place; 2])) -> Option<[TapNode<Lines>; 2]> {
        if !crate::place::is_possible() {
            return None;
        }
        let places = ["a", "b"].map(|end| Place::new(&format!("{end}{pool_pages}")));
        let lines: Lines = (0..directory_lines(4)).map(|_| Line::default()).collect();
        let mut directory = Directory::new(Arc::clone(&lines));
        let mut nodes = NodeSet::default();
        let mut net = Net::with(2, pool_pages);
        let mut ends = Vec::new();
        for (number, place) in (0_u8..).zip(&places) {
            let mac = [2, 0, 0, 0, 0x7a, number];
            let tap = place.tap_of(mac, &format!("192.0.2.{}/24", number + 1), Before::Offload);
            directory.add(mac, number.into()).expect("there is room");
            nodes.insert(number.into());
            let switch = Switch::new(number.into(), Lookup::new(Claims::of(Arc::clone(&lines))));
            ends.push(TapNode::new(tap, net.take(number.into()), switch));
        }
        directory.set_nodes(&nodes);
        let stop = AtomicBool::new(false);
        let done = std::thread::scope(|scope| {
            let driven: Vec<_> = ends.into_iter().map(|node| scope.spawn(|| drive(node, &stop))).collect();
            let guard = StopAtEnd(&stop);
            what([&places[0], &places[1]]);
            drop(guard);
            driven.into_iter().map(|node| node.join().expect("a node does not panic")).collect::<Vec<_>>()
        });
        done.try_into().ok()
    }

    /// Sends so many bytes one way and reads them back the other.
    fn connection(places: [&Place; 2], bytes: usize) {
        let listener = places[1].within(|| TcpListener::bind("192.0.2.2:7777")).expect("it binds");
        let echo = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("somebody connects");
            let mut writer = stream.try_clone().expect("a copy of the socket");
            std::io::copy(&mut stream, &mut writer).expect("the connection holds")
        });
        let mut stream = places[0].within(|| TcpStream::connect("192.0.2.2:7777")).expect("it connects");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
        let mut reader = stream.try_clone().expect("a copy of the socket");
        let reads = std::thread::spawn(move || {
            let mut back = Vec::new();
            reader.read_to_end(&mut back).map(|_| back)
        });
        let sent: Vec<u8> = (0..bytes).map(pattern).collect();
        stream.write_all(&sent).expect("the connection holds");
        stream.shutdown(std::net::Shutdown::Write).expect("it ends");
        let back = reads.join().expect("the reader does not panic").expect("the connection holds");
        assert!(back == sent, "{} bytes came back of {bytes}, or others", back.len());
        assert_eq!(echo.join().expect("the echo does not panic"), bytes as u64);
    }

    #[test]
    fn a_connection_carries_every_byte_in_segments_that_nobody_cuts() {
        const BYTES: usize = 20_000_000;
        let Some([mut a, mut b]) = with_two(512, |places| connection(places, BYTES)) else { return };
        let sent = a.vni().counts(1).expect("they know each other").sent;
        assert!(sent < BYTES as u64 / 3000, "{sent} frames for {BYTES} bytes: segments were cut");
        assert_eq!((a.dropped.refused, a.dropped.too_late, b.dropped.refused, b.dropped.too_late), (0, 0, 0, 0));
        assert!(b.vni().counts(0).expect("they know each other").received > 0);
    }

    #[test]
    fn a_small_pool_holds_up_a_connection_and_breaks_nothing() {
        // Hardly two segments.
        with_two(80, |places| connection(places, 3_000_000));
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
}
