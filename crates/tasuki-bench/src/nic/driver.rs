//! Process of the driver: the work that a node does with its NIC.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{Filter, Link, MemoryLayout, Nic, NicMemory, NicOptions, Parts};
use tasuki_net::port::{Armed, Burst, Frame, Port};
use tasuki_shm::arena::Geometry;
use tasuki_sim::wire::Source;

use super::trial::{Ask, Control, Outcome, Say, Trial};
use crate::orders::Orders;
use crate::sample::Sample;

/// Largest ring that the driver takes, in descriptors: it rides out 0.7 ms without a CPU at gigabit line rate.
const RING: u16 = 1024;

/// Interval between two replacements of the driver.
const BETWEEN_PARKS: Duration = Duration::from_millis(5);

/// Number of frames of a warm-up trial.
const WARM_UP: u64 = 20_000;

/// How long a search offers each rate, and the factor from one rate to the next lower one.
const SEARCH: Duration = Duration::from_millis(100);
const STEP: (u64, u64) = (4, 5);
/// Lowest rate that a search tries, in frames a second.
const LEAST_RATE: u64 = 300_000;
/// Number of tries at each rate, and number of tries without loss for the rate to count.
const TRIES: u32 = 3;
const CLEAN_TRIES: u32 = 2;

/// Frames that have not come so long after the last one are lost.
const PATIENCE: Duration = Duration::from_millis(100);

/// The line rate of a gigabit, in frames of 64 bytes a second.
const LINE_RATE_64: u64 = 1_488_095;

type Card = E1000e<VfioUser>;

/// Work of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Reads each frame and releases it.
    Sink,
    /// Sends each frame back to its source.
    Echo,
}

fn start(socket: OwnedFd) -> Result<Card> {
    Ok(start_shared(socket, RING)?.0)
}

/// Starts the card; also returns the memory parts and layout that another process needs.
pub fn start_shared(socket: OwnedFd, ring: u16) -> Result<(Card, Parts, MemoryLayout)> {
    let memory =
        NicMemory::create(Geometry { slot_len: 4096, count: 2 * u32::from(ring) + 128 }, 1 << 20, Iova(1 << 32))?;
    let (parts, layout) = (memory.parts()?, memory.layout());
    let filter = Filter { promiscuous: true, ..Filter::default() };
    let options = NicOptions { ring, filter, ..NicOptions::default() };
    let mut nic = Card::start(VfioUser::meet(socket, TIMEOUT)?, memory, &options)?;
    let began = Instant::now();
    while nic.link()? == Link::Down {
        ensure!(began.elapsed() < Duration::from_secs(10), "the link of the model did not come up");
        std::thread::yield_now();
    }
    Ok((nic, parts, layout))
}

/// Returns the number of frames of `size` bytes a second that fill a gigabit.
pub fn line_rate(size: u32) -> u64 {
    1_000_000_000 / (8 * (u64::from(size) + 20))
}

/// The driver's view of a trial.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// Number of frames, each counted once.
    received: u64,
    /// Number of frames that came twice or out of order, or that are not of this trial.
    wrong: u64,
    /// One past the highest number that came.
    next: u64,
    /// Time from the first frame to the last.
    took: Duration,
    /// Longest time between two receptions, whether the driver did not run or found nothing.
    longest_gap: Duration,
}

impl Seen {
    /// Counts a frame of a trial of `count`, by its number: a frame that comes twice makes up for no lost one.
    fn count(&mut self, frame: &[u8], count: u64) {
        match Source::number_of(frame).filter(|number| (self.next..count).contains(number)) {
            Some(number) => {
                self.next = number + 1;
                self.received += 1;
            }
            None => self.wrong += 1,
        }
    }

    /// Returns frames a second.
    fn rate(&self) -> u64 {
        let took = self.took.as_nanos().max(1);
        u64::try_from(u128::from(self.received) * 1_000_000_000 / took).unwrap_or(u64::MAX)
    }
}

struct Trials {
    /// `None` only while another driver takes the card over.
    nic: Option<Card>,
    control: Control,
    work: Work,
    size: u32,
}

/// Runs the trials of a case.
pub fn trials(mut orders: Orders, work: Work) -> Result<Sample> {
    let mut trials = Trials::new(&mut orders, work)?;
    let size = trials.size;
    let mut sample = Sample::new();
    trials.run(WARM_UP, None, true)?;

    // At full speed; the wire pauses when the card asks it to.
    let (seen, outcome, lost) = trials.run(orders.calls, None, true)?;
    let rate = seen.rate();
    sample.note("rate", rate as f64);
    sample.note("lost", lost as f64);
    sample.note("wrong", outcome.wrong as f64);
    sample.note("pauses", outcome.pauses as f64);
    sample.note("stalled", outcome.stalled as f64);
    sample.record(seen.took / u32::try_from(seen.received.max(1)).context("so many frames take too long")?);

    if size == 64 {
        // At line rate, with pauses and without.
        for (pauses, lost_as, gap_as) in [(true, "line-lost", "line-gap"), (false, "deaf-lost", "deaf-gap")] {
            let (seen, outcome, lost) = trials.run(orders.calls.min(LINE_RATE_64), Some(LINE_RATE_64), pauses)?;
            sample.note(lost_as, lost as f64);
            sample.note(gap_as, seen.longest_gap.as_nanos() as f64);
            if pauses {
                sample.note("line-rate", seen.rate() as f64);
                sample.note("line-stalled", outcome.stalled as f64 / seen.took.as_nanos() as f64);
            }
        }
        sample.note("deaf-rate", trials.search(rate)? as f64);
    }
    trials.end()?;
    Ok(sample)
}

/// Sends frames back at line rate, and replaces the driver of the card again and again. Times each parking and
/// resuming.
pub fn parks(mut orders: Orders) -> Result<Sample> {
    let mut trials = Trials::new(&mut orders, Work::Echo)?;
    let mut sample = Sample::new();
    trials.run(WARM_UP, None, true)?;
    let count = orders.calls;
    let (seen, outcome, lost) = trials.run_with(count, Some(LINE_RATE_64), true, Some(&mut sample))?;
    sample.note("lost", lost as f64);
    sample.note("wrong", outcome.wrong as f64);
    sample.note("rate", seen.rate() as f64);
    sample.note("wire-gap", outcome.longest_gap as f64);
    trials.end()?;
    Ok(sample)
}

impl Trials {
    fn new(orders: &mut Orders, work: Work) -> Result<Self> {
        let nic = start(orders.next_fd()?)?;
        let control = Control::new(orders.next_fd()?);
        let size = control.size()?;
        Ok(Trials { nic: Some(nic), control, work, size })
    }

    fn end(self) -> Result<()> {
        if let Some(nic) = self.nic {
            nic.park()?;
        }
        Ok(())
    }

    /// Parks the driver and resumes with another one.
    fn replace(&mut self) -> Result<()> {
        if let Some(nic) = self.nic.take() {
            let (bus, memory, driver_state) = nic.park()?;
            self.nic = Some(Card::resume(bus, memory, &driver_state)?);
        }
        Ok(())
    }

    /// Runs one trial. Returns the driver's view, the wire's view, and the number of missing frames.
    fn run(&mut self, count: u64, rate: Option<u64>, pauses: bool) -> Result<(Seen, Outcome, u64)> {
        self.run_with(count, rate, pauses, None)
    }

    /// Like [`run`](Self::run). If `parks` is given, replaces drivers meanwhile and records the duration of each
    /// replacement.
    fn run_with(
        &mut self,
        count: u64,
        rate: Option<u64>,
        pauses: bool,
        parks: Option<&mut Sample>,
    ) -> Result<(Seen, Outcome, u64)> {
        self.control.say(&Ask::Begin(Trial { count, size: self.size, rate, pauses }))?;
        let seen = match self.work {
            Work::Sink => self.receive(count, Burst::clear, parks),
            Work::Echo => self.receive(count, |_| (), parks),
        }?;
        let mut outcome = self.control.end()?;
        let arrived = match self.work {
            Work::Echo => outcome.back,
            // None comes back to the wire, which would judge it.
            Work::Sink => {
                outcome.wrong = seen.wrong;
                seen.received
            }
        };
        Ok((seen, outcome, count - arrived))
    }

    /// Receives until `count` frames have come, or until no more come.
    fn receive(&mut self, count: u64, release: impl Fn(&mut Burst), mut parks: Option<&mut Sample>) -> Result<Seen> {
        let mut seen = Seen::default();
        let mut burst = Burst::new();
        let (mut first, mut last) = (None, Instant::now());
        let (mut sent, mut idle) = (false, 0_u32);
        let mut parked = Instant::now();
        while seen.received < count {
            if let Some(sample) = &mut parks
                && parked.elapsed() > BETWEEN_PARKS
            {
                let began = Instant::now();
                self.replace()?;
                parked = Instant::now();
                sample.record(parked - began);
            }
            let nic = self.nic.as_mut().context("no driver has the card, so none receives")?;
            if nic.receive(&mut burst)? == 0 {
                idle += 1;
                if idle.is_multiple_of(1024) {
                    sent = sent || matches!(self.control.heard()?, Some(Say::Sent));
                    if sent && last.elapsed() > PATIENCE {
                        break;
                    }
                }
                continue;
            }
            let now = Instant::now();
            if first.is_some() {
                seen.longest_gap = seen.longest_gap.max(now - last);
            }
            first.get_or_insert(now);
            last = now;
            // Touch every frame, as any receiver would.
            for frame in &mut burst {
                turn_round(frame);
                seen.count(frame.slot.bytes(), count);
            }
            release(&mut burst);
            while !burst.is_empty() {
                nic.transmit(&mut burst)?;
            }
        }
        seen.took = first.map_or(Duration::ZERO, |first| last - first);
        Ok(seen)
    }

    /// Searches downwards from `from` for the highest rate at which a wire that does not pause loses nothing.
    /// Returns 0 if there is none.
    fn search(&mut self, from: u64) -> Result<u64> {
        let mut rate = from;
        while rate > LEAST_RATE {
            let count = rate * u64::from(SEARCH.subsec_millis()) / 1000;
            let mut clean = 0;
            for left in (0..TRIES).rev() {
                let (_, _, lost) = self.run(count, Some(rate), false)?;
                clean += u32::from(lost == 0);
                if clean + left < CLEAN_TRIES {
                    break;
                }
            }
            if clean >= CLEAN_TRIES {
                return Ok(rate);
            }
            rate = rate * STEP.0 / STEP.1;
        }
        Ok(0)
    }
}

/// Swaps the two addresses at the head of a frame.
pub fn turn_round(frame: &mut Frame) {
    let (to, rest) = frame.slot.bytes_mut().split_at_mut(6);
    to.swap_with_slice(&mut rest[..6]);
}

/// Sends frames back one at a time, and asks the wire for the duration of each trip.
pub fn pings(mut orders: Orders, sleeps: bool) -> Result<Sample> {
    let mut nic = start(orders.next_fd()?)?;
    let control = Control::new(orders.next_fd()?);
    control.say(&Ask::Begin(Trial { count: orders.total(), size: 64, rate: None, pauses: true }))?;
    let mut burst = Burst::new();
    let mut back = 0;
    while back < orders.total() {
        if nic.receive(&mut burst)? == 0 {
            if sleeps && nic.arm()? == Armed::Idle {
                sleep(&nic)?;
            }
            continue;
        }
        burst.iter_mut().for_each(turn_round);
        while !burst.is_empty() {
            back += nic.transmit(&mut burst)? as u64;
        }
    }
    let mut sample = Sample::new();
    let mut number = 0;
    while number < orders.total() {
        for trip in control.hear::<Vec<u64>>()? {
            number += 1;
            if number > orders.warmup {
                sample.record(Duration::from_nanos(trip));
            }
        }
    }
    nic.park()?;
    Ok(sample)
}

fn sleep(nic: &Card) -> Result<()> {
    let fd = nic.fd();
    let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
    let woken = rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)], Some(&limit))
        .context("the kernel refused to wait for the card")?;
    ensure!(woken > 0, "no frame came within 10 s, though the card was armed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use tasuki_sim::wire::{SourceOptions, Wire};

    use super::*;

    #[test]
    fn a_frame_that_comes_twice_makes_up_for_no_lost_one() {
        let options = SourceOptions { to: [2; 6], from: [4; 6], size: 64, rate: None, count: 20, honours_pause: true };
        let mut source = Source::new(options);
        let frames: Vec<_> = (0..20).map(|_| source.receive(0).unwrap().to_vec()).collect();
        let mut seen = Seen::default();
        for number in [0, 1, 2, 3, 4, 5, 6, 7, 7, 9] {
            seen.count(&frames[number], 10);
        }
        assert_eq!((seen.received, seen.wrong), (9, 1), "7 came twice, and 8 is lost");
        seen.count(&frames[8], 10);
        seen.count(&frames[12], 10);
        seen.count(&[0; 60], 10);
        assert_eq!((seen.received, seen.wrong), (9, 4), "out of order, of a longer trial, and no frame of a trial");
    }
}
