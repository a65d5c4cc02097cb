//! A worker without a card: the real state machine of a worker, on the real socket and the real lease page. It
//! drives only its heartbeat.
//!
//! It exists for faults that no honest worker has.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tasuki_control::channel::{self, Nothing};
use tasuki_control::supervisor::card::LeasePage;
use tasuki_control::supervisor::now;
use tasuki_control::supervisor::worker::Words;
use tasuki_relay::message::{
    self, Can, DeviceBundle, MESSAGE_MAX, PROTOCOL_VERSION, ToDaemon, ToWorker, heartbeat, lease_page, program_state,
};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Plan, Reason, Report};
use tasuki_relay::worker::{Do, Input, Tables, Worker};
use tasuki_relay::{Party, Tenure};

use super::fuzz::{self, Act};

/// Orders from the script that starts the stand-in.
#[derive(Debug)]
pub struct Orders {
    /// Arguments from the daemon.
    words: Vec<String>,
    /// Fault to show.
    fault: String,
    /// File that exists as long as the test runs; the stand-in ends with it.
    alive: PathBuf,
}

/// Reads the orders of this process.
pub fn orders() -> Option<Orders> {
    let words = std::env::var("TASUKI_STANDIN").ok()?;
    let fault = std::env::var("TASUKI_FAULT").unwrap_or_default();
    let alive = std::env::var_os("TASUKI_ALIVE")?.into();
    Some(Orders { words: words.split_whitespace().map(str::to_owned).collect(), fault, alive })
}

struct Nic {
    name: String,
    machine: Worker,
    lease_page: LeasePage,
    bundle: DeviceBundle,
    fds: Vec<OwnedFd>,
    looks: bool,
    plan: Option<Plan>,
}

struct Standin {
    fault: String,
    /// File with messages to send and words to write, used once.
    attack: PathBuf,
    party: u32,
    node: String,
    socket: OwnedFd,
    heartbeat: Words,
    listener: OwnedFd,
    nics: BTreeMap<u32, Nic>,
    program_state: Words,
    /// Other nodes of its VNI by number, with the descriptors received of them.
    neighbours: BTreeMap<u16, Vec<OwnedFd>>,
    tables: Tables,
    /// Whether its daemon is gone.
    alone: bool,
}

/// Exits if its test is over.
fn leave_if_over(alive: &std::path::Path) {
    if !alive.exists() {
        std::process::exit(0);
    }
}

fn wait_for_ever(alive: &std::path::Path) -> ! {
    loop {
        leave_if_over(alive);
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Parses a report in a line of an attack.
fn report(said: &str, epoch: u32) -> Report {
    let reason = Reason::CardGone;
    match said {
        "ready" => Report::Ready,
        "unfit" => Report::Unfit(reason),
        "released" => Report::Released { epoch },
        "kept" => Report::Kept { epoch, reason },
        "taken" => Report::Taken { epoch },
        "lost" => Report::Lost { epoch, ready: true },
        "failed" => Report::Failed { epoch, reason },
        "replaced" => Report::Replaced { epoch },
        _ => panic!("{said}"),
    }
}

/// Waits at most `limit` for input.
fn wait(fd: &OwnedFd, limit: Duration) {
    let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&limit));
}

/// Runs the stand-in; never returns.
pub fn run(orders: &Orders) -> ! {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    match orders.words.first().map(String::as_str) {
        Some("open") => open(orders, &socket),
        Some("worker") => work(orders, socket),
        _ => panic!("{orders:?}"),
    }
}

fn open(orders: &Orders, socket: &OwnedFd) -> ! {
    if orders.fault == "opener-fails" {
        eprintln!("tasuki: the card is on fire; put it out");
        std::process::exit(1);
    }
    assert!(orders.words.iter().any(|word| word == "--iova"), "{orders:?}");
    let part = |name| Words::create(name, 4096).expect("memory");
    let [way, rings, frames, ledger] = ["a card's way", "rings", "frames", "ledger"].map(part);
    let can = Can { in_place: true, spare_queue: false, repoint: true, pauses: true, fenced: true };
    let bundle = DeviceBundle {
        kind: 0x8086_10d3,
        version: 1,
        can,
        // Too long for a message once the opener's parent reports it.
        text: if orders.fault == "opener-overfills" { "x".repeat(MESSAGE_MAX - 300) } else { "{}".to_owned() },
        layout: None,
        fds: 4,
        memory: 3,
        partial: false,
        made_by: None,
        mac: None,
    };
    let message = ToDaemon::DeviceBundle { bundle };
    write(socket, &message, &[&way, &rings, &frames, &ledger].map(|part| part.region().fd()));
    std::process::exit(0);
}

fn write(socket: &OwnedFd, message: &ToDaemon, fds: &[std::os::fd::BorrowedFd<'_>]) {
    let _ = channel::send(socket.as_fd(), &serde_json::to_vec(message).expect("text"), fds);
}

fn work(orders: &Orders, socket: OwnedFd) -> ! {
    match &orders.fault[..] {
        "dies-at-start" => std::process::exit(3),
        "never-begins" => wait_for_ever(&orders.alive),
        _ => {}
    }
    let mut room = Vec::new();
    let message = loop {
        match channel::receive(socket.as_fd(), &mut room) {
            Ok(message) => break message,
            Err(Nothing::Yet) => wait(&socket, Duration::from_millis(100)),
            Err(_) => std::process::exit(0),
        }
        leave_if_over(&orders.alive);
    };
    let Ok(ToWorker::Begin(begin)) = serde_json::from_slice(&message.bytes) else { panic!("{message:?}") };
    let mut fds = message.fds.trust();
    // A worker without a card has no use for the TAP of its node.
    fds.truncate(3);
    let [heartbeat, program_state, listener] = <[OwnedFd; 3]>::try_from(fds).expect("three descriptors");
    let heartbeat = Words::adopt(heartbeat, heartbeat::LEN).expect("a heartbeat");
    rustix::net::listen(&listener, 4).expect("a listening socket");
    let protocol_version = if orders.fault == "speech" { PROTOCOL_VERSION + 1 } else { PROTOCOL_VERSION };
    write(
        &socket,
        &ToDaemon::Begun {
            protocol_version,
            reads: Vec::new(),
            unconfined: vec!["it is a \u{1b}[7mstand-in\u{202e}".to_owned()],
        },
        &[],
    );
    // Report a NIC that another node drives, without a request.
    if orders.fault == "driver_state-uninvited" {
        let memory = Words::create("a driver state", 4096).expect("memory");
        write(&socket, &ToDaemon::DriverState { nic: 0 }, &[memory.region().fd()]);
    }
    if orders.fault == "counts-uninvited" {
        let counts = vec![("rx_packets".to_owned(), 666)];
        write(&socket, &ToDaemon::Counts { nic: 0, counts }, &[]);
    }
    if orders.fault == "nonsense" {
        let _ = channel::send(socket.as_fd(), b"{\"message\":\"ransom\"}", &[]);
    }
    if orders.fault == "hides" {
        let message = ToDaemon::Told { nic: None, sentence: "two".to_owned() };
        write(&socket, &message, &[socket.as_fd(), socket.as_fd()]);
    }
    if let Some(port) = orders.fault.strip_prefix("lingers-") {
        write(&socket, &ToDaemon::Told { nic: None, sentence: "take it".to_owned() }, &[lingering(port).as_fd()]);
    }
    let mut standin = Standin {
        fault: orders.fault.clone(),
        attack: orders.alive.with_file_name(format!("attack.{}", begin.node)),
        party: begin.party,
        node: begin.node,
        socket,
        heartbeat,
        listener,
        nics: BTreeMap::new(),
        program_state: Words::adopt(program_state, program_state::LEN).expect("a program state"),
        neighbours: BTreeMap::new(),
        tables: Tables::default(),
        alone: false,
    };
    let mut looked = Instant::now();
    loop {
        standin.turn();
        if looked.elapsed() > Duration::from_millis(200) {
            leave_if_over(&orders.alive);
            looked = Instant::now();
        }
    }
}

/// Makes a connection whose closing takes an hour, because its peer does not read the written data.
fn lingering(port: &str) -> std::net::TcpStream {
    let stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).expect("a listener");
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(3600))).expect("a socket");
    stream.set_nonblocking(true).expect("a socket");
    while std::io::Write::write(&mut &stream, &[0; 4096]).is_ok() {}
    stream
}

impl Standin {
    fn is(&self, fault: &str) -> bool {
        self.fault == fault
    }

    /// Runs one round of the loop.
    fn turn(&mut self) {
        let drives = self.nics.values().any(|nic| nic.machine.drives());
        let looks = self.nics.values().any(|nic| nic.looks);
        let wait_for = if self.alone { &self.listener } else { &self.socket };
        if drives || looks {
            wait(wait_for, Duration::from_micros(500));
        } else {
            self.heartbeat.store(heartbeat::ASLEEP, 1);
            wait(wait_for, Duration::from_millis(100));
            self.heartbeat.store(heartbeat::ASLEEP, 0);
        }
        self.heartbeat.count(heartbeat::LOOKS);
        if drives {
            self.heartbeat.count(heartbeat::RECEIVED);
        }
        if self.alone {
            self.let_in();
        }
        self.read_all();
        if self.is("attacks") {
            self.attack(drives);
        }
        let numbers: Vec<u32> = self.nics.keys().copied().collect();
        for number in numbers {
            let nic = &self.nics[&number];
            if nic.looks {
                let word = nic.lease_page.tenure();
                self.hear(number, Input::Word(word));
            }
        }
    }

    /// Executes the attack that a test has written for workers of this node. The first worker that finds it takes
    /// it; an attack for the driver waits for the driver.
    fn attack(&mut self, drives: bool) {
        let Ok(script) = std::fs::read_to_string(&self.attack) else { return };
        if script.starts_with("driver") && !drives || script.starts_with("spare") && drives {
            return;
        }
        let mine = self.attack.with_extension(self.party.to_string());
        if std::fs::rename(&self.attack, mine).is_err() {
            return;
        }
        for line in script.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words[at].parse::<u32>().expect("a number");
            match words[0] {
                "word" => {
                    let holder = number(2).try_into().ok().map(Party);
                    let word = Tenure { holder, epoch: number(3) }.to_word();
                    self.nics[&number(1)].lease_page.words.store(lease_page::LEASE_AT / 8, word);
                }
                "fuzz" => self.fuzz(number(1).into(), number(2), number(3)),
                "ended" => self.heartbeat.store(heartbeat::LIFE, u64::from(heartbeat::ENDED)),
                // An unknown report: the fence of another worker, as an older protocol had it.
                "fenced" => {
                    let mut packet = Report::Released { epoch: 1 }.to_bytes();
                    packet[6] = 110;
                    packet[16..20].copy_from_slice(&number(2).to_le_bytes());
                    let _ = channel::send(self.socket.as_fd(), &message::frame(number(1), packet), &[]);
                }
                said => {
                    let report = report(said, words.get(2).map_or(0, |_| number(2)));
                    let _ = channel::send(self.socket.as_fd(), &message::frame(number(1), report.to_bytes()), &[]);
                }
            }
        }
    }

    /// Sends and writes everything that the seed determines, until the daemon ends it or the seed's acts end.
    fn fuzz(&self, seed: u64, count: u32, own: u32) -> ! {
        for act in fuzz::of_seed(seed, count, own) {
            let (bytes, gifts) = match act {
                Act::Packet(nic, packet, gifts) => (message::frame(nic, packet).to_vec(), gifts),
                Act::Message(bytes, gifts) => (bytes, gifts),
                Act::Lease(nic, word) => {
                    self.nics.get(&nic).inspect(|nic| nic.lease_page.words.store(lease_page::LEASE_AT / 8, word));
                    continue;
                }
                Act::Heartbeat(at, word) => {
                    self.heartbeat.store(at, word);
                    continue;
                }
            };
            let gifts: Vec<OwnedFd> = gifts.into_iter().map(|gift| gift.open(&self.socket)).collect();
            let _ = channel::send(self.socket.as_fd(), &bytes, &channel::lend(&gifts));
        }
        std::process::exit(0);
    }

    fn let_in(&mut self) {
        if let Ok(socket) = rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC) {
            (self.socket, self.alone) = (socket, false);
        }
    }

    fn read_all(&mut self) {
        let mut room = Vec::new();
        while !self.alone {
            match channel::receive(self.socket.as_fd(), &mut room) {
                Ok(message) => match message::unframe(&message.bytes) {
                    Some((nic, packet)) => match Plan::parse(packet) {
                        Ok(plan) => self.nics.get_mut(&nic).into_iter().for_each(|nic| nic.plan = Some(plan)),
                        Err(_) => self.hear(nic, Input::Order(Order::parse(packet).expect("an order"))),
                    },
                    None => self.read(serde_json::from_slice(&message.bytes).expect("a message"), message.fds.trust()),
                },
                Err(Nothing::Yet) => return,
                Err(_) => self.alone = true,
            }
        }
    }

    fn read(&mut self, message: ToWorker, mut fds: Vec<OwnedFd>) {
        match message {
            ToWorker::Nic { nic, name, bundle, .. } => {
                let lease_page = LeasePage::adopt(fds.remove(0)).expect("a lease page");
                assert_eq!(fds.len(), bundle.fds);
                if self.is("keeps") {
                    let words = program_state::of_nic(nic).into_iter().flatten();
                    let kept = words.filter(|word| self.program_state.load(*word) != 0).count();
                    program_state::of_nic(nic).into_iter().flatten().for_each(|word| self.program_state.store(word, 7));
                    let sentence = format!("{kept} words are kept for {name}");
                    write(&self.socket, &ToDaemon::Told { nic: None, sentence }, &[]);
                }
                let machine = Worker::new(Party(self.party.try_into().expect("a party")));
                self.nics.insert(nic, Nic { name, machine, lease_page, bundle, fds, looks: false, plan: None });
            }
            ToWorker::Again => {
                let mut nics: Vec<u32> = self.nics.keys().copied().collect();
                // There are two ends, with numbers that differ in their last bit.
                nics.extend(self.is("claims").then(|| nics[0] ^ 1));
                nics.retain(|nic| !self.is("conceals") || self.nics[nic].machine.drives());
                let party = if self.is("is-another") { self.party - 1 } else { self.party };
                write(&self.socket, &ToDaemon::Mine { party, node: self.node.clone(), nics }, &[]);
            }
            ToWorker::Counts => {
                for (number, nic) in self.nics.iter().filter(|(_, nic)| nic.machine.drives()) {
                    let received = self.heartbeat.load(heartbeat::RECEIVED);
                    let counts = vec![("rx_packets".to_owned(), received), ("rx\u{1b}[7m\u{202e}_odd".to_owned(), 1)];
                    assert!(!nic.name.is_empty());
                    write(&self.socket, &ToDaemon::Counts { nic: *number, counts }, &[]);
                }
            }
            ToWorker::DriverState { .. } => write(
                &self.socket,
                &ToDaemon::Told { nic: None, sentence: format!("a driver state came, with {} memory", fds.len()) },
                &[],
            ),
            // No frames pass here.
            ToWorker::Capture { .. } | ToWorker::NoCapture { .. } => {}
            ToWorker::Neighbour { number, .. } => _ = self.neighbours.insert(number, fds),
            ToWorker::NoNeighbour { .. }
            | ToWorker::Directory { .. }
            | ToWorker::Client { .. }
            | ToWorker::NoClient { .. }
            | ToWorker::Listen => {}
            ToWorker::End => std::process::exit(0),
            ToWorker::Begin(_) => panic!("it has begun"),
        }
    }

    fn hear(&mut self, number: u32, input: Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let Some(nic) = self.nics.get_mut(&number) else { return };
            if matches!(input, Input::Word(_)) && self.fault == "late" {
                return;
            }
            let Ok(doing) = nic.machine.hear(&self.tables, input) else { continue };
            nic.looks = nic.looks && matches!(input, Input::Word(_)) && doing.is_empty();
            for what in doing {
                inputs.extend(self.act(number, what));
            }
        }
    }

    fn act(&mut self, number: u32, what: Do) -> Option<Input> {
        let stamp = || u64::try_from(now().as_nanos()).expect("not so long");
        let dies = |at: &str| {
            if self.fault == at {
                std::process::exit(7)
            }
        };
        let nic = self.nics.get_mut(&number)?;
        match what {
            Do::Map if self.fault == "unfit" => return Some(Input::Unfit(Reason::MemLock { may: 1, needs: 2 })),
            Do::Map if self.fault == "hangs-at-prepare" => loop {
                std::thread::park();
            },
            Do::Map => {
                dies("dies-at-prepare");
                if nic.bundle.partial {
                    self.make_memory(number);
                }
                return Some(Input::Prepared);
            }
            Do::Stop if self.fault == "hangs-at-release" => loop {
                std::thread::park();
            },
            Do::Stop => {
                dies("dies-at-release");
                return Some(Input::Stopped);
            }
            Do::WriteDriverState { .. } if nic.plan.as_ref().is_some_and(|plan| plan.store.is_some()) => {
                let memory = Words::create("a driver state", 4096).expect("memory");
                write(&self.socket, &ToDaemon::DriverState { nic: number }, &[memory.region().fd()]);
                if self.fault == "driver_state-twice" {
                    write(&self.socket, &ToDaemon::DriverState { nic: number }, &[memory.region().fd()]);
                }
            }
            Do::Swap { from, to } => return Some(self.swap(number, from, to)),
            Do::Look => nic.looks = true,
            Do::Read { .. } if nic.plan.as_ref().is_some_and(|plan| plan.method == Method::Repoint) => {
                // Findings of a taker that distrusts the last owner.
                return Some(match &self.fault[..] {
                    "finds-left" => Input::Broken(Reason::LeftBehind { value: 2 }),
                    "finds-frames" => Input::Broken(Reason::FramesCame),
                    _ => Input::Sound,
                });
            }
            Do::Read { .. } if self.fault == "broken" => {
                return Some(Input::Broken(Reason::WrongDriverState { value: 9 }));
            }
            Do::Read { .. } => {
                dies("dies-at-read");
                return Some(Input::Sound);
            }
            Do::LookOnce => {
                nic.lease_page.words.store(lease_page::DRIVING_AT, stamp());
                nic.lease_page.words.count(lease_page::RELAYS);
                if self.fault == "speaks-of-bundle" {
                    let bundle = DeviceBundle { text: "{\"another\":\"card's\"}".to_owned(), ..nic.bundle.clone() };
                    let message = ToDaemon::DeviceBundle { bundle };
                    let own = Words::create("its own", 4096).expect("memory");
                    write(&self.socket, &message, &vec![own.region().fd(); nic.bundle.fds]);
                }
                if self.fault == "other-mac" {
                    let bundle = DeviceBundle { mac: Some([2, 0, 0, 0, 0, 9]), ..nic.bundle.clone() };
                    let message = ToDaemon::DeviceBundle { bundle };
                    write(&self.socket, &message, &channel::lend(&nic.fds));
                }
            }
            Do::Go => {
                self.nics.remove(&number);
            }
            Do::Say(report) => self.say(number, report),
            Do::WriteDriverState { .. } | Do::Resume | Do::Yield => {}
        }
        None
    }

    /// Reports the memory of its own for the NIC, truthfully unless it has a fault.
    fn make_memory(&self, number: u32) {
        let made = ["rings", "frames", "ledger"].map(|name| Words::create(name, 4096).expect("memory"));
        let mut fds: Vec<_> = made.iter().map(|part| part.region().fd()).collect();
        let (mut nic, mut layout) = (number, "{}".to_owned());
        let loose = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("memory");
        match &self.fault[..] {
            "memory-of-another-nic" => nic = number + 1,
            "memory-overfull" => layout = "x".repeat(MESSAGE_MAX - 300),
            "memory-too-many" => fds.push(made[0].region().fd()),
            "memory-twice" => fds[2] = fds[1],
            "memory-is-the-way" => fds[1] = self.nics[&number].fds[0].as_fd(),
            "memory-is-none" => fds[0] = self.socket.as_fd(),
            "memory-loose" => fds[0] = loose.as_fd(),
            _ => {}
        }
        write(&self.socket, &ToDaemon::Memory { nic, layout }, &fds);
    }

    fn swap(&mut self, number: u32, from: Tenure, to: Tenure) -> Input {
        let lease_page = &self.nics[&number].lease_page;
        if to.holder.is_none() {
            lease_page.words.store(lease_page::STOPPED_AT, u64::try_from(now().as_nanos()).expect("not so long"));
        } else if self.is("dies-at-take") {
            std::process::exit(7);
        }
        let won = lease_page.swap(from, to).is_ok();
        if won && self.is("dies-after-pass") && to.holder.is_none() {
            std::process::exit(7);
        }
        Input::Swapped { won }
    }

    fn say(&self, number: u32, report: Report) {
        let said = match report {
            Report::Ready if self.is("lies") => Report::Taken { epoch: self.nics[&number].lease_page.tenure().epoch },
            said => said,
        };
        let _ = channel::send(self.socket.as_fd(), &message::frame(number, said.to_bytes()), &[]);
    }
}
