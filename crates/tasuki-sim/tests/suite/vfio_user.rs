//! The vfio-user server with hostile clients. Messages are written by hand, and the test calls the server's turns:
//! no threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use tasuki_shm::region::{Pages, Region as Memory};
use tasuki_sim::vfio_user::{Breach, Device, Dma, DmaMemory, Doorbells, MSIX, Region, Server, Turn};
use tasuki_testing::{descriptors, until};

/// A device with a region of 256 bytes at every index below 2, and two MSI-X vectors.
#[derive(Default)]
struct Drawer {
    bytes: Vec<u8>,
    dma: Dma,
    windows: Vec<u64>,
    eventfds: [Option<OwnedFd>; 2],
    resets: u32,
    bar: Option<Memory>,
}

impl Device for Drawer {
    fn region(&self, index: u32) -> Region<'_> {
        match index {
            0 => Region { len: 256, ..Region::default() },
            1 => {
                Region { len: 1 << 20, memory: self.bar.as_ref().map(Memory::fd), areas: &[(4096, 4096), (8192, 4096)] }
            }
            _ => Region::default(),
        }
    }

    fn doorbells(&mut self, index: u32) -> Option<Doorbells<'_>> {
        let memory = self.bar.as_ref().map(Memory::fd).filter(|_| index == 0)?;
        Some(Doorbells { memory, places: &[(0x10, 0), (0x20, 64)] })
    }

    fn vectors(&self, index: u32) -> u32 {
        if index == MSIX { 2 } else { 0 }
    }

    fn read(&mut self, _region: u32, offset: u64, into: &mut [u8]) {
        let from = &self.bytes[usize::try_from(offset).unwrap()..];
        into.copy_from_slice(&from[..into.len()]);
    }

    fn write(&mut self, _region: u32, offset: u64, bytes: &[u8]) {
        let to = &mut self.bytes[usize::try_from(offset).unwrap()..];
        to[..bytes.len()].copy_from_slice(bytes);
    }

    fn dma_map(&mut self, at: u64, memory: DmaMemory) {
        self.dma.map(at, memory);
        self.windows.push(at);
    }

    fn dma_unmap(&mut self, at: u64) {
        self.dma.unmap(at);
        self.windows.retain(|&window| window != at);
    }

    fn set_irq(&mut self, index: u32, vector: u32, eventfd: Option<OwnedFd>) {
        assert_eq!(index, MSIX);
        self.eventfds[vector as usize] = eventfd;
    }

    fn reset(&mut self) {
        self.resets += 1;
    }
}

struct Bench {
    server: Server,
    device: Drawer,
    client: OwnedFd,
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn long(value: u64) -> [u32; 2] {
    [u32::try_from(value & 0xffff_ffff).unwrap(), u32::try_from(value >> 32).unwrap()]
}

fn sized(command: u16, size: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = [7_u16.to_ne_bytes(), command.to_ne_bytes()].concat();
    [size, flags, 0].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
    bytes.extend(body);
    bytes
}

fn message(command: u16, body: &[u8]) -> Vec<u8> {
    sized(command, u32::try_from(16 + body.len()).unwrap(), 0, body)
}

const VERSION: &[u8] = b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":8}}\0";

impl Bench {
    fn new() -> Self {
        let (ours, client) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::ioctl_fionbio(&client, true).unwrap();
        let bar = Memory::create("bar", 1 << 20, Pages::Small).unwrap();
        let device = Drawer { bytes: vec![0; 1 << 20], bar: Some(bar), ..Drawer::default() };
        Bench { server: Server::over(ours).unwrap(), device, client }
    }

    fn met() -> Self {
        let mut bench = Bench::new();
        let (errno, body) = bench.ask(1, VERSION);
        assert_eq!((errno, &body[..4]), (0, &[0, 0, 1, 0][..]));
        bench
    }

    fn say(&mut self, bytes: &[u8]) {
        self.say_with(bytes, &[]);
    }

    fn say_with(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let sent = descriptors::send(&self.client, bytes, fds).unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn turn(&mut self) -> Turn {
        loop {
            match self.server.turn(&mut self.device).unwrap() {
                Turn::Busy => {}
                other => return other,
            }
        }
    }

    /// Returns the server's output since the last call, up to 1 MiB.
    fn hear(&mut self) -> Vec<u8> {
        let mut said = vec![0; 1 << 20];
        match rustix::net::recv(&self.client, &mut said, RecvFlags::DONTWAIT) {
            Ok((len, _)) => said[..len].to_vec(),
            Err(_) => Vec::new(),
        }
    }

    /// Returns the error number and the body of the only reply.
    fn answer(&mut self, command: u16) -> (i32, Vec<u8>) {
        let said = self.hear();
        let word = |at: usize| u32::from_ne_bytes(said[at..at + 4].try_into().unwrap());
        assert_eq!(said[..4], [7_u16.to_ne_bytes(), command.to_ne_bytes()].concat());
        assert_eq!(word(4) as usize, said.len(), "one answer");
        let errno = i32::try_from(word(12)).unwrap();
        assert_eq!(word(8), if errno == 0 { 1 } else { 0x21 });
        (errno, said[16..].to_vec())
    }

    fn ask(&mut self, command: u16, body: &[u8]) -> (i32, Vec<u8>) {
        self.ask_with(command, body, &[])
    }

    fn ask_with(&mut self, command: u16, body: &[u8], fds: &[BorrowedFd<'_>]) -> (i32, Vec<u8>) {
        self.say_with(&message(command, body), fds);
        assert_eq!(self.turn(), Turn::Idle);
        self.answer(command)
    }

    /// Returns the error number of the server's reply, and checks that the connection still works.
    fn refusal(&mut self, command: u16, body: &[u8], fds: &[BorrowedFd<'_>]) -> i32 {
        let (errno, body) = self.ask_with(command, body, fds);
        assert!(body.is_empty(), "an error has no body");
        assert_eq!(self.ask(4, &words(&[16, 0, 0, 0])).0, 0, "and the next question is answered");
        errno
    }
}

const EINVAL: i32 = 22;
const ENOENT: i32 = 2;
const EEXIST: i32 = 17;
const ENOTSUP: i32 = 95;

fn memory(pages: usize) -> Memory {
    Memory::create("client", pages * 4096, Pages::Small).unwrap()
}

fn dma(flags: u32, offset: u64, at: u64, len: u64) -> Vec<u8> {
    words(&[&[32, flags][..], &long(offset), &long(at), &long(len)].concat())
}

fn undma(flags: u32, at: u64, len: u64) -> Vec<u8> {
    words(&[&[24, flags][..], &long(at), &long(len)].concat())
}

#[test]
fn a_stream_that_makes_no_sense_ends_the_connection() {
    let breach = |bytes: &[u8]| {
        let mut bench = Bench::met();
        bench.say(bytes);
        match bench.turn() {
            Turn::Gone(Some(breach)) => breach,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(breach(&sized(4, 15, 0, &[])), Breach::Size(15));
    assert_eq!(breach(&sized(4, 16 + 16 + 65536 + 1, 0, &[])), Breach::Size(65569));
    assert_eq!(breach(&sized(4, u32::MAX, 0, &[])), Breach::Size(u32::MAX));
    assert_eq!(breach(&sized(4, 16, 1, &[])), Breach::NoCommand(1), "an answer to nothing");
    assert_eq!(breach(&sized(4, 16, 0x20, &[])), Breach::NoCommand(0x20));
    assert_eq!(breach(&sized(4, 16, u32::MAX, &[])), Breach::NoCommand(u32::MAX));
}

#[test]
fn the_version_comes_first_and_makes_sense() {
    let breach = |bytes: &[u8]| {
        let mut bench = Bench::new();
        bench.say(bytes);
        bench.turn()
    };
    assert_eq!(breach(&message(4, &words(&[16, 0, 0, 0]))), Turn::Gone(Some(Breach::NoVersion(4))));
    for version in
        [&[][..], &[0; 3], &[1, 0, 0, 0], b"\0\0\0\0{", b"\0\0\0\0{\0", b"\0\0\0\0{}", b"\0\0\0\0[]\0", b"\0\0\0\0\0"]
    {
        assert_eq!(breach(&message(1, version)), Turn::Gone(Some(Breach::BadVersion)), "{version:?}");
    }
    let mut deep = vec![b'['; 60_000];
    deep[..4].fill(0);
    assert_eq!(breach(&message(1, &deep)), Turn::Gone(Some(Breach::BadVersion)));
    let mut bench = Bench::new();
    assert_eq!(bench.ask(1, &[0, 0, 9, 0]).1[..4], [0, 0, 1, 0], "a later minor version steps down to ours");
    assert_eq!(bench.ask(1, VERSION).0, ENOTSUP, "and is agreed on once");
}

#[test]
fn commands_of_the_wrong_shape_are_refused() {
    let mut bench = Bench::met();
    let info = words(&[16, 0, 0, 0]);
    for (command, body) in [
        (2, dma(3, 0, 0, 4096)[..31].to_vec()),
        (2, [dma(3, 0, 0, 4096), vec![0]].concat()),
        (3, undma(0, 0, 4096)[..23].to_vec()),
        (3, undma(1, 0, 4096)),
        (3, undma(2, 0, 4096)),
        (4, info[..15].to_vec()),
        (4, words(&[15, 0, 0, 0])),
        (5, words(&[31, 0, 0, 0, 0, 0, 0, 0])),
        (5, words(&[32, 0, 9, 0, 0, 0, 0, 0])),
        (5, words(&[32, 0, u32::MAX, 0, 0, 0, 0, 0])),
        (6, words(&[16, 0, 0])),
        (6, words(&[15, 0, 0, 0])),
        (6, words(&[16, 1, 0, 0])),
        (6, words(&[16, 0, 0, 1])),
        (6, words(&[16, 0, 9, 0])),
        (7, words(&[16, 0, 5, 0])),
        (7, words(&[16, 0, u32::MAX, 0])),
        (8, words(&[20, 0x24, 2, 0])),
        (13, vec![0]),
    ] {
        assert_eq!(bench.refusal(command, &body, &[]), EINVAL, "{command} {body:?}");
    }
    for command in [0, 11, 12, 14, 15, 16, u16::MAX] {
        assert_eq!(bench.refusal(command, &[], &[]), ENOTSUP, "{command}");
    }
    assert_eq!(bench.device.resets, 0);
}

#[test]
fn doorbells_are_listed_where_there_are_some() {
    let mut bench = Bench::met();
    let ask = |room: u32, region: u32| words(&[room, 0, region, 0]);
    assert_eq!(bench.ask(6, &ask(16, 1)), (0, words(&[16, 0, 1, 0])), "none");
    let entry =
        |offset, place| words(&[&long(offset)[..], &long(4), &[u32::MAX, 2, 0, 0], &long(place), &long(0)].concat());
    assert_eq!(bench.ask(6, &ask(111, 0)), (0, words(&[112, 0, 0, 2])), "no room for the list");
    let listed = [words(&[112, 0, 0, 2]), entry(0x10, 0), entry(0x20, 64)].concat();
    assert_eq!(bench.ask(6, &ask(112, 0)), (0, listed));
}

#[test]
fn accesses_outside_of_a_region_are_refused() {
    let mut bench = Bench::met();
    let read = |region: u32, offset: u64, count: u32| words(&[&long(offset)[..], &[region, count]].concat());
    for (region, offset, count) in [
        (0, 253, 4),
        (0, 256, 1),
        (0, u64::MAX, 1),
        (0, u64::MAX - 3, 4),
        (0, 0, 0),
        (2, 0, 1),
        (9, 0, 1),
        (u32::MAX, 0, 1),
    ] {
        let body = read(region, offset, count);
        assert_eq!(bench.refusal(9, &body, &[]), EINVAL, "read {region} {offset:#x} {count}");
        let body = [body, vec![1; count as usize]].concat();
        assert_eq!(bench.refusal(10, &body, &[]), EINVAL, "write {region} {offset:#x} {count}");
    }
    assert_eq!(bench.refusal(9, &read(1, 0, 65537), &[]), EINVAL, "more than was agreed on");
    assert_eq!(bench.refusal(9, &read(1, 0, u32::MAX), &[]), EINVAL);
    for (count, have) in [(4, 3), (4, 5), (0, 1), (u32::MAX, 4)] {
        let body = [read(0, 0, count), vec![1; have]].concat();
        assert_eq!(bench.refusal(10, &body, &[]), EINVAL, "{count} announced, {have} there");
    }
    assert!(bench.device.bytes.iter().all(|&byte| byte == 0));
    let (errno, body) = bench.ask(9, &read(1, 8, 65536));
    assert_eq!((errno, body.len()), (0, 16 + 65536));
}

#[test]
fn memory_is_checked_before_it_is_mapped() {
    let mut bench = Bench::met();
    let given = memory(2);
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let whole = dma(3, 0, 0x1000, 8192);
    for (body, fds) in [
        (&whole, &[][..]),
        (&whole, &[given.fd(), given.fd()]),
        (&whole, &[file.as_fd()]),
        (&whole, &[eventfd.as_fd()]),
        (&dma(3, 0, 0x1000, 12288), &[given.fd()]),
        (&dma(3, 4096, 0x1000, 8192), &[given.fd()]),
        (&dma(3, 1, 0x1000, 4096), &[given.fd()]),
        (&dma(3, u64::MAX, 0x1000, 4096), &[given.fd()]),
        (&dma(3, 0, u64::MAX, 4096), &[given.fd()]),
        (&dma(3, 0, 0x1000, 0), &[given.fd()]),
        (&dma(3, 0, 0x1000, u64::MAX), &[given.fd()]),
        (&dma(0, 0, 0x1000, 8192), &[given.fd()]),
        (&dma(7, 0, 0x1000, 8192), &[given.fd()]),
    ] {
        assert_eq!(bench.refusal(2, body, fds), EINVAL, "{body:?} with {}", fds.len());
    }
    assert_eq!(bench.ask_with(2, &whole, &[given.fd()]), (0, vec![]));
    for at in [0, 0x1000, 0x2000] {
        assert_eq!(bench.refusal(2, &dma(3, 0, at, 8192), &[given.fd()]), EEXIST, "{at:#x}");
    }
    assert_eq!(bench.ask_with(2, &dma(1, 4096, 0x3000, 4096), &[given.fd()]).0, 0);
    assert!(bench.device.dma.store_word(0x1000, 1).is_ok() && bench.device.dma.store_word(0x3000, 1).is_err());
    for (at, len) in [(0x1000, 4096), (0x2000, 4096), (0, 0), (0x3000, 8192)] {
        assert_eq!(bench.refusal(3, &undma(0, at, len), &[]), ENOENT, "{at:#x} {len}");
    }
    assert_eq!(bench.ask(3, &undma(0, 0x1000, 8192)), (0, undma(0, 0x1000, 8192)));
    assert_eq!(bench.device.windows, [0x3000]);
    assert_eq!(bench.ask(3, &undma(2, 0, 0)).0, 0);
    assert!(bench.device.dma.is_empty());
}

#[test]
fn windows_have_a_limit() {
    let mut bench = Bench::met();
    let given = memory(1);
    for at in 0..64 {
        assert_eq!(bench.ask_with(2, &dma(3, 0, at << 12, 4096), &[given.fd()]).0, 0);
    }
    assert_eq!(bench.refusal(2, &dma(3, 0, 1 << 20, 4096), &[given.fd()]), 28);
}

#[test]
fn interrupts_are_checked_before_they_are_set() {
    let mut bench = Bench::met();
    let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (first, second) = (eventfd(), eventfd());
    let both = [first.as_fd(), second.as_fd()];
    for (body, fds) in [
        ([20, 0x24, 2, 0, 2], &both[..1]),
        ([20, 0x24, 2, 0, 1], &both),
        ([20, 0x24, 2, 0, 0], &[]),
        ([20, 0x24, 2, 1, 2], &both),
        ([20, 0x24, 2, u32::MAX, 2], &both),
        ([20, 0x24, 1, 0, 1], &both[..1]),
        ([20, 0x24, 5, 0, 1], &both[..1]),
        ([20, 0x24, u32::MAX, 0, 1], &both[..1]),
        ([19, 0x24, 2, 0, 2], &both),
        ([20, 0x21, 2, 0, 1], &[]),
        ([20, 0x21, 2, 1, 0], &[]),
        ([20, 0x21, 2, 0, 0], &both[..1]),
        ([20, 0x22, 2, 0, 1], &[]),
        ([20, 0x0c, 2, 0, 1], &both[..1]),
        ([20, 0, 2, 0, 0], &[]),
    ] {
        assert_eq!(bench.refusal(8, &words(&body), fds), EINVAL, "{body:?}");
    }
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    let given = memory(1);
    for other in [pipe.as_fd(), given.fd()] {
        assert_eq!(bench.refusal(8, &words(&[20, 0x24, 2, 0, 2]), &[first.as_fd(), other]), EINVAL, "no eventfd");
    }
    assert!(bench.device.eventfds.iter().all(Option::is_none));
    assert_eq!(bench.ask_with(8, &words(&[20, 0x24, 2, 1, 1]), &both[..1]).0, 0);
    assert!(bench.device.eventfds[0].is_none() && bench.device.eventfds[1].is_some());
    assert_eq!(bench.ask(8, &words(&[20, 0x21, 2, 0, 0])).0, 0);
    assert!(bench.device.eventfds.iter().all(Option::is_none));
}

#[test]
fn descriptors_with_a_command_that_takes_none_are_refused() {
    let mut bench = Bench::met();
    let given = memory(1);
    assert_eq!(bench.refusal(4, &words(&[16, 0, 0, 0]), &[given.fd()]), EINVAL);
    assert_eq!(bench.refusal(13, &[], &[given.fd()]), EINVAL);
    bench.say_with(&message(13, &[]), &[given.fd(); 17]);
    assert_eq!(bench.turn(), Turn::Gone(Some(Breach::Descriptors)));
}

#[test]
fn descriptors_belong_to_their_message_wherever_the_stream_is_cut() {
    let given = memory(1);
    let window = message(2, &dma(3, 0, 0, 4096));
    let reset = sized(13, 16, 0x10, &[]);
    // All at once: a reset before, the window, a reset behind.
    let mut bench = Bench::met();
    bench.say(&reset);
    bench.say_with(&window, &[given.fd()]);
    bench.say(&reset);
    assert_eq!(bench.turn(), Turn::Idle);
    assert_eq!((bench.answer(2), bench.device.resets, &bench.device.windows[..]), ((0, vec![]), 2, &[0][..]));
    // Byte by byte.
    let mut bench = Bench::met();
    bench.say_with(&window[..1], &[given.fd()]);
    for byte in &window[1..] {
        assert_eq!(bench.turn(), Turn::Idle);
        bench.say(&[*byte]);
    }
    assert_eq!(bench.turn(), Turn::Idle);
    assert_eq!((bench.answer(2), &bench.device.windows[..]), ((0, vec![]), &[0][..]));
    // A descriptor with every byte of a message that never ends.
    let mut bench = Bench::met();
    for (count, byte) in window[..20].iter().enumerate() {
        bench.say_with(&[*byte], &[given.fd()]);
        if let Turn::Gone(breach) = bench.turn() {
            assert_eq!((count, breach), (16, Some(Breach::Descriptors)));
            return;
        }
    }
    panic!("twenty descriptors were taken");
}

#[test]
fn what_is_posted_is_done_and_not_answered() {
    let mut bench = Bench::met();
    let write = |at: u32, bytes: &[u8]| {
        let head = words(&[at, 0, 0, u32::try_from(bytes.len()).unwrap()]);
        sized(10, u32::try_from(32 + bytes.len()).unwrap(), 0x10, &[&head[..], bytes].concat())
    };
    for at in 0..1000 {
        bench.say(&write(at % 256, &[1]));
        if at % 100 == 0 {
            assert_eq!(bench.turn(), Turn::Idle);
        }
    }
    bench.say(&write(256, &[1]));
    assert_eq!(bench.turn(), Turn::Idle);
    assert!(bench.hear().is_empty(), "refusals neither");
    assert!(bench.device.bytes[..256].iter().all(|&byte| byte == 1));
}

#[test]
fn a_mapped_region_comes_with_its_areas_and_its_memory() {
    let mut bench = Bench::met();
    let ask = |room: u32| words(&[room, 0, 1, 0, 0, 0, 0, 0]);
    let (errno, body) = bench.ask(5, &ask(32));
    let short = words(&[32 + 48, 7, 1, 0, 1 << 20, 0, 0, 0]);
    assert_eq!((errno, &body), (0, &short), "how much room is needed");
    let (errno, body) = bench.ask(5, &ask(80));
    let whole = words(&[80, 0xf, 1, 32, 1 << 20, 0, 0, 0, 1 | 1 << 16, 0, 2, 0, 4096, 0, 4096, 0, 8192, 0, 4096, 0]);
    assert_eq!((errno, &body), (0, &whole));
}

/// The client asks for much and reads nothing; then it reads it all.
#[test]
fn a_client_that_does_not_read_is_not_waited_for_and_loses_nothing() {
    let mut bench = Bench::met();
    bench.device.bytes.iter_mut().zip((0..=255).cycle()).for_each(|(byte, i)| *byte = i);
    let read = message(9, &words(&[0, 0, 1, 65536]));
    for _ in 0..40 {
        bench.say(&read);
    }
    assert_eq!(bench.turn(), Turn::Idle, "it stands still");
    assert!(!readable(&bench.server), "and does not want to be turned");
    let mut heard = 0;
    let mut idle = 0;
    while heard < 40 * (32 + 65536) {
        let part = bench.hear().len();
        heard += part;
        idle = if part == 0 { idle + 1 } else { 0 };
        assert!(idle < 1000, "only {heard} bytes came");
        assert_eq!(bench.turn(), Turn::Idle);
    }
    assert!(bench.hear().is_empty());
    assert_eq!(bench.ask(13, &[]).0, 0);
}

fn readable(fd: impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).unwrap() == 1
}

#[test]
fn clients_come_one_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let mut server = Server::bind(&path).unwrap();
    let mut device = Drawer { bytes: vec![0; 256], ..Drawer::default() };
    assert!(!readable(&server));
    let connect = || std::os::unix::net::UnixStream::connect(&path).unwrap();
    let (first, second) = (connect(), connect());
    assert!(readable(&server));
    assert_eq!(server.turn(&mut device).unwrap(), Turn::Busy);
    assert!(server.has_client() && !readable(&server), "the second waits");
    drop(first);
    until("its end is seen", || readable(&server));
    assert_eq!(server.turn(&mut device).unwrap(), Turn::Gone(None));
    assert!(!server.has_client() && readable(&server), "now it may come");
    assert_eq!(server.turn(&mut device).unwrap(), Turn::Busy);
    rustix::net::send(&second, &message(1, VERSION), SendFlags::NOSIGNAL).unwrap();
    assert_eq!(server.turn(&mut device).unwrap(), Turn::Busy, "the device has its turn before the next question");
    assert_eq!(server.turn(&mut device).unwrap(), Turn::Idle);
    assert!(readable(&second));
    assert_eq!(std::io::ErrorKind::AddrInUse, Server::bind(&path).map(|_| ()).unwrap_err().kind());
    drop(server);
    assert!(!path.exists());
}

#[test]
fn a_server_of_one_connection_is_over_with_it() {
    let mut bench = Bench::met();
    let given = memory(1);
    assert_eq!(bench.ask_with(2, &dma(3, 0, 0, 4096), &[given.fd()]).0, 0);
    let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert_eq!(bench.ask_with(8, &words(&[20, 0x24, 2, 0, 1]), &[eventfd.as_fd()]).0, 0);
    let Bench { mut server, mut device, client } = bench;
    drop(client);
    // A child of another test has a copy of it until it executes its program.
    until("its end is seen", || readable(&server));
    assert_eq!(server.turn(&mut device).unwrap(), Turn::Over);
    assert!(device.dma.is_empty() && device.eventfds[0].is_none());
    assert_eq!(server.turn(&mut device).unwrap(), Turn::Over);
}
