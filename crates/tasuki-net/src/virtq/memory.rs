//! A driver's memory, and the log of the pages that we write in it.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Release;

use arrayvec::ArrayVec;
use tasuki_shm::region::{CommonRegion, RegionError, Span};

use super::{Broken, Layout, PIECES_MAX, Place};

/// Maximum number of regions of a driver's memory.
pub const REGIONS_MAX: usize = 8;

/// A region of a driver's memory.
#[derive(Debug)]
pub struct MemoryRegion {
    /// First address, as descriptors have it.
    pub guest: u64,
    /// First address, as the front end has it.
    pub user: u64,
    /// Length in bytes.
    pub len: u64,
    /// The memory that holds it.
    pub mapped: CommonRegion,
    /// Offset of the region in that memory, in bytes.
    pub offset: u64,
}

/// Bytes of a page, as the log of written pages counts them.
const LOG_PAGE: u64 = 4096;

/// A log of written pages: a bit for each page of a driver's memory, in memory of the front end.
///
/// Source: QEMU, `docs/interop/vhost-user.rst` (7.2), "Migration".
#[derive(Debug)]
pub struct Log {
    region: CommonRegion,
    words: Span<AtomicU64>,
}

impl Log {
    /// Opens the log of `len` bytes that begins at byte `offset` of the region. Returns nothing if it does not lie there
    /// as whole words.
    pub fn new(region: CommonRegion, offset: u64, len: u64) -> Option<Self> {
        let (offset, count) = (usize::try_from(offset).ok()?, usize::try_from(len / 8).ok()?);
        let words = region.span(offset, count).ok()?;
        Some(Log { region, words })
    }

    /// Returns whether it has a bit for each byte from 0 up to this address.
    pub fn covers(&self, end: u64) -> bool {
        end.div_ceil(LOG_PAGE) <= 64 * self.words.len() as u64
    }

    /// Notes that `len` bytes at the driver's address `address` were written. They must have been.
    pub(super) fn note(&self, address: u64, len: usize) {
        let Some(last) = address.checked_add((len as u64).saturating_sub(1)) else { return };
        for page in address / LOG_PAGE..=last / LOG_PAGE {
            let word = usize::try_from(page / 64).ok().and_then(|word| self.words.get(word));
            // The page's bytes come before its bit: the front end clears the bit, and then reads the bytes.
            word.iter().for_each(|word| _ = word.fetch_or((1_u64 << (page % 64)).to_le(), Release));
        }
    }
}

/// All memory of a driver.
#[derive(Debug, Default)]
pub struct DriverMemory {
    /// Regions, in the order of their announcement: a [`Piece`] counts on it.
    pub regions: ArrayVec<MemoryRegion, REGIONS_MAX>,
    /// Where we note the pages that we write, while the machine is copied to another place.
    pub log: Option<Log>,
}

/// Bytes that lie within a region (Q3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    region: u8,
    /// Offset in the memory of the region.
    offset: usize,
    /// Number of bytes.
    pub len: usize,
}

impl DriverMemory {
    /// Returns whether any of it was taken away.
    pub fn is_gone(&self) -> bool {
        let log = self.log.iter().map(|log| &log.region);
        self.regions.iter().map(|region| &region.mapped).chain(log).any(CommonRegion::is_gone)
    }

    /// Has the pages of a queue mapped before they are needed.
    pub fn populate(&self, place: Place, layout: Layout) {
        for part in place.parts(layout) {
            if let Ok((region, offset)) = self.lend(part) {
                region.populate(offset, part.1);
            }
        }
    }

    /// Returns where a part of a queue lies, with its front end's address and its length in bytes.
    pub(super) fn lend(&self, (address, len): (u64, usize)) -> Result<(&CommonRegion, usize), Broken> {
        let lies = self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.user)?;
            let fits = offset.checked_add(len as u64)? <= region.len;
            fits.then_some((&region.mapped, usize::try_from(region.offset + offset).ok()?))
        });
        lies.ok_or(Broken::Ring)
    }

    /// Returns the number of the region that has this address of the front end, and the driver's address of it.
    pub fn lies(&self, user: u64) -> Option<(usize, u64)> {
        let offset_in = |region: &MemoryRegion| user.checked_sub(region.user).filter(|offset| *offset < region.len);
        let mut regions = self.regions.iter().enumerate();
        regions.find_map(|(number, region)| Some((number, region.guest.checked_add(offset_in(region)?)?)))
    }

    /// Returns the driver's address of what has this address of the front end.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.lies(user).map(|(_, address)| address)
    }

    /// Returns as much of `len` bytes at the driver's address `address` as lies in one region.
    #[inline]
    pub(super) fn piece(&self, address: u64, len: usize) -> Option<Piece> {
        (0_u8..).zip(&self.regions).find_map(|(at, region)| {
            let offset = address.checked_sub(region.guest).filter(|offset| *offset < region.len)?;
            let len = usize::try_from(region.len - offset).map_or(len, |rest| rest.min(len));
            Some(Piece { region: at, offset: usize::try_from(region.offset + offset).ok()?, len })
        })
    }

    /// Puts the pieces of `len` bytes at the driver's address `address` into `pieces`.
    pub(super) fn pieces(
        &self,
        mut address: u64,
        len: u32,
        pieces: &mut ArrayVec<Piece, PIECES_MAX>,
    ) -> Result<(), Broken> {
        let mut left = len as usize;
        while left > 0 {
            let piece = self.piece(address, left).ok_or(Broken::Outside)?;
            pieces.try_push(piece).map_err(|_| Broken::Chain)?;
            address = address.checked_add(piece.len as u64).ok_or(Broken::Outside)?;
            left -= piece.len;
        }
        Ok(())
    }

    fn at(&self, address: u64) -> Option<(&CommonRegion, usize)> {
        let region = self.regions.iter().find(|it| address.wrapping_sub(it.guest) < it.len)?;
        let offset = region.offset.wrapping_add(address - region.guest);
        Some((&region.mapped, usize::try_from(offset).ok()?))
    }

    /// Brings `len` bytes at the driver's address `address` nearer, to be read soon.
    #[inline]
    pub fn prefetch_to_read(&self, address: u64, len: usize) {
        if let Some((region, offset)) = self.at(address) {
            region.prefetch_to_read(offset, len);
        }
    }

    /// Brings `len` bytes at the driver's address `address` nearer, to be written soon.
    #[inline]
    pub fn prefetch_to_write(&self, address: u64, len: usize) {
        if let Some((region, offset)) = self.at(address) {
            region.prefetch_to_write(offset, len);
        }
    }

    /// Returns the memory in which a piece lies, and its offset there in bytes.
    #[inline]
    pub fn place_of(&self, piece: Piece) -> (&CommonRegion, usize) {
        (self.region(piece), piece.offset)
    }

    /// Notes that the first `len` bytes of a piece were written, if such notes are taken.
    #[inline]
    pub fn note(&self, piece: Piece, len: usize) {
        if let Some(log) = &self.log {
            let region = &self.regions[usize::from(piece.region)];
            log.note((piece.offset as u64).wrapping_sub(region.offset).wrapping_add(region.guest), len);
        }
    }

    fn region(&self, piece: Piece) -> &CommonRegion {
        &self.regions[usize::from(piece.region)].mapped
    }

    /// Copies bytes from the pieces, from byte `from` on, as many as `into` has. Returns whether there were as many.
    #[inline]
    pub fn copy_to(&self, pieces: &[Piece], mut from: usize, into: &mut [u8]) -> bool {
        let mut done = 0;
        for piece in pieces {
            if from >= piece.len {
                from -= piece.len;
                continue;
            }
            let len = (piece.len - from).min(into.len() - done);
            let room = &mut into[done..done + len];
            self.region(*piece).copy_to(piece.offset + from, room).expect("the piece was checked");
            done += len;
            from = 0;
            if done == into.len() {
                return true;
            }
        }
        done == into.len()
    }

    /// Has `copy` fill the pieces with `len` bytes, from their byte `from` on, and notes them. Its arguments: offset among the `len`
    /// bytes, number of bytes, region, and offset in the region.
    #[inline]
    pub fn fill(
        &self,
        pieces: &[Piece],
        mut from: usize,
        len: usize,
        mut copy: impl FnMut(usize, usize, &CommonRegion, usize) -> Result<(), RegionError>,
    ) {
        let mut done = 0;
        for piece in pieces {
            if from >= piece.len {
                from -= piece.len;
                continue;
            }
            let part = (piece.len - from).min(len - done);
            copy(done, part, self.region(*piece), piece.offset + from).expect("the piece was checked");
            self.note(Piece { offset: piece.offset + from, ..*piece }, part);
            done += part;
            from = 0;
            if done == len {
                return;
            }
        }
    }
}
