//! HTTP on a unix socket: [`types`] are what is said, [`server`] puts it into the daemon's loop, [`client`] is the command line's end. A [`capture`] is
//! an answer that goes on, in the form of [`pcapng`].

pub mod capture;
pub mod client;
pub mod pcapng;
pub mod server;
pub mod types;
