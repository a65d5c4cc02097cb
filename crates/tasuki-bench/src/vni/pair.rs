//! Two nodes of a VNI in two processes: one sends, the other receives.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tasuki_net::vni::{NoRoom, SendError, Vni};
use tasuki_shm::line::LINE_LEN;
use zerocopy::IntoBytes;

use super::nodes::{Kept, join};
use crate::call::AlignedLine;
use crate::case::Ends;
use crate::orders::Orders;
use crate::sample::Sample;

/// The receiving node, and the sending one.
pub const SINK: u16 = 0;
pub const SOURCE: u16 = 1;

/// Number of private frames to copy from and to in turn, like a program's burst.
const BUFFERS: usize = 32;

/// Frames between two wake-ups of the receiver.
const BURST: u64 = 32;

/// Private memory for a frame, on whole lines as a program's own pool has it.
pub struct Buffer {
    lines: Vec<AlignedLine>,
    len: usize,
}

impl Buffer {
    /// Makes a buffer of `len` bytes.
    pub fn new(len: usize) -> Self {
        Buffer { lines: vec![AlignedLine::default(); len.div_ceil(LINE_LEN)], len }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.lines.as_mut_bytes()[..self.len]
    }
}

/// Makes the memory of two nodes, and their bells.
pub fn node_memories() -> Result<Ends> {
    let (sink, source) = (Kept::new(SINK)?, Kept::new(SOURCE)?);
    Ok(Ends { server: sink.fds([&source])?, client: source.fds([&sink])? })
}

/// Returns the buffer for the frame of that number.
pub fn in_turn(number: u64) -> usize {
    usize::try_from(number % BUFFERS as u64).expect("few buffers")
}

/// Makes private frames, each filled with a different byte.
pub fn private_frames(len: usize) -> Vec<Buffer> {
    let mut frames: Vec<_> = (0..BUFFERS).map(|_| Buffer::new(len)).collect();
    (0_u8..).zip(&mut frames).for_each(|(i, frame)| frame.bytes().fill(i));
    frames
}

/// Receives all frames, and sends one back at the end of the warm-up and at the end.
pub fn receive<const LEN: usize, const IN_PLACE: bool>(mut orders: Orders) -> Result<()> {
    let (warmup, total) = (orders.warmup, orders.total());
    let mut vni = join(orders.fds(), SINK, [SOURCE])?;
    let mut buffers = private_frames(LEN);
    let (mut count, mut sum, mut wrong) = (0_u64, 0_u64, 0_u64);
    for until in [warmup, total] {
        while count < until {
            vni.receive(|frame| {
                let buffer = buffers[in_turn(count)].bytes();
                count += 1;
                if IN_PLACE {
                    let words = frame.words();
                    wrong += u64::from(words.is_none());
                    sum = words.into_iter().flatten().fold(sum, u64::wrapping_add);
                    wrong += u64::from(!frame.is_whole());
                } else {
                    wrong += u64::from(frame.copy_to(buffer) != Ok(LEN));
                }
            });
        }
        // Make the compiler keep the sum; nothing else needs it.
        let mut answer = [0; 64];
        answer[..8].copy_from_slice(&std::hint::black_box(sum).to_ne_bytes());
        vni.send(SOURCE, &answer)?;
        vni.flush();
    }
    ensure!(wrong == 0, "{wrong} frames were taken back or cut");
    Ok(())
}

/// Sends all frames as fast as the receiver takes them; notes frames a second.
pub fn send<const LEN: usize, const IN_PLACE: bool>(mut orders: Orders) -> Result<Sample> {
    let (warmup, calls) = (orders.warmup, orders.calls);
    let mut vni = join(orders.fds(), SOURCE, [SINK])?;
    let mut frames = private_frames(LEN);
    let mut sample = Sample::new();
    for count in [warmup, calls] {
        let start = Instant::now();
        for number in 0..count {
            let frame = frames[in_turn(number)].bytes();
            send_one::<LEN, IN_PLACE>(&mut vni, frame, number)?;
            if number % BURST == BURST - 1 {
                vni.flush();
            }
        }
        vni.flush();
        let mut answered = 0;
        while answered == 0 {
            answered = vni.receive(|_| {});
            ensure!(start.elapsed() < Duration::from_secs(60), "the receiver does not answer");
        }
        let took = start.elapsed();
        if count == calls {
            sample.rate(calls, took)?;
        }
    }
    let counts = vni.counts(SINK).context("the receiver is known")?;
    sample.note("ring_full", counts.ring_full as f64);
    sample.note("no_pages", (counts.over_quota + counts.pool_full) as f64);
    Ok(sample)
}

#[inline]
fn send_one<const LEN: usize, const IN_PLACE: bool>(vni: &mut Vni, frame: &[u8], number: u64) -> Result<()> {
    let is_sent = |vni: &mut Vni| match IN_PLACE {
        false => vni.send(SINK, frame),
        true => {
            vni.draft(SINK, LEN).map(|room| room.fill(number.to_ne_bytes()[0])).map(|()| vni.post(SINK, LEN, false))
        }
    };
    loop {
        match is_sent(vni) {
            Ok(()) => return Ok(()),
            Err(SendError::NoRoom(NoRoom::Ring | NoRoom::Quota | NoRoom::Pool)) => {
                vni.flush();
                std::hint::spin_loop();
            }
            Err(error) => bail!(error),
        }
    }
}
