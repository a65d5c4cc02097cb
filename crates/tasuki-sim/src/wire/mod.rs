//! Wires: the other ends of a card's cable.

mod datagram;
mod pcap;
mod source;
mod tap;

pub use datagram::Datagram;
pub use pcap::Recorded;
pub use source::{Counts, Source, SourceOptions};
pub use tap::{Tap, TapError};

/// PAUSE frames (IEEE 802.3, annex 31B): destination, type with opcode, and nanoseconds per quantum at 1 Gb/s.
const PAUSE_TO: [u8; 6] = [0x01, 0x80, 0xc2, 0x00, 0x00, 0x01];
const PAUSE: [u8; 4] = [0x88, 0x08, 0x00, 0x01];
const QUANTUM_NS: u64 = 512;

/// Returns for how many nanoseconds a PAUSE frame stops its receiver; `None` for any other frame.
#[inline]
fn pause_ns(frame: &[u8]) -> Option<u64> {
    let is_pause = frame.len() >= 18 && frame[..6] == PAUSE_TO && frame[12..16] == PAUSE;
    is_pause.then(|| u64::from(u16::from_be_bytes([frame[16], frame[17]])) * QUANTUM_NS)
}

/// The other end of a card's cable. Frames are without their check sequence.
pub trait Wire {
    /// Returns the next frame that arrived until `now`, in nanoseconds.
    fn receive(&mut self, now: u64) -> Option<&[u8]>;

    /// Takes a frame that the card sends.
    fn send(&mut self, frame: &[u8], now: u64);
}

/// A cable that leads nowhere: no frame arrives, and sent ones are counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Nowhere {
    /// Number of frames that the card sent.
    pub sent: u64,
}

impl Wire for Nowhere {
    fn receive(&mut self, _: u64) -> Option<&[u8]> {
        None
    }

    fn send(&mut self, _: &[u8], _: u64) {
        self.sent += 1;
    }
}

impl<W: Wire + ?Sized> Wire for &mut W {
    fn receive(&mut self, now: u64) -> Option<&[u8]> {
        (**self).receive(now)
    }

    fn send(&mut self, frame: &[u8], now: u64) {
        (**self).send(frame, now);
    }
}

impl<W: Wire + ?Sized> Wire for Box<W> {
    fn receive(&mut self, now: u64) -> Option<&[u8]> {
        (**self).receive(now)
    }

    fn send(&mut self, frame: &[u8], now: u64) {
        (**self).send(frame, now);
    }
}
