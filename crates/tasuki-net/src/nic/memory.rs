//! The memory that a card reaches: an arena for frames, and a region for its rings.
//!
//! # Invariants
//!
//! - **N1** The card writes slots of the arena only while it holds them (they are lent), and of the rings what its data sheet says.
//!   No software can enforce that on a card; behind an IOMMU it holds for everything outside of this memory. A card that is
//!   not trusted so far must have its frames copied out of memory that we never lend references into.
//! - **N2** Whoever has handed memory over touches it no longer. As with the card, that is a promise: a giver that is not trusted
//!   so far must be dead, or fenced, before its memory is adopted.
#![allow(unsafe_code, reason = "answers for the card and for a giver towards the arena (N1, N2)")]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

use arrayvec::ArrayVec;
use tasuki_shm::arena::{AdoptError, Arena, Geometry, Slot};
use tasuki_shm::line::Line;
use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};
use tasuki_shm::slots::{SlotId, WrongSlot, table_lines};

use super::bus::{Bus, BusError, Iova, Part, pci};
use super::ledger::{LEDGER_LEN, Ledger};
use super::{DriverState, NicError};

/// Slots that are mapped by themselves. A taker that can map nothing before its giver is fenced maps them first, and drives with them: to map all takes longer
/// than all else that it does meanwhile.
pub(super) const HEAD: u32 = 64;

/// Most slots of memory that is adopted: whoever says that there are more wants us to run out of memory for their table.
const ADOPTED_MAX: u32 = 1 << 22;

/// The memory that a card reaches, with the addresses at which the card sees it.
#[derive(Debug)]
pub struct NicMemory {
    arena: Arena,
    rings: Region,
    /// The rings come first, the arena follows.
    at: Iova,
    /// Where the driver stands. Not for the card.
    program_state: Region,
    ledger: Ledger,
}

/// Where a NIC's memory lies and how it is cut: what a driver state is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLayout {
    /// Where the card sees the rings.
    pub rings_at: Iova,
    /// Bytes for the rings.
    pub rings_len: usize,
    /// The slots that follow them.
    pub slots: Geometry,
}

impl MemoryLayout {
    /// Where the card sees the first byte of the arena.
    pub fn arena_at(&self) -> Iova {
        Iova(self.rings_at.0.wrapping_add(self.rings_len as u64))
    }

    /// Unmaps each stretch by `unmap`, whether the others are there or not; says which was the first that could not be.
    ///
    /// # Errors
    /// What `unmap` says.
    pub fn unmap_by(&self, mut unmap: impl FnMut(Iova, usize) -> Result<(), BusError>) -> Result<(), BusError> {
        let mut outcome = Ok(());
        for (at, len) in self.stretches().into_iter().rev() {
            let unmapped = unmap(at, len);
            outcome = outcome.and(unmapped);
        }
        outcome
    }

    /// The stretches as which the card's bus knows it, and their bytes: the rings, the first slots, and the others, if there are any.
    pub fn stretches(&self) -> ArrayVec<(Iova, usize), 3> {
        let (all, head) = (self.slots.len(), HEAD.min(self.slots.count) as usize * self.slots.slot_len as usize);
        let rest_at = Iova(self.arena_at().0.wrapping_add(head as u64));
        let three = [(self.rings_at, self.rings_len), (self.arena_at(), head), (rest_at, all - head)];
        three.into_iter().filter(|(_, len)| *len > 0).collect()
    }
}

/// What another process needs to go on with a NIC's memory, beside the driver state.
#[derive(Debug)]
pub struct Parts {
    /// The memory of the rings.
    pub rings: OwnedFd,
    /// The memory of the frames.
    pub frames: OwnedFd,
    /// The memory of the [ledger](super::ledger), which the card does not reach.
    pub ledger: OwnedFd,
}

/// Why memory that was handed over is of no use.
#[derive(Debug, thiserror::Error)]
pub enum PartsError {
    /// It is no memory, or can be taken away under us.
    #[error("{0}")]
    Region(#[from] RegionError),
    /// It cannot be a NIC's.
    #[error("the memory handed over cannot be a NIC's: {what} ({value:#x}); start the card with memory of its own")]
    Impossible {
        /// What is wrong with it.
        what: &'static str,
        /// What stands there.
        value: u64,
    },
    /// It is not the memory that the driver state is of.
    #[error("{0}")]
    DriverState(#[from] NicError),
}

impl From<AdoptError> for PartsError {
    fn from(error: AdoptError) -> Self {
        match error {
            AdoptError::Region(error) => PartsError::Region(error),
            AdoptError::Slot(_) => PartsError::Impossible { what: "the slots that the card has", value: 0 },
        }
    }
}

fn slot_table(slots: Geometry) -> Result<Span<Line>, RegionError> {
    let table = Region::create("tasuki-nic-slots", table_lines(slots.count) * 64, Pages::Small)?;
    table.populate();
    table.span(0, table_lines(slots.count))
}

impl NicMemory {
    /// New memory: `slots` for frames and `rings_len` bytes for the rings, which the card sees at `at` (a multiple of a page).
    pub fn create(slots: Geometry, rings_len: usize, at: Iova) -> Result<Self, RegionError> {
        let rings = Region::create("tasuki-nic-rings", rings_len.next_multiple_of(PAGE_LEN), Pages::Small)?;
        // SAFETY: the card, which alone is lent slots, writes no others (N1).
        let arena = unsafe { Arena::for_device("tasuki-nic-frames", slots, slot_table(slots)?) }?;
        let program_state = Region::create("tasuki-nic-ledger", LEDGER_LEN, Pages::Small)?;
        let ledger = Ledger::over(&program_state)?;
        Ok(NicMemory { arena, rings, at, program_state, ledger })
    }

    /// What another process needs, beside the driver state, to [adopt](Self::adopt) this memory. It stays ours until then, so that a giver whose
    /// taker fails goes on; afterwards it must not be touched, nor any slot that is still in hand (N2).
    pub fn parts(&self) -> io::Result<Parts> {
        let copy = |region: &Region| region.fd().try_clone_to_owned();
        Ok(Parts { rings: copy(&self.rings)?, frames: copy(self.arena.region())?, ledger: copy(&self.program_state)? })
    }

    /// Memory that another process has handed over with the driver state of its card: the card has the slots that the driver state names, and all
    /// others are free.
    ///
    /// # Errors
    /// When the parts are no sealed memory, not two, not whole, or not those that the driver state is of; and when the driver state is broken.
    pub fn adopt(parts: Parts, driver_state: &impl DriverState) -> Result<Self, PartsError> {
        let head = driver_state.head();
        let slots = Geometry { slot_len: head.slot_len, count: head.slots };
        let memory = Self::of_parts(parts, slots, Iova(head.rings_at))?;
        driver_state.check(&memory.layout())?;
        memory.lend(driver_state.slots()).map_err(AdoptError::Slot)?;
        Ok(memory)
    }

    /// The memory of a NIC that another process still drives, of which nothing may be used before it [hands the card
    /// over](super::InPlace::go_on) (N2). It is mapped as a whole, so that nothing of it costs a page fault later.
    pub fn prepare(parts: Parts, layout: &MemoryLayout) -> Result<Self, PartsError> {
        let memory = Self::of_parts(parts, layout.slots, layout.rings_at)?;
        if memory.layout() != *layout {
            return Err(PartsError::Impossible { what: "the bytes of its rings", value: memory.rings.len() as u64 });
        }
        memory.populate();
        Ok(memory)
    }

    /// Makes all pages be there, so that none is missed when the card is ours.
    pub fn populate(&self) {
        [&self.rings, self.arena.region(), &self.program_state].into_iter().for_each(Region::populate);
    }

    /// The card has these slots, which are free in our table.
    pub(super) fn lend(&self, slots: impl Iterator<Item = SlotId>) -> Result<(), WrongSlot> {
        self.arena.adopt_all(slots)
    }

    /// Maps the parts. No slot is lent yet.
    fn of_parts(parts: Parts, slots: Geometry, at: Iova) -> Result<Self, PartsError> {
        let (rings, frames) = (Region::adopt(parts.rings)?, Region::adopt(parts.frames)?);
        let program_state = Region::adopt(parts.ledger)?;
        let impossible = |what, value| Err(PartsError::Impossible { what, value });
        let file = |region: &Region| rustix::fs::fstat(region).map(|stat| (stat.st_dev, stat.st_ino));
        let files = [file(&rings), file(&frames), file(&program_state)];
        if files[0].is_err() || files[0] == files[1] || files[..2].contains(&files[2]) {
            return impossible("two of rings, frames and ledger are the same", rings.len() as u64);
        }
        if program_state.len() != LEDGER_LEN {
            return impossible("the bytes of its ledger", program_state.len() as u64);
        }
        if !slots.is_sound() || slots.count > ADOPTED_MAX {
            return impossible("the shape of its slots", u64::from(slots.count) << 32 | u64::from(slots.slot_len));
        }
        // Larger it can be only where slots fill no whole huge pages, which such slots do.
        if frames.len() != slots.len() {
            return impossible("the bytes of its frames", frames.len() as u64);
        }
        let len = rings.len() as u64 + frames.len() as u64;
        if !at.0.is_multiple_of(PAGE_LEN as u64) || at.0.checked_add(len).is_none() {
            return impossible("the address at which the card sees it", at.0);
        }
        // SAFETY: the card writes no slots but those that it is lent (N1), and the giver none any more (N2).
        let arena = unsafe { Arena::adopt_for_device(frames, slots, slot_table(slots)?, []) }?;
        let ledger = Ledger::over(&program_state)?;
        Ok(NicMemory { arena, rings, at, program_state, ledger })
    }

    /// Where it lies and how it is cut.
    pub fn layout(&self) -> MemoryLayout {
        MemoryLayout { rings_at: self.at, rings_len: self.rings.len(), slots: self.arena.geometry() }
    }

    /// Where frames lie.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Where the rings lie.
    pub fn rings(&self) -> &Region {
        &self.rings
    }

    /// The slots in the descriptors of ring number `ring`, of so many, as the ledger lists them.
    pub(super) fn slot_list(&self, ring: usize, count: usize) -> Span<AtomicU64> {
        Ledger::table(&self.program_state, ring, count)
    }

    /// Where the driver stands.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
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

    /// The parts as which the device of a bus knows it.
    fn parts_of_it(&self) -> ArrayVec<Part<'_>, 3> {
        let part = |(index, (at, len))| match index {
            0 => Part { memory: &self.rings, from: 0, len, at },
            1 => Part { memory: self.arena.region(), from: 0, len, at },
            _ => Part { memory: self.arena.region(), from: self.arena.region().len() - len, len, at },
        };
        self.layout().stretches().into_iter().enumerate().map(part).collect()
    }

    /// Lets the device of `bus` reach it, all of it or nothing.
    pub fn map(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        map_all(bus, &self.parts_of_it())
    }

    /// Lets the device of `bus` reach it, whether a predecessor did so or not.
    pub(super) fn map_anew(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        map_anew(bus, &self.parts_of_it())
    }

    /// The same of the rings and the first slots alone.
    pub(super) fn map_head(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        let parts = self.parts_of_it();
        map_anew(bus, &parts[..2.min(parts.len())])
    }

    /// The same of the other slots, none of which the card has.
    pub(super) fn map_rest(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        let parts = self.parts_of_it();
        map_anew(bus, &parts[2.min(parts.len())..])
    }

    /// Free slots that are not among the first: nobody can have them until they are dropped.
    pub(super) fn hold_rest(&self) -> Vec<Slot> {
        let all: Vec<Slot> = std::iter::from_fn(|| self.arena.take()).collect();
        all.into_iter().filter(|slot| slot.id().index >= HEAD).collect()
    }

    /// The device of `bus` can reach it no longer.
    pub fn unmap(&self, bus: &mut impl Bus) -> Result<(), BusError> {
        self.layout().unmap_by(|at, len| bus.unmap_dma(at, len))
    }

    /// The card was reset: it holds no slot any more.
    pub(super) fn take_back(&self) {
        self.arena.reclaim();
    }

    /// A card that could not be started is kept from this memory, by whatever means still work: nobody is left to be told of those that do not.
    /// Its slots are not taken back: that needs a reset that is known to have worked.
    pub(super) fn withdraw(&self, bus: &mut impl Bus) {
        let _ = pci::enable(bus, false);
        let _ = self.unmap(bus);
    }
}

/// All of them or nothing.
fn map_all(bus: &mut impl Bus, parts: &[Part<'_>]) -> Result<(), BusError> {
    let mapped: ArrayVec<_, 3> = match *parts {
        [a, b, c] => ArrayVec::from(bus.map_each([a, b, c])?),
        [a, b] => bus.map_each([a, b])?.into_iter().collect(),
        _ => parts.iter().map(|part| bus.map_part(*part)).collect(),
    };
    if mapped.iter().any(Result::is_err) {
        // That one could not be mapped is what is to be told.
        for (part, _) in parts.iter().zip(&mapped).filter(|(_, outcome)| outcome.is_ok()) {
            let _ = bus.unmap_dma(part.at, part.len);
        }
    }
    mapped.into_iter().collect()
}

/// The same, whether a predecessor did so or not.
fn map_anew(bus: &mut impl Bus, parts: &[Part<'_>]) -> Result<(), BusError> {
    match map_all(bus, parts) {
        // What lies there may be this memory, as a predecessor mapped it. If it is something else, the second refusal says so.
        Err(BusError::Dma { .. }) => {
            for part in parts {
                let _ = bus.unmap_dma(part.at, part.len);
            }
            map_all(bus, parts)
        }
        other => other,
    }
}
