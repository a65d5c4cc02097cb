//! A small daemon for the tests: it exchanges the real messages and packets with real workers, which drive our model
//! of a card.

use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_relay::message::{
    Begin, DeviceBundle, Inflight, MESSAGE_MAX, PROTOCOL_VERSION, ToDaemon, ToWorker, Work, frame, heartbeat,
    lease_page, unframe,
};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Plan, Reason, Report, Use};
use tasuki_relay::{ARBITER, After, Party, Tenure};
use tasuki_shm::region::{Pages, Region, Span};
use tasuki_testing::{PATIENCE, Program, descriptors};

use crate::programs::{Model, folder};

/// One end of a socket that keeps bounds.
#[derive(Debug)]
pub struct Talk(OwnedFd);

/// Input from a worker.
#[derive(Debug)]
pub enum Said {
    Message(ToDaemon, Vec<OwnedFd>),
    Report(u32, Report),
    /// The worker hung up.
    End,
}

impl Talk {
    pub fn pair() -> (Self, OwnedFd) {
        let (ours, its) = descriptors::pair();
        (Talk(ours), its)
    }

    pub fn call(path: &Path) -> Self {
        Talk(descriptors::connect(path))
    }

    pub fn send(&self, bytes: &[u8], fds: &[OwnedFd]) {
        // Some tests are about a dead worker, so ignore errors.
        let _ = descriptors::send(&self.0, bytes, fds);
    }

    /// Returns the next input, or nothing if none arrives within `patience`.
    pub fn hear_within(&self, patience: Duration) -> Option<Said> {
        let mut poll = [PollFd::new(&self.0, PollFlags::IN)];
        let patience = Timespec::try_from(patience).unwrap();
        if rustix::event::poll(&mut poll, Some(&patience)).expect("poll") == 0 {
            return None;
        }
        let mut bytes = vec![0; MESSAGE_MAX];
        let (len, fds) = match descriptors::receive(&self.0, &mut bytes) {
            Ok((len, fds)) if len > 0 => (len, fds),
            _ => return Some(Said::End),
        };
        let bytes = &bytes[..len];
        Some(match unframe(bytes) {
            Some((nic, packet)) => Said::Report(nic, Report::parse(packet).expect("a report")),
            None => Said::Message(serde_json::from_slice(bytes).expect("a message"), fds),
        })
    }

    pub fn hear(&self) -> Said {
        self.hear_within(PATIENCE).expect("a worker that says something")
    }
}

fn words(region: &Region) -> Span<AtomicU64> {
    region.span(0, region.len() / 8).expect("whole words")
}

fn region(name: &str, len: usize) -> Region {
    Region::create(name, len, Pages::Small).expect("memory")
}

fn fd_of(region: &Region) -> OwnedFd {
    region.fd().try_clone_to_owned().expect("a descriptor")
}

/// A NIC as the daemon has it: the opener's device bundle, and the lease page.
#[derive(Debug)]
pub struct Nic {
    pub number: u32,
    pub bundle: DeviceBundle,
    pub fds: Vec<OwnedFd>,
    lease_page: Region,
    words: Span<AtomicU64>,
}

impl Nic {
    /// Starts an opener for the card and takes its device bundle.
    pub fn open(socket: &Path, arguments: &[&str]) -> Self {
        let (talk, its) = Talk::pair();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki-worker"));
        command.arg("open").arg(format!("vfio-user:{}", socket.display())).args(arguments).stdin(Stdio::from(its));
        let mut opener = Program::start(&mut command);
        drop(command);
        let said = talk.hear();
        let Said::Message(ToDaemon::Begun { .. }, _) = said else { panic!("{said:?}") };
        let way = std::os::unix::net::UnixStream::connect(socket).expect("a server");
        talk.send(b".", &[way.into()]);
        let said = talk.hear();
        let Said::Message(ToDaemon::DeviceBundle { bundle }, fds) = said else { panic!("{said:?}") };
        assert_eq!(bundle.fds, fds.len());
        assert_eq!(opener.end(), Some(0));
        Nic::of(0, bundle, fds, region("lease_page", lease_page::LEN))
    }

    pub fn of(number: u32, bundle: DeviceBundle, fds: Vec<OwnedFd>, lease_page: Region) -> Self {
        let words = words(&lease_page);
        Nic { number, bundle, fds, lease_page, words }
    }

    pub fn tenure(&self) -> Tenure {
        Tenure::from_word(self.words[0].load(Acquire))
    }

    /// Compare-and-swap of the lease word, as the arbiter does it.
    pub fn swap(&self, from: Tenure, to: Tenure) -> bool {
        self.words[0].compare_exchange(from.to_word(), to.to_word(), Release, Relaxed).is_ok()
    }

    /// Seizes a lease that is free or whose holder is dead, and passes it on. Returns the word from which it can be
    /// taken.
    pub fn seize(&self) -> Tenure {
        let now = self.tenure();
        let ours = now.taken_by(ARBITER);
        assert!(self.swap(now, ours) && self.swap(ours, ours.passed()), "nobody else swaps");
        ours.passed()
    }

    pub fn pause(&self) -> Duration {
        let (stopped, driving) =
            (self.words[lease_page::STOPPED_AT].load(Acquire), self.words[lease_page::DRIVING_AT].load(Acquire));
        Duration::from_nanos(driving.saturating_sub(stopped))
    }

    pub fn relays(&self) -> u64 {
        self.words[lease_page::RELAYS].load(Acquire)
    }

    pub fn copies(&self) -> Vec<OwnedFd> {
        [fd_of(&self.lease_page)]
            .into_iter()
            .chain(self.fds.iter().map(|fd| fd.try_clone().expect("a descriptor")))
            .collect()
    }
}

/// A node: the parts that its workers share.
#[derive(Debug)]
pub struct Node {
    pub work: Work,
    pub options: String,
    pub poll: bool,
    pub cpu: Option<u32>,
    pub aside: Vec<u32>,
    pub nice: i32,
    pub files: bool,
    pub program_state: Region,
    pub folder: PathBuf,
    pub program: PathBuf,
    next: u32,
}

impl Node {
    pub fn new(folder: &Path, work: Work) -> Self {
        let (program_state, folder) = (region("program_state", 64 * 1024), folder.to_owned());
        let program = PathBuf::from(env!("CARGO_BIN_EXE_tasuki-worker"));
        Node {
            work,
            options: String::new(),
            poll: false,
            cpu: None,
            aside: Vec::new(),
            nice: 0,
            files: false,
            program_state,
            folder,
            program,
            next: 1,
        }
    }

    /// Creates another node of the same machine. Its workers' numbers start at `first`: no two workers may have one
    /// number.
    pub fn beside(folder: &Path, work: Work, first: u32) -> Self {
        Node { next: first, ..Node::new(folder, work) }
    }

    /// Returns the count of numbered frames seen, from the later of the two copies in the program state.
    pub fn booked(&self, nic: usize) -> u64 {
        let words = words(&self.program_state);
        words[nic * 16].load(Acquire).max(words[nic * 16 + 8].load(Acquire))
    }

    /// Returns the first word of the state of the node's program, from the later of its two copies.
    pub fn remembered(&self, nic: usize) -> u64 {
        let words = words(&self.program_state);
        let copy = |copy: usize| words[2048 + nic * 128 + copy * 64 + 4].load(Acquire);
        copy(0).max(copy(1))
    }

    /// Starts a worker and waits until it has begun.
    pub fn worker(&mut self, environment: &[(&str, String)]) -> Worker {
        let party = self.next;
        self.next += 1;
        let path = self.folder.join(format!("worker-{party}"));
        let listening = descriptors::listen(&path);
        let (talk, its) = Talk::pair();
        let mut command = Command::new(&self.program);
        command.arg("worker").stdin(Stdio::from(its)).stdout(Stdio::null());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        let process = Program::start(&mut command);
        drop(command);
        let heartbeat = region("heartbeat", heartbeat::LEN);
        let words = words(&heartbeat);
        let mut worker = Worker {
            process,
            talk,
            party: Party(NonZeroU32::new(party).unwrap()),
            path,
            words,
            heartbeat,
            told: Vec::new(),
            unconfined: Vec::new(),
        };
        let begin = Begin {
            protocol_version: PROTOCOL_VERSION,
            party,
            node: "node".to_owned(),
            work: self.work,
            options: self.options.clone(),
            cpu: self.cpu,
            aside: self.aside.clone(),
            nice: self.nice,
            poll: self.poll,
            memlock: 64 << 20,
            files: self.files,
            threads: false,
            endpoint: None,
        };
        let fds = [fd_of(&worker.heartbeat), fd_of(&self.program_state), listening];
        worker.message(&ToWorker::Begin(begin), &fds);
        match worker.talk.hear() {
            Said::Message(ToDaemon::Begun { unconfined, .. }, _) => worker.unconfined = unconfined,
            other => panic!("{other:?}"),
        }
        worker
    }

    /// Starts a worker and waits until it is ready to take `nic`.
    pub fn ready(&mut self, nic: &Nic, environment: &[(&str, String)]) -> Worker {
        let mut worker = self.worker(environment);
        worker.give(nic);
        worker.prepare(nic, Use::Upgrade);
        assert_eq!(worker.report(nic), Report::Ready, "{:?}", worker.told);
        worker
    }
}

/// A worker, and the daemon's end of its socket.
#[derive(Debug)]
pub struct Worker {
    pub process: Program,
    pub talk: Talk,
    pub party: Party,
    /// Path of its listening socket.
    pub path: PathBuf,
    words: Span<AtomicU64>,
    heartbeat: Region,
    /// Its sentences for a person.
    pub told: Vec<String>,
    pub unconfined: Vec<String>,
}

impl Worker {
    pub fn message(&self, message: &ToWorker, fds: &[OwnedFd]) {
        self.talk.send(&serde_json::to_vec(message).expect("JSON"), fds);
        self.posted();
    }

    pub fn order(&self, nic: &Nic, order: Order) {
        self.talk.send(&frame(nic.number, order.to_bytes()), &[]);
        self.posted();
    }

    fn tell_plan(&self, nic: &Nic, plan: Plan) {
        self.talk.send(&frame(nic.number, plan.to_bytes()), &[]);
        self.posted();
    }

    fn posted(&self) {
        self.words[heartbeat::POSTS].fetch_add(1, Release);
    }

    pub fn heartbeat(&self, word: usize) -> u64 {
        self.words[word].load(Acquire)
    }

    pub fn give(&self, nic: &Nic) {
        let message = ToWorker::Nic {
            nic: nic.number,
            name: "nic".to_owned(),
            iova: self.iova(),
            fenced: false,
            bundle: nic.bundle.clone(),
        };
        self.message(&message, &nic.copies());
    }

    /// Returns the bus address at which the card may see memory that this worker makes.
    fn iova(&self) -> u64 {
        (1 << 33) + (u64::from(self.party.0.get()) << 28)
    }

    /// Gives it all that it needs to drive `nic` from memory of its own, and nothing of the present memory.
    pub fn give_apart(&self, nic: &Nic) {
        let mut fds = nic.copies();
        fds.truncate(fds.len() - nic.bundle.memory);
        let bundle = DeviceBundle { partial: true, fds: fds.len() - 1, ..nic.bundle.clone() };
        self.message(
            &ToWorker::Nic { nic: nic.number, name: "nic".to_owned(), iova: self.iova(), fenced: false, bundle },
            &fds,
        );
        self.prepare_by(nic, Use::Handover, Method::Repoint);
    }

    /// Waits until the worker is ready to drive the NIC from memory of its own. Returns the NIC's device bundle
    /// after that, or nothing if the worker dies.
    pub fn ready_apart(&mut self, nic: &Nic) -> Option<(DeviceBundle, Vec<OwnedFd>)> {
        let mut own = None;
        loop {
            match self.talk.hear() {
                Said::Message(ToDaemon::Memory { layout, .. }, memory) => {
                    assert_eq!(memory.len(), nic.bundle.memory);
                    let mut fds = nic.copies();
                    drop(fds.remove(0));
                    fds.truncate(fds.len() - memory.len());
                    fds.extend(memory);
                    let made_by = Some(self.party.0.get());
                    own = Some((DeviceBundle { layout: Some(layout), made_by, ..nic.bundle.clone() }, fds));
                }
                Said::Message(ToDaemon::Told { sentence, .. }, _) => self.told.push(sentence),
                Said::Report(_, Report::Ready) => return own,
                Said::End => return None,
                other => panic!("{other:?}: {:?}", self.told),
            }
        }
    }

    /// Tells it how to release `nic` to another node.
    pub fn plan_handover(&self, nic: &Nic, method: Method, inflight: Inflight) {
        self.tell_plan(nic, Plan { method, handover: true, inflight, store: None, fenced: false });
    }

    pub fn prepare(&self, nic: &Nic, purpose: Use) {
        self.prepare_by(nic, purpose, Method::Keep);
    }

    pub fn prepare_by(&self, nic: &Nic, purpose: Use, method: Method) {
        let DeviceBundle { kind, version, .. } = nic.bundle;
        self.order(nic, Order::Prepare { purpose, method, kind, version });
    }

    /// Returns the next report about `nic`; keeps sentences that arrive before it.
    pub fn report(&mut self, nic: &Nic) -> Report {
        self.report_or_end(nic).unwrap_or_else(|| panic!("the worker ended: {:?}", self.told))
    }

    /// As [`report`](Self::report), but returns nothing if the worker ends instead.
    pub fn report_or_end(&mut self, nic: &Nic) -> Option<Report> {
        loop {
            match self.talk.hear() {
                Said::Report(number, report) => {
                    assert_eq!(number, nic.number);
                    return Some(report);
                }
                Said::Message(ToDaemon::Told { sentence, .. }, _) => self.told.push(sentence),
                Said::Message(..) => {}
                Said::End => return None,
            }
        }
    }

    /// Returns the next message that is not a sentence for a person.
    pub fn hear_message(&mut self) -> (ToDaemon, Vec<OwnedFd>) {
        loop {
            match self.talk.hear() {
                Said::Message(ToDaemon::Told { sentence, .. }, _) => self.told.push(sentence),
                Said::Message(message, fds) => return (message, fds),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Grants it the lease of a NIC that no worker drives.
    pub fn grant(&mut self, nic: &Nic) -> Report {
        self.grant_or_end(nic).unwrap_or_else(|| panic!("it has ended: {:?}", self.told))
    }

    /// As [`grant`](Self::grant), but returns nothing if the worker ends instead.
    pub fn grant_or_end(&mut self, nic: &Nic) -> Option<Report> {
        let passed = nic.seize();
        self.order(nic, Order::Take { epoch: passed.epoch, after: After::Lost, wrote: 0 });
        self.report_or_end(nic)
    }

    /// Has it pass the lease to `next`. Returns the reports of both.
    pub fn pass_to(&mut self, next: &mut Worker, nic: &Nic) -> (Report, Report) {
        let epoch = nic.tenure().epoch;
        next.order(nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
        self.order(nic, Order::Release { epoch });
        let released = self.report(nic);
        (released, next.report(nic))
    }

    pub fn plan(&self, nic: &Nic, store: Option<u32>) {
        self.tell_plan(
            nic,
            Plan { method: Method::Keep, handover: false, inflight: Inflight::Deliver, store, fenced: false },
        );
    }
}

/// Checks the model's report on its source's frames.
pub fn nothing_is_lost(report: &str, count: u64) {
    assert!(report.contains(&format!("sent {count}, came back {count}, lost 0\n")), "{report}");
    assert!(report.contains("twice 0, out of order 0, damaged 0, from others 0"), "{report}");
}

/// Starts a model that sends `count` numbered frames, `rate` a second, opens its card for all frames, and creates a
/// node for it. The folder has their sockets.
pub fn scene(work: Work, count: u64, rate: u64) -> (tempfile::TempDir, Model, Nic, Node) {
    let folder = folder();
    let model = Model::start(folder.path(), &["--source", &count.to_string(), "--rate", &rate.to_string()]);
    let nic = Nic::open(&model.socket, &["--promiscuous"]);
    let node = Node::new(folder.path(), work);
    (folder, model, nic, node)
}

pub fn taken(report: Report) -> u32 {
    let Report::Taken { epoch } = report else { panic!("{report:?}") };
    epoch
}

pub fn unfit(report: Report) -> Reason {
    let Report::Unfit(reason) = report else { panic!("{report:?}") };
    reason
}

impl Worker {
    /// Returns whether it has sent a sentence for a person.
    pub fn hears_trouble(&mut self) -> bool {
        while let Some(said) = self.talk.hear_within(Duration::ZERO) {
            match said {
                Said::Message(ToDaemon::Told { sentence, .. }, _) => self.told.push(sentence),
                Said::End => self.told.push("it has ended".to_owned()),
                _ => {}
            }
        }
        !self.told.is_empty()
    }

    /// Returns the number of frames that the card has sent, without PAUSE frames.
    pub fn sent_on_the_wire(&mut self) -> u64 {
        self.message(&ToWorker::Counts, &[]);
        let counts = loop {
            if let (ToDaemon::Counts { counts, .. }, _) = self.hear_message() {
                break counts;
            }
        };
        let count = |name| counts.iter().find(|(known, _)| known == name).map_or(0, |&(_, count)| count);
        count("tx_packets") - count("tx_multicast")
    }

    /// Waits until the card has sent `count` frames.
    pub fn until_sent(&mut self, count: u64) {
        let end = Instant::now() + PATIENCE;
        loop {
            let sent = self.sent_on_the_wire();
            if sent >= count {
                return;
            }
            assert!(Instant::now() < end, "{sent} of {count} frames were sent; {:?}", self.told);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Plays a daemon that has just started, and checks that the worker says who it is and that it has this NIC. Such a
/// daemon gets the NIC's device bundle from its keeper.
pub fn adopt(worker: &mut Worker, nic: &Nic) {
    worker.talk.send(&serde_json::to_vec(&ToWorker::Again).expect("JSON"), &[]);
    let (message, fds) = worker.hear_message();
    let mine = ToDaemon::Mine { party: worker.party.0.get(), node: "node".to_owned(), nics: vec![nic.number] };
    assert_eq!((message, fds.len()), (mine, 0));
}
