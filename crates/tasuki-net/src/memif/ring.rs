//! One ring in a client's memory, and the regions in which its frames lie. All of it is the client's to write at any time: our place in a ring
//! is ours alone, the client's is a claim, and a descriptor is read once and then checked.
//!
//! # Rules
//!
//! - **F1** How far we are is kept in private memory, and stored for the client to see. It is loaded once, by a successor that [goes on](Ring::go_on):
//!   what a client makes of it then is which of its own frames are lost or come twice, for all else is checked as ever.
//! - **F2** The client's head is at most a ring ahead of us.
//! - **F3** What a descriptor says is looked at once, and used only after its bytes were seen to lie within a region that was added.
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

/// Most descriptors of a frame: 64 KiB in pieces of 1 KiB.
pub const CHAIN_MAX: usize = 64;

/// A client's memory.
#[derive(Debug, Default)]
pub struct Regions(ArrayVec<CommonRegion, REGIONS_MAX>);

/// Bytes that lie within a region (F3).
#[derive(Debug, Clone, Copy)]
pub struct Place {
    region: u16,
    offset: usize,
    /// How many they are.
    pub len: usize,
}

/// The pieces of a frame, in order, and how many bytes they have together.
#[derive(Debug, Default)]
pub struct Chain {
    /// The pieces.
    pub places: ArrayVec<Place, CHAIN_MAX>,
    /// Bytes of all.
    pub len: usize,
}

impl Chain {
    fn clear(&mut self) {
        self.places.clear();
        self.len = 0;
    }

    /// Says no if it has as many pieces as one may have.
    #[inline]
    fn push(&mut self, place: Place) -> bool {
        self.len += place.len;
        self.places.try_push(place).is_ok()
    }
}

impl Regions {
    /// Adds the next one.
    ///
    /// # Panics
    /// If there are [`REGIONS_MAX`] already.
    pub fn push(&mut self, region: CommonRegion) {
        self.0.push(region);
    }

    /// Where the bytes of a descriptor lie (F3).
    #[inline]
    fn place(&self, way: Way, descriptor: Descriptor) -> Result<Place, Refusal> {
        let Descriptor { region, len, offset, .. } = descriptor;
        let Some(memory) = self.0.get(usize::from(region)) else { return Err(Refusal::DescriptorRegion(way, region)) };
        if u64::from(offset) + u64::from(len) > memory.len() as u64 {
            return Err(Refusal::DescriptorOutside(way));
        }
        Ok(Place { region, offset: offset as usize, len: len as usize })
    }

    /// Copies the front of a frame, as much as fits.
    #[inline]
    pub fn copy_to(&self, chain: &Chain, into: &mut [u8]) {
        let mut done = 0;
        for place in &chain.places {
            let len = place.len.min(into.len() - done);
            self.region(*place).copy_to(place.offset, &mut into[done..done + len]).expect("the place was checked");
            done += len;
        }
    }

    /// Has `copy` fill the front of each piece in turn, with so many bytes from where in the frame on.
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

/// One ring of a client's.
#[derive(Debug)]
pub struct Ring {
    place: RingPlace,
    header: Span<AtomicU16>,
    descriptors: Span<AtomicU64>,
    mask: u16,
    /// How far we are (F1).
    at: u16,
    /// How far the client knows us to be.
    shown: u16,
    /// How far the client said it was when it was asked last (F2).
    head: u16,
    /// Since then a frame was read that had several pieces.
    has_chains: bool,
}

impl Ring {
    /// The ring that lies there.
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

    /// Where it lies.
    pub fn place(&self) -> RingPlace {
        self.place
    }

    /// Goes on where a predecessor stopped, wherever in its code that was. Of what its [ledger](super::ledger) says the client is held to what it has
    /// seen; and what it makes of its own words is its own loss (F1).
    pub fn go_on(&mut self, ledger: &mut Ledger) {
        let tail = self.header[TAIL_AT].load(Acquire);
        (self.at, self.shown) = (tail, tail);
        let is_within = |from: u16, to: u16| to.wrapping_sub(from) <= self.mask + 1;
        match self.place.way {
            Way::ToServer => {
                // Those are sent on already, and the client has not heard of it.
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

    /// How many descriptors the client has put there that we have not handled (F2).
    #[inline]
    pub fn look(&mut self) -> Result<u16, Refusal> {
        self.head = self.header[HEAD_AT].load(Acquire);
        let there = self.known();
        if there > self.mask + 1 {
            return Err(Refusal::Overrun(self.place.way));
        }
        Ok(there)
    }

    /// The same as of the last look.
    #[inline]
    pub fn known(&self) -> u16 {
        self.head.wrapping_sub(self.at)
    }

    /// Descriptors of the ring.
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

    /// The next frame: puts the pieces of its chain, each of which was checked (F3, F4), into `chain`. Says no if there is none as of the last
    /// look.
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
        // It goes on where there is nothing.
        if known > 0 { Err(Refusal::Chain(self.place.way)) } else { Ok(false) }
    }

    /// Puts empty buffers for a frame of `len` bytes, of those that are known, into `chain`.
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

    /// Says how much of the buffers at our place was filled: `len` bytes in all. The client sees it after [`show`](Self::show), or sooner.
    #[inline]
    pub fn filled(&mut self, places: &[Place], len: usize, ledger: &mut Ledger) {
        let mut left = len;
        for (i, place) in (0_u16..).zip(places) {
            let index = self.at.wrapping_add(i);
            let part = place.len.min(left);
            left -= part;
            let is_last = usize::from(i) + 1 == places.len();
            // Only the last one can be filled in part.
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

    /// Has the client see what was filled.
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

    /// Goes on behind a frame that was read.
    #[inline]
    pub fn read(&mut self, places: &[Place]) {
        self.has_chains |= places.len() > 1;
        self.done(places.len());
    }

    /// What was read is sent on, wholly: the client has its descriptors back.
    ///
    /// They say no more that they go on: DPDK's client takes that back of no descriptor but the first of a frame's when it uses them again
    /// (`memif_tx` in `rte_eth_memif.c`, 22.11), and its next frames would run together.
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

    /// Writes what the first word of a descriptor says: after the ledger, so that it stands there if this does.
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

    /// Says whether the client is to ring when it puts something there. It is a hint for it, and it has to be looked again afterwards.
    pub fn want_rings(&self, yes: bool) {
        self.header[FLAGS_AT].store(if yes { 0 } else { MASK_INT }, Relaxed);
        if yes {
            fence(std::sync::atomic::Ordering::SeqCst);
        }
    }

    /// Whether the client says that it wants to be rung for, after what was [shown](Self::show).
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
    /// There are.
    Enough,
    /// Too few at present.
    None,
    /// A whole ring of them, or as many as make a chain, is too small.
    TooLong,
}
