//! Network namespaces for tests, and work in them.

pub mod capture;
pub mod two;

use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tasuki_tap::device::Before;
use tasuki_tap::namespace::Namespace;
use tasuki_tap::{Settings, Tap, TapError};

/// A namespace; dropping this removes it.
pub struct Place(pub String);

impl Place {
    pub fn new(what: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tasuki-{what}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        assert!(ip(&["netns", "add", &name]), "no network namespace could be made");
        Place(name)
    }

    pub fn within<T: Send>(&self, work: impl FnOnce() -> std::io::Result<T> + Send) -> std::io::Result<T> {
        let mut done = None;
        let within = Namespace::named(&self.0).within(|| {
            done = Some(work());
            Ok::<_, TapError>(())
        });
        within.map_err(std::io::Error::other)?;
        done.expect("it was done")
    }

    /// Creates a TAP that is up.
    pub fn tap(&self, name: &str, address: Option<&str>, before: Before) -> Tap {
        let address = address.map(|address| address.parse().expect("an address"));
        Tap::create(&Namespace::named(&self.0), name, &Settings::of(address), before).expect("root makes a TAP")
    }

    /// Creates the TAP `nic0`, up, whose interface has this MAC address.
    pub fn tap_of(&self, mac: [u8; 6], address: &str, before: Before) -> OwnedFd {
        let tap = self.tap("nic0", Some(address), before);
        tasuki_tap::set_mac(&tap.device, mac).expect("it takes an address");
        tap.device
    }

    /// Returns a command that runs in the namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, program]);
        command
    }

    /// Runs `ip` in this namespace; returns whether it succeeded.
    pub fn ip(&self, words: &[&str]) -> bool {
        ip(&[&["-n", &self.0], words].concat())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        ip(&["netns", "del", &self.0]);
    }
}

fn ip(words: &[&str]) -> bool {
    Command::new("ip").args(words).status().is_ok_and(|status| status.success())
}

/// Returns whether this process may create namespaces; prints a line if not.
pub fn is_possible() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: network namespaces need root");
    }
    is_root
}

/// Sets the flag on drop, so that a test that panics ends its threads too.
pub struct StopAtEnd<'a>(pub &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns a byte that differs from those near it.
pub fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 11).to_le_bytes()[0]
}
