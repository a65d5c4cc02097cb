//! A node: a process that sends to any node that exists, checks each received frame, and carries out orders.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use rustix::process::Signal;
use tasuki_net::port::Armed;
use tasuki_net::switch::{Switch, To};
use tasuki_net::vni::offload::HEADER_LEN;
use tasuki_net::vni::{Counts, IDLE, Incoming, PIECE_MAX, PeerDescriptor, SendError, Vni};
use tasuki_shm::line::{LINE_LEN, Line};
use tasuki_shm::region::{PeerRegion, Span};
use tasuki_shm::vni::directory::Lookup;
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds, PeerNodeMemory};
use tasuki_shm::wake::BellSender;

use super::lease_page::{Between, LeasePage, NUMBERS, Of, Tally};
use super::orders::{Deed, Order};
use super::path::{ALL, Path, SHORTEST, mac};
use tasuki_testing::Dice;

/// Interval of a node's periodic work.
const TICK: Duration = Duration::from_millis(50);

/// Most frames that a killed reader had read and not reported: a batch.
const AGAIN_MAX: u64 = 32;

/// Length of a frame for all that takes pages of its own, so that it shares none: as many as the longest frame.
const GOODBYE_LEN: usize = PIECE_MAX - HEADER_LEN;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    /// Other nodes are still being added.
    Waits,
    Sends,
    /// The node has one more frame to send, and then reports this order done.
    Quiesces(u64),
    Quiet,
    /// The node's clock runs ahead, because it only waits for time to pass.
    Rests(Duration),
}

/// State of another node.
#[derive(Debug, Clone, Copy)]
struct Other {
    id: u32,
    /// Frames that a predecessor had received already.
    again: u64,
    /// Whether a frame came that no predecessor had.
    is_fresh: bool,
}

/// Checks received frames.
struct Checker {
    us: u16,
    id: u32,
    after_death: bool,
    others: Vec<Option<Other>>,
    buffer: Vec<u8>,
    /// Number of frames of one batch after which it kills itself.
    dies_after: Option<usize>,
}

pub struct Node {
    vni: Vni,
    switch: Switch<Span<Line>>,
    lease_page: LeasePage,
    socket: UnixStream,
    stages: bool,
    dice: Dice,
    checker: Checker,
    /// Nodes to which it posted frames that may not be visible yet.
    unseen: Vec<u16>,
    mood: Mood,
    /// Whether the node had no predecessor, and so has heard of every join and leave.
    is_first: bool,
    /// Whether it kills itself after the next frame that it posts.
    dies_sending: bool,
}

fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).expect("one may kill oneself");
    unreachable!("nobody outlives it")
}

/// Becomes the node that the test orders, until the test ends it.
pub fn be(socket: UnixStream) {
    let (order, fds) = Order::receive(&socket, RecvFlags::empty()).expect("the test says who we are");
    assert_eq!(order.deed, Deed::Be);
    let [control, pool, bell_receiver, lease_page, directory] = fds.try_into().expect("five descriptors");
    let directory = PeerRegion::map_kept_whole(directory.as_fd()).expect("the directory");
    let lookup = Lookup::new(directory.claims(0, directory.len() / LINE_LEN).expect("all of it"));
    let us = order.number;
    let checker = Checker {
        us,
        id: order.id,
        after_death: order.after_death,
        others: vec![None; NUMBERS.into()],
        buffer: vec![0; PIECE_MAX],
        dies_after: None,
    };
    let lease_page = LeasePage::adopt(lease_page);
    let is_first = lease_page.of_node(us, Of::Done).load(SeqCst) == 0;
    let memory = NodeMemory::adopt(NodeMemoryFds { control, pool }).expect("a node memory");
    let mut node = Node {
        vni: Vni::new(us, memory, bell_receiver),
        switch: Switch::new(us, lookup),
        lease_page,
        socket,
        stages: order.stages,
        dice: Dice::of(order.seed),
        checker,
        unseen: Vec::new(),
        mood: Mood::Waits,
        is_first,
        dies_sending: false,
    };
    node.done(order.serial);
    while node.live() {}
}

impl Node {
    fn us(&self) -> u16 {
        self.checker.us
    }

    fn done(&self, serial: u64) {
        self.lease_page.of_node(self.us(), Of::Done).store(serial, SeqCst);
    }

    /// Runs until the test orders its end.
    fn live(&mut self) -> bool {
        let (mut next_tick, mut next_send) = (Instant::now(), Instant::now());
        loop {
            while let Some((order, fds)) = Order::receive(&self.socket, RecvFlags::DONTWAIT) {
                if !self.obey(&order, fds) {
                    return false;
                }
            }
            let came = self.receive();
            let now = Instant::now();
            if now >= next_send {
                self.send();
                next_send = Instant::now() + Duration::from_micros(self.dice.below(20_000) as u64);
            }
            self.flush();
            if now >= next_tick {
                self.tick(now);
                next_tick = now + TICK;
            }
            if came == 0 && self.mood != Mood::Waits && self.vni.arm() == Armed::Idle {
                self.sleep(next_tick.min(next_send).saturating_duration_since(Instant::now()));
            }
        }
    }

    fn sleep(&mut self, most: Duration) {
        let most = Timespec::try_from(most).expect("a moment");
        let ends =
            &mut [PollFd::from_borrowed_fd(self.vni.fd(), PollFlags::IN), PollFd::new(&self.socket, PollFlags::IN)];
        // The cause of the wake-up does not matter: the next look finds out.
        let _ = rustix::event::poll(ends, Some(&most));
        self.vni.wake();
    }

    /// Carries out an order; returns false if it was the last.
    fn obey(&mut self, order: &Order, fds: Vec<OwnedFd>) -> bool {
        let number = order.number;
        match order.deed {
            Deed::Be => panic!("it is somebody already"),
            Deed::Add => {
                let [control, pool, bell] = fds.try_into().expect("three descriptors");
                let node_memory = PeerNodeMemory::map(&NodeMemoryFds { control, pool }).expect("it is mapped");
                let bell = BellSender::from_peer(bell);
                self.vni
                    .add(PeerDescriptor { number, node_memory, bell, own: Default::default() })
                    .expect("its ring is given back");
                self.checker.others[usize::from(number)] = Some(Other { id: order.id, again: 0, is_fresh: false });
                self.count_doubtful(number);
                let counts = self.vni.counts(number).expect("it was added");
                assert!(!self.is_first || counts == Counts::default(), "of one before with its number: {counts:?}");
            }
            Deed::Remove => {
                self.vni.remove(number);
                self.checker.others[usize::from(number)] = None;
                self.unseen.retain(|to| *to != number);
            }
            Deed::Go => {
                self.vni.settle();
                self.mood = Mood::Sends;
            }
            Deed::Quiesce => {
                self.mood = Mood::Quiesces(order.serial);
                return true;
            }
            Deed::Rest => self.mood = Mood::Rests(Duration::ZERO),
            Deed::DieReading => self.checker.dies_after = Some(1 + self.dice.below(4)),
            Deed::DieSending => self.dies_sending = true,
            Deed::End => {
                self.flush();
                return false;
            }
        }
        self.done(order.serial);
        true
    }

    /// Counts frames that a predecessor posted and did not report as visible: their fate is unknown.
    fn count_doubtful(&self, to: u16) {
        for (posted, seen) in [(Between::One, Between::SeenOne), (Between::All, Between::SeenAll)] {
            let posted = self.lease_page.get(self.us(), to, posted);
            let doubtful = posted - self.lease_page.get(self.us(), to, seen);
            assert!(doubtful == 0 || self.checker.after_death, "who is told to end sends what it has");
            self.lease_page.add(self.us(), to, Between::Doubtful, doubtful);
            self.lease_page.set(self.us(), to, seen, posted);
        }
    }

    fn receive(&mut self) -> u64 {
        let Self { vni, lease_page, checker, .. } = self;
        let mut came = 0;
        for _ in 0..8 {
            let mut in_batch = 0;
            came += vni.receive(|incoming| {
                checker.check(lease_page, &incoming);
                in_batch += 1;
                if checker.dies_after.is_some_and(|after| in_batch >= after) {
                    die();
                }
            }) as u64;
        }
        lease_page.of_node(checker.us, Of::Came).fetch_add(came, SeqCst);
        came
    }

    fn send(&mut self) {
        match self.mood {
            Mood::Sends => {
                // Now and then more than a ring holds.
                let count = if self.dice.once_in(100) { 400 } else { self.dice.below(24) };
                let one = self.dice.once_in(8).then(|| self.somebody());
                for _ in 0..count {
                    let len = match self.dice.below(40) {
                        0 => SHORTEST + self.dice.below(65_000 - SHORTEST),
                        1..10 => SHORTEST + self.dice.below(9018 - SHORTEST),
                        _ => SHORTEST + self.dice.below(1518 - SHORTEST),
                    };
                    match self.dice.below(20) {
                        0 => drop(self.send_to_all(len)),
                        _ => {
                            let to = one.unwrap_or_else(|| self.somebody());
                            self.send_to(to, len);
                        }
                    }
                }
            }
            Mood::Quiesces(serial) => {
                if !self.send_to_all(GOODBYE_LEN) {
                    return;
                }
                self.flush();
                self.done(serial);
                self.mood = Mood::Quiet;
            }
            _ => {}
        }
    }

    /// Chooses another node, or one that no longer exists.
    fn somebody(&mut self) -> u32 {
        let others: Vec<_> = self.checker.others.iter().flatten().map(|other| other.id).collect();
        match others.is_empty() || self.dice.once_in(200) {
            true => u32::try_from(self.dice.below(200)).expect("a small number"),
            false => others[self.dice.below(others.len())],
        }
    }

    fn count(&self, what: Of) {
        self.lease_page.of_node(self.us(), what).fetch_add(1, SeqCst);
    }

    fn send_to(&mut self, id: u32, len: usize) {
        let To::Node(to) = self.switch.find(mac(id)) else { return self.count(Of::Nobody) };
        let known = self.checker.others[usize::from(to)];
        assert!(known.is_none_or(|known| known.id == id), "the directory gives {id} number {to}, which is {known:?}");
        let posted = self.lease_page.get(self.us(), to, Between::One) + 1;
        let path = Path { from: self.checker.id, to: id, number: u32::try_from(posted).expect("so many are not sent") };
        // Count before posting: a peer may have seen frames that a killed node had counted.
        let count = |count| self.lease_page.set(self.checker.us, to, Between::One, count);
        let sent = if self.stages {
            let Some(room) = self.vni.stage() else { return self.count(Of::NoRoom) };
            room[..HEADER_LEN].fill(0);
            path.write(&mut room[HEADER_LEN..HEADER_LEN + len]);
            count(posted);
            self.vni.post_staged(to, HEADER_LEN + len)
        } else {
            self.vni.draft(to, len).map(|room| path.write(room)).map(|()| {
                count(posted);
                self.vni.post(to, len, false);
            })
        };
        match sent {
            Ok(()) if self.dies_sending => die(),
            Ok(()) => self.unseen.push(to),
            Err(error) => {
                count(posted - 1);
                self.was_refused(error);
            }
        }
    }

    fn was_refused(&self, error: SendError) {
        match error {
            SendError::NoRoom(_) => self.count(Of::NoRoom),
            SendError::NoSuchNode(_) => self.count(Of::Nobody),
            other => panic!("node {} could not send: {other}", self.us()),
        }
    }

    fn sent(&self, to: u16) -> u64 {
        self.vni.counts(to).map_or(0, |counts| counts.sent)
    }

    /// Sends a frame to all nodes; returns whether sending was possible.
    fn send_to_all(&mut self, len: usize) -> bool {
        let all = self.switch.find(mac(ALL));
        assert_eq!(all, To::All);
        let nodes: Vec<_> = self.switch.nodes_of(all).iter().filter(|to| *to < NUMBERS).collect();
        let before: Vec<_> = nodes.iter().map(|to| self.sent(*to)).collect();
        let number = u32::try_from(self.lease_page.of_node(self.us(), Of::ToAll).fetch_add(1, SeqCst) + 1);
        let path = Path { from: self.checker.id, to: ALL, number: number.expect("so many are not sent") };
        let sent = if self.stages {
            let Some(room) = self.vni.stage() else {
                self.count(Of::NoRoom);
                return false;
            };
            room[..HEADER_LEN].fill(0);
            path.write(&mut room[HEADER_LEN..HEADER_LEN + len]);
            self.vni.post_staged_to_all(nodes.iter().copied(), HEADER_LEN + len)
        } else {
            self.vni.send_to_all(nodes.iter().copied(), len, false, |room| path.write(room))
        };
        match sent {
            Ok(count) => {
                let got: Vec<_> = nodes
                    .iter()
                    .zip(before)
                    .filter(|(to, before)| self.sent(**to) > *before)
                    .map(|(to, _)| *to)
                    .collect();
                assert_eq!(got.len(), count);
                for to in got {
                    self.lease_page.add(self.us(), to, Between::All, 1);
                    self.unseen.push(to);
                }
            }
            Err(error) => self.was_refused(error),
        }
        sent.is_ok()
    }

    fn flush(&mut self) {
        self.vni.flush();
        for to in self.unseen.drain(..) {
            for (posted, seen) in [(Between::One, Between::SeenOne), (Between::All, Between::SeenAll)] {
                self.lease_page.set(self.checker.us, to, seen, self.lease_page.get(self.checker.us, to, posted));
            }
        }
    }

    fn tick(&mut self, now: Instant) {
        self.switch.age(now);
        let now = match &mut self.mood {
            Mood::Rests(ahead) => {
                *ahead += IDLE;
                now + *ahead
            }
            _ => now,
        };
        let again = self.vni.tick(now);
        for to in (0..NUMBERS).filter(|to| self.checker.others[usize::from(*to)].is_some()) {
            let counts = self.vni.counts(to).expect("it was added");
            self.lease_page.set(self.us(), to, Between::TakenBack, counts.taken_back);
            assert_eq!(self.vni.breach(to), None, "an honest node breaks no rule");
        }
        if matches!(self.mood, Mood::Rests(_)) && !again {
            // A staging node has room for its next frame, as each node that reads from a TAP.
            let has_room = !self.stages || self.vni.stage().is_some();
            let left = u64::from(self.vni.pages_left());
            self.lease_page.of_node(self.us(), Of::Rested).store(if has_room { left + 1 } else { 0 }, SeqCst);
        }
    }
}

impl Checker {
    fn check(&mut self, lease_page: &LeasePage, incoming: &Incoming<'_>) {
        let (us, from) = (self.us, incoming.from);
        let other = self.others[usize::from(from)].as_mut().expect("a frame of nobody's");
        let Ok(len) = incoming.copy_to(&mut self.buffer) else {
            return lease_page.add(from, us, Between::Late, 1);
        };
        assert_eq!(len, incoming.len());
        let path = Path::read(&self.buffer[..len])
            .unwrap_or_else(|wrong| panic!("node {us} ({}) got from {from} ({}): {wrong}", self.id, other.id));
        assert!(
            path.from == other.id && (path.to == self.id || path.to == ALL),
            "node {us} ({}) got from {from} ({}) what has gone {path:?}",
            self.id,
            other.id
        );
        let came = if path.to == ALL { Between::CameAll } else { Between::CameOne };
        let Tally { count, last } = Tally::of(lease_page.get(from, us, came));
        if path.number > last {
            other.is_fresh = true;
            lease_page.set(from, us, came, Tally { count: count + 1, last: path.number }.word());
            return;
        }
        other.again += 1;
        assert!(
            self.after_death && !other.is_fresh && other.again <= AGAIN_MAX,
            "node {us} ({}) got {path:?} from {from} after {last}",
            self.id
        );
        lease_page.add(from, us, Between::Again, 1);
    }
}
