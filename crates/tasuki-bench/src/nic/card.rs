//! Process of the card: the model and its wire.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::Result;
use tasuki_shm::clock::now_ns;
use tasuki_sim::e1000e::{Device, Options};
use tasuki_sim::model::Model;
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::virtio_net;
use tasuki_sim::wire::{Source, SourceOptions, Wire};

use super::trial::{Ask, Control, Outcome, Say, Trial};
use crate::orders::Orders;

/// Time from a reset to the link, in ns. A trial waits for it and does not measure it.
const LINK_UP_NS: u64 = 1_000_000;

/// Rounds of the model between two checks for messages.
const UNHEARD: u32 = 1024;

/// Highest rate, in frames a second, at which the model sleeps between frames.
///
/// At such rates the model runs with priority when woken, because nothing delays silicon. At higher rates it would
/// take its CPU from every process that shares it; there the model's time stands still while it is delayed.
const SLOW: u64 = 10_000;

/// Nice value of the model at such rates. At -20, or as SCHED_FIFO, it would keep its CPU from tasukid while it
/// polls in vain.
const FIRST: i32 = -5;

/// A frame that has not come back so long after the last one is lost. The time is long enough that a driver which a
/// busy machine suspends for a while loses none.
const PATIENCE: Duration = Duration::from_secs(2);

fn card(link_up_ns: u64) -> Device {
    Device::new(Options { link_up_ns, ..Options::default() })
}

fn source(trial: Trial) -> Source {
    Source::new(SourceOptions {
        to: [0xff; 6],
        from: [0x02, 0, 0, 0, 0, 0x51],
        size: trial.size,
        rate: trial.rate,
        count: trial.count,
        honours_pause: trial.pauses,
    })
}

/// Stage of a trial.
enum Stage {
    Idle,
    Sending,
    Sent,
    /// The driver has ended the trial, and frames under way still come back. Holds the number of frames received so
    /// far, and the time of the last one.
    Ending(u64, Instant),
}

/// Plays one trial after the other until the driver leaves.
pub fn serve_trials(mut orders: Orders, size: u32) -> Result<()> {
    let server = Server::over(orders.next_fd()?)?;
    play(server, orders, size, card(LINK_UP_NS))
}

/// Name of the socket for a daemon that finds the card by its path.
pub const SOCKET: &str = "card.sock";

/// Plays trials for a system that opens the card by its path.
pub fn serve_system(orders: Orders, size: u32) -> Result<()> {
    serve_card(orders, size, LINK_UP_NS)
}

/// Like [`serve_system`], with a card whose link needs `link_up_ns` after a reset.
pub fn serve_card(mut orders: Orders, size: u32, link_up_ns: u64) -> Result<()> {
    // Only other cases use this connection.
    drop(orders.next_fd()?);
    let server = Server::bind(&orders.directory.join(SOCKET))?;
    play(server, orders, size, card(link_up_ns))
}

/// Like [`serve_system`], with a virtio network device.
pub fn serve_virtio(mut orders: Orders, size: u32) -> Result<()> {
    drop(orders.next_fd()?);
    let server = Server::bind(&orders.directory.join(SOCKET))?;
    play(server, orders, size, virtio_net::Device::new(virtio_net::Options::default()))
}

fn play(mut server: Server, mut orders: Orders, size: u32, card: impl Model) -> Result<()> {
    let control = Control::new(orders.next_fd()?);
    control.say(&Say::Size(size))?;
    let mut served = Served::new(card, source(Trial { count: 0, size, rate: None, pauses: true }));
    let mut stage = Stage::Idle;
    let (mut stalled, mut stalls) = (0, StallLog::default());
    let mut result = Ok(());
    let mut rounds = 0_u32;
    served.serve(&mut server, |served| {
        stalls.look(served.stalls().sum);
        rounds = rounds.wrapping_add(1);
        if !rounds.is_multiple_of(UNHEARD) {
            return true;
        }
        if control.is_over() {
            return false;
        }
        result = turn(served, &control, &mut stage, (&mut stalled, &mut stalls));
        result.is_ok()
    })?;
    result
}

/// Times at which the machine did not run card and wire, by the clock that all processes share.
#[derive(Debug, Default)]
struct StallLog {
    /// Sum of all stalls until now, in ns.
    sum: u64,
    /// End and length of each stall since the last question, in ns.
    stalls: Vec<(u64, u64)>,
}

impl StallLog {
    /// Notes a stall that has just ended, if the sum of all has grown.
    fn look(&mut self, sum: u64) {
        if sum != self.sum {
            self.stalls.push((now_ns(), sum - self.sum));
            self.sum = sum;
        }
    }

    /// Returns the sum of stalls within `during`, and forgets all.
    fn take(&mut self, during: Range<u64>) -> u64 {
        let within =
            |(end, len): (u64, u64)| end.min(during.end).saturating_sub(end.saturating_sub(len).max(during.start));
        self.stalls.drain(..).map(within).sum()
    }
}

fn turn(
    served: &mut Served<Source, impl Model>,
    control: &Control,
    stage: &mut Stage,
    (stalled, stalls): (&mut u64, &mut StallLog),
) -> Result<()> {
    match control.heard()? {
        Some(Ask::Begin(trial)) => {
            *stalled = served.stalls().sum;
            stalls.take(0..0);
            *served.wire() = source(trial);
            *stage = Stage::Sending;
            if trial.rate.is_some_and(|rate| rate <= SLOW) {
                // If the priority is refused, delays of the model show up in the gaps too.
                let _ = rustix::process::setpriority_process(None, FIRST);
                tasuki_shm::slice::brief();
            }
        }
        Some(Ask::Window(from, to)) => {
            let (gap, trip, end) = served.wire().window();
            let ago = served.now().saturating_sub(end);
            control.say(&Say::Window(gap, trip, ago, stalls.take(from..to)))?;
        }
        Some(Ask::End) => {
            // Stop the wire: it may have frames left to send.
            served.wire().pause(true);
            *stage = Stage::Ending(served.wire().counts().received, Instant::now());
        }
        None => {}
    }
    match stage {
        Stage::Sending if served.wire().is_done() => {
            control.say(&Say::Sent)?;
            *stage = Stage::Sent;
        }
        Stage::Ending(before, since) => {
            let counts = served.wire().counts();
            if counts.received > *before {
                (*before, *since) = (counts.received, Instant::now());
            }
            if counts.received == counts.sent || since.elapsed() > PATIENCE {
                control.say(&Say::Outcome(Outcome {
                    sent: counts.sent,
                    back: counts.received,
                    wrong: counts.duplicated + counts.reordered + counts.damaged,
                    duplicated: counts.duplicated,
                    reordered: counts.reordered,
                    longest_gap: counts.longest_gap,
                    pauses: counts.pauses,
                    stalled: served.stalls().sum - *stalled,
                }))?;
                *stage = Stage::Idle;
            }
        }
        _ => {}
    }
    Ok(())
}

/// A wire with one frame on it. It sends the frame again as soon as it has come back.
#[derive(Debug)]
struct Pinger {
    frame: [u8; 60],
    number: u64,
    left: Option<Instant>,
    /// Duration of each trip, in ns.
    trips: Vec<u64>,
    total: usize,
}

impl Wire for Pinger {
    fn receive(&mut self, _: u64) -> Option<&[u8]> {
        if self.left.is_some() || self.trips.len() >= self.total {
            return None;
        }
        self.number += 1;
        self.frame[14..22].copy_from_slice(&self.number.to_ne_bytes());
        self.left = Some(Instant::now());
        Some(&self.frame)
    }

    fn send(&mut self, frame: &[u8], _: u64) {
        if frame.get(14..22) == Some(&self.number.to_ne_bytes()[..])
            && let Some(left) = self.left.take()
        {
            self.trips.push(u64::try_from(left.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
    }
}

/// Sends frames for the driver to send back, one at a time, once the driver asks for them. Then reports the duration
/// of each trip.
pub fn serve_pings(mut orders: Orders) -> Result<()> {
    let mut server = Server::over(orders.next_fd()?)?;
    let control = Control::new(orders.next_fd()?);
    let mut frame = [0; 60];
    frame[..12].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 0x51]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    let total = usize::try_from(orders.total())?;
    // Put nothing on the wire before the driver is ready.
    let wire = Pinger { frame, number: 0, left: None, trips: Vec::with_capacity(total), total: 0 };
    let mut served = Served::new(card(LINK_UP_NS), wire);
    let mut result = Ok(());
    let mut rounds = 0_u32;
    let mut told = false;
    served.serve(&mut server, |served| {
        rounds = rounds.wrapping_add(1);
        let wire = served.wire();
        if !told && wire.total > 0 && wire.trips.len() == wire.total {
            told = true;
            result = say_trips(&control, &wire.trips);
        }
        if wire.total == 0 && rounds.is_multiple_of(UNHEARD) && !control.is_over() {
            match control.heard::<Ask>() {
                Ok(Some(_)) => wire.total = total,
                Ok(None) => {}
                Err(error) => result = Err(error),
            }
        }
        result.is_ok()
    })?;
    result
}

/// Most trips in a message: a packet has room for each with twenty digits.
pub const TRIPS: usize = 150;

fn say_trips(control: &Control, trips: &[u64]) -> Result<()> {
    trips.chunks(TRIPS).try_for_each(|trips| control.say(&trips))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_counts_as_far_as_it_is_in_the_time_that_is_asked_for() {
        let log = || StallLog { sum: 0, stalls: vec![(100, 50), (300, 100), (410, 5)] };
        assert_eq!(log().take(0..1000), 155);
        assert_eq!(log().take(80..250), 20 + 50);
        assert_eq!(log().take(230..240), 10);
        assert_eq!(log().take(0..0) + log().take(500..600) + log().take(110..190), 0);
        let mut log = log();
        log.take(0..0);
        log.look(7);
        log.look(7);
        assert_eq!((log.stalls.len(), log.take(0..u64::MAX)), (1, 7));
    }
}
