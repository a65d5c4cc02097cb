//! A client that connects correctly, then writes anything anywhere in its memory at any time.
//!
//! What must hold: the server does not panic, hang or end. It shuts a liar out with a verdict that names a rule. An
//! honest client of the same server gets right answers all the time. When the liar is gone, nothing of it is left.
#![no_main]

#[path = "../common/mod.rs"]
mod common;

use std::cell::RefCell;
use std::time::Duration;

use common::forger::{Caller, End, REQUEST_BYTES, REQUEST_SLOT, RETURN, SLOT_LEN, Shape};
use common::{Choices, World, scribble};
use libfuzzer_sys::fuzz_target;
use tasuki_shm::sync::Relaxed;

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

fn connect(world: &mut World, choices: &mut Choices<'_>, resumes: Option<u128>) -> Option<End> {
    let shape = Shape { ring: 2 << choices.below(4), arena: choices.below(5).into(), replies: choices.below(5).into() };
    let first = match choices.byte() {
        small @ 0..128 => small.into(),
        edge => u32::MAX - u32::from(edge & 15),
    };
    let caller = Caller::hail(&world.path, shape, first, resumes);
    for _ in 0..4 {
        world.turn();
    }
    caller.settle()
}

fn misbehave(end: &mut End, choices: &mut Choices<'_>) {
    match choices.below(12) {
        which @ 0..=4 => scribble(end, which, choices),
        5 => {
            let id = u64::from(choices.byte()) << 32 | u64::from(choices.below(6));
            let len = u64::from(choices.below(4)) * u64::from(SLOT_LEN) / 2 + u64::from(choices.below(3));
            end.push(REQUEST_SLOT, 0, choices.below(8).into(), &[choices.word(), id, len]);
            end.ring();
        }
        6 => {
            let words = [choices.word(), choices.word()];
            end.push(REQUEST_BYTES, choices.below(52), choices.below(8).into(), &words);
            end.ring();
        }
        7 => {
            let id = u64::from(choices.byte()) << 32 | u64::from(choices.below(6));
            end.push(RETURN, 0, 0, &[0, id]);
            end.ring();
        }
        8 => {
            let (kind, len) = (choices.byte(), choices.byte());
            end.push(kind, len, choices.short(), &[choices.word(), choices.word(), choices.word()]);
        }
        9 => end.push_stamped(choices.word(), &[choices.word()]),
        10 => {
            // Behave like a good client: fetch an entry, and give a slot back.
            if let Some(entry) = end.pop()
                && choices.below(2) == 0
            {
                end.push(RETURN, 0, 0, &[0, entry[2]]);
            }
        }
        _ => {
            let words = &end.our_arena.words;
            if let Some(word) = words.get(usize::from(choices.short()) % words.len().max(1)) {
                word.store(choices.word(), Relaxed);
            }
        }
    }
}

fn live(world: &mut World, choices: &mut Choices<'_>) {
    let Some(mut end) = connect(world, choices, None) else { panic!("a well-formed hello was refused") };
    let mut steps = 0;
    while choices.are_left() && steps < 400 {
        steps += 1;
        match choices.below(20) {
            0..=3 => world.turn(),
            4 => world.testify(),
            5 => {
                let answer = choices.below(2) == 0;
                world.settle_kept(answer);
            }
            6 => while rustix::io::write(&end.ring_end, &[0; 4096]).is_ok() {},
            7 => {
                // Leave and return, with or without the former session.
                let resumes = match choices.below(3) {
                    0 => Some(end.service),
                    1 => Some(u128::from(choices.word())),
                    _ => None,
                };
                drop(end);
                match connect(world, choices, resumes) {
                    Some(next) => end = next,
                    None => return,
                }
            }
            _ => misbehave(&mut end, choices),
        }
    }
    world.turn();
    match end.hangs_up(Duration::ZERO) {
        true => assert!((1..=6).contains(&end.verdict()), "shut out for rule {}", end.verdict()),
        false => assert_eq!(end.verdict(), 0, "a verdict for one who is not shut out"),
    }
}

fuzz_target!(|data: &[u8]| {
    WORLD.with_borrow_mut(|world| {
        let world = world.get_or_insert_with(|| World::new(false));
        live(world, &mut Choices(data));
        world.turn_until_alone();
        world.settle_kept(true);
        world.testify();
        let replies = world.server.reply_census();
        assert_eq!((replies.owner, replies.free + replies.peer), (0, 2), "only the witness has slots: {replies:?}");
    });
});
