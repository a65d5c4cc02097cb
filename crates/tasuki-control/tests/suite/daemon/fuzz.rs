//! Output of a broken or malicious worker: any message, in any order, with any descriptors beside it, and any word
//! in the memory that it shares with the daemon. A seed determines all of it.

use std::os::fd::{AsFd, OwnedFd};

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use tasuki_control::supervisor::worker::Words;
use tasuki_relay::message::{Client, MESSAGE_MAX, PROTOCOL_VERSION, ToDaemon};
use tasuki_relay::wire::{LEN, Reason, Report};

/// One act of such a worker.
#[derive(Debug, Clone)]
pub enum Act {
    /// A packet about a NIC, and the kinds of descriptors beside it.
    Packet(u32, [u8; LEN], Vec<Gift>),
    /// A message, or bytes that resemble one.
    Message(Vec<u8>, Vec<Gift>),
    /// A write to the lease word of a NIC.
    Lease(u32, u64),
    /// A write to a word of its heartbeat.
    Heartbeat(usize, u64),
}

/// A descriptor that no worker has a reason to send.
#[derive(Debug, Clone, Copy)]
pub enum Gift {
    Sealed,
    Loose,
    Pipe,
    Epoll,
    Null,
    ItsOwnSocket,
}

impl Gift {
    pub fn open(self, socket: &OwnedFd) -> OwnedFd {
        match self {
            Gift::Sealed => Words::create("a gift", 4096).expect("memory").region().fd().try_clone_to_owned(),
            Gift::Loose => {
                let memory = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
                rustix::fs::ftruncate(&memory, 4096).expect("memory");
                Ok(memory)
            }
            Gift::Pipe => Ok(rustix::pipe::pipe().expect("a pipe").0),
            Gift::Epoll => {
                Ok(rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("an epoll"))
            }
            Gift::Null => std::fs::File::open("/dev/null").map(OwnedFd::from),
            Gift::ItsOwnSocket => socket.as_fd().try_clone_to_owned(),
        }
        .expect("a descriptor")
    }
}

/// Mostly the number of the worker's own NIC: any other number ends the worker at once.
fn nic(own: u32) -> impl Strategy<Value = u32> {
    prop_oneof![30 => Just(own), 2 => 0..4_u32, 1 => any::<u32>()]
}

fn report() -> impl Strategy<Value = Report> {
    let epoch = || prop_oneof![4 => 0..6_u32, 1 => any::<u32>()];
    let reason =
        || prop_oneof![Just(Reason::CardGone), any::<u64>().prop_map(|value| Reason::WrongDriverState { value })];
    prop_oneof![
        Just(Report::Ready),
        reason().prop_map(Report::Unfit),
        epoch().prop_map(|epoch| Report::Released { epoch }),
        (epoch(), reason()).prop_map(|(epoch, reason)| Report::Kept { epoch, reason }),
        epoch().prop_map(|epoch| Report::Taken { epoch }),
        (epoch(), any::<bool>()).prop_map(|(epoch, ready)| Report::Lost { epoch, ready }),
        (epoch(), reason()).prop_map(|(epoch, reason)| Report::Failed { epoch, reason }),
        epoch().prop_map(|epoch| Report::Replaced { epoch }),
    ]
}

fn client() -> impl Strategy<Value = Client> {
    let ring = || {
        let any = (0..3_u16, any::<u32>(), 0..20_u8);
        any.prop_map(|(region, offset, size)| json!({ "region": region, "offset": offset, "log2_size": size }))
    };
    let regions = prop::collection::vec(any::<u64>(), 0..4);
    let memif = (regions, ring(), ring())
        .prop_map(|(regions, there, back)| json!({ "regions": regions, "to_server": there, "to_client": back }));
    let text = prop_oneof![4 => memif.prop_map(|text| text.to_string()), 1 => ".{0,40}", 1 => ".{4000,5000}"];
    (".{0,40}", text).prop_map(|(name, text)| Client { name, text })
}

fn message(own: u32) -> impl Strategy<Value = ToDaemon> {
    let nic = move || nic(own);
    let text = || prop_oneof![4 => ".{0,40}", 1 => (0..MESSAGE_MAX).prop_map(|len| "x".repeat(len))];
    let nics = prop::collection::vec(nic(), 0..4);
    let counts = prop::collection::vec((text(), any::<u64>()), 0..4);
    prop_oneof![
        (Just(PROTOCOL_VERSION), prop::collection::vec(text(), 0..3)).prop_map(|(protocol_version, unconfined)| {
            ToDaemon::Begun { protocol_version, reads: Vec::new(), unconfined }
        }),
        (nic(), text()).prop_map(|(nic, layout)| ToDaemon::Memory { nic, layout }),
        nic().prop_map(|nic| ToDaemon::DriverState { nic }),
        (nic(), counts).prop_map(|(nic, counts)| ToDaemon::Counts { nic, counts }),
        (nic(), client()).prop_map(|(nic, client)| ToDaemon::Client { nic, client }),
        (nic(), any::<u64>()).prop_map(|(nic, socket)| ToDaemon::NoClient { nic, socket }),
        (0..12_u32, prop_oneof![Just("red"), Just("green"), Just("blue"), Just("")], nics)
            .prop_map(|(party, node, nics)| ToDaemon::Mine { party, node: node.to_owned(), nics }),
        (prop::option::of(nic()), text()).prop_map(|(nic, sentence)| ToDaemon::Told { nic, sentence }),
    ]
}

fn act(own: u32) -> impl Strategy<Value = Act> {
    let (nic, message) = (move || nic(own), move || message(own));
    let gift = || {
        let kinds = [Gift::Sealed, Gift::Loose, Gift::Pipe, Gift::Epoll, Gift::Null, Gift::ItsOwnSocket];
        let some = prop::collection::vec(prop::sample::select(kinds.to_vec()), 0..32);
        prop_oneof![20 => Just(Vec::new()), 1 => some]
    };
    let packet = prop_oneof![20 => report().prop_map(Report::to_bytes), 1 => any::<[u8; LEN]>()];
    let text = |message: ToDaemon| serde_json::to_vec(&message).expect("plain data");
    // A message with one byte changed.
    let torn = (message(), any::<prop::sample::Index>(), any::<u8>()).prop_map(move |(message, at, with)| {
        let mut bytes = text(message);
        let at = at.index(bytes.len());
        bytes[at] = with;
        bytes
    });
    let bytes = prop_oneof![20 => message().prop_map(text), 2 => torn, 1 => prop::collection::vec(any::<u8>(), 1..200)];
    // A holder and an epoch, each real or invented.
    let word = prop_oneof![(0..12_u64, 0..6_u64).prop_map(|(low, high)| low | high << 32), any::<u64>()];
    prop_oneof![
        4 => (nic(), packet, gift()).prop_map(|(nic, packet, gifts)| Act::Packet(nic, packet, gifts)),
        4 => (bytes, gift()).prop_map(|(bytes, gifts)| Act::Message(bytes, gifts)),
        1 => (nic(), word).prop_map(|(nic, word)| Act::Lease(nic, word)),
        1 => (0..16_usize, prop_oneof![0..4_u64, any::<u64>()]).prop_map(|(at, word)| Act::Heartbeat(at, word)),
    ]
}

/// Returns `count` acts of a worker that was given NIC `own`. The same seed always gives the same acts.
pub fn of_seed(seed: u64, count: u32, own: u32) -> Vec<Act> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = act(own);
    (0..count).map(|_| strategy.new_tree(&mut runner).expect("nothing is refused").current()).collect()
}
