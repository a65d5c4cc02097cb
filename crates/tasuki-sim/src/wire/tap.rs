//! A wire that is a TAP device: the machine's own network is at the other end.

use std::os::fd::OwnedFd;
use tasuki_tap::device::Before;

pub use tasuki_tap::TapError;

use super::{Wire, pause_ns};

const LONGEST: usize = 64 << 10;

/// What stands on a cable of 1 Gb/s around a frame (preamble, check sequence, gap), in bytes, and how long a byte takes.
const AROUND: u64 = 24;
const BYTE_NS: u64 = 8;

/// A model that is looked at late may make up for so much.
const LATE_NS: u64 = 50_000;

/// A TAP device. Gone when dropped, unless it had been made to stay before.
#[derive(Debug)]
pub struct Tap {
    device: OwnedFd,
    frame: Box<[u8]>,
    lost: u64,
    /// The last frame that came takes until then.
    busy_until: u64,
    /// The card wants nothing until then. What the kernel sends waits in its own queue.
    paused_until: u64,
}

impl Tap {
    /// Makes the interface `name`, or takes it if it is there and nobody has it. Whoever wants to use it sets it up.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let device = tasuki_tap::device::open(name, Before::Nothing)?;
        Ok(Tap { device, frame: vec![0; LONGEST].into_boxed_slice(), lost: 0, busy_until: 0, paused_until: 0 })
    }

    /// Frames that the kernel did not take: the interface is down.
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
        // Between card and cable: no network passes it on.
        if let Some(time) = pause_ns(frame) {
            self.paused_until = now + time;
            return;
        }
        self.lost += u64::from(rustix::io::write(&self.device, frame).is_err());
    }
}
