//! The handshake: nine kinds of packet on a unix socket (SOCK_SEQPACKET), and the descriptors that travel with them.
//!
//! Every packet begins with `TSK` and a zero byte, `version: u16`, `kind: u16`; numbers are little-endian. A
//! receiver recognises and refuses another version by the first eight bytes, which will never change their meaning.
//!
//! | kind      | from      | then                                                               | descriptors                                                  |
//! |-----------|-----------|--------------------------------------------------------------------|--------------------------------------------------------------|
//! | Hello     | client    | ring, arena and reply geometry, first index, service to resume     | segment, arena, userfaultfd (enforced only)                  |
//! | Detached  | client    | nothing: I have closed my copy of the userfaultfd                  | none                                                         |
//! | Succeed   | successor | nothing                                                            | none                                                         |
//! | Welcome   | server    | service, generation, ring, reply geometry                          | segment, reply arena, end to ring, end to sleep in           |
//! | Refused   | server    | code, two numbers                                                  | none                                                         |
//! | Inheritance    | server    | generation                                                         | listening socket, state                                      |
//! | Release   | successor | nothing: stop, I take over                                         | none                                                         |
//! | Released  | server    | nothing: the lease is passed                                       | none                                                         |
//! | Taken     | successor | nothing: the lease is mine                                         | none                                                         |

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tasuki_shm::arena::Geometry;

/// Version of the handshake, the segments and the messages.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"TSK\0";

/// Maximum packet length in bytes.
const PACKET_MAX: usize = 256;

/// Maximum number of descriptors in a packet.
const FDS_MAX: usize = 4;

/// Identity of a service: the same for all servers that follow each other on the same state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Service(pub u128);

/// A client's first packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Number of lines of the client's request ring, and of the result ring that it wants.
    pub ring: u32,
    /// Geometry of the client's arena.
    pub arena: Geometry,
    /// Geometry of the reply arena that the client wants.
    pub replies: Geometry,
    /// Index of the first request that the server is to take.
    pub first: u32,
    /// Service that the client was connected to before; it brings the calls of that service along.
    pub resumes: Option<Service>,
    /// Address of the client's arena, if the server is to enforce the detach.
    pub enforced_base: Option<u64>,
}

/// A server's positive answer to a Hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Welcome {
    pub service: Service,
    pub generation: u32,
    pub ring: u32,
    pub replies: Geometry,
}

/// Reasons why a server refuses a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The versions differ.
    #[error(
        "the server speaks version {server} of the call protocol and this program version {client}; rebuild the older of the two"
    )]
    WrongVersion {
        /// Version of the server.
        server: u64,
        /// Version of this program.
        client: u64,
    },
    /// The server does not serve this user.
    #[error("the server does not serve user {uid}; run as a user it allows, or have the server allow this one")]
    NotAllowed {
        /// Our user id, as the kernel reported it to the server.
        uid: u64,
    },
    /// The server has as many clients as it allows.
    #[error("the server already has {max} clients, its limit; raise ServerOptions::clients_max or close some")]
    TooManyClients {
        /// Maximum number of clients.
        max: u64,
    },
    /// The server does not allow the requested ring size.
    #[error("a ring of {asked} entries was asked for; the server allows a power of two from 2 to {max}")]
    RingSize {
        /// Number of entries requested.
        asked: u64,
        /// Maximum number of entries that the server allows.
        max: u64,
    },
    /// The server does not allow the requested arenas.
    #[error(
        "arenas of {asked} bytes were asked for; the server allows {max} per client, in slots of whole 4 KiB pages"
    )]
    ArenaSize {
        /// Bytes requested, both arenas together.
        asked: u64,
        /// Maximum number of bytes that the server allows per client.
        max: u64,
    },
    /// The client was connected to another service.
    #[error("the server at this path is a new one, without the state of the one before; connect anew")]
    OtherService,
    /// The server lacks memory or descriptors.
    #[error(
        "the server lacks memory or descriptors for one more client; free some or raise its limits (RLIMIT_NOFILE)"
    )]
    NoMemory,
    /// The memory from the client is unusable.
    #[error(
        "the server cannot use the memory that this client handed over; the two programs do not fit together: rebuild both"
    )]
    BadMemory,
    /// The server cannot write-protect the arena from outside.
    #[error(
        "the server cannot enforce the detach of this client's arena: it needs the same user or root, and Linux 5.19; use the detach level guard or move"
    )]
    NotEnforceable,
    /// The server has no state to take over, or the asking process runs as another user.
    #[error(
        "the server has no state to take over, or another user's; start it with ServerOptions::state, and the successor as the same user"
    )]
    NoInheritance,
    /// The server already has a stand-by.
    #[error("the server has a stand-by already; stop that one first")]
    Watched,
    /// This version does not know the code.
    #[error(
        "the server refused for a reason that this version does not know (code {code}); rebuild the older of the two"
    )]
    Unknown {
        /// Code from the packet.
        code: u64,
    },
}

impl Refusal {
    fn to_parts(self) -> (u16, u64, u64) {
        match self {
            Refusal::WrongVersion { server, client } => (1, server, client),
            Refusal::NotAllowed { uid } => (2, uid, 0),
            Refusal::TooManyClients { max } => (3, max, 0),
            Refusal::RingSize { asked, max } => (4, asked, max),
            Refusal::ArenaSize { asked, max } => (5, asked, max),
            Refusal::OtherService => (6, 0, 0),
            Refusal::NoMemory => (7, 0, 0),
            Refusal::BadMemory => (8, 0, 0),
            Refusal::NotEnforceable => (9, 0, 0),
            Refusal::NoInheritance => (10, 0, 0),
            Refusal::Watched => (11, 0, 0),
            Refusal::Unknown { code } => (0, code, 0),
        }
    }

    fn from_parts(code: u16, a: u64, b: u64) -> Self {
        match code {
            1 => Refusal::WrongVersion { server: a, client: b },
            2 => Refusal::NotAllowed { uid: a },
            3 => Refusal::TooManyClients { max: a },
            4 => Refusal::RingSize { asked: a, max: b },
            5 => Refusal::ArenaSize { asked: a, max: b },
            6 => Refusal::OtherService,
            7 => Refusal::NoMemory,
            8 => Refusal::BadMemory,
            9 => Refusal::NotEnforceable,
            10 => Refusal::NoInheritance,
            11 => Refusal::Watched,
            code => Refusal::Unknown { code: code.into() },
        }
    }
}

/// One packet of the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packet {
    Hello(Hello),
    Succeed,
    Welcome(Welcome),
    Refused(Refusal),
    Inheritance { generation: u32 },
    Release,
    Released,
    Taken,
    Detached,
}

/// Bytes that are not a packet of this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes do not begin with the protocol's mark.
    #[error("the peer is not a Tasuki call endpoint")]
    Foreign,
    /// The packet has another version.
    #[error("the peer speaks version {0} of the call protocol, this program {VERSION}; rebuild the older of the two")]
    Version(u16),
    /// The packet is too short, or has a kind or a value that does not exist.
    #[error("the peer sent a malformed packet of kind {0}; it is broken or lies")]
    Body(u16),
}

struct Writer(Vec<u8>);

impl Writer {
    fn geometry(&mut self, geometry: Geometry) {
        self.0.extend(geometry.slot_len.to_le_bytes());
        self.0.extend(geometry.count.to_le_bytes());
    }

    fn option(&mut self, bytes: Option<&[u8]>, len: usize) {
        self.0.push(bytes.is_some().into());
        match bytes {
            Some(bytes) => self.0.extend(bytes),
            None => self.0.extend(std::iter::repeat_n(0, len)),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn service(&mut self) -> Option<Service> {
        self.take().map(u128::from_le_bytes).map(Service)
    }

    fn geometry(&mut self) -> Option<Geometry> {
        Some(Geometry { slot_len: self.u32()?, count: self.u32()? })
    }

    fn option<T>(&mut self, value: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        let [present] = self.take()?;
        let value = value(self)?;
        match present {
            0 => Some(None),
            1 => Some(Some(value)),
            _ => None,
        }
    }
}

impl Packet {
    fn kind(&self) -> u16 {
        match self {
            Packet::Hello(_) => 1,
            Packet::Succeed => 2,
            Packet::Welcome(_) => 3,
            Packet::Refused(_) => 4,
            Packet::Inheritance { .. } => 5,
            Packet::Release => 6,
            Packet::Released => 7,
            Packet::Taken => 8,
            Packet::Detached => 9,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(MAGIC.to_vec());
        out.0.extend(VERSION.to_le_bytes());
        out.0.extend(self.kind().to_le_bytes());
        match self {
            Packet::Hello(hello) => {
                out.0.extend(hello.ring.to_le_bytes());
                out.geometry(hello.arena);
                out.geometry(hello.replies);
                out.0.extend(hello.first.to_le_bytes());
                out.option(hello.resumes.map(|service| service.0.to_le_bytes()).as_ref().map(|bytes| &bytes[..]), 16);
                out.option(hello.enforced_base.map(u64::to_le_bytes).as_ref().map(|bytes| &bytes[..]), 8);
            }
            Packet::Welcome(welcome) => {
                out.0.extend(welcome.service.0.to_le_bytes());
                out.0.extend(welcome.generation.to_le_bytes());
                out.0.extend(welcome.ring.to_le_bytes());
                out.geometry(welcome.replies);
            }
            Packet::Refused(refusal) => {
                let (code, a, b) = refusal.to_parts();
                out.0.extend(code.to_le_bytes());
                out.0.extend(a.to_le_bytes());
                out.0.extend(b.to_le_bytes());
            }
            Packet::Inheritance { generation } => out.0.extend(generation.to_le_bytes()),
            Packet::Succeed | Packet::Release | Packet::Released | Packet::Taken | Packet::Detached => {}
        }
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader(bytes);
        if from.take() != Some(MAGIC) {
            return Err(Malformed::Foreign);
        }
        let (version, kind) = (from.u16().ok_or(Malformed::Foreign)?, from.u16().ok_or(Malformed::Foreign)?);
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        Self::decode_body(kind, &mut from).ok_or(Malformed::Body(kind))
    }

    fn decode_body(kind: u16, from: &mut Reader<'_>) -> Option<Self> {
        Some(match kind {
            1 => Packet::Hello(Hello {
                ring: from.u32()?,
                arena: from.geometry()?,
                replies: from.geometry()?,
                first: from.u32()?,
                resumes: from.option(Reader::service)?,
                enforced_base: from.option(Reader::u64)?,
            }),
            2 => Packet::Succeed,
            3 => Packet::Welcome(Welcome {
                service: from.service()?,
                generation: from.u32()?,
                ring: from.u32()?,
                replies: from.geometry()?,
            }),
            4 => Packet::Refused(Refusal::from_parts(from.u16()?, from.u64()?, from.u64()?)),
            5 => Packet::Inheritance { generation: from.u32()? },
            6 => Packet::Release,
            7 => Packet::Released,
            8 => Packet::Taken,
            9 => Packet::Detached,
            _ => return None,
        })
    }
}

/// A received packet and its descriptors.
#[derive(Debug)]
pub(crate) struct Received {
    pub packet: Result<Packet, Malformed>,
    pub fds: Vec<OwnedFd>,
    /// Whether descriptors are missing for which this process has no room.
    pub cut: bool,
}

/// Creates a handshake socket.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Returns the socket address of `path`.
pub(crate) fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(path)?)
}

/// Sends a packet with its descriptors. Never raises SIGPIPE.
pub(crate) fn send(socket: BorrowedFd<'_>, packet: &Packet, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "a packet carries at most {FDS_MAX} descriptors");
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&packet.encode())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a packet. Returns `None` if the peer has closed the socket.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Received>> {
    let mut bytes = [0; PACKET_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 && fds.is_empty() {
        return Ok(None);
    }
    // A packet with too many is cut, too.
    let cut = got.flags.contains(ReturnFlags::CTRUNC) && fds.len() < FDS_MAX;
    Ok(Some(Received { packet: Packet::decode(&bytes[..got.bytes]), fds, cut }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> impl Strategy<Value = Geometry> {
        any::<(u32, u32)>().prop_map(|(slot_len, count)| Geometry { slot_len, count })
    }

    fn packet() -> impl Strategy<Value = Packet> {
        let hello = (any::<(u32, u32)>(), geometry(), geometry(), any::<Option<u128>>(), any::<Option<u64>>())
            .prop_map(|((ring, first), arena, replies, resumes, enforced_base)| {
                Packet::Hello(Hello { ring, arena, replies, first, resumes: resumes.map(Service), enforced_base })
            });
        let welcome = (any::<(u128, u32, u32)>(), geometry()).prop_map(|((service, generation, ring), replies)| {
            Packet::Welcome(Welcome { service: Service(service), generation, ring, replies })
        });
        let refused = (1_u16..12, any::<u64>(), any::<u64>()).prop_map(|(code, a, b)| Refusal::from_parts(code, a, b));
        prop_oneof![
            hello,
            welcome,
            refused.prop_map(Packet::Refused),
            any::<u32>().prop_map(|generation| Packet::Inheritance { generation }),
            prop_oneof![
                Just(Packet::Succeed),
                Just(Packet::Release),
                Just(Packet::Released),
                Just(Packet::Taken),
                Just(Packet::Detached)
            ],
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_what_is_decoded(packet in packet()) {
            let bytes = packet.encode();
            prop_assert!(bytes.len() <= PACKET_MAX);
            prop_assert_eq!(Packet::decode(&bytes), Ok(packet));
            for len in 0..bytes.len() {
                prop_assert!(Packet::decode(&bytes[..len]).is_err(), "cut to {} bytes", len);
            }
        }

        #[test]
        fn any_bytes_are_a_packet_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Packet::decode(&bytes);
            let _ = Packet::decode(&[&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat());
        }
    }

    #[test]
    fn another_version_is_told_apart_from_something_foreign() {
        let mut bytes = Packet::Succeed.encode();
        bytes[4] = 9;
        assert_eq!(Packet::decode(&bytes), Err(Malformed::Version(9)));
        assert_eq!(Packet::decode(b"GET / HTTP/1.1"), Err(Malformed::Foreign));
    }
}
