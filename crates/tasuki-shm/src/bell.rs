//! A bell: how a process that waits is woken, for nothing when it does not sleep.
//!
//! Whoever waits publishes what it does: running, spinning, or parked. Whoever has put something into a ring looks at that
//! word and makes a system call only if the other is parked, and once per nap. The sleeping itself is done in a pipe's read
//! end, so that it sits in any epoll, and so that the death of the only writer wakes the sleeper as well (end of file).
//!
//! # Rules
//!
//! - **B1** A waiter that publishes *parked* looks at its rings once more before it sleeps.
//! - **B2** A ringer that has published an entry looks at the bell afterwards, with a full fence between.
//! - **B3** A bell is rung at most once per nap: naps are counted in the word.
//!
//! B1 and B2 are the two halves of **DEKKER**: each side stores, fences, and loads what the other stored, so at least one of
//! them sees the other. That is why no wake-up is lost.

use std::ops::Deref;

use crate::line::{Claims, Line};
use crate::sync::{Relaxed, SeqCst, fence};

/// What the owner of a bell does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Busy with something else. It will look at its rings before it parks.
    Running,
    /// Looking at its rings all the time.
    Spinning,
    /// Asleep, or about to be. Must be rung.
    Parked,
}

/// A CPU number that stands for "not known".
pub const NO_CPU: u32 = 0xff_ffff;

/// `naps: u32`, `cpu: u24`, `state: u8`.
fn encode(state: State, cpu: u32, naps: u32) -> u64 {
    let code = match state {
        State::Running => 0,
        State::Spinning => 1,
        State::Parked => 2,
    };
    u64::from(naps) << 32 | u64::from(cpu & NO_CPU) << 8 | code
}

/// What a peer says on its bell. An unknown state counts as running: a liar is not woken, and has only itself to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// What it does.
    pub state: State,
    /// On which CPU it did it last, or [`NO_CPU`].
    pub cpu: u32,
    /// How often it has parked.
    pub naps: u32,
}

impl Published {
    #[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
    #[inline]
    fn decode(word: u64) -> Self {
        let state = match word as u8 {
            1 => State::Spinning,
            2 => State::Parked,
            _ => State::Running,
        };
        Published { state, cpu: (word >> 8) as u32 & NO_CPU, naps: (word >> 32) as u32 }
    }
}

/// The waiter's side: publishes its state. `M` is a line of our own memory.
#[derive(Debug)]
pub struct Bell<M> {
    line: M,
    state: State,
    cpu: u32,
    naps: u32,
}

impl<M: Deref<Target = [Line]>> Bell<M> {
    /// A bell whose owner runs, on `cpu`. Its word is word 0 of line 0 of `line`.
    pub fn new(line: M, cpu: u32) -> Self {
        let mut bell = Bell { line, state: State::Running, cpu, naps: 0 };
        bell.publish(cpu);
        bell
    }

    /// The bell of a predecessor on the same line. Its naps go on being counted, for those who have rung for the last one.
    pub fn go_on(line: M, cpu: u32) -> Self {
        let naps = Published::decode(line[0].word(0).load(Relaxed)).naps;
        let mut bell = Bell { line, state: State::Running, cpu, naps };
        bell.publish(cpu);
        bell
    }

    fn publish(&mut self, cpu: u32) {
        self.cpu = cpu;
        self.line[0].word(0).store(encode(self.state, cpu, self.naps), Relaxed);
    }

    /// What was published last.
    pub fn state(&self) -> State {
        self.state
    }

    /// Says that we are awake. Free when that was said already.
    pub fn wake(&mut self, cpu: u32) {
        self.become_awake(State::Running, cpu);
    }

    /// Says that we look at our rings all the time. Free when that was said already.
    pub fn spin(&mut self, cpu: u32) {
        self.become_awake(State::Spinning, cpu);
    }

    fn become_awake(&mut self, state: State, cpu: u32) {
        if self.state != state || self.cpu != cpu {
            self.state = state;
            self.publish(cpu);
        }
    }

    /// Says that we are about to sleep. The caller looks at its rings once more before it does (B1).
    pub fn park(&mut self, cpu: u32) {
        self.state = State::Parked;
        self.naps = self.naps.wrapping_add(1);
        self.publish(cpu);
        // DEKKER: our word stands before we look at the rings again.
        fence(SeqCst);
    }
}

/// The other side: decides whether to ring. `P` is the memory that holds the peer's bell.
#[derive(Debug)]
pub struct Ringer<P> {
    claims: Claims<P>,
    rung: u32,
}

impl<P: Deref<Target = [Line]>> Ringer<P> {
    /// A ringer of the bell in word 0 of line 0 of `claims`.
    pub fn new(claims: Claims<P>) -> Self {
        Ringer { claims, rung: 0 }
    }

    /// Whether the peer must be rung now, after something was put into its ring (B2). Says yes once per nap (B3).
    #[inline]
    pub fn must_ring(&mut self) -> bool {
        // DEKKER: what we put into the ring stands before we look at the bell.
        fence(SeqCst);
        let peer = self.published();
        let asleep = peer.state == State::Parked && peer.naps != self.rung;
        if asleep {
            self.rung = peer.naps;
        }
        asleep
    }

    /// What the peer says.
    #[inline]
    pub fn published(&self) -> Published {
        Published::decode(self.claims.load(0, 0))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::Arc;

    type Memory = Arc<[Line]>;

    fn bell() -> (Bell<Memory>, Ringer<Memory>) {
        let line: Memory = Arc::new([Line::default()]);
        (Bell::new(Arc::clone(&line), NO_CPU), Ringer::new(Claims::of(line)))
    }

    #[test]
    fn only_the_parked_are_rung_and_once_per_nap() {
        let (mut bell, mut ringer) = bell();
        assert!(!ringer.must_ring(), "running");
        bell.spin(0);
        assert!(!ringer.must_ring(), "spinning");
        bell.park(1);
        assert!(ringer.must_ring());
        assert!(!ringer.must_ring(), "it is on its way already");
        bell.wake(0);
        assert!(!ringer.must_ring());
        bell.park(0);
        assert!(ringer.must_ring(), "a new nap");
    }

    #[test]
    fn what_is_published_is_what_is_read() {
        let (mut bell, ringer) = bell();
        bell.park(3);
        assert_eq!(ringer.published(), Published { state: State::Parked, cpu: 3, naps: 1 });
        bell.spin(NO_CPU);
        assert_eq!(ringer.published(), Published { state: State::Spinning, cpu: NO_CPU, naps: 1 });
    }

    #[test]
    fn any_word_of_a_peer_is_read_without_harm() {
        for word in [u64::MAX, 0, 3, 255, 1 << 63] {
            let _ = Published::decode(word);
        }
    }
}
