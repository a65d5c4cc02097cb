//! The demo: what Tasuki does, on one screen. A network card that changes hands while packets flow; calls between processes whose servers are
//! replaced or die under them; and, for who asks, this machine's own kernel on the wire of such a card.

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

/// What else the card of the demo is plugged into.
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
