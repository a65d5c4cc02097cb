//! A socket at which a virtual machine's front end connects to a node, by vhost-user. The daemon listens and gives every
//! worker of the node the descriptor. The driver of the node's end of its VNI is the back end.

use std::io::{BufRead, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::net::SocketType;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::Kind;
use super::socket::{listen, odd};

/// The socket at which a machine's front end connects: QEMU's vhost-user, or any other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Path of the socket, from /.
    #[schema(value_type = String, pattern = "^/")]
    pub socket: PathBuf,
    /// The longest packet that the machine's card takes, in bytes without the Ethernet header: its guest's driver gets that as
    /// its MTU. 68 to 65,535; without it, the guest takes what it wants, 1,500 by default.
    #[schema(minimum = 68)]
    pub mtu: Option<u16>,
    /// The user or group that may use the socket beside tasukid's user, as user:NAME or group:NAME: QEMU's, under libvirt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(user|group):.+$")]
    pub owner: Option<String>,
}

/// The least MTU of a virtio network device (VIRTIO 1.2, 5.1.4.1).
const MTU_MIN: u16 = 68;

/// Bytes of a process's `maps` that are read at most: it may have as many, and as long ones, as it likes. Of more nothing is
/// known.
const MAPS_MAX: u64 = 4 << 20;

/// Returns whether a process with these `maps` (proc(5)) has one of the files, by device and number, for itself alone: QEMU
/// maps the memory of a machine so if it lacks `share=on`, and what others read in the file is not what the guest wrote.
pub fn has_private(maps: impl BufRead, files: &[(u64, u64)]) -> bool {
    let name = |(device, number): &(u64, u64)| {
        (format!("{:02x}:{:02x}", rustix::fs::major(*device), rustix::fs::minor(*device)), number.to_string())
    };
    let names: Vec<_> = files.iter().map(name).collect();
    // Of each file, whether it is mapped for itself, and whether it is shared.
    let mut seen = vec![[false; 2]; files.len()];
    let mut maps = maps.take(MAPS_MAX);
    for line in maps.by_ref().split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let mut fields = line.split_ascii_whitespace();
        let (Some(access), Some(device), Some(number)) = (fields.nth(1), fields.nth(1), fields.next()) else {
            continue;
        };
        if let Some(at) = names.iter().position(|(its, inode)| its == device && inode == number) {
            seen[at][usize::from(access.ends_with('s'))] = true;
        }
    }
    maps.limit() > 0 && seen.contains(&[true, false])
}

impl Kind for Vm {
    fn kind(&self) -> &'static str {
        "vm"
    }

    /// The path of its socket.
    fn label(&self) -> String {
        self.socket.display().to_string()
    }

    fn socket(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    fn shown(&self) -> String {
        format!("virtual machine at {}", self.label())
    }

    /// Workers from before a node had a latency insist on one here.
    fn text(&self) -> String {
        json!({ "latency_us": 0 }).to_string()
    }

    fn odd(&self) -> Option<String> {
        let is_short = || {
            let mtu = self.mtu.filter(|mtu| *mtu < MTU_MIN)?;
            Some(format!("vm: mtu is {mtu}, and a network card has {MTU_MIN} bytes at least; raise it"))
        };
        odd("vm", &self.socket, self.owner.as_deref()).or_else(is_short)
    }

    fn make(&self) -> Result<OwnedFd> {
        listen(&self.socket, SocketType::STREAM, self.owner.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_private_if_its_process_has_no_shared_view_of_it() {
        let maps = "55d0c0000000-55d0c0001000 r--p 00000000 08:01 131 /usr/bin/qemu
7fe000000000-7fe010000000 rw-p 00000000 00:01 77 /memfd:memory (deleted)
7fe010000000-7fe020000000 rw-s 00000000 00:01 78 /memfd:shared (deleted)
7fe020000000-7fe030000000 rw-p 00000000 00:01 79 /memfd:both
7fe030000000-7fe040000000 rw-s 00000000 00:01 79 /memfd:both
7fe040000000-7fe050000000 rw-p 00000000 00:00 0
";
        let file = |number| (rustix::fs::makedev(0, 1), number);
        assert!(has_private(maps.as_bytes(), &[file(78), file(77)]));
        for number in [78, 79, 131, 7] {
            assert!(!has_private(maps.as_bytes(), &[file(number)]), "{number}");
        }
        assert!(!has_private(&b""[..], &[file(77)]));
        let endless = maps.as_bytes().chain(std::io::BufReader::new(std::io::repeat(b'\n')));
        assert!(!has_private(endless, &[file(77)]));
    }
}
