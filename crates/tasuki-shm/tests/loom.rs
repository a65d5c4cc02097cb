//! Models of the shipping ring, bell, slots and lease: loom runs them in every order that two threads allow.
//!
//! Run: `cargo xtask loom`. `PREEMPTIONS` bounds the search; `LOOM_MAX_PREEMPTIONS=8` in the environment widens it.
//!
//! loom cannot see a load that returns a value from the future (load buffering). So a plain value check cannot find a
//! missing RETIRE. Instead the models put a `Ghost` behind the data that the orderings protect: loom sees every race in it.
//!
//! # Invariants
//!
//! - **G1** loom fails the model before two threads access a `Ghost` at the same time, one of them writing.
//!
//! # Mutants tried, and the model that catches each
//!
//! | mutant                                                       | caught by                                                      |
//! |--------------------------------------------------------------|----------------------------------------------------------------|
//! | PUBLISH: the stamp is stored Relaxed                         | `what_is_popped_…`, `batches_…`, `a_line_…`, `a_slot_…`, `no_wake_up_…` |
//! | PUBLISH: no Acquire fence after the stamp was loaded         | the same models                                                |
//! | PUBLISH: the stamp is stored before the payload              | `what_is_popped_…`, `batches_…`                                |
//! | RETIRE: head is stored Relaxed                               | `a_line_is_not_written_while_it_is_read_…`                     |
//! | RETIRE: no Acquire fence after head was loaded               | `a_line_is_not_written_while_it_is_read_…`                     |
//! | R2: the producer does not wait for room                      | `what_is_popped_…`, `a_line_…`                                 |
//! | R4: any stamp with a tag is taken for the next message       | `a_line_…`, `a_slot_…`, `batches_…`                            |
//! | DEKKER: no fence in `Bell::park`                             | `no_wake_up_is_lost…`                                          |
//! | DEKKER: no fence in `PeerBell::must_ring`                      | `no_wake_up_is_lost…`                                          |
//! | DEKKER: both fences AcqRel instead of SeqCst                 | `no_wake_up_is_lost…`                                          |
//! | B1: no second look                                           | `no_wake_up_is_lost…`                                          |
//! | B2: the bell is looked at before the message is pushed       | `no_wake_up_is_lost…`                                          |
//! | B3: naps are not counted                                     | `no_wake_up_is_lost…`                                          |
//! | B3: a bell that was rung once is never rung again            | `no_wake_up_is_lost…`                                          |
//! | slots: freeing is Relaxed                                    | `two_threads_…`, `a_return_and_an_allocation_…`                |
//! | slots: taking is Relaxed                                     | `two_threads_…`, `a_return_and_an_allocation_…`                |
//! | slots: taking is a load and a store                          | `two_threads_…`                                                |
//! | S1: the chosen slot is taken without a look                  | `two_threads_…`                                                |
//! | S1: a lent slot stays free to take                           | `a_slot_has_one_owner_…`, `a_return_and_an_allocation_…`       |
//! | S2: a freed slot keeps its generation                        | `a_return_and_an_allocation_…`                                 |
//! | S3: a slot may come back twice                               | `a_slot_has_one_owner_…`                                       |
//! | lease: the swap is Relaxed, Acquire only, or Release only    | `what_a_lease_guards_…`                                        |
//! | RETAKE: no Release fence after the generation was stored      | `a_slow_reader_…`                                              |
//! | RETAKE: no Acquire fence before the generation is loaded      | `a_slow_reader_…`                                              |
//! | P4: pages that were taken back keep their generation          | `a_slow_reader_…`                                              |
//! | P3: the generation is looked at before the bytes are read     | `a_slow_reader_…`                                              |
//! | L1: a take that lost the swap wins all the same              | `of_two_takers_…`, `what_a_lease_guards_…`                     |
//!
//! No mutant survives.
#![cfg(all(test, loom))]

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::Arc;

    use loom::sync::{Condvar, Mutex};
    use loom::thread;
    use std::sync::atomic::Ordering::Relaxed;
    use tasuki_shm::bell::{Bell, NO_CPU, PeerBell};
    use tasuki_shm::lease::Lease;
    use tasuki_shm::line::{Claims, Line};
    use tasuki_shm::pool::{Generations, PeerGenerations};
    use tasuki_shm::ring::{Consumer, MESSAGE_WORDS, Message, Producer};
    use tasuki_shm::slots::{SlotId, Slots, table_lines};

    type Lines = Arc<[Line]>;
    type Tx = Producer<Lines, Lines>;
    type Rx = Consumer<Lines, Lines>;

    /// Plain memory behind the protocol. loom fails the model if two threads reach it without an order between them.
    #[derive(Clone)]
    struct Ghost(Arc<loom::cell::UnsafeCell<u64>>);

    impl Ghost {
        #[expect(clippy::arc_with_non_send_sync, reason = "loom watches over who shares it")]
        fn new() -> Self {
            Ghost(Arc::new(loom::cell::UnsafeCell::new(0)))
        }

        fn write(&self, value: u64) {
            #[expect(unsafe_code, reason = "what the model proves is that this access is exclusive")]
            self.0.with_mut(|place| {
                // SAFETY: no other thread is here (G1).
                unsafe { *place = value };
            });
        }

        fn read(&self) -> u64 {
            #[expect(unsafe_code, reason = "what the model proves is that nobody writes meanwhile")]
            self.0.with(|place| {
                // SAFETY: no thread writes here meanwhile (G1).
                unsafe { *place }
            })
        }
    }

    /// How often loom takes the CPU away from a thread that could continue. With 2, the models catch every mutant
    /// above. Without a bound, the eight words of a line make too many orders.
    const PREEMPTIONS: usize = 5;

    fn explore(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(PREEMPTIONS));
        builder.check(model);
    }

    fn lines(count: usize) -> Lines {
        (0..count).map(|_| Line::default()).collect()
    }

    fn ring(capacity: usize, start: u32) -> (Tx, Rx) {
        let (ours, head) = (lines(capacity), lines(1));
        let consumer = Consumer::new(Claims::of(Arc::clone(&ours)), Arc::clone(&head), start);
        (Producer::new(ours, Claims::of(head), start), consumer)
    }

    fn message(n: u64) -> Message {
        Message { tag: NonZeroU32::MIN, words: [n; MESSAGE_WORDS] }
    }

    fn bell() -> (Bell<Lines>, PeerBell<Lines>) {
        let line = lines(1);
        (Bell::new(Arc::clone(&line), NO_CPU), PeerBell::new(Claims::of(line)))
    }

    fn wait_for_room(tx: &mut Tx) {
        while tx.room().unwrap() == 0 {
            thread::yield_now();
        }
    }

    fn wait_for_message(rx: &mut Rx) -> Message {
        loop {
            if let Some(message) = rx.pop().unwrap() {
                return message;
            }
            thread::yield_now();
        }
    }

    /// The pipe of a bell: a ring since the last nap ends the next nap at once.
    #[derive(Clone)]
    struct Pipe(Arc<(Mutex<bool>, Condvar)>);

    impl Pipe {
        fn new() -> Self {
            Pipe(Arc::new((Mutex::new(false), Condvar::new())))
        }

        fn ring(&self) {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_one();
        }

        fn sleep(&self) {
            let mut rung = self.0.0.lock().unwrap();
            while !*rung {
                rung = self.0.1.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    /// The receiving end of a connection: the ring that it reads, and the bell in which it sleeps.
    struct BellReceiver {
        rx: Rx,
        bell: Bell<Lines>,
        pipe: Pipe,
    }

    impl BellReceiver {
        /// Waits as a client and a server do. A lost wake-up is a deadlock, which loom reports.
        fn hear(&mut self) -> Message {
            loop {
                if let Some(message) = self.rx.pop().unwrap() {
                    return message;
                }
                self.bell.park(NO_CPU);
                // B1: the second look.
                if self.rx.is_ready() {
                    self.bell.wake(NO_CPU);
                    continue;
                }
                self.pipe.sleep();
                self.bell.wake(NO_CPU);
            }
        }
    }

    /// The sending end: the ring that it writes, and its means of waking the reader.
    struct Mouth {
        tx: Tx,
        peer_bell: PeerBell<Lines>,
        pipe: Pipe,
    }

    impl Mouth {
        fn say(&mut self, message: &Message) {
            self.tx.push(message).unwrap();
            if self.peer_bell.must_ring() {
                self.pipe.ring();
            }
        }
    }

    fn line_of_speech(capacity: usize) -> (Mouth, BellReceiver) {
        let ((tx, rx), (bell, peer_bell), pipe) = (ring(capacity, 0), bell(), Pipe::new());
        (Mouth { tx, peer_bell, pipe: pipe.clone() }, BellReceiver { rx, bell, pipe })
    }

    fn passes_through_a_ring_whole_and_in_order(capacity: usize, start: u32, count: u64) {
        explore(move || {
            let (mut tx, mut rx) = ring(capacity, start);
            let producer = thread::spawn(move || {
                for n in 1..=count {
                    wait_for_room(&mut tx);
                    tx.push(&message(n)).unwrap();
                }
            });
            for n in 1..=count {
                assert_eq!(wait_for_message(&mut rx), message(n));
                rx.retire();
            }
            producer.join().unwrap();
        });
    }

    #[test]
    fn what_is_popped_is_what_was_pushed_in_a_ring_of_one() {
        passes_through_a_ring_whole_and_in_order(1, u32::MAX, 2);
    }

    #[test]
    fn what_is_popped_is_what_was_pushed_in_a_ring_of_two() {
        passes_through_a_ring_whole_and_in_order(2, u32::MAX - 1, 3);
    }

    #[test]
    fn batches_come_out_whole_and_in_order() {
        explore(|| {
            let (mut tx, mut rx) = ring(2, u32::MAX);
            let producer = thread::spawn(move || {
                let batch = [message(1), message(2), message(3)];
                let mut pushed = 0;
                while pushed < batch.len() {
                    match tx.push_batch(&batch[pushed..]).unwrap() {
                        0 => thread::yield_now(),
                        count => pushed += count,
                    }
                }
            });
            let mut expected = 1;
            while expected <= 3 {
                let first = expected;
                while let Some(got) = rx.pop().unwrap() {
                    assert_eq!(got, message(expected));
                    expected += 1;
                }
                rx.retire();
                if expected == first {
                    thread::yield_now();
                }
            }
            producer.join().unwrap();
        });
    }

    /// RETIRE: a line is plain memory here. The producer writes it before it publishes; the consumer reads it before
    /// it retires.
    fn a_line_has_one_user_at_a_time(capacity: usize, count: u64) {
        explore(move || {
            let (mut tx, mut rx) = ring(capacity, 0);
            let ours: Arc<[Ghost]> = (0..capacity).map(|_| Ghost::new()).collect();
            let theirs = Arc::clone(&ours);
            let place = move |n: u64| usize::try_from(n).expect("a few") % capacity;
            let producer = thread::spawn(move || {
                for n in 0..count {
                    wait_for_room(&mut tx);
                    theirs[place(n)].write(n);
                    tx.push(&message(n)).unwrap();
                }
            });
            for n in 0..count {
                wait_for_message(&mut rx);
                assert_eq!(ours[place(n)].read(), n);
                rx.retire();
            }
            producer.join().unwrap();
        });
    }

    #[test]
    fn a_line_is_not_written_while_it_is_read_in_a_ring_of_one() {
        a_line_has_one_user_at_a_time(1, 3);
    }

    #[test]
    fn a_line_is_not_written_while_it_is_read_in_a_ring_of_two() {
        a_line_has_one_user_at_a_time(2, 4);
    }

    #[test]
    fn no_wake_up_is_lost() {
        explore(|| {
            let (mut mouth, mut bell_receiver) = line_of_speech(2);
            let speaker = thread::spawn(move || {
                mouth.say(&message(1));
                mouth.say(&message(2));
            });
            assert_eq!(bell_receiver.hear(), message(1));
            assert_eq!(bell_receiver.hear(), message(2));
            speaker.join().unwrap();
        });
    }

    #[test]
    fn no_wake_up_is_lost_in_either_direction() {
        explore(|| {
            let (mut request, mut at_server) = line_of_speech(1);
            let (mut reply, mut at_client) = line_of_speech(1);
            let server = thread::spawn(move || {
                for _ in 0..2 {
                    let asked = at_server.hear();
                    at_server.rx.retire();
                    reply.say(&message(asked.words[0] + 1));
                }
            });
            for n in [1, 5] {
                request.say(&message(n));
                assert_eq!(at_client.hear(), message(n + 1));
                at_client.rx.retire();
            }
            server.join().unwrap();
        });
    }

    fn descriptor(id: SlotId) -> Message {
        message(id.to_word())
    }

    #[test]
    fn a_slot_has_one_owner_all_the_way_round() {
        explore(|| {
            let (mut lend, mut lent) = ring(1, 0);
            let (mut give_back, mut back) = ring(1, 0);
            let ours = Ghost::new();
            let theirs = ours.clone();
            let peer = thread::spawn(move || {
                for round in 0..2 {
                    let message = wait_for_message(&mut lent);
                    lent.retire();
                    assert_eq!(theirs.read(), round);
                    wait_for_room(&mut give_back);
                    give_back.push(&message).unwrap();
                }
            });
            let slots = Slots::new(lines(table_lines(1)), 1);
            for round in 0..2 {
                let id = slots.take().unwrap();
                ours.write(round);
                slots.lend(id).unwrap();
                assert_eq!(slots.take(), None, "a lent slot is nobody's to take");
                wait_for_room(&mut lend);
                lend.push(&descriptor(id)).unwrap();
                let came = SlotId::from_word(wait_for_message(&mut back).words[0]);
                back.retire();
                slots.attach(came).unwrap();
                assert_eq!(ours.read(), round, "whole again after the return");
                ours.write(7);
                slots.release(came).unwrap();
                assert!(slots.attach(came).is_err(), "it comes back once");
            }
            peer.join().unwrap();
        });
    }

    fn two_threads_share_slots(count: u32, rounds: u32) {
        explore(move || {
            let slots = Arc::new(Slots::new(lines(table_lines(count)), count));
            let ghosts: Arc<[Ghost]> = (0..count).map(|_| Ghost::new()).collect();
            let user = |slots: Arc<Slots<Lines>>, ghosts: Arc<[Ghost]>, us: u64| {
                move || {
                    for _ in 0..rounds {
                        slots.choose_next();
                        let Some(id) = slots.take() else { continue };
                        let ghost = &ghosts[id.index as usize];
                        ghost.write(us);
                        assert_eq!(ghost.read(), us);
                        slots.release(id).unwrap();
                    }
                }
            };
            let other = thread::spawn(user(Arc::clone(&slots), Arc::clone(&ghosts), 1));
            user(Arc::clone(&slots), ghosts, 2)();
            other.join().unwrap();
            let census = slots.census();
            assert_eq!((census.free, census.owner, census.peer), (count, 0, 0), "no slot is lost");
        });
    }

    #[test]
    fn two_threads_never_hold_the_same_slot_of_one() {
        two_threads_share_slots(1, 2);
    }

    #[test]
    fn two_threads_never_hold_the_same_slot_of_two() {
        two_threads_share_slots(2, 2);
    }

    /// One thread's slot comes back from the peer while the other thread takes and releases slots: any thread may
    /// drop a reply.
    #[test]
    fn a_return_and_an_allocation_do_not_disturb_each_other() {
        explore(|| {
            let slots = Arc::new(Slots::new(lines(table_lines(2)), 2));
            let lent = slots.take().unwrap();
            slots.lend(lent).unwrap();
            let theirs = Arc::clone(&slots);
            let other = thread::spawn(move || {
                if let Some(id) = theirs.take() {
                    assert_ne!(id, lent, "a lent slot is nobody's to take");
                    theirs.release(id).unwrap();
                }
            });
            slots.attach(lent).unwrap();
            slots.release(lent).unwrap();
            other.join().unwrap();
            assert_eq!(slots.census().free, 2);
        });
    }

    #[test]
    fn of_two_takers_of_a_lease_one_wins() {
        explore(|| {
            let line = lines(1);
            let seen = Lease::new(Arc::clone(&line)).tenure();
            let taker = |line: Lines, us: u32| move || Lease::new(line).take(seen, NonZeroU32::new(us).unwrap());
            let other = thread::spawn(taker(Arc::clone(&line), 1));
            let ours = taker(Arc::clone(&line), 2)();
            let theirs = other.join().unwrap();
            assert!(ours.is_ok() != theirs.is_ok(), "{ours:?} {theirs:?}");
            let winner = ours.or(theirs).unwrap();
            assert_eq!(Lease::new(line).tenure(), winner);
            assert_eq!(winner.epoch, 1);
        });
    }

    #[test]
    fn what_a_lease_guards_passes_from_holder_to_holder() {
        explore(|| {
            let line = lines(1);
            let ours = Ghost::new();
            let theirs = ours.clone();
            let lease = Lease::new(Arc::clone(&line));
            let first = lease.take(lease.tenure(), NonZeroU32::MIN).unwrap();
            let next = thread::spawn(move || {
                let lease = Lease::new(line);
                loop {
                    let seen = lease.tenure();
                    if seen.holder.is_none() {
                        let tenure = lease.take(seen, NonZeroU32::new(2).unwrap()).unwrap();
                        assert_eq!(tenure.epoch, 2);
                        assert_eq!(theirs.read(), 5, "the next holder sees all that the first one did");
                        theirs.write(6);
                        lease.pass(tenure).unwrap();
                        return;
                    }
                    thread::yield_now();
                }
            });
            ours.write(5);
            lease.pass(first).unwrap();
            next.join().unwrap();
            assert!(lease.pass(first).is_err(), "an old holder learns that it was replaced");
            assert_eq!(ours.read(), 6);
        });
    }

    /// The writer sends a frame of two words, takes it back while its reader may be reading it, and writes over it.
    /// loom's atomics stand for the bytes: the reader races with the writer, and may read anything.
    #[test]
    fn a_slow_reader_believes_no_frame_that_was_written_over() {
        explore(|| {
            let (frame, generations) = (lines(1), lines(1));
            let (mut tx, mut rx) = ring(1, 0);
            let (bytes, owned) = (Arc::clone(&frame), Arc::clone(&generations));
            let writer = thread::spawn(move || {
                let mut generations = Generations::new(owned);
                let write = |value| (0..2).for_each(|word| bytes[0].word(word).store(value, Relaxed));
                write(1);
                tx.push(&message(generations.of(3).into())).unwrap();
                generations.renew(3, 1);
                write(2);
            });
            let generations = PeerGenerations::new(Claims::of(generations));
            if let Some(message) = rx.pop().unwrap() {
                let generation = u32::try_from(message.words[0]).unwrap();
                let read = [0, 1].map(|word| frame[0].word(word).load(Relaxed));
                if generations.are(3, generation) {
                    assert_eq!(read, [1, 1], "believed, and not what was sent");
                }
            }
            writer.join().unwrap();
        });
    }
}
