//! The keeper: a process that holds descriptors and does nothing else, so that they outlive the daemon and all
//! workers. Each comes with a text that only the daemon reads.
//!
//! The daemon starts it (`tasukid keep`) with a listening socket of its directory as standard input, and a connection
//! to itself as standard output: what the daemon says is kept even if it dies before the keeper has begun. The keeper
//! serves one daemon at a time: the next one is let in when the connection to the one before it has ended.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use serde::{Deserialize, Serialize};
use tasuki_shm::peer::Credentials;

use crate::channel::{self, Nothing};
use crate::endpoint::socket::mark;
use crate::foreign::Foreign;
use crate::place;

/// Most entries: a VNI of as many nodes as there can be has a quarter of them.
const ENTRIES_MAX: usize = 16 * 1024;

/// Name of its process for ps(1) and pkill(1); the kernel takes 15 bytes.
const NAME: &CStr = c"tasuki-keeper";

/// Interval at which a keeper without a daemon checks whether another could find it.
const SOCKET_CHECK_EVERY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The protocol between daemon and keeper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Word {
    /// From the daemon: keep this under this name, in place of the earlier entry, with the descriptors beside it. From
    /// the keeper: this is kept.
    Keep {
        name: String,
        /// The text that describes it.
        what: String,
    },
    /// Keep nothing under this name.
    Forget { name: String },
    /// List all that is kept.
    List,
    /// End of the list.
    Listed,
    /// Nothing need be kept any more.
    End,
}

/// Sends a word, or nothing of it. Never waits.
pub fn say(socket: BorrowedFd<'_>, word: &Word, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    channel::send(socket, &serde_json::to_vec(word).expect("plain data"), fds)
}

/// Keeps descriptors for the daemons of this directory, until one tells it to end, or none could find it any more.
pub fn run(folder: &Path) -> Result<()> {
    // It was started by /proc/self/exe, and would be called `exe`. As `tasukid` it would get signals that are meant for that
    // alone (pkill).
    let _ = rustix::thread::set_name(NAME);
    let listener = std::io::stdin().as_fd().try_clone_to_owned().context("the keeper has no standard input")?;
    // From now on a client that connects reaches this process.
    rustix::net::listen(&listener, 4).context("standard input is not a listening socket; tasukid starts this")?;
    // Another keeper may listen there once the file has been deleted.
    let own = mark(&place::keeper_socket(folder));
    // The daemon writes to it while a NIC changes hands, and must not lose its CPU to it then.
    let _ = rustix::process::nice(10);
    let mut entries = Entries::new();
    let mut next = Some(own_daemon().context("standard output is not a connection; tasukid starts this")?);
    while let Some(daemon) = next {
        if serve(&daemon, &mut entries)? {
            break;
        }
        drop(daemon);
        next = await_daemon(&listener, own.as_deref(), folder)?;
    }
    Ok(())
}

/// Takes the connection to the daemon that started this process off standard output.
fn own_daemon() -> std::io::Result<OwnedFd> {
    let daemon = std::io::stdout().as_fd().try_clone_to_owned()?;
    // The daemon sees that the keeper lets go of it only if no other descriptor is the connection.
    rustix::stdio::dup2_stdout(std::fs::File::open("/dev/null")?)?;
    Ok(daemon)
}

/// Waits for the next daemon: a process of the same user that has the directory's lock. None can come once the file with the
/// mark `own` is gone.
fn await_daemon(listener: &OwnedFd, own: Option<&str>, folder: &Path) -> Result<Option<OwnedFd>> {
    loop {
        match rustix::event::poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&SOCKET_CHECK_EVERY)) {
            Ok(0) if own.is_none() || mark(&place::keeper_socket(folder)).as_deref() != own => return Ok(None),
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(errno) => return Err(errno).context("the kernel refused to wait"),
        }
        // Not once the caller is here: it may take the last descriptor, which the daemon before it left. A daemon has the lock
        // before it connects.
        let holder = place::holder(folder);
        let Ok(caller) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { continue };
        let peer = Credentials::of(&caller)?;
        let is_ours = peer.uid == rustix::process::geteuid().as_raw();
        if is_ours && holder == Some(peer.pid) {
            return Ok(Some(caller));
        }
    }
}

/// What it keeps, by name. An earlier daemon may have it keep descriptors that take their time to close.
type Entries = BTreeMap<String, (String, Foreign)>;

/// The beginning of the name of a client's entry (`supervisor::deposits::Key`).
const OF_CLIENT: &str = "{\"client\"";

/// Closes what an entry had. A client's descriptors may take their time: other threads close them. All others take none, and
/// must not wait behind those.
fn close(name: &str, entry: Option<(String, Foreign)>) {
    let entry = entry.filter(|_| !name.starts_with(OF_CLIENT));
    entry.into_iter().for_each(|(_, fds)| drop(fds.trust()));
}

/// Serves a daemon for as long as it is there. Returns whether the keeper is to end.
fn serve(daemon: &OwnedFd, entries: &mut Entries) -> Result<bool> {
    let mut room = Vec::new();
    loop {
        let message = match channel::receive(daemon.as_fd(), &mut room) {
            Ok(message) => message,
            Err(Nothing::Yet) => {
                wait(daemon, PollFlags::IN)?;
                continue;
            }
            Err(_) => return Ok(false),
        };
        match serde_json::from_slice(&message.bytes) {
            Ok(Word::Keep { name, what }) if entries.contains_key(&name) || entries.len() < ENTRIES_MAX => {
                let before = entries.insert(name.clone(), (what, message.fds));
                close(&name, before);
            }
            Ok(Word::Forget { name }) => close(&name, entries.remove(&name)),
            Ok(Word::List) => {
                for (name, (what, fds)) in &*entries {
                    let word = Word::Keep { name: name.clone(), what: what.clone() };
                    if !insist(daemon, &word, &channel::lend(fds))? {
                        return Ok(false);
                    }
                }
                if !insist(daemon, &Word::Listed, &[])? {
                    return Ok(false);
                }
            }
            Ok(Word::End) => return Ok(true),
            // More entries than any daemon has, or a word that no daemon sends.
            Ok(Word::Keep { .. } | Word::Listed) | Err(_) => return Ok(false),
        }
    }
}

/// Sends a word once there is room. Returns whether the daemon is there to read it.
fn insist(daemon: &OwnedFd, word: &Word, fds: &[BorrowedFd<'_>]) -> Result<bool> {
    loop {
        match say(daemon.as_fd(), word, fds) {
            Ok(()) => return Ok(true),
            Err(Errno::AGAIN | Errno::NOBUFS) => wait(daemon, PollFlags::OUT)?,
            Err(_) => return Ok(false),
        }
    }
}

fn wait(daemon: &OwnedFd, for_what: PollFlags) -> Result<()> {
    match rustix::event::poll(&mut [PollFd::new(daemon, for_what)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno).context("the kernel refused to wait"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    /// row: T25
    #[test]
    fn a_descriptor_that_takes_an_hour_to_close_keeps_no_daemon_waiting() {
        let (daemon, ours) = channel::pair().expect("a socket");
        // The listener never accepts the connection, and reads nothing.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let lingering = TcpStream::connect(listener.local_addr().expect("an address")).expect("a listener");
        rustix::net::sockopt::set_socket_linger(&lingering, Some(Duration::from_secs(3600))).expect("a socket");
        lingering.set_nonblocking(true).expect("a socket");
        while (&lingering).write(&[0; 4096]).is_ok() {}
        let keeper = std::thread::spawn(move || serve(&ours, &mut Entries::new()));
        let name = format!("{OF_CLIENT}:\"/run/red.sock\"}}");
        let keep = Word::Keep { name: name.clone(), what: String::new() };
        let said = |word: &Word, fds: &[BorrowedFd<'_>]| say(daemon.as_fd(), word, fds).expect("room");
        // In place of itself, and then for good.
        said(&keep, &[lingering.as_fd()]);
        said(&keep, &[]);
        said(&keep, &[lingering.as_fd()]);
        drop(lingering);
        said(&Word::Forget { name }, &[]);
        said(&Word::List, &[]);
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let answers = rustix::event::poll(&mut [PollFd::new(&daemon, PollFlags::IN)], Some(&limit));
        assert_eq!(answers, Ok(1), "it closes the connection");
        said(&Word::End, &[]);
        assert!(keeper.join().expect("it does not panic").expect("it serves"));
        // This resets the connection, so that nobody waits for it any more.
        drop(listener);
    }
}
