//! The runtime directory: what of the daemon has a name, and that only one daemon uses it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Longest path of a socket that the kernel takes, and the longest name that we put into the directory.
const PATH_MAX: usize = 107;
const NAME_MAX: usize = 40;

/// The directory that is meant where none is named: `TASUKI_DIR`, or the usual place.
pub fn usual() -> PathBuf {
    if let Some(named) = std::env::var_os("TASUKI_DIR").filter(|named| !named.is_empty()) {
        return named.into();
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    match (rustix::process::geteuid().is_root(), runtime) {
        (false, Some(folder)) => PathBuf::from(folder).join("tasuki"),
        _ => PathBuf::from("/run/tasuki"),
    }
}

/// Where HTTP is spoken.
pub fn api_socket(folder: &Path) -> PathBuf {
    folder.join("api.sock")
}

/// The directory, for as long as this daemon uses it.
#[derive(Debug)]
pub struct Place {
    folder: PathBuf,
    _lock: File,
}

impl Place {
    /// Takes it, and makes it if there is none. Refused while another daemon uses it.
    pub fn take(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder).context("the runtime directory has no name")?;
        let named = folder.display();
        ensure!(
            folder.as_os_str().len() + NAME_MAX <= PATH_MAX,
            "{named} is too long for the sockets that are to be in it; choose a runtime directory with a shorter path"
        );
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(&folder) {
            bail!("the runtime directory {named} cannot be made ({error}); choose another with --dir, or TASUKI_DIR");
        }
        let meta = std::fs::metadata(&folder).with_context(|| format!("{named} cannot be looked at"))?;
        let ours = rustix::process::geteuid().as_raw();
        ensure!(
            meta.uid() == ours && meta.mode() & 0o022 == 0,
            "others than you can write to {named}; choose a runtime directory that is yours alone (mode 0700)"
        );
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(folder.join("tasukid.lock"));
        let mut lock = opened
            .with_context(|| format!("{named} cannot be written to; choose another with --dir, or TASUKI_DIR"))?;
        if lock.try_lock().is_err() {
            let mut holder = String::new();
            let _ = lock.read_to_string(&mut holder);
            bail!(
                "a tasukid is at work in {named} already (process {}); stop that one, or choose another directory with --dir",
                holder.trim()
            );
        }
        let noted = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| writeln!(lock, "{}", std::process::id()));
        noted.with_context(|| format!("{named} cannot be written to"))?;
        Ok(Place { folder, _lock: lock })
    }

    /// Its path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where a later daemon finds a worker.
    pub fn worker_socket(&self, party: u32) -> PathBuf {
        self.folder.join(format!("worker-{party}.sock"))
    }

    /// Where the model of a NIC serves.
    pub fn model_socket(&self, nic: &str) -> PathBuf {
        self.folder.join(format!("nic-{nic}.sock"))
    }
}
