//! The demo fits on one screen: a network card changes hands while packets flow, and calls go on between processes
//! whose servers are replaced or die. On request, this machine's own kernel is on the wire of such a card.

mod calls;
mod cards;
mod iperf;
mod ping;
pub mod wire;

use anyhow::Result;

use crate::cpus::Cpus;
use crate::interrupt::Interrupt;
use crate::workplace;

pub use calls::{Office, serve};
pub use cards::CASES;
pub use ping::ping;

/// Other end of the demo card's cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Cable {
    /// This machine's kernel.
    Tap,
}

/// Runs the demo.
pub fn run(cable: Option<Cable>) -> Result<()> {
    if cable == Some(Cable::Tap) {
        ping::is_possible()?;
    }
    workplace::sweep();
    let cpus = Cpus::choose()?;
    let interrupt = Interrupt::catch()?;
    println!("Tasuki: network cards and services that change hands, or whose programs die, while the work goes on");
    cards::show(cpus, &interrupt)?;
    match cable {
        Some(Cable::Tap) => ping::show(&interrupt),
        None => calls::show(cpus, &interrupt),
    }
}
