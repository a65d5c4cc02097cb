//! Messages as a server sees them: the vfio-user protocol, version 0.1 (QEMU's docs/interop/vfio-user.rst). This
//! module shares nothing with the client of the drivers: the same mistake in both would go unnoticed.

use rustix::io::Errno;
use serde_json::Value;

/// Bytes of a message's header.
pub const HEADER: usize = 16;
/// Most bytes of a region read or written by one message.
pub const TRANSFER_MAX: usize = 64 << 10;
/// Bytes of the largest valid message.
pub const MESSAGE_MAX: usize = HEADER + 16 + TRANSFER_MAX;
/// Most descriptors that the server accepts with a message.
pub const FDS_MAX: usize = 16;
/// The server's capabilities, as it sends them to a client.
pub const CAPABILITIES: &[u8] =
    b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":65536,\"max_dma_maps\":64,\"region_io_fds\":true}}\0";

/// A broken rule after which the rest of the stream cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// No message has this size.
    #[error("the client announced a message of {0} bytes")]
    Size(u32),
    /// The message is not a command: clients send only commands.
    #[error("the client sent a message with the flags {0:#x}, which is not a command")]
    NoCommand(u32),
    /// The client did not begin with its version.
    #[error("the client began with command {0} and not with its version")]
    NoVersion(u16),
    /// The client's version is malformed, or of another protocol.
    #[error("the client's version makes no sense, or is not 0.x")]
    BadVersion,
    /// The message has more descriptors than the server accepts.
    #[error("the client sent more than {FDS_MAX} descriptors with a message")]
    Descriptors,
}

/// The header of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The client's number for the command.
    pub id: u16,
    /// Number of the command.
    pub command: u16,
    /// Bytes of the message, header included.
    pub size: usize,
    /// Whether the client wants no reply.
    pub posted: bool,
}

impl Header {
    /// Parses a header.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Self, Breach> {
        let mut fields = Fields(bytes);
        let mut short = || fields.u16().unwrap_or_default();
        let (id, command) = (short(), short());
        let (size, flags) = (fields.u32().unwrap_or_default(), fields.u32().unwrap_or_default());
        if flags & !0x10 != 0 {
            return Err(Breach::NoCommand(flags));
        }
        match size as usize {
            fits @ HEADER..=MESSAGE_MAX => Ok(Header { id, command, size: fits, posted: flags != 0 }),
            _ => Err(Breach::Size(size)),
        }
    }

    /// Begins a reply to the command in `reply`; [`finish`] completes it.
    pub fn answer(&self, reply: &mut Vec<u8>, error: Option<Errno>) {
        let (flags, errno) = match error {
            None => (1_u32, 0),
            Some(errno) => (0x21, errno.raw_os_error()),
        };
        reply.clear();
        reply.extend(self.id.to_ne_bytes());
        reply.extend(self.command.to_ne_bytes());
        reply.extend([0; 4]);
        reply.extend(flags.to_ne_bytes());
        reply.extend(errno.to_ne_bytes());
    }
}

/// Sets a reply's size field.
pub fn finish(reply: &mut [u8]) {
    let size = u32::try_from(reply.len()).expect("an answer is at most a transfer and its headers");
    reply[4..8].copy_from_slice(&size.to_ne_bytes());
}

/// Takes numbers from the front of a message.
#[derive(Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

/// A command to the device, after version negotiation.
#[derive(Debug, PartialEq, Eq)]
pub enum Ask<'a> {
    DmaMap {
        rights: u32,
        offset: u64,
        at: u64,
        len: u64,
    },
    DmaUnmap {
        all: bool,
        at: u64,
        len: u64,
    },
    Info,
    RegionInfo {
        index: u32,
        room: usize,
    },
    RegionIoFds {
        index: u32,
        room: usize,
    },
    IrqInfo {
        index: u32,
    },
    /// Sets (`eventfds`) or removes the eventfds of `count` vectors from `start` on.
    SetIrqs {
        index: u32,
        start: u32,
        count: u32,
        eventfds: bool,
    },
    Read {
        region: u32,
        offset: u64,
        count: u32,
    },
    Write {
        region: u32,
        offset: u64,
        bytes: &'a [u8],
    },
    Reset,
}

impl<'a> Ask<'a> {
    /// Parses the body of a command.
    pub fn parse(command: u16, body: &'a [u8]) -> Result<Self, Errno> {
        let known = matches!(command, 2..=10 | 13);
        if !known {
            return Err(Errno::OPNOTSUPP);
        }
        Self::parse_known(command, Fields(body)).ok_or(Errno::INVAL)
    }

    fn parse_known(command: u16, mut body: Fields<'a>) -> Option<Self> {
        let len = u32::try_from(body.0.len()).ok()?;
        let ask = match command {
            2 => {
                let (argsz, rights) = (body.u32()?, body.u32()?);
                let ask = Ask::DmaMap { rights, offset: body.u64()?, at: body.u64()?, len: body.u64()? };
                (argsz == 32 && rights & !3 == 0 && rights != 0).then_some(ask)?
            }
            3 => {
                let (argsz, flags) = (body.u32()?, body.u32()?);
                let (at, len) = (body.u64()?, body.u64()?);
                let all = flags == 2;
                let sound = argsz >= 24 && (flags == 0 || all && at == 0 && len == 0);
                sound.then_some(Ask::DmaUnmap { all, at, len })?
            }
            4 => {
                let (argsz, _) = (body.u32()?, (body.u32()?, body.u32()?, body.u32()?));
                (argsz >= 16).then_some(Ask::Info)?
            }
            5 => {
                let (argsz, _, index) = (body.u32()?, body.u32()?, body.u32()?);
                let _ = (body.u32()?, body.u64()?, body.u64()?);
                (argsz >= 32).then_some(Ask::RegionInfo { index, room: argsz as usize })?
            }
            6 => {
                let (argsz, flags, index, count) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
                let sound = argsz >= 16 && flags == 0 && count == 0;
                sound.then_some(Ask::RegionIoFds { index, room: argsz as usize })?
            }
            7 => {
                let (argsz, _, index, _) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
                (argsz >= 16).then_some(Ask::IrqInfo { index })?
            }
            8 => {
                let (argsz, flags) = (body.u32()?, body.u32()?);
                let (index, start, count) = (body.u32()?, body.u32()?, body.u32()?);
                let eventfds = match flags {
                    0x24 if count > 0 => true,
                    // No vectors, from the first on: all vectors lose their eventfds.
                    0x21 if count == 0 && start == 0 => false,
                    _ => return None,
                };
                (argsz == len).then_some(Ask::SetIrqs { index, start, count, eventfds })?
            }
            9 => Ask::Read { offset: body.u64()?, region: body.u32()?, count: body.u32()? },
            10 => {
                let (offset, region, count) = (body.u64()?, body.u32()?, body.u32()?);
                let bytes = std::mem::take(&mut body.0);
                (bytes.len() == count as usize).then_some(Ask::Write { region, offset, bytes })?
            }
            13 => Ask::Reset,
            _ => return None,
        };
        body.0.is_empty().then_some(ask)
    }
}

/// Parses a client's version; returns the minor version to use.
pub fn parse_version(body: &[u8]) -> Result<u16, Breach> {
    let mut fields = Fields(body);
    let (Some(0), Some(minor)) = (fields.u16(), fields.u16()) else { return Err(Breach::BadVersion) };
    if let Some((last, json)) = fields.0.split_last() {
        let data = serde_json::from_slice::<Value>(json).map_err(|_| Breach::BadVersion)?;
        if *last != 0 || !data.is_object() {
            return Err(Breach::BadVersion);
        }
    }
    Ok(minor.min(1))
}
