//! A node of a VNI that writes anything into its own memory, and rings under any name. Two other nodes exchange
//! frames meanwhile, and one of them is replaced now and then. Each of their frames arrives once, whole and in
//! order, and no node panics.
#![no_main]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../../crates/tasuki-net/tests/suite/net.rs"]
mod net;

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use common::Choices;
use libfuzzer_sys::fuzz_target;
use tasuki_net::vni::Vni;
use tasuki_shm::vni::node_memory::NodeMemory;

use net::{Net, frame};

const VICTIM: u16 = 0;
const WITNESS: u16 = 1;
const LIAR: u16 = 2;

/// Frames of two honest nodes that are under way, by sender.
#[derive(Default)]
struct UnderWay([VecDeque<Vec<u8>>; 2]);

impl UnderWay {
    /// Receives and checks everything that has come to `node`, except frames from the liar.
    fn receive(&mut self, node: &mut Vni) {
        node.wake();
        for _ in 0..8 {
            node.receive(|incoming| {
                let mut bytes = vec![0; incoming.len()];
                let whole = incoming.copy_to(&mut bytes);
                let _ = incoming.offload();
                if incoming.from != LIAR {
                    assert_eq!(whole, Ok(bytes.len()), "an honest frame was taken back");
                    let sent = self.0[usize::from(incoming.from)].pop_front();
                    assert!(Some(&bytes) == sent.as_ref(), "a frame of node {} came changed, or twice", incoming.from);
                }
            });
        }
    }
}

fuzz_target!(|input: &[u8]| {
    common::ignore_broken_pipes();
    let mut choices = Choices(input);
    let mut net = Net::with(3, 64);
    let (liar, _pool) = NodeMemory::adopt(net.node_memory(LIAR.into())).expect("a liar has memory too");
    drop(net.take(LIAR.into()));
    let mut under_way = UnderWay::default();
    let mut now = Instant::now();
    let mut number = 0;
    while choices.are_left() && number < 300 {
        number += 1;
        let len = 14 + usize::from(choices.short()) % 9000;
        let honest = [VICTIM, WITNESS][usize::from(choices.below(2))];
        match choices.below(12) {
            0..3 => {
                let other = VICTIM + WITNESS - honest;
                if net.node(honest.into()).send(other, &frame(number, len)).is_ok() {
                    under_way.0[usize::from(honest)].push_back(frame(number, len));
                }
                net.node(honest.into()).flush();
            }
            3 => {
                let _ = net.node(honest.into()).send(LIAR, &frame(number, len));
                net.node(honest.into()).flush();
            }
            4 => {
                if net.node(honest.into()).stage().is_some() {
                    let _ = net.node(honest.into()).post_staged(LIAR, len);
                }
            }
            5 => under_way.receive(net.node(honest.into())),
            6 => {
                // Too little time for frames of an honest node to be taken back.
                now += Duration::from_millis(1);
                net.node(honest.into()).tick(now);
            }
            7 => net.replace(honest.into()),
            8 => {
                // The liar's claims to the victim: how far it has read, and whether it talks.
                let (head, talks) = (choices.word(), choices.word());
                liar.line_of(honest)[0].word(0).store(head, Relaxed);
                liar.talks()[0].word(0).store(talks, Relaxed);
            }
            9 => net.ring(honest.into(), &[choices.byte(), choices.byte()]),
            10 => {
                let place = usize::from(choices.byte());
                let line = &liar.ring_to(honest)[place / 4];
                let stamp = choices.word() << 32 | choices.word() & 0xffff_ffff;
                line.word(place % 4 * 2).store(stamp, Relaxed);
                line.word(place % 4 * 2 + 1).store(choices.word(), Relaxed);
            }
            _ => {
                // A message in its turn, with a piece of the liar's choice.
                let index = u64::from(choices.byte());
                let line = &liar.ring_to(honest)[usize::try_from(index).expect("a byte") / 4];
                let (place, tag) = (usize::try_from(index % 4).expect("below 4") * 2, choices.word() & 0xffff_ffff);
                line.word(place + 1).store(choices.word(), Relaxed);
                line.word(place).store(tag << 32 | index, Relaxed);
            }
        }
    }
    for honest in [VICTIM, WITNESS] {
        net.node(honest.into()).flush();
    }
    for honest in [VICTIM, WITNESS] {
        under_way.receive(net.node(honest.into()));
        under_way.receive(net.node(honest.into()));
    }
    assert!(under_way.0.iter().all(VecDeque::is_empty), "a frame between honest nodes was lost");
});
