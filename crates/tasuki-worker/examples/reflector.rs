//! A data path of your own: sends every frame back to its sender, except frames of unwanted kinds, and counts.
//!
//! Build it, and name it in the configuration of a node:
//!
//! ```toml
//! work = { program = { path = "/opt/reflector", options = "drop=0x86dd" } }
//! ```
//!
//! `options` are words. `drop=0x86dd` drops frames of an EtherType; repeat it for more. `copy` changes frames in a
//! copy, as a program must that changes more than their heads.

use std::process::ExitCode;

use tasuki_worker::{Fate, Program, Transactional, Turn};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Counts that stay exact whatever happens to the worker.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Counts {
    frames: u64,
    bytes: u64,
    dropped: u64,
}

struct Reflector {
    unwanted: Vec<u16>,
    copies: bool,
}

impl Program for Reflector {
    type State = Counts;
    const STATE: (u32, u32) = (0x5ef1_ec70, 1);

    fn new(options: &str) -> Result<Self, String> {
        let one = |word: &str| {
            let digits = word.strip_prefix("drop=0x")?;
            u16::from_str_radix(digits, 16).ok()
        };
        let mut reflector = Reflector { unwanted: Vec::new(), copies: false };
        for word in options.split_whitespace() {
            match one(word) {
                Some(kind) => reflector.unwanted.push(kind),
                None if word == "copy" => reflector.copies = true,
                None => {
                    return Err(format!("{word:?} means nothing; write drop=0x86dd for an EtherType to drop, or copy"));
                }
            }
        }
        Ok(reflector)
    }

    fn turn<N: Transactional>(&mut self, counts: &mut Counts, turn: &mut Turn<'_, N>) {
        turn.frames(|frame| {
            let kind = frame.bytes().get(12..14).map_or(0, |kind| u16::from(kind[0]) << 8 | u16::from(kind[1]));
            counts.frames += 1;
            counts.bytes += frame.bytes().len() as u64;
            // A group address cannot be the sender of a frame.
            let is_from_group = frame.bytes().get(6).is_some_and(|first| first & 1 == 1);
            if is_from_group || self.unwanted.contains(&kind) {
                counts.dropped += 1;
                return Fate::Dropped;
            }
            let bytes = if self.copies { frame.bytes_mut() } else { Some(frame.head_mut()) };
            let Some(bytes) = bytes else {
                // No slot is free: drop the frame.
                counts.dropped += 1;
                return Fate::Dropped;
            };
            // The sender becomes the destination.
            if let Some(addresses) = bytes.first_chunk_mut::<12>() {
                addresses.rotate_left(6);
            }
            Fate::Sent
        });
    }

    fn counts(counts: &Counts) -> Vec<(String, u64)> {
        let Counts { frames, bytes, dropped } = *counts;
        [("frames", frames), ("bytes", bytes), ("dropped", dropped)]
            .map(|(name, count)| (name.to_owned(), count))
            .into()
    }
}

fn main() -> ExitCode {
    tasuki_worker::main::<Reflector>()
}
