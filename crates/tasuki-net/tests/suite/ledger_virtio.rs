//! The ledger that a dead driver of a virtio network device leaves, step by step, and its use by a successor; the
//! test plays the device, well or badly.

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::ledger::again;
use crate::stub::virtio::{HEADER_LEN, MEMORY_AT, PLAIN, Play, RING_RESET, RINGS_LEN, RX, SLOTS, StubBus, TX};
use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::virtio_net::{VirtioNet, driver_state};
use tasuki_net::nic::{DriverState, How, InPlace, Nic, NicError, NicMemory, NicOptions, Parts, Repoint, Scrub};
use tasuki_net::port::{Armed, Burst, Frame, Port, Transactional};
use tasuki_shm::arena::Arena;
use tasuki_shm::region::{Region, Span};

type Card = VirtioNet<StubBus>;

/// Descriptors for eight frames.
const RING: u16 = 16;
const CHAINS: usize = 8;

/// A running device, and the means to prepare a successor.
struct Desk {
    play: Play,
    nic: Option<Card>,
    /// Arena of the running driver.
    arena: Arena,
    parts: Box<dyn Fn() -> NicMemory>,
}

fn options() -> NicOptions {
    NicOptions { ring: RING, ..NicOptions::default() }
}

fn start(features: u64) -> Desk {
    let (play, memory) = Play::new(features);
    let parts = again(&memory);
    let arena = memory.arena().clone();
    let nic = Card::start(play.bus(), memory, &options()).expect("a well-behaved device");
    Desk { play, nic: Some(nic), arena, parts }
}

impl Desk {
    fn nic(&mut self) -> &mut Card {
        self.nic.as_mut().expect("it runs")
    }

    fn prepared(&mut self) -> <Card as InPlace>::Prepared {
        let memory = (self.parts)();
        self.arena = memory.arena().clone();
        Card::prepare(self.play.bus(), memory).expect("it is ready")
    }

    fn pick_up(&mut self) -> Result<Card, NicError> {
        Card::pick_up(self.prepared()).map_err(NicError::from)
    }

    /// Ends the driver and lets a successor take over.
    fn takes_over(&mut self) {
        std::mem::forget(self.nic.take());
        self.nic = Some(self.pick_up().expect("the successor goes on"));
    }

    fn receive(&mut self, burst: &mut Burst) -> usize {
        self.nic().receive(burst).expect("the device works")
    }

    /// Returns the numbers of the received frames.
    fn numbers(&mut self) -> Vec<u64> {
        let mut burst = Burst::new();
        self.receive(&mut burst);
        burst.iter().map(number).collect()
    }

    fn send(&mut self, numbers: std::ops::Range<u64>) {
        let slots = numbers.map(|number| (self.arena.take().expect("a free slot"), number));
        let mut burst: Burst = slots
            .map(|(mut slot, number)| {
                slot.bytes_mut()[..24].fill(0);
                slot.bytes_mut()[16..24].copy_from_slice(&number.to_ne_bytes());
                Frame { slot, len: 60 }
            })
            .collect();
        self.nic().transmit(&mut burst).expect("the device works");
        assert!(burst.is_empty());
    }
}

fn number(frame: &Frame) -> u64 {
    u64::from_ne_bytes(frame.bytes()[16..24].try_into().expect("eight bytes"))
}

/// QEMU's default behind VFIO. The device would take our addresses for those of the machine's memory.
#[test]
fn a_device_that_reaches_memory_past_the_iommu_is_refused() {
    const ACCESS_PLATFORM: u64 = 1 << 33;
    let start = |features| {
        let (play, memory) = Play::new(features);
        play.device.is_behind_an_iommu.set(true);
        (Card::start(play.bus(), memory, &options()).map(drop), play)
    };
    let (started, play) = start(PLAIN);
    assert!(matches!(started.expect_err("a refusal").error, NicError::PastIommu));
    assert_eq!([RX, TX].map(|queue| play.device.queue(queue)), [None; 2]);
    start(PLAIN | ACCESS_PLATFORM).0.expect("a device behind the IOMMU");
}

#[test]
fn what_is_in_hand_comes_again_and_what_is_not_does_not() {
    let mut desk = start(PLAIN);
    (0..4).for_each(|number| assert!(desk.play.deliver(number)));
    let mut burst = Burst::new();
    assert_eq!(desk.receive(&mut burst), 4);
    // Two are handled, two are left in the burst.
    burst.drain(..2);
    assert_eq!(desk.receive(&mut burst), 0);
    std::mem::forget(burst);
    desk.takes_over();
    assert_eq!(desk.numbers(), [2, 3]);
    assert_eq!(desk.numbers(), [0; 0]);
    desk.takes_over();
    assert_eq!(desk.numbers(), [0; 0], "all were handled");
    assert_eq!(desk.play.chains(RX).len(), CHAINS, "and the device has all buffers again");
}

/// A frame is freed while an older one is pending: no frame is written to its slot before it is handled.
#[test]
fn a_frame_that_is_not_handled_is_not_overwritten() {
    for round in 0..20 {
        let mut desk = start(PLAIN);
        (0..round).for_each(|_| _ = desk.play.random(1));
        (0..4).for_each(|number| assert!(desk.play.deliver(number)));
        let mut burst = Burst::new();
        assert_eq!(desk.receive(&mut burst), 4);
        let held: Vec<_> = std::iter::from_fn(|| desk.arena.take()).collect();
        burst.retain(|frame| number(frame) == 2);
        assert_eq!(desk.receive(&mut burst), 0);
        while desk.play.deliver(9) {}
        std::mem::forget((burst, held));
        desk.takes_over();
        assert_eq!(desk.numbers()[..2], [2, 3]);
    }
}

#[test]
fn a_frame_that_was_changed_in_hand_comes_as_it_came() {
    let mut desk = start(PLAIN);
    for round in 0..200 {
        assert!(desk.play.deliver(round));
        let mut burst = Burst::new();
        while desk.receive(&mut burst) == 0 {}
        let [frame] = &mut burst[..] else { unreachable!("one came") };
        if round % 3 == 0 {
            desk.nic.as_mut().expect("it runs").save(frame);
        }
        frame.slot.bytes_mut().fill(7);
        if round % 3 == 0 {
            // A dead process has no handles; here the handle lives, and must not free the successor's slots.
            std::mem::forget(std::mem::take(&mut burst));
            desk.takes_over();
            assert_eq!(desk.receive(&mut burst), 1);
            assert_eq!(number(&burst[0]), round);
        }
        burst.clear();
        assert_eq!(desk.receive(&mut burst), 0);
    }
}

/// Returns the words of the ledger.
fn words(memory: &NicMemory) -> Span<AtomicU64> {
    let program_state = Region::adopt(memory.parts().expect("descriptors are free").ledger).expect("memory of ours");
    program_state.span(0, program_state.len() / 8).expect("all of it")
}

/// Indices of each queue's table in the ledger. A chain has four words: its slot, when it was posted, when it was
/// taken back, and bytes.
const TABLES: [usize; 2] = [1536, 2560];

/// Slots that a dead driver had posted and not committed are free, even after the index has gone on beyond the place
/// where they were posted (C3).
#[test]
fn what_was_posted_and_not_committed_is_free_for_good() {
    let mut desk = start(PLAIN);
    let program_state = words(&(desk.parts)());
    // No slot is left to receive into.
    let held: Vec<_> = std::iter::from_fn(|| desk.arena.take()).collect();
    (0..5).for_each(|number| assert!(desk.play.deliver(number)));
    let mut burst = Burst::new();
    assert_eq!(desk.receive(&mut burst), 5);
    assert_eq!(desk.nic().receive(&mut Burst::new()).expect("the device works"), 0);
    // As a driver leaves it that is killed while it posts.
    let table = &program_state[TABLES[0]..TABLES[0] + 4 * CHAINS];
    let free = table.as_chunks::<4>().0.iter().filter(|chain| chain[2].load(Relaxed) > 0);
    let count = (0..).zip(free).map(|(i, chain)| {
        chain[1].store(8 + (i + 2) % 5, Relaxed);
        chain[2].store(0, Relaxed);
    });
    assert_eq!(count.count(), 5);
    std::mem::forget((burst, held, desk.nic.take()));
    // Each successor has little to post, and is killed, too.
    for _ in 0..5 {
        desk.nic = Some(desk.pick_up().expect("what the one before left"));
        let mut slots: Vec<_> = std::iter::from_fn(|| desk.arena.take()).collect();
        drop(slots.pop());
        assert_eq!(desk.numbers(), [0; 0]);
        std::mem::forget((slots, desk.nic.take()));
    }
    desk.nic = Some(desk.pick_up().expect("what the one before left"));
    assert_eq!(desk.play.chains(RX).len(), CHAINS);
    (5..13).for_each(|number| assert!(desk.play.deliver(number)));
    assert_eq!(desk.numbers(), [5, 6, 7, 8, 9, 10, 11, 12]);
}

#[test]
fn a_successor_tells_the_device_what_the_dead_one_was_about_to() {
    let mut desk = start(PLAIN);
    let (_, [_, available, _]) = desk.play.device.queue(RX).expect("the queue is enabled");
    let memory = (desk.parts)();
    let word = memory.rings().span::<AtomicU32>(usize::try_from(available - MEMORY_AT.0).expect("an offset"), 1);
    let word = &word.expect("a word of the rings")[0];
    let shown = word.load(Acquire);
    assert_eq!(shown >> 16, 8);
    word.store(5 << 16, Relaxed);
    desk.takes_over();
    assert_eq!(word.load(Acquire) >> 16, 8);
}

#[test]
fn queues_that_the_dead_one_had_reset_are_there_again() {
    let mut desk = start(PLAIN | RING_RESET);
    let mut came = 0;
    for round in 0..20_u64 {
        let first = 3 * round;
        (first..first + 3).for_each(|number| assert!(desk.play.deliver(number)));
        desk.send(first..first + 3);
        // The driver parked, and the holder of its driver state is gone with it. The received frames are in the
        // rings, and so are those to send.
        let parked = desk.nic.take().expect("it runs").park().expect("it stops");
        assert!(!parked.2.is_kept());
        assert!(desk.play.device.queue(RX).is_none() && desk.play.device.queue(TX).is_none());
        std::mem::forget(parked);
        desk.nic = Some(desk.pick_up().expect("the successor goes on"));
        let sent: Vec<_> = desk.play.send().into_iter().map(|[_, _, number]| number).collect();
        assert_eq!(sent, [first, first + 1, first + 2], "once, in order");
        // In half of the rounds this driver ends before it has received them.
        if round % 2 == 0 {
            desk.takes_over();
        }
        for number in desk.numbers() {
            assert_eq!(number, came);
            came += 1;
        }
        assert_eq!(came, first + 3);
        assert_eq!(desk.numbers(), [0; 0]);
        assert_eq!(desk.play.chains(RX).len(), CHAINS);
        while !desk.play.chains(TX).is_empty() {
            assert!(desk.play.send().is_empty(), "nothing is sent twice");
        }
    }
}

/// Frames that had come when the driver was parked go to a later successor if the first dies before it has received
/// them (the driver state was used up).
#[test]
fn what_a_driver_state_says_is_in_the_ledger_as_soon_as_it_was_gone_on_with() {
    for features in [PLAIN, PLAIN | RING_RESET] {
        let mut desk = start(features);
        (0..5).for_each(|number| assert!(desk.play.deliver(number)));
        let (bus, memory, driver_state) = desk.nic.take().expect("it runs").park().expect("it stops");
        assert_eq!(driver_state.is_kept(), features == PLAIN);
        let nic = Card::resume(bus, memory, &driver_state).expect("it goes on");
        desk.nic = Some(nic);
        desk.takes_over();
        assert_eq!(desk.numbers(), [0, 1, 2, 3, 4]);
        // The same with a successor on a running device.
        (5..8).for_each(|number| assert!(desk.play.deliver(number)));
        let mut driver_state = driver_state::DriverState::blank();
        desk.nic().driver_state(&mut driver_state);
        assert!(driver_state.is_kept(), "the queues stay as they are, whether they can be reset or not");
        let prepared = desk.prepared();
        desk.nic = None;
        desk.nic = Some(Card::go_on(prepared, &driver_state).expect("it goes on"));
        desk.takes_over();
        assert_eq!(desk.numbers(), [5, 6, 7]);
    }
}

#[test]
fn who_sleeps_with_an_empty_ring_is_woken_all_the_same() {
    let mut desk = start(PLAIN);
    (0..8).for_each(|number| assert!(desk.play.deliver(number)));
    let mut burst = Burst::new();
    assert_eq!(desk.receive(&mut burst), 8);
    burst.clear();
    assert!(desk.play.chains(RX).is_empty());
    // Without another look.
    assert_eq!(desk.nic().arm().expect("the device works"), Armed::Idle);
    assert_eq!(desk.play.chains(RX).len(), CHAINS, "the device has buffers again");
}

#[test]
fn nobody_goes_on_where_nobody_drove() {
    let (play, memory) = Play::new(PLAIN);
    let prepared = Card::prepare(play.bus(), memory).expect("it is ready");
    let error = Card::pick_up(prepared).expect_err("no driver ever ran").error;
    assert!(matches!(error, NicError::BrokenDriverState { .. }), "{error}");
}

/// The device has changed its used ring since: a successor trusts nothing that its predecessor read there.
#[test]
fn a_successor_is_told_lies_and_finds_them() {
    // A chain that the device does not hold, one beyond the queue, one twice, wrong lengths, and more chains than it
    // held.
    let lies: [fn(&mut Play, u64); 5] = [
        |play, head| play.use_chain(RX, head + 1, 60 + HEADER_LEN),
        |play, _| play.use_chain(RX, 2 * CHAINS as u64, 60 + HEADER_LEN),
        |play, head| {
            play.use_chain(RX, head, 60 + HEADER_LEN);
            play.use_chain(RX, head, 60 + HEADER_LEN);
        },
        |play, head| play.use_chain(RX, head, 5000),
        |play, head| (0..9).for_each(|_| play.use_chain(RX, head, 60 + HEADER_LEN)),
    ];
    for lie in lies {
        let mut desk = start(PLAIN);
        let head = desk.play.chains(RX)[3];
        lie(&mut desk.play, head);
        desk.takes_over();
        let mut burst = Burst::new();
        let mut ask = || desk.nic.as_mut().expect("it runs").receive(&mut burst);
        let error = ask().and_then(|_| ask()).expect_err("a lie");
        assert!(matches!(error, NicError::Absurd { .. }), "{error}");
        assert!(burst.len() <= 1);
    }
}

/// The ledger's contents are claims (E2): after any change to it, it is refused, or a driver goes on that has each
/// slot once.
#[test]
fn a_ledger_that_was_changed_is_refused_or_harmless() {
    let (mut refused, mut harmless) = (0, 0);
    for word in (0..416).chain(TABLES.into_iter().flat_map(|at| at..at + 4 * CHAINS)) {
        for change in [1, 1 << 8, 1 << 31, 1 << 32, 1 << 63, u64::MAX] {
            let mut desk = start(PLAIN);
            let memory = (desk.parts)();
            desk.send(0..3);
            assert!(desk.play.deliver(0));
            words(&memory)[word].fetch_xor(change, Relaxed);
            std::mem::forget(desk.nic.take());
            match desk.pick_up() {
                Err(NicError::BrokenDriverState { .. } | NicError::OtherDriverState { .. } | NicError::Bus(_)) => {
                    refused += 1
                }
                Err(other) => panic!("word {word}, {change:#x}: {other}"),
                Ok(mut nic) => {
                    harmless += 1;
                    let mut burst = Burst::new();
                    let _ = nic.receive(&mut burst);
                    assert!(burst.iter().all(|frame| usize::from(frame.len) <= frame.slot.len()));
                    let _ = nic.transmit(&mut burst);
                    let _ = nic.arm();
                }
            }
        }
    }
    assert!(refused > 100 && harmless > 100, "{refused} refused, {harmless} harmless");
}

#[test]
fn what_cannot_be_pointed_elsewhere_says_so_and_is_not_touched() {
    let mut desk = start(PLAIN);
    let other = NicMemory::create(SLOTS, RINGS_LEN, Iova(2 << 32)).expect("a little memory");
    let failed = Card::prepare_rings(desk.play.bus(), other, &options(), How::Point, Iova(1 << 32))
        .expect_err("queues that cannot be reset");
    assert!(failed.error.to_string().contains("VIRTIO_F_RING_RESET"), "{failed}");
    assert_eq!(failed.memory.arena().census().free, SLOTS.count);
    desk.nic().quiesce(How::Point, |_| ());
    assert!(desk.nic().leave().is_err(), "it cannot be left either");
    desk.nic().go_back().expect("it runs");
    assert!(desk.play.deliver(0));
    assert_eq!(desk.numbers(), [0]);
}

/// A giver is killed while it releases the device, at each step: its successor drives the device with the giver's
/// rings, and no received frame is lost.
#[test]
fn a_device_that_was_being_left_is_taken_over() {
    for steps in 0..4 {
        let mut desk = start(PLAIN | RING_RESET);
        (0..3).for_each(|number| assert!(desk.play.deliver(number)));
        if steps > 0 {
            desk.nic().quiesce(How::Point, |_| ());
        }
        if steps > 1 {
            assert!(!desk.nic().leave().expect("it can be left"), "something has come");
        }
        if steps > 2 {
            assert_eq!(desk.numbers(), [0, 1, 2]);
            assert!(desk.nic().leave().expect("it can be left"));
        }
        desk.takes_over();
        assert_eq!(desk.numbers().len(), if steps > 2 { 0 } else { 3 });
        (3..8).for_each(|number| assert!(desk.play.deliver(number)));
        assert_eq!(desk.numbers(), [3, 4, 5, 6, 7]);
        assert_eq!(desk.numbers(), [0; 0]);
        assert_eq!(desk.play.chains(RX).len(), CHAINS);
    }
}

#[test]
fn frames_given_are_counted_over_all_drivers() {
    let mut desk = start(PLAIN);
    for round in 0..40 {
        assert!(desk.play.deliver(round));
        let mut burst = Burst::new();
        while desk.receive(&mut burst) == 0 {}
        desk.nic().transmit(&mut burst).expect("the device works");
        assert_eq!(desk.play.send().len(), 1);
        desk.takes_over();
        assert_eq!(desk.nic().given(), round + 1);
    }
    // Receiving a burst, and handling it, counts as a turn each time that something changes, and otherwise not.
    for number in [40, 41] {
        let turns = desk.nic().turns();
        assert!(desk.play.deliver(number));
        let mut burst = Burst::new();
        while desk.receive(&mut burst) == 0 {}
        assert_eq!(desk.nic().turns(), turns, "nothing is handled yet");
        burst.clear();
        assert_eq!(desk.receive(&mut burst), 0);
        assert_eq!(desk.nic().turns(), turns + 1, "it is handled, and a slot was posted besides");
        assert_eq!(desk.receive(&mut burst), 0);
        assert_eq!(desk.nic().turns(), turns + 1);
    }
}

/// A driver that keeps its memory clean leaves nothing of handled frames in it; another driver does
/// (`NicOptions::scrub`).
#[test]
fn memory_that_is_kept_clean_has_nothing_of_frames_that_were_handled() {
    const SECRET: u64 = 0x7e57_5ec2_e700_0000;
    for scrub in [false, true] {
        let (mut play, memory) = Play::new(PLAIN);
        let regions = memory.parts().map(|Parts { rings, frames, ledger }| [rings, frames, ledger]);
        let regions = regions.expect("descriptors are free").map(|fd| Region::adopt(fd).expect("memory of ours"));
        let mut nic = Card::start(play.bus(), memory, &NicOptions { scrub, ..options() }).expect("the device starts");
        let (mut delivered, mut back) = (0, 0);
        while back < 500 {
            while delivered < 500 && play.deliver(SECRET + delivered) {
                delivered += 1;
            }
            let mut burst = Burst::new();
            nic.receive(&mut burst).expect("the device works");
            // Some are sent back, with their saved part; others are dropped.
            burst.iter().for_each(|frame| nic.save(frame));
            back += burst.len();
            burst.truncate(20);
            nic.transmit(&mut burst).expect("the device works");
            burst.clear();
            play.send();
            if back == 100 {
                nic.wipe_free();
            }
        }
        nic.wipe_free();
        for _ in 0..1000 {
            if nic.wipe_rest() {
                break;
            }
            play.send();
        }
        let words = regions.iter().map(|region| region.span::<AtomicU64>(0, region.len() / 8).expect("all of it"));
        let left = words.map(|words| words.iter().filter(|word| word.load(Relaxed) & !0xffff == SECRET).count());
        assert_eq!(left.sum::<usize>() > 0, !scrub, "found, unless it was wiped");
    }
}
