//! Our model of the 82574L, plugged into a source of numbered frames, for a driver in another thread.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{Filter, Link, Nic, NicMemory, NicOptions};
use tasuki_net::port::{Burst, Port};
use tasuki_sim::e1000e::{Device, Options};
use tasuki_sim::journal::Entry;
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::wire::{Counts, Source, SourceOptions};

use tasuki_testing::{PATIENCE, polled};

pub type Card = E1000e<VfioUser>;

/// The driver's view of the wire.
#[derive(Default)]
pub struct Wire {
    /// Set to let the source begin.
    go: AtomicBool,
    end_pause: AtomicBool,
    sent: AtomicU64,
    back: AtomicU64,
    pauses: AtomicU64,
}

impl Wire {
    /// Lets the source begin.
    pub fn begin(&self) {
        self.go.store(true, Relaxed);
    }

    /// Returns how many frames have come back.
    pub fn back(&self) -> u64 {
        self.back.load(Relaxed)
    }

    /// Waits until `count` frames have come back.
    pub fn await_back(&self, count: u64) {
        polled("the frames to come back", || (self.back.load(Relaxed) >= count).then_some(()));
    }

    /// Waits until `count` frames were sent, or the source was asked to pause.
    pub fn await_end_or_pause(&self, count: u64) {
        polled("the source", || (self.sent.load(Relaxed) >= count || self.pauses.load(Relaxed) > 0).then_some(()));
    }

    /// Ends the pause that the source was asked for last: it is patient, and would wait for ever.
    pub fn end_pause(&self) {
        self.end_pause.store(true, Relaxed);
    }

    fn tell(&self, counts: Counts) {
        self.sent.store(counts.sent, Relaxed);
        self.back.store(counts.received, Relaxed);
        self.pauses.store(counts.pauses, Relaxed);
    }
}

/// Runs `drive` with the card and `count` frames of 64 bytes at `rate` per second. Returns the result of `drive`,
/// the source's counts, and the card's journal since the source began.
pub fn with_card<T: Send>(
    rate: u64,
    count: u64,
    drive: impl FnOnce(OwnedFd, &Wire) -> T + Send,
) -> (T, Counts, Vec<Entry>) {
    with_frames(64, rate, count, drive)
}

/// Like [`with_card`], with frames of `size` bytes.
pub fn with_frames<T: Send>(
    size: u32,
    rate: u64,
    count: u64,
    drive: impl FnOnce(OwnedFd, &Wire) -> T + Send,
) -> (T, Counts, Vec<Entry>) {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let (to, from) = ([0xff; 6], [0x02, 0, 0, 0, 0, 0x51]);
    let mut source = Source::new(SourceOptions { to, from, size, rate: Some(rate), count, honours_pause: true });
    source.pause(true);
    source.be_patient();
    let options = Options { link_up_ns: 1_000_000, ..Options::default() };
    let mut served = Served::new(Device::new(options), source);
    let wire = Wire::default();
    std::thread::scope(|scope| {
        let driver = scope.spawn(|| drive(theirs, &wire));
        let mut server = Server::over(ours).unwrap();
        let mut before = None;
        let well = served.serve(&mut server, |served| {
            if before.is_none() && wire.go.load(Relaxed) {
                before = Some(served.card().journal.entries().len());
                served.wire().pause(false);
            }
            if wire.end_pause.swap(false, Relaxed) {
                served.wire().end_pause();
            }
            wire.tell(served.wire().counts());
            !driver.is_finished()
        });
        well.unwrap();
        let said = driver.join().unwrap();
        let journal = served.card().journal.entries().iter().skip(before.unwrap_or(0)).cloned().collect();
        (said, served.wire().counts(), journal)
    })
}

/// Starts the card, waits for its link, and accepts all frames.
pub fn start(socket: OwnedFd, memory: NicMemory, flow_control: bool) -> Card {
    start_with(socket, memory, NicOptions { flow_control, ..NicOptions::default() })
}

/// Like [`start`], with these options.
pub fn start_with(socket: OwnedFd, memory: NicMemory, options: NicOptions) -> Card {
    let filter = Filter { promiscuous: true, ..Filter::default() };
    let options = NicOptions { filter, ..options };
    let mut nic = Card::start(VfioUser::meet(socket, TIMEOUT).unwrap(), memory, &options).unwrap();
    polled("the link", || (nic.link().unwrap() != Link::Down).then_some(()));
    nic
}

/// Sends frames back until `done` returns true after a look that found none, or `left` frames have come and gone;
/// returns their number.
pub fn echo(nic: &mut Card, left: u64, mut done: impl FnMut(&mut Card) -> bool) -> u64 {
    let began = Instant::now();
    let mut frames = 0;
    while frames < left {
        assert!(began.elapsed() < PATIENCE, "no more frames come");
        let mut burst = Burst::new();
        frames += nic.receive(&mut burst).unwrap() as u64;
        if burst.is_empty() && done(nic) {
            break;
        }
        while !burst.is_empty() {
            nic.transmit(&mut burst).unwrap();
            assert!(began.elapsed() < PATIENCE, "frames do not leave");
        }
    }
    frames
}
