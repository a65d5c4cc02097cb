//! Attacks of somebody who did not write the back end: hostile front ends and guests, and random traffic with random
//! deaths. `TASUKI_ATTACK_SECONDS` says for how long the random ones run.

use std::os::fd::AsFd;

use tasuki_testing::PATIENCE;
use theirs::{connect, eventfd, message, send, state, table};

use super::*;

const SEND_USED: u64 = 0xc000 + 2;
const SEND_RINGS: [u64; 3] = [0x8000, 0xa000, 0xc000];
const RECEIVE_RINGS: [u64; 3] = [0, 0x2000, 0x4000];

fn trouble(net: &mut Net) -> Option<String> {
    net.guest().trouble()
}

fn set_table(net: &mut Net, machine: &Machine) {
    let body = table(&[[theirs::GUEST, theirs::LEN, theirs::USER, 0]]);
    assert!(send(&machine.socket, &message(5, 0, &body), &[machine.memory.as_fd()]));
    net.settle();
}

/// QEMU leaves out memory that is no file, and the table with it, and says nothing.
#[test]
fn a_machine_that_shares_no_memory_is_named_once() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let machine = Machine::connect(&path, ALL, 64, &mut || net.turn());
    assert!(send(&machine.socket, &message(2, 0, &ALL.to_ne_bytes()), &[]));
    let tick = |net: &mut Net| {
        net.settle();
        net.guest().tick(Instant::now(), &mut crate::endpoint::Dropped::default());
        trouble(net)
    };
    assert_eq!(tick(&mut net), None, "no ring is to run");
    [0, 1].into_iter().for_each(|queue| machine.start_queue(queue, 0));
    assert_eq!(tick(&mut net).as_deref(), Some(NO_MEMORY));
    assert_eq!(tick(&mut net), None, "it was said");
    let running = |net: &mut Net| net.guest().journal.as_ref().unwrap().runs_now();
    assert_eq!(running(&mut net), 1);
    set_table(&mut net, &machine);
    assert_eq!((running(&mut net), net.guest().is_running()), (2, true));
}

/// The memory table changes under running rings (QEMU does that when memory is plugged), and the worker is killed
/// before the daemon has the new parts.
#[test]
fn killed_between_a_new_memory_table_and_its_report_frames_cross_once() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    let parts = net.parts();
    for number in 0..5 {
        assert!(machine.send(&frame(OTHER, US, number)));
        net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
    }
    net.others[0].flush();
    net.settle();
    let (mut there, mut back) = (received(&mut net.others[0]).len(), machine.receive().len());
    set_table(&mut net, &machine);
    for number in 5..8 {
        assert!(machine.send(&frame(OTHER, US, number)));
        net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
    }
    net.others[0].flush();
    net.settle();
    there += received(&mut net.others[0]).len();
    back += machine.receive().len();
    let shown = machine.half(SEND_USED);
    net.replace(parts);
    let shown_by_successor = machine.half(SEND_USED);
    net.settle();
    there += received(&mut net.others[0]).len();
    assert_eq!((there, back, shown, shown_by_successor), (8, 8, 8, 8), "there, back, used index before and after");
}

/// The device was stopped and that was answered; the worker is killed before the daemon has heard of it.
#[test]
fn killed_after_it_answered_that_a_ring_is_stopped_nobody_writes_to_the_guest() {
    let mut net = Net::new(2);
    let machine = net.machine(VERSION_1 | MRG_RXBUF | PROTOCOL, 64);
    let parts = net.parts();
    for index in 0..2 {
        assert_eq!(machine.ask(11, &state(index, 0), &mut || net.turn()) & 0xffff_ffff, u64::from(index));
    }
    // The guest has its memory back.
    machine.write(0, &vec![0xee; 0xd000]);
    machine.write(0x2002, &64_u16.to_le_bytes());
    let before = machine.read(0, theirs::LEN.try_into().unwrap());
    net.replace(parts);
    net.others[0].send(US, &frame(US, OTHER, 1)).unwrap();
    net.others[0].flush();
    net.settle();
    let after = machine.read(0, theirs::LEN.try_into().unwrap());
    let changed: Vec<_> = before.iter().zip(&after).enumerate().filter(|(_, (a, b))| a != b).map(|(i, _)| i).collect();
    assert!(
        changed.is_empty(),
        "bytes {:#x?} of the guest were written after its device was stopped",
        &changed[..changed.len().min(8)]
    );
}

/// A front end replaces an interrupt's eventfd (QEMU does when the guest unmasks a vector). The daemon compares texts.
#[test]
fn parts_with_another_interrupt_have_another_text() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let before = net.parts();
    let call = eventfd();
    assert!(send(&machine.socket, &message(13, 0, &0_u64.to_ne_bytes()), &[call.as_fd()]));
    net.known = None;
    net.settle();
    let after = net.known.take().expect("the daemon is told");
    assert_ne!(before.version, after.version);
    assert!(
        (before.number, before.text) != (after.number, after.text),
        "Connected::is of the daemon takes both for the same"
    );
}

/// The same after the machine has left.
#[test]
fn an_eventfd_of_a_stopped_ring_wakes_nobody() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    for index in 0..2 {
        machine.ask(11, &state(index, 0), &mut || net.turn());
    }
    // QEMU goes on with the device itself: the guest kicks it, and it drains its own eventfd or not.
    rustix::io::write(&machine.kicks[1], &1_u64.to_ne_bytes()).unwrap();
    net.settle();
    let Machine { kicks, socket, .. } = machine;
    drop(socket);
    net.settle();
    assert!(net.guest().front_end.is_none());
    let node = net.node.as_mut().unwrap();
    let _ = node.arm();
    assert!(!is_readable(node.source().unwrap()), "the worker never sleeps again");
    drop(kicks);
}

/// Broadcasts on a VNI with many nodes: more messages than the ledger holds.
#[test]
fn broadcasts_cross_exactly_once_wherever_the_worker_is_killed() {
    const NODES: u16 = 8;
    for places in 0.. {
        let mut net = Net::new(NODES);
        let mut machine = net.machine(ALL, 64);
        let parts = net.parts();
        for number in 0..20 {
            let mut all = frame(OTHER, US, number);
            all[..6].fill(0xff);
            assert!(machine.send(&all));
        }
        let was_killed = net.kill(places, 3);
        net.replace(parts);
        net.settle();
        let counts: Vec<_> = net.others.iter_mut().map(|other| received(other).len()).collect();
        assert!(counts.iter().all(|count| *count == 20), "{counts:?}, killed at place {places}");
        if !was_killed {
            break;
        }
    }
}

/// A segment that never fits, while another node's frames flow.
#[test]
fn a_frame_without_room_waits_a_bounded_time_though_others_flow() {
    let mut net = Net::new(3);
    let mut machine = net.machine(ALL, 64);
    // TCP over IPv4: more cuts than the guest has buffers.
    let payload = vec![7; 10_000];
    let tcp = [&[0x30, 0x39, 0, 80][..], &1_u32.to_be_bytes(), &[0; 4], &[0x50, 0x10, 1, 0, 0, 0, 0, 0]].concat();
    let total = u16::try_from(20 + tcp.len() + payload.len()).unwrap();
    let ip = [&[0x45, 0][..], &total.to_be_bytes(), &[0, 1, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]].concat();
    let segment = [&mac(US)[..], &mac(1), &[8, 0], &ip, &tcp, &payload].concat();
    let offload = Offload {
        flags: NEEDS_CSUM,
        gso_type: 1,
        hdr_len: 54.into(),
        gso_size: 100.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
    };
    let len = HEADER_LEN + segment.len();
    net.others[0].draft(US, len).unwrap().copy_from_slice(&[offload.as_bytes(), &segment].concat());
    net.others[0].post(US, len, true);
    net.others[0].send(US, &frame(US, 1, 0)).unwrap();
    net.others[0].flush();
    let start = Instant::now();
    let mut from_first = 0;
    while start.elapsed() < PATIENCE && from_first == 0 {
        net.others[1].send(US, &frame(US, 2, 0)).unwrap();
        net.others[1].flush();
        net.turn();
        from_first += machine.receive().iter().filter(|frame| frame[6..12] == mac(1)).count();
        net.others[1].wake();
    }
    assert_eq!(from_first, 1, "the frame behind the segment has waited {:?}", start.elapsed());
}

/// A header whose fields contradict the frame reaches a guest as it is.
#[test]
fn a_false_offload_header_of_another_node_does_not_reach_a_guest() {
    let mut net = Net::new(2);
    let mut takes = net.machine(ALL | CSUM | GUEST_CSUM | GUEST_TSO4, 64);
    let odd = Offload {
        flags: 0xff,
        gso_type: 1,
        hdr_len: 65535.into(),
        gso_size: 0.into(),
        csum_start: 65000.into(),
        csum_offset: 65535.into(),
    };
    net.give(odd.as_bytes(), &frame(US, OTHER, 0));
    net.settle();
    let came = takes.receive_with_headers();
    assert!(came.is_empty(), "{:x?}", came[0].0);
}

/// The lease comes back, or a successor began, before the last news of the client reached it.
#[test]
fn parts_that_come_late_count() {
    let mut net = Net::new(2);
    let mut machine = net.machine(VERSION_1 | MRG_RXBUF | PROTOCOL, 64);
    let early = net.parts();
    let call = eventfd();
    assert!(send(&machine.socket, &message(13, 0, &0_u64.to_ne_bytes()), &[call.as_fd()]));
    net.settle();
    let late = net.parts();
    net.node.as_mut().unwrap().finish();
    net.replace(early);
    net.guest().go_on(late).unwrap();
    net.settle();
    let _ = rustix::io::read(&call, &mut [0; 8]);
    net.others[0].send(US, &frame(US, OTHER, 1)).unwrap();
    net.others[0].flush();
    net.settle();
    assert_eq!(machine.receive().len(), 1);
    assert!(rustix::io::read(&call, &mut [0; 8]).is_ok(), "the guest is interrupted by the eventfd that it gave last");
}

/// The same machine, rings restarted, lease back: marks and texts.
#[test]
fn handover_there_and_back_keeps_the_place() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    let mut total = 0;
    for round in 0..4 {
        for number in 0..7 {
            assert!(machine.send(&frame(OTHER, US, number)));
            net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
        }
        net.others[0].flush();
        net.settle();
        total += 7;
        assert_eq!((received(&mut net.others[0]).len(), machine.receive().len()), (7, 7), "round {round}");
        assert_eq!(machine.half(SEND_USED), total);
        // Away and back: the same Guest.
        let mut node = net.node.take().unwrap();
        node.finish();
        let parts = node.endpoint.parts().unwrap().unwrap();
        let kept = node.into_end();
        let mut second = net.worker();
        second.endpoint.go_on(parts).unwrap();
        net.node = Some(second);
        for number in 0..3 {
            assert!(machine.send(&frame(OTHER, US, number)));
            net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
        }
        net.others[0].flush();
        net.settle();
        total += 3;
        assert_eq!((received(&mut net.others[0]).len(), machine.receive().len()), (3, 3), "round {round}, away");
        net.node.as_mut().unwrap().finish();
        net.node = None;
        net.node = Some(Bridge::new(kept, net.nodes.exact_end(US), net.nodes.switch(US)));
        assert_eq!(machine.half(SEND_USED), total);
    }
}

/// A front end's memory that a successor can no longer map.
#[test]
fn a_machine_whose_memory_was_sealed_meanwhile_is_told_that_it_is_gone() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let machine = Machine::start(&path, ALL, 64, || net.turn());
    assert!(net.guest().is_running());
    let parts = net.parts();
    rustix::fs::fcntl_add_seals(&machine.memory, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
    net.node = None;
    let mut node = net.worker();
    // The daemon has it, too.
    let _daemons = parts.fds[0].try_clone().unwrap();
    let went = node.endpoint.go_on(parts);
    net.node = Some(node);
    net.settle();
    assert!(went.is_err());
    assert!(machine.is_hung_up(), "{went:?}: the front end waits for ever");
}

/// QEMU's first region on huge pages: 640 KiB of a file with pages of 2 MiB.
#[test]
fn memory_on_huge_pages_is_unmapped_when_the_machine_leaves() {
    if std::fs::read_to_string("/proc/sys/vm/nr_hugepages").is_ok_and(|count| count.trim() == "0") {
        return println!("skipped: the kernel has no huge pages: sysctl vm.nr_hugepages=16");
    }
    let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::HUGE_2MB;
    let memory = rustix::fs::memfd_create("huge", flags).unwrap();
    rustix::fs::ftruncate(&memory, 4 << 20).unwrap();
    let mapped = || {
        std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("memfd:huge")).count()
    };
    let mut net = Net::new(2);
    let socket = connect(&net.folder.path().join("vm.sock"));
    net.settle();
    let regions = [[0, 0xa_0000, theirs::USER, 0], [0xc_0000, (4 << 20) - 0xc_0000, theirs::USER + 0xc_0000, 0xc_0000]];
    assert!(send(&socket, &message(5, 0, &table(&regions)), &[memory.as_fd(), memory.as_fd()]));
    net.settle();
    assert_eq!((mapped(), trouble(&mut net)), (2, None));
    drop(socket);
    net.settle();
    assert!(net.guest().front_end.is_none());
    assert_eq!(mapped(), 0, "mappings of a machine that has left");
}

/// The same memory is taken away.
#[test]
fn memory_on_huge_pages_that_is_cut_holds_zeroes() {
    if std::fs::read_to_string("/proc/sys/vm/nr_hugepages").is_ok_and(|count| count.trim() == "0") {
        return println!("skipped: the kernel has no huge pages: sysctl vm.nr_hugepages=16");
    }
    let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::HUGE_2MB;
    let memory = rustix::fs::memfd_create("huge", flags).unwrap();
    rustix::fs::ftruncate(&memory, 4 << 20).unwrap();
    let region = tasuki_shm::region::CommonRegion::map_guarded(memory.as_fd(), 0xa_0000).unwrap();
    rustix::fs::ftruncate(&memory, 0).unwrap();
    let mut bytes = [1; 8];
    region.copy_to(0, &mut bytes).unwrap();
    assert_eq!((bytes, region.is_gone()), ([0; 8], true));
    std::mem::forget(region);
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.roll() >> 11) % n
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).expect("few")]
    }

    fn number(&mut self) -> u64 {
        match self.below(6) {
            0 => self.roll(),
            1 => self.below(8),
            2 => theirs::GUEST + self.below(theirs::LEN + 64) - 32,
            3 => theirs::USER + self.below(0x1_0000),
            4 => 1 << self.below(64),
            _ => u64::MAX - self.below(4096),
        }
    }
}

/// Writes anything into a packed ring: often what a driver makes available in this lap or in the other.
#[allow(clippy::cast_possible_truncation, reason = "dice")]
fn scribble(machine: &Machine, dice: &mut Dice, [descriptors, driver, device]: [u64; 3], size: u16) {
    let lap = dice.pick(&[0x80, 0x8000]);
    let count = dice.pick(&[1, 4, size]);
    let first = dice.below(size.into()) as u16;
    for at in first..first + count {
        let address =
            if dice.below(30) == 0 { dice.number() } else { theirs::GUEST + dice.below(theirs::LEN - 80_000) };
        let len: u32 = dice.pick(&[64, 1500, 4096, 16, 0, 12, 70_000]);
        let flags: u16 = if dice.below(10) == 0 { dice.roll() as u16 } else { dice.pick(&[0, 0, 1, 2, 2, 2, 4]) | lap };
        let id = dice.roll() as u16;
        let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &id.to_le_bytes(), &flags.to_le_bytes()];
        machine.write(descriptors + 16 * u64::from(at % size), &bytes.concat());
    }
    let event = [dice.roll() as u16, dice.below(4) as u16].map(u16::to_le_bytes).concat();
    machine.write(dice.pick(&[driver, driver, device]), &event);
}

/// Takes turns until all front ends have been found to have left, also those that wait for a stale one.
fn await_nobody(net: &mut Net) {
    let mut turns = 0;
    while turns < 70 {
        net.turn();
        let guest = net.guest();
        let is_empty = guest.front_end.is_none() && guest.other.is_none() && guest.stale.is_none();
        turns = if is_empty { turns + 1 } else { 0 };
    }
}

/// Random messages, random rings, random deaths. Only panics and hangs are findings.
#[test]
#[allow(clippy::cast_possible_truncation, reason = "dice")]
fn fuzz_messages_and_rings() {
    let seconds = std::env::var("TASUKI_ATTACK_SECONDS").ok().and_then(|it| it.parse().ok()).unwrap_or(3);
    let seed = std::env::var("ATTACK_SEED").ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut seconds_of, mut swaps) = (0_u64, 0_u64);
    let (mut rounds, mut ran, mut slowest, mut crossed, mut deaths, mut went_on, mut refused) =
        (0_u64, 0_u64, Duration::ZERO, 0_usize, 0_u64, 0_u64, 0_u64);
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ seed);
    let plain = tempfile::tempfile().unwrap();
    let requests: Vec<u32> =
        vec![1, 2, 3, 4, 5, 6, 6, 7, 19, 20, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 36, 37, 38, 39, 40];
    while Instant::now() < end {
        rounds += 1;
        let mut net = Net::new(2);
        let features = dice.pick(&[
            ALL,
            ALL | GUEST_CSUM | CSUM | GUEST_TSO4,
            VERSION_1,
            PROTOCOL,
            MRG_RXBUF,
            EVENT_IDX | PROTOCOL | VERSION_1,
            ALL | PACKED,
            ALL | PACKED | IN_ORDER | GUEST_CSUM | CSUM | GUEST_TSO4,
            PLAIN | PACKED,
        ]);
        let is_packed = features & PACKED != 0;
        let size = if is_packed { 1 + dice.below(128) as u16 } else { 1 << dice.below(8) };
        let sizes = [size.into(), size.into(), 256, 7];
        let pairs = match dice.below(8) {
            _ if size > 64 => 1,
            0 => 32,
            few => 1 + few % 3,
        };
        let start = |net: &mut Net| {
            let path = net.folder.path().join("vm.sock");
            Machine::start_with(&path, features, size, pairs as usize, || net.turn())
        };
        let mut machine = start(&mut net);
        let pipes = tasuki_shm::wake::bell_pipe().unwrap();
        let path = net.folder.path().join("vm.sock");
        let log = theirs::memory(1 << 17);
        let mut second: Option<Machine> = None;
        for _ in 0..dice.below(400) {
            if !net.guest().is_running() && dice.below(6) == 0 {
                drop((machine, second.take()));
                await_nobody(&mut net);
                machine = start(&mut net);
            }
            let before = Instant::now();
            let what = dice.below(16);
            match what {
                // A second machine comes, starts, stops, goes, or changes places with the first.
                14 | 15 => match (dice.below(8), second.take()) {
                    (0 | 1, None) => {
                        let mut it = Machine::silent(&path, features, size);
                        if dice.below(4) == 0 {
                            it.memory = machine.memory.try_clone().unwrap();
                        }
                        if dice.below(8) > 0 {
                            let _ = send(&it.socket, &message(16, 0, &0x1_8006_u64.to_ne_bytes()), &[]);
                        }
                        second = Some(it);
                    }
                    (0 | 1, Some(it)) => drop(it),
                    (2 | 3, Some(it)) => {
                        it.begin([dice.roll() as u16 % 3, 0], &mut || net.turn());
                        seconds_of += 1;
                        second = Some(it);
                    }
                    (4, Some(it)) => {
                        swaps += 1;
                        second = Some(std::mem::replace(&mut machine, it));
                    }
                    (5, it) => {
                        second = it;
                        machine.begin([0; 2], &mut || ());
                    }
                    (6 | 7, it) => {
                        second = it;
                        let of = if dice.below(2) == 0 { second.as_ref() } else { None }.unwrap_or(&machine);
                        for index in 0..1 + dice.below(2) as u32 {
                            let _ = send(&of.socket, &message(11, 0, &state(index, 0)), &[]);
                        }
                    }
                    (_, it) => second = it,
                },
                // A message.
                0 | 1 => {
                    let machine = if dice.below(3) == 0 { second.as_ref() } else { None }.unwrap_or(&machine);
                    let request = if dice.below(200) == 0 { dice.number() as u32 } else { dice.pick(&requests) };
                    let mut body = match request {
                        5 => {
                            let count = if dice.below(30) == 0 { dice.below(10) } else { 1 + dice.below(3) } as usize;
                            let regions: Vec<_> = (0..count)
                                .map(|_| {
                                    if dice.below(40) > 0 {
                                        [theirs::GUEST, theirs::LEN, theirs::USER, 0]
                                    } else {
                                        [dice.number(), dice.number(), dice.number(), dice.number()]
                                    }
                                })
                                .collect();
                            table(&regions)
                        }
                        37 | 38 => {
                            let words = if dice.below(20) > 0 {
                                [0, theirs::GUEST, theirs::LEN, theirs::USER, 0]
                            } else {
                                [0, dice.number(), dice.below(1 << 25), dice.number(), 0]
                            };
                            words.iter().flat_map(|word| word.to_ne_bytes()).collect()
                        }
                        8 | 10 | 11 | 18 => state(
                            (if dice.below(100) == 0 { dice.below(80) } else { dice.below(2 * pairs) }) as u32,
                            dice.pick(if request == 18 {
                                &[1, 1, 1, 0]
                            } else if rounds % 20 == 0 {
                                &[0, 1, 65535, 7]
                            } else if is_packed && request == 10 {
                                &[0x8000_8000, 0, 0x8001, 7]
                            } else if is_packed {
                                &sizes
                            } else {
                                &[64, 256, 32, 8]
                            }),
                        )
                        .to_vec(),
                        9 => {
                            let at = dice.pick(&[RECEIVE_RINGS, SEND_RINGS]);
                            let words = if dice.below(20) > 0 {
                                let log = if dice.below(4) > 0 { theirs::GUEST + at[2] } else { dice.number() };
                                [theirs::USER + at[0], theirs::USER + at[2], theirs::USER + at[1], log]
                            } else {
                                [dice.number(), dice.number(), dice.number(), dice.number()]
                            };
                            let address: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                            [&state(dice.below(2 * pairs) as u32, dice.below(2) as u32)[..], &address].concat()
                        }
                        12 | 13 => {
                            (dice.below(2 * pairs) | if dice.below(4) == 0 { 0x100 } else { 0 }).to_ne_bytes().to_vec()
                        }
                        2 => dice
                            .pick(&[
                                ALL,
                                ALL | theirs::LOG_ALL,
                                features,
                                features | theirs::LOG_ALL,
                                VERSION_1,
                                0,
                                PROTOCOL,
                                MRG_RXBUF,
                                EVENT_IDX,
                                ALL | GUEST_TSO4,
                            ])
                            .to_ne_bytes()
                            .to_vec(),
                        6 => {
                            let words = match dice.below(12) {
                                0 => [dice.number(), dice.number()],
                                1 => [8 * dice.below(64), 4 * dice.below(64)],
                                2 => [theirs::LEN, 0],
                                _ => [(theirs::GUEST + theirs::LEN) / 4096 / 8, 8 * dice.below(4096)],
                            };
                            words.iter().flat_map(|word| word.to_ne_bytes()).collect()
                        }
                        19 => dice.pick(&[0, u64::MAX, 1, dice.0]).to_ne_bytes().to_vec(),
                        16 => (dice.pick(&[0x1_8006_u64, 0x1_8007, 0x1_800e, 1 << 3, 1 << 15, 1 << 16, 6]))
                            .to_ne_bytes()
                            .to_vec(),
                        39 => dice.below(16).to_ne_bytes().to_vec(),
                        _ => Vec::new(),
                    };
                    if dice.below(300) == 0 {
                        body.truncate(dice.below(body.len() as u64 + 1) as usize);
                    }
                    let fresh = eventfd();
                    let fds: Vec<std::os::fd::BorrowedFd<'_>> = match request {
                        12 | 13 if dice.below(100) > 0 && body.get(1) == Some(&0) => vec![fresh.as_fd()],
                        5 => vec![machine.memory.as_fd(); body.len().saturating_sub(8) / 32]
                            .into_iter()
                            .take(10)
                            .collect(),
                        37 => vec![machine.memory.as_fd()],
                        6 => match dice.below(30) {
                            0 => vec![],
                            1 => vec![log.as_fd(); 2],
                            2 => vec![log.as_fd(); 8],
                            3 => vec![plain.as_fd()],
                            4 | 5 => vec![machine.memory.as_fd()],
                            _ => vec![log.as_fd()],
                        },
                        _ if dice.below(10) == 0 => vec![plain.as_fd(), pipes.0.as_fd(), fresh.as_fd()],
                        _ => Vec::new(),
                    };
                    let flags = if dice.below(4) == 0 { 8 } else { 0 };
                    let bytes = message(request, flags, &body);
                    if dice.below(20) == 0 {
                        let cut = dice.below(bytes.len() as u64) as usize;
                        let _ = send(&machine.socket, &bytes[..cut.max(1)], &fds);
                    } else {
                        let _ = send(&machine.socket, &bytes, &fds);
                    }
                }
                2 => while dice.below(2) == 0 && theirs::answer(&machine.socket).is_some() {},
                // The guest's memory.
                3..=6 if is_packed => {
                    let ring = dice.pick(&[RECEIVE_RINGS, SEND_RINGS]);
                    scribble(&machine, &mut dice, ring, size);
                }
                3 | 4 => {
                    for _ in 0..dice.below(12) {
                        let ring = dice.pick(&[RECEIVE_RINGS, SEND_RINGS]);
                        match dice.below(4) {
                            0 => {
                                let near = machine
                                    .half(ring[2] + 2)
                                    .wrapping_add(dice.below(u64::from(size) + u64::from(dice.0 & 31 == 0)) as u16);
                                machine.write(ring[1] + 2, &near.to_le_bytes());
                            }
                            1 => machine.write(
                                ring[1] + 4 + 2 * dice.below(u64::from(size)),
                                &(dice.below(u64::from(size) + 1) as u16).to_le_bytes(),
                            ),
                            2 => machine.describe(
                                ring[0],
                                dice.below(u64::from(size)) as u16,
                                if dice.below(30) == 0 {
                                    dice.number()
                                } else {
                                    theirs::GUEST + dice.below(theirs::LEN - 80_000)
                                },
                                dice.pick(&[0, 1, 12, 16, 64, 1500, 4096, 70_000]),
                                dice.pick(&[0, 0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7]),
                                dice.below(u64::from(size) + 1) as u16,
                            ),
                            _ => machine.write(
                                ring[2] + 2 * dice.below(4 + 4 * u64::from(size)),
                                &(dice.roll() as u16).to_le_bytes(),
                            ),
                        }
                    }
                }
                5 => {
                    _ = machine.send_with(
                        &[dice.roll().to_le_bytes(), dice.roll().to_le_bytes()].concat()[..12],
                        &frame(OTHER, US, dice.below(50) as usize),
                    )
                }
                6 => _ = machine.send(&frame(OTHER, US, dice.below(50) as usize)),
                7 => {
                    for _ in 0..dice.below(20) {
                        let _ = net.others[0].send(US, &frame(US, OTHER, dice.below(50) as usize));
                    }
                    net.others[0].flush();
                }
                8 => {
                    let bytes = [
                        &[dice.pick(&[0, 1, 255]), dice.pick(&[0, 1, 4, 5, 0x81, 9])][..],
                        &dice.roll().to_le_bytes(),
                        &frame(US, OTHER, dice.below(50) as usize),
                    ]
                    .concat();
                    if let Ok(room) = net.others[0].draft(US, bytes.len()) {
                        room.copy_from_slice(&bytes);
                        net.others[0].post(US, bytes.len(), true);
                        net.others[0].flush();
                    }
                }
                9 => {
                    let node = net.node.as_mut().unwrap();
                    let _ = node.arm();
                    node.wake();
                    node.tick(Instant::now());
                }
                // A death, or a handover, perhaps with a liar's text.
                10 if dice.below(4) == 0 => {
                    let parts = net.guest().front_end.is_some().then(|| net.parts());
                    let mut node = net.node.take().unwrap();
                    let places = dice.below(30) as u32;
                    if dice.below(2) == 0 {
                        deaths += u64::from(lives_for(places, || {
                            (0..3).for_each(|_| turn_of(&mut node, &mut net.known));
                        }));
                        drop(node);
                    } else {
                        node.finish();
                        drop(node);
                    }
                    let mut node = net.worker();
                    if let Some(mut parts) = parts {
                        if dice.below(3) == 0 {
                            let mut bytes = parts.text.into_bytes();
                            for _ in 0..dice.below(4) {
                                let at = dice.below(bytes.len() as u64) as usize;
                                if bytes[at].is_ascii_digit() {
                                    bytes[at] = b'0' + dice.below(10) as u8;
                                }
                            }
                            parts.text = String::from_utf8(bytes).unwrap();
                        }
                        match node.endpoint.go_on(parts) {
                            Ok(()) => went_on += 1,
                            Err(_) => refused += 1,
                        }
                    }
                    net.node = Some(node);
                }
                11 if dice.below(60) == 0 => {
                    rustix::fs::ftruncate(&machine.memory, 0).unwrap();
                    net.settle();
                    rustix::fs::ftruncate(&machine.memory, theirs::LEN).unwrap();
                }
                11 if dice.below(60) == 0 => {
                    rustix::fs::ftruncate(&log, 0).unwrap();
                    (0..dice.below(70)).for_each(|_| net.turn());
                    rustix::fs::ftruncate(&log, 1 << 17).unwrap();
                }
                12 if dice.below(20) == 0 => {
                    let path = net.folder.path().join("vm.sock");
                    drop(connect(&path));
                }
                _ => net.turn(),
            }
            net.turn();
            if before.elapsed() > slowest {
                slowest = before.elapsed();
                println!("{what} took {slowest:?}");
            }
            if dice.below(30) == 0 {
                crossed += received(&mut net.others[0]).len();
            }
            ran += u64::from(net.guest().is_running());
        }
        drop((machine, second));
        await_nobody(&mut net);
        let mut honest = net.machine(ALL, 64);
        assert!(net.guest().is_running(), "round {rounds}: {:?}", trouble(&mut net));
        net.settle();
        received(&mut net.others[0]);
        honest.receive();
        assert!(honest.send(&frame(OTHER, US, 1)));
        net.others[0].send(US, &frame(US, OTHER, 2)).unwrap();
        net.others[0].flush();
        net.settle();
        // F18: frames of the machine before may come only now.
        assert_eq!(received(&mut net.others[0]).last(), Some(&frame(OTHER, US, 1)), "round {rounds}");
        assert_eq!(honest.receive(), [frame(US, OTHER, 2)], "round {rounds}");
        let node = net.node.as_mut().unwrap();
        let _ = node.arm();
        // The sending ring's kick of above may be left.
        let _ = is_readable(node.source().unwrap());
        node.wake();
        let _ = node.arm();
        assert!(!is_readable(node.source().unwrap()), "round {rounds}: it never sleeps again");
        drop((net, honest));
        if std::env::var("TASUKI_ATTACK_SECONDS").is_ok() {
            // It runs by itself.
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.contains("memfd:machine"), "round {rounds}: a mapping is left");
        }
    }
    println!(
        "{seconds_of} starts of a second machine, {swaps} swaps; {rounds} rounds, {ran} steps with a running device, {crossed} frames, {deaths} deaths, {went_on} went on, {refused} refused, slowest step {slowest:?}"
    );
}

/// Random traffic of several nodes, both ways, with broadcasts, segments that are cut, a guest that is short of
/// buffers, and random deaths and handovers: each frame exactly once and in order.
#[test]
#[allow(clippy::cast_possible_truncation, reason = "dice")]
fn fuzz_exactly_once() {
    const NODES: u16 = 4;
    let seconds = std::env::var("TASUKI_ATTACK_SECONDS").ok().and_then(|it| it.parse().ok()).unwrap_or(3);
    let seed: u64 = std::env::var("ATTACK_SEED").ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (seed << 7));
    let mut migrations = 0;
    let (mut rounds, mut deaths, mut handovers, mut frames, mut skipped, mut cuts, mut restarts) =
        (0, 0, 0, 0, 0, 0, 0);
    let mut reconnects = 0;
    while Instant::now() < until {
        rounds += 1;
        let begun = Instant::now();
        let mut net = Net::new(NODES);
        let features = dice.pick(&[
            ALL,
            PLAIN,
            VERSION_1,
            EVENT_IDX | PROTOCOL | VERSION_1 | MRG_RXBUF,
            ALL | PACKED,
            ALL | PACKED | IN_ORDER,
            PLAIN | PACKED,
            PLAIN | PACKED | IN_ORDER,
        ]);
        let is_packed = features & PACKED != 0;
        let size = dice.pick(if is_packed { &[64, 77, 128] } else { &[64, 128] });
        let mut machine = net.machine(features, size);
        if (is_packed || features & INDIRECT != 0) && dice.below(2) == 0 {
            machine.pieces = Some(dice.pick(&[100, 500, 2000]));
        }
        let path = net.folder.path().join("vm.sock");
        // The log of a migration that has begun, and a first copy of the memory; the machine before.
        let mut log: Option<(OwnedFd, Vec<u8>)> = None;
        let mut source: Option<Machine> = None;
        // Where the rings stand, as far as QEMU knows.
        let mut stated = [machine.start_of_ring(); 2];
        let mut number = 0_usize;
        // What happened to the worker and the machine, and behind which frame.
        let mut events: Vec<(usize, String)> = Vec::new();
        // What each node must get of the guest's, and what the guest must get of each node.
        let mut to_nodes: Vec<Vec<Vec<u8>>> = vec![Vec::new(); NODES.into()];
        let mut to_guest: Vec<Vec<Vec<u8>>> = vec![Vec::new(); NODES.into()];
        let mut at_nodes = to_nodes.clone();
        let mut at_guest = to_guest.clone();
        let mut lost = 0;
        let short = |to: u16, from: u16, number: usize| {
            let mut frame = frame(to, from, 5 * (number / 5) + number % 3);
            frame[14..22].copy_from_slice(&number.to_le_bytes());
            frame
        };
        for _ in 0..30 + dice.below(60) {
            match dice.below(6) {
                0 | 1 => {
                    for _ in 0..dice.below(8) {
                        number += 1;
                        let to = 1 + dice.below(3) as u16;
                        let mut it = short(to, US, number);
                        let all = dice.below(4) == 0;
                        if all {
                            it[..6].fill(0xff);
                        }
                        if !machine.send(&it) {
                            break;
                        }
                        (1..NODES)
                            .filter(|node| all || *node == to)
                            .for_each(|node| to_nodes[usize::from(node)].push(it.clone()));
                    }
                }
                2 | 3 => {
                    let from = 1 + dice.below(3) as u16;
                    for _ in 0..dice.below(8) {
                        number += 1;
                        let other = &mut net.others[usize::from(from) - 1];
                        if dice.below(4) == 0 {
                            let count = 1 + dice.below(12) as usize;
                            let payload: Vec<u8> = (0..count * 100).map(|i| (i + number) as u8).collect();
                            let (offload, segment) = segment(US, from, 100, &payload);
                            let len = HEADER_LEN + segment.len();
                            let Ok(room) = other.draft(US, len) else { break };
                            room.copy_from_slice(&[offload.as_bytes(), &segment].concat());
                            other.post(US, len, true);
                            cuts += 1;
                            finish(&offload, &mut segment.clone(), |front, back| {
                                to_guest[usize::from(from)].push([front, back].concat())
                            })
                            .unwrap();
                        } else {
                            let mut it = short(US, from, number);
                            if features & MRG_RXBUF == 0 {
                                it.truncate(1500);
                            }
                            if other.send(US, &it).is_err() {
                                break;
                            }
                            to_guest[usize::from(from)].push(it);
                        }
                    }
                    net.others[usize::from(from) - 1].flush();
                }
                4 => {
                    for it in machine.receive() {
                        at_guest[usize::from(it[11])].push(it);
                    }
                    for node in 1..NODES {
                        at_nodes[usize::from(node)].extend(received(&mut net.others[usize::from(node) - 1]));
                    }
                }
                _ => {
                    let parts = net.parts();
                    net.known = None;
                    let mut node = net.node.take().unwrap();
                    let places = dice.below(40) as u32;
                    let was_killed = lives_for(places, || {
                        (0..1 + places % 4).for_each(|_| turn_of(&mut node, &mut net.known));
                    });
                    deaths += u32::from(was_killed);
                    events.push((number, format!("killed: {was_killed}, place {places}")));
                    if !was_killed && dice.below(2) == 0 {
                        handovers += 1;
                        node.finish();
                    }
                    // The last turn may drop, too.
                    lost += node.dropped.sum();
                    drop(node);
                    let parts = net.known.take().unwrap_or(parts);
                    net.replace(parts);
                }
            }
            if dice.below(3) == 0 {
                net.turn();
            }
            if log.is_none() && features & PROTOCOL != 0 && dice.below(20) == 0 {
                events.push((number, "log".to_owned()));
                let memory = machine.log(migration::LOG_LEN, &mut || net.turn());
                log = Some((memory, machine.read(0, theirs::LEN as usize)));
            } else if dice.below(8) == 0
                && let Some((log, mut copy)) = log.take()
            {
                migrations += 1;
                events.push((number, "migrates".to_owned()));
                drop(source.take());
                net.settle();
                let mut other = Machine::connect(&path, features, size, &mut || net.turn());
                let bases = machine.stop(&mut || net.turn());
                for page in machine.pages(&log) {
                    let at = 4096 * page as usize;
                    copy[at..at + 4096].copy_from_slice(&machine.read(4096 * page, 4096));
                }
                assert!(
                    copy == machine.read(0, theirs::LEN as usize),
                    "round {rounds}, seed {seed}: a page is missing"
                );
                assert_eq!(rustix::io::pwrite(&other.memory, &copy, 0), Ok(copy.len()));
                other.copy(&machine, []);
                other.begin(bases, &mut || net.turn());
                stated = bases;
                net.turn();
                net.turn();
                assert!(net.guest().is_running(), "round {rounds}, seed {seed}: {:?}", trouble(&mut net));
                source = Some(std::mem::replace(&mut machine, other)).filter(|_| dice.below(2) == 0);
            }
            // The front end stops and starts the sending ring, and the daemon hears of it.
            if dice.below(40) == 0 {
                restarts += 1;
                events.push((number, "starts anew".to_owned()));
                let base = machine.ask(11, &state(1, 0), &mut || net.turn()) >> 32;
                assert!(send(&machine.socket, &message(10, 0, &state(1, base as u32)), &[]));
                assert!(send(&machine.socket, &message(12, 0, &1_u64.to_ne_bytes()), &[machine.kicks[1].as_fd()]));
                stated[1] = base as u16;
                net.turn();
                net.turn();
            }
            // The connection is cut, and the front end connects again.
            if log.is_none() && source.is_none() && dice.below(30) == 0 {
                reconnects += 1;
                events.push((number, "is cut".to_owned()));
                assert!(send(&machine.socket, &message(99, 0, &[]), &[]));
                await_nobody(&mut net);
                if !is_packed {
                    stated = [theirs::RECEIVE, theirs::SEND].map(|queue| machine.completed(queue));
                }
                machine.connect_again_at(&path, stated, &mut || net.turn());
                net.settle();
                // Frames that waited for the guest.
                lost += net.node.as_ref().unwrap().dropped.sum();
                assert!(net.guest().is_running(), "round {rounds}, seed {seed}: {:?}", trouble(&mut net));
            }
        }
        let steps = begun.elapsed();
        if steps > Duration::from_secs(1) {
            println!("round {rounds} took {steps:?}");
        }
        let start = Instant::now();
        let count = |frames: &[Vec<Vec<u8>>]| frames.iter().map(Vec::len).sum::<usize>();
        // A busy machine gives the test less of the time.
        let is_all =
            |at_nodes: &[_], at_guest: &[_]| count(at_nodes) == count(&to_nodes) && count(at_guest) == count(&to_guest);
        while start.elapsed() < Duration::from_millis(30)
            || lost == 0 && !is_all(&at_nodes, &at_guest) && start.elapsed() < Duration::from_secs(5)
        {
            net.turn();
            for it in machine.receive() {
                at_guest[usize::from(it[11])].push(it);
            }
            for node in 1..NODES {
                at_nodes[usize::from(node)].extend(received(&mut net.others[usize::from(node) - 1]));
            }
        }
        if start.elapsed() > Duration::from_secs(1) {
            println!("the end of round {rounds} took {:?}", start.elapsed());
        }
        lost += net.node.as_ref().unwrap().dropped.sum();
        frames += number;
        if lost > 0 {
            skipped += 1;
            // Not twice and in order, even so.
            for (came, sent) in at_nodes.iter().zip(&to_nodes).chain(at_guest.iter().zip(&to_guest)) {
                let mut rest = sent.iter();
                assert!(came.iter().all(|it| rest.any(|sent| sent == it)), "round {rounds}, {lost} lost");
            }
            continue;
        }
        assert!(
            at_nodes == to_nodes,
            "round {rounds}, seed {seed}: {:?} of {:?} at the nodes",
            at_nodes.iter().map(Vec::len).collect::<Vec<_>>(),
            to_nodes.iter().map(Vec::len).collect::<Vec<_>>()
        );
        for (came, sent) in at_nodes.iter().zip(&to_nodes).chain(at_guest.iter().zip(&to_guest)) {
            if came != sent {
                let number = |it: &Vec<u8>| usize::from_le_bytes(it[14..22].try_into().unwrap());
                println!(
                    "came {:?}, sent {:?}",
                    came.iter().map(number).collect::<Vec<_>>(),
                    sent.iter().map(number).collect::<Vec<_>>()
                );
                println!("{events:?}, features {features:x}, pieces {:?}", machine.pieces);
            }
        }
        assert!(
            at_guest == to_guest,
            "round {rounds}, seed {seed}: {:?} of {:?} at the guest",
            at_guest.iter().map(Vec::len).collect::<Vec<_>>(),
            to_guest.iter().map(Vec::len).collect::<Vec<_>>()
        );
    }
    println!(
        "{rounds} rounds ({skipped} with drops), {frames} frames, {cuts} segments, {deaths} deaths, {handovers} handovers, {restarts} restarts, {migrations} migrations, {reconnects} cut connections"
    );
}

/// One ring is stopped and started again; the other goes on. Then an ordinary upgrade.
#[test]
fn a_ring_keeps_its_place_when_the_other_is_started_again() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    for number in 0..5 {
        net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
    }
    net.others[0].flush();
    net.settle();
    assert_eq!(machine.receive().len(), 5);
    let shown = machine.half(0x4002);
    let base = machine.ask(11, &state(1, 0), &mut || net.turn()) >> 32;
    assert_eq!(base, 0);
    assert!(send(&machine.socket, &message(10, 0, &state(1, 0)), &[]));
    assert!(send(&machine.socket, &message(12, 0, &1_u64.to_ne_bytes()), &[machine.kicks[1].as_fd()]));
    net.settle();
    let parts = net.parts();
    net.node.as_mut().unwrap().finish();
    net.replace(parts);
    assert_eq!(machine.half(0x4002), shown, "the used index of the ring that went on");
}

/// Frames come between the start of the first ring and that of the second, as in any handshake.
#[test]
fn a_ring_keeps_its_place_when_the_other_is_started_later() {
    let mut net = Net::new(2);
    let machine = net.machine(VERSION_1 | MRG_RXBUF, 64);
    // The front end stops both rings, and starts the second after frames came on the first.
    for ring in 0..2 {
        machine.ask(11, &state(ring, 0), &mut || net.turn());
    }
    assert!(send(&machine.socket, &message(12, 0, &0_u64.to_ne_bytes()), &[machine.kicks[0].as_fd()]));
    net.settle();
    for number in 0..5 {
        net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
    }
    net.others[0].flush();
    net.settle();
    let shown = machine.half(0x4002);
    assert!(shown >= 5);
    assert!(send(&machine.socket, &message(12, 0, &1_u64.to_ne_bytes()), &[machine.kicks[1].as_fd()]));
    net.settle();
    let parts = net.parts();
    net.node.as_mut().unwrap().finish();
    net.replace(parts);
    assert_eq!(machine.half(0x4002), shown, "the used index of the first ring");
}

/// The rest of a message comes while the worker prepares its handover.
#[test]
fn a_message_that_ends_in_the_last_turn_costs_no_place() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    for number in 0..5 {
        assert!(machine.send(&frame(OTHER, US, number)));
    }
    net.settle();
    assert_eq!((received(&mut net.others[0]).len(), machine.half(0xc002)), (5, 5));
    let call = theirs::eventfd();
    let bytes = theirs::message(13, 0, &0_u64.to_ne_bytes());
    assert!(theirs::send(&machine.socket, &bytes[..6], &[call.as_fd()]));
    net.turn();
    assert!(theirs::send(&machine.socket, &bytes[6..], &[]));
    net.node.as_mut().unwrap().finish();
    let parts = net.parts();
    net.replace(parts);
    let shown = machine.half(0xc002);
    net.settle();
    assert_eq!(
        (shown, received(&mut net.others[0]).len()),
        (5, 0),
        "used index that the successor stored; frames that came again"
    );
}
