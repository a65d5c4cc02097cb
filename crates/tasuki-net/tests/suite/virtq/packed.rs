//! The same for a packed ring.

use tasuki_net::virtq::COMPLETIONS_MAX;

use super::*;
use crate::vm::packed::{Driver, Memory as _, Position};

impl crate::vm::packed::Memory for Memory {
    fn put(&self, at: u64, bytes: &[u8]) {
        self.write(at, bytes);
    }

    fn get(&self, at: u64) -> u16 {
        self.half(at)
    }
}

impl Memory {
    fn all(&self) -> Vec<Vec<u8>> {
        self.but(0, 0)
    }

    /// Returns all bytes, and zeroes in place of the descriptors and the device area.
    fn but_what_a_device_writes(&self, size: u16) -> Vec<Vec<u8>> {
        let mut all = self.but(DESCRIPTORS, 16 * usize::from(size));
        let from = usize::try_from(OFFSET + USED).unwrap();
        all[0][from..from + 4].fill(0);
        all
    }
}

/// Makes a ring that has gone on to a position, with all descriptors used.
fn used_up_to(memory: Memory, size: u16, start: Position) -> (Memory, Driver) {
    for at in 0..size {
        let lap = start.wraps ^ (at >= start.at);
        memory.write(DESCRIPTORS + 16 * u64::from(at) + 14, &(if lap { 0x8080_u16 } else { 0 }).to_le_bytes());
    }
    (memory, Driver::new([DESCRIPTORS, AVAILABLE, USED], size, start.word()))
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
    /// Asks for an interrupt at a descriptor so far ahead, or for all or none.
    WantInterrupt(Option<u16>, bool),
    /// Opens the device's end anew: where it was if the turn was committed, or where the driver sees it.
    Reopen(bool),
    /// A successor finds the last completions once more.
    ShowAgain,
}

fn step() -> impl Strategy<Value = Step> {
    let pieces = proptest::collection::vec((0_u16..300, any::<bool>()), 1..6);
    prop_oneof![
        4 => (pieces, any::<bool>(), any::<u8>()).prop_map(|(pieces, is_indirect, fill)| Step::Offer(pieces, is_indirect, fill)),
        4 => proptest::bool::weighted(0.2).prop_map(Step::Take),
        4 => (prop_oneof![Just(0_u32), any::<u32>()], proptest::bool::weighted(0.2)).prop_map(|(len, undone)| Step::Complete(len, undone)),
        3 => Just(Step::Show),
        3 => Just(Step::Reclaim),
        2 => (proptest::option::of(0_u16..8), any::<bool>()).prop_map(|(ahead, all)| Step::WantInterrupt(ahead, all)),
        1 => any::<bool>().prop_map(Step::Reopen),
        1 => Just(Step::ShowAgain),
    ]
}

/// Offers a chain, whose bytes lie in the buffer of its id. Returns where each piece is.
fn offer(driver: &mut Driver, memory: &Memory, id: u16, pieces: &[Piece], is_indirect: bool, fill: u8) -> Vec<u64> {
    let mut at = BUFFERS + BUFFER * u64::from(id);
    let (mut places, mut chain) = (Vec::new(), Vec::new());
    for (len, is_written) in pieces {
        if !is_written {
            let bytes: Vec<u8> = (0..*len).map(|j| fill.wrapping_add(j.to_le_bytes()[0])).collect();
            memory.write(at, &bytes);
        }
        chain.push((GUEST + at, u32::from(*len), if *is_written { 2 } else { 0 }));
        places.push(at);
        at += u64::from(*len);
    }
    if is_indirect {
        let table = TABLES + 0x80 * u64::from(id);
        for (i, (address, len, flags)) in chain.iter().enumerate() {
            let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &[fill, fill], &u16::to_le_bytes(*flags)];
            memory.write(table + 16 * i as u64, &bytes.concat());
        }
        chain = vec![(GUEST + table, 16 * u32::try_from(chain.len()).unwrap(), 4)];
    }
    driver.offer(memory, id, &chain);
    places
}

/// A chain that was offered, and the number of descriptors that it takes.
type OfferedSlots = (Offered, u16);

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn what_a_driver_offers_in_a_packed_ring_comes_whole_and_in_order_and_goes_back_in_order(
        steps in proptest::collection::vec(step(), 1..200),
        size in 1_u16..=SIZE_MAX,
        start in (any::<u16>(), any::<bool>()),
        has_event_index in any::<bool>(),
        is_in_order in any::<bool>(),
    ) {
        let (memory, ours) = Memory::new();
        let start = Position { at: start.0 % size, wraps: start.1 };
        let (memory, mut driver) = used_up_to(memory, size, start);
        (driver.has_event_index, driver.is_in_order) = (has_event_index, is_in_order);
        let open = |at: u16| Packed::new(&ours, place(size), at, has_event_index, is_in_order).unwrap();
        let mut ring = open(start.word());
        let mut free: VecDeque<u16> = (0..size).collect();
        let (mut offered, mut taken, mut completed) =
            (VecDeque::<OfferedSlots>::new(), VecDeque::<(Head, OfferedSlots)>::new(), VecDeque::<(OfferedSlots, u32)>::new());
        let mut shown = VecDeque::<(u16, u32)>::new();
        // Positions that were passed since the last look, what is asked for, and what a predecessor noted.
        let (mut hidden, mut event, mut all) = (start, None::<Position>, true);
        let mut noted = (0, Vec::new());
        let mut chain = Chain::default();
        driver.want_interrupt(&memory, None, true);
        for step in steps {
            match step {
                Step::Offer(pieces, is_indirect, fill) => {
                    let need = if is_indirect { 1 } else { u16::try_from(pieces.len()).unwrap() };
                    if driver.free < need { continue }
                    let id = free.pop_front().unwrap();
                    let places = offer(&mut driver, &memory, id, &pieces, is_indirect, fill);
                    offered.push_back(((id, pieces, places), need));
                }
                Step::Take(is_put_back) => {
                    let before = memory.all();
                    let came = ring.take(&ours, &mut chain).unwrap();
                    prop_assert!(before == memory.all());
                    prop_assert_eq!(came, !offered.is_empty());
                    if !came { continue }
                    let (it, slots) = &offered[0];
                    prop_assert_eq!(chain.head, Head { id: it.0, slots: *slots });
                    let len = |written| it.1.iter().filter(|piece| piece.1 == written).map(|piece| usize::from(piece.0)).sum::<usize>();
                    prop_assert_eq!((len_of(&chain.readable), len_of(&chain.writable)), (len(false), len(true)));
                    let mut bytes = vec![0; len(false)];
                    prop_assert!(ours.copy_to(&chain.readable, 0, &mut bytes));
                    prop_assert_eq!(&bytes, &bytes_of(&memory, it, false));
                    let fill: Vec<u8> = (0..len(true)).map(|i| i.wrapping_mul(7).to_le_bytes()[0]).collect();
                    ours.fill(&chain.writable, 0, fill.len(), |at, len, region, offset| region.copy_from(offset, &fill[at..at + len]));
                    prop_assert_eq!(&bytes_of(&memory, it, true), &fill);
                    match is_put_back {
                        true => ring.put_back(chain.head),
                        false => taken.push_back((chain.head, offered.pop_front().unwrap())),
                    }
                }
                Step::Complete(len, is_undone) => {
                    let Some((head, _)) = taken.front() else { continue };
                    let (before, state) = (memory.all(), ring.state());
                    ring.complete(*head, len);
                    prop_assert!(before == memory.all());
                    match is_undone {
                        true => ring.rewind(state),
                        false => completed.push_back((taken.pop_front().unwrap().1, len)),
                    }
                }
                Step::Show => {
                    if let (first, words @ [_, ..]) = ring.completions() {
                        noted = (first, words.to_vec());
                    }
                    let wants = ring.show();
                    let count: u16 = completed.iter().map(|((_, slots), _)| slots).sum();
                    let is_passed = |event: Position| (0..count).any(|i| hidden.plus(i, size) == event);
                    let wanted = match event {
                        // 2.8.10: a device without the feature is asked for no descriptor.
                        Some(event) if has_event_index => is_passed(event),
                        _ => all,
                    };
                    prop_assert_eq!(wants, wanted && count > 0);
                    hidden = hidden.plus(count, size);
                    shown.extend(completed.drain(..).map(|((it, _), len)| (it.0, len)));
                }
                Step::Reclaim => {
                    let came = driver.reclaim(&memory);
                    prop_assert_eq!(came.is_some(), !shown.is_empty());
                    let Some((ids, len)) = came else { continue };
                    let expected: Vec<_> = shown.drain(..ids.len()).collect();
                    let is_right = |(i, (id, its)): (usize, &(u16, u32))| ids[i] == *id && *its == len;
                    prop_assert!(expected.iter().enumerate().all(is_right), "{:?} for {:?}", ids, expected);
                    free.extend(ids);
                }
                Step::WantInterrupt(ahead, each) => {
                    event = ahead.filter(|_| has_event_index).map(|ahead| driver.used.plus(ahead % size, size));
                    all = each;
                    driver.want_interrupt(&memory, event, all);
                }
                Step::Reopen(is_committed) if taken.is_empty() => {
                    let (first, words) = ring.completions();
                    noted = (first, words.to_vec());
                    let (next, done) = ring.positions();
                    prop_assert_eq!((next, first), (done, hidden.word()));
                    let before = memory.all();
                    ring = open(if is_committed { done } else { first });
                    ring.show_again(noted.0, &noted.1);
                    if is_committed {
                        let count: u16 = completed.iter().map(|((_, slots), _)| slots).sum();
                        hidden = hidden.plus(count, size);
                        shown.extend(completed.drain(..).map(|((it, _), len)| (it.0, len)));
                    } else {
                        prop_assert!(before == memory.all(), "that turn did not happen");
                        while let Some((it, _)) = completed.pop_back() {
                            offered.push_front(it);
                        }
                    }
                }
                Step::ShowAgain if taken.is_empty() && completed.is_empty() => {
                    let before = memory.all();
                    ring = open(ring.positions().1);
                    ring.show_again(noted.0, &noted.1);
                    prop_assert!(before == memory.all(), "the driver has seen it");
                }
                Step::Reopen(_) | Step::ShowAgain => {}
            }
        }
    }

    /// The memory holds anything, and its driver changes it at any time.
    #[test]
    fn in_memory_that_holds_anything_a_packed_ring_takes_what_the_specification_allows_and_writes_only_used_descriptors(
        steps in proptest::collection::vec((proptest::collection::vec(change(), 0..12), 0_u8..9, any::<u16>()), 1..60),
        size in prop_oneof![9 => 1_u16..=SIZE_MAX, 1 => any::<u16>()],
        start in any::<u16>(),
        elsewhere in proptest::option::weighted(0.1, [0_u64..0x2_0000, 0_u64..0x2_0000, 0_u64..0x2_0000]),
    ) {
        let (memory, ours) = Memory::new();
        let mut place = place(size);
        if let Some([descriptors, available, used]) = elsewhere {
            place = Place { size, descriptors: USER + descriptors, available: USER + available, used: USER + used };
        }
        let start = if size <= SIZE_MAX { start & 0x8000 | ((start & 0x7fff) % size) } else { start };
        let Ok(mut ring) = Packed::new(&ours, place, start, true, true) else { return Ok(()) };
        let (is_known, size_here) = (elsewhere.is_none() && size <= SIZE_MAX, size.min(SIZE_MAX));
        let (mut chain, mut taken, mut hidden) = (Chain::default(), VecDeque::<Head>::new(), 0_usize);
        for (changes, what, number) in steps {
            for change in changes {
                change.make(&memory, size_here, Position::of(ring.positions().0));
            }
            let (before, all) = (memory.but_what_a_device_writes(size_here), memory.all());
            match what {
                0 | 1 => {
                    if let Some(head) = taken.pop_front() {
                        hidden += usize::from(head.slots);
                        ring.complete(head, number.into());
                    }
                }
                2 => {
                    ring.show();
                    hidden = 0;
                }
                3 => taken.pop_back().into_iter().for_each(|head| ring.put_back(head)),
                4 => ring.want_kicks(number & 1 == 1),
                5 => ring.show_again(start, &[u64::from(number) << 44]),
                _ => {
                    let held = hidden + taken.iter().map(|head| usize::from(head.slots)).sum::<usize>();
                    let left = usize::from(size) - held;
                    let expected = is_known.then(|| expected(&memory, size, Position::of(ring.positions().0), left));
                    let came = ring.take(&ours, &mut chain);
                    if let Some(expected) = &expected {
                        prop_assert_eq!(came.ok(), expected.as_ref().ok().map(Option::is_some));
                    }
                    if came == Ok(true) {
                        prop_assert!(taken.len() < COMPLETIONS_MAX);
                        taken.push_back(chain.head);
                        let mut bytes = vec![0; len_of(&chain.readable)];
                        prop_assert!(ours.copy_to(&chain.readable, 0, &mut bytes));
                        prop_assert!(ours.copy_to(&chain.writable, 0, &mut vec![0; len_of(&chain.writable)]));
                        prop_assert!(chain.readable.len() <= PIECES_MAX && chain.writable.len() <= PIECES_MAX);
                        if let Some(Ok(Some((head, readable, writable)))) = &expected {
                            prop_assert_eq!((chain.head, len_of(&chain.writable)), (*head, *writable));
                            prop_assert!(&bytes == readable);
                        }
                    }
                }
            }
            if is_known {
                prop_assert!(before == memory.but_what_a_device_writes(size_here), "after step {}", what);
                prop_assert!(matches!(what, 2 | 4 | 5) || all == memory.all(), "after step {}", what);
            }
        }
        prop_assert!(!ours.is_gone());
    }
}

/// A change of the memory by its driver, which may be hostile.
#[derive(Debug, Clone)]
enum Change {
    /// In the ring, so far from the next chain, or in a table. Its marks are those of an available descriptor, or not.
    Descriptor {
        in_table: bool,
        at: u16,
        address: u64,
        len: u32,
        id: u16,
        flags: u16,
        marks: Option<u16>,
    },
    Events(u16, u16),
}

fn change() -> impl Strategy<Value = Change> {
    let (address, len, flags) = parts(6);
    let marks = proptest::option::weighted(0.2, any::<u16>());
    let descriptor = (any::<bool>(), 0_u16..33, address, len, any::<u16>(), flags, marks).prop_map(
        |(in_table, at, address, len, id, flags, marks)| Change::Descriptor {
            in_table,
            at,
            address,
            len,
            id,
            flags,
            marks,
        },
    );
    prop_oneof![12 => descriptor, 1 => (any::<u16>(), any::<u16>()).prop_map(|(event, flags)| Change::Events(event, flags))]
}

impl Change {
    fn make(&self, memory: &Memory, size: u16, next: Position) {
        match *self {
            Change::Descriptor { in_table, at, address, len, id, flags, marks } => {
                let place = next.plus(at, size);
                let available = if place.wraps { 0x80 } else { 0x8000 };
                let entry = match in_table {
                    true => TABLES + 16 * u64::from(at),
                    false => DESCRIPTORS + 16 * u64::from(place.at),
                };
                let flags = flags | marks.map_or(available, |marks| marks & 0x8080);
                let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &id.to_le_bytes(), &flags.to_le_bytes()];
                memory.write(entry, &bytes.concat());
            }
            Change::Events(event, flags) => memory.put(AVAILABLE, &[event.to_le_bytes(), flags.to_le_bytes()].concat()),
        }
    }
}

/// What completes a chain, the bytes that the device reads, and the number of those that it writes.
type Expected = (Head, Vec<u8>, usize);

/// Returns the next chain by the letter of the specification, or an error if the driver broke a rule. `left` descriptors
/// are not taken.
fn expected(memory: &Memory, size: u16, next: Position, left: usize) -> Result<Option<Expected>, ()> {
    let (mut readable, mut writable) = (Vec::new(), 0);
    let mut read = |address: u64, len: u32, flags: u16| {
        let end = address.checked_add(len.into());
        if len > 0 && !(address >= GUEST && end.is_some_and(|end| end <= GUEST + REGIONS * LEN)) {
            return Err(());
        }
        match flags & 2 {
            0 if len > 0 => readable.extend(memory.read(address - GUEST, len.into())),
            _ => writable += len as usize * usize::from(flags & 2 != 0),
        }
        Ok(())
    };
    let entry = |at: u64| {
        let address = u64::from_le_bytes(memory.read(at, 8).try_into().unwrap());
        (address, memory.word(at + 8), memory.half(at + 12), memory.half(at + 14))
    };
    let of = |at: Position| entry(DESCRIPTORS + 16 * u64::from(at.at));
    let is_available = |flags: u16| flags & 0x8080 == if next.wraps { 0x80 } else { 0x8000 };
    if left == 0 || !is_available(of(next).3) {
        return Ok(None);
    }
    for slots in 1..=u16::try_from(left).unwrap() {
        let (address, len, id, flags) = of(next.plus(slots - 1, size));
        match flags & 4 {
            0 => read(address, len, flags)?,
            _ if slots > 1 || flags & 1 != 0 || len == 0 || len % 16 != 0 || len / 16 > 256 => return Err(()),
            _ => {
                // The table's own bytes are there.
                let end = address.checked_add(len.into()).ok_or(())?;
                if address < GUEST || end > GUEST + REGIONS * LEN {
                    return Err(());
                }
                for i in 0..u64::from(len / 16) {
                    let (address, len, _, flags) = entry(address - GUEST + 16 * i);
                    read(address, len, flags)?;
                }
            }
        }
        if flags & 1 == 0 {
            return Ok(Some((Head { id, slots }, readable, writable)));
        }
    }
    Err(())
}
