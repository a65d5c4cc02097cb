//! A wire over a TAP interface, with the machine's own network at the other end.

use std::os::fd::OwnedFd;
use tasuki_tap::device::{Before, Queues};

pub use tasuki_tap::TapError;

use super::{Wire, pause_ns};

const LONGEST: usize = 64 << 10;

/// Bytes around a frame on a 1 Gb/s cable (preamble, check sequence, gap), and nanoseconds per byte.
const AROUND: u64 = 24;
const BYTE_NS: u64 = 8;

/// Most time, in nanoseconds, that a model polled late may catch up.
const LATE_NS: u64 = 50_000;

/// A TAP interface. Dropping this removes it, unless it existed before as a persistent one.
#[derive(Debug)]
pub struct Tap {
    device: OwnedFd,
    frame: Box<[u8]>,
    lost: u64,
    /// End of the last received frame on the cable.
    busy_until: u64,
    /// End of the card's pause. The kernel's frames wait in its own queue.
    paused_until: u64,
}

impl Tap {
    /// Creates the interface `name`, or attaches to it if it exists and has no other user. The caller sets it up.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let device = tasuki_tap::device::open(name, Before::Nothing, Queues::One)?;
        Ok(Tap { device, frame: vec![0; LONGEST].into_boxed_slice(), lost: 0, busy_until: 0, paused_until: 0 })
    }

    /// Returns the number of frames that the kernel refused: the interface is down.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl Wire for Tap {
    fn receive(&mut self, now: u64) -> Option<&[u8]> {
        if now < self.busy_until || now < self.paused_until {
            return None;
        }
        let len = rustix::io::read(&self.device, &mut self.frame[..]).ok()?;
        self.busy_until = self.busy_until.max(now.saturating_sub(LATE_NS)) + (len as u64 + AROUND) * BYTE_NS;
        Some(&self.frame[..len])
    }

    fn send(&mut self, frame: &[u8], now: u64) {
        // PAUSE is between card and cable: no network forwards it.
        if let Some(time) = pause_ns(frame) {
            self.paused_until = now + time;
            return;
        }
        self.lost += u64::from(rustix::io::write(&self.device, frame).is_err());
    }
}
