//! The spinning path makes no allocation and no system call: an allocator and strace count them.
//!
//! # Invariants
//!
//! - **C1** The counting allocator passes every request unchanged to the system's allocator; counting itself
//!   allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use tasuki_call::{Ask, Client, ClientOptions, Request, Server, ServerOptions};
use tasuki_shm::arena::Geometry;

use crate::common::{CHILD_ROLE, ample};

/// Number of calls between the two marks.
const CALLS: u32 = 10_000;

/// Number of calls before the first mark: enough to fill the rings once, touch all pages and grow all tables.
const WARM_UP: u32 = 2_000;

/// Longer than any wait here, even on a machine that stands still meanwhile, so neither end ever parks.
const SPIN: Duration = Duration::from_secs(600);

const ROLE: &str = "TASUKI_SPIN_ROLE";
const PATH: &str = "TASUKI_SPIN_PATH";

const ECHO: u16 = 1;
/// Answers with the number of allocations of the server's thread.
const ALLOCATIONS: u16 = 2;
const STOP: u16 = 3;
/// Answers with the sum of the request's words. Request and answer each travel in a slot.
const SUM: u16 = 4;
/// Makes the server call the kernel, so that its trace shows where the measurement begins or ends.
const MARK: u16 = 5;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

#[expect(unsafe_code, reason = "an allocator that counts, per thread")]
// SAFETY: passes every request to the system's allocator, which keeps the contract (C1).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: passes on the caller's promise (C1).
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: passes on the caller's promise (C1).
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn pin(cpu: usize) {
    let mut one = CpuSet::new();
    one.set(cpu);
    rustix::thread::sched_setaffinity(None, &one).unwrap();
}

/// Returns two CPUs that this process may use.
fn two_cpus() -> Option<[usize; 2]> {
    let may = rustix::thread::sched_getaffinity(None).unwrap();
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| may.is_set(cpu));
    let two = [cpus.next()?, cpus.next()?];
    Some(two)
}

/// Marks a place in the trace of this process.
fn mark() {
    let _ = rustix::process::getppid();
}

fn answer(request: Request<'_>, stop: &mut bool) {
    match request.method() {
        ECHO => {
            let mut bytes = [0; 48];
            let len = request.copy_to(&mut bytes);
            request.reply(&bytes[..len]).unwrap();
        }
        ALLOCATIONS => request.reply(&COUNT.get().to_le_bytes()).unwrap(),
        SUM => {
            let sum = request.slot().unwrap().words().fold(0, u64::wrapping_add);
            let mut slot = request.take_slot().unwrap();
            slot.bytes_mut()[..8].copy_from_slice(&sum.to_le_bytes());
            request.reply_slot(slot, 64);
        }
        MARK => {
            mark();
            request.reply(&[]).unwrap();
        }
        _ => {
            *stop = true;
            request.reply(&[]).unwrap();
        }
    }
}

fn serve(path: &Path) {
    let mut server = Server::bind(path, ServerOptions { spin: Some(SPIN), ..ServerOptions::default() }).unwrap();
    let mut stop = false;
    while !stop {
        server.turn(None, |request| answer(request, &mut stop)).unwrap();
    }
}

fn connect(path: &Path) -> Client {
    let until = Instant::now() + Duration::from_secs(20);
    let pool = Geometry { slot_len: 4096, count: 16 };
    let options = ClientOptions { ring: 64, arena: pool, replies: pool, spin: Some(SPIN), ..ClientOptions::default() };
    loop {
        match Client::connect(path, &options) {
            Ok(client) => return client,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn ask(client: &mut Client, method: u16) -> u64 {
    let reply = client.call(Ask::new(method, &[]), ample()).unwrap();
    reply.inline().and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Makes the calls to measure: small ones, then ones with a slot each way.
fn call_often(client: &mut Client, times: u32) {
    for i in 0..times {
        let reply = client.call(Ask::new(ECHO, &[7; 48]), ample()).unwrap();
        assert_eq!(reply.inline(), Some(&[7; 48][..]), "call {i}");
    }
    for i in 0..times {
        let mut slot = client.take_slot().unwrap();
        slot.bytes_mut()[..8].copy_from_slice(&u64::from(i).to_le_bytes());
        let reply = client.call(Ask::with_slot(SUM, slot, 8), ample()).unwrap();
        assert_eq!(reply.slot().unwrap().words().next(), Some(u64::from(i)));
    }
}

/// Keeps several calls in flight, as many as it can without a vector for the tickets.
fn pipeline_often(client: &mut Client, times: u32) {
    for _ in 0..times / 4 {
        let tickets = [(); 4].map(|()| client.stage(Ask::new(ECHO, &[9; 48])).unwrap());
        client.flush();
        for ticket in tickets {
            assert_eq!(client.wait(ticket, ample()).unwrap().len(), 48);
        }
    }
}

#[test]
fn ten_thousand_calls_allocate_nothing_on_either_side() {
    let Some([here, there]) = two_cpus() else { return println!("skipped: needs two CPUs") };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let at = path.clone();
    let server = std::thread::spawn(move || {
        pin(there);
        serve(&at);
    });
    // Not the test's own thread: with one thread, other tests run in it later.
    let client = std::thread::spawn(move || {
        pin(here);
        let mut client = connect(&path);
        call_often(&mut client, WARM_UP);
        pipeline_often(&mut client, WARM_UP);
        let before = (COUNT.get(), ask(&mut client, ALLOCATIONS));
        call_often(&mut client, CALLS);
        pipeline_often(&mut client, CALLS);
        let after = (COUNT.get(), ask(&mut client, ALLOCATIONS));
        ask(&mut client, STOP);
        (before, after)
    });
    let (before, after) = client.join().unwrap();
    server.join().unwrap();
    assert!(before.0 > 0 && before.1 > 0, "the allocator counts");
    assert_eq!(after.0 - before.0, 0, "allocations of the client");
    assert_eq!(after.1 - before.1, 0, "allocations of the server");
}

/// Runs a child's role. Does nothing in the suite itself.
pub fn play_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let path = PathBuf::from(std::env::var_os(PATH).unwrap());
    let [here, there] = two_cpus().unwrap();
    if role == "server" {
        pin(there);
        serve(&path);
    } else {
        pin(here);
        let mut client = connect(&path);
        call_often(&mut client, WARM_UP);
        ask(&mut client, MARK);
        let start = Instant::now();
        mark();
        call_often(&mut client, CALLS);
        mark();
        let took = start.elapsed();
        ask(&mut client, MARK);
        ask(&mut client, STOP);
        println!("\ntook {}", took.as_micros());
    }
}

/// Returns a command that runs this test binary in a role, traced by strace into `trace`.
fn traced(role: &str, path: &Path, trace: &Path) -> Command {
    let mut command = Command::new("strace");
    command.arg("-f").arg("-qq").arg("-o").arg(trace).arg(std::env::current_exe().unwrap());
    command.args(CHILD_ROLE).env(ROLE, role).env(PATH, path);
    command.stdout(Stdio::piped());
    command
}

/// Returns the system calls between the two marks, made by the thread that made the marks: one `PID
/// name(arguments) = result` a line.
fn between_marks(trace: &str) -> Vec<&str> {
    let thread = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let marker = trace.lines().find(|line| line.contains("getppid(")).and_then(thread).expect("a mark");
    let ours = trace.lines().filter(|line| thread(line).as_ref() == Some(&marker));
    let mut parts = ours.skip_while(|line| !line.contains("getppid(")).skip(1);
    let between: Vec<_> = parts.by_ref().take_while(|line| !line.contains("getppid(")).collect();
    between
}

#[test]
fn ten_thousand_calls_make_no_system_call_and_the_server_only_looks_at_its_doorbells() {
    if two_cpus().is_none() {
        return println!("skipped: needs two CPUs");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let works = Command::new("strace").args(["-o", "/dev/null", "true"]).status();
    if !works.is_ok_and(|status| status.success()) {
        return println!("skipped: needs strace, and the right to trace (apt-get install strace)");
    }
    let path = file("server");
    let mut server = traced("server", &path, &file("server.trace")).spawn().unwrap();
    let client = traced("client", &path, &file("client.trace")).output().unwrap();
    let said = String::from_utf8_lossy(&client.stdout).into_owned();
    if !client.status.success() {
        let _ = server.kill();
        panic!("the client failed: {said}{}", String::from_utf8_lossy(&client.stderr));
    }
    assert!(server.wait().unwrap().success());
    let took: u64 = said.lines().find_map(|line| line.strip_prefix("took ")?.parse().ok()).expect("how long");

    let trace = std::fs::read_to_string(file("client.trace")).unwrap();
    // A client that waits longer than a millisecond (because the server was preempted) checks whether the server
    // is still there.
    let (looks, clients): (Vec<_>, Vec<_>) =
        between_marks(&trace).into_iter().partition(|line| line.contains("epoll_"));
    let due = usize::try_from(took / 1000).unwrap();
    let asked = looks.len();
    assert!(asked <= due, "{asked} looks of the client for the server's death in {took} µs");
    assert!(clients.is_empty(), "{} system calls of the client: {:?}", clients.len(), &clients[..clients.len().min(5)]);

    let trace = std::fs::read_to_string(file("server.trace")).unwrap();
    let servers = between_marks(&trace);
    let others: Vec<_> = servers.iter().filter(|line| !line.contains("epoll_")).collect();
    assert!(others.is_empty(), "other system calls of the server: {others:?}");
    // One look every 100 µs while it spins. The marks lie outside the timed part, so a few more.
    let due = took / 100 + 20;
    let looks = servers.len() as u64;
    println!("{} calls in {took} µs: the client made {asked} system calls, the server {looks}", 2 * CALLS);
    assert!(looks <= due, "{looks} looks at the doorbells where {due} are due");
}
