//! A program that sends by itself: numbered frames, as many as `options` say (`count=1000 size=60`), as fast as the
//! card takes them. Its state is the number of the next frame, so each number is sent once and in order, whatever
//! happens to the worker.

use std::process::ExitCode;
use std::time::Duration;

use tasuki_worker::{Program, Transactional, Turn};
use zerocopy::{FromBytes, Immutable, IntoBytes};

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Made(u64);

struct Generator {
    count: u64,
    size: u16,
}

impl Program for Generator {
    type State = Made;
    const STATE: (u32, u32) = (0x6e0e_7a70, 1);

    fn new(options: &str) -> Result<Self, String> {
        let mut generator = Generator { count: 1000, size: 60 };
        for word in options.split_whitespace() {
            match word.split_once('=').map(|(name, value)| (name, value.parse())) {
                Some(("count", Ok(count))) => generator.count = count,
                Some(("size", Ok(size @ 60..=1514))) => generator.size = u16::try_from(size).unwrap_or(60),
                _ => return Err(format!("{word:?} means nothing; write count=1000 or size=60 (to 1514)")),
            }
        }
        Ok(generator)
    }

    fn turn<N: Transactional>(&mut self, made: &mut Made, turn: &mut Turn<'_, N>) {
        let from = turn.mac().0;
        // Received frames are dropped.
        turn.frames(|_| tasuki_worker::Fate::Dropped);
        while made.0 < self.count
            && let Some(frame) = turn.make(self.size)
        {
            frame[..6].fill(0xff);
            frame[6..12].copy_from_slice(&from);
            frame[12..18].copy_from_slice(b"\x88\xb5tsk\x01");
            frame[18..26].copy_from_slice(&made.0.to_le_bytes());
            made.0 += 1;
        }
    }

    fn rest(&self, made: &Made) -> Option<Duration> {
        (made.0 < self.count).then_some(Duration::ZERO)
    }

    fn counts(made: &Made) -> Vec<(String, u64)> {
        vec![("made".to_owned(), made.0)]
    }
}

fn main() -> ExitCode {
    tasuki_worker::main::<Generator>()
}
