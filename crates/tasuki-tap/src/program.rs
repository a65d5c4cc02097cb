//! BPF programs (bpf(2)) that make the kernel forward frames by itself: two programs, which see every frame received
//! on an interface, and the tables that they read. They have a few dozen instructions, written here directly.
//!
//! # Invariants
//!
//! - **B1** The structures have the layout of those parts of `union bpf_attr` in `<linux/bpf.h>` that their commands
//!   read.
//! - **B2** An address in one of them points to memory as long as the command reads or writes there, which outlives
//!   the call.
//! - **B3** MAP_CREATE and PROG_LOAD return a new descriptor that has no other owner.
#![allow(unsafe_code, reason = "the system call bpf(2), which rustix lacks")]

use std::ffi::c_long;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;

/// Commands of bpf(2).
const MAP_CREATE: c_long = 0;
const MAP_LOOKUP: c_long = 1;
const MAP_UPDATE: c_long = 2;
const MAP_DELETE: c_long = 3;
const PROGRAM_LOAD: c_long = 5;

/// Types of maps and programs.
const HASH: u32 = 1;
const ARRAY: u32 = 2;
const CLASSIFIER: u32 = 3;
const SOCKET_FILTER: u32 = 1;

/// Kernel functions that a classifier may call.
const LOOKUP: i32 = 1;
const REDIRECT: i32 = 23;
const CHANGE_TYPE: i32 = 32;
const REDIRECT_PEER: i32 = 155;

/// Packet type of a frame for this host (PACKET_HOST).
const FOR_US: i32 = 0;

/// Offsets in `struct __sk_buff` of the address of a frame's first byte, and of the address behind its last.
const DATA: i16 = 76;
const DATA_END: i16 = 80;

/// Registers: result of a function, its parameters, and registers that a call preserves.
const R0: u8 = 0;
const R1: u8 = 1;
const R2: u8 = 2;
const R3: u8 = 3;
const R4: u8 = 4;
const FRAME: u8 = 6;
const LOW: u8 = 7;
const HIGH: u8 = 8;
const OWN: u8 = 9;
const STACK: u8 = 10;

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instruction {
    code: u8,
    /// Destination register in the lower half, source register in the upper.
    registers: u8,
    offset: i16,
    value: i32,
}

/// Width in bytes of a load or store.
#[derive(Clone, Copy)]
enum Width {
    Two = 0x08,
    Four = 0x00,
    Eight = 0x18,
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> Instruction {
    Instruction { code, registers: from << 4 | to, offset, value }
}

const fn copy(to: u8, from: u8) -> Instruction {
    instruction(0xbf, to, from, 0, 0)
}

const fn set(to: u8, value: i32) -> Instruction {
    instruction(0xb7, to, 0, 0, value)
}

const fn add(to: u8, value: i32) -> Instruction {
    instruction(0x07, to, 0, 0, value)
}

const fn load(width: Width, to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x61 | width as u8, to, from, offset, 0)
}

const fn store(width: Width, to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0x63 | width as u8, to, from, offset, 0)
}

/// An atomic addition to a word, for a counter that several CPUs use.
const fn count(to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0xdb, to, from, offset, 0)
}

const fn call(function: i32) -> Instruction {
    instruction(0x85, 0, 0, 0, function)
}

const EXIT: Instruction = instruction(0x95, 0, 0, 0, 0);

/// Loads a map, or the address of its only value: two instructions.
const fn table(to: u8, table: RawFd, is_value: bool) -> [Instruction; 2] {
    let kind = if is_value { 2 } else { 1 };
    [instruction(0x18, to, kind, 0, table), instruction(0, 0, 0, 0, 0)]
}

/// A structure that a command reads.
trait Attribute {}

#[repr(C)]
struct MapCreate {
    kind: u32,
    key_len: u32,
    value_len: u32,
    entries: u32,
    flags: u32,
}

#[repr(C)]
struct Element {
    map: u32,
    unused: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log_level: u32,
    log_len: u32,
    log: u64,
}

impl Attribute for MapCreate {}
impl Attribute for Element {}
impl Attribute for ProgramLoad {}

fn bpf<A: Attribute>(command: c_long, attribute: &mut A) -> Result<RawFd, Errno> {
    // SAFETY: the command reads this structure (B1), and its pointers are valid (B2).
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size_of::<A>()) };
    match RawFd::try_from(done) {
        Ok(fd) if fd >= 0 => Ok(fd),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made it, for us alone (B3).
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn number_of(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

fn address_of<T: ?Sized>(what: &T) -> u64 {
    std::ptr::from_ref(what).cast::<u8>().addr() as u64
}

/// The interface to which frames for a MAC address go, and their number.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Way {
    /// Index of the interface in its namespace.
    pub interface: u64,
    /// Number of frames; a GSO packet of up to 64 KiB counts as one.
    pub frames: u64,
}

/// A map from MAC addresses to interfaces.
#[derive(Debug)]
pub struct Ways(OwnedFd);

/// Returns a MAC address as a key of the map.
fn key(mac: [u8; 6]) -> [u8; 8] {
    let [a, b, c, d, e, f] = mac;
    [a, b, c, d, e, f, 0, 0]
}

impl Ways {
    /// Creates a map for at most `entries` addresses.
    pub fn new(entries: u32) -> Result<Self, Errno> {
        let (key_len, value_len) = (8, 16);
        bpf(MAP_CREATE, &mut MapCreate { kind: HASH, key_len, value_len, entries, flags: 0 }).map(owned).map(Ways)
    }

    fn element(&self, command: c_long, mac: [u8; 6], way: &mut Way) -> Result<(), Errno> {
        let key = key(mac);
        let (map, value) = (number_of(&self.0), std::ptr::from_mut(way).addr() as u64);
        bpf(command, &mut Element { map, unused: 0, key: address_of(&key), value, flags: 0 }).map(drop)
    }

    /// Sends frames for `mac` to this interface of the namespace in which they arrive.
    pub fn insert(&self, mac: [u8; 6], interface: u32) -> Result<(), Errno> {
        self.element(MAP_UPDATE, mac, &mut Way { interface: interface.into(), frames: 0 })
    }

    /// Removes the entry of `mac`, if there is one.
    pub fn remove(&self, mac: [u8; 6]) -> Result<(), Errno> {
        let (map, key) = (number_of(&self.0), key(mac));
        match bpf(MAP_DELETE, &mut Element { map, unused: 0, key: address_of(&key), value: 0, flags: 0 }) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Returns the entry of `mac`.
    pub fn get(&self, mac: [u8; 6]) -> Option<Way> {
        let mut way = Way::default();
        self.element(MAP_LOOKUP, mac, &mut way).ok().map(|()| way)
    }
}

/// The state of one sender: whether it may use the ways, and how many of its frames did.
#[derive(Debug)]
pub struct Sender(OwnedFd);

impl Sender {
    /// Creates the state of a sender that may not.
    pub fn new() -> Result<Self, Errno> {
        let (key_len, value_len) = (4, 16);
        bpf(MAP_CREATE, &mut MapCreate { kind: ARRAY, key_len, value_len, entries: 1, flags: 0 }).map(owned).map(Sender)
    }

    fn element(&self, command: c_long, value: &mut [u64; 2]) -> Result<(), Errno> {
        let key = 0_u32;
        let (map, value) = (number_of(&self.0), std::ptr::from_mut(value).addr() as u64);
        bpf(command, &mut Element { map, unused: 0, key: address_of(&key), value, flags: 0 }).map(drop)
    }

    /// Allows or forbids the sender the ways from now on. Frames that pass meanwhile may not be counted.
    pub fn allow(&self, may: bool) -> Result<(), Errno> {
        let frames = self.frames();
        self.element(MAP_UPDATE, &mut [u64::from(may), frames])
    }

    /// Returns the number of frames that used a way.
    pub fn frames(&self) -> u64 {
        let mut value = [0; 2];
        self.element(MAP_LOOKUP, &mut value).map_or(0, |()| value[1])
    }
}

/// A loaded program.
#[derive(Debug)]
pub struct Program(OwnedFd);

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Program {
    fn load(kind: u32, code: &[Instruction]) -> Result<Self, Errno> {
        let license = c"Apache-2.0 OR MIT";
        let mut attribute = ProgramLoad {
            kind,
            instructions: u32::try_from(code.len()).expect("a few dozen"),
            code: address_of(code),
            license: address_of(license.to_bytes_with_nul()),
            log_level: 0,
            log_len: 0,
            log: 0,
        };
        bpf(PROGRAM_LOAD, &mut attribute).map(owned).map(Program)
    }

    /// Loads the program for the interface where frames of the node with the address `mac` arrive. A frame with this
    /// source address and a destination in `ways` goes there; all others go to `otherwise`, an interface index.
    pub fn sorter(mac: [u8; 6], sender: &Sender, ways: &Ways, otherwise: u32) -> Result<Self, Errno> {
        Self::load(CLASSIFIER, &sorter(mac, sender.0.as_raw_fd(), ways.0.as_raw_fd(), number(otherwise)))
    }

    /// Loads the program for an interface whose received frames all go to the namespace of the peer of `interface`,
    /// a veth end. Those for `mac`, the node's address, go there directly.
    pub fn forwarder(mac: [u8; 6], interface: u32) -> Result<Self, Errno> {
        Self::load(CLASSIFIER, &forwarder(mac, number(interface)))
    }

    /// Loads the program for a TAP with several queues that has all frames go by this one.
    pub fn one_queue(which: u8) -> Result<Self, Errno> {
        Self::load(SOCKET_FILTER, &[set(R0, which.into()), EXIT])
    }
}

fn number(interface: u32) -> i32 {
    i32::try_from(interface).expect("the kernel counts interfaces in an int")
}

/// Instructions, and those among them that jump to the end.
#[derive(Default)]
struct Code {
    code: Vec<Instruction>,
    leave: Vec<usize>,
}

impl Code {
    fn extend(&mut self, instructions: impl IntoIterator<Item = Instruction>) {
        self.code.extend(instructions);
    }

    /// Adds a jump to the end.
    fn unless(&mut self, jump: Instruction) {
        self.leave.push(self.code.len());
        self.code.push(jump);
    }

    /// Begins with the frame, whose first byte is at R2 from now on. Leaves if the frame is shorter than a header.
    fn begin(&mut self) {
        self.extend([copy(FRAME, R1), load(Width::Four, R2, FRAME, DATA), load(Width::Four, R3, FRAME, DATA_END)]);
        self.extend([copy(R4, R2), add(R4, 14)]);
        self.unless(instruction(0x2d, R4, R3, 0, 0));
    }

    /// Leaves if the frame has another address than `mac` at this offset.
    fn unless_address(&mut self, at: i16, [a, b, c, d, e, f]: [u8; 6]) {
        self.extend([load(Width::Four, R4, R2, at)]);
        self.unless(instruction(0x56, R4, 0, 0, i32::from_ne_bytes([a, b, c, d])));
        self.extend([load(Width::Two, R4, R2, at + 4)]);
        self.unless(instruction(0x56, R4, 0, 0, u16::from_ne_bytes([e, f]).into()));
    }

    /// Adds the end, where the frame is sent by `interface`.
    fn end(mut self, interface: i32) -> Vec<Instruction> {
        let end = self.code.len();
        self.extend([set(R1, interface), set(R2, 0), call(REDIRECT), EXIT]);
        for at in self.leave {
            self.code[at].offset = i16::try_from(end - at - 1).expect("a few dozen");
        }
        self.code
    }
}

fn forwarder(mac: [u8; 6], interface: i32) -> Vec<Instruction> {
    let mut code = Code::default();
    code.begin();
    // A kernel that gives a frame to the peer at once takes it for that host's. All others go through the pair, which
    // tells broadcasts, multicasts and frames for other hosts: a router must not pass those on.
    code.unless_address(0, mac);
    code.extend([set(R1, interface), set(R2, 0), call(REDIRECT_PEER), EXIT]);
    code.end(interface)
}

fn sorter(mac: [u8; 6], sender: RawFd, ways: RawFd, otherwise: i32) -> Vec<Instruction> {
    let mut code = Code::default();
    code.begin();
    // Leave if the source address is not the node's.
    code.unless_address(6, mac);
    code.extend([load(Width::Four, LOW, R2, 0), load(Width::Two, HIGH, R2, 4)]);
    // Leave if the sender may not use the ways.
    code.extend(table(OWN, sender, true));
    code.extend([load(Width::Eight, R1, OWN, 0)]);
    code.unless(instruction(0x15, R1, 0, 0, 0));
    // Leave if the destination has no way.
    code.extend([store(Width::Four, STACK, -8, LOW), store(Width::Four, STACK, -4, HIGH)]);
    code.extend(table(R1, ways, false));
    code.extend([copy(R2, STACK), add(R2, -8), call(LOOKUP)]);
    code.unless(instruction(0x15, R0, 0, 0, 0));
    code.extend([load(Width::Eight, LOW, R0, 0), set(R1, 1), count(R0, 8, R1), count(OWN, 8, R1)]);
    // Our end of the pair has another address, so the kernel took the frame for another host's.
    code.extend([copy(R1, FRAME), set(R2, FOR_US), call(CHANGE_TYPE)]);
    code.extend([copy(R1, LOW), set(R2, 0), call(REDIRECT_PEER), EXIT]);
    code.end(otherwise)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_is_eight_bytes_as_the_kernel_has_them() {
        assert_eq!(size_of::<Instruction>(), 8);
        // BPF_LDX_MEM(BPF_DW, R1, R9, 0), BPF_STX_MEM(BPF_W, R10, R7, -8), and an atomic addition.
        assert_eq!(load(Width::Eight, R1, OWN, 0), instruction(0x79, 1, 9, 0, 0));
        assert_eq!(load(Width::Two, R1, OWN, 0).code, 0x69);
        assert_eq!(store(Width::Four, STACK, -8, LOW), instruction(0x63, 10, 7, -8, 0));
        assert_eq!(count(R0, 8, R1).code, 0xdb);
    }

    #[test]
    fn whatever_is_not_for_the_shortcut_goes_to_the_end() {
        let mac = [2, 0, 0, 0, 0, 1];
        for (code, leaves) in [(sorter(mac, 3, 4, 7), 5), (forwarder(mac, 7), 3)] {
            let last = code.len() - 4;
            assert_eq!(code[last..], [set(R1, 7), set(R2, 0), call(REDIRECT), EXIT]);
            let jumps = code.iter().enumerate().filter(|(_, one)| matches!(one.code, 0x2d | 0x56 | 0x15));
            let targets: Vec<_> = jumps.map(|(at, one)| at + 1 + usize::try_from(one.offset).expect("ahead")).collect();
            assert_eq!(targets, vec![last; leaves]);
        }
    }
}
