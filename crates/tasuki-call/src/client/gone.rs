//! How a client handles the loss of its server: its calls end, or continue with the successor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_shm::ring::Message;

use super::{Client, ConnectError};
use crate::pending::{InFlight, Outcome};
use crate::{Breach, CallError, Failure, Refusal, Verdict};

/// Pause between two attempts while memory, descriptors or room for clients are short: no event says that they are there
/// again.
const RETRY_EVERY: Duration = Duration::from_millis(10);

/// Calls of a lost server whose successor has not answered yet.
#[derive(Debug)]
pub(super) struct Orphaned {
    generation: u32,
    /// Index in the request ring of the first request that the dead server had not begun.
    begun: u32,
    unbegun: Vec<Message>,
    /// Time of the next attempt to connect to a successor.
    next: Instant,
    /// Time at which we give up the search for one.
    until: Instant,
}

impl Client {
    /// Ends the connection and every call, because the server broke a rule.
    pub(super) fn broken(&mut self, breach: Breach) -> CallError {
        let why = CallError::Broken(breach);
        self.end(&why);
        why
    }

    /// Fails every call with `why` and takes back every slot: there is no server any more.
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

    /// Handles the loss of the server. Keeps the answers that it gave; its successor, if there is one, gets the
    /// other calls.
    pub(super) fn lost(&mut self, patience: Duration) {
        if self.gather().is_err() {
            return;
        }
        let Ok(link) = &mut self.link else { return };
        let generation = link.generation;
        if let verdict @ 1.. = link.verdict.load(0, 1) {
            return self.end(&CallError::Expelled(Verdict(verdict)));
        }
        // The server has begun the requests that it retired, and has never looked at the rest.
        let (begun, unbegun) = match link.requests.look() {
            Ok(begun) => (begun, link.requests.unretired()),
            Err(broken) => return self.end(&CallError::Broken(broken.into())),
        };
        self.link = Err(CallError::ServerGone { generation, why: None });
        let next = Instant::now();
        let until = next + self.options.handshake;
        self.orphaned = Some(Orphaned { generation, begun, unbegun, next, until });
        self.find_successor(patience);
    }

    /// Returns how long a handshake may take in a wait that ends at `until`.
    pub(super) fn patience(&self, until: Option<Instant>) -> Duration {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(self.options.handshake, |left| left.min(self.options.handshake))
    }

    /// Continues the calls of a lost server with its successor. If the successor does not answer within the caller's
    /// patience, or either side is short of memory, descriptors or room for so long, the next caller asks again.
    pub(crate) fn find_successor(&mut self, patience: Duration) {
        let Some(mut orphaned) = self.orphaned.take() else { return };
        let until = orphaned.until.min(Instant::now() + patience);
        let error = loop {
            let next = orphaned.next.min(orphaned.until);
            std::thread::sleep(next.min(until).saturating_duration_since(Instant::now()));
            if until < next {
                self.orphaned = Some(orphaned);
                return;
            }
            match self.establish(Some(self.service), until.saturating_duration_since(Instant::now())) {
                Ok(()) => return self.carry_over(orphaned.generation, orphaned.begun, &orphaned.unbegun),
                Err(error) if error.may_pass() && Instant::now() < orphaned.until => {
                    orphaned.next = Instant::now() + RETRY_EVERY;
                }
                Err(ConnectError::Silent { .. }) if Instant::now() < orphaned.until => {
                    self.orphaned = Some(orphaned);
                    return;
                }
                Err(error) => break error,
            }
        };
        let why = match error {
            ConnectError::NoServer { .. }
            | ConnectError::NoSocket { .. }
            | ConnectError::Refused(Refusal::OtherService) => None,
            // The last attempt may have been short.
            ConnectError::Silent { path, .. } => {
                Some(Arc::new(ConnectError::Silent { path, limit: self.options.handshake }))
            }
            error => Some(Arc::new(error)),
        };
        self.end(&CallError::ServerGone { generation: orphaned.generation, why });
    }

    /// Sends the successor the calls that the server `generation` had not begun, and begun calls that may run twice.
    /// The server had begun all calls before index `begun`.
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
