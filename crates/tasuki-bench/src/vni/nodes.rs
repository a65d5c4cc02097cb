//! Nodes of a VNI, made and introduced to each other as a daemon does it.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use tasuki_net::vni::{Introduction, Vni};
use tasuki_shm::vni::estate::{EstateFds, POOL_PAGES};
use tasuki_shm::wake::Clapper;

use crate::orders::Fds;

/// What a daemon keeps of a node.
pub struct Kept {
    /// Its memory,
    pub estate: EstateFds,
    /// and the pipe of its bell: the end that it reads,
    ear: OwnedFd,
    /// and the one that the others write.
    bell: OwnedFd,
}

impl Kept {
    /// A node.
    pub fn new(number: u16) -> Result<Self> {
        let estate = EstateFds::create(&format!("bench-{number}"), POOL_PAGES)?;
        let (ear, bell) = tasuki_shm::wake::bell_pipe().context("the kernel gave no pipe")?;
        Ok(Kept { estate, ear, bell })
    }

    /// What a node needs to know others, for [`join`].
    pub fn fds<'k>(&self, others: impl IntoIterator<Item = &'k Kept>) -> Result<Vec<OwnedFd>> {
        let copy = |fd: &OwnedFd| fd.try_clone().context("no descriptor is left for a node");
        let mut fds = vec![copy(&self.estate.control)?, copy(&self.estate.pool)?, copy(&self.ear)?];
        for other in others {
            let EstateFds { control, pool } = other.estate.to_read()?;
            fds.extend([control, pool, copy(&other.bell)?]);
        }
        Ok(fds)
    }
}

/// A worker of node `number`, which knows all these `others`, in the order in which their descriptors come.
pub fn join(fds: &mut Fds, number: u16, others: impl IntoIterator<Item = u16>) -> Result<Vni> {
    let estate = EstateFds { control: fds.next()?, pool: fds.next()? };
    let mut vni = Vni::new(number, estate, fds.next()?)?;
    for number in others {
        let estate = EstateFds { control: fds.next()?, pool: fds.next()? };
        vni.add(Introduction { number, estate, bell: Clapper::from_peer(fds.next()?), own: Default::default() })?;
    }
    vni.settle();
    Ok(vni)
}
