//! Sockets at which programs connect to a node.

use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::api::roles::Who;
use crate::channel;

/// Bytes of a socket's path (`sun_path` of unix(7), with a zero behind it).
const SOCKET_MAX: usize = 107;

/// Returns the fault of a socket's path or owner in the settings of `what`, if there is one.
pub fn odd(what: &str, path: &Path, owner: Option<&str>) -> Option<String> {
    let shown = path.display();
    match () {
        () if !path.is_absolute() => Some(format!("{what}: its socket is named by a path from /, not {shown}")),
        () if path.as_os_str().len() > SOCKET_MAX => Some(format!(
            "{what}: {shown} has more bytes than the path of a socket can ({SOCKET_MAX}); name a shorter one"
        )),
        () => owner.filter(|owner| !is_who(owner)).map(|owner| {
            format!("{what}: owner {owner:?} names no user or group; write user:NAME or group:NAME, or a number instead of the name")
        }),
    }
}

/// Returns whether a text could name a user or group. One that this machine does not have any more is the trouble of one node
/// alone.
fn is_who(owner: &str) -> bool {
    ["user:", "group:"].iter().any(|of| owner.strip_prefix(of).is_some_and(|name| !name.is_empty()))
}

/// Returns device and inode number of the file at `path`: if another file has taken its place, clients do not find the
/// listener.
pub fn mark(path: &Path) -> Option<String> {
    let there = std::fs::symlink_metadata(path).ok()?;
    Some(format!("{}:{}", there.dev(), there.ino()))
}

/// Returns the same of the file to which `path` leads: programs find a listener behind a symbolic link, too.
pub fn mark_behind(path: &Path) -> Option<String> {
    let there = std::fs::metadata(path).ok()?;
    Some(format!("{}:{}", there.dev(), there.ino()))
}

/// Listens for clients: for the daemon's user alone, until an operator changes the file's owner or mode, or for `owner` as well.
pub fn listen(path: &Path, kind: SocketType, owner: Option<&str>) -> Result<OwnedFd> {
    let shown = path.display();
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.file_type().is_socket() => {
            bail!("{shown} exists and is not a socket; name another path, or remove that file")
        }
        Ok(_) if is_served(path, kind) => {
            bail!("another process serves at {shown}; name another path, or end that process")
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("{shown} cannot be looked at"));
        }
        _ => {}
    }
    let listener = channel::listen_by(path, kind)
        .with_context(|| format!("{shown} cannot be listened at (is its folder there?)"))?;
    if let Some(owner) = owner {
        let who = Who::try_from(owner.to_owned()).map_err(|why| anyhow::anyhow!("{shown}: owner {why}"))?;
        let given = give(path, who).inspect_err(|_| drop(std::fs::remove_file(path)));
        given.with_context(|| format!("{shown} cannot be given to {owner}"))?;
    }
    Ok(listener)
}

/// Gives a socket to a user, or lets a group use it. A user that may write to its folder could have another file of ours given
/// away in its place.
fn give(path: &Path, who: Who) -> Result<()> {
    let (folder, name) = (path.parent().context("it has no folder")?, path.file_name().context("it has no name")?);
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let (its_folder, ours) = (rustix::fs::fstat(&folder)?, rustix::process::geteuid().as_raw());
    let is_ours = [0, ours].contains(&its_folder.st_uid) && its_folder.st_mode & 0o022 == 0;
    ensure!(is_ours, "other users may write to its folder; choose one that tasukid's user alone may write to");
    let file = rustix::fs::openat(&folder, name, flags, Mode::empty())?;
    let is_socket = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) == FileType::Socket;
    ensure!(is_socket, "another file is there by now; apply again");
    let its = |user, group| {
        let given = rustix::fs::chownat(&file, "", user, group, AtFlags::EMPTY_PATH);
        given.context("start tasukid as root, or leave owner out")
    };
    match who {
        Who::User(user) => its(Some(Uid::from_raw(user)), None)?,
        Who::Group(group) => {
            its(None, Some(Gid::from_raw(group)))?;
            let named = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::fs::set_permissions(named, Permissions::from_mode(0o660))?;
        }
    }
    Ok(())
}

/// Returns whether a process serves at `path`.
fn is_served(path: &Path, kind: SocketType) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
    let Ok((socket, address)) = socket.and_then(|socket| Ok((socket, SocketAddrUnix::new(path)?))) else {
        return false;
    };
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::AGAIN) => true,
        // It is another kind of socket, and in use.
        Err(Errno::PROTOTYPE) => true,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_for_the_named_user_or_group_as_well() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm.sock");
        let seen = |owner: Option<&str>| {
            let _listener = listen(&path, SocketType::STREAM, owner).unwrap();
            let file = path.metadata().unwrap();
            std::fs::remove_file(&path).unwrap();
            (file.uid(), file.gid(), file.mode() & 0o777)
        };
        let (user, group, alone) = seen(None);
        assert_eq!(alone & 0o077, 0);
        assert_eq!(seen(Some(&format!("group:{group}"))), (user, group, 0o660));
        assert!(
            odd("vm", &path, Some("root"))
                .unwrap()
                .contains("vm: owner \"root\" names no user or group; write user:NAME")
        );
        assert_eq!(odd("vm", &path, Some("user:nobody-at-all")), None);
        let why = listen(&path, SocketType::STREAM, Some("user:nobody-at-all")).unwrap_err();
        assert!(why.to_string().contains("is not in /etc/passwd"), "{why}");
        std::fs::remove_file(&path).unwrap();
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root gives files away");
        }
        assert_eq!(seen(Some("user:4711")), (4711, group, alone));
        let _listener = listen(&path, SocketType::STREAM, None).unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(give(&path, Who::User(4711)).unwrap_err().to_string().contains("other users may write to its folder"));
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        std::fs::remove_file(&path).unwrap();
        // Nor is another file given away.
        let other = folder.path().join("other");
        std::fs::write(&other, "").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        let before = other.metadata().unwrap();
        assert!(give(&path, Who::Group(4711)).is_err() && give(&other, Who::User(4711)).is_err());
        let after = other.metadata().unwrap();
        assert_eq!((before.uid(), before.gid(), before.mode()), (after.uid(), after.gid(), after.mode()));
    }
}
