//! Interrupts, by the rules of the data sheet (§7.4, §10.2.4), and PAUSE (§3.5.5).

use crate::rig::*;
use tasuki_sim::e1000e::{Bar, Options};
use tasuki_sim::model::Model;

/// RXQ0 to vector 0, RXQ1 to 1, TXQ0 to 2, OTHER to 4.
const VECTORS: u32 = 8 | 9 << 4 | 10 << 8 | 12 << 16;

fn with_msix() -> Rig {
    let rig = Rig::running(64);
    rig.card.with(|parts| parts.device.enable_msix(true));
    rig.write(IVAR, VECTORS);
    rig
}

fn frame_comes(rig: &Rig) {
    rig.come(&frame(60, 0));
    rig.pass(1000);
}

#[test]
fn icr_is_cleared_by_a_read_when_all_is_masked_or_an_interrupt_is_asserted_and_else_not() {
    let rig = Rig::running(8);
    rig.write(ICS, RXT0);
    assert_eq!((rig.read(ICR), rig.read(ICR)), (RXT0, 0), "all masked");
    rig.write(IMS, LSC);
    rig.write(ICS, RXT0);
    assert_eq!((rig.read(ICR), rig.read(ICR)), (RXT0, RXT0), "not asserted");
    rig.write(ICS, LSC);
    assert_eq!((rig.read(ICR), rig.read(ICR)), (1 << 31 | RXT0 | LSC, 0), "asserted");
}

#[test]
fn a_one_written_to_icr_clears_that_cause() {
    let rig = Rig::running(8);
    rig.write(IMS, 1);
    rig.write(ICS, RXT0 | LSC);
    rig.write(ICR, RXT0);
    assert_eq!(rig.read(ICR), LSC);
}

#[test]
fn the_interrupt_line_is_held_until_icr_is_read() {
    let rig = Rig::running(8);
    rig.write(IMS, RXT0);
    frame_comes(&rig);
    assert!(rig.card.with(|parts| parts.memory.intx()));
    assert_ne!(rig.card.read_config(6, 2) & 1 << 3, 0);
    rig.read(ICR);
    rig.pass(1000);
    assert!(!rig.card.with(|parts| parts.memory.intx()));
}

#[test]
fn msi_sends_a_message_each_time_a_cause_is_set_anew() {
    let rig = Rig::running(64);
    rig.card.write_config(0xd2, 2, 1);
    rig.write(IMS, RXT0);
    frame_comes(&rig);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 1, "the cause is still there");
    rig.read(ICR);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 2);
}

/// A host that counts edges, as an eventfd does, would wait for the second for ever.
#[test]
fn intx_that_is_asserted_anew_at_once_has_two_edges() {
    let rig = Rig::running(64);
    rig.write(IMS, LSC);
    rig.write(ICS, LSC);
    rig.pass(1000);
    assert_eq!(rig.raised(0), 1);
    // The card takes no step in between.
    assert_ne!(rig.read(ICR) & LSC, 0);
    rig.write(ICS, LSC);
    rig.pass(1000);
    assert_eq!(rig.raised(0), 2);
    assert!(rig.card.with(|parts| parts.memory.intx()));
    // A reset clears the cause.
    rig.card.reset();
    rig.pass(1000);
    assert!(!rig.card.with(|parts| parts.memory.intx()));
}

#[test]
fn each_cause_goes_to_its_vector() {
    let rig = with_msix();
    rig.write(IMS, RXQ0 | TXQ0 | OTHER | LSC);
    frame_comes(&rig);
    rig.send(0, &frame(60, 1));
    rig.pass(1000);
    rig.card.with(|parts| parts.device.set_partner(false));
    rig.pass(1000);
    assert_eq!([0, 1, 2, 3, 4].map(|vector| rig.raised(vector)), [1, 0, 1, 0, 1]);
}

#[test]
fn other_needs_the_cause_it_stands_for_unmasked() {
    let rig = with_msix();
    rig.write(IMS, OTHER);
    rig.write(ICS, LSC);
    rig.pass(1000);
    assert_eq!(rig.raised(4), 0);
    rig.write(IMS, LSC);
    rig.pass(1000);
    assert_eq!(rig.raised(4), 1);
}

#[test]
fn a_cause_in_eiac_is_cleared_as_its_message_leaves() {
    let rig = with_msix();
    rig.write(EIAC, RXQ0);
    rig.write(IMS, RXQ0);
    frame_comes(&rig);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 2, "each frame set it anew");
    rig.write(EIAC, 0);
    frame_comes(&rig);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 3, "nobody cleared it");
}

#[test]
fn a_cause_in_eiac_is_masked_too_if_the_card_is_to_be_like_qemus() {
    let rig = Rig::with_options(Options { mac: MAC, eiac_masks: true, ..Options::default() });
    rig.card.with(|parts| parts.device.enable_msix(true));
    rig.write(IVAR, VECTORS);
    rig.write(EIAC, RXQ0);
    rig.write(IMS, RXQ0);
    rig.write(ICS, RXQ0);
    rig.pass(1000);
    assert_eq!((rig.raised(0), rig.read(IMS)), (1, 0));
}

#[test]
fn a_message_masks_what_iam_says_when_eiame_is_set() {
    let rig = with_msix();
    rig.write(CTRL_EXT, 1 << 24);
    rig.write(IAM, RXQ0);
    rig.write(EIAC, RXQ0);
    rig.write(IMS, RXQ0);
    frame_comes(&rig);
    assert_eq!(rig.read(IMS) & RXQ0, 0);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 1);
    // The frame that came while the cause was masked is not missed.
    rig.write(IMS, RXQ0);
    rig.pass(1000);
    assert_eq!(rig.raised(0), 2);
}

#[test]
fn a_frame_that_came_while_its_cause_was_masked_interrupts_when_it_is_unmasked() {
    let rig = with_msix();
    rig.write(EIAC, RXQ0);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 0);
    rig.write(IMS, RXQ0);
    rig.pass(1000);
    assert_eq!(rig.raised(0), 1);
}

#[test]
fn a_masked_vector_is_pending_and_fires_when_it_is_unmasked() {
    let rig = with_msix();
    rig.card.write(Bar::MsiX, 12, 4, 1);
    rig.write(IMS, RXQ0);
    frame_comes(&rig);
    assert_eq!((rig.raised(0), rig.card.read(Bar::MsiX, 0x2000, 4)), (0, 1));
    rig.card.write(Bar::MsiX, 12, 4, 0);
    rig.pass(1000);
    assert_eq!((rig.raised(0), rig.card.read(Bar::MsiX, 0x2000, 4)), (1, 0));
    // The same with the mask of all vectors.
    rig.read(ICR);
    rig.card.write_config(0xa2, 2, 0xc000);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 1);
    rig.card.write_config(0xa2, 2, 0x8000);
    rig.pass(1000);
    assert_eq!(rig.raised(0), 2);
}

#[test]
fn the_msix_table_keeps_what_is_written() {
    let rig = Rig::new();
    for (offset, value) in [(0x10, 0xfee0_1000), (0x14, 1), (0x18, 0x4041), (0x1c, 0)] {
        rig.card.write(Bar::MsiX, offset, 4, value);
        assert_eq!(rig.card.read(Bar::MsiX, offset, 4), value);
    }
    assert_eq!(rig.card.with(|parts| parts.device.message(1)), Some((0x1_fee0_1000, 0x4041)));
}

#[test]
fn eitr_keeps_a_vector_silent_for_so_many_times_256_ns() {
    let rig = with_msix();
    rig.write(EIAC, RXQ0);
    rig.write(EITR, 400);
    rig.write(IMS, RXQ0);
    frame_comes(&rig);
    rig.pass(50_000);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 1);
    rig.pass(52_000);
    assert_eq!(rig.raised(0), 2, "102.4 µs after the first");
}

#[test]
fn rdtr_puts_off_the_cause_but_radv_not_for_ever() {
    let rig = with_msix();
    rig.write(RDTR, 20);
    rig.write(RADV, 50);
    rig.write(EIAC, RXQ0);
    rig.write(IMS, RXQ0);
    // Each frame restarts the packet timer: 20.48 µs. The absolute timer goes on: 51.2 µs.
    for _ in 0..6 {
        rig.come(&frame(60, 0));
        rig.pass(10_000);
        assert_eq!(rig.raised(0), 0);
    }
    rig.come(&frame(60, 0));
    rig.pass(2_000);
    assert_eq!(rig.raised(0), 1);
}

#[test]
fn a_lost_interrupt_is_lost() {
    let rig = with_msix();
    rig.write(EIAC, RXQ0);
    rig.write(IMS, RXQ0);
    rig.card.with(|parts| parts.device.faults.lost_interrupts = 1);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 0);
    frame_comes(&rig);
    assert_eq!(rig.raised(0), 1);
}

#[test]
fn without_bus_mastering_no_message_leaves() {
    let rig = with_msix();
    rig.write(IMS, OTHER | LSC);
    rig.card.write_config(4, 2, 2);
    rig.write(ICS, LSC);
    rig.pass(1000);
    assert_eq!(rig.raised(4), 0);
    rig.card.write_config(4, 2, 6);
    rig.pass(1000);
    assert_eq!(rig.raised(4), 1);
}

#[test]
fn rxdmt0_says_that_few_descriptors_are_left() {
    let rig = Rig::running(8);
    for number in 0..3 {
        rig.come(&frame(60, number));
        rig.pass(1000);
        let few = rig.read(ICR) & RXDMT0 != 0;
        assert_eq!(few, number == 2, "RDMTS 00: half of 8 are left");
    }
}

fn pause(quanta: u16) -> Vec<u8> {
    let mut frame = vec![0x01, 0x80, 0xc2, 0, 0, 1, 2, 9, 9, 9, 9, 9, 0x88, 0x08, 0, 1];
    frame.extend(quanta.to_be_bytes());
    frame.resize(60, 0);
    frame
}

#[test]
fn a_pause_frame_is_honoured_with_rfce_and_goes_nowhere() {
    let rig = Rig::running(8);
    rig.come(&pause(100));
    rig.send(0, &frame(60, 1));
    rig.pass(1000);
    assert_eq!(rig.sent().len(), 1, "RFCE is off");
    rig.write(CTRL, rig.read(CTRL) | RFCE);
    rig.come(&pause(100));
    rig.pass(100);
    rig.send(1, &frame(60, 2));
    rig.pass(50_000);
    assert_eq!((rig.sent().len(), rig.read(STATUS) >> 4 & 1), (0, 1));
    rig.pass(2_000);
    assert_eq!(rig.sent().len(), 1, "51.2 µs are over");
    rig.come(&pause(0xffff));
    rig.pass(100);
    rig.send(2, &frame(60, 3));
    rig.come(&pause(0));
    rig.pass(100);
    rig.pass(100);
    assert_eq!(rig.sent().len(), 1, "XON");
    assert_eq!((rig.read(XOFFRXC), rig.read(XONRXC), rig.read(RDH)), (2, 1, 0));
}

#[test]
fn the_thresholds_of_the_buffer_send_xoff_and_xon() {
    let rig = Rig::linked();
    rig.receive_ring(0, 64);
    rig.transmit_ring(0, 8);
    rig.write(RDT, 0);
    rig.write(CTRL, rig.read(CTRL) | TFCE);
    rig.write(FCTTV, 0x680);
    rig.write(FCRTH, 8192);
    rig.write(FCRTL, 1 << 31 | 4096);
    rig.write(RCTL, EN | SECRC);
    rig.write(TCTL, EN);
    for number in 0..6 {
        rig.come(&frame(1514, number));
    }
    rig.pass(1000);
    let sent = rig.sent();
    assert_eq!(sent.len(), 1, "once, since FCRTV is 0");
    assert_eq!(sent[0][..6], [0x01, 0x80, 0xc2, 0, 0, 1]);
    assert_eq!(sent[0][6..12], MAC);
    assert_eq!(sent[0][12..18], [0x88, 0x08, 0, 1, 0x06, 0x80]);
    rig.write(RDT, 63);
    rig.pass(1000);
    let sent = rig.sent();
    assert_eq!((sent.len(), &sent[0][16..18]), (1, &[0, 0][..]));
    assert_eq!((rig.read(XOFFTXC), rig.read(XONTXC), rig.read(MPC)), (1, 1, 0));
}

#[test]
fn swxoff_sends_one_pause_frame_with_fcttv_whatever_tfce_says() {
    let rig = Rig::running(8);
    rig.write(FCTTV, 200);
    rig.write(TCTL, EN | 1 << 22);
    assert_eq!(rig.read(TCTL) & 1 << 22, 0, "clears itself");
    rig.pass(1000);
    let sent = rig.sent();
    assert_eq!((sent.len(), &sent[0][16..18]), (1, &[0, 200][..]));
}
