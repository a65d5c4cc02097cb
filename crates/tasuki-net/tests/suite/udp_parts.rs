//! Several UDP datagrams in one frame, for a namespace. A kernel from before Linux 6.2 takes no such frame.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::Arc;

use tasuki_net::switch::Switch;
use tasuki_net::vni::finish::GSO_UDP_L4;
use tasuki_net::vni::offload::{HEADER_LEN, NEEDS_CSUM, Offload};
use tasuki_shm::line::{Claims, Line};
use tasuki_shm::vni::directory::{Directory, Lookup, directory_lines};
use tasuki_tap::device::{self, Before, Queues};
use tasuki_tap::interface::Interface;
use tasuki_tap::namespace::Unnamed;
use tasuki_testing::PATIENCE;
use zerocopy::IntoBytes;

use crate::net::Net;

const SENDER: [u8; 6] = [2, 0, 0, 0xaa, 0xbb, 1];
const READER: [u8; 6] = [2, 0, 0, 0xaa, 0xbb, 0];
/// Bytes in each datagram but the last.
const SIZE: usize = 1000;

/// Returns a frame of datagrams from 192.0.2.1 to port 7777 of 192.0.2.2, as a guest's kernel hands it over: its checksum is
/// that of the pseudo-header, and the one of IPv4 holds.
fn frame(payload: &[u8]) -> Vec<u8> {
    let short = |value: usize| u16::try_from(value).unwrap().to_be_bytes();
    let len = 8 + payload.len();
    let mut ip = [&[0x45, 0][..], &short(20 + len), &[0, 7, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]].concat();
    let sum = |bytes: &[u8]| bytes.chunks_exact(2).map(|it| u32::from(u16::from_be_bytes([it[0], it[1]]))).sum::<u32>();
    let fold = |sum: u32| short(((sum & 0xffff) + (sum >> 16)) as usize);
    let pseudo = fold(sum(&ip[12..]) + 17 + u32::try_from(len).unwrap());
    let check = fold(sum(&ip)).map(|byte| !byte);
    ip[10..12].copy_from_slice(&check);
    let udp = [&[0x1e, 0x62, 0x1e, 0x61][..], &short(len), &pseudo].concat();
    [&READER[..], &SENDER, &[8, 0], &ip, &udp, payload].concat()
}

#[test]
fn datagrams_in_one_frame_reach_a_namespace_whichever_its_kernel() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: network namespaces need root");
        return;
    }
    let place = Unnamed::new().expect("root makes a namespace");
    let (tap, socket) = place
        .within(|| {
            let tap = device::open("nic0", Before::Offload, Queues::One)?;
            let interface = Interface::find("nic0")?;
            interface.set_mac(READER)?;
            interface.add_address("192.0.2.2/24".parse().expect("an address"))?;
            interface.up()?;
            Ok((tap, UdpSocket::bind("192.0.2.2:7777")))
        })
        .expect("root makes a TAP");
    let socket = socket.expect("it has the address");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");

    let lines: Arc<[Line]> = (0..directory_lines(8)).map(|_| Line::default()).collect();
    Directory::new(Arc::clone(&lines)).add(SENDER, 1).unwrap();
    let mut switch = Switch::new(0, Lookup::new(Claims::of(lines)));
    let mut net = Net::of(2);
    let payload: Vec<u8> = (0..3 * SIZE + 100).map(|at| (at * 7).to_le_bytes()[0]).collect();
    let offload = Offload {
        flags: NEEDS_CSUM,
        gso_type: GSO_UDP_L4,
        hdr_len: 42.into(),
        gso_size: u16::try_from(SIZE).unwrap().into(),
        csum_start: 34.into(),
        csum_offset: 6.into(),
    };
    let sent = [offload.as_bytes(), &frame(&payload)].concat();
    net.node(1).draft(0, sent.len()).unwrap().copy_from_slice(&sent);
    net.node(1).post(0, sent.len(), true);
    net.node(1).flush();
    let mut written = None;
    while written.is_none() {
        net.node(0).wake();
        net.node(0).receive(|incoming| {
            let front = switch.admits(&incoming).expect("it is in its own name");
            written = Some(incoming.write_with_header(tap.as_fd(), front));
        });
    }
    let written = written.unwrap().expect("the kernel takes it, or its parts");
    println!("written: {written} frames of {} bytes", HEADER_LEN + sent.len());
    let mut buffer = [0; 2 * SIZE];
    for part in payload.chunks(SIZE) {
        let len = socket.recv(&mut buffer).expect("it comes");
        assert!(buffer[..len] == *part, "{len} bytes of {}", part.len());
    }
}
