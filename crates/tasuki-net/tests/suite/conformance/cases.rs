//! The cases of the suite. Each starts with a fresh card.

use std::time::{Duration, Instant};

use tasuki_net::nic::{Filter, Mac, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::{Armed, BURST_MAX, Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::{Region, Span};

use super::frames::{BROADCAST, LONGEST, SHORTEST, assert_same, frame, frames, ipv4, mixed};
use super::traffic::Traffic;
use super::{Bench, World, memory};
use crate::wait::readable;
use tasuki_testing::PATIENCE;

/// Options with small rings, which wrap often.
pub fn small() -> NicOptions {
    NicOptions { ring: 64, ..NicOptions::default() }
}

pub fn frames_arrive_whole_and_in_order<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let sent = frames(W::MAC, 0, SHORTEST..=LONGEST);
    assert_same(&bench.bring_in(&sent), &sent);
}

pub fn frames_leave_whole_and_in_order<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let sent = frames(Mac([2, 0, 0, 0, 0, 9]), 0, SHORTEST..=LONGEST);
    assert_same(&bench.bring_out(&sent), &sent);
}

pub fn a_full_port_leaves_the_rest_to_the_caller<W: World>() {
    let options = NicOptions { ring: 8, ..NicOptions::default() };
    let Some(mut bench) = Bench::<W>::start(&options) else { return };
    let sent = frames(Mac([2, 0, 0, 0, 0, 9]), 0, mixed(BURST_MAX));
    let mut burst: Burst = sent.iter().map(|frame| bench.fill(frame)).collect();
    let mut taken = bench.nic().transmit(&mut burst).expect("the card works");
    assert!((1..=8).contains(&taken), "{taken} frames in a ring of 8");
    let mut arrived = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while arrived.len() < sent.len() {
        assert_eq!(burst.len(), BURST_MAX - taken, "what was not taken is still there");
        let rest: Vec<_> = burst.iter().map(|frame| frame.bytes().to_vec()).collect();
        assert_same(&rest, &sent[taken..]);
        taken += bench.nic().transmit(&mut burst).expect("the card works");
        arrived.extend(bench.world.take(Duration::from_millis(1)));
        assert!(Instant::now() < deadline, "{} frames arrived", arrived.len());
    }
    assert_same(&arrived, &sent);
}

pub fn a_burst_is_not_filled_beyond_its_end<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let sent = frames(W::MAC, 0, mixed(BURST_MAX));
    let mut burst = Burst::new();
    // Leave two places free.
    (0..BURST_MAX - 2).for_each(|_| burst.push(bench.fill(&[0; SHORTEST])));
    let mut came = Vec::new();
    let mut rest = sent.iter().peekable();
    super::polled("all frames", || {
        while rest.next_if(|frame| bench.world.try_send(frame)).is_some() {}
        let count = bench.nic().receive(&mut burst).expect("the card works");
        assert!(count <= 2 && burst.len() == BURST_MAX - 2 + count, "{count} frames in two places");
        came.extend(burst.drain(BURST_MAX - 2..).map(|frame| frame.bytes().to_vec()));
        (came.len() == sent.len()).then_some(())
    });
    assert_same(&came, &sent);
    // Nor does the driver add more than the caller asked for.
    burst.clear();
    came.clear();
    let mut rest = sent.iter().peekable();
    super::polled("all frames once more", || {
        while rest.next_if(|frame| bench.world.try_send(frame)).is_some() {}
        let count = bench.nic().receive_some(&mut burst, 3).expect("the card works");
        assert!(count <= 3 && burst.len() == count, "{count} frames where 3 were asked for");
        came.extend(burst.drain(..).map(|frame| frame.bytes().to_vec()));
        (came.len() == sent.len()).then_some(())
    });
    assert_same(&came, &sent);
}

pub fn a_frame_that_arrives_while_arming_is_not_slept_through<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let send = bench.world.sender();
    let (go, gone) = std::sync::mpsc::channel::<u32>();
    let sender = std::thread::spawn(move || gone.iter().for_each(|number| send(&frame(W::MAC, number, SHORTEST))));
    for number in 0..500 {
        // The frame is under way while we arm; its progress differs each time.
        go.send(number).expect("the sender runs");
        let came = loop {
            let came = bench.poll();
            if !came.is_empty() {
                break came;
            }
            if bench.nic().arm().expect("the card works") == Armed::Idle {
                assert!(readable(&bench.nic().fd(), PATIENCE), "frame {number} was slept through");
            }
        };
        assert_same(&came, &[frame(W::MAC, number, SHORTEST)]);
    }
    drop(go);
    sender.join().expect("the sender sends");
}

pub fn who_sleeps_is_woken_by_each_frame<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    for number in 0..100 {
        let frame = frame(W::MAC, number, SHORTEST);
        let mut sent = false;
        let came = loop {
            if bench.nic().arm().expect("the card works") == Armed::Idle {
                if !std::mem::replace(&mut sent, true) {
                    super::polled("room on the wire", || bench.world.try_send(&frame).then_some(()));
                }
                assert!(readable(&bench.nic().fd(), PATIENCE), "frame {number} was slept through");
            }
            let came = bench.poll();
            if !came.is_empty() {
                break came;
            }
        };
        assert_same(&came, &[frame]);
    }
}

pub fn the_link_goes_down_and_up<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    for round in 0..3 {
        bench.world.set_link(false);
        bench.wait_for_link(false);
        bench.world.set_link(true);
        bench.wait_for_link(true);
        let sent = frames(W::MAC, round * 100, mixed(100));
        assert_same(&bench.bring_in(&sent), &sent);
    }
}

/// Two groups whose hashes differ in every card's table.
const GROUP: Mac = Mac([0x01, 0x00, 0x5e, 0x00, 0x00, 0xfb]);
const OTHER_GROUP: Mac = Mac([0x01, 0x00, 0x5e, 0x7f, 0x12, 0x34]);
const STRANGER: Mac = Mac([0x52, 0x54, 0x00, 0xab, 0xcd, 0xef]);

/// Returns whether a frame arrives that is sent to: us, broadcast, a group, another group, a stranger.
fn let_in<W: World>(bench: &mut Bench<W>, first: u32) -> [bool; 5] {
    let to = [W::MAC, BROADCAST, GROUP, OTHER_GROUP, STRANGER];
    let mut sent: Vec<_> = (first..).zip(to).map(|(number, to)| frame(to, number, 100)).collect();
    // A final frame to us proves that the card has decided on all before it.
    sent.push(frame(W::MAC, first + 5, 100));
    let came = bench.bring_in(&sent);
    let expected: Vec<_> = sent.iter().filter(|frame| came.contains(frame)).cloned().collect();
    assert_same(&came, &expected);
    [0, 1, 2, 3, 4].map(|i: usize| came.contains(&sent[i]))
}

pub fn only_what_is_let_in_arrives<W: World>() {
    for (filter, expected) in [
        (Filter::default(), [true, true, false, false, false]),
        (Filter { multicast: vec![GROUP], ..Filter::default() }, [true, true, true, false, false]),
        (Filter { all_multicast: true, ..Filter::default() }, [true, true, true, true, false]),
        (Filter { promiscuous: true, ..Filter::default() }, [true; 5]),
    ] {
        let options = NicOptions { filter: filter.clone(), ..small() };
        let Some(mut bench) = Bench::<W>::start(&options) else { return };
        assert_eq!(bench.nic().mac(), W::MAC);
        assert_eq!(let_in(&mut bench, 0), expected, "{filter:?}");
        bench.replace(|_, _, _| {});
        assert_eq!(let_in(&mut bench, 10), expected, "{filter:?}, for a successor");
    }
}

pub fn a_new_filter_replaces_the_old_one<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let both = Filter { multicast: vec![GROUP, OTHER_GROUP], ..Filter::default() };
    let other = Filter { multicast: vec![OTHER_GROUP], ..Filter::default() };
    bench.set_filter(both);
    assert_eq!(let_in(&mut bench, 0), [true, true, true, true, false]);
    bench.set_filter(other.clone());
    assert_eq!(let_in(&mut bench, 10), [true, true, false, true, false]);
    bench.set_filter(Filter { promiscuous: true, ..Filter::default() });
    assert_eq!(let_in(&mut bench, 20), [true; 5]);
    // A successor can narrow its predecessor's filter.
    bench.set_filter(other);
    bench.replace(|_, _, _| {});
    assert_eq!(let_in(&mut bench, 30), [true, true, false, true, false]);
    bench.set_filter(Filter::default());
    assert_eq!(let_in(&mut bench, 40), [true, true, false, false, false]);
}

pub fn long_frames_pass_as_far_as_the_mtu_says<W: World>() {
    for mtu in [1500, 4000, W::MTU_MAX] {
        if mtu > W::MTU_MAX {
            continue;
        }
        let options = NicOptions { mtu, ..small() };
        let Some(mut bench) = Bench::<W>::start(&options) else { return };
        let most = usize::from(mtu) + 14;
        let whole = frames(W::MAC, 0, [SHORTEST, most - 1, most]);
        assert_same(&bench.bring_in(&whole), &whole);
        let sendable = usize::from(W::MTU_SENT) + 14;
        let out: Vec<_> = whole.iter().filter(|frame| frame.len() <= sendable).cloned().collect();
        assert_same(&bench.bring_out(&out), &out);
        // Longer frames, even of several buffers, leave no trace, and the frame after them is intact.
        let mut sent = frames(W::MAC, 10, [most + 100, SHORTEST, most + 3000, most + 100, most]);
        let came = bench.bring_in(&sent);
        sent.retain(|frame| frame.len() <= most);
        assert_same(&came, &sent);
    }
}

pub fn what_cannot_be_sent_is_dropped_and_counted<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let good = frame(STRANGER, 7, SHORTEST);
    let mut burst = Burst::new();
    burst.push(bench.fill(&frame(STRANGER, 0, LONGEST + 100)));
    burst.push(bench.fill(&[0; 13]));
    burst.push(bench.fill(&[]));
    burst.push(bench.fill(&good));
    assert_eq!(bench.nic().transmit(&mut burst).expect("the card works"), 4);
    assert!(burst.is_empty());
    assert_same(&bench.world.take(PATIENCE).into_iter().collect::<Vec<_>>(), &[good]);
    assert_eq!(bench.counter("tx_dropped"), Some(3));
}

pub fn flows_stay_in_order_over_all_queues<W: World>() {
    let options = NicOptions { queues: W::QUEUES, ..small() };
    let Some(mut bench) = Bench::<W>::start(&options) else { return };
    let count = 2000;
    // Frames of 16 flows; the last frame, of no flow, says when to stop.
    let mut sent: Vec<_> = (0..count).map(|number| ipv4(W::MAC, (number % 16) as u8, number)).collect();
    let mut came = Vec::new();
    let mut rest = sent.iter().peekable();
    let deadline = Instant::now() + PATIENCE;
    while came.len() < sent.len() {
        while rest.next_if(|frame| bench.world.try_send(frame)).is_some() {}
        came.extend(bench.poll());
        assert!(Instant::now() < deadline, "{} frames came", came.len());
    }
    // The sort keeps the order within a flow; the last byte of the sender's address names the flow.
    let flow = |frame: &Vec<u8>| frame[14 + 15];
    sent.sort_by_key(flow);
    came.sort_by_key(flow);
    assert_same(&came, &sent);
}

pub fn counters_add_up<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    bench.set_filter(Filter { all_multicast: true, ..Filter::default() });
    let mut bytes = 0;
    for round in 0..3 {
        let mut sent = frames(W::MAC, 100 * round, mixed(70));
        sent.extend(frames(BROADCAST, 100 * round + 70, mixed(20)));
        sent.extend(frames(GROUP, 100 * round + 90, mixed(10)));
        bench.bring_in(&sent);
        bench.bring_out(&sent);
        bytes += sent.iter().map(|frame| frame.len() as u64).sum::<u64>();
        let frames = u64::from(100 * (round + 1));
        // Cards differ in whether they count the check sequence.
        let possible = [bytes, bytes + 4 * frames];
        for way in ["rx", "tx"] {
            let name = format!("{way}_packets");
            assert_eq!(bench.counter(&name), Some(frames), "{name}");
            let counted = bench.counter(&format!("{way}_bytes")).expect("every card's driver counts bytes");
            assert!(possible.contains(&counted), "{way}_bytes is {counted}, not one of {possible:?}");
        }
        // Not every card counts these.
        for (name, tenths) in [("rx_broadcast", 2), ("rx_multicast", 1)] {
            assert!(bench.counter(name).is_none_or(|count| count == frames / 10 * tenths), "{name}");
        }
        // A successor continues the counts.
        bench.replace(|_, _, _| {});
    }
}

/// All words of a NIC's memory, through a mapping of our own.
pub struct Words(Vec<Span<std::sync::atomic::AtomicU64>>);

impl Words {
    pub fn of(memory: &NicMemory) -> Words {
        let words = |region: &Region| {
            let copy = region.fd().try_clone_to_owned().expect("a descriptor is free");
            let region = Region::adopt(copy).expect("memory of ours");
            region.span(0, region.len() / 8).expect("all of it")
        };
        Words(vec![words(memory.rings()), words(memory.arena().region())])
    }

    pub fn all(&self) -> impl Iterator<Item = &std::sync::atomic::AtomicU64> {
        self.0.iter().flat_map(|span| span.iter())
    }
}

pub fn a_parked_nic_touches_no_memory<W: World>() {
    use std::sync::atomic::Ordering::SeqCst;
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let before = frames(W::MAC, 0, mixed(100));
    assert_same(&bench.bring_in(&before), &before);
    let meanwhile = frames(W::MAC, 100, mixed(20));
    let mut sent = 0;
    bench.replace(|world, bus, memory| {
        let words = Words::of(memory);
        // A pattern that differs from anything the card would write into a slot.
        words.0[1].iter().for_each(|word| word.store(0x5a5a_a5a5_5a5a_a5a5, SeqCst));
        let seen: Vec<_> = words.all().map(|word| word.load(SeqCst)).collect();
        sent = meanwhile.iter().take_while(|frame| world.try_send(frame)).count();
        world.let_frames_move(bus, sent);
        assert!(words.all().zip(&seen).all(|(word, seen)| word.load(SeqCst) == *seen), "its memory has changed");
    });
    let after = frames(W::MAC, 200, mixed(100));
    let came = bench.bring_in(&after);
    let (waited, came) = came.split_at(came.len() - after.len());
    if W::HOLDS_WHILE_PARKED {
        assert_same(waited, &meanwhile[..sent]);
    }
    assert_same(came, &after);
}

pub fn a_successor_goes_on_exactly<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let out = frames(STRANGER, 0, mixed(300));
    let mut number = 0;
    let mut burst = Burst::new();
    let mut arrived = Vec::new();
    for (round, chunk) in (0..).zip(out.chunks(10)) {
        // A varying number of frames that have arrived and were not received.
        let sent = frames(W::MAC, number, mixed(5 + round % 50));
        number += 100;
        for frame in &sent {
            super::polled("room on the wire", || bench.world.try_send(frame).then_some(()));
        }
        // And frames on their way out.
        burst.extend(chunk.iter().map(|frame| bench.fill(frame)));
        bench.nic().transmit(&mut burst).expect("the card works");
        bench.replace(|_, _, _| {});
        let mut came = Vec::new();
        while came.len() < sent.len() {
            came.extend(bench.receive());
        }
        assert_same(&came, &sent);
        // The next call handles the frames that came, and the ring is full again.
        assert!(bench.poll().is_empty(), "nothing comes twice");
        while !burst.is_empty() {
            bench.nic().transmit(&mut burst).expect("the card works");
        }
        while arrived.len() < (round + 1) * 10 {
            arrived.push(bench.world.take(PATIENCE).expect("what was sent arrives"));
        }
    }
    assert_same(&arrived, &out);
    assert!(bench.poll().is_empty(), "nothing comes twice");
}

pub fn a_hundred_successors_lose_nothing_under_traffic<W: World>() {
    const SUCCESSORS: usize = 100;
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let mut traffic = Traffic::start(&bench);
    for round in 0..SUCCESSORS {
        // Receive at least some, so that each driver has work.
        (0..1 + round % 5).for_each(|_| _ = traffic.check(bench.receive()));
        bench.replace(|_, _, _| {});
    }
    traffic.end(&mut bench);
}

pub fn a_card_that_is_pulled_out_is_gone<W: World>() {
    if let Some(why) = W::CANNOT_PULL {
        println!("skipped: {why}");
        return;
    }
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    bench.world.pull();
    let error = bench.nic().arm().expect_err("a card that is not there");
    assert!(matches!(error, NicError::Gone | NicError::Bus(_)), "{error}");
    let (error, _) = super::park_fails(bench);
    assert!(matches!(error, NicError::Gone | NicError::Bus(_)), "{error}");
}

pub fn options_that_the_card_cannot_do_are_refused<W: World>() {
    let memory = memory::<W>(&NicOptions::default());
    let Some(world) = W::new(&memory) else { return };
    for (options, name) in [
        (NicOptions { ring: 0, ..small() }, "ring"),
        (NicOptions { ring: 48, ..small() }, "ring"),
        (NicOptions { queues: 0, ..small() }, "queues"),
        (NicOptions { queues: W::QUEUES + 1, ..small() }, "queues"),
        (NicOptions { mtu: 20, ..small() }, "mtu"),
        (NicOptions { mtu: W::MTU_MAX + 1, ..small() }, "mtu"),
    ] {
        let memory = self::memory::<W>(&NicOptions::default());
        let error = W::Nic::start(world.bus(), memory, &options).err().expect("the card cannot do that").error;
        assert!(matches!(error, NicError::Options { field, .. } if field == name), "{options:?}: {error}");
    }
}

pub fn memory_that_is_too_small_is_refused<W: World>() {
    let memory = memory::<W>(&NicOptions::default());
    let Some(world) = W::new(&memory) else { return };
    let few = Geometry { slot_len: 4096, count: 16 };
    let enough = Geometry { slot_len: 4096, count: 1024 };
    for (slots, rings_len, ring) in [(few, 256 << 10, 256), (enough, 4096, 256)] {
        let memory = NicMemory::create(slots, rings_len, W::MEMORY_AT).expect("a little memory");
        let options = NicOptions { ring, ..NicOptions::default() };
        let error = W::Nic::start(world.bus(), memory, &options).err().expect("that does not suffice").error;
        assert!(matches!(error, NicError::Memory { need, have, .. } if need > have), "{error}");
    }
}
