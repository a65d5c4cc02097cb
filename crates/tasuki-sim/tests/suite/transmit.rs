//! Sending, by the rules of the data sheet (§7.2, §10.2.6).

use crate::rig::*;
use tasuki_sim::e1000e::Options;
use tasuki_sim::journal::Class;
use tasuki_sim::model::Model;

const EOP: u64 = 1 << 24;
const IFCS: u64 = 1 << 25;
const IC: u64 = 1 << 26;
const TSE: u64 = 1 << 26;
const RS: u64 = 1 << 27;
const DEXT: u64 = 1 << 29;
const VLE: u64 = 1 << 30;
const DATA: u64 = 1 << 20 | DEXT;
const DD: u64 = 1 << 32;

fn done(rig: &Rig, index: usize) -> bool {
    rig.load(TX_RING[0] + 16 * index + 8) & DD != 0
}

#[test]
fn only_descriptors_with_rs_are_written_back() {
    let rig = Rig::running(8);
    for index in 0..3 {
        let at = rig.transmit_buffer(index, &frame(60, index as u8));
        rig.transmit_descriptor(0, index, at, 60 | EOP | IFCS | if index == 2 { RS } else { 0 });
    }
    rig.write(TDT, 3);
    rig.pass(1000);
    assert_eq!([0, 1, 2].map(|index| done(&rig, index)), [false, false, true]);
    assert_eq!((rig.read(TDH), rig.sent().len()), (3, 3));
}

#[test]
fn a_frame_in_pieces_leaves_as_one() {
    let rig = Rig::running(8);
    let whole = frame(1000, 5);
    for (index, piece) in whole.chunks(400).enumerate() {
        let at = rig.transmit_buffer(index, piece);
        let last = if index == 2 { EOP | RS } else { 0 };
        rig.transmit_descriptor(0, index, at, piece.len() as u64 | IFCS | last);
    }
    rig.write(TDT, 2);
    rig.pass(1000);
    assert_eq!(rig.sent(), Vec::<Vec<u8>>::new(), "its end is missing");
    rig.write(TDT, 3);
    rig.pass(1000);
    assert_eq!(rig.sent(), [whole]);
}

#[test]
fn a_short_frame_is_padded_if_psp_is_set() {
    let rig = Rig::running(8);
    rig.send(0, &frame(30, 1));
    rig.pass(1000);
    assert_eq!(rig.sent(), [[frame(30, 1), vec![0; 30]].concat()]);
    rig.write(TCTL, EN);
    rig.send(1, &frame(30, 1));
    rig.pass(1000);
    assert_eq!(rig.sent(), [frame(30, 1)]);
}

#[test]
fn a_legacy_packet_has_17_bytes_at_least() {
    let rig = Rig::running(8);
    rig.send(0, &frame(17, 1));
    rig.send(1, &frame(16, 1));
    rig.pass(1000);
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(rig.broke(Class::BadDescriptor), 1);
}

#[test]
fn without_ifcs_the_last_four_bytes_are_the_check_sequence() {
    let rig = Rig::running(8);
    let at = rig.transmit_buffer(0, &frame(64, 1));
    rig.transmit_descriptor(0, 0, at, 64 | EOP);
    rig.write(TDT, 1);
    rig.pass(1000);
    assert_eq!(rig.sent(), [frame(64, 1)[..60].to_vec()]);
}

#[test]
fn nothing_leaves_without_tctl_en_tarc_enable_or_a_link() {
    let rig = Rig::running(8);
    rig.write(TCTL, 1 << 3);
    rig.send(0, &frame(60, 1));
    rig.pass(1000);
    assert_eq!(rig.sent().len(), 0);
    rig.write(TARC0, 0);
    rig.write(TCTL, EN | 1 << 3);
    rig.pass(1000);
    assert_eq!(rig.sent().len(), 0);
    rig.card.with(|parts| parts.device.set_partner(false));
    rig.write(TARC0, 1 << 10);
    rig.pass(1000);
    assert_eq!((rig.sent().len(), rig.read(TDH)), (0, 0));
    rig.card.with(|parts| parts.device.set_partner(true));
    rig.pass(1000);
    rig.pass(3_000_000_000);
    assert_eq!(rig.sent().len(), 1);
}

fn ones_sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let sum = words.sum::<u32>();
    let folded = (sum & 0xffff) + (sum >> 16);
    (folded + (folded >> 16)) as u16
}

#[test]
fn a_legacy_descriptor_with_ic_puts_a_checksum_where_it_says() {
    let rig = Rig::running(8);
    let mut frame = frame(100, 1);
    frame[40..42].fill(0);
    let at = rig.transmit_buffer(0, &frame);
    // CSS 34, CSO 40.
    rig.transmit_descriptor(0, 0, at, 100 | 40 << 16 | 34 << 40 | EOP | IFCS | IC);
    rig.write(TDT, 1);
    rig.pass(1000);
    let sent = &rig.sent()[0];
    assert_eq!(ones_sum(&sent[34..]), 0xffff);
    assert_eq!((&sent[..40], &sent[42..]), (&frame[..40], &frame[42..]));
}

/// Returns a TCP packet with `payload` bytes, and the pseudo header's sum (without the length) in its checksum
/// field.
fn tcp(payload: usize) -> Vec<u8> {
    let mut packet = frame(54 + payload, 0x77);
    packet[12..14].copy_from_slice(&[0x08, 0x00]);
    packet[14..34].copy_from_slice(&[0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet[34..54].copy_from_slice(&[0, 80, 0, 99, 0xff, 0xff, 0xff, 0x00, 0, 0, 0, 0, 0x50, 0x19, 0, 0, 0, 0, 0, 0]);
    let pseudo = ones_sum(&[&packet[26..34], &[0, 6]].concat());
    packet[50..52].copy_from_slice(&pseudo.to_be_bytes());
    packet
}

/// IPCSS 14, IPCSO 24, IPCSE 33; TUCSS 34, TUCSO 50, TUCSE 0.
const CONTEXT: u64 = 14 | 24 << 8 | 33 << 16 | 34 << 32 | 50 << 40;

#[test]
fn a_context_descriptor_says_where_the_checksums_go() {
    let rig = Rig::running(8);
    let mut packet = tcp(100);
    packet[16..18].copy_from_slice(&140_u16.to_be_bytes());
    let seed = u16::from_be_bytes([packet[50], packet[51]]) + 120;
    packet[50..52].copy_from_slice(&seed.to_be_bytes());
    let at = rig.transmit_buffer(0, &packet);
    rig.transmit_descriptor(0, 0, CONTEXT, DEXT | 3 << 24);
    // POPTS: IXSM and TXSM.
    rig.transmit_descriptor(0, 1, at, packet.len() as u64 | DATA | EOP | IFCS | RS | 3 << 40);
    rig.write(TDT, 2);
    rig.pass(1000);
    let sent = &rig.sent()[0];
    assert_eq!(ones_sum(&sent[14..34]), 0xffff);
    let pseudo = [&sent[26..34], &[0, 6, 0, 120]].concat();
    assert_eq!(ones_sum(&[&pseudo, &sent[34..]].concat()), 0xffff);
    assert!(done(&rig, 1) && !done(&rig, 0));
}

#[test]
fn tcp_segmentation_numbers_lengths_and_sums_each_piece() {
    let rig = Rig::running(8);
    let packet = tcp(2500);
    let at = rig.transmit_buffer(0, &packet);
    // PAYLEN 2500, HDRLEN 54, MSS 1000; TCP, IP, TSE.
    rig.transmit_descriptor(0, 0, CONTEXT, 2500 | DEXT | 3 << 24 | TSE | 54 << 40 | 1000 << 48);
    rig.transmit_descriptor(0, 1, at, 2554 | DATA | EOP | IFCS | TSE | RS | 3 << 40);
    rig.write(TDT, 2);
    rig.pass(1000);
    let sent = rig.sent();
    assert_eq!(sent.iter().map(Vec::len).collect::<Vec<_>>(), [1054, 1054, 554]);
    let payload = sent.iter().flat_map(|frame| frame[54..].to_vec()).collect::<Vec<_>>();
    assert_eq!(payload, packet[54..]);
    for (index, frame) in sent.iter().enumerate() {
        let len = frame.len() - 14;
        assert_eq!(u16::from_be_bytes([frame[16], frame[17]]) as usize, len);
        assert_eq!(u16::from_be_bytes([frame[18], frame[19]]), 0x1234 + index as u16, "identification");
        let sequence = u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]);
        assert_eq!(sequence, 0xffff_ff00_u32.wrapping_add(1000 * index as u32));
        assert_eq!(frame[47], if index == 2 { 0x19 } else { 0x10 }, "FIN and PSH with the last alone");
        assert_eq!(ones_sum(&frame[14..34]), 0xffff, "IP checksum of piece {index}");
        let pseudo = [&frame[26..34], &[0, 6], &((len - 20) as u16).to_be_bytes()].concat();
        assert_eq!(ones_sum(&[&pseudo, &frame[34..]].concat()), 0xffff, "TCP checksum of piece {index}");
    }
    rig.broke_nothing();
}

#[test]
fn a_tag_is_inserted_with_vle_and_vme() {
    let rig = Rig::running(8);
    rig.write(CTRL, rig.read(CTRL) | VME);
    let at = rig.transmit_buffer(0, &frame(100, 1));
    rig.transmit_descriptor(0, 0, at, 100 | EOP | IFCS | VLE | 0x2005 << 48);
    rig.write(TDT, 1);
    rig.pass(1000);
    let plain = frame(100, 1);
    assert_eq!(rig.sent(), [[&plain[..12], &[0x81, 0x00, 0x20, 0x05], &plain[12..]].concat()]);
}

#[test]
fn a_packet_that_points_to_unmapped_memory_does_not_leave() {
    let rig = Rig::running(8);
    rig.transmit_descriptor(0, 0, 0xdead_0000, 60 | EOP | IFCS | RS);
    rig.write(TDT, 1);
    rig.pass(1000);
    assert_eq!((rig.sent().len(), rig.broke(Class::UnmappedDma)), (0, 1));
    assert_ne!(rig.card.read_config(6, 2) & 1 << 13, 0, "received master abort");
}

#[test]
fn both_queues_send() {
    let rig = Rig::running(8);
    rig.transmit_ring(1, 8);
    let at = rig.transmit_buffer(0, &frame(60, 1));
    rig.transmit_descriptor(1, 0, at, 60 | EOP | IFCS | RS);
    rig.write(TDT + 0x100, 1);
    rig.send(0, &frame(60, 2));
    rig.pass(1000);
    assert_eq!((rig.sent().len(), rig.read(TDH), rig.read(TDH + 0x100)), (2, 1, 1));
}

#[test]
fn a_gigabit_line_takes_672_ns_for_the_shortest_frame() {
    let options = Options { mac: MAC, transmit_rate: Some(1_000_000_000), ..Options::default() };
    let rig = Rig::with_options(options);
    rig.link_up();
    rig.transmit_ring(0, 64);
    rig.write(TCTL, EN | 1 << 3);
    for index in 0..32 {
        let at = rig.transmit_buffer(index, &frame(60, 0));
        rig.transmit_descriptor(0, index, at, 60 | EOP | IFCS);
    }
    rig.pass(0);
    rig.write(TDT, 32);
    let start = rig.card.now();
    while rig.card.with(|parts| parts.wire.sent.len()) < 32 && rig.card.now() < start + 10_000_000 {
        rig.pass(100);
    }
    let times: Vec<u64> = rig.card.with(|parts| parts.wire.sent.iter().map(|(at, _)| *at).collect());
    assert_eq!(times.len(), 32);
    let took = times[31] - times[0];
    assert!((31 * 672 - 100..=31 * 672 + 100).contains(&took), "{took} ns");
}
