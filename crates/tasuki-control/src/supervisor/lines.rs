//! Workers' output on standard error. Each worker has a pipe, of which the daemon logs whole lines, up to a limit.
//! No worker has the log itself.
//!
//! The pipe has a name in the daemon's directory, and a worker's end of it is open for reading, too. So no worker
//! dies of writing while no daemon runs, and the next daemon reads on. A worker that has written 64 KiB by then
//! waits for that daemon.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::{Supervisor, Token, epoll_add, now};
use crate::bucket::Bucket;
use crate::log::plain;

/// Bytes of a line; a longer line is cut.
const LINE_MAX: usize = 1000;
/// Lines of a worker that are logged at once, and the time until one more may be.
const LINES_AT_ONCE_MAX: u32 = 200;
const LINE_EVERY: Duration = Duration::from_millis(100);
/// Bytes read of one worker before the next has its turn, or a death is heard.
const READ_MAX: usize = 16 << 10;
/// Bytes read of a worker that is dead: more than its pipe holds, unless it made that larger.
const LAST_READ_MAX: usize = 128 << 10;

/// The daemon's end of a worker's pipe.
#[derive(Debug)]
pub struct Lines {
    pipe: File,
    begun: Vec<u8>,
    bucket: Bucket,
}

/// Returns the pipe's path, beside the worker's socket.
fn path_beside(socket: &Path) -> PathBuf {
    socket.with_extension("stderr")
}

/// Removes the name of a dead worker's pipe. A daemon that only exits leaves it to the next one.
pub fn forget(socket: &Path) {
    let _ = std::fs::remove_file(path_beside(socket));
}

impl Lines {
    /// Creates a pipe for the worker with this socket. Returns the worker's end, too.
    pub fn create(socket: &Path) -> std::io::Result<(Self, File)> {
        let path = path_beside(socket);
        let _ = std::fs::remove_file(&path);
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let lines = Self::find(socket)?;
        // An open file of its own: flags that the worker sets apply to its end alone.
        let its = OpenOptions::new().read(true).write(true).open(path)?;
        Ok((lines, its))
    }

    /// Opens the pipe of an earlier daemon's worker.
    pub fn find(socket: &Path) -> std::io::Result<Self> {
        let path = path_beside(socket);
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        Ok(Self::over(OpenOptions::new().read(true).custom_flags(flags).open(&path)?))
    }

    /// Reads on from an open pipe, which may have no name any more.
    pub fn over(pipe: File) -> Self {
        Lines { pipe, begun: Vec::new(), bucket: Bucket::new(LINES_AT_ONCE_MAX, LINE_EVERY, now()) }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    /// Returns the new lines to log, without terminal control characters, and when there may be more.
    fn read(&mut self, bytes_max: usize) -> (Vec<String>, Next) {
        let (mut lines, mut room, now) = (Vec::new(), [0; 4096], now());
        for _ in 0..bytes_max / room.len() {
            match self.pipe.read(&mut room) {
                Ok(0) => return (self.finish(now, lines), Next::Never),
                Ok(len) => self.split(now, &room[..len], &mut lines),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return (lines, Next::Later),
            }
        }
        (lines, Next::Later)
    }

    fn split(&mut self, now: Duration, bytes: &[u8], lines: &mut Vec<String>) {
        for &byte in bytes {
            if byte == b'\n' {
                self.end_line(now, lines);
            } else if self.begun.len() < LINE_MAX {
                self.begun.push(byte);
            }
        }
    }

    fn end_line(&mut self, now: Duration, lines: &mut Vec<String>) {
        if let Some(count) = self.bucket.left_out(now) {
            lines.push(left_out(count));
        }
        if self.bucket.take(now) {
            lines.push(printable(&self.begun));
        }
        self.begun.clear();
    }

    fn finish(&mut self, now: Duration, mut lines: Vec<String>) -> Vec<String> {
        if !self.begun.is_empty() {
            self.end_line(now, &mut lines);
        }
        let count = self.bucket.finish();
        lines.extend((count > 0).then(|| left_out(count)));
        lines
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    Later,
    Never,
}

fn left_out(count: u64) -> String {
    format!("({count} lines are left out: it writes more than tasukid logs)")
}

fn printable(bytes: &[u8]) -> String {
    plain(&String::from_utf8_lossy(bytes), LINE_MAX)
}

impl Supervisor {
    /// Has the loop read a worker's pipe.
    pub(super) fn epoll_add_lines(&self, number: u32, lines: &Lines) -> anyhow::Result<()> {
        epoll_add(&self.epoll, lines.pipe.as_fd(), Token::WorkerStderr(number))
    }

    /// Logs new lines of a worker, and notices the end of its pipe.
    pub(super) fn on_stderr(&mut self, number: u32) {
        self.read_lines(number, READ_MAX);
    }

    /// Logs the last lines of a dead worker.
    pub(super) fn read_last_lines(&mut self, number: u32) {
        self.read_lines(number, LAST_READ_MAX);
        if let Some(lines) = self.workers.get_mut(&number).and_then(|worker| worker.lines.as_mut()) {
            let left = lines.finish(now(), Vec::new());
            self.log_lines(number, left);
        }
    }

    fn read_lines(&mut self, number: u32, bytes_max: usize) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let Some(lines) = &mut worker.lines else { return };
        let (said, next) = lines.read(bytes_max);
        if next == Next::Never {
            let _ = rustix::event::epoll::delete(&self.epoll, &lines.pipe);
        }
        self.log_lines(number, said);
    }

    fn log_lines(&self, number: u32, said: Vec<String>) {
        let Some(node) = self.workers.get(&number).map(|worker| &worker.record.node) else { return };
        for line in said {
            tracing::info!(node, worker = number, "worker {number} of node {node} writes: {line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    /// Closes the worker's end, and waits for the end of the pipe: a child of another test has a copy until it executes its
    /// program.
    fn its_end(lines: &Lines, its: File) {
        drop(its);
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ended = rustix::event::poll(&mut [PollFd::new(&lines.pipe, PollFlags::empty())], Some(&limit));
        assert_eq!(ended, Ok(1));
    }

    #[test]
    fn lines_are_cut_cleaned_and_counted() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("worker-1.sock");
        let (mut lines, mut its) = Lines::create(&socket).expect("a pipe");
        assert_eq!(lines.read(READ_MAX), (Vec::new(), Next::Later));
        write!(its, "one\x1b[2J\ttwo\u{202e}\nhalf of ").expect("room");
        assert_eq!(lines.read(READ_MAX), (vec!["one [2J two ".to_owned()], Next::Later));
        writeln!(its, "a line").expect("room");
        writeln!(its, "{}", "x".repeat(5000)).expect("room");
        assert_eq!(lines.read(READ_MAX).0, ["half of a line".to_owned(), "x".repeat(LINE_MAX)]);
        for number in 0..1000 {
            writeln!(its, "{number}").expect("room");
        }
        let said = lines.read(READ_MAX).0;
        assert!((190..300).contains(&said.len()), "{}", said.len());
        // The next daemon reads on, and no worker dies of writing meanwhile.
        drop(lines);
        writeln!(its, "nobody reads this").expect("no daemon is no reason to fail");
        let mut lines = Lines::find(&socket).expect("it has a name");
        assert_eq!(lines.read(READ_MAX), (vec!["nobody reads this".to_owned()], Next::Later));
        write!(its, "the end").expect("room");
        its_end(&lines, its);
        assert_eq!(lines.read(READ_MAX), (vec!["the end".to_owned()], Next::Never));
        forget(&socket);
        assert!(Lines::find(&socket).is_err());
    }

    #[test]
    fn who_writes_too_much_is_told_of_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut lines, mut its) = Lines::create(&folder.path().join("worker-1.sock")).expect("a pipe");
        lines.bucket = Bucket::new(2, Duration::from_secs(3600), now());
        for number in 0..10 {
            writeln!(its, "{number}").expect("room");
        }
        its_end(&lines, its);
        let expected = ["0", "1", "(8 lines are left out: it writes more than tasukid logs)"];
        assert_eq!(lines.read(READ_MAX), (expected.map(str::to_owned).to_vec(), Next::Never));
    }

    #[test]
    fn a_flood_has_a_short_turn_and_no_line_of_it_goes_uncounted() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut lines, mut its) = Lines::create(&folder.path().join("worker-1.sock")).expect("a pipe");
        lines.bucket = Bucket::new(2, Duration::from_secs(3600), now());
        its.write_all(&[b'\n'; 60 << 10]).expect("a pipe holds 64 KiB");
        assert_eq!(lines.read(READ_MAX), (vec![String::new(); 2], Next::Later));
        let mut left = vec![0; 60 << 10];
        let len = lines.pipe.read(&mut left).expect("the rest waits");
        assert_eq!(len, (60 << 10) - READ_MAX);
        its_end(&lines, its);
        let count = READ_MAX - 2;
        let expected = format!("({count} lines are left out: it writes more than tasukid logs)");
        assert_eq!(lines.read(LAST_READ_MAX), (vec![expected], Next::Never));
    }
}
