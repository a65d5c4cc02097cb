//! Virtual machines as nodes: their front ends keep their connection and their guests lose nothing while workers and
//! daemon are replaced and killed. Needs root.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use super::rig::{lives, pid, signal, until};
use super::rooms::Program;
use super::vnis::{SHOP, World};

/// Starts a program on stock DPDK that answers `ping`, behind DPDK's front end of vhost-user.
fn echoing(socket: &Path) -> Program {
    let vdev = format!("net_virtio_user0,path={},queues=1,queue_size=256,mac=02:00:00:00:00:77", socket.display());
    let mut command = Command::new("dpdk-testpmd");
    command.args(["--lcores", "0,1", "--no-huge", "-m", "64", "--no-pci", "--no-shconf", "--no-telemetry"]);
    command.args(["--vdev", &vdev, "--", "--nb-cores=1", "--forward-mode=icmpecho", "--total-num-mbufs=2048"]);
    command.args(["--auto-start", "--stats-period=3600"]);
    let log = std::fs::File::create(socket.with_extension("log")).expect("a file");
    command.stdin(Stdio::null()).stdout(log.try_clone().expect("a descriptor")).stderr(log);
    Program(command.spawn().expect("looked for before"))
}

#[test]
fn a_machine_on_stock_dpdk_does_not_notice_that_its_back_end_is_replaced_and_killed() {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !has("dpdk-testpmd") || !has("ping") {
        return println!("skipped: needs dpdk-testpmd and ping: apt-get install dpdk-dev iputils-ping");
    }
    let Some(mut world) = World::new() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    let socket = world.rig.path("vm.sock");
    world.rig.ask(&["node", "add", "vm", "--vm", socket.to_str().expect("text")]);
    world.rig.await_pair("vm");
    let pinged = |world: &World, count: &str, pause: &str| {
        let words = ["-c", count, "-i", pause, "-W", "5", "192.0.2.77"];
        let pinged = world.shop.within(|| Command::new("ping").args(words).output().expect("looked for before"));
        String::from_utf8_lossy(&pinged.stdout).into_owned()
    };
    let answers = |world: &World| pinged(world, "1", "1").contains(" 1 received");
    let program = echoing(&socket);
    until(&world.rig, "it answers", || answers(&world));
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| pinged(&world, "2000", "0.005"));
        for _ in 0..3 {
            world.rig.ask(&["worker", "upgrade", "vm"]);
            world.rig.await_pair("vm");
            world.kill_driver("vm");
        }
        let said = pinging.join().expect("looked for before");
        assert!(said.contains(" 2000 received") && !said.contains("duplicates"), "{said}\n{}", world.rig.log());
    });
    // Without a daemon, and with both workers dead: the next ones get what the daemon kept.
    world.rig.kill_daemon();
    assert!(answers(&world), "no daemon is needed");
    world.rig.start();
    let (driver, standby) = world.rig.await_pair("vm");
    for worker in [&standby, &driver] {
        signal(pid(worker), Signal::KILL);
        until(&world.rig, "it is dead", || !lives(pid(worker)));
    }
    world.rig.await_pair("vm");
    until(&world.rig, "it answers", || answers(&world));
    // The next machine is served as well.
    drop(program);
    let _program = echoing(&socket);
    until(&world.rig, "it answers", || answers(&world));
    world.rig.ask(&["node", "remove", "vm"]);
    assert!(!socket.exists(), "nobody serves there any more");
    world.end();
}
