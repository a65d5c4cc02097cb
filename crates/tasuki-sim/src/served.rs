//! A model served to a driver in another process: the card, its wire, and the client's memory that the card reaches.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::clock::{Clock, Stalls};
use crate::doorbells::Doorbells;
use crate::e1000e;
use crate::model::{Host, Interrupt, Model, Unmapped};
use crate::vfio_user::{self, CONFIG, Dma, DmaMemory, INTX, MSIX, Region, Server, Turn};
use crate::wire::Wire;

/// Most bytes of descriptors that the card writes back at once.
const DESCRIPTORS_LEN: usize = 32 * 16;

/// Most bytes that are read word by word.
const FEW_LEN: usize = 32;

/// Bytes of a PCI Express configuration space.
const CONFIG_LEN: u64 = 4096;

/// Idle behaviour: nanoseconds without work before the model sleeps, rounds between two looks at the clock
/// meanwhile, and the length of one sleep unless a message from the driver ends it.
const IDLE_NS: u64 = 60_000;
const IDLE_ROUNDS: u32 = 64;
const NAP: Duration = Duration::from_micros(100);

/// The server looks for a driver's message after this many rounds, or after this time: a round with many frames is
/// long, and the driver may be waiting for a reply.
const UNHEARD_MAX: u32 = 8;
const UNHEARD_NS: u64 = 5_000;

/// Length of one sleep without a driver: nothing can happen until one connects.
const LONG_NAP: Duration = Duration::from_millis(50);

/// The client's memory and eventfds, as the card reaches them over its bus.
#[derive(Debug)]
struct Reach {
    dma: Dma,
    /// One per MSI-X vector.
    bells: Vec<Option<OwnedFd>>,
    /// The eventfd that is rung each time the card asserts INTA# anew; and whether INTA# is asserted.
    intx: (Option<OwnedFd>, bool),
    faults: u64,
}

impl Reach {
    fn new(vectors: u16) -> Self {
        let bells = (0..vectors).map(|_| None).collect();
        Reach { dma: Dma::default(), bells, intx: (None, false), faults: 0 }
    }

    fn fault(&mut self, at: u64) -> Unmapped {
        self.faults += 1;
        Unmapped { at }
    }
}

impl Host for Reach {
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        // A descriptor or two: word accesses are quicker than a copy.
        let read = if into.len() <= FEW_LEN && into.len().is_multiple_of(8) && at.is_multiple_of(8) {
            let words = into.as_chunks_mut::<8>().0;
            (0_u64..)
                .zip(words)
                .try_for_each(|(i, word)| self.dma.load_word(at + 8 * i).map(|found| *word = found.to_le_bytes()))
        } else {
            self.dma.load(at, into)
        };
        read.map_err(|_| self.fault(at))
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Unmapped> {
        // The last word of a descriptor tells the driver that the rest of it is written, so descriptors are written
        // as words, in order. At most 32 are written at once. Longer writes are frames, and the descriptor of a
        // frame is written after it.
        let (words, rest) = bytes.as_chunks::<8>();
        let stored = if bytes.len() <= DESCRIPTORS_LEN && rest.is_empty() && at.is_multiple_of(8) {
            (0_u64..).zip(words).try_for_each(|(i, word)| self.dma.store_word(at + 8 * i, u64::from_le_bytes(*word)))
        } else {
            self.dma.store(at, bytes)
        };
        stored.map_err(|_| self.fault(at))
    }

    // The model polls these indices, even after a driver has left and its memory is gone: that is not counted as a
    // fault.
    fn read16(&mut self, at: u64) -> Result<u16, Unmapped> {
        self.dma.load_half(at).map_err(|_| Unmapped { at })
    }

    fn write16(&mut self, at: u64, value: u16) -> Result<(), Unmapped> {
        self.dma.store_half(at, value).map_err(|_| Unmapped { at })
    }

    fn interrupt(&mut self, interrupt: Interrupt) {
        match interrupt {
            Interrupt::MsiX(vector) => self.bells.get(usize::from(vector)).into_iter().flatten().for_each(ring),
            Interrupt::IntX(level) => {
                let before = std::mem::replace(&mut self.intx.1, level);
                self.intx.0.iter().filter(|_| level && !before).for_each(ring);
            }
            // A driver on vfio-user has no MSI.
            Interrupt::Msi => {}
        }
    }
}

fn ring(bell: &OwnedFd) {
    // The client made the eventfd and may have made it blocking, so write only if it has room. A full counter has
    // rung already; if its reader is gone, that is not the card's concern.
    let mut room = [PollFd::new(bell, PollFlags::OUT)];
    if rustix::event::poll(&mut room, Some(&Timespec::default())) == Ok(1) && room[0].revents().contains(PollFlags::OUT)
    {
        let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
    }
}

/// A card with its wire, as a vfio-user device.
#[derive(Debug)]
pub struct Served<W, M = e1000e::Device> {
    card: M,
    wire: W,
    reach: Reach,
    doorbells: Option<Doorbells>,
    clock: Clock,
    naps: u64,
}

impl<W: Wire, M: Model> Served<W, M> {
    /// Makes a device of a card that is plugged into `wire`.
    pub fn new(card: M, wire: W) -> Self {
        Served { card, wire, reach: Reach::new(M::VECTORS), doorbells: None, clock: Clock::default(), naps: 0 }
    }

    pub fn card(&mut self) -> &mut M {
        &mut self.card
    }

    pub fn wire(&mut self) -> &mut W {
        &mut self.wire
    }

    pub fn into_wire(self) -> W {
        self.wire
    }

    /// Returns whether the card holds nothing of a client: no memory, no eventfd, no doorbells.
    pub fn reaches_nothing(&self) -> bool {
        let Reach { dma, bells, intx, .. } = &self.reach;
        dma.is_empty() && bells.iter().all(Option::is_none) && intx.0.is_none() && self.doorbells.is_none()
    }

    /// Returns how often the driver gave the card an address outside its mapped memory.
    pub fn faults(&self) -> u64 {
        self.reach.faults
    }

    /// Returns how often and how long the machine kept the model from running. Time stood still for card and wire
    /// meanwhile.
    pub fn stalls(&self) -> Stalls {
        self.clock.stalls()
    }

    /// Returns the time by the clock of card and wire, in nanoseconds.
    pub fn now(&mut self) -> u64 {
        self.clock.now()
    }

    /// Returns how often the model slept. Before each sleep it tells its driver how far it has looked: it writes to
    /// the driver's memory.
    pub fn naps(&self) -> u64 {
        self.naps
    }

    /// Does the card's work that is due now; returns whether there was any.
    pub fn step(&mut self) -> bool {
        self.look();
        let now = self.clock.now();
        self.card.step(&mut self.reach, &mut self.wire, now)
    }

    /// Passes the doorbells that were rung to the card.
    #[inline]
    fn look(&mut self) {
        let (Some(doorbells), Some((bar, _))) = (&mut self.doorbells, M::bar(0)) else { return };
        for (offset, value) in doorbells.rung() {
            let now = self.clock.now();
            self.card.write(bar, offset, 4, value, now);
        }
    }

    /// Writes the card's present tail values to the doorbells: a message may have changed them.
    fn settle(&mut self) {
        if let Some(doorbells) = &mut self.doorbells {
            doorbells.settle(self.card.tails().map(|(_, value)| value));
        }
    }

    /// Serves drivers and moves frames until `go_on`, called in every round, returns false.
    pub fn serve(&mut self, server: &mut Server, mut go_on: impl FnMut(&mut Self) -> bool) -> io::Result<()> {
        let mut idle = 0_u32;
        let mut idle_since = 0;
        let mut unheard = 0;
        let mut heard_at = 0;
        while go_on(self) {
            let mut busy = self.step();
            unheard += 1;
            // A look for messages is expensive, and drivers seldom send any.
            let now = if busy { self.clock.now() } else { heard_at };
            if unheard >= UNHEARD_MAX || now >= heard_at + UNHEARD_NS {
                (unheard, heard_at) = (0, now);
                match server.turn(self)? {
                    Turn::Over => return Ok(()),
                    Turn::Idle => {}
                    Turn::Busy | Turn::Gone(_) => busy = true,
                }
            }
            idle = if busy { 0 } else { idle + 1 };
            if idle == 1 {
                idle_since = self.clock.now();
            }
            if idle == 0 || !idle.is_multiple_of(IDLE_ROUNDS) {
                continue;
            }
            if self.clock.now() < idle_since + IDLE_NS {
                // An idle card leaves the CPU to others.
                self.clock.sleeps();
                std::thread::yield_now();
            } else {
                idle = 0;
                if self.card.doze(&mut self.reach) {
                    continue;
                }
                let nap = if server.has_client() { NAP } else { LONG_NAP };
                self.clock.sleeps();
                sleep(server, nap)?;
                self.naps += 1;
            }
        }
        Ok(())
    }
}

/// Sleeps until a driver sends a message, for `at_most` at most.
fn sleep(server: &Server, at_most: Duration) -> io::Result<()> {
    let nap = Timespec { tv_sec: 0, tv_nsec: at_most.subsec_nanos().into() };
    match rustix::event::poll(&mut [PollFd::from_borrowed_fd(server.as_fd(), PollFlags::IN)], Some(&nap)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Cuts an access of any length into the pieces that a card's bus carries: at most four bytes each, aligned to their
/// width. Yields offset, width and the position in the access.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u32, u8, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let width = [4, 2, 1].into_iter().find(|&width| len - done >= width && at.is_multiple_of(width as u64))?;
        let piece = (u32::try_from(at).ok()?, u8::try_from(width).ok()?, done);
        done += width;
        Some(piece)
    })
}

/// Returns the kind and length in bytes of the BAR that is vfio-user region `region`.
fn bar<M: Model>(region: u32) -> Option<(M::Bar, u32)> {
    u8::try_from(region).ok().and_then(M::bar)
}

impl<W: Wire, M: Model> vfio_user::Device for Served<W, M> {
    fn region(&self, index: u32) -> Region<'_> {
        let len = match index {
            CONFIG => CONFIG_LEN,
            _ => bar::<M>(index).map_or(0, |(_, len)| len.into()),
        };
        Region { len, ..Region::default() }
    }

    fn vectors(&self, index: u32) -> u32 {
        match index {
            INTX => 1,
            MSIX => M::VECTORS.into(),
            _ => 0,
        }
    }

    fn doorbells(&mut self, index: u32) -> Option<vfio_user::Doorbells<'_>> {
        if index != 0 || self.card.tails().next().is_none() {
            return None;
        }
        self.look();
        // Without memory for doorbells, the driver writes the registers by messages.
        self.doorbells = Doorbells::new(self.card.tails().map(|(offset, _)| offset)).ok();
        self.settle();
        let doorbells = self.doorbells.as_ref()?;
        Some(vfio_user::Doorbells { memory: doorbells.memory(), places: doorbells.places() })
    }

    fn forget_doorbells(&mut self) {
        // Doorbells rung before the driver left are writes that came before its departure.
        self.look();
        self.doorbells = None;
    }

    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) {
        self.look();
        let now = self.clock.now();
        for (at, width, place) in pieces(offset, into.len()) {
            let value = match bar::<M>(region) {
                _ if region == CONFIG => self.card.read_config(at, width, now),
                Some((bar, _)) => self.card.read(bar, at, width, now),
                None => u32::MAX,
            };
            let width = usize::from(width);
            into[place..place + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }

    fn write(&mut self, region: u32, offset: u64, bytes: &[u8]) {
        self.look();
        let now = self.clock.now();
        for (at, width, place) in pieces(offset, bytes.len()) {
            let mut value = [0; 4];
            value[..width.into()].copy_from_slice(&bytes[place..place + usize::from(width)]);
            let value = u32::from_le_bytes(value);
            match bar::<M>(region) {
                _ if region == CONFIG => self.card.write_config(at, width, value, now),
                Some((bar, _)) => self.card.write(bar, at, width, value, now),
                None => {}
            }
        }
        self.settle();
    }

    fn dma_map(&mut self, at: u64, memory: DmaMemory) {
        self.reach.dma.map(at, memory);
    }

    fn dma_unmap(&mut self, at: u64) {
        self.reach.dma.unmap(at);
    }

    fn set_irq(&mut self, index: u32, vector: u32, eventfd: Option<OwnedFd>) {
        if index == INTX {
            // INTA# may be asserted since an earlier driver: ring, for the new driver has not seen the level.
            eventfd.iter().filter(|_| self.reach.intx.1).for_each(ring);
            self.reach.intx.0 = eventfd;
        } else if index == MSIX
            && let Some(place) = usize::try_from(vector).ok().and_then(|vector| self.reach.bells.get_mut(vector))
        {
            *place = eventfd;
        }
    }

    fn reset(&mut self) {
        let now = self.clock.now();
        self.card.reset(now);
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_that_is_full_is_not_waited_for() {
        // The eventfd is blocking, and the client has filled it.
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let read = || {
            let mut count = [0; 8];
            rustix::io::read(&bell, &mut count).unwrap();
            u64::from_ne_bytes(count)
        };
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ring(&bell);
        assert_eq!(read(), u64::MAX - 1);
        ring(&bell);
        assert_eq!(read(), 1);
    }

    #[test]
    fn an_access_is_cut_into_what_a_bus_carries() {
        let cut = |offset, len| pieces(offset, len).collect::<Vec<_>>();
        assert_eq!(cut(0, 4), [(0, 4, 0)]);
        assert_eq!(cut(8, 8), [(8, 4, 0), (12, 4, 4)]);
        assert_eq!(cut(1, 7), [(1, 1, 0), (2, 2, 1), (4, 4, 3)]);
        assert_eq!(cut(0, 0), []);
    }
}
