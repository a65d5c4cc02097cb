//! A user's own program: the trait that it implements, and the frames that it gets in each turn.

use std::time::Duration;

use tasuki_net::nic::Mac;
use tasuki_net::port::{Burst, Frame, Transactional};
use tasuki_shm::arena::{Arena, Slot};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Maximum length of a program's [state](Program::State), in bytes.
pub const STATE_MAX: usize = 480;

/// Handler of the frames of a node's NICs: one value for each NIC.
///
/// A *turn* is one indivisible step. Frames arrive; the program changes, sends or drops each of them and makes new
/// ones; and its state moves on. A turn happens wholly or not at all: if the worker is killed in the middle of it,
/// its successor gets the same frames as they arrived, and the state as it was before. Data that the program keeps
/// in itself (`self`) is gone with the worker.
///
/// A turn is over once the driver has told the card of the frames to send. If the worker is killed after that, the
/// turn has happened and no successor repeats it. A turn must act on frames and state alone: the worker may open no
/// file and no socket.
pub trait Program: Sized + 'static {
    /// State that a successor must have: plain data of at most [`STATE_MAX`] bytes, all zeros at first. It is exact
    /// over upgrade, death and handover, for each NIC and each node. The state after a turn without frames is
    /// remembered with the next turn in which a frame arrives or goes.
    type State: FromBytes + IntoBytes + Immutable + Copy;

    /// Kind and version of the state. Choose a number for the kind; change the version when the layout of
    /// [`State`](Self::State) changes.
    const STATE: (u32, u32);

    /// Creates a program from the node's `options`. It is called for each NIC, and once before. Do here all that the
    /// program must not do later (much memory, long tables).
    ///
    /// # Errors
    /// A sentence for the author of the options: the mistake, and its correction. The worker then ends, and an upgrade
    /// to it fails.
    fn new(options: &str) -> Result<Self, String>;

    /// Converts the state in `bytes` from another version or another program. If this returns nothing, the program
    /// is refused, and the present driver drives on.
    fn convert(kind: u32, version: u32, bytes: &[u8]) -> Option<Self::State> {
        let _ = (kind, version, bytes);
        None
    }

    /// Runs one turn. It is called when frames have arrived, and when [`rest`](Self::rest) is over. A panic ends the
    /// worker; its successor gets the same frames.
    fn turn<N: Transactional>(&mut self, state: &mut Self::State, turn: &mut Turn<'_, N>);

    /// Returns the time until a turn is due without a frame, or nothing if the program waits for frames only. It is
    /// asked again and again from one turn to the next, and the earliest end counts: the answer may be the whole rest
    /// or the part that is left of it. Rests longer than a second are cut to a second. A successor begins the rest
    /// anew.
    fn rest(&self, state: &Self::State) -> Option<Duration> {
        let _ = state;
        None
    }

    /// Returns the counts that `tasuki nic counts` shows, by name.
    fn counts(state: &Self::State) -> Vec<(String, u64)> {
        let _ = state;
        Vec::new()
    }
}

/// Fate of a received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The frame goes out, behind the frames that arrived before it.
    Sent,
    /// The frame is dropped.
    Dropped,
}

/// The frames of one turn. Received frames that the program does not look at with [`frames`](Self::frames) are
/// dropped.
#[derive(Debug)]
pub struct Turn<'a, N: Transactional> {
    nic: &'a mut N,
    arena: &'a Arena,
    /// Received frames that were not looked at yet, followed by frames to send.
    burst: &'a mut Burst,
    came: usize,
    /// Slots of received frames that must not be written before the turn is over.
    kept: &'a mut Burst,
    /// Bits by position among the frames to send: set for a frame in a slot of our own, clear for a slot in which a
    /// frame arrived.
    ours: u32,
}

const _: () = assert!(tasuki_net::port::BURST_MAX == 32, "a bit of a word for each frame of a burst");

impl<'a, N: Transactional> Turn<'a, N> {
    /// Creates a turn in which all frames of `burst` have arrived.
    pub(crate) fn new(nic: &'a mut N, arena: &'a Arena, burst: &'a mut Burst, kept: &'a mut Burst) -> Self {
        let came = burst.len();
        Turn { nic, arena, burst, came, kept, ours: 0 }
    }

    /// Ends the turn. Returns which of the frames to send are in slots of our own, one bit for each.
    pub(crate) fn end(mut self) -> u32 {
        self.frames(|_| Fate::Dropped);
        self.ours
    }

    /// Returns the station address of the NIC.
    pub fn mac(&self) -> Mac {
        self.nic.station()
    }

    /// Returns the number of received frames that were not looked at yet.
    pub fn came(&self) -> usize {
        self.came
    }

    /// Calls `decide` for each received frame, oldest first, and sends or drops it accordingly. Afterwards no frames
    /// are left to look at. If `decide` panics and the program catches that, this frame and those behind it are
    /// dropped.
    #[inline]
    pub fn frames(&mut self, mut decide: impl FnMut(&mut InHand<'_, N>) -> Fate) {
        let came = std::mem::take(&mut self.came);
        let mut look = Look { turn: self, came, go: 0, ours: 0 };
        for at in 0..came {
            let turn = &mut *look.turn;
            let mut frame = InHand {
                nic: &mut *turn.nic,
                arena: turn.arena,
                frame: &mut turn.burst[at],
                kept: &mut *turn.kept,
                saved: false,
                is_ours: false,
                fate: Fate::Dropped,
            };
            frame.fate = decide(&mut frame);
            let (fate, is_ours) = (frame.fate, frame.is_ours);
            drop(frame);
            if fate == Fate::Sent {
                turn.burst.swap(look.go, at);
                look.ours |= u32::from(is_ours) << look.go;
                look.go += 1;
            }
        }
    }

    /// Returns the number of frames that can still be made in this turn, if there are slots.
    pub fn room(&self) -> usize {
        self.burst.remaining_capacity()
    }

    /// Makes a new frame of `len` bytes, all zeros, which goes out behind the others. `len` does not include the
    /// check sequence. Returns nothing if this turn has [no room](Self::room), the NIC has no free slot, or no slot
    /// is long enough.
    pub fn make(&mut self, len: u16) -> Option<&mut [u8]> {
        if self.burst.is_full() {
            return None;
        }
        let mut slot = self.arena.take().filter(|slot| usize::from(len) <= slot.len())?;
        slot.bytes_mut()[..len.into()].fill(0);
        self.ours |= 1 << self.burst.len();
        self.burst.push(Frame { slot, len });
        self.burst.last_mut().map(|frame| &mut frame.slot.bytes_mut()[..len.into()])
    }

    /// Returns the number of frames that the node has sent by this NIC before this turn. This is the number of the
    /// next frame if each frame carries its number. It is as exact as the state.
    pub fn sent(&self) -> u64 {
        self.nic.given()
    }
}

/// A look at all received frames. Its end drops those that do not go, also if a panic ends it: a program may catch
/// its own panic.
struct Look<'t, 'a, N: Transactional> {
    turn: &'t mut Turn<'a, N>,
    came: usize,
    /// Number of frames that go. They lie in front.
    go: usize,
    /// Bits of these frames, as in [`Turn`].
    ours: u32,
}

impl<N: Transactional> Drop for Look<'_, '_, N> {
    #[inline]
    fn drop(&mut self) {
        let Look { turn, came, go, ours } = self;
        // Each slot in which a frame arrived is kept at most once, so all have room.
        turn.kept.extend(turn.burst.drain(*go..*came));
        // Frames made before the look go behind the received frames.
        turn.ours = *ours | turn.ours.checked_shr(u32::try_from(*came - *go).unwrap_or(0)).unwrap_or(0);
    }
}

/// A received frame that is pending: it is neither sent nor dropped.
#[derive(Debug)]
pub struct InHand<'a, N: Transactional> {
    nic: &'a mut N,
    arena: &'a Arena,
    frame: &'a mut Frame,
    kept: &'a mut Burst,
    saved: bool,
    is_ours: bool,
    fate: Fate,
}

impl<N: Transactional> Drop for InHand<'_, N> {
    #[inline]
    fn drop(&mut self) {
        // Wipe a copy that does not go: no driver knows of its contents.
        if self.is_ours && self.fate == Fate::Dropped {
            self.frame.slot.bytes_mut().fill(0);
            if let Some(as_it_came) = self.kept.pop() {
                *self.frame = as_it_came;
            }
        }
    }
}

impl<N: Transactional> InHand<'_, N> {
    /// Length of a frame's [head](Self::head_mut), in bytes.
    pub const HEAD: usize = tasuki_net::nic::ledger::SAVED_LEN;

    /// Returns the bytes of the frame, without check sequence.
    pub fn bytes(&self) -> &[u8] {
        self.frame.bytes()
    }

    /// Returns the first [`HEAD`](Self::HEAD) bytes, or the whole frame if it is shorter, to change in place. The
    /// original bytes are kept for a successor.
    #[inline]
    pub fn head_mut(&mut self) -> &mut [u8] {
        if !self.saved && !self.is_ours {
            self.nic.save(self.frame);
            self.saved = true;
        }
        let len = usize::from(self.frame.len).min(Self::HEAD);
        &mut self.frame.slot.bytes_mut()[..len]
    }

    /// Returns all bytes of the frame, to change. The first call copies the frame to a slot that no other process
    /// sees. Returns nothing if the NIC has no free slot.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let len = usize::from(self.frame.len);
        let slot = self.own()?;
        Some(&mut slot.bytes_mut()[..len])
    }

    /// Returns all bytes of the frame as [`bytes_mut`](Self::bytes_mut) does, with the length `len`; added bytes are
    /// zeros. Returns nothing, and changes nothing, if the NIC has no free slot or no slot is long enough.
    pub fn resize(&mut self, len: u16) -> Option<&mut [u8]> {
        let had = usize::from(self.frame.len);
        if usize::from(len) > self.frame.slot.len() {
            return None;
        }
        let slot = self.own()?;
        let (now, bytes) = (usize::from(len), slot.bytes_mut());
        // The bytes that are added or cut off: a slot may go to another node, and is wiped as far as its frame goes.
        bytes[now.min(had)..now.max(had)].fill(0);
        self.frame.len = len;
        Some(&mut self.frame.slot.bytes_mut()[..len.into()])
    }

    /// Returns a slot of our own with the frame in it. The slot in which the frame arrived is kept unchanged until
    /// the turn is over. If its head was changed before, a successor has the saved head.
    fn own(&mut self) -> Option<&mut Slot> {
        if !self.is_ours {
            let mut slot = self.arena.take()?;
            let len = usize::from(self.frame.len);
            slot.bytes_mut()[..len].copy_from_slice(self.frame.bytes());
            let came = std::mem::replace(&mut self.frame.slot, slot);
            self.kept.push(Frame { slot: came, len: self.frame.len });
            self.is_ours = true;
        }
        Some(&mut self.frame.slot)
    }
}
