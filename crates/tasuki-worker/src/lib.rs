//! The process that drives a node's ports: the stock worker, and what a program of your own needs to be one.
//!
//! A [`Program`] handles frames in [turns](Turn) that happen wholly or not at all; [`main`] is all that its `main` does. docs/users/own-programs.md
//! says what is promised and what is to be kept to, and docs/design/worker.md how it works. The examples are programs to copy from.

mod answer;
mod bundle;
mod confine;
mod cpus;
mod device;
mod fail;
mod handler;
mod hosted;
mod lease_page;
mod memif;
mod model;
mod node;
mod numbered;
mod open;
mod pace;

mod attachment;
mod channel;
mod exit_mark;
mod program;
mod run;
mod stock;
mod store;
mod tap;
mod vni;
mod warm;
mod work;

/// Its code is compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/users/own-programs.md")]
struct OwnPrograms;

use std::process::ExitCode;

pub use program::{Fate, InHand, Program, STATE_MAX, Turn};
pub use tasuki_net::nic::Mac;
pub use tasuki_net::port::Transactional;

/// What went wrong, with those of its causes that it does not name itself.
fn sentence(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said {
        said if said.is_empty() => cause,
        said if said.contains(&cause) => said,
        said => format!("{said}: {cause}"),
    })
}

/// All that a program of your own does in its `main`.
///
/// tasukid starts it with the word `worker`; it then gives up all that it does not need, drives the NICs of its node with a `P` for each, and ends when
/// it is told to. It needs no privileges and gets no arguments: what `P` must know stands in the node's `options`.
pub fn main<P: Program>() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let done = match &words[..] {
        [word] if word == "worker" => node::run::<hosted::Hosted<P>>(),
        _ => Err(anyhow::anyhow!(
            "this program drives a node's NICs, and is started by tasukid: write work = {{ program = {{ path = … }} }} for a node in its configuration, or tasuki worker upgrade NODE --with this program"
        )),
    };
    finish(done)
}

fn finish(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tasuki: {}", sentence(&error));
            ExitCode::FAILURE
        }
    }
}

/// The program `tasuki-worker`.
#[doc(hidden)]
pub fn stock() -> ExitCode {
    stock::run()
}
