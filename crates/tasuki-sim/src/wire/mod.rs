//! What a card is plugged into.

mod datagram;
mod pcap;
mod source;
mod tap;

pub use datagram::Datagram;
pub use pcap::Recorded;
pub use source::{Counts, Source, SourceOptions};
pub use tap::{Tap, TapError};

/// The other end of a card's cable. Frames are without their check sequence.
pub trait Wire {
    /// The next frame that has come until `now`, in nanoseconds, if there is one.
    fn receive(&mut self, now: u64) -> Option<&[u8]>;

    /// The card sends a frame.
    fn send(&mut self, frame: &[u8], now: u64);
}

/// A cable that leads nowhere: nothing comes, and what is sent is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Nowhere {
    /// Frames that the card sent.
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
