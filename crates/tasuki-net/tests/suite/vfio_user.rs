//! A device over vfio-user: our client with our server, then our client with hostile servers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use tasuki_net::nic::PciId;
use tasuki_net::nic::bus::vfio_user::{Connection, TIMEOUT};
use tasuki_net::nic::bus::{Bus, BusError, Capability, Header, Iova, Part, Registers, VfioUser};
use tasuki_shm::region::{Pages, Region};

use crate::cabinet::{ADDRESS, DOORBELL, FAULTS, Served, rings, rings_now};

fn connect(served: &Served) -> VfioUser {
    VfioUser::connect(&served.path(), TIMEOUT).unwrap()
}

fn region(pages: usize) -> Region {
    Region::create("test", pages * 4096, Pages::Small).unwrap()
}

fn word(region: &Region, offset: usize) -> u64 {
    region.span::<AtomicU64>(offset, 1).unwrap()[0].load(Ordering::Acquire)
}

/// Makes the device add one to the word at `at`, and ring vector `vector`.
fn doorbell(registers: &impl Registers, at: Iova, vector: u32) {
    registers.write32(ADDRESS, u32::try_from(at.0 & 0xffff_ffff).unwrap());
    registers.write32(ADDRESS + 4, u32::try_from(at.0 >> 32).unwrap());
    registers.write32(DOORBELL, vector);
}

#[test]
fn the_configuration_space_is_read_and_written() {
    let served = Served::new();
    let mut bus = connect(&served);
    let header = Header::read(&mut bus).unwrap();
    assert_eq!(header.id, PciId { vendor: 0x1234, device: 0x5678 });
    assert_eq!(header.capabilities, [Capability { id: Capability::MSI_X, offset: 0x40 }]);
    bus.write_config(0x3c, 0x1122_3344).unwrap();
    assert_eq!(bus.read_config(0x3c).unwrap(), 0x1122_3344);
    for outside in [0x100, 0x3e, 0xfffc] {
        assert!(matches!(bus.read_config(outside), Err(BusError::Refused { .. })), "{outside:#x}");
    }
    drop(bus);
    let (cabinet, _) = served.end();
    assert_eq!(cabinet.config[0x3c..0x40], [0x44, 0x33, 0x22, 0x11], "little-endian");
}

#[test]
fn registers_by_message_have_their_sizes_and_their_order() {
    let served = Served::new();
    let mut bus = connect(&served);
    let registers = bus.registers(0).unwrap();
    assert_eq!(bus.read_config(4).unwrap() & 2, 2, "memory decoding is on");
    assert!(!registers.is_mapped(0, 4));
    for value in 0..1000 {
        registers.write32(0x100, value);
    }
    assert_eq!(registers.read32(0x100), 999);
    registers.write32(0x100, 0x1122_3344);
    registers.write16(0x102, 0x5566);
    registers.write8(0x101, 0x77);
    assert_eq!(registers.read32(0x100), 0x5566_7744);
    assert_eq!((registers.read16(0x102), registers.read8(0x100)), (0x5566, 0x44));
    for outside in [0x4000, 0x3ffe, 0x102, u32::MAX, u32::MAX - 3] {
        registers.write32(outside, 0);
        assert_eq!(registers.read32(outside), u32::MAX, "{outside:#x}");
    }
    assert_eq!(registers.read32(0x100), 0x5566_7744, "what is no register was not written");
}

#[test]
fn a_bar_is_mapped_as_far_as_the_server_lets_us() {
    let served = Served::new();
    let mut bus = connect(&served);
    let whole = bus.registers(1).unwrap();
    assert!(whole.is_mapped(0, 4) && whole.is_mapped(8188, 4) && !whole.is_mapped(8188, 8));
    whole.write32(4096, 0xcafe);
    assert_eq!(whole.read32(4096), 0xcafe);
    let parts = bus.registers(2).unwrap();
    assert!(!parts.is_mapped(4092, 4) && parts.is_mapped(4096, 4) && !parts.is_mapped(8192, 4));
    for offset in [4092, 4096, 8188, 8192] {
        parts.write32(offset, offset);
        assert_eq!(parts.read32(offset), offset);
    }
    drop((bus, whole, parts));
    let (cabinet, _) = served.end();
    assert_eq!(word(&cabinet.bar1, 4096), 0xcafe);
    assert_eq!((word(&cabinet.bar2, 4088), word(&cabinet.bar2, 4096), word(&cabinet.bar2, 8192)), (0, 4096, 0));
    assert_eq!(cabinet.bar2_by_message[8192..8196], [0, 0x20, 0, 0]);
}

#[test]
fn bars_that_are_not_there_are_errors() {
    let served = Served::new();
    let mut bus = connect(&served);
    for index in [3, 5, 6, 7, 255] {
        assert!(matches!(bus.registers(index), Err(BusError::NoBar { index: its }) if its == index));
    }
}

#[test]
fn the_device_reaches_what_it_was_given_and_rings() {
    let served = Served::new();
    let mut bus = connect(&served);
    let registers = bus.registers(0).unwrap();
    let (first, second) = (region(4), region(1));
    bus.map_dma(&first, Iova(0x10_0000)).unwrap();
    bus.map_dma(&second, Iova(0x1_0000_0000)).unwrap();
    // More vectors than fit into one message.
    let vectors = bus.interrupts(20).unwrap();
    for vector in &vectors {
        assert_eq!(rustix::io::read(vector, &mut [0; 8]), Err(rustix::io::Errno::AGAIN), "nobody waits for one");
    }
    doorbell(&registers, Iova(0x10_2008), 0);
    assert_eq!(rings(&vectors[0]), 1);
    assert_eq!(word(&first, 0x2008), 1);
    doorbell(&registers, Iova(0x1_0000_0ff8), 19);
    assert_eq!(rings(&vectors[19]), 1);
    assert_eq!(word(&second, 0xff8), 1);
    let again = bus.interrupts(2).unwrap();
    doorbell(&registers, Iova(0x10_2008), 1);
    assert_eq!(rings(&again[1]), 1, "they stay the same");

    bus.unmap_dma(Iova(0x10_0000), first.len()).unwrap();
    doorbell(&registers, Iova(0x10_2008), 0);
    assert_eq!(registers.read32(FAULTS), 1);
    assert_eq!((word(&first, 0x2008), rings_now(&vectors[0])), (2, 0));
}

#[test]
fn memory_that_cannot_be_given_is_an_error_that_says_why() {
    let served = Served::new();
    let mut bus = connect(&served);
    let memory = region(2);
    bus.map_dma(&memory, Iova(0x10_0000)).unwrap();
    let why = |outcome: Result<(), BusError>| match outcome {
        Err(BusError::Dma { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    let twice = why(bus.map_dma(&memory, Iova(0x10_1000)));
    assert_eq!(twice, "the device has memory there already; unmap it, or choose another address");
    assert!(why(bus.map_dma(&memory, Iova(0x800))).contains("whole page"));
    assert!(why(bus.map_dma(&memory, Iova(u64::MAX - 4095))).contains("beyond the last"));
    assert!(why(bus.unmap_dma(Iova(0x10_0000), 4096)).contains("refused to let go"), "half of it");
    bus.unmap_dma(Iova(0x10_0000), 8192).unwrap();
    bus.map_dma(&memory, Iova(0x10_1000)).unwrap();
}

#[test]
fn of_memory_that_is_given_together_each_part_has_its_answer() {
    let served = Served::new();
    let mut bus = connect(&served);
    let memory = region(1);
    let [low, high] = [Iova(0x10_0000), Iova(0x20_0000)];
    let parts = [low, low, high].map(|at| Part::all(&memory, at));
    let [first, second, third] = bus.map_each(parts).unwrap();
    assert!(first.is_ok() && third.is_ok(), "{first:?}, {third:?}");
    assert!(second.unwrap_err().to_string().contains("has memory there already"));
    bus.unmap_dma(low, 4096).unwrap();
    bus.unmap_dma(high, 4096).unwrap();
    // If no bus could map one of the parts, none is requested.
    assert!(bus.map_each([low, Iova(1)].map(|at| Part::all(&memory, at))).is_err());
    bus.map_dma(&memory, low).unwrap();
}

#[test]
fn more_interrupts_than_there_are_is_an_error() {
    let served = Served::new();
    let mut bus = connect(&served);
    assert!(matches!(bus.interrupts(21), Err(BusError::FewInterrupts { have: 20, need: 21 })));
}

#[test]
fn a_reset_leaves_decoding_and_interrupts_on() {
    let served = Served::new();
    let mut bus = connect(&served);
    let registers = bus.registers(0).unwrap();
    let memory = region(1);
    bus.map_dma(&memory, Iova(0)).unwrap();
    let vectors = bus.interrupts(1).unwrap();
    registers.write32(0x100, 7);
    bus.reset().unwrap();
    assert_eq!(registers.read32(0x100), 0);
    assert_eq!(bus.read_config(4).unwrap() & 2, 2);
    doorbell(&registers, Iova(8), 0);
    assert_eq!(rings(&vectors[0]), 1);
    assert_eq!(word(&memory, 8), 1, "its memory is still there");
    drop(bus);
    drop(registers);
    assert_eq!(served.end().0.resets, 1);
}

#[test]
fn the_next_client_finds_the_device_as_it_was_without_memory_or_interrupts() {
    let served = Served::new();
    let mut bus = connect(&served);
    let registers = bus.registers(0).unwrap();
    let memory = region(1);
    bus.map_dma(&memory, Iova(0)).unwrap();
    bus.interrupts(1).unwrap();
    registers.write32(0x100, 7);
    drop((bus, registers));

    let mut bus = connect(&served);
    let registers = bus.registers(0).unwrap();
    assert_eq!(registers.read32(0x100), 7);
    doorbell(&registers, Iova(8), 0);
    assert_eq!((registers.read32(FAULTS), word(&memory, 8)), (1, 0));
    drop((bus, registers));
    let path = served.path();
    let (cabinet, _) = served.end();
    assert!(cabinet.eventfds.iter().all(Option::is_none));
    assert!(!path.exists(), "the socket's name is gone with the server");
}

#[test]
fn a_successor_goes_on_with_the_connection() {
    let served = Served::new();
    let mut bus = connect(&served);
    let stale = bus.registers(0).unwrap();
    let memory = region(1);
    bus.map_dma(&memory, Iova(0)).unwrap();
    let vectors = bus.interrupts(1).unwrap();
    let connection: Connection = bus.into_connection().unwrap();
    assert_eq!((connection.fds_max, connection.transfer_max), (16, 65536));
    assert_eq!(stale.read32(0x100), u32::MAX, "the giver is out");

    let mut bus = VfioUser::from_connection(connection, TIMEOUT).unwrap();
    let registers = bus.registers(0).unwrap();
    doorbell(&registers, Iova(8), 0);
    assert_eq!(rings(&vectors[0]), 1, "interrupts arrive where they did");
    assert_eq!(word(&memory, 8), 1, "and its memory is still mapped");
}

#[test]
fn a_server_that_ends_leaves_ones_behind() {
    let served = Served::new();
    let mut bus = connect(&served);
    let registers = bus.registers(0).unwrap();
    let mapped = bus.registers(1).unwrap();
    mapped.write32(0, 5);
    served.end();
    registers.write32(0x100, 7);
    assert_eq!((registers.read32(0x100), registers.read16(2), registers.read8(1)), (u32::MAX, u16::MAX, u8::MAX));
    assert_eq!(mapped.read32(0), 5, "a mapping outlives its server");
    let gone = |error| matches!(error, BusError::Gone { .. });
    assert!(gone(bus.read_config(0).unwrap_err()));
    assert!(gone(bus.map_dma(&region(1), Iova(0)).unwrap_err()));
    assert!(gone(bus.interrupts(1).unwrap_err()));
    assert!(gone(bus.reset().unwrap_err()));
    assert!(gone(bus.into_connection().unwrap_err()));
}

#[test]
fn nobody_at_the_path_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let refused = VfioUser::connect(&folder.path().join("s"), TIMEOUT).unwrap_err();
    assert!(refused.to_string().starts_with("connecting to the device's server was refused: "), "{refused}");
}

/// A server with prepared output, whatever the client asks. The output is in the socket before the client asks, so
/// that a test needs no second thread; afterwards the server's end is closed for writing.
struct Liar {
    socket: OwnedFd,
    client: Option<OwnedFd>,
}

/// Builds a message: identity, command, flags, error, body.
fn message(id: u16, command: u16, flags: u32, errno: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(16 + body.len()).unwrap();
    sized(id, command, size, flags, errno, body)
}

fn sized(id: u16, command: u16, size: u32, flags: u32, errno: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = [id.to_ne_bytes(), command.to_ne_bytes()].concat();
    [size, flags, errno].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
    bytes.extend(body);
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

const VERSION: &[u8] = b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":8}}\0";

impl Liar {
    /// Makes a server without output.
    fn mute() -> Self {
        let (socket, client) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        Liar { socket, client: Some(client) }
    }

    /// Makes a server with honest replies about the device and its configuration space: up to message 3.
    fn honest() -> Self {
        let liar = Liar::mute();
        liar.say(&message(1, 1, 1, 0, VERSION));
        liar.say(&message(2, 4, 1, 0, &words(&[16, 3, 9, 5])));
        liar.say(&message(3, 5, 1, 0, &words(&[32, 3, 7, 0, 256, 0, 0, 0])));
        liar
    }

    fn say(&self, bytes: &[u8]) {
        self.say_with(bytes, &[]);
    }

    fn say_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent =
            rustix::net::sendmsg(&self.socket, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    fn meet(&mut self) -> Result<VfioUser, BusError> {
        rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write).unwrap();
        VfioUser::meet(self.client.take().unwrap(), TIMEOUT)
    }

    /// Returns the bytes that the client sends until the connection is closed.
    fn hear_to_the_end(&self) -> Vec<u8> {
        let mut said = vec![0; 4096];
        let (mut len, mut part) = (0, 1);
        while part > 0 {
            (part, _) = rustix::net::recv(&self.socket, &mut said[len..], RecvFlags::empty()).unwrap();
            len += part;
        }
        said.truncate(len);
        said
    }

    /// Returns the client's requests so far: command, body, descriptors.
    fn asked(&self) -> Vec<(u16, Vec<u8>, Vec<OwnedFd>)> {
        let receive = |len: usize| {
            let mut bytes = vec![0; len];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [std::io::IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let came = rustix::net::recvmsg(&self.socket, &mut slices, &mut control, flags).ok()?;
            assert_eq!(came.bytes, len, "messages are sent whole");
            let rights = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let fds: Vec<OwnedFd> = rights.flatten().collect();
            Some((bytes, fds))
        };
        let next = || {
            // Descriptors arrive with the first byte.
            let (header, fds) = receive(16)?;
            let size = u32::from_ne_bytes(header[4..8].try_into().unwrap()) as usize;
            let body = if size > 16 { receive(size - 16)?.0 } else { Vec::new() };
            Some((u16::from_ne_bytes([header[2], header[3]]), body, fds))
        };
        std::iter::from_fn(next).collect()
    }

    /// Returns the client's error about this server when its fourth request is `ask`.
    fn verdict<T>(&mut self, ask: impl FnOnce(&mut VfioUser) -> Result<T, BusError>) -> String {
        let mut bus = self.meet().unwrap();
        let verdict = ask(&mut bus).map(|_| ()).unwrap_err().to_string();
        let next = bus.read_config(0).unwrap_err().to_string();
        let same = verdict.starts_with("the device is gone") && next.starts_with("the device is gone");
        assert!(same || next == verdict || !verdict.starts_with("what serves"), "{next} after {verdict}");
        verdict
    }
}

const BROKE: &str = "what serves the device broke its protocol: ";

/// Replies to the request for the configuration space's first word (message 4); returns the client's error.
fn verdict_on_read(answer: &[u8]) -> String {
    let mut liar = Liar::honest();
    liar.say(answer);
    liar.verdict(|bus| bus.read_config(0))
}

#[test]
fn an_answer_to_another_question_is_a_breach() {
    let body = words(&[0, 0, 7, 4, 0xffff_ffff]);
    let ok = |id, command, body: &[u8]| message(id, command, 1, 0, body);
    assert_eq!(verdict_on_read(&ok(5, 9, &body)), format!("{BROKE}it answers message 5 (9) where 4 (9) was asked"));
    assert_eq!(verdict_on_read(&ok(4, 10, &body)), format!("{BROKE}it answers message 4 (10) where 4 (9) was asked"));
    assert_eq!(
        verdict_on_read(&message(3, 9, 0x21, 22, &[])),
        format!("{BROKE}it answers message 3 (9) where 4 (9) was asked")
    );
    let other = format!("{BROKE}it answers another read than that of 4 bytes at 0x0 of region 7");
    for wrong in [[4, 0, 7, 4, 0], [0, 1, 7, 4, 0], [0, 0, 6, 4, 0], [0, 0, 7, 2, 0]] {
        assert_eq!(verdict_on_read(&ok(4, 9, &words(&wrong))), other, "{wrong:?}");
    }
    assert_eq!(verdict_on_read(&ok(4, 9, &body[..19])), other, "too short");
    assert_eq!(verdict_on_read(&ok(4, 9, &[])), other);
    assert_eq!(verdict_on_read(&ok(4, 9, &[0; 21])), format!("{BROKE}its answer to RegionRead has 21 bytes"));
}

#[test]
fn a_header_that_makes_no_sense_is_a_breach() {
    let head = |size, flags| verdict_on_read(&sized(4, 9, size, flags, 0, &[0; 64]));
    assert_eq!(head(15, 1), format!("{BROKE}a message of 15 bytes was announced"));
    assert_eq!(head(0, 1), format!("{BROKE}a message of 0 bytes was announced"));
    assert_eq!(head(u32::MAX, 1), format!("{BROKE}a message of 4294967295 bytes was announced"));
    assert_eq!(head(36, 3), format!("{BROKE}a message has the flags 0x3"));
    assert_eq!(head(17, 0x21), format!("{BROKE}1 bytes follow a refusal"));
}

#[test]
fn a_refusal_is_no_breach() {
    let mut liar = Liar::honest();
    liar.say(&message(4, 9, 0x21, 13, &[]));
    liar.say(&message(5, 9, 1, 0, &words(&[0, 0, 7, 4, 0x5678_1234])));
    let mut bus = liar.meet().unwrap();
    let refused = bus.read_config(0).unwrap_err().to_string();
    assert_eq!(refused, "reading the configuration space was refused: Permission denied (os error 13)");
    assert_eq!(bus.read_config(0).unwrap(), 0x5678_1234);
}

#[test]
fn a_server_that_closes_in_the_middle_is_gone() {
    let whole = message(4, 9, 1, 0, &words(&[0, 0, 7, 4, 0]));
    for len in [0, 1, 15, 16, 17, 35] {
        let verdict = verdict_on_read(&whole[..len]);
        assert!(verdict.starts_with("the device is gone (while reading the configuration space)"), "{len}: {verdict}");
    }
}

#[test]
fn a_server_that_says_nothing_is_gone_after_the_timeout() {
    let mut liar = Liar::honest();
    let begin = Instant::now();
    let mut bus = VfioUser::meet(liar.client.take().unwrap(), Duration::from_millis(50)).unwrap();
    assert!(matches!(bus.read_config(0), Err(BusError::Silent { .. })));
    assert!(begin.elapsed() >= Duration::from_millis(50));
    assert!(matches!(bus.read_config(0), Err(BusError::Silent { .. })), "and is not waited for again");
    // A late reply reaches no client, once no child that another test is starting has a copy of the connection.
    liar.hear_to_the_end();
    let late = rustix::net::send(&liar.socket, &[0; 16], SendFlags::NOSIGNAL);
    assert_eq!(late, Err(rustix::io::Errno::PIPE));
}

#[test]
fn a_server_that_asks_slowly_has_no_more_time_than_another() {
    const TIMEOUT: Duration = Duration::from_millis(400);
    let mut liar = Liar::honest();
    let mut bus = VfioUser::meet(liar.client.take().unwrap(), TIMEOUT).unwrap();
    let asked = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            // Each request of the server comes within the reply's timeout, which the requests must not extend.
            let goes = |id: &u16| {
                std::thread::sleep(TIMEOUT / 4);
                rustix::net::send(&liar.socket, &message(*id, 11, 0x10, 0, &[0; 16]), SendFlags::NOSIGNAL).is_ok()
            };
            (0..60).take_while(goes).count()
        });
        assert!(matches!(bus.read_config(0), Err(BusError::Silent { .. })));
        asking.join().unwrap()
    });
    assert!(asked < 20, "it was listened to {asked} times");
}

#[test]
fn a_server_that_asks_is_told_no_and_one_that_asks_for_ever_is_left() {
    let answer = message(4, 9, 1, 0, &words(&[0, 0, 7, 4, 5]));
    let mut liar = Liar::honest();
    liar.say(&message(77, 11, 0, 0, &[0; 5000]));
    liar.say(&message(78, 12, 0x10, 0, &[0; 16]));
    liar.say(&answer);
    let mut bus = liar.meet().unwrap();
    assert_eq!(bus.read_config(0).unwrap(), 5);
    drop(bus);
    assert!(
        liar.hear_to_the_end().ends_with(&message(77, 11, 0x21, 95, &[])),
        "one refusal, and none for what was posted"
    );

    let mut liar = Liar::honest();
    (0..100).for_each(|id| liar.say(&message(id, 11, 0, 0, &[0; 16])));
    assert_eq!(liar.verdict(|bus| bus.read_config(0)), format!("{BROKE}it asks 64 times and does not answer"));
}

#[test]
fn descriptors_that_nobody_asked_for_are_a_breach() {
    let memory = region(1);
    for count in [1, 16] {
        let mut liar = Liar::honest();
        liar.say_with(&message(4, 9, 1, 0, &words(&[0, 0, 7, 4, 0])), &vec![memory.fd(); count]);
        let verdict = liar.verdict(|bus| bus.read_config(0));
        assert_eq!(verdict, format!("{BROKE}{count} descriptors came with an answer to RegionRead"));
    }
    let mut liar = Liar::honest();
    liar.say_with(&message(4, 9, 1, 0, &words(&[0, 0, 7, 4, 0])), &[memory.fd(); 32]);
    let verdict = liar.verdict(|bus| bus.read_config(0));
    assert!(verdict.starts_with(&format!("{BROKE}more than 16 descriptors came")), "{verdict}");
}

#[test]
fn a_device_that_is_none_is_a_breach() {
    let meet = |device: &[u8]| {
        let mut liar = Liar::mute();
        liar.say(&message(1, 1, 1, 0, VERSION));
        liar.say(&message(2, 4, 1, 0, device));
        liar.say(&message(3, 5, 1, 0, &words(&[32, 3, 7, 0, 63, 0, 0, 0])));
        liar.meet().unwrap_err().to_string()
    };
    let none = |flags: u32, regions, irqs| {
        format!(
            "{BROKE}its device has flags {flags:#x}, {regions} regions and {irqs} kinds of interrupt, which is no PCI device"
        )
    };
    assert_eq!(meet(&words(&[16, 1, 9, 5])), none(1, 9, 5));
    assert_eq!(meet(&words(&[16, 3, 7, 5])), none(3, 7, 5));
    assert_eq!(meet(&words(&[16, 3, 9, 2])), none(3, 9, 2));
    assert_eq!(meet(&words(&[16, 3, 9])), format!("{BROKE}it describes the device in 12 bytes"));
    assert_eq!(meet(&words(&[16, 3, 9, 5])), format!("{BROKE}its configuration space has 63 bytes"));
}

#[test]
fn a_version_that_is_not_ours_is_a_breach() {
    let meet = |version: &[u8]| {
        let mut liar = Liar::mute();
        liar.say(&message(1, 1, 1, 0, version));
        liar.meet().unwrap_err().to_string()
    };
    assert_eq!(meet(&[1, 0, 0, 0]), format!("{BROKE}it speaks version 1.0 where 0.1 was proposed"));
    assert_eq!(meet(&[0, 0, 1, 0, b'{']), format!("{BROKE}its version data has no end"));
    assert_eq!(meet(&[0; 5000]), format!("{BROKE}its answer to Version has 5000 bytes"));
}

/// Builds a server's description of BAR 0 (message 4).
fn bar(argsz: u32, flags: u32, rest: &[u32]) -> Vec<u8> {
    message(4, 5, 1, 0, &[words(&[argsz, flags, 0, 32, 0x4000, 0, 0, 0]), words(rest)].concat())
}

#[test]
fn a_bar_that_is_described_wrongly_is_a_breach() {
    let memory = region(4);
    let verdict = |bytes: &[u8], fds: usize| {
        let mut liar = Liar::honest();
        liar.say_with(bytes, &vec![memory.fd(); fds]);
        liar.verdict(|bus| bus.registers(0))
    };
    let sparse = |start: u32, len: u32| bar(64, 0xf, &[1 | 1 << 16, 0, 1, 0, start, 0, len, 0]);
    assert_eq!(
        verdict(&sparse(0x3000, 0x2000), 1),
        format!("{BROKE}in region 0 of 16384 bytes it has 8192 mapped at 0x3000")
    );
    assert_eq!(
        verdict(&bar(48, 0xf, &[2, 32, 0, 0]), 1),
        format!("{BROKE}its list of capabilities goes back, to byte 32")
    );
    assert_eq!(verdict(&bar(64, 0xf, &[1, 0, u32::MAX, 0]), 1), format!("{BROKE}a capability at byte 32 does not fit"));
    let two = format!("{BROKE}2 descriptors came with an answer to DeviceGetRegionInfo");
    assert_eq!(verdict(&bar(32, 7, &[]), 2), two);
    assert_eq!(
        verdict(&[bar(32, 7, &[]), vec![0; 5000]].concat(), 1)[..BROKE.len()],
        *BROKE,
        "what follows is no answer"
    );
}

/// Prepares the replies that follow the description of a BAR: the command register is read and written (messages 5
/// and 6).
fn decode(liar: &Liar) {
    liar.say(&message(5, 9, 1, 0, &words(&[4, 0, 7, 4, 0])));
    liar.say(&message(6, 10, 1, 0, &words(&[4, 0, 7, 4])));
}

#[test]
fn memory_that_could_be_taken_away_is_reached_by_messages() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(0x4000).unwrap();
    let (small, fitting) = (region(1), region(4));
    for (memory, mapped) in [(file.as_fd(), false), (small.fd(), false), (fitting.fd(), true)] {
        let mut liar = Liar::honest();
        liar.say_with(&bar(32, 7, &[]), &[memory]);
        decode(&liar);
        liar.say(&message(7, 9, 1, 0, &words(&[0x100, 0, 0, 4, 0xbeef])));
        let mut bus = liar.meet().unwrap();
        let registers = bus.registers(0).unwrap();
        assert_eq!(registers.is_mapped(0x100, 4), mapped);
        assert_eq!(registers.read32(0x100), if mapped { 0 } else { 0xbeef });
    }
}

#[test]
fn a_lie_about_a_register_reads_as_ones_and_is_told_at_the_next_step() {
    let mut liar = Liar::honest();
    liar.say(&bar(32, 3, &[]));
    decode(&liar);
    liar.say(&message(7, 9, 1, 0, &words(&[0x104, 0, 0, 4, 0xbeef])));
    let mut bus = liar.meet().unwrap();
    let registers = bus.registers(0).unwrap();
    assert_eq!(registers.read32(0x100), u32::MAX);
    assert_eq!(registers.read32(0x100), u32::MAX);
    let verdict = bus.read_config(0).unwrap_err().to_string();
    assert_eq!(verdict, format!("{BROKE}it answers another read than that of 4 bytes at 0x100 of region 0"));
}

#[test]
fn an_answer_to_a_write_that_wanted_none_is_a_breach() {
    let mut liar = Liar::honest();
    liar.say(&bar(32, 3, &[]));
    decode(&liar);
    liar.say(&message(7, 10, 1, 0, &words(&[0x100, 0, 0, 4])));
    let mut bus = liar.meet().unwrap();
    bus.registers(0).unwrap().write32(0x100, 1);
    let verdict = bus.read_config(0).unwrap_err().to_string();
    assert_eq!(verdict, format!("{BROKE}it answers message 7 (10) where 8 (9) was asked"));
}

#[test]
fn interrupts_of_another_kind_are_a_breach() {
    let answer = |body: &[u8]| {
        let mut liar = Liar::honest();
        liar.say(&message(4, 7, 1, 0, body));
        liar.verdict(|bus| bus.interrupts(1))
    };
    let breach = |len| format!("{BROKE}it describes the MSI-X interrupts in {len} bytes, or others");
    assert_eq!(answer(&words(&[16, 1, 1, 20])), breach(16));
    assert_eq!(answer(&words(&[16, 1, 2])), breach(12));
    assert!(answer(&words(&[16, 0, 2, 20])).starts_with("the device has 0 MSI-X interrupts"), "not by eventfd");
}

#[test]
fn a_server_that_has_no_pin_or_refuses_it_is_polled() {
    let served = Served::new();
    let error = connect(&served).intx().unwrap_err();
    assert!(matches!(&error, BusError::NoIntX { why } if why == "its server offers none"), "{error}");
    let mut liar = has_pin(1);
    liar.say(&message(7, 8, 0x21, 22, &[]));
    let error = liar.meet().unwrap().intx().unwrap_err();
    assert!(matches!(&error, BusError::NoIntX { why } if why.starts_with("its server refuses it (")), "{error}");
}

/// Makes a server whose device has a pin with these flags, and may assert it: up to message 6.
fn has_pin(flags: u32) -> Liar {
    let liar = Liar::honest();
    liar.say(&message(4, 7, 1, 0, &words(&[16, flags, 0, 1])));
    liar.say(&message(5, 9, 1, 0, &words(&[4, 0, 7, 4, 2])));
    liar.say(&message(6, 7, 1, 0, &words(&[16, flags, 0, 1])));
    liar
}

#[test]
fn a_server_that_masks_its_pin_is_told_what_unmasks_it() {
    // Flag 4 says that the server masks the pin.
    for (flags, actions) in [(1, &[0x24][..]), (1 | 4, &[0x24, 0x14])] {
        let mut liar = has_pin(flags);
        (7..).zip(actions).for_each(|(id, _)| liar.say(&message(id, 8, 1, 0, &[])));
        let mut bus = liar.meet().unwrap();
        let intx = bus.intx().unwrap();
        let asked: Vec<_> = liar.asked().into_iter().filter(|(command, ..)| *command == 8).collect();
        let bodies: Vec<_> = actions.iter().map(|&action| words(&[20, action, 0, 0, 1])).collect();
        assert_eq!(asked.iter().map(|(_, body, _)| body.clone()).collect::<Vec<_>>(), bodies);
        rustix::io::write(&asked[0].2[0], &1_u64.to_ne_bytes()).unwrap();
        assert_eq!(rings_now(&intx.rings), 1);
        rustix::io::write(&intx.unmasks, &1_u64.to_ne_bytes()).unwrap();
        assert!(asked.get(1).is_none_or(|(_, _, fds)| rings_now(&fds[0]) == 1));
    }
}
