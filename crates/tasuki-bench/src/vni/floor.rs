//! The floor of frames between two namespaces by workers: two processes that take the same ways through the kernel and
//! make the same copies, and do nothing else.
//!
//! By a worker, the kernel copies a frame twice: out of the sender's TAP into shared memory, and out of that into the
//! receiver's TAP. Each is a system call of its own. No other copy is made, except of the offload header and the
//! addresses (22 bytes). Here, too, each frame takes a `read` and a `write` between the same TAPs, with segments of up to
//! 64 KiB and checksums left undone, and lies in shared memory between. There is no address, no check, no note for a
//! successor, and neither side survives the other. A sleeper is woken by the first frame: our workers let the frames of a
//! flood gather, and may so be faster than this.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tasuki_net::vni::PIECE_MAX;
use tasuki_shm::line::{LINE_LEN, LINE_WORDS, Line};
use tasuki_shm::pool::{PeerPool, Piece, Pool, Run};
use tasuki_shm::region::{PAGE_LEN, Pages, Region, Span};
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds, POOL_PAGES, PeerNodeMemory};

use crate::orders::Fds;

use super::netns::{IDLE_LOOKS, TICK, begin};

/// Entries of a ring, as many as of ours.
const ENTRIES: usize = 256;

/// Bytes of shared memory for each direction, as many as a node's pool has.
const POOL: u64 = POOL_PAGES as u64 * PAGE_LEN as u64;

/// Most frames that are read, and written, before the process turns to the other direction: as many as by us.
const READS: usize = 64;
const WRITES: usize = 32;

/// How soon to look again where the other side has no room, as we do.
const ROOM_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000 };

/// Lines of a direction: number of frames written, number read, whether the reader sleeps, and the ring.
const TAIL: usize = 0;
const HEAD: usize = 1;
const ASLEEP: usize = 2;
const RING: usize = 3;
const LINES: usize = RING + ENTRIES / LINE_WORDS;

/// What both processes write: the counts and rings, and an eventfd for each.
pub struct Shared {
    lines: OwnedFd,
    bells: [OwnedFd; 2],
}

impl Shared {
    pub fn new() -> Result<Self> {
        let lines = Region::create("bench-floor", 2 * LINES * LINE_LEN, Pages::Small)?.into_fd();
        let bell = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Shared { lines, bells: [bell()?, bell()?] })
    }

    /// Returns the descriptors for a node.
    pub fn fds(&self) -> Result<Vec<OwnedFd>> {
        let fds = [&self.lines, &self.bells[0], &self.bells[1]].map(OwnedFd::try_clone);
        fds.into_iter().collect::<Result<_, _>>().context("no descriptor is left for a node")
    }
}

/// Frames to the other process.
struct Out {
    lines: Span<Line>,
    bell: OwnedFd,
    pool: Pool,
    /// All of the pool.
    run: Run,
    /// Number of frames written.
    tail: u64,
    /// Bytes used from the start on, as if the pool had no end.
    end: u64,
    /// Where each entry's frame begins, in the same terms.
    starts: [u64; ENTRIES],
}

impl Out {
    /// Returns the place for a frame of any length, if there is room.
    fn room(&mut self) -> Option<u64> {
        let head = self.lines[HEAD].word(0).load(Acquire);
        if self.tail - head == ENTRIES as u64 {
            return None;
        }
        let left = POOL - self.end % POOL;
        let at = if left < PIECE_MAX as u64 { self.end + left } else { self.end };
        let first = if head == self.tail { at } else { self.starts[index(head)] };
        (at + PIECE_MAX as u64 - first <= POOL).then_some(at)
    }

    /// Reads frames from the TAP. Returns their number.
    fn take(&mut self, tap: &OwnedFd) -> usize {
        let mut count = 0;
        while count < READS
            && let Some(at) = self.room()
        {
            let place = usize::try_from(at % POOL).expect("small");
            let Ok(len) = rustix::io::read(tap, self.pool.bytes_mut(&self.run, place, PIECE_MAX)) else { break };
            let index = index(self.tail);
            self.lines[RING + index / LINE_WORDS]
                .word(index % LINE_WORDS)
                .store((place as u64) << 32 | len as u64, Relaxed);
            self.starts[index] = at;
            self.end = at + len.next_multiple_of(LINE_LEN) as u64;
            self.tail += 1;
            count += 1;
        }
        if count > 0 {
            self.publish();
        }
        count
    }

    /// Lets the other process see the frames.
    fn publish(&self) {
        self.lines[TAIL].word(0).store(self.tail, Release);
        fence(SeqCst);
        let asleep = self.lines[ASLEEP].word(0);
        if asleep.load(Relaxed) == 1 {
            asleep.store(0, Relaxed);
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }
}

/// Frames from the other process.
struct In {
    lines: Span<Line>,
    bell: OwnedFd,
    pool: PeerPool,
    /// Number of frames read.
    head: u64,
}

impl In {
    fn has_some(&self) -> bool {
        self.lines[TAIL].word(0).load(Acquire) != self.head
    }

    /// Writes frames to the TAP. Returns their number.
    fn give(&mut self, tap: &OwnedFd) -> usize {
        let tail = self.lines[TAIL].word(0).load(Acquire);
        let count = usize::try_from(tail - self.head).expect("a ring").min(WRITES);
        for _ in 0..count {
            let index = index(self.head);
            let word = self.lines[RING + index / LINE_WORDS].word(index % LINE_WORDS).load(Relaxed);
            let [offset, len] = [word >> 32, word & u64::from(u32::MAX)].map(|half| u32::try_from(half).expect("half"));
            let _ = self.pool.write_to(tap.as_fd(), &[], Piece { offset, len, generation: 0 });
            self.head += 1;
        }
        if count > 0 {
            self.lines[HEAD].word(0).store(self.head, Release);
            // As we do: the reader of these frames may need this very CPU. Without it, most datagrams are lost.
            std::thread::yield_now();
        }
        count
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number % ENTRIES as u64).expect("few entries")
}

/// Makes the two directions of a node, from its own memory, the other's, and what both write.
fn directions(number: u16, fds: &mut Fds) -> Result<(Out, In)> {
    let (_, mut pool) = NodeMemory::adopt(NodeMemoryFds { control: fds.next()?, pool: fds.next()? })?;
    // The pipe of a bell: an eventfd takes its place.
    drop(fds.next()?);
    let (_, peer) = PeerNodeMemory::map(&NodeMemoryFds { control: fds.next()?, pool: fds.next()? })?;
    drop(fds.next()?);
    let lines = Region::adopt(fds.next()?)?;
    let mut lines = [lines.span(0, LINES)?, lines.span(LINES * LINE_LEN, LINES)?];
    let mut bells = [fds.next()?, fds.next()?];
    if number > 0 {
        lines.reverse();
        bells.reverse();
    }
    let ([to, from], [ours, theirs]) = (lines, bells);
    let run = pool.take(POOL_PAGES).context("a new pool is free")?;
    let out = Out { lines: to, bell: theirs, pool, run, tail: 0, end: 0, starts: [0; ENTRIES] };
    Ok((out, In { lines: from, bell: ours, pool: peer, head: 0 }))
}

/// Plays the node of a namespace, with descriptors from standard input. Ends with the bench.
pub fn node(number: u16, cpu: usize) -> Result<()> {
    let mut fds = begin(cpu)?;
    let (mut out, mut from) = directions(number, &mut fds)?;
    let tap = fds.next()?;
    let tick = Timespec::try_from(TICK)?;
    let mut in_vain = 0;
    loop {
        let came = from.give(&tap);
        let went = out.take(&tap);
        in_vain = if came + went > 0 { 0 } else { in_vain + 1 };
        if in_vain == IDLE_LOOKS {
            sleep(&tap, &mut out, &from, &tick)?;
            in_vain = 0;
        }
    }
}

/// Sleeps until there are frames, or for a `tick`.
fn sleep(tap: &OwnedFd, out: &mut Out, from: &In, tick: &Timespec) -> Result<()> {
    let asleep = from.lines[ASLEEP].word(0);
    asleep.store(1, Relaxed);
    fence(SeqCst);
    if !from.has_some() {
        let (source, most) =
            if out.room().is_some() { (PollFlags::IN, tick) } else { (PollFlags::empty(), &ROOM_AGAIN) };
        let mut polled = [PollFd::new(&from.bell, PollFlags::IN), PollFd::new(tap, source)];
        poll(&mut polled, Some(most))?;
        if !polled[0].revents().is_empty() {
            rustix::io::read(&from.bell, &mut [0; 8])?;
        }
    }
    asleep.store(0, Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::super::nodes::Kept;
    use super::*;

    /// Returns both nodes' directions.
    fn nodes() -> [(Out, In); 2] {
        let kept = [0, 1].map(|number| Kept::new(number).unwrap());
        let shared = Shared::new().unwrap();
        [0, 1].map(|number: u16| {
            let mut fds = kept[usize::from(number)].fds([&kept[usize::from(1 - number)]]).unwrap();
            fds.extend(shared.fds().unwrap());
            directions(number, &mut Fds::of(fds)).unwrap()
        })
    }

    /// Returns a TAP, and the namespace behind it: sockets that keep the boundaries of messages, as TAPs do.
    fn tap() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    /// A frame whose length and bytes follow from its number.
    fn frame(number: usize) -> Vec<u8> {
        let len = [24, 1400, 9000, PIECE_MAX][number % 4];
        (0..len).map(|at| (at * 7 + number).to_le_bytes()[0]).collect()
    }

    #[test]
    fn frames_of_all_lengths_cross_whole_and_in_order() {
        let [(mut out, _), (_, mut from)] = nodes();
        let ((source, sender), (target, receiver)) = (tap(), tap());
        // More than the ring has entries, and than the pool has bytes.
        let (mut bytes, mut room) = (0, vec![0; PIECE_MAX + 1]);
        for number in 0..ENTRIES + 44 {
            bytes += rustix::io::write(&sender, &frame(number)).unwrap();
            assert_eq!(out.take(&source), 1);
            assert_eq!(from.give(&target), 1);
            let len = rustix::io::read(&receiver, &mut room).unwrap();
            assert!(room[..len] == frame(number), "frame {number}");
        }
        assert!(bytes as u64 > POOL);
        assert_eq!((out.take(&source), from.give(&target)), (0, 0));
    }

    #[test]
    fn a_full_ring_or_pool_reads_no_more() {
        let [(mut out, _), (_, mut from)] = nodes();
        let (source, sender) = tap();
        let nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap().into();
        for number in [0, 3] {
            let (before, mut count) = (from.head, 0);
            loop {
                rustix::io::write(&sender, &frame(number)).unwrap();
                if out.take(&source) == 0 {
                    break;
                }
                count += 1;
            }
            let most = if number == 0 { ENTRIES } else { usize::try_from(POOL).unwrap() / PIECE_MAX };
            // The end of the pool may be left over.
            assert!(count == most || number == 3 && count + 1 == most, "{count} frames of {}", frame(number).len());
            let mut came = 0;
            while out.take(&source) + from.give(&nowhere) > 0 {
                came = from.head - before;
            }
            assert_eq!(came, count as u64 + 1, "the one that waited, too");
        }
    }

    #[test]
    fn only_a_sleeper_is_rung() {
        let [(mut out, _), (_, from)] = nodes();
        let (source, sender) = tap();
        let is_rung = || rustix::io::read(&from.bell, &mut [0; 8]).is_ok();
        for sleeps in [false, true, false] {
            from.lines[ASLEEP].word(0).store(u64::from(sleeps), Relaxed);
            rustix::io::write(&sender, &frame(0)).unwrap();
            assert_eq!(out.take(&source), 1);
            assert_eq!(is_rung(), sleeps);
        }
    }
}
