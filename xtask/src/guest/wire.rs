//! The wires of the guest's cards. The card's end is a datagram socket, as in QEMU's `-netdev dgram`. The test's end is
//! a serial port of the guest, which is a stream here.
//!
//! ```text
//!   test ── /dev/vportNpM ── virtserialport ── stream ── a thread of ours ── datagrams ── netdev ── card ── driver
//! ```
//!
//! In the stream, each frame follows its length: 4 bytes, big-endian. For each frame that the card's end has taken, the
//! wire answers with a length of zero, so the test knows how many frames are under way. (QEMU's own `-netdev stream`
//! would make this module unnecessary. But it reads many frames at once, and frames that the card does not take at once
//! can be overtaken.)

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::Context;

/// Maximum length of a frame in a datagram of QEMU's, in bytes.
const FRAME_MAX: usize = 65_536;

/// A wire that a machine can be connected to. It ends with the machine, or when it is dropped.
pub struct Wire {
    name: &'static str,
    folder: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    /// Makes a wire with its sockets in `folder`.
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

    /// Returns the arguments for QEMU: the test's end is a port of the guest with the wire's name, the card's end a
    /// netdev.
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
        // If no machine came, the thread still waits for a connection: this one, which ends at once.
        drop(UnixStream::connect(self.folder.join(format!("{}.port", self.name))));
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

/// Carries frames between the test's end and the card's until one of them is gone.
fn carry(port: &UnixStream, ours: &UnixDatagram, card: &Path) {
    // The lock keeps frames and answers in the stream apart.
    let back = Mutex::new(port);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = from_card(ours, &back);
            // Wakes the thread that waits for the other end.
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
