//! Malicious clients: of memif, against the worker that serves them, and of HTTP, against the daemon. The server
//! disconnects them, and other clients do not notice.
//!
//! Attacks of docs/design/threat-model.md.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, SealFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::memifs::client::{
    CONNECT, Channel, Client, HELLO, Shape, add_region, add_ring, eventfd, init, memory, message,
};
use super::memifs::{SECRET, with_echo};
use super::natives::{assert_exact, flows, with_source_and_sink};
use super::rig::{Rig, lives, pid, until};
use super::vnis::World;

const SHAPE: Shape = Shape { log2: 4, buffer: 2048 };

/// Descriptors that a client sends: memory that can shrink, memory that cannot, a bell.
struct Hands {
    unsealed: OwnedFd,
    sealed: OwnedFd,
    bell: OwnedFd,
}

type Step<'a> = (Vec<u8>, Vec<BorrowedFd<'a>>);

/// Messages after the greeting, for which the worker disconnects the client.
type Handshake = fn(&Hands) -> Vec<Step<'_>>;

fn greeting<'a>() -> Step<'a> {
    (init(0x0200, 0, 0, SECRET), vec![])
}

fn with_region(hands: &Hands) -> Vec<Step<'_>> {
    vec![greeting(), (add_region(0, 8192), vec![hands.sealed.as_fd()])]
}

/// Handshakes, each with its row of the threat model.
const HANDSHAKES: &[(&str, &str, Handshake)] = &[
    ("T91", "does not know the secret", |_| vec![(init(0x0200, 0, 0, "guess"), vec![])]),
    ("T91", "speaks another version", |_| vec![(init(0x0700, 0, 0, SECRET), vec![])]),
    ("T91", "asks for another port", |_| vec![(init(0x0200, 77, 0, SECRET), vec![])]),
    ("T91", "says too little", |_| vec![(vec![3; 5], vec![])]),
    ("T91", "says what nobody knows", |_| vec![(message(999, &[]), vec![])]),
    ("T91", "connects before its turn", |_| vec![(message(CONNECT, &[]), vec![])]),
    ("T91", "lends memory that it can take away", |hands| {
        vec![greeting(), (add_region(0, 8192), vec![hands.unsealed.as_fd()])]
    }),
    ("T91", "lends more memory than there is", |hands| {
        vec![greeting(), (add_region(0, 1 << 20), vec![hands.sealed.as_fd()])]
    }),
    ("T91", "lends what is no memory", |hands| vec![greeting(), (add_region(0, 8192), vec![hands.bell.as_fd()])]),
    ("T91", "lends without end", |hands| {
        let regions = (0..40).map(|index| (add_region(index, 8192), vec![hands.sealed.as_fd()]));
        std::iter::once(greeting()).chain(regions).collect()
    }),
    ("T91", "sends descriptors that nobody asked for", |hands| {
        vec![greeting(), (add_region(0, 8192), vec![hands.sealed.as_fd(); 8])]
    }),
    ("T91", "has a ring outside of its memory", |hands| {
        let mut steps = with_region(hands);
        steps.push((add_ring(true, 0, 0, 0xffff_fff0, 4, 0), vec![hands.bell.as_fd()]));
        steps
    }),
    ("T91", "has a ring of more slots than there are numbers", |hands| {
        let mut steps = with_region(hands);
        steps.push((add_ring(true, 0, 0, 0, 255, 0), vec![hands.bell.as_fd()]));
        steps
    }),
    ("T91", "has a bell that is none", |hands| {
        let mut steps = with_region(hands);
        steps.push((add_ring(true, 0, 0, 0, 4, 0), vec![hands.sealed.as_fd()]));
        steps
    }),
];

/// An act of a connected client.
type Deed = fn(&Client);

fn describe_and_send(client: &Client, flags: u16, region: u16, len: u32, offset: u32, count: u16) {
    let head = client.head(true);
    for slot in 0..count {
        client.describe(true, u32::from(head.wrapping_add(slot)), flags, region, len, offset);
    }
    client.set_head(true, head.wrapping_add(count));
}

/// Deeds, each with its row of the threat model.
const DEEDS: &[(&str, &str, Deed)] = &[
    ("T92", "sends more than its ring has", |client| client.set_head(true, client.head(true).wrapping_add(1000))),
    ("T92", "takes back what it sent", |client| client.set_head(true, client.head(true).wrapping_sub(1))),
    ("T92", "sends out of memory that is not there", |client| describe_and_send(client, 0, 9, 60, 0, 1)),
    ("T92", "sends beyond the end of its memory", |client| describe_and_send(client, 0, 0, u32::MAX, 100, 1)),
    ("T92", "sends a frame without end", |client| describe_and_send(client, 1, 0, 60, 8192, 16)),
    ("T92", "has a buffer elsewhere", |client| {
        (0..16).for_each(|slot| client.describe(false, slot, 0, 0xffff, 2048, 0));
        client.set_head(false, client.head(false).wrapping_add(1000));
    }),
    ("T92", "connects twice", |client| client.channel.send(&message(CONNECT, &[]), &[])),
];

fn rings(client: &Client) {
    let _ = rustix::io::write(&client.bells[0], &1_u64.to_ne_bytes());
}

/// Waits until the client is disconnected; returns the reason.
fn sent_away(channel: &Channel, what: &str) -> String {
    let limit = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(reason) = channel.reason() {
            return reason;
        }
        if channel.is_closed() {
            return "closed".to_owned();
        }
        assert!(Instant::now() < limit, "a client that {what} is not sent away");
        channel.wait(Duration::from_secs(1));
    }
}

/// rows: in the tables
#[test]
fn a_client_of_memif_that_means_harm_is_sent_away_and_others_lose_nothing() {
    let Some((world, socket)) = with_echo(World::new()) else { return };
    with_source_and_sink(&world.rig, "1000");
    let worker = pid(&world.rig.await_pair("web").0);
    let hands =
        Hands { unsealed: memory(8192, SealFlags::empty()), sealed: memory(8192, SealFlags::SHRINK), bell: eventfd() };
    for (_, what, handshake) in HANDSHAKES {
        let channel = Channel::connect(&socket);
        handshake(&hands).iter().for_each(|(message, with)| channel.send(message, with));
        println!("a client that {what}: {}", sent_away(&channel, what));
    }
    for (_, what, deed) in DEEDS {
        let client = connected(&socket);
        deed(&client);
        rings(&client);
        println!("a client that {what}: {}", sent_away(&client.channel, what));
    }
    holes_and_crowds(&world, &socket);
    flows(&world.rig, 100);
    assert_eq!(pid(&world.rig.await_worker("web", "drives")), worker, "{}", world.rig.log());
    let source = world.rig.await_pair("source");
    assert!(lives(pid(&source.0)));
    world.rig.ask(&["node", "remove", "source"]);
    assert_exact(&world.rig);
    world.end();
}

fn connected(socket: &Path) -> Client {
    Client::connect(socket, SHAPE, SECRET, || {})
}

/// A client punches a hole into its memory under its worker, row: T92, and more clients connect than there is room
/// for, row: T91
fn holes_and_crowds(world: &World, socket: &Path) {
    let mut client = connected(socket);
    assert!(client.send(&[0xff; 1000]));
    let all = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&client.memory, all, 0, SHAPE.len()).expect("memory");
    rings(&client);
    // The worker reads zeros there. Whether they are a breach is for the rings to decide.
    flows(&world.rig, 100);
    drop(client);
    let crowd: Vec<_> = (0..64).filter_map(|_| silent(socket)).collect();
    flows(&world.rig, 100);
    println!("{} connect at once and say nothing", crowd.len());
    drop(crowd);
    // There is room for the next client.
    until(&world.rig, "it is let in", || {
        let next = silent(socket);
        next.is_some_and(|next| {
            next.wait(Duration::from_secs(1));
            next.hear().is_some_and(|(kind, _)| kind == HELLO)
        })
    });
    drop(connected(socket));
}

/// Connects and says nothing. Returns `None` if there is no room.
fn silent(path: &Path) -> Option<Channel> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    Some(Channel(socket))
}

/// Returns a POST request with this body.
fn post(path: &str, body: &str) -> Vec<u8> {
    let head = format!("POST {path} HTTP/1.1\r\nhost: tasukid\r\nconnection: close\r\n");
    format!("{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: tasukid\r\nconnection: close\r\n\r\n").into_bytes()
}

/// A request of a client with full permissions.
type Request = fn() -> Vec<u8>;

/// Requests, each with its row of the threat model.
const REQUESTS: &[(&str, &str, Request)] = &[
    ("T65", "names a file", || get("/v1/nodes/..%2f..%2f..%2fetc%2fpasswd")),
    ("T65", "goes up", || get("/v1/../../etc/passwd")),
    ("T65", "is in another protocol", || b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
    ("T65", "is not text", || vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 0xff, 0, 0xff, b'\r', b'\n', b'\r', b'\n']),
    ("T65", "has a head without end", || {
        [&b"GET /v1/status HTTP/1.1\r\nx: "[..], &[b'a'; 1 << 20], b"\r\n\r\n"].concat()
    }),
    ("T65", "has heads without end", || {
        let heads: String = (0..20_000).map(|number| format!("x{number}: y\r\n")).collect();
        format!("GET /v1/status HTTP/1.1\r\n{heads}\r\n").into_bytes()
    }),
    ("T65", "has two lengths", || {
        b"POST /v1/stop HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\ncontent-length: 40\r\n\r\n{}\r\nGET /v1/status"
            .to_vec()
    }),
    ("T65", "has less than no length", || b"POST /v1/nodes HTTP/1.1\r\nhost: t\r\ncontent-length: -1\r\n\r\n".to_vec()),
    ("T65", "has a part without end", || {
        let head = "POST /v1/nodes HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";
        format!("{head}ffffffffffffffff\r\nxx").into_bytes()
    }),
    ("T65", "is nested without end", || post("/v1/nodes", &"[".repeat(60_000))),
    ("T65", "has a name that a terminal obeys", || {
        post("/v1/nodes", "{\"name\":\"\\u001b[2Jx\",\"work\":\"sink\",\"vni\":\"lan\"}")
    }),
    ("T65", "has a name of 60,000 bytes", || {
        post("/v1/nodes", &format!("{{\"name\":\"{}\",\"work\":\"sink\",\"vni\":\"lan\"}}", "n".repeat(60_000)))
    }),
    ("T65", "has a name that is a path", || {
        post("/v1/nodes", "{\"name\":\"../../../../tmp/x\",\"work\":\"sink\",\"vni\":\"lan\"}")
    }),
    ("T65", "gives a NIC to nobody", || post("/v1/nics/eth0/give", "{\"to\":\"../red\"}")),
    ("T65", "names a method that nobody has", || {
        b"BREW /v1/nodes HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n".to_vec()
    }),
];

/// rows: in the table
#[test]
fn a_request_that_means_harm_is_refused_and_nothing_else_happens() {
    let rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    for (_, what, request) in REQUESTS {
        let mut stream = UnixStream::connect(rig.dir().join("api.sock")).expect("a daemon");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
        // A client that is refused in the middle of its request cannot send the rest.
        let _ = stream.write_all(&request());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        println!("a request that {what}: {}", answer.lines().next().unwrap_or("(nothing)"));
        assert!(!answer.starts_with("HTTP/1.1 2"), "a request that {what}: {answer}");
        assert!(rig.tasuki(&["status"]).status.success(), "{what}\n{}", rig.log());
    }
    let (drives, stands_by) = rig.await_pair("red");
    assert_eq!((pid(&drives), pid(&stands_by)), (pid(&driver), pid(&standby)), "{}", rig.log());
    let nodes = rig.json(&["status"]);
    assert!(!rig.log().contains('\u{1b}') && !nodes.to_string().contains("u001b"), "{nodes}");
}

/// Clients that send requests without end and read no answer do not block the daemon.
///
/// row: T63
#[test]
fn one_who_reads_no_answer_holds_up_nobody() {
    let rig = Rig::new();
    rig.await_pair("red");
    let deaf: Vec<UnixStream> = (0..16)
        .map(|_| {
            let stream = UnixStream::connect(rig.dir().join("api.sock")).expect("a daemon");
            stream.set_nonblocking(true).expect("a socket");
            let asks = b"GET /openapi.json HTTP/1.1\r\nhost: t\r\n\r\n".repeat(2000);
            let _ = (&stream).write(&asks);
            stream
        })
        .collect();
    for _ in 0..20 {
        assert!(rig.tasuki(&["status"]).status.success(), "{}", rig.log());
    }
    rig.ask(&["worker", "upgrade", "red"]);
    rig.await_pair("red");
    drop(deaf);
}
