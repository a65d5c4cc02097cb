//! The daemon and the command line from outside.
#![allow(clippy::tests_outside_test_module, reason = "the whole program is tests")]

mod becomes;
mod daemon;
mod schema;
