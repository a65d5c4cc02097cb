//! A wire that is a Unix datagram socket, one frame a datagram, as QEMU's `-netdev dgram` has it.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::Wire;

/// The longest datagram that is taken whole; what is longer than a frame can be is cut, and refused by the card.
const LONGEST: usize = 64 << 10;

/// A Unix datagram socket, bound to a path of its own, with a partner at another path.
#[derive(Debug)]
pub struct Datagram {
    socket: UnixDatagram,
    ours: PathBuf,
    theirs: PathBuf,
    frame: Box<[u8]>,
    lost: u64,
}

impl Datagram {
    /// Binds `ours`, which does not exist yet. Nobody need be at `theirs` yet: what is sent until then is lost.
    pub fn bind(ours: &Path, theirs: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::bind(ours)?;
        socket.set_nonblocking(true)?;
        let frame = vec![0; LONGEST].into_boxed_slice();
        Ok(Datagram { socket, ours: ours.to_owned(), theirs: theirs.to_owned(), frame, lost: 0 })
    }

    /// Frames that nobody took: the partner is not there, or does not keep up.
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
        // Somebody may have removed it already, folder and all.
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
