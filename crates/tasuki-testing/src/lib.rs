//! Parts that the tests of several crates share. For `[dev-dependencies]` only. It depends on none of our crates, so
//! that all of them can use it.

mod alone;
mod dice;
mod program;
mod until;

pub mod descriptors;
pub mod process;

pub use alone::{alone, alone_under};
pub use dice::Dice;
pub use program::{Program, beside, copy, script};
pub use until::{PATIENCE, found, polled, until};
