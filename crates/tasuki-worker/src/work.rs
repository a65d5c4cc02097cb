//! The works of the stock worker: its handling of frames for a node without guests.

use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tasuki_net::nic::Mac;
use tasuki_net::port::{BURST_MAX, Burst, Frame, Transactional};
use tasuki_relay::message::{self, Begin, heartbeat};

use crate::answer::answer;
use crate::bundle::Refused;
use crate::handler::{FIRST_LOOK, FrameHandler, HandlerContext};
use crate::lease_page::{COPY, Heartbeat, ProgramState};
use crate::numbered::{self, Account};
use crate::pace::Pace;
use crate::tap::Tap;
use crate::{fail, run};

/// Default destination of a source's frames: broadcast.
const TO: Mac = Mac([0xff; 6]);

/// Work of a worker, for its whole life.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// Kind of work, with its parameters.
    pub kind: message::Work,
    /// TAP of the node, which the worker keeps to its end.
    pub tap: Option<&'static Tap>,
}

/// Returns whether this work keeps state that must be exact.
fn remembers(work: Work) -> bool {
    work.kind == message::Work::Sink
}

impl FrameHandler for Job {
    type Told = Work;

    fn told(begin: &Begin, tap: Option<&'static Tap>) -> Result<Work> {
        match begin.work {
            message::Work::Program => bail!(
                "the work of node {} is a program of its own, and this is the stock worker; upgrade with that program",
                begin.node
            ),
            kind => Ok(Work { kind, tap }),
        }
    }

    fn new(told: &Work) -> Self {
        Self::at(*told, [0; COPY])
    }

    fn may_go_on(_: &ProgramState, _: u32, _: Option<u64>, _: u16) -> Result<(), Refused> {
        Ok(())
    }

    fn go_on(&mut self, program_state: &ProgramState, nic: u32, turns: Option<u64>) -> Result<(), Refused> {
        let words = match turns {
            _ if !remembers(self.work) => [0; COPY],
            Some(turns) => program_state.read(nic, turns),
            None => Self::latest([0, 1].map(|copy| program_state.read(nic, copy))),
        };
        *self = Self::at(self.work, words);
        Ok(())
    }

    #[inline]
    fn remember(&mut self, program_state: &ProgramState, nic: u32, turn: u64) {
        if let Some(words) = self.words() {
            program_state.write(nic, turn, words);
        }
    }

    fn close(&self, program_state: &ProgramState, nic: u32) {
        if let Some(words) = self.words() {
            (0..2).for_each(|copy| program_state.write(nic, copy, words));
        }
    }

    #[inline]
    fn turn<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        self.remember(context.program_state, context.nic, nic.turns().wrapping_add(1));
        self.turn(nic, context, burst)
    }

    fn finish<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        let heartbeat = context.heartbeat;
        match self.work.kind {
            message::Work::Source { .. } => {
                let went = if burst.is_empty() { 0 } else { transmit(nic, burst, heartbeat)? };
                let came = nic.receive(&mut self.came)?;
                self.came.clear();
                Ok(went + came)
            }
            message::Work::Tap => {
                let came = self.feed_tap(nic, heartbeat, BURST_MAX)?;
                let went = if came > 0 || !burst.is_empty() { transmit(nic, burst, heartbeat)? } else { 0 };
                self.came.clear();
                Ok(came + went)
            }
            _ => self.turn(nic, context, burst),
        }
    }

    fn look<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<(), N::Fault> {
        let heartbeat = context.heartbeat;
        match self.work.kind {
            message::Work::Echo => receive_and_turn(nic, burst, heartbeat, FIRST_LOOK).map(drop),
            message::Work::Answer { address } => {
                receive_and_answer(nic, burst, heartbeat, address, FIRST_LOOK).map(drop)
            }
            message::Work::Sink => self.sink(nic, burst, heartbeat, FIRST_LOOK).map(drop),
            message::Work::Tap => self.feed_tap(nic, heartbeat, FIRST_LOOK).map(drop),
            message::Work::Program | message::Work::Bridge | message::Work::Uplink => Ok(()),
            message::Work::Source { .. } => {
                nic.receive(&mut self.came)?;
                self.came.clear();
                Ok(())
            }
        }
    }

    fn send<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        match self.work.kind {
            // Frames from the NIC go to the VNI.
            message::Work::Uplink => {
                Ok(context.uplink.as_mut().map_or(0, |uplink| uplink.give(burst, &mut self.given)))
            }
            _ => transmit(nic, burst, context.heartbeat),
        }
    }

    fn can_work(&self, has_end: bool) -> bool {
        self.work.kind != message::Work::Uplink || has_end
    }

    fn conclude<N: Transactional>(&mut self, nic: &mut N, burst: &Burst) {
        nic.conclude(burst);
    }

    fn let_go(&mut self) {
        self.came.clear();
        self.given.clear();
    }

    fn drop_hand(&mut self, burst: &mut Burst) {
        burst.clear();
    }

    fn rest(&mut self) -> Option<Duration> {
        matches!(self.work.kind, message::Work::Source { .. }).then(|| self.pace.rest(Instant::now()))
    }

    fn bell(&self) -> Option<BorrowedFd<'static>> {
        self.work.tap.and_then(Tap::bell)
    }

    fn holds_its_own(&self) -> bool {
        self.work.kind == message::Work::Tap
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
    /// Frames that a source receives and drops, frames for the TAP, or frames of an uplink's end for the NIC.
    came: Burst,
    /// Frames of an uplink's NIC that the VNI has, until the NIC's ledger says so. A successor receives their slots again, so
    /// these must stay as they are.
    given: Burst,
}

impl Job {
    /// Continues where a predecessor stopped, by the words of its program state.
    fn at(work: Work, program_state: [u64; COPY]) -> Self {
        let rate = match work.kind {
            message::Work::Source { rate, .. } if rate > 0 => Some(rate),
            _ => None,
        };
        let [seen, missing, late, next, ..] = program_state;
        let account = Account { seen, missing, late, next };
        Job { work, pace: Pace::new(rate, Instant::now()), account, came: Burst::new(), given: Burst::new() }
    }

    /// Returns the later of two copies: accounts only grow.
    fn latest(copies: [[u64; COPY]; 2]) -> [u64; COPY] {
        let [one, other] = copies;
        one.max(other)
    }

    /// Returns the state that must be exact, if this work has any. It is written to the program state before each
    /// driver call that commits.
    #[inline]
    fn words(&self) -> Option<[u64; COPY]> {
        let Account { seen, missing, late, next } = self.account;
        remembers(self.work).then_some([seen, missing, late, next, 0, 0, 0, 0])
    }

    /// Receives a burst and sends a burst. Returns the number of frames moved. Frames left in `burst` stay pending.
    #[inline]
    fn turn<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        let heartbeat = context.heartbeat;
        match self.work.kind {
            message::Work::Echo => send_back(nic, burst, heartbeat, |nic, burst, heartbeat| {
                receive_and_turn(nic, burst, heartbeat, BURST_MAX)
            }),
            message::Work::Answer { address } => send_back(nic, burst, heartbeat, |nic, burst, heartbeat| {
                receive_and_answer(nic, burst, heartbeat, address, BURST_MAX)
            }),
            message::Work::Sink => self.sink(nic, burst, heartbeat, BURST_MAX),
            // The worker refused a program's work before it drove anything, and a node with a bridge has no NIC.
            message::Work::Program | message::Work::Bridge => Ok(0),
            message::Work::Uplink => self.join(nic, context, burst),
            message::Work::Source { size, to, .. } => self.source(nic, context, burst, (size, to.map_or(TO, Mac))),
            message::Work::Tap => {
                let came = self.feed_tap(nic, heartbeat, BURST_MAX)?;
                // Frames that found no room in the last turn go first.
                if let (Some(tap), true) = (self.work.tap, burst.is_empty()) {
                    tap.take(context.arena, burst, heartbeat);
                }
                // Call this even when there is nothing to send: it commits the frames that the TAP has received, so
                // that a successor does not give them to the TAP again.
                let went = if came > 0 || !burst.is_empty() { transmit(nic, burst, heartbeat)? } else { 0 };
                self.came.clear();
                Ok(came + went)
            }
        }
    }

    /// Passes frames from the NIC to the VNI, and from the VNI to the NIC. If the worker is killed after it has
    /// passed frames on and before it has committed that, its successor passes them on again: at most one burst
    /// twice, each way.
    fn join<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        let Some(uplink) = &mut context.uplink else { return Ok(0) };
        uplink.is_joined = true;
        let mut moved = 0;
        if burst.is_empty() {
            self.given.clear();
            moved = nic.receive(burst)?;
            context.heartbeat.add(heartbeat::RECEIVED, moved as u64);
            if moved > 0 {
                fail::point("burst.received");
            }
        }
        if !burst.is_empty() {
            moved += uplink.give(burst, &mut self.given);
            if !burst.is_empty() {
                // Sending now would end the turn of the pending frames.
                return Ok(moved);
            }
            fail::point("burst.turned");
        }
        moved += uplink.take();
        if uplink.fill(context.arena, context.heartbeat, &mut self.came) == 0 {
            return Ok(moved);
        }
        let went = transmit(nic, &mut self.came, context.heartbeat)?;
        self.given.clear();
        uplink.went(went);
        // Frames that found no room are copied again when there is room.
        self.came.iter_mut().for_each(|frame| frame.slot.bytes_mut()[..frame.len.into()].fill(0));
        self.came.clear();
        Ok(moved + went)
    }

    /// Receives frames and gives them to the TAP. Their slots stay as they are until the caller has them committed: a
    /// successor receives them again.
    fn feed_tap<N: Transactional>(
        &mut self,
        nic: &mut N,
        heartbeat: &Heartbeat,
        most: usize,
    ) -> Result<usize, N::Fault> {
        self.came.clear();
        let came = nic.receive_some(&mut self.came, most)?;
        if came == 0 {
            return Ok(0);
        }
        fail::point("burst.received");
        if let Some(tap) = self.work.tap {
            tap.give(&self.came, heartbeat);
        }
        heartbeat.add(heartbeat::RECEIVED, came as u64);
        fail::point("burst.turned");
        Ok(came)
    }

    fn sink<N: Transactional>(
        &mut self,
        nic: &mut N,
        burst: &mut Burst,
        heartbeat: &Heartbeat,
        most: usize,
    ) -> Result<usize, N::Fault> {
        let came = nic.receive_some(burst, most)?;
        if came == 0 {
            return Ok(0);
        }
        fail::point("burst.received");
        let (mut passed_over, late) = (0, self.account.late);
        for frame in burst.drain(..) {
            if let Some(number) = numbered::number(frame.bytes()) {
                passed_over += self.account.count(number);
            }
        }
        fail::point("burst.turned");
        heartbeat.add(heartbeat::RECEIVED, came as u64);
        // Counters of this worker alone, which only grow; the account goes on over all.
        heartbeat.add(heartbeat::MISSING, passed_over);
        heartbeat.add(heartbeat::LATE, self.account.late - late);
        Ok(came)
    }

    fn source<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
        (size, to): (u16, Mac),
    ) -> Result<usize, N::Fault> {
        let size = size.clamp(numbered::SHORTEST, 1514);
        let due = self.pace.due(Instant::now(), BURST_MAX as u64);
        while (burst.len() as u64) < due {
            let Some(mut slot) = context.arena.take() else { break };
            let number = nic.given() + burst.len() as u64;
            numbered::write(&mut slot.bytes_mut()[..size.into()], to, nic.station(), number);
            burst.push(Frame { slot, len: size });
        }
        let went = transmit(nic, burst, context.heartbeat)?;
        self.pace.sent(went as u64);
        // A source has no use for received frames, but must not let them fill the card's buffer.
        let came = nic.receive(&mut self.came)?;
        self.came.clear();
        Ok(went + came)
    }
}

#[inline]
fn send_back<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    heartbeat: &Heartbeat,
    receive: impl FnOnce(&mut N, &mut Burst, &Heartbeat) -> Result<usize, N::Fault>,
) -> Result<usize, N::Fault> {
    // Frames that found no room in the last turn go first. Receive no new frames until they are gone.
    let came = if burst.is_empty() { receive(nic, burst, heartbeat)? } else { 0 };
    if burst.is_empty() { Ok(came) } else { Ok(came + transmit(nic, burst, heartbeat)?) }
}

/// Receives at most `most` frames and handles them. Returns the number received.
#[inline]
fn receive_and<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    heartbeat: &Heartbeat,
    most: usize,
    handle: impl FnOnce(&mut N, &mut Burst),
) -> Result<usize, N::Fault> {
    let came = nic.receive_some(burst, most)?;
    if came == 0 {
        return Ok(0);
    }
    fail::point("burst.received");
    handle(nic, burst);
    heartbeat.add(heartbeat::RECEIVED, came as u64);
    fail::point("burst.turned");
    Ok(came)
}

#[inline]
fn receive_and_turn<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    heartbeat: &Heartbeat,
    most: usize,
) -> Result<usize, N::Fault> {
    receive_and(nic, burst, heartbeat, most, |nic, burst| {
        burst.retain(|frame| {
            let turns = !is_to_group(frame.bytes());
            if turns {
                nic.save(frame);
                fail::point("frame.saved");
                run::turn_round(frame);
            }
            turns
        });
    })
}

/// Returns whether a frame is for a group of stations, and not for all. Its sender would take its own question back for
/// another station's: so a kernel finds that its IPv6 address is taken.
#[inline]
fn is_to_group(frame: &[u8]) -> bool {
    frame.first().is_some_and(|first| first & 1 == 1) && !frame.starts_with(&TO.0)
}

/// Leaves the answers in `burst` and drops frames that ask nothing of us.
#[inline]
fn receive_and_answer<N: Transactional>(
    nic: &mut N,
    burst: &mut Burst,
    heartbeat: &Heartbeat,
    address: Ipv4Addr,
    most: usize,
) -> Result<usize, N::Fault> {
    receive_and(nic, burst, heartbeat, most, |nic, burst| {
        let mac = nic.station();
        burst.retain(|frame| {
            nic.save(frame);
            fail::point("frame.saved");
            let len = frame.len.into();
            answer(&mut frame.slot.bytes_mut()[..len], mac, address)
        });
    })
}

/// Sends the pending frames and receives none. Returns the number of frames sent.
#[inline]
fn transmit<N: Transactional>(nic: &mut N, burst: &mut Burst, heartbeat: &Heartbeat) -> Result<usize, N::Fault> {
    let went = nic.transmit(burst)?;
    heartbeat.add(heartbeat::SENT, went as u64);
    if went > 0 {
        fail::point("burst.sent");
    }
    Ok(went)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_to_a_group_are_not_sent_back_and_broadcasts_are() {
        let to = |to: [u8; 6]| is_to_group(&[&to[..], &[2, 0, 0, 0, 0, 1, 0x86, 0xdd]].concat());
        assert!(to([0x33, 0x33, 0xff, 0, 0, 2]) && to([1, 0x80, 0xc2, 0, 0, 1]));
        assert!(!to([0xff; 6]) && !to([2, 0, 0, 0, 0, 2]) && !is_to_group(&[]));
    }
}
