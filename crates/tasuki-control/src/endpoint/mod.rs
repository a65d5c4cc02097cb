//! The endpoints that the daemon makes for a node's workers; by them a node's programs are on a VNI. A TAP is made
//! elsewhere ([`taps`](crate::supervisor::taps)), as it may stand for a NIC too, and may have a shortcut.
//!
//! A kind has one file here, with its settings and its [`Kind`], and one in `tasuki_net::endpoint`, with its data path.

pub mod interface;
pub mod memif;
pub mod socket;
pub mod vm;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::Result;

/// The settings of one endpoint. There may be several stations behind each kind, with addresses of their own: a client and
/// a guest choose theirs, and an interface has a network behind it.
pub trait Kind: fmt::Debug {
    /// Returns the name of the kind, for workers.
    fn kind(&self) -> &'static str;

    /// Returns the name of the kind in the configuration.
    fn key(&self) -> &'static str {
        self.kind()
    }

    /// Returns the name by which users know this endpoint. No two nodes have the same one.
    fn label(&self) -> String;

    /// Returns its line in a status, for users.
    fn shown(&self) -> String;

    /// Returns the settings that workers need besides the descriptor.
    fn text(&self) -> String;

    /// Returns the fault of the settings, if there is one.
    fn odd(&self) -> Option<String>;

    /// Returns the path of the socket at which programs connect, if they do: these must not notice when a worker is
    /// replaced.
    fn socket(&self) -> Option<&Path> {
        None
    }

    /// Makes the endpoint. Every worker of the node gets the descriptor.
    ///
    /// # Errors
    /// A sentence for the user: it cannot be made as yet.
    fn make(&self) -> Result<OwnedFd>;

    /// Returns a mark that tells this endpoint from another of the same name, if it exists: a descriptor that an
    /// earlier daemon made is of use only while that has not changed.
    fn mark(&self) -> Option<String> {
        socket::mark(self.socket()?)
    }

    /// Removes the parts that do not go with its descriptors.
    fn remove(&self) {
        if let Some(socket) = self.socket() {
            let _ = std::fs::remove_file(socket);
        }
    }
}
