//! The 82574L from reset to the first frames, by the rules of its data sheet.

use crate::rig::*;
use tasuki_sim::e1000e::{Bar, Options};
use tasuki_sim::journal::Class;

#[test]
fn it_is_an_82574l_with_three_bars_and_four_capabilities() {
    let rig = Rig::new();
    let card = &rig.card;
    assert_eq!(card.read_config(0, 4), 0x10d3_8086);
    assert_eq!(card.read_config(8, 4) >> 16, 0x0200);
    for (offset, size) in [(0x10, 128 << 10), (0x18, 32_u32), (0x1c, 16 << 10)] {
        card.write_config(offset, 4, u32::MAX);
        assert_eq!((card.read_config(offset, 4) & !0xf).wrapping_neg(), size, "BAR at {offset:#x}");
    }
    let mut ids = Vec::new();
    let mut at = card.read_config(0x34, 1);
    while at != 0 {
        ids.push(card.read_config(at, 1));
        at = card.read_config(at + 1, 1);
    }
    assert_eq!(ids, [0x01, 0x05, 0x10, 0x11]);
}

#[test]
fn without_memory_decoding_registers_read_as_ones() {
    let rig = Rig::new();
    rig.card.write_config(4, 2, 0);
    assert_eq!(rig.read(STATUS), u32::MAX);
    rig.card.write_config(4, 2, 2);
    assert_ne!(rig.read(STATUS), u32::MAX);
}

#[test]
fn the_address_is_there_when_the_nvm_was_read_and_not_before() {
    let rig = Rig::new();
    assert_eq!((rig.read(RAL), rig.read(RAH), rig.read(EECD) & 1 << 9), (0, 0, 0));
    rig.card.advance(Options::default().nvm_load_ns);
    assert_ne!(rig.read(EECD) & 1 << 9, 0);
    assert_eq!(rig.read(RAL).to_le_bytes(), MAC[..4]);
    assert_eq!(rig.read(RAH), u32::from_le_bytes([MAC[4], MAC[5], 0, 0x80]));
}

fn nvm_word(rig: &Rig, word: u32) -> u16 {
    rig.write(EERD, word << 2 | 1);
    assert_eq!(rig.read(EERD) & 2, 0, "a word takes its time");
    (0..1000).map(|_| rig.read(EERD)).find(|value| value & 2 != 0).map(|value| (value >> 16) as u16).unwrap()
}

#[test]
fn the_nvm_holds_the_address_and_adds_up() {
    let rig = Rig::new();
    let words: Vec<u16> = (0..64).map(|word| nvm_word(&rig, word)).collect();
    assert_eq!(words.iter().fold(0_u16, |sum, word| sum.wrapping_add(*word)), 0xbaba);
    assert_eq!(words[..3].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>(), MAC);
}

fn phy(rig: &Rig, op: u32, register: u32, value: u16) -> u32 {
    rig.write(MDIC, op << 26 | 1 << 21 | register << 16 | u32::from(value));
    (0..1000).map(|_| rig.read(MDIC)).find(|value| value & 1 << 28 != 0).unwrap()
}

#[test]
fn the_phy_says_who_it_is_and_takes_its_time() {
    let rig = Rig::new();
    rig.write(MDIC, 2 << 26 | 1 << 21 | 2 << 16);
    assert_eq!(rig.read(MDIC) & 1 << 28, 0);
    assert_eq!(phy(&rig, 2, 2, 0) & 0xffff, 0x0141);
    assert_eq!(phy(&rig, 2, 3, 0) & 0xffff, 0x0cb1);
    rig.write(MDIC, 2 << 26 | 2 << 21 | 2 << 16);
    rig.card.advance(100_000);
    assert_ne!(rig.read(MDIC) & 1 << 30, 0, "no PHY at address 2: error");
    assert_eq!(rig.broke(Class::PhyWrite), 0, "a read is no offence");
}

#[test]
fn the_link_needs_slu_and_2_2_seconds() {
    let rig = Rig::new();
    rig.pass(10_000_000_000);
    assert_eq!(rig.read(STATUS) & LU, 0, "nobody set SLU");
    rig.write(CTRL, rig.read(CTRL) | SLU);
    rig.pass(2_199_000_000);
    assert_eq!(rig.read(STATUS) & LU, 0);
    assert_eq!(rig.read(ICR) & LSC, 0);
    rig.pass(1_100_000);
    assert_eq!(rig.read(STATUS) & LU, LU);
    assert_eq!(rig.read(ICR) & LSC, LSC);
    assert_eq!(phy(&rig, 2, 1, 0) & 0x24, 0x24, "the PHY says so too");
}

#[test]
fn a_reset_takes_the_link_down_and_is_in_the_journal() {
    let rig = Rig::linked();
    rig.card.with(|parts| parts.device.journal.clear());
    rig.write(CTRL, rig.read(CTRL) | RST);
    rig.card.advance(10_000);
    assert_eq!(rig.read(STATUS) & LU, 0);
    assert_eq!(rig.broke(Class::Reset), 1);
    let offence = rig.card.with(|parts| parts.device.journal.demand_none(&Class::COLD)).unwrap_err();
    assert_eq!((offence.count, offence.first.class), (1, Class::Reset));
}

#[test]
fn a_register_accessed_within_a_microsecond_of_a_reset_is_an_offence() {
    let rig = Rig::linked();
    rig.write(CTRL, RST);
    assert_ne!(rig.read(CTRL) & RST, 0, "still at it");
    assert_eq!(rig.broke(Class::DuringReset), 1);
    rig.card.advance(1_000);
    assert_eq!(rig.read(CTRL) & RST, 0);
    assert_eq!(rig.broke(Class::DuringReset), 1);
}

#[test]
fn a_frame_comes_in() {
    let rig = Rig::running(8);
    rig.come(&frame(100, 1));
    rig.pass(1000);
    let received = rig.received(0, 0).unwrap();
    assert_eq!((received.len, received.status & 3), (100, 3));
    assert_eq!(rig.receive_bytes(0, 0, 100), frame(100, 1));
    assert_eq!(rig.received(0, 1), None);
    assert_eq!(rig.read(RDH), 1);
    assert_eq!((rig.read(GPRC), rig.read(GORCL), rig.read(GORCH)), (1, 104, 0));
    assert_eq!(rig.read(GPRC), 0, "counters are cleared by a read");
    rig.broke_nothing();
}

#[test]
fn a_frame_goes_out_and_its_descriptor_is_done() {
    let rig = Rig::running(8);
    rig.send(0, &frame(100, 1));
    rig.pass(1000);
    assert_eq!(rig.sent(), [frame(100, 1)]);
    assert_eq!(rig.load(TX_RING[0] + 8) >> 32 & 1, 1, "DD");
    assert_eq!((rig.read(TDH), rig.read(GPTC), rig.read(GOTCL)), (1, 1, 104));
    rig.broke_nothing();
}

#[test]
fn a_frame_that_comes_in_raises_the_vector_that_ivar_names() {
    let rig = Rig::running(8);
    rig.card.with(|parts| parts.device.enable_msix(true));
    rig.write(IVAR, 8 | 2);
    rig.write(IMS, RXQ0);
    rig.come(&frame(60, 1));
    rig.pass(1000);
    assert_eq!([0, 1, 2, 3, 4].map(|vector| rig.raised(vector)), [0, 0, 1, 0, 0]);
    assert_ne!(rig.read(ICR) & RXQ0, 0);
}

#[test]
fn a_card_out_of_its_socket_answers_with_ones_and_moves_nothing() {
    let rig = Rig::running(8);
    rig.card.with(|parts| parts.device.faults.removed = true);
    rig.come(&frame(60, 1));
    rig.pass(1000);
    assert_eq!((rig.read(STATUS), rig.card.read_config(0, 4)), (u32::MAX, u32::MAX));
    assert_eq!(rig.card.read(Bar::MsiX, 0, 4), u32::MAX);
    assert_eq!(rig.received(0, 0), None);
}
