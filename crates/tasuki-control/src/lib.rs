//! The daemon. It starts workers, orders relays, and keeps the state that must outlive a worker. No packet passes
//! through it, and its death stops none.
//!
//! | module                                | contents                                                             |
//! |---------------------------------------|----------------------------------------------------------------------|
//! | [`supervisor`]                        | one thread and one loop: all decisions of the daemon                 |
//! | [`api`]                               | another thread that speaks HTTP, and puts requests into that loop    |
//! | [`cli`]                               | the subcommands of `tasuki` that ask the API                         |
//! | [`cni`], [`netavark`]                 | plugins by which a container's interface becomes a node              |
//! | [`config`]                            | the configuration: its checks, and the steps to another one          |
//! | [`registry`], [`keeper`]              | the state for the next daemon: a file, and descriptors by a process  |
//! | [`successor`]                         | the program that the daemon goes on as                               |
//! | [`jail`], [`cgroup`], [`spawn`]       | confinement, bounds and start of a worker's process                  |
//! | [`endpoint`]                          | the endpoints that the daemon makes for nodes' programs              |
//! | [`channel`], [`process`], [`foreign`] | messages, processes by pidfd, and descriptors from other processes   |
//! | [`place`], [`log`], [`watchdog`]      | the runtime directory, the log, systemd's watchdog                   |
//! | [`bucket`], [`housekeeping_cpus`]     | a limit on a rate, and the CPUs without nodes                        |

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
