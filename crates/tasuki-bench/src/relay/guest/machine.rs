//! The guest as a process: QEMU, with its console and its card's wire connected to us.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::program::{PATIENCE, Program};
use crate::workplace::Workplace;

/// MAC address of the card.
pub const MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x57];

/// Bytes that may wait at the wire for the card, as the kernel counts them: the sender's limit of frames under way.
const WIRE_HOLDS: usize = 1 << 20;

/// A machine that `cargo xtask bench` has prepared (xtask/src/guest/relay.rs, vm.rs).
#[derive(Debug, Deserialize)]
pub struct Recipe {
    pub program: String,
    pub words: Vec<String>,
    pub kernel_line: String,
}

impl Recipe {
    /// Reads the recipe from a file.
    pub fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} describes no machine", file.display()))
    }
}

/// A running guest. Dropping it ends the guest.
pub struct Machine {
    _qemu: Program,
    /// Lines of its console, until it ends.
    pub lines: Receiver<String>,
    /// Our end of its card's wire: one frame a datagram. Non-blocking.
    pub wire: UnixDatagram,
    _place: Workplace,
}

impl Machine {
    /// Boots the guest, with an environment for its first process.
    pub fn boot(recipe: &Recipe, environment: &[(&str, u32)]) -> Result<Self> {
        let place = Workplace::new()?;
        let listener = UnixListener::bind(place.directory().join("console")).context("no socket for a console")?;
        let (wire, card) = UnixDatagram::pair().context("no sockets for a wire")?;
        wire.set_nonblocking(true).context("a socket that waits cannot be a wire")?;
        rustix::net::sockopt::set_socket_send_buffer_size(&wire, WIRE_HOLDS).context("a wire of that length")?;
        let mut command = Command::new(&recipe.program);
        command.args(&recipe.words).current_dir(place.directory());
        let said: String = environment.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        command.arg("-append").arg(recipe.kernel_line.clone() + &said);
        command.args(["-chardev", "socket,id=console,path=console", "-serial", "chardev:console"]);
        // The card's end of the wire is QEMU's standard input.
        command.args(["-netdev", "dgram,id=wire,local.type=fd,local.str=0"]);
        let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
        command.args(["-device", "pcie-root-port,id=behind,chassis=1"]);
        command.args(["-device", &format!("e1000e,bus=behind,netdev=wire,mac={mac}")]);
        command.stdin(Stdio::from(OwnedFd::from(card))).stdout(Stdio::null());
        let mut qemu = Program::spawn(&recipe.program, &mut command)?;
        let lines = lines_of(console(&listener, &mut qemu)?);
        Ok(Machine { _qemu: qemu, lines, wire, _place: place })
    }
}

/// Waits for QEMU to connect.
fn console(listener: &UnixListener, qemu: &mut Program) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    let began = Instant::now();
    loop {
        match listener.accept() {
            Ok((console, _)) => {
                console.set_nonblocking(false)?;
                return Ok(console);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("the guest's console cannot be listened at"),
        }
        if let Some(status) = qemu.status()? {
            bail!("QEMU ended with {status} before it had begun");
        }
        if began.elapsed() > PATIENCE {
            bail!("QEMU did not begin within {} s", PATIENCE.as_secs());
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Reads the console's lines in a thread of its own, which ends with the guest.
fn lines_of(console: UnixStream) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut console = BufReader::new(console);
        let mut line = Vec::new();
        while console.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                return;
            }
            line.clear();
        }
    });
    lines
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_machine_that_does_not_begin_says_so() {
        let recipe =
            |program: &str| Recipe { program: program.to_owned(), words: Vec::new(), kernel_line: String::new() };
        let sentence = |program| format!("{:#}", Machine::boot(&recipe(program), &[("LKM", 1)]).err().unwrap());
        assert_eq!(sentence("false"), "QEMU ended with exit status: 1 before it had begun");
        assert!(sentence("no-such-qemu").starts_with("no-such-qemu could not be started: "));
    }

    #[test]
    fn what_the_machine_says_is_heard_line_by_line_and_so_is_its_end() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let lines = lines_of(ours);
        theirs.write_all(b"one\r\ntwo\n\nlast").unwrap();
        drop(theirs);
        assert_eq!(lines.iter().collect::<Vec<_>>(), ["one", "two", "", "last"]);
    }
}
