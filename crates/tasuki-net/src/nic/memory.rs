//! The memory that a card reaches: an arena for frames, and a region for its rings.
//!
//! # Invariants
//!
//! - **N1** The card writes slots of the arena only while it holds them (they are lent), and of the rings what its data sheet says.
//!   No software can enforce that on a card; behind an IOMMU it holds for everything outside of this memory. A card that is
//!   not trusted so far must have its frames copied out of memory that we never lend references into.
#![allow(unsafe_code, reason = "answers for the card towards the arena (N1)")]

use tasuki_shm::arena::{Arena, Geometry, Slot};
use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError};
use tasuki_shm::slots::{SlotId, table_lines};

use super::bus::{Bus, BusError, Iova};

/// The memory that a card reaches, with the addresses at which the card sees it.
#[derive(Debug)]
pub struct NicMemory {
    arena: Arena,
    rings: Region,
    /// The rings come first, the arena follows.
    at: Iova,
}

impl NicMemory {
    /// New memory: `slots` for frames and `rings_len` bytes for the rings, which the card sees at `at` (a multiple of a page).
    pub fn create(slots: Geometry, rings_len: usize, at: Iova) -> Result<Self, RegionError> {
        let rings = Region::create("tasuki-nic-rings", rings_len.next_multiple_of(PAGE_LEN), Pages::Small)?;
        let table = Region::create("tasuki-nic-slots", table_lines(slots.count) * 64, Pages::Small)?;
        let table = table.span(0, table_lines(slots.count))?;
        // SAFETY: N1.
        let arena = unsafe { Arena::for_device("tasuki-nic-frames", slots, table) }?;
        Ok(NicMemory { arena, rings, at })
    }

    /// Where frames lie.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Where the rings lie.
    pub fn rings(&self) -> &Region {
        &self.rings
    }

    /// Where the card sees the first byte of the rings.
    pub fn rings_at(&self) -> Iova {
        self.at
    }

    /// Where the card sees the first byte of the arena.
    #[inline]
    pub fn arena_at(&self) -> Iova {
        self.at + self.rings.len() as u64
    }

    /// Where the card sees the first byte of a slot.
    pub fn slot_at(&self, slot: &Slot) -> Iova {
        self.at_of(slot.id())
    }

    /// The same of a slot that the card holds.
    #[inline]
    pub fn at_of(&self, id: SlotId) -> Iova {
        self.arena_at() + u64::from(id.index) * u64::from(self.arena.geometry().slot_len)
    }

    /// Lets the device of `bus` reach it.
    pub fn map(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        bus.map_dma(&self.rings, self.rings_at())?;
        bus.map_dma(self.arena.region(), self.arena_at())
    }

    /// The device of `bus` can reach it no longer.
    pub fn unmap(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        bus.unmap_dma(self.arena_at(), self.arena.region().len())?;
        bus.unmap_dma(self.rings_at(), self.rings.len())
    }
}
