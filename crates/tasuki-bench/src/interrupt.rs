//! SIGINT and SIGTERM as something to poll, so that an interrupted bench still cleans up.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Readable once the user or the system asked the bench to stop.
#[derive(Debug)]
pub struct Interrupt(UnixStream);

impl Interrupt {
    /// From now on, the two signals no longer kill the process.
    pub fn catch() -> Result<Self> {
        let (reader, writer) = UnixStream::pair().context("no socket pair could be made for signals")?;
        for signal in [SIGINT, SIGTERM] {
            let writer = writer.try_clone().context("no descriptor is left for signals")?;
            signal_hook::low_level::pipe::register(signal, writer).context("signals could not be caught")?;
        }
        Ok(Interrupt(reader))
    }

    /// Refuses to go on if somebody asked to stop.
    pub fn check(&self) -> Result<()> {
        let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
        // A wait that a signal cut short is asked again soon.
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
