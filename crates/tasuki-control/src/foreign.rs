//! Descriptors that came from another process. Closing one can take as long as its file system likes (FUSE and NFS
//! are asked, a socket may linger). So threads of their own close them, never the thread that received them.

use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};

use rustix::fs::SealFlags;

/// Batches that may wait for the thread that closes.
const BATCHES_MAX: usize = 256;
/// Threads that may wait for a close. Beyond that a descriptor stays open: better so than a daemon that waits.
const WAITING_MAX: usize = 64;

/// Foreign descriptors; another thread closes them.
#[derive(Debug, Default)]
pub struct Foreign(Vec<OwnedFd>);

impl Foreign {
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Foreign(fds)
    }

    /// Returns them as ordinary descriptors: the sender is trusted, or closing them is known to take no time.
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

/// Returns the seals of memory; nothing else has any. No file system is asked.
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

/// Closes one descriptor in a thread of its own. While one close waits, the other descriptors must not remain in
/// this process: a child that is just being started would close them, too, and wait as long.
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
