//! What the kernel does with a frame by itself: two programs of its own (bpf(2)), shown every frame that comes in at an interface, and the
//! tables that they look into. They are a few dozen instructions, and written here as such.
//!
//! # Invariants
//!
//! - **B1** The structures have the layout of those parts of `union bpf_attr` in `<linux/bpf.h>` that their commands read.
//! - **B2** What an address in one of them points at is as long as the command reads or writes there, and outlives the call.
//! - **B3** What MAP_CREATE and PROG_LOAD return is a descriptor that nobody else has.
#![allow(unsafe_code, reason = "the system call bpf(2), which rustix lacks")]

use std::ffi::c_long;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;

/// Commands.
const MAP_CREATE: c_long = 0;
const MAP_LOOKUP: c_long = 1;
const MAP_UPDATE: c_long = 2;
const MAP_DELETE: c_long = 3;
const PROGRAM_LOAD: c_long = 5;

/// Kinds of tables and programs.
const HASH: u32 = 1;
const ARRAY: u32 = 2;
const CLASSIFIER: u32 = 3;

/// Functions of the kernel's that a classifier may call.
const LOOKUP: i32 = 1;
const REDIRECT: i32 = 23;
const CHANGE_TYPE: i32 = 32;
const REDIRECT_PEER: i32 = 155;

/// A frame that is for whoever gets it (PACKET_HOST).
const FOR_US: i32 = 0;

/// Where in `struct __sk_buff` the addresses of a frame's first byte and of the one behind its last are.
const DATA: i16 = 76;
const DATA_END: i16 = 80;

/// Registers: what a function returns, its parameters, and those that outlive a call.
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
    /// The one that is written in the lower half, the one that is read in the upper.
    registers: u8,
    offset: i16,
    value: i32,
}

/// Bytes of what is loaded and stored.
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

/// One more in a word that others count in too.
const fn count(to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0xdb, to, from, offset, 0)
}

const fn call(function: i32) -> Instruction {
    instruction(0x85, 0, 0, 0, function)
}

const EXIT: Instruction = instruction(0x95, 0, 0, 0, 0);

/// A table, or the address of its only value: two instructions.
const fn table(to: u8, table: RawFd, is_value: bool) -> [Instruction; 2] {
    let kind = if is_value { 2 } else { 1 };
    [instruction(0x18, to, kind, 0, table), instruction(0, 0, 0, 0, 0)]
}

/// What a command reads.
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
    // SAFETY: the structure is the one that the command reads (B1), and what it points at holds as long (B2).
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

/// An interface that frames go to, and how many have.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Way {
    /// Its number in its namespace.
    pub interface: u64,
    /// Frames, segments of up to 64 KiB among them.
    pub frames: u64,
}

/// Which interface a station address is behind.
#[derive(Debug)]
pub struct Ways(OwnedFd);

/// A station address as a key.
fn key(mac: [u8; 6]) -> [u8; 8] {
    let [a, b, c, d, e, f] = mac;
    [a, b, c, d, e, f, 0, 0]
}

impl Ways {
    /// A table for so many.
    pub fn new(entries: u32) -> Result<Self, Errno> {
        let (key_len, value_len) = (8, 16);
        bpf(MAP_CREATE, &mut MapCreate { kind: HASH, key_len, value_len, entries, flags: 0 }).map(owned).map(Ways)
    }

    fn element(&self, command: c_long, mac: [u8; 6], way: &mut Way) -> Result<(), Errno> {
        let key = key(mac);
        let (map, value) = (number_of(&self.0), std::ptr::from_mut(way).addr() as u64);
        bpf(command, &mut Element { map, unused: 0, key: address_of(&key), value, flags: 0 }).map(drop)
    }

    /// Frames for `mac` go to this interface of the namespace that they come in at.
    pub fn insert(&self, mac: [u8; 6], interface: u32) -> Result<(), Errno> {
        self.element(MAP_UPDATE, mac, &mut Way { interface: interface.into(), frames: 0 })
    }

    /// They do not any more.
    pub fn remove(&self, mac: [u8; 6]) -> Result<(), Errno> {
        let (map, key) = (number_of(&self.0), key(mac));
        match bpf(MAP_DELETE, &mut Element { map, unused: 0, key: address_of(&key), value: 0, flags: 0 }) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Where they go.
    pub fn get(&self, mac: [u8; 6]) -> Option<Way> {
        let mut way = Way::default();
        self.element(MAP_LOOKUP, mac, &mut way).ok().map(|()| way)
    }
}

/// What is one sender's: whether it may take the ways, and how many of its frames have.
#[derive(Debug)]
pub struct Sender(OwnedFd);

impl Sender {
    /// One that may not.
    pub fn new() -> Result<Self, Errno> {
        let (key_len, value_len) = (4, 16);
        bpf(MAP_CREATE, &mut MapCreate { kind: ARRAY, key_len, value_len, entries: 1, flags: 0 }).map(owned).map(Sender)
    }

    fn element(&self, command: c_long, value: &mut [u64; 2]) -> Result<(), Errno> {
        let key = 0_u32;
        let (map, value) = (number_of(&self.0), std::ptr::from_mut(value).addr() as u64);
        bpf(command, &mut Element { map, unused: 0, key: address_of(&key), value, flags: 0 }).map(drop)
    }

    /// Whether it may from now on. Frames that are under way meanwhile may not be counted.
    pub fn allow(&self, may: bool) -> Result<(), Errno> {
        let frames = self.frames();
        self.element(MAP_UPDATE, &mut [u64::from(may), frames])
    }

    /// Frames that have.
    pub fn frames(&self) -> u64 {
        let mut value = [0; 2];
        self.element(MAP_LOOKUP, &mut value).map_or(0, |()| value[1])
    }
}

/// A program that has been loaded.
#[derive(Debug)]
pub struct Program(OwnedFd);

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Program {
    fn load(code: &[Instruction]) -> Result<Self, Errno> {
        let license = c"Apache-2.0 OR MIT";
        let mut attribute = ProgramLoad {
            kind: CLASSIFIER,
            instructions: u32::try_from(code.len()).expect("a few dozen"),
            code: address_of(code),
            license: address_of(license.to_bytes_with_nul()),
            log_level: 0,
            log_len: 0,
            log: 0,
        };
        bpf(PROGRAM_LOAD, &mut attribute).map(owned).map(Program)
    }

    /// For where the frames of the node with the address `mac` come in: those that it sends in its own name to one of `ways` go there, and the
    /// others to `otherwise`, the number of an interface.
    pub fn sorter(mac: [u8; 6], sender: &Sender, ways: &Ways, otherwise: u32) -> Result<Self, Errno> {
        Self::load(&sorter(mac, sender.0.as_raw_fd(), ways.0.as_raw_fd(), number(otherwise)))
    }

    /// For where frames come in that are all for the namespace of the other one of `interface`'s pair.
    pub fn forwarder(interface: u32) -> Result<Self, Errno> {
        Self::load(&[set(R1, number(interface)), set(R2, 0), call(REDIRECT_PEER), EXIT])
    }
}

fn number(interface: u32) -> i32 {
    i32::try_from(interface).expect("the kernel counts interfaces in an int")
}

fn sorter(mac: [u8; 6], sender: RawFd, ways: RawFd, otherwise: i32) -> Vec<Instruction> {
    let [a, b, c, d, e, f] = mac;
    let (low, high) = (i32::from_ne_bytes([a, b, c, d]), u16::from_ne_bytes([e, f]));
    let mut code = vec![copy(FRAME, R1), load(Width::Four, R2, FRAME, DATA), load(Width::Four, R3, FRAME, DATA_END)];
    let mut leave = Vec::new();
    // To be sent on to where `otherwise` is, if so.
    let mut unless = |code: &mut Vec<Instruction>, jump: Instruction| {
        leave.push(code.len());
        code.push(jump);
    };
    // Shorter than a header?
    code.extend([copy(R4, R2), add(R4, 14)]);
    unless(&mut code, instruction(0x2d, R4, R3, 0, 0));
    // In its own name?
    code.push(load(Width::Four, R4, R2, 6));
    unless(&mut code, instruction(0x56, R4, 0, 0, low));
    code.push(load(Width::Two, R4, R2, 10));
    unless(&mut code, instruction(0x56, R4, 0, 0, high.into()));
    code.extend([load(Width::Four, LOW, R2, 0), load(Width::Two, HIGH, R2, 4)]);
    // May it?
    code.extend(table(OWN, sender, true));
    code.push(load(Width::Eight, R1, OWN, 0));
    unless(&mut code, instruction(0x15, R1, 0, 0, 0));
    // Is there a way?
    code.extend([store(Width::Four, STACK, -8, LOW), store(Width::Four, STACK, -4, HIGH)]);
    code.extend(table(R1, ways, false));
    code.extend([copy(R2, STACK), add(R2, -8), call(LOOKUP)]);
    unless(&mut code, instruction(0x15, R0, 0, 0, 0));
    code.extend([load(Width::Eight, LOW, R0, 0), set(R1, 1), count(R0, 8, R1), count(OWN, 8, R1)]);
    // Our end of its pair has another address, so the kernel took it for a stranger's.
    code.extend([copy(R1, FRAME), set(R2, FOR_US), call(CHANGE_TYPE)]);
    code.extend([copy(R1, LOW), set(R2, 0), call(REDIRECT_PEER), EXIT]);
    let end = code.len();
    code.extend([set(R1, otherwise), set(R2, 0), call(REDIRECT), EXIT]);
    for at in leave {
        code[at].offset = i16::try_from(end - at - 1).expect("a few dozen");
    }
    code
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
        let code = sorter([2, 0, 0, 0, 0, 1], 3, 4, 7);
        let last = code.len() - 4;
        assert_eq!(code[last], set(R1, 7));
        let jumps = code.iter().enumerate().filter(|(_, one)| matches!(one.code, 0x2d | 0x56 | 0x15));
        let targets: Vec<_> = jumps.map(|(at, one)| at + 1 + usize::try_from(one.offset).expect("ahead")).collect();
        assert_eq!(targets, [last; 5]);
    }
}
