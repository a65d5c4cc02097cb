//! The system calls of a packet socket that rustix lacks.
//!
//! # Invariants
//!
//! - **K1** `recvmsg` writes to the buffers of its message header alone, which outlive the call, and no more than their
//!   lengths.
//! - **K2** `struct tpacket_auxdata` and `struct tpacket_stats` consist of integers: any bytes are a value.
#![allow(unsafe_code, reason = "recvmsg with PACKET_AUXDATA, and PACKET_STATISTICS")]

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// What the kernel says of a frame beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Protocol of the tag (0x8100, 0x88a8).
    pub protocol: u16,
    /// Priority and number of the VLAN.
    pub control: u16,
}

/// Receives the next message. Returns its length in bytes, which may be more than there is room for, and the tag that the
/// kernel took out of the frame (packet(7): `PACKET_AUXDATA`). The kernel writes that to `control`. Does not wait.
#[inline]
pub fn receive(socket: BorrowedFd<'_>, room: &mut [u8], control: &mut [u8]) -> Result<(usize, Option<Tag>), Errno> {
    // What is left of another frame's would be taken for this one's.
    control[..size_of::<libc::cmsghdr>()].fill(0);
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: the structure consists of pointers and integers, for which zero is a value (K2).
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = control.len() as _; // another type in each C library
    // SAFETY: all of its buffers outlive the call (K1).
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT | libc::MSG_TRUNC) };
    let Ok(len) = usize::try_from(len) else { return Err(last_errno()) };
    Ok((len, tag_of(control)))
}

/// Returns the tag that a control message holds.
pub fn tag_of(control: &[u8]) -> Option<Tag> {
    const HEAD: usize = size_of::<libc::cmsghdr>();
    let head = control.first_chunk::<HEAD>()?;
    let [level, kind] = [8, 12].map(|at| i32::from_ne_bytes(*head[at..].first_chunk().expect("a head is longer")));
    if (level, kind) != (libc::SOL_PACKET, libc::PACKET_AUXDATA) {
        return None;
    }
    let data = control.get(HEAD..HEAD + size_of::<libc::tpacket_auxdata>())?;
    let status = u32::from_ne_bytes(*data.first_chunk()?);
    let half = |at: usize| Some(u16::from_ne_bytes(*data.get(at..)?.first_chunk()?));
    let (control, protocol) = (half(16)?, half(18)?);
    let has_protocol = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    (status & libc::TP_STATUS_VLAN_VALID != 0)
        .then_some(Tag { protocol: if has_protocol { protocol } else { 0x8100 }, control })
}

/// Returns the number of frames that the kernel dropped since the last call, because the socket had no room.
pub fn dropped(socket: BorrowedFd<'_>) -> Result<u64, Errno> {
    // SAFETY: any bytes are a value (K2).
    let mut stats: libc::tpacket_stats = unsafe { MaybeUninit::zeroed().assume_init() };
    let mut len = u32::try_from(size_of_val(&stats)).expect("few bytes");
    // SAFETY: the kernel writes `len` bytes at most there (K1, K2).
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut stats).cast(),
            &raw mut len,
        )
    };
    if done == 0 { Ok(stats.tp_drops.into()) } else { Err(last_errno()) }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_read_from_the_kernels_words_and_nothing_else_is() {
        let message = |level: i32, kind: i32, status: u32| {
            let head = [&36_u64.to_ne_bytes()[..], &level.to_ne_bytes(), &kind.to_ne_bytes()].concat();
            let body = [&status.to_ne_bytes()[..], &[0; 12], &7_u16.to_ne_bytes(), &0x88a8_u16.to_ne_bytes()].concat();
            [head, body, vec![0; 4]].concat()
        };
        let (valid, with_protocol) = (libc::TP_STATUS_VLAN_VALID, libc::TP_STATUS_VLAN_TPID_VALID);
        let ours = |status| message(libc::SOL_PACKET, libc::PACKET_AUXDATA, status);
        assert_eq!(tag_of(&ours(valid | with_protocol)), Some(Tag { protocol: 0x88a8, control: 7 }));
        assert_eq!(tag_of(&ours(valid)), Some(Tag { protocol: 0x8100, control: 7 }));
        assert_eq!(tag_of(&ours(with_protocol)), None);
        assert_eq!(tag_of(&message(1, libc::PACKET_AUXDATA, valid)), None);
        for len in 0..36 {
            assert_eq!(tag_of(&ours(valid)[..len]), None, "{len}");
        }
    }
}
