//! One client: its socket, its memory, its two rings, and what it rings with and is rung by.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};
use tasuki_shm::region::{CommonRegion, RegionError};
use zerocopy::IntoBytes;

use super::control::{Control, Deed, RingPlace, Terms, farewell, hello};
use super::refusal::{Refusal, Way};
use super::ring::{Regions, Ring};
use super::wire::{MESSAGE_LEN, Message};

/// How long a handshake may take.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// Messages that are heard at a time: a handshake, and somewhat more.
const AT_ONCE: usize = 16;

/// Descriptors that are taken from a message: one that belongs to it, and one that shows that there are more.
const DESCRIPTORS: usize = 2;

/// Why a client is there no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It went, or died.
    Left,
    /// It was sent away.
    Refused(Refusal),
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        End::Refused(refusal)
    }
}

/// Both rings of a client, and its memory.
#[derive(Debug)]
pub struct Attached {
    /// All its memory.
    pub regions: Regions,
    /// What it sends.
    pub from: Ring,
    /// It rings by this when it has sent something.
    pub bell: OwnedFd,
    /// Where it has buffers for what it is sent.
    pub to: Ring,
    clapper: OwnedFd,
}

/// A client, from its first message on.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    control: Control,
    since: Instant,
    regions: Regions,
    rings: ArrayVec<(RingPlace, OwnedFd), 2>,
    /// What it has when it is connected.
    pub attached: Option<Attached>,
}

impl Client {
    /// Greets whoever has connected to `socket`, which does not block.
    pub fn greet(socket: OwnedFd, terms: &Terms, now: Instant) -> Result<Self, End> {
        let client = Client {
            socket,
            control: Control::default(),
            since: now,
            regions: Regions::default(),
            rings: ArrayVec::new(),
            attached: None,
        };
        client.say(&hello(terms))?;
        Ok(client)
    }

    /// What it says its name is.
    pub fn name(&self) -> String {
        self.control.client()
    }

    /// Its socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether it has been in its handshake for too long.
    pub fn is_late(&self, now: Instant) -> bool {
        !self.control.is_connected() && now.saturating_duration_since(self.since) >= HANDSHAKE
    }

    /// Hears what it has said, and answers.
    pub fn hear(&mut self, terms: &Terms) -> Result<(), End> {
        for _ in 0..AT_ONCE {
            let mut room = [0; MESSAGE_LEN + 1];
            let Some((len, came)) = receive(self.socket.as_fd(), &mut room)? else { return Ok(()) };
            let (deed, answer) = self.control.hear(terms, &room[..len], came)?;
            self.act(deed)?;
            if let Some(answer) = answer {
                self.say(&answer)?;
            }
        }
        Ok(())
    }

    fn act(&mut self, deed: Deed<OwnedFd>) -> Result<(), End> {
        match deed {
            Deed::Nothing => {}
            Deed::Map { index, size, memory } => {
                let size = usize::try_from(size).map_err(|_| Refusal::RegionSize)?;
                let region = CommonRegion::map(memory.as_fd(), size).map_err(|error| refusal_of(&error, index))?;
                self.regions.push(region);
            }
            Deed::Ring(place, bell) => {
                if !is_eventfd(bell.as_fd()) {
                    return Err(Refusal::RingSilent(place.way).into());
                }
                // The client may undo this at any time: see `ring`.
                let _ = rustix::fs::fcntl_setfl(&bell, OFlags::NONBLOCK);
                self.rings.push((place, bell));
            }
            Deed::Attach => self.attached = Some(self.attach()?),
            Deed::Forget => return Err(End::Left),
        }
        Ok(())
    }

    fn attach(&mut self) -> Result<Attached, Refusal> {
        let regions = std::mem::take(&mut self.regions);
        let mut ring = |way| {
            let at = self.rings.iter().position(|(place, _)| place.way == way).ok_or(Refusal::RingMissing(way))?;
            let (place, bell) = self.rings.swap_remove(at);
            Ring::new(&regions, place).map(|ring| (ring, bell))
        };
        let (from, bell) = ring(Way::ToServer)?;
        let (to, clapper) = ring(Way::ToClient)?;
        Ok(Attached { regions, from, bell, to, clapper })
    }

    fn say(&self, message: &Message) -> Result<(), End> {
        match send(self.socket.as_fd(), message) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => Err(Refusal::Deaf.into()),
            Err(_) => Err(End::Left),
        }
    }

    /// Tells it why it is sent away.
    pub fn dismiss(self, refusal: Refusal) {
        dismiss(&self.socket, refusal);
    }
}

impl Attached {
    /// Wakes the client, if it wants to be. Does not wait, whatever it has made of its eventfd: one that is full is readable anyway.
    pub fn ring(&self) {
        if !self.to.wants_rings() {
            return;
        }
        let mut polled = [PollFd::new(&self.clapper, PollFlags::OUT)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::event::poll(&mut polled, Some(&at_once)) == Ok(1) && polled[0].revents().contains(PollFlags::OUT) {
            let _ = rustix::io::write(&self.clapper, &1_u64.to_ne_bytes());
        }
    }
}

/// Tells whoever has connected why it is sent away, and reads what it has said, or it would hear of a reset before it hears the reason.
pub fn dismiss(socket: &OwnedFd, refusal: Refusal) {
    let _ = send(socket.as_fd(), &farewell(refusal));
    let mut room = [0; MESSAGE_LEN + 1];
    for _ in 0..AT_ONCE {
        if !matches!(receive(socket.as_fd(), &mut room), Ok(Some(_))) {
            return;
        }
    }
}

fn send(socket: BorrowedFd<'_>, message: &Message) -> Result<(), Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let parts = [IoSlice::new(message.as_bytes())];
    rustix::io::retry_on_intr(|| sendmsg(socket, &parts, &mut SendAncillaryBuffer::default(), flags)).map(|_| ())
}

type Came = ArrayVec<OwnedFd, DESCRIPTORS>;

/// The next message, if there is one: its bytes, and what came along.
fn receive(socket: BorrowedFd<'_>, room: &mut [u8]) -> Result<Option<(usize, Came)>, End> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut beside, flags);
    let mut came = Came::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            // There is room for no more than we asked for, and the kernel closes the rest.
            descriptors.for_each(|descriptor| drop(came.try_push(descriptor)));
        }
    }
    match got {
        Ok(got) if got.bytes == 0 => Err(End::Left),
        Ok(got) => Ok(Some((got.bytes, came))),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(_) => Err(End::Left),
    }
}

/// Whether it is an eventfd, and nothing that does more when it is written to.
fn is_eventfd(descriptor: BorrowedFd<'_>) -> bool {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    rustix::fs::readlink(path, Vec::new()).is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]")
}

fn refusal_of(error: &RegionError, index: u16) -> Refusal {
    match error {
        RegionError::NotMemory => Refusal::RegionKind(index),
        RegionError::Unsealed => Refusal::RegionUnsealed(index),
        RegionError::Unguarded => Refusal::RegionHuge(index),
        RegionError::Truncated { .. } => Refusal::RegionShort(index),
        _ => Refusal::RegionUnmapped(index),
    }
}
