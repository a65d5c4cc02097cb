//! Both ends of a ring whose other end writes anything at any time.
//!
//! What must hold: no panic; neither end believes in more than a full ring; a popped message carries the index that
//! was due.
#![no_main]

#[path = "../common/mod.rs"]
mod common;

use std::num::NonZeroU32;
use std::sync::Arc;

use common::Choices;
use libfuzzer_sys::fuzz_target;
use tasuki_shm::bell::{Bell, NO_CPU, PeerBell};
use tasuki_shm::line::{Claims, Line};
use tasuki_shm::ring::{Broken, Consumer, MESSAGE_WORDS, Message, Producer, PushError};
use tasuki_shm::sync::Relaxed;

fn lines(count: usize) -> Arc<[Line]> {
    (0..count).map(|_| Line::default()).collect()
}

fn message(choices: &mut Choices<'_>) -> Message {
    let tag = NonZeroU32::new(choices.byte().into()).unwrap_or(NonZeroU32::MIN);
    Message { tag, words: [choices.word(); MESSAGE_WORDS] }
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let capacity = 1_u32 << choices.below(4);
    let start = [0, 1, u32::MAX, u32::MAX - 3][usize::from(choices.below(4))];
    // Our lines to write: the producer's lines, the consumer's head, a bell. The peer's: the rest.
    let (our_lines, our_head) = (lines(capacity as usize), lines(1));
    let (their_lines, their_head, their_bell) = (lines(capacity as usize), lines(1), lines(1));
    their_head[0].word(0).store(start.into(), Relaxed);
    let mut tx: Producer<_, _> = Producer::new(Arc::clone(&our_lines), Claims::of(Arc::clone(&their_head)), start);
    let mut rx: Consumer<_, _> = Consumer::new(Claims::of(Arc::clone(&their_lines)), Arc::clone(&our_head), start);
    let mut peer_bell = PeerBell::new(Claims::of(Arc::clone(&their_bell)));
    let mut bell = Bell::new(lines(1), NO_CPU);
    let mut believed = start;
    while choices.are_left() {
        let (tail, head) = (tx.tail(), rx.head());
        match choices.below(13) {
            0 => their_head[0].word(0).store(choices.word(), Relaxed),
            // A plausible head.
            1 => their_head[0].word(0).store(tail.wrapping_sub(choices.below(20).into()).into(), Relaxed),
            2 => {
                let line = usize::from(choices.byte()) % their_lines.len();
                their_lines[line].word(choices.below(8).into()).store(choices.word(), Relaxed);
            }
            // The stamp that is due, or one near it.
            3 => {
                let line = (head & (capacity - 1)) as usize;
                let index = head.wrapping_add(choices.below(4).into()).wrapping_sub(choices.below(2).into());
                let tag = u64::from(choices.byte());
                their_lines[line].word(0).store(tag << 32 | u64::from(index), Relaxed);
            }
            4 => match tx.push(&message(&mut choices)) {
                Ok(()) => assert_eq!(tx.tail(), tail.wrapping_add(1)),
                Err(PushError::Full { .. }) => assert_eq!(tx.known_room(), 0),
                Err(PushError::Broken(Broken::R2 { .. })) => assert_eq!(tx.tail(), tail),
                Err(PushError::Broken(broken)) => panic!("a producer says {broken}"),
            },
            5 => {
                let batch = [message(&mut choices); 5];
                let count = usize::from(choices.below(6));
                match tx.push_batch(&batch[..count]) {
                    Ok(pushed) => assert_eq!(tx.tail().wrapping_sub(tail) as usize, pushed),
                    Err(_) => assert_eq!(tx.tail(), tail),
                }
            }
            6 => {
                if let Ok(head) = tx.look() {
                    assert!(tail.wrapping_sub(head) <= capacity, "R2");
                    assert!(head.wrapping_sub(believed) <= tail.wrapping_sub(believed), "a head only grows");
                    believed = head;
                    assert_eq!(tx.unretired().len(), tail.wrapping_sub(head) as usize);
                }
            }
            7 => {
                let stamp = their_lines[(head & (capacity - 1)) as usize].word(0).load(Relaxed);
                match rx.pop() {
                    Ok(Some(message)) => {
                        assert_eq!(u64::from(message.tag.get()) << 32 | u64::from(head), stamp, "R4");
                        assert_eq!(rx.head(), head.wrapping_add(1));
                    }
                    Ok(None) => assert_eq!(rx.head(), head),
                    Err(broken) => {
                        assert!(matches!(broken, Broken::R4 { .. }), "a consumer says {broken}");
                        assert!(rx.is_ready(), "a breach is worth a look");
                    }
                }
            }
            8 => {
                // Nobody reads this message: it is drawn so that inputs of the corpus keep their meaning.
                _ = message(&mut choices);
                let count = (0..4).map_while(|_| rx.pop().ok().flatten()).count();
                assert_eq!(rx.head().wrapping_sub(head) as usize, count);
            }
            9 => {
                rx.retire();
                assert_eq!(our_head[0].word(0).load(Relaxed), u64::from(rx.head()));
            }
            10 => {
                their_bell[0].word(0).store(choices.word(), Relaxed);
                if peer_bell.must_ring() {
                    assert!(!peer_bell.must_ring(), "B3: once per nap");
                }
            }
            11 => match choices.below(3) {
                0 => bell.park(choices.byte().into()),
                1 => bell.wake(choices.byte().into()),
                _ => bell.spin(choices.byte().into()),
            },
            _ => {
                let _ = rx.is_ready();
            }
        }
        assert!(tx.known_room() <= capacity);
    }
});
