//! HTTP on a unix socket. [`types`] are its JSON, [`server`] puts requests into the daemon's loop, and [`client`] is
//! the command line's end. A [`capture`] is an answer that goes on, in the format of [`pcapng`]. [`metrics`] are the
//! counts for Prometheus. All other requests come in by the [`gate`]: it knows each [`peer`] from the kernel, and checks
//! its [`roles`].

pub mod capture;
pub mod client;
pub mod gate;
pub mod metrics;
pub mod pcapng;
pub mod peer;
pub mod roles;
pub mod server;
pub mod types;
