//! HTTP on a unix socket: [`types`] are what is said, [`server`] puts it into the daemon's loop, [`client`] is the command line's end.

pub mod client;
pub mod server;
pub mod types;
