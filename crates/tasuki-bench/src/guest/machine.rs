//! A stock guest beside a network namespace of this host: by our nodes, or by QEMU's own TAP back end.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tasuki_tap::namespace::Namespace;

use crate::interrupt::Interrupt;
use crate::program::{LOOK, Program, ip};
use crate::relay::guest::Recipe;
use crate::relay::system::System;
use crate::workplace::Workplace;

/// Addresses of the guest and of the namespace (for documentation, RFC 5737). The guest takes its own when it boots.
pub const GUEST: [u8; 4] = [192, 0, 2, 9];
pub const HOST: [u8; 4] = [192, 0, 2, 1];

/// The namespace's interface.
const INTERFACE: &str = "nic0";

/// Port of the guest's shell (xtask/src/guest/vm.rs).
const SHELL: u16 = 10;

/// Last line of a guest that has booted.
const READY: &str = "guest: ready";

/// Longest time for the guest to boot, or to answer.
const BOOT: Duration = Duration::from_secs(90);

/// Names of our nodes: the guest's, and the namespace's.
const NODE: &str = "vm";
pub const DESK: &str = "desk";

/// What connects the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Two nodes of a daemon, by vhost-user and through a TAP. A frame of the guest waits for others for so many µs at most.
    Tasuki { latency_us: u32 },
    /// QEMU's own TAP back end.
    Tap,
}

/// A named network namespace. Dropping it removes it.
struct Room(String);

impl Drop for Room {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).stderr(Stdio::null()).status();
    }
}

/// A guest and a namespace. Fields end in the order in which they are dropped.
pub struct Machine {
    qemu: Program,
    pub system: Option<System>,
    room: Room,
    place: Workplace,
}

impl Machine {
    /// Starts the guest. [`await_boot`](Self::await_boot) waits until it is up.
    pub fn start(recipe: &Recipe, link: Link) -> Result<Self> {
        let place = Workplace::new()?;
        let name = place.directory().file_name().context("a folder has a name")?.to_string_lossy().into_owned();
        ip(&format!("netns add {name}"))?;
        let room = Room(name);
        let socket = place.directory().join("vm.sock");
        let address = HOST.map(|byte| byte.to_string()).join(".");
        let (mut command, system) = match link {
            Link::Tasuki { latency_us } => {
                let tap = format!("{{ netns = \"{}\", name = \"{INTERFACE}\", address = \"{address}/24\" }}", room.0);
                let desk = format!("[[node]]\nname = \"{DESK}\"\nvni = \"lan\"\nwork = {{ tap = {tap} }}\n\n");
                let nodes = desk + &node(NODE, &socket) + &format!("latency_us = {latency_us}\n");
                let system = System::configured(place.directory(), &nodes)?;
                system.await_pair(NODE)?;
                system.await_pair(DESK)?;
                let mut command = Command::new(&recipe.program);
                command.arg("-chardev").arg(format!("socket,id=node,path={}", socket.display()));
                command.args(["-netdev", "vhost-user,id=net,chardev=node"]);
                (command, Some(system))
            }
            Link::Tap => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &room.0, &recipe.program]);
                command.args(["-netdev", &format!("tap,id=net,ifname={INTERFACE},script=no,downscript=no,vhost=off")]);
                (command, None)
            }
        };
        // Both without MSI-X, which QEMU 7.2 has for a vhost-user card with KVM only.
        command.args(["-device", "virtio-net-pci,netdev=net,vectors=0,mac=02:00:00:00:00:99"]);
        command.args(&recipe.words).args(["-append", &recipe.kernel_line]);
        command.arg("-serial").arg(format!("file:{}", console(&place).display()));
        let qemu = Program::start_as("QEMU", &mut command)?;
        Ok(Machine { qemu, system, room, place })
    }

    /// Waits until the guest is up.
    pub fn await_boot(&mut self, interrupt: &Interrupt) -> Result<()> {
        let began = Instant::now();
        while !std::fs::read_to_string(console(&self.place)).is_ok_and(|said| said.contains(READY)) {
            interrupt.check()?;
            ensure!(self.qemu.is_running()?, "QEMU ended before its guest was up");
            ensure!(began.elapsed() < BOOT, "the guest was not up within {} s", BOOT.as_secs());
            std::thread::sleep(LOOK);
        }
        if self.system.is_none() {
            ip(&format!(
                "-n {} address add {}/24 dev {INTERFACE}",
                self.room.0,
                HOST.map(|byte| byte.to_string()).join(".")
            ))?;
            ip(&format!("-n {} link set {INTERFACE} up", self.room.0))?;
        }
        // The kernel ends the set-up of a link in its own time.
        while self.shell().is_err() {
            interrupt.check()?;
            ensure!(began.elapsed() < BOOT, "the guest does not answer");
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Has the guest and the namespace send frames for packets of up to `mtu` bytes.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        ip(&format!("-n {} link set {INTERFACE} mtu {mtu}", self.room.0))?;
        self.shell()?.run(&format!("ip link set eth0 mtu {mtu} && echo done"))?.line().map(drop)
    }

    /// Runs `work` in the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        Ok(Namespace::named(&self.room.0).within(|| Ok(work()))?)
    }

    /// Connects to a shell of the guest.
    pub fn shell(&self) -> Result<Shell> {
        let stream = self.within(|| TcpStream::connect_timeout(&SocketAddr::from((GUEST, SHELL)), LOOK * 200))?;
        let stream = stream.context("the guest serves no shell")?;
        stream.set_read_timeout(Some(BOOT))?;
        Ok(Shell(BufReader::new(stream)))
    }

    pub fn qemu(&self) -> u32 {
        self.qemu.id()
    }
}

/// Returns the configuration of a virtual machine's node.
pub fn node(name: &str, socket: &Path) -> String {
    format!("[[node]]\nname = \"{name}\"\nvni = \"lan\"\nwork = {{ vm = {{ socket = \"{}\" }} }}\n\n", socket.display())
}

fn console(place: &Workplace) -> std::path::PathBuf {
    place.directory().join("console.log")
}

/// A shell in the guest, by TCP through the card.
pub struct Shell(BufReader<TcpStream>);

impl Shell {
    /// Runs a command.
    pub fn run(mut self, command: &str) -> Result<Self> {
        self.0.get_mut().write_all(format!("{command}\n").as_bytes()).context("the guest's shell is gone")?;
        Ok(self)
    }

    /// Reads a line of its output.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line).context("the guest says nothing")?;
        let line = line.trim_end().to_owned();
        ensure!(!line.is_empty() && !line.starts_with("failed"), "the guest's program {line}");
        Ok(line)
    }
}
