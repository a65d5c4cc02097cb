//! Packets between the daemon and workers: 32 bytes, little-endian, on a unix socket that keeps their bounds.
//!
//! | bytes   | contents                                                                                    |
//! |---------|---------------------------------------------------------------------------------------------|
//! | 0..4    | `TRL` and a zero byte                                                                       |
//! | 4..6    | version                                                                                     |
//! | 6..8    | kind                                                                                        |
//! | 8..12   | epoch: of the lease as the sender means it                                                  |
//! | 12..16  | two small numbers: a use and a method, how the last driver ended, a standing, a reason      |
//! | 16..32  | two numbers that the kind explains                                                          |
//!
//! The first eight bytes will never change their meaning. Fields that a kind does not use are zero, or the packet is
//! refused. Descriptors travel in messages, not beside a packet; a [`Reason`] names a descriptor by its [`Position`].

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::After;
use crate::message::Inflight;
use crate::method::Method;
use crate::table::{All, listed};

/// Version of the packets.
pub const VERSION: u16 = 1;
/// Length of a packet, in bytes.
pub const LEN: usize = 32;

const MAGIC: [u8; 4] = *b"TRL\0";

/// Use of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Use {
    /// The same node, a new worker.
    Upgrade,
    /// The same node, whose holder has died or was fenced.
    Takeover,
    /// Another node.
    Handover,
}

listed! {
    /// Kind of a descriptor, as a [`Reason`] names it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Position {
        /// The lease page.
        Lease,
        /// The memory of the driver state.
        DriverState,
        /// The device, or the connection to its server.
        Device,
        /// The descriptor that gives the device its view of memory.
        Iommu,
        /// The memory of the card's rings.
        Rings,
        /// The arena of frames.
        Arena,
        /// The eventfd that rings for received frames.
        Bell,
    }
}

/// Reason why a worker cannot carry out an order, or did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Reason {
    /// The worker may not lock enough memory.
    #[error("the worker may lock {may} bytes and needs {needs}; raise RLIMIT_MEMLOCK")]
    MemLock {
        /// Limit of the worker, in bytes.
        may: u64,
        /// Need of the device's memory, in bytes.
        needs: u64,
    },
    /// A descriptor did not come.
    #[error(
        "the worker did not get descriptor {position} of the device; daemon and worker do not fit together: rebuild the older"
    )]
    Missing {
        /// [`Position`] of the descriptor.
        position: u64,
    },
    /// The worker does not read this driver state.
    #[error(
        "the worker does not read driver states of kind {kind:#x} version {version}; hand the NIC over by the store, or cold"
    )]
    OtherDriverState {
        /// Kind of the driver state: its driver.
        kind: u64,
        /// Version of the driver state.
        version: u64,
    },
    /// The bytes read are not the bytes that were written.
    #[error("the driver state is damaged: its checksum is {is:#x} and should be {should:#x}; the giver goes on")]
    DamagedDriverState {
        /// Checksum of the bytes.
        is: u64,
        /// Checksum in the envelope.
        should: u64,
    },
    /// The driver state does not match the device.
    #[error("the driver state is not true of the device ({value:#x}); the giver goes on")]
    WrongDriverState {
        /// Value that does not match.
        value: u64,
    },
    /// The card does not stop.
    #[error("the card did not stop within {limit_ms} ms; it stays with its owner")]
    CardStuck {
        /// Time that the worker waited, in ms.
        limit_ms: u64,
    },
    /// The card is gone.
    #[error("the card is gone from its bus; put it back, or give up its lease")]
    CardGone,
    /// The arbiter took its order back.
    #[error("the order was taken back before the lease was passed")]
    Recalled,
    /// The worker did not answer by the deadline.
    #[error("the worker did not answer by the deadline; see whether it hangs, or raise the limit")]
    Late,
    /// The worker died.
    #[error("the worker died; its log says why")]
    Died,
    /// No worker is left that could drive the device.
    #[error("no worker is left that could drive the device: it is parked until its node has one")]
    NobodyLeft,
    /// A descriptor is of another kind or size.
    #[error(
        "descriptor {position} of the device is of the wrong kind or size; daemon and worker do not fit together: rebuild the older"
    )]
    Odd {
        /// [`Position`] of the descriptor.
        position: u64,
    },
    /// Between giver and taker the card went on receiving, into memory that the taker does not have.
    #[error(
        "frames came before the worker could point the card at its memory, and stay with the old owner; ask again, or see why the machine was so slow"
    )]
    FramesCame,
    /// The card's last owner, which is not trusted, has left something in the card that cannot be undone while the card
    /// runs.
    #[error("the card's last owner has left something in it that only a reset undoes ({value:#x}); hand it over cold")]
    LeftBehind {
        /// Value that was found in the card.
        value: u64,
    },
    /// The program does not go on from its predecessor's state.
    #[error(
        "the program does not read the state of kind {kind:#x} version {version} that the one before it keeps; have it convert that, or upgrade with another"
    )]
    OtherState {
        /// Kind of that state.
        kind: u64,
        /// Version of that state.
        version: u64,
    },
    /// The rings are too short for the program.
    #[error("the NIC's rings have {has} descriptors, and the program needs {needs}; raise the NIC's `ring`")]
    ShortRing {
        /// Number of descriptors in each ring.
        has: u64,
        /// Number of descriptors that the program needs at least.
        needs: u64,
    },
    /// A code that this version does not know.
    #[error("the worker has a reason that this version does not know (code {code}); rebuild the older of the two")]
    Unknown {
        /// Code of the reason, as received.
        code: u16,
    },
}

impl Reason {
    fn to_parts(self) -> (u16, u64, u64) {
        match self {
            Reason::MemLock { may, needs } => (1, may, needs),
            Reason::Missing { position } => (2, position, 0),
            Reason::OtherDriverState { kind, version } => (3, kind, version),
            Reason::DamagedDriverState { is, should } => (4, is, should),
            Reason::WrongDriverState { value } => (5, value, 0),
            Reason::CardStuck { limit_ms } => (6, limit_ms, 0),
            Reason::CardGone => (7, 0, 0),
            Reason::Recalled => (8, 0, 0),
            Reason::Late => (9, 0, 0),
            Reason::Died => (10, 0, 0),
            Reason::NobodyLeft => (11, 0, 0),
            Reason::Odd { position } => (12, position, 0),
            Reason::FramesCame => (15, 0, 0),
            Reason::LeftBehind { value } => (16, value, 0),
            Reason::OtherState { kind, version } => (13, kind, version),
            Reason::ShortRing { has, needs } => (14, has, needs),
            Reason::Unknown { code } => (code, 0, 0),
        }
    }

    fn from_parts(code: u16, a: u64, b: u64) -> Self {
        match code {
            1 => Reason::MemLock { may: a, needs: b },
            2 => Reason::Missing { position: a },
            3 => Reason::OtherDriverState { kind: a, version: b },
            4 => Reason::DamagedDriverState { is: a, should: b },
            5 => Reason::WrongDriverState { value: a },
            6 => Reason::CardStuck { limit_ms: a },
            7 => Reason::CardGone,
            8 => Reason::Recalled,
            9 => Reason::Late,
            10 => Reason::Died,
            11 => Reason::NobodyLeft,
            12 => Reason::Odd { position: a },
            15 => Reason::FramesCame,
            16 => Reason::LeftBehind { value: a },
            13 => Reason::OtherState { kind: a, version: b },
            14 => Reason::ShortRing { has: a, needs: b },
            code => Reason::Unknown { code },
        }
    }
}

listed! {
    /// A worker's standing, as it reports it to a daemon that does not know it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Standing {
        /// The worker has received no order.
        Idle,
        /// The worker could go on at once.
        Ready,
        /// The worker waits for the lease.
        Waiting,
        /// The worker holds the lease.
        Holding,
        /// The worker cannot take this device.
        Unfit,
    }
}

/// Order from the daemon to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Report your identity.
    Who,
    /// Map all this, and check whether you read such a driver state.
    Prepare {
        /// Use of the relay.
        purpose: Use,
        /// Method of the relay.
        method: Method,
        /// Kind of the driver state: its driver.
        kind: u32,
        /// Version of the driver state.
        version: u32,
    },
    /// Release the lease that you hold in this epoch.
    Release {
        /// Epoch of the lease.
        epoch: u32,
    },
    /// The order to release this epoch is taken back.
    Recall {
        /// Epoch of the lease.
        epoch: u32,
    },
    /// Take the lease when it has no holder, in this epoch and no other.
    Take {
        /// Epoch of the lease.
        epoch: u32,
        /// How the last driver ended.
        after: After,
        /// Epoch in which the driver state was written, if that driver passed the lease.
        wrote: u32,
    },
    /// Stop waiting for the lease.
    StandDown,
    /// Leave the device: you are not needed any more.
    Leave,
}

/// Report from a worker to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Report {
    /// My identity.
    Hello {
        /// Standing of the worker.
        standing: Standing,
        /// Epoch of the tenure that the worker last knew.
        epoch: u32,
    },
    /// I could go on at once.
    Ready,
    /// I cannot take this device.
    Unfit(Reason),
    /// I have passed the lease that I held in this epoch.
    Released {
        /// Epoch of the lease.
        epoch: u32,
    },
    /// I keep the lease.
    Kept {
        /// Epoch of the lease.
        epoch: u32,
        /// Reason why I keep it.
        reason: Reason,
    },
    /// I hold the lease in this epoch and drive.
    Taken {
        /// Epoch of the lease.
        epoch: u32,
    },
    /// I wait for no lease any more: I could not take the lease of this epoch.
    Lost {
        /// Epoch of the lease.
        epoch: u32,
        /// Whether I could take another lease.
        ready: bool,
    },
    /// I held the lease in this epoch, and passed it back unused.
    Failed {
        /// Epoch of the lease.
        epoch: u32,
        /// Reason why I passed it back.
        reason: Reason,
    },
    /// I was replaced, and no longer touch the device.
    Replaced {
        /// Epoch that I held.
        epoch: u32,
    },
}

/// Reason why bytes are not a packet of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The length is wrong.
    #[error("a packet of the relay has {LEN} bytes, and this one {have}; its sender is not part of Tasuki")]
    Length {
        /// Number of bytes.
        have: usize,
    },
    /// The relay's mark is missing.
    #[error("a packet without the relay's mark came in; its sender is not part of Tasuki")]
    Foreign,
    /// The version is another.
    #[error(
        "a packet of relay version {version} came in, and this program speaks {VERSION}; rebuild the older of the two"
    )]
    Version {
        /// Version of the packet.
        version: u16,
    },
    /// This direction has no such kind.
    #[error("a packet of kind {kind} came in, which nobody sends this way in version {VERSION}")]
    Kind {
        /// Kind of the packet.
        kind: u16,
    },
    /// A field has a value without a meaning.
    #[error("a packet of kind {kind} came in whose {field} is {value:#x}, which means nothing")]
    Field {
        /// Kind of the packet.
        kind: u16,
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: u64,
    },
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Packet {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    epoch: U32,
    code: U16,
    detail: U16,
    a: U64,
    b: U64,
}

const _: () = assert!(size_of::<Packet>() == LEN);

impl Packet {
    fn bytes(kind: u16, epoch: u32, code: u16, detail: u16, a: u64, b: u64) -> [u8; LEN] {
        let version = VERSION.into();
        let (epoch, code, detail) = (epoch.into(), code.into(), detail.into());
        let packet = Packet { magic: MAGIC, version, kind: kind.into(), epoch, code, detail, a: a.into(), b: b.into() };
        zerocopy::transmute!(packet)
    }

    fn read(bytes: &[u8]) -> Result<Self, Malformed> {
        let packet = Packet::read_from_bytes(bytes).map_err(|_| Malformed::Length { have: bytes.len() })?;
        match (packet.magic, packet.version.get()) {
            (MAGIC, VERSION) => Ok(packet),
            (MAGIC, version) => Err(Malformed::Version { version }),
            _ => Err(Malformed::Foreign),
        }
    }

    fn wrong(&self, field: &'static str, value: u64) -> Malformed {
        Malformed::Field { kind: self.kind.get(), field, value }
    }

    /// Returns the element of `all` at the position `value`.
    fn one_of<T: All>(&self, field: &'static str, value: u16) -> Result<T, Malformed> {
        T::ALL.get(usize::from(value)).copied().ok_or_else(|| self.wrong(field, value.into()))
    }

    /// Returns the packet's reason. It must be encoded as we would encode it.
    fn reason(&self) -> Result<Reason, Malformed> {
        let reason = Reason::from_parts(self.code.get(), self.a.get(), self.b.get());
        match reason.to_parts() == (self.code.get(), self.a.get(), self.b.get()) {
            true => Ok(reason),
            false => Err(self.wrong("reason", self.a.get())),
        }
    }
}

impl All for Use {
    const ALL: &'static [Self] = &[Use::Upgrade, Use::Takeover, Use::Handover];
}

impl All for bool {
    const ALL: &'static [Self] = &[false, true];
}

impl All for After {
    const ALL: &'static [Self] = &[After::Passed, After::Lost];
}

impl Order {
    /// Returns the order as a packet.
    pub fn to_bytes(self) -> [u8; LEN] {
        let plain = |kind, epoch| Packet::bytes(kind, epoch, 0, 0, 0, 0);
        match self {
            Order::Who => plain(1, 0),
            Order::Prepare { purpose, method, kind, version } => {
                let driver_state = u64::from(kind) << 32 | u64::from(version);
                Packet::bytes(2, 0, purpose as u16, method as u16, driver_state, 0)
            }
            Order::Release { epoch } => plain(3, epoch),
            Order::Recall { epoch } => plain(4, epoch),
            Order::Take { epoch, after, wrote } => Packet::bytes(5, epoch, after as u16, 0, wrote.into(), 0),
            Order::StandDown => plain(6, 0),
            Order::Leave => plain(7, 0),
        }
    }

    /// Parses an order.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let packet = Packet::read(bytes)?;
        let epoch = packet.epoch.get();
        let order = match packet.kind.get() {
            1 => Order::Who,
            2 => Order::Prepare {
                purpose: packet.one_of("use", packet.code.get())?,
                method: packet.one_of("method", packet.detail.get())?,
                kind: high(packet.a.get()),
                version: low(packet.a.get()),
            },
            3 => Order::Release { epoch },
            4 => Order::Recall { epoch },
            5 => Order::Take { epoch, after: packet.one_of("after", packet.code.get())?, wrote: low(packet.a.get()) },
            6 => Order::StandDown,
            7 => Order::Leave,
            kind => return Err(Malformed::Kind { kind }),
        };
        exactly(order, &packet, order.to_bytes())
    }
}

/// The plan of a relay. The daemon sends it to both sides before it orders either to do its part. It is a packet,
/// for a message takes as long to read as a hundred frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Method of the relay; an upgrade is a `keep` within the node.
    pub method: Method,
    /// Whether the NIC goes to another node.
    pub handover: bool,
    /// Fate of frames in flight.
    pub inflight: Inflight,
    /// Version of the driver state that goes through the store, if it goes that way. The giver then writes it as bytes, to
    /// [`ToDaemon::DriverState`](crate::message::ToDaemon::DriverState), before it passes the lease.
    pub store: Option<u32>,
    /// Whether the taker does not trust the giver, which is fenced once it has passed the lease.
    pub fenced: bool,
}

impl Plan {
    const HANDOVER: u64 = 1;
    const DROP: u64 = 2;
    const STORE: u64 = 4;
    const FENCED: u64 = 8;

    /// Returns the plan as a packet.
    pub fn to_bytes(self) -> [u8; LEN] {
        let Plan { method, handover, inflight, store, fenced } = self;
        let drops = inflight == Inflight::Drop;
        let bits =
            [(handover, Self::HANDOVER), (drops, Self::DROP), (store.is_some(), Self::STORE), (fenced, Self::FENCED)];
        let bits = bits.into_iter().filter(|(is, _)| *is).map(|(_, bit)| bit).sum();
        Packet::bytes(9, 0, method as u16, 0, bits, store.unwrap_or_default().into())
    }

    /// Parses a plan.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let packet = Packet::read(bytes)?;
        if packet.kind.get() != 9 {
            return Err(Malformed::Kind { kind: packet.kind.get() });
        }
        let has = |bit| packet.a.get() & bit != 0;
        let plan = Plan {
            method: packet.one_of("method", packet.code.get())?,
            handover: has(Self::HANDOVER),
            inflight: if has(Self::DROP) { Inflight::Drop } else { Inflight::Deliver },
            store: has(Self::STORE).then(|| low(packet.b.get())),
            fenced: has(Self::FENCED),
        };
        exactly(plan, &packet, plan.to_bytes())
    }
}

impl Report {
    /// Returns the report as a packet.
    pub fn to_bytes(self) -> [u8; LEN] {
        let plain = |kind, epoch| Packet::bytes(kind, epoch, 0, 0, 0, 0);
        let why = |kind, epoch, reason: Reason| {
            let (code, a, b) = reason.to_parts();
            Packet::bytes(kind, epoch, code, 0, a, b)
        };
        match self {
            Report::Hello { standing, epoch } => Packet::bytes(101, epoch, standing as u16, 0, 0, 0),
            Report::Ready => plain(102, 0),
            Report::Unfit(reason) => why(103, 0, reason),
            Report::Released { epoch } => plain(104, epoch),
            Report::Kept { epoch, reason } => why(105, epoch, reason),
            Report::Taken { epoch } => plain(106, epoch),
            Report::Lost { epoch, ready } => Packet::bytes(107, epoch, ready.into(), 0, 0, 0),
            Report::Failed { epoch, reason } => why(108, epoch, reason),
            Report::Replaced { epoch } => plain(109, epoch),
        }
    }

    /// Parses a report.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let packet = Packet::read(bytes)?;
        let epoch = packet.epoch.get();
        let report = match packet.kind.get() {
            101 => Report::Hello { standing: packet.one_of("standing", packet.code.get())?, epoch },
            102 => Report::Ready,
            103 => Report::Unfit(packet.reason()?),
            104 => Report::Released { epoch },
            105 => Report::Kept { epoch, reason: packet.reason()? },
            106 => Report::Taken { epoch },
            107 => Report::Lost { epoch, ready: packet.one_of("ready", packet.code.get())? },
            108 => Report::Failed { epoch, reason: packet.reason()? },
            109 => Report::Replaced { epoch },
            kind => return Err(Malformed::Kind { kind }),
        };
        exactly(report, &packet, report.to_bytes())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "one half of it")]
fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    low(word >> 32)
}

/// Returns `message` if the packet is its only encoding: unused fields must be zero.
fn exactly<M>(message: M, packet: &Packet, again: [u8; LEN]) -> Result<M, Malformed> {
    match again == *packet.as_bytes() {
        true => Ok(message),
        false => Err(packet.wrong("unused part", packet.b.get())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reason() -> impl Strategy<Value = Reason> {
        (0..20_u16, any::<u64>(), any::<u64>()).prop_filter_map("written as we write it", |(code, a, b)| {
            let reason = Reason::from_parts(code, a, b);
            Some(Reason::from_parts(reason.to_parts().0, reason.to_parts().1, reason.to_parts().2))
        })
    }

    fn order() -> impl Strategy<Value = Order> {
        let prepare = (0..3_usize, 0..4_usize, any::<u32>(), any::<u32>());
        prop_oneof![
            prop_oneof![Just(Order::Who), Just(Order::StandDown), Just(Order::Leave)],
            prepare.prop_map(|(purpose, method, kind, version)| Order::Prepare {
                purpose: Use::ALL[purpose],
                method: Method::ALL[method],
                kind,
                version,
            }),
            any::<u32>().prop_map(|epoch| Order::Release { epoch }),
            any::<u32>().prop_map(|epoch| Order::Recall { epoch }),
            (any::<[u32; 2]>(), 0..2_usize).prop_map(|([epoch, wrote], after)| Order::Take {
                epoch,
                after: After::ALL[after],
                wrote
            }),
        ]
    }

    fn plan() -> impl Strategy<Value = Plan> {
        let bits = any::<([bool; 3], Option<u32>)>();
        (0..4_usize, bits).prop_map(|(method, ([handover, drops, fenced], store))| Plan {
            method: Method::ALL[method],
            handover,
            inflight: if drops { Inflight::Drop } else { Inflight::Deliver },
            store,
            fenced,
        })
    }

    fn report() -> impl Strategy<Value = Report> {
        prop_oneof![
            (0..5_usize, any::<u32>())
                .prop_map(|(standing, epoch)| Report::Hello { standing: Standing::ALL[standing], epoch }),
            Just(Report::Ready),
            reason().prop_map(Report::Unfit),
            any::<u32>().prop_map(|epoch| Report::Released { epoch }),
            (any::<u32>(), reason()).prop_map(|(epoch, reason)| Report::Kept { epoch, reason }),
            any::<u32>().prop_map(|epoch| Report::Taken { epoch }),
            any::<(u32, bool)>().prop_map(|(epoch, ready)| Report::Lost { epoch, ready }),
            (any::<u32>(), reason()).prop_map(|(epoch, reason)| Report::Failed { epoch, reason }),
            any::<u32>().prop_map(|epoch| Report::Replaced { epoch }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_said_is_heard(order in order(), report in report(), plan in plan()) {
            prop_assert_eq!(Order::parse(&order.to_bytes()), Ok(order));
            prop_assert_eq!(Report::parse(&report.to_bytes()), Ok(report));
            prop_assert_eq!(Plan::parse(&plan.to_bytes()), Ok(plan));
            let kind = |bytes: [u8; LEN]| u16::from_le_bytes([bytes[6], bytes[7]]);
            prop_assert_eq!(Report::parse(&order.to_bytes()), Err(Malformed::Kind { kind: kind(order.to_bytes()) }));
            prop_assert_eq!(Order::parse(&report.to_bytes()), Err(Malformed::Kind { kind: kind(report.to_bytes()) }));
            prop_assert_eq!(Order::parse(&plan.to_bytes()), Err(Malformed::Kind { kind: 9 }));
            prop_assert_eq!(Plan::parse(&order.to_bytes()), Err(Malformed::Kind { kind: kind(order.to_bytes()) }));
        }

        #[test]
        fn any_bytes_are_refused_or_mean_one_thing(
            kind in prop_oneof![0..12_u16, 98..115_u16, any::<u16>()],
            rest in proptest::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], 24),
            marked in any::<bool>(),
        ) {
            let head: &[u8] = if marked { b"TRL\0\x01\0" } else { b"TRL\0\x02\0" };
            let bytes = [head, &kind.to_le_bytes(), &rest].concat();
            if let Ok(order) = Order::parse(&bytes) {
                prop_assert_eq!(&order.to_bytes()[..], &bytes);
            }
            if let Ok(report) = Report::parse(&bytes) {
                prop_assert_eq!(&report.to_bytes()[..], &bytes);
            }
            if let Ok(plan) = Plan::parse(&bytes) {
                prop_assert_eq!(&plan.to_bytes()[..], &bytes);
            }
            let refused = Report::parse(&bytes) == Err(Malformed::Version { version: 2 });
            prop_assert!(marked || refused);
        }

        #[test]
        fn other_lengths_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let expected = if bytes.len() == LEN { Malformed::Foreign } else { Malformed::Length { have: bytes.len() } };
            prop_assert_eq!(Order::parse(&bytes), Err(expected));
            prop_assert_eq!(Report::parse(&bytes), Err(expected));
        }
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = Order::Take { epoch: 0x0102_0304, after: After::Lost, wrote: 0 }.to_bytes();
        assert_eq!(bytes[..16], *b"TRL\0\x01\0\x05\0\x04\x03\x02\x01\x01\0\0\0");
        assert_eq!(bytes[16..], [0; 16]);
    }
}
