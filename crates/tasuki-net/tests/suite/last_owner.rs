//! A card whose last owner is not trusted: it plays every trick that the data sheet allows, releases the card, and
//! is fenced. The next owner works, or refuses the card and starts it anew. It never reads what that owner planted,
//! and that owner's settings never read or write its memory.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::bus::{Bus, Iova, Registers};
use tasuki_net::nic::e1000e::Ready;
use tasuki_net::nic::{Failed, Filter, How, InPlace, Left, Link, Nic, NicMemory, NicOptions, Repoint};
use tasuki_net::port::{Armed, Port};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::Region;
use tasuki_sim::journal::{Class, Entry};
use tasuki_sim::wire::Counts;

use crate::conformance::tricks;
use crate::plugged::{self, Card, Wire, echo, with_card};
use crate::wait::readable;
use tasuki_testing::PATIENCE;

const RATE: u64 = 100_000;
/// Frames that the first owner sends back, and those that the second must send back.
const BEFORE: u64 = 64;
const AFTER: u64 = 300;

/// Longest pause of a partner at 1 Gb/s (IEEE 802.3, annex 31B), and a little.
const LONGEST_PAUSE: Duration = Duration::from_millis(40);

// Register offsets from the data sheet, chapter 10.
const TDBAL1: u32 = 0x3900;
const TARC1: u32 = 0x3940;

/// Bus addresses of each owner's memory.
const OLD: Iova = Iova(1 << 32);
const NEW: Iova = Iova(2 << 32);

fn memory(at: Iova) -> NicMemory {
    NicMemory::create(Geometry { slot_len: 4096, count: 640 }, 256 << 10, at).unwrap()
}

fn options() -> NicOptions {
    NicOptions { filter: Filter { promiscuous: true, ..Filter::default() }, ..NicOptions::default() }
}

/// The last owner's access to the card after the release: the card's registers, its own memory, and its bus.
type Hostile = tricks::Hostile<<VfioUser as Bus>::Registers>;

/// Drives until `AFTER` more frames have come, gone, and come back, and another one has woken the driver.
fn works(nic: &mut Card, wire: &Wire) {
    let back = wire.back() + AFTER;
    let (began, mut last) = (Instant::now(), (Instant::now(), 0));
    while wire.back() < back {
        assert!(began.elapsed() < PATIENCE, "frames do not come back: {:?}", nic.link());
        if last.1 != wire.back() {
            last = (Instant::now(), wire.back());
        } else if last.0.elapsed() > LONGEST_PAUSE {
            // The frame that ends the partner's pause was lost with the link, and this partner would wait for ever.
            wire.end_pause();
            last.0 = Instant::now();
        }
        echo(nic, u64::MAX, |nic| {
            let _ = nic.link();
            true
        });
    }
    let began = Instant::now();
    while nic.arm().unwrap() == Armed::Busy {
        assert!(began.elapsed() < PATIENCE, "it is never idle");
        echo(nic, u64::MAX, |_| true);
    }
    assert!(readable(&nic.fd(), PATIENCE), "nobody is woken");
}

/// Makes a driving owner, the next one, which trusts nothing of it, and the first one's further access to the card.
fn owners(socket: OwnedFd) -> (Card, Ready<VfioUser>, Hostile) {
    owners_by(socket, true)
}

fn owners_by(socket: OwnedFd, is_fenced: bool) -> (Card, Ready<VfioUser>, Hostile) {
    let old = memory(OLD);
    let rings = Region::adopt(old.parts().unwrap().rings).unwrap();
    let giver = plugged::start(socket, old, true);
    let twin = || VfioUser::from_twin(giver.bus().twin().unwrap(), TIMEOUT).unwrap();
    let (bus, mut other) = (twin(), twin());
    let registers = other.registers(0).unwrap();
    let how = if is_fenced { How::Fenced(giver.mac()) } else { How::Point };
    let next = Card::prepare_rings(bus, memory(NEW), &options(), how, OLD).unwrap();
    (giver, next, Hostile { registers, common: 0, rings, old: OLD, next: NEW })
}

/// Handles the rest of the frames and releases the card.
fn let_go(giver: &mut Card) -> Left {
    giver.quiesce(How::Point, |_| ());
    loop {
        echo(giver, u64::MAX, Card::is_quiet);
        if giver.leave().unwrap() {
            return giver.left();
        }
    }
}

/// Result for the next owner.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// It drives the card, and the link stayed up.
    Took,
    /// It refused the card for this reason, and has started it anew.
    Refused(String),
}

/// Does one turn: an owner releases the card and attacks, and the next owner takes it.
fn turn(attack: impl Fn(&Hostile) + Send + Sync, is_fenced: bool, says_stopped: bool) -> (Outcome, Counts, Vec<Entry>) {
    with_card(RATE, u64::MAX, |socket: OwnedFd, wire: &Wire| {
        let (mut giver, next, hostile) = owners_by(socket, is_fenced);
        wire.begin();
        echo(&mut giver, BEFORE, |_| false);
        let left = let_go(&mut giver);
        let left = if says_stopped { Left::STOPPED } else { left };
        attack(&hostile);
        // From here on the giver is fenced.
        let (_, old) = giver.stand_down();
        match Card::repoint(next, left) {
            Ok(mut nic) => {
                nic.forget(&old.layout(), |nic| _ = echo(nic, u64::MAX, |_| true)).unwrap();
                works(&mut nic, wire);
                Outcome::Took
            }
            Err(Failed { error, bus, memory }) => {
                let mut nic = Card::start(bus, memory, &options()).unwrap();
                let began = Instant::now();
                while nic.link().unwrap() == Link::Down {
                    assert!(began.elapsed() < PATIENCE, "the link comes up");
                    std::thread::yield_now();
                }
                wire.end_pause();
                works(&mut nic, wire);
                Outcome::Refused(error.to_string())
            }
        }
    })
}

fn fenced(attack: impl Fn(&Hostile) + Send + Sync) -> (Outcome, Counts, Vec<Entry>) {
    turn(attack, true, false)
}

/// Checks that the card accessed no unmapped memory, and sent no frame that did not come from the wire.
#[track_caller]
fn assert_harmless(counts: &Counts, journal: &[Entry]) {
    let astray: Vec<_> = journal.iter().filter(|entry| entry.class == Class::UnmappedDma).collect();
    assert!(astray.is_empty(), "{astray:?}");
    assert_eq!((counts.foreign, counts.damaged, counts.duplicated), (0, 0, 0), "{counts:?}");
}

#[test]
fn a_card_that_was_left_well_is_taken_and_nothing_is_lost() {
    let (outcome, counts, journal) = fenced(|_| ());
    assert_eq!(outcome, Outcome::Took);
    assert_harmless(&counts, &journal);
    let never: Vec<_> = journal
        .iter()
        .filter(|entry| Class::ALWAYS.contains(&entry.class) || Class::COLD.contains(&entry.class))
        .collect();
    assert!(never.is_empty(), "{never:?}");
    assert_eq!(counts.reordered, 0);
}

#[test]
fn a_second_transmit_queue_sends_nothing_of_the_next_owners() {
    // Whether the giver says that the card has stopped, or that it runs: in the latter case the card faults before
    // the memory is mapped.
    for is_stopped in [true, false] {
        let (outcome, counts, journal) = turn(tricks::second_transmit_queue, true, is_stopped);
        assert_eq!(outcome, Outcome::Took);
        let faults: Vec<_> = journal.into_iter().filter(|entry| is_stopped || entry.place < NEW.0).collect();
        assert_harmless(&counts, &faults);
    }
    // Nodes that trust each other do not check: this shows that the trick works without the check.
    let (_, counts, _) = turn(tricks::second_transmit_queue, false, false);
    assert!(counts.foreign + counts.damaged > 0, "the trick works: {counts:?}");
}

#[test]
fn a_second_receive_queue_writes_nothing_into_the_next_owners_memory() {
    let (outcome, counts, journal) = fenced(tricks::second_receive_queue);
    assert_eq!(outcome, Outcome::Took);
    assert_harmless(&counts, &journal);
}

#[test]
fn a_packet_without_an_end_is_not_what_the_next_owners_first_frame_becomes_a_part_of() {
    for is_second in [false, true] {
        let (outcome, counts, journal) = fenced(|hostile| tricks::packet_without_an_end(hostile, is_second));
        assert!(matches!(&outcome, Outcome::Refused(why) if why.contains("a packet without an end")), "{outcome:?}");
        assert_harmless(&counts, &journal);
    }
}

#[test]
fn another_packet_buffer_is_refused() {
    let (outcome, counts, journal) = fenced(tricks::other_packet_buffer);
    assert!(matches!(&outcome, Outcome::Refused(why) if why.contains("packet buffer")), "{outcome:?}");
    assert_harmless(&counts, &journal);
}

#[test]
fn a_phy_that_was_tampered_with_begins_anew() {
    for (register, value) in tricks::PHY {
        let (outcome, counts, journal) = fenced(|hostile| hostile.write_phy(register, value));
        assert_eq!(outcome, Outcome::Took, "{register} = {value:#x}");
        assert_harmless(&counts, &journal);
        assert!(journal.iter().any(|entry| entry.class == Class::PhyReset), "{register} = {value:#x}");
    }
}

#[test]
fn interrupts_that_go_elsewhere_come_back_and_so_does_the_bus() {
    let ((), counts, journal) = with_card(RATE, u64::MAX, |socket, wire| {
        let (mut giver, next, _) = owners(socket);
        wire.begin();
        echo(&mut giver, BEFORE, |_| false);
        let left = let_go(&mut giver);
        let (mut bus, old) = giver.stand_down();
        // All vectors ring eventfds that only the last owner has, and the card may not be bus master.
        let mut all = VfioUser::from_twin(bus.twin().unwrap(), TIMEOUT).unwrap();
        drop(all.interrupts(5).unwrap());
        bus.write_config(4, 2).unwrap();
        let mut nic = Card::repoint(next, left).unwrap();
        nic.forget(&old.layout(), |nic| _ = echo(nic, u64::MAX, |_| true)).unwrap();
        works(&mut nic, wire);
    });
    assert_harmless(&counts, &journal);
}

#[test]
fn whatever_stands_in_any_register_the_next_owner_works_or_refuses() {
    let (mut took, mut refused) = (0, Vec::new());
    for (index, offset) in tricks::registers().into_iter().enumerate() {
        // All ones; or a value like an address in the next owner's memory, and a small number.
        for value in [u32::MAX, [0, 2, 0x0001_0080][index % 3]] {
            let (outcome, counts, journal) = fenced(|hostile| hostile.write(offset, value));
            // The card's acts before it was taken concern the last owner's memory only.
            let entries: Vec<_> = journal.iter().filter(|entry| entry.place >= NEW.0).copied().collect();
            println!("{offset:#06x} = {value:#x}: {outcome:?}");
            // With changed FCAL, FCAH and FCT, the card's own PAUSE frames are not recognised, and count as foreign.
            let foreign = if (0x28..=0x30).contains(&offset) { 0 } else { counts.foreign };
            // A moved head makes the last owner's ring send frames again, or half of one.
            let is_its_ring = (0x3800..=0x3818).contains(&offset);
            let duplicated = if is_its_ring { 0 } else { counts.duplicated };
            // A frame that came while RCTL was the last owner's has its check sequence, or is cut: it waits in the
            // packet buffer.
            let damaged = if is_its_ring || offset == 0x100 { 0 } else { counts.damaged };
            assert_harmless(&Counts { foreign, duplicated, damaged, ..counts }, &entries);
            match outcome {
                Outcome::Took => took += 1,
                Outcome::Refused(why) => refused.push(format!("{offset:#06x} = {value:#x}: {why}")),
            }
        }
    }
    println!("{took} taken; refused: {refused:#?}");
    assert!(took > 10 * refused.len(), "{refused:#?}");
    assert!(!refused.is_empty());
}

#[test]
fn memory_is_not_the_cards_before_its_last_owner_is_fenced() {
    let ((), counts, journal) = with_card(RATE, u64::MAX, |socket, wire| {
        let (mut giver, next, hostile) = owners(socket);
        wire.begin();
        echo(&mut giver, BEFORE, |_| false);
        // While it drives, it points a queue at the next owner's memory.
        let at = hostile.put(128 << 10, &[NEW.0, 0x0b << 24 | 64]);
        hostile.ring(TDBAL1, at, 1);
        hostile.write(TARC1, 0x0400_0403);
        let began = Instant::now();
        while hostile.registers.read32(TDBAL1 + 0x10) == 0 {
            assert!(began.elapsed() < PATIENCE, "it is fetched");
            echo(&mut giver, 8, |_| false);
        }
        drop(Card::give_up(next));
    });
    assert!(journal.iter().any(|entry| entry.class == Class::UnmappedDma && entry.place == NEW.0), "{journal:?}");
    assert_eq!((counts.foreign, counts.damaged), (0, 0));
}

#[test]
fn who_is_lied_to_about_where_the_card_is_goes_on_and_says_what_it_was_told() {
    let ((), counts, _) = with_card(RATE, u64::MAX, |socket, wire| {
        let (mut giver, next, _) = owners(socket);
        wire.begin();
        echo(&mut giver, BEFORE, |_| false);
        let mut lie = let_go(&mut giver);
        // As if the card ran, and had been elsewhere in the ring.
        lie.0 = lie.0 & !0xff | 1 << 63 | (lie.0 ^ 1) & 0xff;
        let (_, old) = giver.stand_down();
        let mut next = Card::repoint(next, lie).unwrap();
        assert!(next.came_too_late() > 0);
        next.forget(&old.layout(), |nic| _ = echo(nic, u64::MAX, |_| true)).unwrap();
        works(&mut next, wire);
    });
    assert_eq!((counts.foreign, counts.damaged, counts.duplicated), (0, 0, 0), "{counts:?}");
}
