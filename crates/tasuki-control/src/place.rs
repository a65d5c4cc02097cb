//! The runtime directory: the named files of the daemon, and the lock by which only one daemon uses it.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

/// Longest path of a socket that the kernel takes, and the longest name that the daemon puts into the directory.
const PATH_MAX: usize = 107;
const NAME_MAX: usize = 40;
/// Time a killed daemon may take to be gone.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The lock file; it contains the pid of the process that holds the lock.
const LOCK: &str = "tasukid.lock";

/// The directory of root's daemon.
const OF_SYSTEM: &str = "/run/tasuki";

/// Returns the directory used when none is named: `TASUKI_DIR`, or the default place.
pub fn usual() -> PathBuf {
    if let Some(named) = std::env::var_os("TASUKI_DIR").filter(|named| !named.is_empty()) {
        return named.into();
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    match (rustix::process::geteuid().is_root(), runtime) {
        (false, Some(folder)) => PathBuf::from(folder).join("tasuki"),
        _ => PathBuf::from(OF_SYSTEM),
    }
}

/// Returns the directory of the daemon that shows something when none is named: the [usual] one, or the system's where
/// the user has no daemon.
pub fn asked() -> PathBuf {
    let (own, of_system) = (usual(), PathBuf::from(OF_SYSTEM));
    let is_named = std::env::var_os("TASUKI_DIR").is_some_and(|named| !named.is_empty());
    let serves = |folder: &Path| api_socket(folder).exists();
    if !is_named && !serves(&own) && serves(&of_system) { of_system } else { own }
}

/// Returns the path of the HTTP socket.
pub fn api_socket(folder: &Path) -> PathBuf {
    folder.join("api.sock")
}

/// Returns the advice about a directory that cannot be written to.
pub fn remedy(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "its disk is full: make room there, or choose another directory with --dir, or TASUKI_DIR"
        }
        _ => "choose another directory with --dir, or TASUKI_DIR",
    }
}

/// Takes a lock. A killed daemon holds it until the kernel has taken its process apart. Returns whether it was taken
/// within the limit.
fn lock_soon(lock: &File, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    while lock.try_lock().is_err() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Returns the path at which the keeper listens.
pub fn keeper_socket(folder: &Path) -> PathBuf {
    folder.join("keeper.sock")
}

/// Returns the process that has the lock of the directory, as it states itself.
pub fn holder(folder: &Path) -> Option<u32> {
    std::fs::read_to_string(folder.join(LOCK)).ok()?.trim().parse().ok()
}

/// Returns whether a living tasukid states that it has the lock of the directory: it may not serve yet, as while it goes on as
/// another program.
pub fn is_held(folder: &Path) -> bool {
    let Some(pid) = holder(folder) else { return false };
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.starts_with("Name:\ttasukid") && !status.contains("\nState:\tZ")
}

/// Makes the directory, if it is not there, and takes its lock within a limit. Returns both.
fn take(folder: &Path, limit: Duration) -> Result<(PathBuf, File)> {
    let folder = std::path::absolute(folder).context("the runtime directory has no name")?;
    let named = folder.display();
    ensure!(
        folder.as_os_str().len() + NAME_MAX <= PATH_MAX,
        "{named} is too long for the sockets that are to be in it; choose a runtime directory with a shorter path"
    );
    if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(&folder) {
        bail!("the runtime directory {named} cannot be made ({error}); {}", remedy(error.kind()));
    }
    let meta = std::fs::metadata(&folder).with_context(|| format!("{named} cannot be looked at"))?;
    let ours = rustix::process::geteuid().as_raw();
    ensure!(
        meta.uid() == ours && meta.mode() & 0o022 == 0,
        "others than you can write to {named}; choose a runtime directory that is yours alone (mode 0700)"
    );
    let opened =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(folder.join(LOCK));
    let unwritable =
        |error: std::io::Error| anyhow!("{named} cannot be written to ({error}); {}", remedy(error.kind()));
    let mut lock = opened.map_err(unwritable)?;
    if !lock_soon(&lock, limit) {
        let mut holder = String::new();
        let _ = lock.read_to_string(&mut holder);
        bail!(
            "a tasukid is at work in {named} already (process {}); stop that one, or choose another directory with --dir",
            holder.trim()
        );
    }
    let noted = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| writeln!(lock, "{}", std::process::id()));
    noted.map_err(unwritable)?;
    Ok((folder, lock))
}

/// The directory, for as long as this daemon uses it. All clones hold one lock.
#[derive(Debug, Clone)]
pub struct Place {
    folder: PathBuf,
    lock: Arc<Mutex<File>>,
}

impl Place {
    /// Takes the directory, and makes it if there is none. Fails while another daemon uses it.
    pub fn take(folder: &Path) -> Result<Self> {
        let (folder, lock) = take(folder, LOCK_TIMEOUT)?;
        Ok(Place { folder, lock: Arc::new(Mutex::new(lock)) })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns whether the lock in the directory is ours. It is another one if somebody has deleted the directory, and
    /// another daemon has begun in it since. If nobody has one, takes it anew.
    pub fn is_ours(&self) -> bool {
        let mark = |meta: Metadata| (meta.dev(), meta.ino());
        let mut ours = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let there = std::fs::metadata(self.folder.join(LOCK)).map(mark);
        let is_same = there.is_ok_and(|there| ours.metadata().is_ok_and(|ours| mark(ours) == there));
        is_same || take(&self.folder, Duration::ZERO).map(|(_, lock)| *ours = lock).is_ok()
    }

    /// Returns the path at which a later daemon finds a worker.
    pub fn worker_socket(&self, party: u32) -> PathBuf {
        self.folder.join(format!("worker-{party}.sock"))
    }

    /// Returns the numbers of the workers that are not in `living` and have left files.
    pub fn workers_but(&self, living: &[u32]) -> BTreeSet<u32> {
        self.files_of_workers().map(|(party, _)| party).filter(|party| !living.contains(party)).collect()
    }

    /// Removes the files left by workers that are not in `living`.
    pub fn forget_workers_but(&self, living: &[u32]) {
        for (_, path) in self.files_of_workers().filter(|(party, _)| !living.contains(party)) {
            let _ = std::fs::remove_file(path);
        }
    }

    fn files_of_workers(&self) -> impl Iterator<Item = (u32, PathBuf)> {
        std::fs::read_dir(&self.folder).into_iter().flatten().flatten().filter_map(|entry| {
            let party = entry.file_name().to_str()?.strip_prefix("worker-")?.split_once('.')?.0.parse().ok()?;
            Some((party, entry.path()))
        })
    }

    /// Returns the path at which the keeper listens.
    pub fn keeper_socket(&self) -> PathBuf {
        keeper_socket(&self.folder)
    }

    /// Returns the path at which the model of a NIC serves.
    pub fn model_socket(&self, nic: &str) -> PathBuf {
        self.folder.join(format!("nic-{nic}.sock"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_was_killed_and_is_not_quite_gone_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let dying = Place::take(folder.path()).unwrap();
        let next = std::thread::scope(|scope| {
            let next = scope.spawn(|| Place::take(folder.path()));
            // In either order, the lock is taken.
            std::thread::sleep(Duration::from_millis(20));
            drop(dying);
            next.join().unwrap()
        });
        let next = next.unwrap();
        let refused = Place::take(folder.path()).unwrap_err().to_string();
        assert!(refused.contains(&format!("already (process {})", std::process::id())), "{refused}");
        drop(next);
    }
}
