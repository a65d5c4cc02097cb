//! The device's end of a virtqueue, in memory whose driver writes anything at any time. Beside it works a judge in a copy of
//! that memory: rust-vmm's `virtio-queue` for a split ring, and a model of the specification for a packed one.
//!
//! What must hold: no panic; both take the same chains, see the same rules broken and leave the same bytes, so that ours
//! writes nothing outside the memory and its used indices only run forward; a broken rule is a sentence, and is no less
//! broken the next time.
#![no_main]

#[path = "../common/mod.rs"]
mod common;
#[path = "../virtq/mod.rs"]
mod virtq;

use std::collections::VecDeque;

use common::Choices;
use libfuzzer_sys::fuzz_target;
use tasuki_net::virtq::{Broken, Chain, DriverMemory, Head, PIECES_MAX, Packed, Place, Ring, Split, len_of};
use virtq::memory::{END, GUEST, LEN, Memory};
use virtq::{Judge, Taken, packed, split};

/// Where the descriptors, the available ring and the used ring lie, of up to 512 descriptors; tables, and buffers.
const PLACES: [u64; 3] = [GUEST, GUEST + 0x2000, GUEST + 0x2800];
const TABLES: u64 = GUEST + 0x4000;
const BUFFERS: u64 = GUEST + LEN;

/// Most bytes that a step reads or writes.
const BYTES_MAX: usize = 4096;

/// Our end, of either layout.
trait Ours: Ring {
    fn show(&mut self) -> bool;
    fn want_kicks(&mut self, yes: bool);
    fn positions(&self) -> (u16, u16);
}

macro_rules! ours {
    ($ring:ty) => {
        impl Ours for $ring {
            fn show(&mut self) -> bool {
                self.show()
            }

            fn want_kicks(&mut self, yes: bool) {
                self.want_kicks(yes);
            }

            fn positions(&self) -> (u16, u16) {
                self.positions()
            }
        }
    };
}

ours!(Split);
ours!(Packed);

/// How the ring is set up.
struct Setup {
    is_packed: bool,
    /// Event index, IN_ORDER.
    features: [bool; 2],
    size: u16,
    places: [u64; 3],
    start: u16,
}

impl Setup {
    fn of(choices: &mut Choices<'_>) -> Self {
        let bits = choices.byte();
        let [is_packed, event_index, in_order] = [1, 2, 4].map(|bit| bits & bit != 0);
        let size = match choices.byte() {
            any @ 0xf8.. => choices.short() >> (any & 7),
            size if is_packed => 1 + u16::from(size),
            size => 1 << (size % 10),
        };
        let places = match choices.below(12) {
            // Anywhere, so that parts may overlap; or not at all.
            0 => PLACES.map(|_| GUEST + u64::from(choices.short())),
            // At the end of a region, or a little behind.
            1 => {
                let count = u64::from(size);
                let lengths = if is_packed { [16 * count, 4, 4] } else { [16 * count, 6 + 2 * count, 6 + 8 * count] };
                let (mut places, part) = (PLACES, usize::from(choices.below(3)));
                places[part] = (BUFFERS - lengths[part] % LEN + u64::from(choices.below(20))) & !1;
                places
            }
            _ => PLACES,
        };
        // The judge of split rings does not try descriptors there.
        let places = [places[0] & !8, places[1], places[2]];
        let start = match choices.byte() {
            any @ 0xf0.. => u16::from(any) << 8 | u16::from(choices.byte()),
            few if is_packed => (u16::from(few & 0x80) << 8) | (u16::from(few & 0x7f) % size.max(1)),
            few => u16::from(few).wrapping_sub(16),
        };
        Setup { is_packed, features: [event_index, in_order], size, places, start }
    }

    fn place(&self) -> Place {
        let [descriptors, available, used] = self.places.map(Memory::user);
        Place { size: self.size, descriptors, available, used }
    }

    fn is_apart(&self) -> bool {
        self.places == PLACES && self.size <= 512
    }
}

/// A driver, which may keep to the rules or not.
struct Driver<'a> {
    memory: &'a Memory,
    setup: &'a Setup,
}

impl Driver<'_> {
    /// Writes something. `next` is the position of the next chain.
    fn write(&self, choices: &mut Choices<'_>, next: u16) {
        let Setup { is_packed, size, places: [_, available, used], .. } = *self.setup;
        match choices.below(9) {
            0 | 1 => self.describe(choices, next),
            2 => self.chain(choices, next),
            3 if is_packed => {
                let word = u32::from(choices.short()) | u32::from(choices.below(4)) << 16;
                self.memory.write(available, &word.to_le_bytes());
            }
            3 | 4 if !is_packed => self.offer(choices, next),
            5 if !is_packed => {
                let ahead = match choices.byte() {
                    any @ 0xe0.. => u16::from(any) << 8 | u16::from(choices.byte()),
                    few => u16::from(few).wrapping_sub(4),
                };
                self.memory.write(available + 2, &next.wrapping_add(ahead).to_le_bytes());
            }
            6 if !is_packed => {
                self.memory.write(available, &choices.short().to_le_bytes());
                let event = next.wrapping_add(choices.byte().into()).wrapping_sub(8);
                self.memory.write(available + 4 + 2 * u64::from(size), &event.to_le_bytes());
            }
            7 => self.memory.write(used + u64::from(choices.byte()), &choices.word().to_le_bytes()),
            _ => {
                let len = choices.below(32).into();
                self.memory.write(GUEST + u64::from(choices.short()), choices.bytes(len));
            }
        }
    }

    /// Returns the bytes of a descriptor. What comes last in it is `id` in a packed ring and its table, and `next` in others.
    fn descriptor(&self, address: u64, len: u32, [flags, next]: [u16; 2], place: Option<u16>) -> Vec<u8> {
        let last = match place {
            // Available in this lap.
            Some(place) if place & 0x8000 != 0 => [next, flags ^ 0x80],
            Some(_) => [next, flags ^ 0x8000],
            None if self.setup.is_packed => [next, flags],
            None => [flags, next],
        };
        [&address.to_le_bytes()[..], &len.to_le_bytes(), &last[0].to_le_bytes(), &last[1].to_le_bytes()].concat()
    }

    /// Returns the place in the ring that is `ahead` behind the next chain's, with the wrap counter there.
    fn ahead(&self, next: u16, ahead: u16) -> u16 {
        let size = u32::from(self.setup.size);
        let at = u32::from(next & 0x7fff) + u32::from(ahead);
        (at % size) as u16 | if (at / size) % 2 == 1 { !next & 0x8000 } else { next & 0x8000 }
    }

    /// Writes one descriptor, in the ring or in a table.
    fn describe(&self, choices: &mut Choices<'_>, next: u16) {
        let (address, len, flags) = (address(choices), length(choices), flags(choices));
        let (at, successor) = (choices.byte(), u16::from(choices.byte()));
        let is_in_table = choices.below(4) == 0;
        let (table, place) = match (is_in_table, self.setup.is_packed) {
            (true, _) => (TABLES, u16::from(at)),
            (false, true) => (self.setup.places[0], self.ahead(next, at.into())),
            (false, false) => (self.setup.places[0], u16::from(at) % self.setup.size),
        };
        let mark = (!is_in_table && self.setup.is_packed).then_some(place);
        let bytes = self.descriptor(address, len, [flags, successor], mark);
        self.memory.write(table + 16 * u64::from(place & 0x7fff), &bytes);
    }

    /// Writes many descriptors in a row, each with a successor but the last, which may have any; or a table of them.
    fn chain(&self, choices: &mut Choices<'_>, next: u16) {
        let count = match choices.below(8) {
            0 => choices.short() % 600,
            // As many as a chain may have, and one more.
            1 => 254 + u16::from(choices.below(4)),
            _ => choices.below(12).into(),
        };
        let (is_table, is_loop, first) = (choices.below(2) == 0, choices.below(8) == 0, u16::from(choices.byte()));
        let (len, writes_from) = (length(choices), choices.short() % 600);
        let size = self.setup.size;
        for i in (0..count).rev() {
            let at = if is_table { i } else { (first + i) % size };
            let flags = u16::from(i + 1 < count || is_loop) | if i >= writes_from { 2 } else { 0 };
            let successor = if i + 1 < count { if is_table { at + 1 } else { (at + 1) % size } } else { first };
            let address = BUFFERS + u64::from(i) * u64::from(len % 64);
            let place = if self.setup.is_packed { self.ahead(next, i) } else { at };
            let mark = (!is_table && self.setup.is_packed).then_some(place);
            let bytes = self.descriptor(address, len, [flags, successor], mark);
            let table = if is_table { TABLES } else { self.setup.places[0] };
            let entry = if is_table { at } else { place & 0x7fff };
            self.memory.write(table + 16 * u64::from(entry), &bytes);
        }
        if is_table {
            let place = if self.setup.is_packed { self.ahead(next, 0) } else { first % size };
            let len = u32::from(count) * 16 + u32::from(is_loop && choices.below(2) == 1);
            let bytes = self.descriptor(TABLES, len, [4, first], self.setup.is_packed.then_some(place));
            self.memory.write(self.setup.places[0] + 16 * u64::from(place & 0x7fff), &bytes);
        }
        if !self.setup.is_packed {
            self.offer_chain(next, first % size);
        }
    }

    fn offer(&self, choices: &mut Choices<'_>, next: u16) {
        let head = match choices.byte() {
            any @ 0xf8.. => u16::from(any) << 8,
            few => u16::from(few) % (self.setup.size + u16::from(few > 0xf0)),
        };
        self.offer_chain(next, head);
    }

    /// Makes a chain available, behind those that are.
    fn offer_chain(&self, next: u16, head: u16) {
        let available = self.setup.places[1];
        let index = self.memory.half(available + 2);
        // A driver that was a lap ahead begins anew.
        let index = if index.wrapping_sub(next) > self.setup.size { next } else { index };
        self.memory.write(available + 4 + 2 * u64::from(index % self.setup.size), &head.to_le_bytes());
        self.memory.write(available + 2, &index.wrapping_add(1).to_le_bytes());
    }
}

fn address(choices: &mut Choices<'_>) -> u64 {
    match choices.below(10) {
        0 => choices.word(),
        1 => END - u64::from(choices.byte()),
        2 => BUFFERS - u64::from(choices.byte()),
        3 | 4 => TABLES + 16 * u64::from(choices.byte()),
        5 => PLACES[2] + u64::from(choices.byte()),
        _ => BUFFERS + u64::from(choices.short()) % LEN,
    }
}

fn length(choices: &mut Choices<'_>) -> u32 {
    match choices.below(8) {
        0 => choices.word() as u32,
        1 => choices.short().into(),
        2 | 3 => 16 * u32::from(choices.byte()),
        4 => 0,
        _ => choices.byte().into(),
    }
}

fn flags(choices: &mut Choices<'_>) -> u16 {
    match choices.byte() {
        any @ 0xf0.. => u16::from(any & 7) | u16::from(choices.byte()) << 8,
        few => [0, 1, 2, 3, 4, 2, 1, 0, 5, 6, 7][usize::from(few) % 11],
    }
}

/// Our end and the judge, at work in the same ring.
struct Both<'a, R, J> {
    memory: &'a Memory,
    ours: R,
    judge: J,
    chain: Chain,
    taken: VecDeque<Head>,
    /// Completed chains are not shown yet.
    is_hidden: bool,
    /// The driver's index must be looked at before a chain is taken: parts of the ring overlap, or chains were put back.
    must_look: bool,
    is_apart: bool,
}

impl<R: Ours, J: Judge> Both<'_, R, J> {
    fn step(&mut self, choices: &mut Choices<'_>) {
        match choices.below(12) {
            0..4 => self.take(choices),
            4 | 5 => {
                let Some(head) = self.taken.pop_front() else { return };
                self.complete(head, choices.word() as u32);
            }
            6 | 7 => self.show(),
            8 => {
                let yes = choices.below(2) == 0;
                self.ours.want_kicks(yes);
                self.judge.want_kicks(self.memory, yes);
            }
            9 => {
                let Some(head) = self.taken.pop_back() else { return };
                self.ours.put_back(head);
                self.judge.put_back(head);
                self.must_look = true;
            }
            10 => self.plain(choices),
            _ => self.undo(choices),
        }
        assert_eq!(self.ours.positions(), self.judge.positions());
    }

    fn complete(&mut self, head: Head, len: u32) {
        self.ours.complete(head, len);
        self.judge.complete(self.memory, head, len);
        self.is_hidden = true;
    }

    fn show(&mut self) {
        let (ours, judge) = (self.ours.show(), self.judge.show(self.memory));
        assert!(judge.is_none_or(|judge| judge == ours), "our end interrupts the guest: {ours}");
        self.is_hidden = false;
        self.memory.check();
    }

    /// Looks for chains, if so. Returns whether one may be taken.
    fn looks(&mut self, looks: bool) -> bool {
        if looks || self.must_look || !self.is_apart {
            let (ours, judge) = (self.ours.look(), self.judge.look(self.memory));
            self.must_look = ours.is_err() && (self.must_look || !self.is_apart);
            assert_eq!(ours.map_err(sentence).ok(), judge.ok(), "whether there is a chain");
        }
        !self.must_look
    }

    fn take(&mut self, choices: &mut Choices<'_>) {
        let ahead = choices.byte();
        if !self.looks(ahead & 1 == 0) {
            return;
        }
        // A hint: no more is asked of it than that it harms nothing.
        let hint = self.ours.address_ahead(u16::from(ahead >> 1));
        hint.into_iter().for_each(|address| self.memory.ours.prefetch_to_write(address, BYTES_MAX));
        let came = self.ours.take(&self.memory.ours, &mut self.chain).map_err(sentence);
        let judged = self.judge.take(self.memory);
        let Ok(Some((head, readable, writable))) = judged else {
            let is_same = matches!((&came, &judged), (Ok(false), Ok(None)) | (Err(_), Err(_)));
            assert!(is_same, "our end takes a chain: {came:?}, and the judge: {judged:?}");
            return;
        };
        assert_eq!(came, Ok(true), "the judge takes a chain");
        assert_eq!(self.chain.head, head);
        let ours = (self.memory.places(&self.chain.readable), self.memory.places(&self.chain.writable));
        assert_eq!(ours, (readable, writable));
        assert!(ours.0.len() <= PIECES_MAX && ours.1.len() <= PIECES_MAX);
        self.taken.push_back(head);
        self.copy(choices, &(head, ours.0, ours.1));
    }

    /// Reads the readable pieces, and writes to the writable ones.
    fn copy(&self, choices: &mut Choices<'_>, (_, readable, writable): &Taken) {
        let from = usize::from(choices.byte());
        let right = self.memory.bytes(readable, from + BYTES_MAX);
        let mut bytes = vec![0; right.len().saturating_sub(from)];
        let is_all = self.memory.ours.copy_to(&self.chain.readable, from, &mut bytes);
        assert!(is_all && bytes == right[right.len().min(from)..], "the bytes to read");
        let most = len_of(&self.chain.writable).min(BYTES_MAX);
        let fill: Vec<u8> = (0..most.min(16 * usize::from(choices.byte()))).map(|i| (i * 7) as u8).collect();
        self.memory.ours.fill(&self.chain.writable, 0, fill.len(), |at, len, region, offset| {
            region.copy_from(offset, &fill[at..at + len])
        });
        self.memory.fill(writable, &fill);
    }

    /// Gives a frame by the short way, if the next chain is plain.
    fn plain(&mut self, choices: &mut Choices<'_>) {
        let (looks, len) = (choices.below(2) == 0, 1 + usize::from(choices.byte()));
        if !self.taken.is_empty() || !self.looks(looks) {
            return;
        }
        let plain = self.ours.next_plain(&self.memory.ours, len).map_err(sentence);
        let Ok(Some((head, piece))) = plain else {
            // Ours may have looked, and the judge has not.
            self.must_look = true;
            if plain.is_err() {
                assert_eq!(self.judge.take(self.memory), Err(virtq::Broken));
            }
            return;
        };
        let judged = self.judge.take(self.memory);
        let Ok(Some((judged, readable, writable))) = judged else { panic!("a plain chain, and the judge: {judged:?}") };
        assert_eq!((head.id, readable.len(), writable), (judged.id, 0, self.memory.places(&[piece])));
        let (region, at) = self.memory.ours.place_of(piece);
        region.copy_from(at, &[0xee; 1 + u8::MAX as usize][..len]).expect("the piece was checked");
        self.memory.fill(&self.memory.places(&[piece]), &[0xee; 1 + u8::MAX as usize][..len]);
        self.ours.complete_next(head, len as u32);
        self.judge.complete(self.memory, judged, len as u32);
        self.is_hidden = true;
    }

    /// Takes and completes chains, and takes all of it back.
    fn undo(&mut self, choices: &mut Choices<'_>) {
        if self.is_hidden {
            self.show();
        }
        let before = (self.ours.state(), self.judge.state(), self.taken.clone());
        for _ in 0..choices.below(6) {
            self.take(choices);
            if let Some(head) = self.taken.pop_front() {
                self.complete(head, choices.byte().into());
            }
        }
        self.ours.rewind(before.0);
        self.judge.rewind(self.memory, before.1);
        (self.taken, self.is_hidden, self.must_look) = (before.2, false, true);
        self.memory.check();
    }
}

/// Checks that the rule that was broken is told in a sentence.
fn sentence(broken: Broken) -> Broken {
    common::check_sentence(&broken.to_string());
    broken
}

fn run_split(memory: &Memory, setup: &Setup, choices: &mut Choices<'_>) {
    let open = |next| {
        (
            open_split(memory, setup, next, None),
            split::Split::new(memory, setup.size, setup.places, next, setup.features[0]),
        )
    };
    let (ours, judge) = open(setup.start);
    assert_eq!(ours.is_ok(), judge.is_ok(), "whether there is a ring");
    let (Ok(ours), Ok(judge)) = (ours, judge) else { return };
    run(memory, setup, choices, (ours, judge), |both, _| {
        let (next, done) = both.ours.positions();
        // A successor stores the used index once more.
        let mut ours = open_split(memory, setup, next, Some(done)).expect("it was open");
        both.show();
        ours.show_again();
        both.judge.show_again(memory);
        both.ours = ours;
        both.must_look = true;
    });
}

fn open_split(memory: &Memory, setup: &Setup, next: u16, done: Option<u16>) -> Result<Split, Broken> {
    Split::new(&memory.ours, setup.place(), next, done, setup.features[0]).map_err(sentence)
}

fn open_packed(memory: &DriverMemory, setup: &Setup, at: u16) -> Result<Packed, Broken> {
    Packed::new(memory, setup.place(), at, setup.features[0], setup.features[1]).map_err(sentence)
}

fn run_packed(memory: &Memory, setup: &Setup, choices: &mut Choices<'_>) {
    let (ours, judge) = (
        open_packed(&memory.ours, setup, setup.start),
        packed::Packed::new(setup.size, setup.places, setup.start, setup.features),
    );
    assert_eq!(ours.is_ok(), judge.is_ok(), "whether there is a ring");
    let (Ok(ours), Ok(judge)) = (ours, judge) else { return };
    run(memory, setup, choices, (ours, judge), |both, choices| {
        let (first, words) = both.ours.completions();
        let (words, noted) = (words.to_vec(), both.judge.noted());
        assert_eq!(first, noted.0);
        if choices.below(2) == 0 {
            both.show();
        }
        // Killed before it showed them, or after; a successor may show them again.
        let done = both.ours.positions().1;
        let mut ours = open_packed(&memory.ours, setup, done).expect("it was open");
        let (_, _) = (ours.was_served(), ours.standing());
        ours.show_again(first, &words);
        both.judge.show_again(memory, &noted);
        let judge = packed::Packed::new(setup.size, setup.places, done, setup.features);
        (both.ours, both.judge, both.is_hidden, both.must_look) = (ours, judge.expect("it was open"), false, true);
    });
}

/// Has the driver and both ends take turns. `succeed` puts another end in the place of ours, when it has no chain.
fn run<'a, R: Ours, J: Judge>(
    memory: &'a Memory,
    setup: &'a Setup,
    choices: &mut Choices<'_>,
    (ours, judge): (R, J),
    succeed: impl Fn(&mut Both<'a, R, J>, &mut Choices<'_>),
) {
    let driver = Driver { memory, setup };
    let (is_apart, chain, taken) = (setup.is_apart(), Chain::default(), VecDeque::new());
    let mut both = Both { memory, ours, judge, chain, taken, is_hidden: false, must_look: true, is_apart };
    let mut steps = 0;
    while choices.are_left() && steps < 200 {
        steps += 1;
        match choices.below(24) {
            0 if both.taken.is_empty() => succeed(&mut both, choices),
            0..12 => driver.write(choices, both.ours.positions().0),
            _ => both.step(choices),
        }
    }
    both.show();
    assert!(!memory.ours.is_gone());
}

thread_local! {
    static MEMORY: Memory = Memory::new();
}

fuzz_target!(|input: &[u8]| {
    let mut choices = Choices(input);
    MEMORY.with(|memory| {
        memory.clear();
        let setup = Setup::of(&mut choices);
        // What an earlier back end left.
        memory.write(setup.places[2], &choices.word().to_le_bytes());
        match setup.is_packed {
            true => run_packed(memory, &setup, &mut choices),
            false => run_split(memory, &setup, &mut choices),
        }
    });
});
