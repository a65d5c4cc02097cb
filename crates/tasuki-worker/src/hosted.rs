//! A user's own program at work on one NIC: turns that happen wholly or not at all.
//!
//! The driver commits handled frames at the end of `transmit` and at the beginning of `receive`. So a turn is
//! receive, handle, transmit, with no commit in between, and frames go only when the card takes all of them. One commit
//! then says three things: all frames of the turn are handled, the card has the frames to send, and this copy of the
//! state is valid. Until then the whole turn is pending.

use std::time::{Duration, Instant};

use anyhow::Result;
use tasuki_net::port::{BURST_MAX, Burst, Transactional};
use tasuki_relay::message::{Begin, heartbeat};
use tasuki_relay::wire::Reason;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::bundle::Refused;
use crate::fail;
use crate::handler::{FIRST_LOOK, FrameHandler, HandlerContext};
use crate::lease_page::{ProgramState, STATE_WORDS, Written};
use crate::program::{Program, STATE_MAX, Turn};
use crate::tap::Tap;

/// Longest rest: the node's loop has other things to check.
const REST_MAX: Duration = Duration::from_secs(1);

/// Number of looks without a frame from one reading of the clock to the next, while a program rests.
const LOOKS: u32 = 64;

/// Minimum number of descriptors in a ring, so that it takes a whole burst: one descriptor stays free.
const RING_MIN: u16 = 64;
const _: () = assert!(RING_MIN as usize > BURST_MAX);

/// A program and its state for one NIC.
pub struct Hosted<P: Program> {
    program: P,
    state: P::State,
    /// State before the turn that is not over yet.
    before: P::State,
    /// Slots of frames that arrived in the turn that is not over yet, and do not go.
    kept: Burst,
    /// Bits by position among the frames to send in that turn: set for a frame in a slot of our own.
    ours: u32,
    /// Number of writes to the program state.
    count: u64,
    /// Turn for which the program state holds the present state.
    noted: Option<u64>,
    /// Earliest end of the rests that the program has asked for since its last turn.
    due: Option<Instant>,
    /// Number of looks without a frame while the program rests, since the last sleep.
    looks: u32,
}

/// Reads the state in a copy, if this program understands it.
fn read<P: Program>(written: &Written) -> Result<P::State, Refused> {
    let (kind, version) = written.state;
    if (kind, version) == (0, 0) {
        return Ok(P::State::new_zeroed());
    }
    let bytes = written.words.as_bytes();
    let bytes = bytes.get(..written.len).unwrap_or(bytes);
    let known = (P::STATE == (kind, version)).then(|| P::State::read_from_bytes(bytes).ok()).flatten();
    let other = || Reason::OtherState { kind: kind.into(), version: version.into() }.into();
    known.or_else(|| P::convert(kind, version, bytes)).ok_or_else(other)
}

/// Returns the copy that is valid after `turns` turns, or the copy that was written last; and the number of writes.
fn last(program_state: &ProgramState, nic: u32, turns: Option<u64>) -> Option<(Written, u64)> {
    let [one, other] = [program_state.state(nic, 0)?, program_state.state(nic, 1)?];
    let is_one = turns.map_or(one.count >= other.count, |turns| turns & 1 == 0);
    Some((if is_one { one } else { other }, one.count.max(other.count)))
}

fn no_room<P: Program>(nic: u32) -> Refused {
    Refused {
        reason: Reason::OtherState { kind: P::STATE.0.into(), version: P::STATE.1.into() },
        sentence: format!("the node's program state has no room for the state of NIC {nic}; configure fewer NICs"),
    }
}

impl<P: Program> Hosted<P> {
    fn written(&self) -> Written {
        let mut words = [0_u64; STATE_WORDS];
        let bytes = self.state.as_bytes();
        words.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        Written { state: P::STATE, count: self.count, len: bytes.len(), words }
    }

    /// Handles the received frames; sends none yet.
    #[inline]
    fn handle<N: Transactional>(&mut self, nic: &mut N, context: &mut HandlerContext<'_>, burst: &mut Burst) {
        let mut turn = Turn::new(nic, context.arena, burst, &mut self.kept);
        (self.before, self.noted, self.due) = (self.state, None, None);
        self.program.turn(&mut self.state, &mut turn);
        self.ours = turn.end();
        fail::point("burst.turned");
    }

    /// Ends the turn before, and receives frames.
    #[inline]
    fn receive<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
        most: usize,
    ) -> Result<usize, N::Fault> {
        self.remember(context.program_state, context.nic, nic.turns().wrapping_add(1));
        let came = nic.receive_some(burst, most)?;
        if came > 0 {
            context.heartbeat.add(heartbeat::RECEIVED, came as u64);
            fail::point("burst.received");
        }
        Ok(came)
    }

    fn work<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
        is_due: impl FnOnce(&mut Self) -> bool,
    ) -> Result<usize, N::Fault> {
        // Frames that found no room go first: their turn is not over.
        if !burst.is_empty() {
            return self.send(nic, context, burst);
        }
        let came = self.receive(nic, context, burst, BURST_MAX)?;
        if came == 0 && !is_due(self) {
            return Ok(0);
        }
        self.handle(nic, context, burst);
        Ok(came + if burst.is_empty() { 0 } else { self.send(nic, context, burst)? })
    }

    /// Returns whether the program's rest is over. It may be over for [`LOOKS`] looks by then: a look at an idle ring
    /// costs less than the clock.
    #[inline]
    fn is_due(&mut self) -> bool {
        match self.program.rest(&self.state) {
            Some(rest) if !rest.is_zero() => {
                let has_clock = self.looks.is_multiple_of(LOOKS);
                self.looks = self.looks.wrapping_add(1);
                has_clock && self.left(rest).is_zero()
            }
            rest => rest.is_some(),
        }
    }

    /// Returns the time until a turn is due, for a program that asks for `rest` now.
    fn left(&mut self, rest: Duration) -> Duration {
        let now = Instant::now();
        let end = now + rest.min(REST_MAX);
        let due = self.due.map_or(end, |due| due.min(end));
        self.due = Some(due);
        due.saturating_duration_since(now)
    }
}

impl<P: Program> FrameHandler for Hosted<P> {
    type Told = String;

    fn told(begin: &Begin, _: Option<&'static Tap>) -> Result<String> {
        anyhow::ensure!(
            begin.work == tasuki_relay::message::Work::Program,
            "node {} has a work that tasuki-worker does by itself; for a program of your own write work = {{ program = {{ path = … }} }} in its configuration",
            begin.node
        );
        if let Err(sentence) = P::new(&begin.options) {
            anyhow::bail!("the options of node {}: {sentence}", begin.node);
        }
        Ok(begin.options.clone())
    }

    fn new(options: &String) -> Self {
        const { assert!(size_of::<P::State>() <= STATE_MAX, "a program's state is longer than STATE_MAX") };
        const { assert!(P::STATE.0 != 0, "a program's state needs a number other than 0") };
        let program = P::new(options)
            .unwrap_or_else(|sentence| panic!("the program took its options once, and does not now: {sentence}"));
        let (state, before) = (P::State::new_zeroed(), P::State::new_zeroed());
        Hosted { program, state, before, kept: Burst::new(), ours: 0, count: 0, noted: None, due: None, looks: 0 }
    }

    fn may_go_on(program_state: &ProgramState, nic: u32, turns: Option<u64>, ring: u16) -> Result<(), Refused> {
        if ring < RING_MIN {
            return Err(Reason::ShortRing { has: ring.into(), needs: RING_MIN.into() }.into());
        }
        // While a predecessor writes there, the words may be of two turns, but they have one layout.
        let (written, _) = last(program_state, nic, turns).ok_or_else(|| no_room::<P>(nic))?;
        read::<P>(&written).map(drop)
    }

    fn go_on(&mut self, program_state: &ProgramState, nic: u32, turns: Option<u64>) -> Result<(), Refused> {
        let (written, count) = last(program_state, nic, turns).ok_or_else(|| no_room::<P>(nic))?;
        self.state = read::<P>(&written)?;
        (self.before, self.count, self.noted, self.due) = (self.state, count, None, None);
        self.kept.clear();
        Ok(())
    }

    #[inline]
    fn remember(&mut self, program_state: &ProgramState, nic: u32, turn: u64) {
        if self.noted != Some(turn) {
            self.count = self.count.wrapping_add(1);
            program_state.note(nic, turn, &self.written());
            self.noted = Some(turn);
            fail::point("state.written");
        }
        // The caller commits next, and makes no frames before that.
        self.kept.clear();
    }

    fn close(&self, program_state: &ProgramState, nic: u32) {
        (0..2).for_each(|copy| program_state.note(nic, copy, &self.written()));
    }

    #[inline]
    fn turn<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        self.work(nic, context, burst, Self::is_due)
    }

    fn finish<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        self.work(nic, context, burst, |_| false)
    }

    fn look<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<(), N::Fault> {
        if burst.is_empty() && self.receive(nic, context, burst, FIRST_LOOK)? > 0 {
            self.handle(nic, context, burst);
        }
        Ok(())
    }

    #[inline]
    fn send<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault> {
        if !nic.takes(burst) {
            return Ok(0);
        }
        self.remember(context.program_state, context.nic, nic.turns().wrapping_add(1));
        let went = nic.transmit(burst)?;
        context.heartbeat.add(heartbeat::SENT, went as u64);
        fail::point("burst.sent");
        Ok(went)
    }

    fn conclude<N: Transactional>(&mut self, nic: &mut N, burst: &Burst) {
        if burst.is_empty() {
            nic.conclude(burst);
        } else {
            // That turn does not happen; commit the state before it.
            nic.withdraw();
        }
    }

    fn drop_hand(&mut self, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        // The turn does not happen. Wipe the slots of our own: no driver knows of their contents.
        (self.state, self.noted) = (self.before, None);
        for (at, frame) in burst.iter_mut().enumerate() {
            if self.ours >> at & 1 == 1 {
                frame.slot.bytes_mut().fill(0);
            }
        }
        burst.clear();
    }

    fn rest(&mut self) -> Option<Duration> {
        // The first look after a sleep reads the clock.
        self.looks = 0;
        self.program.rest(&self.state).map(|rest| self.left(rest))
    }

    fn counts(&self) -> Vec<(String, u64)> {
        P::counts(&self.state)
    }
}

#[cfg(test)]
mod tests;
