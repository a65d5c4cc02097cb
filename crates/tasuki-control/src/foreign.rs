//! Descriptors that came from another process. Closing one can take as long as its file system likes (FUSE and NFS
//! are asked, a socket may linger). So threads of their own close them, never the thread that received them.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::SealFlags;
use tasuki_shm::wake::is_eventfd;

/// Batches that may wait for the thread that closes: more than a worker may bring at once.
const BATCHES_MAX: usize = 1024;
/// Threads that may wait for a close.
const WAITING_MAX: usize = 64;
/// How long the thread that closes waits if all of those wait. Then descriptors stay open until one of the threads has
/// ended: better so than a daemon that waits.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

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
    static QUEUE: Mutex<Option<SyncSender<Vec<OwnedFd>>>> = Mutex::new(None);
    let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    // The kernel may have a thread again that it had not at the last close.
    if queue.is_none() {
        *queue = begin_thread();
    }
    let left = match &*queue {
        Some(queue) => queue.try_send(fds).err().map(|error| match error {
            std::sync::mpsc::TrySendError::Full(fds) | std::sync::mpsc::TrySendError::Disconnected(fds) => fds,
        }),
        None => Some(fds),
    };
    left.into_iter().flatten().filter(|fd| !is_closed_at_once(fd)).for_each(leave_open);
}

fn begin_thread() -> Option<SyncSender<Vec<OwnedFd>>> {
    let (queue, due) = sync_channel::<Vec<OwnedFd>>(BATCHES_MAX);
    let thread = std::thread::Builder::new().name("closes".to_owned());
    let mut closer = Closer::default();
    let close = move || {
        crate::spawn::hold_signals();
        due.into_iter().flatten().for_each(|fd| closer.close(fd));
    };
    thread.spawn(close).ok()?;
    Some(queue)
}

/// Returns whether to close a descriptor takes no time. A virtual machine has many eventfds, and a thread for each would be
/// more work than the close.
fn is_closed_at_once(fd: &OwnedFd) -> bool {
    seals(fd).is_some() || is_eventfd(fd.as_fd())
}

/// The thread that closes.
#[derive(Default)]
struct Closer {
    /// Threads that wait for a close, and the news that one has ended.
    waiting: Arc<(Mutex<usize>, Condvar)>,
    /// The threads were waited for in vain, and none has ended since.
    is_stuck: bool,
}

impl Closer {
    /// Closes one descriptor, in a thread of its own if that may take long. While one close waits, the other descriptors
    /// must not remain in this process: a child that is just being started would close them, too, and wait as long.
    fn close(&mut self, fd: OwnedFd) {
        if is_closed_at_once(&fd) {
            return drop(fd);
        }
        let (count, ended) = &*self.waiting;
        let timeout = if self.is_stuck { Duration::ZERO } else { CLOSE_TIMEOUT };
        let all_wait = |waiting: &mut usize| *waiting >= WAITING_MAX;
        let waiting = count.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut waiting, waited) =
            ended.wait_timeout_while(waiting, timeout, all_wait).unwrap_or_else(PoisonError::into_inner);
        self.is_stuck = waited.timed_out();
        if self.is_stuck {
            return leave_open(fd);
        }
        let shared = self.waiting.clone();
        let closing = std::thread::Builder::new().name(format!("closes {}", fd.as_raw_fd())).spawn(move || {
            drop(fd);
            let (count, ended) = &*shared;
            *count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
            ended.notify_one();
        });
        // Without a thread, the descriptor has been closed with what it was to run.
        *waiting += usize::from(closing.is_ok());
    }
}

fn leave_open(fd: OwnedFd) {
    tracing::error!(
        "descriptor {} that came from a worker stays open: too many others take their time to close, or the kernel has no thread left (pids.max)",
        fd.as_raw_fd()
    );
    std::mem::forget(fd);
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    /// Returns whether nobody has the other end of a pipe open.
    fn is_closed(pipe: &OwnedFd) -> bool {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(pipe, PollFlags::empty())], Some(&limit)) == Ok(1)
    }

    #[test]
    fn of_many_descriptors_at_once_none_stays_open() {
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..400).map(|_| rustix::pipe::pipe().expect("a pipe")).unzip();
        drop(Foreign::new(theirs));
        assert!(ours.iter().all(is_closed));
    }

    #[test]
    fn if_all_threads_wait_a_descriptor_is_closed_once_one_has_ended() {
        let mut closer = Closer::default();
        let shared = closer.waiting.clone();
        *shared.0.lock().expect("it is there") = WAITING_MAX;
        let (ours, theirs) = rustix::pipe::pipe().expect("a pipe");
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| closer.close(theirs));
            // The closer waits, or finds that one has ended.
            *shared.0.lock().expect("it is there") -= 1;
            shared.1.notify_one();
            closing.join().expect("it does not panic");
        });
        assert!(is_closed(&ours));
        let all_wait = |waiting: &mut usize| *waiting == WAITING_MAX;
        drop(shared.1.wait_while(shared.0.lock().expect("it is there"), all_wait).expect("it is there"));
        // Nothing ends: what stays open is the descriptor, and nobody waits for the next one.
        *shared.0.lock().expect("it is there") = WAITING_MAX;
        closer.close(rustix::pipe::pipe().expect("a pipe").0);
        assert!(closer.is_stuck);
        let (ours, theirs) = rustix::pipe::pipe().expect("a pipe");
        *shared.0.lock().expect("it is there") = 0;
        closer.close(theirs);
        assert!(is_closed(&ours) && !closer.is_stuck);
    }
}
