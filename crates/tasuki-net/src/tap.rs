//! A node that is a network namespace: frames between its TAP and a VNI, with what is left to be done to them.
//!
//! The kernel at the other side of the TAP hands over segments of up to 64 KiB whose check sums nobody has computed, and takes such; they cross as
//! they are. A frame is copied by the kernel out of the namespace into the node's pool, and by the kernel of the receiving node out of that pool
//! into its namespace: nobody else touches it.
//!
//! A worker that is killed has read frames that nobody has seen. Its successor sends them (`tap/notes.rs`).

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

/// Frames that are read from the TAP before those that have come are looked at.
const READS: usize = 64;

/// How soon a node that waits looks whether there is room.
const ROOM_AGAIN: Duration = Duration::from_micros(20);

/// What became of frames that did not cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// The namespace did not take them: its interface is down, or it has no memory.
    pub refused: u64,
    /// The node that they were for had no room for them.
    pub no_room: u64,
    /// Nobody has the address.
    pub nobody: u64,
    /// Their sender took them back while the kernel copied them.
    pub too_late: u64,
    /// They came from a node in an address that is not its own,
    pub forged: u64,
    /// or from the namespace in one that is not this node's.
    pub not_own: u64,
}

impl Dropped {
    /// All of them.
    pub fn sum(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    /// Each, by name.
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
    /// Frames that the namespace got,
    pub given: u64,
    /// and that it sent.
    pub taken: u64,
    /// Those that did not.
    pub dropped: Dropped,
    /// The TAP's interface is gone.
    gone: bool,
    /// What was staged for a node that had no room, and since when it waits.
    waits: Option<(u16, usize, Instant)>,
    /// Who was waited for in vain, and has had no room since.
    slow: Slow,
    /// The pool had no room when the namespace was last looked at.
    full: bool,
}

impl<M: Deref<Target = [Line]>> TapNode<M> {
    /// The namespace behind `tap`, a TAP device with offload headers (`IFF_VNET_HDR`) which does not block. All neighbours are known to `vni`; what a predecessor had
    /// read, and nobody has seen, is sent.
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

    /// Sends what a predecessor had read.
    fn send_left(&mut self) {
        // All are copied before one is sent, for they lie in pages that are free.
        let mut frames = Vec::new();
        for (page, len) in self.notes.left() {
            let len = len.or_else(|| len_of(&self.vni.left_at(page, FRONT_LEN)?));
            frames.extend(len.and_then(|len| self.vni.left_at(page, len)));
        }
        for frame in frames.iter().filter(|frame| frame.len() >= HEADER_LEN + 14) {
            let Some(room) = self.vni.stage() else { break };
            room[..frame.len()].copy_from_slice(frame);
            if !self.pass_in(frame.len()) {
                // One is waited for; a ring that has no room for that has none for the others.
                break;
            }
        }
        self.flush();
    }

    /// Lets others see what goes, and forgets that nobody had.
    fn flush(&mut self) {
        let waits = self.waits.and_then(|(_, len, _)| Some((self.vni.staging_page()?, len)));
        let notes = &mut self.notes;
        self.vni.flush_with(|| {
            point("tap.published");
            notes.published(waits);
        });
    }

    /// The node's end of the VNI.
    pub fn vni(&mut self) -> &mut Vni {
        &mut self.vni
    }

    /// Pages of the node's pool that nobody holds.
    pub fn pages_left(&self) -> u32 {
        self.vni.pages_left()
    }

    /// Looks addresses up elsewhere from now on.
    pub fn set_switch(&mut self, switch: Switch<M>) {
        self.switch = switch;
    }

    /// The last turn of whoever hands the node on: what waits for room that does not come is dropped, for no successor finds it.
    pub fn finish(&mut self) {
        while let Some((node, len, _)) = self.waits {
            self.pass_to(node, len);
        }
        self.flush();
    }

    /// One turn in each direction; says how many frames moved.
    pub fn turn(&mut self) -> usize {
        let came = self.give();
        if came > 0 {
            // Whoever is to read what came may need this very CPU for it: without, it is woken for each frame, or not at all while frames come.
            std::thread::yield_now();
        }
        let went = self.take();
        self.flush();
        came + went
    }

    /// Gives the namespace what came.
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

    /// Takes what the namespace sends.
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

    /// Sends what was staged where its addresses say, or drops it; says no if it has to wait.
    fn pass_in(&mut self, len: usize) -> bool {
        let frame = &self.vni.staged_mut()[HEADER_LEN..];
        let [to, from] = [0, 6].map(|at| Mac::try_from(&frame[at..at + 6]).expect("six bytes"));
        if !self.switch.may_send(from) {
            self.dropped.not_own += 1;
            return true;
        }
        self.pass_on(to, len)
    }

    /// Sends what was staged, or drops it; says no if it has to wait.
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

    /// The same to one node.
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
                    // The node has no room: it is to read what there is.
                    self.flush();
                    return false;
                }
                self.dropped.no_room += 1;
            }
            Err(_) => self.dropped.nobody += 1,
        }
        true
    }

    /// Says that whoever drives the node is about to [rest](Self::rest), and looks once more.
    pub fn arm(&mut self) -> Armed {
        self.vni.arm()
    }

    /// The descriptor that becomes readable when the namespace sends; none if its interface is gone.
    pub fn tap(&self) -> Option<BorrowedFd<'_>> {
        (!self.gone).then(|| self.tap.as_fd())
    }

    /// The descriptor that becomes readable when somebody rings for an [armed](Self::arm) node.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.vni.fd()
    }

    /// How soon an [armed](Self::arm) node must look again though nobody rings, since nobody does when there is room again. What the namespace
    /// sends is left alone until then.
    pub fn waits(&self) -> Option<Duration> {
        (self.waits.is_some() || self.full).then_some(ROOM_AGAIN)
    }

    /// Says that an armed node is awake again.
    pub fn wake(&mut self) {
        self.vni.wake();
    }

    /// Sleeps until there is something to do, or for `most`, after [`arm`](Self::arm) has found nothing.
    pub fn rest(&mut self, most: Duration) {
        let (most, tap) = match self.waits() {
            Some(again) => (most.min(again), None),
            None => (most, self.tap()),
        };
        let ends = [Some(self.vni.fd()), tap];
        let mut polled: ArrayVec<_, 2> =
            ends.into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let most = Timespec::try_from(most).expect("seconds at most");
        // Whatever ended it: the next turn sees.
        let _ = rustix::event::poll(&mut polled, Some(&most));
        drop(polled);
        self.vni.wake();
    }

    /// Does what is due now and then, a few times a second; says whether there is more to come.
    pub fn tick(&mut self, now: Instant) -> bool {
        self.switch.age(now);
        self.vni.tick(now)
    }
}

/// Whether the frame was whole when the kernel had copied it.
fn write(tap: &OwnedFd, incoming: &Incoming<'_>, front: &Front) -> io::Result<bool> {
    // What was taken back while we slept is not given to anybody; what is taken back while the kernel copies it cannot be called back.
    if !incoming.is_whole() {
        return Ok(false);
    }
    incoming.write_with_header(tap.as_fd(), front)?;
    Ok(incoming.is_whole())
}
