//! A node whose programs are behind a Linux interface: a packet socket (packet(7)), whose frames carry the offload work
//! that is still undone, as those of a TAP do.
//!
//! The kernel takes the outermost VLAN tag out of a frame before a packet socket sees it. It is put back here.
//!
//! A GSO packet inside a tunnel comes as if it were none inside one, and a kernel that is given it so drops it. It is cut
//! here. A worker that is killed meanwhile loses what it had cut of it.

mod socket;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use zerocopy::{FromBytes, IntoBytes};

use super::notes::READS;
use super::{Dropped, Egress, Endpoint, Given, Recovery, is_readable};
use crate::switch::CheckedPrefix;
use crate::vni::Incoming;
use crate::vni::finish::{GSO_NONE, ask_for_checksums, finish, finish_sctp, is_in_tunnel};
use crate::vni::ledger::point;
use crate::vni::offload::{HEADER_LEN, NEEDS_CSUM, Offload};
use socket::Tag;

/// Length in bytes of a VLAN tag, which stands behind the two addresses.
const TAG_LEN: usize = 4;
const TAG_AT: usize = HEADER_LEN + 12;

/// Opens the interface behind a packet socket.
pub(super) fn open(socket: OwnedFd, _: &str, _: &str) -> Result<Box<dyn Endpoint>, String> {
    let is_raw = rustix::net::sockopt::socket_type(&socket) == Ok(SocketType::RAW);
    if !is_raw || rustix::net::sockopt::socket_domain(&socket) != Ok(AddressFamily::PACKET) {
        return Err("what the daemon sent as the node's packet socket is none; rebuild the older of the two".to_owned());
    }
    Ok(Box::new(Packet::new(socket)))
}

/// The interface behind a packet socket.
#[derive(Debug)]
pub struct Packet {
    socket: OwnedFd,
    /// The interface is gone.
    gone: bool,
    /// What is left of a packet that was cut.
    cut: VecDeque<Vec<u8>>,
}

impl Packet {
    /// Opens the interface behind `socket`: a raw packet socket that is bound to it, with offload headers
    /// (`PACKET_VNET_HDR`) and `PACKET_AUXDATA`.
    pub fn new(socket: OwnedFd) -> Self {
        Packet { socket, gone: false, cut: VecDeque::new() }
    }

    /// Cuts the staged packet of `len` bytes, with its offload header, if it is inside a tunnel. Returns whether it did.
    fn cut(&mut self, egress: &mut Egress<'_>, len: usize) -> bool {
        let staged = &egress.staged()[..len];
        let Ok((offload, frame)) = Offload::read_from_prefix(staged) else { return false };
        if offload.gso_type == GSO_NONE || !is_in_tunnel(&offload, frame) {
            return false;
        }
        let mut frame = frame.to_vec();
        egress.forget_staged();
        let each = |front: &[u8], back: &[u8]| self.cut.push_back([front, back].concat());
        if finish(&offload, &mut frame, each).is_err() {
            egress.dropped.malformed += 1;
        }
        true
    }

    /// Sends the staged frame of `len` bytes, with its offload header, out of which the kernel took this tag. Returns
    /// false if it must wait.
    fn send_read(&mut self, egress: &mut Egress<'_>, len: usize, tag: Option<Tag>) -> bool {
        point("packet.read");
        let len = match tag {
            None => len,
            Some(tag) => {
                // A frame that is moved in part is no frame.
                egress.forget_staged();
                let len = put_back(tag, egress.staged(), len);
                egress.remember_staged();
                point("packet.tagged");
                len
            }
        };
        complete(&mut egress.staged()[..len]);
        self.cut(egress, len) || egress.send_staged(len)
    }
}

impl Endpoint for Packet {
    fn recovery(&self) -> Recovery {
        Recovery::Notes
    }

    fn give(&mut self, incoming: &Incoming<'_>, front: &CheckedPrefix, dropped: &mut Dropped) -> Given {
        // As for a TAP: a frame that its sender takes back while the kernel copies it cannot be recalled.
        if !incoming.is_whole() {
            dropped.too_late += 1;
            return Given::Taken(0);
        }
        match incoming.write_with_header(self.socket.as_fd(), front) {
            // Several were cut from a copy.
            Ok(count) if count > 1 || incoming.is_whole() => return Given::Taken(count),
            Ok(_) => dropped.too_late += 1,
            Err(error) => match Errno::from_io_error(&error) {
                // Longer than the interface's MTU, and no segment.
                Some(Errno::MSGSIZE) => dropped.too_long += 1,
                // The card sends more slowly, and the kernel keeps no more frames for it.
                Some(Errno::AGAIN | Errno::NOBUFS) => dropped.no_buffer += 1,
                errno => {
                    dropped.refused += 1;
                    // The kernel unbinds the socket when its interface goes.
                    self.gone |= errno == Some(Errno::NXIO);
                }
            },
        }
        Given::Taken(0)
    }

    fn take(&mut self, egress: &mut Egress<'_>) -> usize {
        for count in 0..READS {
            if !self.send_rest(egress) {
                return count;
            }
            let Some((room, beside)) = egress.stage() else { return count };
            let most = room.len() - TAG_LEN;
            let (len, tag) = match socket::receive(self.socket.as_fd(), &mut room[..most], beside) {
                Ok((len, _)) if len < HEADER_LEN + 14 => continue,
                Ok((len, _)) if len > most => {
                    egress.drop_too_long();
                    continue;
                }
                Ok(read) => read,
                // A message about the interface: it went down.
                Err(Errno::NETDOWN) => continue,
                Err(Errno::AGAIN | Errno::INTR) => return count,
                // A frame that the kernel could not describe is gone.
                Err(_) => {
                    egress.drop_too_long();
                    return count;
                }
            };
            if !self.send_read(egress, len, tag) {
                return count;
            }
        }
        READS
    }

    fn send_rest(&mut self, egress: &mut Egress<'_>) -> bool {
        while let Some(frame) = self.cut.front() {
            if !egress.send_bytes(frame) {
                return false;
            }
            self.cut.pop_front();
        }
        true
    }

    fn mend(&self, frame: &mut Vec<u8>, beside: &[u8]) {
        if let Some(tag) = socket::tag_of(beside) {
            let len = frame.len();
            frame.resize(len + TAG_LEN, 0);
            put_back(tag, frame, len);
        }
        complete(frame);
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.gone).then(|| self.socket.as_fd())
    }

    fn has_frames(&self) -> Option<bool> {
        Some(!self.cut.is_empty() || self.fd().is_some_and(is_readable))
    }

    fn tick(&mut self, _: Instant, dropped: &mut Dropped) -> bool {
        // The kernel forgets the number when it is asked for it; a successor asks for what came since.
        dropped.by_socket += socket::dropped(self.socket.as_fd()).unwrap_or(0);
        false
    }
}

/// Completes the header of a packet, or the packet where a header cannot say what is left to do.
fn complete(packet: &mut [u8]) {
    ask_for_checksums(packet);
    finish_sctp(packet);
}

/// Puts a tag back into the frame of `len` bytes, with its offload header. Returns its new length.
fn put_back(tag: Tag, room: &mut [u8], len: usize) -> usize {
    room.copy_within(TAG_AT..len, TAG_AT + TAG_LEN);
    room[TAG_AT..TAG_AT + 2].copy_from_slice(&tag.protocol.to_be_bytes());
    room[TAG_AT + 2..TAG_AT + TAG_LEN].copy_from_slice(&tag.control.to_be_bytes());
    if let Ok((offload, _)) = Offload::read_from_prefix(room) {
        let moved = u16::try_from(TAG_LEN).expect("4");
        let hdr_len = offload.hdr_len.get();
        let csum_start = offload.csum_start.get();
        let offload = Offload {
            hdr_len: if hdr_len > 0 { hdr_len.saturating_add(moved) } else { 0 }.into(),
            csum_start: if offload.flags & NEEDS_CSUM != 0 { csum_start.saturating_add(moved) } else { csum_start }
                .into(),
            ..offload
        };
        room[..HEADER_LEN].copy_from_slice(offload.as_bytes());
    }
    len + TAG_LEN
}

#[cfg(test)]
mod tests {
    use rustix::net::SocketFlags;

    use super::*;
    use crate::endpoint::Bridge;
    use crate::vni::fixture::{Nodes, mac, received};
    use crate::vni::mortal::lives_for;

    /// Returns what the kernel writes beside a frame of VLAN 9.
    fn beside() -> Vec<u8> {
        let status = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
        let head = [&36_u64.to_ne_bytes()[..], &libc::SOL_PACKET.to_ne_bytes(), &libc::PACKET_AUXDATA.to_ne_bytes()];
        let body = [&status.to_ne_bytes()[..], &[0; 12], &9_u16.to_ne_bytes(), &0x8100_u16.to_ne_bytes()].concat();
        let mut beside = [head.concat(), body].concat();
        beside.resize(64, 0);
        beside
    }

    /// An endpoint whose socket is none of packets, and to which the kernel says of each frame that it is of VLAN 9.
    #[derive(Debug)]
    struct Tagged(Packet);

    impl Endpoint for Tagged {
        fn recovery(&self) -> Recovery {
            self.0.recovery()
        }

        fn give(&mut self, incoming: &Incoming<'_>, front: &CheckedPrefix, dropped: &mut Dropped) -> Given {
            self.0.give(incoming, front, dropped)
        }

        fn take(&mut self, egress: &mut Egress<'_>) -> usize {
            for count in 0..READS {
                let Some((room, its)) = egress.stage() else { return count };
                let Ok(len) = rustix::io::read(&self.0.socket, room) else { return count };
                its.copy_from_slice(&beside());
                let tag = socket::tag_of(its);
                if !self.0.send_read(egress, len, tag) {
                    return count;
                }
            }
            READS
        }

        fn mend(&self, frame: &mut Vec<u8>, beside: &[u8]) {
            self.0.mend(frame, beside);
        }

        fn fd(&self) -> Option<BorrowedFd<'_>> {
            self.0.fd()
        }

        fn has_frames(&self) -> Option<bool> {
            self.0.has_frames()
        }
    }

    #[test]
    fn no_tagged_frame_is_lost_wherever_a_worker_is_killed() {
        const US: u16 = 0;
        const OTHER: u16 = 1;
        let frame = |number: u8| {
            let ip = [&[8, 0, 0x45, 0, 0, 30][..], &[number; 26]].concat();
            [[&mac(OTHER)[..], &mac(US)].concat(), ip]
        };
        for places in 0.. {
            let nodes = Nodes::new(2);
            let mut other = nodes.end(OTHER);
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (socket, programs) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            let worker = || {
                let packet = Packet::new(socket.try_clone().unwrap());
                Bridge::new(Box::new(Tagged(packet)), nodes.end(US), nodes.switch(US))
            };
            for number in 0..3 {
                let message = [&[0; HEADER_LEN][..], &frame(number).concat()].concat();
                rustix::io::write(&programs, &message).unwrap();
            }
            let mut first = worker();
            let was_killed = lives_for(places, || _ = first.turn());
            drop(first);
            let mut came = received(&mut other);
            let mut second = worker();
            while second.turn() > 0 {}
            came.extend(received(&mut other));
            came.sort_unstable();
            came.dedup();
            let expected = (0..3).map(|number| frame(number).join(&[0x81, 0, 0, 9][..]));
            assert_eq!(came, expected.collect::<Vec<_>>(), "killed at place {places}");
            if !was_killed {
                assert!(places > 9, "a frame is read, has its tag again, and is staged");
                break;
            }
        }
    }

    #[test]
    fn a_tag_stands_behind_the_addresses_again_and_the_header_counts_its_bytes() {
        let offload = Offload { flags: NEEDS_CSUM, hdr_len: 54.into(), csum_start: 34.into(), ..Offload::default() };
        let frame: Vec<u8> = (0..60).collect();
        let mut room = [offload.as_bytes(), &frame, &[0; 4]].concat();
        let len = put_back(Tag { protocol: 0x8100, control: 0x2005 }, &mut room, HEADER_LEN + 60);
        assert_eq!(len, room.len());
        let (back, _) = Offload::read_from_prefix(&room).unwrap();
        assert_eq!((back.hdr_len.get(), back.csum_start.get()), (58, 38));
        let expected = [&frame[..12], &[0x81, 0, 0x20, 5], &frame[12..]].concat();
        assert_eq!(&room[HEADER_LEN..], expected);
    }

    #[test]
    fn a_successor_puts_back_the_tag_of_a_frame_that_was_being_read() {
        let packet = Packet::new(std::fs::File::open("/dev/null").unwrap().into());
        let frame: Vec<u8> = [vec![0; HEADER_LEN], (0..60).collect()].concat();
        let mut tagged = frame.clone();
        packet.mend(&mut tagged, &beside());
        assert_eq!(tagged, [&frame[..TAG_AT], &[0x81, 0, 0, 9], &frame[TAG_AT..]].concat());
        let mut untagged = frame.clone();
        packet.mend(&mut untagged, &[0; 64]);
        assert_eq!(untagged, frame);
    }
}
