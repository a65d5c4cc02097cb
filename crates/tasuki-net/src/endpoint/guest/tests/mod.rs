//! Kills a node's worker at every place in its code while frames cross both ways: each arrives exactly once, and the
//! guest notices nothing. And what a hostile guest or front end is told.

use theirs::{CSUM, EVENT_IDX, GUEST_CSUM, GUEST_TSO4, IN_ORDER, INDIRECT, MRG_RXBUF, Machine};
use theirs::{PACKED, PROTOCOL, VERSION_1};

use super::front_ends::LATE_NEWS;
use super::*;
use crate::endpoint::rate::{Limit, Rate, Rates};
use crate::endpoint::{Bridge, is_readable};
use crate::vni::Vni;
use crate::vni::fixture::{Nodes, frame, listen, mac, received};
use crate::vni::ledger::point;
use crate::vni::mortal::lives_for;

/// A machine written from the specifications.
#[path = "../../../../tests/suite/vm.rs"]
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod theirs;

mod attack;
mod counts;
mod cut;
mod loans;
mod migration;
mod packed;
mod pairs;
mod second;
mod set_up;

const US: u16 = 0;
const OTHER: u16 = 1;
const ALL: u64 = VERSION_1 | MRG_RXBUF | INDIRECT | EVENT_IDX | PROTOCOL;
const PLAIN: u64 = VERSION_1 | MRG_RXBUF | PROTOCOL;

/// Rings of either layout: features, number of descriptors, and the bytes of a piece of what the guest sends. A packed
/// ring of 49 wraps within a chain.
const RINGS: [(u64, u16, Option<usize>); 6] = [
    (ALL, 64, Some(100)),
    (PLAIN, 64, None),
    (ALL | PACKED, 64, Some(100)),
    (ALL | PACKED | IN_ORDER, 49, None),
    (PLAIN | PACKED, 49, Some(400)),
    (PLAIN | PACKED | IN_ORDER, 49, Some(400)),
];

struct Net {
    nodes: Nodes,
    /// Node 1 and on.
    others: Vec<Vni>,
    listener: OwnedFd,
    folder: tempfile::TempDir,
    node: Option<Bridge<Guest>>,
    interrupt_every: Duration,
    /// The loans of the machine's pairs.
    loans: Span<Line>,
    /// What the daemon was told last.
    known: Option<Parts>,
}

/// Copies parts, as the daemon does for each worker.
fn copy_of(Parts { name, number, version, text, fds }: &Parts) -> Parts {
    let fds = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    Parts { name: name.clone(), number: *number, version: *version, text: text.clone(), fds }
}

/// Takes a turn of a worker, which tells the daemon of a front end that waits for that.
fn turn_of(node: &mut Bridge<Guest>, known: &mut Option<Parts>) {
    node.rest(Duration::ZERO);
    node.turn();
    if node.endpoint.waits() {
        point("worker.telling");
        *known = node.endpoint.parts().unwrap();
        point("worker.told");
        node.endpoint.told();
    }
}

fn lines_of_loans() -> Span<Line> {
    let memory = tasuki_shm::region::Region::create("loans", 4096, tasuki_shm::region::Pages::Small).unwrap();
    memory.span(0, tasuki_shm::vni::loans::LINES).unwrap()
}

impl Net {
    fn new(count: u16) -> Self {
        let nodes = Nodes::new(count);
        let others = (OTHER..count).map(|number| nodes.end(number)).collect();
        let folder = tempfile::tempdir().unwrap();
        let listener = listen(&folder.path().join("vm.sock"), SocketType::STREAM);
        let loans = lines_of_loans();
        let mut net =
            Net { nodes, others, listener, folder, node: None, interrupt_every: Duration::ZERO, loans, known: None };
        net.node = Some(net.worker());
        net
    }

    fn worker(&self) -> Bridge<Guest> {
        let mut guest = Guest::new(self.listener.try_clone().unwrap()).unwrap();
        guest.interrupt_every[TO_GUEST] = self.interrupt_every;
        guest.share(self.loans.clone(), US);
        guest.lend_after = Duration::ZERO;
        Bridge::new(Box::new(guest), self.nodes.exact_end(US), self.nodes.switch(US))
    }

    fn machine(&mut self, features: u64, size: u16) -> Machine {
        let path = self.folder.path().join("vm.sock");
        Machine::start(&path, features, size, || self.turn())
    }

    fn turn(&mut self) {
        turn_of(self.node.as_mut().unwrap(), &mut self.known);
    }

    fn settle(&mut self) {
        (0..60).for_each(|_| self.turn());
    }

    /// Waits until a stale machine gets no newer description any more.
    fn await_news(&mut self) {
        if self.guest().stale.is_some() {
            std::thread::sleep(LATE_NEWS);
        }
    }

    fn guest(&mut self) -> &mut Guest {
        &mut self.node.as_mut().unwrap().endpoint
    }

    /// Returns what the worker tells the daemon.
    fn parts(&mut self) -> Parts {
        let parts = self.guest().parts().unwrap().expect("a machine is connected");
        self.guest().told();
        parts
    }

    /// Lets the worker take turns until it has passed `places` places in its code, and kills it there. Returns false if
    /// it came to the end of the turns. It is gone in any case.
    fn kill(&mut self, places: u32, turns: u32) -> bool {
        let mut node = self.node.take().unwrap();
        lives_for(places, || (0..turns).for_each(|_| turn_of(&mut node, &mut self.known)))
    }

    fn replace(&mut self, parts: Parts) {
        self.node = None;
        let mut node = self.worker();
        node.endpoint.go_on(parts).unwrap();
        self.node = Some(node);
    }

    /// Sends a frame with an offload header to the guest.
    fn give(&mut self, header: &[u8], frame: &[u8]) {
        let len = header.len() + frame.len();
        self.others[0].draft(US, len).unwrap().copy_from_slice(&[header, frame].concat());
        self.others[0].post(US, len, true);
        self.others[0].flush();
    }

    fn trouble(&mut self) -> String {
        self.guest().trouble().expect("a sentence")
    }
}

#[test]
fn wherever_a_worker_is_killed_each_frame_crosses_exactly_once() {
    const BEFORE: usize = 3;
    const COUNT: usize = 9;
    for (features, size, pieces) in RINGS {
        for places in 0.. {
            let mut net = Net::new(2);
            let mut machine = net.machine(features, size);
            machine.pieces = pieces;
            let exchange = |net: &mut Net, machine: &mut Machine, numbers: std::ops::Range<usize>| {
                for number in numbers {
                    assert!(machine.send(&frame(OTHER, US, number)));
                    net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
                }
                net.others[0].flush();
            };
            exchange(&mut net, &mut machine, 0..BEFORE);
            net.settle();
            let (mut there, mut back) = (received(&mut net.others[0]), machine.receive());
            exchange(&mut net, &mut machine, BEFORE..COUNT);
            let parts = net.parts();
            let was_killed = net.kill(places, 3);
            // At even places, read what is shown before the next worker starts; at odd places, do not.
            if places % 2 == 0 {
                there.extend(received(&mut net.others[0]));
                back.extend(machine.receive());
            }
            net.replace(parts);
            net.settle();
            there.extend(received(&mut net.others[0]));
            back.extend(machine.receive());
            let right = |to, from| (0..COUNT).map(|number| frame(to, from, number)).collect::<Vec<_>>();
            assert!(there == right(OTHER, US), "{} there, killed at place {places}", there.len());
            assert!(back == right(US, OTHER), "{} back, killed at place {places}", back.len());
            assert_eq!(net.node.as_ref().unwrap().dropped, Dropped::default(), "killed at place {places}");
            // Nothing is left for a third.
            let parts = net.parts();
            net.replace(parts);
            net.settle();
            assert!(received(&mut net.others[0]).is_empty() && machine.receive().is_empty(), "place {places}");
            if !was_killed {
                assert!(places > 6, "it passes more places than that");
                break;
            }
        }
    }
}

/// Returns a segment of TCP over IPv4, and its offload header: it is to be cut into parts with `part` bytes of payload.
fn segment(to: u16, from: u16, part: u16, payload: &[u8]) -> (Offload, Vec<u8>) {
    let tcp = [&[0x30, 0x39, 0, 80][..], &1_u32.to_be_bytes(), &[0; 4], &[0x50, 0x10, 1, 0, 0, 0, 0, 0]].concat();
    let total = u16::try_from(20 + tcp.len() + payload.len()).unwrap();
    let ip = [&[0x45, 0][..], &total.to_be_bytes(), &[0, 1, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]].concat();
    let offload = Offload {
        flags: NEEDS_CSUM,
        gso_type: 1,
        hdr_len: 54.into(),
        gso_size: part.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
    };
    (offload, [&mac(to)[..], &mac(from), &[8, 0], &ip, &tcp, payload].concat())
}

#[test]
fn a_segment_goes_whole_to_a_guest_that_takes_it_and_cut_to_another() {
    let payload: Vec<u8> = (0..3000_u16).map(|i| i.to_le_bytes()[0]).collect();
    let (offload, segment) = segment(US, OTHER, 1000, &payload);
    let mut net = Net::new(2);
    let mut takes = net.machine(ALL | CSUM | GUEST_CSUM | GUEST_TSO4, 64);
    net.give(offload.as_bytes(), &segment);
    net.settle();
    let came = takes.receive_with_headers();
    assert_eq!(came.len(), 1);
    assert!(came[0].1 == segment && came[0].0[..HEADER_LEN] == *offload.as_bytes(), "as it was sent");
    // The same the other way.
    let mut back = segment.clone();
    back[..6].copy_from_slice(&mac(OTHER));
    back[6..12].copy_from_slice(&mac(US));
    assert!(takes.send_with(&[offload.as_bytes(), &[0, 0]].concat(), &back));
    net.settle();
    let mut headers = Vec::new();
    net.others[0].wake();
    net.others[0].receive(|incoming| headers.push(incoming.offload().unwrap()));
    assert_eq!(headers, [offload]);
    drop(takes);
    net.settle();
    assert!(!net.guest().is_running(), "it has left");
    let mut plain = net.machine(ALL, 64);
    net.give(offload.as_bytes(), &segment);
    net.settle();
    let came = plain.receive();
    assert_eq!(came.iter().map(Vec::len).collect::<Vec<_>>(), [1054, 1054, 1054]);
    assert!(came.iter().flat_map(|frame| &frame[54..]).eq(&payload));
}

/// The worker that has the lease by then may serve the machine, as it has heard more.
#[test]
fn a_worker_that_gave_the_lease_away_sends_no_machine_away() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let stale = net.parts();
    machine.ask(11, &theirs::state(1, 0), &mut || net.turn());
    net.replace(stale);
    net.guest().release();
    std::thread::sleep(LATE_NEWS);
    net.guest().attend();
    assert!(!machine.is_hung_up());
}

#[test]
fn a_guest_without_buffers_loses_frames_of_its_own_alone_and_after_a_while() {
    for features in [ALL, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut machine = net.machine(features, 8);
        for number in 0..12 {
            net.others[0].send(US, &frame(US, OTHER, 5 * number)).unwrap();
        }
        net.others[0].flush();
        net.turn();
        assert_eq!(net.node.as_ref().unwrap().dropped.no_buffer, 0, "they wait");
        assert!(machine.send(&frame(OTHER, US, 0)));
        net.turn();
        assert_eq!(received(&mut net.others[0]).len(), 1, "its own frames go on");
        std::thread::sleep(Duration::from_millis(5));
        net.settle();
        assert_eq!(net.node.as_ref().unwrap().dropped.no_buffer, 4);
        assert_eq!(counts::of(&mut net, "rx0_drops_no_room"), 4);
        assert_eq!(machine.receive().len(), 8);
        net.others[0].send(US, &frame(US, OTHER, 1)).unwrap();
        net.others[0].flush();
        net.settle();
        assert_eq!(machine.receive(), [frame(US, OTHER, 1)]);
    }
}

/// Returns whether the guest kicked for the queue, and forgets it.
fn has_kicked(machine: &Machine, queue: usize) -> bool {
    rustix::io::read(&machine.kicks[queue], &mut [0; 8]).is_ok()
}

#[test]
fn a_node_whose_guest_has_no_buffers_sleeps_until_the_guest_posts_some() {
    for features in [ALL, ALL & !EVENT_IDX, ALL | PACKED, ALL & !EVENT_IDX | PACKED] {
        let mut net = Net::new(2);
        let mut machine = net.machine(features, 8);
        for number in 0..12 {
            net.others[0].send(US, &frame(US, OTHER, 5 * number)).unwrap();
        }
        net.others[0].flush();
        net.turn();
        has_kicked(&machine, theirs::RECEIVE);
        let node = net.node.as_mut().unwrap();
        assert!(node.arm() == Armed::Idle && node.waits() > Some(ROOM_AGAIN), "{:?}", node.waits());
        assert_eq!(machine.receive().len(), 8, "it takes its frames and posts their buffers");
        assert!(has_kicked(&machine, theirs::RECEIVE), "it was asked to say so");
        // A guest that posts buffers while the node is awake need not kick.
        node.wake();
        node.turn();
        assert_eq!(machine.receive().len(), 4);
        assert!(!has_kicked(&machine, theirs::RECEIVE));
    }
}

/// The worker looks for a buffer before it sleeps, and does not mind what it finds: the next turn does.
#[test]
fn a_guest_that_breaks_a_rule_while_a_frame_waits_for_a_buffer_is_sent_away() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 8);
    for number in 0..12 {
        net.others[0].send(US, &frame(US, OTHER, 5 * number)).unwrap();
    }
    net.others[0].flush();
    net.turn();
    machine.write(0x2000 + 2, &2000_u16.to_le_bytes());
    assert_eq!(net.node.as_mut().unwrap().arm(), Armed::Idle);
    net.settle();
    let said = net.trouble();
    assert!(said.contains("more than a queue ahead"), "{said}");
    assert!(machine.is_hung_up());
    assert_eq!(machine.receive().len(), 8, "no buffer is used twice");
}

/// Its last interrupt by another back end may have been lost, and by its event index the guest gets no other for what it was
/// shown.
#[test]
fn a_guest_is_interrupted_once_when_its_device_starts() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    for (is_rung, queue) in [(true, theirs::RECEIVE), (true, theirs::SEND), (false, theirs::RECEIVE)] {
        net.settle();
        assert_eq!(machine.was_rung(queue), is_rung, "queue {queue}");
    }
}

/// Returns a node that holds an interrupt for an hour, and its machine.
fn holding() -> (Net, Machine) {
    let mut net = Net::new(2);
    net.interrupt_every = Duration::from_secs(3600);
    net.node = Some(net.worker());
    let mut machine = net.machine(VERSION_1 | MRG_RXBUF | PROTOCOL, 64);
    net.settle();
    machine.was_rung(theirs::RECEIVE);
    for (number, is_due) in [(0, true), (1, false)] {
        net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
        net.others[0].flush();
        net.settle();
        assert_eq!(machine.was_rung(theirs::RECEIVE), is_due, "frame {number}");
    }
    assert_eq!(machine.receive().len(), 2, "both are there");
    assert!(net.node.as_ref().unwrap().waits().is_some(), "it does not sleep past its time");
    (net, machine)
}

#[test]
fn a_held_interrupt_goes_when_its_front_end_is_sent_away() {
    let (mut net, machine) = holding();
    assert!(theirs::send(&machine.socket, b"GET / HTTP/1.1\r\n\r\n", &[]));
    net.settle();
    assert!(machine.is_hung_up() && machine.was_rung(theirs::RECEIVE));
}

#[test]
fn a_held_interrupt_is_not_lost_with_its_eventfd() {
    let (mut net, machine) = holding();
    const NONE: u64 = 1 << 8;
    assert!(theirs::send(&machine.socket, &theirs::message(13, 0, &NONE.to_ne_bytes()), &[]));
    net.settle();
    let new = theirs::eventfd();
    assert!(theirs::send(&machine.socket, &theirs::message(13, 0, &0_u64.to_ne_bytes()), &[new.as_fd()]));
    net.settle();
    assert!(rustix::io::read(&new, &mut [0; 8]).is_ok());
}

#[test]
fn a_held_interrupt_of_a_ring_that_does_not_open_again_keeps_nobody_awake() {
    let (mut net, machine) = holding();
    assert!(theirs::send(&machine.socket, &theirs::message(8, 0, &theirs::state(0, 0)), &[]));
    let kick = theirs::eventfd();
    assert!(theirs::send(&machine.socket, &theirs::message(12, 0, &0_u64.to_ne_bytes()), &[kick.as_fd()]));
    net.settle();
    assert!(!net.guest().is_running() && machine.was_rung(theirs::RECEIVE));
    assert_eq!(net.guest().again_in(), None);
}

#[test]
fn a_guest_that_breaks_a_rule_is_sent_away_with_a_sentence_and_the_next_is_served() {
    type Deed = fn(&mut Machine);
    let deeds: [(Deed, &str); 7] = [
        (|machine| machine.write(0xa000 + 2, &2000_u16.to_le_bytes()), "more than a queue ahead"),
        (
            |machine| {
                machine.write(0xa000 + 4, &64_u16.to_le_bytes());
                machine.write(0xa000 + 2, &1_u16.to_le_bytes());
            },
            "names a descriptor that does not exist",
        ),
        (
            |machine| {
                machine.describe(0x8000, 0, theirs::GUEST + theirs::LEN, 64, 0, 0);
                machine.offer(theirs::SEND, 0);
            },
            "a descriptor lies outside",
        ),
        (
            |machine| {
                machine.describe(0x8000, 0, u64::MAX, 64, 0, 0);
                machine.offer(theirs::SEND, 0);
            },
            "a descriptor lies outside",
        ),
        (
            |machine| {
                machine.describe(0x8000, 0, theirs::GUEST, 64, 1, 0);
                machine.offer(theirs::SEND, 0);
            },
            "or is a loop",
        ),
        (
            |machine| {
                machine.describe(0x8_0000, 0, theirs::GUEST, 16, 4, 0);
                machine.describe(0x8000, 0, theirs::GUEST + 0x8_0000, 16, 4, 0);
                machine.offer(theirs::SEND, 0);
            },
            "an indirect table is within another",
        ),
        (|machine| rustix::fs::ftruncate(&machine.memory, 0).unwrap(), "memory was taken away"),
    ];
    let mut net = Net::new(2);
    for (deed, says) in deeds {
        let mut machine = net.machine(ALL, 64);
        deed(&mut machine);
        machine.write(0, &[]);
        (0..200).for_each(|_| net.turn());
        let said = net.trouble();
        assert!(said.contains(says), "{said}");
        assert!(machine.is_hung_up());
    }
    let mut machine = net.machine(ALL, 64);
    assert!(machine.send(&frame(OTHER, US, 1)));
    net.settle();
    assert_eq!(received(&mut net.others[0]), [frame(OTHER, US, 1)]);
}

/// What runs is what the description says, which is all that a successor has.
#[test]
fn a_ring_whose_place_or_kicks_change_while_it_runs_goes_on_so_under_a_successor() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let mut machine = Machine::start_with(&path, ALL, 64, 2, || net.turn());
    let set_size = |net: &mut Net, machine: &Machine, size| {
        assert!(theirs::send(&machine.socket, &theirs::message(8, 0, &theirs::state(1, size)), &[]));
        net.settle();
    };
    set_size(&mut net, &machine, 0);
    assert!(!net.guest().is_running(), "a ring without descriptors");
    set_size(&mut net, &machine, 64);
    // A ring of the second pair stops; the first pair runs.
    machine.ask(11, &theirs::state(3, 0), &mut || net.turn());
    let parts = net.parts();
    net.replace(parts);
    assert!(net.guest().is_running());
    assert!(machine.send(&frame(OTHER, US, 1)));
    net.settle();
    assert_eq!(received(&mut net.others[0]), [frame(OTHER, US, 1)]);
}

/// A front end whose own socket came with half a message has not left for us when it ends: we hold the other end.
#[test]
fn a_front_end_that_says_nothing_or_half_a_message_is_gone_after_a_while() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let machine = net.machine(ALL, 64);
    let in_a_while = Instant::now() + Duration::from_secs(6);
    let tick = |net: &mut Net| {
        let node = net.node.as_mut().unwrap();
        assert!(node.tick(Instant::now()), "a sleeping node looks again");
        node.tick(in_a_while);
        net.settle();
        net.trouble()
    };
    let _second = theirs::connect(&path);
    net.settle();
    let said = tick(&mut net);
    assert!(said.contains("it connected and said nothing"), "{said}");
    assert!(theirs::send(&machine.socket, &theirs::message(12, 0, &[0; 8])[..5], &[machine.socket.as_fd()]));
    net.settle();
    drop(machine);
    net.settle();
    assert!(net.guest().is_running());
    let said = tick(&mut net);
    assert!(said.contains("it began a message"), "{said}");
    // Two of the kind take both places.
    for _ in 0..2 {
        let machine = net.machine(ALL, 64);
        machine.ask(11, &theirs::state(0, 0), &mut || net.turn());
        machine.ask(11, &theirs::state(1, 0), &mut || net.turn());
        assert!(theirs::send(&machine.socket, &theirs::message(12, 0, &[0; 8])[..5], &[machine.socket.as_fd()]));
        net.settle();
    }
    let third = theirs::connect(&path);
    net.settle();
    let said = net.trouble();
    assert!(said.contains("a third front end connected"), "{said}");
    drop(third);
    (0..2).for_each(|_| _ = tick(&mut net));
    net.machine(ALL, 64);
    assert!(net.guest().is_running());
}

#[test]
fn a_front_end_that_asks_for_what_was_not_offered_is_told() {
    use theirs::{connect, memory, message, send, state, table};
    let path = |net: &Net| net.folder.path().join("vm.sock");
    let odd: [(Vec<u8>, usize, &str); 14] = [
        (message(2, 0, &(1_u64 << 27).to_ne_bytes()), 0, "features that it was not offered (0x8000000)"),
        (message(16, 0, &0x1000_u64.to_ne_bytes()), 0, "features that it was not offered (0x1000)"),
        (message(6, 0, &[0; 16]), 1, "it sent request 6, which it was not offered"),
        (message(37, 0, &[0; 40]), 1, "it sent request 37, which it was not offered"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), 0, "what it sends is not vhost-user"),
        (message(2, 0, &[0; 4]), 0, "a body of 4 bytes, which is not its length"),
        (message(5, 0, &table(&[[0, 4096, 0, 0]])), 0, "0 descriptors came with its request 5"),
        (message(5, 0, &table(&[[0, 4096, 0, 1 << 40]])), 1, "its memory cannot be shared"),
        (message(5, 0, &table(&[[1, u64::MAX, 0, 0]])), 1, "a region of it has no end"),
        (message(8, 0, &state(0, 70_000)), 0, "a queue of 70000 descriptors is none"),
        (message(8, 0, &state(64, 8)), 0, "it speaks of ring 64, and there are 64"),
        (message(12, 0, &0_u64.to_ne_bytes()), 1, "what it sent as the eventfd of ring 0 is none"),
        (message(13, 0, &0_u64.to_ne_bytes()), 0, "0 descriptors came with its request 13"),
        ([&1_u32.to_ne_bytes()[..], &1_u32.to_ne_bytes(), &100_000_u32.to_ne_bytes()].concat(), 0, "100000 bytes"),
    ];
    let mut net = Net::new(2);
    let file = memory(8192);
    for (bytes, fds, says) in odd {
        let socket = connect(&path(&net));
        net.turn();
        let fds = vec![file.as_fd(); fds];
        assert!(send(&socket, &bytes, &fds));
        net.settle();
        let said = net.trouble();
        assert!(said.contains(says), "{said} for {says}");
    }
    // Byte by byte, it is the same message.
    let socket = connect(&path(&net));
    for byte in message(1, 0, &[]) {
        assert!(theirs::answer(&socket).is_none());
        assert!(send(&socket, &[byte], &[]));
        net.settle();
    }
    assert_eq!(theirs::answer(&socket).map(|(request, _)| request), Some(1));
}

#[test]
fn a_guest_is_interrupted_once_a_turn_and_only_if_it_wants_that() {
    for features in [PLAIN, PLAIN | PACKED, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut machine = net.machine(features, 64);
        for number in 0..20 {
            net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
        }
        net.others[0].flush();
        net.turn();
        assert!(machine.was_rung(theirs::RECEIVE));
        assert_eq!((machine.receive().len(), net.guest().clients.interrupts), (20, 1));
        machine.want_interrupts(theirs::RECEIVE, false);
        net.others[0].send(US, &frame(US, OTHER, 0)).unwrap();
        net.others[0].flush();
        net.settle();
        assert!(!machine.was_rung(theirs::RECEIVE));
        assert_eq!(machine.receive().len(), 1);
    }
}

#[test]
fn a_machine_after_another_begins_at_its_own_rings_whoever_serves_it() {
    for (features, after) in [(ALL, ALL), (ALL, ALL | PACKED), (ALL | PACKED, ALL | PACKED), (ALL | PACKED, ALL)] {
        let mut net = Net::new(2);
        let mut first = net.machine(features, 64);
        for number in 0..20 {
            assert!(first.send(&frame(OTHER, US, number)));
            net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
        }
        net.others[0].flush();
        net.settle();
        assert_eq!((received(&mut net.others[0]).len(), first.receive().len()), (20, 20));
        drop(first);
        net.settle();
        let mut second = net.machine(after, 64);
        let parts = net.parts();
        net.replace(parts);
        net.settle();
        assert_eq!((second.completed(theirs::SEND), second.completed(theirs::RECEIVE)), (0, 0));
        assert!(second.send(&frame(OTHER, US, 1)));
        net.others[0].send(US, &frame(US, OTHER, 1)).unwrap();
        net.others[0].flush();
        net.settle();
        assert_eq!(received(&mut net.others[0]), [frame(OTHER, US, 1)]);
        assert_eq!(second.receive(), [frame(US, OTHER, 1)]);
    }
}

#[test]
fn a_description_from_before_a_change_is_not_gone_by() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    for number in 0..20 {
        assert!(machine.send(&frame(OTHER, US, number)));
    }
    net.settle();
    let stale = net.parts();
    // The ring stops, and starts anew at its beginning; the worker is killed before it tells the daemon.
    let base = machine.ask(11, &theirs::state(1, 0), &mut || net.turn());
    assert_eq!(base >> 32, 20);
    net.replace(stale);
    // A front end that connects meanwhile waits until it is known that the place is free.
    let _other = theirs::connect(&net.folder.path().join("vm.sock"));
    net.settle();
    assert!(net.guest().front_end.is_none());
    std::thread::sleep(LATE_NEWS);
    net.settle();
    assert!(!net.guest().is_running());
    assert!(net.trouble().contains("it has to connect again"));
    assert!(machine.is_hung_up());
}

/// The mark that its own successor finds is that of the last worker that knew the machine.
#[test]
fn a_worker_that_does_not_know_the_machine_yet_or_as_it_was_leaves_all_as_it_was() {
    for (features, is_stale) in [ALL, ALL | PACKED].into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let mut net = Net::new(2);
        let mut machine = net.machine(features, 64);
        let stale = net.parts();
        migration::exchange(&mut net, &mut machine, 0..3);
        net.settle();
        if is_stale {
            let call = theirs::eventfd();
            assert!(theirs::send(&machine.socket, &theirs::message(13, 0, &0_u64.to_ne_bytes()), &[call.as_fd()]));
            net.settle();
        }
        let parts = net.parts();
        net.node = None;
        net.node = Some(net.worker());
        if is_stale {
            net.guest().go_on(stale).unwrap();
            assert!(net.guest().stale.is_some());
        }
        (0..10).for_each(|_| _ = net.node.as_mut().unwrap().turn());
        net.replace(parts);
        migration::exchange(&mut net, &mut machine, 3..5);
        net.settle();
        let (there, back) = (received(&mut net.others[0]), machine.receive());
        assert!(there == migration::right(OTHER, US, 5), "{} there, {features:#x}", there.len());
        assert!(back == migration::right(US, OTHER, 5), "{} back, {features:#x}", back.len());
    }
}

#[test]
fn good_chains_before_a_bad_one_go() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    assert!(machine.send(&frame(OTHER, US, 1)));
    machine.describe(0x8000, 1, theirs::GUEST + theirs::LEN, 64, 0, 0);
    machine.offer(theirs::SEND, 1);
    net.settle();
    assert_eq!(received(&mut net.others[0]), [frame(OTHER, US, 1)]);
    assert!(net.trouble().contains("a descriptor lies outside"));
}

#[test]
fn an_eventfd_that_was_replaced_wakes_nobody() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let new = theirs::eventfd();
    assert!(theirs::send(&machine.socket, &theirs::message(12, 0, &1_u64.to_ne_bytes()), &[new.as_fd()]));
    net.settle();
    rustix::io::write(&machine.kicks[1], &1_u64.to_ne_bytes()).unwrap();
    let node = net.node.as_mut().unwrap();
    assert_eq!(node.arm(), Armed::Idle);
    assert!(!is_readable(node.source().unwrap()));
    rustix::io::write(&new, &1_u64.to_ne_bytes()).unwrap();
    assert!(is_readable(node.source().unwrap()));
}

/// A front end that asks is blocked until it is answered: QEMU's main loop with it.
#[test]
fn wherever_a_worker_is_killed_a_front_end_that_asks_is_answered_or_sent_away() {
    let (mut answered, mut sent_away) = (Vec::new(), Vec::new());
    for places in 0.. {
        let mut net = Net::new(2);
        let machine = net.machine(ALL, 64);
        for number in 0..5 {
            net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
        }
        net.others[0].flush();
        let parts = net.parts();
        // A stop of the receiving ring, beside frames.
        assert!(theirs::send(&machine.socket, &theirs::message(11, 0, &theirs::state(0, 0)), &[]));
        net.guest().must_hear = true;
        let was_killed = net.kill(places, 1);
        if !was_killed {
            break;
        }
        let parts = net.known.take().unwrap_or(parts);
        net.replace(parts);
        net.settle();
        net.await_news();
        net.settle();
        match theirs::answer(&machine.socket) {
            Some((request, body)) => {
                assert_eq!((request, &body[..4]), (11, &[0; 4][..]), "place {places}");
                answered.push(places);
            }
            None => {
                assert!(machine.is_hung_up(), "no answer, killed at place {places}");
                sent_away.push(places);
            }
        }
    }
    // Nobody knows whether the answer went if the worker dies between the message's leaving and the answer's.
    assert!(answered.len() > 6 && sent_away.len() == 1, "{answered:?}, {sent_away:?}");
}

#[test]
fn a_limited_guest_keeps_its_frames_and_loses_those_for_it() {
    let rate = || Rate::alone(Limit { bits: 0, frames: 100, burst: Duration::from_millis(10) });
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    net.node.as_mut().unwrap().set_rates(Rates { sends: rate(), receives: rate() });
    for number in 0..8 {
        assert!(machine.send(&frame(OTHER, US, number)));
        net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
    }
    net.others[0].flush();
    let began = Instant::now();
    let (mut there, mut back) = (Vec::new(), Vec::new());
    while there.len() < 8 {
        net.turn();
        there.extend(received(&mut net.others[0]));
        back.extend(machine.receive());
        assert!(began.elapsed() < Duration::from_secs(60), "they go in time: {}", there.len());
    }
    assert!(began.elapsed() >= Duration::from_millis(50), "{:?}", began.elapsed());
    assert_eq!(there, (0..8).map(|number| frame(OTHER, US, number)).collect::<Vec<_>>());
    let node = net.node.as_ref().unwrap();
    assert_eq!(node.given + node.dropped.over_rate, 8, "{:?}", node.dropped);
    assert!(node.dropped.over_rate > 0 && back.len() as u64 == node.given);
}
