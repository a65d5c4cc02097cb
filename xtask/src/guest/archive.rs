//! The archive that the guest finds in its memory.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Context;

use super::system::read;

/// A cpio archive in `newc`, the format that kernels unpack (the kernel's
/// Documentation/driver-api/early-userspace/buffer-format.rst).
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    count: usize,
}

impl Archive {
    /// Adds a file, a folder or a symbolic link, according to `mode`. The content of a link is its target.
    pub fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.count += 1;
        let (inode, len, name_len) = (self.count, content.len(), name.len() + 1);
        // Magic, inode, mode, user, group, links, time, length, four device numbers, length of the name, checksum.
        let header = format!(
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{len:08x}{:08x}{:08x}{:08x}{:08x}{name_len:08x}{:08x}",
            0, 0, 1, 0, 0, 0, 0, 0, 0
        );
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend(content);
        self.align();
    }

    /// Adds a folder and all its content as `name`. Everything in it keeps its mode.
    pub fn add_tree(&mut self, name: &str, folder: &Path) -> anyhow::Result<()> {
        self.add(name, 0o040_755, &[]);
        for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let (entry, mode) = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?.mode())))?;
            let name = format!("{name}/{}", entry.file_name().context("a name")?.display());
            match mode & 0o170_000 {
                0o040_000 => self.add_tree(&name, &entry)?,
                0o120_000 => self.add(&name, mode, fs::read_link(&entry)?.as_os_str().as_bytes()),
                _ => self.add(&name, mode, &read(&entry)?),
            }
        }
        Ok(())
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_kernels_unpack() {
        let mut archive = Archive::default();
        archive.add("a", 0o100_644, b"hello");
        let bytes = archive.finish();
        assert_eq!(
            &bytes[..110],
            b"07070100000001000081a4000000000000000000000001000000000000000500000000000000000000000000000000000000020000\
              0000"
        );
        assert_eq!(&bytes[110..120], b"a\0hello\0\0\0", "name and content each end on a multiple of four");
        assert_eq!(&bytes[120..126], b"070701");
        assert_eq!(bytes.len() % 4, 0);
    }
}
