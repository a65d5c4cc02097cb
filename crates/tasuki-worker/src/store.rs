//! A sash as bytes, in its envelope: how it goes by the daemon's store.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use tasuki_net::nic::{NicError, Sash};
use tasuki_relay::sash::{HEAD, LEN_MAX, NotASash, Sash as Envelope};
use tasuki_relay::wire::Reason;

use crate::board::now_ns;
use crate::kit::Refused;

/// Layouts beyond the driver's own that are read, and the last of which is written. A later one has a field more at its end.
const LATER: u32 = cfg!(feature = "next-sash") as u32;

/// Bytes of the field that a later layout has: when the sash was stored, on the machine's clock.
const STORED_AT: usize = 8;

/// Whether a sash of this kind and version can be gone on with.
pub fn reads<S: Sash>(kind: u32, version: u32) -> bool {
    kind == S::KIND && (S::VERSION..=S::VERSION + LATER).contains(&version)
}

/// Versions of the sashes of `S` that are read, from and to.
pub fn versions<S: Sash>() -> (u32, u32, u32) {
    (S::KIND, S::VERSION, S::VERSION + LATER)
}

/// The driver's bytes in the layout that is stored.
fn to_stored<S: Sash>(bytes: &[u8]) -> (u32, Vec<u8>) {
    let mut bytes = bytes.to_vec();
    let version = S::VERSION + LATER;
    if LATER > 0 {
        bytes[4..8].copy_from_slice(&version.to_ne_bytes());
        bytes.extend(now_ns().to_ne_bytes());
    }
    (version, bytes)
}

/// The reverse, of a version that is read.
fn from_stored<S: Sash>(version: u32, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if version > S::VERSION && bytes.len() >= STORED_AT + 8 {
        bytes.truncate(bytes.len() - STORED_AT);
        bytes[4..8].copy_from_slice(&S::VERSION.to_ne_bytes());
    }
    bytes
}

/// Memory with the sash in an envelope, which nobody can change any more.
pub fn write<S: Sash>(sash: &S, epoch: u32) -> Result<OwnedFd> {
    let (version, driver) = to_stored::<S>(sash.bytes());
    let mut bytes = vec![0; HEAD + driver.len()];
    let envelope = Envelope { kind: S::KIND, version, epoch, bytes: &driver };
    let len = envelope.write(&mut bytes)?;
    let what = "the sash could not be stored: the kernel has no memory for it";
    let memory =
        rustix::fs::memfd_create("tasuki-sash", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).context(what)?;
    let mut written = 0;
    while written < len {
        written += rustix::io::pwrite(&memory, &bytes[written..len], written as u64).context(what)?;
    }
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, all).context(what)?;
    Ok(memory)
}

/// The sash that stands in `memory`, of the tenure in which the lease was passed.
pub fn read<S: Sash>(memory: OwnedFd, wrote: u32) -> Result<Box<S>, Refused> {
    let bytes = copy(memory.as_fd()).map_err(|error| {
        let reason = Reason::Odd { position: 1 };
        Refused { reason, sentence: format!("the stored sash cannot be read ({error}); let the giver go on") }
    })?;
    let envelope = Envelope::read(&bytes).map_err(not_a_sash)?;
    let whole = match reads::<S>(envelope.kind, envelope.version) {
        true => Envelope::read_as(&bytes, envelope.kind, envelope.version, wrote).map_err(not_a_sash)?,
        false => {
            let (kind, version) = (envelope.kind.into(), envelope.version.into());
            let reason = Reason::OtherSash { kind, version };
            return Err(Refused { reason, sentence: reason.to_string() });
        }
    };
    S::read(&from_stored::<S>(envelope.version, whole)).map(Box::new).map_err(|error| refused(&error))
}

/// A copy that nobody else can write, of as many bytes as a sash can have.
fn copy(memory: std::os::fd::BorrowedFd<'_>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; HEAD + LEN_MAX];
    let mut have = 0;
    while have < bytes.len() {
        match rustix::io::pread(memory, &mut bytes[have..], have as u64)? {
            0 => break,
            count => have += count,
        }
    }
    bytes.truncate(have);
    Ok(bytes)
}

fn not_a_sash(error: NotASash) -> Refused {
    let reason = match error {
        NotASash::Damaged { is, should } => Reason::DamagedSash { is: is.into(), should: should.into() },
        NotASash::Other { kind, version, .. } => Reason::OtherSash { kind: kind.into(), version: version.into() },
        NotASash::Stale { epoch, .. } => Reason::WrongSash { value: epoch.into() },
        NotASash::Absent { mark, .. } => Reason::WrongSash { value: mark.into() },
        NotASash::Cut { says, .. } => Reason::WrongSash { value: says.into() },
        NotASash::Envelope { version } => Reason::WrongSash { value: version.into() },
    };
    Refused { reason, sentence: error.to_string() }
}

/// Why a driver did not go on.
pub fn refused(error: &NicError) -> Refused {
    let reason = match *error {
        NicError::OtherSash { kind, version, .. } => Reason::OtherSash { kind: kind.into(), version: version.into() },
        NicError::BrokenSash { value, .. } | NicError::Absurd { value, .. } => Reason::WrongSash { value },
        NicError::FramesCame { .. } => Reason::FramesCame,
        NicError::LeftBehind { value, .. } => Reason::LeftBehind { value },
        _ => Reason::CardGone,
    };
    Refused { reason, sentence: error.to_string() }
}
