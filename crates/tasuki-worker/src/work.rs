//! What a node does with frames, while it has no guests: the works of the stock worker.

use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tasuki_net::nic::Mac;
use tasuki_net::port::{BURST_MAX, Burst, Frame, Transactional};
use tasuki_relay::letter::{self, Begin, pulse};

use crate::answer::answer;
use crate::board::{Book, COPY, Pulse};
use crate::duty::{Desk, Duty, FIRST_LOOK};
use crate::kit::Refused;
use crate::numbered::{self, Account};
use crate::pace::Pace;
use crate::tap::Tap;
use crate::{fail, run};

/// Whom a source's frames are for, if nobody says: everybody.
const TO: Mac = Mac([0xff; 6]);

/// What a worker does for its whole life, and with what.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// What.
    pub kind: letter::Work,
    /// The node's TAP, which is the worker's to its end.
    pub tap: Option<&'static Tap>,
}

/// Whether this work must remember anything exactly.
fn remembers(work: Work) -> bool {
    work.kind == letter::Work::Sink
}

impl Duty for Job {
    type Told = Work;

    fn told(begin: &Begin, tap: Option<&'static Tap>) -> Result<Work> {
        match begin.work {
            letter::Work::Program => bail!(
                "the work of node {} is a program of its own, and this is the stock worker; upgrade with that program",
                begin.node
            ),
            kind => Ok(Work { kind, tap }),
        }
    }

    fn new(told: &Work) -> Self {
        Self::at(*told, [0; COPY])
    }

    fn may_go_on(_: &Book, _: u32, _: Option<u64>, _: u16) -> Result<(), Refused> {
        Ok(())
    }

    fn go_on(&mut self, book: &Book, nic: u32, turns: Option<u64>) -> Result<(), Refused> {
        let words = match turns {
            _ if !remembers(self.work) => [0; COPY],
            Some(turns) => book.read(nic, turns),
            None => Self::latest([0, 1].map(|copy| book.read(nic, copy))),
        };
        *self = Self::at(self.work, words);
        Ok(())
    }

    #[inline]
    fn remember(&mut self, book: &Book, nic: u32, turn: u64) {
        if let Some(words) = self.words() {
            book.write(nic, turn, words);
        }
    }

    fn close(&self, book: &Book, nic: u32) {
        if let Some(words) = self.words() {
            (0..2).for_each(|copy| book.write(nic, copy, words));
        }
    }

    #[inline]
    fn turn<N: Transactional>(&mut self, nic: &mut N, desk: &Desk<'_>, burst: &mut Burst) -> Result<usize, N::Fault> {
        self.remember(desk.book, desk.nic, nic.turns().wrapping_add(1));
        self.turn(nic, desk, burst)
    }

    fn finish<N: Transactional>(&mut self, nic: &mut N, desk: &Desk<'_>, burst: &mut Burst) -> Result<usize, N::Fault> {
        self.finish(nic, desk, burst)
    }

    fn look<N: Transactional>(&mut self, nic: &mut N, desk: &Desk<'_>, burst: &mut Burst) -> Result<(), N::Fault> {
        self.look(nic, burst, desk.pulse)
    }

    fn send<N: Transactional>(&mut self, nic: &mut N, desk: &Desk<'_>, burst: &mut Burst) -> Result<usize, N::Fault> {
        match self.work.kind {
            // What came goes the other way.
            letter::Work::Uplink => Ok(desk.joint.map_or(0, |joint| joint.borrow_mut().give(burst))),
            _ => transmit(nic, burst, desk.pulse),
        }
    }

    fn can_work(&self, desk: &Desk<'_>) -> bool {
        self.work.kind != letter::Work::Uplink || desk.joint.is_some()
    }

    fn conclude<N: Transactional>(&mut self, nic: &mut N, burst: &Burst) {
        nic.conclude(burst);
    }

    fn drop_hand(&mut self, burst: &mut Burst) {
        burst.clear();
    }

    fn rest(&self) -> Option<Duration> {
        self.rest()
    }

    fn bell(&self) -> Option<BorrowedFd<'static>> {
        self.work.tap.and_then(Tap::bell)
    }

    fn holds_its_own(&self) -> bool {
        self.work.kind == letter::Work::Tap
    }

    fn counts(&self) -> Vec<(String, u64)> {
        let Account { seen, missing, late, next } = self.account;
        let counts = [("numbered", seen), ("missing", missing), ("late", late), ("next", next)];
        let counts = counts.into_iter().filter(|_| remembers(self.work));
        counts.map(|(name, count)| (name.to_owned(), count)).collect()
    }
}

/// Work on one NIC.
#[derive(Debug)]
pub struct Job {
    work: Work,
    pace: Pace,
    account: Account,
    /// Received by a source, and nobody's business; or what the TAP gets.
    came: Burst,
}

impl Job {
    /// Where a predecessor stopped, as the book says.
    fn at(work: Work, book: [u64; COPY]) -> Self {
        let rate = match work.kind {
            letter::Work::Source { rate, .. } if rate > 0 => Some(rate),
            _ => None,
        };
        let [seen, missing, late, next, ..] = book;
        let account = Account { seen, missing, late, next };
        Job { work, pace: Pace::new(rate, Instant::now()), account, came: Burst::new() }
    }

    /// Of two copies the one that was written last: accounts only grow.
    fn latest(copies: [[u64; COPY]; 2]) -> [u64; COPY] {
        let [one, other] = copies;
        one.max(other)
    }

    /// What must be remembered exactly, if anything: it goes into the book before any call of the driver that commits.
    #[inline]
    fn words(&self) -> Option<[u64; COPY]> {
        let Account { seen, missing, late, next } = self.account;
        remembers(self.work).then_some([seen, missing, late, next, 0, 0, 0, 0])
    }

    /// One burst in and one out; says how many frames moved. What stands in `burst` afterwards is in hand.
    #[inline]
    fn turn<N: Transactional>(&mut self, nic: &mut N, desk: &Desk<'_>, burst: &mut Burst) -> Result<usize, N::Fault> {
        let pulse = desk.pulse;
        match self.work.kind {
            letter::Work::Echo => {
                send_back(nic, burst, pulse, |nic, burst, pulse| receive_and_turn(nic, burst, pulse, BURST_MAX))
            }
            letter::Work::Answer { address } => send_back(nic, burst, pulse, |nic, burst, pulse| {
                receive_and_answer(nic, burst, pulse, address, BURST_MAX)
            }),
            letter::Work::Sink => self.sink(nic, burst, pulse, BURST_MAX),
            // Refused before anything was driven; and whoever serves memif has no NIC.
            letter::Work::Program | letter::Work::Memif => Ok(0),
            letter::Work::Uplink => self.join(nic, desk, burst),
            letter::Work::Source { size, to, .. } => self.source(nic, desk, burst, (size, to.map_or(TO, Mac))),
            letter::Work::Tap => {
                let came = self.feed_tap(nic, pulse, BURST_MAX)?;
                // What found no room in the last turn goes first.
                if let (Some(tap), true) = (self.work.tap, burst.is_empty()) {
                    tap.take(desk.arena, burst, pulse);
                }
                // Also where nothing is to be sent: what the TAP has got must not be given to it by a successor again.
                let went = if came > 0 || !burst.is_empty() { transmit(nic, burst, pulse)? } else { 0 };
                Ok(came + went)
            }
        }
    }

    /// The same, of who is to let go: nothing new is sent.
    fn finish<N: Transactional>(&mut self, nic: &mut N, desk: &Desk<'_>, burst: &mut Burst) -> Result<usize, N::Fault> {
        let pulse = desk.pulse;
        match self.work.kind {
            letter::Work::Source { .. } => {
                let went = if burst.is_empty() { 0 } else { transmit(nic, burst, pulse)? };
                let came = nic.receive(&mut self.came)?;
                self.came.clear();
                Ok(went + came)
            }
            letter::Work::Tap => {
                let came = self.feed_tap(nic, pulse, BURST_MAX)?;
                Ok(came + if came > 0 || !burst.is_empty() { transmit(nic, burst, pulse)? } else { 0 })
            }
            _ => self.turn(nic, desk, burst),
        }
    }

    /// What came from the NIC goes to the VNI, and what came from there out at the NIC. A worker that is killed between the two ends of that may have done
    /// it, and its successor does it again: a burst twice at most, each way.
    fn join<N: Transactional>(&mut self, nic: &mut N, desk: &Desk<'_>, burst: &mut Burst) -> Result<usize, N::Fault> {
        let Some(joint) = desk.joint else { return Ok(0) };
        let joint = &mut *joint.borrow_mut();
        joint.is_joined = true;
        let mut moved = 0;
        if burst.is_empty() {
            moved = nic.receive(burst)?;
            desk.pulse.add(pulse::RECEIVED, moved as u64);
            if moved > 0 {
                fail::point("burst.received");
            }
        }
        if !burst.is_empty() {
            moved += joint.give(burst);
            if !burst.is_empty() {
                // What goes out would end the turn of what is in hand.
                return Ok(moved);
            }
            fail::point("burst.turned");
        }
        moved += joint.take();
        if joint.fill(desk, &mut self.came) == 0 {
            return Ok(moved);
        }
        let went = transmit(nic, &mut self.came, desk.pulse)?;
        joint.went(went);
        // What found no room is copied once more when there is some.
        self.came.iter_mut().for_each(|frame| frame.slot.bytes_mut()[..frame.len.into()].fill(0));
        self.came.clear();
        Ok(moved + went)
    }

    fn feed_tap<N: Transactional>(&mut self, nic: &mut N, pulse: &Pulse, most: usize) -> Result<usize, N::Fault> {
        let came = nic.receive_some(&mut self.came, most)?;
        if came == 0 {
            return Ok(0);
        }
        fail::point("burst.received");
        if let Some(tap) = self.work.tap {
            tap.give(&self.came, pulse);
        }
        self.came.clear();
        pulse.add(pulse::RECEIVED, came as u64);
        fail::point("burst.turned");
        Ok(came)
    }

    fn sink<N: Transactional>(
        &mut self,
        nic: &mut N,
        burst: &mut Burst,
        pulse: &Pulse,
        most: usize,
    ) -> Result<usize, N::Fault> {
        let came = nic.receive_some(burst, most)?;
        if came == 0 {
            return Ok(0);
        }
        fail::point("burst.received");
        for frame in burst.drain(..) {
            if let Some(number) = numbered::number(frame.bytes()) {
                self.account.book(number);
            }
        }
        fail::point("burst.turned");
        pulse.add(pulse::RECEIVED, came as u64);
        pulse.set(pulse::MISSING, self.account.missing);
        pulse.set(pulse::LATE, self.account.late);
        Ok(came)
    }

    fn source<N: Transactional>(
        &mut self,
        nic: &mut N,
        desk: &Desk<'_>,
        burst: &mut Burst,
        (size, to): (u16, Mac),
    ) -> Result<usize, N::Fault> {
        let size = size.clamp(numbered::SHORTEST, 1514);
        let due = self.pace.due(Instant::now(), BURST_MAX as u64);
        while (burst.len() as u64) < due {
            let Some(mut slot) = desk.arena.take() else { break };
            let number = nic.given() + burst.len() as u64;
            numbered::write(&mut slot.bytes_mut()[..size.into()], to, nic.station(), number);
            burst.push(Frame { slot, len: size });
        }
        let went = transmit(nic, burst, desk.pulse)?;
        self.pace.sent(went as u64);
        // Whatever comes is none of a source's business, but must not fill the card's buffer.
        let came = nic.receive(&mut self.came)?;
        self.came.clear();
        Ok(went + came)
    }

    /// The first look at the rings of a card that was taken over: nothing is sent yet.
    fn look<N: Transactional>(&mut self, nic: &mut N, burst: &mut Burst, pulse: &Pulse) -> Result<(), N::Fault> {
        match self.work.kind {
            letter::Work::Echo => receive_and_turn(nic, burst, pulse, FIRST_LOOK).map(drop),
            letter::Work::Answer { address } => receive_and_answer(nic, burst, pulse, address, FIRST_LOOK).map(drop),
            letter::Work::Sink => self.sink(nic, burst, pulse, FIRST_LOOK).map(drop),
            letter::Work::Tap => self.feed_tap(nic, pulse, FIRST_LOOK).map(drop),
            letter::Work::Program | letter::Work::Memif | letter::Work::Uplink => Ok(()),
            letter::Work::Source { .. } => {
                nic.receive(&mut self.came)?;
                self.came.clear();
                Ok(())
            }
        }
    }

    /// How long until there is something to do though nothing comes.
    fn rest(&self) -> Option<Duration> {
        matches!(self.work.kind, letter::Work::Source { .. }).then(|| self.pace.rest(Instant::now()))
    }
}

#[inline]
fn send_back<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    pulse: &Pulse,
    receive: impl FnOnce(&mut N, &mut Burst, &Pulse) -> Result<usize, N::Fault>,
) -> Result<usize, N::Fault> {
    // What found no room in the last turn goes first, and nothing new is taken until it is gone.
    let came = if burst.is_empty() { receive(nic, burst, pulse)? } else { 0 };
    if burst.is_empty() { Ok(came) } else { Ok(came + transmit(nic, burst, pulse)?) }
}

/// Takes in `most` frames at most, and handles them; says how many have come.
#[inline]
fn receive_and<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    pulse: &Pulse,
    most: usize,
    handle: impl FnOnce(&mut N, &mut Burst),
) -> Result<usize, N::Fault> {
    let came = nic.receive_some(burst, most)?;
    if came == 0 {
        return Ok(0);
    }
    fail::point("burst.received");
    handle(nic, burst);
    pulse.add(pulse::RECEIVED, came as u64);
    fail::point("burst.turned");
    Ok(came)
}

#[inline]
fn receive_and_turn<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    pulse: &Pulse,
    most: usize,
) -> Result<usize, N::Fault> {
    receive_and(nic, burst, pulse, most, |nic, burst| {
        for frame in burst.iter_mut() {
            nic.save(frame);
            fail::point("frame.saved");
            run::turn_round(frame);
        }
    })
}

/// The answers stay in `burst`; what asks nothing of us is dropped.
#[inline]
fn receive_and_answer<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    pulse: &Pulse,
    address: Ipv4Addr,
    most: usize,
) -> Result<usize, N::Fault> {
    receive_and(nic, burst, pulse, most, |nic, burst| {
        let mac = nic.station();
        burst.retain(|frame| {
            nic.save(frame);
            fail::point("frame.saved");
            let len = frame.len.into();
            answer(&mut frame.slot.bytes_mut()[..len], mac, address)
        });
    })
}

/// Sends what is in hand, and takes nothing in; says how many frames went.
#[inline]
fn transmit<N: Transactional>(nic: &mut N, burst: &mut Burst, pulse: &Pulse) -> Result<usize, N::Fault> {
    let went = nic.transmit(burst)?;
    pulse.add(pulse::SENT, went as u64);
    if went > 0 {
        fail::point("burst.sent");
    }
    Ok(went)
}
