//! Orders of the test to a node: messages with descriptors through a socket, each carried out before the next.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::RecvFlags;

use crate::process::{hear_with, say};

/// Kinds of orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// First order: become this node. Carries its node memory, its bell receiver, the lease page and the directory.
    Be,
    /// Another node exists. Carries its node memory and its bell.
    Add,
    /// Another node no longer exists.
    Remove,
    /// All existing nodes were added: send frames.
    Go,
    /// Send one last long frame for all, and no more.
    Quiesce,
    /// Do all delayed work now.
    Rest,
    /// Exit after the last frame.
    End,
    /// Kill yourself while you read a batch.
    DieReading,
    /// Kill yourself after posting a frame that is not visible yet.
    DieSending,
}

const DEEDS: [Deed; 9] = [
    Deed::Be,
    Deed::Add,
    Deed::Remove,
    Deed::Go,
    Deed::Quiesce,
    Deed::Rest,
    Deed::End,
    Deed::DieReading,
    Deed::DieSending,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    pub deed: Deed,
    /// Serial number of the order.
    pub serial: u64,
    /// Number of the node that the order concerns.
    pub number: u16,
    /// Name of that node.
    pub id: u32,
    /// Seed of the node's random numbers.
    pub seed: u64,
    /// Whether a predecessor was killed.
    pub after_death: bool,
    /// Whether the node sends as a namespace's node does, writing a frame before it knows the receiver.
    pub stages: bool,
}

impl Order {
    pub fn new(deed: Deed, serial: u64, number: u16, id: u32) -> Self {
        Order { deed, serial, number, id, seed: 0, after_death: false, stages: false }
    }

    pub fn send(&self, socket: &UnixStream, fds: &[OwnedFd]) {
        let words = [
            self.deed as u64,
            self.serial,
            self.number.into(),
            self.id.into(),
            self.seed,
            self.after_death.into(),
            self.stages.into(),
        ];
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        say(socket, &words.map(u64::to_le_bytes).concat(), &fds);
    }

    /// Receives the next order with its descriptors; `None` if there is none now, or the test is gone.
    pub fn receive(socket: &UnixStream, flags: RecvFlags) -> Option<(Self, Vec<OwnedFd>)> {
        let (bytes, fds) = hear_with(socket, flags).ok()??;
        let word = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("eight bytes"));
        let order = Order {
            deed: DEEDS[usize::try_from(word(0)).expect("a deed")],
            serial: word(1),
            number: u16::try_from(word(2)).expect("a number"),
            id: u32::try_from(word(3)).expect("an id"),
            seed: word(4),
            after_death: word(5) == 1,
            stages: word(6) == 1,
        };
        Some((order, fds))
    }
}
