//! Rules for a driver of the 82574L: the journal notes each breach, and the model survives any driver.

use crate::rig::*;
use proptest::prelude::*;
use tasuki_sim::e1000e::{Bar, Options};
use tasuki_sim::journal::Class;
use tasuki_sim::model::Model;

#[test]
fn heads_and_rings_are_not_written_while_the_unit_is_on() {
    let rig = Rig::running(8);
    rig.broke_nothing();
    rig.write(RDH, 0);
    rig.write(TDH, 0);
    assert_eq!(rig.broke(Class::HeadWhileEnabled), 2);
    rig.write(RDBAL, 0x8000);
    rig.write(RDLEN, 128);
    rig.write(TDBAH, 1);
    assert_eq!(rig.broke(Class::RingWhileEnabled), 3);
    let rig = Rig::running(8);
    rig.write(RCTL, 0);
    rig.write(TCTL, 0);
    for offset in [RDBAL, RDBAH, RDLEN, RDH, RDT, TDBAL, TDBAH, TDLEN, TDH, TDT] {
        rig.write(offset, 0);
    }
    rig.broke_nothing();
}

#[test]
fn a_ring_is_a_multiple_of_128_bytes_at_a_multiple_of_16() {
    let rig = Rig::linked();
    rig.write(RDLEN, 100);
    rig.write(TDLEN, 1 << 20);
    assert_eq!(rig.broke(Class::RingLength), 2);
    rig.write(RDBAL, 8);
    assert_eq!((rig.broke(Class::RingAlignment), rig.read(RDBAL)), (1, 0));
}

#[test]
fn head_and_tail_lie_inside_of_the_ring() {
    let rig = Rig::running(8);
    rig.write(RDT, 8);
    rig.write(TDT, 0xffff);
    assert_eq!(rig.broke(Class::TailOutside), 2);
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert_eq!(rig.read(RDH), 0, "nothing is done with such a ring");
}

#[test]
fn a_tail_does_not_go_back() {
    let rig = Rig::running(8);
    rig.write(RDT, 7);
    rig.broke_nothing();
    rig.write(RDT, 3);
    assert_eq!(rig.broke(Class::TailBackwards), 1);
}

#[test]
fn a_ring_that_is_written_while_the_unit_is_on_does_not_change_what_was_fetched() {
    let rig = Rig::running(64);
    rig.come(&frame(60, 1));
    rig.pass(1000);
    // Descriptor 1 is on the chip already; the driver's change in memory comes too late.
    rig.store(RX_RING[0] + 16, AT + 0x8000);
    rig.come(&frame(60, 2));
    rig.pass(1000);
    assert_eq!(rig.receive_bytes(0, 1, 60), frame(60, 2));
}

#[test]
fn the_layout_of_descriptors_is_not_changed_while_the_unit_is_on() {
    let rig = Rig::running(8);
    rig.write(RFCTL, 0);
    rig.write(MRQC, 1);
    rig.write(RCTL, EN | SECRC | 1 << 16);
    assert_eq!(rig.broke(Class::SetupWhileEnabled), 3);
}

#[test]
fn work_is_not_given_to_a_card_without_bus_mastering() {
    let rig = Rig::running(8);
    rig.card.write_config(4, 2, 2);
    rig.write(TDT, 1);
    assert_eq!(rig.broke(Class::NoBusMaster), 1);
}

#[test]
fn registers_are_32_bits_wide_and_there_is_not_one_everywhere() {
    let rig = Rig::linked();
    rig.card.write(Bar::Registers, RDT, 2, 1);
    rig.card.read(Bar::Registers, STATUS + 1, 1);
    assert_eq!(rig.broke(Class::OddAccess), 2);
    assert_eq!(rig.read(0x9998), 0);
    assert_eq!(rig.broke(Class::UnknownRegister), 1);
}

#[test]
fn phy_writes_and_link_bits_are_offences_of_a_warm_start() {
    let rig = Rig::linked();
    rig.card.with(|parts| parts.device.journal.clear());
    rig.write(MDIC, 1 << 26 | 1 << 21 | 0x1340);
    assert_eq!((rig.broke(Class::PhyWrite), rig.broke(Class::PhyReset)), (1, 1));
    rig.pass(1000);
    assert_eq!(rig.read(STATUS) & LU, 0, "negotiation began anew");
    rig.write(CTRL, rig.read(CTRL) & !SLU);
    assert_eq!(rig.broke(Class::LinkWrite), 1);
    rig.write(CTRL, rig.read(CTRL) | TFCE);
    assert_eq!(rig.broke(Class::LinkWrite), 1, "PAUSE is no business of the link's");
}

#[test]
#[should_panic(expected = "HeadWhileEnabled")]
fn a_test_can_have_the_model_panic() {
    let rig = Rig::running(8);
    rig.card.with(|parts| parts.device.journal.panic_on(&[Class::HeadWhileEnabled]));
    rig.write(TDH, 0);
}

#[test]
fn the_semaphore_is_taken_by_the_first_read() {
    let rig = Rig::linked();
    assert_eq!((rig.read(SWSM) & 1, rig.read(SWSM) & 1), (0, 1));
    rig.write(SWSM, 0);
    assert_eq!(rig.read(SWSM) & 1, 0);
}

#[test]
fn a_bus_reset_leaves_nothing_as_it_was() {
    let rig = Rig::running(8);
    rig.card.with(|parts| {
        let now = 5_000_000_000;
        parts.device.reset(now);
    });
    assert_eq!((rig.card.read_config(4, 2), rig.card.read_config(0x10, 4)), (0, 0));
    rig.card.write_config(4, 2, 6);
    rig.card.advance(6_000_000_000);
    assert_eq!((rig.read(RCTL), rig.read(RDLEN), rig.read(STATUS) & LU), (0, 0, 0));
}

#[derive(Debug, Clone)]
enum Step {
    Write(u32, u32),
    Read(u32),
    Odd(u8, u32, u8, u32),
    Config(u16, u8, u32),
    Descriptor(u16, u64, u64),
    Frame(Vec<u8>),
    Pass(u32),
    Unmap,
    Map,
}

/// The registers that have effects.
const BUSY: [u32; 40] = [
    CTRL, EERD, CTRL_EXT, MDIC, ICR, ICS, IMS, IMC, EIAC, IAM, IVAR, EITR, RCTL, TCTL, PBA, FCRTL, FCRTH, RDBAL, RDBAH,
    RDLEN, RDH, RDT, RDTR, RADV, TDBAL, TDBAH, TDLEN, TDH, TDT, TIDV, TARC0, RXCSUM, RFCTL, MRQC, SWSM, FCTTV, RAL,
    RAH, RETA, RSSRK,
];

fn value() -> impl Strategy<Value = u32> {
    prop_oneof![any::<u32>(), 0_u32..64, (0_u32..32).prop_map(|bit| 1 << bit), (0_u32..512).prop_map(|n| n * 128)]
}

fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..LEN as u64).prop_map(|offset| AT + offset),
        (0_u64..3000, any::<u8>(), any::<u8>(), 0_u64..4).prop_map(|(len, command, kind, status)| {
            len | u64::from(kind & 1) << 20 | u64::from(command) << 24 | status << 40
        }),
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    let register = prop_oneof![
        prop::sample::select(&BUSY[..]),
        prop::sample::select(&BUSY[..]).prop_map(|offset| offset + 0x100),
        (0_u32..0x8000).prop_map(|word| word * 4),
    ];
    prop_oneof![
        8 => (register.clone(), value()).prop_map(|(offset, value)| Step::Write(offset, value)),
        2 => register.prop_map(Step::Read),
        1 => (0_u8..4, any::<u32>(), 1_u8..5, value()).prop_map(|(bar, offset, width, value)| Step::Odd(bar, offset, width, value)),
        1 => (any::<u16>(), 1_u8..5, value()).prop_map(|(offset, width, value)| Step::Config(offset, width, value)),
        4 => (any::<u16>(), word(), word()).prop_map(|(index, first, second)| Step::Descriptor(index, first, second)),
        4 => prop::collection::vec(any::<u8>(), 0..2000).prop_map(Step::Frame),
        4 => (0_u32..1_000_000).prop_map(Step::Pass),
        1 => Just(Step::Unmap),
        1 => Just(Step::Map),
    ]
}

fn take(rig: &Rig, step: Step) {
    match step {
        Step::Write(offset, value) => rig.write(offset, value),
        Step::Read(offset) => _ = rig.read(offset),
        Step::Odd(bar, offset, width, value) => {
            if let Some((bar, _)) = Bar::at(bar) {
                rig.card.write(bar, offset % (128 << 10), width, value);
                rig.card.read(bar, offset % (128 << 10), width);
            }
        }
        Step::Config(offset, width, value) => {
            rig.card.write_config(offset.into(), width, value);
            rig.card.read_config(offset.into(), width);
            // Otherwise most later steps would meet a card that does not answer.
            rig.card.write_config(4, 2, 6);
        }
        Step::Descriptor(index, first, second) => {
            let at = usize::from(index) % 1024 * 16;
            rig.store(at, first);
            rig.store(at + 8, second);
        }
        Step::Frame(bytes) => {
            let to_us = [&MAC[..], &bytes].concat();
            rig.come(if bytes.len() % 3 == 0 { &bytes } else { &to_us });
        }
        Step::Pass(ns) => rig.pass(ns.into()),
        Step::Unmap => rig.card.unmap(AT, LEN as u64),
        // It may still be mapped.
        Step::Map => _ = rig.card.map(AT, &rig.region),
    }
}

proptest! {
    #[test]
    fn whatever_a_driver_does_the_model_stands(steps in prop::collection::vec(any_step(), 1..400), poison: bool) {
        let rig = Rig::with_options(Options { mac: MAC, poison, ..Options::default() });
        rig.link_up();
        for queue in 0..2 {
            rig.receive_ring(queue, 16);
            rig.transmit_ring(queue, 16);
        }
        rig.write(RCTL, EN | BAM);
        rig.write(TCTL, EN);
        for step in steps {
            take(&rig, step);
        }
        rig.pass(1_000_000);
        let (frames, bytes) = rig.card.with(|parts| parts.device.waiting());
        prop_assert!(bytes <= 64 << 10 && frames * 80 <= bytes);
    }
}
