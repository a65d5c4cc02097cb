//! The relay by loadable kernel modules: unload the driver, load it, and bring its interface up.

use std::fs::{self, File};
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::{AT_REST, Fallible, KIND, SAYS, SILENCE, of_the_card, turn_round, wait};

/// Time from the bench's first frame of the new driver to the next relay.
const SETTLED: Duration = Duration::from_millis(500);

/// Bytes of the receive buffer: some seconds' worth, so that no frame is lost for lack of room.
const ROOM: usize = 32 << 20;

/// State shared by the thread that sends frames back and the thread that changes the driver.
#[derive(Default)]
struct Echo {
    relays: AtomicU32,
    /// Number of relays that the bench has seen.
    seen: AtomicU32,
    back: AtomicU64,
    ends: AtomicBool,
}

impl Echo {
    /// Sends frames back. The socket is bound to no interface, so it needs no new set-up after a relay.
    fn run(&self, socket: &OwnedFd) -> Fallible<()> {
        let mut bytes = [0; 2048];
        while !self.ends.load(Relaxed) {
            let (len, from) = match rustix::net::recvfrom(socket, &mut bytes[..], RecvFlags::empty()) {
                Ok((len, _, Some(from))) => (len, from),
                // No frame came, or the interface is down.
                Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::NETDOWN) => continue,
                Err(errno) => return Err(format!("the socket for frames cannot be read: {errno}").into()),
            };
            let frame = &mut bytes[..len];
            if let Some(seen) = turn_round(frame, self.relays.load(Relaxed)) {
                self.seen.store(seen, Relaxed);
                match rustix::net::sendto(socket, frame, SendFlags::empty(), &from) {
                    Ok(_) => _ = self.back.fetch_add(1, Relaxed),
                    // The interface is down, or gone: the frame is lost, as for any program.
                    Err(Errno::NETDOWN | Errno::NXIO | Errno::NODEV | Errno::NOBUFS) => {}
                    Err(errno) => return Err(format!("a frame cannot be sent back: {errno}").into()),
                }
            }
        }
        Ok(())
    }
}

fn socket() -> Fallible<OwnedFd> {
    let kind = NonZeroU32::new(KIND.to_be().into()).map(Protocol::from_raw);
    let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, kind)?;
    set_socket_recv_buffer_size_force(&socket, ROOM)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_millis(50)))?;
    Ok(socket)
}

/// Waits for the card's interface, which the driver makes.
fn interface() -> Fallible<PathBuf> {
    let mut found = None;
    wait("the interface", || {
        found = of_the_card("/sys/class/net", "device/device")?;
        Ok(found.is_some())
    })?;
    found.ok_or_else(|| "the driver made no interface".into())
}

fn bring_up(interface: &Path) -> Fallible<()> {
    let flags = fs::read_to_string(interface.join("flags"))?;
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16)?;
    Ok(fs::write(interface.join("flags"), format!("{:#x}", flags | 1))?)
}

/// Returns whether the link is up.
fn carrier(interface: &Path) -> bool {
    fs::read_to_string(interface.join("carrier")).is_ok_and(|carrier| carrier.trim() == "1")
}

/// Duration of each step: unload, load, interface up, link up.
type Steps = [Duration; 4];

/// Unloads and loads the driver once. Frames sent once the old driver is gone count as the new one's.
fn relay(module: &Path, echo: &Echo, number: u32) -> Fallible<Steps> {
    let file = File::open(module)?;
    let mut last = Instant::now();
    let mut step = || {
        let now = Instant::now();
        now - std::mem::replace(&mut last, now)
    };
    rustix::system::delete_module(c"e1000e", rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .map_err(|errno| format!("the kernel does not unload e1000e: {errno}"))?;
    echo.relays.store(number, Relaxed);
    let unload = step();
    rustix::system::finit_module(&file, c"", 0).map_err(|errno| format!("the kernel does not load e1000e: {errno}"))?;
    let load = step();
    let interface = interface()?;
    bring_up(&interface)?;
    let up = step();
    wait("the link", || Ok(carrier(&interface)))?;
    Ok([unload, load, up, step()])
}

fn drive(echo: &Echo, count: u32) -> Fallible<Vec<Steps>> {
    let modules = fs::read_dir("/modules")?.filter_map(|file| Some(file.ok()?.path()));
    let mut modules = modules.filter(|file| file.to_string_lossy().ends_with("-e1000e.ko"));
    let module = modules.next().ok_or("the guest has no module e1000e")?;
    let up = interface()?;
    bring_up(&up)?;
    wait("the link", || Ok(carrier(&up)))?;
    println!("{SAYS}ready");
    wait("the stream", || Ok(echo.back.load(Relaxed) > 0))?;
    std::thread::sleep(AT_REST);
    let mut steps = Vec::new();
    for number in 1..=count {
        steps.push(relay(&module, echo, number)?);
        wait("that frames flow again", || Ok(echo.seen.load(Relaxed) == number))?;
        std::thread::sleep(SETTLED);
    }
    Ok(steps)
}

/// Relays the card `count` times under the bench's stream.
pub fn relays(count: u32) -> Fallible<()> {
    let (echo, socket) = (Echo::default(), socket()?);
    std::thread::scope(|scope| {
        let echoes = scope.spawn(|| echo.run(&socket));
        let done = drive(&echo, count);
        if let Ok(steps) = &done {
            println!("{SAYS}done");
            // Wait for the end of the stream.
            let mut before = 0;
            while std::mem::replace(&mut before, echo.back.load(Relaxed)) != echo.back.load(Relaxed) {
                std::thread::sleep(SILENCE);
            }
            for step in steps {
                println!("{SAYS}steps {}", step.map(|took| took.as_nanos().to_string()).join(" "));
            }
        }
        echo.ends.store(true, Relaxed);
        done.and(echoes.join().map_err(|_| "the thread that sends frames back panicked")?).map(|_| ())
    })
}
