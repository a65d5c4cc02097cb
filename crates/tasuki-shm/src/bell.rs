//! A bell: wakes a waiting process, and costs no system call while that process is awake.
//!
//! A waiter publishes its state: running, spinning, or parked. A sender that has put an entry into a ring looks at
//! that word. It makes a system call only if the waiter is parked, and only once per nap. The waiter sleeps in the
//! read end of a pipe, so the bell fits into any epoll. The death of the only writer wakes the sleeper too (end of
//! file).
//!
//! # Rules
//!
//! - **B1** A waiter that publishes *parked* looks at its rings once more before it sleeps.
//! - **B2** A sender that has published an entry looks at the bell afterwards, with a full fence between.
//! - **B3** A sender rings a bell at most once per nap: the word counts the naps.
//!
//! B1 and B2 are the two halves of **DEKKER**: each side stores, fences, and loads the other's word, so at least one of
//! them sees the other. That is why no wake-up is lost.

use std::ops::Deref;

use crate::line::{Claims, Line};
use crate::sync::{Relaxed, SeqCst, fence};

/// State of a bell's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Busy with other work. The owner will look at its rings before it parks.
    Running,
    /// Polling its rings all the time.
    Spinning,
    /// Asleep, or about to sleep. A sender must ring.
    Parked,
}

/// The CPU number that means "not known".
pub const NO_CPU: u32 = 0xff_ffff;

/// Packs the word: `naps: u32`, `cpu: u24`, `state: u8`.
fn encode(state: State, cpu: u32, naps: u32) -> u64 {
    let code = match state {
        State::Running => 0,
        State::Spinning => 1,
        State::Parked => 2,
    };
    u64::from(naps) << 32 | u64::from(cpu & NO_CPU) << 8 | code
}

/// Contents of a peer's bell. An unknown state counts as running: a peer that lies is not woken, and harms only
/// itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// State of the peer.
    pub state: State,
    /// CPU on which the peer last published, or [`NO_CPU`].
    pub cpu: u32,
    /// How often the peer has parked.
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
    /// Creates a bell whose owner runs on `cpu`. Its word is word 0 of line 0 of `line`.
    pub fn new(line: M, cpu: u32) -> Self {
        let mut bell = Bell { line, state: State::Running, cpu, naps: 0 };
        bell.publish(cpu);
        bell
    }

    /// Takes over the bell of a predecessor on the same line. Continues its count of naps, for ringers that have
    /// rung for the last one.
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

    /// Returns the state published last.
    pub fn state(&self) -> State {
        self.state
    }

    /// Publishes that we are running. Stores nothing if the word already says so.
    pub fn wake(&mut self, cpu: u32) {
        self.become_awake(State::Running, cpu);
    }

    /// Publishes that we poll our rings. Stores nothing if the word already says so.
    pub fn spin(&mut self, cpu: u32) {
        self.become_awake(State::Spinning, cpu);
    }

    fn become_awake(&mut self, state: State, cpu: u32) {
        if self.state != state || self.cpu != cpu {
            self.state = state;
            self.publish(cpu);
        }
    }

    /// Publishes that we are about to sleep. The caller must look at its rings once more before it sleeps (B1).
    pub fn park(&mut self, cpu: u32) {
        self.state = State::Parked;
        self.naps = self.naps.wrapping_add(1);
        self.publish(cpu);
        // DEKKER: publish our word before we look at the rings again.
        fence(SeqCst);
    }
}

/// The sender's side: decides whether to ring. `P` is the memory that holds the peer's bell.
#[derive(Debug)]
pub struct PeerBell<P> {
    claims: Claims<P>,
    rung: u32,
}

impl<P: Deref<Target = [Line]>> PeerBell<P> {
    /// Opens the bell in word 0 of line 0 of `claims`.
    pub fn new(claims: Claims<P>) -> Self {
        PeerBell { claims, rung: 0 }
    }

    /// Whether the caller must ring the peer now, after putting an entry into its ring (B2). Returns true once per
    /// nap (B3).
    #[inline]
    pub fn must_ring(&mut self) -> bool {
        // DEKKER: publish our entry in the ring before we look at the bell.
        fence(SeqCst);
        let peer = self.published();
        let asleep = peer.state == State::Parked && peer.naps != self.rung;
        if asleep {
            self.rung = peer.naps;
        }
        asleep
    }

    /// Returns the state that the peer published last.
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

    fn bell() -> (Bell<Memory>, PeerBell<Memory>) {
        let line: Memory = Arc::new([Line::default()]);
        (Bell::new(Arc::clone(&line), NO_CPU), PeerBell::new(Claims::of(line)))
    }

    #[test]
    fn only_the_parked_are_rung_and_once_per_nap() {
        let (mut bell, mut peer_bell) = bell();
        assert!(!peer_bell.must_ring(), "running");
        bell.spin(0);
        assert!(!peer_bell.must_ring(), "spinning");
        bell.park(1);
        assert!(peer_bell.must_ring());
        assert!(!peer_bell.must_ring(), "it is on its way already");
        bell.wake(0);
        assert!(!peer_bell.must_ring());
        bell.park(0);
        assert!(peer_bell.must_ring(), "a new nap");
    }

    #[test]
    fn what_is_published_is_what_is_read() {
        let (mut bell, peer_bell) = bell();
        bell.park(3);
        assert_eq!(peer_bell.published(), Published { state: State::Parked, cpu: 3, naps: 1 });
        bell.spin(NO_CPU);
        assert_eq!(peer_bell.published(), Published { state: State::Spinning, cpu: NO_CPU, naps: 1 });
    }

    #[test]
    fn any_word_of_a_peer_is_read_without_harm() {
        for word in [u64::MAX, 0, 3, 255, 1 << 63] {
            let _ = Published::decode(word);
        }
    }
}
