//! The driver of a node's end of a VNI: a bridge to the node's endpoint, the node's own program, or an uplink.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use tasuki_net::capture::Captures;
use tasuki_net::endpoint::{Bridge, Dropped};
use tasuki_net::own::Own;
use tasuki_net::port::{Armed, Burst, Port, Transactional};
use tasuki_net::switch::Switch;
use tasuki_net::vni::PeerDescriptor;
use tasuki_net::vni::port::VniPort;
use tasuki_shm::arena::Arena;
use tasuki_shm::region::RegionError;

use super::PROGRAM_STATE;
use crate::attachment::Common;
use crate::handler::FrameHandler;
use crate::uplink::Uplink;

/// Time for which a giver waits for room for its pending frames; after that a successor gets them.
const LAST_BURST: Duration = Duration::from_millis(1);

/// The driver of a node's end of a VNI.
pub enum End {
    /// The end passes frames to the node's endpoint.
    Bridge(Box<Bridge>),
    /// The worker is the node's program.
    Native(Box<Native>),
    /// The end passes frames to the node's NIC; it lies in [`Common::uplink`], for the NIC's attachment.
    Uplink,
}

/// The end of a node whose program is the worker.
pub struct Native {
    port: VniPort,
    arena: Arena,
    /// Pending frames.
    burst: Burst,
}

impl Native {
    pub fn new(port: VniPort) -> Self {
        Native { arena: port.arena().clone(), port, burst: Burst::new() }
    }

    /// Runs one turn. Returns the number of frames moved.
    #[inline]
    pub fn turn(&mut self, handler: &mut impl FrameHandler, common: &mut Common) -> usize {
        let mut context = common.context(&self.arena, PROGRAM_STATE);
        let Ok(moved) = handler.turn(&mut self.port, &mut context, &mut self.burst);
        moved
    }

    /// Looks at the rings for the first time; sends nothing yet.
    pub fn look(&mut self, handler: &mut impl FrameHandler, common: &mut Common) {
        let mut context = common.context(&self.arena, PROGRAM_STATE);
        let Ok(()) = handler.look(&mut self.port, &mut context, &mut self.burst);
    }

    /// Ends the burst. Frames that find no room stay pending, and the successor receives them as we received them.
    pub fn stop(&mut self, handler: &mut impl FrameHandler, common: &mut Common) {
        let end = Instant::now() + LAST_BURST;
        while !self.burst.is_empty() {
            let mut context = common.context(&self.arena, PROGRAM_STATE);
            let Ok(went) = handler.send(&mut self.port, &mut context, &mut self.burst);
            if went == 0 && Instant::now() > end {
                return;
            }
        }
    }

    /// Returns the number of frames that did not cross.
    pub fn dropped(&self) -> u64 {
        self.port.dropped.sum()
    }

    /// Writes the state that a successor reads.
    pub fn conclude(&mut self, handler: &mut impl FrameHandler, common: &Common) {
        handler.remember(&common.program_state, PROGRAM_STATE, self.port.turns().wrapping_add(1));
        handler.conclude(&mut self.port, &self.burst);
    }
}

/// The part of a driven end that serves the daemon's messages.
pub trait OnVni {
    fn add(&mut self, node: PeerDescriptor) -> Result<(), RegionError>;
    fn remove(&mut self, number: u16);
    fn set_own(&mut self, number: u16, own: Own);
    fn set_switch(&mut self, switch: Switch);
    fn captures(&mut self) -> &mut Option<Box<Captures>>;
    /// Returns the frames that did not cross.
    fn dropped(&self) -> &Dropped;
    /// Returns the counts, by name.
    fn counts(&self) -> Vec<(&'static str, u64)>;
    /// Does periodic work. Returns whether the next tick has work.
    fn tick(&mut self, now: Instant) -> bool;
}

impl OnVni for Bridge {
    fn add(&mut self, node: PeerDescriptor) -> Result<(), RegionError> {
        self.vni().add(node)
    }

    fn remove(&mut self, number: u16) {
        self.vni().remove(number);
    }

    fn set_own(&mut self, number: u16, own: Own) {
        self.vni().set_own(number, own);
    }

    fn set_switch(&mut self, switch: Switch) {
        self.set_switch(switch);
    }

    fn captures(&mut self) -> &mut Option<Box<Captures>> {
        self.vni().captures()
    }

    fn dropped(&self) -> &Dropped {
        &self.dropped
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.counts()
    }

    fn tick(&mut self, now: Instant) -> bool {
        self.tick(now)
    }
}

impl OnVni for VniPort {
    fn add(&mut self, node: PeerDescriptor) -> Result<(), RegionError> {
        self.add(node)
    }

    fn remove(&mut self, number: u16) {
        self.remove(number);
    }

    fn set_own(&mut self, number: u16, own: Own) {
        self.set_own(number, own);
    }

    fn set_switch(&mut self, switch: Switch) {
        self.set_switch(switch);
    }

    fn captures(&mut self) -> &mut Option<Box<Captures>> {
        self.captures()
    }

    fn dropped(&self) -> &Dropped {
        &self.dropped
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let mut counts = vec![("sent", self.given()), ("turns", self.turns())];
        counts.extend(self.dropped.counts());
        counts.push(("pages_left", self.pages_left().into()));
        counts
    }

    fn tick(&mut self, now: Instant) -> bool {
        self.tick(now)
    }
}

/// The part of a driven end with which the worker's loop sleeps.
pub trait Sleeper {
    fn on_vni(&mut self) -> &mut dyn OnVni;
    /// Returns whether frames shall gather now.
    fn gathers(&mut self) -> bool {
        false
    }
    /// Asks to be rung, and looks for frames once more.
    fn arm(&mut self) -> Armed;
    /// Returns the descriptors that become readable when there is work: the bell, and the source of the programs'
    /// frames.
    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2];
    /// Returns how soon to look again though nothing rings.
    fn waits(&self) -> Option<Duration>;
    /// Ends the sleep that `arm` prepared.
    fn wake(&mut self);
}

impl Sleeper for Bridge {
    fn on_vni(&mut self) -> &mut dyn OnVni {
        self
    }

    fn gathers(&mut self) -> bool {
        self.gathers()
    }

    fn arm(&mut self) -> Armed {
        self.arm()
    }

    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.bell(), self.source()]
    }

    fn waits(&self) -> Option<Duration> {
        self.waits()
    }

    fn wake(&mut self) {
        self.wake();
    }
}

impl Sleeper for Native {
    fn on_vni(&mut self) -> &mut dyn OnVni {
        &mut self.port
    }

    fn arm(&mut self) -> Armed {
        if !self.burst.is_empty() {
            // The worker looks again soon, with or without a bell.
            return if self.port.waits().is_some() { Armed::Idle } else { Armed::Busy };
        }
        let Ok(armed) = self.port.arm();
        armed
    }

    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.port.fd()), None]
    }

    fn waits(&self) -> Option<Duration> {
        self.port.waits().filter(|_| !self.burst.is_empty())
    }

    fn wake(&mut self) {
        self.port.wake();
    }
}

impl Sleeper for Uplink {
    fn on_vni(&mut self) -> &mut dyn OnVni {
        &mut self.port
    }

    fn arm(&mut self) -> Armed {
        self.arm()
    }

    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.port.fd()), None]
    }

    fn waits(&self) -> Option<Duration> {
        self.waits()
    }

    fn wake(&mut self) {
        self.wake();
    }
}

impl End {
    /// Returns the end as the worker's loop sees it. `uplink` is [`Common::uplink`].
    pub fn sleeper<'a>(&'a mut self, uplink: &'a mut Option<Box<Uplink>>) -> Option<&'a mut dyn Sleeper> {
        match self {
            End::Bridge(bridge) => Some(&mut **bridge),
            End::Native(native) => Some(&mut **native),
            End::Uplink => uplink.as_deref_mut().map(|uplink| uplink as &mut dyn Sleeper),
        }
    }

    /// Like [`sleeper`](Self::sleeper), for a caller that only reads.
    pub fn sleeper_ref<'a>(&'a self, uplink: &'a Option<Box<Uplink>>) -> Option<&'a dyn Sleeper> {
        match self {
            End::Bridge(bridge) => Some(&**bridge),
            End::Native(native) => Some(&**native),
            End::Uplink => uplink.as_deref().map(|uplink| uplink as &dyn Sleeper),
        }
    }
}

#[cfg(test)]
mod tests {
    use tasuki_relay::message::heartbeat;

    use super::*;

    #[test]
    fn the_heartbeat_has_a_word_for_each_reason() {
        let names = Dropped::default().counts().map(|(name, _)| name);
        assert_eq!(names, heartbeat::REASONS.map(|reason| format!("dropped_{reason}")));
    }
}
