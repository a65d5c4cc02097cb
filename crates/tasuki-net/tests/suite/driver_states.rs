//! Failing steps of all drivers, with a card that only remembers writes: what a driver touched, who has the slots
//! then, and whether a fresh start recovers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tasuki_net::nic::bus::{BusError, Iova};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::rtl8139::Rtl8139;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{DriverState, Failed, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::{Burst, Frame};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::{Region, Span};
use zerocopy::FromBytes;

use crate::stub::bus::{Answers, Stub};

/// Behaviour of a kind of card.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Words of its configuration space; all others are 0.
    pub config: &'static [(u16, u32)],
    /// Values of registers before they are written.
    fresh: &'static [(u32, u32)],
    /// Value of all other registers.
    rest: u32,
    /// Bits that a register clears as soon as they are written.
    done: fn(offset: u32) -> u32,
    /// A register value that keeps `park` from finishing.
    stuck: Option<(u32, u32)>,
}

/// A card that remembers writes.
#[derive(Debug)]
struct Echo {
    kind: Kind,
    words: HashMap<u32, u32>,
    config: HashMap<u16, u32>,
    /// A register that always reads as this value.
    stuck: Option<(u32, u32)>,
    gone: bool,
    mapped: Vec<(Iova, usize)>,
    /// Number of accesses other than reads.
    touched: u32,
}

type EchoBus = Stub<RefCell<Echo>>;

impl EchoBus {
    fn new(kind: Kind) -> Self {
        Stub(Rc::new(RefCell::new(Echo {
            kind,
            words: kind.fresh.iter().copied().collect(),
            config: kind.config.iter().copied().collect(),
            stuck: None,
            gone: false,
            mapped: Vec::new(),
            touched: 0,
        })))
    }

    fn touched(&self) -> u32 {
        self.0.borrow().touched
    }
}

impl Answers for RefCell<Echo> {
    fn config(&self, offset: u16) -> u32 {
        self.borrow().config.get(&offset).copied().unwrap_or(0)
    }

    fn read(&self, offset: u32) -> u32 {
        let echo = self.borrow();
        match echo.stuck {
            _ if echo.gone => u32::MAX,
            Some((stuck, value)) if stuck == offset => value,
            _ => echo.words.get(&offset).map_or(echo.kind.rest, |word| word & !(echo.kind.done)(offset)),
        }
    }

    fn write(&self, offset: u32, value: u32) {
        self.touch();
        let mut echo = self.borrow_mut();
        if !echo.gone {
            echo.words.insert(offset, value);
        }
    }

    fn touch(&self) {
        self.borrow_mut().touched += 1;
    }

    fn map(&self, at: Iova, len: usize) -> Result<(), BusError> {
        let end = at + len as u64;
        // Like a real IOMMU: mapped addresses cannot be mapped again.
        if self.borrow().mapped.iter().any(|&(other, len)| at < other + len as u64 && other < end) {
            return Err(BusError::Dma { at, len, why: "the device has memory there already".to_owned() });
        }
        self.touch();
        self.borrow_mut().mapped.push((at, len));
        Ok(())
    }

    fn unmap(&self, at: Iova, len: usize) -> Result<(), BusError> {
        self.touch();
        let mut echo = self.borrow_mut();
        let before = echo.mapped.len();
        echo.mapped.retain(|mapped| *mapped != (at, len));
        match echo.mapped.len() < before {
            true => Ok(()),
            false => Err(BusError::Dma { at, len, why: "nothing is mapped there".to_owned() }),
        }
    }
}

/// An 82574L: link up, the EEPROM read, an address.
const E1000E: Kind = Kind {
    config: &[(0x00, 0x10d3_8086)],
    fresh: &[(0x8, 0x83), (0x10, 1 << 9), (0x5400, 0x1200_5452), (0x5404, 0x8000_5734)],
    rest: 0,
    done: |offset| if offset == 0 { 1 << 26 } else { 0 },
    stuck: None,
};

/// An RTL8139C+: identity, revision, BAR 1. Its units are off as soon as the driver asks, or stay on.
pub const RTL8139: Kind = Kind {
    config: &[(0x00, 0x8139_10ec), (0x08, 0x20), (0x14, 0xf000_0000)],
    fresh: &[(0x00, 0x1200_5452), (0x04, 0x5734)],
    rest: 0,
    done: |offset| match offset {
        0x37 => 1 << 4,
        // A dump of its counters.
        0x10 => 1 << 3,
        _ => 0,
    },
    stuck: Some((0x37, 0x0c)),
};

/// A virtio network device: identity, capabilities, and the structures one behind the other; or a queue that is not
/// reset.
pub const VIRTIO: Kind = Kind {
    config: &[
        (0x00, 0x1041_1af4),
        (0x04, 1 << 20),
        (0x34, 0x40),
        (0x40, 0x0110_5009),
        (0x4c, 0x800),
        (0x50, 0x0214_6409),
        (0x58, 0x2000),
        (0x5c, 0x0100_0000),
        (0x60, 4),
        (0x64, 0x0410_0009),
        (0x6c, 0x1000),
        (0x70, 0x1000),
        (0x10, 0xf000_0000),
    ],
    // No queue for commands: none would be answered.
    fresh: &[(0x04, 1 << 5 | 1 << 16 | 1 << 8 | 1), (0x12, 3), (0x18, 256), (0x1000, 0x5452), (0x1004, 0x5734)],
    rest: 0,
    done: |offset| match offset {
        0x3a => 1,
        // A queue that is reset is not enabled.
        0x1c => 1,
        _ => 0,
    },
    stuck: Some((0x3a, 1)),
};

const SLOTS: Geometry = Geometry { slot_len: 4096, count: 64 };

fn options() -> NicOptions {
    NicOptions { ring: 8, ..NicOptions::default() }
}

fn memory() -> NicMemory {
    NicMemory::create(SLOTS, 8192, Iova(1 << 32)).expect("a little memory")
}

/// Returns all words of the rings, through a mapping of our own.
fn rings(memory: &NicMemory) -> Span<AtomicU64> {
    let copy = memory.rings().fd().try_clone_to_owned().expect("a descriptor is free");
    Region::adopt(copy).expect("memory of ours").span(0, memory.rings().len() / 8).expect("all of it")
}

/// Starts a card, and queues frames on their way out.
fn started<N: Nic<Bus = EchoBus>>(bus: EchoBus, memory: NicMemory) -> N {
    let arena = memory.arena().clone();
    let mut nic = N::start(bus, memory, &options()).expect("the card starts");
    let mut burst: Burst = (0..3).map_while(|_| arena.take()).map(|slot| Frame { slot, len: 60 }).collect();
    assert_eq!(nic.transmit(&mut burst).expect("the card works"), 3);
    nic
}

/// Asserts that only the card has slots, and no more than its rings hold.
#[track_caller]
fn accounted(memory: &NicMemory) {
    let census = memory.arena().census();
    assert_eq!((census.owner, census.free + census.peer), (0, SLOTS.count), "{census:?}");
    assert!(census.peer <= 16, "{census:?}");
}

fn starts_anew<N: Nic<Bus = EchoBus>>(Failed { bus, memory, .. }: Failed<EchoBus>) {
    accounted(&memory);
    let arena = memory.arena().clone();
    let nic = started::<N>(bus.clone(), memory);
    assert_eq!(bus.0.borrow().mapped.len(), 2, "rings and frames");
    let (_, memory, driver_state) = nic.park().expect("the card stops");
    accounted(&memory);
    assert_eq!(arena.census().peer as usize, driver_state.slots().count(), "what was lent before came back");
}

fn a_wrong_driver_state_touches_nothing<N: Nic<Bus = EchoBus>>(kind: Kind) {
    let bus = EchoBus::new(kind);
    let (mut bus, mut memory, driver_state) = started::<N>(bus, memory()).park().expect("the card stops");
    let words = rings(&memory);
    let all = || words.iter().map(|word| word.load(Relaxed)).collect::<Vec<_>>();
    let (before, touched, census) = (all(), bus.touched(), memory.arena().census());
    for at in 0..N::DriverState::LEN {
        let mut bytes = driver_state.bytes().to_vec();
        bytes[at] ^= 0x40;
        let wrong = N::DriverState::read_from_bytes(&bytes).expect("as many bytes");
        // Counters, and values that a driver only carries on, may be anything; they are tested below.
        if wrong.check(&memory.layout()).is_ok() {
            continue;
        }
        let Failed { error, bus: way, memory: back } =
            N::resume(bus, memory, &wrong).err().expect("a wrong driver state");
        assert!(
            matches!(error, NicError::OtherDriverState { .. } | NicError::BrokenDriverState { .. }),
            "byte {at}: {error}"
        );
        (bus, memory) = (way, back);
        assert_eq!(bus.touched(), touched, "byte {at}: the card was touched ({error})");
        assert_eq!(memory.arena().census(), census, "byte {at}");
    }
    assert!(all() == before, "the rings have changed");
    // Memory to which the driver state does not belong.
    let (back, other) = match N::resume(bus, self::memory(), &driver_state) {
        Err(Failed { error: NicError::BrokenDriverState { .. }, bus, memory }) => (bus, memory),
        other => panic!("{:?}", other.err()),
    };
    assert_eq!((back.touched(), other.arena().census().free), (touched, SLOTS.count));
    N::resume(back, memory, &driver_state).expect("the right driver state of the right memory");
}

/// Flipping any one bit of a driver state is refused or harmless. A driver that resumes with it does not panic or
/// reach a foreign slot, and whatever happens, the card can be started anew.
fn flipped_bits_are_refused_or_harmless<N: Nic<Bus = EchoBus>>(kind: Kind) {
    let (mut refused, mut harmless) = (0, 0);
    // Every bit of the first bytes, and one bit of each nonzero byte of the rest.
    let mut bit = 0;
    let mut parked = None;
    while bit < 8 * N::DriverState::LEN {
        let (bus, memory, driver_state) =
            parked.take().unwrap_or_else(|| started::<N>(EchoBus::new(kind), memory()).park().expect("the card stops"));
        let mut bytes = driver_state.bytes().to_vec();
        let step = if bit < 8 * 128 { 1 } else { 83 };
        bytes[bit / 8] ^= 1 << (bit % 8);
        bit += step;
        let wrong = N::DriverState::read_from_bytes(&bytes).expect("as many bytes");
        match N::resume(bus, memory, &wrong) {
            Err(Failed { bus, memory, .. }) => {
                refused += 1;
                accounted(&memory);
                parked = Some((bus, memory, driver_state));
            }
            Ok(mut nic) => {
                harmless += 1;
                let mut burst = Burst::new();
                let _ = nic.receive(&mut burst);
                let _ = nic.transmit(&mut burst);
                let _ = nic.arm();
                nic.statistics();
                burst.clear();
                match nic.park() {
                    Ok((_, memory, _)) => accounted(&memory),
                    Err(failed) => starts_anew::<N>(failed),
                }
            }
        }
    }
    assert!(refused > 100 && harmless > 10, "{refused} refused, {harmless} harmless");
}

fn a_card_that_fails_can_be_started_anew<N: Nic<Bus = EchoBus>>(kind: Kind) {
    let gone = |bus: &EchoBus, is| bus.0.borrow_mut().gone = is;
    let stick = |bus: &EchoBus, stuck| bus.0.borrow_mut().stuck = stuck;
    // Gone while it is started, parked, and resumed. It comes back, like a model that is served again.
    let bus = EchoBus::new(kind);
    gone(&bus, true);
    let failed = N::start(bus.clone(), memory(), &options()).err().expect("a card that is gone");
    assert!(matches!(failed.error, NicError::Gone), "{failed}");
    assert!(bus.0.borrow().mapped.is_empty(), "what could not be started reaches nothing");
    gone(&bus, false);
    starts_anew::<N>(failed);
    let bus = EchoBus::new(kind);
    let nic = started::<N>(bus.clone(), memory());
    gone(&bus, true);
    let failed = nic.park().err().expect("a card that is gone");
    assert!(matches!(failed.error, NicError::Gone), "{failed}");
    gone(&bus, false);
    starts_anew::<N>(failed);
    let bus = EchoBus::new(kind);
    let (_, memory, driver_state) = started::<N>(bus.clone(), self::memory()).park().expect("the card stops");
    gone(&bus, true);
    let failed = N::resume(bus.clone(), memory, &driver_state).err().expect("a card that is gone");
    assert!(matches!(failed.error, NicError::Gone), "{failed}");
    gone(&bus, false);
    starts_anew::<N>(failed);
    // A card that does not obey.
    let Some(stuck) = kind.stuck else { return };
    let bus = EchoBus::new(kind);
    let nic = started::<N>(bus.clone(), self::memory());
    stick(&bus, Some(stuck));
    let failed = nic.park().err().expect("a card that does not stop");
    assert!(matches!(failed.error, NicError::Stuck { .. }), "{failed}");
    stick(&bus, None);
    starts_anew::<N>(failed);
}

fn a_card_that_is_another_is_refused_and_the_memory_still_good<N: Nic<Bus = EchoBus>>(kind: Kind) {
    let other = EchoBus::new(kind);
    other.0.borrow_mut().config.insert(0, 0x1533_8086);
    let Failed { error, bus, memory } = N::start(other, memory(), &options()).err().expect("another card");
    assert!(matches!(error, NicError::OtherCard { .. }), "{error}");
    assert_eq!((bus.touched(), memory.arena().census().free), (0, SLOTS.count));
    started::<N>(EchoBus::new(kind), memory);
}

#[test]
fn what_a_step_leaves_that_failed_half_way_a_start_gets_over() {
    // A virtio device that no longer takes an interrupt vector.
    let bus = EchoBus::new(VIRTIO);
    let (_, memory, driver_state) =
        started::<VirtioNet<EchoBus>>(bus.clone(), self::memory()).park().expect("the card stops");
    bus.0.borrow_mut().stuck = Some((0x1a, 0xffff));
    let failed = VirtioNet::resume(bus.clone(), memory, &driver_state).expect_err("no vector");
    assert!(matches!(failed.error, NicError::Absurd { .. }), "{failed}");
    bus.0.borrow_mut().stuck = None;
    starts_anew::<VirtioNet<EchoBus>>(failed);
    // A device that takes none when it is started: the driver keeps it from the memory.
    let bus = EchoBus::new(VIRTIO);
    bus.0.borrow_mut().stuck = Some((0x1a, 0));
    let failed = VirtioNet::start(bus.clone(), self::memory(), &options()).expect_err("no vector");
    assert!(bus.0.borrow().mapped.is_empty());
    bus.0.borrow_mut().stuck = None;
    starts_anew::<VirtioNet<EchoBus>>(failed);
}

macro_rules! of_each_driver {
    ($($driver:ident, $card:ident, $kind:ident;)*) => {
        $(mod $driver {
            use super::*;

            #[test]
            fn a_wrong_driver_state_touches_nothing() {
                super::a_wrong_driver_state_touches_nothing::<$card<EchoBus>>($kind);
            }
            #[test]
            fn flipped_bits_are_refused_or_harmless() {
                super::flipped_bits_are_refused_or_harmless::<$card<EchoBus>>($kind);
            }
            #[test]
            fn a_card_that_fails_can_be_started_anew() {
                super::a_card_that_fails_can_be_started_anew::<$card<EchoBus>>($kind);
            }
            #[test]
            fn a_card_that_is_another_is_refused_and_the_memory_still_good() {
                super::a_card_that_is_another_is_refused_and_the_memory_still_good::<$card<EchoBus>>($kind);
            }
        })*
    };
}

of_each_driver! {
    e1000e, E1000e, E1000E;
    rtl8139, Rtl8139, RTL8139;
    virtio_net, VirtioNet, VIRTIO;
}
