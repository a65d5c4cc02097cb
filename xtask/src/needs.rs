//! Programs that the suite needs and cargo does not bring: installed when we may, named when not.

use std::env;
use std::path::Path;
use std::process::Command;

use crate::stream;

/// A program, and the Debian package it comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    pub program: &'static str,
    pub package: &'static str,
    /// What cannot run without it.
    pub serves: &'static str,
}

/// Traces the system calls of a process.
pub const STRACE: Need =
    Need { program: "strace", package: "strace", serves: "tests that count system calls will skip themselves" };

/// A compiler for libFuzzer, which is written in C++.
pub const CXX: Need = Need { program: "c++", package: "g++", serves: "the fuzz targets cannot be built" };

/// Network cards that nobody here wrote.
pub const QEMU: Need = Need {
    program: "qemu-system-x86_64",
    package: "qemu-system-x86",
    serves: "tests of the drivers on QEMU's cards, and through VFIO in a guest, will skip themselves",
};

/// Asks who is there, from this machine's own kernel.
pub const PING: Need = Need {
    program: "ping",
    package: "iputils-ping",
    serves: "the demo cannot ask over a TAP (--wire tap), and tests that ping will skip themselves",
};

/// Makes interfaces.
pub const IP: Need = Need {
    program: "ip",
    package: "iproute2",
    serves: "the demo cannot set up a TAP (--wire tap), and bench vni leaves out what goes between namespaces",
};

/// Sends by TCP, from this machine's own kernel.
pub const IPERF3: Need = Need {
    program: "iperf3",
    package: "iperf3",
    serves: "the demo cannot send over a TAP (--wire tap), and bench vni leaves out tcp-netns and udp-netns",
};

/// Sends and receives frames, between two of itself.
pub const TESTPMD: Need = Need { program: "dpdk-testpmd", package: "dpdk", serves: "bench vni leaves out memif" };

/// A client of memif that nobody here wrote. The package brings the driver along.
pub const DPDK: Need = Need {
    program: "dpdk-testpmd",
    package: "dpdk-dev",
    serves: "tests of the memif port with DPDK's client will skip themselves",
};

/// Says of frames on an interface whether they are right.
pub const TSHARK: Need = Need {
    program: "tshark",
    package: "tshark",
    serves: "tests that have Wireshark look at frames will skip themselves",
};

/// Has an interface compute check sums, or leave them.
pub const ETHTOOL: Need = Need {
    program: "ethtool",
    package: "ethtool",
    serves: "tests of check sums between namespaces will skip themselves",
};

/// Fetches files from a web server, in those tests.
pub const CURL: Need =
    Need { program: "curl", package: "curl", serves: "tests of check sums between namespaces will skip themselves" };

/// Counts instructions.
pub const VALGRIND: Need =
    Need { program: "valgrind", package: "valgrind", serves: "instructions per packet are not counted" };

impl Need {
    pub fn is_met(self) -> bool {
        env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(self.program).is_file()))
    }
}

/// Installs what is missing if we are root on a Debian. Otherwise says what to type, and what will
/// not run until then. Either way the caller goes on with what can run.
pub fn provide(needs: &[Need]) {
    let missing = needs.iter().copied().filter(|need| !need.is_met()).collect::<Vec<_>>();
    if missing.is_empty() {
        return;
    }
    if is_root() && Path::new("/usr/bin/apt-get").exists() {
        // A machine that nobody has used yet has no list of packages.
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
