//! SIGINT and SIGTERM as a pollable descriptor, so that an interrupted bench still cleans up.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGINT, SIGTERM};

/// A descriptor that becomes readable once the user or the system has asked the bench to stop.
#[derive(Debug)]
pub struct Interrupt(UnixStream);

impl Interrupt {
    /// Catches the two signals: from now on they no longer kill the process.
    pub fn catch() -> Result<Self> {
        let (reader, writer) = UnixStream::pair().context("no socket pair could be made for signals")?;
        for signal in [SIGINT, SIGTERM] {
            let writer = writer.try_clone().context("no descriptor is left for signals")?;
            signal_hook::low_level::pipe::register(signal, writer).context("signals could not be caught")?;
        }
        Ok(Interrupt(reader))
    }

    /// Returns an error if a stop was requested.
    pub fn check(&self) -> Result<()> {
        let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
        // A poll that a signal cuts short counts as no request; the caller checks again soon.
        let came = rustix::event::poll(&mut polled, Some(&Timespec::default()));
        ensure!(!came.is_ok_and(|count| count > 0), "interrupted");
        Ok(())
    }
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
