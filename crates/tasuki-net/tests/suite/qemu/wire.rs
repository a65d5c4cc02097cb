//! The other end of the card's wire: a datagram socket, one frame per datagram.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, SocketAddrUnix};

use tasuki_testing::PATIENCE;

/// Bytes of the longest frame that any model sends.
const FRAME_MAX: usize = 65_536;

pub struct Wire {
    socket: UnixDatagram,
    card: PathBuf,
}

impl Wire {
    /// Binds our end. The card's process will bind its end at `card` later.
    pub(super) fn bind(ours: &Path, card: &Path) -> Wire {
        let socket = UnixDatagram::bind(ours).expect("a socket in a directory of our own");
        socket.set_write_timeout(Some(PATIENCE)).expect("a timeout above zero");
        Wire { socket, card: card.into() }
    }

    /// Returns the same wire, for another thread.
    pub fn try_clone(&self) -> Wire {
        Wire { socket: self.socket.try_clone().expect("a descriptor is free"), card: self.card.clone() }
    }

    /// Sends a frame, without its check sequence. Waits for room.
    pub fn send_frame(&self, frame: &[u8]) {
        let sent =
            self.socket.send_to(frame, &self.card).expect("the card's end of the wire is there, and takes frames");
        assert_eq!(sent, frame.len(), "a datagram is sent whole");
    }

    /// Sends a frame if there is room; returns whether there was.
    pub fn try_send_frame(&self, frame: &[u8]) -> bool {
        let card = SocketAddrUnix::new(&self.card).expect("a path that QEMU could bind");
        match rustix::net::sendto(&self.socket, frame, SendFlags::DONTWAIT, &card) {
            Ok(_) => true,
            Err(Errno::AGAIN) => false,
            Err(errno) => panic!("the wire: {errno}"),
        }
    }

    /// Returns the next frame that the card sends, if it comes within `limit`.
    pub fn receive_frame(&self, limit: Duration) -> Option<Vec<u8>> {
        // A timeout of zero would mean none.
        let deadline = Instant::now() + limit;
        let mut frame = vec![0; FRAME_MAX];
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_micros(1));
            self.socket.set_read_timeout(Some(left)).expect("a timeout above zero");
            match self.socket.recv(&mut frame) {
                Ok(len) => {
                    frame.truncate(len);
                    return Some(frame);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                Err(error) => panic!("the wire: {error}"),
            }
        }
    }
}
