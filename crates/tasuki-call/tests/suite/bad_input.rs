//! Bad input: every possible fault from outside meets the error that names it, in a sentence that says what was
//! found and what to do. Run with `--nocapture` to read them all.

use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Resource, Rlimit};
use tasuki_call::{
    Ask, BindError, Client, ClientOptions, ConnectError, Malformed, Peers, Refusal, SegmentError, Server,
    ServerOptions, Successor, Turn, VERSION,
};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::{Pages, Region, RegionError};
use tasuki_testing::{Program, alone, descriptors, process};

use crate::common::*;
use crate::watched;

/// Gives up what the environment of a child says.
pub fn take_resources(told: &Told) {
    if let Some(more) = told.var("TASUKI_FILES") {
        leave_descriptors(more.parse().unwrap());
    }
    if let Some(more) = told.var("TASUKI_ADDRESSES") {
        limit(Resource::As, address_space() + more.parse::<u64>().unwrap());
    }
}

/// Lowers the limit so that exactly `spare` descriptors can still be opened. The limit applies to descriptor
/// numbers, and the parent of the tests may have left us open descriptors with high numbers. So count the free
/// numbers, not the open ones.
fn leave_descriptors(spare: usize) {
    limit(Resource::Nofile, room_for(spare));
}

/// Returns the limit of descriptor numbers that leaves room for `spare` more.
fn room_for(spare: usize) -> u64 {
    let is_free = |number: &u64| !Path::new(&format!("/proc/self/fd/{number}")).is_symlink();
    let free = (0..).filter(is_free).take(spare);
    free.last().map_or(0, |number| number + 1)
}

/// Runs a closure while this process, which runs one test alone, has room for only `spare` more descriptors.
pub fn with_descriptors<T>(spare: usize, what: impl FnOnce() -> T) -> T {
    let before = rustix::process::getrlimit(Resource::Nofile);
    let few = Rlimit { current: Some(room_for(spare)), ..before };
    rustix::process::setrlimit(Resource::Nofile, few).unwrap();
    let result = what();
    rustix::process::setrlimit(Resource::Nofile, before).unwrap();
    result
}

/// Sets both limits, so that the library cannot raise the soft limit to the hard one.
fn limit(resource: Resource, to: u64) {
    rustix::process::setrlimit(resource, Rlimit { current: Some(to), maximum: Some(to) }).unwrap();
}

fn address_space() -> u64 {
    process::status_bytes("self", "VmSize")
}

/// Runs as a process of another user, or with few resources. Prints the outcome of its attempt on standard
/// output.
pub fn stranger() {
    let Ok(what) = std::env::var("TASUKI_STRANGER") else { return };
    let path = &PathBuf::from(std::env::var_os("TASUKI_SOCKET").unwrap());
    let said = match what.as_str() {
        "connect" => Client::connect(path, &small()).map(drop).map_err(|error| error.to_string()),
        "bind" => Server::bind(path, options()).map(drop).map_err(|error| error.to_string()),
        "serve" => {
            let mut server = Server::bind(path, options()).unwrap();
            let mut worker = Worker::new(&Board::new(), None);
            while server.tally().departed == 0 {
                server.turn(None, |request| worker.handle(request)).unwrap();
            }
            Ok(())
        }
        "approach" => Successor::approach(path).map(drop).map_err(|error| error.to_string()),
        "with little address space" => {
            limit(Resource::As, address_space() + (8 << 20));
            let arena = Geometry { slot_len: 1 << 20, count: 64 };
            Client::connect(path, &ClientOptions { arena, ..small() }).map(drop).map_err(|error| error.to_string())
        }
        few if few.ends_with("descriptors") => {
            let spare: usize = few.split(' ').nth(1).unwrap().parse().unwrap();
            leave_descriptors(spare);
            Client::connect(path, &small()).map(drop).map_err(|error| error.to_string())
        }
        other => panic!("no such stranger: {other}"),
    };
    println!("@@{}", said.err().unwrap_or_else(|| "welcome".into()));
}

/// Returns a stranger's output, or `None` if it cannot start (another user may not be able to run this file).
fn ask_stranger(what: &str, path: &Path, uid: Option<u32>) -> Option<String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(CHILD_ROLE);
    command.env("TASUKI_STRANGER", what).env("TASUKI_SOCKET", path).stdin(Stdio::null()).current_dir("/");
    if let Some(uid) = uid {
        command.uid(uid);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            println!("skipped: user {uid:?} cannot run {:?}: {error}", std::env::current_exe().unwrap());
            return None;
        }
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let at = said.find("@@").unwrap_or_else(|| panic!("{what}: {said}{}", String::from_utf8_lossy(&output.stderr)));
    Some(said[at + 2..].lines().next().unwrap().to_owned())
}

/// Prints a sentence, and checks that it contains all `parts`.
fn says(case: &str, sentence: impl Display, parts: &[&str]) {
    let sentence = sentence.to_string();
    println!("{case}\n    {sentence}");
    for part in parts {
        assert!(sentence.contains(part), "{case}: the sentence lacks {part:?}: {sentence}");
    }
}

fn connect(path: &Path) -> ConnectError {
    Client::connect(path, &small()).unwrap_err()
}

macro_rules! is {
    ($error:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $error;
        assert!(matches!(&error, $pattern $(if $guard)?), "{error:?}");
        error
    }};
}

fn works(path: &Path) {
    let mut client = Client::connect(path, &small()).unwrap();
    assert_eq!(client.call(Ask::new(ECHO, &[3; 100]), ample()).unwrap().to_vec(), [3; 100]);
}

#[test]
fn a_path_that_is_not_a_servers() {
    watched!();
    let folder = Folder::new();
    let name = |path: &Path| path.display().to_string();

    let missing = folder.join("missing");
    says(
        "connect: nothing there",
        is!(connect(&missing), ConnectError::NoSocket { .. }),
        &[&name(&missing), "start the server"],
    );
    let nowhere = folder.join("no folder").join("s");
    says(
        "connect: no folder there",
        is!(connect(&nowhere), ConnectError::NoSocket { .. }),
        &[&name(&nowhere), "start"],
    );

    let file = folder.join("file");
    std::fs::write(&file, "mine").unwrap();
    says(
        "connect: a file",
        is!(connect(&file), ConnectError::NotASocket { .. }),
        &[&name(&file), "not a socket", "correct"],
    );
    let bound = Server::bind(&file, options()).unwrap_err();
    says(
        "bind: a file",
        is!(bound, BindError::Foreign { .. }),
        &[&name(&file), "not a socket", "remove it or choose another"],
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"mine", "it was left alone");
    let bound = Server::bind(folder.path(), options()).unwrap_err();
    says("bind: a folder", is!(bound, BindError::Foreign { .. }), &["not a socket"]);

    let stream = folder.join("stream");
    let other = UnixListener::bind(&stream).unwrap();
    says(
        "connect: a stream socket",
        is!(connect(&stream), ConnectError::ForeignSocket { .. }),
        &[&name(&stream), "another program"],
    );
    let bound = Server::bind(&stream, options()).unwrap_err();
    says("bind: a stream socket", is!(bound, BindError::InUse { .. }), &[&name(&stream), "choose another path"]);
    assert!(stream.exists(), "it was left alone");
    drop(other);

    let dead = folder.join("dead");
    descriptors::leave(&dead);
    says(
        "connect: a dead server's socket",
        is!(connect(&dead), ConnectError::NoServer { .. }),
        &[&name(&dead), "start it again"],
    );
    let host = Host::start(&dead, options());
    works(&dead);
    let bound = Server::bind(&dead, options()).unwrap_err();
    says("bind: twice", is!(bound, BindError::InUse { .. }), &[&name(&dead), "already listens", "choose another path"]);
    works(&dead);
    drop(host);

    let bound = Server::bind(&nowhere, options()).unwrap_err();
    says("bind: no folder", is!(bound, BindError::NoFolder { .. }), &[&name(&nowhere), "create it"]);
    let approached = Successor::approach(&missing).unwrap_err();
    says("succeed: nothing there", approached, &[&name(&missing), "start the server"]);
}

#[test]
fn a_path_that_is_too_long() {
    watched!();
    let folder = Folder::new();
    let long = |len: usize| {
        let rest = len - folder.path().as_os_str().len() - 1;
        folder.join(&"x".repeat(rest))
    };
    let host = Host::start(long(90), options());
    works(&long(90));
    drop(host);
    let error = is!(connect(&long(109)), ConnectError::PathTooLong { .. });
    says("connect: a path of 109 bytes", error, &[&long(109).display().to_string(), "107", "shorter"]);
    let error = is!(Server::bind(long(108), options()).unwrap_err(), BindError::PathTooLong { .. });
    says("bind: a path of 108 bytes", error, &[&long(108).display().to_string(), "90", "shorter"]);
    let error = is!(connect(&folder.join(&"x".repeat(300))), ConnectError::PathTooLong { .. });
    says("connect: a name of 300 bytes", error, &["107", "shorter"]);
    let error = is!(Server::bind(folder.join(&"x".repeat(300)), options()).unwrap_err(), BindError::PathTooLong { .. });
    says("bind: a name of 300 bytes", error, &["90", "shorter"]);
}

const NOBODY: u32 = 65534;

#[test]
fn a_user_who_may_not() {
    watched!();
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, to become somebody else");
        return;
    }
    let folder = Folder::new();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let start = |name: &str, mode: u32, peers: Peers| {
        Host::start(folder.join(name), ServerOptions { mode, peers, ..options() })
    };
    let ask = |what: &str, path: &Path| ask_stranger(what, path, Some(NOBODY));

    let closed = start("closed", 0o600, Peers::Any);
    let Some(said) = ask("connect", &closed.path) else { return };
    says("connect: mode 0600", said, &[&closed.path.display().to_string(), "ServerOptions::mode"]);
    let wary = start("wary", 0o666, Peers::SameUser);
    says(
        "connect: mode 0666, same user only",
        ask("connect", &wary.path).unwrap(),
        &["user 65534", "run as a user it allows"],
    );
    let choosy = start("choosy", 0o666, Peers::Users(vec![1]));
    says("connect: mode 0666, user 1 only", ask("connect", &choosy.path).unwrap(), &["user 65534", "allow this one"]);
    let open = start("open", 0o666, Peers::Any);
    assert_eq!(ask("connect", &open.path).unwrap(), "welcome");
    let chosen = start("chosen", 0o666, Peers::Users(vec![NOBODY]));
    assert_eq!(ask("connect", &chosen.path).unwrap(), "welcome");

    let state = tasuki_call::State::create(8).unwrap();
    let rich = Host::start(
        folder.join("rich"),
        ServerOptions { mode: 0o666, peers: Peers::Any, state: Some(state), ..options() },
    );
    says(
        "succeed: another user's server",
        ask("approach", &rich.path).unwrap(),
        &["another user's", "as the same user"],
    );

    let hidden = folder.join("hidden");
    std::fs::create_dir(&hidden).unwrap();
    std::fs::set_permissions(&hidden, PermissionsExt::from_mode(0o700)).unwrap();
    let inside = Host::start(hidden.join("s"), ServerOptions { mode: 0o666, ..options() });
    let here = inside.path.display().to_string();
    says("connect: in a folder that is closed", ask("connect", &inside.path).unwrap(), &[&here, "may not be opened"]);
    says("bind: in a folder that is closed", ask("bind", &hidden.join("t")).unwrap(), &["may not create", "may write"]);
    says(
        "bind: in a folder that is not ours",
        ask("bind", &folder.join("t")).unwrap(),
        &["may not create", "may write"],
    );
    for host in [&closed, &wary, &choosy, &open, &chosen, &rich, &inside] {
        works(&host.path);
    }
}

// ---- the other end is not a Tasuki process ----------------------------------------------------------------------------

/// Receives one packet. Returns no bytes if the other end has closed the socket.
fn receive(socket: &OwnedFd) -> Vec<u8> {
    let mut bytes = [0; 256];
    let (len, _) = descriptors::receive(socket, &mut bytes).unwrap_or_default();
    bytes[..len].to_vec()
}

fn head(version: u16, kind: u16) -> Vec<u8> {
    [&b"TSK\0"[..], &version.to_le_bytes(), &kind.to_le_bytes()].concat()
}

const RING: u32 = 64;
const POOL: Geometry = Geometry { slot_len: 4096, count: 16 };

fn geometry(geometry: Geometry) -> Vec<u8> {
    [geometry.slot_len.to_le_bytes(), geometry.count.to_le_bytes()].concat()
}

/// Builds a Hello as docs/design/call.md describes it: a client of 64 entries and twice 16 slots.
fn hello(ring: u32, arena: Geometry, replies: Geometry) -> Vec<u8> {
    let mut packet = head(VERSION, 1);
    packet.extend(ring.to_le_bytes());
    packet.extend(geometry(arena));
    packet.extend(geometry(replies));
    packet.extend(0_u32.to_le_bytes());
    packet.extend([0; 17 + 9]);
    packet
}

fn welcome(ring: u32, replies: Geometry) -> Vec<u8> {
    let mut packet = head(VERSION, 3);
    packet.extend(1_u128.to_le_bytes());
    packet.extend(1_u32.to_le_bytes());
    packet.extend(ring.to_le_bytes());
    packet.extend(geometry(replies));
    packet
}

/// Length in bytes of the control memory for 64 entries and 16 slots.
const SEGMENT_LEN: usize = (194 * 64_usize).next_multiple_of(4096) + 64 * 64;

fn memory(len: usize, seals: SealFlags) -> OwnedFd {
    let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
    memory
}

const SEALED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Returns a segment that is correct except for its length.
fn segment(len: usize) -> OwnedFd {
    let region = Region::create("test", len, Pages::Small).unwrap();
    let words = region.span::<tasuki_shm::sync::AtomicU64>(0, 1).unwrap();
    region.seal_writers().unwrap();
    words[0].store(u64::from_be_bytes(*b"TASUKI\0\x01"), std::sync::atomic::Ordering::Relaxed);
    region.fd().try_clone_to_owned().unwrap()
}

/// Returns the error of a real client whose Hello a server answers with this packet.
fn answered_with(bytes: &[u8], fds: &[BorrowedFd<'_>]) -> ConnectError {
    let folder = Folder::new();
    let listener = descriptors::listen(&folder.socket());
    std::thread::scope(|scope| {
        let client = scope.spawn(|| connect(&folder.socket()));
        let socket = rustix::net::accept(&listener).unwrap();
        assert_eq!(receive(&socket)[..8], head(VERSION, 1));
        descriptors::send(&socket, bytes, fds).unwrap();
        client.join().unwrap()
    })
}

#[test]
fn a_server_that_is_of_another_version_or_no_server_at_all() {
    watched!();
    let error = answered_with(&head(7, 3), &[]);
    let error = is!(error, ConnectError::Malformed(Malformed::Version(7)));
    says(
        "connect: a server of version 7",
        error,
        &["version 7", &format!("this program {VERSION}"), "rebuild the older"],
    );

    let refused = [&head(VERSION, 4)[..], &1_u16.to_le_bytes(), &7_u64.to_le_bytes(), &1_u64.to_le_bytes()].concat();
    let error = answered_with(&refused, &[]);
    let error = is!(error, ConnectError::Refused(Refusal::WrongVersion { server: 7, client: 1 }));
    says("connect: refused by a server of version 7", error, &["version 7", "version 1", "rebuild the older"]);

    let refused = [&head(VERSION, 4)[..], &99_u16.to_le_bytes(), &0_u64.to_le_bytes(), &0_u64.to_le_bytes()].concat();
    let error = is!(answered_with(&refused, &[]), ConnectError::Refused(Refusal::Unknown { code: 99 }));
    says("connect: refused for a reason of a later version", error, &["code 99", "rebuild the older"]);

    let error = is!(answered_with(b"HTTP/1.1 400 Bad Request", &[]), ConnectError::Malformed(Malformed::Foreign));
    says("connect: a program that speaks something else", error, &["not a Tasuki call endpoint"]);
    let error = is!(answered_with(&head(VERSION, 3), &[]), ConnectError::Malformed(Malformed::Body(3)));
    says("connect: a welcome that is cut off", error, &["malformed packet of kind 3"]);
    let error = is!(answered_with(&head(VERSION, 77), &[]), ConnectError::Malformed(Malformed::Body(77)));
    says("connect: a packet of no known kind", error, &["kind 77"]);
    let error = is!(answered_with(&welcome(2 * RING, POOL), &[]), ConnectError::NoDescriptors);
    says("connect: a welcome without descriptors", error, &["too few descriptors", "raise RLIMIT_NOFILE"]);
}

#[test]
fn a_server_whose_memory_is_not_what_it_says() {
    watched!();
    let (read, write) = rustix::pipe::pipe().unwrap();
    let welcomed = |ring: u32, segment: &OwnedFd, replies: &OwnedFd| {
        let fds = [segment.as_fd(), replies.as_fd(), write.as_fd(), read.as_fd()];
        answered_with(&welcome(ring, POOL), &fds)
    };
    let arena = memory(POOL.len(), SEALED);
    let error = is!(
        welcomed(RING, &segment(4096), &arena),
        ConnectError::Segment(SegmentError::Memory(RegionError::Truncated { have: 4096, need: SEGMENT_LEN }))
    );
    says(
        "connect: the server's segment is cut off",
        error,
        &["4096 bytes", &SEGMENT_LEN.to_string(), "broken or lies"],
    );
    let unsealed = memory(SEGMENT_LEN, SealFlags::empty());
    let error =
        is!(welcomed(RING, &unsealed, &arena), ConnectError::Segment(SegmentError::Memory(RegionError::Unsealed)));
    says("connect: the server's segment may shrink", error, &["not sealed", "must seal it"]);
    let unguarded = memory(SEGMENT_LEN, SealFlags::SHRINK);
    let error =
        is!(welcomed(RING, &unguarded, &arena), ConnectError::Segment(SegmentError::Memory(RegionError::Unguarded)));
    says("connect: others may come to write the server's segment", error, &["further writers", "must seal it"]);
    let foreign = memory(SEGMENT_LEN, SEALED);
    let error = is!(welcomed(RING, &foreign, &arena), ConnectError::Segment(SegmentError::Foreign { found: 0 }));
    says("connect: the server's segment is something else", error, &["begins with 0x0", "another version"]);
    let file = tempfile::tempfile().unwrap().into();
    let error = is!(welcomed(RING, &file, &arena), ConnectError::Segment(SegmentError::Memory(RegionError::NotMemory)));
    says("connect: the server's segment is a file", error, &["not a sealable memory file", "must pass a memfd"]);
    let error = is!(
        welcomed(RING, &segment(SEGMENT_LEN), &segment(4096)),
        ConnectError::Memory(RegionError::Truncated { have: 4096, need: 65536 })
    );
    says("connect: the server's arena is cut off", error, &["4096 bytes", "65536"]);
    let error = is!(welcomed(2 * RING, &segment(SEGMENT_LEN), &arena), ConnectError::Malformed(Malformed::Body(3)));
    says("connect: a ring of another size than was asked for", error, &["broken or lies"]);
}

#[test]
fn a_server_that_hangs() {
    watched!();
    let folder = Folder::new();
    let listener = descriptors::listen(&folder.socket());
    let limit = Duration::from_millis(50);
    let options = ClientOptions { handshake: limit, ..small() };
    let error = Client::connect(folder.socket(), &options).unwrap_err();
    let error = is!(error, ConnectError::Silent { limit: passed, .. } if *passed <= limit);
    says("connect: nobody answers", error, &[&folder.socket().display().to_string(), "hangs or is overloaded", "ms"]);
    // The server's backlog of 8 is full of clients that gave up.
    for _ in 0..20 {
        is!(Client::connect(folder.socket(), &options).unwrap_err(), ConnectError::Silent { .. });
    }
    drop(listener);
}

#[test]
fn a_server_that_closes_every_connection() {
    watched!();
    let folder = Folder::new();
    let listener = descriptors::listen(&folder.socket());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                drop(rustix::net::accept(&listener));
            }
        });
        let error = is!(connect(&folder.socket()), ConnectError::NoServer { .. });
        says("connect: whoever answers hangs up", error, &["start it again"]);
        let error = Successor::approach(folder.socket()).unwrap_err();
        says("succeed: whoever answers hangs up", error, &["start it again"]);
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        drop(descriptors::connect(&folder.socket()));
    });
}

// ---- the client is not a Tasuki process -------------------------------------------------------------------------------

/// Sends `bytes` as a first packet to a real server. Returns the code of its refusal and the two numbers in it.
fn refusal(path: &Path, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> (u16, u64, u64) {
    let socket = descriptors::connect(path);
    descriptors::send(&socket, bytes, fds).unwrap();
    let answer = receive(&socket);
    assert_eq!(answer.get(..8), Some(&head(VERSION, 4)[..]), "a refusal: {answer:?}");
    let number = |at: usize| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap());
    (u16::from_le_bytes([answer[8], answer[9]]), number(10), number(18))
}

#[test]
fn a_client_that_is_broken_is_refused_and_the_others_are_served() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let path = &host.path;
    let (version, bad_memory) = (1, 8);
    assert_eq!(refusal(path, &head(9, 1), &[]), (version, VERSION.into(), 9));
    assert_eq!(refusal(path, &head(0, 77), &[]), (version, VERSION.into(), 0), "whatever the other version calls it");
    for bytes in [&b"GET / HTTP/1.1"[..], b"x", &head(VERSION, 1), &head(VERSION, 8), &head(VERSION, 9), &[0xff; 200]] {
        assert_eq!(refusal(path, bytes, &[]).0, bad_memory, "{bytes:?}");
    }
    let (fits, arena) = (segment(SEGMENT_LEN), memory(POOL.len(), SEALED));
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let cases: [(&str, &OwnedFd, &OwnedFd); 9] = [
        ("a segment that is cut off", &segment(4096), &arena),
        ("a segment that may shrink", &memory(SEGMENT_LEN, SealFlags::empty()), &arena),
        ("a segment that others may write", &memory(SEGMENT_LEN, SealFlags::SHRINK), &arena),
        ("a segment that is something else", &memory(SEGMENT_LEN, SEALED), &arena),
        ("a segment that is a file", &file, &arena),
        ("a segment that is a socket", &descriptors::pair().0, &arena),
        ("an arena that is cut off", &fits, &memory(POOL.len() - 4096, SEALED)),
        ("an arena that may shrink", &fits, &memory(POOL.len(), SealFlags::empty())),
        ("an arena that is a file", &fits, &file),
    ];
    for (case, segment, arena) in cases {
        let fds = [segment.as_fd(), arena.as_fd()];
        assert_eq!(refusal(path, &hello(RING, POOL, POOL), &fds).0, bad_memory, "{case}");
    }
    assert_eq!(refusal(path, &hello(RING, POOL, POOL), &[fits.as_fd()]).0, bad_memory, "a descriptor is missing");
    assert_eq!(refusal(path, &hello(RING, POOL, POOL), &[]).0, bad_memory, "both are missing");
    says("refusal: any of these", Refusal::BadMemory, &["cannot use the memory", "rebuild both"]);
    assert_eq!(refusal(path, &hello(3, POOL, POOL), &[]).0, 4);
    assert_eq!(refusal(path, &hello(RING, Geometry { slot_len: 5, count: 1 }, POOL), &[]).0, 5);
    // Two arenas of the third size just fit into 64 bits, two of the last do not.
    for (slot_len, count) in [(0, 0), (4095, 1), (0x8000_0000, u32::MAX), (u32::MAX - 4095, u32::MAX)] {
        let odd = Geometry { slot_len, count };
        assert_eq!(refusal(path, &hello(RING, odd, odd), &[]).0, 5, "{odd:?}");
    }
    // More silent connections than the server keeps waiting for.
    let silent: Vec<_> = (0..200).map(|_| descriptors::connect(path)).collect();
    works(path);
    drop(silent);
    assert_eq!(host.with(|server| server.tally().expelled), 0, "none of them ever became a client");
    until("all are gone", || host.with(|server| server.clients()) == 0);
    works(path);
}

// ---- too much of something -----------------------------------------------------------------------------------------------

#[test]
fn options_that_make_no_sense() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let attempt = |options: ClientOptions| Client::connect(&host.path, &options).unwrap_err();
    for ring in [0, 1, 3, 100] {
        let error = is!(attempt(ClientOptions { ring, ..small() }), ConnectError::Options { field: "ring", .. });
        says(
            &format!("connect: a ring of {ring}"),
            error,
            &["ClientOptions::ring", &ring.to_string(), "a power of two, at least 2"],
        );
    }
    for slot_len in [0, 100, 4097] {
        let odd = Geometry { slot_len, count: 4 };
        let error = is!(
            attempt(ClientOptions { arena: odd, ..small() }),
            ConnectError::Options { field: "arena.slot_len", .. }
        );
        says(&format!("connect: slots of {slot_len}"), error, &["ClientOptions::arena", &slot_len.to_string(), "4096"]);
        let error = is!(
            attempt(ClientOptions { replies: odd, ..small() }),
            ConnectError::Options { field: "replies.slot_len", .. }
        );
        says(&format!("connect: reply slots of {slot_len}"), error, &["ClientOptions::replies", &slot_len.to_string()]);
    }
}

#[test]
fn more_than_the_server_allows() {
    watched!();
    let folder = Folder::new();
    let limits = ServerOptions { clients_max: 3, ring_max: 128, arenas_max: 1 << 20, ..options() };
    let host = Host::start(folder.socket(), limits);
    let attempt = |options: ClientOptions| Client::connect(&host.path, &options).unwrap_err();
    let error = is!(
        attempt(ClientOptions { ring: 256, ..small() }),
        ConnectError::Refused(Refusal::RingSize { asked: 256, max: 128 })
    );
    says("connect: too large a ring", error, &["256", "from 2 to 128"]);
    let large = Geometry { slot_len: 4096, count: 250 };
    let error = attempt(ClientOptions { arena: large, ..small() });
    let error = is!(error, ConnectError::Refused(Refusal::ArenaSize { asked: 1_089_536, max: 1_048_576 }));
    says("connect: too large arenas", error, &["1089536", "1048576"]);
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(&host.path, &small()).unwrap()).collect();
    let error = is!(attempt(small()), ConnectError::Refused(Refusal::TooManyClients { max: 3 }));
    says("connect: one client too many", error, &["3 clients", "ServerOptions::clients_max", "close some"]);
    clients.pop();
    until("there is room again", || Client::connect(&host.path, &small()).is_ok());
    for client in &mut clients {
        let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
    }
}

#[test]
fn a_machine_without_memory_or_descriptors() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let said = ask_stranger("with little address space", &host.path, None).unwrap();
    says("connect: no memory", said, &["67108864 bytes", "lack of memory", "ask for less"]);
    for spare in 0..10 {
        let said = ask_stranger(&format!("with {spare} descriptors"), &host.path, None).unwrap();
        match spare {
            0..8 => says(&format!("connect: {spare} descriptors left"), said, &["descriptors", "RLIMIT_NOFILE"]),
            _ => assert_eq!(said, "welcome"),
        }
    }
    works(&host.path);
}

#[test]
fn a_server_without_memory_refuses_and_serves_the_others() {
    watched!();
    let stage = Stage::new(0);
    let server = stage.spawn_until("server", SERVING, &[var("TASUKI_ADDRESSES", 16 << 20)]);
    let mut first = stage.client(&small());
    let pool = Geometry { slot_len: 1 << 20, count: 32 };
    for (case, arena, replies) in [("requests", pool, POOL), ("replies", POOL, pool)] {
        let error = Client::connect(stage.socket(), &ClientOptions { arena, replies, ..small() }).unwrap_err();
        let error = is!(error, ConnectError::Refused(Refusal::NoMemory));
        says(
            &format!("connect: the server has no memory for {case}"),
            error,
            &["the server lacks memory", "raise its limits"],
        );
    }
    let _ = first.call(Ask::new(ECHO, &[1; 100]), ample()).unwrap();
    drop(server);
}

#[test]
fn a_server_without_descriptors_refuses_and_welcomes_again_when_somebody_leaves() {
    watched!();
    for spare in 4..10 {
        let stage = Stage::new(0);
        let server = stage.spawn_until("server", SERVING, &[var("TASUKI_FILES", 13 + spare)]);
        let options = ClientOptions { handshake: Duration::from_millis(100), ..small() };
        let mut clients = Vec::new();
        let error = loop {
            match Client::connect(stage.socket(), &options) {
                Ok(client) => clients.push(client),
                Err(error) => break error,
            }
            assert!(clients.len() < 20, "the limit holds");
        };
        match &error {
            ConnectError::Refused(Refusal::NoMemory) => {
                says(
                    &format!("connect: no descriptors left for client {}", clients.len()),
                    &error,
                    &["descriptors", "RLIMIT_NOFILE"],
                );
            }
            ConnectError::Silent { .. } => says("connect: no descriptor left to accept", &error, &["overloaded"]),
            other => panic!("{other:?}"),
        }
        for client in &mut clients {
            let _ = client.call(Ask::new(ECHO, b"those who are here are served"), ample()).unwrap();
        }
        clients.pop();
        until("there is room again", || Client::connect(stage.socket(), &options).is_ok());
        drop(server);
    }
}

#[test]
fn a_server_without_descriptors_for_the_memory_of_its_first_client_says_so() {
    watched!();
    // It takes five itself. An accepted client takes one, its packet two, its session six.
    for spare in 1..5 {
        let stage = Stage::new(0);
        let _server = stage.spawn_until("server", SERVING, &[var("TASUKI_FILES", 5 + spare)]);
        let error = Client::connect(stage.socket(), &small()).unwrap_err();
        is!(error, ConnectError::Refused(Refusal::NoMemory));
    }
}

/// The kernel does not tell the server the client's process id.
#[test]
fn a_client_of_another_pid_namespace_is_served() {
    watched!();
    let folder = Folder::new();
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--"]).arg(std::env::current_exe().unwrap()).args(CHILD_ROLE);
    command.env("TASUKI_STRANGER", "serve").env("TASUKI_SOCKET", folder.socket()).stdin(Stdio::null());
    let mut server = Program::start(command.stdout(Stdio::null()));
    until("it serves, or cannot start", || folder.socket().exists() || !server.is_running());
    if !folder.socket().exists() {
        return println!("skipped: unshare --pid is refused");
    }
    works(&folder.socket());
    until("it has ended with its client", || !server.is_running());
}

/// A program that waits in an epoll of its own must hear that it is time to accept again.
#[test]
fn a_server_in_another_epoll_is_deaf_for_a_moment_only() {
    watched!();
    if !alone(a_server_in_another_epoll_is_deaf_for_a_moment_only) {
        return;
    }
    let folder = Folder::new();
    let mut server = Server::bind(folder.socket(), options()).unwrap();
    let waiting = descriptors::connect(&folder.socket());
    with_descriptors(0, || {
        assert_eq!(server.turn(Some(Duration::ZERO), |request| drop(request)).unwrap(), Turn::Idle);
        assert!(server.arm());
    });
    drop(waiting);
    let path = folder.socket();
    let client = std::thread::spawn(move || works(&path));
    let board = Board::new();
    let mut worker = Worker::new(&board, None);
    while server.tally().departed == 0 {
        let mut ready = [PollFd::from_borrowed_fd(server.fd(), PollFlags::IN)];
        let patience = rustix::event::Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(rustix::event::poll(&mut ready, Some(&patience)), Ok(1), "an event without another client");
        while let Turn::Served(_) = server.turn(Some(Duration::ZERO), |request| worker.handle(request)).unwrap() {}
        while !server.arm() {
            server.turn(Some(Duration::ZERO), |request| worker.handle(request)).unwrap();
        }
    }
    client.join().unwrap();
}

// ---- two at the same time ---------------------------------------------------------------------------------------------

/// Lets `threads` threads bind the same path at the same time. One of them becomes the server, and clients can
/// reach it.
fn bind_at_once(path: &Path, threads: usize) {
    let barrier = Barrier::new(threads);
    let bound: Vec<_> = std::thread::scope(|scope| {
        let binding: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    Server::bind(path, options())
                })
            })
            .collect();
        binding.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (bound, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
    for error in refused.into_iter().map(Result::unwrap_err) {
        is!(error, BindError::InUse { .. });
    }
    assert_eq!(bound.len(), 1, "one server is at the path");
    let server = bound.into_iter().next().unwrap().unwrap();
    let host = Host::of(server, Worker::new(&Board::new(), None));
    works(path);
    drop(host);
}

#[test]
fn of_many_who_bind_a_path_at_once_one_is_the_server() {
    watched!();
    let folder = Folder::new();
    for round in 0..200 {
        let path = folder.join("s");
        if round % 2 == 0 {
            // A dead server's socket file is in the way of all of them.
            descriptors::leave(&path);
        }
        bind_at_once(&path, 4);
    }
    let left: Vec<PathBuf> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "nothing is left behind: {left:?}");
}
