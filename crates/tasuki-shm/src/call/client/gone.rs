//! What a client does when its server is gone: its calls end, or go on with the successor.

use std::time::{Duration, Instant};

use super::{Client, ConnectError, Count};
use crate::call::pending::{InFlight, Outcome};
use crate::call::{Breach, CallError, Failure, Verdict};
use crate::ring::Message;

/// What a server left behind, while its successor has not answered.
#[derive(Debug)]
pub(super) struct Orphaned {
    generation: u32,
    /// What the dead server had begun ends here in the request ring.
    begun: u32,
    unbegun: Vec<Message>,
    /// When it is given up.
    until: Instant,
}

impl Client {
    /// The server broke a rule: the connection is over, and every call with it.
    pub(super) fn broken(&mut self, breach: Breach) -> CallError {
        let why = CallError::Broken(breach);
        self.end(&why);
        why
    }

    /// There is no server any more: every call fails with `why`, and every slot is back.
    fn end(&mut self, why: &CallError) {
        self.link = Err(why.clone());
        self.greeting = None;
        for (call, in_flight) in self.pending.in_flight() {
            let slot = in_flight.slot.and_then(|lent| self.arena.attach(lent).ok());
            self.finish(call, Err(Failure { why: why.clone(), slot }));
        }
        self.arena.reclaim();
    }

    fn finish(&mut self, call: u64, outcome: Outcome) {
        self.pending.finish(call, outcome).expect("a call that Pending listed is in flight");
    }

    /// The server is gone. What it has answered counts; then its successor, if there is one, gets the rest.
    pub(super) fn lost(&mut self, patience: Duration) {
        if self.gather().is_err() {
            return;
        }
        let Ok(link) = &mut self.link else { return };
        let generation = link.generation;
        if let verdict @ 1.. = link.verdict.load(0, 1) {
            return self.end(&CallError::Expelled(Verdict(verdict)));
        }
        // What the server has retired it has begun; the rest it has never looked at.
        let (begun, unbegun) = match link.requests.look() {
            Ok(begun) => (begun, link.requests.unretired()),
            Err(broken) => return self.end(&CallError::Broken(broken.into())),
        };
        self.link = Err(CallError::ServerGone { generation });
        let until = Instant::now() + self.options.handshake;
        self.orphaned = Some(Orphaned { generation, begun, unbegun, until });
        self.find_successor(patience);
    }

    /// How long a handshake may take in a wait that ends at `until`.
    pub(super) fn patience(&self, until: Option<Instant>) -> Duration {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(self.options.handshake, |left| left.min(self.options.handshake))
    }

    /// Has the calls of a server that is gone go on with the one that follows it. If that one does not answer while the
    /// caller's patience lasts, the next caller goes on asking.
    pub(in crate::call) fn find_successor(&mut self, patience: Duration) {
        let Some(orphaned) = self.orphaned.take() else { return };
        let left = orphaned.until.saturating_duration_since(Instant::now());
        match self.establish(Some(self.service), patience.min(left)) {
            Ok(()) => {
                self.counters.add(Count::Reconnects as usize, 1);
                self.carry_over(orphaned.generation, orphaned.begun, &orphaned.unbegun);
            }
            Err(ConnectError::Silent { .. }) if Instant::now() < orphaned.until => self.orphaned = Some(orphaned),
            Err(_) => self.end(&CallError::ServerGone { generation: orphaned.generation }),
        }
    }

    /// Sends the successor what the server `generation` has not begun (all before `begun` it has), and what may run twice.
    fn carry_over(&mut self, generation: u32, begun: u32, unbegun: &[Message]) {
        let mut calls = self.pending.in_flight();
        calls.sort_by_key(|(_, call)| call.index.wrapping_sub(begun).cast_signed());
        for (call, InFlight { slot, index, again }) in calls {
            let age = index.wrapping_sub(begun).cast_signed();
            let message = match usize::try_from(age) {
                Ok(position) => unbegun.get(position).copied(),
                Err(_) => again,
            };
            match message {
                Some(message) => {
                    let index = self.put(&message);
                    self.pending.moved(call, index);
                }
                None => {
                    let slot = slot.and_then(|lent| self.arena.attach(lent).ok());
                    self.finish(call, Err(Failure { why: CallError::Retry { generation }, slot }));
                }
            }
        }
        self.flush();
    }
}
