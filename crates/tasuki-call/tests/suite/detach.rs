//! The detach levels, tested by the fate of a process that touches a slot after it was sent.
//!
//! # Invariants
//!
//! - **X1** A stray pointer points into the client's arena, which stays mapped as long as the client lives.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tasuki_call::{
    Ask, CallError, Client, ClientOptions, ConnectError, Deadline, Deferred, Request, Server, ServerOptions, Ticket,
};
use tasuki_shm::arena::{Detach, Geometry, Slot};

use crate::common::CHILD_ROLE;

const LONG: Duration = Duration::from_secs(30);

/// Answers at once. By then the server has taken every earlier request.
const ECHO: u16 = 1;
/// Keeps the request until a client calls [`LET_GO`].
const KEEP: u16 = 2;
const LET_GO: u16 = 3;

const KIB_4: u32 = 4 << 10;
const KIB_64: u32 = 64 << 10;
const MIB_2: u32 = 2 << 20;

const SIGBUS: i32 = 7;
const SIGSEGV: i32 = 11;

/// Environment variables that tell a child its task.
const ROLE: &str = "TASUKI_DETACH_ROLE";
const PATH: &str = "TASUKI_DETACH_PATH";
const LEVEL: &str = "TASUKI_DETACH_LEVEL";
const SLOT_LEN: &str = "TASUKI_DETACH_SLOT_LEN";

/// Exit code of a child that could not do its part and has said why.
const CANNOT: i32 = 77;

fn level_of(name: &str) -> Detach {
    [Detach::Move, Detach::Guard, Detach::Enforced]
        .into_iter()
        .find(|level| format!("{level:?}") == name)
        .expect("a level")
}

fn options(level: Detach, slot_len: u32) -> ClientOptions {
    let geometry = Geometry { slot_len, count: 2 };
    ClientOptions {
        ring: 8,
        arena: geometry,
        replies: geometry,
        detach: level,
        spin: Some(Duration::ZERO),
        handshake: LONG,
    }
}

/// A server in this process that keeps requests.
struct Keeper {
    server: Server,
    kept: Vec<Deferred>,
}

impl Keeper {
    fn at(path: &Path) -> Self {
        Keeper { server: Server::bind(path, ServerOptions::default()).unwrap(), kept: Vec::new() }
    }

    fn turn(&mut self) {
        let mut let_go = false;
        let kept = &mut self.kept;
        let handler = |request: Request<'_>| match request.method() {
            KEEP => kept.push(request.defer()),
            method => {
                let_go |= method == LET_GO;
                request.reply(b"done").unwrap();
            }
        };
        self.server.turn(Some(Duration::from_millis(5)), handler).unwrap();
        if let_go {
            for deferred in self.kept.drain(..) {
                if let Some(request) = self.server.resume(deferred) {
                    request.reply(b"here it is").unwrap();
                }
            }
        }
    }
}

/// Returns a command that runs this test binary in a role.
fn child(role: &str, path: &Path, level: Detach, slot_len: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    dress(&mut command, role, path, level, slot_len);
    command
}

fn dress(command: &mut Command, role: &str, path: &Path, level: Detach, slot_len: u32) {
    command.args(CHILD_ROLE).stdout(Stdio::piped()).stderr(Stdio::null());
    command.env(ROLE, role).env(PATH, path).env(LEVEL, format!("{level:?}")).env(SLOT_LEN, slot_len.to_string());
}

/// Serves until the child has ended. Returns its exit status and its output.
fn serve_until_it_ends(keeper: &mut Keeper, mut child: Child) -> (ExitStatus, String) {
    let status = loop {
        keeper.turn();
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
    };
    (status, std::io::read_to_string(child.stdout.take().unwrap()).unwrap())
}

/// Returns the fate of a client that plays `role` at `level`. Returns `None`, and prints why, if that level is
/// not available.
fn fate_of(role: &str, level: Detach, slot_len: u32) -> Option<ExitStatus> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let mut keeper = Keeper::at(&path);
    let client = child(role, &path, level, slot_len).spawn().unwrap();
    let (status, said) = serve_until_it_ends(&mut keeper, client);
    if status.code() == Some(CANNOT) {
        let reason = said.lines().find_map(|line| line.strip_prefix("cannot: ")).unwrap_or("no reason given");
        println!("skipped: {reason}");
        return None;
    }
    Some(status)
}

/// Runs a child's role. Does nothing in the suite itself.
pub fn play_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // The test wants a fault, but no core dump.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    let path = std::env::var_os(PATH).unwrap();
    if role == "serve" {
        let mut keeper = Keeper::at(Path::new(&path));
        say("serving");
        loop {
            keeper.turn();
        }
    }
    let level = level_of(&std::env::var(LEVEL).unwrap());
    let slot_len = std::env::var(SLOT_LEN).unwrap().parse().unwrap();
    let mut client = match Client::connect(&path, &options(level, slot_len)) {
        Ok(client) => client,
        Err(error @ (ConnectError::Enforce(_) | ConnectError::Refused(_))) => {
            say(&format!("cannot: {error}"));
            std::process::exit(CANNOT);
        }
        Err(error) => panic!("{error}"),
    };
    play(&role, &mut client);
    std::process::exit(0);
}

fn say(line: &str) {
    println!("\n{line}");
    std::io::stdout().flush().unwrap();
}

fn fill(slot: &mut Slot) {
    slot.bytes_mut().iter_mut().zip((0..=250_u8).cycle()).for_each(|(byte, i)| *byte = i);
}

fn is_filled(slot: &Slot) -> bool {
    slot.bytes().iter().zip((0..=250_u8).cycle()).all(|(byte, i)| *byte == i)
}

/// Sends a full slot, and returns once the server has it. Also returns the slot's old address and length, as a
/// bug would remember them.
fn send_away(client: &mut Client) -> (Ticket, *mut u8, usize) {
    let mut slot = client.take_slot().unwrap();
    fill(&mut slot);
    let (stale, len) = (slot.bytes_mut().as_mut_ptr(), slot.len());
    let ticket = client.submit(Ask::with_slot(KEEP, slot, len)).unwrap();
    client.call(Ask::new(ECHO, b""), Deadline::within(LONG)).unwrap();
    (ticket, stale, len)
}

#[expect(unsafe_code, reason = "the bug that the detach is there to catch")]
fn stray_write(stale: *mut u8) {
    // SAFETY: mapped (X1); the test finds out whether it may be written.
    unsafe { stale.write_volatile(99) };
}

#[expect(unsafe_code, reason = "the bug that the detach is there to catch")]
fn stray_read(stale: *mut u8) -> u8 {
    // SAFETY: mapped (X1); the test finds out whether it may be read.
    unsafe { stale.read_volatile() }
}

fn play(role: &str, client: &mut Client) {
    let (ticket, stale, len) = send_away(client);
    match role {
        "write its first byte" => stray_write(stale),
        "write its last byte" => stray_write(stale.wrapping_add(len - 1)),
        "read it" => assert_eq!(stray_read(stale.wrapping_add(5)), 5),
        "touch its neighbour" => {
            let mut other = client.take_slot().unwrap();
            assert_ne!(other.bytes().as_ptr(), stale.cast_const());
            fill(&mut other);
            assert!(is_filled(&other));
        }
        "wait for it" => {
            client.call(Ask::new(LET_GO, b""), Deadline::within(LONG)).unwrap();
            let reply = client.wait(ticket, Deadline::within(LONG)).unwrap();
            assert_eq!(reply.to_vec(), b"here it is");
            use_again(client, reply.into_returned().unwrap());
        }
        "lose the server" => {
            say("sent");
            let failure = client.wait(ticket, Deadline::within(LONG)).unwrap_err();
            assert!(matches!(failure.why, CallError::ServerGone { .. }), "{failure}");
            use_again(client, failure.slot.expect("the slot is back"));
        }
        other => panic!("no such role: {other}"),
    }
}

/// Checks that a returned slot is unchanged, can be written, and can be sent again.
fn use_again(client: &mut Client, mut slot: Slot) {
    assert!(is_filled(&slot), "whole again after the return");
    slot.bytes_mut().fill(1);
    drop(slot);
    assert_eq!(client.census().free, 2);
    let mut both = [client.take_slot().unwrap(), client.take_slot().unwrap()];
    both.iter_mut().for_each(fill);
    assert!(both.iter().all(is_filled));
}

fn ends_by_signal(role: &str, level: Detach, slot_len: u32, signal: i32) {
    if let Some(status) = fate_of(role, level, slot_len) {
        assert_eq!(status.signal(), Some(signal), "{role}, {level:?}, slots of {slot_len}: {status}");
    }
}

fn ends_well(role: &str, level: Detach, slot_len: u32) {
    if let Some(status) = fate_of(role, level, slot_len) {
        assert!(status.success(), "{role}, {level:?}, slots of {slot_len}: {status}");
    }
}

fn guard_takes_pages_away_and_gives_them_back(slot_len: u32) {
    for role in ["write its first byte", "write its last byte", "read it"] {
        ends_by_signal(role, Detach::Guard, slot_len, SIGSEGV);
    }
    ends_well("touch its neighbour", Detach::Guard, slot_len);
    ends_well("wait for it", Detach::Guard, slot_len);
}

fn enforced_stops_writes_and_no_reads(slot_len: u32) {
    for role in ["write its first byte", "write its last byte"] {
        ends_by_signal(role, Detach::Enforced, slot_len, SIGBUS);
    }
    for role in ["read it", "touch its neighbour", "wait for it"] {
        ends_well(role, Detach::Enforced, slot_len);
    }
}

#[test]
fn guarded_4_kib_slots_fault_on_any_touch_and_are_whole_after_the_return() {
    guard_takes_pages_away_and_gives_them_back(KIB_4);
}

#[test]
fn guarded_64_kib_slots_fault_on_any_touch_and_are_whole_after_the_return() {
    guard_takes_pages_away_and_gives_them_back(KIB_64);
}

#[test]
fn enforced_4_kib_slots_fault_on_a_write_and_are_whole_after_the_return() {
    enforced_stops_writes_and_no_reads(KIB_4);
}

#[test]
fn enforced_64_kib_slots_fault_on_a_write_and_are_whole_after_the_return() {
    enforced_stops_writes_and_no_reads(KIB_64);
}

#[test]
fn moved_slots_are_stopped_by_the_compiler_and_by_nothing_else() {
    for role in ["write its first byte", "read it", "touch its neighbour", "wait for it"] {
        ends_well(role, Detach::Move, KIB_4);
    }
}

/// Raises the machine's pool of huge pages for as long as this value lives.
struct Pool {
    before: u64,
    _alone: MutexGuard<'static, ()>,
}

const POOL: &str = "/proc/sys/vm/nr_hugepages";

impl Pool {
    fn raised() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let read = || std::fs::read_to_string(POOL).ok()?.trim().parse::<u64>().ok();
        let before = read()?;
        let raised = std::fs::write(POOL, (before + 8).to_string()).is_ok();
        let pool = Pool { before, _alone: alone };
        if raised && read()? >= before + 8 {
            return Some(pool);
        }
        println!("skipped: needs root and memory for 8 huge pages (sysctl vm.nr_hugepages={})", before + 8);
        None
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = std::fs::write(POOL, self.before.to_string());
    }
}

/// Returns the page size in bytes of the mapping that contains `address`.
fn page_len_at(address: usize) -> Option<u64> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in smaps.lines() {
        let range = line.split(' ').next().unwrap_or_default().split_once('-');
        let bounds = range
            .and_then(|(from, to)| Some(usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?));
        inside = bounds.map_or(inside, |bounds| bounds.contains(&address));
        if inside && let Some(len) = line.strip_prefix("KernelPageSize:") {
            return len.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10);
        }
    }
    None
}

#[test]
fn slots_of_2_mib_lie_on_huge_pages_and_detach_on_every_level() {
    let Some(_pool) = Pool::raised() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let mut keeper = Keeper::at(&path);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let client = Client::connect(&path, &options(Detach::Move, MIB_2)).unwrap();
            let slot = client.take_slot().unwrap();
            page_len_at(slot.bytes().as_ptr().addr())
        });
        while !client.is_finished() {
            keeper.turn();
        }
        assert_eq!(client.join().unwrap(), Some(MIB_2.into()));
    });
    guard_takes_pages_away_and_gives_them_back(MIB_2);
    enforced_stops_writes_and_no_reads(MIB_2);
}

#[test]
fn the_death_of_the_server_lifts_every_protection() {
    for level in [Detach::Guard, Detach::Enforced] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server");
        let mut server = child("serve", &path, level, KIB_4).spawn().unwrap();
        let heard = |child: &mut Child, word: &str| {
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            lines.map_while(Result::ok).find(|line| line == word || line.starts_with("cannot: "))
        };
        assert_eq!(heard(&mut server, "serving").as_deref(), Some("serving"));
        let mut client = child("lose the server", &path, level, KIB_4).spawn().unwrap();
        let word = heard(&mut client, "sent").unwrap_or_default();
        server.kill().unwrap();
        server.wait().unwrap();
        let status = client.wait().unwrap();
        match word.strip_prefix("cannot: ") {
            Some(reason) => println!("skipped: {reason}"),
            None => assert!(status.success(), "{level:?}: {status}"),
        }
    }
}

/// strace plays a kernel that cannot enforce a detach.
#[test]
fn where_the_kernel_cannot_enforce_a_client_is_told_what_to_do() {
    let missing = |error: std::io::Error| println!("skipped: needs strace ({error})");
    if let Err(error) = Command::new("strace").arg("--version").stdout(Stdio::null()).status() {
        return missing(error);
    }
    for (fault, sentence) in [
        ("userfaultfd:error=ENOSYS", "this kernel gives us no userfaultfd"),
        ("userfaultfd:error=EPERM", "this kernel gives us no userfaultfd"),
        ("ioctl:error=EINVAL", "this kernel cannot write-protect shared memory"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server");
        let mut keeper = Keeper::at(&path);
        let mut command = Command::new("strace");
        let call = fault.split(':').next().unwrap_or_default();
        command.args([
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-e",
            &format!("trace={call}"),
            "-e",
            &format!("inject={fault}"),
        ]);
        command.arg(std::env::current_exe().unwrap());
        dress(&mut command, "read it", &path, Detach::Enforced, KIB_4);
        let (status, said) = serve_until_it_ends(&mut keeper, command.spawn().unwrap());
        if status.code() == Some(1) && said.is_empty() {
            return println!("skipped: needs strace with the right to trace");
        }
        let told = said.lines().find_map(|line| line.strip_prefix("cannot: ")).unwrap_or_default();
        assert_eq!(status.code(), Some(CANNOT), "{fault}: {said}");
        assert!(told.starts_with(sentence) && told.contains("use the detach level guard or move"), "{fault}: {told}");
    }
}
