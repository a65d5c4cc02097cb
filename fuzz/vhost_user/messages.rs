//! Messages of a front end that mostly make sense, and their descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use crate::common::Choices;
use crate::guest::RINGS;
use crate::vm::{CSUM, EVENT_IDX, GUEST, GUEST_CSUM, GUEST_TSO4, IN_ORDER, INDIRECT, LEN, LOG_ALL, MRG_RXBUF, Machine};
use crate::vm::{PACKED, PROTOCOL, USER, VERSION_1, memory, state, table};

pub const ALL: u64 = VERSION_1 | MRG_RXBUF | INDIRECT | EVENT_IDX | PROTOCOL;
const OFFLOADS: u64 = CSUM | GUEST_CSUM | GUEST_TSO4;
pub const FEATURES: [u64; 8] = [
    ALL,
    ALL | OFFLOADS,
    VERSION_1,
    PROTOCOL,
    ALL | PACKED,
    ALL | PACKED | IN_ORDER | OFFLOADS,
    VERSION_1 | MRG_RXBUF | PROTOCOL | PACKED,
    0,
];

/// A handshake.
const STEPS: [u32; 18] = [3, 1, 15, 16, 2, 5, 8, 10, 9, 13, 12, 18, 8, 10, 9, 13, 12, 18];

/// All requests that there may be.
const REQUESTS: [u32; 25] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 36, 37, 38, 39, 40];

/// Those that a feature of the protocol brings.
const OF_PROTOCOL: [u32; 9] = [6, 17, 19, 20, 36, 37, 38, 39, 40];

/// What a front end may send as a descriptor.
pub struct Props {
    long: OwnedFd,
    short: OwnedFd,
    read_only: OwnedFd,
    log: OwnedFd,
    plain: OwnedFd,
    null: OwnedFd,
    pipe: (OwnedFd, OwnedFd),
    socket: OwnedFd,
}

impl Props {
    /// `path` is a socket's at which another listens.
    pub fn new(path: &Path) -> Self {
        let read_only = memory(1 << 16);
        rustix::fs::fcntl_add_seals(&read_only, SealFlags::FUTURE_WRITE).expect("a seal");
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("it is there");
        Props {
            long: memory(LEN),
            short: memory(5000),
            read_only,
            log: memory(1 << 17),
            plain: tempfile::tempfile().expect("a file").into(),
            null,
            pipe: tasuki_shm::wake::bell_pipe().expect("a pipe"),
            socket: rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)
                .and_then(|socket| rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).map(|()| socket))
                .expect("a socket"),
        }
    }

    fn any(&self, choice: u8) -> BorrowedFd<'_> {
        let all: [&OwnedFd; 9] = [
            &self.long,
            &self.short,
            &self.read_only,
            &self.log,
            &self.plain,
            &self.null,
            &self.pipe.0,
            &self.pipe.1,
            &self.socket,
        ];
        all[usize::from(choice) % all.len()].as_fd()
    }
}

/// Chooses the request and the ring of the next message. `step` counts those of a connection without a machine behind it.
pub fn request(choices: &mut Choices<'_>, machine: Option<&Machine>, step: Option<&mut u8>) -> (u32, u32) {
    let expected = step.map(|step| {
        let request = STEPS[usize::from(*step) % STEPS.len()];
        *step = step.wrapping_add(1);
        (request, u32::from(*step > 12))
    });
    let (request, ring) = match choices.byte() {
        any @ 0xf8.. => (u32::from(any & 7) << 8 | u32::from(choices.byte()), 0),
        few => match expected {
            Some(step) if few & 7 > 0 => step,
            _ => (REQUESTS[usize::from(few >> 3) % REQUESTS.len()], u32::from(few)),
        },
    };
    let bits = choices.byte();
    let index = match (ring, bits) {
        (0..2, _) => ring,
        (_, 0xf0..) => u32::from(choices.byte()).saturating_sub(160),
        (_, 0xa0..) => ring % 4,
        _ => ring % 2,
    };
    let is_offered = !OF_PROTOCOL.contains(&request) || machine.is_none_or(|it| it.features & PROTOCOL != 0);
    (if is_offered || bits & 4 == 0 { request } else { 18 }, index)
}

/// Returns the body of a message, which mostly makes sense.
pub fn body(choices: &mut Choices<'_>, machine: Option<&Machine>, request: u32, index: u32) -> Vec<u8> {
    let odd = choices.below(32) == 0;
    let (size, features) = machine.map_or((64, ALL), |machine| (machine.size, machine.features));
    let is_packed = features & PACKED != 0;
    let number = |number: u64| number.to_ne_bytes().to_vec();
    match request {
        _ if odd => words(choices, index as u8 % 9),
        2 => number(match choices.below(32) {
            0 => choices.word(),
            1..4 => FEATURES[usize::from(choices.below(8))],
            4..12 => features | LOG_ALL,
            _ => features,
        }),
        5 => {
            let count = if choices.below(8) == 0 { choices.below(10) } else { choices.below(4) };
            let regions: Vec<_> = match count {
                1 => vec![[GUEST, LEN, USER, 0]],
                2 => vec![[GUEST, LEN / 2, USER, 0], [GUEST + LEN / 2, LEN / 2, USER + LEN / 2, LEN / 2]],
                _ => (0..count).map(|_| region(choices)).collect(),
            };
            table(&regions)
        }
        6 => match choices.below(6) {
            0 => words(choices, 2),
            1 => [number(8 * u64::from(choices.byte())), number(4 * u64::from(choices.byte()))].concat(),
            _ => [number((GUEST + LEN) / 4096 / 8), number(8 * u64::from(choices.byte()))].concat(),
        },
        8 => state(index, if choices.below(4) == 0 { choices.word() as u32 } else { size.into() }).to_vec(),
        10 => {
            let base = if is_packed { 0x8000 } else { 0 };
            state(index, if choices.below(4) == 0 { choices.short().into() } else { base }).to_vec()
        }
        9 => {
            let [descriptors, available, used] = RINGS[index as usize % 2];
            let mut places = [USER + descriptors, USER + used, USER + available, GUEST + used];
            if choices.below(8) == 0 {
                places[usize::from(choices.below(4))] = choices.word();
            }
            let places: Vec<u8> = places.iter().flat_map(|place| place.to_ne_bytes()).collect();
            [&state(index, u32::from(choices.below(2)))[..], &places].concat()
        }
        11 => state(index, 0).to_vec(),
        12..=14 => number(u64::from(index) | if choices.below(8) == 0 { 0x100 } else { 0 }),
        16 => number(match choices.below(16) {
            0 => choices.word(),
            1 => 0,
            2 => 8,
            _ => 0x1_801f,
        }),
        18 => state(index, u32::from(choices.below(4) > 0)).to_vec(),
        19 | 20 => number(if choices.below(2) == 0 { choices.word() } else { 1500 }),
        37 | 38 => [0].into_iter().chain(region(choices)).flat_map(u64::to_ne_bytes).collect(),
        39 => number(u64::from(choices.below(16))),
        _ => Vec::new(),
    }
}

fn words(choices: &mut Choices<'_>, count: u8) -> Vec<u8> {
    (0..count).flat_map(|_| choices.word().to_ne_bytes()).collect()
}

/// Returns the descriptors of a message: mostly the proper ones.
pub fn fds<'a>(
    choices: &mut Choices<'_>,
    props: &'a Props,
    machine: Option<&'a Machine>,
    (request, body): (u32, &[u8]),
    fresh: &'a OwnedFd,
) -> Vec<BorrowedFd<'a>> {
    let memory = machine.map_or(&props.long, |machine| &machine.memory).as_fd();
    match choices.below(40) {
        0 => (0..choices.below(18)).map(|_| props.any(choices.byte())).collect(),
        1 => vec![fresh.as_fd(); usize::from(choices.below(18))],
        2 => vec![machine.map_or(&props.socket, |machine| &machine.socket).as_fd()],
        _ => match request {
            5 => vec![memory; (body.len().saturating_sub(8) / 32).min(16)],
            37 => vec![memory],
            6 => vec![props.log.as_fd()],
            12..=14 if body.get(1) == Some(&0) => vec![fresh.as_fd()],
            _ => vec![],
        },
    }
}

/// Chooses a region of memory: its guest's address, length, front end's address, and offset.
fn region(choices: &mut Choices<'_>) -> [u64; 4] {
    let page = u64::from(choices.byte()) << 12;
    match choices.below(6) {
        0 => [choices.word(), choices.word(), choices.word(), choices.word()],
        1 => [GUEST + page, u64::from(choices.short()), USER + page, page],
        2 => [GUEST, LEN / 2, USER, 0],
        3 => [GUEST + LEN / 2, LEN / 2, USER + LEN / 2, LEN / 2],
        _ => [GUEST, LEN, USER, 0],
    }
}
