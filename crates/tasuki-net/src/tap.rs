//! A node that is a network namespace: moves frames between its TAP and a VNI, with the offload work that is still
//! undone.
//!
//! The kernel behind the TAP sends and accepts segments of up to 64 KiB without computed check sums; they cross the VNI
//! as they are. The sending node's kernel copies a frame from the namespace into the node's pool. The receiving node's
//! kernel copies it from that pool into its namespace. No other copy is made.
//!
//! A killed worker may have read frames that it has not published. Its successor sends them (`tap/notes.rs`).

mod notes;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tasuki_shm::line::Line;
use tasuki_shm::vni::directory::Mac;

use crate::port::Armed;
use crate::slow::Slow;
use crate::switch::{Front, Switch, To};
use crate::vni::ledger::point;
use crate::vni::offload::HEADER_LEN;
use crate::vni::{Incoming, SendError, Vni};
use notes::{FRONT_LEN, Notes, len_of};

/// Number of frames read from the TAP before the node turns to received frames.
const READS: usize = 64;

/// How soon a waiting node looks for room again.
const ROOM_AGAIN: Duration = Duration::from_micros(20);

/// Counts of the frames that did not cross, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// The namespace did not take the frame: its interface is down, or it has no memory.
    pub refused: u64,
    /// The destination node had no room.
    pub no_room: u64,
    /// No node has the destination address.
    pub nobody: u64,
    /// The sender took the frame back while the kernel copied it.
    pub too_late: u64,
    /// A node sent the frame from an address that is not its own.
    pub forged: u64,
    /// The namespace sent the frame from an address that is not this node's.
    pub not_own: u64,
}

impl Dropped {
    /// Returns the sum of all counts.
    pub fn sum(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    /// Returns each count with its name.
    pub fn counts(&self) -> [(&'static str, u64); 6] {
        let Dropped { refused, no_room, nobody, too_late, forged, not_own } = *self;
        [
            ("dropped_refused", refused),
            ("dropped_no_room", no_room),
            ("dropped_nobody", nobody),
            ("dropped_too_late", too_late),
            ("dropped_forged", forged),
            ("dropped_not_own", not_own),
        ]
    }
}

/// A namespace on a VNI.
#[derive(Debug)]
pub struct TapNode<M> {
    tap: OwnedFd,
    vni: Vni,
    notes: Notes,
    switch: Switch<M>,
    /// Number of frames that the namespace received.
    pub given: u64,
    /// Number of frames that the namespace sent.
    pub taken: u64,
    /// Frames that did not cross, in either direction.
    pub dropped: Dropped,
    /// The TAP's interface is gone.
    gone: bool,
    /// The staged frame that waits for room: its node, its length in bytes, and when the wait began.
    waits: Option<(u16, usize, Instant)>,
    /// Nodes that a frame waited for in vain and that have had no room since.
    slow: Slow,
    /// The pool had no room when the node last read from the namespace.
    full: bool,
}

impl<M: Deref<Target = [Line]>> TapNode<M> {
    /// Connects the namespace behind `tap`, a non-blocking TAP device with offload headers (`IFF_VNET_HDR`). The caller
    /// has added all neighbours to `vni`. Sends the frames that a predecessor had read but not published.
    pub fn new(tap: OwnedFd, vni: Vni, switch: Switch<M>) -> Self {
        let notes = Notes::over(vni.notes());
        let mut node = TapNode {
            tap,
            vni,
            notes,
            switch,
            given: 0,
            taken: 0,
            dropped: Dropped::default(),
            gone: false,
            waits: None,
            slow: Slow::default(),
            full: false,
        };
        node.send_left();
        node
    }

    /// Sends the frames that a predecessor had read.
    fn send_left(&mut self) {
        // Copy all frames before sending the first: they lie in pages that are free.
        let mut frames = Vec::new();
        for (page, len) in self.notes.left() {
            let len = len.or_else(|| len_of(&self.vni.left_at(page, FRONT_LEN)?));
            frames.extend(len.and_then(|len| self.vni.left_at(page, len)));
        }
        for frame in frames.iter().filter(|frame| frame.len() >= HEADER_LEN + 14) {
            let Some(room) = self.vni.stage() else { break };
            room[..frame.len()].copy_from_slice(frame);
            if !self.pass_in(frame.len()) {
                // One frame waits; a ring without room for it has none for the others.
                break;
            }
        }
        self.flush();
    }

    /// Publishes the staged frames, then drops the notes on them.
    fn flush(&mut self) {
        let waits = self.waits.and_then(|(_, len, _)| Some((self.vni.staging_page()?, len)));
        let notes = &mut self.notes;
        self.vni.flush_with(|| {
            point("tap.published");
            notes.published(waits);
        });
    }

    /// Returns the node's end of the VNI.
    pub fn vni(&mut self) -> &mut Vni {
        &mut self.vni
    }

    /// Returns the number of free pages in the node's pool.
    pub fn pages_left(&self) -> u32 {
        self.vni.pages_left()
    }

    /// Replaces the switch that looks addresses up.
    pub fn set_switch(&mut self, switch: Switch<M>) {
        self.switch = switch;
    }

    /// Takes the last turn before a handover. Drops a frame that waits in vain for room: no successor would find it.
    pub fn finish(&mut self) {
        while let Some((node, len, _)) = self.waits {
            self.pass_to(node, len);
        }
        self.flush();
    }

    /// Takes one turn in each direction. Returns the number of frames that moved.
    pub fn turn(&mut self) -> usize {
        let came = self.give();
        if came > 0 {
            // The reader of these frames may need this very CPU. Without the yield, the kernel wakes it for each frame,
            // or not at all while frames arrive.
            std::thread::yield_now();
        }
        let went = self.take();
        self.flush();
        came + went
    }

    /// Gives received frames to the namespace.
    fn give(&mut self) -> usize {
        let Self { tap, vni, switch, given, dropped, gone, .. } = self;
        vni.receive(|incoming| {
            let Some(front) = switch.admits(&incoming) else {
                return incoming.refuse(&mut dropped.forged, &mut dropped.too_late);
            };
            match write(tap, &incoming, &front) {
                Ok(true) => *given += 1,
                Ok(false) => dropped.too_late += 1,
                Err(error) => {
                    dropped.refused += 1;
                    *gone |= matches!(Errno::from_io_error(&error), Some(Errno::BADFD | Errno::NODEV));
                }
            }
        })
    }

    /// Takes frames that the namespace sends.
    fn take(&mut self) -> usize {
        self.full = false;
        if let Some((node, len, _)) = self.waits
            && !self.pass_to(node, len)
        {
            return 0;
        }
        for count in 0..READS {
            let Some(room) = self.vni.stage() else {
                self.full = true;
                return count;
            };
            room[..HEADER_LEN + 12].fill(0);
            let page = self.vni.staging_page();
            self.notes.reads_to(page);
            let len = match rustix::io::read(&self.tap, self.vni.staged_mut()) {
                Ok(len) if len >= HEADER_LEN + 14 => len,
                Ok(_) => continue,
                Err(errno) => {
                    self.gone |= matches!(errno, Errno::BADFD | Errno::NODEV);
                    return count;
                }
            };
            point("tap.read");
            let taken = self.taken;
            let goes_on = self.pass_in(len);
            if self.taken > taken {
                self.notes.goes(page, len);
            }
            point("tap.staged");
            if !goes_on {
                return count;
            }
        }
        READS
    }

    /// Sends the staged frame to its destination address, or drops it. Returns false if the frame must wait.
    fn pass_in(&mut self, len: usize) -> bool {
        let frame = &self.vni.staged_mut()[HEADER_LEN..];
        let [to, from] = [0, 6].map(|at| Mac::try_from(&frame[at..at + 6]).expect("six bytes"));
        if !self.switch.may_send(from) {
            self.dropped.not_own += 1;
            return true;
        }
        self.pass_on(to, len)
    }

    /// Sends the staged frame to the node or nodes of `mac`, or drops it. Returns false if the frame must wait.
    fn pass_on(&mut self, mac: Mac, len: usize) -> bool {
        let several = match self.switch.find(mac) {
            To::Node(node) => return self.pass_to(node, len),
            To::Nobody => {
                self.dropped.nobody += 1;
                return true;
            }
            several => self.switch.nodes_of(several),
        };
        match self.vni.post_staged_to_all(several.iter(), len) {
            Ok(_) => self.taken += 1,
            Err(_) => self.dropped.no_room += 1,
        }
        true
    }

    /// Sends the staged frame to one node, or drops it. Returns false if the frame must wait.
    fn pass_to(&mut self, node: u16, len: usize) -> bool {
        let waited = self.waits.take();
        match self.vni.post_staged(node, len) {
            Ok(()) => {
                self.taken += 1;
                self.slow.had_room(node);
            }
            Err(SendError::NoRoom(_)) => {
                let since = waited.map_or_else(Instant::now, |(.., since)| since);
                if self.slow.may_wait(node, since) {
                    self.waits = Some((node, len, since));
                    // The node has no room: let it see the frames that are already there.
                    self.flush();
                    return false;
                }
                self.dropped.no_room += 1;
            }
            Err(_) => self.dropped.nobody += 1,
        }
        true
    }

    /// Prepares the node for [rest](Self::rest), and looks for frames once more.
    pub fn arm(&mut self) -> Armed {
        self.vni.arm()
    }

    /// Returns the descriptor that becomes readable when the namespace sends, or `None` if its interface is gone.
    pub fn tap(&self) -> Option<BorrowedFd<'_>> {
        (!self.gone).then(|| self.tap.as_fd())
    }

    /// Returns the descriptor that becomes readable when a peer rings for an [armed](Self::arm) node.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.vni.fd()
    }

    /// Returns how soon an [armed](Self::arm) node must look again without a bell, or `None`: no peer rings when there
    /// is room again. Until then, leave the namespace's frames alone.
    pub fn waits(&self) -> Option<Duration> {
        (self.waits.is_some() || self.full).then_some(ROOM_AGAIN)
    }

    /// Marks an armed node as awake again.
    pub fn wake(&mut self) {
        self.vni.wake();
    }

    /// Sleeps until there is work, or for `most`. Call it after [`arm`](Self::arm) found no frame.
    pub fn rest(&mut self, most: Duration) {
        let (most, tap) = match self.waits() {
            Some(again) => (most.min(again), None),
            None => (most, self.tap()),
        };
        let ends = [Some(self.vni.fd()), tap];
        let mut polled: ArrayVec<_, 2> =
            ends.into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let most = Timespec::try_from(most).expect("seconds at most");
        // Ignore why the poll ended: the next turn looks.
        let _ = rustix::event::poll(&mut polled, Some(&most));
        drop(polled);
        self.vni.wake();
    }

    /// Does periodic work; call it a few times a second. Returns whether it must be called again even without traffic.
    pub fn tick(&mut self, now: Instant) -> bool {
        self.switch.age(now);
        self.vni.tick(now)
    }
}

/// Writes a frame to the TAP. Returns whether the frame was still whole once the kernel had copied it.
fn write(tap: &OwnedFd, incoming: &Incoming<'_>, front: &Front) -> io::Result<bool> {
    // Drop a frame that its sender took back while this worker slept. A frame that is taken back while the kernel
    // copies it cannot be recalled.
    if !incoming.is_whole() {
        return Ok(false);
    }
    incoming.write_with_header(tap.as_fd(), front)?;
    Ok(incoming.is_whole())
}
