//! Cards that return anything, and write anything to the rings' memory: the drivers fail with an error or go on;
//! they do not panic, and do not wait for ever.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::rtl8139::Rtl8139;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{Filter, Mac, Nic, NicMemory, NicOptions};
use tasuki_net::port::{Armed, Burst, Frame};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::{Region, Span};

use crate::driver_states::{RTL8139, VIRTIO};
use crate::stub::bus::{Answers, Stub};

/// A card with random answers.
struct Mad {
    /// State of a xorshift generator.
    state: u64,
    /// Values written to its registers, by BAR and offset.
    written: HashMap<u32, u32>,
    config: HashMap<u16, u32>,
    rings: Span<AtomicU64>,
    /// Number of reads, out of 16, that return the written value.
    sane: u64,
    /// Bits that its registers never have.
    never: fn(offset: u32) -> u32,
}

impl Mad {
    fn random(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn is_sane(&mut self) -> bool {
        self.random() % 16 < self.sane
    }

    /// Returns a random word, a small one more often.
    fn word(&mut self) -> u32 {
        let (value, kind) = (self.random(), self.random() % 4);
        #[expect(clippy::cast_possible_truncation, reason = "random bits")]
        let word = value as u32;
        match kind {
            0 => word,
            1 => word & 0xf,
            2 => word & 0xff,
            _ => u32::MAX,
        }
    }

    /// Writes to a random place in the rings, from time to time.
    fn scribble(&mut self) {
        if self.is_sane() {
            return;
        }
        let at = usize::try_from(self.random()).expect("64 bits") % self.rings.len();
        let word = u64::from(self.word()) | u64::from(self.word()) << 32;
        self.rings[at].store(word, Relaxed);
    }

    fn read(&mut self, offset: u32) -> u32 {
        self.scribble();
        match self.is_sane() {
            true => self.written.get(&offset).copied().unwrap_or(u32::MAX) & !(self.never)(offset),
            false => self.word() & !(self.never)(offset),
        }
    }
}

impl Mad {
    fn write(&mut self, offset: u32, value: u32) {
        self.scribble();
        self.written.insert(offset, value);
    }
}

impl Answers for RefCell<Mad> {
    fn config(&self, offset: u16) -> u32 {
        self.borrow().config.get(&offset).copied().unwrap_or(0)
    }

    fn read(&self, offset: u32) -> u32 {
        self.borrow_mut().read(offset)
    }

    fn write(&self, offset: u32, value: u32) {
        self.borrow_mut().write(offset, value);
    }
}

/// The bus to such a card.
type MadBus = Stub<RefCell<Mad>>;

fn mad(memory: &NicMemory, seed: u64, config: &[(u16, u32)], never: fn(u32) -> u32) -> MadBus {
    let copy = memory.rings().fd().try_clone_to_owned().expect("a descriptor is free");
    let rings = Region::adopt(copy).expect("memory of ours").span(0, memory.rings().len() / 8).expect("all of it");
    let config = config.iter().copied().collect();
    Stub(Rc::new(RefCell::new(Mad {
        state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        written: HashMap::new(),
        config,
        rings,
        sane: seed % 17,
        never,
    })))
}

/// Rounds of use, each by another driver.
const ROUNDS: u32 = 8;

/// Drives the card until the first error; returns the number of rounds.
fn drive<N: Nic<Bus = MadBus>>(seed: u64, config: &[(u16, u32)], never: fn(u32) -> u32) -> u32 {
    let memory =
        NicMemory::create(Geometry { slot_len: 4096, count: 64 }, 8192, Iova(1 << 32)).expect("a little memory");
    let arena = memory.arena().clone();
    let bus = mad(&memory, seed, config, never);
    let options = NicOptions { ring: 8, ..NicOptions::default() };
    let Ok(mut nic) = N::start(bus, memory, &options) else { return 0 };
    for step in 1.. {
        let mut burst = Burst::new();
        let received = nic.receive(&mut burst);
        // Every frame has a slot of its own, and fits into it.
        assert!(burst.iter().all(|frame| usize::from(frame.len) <= frame.slot.len()));
        burst.clear();
        burst.extend((0..4).map_while(|_| arena.take()).map(|slot| Frame { slot, len: 60 }));
        let sent = nic.transmit(&mut burst);
        let armed = nic.arm();
        let _ = nic.link();
        nic.mac();
        let filtered = nic.set_filter(&Filter { multicast: vec![Mac([1; 6])], ..Filter::default() });
        if received.is_err() || sent.is_err() || armed.is_err() || filtered.is_err() || step == ROUNDS {
            return step;
        }
        assert!(armed.is_ok_and(|armed| matches!(armed, Armed::Idle | Armed::Busy)));
        let Ok((bus, memory, driver_state)) = nic.park() else { return step };
        let Ok(successor) = N::resume(bus, memory, &driver_state) else { return step };
        nic = successor;
    }
    0
}

/// Returns the bits that a sane RTL8139C+ does not show for long: a reset, running units, a dump of counters.
fn never_of_rtl8139(offset: u32) -> u32 {
    match offset {
        0x37 => 0x1c,
        0x10 => 1 << 3,
        // An address that is not all ones.
        0x00 => 1,
        _ => 0,
    }
}

/// Returns the same for virtio. There is no control queue: a card that never answers a command costs five seconds,
/// which is correct, but too long here.
fn never_of_virtio(offset: u32) -> u32 {
    match offset {
        0x04 => 1 << 17 | 1 << 18,
        // Queues that are enabled or being reset; notification offsets outside their structure.
        0x1c | 0x1e | 0x3a => 0xffff,
        0x1000 => 1,
        _ => 0,
    }
}

/// Counts the seeds by result: not started, failed after some rounds, survived all rounds.
fn tally<N: Nic<Bus = MadBus>>(seeds: u64, config: &[(u16, u32)], never: fn(u32) -> u32) -> [usize; 3] {
    let mut tally = [0; 3];
    for seed in 0..seeds {
        // Shown if the test fails.
        println!("seed {seed}");
        match drive::<N>(seed, config, never) {
            0 => tally[0] += 1,
            ROUNDS => tally[2] += 1,
            _ => tally[1] += 1,
        }
    }
    tally
}

#[test]
fn a_mad_rtl8139_is_an_error_and_no_panic() {
    let tally = tally::<Rtl8139<MadBus>>(170, RTL8139.config, never_of_rtl8139);
    // No answer of this card keeps the driver from starting.
    assert!(tally[1] > 0 && tally[2] > 0, "cards of every degree of madness: {tally:?}");
}

#[test]
fn a_mad_virtio_device_is_an_error_and_no_panic() {
    let tally = tally::<VirtioNet<MadBus>>(340, VIRTIO.config, never_of_virtio);
    assert!(tally.iter().all(|&count| count > 0), "devices of every degree of madness: {tally:?}");
}
