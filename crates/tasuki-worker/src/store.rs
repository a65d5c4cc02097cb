//! A driver state as bytes in its envelope, as it goes through the daemon's store.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, SealFlags};
use tasuki_net::nic::{DriverState, NicError};
use tasuki_relay::driver_state::{DriverState as Envelope, HEAD, LEN_MAX, NotADriverState};
use tasuki_relay::wire::Reason;
use tasuki_shm::clock::now_ns;

use crate::bundle::Refused;

/// Number of layouts after the driver's own that this worker reads and writes. A later layout has one more field at its
/// end.
const LATER: u32 = cfg!(feature = "next-driver-state") as u32;

/// Length in bytes of the field that a later layout adds: the time at which the driver state was stored, on the
/// machine's clock.
const STORED_AT: usize = 8;

/// Returns whether this worker can go on with a driver state of this kind and version.
pub fn reads<S: DriverState>(kind: u32, version: u32) -> bool {
    kind == S::KIND && (S::VERSION..=S::VERSION + LATER).contains(&version)
}

/// Returns the kind of the driver states of `S`, and the first and last version that this worker reads and writes.
pub fn versions<S: DriverState>() -> (u32, u32, u32) {
    (S::KIND, S::VERSION, S::VERSION + LATER)
}

/// Converts the driver's bytes to the layout of a version that this worker writes.
fn to_stored<S: DriverState>(version: u32, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if version > S::VERSION {
        bytes[4..8].copy_from_slice(&version.to_ne_bytes());
        bytes.extend(now_ns().to_ne_bytes());
    }
    bytes
}

/// Converts stored bytes of a version that this worker reads to the driver's layout.
fn from_stored<S: DriverState>(version: u32, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if version > S::VERSION && bytes.len() >= STORED_AT + 8 {
        bytes.truncate(bytes.len() - STORED_AT);
        bytes[4..8].copy_from_slice(&S::VERSION.to_ne_bytes());
    }
    bytes
}

/// Writes the driver state in the layout of this version, in an envelope, to new memory, and seals it against any change.
pub fn write<S: DriverState>(driver_state: &S, version: u32, epoch: u32) -> Result<OwnedFd> {
    ensure!(
        reads::<S>(S::KIND, version),
        "the driver state could not be stored: this worker does not write version {version}; its successor goes on in place"
    );
    let driver = to_stored::<S>(version, driver_state.bytes());
    let mut bytes = vec![0; HEAD + driver.len()];
    let envelope = Envelope { kind: S::KIND, version, epoch, bytes: &driver };
    let len = envelope.write(&mut bytes)?;
    let what = "the driver state could not be stored: the kernel has no memory for it";
    let memory = rustix::fs::memfd_create("tasuki-driver-state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .context(what)?;
    let mut written = 0;
    while written < len {
        written += rustix::io::pwrite(&memory, &bytes[written..len], written as u64).context(what)?;
    }
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, all).context(what)?;
    Ok(memory)
}

/// Reads the driver state in `memory`. `wrote` is the epoch of the tenure in which the lease was passed.
pub fn read<S: DriverState>(memory: OwnedFd, wrote: u32) -> Result<Box<S>, Refused> {
    let bytes = copy(memory.as_fd()).map_err(|error| {
        let reason = Reason::Odd { position: 1 };
        Refused { reason, sentence: format!("the stored driver state cannot be read ({error}); let the giver go on") }
    })?;
    let envelope = Envelope::read(&bytes).map_err(not_a_driver_state)?;
    let whole = match reads::<S>(envelope.kind, envelope.version) {
        true => Envelope::read_as(&bytes, envelope.kind, envelope.version, wrote).map_err(not_a_driver_state)?,
        false => {
            let (kind, version) = (envelope.kind.into(), envelope.version.into());
            return Err(Reason::OtherDriverState { kind, version }.into());
        }
    };
    S::read(&from_stored::<S>(envelope.version, whole)).map(Box::new).map_err(|error| refused(&error))
}

/// Copies at most as many bytes as a driver state can have, so that no other process can change them.
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

fn not_a_driver_state(error: NotADriverState) -> Refused {
    let reason = match error {
        NotADriverState::Damaged { is, should } => Reason::DamagedDriverState { is: is.into(), should: should.into() },
        NotADriverState::Other { kind, version, .. } => {
            Reason::OtherDriverState { kind: kind.into(), version: version.into() }
        }
        NotADriverState::Stale { epoch, .. } => Reason::WrongDriverState { value: epoch.into() },
        NotADriverState::Absent { mark, .. } => Reason::WrongDriverState { value: mark.into() },
        NotADriverState::Cut { says, .. } => Reason::WrongDriverState { value: says.into() },
        NotADriverState::Envelope { version } => Reason::WrongDriverState { value: version.into() },
    };
    Refused { reason, sentence: error.to_string() }
}

/// Converts a driver's error to the reason why it did not go on.
pub fn refused(error: &NicError) -> Refused {
    let reason = match *error {
        NicError::OtherDriverState { kind, version, .. } => {
            Reason::OtherDriverState { kind: kind.into(), version: version.into() }
        }
        NicError::BrokenDriverState { value, .. } | NicError::Absurd { value, .. } => {
            Reason::WrongDriverState { value }
        }
        NicError::FramesCame { .. } => Reason::FramesCame,
        NicError::LeftBehind { value, .. } => Reason::LeftBehind { value },
        _ => Reason::CardGone,
    };
    Refused { reason, sentence: error.to_string() }
}
