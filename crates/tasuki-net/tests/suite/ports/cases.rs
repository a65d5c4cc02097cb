//! The cases of the suite: node 0 sends and node 1 receives, whatever kinds they are; node 2 is native.

use std::time::Duration;

use tasuki_net::own::Own;
use tasuki_net::port::Armed;
use tasuki_net::vni::PIECE_MAX;
use tasuki_net::vni::offload::{NEEDS_CSUM, Offload};
use zerocopy::IntoBytes;

use super::{Kind, Lost, World};
use crate::memif::port::{frame_to, mac};
use tasuki_testing::PATIENCE;

/// The sending node, the receiving node, and an unrelated one.
const FROM: usize = 0;
const TO: usize = 1;
const OTHER: usize = 2;

fn world(pair: [Kind; 2]) -> Option<World> {
    World::new(&[pair[0], pair[1], Kind::Native])
}

/// Returns a frame from one node to another.
fn frame(to: usize, from: usize, number: usize, len: usize) -> Vec<u8> {
    let short = |node| u16::try_from(node).expect("a node");
    frame_to(short(to), short(from), u32::try_from(number).expect("a number"), len)
}

fn assert_same(came: &[Vec<u8>], sent: &[Vec<u8>]) {
    let lens = |frames: &[Vec<u8>]| frames.iter().map(Vec::len).collect::<Vec<_>>();
    if let Some(at) = came.iter().zip(sent).position(|(came, sent)| came != sent) {
        panic!("frame {at} of {} bytes came as one of {}: {:02x?}", sent[at].len(), came[at].len(), &came[at][..60]);
    }
    assert_eq!(lens(came), lens(sent));
}

pub fn frames_of_all_lengths_arrive_whole_and_in_order(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    let lengths = (60..=1518).chain((1519..9018).step_by(83)).chain([9018, 60]);
    let sent: Vec<_> = lengths.enumerate().map(|(number, len)| frame(TO, FROM, number, len)).collect();
    sent.iter().for_each(|frame| world.send(FROM, frame));
    assert_same(&world.take(TO, sent.len()), &sent);
    assert!(world.came[FROM].is_empty() && world.came[OTHER].is_empty(), "and nowhere else");
    assert_eq!(world.end(TO).lost(), Lost::default());
}

pub fn a_burst_longer_than_a_ring_arrives_in_order(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    for round in 0..5 {
        let lengths = [60, 1518, 300, 9018];
        let sent: Vec<_> = (0..1000).map(|i| frame(TO, FROM, round * 1000 + i, lengths[(i / 7 + round) % 4])).collect();
        // Send as many as there is room for, before any node has a turn.
        let mut rest = sent.iter().peekable();
        world.until("all are sent", |world| {
            while rest.peek().is_some_and(|frame| world.end(FROM).send(frame)) {
                rest.next();
            }
            rest.peek().is_none()
        });
        assert_same(&world.take(TO, sent.len()), &sent);
    }
}

pub fn a_frame_for_several_reaches_all_others_once(pair: [Kind; 2]) {
    let [from, to] = pair;
    let Some(mut world) = World::new(&[from, to, Kind::Native, to, from]) else { return };
    // Broadcast; an IPv4 group, an IPv6 group, and a group of neither.
    for (number, group) in
        [[0xff; 6], [1, 0, 0x5e, 1, 2, 3], [0x33, 0x33, 0, 0, 0, 1], [3, 1, 2, 3, 4, 5]].iter().enumerate()
    {
        let mut sent = Vec::new();
        for i in 0..20 {
            let mut to_all = frame(TO, FROM, number * 100 + i, 60 + i * 400);
            to_all[..6].copy_from_slice(group);
            world.send(FROM, &to_all);
            sent.push(to_all);
            // Frames for one node keep their place among them.
            let to_one = frame(TO, FROM, i, 100);
            world.send(FROM, &to_one);
        }
        let ones = (0..20).map(|i| frame(TO, FROM, i, 100));
        let both: Vec<_> = sent.iter().cloned().zip(ones).flat_map(|(to_all, to_one)| [to_all, to_one]).collect();
        assert_same(&world.take(TO, both.len()), &both);
        for node in 2..5 {
            assert_same(&world.take(node, sent.len()), &sent);
        }
        assert!(world.came[FROM].is_empty(), "who sent it does not get it");
    }
}

pub fn a_frame_for_a_stranger_goes_to_uplinks_or_nowhere(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    let stranger = |number| frame(77, FROM, number, 100);
    world.send(FROM, &stranger(1));
    world.until("it is counted", |world| world.end(FROM).lost().nobody == 1);
    world.settle();
    assert!(world.came.iter().all(Vec::is_empty), "{:?}", world.came);
    world.set_uplinks(&[0, 2]);
    world.send(FROM, &stranger(2));
    assert_same(&world.take(OTHER, 1), &[stranger(2)]);
    assert!(world.came[TO].is_empty() && world.came[FROM].is_empty());
    // Two uplinks get the frame, until a frame from the stranger shows which one leads to it.
    world.set_uplinks(&[1, 2]);
    world.send(FROM, &stranger(3));
    assert_same(&world.take(OTHER, 1), &[stranger(3)]);
    assert_same(&world.take(TO, 1), &[stranger(3)]);
    let mut from_stranger = frame(FROM, 77, 4, 100);
    from_stranger[6..12].copy_from_slice(&mac(77));
    world.send(OTHER, &from_stranger);
    assert_same(&world.take(FROM, 1), &[from_stranger]);
    world.send(FROM, &stranger(5));
    assert_same(&world.take(OTHER, 1), &[stranger(5)]);
    assert!(world.came[TO].is_empty(), "it is known behind whom the stranger is");
    assert_eq!(world.end(FROM).lost(), Lost { nobody: 1, ..Lost::default() });
}

pub fn a_vlan_tag_is_carried_untouched(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    let mut sent = Vec::new();
    // Customer and provider tags, with a priority and without, the first VLAN and the last; and two tags.
    for (number, tags) in [
        &[0x81, 0, 0, 1][..],
        &[0x81, 0, 0xe0, 5],
        &[0x81, 0, 0x6f, 0xfe],
        &[0x81, 0, 0x20, 0],
        &[0x88, 0xa8, 0, 100],
        &[0x88, 0xa8, 0, 100, 0x81, 0, 0, 7],
        &[0x81, 0, 0, 9, 0x81, 0, 0, 8],
    ]
    .iter()
    .enumerate()
    {
        for len in [60, 100, 1514, 9000] {
            let plain = frame(TO, FROM, number, len);
            sent.push([&plain[..12], tags, &plain[12..]].concat());
        }
    }
    sent.iter().for_each(|frame| world.send(FROM, frame));
    assert_same(&world.take(TO, sent.len()), &sent);
}

pub fn a_node_that_is_not_driven_holds_up_nobody_else(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    const COUNT: usize = 1500;
    world.still = vec![TO];
    let mut refused = 0;
    for number in 0..COUNT {
        let for_slow = frame(TO, FROM, number, 100);
        // A native program gets an error. For the other kinds the node waits, and then counts the frame.
        match pair[0] {
            Kind::Native => refused += u64::from(!world.end(FROM).send(&for_slow)),
            Kind::Tap | Kind::Link | Kind::Memif | Kind::Vm => world.send(FROM, &for_slow),
        }
        world.send(FROM, &frame(OTHER, FROM, number, 100));
        if number % 32 == 0 {
            world.round();
        }
    }
    let others: Vec<_> = (0..COUNT).map(|number| frame(OTHER, FROM, number, 100)).collect();
    assert_same(&world.take(OTHER, COUNT), &others);
    // Once driven again, it receives the frames in its ring.
    world.still.clear();
    world.settle();
    let came = std::mem::take(&mut world.came[TO]);
    let lost = world.end(FROM).lost();
    assert_eq!(came.len() + usize::try_from(lost.no_room).unwrap(), COUNT, "{lost:?}");
    assert!(pair[0] != Kind::Native || refused == lost.no_room);
    assert!(came.len() >= 128, "{} frames, where a ring holds 256", came.len());
    let sent: Vec<_> = (0..came.len()).map(|number| frame(TO, FROM, number, 100)).collect();
    assert_same(&came, &sent);
    let counts = world.end(FROM).vni().counts(1).expect("it is known");
    assert!(counts.ring_full + counts.over_quota > 0, "{counts:?}");
    // From then on it receives all frames.
    let sent: Vec<_> = (0..600).map(|number| frame(TO, FROM, number, 1000)).collect();
    sent.iter().for_each(|frame| world.send(FROM, frame));
    assert_same(&world.take(TO, sent.len()), &sent);
}

pub fn a_frame_for_several_for_which_none_has_room_is_not_sent(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    world.still = vec![TO, OTHER];
    let mut broadcast = frame(TO, FROM, 0, 100);
    broadcast[..6].fill(0xff);
    let mut count = 0;
    // No more than a ring holds is sent ahead of the node.
    while world.end(FROM).lost().no_room == 0 {
        assert!(count < 2048, "rings hold frames without end");
        world.send(FROM, &broadcast);
        count += 1;
        if count % 32 == 0 {
            world.settle();
        }
    }
    world.settle();
    let before = world.end(FROM).lost().no_room;
    world.send(FROM, &broadcast);
    world.until("it is counted", |world| world.end(FROM).lost().no_room > before);
    assert_eq!(world.end(FROM).lost(), Lost { no_room: before + 1, ..Lost::default() });
    let sent = count + 1 - usize::try_from(before + 1).unwrap();
    world.still.clear();
    assert_eq!([TO, OTHER].map(|node| world.take(node, sent).len()), [sent; 2]);
}

pub fn what_is_no_frame_is_refused_and_counted(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    // The kernel accepts no such frame from a namespace's program; the node checks a memif client's frame in its
    // turn.
    let longest = PIECE_MAX - 10;
    let no_frames = match pair[0] {
        Kind::Native => vec![6, 13, PIECE_MAX + 1],
        Kind::Tap | Kind::Link => vec![0, 1, 13],
        Kind::Memif => vec![1, 6, 13, longest + 1],
        Kind::Vm => vec![0, 1, 6, 13],
    };
    for (number, len) in no_frames.iter().enumerate() {
        let mut wrong = frame(TO, FROM, number, 20.max(*len));
        wrong.truncate(*len);
        assert_eq!(world.end(FROM).send(&wrong), matches!(pair[0], Kind::Memif | Kind::Vm), "{len} bytes");
        let right = frame(TO, FROM, number, 60);
        world.send(FROM, &right);
        assert_same(&world.take(TO, 1), &[right]);
    }
    let counted = if matches!(pair[0], Kind::Tap | Kind::Link) { 0 } else { no_frames.len() as u64 };
    assert_eq!(world.end(FROM).lost(), Lost { length: counted, ..Lost::default() });
    if matches!(pair[0], Kind::Native | Kind::Memif) {
        let right = frame(TO, FROM, 1, longest);
        world.send(FROM, &right);
        assert_same(&world.take(TO, 1), &[right]);
    }
}

pub fn a_successor_loses_nothing(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    let (mut next, mut expected) = (0, 0);
    for round in 0..12 {
        // Some frames are in the receiver's ring when it, or the sender, is replaced, either told to end or killed.
        world.still = vec![TO];
        for _ in 0..40 + round {
            let sent = frame(TO, FROM, next, 60 + next * 37 % 3000);
            world.send(FROM, &sent);
            next += 1;
        }
        // Make sure that all of them are posted: a killed worker loses the frames that it had read and not posted.
        world.settle();
        let told = round % 4 < 2;
        world.replace(if round % 2 == 0 { TO } else { FROM }, told);
        world.still.clear();
        world.settle();
        let came = std::mem::take(&mut world.came[TO]);
        for frame in &came {
            let number = u32::from_le_bytes(frame[14..18].try_into().unwrap()) as usize;
            assert_eq!(number, expected, "each comes once, in order");
            assert_same(std::slice::from_ref(frame), &[self::frame(TO, FROM, number, 60 + number * 37 % 3000)]);
            expected = number + 1;
        }
    }
    assert_eq!(expected, next, "every frame came");
    // No node holds pages any more.
    let now = std::time::Instant::now();
    world.end(FROM).vni().tick(now);
    world.end(FROM).vni().tick(now);
    let counts = world.end(FROM).vni().counts(1).expect("it is known");
    assert_eq!((counts.sent, counts.taken_back), (next as u64, 0), "a successor goes on counting");
}

pub fn an_idle_node_is_woken_by_a_frame(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    for round in 0..50 {
        world.settle();
        for (node, from, to) in [(TO, FROM, TO), (FROM, FROM, TO)] {
            // A native program sends of its own accord, and is not woken for that.
            if node == FROM && pair[0] == Kind::Native {
                continue;
            }
            world.until("it has nothing to do", |world| world.end(node).arm() == Armed::Idle);
            assert!(!world.end(node).is_woken(Duration::ZERO), "nothing is there");
            let sent = frame(to, from, round, 60 + round * 20);
            world.still = vec![node];
            world.send(from, &sent);
            if node == TO {
                world.settle();
            }
            assert!(world.end(node).is_woken(PATIENCE), "round {round}: a frame was slept through");
            world.still.clear();
            assert_same(&world.take(to, 1), &[sent]);
        }
    }
}

/// Returns frames with another source address than the node's: a neighbour's, an unused one, a group's, broadcast,
/// zero; each to `to`, and as broadcast.
fn forged(to: usize, number: usize) -> Vec<Vec<u8>> {
    let group = [3, 0, 0x5e, 0, 0, 1];
    let sources = [mac(OTHER.to_le_bytes()[0].into()), mac(77), group, [0xff; 6], [0; 6]];
    let frames = sources.map(|source| {
        let mut frame = frame(to, OTHER, number, 60 + number);
        frame[6..12].copy_from_slice(&source);
        [frame.clone(), [&[0xff; 6], &frame[6..]].concat()]
    });
    frames.concat()
}

pub fn a_program_that_sends_in_anothers_address_is_not_heard(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    let mut count = 0;
    for number in 0..5 {
        for lie in forged(TO, number) {
            // A bridge accepts no frame from a group or from the zero address, and the namespace here has a bridge.
            let comes_that_far = !matches!(pair[0], Kind::Tap | Kind::Link) || lie[6] & 1 == 0 && lie[6..12] != [0; 6];
            count += u64::from(comes_that_far);
            world.send(FROM, &lie);
        }
        let right = [frame(TO, FROM, number, 100), frame(TO, OTHER, number, 100)];
        world.send(FROM, &right[0]);
        assert_same(&world.take(TO, 1), &right[..1]);
        world.send(OTHER, &right[1]);
        assert_same(&world.take(TO, 1), &right[1..]);
        assert!(world.came[OTHER].is_empty(), "nobody else hears it either");
    }
    match pair[0] {
        // A native program is its own worker.
        Kind::Native => assert_eq!(world.end(TO).lost(), Lost { forged: count, ..Lost::default() }),
        Kind::Tap | Kind::Link | Kind::Memif | Kind::Vm => {
            assert_eq!(world.end(FROM).lost(), Lost { not_own: count, ..Lost::default() });
            assert_eq!(world.end(TO).lost(), Lost::default());
        }
    }
}

/// Node 2's worker writes arbitrary bytes into its ring and its pool.
pub fn a_worker_that_sends_in_anothers_address_is_not_heard(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    let mut lies = Vec::new();
    for number in 0..5 {
        let mut of_from = forged(TO, number);
        // With the source address of the node it sends to.
        of_from.push(frame(TO, FROM, number, 200));
        of_from.push(frame(TO, TO, number, 200));
        lies.extend(of_from.into_iter().filter(|lie| lie[6..12] != mac(2)));
    }
    for (number, lie) in lies.iter().enumerate() {
        world.send(OTHER, lie);
        if number % 10 == 0 {
            let right = [frame(TO, FROM, number, 100), frame(TO, OTHER, number, 100)];
            world.send(FROM, &right[0]);
            world.send(OTHER, &right[1]);
            let came = world.take(TO, 2);
            assert!(came.len() == 2 && right.iter().all(|frame| came.contains(frame)), "{came:02x?}");
        }
    }
    world.settle();
    assert!(world.came.iter().all(Vec::is_empty), "{:?}", world.came);
    let counted = world.end(TO).lost().forged;
    assert_eq!(counted, lies.len() as u64);
    let of = |world: &mut World, node| world.end(TO).vni().counts(node).expect("it is known").forged;
    assert_eq!([of(&mut world, 0), of(&mut world, 2)], [0, counted], "it is known of whom");
}

pub fn an_uplink_sends_in_nobodys_address_and_in_no_nodes(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    world.set_uplinks(&[2]);
    let mut of_stranger = frame(TO, 77, 1, 100);
    of_stranger[6..12].copy_from_slice(&mac(77));
    world.send(OTHER, &frame(TO, FROM, 2, 100));
    world.send(OTHER, &frame(TO, TO, 3, 100));
    world.send(OTHER, &of_stranger);
    assert_same(&world.take(TO, 1), &[of_stranger]);
    assert_eq!(world.end(TO).lost(), Lost { forged: 2, ..Lost::default() });
    // The switch learns nothing from them.
    let right = frame(FROM, TO, 4, 100);
    world.send(TO, &right);
    assert_same(&world.take(FROM, 1), &[right]);
    assert!(world.came[OTHER].is_empty());
}

/// Node 2's IP addresses are known: its worker sends ARP, neighbour discovery and IP with the addresses of others
/// all the same.
pub fn a_worker_that_sends_in_anothers_address_of_ip_is_not_heard(pair: [Kind; 2]) {
    let Some(mut world) = world(pair) else { return };
    let own = Own { v4: vec![[10, 0, 0, 2].into()], v6: Vec::new() };
    world.end(TO).vni().set_own(2, own);
    let arp = |hardware: [u8; 6], protocol: [u8; 4]| {
        let fixed = [0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2];
        [&mac(1)[..], &mac(2), &fixed, &hardware, &protocol, &mac(1), &[10, 0, 0, 1], &[0; 18]].concat()
    };
    let ip = |source: [u8; 4]| {
        // A bridge may check the header's checksum.
        let words = [0x4500, 46, 0x4011, 0x0a00, u32::from(source[3]), 0x0a00, 1];
        let sum = words.iter().sum::<u32>();
        let [high, low] = (!(sum % 0x1_0000 + sum / 0x1_0000)).to_be_bytes()[2..] else { panic!("four bytes") };
        let head = [0x08, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, high, low];
        [&mac(1)[..], &mac(2), &head, &source, &[10, 0, 0, 1], &[0; 26]].concat()
    };
    let lies = [
        arp(mac(0), [10, 0, 0, 2]),
        arp(mac(2), [10, 0, 0, 9]),
        ip([10, 0, 0, 9]),
        arp(mac(2), [10, 0, 0, 2])[..30].to_vec(),
    ];
    let right = [arp(mac(2), [10, 0, 0, 2]), ip([10, 0, 0, 2]), frame(TO, OTHER, 7, 3000)];
    for lie in &lies {
        world.send(OTHER, lie);
        for frame in &right {
            world.send(OTHER, frame);
        }
        assert_same(&world.take(TO, 3), &right);
    }
    assert_eq!(world.end(TO).lost(), Lost { forged: 4, ..Lost::default() });
    if pair[1] == Kind::Native {
        // It leaves a frame as it is.
        return;
    }
    // Receivers are to write a checksum over the address that they checked.
    for (frame, at) in [(&right[0], 30), (&right[1], 28)] {
        let offload =
            Offload { flags: NEEDS_CSUM, csum_start: 20.into(), csum_offset: (at - 20).into(), ..Offload::default() };
        let bytes = [offload.as_bytes(), frame].concat();
        let node = world.end(OTHER).vni();
        let to = u16::try_from(TO).unwrap();
        node.draft(to, bytes.len()).unwrap().copy_from_slice(&bytes);
        node.post(to, bytes.len(), true);
        node.flush();
        world.send(OTHER, &right[2]);
        assert_same(&world.take(TO, 1), &right[2..]);
    }
    assert_eq!(world.end(TO).lost(), Lost { forged: 4, malformed: 2, ..Lost::default() });
}
