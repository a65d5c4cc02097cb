//! The process that drives a node's ports: the stock worker, and the library from which you build a worker with a
//! program of your own.
//!
//! A [`Program`] handles frames in [turns](Turn); a turn happens wholly or not at all. Its `main` only calls
//! [`main`]. docs/users/own-programs.md has the promises to a program and its duties; docs/design/worker.md says how it
//! works. The examples are programs to copy from.
//!
//! | module                    | contents                                                                       |
//! |---------------------------|--------------------------------------------------------------------------------|
//! | `stock`                   | the command line; `run` drives a card by hand                                  |
//! | `node`, `spin`            | the worker's loop: set-up, orders, sleep; how long it looks on before that     |
//! | `channel`, `lease_page`   | the socket to the daemon, and memory shared with it; `exit_mark`: a word there |
//! | `confine`, `cpus`, `warm` | rights that a worker gives up, its CPUs, its warm-up                           |
//! | `attached`                | the loop's interface to a NIC (`attachment`) or an end (`vni`)                 |
//! | `handler`                 | the interface between an attachment and its frame handler                      |
//! | `work`, `answer`, `tap`   | the stock worker's frame handlers; `numbered`, `pace`: frames with numbers     |
//! | `program`, `hosted`       | a user's own program: its trait, and its work on one NIC                       |
//! | `endpoint`, `uplink`      | the node's programs, and other stations, at its end of a VNI                   |
//! | `bundle`, `store`         | a NIC, and its driver state, for the next worker                               |
//! | `open`, `device`, `model` | the opener, a card by its name, our model of one                               |

mod answer;
mod bundle;
mod confine;
mod cpus;
mod device;
mod endpoint;
mod fail;
mod handler;
mod hosted;
mod lease_page;
mod model;
mod node;
mod numbered;
mod open;
mod pace;

mod attached;
mod attachment;
mod channel;
mod exit_mark;
mod program;
mod run;
mod spin;
mod stock;
mod store;
mod tap;
mod uplink;
mod vni;
mod warm;
mod work;

/// Compiles the code in that page with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/users/own-programs.md")]
struct OwnPrograms;

use std::process::ExitCode;

pub use program::{Fate, InHand, Program, STATE_MAX, Turn};
pub use tasuki_net::nic::Mac;
pub use tasuki_net::port::Transactional;

/// Returns an error as one sentence, with each cause that the sentence does not contain already.
fn sentence(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said {
        said if said.is_empty() => cause,
        said if said.contains(&cause) => said,
        said => format!("{said}: {cause}"),
    })
}

/// Runs a worker with your program: the whole `main` of a program of your own.
///
/// tasukid starts the program with the word `worker`. The program then gives up all rights that it does not need, and
/// drives the NICs of its node with a `P` for each. It ends on the daemon's order. It needs no privileges and gets no
/// arguments: the node's `options` hold the settings of `P`.
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

/// Runs the program `tasuki-worker`.
#[doc(hidden)]
pub fn stock() -> ExitCode {
    stock::run()
}
