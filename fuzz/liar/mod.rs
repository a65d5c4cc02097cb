//! A card that begins honestly and lies when the input says so: about its registers, its configuration space, its
//! rings and the memory of frames. A user of its driver makes any calls that the input says.
//!
//! A lie about a register ends after some reads of it, so that no driver waits for long. These targets do not check
//! how long drivers wait.
#![allow(dead_code, reason = "each target needs another part of it")]
#![allow(clippy::result_large_err, reason = "a step that fails gives card and memory back")]

#[path = "../../crates/tasuki-net/tests/suite/stub/bus.rs"]
pub mod bus;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use bus::{Answers, Stub};
use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::{DriverState, Failed, Filter, Mac, Nic, NicError, NicMemory, NicOptions, Parked};
use tasuki_net::port::{Burst, Frame};
use tasuki_shm::arena::{Arena, Geometry};
use tasuki_shm::region::{Region, Span};

use crate::common::Choices;

pub const MEMORY_AT: u64 = 1 << 32;
const SLOTS: Geometry = Geometry { slot_len: 2048, count: 64 };
const RINGS_LEN: usize = 16 << 10;

/// Most calls and lies per input: longer inputs are useless.
const STEPS_MAX: u32 = 200;
/// Most parks per input. Each may take 10 ms, the time some drivers give a card to send its frames.
const PARKS_MAX: u32 = 3;

/// The honest part of a card.
pub trait Part: Sized {
    /// (offset, word) of its configuration space.
    const CONFIG: &'static [(u16, u32)];
    /// Registers that a driver reads, where lies are useful.
    const READ: &'static [u32];

    /// Makes a card, and its registers that are not 0.
    fn new(choices: &mut Choices<'_>) -> (Self, Vec<(u32, u32)>);

    /// Called when the driver has written a register, which now holds `value`.
    fn wrote(&mut self, card: &mut Memory, offset: u32, value: u32);

    /// Receives `count` frames of `len` bytes, or as many as fit.
    fn receive(&mut self, card: &mut Memory, count: u8, len: u16);

    /// Sends all frames that the driver has queued.
    fn send(&mut self, card: &mut Memory);

    /// Returns whether lies about the configuration space are allowed there.
    fn may_lie(&self, _offset: u16) -> bool {
        true
    }
}

/// Registers and memory that the honest part of a card uses.
pub struct Memory {
    pub registers: BTreeMap<u32, u32>,
    pub rings: Span<AtomicU64>,
    frames: Span<AtomicU64>,
    /// Words of the rings that may not change in the middle of a call, because it would wait.
    pub left_alone: Vec<usize>,
    /// Whether the card sends frames at once.
    pub sends: bool,
}

impl Memory {
    /// Returns the word of the rings at an address, if there is one.
    pub fn word(&self, at: u64) -> Option<&AtomicU64> {
        self.rings.get(usize::try_from(at.checked_sub(MEMORY_AT)? / 8).ok()?)
    }

    pub fn load(&self, at: u64) -> u64 {
        self.word(at).map_or(0, |word| word.load(Acquire))
    }

    pub fn store(&self, at: u64, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Release);
        }
    }

    /// Writes `len` bytes of a word, as the card would.
    pub fn store_part(&self, at: u64, len: u32, value: u64) {
        let shift = 8 * (at % 8);
        let mask = (u64::MAX >> (64 - 8 * len)) << shift;
        self.store(at, self.load(at) & !mask | value << shift & mask);
    }

    pub fn load_part(&self, at: u64, len: u32) -> u64 {
        self.load(at) >> (8 * (at % 8)) & u64::MAX >> (64 - 8 * len)
    }

    pub fn register(&self, offset: u32) -> u32 {
        self.registers.get(&offset).copied().unwrap_or(0)
    }
}

/// A false value for a number of reads.
struct Lie {
    at: u32,
    value: u32,
    reads: u16,
}

struct Inner<P> {
    part: P,
    memory: Memory,
    config: BTreeMap<u16, u32>,
    lies: Vec<Lie>,
    config_lies: Vec<Lie>,
    /// (number of register accesses until then, index, value) of a word of the rings to change.
    ambush: Option<(u8, usize, u64)>,
}

pub struct Liar<P>(RefCell<Inner<P>>);

/// Takes the lie at this place, if there is one, and counts the read.
fn lie_at(lies: &mut Vec<Lie>, at: u32) -> Option<u32> {
    let place = lies.iter().position(|lie| lie.at == at)?;
    let lie = &mut lies[place];
    lie.reads -= 1;
    let value = lie.value;
    if lie.reads == 0 {
        lies.remove(place);
    }
    Some(value)
}

impl<P: Part> Inner<P> {
    fn access(&mut self) {
        match &mut self.ambush {
            Some((0, place, value)) => {
                let (place, value) = (*place % self.memory.rings.len(), *value);
                self.ambush = None;
                if !self.memory.left_alone.contains(&place) {
                    self.memory.rings[place].store(value, Release);
                }
            }
            Some((accesses, ..)) => *accesses -= 1,
            None => {}
        }
    }

    /// Makes the change that the input says.
    fn scheme(&mut self, choices: &mut Choices<'_>) {
        #[expect(clippy::cast_possible_truncation, reason = "the low bits will do")]
        match choices.below(6) {
            0 => {
                let at = P::READ[usize::from(choices.byte()) % P::READ.len()];
                let (value, reads) = (choices.word() as u32, u16::from(choices.byte()) + 1);
                self.lies.push(Lie { at, value, reads });
            }
            1 => {
                let (at, _) = P::CONFIG[usize::from(choices.byte()) % P::CONFIG.len()];
                let (value, reads) = (choices.word() as u32, u16::from(choices.below(8)) + 1);
                if self.part.may_lie(at) {
                    self.config_lies.push(Lie { at: at.into(), value, reads });
                }
            }
            2 => {
                let place = usize::from(choices.short()) % self.memory.rings.len();
                self.memory.rings[place].store(choices.word(), Release);
            }
            3 => self.ambush = Some((choices.byte(), choices.short().into(), choices.word())),
            4 => {
                let place = usize::from(choices.short()) % self.memory.frames.len();
                self.memory.frames[place].store(choices.word(), Release);
            }
            // A bit of a register, for good.
            _ => {
                let at = P::READ[usize::from(choices.byte()) % P::READ.len()];
                let old = self.memory.register(at);
                // But not of a register that the driver waits for.
                if old != 0 {
                    self.memory.registers.insert(at, old ^ 1 << choices.below(32));
                }
            }
        }
    }
}

impl<P: Part> Liar<P> {
    fn new(memory: &NicMemory, choices: &mut Choices<'_>) -> Rc<Self> {
        let copy = |region: &Region| {
            let copy = region.fd().try_clone_to_owned().expect("a descriptor is free");
            Region::adopt(copy).expect("memory of ours").span(0, region.len() / 8).expect("all of it")
        };
        let (part, registers) = P::new(choices);
        let memory = Memory {
            registers: registers.into_iter().collect(),
            rings: copy(memory.rings()),
            frames: copy(memory.arena().region()),
            left_alone: Vec::new(),
            sends: true,
        };
        let config = P::CONFIG.iter().copied().collect();
        let (lies, config_lies, ambush) = (Vec::new(), Vec::new(), None);
        Rc::new(Liar(RefCell::new(Inner { part, memory, config, lies, config_lies, ambush })))
    }

    fn scheme(&self, choices: &mut Choices<'_>) {
        self.0.borrow_mut().scheme(choices);
    }

    fn with(&self, what: impl FnOnce(&mut P, &mut Memory)) {
        let Inner { part, memory, .. } = &mut *self.0.borrow_mut();
        what(part, memory);
    }
}

impl<P: Part> Answers for Liar<P> {
    fn config(&self, offset: u16) -> u32 {
        let mut inner = self.0.borrow_mut();
        let lie = lie_at(&mut inner.config_lies, offset.into());
        lie.unwrap_or_else(|| inner.config.get(&offset).copied().unwrap_or(0))
    }

    fn read(&self, offset: u32) -> u32 {
        let mut inner = self.0.borrow_mut();
        inner.access();
        lie_at(&mut inner.lies, offset).unwrap_or_else(|| inner.memory.register(offset))
    }

    fn write(&self, offset: u32, value: u32) {
        let mut inner = self.0.borrow_mut();
        inner.access();
        inner.memory.registers.insert(offset, value);
        let Inner { part, memory, .. } = &mut *inner;
        part.wrote(memory, offset, value);
    }
}

/// The user of the driver, with the frames it holds.
struct User<P> {
    card: Rc<Liar<P>>,
    arena: Arena,
    held: Vec<Frame>,
    /// Whether a driver accepted a driver state that no driver wrote. Slots may then have no holder.
    misled: bool,
    options: NicOptions,
}

impl<P: Part> User<P> {
    /// Asserts that each slot has one holder, and that our slots are those we hold.
    fn account(&self) {
        let census = self.arena.census();
        assert_eq!(census.free + census.owner + census.peer, SLOTS.count);
        assert_eq!(census.owner as usize, self.held.len(), "slots that we hold: {census:?}");
        let ids: BTreeSet<_> = self.held.iter().map(|frame| frame.slot.id().index).collect();
        assert_eq!(ids.len(), self.held.len(), "no slot is held twice");
    }

    fn receive<N: Nic>(&mut self, nic: &mut N, choices: &mut Choices<'_>) {
        let mut burst = Burst::new();
        for _ in 0..choices.below(4) {
            burst.extend(self.arena.take().map(|slot| Frame { slot, len: 60 }));
        }
        let before = burst.len();
        let received = nic.receive(&mut burst);
        match received {
            Ok(count) => assert_eq!(burst.len(), before + count, "as many as it says"),
            Err(error) => {
                is_the_cards_fault(&error);
                let came = burst.len();
                // Nothing has changed, so it fails again.
                assert!(nic.receive(&mut burst).is_err(), "no more: {error}");
                assert_eq!(burst.len(), came, "nothing comes with an error");
            }
        }
        for frame in &burst[before..] {
            assert!((14..=frame.slot.len()).contains(&frame.len.into()), "{} bytes in a slot", frame.len);
            assert!(self.arena.owns(&frame.slot));
            // All its bytes must be readable.
            std::hint::black_box(frame.bytes().iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)));
        }
        self.held.extend(burst);
    }

    fn transmit<N: Nic>(&mut self, nic: &mut N, choices: &mut Choices<'_>) {
        let (count, forward) = (choices.below(33).into(), choices.below(2) == 0);
        let mut burst = Burst::new();
        if forward {
            burst.extend(self.held.drain(..self.held.len().min(count)));
        }
        while burst.len() < count {
            let Some(slot) = self.arena.take() else { break };
            burst.push(Frame { slot, len: [60, 1514, 0, 13, 1518, 2048, u16::MAX][usize::from(choices.below(7))] });
        }
        let before = burst.len();
        match nic.transmit(&mut burst) {
            Ok(taken) => assert_eq!(burst.len() + taken, before, "as many as it says"),
            Err(error) => is_the_cards_fault(&error),
        }
        self.held.extend(burst);
    }

    /// Parks the NIC and resumes it, perhaps with another driver state than it gave. A failure gives card and memory
    /// back, and the NIC is started anew with them.
    fn hand_over<N: Nic<Bus = Stub<Liar<P>>>>(&mut self, nic: N, choices: &mut Choices<'_>) -> Option<N> {
        let failed = match nic.park() {
            Ok(parked) => self.resume(parked, choices),
            Err(failed) => {
                is_the_cards_fault(&failed.error);
                Err(failed)
            }
        };
        self.account();
        failed
            .or_else(|Failed { bus, memory, .. }| {
                let nic = N::start(bus, memory, &self.options);
                self.account();
                // A started card has its fresh slots, and none from before.
                self.misled &= nic.is_err();
                nic
            })
            .ok()
    }

    fn resume<N: Nic<Bus = Stub<Liar<P>>>>(
        &mut self,
        (bus, memory, driver_state): Parked<N>,
        choices: &mut Choices<'_>,
    ) -> Result<N, Failed<N::Bus>> {
        let slots: Vec<_> = driver_state.slots().map(|slot| slot.to_word()).collect();
        let (different, peer) = (slots.iter().collect::<BTreeSet<_>>().len(), self.arena.census().peer as usize);
        assert_eq!(different, slots.len(), "no slot stands in a driver state twice");
        assert!(slots.len() == peer || self.misled && slots.len() < peer, "{} of {peer} slots", slots.len());
        self.account();
        let mut bytes = driver_state.bytes().to_vec();
        let changes = choices.below(4);
        for _ in 0..changes {
            mutate(&mut bytes, choices);
        }
        for _ in 0..choices.below(3) {
            self.card.scheme(choices);
        }
        match N::DriverState::read(&bytes) {
            Ok(driver_state) => {
                let nic = N::resume(bus, memory, &driver_state)?;
                self.misled |= changes > 0;
                Ok(nic)
            }
            Err(error) => Err(Failed { error, bus, memory }),
        }
    }
}

/// Asserts that a running driver blames the card, not itself.
fn is_the_cards_fault(error: &NicError) {
    match error {
        NicError::Gone | NicError::Absurd { .. } | NicError::Stuck { .. } | NicError::Bus(_) => {}
        NicError::Options { field: "filter", .. } => {}
        other => panic!("a running driver says: {other}"),
    }
}

/// Changes a byte or a word, near the beginning, near the end or anywhere.
fn mutate(bytes: &mut [u8], choices: &mut Choices<'_>) {
    let (near, far, len) = (usize::from(choices.byte()), usize::from(choices.short()), bytes.len());
    match choices.below(5) {
        0 => bytes[near % len] = choices.byte(),
        1 => bytes[len - 1 - near % len] ^= choices.byte(),
        2 => bytes[far % len] ^= choices.byte(),
        3 => bytes.copy_within(far % (len / 8) * 8..far % (len / 8) * 8 + 8, near % (len / 8) * 8),
        _ => {
            let at = near % (len / 8) * 8;
            bytes[at..at + 8].copy_from_slice(&choices.word().to_le_bytes());
        }
    }
}

/// Plays the card, and drives it, as `data` says.
pub fn play<N, P>(data: &[u8], queues: &[u8])
where
    P: Part,
    N: Nic<Bus = Stub<Liar<P>>>,
{
    let choices = &mut Choices(data);
    let memory = NicMemory::create(SLOTS, RINGS_LEN, Iova(MEMORY_AT)).expect("a little memory");
    let (arena, card) = (memory.arena().clone(), Liar::<P>::new(&memory, choices));
    let options = NicOptions {
        ring: [8, 16][usize::from(choices.below(2))],
        queues: queues[usize::from(choices.byte()) % queues.len()],
        filter: Filter { promiscuous: choices.below(2) == 1, ..Filter::default() },
        ..NicOptions::default()
    };
    let mut user = User { card: Rc::clone(&card), arena, held: Vec::new(), misled: false, options: options.clone() };
    for _ in 0..choices.below(4) {
        card.scheme(choices);
    }
    let mut running = N::start(Stub(Rc::clone(&card)), memory, &options).ok();
    let (mut steps, mut parks) = (0, 0);
    while let Some(mut nic) = running.take().filter(|_| choices.are_left() && steps < STEPS_MAX) {
        steps += 1;
        match choices.below(16) {
            0..2 => user.receive(&mut nic, choices),
            2 => user.transmit(&mut nic, choices),
            3 => _ = nic.arm().inspect_err(is_the_cards_fault),
            4 => _ = nic.link().inspect_err(is_the_cards_fault),
            5 => {
                let multicast = vec![Mac([choices.byte(); 6]); choices.byte().into()];
                let filter = Filter { all_multicast: choices.below(2) == 1, multicast, ..Filter::default() };
                _ = nic.set_filter(&filter).inspect_err(is_the_cards_fault);
            }
            6 => _ = nic.statistics(),
            7 if parks < PARKS_MAX => {
                parks += 1;
                running = user.hand_over(nic, choices);
                continue;
            }
            8 => {
                let (count, len) =
                    (choices.below(40), [60, 1514, 1518, choices.short()][usize::from(choices.below(4))]);
                card.with(|part, memory| part.receive(memory, count, len));
            }
            9 => card.with(|part, memory| part.send(memory)),
            10 => card.with(|_, memory| memory.sends = !memory.sends),
            11 => user.held.truncate(choices.below(8).into()),
            _ => card.scheme(choices),
        }
        user.account();
        running = Some(nic);
    }
    user.held.clear();
    user.account();
}
