//! Calls: request and response between processes, through memory alone.
//!
//! A [`Server`] binds a path; a [`Client`] connects to it once, over a unix socket, and from then on the two talk through two
//! rings and two arenas, each written by one of them. Small requests travel inside a ring entry; larger ones in a slot, which
//! moves to the server and comes back with the reply. docs/design/call.md has the protocol and what it promises.

mod client;
mod message;
mod pending;
mod segment;
mod server;
mod session;
mod state;
mod successor;
#[cfg(feature = "tokio")]
mod tasks;
mod wire;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use client::{Armed, Client, ClientOptions, ConnectError, Ticket};
pub use message::{INLINE_MAX, Inline, NoSuchMessage};
pub use pending::NoSuchCall;
pub use segment::SegmentError;
pub use server::{BindError, Peers, Server, ServerError, ServerOptions, Tally, Turn};
pub use session::{ClientId, Deferred, ReplyTooLarge, Request};
pub use state::{State, StateError};
pub use successor::{SucceedError, Successor};
#[cfg(feature = "tokio")]
pub use tasks::AsyncClient;
pub use wire::{Malformed, Refusal, Service, VERSION};

use crate::arena::{PeerSlot, Slot, WrongLoan};
use crate::region::RegionError;
use crate::ring::Broken;
use crate::slots::WrongSlot;

/// The status of a request that the server's handler let go without an answer.
pub const STATUS_DROPPED: u16 = u16::MAX;

/// The status of a request whose answer did not fit into a slot, or found none free.
pub const STATUS_REPLY_TOO_LARGE: u16 = u16::MAX - 1;

/// What a request carries to the server.
#[derive(Debug)]
pub(crate) enum Payload<'a> {
    Bytes(&'a [u8]),
    Slot { slot: Slot, len: usize },
}

/// A request to be made.
#[derive(Debug)]
#[must_use = "an Ask does nothing until it is called or submitted"]
pub struct Ask<'a> {
    pub(crate) method: u16,
    pub(crate) payload: Payload<'a>,
    pub(crate) idempotent: bool,
}

impl<'a> Ask<'a> {
    /// Asks for `method` with `bytes`: up to [`INLINE_MAX`] travel in the ring, more are copied into a slot.
    pub fn new(method: impl Into<u16>, bytes: &'a [u8]) -> Self {
        Ask { method: method.into(), payload: Payload::Bytes(bytes), idempotent: false }
    }

    /// Asks for `method` with the first `len` bytes of `slot`, which moves to the server.
    pub fn with_slot(method: impl Into<u16>, slot: Slot, len: usize) -> Self {
        Ask { method: method.into(), payload: Payload::Slot { slot, len }, idempotent: false }
    }

    /// It is not made; its slot goes back.
    pub(crate) fn refused(self, why: CallError) -> Failure {
        let slot = match self.payload {
            Payload::Slot { slot, .. } => Some(slot),
            Payload::Bytes(_) => None,
        };
        Failure { why, slot }
    }

    /// Says that running it twice does no harm: it is sent again when the server is replaced while it runs.
    pub fn idempotent(mut self) -> Self {
        self.idempotent = true;
        self
    }
}

/// How long to wait.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Limit);

#[derive(Debug, Clone, Copy)]
enum Limit {
    Never,
    At(Instant),
    Within(Duration),
}

impl Deadline {
    /// As long as it takes. The death of the server still ends the wait.
    pub const NEVER: Deadline = Deadline(Limit::Never);

    /// Not longer than `limit`, counted from when the wait begins. Costs no look at the clock unless it comes to waiting.
    pub fn within(limit: Duration) -> Self {
        Deadline(Limit::Within(limit))
    }

    /// Not after `instant`.
    pub fn at(instant: Instant) -> Self {
        Deadline(Limit::At(instant))
    }

    /// The same with the clock looked at.
    pub(crate) fn fixed(self) -> Option<Instant> {
        match self.0 {
            Limit::Never => None,
            Limit::At(instant) => Some(instant),
            Limit::Within(limit) => Instant::now().checked_add(limit),
        }
    }
}

/// What came back.
#[derive(Debug)]
pub struct Reply {
    pub(crate) body: Body,
    pub(crate) returned: Option<Slot>,
}

/// Where the bytes of a request or a reply are.
#[derive(Debug)]
pub(crate) enum Body {
    Inline(Inline),
    Slot(PeerSlot),
}

impl Body {
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Body::Inline(inline) => inline.bytes().len(),
            Body::Slot(slot) => slot.len(),
        }
    }

    #[inline]
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        match self {
            Body::Inline(inline) => {
                let len = inline.bytes().len().min(into.len());
                into[..len].copy_from_slice(&inline.bytes()[..len]);
                len
            }
            Body::Slot(slot) => slot.copy_to(into),
        }
    }

    pub fn to_vec(&self) -> Vec<u8> {
        match self {
            Body::Inline(inline) => inline.bytes().to_vec(),
            Body::Slot(slot) => slot.to_vec(),
        }
    }

    #[inline]
    pub fn inline(&self) -> Option<&[u8]> {
        match self {
            Body::Inline(inline) => Some(inline.bytes()),
            Body::Slot(_) => None,
        }
    }

    #[inline]
    pub fn slot(&self) -> Option<&PeerSlot> {
        match self {
            Body::Inline(_) => None,
            Body::Slot(slot) => Some(slot),
        }
    }
}

impl Reply {
    /// Bytes in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.body.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A private copy of its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.body.to_vec()
    }

    /// Copies its first bytes, as many as there are and fit; says how many.
    #[inline]
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        self.body.copy_to(into)
    }

    /// Its bytes, if they came inside the ring entry.
    #[inline]
    pub fn inline(&self) -> Option<&[u8]> {
        self.body.inline()
    }

    /// The server's slot that it came in, if it did. The slot goes back to the server some time after the reply is dropped.
    #[inline]
    pub fn slot(&self) -> Option<&PeerSlot> {
        self.body.slot()
    }

    /// The slot that the request travelled in, with its bytes as they were.
    pub fn into_returned(self) -> Option<Slot> {
        self.returned
    }
}

/// The server answered with an error of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// From the server's list of errors; never 0.
    pub status: u16,
    /// What the server says about it.
    pub note: Inline,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.status {
            STATUS_DROPPED => write!(f, "the server let the request go without an answer"),
            STATUS_REPLY_TOO_LARGE => write!(f, "the server's answer found no slot that it fits into"),
            status => write!(f, "the server refused with status {status}"),
        }?;
        match std::str::from_utf8(self.note.bytes()) {
            Ok("") | Err(_) => Ok(()),
            Ok(note) => write!(f, ": {note}"),
        }
    }
}

/// A rule of the protocol that the peer broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// Of the ring.
    #[error(transparent)]
    Ring(#[from] Broken),
    /// About a slot of ours that it sent back.
    #[error(transparent)]
    Slot(#[from] WrongSlot),
    /// About a slot of its own that it sent.
    #[error(transparent)]
    Loan(#[from] WrongLoan),
    /// In a message.
    #[error(transparent)]
    Message(#[from] NoSuchMessage),
    /// In a call's id.
    #[error(transparent)]
    Call(#[from] NoSuchCall),
    /// Its arena is not write-protected any more.
    #[error("the peer took its arena out of the detach that it had agreed to")]
    Detach,
}

impl Breach {
    /// What a server writes as its verdict.
    pub(crate) fn code(self) -> u64 {
        match self {
            Breach::Ring(_) => 1,
            Breach::Slot(_) => 2,
            Breach::Loan(_) => 3,
            Breach::Message(_) => 4,
            Breach::Call(_) => 5,
            Breach::Detach => 6,
        }
    }
}

/// The rule whose breach made the server close a connection, as the server's verdict names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict(pub(crate) u64);

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            1 => "a ring rule (R2 or R4)",
            2 => "a slot rule about a slot it returned",
            3 => "a slot rule about a slot it sent",
            4 => "the list of messages",
            5 => "the rule that a call has one id",
            6 => "the detach it had agreed to",
            _ => "a rule that this version does not know",
        })
    }
}

/// Why a call has no reply.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// As many calls are in flight as the ring holds. Collect results, or connect with a larger ring.
    #[error(
        "{capacity} calls are in flight, as many as the ring holds; collect results first, or connect with a larger ring"
    )]
    Full {
        /// Entries in the ring.
        capacity: u32,
    },
    /// The request fits into no slot.
    #[error("the request has {len} bytes, but a slot holds {max}; send it in parts, or connect with larger slots")]
    TooLarge {
        /// Bytes of the request.
        len: usize,
        /// Bytes in a slot.
        max: usize,
    },
    /// Every slot is in use.
    #[error("all {count} slots of the arena are in use; drop some, collect results, or connect with more slots")]
    NoSlot {
        /// Slots in the arena.
        count: u32,
    },
    /// The slot is another client's.
    #[error("the slot belongs to another client's arena; take it from the client that sends it")]
    ForeignSlot,
    /// The time is up. The call may still run; its result is thrown away and its slot comes back by itself.
    #[error("no answer before the deadline; the call may still run, and its result will be thrown away")]
    DeadlinePassed,
    /// The server refused.
    #[error("{0}")]
    Refused(Refused),
    /// The server died or closed, and nobody has taken its place.
    #[error("the server (generation {generation}) is gone and has no successor; start one, then reconnect")]
    ServerGone {
        /// Which of the servers that follow each other it was.
        generation: u32,
    },
    /// The server was replaced after it had begun the call and before it answered: it may have run. Ask the new server, or
    /// declare such calls idempotent.
    #[error(
        "the server (generation {generation}) was replaced while it ran the call; whether it took effect is not known: check, then retry"
    )]
    Retry {
        /// The server that had begun it.
        generation: u32,
    },
    /// The server closed the connection because this side broke a rule. That is a bug on this side.
    #[error("the server closed the connection, because this client broke {0}")]
    Expelled(Verdict),
    /// The server broke a rule. The connection is closed.
    #[error("the connection is closed: {0}")]
    Broken(Breach),
    /// The kernel refused to take the slot away from this process.
    #[error("the slot could not be detached: {0}")]
    Detach(Arc<RegionError>),
    /// The kernel refused to let this process sleep.
    #[error("the kernel refused to wait for the server: {0}")]
    Kernel(Arc<std::io::Error>),
}

/// A call that has no reply, and the slot that it was to travel in or has travelled in, if that is back.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Failure {
    /// Why.
    pub why: CallError,
    /// The request's slot, with its bytes as they were.
    pub slot: Option<Slot>,
}

impl From<CallError> for Failure {
    fn from(why: CallError) -> Self {
        Failure { why, slot: None }
    }
}
