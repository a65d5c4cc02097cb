//! A wire that is a TAP device: the machine's own network is at the other end.

use std::os::fd::OwnedFd;

pub use tasuki_tap::TapError;

use super::Wire;

const LONGEST: usize = 64 << 10;

/// A TAP device. Gone when dropped, unless it had been made to stay before.
#[derive(Debug)]
pub struct Tap {
    device: OwnedFd,
    frame: Box<[u8]>,
    lost: u64,
}

impl Tap {
    /// Makes the interface `name`, or takes it if it is there and nobody has it. Whoever wants to use it sets it up.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let device = tasuki_tap::device::open(name)?;
        Ok(Tap { device, frame: vec![0; LONGEST].into_boxed_slice(), lost: 0 })
    }

    /// Frames that the kernel did not take: the interface is down.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl Wire for Tap {
    fn receive(&mut self, _: u64) -> Option<&[u8]> {
        let len = rustix::io::read(&self.device, &mut self.frame[..]).ok()?;
        Some(&self.frame[..len])
    }

    fn send(&mut self, frame: &[u8], _: u64) {
        self.lost += u64::from(rustix::io::write(&self.device, frame).is_err());
    }
}
