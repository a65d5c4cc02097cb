//! Places where a pair of roles may leave files, and their cleanup.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};

use crate::tasukid::stop;

/// Prefix of every name that a bench leaves anywhere. The process id of the bench follows it.
const PREFIX: &str = "tasuki-bench-";

/// Directory in which POSIX shared memory appears as files.
const SHM_DIRECTORY: &str = "/dev/shm";

/// A private directory, and a private prefix for names in `/dev/shm`. Dropping it removes the files of both.
#[derive(Debug)]
pub struct Workplace {
    directory: PathBuf,
    shm_prefix: String,
}

impl Workplace {
    /// Makes a place that no other bench uses.
    pub fn new() -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(&name);
        // The daemon refuses a directory that others can write to.
        DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .with_context(|| format!("{} could not be made", directory.display()))?;
        Ok(Workplace { directory, shm_prefix: format!("{name}_") })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the prefix for names in `/dev/shm`.
    pub fn shm_prefix(&self) -> &str {
        &self.shm_prefix
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        stop(&self.directory);
        // The next bench retries failed removals (`sweep`).
        let _ = fs::remove_dir_all(&self.directory);
        remove_where(Path::new(SHM_DIRECTORY), |name| name.starts_with(&self.shm_prefix));
    }
}

/// Removes the files of benches that were killed before they could clean up.
pub fn sweep() {
    let left_behind = |name: &str| owner(name).is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
    remove_where(&std::env::temp_dir(), left_behind);
    remove_where(Path::new(SHM_DIRECTORY), left_behind);
}

/// Returns the process id of the bench that a name belongs to.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

fn remove_where(directory: &Path, unwanted: impl Fn(&str) -> bool) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_str().is_some_and(&unwanted) {
            let path = entry.path();
            stop(&path);
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_behind() {
        let place = Workplace::new().unwrap();
        let (inside, shared) =
            (place.directory().join("file"), Path::new(SHM_DIRECTORY).join(format!("{}x", place.shm_prefix())));
        fs::write(&inside, "").unwrap();
        fs::write(&shared, "").unwrap();
        drop(place);
        assert!(!inside.exists() && !shared.exists());
    }

    #[test]
    fn only_the_dead_are_swept() {
        // No process has this id: the kernel's limit is 2²².
        let dead = std::env::temp_dir().join(format!("{PREFIX}4294967-0"));
        let alive = Workplace::new().unwrap();
        fs::create_dir_all(&dead).unwrap();
        sweep();
        assert!(!dead.exists());
        assert!(alive.directory().exists());
    }

    #[test]
    fn names_tell_their_owner() {
        assert_eq!(owner("tasuki-bench-12-3_data"), Some(12));
        assert_eq!(owner("tasuki-bench-"), None);
        assert_eq!(owner("iox2_12"), None);
    }
}
