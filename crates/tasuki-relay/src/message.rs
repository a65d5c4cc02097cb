//! Messages between the daemon and workers, beside the packets of [`crate::wire`]: the description of a worker, and
//! the device bundle of a NIC.
//!
//! All travel on one unix socket that keeps bounds, the worker's standard input. The socket carries two forms:
//!
//! - 36 bytes, the number of a NIC (little-endian, as the daemon gave it in [`ToWorker::Nic`]) and a packet:
//!   [`frame`], [`unframe`];
//! - a message: JSON, which begins with `{`. Its descriptors travel beside it, in the order in which the message
//!   names them.
//!
//! A reader ignores unknown fields of a message, and refuses an unknown kind of message with a sentence. The first
//! message each way carries [`PROTOCOL_VERSION`].

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use crate::wire;

/// Version of the messages. It grows when one of them changes its meaning.
pub const PROTOCOL_VERSION: u32 = 6;

/// Maximum length of a message, in bytes.
pub const MESSAGE_MAX: usize = 64 * 1024;

/// Maximum length of a program's options, in bytes.
pub const OPTIONS_MAX: usize = 4096;

/// Maximum number of descriptors beside a message. The kernel's own limit is 253 (SCM_MAX_FD).
pub const FDS_MAX: usize = 160;

/// The same of programs that know of no [`vni::WIDE_VERSION`].
pub const NARROW_FDS_MAX: usize = 64;

/// Maximum length of a worker's description of the layout of memory that it made, in bytes.
pub const LAYOUT_MAX: usize = 512;

/// Returns a packet in the form in which it travels: with the number of its NIC.
pub fn frame(nic: u32, packet: [u8; wire::LEN]) -> [u8; wire::LEN + 4] {
    let mut bytes = [0; wire::LEN + 4];
    bytes[..4].copy_from_slice(&nic.to_le_bytes());
    bytes[4..].copy_from_slice(&packet);
    bytes
}

/// Reverses [`frame`]. Returns nothing if `bytes` are a message.
pub fn unframe(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (nic, packet) = bytes.split_first_chunk::<4>()?;
    let is_packet = bytes.len() == wire::LEN + 4 && bytes[0] != b'{';
    is_packet.then(|| (u32::from_le_bytes(*nic), packet))
}

/// Work of a node that has no guests: how it handles the frames of its NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Sends each frame back to its sender.
    Echo,
    /// Receives frames, and accounts for the numbers of numbered frames.
    Sink,
    /// Answers ARP and ICMP echo requests, and drops all other frames.
    Answer {
        /// Address for which it answers.
        address: Ipv4Addr,
    },
    /// Passes frames between its NIC and a TAP, so that the programs of a network namespace have the NIC. The TAP's
    /// descriptor comes with [`ToWorker::Begin`].
    Tap,
    /// Passes frames between the node's VNI and its [`Endpoint`]. The endpoint's descriptor comes with
    /// [`ToWorker::Begin`].
    Bridge,
    /// Joins its NIC and the node's VNI: the VNI reaches the network behind the NIC, and the other way.
    Uplink,
    /// Sends numbered frames.
    Source {
        /// Frames per second; 0 for as many as the card takes.
        rate: u64,
        /// Length of each frame in bytes, without check sequence.
        size: u16,
        /// Destination station address; by default broadcast.
        #[serde(default)]
        to: Option<[u8; 6]>,
    },
    /// The work of a program of the user's own, which is the worker.
    Program,
}

/// The first message to a worker: its description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// [`PROTOCOL_VERSION`] of the daemon.
    pub protocol_version: u32,
    /// Number of the worker in lease words.
    pub party: u32,
    /// Name of the worker's node.
    pub node: String,
    /// Work that the worker does with frames.
    pub work: Work,
    /// Options of a program of the user's own, which alone knows their meaning; at most [`OPTIONS_MAX`] bytes.
    #[serde(default)]
    pub options: String,
    /// CPU on which the worker runs while it drives a NIC or is ready to, if it is to stay on one.
    pub cpu: Option<u32>,
    /// CPUs on which the worker runs otherwise; if empty, it stays on `cpu`.
    #[serde(default)]
    pub aside: Vec<u32>,
    /// Whether the worker never sleeps while it drives a NIC.
    pub poll: bool,
    /// Nice value, 0 or less, of a worker that drives or is ready to, and sleeps when there is nothing to do. The
    /// worker raises it to 0 once it has not slept for some time.
    #[serde(default)]
    pub nice: i32,
    /// Bytes of memory that the worker may lock, for devices that need that.
    pub memlock: u64,
    /// Whether a program of the user's own may go on opening the files that it may read.
    #[serde(default)]
    pub files: bool,
    /// Whether a program of the user's own may start threads.
    #[serde(default)]
    pub threads: bool,
    /// For [`Work::Tap`] and [`Work::Bridge`]: where the node's programs send and receive.
    #[serde(default)]
    pub endpoint: Option<Endpoint>,
}

/// Where a node's programs send and receive, as the daemon made it for the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Its kind, by which a worker finds the code for it.
    pub kind: String,
    /// Name by which users know it.
    pub label: String,
    /// Further settings; only that kind's code reads them.
    pub text: String,
    /// Limits on what the node's programs send, and on what they receive.
    #[serde(default)]
    pub limits: [Limit; 2],
    /// How long a frame may wait for others, in µs; by default as long as the worker finds right.
    #[serde(default)]
    pub latency_us: Option<u32>,
}

/// A limit on the frames of one direction. Each 0 stands for none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// Bits a second.
    pub bits: u64,
    /// Frames a second.
    pub frames: u64,
    /// The time over which a burst counts as spread, in ms.
    pub burst_ms: u32,
}

/// Maximum number of descriptors beside a [`Client`].
pub const CLIENT_FDS_MAX: usize = 144;

/// A program that is connected to a node's endpoint and must not notice a new worker. The next driver of the node's end
/// of a VNI gets it. Beside it: its descriptors, its socket first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Name that the program gave itself.
    pub name: String,
    /// State for its endpoint; only the code of that kind of endpoint reads it.
    pub text: String,
}

/// A NIC in the form in which a worker can take it: text that only workers read, and descriptors.
///
/// The process that opened the device wrote the text. A worker that moves a NIC to other memory adds the layout of
/// that memory, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceBundle {
    /// Kind of the driver state that the NIC's driver writes: vendor and device.
    pub kind: u32,
    /// Version of that driver state.
    pub version: u32,
    /// Abilities of the card and its bus, for the choice of a method.
    pub can: Can,
    /// Bus, memory and driver, as JSON.
    pub text: String,
    /// Layout of memory that a worker made, as JSON; by default the layout is that of the text.
    #[serde(default)]
    pub layout: Option<String>,
    /// Number of descriptors that belong to the bundle.
    pub fds: usize,
    /// Number of them, at the end, that are the NIC's memory. A worker that is to drive the NIC from memory of its
    /// own gets only the others.
    #[serde(default)]
    pub memory: usize,
    /// Whether the memory is absent from the descriptors, as for such a worker.
    #[serde(default)]
    pub partial: bool,
    /// Number of the worker that made the memory, if a worker did.
    #[serde(default)]
    pub made_by: Option<u32>,
    /// Station address of the card. A TAP that stands for the card has the same address.
    #[serde(default)]
    pub mac: Option<[u8; 6]>,
}

/// [`crate::method::Card`] in the form in which it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a card")]
pub struct Can {
    /// Whether the card runs on while its driver is replaced, and a successor finds its place in the rings if its
    /// predecessor is dead.
    pub in_place: bool,
    /// Whether it has a queue to spare.
    pub spare_queue: bool,
    /// Whether its rings can move to other memory while the link stays up.
    pub repoint: bool,
    /// Whether the link partner pauses while they move.
    pub pauses: bool,
    /// Whether the next owner can undo, or see, all that an owner can leave in the card, while the card runs.
    #[serde(default)]
    pub fenced: bool,
}

/// Fate of frames that the old owner has not handled when a NIC goes to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inflight {
    /// The old owner handles them before it releases the NIC.
    Deliver,
    /// They are counted and wiped, and never seen again.
    Drop,
}

/// Message from the daemon to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum ToWorker {
    /// The worker's description. Beside it: the worker's heartbeat (see
    /// [`heartbeat`](mod@crate::message::heartbeat)), the node's program state (memory for state that its work must
    /// keep; of a node that drives a queue of another's interface, that of the other), and a listening socket to which a later daemon connects. For [`Work::Tap`] and
    /// [`Work::Bridge`] the endpoint's descriptor comes last.
    Begin(Begin),
    /// A NIC that the worker may be ordered to prepare. Beside it: the NIC's lease page (see [`lease_page`]), and
    /// the device bundle's descriptors.
    Nic {
        /// Number of the NIC from now on.
        nic: u32,
        /// Name of the NIC.
        name: String,
        /// Bus address at which the card may see memory that this worker makes: page-aligned, with 256 MiB for it.
        iova: u64,
        /// Whether the present owner is not trusted, and is fenced before this worker is ordered to take the NIC.
        /// Then the worker believes nothing that the card holds, and memory is mapped for the card only after the
        /// fence.
        #[serde(default)]
        fenced: bool,
        /// The device bundle. The device was taken out of its box and runs, and no worker drives it. A worker whose
        /// device it is starts with [`crate::worker::Worker::first`].
        bundle: DeviceBundle,
    },
    /// Another node of a VNI on which this worker has, or may get, a node's end; or a known node with other memory.
    /// Beside it: the control memory and the pool of that node's node memory, to read; and the write end of its
    /// bell's pipe.
    Neighbour {
        /// Number of the worker's own end, as of a NIC.
        nic: u32,
        /// Number of the node on the VNI.
        number: u16,
        /// IP addresses of the node, if its frames are to be checked against them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        addresses: Vec<IpAddr>,
    },
    /// A node that has left the VNI.
    NoNeighbour {
        /// Number of the worker's own end, as of a NIC.
        nic: u32,
        /// Number of the node on the VNI.
        number: u16,
    },
    /// The addresses and the complete list of nodes of a VNI, from a daemon that has just started. Beside it: the
    /// directory, to read.
    Directory {
        /// Number of the worker's own end, as of a NIC.
        nic: u32,
        /// Numbers of the nodes on the VNI.
        nodes: Vec<u16>,
    },
    /// The client that the end's driver serves, or has served. Beside it: the descriptors of [`Client`].
    Client {
        /// Number of the end, as of a NIC.
        nic: u32,
        /// The client's name, and the state for its endpoint.
        client: Client,
    },
    /// The client has gone.
    NoClient {
        /// Number of the end, as of a NIC.
        nic: u32,
        /// Inode of the client's socket.
        socket: u64,
    },
    /// The driver state that the giver stored, for the next order to take. Beside it: a memfd with its bytes, in an
    /// envelope; none if the daemon could not receive it, and the ledger says where to go on.
    DriverState {
        /// Number of the NIC.
        nic: u32,
    },
    /// A capture: the driver of this NIC, or end of a VNI, copies its frames there from now on. Beside it: a socket
    /// that takes the frames, in batches of enhanced packet blocks of pcapng; and memory that counts the frames that
    /// the socket did not take, a word of 8 bytes for each interface. A worker that has heard it confirms that on
    /// the socket, with a message that holds nothing but the interface's number.
    Capture {
        /// Number of the NIC.
        nic: u32,
        /// Number of the capture.
        capture: u32,
        /// Interface number of the NIC in the blocks.
        interface: u32,
        /// Maximum number of bytes to keep of a frame.
        snap: u32,
    },
    /// A capture is over.
    NoCapture {
        /// Number of the NIC.
        nic: u32,
        /// Number of the capture.
        capture: u32,
    },
    /// Another socket to which a later daemon connects: the file of the one before was deleted. Beside it: the listening
    /// socket. Only to a worker that reads [`LISTEN_VERSION`](vni::LISTEN_VERSION).
    Listen,
    /// A request for the worker's identity, from a daemon that has just started: the answer is the node's
    /// [`ToDaemon::Client`] if it has one, and [`ToDaemon::Mine`].
    Again,
    /// A request for the counts.
    Counts,
    /// An order to park all driven NICs, and to end.
    End,
}

/// Message from a worker to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum ToDaemon {
    /// The worker has read its [`Begin`], has given up the rights that it does not need, and hears orders.
    Begun {
        /// [`PROTOCOL_VERSION`] of the worker.
        protocol_version: u32,
        /// Driver states that the worker reads, and writes: kind, first version and last version.
        reads: Vec<(u32, u32, u32)>,
        /// Failed parts of the worker's confinement, as sentences.
        unconfined: Vec<String>,
    },
    /// The memory that a NIC will have once this worker drives it. A worker that was ordered to prepare for
    /// `repoint` sends it before it reports that it is ready. Beside it: as many descriptors as the device bundle
    /// has for memory. The way to the card stays as the opener gave it.
    Memory {
        /// Number of the NIC.
        nic: u32,
        /// Value for [`DeviceBundle::layout`], at most [`LAYOUT_MAX`] bytes.
        layout: String,
    },
    /// The NIC's device bundle, from an opener only. Beside it: the device bundle's descriptors.
    DeviceBundle {
        /// The device bundle.
        bundle: DeviceBundle,
    },
    /// A driver state for the store. Beside it: a memfd with its bytes, in an envelope.
    DriverState {
        /// Number of the NIC.
        nic: u32,
    },
    /// The worker's counts: name and number, as `ethtool -S` names them.
    Counts {
        /// Number of the NIC.
        nic: u32,
        /// The counts, in the driver's order.
        counts: Vec<(String, u64)>,
    },
    /// A client is connected at an end that this worker drives or, in answer to [`ToWorker::Again`], may have to
    /// drive. Beside it: the descriptors of [`Client`].
    Client {
        /// Number of the end, as of a NIC.
        nic: u32,
        /// The client's name, and the state for its endpoint.
        client: Client,
    },
    /// The client has gone.
    NoClient {
        /// Number of the end, as of a NIC.
        nic: u32,
        /// Inode of the client's socket.
        socket: u64,
    },
    /// The worker's identity, last in answer to [`ToWorker::Again`].
    Mine {
        /// Number of the worker in lease words.
        party: u32,
        /// Name of the worker's node.
        node: String,
        /// Numbers of the NICs that the worker has or prepares.
        nics: Vec<u32>,
    },
    /// A sentence that a person must know.
    Told {
        /// Number of the NIC, if the sentence is about one.
        nic: Option<u32>,
        /// The sentence; the daemon records it as an event.
        sentence: String,
    },
}

/// Device bundle of a node's end of a VNI. The end changes hands as a NIC does. It has no driver state, since the
/// node memory holds all that a successor must know.
///
/// Descriptors, in order: the eventfd that a giver rings after it has passed the lease; the control memory and the
/// pool of the node memory, to write; the read end and the write end of the bell's pipe; the directory, to read.
pub mod vni {
    use serde::{Deserialize, Serialize};

    /// Value of [`DeviceBundle::kind`](super::DeviceBundle::kind) for an end: no vendor has this number.
    pub const KIND: u32 = 0xffff_0001;
    /// Version of the node memory's layout.
    pub const VERSION: u32 = 2;
    /// The same while the node's machine has more descriptors than [`NARROW_FDS_MAX`](super::NARROW_FDS_MAX): a worker that
    /// does not read this version cannot hear of the machine, and refuses to get ready.
    pub const WIDE_VERSION: u32 = 3;
    /// A worker that says that it reads this version has a switch that knows nodes that share an address. No end has this
    /// version. A worker from before would take frames of such nodes for forged, or know only one of them.
    pub const SHARING_VERSION: u32 = 4;
    /// A worker that says that it reads this version keeps the node's limits together with the node's other workers, in the
    /// program state. No end has this version. Each worker from before would keep them alone.
    pub const LIMITS_VERSION: u32 = 5;
    /// A worker that says that it reads this version hears [`Listen`](super::ToWorker::Listen). No end has this version.
    pub const LISTEN_VERSION: u32 = 6;
    /// The last version of which a worker says that it reads it: it lends pairs of a machine's queues, and borrows some. No end
    /// has this version. A worker from before would serve pairs that are lent.
    pub const LOANS_VERSION: u32 = 7;
    /// Number of descriptors of a device bundle.
    pub const FDS: usize = 6;
    /// Position of the directory among them.
    pub const DIRECTORY: usize = 5;

    /// Value of [`DeviceBundle::text`](super::DeviceBundle::text), as JSON.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Text {
        /// Name of the VNI.
        pub vni: String,
        /// Number of the node on the VNI.
        pub number: u16,
    }
}

/// A NIC's lease page: a memfd of one page. The daemon and all workers that may drive the NIC write it. Words are 8
/// bytes, lines 64.
pub mod lease_page {
    /// Length of the page, in bytes.
    pub const LEN: usize = 4096;
    /// Where the line with the lease begins, in bytes: `tasuki_shm::lease`.
    pub const LEASE_AT: usize = 0;
    /// Word: time at which the last giver ended its last burst, in ns of `CLOCK_MONOTONIC`. For a giver that died,
    /// the daemon writes the time at which it learnt of that.
    pub const STOPPED_AT: usize = 8;
    /// Word: time at which the last taker had looked at the rings once and drove; if it started the card, at which the link
    /// came up.
    pub const DRIVING_AT: usize = 9;
    /// Word: number of times the NIC was taken and driven.
    pub const RELAYS: usize = 10;
    /// Word: number of the CPU on which the driver stays, plus 1; 0 if it stays on none. A waiting taker reads this
    /// to see whether it may spin.
    pub const CPU: usize = 11;
    /// Word: state in which the giver left the card, in its driver's terms, for a taker that points the card
    /// elsewhere; 0 if the card was not left so.
    pub const LEFT: usize = 12;
    /// Word: what the driver found of the link when it looked last. [`LINK_UP`] says that it has told the card the
    /// consequences, too: a taker then need not ask the card. 0 until a driver has looked since the card was started.
    pub const LINK: usize = 13;
    /// Value of that word: the link is up.
    pub const LINK_UP: u64 = 1;
    /// Value of that word: the card is gone.
    pub const CARD_GONE: u64 = 2;
    /// Value of that word: the link is down.
    pub const LINK_DOWN: u64 = 3;
    /// Word: time, in ns of `CLOCK_MONOTONIC`, until which a worker that prepares waits for the driver's CPU; 0 if
    /// none waits.
    pub const COMING: usize = 14;
}

/// A node's program state: memory that outlives its workers, for what its work must keep. Words are 8 bytes. A node with an end
/// of a VNI has no work that keeps words for a NIC: it has the times of its limits there, and the state of its end's program; of a
/// node that is a virtual machine, the loans of its queues.
pub mod program_state {
    use std::ops::Range;

    /// Length of the memory, in bytes.
    pub const LEN: usize = 64 << 10;
    /// Words that a stock work keeps for a NIC: two copies.
    pub const WORK: usize = 2 * 8;
    /// Position of the first word of the states of users' programs.
    pub const STATES_AT: usize = 2048;
    /// Position of the first word of the loans of a machine's queues (`tasuki_shm::vni::loans`).
    pub const LOANS_AT: usize = 4096;
    /// Position of the first word of the counts of these queues by nodes that served some and are gone: a line for each queue.
    pub const QUEUE_COUNTS_AT: usize = 5120;
    /// Words that a program of the user's own keeps for a NIC: two copies, each of a head and a state.
    pub const STATE: usize = 2 * (4 + 60);

    /// Returns all words that are kept for a NIC, as far as there is room for so many NICs.
    pub fn of_nic(nic: u32) -> [Range<usize>; 2] {
        let words = |from: usize, len: usize, to: usize| {
            let at = usize::try_from(nic).ok().and_then(|nic| nic.checked_mul(len)?.checked_add(from)).unwrap_or(to);
            at.min(to)..at.saturating_add(len).min(to)
        };
        [words(0, WORK, STATES_AT), words(STATES_AT, STATE, LEN / 8)]
    }
}

/// A worker's heartbeat: a memfd of one page, one for each worker, shared with the daemon. Words are 8 bytes.
pub mod heartbeat {
    /// Length of the page, in bytes.
    pub const LEN: usize = 4096;
    /// Word of the daemon: number of messages that it has put into the worker's socket. A driving worker reads only
    /// this word once a burst.
    pub const POSTS: usize = 0;
    /// Word of the worker, as all that follow: number of looks for work. It moves at least every millisecond while
    /// the worker lives and is awake.
    pub const LOOKS: usize = 8;
    /// Word: 1 while the worker sleeps on purpose and its looks are not missed.
    pub const ASLEEP: usize = 9;
    /// Word: number of frames received.
    pub const RECEIVED: usize = 10;
    /// Word: number of frames sent.
    pub const SENT: usize = 11;
    /// Word: number of numbered frames that are missing.
    pub const MISSING: usize = 12;
    /// Word: number of numbered frames that arrived twice or late.
    pub const LATE: usize = 13;
    /// Word whose first four bytes are a robust futex of the worker's one thread (`set_robust_list`), the exit mark.
    /// The kernel sets [`ENDED`] there when it begins to end the thread, long before it has freed the thread's
    /// memory and the pidfd reports. 0 if the worker could not set it up.
    pub const LIFE: usize = 14;
    /// Bit in that futex: its thread has ended.
    pub const ENDED: u32 = 0x4000_0000;
    /// Word: number of received frames that were dropped by order.
    pub const DROPPED: usize = 15;
    /// Word: number of received frames that the node's TAP did not take, and of frames from the TAP that fit into no
    /// frame of the card's. Of a node with an end of a VNI: number of all frames that did not cross. All reasons below
    /// are counted here, too.
    pub const REFUSED: usize = 16;
    /// First word of those with the frames of an end of a VNI that did not cross: one for each reason. Of a NIC that was
    /// handed over, those that came after the former owner had let go.
    pub const DROPPED_FOR: usize = 17;
    /// Index of that reason.
    pub const TOO_LATE: usize = 5;
    /// The reasons, as `tasuki nic counts` names them.
    pub const REASONS: [&str; 13] = [
        "refused",
        "away",
        "no_buffer",
        "too_long",
        "malformed",
        "too_late",
        "forged",
        "no_room",
        "nobody",
        "length",
        "not_own",
        "over_rate",
        "by_socket",
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Order;

    #[test]
    fn a_reason_is_where_it_is_counted() {
        assert_eq!(heartbeat::REASONS[heartbeat::TOO_LATE], "too_late");
    }

    #[test]
    fn packets_and_messages_are_told_apart() {
        let packet = Order::Release { epoch: 7 }.to_bytes();
        let bytes = frame(3, packet);
        assert_eq!(unframe(&bytes), Some((3, &packet[..])));
        assert_eq!(unframe(&bytes[..35]), None);
        // A NIC with this number would look like a message; the daemon counts from 0.
        assert_eq!(unframe(&frame(u32::from(b'{'), packet)), None);
    }
}
