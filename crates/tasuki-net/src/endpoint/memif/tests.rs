//! Replaces a node's worker, or kills it at any place in its code, while frames cross both ways; its client must notice
//! nothing.

use proptest::prelude::*;
use rustix::net::SocketType;
use theirs::{Client, Shape};

use super::*;
use crate::endpoint::Bridge;
use crate::vni::Vni;
use crate::vni::fixture::{Nodes, frame, listen, received};
use crate::vni::mortal::lives_for;

/// A client written from the protocol's text.
#[path = "../../../tests/suite/memif/client.rs"]
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod theirs;

/// The client's node, the node with which it exchanges frames, and a third one.
const US: u16 = 0;
const OTHER: u16 = 1;
const THIRD: u16 = 2;
const NODES: u16 = 3;

/// Maximum number of frames that may come twice after a worker dies.
const BURST: usize = 32;

struct Net {
    nodes: Nodes,
    other: Vni,
    third: Vni,
    listener: OwnedFd,
    _folder: tempfile::TempDir,
    node: Option<Bridge<Memif>>,
    client: Client,
}

fn number_of(frame: &[u8]) -> usize {
    usize::from_le_bytes(frame[14..22].try_into().unwrap())
}

impl Net {
    fn new(shape: Shape) -> Self {
        let nodes = Nodes::new(NODES);
        let [other, third] = [OTHER, THIRD].map(|number| nodes.end(number));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memif.sock");
        let listener = listen(&path, SocketType::SEQPACKET);
        let mut node = node(&listener, &nodes);
        let client = Client::connect(&path, shape, "", || {
            node.rest(Duration::ZERO);
            node.turn();
        });
        Net { nodes, other, third, listener, _folder: folder, node: Some(node), client }
    }

    /// Starts another worker, with the parts that a daemon has kept.
    fn replace(&mut self, parts: Parts) {
        self.node = None;
        let mut node = node(&self.listener, &self.nodes);
        node.endpoint.go_on(parts).unwrap();
        self.node = Some(node);
    }

    fn parts(&mut self) -> Parts {
        self.node.as_mut().unwrap().endpoint.parts().unwrap().expect("it is connected")
    }

    fn turn(&mut self) {
        let node = self.node.as_mut().unwrap();
        node.rest(Duration::ZERO);
        node.turn();
    }
}

fn node(listener: &OwnedFd, nodes: &Nodes) -> Bridge<Memif> {
    let terms = Terms::new(0, "", "a test").unwrap();
    Bridge::new(Box::new(Memif::new(listener.try_clone().unwrap(), terms).unwrap()), nodes.end(US), nodes.switch(US))
}

/// The received frames of a numbered sequence.
#[derive(Default)]
struct Account {
    /// Number of frames that may come again since the last death.
    again: usize,
    next: usize,
    twice: usize,
}

impl Account {
    fn note(&mut self, to: u16, from: u16, came: Vec<Vec<u8>>) {
        for bytes in came {
            let number = number_of(&bytes);
            assert!(bytes == frame(to, from, number), "frame {number} is not what it was");
            assert!(number <= self.next, "frame {number} came where {} is due", self.next);
            if number < self.next {
                assert!(self.next - number <= self.again, "frame {number} came again after {}", self.next);
                self.twice += 1;
                // All later frames come again too.
                self.again = 0;
                self.next = number;
            }
            self.next += 1;
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The client sends this many frames.
    Send(usize),
    /// The other node sends it this many frames.
    Give(usize),
    Turns(u8),
    /// The worker is killed after this many places.
    Die(u32),
    /// The worker hands over, whether or not it has finished its work.
    HandOver,
    /// The client reads.
    Read,
    /// The node looks once more, sleeps if it may, and is woken.
    Rest,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1..60_usize).prop_map(Step::Send),
        3 => (1..60_usize).prop_map(Step::Give),
        4 => (1..5_u8).prop_map(Step::Turns),
        4 => (0..200_u32).prop_map(Step::Die),
        1 => Just(Step::HandOver),
        3 => Just(Step::Read),
        1 => Just(Step::Rest),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn wherever_a_worker_dies_its_client_goes_on_with_the_next_and_no_frame_is_lost_or_changed(
        steps in steps(),
        log2 in 8..10_u8,
    ) {
        let mut net = Net::new(Shape { log2, buffer: 600 });
        let (mut sent, mut given) = (0, 0);
        let (mut there, mut back) = (Account::default(), Account::default());
        let finish = [Step::Turns(20), Step::Read].repeat(60);
        for step in steps.into_iter().chain(finish) {
            match step {
                Step::Send(count) => {
                    // No more than the other has room for, even if a burst comes twice: a frame that long finds no room
                    // there is dropped.
                    let most = count.min(200_usize.saturating_sub(sent - there.next));
                    let due = (sent..sent + most).take_while(|number| net.client.send(&frame(OTHER, US, *number)));
                    sent += due.count();
                }
                Step::Give(count) => {
                    // The same for buffers.
                    let most = count.min(12_usize.saturating_sub(given - back.next));
                    let due = (given..given + most).take_while(|it| net.other.send(US, &frame(US, OTHER, *it)).is_ok());
                    given += due.count();
                    net.other.flush();
                }
                Step::Turns(count) => (0..count).for_each(|_| net.turn()),
                Step::Die(places) => {
                    let parts = net.parts();
                    let mut node = net.node.take().unwrap();
                    // Read first, so that frames seen before are not counted as coming again.
                    there.note(OTHER, US, received(&mut net.other));
                    back.note(US, OTHER, net.client.receive());
                    lives_for(places, || (0..8).for_each(|_| {
                        node.rest(Duration::ZERO);
                        node.turn();
                    }));
                    there.note(OTHER, US, received(&mut net.other));
                    back.note(US, OTHER, net.client.receive());
                    (there.again, back.again) = (BURST, BURST);
                    drop(node);
                    net.replace(parts);
                }
                Step::HandOver => {
                    let parts = net.parts();
                    net.node.as_mut().unwrap().finish();
                    net.replace(parts);
                }
                Step::Read => {
                    there.note(OTHER, US, received(&mut net.other));
                    back.note(US, OTHER, net.client.receive());
                }
                Step::Rest => {
                    let node = net.node.as_mut().unwrap();
                    if node.arm() == Armed::Idle {
                        // The client must ring now: a sleeping node would not notice its frames otherwise.
                        prop_assert_eq!(net.client.flags(true) & 1, 0);
                        node.rest(Duration::ZERO);
                    }
                }
            }
        }
        prop_assert_eq!((there.next, back.next), (sent, given), "all came");
        prop_assert!(net.client.channel.hear().is_none(), "and it has heard nothing");
        let node = net.node.as_ref().unwrap();
        prop_assert_eq!(node.dropped, Dropped::default());
        prop_assert_eq!(node.endpoint.client(), Some("a test's client".to_owned()));
    }
}

/// The ring has eight buffers. When the worker dies, six hold a short frame each that the client has not seen. Before
/// those come again, another node sends a long frame that needs seven buffers.
#[test]
fn buffers_that_a_dead_worker_had_filled_in_part_hold_as_much_as_before() {
    const LONG: usize = 4;
    for places in 0.. {
        let mut net = Net::new(Shape { log2: 3, buffer: 600 });
        let mut came = Vec::new();
        let mut exchange = |net: &mut Net| {
            for _ in 0..4 {
                net.turn();
                came.extend(net.client.receive());
            }
        };
        // The node looks at nodes that have sent frames, and at the last of them first.
        for sender in [&mut net.other, &mut net.third] {
            sender.send(US, &frame(US, OTHER, 0)).unwrap();
            sender.flush();
        }
        exchange(&mut net);
        (0..6).for_each(|i| net.other.send(US, &frame(US, OTHER, 5 * i)).unwrap());
        net.other.flush();
        let parts = net.parts();
        let mut node = net.node.take().unwrap();
        let was_killed = lives_for(places, || {
            (0..2).for_each(|_| {
                node.rest(Duration::ZERO);
                node.turn();
            });
        });
        drop(node);
        let shown = net.client.receive();
        net.third.send(US, &frame(US, THIRD, LONG)).unwrap();
        net.third.flush();
        net.replace(parts);
        exchange(&mut net);
        came.extend(shown);
        assert_eq!(net.node.as_ref().unwrap().dropped, Dropped::default(), "killed at place {places}");
        assert!(came.contains(&frame(US, THIRD, LONG)));
        assert!((0..6).all(|i| came.contains(&frame(US, OTHER, 5 * i))), "killed at place {places}");
        if !was_killed {
            assert!(places > 6, "it passes more places than that");
            return;
        }
    }
}
