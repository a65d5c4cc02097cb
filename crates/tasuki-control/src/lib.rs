//! The daemon. It starts workers, orders relays, and keeps the state that must outlive a worker. No packet passes
//! through it, and its death stops none.
//!
//! [`supervisor`] is one thread and one loop; [`api`] is another thread that speaks HTTP and puts requests into that
//! loop.

#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the audience is ourselves: a comment says what a name cannot")]

pub mod api;
pub mod bucket;
pub mod cgroup;
pub mod channel;
pub mod cli;
pub mod cni;
pub mod config;
pub mod endpoint;
pub mod foreign;
pub mod housekeeping_cpus;
pub mod jail;
pub mod keeper;
pub mod log;
pub mod netavark;
pub mod place;
pub mod process;
pub mod registry;
pub mod spawn;
pub mod successor;
pub mod supervisor;
pub mod watchdog;
