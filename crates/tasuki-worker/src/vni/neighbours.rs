//! The other nodes of a VNI: the daemon says which there are, and how to find them.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use tasuki_net::own::Own;
use tasuki_net::vni::PeerDescriptor;
use tasuki_relay::message::vni;
use tasuki_shm::region::RegionError;
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::node_memory::{NodeMemoryFds, PeerNodeMemory};
use tasuki_shm::wake::BellSender;

use super::VniAttachment;
use crate::attachment::Common;
use crate::handler::FrameHandler;

/// Another node of the VNI. A restarted daemon sends it again.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) peer: PeerDescriptor,
    /// Inode of its node memory.
    inode: u64,
}

impl<D: FrameHandler> VniAttachment<D> {
    /// Adds a node of the VNI, or replaces the memory of a known one.
    pub fn meet(&mut self, common: &mut Common, number: u16, addresses: &[IpAddr], fds: Vec<OwnedFd>) -> Result<()> {
        ensure!(number < NODES_MAX, "the daemon speaks of node {number}, and a VNI has {NODES_MAX}");
        let is_own = self.text.as_ref().is_ok_and(|text| text.number == number);
        ensure!(
            !is_own,
            "the daemon speaks of another node {number}, which is this node's own number; remove that and add it again"
        );
        let count = fds.len();
        let [control, pool, bell] = <[OwnedFd; 3]>::try_from(fds).ok().with_context(|| {
            format!("{count} descriptors came with node {number}, and 3 belong to it; rebuild the older of daemon and worker")
        })?;
        let inode = rustix::fs::fstat(&control).context("a node's memory cannot be used")?.st_ino;
        let own = addresses.iter().copied().collect::<Own>();
        if let Some(known) = self.neighbours.get_mut(&number).filter(|known| known.inode == inode) {
            // A daemon that has just started may send other addresses.
            known.peer.own = own.clone();
            self.on_vni(common).into_iter().for_each(|end| end.set_own(number, own.clone()));
            return Ok(());
        }
        // Whatever becomes of the new one, another node had the memory of before.
        self.part(common, number);
        let node_memory = PeerNodeMemory::map(&NodeMemoryFds { control, pool })
            .with_context(|| format!("node {number} of the VNI is left out"))?;
        // The daemon opened this descriptor for us alone.
        let peer = PeerDescriptor { number, node_memory, bell: BellSender::own(bell), own };
        if let Some(end) = self.on_vni(common) {
            end.add(peer.clone())?;
        }
        self.neighbours.insert(number, Known { peer, inode });
        Ok(())
    }

    /// Removes a node that has left the VNI.
    pub fn part(&mut self, common: &mut Common, number: u16) {
        if self.neighbours.remove(&number).is_some()
            && let Some(end) = self.on_vni(common)
        {
            end.remove(number);
        }
    }

    /// Removes all nodes that are not in `nodes`.
    pub fn keep_only(&mut self, common: &mut Common, nodes: &[u16]) {
        let gone: Vec<u16> = self.neighbours.keys().copied().filter(|number| !nodes.contains(number)).collect();
        gone.into_iter().for_each(|number| self.part(common, number));
    }

    /// Replaces the directory of addresses: a daemon that has just started sends a new one.
    pub fn look_up_in(&mut self, common: &mut Common, directory: OwnedFd) -> Result<()> {
        let place = self.given.fds.get_mut(vni::DIRECTORY).context("there was no directory before")?;
        *place = directory;
        self.switch = None;
        let switch = self.new_switch()?;
        match self.on_vni(common) {
            Some(end) => end.set_switch(switch),
            None => self.switch = Some(switch),
        }
        Ok(())
    }

    /// Adds all other nodes to an end.
    pub(super) fn add_all(&self, common: &mut Common, mut add: impl FnMut(PeerDescriptor) -> Result<(), RegionError>) {
        for (number, known) in &self.neighbours {
            // A node whose ring cannot be given back is left out, so that the end still reaches the other nodes.
            if let Err(error) = add(known.peer.clone()) {
                common.channel.tell(Some(self.given.number), format!("node {number} of the VNI is left out: {error}"));
            }
        }
    }
}
