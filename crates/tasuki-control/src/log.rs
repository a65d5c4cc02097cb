//! The daemon's log. A full disk ends no daemon: lines that cannot be written are counted, and their number is
//! written when there is room.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tracing_subscriber::EnvFilter;

/// Lines lost since the last one that could be written.
static LOST: AtomicU64 = AtomicU64::new(0);

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

/// Has `tracing` write to standard error from now on.
pub fn begin() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let colour = io::IsTerminal::is_terminal(&io::stderr());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour).with_target(false);
    // Its reports of lines that cannot be written go to the same place, by a macro that panics.
    log.log_internal_errors(false).with_writer(|| Log(io::stderr(), &LOST)).init();
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
    let _ = writeln!(io::stderr(), "{sentence}");
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
