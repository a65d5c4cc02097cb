//! A network card at line rate: a daemon, two nodes, and everything that can happen to the card's driver.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tasuki_control::api::types::Method;

use crate::case::Case;
use crate::cpus::{Cores, Cpus};
use crate::interrupt::Interrupt;
use crate::nic::card;
use crate::nic::trial::{Ask, Control, Trial};
use crate::nic::{driver, sockets};
use crate::orders::Orders;
use crate::pair;
use crate::program::PATIENCE;
use crate::relay::system::{Relay, System};
use crate::sample::{Sample, median};
use crate::table::number;

/// Time from a reset to the link, in ns, as on the real card.
const LINK_UP_NS: u64 = 2_200_000_000;

/// Bytes of a frame, with the check sequence: the shortest possible.
const SIZE: u32 = 64;

/// Quiet time between two relays.
const QUIET: Duration = Duration::from_millis(20);

/// An event for the card.
#[derive(Debug)]
pub struct Act {
    /// Short, unique name.
    pub name: &'static str,
    /// Description for a reader without background.
    pub what: &'static str,
    /// Relay to ask the daemon for.
    pub relay: Relay,
    /// Number of repetitions. A daemon that loses worker after worker waits longer each time before it starts
    /// another.
    pub times: u32,
    /// Whether frames may be lost.
    pub loses: bool,
    /// What stands below: times that the papers need for the same, or what the figures do not show.
    pub below: &'static str,
}

impl Act {
    /// Returns the description and the number of repetitions.
    pub fn title(&self) -> String {
        if self.times > 1 { format!("{}, {} ×", self.what, self.times) } else { self.what.to_owned() }
    }
}

/// Prints a line of the table.
pub fn line(what: &str, [a, b, c, d, e]: [String; 5]) {
    println!("  {what:<53}{a:>10}{b:>7}{c:>14}{d:>15}{e:>15}");
}

/// The acts, in the order in which they happen.
pub const ACTS: [Act; 4] = [
    Act {
        name: "upgrade",
        what: "the driving program is replaced by a fresh one",
        relay: Relay::Upgrade { store: false },
        times: 3,
        loses: false,
        // The papers time a replacement from the request to its result, which this table does not show.
        below: "",
    },
    Act {
        name: "takeover",
        what: "the driving program is killed; another stood by",
        relay: Relay::Takeover,
        times: 3,
        loses: false,
        below: "tasukid has the model's CPU meanwhile, so its wire stands still for part of the time, and shows less loss",
    },
    Act {
        name: "warm",
        what: "it goes to another owner as it is",
        relay: Relay::Give(Method::Keep),
        times: 3,
        loses: false,
        below: "Mint, by the interrupt's routing: nothing is received for less than 1,000 µs (S0)",
    },
    Act {
        name: "cold",
        what: "it goes to another owner by a reset, for comparison",
        relay: Relay::Give(Method::Cold),
        times: 1,
        loses: true,
        below: "Mint, by loading a kernel module: nothing is received for 2,259,000 µs (S0)",
    },
];

/// The demo's case: the model on one CPU, the workers on the other.
pub const CASES: &[Case] = &[Case {
    name: "demo-cards",
    cores: Cores::Other,
    calls: 1,
    full: 1,
    prepare: sockets,
    serve: |orders| card::serve_card(orders, SIZE, LINK_UP_NS),
    measure: play,
}];

/// Plays all acts, one after the other, under one daemon.
fn play(mut orders: Orders) -> Result<Sample> {
    let cpus = [orders.cpu; 2];
    let (system, control) = System::with_model(&mut orders, cpus, Relay::Takeover)?;
    let size = control.size()?;
    let mut sample = Sample::new();
    for act in &ACTS {
        let trial = Trial { count: u64::MAX, size, rate: Some(driver::line_rate(size)), pauses: true };
        control.say(&Ask::Begin(trial))?;
        for _ in 0..act.times {
            std::thread::sleep(QUIET);
            let pause = system.relay(act.relay)?.pause;
            sample.note(&format!("{} pause", act.name), pause as f64);
        }
        await_frames(&control).with_context(|| format!("{}: {}", act.what, system.describe()))?;
        let outcome = control.end()?;
        let mut note = |what: &str, value: u64| sample.note(&format!("{} {what}", act.name), value as f64);
        note("sent", outcome.sent);
        note("lost", outcome.sent - outcome.back);
        note("twice", outcome.duplicated);
        note("disorder", outcome.reordered);
        note("damaged", outcome.wrong - outcome.duplicated - outcome.reordered);
        note("gap", outcome.longest_gap);
    }
    Ok(sample)
}

/// Waits until frames come back: after a reset, until the link is up.
fn await_frames(control: &Control) -> Result<()> {
    let began = Instant::now();
    // The first answer covers the time before this call too.
    for round in 0_u32.. {
        let (gap, ..) = control.window(0..0)?;
        if gap > 0 && round > 0 {
            break;
        }
        ensure!(began.elapsed() < PATIENCE, "no frame comes back");
        std::thread::sleep(QUIET);
    }
    Ok(())
}

/// Runs the case and prints its results.
pub fn show(cpus: Cpus, interrupt: &Interrupt) -> Result<()> {
    println!("a network card (a model of Intel's 82574L) at 1 Gb/s: 1,488,095 frames a second, each sent back");
    line("frames", ["lost", "twice", "out of order", "nobody drives", "longest gap"].map(str::to_owned));
    let sample = pair::run(&CASES[0], CASES[0].calls, cpus, interrupt)?;
    for act in &ACTS {
        row(act, &sample);
    }
    for act in &ACTS {
        let sum = |what: &str| sample.numbers(&format!("{} {what}", act.name)).iter().sum::<f64>();
        let wrong = sum("twice") + sum("disorder") + sum("damaged") + if act.loses { 0.0 } else { sum("lost") };
        ensure!(
            wrong == 0.0,
            "{}: {} frames were lost, came twice, out of order or damaged, and none may: that is a bug",
            act.what,
            number(wrong)
        );
    }
    Ok(())
}

fn row(act: &Act, sample: &Sample) {
    let of = |what: &str| sample.numbers(&format!("{} {what}", act.name));
    let sum = |what: &str| number(of(what).iter().sum());
    let micros = |ns: f64| number((ns / 1e3).round()) + " µs";
    let pause = median(of("pause")).unwrap_or(f64::NAN);
    let gap = micros(of("gap").first().copied().unwrap_or(f64::NAN));
    line(&act.title(), [sum("lost"), sum("twice"), sum("disorder"), micros(pause), gap]);
    if !act.below.is_empty() {
        println!("      {}", act.below);
    }
}
