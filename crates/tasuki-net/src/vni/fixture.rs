//! Set-up of VNI nodes for the tests of this crate's modules.

use std::os::fd::OwnedFd;

use tasuki_shm::line::{LINE_LEN, Line};
use tasuki_shm::region::{Pages, Region, RegionError, Span};
use tasuki_shm::vni::directory::{Directory, Mac, NodeSet, directory_lines};
use tasuki_shm::vni::node_memory::NodeMemoryFds;
use tasuki_shm::wake::Clapper;

use super::{PeerDescriptor, Vni};

/// Memory of a directory, in one process.
pub type Lines = Span<Line>;

/// Returns the station address of a node.
pub fn mac(node: u16) -> Mac {
    [2, 0, 0, 0, 0, node.to_le_bytes()[0]]
}

/// Makes a directory of `nodes` nodes, and its memory.
pub fn directory(nodes: u16) -> (Lines, Directory<Lines>) {
    let count = directory_lines(64);
    let lines = Region::create("directory", count * LINE_LEN, Pages::Small).unwrap().span(0, count).unwrap();
    let mut directory = Directory::new(lines.clone());
    let mut set = NodeSet::default();
    for number in 0..nodes {
        set.insert(number);
        directory.add(mac(number), number).unwrap();
    }
    directory.set_nodes(&set);
    (lines, directory)
}

/// Opens the end of node `number`, given a node memory and a bell for each node. Adds all other nodes.
pub fn end(number: u16, node_memories: &[NodeMemoryFds], bells: &[(OwnedFd, OwnedFd)]) -> Vni {
    made_by(Vni::new, number, node_memories, bells)
}

/// Like [`end`], for an endpoint whose turns are committed as a whole.
pub fn exact_end(number: u16, node_memories: &[NodeMemoryFds], bells: &[(OwnedFd, OwnedFd)]) -> Vni {
    made_by(Vni::exact, number, node_memories, bells)
}

type Make = fn(u16, NodeMemoryFds, OwnedFd) -> Result<Vni, RegionError>;

fn made_by(make: Make, number: u16, node_memories: &[NodeMemoryFds], bells: &[(OwnedFd, OwnedFd)]) -> Vni {
    let [control, pool] = node_memories[usize::from(number)].fds().map(|fd| fd.try_clone_to_owned().unwrap());
    let bell_receiver = bells[usize::from(number)].0.try_clone().unwrap();
    let mut vni = make(number, NodeMemoryFds { control, pool }, bell_receiver).unwrap();
    for (other, (node_memory, bell)) in (0..).zip(node_memories.iter().zip(bells)).filter(|(other, _)| *other != number)
    {
        let (node_memory, bell) = (node_memory.to_read().unwrap(), Clapper::from_peer(bell.1.try_clone().unwrap()));
        vni.add(PeerDescriptor { number: other, node_memory, bell, own: Default::default() }).unwrap();
    }
    vni.settle();
    vni
}

/// Returns the frames that have reached a node.
pub fn received(vni: &mut Vni) -> Vec<Vec<u8>> {
    let mut came = Vec::new();
    for _ in 0..16 {
        vni.wake();
        vni.receive(|incoming| {
            let mut bytes = vec![0; incoming.len()];
            incoming.copy_to(&mut bytes).expect("nothing was taken back");
            came.push(bytes);
        });
    }
    came
}
