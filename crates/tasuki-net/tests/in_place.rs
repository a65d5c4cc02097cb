//! A card that goes on running while its driver is replaced: by turns, under traffic, by a driver with a bus and a memory of its own.
#![allow(clippy::tests_outside_test_module, reason = "an integration test")]

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::e1000e::{E1000e, Sash};
use tasuki_net::nic::{Filter, InPlace, Link, Nic, NicError, NicMemory, NicOptions, Sash as _};
use tasuki_net::port::{Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_sim::e1000e::{Device, Options};
use tasuki_sim::journal::Class;
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::wire::{Counts, Source, SourceOptions};

type Card = E1000e<VfioUser>;

const FRAMES: u64 = 200_000;
const PATIENCE: Duration = Duration::from_secs(60);

fn source() -> Source {
    let mut source = Source::new(SourceOptions {
        to: [0xff; 6],
        from: [0x02, 0, 0, 0, 0, 0x51],
        size: 64,
        rate: Some(1_000_000),
        count: FRAMES,
        honours_pause: true,
    });
    source.pause(true);
    source
}

/// Has `drive` drive a card that is plugged into a source, which is let go by the flag. Says what became of the frames, and that the driver did
/// nothing that a warm successor must not do once frames had begun to come.
fn with_card(drive: impl FnOnce(OwnedFd, &AtomicBool) + Send) -> Counts {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let go = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let driver = scope.spawn(|| drive(theirs, &go));
        let options = Options { link_up_ns: 1_000_000, ..Options::default() };
        let mut served = Served::new(Device::new(options), source());
        let mut server = Server::over(ours).unwrap();
        let (mut went, mut before) = (false, 0);
        let well = served.serve(&mut server, |served| {
            if !went && go.load(Ordering::Relaxed) {
                went = true;
                before = served.card().journal.entries().len();
                served.wire().pause(false);
            }
            !driver.is_finished()
        });
        well.unwrap();
        driver.join().unwrap();
        let offences = served.card().journal.entries().iter().skip(before);
        let cold: Vec<_> = offences.filter(|entry| Class::COLD.contains(&entry.class)).collect();
        assert!(cold.is_empty(), "{cold:?}");
        served.into_wire().counts()
    })
}

fn start(socket: OwnedFd) -> (Card, NicMemory) {
    let memory = NicMemory::create(Geometry { slot_len: 4096, count: 1024 }, 256 << 10, Iova(1 << 32)).unwrap();
    let other = NicMemory::prepare(memory.parts().unwrap(), &memory.layout()).unwrap();
    let options = NicOptions { filter: Filter { promiscuous: true, ..Filter::default() }, ..NicOptions::default() };
    let mut nic = Card::start(VfioUser::meet(socket, TIMEOUT).unwrap(), memory, &options).unwrap();
    let began = Instant::now();
    while nic.link() == Link::Down {
        assert!(began.elapsed() < PATIENCE, "the link");
        std::thread::yield_now();
    }
    (nic, other)
}

/// Sends back what comes, until `turns` bursts or `left` frames have come and gone; says how many frames that were.
fn echo(nic: &mut Card, turns: u32, left: u64) -> u64 {
    let began = Instant::now();
    let (mut frames, mut moved) = (0, 0);
    while moved < turns && frames < left {
        assert!(began.elapsed() < PATIENCE, "no more frames come");
        let mut burst = Burst::new();
        frames += nic.receive(&mut burst).unwrap() as u64;
        moved += u32::from(!burst.is_empty());
        while !burst.is_empty() {
            nic.transmit(&mut burst).unwrap();
        }
    }
    frames
}

#[test]
fn drivers_that_take_turns_lose_nothing_and_touch_nothing() {
    let counts = with_card(|socket, go| {
        let (mut nic, memory) = start(socket);
        // The twin, once the card's BAR is known.
        let mut next = Card::prepare(VfioUser::from_twin(nic.bus().twin().unwrap(), TIMEOUT).unwrap(), memory).unwrap();
        let mut sash = Sash::blank();
        go.store(true, Ordering::Relaxed);
        let (mut frames, mut turns) = (0, 0);
        while frames < FRAMES {
            frames += echo(&mut nic, 50, FRAMES - frames);
            nic.sash(&mut sash);
            let successor = Card::go_on(next, &sash).unwrap();
            let (bus, memory) = std::mem::replace(&mut nic, successor).stand_down();
            next = Card::prepare(bus, memory).unwrap();
            turns += 1;
        }
        assert!(turns > 10, "{turns}");
        // What was sent last is on its way.
        std::thread::sleep(Duration::from_millis(50));
        nic.park().unwrap();
    });
    assert_eq!((counts.received, counts.duplicated, counts.reordered, counts.damaged), (FRAMES, 0, 0, 0));
}

#[test]
fn a_giver_whose_taker_refuses_goes_on() {
    let counts = with_card(|socket, go| {
        let (mut nic, memory) = start(socket);
        let mut next = Card::prepare(VfioUser::from_twin(nic.bus().twin().unwrap(), TIMEOUT).unwrap(), memory).unwrap();
        go.store(true, Ordering::Relaxed);
        let mut sash = Sash::blank();
        let spoilers: [fn(&mut Sash); 4] = [
            |sash| sash.head.version += 1,
            |sash| sash.receive[0].tail += 1,
            |sash| sash.posted[0][0] = sash.posted[0][1],
            |sash| sash.head.slots += 1,
        ];
        let mut frames = 0;
        for spoil in spoilers.into_iter().cycle() {
            frames += echo(&mut nic, 20, FRAMES - frames);
            if frames >= FRAMES {
                break;
            }
            nic.sash(&mut sash);
            spoil(&mut sash);
            let failed = Card::go_on(next, &sash).expect_err("a sash that cannot be true");
            assert!(matches!(failed.error, NicError::BrokenSash { .. } | NicError::OtherSash { .. }), "{failed}");
            let census = failed.memory.arena().census();
            assert_eq!((census.owner, census.peer), (0, 0), "nothing was taken over");
            next = Card::prepare(failed.bus, failed.memory).unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
        nic.park().unwrap();
    });
    assert_eq!((counts.received, counts.duplicated, counts.reordered, counts.damaged), (FRAMES, 0, 0, 0));
}
