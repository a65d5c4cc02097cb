//! A capture: copies of the frames that pass a port, for an observer.
//!
//! The worker that drives a port writes each received or sent frame into a batch, as an enhanced packet block of pcapng
//! in little-endian words. It sends each batch to a socket that keeps message boundaries. The worker never waits for
//! the reader: batches that the socket does not take count as missed, in memory shared with the reader. A port without
//! captures pays one branch for each burst of a NIC, and one for each frame sent on a VNI.
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

/// Maximum number of captures on one port.
pub const CAPTURES_MAX: usize = 16;

/// Length of the longest frame, in bytes.
const FRAME_MAX: usize = PIECE_MAX - HEADER_LEN;

/// Size of a batch in bytes, unless a single block needs more.
const BATCH: usize = 32 << 10;

/// Type of an enhanced packet block; bytes before its frame; bytes behind it: the option with the direction, the end of
/// the options, and the block's length.
const PACKET_BLOCK: u32 = 6;
const BEFORE: usize = 28;
const BEHIND: usize = 16;

/// Code and length of the option that holds a frame's direction.
const FLAGS: u32 = 2 | 4 << 16;

/// Direction of a frame, as pcapng's flags option encodes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The node received the frame.
    Inbound = 1,
    /// The node sent the frame.
    Outbound = 2,
}

/// Destination of a capture's frames, and their description.
#[derive(Debug)]
pub struct Terms {
    /// Number of the capture; on a port, a new capture replaces one of the same number.
    pub number: u32,
    /// Socket that takes batches and keeps message boundaries. The observer has the other end.
    pub socket: OwnedFd,
    /// Shared memory with one 64-bit word for each interface: the number of its frames that were missed.
    pub missed: OwnedFd,
    /// Interface number of the port in the blocks.
    pub interface: u32,
    /// Maximum number of bytes kept of each frame.
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
    /// Bytes of `batch` in use, and the number of frames in them.
    used: usize,
    frames: u64,
    /// The reader is gone.
    is_over: bool,
}

/// Length in bytes of a block that holds `kept` bytes of a frame.
const fn block_len(kept: usize) -> usize {
    BEFORE + kept.next_multiple_of(4) + BEHIND
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec.unsigned_abs().wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec.unsigned_abs())
}

impl Capture {
    /// Starts a capture, and announces it with a message that holds only the interface number.
    ///
    /// # Errors
    /// The memory in `missed` has no word for this interface.
    pub fn begin(terms: Terms) -> Result<Self, RegionError> {
        let Terms { number, socket, missed, interface, snap } = terms;
        let missed = Region::adopt(missed)?;
        missed.populate();
        let missed = missed.span(interface as usize * 8, 1)?;
        let snap = usize::try_from(snap).unwrap_or(usize::MAX).clamp(14, FRAME_MAX);
        let batch = vec![0; block_len(snap).max(BATCH)].into();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let is_over = rustix::net::send(&socket, &interface.to_le_bytes(), flags).is_err_and(is_end);
        Ok(Capture { number, socket, missed, interface, snap, batch, used: 0, frames: 0, is_over })
    }

    /// Appends a frame of `len` bytes to the batch. `copy` copies its first bytes, or returns false; the frame then
    /// counts as missed.
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

    /// Sends the batch to the reader.
    fn flush(&mut self) {
        if self.used == 0 {
            return;
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&self.socket, &self.batch[..self.used], flags) {
            Ok(_) => {}
            Err(errno) if is_end(errno) => self.is_over = true,
            Err(_) => drop(self.missed[0].fetch_add(self.frames, Relaxed)),
        }
        (self.used, self.frames) = (0, 0);
    }
}

/// Returns whether an error of the socket ends a capture: the reader has closed its end, or the descriptor is no such socket. A
/// reader that is late is none.
fn is_end(errno: Errno) -> bool {
    !matches!(errno, Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::MSGSIZE | Errno::INTR)
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
    /// Adds a capture, in place of one of the same number. Returns false if the port has too many.
    pub fn add(&mut self, capture: Capture) -> bool {
        self.0.retain(|other| other.number != capture.number && !other.is_over);
        let has_room = self.0.len() < CAPTURES_MAX;
        if has_room {
            self.0.push(capture);
        }
        has_room
    }

    /// Ends capture `number`. Returns whether any capture is left.
    pub fn remove(&mut self, number: u32) -> bool {
        self.0.retain(|capture| capture.number != number && !capture.is_over);
        !self.0.is_empty()
    }

    /// Captures frames that a NIC received or sent.
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

    /// Captures a frame received from a VNI, out of its sender's pool.
    #[cold]
    #[inline(never)]
    pub(crate) fn came(&mut self, incoming: &Incoming<'_>) {
        let at_ns = now_ns();
        for capture in &mut self.0 {
            capture.note(at_ns, Direction::Inbound, incoming.len(), |into| incoming.copy_to(into).is_ok());
        }
    }

    /// Captures a frame that a node sends on a VNI.
    #[cold]
    #[inline(never)]
    pub(crate) fn sent(&mut self, frame: &[u8]) {
        let at_ns = now_ns();
        for capture in &mut self.0 {
            capture.note(at_ns, Direction::Outbound, frame.len(), copy_of(frame));
        }
    }

    /// Sends all batches to their readers.
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

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
    use tasuki_shm::region::Pages;

    use super::*;

    /// As of a worker that is started while the batches of the one before it have filled the socket.
    #[test]
    fn a_capture_that_begins_while_its_reader_is_late_goes_on() {
        let (reader, ours) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let memory = Region::create("missed", 4096, Pages::Small).unwrap();
        let terms = || Terms {
            number: 1,
            socket: ours.try_clone().unwrap(),
            missed: memory.fd().try_clone_to_owned().unwrap(),
            interface: 0,
            snap: 64,
        };
        while rustix::net::send(&ours, &[0; 1024], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok() {}
        let mut captures = Captures::default();
        assert!(captures.add(Capture::begin(terms()).unwrap()));
        let missed = memory.span::<AtomicU64>(0, 1).unwrap();
        for frames in [1, 2] {
            captures.sent(&[7; 60]);
            captures.flush();
            assert_eq!(missed[0].load(Relaxed), frames, "it counts what the reader misses");
        }
        let mut room = [0; 1024];
        let mut read = || rustix::net::recv(&reader, &mut room[..], RecvFlags::DONTWAIT).map(|(len, _)| len);
        while read().is_ok() {}
        captures.sent(&[7; 60]);
        captures.flush();
        assert_eq!((read(), missed[0].load(Relaxed)), (Ok(block_len(60)), 2));
        drop(reader);
        captures.sent(&[7; 60]);
        captures.flush();
        assert!(captures.0[0].is_over);
    }
}
