//! The card's process: the model, and what it is plugged into.

use std::time::{Duration, Instant};

use anyhow::Result;
use tasuki_sim::e1000e::{Device, Options};
use tasuki_sim::model::Model;
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::virtio_net;
use tasuki_sim::wire::{Source, SourceOptions, Wire};

use super::trial::{Ask, Control, Outcome, Say, Trial};
use crate::orders::Orders;

/// From a reset to the link: what a trial waits for, and not what it measures.
const LINK_UP_NS: u64 = 1_000_000;

/// Rounds of the model after which it looks for messages.
const UNHEARD: u32 = 1024;

/// Frames a second at which the model sleeps between two. Woken it goes before everybody else then, for silicon is held up by nobody; at more it would take its CPU from all that
/// share it, and its time stands still when it is held up.
const SLOW: u64 = 10_000;

/// Its nice value then. At -20, or as SCHED_FIFO, it keeps its CPU from tasukid while it looks for work in vain.
const FIRST: i32 = -5;

/// A frame that has not come back so long after the last one is lost. A driver that a busy machine does not run for a while has lost none.
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

/// Where a trial is.
enum Stage {
    Idle,
    Sending,
    Sent,
    /// The driver has ended: what is under way still comes back. How many had, and when the last one did.
    Ending(u64, Instant),
}

/// Plays one trial after the other until the driver goes.
pub fn serve_trials(mut orders: Orders, size: u32) -> Result<()> {
    let server = Server::over(orders.next_fd()?)?;
    play(server, orders, size, card(LINK_UP_NS))
}

/// Where a card is served that a daemon finds by its path.
pub const SOCKET: &str = "card.sock";

/// The same, for a system that opens the card by its path.
pub fn serve_system(orders: Orders, size: u32) -> Result<()> {
    serve_card(orders, size, LINK_UP_NS)
}

/// The same with a card that needs so long from a reset to the link.
pub fn serve_card(mut orders: Orders, size: u32, link_up_ns: u64) -> Result<()> {
    // The connection that other cases use.
    drop(orders.next_fd()?);
    let server = Server::bind(&orders.directory.join(SOCKET))?;
    play(server, orders, size, card(link_up_ns))
}

/// The same with a virtio network device.
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
    let mut stalled = 0;
    let mut result = Ok(());
    let mut rounds = 0_u32;
    served.serve(&mut server, |served| {
        rounds = rounds.wrapping_add(1);
        if !rounds.is_multiple_of(UNHEARD) {
            return true;
        }
        if control.is_over() {
            return false;
        }
        result = turn(served, &control, &mut stage, &mut stalled);
        result.is_ok()
    })?;
    result
}

fn turn(
    served: &mut Served<Source, impl Model>,
    control: &Control,
    stage: &mut Stage,
    stalled: &mut u64,
) -> Result<()> {
    match control.heard()? {
        Some(Ask::Begin(trial)) => {
            *stalled = served.stalls().sum;
            *served.wire() = source(trial);
            *stage = Stage::Sending;
            if trial.rate.is_some_and(|rate| rate <= SLOW) {
                // Where it may not, what holds it up is in the gaps too.
                let _ = rustix::process::setpriority_process(None, FIRST);
                tasuki_shm::slice::brief();
            }
        }
        Some(Ask::Window) => {
            let (gap, trip) = served.wire().window();
            control.say(&Say::Window(gap, trip))?;
        }
        Some(Ask::End) => {
            // It may have frames left to send.
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

/// A wire with one frame on it, which is sent again as soon as it has come back.
#[derive(Debug)]
struct Pinger {
    frame: [u8; 60],
    number: u64,
    left: Option<Instant>,
    /// How long each took, in ns.
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

/// Sends frames that the driver sends back, one at a time, from the moment that it says so; then says how long each was away.
pub fn serve_pings(mut orders: Orders) -> Result<()> {
    let mut server = Server::over(orders.next_fd()?)?;
    let control = Control::new(orders.next_fd()?);
    let mut frame = [0; 60];
    frame[..12].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 0x51]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    let total = usize::try_from(orders.total())?;
    // Nothing is on the wire before the driver is ready.
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

/// Trips in a message, at most: a packet has room for each with twenty digits.
pub const TRIPS: usize = 150;

fn say_trips(control: &Control, trips: &[u64]) -> Result<()> {
    trips.chunks(TRIPS).try_for_each(|trips| control.say(&trips))
}
