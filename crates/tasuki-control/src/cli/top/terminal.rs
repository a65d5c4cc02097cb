//! The terminal while `tasuki top` has it. It is as before when the value is dropped.

use std::io::{IsTerminal, Read, Stdin, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::termios::{OptionalActions, Termios};

use crate::log::plain;

/// To another screen without a cursor, and back (xterm's control sequences, ctlseqs).
const BEGIN: &str = "\x1b[?1049h\x1b[?25l";
const END: &str = "\x1b[?25h\x1b[?1049l";
/// To the first column of the first line; the rest of a line; and of the screen.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// What a key means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    End,
    Stop,
    Back,
    On,
    /// None, or the window has another size.
    Other,
}

/// A terminal that shows pictures and passes keys on at once.
#[derive(Debug)]
pub struct Terminal {
    input: Stdin,
    was: Termios,
    ended: Arc<AtomicBool>,
}

impl Terminal {
    /// Takes the terminal.
    ///
    /// # Errors
    /// Standard input or output is none.
    pub fn take() -> Result<Self> {
        let input = std::io::stdin();
        ensure!(
            input.is_terminal() && std::io::stdout().is_terminal(),
            "tasuki top draws on a terminal, and there is none here; with --json it writes a line for each look"
        );
        let was = rustix::termios::tcgetattr(&input).context("the terminal does not say how it is set")?;
        let ended = Arc::new(AtomicBool::new(false));
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
        let changed = Arc::new(AtomicBool::new(false));
        let handled = [(SIGTERM, &ended), (SIGHUP, &ended), (SIGINT, &ended), (SIGWINCH, &changed)];
        for (signal, flag) in handled {
            signal_hook::flag::register(signal, flag.clone()).context("the kernel took no signal handler")?;
        }
        let mut raw = was.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(&input, OptionalActions::Now, &raw).context("the terminal cannot be set")?;
        let terminal = Terminal { input, was, ended };
        say(BEGIN)?;
        Ok(terminal)
    }

    /// Draws the lines that `picture` makes for these columns and lines.
    pub fn draw(&mut self, picture: impl FnOnce((usize, usize)) -> Vec<String>) -> Result<()> {
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).context("the terminal does not say its size")?;
        // A terminal that does not know its size says 0.
        let or = |said: u16, usual: usize| if said == 0 { usual } else { usize::from(said) };
        let (columns, rows) = (or(size.ws_col, 80), or(size.ws_row, 24));
        let lines = picture((columns, rows));
        let lines = lines.iter().take(rows).map(|line| shown(line, columns));
        say(&format!("{HOME}{}{CLEAR_BELOW}", lines.collect::<Vec<_>>().join("\r\n")))
    }

    /// Returns the next key, if one comes within `pause`.
    pub fn key(&mut self, pause: Duration) -> Result<Option<Key>> {
        let limit = Timespec::try_from(pause).context("that pause is too long")?;
        let mut polled = [PollFd::new(&self.input, PollFlags::IN)];
        let came = match rustix::event::poll(&mut polled, Some(&limit)) {
            Ok(came) => came > 0,
            // The window has another size, or a signal ends us.
            Err(rustix::io::Errno::INTR) if self.ended.load(Relaxed) => false,
            Err(rustix::io::Errno::INTR) => return Ok(Some(Key::Other)),
            Err(errno) => return Err(errno).context("the terminal cannot be waited for"),
        };
        if self.ended.load(Relaxed) {
            return Ok(Some(Key::End));
        }
        let mut bytes = [0; 16];
        let len = if came { self.input.read(&mut bytes).context("the terminal cannot be read")? } else { 0 };
        if came && len == 0 {
            // It is gone.
            return Ok(Some(Key::End));
        }
        Ok(came.then(|| (0..len).find_map(|at| key(&bytes[at..len])).unwrap_or(Key::Other)))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = say(END);
        let _ = rustix::termios::tcsetattr(&self.input, OptionalActions::Now, &self.was);
    }
}

fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("the terminal cannot be written to")
}

/// Returns a line as it is drawn: names and sentences in it may be a worker's, or a recording's.
fn shown(line: &str, columns: usize) -> String {
    plain(line, columns) + CLEAR_LINE
}

/// Returns the meaning of what a terminal sends for the first of some keys. Ctrl-C is a key, too.
fn key(bytes: &[u8]) -> Option<Key> {
    match bytes {
        b"\x1b" | [b'q' | b'Q' | 0x03 | 0x04, ..] => Some(Key::End),
        [b' ', ..] => Some(Key::Stop),
        [0x1b, b'[' | b'O', b'D', ..] | [b'h', ..] => Some(Key::Back),
        [0x1b, b'[' | b'O', b'C', ..] | [b'l', ..] => Some(Key::On),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_steers_the_terminal() {
        assert_eq!(shown("red\x1b]0;x\x07\n\u{202e}echo", 80), "red ]0;x   echo\x1b[K");
        assert_eq!(shown("a long line", 6), "a long\x1b[K");
    }

    #[test]
    fn a_key_means_what_it_says() {
        let keys = [&b"q"[..], b"\x03", b"\x1b", b" ", b"\x1b[D", b"\x1bOC\x1b[C", b"z", b"\x1b[A"];
        let (end, stop, back, on) = (Some(Key::End), Some(Key::Stop), Some(Key::Back), Some(Key::On));
        assert_eq!(keys.map(key), [end, end, end, stop, back, on, None, None]);
    }
}
