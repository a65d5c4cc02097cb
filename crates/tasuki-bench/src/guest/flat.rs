//! The flat curves of the paper (S3): frames of each length go from one machine to another at the paper's rate, each with a
//! worker of its own; and frames that go there and back, one of each length in turn.
//!
//! The drivers have written their frames before: each sends what is in its buffers as it is, so that it is not the limit.
//! The n-th frame has the number n, by which the other sees whether one is missing or came twice.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tasuki_net::endpoint::guest::device::{FROM_GUEST, TO_GUEST};

use super::copies;
use super::cpu::Reading;
use super::front::{frame_of, turn};
use super::load::{Pair, of_workers};
use crate::cpus::{self, Cpus};
use crate::interrupt::Interrupt;
use crate::papers::VM_SIZES;
use crate::program::PATIENCE;
use crate::report::{Kind, Row};
use crate::sample::Sample;

/// Lengths of the frames in bytes: the paper's, and that of jumbo frames.
pub const SIZES: [u32; 8] = {
    let [a, b, c, d, e, f, g] = VM_SIZES;
    [a, b, c, d, e, f, g, 9000]
};

/// The paper's rate in frames a second.
const RATE: u32 = 820_000;

/// What is offered beyond a rate, in hundredths: the front end may be away for so much of the time.
const BEYOND: u64 = 1;

/// Name of the floor.
pub const MEMCPY: &str = "memcpy";

/// Number of descriptors of a ring, and bytes of a buffer.
const RING: u16 = 1024;
const BUFFER: usize = 9024;

/// Number of frames that are offered together.
const BATCH: u64 = 8;

/// Number of frames that wait at most while the ring is full, as in Linux's `txqueuelen`.
const QUEUE: u64 = 1000;

/// The front end was away if it did not look for this long, and offered nothing meanwhile.
const STALL: Duration = Duration::from_micros(100);

/// How long a frame may be on its way at most.
const LATE: Duration = Duration::from_millis(20);

/// How much is measured.
struct Effort {
    time: Duration,
    trips: usize,
    copies: usize,
}

const QUICK: Effort = Effort { time: Duration::from_millis(500), trips: 500, copies: 20_000 };
const FULL: Effort = Effort { time: Duration::from_secs(3), trips: 10_000, copies: 200_000 };

pub fn names() -> impl Iterator<Item = String> {
    ["flat", "trip"].into_iter().flat_map(|what| SIZES.map(|size| format!("{what}-{size}")))
}

/// What came of frames that were offered at a rate.
struct Offered {
    /// Frames offered a second.
    rate: f64,
    frames: u64,
    /// Frames that did not come, also those that found no room in the ring and the queue before it.
    lost: u64,
    /// CPU time of both workers, as a share of a core.
    share: f64,
    /// CPU time of both workers for each frame that came, in ns.
    each: f64,
    kicks: f64,
    interrupts: f64,
}

/// Writes the frames that each machine sends, of these lengths in turn. Those that were sent before have come, or are lost.
fn write(pair: &mut Pair, sizes: &[u32]) -> Result<()> {
    let (began, mut last) = (Instant::now(), Instant::now());
    loop {
        let [from, to] = &mut pair.fronts;
        let seen = from.unseen(FROM_GUEST);
        from.see(FROM_GUEST, seen);
        if to.receive_all(0, |_, _| ())? > 0 || from.room(FROM_GUEST) < RING {
            last = Instant::now();
        } else if last.elapsed() > LATE {
            break;
        }
        ensure!(began.elapsed() < PATIENCE, "a worker stands still: {}", pair.system.log("vm"));
    }
    let frame = |number: u16| frame_of(number, sizes[usize::from(number) % sizes.len()] as usize);
    let [from, to] = &mut pair.fronts;
    from.write(0, frame)?;
    to.write(0, |number| {
        let mut frame = frame(number);
        turn(&mut frame);
        frame
    })
}

/// Offers frames of `size` bytes at a rate for some time.
fn offer(pair: &mut Pair, size: u32, rate: u32, time: Duration, interrupt: &Interrupt) -> Result<Offered> {
    write(pair, &[size])?;
    let [from, to] = &mut pair.fronts;
    let pace = u64::from(rate) * (100 + BEYOND) / 100;
    let due_at = |time: Duration| u64::try_from(time.as_nanos() * u128::from(pace) / 1_000_000_000);
    let (mut sent, mut refused, mut came, mut astray, mut next) = (0, 0, 0_u64, 0_u64, 0);
    let (mut last, mut away, mut turns) = (Duration::ZERO, Duration::ZERO, 0_u64);
    let kicked = from.kicked;
    to.interrupts(TO_GUEST);
    let before = Reading::take(&pair.workers)?;
    let began = Instant::now();
    let due = loop {
        let now = began.elapsed();
        let at = now.min(time);
        away += if at - last > STALL { at - last } else { Duration::ZERO };
        last = at;
        let due = due_at(at - away)?;
        let waiting = due - sent - refused;
        let seen = from.unseen(FROM_GUEST);
        from.see(FROM_GUEST, seen);
        if waiting >= BATCH || now >= time {
            let count = u16::try_from(waiting.min(from.room(FROM_GUEST).into()))?;
            if count > 0 {
                from.send_written(0, count)?;
            }
            sent += u64::from(count);
            refused += (waiting - u64::from(count)).saturating_sub(QUEUE);
        }
        came += u64::from(to.receive_all(0, |len, number| {
            astray += u64::from((len, number) != (size as usize, next));
            next = (number + 1) % RING;
        })?);
        if now >= time && (came == due || now > time + LATE) {
            break due;
        }
        turns += 1;
        if turns % 4096 == 0 {
            interrupt.check()?;
        }
    };
    let share = before.until(&Reading::take(&pair.workers)?).parties.iter().sum::<f64>();
    let lost = due - came;
    ensure!(lost > 0 || astray == 0, "{astray} of {came} frames came twice, in another order or cut");
    Ok(Offered {
        rate: due as f64 / time.as_secs_f64(),
        frames: due,
        lost,
        share,
        each: share * began.elapsed().as_nanos() as f64 / came as f64,
        kicks: (from.kicked - kicked) as f64 / came as f64,
        interrupts: to.interrupts(TO_GUEST) as f64 / came as f64,
    })
}

/// Sends frames there and back, one at a time and of each length in turn. Returns how long each length took.
fn trips(pair: &mut Pair, count: usize, interrupt: &Interrupt) -> Result<[Sample; SIZES.len()]> {
    write(pair, &SIZES)?;
    let mut samples = std::array::from_fn(|_| Sample::new());
    for trip in 0..count * SIZES.len() {
        let which = trip % SIZES.len();
        let expected = (SIZES[which] as usize, u16::try_from(trip % usize::from(RING))?);
        let began = Instant::now();
        for machine in [0, 1] {
            pair.fronts[machine].send_written(0, 1)?;
            let other = &mut pair.fronts[1 - machine];
            let mut came = None;
            while other.receive_all(0, |len, number| came = Some((len, number)))? == 0 {
                ensure!(began.elapsed() < PATIENCE, "a frame does not come: {}", pair.system.log("vm"));
            }
            ensure!(came == Some(expected), "a frame came that was not sent: {came:?} and not {expected:?}");
        }
        samples[which].record(began.elapsed());
        for front in &mut pair.fronts {
            let seen = front.unseen(FROM_GUEST);
            front.see(FROM_GUEST, seen);
        }
        interrupt.check()?;
    }
    Ok(samples)
}

/// What one length costs at the rate.
struct Found {
    at_rate: Offered,
    /// The highest rate among quarters of it at which no frame was lost; zero if there is none.
    carried: f64,
    /// CPU time of the copies alone, in ns a frame.
    copies: f64,
}

impl Found {
    fn measure(pair: &mut Pair, size: u32, cpus: Cpus, effort: &Effort, interrupt: &Interrupt) -> Result<Self> {
        let copies = copies::measure(size as usize, (RING.into(), BUFFER), of_workers(cpus)?, effort.copies)?;
        cpus::pin(cpus.client)?;
        let mut at = |quarters, time| offer(pair, size, RATE / 4 * quarters, time, interrupt);
        let without_loss = |offered: &Offered| (offered.lost == 0).then_some(offered.rate);
        let at_rate = at(4, effort.time)?;
        let mut carried = without_loss(&at_rate);
        for quarters in [3, 2, 1] {
            if carried.is_none() {
                carried = without_loss(&at(quarters, effort.time / 3)?);
            }
        }
        cpus::unpin()?;
        Ok(Found { at_rate, carried: carried.unwrap_or_default(), copies })
    }

    /// Makes the rows, and says the rest.
    fn rows(&self, name: &str, they_share: bool) -> [Row; 4] {
        let Self { at_rate: Offered { rate, frames, lost, share, each, kicks, interrupts }, carried, copies } = self;
        eprintln!(
            "{name} · {rate:.0} frames/s offered, {lost} of {frames} lost, {carried:.0} frames/s without loss · workers {:.1} %, {each:.0} ns a frame, the copies alone {copies:.0} · {kicks:.3} kicks, {interrupts:.3} interrupts a frame",
            share * 100.0,
        );
        let mut offered = Row::higher(name, "offered", "frames/s", *rate).bar_at(RATE.into());
        if *rate < RATE.into() {
            offered.note =
                Some("the front end had too little CPU: a miss of the bench, whatever the workers did".to_owned());
        } else if they_share {
            offered.note = Some("both workers have one CPU".to_owned());
        }
        let cpu = Row::lower(name, "cpu", "% of a core", share * 100.0);
        [
            offered,
            Row::lower(name, "lost", "frames", *lost as f64).bar_at(0.0),
            Row::higher(name, "carried", "frames/s", *carried),
            cpu.against(MEMCPY, Kind::Floor, copies * rate / 1e7),
        ]
    }
}

/// Measures, and makes the rows.
pub fn rows(is_quick: bool, is_wanted: impl Fn(&str) -> bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let (cpus, effort) = (Cpus::choose()?, if is_quick { QUICK } else { FULL });
    let workers = of_workers(cpus)?;
    let mut pair = Pair::start("", workers, RING, BUFFER)?;
    let (mut rows, mut points) = (Vec::new(), Vec::new());
    for size in SIZES {
        let name = format!("flat-{size}");
        if is_wanted(&name) {
            let found = Found::measure(&mut pair, size, cpus, &effort, interrupt)?;
            rows.extend(found.rows(&name, workers[0] == workers[1]));
            if VM_SIZES.contains(&size) && found.at_rate.lost == 0 {
                points.push((f64::from(size), found.at_rate.each, found.copies));
            }
        }
    }
    // Where frames are lost, the CPUs are full at each length.
    if points.len() == VM_SIZES.len() {
        let row = Row::lower("flat-slope", "cpu", "ns/B", slope(&points, |it| it.1));
        rows.push(row.against(MEMCPY, Kind::Floor, slope(&points, |it| it.2)).bar(2.0, MEMCPY)?);
    }
    if SIZES.iter().any(|size| is_wanted(&format!("trip-{size}"))) {
        cpus::pin(cpus.client)?;
        let samples = trips(&mut pair, effort.trips, interrupt)?;
        cpus::unpin()?;
        let shortest = samples[0].summary().p50 as f64;
        for (size, sample) in SIZES.into_iter().zip(&samples) {
            let name = format!("trip-{size}");
            let mut of_size = Row::round_trip(&name, sample);
            let median = of_size.remove(0).against("64-bytes", Kind::Floor, shortest);
            rows.extend([median].into_iter().chain(of_size).filter(|_| is_wanted(&name)));
        }
    }
    Ok(rows)
}

/// Returns the slope of the line that lies nearest to these points by `y` over the first of each (least squares).
fn slope(points: &[(f64, f64, f64)], y: fn(&(f64, f64, f64)) -> f64) -> f64 {
    let count = points.len() as f64;
    let middle = points.iter().map(|it| it.0).sum::<f64>() / count;
    let rise: f64 = points.iter().map(|it| (it.0 - middle) * y(it)).sum();
    rise / points.iter().map(|it| (it.0 - middle).powi(2)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_is_what_each_byte_more_costs() {
        let points = [(64.0, 10.0, 5.0), (128.0, 74.0, 5.0), (256.0, 202.0, 5.0)];
        assert!((slope(&points, |it| it.1) - 1.0).abs() < 1e-9 && slope(&points, |it| it.2).abs() < 1e-9);
    }
}
