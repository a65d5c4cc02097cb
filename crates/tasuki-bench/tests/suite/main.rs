//! The bench on the command line: what it refuses, and what it leaves out.
#![allow(clippy::tests_outside_test_module, reason = "the whole program is tests")]

mod demo;
mod roles;
mod vni;
