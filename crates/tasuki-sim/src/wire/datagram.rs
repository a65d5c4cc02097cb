//! A wire over a Unix datagram socket, one frame per datagram, as with QEMU's `-netdev dgram`.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::Wire;

/// Longest datagram in bytes that is received whole. A longer one is cut; it is longer than any frame, and the card
/// refuses it.
const LONGEST: usize = 64 << 10;

/// A Unix datagram socket, bound to our path, with a partner at another path.
#[derive(Debug)]
pub struct Datagram {
    socket: UnixDatagram,
    ours: PathBuf,
    theirs: PathBuf,
    frame: Box<[u8]>,
    lost: u64,
}

impl Datagram {
    /// Binds `ours`, which must not exist. `theirs` may not exist yet: frames sent until then are lost.
    pub fn bind(ours: &Path, theirs: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::bind(ours)?;
        socket.set_nonblocking(true)?;
        let frame = vec![0; LONGEST].into_boxed_slice();
        Ok(Datagram { socket, ours: ours.to_owned(), theirs: theirs.to_owned(), frame, lost: 0 })
    }

    /// Returns the number of frames that could not be sent: the partner is absent or too slow.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl Wire for Datagram {
    fn receive(&mut self, _: u64) -> Option<&[u8]> {
        let len = self.socket.recv(&mut self.frame).ok()?;
        Some(&self.frame[..len])
    }

    fn send(&mut self, frame: &[u8], _: u64) {
        self.lost += u64::from(self.socket.send_to(frame, &self.theirs).is_err());
    }
}

impl Drop for Datagram {
    fn drop(&mut self) {
        // The path, even its folder, may have been removed already.
        let _ = std::fs::remove_file(&self.ours);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_a_datagram_both_ways() {
        let folder = tempfile::tempdir().unwrap();
        let (here, there) = (folder.path().join("here"), folder.path().join("there"));
        let mut wire = Datagram::bind(&here, &there).unwrap();
        wire.send(b"too early", 0);
        assert_eq!(wire.receive(0), None);
        assert_eq!(wire.lost(), 1);
        let partner = UnixDatagram::bind(&there).unwrap();
        wire.send(b"ping", 0);
        let mut bytes = [0; 100];
        assert_eq!(partner.recv(&mut bytes).unwrap(), 4);
        partner.send_to(b"pong", &here).unwrap();
        assert_eq!(wire.receive(0), Some(&b"pong"[..]));
        drop(wire);
        assert!(!here.exists(), "the path is free again");
    }
}
