//! Format of the messages: the vfio-user protocol, version 0.1 (QEMU's docs/interop/vfio-user.rst). All numbers are
//! in the machine's byte order. This module checks everything that a server sends before it is used.

use arrayvec::ArrayVec;
use serde_json::Value;

/// Major version of the protocol. There is no other.
pub const MAJOR: u16 = 0;
/// Highest minor version that this client supports.
pub const MINOR: u16 = 1;

/// Size in bytes of the header of every message.
pub const HEADER_LEN: usize = 16;
/// Maximum number of descriptors in a message, in either direction.
pub const FDS_MAX: usize = 16;
/// Maximum size in bytes of an answer about a region: room for 250 mappable areas.
pub const REGION_INFO_MAX: usize = 4096;
/// Maximum size in bytes of the server's version data.
pub const VERSION_MAX: usize = 4096;
/// Maximum size in bytes of a server's message: the default of max_data_xfer_size, and its headers.
pub const MESSAGE_MAX: u32 = (1 << 20) + 64;

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

const EINVAL: i32 = 22;
const ENOTSUP: u32 = 95;
/// Highest error number of Linux.
const ERRNO_MAX: u32 = 4095;

/// Commands to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Version = 1,
    DmaMap = 2,
    DmaUnmap = 3,
    DeviceGetInfo = 4,
    DeviceGetRegionInfo = 5,
    DeviceGetRegionIoFds = 6,
    DeviceGetIrqInfo = 7,
    DeviceSetIrqs = 8,
    RegionRead = 9,
    RegionWrite = 10,
    DeviceReset = 13,
}

/// Number of the configuration space's region, as in `<linux/vfio.h>`: BARs are 0 to 5.
pub const CONFIG_REGION: u32 = 7;
/// Number of the MSI-X kind of interrupt.
pub const MSIX: u32 = 2;
/// Number of the INTx kind of interrupt.
pub const INTX: u32 = 0;

pub const DEVICE_RESET: u32 = 1 << 0;
pub const DEVICE_PCI: u32 = 1 << 1;
pub const REGION_READ: u32 = 1 << 0;
pub const REGION_WRITE: u32 = 1 << 1;
pub const REGION_MMAP: u32 = 1 << 2;
pub const REGION_CAPS: u32 = 1 << 3;
pub const DMA_READ: u32 = 1 << 0;
pub const DMA_WRITE: u32 = 1 << 1;
pub const IRQ_EVENTFD: u32 = 1 << 0;
pub const IRQ_AUTOMASKED: u32 = 1 << 2;
pub const IRQ_DATA_EVENTFD: u32 = 1 << 2;
pub const IRQ_TRIGGER: u32 = 1 << 5;
pub const IRQ_UNMASK: u32 = 1 << 4;
const CAP_SPARSE_MMAP: u16 = 1;

/// Description of a rule that the server broke.
pub type Breach = String;

/// A message to the server. The longest one that the client sends is the version.
pub struct Message(ArrayVec<u8, 256>);

impl Message {
    /// Begins a command; [`finish`](Self::finish) fills in its size.
    pub fn command(id: u16, command: Command, posted: bool) -> Self {
        let flags = if posted { TYPE_COMMAND | NO_REPLY } else { TYPE_COMMAND };
        Self::header(id, command as u16, flags, 0)
    }

    /// Answers a server's request as unsupported.
    pub fn unsupported(id: u16, command: u16) -> Self {
        Self::header(id, command, TYPE_REPLY | ERROR, ENOTSUP)
    }

    fn header(id: u16, command: u16, flags: u32, errno: u32) -> Self {
        let mut message = Message(ArrayVec::new());
        message.u16(id).u16(command).u32(0).u32(flags).u32(errno);
        message
    }

    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.try_extend_from_slice(bytes).expect("no message of ours is longer than the version");
        self
    }

    /// Fills in the size and returns the whole message.
    pub fn finish(&mut self) -> &[u8] {
        let len = u32::try_from(self.0.len()).expect("at most 256");
        self.0[4..8].copy_from_slice(&len.to_ne_bytes());
        &self.0
    }
}

/// Reads fixed-size numbers; returns `None` at the end of the bytes.
pub struct Reader<'a>(pub &'a [u8]);

impl Reader<'_> {
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

/// Header of a message from the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incoming {
    /// An answer, with `len` bytes after the header.
    Reply { id: u16, command: u16, len: u32 },
    /// A refusal, with no bytes after the header.
    Refusal { id: u16, command: u16, errno: i32 },
    /// A request to the client, with `len` bytes after the header.
    Command { id: u16, command: u16, len: u32, posted: bool },
}

impl Incoming {
    /// Parses a header.
    pub fn parse(header: &[u8; HEADER_LEN]) -> Result<Self, Breach> {
        let mut from = Reader(header);
        let mut next = || from.u16().expect("sixteen bytes");
        let (id, command) = (next(), next());
        let mut next = || from.u32().expect("sixteen bytes");
        let (size, flags, errno) = (next(), next(), next());
        let header_len = u32::try_from(HEADER_LEN).expect("16");
        let Some(len) = size.checked_sub(header_len).filter(|_| size <= MESSAGE_MAX) else {
            return Err(format!("a message of {size} bytes was announced"));
        };
        match (flags & TYPE_MASK, flags & !TYPE_MASK) {
            (TYPE_REPLY, 0) => Ok(Incoming::Reply { id, command, len }),
            (TYPE_REPLY, ERROR) if len > 0 => Err(format!("{len} bytes follow a refusal")),
            (TYPE_REPLY, ERROR) => {
                let errno = i32::try_from(errno).ok().filter(|_| (1..=ERRNO_MAX).contains(&errno));
                Ok(Incoming::Refusal { id, command, errno: errno.unwrap_or(EINVAL) })
            }
            (TYPE_COMMAND, rest) if rest & !NO_REPLY == 0 => {
                Ok(Incoming::Command { id, command, len, posted: rest == NO_REPLY })
            }
            _ => Err(format!("a message has the flags {flags:#x}")),
        }
    }
}

/// Limits of the server, from the negotiation of the version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of descriptors in a message.
    pub fds: u32,
    /// Maximum number of bytes of a region in a message.
    pub transfer: u32,
    /// Whether the server supports [`Command::DeviceGetRegionIoFds`]. Not every server without it refuses the
    /// command in an answer.
    pub io_fds: bool,
}

impl Default for Limits {
    /// Limits of a server that states none.
    fn default() -> Self {
        Limits { fds: 1, transfer: 1 << 20, io_fds: false }
    }
}

/// Version data of this client.
pub const OUR_VERSION: &[u8] = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576}}\0";

/// Parses the server's answer to our version.
pub fn parse_version(payload: &[u8]) -> Result<Limits, Breach> {
    let mut from = Reader(payload);
    let (Some(major), Some(minor)) = (from.u16(), from.u16()) else {
        return Err(format!("its version has {} bytes", payload.len()));
    };
    if major != MAJOR || minor > MINOR {
        return Err(format!("it speaks version {major}.{minor} where {MAJOR}.{MINOR} was proposed"));
    }
    let mut limits = Limits::default();
    let Some((0, json)) = from.0.split_last().map(|(last, json)| (*last, json)) else {
        return if from.0.is_empty() { Ok(limits) } else { Err("its version data has no end".to_owned()) };
    };
    let data: Value = serde_json::from_slice(json).map_err(|error| format!("its version data is no JSON: {error}"))?;
    let number = |name: &str, default: u32| match &data["capabilities"][name] {
        Value::Null => Ok(default),
        value => {
            let number = value.as_u64().ok_or_else(|| format!("its {name} is {value}"))?;
            Ok::<u32, Breach>(u32::try_from(number).unwrap_or(u32::MAX))
        }
    };
    limits.fds = number("max_msg_fds", limits.fds)?;
    limits.transfer = number("max_data_xfer_size", limits.transfer)?;
    limits.io_fds = data["capabilities"]["region_io_fds"] == Value::Bool(true);
    if limits.transfer < 4 {
        return Err(format!("it takes only {} bytes at a time, and a register has four", limits.transfer));
    }
    Ok(limits)
}

/// Description of a region, from the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionInfo {
    pub flags: u32,
    pub len: u64,
    /// Offset of the region in the descriptor that came with it.
    pub offset: u64,
    /// Mappable areas: offset from the beginning of the region and length, in bytes. They are whole pages inside the
    /// region.
    pub areas: Vec<(u64, u64)>,
}

impl RegionInfo {
    /// Parses the answer about region `index`.
    pub fn parse(payload: &[u8], index: u32) -> Result<Self, Breach> {
        let fields =
            |mut from: Reader<'_>| Some((from.u32()?, from.u32()?, from.u32()?, from.u32()?, from.u64()?, from.u64()?));
        let Some((argsz, flags, its_index, cap_offset, len, offset)) = fields(Reader(payload)) else {
            return Err(format!("it describes region {index} in {} bytes", payload.len()));
        };
        if its_index != index || (argsz as usize) < payload.len() {
            return Err(format!("it describes region {its_index} in {argsz} bytes where {index} was asked for"));
        }
        let mut info = RegionInfo { flags, len, offset, areas: Vec::new() };
        if flags & REGION_MMAP == 0 || len == 0 {
            return Ok(info);
        }
        let sparse = match flags & REGION_CAPS {
            0 => None,
            _ => sparse_areas(payload, cap_offset)?,
        };
        // Without a list of areas, all of the region can be mapped.
        info.areas = match sparse {
            Some(areas) => areas,
            None if (argsz as usize) > payload.len() => Vec::new(),
            None => vec![(0, len - len % PAGE)],
        };
        for &(start, size) in &info.areas {
            let inside = start.checked_add(size).is_some_and(|end| end <= len);
            if !(inside && start.is_multiple_of(PAGE) && size.is_multiple_of(PAGE)) {
                return Err(format!("in region {index} of {len} bytes it has {size} mapped at {start:#x}"));
            }
        }
        info.areas.retain(|&(_, size)| size > 0);
        Ok(info)
    }
}

/// A place in memory where a store has the effect of a message that writes a register of four bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doorbell {
    /// Offset of the register in its region, in bytes.
    pub offset: u32,
    /// Offset of the place in the memory, in bytes.
    pub place: u32,
}

/// Parses the server's answer about the doorbells of region `index`, which has `len` bytes. Skips sub-regions of
/// unusable kinds: those that want a write to an eventfd, which could block for ever.
///
/// The layout is that of libvfio-user's `vfio_user_sub_region_ioeventfd`, for shadow memory: offset, size, eventfd,
/// kind, flags, memory, place, value.
pub fn parse_doorbells(payload: &[u8], index: u32, len: u64) -> Result<Vec<Doorbell>, Breach> {
    let mut from = Reader(payload);
    let mut fields = || Some((from.u32()?, from.u32()?, from.u32()?, from.u32()?));
    let Some((_, 0, its_index, count)) = fields() else {
        return Err(format!("it describes the doorbells of region {index} in {} bytes, or with flags", payload.len()));
    };
    if its_index != index || from.0.len() as u64 != u64::from(count) * IO_FD_LEN as u64 {
        return Err(format!("it describes {count} doorbells of region {its_index} in {} bytes", payload.len()));
    }
    let mut doorbells = Vec::new();
    for _ in 0..count {
        let mut fields = || Some((from.u64()?, from.u64()?, from.u32()?, from.u32()?, from.u32()?, from.u32()?));
        let (Some((offset, size, eventfd, kind, flags, memory)), Some(place), Some(_)) =
            (fields(), from.u64(), from.u64())
        else {
            return Err("a doorbell does not fit".to_owned());
        };
        if (size, eventfd, kind, flags) != (4, NO_EVENTFD, IO_FD_SHADOW, 0) {
            continue;
        }
        let inside = offset.checked_add(4).is_some_and(|end| end <= len);
        let (Ok(offset), Ok(place)) = (u32::try_from(offset), u32::try_from(place)) else {
            return Err(format!("it has a doorbell for {offset:#x} at {place:#x}"));
        };
        if !inside || !offset.is_multiple_of(4) || !place.is_multiple_of(4) || place >= SHADOW_MAX || memory != 0 {
            return Err(format!(
                "it has a doorbell for {offset:#x} of {len} bytes at {place:#x} of descriptor {memory}"
            ));
        }
        doorbells.push(Doorbell { offset, place });
    }
    Ok(doorbells)
}

/// Maximum size in bytes of an answer about doorbells.
pub const IO_FDS_MAX: usize = 16 + 64 * IO_FD_LEN;
const IO_FD_LEN: usize = 48;
const IO_FD_SHADOW: u32 = 2;
const NO_EVENTFD: u32 = u32::MAX;
/// Maximum size in bytes of the doorbell memory that the client maps.
const SHADOW_MAX: u32 = 1 << 20;

const PAGE: u64 = 4096;
const REGION_INFO_LEN: u32 = 32;

/// Returns the areas of the first capability of that kind. The list must go forward, so that it ends.
fn sparse_areas(payload: &[u8], first: u32) -> Result<Option<Vec<(u64, u64)>>, Breach> {
    let (mut at, mut before) = (first, REGION_INFO_LEN - 1);
    while at != 0 {
        if at <= before {
            return Err(format!("its list of capabilities goes back, to byte {at}"));
        }
        before = at;
        let cut = || format!("a capability at byte {at} does not fit");
        let mut from = Reader(payload.get(at as usize..).ok_or_else(cut)?);
        let mut header = || Some((from.u16()?, from.u16()?, from.u32()?));
        let (id, _, next) = header().ok_or_else(cut)?;
        if id == CAP_SPARSE_MMAP {
            let mut count = || Some((from.u32()?, from.u32()?));
            let (count, _) = count().ok_or_else(cut)?;
            let areas = (0..count).map(|_| Some((from.u64()?, from.u64()?)));
            return areas.collect::<Option<Vec<_>>>().ok_or_else(cut).map(Some);
        }
        at = next;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(id: u16, command: u16, size: u32, flags: u32, errno: u32) -> [u8; HEADER_LEN] {
        let mut message = Message(ArrayVec::new());
        message.u16(id).u16(command).u32(size).u32(flags).u32(errno);
        message.0[..].try_into().unwrap()
    }

    fn region(argsz: u32, flags: u32, index: u32, cap_offset: u32, len: u64, rest: &[u32]) -> Vec<u8> {
        let mut message = Message(ArrayVec::new());
        message.u32(argsz).u32(flags).u32(index).u32(cap_offset).u64(len).u64(0x1000);
        rest.iter().for_each(|&word| _ = message.u32(word));
        message.0.to_vec()
    }

    #[test]
    fn a_header_is_a_reply_a_refusal_or_a_question() {
        assert_eq!(Incoming::parse(&header(7, 9, 36, 1, 0)), Ok(Incoming::Reply { id: 7, command: 9, len: 20 }));
        assert_eq!(
            Incoming::parse(&header(7, 9, 16, 0x21, 17)),
            Ok(Incoming::Refusal { id: 7, command: 9, errno: 17 })
        );
        assert_eq!(
            Incoming::parse(&header(7, 11, 32, 0x10, 0)),
            Ok(Incoming::Command { id: 7, command: 11, len: 16, posted: true })
        );
    }

    #[test]
    fn an_error_number_that_is_none_becomes_einval() {
        for errno in [0, 4096, u32::MAX] {
            let refusal = Incoming::parse(&header(0, 9, 16, 0x21, errno));
            assert_eq!(refusal, Ok(Incoming::Refusal { id: 0, command: 9, errno: EINVAL }), "{errno}");
        }
    }

    #[test]
    fn headers_that_make_no_sense_are_refused() {
        let refused = |size, flags| Incoming::parse(&header(0, 9, size, flags, 0)).unwrap_err();
        assert_eq!(refused(15, 1), "a message of 15 bytes was announced");
        assert_eq!(refused(MESSAGE_MAX + 1, 1), format!("a message of {} bytes was announced", MESSAGE_MAX + 1));
        assert_eq!(refused(u32::MAX, 0), format!("a message of {} bytes was announced", u32::MAX));
        assert_eq!(refused(17, 0x21), "1 bytes follow a refusal");
        assert_eq!(refused(16, 2), "a message has the flags 0x2");
        assert_eq!(refused(16, 0x11), "a message has the flags 0x11");
        assert_eq!(refused(16, 0x20), "a message has the flags 0x20");
        assert_eq!(refused(16, 0x41), "a message has the flags 0x41");
    }

    #[test]
    fn versions_are_understood_or_refused() {
        let version = |major: u16, minor: u16, data: &str| {
            parse_version(&[&major.to_ne_bytes(), &minor.to_ne_bytes(), data.as_bytes()].concat())
        };
        let defaults = Limits::default();
        assert_eq!(version(0, 0, ""), Ok(defaults));
        assert_eq!(version(0, 1, "{}\0"), Ok(defaults));
        assert_eq!(version(0, 1, "{\"capabilities\":{\"max_msg_fds\":8}}\0"), Ok(Limits { fds: 8, ..defaults }));
        let huge = version(0, 1, "{\"capabilities\":{\"max_data_xfer_size\":99999999999}}\0");
        assert_eq!(huge, Ok(Limits { transfer: u32::MAX, ..defaults }));
        assert_eq!(version(1, 0, "").unwrap_err(), "it speaks version 1.0 where 0.1 was proposed");
        assert_eq!(version(0, 2, "").unwrap_err(), "it speaks version 0.2 where 0.1 was proposed");
        assert_eq!(version(0, 1, "{}").unwrap_err(), "its version data has no end");
        assert!(version(0, 1, "{\0").unwrap_err().starts_with("its version data is no JSON"));
        let negative = version(0, 1, "{\"capabilities\":{\"max_msg_fds\":-1}}\0");
        assert_eq!(negative.unwrap_err(), "its max_msg_fds is -1");
        let small = version(0, 1, "{\"capabilities\":{\"max_data_xfer_size\":3}}\0");
        assert_eq!(small.unwrap_err(), "it takes only 3 bytes at a time, and a register has four");
        assert_eq!(parse_version(&[0; 3]).unwrap_err(), "its version has 3 bytes");
        let deep = format!("{}\0", "[".repeat(4000));
        assert!(
            version(0, 1, &deep).unwrap_err().starts_with("its version data is no JSON"),
            "and not a stack that overflows"
        );
    }

    #[test]
    fn a_mappable_region_lists_its_areas() {
        let areas = [1 | 1 << 16, 0, 1, 0, 0x2000, 0, 0x1000, 0];
        let payload = region(64, 0xf, 0, 32, 0x4000, &areas);
        let info = RegionInfo::parse(&payload, 0).unwrap();
        assert_eq!(info, RegionInfo { flags: 0xf, len: 0x4000, offset: 0x1000, areas: vec![(0x2000, 0x1000)] });
        let whole = RegionInfo::parse(&region(32, 0x7, 0, 0, 0x4100, &[]), 0).unwrap();
        assert_eq!(whole.areas, [(0, 0x4000)], "the whole pages of it");
        let more = RegionInfo::parse(&region(8192, 0xf, 0, 0, 0x4000, &[]), 0).unwrap();
        assert_eq!(more.areas, [], "a list that did not come along is not a permission for everything");
        let unmapped = RegionInfo::parse(&region(64, 0xb, 0, 32, 0x4000, &areas), 0).unwrap();
        assert_eq!(unmapped.areas, []);
    }

    #[test]
    fn a_region_that_makes_no_sense_is_refused() {
        let refused = |payload: &[u8]| RegionInfo::parse(payload, 0).unwrap_err();
        assert_eq!(refused(&[0; 31]), "it describes region 0 in 31 bytes");
        assert_eq!(refused(&region(32, 3, 1, 0, 4096, &[])), "it describes region 1 in 32 bytes where 0 was asked for");
        assert_eq!(refused(&region(31, 3, 0, 0, 4096, &[])), "it describes region 0 in 31 bytes where 0 was asked for");
        let sparse = |cap_offset, words: &[u32]| refused(&region(500, 0xf, 0, cap_offset, 0x4000, words));
        assert_eq!(sparse(31, &[0; 8]), "its list of capabilities goes back, to byte 31");
        assert_eq!(sparse(32, &[9, 32, 0, 0]), "its list of capabilities goes back, to byte 32");
        assert_eq!(sparse(60, &[0; 8]), "a capability at byte 60 does not fit");
        assert_eq!(sparse(u32::MAX, &[0; 8]), format!("a capability at byte {} does not fit", u32::MAX));
        assert_eq!(sparse(32, &[1, 0, u32::MAX, 0, 0, 0, 0x1000, 0]), "a capability at byte 32 does not fit");
        let area = |start: u32, len: u32, high: u32| sparse(32, &[1, 0, 1, 0, start, high, len, high]);
        assert_eq!(area(0x800, 0x1000, 0), "in region 0 of 16384 bytes it has 4096 mapped at 0x800");
        assert_eq!(area(0x1000, 0x800, 0), "in region 0 of 16384 bytes it has 2048 mapped at 0x1000");
        assert_eq!(area(0x4000, 0x1000, 0), "in region 0 of 16384 bytes it has 4096 mapped at 0x4000");
        assert!(area(0xffff_f000, 0xffff_f000, u32::MAX).starts_with("in region 0 of 16384 bytes"), "no overflow");
    }

    fn doorbells(count: u32, entries: &[[u64; 6]]) -> Vec<u8> {
        let mut message = Message(ArrayVec::new());
        message.u32(0).u32(0).u32(3).u32(count);
        for &[offset, size, eventfd_and_kind, flags_and_memory, place, value] in entries {
            message.u64(offset).u64(size).u64(eventfd_and_kind).u64(flags_and_memory).u64(place).u64(value);
        }
        message.0.to_vec()
    }

    #[test]
    fn doorbells_are_understood_passed_over_or_refused() {
        const SHADOW: u64 = 2 << 32 | 0xffff_ffff;
        let parse = |entry: [u64; 6]| parse_doorbells(&doorbells(1, &[entry]), 3, 0x4000);
        assert_eq!(parse_doorbells(&doorbells(0, &[]), 3, 0x4000), Ok(vec![]));
        assert_eq!(parse([0x3ffc, 4, SHADOW, 0, 64, 0]), Ok(vec![Doorbell { offset: 0x3ffc, place: 64 }]));
        for other in
            [[0, 4, 2 << 32, 0, 0, 0], [0, 4, 0xffff_ffff, 0, 0, 0], [0, 8, SHADOW, 0, 0, 0], [0, 4, SHADOW, 1, 0, 7]]
        {
            assert_eq!(parse(other), Ok(vec![]), "{other:x?}");
        }
        for wrong in [
            [0x4000, 4, SHADOW, 0, 0, 0],
            [2, 4, SHADOW, 0, 0, 0],
            [0, 4, SHADOW, 0, 2, 0],
            [0, 4, SHADOW, 0, 1 << 20, 0],
            [0, 4, SHADOW, 0, 1 << 32, 0],
            [u64::MAX - 3, 4, SHADOW, 0, 0, 0],
            [0, 4, SHADOW, 1 << 32, 0, 0],
        ] {
            assert!(parse(wrong).unwrap_err().starts_with("it has a doorbell for "), "{wrong:x?}");
        }
        let lies =
            |count, index| parse_doorbells(&doorbells(count, &[[0, 4, SHADOW, 0, 0, 0]]), index, 0x4000).unwrap_err();
        assert_eq!(lies(2, 3), "it describes 2 doorbells of region 3 in 64 bytes");
        assert_eq!(lies(u32::MAX, 3), "it describes 4294967295 doorbells of region 3 in 64 bytes");
        assert_eq!(lies(1, 4), "it describes 1 doorbells of region 3 in 64 bytes");
        assert_eq!(
            parse_doorbells(&[0; 15], 3, 64).unwrap_err(),
            "it describes the doorbells of region 3 in 15 bytes, or with flags"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_understood_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200), index: u32) {
            let _ = parse_version(&bytes);
            let _ = RegionInfo::parse(&bytes, index);
            let _ = parse_doorbells(&bytes, index, 4096);
            bytes.resize(HEADER_LEN, 0);
            let _ = Incoming::parse(bytes[..HEADER_LEN].try_into().unwrap());
        }
    }
}
