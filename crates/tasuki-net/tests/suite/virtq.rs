//! The device's end of a virtqueue against a driver written from the specification that shares nothing with it, and in
//! memory that holds anything.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use tasuki_net::virtq::{
    Broken, Chain, DriverMemory, Head, MemoryRegion, PIECES_MAX, Packed, Place, Ring, Split, len_of,
};
use tasuki_shm::region::CommonRegion;

mod packed;

/// Addresses of the two regions, of the guest and of the front end. The guest's follow each other, so a buffer may lie
/// in both.
const GUEST: u64 = 0x1_0000;
const USER: u64 = 0x7f00_0000_0000;
/// Length of a region in bytes, and its offset in its file.
const LEN: u64 = 0x1_0000;
const OFFSET: u64 = 0x1000;
const REGIONS: u64 = 2;

/// Where everything lies, counted from the first region.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const TABLES: u64 = 0x3000;
const BUFFERS: u64 = 0x8000;
/// Bytes of buffers for each descriptor. The last buffers lie in the second region, and one in both.
const BUFFER: u64 = 0x700;
const SIZE_MAX: u16 = 32;

struct Memory {
    files: Vec<OwnedFd>,
}

impl Memory {
    fn new() -> (Self, DriverMemory) {
        let files = (0..REGIONS).map(|_| {
            let file = rustix::fs::memfd_create("driver", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, OFFSET + LEN).unwrap();
            file
        });
        let memory = Memory { files: files.collect() };
        let mut ours = DriverMemory::default();
        for (number, file) in (0..REGIONS).zip(&memory.files) {
            let region = CommonRegion::map_guarded(file.as_fd(), usize::try_from(OFFSET + LEN).unwrap()).unwrap();
            // The front end has a gap between the two.
            let user = USER + number * 0x10_0000;
            ours.regions.push(MemoryRegion {
                guest: GUEST + number * LEN,
                user,
                len: LEN,
                mapped: region,
                offset: OFFSET,
            });
        }
        (memory, ours)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        for (at, byte) in (at..).zip(bytes) {
            let file = &self.files[usize::try_from(at / LEN).unwrap()];
            assert_eq!(rustix::io::pwrite(file, &[*byte], OFFSET + at % LEN), Ok(1));
        }
    }

    fn read(&self, at: u64, len: u64) -> Vec<u8> {
        let byte = |at: u64| {
            let mut byte = [0];
            let file = &self.files[usize::try_from(at / LEN).unwrap()];
            assert_eq!(rustix::io::pread(file, &mut byte, OFFSET + at % LEN), Ok(1));
            byte[0]
        };
        (at..at + len).map(byte).collect()
    }

    fn half(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.read(at, 2).try_into().unwrap())
    }

    fn word(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.read(at, 4).try_into().unwrap())
    }

    /// Returns all bytes, and zeroes in place of the used ring and what the device may write there.
    fn but_the_used_ring(&self, size: u16) -> Vec<Vec<u8>> {
        self.but(USED, 4 + 8 * usize::from(size) + 2)
    }

    /// Returns all bytes, and zeroes in place of some of the first region.
    fn but(&self, at: u64, len: usize) -> Vec<Vec<u8>> {
        let mut all: Vec<Vec<u8>> = self
            .files
            .iter()
            .map(|file| {
                let mut bytes = vec![0; usize::try_from(OFFSET + LEN).unwrap()];
                assert_eq!(rustix::io::pread(file, &mut bytes, 0), Ok(bytes.len()));
                bytes
            })
            .collect();
        let from = usize::try_from(OFFSET + at).unwrap();
        all[0][from..from + len].fill(0);
        all
    }
}

fn place(size: u16) -> Place {
    Place { size, descriptors: USER + DESCRIPTORS, available: USER + AVAILABLE, used: USER + USED }
}

/// A driver, from 2.7 of the specification.
struct Driver {
    memory: Memory,
    size: u16,
    has_event_index: bool,
    free: Vec<u16>,
    /// Descriptors of each chain that is out, by its head.
    out: Vec<Vec<u16>>,
    available: u16,
    used: u16,
}

/// A piece of a chain: its length, and whether the device writes it.
type Piece = (u16, bool);

impl Driver {
    fn describe(&self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        let bytes =
            [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.memory.write(at, &bytes);
    }

    /// Offers a chain. Returns its head and where its pieces lie, or nothing if too few descriptors are free.
    fn offer(&mut self, pieces: &[Piece], is_indirect: bool, fill: u8) -> Option<(u16, Vec<u64>)> {
        let need = if is_indirect { 1 } else { pieces.len() };
        if self.free.len() < need {
            return None;
        }
        let own = self.free.split_off(self.free.len() - need);
        let head = own[0];
        // All pieces lie in the buffer of the head, one behind the other.
        let mut at = BUFFERS + BUFFER * u64::from(head);
        let places: Vec<u64> = pieces
            .iter()
            .map(|(len, _)| {
                let place = at;
                at += u64::from(*len);
                place
            })
            .collect();
        for (i, ((len, is_written), place)) in pieces.iter().zip(&places).enumerate() {
            if !is_written {
                let bytes: Vec<u8> = (0..*len).map(|j| fill.wrapping_add(j.to_le_bytes()[0])).collect();
                self.memory.write(*place, &bytes);
            }
            let is_last = i + 1 == pieces.len();
            let flags = u16::from(!is_last) | if *is_written { 2 } else { 0 };
            let (entry, next) = match is_indirect {
                true => (TABLES + 0x80 * u64::from(head) + 16 * i as u64, i + 1),
                false => (DESCRIPTORS + 16 * u64::from(own[i]), if is_last { 0 } else { own[i + 1].into() }),
            };
            self.describe(entry, GUEST + place, (*len).into(), flags, u16::try_from(next).unwrap());
        }
        if is_indirect {
            let (table, len) = (GUEST + TABLES + 0x80 * u64::from(head), 16 * u32::try_from(pieces.len()).unwrap());
            self.describe(DESCRIPTORS + 16 * u64::from(head), table, len, 4, 0);
        }
        self.memory.write(AVAILABLE + 4 + 2 * u64::from(self.available % self.size), &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.memory.write(AVAILABLE + 2, &self.available.to_le_bytes());
        self.out[usize::from(head)] = own;
        Some((head, places))
    }

    /// Returns the next chain that the device has shown, and its length.
    fn reclaim(&mut self) -> Option<(u16, u32)> {
        if self.memory.half(USED + 2) == self.used {
            return None;
        }
        let at = USED + 4 + 8 * u64::from(self.used % self.size);
        let (head, len) = (u16::try_from(self.memory.word(at)).unwrap(), self.memory.word(at + 4));
        self.used = self.used.wrapping_add(1);
        self.free.append(&mut self.out[usize::from(head)]);
        Some((head, len))
    }

    /// Asks for an interrupt once the device passes `index`, or for all or none.
    fn want_interrupt(&self, index: u16) {
        match self.has_event_index {
            true => self.memory.write(AVAILABLE + 4 + 2 * u64::from(self.size), &index.to_le_bytes()),
            false => self.memory.write(AVAILABLE, &(index & 1).to_le_bytes()),
        }
    }
}

/// What the test does next.
#[derive(Debug, Clone)]
enum Step {
    Offer(Vec<Piece>, bool, u8),
    /// Takes a chain, and puts it back if so.
    Take(bool),
    /// Completes the oldest chain taken, with this length, and takes that back if so.
    Complete(u32, bool),
    Show,
    Reclaim,
    WantInterrupt(u16),
    /// Opens the device's end anew, where it was.
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let pieces = proptest::collection::vec((0_u16..300, any::<bool>()), 1..6);
    prop_oneof![
        4 => (pieces, any::<bool>(), any::<u8>()).prop_map(|(pieces, is_indirect, fill)| Step::Offer(pieces, is_indirect, fill)),
        4 => proptest::bool::weighted(0.2).prop_map(Step::Take),
        4 => (any::<u32>(), proptest::bool::weighted(0.2)).prop_map(|(len, undone)| Step::Complete(len, undone)),
        3 => Just(Step::Show),
        3 => Just(Step::Reclaim),
        2 => (0_u16..8).prop_map(Step::WantInterrupt),
        1 => Just(Step::Reopen),
    ]
}

/// A chain that was offered: its head, its pieces, and where they lie.
type Offered = (u16, Vec<Piece>, Vec<u64>);

fn bytes_of(memory: &Memory, (_, pieces, places): &Offered, written: bool) -> Vec<u8> {
    let of_kind = pieces.iter().zip(places).filter(|((_, is_written), _)| *is_written == written);
    of_kind.flat_map(|((len, _), place)| memory.read(*place, (*len).into())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn what_a_driver_offers_comes_whole_and_in_order_and_goes_back_in_order(
        steps in proptest::collection::vec(step(), 1..200),
        log in 0_u32..6,
        first in prop_oneof![Just(0_u16), Just(65_530_u16), any::<u16>()],
        has_event_index in any::<bool>(),
    ) {
        let size = 1 << log;
        prop_assert!(size <= SIZE_MAX);
        let (memory, ours) = Memory::new();
        memory.write(AVAILABLE + 2, &first.to_le_bytes());
        memory.write(USED + 2, &first.to_le_bytes());
        let out = (0..size).map(|_| Vec::new()).collect();
        let mut driver =
            Driver { memory, size, has_event_index, free: (0..size).collect(), out, available: first, used: first };
        let mut queue = Split::new(&ours, place(size), first, None, has_event_index).unwrap();
        let (mut offered, mut taken, mut completed) =
            (VecDeque::<Offered>::new(), VecDeque::<Offered>::new(), VecDeque::<(u16, u32)>::new());
        let (mut shown, mut hidden, mut event) = (VecDeque::<(u16, u32)>::new(), first, 0_u16);
        driver.want_interrupt(0);
        let mut chain = Chain::default();
        for step in steps {
            match step {
                Step::Offer(pieces, is_indirect, fill) => {
                    let pieces = if is_indirect { pieces[..pieces.len().min(size.into())].to_vec() } else { pieces };
                    if let Some((head, places)) = driver.offer(&pieces, is_indirect, fill) {
                        offered.push_back((head, pieces, places));
                    }
                }
                Step::Take(is_put_back) => {
                    let came = queue.take(&ours, &mut chain).unwrap();
                    prop_assert_eq!(came, !offered.is_empty());
                    if !came { continue }
                    let it = &offered[0];
                    prop_assert_eq!(chain.head.id, it.0);
                    let len = |written| it.1.iter().filter(|piece| piece.1 == written).map(|piece| usize::from(piece.0)).sum::<usize>();
                    prop_assert_eq!((len_of(&chain.readable), len_of(&chain.writable)), (len(false), len(true)));
                    let mut bytes = vec![0; len(false)];
                    prop_assert!(ours.copy_to(&chain.readable, 0, &mut bytes));
                    prop_assert_eq!(&bytes, &bytes_of(&driver.memory, it, false));
                    let from = bytes.len() / 2;
                    let mut back = vec![0; bytes.len() - from];
                    prop_assert!(ours.copy_to(&chain.readable, from, &mut back));
                    prop_assert_eq!(&back, &bytes[from..]);
                    prop_assert!(!ours.copy_to(&chain.readable, 0, &mut vec![0; bytes.len() + 1]));
                    let fill: Vec<u8> = (0..len(true)).map(|i| i.wrapping_mul(7).to_le_bytes()[0]).collect();
                    ours.fill(&chain.writable, 0, fill.len(), |at, len, region, offset| region.copy_from(offset, &fill[at..at + len]));
                    prop_assert_eq!(&bytes_of(&driver.memory, it, true), &fill);
                    match is_put_back {
                        true => queue.put_back(chain.head),
                        false => taken.push_back(offered.pop_front().unwrap()),
                    }
                }
                Step::Complete(len, is_undone) => {
                    let Some((head, ..)) = taken.front() else { continue };
                    let before = queue.state();
                    queue.complete(Head { id: *head, slots: 1 }, len);
                    match is_undone {
                        true => queue.rewind(before),
                        false => completed.push_back((taken.pop_front().unwrap().0, len)),
                    }
                }
                Step::Show => {
                    let wants = queue.show();
                    let (old, new) = (hidden, hidden.wrapping_add(u16::try_from(completed.len()).unwrap()));
                    // Is the event among the indices that were passed (2.7.10)?
                    let is_passed = (0..new.wrapping_sub(old)).any(|i| old.wrapping_add(i) == event);
                    let expected = if has_event_index { is_passed } else { event & 1 == 0 && new != old };
                    prop_assert_eq!(wants, expected);
                    hidden = new;
                    shown.append(&mut completed);
                }
                Step::Reclaim => prop_assert_eq!(driver.reclaim(), shown.pop_front()),
                Step::WantInterrupt(ahead) => {
                    event = if has_event_index { driver.used.wrapping_add(ahead) } else { ahead };
                    driver.want_interrupt(event);
                }
                Step::Reopen if taken.is_empty() && completed.is_empty() => {
                    let (next, done) = queue.positions();
                    prop_assert_eq!(next, done);
                    queue = Split::new(&ours, place(size), next, Some(done), has_event_index).unwrap();
                    // A predecessor that was killed had not stored it yet.
                    driver.memory.write(USED + 2, &done.wrapping_sub(1).to_le_bytes());
                    queue.show_again();
                    prop_assert_eq!(driver.memory.half(USED + 2), done);
                }
                Step::Reopen => {}
            }
        }
    }

    /// The memory holds anything, and its driver changes it at any time.
    #[test]
    fn in_memory_that_holds_anything_a_queue_takes_what_the_specification_allows_and_writes_only_its_used_ring(
        steps in proptest::collection::vec((proptest::collection::vec(change(), 0..12), 0_u8..8, any::<u16>()), 1..60),
        size in prop_oneof![9 => (0_u32..6).prop_map(|log| 1_u16 << log), 1 => any::<u16>()],
        next in any::<u16>(),
        elsewhere in proptest::option::weighted(0.1, [0_u64..0x2_0000, 0_u64..0x2_0000, 0_u64..0x2_0000]),
    ) {
        let (memory, ours) = Memory::new();
        let mut place = place(size);
        if let Some([descriptors, available, used]) = elsewhere {
            place = Place { size, descriptors: USER + descriptors, available: USER + available, used: USER + used };
        }
        let Ok(mut queue) = Split::new(&ours, place, next, None, true) else { return Ok(()) };
        let (is_known, size_here) = (elsewhere.is_none() && size <= SIZE_MAX, size.min(SIZE_MAX));
        let mut chain = Chain::default();
        for (changes, what, number) in steps {
            for change in changes {
                change.make(&memory, size_here, queue.positions().0);
            }
            let before = memory.but_the_used_ring(size_here);
            match what {
                0 => queue.complete(Head { id: number, slots: 1 }, number.into()),
                1 => _ = queue.show(),
                2 => (0..number % 3).for_each(|_| queue.put_back(Head::default())),
                3 => queue.want_kicks(number & 1 == 1),
                _ => {
                    let expected = is_known.then(|| expected(&memory, size, queue.positions().0));
                    let came = queue.look().and_then(|_| queue.take(&ours, &mut chain));
                    if let Some(expected) = &expected {
                        prop_assert_eq!(came.ok(), expected.as_ref().ok().map(Option::is_some));
                    }
                    if came == Ok(true) {
                        let mut bytes = vec![0; len_of(&chain.readable)];
                        prop_assert!(ours.copy_to(&chain.readable, 0, &mut bytes));
                        prop_assert!(ours.copy_to(&chain.writable, 0, &mut vec![0; len_of(&chain.writable)]));
                        prop_assert!(chain.readable.len() <= PIECES_MAX && chain.writable.len() <= PIECES_MAX);
                        if let Some(Ok(Some((head, readable, writable)))) = &expected {
                            prop_assert_eq!((chain.head.id, len_of(&chain.writable)), (*head, *writable));
                            prop_assert!(&bytes == readable);
                        }
                    }
                }
            }
            if is_known {
                prop_assert!(before == memory.but_the_used_ring(size_here), "after step {}", what);
            }
        }
        prop_assert!(!ours.is_gone());
    }
}

/// The short way for frames refuses no chain, and takes none that the long way refuses.
#[test]
fn a_chain_that_is_taken_as_plain_lies_in_one_region_with_all_its_bytes() {
    fn check(memory: &Memory, ours: &DriverMemory, mut ring: impl Ring, last: [u16; 2]) {
        let mut chain = Chain::default();
        let mut describe = |address: u64, len: u32| {
            let last = last.map(u16::to_le_bytes);
            memory.write(DESCRIPTORS, &[&address.to_le_bytes()[..], &len.to_le_bytes(), &last.concat()].concat());
            let plain = ring.next_plain(ours, 32).unwrap().map(|(_, piece)| piece.len);
            let came = ring.take(ours, &mut chain);
            came.iter().for_each(|_| ring.put_back(chain.head));
            (plain, came.map(|_| chain.writable.iter().map(|piece| piece.len).collect::<Vec<_>>()))
        };
        let end = GUEST + REGIONS * LEN;
        assert_eq!(describe(end - 64, 64), (Some(64), Ok(vec![64])));
        assert_eq!(describe(GUEST + LEN - 64, 100), (None, Ok(vec![64, 36])), "in two regions");
        assert_eq!(describe(end - 64, 65), (None, Err(Broken::Outside)), "beyond its end");
        assert_eq!(describe(end - 64, u32::MAX), (None, Err(Broken::Outside)));
    }
    let (memory, ours) = Memory::new();
    check(&memory, &ours, Packed::new(&ours, place(8), Packed::BEGINNING, true, false).unwrap(), [0, 0x82]);
    memory.write(AVAILABLE + 2, &1_u16.to_le_bytes());
    check(&memory, &ours, Split::new(&ours, place(8), 0, Some(0), true).unwrap(), [2, 0]);
}

/// A change of the memory by its driver, which may be hostile.
#[derive(Debug, Clone)]
enum Change {
    /// In the table of descriptors, or in one that a descriptor names.
    Descriptor {
        in_table: bool,
        at: u16,
        address: u64,
        len: u32,
        flags: u16,
        next: u16,
    },
    /// A descriptor that names a table of so many.
    Table(u16, u32),
    /// The driver's index, counted from the next chain.
    Index(u16),
    Head(u16, u16),
    Used(u16, u16),
}

/// Returns addresses, lengths and flags of descriptors: mostly sound ones. Of `tables + 9` addresses, `tables` are those of
/// the tables.
fn parts(tables: u32) -> (impl Strategy<Value = u64>, impl Strategy<Value = u32>, impl Strategy<Value = u16>) {
    let end = GUEST + REGIONS * LEN;
    let address = prop_oneof![6 => GUEST..end, tables => Just(GUEST + TABLES), 1 => end - 64..end + 64, 1 => GUEST - 64..GUEST + 64, 1 => any::<u64>()];
    let len = prop_oneof![4 => 0_u32..300, 4 => (0_u32..40).prop_map(|count| 16 * count), 1 => 0_u32..0x2_0000, 1 => any::<u32>()];
    let flags = prop_oneof![12 => Just(0_u16), 6 => Just(1_u16), 4 => Just(2_u16), 3 => Just(3_u16), 6 => Just(4_u16), 1 => 0_u16..8];
    (address, len, flags)
}

fn change() -> impl Strategy<Value = Change> {
    let (address, len, flags) = parts(3);
    let descriptor = (any::<bool>(), 0_u16..33, address, len, flags, 0_u16..33).prop_map(
        |(in_table, at, address, len, flags, next)| Change::Descriptor { in_table, at, address, len, flags, next },
    );
    prop_oneof![
        12 => descriptor,
        6 => (0_u16..33, 1_u32..34).prop_map(|(at, count)| Change::Table(at, count)),
        6 => (0_u16..34).prop_map(Change::Index),
        1 => any::<u16>().prop_map(Change::Index),
        6 => (0_u16..32, 0_u16..33).prop_map(|(at, head)| Change::Head(at, head)),
        1 => (any::<u16>(), any::<u16>()).prop_map(|(at, word)| Change::Used(at, word)),
    ]
}

impl Change {
    fn make(&self, memory: &Memory, size: u16, taken: u16) {
        match *self {
            Change::Descriptor { in_table, at, address, len, flags, next } => {
                let table = if in_table { TABLES } else { DESCRIPTORS };
                let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
                memory.write(table + 16 * u64::from(at), &bytes.concat());
            }
            Change::Table(at, count) => {
                let bytes = [&(GUEST + TABLES).to_le_bytes()[..], &(16 * count).to_le_bytes(), &[4, 0, 0, 0]];
                memory.write(DESCRIPTORS + 16 * u64::from(at % size), &bytes.concat());
            }
            Change::Index(ahead) => memory.write(AVAILABLE + 2, &taken.wrapping_add(ahead).to_le_bytes()),
            Change::Head(at, head) => memory.write(AVAILABLE + 4 + 2 * u64::from(at), &head.to_le_bytes()),
            Change::Used(at, word) => memory.write(USED + 2 * u64::from(at % (2 + 4 * size)), &word.to_le_bytes()),
        }
    }
}

/// The head of a chain, the bytes that the device reads, and the number of those that it writes.
type Expected = (u16, Vec<u8>, usize);

/// Returns the next chain by the letter of the specification, or an error if the driver broke a rule.
fn expected(memory: &Memory, size: u16, next: u16) -> Result<Option<Expected>, ()> {
    let there = memory.half(AVAILABLE + 2).wrapping_sub(next);
    match there {
        0 => return Ok(None),
        _ if there > size => return Err(()),
        _ => {}
    }
    let head = memory.half(AVAILABLE + 4 + 2 * u64::from(next % size));
    let is_there = |address: u64, len: u32| {
        let end = address.checked_add(len.into());
        len == 0 || (address >= GUEST && end.is_some_and(|end| end <= GUEST + REGIONS * LEN))
    };
    let (mut table, mut count, mut at, mut steps, mut is_nested) =
        (DESCRIPTORS, u32::from(size), u32::from(head), 0, false);
    let (mut readable, mut writable) = (Vec::new(), 0);
    loop {
        if at >= count || steps == count {
            return Err(());
        }
        steps += 1;
        let descriptor = table + 16 * u64::from(at);
        let address = u64::from_le_bytes(memory.read(descriptor, 8).try_into().unwrap());
        let (len, flags, next) =
            (memory.word(descriptor + 8), memory.half(descriptor + 12), memory.half(descriptor + 14));
        if flags & 4 != 0 {
            let entries = len / 16;
            let is_odd = is_nested || flags & 1 != 0 || len % 16 != 0 || entries == 0 || entries > size.into();
            if is_odd || !is_there(address, len) {
                return Err(());
            }
            (table, count, at, steps, is_nested) = (address - GUEST, entries, 0, 0, true);
            continue;
        }
        if !is_there(address, len) {
            return Err(());
        }
        match flags & 2 {
            0 if len > 0 => readable.extend(memory.read(address - GUEST, len.into())),
            _ => writable += len as usize * usize::from(flags & 2 != 0),
        }
        if flags & 1 == 0 {
            return Ok(Some((head, readable, writable)));
        }
        at = next.into();
    }
}
