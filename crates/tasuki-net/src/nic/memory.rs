//! The memory that a card reaches: an arena for frames, and a region for its rings.
//!
//! # Invariants
//!
//! - **N1** The card writes slots of the arena only while it holds them (they are lent), and of the rings only what
//!   its data sheet says. No software can enforce that on a card; behind an IOMMU it holds for everything outside
//!   this memory. Frames of a card that is not trusted that far must be copied out of memory into which we never
//!   lend references.
//! - **N2** A process that has handed memory over no longer touches it. As with the card, that is a promise: a giver
//!   that is not trusted that far must be dead, or fenced, before its memory is adopted.
#![allow(unsafe_code, reason = "answers for the card and for a giver towards the arena (N1, N2)")]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

use arrayvec::ArrayVec;
use tasuki_shm::arena::{Arena, Geometry, Slot};
use tasuki_shm::line::Line;
use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};
use tasuki_shm::slots::{SlotId, WrongSlot, table_lines};

use super::bus::{Bus, BusError, Iova, Part, pci};
use super::ledger::{LEDGER_LEN, Ledger};
use super::{DriverState, NicError};

/// Number of slots at the start of the arena that are mapped on their own. A taker that can map nothing before its
/// giver is fenced maps these first, and drives with them: mapping all of them takes longer than everything else
/// that it does meanwhile.
pub(super) const HEAD: u32 = 64;

/// Maximum number of slots in adopted memory: a giver that claims more wants us to run out of memory for the slot
/// table.
const ADOPTED_MAX: u32 = 1 << 22;

/// Memory that a card reaches, with the addresses at which the card sees it.
#[derive(Debug)]
pub struct NicMemory {
    arena: Arena,
    rings: Region,
    /// Address of the rings, as the card sees it. The arena follows the rings.
    at: Iova,
    /// Memory of the ledger. The card does not reach it.
    ledger_region: Region,
    ledger: Ledger,
}

/// Location and division of a NIC's memory. A driver state is checked against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLayout {
    /// Address of the rings, as the card sees it.
    pub rings_at: Iova,
    /// Size of the rings in bytes.
    pub rings_len: usize,
    /// Geometry of the slots, which follow the rings.
    pub slots: Geometry,
}

impl MemoryLayout {
    /// Returns the address of the first byte of the arena, as the card sees it.
    pub fn arena_at(&self) -> Iova {
        Iova(self.rings_at.0.wrapping_add(self.rings_len as u64))
    }

    /// Unmaps every stretch by `unmap`, even if another stretch fails.
    ///
    /// # Errors
    /// The first error that `unmap` returned.
    pub fn unmap_by(&self, mut unmap: impl FnMut(Iova, usize) -> Result<(), BusError>) -> Result<(), BusError> {
        let mut outcome = Ok(());
        for (at, len) in self.stretches().into_iter().rev() {
            let unmapped = unmap(at, len);
            outcome = outcome.and(unmapped);
        }
        outcome
    }

    /// Returns address and length in bytes of each stretch that the card's bus knows: the rings, the first slots,
    /// and the other slots, if there are any.
    pub fn stretches(&self) -> ArrayVec<(Iova, usize), 3> {
        let (all, head) = (self.slots.len(), HEAD.min(self.slots.count) as usize * self.slots.slot_len as usize);
        let rest_at = Iova(self.arena_at().0.wrapping_add(head as u64));
        let three = [(self.rings_at, self.rings_len), (self.arena_at(), head), (rest_at, all - head)];
        three.into_iter().filter(|(_, len)| *len > 0).collect()
    }
}

/// Descriptors of a NIC's memory: with the driver state, they let another process go on with it.
#[derive(Debug)]
pub struct Parts {
    /// Memory of the rings.
    pub rings: OwnedFd,
    /// Memory of the frames.
    pub frames: OwnedFd,
    /// Memory of the [ledger](super::ledger), which the card does not reach.
    pub ledger: OwnedFd,
}

/// Reason why memory that was handed over is unusable.
#[derive(Debug, thiserror::Error)]
pub enum PartsError {
    /// A descriptor is not memory, or its memory can be taken away while we use it.
    #[error("{0}")]
    Region(#[from] RegionError),
    /// The memory cannot be a NIC's.
    #[error("the memory handed over cannot be a NIC's: {what} ({value:#x}); start the card with memory of its own")]
    Impossible {
        /// What is wrong with the memory.
        what: &'static str,
        /// The value found.
        value: u64,
    },
    /// The driver state belongs to other memory.
    #[error("{0}")]
    DriverState(#[from] NicError),
}

fn slot_table(slots: Geometry) -> Result<Span<Line>, RegionError> {
    let table = Region::create("tasuki-nic-slots", table_lines(slots.count) * 64, Pages::Small)?;
    table.populate();
    table.span(0, table_lines(slots.count))
}

impl NicMemory {
    /// Creates memory with `slots` for frames and `rings_len` bytes for the rings. The card sees it at `at`, a
    /// multiple of a page.
    pub fn create(slots: Geometry, rings_len: usize, at: Iova) -> Result<Self, RegionError> {
        let rings = Region::create("tasuki-nic-rings", rings_len.next_multiple_of(PAGE_LEN), Pages::Small)?;
        // SAFETY: slots are lent to the card alone, and it writes no others (N1).
        let arena = unsafe { Arena::for_device("tasuki-nic-frames", slots, slot_table(slots)?) }?;
        let ledger_region = Region::create("tasuki-nic-ledger", LEDGER_LEN, Pages::Small)?;
        let ledger = Ledger::over(&ledger_region)?;
        Ok(NicMemory { arena, rings, at, ledger_region, ledger })
    }

    /// Returns what another process needs, beside the driver state, to [adopt](Self::adopt) this memory. The memory
    /// stays ours until then, so that a giver whose taker fails can go on. Afterwards the giver must not touch the
    /// memory, nor any slot that it still holds (N2).
    pub fn parts(&self) -> io::Result<Parts> {
        let copy = |region: &Region| region.fd().try_clone_to_owned();
        Ok(Parts { rings: copy(&self.rings)?, frames: copy(self.arena.region())?, ledger: copy(&self.ledger_region)? })
    }

    /// Adopts memory that another process has handed over with the driver state of its card. The card has the slots
    /// that the driver state names; all others are free.
    ///
    /// # Errors
    /// The parts are not sealed memory, are not distinct, have a wrong size, or are not those of the driver state;
    /// or the driver state is broken.
    pub fn adopt(parts: Parts, driver_state: &impl DriverState) -> Result<Self, PartsError> {
        let head = driver_state.head();
        let slots = Geometry { slot_len: head.slot_len, count: head.slots };
        let memory = Self::of_parts(parts, slots, Iova(head.rings_at))?;
        driver_state.check(&memory.layout())?;
        let odd = |_| PartsError::Impossible { what: "the slots that the card has", value: 0 };
        memory.lend(driver_state.slots()).map_err(odd)?;
        Ok(memory)
    }

    /// Maps the memory of a NIC that another process still drives. The caller must use nothing of it before that
    /// process [hands the card over](super::InPlace::go_on) (N2). Every page is mapped now, so that none costs a
    /// page fault later.
    pub fn prepare(parts: Parts, layout: &MemoryLayout) -> Result<Self, PartsError> {
        let memory = Self::of_parts(parts, layout.slots, layout.rings_at)?;
        if memory.layout() != *layout {
            return Err(PartsError::Impossible { what: "the bytes of its rings", value: memory.rings.len() as u64 });
        }
        memory.populate();
        Ok(memory)
    }

    /// Maps all pages now, so that none costs a page fault while we drive the card.
    pub fn populate(&self) {
        [&self.rings, self.arena.region(), &self.ledger_region].into_iter().for_each(Region::populate);
    }

    /// Marks these slots, which are free in our slot table, as lent to the card.
    pub(super) fn lend(&self, slots: impl Iterator<Item = SlotId>) -> Result<(), WrongSlot> {
        self.arena.adopt_all(slots)
    }

    /// Maps the parts. Lends no slot yet.
    fn of_parts(parts: Parts, slots: Geometry, at: Iova) -> Result<Self, PartsError> {
        let (rings, frames) = (Region::adopt(parts.rings)?, Region::adopt(parts.frames)?);
        let ledger_region = Region::adopt(parts.ledger)?;
        let impossible = |what, value| Err(PartsError::Impossible { what, value });
        let file = |region: &Region| rustix::fs::fstat(region).map(|stat| (stat.st_dev, stat.st_ino));
        let files = [file(&rings), file(&frames), file(&ledger_region)];
        if files[0].is_err() || files[0] == files[1] || files[..2].contains(&files[2]) {
            return impossible("two of rings, frames and ledger are the same", rings.len() as u64);
        }
        if ledger_region.len() != LEDGER_LEN {
            return impossible("the bytes of its ledger", ledger_region.len() as u64);
        }
        if !slots.is_sound() || slots.count > ADOPTED_MAX {
            return impossible("the shape of its slots", u64::from(slots.count) << 32 | u64::from(slots.slot_len));
        }
        // The frames could be larger only if slots did not fill whole huge pages, but such slots do.
        if frames.len() != slots.len() {
            return impossible("the bytes of its frames", frames.len() as u64);
        }
        let len = rings.len() as u64 + frames.len() as u64;
        if !at.0.is_multiple_of(PAGE_LEN as u64) || at.0.checked_add(len).is_none() {
            return impossible("the address at which the card sees it", at.0);
        }
        // SAFETY: the card writes only slots that it is lent (N1), and the giver no longer writes any (N2).
        let arena = unsafe { Arena::adopt_for_device(frames, slots, slot_table(slots)?) }?;
        let ledger = Ledger::over(&ledger_region)?;
        Ok(NicMemory { arena, rings, at, ledger_region, ledger })
    }

    /// Returns location and division of the memory.
    pub fn layout(&self) -> MemoryLayout {
        MemoryLayout { rings_at: self.at, rings_len: self.rings.len(), slots: self.arena.geometry() }
    }

    /// Returns the arena that holds the frames.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns the region that holds the rings.
    pub fn rings(&self) -> &Region {
        &self.rings
    }

    /// Returns the ledger's list of the slots in the descriptors of ring number `ring`, for `count` descriptors.
    pub(super) fn slot_list(&self, ring: usize, count: usize) -> Span<AtomicU64> {
        Ledger::table(&self.ledger_region, ring, count)
    }

    /// Returns the ledger, which records the driver's progress.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the address of the first byte of the rings, as the card sees it.
    pub fn rings_at(&self) -> Iova {
        self.at
    }

    /// Returns the address of the first byte of the arena, as the card sees it.
    #[inline]
    pub fn arena_at(&self) -> Iova {
        self.at + self.rings.len() as u64
    }

    /// Returns the address of the first byte of a slot, as the card sees it.
    pub fn slot_at(&self, slot: &Slot) -> Iova {
        self.at_of(slot.id())
    }

    /// Like [`slot_at`](Self::slot_at), for a slot that the card holds.
    #[inline]
    pub fn at_of(&self, id: SlotId) -> Iova {
        self.arena_at() + u64::from(id.index) * u64::from(self.arena.geometry().slot_len)
    }

    /// Returns the parts that the bus maps for the device: one for each stretch.
    fn parts_of_it(&self) -> ArrayVec<Part<'_>, 3> {
        let part = |(index, (at, len))| match index {
            0 => Part { memory: &self.rings, from: 0, len, at },
            1 => Part { memory: self.arena.region(), from: 0, len, at },
            _ => Part { memory: self.arena.region(), from: self.arena.region().len() - len, len, at },
        };
        self.layout().stretches().into_iter().enumerate().map(part).collect()
    }

    /// Lets the device of `bus` reach the memory: all of it or, on error, nothing.
    pub fn map(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        map_all(bus, &self.parts_of_it())
    }

    /// Lets the device of `bus` reach the memory, whether or not a predecessor mapped it already.
    pub(super) fn map_anew(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        map_anew(bus, &self.parts_of_it())
    }

    /// Like [`map_anew`](Self::map_anew), for the rings and the first slots alone.
    pub(super) fn map_head(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        let parts = self.parts_of_it();
        map_anew(bus, &parts[..2.min(parts.len())])
    }

    /// Like [`map_anew`](Self::map_anew), for the other slots, none of which the card has.
    pub(super) fn map_rest(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        let parts = self.parts_of_it();
        map_anew(bus, &parts[2.min(parts.len())..])
    }

    /// Takes the free slots beyond the first [`HEAD`], so that they stay out of use until they are dropped.
    pub(super) fn hold_rest(&self) -> Vec<Slot> {
        let all: Vec<Slot> = std::iter::from_fn(|| self.arena.take()).collect();
        all.into_iter().filter(|slot| slot.id().index >= HEAD).collect()
    }

    /// Cuts the device of `bus` off from the memory.
    pub fn unmap(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        self.layout().unmap_by(|at, len| bus.unmap_dma(at, len))
    }

    /// Takes all slots back from the card. Call it after a reset.
    pub(super) fn take_back(&self) {
        self.arena.reclaim();
    }

    /// Cuts a card that could not be started off from this memory. Best effort: errors are ignored, since the caller
    /// already returns one. Does not take the card's slots back: that needs a reset that is known to have worked.
    pub(super) fn withdraw(&self, bus: &mut impl Bus) {
        let _ = pci::enable(bus, false);
        let _ = self.unmap(bus);
    }
}

/// Maps all of `parts` or, on error, none.
fn map_all(bus: &mut impl Bus, parts: &[Part<'_>]) -> Result<(), BusError> {
    let mapped: ArrayVec<_, 3> = match *parts {
        [a, b, c] => ArrayVec::from(bus.map_each([a, b, c])?),
        [a, b] => bus.map_each([a, b])?.into_iter().collect(),
        _ => parts.iter().map(|part| bus.map_part(*part)).collect(),
    };
    if mapped.iter().any(Result::is_err) {
        // Ignore errors of the unmapping: the error of the mapping is the one to report.
        for (part, _) in parts.iter().zip(&mapped).filter(|(_, outcome)| outcome.is_ok()) {
            let _ = bus.unmap_dma(part.at, part.len);
        }
    }
    mapped.into_iter().collect()
}

/// Like [`map_all`], whether or not a predecessor mapped the parts already.
fn map_anew(bus: &mut impl Bus, parts: &[Part<'_>]) -> Result<(), BusError> {
    match map_all(bus, parts) {
        // This memory may be mapped already, by a predecessor. If something else is mapped there, the second attempt
        // is refused and says so.
        Err(BusError::Dma { .. }) => {
            for part in parts {
                let _ = bus.unmap_dma(part.at, part.len);
            }
            map_all(bus, parts)
        }
        other => other,
    }
}
