//! `tasuki node`: a node, as its options describe it.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use crate::config::Spoof;

/// Subcommands about nodes.
#[derive(Debug, Subcommand)]
pub enum Nodes {
    /// List all nodes, with their work, workers and NICs.
    List,
    /// Add a node while the daemon runs.
    Add(Box<Add>),
    /// End a node's workers, and with them its end of a VNI. The settings that it got by hand are lost.
    Remove {
        /// Name of the node.
        node: String,
    },
}

/// A node that is on a VNI: a network namespace, a program with a memif, a virtual machine, the network behind a Linux
/// interface, or a native program.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("endpoint").required(true).args(["netns", "memif", "vm", "link", "native", "queue_of"])))]
#[command(group(ArgGroup::new("handles").requires("native").args(["work", "program"])))]
pub struct Add {
    /// Name of the node.
    pub node: String,
    /// The network namespace whose programs are to be on the VNI: as `ip netns` calls it, or a path from /, such as
    /// a container's /proc/PID/ns/net.
    #[arg(long, value_name = "NETNS")]
    pub netns: Option<String>,
    /// The socket at which a program on DPDK or VPP connects, as a client of memif.
    #[arg(long, value_name = "SOCKET", value_parser = super::text_path)]
    pub memif: Option<PathBuf>,
    /// The socket at which a virtual machine's front end connects, by vhost-user (docs/users/connect-a-virtual-machine.md).
    #[arg(long, value_name = "SOCKET", value_parser = super::text_path)]
    pub vm: Option<PathBuf>,
    /// The user or group that may use that socket beside tasukid's user, as user:NAME or group:NAME.
    #[arg(long, conflicts_with_all = ["netns", "link", "native", "queue_of"])]
    pub owner: Option<String>,
    /// Microseconds that a frame may wait for others, where many come one by one; by default 250, and 0 for none at all.
    #[arg(long, value_name = "US", conflicts_with = "native")]
    pub latency_us: Option<u32>,
    /// MTU of the interface, in bytes, or of the virtual machine's card: `tasuki vm run` has its guest take it.
    #[arg(long, value_name = "BYTES", conflicts_with_all = ["memif", "link", "native", "queue_of"])]
    pub mtu: Option<u16>,
    /// The Linux interface that is to be on the VNI, with the network behind it: NAME, or NETNS:NAME.
    #[arg(long, value_name = "[NETNS:]NAME")]
    pub link: Option<String>,
    /// The node of whose interface this one drives one more queue, or of whose virtual machine it serves some, with a worker and a
    /// CPU of its own (docs/users/several-cpus.md).
    #[arg(long, value_name = "NODE")]
    pub queue_of: Option<String>,
    /// Number of queues of the interface: nodes with --queue-of drive all but the first.
    #[arg(long, conflicts_with_all = ["memif", "vm", "link", "native", "queue_of"], value_parser = clap::value_parser!(u8).range(1..=8))]
    pub queues: Option<u8>,
    /// The node's program is its worker, which gets the frames itself: name it with --work or --program.
    #[arg(long, requires = "handles")]
    pub native: bool,
    /// The work of the worker: it sends frames back, takes them in, answers ping, or sends numbered frames.
    #[arg(long, value_enum, conflicts_with_all = ["netns", "memif", "vm", "link", "queue_of"])]
    pub work: Option<NativeWork>,
    /// A program of your own that handles frames (docs/users/own-programs.md).
    #[arg(long, value_name = "PATH", value_parser = super::text_path, conflicts_with_all = ["netns", "memif", "vm", "link", "queue_of"])]
    pub program: Option<PathBuf>,
    /// Text that only that program understands.
    #[arg(long, default_value = "", hide_default_value = true, requires = "program")]
    pub options: String,
    /// Frames that a source sends a second; 0 for as many as possible.
    #[arg(long, default_value_t = RATE, hide_default_value = true, requires = "work")]
    pub rate: u64,
    /// Bytes of each frame, without check sequence.
    #[arg(long, default_value_t = SIZE, hide_default_value = true, requires = "work")]
    pub size: u16,
    /// The station address that a source sends to; by default all.
    #[arg(long, value_name = "MAC", requires = "work")]
    pub to: Option<String>,
    /// The number by which the client asks for the memif port.
    #[arg(long, default_value_t = 0, conflicts_with_all = ["netns", "vm", "link", "native", "queue_of"])]
    pub id: u32,
    /// The file with the secret that the memif client must know besides, at most 23 bytes: every user can read a
    /// command line.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["netns", "vm", "link", "native", "queue_of"])]
    pub secret_file: Option<PathBuf>,
    /// The VNI: Ethernet between the nodes that name the same one.
    #[arg(long, default_value = "lan")]
    pub vni: String,
    /// Name of the interface that the programs get; by default the name of the VNI.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["memif", "vm", "link", "native", "queue_of"])]
    pub interface: Option<String>,
    /// The interface's address, such as 192.0.2.1/24, once for each; by default it is yours to set. With --work answer:
    /// the address that it answers for.
    #[arg(long, conflicts_with_all = ["memif", "vm", "link", "queue_of"])]
    pub address: Vec<String>,
    /// Its station address; by default one derived from the node's name.
    #[arg(long)]
    pub mac: Option<String>,
    /// Whether it may send from addresses that are not its own, as a bridge does [default: check; allow with --memif,
    /// --vm and --link].
    #[arg(long, value_enum)]
    pub spoof: Option<Spoof>,
    /// KiB of memory for frames that the node has sent and that are not read yet [default: 2048].
    #[arg(long, value_name = "KIB")]
    pub pool_kib: Option<u32>,
    /// Megabits a second that it may send: more waits.
    #[arg(long, value_name = "MBIT", conflicts_with = "native")]
    pub send_mbit: Option<u32>,
    /// Thousands of frames a second that it may send: more waits.
    #[arg(long, value_name = "KPPS", conflicts_with = "native")]
    pub send_kpps: Option<u32>,
    /// Megabits a second that it may receive: more is dropped and counted.
    #[arg(long, value_name = "MBIT", conflicts_with = "native")]
    pub receive_mbit: Option<u32>,
    /// Thousands of frames a second that it may receive: more is dropped and counted.
    #[arg(long, value_name = "KPPS", conflicts_with = "native")]
    pub receive_kpps: Option<u32>,
    /// The CPU that its workers stay on.
    #[arg(long)]
    pub cpu: Option<u32>,
    /// The nice value of its workers while they may sleep: -20 (before all programs) to 0 (as they) [default: -20; 0
    /// for a program of your own].
    #[arg(long, allow_negative_numbers = true)]
    pub nice: Option<i32>,
    /// Keep no second worker on stand-by, should the first one die.
    #[arg(long)]
    pub no_standby: bool,
    /// Send all its frames by its worker, also those from and to other namespaces, which the kernel would pass on
    /// faster.
    #[arg(long, conflicts_with_all = ["memif", "vm", "link", "native", "queue_of"])]
    pub no_shortcut: bool,
}

/// Frames that a source sends a second, unless told otherwise: as many as possible.
const RATE: u64 = 0;

/// Bytes of each of them.
const SIZE: u16 = 60;

/// The work of a native node's worker, unless it is a program of your own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NativeWork {
    /// Sends each frame back to where it came from.
    Echo,
    /// Takes frames in, and accounts for numbered ones.
    Sink,
    /// Sends numbered frames.
    Source,
    /// Answers ARP and ping for --address.
    Answer,
}

impl Add {
    /// Returns the node's work, as a configuration has it.
    fn work_to_json(&self, secret: Option<&str>) -> Value {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or(path.clone());
        if let Some(socket) = &self.memif {
            let mut work = json!({ "memif": { "socket": absolute(socket), "id": self.id } });
            if let Some(secret) = secret {
                work["memif"]["secret"] = json!(secret);
            }
            if let Some(owner) = &self.owner {
                work["memif"]["owner"] = json!(owner);
            }
            return work;
        }
        if let Some(socket) = &self.vm {
            let mut work = json!({ "vm": { "socket": absolute(socket) } });
            if let Some(mtu) = self.mtu {
                work["vm"]["mtu"] = json!(mtu);
            }
            if let Some(owner) = &self.owner {
                work["vm"]["owner"] = json!(owner);
            }
            return work;
        }
        if let Some(link) = &self.link {
            let (netns, name) =
                link.rsplit_once(':').map_or((None, link.as_str()), |(netns, name)| (Some(netns), name));
            return json!({ "interface": { "netns": netns, "name": name } });
        }
        if let Some(of) = &self.queue_of {
            return json!({ "queue": { "of": of } });
        }
        if let Some(program) = &self.program {
            return json!({ "program": { "path": absolute(program), "options": self.options } });
        }
        if self.native {
            return match self.work {
                Some(NativeWork::Sink) => json!("sink"),
                Some(NativeWork::Source) => {
                    let Add { rate, size, to, .. } = self;
                    json!({ "source": { "rate": rate, "size": size, "to": to } })
                }
                Some(NativeWork::Answer) => {
                    // One address: it has no programs that would look for other stations.
                    let address = self.address.join(", ");
                    json!({ "answer": { "address": address.split('/').next() } })
                }
                Some(NativeWork::Echo) | None => json!("echo"),
            };
        }
        let name = self.interface.as_ref().unwrap_or(&self.vni);
        let mut work = json!({ "tap": { "netns": self.netns, "name": name, "shortcut": !self.no_shortcut } });
        if !self.address.is_empty() {
            work["tap"]["address"] = json!(self.address);
        }
        if let Some(mtu) = self.mtu {
            work["tap"]["mtu"] = json!(mtu);
        }
        if let Some(queues) = self.queues {
            work["tap"]["queues"] = json!(queues);
        }
        work
    }

    /// Returns the node, as a configuration has it.
    pub(super) fn to_json(&self) -> Result<Value> {
        let Add { node, vni, mac, spoof, pool_kib, latency_us, cpu, nice, no_standby, .. } = self;
        let secret = self.secret_file.as_ref().map(|path| {
            let named = path.display();
            let text =
                std::fs::read_to_string(path).with_context(|| format!("the secret in {named} cannot be read"))?;
            let secret = text.trim_end_matches(['\n', '\r']);
            ensure!(!secret.is_empty(), "{named} has no secret in it; write one, or leave --secret-file out");
            Ok(secret.to_owned())
        });
        let secret = secret.transpose()?;
        if self.native {
            let is = |work| self.program.is_none() && self.work == Some(work);
            ensure!(
                self.address.is_empty() || is(NativeWork::Answer),
                "a native node has an address for --work answer alone; leave --address out"
            );
            let of_source = self.rate != RATE || self.size != SIZE || self.to.is_some();
            ensure!(
                !of_source || is(NativeWork::Source),
                "--rate, --size and --to are for --work source; leave them out"
            );
        }
        let limit = |mbit: Option<u32>, kpps: Option<u32>| {
            (mbit.is_some() || kpps.is_some()).then(|| json!({ "mbit": mbit, "kpps": kpps }))
        };
        let limits = [("send", self.send_mbit, self.send_kpps), ("receive", self.receive_mbit, self.receive_kpps)];
        let limits = limits.into_iter().filter_map(|(way, mbit, kpps)| Some((way.to_owned(), limit(mbit, kpps)?)));
        let limits = Some(limits.collect::<serde_json::Map<_, _>>()).filter(|limits| !limits.is_empty());
        let work = self.work_to_json(secret.as_deref());
        let mut node = json!({
            "name": node, "vni": vni, "mac": mac, "spoof": spoof, "pool_kib": pool_kib, "limits": limits, "cpu": cpu, "nice": nice, "standby": !no_standby, "work": work,
        });
        // A daemon from before this setting would refuse its name.
        if let Some(latency_us) = latency_us {
            node["latency_us"] = json!(latency_us);
        }
        Ok(node)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        add: Add,
    }

    #[test]
    fn an_option_that_the_work_of_a_native_node_does_not_have_is_refused() {
        let node = |words: &str| Line::parse_from(format!("add n --native {words}").split(' ')).add.to_json();
        for words in ["--work answer --address 192.0.2.1", "--work source --rate 5 --size 100 --to 02:00:00:00:00:01"] {
            assert!(node(words).is_ok(), "{words}");
        }
        for (option, of) in [("--address 192.0.2.1", "answer"), ("--rate 5", "source"), ("--size 100", "source")] {
            for work in ["echo", "sink", "source", "answer"].into_iter().filter(|work| *work != of) {
                let why = node(&format!("--work {work} {option}")).unwrap_err().to_string();
                assert!(why.contains(&format!("for --work {of}")), "{work} {option}: {why}");
            }
        }
        assert!(node("--program /bin/true --address 192.0.2.1").is_err());
    }

    #[test]
    fn a_file_without_a_secret_in_it_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("web.secret");
        let named = file.to_str().expect("text").to_owned();
        let node = |words: &[&str]| {
            let words = ["add", "web", "--memif", "/run/web.sock"].into_iter().chain(words.iter().copied());
            Line::parse_from(words).add.to_json()
        };
        for text in ["", "\n", "\r\n"] {
            std::fs::write(&file, text).expect("a file");
            let said = node(&["--secret-file", &named]).expect_err("it would let in every client").to_string();
            assert_eq!(said, format!("{named} has no secret in it; write one, or leave --secret-file out"));
        }
        std::fs::write(&file, "hush\n").expect("a file");
        let secret = |words: &[&str]| node(words).expect("a node")["work"]["memif"].get("secret").cloned();
        assert_eq!(secret(&["--secret-file", &named]), Some(json!("hush")));
        assert_eq!(secret(&[]), None);
    }
}
