//! Nodes on a VNI, set up as a daemon does it.

use std::os::fd::OwnedFd;

use tasuki_net::vni::{PeerDescriptor, Vni};
use tasuki_shm::pool::Pool;
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds, POOL_PAGES, PeerNodeMemory};
use tasuki_shm::wake::BellSender;

/// The descriptors that a daemon keeps for a node.
struct Kept {
    node_memory: NodeMemoryFds,
    bell_receiver: OwnedFd,
    bell: OwnedFd,
}

impl Kept {
    fn new(number: u16, pages: u32) -> Self {
        let node_memory = NodeMemoryFds::create(&format!("test-{number}"), pages).unwrap();
        let (bell_receiver, bell) = tasuki_shm::wake::bell_pipe().unwrap();
        Kept { node_memory, bell_receiver, bell }
    }

    fn fds(&self) -> NodeMemoryFds {
        let [control, pool] = self.node_memory.fds().map(|fd| fd.try_clone_to_owned().unwrap());
        NodeMemoryFds { control, pool }
    }

    fn own(&self) -> (NodeMemory, Pool) {
        NodeMemory::adopt(self.fds()).unwrap()
    }

    fn peer_descriptor(&self, number: u16) -> PeerDescriptor {
        PeerDescriptor {
            number,
            node_memory: PeerNodeMemory::map(&self.node_memory.to_read().unwrap()).unwrap(),
            bell: BellSender::from_peer(self.bell.try_clone().unwrap()),
            own: Default::default(),
        }
    }
}

/// Nodes that all know each other.
pub struct Net {
    kept: Vec<Kept>,
    nodes: Vec<Option<Vni>>,
    pages: u32,
    /// Nodes whose turns are committed as a whole.
    exact: Vec<u16>,
}

impl Net {
    pub fn of(count: u16) -> Self {
        Self::with(count, POOL_PAGES)
    }

    /// Makes `count` nodes, each with a pool of `pages` pages.
    pub fn with(count: u16, pages: u32) -> Self {
        let kept: Vec<_> = (0..count).map(|number| Kept::new(number, pages)).collect();
        let mut net = Net { kept, nodes: Vec::new(), pages, exact: Vec::new() };
        net.nodes = (0..count).map(|number| Some(net.join(number))).collect();
        net
    }

    /// Makes a worker for a node.
    fn join(&self, number: u16) -> Vni {
        let kept = &self.kept[usize::from(number)];
        let make = if self.exact.contains(&number) { Vni::exact } else { Vni::new };
        let mut vni = make(number, kept.own(), kept.bell_receiver.try_clone().unwrap());
        for (other, kept) in (0..).zip(&self.kept).filter(|(other, _)| *other != number) {
            vni.add(kept.peer_descriptor(other)).unwrap();
        }
        vni.settle();
        vni
    }

    pub fn node(&mut self, number: usize) -> &mut Vni {
        self.nodes[number].as_mut().expect("it was not taken away")
    }

    /// Takes a node whose turns are committed as a whole.
    pub fn take_exact(&mut self, number: u16) -> Vni {
        self.exact.push(number);
        self.replace(number.into());
        self.take(number.into())
    }

    pub fn take(&mut self, number: usize) -> Vni {
        self.nodes[number].take().expect("it was not taken away")
    }

    /// Replaces the worker; the new one uses the same memory.
    pub fn replace(&mut self, number: usize) {
        drop(self.nodes[number].take());
        self.nodes[number] = Some(self.join(u16::try_from(number).unwrap()));
    }

    /// Replaces the worker; the new one knows no other node.
    pub fn replace_alone(&mut self, number: usize) {
        drop(self.nodes[number].take());
        let kept = &self.kept[number];
        let name = u16::try_from(number).unwrap();
        let mut vni = Vni::new(name, kept.own(), kept.bell_receiver.try_clone().unwrap());
        vni.settle();
        self.nodes[number] = Some(vni);
    }

    /// Tells a node of another one.
    pub fn meet(&mut self, number: usize, other: u16) {
        let peer_descriptor = self.kept[usize::from(other)].peer_descriptor(other);
        self.node(number).add(peer_descriptor).unwrap();
    }

    /// Gives the number to a new node, after all others have forgotten the old one.
    pub fn renew(&mut self, number: usize) {
        drop(self.nodes[number].take());
        let name = u16::try_from(number).unwrap();
        self.nodes.iter_mut().flatten().for_each(|other| other.remove(name));
        self.kept[number] = Kept::new(name, self.pages);
        self.nodes[number] = Some(self.join(name));
        let peer_descriptors: Vec<_> = (0..self.nodes.len())
            .filter(|it| *it != number)
            .map(|it| (it, self.kept[number].peer_descriptor(name)))
            .collect();
        for (other, peer_descriptor) in peer_descriptors {
            self.node(other).add(peer_descriptor).unwrap();
        }
    }

    /// Returns the memory of a node, for a test that plays its worker.
    pub fn node_memory(&self, number: usize) -> NodeMemoryFds {
        self.kept[number].fds()
    }

    /// Rings a node's bell with these bytes.
    pub fn ring(&self, number: usize, bytes: &[u8]) {
        rustix::io::write(&self.kept[number].bell, bytes).expect("a pipe with room");
    }

    pub fn all_pages(&self) -> u32 {
        self.pages
    }

    /// Returns the bytes of control memory that the kernel has allocated for a node.
    pub fn memory(&self, number: usize) -> u64 {
        let stat = rustix::fs::fstat(&self.kept[number].node_memory.control).unwrap();
        u64::try_from(stat.st_blocks).unwrap() * 512
    }
}

/// Returns a frame that differs from every other.
pub fn frame(number: u32, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0_u32..).take(len).map(|i| i.wrapping_mul(31).wrapping_add(number).to_le_bytes()[0]).collect();
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes[4..8].copy_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
    bytes
}

/// Returns all received frames, with their senders. Repeats until it has looked at every node.
pub fn received(vni: &mut Vni) -> Vec<(u16, Vec<u8>)> {
    let mut came = Vec::new();
    let mut in_vain = 0;
    while in_vain < 2 {
        // A node that has just begun to send is noticed only when we wake.
        vni.wake();
        let before = came.len();
        for _ in 0..16 {
            vni.receive(|incoming| {
                let mut bytes = vec![0; incoming.len()];
                incoming.copy_to(&mut bytes).expect("nothing was taken back");
                came.push((incoming.from, bytes));
            });
        }
        in_vain = if came.len() > before { 0 } else { in_vain + 1 };
    }
    came
}
