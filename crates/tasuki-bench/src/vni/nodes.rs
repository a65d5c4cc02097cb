//! Nodes of a VNI, made and introduced to each other as the daemon does it.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use tasuki_net::vni::{PeerDescriptor, Vni};
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds, POOL_PAGES, PeerNodeMemory};
use tasuki_shm::wake::BellSender;

use crate::orders::Fds;

/// Descriptors that the daemon keeps of a node.
pub struct Kept {
    pub node_memory: NodeMemoryFds,
    /// Bell pipe: the end that the node reads.
    bell_receiver: OwnedFd,
    /// Bell pipe: the end that other nodes write.
    bell: OwnedFd,
}

impl Kept {
    /// Makes the memory and the bell of a node.
    pub fn new(number: u16) -> Result<Self> {
        let node_memory = NodeMemoryFds::create(&format!("bench-{number}"), POOL_PAGES)?;
        let (bell_receiver, bell) = tasuki_shm::wake::bell_pipe().context("the kernel gave no pipe")?;
        Ok(Kept { node_memory, bell_receiver, bell })
    }

    /// Returns the descriptors that a node needs to know `others`, for [`join`].
    pub fn fds<'k>(&self, others: impl IntoIterator<Item = &'k Kept>) -> Result<Vec<OwnedFd>> {
        let copy = |fd: &OwnedFd| fd.try_clone().context("no descriptor is left for a node");
        let mut fds = vec![copy(&self.node_memory.control)?, copy(&self.node_memory.pool)?, copy(&self.bell_receiver)?];
        for other in others {
            let NodeMemoryFds { control, pool } = other.node_memory.to_read()?;
            fds.extend([control, pool, copy(&other.bell)?]);
        }
        Ok(fds)
    }
}

/// Makes a worker of node `number` that knows `others`, in the order of their descriptors.
pub fn join(fds: &mut Fds, number: u16, others: impl IntoIterator<Item = u16>) -> Result<Vni> {
    let memory = NodeMemory::adopt(NodeMemoryFds { control: fds.next()?, pool: fds.next()? })?;
    let mut vni = Vni::new(number, memory, fds.next()?);
    for number in others {
        let node_memory = PeerNodeMemory::map(&NodeMemoryFds { control: fds.next()?, pool: fds.next()? })?;
        vni.add(PeerDescriptor {
            number,
            node_memory,
            bell: BellSender::from_peer(fds.next()?),
            own: Default::default(),
        })?;
    }
    vni.settle();
    Ok(vni)
}
