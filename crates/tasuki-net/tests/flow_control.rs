//! A driver that is slower than its wire: with flow control nothing is lost, without it is.
#![allow(clippy::tests_outside_test_module, reason = "an integration test")]

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::bus::{Bus, Iova};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{Filter, Link, Nic, NicMemory, NicOptions};
use tasuki_net::port::{Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_sim::e1000e::{Device, Options};
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::wire::{Source, SourceOptions};

/// Several times what ring and packet buffer hold together.
const FRAMES: u64 = 5_000;

/// Bounds whatever is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

fn source() -> Source {
    let mut source = Source::new(SourceOptions {
        to: [0xff; 6],
        from: [0x02, 0, 0, 0, 0, 0x51],
        size: 64,
        rate: Some(SourceOptions::line_rate(1_000_000_000, 64)),
        count: FRAMES,
        honours_pause: true,
    });
    source.pause(true);
    source
}

fn start<B: Bus>(bus: B, flow_control: bool) -> E1000e<B> {
    let options = NicOptions {
        ring: 256,
        flow_control,
        filter: Filter { promiscuous: true, ..Filter::default() },
        ..NicOptions::default()
    };
    let memory = NicMemory::create(Geometry { slot_len: 4096, count: 1024 }, 256 << 10, Iova(1 << 32)).unwrap();
    let mut nic = E1000e::start(bus, memory, &options).unwrap();
    let began = Instant::now();
    while nic.link() == Link::Down {
        assert!(began.elapsed() < PATIENCE, "the link");
        std::thread::yield_now();
    }
    nic
}

/// Receives from a source that is let go once the driver is ready, and does not look at the card before the source has either sent
/// everything or been paused. Says how many frames came, and the driver's statistics.
fn receive(socket: OwnedFd, flow_control: bool, go: &AtomicBool, full: &AtomicBool) -> (u64, Vec<(&'static str, u64)>) {
    let mut nic = start(VfioUser::meet(socket, TIMEOUT).unwrap(), flow_control);
    go.store(true, Ordering::Relaxed);
    let began = Instant::now();
    while !full.load(Ordering::Relaxed) {
        assert!(began.elapsed() < PATIENCE, "the source neither ended nor paused");
        std::thread::yield_now();
    }
    let mut came = 0;
    let mut last = Instant::now();
    while came < FRAMES && last.elapsed() < Duration::from_secs(if flow_control { 30 } else { 1 }) {
        let mut burst = Burst::new();
        let count = nic.receive(&mut burst).unwrap();
        if count > 0 {
            came += count as u64;
            last = Instant::now();
        }
    }
    let statistics = nic.statistics();
    nic.park().unwrap();
    (came, statistics)
}

fn with(flow_control: bool) -> (u64, Vec<(&'static str, u64)>) {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let (go, full) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let driver = scope.spawn(|| receive(theirs, flow_control, &go, &full));
        let options = Options { link_up_ns: 1_000_000, ..Options::default() };
        let mut served = Served::new(Device::new(options), source());
        let mut server = Server::over(ours).unwrap();
        let mut went = false;
        let served_well = served.serve(&mut server, |served| {
            if !went && go.load(Ordering::Relaxed) {
                went = true;
                served.wire().pause(false);
            }
            let source = served.wire();
            if source.is_done() || source.counts().pauses > 0 {
                full.store(true, Ordering::Relaxed);
            }
            !driver.is_finished()
        });
        served_well.unwrap();
        driver.join().unwrap()
    })
}

fn of(statistics: &[(&'static str, u64)], name: &str) -> u64 {
    statistics.iter().find(|(its, _)| *its == name).unwrap().1
}

#[test]
fn a_partner_that_is_asked_to_pause_loses_nothing() {
    let (came, statistics) = with(true);
    assert_eq!((came, of(&statistics, "rx_missed_errors")), (FRAMES, 0));
    let (xoff, xon) = (of(&statistics, "tx_flow_control_xoff"), of(&statistics, "tx_flow_control_xon"));
    assert!(xoff > 0 && xon > 0, "it was told to pause {xoff} times, and {xon} times to go on");
}

#[test]
fn without_flow_control_the_rest_is_lost_and_counted() {
    let (came, statistics) = with(false);
    assert!(came < FRAMES, "ring and buffer hold less");
    assert_eq!(came + of(&statistics, "rx_missed_errors"), FRAMES);
    assert_eq!(of(&statistics, "tx_flow_control_xoff"), 0);
}
