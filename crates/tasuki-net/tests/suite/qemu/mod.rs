//! QEMU's models of cards, as independent devices: the tests drive the card of a machine with a halted processor
//! over the qtest socket; the card's wire is a datagram socket.
//!
//! ```text
//!   the test                                                    qemu-system-x86_64
//!   NicMemory ── memfds, opened by QEMU through /proc/PID/fd ──► memory of the machine, at the addresses we say
//!   QtestBus ─── lines of text: configuration space, registers ► card
//!   eventfds ◄── doorbell of an ivshmem device ◄── MSI-X message, a store to that doorbell's address
//!   Wire ◄────── one frame a datagram ────────────────────────► netdev
//! ```
//!
//! An interrupt is thus a store by QEMU, which QEMU turns into a write to our eventfd, without a thread of ours.
//! Only the pin of a card without MSI-X needs a thread, since QEMU reports the pin over the qtest socket
//! (`qtest.rs`).

mod bus;
mod qtest;
mod wire;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tasuki_net::nic::NicMemory;
use tasuki_net::nic::bus::Iova;
use tasuki_shm::region::{PAGE_LEN, Pages, Region};
use tempfile::TempDir;

use bus::Announced;
pub use bus::QtestBus;
use qtest::Qtest;

use crate::process::is_installed;
use crate::wait::readable;
use tasuki_testing::PATIENCE;

pub use wire::Wire;

/// Lowest bus address for memory shared with a card: above all memory of the machine.
pub const MEMORY_AT: Iova = Iova(1 << 32);

/// Most interrupt vectors of a card.
const VECTORS: usize = 8;

/// Slot of the card on the machine's bus.
const CARD: u8 = 3;
/// Slot of the device whose doorbell the interrupts ring.
const BELL: u8 = 4;

/// A machine with a halted processor and one card. It ends on drop, and with the thread that started it.
pub struct Machine {
    process: Child,
    monitor: Monitor,
    bus: QtestBus,
    wire: Wire,
    // Dropped last: it outlives the process.
    _dir: TempDir,
}

/// Returns the two regions of a NIC's memory, as [`Machine::start`] takes them.
pub fn regions(memory: &NicMemory) -> [(&Region, Iova); 2] {
    [(memory.rings(), memory.rings_at()), (memory.arena().region(), memory.arena_at())]
}

impl Machine {
    /// Starts a machine with a card of QEMU's `model` (with `properties`, as `-device` takes them: `mac=…,…`). The
    /// card sees each of `memory` at its address, from [`MEMORY_AT`] on. Later the bus maps these and nothing else.
    ///
    /// If that is impossible here, prints the reason on standard output and returns `None`.
    pub fn start(model: &str, properties: &str, memory: &[(&Region, Iova)]) -> Option<Machine> {
        Self::start_with(None, model, properties, memory)
    }

    /// Starts a machine as [`start`](Self::start) does, with the TAP `nic0` of this network namespace as its wire,
    /// which has `queues` queues; [`wire`](Self::wire) leads nowhere.
    pub fn start_on_tap(
        namespace: &str,
        queues: u8,
        model: &str,
        properties: &str,
        memory: &[(&Region, Iova)],
    ) -> Option<Machine> {
        Self::start_with(Some((namespace, queues)), model, properties, memory)
    }

    fn start_with(
        tap: Option<(&str, u8)>,
        model: &str,
        properties: &str,
        memory: &[(&Region, Iova)],
    ) -> Option<Machine> {
        for program in ["qemu-system-x86_64", "setpriv"] {
            if !is_installed(program) {
                println!("skipped: {program} is not installed");
                return None;
            }
        }
        let dir = tempfile::tempdir().expect("a directory for sockets");
        let at = |name: &str| dir.path().join(name);
        let listen = |name: &str| UnixListener::bind(at(name)).expect("a socket in a directory of our own");
        let (qtest, monitor, bell) = (listen("qtest"), listen("monitor"), listen("bell"));
        std::fs::write(at("halt.bin"), halt()).expect("a file in a directory of our own");
        let wire = Wire::bind(&at("ours"), &at("card"));
        let mut process = command(dir.path(), tap, model, properties, memory).spawn().expect("QEMU starts");
        let mut accept = |listener: &UnixListener| accept(listener, &mut process, dir.path());
        let vectors: Vec<_> = (0..VECTORS)
            .map(|_| rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"))
            .collect();
        // In the order in which QEMU waits for replies: the doorbell before anything else runs.
        let bell = Bell::serve(accept(&bell), &vectors);
        let qtest = Arc::new(Mutex::new(Qtest::new(accept(&qtest))));
        let monitor = Monitor::new(accept(&monitor), at("errors"));
        let announced = memory.iter().map(|(region, at)| Announced::of(region, *at)).collect();
        let bus = QtestBus::new(qtest, announced, vectors, bell);
        Some(Machine { process, monitor, bus, wire, _dir: dir })
    }

    /// Returns a bus to the card. There may be several, as several users may share a real card.
    pub fn bus(&self) -> QtestBus {
        self.bus.clone()
    }

    /// Returns the other end of the card's wire.
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Plugs the wire in or out.
    pub fn set_link(&mut self, up: bool) {
        self.monitor.ask(&format!(r#"{{"execute":"set_link","arguments":{{"name":"n","up":{up}}}}}"#));
    }

    /// Ends the machine at once, as if the card were pulled.
    pub fn end(&mut self) {
        // Neither fails: the process is our child, and only we wait for it.
        self.process.kill().expect("our own child can be killed");
        self.process.wait().expect("our own child can be waited for");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns a BIOS: 64 KiB of HLT. A processor starts 16 bytes from the end, where it first switches interrupts off.
fn halt() -> Vec<u8> {
    let mut bios = vec![0xf4; 0x1_0000];
    // cli; hlt; jmp to the hlt.
    bios[0xfff0..0xfff4].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfd]);
    bios
}

fn command(dir: &Path, tap: Option<(&str, u8)>, model: &str, properties: &str, memory: &[(&Region, Iova)]) -> Command {
    let at = |name: &str| dir.join(name).display().to_string();
    let mut qemu = Command::new("setpriv");
    // Ends with us, even if we are killed.
    qemu.args(["--pdeathsig", "KILL", "--"]);
    if let Some((namespace, _)) = tap {
        qemu.args(["ip", "netns", "exec", namespace]);
    }
    qemu.arg("qemu-system-x86_64");
    qemu.args(["-machine", "q35", "-accel", "tcg", "-display", "none", "-nodefaults", "-qtest-log", "none"]);
    qemu.args(["-m", &format!("16M,slots={},maxmem=8G", memory.len().max(1))]);
    qemu.args(["-bios", &at("halt.bin"), "-qtest", &format!("unix:{}", at("qtest"))]);
    qemu.args(["-qmp", &format!("unix:{}", at("monitor"))]);
    for (i, (region, address)) in memory.iter().enumerate() {
        let path = format!("/proc/{}/fd/{}", std::process::id(), region.fd().as_raw_fd());
        let object = format!("memory-backend-file,id=m{i},size={},share=on,mem-path={path}", region.len());
        qemu.args(["-object", &object, "-device", &format!("pc-dimm,memdev=m{i},addr={:#x}", address.0)]);
    }
    qemu.args(["-chardev", &format!("socket,id=bell,path={}", at("bell"))]);
    qemu.args(["-device", &format!("ivshmem-doorbell,chardev=bell,vectors={VECTORS},ioeventfd=off,addr={BELL:#x}")]);
    let (card, ours) = (at("card"), at("ours"));
    let netdev = match tap {
        None => format!("dgram,id=n,local.type=unix,local.path={card},remote.type=unix,remote.path={ours}"),
        Some((_, queues)) => format!("tap,id=n,ifname=nic0,queues={queues},script=no,downscript=no,vhost=off"),
    };
    qemu.args(["-netdev", &netdev]);
    let comma = if properties.is_empty() { "" } else { "," };
    qemu.args(["-device", &format!("{model},netdev=n,addr={CARD:#x}{comma}{properties}")]);
    let errors = std::fs::File::create(at("errors")).expect("a file in a directory of our own");
    qemu.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    qemu
}

/// Accepts QEMU's connection to `listener`.
fn accept(listener: &UnixListener, process: &mut Child, dir: &Path) -> UnixStream {
    let deadline = Instant::now() + PATIENCE;
    let complaint = |what: &str| -> String {
        let errors = std::fs::read_to_string(dir.join("errors")).unwrap_or_default();
        format!("QEMU {what}; it said: {errors}")
    };
    loop {
        if readable(listener, Duration::from_millis(100)) {
            return listener.accept().expect("a connection is there").0;
        }
        let ended = process.try_wait().expect("our own child can be waited for");
        assert!(ended.is_none(), "{}", complaint("ended at once"));
        assert!(Instant::now() < deadline, "{}", complaint("did not connect"));
    }
}

/// The server from which an ivshmem device gets its memory and its peers: QEMU's docs/specs/ivshmem-spec.txt.
struct Bell {
    /// The device uses neither again, but would react to a closed connection.
    _connection: UnixStream,
    _memory: Region,
}

impl Bell {
    /// Returns the value that rings `vector` of our eventfds when written to the doorbell.
    const fn message(vector: u32) -> u32 {
        Self::PEER << 16 | vector
    }

    /// Number of the peer that has our eventfds.
    const PEER: u32 = 1;

    fn serve(connection: UnixStream, vectors: &[OwnedFd]) -> Self {
        let memory = Region::create("tasuki-qemu-bell", PAGE_LEN, Pages::Small).expect("a page of memory");
        let tell = |number: i64, fd: Option<&dyn AsFdDyn>| {
            let fds: Vec<_> = fd.iter().map(|fd| fd.fd()).collect();
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)), "one descriptor fits");
            let bytes = number.to_le_bytes();
            let slices = [std::io::IoSlice::new(&bytes)];
            rustix::net::sendmsg(&connection, &slices, &mut control, SendFlags::NOSIGNAL).expect("QEMU listens");
        };
        // The version of the protocol, and the device's own number.
        tell(0, None);
        tell(0, None);
        for vector in vectors {
            tell(Self::PEER.into(), Some(vector));
        }
        // The memory, which completes the device's start.
        tell(-1, Some(&memory));
        Bell { _connection: connection, _memory: memory }
    }
}

/// `AsFd` for a list of several types.
trait AsFdDyn {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_>;
}

impl<T: AsFd> AsFdDyn for T {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.as_fd()
    }
}

/// QEMU's monitor, which speaks JSON: <https://www.qemu.org/docs/master/interop/qmp-spec.html>.
struct Monitor {
    stream: BufReader<UnixStream>,
    /// File with QEMU's standard error.
    errors: PathBuf,
}

impl Monitor {
    fn new(stream: UnixStream, errors: PathBuf) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout above zero");
        let mut monitor = Monitor { stream: BufReader::new(stream), errors };
        monitor.ask(r#"{"execute":"qmp_capabilities"}"#);
        monitor
    }

    /// Sends a command and waits for the reply; skips the monitor's events.
    fn ask(&mut self, command: &str) {
        let mut line = String::new();
        let sent = self.stream.get_mut().write_all(command.as_bytes());
        loop {
            line.clear();
            let answered = sent.is_ok() && self.stream.read_line(&mut line).is_ok_and(|len| len > 0);
            assert!(answered && !line.contains(r#""error""#), "{command} was answered {line:?}; {}", self.complaint());
            if line.contains(r#""return""#) {
                return;
            }
        }
    }

    fn complaint(&self) -> String {
        format!("QEMU said: {}", std::fs::read_to_string(&self.errors).unwrap_or_default())
    }
}
