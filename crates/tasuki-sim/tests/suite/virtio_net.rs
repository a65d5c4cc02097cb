//! The virtio network device with a correct driver: frames, commands, notifications and resets.

use crate::rig::frame_to;
use crate::virtio::*;
use tasuki_sim::model::Model;
use tasuki_sim::virtio_net::{Bar, Options, feature};

/// Returns the contents of a structure's capability: BAR, offset, length.
fn structure(rig: &Rig, kind: u32) -> (u32, u32, u32, u32) {
    let mut at = rig.card.read_config(0x34, 1);
    while at != 0 {
        if rig.card.read_config(at, 1) == 9 && rig.card.read_config(at + 3, 1) == kind {
            return (
                at,
                rig.card.read_config(at + 4, 1),
                rig.card.read_config(at + 8, 4),
                rig.card.read_config(at + 12, 4),
            );
        }
        at = rig.card.read_config(at + 1, 1);
    }
    panic!("no structure {kind}");
}

#[test]
fn the_configuration_space_says_where_everything_is() {
    let rig = Rig::new(Options::default());
    assert_eq!(rig.card.read_config(0, 4), 0x1041_1af4);
    assert_eq!(rig.card.read_config(8, 4) >> 8, 0x02_0000, "an Ethernet controller");
    let (_, bar, at, len) = structure(&rig, 1);
    assert_eq!((bar, at, len), (0, COMMON, 0x3c));
    let (capability, bar, at, len) = structure(&rig, 2);
    assert_eq!((bar, at, len, rig.card.read_config(capability + 16, 4)), (0, NOTIFY, 20, 4));
    assert_eq!(structure(&rig, 3).2, ISR);
    assert_eq!((structure(&rig, 4).2, structure(&rig, 4).3), (OWN, 24));
    // The window (4.1.4.9) shows the same.
    let (window, ..) = structure(&rig, 5);
    rig.card.write_config(window + 4, 1, 0);
    rig.card.write_config(window + 8, 4, COMMON + NUM_QUEUES);
    rig.card.write_config(window + 12, 4, 2);
    assert_eq!(rig.card.read_config(window + 16, 4), 5);
    rig.card.write_config(window + 8, 4, COMMON + QUEUE_SELECT);
    rig.card.write_config(window + 16, 4, 3);
    assert_eq!(rig.read_common(QUEUE_SELECT), 3);
    rig.broke_nothing();
}

#[test]
fn the_device_says_what_it_is() {
    let rig = Rig::new(Options { mtu: 4000, ..Options::default() });
    let offered = [0, 1, 2].map(|select| {
        rig.common(DEVICE_FEATURE_SELECT, select);
        rig.read_common(DEVICE_FEATURE)
    });
    assert_eq!(u64::from(offered[0]) | u64::from(offered[1]) << 32, feature::ALL);
    assert_eq!(offered[2], 0);
    let mac: Vec<_> = (0..6).map(|i| rig.own(i, 1) as u8).collect();
    assert_eq!(mac, MAC);
    assert_eq!((rig.own(6, 2), rig.own(8, 2), rig.own(10, 2), rig.own(12, 4), rig.own(16, 1)), (1, 2, 4000, 10_000, 1));
    assert_eq!((rig.own(17, 1), rig.own(18, 2), rig.own(20, 4)), (40, 128, 0x3f));
    rig.broke_nothing();
}

#[test]
fn where_the_commands_go_depends_on_what_was_agreed_on() {
    for (options, features, sizes) in [
        (Options::default(), feature::ALL, [512, 512, 512, 512, 64]),
        (Options::default(), PLAIN, [512, 512, 64, 0, 0]),
        (Options::default(), feature::VERSION_1, [512, 512, 0, 0, 0]),
        (Options { pairs: 1, queue_size: 8, ..Options::default() }, feature::ALL, [8, 8, 64, 0, 0]),
    ] {
        let rig = Rig::new(options);
        assert!(rig.agree(features));
        let found = [0, 1, 2, 3, 4].map(|index| {
            rig.common(QUEUE_SELECT, index);
            rig.read_common(QUEUE_SIZE)
        });
        assert_eq!(found, sizes);
        rig.broke_nothing();
    }
}

#[test]
fn frames_come_with_their_headers_and_the_index_last() {
    let rig = Rig::running(Options::default(), PLAIN, 3);
    let frames = [frame(60, 1), frame(1514, 2), frame(100, 3)];
    frames.iter().for_each(|frame| rig.come(frame));
    rig.pass(1);
    assert_eq!(rig.used(0), [(0, 72), (1, 1526), (2, 112)]);
    assert_eq!(rig.came(0), frames);
    rig.broke_nothing();
}

#[test]
fn a_chain_is_filled_one_buffer_after_the_other() {
    let rig = Rig::running(Options::default(), PLAIN & !feature::MTU, 0);
    let lens = [5, 0, 20, 7, 1000];
    for (i, len) in (0_u16..).zip(lens) {
        let flags = if i == 4 { WRITE } else { WRITE | NEXT };
        rig.descriptor(0, i, AT + buffer(0, i.into()) as u64, len, flags, i + 1);
    }
    rig.give(0, 0);
    let frame = frame(200, 9);
    rig.come(&frame);
    rig.pass(1);
    assert_eq!(rig.used(0), [(0, 212)]);
    let bytes: Vec<u8> = (0..).zip(lens).flat_map(|(i, len)| rig.load_bytes(buffer(0, i), len as usize)).collect();
    assert_eq!(bytes[HEADER_LEN..212], frame);
    rig.broke_nothing();
}

#[test]
fn frames_leave_whatever_they_are_made_of() {
    let rig = Rig::running(Options::default(), PLAIN, 0);
    let frames = [frame(60, 1), frame(1514, 2)];
    rig.send(1, 0, &frames[0]);
    rig.send(1, 2, &frames[1]);
    // Header and frame in one descriptor.
    let whole = [&[0; HEADER_LEN][..], &frames[0]].concat();
    rig.store_bytes(buffer(1, 8), &whole);
    rig.descriptor(1, 8, AT + buffer(1, 8) as u64, whole.len() as u32, 0, 0);
    rig.give(1, 8);
    rig.pass(1);
    assert_eq!(rig.sent(), [frames[0].clone(), frames[1].clone(), frames[0].clone()]);
    assert_eq!(rig.used(1), [(0, 0), (2, 0), (8, 0)]);
    rig.broke_nothing();
}

#[test]
fn a_ring_goes_round() {
    let rig = Rig::running(Options::default(), PLAIN, 16);
    for number in 0..200_u8 {
        rig.come(&frame(60, number));
        rig.send(1, 2 * u16::from(number % 8), &frame(61, number));
        rig.pass(1);
        assert_eq!(rig.used(0).len(), usize::from(number) + 1);
        assert_eq!(rig.sent(), [frame(61, number)]);
        let i = usize::from(number % 16);
        assert_eq!(rig.load_bytes(buffer(0, i) + HEADER_LEN, 60), frame(60, number));
        rig.give(0, i as u16);
    }
    rig.broke_nothing();
}

#[test]
fn what_finds_no_buffer_waits_and_the_wire_with_it() {
    let rig = Rig::running(Options::default(), PLAIN, 0);
    (0..200).for_each(|number| rig.come(&frame(1000, number)));
    rig.pass(1);
    let (frames, bytes) = rig.card.with(|parts| parts.device.waiting());
    assert_eq!((frames, bytes), (66, 66_000), "as many as the card holds");
    assert_eq!(rig.card.with(|parts| parts.wire.coming.len()), 134);
    for number in 0..200_usize {
        rig.post(0, number % 16);
        rig.pass(1);
        assert_eq!(rig.load_bytes(buffer(0, number % 16) + HEADER_LEN + 999, 1), [number as u8]);
    }
    assert_eq!(rig.card.with(|parts| parts.device.waiting()), (0, 0));
    rig.broke_nothing();
}

#[test]
fn a_card_that_may_lose_frames_counts_them() {
    let rig = Rig::running(Options { lossy: true, ..Options::default() }, PLAIN, 2);
    (0..5).for_each(|number| rig.come(&frame(60, number)));
    rig.pass(1);
    assert_eq!(rig.came(0), [frame(60, 0), frame(60, 1)]);
    rig.post(0, 2);
    rig.pass(1);
    assert_eq!(rig.used(0).len(), 2);
    assert_eq!(rig.card.with(|parts| parts.device.counts().no_buffer), 3);
}

#[test]
fn what_is_too_long_or_short_leaves_no_trace() {
    let rig = Rig::running(Options::default(), PLAIN, 2);
    for len in [13, 1519, 9000, 60] {
        rig.come(&frame(len, 7));
    }
    rig.pass(1);
    assert_eq!(rig.came(0), [frame(60, 7)]);
    // Without an MTU the buffer decides, and it stays for the next frame.
    let rig = Rig::running(Options::default(), PLAIN & !feature::MTU, 1);
    rig.come(&frame(2037, 1));
    rig.come(&frame(2036, 2));
    rig.pass(1);
    assert_eq!(rig.came(0), [frame(2036, 2)]);
    rig.broke_nothing();
}

#[test]
fn interrupts_come_at_the_index_that_was_asked_for() {
    let rig = Rig::running(Options::default(), PLAIN, 8);
    let event = available(0) + 4 + 2 * usize::from(rig.size);
    let mut number = 0;
    let mut come = |count| {
        for _ in 0..count {
            rig.come(&frame(60, number));
            number += 1;
        }
        rig.pass(1);
        rig.raised(1)
    };
    assert_eq!(come(1), 1, "the first, at index 0");
    assert_eq!(come(2), 1, "not asked for again");
    rig.store16(event, 4);
    assert_eq!(come(1), 1);
    assert_eq!(come(1), 2);
    rig.store16(event, 6);
    assert_eq!(come(3), 3, "passed over");
    rig.broke_nothing();
}

#[test]
fn flags_say_who_wants_to_be_told_where_there_are_no_indices() {
    let rig = Rig::running(Options::default(), PLAIN & !feature::EVENT_IDX, 4);
    rig.store16(available(0), 1);
    rig.come(&frame(60, 0));
    rig.pass(1);
    assert_eq!((rig.used(0).len(), rig.raised(1)), (1, 0));
    rig.store16(available(0), 0);
    rig.come(&frame(60, 1));
    rig.pass(1);
    assert_eq!(rig.raised(1), 1);
    // The card polls, and wants notifications only before a pause.
    assert_eq!(rig.load16(used(1)), 1);
    assert!(!rig.doze());
    assert_eq!((rig.load16(used(1)), rig.load16(used(2)), rig.load16(used(0))), (0, 0, 1));
    rig.pass(1);
    assert_eq!((rig.load16(used(1)), rig.load16(used(2))), (1, 1));
    rig.broke_nothing();
}

#[test]
fn before_a_nap_the_card_asks_and_looks_once_more() {
    let rig = Rig::running(Options::default(), PLAIN, 0);
    let event = |index| used(index) + 4 + 8 * usize::from(rig.size);
    rig.send(1, 0, &frame(60, 0));
    rig.send(1, 2, &frame(60, 1));
    rig.pass(1);
    assert_eq!(rig.load16(event(1)), 0, "nobody asked");
    assert!(!rig.doze());
    assert_eq!((rig.load16(event(1)), rig.load16(event(0))), (2, 0), "buffers are of no interest");
    rig.send(1, 4, &frame(60, 2));
    assert!(rig.doze(), "there is work already");
    rig.pass(1);
    assert_eq!(rig.sent().len(), 3);
    // A frame waits, so the device needs buffers.
    rig.come(&frame(60, 0));
    rig.pass(1);
    rig.post(0, 0);
    assert!(rig.doze());
    rig.pass(1);
    assert_eq!(rig.came(0), [frame(60, 0)]);
    rig.ring(1);
    assert_eq!(rig.card.with(|parts| parts.device.counts().rings), 1);
    rig.broke_nothing();
}

#[test]
fn without_msix_there_is_a_pin_and_its_cause() {
    let rig = Rig::running(Options::default(), PLAIN & !feature::EVENT_IDX, 2);
    rig.card.with(|parts| parts.device.enable_msix(false));
    rig.come(&frame(60, 0));
    rig.pass(1);
    assert!(rig.card.with(|parts| parts.memory.intx()));
    assert_eq!((rig.raised(1), rig.card.read_config(6, 2) & 8), (0, 8));
    assert_eq!(rig.card.read(Bar::Structures, ISR, 1), 1);
    rig.pass(1);
    assert!(!rig.card.with(|parts| parts.memory.intx()));
    assert_eq!(rig.card.read(Bar::Structures, ISR, 1), 0);
    rig.broke_nothing();
}

#[test]
fn the_link_is_in_the_configuration_and_its_change_is_told() {
    let rig = Rig::new(Options::default());
    rig.agree(PLAIN);
    rig.common(CONFIG_VECTOR, 0);
    rig.queues();
    rig.common(STATUS, 15);
    rig.post(0, 0);
    let generation = rig.read_common(GENERATION);
    assert_eq!(rig.own(6, 2), 1);
    assert_eq!(rig.read_common(GENERATION), generation);
    rig.card.with(|parts| parts.device.set_partner(false));
    rig.come(&frame(60, 0));
    rig.send(1, 0, &frame(60, 0));
    rig.pass(1);
    assert_eq!((rig.raised(0), rig.own(6, 2)), (1, 0));
    assert_ne!(rig.read_common(GENERATION), generation);
    assert_eq!((rig.used(0).len(), rig.used(1).len(), rig.sent().len()), (0, 1, 0), "what has no cable is lost");
    rig.card.with(|parts| parts.device.set_partner(true));
    rig.pass(1);
    assert_eq!((rig.raised(0), rig.own(6, 2)), (2, 1));
    rig.broke_nothing();
}

const GROUP: [u8; 6] = [0x01, 0x00, 0x5e, 0x00, 0x00, 0xfb];
const OTHER_GROUP: [u8; 6] = [0x01, 0x00, 0x5e, 0x7f, 0x12, 0x34];
const STRANGER: [u8; 6] = [0x52, 0x54, 0x00, 0xab, 0xcd, 0xef];

/// Returns which frames pass the filter: to our own address, broadcast, two groups, a stranger.
fn let_in(rig: &Rig) -> [bool; 5] {
    let before = rig.used(0).len();
    let frames = [MAC, [0xff; 6], GROUP, OTHER_GROUP, STRANGER].map(|to| frame_to(&to, 60, 0));
    frames.map(|frame| {
        let count = rig.used(0).len();
        rig.come(&frame);
        rig.pass(1);
        let came = rig.used(0).len() > count;
        if came {
            // Give its buffer back.
            rig.give(0, (count % 16) as u16);
        }
        assert!(rig.used(0).len() - before <= 5);
        came
    })
}

#[test]
fn commands_say_what_is_let_in() {
    let rig = Rig::running(Options::default(), PLAIN, 16);
    let only_own = [true, true, false, false, false];
    assert_eq!(let_in(&rig), only_own);
    let tables = |unicast: &[[u8; 6]], multicast: &[[u8; 6]]| {
        let [a, b] = [unicast, multicast].map(|these| (these.len() as u32).to_le_bytes());
        [&a[..], unicast.as_flattened(), &b[..], multicast.as_flattened()].concat()
    };
    // The control queue is the third.
    let command = |class, command, data: &[u8]| {
        let at = buffer(2, 0);
        rig.store_bytes(at + 64, &[&[class, command], data].concat());
        rig.store_bytes(at, &[0xee]);
        rig.descriptor(2, 0, AT + at as u64 + 64, data.len() as u32 + 2, NEXT, 1);
        rig.descriptor(2, 1, AT + at as u64, 1, WRITE, 0);
        rig.give(2, 0);
        rig.pass(1);
        assert_eq!(rig.load_bytes(at, 1), [0]);
    };
    for (class, name, data, expected) in [
        (1, 0, tables(&[STRANGER], &[GROUP]), [true, true, true, false, true]),
        (0, 5, vec![1], [true, false, true, false, true]),
        (0, 5, vec![0], [true, true, true, false, true]),
        (0, 3, vec![1], [true, true, false, false, true]),
        (0, 4, vec![1], [false, true, false, false, false]),
        (0, 0, vec![1], [true; 5]),
        (0, 0, vec![0], [false, true, false, false, false]),
        (0, 3, vec![0], [false, true, true, false, false]),
        (0, 4, vec![0], [true, true, true, false, true]),
        (1, 0, tables(&[], &[]), only_own),
        (0, 1, vec![1], [true, true, true, true, false]),
        (0, 1, vec![0], only_own),
        (0, 2, vec![1], [true, true, false, false, true]),
        (0, 2, vec![0], only_own),
        (1, 0, tables(&[], &[GROUP; 65]), [true, true, true, true, false]),
    ] {
        command(class, name, &data);
        assert_eq!(let_in(&rig), expected, "after command {name} of class {class}: {data:?}");
    }
    rig.broke_nothing();
}

/// Returns a UDP packet over IPv4 of flow `flow`.
fn packet(flow: u8) -> Vec<u8> {
    let mut packet = frame(60, flow);
    packet[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    packet[20..22].copy_from_slice(&[0, 0]);
    packet[23] = 17;
    packet[26..34].copy_from_slice(&[10, 0, 0, flow, 10, 0, 0, 1]);
    packet
}

/// Returns the number of frames received through each pair.
fn spread(rig: &Rig, frames: &[Vec<u8>]) -> [usize; 2] {
    let before = [rig.used(0).len(), rig.used(2).len()];
    for frame in frames {
        rig.come(frame);
    }
    rig.pass(1);
    let after = [rig.used(0).len(), rig.used(2).len()];
    let came = [after[0] - before[0], after[1] - before[1]];
    for (index, first, count) in [(0, before[0], came[0]), (2, before[1], came[1])] {
        (first..first + count).for_each(|i| rig.give(index, (i % 16) as u16));
    }
    came
}

fn two_pairs() -> Rig {
    let rig = Rig::running(Options::default(), feature::ALL, 16);
    (0..16).for_each(|i| rig.post(2, i));
    rig
}

/// Returns the data of an RSS command: hash types, table, queue for frames that are not hashed, pairs to send
/// through, key.
fn rss(types: u32, table: &[u16], unclassified: u16, transmit: u16, key: &[u8]) -> Vec<u8> {
    let mut bytes = types.to_le_bytes().to_vec();
    [table.len() as u16 - 1, unclassified]
        .iter()
        .chain(table)
        .chain([&transmit])
        .for_each(|half| bytes.extend(half.to_le_bytes()));
    bytes.push(key.len() as u8);
    bytes.extend(key);
    bytes
}

#[test]
fn frames_are_spread_as_the_driver_says() {
    let rig = two_pairs();
    let packets: Vec<_> = (0..14).map(packet).collect();
    let plain = [frame(60, 0)];
    let key: Vec<u8> = (0..40_u8).map(|i| i.wrapping_mul(37) ^ 11).collect();
    assert_eq!(spread(&rig, &packets), [14, 0], "at first by the first pair");
    assert_eq!(rig.command(4, 0, &[2, 0]), 0);
    let [first, second] = spread(&rig, &packets);
    assert!(first > 0 && second > 0, "{first} and {second}");
    assert_eq!(rig.command(4, 1, &rss(0x3f, &[1, 1], 0, 2, &key)), 0);
    assert_eq!((spread(&rig, &packets), spread(&rig, &plain)), ([0, 14], [1, 0]));
    assert_eq!(rig.command(4, 1, &rss(0x3f, &[0, 0], 1, 2, &key)), 0);
    assert_eq!((spread(&rig, &packets), spread(&rig, &plain)), ([14, 0], [0, 1]));
    assert_eq!(rig.command(4, 1, &rss(1 << 1, &[0, 0], 1, 2, &key)), 0);
    assert_eq!(spread(&rig, &packets), [0, 14], "no hash of that kind");
    assert_eq!(rig.command(4, 1, &rss(0x3f, &[0, 1, 0, 1], 1, 2, &key)), 0);
    let [first, second] = spread(&rig, &packets);
    assert!(first > 0 && second > 0, "{first} and {second}");
    rig.send(3, 0, &frame(60, 1));
    rig.pass(1);
    assert_eq!(rig.sent(), [frame(60, 1)]);
    assert_eq!(rig.command(4, 0, &[1, 0]), 0);
    assert_eq!(spread(&rig, &packets), [14, 0]);
    rig.broke_nothing();
}

#[test]
fn what_waits_goes_where_the_driver_points_it() {
    let rig = Rig::running(Options::default(), feature::ALL, 0);
    assert_eq!(rig.command(4, 1, &rss(0x3f, &[1], 1, 2, &[0; 40])), 0);
    (0..10).for_each(|flow| rig.come(&packet(flow)));
    rig.pass(1);
    assert_eq!(rig.card.with(|parts| parts.device.waiting().0), 10);
    assert_eq!(rig.command(4, 1, &rss(0x3f, &[0], 0, 2, &[0; 40])), 0);
    (0..16).for_each(|i| rig.post(0, i));
    rig.pass(1);
    assert_eq!(rig.came(0), (0..10).map(packet).collect::<Vec<_>>());
    rig.broke_nothing();
}

#[test]
fn a_queue_that_was_reset_is_left_alone_and_begins_anew() {
    let rig = Rig::running(Options::default(), PLAIN, 8);
    rig.come(&frame(60, 0));
    rig.pass(1);
    rig.common(QUEUE_SELECT, 0);
    rig.common(QUEUE_RESET, 1);
    assert_eq!(rig.read_common(QUEUE_RESET), 1);
    rig.come(&frame(60, 1));
    rig.card.step();
    assert_eq!(rig.used(0).len(), 2, "until it is done it goes on");
    rig.pass(20_000);
    assert_eq!((rig.read_common(QUEUE_RESET), rig.read_common(QUEUE_ENABLE), rig.read_common(QUEUE_SIZE)), (0, 0, 512));
    assert_eq!(rig.read_common(QUEUE_VECTOR), 0xffff);
    let memory = rig.all_memory();
    (2..6).for_each(|number| rig.come(&frame(60, number)));
    rig.pass(1);
    assert!(!rig.doze());
    assert_eq!(rig.all_memory(), memory);
    // The other queue continues.
    rig.send(1, 0, &frame(60, 9));
    rig.pass(1);
    assert_eq!(rig.sent(), [frame(60, 9)]);
    rig.queue(0);
    (0..4).for_each(|i| rig.post(0, i));
    rig.pass(1);
    assert_eq!(rig.came(0), (2..6).map(|number| frame(60, number)).collect::<Vec<_>>(), "what came meanwhile waited");
    rig.broke_nothing();
}

#[test]
fn after_a_reset_all_is_as_it_was() {
    let rig = two_pairs();
    rig.command(4, 0, &[2, 0]);
    rig.command(0, 0, &[1]);
    rig.common(STATUS, 0);
    assert_ne!(rig.read_common(STATUS), 0, "it takes a while");
    rig.pass(20_000);
    assert_eq!((rig.read_common(STATUS), rig.read_common(CONFIG_VECTOR)), (0, 0xffff));
    let memory = rig.all_memory();
    rig.come(&frame(60, 0));
    rig.pass(1);
    assert_eq!(rig.all_memory(), memory);
    rig.agree(PLAIN);
    rig.queues();
    rig.common(STATUS, 15);
    (0..16).for_each(|i| rig.post(0, i));
    rig.pass(1);
    assert_eq!(rig.came(0), [frame(60, 0)]);
    assert_eq!(let_in(&rig), [true, true, false, false, false]);
    rig.broke_nothing();
}

#[test]
fn a_card_that_is_gone_reads_as_ones_and_does_nothing() {
    let rig = Rig::running(Options::default(), PLAIN, 4);
    rig.card.with(|parts| parts.device.faults.removed = true);
    rig.come(&frame(60, 0));
    let memory = rig.all_memory();
    rig.pass(1);
    assert_eq!((rig.read_common(STATUS), rig.own(6, 2), rig.card.read_config(0, 4)), (0xff, 0xffff, u32::MAX));
    assert_eq!(rig.all_memory(), memory);
}
