//! Virtual machines as nodes: their front ends keep their connection and their guests lose nothing while workers and
//! daemon are replaced and killed. Needs root.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::net::{Shutdown, SocketAddrUnix};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};
use serde_json::Value;
use tasuki_testing::Program;
use tasuki_testing::process::eventfds;

use super::captures::Capture;
use super::real::released;
use super::rig::{pid, signal, until};
use super::vnis::{self, SHOP, World};

/// How often a guest's driver starts while its workers are killed, and how many of them each time.
const ROUNDS: usize = 4;
const KILLS: usize = 10;

/// Starts a program on stock DPDK that answers `ping`, behind DPDK's front end of vhost-user with rings of this kind.
fn echoing(socket: &Path, rings: &str) -> Program {
    let path = socket.display();
    let vdev = format!("net_virtio_user0,path={path},queues=1,queue_size=256,mac=02:00:00:00:00:77,{rings}");
    vnis::echoing(&vdev, std::fs::File::create(socket.with_extension("log")).expect("a file").into())
}

/// Returns what the status says of the machine of node `vm`.
fn state(world: &World) -> String {
    let nodes = world.rig.json(&["node", "list"]);
    let node = nodes.as_array().and_then(|nodes| nodes.iter().find(|node| node["name"] == "vm")).expect("a node");
    node["client"]["is"].as_str().expect("it has a socket").to_owned()
}

/// The socket's file is deleted, and another process takes its place for a while: the machine that is connected loses
/// nothing, and the next one finds the socket.
fn loses_its_socket(world: &World, socket: &Path) {
    assert_eq!(state(world), "runs");
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| world.ping(700, "0.005", "192.0.2.77"));
        std::fs::remove_file(socket).expect("it is there");
        until(&world.rig, "the socket is there", || socket.exists());
        world.rig.await_pair("vm");
        let other = socket.with_extension("other");
        let taken = UnixListener::bind(&other).expect("a socket");
        std::fs::rename(&other, socket).expect("it takes the place");
        let said = || world.rig.ask(&["status"]);
        let lacks = || said().contains("cannot be made again: another process serves at");
        until(&world.rig, "it says so", lacks);
        drop(taken);
        until(&world.rig, "it is there anew", || !lacks());
        pinging.join().expect("all are answered");
    });
    world.rig.await_pair("vm");
    assert_eq!(state(world), "runs");
    let said = world.rig.ask(&["events"]);
    assert_eq!(said.matches("was deleted, and is there anew").count(), 2, "{said}");
}

#[test]
fn a_machine_on_stock_dpdk_does_not_notice_that_its_back_end_is_replaced_and_killed() {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !has("dpdk-testpmd") || !has("ping") {
        return println!("skipped: needs dpdk-testpmd and ping: apt-get install dpdk-dev iputils-ping");
    }
    let Some(mut world) = World::alone() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--vm", socket.to_str().expect("text")]);
    world.rig.await_pair("vm");
    let answers = |world: &World| world.is_answered("192.0.2.77");
    let endures = |world: &World| {
        until(&world.rig, "it answers", || answers(world));
        std::thread::scope(|scope| {
            let pinging = scope.spawn(|| world.ping(2000, "0.005", "192.0.2.77"));
            for _ in 0..3 {
                world.rig.ask(&["worker", "upgrade", "vm"]);
                world.rig.kill_driver("vm");
            }
            pinging.join().expect("all are answered");
        });
    };
    let without = eventfds(world.rig.daemon_pid());
    let program = echoing(&socket, "packed_vq=0");
    endures(&world);
    // Without a daemon, and with both workers dead: the next ones get what the daemon kept.
    world.rig.kill_daemon();
    assert!(answers(&world), "no daemon is needed");
    world.rig.start();
    let (driver, standby) = world.rig.await_pair("vm");
    [&standby, &driver].into_iter().for_each(|worker| world.rig.kill(worker));
    world.rig.await_pair("vm");
    until(&world.rig, "it answers", || answers(&world));
    loses_its_socket(&world, &socket);
    // The next machine is served as well, with packed rings.
    drop(program);
    until(&world.rig, "it is gone", || !answers(&world));
    until(&world.rig, "it is away", || state(&world) == "away");
    // It comes while tasukid may open no more descriptors, and is kept as soon as it may.
    let (driver, _) = world.rig.await_pair("vm");
    let capture = Capture::begin(&world.rig, "vm.pcapng", &["vm"]);
    // A thread of tasukid closes those of the last machine.
    until(&world.rig, "it has no eventfd of a machine", || eventfds(world.rig.daemon_pid()) == without);
    let few = world.rig.leave_descriptors(2);
    let _program = echoing(&socket, "packed_vq=1,in_order=1");
    let lacks =
        |world: &World| world.rig.ask(&["status"]).contains("lacks those of the program that is connected to node vm");
    until(&world.rig, "it says so", || lacks(&world));
    until(&world.rig, "it answers", || answers(&world));
    assert_eq!(pid(&world.rig.worker("vm", "drives").expect("it drives")), pid(&driver), "nobody is ended for that");
    drop(few);
    until(&world.rig, "nothing is wrong any more", || !lacks(&world));
    let asked = SystemTime::now().duration_since(UNIX_EPOCH).expect("a date");
    assert!(answers(&world), "its worker was asked for it again");
    let (said, seen) = capture.end();
    assert!(seen.frames.last().is_some_and(|frame| frame.at > asked), "its captures go on: {said}");
    endures(&world);
    world.rig.ask(&["node", "remove", "vm"]);
    assert!(!socket.exists(), "nobody serves there any more");
    world.end();
}

/// A process that may use the socket does not push all else out of the events, row: T121
#[test]
fn of_programs_that_come_and_leave_all_the_time_users_hear_of_some() {
    let Some(world) = World::alone() else { return };
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--vm", socket.to_str().expect("text")]);
    world.rig.await_pair("vm");
    for _ in 0..20 {
        let machine = UnixStream::connect(&socket).expect("it is served");
        until(&world.rig, "it is there", || state(&world) == "connected");
        drop(machine);
        until(&world.rig, "it is away", || state(&world) == "away");
    }
    let said = world.rig.ask(&["events"]);
    let heard = |part| said.matches(part).count();
    let count = heard("a program has connected") + heard("the program at");
    // Twenty at once, and one in ten seconds.
    assert!((20..30).contains(&count), "{count}: {said}");
    world.end();
}

/// A daemon that stood still hears at once what a worker has said meanwhile, and that is not too often.
#[test]
fn a_worker_is_not_ended_for_what_it_said_while_the_daemon_stood_still() {
    /// GET_VRING_BASE of ring 0, a change of the device that has an answer: both are as long.
    const STOP: [u32; 5] = [11, 1, 8, 0, 0];
    let Some(world) = World::alone() else { return };
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--vm", socket.to_str().expect("text")]);
    let (driver, _) = world.rig.await_pair("vm");
    let mut machine = UnixStream::connect(&socket).expect("it is served");
    let mut change_for = |time: Duration| {
        let begun = Instant::now();
        while begun.elapsed() < time {
            machine.write_all(&STOP.map(u32::to_ne_bytes).concat()).expect("it is served");
            machine.read_exact(&mut [0; 20]).expect("an answer");
        }
    };
    let daemon = world.rig.daemon_pid();
    signal(daemon, Signal::STOP);
    change_for(Duration::from_secs(2));
    signal(daemon, Signal::CONT);
    change_for(Duration::from_secs(1));
    let drives = world.rig.worker("vm", "drives").expect("it drives");
    assert_eq!(pid(&drives), pid(&driver), "{}", world.rig.log());
    world.end();
}

/// Bytes that go to the guest and back.
const BYTES: usize = 32 << 20;

const GUEST: &str = "192.0.2.9";

/// Starts the machine of node `vm`, with Debian's kernel and these options of `tasuki vm run`.
fn machine(world: &World, words: &[&str]) -> Option<Program> {
    let machine = qemu(world, "console.log", words, &[])?;
    until(&world.rig, "the guest is up", || {
        std::fs::read_to_string(world.rig.path("console.log")).is_ok_and(|said| said.contains("guest: ready"))
    });
    Some(machine)
}

/// Returns two of the CPUs that this process may use, or one where there is one.
fn two_cpus() -> String {
    let set = rustix::thread::sched_getaffinity(None).expect("it is known");
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).take(2);
    cpus.map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(",")
}

/// Starts the machine with these options of `tasuki vm run`, and these of QEMU.
fn qemu(world: &World, console: &str, words: &[&str], more: &[&str]) -> Option<Program> {
    let files = std::env::var_os("TASUKI_VM")?;
    let [kernel, archive] = <[_; 2]>::try_from(std::env::split_paths(&files).collect::<Vec<_>>()).ok()?;
    let console = world.rig.path(console);
    // TCG: /dev/kvm may be there and run no stock guest.
    let mut command = world.rig.command(&["vm", "run", "vm", "--accel", "tcg"]);
    command.args(words);
    command.args(["--append", "console=ttyS0 quiet no_timer_check panic=-1"]);
    command
        .arg("--kernel")
        .arg(kernel)
        .arg("--initrd")
        .arg(archive)
        .arg("--console")
        .arg(&console)
        .arg("--")
        .args(more);
    let complaints = std::fs::File::create(console.with_extension("err")).ok()?;
    command.stdout(Stdio::null()).stderr(complaints);
    Some(Program(command.spawn().ok()?))
}

/// Gives QEMU's monitor a command, and returns what it says.
fn monitor(path: &Path, command: &str) -> String {
    let mut monitor = UnixStream::connect(path).expect("a monitor");
    let mut said = Vec::new();
    let mut until_prompt = |monitor: &mut UnixStream| {
        let mut byte = [0];
        while !said.ends_with(b"(qemu) ") && monitor.read(&mut byte).expect("QEMU runs") == 1 {
            said.push(byte[0]);
        }
        std::mem::take(&mut said)
    };
    until_prompt(&mut monitor);
    monitor.write_all(format!("{command}\n").as_bytes()).expect("QEMU runs");
    String::from_utf8_lossy(&until_prompt(&mut monitor)).into_owned()
}

/// Sends bytes to the guest's echo and compares what comes back. Calls `meanwhile` while they are under way.
fn echoed(world: &World, seed: u64, meanwhile: impl FnOnce()) {
    echoed_some(world, BYTES, seed, meanwhile);
}

fn echoed_some(world: &World, len: usize, seed: u64, meanwhile: impl FnOnce()) {
    let bytes: Vec<u8> =
        (0..len as u64 / 8).flat_map(|at| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    let mut stream = world.shop.within(|| TcpStream::connect((GUEST, 7)).expect("the guest serves an echo"));
    let mut back = stream.try_clone().expect("a descriptor is left");
    std::thread::scope(|scope| {
        let sends = scope.spawn(|| stream.write_all(&bytes));
        let comes = scope.spawn(move || {
            let mut came = vec![0; len];
            back.read_exact(&mut came).map(|()| came)
        });
        meanwhile();
        sends.join().expect("it does not panic").expect("all goes there");
        let came = comes.join().expect("it does not panic").expect("all comes back");
        assert!(came == bytes, "what comes back is what went\n{}", world.rig.log());
    });
}

/// Has long segments echoed, each time while its worker is killed and replaced.
fn echoed_while_replaced(world: &World, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        echoed(world, seed, || {
            world.rig.kill_driver("vm");
            world.rig.await_pair("vm");
            world.rig.ask(&["worker", "upgrade", "vm"]);
        });
    }
}

/// Has `count` echo requests answered, each once, while its workers are killed.
fn pinged_while_killed(world: &World, count: usize, kills: u32) {
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| world.ping(count, "0.002", GUEST));
        (0..kills).for_each(|_| world.rig.kill_driver("vm"));
        pinging.join().expect("all are answered");
    });
}

#[test]
fn a_stock_guest_does_not_notice_that_its_back_end_is_replaced_and_killed() {
    let Some(mut world) = World::alone() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    let socket = world.rig.path("vm.sock");
    // The machine's card has the node's address, so the guest may send from it.
    world.rig.ask(&["node", "add", "vm", "--spoof", "check", "--vm", socket.to_str().expect("text")]);
    let said = world.rig.refused(&["vm", "run", "shop"]);
    assert!(said.contains("node \"shop\" is no virtual machine, but "), "{said}");
    let said = world.rig.refused(&["vm", "run", "web"]);
    assert!(said.contains("tasuki node add web --vm SOCKET"), "{said}");
    let said = world.rig.refused(&["vm", "run", "vm", "--qemu", "/nowhere/qemu"]);
    assert!(said.contains("/nowhere/qemu does not start; install it"), "{said}");
    let said = world.rig.refused(&["vm", "run", "vm", "--qemu", "true"]);
    assert!(said.contains("true does not say a version as QEMU does"), "{said}");
    if Command::new("qemu-system-x86_64").arg("--version").output().is_ok() {
        let said = world.rig.refused(&["vm", "run", "vm"]);
        assert!(said.contains("the machine has nothing to boot; name a kernel (--kernel FILE)"), "{said}");
    }
    world.rig.await_pair("vm");
    let Some(_machine) = machine(&world, &["--cores", &two_cpus()]) else {
        println!("skipped: needs QEMU and a kernel: cargo xtask test");
        return world.end();
    };
    until(&world.rig, "it answers", || world.is_answered(GUEST));
    // Its driver has taken a pair of queues for each virtual CPU.
    assert_eq!(world.count("vm", "queue_pairs"), two_cpus().split(',').count() as u64);
    pinged_while_killed(&world, 3000, 8);
    echoed_while_replaced(&world, 0..3);
    // The guest takes its card away and back: the device is reset, and starts anew, while its workers are killed.
    for _ in 0..ROUNDS {
        let mut shell = world.shop.within(|| TcpStream::connect((GUEST, 10)).expect("the guest serves a shell"));
        let commands = "cd /sys/bus/virtio/drivers/virtio_net; its=$(ls -d virtio*)\n\
                        (sleep 0.2; echo $its > unbind; echo $its > bind; \
                        ip address add 192.0.2.9/24 dev eth0; ip link set eth0 up) > /dev/null 2>&1 &\nexit\n";
        shell.write_all(commands.as_bytes()).expect("it takes commands");
        for _ in 0..KILLS {
            world.rig.kill_driver("vm");
        }
        until(&world.rig, "it is back", || world.is_answered(GUEST));
    }
    echoed(&world, 7, || {});
    // The daemon dies, and then all workers.
    world.rig.kill_daemon();
    world.rig.start();
    let (driver, standby) = world.rig.await_pair("vm");
    [&standby, &driver].into_iter().for_each(|worker| world.rig.kill(worker));
    world.rig.await_pair("vm");
    echoed(&world, 8, || {});
    assert!(!world.rig.log().contains("sent away"), "{}", world.rig.log());
    // The daemon dies with its keeper: fresh workers know the rings from the machine alone.
    for _ in 0..2 {
        world.ping(300, "0.002", GUEST);
        let keeper = world.rig.keeper().expect("a keeper");
        // It would start another keeper.
        signal(world.rig.daemon_pid(), Signal::STOP);
        signal(keeper, Signal::KILL);
        world.rig.kill_daemon();
        world.rig.start();
        until(&world.rig, "it answers again", || world.is_answered(GUEST));
    }
    world.ping(300, "0.002", GUEST);
    world.end();
}

#[test]
fn nodes_that_are_renamed_while_no_daemon_lives_are_other_nodes_and_have_nothing_of_the_former() {
    let Some(mut world) = World::alone() else { return };
    let (socket, room) = (world.rig.path("vm.sock"), world.shop.path());
    world.rig.configure(|text| {
        let shop = format!("tap = {{ netns = {room:?}, name = \"lan\", address = \"{SHOP}/24\" }}");
        let vm = format!("vm = {{ socket = {socket:?} }} }}\nmac = \"02:00:00:00:00:99\"");
        format!(
            "{text}\n[[node]]\nname = \"shop\"\nvni = \"lan\"\nwork = {{ {shop} }}\n\n[[node]]\nname = \"vm\"\nvni = \"lan\"\nwork = {{ {vm}\n"
        )
    });
    world.rig.ask(&["apply"]);
    world.rig.await_pair("shop");
    world.rig.await_pair("vm");
    let Some(_machine) = machine(&world, &[]) else {
        println!("skipped: needs QEMU and a kernel: cargo xtask test");
        return world.end();
    };
    until(&world.rig, "it answers", || world.is_answered(GUEST));
    world.rig.kill_daemon();
    world.rig.configure(|text| {
        text.replace("name = \"shop\"", "name = \"store\"").replace("name = \"vm\"", "name = \"guest\"")
    });
    world.rig.start();
    world.rig.await_pair("store");
    world.rig.await_pair("guest");
    until(&world.rig, "it answers", || world.is_answered(GUEST));
    let table = world.rig.json(&["vni", "table", "lan"]);
    let store = table.as_array().and_then(|nodes| nodes.iter().find(|it| it["node"] == "store")).expect("it is there");
    let said = world.shop.ip("link show lan");
    assert!(said.contains(store["mac"].as_str().expect("an address")), "{said} {store}");
    assert!(!world.rig.log().contains("sent away"), "{}", world.rig.log());
    world.end();
}

/// Returns what a command says in the guest.
fn said_in_guest(world: &World, command: &str) -> String {
    // It answers pings before it serves a shell.
    let begun = std::cell::RefCell::new(None);
    until(&world.rig, "the guest serves a shell", || {
        *begun.borrow_mut() = world.shop.within(|| TcpStream::connect((GUEST, 10)).ok());
        begun.borrow().is_some()
    });
    let mut shell = begun.into_inner().expect("it was just seen");
    shell.write_all(format!("{command}\nexit\n").as_bytes()).expect("it takes commands");
    let mut said = String::new();
    shell.read_to_string(&mut said).expect("it says something");
    said
}

/// Place of RING_PACKED among the features that a driver took, as Linux shows them.
const PACKED: usize = 34;

#[test]
fn a_stock_guest_with_packed_rings_does_not_notice_that_its_back_end_is_replaced_and_killed() {
    let Some(world) = World::alone() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    let socket = world.rig.path("vm.sock");
    let said = world.rig.refused(&["node", "add", "vm", "--mtu", "60", "--vm", socket.to_str().expect("text")]);
    assert!(said.contains("vm: mtu is 60, and a network card has 68 bytes at least"), "{said}");
    world.rig.ask(&["node", "add", "vm", "--mtu", "1400", "--vm", socket.to_str().expect("text")]);
    world.rig.await_pair("vm");
    // QEMU describes all rings, and enables those that its guest uses.
    let Some(_machine) = machine(&world, &["--cores", &two_cpus(), "--packed", "--queues", "32"]) else {
        println!("skipped: needs QEMU and a kernel: cargo xtask test");
        return world.end();
    };
    let ping = |count| world.ping(count, "0.002", GUEST);
    until(&world.rig, "it answers", || world.is_answered(GUEST));
    let features = said_in_guest(&world, "cat /sys/bus/virtio/drivers/virtio_net/virtio*/features");
    assert_eq!(features.trim().as_bytes().get(PACKED), Some(&b'1'), "its driver took packed rings: {features}");
    assert_eq!(said_in_guest(&world, "cat /sys/class/net/eth0/mtu").trim(), "1400", "and the node's MTU");
    pinged_while_killed(&world, 2000, 5);
    echoed_while_replaced(&world, 20..22);
    // The successors have a kick and an interrupt for each ring.
    let (driver, _) = world.rig.await_pair("vm");
    let eventfds = eventfds(pid(&driver));
    assert!(eventfds >= 2 * 64, "{eventfds} of the machine's eventfds");
    // The last release has eight pairs, and cannot go on with these.
    if let Some(before) = released() {
        let said = world.rig.refused(&["upgrade", "--with", before.to_str().expect("text")]);
        assert!(said.contains("is from before machines of more than 8 pairs of queues"), "{said}");
        let worker = before.join("tasuki-worker");
        let said = world.rig.refused(&["worker", "upgrade", "vm", "--with", worker.to_str().expect("text")]);
        assert!(said.contains("its program is from before machines of more than 8 pairs of queues"), "{said}");
        ping(100);
    }
    // The queues have counted it all, over all these workers.
    let status = world.rig.json(&["status"]);
    let node = status["nodes"].as_array().and_then(|nodes| nodes.iter().find(|node| node["name"] == "vm"));
    let queues = node.and_then(|node| node["vm"]["queues"].as_array()).expect("it has queues");
    let sum = |side: &str, what: &str| {
        let its = queues.iter().filter(|queue| queue["queue"].as_str().is_some_and(|name| name.starts_with(side)));
        its.filter_map(|queue| queue[what].as_u64()).sum::<u64>()
    };
    assert_eq!(queues.len(), 2 * two_cpus().split(',').count(), "{status}");
    for side in ["rx", "tx"] {
        let [packets, bytes, kicks, interrupts] = ["packets", "bytes", "kicks", "interrupts"].map(|it| sum(side, it));
        assert!(packets > 2000 && bytes > 2 * BYTES as u64 && interrupts > 0, "{side}: {queues:?}");
        assert!(side == "rx" || kicks > 0, "{queues:?}");
    }
    assert!(!world.rig.log().contains("sent away"), "{}", world.rig.log());
    world.end();
}

/// Cuts the connection of the machine's front end, as its back end does that sends it away.
fn cut(world: &World, socket: &Path) {
    let (driver, _) = world.rig.await_pair("vm");
    let process = Pid::from_raw(i32::try_from(pid(&driver)).expect("a process")).expect("a process");
    let process = rustix::process::pidfd_open(process, PidfdFlags::empty()).expect("it runs");
    let fds = std::fs::read_dir(format!("/proc/{}/fd", pid(&driver))).expect("it runs");
    let numbers = fds.filter_map(|fd| fd.ok()?.file_name().to_str()?.parse().ok());
    let copies = numbers.filter_map(|fd| rustix::process::pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    let is_it = |fd: &OwnedFd| {
        let name = rustix::net::getsockname(fd).and_then(SocketAddrUnix::try_from);
        name.is_ok_and(|name| name.path_bytes() == Some(socket.as_os_str().as_bytes()))
            && rustix::net::getpeername(fd).is_ok()
    };
    let connections: Vec<_> = copies.filter(is_it).collect();
    assert_eq!(connections.len(), 1, "one machine is connected");
    rustix::net::shutdown(&connections[0], Shutdown::Both).expect("it is connected");
}

/// QEMU does not know where a packed ring stands when its connection is cut, and nobody in the guest binds the driver anew.
#[test]
fn a_stock_guest_whose_front_end_is_cut_off_goes_on_when_it_has_connected_again() {
    for rings in [&["--packed"][..], &[]] {
        let Some(world) = World::alone() else { return };
        world.add("shop", &world.shop, SHOP, &[]);
        let socket = world.rig.path("vm.sock");
        let add = || world.rig.ask(&["node", "add", "vm", "--vm", socket.to_str().expect("text")]);
        add();
        world.rig.await_pair("vm");
        let cpus = two_cpus();
        let words = [&["--cores", cpus.as_str()], rings].concat();
        let Some(_machine) = machine(&world, &words) else {
            println!("skipped: needs QEMU and a kernel: cargo xtask test");
            return world.end();
        };
        let ping = |count| world.ping(count, "0.002", GUEST);
        until(&world.rig, "it answers", || world.is_answered(GUEST));
        let goes_on = |what: &str| {
            until(&world.rig, what, || world.is_answered(GUEST));
            ping(300);
        };
        // The rings have been round, and stand at different places.
        goes_on("it runs");
        echoed(&world, 30, || {});
        for seed in 31..34 {
            std::thread::scope(|scope| {
                let pinging = scope.spawn(|| world.pinged(&["-c", "1000", "-i", "0.002", GUEST]));
                cut(&world, &socket);
                let said = pinging.join().expect("it does not panic");
                assert!(!said.contains("duplicates"), "{said}\n{}", world.rig.log());
            });
            goes_on("it answers after a cut");
            echoed(&world, seed, || {});
        }
        // A new node remembers nothing of it.
        world.rig.ask(&["node", "remove", "vm"]);
        add();
        world.rig.await_pair("vm");
        goes_on("it answers a new node");
        echoed(&world, 35, || {});
        world.end();
    }
}

/// QEMU says nothing of a machine that keeps its memory to itself, and the guest nothing of a card that moves no frame.
#[test]
fn a_machine_that_does_not_share_its_memory_is_named() {
    let Some(world) = World::alone() else { return };
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--vm", socket.to_str().expect("text")]);
    world.rig.await_pair("vm");
    let own = ["-object", "memory-backend-memfd,id=own,size=512M,share=off", "-machine", "memory-backend=own"];
    let Some(machine) = qemu(&world, "console.log", &[], &own) else {
        println!("skipped: needs QEMU and a kernel: cargo xtask test");
        return world.end();
    };
    let why = format!("node vm: process {} (qemu-system-x86) does not share its machine's memory", machine.0.id());
    until(&world.rig, "it is named", || world.rig.ask(&["status"]).contains(&why));
    world.rig.await_event(&why);
    // Nobody starts another one beside it by mistake.
    let said = world.rig.refused(&["vm", "run", "vm", "--kernel", "vmlinuz"]);
    assert!(said.contains(&format!("node \"vm\" has a machine already (process {})", machine.0.id())), "{said}");
    drop(machine);
    until(&world.rig, "it is away", || state(&world) == "away");
    assert!(!world.rig.ask(&["status"]).contains(&why), "it has left");
    world.end();
}

/// Returns the sockets of a process.
fn sockets_of(process: u32) -> BTreeSet<PathBuf> {
    let all = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs").flatten();
    let targets = all.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).collect()
}

/// Memory of a size with which QEMU without KVM moves all of it. In memory of whole 256 KiB, QEMU before 9.0 misses what the
/// guest's own CPU writes: it clears the marks of written pages and leaves the fast way past them open ("physmem: Fix
/// migration dirty bitmap coherency with TCG memory access"). Pages of the guest's kernel were old then, and it panicked or
/// stood still after 3 of 18 migrations beside five busy loops.
const MOVES_WHOLE: [&str; 6] = [
    "-object",
    "memory-backend-memfd,id=whole,size=524280k,share=on",
    "-m",
    "524280k",
    "-machine",
    "memory-backend=whole",
];

/// The guest goes from one QEMU to another while its node's worker is killed and replaced. All that the worker writes
/// into the guest's memory arrives with it: bytes that are under way are the same afterwards.
#[test]
fn a_stock_guest_migrates_live_while_its_back_end_is_killed_and_replaced() {
    let Some(world) = World::alone() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--vm", socket.to_str().expect("text")]);
    world.rig.await_pair("vm");
    let [control, incoming] = ["monitor.sock", "incoming.sock"].map(|name| world.rig.path(name));
    let serve = format!("unix:{},server=on,wait=off", control.display());
    let to = format!("unix:{}", incoming.display());
    let boot = |console, more: [&str; 2]| qemu(&world, console, &[], &[&MOVES_WHOLE[..], &more].concat());
    let Some(source) = boot("console.log", ["-monitor", &serve]) else {
        println!("skipped: needs QEMU and a kernel: cargo xtask test");
        return world.end();
    };
    let ping = |count| world.ping(count, "0.005", GUEST);
    until(&world.rig, "it answers", || world.is_answered(GUEST));
    let destination = boot("console-2.log", ["-incoming", &to]).expect("one runs already");
    until(&world.rig, "the other machine waits for the guest", || incoming.exists());
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| ping(1000));
        echoed(&world, 11, || {
            let before = sockets_of(destination.0.id());
            monitor(&control, "migrate_set_parameter max-bandwidth 64M");
            monitor(&control, &format!("migrate -d {to}"));
            for _ in 0..2 {
                world.rig.kill_driver("vm");
                world.rig.await_pair("vm");
            }
            world.rig.ask(&["worker", "upgrade", "vm"]);
            // If it had to connect again, and the guest came before that, QEMU would forget what the driver takes.
            let stays = !before.is_disjoint(&sockets_of(destination.0.id()));
            assert!(stays, "the waiting machine lost its connection\n{}", world.rig.log());
            until(&world.rig, "the guest has gone", || {
                let said = monitor(&control, "info migrate");
                assert!(!said.contains("failed"), "{said}\n{}", world.rig.log());
                said.contains("Migration status: completed")
            });
        });
        let is_answered = pinging.join().is_ok();
        let console = std::fs::read_to_string(world.rig.path("console-2.log")).unwrap_or_default();
        if !is_answered {
            let counts = ["vm", "shop"].map(|node| world.rig.json(&["nic", "counts", &format!("{node}@lan")]));
            let links = world.shop.ip("-s link");
            panic!("not all are answered: {counts:?}\n{links}\n{console}\n{}", world.rig.log());
        }
    });
    // The machine from which the guest went ends, and the worker dies: the guest stays.
    drop(source);
    echoed(&world, 12, || {
        world.rig.kill_driver("vm");
    });
    assert!(!world.rig.log().contains("sent away"), "{}", world.rig.log());
    drop(destination);
    world.end();
}

/// Each worker has some of the guest's queues, and a CPU of its own.
#[test]
fn a_stock_guest_that_two_nodes_serve_does_not_notice_that_their_workers_are_replaced_and_killed() {
    let Some(mut world) = World::alone() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--spoof", "check", "--vm", socket.to_str().expect("text")]);
    let second = ["node", "add", "vm-1", "--queue-of", "vm"];
    world.rig.ask(&second);
    world.rig.await_pair("vm");
    world.rig.await_pair("vm-1");
    let Some(_machine) = machine(&world, &["--cores", &two_cpus(), "--queues", "2"]) else {
        println!("skipped: needs QEMU and a kernel: cargo xtask test");
        return world.end();
    };
    until(&world.rig, "it answers", || world.is_answered(GUEST));
    let pairs = |node: &str| world.count(node, "queue_pairs");
    if two_cpus().contains(',') {
        until(&world.rig, "each has a pair", || pairs("vm-1") == 1);
    }
    let carried = |world: &World| {
        [("vm", "given"), ("vm", "taken"), ("vm-1", "given"), ("vm-1", "taken")]
            .map(|(node, way)| world.count(node, way))
    };
    let both_carry = |world: &World, seed: u64| {
        let before = carried(world);
        for seed in seed..seed + 30 {
            echoed_some(world, BYTES / 32, seed, || {});
            if before.iter().zip(carried(world)).all(|(before, now)| now > *before) {
                return;
            }
        }
        panic!("one carries nothing: {before:?}, {:?}\n{}", carried(world), world.rig.log());
    };
    both_carry(&world, 40);
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| world.ping(1500, "0.002", GUEST));
        for node in ["vm", "vm-1"].into_iter().cycle().take(6) {
            world.rig.kill_driver(node);
        }
        pinging.join().expect("all are answered");
    });
    for (seed, node) in (80..).zip(["vm", "vm-1"]) {
        echoed(&world, seed, || {
            world.rig.kill_driver(node);
            world.rig.await_pair(node);
            world.rig.ask(&["worker", "upgrade", node]);
        });
    }
    world.rig.kill_daemon();
    echoed(&world, 90, || {});
    world.rig.start();
    world.rig.await_pair("vm");
    world.rig.await_pair("vm-1");
    both_carry(&world, 91);
    // A node goes and comes while frames cross.
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| world.ping(500, "0.002", GUEST));
        world.rig.ask(&["node", "remove", "vm-1"]);
        world.rig.ask(&second);
        world.rig.await_pair("vm-1");
        pinging.join().expect("all are answered");
    });
    both_carry(&world, 130);
    assert!(!world.rig.log().contains("sent away"), "{}", world.rig.log());
    world.end();
}

/// A machine written from the specifications, which shows when its back end answers.
#[path = "../../../../tasuki-net/tests/suite/vm.rs"]
#[allow(dead_code, reason = "another suite uses the rest of it")]
pub mod theirs;

/// A front end asks where a ring of the borrower's stands, while the worker is killed that has it, or the one that has the
/// front end: it is answered, nobody else may answer for a worker that is dead, and each frame crosses once.
#[test]
fn a_machine_that_two_nodes_serve_is_answered_where_its_rings_stand_while_workers_and_daemon_are_killed() {
    const PORT: u16 = 4000;
    const MACHINE: &str = "02:00:00:00:00:77";
    let Some(mut world) = World::alone() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--mac", MACHINE, "--spoof", "check", "--vm", socket.to_str().expect("text")]);
    world.rig.ask(&["node", "add", "vm-1", "--queue-of", "vm"]);
    for node in ["shop", "vm", "vm-1"] {
        world.rig.await_pair(node);
    }
    let table = world.rig.json(&["vni", "table", "lan"]);
    let shop = table.as_array().and_then(|nodes| nodes.iter().find(|it| it["node"] == "shop")).expect("it is there");
    let bytes = |mac: &str| mac.split(':').map(|it| u8::from_str_radix(it, 16).expect("a byte")).collect::<Vec<_>>();
    let addresses = [bytes(shop["mac"].as_str().expect("an address")), bytes(MACHINE)].concat();
    let program = world.shop.within(|| UdpSocket::bind((SHOP, PORT)).expect("a socket"));
    program.set_nonblocking(true).expect("it is ours");
    // Of UDP over IPv4 a checksum of 0 is none; the one of the header is right.
    let frame = |pair: usize, number: u32| {
        let mut ip = [&[0x45, 0, 0, 36, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 77, 192, 0, 2, 1][..]].concat();
        let sum: u32 = ip.chunks(2).map(|it| u32::from(u16::from_be_bytes([it[0], it[1]]))).sum();
        let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("two bytes");
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let from = u16::try_from(5000 + pair).expect("a port");
        let udp = [from.to_be_bytes(), PORT.to_be_bytes(), 16_u16.to_be_bytes(), [0; 2]].concat();
        let number = u64::from(number) << 8 | pair as u64;
        [&addresses[..], &[8, 0], &ip, &udp, &number.to_be_bytes()].concat()
    };
    let features = theirs::VERSION_1 | theirs::MRG_RXBUF | theirs::EVENT_IDX | theirs::PROTOCOL;
    let mut machine = theirs::Machine::start_with(&socket, features, 64, 2, std::thread::yield_now);
    let is_lent = |world: &World| until(&world.rig, "it is lent", || world.count("vm-1", "queue_pairs") == 1);
    is_lent(&world);
    let (mut sent, mut came) = (0, Vec::new());
    let mut took = Vec::new();
    for dies in ["none", "vm-1", "vm", "vm-1", "tasukid", "vm", "vm-1", "none"] {
        for pair in 0..2 {
            for _ in 0..20 {
                assert!(machine.send_by_pair(pair, &frame(pair, sent)));
                sent += 1;
            }
        }
        match dies {
            "none" => {}
            "tasukid" => world.rig.kill_daemon(),
            node => world.rig.kill(&world.rig.worker(node, "drives").expect("it drives")),
        }
        let asked = Instant::now();
        let base = machine.ask(11, &theirs::state(3, 0), &mut std::thread::yield_now) >> 32;
        took.push((dies, asked.elapsed()));
        let base = u16::try_from(base).expect("of a split ring");
        assert_eq!(base, machine.position(3), "while {dies} dies");
        machine.start_queue(3, base);
        let all_came = |came: &mut Vec<u64>| {
            let mut bytes = [0; 8];
            while program.recv(&mut bytes).is_ok() {
                came.push(u64::from_be_bytes(bytes));
            }
            came.len() >= sent as usize
        };
        let what = std::cell::RefCell::new(&mut came);
        until(&world.rig, "all have come", || all_came(&mut what.borrow_mut()));
        if dies == "tasukid" {
            world.rig.start();
        }
        world.rig.await_pair("vm");
        world.rig.await_pair("vm-1");
        is_lent(&world);
    }
    println!("answered after {took:?}");
    let numbers = |pair: u64| came.iter().filter(move |it| *it & 0xff == pair).map(|it| it >> 8);
    let right = |pair: u64| (0..u64::from(sent)).filter(move |number| number / 20 % 2 == pair);
    for pair in 0..2 {
        assert!(numbers(pair).eq(right(pair)), "pair {pair}: {:?}", numbers(pair).collect::<Vec<_>>());
    }
    assert!(!machine.is_hung_up(), "{}", world.rig.log());
    world.end();
}

/// The worker of the former node had its pairs, and is ended: nobody knows where they stand.
#[test]
fn a_machine_one_of_whose_nodes_is_renamed_while_no_daemon_lives_connects_again() {
    let Some(mut world) = World::alone() else { return };
    let socket = world.rig.path("vm.sock");
    world.rig.configure(|text| {
        let vm = "mac = \"02:00:00:00:00:77\"\nspoof = \"check\"";
        format!("{text}\n[[node]]\nname = \"vm\"\nvni = \"lan\"\n{vm}\nwork = {{ vm = {{ socket = {socket:?} }} }}\n\n[[node]]\nname = \"one\"\nvni = \"lan\"\nwork = {{ queue = {{ of = \"vm\" }} }}\n")
    });
    world.rig.ask(&["apply"]);
    let features = theirs::VERSION_1 | theirs::MRG_RXBUF | theirs::EVENT_IDX | theirs::PROTOCOL;
    let begin = || theirs::Machine::start_with(&socket, features, 64, 2, std::thread::yield_now);
    ["vm", "one"].into_iter().for_each(|node| _ = world.rig.await_pair(node));
    let former = begin();
    until(&world.rig, "each has a pair", || world.count("one", "queue_pairs") == 1);
    world.rig.kill_daemon();
    world.rig.configure(|text| text.replace("name = \"one\"", "name = \"two\""));
    world.rig.start();
    until(&world.rig, "it is sent away", || former.is_hung_up());
    drop(former);
    world.rig.await_pair("two");
    let machine = begin();
    until(&world.rig, "each has a pair", || world.count("two", "queue_pairs") == 1);
    assert!(!machine.is_hung_up(), "{}", world.rig.log());
    world.end();
}

/// A machine keeps its connection, and each pair its place, as the file gives its node a second CPU and takes it away. The
/// limits of its node hold for both workers together.
#[test]
fn a_machine_goes_on_while_the_file_gives_its_node_a_second_cpu_and_takes_it_away() {
    const MACHINE: &str = "02:00:00:00:00:77";
    let cpus = two_cpus();
    let Some((first, _)) = cpus.split_once(',') else { return println!("skipped: needs two CPUs") };
    let Some(world) = World::alone() else { return };
    let socket = world.rig.path("vm.sock");
    world.rig.configure(|text| {
        let vm = format!("work = {{ vm = {{ socket = {socket:?} }} }}");
        format!("{text}\n[[node]]\nname = \"vm\"\nvni = \"lan\"\nmac = \"{MACHINE}\"\nspoof = \"check\"\nlimits = {{ send = {{ kpps = 1 }} }}\ncpus = [{first}]\n{vm}\n")
    });
    world.rig.ask(&["apply"]);
    world.rig.await_pair("vm");
    let features = theirs::VERSION_1 | theirs::MRG_RXBUF | theirs::EVENT_IDX | theirs::PROTOCOL;
    let mut machine = theirs::Machine::start_with(&socket, features, 64, 2, std::thread::yield_now);
    until(&world.rig, "one serves both pairs", || world.count("vm", "queue_pairs") == 2);
    let [one, two] = [first, &cpus].map(|cpus| format!("cpus = [{cpus}]"));
    world.rig.configure(|text| text.replace(&one, &two));
    world.rig.ask(&["apply"]);
    world.rig.await_pair("vm-1");
    until(&world.rig, "each has a pair", || world.count("vm-1", "queue_pairs") == 1);
    let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 0x77, 8, 0], &[0; 46]].concat();
    let (began, mut went) = (Instant::now(), 0);
    while went < 400 {
        (0..2).for_each(|pair| _ = machine.send_by_pair(pair, &frame));
        went = [1, 3].map(|queue| u128::from(machine.completed(queue))).iter().sum();
        assert!(began.elapsed() < Duration::from_secs(60), "{went} went\n{}", world.rig.log());
    }
    // A node may send the frames of 10 ms at once.
    let lasted = began.elapsed();
    assert!(went <= lasted.as_millis() + 50, "{went} in {lasted:?}");
    // What either node has carried.
    let sent = || {
        let nodes: Value = serde_json::from_str(&world.rig.ask(&["node", "list", "--json"])).expect("JSON");
        let vm = nodes.as_array().into_iter().flatten().find(|node| node["name"] == "vm").expect("it is there");
        let queues = vm["vm"]["queues"].as_array().expect("a list");
        queues.iter().map(|queue| queue["packets"].as_u64().expect("a number")).sum::<u64>()
    };
    let before = sent();
    assert!(u128::from(before) >= went, "{before} of {went}");
    world.rig.configure(|text| text.replace(&two, &one));
    world.rig.ask(&["apply"]);
    until(&world.rig, "the second is gone", || !world.rig.ask(&["node", "list"]).contains("vm-1"));
    assert!(sent() >= before, "{} after {before}", sent());
    for queue in 0..4 {
        let base = machine.ask(11, &theirs::state(queue, 0), &mut std::thread::yield_now) >> 32;
        assert_eq!(base, u64::from(machine.position(queue as usize)), "of ring {queue}");
    }
    assert!(!machine.is_hung_up(), "{}", world.rig.log());
    world.end();
}
