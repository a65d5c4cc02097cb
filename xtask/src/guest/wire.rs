//! The wires of the guest's cards. One end is the card's: a datagram socket, as QEMU's `-netdev dgram` has it. The other is the
//! test's: a serial port of the guest, which is a stream here.
//!
//! ```text
//!   test ── /dev/vportNpM ── virtserialport ── stream ── a thread of ours ── datagrams ── netdev ── card ── driver
//! ```
//!
//! In the stream a frame is preceded by its length, 4 bytes, big-endian. Each frame that the card's end has taken is answered by a
//! length of zero: the test thus knows how many are under way. (QEMU's own `-netdev stream` would save us this, but it reads many
//! frames at once, and those that a card does not take at once can be overtaken.)

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::Context;

/// Longest frame that a datagram of QEMU's can be.
const FRAME_MAX: usize = 65_536;

/// A wire that is ready for a machine to be plugged in. Ends with the machine, or when it is dropped.
pub struct Wire {
    name: &'static str,
    folder: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    /// A wire whose sockets are in `folder`.
    pub fn lay(folder: &Path, name: &'static str) -> anyhow::Result<Wire> {
        let at = |end: &str| folder.join(format!("{name}.{end}"));
        let listener =
            UnixListener::bind(at("port")).with_context(|| format!("cannot bind {}", at("port").display()))?;
        let ours = UnixDatagram::bind(at("ours")).with_context(|| format!("cannot bind {}", at("ours").display()))?;
        let card = at("card");
        let thread = thread::spawn(move || {
            if let Ok((port, _)) = listener.accept() {
                carry(&port, &ours, &card);
            }
        });
        Ok(Wire { name, folder: folder.to_owned(), thread: Some(thread) })
    }

    /// What QEMU is told: the test's end is a port of the guest's with the name of the wire, the card's end a netdev.
    pub fn arguments(&self) -> [String; 6] {
        let Wire { name, folder, .. } = self;
        let at = |end: &str| format!("{}/{name}.{end}", folder.display());
        let (port, card, ours) = (at("port"), at("card"), at("ours"));
        [
            "-chardev".to_owned(),
            format!("socket,id=wire-{name},path={port}"),
            "-device".to_owned(),
            format!("virtserialport,chardev=wire-{name},name={name}"),
            "-netdev".to_owned(),
            format!("dgram,id={name},local.type=unix,local.path={card},remote.type=unix,remote.path={ours}"),
        ]
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // If no machine came, this is who the thread is waiting for; and it goes away at once.
        drop(UnixStream::connect(self.folder.join(format!("{}.port", self.name))));
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// Carries frames between the test's end and the card's, until either is gone.
fn carry(port: &UnixStream, ours: &UnixDatagram, card: &Path) {
    // Frames and answers are not to get into each other.
    let back = Mutex::new(port);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = from_card(ours, &back);
            // Whoever waits for the test's end, or the card's, learns that the other is gone.
            let _ = port.shutdown(Shutdown::Both);
        });
        let _ = to_card(port, ours, card, &back);
        let _ = ours.shutdown(Shutdown::Both);
    });
}

fn to_card(mut port: &UnixStream, ours: &UnixDatagram, card: &Path, back: &Mutex<&UnixStream>) -> io::Result<()> {
    let mut frame = vec![0; FRAME_MAX];
    loop {
        let mut len = [0; 4];
        port.read_exact(&mut len)?;
        let len = usize::try_from(u32::from_be_bytes(len)).unwrap_or(usize::MAX);
        let frame = frame.get_mut(..len).ok_or(io::ErrorKind::InvalidData)?;
        port.read_exact(frame)?;
        ours.send_to(frame, card)?;
        put(back, &[0; 4])?;
    }
}

fn from_card(ours: &UnixDatagram, back: &Mutex<&UnixStream>) -> io::Result<()> {
    let mut bytes = vec![0; 4 + FRAME_MAX];
    loop {
        let len = ours.recv(&mut bytes[4..])?;
        let Some(header) = u32::try_from(len).ok().filter(|&len| len > 0) else { return Ok(()) };
        bytes[..4].copy_from_slice(&header.to_be_bytes());
        put(back, &bytes[..4 + len])?;
    }
}

fn put(back: &Mutex<&UnixStream>, bytes: &[u8]) -> io::Result<()> {
    back.lock().unwrap_or_else(PoisonError::into_inner).write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_cross_whole_and_each_that_was_taken_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let wire = Wire::lay(folder.path(), "w").unwrap();
        let card = UnixDatagram::bind(folder.path().join("w.card")).unwrap();
        let mut port = UnixStream::connect(folder.path().join("w.port")).unwrap();
        let mut frame = [0; 16];

        port.write_all(&[0, 0, 0, 3, 7, 8, 9, 0, 0, 0, 1, 5]).unwrap();
        for expected in [&[7, 8, 9][..], &[5]] {
            let len = card.recv(&mut frame).unwrap();
            assert_eq!(&frame[..len], expected);
        }
        port.read_exact(&mut frame[..8]).unwrap();
        assert_eq!(frame[..8], [0; 8], "both were taken");
        card.send_to(&[1, 2], folder.path().join("w.ours")).unwrap();
        port.read_exact(&mut frame[..6]).unwrap();
        assert_eq!(frame[..6], [0, 0, 0, 2, 1, 2]);

        drop(port);
        drop(wire);
    }

    #[test]
    fn a_wire_that_nobody_plugs_in_ends() {
        let folder = tempfile::tempdir().unwrap();
        drop(Wire::lay(folder.path(), "w").unwrap());
    }
}
