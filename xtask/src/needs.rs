//! Programs that the suite needs and cargo does not install. xtask installs them if it may, and names them
//! otherwise.

use std::env;
use std::path::Path;
use std::process::Command;

use crate::stream;

/// A program and its Debian package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    pub program: &'static str,
    pub package: &'static str,
    /// The work that does not run without the program, as a phrase for messages.
    pub serves: &'static str,
}

/// Traces the system calls of a process.
pub const STRACE: Need =
    Need { program: "strace", package: "strace", serves: "tests that count system calls will skip themselves" };

/// Compiles libFuzzer, which is written in C++.
pub const CXX: Need = Need { program: "c++", package: "g++", serves: "the fuzz targets cannot be built" };

/// Emulates network cards that this project did not write.
pub const QEMU: Need = Need {
    program: "qemu-system-x86_64",
    package: "qemu-system-x86",
    serves: "tests of the drivers on QEMU's cards, and through VFIO in a guest, will skip themselves",
};

/// Sends echo requests from this machine's kernel.
pub const PING: Need = Need {
    program: "ping",
    package: "iputils-ping",
    serves: "the demo cannot ask over a TAP (--wire tap), and tests that ping will skip themselves",
};

/// Creates network interfaces.
pub const IP: Need = Need {
    program: "ip",
    package: "iproute2",
    serves: "the demo cannot set up a TAP (--wire tap), and bench vni leaves out the cases between namespaces",
};

/// Sends TCP from this machine's kernel.
pub const IPERF3: Need = Need {
    program: "iperf3",
    package: "iperf3",
    serves: "the demo cannot send over a TAP (--wire tap), and bench vni leaves out tcp-netns and udp-netns",
};

/// Exchanges frames between two instances of itself.
pub const TESTPMD: Need = Need { program: "dpdk-testpmd", package: "dpdk", serves: "bench vni leaves out memif" };

/// A memif client that this project did not write. The package includes the memif driver.
pub const DPDK: Need = Need {
    program: "dpdk-testpmd",
    package: "dpdk-dev",
    serves: "tests of the memif port with DPDK's client will skip themselves",
};

/// Checks whether frames on an interface are correct.
pub const TSHARK: Need = Need {
    program: "tshark",
    package: "tshark",
    serves: "tests that have Wireshark look at frames will skip themselves",
};

/// Switches an interface's checksum offload on or off.
pub const ETHTOOL: Need = Need {
    program: "ethtool",
    package: "ethtool",
    serves: "tests of checksums between namespaces will skip themselves",
};

/// Fetches files from a web server in the same tests.
pub const CURL: Need =
    Need { program: "curl", package: "curl", serves: "tests of checksums between namespaces will skip themselves" };

/// Checks documents against a JSON Schema.
pub const JSONSCHEMA: Need = Need {
    program: "jsonschema",
    package: "python3-jsonschema",
    serves: "tests that check configurations against their JSON Schema will skip themselves",
};

/// Counts instructions.
pub const VALGRIND: Need =
    Need { program: "valgrind", package: "valgrind", serves: "instructions per packet are not counted" };

impl Need {
    pub fn is_met(self) -> bool {
        env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(self.program).is_file()))
    }
}

/// Installs the missing programs if we are root on a Debian machine. Otherwise prints the command to type, and the work
/// that waits for it. In both cases the caller goes on with the rest.
pub fn provide(needs: &[Need]) {
    let missing = needs.iter().copied().filter(|need| !need.is_met()).collect::<Vec<_>>();
    if missing.is_empty() {
        return;
    }
    if is_root() && Path::new("/usr/bin/apt-get").exists() {
        // A fresh machine has no package lists yet.
        if !(apt_get(&["update"]) && apt_get(&install_words(&missing))) {
            println!("apt-get did not install {}; going on without", packages(&missing));
        }
    } else {
        println!("missing: {}. To install: sudo apt-get install -y {}", packages(&missing), packages(&missing));
    }
    for need in missing.iter().filter(|need| !need.is_met()) {
        println!("without {}: {}", need.package, need.serves);
    }
}

fn packages(needs: &[Need]) -> String {
    needs.iter().map(|need| need.package).collect::<Vec<_>>().join(" ")
}

fn install_words(needs: &[Need]) -> Vec<&'static str> {
    ["install", "-y", "--no-install-recommends"].into_iter().chain(needs.iter().map(|need| need.package)).collect()
}

fn apt_get(words: &[&str]) -> bool {
    let mut command = Command::new("apt-get");
    command.args(words).env("DEBIAN_FRONTEND", "noninteractive");
    stream::succeeds(&mut command).unwrap_or_else(|error| {
        println!("{error:#}");
        false
    })
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|answer| answer.stdout.trim_ascii() == b"0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_names_each_missing_package() {
        assert_eq!(packages(&[STRACE, CXX]), "strace g++");
        assert_eq!(install_words(&[CXX]), ["install", "-y", "--no-install-recommends", "g++"]);
    }

    #[test]
    fn a_program_that_is_on_the_path_is_met() {
        assert!(Need { program: "sh", package: "dash", serves: "" }.is_met());
        assert!(!Need { program: "no-such-program-here", package: "", serves: "" }.is_met());
    }
}
