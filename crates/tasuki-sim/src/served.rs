//! A model, served to a driver in another process: the card, the client's memory that it reaches, and its wire.

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

/// Bytes of descriptors that the card writes back at once, at most.
const DESCRIPTORS_LEN: usize = 32 * 16;

/// Bytes that are read word by word, at most.
const FEW_LEN: usize = 32;

/// Bytes of a configuration space of PCI Express.
const CONFIG_LEN: u64 = 4096;

/// How long the model looks for work in vain before it sleeps, rounds from one look at the clock to the next meanwhile, and how long it sleeps unless the driver
/// says something.
const IDLE_NS: u64 = 60_000;
const IDLE_ROUNDS: u32 = 64;
const NAP: Duration = Duration::from_micros(100);

/// Rounds after which the driver is listened to, and time: a round with many frames is long, and a driver that has asked something waits.
const UNHEARD_MAX: u32 = 8;
const UNHEARD_NS: u64 = 5_000;

/// The same while there is no driver: nothing can happen until one comes.
const LONG_NAP: Duration = Duration::from_millis(50);

/// What the card reaches over its bus: the client's memory, and its eventfds.
#[derive(Debug)]
struct Reach {
    dma: Dma,
    /// One for each MSI-X vector.
    bells: Vec<Option<OwnedFd>>,
    /// What INTA# rings, each time that the card asserts it anew; and whether it is asserted.
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
        // A descriptor or two, which words are quicker for.
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
        // A descriptor says in its last word that the rest of it stands: words, in order. Up to 32 of them are written at once.
        // What is longer is a frame, and its descriptor comes after it.
        let (words, rest) = bytes.as_chunks::<8>();
        let stored = if bytes.len() <= DESCRIPTORS_LEN && rest.is_empty() && at.is_multiple_of(8) {
            (0_u64..).zip(words).try_for_each(|(i, word)| self.dma.store_word(at + 8 * i, u64::from_le_bytes(*word)))
        } else {
            self.dma.store(at, bytes)
        };
        stored.map_err(|_| self.fault(at))
    }

    // Indices that are looked at again and again, also once a driver has gone and took its memory along: that is no fault.
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
            // A driver that comes by vfio-user has none.
            Interrupt::Msi => {}
        }
    }
}

fn ring(bell: &OwnedFd) {
    // Its counter is its maker's, and so is whether a write to a full one waits. It has rung then; a waiter that is gone is not the card's
    // business either.
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
}

impl<W: Wire, M: Model> Served<W, M> {
    /// A card that is plugged into `wire`.
    pub fn new(card: M, wire: W) -> Self {
        Served { card, wire, reach: Reach::new(M::VECTORS), doorbells: None, clock: Clock::default() }
    }

    /// The card.
    pub fn card(&mut self) -> &mut M {
        &mut self.card
    }

    /// What it is plugged into.
    pub fn wire(&mut self) -> &mut W {
        &mut self.wire
    }

    /// What it was plugged into.
    pub fn into_wire(self) -> W {
        self.wire
    }

    /// Whether the card has nothing of a client: no memory, no eventfd, no doorbells.
    pub fn reaches_nothing(&self) -> bool {
        let Reach { dma, bells, intx, .. } = &self.reach;
        dma.is_empty() && bells.iter().all(Option::is_none) && intx.0.is_none() && self.doorbells.is_none()
    }

    /// How often the card was sent to memory that it was not given.
    pub fn faults(&self) -> u64 {
        self.reach.faults
    }

    /// How long the model was kept from running. Time stood still for card and wire meanwhile.
    pub fn stalls(&self) -> Stalls {
        self.clock.stalls()
    }

    /// Has the card do what is to be done now; says whether there was anything.
    pub fn step(&mut self) -> bool {
        self.look();
        let now = self.clock.now();
        self.card.step(&mut self.reach, &mut self.wire, now)
    }

    /// Tells the card of doorbells that were rung.
    #[inline]
    fn look(&mut self) {
        let (Some(doorbells), Some((bar, _))) = (&mut self.doorbells, M::bar(0)) else { return };
        for (offset, value) in doorbells.rung() {
            let now = self.clock.now();
            self.card.write(bar, offset, 4, value, now);
        }
    }

    /// What the card made of a message holds for the doorbells as well.
    fn settle(&mut self) {
        if let Some(doorbells) = &mut self.doorbells {
            doorbells.settle(self.card.tails().map(|(_, value)| value));
        }
    }

    /// Serves drivers and moves frames until `go_on` says otherwise, which is asked in every round.
    pub fn serve(&mut self, server: &mut Server, mut go_on: impl FnMut(&mut Self) -> bool) -> io::Result<()> {
        let mut idle = 0_u32;
        let mut idle_since = 0;
        let mut unheard = 0;
        let mut heard_at = 0;
        while go_on(self) {
            let mut busy = self.step();
            unheard += 1;
            // To ask whether the driver said something is dear, and it seldom does.
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
                // A card takes no CPU from anybody while it has nothing to do.
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
            }
        }
        Ok(())
    }
}

/// Sleeps until a driver says something, at most so long.
fn sleep(server: &Server, at_most: Duration) -> io::Result<()> {
    let nap = Timespec { tv_sec: 0, tv_nsec: at_most.subsec_nanos().into() };
    match rustix::event::poll(&mut [PollFd::from_borrowed_fd(server.as_fd(), PollFlags::IN)], Some(&nap)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Accesses of any length, as the pieces of at most four bytes that a card's bus carries: each aligned to its width.
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

/// What is behind a region that is a BAR, and how many bytes.
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
        // A machine without memory for it has it by messages.
        self.doorbells = Doorbells::new(self.card.tails().map(|(offset, _)| offset)).ok();
        self.settle();
        let doorbells = self.doorbells.as_ref()?;
        Some(vfio_user::Doorbells { memory: doorbells.memory(), places: doorbells.places() })
    }

    fn forget_doorbells(&mut self) {
        // What was rung before it went was said before.
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
            // Asserted already, for whoever was here before: the level is news to who comes.
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
        // Blocking, and the client has filled it.
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
