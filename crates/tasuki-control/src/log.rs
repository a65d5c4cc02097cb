//! The daemon's log. A full disk ends no daemon: lines that cannot be written are counted, and their number is
//! written when there is room. Nor does a reader that stops hold one up (a pipe, a terminal, a disk that does not answer): a
//! thread writes the lines, which wait in a queue, and those that find the queue full are counted, too.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::Pid;
use tracing_subscriber::EnvFilter;

use crate::housekeeping_cpus;

/// Lines that may wait for the thread that writes: more than come at once with some hundred nodes.
const WAITING_MAX: usize = 4000;
/// How long a program that ends, or goes on as another, waits until all is written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// Lines lost since the last one that could be written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Number of the thread that writes; 0 if there is none.
static WRITER: AtomicI32 = AtomicI32::new(0);

/// The lines that wait, the news that there is one, and the news that none is left.
static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiting: VecDeque::new(), lost: 0, is_writing: false });
static COMES: Condvar = Condvar::new();
static IS_WRITTEN: Condvar = Condvar::new();

/// Lines on their way to the thread that writes.
#[derive(Debug)]
struct Queue {
    /// Each with the number of lines that were lost between the one before it and this one.
    waiting: VecDeque<(u64, Vec<u8>)>,
    /// Lines that have found no room since the last one here.
    lost: u64,
    /// The thread has taken a line and is at it.
    is_writing: bool,
}

impl Queue {
    fn put(&mut self, line: &[u8]) {
        if self.waiting.len() >= WAITING_MAX {
            self.lost += 1;
        } else {
            self.waiting.push_back((std::mem::take(&mut self.lost), line.to_vec()));
        }
    }
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a line by the thread, or at once if there is none.
struct Line;

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if WRITER.load(Relaxed) == 0 {
            return Log(io::stderr(), &LOST).write(line);
        }
        queue().put(line);
        COMES.notify_one();
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the thread that writes. If the kernel has none, lines are written at once.
fn begin_thread() {
    let (told, begun) = std::sync::mpsc::sync_channel(1);
    let go_on = move || {
        crate::spawn::hold_signals();
        let _ = told.send(rustix::thread::gettid());
        let mut queue = queue();
        loop {
            let Some((lost, line)) = queue.waiting.pop_front() else {
                queue.is_writing = false;
                IS_WRITTEN.notify_all();
                queue = COMES.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.is_writing = true;
            drop(queue);
            LOST.fetch_add(lost, Relaxed);
            let _ = Log(io::stderr(), &LOST).write(&line);
            queue = self::queue();
        }
    };
    if std::thread::Builder::new().name("log lines".to_owned()).spawn(go_on).is_ok()
        && let Ok(thread) = begun.recv()
    {
        WRITER.store(thread.as_raw_nonzero().get(), Relaxed);
    }
}

/// Waits until all lines are written, for a second at most: before this process ends, or goes on as another program.
pub fn finish() {
    let is_under_way = |queue: &mut Queue| queue.is_writing || !queue.waiting.is_empty();
    drop(IS_WRITTEN.wait_timeout_while(queue(), WRITE_TIMEOUT, is_under_way));
}

/// Moves the thread that writes to these CPUs.
pub fn pin(cpus: &[u32]) {
    Pid::from_raw(WRITER.load(Relaxed)).into_iter().for_each(|thread| housekeeping_cpus::pin(thread, cpus));
}

/// Standard error, to which writing never fails. Each write is a line.
struct Log<W>(W, &'static AtomicU64);

impl<W: Write> Write for Log<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lost = self.1.load(Relaxed);
        let said = match lost {
            0 => Ok(()),
            lost => writeln!(self.0, "{lost} lines before this one could not be written here"),
        };
        if said.is_ok() {
            self.1.fetch_sub(lost, Relaxed);
        }
        if said.and_then(|()| self.0.write_all(line)).is_err() {
            self.1.fetch_add(1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns at most `most` characters of a foreign text, without those that steer a terminal or change the order of
/// display.
pub fn plain(text: &str, most: usize) -> String {
    let steers = |c: char| {
        // Unicode 16.0, PropList.txt, Bidi_Control.
        let turns =
            matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}')
    };
    text.chars().take(most).map(|c| if steers(c) { ' ' } else { c }).collect()
}

/// Has `tracing` write to standard error from now on, and the message of a panic go there in its turn.
pub fn begin() {
    begin_thread();
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let trace = Backtrace::capture();
        let trace = if trace.status() == BacktraceStatus::Captured { format!("\n{trace}") } else { String::new() };
        say(&format!("thread '{}' {panic}{trace}", thread.name().unwrap_or_default()));
        finish();
    }));
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let colour = io::IsTerminal::is_terminal(&io::stderr());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour).with_target(false);
    // Its reports of lines that cannot be written go to the same place, by a macro that panics.
    log.log_internal_errors(false).with_writer(|| Line).init();
}

/// Returns the file that standard error goes to, if it is a file.
fn file() -> Option<PathBuf> {
    let is_file = File::from(rustix::io::dup(rustix::stdio::stderr()).ok()?).metadata().ok()?.is_file();
    let path = std::fs::read_link("/proc/self/fd/2").ok().filter(|_| is_file)?;
    let gone = path.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(PathBuf::from);
    Some(gone.unwrap_or(path))
}

fn open_anew(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    Ok(rustix::stdio::dup2_stderr(&file)?)
}

/// Opens the file of the log anew for each byte that comes, by the name that the file had at the time of this call:
/// logrotate has given the former file another name.
pub fn rotate_when(mut told: UnixStream) -> io::Result<()> {
    let file = file();
    let go_on = move || {
        crate::spawn::hold_signals();
        while told.read(&mut [0; 64]).is_ok_and(|len| len > 0) {
            match &file {
                None => tracing::info!("the log is no file, so there is none to open anew (SIGUSR1)"),
                Some(path) => match open_anew(path) {
                    Ok(()) => tracing::info!("{} is opened anew (SIGUSR1)", path.display()),
                    Err(error) => tracing::error!(
                        "{} cannot be opened anew ({error}), so the log goes on in the former file; mend that, and send SIGUSR1 again",
                        path.display()
                    ),
                },
            }
        }
    };
    std::thread::Builder::new().name("log".to_owned()).spawn(go_on).map(drop)
}

/// Writes a sentence to standard error, and ignores a failure.
pub fn say(sentence: &str) {
    let _ = Line.write_all(format!("{sentence}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for this many writes.
    struct Disk(usize, Vec<u8>);

    impl Write for &mut Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
            self.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_find_the_queue_full_are_counted_before_the_next_one() {
        let mut queue = Queue { waiting: VecDeque::new(), lost: 0, is_writing: false };
        (0..WAITING_MAX + 2).for_each(|number| queue.put(&number.to_ne_bytes()));
        let first = queue.waiting.pop_front();
        queue.put(b"next");
        let before_last = queue.waiting.get(WAITING_MAX - 2).cloned();
        assert_eq!(first, Some((0, 0_usize.to_ne_bytes().to_vec())));
        assert_eq!(before_last, Some((0, (WAITING_MAX - 1).to_ne_bytes().to_vec())));
        assert_eq!(queue.waiting.back(), Some(&(2, b"next".to_vec())));
    }

    #[test]
    fn lines_that_find_no_room_are_counted() {
        static HERE: AtomicU64 = AtomicU64::new(0);
        let mut disk = Disk(1, Vec::new());
        let line = |disk: &mut Disk, line: &str| Log(disk, &HERE).write_all(line.as_bytes()).unwrap();
        ["a\n", "b\n", "c\n"].into_iter().for_each(|text| line(&mut disk, text));
        disk.0 = 9;
        ["d\n", "e\n"].into_iter().for_each(|text| line(&mut disk, text));
        let written = String::from_utf8(disk.1).unwrap();
        assert_eq!(written, "a\n2 lines before this one could not be written here\nd\ne\n");
    }
}
