//! Our own models of cards as worlds: strict where QEMU's forgive, and served by vfio-user.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{How, InPlace, Mac, Nic, NicMemory, Repoint};
use tasuki_sim::e1000e;
use tasuki_sim::journal::Class;
use tasuki_sim::model::Model;
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::wire::Wire;
use tempfile::TempDir;

use super::in_place::Twinned;
use super::repoint::Repointed;
use super::{Sender, World};

/// Most frames on their way to the card: a sender must not outrun a receiver that verifies each.
const ON_THEIR_WAY: usize = 64;

/// Time from a reset to the link, in ns: long enough to test the wait, short enough for a suite.
const LINK_UP_NS: u64 = 20_000_000;

/// Frames on their way in one direction.
#[derive(Debug, Default)]
struct Lane {
    frames: Mutex<VecDeque<Vec<u8>>>,
    changed: Condvar,
}

impl Lane {
    fn try_put(&self, frame: &[u8], most: usize) -> bool {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let room = frames.len() < most;
        if room {
            frames.push_back(frame.to_vec());
            self.changed.notify_all();
        }
        room
    }

    fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        let until = Instant::now() + limit;
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(frame) = frames.pop_front() {
                self.changed.notify_all();
                return Some(frame);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            frames = self.changed.wait_timeout(frames, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Bytes for the card between two looks at its buffer of 20 KB.
const AT_ONCE: usize = 8192;

/// The card's end of the cable. It holds frames back while others wait in the card's buffer: the suite does not test
/// a card whose driver is too slow.
#[derive(Debug)]
struct Cable {
    to_card: Arc<Lane>,
    from_card: Arc<Lane>,
    /// Frame that the card is reading.
    current: Vec<u8>,
    /// Bytes that the card may get before the next look.
    allowed: usize,
    /// Whether the card has asked for silence, and has not revoked that.
    paused: bool,
}

/// Returns whether a PAUSE frame asks for silence, or ends it (IEEE 802.3, annex 31B).
///
/// The requested duration, 33 ms at most, is ignored: a loaded machine suspends a thread for longer. A silence of up
/// to a millisecond counts as over at once.
fn pause_of(frame: &[u8]) -> Option<bool> {
    let rest = frame.strip_prefix(&[0x01, 0x80, 0xc2, 0x00, 0x00, 0x01])?.get(6..)?;
    let quanta = rest.strip_prefix(&[0x88, 0x08, 0x00, 0x01])?.first_chunk()?;
    Some(u16::from_be_bytes(*quanta) > 2000)
}

impl Cable {
    fn look(&mut self, waiting: usize) {
        self.allowed = if waiting == 0 { AT_ONCE } else { 0 };
    }
}

impl Wire for Cable {
    fn receive(&mut self, _: u64) -> Option<&[u8]> {
        if self.allowed == 0 || self.paused {
            return None;
        }
        self.current = self.to_card.take(Duration::ZERO)?;
        self.allowed = self.allowed.saturating_sub(self.current.len());
        Some(&self.current)
    }

    fn send(&mut self, frame: &[u8], _: u64) {
        match pause_of(frame) {
            Some(pause) => self.paused = pause,
            None => _ = self.from_card.try_put(frame, usize::MAX),
        }
    }
}

/// Returns how often a card may have events, over its whole life, that take its link down.
fn allowed(class: Class, starts: u64) -> u64 {
    match class {
        Class::Reset | Class::LinkWrite => starts,
        _ => 0,
    }
}

/// Acts of the test on the card from outside.
#[derive(Debug)]
struct Outside {
    stop: AtomicBool,
    plugged: AtomicBool,
    pulled: AtomicBool,
    /// Whether the card has noticed its removal.
    gone: AtomicBool,
    /// How often the card may be started.
    starts: AtomicU64,
    /// How often the card has slept.
    naps: AtomicU64,
}

/// A model of a card, and the driver for it.
pub trait Modelled: 'static {
    /// How its traffic gets to the next owner's rings.
    const HOW: How = How::Point;

    type Nic: Nic<Bus = VfioUser>;
    type Model: Model;

    const QUEUES: u8;
    const MTU_MAX: u16;
    const HOLDS_WHILE_PARKED: bool;

    fn new(mac: Mac) -> Self::Model;
    /// Returns the frames that wait in the card.
    fn waiting(model: &Self::Model) -> usize;
    fn set_removed(model: &mut Self::Model, removed: bool);
    /// Checks that the driver did only what it may, with so many starts.
    fn check(model: &Self::Model, starts: u64);
}

pub enum The82574L {}

impl Modelled for The82574L {
    type Nic = E1000e<VfioUser>;
    type Model = e1000e::Device;

    const QUEUES: u8 = 2;
    const MTU_MAX: u16 = 9000;
    // Silicon drops frames while receives are off.
    const HOLDS_WHILE_PARKED: bool = false;

    fn new(mac: Mac) -> Self::Model {
        let options = e1000e::Options { mac: mac.0, link_up_ns: LINK_UP_NS, poison: true, ..Default::default() };
        e1000e::Device::new(options)
    }

    fn waiting(model: &Self::Model) -> usize {
        model.waiting().0
    }

    fn set_removed(model: &mut Self::Model, removed: bool) {
        model.faults.removed = removed;
    }

    fn check(model: &Self::Model, starts: u64) {
        let journal = &model.journal;
        journal.demand_none(&Class::ALWAYS).unwrap();
        // A driver that starts the card resets it and lets the link come up; no successor does.
        let cold = Class::COLD.map(|class| (class, journal.count(class)));
        assert!(
            cold.iter().all(|(class, count)| *count <= allowed(*class, starts)),
            "a successor was not content: {cold:?}"
        );
    }
}

/// A card that a thread of its own serves.
pub struct OnSim<C = The82574L> {
    socket: PathBuf,
    to_card: Arc<Lane>,
    from_card: Arc<Lane>,
    outside: Arc<Outside>,
    thread: Option<JoinHandle<()>>,
    _folder: TempDir,
    card: PhantomData<C>,
}

impl<C: Modelled> World for OnSim<C> {
    type Nic = C::Nic;
    type Bus = VfioUser;

    const MEMORY_AT: Iova = Iova(0x40_0000_0000);
    const QUEUES: u8 = C::QUEUES;
    const MTU_MAX: u16 = C::MTU_MAX;
    const MAC: Mac = Mac([0x02, 0x00, 0x00, 0x74, 0x00, 0x01]);
    const HOLDS_WHILE_PARKED: bool = C::HOLDS_WHILE_PARKED;

    fn new(_: &NicMemory) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nic");
        let mut server = Server::bind(&socket).unwrap();
        let (to_card, from_card) = (Arc::new(Lane::default()), Arc::new(Lane::default()));
        let outside = Arc::new(Outside {
            stop: AtomicBool::new(false),
            plugged: AtomicBool::new(true),
            pulled: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            starts: AtomicU64::new(1),
            naps: AtomicU64::new(0),
        });
        let cable = Cable {
            to_card: Arc::clone(&to_card),
            from_card: Arc::clone(&from_card),
            current: Vec::new(),
            allowed: 0,
            paused: false,
        };
        let told = Arc::clone(&outside);
        let thread = std::thread::spawn(move || {
            let mut served = Served::new(C::new(Self::MAC), cable);
            let mut starts = told.starts.load(Relaxed);
            let ended = served.serve(&mut server, |served| {
                // A driver that starts a card anew does not revoke an earlier request for silence. On real cables it
                // runs out.
                if std::mem::replace(&mut starts, told.starts.load(Relaxed)) != starts {
                    served.wire().paused = false;
                }
                let waiting = C::waiting(served.card());
                served.wire().look(waiting);
                served.card().set_partner(told.plugged.load(Relaxed));
                let pulled = told.pulled.load(Relaxed);
                C::set_removed(served.card(), pulled);
                told.gone.store(pulled, Relaxed);
                told.naps.store(served.naps(), Relaxed);
                !told.stop.load(Relaxed)
            });
            ended.unwrap();
            C::check(served.card(), told.starts.load(Relaxed));
            assert_eq!(served.faults(), 0, "the card was sent to memory that it does not have");
        });
        Some(OnSim { socket, _folder: folder, to_card, from_card, outside, thread: Some(thread), card: PhantomData })
    }

    fn bus(&self) -> VfioUser {
        VfioUser::connect(&self.socket, TIMEOUT).unwrap()
    }

    fn try_send(&self, frame: &[u8]) -> bool {
        self.to_card.try_put(frame, ON_THEIR_WAY)
    }

    fn sender(&self) -> Sender {
        let lane = Arc::clone(&self.to_card);
        Box::new(move |frame| {
            while !lane.try_put(frame, ON_THEIR_WAY) {
                std::thread::yield_now();
            }
        })
    }

    fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        self.from_card.take(limit)
    }

    fn let_rest(&self, _: &mut VfioUser) {
        // The first of the two may have begun before.
        let until = self.outside.naps.load(Relaxed) + 2;
        super::polled("the card sleeps", || (self.outside.naps.load(Relaxed) >= until).then_some(()));
    }

    fn set_link(&mut self, up: bool) {
        self.outside.plugged.store(up, Relaxed);
    }

    fn pull(&mut self) {
        self.outside.pulled.store(true, Relaxed);
        super::polled("the card's end", || self.outside.gone.load(Relaxed).then_some(()));
    }

    fn expect_start(&mut self) {
        self.outside.starts.fetch_add(1, Relaxed);
    }
}

impl<C: Modelled<Nic: InPlace>> Twinned for OnSim<C> {
    fn twin(bus: &VfioUser) -> VfioUser {
        VfioUser::from_twin(bus.twin().expect("descriptors are free"), TIMEOUT).expect("a socket")
    }
}

impl<C: Modelled<Nic: InPlace + Repoint>> Repointed for OnSim<C> {
    const HOW: How = C::HOW;

    fn with_two(first: &NicMemory, _: &NicMemory) -> Option<Self> {
        OnSim::new(first)
    }
}

impl<C> Drop for OnSim<C> {
    fn drop(&mut self) {
        self.outside.stop.store(true, Relaxed);
        let served = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(served, Some(Ok(()))), "the model failed");
    }
}
