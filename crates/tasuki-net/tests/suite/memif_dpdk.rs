//! DPDK's own client at our server: `dpdk-testpmd` sends back the frames of a native node of the VNI.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tasuki_net::endpoint::Dropped;
use tasuki_net::endpoint::memif::refusal::Refusal;
use tasuki_net::port::Armed;
use tasuki_net::vni::Vni;

use crate::memif::port::{Node, OTHER, PORT, SECRET, World, frame_to, mac};
use crate::net::received;
use crate::process::is_installed;
use tasuki_testing::PATIENCE;

const PROGRAM: &str = "dpdk-testpmd";

fn is_there() -> bool {
    let there = is_installed(PROGRAM);
    if !there {
        println!("skipped: needs {PROGRAM} (Debian: dpdk-dev)");
    }
    there
}

/// A running testpmd; dropping this ends it.
struct Testpmd {
    child: Child,
    /// Closing it ends the program.
    input: Option<ChildStdin>,
    said: Receiver<String>,
    log: Vec<String>,
}

impl Testpmd {
    /// Starts a client that swaps the addresses of each frame and sends it back. Without huge pages, so that it
    /// runs on any machine.
    fn start(folder: &Path, socket: &Path, secret: &str, more: &str) -> Self {
        let vdev = format!(
            "net_memif0,role=client,id=0,socket={},socket-abstract=no,zero-copy=no,secret={secret}{more}",
            socket.display()
        );
        // Each of its two threads may run on any CPU.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from) - 1;
        let cores = format!("0@(0-{cpus}),1@(0-{cpus})");
        let mut child = Command::new(PROGRAM)
            .args(["--lcores", &cores, "--no-huge", "-m", "64", "--no-pci", "--no-shconf", "--no-telemetry"])
            .args(["--log-level", "pmd.net.memif:debug", "--vdev", &vdev, "--"])
            .args(["--nb-cores=1", "--forward-mode=macswap", "--total-num-mbufs=8192", "--auto-start"])
            .env("XDG_RUNTIME_DIR", folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let (say, said) = channel();
        let also = say.clone();
        let (out, errors) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        std::thread::spawn(move || BufReader::new(out).lines().map_while(Result::ok).try_for_each(|it| say.send(it)));
        std::thread::spawn(move || {
            BufReader::new(errors).lines().map_while(Result::ok).try_for_each(|it| also.send(it))
        });
        Testpmd { input: child.stdin.take(), child, said, log: Vec::new() }
    }

    fn hear(&mut self) {
        self.log.extend(self.said.try_iter());
        assert!(matches!(self.child.try_wait(), Ok(None)), "it has ended, and said: {}", self.log.join("\n"));
    }

    /// Waits until it has printed a line with these words.
    fn says(&mut self, words: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            self.hear();
            if self.log.iter().any(|line| line.contains(words)) {
                return;
            }
            assert!(Instant::now() < until, "it does not say {words:?}, but: {}", self.log.join("\n"));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        drop(self.input.take());
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// State shared with the thread that drives a node.
#[derive(Default)]
struct Driver {
    over: AtomicBool,
    connected: AtomicBool,
}

impl Driver {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Drives a node as its worker does.
    fn drive(&self, node: &mut Node, is_over: impl Fn() -> bool) {
        while !is_over() {
            if node.turn() == 0 && node.arm() == Armed::Idle {
                node.rest(Duration::from_millis(20));
            }
            node.tick(Instant::now());
            self.connected.store(node.endpoint.client().is_some(), Ordering::Relaxed);
        }
    }
}

struct OverAtEnd<'a>(&'a Driver);

impl Drop for OverAtEnd<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

/// Lets `serve` drive the world's node until `talk`, which gets a folder and the node's socket, returns. Returns
/// the result of `serve`.
fn beside<T: Send>(
    world: &mut World,
    serve: impl FnOnce(&mut World, &Driver) -> T + Send,
    talk: impl FnOnce(&Driver, &Path, &Path),
) -> T {
    let (folder, path, driver) = (tempfile::tempdir().expect("a folder"), world.path(), Driver::default());
    std::thread::scope(|scope| {
        let node = scope.spawn(|| serve(world, &driver));
        let guard = OverAtEnd(&driver);
        talk(&driver, folder.path(), &path);
        drop(guard);
        node.join().expect("a node does not panic")
    })
}

/// Lengths in bytes of the frames sent to it.
const LENGTHS: [usize; 6] = [60, 64, 300, 1000, 1514, 9000];

/// Starts a client with further arguments `more`; returns it once it sends frames back.
fn forwarder(driver: &Driver, folder: &Path, path: &Path, more: &str, other: &mut Vni) -> Testpmd {
    let address = mac(PORT).map(|byte| format!("{byte:02x}")).join(":");
    let mut testpmd = Testpmd::start(folder, path, SECRET, &format!(",mac={address}{more}"));
    wait_until("the handshake", &mut testpmd, || driver.is_connected());
    wait_for_echo(other, &mut testpmd);
    testpmd
}

fn wait_until(what: &str, testpmd: &mut Testpmd, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        testpmd.hear();
        assert!(Instant::now() < until, "{what} takes too long; testpmd said: {}", testpmd.log.join("\n"));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Number of the frames sent until one comes back: a connected client may not forward yet, and may have posted
/// no buffers.
const PROBE: u32 = u32::MAX;

fn wait_for_echo(other: &mut Vni, testpmd: &mut Testpmd) {
    let until = Instant::now() + PATIENCE;
    loop {
        let _ = other.send(PORT, &frame_to(PORT, OTHER, PROBE, 60));
        other.flush();
        std::thread::sleep(Duration::from_millis(10));
        if !received(other).is_empty() {
            return;
        }
        testpmd.hear();
        assert!(Instant::now() < until, "nothing comes back; testpmd said: {}", testpmd.log.join("\n"));
    }
}

/// Sends numbered frames of these lengths in turn and checks each returned frame.
fn echo(other: &mut Vni, count: u32, window: usize, lens: &[usize]) {
    let (mut under_way, mut sent, mut back) = (VecDeque::new(), 0, 0);
    let until = Instant::now() + PATIENCE;
    while back < count {
        while sent < count && under_way.len() < window {
            let len = lens[sent as usize % lens.len()];
            if other.send(PORT, &frame_to(PORT, OTHER, sent, len)).is_err() {
                break;
            }
            under_way.push_back(frame_to(OTHER, PORT, sent, len));
            sent += 1;
        }
        other.flush();
        let came = received(other);
        for (from, frame) in came {
            assert_eq!(from, PORT);
            if frame == frame_to(OTHER, PORT, PROBE, 60) {
                continue;
            }
            let expected = under_way.pop_front().expect("no more comes back than was sent");
            let number = u32::from_le_bytes(frame[14..18].try_into().expect("four bytes"));
            let lens = (expected.len(), frame.len());
            assert!(
                frame == expected,
                "frame {back} of {} bytes was expected, and {number} of {} came",
                lens.0,
                lens.1
            );
            back += 1;
        }
        assert!(Instant::now() < until, "{back} of {sent} frames came back");
        std::thread::yield_now();
    }
}

#[test]
fn dpdk_sends_back_what_it_is_sent_and_nothing_is_lost_or_changed() {
    if !is_there() {
        return;
    }
    let mut world = World::new(1);
    let mut other = world.net.take(OTHER.into());
    let serve = |world: &mut World, driver: &Driver| {
        driver.drive(&mut world.node, || driver.is_over());
        (world.node.given, world.node.taken, world.node.dropped, world.node.endpoint.clients)
    };
    let (given, taken, dropped, clients) = beside(&mut world, serve, |driver, folder, path| {
        // It connects, leaves and connects again, with buffers and rings of another size.
        for more in ["", ",rsize=8,bsize=1024"] {
            let mut testpmd = forwarder(driver, folder, path, more, &mut other);
            echo(&mut other, 20_000, 64, &LENGTHS);
            testpmd.hear();
            drop(testpmd);
            let until = Instant::now() + PATIENCE;
            while driver.is_connected() {
                assert!(Instant::now() < until, "that it went is seen");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    assert!(given >= 40_000 && taken >= 40_000, "{given} {taken} {dropped:?}");
    // Until the client forwards, probes find no buffers.
    let others = Dropped { away: 0, no_buffer: 0, ..dropped };
    assert_eq!(others, Dropped::default());
    assert_eq!((clients.attached, clients.left, clients.refused), (2, 2, 0));
}

#[test]
fn dpdk_does_not_notice_that_its_server_is_replaced_all_the_time() {
    if !is_there() {
        return;
    }
    let mut world = World::new(1);
    let mut other = world.net.take(OTHER.into());
    let serve = |world: &mut World, driver: &Driver| {
        let mut successors = 0;
        while !driver.is_over() {
            let soon = Instant::now() + Duration::from_millis(5);
            driver.drive(&mut world.node, || driver.is_over() || Instant::now() > soon);
            if driver.is_connected() {
                world.succeed(successors % 2 == 0);
                successors += 1;
            }
        }
        successors
    };
    let successors = beside(&mut world, serve, |driver, folder, path| {
        let mut testpmd = forwarder(driver, folder, path, "", &mut other);
        echo(&mut other, 20_000, 64, &LENGTHS);
        testpmd.hear();
    });
    println!("{successors} successors");
    assert!(successors > 10, "{successors}");
}

#[test]
fn dpdk_is_told_that_its_secret_is_wrong() {
    if !is_there() {
        return;
    }
    let mut world = World::new(1);
    let serve = |world: &mut World, driver: &Driver| {
        driver.drive(&mut world.node, || driver.is_over());
        world.node.endpoint.clients
    };
    let clients = beside(&mut world, serve, |_, folder, path| {
        let mut testpmd = Testpmd::start(folder, path, "another", "");
        testpmd.says(&Refusal::Secret.to_string());
    });
    assert_eq!((clients.attached, clients.why), (0, Some(Refusal::Secret)));
}
