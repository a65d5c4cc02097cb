//! [`Detach::Enforced`](tasuki_shm::arena::Detach::Enforced): the receiver write-protects the sender's mapping.
//!
//! The sender makes a userfaultfd, registers its arena with it for write protection, hands it to the receiver and
//! closes its own copy. Before that, the sender seals the arena's memory against new writable mappings (A1 of
//! `tasuki_shm::arena`). So the protected mapping is the only way to write, and no store of the sender passes the
//! protection. A stray write raises SIGBUS in the sender. When the receiver dies, the kernel closes the userfaultfd
//! and lifts every protection.
//!
//! It stops any bug of the sender, in any thread, with any pointer. It does not stop a hostile sender that is not
//! confined. Such a sender can make another userfaultfd, which lifts the protection (tried on Linux 6.18: the kernel
//! asks whether the area is registered, not with which userfaultfd). It can keep a copy of the first, let a child
//! inherit the mapping, move the mapping (`mremap`), or have the kernel write through pages that it pinned before
//! (io_uring). The receiver checks that the sender kept no copy and that the mapping is registered. The rest needs a
//! sandbox that forbids userfaultfd (docs/design/shm.md, "Detach").
//!
//! # Invariants
//!
//! - **U1** The structures below have the layout of `<linux/userfaultfd.h>`.
#![allow(unsafe_code, reason = "the ioctls of userfaultfd, which rustix lacks")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::ioctl::{Opcode, Updater, opcode};
use rustix::mm::UserfaultfdFlags;
use tasuki_shm::region::Region;

/// Reasons why a detach cannot be enforced.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// The kernel refuses a userfaultfd.
    #[error(
        "this kernel gives us no userfaultfd ({source}); it needs CONFIG_USERFAULTFD, and no seccomp filter against it: use the detach level guard or move"
    )]
    NoUserfaultfd {
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel cannot write-protect shared memory.
    #[error(
        "this kernel cannot write-protect shared memory for another process ({source}); it needs Linux 5.19 or later: use the detach level guard or move"
    )]
    NoSharedWriteProtect {
        /// The kernel's error.
        source: io::Error,
    },
    /// The peer's mapping breaks the protocol.
    #[error("the client's arena is not enforceable: {what}; the client is broken or lies")]
    NotRegistered {
        /// Result of the check.
        what: &'static str,
    },
    /// The kernel could not protect or release a slot.
    #[error("the client's slot could not be {doing} ({source}); its arena is no longer registered")]
    Slot {
        /// Failed step: "write-protected" or "released".
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `UFFD_API`.
const API: u64 = 0xAA;
/// `UFFD_FEATURE_SIGBUS`: a stray write raises a signal instead of waiting for a handler.
const FEATURE_SIGBUS: u64 = 1 << 7;
/// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`: write protection of shared memory, Linux 5.19.
const FEATURE_WP_SHARED: u64 = 1 << 12;
/// `UFFDIO_REGISTER_MODE_WP`.
const MODE_WP: u64 = 1 << 1;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECT: u64 = 1;
/// `UFFD_USER_MODE_ONLY`: the kind that an unprivileged process may have.
const USER_MODE_ONLY: u32 = 1;

/// How long the kernel may take to close the descriptors of a dying receiver (usually microseconds); and the pause
/// between our attempts.
const BUSY_FOR: Duration = Duration::from_millis(200);
const BUSY_PAUSE: Duration = Duration::from_micros(50);

const UFFDIO_API: Opcode = opcode::read_write::<Api>(0xAA, 0x3F);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<Register>(0xAA, 0x00);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<WriteProtect>(0xAA, 0x06);

/// Registers all of `region` for write protection. Hand the result to the receiver and close it here.
pub fn register(region: &Region) -> Result<OwnedFd, EnforceError> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
    // SAFETY: creating a userfaultfd changes no memory; we register only our own mapping below (U1).
    let uffd = unsafe { rustix::mm::userfaultfd(flags) }
        .map_err(|errno| EnforceError::NoUserfaultfd { source: errno.into() })?;
    let unable = |errno: rustix::io::Errno| EnforceError::NoSharedWriteProtect { source: errno.into() };
    let mut api = Api { api: API, features: FEATURE_SIGBUS | FEATURE_WP_SHARED, ioctls: 0 };
    update::<UFFDIO_API, _>(&uffd, &mut api).map_err(unable)?;
    let range = Range { start: region.address() as u64, len: region.len() as u64 };
    let mut register = Register { range, mode: MODE_WP, ioctls: 0 };
    let patience = Instant::now() + BUSY_FOR;
    loop {
        match update::<UFFDIO_REGISTER, _>(&uffd, &mut register) {
            // The receiver that held the last registration is dying, and the kernel has not closed its copy yet.
            Err(rustix::io::Errno::BUSY) if Instant::now() < patience => std::thread::sleep(BUSY_PAUSE),
            done => return done.map(|()| uffd).map_err(unable),
        }
    }
}

/// The right to make a userfaultfd and hand it over. A process has one at a time: the receiver checks that the
/// process has no userfaultfd left, so one hand-over in progress would make all others look like lies.
#[derive(Debug)]
pub(crate) struct HandOver(());

static HANDING_OVER: Mutex<bool> = Mutex::new(false);
static HANDED_OVER: Condvar = Condvar::new();

fn handing_over() -> MutexGuard<'static, bool> {
    HANDING_OVER.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HandOver {
    /// Waits for the right. Returns `None` if that takes longer than `patience`.
    pub fn begin(patience: Duration) -> Option<Self> {
        let waited = HANDED_OVER.wait_timeout_while(handing_over(), patience, |busy| *busy);
        let (mut busy, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (!std::mem::replace(&mut *busy, true)).then_some(HandOver(()))
    }
}

impl Drop for HandOver {
    fn drop(&mut self) {
        *handing_over() = false;
        HANDED_OVER.notify_one();
    }
}

/// The receiver's control over the write protection of a sender's arena.
#[derive(Debug)]
pub struct Enforcer {
    uffd: OwnedFd,
    /// Address of the arena in the sender's address space.
    base: u64,
    slot_len: u64,
}

impl Enforcer {
    /// Takes over the userfaultfd of a sender whose arena lies at address `base` in the sender's address space.
    pub fn new(uffd: OwnedFd, base: u64, slot_len: u32) -> Self {
        Enforcer { uffd, base, slot_len: slot_len.into() }
    }

    /// Stops the sender from writing the slot at `offset` of its arena. The sender may have written it until now.
    pub fn protect(&self, offset: usize) -> Result<(), EnforceError> {
        self.set(offset, PROTECT).map_err(|source| EnforceError::Slot { doing: "write-protected", source })
    }

    /// Lets the sender write the slot again.
    pub fn release(&self, offset: usize) -> Result<(), EnforceError> {
        self.set(offset, 0).map_err(|source| EnforceError::Slot { doing: "released", source })
    }

    fn set(&self, offset: usize, mode: u64) -> io::Result<()> {
        let range = Range { start: self.base.wrapping_add(offset as u64), len: self.slot_len };
        Ok(update::<UFFDIO_WRITEPROTECT, _>(&self.uffd, &mut WriteProtect { range, mode })?)
    }
}

fn update<const OPCODE: Opcode, T>(uffd: &OwnedFd, value: &mut T) -> rustix::io::Result<()> {
    // SAFETY: each opcode above is used with the structure it was made from (U1).
    let updater = unsafe { Updater::<OPCODE, T>::new(value) };
    // SAFETY: the kernel reads and writes that structure, and otherwise only changes protections in the registered
    // range (U1).
    unsafe { rustix::ioctl::ioctl(uffd.as_fd(), updater) }
}

/// Checks, from outside, that process `pid` has registered its arena at `base` for write protection, and holds no
/// userfaultfd any more. Also checks that `uffd`, which it handed over, is a userfaultfd: an ioctl on another file
/// could block us.
pub fn inspect(pid: u32, base: u64, uffd: BorrowedFd<'_>) -> Result<(), EnforceError> {
    let refuse = |what| EnforceError::NotRegistered { what };
    let is_one = |path: &Path| std::fs::read_link(path).is_ok_and(|to| to.as_os_str() == "anon_inode:[userfaultfd]");
    if !is_one(Path::new(&format!("/proc/self/fd/{}", uffd.as_raw_fd()))) {
        return Err(refuse("its descriptor is not a userfaultfd"));
    }
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))
        .map_err(|_| refuse("its /proc/PID/smaps cannot be read (it needs the server's user, or root)"))?;
    if !is_registered(&smaps, base) {
        return Err(refuse("its mapping is not registered for write protection"));
    }
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(|_| refuse("its /proc/PID/fd cannot be read"))?;
    // If client and server are one process, as in tests, our own copy is in the table that we check.
    let own = pid == std::process::id();
    if !own && open.flatten().any(|entry| is_one(&entry.path())) {
        return Err(refuse("it kept a userfaultfd"));
    }
    Ok(())
}

/// Whether the area that starts at `base` has the flag `uw` ("userfaultfd write-protect tracking", proc_pid_smaps(5)).
fn is_registered(smaps: &str, base: u64) -> bool {
    let head = format!("{base:x}-");
    let area = smaps.lines().skip_while(|line| !line.trim_start_matches('0').starts_with(&head));
    let flags = area.take(64).find_map(|line| line.strip_prefix("VmFlags:"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "uw"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tasuki_shm::region::Pages;

    #[test]
    fn a_registered_mapping_is_seen_from_outside() {
        let region = Region::create("test", 4096, Pages::Small).unwrap();
        let base = region.address() as u64;
        let uffd = match register(&region) {
            Ok(uffd) => uffd,
            Err(error) => return println!("skipped: {error}"),
        };
        inspect(std::process::id(), base, uffd.as_fd()).unwrap();
        let other = Region::create("test", 4096, Pages::Small).unwrap();
        assert!(inspect(std::process::id(), other.address() as u64, uffd.as_fd()).is_err(), "it is not registered");
        assert!(inspect(std::process::id(), base, region.fd()).is_err(), "a memory file is no userfaultfd");
        let enforcer = Enforcer::new(uffd, base, 4096);
        enforcer.protect(0).unwrap();
        enforcer.release(0).unwrap();
        assert!(enforcer.protect(1 << 30).is_err(), "outside the registered range");
    }
}
