//! Two namespaces that reach each other through the kernel; this test takes the place of their workers.

#[cfg(test)]
mod tests {
    use std::hash::{Hash as _, Hasher};
    use std::io::ErrorKind;
    use std::net::UdpSocket;
    use std::os::fd::{AsFd, OwnedFd};
    use std::process::Command;
    use std::time::{Duration, Instant};

    use rustix::event::{PollFd, PollFlags, Timespec};
    use rustix::io::Errno;
    use rustix::net::{RecvFlags, recvfrom};
    use tasuki_tap::interface::Interface;
    use tasuki_tap::namespace::Namespace;
    use tasuki_tap::shortcut::{Crossed, Lost, Shortcut, VethEnd, remove_beside};
    use tasuki_tap::{Settings, TapError};

    /// Longer than any step takes on a busy machine.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Bytes of the virtio-net header before each frame.
    const HEADER: usize = 10;

    /// A network namespace; dropping this removes it.
    struct Place(String);

    impl Place {
        fn new(test: &str, end: usize) -> Self {
            let name = format!("tasuki-tap-{}-{test}-{end}", std::process::id());
            assert!(ip(&["netns", "add", &name]), "no network namespace could be made");
            Place(name)
        }

        fn here(&self) -> Namespace {
            Namespace::named(&self.0)
        }

        fn socket(&self, address: &str) -> UdpSocket {
            let bound = self.here().within(|| Ok(UdpSocket::bind((address, 4000)))).expect("the namespace is there");
            let socket = bound.expect("the namespace has that address");
            socket.set_nonblocking(true).expect("a socket can be told not to block");
            socket
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            ip(&["netns", "del", &self.0]);
        }
    }

    fn ip(words: &[&str]) -> bool {
        Command::new("ip").args(words).status().is_ok_and(|status| status.success())
    }

    /// Two namespaces, 192.0.2.1 and 192.0.2.2, their veth ends, and the TAP descriptors of their workers.
    struct Rig {
        places: [Place; 2],
        sockets: [UdpSocket; 2],
        shortcut: Shortcut,
        veth_ends: [Option<VethEnd>; 2],
        devices: [OwnedFd; 2],
        /// Number of frames that each worker has seen.
        seen: [usize; 2],
    }

    fn mac(of: usize) -> [u8; 6] {
        [2, 0, 0, 0, 0x5c, u8::try_from(of).expect("a small number")]
    }

    impl Rig {
        fn new(test: &str) -> Option<Self> {
            if !rustix::process::geteuid().is_root() {
                println!("skipped: network namespaces need root");
                return None;
            }
            let places = [0, 1].map(|end| Place::new(test, end));
            let made = Shortcut::new().and_then(|mut shortcut| {
                let mut connect = |end: usize| {
                    let address = format!("192.0.2.{}/24", end + 1).parse().expect("an address");
                    shortcut.connect(&places[end].here(), "lan", &Settings::of(Some(address)), mac(end))
                };
                let made = [connect(0)?, connect(1)?];
                Ok((shortcut, made))
            });
            let (shortcut, made) = match made {
                Ok(made) => made,
                // The kernel lacks veth or BPF, or does not allow them.
                Err(error @ (TapError::NoPair(_) | TapError::NoProgram(_) | TapError::NotAllowed)) => {
                    println!("skipped: {error}");
                    return None;
                }
                Err(error) => panic!("{error}"),
            };
            let sockets = [0, 1].map(|end| places[end].socket(&format!("192.0.2.{}", end + 1)));
            let [(one, first), (other, second)] = made;
            let veth_ends = [Some(one), Some(other)];
            Some(Rig { places, sockets, shortcut, veth_ends, devices: [first, second], seen: [0; 2] })
        }

        fn veth_end(&self, end: usize) -> &VethEnd {
            self.veth_ends[end].as_ref().expect("it has one")
        }

        fn veth_end_mut(&mut self, end: usize) -> &mut VethEnd {
            self.veth_ends[end].as_mut().expect("it has one")
        }

        /// Passes frames on as the workers would.
        fn pump(&mut self) {
            for end in [0, 1] {
                let mut frame = [0; 70_000];
                while let Ok(len) = rustix::io::read(&self.devices[end], &mut frame) {
                    assert_eq!(frame[HEADER + 6..HEADER + 12], mac(end), "it is the sender's own");
                    // In its first second the kernel of a namespace says something of its own, by IPv6.
                    self.seen[end] += usize::from(frame[HEADER + 12..HEADER + 14] != [0x86, 0xdd]);
                    rustix::io::write(&self.devices[1 - end], &frame[..len]).expect("the other worker's TAP takes it");
                }
            }
        }

        /// Sends a datagram from one namespace to the other.
        fn send(&self, from: usize, what: u32) {
            let to = format!("192.0.2.{}:4000", 2 - from);
            self.sockets[from].send_to(&what.to_ne_bytes(), to).expect("a datagram leaves");
        }

        fn take(&self, at: usize) -> Option<u32> {
            let mut bytes = [0; 4];
            match self.sockets[at].recv(&mut bytes) {
                Ok(_) => Some(u32::from_ne_bytes(bytes)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                Err(error) => panic!("{error}"),
            }
        }

        /// Sends a datagram in each direction through the workers: from then on each namespace knows the other's MAC
        /// address.
        fn acquaint(&mut self) {
            for from in [0, 1] {
                let mut sent = None;
                self.until("it crosses", |rig| {
                    // The kernel drops what is for a link that it has not seen come up.
                    if sent.is_none_or(|sent: Instant| sent.elapsed() > Duration::from_secs(1)) {
                        rig.send(from, u32::MAX);
                        sent = Some(Instant::now());
                    }
                    rig.pump();
                    rig.take(1 - from).is_some()
                });
            }
        }

        fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
            let since = Instant::now();
            while !is_so(self) {
                assert!(since.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }

        /// Sends datagrams that must arrive although the TAPs are not read.
        fn cross(&mut self, count: u32) {
            for from in [0, 1] {
                for number in 0..count {
                    self.send(from, number);
                    self.until("it crosses with no worker", |rig| rig.take(1 - from) == Some(number));
                }
            }
        }
    }

    #[test]
    fn frames_between_namespaces_take_no_worker() {
        let Some(mut rig) = Rig::new("direct") else { return };
        rig.acquaint();
        let (seen, before) = (rig.seen, [0, 1].map(|end| rig.veth_end(end).crossed()));
        rig.cross(50);
        rig.pump();
        assert_eq!(rig.seen, seen, "no worker has seen any");
        for end in [0, 1] {
            let now = rig.veth_end(end).crossed();
            assert!(now.sent - before[end].sent >= 50 && now.received - before[end].received >= 50, "{now:?}");
        }
    }

    #[test]
    fn on_a_detour_all_go_by_the_worker() {
        let Some(mut rig) = Rig::new("detour") else { return };
        rig.acquaint();
        rig.cross(3);
        let before = rig.veth_end(0).crossed();
        rig.veth_end_mut(0).set_detour(true).expect("it can be told");
        for from in [0, 1] {
            let seen = rig.seen[from];
            rig.send(from, 7);
            rig.until("its worker sees it", |rig| {
                rig.pump();
                rig.seen[from] > seen
            });
            rig.until("it arrives", |rig| rig.take(1 - from) == Some(7));
        }
        assert_eq!(rig.veth_end(0).crossed(), before, "what was counted stays counted");
        rig.veth_end_mut(0).set_detour(false).expect("it can be told");
        rig.cross(5);
        assert!(rig.veth_end(0).crossed().received >= before.received + 5);
    }

    #[test]
    fn what_is_sent_in_anothers_name_takes_no_shortcut() {
        let Some(mut rig) = Rig::new("name") else { return };
        rig.acquaint();
        let crossed = rig.veth_end(1).crossed().received;
        let other = [2, 0, 0, 0, 0x5c, 0x77];
        rig.places[0].here().within(|| Interface::find("lan")?.set_mac(other)).expect("root gives it another address");
        // The change of address clears the neighbour table.
        rig.until("it sends in that name", |rig| {
            rig.send(0, 9);
            let mut frame = [0; 2048];
            let read = rustix::io::read(&rig.devices[0], &mut frame);
            read.is_ok() && frame[HEADER + 6..HEADER + 12] == other
        });
        assert_eq!(rig.veth_end(1).crossed().received, crossed);
        assert_eq!(rig.take(1), None, "nothing arrived past its worker");
    }

    /// Takes the last value that is hashed, as bytes: rustix does not give those of a packet socket's address.
    #[derive(Default)]
    struct Bytes(Vec<u8>);

    impl Hasher for Bytes {
        fn finish(&self) -> u64 {
            0
        }

        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.to_vec();
        }
    }

    /// A router passes on all frames that it takes for its own.
    ///
    /// row: T151
    #[test]
    fn a_namespace_takes_no_frame_for_its_own_that_is_not() {
        let Some(mut rig) = Rig::new("types") else { return };
        // The kernel drops what the pair is to send until it has seen the link.
        rig.acquaint();
        let socket = tasuki_tap::packet::open(&rig.places[1].here(), "lan").expect("root has packet sockets");
        let payload = [0x5c; 46];
        // Whether the frame has a tag makes no difference, and neither has the order.
        let tagged: [&[u8]; 2] = [&[], &[0x81, 0, 0, 5]];
        let of_types = [
            (mac(1), 0),
            ([0xff; 6], 1),
            ([0x33, 0x33, 0, 0, 0, 1], 2),
            ([3, 0xbf, 0xc6, 0x33, 0x64, 0x64], 2),
            (mac(0x77), 3),
            (mac(1), 0),
        ];
        for (tag, (to, expected)) in tagged.into_iter().flat_map(|tag| of_types.map(|of_type| (tag, of_type))) {
            let frame = [&[0; HEADER], &to[..], &mac(0), tag, &[0x88, 0xb5], &payload].concat();
            rustix::io::write(&rig.devices[1], &frame).expect("the TAP takes it");
            let mut room = [0; 2048];
            let since = Instant::now();
            // The kernel has frames of its own for the interface.
            let kind = loop {
                assert!(since.elapsed() < PATIENCE, "it does not arrive: {frame:02x?}");
                let mut poll = [PollFd::new(&socket, PollFlags::IN)];
                rustix::event::poll(&mut poll, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }))
                    .expect("it can be waited for");
                let Ok((len, _, from)) = recvfrom(&socket, &mut room, RecvFlags::DONTWAIT) else { continue };
                if room[..len].ends_with(&payload) {
                    // `sll_pkttype` of `struct sockaddr_ll`.
                    let mut bytes = Bytes::default();
                    from.expect("a packet socket says it").hash(&mut bytes);
                    break bytes.0[10];
                }
            };
            assert_eq!(kind, expected, "{frame:02x?}");
        }
    }

    #[test]
    fn frames_that_the_kernel_drops_are_counted_and_a_link_that_is_down_is_seen() {
        let Some(mut rig) = Rig::new("lost") else { return };
        let broadcast = |len: usize| [&[0; HEADER], &[0xff; 6][..], &mac(0), &[0x88, 0xb5], &vec![0; len][..]].concat();
        rig.acquaint();
        assert_eq!(rig.veth_end(1).has_link(), Some(true));
        let before = rig.veth_end(1).lost().expect("the kernel says it");
        for len in [1500, 1600] {
            rustix::io::write(&rig.devices[1], &broadcast(len)).expect("the TAP takes it");
        }
        let lost = rig.veth_end(1).lost().expect("the kernel says it");
        assert_eq!(lost, Lost { received: before.received + 1, ..before }, "one is longer than the MTU");
        // Nobody reads the TAP.
        rig.sockets[1].set_broadcast(true).expect("it may");
        rig.until("its queue is full", |rig| {
            (0..100).for_each(|_| _ = rig.sockets[1].send_to(&[0], "192.0.2.255:4000"));
            rig.veth_end(1).lost().expect("the kernel says it").sent > before.sent
        });
        rig.places[1].here().within(|| Ok(ip(&["link", "set", "lan", "down"]))).expect("the namespace is there");
        rig.until("its link is down", |rig| rig.veth_end(1).has_link() == Some(false));
    }

    /// An address that comes later may be lost to one that the machine's rules for devices set meanwhile.
    #[test]
    fn an_interface_has_its_address_as_its_own_from_the_beginning() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: network namespaces need root");
        }
        let [hub, place] = [0, 1].map(|end| Place::new("address", end));
        let there = place.here().open().expect("it is there");
        let pair = hub.here().within(|| Interface::create_pair("end", 1500, ("lan", mac(7)), there.as_fd()));
        if let Err(error @ (TapError::NoPair(_) | TapError::NotAllowed)) = pair {
            return println!("skipped: {error}");
        }
        let read = |file: &str| {
            let file = format!("/sys/class/net/lan/{file}");
            let said = Command::new("ip").args(["netns", "exec", &place.0, "cat", &file]).output().expect("a program");
            String::from_utf8(said.stdout).expect("text").trim().to_owned()
        };
        assert_eq!(read("address"), mac(7).map(|byte| format!("{byte:02x}")).join(":"));
        assert_eq!(read("addr_assign_type"), "3", "NET_ADDR_SET");
    }

    #[test]
    fn a_namespace_that_goes_is_seen_to_go() {
        let Some(mut rig) = Rig::new("gone") else { return };
        rig.acquaint();
        assert!(rig.veth_end(1).is_there());
        assert!(ip(&["netns", "del", &rig.places[1].0]));
        // The socket keeps the namespace alive.
        rig.sockets[1] = UdpSocket::bind("127.0.0.1:0").expect("there is loopback");
        rig.until("its veth end is gone", |rig| !rig.veth_end(1).is_there());
        rig.veth_ends[1].take().expect("it had one").remove();
        let read = rustix::io::read(&rig.devices[1], &mut [0; 2048]);
        assert_eq!(read, Err(Errno::BADFD), "its worker sees it too");
    }

    #[test]
    fn an_interface_that_is_moved_is_seen_to_be_elsewhere() {
        let Some(rig) = Rig::new("moved") else { return };
        let [here, there] = rig.places.each_ref().map(Place::here);
        let is_in = || [&here, &there].map(|place| rig.veth_end(0).is_in(place));
        assert_eq!(is_in(), [Some(true), Some(false)]);
        let [from, to] = rig.places.each_ref().map(|place| &place.0[..]);
        assert!(ip(&["-n", from, "link", "set", "lan", "name", "lan0", "netns", to]));
        assert_eq!(is_in(), [Some(false), Some(true)]);
    }

    #[test]
    fn a_daemon_that_comes_later_goes_on_with_them() {
        let Some(mut rig) = Rig::new("adopted") else { return };
        rig.acquaint();
        let Rig { places, sockets, shortcut, veth_ends, devices, .. } = rig;
        drop((shortcut, veth_ends));
        let mut shortcut = Shortcut::around(&devices[0]).expect("a TAP knows where it is");
        let veth_ends =
            [0, 1].map(|end| Some(shortcut.adopt(&devices[end], mac(end), true).expect("it is a veth end")));
        let mut rig = Rig { places, sockets, shortcut, veth_ends, devices, seen: [0; 2] };
        rig.cross(5);
        rig.pump();
        // A third can be added beside them, and each of them removed.
        let place = Place::new("adopted", 2);
        let third = rig
            .shortcut
            .connect(&place.here(), "lan", &Settings::default(), mac(2))
            .expect("there is room for one more");
        let veth_end = rig.veth_ends[1].take().expect("it has one");
        veth_end.remove();
        let found = rig.places[1].here().within(|| Interface::find("lan"));
        assert!(matches!(found, Err(TapError::SetUp { .. })), "its interface is gone: {found:?}");
        drop(third);
    }

    #[test]
    fn a_veth_end_that_nobody_drives_makes_room_for_a_new_one() {
        let Some(rig) = Rig::new("swept") else { return };
        let Rig { places, sockets, mut shortcut, veth_ends, devices, .. } = rig;
        drop((veth_ends, sockets));
        let again = shortcut
            .connect(&places[1].here(), "lan", &Settings::default(), mac(1))
            .map(drop)
            .expect_err("it is driven");
        assert!(matches!(&again, TapError::Taken(name) if name == "lan"), "{again}");
        let [kept, ended] = devices;
        drop(ended);
        let (veth_end, _) = shortcut
            .connect(&places[1].here(), "lan", &Settings::default(), mac(1))
            .expect("nobody drives it any more");
        assert!(veth_end.is_there());
        drop(kept);
    }

    #[test]
    fn a_veth_end_that_went_while_no_daemon_ran_keeps_no_other_from_coming() {
        let Some(rig) = Rig::new("went") else { return };
        let Rig { places, sockets, shortcut, veth_ends, devices, .. } = rig;
        drop((shortcut, veth_ends, sockets));
        places[1].here().within(|| Interface::find("lan")?.delete()).expect("root takes it away");
        let mut shortcut = Shortcut::around(&devices[0]).expect("a TAP knows where it is");
        let first = shortcut.adopt(&devices[0], mac(0), true).expect("it is a veth end");
        // Its worker still has the TAP.
        let place = Place::new("went", 2);
        let (third, _) =
            shortcut.connect(&place.here(), "lan", &Settings::default(), mac(2)).expect("there is room for one more");
        assert!(first.is_there() && third.is_there());
        let gone = shortcut.adopt(&devices[1], mac(1), true).map(drop).expect_err("there is none");
        assert!(matches!(gone, TapError::NoVethEnd(_)), "{gone}");
        let read = rustix::io::read(&devices[1], &mut [0; 2048]);
        assert_eq!(read, Err(Errno::BADFD), "its worker sees it");
    }

    #[test]
    fn one_that_may_take_the_shortcut_no_more_goes_by_its_worker_and_can_be_removed() {
        let Some(mut rig) = Rig::new("no-more") else { return };
        rig.acquaint();
        rig.cross(3);
        let Rig { places, sockets, shortcut, veth_ends, devices, .. } = rig;
        drop((shortcut, veth_ends));
        let mut shortcut = Shortcut::around(&devices[0]).expect("a TAP knows where it is");
        let adopt = |end: usize| Some(shortcut.adopt(&devices[end], mac(end), end == 1).expect("it is a veth end"));
        let veth_ends = [0, 1].map(adopt);
        let mut rig = Rig { places, sockets, shortcut, veth_ends, devices, seen: [0; 2] };
        // The same holds after a change to another address and back.
        rig.veth_end_mut(0).set_mac(mac(7)).expect("it can be told");
        rig.veth_end_mut(0).set_mac(mac(0)).expect("it can be told");
        for from in [0, 1] {
            let seen = rig.seen[from];
            rig.send(from, 7);
            rig.until("it arrives", |rig| {
                rig.pump();
                rig.take(1 - from) == Some(7)
            });
            assert!(rig.seen[from] > seen, "its worker has seen it");
        }
        assert_eq!(rig.veth_end(0).crossed(), Crossed::default());
        rig.veth_ends[0].take().expect("it has one").remove();
        let found = rig.places[0].here().within(|| Interface::find("lan"));
        assert!(found.is_err(), "its interface is gone");
        // A veth end that no daemon could adopt can be removed, too.
        remove_beside(&rig.devices[1]);
        let found = rig.places[1].here().within(|| Interface::find("lan"));
        assert!(found.is_err(), "its interface is gone");
    }

    #[test]
    fn a_tap_that_a_namespace_calls_as_a_veth_end_is_called_is_none() {
        let Some(_rig) = Rig::new("called") else { return };
        let place = Place::new("called", 2);
        let plain =
            tasuki_tap::Tap::create(&place.here(), "lan", &Settings::default(), tasuki_tap::device::Before::Offload);
        let device = plain.expect("a TAP").device;
        // Root of that namespace can do this.
        let inside = |words: &[&str]| assert!(ip(&[&["-n", &place.0], words].concat()), "{words:?}");
        inside(&["link", "set", "lan", "down"]);
        inside(&["link", "set", "lan", "name", "tap7"]);
        inside(&["link", "add", "veth_end7", "type", "veth", "peer", "name", "other"]);
        let said = Shortcut::around(&device).map(drop).expect_err("others rule there");
        assert!(matches!(&said, TapError::NoVethEnd(name) if name == "tap7"), "{said}");
        remove_beside(&device);
        assert!(place.here().within(|| Interface::find("veth_end7")).is_ok(), "it is left alone");
    }

    #[test]
    fn nobody_waits_at_a_namespace_that_is_a_fifo() {
        let path = std::env::temp_dir().join(format!("tasuki-tap-{}-fifo", std::process::id()));
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("a FIFO");
        let (say, hear) = std::sync::mpsc::channel();
        let place = Namespace::At(path.clone());
        std::thread::spawn(move || say.send(place.within(|| Ok(()))));
        let said = hear.recv_timeout(PATIENCE);
        std::fs::remove_file(path).expect("it was there");
        assert!(matches!(said, Ok(Err(TapError::Namespace { .. }))), "{said:?}");
    }

    #[test]
    fn what_cannot_be_is_said() {
        let Some(mut rig) = Rig::new("wrong") else { return };
        let nowhere = Namespace::named("tasuki-no-such-namespace");
        let said =
            rig.shortcut.connect(&nowhere, "lan", &Settings::default(), mac(3)).map(drop).expect_err("there is none");
        assert!(matches!(said, TapError::NoNamespace(_)), "{said}");
        let said = rig
            .shortcut
            .connect(&rig.places[0].here(), "a b", &Settings::default(), mac(3))
            .map(drop)
            .expect_err("no name");
        assert!(matches!(said, TapError::Name(_)), "{said}");
        let plain = tasuki_tap::Tap::create(
            &rig.places[0].here(),
            "other",
            &Settings::default(),
            tasuki_tap::device::Before::Offload,
        );
        let said = rig.shortcut.adopt(&plain.expect("a TAP").device, mac(3), true).map(drop).expect_err("no veth end");
        assert!(matches!(&said, TapError::NoVethEnd(name) if name == "other"), "{said}");
    }
}
