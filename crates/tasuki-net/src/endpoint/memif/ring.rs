//! One ring in a client's memory, and the regions in which its frames lie. The client can write all of it at any time.
//! Our place in a ring is private, the client's place is a claim, and a descriptor is read once and then checked.
//!
//! # Rules
//!
//! - **F1** Our place is kept in private memory, and stored for the client to see. Only a successor that [goes
//!   on](Ring::go_on) loads it, once. A client that falsifies it then decides which of its own frames are lost or come
//!   twice; everything else is checked as always.
//! - **F2** The client's head is at most a ring ahead of us.
//! - **F3** A descriptor is read once, and used only after a check that its bytes lie within a region that was added.
//! - **F4** A chain of descriptors ends before the head, and has at most [`CHAIN_MAX`].

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU16, AtomicU64, fence};

use arrayvec::ArrayVec;
use tasuki_shm::region::{CommonRegion, RegionError, Span};

use crate::vni::ledger::point;

use super::control::{REGIONS_MAX, RingPlace};
use super::ledger::Ledger;
use super::refusal::{Refusal, Way};
use super::wire::{COOKIE, Descriptor, FLAGS_AT, HEAD_AT, MASK_INT, NEXT, RING_HEADER_LEN, TAIL_AT};

/// Maximum number of descriptors of a frame: 64 KiB in pieces of 1 KiB.
pub const CHAIN_MAX: usize = 64;

/// All memory of a client.
#[derive(Debug, Default)]
pub struct Regions(ArrayVec<CommonRegion, REGIONS_MAX>);

/// Bytes that lie within a region (F3).
#[derive(Debug, Clone, Copy)]
pub struct Place {
    region: u16,
    offset: usize,
    /// Number of bytes.
    pub len: usize,
}

/// The pieces of a frame, in order, and their total length.
#[derive(Debug, Default)]
pub struct Chain {
    /// Pieces of the frame.
    pub places: ArrayVec<Place, CHAIN_MAX>,
    /// Total length in bytes.
    pub len: usize,
}

impl Chain {
    fn clear(&mut self) {
        self.places.clear();
        self.len = 0;
    }

    /// Returns false if the chain was full.
    #[inline]
    fn push(&mut self, place: Place) -> bool {
        self.len += place.len;
        self.places.try_push(place).is_ok()
    }
}

impl Regions {
    /// Adds the next region.
    ///
    /// # Panics
    /// If there are [`REGIONS_MAX`] already.
    pub fn push(&mut self, region: CommonRegion) {
        self.0.push(region);
    }

    /// Returns the place of a descriptor's bytes (F3).
    #[inline]
    fn place(&self, way: Way, descriptor: Descriptor) -> Result<Place, Refusal> {
        let Descriptor { region, len, offset, .. } = descriptor;
        let Some(memory) = self.0.get(usize::from(region)) else { return Err(Refusal::DescriptorRegion(way, region)) };
        if u64::from(offset) + u64::from(len) > memory.len() as u64 {
            return Err(Refusal::DescriptorOutside(way));
        }
        Ok(Place { region, offset: offset as usize, len: len as usize })
    }

    /// Copies as much of the front of a frame as fits.
    #[inline]
    pub fn copy_to(&self, chain: &Chain, into: &mut [u8]) {
        let mut done = 0;
        for place in &chain.places {
            let len = place.len.min(into.len() - done);
            self.region(*place).copy_to(place.offset, &mut into[done..done + len]).expect("the place was checked");
            done += len;
        }
    }

    /// Has `copy` fill the front of each piece in turn. Its arguments: offset in the frame, number of bytes, region,
    /// and offset in the region.
    #[inline]
    pub fn fill(
        &self,
        places: &[Place],
        len: usize,
        mut copy: impl FnMut(usize, usize, &CommonRegion, usize) -> Result<(), RegionError>,
    ) {
        let mut done = 0;
        for place in places {
            let part = place.len.min(len - done);
            copy(done, part, self.region(*place), place.offset).expect("the place was checked");
            done += part;
        }
    }

    #[inline]
    fn region(&self, place: Place) -> &CommonRegion {
        &self.0[usize::from(place.region)]
    }
}

/// One ring of a client.
#[derive(Debug)]
pub struct Ring {
    place: RingPlace,
    header: Span<AtomicU16>,
    descriptors: Span<AtomicU64>,
    mask: u16,
    /// Our place (F1).
    at: u16,
    /// Our place as the client sees it.
    shown: u16,
    /// The client's place at the last look (F2).
    head: u16,
    /// A frame of several pieces was read since `shown` was last stored.
    has_chains: bool,
}

impl Ring {
    /// Opens the ring at `place`.
    pub fn new(regions: &Regions, place: RingPlace) -> Result<Self, Refusal> {
        let RingPlace { way, region, offset, log2_size } = place;
        let outside = |_| Refusal::RingOutside(way);
        let memory = regions.0.get(usize::from(region)).ok_or(Refusal::RingRegion(way, region))?;
        let header: Span<AtomicU16> = memory.span(offset as usize, RING_HEADER_LEN / 2).map_err(outside)?;
        let descriptors = memory.span(offset as usize + RING_HEADER_LEN, 2 << log2_size).map_err(outside)?;
        let cookie = u32::from(header[1].load(Relaxed)) << 16 | u32::from(header[0].load(Relaxed));
        if cookie != COOKIE {
            return Err(Refusal::RingCookie(way));
        }
        let mask = u16::try_from((1_u32 << log2_size) - 1).expect("2^14 at most");
        Ok(Ring { place, header, descriptors, mask, at: 0, shown: 0, head: 0, has_chains: false })
    }

    /// Returns the place of the ring.
    pub fn place(&self) -> RingPlace {
        self.place
    }

    /// Continues where a predecessor stopped, wherever in its code that was. Uses its [ledger](super::ledger) only
    /// where that agrees with what the client has seen. A client that changes its own words loses only its own frames
    /// (F1).
    pub fn go_on(&mut self, ledger: &mut Ledger) {
        let tail = self.header[TAIL_AT].load(Acquire);
        (self.at, self.shown) = (tail, tail);
        let is_within = |from: u16, to: u16| to.wrapping_sub(from) <= self.mask + 1;
        match self.place.way {
            Way::ToServer => {
                // These frames are already sent on, and the client has not seen that.
                if let Some((_, to)) = ledger.was_read().filter(|(from, to)| *from == tail && is_within(*from, *to)) {
                    (self.at, self.has_chains) = (to, true);
                    self.let_go(ledger);
                }
            }
            Way::ToClient => {
                for (index, len) in ledger.held().filter(|(index, _)| index.wrapping_sub(tail) <= self.mask) {
                    let place = self.descriptor(index);
                    self.write(index, Descriptor { flags: 0, len, ..place });
                }
                ledger.shown();
            }
        }
    }

    /// Returns the number of descriptors that the client has put there and we have not handled (F2).
    #[inline]
    pub fn look(&mut self) -> Result<u16, Refusal> {
        self.head = self.header[HEAD_AT].load(Acquire);
        let there = self.known();
        if there > self.mask + 1 {
            return Err(Refusal::Overrun(self.place.way));
        }
        Ok(there)
    }

    /// Like [`look`](Self::look), as of the last look.
    #[inline]
    pub fn known(&self) -> u16 {
        self.head.wrapping_sub(self.at)
    }

    /// Returns the number of descriptors of the ring.
    pub fn size(&self) -> usize {
        usize::from(self.mask) + 1
    }

    #[inline]
    fn words(&self, index: u16) -> &[AtomicU64] {
        let first = usize::from(index & self.mask) * 2;
        &self.descriptors[first..first + 2]
    }

    #[inline]
    fn descriptor(&self, index: u16) -> Descriptor {
        let words = self.words(index);
        Descriptor::of(words[0].load(Relaxed), words[1].load(Relaxed))
    }

    /// Reads the next frame: puts the checked pieces of its chain (F3, F4) into `chain`. Returns false if there was
    /// none at the last look.
    #[inline]
    pub fn next(&self, regions: &Regions, chain: &mut Chain) -> Result<bool, Refusal> {
        chain.clear();
        let known = self.known();
        for i in 0..known {
            let descriptor = self.descriptor(self.at.wrapping_add(i));
            if !chain.push(regions.place(self.place.way, descriptor)?) {
                return Err(Refusal::Chain(self.place.way));
            }
            if descriptor.flags & NEXT == 0 {
                return Ok(true);
            }
        }
        // The chain continues past the head.
        if known > 0 { Err(Refusal::Chain(self.place.way)) } else { Ok(false) }
    }

    /// Puts empty buffers for a frame of `len` bytes into `chain`, from those known at the last look.
    #[inline]
    pub fn room(&self, regions: &Regions, len: usize, chain: &mut Chain) -> Result<Room, Refusal> {
        chain.clear();
        for i in 0..self.known() {
            if !chain.push(regions.place(self.place.way, self.descriptor(self.at.wrapping_add(i)))?) {
                return Ok(Room::TooLong);
            }
            if chain.len >= len {
                return Ok(Room::Enough);
            }
        }
        Ok(if usize::from(self.known()) == self.size() { Room::TooLong } else { Room::None })
    }

    /// Marks the buffers at our place as filled, with `len` bytes in all. The client sees them after
    /// [`show`](Self::show), or sooner.
    #[inline]
    pub fn filled(&mut self, places: &[Place], len: usize, ledger: &mut Ledger) {
        let mut left = len;
        for (i, place) in (0_u16..).zip(places) {
            let index = self.at.wrapping_add(i);
            let part = place.len.min(left);
            left -= part;
            let is_last = usize::from(i) + 1 == places.len();
            // Only the last buffer can be partly filled.
            if part < place.len && !ledger.hold(index, bytes(place.len)) {
                self.show_up_to(self.at, ledger);
                let _ = ledger.hold(index, bytes(place.len));
            }
            point("memif.held");
            let flags = if is_last { 0 } else { NEXT };
            self.write(index, Descriptor { flags, region: place.region, len: bytes(part), offset: 0 });
        }
        self.done(places.len());
    }

    /// Lets the client see the filled buffers.
    #[inline]
    pub fn show(&mut self, ledger: &mut Ledger) {
        if self.shown != self.at {
            self.show_up_to(self.at, ledger);
        }
    }

    fn show_up_to(&mut self, index: u16, ledger: &mut Ledger) {
        point("memif.filled");
        self.publish(index);
        ledger.shown();
    }

    /// Moves past a frame that was read.
    #[inline]
    pub fn read(&mut self, places: &[Place]) {
        self.has_chains |= places.len() > 1;
        self.done(places.len());
    }

    /// Gives the client its descriptors back. Call it once all frames that were read are sent on.
    ///
    /// Clears [`NEXT`] in the descriptors. When DPDK's client uses them again, it clears the flag only in the first
    /// descriptor of a frame (`memif_tx` in `rte_eth_memif.c`, 22.11), so that its next frames would run together.
    #[inline]
    pub fn let_go(&mut self, ledger: &Ledger) {
        if self.shown == self.at {
            return;
        }
        point("memif.sent");
        ledger.read(self.shown, self.at);
        if std::mem::take(&mut self.has_chains) {
            let mut index = self.shown;
            while index != self.at {
                point("memif.read");
                let said = self.descriptor(index);
                self.write(index, Descriptor { flags: said.flags & !NEXT, ..said });
                index = index.wrapping_add(1);
            }
        }
        point("memif.noted");
        self.publish(self.at);
    }

    /// Writes the first word of a descriptor, after the ledger: if this store is visible, so is the ledger's.
    #[inline]
    fn write(&self, index: u16, descriptor: Descriptor) {
        self.words(index)[0].store(descriptor.first_word(), Release);
    }

    #[inline]
    fn done(&mut self, descriptors: usize) {
        self.at = self.at.wrapping_add(u16::try_from(descriptors).expect("a chain at most"));
    }

    #[inline]
    fn publish(&mut self, index: u16) {
        self.shown = index;
        self.header[TAIL_AT].store(index, Release);
        point("memif.shown");
    }

    /// Tells the client whether to ring when it adds descriptors. This is a hint: look once more afterwards.
    pub fn want_rings(&self, yes: bool) {
        self.header[FLAGS_AT].store(if yes { 0 } else { MASK_INT }, Relaxed);
        if yes {
            fence(std::sync::atomic::Ordering::SeqCst);
        }
    }

    /// Returns whether the client wants to be rung, after the last [`show`](Self::show).
    #[inline]
    pub fn wants_rings(&self) -> bool {
        fence(std::sync::atomic::Ordering::SeqCst);
        self.header[FLAGS_AT].load(Relaxed) & MASK_INT == 0
    }
}

fn bytes(len: usize) -> u32 {
    u32::try_from(len).expect("no longer than its place")
}

/// Whether there are buffers for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// There are enough.
    Enough,
    /// There are too few at present.
    None,
    /// A whole ring of buffers, or as many as make a chain, is too small.
    TooLong,
}
