#![doc = include_str!("../README.md")]
// Under loom `tasuki_shm` has only the parts that its models run.
#![cfg(not(loom))]

mod client;
mod enforce;
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

use tasuki_shm::arena::WrongLoan;
pub use tasuki_shm::arena::{Detach, Geometry, PeerSlot, Slot};
use tasuki_shm::region::RegionError;
use tasuki_shm::ring::Broken;
use tasuki_shm::slots::WrongSlot;

pub use client::{Armed, Client, ClientOptions, ConnectError, Ticket};
pub use enforce::EnforceError;
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

/// All crash points of a call ([`tasuki_shm::crash`]), in the order in which a call passes them.
#[doc(hidden)]
pub const CRASH_POINTS: &[&str] = &[
    "client.connected",
    "client.send.taken",
    "client.send.detached",
    "client.send.pushed",
    "client.send.rung",
    "client.wait.parked",
    "client.return.attached",
    "server.accept.hello",
    "server.accept.welcomed",
    "server.serve.popped",
    "server.serve.begun",
    "server.serve.protected",
    "server.return.lent",
    "server.return.pushed",
    "server.return.rung",
    "server.park.parked",
    "giver.passed",
    "giver.released",
    "taker.taken",
    "taker.told",
];

/// Status of a request that the server's handler dropped without an answer.
pub const STATUS_DROPPED: u16 = u16::MAX;

/// Status of a request whose answer did not fit into a reply slot, or found no free one.
pub const STATUS_REPLY_TOO_LARGE: u16 = u16::MAX - 1;

/// The contents of a request.
#[derive(Debug)]
pub(crate) enum Payload<'a> {
    Bytes(&'a [u8]),
    Slot { slot: Slot, len: usize },
}

/// A request that the caller has not yet made.
#[derive(Debug)]
#[must_use = "an Ask does nothing until it is called or submitted"]
pub struct Ask<'a> {
    pub(crate) method: u16,
    pub(crate) payload: Payload<'a>,
    pub(crate) idempotent: bool,
}

impl<'a> Ask<'a> {
    /// Creates a request for `method` with `bytes`. Up to [`INLINE_MAX`] bytes travel in the ring; longer requests
    /// are copied into a slot.
    pub fn new(method: impl Into<u16>, bytes: &'a [u8]) -> Self {
        Ask { method: method.into(), payload: Payload::Bytes(bytes), idempotent: false }
    }

    /// Creates a request for `method` with the first `len` bytes of `slot`, which moves to the server.
    pub fn with_slot(method: impl Into<u16>, slot: Slot, len: usize) -> Self {
        Ask { method: method.into(), payload: Payload::Slot { slot, len }, idempotent: false }
    }

    /// Turns a request that is not made into a failure that returns its slot.
    pub(crate) fn refused(self, why: CallError) -> Failure {
        let slot = match self.payload {
            Payload::Slot { slot, .. } => Some(slot),
            Payload::Bytes(_) => None,
        };
        Failure { why, slot }
    }

    /// Declares that running the request twice does no harm. If the server is replaced while it runs the request,
    /// the client sends it again.
    pub fn idempotent(mut self) -> Self {
        self.idempotent = true;
        self
    }
}

/// Limit of a wait.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Limit);

/// Returns a time that can be added to the present one: a longer one than a year is none that ends.
pub(crate) fn bounded(time: Duration) -> Duration {
    time.min(Duration::from_secs(365 * 24 * 3600))
}

#[derive(Debug, Clone, Copy)]
enum Limit {
    Never,
    At(Instant),
    Within(Duration),
}

impl Deadline {
    /// No limit. The death of the server still ends the wait.
    pub const NEVER: Deadline = Deadline(Limit::Never);

    /// Limits the wait to `limit`, counted from its start. Reads the clock only if the caller has to wait.
    pub fn within(limit: Duration) -> Self {
        Deadline(Limit::Within(limit))
    }

    /// Ends the wait at `instant`.
    pub fn at(instant: Instant) -> Self {
        Deadline(Limit::At(instant))
    }

    /// Reads the clock if it must, and returns the instant at which the wait ends, or `None` for no limit.
    pub(crate) fn fixed(self) -> Option<Instant> {
        match self.0 {
            Limit::Never => None,
            Limit::At(instant) => Some(instant),
            Limit::Within(limit) => Instant::now().checked_add(limit),
        }
    }
}

/// The reply to a call.
#[derive(Debug)]
pub struct Reply {
    pub(crate) body: Body,
    pub(crate) returned: Option<Slot>,
}

/// The place of a request's or a reply's bytes.
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
    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.body.len()
    }

    /// Whether the reply has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a private copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.body.to_vec()
    }

    /// Copies the first bytes into `into`, as many as exist and fit. Returns the number copied.
    #[inline]
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        self.body.copy_to(into)
    }

    /// Returns the bytes, if they came inside the ring entry.
    #[inline]
    pub fn inline(&self) -> Option<&[u8]> {
        self.body.inline()
    }

    /// Returns the server's slot that the reply came in, if it came in one. The slot goes back to the server some
    /// time after the reply is dropped.
    #[inline]
    pub fn slot(&self) -> Option<&PeerSlot> {
        self.body.slot()
    }

    /// Returns the slot that the request travelled in, with its bytes unchanged.
    pub fn into_returned(self) -> Option<Slot> {
        self.returned
    }
}

/// An error with which the server itself answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Status from the server's list of errors; never 0.
    pub status: u16,
    /// The server's explanation, usually UTF-8 text.
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
    /// A rule of the ring.
    #[error(transparent)]
    Ring(#[from] Broken),
    /// A rule about a slot of ours that the peer sent back.
    #[error(transparent)]
    Slot(#[from] WrongSlot),
    /// A rule about a slot of the peer's own that it sent.
    #[error(transparent)]
    Loan(#[from] WrongLoan),
    /// The format of a message.
    #[error(transparent)]
    Message(#[from] NoSuchMessage),
    /// The rule that a call has one id.
    #[error(transparent)]
    Call(#[from] NoSuchCall),
    /// The peer's arena is no longer write-protected.
    #[error("the peer took its arena out of the detach that it had agreed to")]
    Detach,
}

impl Breach {
    /// Returns the code that a server writes as its verdict.
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

/// The rule whose breach made the server close a connection, as the server's verdict gives it.
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

/// Reasons why a call has no reply.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The ring holds no more calls in flight. Collect results, or connect with a larger ring.
    #[error(
        "{capacity} calls are in flight, as many as the ring holds; collect results first, or connect with a larger ring"
    )]
    Full {
        /// Number of entries in the ring.
        capacity: u32,
    },
    /// The request is larger than a slot.
    #[error("the request has {len} bytes, but a slot holds {max}; send it in parts, or connect with larger slots")]
    TooLarge {
        /// Length of the request in bytes.
        len: usize,
        /// Bytes in a slot.
        max: usize,
    },
    /// Every slot is in use.
    #[error("all {count} slots of the arena are in use; drop some, collect results, or connect with more slots")]
    NoSlot {
        /// Number of slots in the arena.
        count: u32,
    },
    /// The slot belongs to another client.
    #[error("the slot belongs to another client's arena; take it from the client that sends it")]
    ForeignSlot,
    /// The ticket names no call of this client that has a result to come.
    #[error(
        "the ticket is another client's, or its result was fetched before; wait with the client that made the call, once"
    )]
    NoSuchTicket,
    /// The deadline passed. The call may still run; the client discards its result, and its slot comes back by
    /// itself.
    #[error("no answer before the deadline; the call may still run, and its result will be thrown away")]
    DeadlinePassed,
    /// The server refused the request.
    #[error("{0}")]
    Refused(Refused),
    /// The server died or closed, and no other server has taken its place, or this client could not connect to it.
    #[error("the server (generation {generation}) is gone{}", succession(why.as_deref()))]
    ServerGone {
        /// Generation of that server in the sequence of servers.
        generation: u32,
        /// Why this client could not connect to the next server, if there is one.
        why: Option<Arc<ConnectError>>,
    },
    /// The server began the call, and another server replaced it before it answered. The call may have run. Ask the
    /// new server, or declare such calls idempotent.
    #[error(
        "the server (generation {generation}) was replaced while it ran the call; whether it took effect is not known: check, then retry"
    )]
    Retry {
        /// Generation of the server that had begun the call.
        generation: u32,
    },
    /// The server closed the connection because this side broke a rule. This is a bug on this side.
    #[error("the server closed the connection, because this client broke {0}")]
    Expelled(Verdict),
    /// The server broke a rule. The connection is closed.
    #[error("the connection is closed: {0}")]
    Broken(Breach),
    /// The kernel refused to detach the slot from this process.
    #[error("the slot could not be detached: {0}")]
    Detach(Arc<RegionError>),
    /// The kernel refused the wait for the server, for example because this process has no descriptor left. The call may
    /// have run.
    #[error("the kernel refused to wait for the server: {0}; the call may have run")]
    Kernel(Arc<std::io::Error>),
}

/// Says why this client has no successor of a lost server, and what to do.
fn succession(why: Option<&ConnectError>) -> String {
    match why {
        None => " and has no successor; start one, then reconnect".into(),
        Some(why) => {
            format!(", and this client could not connect to its successor ({why}); mend that, then reconnect")
        }
    }
}

/// A call without a reply. It returns the slot that the request was to travel in, or has travelled in, if that slot
/// is back.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Failure {
    /// Reason of the failure.
    pub why: CallError,
    /// Slot of the request, with its bytes unchanged.
    pub slot: Option<Slot>,
}

impl From<CallError> for Failure {
    fn from(why: CallError) -> Self {
        Failure { why, slot: None }
    }
}
