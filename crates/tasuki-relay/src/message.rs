//! What daemon and workers tell each other besides the packets of [`crate::wire`]: what a worker is, and what a NIC is made of.
//!
//! All travels on one unix socket that keeps bounds, the worker's standard input. A message is one of two:
//!
//! - 36 bytes, the number of a NIC (little-endian, as the daemon gave it in [`ToWorker::Nic`]) and a packet: [`frame`], [`unframe`];
//! - a message: JSON, which begins with `{`. The descriptors that it speaks of travel beside it, in the order in which it names them.
//!
//! A message with a field that the reader does not know is read without it; a message of a kind that it does not know is refused with a
//! sentence. [`SPEECH`] stands in the first one each way.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use crate::wire;

/// Of the messages. Grows when one of them changes what it means.
pub const SPEECH: u32 = 3;

/// Most bytes of a message.
pub const MESSAGE_MAX: usize = 64 * 1024;

/// Most bytes of a program's options.
pub const OPTIONS_MAX: usize = 4096;

/// Most descriptors beside one.
pub const FDS_MAX: usize = 32;

/// Most bytes of what a worker says of how memory lies that it has made.
pub const LIES_MAX: usize = 512;

/// A packet as it travels: with the number of the NIC that it is about.
pub fn frame(nic: u32, packet: [u8; wire::LEN]) -> [u8; wire::LEN + 4] {
    let mut bytes = [0; wire::LEN + 4];
    bytes[..4].copy_from_slice(&nic.to_le_bytes());
    bytes[4..].copy_from_slice(&packet);
    bytes
}

/// The reverse of [`frame`]; nothing if this is a message.
pub fn unframe(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (nic, packet) = bytes.split_first_chunk::<4>()?;
    let is_packet = bytes.len() == wire::LEN + 4 && bytes[0] != b'{';
    is_packet.then(|| (u32::from_le_bytes(*nic), packet))
}

/// What a node does with the frames of its NICs, while it has no guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Sends each frame back to where it came from.
    Echo,
    /// Takes frames in, and accounts for the numbers of those that are numbered.
    Sink,
    /// Answers ARP and ICMP echo requests, and takes in what else comes.
    Answer {
        /// Whose it is.
        address: Ipv4Addr,
    },
    /// Passes frames on between its NIC and a TAP, so that the programs of a network namespace have the NIC. The TAP's descriptor comes with
    /// [`ToWorker::Begin`].
    Tap,
    /// Serves memif to a program, which so is on the node's VNI. The listening socket comes with [`ToWorker::Begin`].
    Memif,
    /// Joins its NIC and the node's VNI: what lies behind the NIC is reached from the VNI, and the other way.
    Uplink,
    /// Sends numbered frames.
    Source {
        /// A second; 0 for as many as go.
        rate: u64,
        /// Bytes of each, without check sequence.
        size: u16,
        /// To which station address; without, to all.
        #[serde(default)]
        to: Option<[u8; 6]>,
    },
    /// What the program does that the worker is: a user's own.
    Program,
}

/// The first message to a worker: what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// [`SPEECH`] of the daemon.
    pub speech: u32,
    /// Its number in lease words.
    pub party: u32,
    /// Its node's name.
    pub node: String,
    /// What it does with frames.
    pub work: Work,
    /// For a program of the user's own, which alone knows what it means; at most [`OPTIONS_MAX`] bytes.
    #[serde(default)]
    pub options: String,
    /// The CPU that it runs on while it drives a NIC or is ready to, if it is to stay on one.
    pub cpu: Option<u32>,
    /// Where it runs otherwise. None of them: on that CPU, too.
    #[serde(default)]
    pub aside: Vec<u32>,
    /// It never sleeps while it drives a NIC.
    pub poll: bool,
    /// The nice value of a driver, or of who is ready to be one, that sleeps when there is nothing to do: 0, or less. It gives way, to 0, while it has not slept
    /// for some time.
    #[serde(default)]
    pub nice: i32,
    /// Bytes of memory that it may lock, for devices that need that.
    pub memlock: u64,
    /// A program of the user's own goes on opening the files that it may read,
    #[serde(default)]
    pub files: bool,
    /// and may start threads.
    #[serde(default)]
    pub threads: bool,
    /// Of [`Work::Tap`] and [`Work::Memif`]: what the daemon calls the TAP or the socket.
    #[serde(default)]
    pub tap: Option<String>,
    /// Of [`Work::Memif`]: what its client must know.
    #[serde(default)]
    pub memif: Option<Memif>,
}

/// What a client of memif must know to be let in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memif {
    /// The number by which it asks for the port.
    pub id: u32,
    /// At most 23 bytes; none where it need not know any.
    pub secret: String,
    /// The daemon hears [`ToDaemon::Client`].
    #[serde(default)]
    pub keeps: bool,
}

/// Most regions of a client of memif.
pub const REGIONS_MAX: usize = 16;

/// A client of memif that is connected, for whoever drives the node's end of a VNI next. Beside it: its socket, the eventfd by which it rings and the
/// one by which it is rung, and its regions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// What it calls itself.
    pub name: String,
    /// Bytes of each region, [`REGIONS_MAX`] of them at most.
    pub regions: Vec<u64>,
    /// The ring in which it sends,
    pub to_server: ClientRing,
    /// and the one in which it is sent.
    pub to_client: ClientRing,
}

impl Client {
    /// Descriptors beside it that are no regions: the socket, and two eventfds.
    pub const OTHERS: usize = 3;
}

/// Where a ring of such a client lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRing {
    /// In which region,
    pub region: u16,
    /// from which byte on,
    pub offset: u32,
    /// and how many descriptors it has, as a power of two.
    pub log2_size: u8,
}

/// A NIC as a worker can take it: text that only workers read, and descriptors.
///
/// Whoever opened the device wrote the text. A worker that moves a NIC to other memory says how that lies, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceBundle {
    /// Whose driver state its driver writes: vendor and device.
    pub kind: u32,
    /// Of which version.
    pub version: u32,
    /// What the card and its bus can do: for the choice of a method.
    pub can: Can,
    /// Bus, memory and driver, as JSON.
    pub text: String,
    /// How memory lies that a worker made, as JSON; without, as the text says.
    #[serde(default)]
    pub lies: Option<String>,
    /// Descriptors that belong to it.
    pub fds: usize,
    /// How many of them, the last ones, are the NIC's memory. Who is to drive it from memory of its own gets the others only.
    #[serde(default)]
    pub memory: usize,
    /// The memory is not among the descriptors: this is what such a one has.
    #[serde(default)]
    pub partial: bool,
    /// The worker that made the memory, if it was a worker.
    #[serde(default)]
    pub made_by: Option<u32>,
    /// The card's station address: a TAP that stands for it has the same.
    #[serde(default)]
    pub mac: Option<[u8; 6]>,
}

/// [`crate::method::Card`], as it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a card")]
pub struct Can {
    /// It runs on while its driver is replaced, and a successor finds its place in the rings if its predecessor is dead.
    pub in_place: bool,
    /// A queue to spare.
    pub spare_queue: bool,
    /// Its rings can be elsewhere from now on, while the link stays up,
    pub repoint: bool,
    /// and the partner pauses meanwhile.
    pub pauses: bool,
    /// All that an owner can leave in it the next one can undo, or sees, while it runs.
    #[serde(default)]
    pub fenced: bool,
}

/// What becomes of frames that the old owner has not handled when a NIC goes to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inflight {
    /// The old owner handles them before it lets go.
    Deliver,
    /// They are counted, wiped out, and never seen again.
    Drop,
}

/// From the daemon to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum ToWorker {
    /// Who it is. Beside it: the worker's heartbeat (see [`heartbeat`](mod@crate::message::heartbeat)), the node's program state (memory for what its work must
    /// remember), and a listening socket on which a daemon that comes later finds it; of [`Work::Tap`] and [`Work::Memif`] the TAP's descriptor
    /// or the listening socket of memif, last.
    Begin(Begin),
    /// A NIC that it may be ordered to prepare. Beside it: the NIC's lease page (see [`lease_page`]), and the device bundle's descriptors.
    Nic {
        /// Its number from now on.
        nic: u32,
        /// Its name.
        name: String,
        /// Where the card may see memory that this worker makes itself: an address, page-aligned, with 256 MiB for it.
        iova: u64,
        /// Whoever has it is not trusted, and is fenced before this worker is told to take it: nothing of what stands in the card is believed, and
        /// memory is mapped for it only then.
        #[serde(default)]
        fenced: bool,
        /// It was taken out of its box and runs, and nobody drives it: it starts with [`crate::worker::Worker::first`] if it is this worker's.
        bundle: DeviceBundle,
    },
    /// Another node on a VNI of which this worker has, or may be given, a node's end; or the same node with other memory. Beside it: its node memory's
    /// control memory and pool, to be read, and the end of its bell's pipe that is written.
    Neighbour {
        /// The worker's own end, as a NIC's number.
        nic: u32,
        /// The node's number on the VNI.
        number: u16,
        /// The node's addresses of IP, if what it sends is to be held against them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        addresses: Vec<IpAddr>,
    },
    /// A node that is on the VNI no more.
    NoNeighbour {
        /// The worker's own end, as a NIC's number.
        nic: u32,
        /// The node's number on the VNI.
        number: u16,
    },
    /// Who has which address on a VNI, from a daemon that has just begun, and who there is: nobody else is. Beside it: the directory, to be read.
    Directory {
        /// The worker's own end, as a NIC's number.
        nic: u32,
        /// The nodes' numbers on the VNI.
        nodes: Vec<u16>,
    },
    /// The client of memif that whoever drives the end serves, or has served. Beside it: what belongs to [`Client`].
    Client {
        /// The end, as a NIC's number.
        nic: u32,
        /// It.
        client: Client,
    },
    /// It is there no more.
    NoClient {
        /// The end, as a NIC's number.
        nic: u32,
        /// Its socket's inode.
        socket: u64,
    },
    /// The driver state that the giver stored, for the next order to take. Beside it: a memfd with its bytes, in an envelope.
    DriverState {
        /// The NIC.
        nic: u32,
    },
    /// Whoever drives this NIC, or end of a VNI, from now on copies its frames to where somebody looks on. Beside it: a socket that takes them, in batches
    /// of enhanced packet blocks of pcapng, and memory in which is counted what the socket did not take, a word of 8 bytes for each interface. A
    /// worker that has heard it says so there, with a message of nothing but the interface's number.
    Capture {
        /// The NIC.
        nic: u32,
        /// The capture's number.
        capture: u32,
        /// What the NIC is called in the blocks.
        interface: u32,
        /// Bytes that are kept of a frame, at most.
        snap: u32,
    },
    /// A capture is over.
    NoCapture {
        /// The NIC.
        nic: u32,
        /// The capture's number.
        capture: u32,
    },
    /// Say who you are: the node's [`ToDaemon::Client`] if it has one, and [`ToDaemon::Mine`]. From a daemon that has just begun.
    Again {
        /// The daemon hears [`ToDaemon::Client`].
        #[serde(default)]
        keeps: bool,
    },
    /// Say what you have counted.
    Counts,
    /// Park what you drive, and end.
    End,
}

/// From a worker to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum ToDaemon {
    /// It has read its [`Begin`], has given up what it does not need, and hears orders.
    Begun {
        /// [`SPEECH`] of the worker.
        speech: u32,
        /// Kind of the driver states that it reads, and the versions from and to.
        reads: Vec<(u32, u32, u32)>,
        /// What it could not confine itself with, as sentences.
        unconfined: Vec<String>,
    },
    /// The memory that a NIC will have once this worker drives it: of one that was ordered to prepare for `repoint`, before it says that it is ready.
    /// Beside it: as many descriptors as the device bundle has of memory. The way to the card stays as the opener gave it.
    Memory {
        /// The NIC.
        nic: u32,
        /// For [`DeviceBundle::lies`], at most [`LIES_MAX`] bytes.
        lies: String,
    },
    /// From an opener alone: what the NIC is made of. Beside it: the device bundle's descriptors.
    DeviceBundle {
        /// Of it.
        bundle: DeviceBundle,
    },
    /// A driver state for the store. Beside it: a memfd with its bytes, in an envelope.
    DriverState {
        /// The NIC.
        nic: u32,
    },
    /// What it has counted: name and number, as `ethtool -S` names them.
    Counts {
        /// The NIC.
        nic: u32,
        /// In the driver's order.
        counts: Vec<(String, u64)>,
    },
    /// A client of memif is connected at an end that this worker drives, or, in answer to [`ToWorker::Again`], may have to. Beside it: what belongs to
    /// [`Client`]. For a daemon that said that it hears this.
    Client {
        /// The end, as a NIC's number.
        nic: u32,
        /// It.
        client: Client,
    },
    /// It is there no more.
    NoClient {
        /// The end, as a NIC's number.
        nic: u32,
        /// Its socket's inode.
        socket: u64,
    },
    /// Who it is: last in answer to [`ToWorker::Again`].
    Mine {
        /// Its number in lease words.
        party: u32,
        /// Its node's name.
        node: String,
        /// The NICs of which it has something.
        nics: Vec<u32>,
    },
    /// Something that a person must know, in a sentence.
    Told {
        /// The NIC, if it is about one.
        nic: Option<u32>,
        /// What.
        sentence: String,
    },
}

/// A node's end of a VNI: its device bundle. It changes hands as a NIC does, and there is no driver state, for all that a successor must know stands in the node memory.
///
/// Descriptors, in order: the eventfd that a giver rings after it has passed the lease; the node memory's control memory and pool, to be written; the bell's
/// pipe, the end that is read and the end that is written; the directory, to be read.
pub mod vni {
    use serde::{Deserialize, Serialize};

    /// What stands in [`DeviceBundle::kind`](super::DeviceBundle::kind): no vendor has this number.
    pub const KIND: u32 = 0xffff_0001;
    /// Of the node memory's layout.
    pub const VERSION: u32 = 2;
    /// Descriptors of a device bundle.
    pub const FDS: usize = 6;
    /// Where among them the directory is.
    pub const DIRECTORY: usize = 5;

    /// What stands in [`DeviceBundle::text`](super::DeviceBundle::text), as JSON.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Text {
        /// The VNI.
        pub vni: String,
        /// The node's number on it.
        pub number: u16,
    }
}

/// A NIC's lease page: a memfd of one page that the daemon and all who may drive the NIC write. Words are 8 bytes, lines 64.
pub mod lease_page {
    /// Bytes.
    pub const LEN: usize = 4096;
    /// The line of the lease: `tasuki_shm::lease`.
    pub const LEASE_LINE: usize = 0;
    /// Word: when the last giver ended its last burst, in ns of `CLOCK_MONOTONIC`. Of a giver that died, the daemon writes when it learnt of that.
    pub const STOPPED_AT: usize = 8;
    /// Word: when the last taker had looked at the rings once and drove.
    pub const DRIVING_AT: usize = 9;
    /// Word: how often the NIC was taken and driven.
    pub const RELAYS: usize = 10;
    /// Word: the CPU on which whoever drives stays, and 1; 0 if it stays on none. A taker that waits looks here whether it may spin.
    pub const CPU: usize = 11;
    /// Word: how the card was left to who points it elsewhere, in its driver's words; 0 if it was not.
    pub const LEFT: usize = 12;
    /// Word: 1 once whoever drives has found the link up since the card was started, and has told the card what comes of that. Who takes the NIC has nothing to ask then.
    pub const LINK: usize = 13;
    /// Word: until when, in ns of `CLOCK_MONOTONIC`, a worker that gets ready waits for the CPU on which the driver stays; 0 if none does.
    pub const COMING: usize = 14;
}

/// A worker's heartbeat: a memfd of one page, one for each worker, shared with the daemon. Words are 8 bytes.
pub mod heartbeat {
    /// Bytes.
    pub const LEN: usize = 4096;
    /// Word, the daemon's: how many messages it has put into the worker's socket. A worker that drives looks at this one word once a burst.
    pub const POSTS: usize = 0;
    /// Word, the worker's, as all that follow: how often it has looked for work; moves at least every millisecond while it lives and is awake.
    pub const LOOKS: usize = 8;
    /// Word: 1 while it sleeps on purpose: then it is not missed.
    pub const ASLEEP: usize = 9;
    /// Word: frames that it has received.
    pub const RECEIVED: usize = 10;
    /// Word: frames that it has sent.
    pub const SENT: usize = 11;
    /// Word: of numbered frames, those that are missing.
    pub const MISSING: usize = 12;
    /// Word: of numbered frames, those that came twice or late.
    pub const LATE: usize = 13;
    /// Word, whose first four bytes are a robust futex of the worker's one thread (`set_robust_list`): the kernel sets [`ENDED`] there when it
    /// begins to end the thread, long before it has taken its memory apart and a pidfd tells. 0 where the worker could not have it so.
    pub const LIFE: usize = 14;
    /// In that futex: its thread runs no more.
    pub const ENDED: u32 = 0x4000_0000;
    /// Word: frames that came and were dropped, because that was ordered.
    pub const DROPPED: usize = 15;
    /// Word: frames that came and that the node's TAP did not take, or that it gave and that fit into no frame of the card's.
    pub const REFUSED: usize = 16;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Order;

    #[test]
    fn packets_and_messages_are_told_apart() {
        let packet = Order::Release { epoch: 7 }.to_bytes();
        let bytes = frame(3, packet);
        assert_eq!(unframe(&bytes), Some((3, &packet[..])));
        assert_eq!(unframe(&bytes[..35]), None);
        // A NIC of this number would look like a message: the daemon counts from 0.
        assert_eq!(unframe(&frame(u32::from(b'{'), packet)), None);
    }
}
