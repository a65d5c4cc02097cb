//! Honest neighbours of an attacker on a VNI: one sends, and another, the witness, must get its frames each once, whole and
//! in order. For targets that have the modules `memif` and `net` of the tests.

use std::collections::VecDeque;

use crate::common::Choices;
use crate::memif::port::{OTHER, PORT, frame_to};
use crate::net::Net;

/// The neighbour to which the other one sends.
pub const WITNESS: u16 = 2;

/// Hands over a frame to the attacker whose offload header may be false.
pub fn unfinished(net: &mut Net, choices: &mut Choices<'_>) {
    let len = 14 + usize::from(choices.short()) % 9000;
    let other = net.node(OTHER.into());
    if let Some(room) = other.stage() {
        room[..10].iter_mut().for_each(|byte| *byte = choices.byte());
        room[10..10 + len].copy_from_slice(&frame_to(PORT, OTHER, 1, len));
        let headers = 10 + 12..10 + len.min(64);
        room[headers].iter_mut().for_each(|byte| *byte = choices.byte());
        let _ = other.post_staged(PORT, 10 + len);
        other.flush();
    }
}

/// Sends a frame from the other neighbour, if there is room for it, and notes it if the witness is to get it. Returns
/// whether it went.
pub fn send(net: &mut Net, under_way: &mut VecDeque<Vec<u8>>, to: u16, number: u32, len: usize) -> bool {
    let frame = frame_to(to, OTHER, number, len);
    let other = net.node(OTHER.into());
    let went = other.send(to, &frame).is_ok();
    if went && to == WITNESS {
        under_way.push_back(frame);
    }
    other.flush();
    went
}

/// Checks the frames between the neighbours. Returns those of the attacker for the witness.
pub fn look(net: &mut Net, under_way: &mut VecDeque<Vec<u8>>) -> Vec<Vec<u8>> {
    let (mut came, mut of_attacker) = (Vec::new(), Vec::new());
    let witness = net.node(WITNESS.into());
    witness.wake();
    for _ in 0..16 {
        witness.receive(|incoming| {
            let mut bytes = vec![0; incoming.len()];
            let whole = incoming.copy_to(&mut bytes);
            if incoming.from == OTHER {
                assert_eq!(whole, Ok(bytes.len()));
                came.push(bytes);
            } else if whole.is_ok() {
                of_attacker.push(bytes);
            }
        });
    }
    for frame in came {
        assert!(Some(&frame) == under_way.pop_front().as_ref(), "a frame came changed, twice, or not");
    }
    // Also take the frames of the other node, which must not become too slow a reader.
    let other = net.node(OTHER.into());
    other.wake();
    for _ in 0..16 {
        other.receive(|_| {});
    }
    of_attacker
}
