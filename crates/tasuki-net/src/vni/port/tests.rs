use std::collections::BTreeMap;

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::vni::finish::GSO_UDP_L4;
use crate::vni::fixture::{Nodes, mac, received};
use crate::vni::mortal::lives_for;
use crate::vni::offload::{HEADER_LEN, NEEDS_CSUM, Offload};

const NODES: u16 = 4;
/// The native node, the nodes that send to it, and the nodes that it sends to.
const US: u16 = 1;
const SENDERS: [u16; 2] = [0, 3];
const TO: [u16; 2] = [2, 3];

struct Net {
    nodes: Nodes,
    others: BTreeMap<u16, Vni>,
    port: Option<VniPort>,
}

impl Net {
    fn new() -> Self {
        let nodes = Nodes::new(NODES);
        let others = (0..NODES).filter(|number| *number != US).map(|number| (number, nodes.end(number))).collect();
        let mut net = Net { nodes, others, port: None };
        net.replace();
        net
    }

    /// Replaces the native node's worker.
    fn replace(&mut self) {
        self.port = None;
        let (node_memory, bell_receiver) = self.nodes.own(US);
        let switch = self.nodes.switch(US);
        let frames = Frames::new().unwrap();
        let mut port = VniPort::new(US, Mac(mac(US)), node_memory, bell_receiver, switch, frames);
        self.nodes.peers_of(US).into_iter().for_each(|bundle| port.add(bundle).unwrap());
        port.settle();
        // A port hears newly talking nodes when it wakes.
        port.wake();
        self.port = Some(port);
    }

    /// Sends the next numbers of a node, each in a frame, or all in one segment. Returns how many went.
    fn send(&mut self, from: u16, first: u64, count: u64, in_one: bool) -> u64 {
        let vni = self.others.get_mut(&from).unwrap();
        let went = match in_one && count > 0 {
            true => {
                let (offload, frame) = segment(from, first, count);
                let Some(room) = vni.stage() else { return 0 };
                room[..HEADER_LEN].copy_from_slice(offload.as_bytes());
                room[HEADER_LEN..HEADER_LEN + frame.len()].copy_from_slice(&frame);
                u64::from(vni.post_staged(US, HEADER_LEN + frame.len()).is_ok()) * count
            }
            false => {
                let sends = (first..first + count).take_while(|number| vni.send(US, &frame(from, *number)).is_ok());
                sends.count() as u64
            }
        };
        vni.flush();
        went
    }
}

const PAYLOAD: usize = 40;

/// A frame that carries its number.
fn frame(from: u16, number: u64) -> Vec<u8> {
    let (_, mut frame) = segment(from, number, 1);
    frame.truncate(14 + 20 + 8 + PAYLOAD);
    frame
}

/// UDP over IPv4, to be cut into frames that each carry a number.
fn segment(from: u16, first: u64, count: u64) -> (Offload, Vec<u8>) {
    let mut bytes = [&mac(US)[..], &mac(from), &[8, 0]].concat();
    let payload = PAYLOAD * usize::try_from(count).unwrap();
    let len = u16::try_from(20 + 8 + payload).unwrap().to_be_bytes();
    bytes.extend([0x45, 0, len[0], len[1], 0, 7, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
    let len = u16::try_from(8 + payload).unwrap().to_be_bytes();
    bytes.extend([0, 7, 0, 7, len[0], len[1], 0, 0]);
    for number in first..first + count {
        let start = bytes.len();
        bytes.extend(number.to_le_bytes());
        bytes.resize(start + PAYLOAD, 0);
    }
    let offload = Offload {
        flags: NEEDS_CSUM,
        gso_type: GSO_UDP_L4,
        hdr_len: 42.into(),
        gso_size: u16::try_from(PAYLOAD).unwrap().into(),
        csum_start: 34.into(),
        csum_offset: 6.into(),
    };
    (offload, bytes)
}

fn number_of(bytes: &[u8]) -> (u16, u64) {
    (u16::from(bytes[11]), u64::from_le_bytes(bytes[42..50].try_into().unwrap()))
}

/// What a program remembers: the next number of each sender.
type State = [u64; 2];

/// A program that checks received frames and sends them on. It keeps its program state in two copies, as a worker does.
struct Worker {
    state: State,
    program_state: [State; 2],
    burst: Burst,
}

impl Worker {
    fn remember(&mut self, turn: u64) {
        self.program_state[usize::from(turn & 1 == 1)] = self.state;
    }

    /// Takes one turn, wholly or not at all, as a user's program does.
    fn turn(&mut self, port: &mut VniPort) {
        if self.burst.is_empty() {
            self.remember(port.turns() + 1);
            let Ok(came) = port.receive(&mut self.burst);
            if came == 0 {
                return;
            }
            for frame in &mut self.burst {
                let (from, number) = number_of(frame.bytes());
                let sender = SENDERS.iter().position(|sender| *sender == from).unwrap();
                assert_eq!(number, self.state[sender], "each number comes once, and in order");
                self.state[sender] += 1;
                let to = TO[usize::from(number % 3 == 0)];
                frame.slot.bytes_mut()[..6].copy_from_slice(&mac(to));
            }
        }
        if port.takes(&self.burst) {
            self.remember(port.turns() + 1);
            let Ok(_) = port.transmit(&mut self.burst);
            assert!(self.burst.is_empty());
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Send {
        sender: usize,
        count: u64,
        in_one: bool,
    },
    Turns(u8),
    /// The worker dies after so many places, or hands over.
    Die(u32),
    HandOver,
    /// A node that it sends to reads.
    Read(usize),
    Tick,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..2_usize, 1..70_u64, any::<bool>())
            .prop_map(|(sender, count, in_one)| Step::Send { sender, count, in_one }),
        4 => (1..6_u8).prop_map(Step::Turns),
        3 => (0..12_u32).prop_map(Step::Die),
        1 => Just(Step::HandOver),
        2 => (0..2_usize).prop_map(Step::Read),
        1 => Just(Step::Tick),
    ];
    prop::collection::vec(step, 1..120)
}

/// Appends all frames that reached a node to `got`; asserts that none was taken back.
fn read(vni: &mut Vni, got: &mut Vec<(u16, u64)>) {
    for _ in 0..64 {
        vni.wake();
        vni.receive(|incoming| {
            let mut bytes = vec![0; incoming.len()];
            incoming.copy_to(&mut bytes).expect("nothing was taken back");
            got.push(number_of(&bytes));
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn wherever_a_worker_dies_each_frame_is_handled_once_and_what_it_sends_comes_once(steps in steps()) {
        let mut net = Net::new();
        let mut worker = Worker { state: [0; 2], program_state: [[0; 2]; 2], burst: Burst::new() };
        let (mut sent, mut got) = ([0_u64; 2], [Vec::new(), Vec::new()]);
        let finish = [Step::Turns(200), Step::Read(0), Step::Read(1)].repeat(6);
        for step in steps.into_iter().chain(finish) {
            match step {
                Step::Send { sender, count, in_one } => {
                    sent[sender] += net.send(SENDERS[sender], sent[sender], count, in_one);
                }
                Step::Turns(count) => {
                    let port = net.port.as_mut().unwrap();
                    (0..count).for_each(|_| worker.turn(port));
                }
                Step::Die(places) => {
                    let port = net.port.as_mut().unwrap();
                    lives_for(places, || (0..8).for_each(|_| worker.turn(port)));
                    // It died at a place, or between two turns.
                    worker.burst.clear();
                    net.replace();
                    worker.state = worker.program_state[usize::from(net.port.as_ref().unwrap().turns() & 1 == 1)];
                }
                Step::HandOver => {
                    let port = net.port.as_mut().unwrap();
                    match worker.burst.is_empty() {
                        true => {
                            worker.remember(port.turns() + 1);
                            port.conclude(&worker.burst);
                        }
                        false => port.withdraw(),
                    }
                    worker.burst.clear();
                    net.replace();
                    worker.state = worker.program_state[usize::from(net.port.as_ref().unwrap().turns() & 1 == 1)];
                }
                Step::Read(which) => read(net.others.get_mut(&TO[which]).unwrap(), &mut got[which]),
                Step::Tick => {
                    net.port.as_mut().unwrap().tick(Instant::now());
                }
            }
        }
        prop_assert_eq!(worker.state, sent, "all that was sent was handled");
        for (which, got) in got.iter().enumerate() {
            for (sender, count) in SENDERS.iter().zip(sent) {
                let numbers = got.iter().filter(|(from, _)| from == sender).map(|(_, number)| *number);
                let expected = (0..count).filter(|number| usize::from(number % 3 == 0) == which);
                prop_assert!(numbers.eq(expected), "each number came once, and in order, to {}", TO[which]);
            }
        }
        prop_assert_eq!(net.port.as_ref().unwrap().dropped, Dropped::default());
        prop_assert_eq!(net.port.as_ref().unwrap().given(), sent.iter().sum::<u64>());
    }
}

/// Receives until no frame arrives.
fn all(port: &mut VniPort) -> Vec<Vec<u8>> {
    let (mut burst, mut came) = (Burst::new(), Vec::new());
    for _ in 0..32 {
        let Ok(_) = port.receive(&mut burst);
        came.extend(burst.drain(..).map(|frame| frame.bytes().to_vec()));
    }
    came
}

#[test]
fn a_program_gets_finished_frames_and_a_successor_the_rest_of_a_segment() {
    let mut net = Net::new();
    assert_eq!(net.send(0, 0, 50, true), 50);
    net.port.as_mut().unwrap().wake();
    let mut burst = Burst::new();
    let port = net.port.as_mut().unwrap();
    assert_eq!(port.receive(&mut burst), Ok(BURST_MAX));
    // Ten frames are handled.
    let in_hand: Burst = burst.drain(10..).collect();
    drop(burst);
    port.conclude(&in_hand);
    drop(in_hand);
    net.replace();
    let came = all(net.port.as_mut().unwrap());
    let numbers: Vec<u64> = came.iter().map(|bytes| number_of(bytes).1).collect();
    assert_eq!(numbers, (10..50).collect::<Vec<_>>());
    for bytes in &came {
        assert_eq!(bytes.len(), 42 + PAYLOAD);
        let sum = |words: &[u8]| words.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1])).sum::<u32>();
        let pseudo = sum(&bytes[26..34]) + 17 + u32::try_from(bytes.len() - 34).unwrap();
        let all = pseudo + sum(&bytes[34..]);
        assert_eq!((all & 0xffff) + (all >> 16), 0xffff, "its checksum is right");
    }
}

/// A worker leaves a checksum to its receivers, in the place of the address that they check.
#[test]
fn no_checksum_is_written_over_an_address_that_was_checked() {
    let mut net = Net::new();
    let port = net.port.as_mut().unwrap();
    port.set_own(0, Own { v4: vec![[192, 0, 2, 1].into()], v6: Vec::new() });
    for (gso_type, csum_start, is_taken) in [(GSO_NONE, 22, false), (GSO_UDP_L4, 22, false), (GSO_NONE, 34, true)] {
        let (whole, frame) = segment(0, 5, 1);
        let offload = Offload { gso_type, csum_start: csum_start.into(), ..whole };
        let bytes = [offload.as_bytes(), &frame].concat();
        let vni = net.others.get_mut(&0).unwrap();
        vni.draft(US, bytes.len()).unwrap().copy_from_slice(&bytes);
        vni.post(US, bytes.len(), true);
        vni.flush();
        port.wake();
        let before = port.dropped;
        let came = all(port);
        assert_eq!(came.len(), usize::from(is_taken), "{offload:?}");
        assert!(came.iter().all(|came| came[..34] == frame[..34]));
        let malformed = before.malformed + u64::from(!is_taken);
        assert_eq!(port.dropped, Dropped { malformed, ..before }, "{offload:?}");
    }
}

#[test]
fn what_cannot_be_sent_is_counted_and_holds_nobody_up() {
    let mut net = Net::new();
    let port = net.port.as_mut().unwrap();
    let mut burst = Burst::new();
    for (to, len) in [([2, 9, 9, 9, 9, 9], 60), (mac(2), 60), (mac(2), 10), ([0xff; 6], 60)] {
        let mut slot = port.arena().take().unwrap();
        slot.bytes_mut()[..60].copy_from_slice(&frame(US, 7)[..60]);
        slot.bytes_mut()[..6].copy_from_slice(&to);
        burst.push(Frame { slot, len });
    }
    assert_eq!(port.transmit(&mut burst), Ok(4));
    assert_eq!(port.dropped, Dropped { nobody: 1, length: 1, ..Dropped::default() });
    let mut got = Vec::new();
    read(net.others.get_mut(&2).unwrap(), &mut got);
    assert_eq!(got, [(US, 7), (US, 7)], "its own, and what is for all");
    read(net.others.get_mut(&0).unwrap(), &mut got);
    assert_eq!(got.len(), 3, "what is for all");
}

#[test]
fn who_reads_nothing_is_waited_for_as_long_as_the_port_has_patience() {
    let mut net = Net::new();
    let port = net.port.as_mut().unwrap();
    port.set_patience(Duration::ZERO);
    let mut burst = Burst::new();
    let fill = |port: &mut VniPort, burst: &mut Burst| {
        while !burst.is_full() {
            let mut slot = port.arena().take().unwrap();
            slot.bytes_mut()[..60].copy_from_slice(&frame(US, 7)[..60]);
            slot.bytes_mut()[..6].copy_from_slice(&mac(2));
            burst.push(Frame { slot, len: 60 });
        }
    };
    for _ in 0..9 {
        fill(port, &mut burst);
        assert_eq!(port.transmit(&mut burst), Ok(BURST_MAX));
    }
    assert_eq!(port.dropped.no_room, 9 * 32 - 256, "its ring has room for 256");
    let mut got = Vec::new();
    read(net.others.get_mut(&2).unwrap(), &mut got);
    assert_eq!(got.len(), 256);
    let port = net.port.as_mut().unwrap();
    port.set_patience(PATIENCE);
    for _ in 0..8 {
        fill(port, &mut burst);
        assert_eq!(port.transmit(&mut burst), Ok(BURST_MAX));
    }
    fill(port, &mut burst);
    assert_eq!(port.transmit(&mut burst), Ok(0));
    assert!(!port.takes(&burst) && port.waits().is_some());
    let mut got = Vec::new();
    read(net.others.get_mut(&2).unwrap(), &mut got);
    let port = net.port.as_mut().unwrap();
    assert!(port.takes(&burst));
    assert_eq!(port.transmit(&mut burst), Ok(BURST_MAX));
}

/// A frame waits in a turn that does not end, for the node of another frame reads nothing. Its own node has read all that it can
/// see.
#[test]
fn a_staged_frame_is_neither_shown_nor_taken_back_before_its_turn_ends() {
    let [stalled, other] = TO;
    let mut net = Net::new();
    let port = net.port.as_mut().unwrap();
    while port.vni.send(stalled, &[&mac(stalled)[..], &mac(US), &[0; 4000]].concat()).is_ok() {}
    port.vni.flush();
    let mut burst = Burst::new();
    for to in [other, stalled] {
        let mut slot = port.arena().take().unwrap();
        let bytes = [&mac(to)[..], &mac(US), &[8, 0, 7, 7]].concat();
        slot.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        burst.push(Frame { slot, len: u16::try_from(bytes.len()).unwrap() });
    }
    let now = Instant::now();
    assert!(!port.takes(&burst));
    assert!(port.tick(now) && port.tick(now + PATIENCE), "a node is behind");
    assert_eq!(received(net.others.get_mut(&other).unwrap()), [[0; 0]; 0], "no ledger has it");
    net.others.get_mut(&stalled).unwrap().wake();
    while net.others.get_mut(&stalled).unwrap().receive(|_| ()) > 0 {}
    let port = net.port.as_mut().unwrap();
    while !burst.is_empty() {
        let Ok(_) = port.transmit(&mut burst);
    }
    assert_eq!(received(net.others.get_mut(&other).unwrap()).len(), 1);
}
