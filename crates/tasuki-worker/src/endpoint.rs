//! The endpoint of a node on a VNI: where its programs send and receive, as the daemon made it.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use tasuki_net::endpoint::rate::{Limit, Rate, Rates};
use tasuki_net::endpoint::{self, Parts};
use tasuki_relay::message::{self, Client};

use crate::lease_page::ProgramState;

/// The daemon's description of an endpoint, and its descriptor. The worker keeps them to its end, also when
/// the node's end of the VNI is taken from it.
#[derive(Debug)]
pub struct Endpoint {
    description: message::Endpoint,
    node: String,
    fd: OwnedFd,
}

impl Endpoint {
    /// Takes over the endpoint of node `node`.
    pub fn new(description: message::Endpoint, node: String, fd: OwnedFd) -> Self {
        Endpoint { description, node, fd }
    }

    /// Returns the name by which users know it.
    pub fn label(&self) -> &str {
        &self.description.label
    }

    /// Opens it for this node of the VNI. It shares the loans from the first: one that stands by keeps a client that has gone
    /// while its loan is due.
    ///
    /// # Errors
    /// A sentence: this worker does not know it, or it is none.
    pub fn open(&self, program_state: &ProgramState, number: u16) -> Result<Box<dyn endpoint::Endpoint>> {
        let fd = self.fd.as_fd().try_clone_to_owned();
        let fd = fd.context("a descriptor cannot be copied; raise RLIMIT_NOFILE")?;
        let message::Endpoint { kind, text, .. } = &self.description;
        let mut endpoint = endpoint::open(kind, fd, text, &self.node).map_err(anyhow::Error::msg)?;
        endpoint.share(program_state.loans(), number);
        Ok(endpoint)
    }

    /// Returns how long a frame may wait for others.
    pub fn latency(&self) -> Duration {
        self.description.latency_us.map_or(endpoint::LATENCY, |us| Duration::from_micros(us.into()))
    }

    /// Returns the rates at which its programs may send and receive, after all that they did by other workers.
    pub fn rates(&self, program_state: &ProgramState) -> Rates {
        let [its, others] = self.description.limits;
        let [sends, receives] = program_state.dues();
        let rate = |limit: message::Limit, dues| {
            let burst = Duration::from_millis(limit.burst_ms.into());
            Rate::of(Limit { bits: limit.bits, frames: limit.frames, burst }, dues)
        };
        Rates { sends: rate(its, sends), receives: rate(others, receives) }
    }
}

/// Packs a client into a message and its descriptors.
pub fn pack(parts: Parts) -> (Client, Vec<OwnedFd>) {
    let Parts { name, text, fds, .. } = parts;
    (Client { name, text }, fds)
}

/// Unpacks a client. Its endpoint checks the parts.
pub fn unpack(client: Client, fds: Vec<OwnedFd>) -> Parts {
    let Client { name, text } = client;
    let number = fds.first().and_then(|socket| rustix::fs::fstat(socket).ok()).map_or(0, |stat| stat.st_ino);
    Parts { name, number, version: 0, text, fds }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use tasuki_relay::message::program_state;
    use tasuki_shm::region::{Pages, Region};
    use tasuki_shm::vni::loans::{Loan, Loans, State};

    use super::*;

    /// A worker that stands by has served nothing yet, and may be the one that says where the pairs stand.
    #[test]
    fn a_borrower_that_stands_by_keeps_a_machine_that_is_gone_until_its_loan_is_over() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("vm.sock")).unwrap();
        let memory = Region::create("program state", program_state::LEN, Pages::Small).unwrap();
        let program_state = ProgramState::over(memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let [kind, label, text] = ["vm-queue", "vm", ""].map(str::to_owned);
        let description = message::Endpoint { kind, label, text, limits: Default::default(), latency_us: None };
        let endpoint = Endpoint::new(description, "queue".to_owned(), listener.into());
        let loans = Loans::over(program_state.loans());
        let slot = loans.claim(2).unwrap();
        loans.set_device(slot, (7, 1));
        let home = loans.loan(slot);
        let lent = Loan { number: 1, first: 1, count: 1, state: State::Lent };
        assert!(loans.change(slot, home, lent));
        let mut opened = endpoint.open(&program_state, 2).unwrap();
        let connection = opened.connection().unwrap();
        connection.forget(7);
        assert!(connection.keeps_gone());
        assert!(loans.change(slot, lent, lent.to(State::Returned)));
        assert!(!connection.keeps_gone());
    }
}
