//! The kernel's part of a bell: a pipe to sleep in, and how long to spin before.
//!
//! A pipe and not an eventfd, for two reasons. The two ends of a pipe are separate open files, so a hostile holder
//! of one end cannot make the other end's writes block. With an eventfd it could, by clearing `O_NONBLOCK`. And when
//! the only writer ends, the reader sees an end of file, so a death wakes the waiter. The price on one core is 4 %
//! of a round trip (docs/decisions/0003-pipes-for-bells.md).

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::pipe::PipeFlags;
use rustix::thread::CpuSet;

/// Number of naps between two drainings of the pipe. Each nap leaves one byte, and a pipe holds 65,536 bytes.
const NAPS_BEFORE_DRAIN: u32 = 4096;

/// Number of reads in one draining: with 4,096 bytes each, a whole pipe.
const DRAIN_READS_MAX: u32 = 16;

/// The event that ended a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// The bell rang. The kernel can also wake us without a ring: look at the rings.
    Rung,
    /// The peer is gone: no process is left that could ring.
    PeerGone,
    /// The time limit passed.
    TimedOut,
}

/// Creates a bell pipe. Returns its read end, to sleep in, and its write end, to ring. Both close on exec and never
/// block.
pub fn bell_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

/// The place where one waiter sleeps.
#[derive(Debug)]
pub struct Sleeper {
    epoll: OwnedFd,
    pipe: OwnedFd,
    naps: u32,
}

impl Sleeper {
    /// Creates a sleeper in the read end of a bell pipe.
    pub fn new(pipe: OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // Edge-triggered: then a nap costs one system call, because the byte that ended it need not be read.
        epoll::add(&epoll, &pipe, epoll::EventData::new_u64(0), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Sleeper { epoll, pipe, naps: 0 })
    }

    /// Sleeps until the bell rings, the peer is gone, or the time is `until`.
    pub fn sleep(&mut self, until: Option<Instant>) -> io::Result<Woken> {
        let left = until.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 1];
        let woken = match epoll::wait(&self.epoll, &mut events, left.as_ref()) {
            Ok(0) => return Ok(Woken::TimedOut),
            Err(Errno::INTR) => return Ok(Woken::Rung),
            Err(errno) => return Err(errno.into()),
            Ok(_) => match { events[0].flags }.contains(epoll::EventFlags::HUP) {
                true => Woken::PeerGone,
                false => Woken::Rung,
            },
        };
        self.naps += 1;
        if self.naps >= NAPS_BEFORE_DRAIN {
            drain(self.pipe.as_fd());
            self.naps = 0;
        }
        Ok(woken)
    }

    /// Whether the peer is gone. Does not sleep. Consumes rings that were not yet noticed.
    pub fn peer_is_gone(&mut self) -> io::Result<bool> {
        Ok(self.sleep(Some(Instant::now()))? == Woken::PeerGone)
    }

    /// Returns the end to put into another epoll. It becomes readable when the bell rings; [`drain`] it then.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

fn timespec(left: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: left.subsec_nanos().into() }
}

/// Returns whether this is an eventfd. What is written to another file may do more than wake somebody.
pub fn is_eventfd(descriptor: BorrowedFd<'_>) -> bool {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    rustix::fs::readlink(path, Vec::new()).is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]")
}

/// Rings an eventfd. Never waits, even if another holder made it block: a full eventfd is readable anyway.
pub fn ring_eventfd(eventfd: impl AsFd) {
    let mut room = [PollFd::new(&eventfd, PollFlags::OUT)];
    if rustix::event::poll(&mut room, Some(&Timespec::default())) == Ok(1) && room[0].revents().contains(PollFlags::OUT)
    {
        let _ = rustix::io::write(&eventfd, &1_u64.to_ne_bytes());
    }
}

/// Reads the bytes that rings left in a bell pipe, as many as a pipe has room for by default: a peer that rings without end
/// keeps nobody here. What is left says nothing that a ring has not said, and the next ring has room. Never blocks, even if the
/// peer changed the flags of our end.
pub fn drain(pipe: BorrowedFd<'_>) {
    let mut bytes = [0; 4096];
    for _ in 0..DRAIN_READS_MAX {
        let read = rustix::io::preadv2(pipe, &mut [IoSliceMut::new(&mut bytes)], u64::MAX, ReadWriteFlags::NOWAIT);
        let read = match read {
            Err(Errno::OPNOTSUPP) if !knows_nowait() => rustix::io::read(pipe, &mut bytes[..]),
            other => other,
        };
        if !matches!(read, Ok(n) if n == bytes.len()) {
            return;
        }
    }
}

/// Whether this kernel has per-call non-blocking pipes (Linux 6.4). If it has, and a peer's descriptor does not
/// support them, that descriptor is not a pipe. Then we do nothing with it that could block.
fn knows_nowait() -> bool {
    static KNOWS: OnceLock<bool> = OnceLock::new();
    *KNOWS.get_or_init(|| {
        let nothing = |pipe: OwnedFd| {
            rustix::io::preadv2(pipe, &mut [IoSliceMut::new(&mut [0])], u64::MAX, ReadWriteFlags::NOWAIT)
        };
        bell_pipe().is_ok_and(|(read, _write)| nothing(read) != Err(Errno::OPNOTSUPP))
    })
}

/// Opens the write end of a bell's pipe anew. The new end shares no state with the given one, not even its blocking
/// mode.
pub fn open_anew(bell: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let same = format!("/proc/self/fd/{}", bell.as_raw_fd());
    Ok(rustix::fs::open(same, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?)
}

/// Rings a bell: the write end of its pipe, which all clones share.
#[derive(Debug, Clone)]
pub struct BellSender {
    pipe: Arc<OwnedFd>,
    /// Whether another process may hold this same open file and have made it blocking.
    shared: bool,
}

impl BellSender {
    /// Uses an end that only we hold.
    pub fn own(pipe: OwnedFd) -> Self {
        BellSender { pipe: Arc::new(pipe), shared: false }
    }

    /// Uses an end that a peer made and passed to us. Opens it anew if the pipe's mode permits, so that it is ours
    /// alone.
    pub fn from_peer(pipe: OwnedFd) -> Self {
        match open_anew(pipe.as_fd()) {
            Ok(own) => BellSender::own(own),
            Err(_) => BellSender { pipe: Arc::new(pipe), shared: true },
        }
    }

    /// Rings. If the bell has no listener any more, the ring has no effect: we learn of its owner's death elsewhere.
    pub fn ring(&self) {
        self.ring_as(&[1]);
    }

    /// Rings, and leaves these few bytes in the pipe, whole or not at all.
    pub fn ring_as(&self, bytes: &[u8]) {
        if self.shared {
            let rung = rustix::io::pwritev2(&self.pipe, &[IoSlice::new(bytes)], u64::MAX, ReadWriteFlags::NOWAIT);
            if rung != Err(Errno::OPNOTSUPP) || knows_nowait() {
                return;
            }
        }
        // A full pipe (EAGAIN) wakes as well as one more byte would; a closed one (EPIPE) has no sleeper.
        let _ = rustix::io::write(&self.pipe, bytes);
    }
}

/// Returns the CPU on which this thread runs, or [`NO_CPU`](crate::bell::NO_CPU).
pub fn this_cpu() -> u32 {
    u32::try_from(rustix::thread::sched_getcpu()).unwrap_or(crate::bell::NO_CPU)
}

/// Number of rounds of the measurement in [`nap_cost`]: 1 to 2 ms in all.
const ROUNDS: usize = 21;

/// Upper limit of [`nap_cost`], so that one hiccup of the machine does not make every waiter spin for long.
const NAP_COST_MAX: Duration = Duration::from_micros(200);

/// Returns the cost of parking here and being woken from another CPU. It pays to spin that long (twice the best
/// choice at worst). The first call measures it, in about 2 ms. Zero if there is no second CPU, since spinning then
/// only gets in the way; also if the kernel refuses the thread or the pipes of the measurement.
pub fn nap_cost() -> Duration {
    static COST: OnceLock<Duration> = OnceLock::new();
    *COST.get_or_init(|| measure_nap().unwrap_or(Duration::ZERO).min(NAP_COST_MAX))
}

/// Returns the median of half a round trip between two threads on two CPUs that both sleep in pipes.
fn measure_nap() -> Option<Duration> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).max(online_cpus());
    let here = this_cpu() as usize;
    let (there_sleeps, here_rings) = bell_pipe().ok()?;
    let (here_sleeps, there_rings) = bell_pipe().ok()?;
    let (mut here_sleeps, mut there_sleeps) = (Sleeper::new(here_sleeps).ok()?, Sleeper::new(there_sleeps).ok()?);
    let (here_rings, there_rings) = (BellSender::own(here_rings), BellSender::own(there_rings));
    let echo = std::thread::Builder::new().spawn(move || {
        let elsewhere = (0..cpus).filter(|&cpu| cpu != here).any(|cpu| {
            let mut one = CpuSet::new();
            one.set(cpu);
            rustix::thread::sched_setaffinity(None, &one).is_ok()
        });
        while elsewhere && there_sleeps.sleep(None).is_ok_and(|woken| woken == Woken::Rung) {
            there_rings.ring();
        }
    });
    let echo = echo.ok()?;
    let mut trips = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        here_rings.ring();
        match here_sleeps.sleep(Some(start + Duration::from_millis(20))).ok()? {
            Woken::PeerGone => break,
            Woken::Rung | Woken::TimedOut => trips.push(start.elapsed()),
        }
    }
    drop(here_rings);
    let _ = echo.join();
    trips.sort_unstable();
    trips.get(trips.len() / 2).map(|trip| *trip / 2)
}

fn online_cpus() -> usize {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let last = list.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<usize>().ok());
    last.map_or(1, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A limit on the address space stands for one on threads, which does not hold for root.
    #[test]
    fn a_process_that_gets_no_thread_measures_nothing() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        if !crate::alone("wake::tests::a_process_that_gets_no_thread_measures_nothing", 0) {
            return;
        }
        let Rlimit { current, maximum } = getrlimit(Resource::As);
        setrlimit(Resource::As, Rlimit { current: Some(1 << 20), maximum }).unwrap();
        let cost = nap_cost();
        setrlimit(Resource::As, Rlimit { current, maximum }).unwrap();
        assert_eq!(cost, Duration::ZERO);
    }

    #[test]
    fn a_ring_ends_a_sleep() {
        let (read, write) = bell_pipe().unwrap();
        let mut sleeper = Sleeper::new(read).unwrap();
        let bell_sender = BellSender::own(write);
        for _ in 0..3 {
            bell_sender.ring();
            assert_eq!(sleeper.sleep(None).unwrap(), Woken::Rung);
        }
        assert_eq!(sleeper.sleep(Some(Instant::now())).unwrap(), Woken::TimedOut);
    }

    #[test]
    fn the_death_of_the_ringer_ends_a_sleep() {
        let (read, write) = bell_pipe().unwrap();
        let mut sleeper = Sleeper::new(read).unwrap();
        assert!(!sleeper.peer_is_gone().unwrap());
        drop(write);
        assert_eq!(sleeper.sleep(None).unwrap(), Woken::PeerGone);
    }

    #[test]
    fn more_naps_than_a_pipe_has_bytes() {
        let (read, write) = bell_pipe().unwrap();
        let mut sleeper = Sleeper::new(read).unwrap();
        let bell_sender = BellSender { pipe: write.into(), shared: true };
        for _ in 0..200_000 {
            bell_sender.ring();
            assert_eq!(sleeper.sleep(Some(Instant::now() + Duration::from_secs(5))).unwrap(), Woken::Rung);
        }
    }

    /// A pipe with more room than ours is as good as one that the peer fills all the while.
    #[test]
    fn a_peer_that_rings_without_end_keeps_nobody_draining() {
        let (read, write) = bell_pipe().unwrap();
        let room = rustix::pipe::fcntl_setpipe_size(&read, 1 << 20).unwrap() as u64;
        while rustix::io::write(&write, &[1; 4096]).is_ok() {}
        let mut sleeper = Sleeper::new(read).unwrap();
        assert_eq!(sleeper.sleep(None).unwrap(), Woken::Rung);
        drain(sleeper.fd());
        assert_eq!(rustix::io::ioctl_fionread(sleeper.fd()).unwrap(), room - (64 << 10));
        // What is left wakes nobody, and the next ring does.
        assert_eq!(sleeper.sleep(Some(Instant::now())).unwrap(), Woken::TimedOut);
        let bell_sender = BellSender::own(write);
        bell_sender.ring();
        assert_eq!(sleeper.sleep(None).unwrap(), Woken::Rung);
    }

    #[test]
    fn a_bell_whose_pipe_a_hostile_peer_made_blocking_and_full_does_not_block_us() {
        let (_read, write) = bell_pipe().unwrap();
        while rustix::io::write(&write, &[0; 4096]).is_ok() {}
        rustix::fs::fcntl_setfl(&write, rustix::fs::OFlags::empty()).unwrap();
        if rustix::io::pwritev2(&write, &[IoSlice::new(&[1])], u64::MAX, ReadWriteFlags::NOWAIT)
            == Err(Errno::OPNOTSUPP)
        {
            println!("skipped: this kernel (before 6.4) has no per-call non-blocking pipes");
            return;
        }
        BellSender { pipe: write.into(), shared: true }.ring();
    }

    #[test]
    fn a_nap_costs_something_where_there_are_two_cpus() {
        if online_cpus() < 2 {
            println!("skipped: needs two CPUs");
            return;
        }
        assert!(nap_cost() > Duration::ZERO && nap_cost() <= NAP_COST_MAX);
    }
}
