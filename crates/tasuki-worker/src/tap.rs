//! The TAP of a node: a descriptor with a kernel's network interface at its other side. The node's programs use this
//! interface as the node's NIC.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use rustix::fs::FileType;
use rustix::io::Errno;
use tasuki_net::port::{BURST_MAX, Burst, Frame};
use tasuki_relay::message::heartbeat;
use tasuki_shm::arena::Arena;

use crate::fail;
use crate::lease_page::Heartbeat;

/// Length of the shortest frame that a card sends, in bytes without check sequence.
pub const SHORTEST: usize = 60;

/// Advice to the user when the TAP of a NIC is gone.
const ALL_ANEW: &str = "apply the configuration, which makes the node anew (tasuki apply)";

/// A node's TAP. The driver of the node's NIC writes frames to it, and no other process reads frames from it.
#[derive(Debug)]
pub struct Tap {
    device: OwnedFd,
    /// Name that the daemon gave it.
    name: String,
    /// Whether its interface is gone: with its namespace, or removed by hand.
    is_gone: Cell<bool>,
    /// Whether that was reported.
    is_told: Cell<bool>,
}

impl Tap {
    /// Takes over the TAP that the daemon has made.
    pub fn over(device: OwnedFd, name: String) -> Result<Self> {
        let stat = rustix::fs::fstat(&device).context("the node's TAP cannot be used")?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        ensure!(is_device, "the daemon sent something else as the node's TAP; rebuild the older of the two");
        rustix::io::ioctl_fionbio(&device, true).context("the node's TAP cannot be used")?;
        Ok(Tap { device, name, is_gone: Cell::new(false), is_told: Cell::new(false) })
    }

    /// Returns the descriptor that becomes readable when the namespace sends. Returns nothing if the interface is
    /// gone: the descriptor would be readable for ever.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_gone.get()).then(|| self.device.as_fd())
    }

    /// Returns a sentence for the user if the interface is gone, once.
    pub fn trouble(&self) -> Option<String> {
        let is_news = self.is_gone.get() && !self.is_told.replace(self.is_gone.get());
        is_news.then(|| {
            format!(
                "the interface of the node's TAP {} is gone, with its network namespace or removed by hand: frames for it are dropped; {}",
                self.name,
                ALL_ANEW
            )
        })
    }

    fn note(&self, errno: Errno) {
        if matches!(errno, Errno::BADFD | Errno::NODEV) {
            self.is_gone.set(true);
        }
    }

    /// Gives received frames to the namespace. Drops frames that it does not accept at once: a card whose frames
    /// stay in its ring would have its partner pause.
    #[inline]
    pub fn give(&self, came: &Burst, heartbeat: &Heartbeat) {
        let mut refused = 0;
        for frame in came {
            match rustix::io::write(&self.device, frame.bytes()) {
                Ok(_) => {}
                Err(errno) => {
                    refused += 1;
                    self.note(errno);
                }
            }
            fail::point("tap.given");
        }
        heartbeat.add(heartbeat::REFUSED, refused);
    }

    /// Reads frames that the namespace sends, straight into slots of the card's memory, up to a burst.
    #[inline]
    pub fn take(&self, arena: &Arena, burst: &mut Burst, heartbeat: &Heartbeat) {
        // Frames of a wrong length are passed over, so more reads than free places may be needed; but not without
        // end.
        for _ in 0..BURST_MAX {
            if burst.is_full() || self.is_gone.get() {
                return;
            }
            let Some(mut slot) = arena.take() else { return };
            let room = slot.bytes_mut();
            match rustix::io::read(&self.device, &mut *room) {
                // One that fills the slot is cut off. The driver drops those that are longer than its card sends.
                Ok(len) if (1..room.len()).contains(&len) => {
                    // Zero the padding, so that no old bytes of the slot go out behind a short frame.
                    if let Some(rest) = room.get_mut(len..SHORTEST) {
                        rest.fill(0);
                    }
                    let len = u16::try_from(len.max(SHORTEST)).expect("no longer than a slot");
                    burst.push(Frame { slot, len });
                    fail::point("tap.taken");
                }
                Ok(len) => {
                    room[..len].fill(0);
                    heartbeat.add(heartbeat::REFUSED, 1);
                }
                Err(errno) => return self.note(errno),
            }
        }
    }
}
