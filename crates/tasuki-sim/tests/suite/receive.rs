//! Receiving, by the rules of the data sheet (§7.1, §10.2.5).

use crate::rig::*;
use tasuki_sim::e1000e::Options;
use tasuki_sim::journal::Class;
use tasuki_sim::model::Model;

fn unseen(rig: &Rig) -> tasuki_sim::e1000e::Unseen {
    rig.card.with(|parts| parts.device.unseen())
}

fn posted_again(rig: &Rig, tail: u32) {
    for index in 0..8 {
        rig.post(0, index);
    }
    rig.write(RDT, tail);
}

#[test]
fn a_starved_ring_fills_the_buffer_of_20_kb_and_mpc_counts_what_comes_after() {
    let rig = Rig::running(8);
    // 7 descriptors; then 20,480 bytes hold 13 frames of 1,518 bytes.
    for number in 0..30 {
        rig.come(&frame(1514, number));
    }
    rig.pass(1000);
    assert_eq!(rig.read(RDH), 7, "head has reached the tail");
    assert_eq!(rig.card.with(|parts| parts.device.waiting().0), 13);
    assert_eq!(rig.read(MPC), 10);
    assert_eq!(rig.read(RNBC), 23, "also of those that found room in the buffer");
    assert_eq!(rig.read(GPRC), 20);
    assert_ne!(rig.read(ICR) & RXO, 0);
    // The frames in the buffer are not lost.
    posted_again(&rig, 6);
    rig.pass(1000);
    let numbers: Vec<u8> = [7, 0, 1, 2, 3, 4, 5].map(|i| rig.receive_bytes(0, i, 1514)[1513]).to_vec();
    assert_eq!(numbers, [7, 8, 9, 10, 11, 12, 13], "in order");
    rig.broke_nothing();
}

#[test]
fn the_buffer_is_as_large_as_pba_said_before_the_last_reset() {
    let rig = Rig::new();
    rig.write(PBA, 4);
    rig.write(CTRL, RST);
    rig.card.advance(1_000_000);
    assert_eq!(rig.read(PBA) & 0xffff, 4);
    rig.link_up();
    rig.receive_ring(0, 8);
    rig.write(RDT, 0);
    rig.write(RCTL, EN | SECRC);
    for number in 0..10 {
        rig.come(&frame(1514, number));
    }
    rig.pass(1000);
    assert_eq!((rig.card.with(|parts| parts.device.waiting().0), rig.read(MPC)), (2, 8));
}

#[test]
fn what_comes_while_receives_are_off_is_lost_and_mpc_does_not_count_it() {
    let rig = Rig::running(8);
    rig.write(RCTL, BAM | SECRC);
    for number in 0..5 {
        rig.come(&frame(60, number));
    }
    rig.pass(1000);
    assert_eq!((rig.read(MPC), rig.read(RNBC), rig.read(TPR), rig.read(RDH)), (0, 0, 0, 0));
    assert_eq!(unseen(&rig).receive_off, 5);
}

#[test]
fn what_comes_without_a_link_is_lost_and_nobody_counts_it() {
    let rig = Rig::running(8);
    rig.card.with(|parts| parts.device.set_partner(false));
    rig.pass(1000);
    assert_eq!(rig.read(STATUS) & LU, 0);
    assert_ne!(rig.read(ICR) & LSC, 0);
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert_eq!((rig.read(MPC), rig.read(TPR), unseen(&rig).no_link), (0, 0, 1));
}

#[test]
fn receives_that_are_switched_off_go_on_for_a_moment_and_then_touch_nothing() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    rig.write(RDT, 1);
    rig.write(RCTL, EN | BAM | SECRC);
    for number in 0..4 {
        rig.come(&frame(60, number));
    }
    rig.pass(100);
    assert_eq!((rig.read(RDH), rig.card.with(|parts| parts.device.waiting().0)), (1, 3));
    rig.write(RCTL, BAM | SECRC);
    rig.write(RDT, 3);
    rig.pass(100);
    assert_eq!(rig.read(RDH), 3, "it was not finished yet");
    rig.pass(100_000);
    rig.write(RDT, 5);
    rig.pass(1000);
    assert_eq!((rig.read(RDH), rig.card.with(|parts| parts.device.waiting().0)), (3, 1), "now it is");
    // With another ring and RCTL.EN set again, the waiting frame goes there.
    rig.write(RDH, 0);
    posted_again(&rig, 7);
    rig.write(RCTL, EN | BAM | SECRC);
    rig.pass(1000);
    assert_eq!(rig.receive_bytes(0, 0, 60)[59], 3);
    rig.broke_nothing();
}

#[test]
fn an_extended_descriptor_loses_its_address() {
    let rig = Rig::running(8);
    rig.come(&frame(200, 0));
    rig.pass(1000);
    assert_eq!(rig.load(RX_RING[0]), 0, "MRQ and hash stand where the address stood");
    assert_eq!(rig.load(RX_RING[0] + 8), 200 << 32 | 0b111, "length, IXSM, EOP, DD");
}

#[test]
fn a_legacy_descriptor_keeps_its_address() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    rig.write(RFCTL, 0);
    rig.write(RCTL, EN | SECRC);
    rig.come(&frame(200, 0));
    rig.pass(1000);
    assert_eq!(rig.load(RX_RING[0]), AT + RX_BUFFERS[0] as u64);
    assert_eq!(rig.load(RX_RING[0] + 8), 0b111 << 32 | 200);
}

#[test]
fn a_frame_longer_than_a_buffer_takes_several_and_only_the_last_has_eop() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    // BSIZE 01: buffers of 1,024 bytes.
    rig.write(RCTL, EN | SECRC | 1 << 16);
    rig.come(&frame(1514, 9));
    rig.pass(1000);
    let parts = [0, 1, 2].map(|i| rig.received(0, i).map(|received| (received.len, received.status >> 1 & 1)));
    assert_eq!(parts, [Some((1024, 0)), Some((490, 1)), None]);
    assert_eq!([rig.receive_bytes(0, 0, 1024), rig.receive_bytes(0, 1, 490)].concat(), frame(1514, 9));
}

#[test]
fn a_long_frame_waits_in_the_buffer_with_its_first_part_delivered() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    rig.write(RDT, 1);
    rig.write(RCTL, EN | SECRC | 1 << 16);
    rig.come(&frame(1514, 9));
    rig.pass(1000);
    assert_eq!((rig.read(RDH), rig.card.with(|parts| parts.device.waiting().0)), (1, 1));
    rig.write(RDT, 2);
    rig.pass(1000);
    assert_eq!((rig.read(RDH), rig.received(0, 1).unwrap().len), (2, 490));
}

#[test]
fn a_frame_over_1522_bytes_needs_lpe() {
    let rig = Rig::running(8);
    rig.come(&frame(1519, 0));
    rig.pass(1000);
    assert_eq!((rig.read(ROC), rig.read(GPRC)), (1, 0));
    rig.write(RCTL, EN | BAM | SECRC | 1 << 5);
    rig.come(&frame(9000, 0));
    rig.pass(1000);
    assert_eq!((rig.read(ROC), rig.read(GPRC), rig.read(RDH)), (0, 1, 5));
}

#[test]
fn the_check_sequence_is_there_unless_secrc_strips_it() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    rig.write(RCTL, EN);
    rig.come(&[&MAC[..], &[2, 0, 0, 0, 0, 9, 0x88, 0xb5], b"short"].concat());
    rig.pass(1000);
    assert_eq!(rig.received(0, 0).unwrap().len, 64, "padded, and four bytes of check sequence");
    let bytes = rig.receive_bytes(0, 0, 64);
    assert_eq!(bytes[19..60], [0; 41]);
    // The CRC over a frame and its check sequence leaves a constant residue.
    let residue = bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    });
    assert_eq!(residue, 0xdebb_20e3);
}

fn passes(rig: &Rig, to: [u8; 6]) -> bool {
    let before = rig.read(RDH);
    rig.come(&frame_to(&to, 60, 0));
    rig.pass(1000);
    rig.read(RDH) != before
}

#[test]
fn a_frame_passes_by_address_promiscuity_or_the_multicast_table() {
    const OTHER_HOST: [u8; 6] = [2, 9, 9, 9, 9, 9];
    const GROUP: [u8; 6] = [0x01, 0x00, 0x5e, 0x12, 0x34, 0x56];
    let rig = Rig::running(64);
    assert!(passes(&rig, MAC) && passes(&rig, [0xff; 6]));
    assert!(!passes(&rig, OTHER_HOST) && !passes(&rig, GROUP));
    rig.write(RCTL, EN | SECRC | 1 << 3);
    assert!(passes(&rig, OTHER_HOST) && !passes(&rig, GROUP) && !passes(&rig, [0xff; 6]), "UPE; no BAM");
    rig.write(RCTL, EN | SECRC | 1 << 4);
    assert!(!passes(&rig, OTHER_HOST) && passes(&rig, GROUP), "MPE");
    rig.write(RCTL, EN | SECRC);
    // MO = 0: bits 47:36 of the address are the index, 0x563.
    rig.write(MTA + 4 * (0x563 / 32), 1 << (0x563 % 32));
    assert!(passes(&rig, GROUP) && !passes(&rig, [0x01, 0, 0x5e, 0x12, 0x34, 0x66]));
    rig.write(RAL + 8, u32::from_le_bytes([2, 9, 9, 9]));
    rig.write(RAH + 8, u32::from_le_bytes([9, 9, 0, 0]));
    assert!(!passes(&rig, OTHER_HOST), "the address is not valid");
    rig.write(RAH + 8, u32::from_le_bytes([9, 9, 0, 0x80]));
    assert!(passes(&rig, OTHER_HOST));
    assert_eq!(unseen(&rig).filtered, 7);
    rig.broke_nothing();
}

/// The key of Microsoft's RSS verification suite.
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b,
    0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac,
    0x01, 0xfa,
];

fn ipv4(protocol: u8, from: [u8; 4], to: [u8; 4], ports: [u16; 2]) -> Vec<u8> {
    let mut frame = frame(60, 0);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, protocol, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    frame[26..30].copy_from_slice(&from);
    frame[30..34].copy_from_slice(&to);
    frame[34..36].copy_from_slice(&ports[0].to_be_bytes());
    frame[36..38].copy_from_slice(&ports[1].to_be_bytes());
    frame
}

fn scaling(rig: &Rig) {
    for (i, word) in KEY.as_chunks::<4>().0.iter().enumerate() {
        rig.write(RSSRK + 4 * i as u32, u32::from_le_bytes(*word));
    }
    // Odd entries go to queue 1.
    (0..32).for_each(|i| rig.write(RETA + 4 * i, 0x8000_8000));
    rig.write(MRQC, 1 | 0x1f << 16);
    rig.write(RXCSUM, 1 << 13);
}

#[test]
fn the_hash_is_microsofts_and_bit_7_of_its_entry_is_the_queue() {
    let rig = Rig::linked();
    (0..2).for_each(|queue| rig.receive_ring(queue, 64));
    scaling(&rig);
    rig.write(RCTL, EN | SECRC);
    // From the verification suite: (source, destination, ports, hash with ports, hash without).
    let cases = [
        ([66, 9, 149, 187], [161, 142, 100, 80], [2794, 1766], 0x51cc_c178, 0x323e_8fc2),
        ([199, 92, 111, 2], [65, 69, 140, 83], [14230, 4739], 0xc626_b0ea, 0xd718_262a),
        ([24, 19, 198, 95], [12, 22, 207, 184], [12898, 38024], 0x5c2b_394a, 0xd2d0_a5de),
    ];
    let mut next = [0, 0];
    for (from, to, ports, tcp, plain) in cases {
        for (protocol, kind, hash) in [(6, 1, tcp), (17, 2, plain)] {
            let queue = hash as usize & 1;
            rig.come(&ipv4(protocol, from, to, ports));
            rig.pass(1000);
            let received = rig.received(queue, next[queue]).expect("in the queue that the table names");
            next[queue] += 1;
            assert_eq!((received.hash, received.kind), (hash, kind | (queue as u32) << 8));
        }
    }
    rig.come(&frame(60, 0));
    rig.pass(1000);
    let other = rig.received(0, next[0]).unwrap();
    assert_eq!((other.hash, other.kind), (0, 0), "what is not IP goes to queue 0");
}

#[test]
fn a_starved_queue_holds_up_the_other_since_both_share_the_buffer() {
    let rig = Rig::linked();
    (0..2).for_each(|queue| rig.receive_ring(queue, 8));
    scaling(&rig);
    rig.write(RDT, 0);
    rig.write(RCTL, EN | SECRC);
    rig.come(&frame(60, 0));
    // Queue 1, if the hash is odd.
    let other = (0..100).map(|port| ipv4(6, [10, 0, 0, 1], [10, 0, 0, 2], [port, 80]));
    other.for_each(|frame| rig.come(&frame));
    rig.pass(1000);
    assert_eq!((rig.read(RDH), rig.read(RDH + 0x100)), (0, 0));
    rig.write(RDT, 7);
    rig.pass(1000);
    assert_ne!(rig.read(RDH + 0x100), 0);
}

#[test]
fn a_frame_for_a_queue_without_a_ring_is_lost_and_in_the_journal() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    scaling(&rig);
    rig.write(RCTL, EN | SECRC);
    // Hash 0x...8a: entry 0x0a, even; 0x...ea even; all cases above are even without ports. Port pairs decide.
    for port in 0..32 {
        rig.come(&ipv4(6, [10, 0, 0, 1], [10, 0, 0, 2], [port, 80]));
    }
    rig.pass(1000);
    let lost = unseen(&rig).no_queue;
    assert!(lost > 0, "some of 32 port pairs hash to odd entries");
    assert_eq!((rig.broke(Class::NoQueue), rig.read(MPC)), (lost, 0));
}

#[test]
fn checksums_are_checked_when_rxcsum_says_so() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    rig.write(RXCSUM, 3 << 8);
    rig.write(RCTL, EN | SECRC);
    let sum = |frame: &mut Vec<u8>, range: std::ops::Range<usize>, seed: u32, at: usize| {
        let words = frame[range].chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
        let total = words.sum::<u32>() + seed;
        let folded = (total & 0xffff) + (total >> 16);
        frame[at..at + 2].copy_from_slice(&(!(folded as u16 + (folded >> 16) as u16)).to_be_bytes());
    };
    let mut good = ipv4(17, [10, 0, 0, 1], [10, 0, 0, 2], [53, 53]);
    good[38..42].copy_from_slice(&[0, 26, 0, 0]);
    sum(&mut good, 14..34, 0, 24);
    // Pseudo header: addresses, protocol, length.
    let seed = 0x0a00 + 0x0001 + 0x0a00 + 0x0002 + 17 + 26;
    sum(&mut good, 34..60, seed, 40);
    let mut bad_ip = good.clone();
    bad_ip[22] ^= 1;
    let mut bad_udp = good.clone();
    bad_udp[50] ^= 1;
    for frame in [&good, &bad_ip, &bad_udp] {
        rig.come(frame);
    }
    rig.pass(1000);
    const IPCS: u32 = 1 << 6;
    const L4CS: u32 = 1 << 5 | 1 << 4;
    let status = [0, 1, 2].map(|i| rig.received(0, i).unwrap().status & !3);
    assert_eq!(status, [IPCS | L4CS, IPCS | L4CS | 1 << 30, IPCS | L4CS | 1 << 29]);
}

#[test]
fn a_vlan_tag_goes_to_the_descriptor_when_vme_is_set() {
    let rig = Rig::running(8);
    rig.write(CTRL, rig.read(CTRL) | VME);
    let plain = frame(100, 1);
    let tagged = [&plain[..12], &[0x81, 0x00, 0x60, 0x07], &plain[12..]].concat();
    rig.come(&tagged);
    rig.pass(1000);
    let received = rig.received(0, 0).unwrap();
    assert_eq!((received.len, received.vlan, received.status & 1 << 3), (100, 0x6007, 1 << 3));
    assert_eq!(rig.receive_bytes(0, 0, 100), plain);
}

#[test]
fn a_frame_to_unmapped_memory_is_gone_and_the_descriptor_says_nothing_of_it() {
    let rig = Rig::linked();
    rig.receive_ring(0, 8);
    rig.store(RX_RING[0], 0xdead_0000);
    rig.write(RCTL, EN | SECRC);
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert!(rig.received(0, 0).is_some(), "a posted write: the card does not learn of it");
    assert_eq!(rig.broke(Class::UnmappedDma), 1);
    let fault = rig.card.with(|parts| parts.memory.faults()[0]);
    assert_eq!((fault.at, fault.len, fault.write), (0xdead_0000, 60, true));
}

#[test]
fn a_ring_in_unmapped_memory_stops_the_queue_and_sets_received_master_abort() {
    let rig = Rig::running(8);
    rig.card.unmap(AT, LEN as u64);
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert_eq!(rig.read(RDH), 0);
    assert_eq!(rig.broke(Class::UnmappedDma), 1);
    assert_ne!(rig.card.read_config(6, 2) & 1 << 13, 0);
    rig.card.write_config(6, 2, 1 << 13);
    assert_eq!(rig.card.read_config(6, 2) & 1 << 13, 0, "a one clears it");
}

#[test]
fn without_bus_mastering_nothing_moves() {
    let rig = Rig::running(8);
    rig.card.write_config(4, 2, 2);
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert_eq!((rig.read(RDH), rig.card.with(|parts| parts.device.waiting().0)), (0, 1));
    rig.card.write_config(4, 2, 6);
    rig.pass(1000);
    assert_eq!(rig.read(RDH), 1);
}

#[test]
fn a_card_told_to_leave_the_bus_says_so_and_touches_nothing() {
    let rig = Rig::running(8);
    rig.write(CTRL, rig.read(CTRL) | 1 << 2);
    assert_eq!(rig.read(STATUS) & 1 << 19, 0);
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert_eq!(rig.read(RDH), 0);
}

#[test]
fn a_stuck_descriptor_keeps_all_behind_it_waiting() {
    let rig = Rig::running(8);
    rig.card.with(|parts| parts.device.faults.stuck_receive[0] = true);
    rig.come(&frame(60, 0));
    rig.pass(1_000_000);
    assert_eq!((rig.read(RDH), rig.received(0, 0)), (0, None));
    rig.card.with(|parts| parts.device.faults.stuck_receive[0] = false);
    rig.pass(1000);
    assert_eq!(rig.read(RDH), 1);
}

#[test]
fn a_poisoned_buffer_is_rubbish_until_a_frame_is_in_it() {
    let rig = Rig::with_options(Options { mac: MAC, poison: true, ..Options::default() });
    rig.link_up();
    rig.receive_ring(0, 8);
    rig.store_bytes(RX_BUFFERS[0] + BUFFER_LEN, b"what the driver left there");
    rig.write(RCTL, EN | SECRC);
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert_eq!(rig.receive_bytes(0, 0, 60), frame(60, 0));
    assert_eq!(rig.receive_bytes(0, 1, 26), [0x6b; 26]);
}

#[test]
fn a_stray_write_is_a_fault_and_nothing_else() {
    let rig = Rig::running(8);
    rig.card.with(|parts| parts.device.faults.stray_write = Some(0x40));
    rig.pass(1000);
    let faults = rig.card.with(|parts| parts.memory.faults().to_vec());
    assert_eq!(faults.iter().map(|fault| (fault.at, fault.write)).collect::<Vec<_>>(), [(0x40, true)]);
}

#[test]
fn a_card_gone_mad_tells_lengths_that_no_buffer_has_and_writes_back_twice() {
    let rig = Rig::running(8);
    rig.card.with(|parts| parts.device.faults.receive_length = Some(0xffff));
    rig.come(&frame(60, 0));
    rig.pass(1000);
    assert_eq!(rig.received(0, 0).unwrap().len, 0xffff);
    rig.post(0, 0);
    assert_eq!(rig.received(0, 0), None);
    rig.card.with(|parts| parts.device.faults.repeat_write_back = Some(0));
    rig.pass(1000);
    assert_eq!(rig.received(0, 0).unwrap().len, 0xffff);
    assert_eq!(rig.received(0, 1), None);
}

#[test]
fn rnbc_counts_from_the_first_frame_that_has_no_descriptor() {
    let rig = Rig::running(8);
    for number in 0..20 {
        rig.come(&frame(60, number));
    }
    rig.pass(1000);
    assert_eq!((rig.read(RNBC), rig.read(MPC)), (13, 0));
}
