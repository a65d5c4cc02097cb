//! A capture: copies of the frames that pass a port, for whoever looks on.
//!
//! Who drives a port writes each frame that comes or goes into a batch, as an enhanced packet block of pcapng in little-endian words, and a batch
//! into a socket that keeps the bounds of messages. Nobody waits for whoever reads there: what the socket does not take is counted as missed, in
//! memory that is shared with the reader. A port without captures has one branch for them on its way, for each burst of a NIC and for each frame
//! that is sent on a VNI.
//!
//! Source: PCAP Now Generic (pcapng), draft-ietf-opsawg-pcapng, 4.3 (Enhanced Packet Block).

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::time::{ClockId, clock_gettime};
use tasuki_shm::region::{Region, RegionError, Span};
use tasuki_shm::sync::{AtomicU64, Relaxed};

use crate::port::Frame;
use crate::vni::offload::HEADER_LEN;
use crate::vni::{Incoming, PIECE_MAX};

/// Captures of one port, at most.
pub const CAPTURES_MAX: usize = 16;

/// Bytes of the longest frame.
const FRAME_MAX: usize = PIECE_MAX - HEADER_LEN;

/// Bytes of a batch, if none of its frames is longer.
const BATCH: usize = 32 << 10;

/// Type of an enhanced packet block; what stands before its frame, in bytes, and behind: the option with the direction, the end of the options and
/// the block's length.
const PACKET_BLOCK: u32 = 6;
const BEFORE: usize = 28;
const BEHIND: usize = 16;

/// The option that says which way a frame went, and its length.
const FLAGS: u32 = 2 | 4 << 16;

/// Which way a frame went, as that option has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// It came to the node.
    Inbound = 1,
    /// The node sent it.
    Outbound = 2,
}

/// Where the frames of a capture go, and as what.
#[derive(Debug)]
pub struct Terms {
    /// Of the capture.
    pub number: u32,
    /// Takes batches: a socket that keeps the bounds of messages, whose other end belongs to whoever looks on.
    pub socket: OwnedFd,
    /// A word for each interface: how many of its frames were missed.
    pub missed: OwnedFd,
    /// What the port is called in the blocks.
    pub interface: u32,
    /// Bytes that are kept of a frame, at most.
    pub snap: u32,
}

/// One capture of a port.
#[derive(Debug)]
pub struct Capture {
    number: u32,
    socket: OwnedFd,
    missed: Span<AtomicU64>,
    interface: u32,
    snap: usize,
    batch: Box<[u8]>,
    /// Bytes of it that are in use, and how many frames that are.
    used: usize,
    frames: u64,
    /// Nobody reads any more.
    is_over: bool,
}

/// Bytes of a block with so many bytes of a frame.
const fn block_len(kept: usize) -> usize {
    BEFORE + kept.next_multiple_of(4) + BEHIND
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec.unsigned_abs().wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec.unsigned_abs())
}

impl Capture {
    /// One that begins, and says so: a message of nothing but the interface's number.
    ///
    /// # Errors
    /// There is no word for this interface in what came as the memory of missed frames.
    pub fn begin(terms: Terms) -> Result<Self, RegionError> {
        let Terms { number, socket, missed, interface, snap } = terms;
        let missed = Region::adopt(missed)?;
        missed.populate();
        let missed = missed.span(interface as usize * 8, 1)?;
        let snap = usize::try_from(snap).unwrap_or(usize::MAX).clamp(14, FRAME_MAX);
        let batch = vec![0; block_len(snap).max(BATCH)].into();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let is_over = rustix::net::send(&socket, &interface.to_le_bytes(), flags).is_err();
        Ok(Capture { number, socket, missed, interface, snap, batch, used: 0, frames: 0, is_over })
    }

    /// Notes a frame of `len` bytes, the first of which `copy` copies; says no if it could not.
    #[inline]
    fn note(&mut self, at_ns: u64, direction: Direction, len: usize, copy: impl FnOnce(&mut [u8]) -> bool) {
        if self.is_over {
            return;
        }
        let kept = len.min(self.snap);
        let whole = block_len(kept);
        if self.used + whole > self.batch.len() {
            self.flush();
        }
        let Some(block) = self.batch.get_mut(self.used..self.used + whole) else { return };
        let (before, rest) = block.split_at_mut(BEFORE);
        let (frame, behind) = rest.split_at_mut(kept.next_multiple_of(4));
        if !copy(&mut frame[..kept]) {
            self.missed[0].fetch_add(1, Relaxed);
            return;
        }
        frame[kept..].fill(0);
        let [whole_word, kept, len] = [whole, kept, len].map(word);
        let words = [PACKET_BLOCK, whole_word, self.interface, high_half(at_ns), low_half(at_ns), kept, len];
        write(before, words);
        write(behind, [FLAGS, direction as u32, 0, whole_word]);
        self.used += whole;
        self.frames += 1;
    }

    /// Has whoever looks on have what was noted.
    fn flush(&mut self) {
        if self.used == 0 {
            return;
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&self.socket, &self.batch[..self.used], flags) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::MSGSIZE | Errno::INTR) => {
                self.missed[0].fetch_add(self.frames, Relaxed);
            }
            // Nobody reads there any more, or it is no such socket.
            Err(_) => self.is_over = true,
        }
        (self.used, self.frames) = (0, 0);
    }
}

fn word(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is meant")]
fn low_half(word: u64) -> u32 {
    word as u32
}

fn high_half(word: u64) -> u32 {
    low_half(word >> 32)
}

fn write<const N: usize>(into: &mut [u8], words: [u32; N]) {
    for (place, word) in into.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
}

/// The captures of a port.
#[derive(Debug, Default)]
pub struct Captures(Vec<Capture>);

impl Captures {
    /// One more; it takes the place of one of the same number. Says no if there are too many.
    pub fn add(&mut self, capture: Capture) -> bool {
        self.0.retain(|other| other.number != capture.number && !other.is_over);
        let has_room = self.0.len() < CAPTURES_MAX;
        if has_room {
            self.0.push(capture);
        }
        has_room
    }

    /// Ends one; says whether any is left.
    pub fn remove(&mut self, number: u32) -> bool {
        self.0.retain(|capture| capture.number != number && !capture.is_over);
        !self.0.is_empty()
    }

    /// Frames that come to a NIC, or go.
    #[cold]
    #[inline(never)]
    pub fn frames(&mut self, direction: Direction, frames: &[Frame]) {
        if frames.is_empty() {
            return;
        }
        let at_ns = now_ns();
        for capture in &mut self.0 {
            for frame in frames {
                let bytes = frame.bytes();
                capture.note(at_ns, direction, bytes.len(), copy_of(bytes));
            }
            capture.flush();
        }
    }

    /// A frame that comes from a VNI, wherever it lies.
    #[cold]
    #[inline(never)]
    pub(crate) fn came(&mut self, incoming: &Incoming<'_>) {
        let at_ns = now_ns();
        for capture in &mut self.0 {
            capture.note(at_ns, Direction::Inbound, incoming.len(), |into| incoming.copy_to(into).is_ok());
        }
    }

    /// A frame that a node sends on a VNI.
    #[cold]
    #[inline(never)]
    pub(crate) fn sent(&mut self, frame: &[u8]) {
        let at_ns = now_ns();
        for capture in &mut self.0 {
            capture.note(at_ns, Direction::Outbound, frame.len(), copy_of(frame));
        }
    }

    /// Has whoever looks on have what was noted.
    #[cold]
    #[inline(never)]
    pub(crate) fn flush(&mut self) {
        self.0.iter_mut().for_each(Capture::flush);
    }
}

fn copy_of(frame: &[u8]) -> impl FnOnce(&mut [u8]) -> bool {
    |into| {
        into.copy_from_slice(&frame[..into.len()]);
        true
    }
}
