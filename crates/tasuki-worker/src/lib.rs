//! The process that drives a node's ports.

mod answer;
mod board;
mod confine;
mod device;
mod duty;
mod fail;
mod kit;
mod model;
mod node;
mod numbered;
mod open;
mod pace;
mod post;
mod run;
mod seat;
mod stock;
mod store;
mod tomb;
mod warm;
mod work;

use std::process::ExitCode;

/// What went wrong, with those of its causes that it does not name itself.
fn sentence(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said {
        said if said.is_empty() => cause,
        said if said.contains(&cause) => said,
        said => format!("{said}: {cause}"),
    })
}

/// The program `tasuki-worker`.
#[doc(hidden)]
pub fn stock() -> ExitCode {
    stock::run()
}
