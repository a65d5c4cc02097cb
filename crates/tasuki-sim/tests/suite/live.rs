//! A card run by a thread of its own, and a driver in another: every frame is accounted for, and no wake-up is lost.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::rig::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tasuki_shm::region::{Pages, Region, Span};
use tasuki_sim::card::{Card, Clock};
use tasuki_sim::e1000e::{Bar, Device, Options};
use tasuki_sim::journal::Class;
use tasuki_sim::wire::{Source, SourceOptions};

const COUNT: u32 = 256;
const FRAMES: u64 = 200_000;

/// A minimal driver that receives by interrupts.
struct Driver {
    card: Card<Source>,
    words: Span<AtomicU64>,
    next: u32,
    expected: u64,
    received: u64,
}

impl Driver {
    fn start() -> (Self, Region) {
        let region = Region::create("live", LEN, Pages::Small).unwrap();
        let options =
            SourceOptions { to: MAC, from: [2; 6], size: 64, rate: Some(300_000), count: FRAMES, honours_pause: false };
        let device = Device::new(Options { mac: MAC, link_up_ns: 1000, nvm_load_ns: 0, ..Options::default() });
        let mut source = Source::new(options);
        source.pause(true);
        let card = Card::new(device, source, Clock::real());
        card.map(AT, &region).unwrap();
        card.write_config(4, 2, 6);
        let driver = Driver { card, words: region.span(0, LEN / 8).unwrap(), next: 0, expected: 0, received: 0 };
        (0..COUNT).for_each(|index| driver.post(index));
        for (offset, value) in [
            (CTRL, SLU),
            (RFCTL, 1 << 15),
            (RDBAL, AT as u32),
            (RDBAH, (AT >> 32) as u32),
            (RDLEN, COUNT * 16),
            (RDH, 0),
            (RDT, COUNT - 1),
            (IVAR, 8),
            (EIAC, RXQ0),
            (RCTL, EN | BAM | SECRC),
        ] {
            driver.write(offset, value);
        }
        (driver, region)
    }

    fn write(&self, offset: u32, value: u32) {
        self.card.write(Bar::Registers, offset, 4, value);
    }

    fn post(&self, index: u32) {
        let index = index as usize;
        self.words[2 * index].store(AT + (RX_BUFFERS[0] + 2048 * index) as u64, Relaxed);
        self.words[2 * index + 1].store(0, Relaxed);
    }

    fn receive(&mut self) {
        let mut burst = 0;
        while self.words[2 * self.next as usize + 1].load(Acquire) & 1 == 1 {
            // Bytes 18 to 26 of the frame are its number.
            let at = (RX_BUFFERS[0] + 2048 * self.next as usize + 16) / 8;
            let [low, high] = [0, 1].map(|word| self.words[at + word].load(Relaxed));
            let number = low >> 16 | high << 48;
            assert!(number >= self.expected, "{number} came behind {}", self.expected);
            self.expected = number + 1;
            self.post(self.next);
            self.next = (self.next + 1) % COUNT;
            self.received += 1;
            burst += 1;
        }
        if burst > 0 {
            self.write(RDT, (self.next + COUNT - 1) % COUNT);
        }
    }
}

/// Waits up to `limit` until the bell rings, and silences it; returns whether it rang.
fn woken_within(bell: &OwnedFd, limit: Duration) -> bool {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    let woken = poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&limit)).unwrap() > 0;
    if woken {
        rustix::io::read(bell, &mut [0; 8]).unwrap();
    }
    woken
}

#[test]
fn every_frame_is_delivered_in_order_or_counted_as_missed() {
    let (mut driver, _region) = Driver::start();
    let card = driver.card.clone();
    let bell = card.interrupts(1).unwrap().pop().unwrap();
    let _running = card.run();
    let start = Instant::now();
    while card.read(Bar::Registers, STATUS, 4) & LU == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "no link");
    }
    card.with(|parts| parts.wire.pause(false));
    let mut missed = 0;
    while driver.received + missed < FRAMES {
        driver.write(IMS, RXQ0);
        // Frames that MPC counts cause no wake-up, so read it from time to time.
        let woken = woken_within(&bell, Duration::from_millis(200));
        let before = driver.received;
        driver.receive();
        if !woken && driver.received > before {
            assert!(woken_within(&bell, Duration::from_secs(20)), "frames came and nobody was woken");
        }
        missed += u64::from(card.read(Bar::Registers, MPC, 4));
        assert!(start.elapsed() < Duration::from_secs(120), "{} received, {missed} missed", driver.received);
    }
    let (counts, unseen) = card.with(|parts| (parts.wire.counts(), parts.device.unseen()));
    assert_eq!((counts.sent, unseen.receive_off, unseen.no_link), (FRAMES, 0, 0));
    assert_eq!(driver.received + missed, FRAMES);
    card.with(|parts| parts.device.journal.demand_none(&Class::ALWAYS)).unwrap();
}
