//! Descriptors that came from another process. To close one can take as long as its file system likes (FUSE and NFS are asked, a socket may linger), so
//! that is done by threads of their own, never where they were received.

use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};

use rustix::fs::SealFlags;

/// Batches that may wait for the thread that closes.
const BATCHES_MAX: usize = 256;
/// Threads that may wait for what they close. Beyond that it stays open: better so than a daemon that waits.
const WAITING_MAX: usize = 64;

/// Some of them; closed elsewhere.
#[derive(Debug, Default)]
pub struct Foreign(Vec<OwnedFd>);

impl Foreign {
    /// These.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Foreign(fds)
    }

    /// The sender is trusted, or it was seen that closing them takes no time.
    pub fn trust(mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0)
    }
}

impl Deref for Foreign {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.0
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let fds = std::mem::take(&mut self.0);
        if !fds.is_empty() {
            close(fds);
        }
    }
}

/// The seals of memory, which is the only thing that has some. No file system is asked.
pub fn seals(fd: &OwnedFd) -> Option<SealFlags> {
    rustix::fs::fcntl_get_seals(fd).ok()
}

fn close(fds: Vec<OwnedFd>) {
    static QUEUE: LazyLock<Option<SyncSender<Vec<OwnedFd>>>> = LazyLock::new(|| {
        let (queue, due) = sync_channel::<Vec<OwnedFd>>(BATCHES_MAX);
        let thread = std::thread::Builder::new().name("closes".to_owned());
        thread.spawn(move || due.into_iter().flatten().for_each(close_one)).ok()?;
        Some(queue)
    });
    let left = match &*QUEUE {
        Some(queue) => queue.try_send(fds).err().map(|error| match error {
            std::sync::mpsc::TrySendError::Full(fds) | std::sync::mpsc::TrySendError::Disconnected(fds) => fds,
        }),
        None => Some(fds),
    };
    left.into_iter().flatten().for_each(leave_open);
}

/// While one waits, the others must not be in this process: a child that is just being started would close them, too, and wait as long.
fn close_one(fd: OwnedFd) {
    static WAITING: AtomicUsize = AtomicUsize::new(0);
    if seals(&fd).is_some() {
        return drop(fd);
    }
    if WAITING.load(Relaxed) >= WAITING_MAX {
        return leave_open(fd);
    }
    WAITING.fetch_add(1, Relaxed);
    let number = fd.as_raw_fd();
    let closing = std::thread::Builder::new().name(format!("closes {number}")).spawn(move || {
        drop(fd);
        WAITING.fetch_sub(1, Relaxed);
    });
    if closing.is_err() {
        WAITING.fetch_sub(1, Relaxed);
    }
}

fn leave_open(fd: OwnedFd) {
    tracing::error!(
        "descriptor {} that came from a worker stays open: too many others take their time to close",
        fd.as_raw_fd()
    );
    std::mem::forget(fd);
}
