//! What the driver's process tells the card's, and what it is told: messages of JSON, one a packet.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// To the card's process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Ask {
    /// The wire brings frames from now on.
    Begin(Trial),
    /// The longest gap and trip since this was last asked?
    Window,
    /// The driver has all that it expects, or has given up: what became of them?
    End,
}

/// What a wire brings.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Trial {
    /// Frames.
    pub count: u64,
    /// Of so many bytes, with the check sequence.
    pub size: u32,
    /// A second; `None` for as many as the card takes.
    pub rate: Option<u64>,
    /// Whether the wire pauses when the card asks it to.
    pub pauses: bool,
}

/// To the driver's process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Say {
    /// The bytes of the frames of this case.
    Size(u32),
    /// The wire has brought everything.
    Sent,
    /// The longest time between two frames that came back, and the longest that one was away, in ns.
    Window(u64, u64),
    /// What became of it.
    Outcome(Outcome),
}

/// What the wire has seen of a trial.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Frames that it sent.
    pub sent: u64,
    /// Frames that came back, each counted once.
    pub back: u64,
    /// Frames that came back twice, out of order, or with other bytes.
    pub wrong: u64,
    /// Of these, those that came back twice.
    pub duplicated: u64,
    /// Of these, those that came back out of order.
    pub reordered: u64,
    /// The longest time between two that came back, in ns.
    pub longest_gap: u64,
    /// PAUSE frames that came.
    pub pauses: u64,
    /// How long the machine ran something else than the card and its wire, in ns.
    pub stalled: u64,
}

/// One end of the connection.
#[derive(Debug)]
pub struct Control(OwnedFd);

impl Control {
    /// Over a SOCK_SEQPACKET socket.
    pub fn new(socket: OwnedFd) -> Self {
        Control(socket)
    }

    pub fn say(&self, message: &impl Serialize) -> Result<()> {
        let bytes = serde_json::to_vec(message).context("a message could not be written as JSON")?;
        rustix::net::send(&self.0, &bytes, SendFlags::NOSIGNAL).context("the other role is gone")?;
        Ok(())
    }

    /// Waits for a message.
    pub fn hear<T: DeserializeOwned>(&self) -> Result<T> {
        self.receive(RecvFlags::empty())?.context("a socket that waits says that it would")
    }

    /// A message, if there is one.
    pub fn heard<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        self.receive(RecvFlags::DONTWAIT)
    }

    fn receive<T: DeserializeOwned>(&self, flags: RecvFlags) -> Result<Option<T>> {
        let mut bytes = [0_u8; 4096];
        let len = loop {
            match rustix::net::recv(&self.0, &mut bytes[..], flags) {
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                other => break other.context("the other role is gone")?.1,
            }
        };
        ensure!(len > 0, "the other role has ended");
        Ok(Some(serde_json::from_slice(&bytes[..len]).context("the other role said something else")?))
    }

    /// Whether the other side has gone without a word.
    pub fn is_over(&self) -> bool {
        let mut byte = [0_u8; 1];
        rustix::net::recv(&self.0, &mut byte[..], RecvFlags::DONTWAIT | RecvFlags::PEEK).is_ok_and(|(_, len)| len == 0)
    }
}
