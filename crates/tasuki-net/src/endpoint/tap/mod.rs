//! A node that is a network namespace: a TAP, whose frames carry the offload work that is still undone.
//!
//! The kernel behind the TAP sends and accepts GSO packets of up to 64 KiB without computed checksums; they cross the VNI
//! as they are. The sending node's kernel copies a frame from the namespace into the node's pool. The receiving node's
//! kernel copies it from that pool into its namespace. No other copy is made.

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::FileType;
use rustix::io::Errno;

use super::notes::READS;
use super::{Dropped, Egress, Endpoint, Given, Recovery, is_readable};
use crate::switch::CheckedPrefix;
use crate::vni::Incoming;
use crate::vni::ledger::point;
use crate::vni::offload::HEADER_LEN;

/// Opens the namespace behind a TAP.
pub(super) fn open(tap: OwnedFd, _: &str, _: &str) -> Result<Box<dyn Endpoint>, String> {
    let unusable = |errno: Errno| format!("the node's TAP cannot be used: {errno}");
    let stat = rustix::fs::fstat(&tap).map_err(unusable)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return Err("what the daemon sent as the node's TAP is none; rebuild the older of the two".to_owned());
    }
    rustix::io::ioctl_fionbio(&tap, true).map_err(unusable)?;
    Ok(Box::new(Tap::new(tap)))
}

/// The namespace behind a TAP.
#[derive(Debug)]
pub struct Tap {
    tap: OwnedFd,
    /// The TAP's interface is gone.
    gone: bool,
}

impl Tap {
    /// Opens the namespace behind `tap`, a non-blocking TAP device with offload headers (`IFF_VNET_HDR`).
    pub fn new(tap: OwnedFd) -> Self {
        Tap { tap, gone: false }
    }

    fn note(&mut self, errno: Errno) {
        self.gone |= matches!(errno, Errno::BADFD | Errno::NODEV);
    }

    /// Writes a frame to the TAP. Returns the number of frames written, none if the frame was not whole any more once the
    /// kernel had copied it.
    fn write(&self, incoming: &Incoming<'_>, front: &CheckedPrefix) -> io::Result<usize> {
        // Drop a frame that its sender took back while this worker slept. A frame that is taken back while the kernel
        // copies it cannot be recalled.
        if !incoming.is_whole() {
            return Ok(0);
        }
        let count = incoming.write_with_header(self.tap.as_fd(), front)?;
        Ok(if count > 1 || incoming.is_whole() { count } else { 0 })
    }
}

impl Endpoint for Tap {
    fn recovery(&self) -> Recovery {
        Recovery::Notes
    }

    fn give(&mut self, incoming: &Incoming<'_>, front: &CheckedPrefix, dropped: &mut Dropped) -> Given {
        match self.write(incoming, front) {
            Ok(0) => dropped.too_late += 1,
            Ok(count) => return Given::Taken(count),
            Err(error) => {
                dropped.refused += 1;
                Errno::from_io_error(&error).into_iter().for_each(|errno| self.note(errno));
            }
        }
        Given::Taken(0)
    }

    fn ring(&mut self) {
        // The reader of these frames may need this very CPU. Without the yield, the kernel wakes it for each frame, or
        // not at all while frames arrive.
        std::thread::yield_now();
    }

    fn take(&mut self, egress: &mut Egress<'_>) -> usize {
        for count in 0..READS {
            let Some((room, _)) = egress.stage() else { return count };
            let len = match rustix::io::read(&self.tap, room) {
                Ok(len) if len >= HEADER_LEN + 14 => len,
                Ok(_) => continue,
                Err(errno) => {
                    self.note(errno);
                    return count;
                }
            };
            point("tap.read");
            if !egress.send_staged(len) {
                return count;
            }
        }
        READS
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.gone).then(|| self.tap.as_fd())
    }

    fn has_frames(&self) -> Option<bool> {
        Some(self.fd().is_some_and(is_readable))
    }
}
