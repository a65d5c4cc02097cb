//! CPU time of nodes that know each other, have exchanged frames, and now stay idle.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_net::port::Armed;

use super::netns::TICK;
use super::nodes::{Kept, join};
use crate::call::on_cpu;
use crate::orders::{Fds, Orders};
use crate::program::Program;
use crate::sample::Sample;

/// Number of nodes, each in a process of its own.
pub const NODES: u16 = 32;

/// Longest time for a node to hear all others.
const PATIENCE: Duration = Duration::from_secs(20);

fn others(number: u16) -> impl Iterator<Item = u16> {
    (0..NODES).filter(move |other| *other != number)
}

/// Plays node `number`, with descriptors from standard input. Ends with the process that started it.
pub fn node(number: u16) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let stdin = std::io::stdin();
    let (_, mut fds) = Fds::receive(stdin.as_fd())?;
    let mut vni = join(&mut fds, number, others(number))?;
    for other in others(number) {
        vni.send(other, &[0; 60])?;
    }
    vni.flush();
    let (tick, mut ticked, mut came) = (Timespec::try_from(TICK)?, Instant::now(), 0);
    loop {
        let now = vni.receive(|_| {});
        came += now;
        if now > 0 && came == usize::from(NODES) - 1 {
            rustix::io::write(stdin.as_fd(), b"heard all").context("nobody waits for this node")?;
        }
        if ticked.elapsed() > TICK {
            ticked = Instant::now();
            vni.tick(ticked);
        }
        if now == 0 && vni.arm() == Armed::Idle {
            // The cause of the wake-up does not matter: the next receive finds out.
            let _ = rustix::event::poll(&mut [PollFd::from_borrowed_fd(vni.fd(), PollFlags::IN)], Some(&tick));
            vni.wake();
        }
    }
}

/// Starts the process of a node. Returns our end of its socket, too.
fn start(number: u16, kept: &[Kept]) -> Result<(Program, OwnedFd)> {
    let (node, socket) = Program::in_role(&["idle-node", &number.to_string()], Stdio::inherit())?;
    let fds = kept[usize::from(number)].fds(others(number).map(|other| &kept[usize::from(other)]))?;
    Fds::send(socket.as_fd(), b"node", &fds)?;
    Ok((node, socket))
}

/// Notes `cpu`: the share of a core that all nodes use together, over as many seconds as there are calls.
pub fn measure(orders: Orders) -> Result<Sample> {
    let kept = (0..NODES).map(Kept::new).collect::<Result<Vec<_>>>()?;
    let nodes = (0..NODES).map(|number| start(number, &kept)).collect::<Result<Vec<_>>>()?;
    let patience = Timespec::try_from(PATIENCE)?;
    for (number, (_, socket)) in nodes.iter().enumerate() {
        let heard = rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience))?;
        let said = if heard > 0 { rustix::io::read(socket, &mut [0; 16])? } else { 0 };
        ensure!(said > 0, "node {number} did not hear all others within {} s", PATIENCE.as_secs());
    }
    // Wait until each node has gone to sleep.
    std::thread::sleep(TICK);
    let busy =
        || nodes.iter().try_fold(Duration::ZERO, |sum, (node, _)| Ok::<_, anyhow::Error>(sum + on_cpu(node.id())?));
    let (start, before) = (Instant::now(), busy()?);
    std::thread::sleep(Duration::from_secs(orders.calls));
    let share = (busy()? - before).as_secs_f64() / start.elapsed().as_secs_f64();
    let mut sample = Sample::new();
    sample.note("cpu", share);
    Ok(sample)
}
