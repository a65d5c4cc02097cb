//! HTTP on a unix socket: [`types`] are what is said, [`server`] puts it into the daemon's loop, [`client`] is the command line's end. A [`capture`] is
//! an answer that goes on, in the form of [`pcapng`]. All come in by the [`gate`], which knows each [`peer`] by the kernel's word, and lets it do what its
//! [`roles`] say.

pub mod capture;
pub mod client;
pub mod gate;
pub mod pcapng;
pub mod peer;
pub mod roles;
pub mod server;
pub mod types;
