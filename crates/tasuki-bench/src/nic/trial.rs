//! Messages between the driver's process and the card's: JSON, one message per packet.

use std::ops::Range;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Messages to the card's process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Ask {
    /// Starts a trial: the wire begins to bring frames.
    Begin(Trial),
    /// Asks for the longest gap and trip since the last such question, and for how long the machine did not run the card
    /// and its wire between two times (`tasuki_shm::clock`) since then.
    Window(u64, u64),
    /// Ends a trial: the driver has all the frames it expects, or has given up. Asks for the outcome.
    End,
}

/// Frames that a wire brings.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Trial {
    /// Number of frames.
    pub count: u64,
    /// Bytes of a frame, with the check sequence.
    pub size: u32,
    /// Frames a second; `None` for as many as the card takes.
    pub rate: Option<u64>,
    /// Whether the wire pauses when the card asks it to.
    pub pauses: bool,
}

/// Messages to the driver's process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Say {
    /// Bytes of a frame of this case.
    Size(u32),
    /// The wire has brought all frames.
    Sent,
    /// Longest time between two frames that came back, longest trip of a frame, how long ago that gap ended, and for how
    /// long card and wire stood still in the time that was asked for, in ns.
    Window(u64, u64, u64, u64),
    /// Outcome of the trial.
    Outcome(Outcome),
}

/// The wire's view of a trial.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Number of frames that the wire sent.
    pub sent: u64,
    /// Number of frames that came back, each counted once.
    pub back: u64,
    /// Number of frames that came back twice, out of order, or with other bytes.
    pub wrong: u64,
    /// Number of frames in `wrong` that came back twice.
    pub duplicated: u64,
    /// Number of frames in `wrong` that came back out of order.
    pub reordered: u64,
    /// Longest time between two frames that came back, in ns.
    pub longest_gap: u64,
    /// Number of PAUSE frames that the wire received.
    pub pauses: u64,
    /// Time that the machine did not run the card and its wire, in ns.
    pub stalled: u64,
}

/// One end of the connection between the two processes.
#[derive(Debug)]
pub struct Control(OwnedFd);

impl Control {
    /// Wraps a SOCK_SEQPACKET socket.
    pub fn new(socket: OwnedFd) -> Self {
        Control(socket)
    }

    pub fn say(&self, message: &impl Serialize) -> Result<()> {
        let bytes = serde_json::to_vec(message).context("a message could not be written as JSON")?;
        rustix::net::send(&self.0, &bytes, SendFlags::NOSIGNAL).context("the other role is gone")?;
        Ok(())
    }

    /// Waits for the card's first message, the size of its frames.
    pub fn size(&self) -> Result<u32> {
        let Say::Size(size) = self.hear()? else { bail!("the card did not begin with the size of its frames") };
        Ok(size)
    }

    /// Ends the trial, and waits for its outcome.
    pub fn end(&self) -> Result<Outcome> {
        self.say(&Ask::End)?;
        loop {
            if let Say::Outcome(outcome) = self.hear()? {
                return Ok(outcome);
            }
        }
    }

    /// Asks for the window since the last such question: see [`Say::Window`]. The time of stalls is that in `during`.
    pub fn window(&self, during: Range<u64>) -> Result<(u64, u64, u64, u64)> {
        self.say(&Ask::Window(during.start, during.end))?;
        loop {
            if let Say::Window(gap, trip, ago, stalled) = self.hear()? {
                return Ok((gap, trip, ago, stalled));
            }
        }
    }

    /// Waits for a message.
    pub fn hear<T: DeserializeOwned>(&self) -> Result<T> {
        self.receive(RecvFlags::empty())?.context("a socket that waits says that it would")
    }

    /// Returns a message, if there is one.
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

    /// Returns whether the other side has closed the connection.
    pub fn is_over(&self) -> bool {
        let mut byte = [0_u8; 1];
        rustix::net::recv(&self.0, &mut byte[..], RecvFlags::DONTWAIT | RecvFlags::PEEK).is_ok_and(|(_, len)| len == 0)
    }
}
