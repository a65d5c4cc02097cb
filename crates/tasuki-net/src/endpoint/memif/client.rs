//! One client: its socket, its memory, its two rings, and the bells of both sides.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use tasuki_shm::region::{CommonRegion, RegionError};
use tasuki_shm::wake::ring_eventfd;
use zerocopy::IntoBytes;

use super::control::{Control, Deed, Handed, REGIONS_MAX, RingPlace, Terms, farewell, hello};
use super::ledger::Ledger;
use super::refusal::{Refusal, Way};
use super::ring::{Regions, Ring};
use super::wire::{MESSAGE_LEN, Message};
use crate::endpoint::Parts;

/// Maximum duration of a handshake.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// Maximum number of messages read at a time: a handshake, and some more.
const AT_ONCE: usize = 16;

/// Maximum number of descriptors taken from a message: the one that belongs to it, and one more that shows an excess.
const DESCRIPTORS: usize = 2;

/// Number of a client's descriptors that are not regions: the socket, and two eventfds.
const OTHERS: usize = 3;

/// Why a client is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client went, or died.
    Left,
    /// The client was sent away.
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
    /// All memory of the client.
    pub regions: Regions,
    /// Ring with the frames that the client sends.
    pub from: Ring,
    /// Eventfd by which the client rings after it has sent frames.
    pub bell: OwnedFd,
    /// Ring with the client's buffers for the frames that it receives.
    pub to: Ring,
    bell_sender: OwnedFd,
}

/// A client, from its first message on.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    control: Control,
    since: Instant,
    regions: Regions,
    /// Memory files and ring places, for a successor.
    memories: ArrayVec<(u64, OwnedFd), REGIONS_MAX>,
    rings: ArrayVec<(RingPlace, OwnedFd), 2>,
    /// Rings and memory; `None` until the handshake is done.
    pub attached: Option<Attached>,
}

impl Client {
    /// Greets the client that connected to `socket`, which must not block.
    pub fn greet(socket: OwnedFd, terms: &Terms, now: Instant) -> Result<Self, End> {
        let client = Self::over(socket, Control::default(), now);
        client.say(&hello(terms))?;
        Ok(client)
    }

    fn over(socket: OwnedFd, control: Control, since: Instant) -> Self {
        Client {
            socket,
            control,
            since,
            regions: Regions::default(),
            memories: ArrayVec::new(),
            rings: ArrayVec::new(),
            attached: None,
        }
    }

    /// Returns what a successor needs, if the client is connected.
    pub fn parts(&self) -> io::Result<Option<Parts>> {
        let Some(attached) = &self.attached else { return Ok(None) };
        let text = Text {
            regions: self.memories.iter().map(|(size, _)| *size).collect(),
            to_server: RingText::of(attached.from.place()),
            to_client: RingText::of(attached.to.place()),
        };
        let memories = self.memories.iter().map(|(_, memory)| memory);
        let fds = [&self.socket, &attached.bell, &attached.bell_sender].into_iter().chain(memories);
        Ok(Some(Parts {
            name: self.name(),
            number: name_of(self.socket()),
            version: 0,
            text: serde_json::to_string(&text)?,
            fds: fds.map(OwnedFd::try_clone).collect::<io::Result<_>>()?,
        }))
    }

    /// Maps a client's memory from a predecessor. Reads none of it before [`go_on`](Self::go_on).
    fn map_again(
        name: &str,
        text: &Text,
        [socket, bell, bell_sender]: [OwnedFd; 3],
        memories: Vec<OwnedFd>,
    ) -> Result<Self, (OwnedFd, Refusal)> {
        let regions = text.regions.iter().zip(memories).map(|(size, memory)| Handed::Region(*size, memory));
        let rings = [
            Handed::Ring(text.to_server.place(Way::ToServer), bell),
            Handed::Ring(text.to_client.place(Way::ToClient), bell_sender),
        ];
        let (control, deeds) = Control::again(name, regions.chain(rings));
        let mut client = Self::over(socket, control, Instant::now());
        for deed in deeds {
            match deed.map_err(End::from).and_then(|deed| client.act(deed)) {
                Ok(()) => {}
                Err(End::Refused(refusal)) => return Err((client.socket, refusal)),
                Err(End::Left) => unreachable!("no deed of these is to forget it"),
            }
        }
        Ok(client)
    }

    /// Continues where a predecessor stopped, unless the client has gone meanwhile.
    pub fn go_on(&mut self, terms: &Terms, ledger: &mut Ledger) -> Result<(), End> {
        self.hear(terms)?;
        let Some(attached) = &mut self.attached else { return Ok(()) };
        attached.from.go_on(ledger);
        attached.to.go_on(ledger);
        // A predecessor may have ended before it rang.
        attached.ring();
        Ok(())
    }

    /// Unmaps the client's memory and returns its socket.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Shuts the connection down, for all processes that hold the socket.
    pub fn hang_up(&self) {
        hang_up(&self.socket);
    }

    /// Returns the name that the client gives itself.
    pub fn name(&self) -> String {
        self.control.client()
    }

    /// Returns the client's socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether the handshake has taken longer than [`HANDSHAKE`].
    pub fn is_late(&self, now: Instant) -> bool {
        !self.control.is_connected() && now.saturating_duration_since(self.since) >= HANDSHAKE
    }

    /// Reads the client's messages, and answers them.
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
                self.memories.push((size as u64, memory));
            }
            Deed::Ring(place, bell) => {
                if !tasuki_shm::wake::is_eventfd(bell.as_fd()) {
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
        let (to, bell_sender) = ring(Way::ToClient)?;
        Ok(Attached { regions, from, bell, to, bell_sender })
    }

    fn say(&self, message: &Message) -> Result<(), End> {
        match send(self.socket.as_fd(), message) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => Err(Refusal::Deaf.into()),
            Err(_) => Err(End::Left),
        }
    }

    /// Tells the client why it is sent away, and hangs up.
    pub fn dismiss(self, refusal: Refusal) {
        dismiss(&self.socket, refusal);
    }
}

impl Attached {
    /// Wakes the client, if it wants that.
    pub fn ring(&self) {
        if self.to.wants_rings() {
            ring_eventfd(&self.bell_sender);
        }
    }
}

/// Tells a client why it is sent away, and hangs up. Reads its pending messages first; otherwise the client would see a
/// reset before the reason.
pub fn dismiss(socket: &OwnedFd, refusal: Refusal) {
    let _ = send(socket.as_fd(), &farewell(refusal));
    let mut room = [0; MESSAGE_LEN + 1];
    for _ in 0..AT_ONCE {
        if !matches!(receive(socket.as_fd(), &mut room), Ok(Some(_))) {
            break;
        }
    }
    hang_up(socket);
}

/// Shuts the connection down, because other processes may hold the socket too: the keeper for our successor.
fn hang_up(socket: &OwnedFd) {
    // Fails if it is shut down already.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

/// What a successor of a client's server must know besides the client's descriptors.
#[derive(Debug, Serialize, Deserialize)]
struct Text {
    /// Length in bytes of each region.
    regions: Vec<u64>,
    /// Ring in which the client sends.
    to_server: RingText,
    /// Ring in which the client receives.
    to_client: RingText,
}

/// Place of a ring.
#[derive(Debug, Serialize, Deserialize)]
struct RingText {
    region: u16,
    offset: u32,
    log2_size: u8,
}

impl RingText {
    fn of(RingPlace { region, offset, log2_size, .. }: RingPlace) -> Self {
        RingText { region, offset, log2_size }
    }

    fn place(&self, way: Way) -> RingPlace {
        let RingText { region, offset, log2_size } = *self;
        RingPlace { way, region, offset, log2_size }
    }
}

/// A client of a predecessor, mapped by the process that may have to continue with it; or why that is impossible.
#[derive(Debug)]
pub struct Inherited(pub(super) Result<Box<Client>, (OwnedFd, Refusal)>);

impl Inherited {
    /// Maps the memory, so that it is there when needed. Touches none of its rings and frames.
    ///
    /// # Errors
    /// A sentence: these are no parts of a client.
    pub fn new(parts: Parts) -> Result<Self, String> {
        let Parts { name, text, mut fds, .. } = parts;
        let text: Text = serde_json::from_str(&text).map_err(|error| {
            format!("the description of a client of memif is not understood ({error}); rebuild the older of daemon and worker")
        })?;
        let (count, expected) = (fds.len(), OTHERS + text.regions.len());
        if count != expected {
            return Err(format!(
                "{count} descriptors came with a client of memif, and {expected} belong to it; rebuild the older of daemon and worker"
            ));
        }
        let memories = fds.split_off(OTHERS);
        let others = <[OwnedFd; OTHERS]>::try_from(fds).expect("they were counted");
        Ok(Inherited(Client::map_again(&name, &text, others, memories).map(Box::new)))
    }

    /// Returns the client's socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Ok(client) => client.socket(),
            Err((socket, _)) => socket.as_fd(),
        }
    }

    /// Returns whether this is the same client.
    pub(super) fn is(&self, client: &Client) -> bool {
        name_of(self.socket()) == name_of(client.socket())
    }

    /// Returns what another process needs to continue with the client, or `None` once it is gone.
    pub fn parts(&self) -> io::Result<Option<Parts>> {
        match &self.0 {
            Ok(client) if !has_hung_up(client.socket()) => client.parts(),
            _ => Ok(None),
        }
    }
}

/// Returns the inode of a client's socket, which identifies it as long as a process has it open.
pub fn name_of(socket: BorrowedFd<'_>) -> u64 {
    rustix::fs::fstat(socket).map_or(0, |stat| stat.st_ino)
}

/// Returns whether the client is gone.
fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&at_once)) == Ok(1)
}

fn send(socket: BorrowedFd<'_>, message: &Message) -> Result<(), Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let parts = [IoSlice::new(message.as_bytes())];
    rustix::io::retry_on_intr(|| sendmsg(socket, &parts, &mut SendAncillaryBuffer::default(), flags)).map(|_| ())
}

type Came = ArrayVec<OwnedFd, DESCRIPTORS>;

/// Receives the next message, if there is one. Returns its length and its descriptors.
fn receive(socket: BorrowedFd<'_>, room: &mut [u8]) -> Result<Option<(usize, Came)>, End> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut beside, flags);
    let mut came = Came::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            // The buffer has room for no more, and the kernel closes the rest.
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

fn refusal_of(error: &RegionError, index: u16) -> Refusal {
    match error {
        RegionError::NotMemory => Refusal::RegionKind(index),
        RegionError::Unsealed => Refusal::RegionUnsealed(index),
        RegionError::Unguarded => Refusal::RegionHuge(index),
        RegionError::Truncated { .. } => Refusal::RegionShort(index),
        _ => Refusal::RegionUnmapped(index),
    }
}
