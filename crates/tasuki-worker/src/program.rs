//! A user's own program: what it must be, and what it gets each turn.

use std::time::Duration;

use tasuki_net::nic::Mac;
use tasuki_net::port::{Burst, Frame, Transactional};
use tasuki_shm::arena::{Arena, Slot};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Most bytes of a program's [state](Program::State).
pub const STATE_MAX: usize = 480;

/// What handles the frames of a node's NICs: one value for each NIC.
///
/// A *turn* is what happens at once: frames come, the program changes, sends or drops each and makes new ones, and its state moves on. It happens
/// wholly or not at all: if the worker is killed in the middle of it, its successor gets the same frames as they had come, and the state as it
/// was before. What the program keeps in itself (`self`) is gone with the worker.
///
/// A turn is over once the card has been told of the frames that go; whoever is killed after that has done it, and nobody does it again. Work is
/// to be in frames and state alone: the worker may open no file and no socket.
pub trait Program: Sized {
    /// What a successor must have: plain data of at most [`STATE_MAX`] bytes, all zeros at first. It is exact over upgrade, death and handover, for each
    /// NIC and each node. A turn in which no frame comes or goes is remembered with the next one in which one does.
    type State: FromBytes + IntoBytes + Immutable + Copy;

    /// Whose states these are, by a number that you choose, and of which version: another when the layout of [`State`](Self::State) is another.
    const STATE: (u32, u32);

    /// What the node's `options` ask for. Called for each NIC, and once before: all that the program must not do later (much memory, long tables) is done
    /// here.
    ///
    /// # Errors
    /// A sentence for whoever wrote the options: what is wrong, and what to write. The worker then ends, and an upgrade to it fails.
    fn new(options: &str) -> Result<Self, String>;

    /// The state of another version, or of another program, as it stands in `bytes`. Without a conversion the program is refused, and whoever drives drives on.
    fn convert(kind: u32, version: u32, bytes: &[u8]) -> Option<Self::State> {
        let _ = (kind, version, bytes);
        None
    }

    /// One turn. Called when frames have come, and when [`rest`](Self::rest) is over. A panic ends the worker: its successor gets the same frames.
    fn turn<N: Transactional>(&mut self, state: &mut Self::State, turn: &mut Turn<'_, N>);

    /// How long until a turn is due though no frame comes; nothing if frames are all that it waits for. Rests longer than a second are cut to that.
    fn rest(&self, state: &Self::State) -> Option<Duration> {
        let _ = state;
        None
    }

    /// What `tasuki nic counts` shows, by name.
    fn counts(state: &Self::State) -> Vec<(String, u64)> {
        let _ = state;
        Vec::new()
    }
}

/// What becomes of a frame that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It goes out, behind those that came before it.
    Sent,
    /// It is gone.
    Dropped,
}

/// The frames of one turn. Those that came and are not looked at with [`frames`](Self::frames) are dropped.
#[derive(Debug)]
pub struct Turn<'a, N: Transactional> {
    nic: &'a mut N,
    arena: &'a Arena,
    /// Those that came and were not looked at, then those that go.
    burst: &'a mut Burst,
    came: usize,
    /// Slots that came and are not to be written before the turn is over.
    kept: &'a mut Burst,
    /// Of those that go, by their place: they are ours, and no slot that came.
    ours: u32,
}

const _: () = assert!(tasuki_net::port::BURST_MAX == 32, "a bit of a word for each frame of a burst");

impl<'a, N: Transactional> Turn<'a, N> {
    /// All that is in `burst` came.
    pub(crate) fn new(nic: &'a mut N, arena: &'a Arena, burst: &'a mut Burst, kept: &'a mut Burst) -> Self {
        let came = burst.len();
        Turn { nic, arena, burst, came, kept, ours: 0 }
    }

    /// It is over; which of the frames that go are ours.
    pub(crate) fn end(mut self) -> u32 {
        self.frames(|_| Fate::Dropped);
        self.ours
    }

    /// The NIC's address.
    pub fn mac(&self) -> Mac {
        self.nic.station()
    }

    /// Frames that came and were not looked at yet.
    pub fn came(&self) -> usize {
        self.came
    }

    /// Looks at each frame that came, oldest first, and decides about it. Afterwards there are none left to look at.
    #[inline]
    pub fn frames(&mut self, mut decide: impl FnMut(&mut InHand<'_, N>) -> Fate) {
        let came = std::mem::take(&mut self.came);
        // What was made before goes behind those that came.
        let made = self.ours;
        let (mut go, mut ours) = (0, 0_u32);
        for at in 0..came {
            let mut frame = InHand {
                nic: &mut *self.nic,
                arena: self.arena,
                frame: &mut self.burst[at],
                kept: &mut *self.kept,
                saved: false,
                is_ours: false,
            };
            let fate = decide(&mut frame);
            let is_ours = frame.is_ours;
            match fate {
                Fate::Sent => {
                    self.burst.swap(go, at);
                    ours |= u32::from(is_ours) << go;
                    go += 1;
                }
                // What stands in a copy that does not go is wiped, since no driver knows of it.
                Fate::Dropped if is_ours => {
                    self.burst[at].slot.bytes_mut().fill(0);
                    if let Some(as_it_came) = self.kept.pop() {
                        self.burst[at] = as_it_came;
                    }
                }
                Fate::Dropped => {}
            }
        }
        // Each slot that came is kept at most once, so that all have room.
        self.kept.extend(self.burst.drain(go..came));
        self.ours = ours | made.checked_shr(u32::try_from(came - go).unwrap_or(0)).unwrap_or(0);
    }

    /// Frames that can still be made in this turn, if there are slots.
    pub fn room(&self) -> usize {
        self.burst.remaining_capacity()
    }

    /// A new frame of `len` bytes, all zeros, which goes out behind the others; `len` is without check sequence. Nothing if this turn has
    /// [no room](Self::room), the NIC has no free slot, or no slot is so long.
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

    /// Frames that the node has sent by this NIC before this turn: the number of the next one, if each carries its number. As exact as the state.
    pub fn sent(&self) -> u64 {
        self.nic.given()
    }
}

/// A frame that came, and is in hand: it neither has gone nor is dropped.
#[derive(Debug)]
pub struct InHand<'a, N: Transactional> {
    nic: &'a mut N,
    arena: &'a Arena,
    frame: &'a mut Frame,
    kept: &'a mut Burst,
    saved: bool,
    is_ours: bool,
}

impl<N: Transactional> InHand<'_, N> {
    /// Bytes of a frame's [head](Self::head_mut).
    pub const HEAD: usize = tasuki_net::nic::ledger::SAVED_LEN;

    /// Its bytes, without check sequence.
    pub fn bytes(&self) -> &[u8] {
        self.frame.bytes()
    }

    /// Its first [`HEAD`](Self::HEAD) bytes, or all if it has fewer, to be changed where they lie. What was there is kept for a successor.
    #[inline]
    pub fn head_mut(&mut self) -> &mut [u8] {
        if !self.saved && !self.is_ours {
            self.nic.save(self.frame);
            self.saved = true;
        }
        let len = usize::from(self.frame.len).min(Self::HEAD);
        &mut self.frame.slot.bytes_mut()[..len]
    }

    /// All its bytes, to be changed: the first call of this copies it to a slot that nobody else will see. Nothing if the NIC has no free slot.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let len = usize::from(self.frame.len);
        let slot = self.own()?;
        Some(&mut slot.bytes_mut()[..len])
    }

    /// The same, of another length: what is added is zeros. Nothing, and no change, if the NIC has no free slot or no slot is so long.
    pub fn resize(&mut self, len: u16) -> Option<&mut [u8]> {
        let had = usize::from(self.frame.len);
        if usize::from(len) > self.frame.slot.len() {
            return None;
        }
        let slot = self.own()?;
        if let Some(added) = slot.bytes_mut().get_mut(had..len.into()) {
            added.fill(0);
        }
        self.frame.len = len;
        Some(&mut self.frame.slot.bytes_mut()[..len.into()])
    }

    /// A slot of ours with the frame in it. That in which it came is kept as it is until the turn is over, unless its head was changed: then
    /// a successor has that.
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
