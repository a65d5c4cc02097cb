//! The orders of a role, and their transport: one message on a socket pair that is the role's standard input.
//!
//! Descriptors come in the same message (SCM_RIGHTS). This needs no numbers on the command line, no descriptor left
//! inheritable by chance, and no `unsafe` to believe in a number.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};

/// Most descriptors that one role can receive.
const MOST_FDS: usize = 128;

/// Longest message in bytes; the directory is the only part that varies much.
const LONGEST_MESSAGE: usize = 16 * 1024;

/// Orders of a role.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Number of calls to make before measuring.
    pub warmup: u64,
    /// Number of calls to measure.
    pub calls: u64,
    /// CPU to stay on.
    pub cpu: usize,
    /// Fresh directory that both roles share. The bench removes it after the pair has ended.
    pub directory: PathBuf,
    /// Prefix for names in `/dev/shm`. The bench removes such names after the pair has ended.
    pub shm_prefix: String,
    /// Descriptors that the case prepared for this role, in order.
    #[serde(skip)]
    fds: Fds,
}

/// Descriptors that came in a message, in order.
#[derive(Debug, Default)]
pub struct Fds(VecDeque<OwnedFd>);

impl Fds {
    /// Wraps descriptors of this process.
    pub fn of(fds: Vec<OwnedFd>) -> Self {
        Fds(fds.into())
    }

    /// Takes the next descriptor.
    pub fn next(&mut self) -> Result<OwnedFd> {
        self.0.pop_front().context("fewer descriptors came than are needed")
    }

    /// Sends `message` with `fds` through `socket`.
    pub fn send(socket: BorrowedFd<'_>, message: &[u8], fds: &[OwnedFd]) -> Result<()> {
        ensure!(fds.len() <= MOST_FDS, "{} descriptors were prepared, but a role can take {MOST_FDS}", fds.len());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)
            .context("the role ended before it took its orders")?;
        Ok(())
    }

    /// Waits for a message from `socket`, and returns it with its descriptors.
    pub fn receive(socket: BorrowedFd<'_>) -> Result<(Vec<u8>, Self)> {
        let mut message = vec![0; LONGEST_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got =
            rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC)
                .context("no orders on standard input; roles are started by a bench and not by hand")?;
        message.truncate(got.bytes);
        let mut all = Fds::default();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                all.0.extend(fds);
            }
        }
        Ok((message, all))
    }
}

impl Orders {
    /// Makes orders without descriptors.
    pub fn new(warmup: u64, calls: u64, cpu: usize, directory: PathBuf, shm_prefix: String) -> Self {
        Orders { warmup, calls, cpu, directory, shm_prefix, fds: Fds::default() }
    }

    /// Adds descriptors, for a role in this process.
    #[cfg(test)]
    pub fn with(self, fds: Vec<OwnedFd>) -> Self {
        Orders { fds: Fds::of(fds), ..self }
    }

    /// Returns the number of all calls: a server must answer them before it may leave.
    pub fn total(&self) -> u64 {
        self.warmup + self.calls
    }

    /// Takes the next descriptor, in the order in which the case prepared them.
    pub fn next_fd(&mut self) -> Result<OwnedFd> {
        self.fds.next()
    }

    /// Returns the descriptors that were not taken yet.
    pub fn fds(&mut self) -> &mut Fds {
        &mut self.fds
    }

    /// Sends the orders and `fds` through `socket`.
    pub fn send(&self, socket: BorrowedFd<'_>, fds: &[OwnedFd]) -> Result<()> {
        let message = serde_json::to_vec(self).context("orders could not be written as JSON")?;
        Fds::send(socket, &message, fds)
    }

    /// Waits for the orders from `socket`.
    pub fn receive(socket: BorrowedFd<'_>) -> Result<Self> {
        let (message, fds) = Fds::receive(socket)?;
        let orders: Orders = serde_json::from_slice(&message).context("the bench ended before it gave its orders")?;
        Ok(Orders { fds, ..orders })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn orders_arrive_with_their_descriptors_in_order() {
        let (ours, theirs) = pair();
        let (reader, writer) = std::io::pipe().unwrap();
        Orders::new(10, 90, 1, "/tmp/x".into(), "x_".into())
            .send(ours.as_fd(), &[reader.into(), writer.into()])
            .unwrap();

        let mut orders = Orders::receive(theirs.as_fd()).unwrap();
        assert_eq!((orders.total(), orders.cpu), (100, 1));
        let (reader, writer) = (orders.next_fd().unwrap(), orders.next_fd().unwrap());
        rustix::io::write(&writer, b"!").unwrap();
        assert_eq!(rustix::io::read(&reader, &mut [0; 8]), Ok(1));
        assert!(orders.next_fd().is_err(), "there were two");
    }

    #[test]
    fn a_bench_that_is_gone_gives_no_orders() {
        let (ours, theirs) = pair();
        drop(ours);
        assert!(Orders::receive(theirs.as_fd()).is_err());
    }
}
