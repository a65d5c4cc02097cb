//! The TAP of a node: a descriptor, at whose other side a kernel has an interface that is this node's NIC to its programs.

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

/// Bytes of a frame, without check sequence, that no card sends shorter,
pub const SHORTEST: usize = 60;

/// and of one that every card sends.
pub const LONGEST: usize = 1514;

/// What to do when the TAP of a NIC is gone.
const ALL_ANEW: &str = "make the namespace anew, stop all (tasuki stop) and start tasukid anew";

/// A node's TAP. Frames are written to it by whoever drives the node's NIC, and read from it by nobody else.
#[derive(Debug)]
pub struct Tap {
    device: OwnedFd,
    /// What the daemon calls it.
    name: String,
    /// Its interface was taken away: with its namespace, or by somebody,
    is_gone: Cell<bool>,
    /// and that was said.
    is_told: Cell<bool>,
    /// What to do then.
    help: Cell<&'static str>,
}

impl Tap {
    /// What the daemon has made.
    pub fn over(device: OwnedFd, name: String) -> Result<Self> {
        let stat = rustix::fs::fstat(&device).context("the node's TAP cannot be used")?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        ensure!(is_device, "what the daemon sent as the node's TAP is none; rebuild the older of the two");
        rustix::io::ioctl_fionbio(&device, true).context("the node's TAP cannot be used")?;
        Ok(Tap { device, name, is_gone: Cell::new(false), is_told: Cell::new(false), help: Cell::new(ALL_ANEW) })
    }

    /// Another descriptor of it.
    pub fn fd(&self) -> std::io::Result<OwnedFd> {
        self.device.try_clone()
    }

    /// Becomes readable when the namespace sends; of one that is gone it would say so for ever.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_gone.get()).then(|| self.device.as_fd())
    }

    /// What a person must know of it, once.
    pub fn trouble(&self) -> Option<String> {
        let is_news = self.is_gone.get() && !self.is_told.replace(self.is_gone.get());
        is_news.then(|| {
            format!(
                "the interface of the node's TAP {} is gone, with its network namespace or by somebody's hand: what comes is dropped; {}",
                self.name,
                self.help.get()
            )
        })
    }

    /// Its interface was found to be gone; what to do then.
    pub fn lose(&self, help: &'static str) {
        self.is_gone.set(true);
        self.help.set(help);
    }

    fn note(&self, errno: Errno) {
        if matches!(errno, Errno::BADFD | Errno::NODEV) {
            self.is_gone.set(true);
        }
    }

    /// Gives the namespace what came. What it does not take now it does not get: a card whose frames nobody takes away would have its
    /// partner pause.
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

    /// What the namespace sends, straight into slots of the card's: as much as there is, up to a burst.
    #[inline]
    pub fn take(&self, arena: &Arena, burst: &mut Burst, heartbeat: &Heartbeat) {
        // Some more than fit into the burst may have to be passed over; not for ever.
        for _ in 0..BURST_MAX {
            if burst.is_full() || self.is_gone.get() {
                return;
            }
            let Some(mut slot) = arena.take() else { return };
            let room = slot.bytes_mut();
            match rustix::io::read(&self.device, &mut *room) {
                Ok(len) if (1..=LONGEST).contains(&len) => {
                    // Nothing of what was in the slot goes out behind a short one.
                    if let Some(rest) = room.get_mut(len..SHORTEST) {
                        rest.fill(0);
                    }
                    let len = u16::try_from(len.max(SHORTEST)).expect("no longer than the longest");
                    burst.push(Frame { slot, len });
                    fail::point("tap.taken");
                }
                Ok(_) => heartbeat.add(heartbeat::REFUSED, 1),
                Err(errno) => return self.note(errno),
            }
        }
    }
}
