//! A driver's memory twice: as our end has it, and as the judge has it.

use std::os::fd::AsFd;

use rustix::fs::MemfdFlags;
use tasuki_net::virtq::{DriverMemory, MemoryRegion, Piece};
use tasuki_shm::region::CommonRegion;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Addresses of the first of two regions, of the guest and of the front end. The guest's follow each other, so a buffer
/// may lie in both; the front end has a gap between the two.
pub const GUEST: u64 = 0x1_0000;
const USER: u64 = 0x7f00_0000_0000;
const USER_NEXT: u64 = 0x10_0000;
/// Length of a region in bytes, and its offset in its file.
pub const LEN: u64 = 0x8000;
const OFFSET: u64 = 0x1000;
pub const REGIONS: u64 = 2;
/// First address of the guest behind all memory.
pub const END: u64 = GUEST + REGIONS * LEN;

/// Bytes of a region's file: there are some before and behind the region that nobody may write.
const FILE_LEN: usize = 0xa000;

/// Pieces of the driver's memory: the address of each, and its length in bytes.
pub type Places = Vec<(u64, usize)>;

pub struct Memory {
    /// The driver's own mappings of the files that our end has.
    files: [CommonRegion; REGIONS as usize],
    pub ours: DriverMemory,
    pub theirs: GuestMemoryMmap,
}

impl Memory {
    pub fn new() -> Self {
        let mut ours = DriverMemory::default();
        let files = std::array::from_fn(|number| {
            let file = rustix::fs::memfd_create("driver", MemfdFlags::CLOEXEC).expect("a file");
            rustix::fs::ftruncate(&file, FILE_LEN as u64).expect("a file of this length");
            // Whole pages are mapped, which may be more than was announced.
            let map = || CommonRegion::map_guarded(file.as_fd(), FILE_LEN).expect("it has as much");
            let (guest, user) = (GUEST + number as u64 * LEN, USER + number as u64 * USER_NEXT);
            ours.regions.push(MemoryRegion { guest, user, len: LEN, mapped: map(), offset: OFFSET });
            map()
        });
        let ranges = [(GuestAddress(GUEST), (LEN * REGIONS / 2) as usize), (GuestAddress(GUEST + LEN), LEN as usize)];
        let theirs = GuestMemoryMmap::from_ranges(&ranges).expect("memory for the judge");
        Memory { files, ours, theirs }
    }

    pub fn clear(&self) {
        self.write(GUEST, &[0; (REGIONS * LEN) as usize]);
    }

    /// Writes as the driver does. Leaves out what lies behind all memory.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        for (number, file) in (0..).zip(&self.files) {
            let start = GUEST + number * LEN;
            let (from, to) = (at.max(start), (at + bytes.len() as u64).min(start + LEN));
            if from < to {
                let part = &bytes[(from - at) as usize..(to - at) as usize];
                file.copy_from((OFFSET + from - start) as usize, part).expect("it lies there");
                self.theirs.write_slice(part, GuestAddress(from)).expect("it lies there");
            }
        }
    }

    /// Reads a number of the judge's copy.
    pub fn half(&self, at: u64) -> u16 {
        self.theirs.read_obj(GuestAddress(at)).map_or(0, u16::from_le)
    }

    /// Returns the front end's address of the guest's address `at`, which lies in the memory.
    pub fn user(at: u64) -> u64 {
        let at = at - GUEST;
        USER + at / LEN * USER_NEXT + at % LEN
    }

    /// Returns whether these bytes are there, and all in one region.
    pub fn is_in_one(at: u64, len: u64) -> bool {
        (GUEST..END).contains(&at) && (at - GUEST) % LEN + len <= LEN
    }

    /// Returns whether these bytes are there.
    pub fn is_there(&self, at: u64, len: u32) -> bool {
        self.theirs.check_range(GuestAddress(at), len as usize)
    }

    /// Puts the pieces of a descriptor into `places`, as they lie in the regions. A descriptor without bytes lies nowhere.
    pub fn add_to(&self, places: &mut Places, (mut address, len): (u64, u32)) -> Result<(), ()> {
        if len > 0 && !self.is_there(address, len) {
            return Err(());
        }
        let mut left = len as usize;
        while left > 0 {
            let part = left.min((LEN - (address - GUEST) % LEN) as usize);
            places.push((address, part));
            (address, left) = (address + part as u64, left - part);
        }
        Ok(())
    }

    /// Returns where our end's pieces lie.
    pub fn places(&self, pieces: &[Piece]) -> Places {
        let place = |piece: &Piece| {
            let (region, offset) = self.ours.place_of(*piece);
            let region = self.ours.regions.iter().find(|it| std::ptr::eq(&raw const it.mapped, region));
            let region = region.expect("each piece lies in a region");
            let at = (offset as u64).checked_sub(region.offset).expect("nothing before the region");
            assert!(at + piece.len as u64 <= region.len, "a piece goes beyond its region");
            (region.guest + at, piece.len)
        };
        pieces.iter().map(place).collect()
    }

    /// Returns up to `most` bytes of the judge's copy.
    pub fn bytes(&self, places: &Places, most: usize) -> Vec<u8> {
        let mut all = Vec::new();
        for (address, len) in places {
            let start = all.len();
            all.resize(most.min(start + len), 0);
            self.theirs.read_slice(&mut all[start..], GuestAddress(*address)).expect("it was checked");
        }
        all
    }

    /// Writes bytes to pieces of the judge's copy.
    pub fn fill(&self, places: &Places, mut bytes: &[u8]) {
        for (address, len) in places {
            let (part, rest) = bytes.split_at(bytes.len().min(*len));
            self.theirs.write_slice(part, GuestAddress(*address)).expect("it was checked");
            bytes = rest;
        }
    }

    /// Checks that both ends left the same bytes, and that ours wrote none outside the regions.
    pub fn check(&self) {
        for (number, file) in (0..).zip(&self.files) {
            let (mut ours, mut theirs) = ([0; FILE_LEN], [0; LEN as usize]);
            file.copy_to(0, &mut ours).expect("all of it");
            self.theirs.read_slice(&mut theirs, GuestAddress(GUEST + number * LEN)).expect("all of it");
            let (before, rest) = ours.split_at(OFFSET as usize);
            let (region, behind) = rest.split_at(LEN as usize);
            assert!(before.iter().chain(behind).all(|byte| *byte == 0), "a byte outside a region was written");
            if region != theirs {
                let at = region.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs).expect("one of them");
                let place = number * LEN + at as u64;
                panic!("our end left {:#x} at byte {place:#x}, and the judge {:#x}", region[at], theirs[at]);
            }
        }
    }
}
