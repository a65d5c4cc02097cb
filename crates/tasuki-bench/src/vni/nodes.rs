//! Nodes of a VNI, made and introduced to each other as a daemon does it.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use tasuki_net::vni::{PeerDescriptor, Vni};
use tasuki_shm::vni::node_memory::{NodeMemoryFds, POOL_PAGES};
use tasuki_shm::wake::Clapper;

use crate::orders::Fds;

/// What a daemon keeps of a node.
pub struct Kept {
    /// Its memory,
    pub node_memory: NodeMemoryFds,
    /// and the pipe of its bell: the end that it reads,
    bell_receiver: OwnedFd,
    /// and the one that the others write.
    bell: OwnedFd,
}

impl Kept {
    /// A node.
    pub fn new(number: u16) -> Result<Self> {
        let node_memory = NodeMemoryFds::create(&format!("bench-{number}"), POOL_PAGES)?;
        let (bell_receiver, bell) = tasuki_shm::wake::bell_pipe().context("the kernel gave no pipe")?;
        Ok(Kept { node_memory, bell_receiver, bell })
    }

    /// What a node needs to know others, for [`join`].
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

/// A worker of node `number`, which knows all these `others`, in the order in which their descriptors come.
pub fn join(fds: &mut Fds, number: u16, others: impl IntoIterator<Item = u16>) -> Result<Vni> {
    let node_memory = NodeMemoryFds { control: fds.next()?, pool: fds.next()? };
    let mut vni = Vni::new(number, node_memory, fds.next()?)?;
    for number in others {
        let node_memory = NodeMemoryFds { control: fds.next()?, pool: fds.next()? };
        vni.add(PeerDescriptor {
            number,
            node_memory,
            bell: Clapper::from_peer(fds.next()?),
            own: Default::default(),
        })?;
    }
    vni.settle();
    Ok(vni)
}
