//! Captures at a port: the record of each frame, and that no port waits for the capture's reader.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use tasuki_net::capture::{CAPTURES_MAX, Capture, Captures, Direction, Terms};
use tasuki_net::nic::NicMemory;
use tasuki_net::nic::bus::Iova;
use tasuki_net::port::Frame;
use tasuki_net::vni::PIECE_MAX;
use tasuki_net::vni::offload::HEADER_LEN;
use tasuki_shm::arena::{Arena, Geometry};
use tasuki_shm::region::{Pages, Region};
use tasuki_shm::sync::{AtomicU64, Relaxed};

use crate::net::{Net, frame, received};
use crate::wait::readable;
use tasuki_testing::PATIENCE;

/// The reader of a capture.
struct Onlooker {
    batches: OwnedFd,
    missed: Region,
}

/// A captured frame: port, direction, time, length of the frame, captured bytes.
type Seen = (u32, u32, u64, u32, Vec<u8>);

impl Onlooker {
    fn begin(number: u32, interface: u32, snap: u32) -> (Self, Capture) {
        let (onlooker, terms) = Self::terms(number, interface, snap);
        let capture = Capture::begin(terms).unwrap();
        assert_eq!(onlooker.message().unwrap(), interface.to_le_bytes(), "it says that it has begun");
        (onlooker, capture)
    }

    fn terms(number: u32, interface: u32, snap: u32) -> (Self, Terms) {
        let (batches, socket) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let missed = Region::create("missed", 4096, Pages::Small).unwrap();
        let memory = missed.as_fd().try_clone_to_owned().unwrap();
        (Onlooker { batches, missed }, Terms { number, socket, missed: memory, interface, snap })
    }

    fn missed(&self, interface: usize) -> u64 {
        self.missed.span::<AtomicU64>(8 * interface, 1).unwrap()[0].load(Relaxed)
    }

    fn message(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; 1 << 20];
        let (len, _) = rustix::net::recv(&self.batches, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
        bytes.truncate(len);
        // An empty message means that no writer is left.
        (len > 0).then_some(bytes)
    }

    /// Parses all records, as the document of the format defines them.
    fn seen(&self) -> Vec<Seen> {
        let mut seen = Vec::new();
        while let Some(batch) = self.message() {
            let mut rest = &batch[..];
            while !rest.is_empty() {
                let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
                let (whole, kept) = (word(4) as usize, word(20) as usize);
                let behind = 28 + kept.next_multiple_of(4);
                assert_eq!((word(0), whole), (6, behind + 16), "an enhanced packet block");
                assert!(rest[28 + kept..behind].iter().all(|byte| *byte == 0), "filled up with zeroes");
                assert_eq!((word(behind), word(behind + 8), word(whole - 4)), (0x0004_0002, 0, word(4)));
                let at = u64::from(word(12)) << 32 | u64::from(word(16));
                seen.push((word(8), word(behind + 4), at, word(24), rest[28..28 + kept].to_vec()));
                rest = &rest[whole..];
            }
        }
        seen
    }
}

fn now_ns() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

/// Makes frames of these lengths, as a card's driver holds them.
fn frames(arena: &Arena, lens: &[usize]) -> Vec<Frame> {
    let of = |(number, len): (u32, &usize)| {
        let mut slot = arena.take().unwrap();
        slot.bytes_mut()[..*len].copy_from_slice(&frame(number, *len));
        Frame { slot, len: u16::try_from(*len).unwrap() }
    };
    (0..).zip(lens).map(of).collect()
}

fn arena() -> Arena {
    let memory = NicMemory::create(Geometry { slot_len: 4096, count: 64 }, 4096, Iova(0)).unwrap();
    memory.arena().clone()
}

#[test]
fn frames_of_a_nic_are_said_with_time_direction_and_length() {
    let (onlooker, capture) = Onlooker::begin(7, 3, 100);
    let mut captures = Captures::default();
    assert!(captures.add(capture));
    let arena = arena();
    let frames = frames(&arena, &[60, 61, 62, 63, 100, 101, 1514]);
    let began = now_ns();
    captures.frames(Direction::Inbound, &frames[..4]);
    captures.frames(Direction::Outbound, &frames[4..]);
    captures.frames(Direction::Outbound, &[]);
    let seen = onlooker.seen();
    assert_eq!(seen.len(), frames.len());
    for (index, ((port, way, at, len, bytes), frame)) in seen.iter().zip(&frames).enumerate() {
        assert_eq!((*port, *way, *len), (3, if index < 4 { 1 } else { 2 }, u32::from(frame.len)));
        assert_eq!(bytes[..], frame.bytes()[..frame.bytes().len().min(100)]);
        assert!((began..=now_ns()).contains(at));
    }
    assert_eq!(onlooker.missed(3), 0);
}

#[test]
fn frames_of_a_vni_are_said_without_what_travels_before_them() {
    let mut net = Net::of(3);
    let onlookers = [0, 1].map(|node| {
        let (onlooker, capture) = Onlooker::begin(1, 0, u32::MAX);
        net.node(node).captures().get_or_insert_default().add(capture);
        onlooker
    });
    // Every way of sending a frame.
    let sent: Vec<Vec<u8>> =
        (0..5).zip([60, 61, 1514, 9000, PIECE_MAX - HEADER_LEN]).map(|(n, len)| frame(n, len)).collect();
    let with_header = |room: &mut [u8], frame: &[u8]| room[HEADER_LEN..HEADER_LEN + frame.len()].copy_from_slice(frame);
    net.node(0).send(1, &sent[0]).unwrap();
    with_header(net.node(0).draft(1, HEADER_LEN + sent[1].len()).unwrap(), &sent[1]);
    net.node(0).post(1, HEADER_LEN + sent[1].len(), true);
    with_header(net.node(0).stage().unwrap(), &sent[2]);
    net.node(0).post_staged(1, HEADER_LEN + sent[2].len()).unwrap();
    with_header(net.node(0).stage().unwrap(), &sent[3]);
    assert_eq!(net.node(0).post_staged_to_all([1, 2], HEADER_LEN + sent[3].len()), Ok(2));
    assert_eq!(net.node(0).send_to_all([1, 2], sent[4].len(), false, |room| room.copy_from_slice(&sent[4])), Ok(2));
    net.node(0).flush();
    let came: Vec<Vec<u8>> = received(net.node(1)).into_iter().map(|(_, bytes)| bytes).collect();
    assert_eq!(came, sent);
    net.node(1).flush();
    for (onlooker, way) in onlookers.iter().zip([2, 1]) {
        let seen = onlooker.seen();
        let frames: Vec<&Vec<u8>> = seen.iter().map(|(.., bytes)| bytes).collect();
        assert_eq!(frames, sent.iter().collect::<Vec<_>>());
        assert!(seen.iter().all(|(port, its, _, len, bytes)| (*port, *its, *len as usize) == (0, way, bytes.len())));
    }
}

#[test]
fn what_nobody_reads_is_counted_and_nobody_waits() {
    let (onlooker, capture) = Onlooker::begin(1, 5, 2048);
    let mut captures = Captures::default();
    captures.add(capture);
    let arena = arena();
    let frames = frames(&arena, &[1514; 32]);
    let mut shown = 0;
    while onlooker.missed(5) == 0 {
        captures.frames(Direction::Inbound, &frames);
        shown += 32;
    }
    let before = onlooker.seen().len() as u64;
    assert_eq!(before + onlooker.missed(5), shown, "each is seen or missed");
    captures.frames(Direction::Inbound, &frames);
    assert_eq!(onlooker.seen().len(), 32, "it goes on when there is room");
}

#[test]
fn who_is_gone_is_forgotten_and_others_see_on() {
    let mut captures = Captures::default();
    let (gone, terms) = Onlooker::terms(1, 0, 2048);
    let writer = terms.socket.try_clone().unwrap();
    captures.add(Capture::begin(terms).unwrap());
    let (stays, capture) = Onlooker::begin(2, 0, 2048);
    captures.add(capture);
    drop(gone);
    // For a moment a process that another test starts may have its socket, too.
    assert!(readable(&writer, PATIENCE), "no reader is left");
    let arena = arena();
    let frames = frames(&arena, &[60; 3]);
    (0..3).for_each(|_| captures.frames(Direction::Inbound, &frames));
    assert_eq!(stays.seen().len(), 9);
    assert!(captures.remove(3), "the other stays");
    assert!(!captures.remove(2), "and the one that nobody reads was none any more");
}

#[test]
fn there_are_so_many_and_a_number_stands_for_one() {
    let mut captures = Captures::default();
    let begun: Vec<_> = (0..).take(CAPTURES_MAX).map(|number| Onlooker::begin(number, 0, 64)).collect();
    let (onlookers, begun): (Vec<_>, Vec<_>) = begun.into_iter().unzip();
    assert!(begun.into_iter().all(|capture| captures.add(capture)));
    let (_one, one_more) = Onlooker::begin(99, 0, 64);
    assert!(!captures.add(one_more));
    let (again, same) = Onlooker::begin(3, 0, 64);
    assert!(captures.add(same), "in the place of the other");
    let arena = arena();
    captures.frames(Direction::Inbound, &frames(&arena, &[60]));
    assert_eq!((again.seen().len(), onlookers[3].seen().len(), onlookers[4].seen().len()), (1, 0, 1));
}

#[test]
fn a_port_for_which_nothing_can_be_counted_is_refused() {
    let (_onlooker, terms) = Onlooker::terms(1, 512, 64);
    assert!(Capture::begin(terms).is_err());
    let (_onlooker, terms) = Onlooker::terms(1, u32::MAX, 64);
    assert!(Capture::begin(terms).is_err());
}
