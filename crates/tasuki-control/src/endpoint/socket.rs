//! Sockets at which programs connect to a node.

use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result, bail};
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
        () => owner.and_then(|owner| Some(format!("{what}: owner {}", who(owner).err()?))),
    }
}

fn who(owner: &str) -> Result<Who, String> {
    Who::try_from(owner.to_owned())
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
        give(path, who(owner).map_err(anyhow::Error::msg)?).with_context(|| {
            format!("{shown} cannot be given to {owner}; start tasukid as root, or leave owner out")
        })?;
    }
    Ok(listener)
}

/// Gives a file to a user, or lets a group use it.
fn give(path: &Path, who: Who) -> std::io::Result<()> {
    match who {
        Who::User(user) => chown(path, Some(user), None),
        Who::Group(group) => {
            chown(path, None, Some(group))?;
            std::fs::set_permissions(path, Permissions::from_mode(0o660))
        }
    }
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
        assert!(odd("vm", &path, Some("user:nobody-at-all")).unwrap().contains("is not in /etc/passwd"));
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root gives files away");
        }
        assert_eq!(seen(Some("user:4711")), (4711, group, alone));
    }
}
