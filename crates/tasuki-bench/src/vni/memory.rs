//! Memory of a hundred nodes: when none sends, when each sends to its neighbour, and when all send to all.

use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit};
use tasuki_net::vni::Vni;
use tasuki_shm::region::PAGE_LEN;
use tasuki_shm::vni::node_memory::POOL_PAGES;

use super::nodes::{Kept, join};
use crate::orders::{Fds, Orders};
use crate::sample::Sample;

/// Number of nodes.
pub const NODES: u16 = 100;

/// Bytes of a node's pool.
pub const POOL: u64 = POOL_PAGES as u64 * PAGE_LEN as u64;

/// Patterns of traffic.
pub const WHO: [&str; 3] = ["silent", "neighbours", "all"];

/// Number of descriptors needed: in one process each node has one of every other node's bell.
const DESCRIPTORS: u64 = NODES as u64 * NODES as u64 * 6 / 5;

/// Returns whether this process may open so many descriptors.
pub fn is_possible() -> bool {
    rustix::process::getrlimit(Resource::Nofile).maximum.is_none_or(|maximum| maximum >= DESCRIPTORS)
}

/// Returns advice on how to allow them.
pub fn advice() -> String {
    format!("its nodes have {DESCRIPTORS} descriptors; raise the hard limit (ulimit -Hn {DESCRIPTORS}, as root)")
}

/// Notes, for each of [`WHO`], the total bytes with whole pools, and, as `WHO-allocated`, the bytes that the kernel
/// has allocated so far.
///
/// The first figure counts whole pools because nodes use pools in turn, and sooner or later write them whole.
pub fn measure(_: Orders) -> Result<Sample> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let current = limit.current.map(|current| current.max(DESCRIPTORS));
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current, maximum: limit.maximum })
        .with_context(|| format!("memory-{NODES}: {}", advice()))?;
    let kept = (0..NODES).map(Kept::new).collect::<Result<Vec<_>>>()?;
    let mut nodes = (0..NODES).map(|number| meet(&kept, number)).collect::<Result<Vec<_>>>()?;
    let mut sample = Sample::new();
    let next = |from: u16| (from + 1) % NODES;
    let others = |from: u16| (0..NODES).filter(move |to| *to != from);
    note(&mut sample, WHO[0], &kept)?;
    talk(&mut nodes, |from| vec![next(from)])?;
    note(&mut sample, WHO[1], &kept)?;
    talk(&mut nodes, |from| others(from).filter(|to| *to != next(from)).collect())?;
    note(&mut sample, WHO[2], &kept)?;
    Ok(sample)
}

/// Makes a worker of node `number` that knows all other nodes.
fn meet(kept: &[Kept], number: u16) -> Result<Vni> {
    let others = || (0..NODES).filter(|other| *other != number);
    let fds = kept[usize::from(number)].fds(others().map(|other| &kept[usize::from(other)]))?;
    join(&mut Fds::of(fds), number, others())
}

/// Sends a frame from each node to all nodes that `to_whom` names, and checks that all arrive.
fn talk(nodes: &mut [Vni], to_whom: impl Fn(u16) -> Vec<u16>) -> Result<()> {
    let mut expected = vec![0; nodes.len()];
    for (from, node) in (0..).zip(&mut *nodes) {
        for to in to_whom(from) {
            node.send(to, &[0; 60])?;
            expected[usize::from(to)] += 1;
        }
        node.flush();
    }
    for (node, expected) in nodes.iter_mut().zip(expected) {
        node.wake();
        let mut came = 0;
        // Each receive polls one more ring, besides those that were busy last.
        for _ in 0..4 * NODES {
            came += node.receive(|_| {});
        }
        ensure!(came == expected, "{came} of {expected} frames came to node {}", node.number());
    }
    Ok(())
}

fn note(sample: &mut Sample, who: &str, kept: &[Kept]) -> Result<()> {
    let bytes = |fd: &dyn Fn(&Kept) -> rustix::io::Result<rustix::fs::Stat>| -> Result<u64> {
        kept.iter().try_fold(0, |sum, kept| Ok(sum + u64::try_from(fd(kept)?.st_blocks)? * 512))
    };
    let control = bytes(&|kept| rustix::fs::fstat(kept.node_memory.control.as_fd()))?;
    let pools = bytes(&|kept| rustix::fs::fstat(kept.node_memory.pool.as_fd()))?;
    sample.note(who, (control + POOL * u64::from(NODES)) as f64);
    sample.note(&format!("{who}-allocated"), (control + pools) as f64);
    Ok(())
}
