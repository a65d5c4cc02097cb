//! The service manager: systemd, which hears that the daemon serves, and whose watchdog ends a daemon whose loop stops
//! (`WatchdogSec=`). Workers run on without the daemon, and the next one takes them over.
//!
//! A manager that reads nothing, as in a machine that is about to be restarted, holds up nobody: what finds no room in its
//! queue is not sent.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// The daemon serves.
pub const READY: &str = "READY=1";
/// The daemon is about to end.
pub const STOPPING: &str = "STOPPING=1";

/// How often the watchdog expects a sign of life, if there is one.
#[derive(Debug)]
pub struct Watchdog {
    every: Option<Duration>,
    due: Duration,
}

impl Watchdog {
    /// Reads systemd's interval from the environment; `now` is on the caller's clock.
    pub fn begin(now: Duration) -> Self {
        let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
        let is_for_us = std::env::var_os("WATCHDOG_PID").is_none_or(|pid| *pid == *std::process::id().to_string());
        let usec = number("WATCHDOG_USEC").filter(|usec| is_for_us && *usec > 0);
        // Twice as often as required, as sd_watchdog_enabled(3) recommends.
        Watchdog { every: usec.map(|usec| Duration::from_micros(usec / 2)), due: now }
    }

    /// Sends a sign of life if one is due. Returns when the next one is.
    pub fn tell(&mut self, now: Duration) -> Option<Duration> {
        let every = self.every?;
        if now >= self.due {
            // One that found no room is not as late as the next one would be.
            self.due =
                now + if say("WATCHDOG=1", SendFlags::DONTWAIT) == Err(Errno::AGAIN) { every / 8 } else { every };
        }
        Some(self.due)
    }
}

/// Tells the service manager, if there is one that has room for it now.
pub fn tell(state: &str) {
    let _ = say(state, SendFlags::DONTWAIT);
}

/// Tells the service manager that the daemon serves, by a thread of its own: it ends a daemon of which it does not hear that.
pub fn tell_that_it_serves() {
    let waits = || {
        crate::spawn::hold_signals();
        let _ = say(READY, SendFlags::empty());
    };
    let begun = std::thread::Builder::new().name("serves".to_owned()).spawn(waits);
    begun.map_or_else(|_| tell(READY), drop);
}

/// Sends a notification to the socket that the environment names, if it names one.
fn say(state: &str, flags: SendFlags) -> Result<(), Errno> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let sent = || rustix::net::sendto(&socket, state.as_bytes(), flags | SendFlags::NOSIGNAL, &address(&name)?);
    rustix::io::retry_on_intr(sent).map(drop)
}

/// Returns an address by its name in the environment: one that begins with `@` is no file.
fn address(name: &OsStr) -> Result<SocketAddrUnix, Errno> {
    match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(name),
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    #[test]
    fn a_manager_is_reached_at_a_file_and_at_a_name_without_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notices");
        let name = format!("tasuki-notices-{}", std::process::id());
        let at_name = SocketAddr::from_abstract_name(&name).expect("an address");
        let managers = [
            (path.display().to_string(), UnixDatagram::bind(&path).expect("a socket")),
            (format!("@{name}"), UnixDatagram::bind_addr(&at_name).expect("a socket")),
        ];
        for (name, manager) in managers {
            let address = address(name.as_ref()).expect("an address");
            let ours = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).expect("a socket");
            rustix::net::sendto(&ours, b"READY=1", SendFlags::DONTWAIT, &address).expect("somebody there");
            let mut said = [0; 64];
            let len = manager.recv(&mut said).expect("a notification");
            assert_eq!(&said[..len], b"READY=1", "{name}");
        }
    }
}
