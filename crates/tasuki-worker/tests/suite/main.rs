//! Workers as real processes: what they report, refuse and leave behind, alone and under a small daemon.
#![allow(clippy::tests_outside_test_module, reason = "the whole program is tests")]

mod attacks;
mod daemon;
mod handover;
mod kills;
mod nic;
mod own;
mod programs;
mod refusals;
mod worker;
