//! The next version of `reflector`, for an upgrade under traffic: it also counts frames by their length, so its
//! state has another layout. It goes on from the counts of version 1. The way back is refused, and this version
//! drives on.

use std::process::ExitCode;

use tasuki_worker::{Fate, Program, Transactional, Turn};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const KIND: u32 = 0x5ef1_ec70;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Counts {
    frames: u64,
    bytes: u64,
    /// Counts of frames since version 2, of up to 128 bytes, up to 256, 512, 1,024, and more.
    lengths: [u64; 5],
}

/// State of version 1.
#[derive(FromBytes)]
#[repr(C)]
struct CountsOfOne {
    frames: u64,
    bytes: u64,
    _dropped: u64,
}

struct Reflector;

impl Program for Reflector {
    type State = Counts;
    const STATE: (u32, u32) = (KIND, 2);

    fn new(_: &str) -> Result<Self, String> {
        Ok(Reflector)
    }

    fn convert(kind: u32, version: u32, bytes: &[u8]) -> Option<Counts> {
        let CountsOfOne { frames, bytes, .. } = match (kind, version) {
            (KIND, 1) => CountsOfOne::read_from_bytes(bytes).ok()?,
            _ => return None,
        };
        Some(Counts { frames, bytes, lengths: [0; 5] })
    }

    fn turn<N: Transactional>(&mut self, counts: &mut Counts, turn: &mut Turn<'_, N>) {
        turn.frames(|frame| {
            let len = frame.bytes().len();
            counts.frames += 1;
            counts.bytes += len as u64;
            let class = [128, 256, 512, 1024].iter().position(|most| len <= *most);
            counts.lengths[class.unwrap_or(4)] += 1;
            if let Some(addresses) = frame.head_mut().first_chunk_mut::<12>() {
                addresses.rotate_left(6);
            }
            Fate::Sent
        });
    }

    fn counts(counts: &Counts) -> Vec<(String, u64)> {
        let lengths = ["up to 128", "up to 256", "up to 512", "up to 1024", "longer"];
        let lengths = lengths.iter().zip(counts.lengths).map(|(name, count)| ((*name).to_owned(), count));
        [("frames".to_owned(), counts.frames), ("bytes".to_owned(), counts.bytes)].into_iter().chain(lengths).collect()
    }
}

fn main() -> ExitCode {
    tasuki_worker::main::<Reflector>()
}
