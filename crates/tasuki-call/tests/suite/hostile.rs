//! Peers that lie: each lie ends the liar's connection with the name of the rule, and no other client notices.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::pipe::PipeFlags;
use tasuki_call::{
    Ask, CallError, Client, ClientOptions, Deadline, Failure, Peers, Request, Server, ServerOptions, Tally,
};
use tasuki_shm::arena::{Detach, Geometry};
use tasuki_shm::slots::Census;

use tasuki_testing::{Dice, alone, until};

use crate::forger::{self, Caller, End, Manners, Memory, Shape};
use crate::forger::{REPLY_BYTES, REPLY_SLOT, REQUEST_BYTES, REQUEST_SLOT, RETURN};

/// Longer than anything here takes, even on a busy machine.
const LONG: Duration = Duration::from_secs(20);

const ECHO: u16 = 1;
/// Answers with a full slot.
const LARGE: u16 = 2;
/// Drops the request without an answer.
const DROP: u16 = 3;

const SHAPE: Shape = Shape { ring: 8, arena: 4, replies: 4 };

const GEOMETRY: Geometry = Geometry { slot_len: forger::SLOT_LEN, count: 4 };

fn options() -> ClientOptions {
    ClientOptions {
        ring: 8,
        arena: GEOMETRY,
        replies: GEOMETRY,
        detach: Detach::Move,
        spin: Some(Duration::ZERO),
        handshake: LONG,
    }
}

fn serve(request: Request<'_>) {
    match request.method() {
        ECHO => {
            let bytes = request.to_vec();
            let _ = request.reply(&bytes);
        }
        LARGE => {
            let _ = request.reply(&[7; 4096]);
        }
        DROP => {}
        other => request.refuse(other.max(1), "no such method"),
    }
}

/// A real server in a thread, and its path.
struct Host {
    path: PathBuf,
    _folder: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<(Tally, Census, Duration)>>,
}

impl Host {
    fn new() -> Self {
        Host::with(ServerOptions::default())
    }

    fn with(options: ServerOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server");
        let mut server = Server::bind(&path, options).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !told.load(Relaxed) {
                server.turn(Some(Duration::from_millis(20)), serve).unwrap();
            }
            let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            let used = Duration::new(used.tv_sec.cast_unsigned(), u32::try_from(used.tv_nsec).unwrap());
            (server.tally(), server.reply_census(), used)
        });
        Host { path, _folder: folder, stop, thread: Some(thread) }
    }

    fn witness(&self) -> Witness {
        Witness(Client::connect(&self.path, &options()).unwrap(), 0)
    }

    /// Stops the server. Returns its totals, the census of its reply slots, and the CPU time that it used.
    fn end(mut self) -> (Tally, Census, Duration) {
        self.stop.store(true, Relaxed);
        self.thread.take().unwrap().join().expect("the server did not panic")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// An honest client that must not notice any lie of another client.
struct Witness(Client, u64);

impl Witness {
    fn testify(&mut self) {
        let Witness(client, count) = self;
        *count += 1;
        let long = vec![count.to_le_bytes()[0]; 1000];
        let inline = client.call(Ask::new(ECHO, &count.to_le_bytes()), Deadline::within(LONG)).unwrap();
        assert_eq!(inline.to_vec(), count.to_le_bytes());
        let slot = client.call(Ask::new(ECHO, &long), Deadline::within(LONG)).unwrap();
        assert_eq!(slot.to_vec(), long);
        let large = client.call(Ask::new(LARGE, &[]), Deadline::within(LONG)).unwrap();
        assert_eq!(large.to_vec(), [7; 4096]);
    }
}

fn forge(path: &Path) -> End {
    Caller::hail(path, SHAPE, 0, None).settle().expect("the server welcomes the forger")
}

/// Makes one honest call by hand, so that the test then fails for the lie and for nothing else.
fn behave(end: &mut End) {
    end.push(REQUEST_BYTES, 5, ECHO, &[77, u64::from_ne_bytes(*b"hello\0\0\0")]);
    end.ring();
    let answer = end.wait_for_message(LONG).expect("an honest call is answered");
    assert_eq!(answer[0] >> 32, u64::from(REPLY_BYTES) | 5 << 8);
    assert_eq!(answer[1..3], [77, u64::from_ne_bytes(*b"hello\0\0\0")]);
}

const RING_RULE: u64 = 1;
const SLOT_RETURNED: u64 = 2;
const SLOT_SENT: u64 = 3;
const NO_MESSAGE: u64 = 4;

fn slot(index: u64, generation: u64) -> u64 {
    generation << 32 | index
}

type Lie<E> = (&'static str, u64, fn(&mut E));

/// The lies of a client, and the verdict on each.
const CLIENT_LIES: &[Lie<End>] = &[
    ("stamp out of turn", RING_RULE, |end| {
        end.push_stamped(u64::from(REQUEST_BYTES) << 32 | 5, &[0]);
    }),
    ("stamp of two laps ago", RING_RULE, |end| {
        end.push_stamped(u64::from(REQUEST_BYTES) << 32 | u64::from(end.tail.wrapping_sub(16)), &[0]);
    }),
    ("stamp with no tag", RING_RULE, |end| end.push_stamped(u64::from(end.tail), &[0])),
    ("head beyond the tail", RING_RULE, |end| {
        end.say_head(1000);
        // The server looks at the head only if it believes the result ring full.
        for call in 0..8 {
            end.push(REQUEST_BYTES, 0, ECHO, &[call]);
        }
    }),
    ("head that goes back", RING_RULE, |end| {
        for call in 0..8 {
            end.push(REQUEST_BYTES, 0, ECHO, &[call]);
        }
        end.ring();
        for _ in 0..8 {
            end.wait_for_message(LONG).unwrap();
        }
        end.say_head(0);
        for call in 0..8 {
            end.push(REQUEST_BYTES, 0, ECHO, &[call]);
        }
    }),
    ("a slot that there is not", SLOT_SENT, |end| end.push(REQUEST_SLOT, 0, ECHO, &[1, slot(4, 0), 1])),
    ("a slot far away", SLOT_SENT, |end| end.push(REQUEST_SLOT, 0, ECHO, &[1, slot(0xffff_ffff, 0), 1])),
    ("more bytes than a slot has", SLOT_SENT, |end| end.push(REQUEST_SLOT, 0, ECHO, &[1, slot(0, 0), 4097])),
    ("all the bytes of the world", SLOT_SENT, |end| end.push(REQUEST_SLOT, 0, ECHO, &[1, slot(0, 0), u64::MAX])),
    ("a slot that is never lent back", SLOT_RETURNED, |end| end.push(RETURN, 0, 0, &[0, slot(0, 0)])),
    ("a return of a slot that there is not", SLOT_RETURNED, |end| end.push(RETURN, 0, 0, &[0, slot(9, 0)])),
    ("a return with another generation", SLOT_RETURNED, |end| {
        end.push(REQUEST_BYTES, 0, LARGE, &[1]);
        end.ring();
        let id = end.wait_for_message(LONG).unwrap()[2];
        end.push(RETURN, 0, 0, &[0, id + (1 << 32)]);
    }),
    ("a return twice", SLOT_RETURNED, |end| {
        end.push(REQUEST_BYTES, 0, LARGE, &[1]);
        end.ring();
        let id = end.wait_for_message(LONG).unwrap()[2];
        end.push(RETURN, 0, 0, &[0, id]);
        end.push(RETURN, 0, 0, &[0, id]);
    }),
    ("a kind that there is not", NO_MESSAGE, |end| end.push(99, 0, ECHO, &[1])),
    ("a reply among the requests", NO_MESSAGE, |end| end.push(REPLY_BYTES, 0, 0, &[1])),
    ("more inline bytes than a line has", NO_MESSAGE, |end| end.push(REQUEST_BYTES, 49, ECHO, &[1])),
];

#[test]
fn every_lie_of_a_client_has_its_verdict_and_nobody_else_notices() {
    let host = Host::new();
    let mut witness = host.witness();
    for (lie, verdict, tell) in CLIENT_LIES {
        let mut end = forge(&host.path);
        behave(&mut end);
        tell(&mut end);
        end.ring();
        assert!(end.hangs_up(LONG), "{lie}: the liar is shut out");
        assert_eq!(end.verdict(), *verdict, "{lie}: the verdict");
        witness.testify();
    }
    drop(witness);
    let (tally, replies, _) = host.end();
    assert_eq!(tally.expelled, CLIENT_LIES.len() as u64);
    assert_eq!(replies.peer, 0, "no reply slot is left with anybody: {replies:?}");
}

/// The handler keeps a slot while the client sends the same slot again.
#[test]
fn a_slot_that_the_server_still_holds_cannot_be_sent_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let mut server = Server::bind(&path, ServerOptions::default()).unwrap();
    let caller = Caller::hail(&path, SHAPE, 0, None);
    let mut kept = Vec::new();
    let mut turn = |server: &mut Server| {
        for _ in 0..10 {
            server.turn(Some(Duration::from_millis(1)), |request| kept.push(request.defer())).unwrap();
        }
    };
    turn(&mut server);
    let mut end = caller.settle().unwrap();
    end.push(REQUEST_SLOT, 0, ECHO, &[1, slot(0, 0), 10]);
    end.push(REQUEST_SLOT, 0, ECHO, &[2, slot(0, 0), 10]);
    end.ring();
    turn(&mut server);
    assert!(end.hangs_up(LONG));
    assert_eq!(end.verdict(), SLOT_SENT);
    assert_eq!(kept.len(), 1, "the second was not served");
    assert!(server.resume(kept.pop().unwrap()).is_none(), "the client of the first is gone");
}

/// Returns a real client connected to a fake server.
fn pair(options: &ClientOptions) -> (Client, End, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let listener = forger::listen(&path);
    let fake = std::thread::spawn(move || {
        forger::welcome_one(listener.as_fd(), Manners { service: 5, generation: 3 }).unwrap()
    });
    let client = Client::connect(&path, options).unwrap();
    (client, fake.join().unwrap(), folder)
}

fn why(failure: Failure) -> String {
    failure.why.to_string()
}

/// A lie of a server while the client has one inline call and one call with a slot in flight, and the client's
/// error text.
type ServerLie = (&'static str, &'static str, fn(&mut End, [u64; 2]));

const SERVER_LIES: &[ServerLie] = &[
    ("stamp out of turn", "ring rule R4", |end, _| end.push_stamped(u64::from(REPLY_BYTES) << 32 | 3, &[0])),
    ("stamp with no tag", "ring rule R4", |end, _| end.push_stamped(9, &[0])),
    ("a call that never was", "is not in flight", |end, _| end.push(REPLY_BYTES, 0, 0, &[6])),
    ("a call of another life", "is not in flight", |end, [one, _]| end.push(REPLY_BYTES, 0, 0, &[one + (1 << 32)])),
    ("a place that there is not", "is not in flight", |end, _| end.push(REPLY_BYTES, 0, 0, &[u64::MAX])),
    ("a result twice", "is not in flight", |end, [one, _]| {
        end.push(REPLY_BYTES, 0, 0, &[one]);
        end.push(REPLY_BYTES, 0, 0, &[one]);
    }),
    ("a result with a slot twice", "is not in flight", |end, [_, two]| {
        end.push(REPLY_BYTES, 0, 0, &[two]);
        end.push(REPLY_SLOT, 0, 0, &[two, slot(0, 0), 0]);
    }),
    ("a slot that there is not", "slot rule S1", |end, [one, _]| end.push(REPLY_SLOT, 0, 0, &[one, slot(4, 0), 1])),
    ("a slot twice", "slot rule S1", |end, [one, two]| {
        end.push(REPLY_SLOT, 0, 0, &[one, slot(1, 0), 1]);
        end.push(REPLY_SLOT, 0, 0, &[two, slot(1, 0), 1]);
    }),
    ("more bytes than a slot has", "slot rule S3", |end, [_, two]| {
        end.push(REPLY_SLOT, 0, 0, &[two, slot(1, 0), 4097]);
    }),
    ("a kind that there is not", "call protocol", |end, [one, _]| end.push(77, 0, 0, &[one])),
    ("a request among the results", "call protocol", |end, [one, _]| end.push(REQUEST_BYTES, 0, 0, &[one])),
    ("more inline bytes than a line has", "call protocol", |end, [one, _]| end.push(REPLY_BYTES, 255, 0, &[one])),
];

#[test]
fn every_lie_of_a_server_is_named_and_every_slot_is_back() {
    for (lie, rule, tell) in SERVER_LIES {
        let (mut client, mut end, _folder) = pair(&options());
        let first = client.submit(Ask::new(ECHO, b"short")).unwrap();
        let second = client.submit(Ask::new(ECHO, &[1; 100])).unwrap();
        let calls = [end.pop().unwrap()[1], end.pop().unwrap()[1]];
        tell(&mut end, calls);
        end.ring();
        let results = [client.wait(first, Deadline::within(LONG)), client.wait(second, Deadline::within(LONG))];
        let said: Vec<_> = results.into_iter().filter_map(Result::err).map(why).collect();
        let named = said.iter().all(|why| why.contains(rule) && why.contains("the connection is closed"));
        let before = client.submit(Ask::new(ECHO, b"again")).map_err(why);
        assert!(named, "{lie}: {said:?}");
        assert!(before.is_err_and(|why| why.contains(rule)), "{lie}: the connection stays closed");
        assert_eq!(client.census().free, 4, "{lie}: every slot is back");
        assert_eq!(client.in_flight(), 0, "{lie}");
    }
}

#[test]
fn a_server_whose_head_is_beyond_our_tail_or_goes_back_broke_r2() {
    for lies in [[1000, 1000], [8, 3]] {
        let (mut client, mut end, _folder) = pair(&options());
        let mut one_call = |lie| {
            end.say_head(lie);
            let outcome = client.call(Ask::new(ECHO, b"x"), Deadline::within(Duration::ZERO));
            while let Some(request) = end.pop() {
                end.push(REPLY_BYTES, 0, 0, &[request[1]]);
            }
            match outcome.map_err(why) {
                Err(why) if why.contains("before the deadline") => Ok(()),
                outcome => outcome.map(drop),
            }
        };
        // The client looks at the head only if it believes its ring of eight full.
        let outcome: Result<(), String> = lies.into_iter().try_for_each(|lie| (0..9).try_for_each(|_| one_call(lie)));
        assert!(outcome.as_ref().is_err_and(|why| why.contains("ring rule R2")), "{lies:?}: {outcome:?}");
        assert_eq!(client.census().free, 4);
    }
}

#[test]
fn an_expelled_client_hears_the_verdict_and_has_its_slots_back() {
    for (code, rule) in [(1, "a ring rule"), (2, "a slot it returned"), (3, "a slot it sent"), (99, "does not know")] {
        let (mut client, end, folder) = pair(&options());
        let ticket = client.submit(Ask::new(ECHO, &[1; 100])).unwrap();
        end.store(forger::VERDICT, code);
        drop(end);
        drop(folder);
        let failure = client.wait(ticket, Deadline::NEVER).unwrap_err();
        assert!(matches!(failure.why, CallError::Expelled(_)), "{failure}");
        assert!(failure.to_string().contains(rule), "{failure}");
        assert!(failure.slot.is_some(), "the request's slot is back, in the failure");
        drop(failure);
        assert_eq!(client.census().free, 4);
    }
}

#[test]
fn a_client_that_does_not_fetch_its_results_holds_up_nobody_and_costs_nothing() {
    let host = Host::new();
    let mut witness = host.witness();
    let mut end = forge(&host.path);
    let before = witness.0.census();
    for call in 0..8 {
        end.push(REQUEST_BYTES, 0, ECHO, &[call]);
    }
    end.ring();
    let until = Instant::now() + LONG;
    while end.their_head() < 8 {
        assert!(Instant::now() < until, "the server takes a ring full");
        std::thread::yield_now();
    }
    // No result was fetched, so the result ring has no entry for the answer to any of these.
    for call in 0..8 {
        end.push(REQUEST_BYTES, 0, ECHO, &[call]);
    }
    end.ring();
    witness.testify();
    std::thread::sleep(Duration::from_millis(300));
    witness.testify();
    assert_eq!(end.their_head(), 8, "nothing was begun that could not be answered");
    // The client now fetches all results.
    for _ in 0..8 {
        end.wait_for_message(LONG).unwrap();
    }
    end.ring();
    for _ in 0..8 {
        end.wait_for_message(LONG).expect("the rest is answered then");
    }
    assert_eq!(witness.0.census(), before);
    let (tally, _, used) = host.end();
    assert_eq!(tally.expelled, 0);
    assert!(
        used < Duration::from_millis(150),
        "the server used the CPU for {used:?}: it spins for somebody who never fetches"
    );
}

/// The silent connections take all descriptors of the server. The limit applies to the process.
#[test]
fn callers_who_say_nothing_keep_nobody_out_even_if_descriptors_run_out() {
    if !alone(callers_who_say_nothing_keep_nobody_out_even_if_descriptors_run_out) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    // Connect the callers first, since they count against the limit too. The server then has 30 descriptors
    // left.
    let mut server = Server::bind(&path, ServerOptions::default()).unwrap();
    let silent: Vec<_> = (0..100).map(|_| forger::dial(&path)).collect();
    // The limit applies to descriptor numbers, and a new descriptor gets the lowest free number.
    let next = std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64;
    let limit = rustix::process::Rlimit { current: Some(next + 30), maximum: Some(next + 30) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    for _ in 0..200 {
        server.turn(Some(Duration::from_micros(100)), serve).unwrap();
    }
    drop(silent);
    let caller = Caller::hail(&path, SHAPE, 0, None);
    let heard = std::thread::spawn(|| caller.settle().is_some());
    until("the server listens again", || {
        server.turn(Some(Duration::from_millis(10)), serve).unwrap();
        heard.is_finished()
    });
    assert!(heard.join().unwrap(), "it is welcome");
}

/// The server maps the announced length and not the whole memory: 100 TiB several times over would not fit into
/// an address space.
#[test]
fn memory_without_end_uses_up_nobody_elses_address_space() {
    let host = Host::new();
    let mut witness = host.witness();
    let mut giants = Vec::new();
    for _ in 0..4 {
        let socket = forger::dial(&host.path);
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let giant = rustix::fs::memfd_create("giant", flags).unwrap();
        rustix::fs::ftruncate(&giant, 100 << 40).unwrap();
        rustix::io::pwrite(&giant, &forger::SEGMENT_MAGIC.to_ne_bytes(), 0).unwrap();
        let seals = rustix::fs::SealFlags::all() - rustix::fs::SealFlags::WRITE - rustix::fs::SealFlags::SEAL;
        for seal in [rustix::fs::SealFlags::SHRINK, rustix::fs::SealFlags::GROW, rustix::fs::SealFlags::FUTURE_WRITE] {
            assert!(seals.contains(seal));
            rustix::fs::fcntl_add_seals(&giant, seal).unwrap();
        }
        forger::send(socket.as_fd(), &forger::hello(SHAPE, 0, None, None), &[giant.as_fd(), giant.as_fd()]).unwrap();
        let (answer, fds) = forger::receive(socket.as_fd()).unwrap();
        assert!(answer.starts_with(&forger::packet(3)), "it is as good a client as any");
        giants.push((giant, fds));
    }
    witness.testify();
    host.witness().testify();
}

#[test]
fn memory_that_could_shrink_or_be_punched_is_refused() {
    let host = Host::new();
    for seals in [rustix::fs::SealFlags::empty(), rustix::fs::SealFlags::SHRINK] {
        let socket = forger::dial(&host.path);
        let memory = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
        rustix::io::pwrite(&memory, &forger::SEGMENT_MAGIC.to_ne_bytes(), 0).unwrap();
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        let hello = forger::hello(SHAPE, 0, None, None);
        forger::send(socket.as_fd(), &hello, &[memory.as_fd(), memory.as_fd()]).unwrap();
        let (answer, _) = forger::receive(socket.as_fd()).unwrap();
        assert_eq!(answer[..10], [&forger::packet(4)[..], &8_u16.to_le_bytes()].concat(), "refused for its memory");
    }
    host.witness().testify();
}

/// Returns descriptors that a server may pass for the bell: full, blocking, or not a pipe at all.
fn bad_bells(folder: &Path) -> Vec<(&'static str, OwnedFd, OwnedFd)> {
    let blocking = |fd: &OwnedFd| rustix::fs::fcntl_setfl(fd, OFlags::empty()).unwrap();
    let fill = |fd: &OwnedFd| {
        rustix::io::ioctl_fionbio(fd, true).unwrap();
        while rustix::io::write(fd, &[0; 4096]).is_ok() {}
        while rustix::io::write(fd, &[0; 1]).is_ok() {}
        rustix::io::ioctl_fionbio(fd, false).unwrap();
    };
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    fill(&write);
    blocking(&read);
    let pipe = ("a pipe", write, read);

    let fifo = folder.join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    let open = |flags| rustix::fs::open(&fifo, flags, rustix::fs::Mode::empty()).unwrap();
    let (read, write) = (open(OFlags::RDONLY | OFlags::NONBLOCK), open(OFlags::WRONLY));
    fill(&write);
    blocking(&read);
    let named = ("a named pipe", write, read);

    let (write, read) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    fill(&write);
    let socket = ("a socket", write, read);

    let event = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let (full, empty) = (event(), event());
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    vec![pipe, named, socket, ("an eventfd", full, empty)]
}

#[test]
fn a_server_whose_bell_is_full_and_blocking_does_not_block_its_client() {
    let bells = tempfile::tempdir().unwrap();
    for (what, ring_end, sleep_end) in bad_bells(bells.path()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server");
        let listener = forger::listen(&path);
        let fake = std::thread::spawn(move || {
            let socket = forger::accept(listener.as_fd()).unwrap();
            let (hello, fds) = forger::receive(socket.as_fd()).unwrap();
            let (shape, _) = forger::read_hello(&hello).unwrap();
            let ours = Memory::segment(shape.ring, shape.replies);
            let arena = Memory::new(shape.replies as usize * 4096);
            // The fake server claims to sleep, so the client rings.
            ours.words[forger::BELL].store(1 << 32 | 2, Relaxed);
            let given = [ours.region.as_fd(), arena.region.as_fd(), ring_end.as_fd(), sleep_end.as_fd()];
            forger::send(socket.as_fd(), &forger::welcome(shape, 5, 3), &given).unwrap();
            (ours, arena, fds, ring_end, sleep_end)
        });
        let start = Instant::now();
        match Client::connect(&path, &options()) {
            Ok(mut client) => {
                let (ours, ..) = fake.join().unwrap();
                for naps in 2..5_u64 {
                    let failure = client
                        .call(Ask::new(ECHO, b"x"), Deadline::within(Duration::from_millis(20)))
                        .expect_err("nobody answers");
                    assert!(!matches!(failure.why, CallError::Refused(_)), "{what}: {failure}");
                    ours.words[forger::BELL].store(naps << 32 | 2, Relaxed);
                }
                let _ = client.arm();
                client.woken();
            }
            // Just as good: the client refuses such a bell.
            Err(error) => println!("{what}: {error}"),
        }
        assert!(start.elapsed() < LONG, "{what}: the client was held up for {:?}", start.elapsed());
    }
}

/// The client's end of the bell is full because the client never empties it, and the server rings for every
/// answer.
#[test]
fn a_client_that_never_empties_its_bell_does_not_block_the_server() {
    let host = Host::new();
    let mut witness = host.witness();
    let mut end = forge(&host.path);
    // Reopening the read end of a pipe gives its write end.
    let again = format!("/proc/self/fd/{}", end.sleep_end.as_raw_fd());
    let their_end = rustix::fs::open(&again, OFlags::WRONLY | OFlags::NONBLOCK, rustix::fs::Mode::empty()).unwrap();
    for full in [&their_end, &end.ring_end] {
        while rustix::io::write(full, &[0; 4096]).is_ok() {}
        while rustix::io::write(full, &[0; 1]).is_ok() {}
        rustix::fs::fcntl_setfl(full, OFlags::empty()).unwrap();
    }
    for naps in 1..=100 {
        // The client claims to sleep, so the server rings, into the full pipe, for every answer.
        end.say_state(2, naps);
        end.push(REQUEST_BYTES, 0, ECHO, &[0]);
        if end.wait_for_message(Duration::from_millis(50)).is_none() {
            // The server sleeps, and our own bell is full. It hears nothing more from us, by our own fault.
            break;
        }
    }
    witness.testify();
    drop(end);
    witness.testify();
    let (tally, ..) = host.end();
    assert_eq!(tally.expelled, 0);
}

#[test]
fn a_server_that_rings_for_nothing_does_not_prolong_a_wait() {
    let (mut client, end, _folder) = pair(&options());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                end.ring();
            }
        });
        let start = Instant::now();
        for _ in 0..5 {
            let outcome = client.call(Ask::new(ECHO, b"x"), Deadline::within(Duration::from_millis(20)));
            let late = start.elapsed() > LONG;
            if late || outcome.as_ref().is_ok_and(|_| true) {
                stop.store(true, Relaxed);
            }
            assert!(matches!(outcome.unwrap_err().why, CallError::DeadlinePassed));
        }
        stop.store(true, Relaxed);
    });
}

#[test]
fn a_server_that_dies_and_comes_back_without_end_does_not_prolong_a_wait() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let listener = forger::listen(&path);
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let fake = std::thread::spawn(move || {
        while !told.load(Relaxed) {
            // Welcome the client, then hang up.
            drop(forger::welcome_one(listener.as_fd(), Manners { service: 5, generation: 3 }));
        }
    });
    let mut client = Client::connect(&path, &options()).unwrap();
    let (done, finished) = std::sync::mpsc::channel();
    let caller = std::thread::spawn(move || {
        let ask = Ask::new(ECHO, &[1; 100]).idempotent();
        let outcome = client.call(ask, Deadline::within(Duration::from_millis(100))).map(drop).map_err(why);
        let _ = done.send(outcome);
    });
    let outcome = finished.recv_timeout(LONG).expect("the wait ends");
    assert!(outcome.is_err(), "{outcome:?}");
    stop.store(true, Relaxed);
    let _ = forger::dial(&path);
    caller.join().unwrap();
    fake.join().unwrap();
}

/// Found by the fuzz target `hostile_server`: no call waited, so the client never saw the end of the pipe.
#[test]
fn a_client_that_gave_up_all_its_calls_learns_of_the_death_of_its_server() {
    let (mut client, end, folder) = pair(&options());
    for _ in 0..8 {
        let ticket = client.submit(Ask::new(ECHO, b"never mind")).unwrap();
        client.abandon(ticket);
    }
    assert!(matches!(client.submit(Ask::new(ECHO, b"x")).unwrap_err().why, CallError::Full { .. }));
    drop(end);
    drop(folder);
    let until = Instant::now() + LONG;
    while !matches!(client.submit(Ask::new(ECHO, b"x")).unwrap_err().why, CallError::ServerGone { .. }) {
        assert!(Instant::now() < until, "it takes the server for busy");
    }
    assert_eq!(client.in_flight(), 0);
}

/// Returns a number that a liar would choose: near zero, near a power of two, near the top, or any.
fn lie(dice: &mut Dice) -> u64 {
    match dice.below(4) {
        0 => dice.below(10) as u64,
        1 => (1 << dice.below(64)) + dice.below(3) as u64,
        2 => u64::MAX - dice.below(3) as u64,
        _ => dice.next(),
    }
}

fn byte(dice: &mut Dice) -> u8 {
    dice.next().to_le_bytes()[5]
}

/// Does one hostile act, at either end.
fn misbehave(end: &mut End, dice: &mut Dice, kinds: [u8; 3]) {
    match dice.below(10) {
        0 => end.store(dice.below(100_000), lie(dice)),
        1 => end.say_head(lie(dice)),
        2 => end.say_state(byte(dice), byte(dice).into()),
        3 | 4 => end.ring(),
        5 => {
            end.push_stamped(lie(dice), &[lie(dice), lie(dice), lie(dice)]);
        }
        6 => match end.pop() {
            Some(request) if kinds[0] == REPLY_BYTES => end.push(REPLY_BYTES, 0, 0, &request[1..2]),
            _ => {}
        },
        7 => {
            let ring = end.ring_words();
            end.store(ring.start + dice.below(ring.len()), lie(dice));
        }
        // A message that looks plausible.
        _ => {
            let kind = *dice.pick(&kinds);
            let id = slot(dice.below(5) as u64, dice.below(3) as u64);
            end.push(
                kind,
                byte(dice) % 60,
                u16::from(byte(dice) % 4),
                &[dice.below(9) as u64, id, dice.below(5000) as u64],
            );
        }
    }
}

#[test]
fn a_client_that_scribbles_over_its_memory_is_shut_out_and_a_witness_notices_nothing() {
    let host = Host::with(ServerOptions { peers: Peers::Any, ..ServerOptions::default() });
    let mut seeds = Dice::new("a_client_that_scribbles");
    let over = Instant::now() + Duration::from_secs(1);
    let scribbler = |seed: u64| {
        let path = host.path.clone();
        std::thread::spawn(move || {
            let mut dice = Dice::of(seed);
            let mut lives = 0_u64;
            while Instant::now() < over {
                let mut end = forge(&path);
                lives += 1;
                // Goes on at least once after the server has hung up.
                while Instant::now() < over && !end.hangs_up(Duration::ZERO) {
                    for _ in 0..=dice.below(60) {
                        misbehave(&mut end, &mut dice, [REQUEST_BYTES, REQUEST_SLOT, RETURN]);
                    }
                }
            }
            lives
        })
    };
    let scribblers = [scribbler(seeds.next()), scribbler(seeds.next())];
    let mut witness = host.witness();
    while Instant::now() < over {
        witness.testify();
    }
    let lives: u64 = scribblers.map(|scribbler| scribbler.join().unwrap()).iter().sum();
    witness.testify();
    assert_eq!(witness.0.census().free, 4);
    let testified = witness.1;
    drop(witness);
    let (tally, ..) = host.end();
    println!("{lives} lives of scribblers, {} expelled, {testified} testimonies", tally.expelled);
    assert!(tally.expelled > 0);
}

#[test]
fn a_server_that_scribbles_over_its_memory_gets_errors_named_and_no_slot() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let listener = forger::listen(&path);
    let mut dice = Dice::new("a_server_that_scribbles");
    let seed = dice.next();
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let fake = std::thread::spawn(move || {
        let mut dice = Dice::of(seed);
        let mut end: Option<End> = None;
        rustix::io::ioctl_fionbio(&listener, true).unwrap();
        while !told.load(Relaxed) {
            let fresh = forger::welcome_one(listener.as_fd(), Manners { service: 5, generation: 3 });
            end = fresh.or(end);
            let Some(end) = &mut end else { continue };
            // Some of its lives begin honestly.
            while dice.below(3) > 0
                && let Some(request) = end.pop()
            {
                end.push(REPLY_BYTES, 0, 0, &request[1..2]);
                end.ring();
            }
            for _ in 0..dice.below(8) {
                misbehave(end, &mut dice, [REPLY_BYTES, REPLY_SLOT, REPLY_BYTES]);
            }
        }
    });
    let over = Instant::now() + Duration::from_secs(1);
    // The fake server also scribbles over the first word of its memory; then the client refuses that memory.
    let mut client = loop {
        match Client::connect(&path, &options()) {
            Ok(client) => break client,
            Err(error) => assert!(Instant::now() < over, "{error}"),
        }
    };
    let calls = AtomicU64::new(0);
    let mut said = std::collections::BTreeMap::<String, u64>::new();
    let mut kept = Vec::new();
    let note = |failure: Failure, said: &mut std::collections::BTreeMap<String, u64>| {
        let name = format!("{:?}", failure.why).split([' ', '(', '{']).next().unwrap_or_default().to_owned();
        if name == "Broken" {
            let why = failure.to_string();
            assert!(why.contains("rule") || why.contains("protocol"), "{why}");
        }
        *said.entry(name).or_default() += 1;
    };
    while Instant::now() < over {
        calls.fetch_add(1, Relaxed);
        let bytes = vec![3; dice.below(100)];
        match client.submit(Ask::new(ECHO, &bytes)) {
            Ok(ticket) if dice.below(4) == 0 => client.abandon(ticket),
            Ok(ticket) if dice.below(3) == 0 => match client.poll(&ticket) {
                Ok(_) => client.abandon(ticket),
                Err(failure) => note(failure, &mut said),
            },
            Ok(ticket) => match client.wait(ticket, Deadline::within(Duration::from_micros(300))) {
                Ok(reply) => {
                    assert!(reply.to_vec().len() <= 4096);
                    *said.entry("Reply".to_owned()).or_default() += 1;
                    if dice.below(2) == 0 && kept.len() < 3 {
                        kept.push(reply);
                    }
                }
                Err(failure) => note(failure, &mut said),
            },
            Err(failure) => {
                let ended =
                    matches!(failure.why, CallError::Broken(_) | CallError::ServerGone { .. } | CallError::Expelled(_));
                note(failure, &mut said);
                if ended {
                    kept.clear();
                    while client.reconnect().is_err() && Instant::now() < over {}
                }
            }
        }
    }
    stop.store(true, Relaxed);
    fake.join().unwrap();
    println!("{} calls: {said:?}", calls.load(Relaxed));
    drop(kept);
    // The fake server is gone for good: every call in flight fails, and its slot is back.
    let _ = client.call(Ask::new(ECHO, b"last"), Deadline::within(Duration::from_millis(200)));
    let _ = client.call(Ask::new(ECHO, b"last"), Deadline::within(Duration::from_millis(200)));
    assert_eq!(client.census().free, 4, "{:?}", client.census());
    assert!(said.contains_key("Broken"), "{said:?}");
}
