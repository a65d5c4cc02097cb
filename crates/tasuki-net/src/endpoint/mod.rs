//! An endpoint: where a node's programs receive and send. A [`Bridge`] joins it to the node's end of a VNI.
//!
//! | module     | contents                                                                   |
//! |------------|----------------------------------------------------------------------------|
//! | [`tap`]    | a network namespace, by a TAP                                              |
//! | [`memif`]  | a DPDK or VPP program, by a memif                                          |
//! | [`guest`]  | a virtual machine, by vhost-user                                           |
//! | [`packet`] | a Linux interface, by a packet socket                                      |
//! | [`bridge`] | moves frames between an endpoint and a VNI                                 |
//! | [`egress`] | sends frames to their nodes: the one policy for room, waiting and drops    |
//! | `gather`   | lets frames gather where many come                                         |
//! | `notes`    | frames that were read from an endpoint that forgets them, for a successor  |
//! | `slow`     | nodes that have no room, and for how long a frame waits for one            |
//!
//! A killed worker loses no frame, because the receiver of a frame commits first: a frame that comes from an endpoint is
//! published in the VNI before [`Endpoint::commit`]; a frame that goes to an endpoint is [shown](Endpoint::show) before
//! its sender has it back. docs/decisions/0021-one-endpoint.md has the table of what commits what.

pub mod bridge;
pub mod egress;
mod gather;
pub mod guest;
mod listener;
pub mod memif;
pub(crate) mod notes;
pub mod packet;
pub mod rate;
mod slow;
pub mod tap;

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_shm::line::Line;
use tasuki_shm::region::Span;

use crate::port::Armed;
use crate::switch::CheckedPrefix;
use crate::vni::Incoming;
pub use crate::vni::ledger::{MARKS_MAX, Marks};
pub use bridge::Bridge;
pub use egress::Egress;
pub use gather::LATENCY;

/// Counts of the frames that did not cross, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// The endpoint did not take the frame: its interface is down, or it has no memory. Beside a veth end, the TAP takes
    /// each, and the kernel may drop it later.
    pub refused: u64,
    /// No program was connected to the endpoint.
    pub away: u64,
    /// The program had posted no buffers for the frame, or the kernel keeps no more for the card behind an interface.
    pub no_buffer: u64,
    /// No slot, or no chain of the program's buffers, holds the frame.
    pub too_long: u64,
    /// The frame contradicts its offload header.
    pub malformed: u64,
    /// The sender took the frame back before it was copied.
    pub too_late: u64,
    /// A node sent the frame from an address that is not its own.
    pub forged: u64,
    /// Frame of this node: its destination had no room.
    pub no_room: u64,
    /// Frame of this node: no node has the destination address.
    pub nobody: u64,
    /// Frame of this node: no frame has this length.
    pub length: u64,
    /// Frame of this node: its source address is not this node's.
    pub not_own: u64,
    /// Frame for this node: more than the node may [receive](rate::Rates).
    pub over_rate: u64,
    /// Frame of this node: the kernel kept no more for the worker.
    pub by_socket: u64,
}

impl Dropped {
    /// Returns the sum of all counts.
    pub fn sum(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    /// Returns each count with its name.
    pub fn counts(&self) -> [(&'static str, u64); 13] {
        let Dropped {
            refused,
            away,
            no_buffer,
            too_long,
            malformed,
            too_late,
            forged,
            no_room,
            nobody,
            length,
            not_own,
            over_rate,
            by_socket,
        } = *self;
        [
            ("dropped_refused", refused),
            ("dropped_away", away),
            ("dropped_no_buffer", no_buffer),
            ("dropped_too_long", too_long),
            ("dropped_malformed", malformed),
            ("dropped_too_late", too_late),
            ("dropped_forged", forged),
            ("dropped_no_room", no_room),
            ("dropped_nobody", nobody),
            ("dropped_length", length),
            ("dropped_not_own", not_own),
            ("dropped_over_rate", over_rate),
            ("dropped_by_socket", by_socket),
        ]
    }
}

/// What a successor goes by, if a worker is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// A frame is gone from the endpoint once it is read, as from a file descriptor. The bridge notes the frames that it
    /// has read and not published, and a successor sends them. Frames given may come twice: up to a burst.
    Notes,
    /// The endpoint notes its own place. Frames that were delivered and not yet retired come twice: up to a burst each way.
    Own,
    /// The bridge commits each turn as a whole, with the endpoint's [marks](Endpoint::marks): each frame goes exactly once.
    Exact,
}

/// Returns whether something can be read from a descriptor now.
fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&at_once)) == Ok(1)
}

/// What became of a frame that an endpoint was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// The endpoint is done with it, and it became this many frames: none, if it was dropped and counted.
    Taken(usize),
    /// There is no room for it at present.
    NoRoom,
    /// This turn has no room for it, and the next one has.
    Later,
}

/// Where a node's programs receive and send frames. One thread uses it.
///
/// A turn of its [`Bridge`] calls, in this order: [`attend`](Self::attend); for each frame from the VNI
/// [`give`](Self::give), then [`show`](Self::show) and [`ring`](Self::ring); [`take`](Self::take); and, once the frames
/// taken are published, [`commit`](Self::commit). A turn that is committed as a whole calls [`note`](Self::note) before, and
/// neither `show` nor `ring`.
pub trait Endpoint: fmt::Debug {
    /// Returns what a successor goes by.
    fn recovery(&self) -> Recovery;

    /// Copies a frame in, with the bytes `front` at its beginning, which were checked. Counts a frame that it drops.
    fn give(&mut self, frame: &Incoming<'_>, front: &CheckedPrefix, dropped: &mut Dropped) -> Given;

    /// Hears that the frame for which it had no room last has waited long enough, and is dropped.
    fn gave_up(&mut self) {}

    /// Sends the frames that the programs have for others, up to a burst, until one must wait. Returns their number.
    fn take(&mut self, egress: &mut Egress<'_>) -> usize;

    /// Sends what it keeps of frames that it has taken, before a handover. Returns false if some must wait.
    fn send_rest(&mut self, _egress: &mut Egress<'_>) -> bool {
        true
    }

    /// Returns the descriptor that becomes readable when the programs send, or `None` if they are gone for good.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// Returns whether a frame of the programs lies there, if that can be told without taking it.
    fn has_frames(&self) -> Option<bool> {
        None
    }

    /// Returns whether to wait for that descriptor also while the node may not send, by its [rate](rate::Rates): it says
    /// more than that there are frames, and is not readable for as long as there are.
    fn is_heard_while_limited(&self) -> bool {
        false
    }

    /// Returns each count of its own with its name.
    fn counts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Gets memory that the workers of all queues of its machine write, before it begins to serve, and the number of its node
    /// on the VNI.
    fn share(&mut self, _memory: Span<Line>, _node: u16) {}

    /// Begins to serve, with this page of the node memory. Only the node's worker writes it; its successor reads it.
    fn begin(&mut self, _: Span<Line>) {}

    /// Begins to serve, where [recovery](Self::recovery) is exact. `marks` are those of the last turn that was committed,
    /// and behind them words of earlier turns. Only the node's worker writes the journal; its successor reads it.
    fn resume(&mut self, _marks: Option<Marks>, _journal: Span<Line>) {}

    /// Notes in the journal what a successor needs to carry the present turn out again. It is committed next.
    fn note(&mut self) {}

    /// Returns how far the endpoint is, once the present turn is committed.
    fn marks(&mut self) -> &[u64] {
        &[]
    }

    /// Does what its programs ask for on a control channel.
    fn attend(&mut self) {}

    /// Returns whether to give it frames now. Those that it is not given stay with their senders.
    fn is_ready(&mut self) -> bool {
        true
    }

    /// Shows its programs the frames that it was given. Their senders get the memory back next.
    fn show(&mut self) {}

    /// Wakes programs that were given frames.
    fn ring(&mut self) {}

    /// Completes a frame that a predecessor was reading when it died, by what it wrote [beside](Egress::stage) the frame.
    fn mend(&self, _frame: &mut Vec<u8>, _beside: &[u8]) {}

    /// Counts the frames taken as gone: their receivers see them.
    fn commit(&mut self) {}

    /// Asks its programs to ring, and looks for frames once more. `waits` says that a frame of theirs waits for room, so
    /// that there is no use in looking.
    fn arm(&mut self, _waits: bool) -> Armed {
        Armed::Idle
    }

    /// Asks its programs to ring when they make room for frames. Returns whether they will: then there is none now.
    fn await_room(&mut self) -> bool {
        false
    }

    /// Ends the sleep that [`arm`](Self::arm) prepared.
    fn wake(&mut self) {}

    /// Returns how soon an armed endpoint must be looked at again, though nothing rings.
    fn again_in(&self) -> Option<Duration> {
        None
    }

    /// Does periodic work, a few times a second; counts frames that were dropped before they came here. Returns whether
    /// the next tick has work.
    fn tick(&mut self, _: Instant, _: &mut Dropped) -> bool {
        false
    }

    /// Prepares for a successor, which goes on with the same programs.
    fn finish(&mut self) {}

    /// Lets go of its programs: a successor serves them.
    fn release(&mut self) {}

    /// Returns what a person must know, once.
    fn trouble(&mut self) -> Option<String> {
        None
    }

    /// Returns its connection to a program, if it has such connections. It outlives the worker.
    fn connection(&mut self) -> Option<&mut dyn Connection> {
        None
    }
}

/// Opens an endpoint: from its descriptor, its description, and the node's name. The error is a sentence.
type Open = fn(OwnedFd, &str, &str) -> Result<Box<dyn Endpoint>, String>;

/// All kinds of endpoints, by the names that daemon and workers use.
const KINDS: [(&str, Open); 5] = [
    ("tap", tap::open),
    ("memif", memif::open),
    ("packet", packet::open),
    ("vm", guest::open),
    ("vm-queue", guest::open_queue),
];

/// Opens the endpoint of node `node` that the daemon made as `fd`, and described in `text`.
///
/// # Errors
/// A sentence: `kind` is unknown, or the others do not belong to it.
pub fn open(kind: &str, fd: OwnedFd, text: &str, node: &str) -> Result<Box<dyn Endpoint>, String> {
    let open = KINDS.iter().find(|(known, _)| *known == kind).map(|(_, open)| open);
    let open = open.ok_or_else(|| format!("this worker knows no endpoint of kind {kind:?}; rebuild it"))?;
    open(fd, text, node)
}

/// The connection to a program that must not notice when a worker is replaced. The daemon keeps its parts.
pub trait Connection {
    /// Returns whether the program may have changed or gone since the last call of [`parts`](Self::parts).
    fn has_news(&self) -> bool;

    /// Returns whether the program has no further change under way, as far as is known: one whose changes come in a row need
    /// not be told of after each.
    fn is_settled(&self) -> bool {
        true
    }

    /// Returns whether the program waits until its [parts](Self::parts), as they are now, are passed on.
    fn waits(&self) -> bool {
        false
    }

    /// Takes note that its parts were passed on as they are now, or will be later.
    fn told(&mut self) {}

    /// Returns what another process needs to go on with the program, if one is connected.
    ///
    /// # Errors
    /// A descriptor cannot be copied.
    fn parts(&mut self) -> io::Result<Option<Parts>>;

    /// Sees to it that a successor can go on by [parts](Self::parts) that were passed on before, as there is no descriptor for
    /// newer ones. Returns whether it can.
    fn stays_as_told(&mut self) -> bool {
        false
    }

    /// Goes on with the program of a predecessor: at once, or when the endpoint [begins](Endpoint::begin) to serve.
    ///
    /// # Errors
    /// A sentence: these are no parts of such a connection.
    fn go_on(&mut self, parts: Parts) -> Result<(), String>;

    /// Forgets a program of a predecessor that has gone, by its [number](Parts::number).
    fn forget(&mut self, number: u64);

    /// Forgets one that has gone, and that it had to keep while another worker serves, if it may by now. Returns whether to
    /// look again.
    fn keeps_gone(&mut self) -> bool {
        false
    }

    /// Sends the program away: the node ends, or no successor can know of it.
    fn dismiss(&mut self, why: Dismissal);
}

/// What a process needs to go on with a connected program.
#[derive(Debug)]
pub struct Parts {
    /// Name that the program gives itself.
    pub name: String,
    /// Number of its connection on this machine: the inode of its socket.
    pub number: u64,
    /// Differs from that of other parts of the same connection.
    pub version: u64,
    /// What the endpoint must know besides, as JSON.
    pub text: String,
    /// Descriptors; the socket first.
    pub fds: Vec<OwnedFd>,
}

/// Why a program is sent away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dismissal {
    /// The node ends.
    Over,
    /// The program must connect again, to a successor.
    Moved,
}
