//! Rules for a driver of a virtio network device: the journal notes each breach, and the model survives any driver.

use crate::virtio::*;
use proptest::prelude::*;
use tasuki_sim::journal::Class;
use tasuki_sim::virtio_net::{Bar, Options, feature};

fn plain() -> Rig {
    Rig::running(Options::default(), PLAIN, 4)
}

/// Checks that the journal has this rule `count` times, and no other.
fn broke_only(rig: &Rig, class: Class, count: u64) {
    assert_eq!(rig.broke(class), count, "{class:?}");
    let others: Vec<_> = Class::ALWAYS.into_iter().filter(|other| *other != class).collect();
    rig.card.with(|parts| parts.device.journal.demand_none(&others)).unwrap();
}

#[test]
fn the_status_goes_one_way() {
    let rig = Rig::new(Options::default());
    for wrong in [2, 4, 8, 16, 32, 64] {
        rig.common(STATUS, wrong);
    }
    broke_only(&rig, Class::StatusOrder, 6);
    assert_eq!(rig.read_common(STATUS), 0);
    rig.agree(PLAIN);
    // An earlier status, and a change of accepted features.
    rig.common(STATUS, 3);
    rig.accept(0);
    assert_eq!(rig.read_common(STATUS), 11);
    broke_only(&rig, Class::StatusOrder, 9);
    // DRIVER_OK together with FEATURES_OK: the driver has not checked whether the device accepts the features.
    let rig = Rig::new(Options::default());
    rig.common(STATUS, 3);
    rig.accept(PLAIN);
    rig.common(STATUS, 15);
    assert_eq!(rig.read_common(STATUS), 11);
    broke_only(&rig, Class::StatusOrder, 1);
    // A driver sets up queues between the two.
    let rig = Rig::new(Options::default());
    rig.common(STATUS, 3);
    rig.queue(0);
    rig.common(STATUS, 0);
    rig.pass(20_000);
    rig.agree(PLAIN);
    rig.queue(0);
    rig.common(STATUS, 15);
    rig.queue(1);
    broke_only(&rig, Class::StatusOrder, 2);
}

#[test]
fn features_are_a_subset_that_rests_on_itself() {
    let without = |features: u64| Options { features: feature::ALL & !features, ..Options::default() };
    for (options, features) in [
        (Options::default(), 1 << 15 | feature::VERSION_1),
        (Options::default(), feature::MAC),
        (Options::default(), feature::VERSION_1 | feature::CTRL_RX),
        (Options::default(), feature::VERSION_1 | feature::RSS),
        (without(feature::RING_RESET), PLAIN),
        (without(feature::CTRL_VQ), feature::VERSION_1 | feature::CTRL_VQ),
    ] {
        let rig = Rig::new(options);
        assert!(!rig.agree(features), "{features:#x}");
        broke_only(&rig, Class::Feature, 1);
    }
    // A feature whose required feature is missing is not offered.
    let rig = Rig::new(without(feature::CTRL_VQ));
    rig.common(DEVICE_FEATURE_SELECT, 0);
    assert_eq!(u64::from(rig.read_common(DEVICE_FEATURE)) & (feature::CTRL_RX | feature::MQ), 0);
    // A driver may reset a queue only with RING_RESET accepted.
    let rig = Rig::running(Options::default(), PLAIN & !feature::RING_RESET, 0);
    rig.common(QUEUE_SELECT, 0);
    rig.common(QUEUE_RESET, 1);
    broke_only(&rig, Class::Feature, 1);
}

#[test]
fn a_queue_that_is_on_is_not_set_up() {
    let rig = plain();
    rig.common(QUEUE_SELECT, 0);
    rig.common(QUEUE_SIZE, 8);
    rig.place(0, 0, 0);
    rig.common(QUEUE_ENABLE, 1);
    rig.common(QUEUE_ENABLE, 0);
    broke_only(&rig, Class::SetupWhileEnabled, 9);
    assert_eq!((rig.read_common(QUEUE_SIZE), rig.read_common(QUEUE_ENABLE)), (16, 1));
}

#[test]
fn rings_have_lengths_and_places() {
    let rig = Rig::new(Options::default());
    rig.agree(PLAIN);
    rig.common(QUEUE_SELECT, 0);
    for len in [0, 3, 1024] {
        rig.common(QUEUE_SIZE, len);
    }
    assert_eq!(rig.broke(Class::RingLength), 3);
    for (descriptors, available, used) in [(8, 0, 0), (0, 1, 0), (0, 0, 2)] {
        rig.place(AT + descriptors, AT + available, AT + used);
        rig.common(QUEUE_ENABLE, 1);
    }
    assert_eq!((rig.broke(Class::RingAlignment), rig.read_common(QUEUE_ENABLE)), (3, 0));
    rig.common(QUEUE_SELECT, 3);
    rig.common(QUEUE_SIZE, 16);
    assert_eq!(rig.broke(Class::NoQueue), 1);
}

#[test]
fn registers_have_widths_and_some_are_the_devices() {
    let rig = Rig::new(Options { features: feature::ALL & !feature::MTU, ..Options::default() });
    for (offset, width) in [(STATUS, 2), (QUEUE_SIZE, 1), (QUEUE_DESC, 2), (OWN, 2), (OWN + 6, 1), (OWN + 12, 2)] {
        rig.card.read(Bar::Structures, offset, width);
    }
    rig.card.write(Bar::Structures, COMMON + QUEUE_SELECT, 4, 1);
    broke_only(&rig, Class::OddAccess, 7);
    let rig = Rig::new(Options { features: feature::ALL & !feature::MTU, ..Options::default() });
    for offset in [DEVICE_FEATURE, NUM_QUEUES, GENERATION, 0x1e] {
        rig.common(offset, 0);
    }
    rig.card.write(Bar::Structures, OWN, 1, 0);
    rig.card.write(Bar::Structures, ISR, 1, 0);
    broke_only(&rig, Class::ReadOnly, 6);
    let rig = Rig::new(Options { features: feature::ALL & !feature::MTU, ..Options::default() });
    rig.own(10, 2);
    rig.card.read(Bar::Structures, 0x100, 4);
    rig.card.write(Bar::Structures, 0x3f00, 2, 0);
    broke_only(&rig, Class::UnknownRegister, 3);
}

#[test]
fn a_reset_is_waited_for() {
    let rig = plain();
    rig.common(STATUS, 0);
    rig.common(STATUS, 1);
    rig.read_common(QUEUE_SIZE);
    broke_only(&rig, Class::DuringReset, 2);
    rig.pass(20_000);
    assert_eq!(rig.read_common(STATUS), 0);
}

#[test]
fn nobody_rings_for_a_queue_that_is_not_ready() {
    let rig = Rig::new(Options::default());
    rig.agree(PLAIN);
    rig.queues();
    rig.ring(0);
    rig.common(STATUS, 15);
    rig.ring(0);
    rig.ring(3);
    rig.card.write(Bar::Structures, NOTIFY, 2, 1);
    rig.reset_queue(1);
    rig.ring(1);
    broke_only(&rig, Class::EarlyRing, 4);
    assert_eq!(rig.card.with(|parts| parts.device.counts().rings), 1);
    rig.card.write(Bar::Structures, NOTIFY, 4, 0);
    assert_eq!(rig.broke(Class::OddAccess), 1);
}

#[test]
fn a_card_that_is_not_master_of_the_bus_does_nothing() {
    let rig = Rig::new(Options::default());
    rig.card.write_config(4, 2, 2);
    rig.agree(PLAIN);
    rig.queues();
    rig.common(STATUS, 15);
    rig.send(1, 0, &frame(60, 0));
    rig.pass(1);
    assert!(rig.sent().is_empty());
    broke_only(&rig, Class::NoBusMaster, 1);
    rig.card.write_config(4, 2, 6);
    rig.pass(1);
    assert_eq!(rig.sent().len(), 1);
}

/// After an error from which it cannot recover, the device stops and sets DEVICE_NEEDS_RESET; a reset brings it
/// back.
#[test]
fn what_makes_no_sense_needs_a_reset() {
    type Break = fn(&Rig);
    let cases: [(Class, Break); 9] = [
        (Class::IndexAhead, |rig| rig.store16(available(1) + 2, 17)),
        (Class::IndexAhead, |rig| rig.store16(available(1) + 2, 0xffff)),
        (Class::BadDescriptor, |rig| rig.give(1, 16)),
        (Class::TwiceAvailable, |rig| {
            rig.send(1, 0, &frame(60, 0));
            rig.give(1, 0);
        }),
        (Class::BadDescriptor, |rig| {
            // The chain loops.
            rig.descriptor(1, 0, AT, 12, NEXT, 1);
            rig.descriptor(1, 1, AT, 12, NEXT, 0);
            rig.give(1, 0);
        }),
        (Class::BadDescriptor, |rig| {
            rig.descriptor(1, 0, AT, 12, NEXT, 16);
            rig.give(1, 0);
        }),
        (Class::BadDescriptor, |rig| {
            rig.descriptor(1, 0, AT, 32, INDIRECT, 0);
            rig.give(1, 0);
        }),
        (Class::BadDescriptor, |rig| {
            // A writable buffer before a readable one.
            rig.descriptor(1, 0, AT, 12, NEXT | WRITE, 1);
            rig.descriptor(1, 1, AT, 60, 0, 0);
            rig.give(1, 0);
        }),
        (Class::UnmappedDma, |rig| {
            rig.reset_queue(1);
            rig.common(QUEUE_SIZE, 16);
            rig.place(0x1000, 0x2000, 0x3000);
            rig.common(QUEUE_ENABLE, 1);
        }),
    ];
    for (number, (class, act)) in cases.into_iter().enumerate() {
        let rig = Rig::new(Options::default());
        rig.agree(PLAIN);
        rig.common(CONFIG_VECTOR, 0);
        rig.queues();
        rig.common(STATUS, 15);
        act(&rig);
        rig.pass(1);
        assert_eq!(rig.read_common(STATUS), 15 | NEEDS_RESET, "case {number}");
        assert_eq!(rig.raised(0), 1, "case {number}: its driver is told");
        broke_only(&rig, class, 1);
        rig.post(0, 0);
        rig.come(&frame(60, 1));
        rig.pass(1);
        assert!(rig.used(0).is_empty(), "case {number}: nothing moves");
        rig.agree(PLAIN);
        rig.queues();
        rig.common(STATUS, 15);
        rig.post(0, 0);
        rig.pass(1);
        assert_eq!(rig.came(0), [frame(60, 1)], "case {number}");
    }
}

#[test]
fn buffers_that_are_not_there_are_noted_and_no_more() {
    let rig = Rig::running(Options::default(), PLAIN, 0);
    rig.descriptor(0, 0, 0x1000, 2048, WRITE, 0);
    rig.give(0, 0);
    rig.descriptor(1, 0, 0x1000, 100, 0, 0);
    rig.give(1, 0);
    rig.come(&frame(60, 0));
    rig.pass(1);
    broke_only(&rig, Class::UnmappedDma, 2);
    assert_eq!((rig.used(0), rig.used(1)), (vec![(0, 72)], vec![(0, 0)]));
    assert!(rig.sent().is_empty());
}

#[test]
fn a_driver_that_went_away_has_no_work_and_breaks_no_rule_until_a_frame_comes() {
    for features in [PLAIN, PLAIN & !feature::EVENT_IDX] {
        let rig = Rig::running(Options::default(), features, 4);
        rig.pass(1);
        rig.doze();
        rig.card.unmap(AT, LEN as u64);
        rig.pass(1);
        assert!(!rig.doze());
        rig.broke_nothing();
        rig.come(&frame(60, 0));
        rig.pass(1);
        broke_only(&rig, Class::UnmappedDma, 1);
    }
}

#[test]
fn frames_and_their_headers_are_what_was_agreed_on() {
    let rig = plain();
    for (number, header) in [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 2]].into_iter().enumerate() {
        let [flags, kind, low, high] = header;
        let header = [flags, kind, 9, 9, 9, 9, 9, 9, 9, 9, low, high];
        rig.send_with(1, 2 * number as u16, &header, &frame(60, 0));
    }
    rig.pass(1);
    broke_only(&rig, Class::BadHeader, 4);
    let rig = plain();
    // Too short, too long, and one with a writable buffer.
    rig.send(1, 0, &frame(13, 0));
    rig.send(1, 2, &frame(1519, 0));
    rig.descriptor(1, 4, AT, 100, WRITE, 0);
    rig.give(1, 4);
    rig.pass(1);
    broke_only(&rig, Class::BadDescriptor, 3);
    assert_eq!((rig.used(1).len(), rig.sent().len()), (3, 0));
}

#[test]
fn a_buffer_has_room_for_what_was_agreed_on() {
    let rig = Rig::running(Options { mtu: 4000, ..Options::default() }, PLAIN, 4);
    rig.come(&frame(60, 0));
    rig.come(&frame(60, 1));
    rig.pass(1);
    broke_only(&rig, Class::ShortBuffer, 1);
}

#[test]
fn commands_make_sense() {
    let all = || Rig::running(Options::default(), feature::ALL, 0);
    let rss = |types: u32, halves: &[u16], key: &[u8]| {
        let halves: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        [&types.to_le_bytes()[..], &halves, &[key.len() as u8], key].concat()
    };
    let key = [0; 40];
    let wrong = [
        (0, 0, vec![2]),
        (0, 0, vec![]),
        (0, 6, vec![1]),
        (1, 0, vec![0; 7]),
        (1, 0, vec![0xff; 8]),
        (1, 0, vec![1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (1, 1, vec![0; 6]),
        (4, 0, vec![0, 0]),
        (4, 0, vec![3, 0]),
        (4, 1, rss(1 << 6, &[0, 0, 0, 1], &key)),
        (4, 1, rss(1, &[2, 0, 0, 0, 0, 1], &key)),
        (4, 1, rss(1, &[0, 0, 2, 1], &key)),
        (4, 1, rss(1, &[0, 2, 0, 1], &key)),
        (4, 1, rss(1, &[0, 0, 0, 3], &key)),
        (4, 1, rss(1, &[0, 0, 0, 0], &key)),
        (4, 1, rss(1, &[0, 0, 0, 1], &[0; 41])),
        (4, 1, vec![0; 10]),
        (9, 9, vec![]),
    ];
    let rig = all();
    for (class, command, data) in &wrong {
        assert_eq!(rig.command(*class, *command, data), 1, "{class} {command} {data:?}");
    }
    broke_only(&rig, Class::BadCommand, wrong.len() as u64);
    // A valid command, but for a queue that is off.
    let rig = all();
    assert_eq!(rig.command(4, 1, &rss(1, &[0, 0, 1, 1], &key)), 0);
    rig.reset_queue(2);
    assert_eq!(rig.command(4, 1, &rss(1, &[0, 0, 1, 1], &key)), 1);
    assert_eq!(rig.command(4, 0, &[2, 0]), 1);
    // Commands of features that were not accepted.
    let rig = Rig::running(Options::default(), feature::VERSION_1 | feature::CTRL_VQ | feature::MQ, 0);
    assert_eq!(rig.command(0, 0, &[1]), 1);
    assert_eq!(rig.command(4, 1, &rss(1, &[0, 0, 0, 1], &key)), 1);
    // No room for a reply, and room for a reply but no command.
    let rig = all();
    rig.descriptor(4, 0, AT, 3, 0, 0);
    rig.give(4, 0);
    rig.descriptor(4, 1, AT, 1, WRITE, 0);
    rig.give(4, 1);
    rig.pass(1);
    broke_only(&rig, Class::BadCommand, 2);
    assert_eq!(rig.used(4), [(0, 0), (1, 1)]);
}

#[test]
fn nobody_sends_by_a_pair_that_is_not_in_use() {
    let rig = Rig::running(Options::default(), feature::ALL, 0);
    rig.send(3, 0, &frame(60, 0));
    rig.pass(1);
    broke_only(&rig, Class::InactivePair, 1);
}

#[derive(Debug, Clone)]
enum Act {
    Write(u32, u8, u32),
    Read(u32, u8),
    Config(u32, u32),
    Store(usize, u16),
    Start(u64),
    Come(usize),
    Pass(u64),
    Doze,
}

fn act() -> impl Strategy<Value = Act> {
    let width = prop::sample::select(vec![1_u8, 2, 4]);
    let register = || prop_oneof![0_u32..0x3c, 0x1000_u32..0x1002, 0x2000_u32..0x2018, 0x3000_u32..0x3014];
    let value = || prop_oneof![any::<u32>(), 0_u32..20];
    prop_oneof![
        4 => (register(), width.clone(), value()).prop_map(|(at, width, value)| Act::Write(at, width, value)),
        1 => (register(), width).prop_map(|(at, width)| Act::Read(at, width)),
        1 => (0x90_u32..0xb0, value()).prop_map(|(at, value)| Act::Config(at, value)),
        8 => (0_usize..0x28000 / 2, prop_oneof![any::<u16>(), 0_u16..20]).prop_map(|(at, value)| Act::Store(2 * at, value)),
        4 => (0_u16..5, 0_usize..20, any::<u16>()).prop_map(|(queue, at, value)| Act::Store(available(queue) + 2 * at, value % 20)),
        4 => (0_u16..5, 0_usize..128, 0_u16..70).prop_map(|(queue, at, value)| Act::Store(descriptors(queue) + 2 * at, value)),
        2 => any::<u64>().prop_map(Act::Start),
        2 => (0_usize..3000).prop_map(Act::Come),
        2 => (0_u64..20_000).prop_map(Act::Pass),
        1 => Just(Act::Doze),
    ]
}

proptest! {
    /// Whatever registers and rings hold, the model does not panic, and runs out of work.
    #[test]
    fn whatever_a_driver_does_the_model_stands(acts in prop::collection::vec(act(), 0..150), lossy: bool) {
        let rig = Rig::running(Options { lossy, ..Options::default() }, feature::ALL, 4);
        for act in acts {
            match act {
                Act::Write(at, width, value) => rig.card.write(Bar::Structures, at, width, value),
                Act::Read(at, width) => _ = rig.card.read(Bar::Structures, at, width),
                Act::Config(at, value) => rig.card.write_config(at & !3, 4, value),
                Act::Store(at, value) => rig.store16(at, value),
                Act::Start(taken) => {
                    rig.agree(feature::ALL & !(taken & !feature::VERSION_1 & feature::MQ));
                    rig.queues();
                    rig.common(STATUS, 15);
                    (0..4).for_each(|i| rig.post(0, i));
                }
                Act::Come(len) => rig.come(&frame(len.max(15), 0)),
                Act::Pass(ns) => rig.pass(ns),
                Act::Doze => _ = rig.doze(),
            }
        }
        rig.card.with(|parts| parts.wire.coming.clear());
        let steps = (0..2000).take_while(|_| rig.card.step()).count();
        prop_assert!(steps < 2000, "it is busy for ever");
        prop_assert!(rig.card.with(|parts| parts.device.waiting().1) < 2 * (64 << 10) + 2 * 16384);
    }
}
