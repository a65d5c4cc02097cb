//! An uplink's end of a VNI. The attachment of the uplink's NIC moves the frames between the NIC and this end.

use std::time::{Duration, Instant};

use tasuki_net::endpoint::egress::WAIT;
use tasuki_net::port::{Armed, Burst, Frame, Port, Transactional};
use tasuki_net::vni::port::VniPort;
use tasuki_relay::message::heartbeat;
use tasuki_shm::arena::Arena;

use crate::lease_page::Heartbeat;
use crate::tap::SHORTEST;

/// Time within which a working card sends a frame of 1,514 bytes (10 Mb/s: 1.2 ms).
const STUCK_AFTER: Duration = Duration::from_millis(2);

/// Time after which stuck frames are tried again.
const AGAIN: Duration = Duration::from_millis(1);

/// An uplink's end of a VNI.
#[derive(Debug)]
pub struct Uplink {
    /// The end, as a port.
    pub port: VniPort,
    /// Frames from the VNI that have not gone out.
    burst: Burst,
    /// Time since which none of them has gone out, if that was checked.
    stuck: Option<Instant>,
    /// Whether the NIC's attachment has moved frames since the last rest.
    pub is_joined: bool,
}

impl Uplink {
    /// Creates the end.
    pub fn new(mut port: VniPort) -> Self {
        // A switch drops frames for nodes that do not read, after a wait.
        port.set_patience(WAIT);
        Uplink { port, burst: Burst::new(), stuck: None, is_joined: false }
    }

    /// Gives the VNI frames from the NIC, from the front of `burst`, and moves them to `given`. Returns their number.
    #[inline]
    pub fn give(&mut self, burst: &mut Burst, given: &mut Burst) -> usize {
        let went = self.port.forward(burst, &self.burst);
        given.extend(burst.drain(..went));
        went
    }

    /// Receives frames from the VNI if all earlier frames have gone. Returns the number received.
    #[inline]
    pub fn take(&mut self) -> usize {
        if !self.burst.is_empty() {
            return 0;
        }
        let Ok(came) = self.port.receive(&mut self.burst);
        self.stuck = None;
        came
    }

    /// Returns whether the card takes no frames: its link is down, or its partner pauses. A card that is only busy
    /// sends a frame in less than that.
    fn is_stuck(&self) -> bool {
        self.stuck.is_some_and(|since| since.elapsed() >= STUCK_AFTER)
    }

    /// Copies the received frames into slots of the NIC's, oldest first. Returns the number copied. Drops frames
    /// longer than a slot; the driver drops those that are longer than its card sends.
    #[inline]
    pub fn fill(&mut self, arena: &Arena, heartbeat: &Heartbeat, into: &mut Burst) -> usize {
        let (before, longest) = (self.burst.len(), arena.geometry().slot_len);
        self.burst.retain(|frame| u32::from(frame.len) <= longest);
        heartbeat.add(heartbeat::REFUSED, (before - self.burst.len()) as u64);
        for frame in &self.burst {
            let Some(mut slot) = arena.take() else { break };
            let bytes = frame.bytes();
            let len = bytes.len().max(SHORTEST);
            let room = &mut slot.bytes_mut()[..len];
            room[..bytes.len()].copy_from_slice(bytes);
            room[bytes.len()..].fill(0);
            into.push(Frame { slot, len: u16::try_from(len).expect("no longer than the longest") });
        }
        into.len()
    }

    /// Removes the first `count` frames, which have gone out.
    #[inline]
    pub fn went(&mut self, count: usize) {
        if count > 0 {
            self.stuck = None;
        }
        self.burst.drain(..count);
    }

    /// Writes the state that a successor reads. Frames that have not gone out arrive at the successor again.
    pub fn conclude(&mut self) {
        self.port.conclude(&self.burst);
    }

    /// Arms the bell, and looks for frames once more.
    pub fn arm(&mut self) -> Armed {
        // Without its NIC the end receives nothing, so it does not listen for bells.
        if !self.is_joined {
            return Armed::Idle;
        }
        if !self.burst.is_empty() {
            // No bell rings when the card takes frames again.
            self.stuck.get_or_insert_with(Instant::now);
            return if self.is_stuck() { Armed::Idle } else { Armed::Busy };
        }
        let Ok(armed) = self.port.arm();
        armed
    }

    /// Returns the time until stuck frames are tried again.
    pub fn waits(&self) -> Option<Duration> {
        (self.is_joined && self.is_stuck()).then_some(AGAIN)
    }

    /// Ends the sleep that [`arm`](Self::arm) prepared.
    pub fn wake(&mut self) {
        self.is_joined = false;
        self.port.wake();
    }
}
