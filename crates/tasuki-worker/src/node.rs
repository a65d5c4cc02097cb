//! The worker: receives the description of its node, gives up all other rights, and then obeys the daemon's orders
//! until it is told to end.

use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_net::capture::{Capture, Terms};
use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::bus::{Vfio, VfioUser};
use tasuki_net::nic::e1000e::{self, E1000e};
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::virtio_net::driver_state as virtio;
use tasuki_net::nic::{InPlace, Repoint, Scrub};
use tasuki_relay::Party;
use tasuki_relay::message::{self, Begin, PROTOCOL_VERSION, ToDaemon, ToWorker};
use tasuki_relay::wire::Order;
use tasuki_relay::worker::{Input, Tables};
use tasuki_shm::slice;

use crate::attached::Attached;
use crate::attachment::{Attachment, Common, Given, captured};
use crate::channel::{DaemonChannel, Heard};
use crate::confine::Keeps;
use crate::cpus::Cpus;
use crate::device::Driver;
use crate::endpoint::Endpoint;
use crate::handler::FrameHandler;
use crate::lease_page::{Heartbeat, LeasePage, ProgramState};
use crate::spin::Spin;
use crate::tap::Tap;
use crate::vni::VniAttachment;
use crate::{bundle, confine, sentence, store, warm};

/// Number of idle looks before a worker that may sleep does so.
const IDLE_LOOKS: u32 = 4096;

/// The same number for a worker that asks a kernel at each look and shares its CPU with the programs of a namespace.
const IDLE_LOOKS_OF_KERNEL: u32 = 8;

/// Number of looks between two system calls of a worker that polls. With these it checks whether its daemon is
/// there, whether another daemon calls, and whether a card is gone.
const ROUND: u64 = 1 << 16;

/// Number of looks between two checks of how long the worker has worked without a rest.
const TURNS: u64 = 16;

/// Time for which a taker polls the lease word before it sleeps until the bell rings.
const SPIN: Duration = Duration::from_millis(20);

/// The same time for a taker that may be on the giver's CPU, which it yields at each look. To be woken on another CPU
/// would take longer than most givers need.
const YIELDS: Duration = Duration::from_micros(200);

struct Node<D: FrameHandler> {
    name: String,
    common: Common,
    /// Description of the frame handler, from the first message.
    told: D::Told,
    /// The NICs, each by its driver and the way to its card, for which its data path is compiled; and the node's end of a
    /// VNI.
    attachments: Vec<Box<dyn Attached<D>>>,
    poll: bool,
    idle_looks: u32,
    /// Count of announced messages at the last read.
    read: u64,
    /// The socket of the daemon was ready when the worker woke.
    must_hear: bool,
    over: bool,
}

/// Runs a worker. Standard input is the socket to the daemon.
pub fn run<D: FrameHandler>() -> Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("the worker has no standard input")?;
    let mut channel = DaemonChannel::new(socket)?;
    let (begin, mut fds) = match channel.wait()? {
        Heard::Message(message, fds) => match *message {
            ToWorker::Begin(begin) => (begin, fds),
            other => bail!(
                "the daemon's first message is {other:?}, and does not describe this worker; rebuild the older of the two"
            ),
        },
        Heard::Order(..) | Heard::Plan(..) => {
            bail!("the daemon gave an order before it described this worker; rebuild the older of the two")
        }
        Heard::Nonsense(sentence) => bail!(sentence),
    };
    ensure!(
        begin.protocol_version == PROTOCOL_VERSION,
        "the daemon speaks version {} of the messages, and this worker {PROTOCOL_VERSION}; rebuild the older of the two",
        begin.protocol_version
    );
    // Report the error to the daemon too: the user who asked for this program does not see its standard error.
    let way = take_endpoint(&begin, &mut fds)?;
    let told = D::told(&begin, way.0).inspect_err(|error| channel.tell(None, sentence(error)))?;
    let mut node = Node::<D>::begin(channel, &begin, (told, way), fds)?;
    // Without the exit mark, the daemon learns of our end by our pidfd, a little later.
    let marked = node.common.heartbeat.mark_life().err();
    // Timed waits are for events tens of microseconds away. If the kernel refuses the shorter timer slack, they take
    // a little longer.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    slice::brief();
    warm::up();
    let keeps = Keeps { urgent: begin.nice < 0, files: begin.files, threads: begin.threads };
    let mut unconfined = confine::confine(begin.memlock, keeps)?.0;
    unconfined.extend(marked.map(|error| format!("the end of this worker will be noticed late: {error}")));
    let ends = (message::vni::KIND, message::vni::VERSION, message::vni::LOANS_VERSION);
    let reads = vec![store::versions::<e1000e::DriverState>(), store::versions::<virtio::DriverState>(), ends];
    node.common.channel.write(&ToDaemon::Begun { protocol_version: PROTOCOL_VERSION, reads, unconfined }, Vec::new());
    node.serve()
}

/// The way to the node's programs: a TAP that stands for the node's NIC, or the endpoint of a node on a VNI.
type Way = (Option<&'static Tap>, Option<Endpoint>);

/// Takes the last descriptor of the first message if the node has an endpoint. The worker keeps it to its end, also when
/// the node's NICs are taken from it.
fn take_endpoint(begin: &Begin, fds: &mut Vec<OwnedFd>) -> Result<Way> {
    let Some(description) = &begin.endpoint else {
        let needs_one = matches!(begin.work, message::Work::Tap | message::Work::Bridge);
        ensure!(!needs_one, "the daemon does not describe the node's endpoint; rebuild the older of the two");
        return Ok((None, None));
    };
    let count = fds.len();
    ensure!(
        count == 4,
        "the daemon sent {count} descriptors with its first message, and 4 belong to it; rebuild the older of the two"
    );
    let fd = fds.pop().context("they were counted")?;
    if begin.work == message::Work::Tap {
        let tap = Tap::over(fd, description.label.clone())?;
        return Ok((Some(&*Box::leak(Box::new(tap))), None));
    }
    Ok((None, Some(Endpoint::new(description.clone(), begin.node.clone(), fd))))
}

impl<D: FrameHandler> Node<D> {
    fn begin(
        mut channel: DaemonChannel,
        begin: &Begin,
        (told, (tap, endpoint)): (D::Told, Way),
        fds: Vec<OwnedFd>,
    ) -> Result<Self> {
        let count = fds.len();
        let Ok([heartbeat, program_state, listening]) = <[OwnedFd; 3]>::try_from(fds) else {
            bail!(
                "the daemon sent {count} descriptors with its first message, and 3 belong to it; rebuild the older of the two"
            );
        };
        let party = std::num::NonZeroU32::new(begin.party)
            .context("the daemon gave this worker the number 0, which no worker has")?;
        channel.listen(listening)?;
        let common = Common {
            tables: Tables::default(),
            channel,
            heartbeat: Heartbeat::over(heartbeat).context("the worker's heartbeat")?,
            program_state: ProgramState::over(program_state).context("the node's program state")?,
            party: Party(party),
            tap,
            endpoint,
            joins: begin.work == message::Work::Uplink,
            uplink: None,
            cpus: Cpus::new(begin.cpu, &begin.aside, begin.nice)?,
            spin: Spin::default(),
            drives_one: false,
        };
        let name = begin.node.clone();
        let asks_kernel = matches!(begin.work, message::Work::Tap | message::Work::Bridge);
        let idle_looks = if asks_kernel { IDLE_LOOKS_OF_KERNEL } else { IDLE_LOOKS };
        let (attachments, poll) = (Vec::new(), begin.poll);
        Ok(Node { name, common, told, attachments, poll, idle_looks, read: 0, must_hear: true, over: false })
    }

    fn serve(&mut self) -> Result<()> {
        let mut idle = 0_u32;
        while !self.over {
            let look = self.common.heartbeat.look();
            if self.common.heartbeat.posts() != self.read || look.is_multiple_of(ROUND) {
                self.hear(look.is_multiple_of(ROUND));
            }
            if look.is_multiple_of(TURNS) {
                self.common.cpus.toil();
                if self.attachments.iter().any(|attachment| attachment.is_awaited()) {
                    std::thread::yield_now();
                }
            }
            let (moved, drives) = self.turn();
            idle = if moved > 0 { 0 } else { idle.saturating_add(1) };
            if moved > 0 && self.common.spin.waits() {
                self.common.spin.end(Instant::now());
            }
            let may_sleep = !drives || (!self.poll && idle >= self.idle_looks && !self.looks_on());
            if may_sleep && (self.is_called() || !self.spins()) {
                if self.expects_lease() {
                    // The giver may be on this CPU; it is stopped, or passes the lease, when it runs next.
                    std::thread::yield_now();
                } else {
                    self.sleep()?;
                    idle = 0;
                }
            }
        }
        Ok(())
    }

    /// Runs one burst on each driven NIC, and looks once at the lease word of each NIC that is waited for. Returns
    /// the number of frames moved, and whether any NIC is driven.
    #[inline]
    fn turn(&mut self) -> (usize, bool) {
        let (mut moved, mut drives) = (0, false);
        for attachment in &mut self.attachments {
            if let Some(count) = attachment.look(&mut self.common) {
                drives = true;
                moved += count;
            }
        }
        (moved, drives)
    }

    /// Returns whether a worker that found nothing in its last looks looks again before it sleeps.
    fn looks_on(&mut self) -> bool {
        if self.idle_looks != IDLE_LOOKS_OF_KERNEL {
            return false;
        }
        if !self.common.spin.waits() {
            let gathers = self.attachments.iter_mut().any(|attachment| attachment.gathers(&mut self.common));
            self.common.spin.begin(!gathers, Instant::now());
        }
        self.common.spin.looks_on(Instant::now)
    }

    /// Returns whether an order to take is about to arrive.
    fn is_called(&self) -> bool {
        self.attachments.iter().any(|attachment| attachment.is_called())
    }

    /// Returns whether a lease, or an order to take one, is about to arrive.
    fn expects_lease(&self) -> bool {
        let is_due = |since: Instant| since.elapsed() < YIELDS;
        self.is_called() || self.attachments.iter().any(|attachment| attachment.waits().is_some_and(is_due))
    }

    /// Returns whether waiting is worth a core: for a lease that comes soon, or for a fence, which stops a busy
    /// process sooner than a process that must be woken for it.
    fn spins(&self) -> bool {
        let cpu = self.common.cpus.cpu();
        let waits = |attachment: &dyn Attached<D>| {
            attachment.waits().is_some_and(|since| attachment.may_spin(cpu) && since.elapsed() < SPIN)
        };
        self.attachments.iter().any(|attachment| waits(&**attachment) || attachment.awaits_fence())
    }

    /// Sleeps until a bell rings, the daemon sends a message, or a daemon calls.
    fn sleep(&mut self) -> Result<()> {
        let had_end = self.common.uplink.is_some();
        // What comes later ends the sleep.
        if std::mem::take(&mut self.must_hear) || self.common.heartbeat.posts() != self.read {
            self.hear(false);
        }
        self.look_after();
        let mut rest: Option<Duration> = None;
        let mut is_ready = false;
        for attachment in &mut self.attachments {
            if let Some(word) = attachment.waits().and_then(|_| attachment.word()) {
                attachment.hear(&mut self.common, word);
            }
            if !attachment.arm(&mut self.common) {
                self.wake();
                return Ok(());
            }
            rest = [rest, attachment.rest(&mut self.common)].into_iter().flatten().min();
            is_ready |= attachment.is_ready();
        }
        if self.over {
            return Ok(());
        }
        if !had_end && self.common.uplink.is_some() {
            // The uplink's NIC was armed without its end, and listens for nothing.
            self.wake();
            return Ok(());
        }
        let out = if self.common.channel.is_behind() { PollFlags::OUT } else { PollFlags::empty() };
        let daemon = self.common.channel.fd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN | out));
        let fds = self.attachments.iter().flat_map(|attachment| attachment.fds(&self.common));
        let fds = fds.flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // The kernel reports a hang-up without being asked for it.
        let lines = self.attachments.iter().filter_map(|attachment| attachment.line());
        let lines = lines.map(|line| PollFd::from_borrowed_fd(line, PollFlags::empty()));
        let has_daemon = daemon.is_some();
        let mut poll: Vec<_> = daemon.into_iter().chain(fds).chain(lines).collect();
        let measures = self.common.spin.measures().filter(|brief| rest.is_none_or(|rest| rest >= *brief));
        let rest = measures.or(rest).map(|rest| Timespec::try_from(rest).expect("less than a second"));
        if is_ready {
            self.common.cpus.hurry();
        }
        self.common.heartbeat.asleep(true);
        let began = measures.map(|_| Instant::now());
        let woken = rustix::event::poll(&mut poll, rest.as_ref());
        let over_time = began.filter(|_| woken == Ok(0)).map(|began| began.elapsed());
        self.common.heartbeat.asleep(false);
        self.common.cpus.woken();
        match woken {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno).context("the kernel refused to wait"),
        }
        let is_called = has_daemon && !poll[0].revents().is_empty();
        drop(poll);
        over_time.into_iter().for_each(|took| self.common.spin.slept(took));
        self.must_hear = is_called || !has_daemon;
        self.wake();
        Ok(())
    }

    /// Ends the sleep of all attachments.
    fn wake(&mut self) {
        self.attachments.iter_mut().for_each(|attachment| attachment.wake(&mut self.common));
    }

    /// Handles all messages that have arrived. If `round` is set, also runs the checks that are not due once a burst.
    #[cold]
    fn hear(&mut self, round: bool) {
        // Keep this order: a message is in the socket before it is announced.
        self.read = self.common.heartbeat.posts();
        while let Some(heard) = self.common.channel.next() {
            match heard {
                Heard::Order(nic, order) => self.order(nic, Input::Order(order)),
                Heard::Plan(nic, plan) => self.of(nic, |attachment| attachment.plan(plan)),
                Heard::Message(message, fds) => self.message(*message, fds),
                Heard::Nonsense(sentence) => self.common.channel.tell(None, sentence),
            }
        }
        if round {
            self.look_after();
        }
    }

    fn see_what_it_drives(&mut self) {
        self.common.drives_one = self.attachments.iter().filter(|attachment| attachment.drives()).count() == 1;
    }

    /// Runs the checks that are not due once a burst.
    fn look_after(&mut self) {
        self.common.channel.flush();
        self.see_what_it_drives();
        for attachment in &mut self.attachments {
            if attachment.drives() {
                attachment.now_and_then(&mut self.common);
            }
        }
        if let Some(trouble) = self.common.tap.and_then(Tap::trouble) {
            self.common.channel.tell(None, trouble);
        }
    }

    fn order(&mut self, nic: u32, input: Input) {
        let Some(index) = self.index(nic) else {
            return self
                .common
                .channel
                .tell(Some(nic), format!("an order came for NIC {nic}, of which this worker has nothing"));
        };
        let is_at_work = |attachment: &dyn Attached<D>| attachment.drives() || attachment.waits().is_some();
        let is_ready = self.attachments[index].is_ready();
        if matches!(input, Input::Order(Order::Prepare { .. }))
            && !is_ready
            && !self.attachments.iter().any(|attachment| is_at_work(&**attachment))
        {
            self.common.cpus.step_aside();
        }
        self.see_what_it_drives();
        self.attachments[index].hear(&mut self.common, input);
        match self.attachments.iter().any(|attachment| attachment.is_ready()) {
            true if self.attachments.iter().any(|attachment| attachment.drives()) => self.common.go_home(),
            // The node's CPU may be another by now, and this worker is about to leave. Otherwise it goes there when it takes, and
            // tells then.
            true => _ = self.common.cpus.go_home(),
            // Aside, the worker would be stopped late: the daemon that stops it runs aside, too.
            false if self.attachments.iter().any(|attachment| attachment.awaits_fence()) => {}
            false => self.common.cpus.step_aside(),
        }
        if self.attachments[index].is_left() {
            self.attachments.remove(index);
            self.over = self.attachments.is_empty();
        }
    }

    fn index(&self, nic: u32) -> Option<usize> {
        self.attachments.iter().position(|attachment| attachment.number() == nic)
    }

    fn message(&mut self, message: ToWorker, fds: Vec<OwnedFd>) {
        match message {
            ToWorker::Begin(_) => self.common.channel.tell(None, "the daemon described this worker twice".to_owned()),
            ToWorker::Nic { nic, name, iova, fenced, bundle } => {
                if let Err(error) = self.take_in(nic, name, (iova, fenced, bundle), fds) {
                    self.common.channel.tell(Some(nic), format!("{error:#}"));
                }
            }
            ToWorker::Listen => {
                let socket = fds.into_iter().next().context("no socket came; rebuild the older of daemon and worker");
                if let Err(error) = socket.and_then(|socket| self.common.channel.listen(socket)) {
                    self.common.channel.tell(None, format!("{error:#}"));
                }
            }
            ToWorker::DriverState { nic } => self.of(nic, |attachment| attachment.stored(fds.into_iter().next())),
            ToWorker::Neighbour { nic, number, addresses } => {
                self.of_vni(nic, |attachment, common| attachment.meet(common, number, &addresses, fds))
            }
            ToWorker::NoNeighbour { nic, number } => self.of_vni(nic, |attachment, common| {
                attachment.part(common, number);
                Ok(())
            }),
            ToWorker::Directory { nic, nodes } => self.of_vni(nic, |attachment, common| {
                attachment.keep_only(common, &nodes);
                attachment.look_up_in(
                    common,
                    fds.into_iter().next().context("no directory came; rebuild the older of daemon and worker")?,
                )
            }),
            ToWorker::Capture { nic, capture, interface, snap } => {
                if let Err(error) = self.capture(nic, (capture, interface, snap), fds) {
                    self.common.channel.tell(Some(nic), sentence(&error));
                }
            }
            // A NIC that was left already has no captures left to end.
            ToWorker::NoCapture { nic, capture } => {
                if let Some(index) = self.index(nic) {
                    captured::end(self.attachments[index].captures(&mut self.common), capture);
                }
            }
            ToWorker::Client { nic, client } => {
                self.of_vni(nic, |attachment, common| attachment.hear_of_client(common, client, fds))
            }
            ToWorker::NoClient { nic, socket } => self.of_vni(nic, |attachment, _| {
                attachment.forget_client(socket);
                Ok(())
            }),
            ToWorker::Again => self.again(),
            ToWorker::Counts => {
                for attachment in &mut self.attachments {
                    attachment.tell_counts(&mut self.common);
                }
            }
            ToWorker::End => {
                for attachment in &mut self.attachments {
                    attachment.park(&mut self.common);
                }
                self.common.cpus.step_aside();
                self.over = true;
            }
        }
    }

    fn of(&mut self, nic: u32, then: impl FnOnce(&mut dyn Attached<D>)) {
        match self.index(nic) {
            Some(index) => then(&mut *self.attachments[index]),
            None => {
                self.common
                    .channel
                    .tell(Some(nic), format!("a message came about NIC {nic}, of which this worker has nothing"));
            }
        }
    }

    /// Starts a capture on a NIC: its driver copies frames to the capture's socket.
    fn capture(&mut self, nic: u32, (number, interface, snap): (u32, u32, u32), fds: Vec<OwnedFd>) -> Result<()> {
        let [socket, missed] = <[OwnedFd; 2]>::try_from(fds)
            .ok()
            .context("a capture needs a socket and memory to count in; rebuild the older of daemon and worker")?;
        let index = self
            .index(nic)
            .with_context(|| format!("NIC {nic} is to be captured, of which this worker has nothing"))?;
        let terms = Terms { number, socket, missed, interface, snap };
        let capture = Capture::begin(terms).context("a capture cannot begin")?;
        captured::add(self.attachments[index].captures(&mut self.common), capture);
        Ok(())
    }

    /// Handles a message about the node's end of a VNI.
    fn of_vni(&mut self, nic: u32, then: impl FnOnce(&mut VniAttachment<D>, &mut Common) -> Result<()>) {
        let end = self.index(nic).and_then(|index| self.attachments[index].vni());
        let done = match end {
            Some(end) => then(end, &mut self.common),
            _ => Err(anyhow::anyhow!("a message came about end {nic} of a VNI, of which this worker has nothing")),
        };
        if let Err(error) = done {
            self.common.channel.tell(Some(nic), sentence(&error));
        }
    }

    fn take_in(
        &mut self,
        number: u32,
        name: String,
        (iova, fenced, bundle): (u64, bool, message::DeviceBundle),
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        ensure!(self.index(number).is_none(), "NIC {number} was given to this worker twice");
        let mut fds = fds.into_iter();
        let lease_page =
            fds.next().context("the NIC's lease page did not come; rebuild the older of daemon and worker")?;
        let lease_page = LeasePage::over(lease_page).context("the NIC's lease page")?;
        let text = bundle::read(&bundle);
        let way = text.as_ref().map(|text| (text.driver, bundle::is_vfio(text))).ok();
        let is_vni = bundle.kind == message::vni::KIND;
        let given = Given { number, name, iova, fenced, bundle, fds: fds.collect(), lease_page, text };
        if is_vni {
            self.attachments.push(Box::new(VniAttachment::new(given, &self.common, &self.told)));
            self.idle_looks = IDLE_LOOKS_OF_KERNEL;
            return Ok(());
        }
        let (common, told) = (&self.common, &self.told);
        self.attachments.push(match way {
            Some((Driver::VirtioNet, true)) => attachment::<VirtioNet<Vfio>, D>(given, common, told),
            Some((Driver::VirtioNet, false)) => attachment::<VirtioNet<VfioUser>, D>(given, common, told),
            Some((Driver::E1000e | Driver::Rtl8139, true)) => attachment::<E1000e<Vfio>, D>(given, common, told),
            // Any attachment refuses a device bundle that it does not understand, and names the fault.
            Some((Driver::E1000e | Driver::Rtl8139, false)) | None => {
                attachment::<E1000e<VfioUser>, D>(given, common, told)
            }
        });
        Ok(())
    }

    /// Reports our identity, and the clients of our ends, to a daemon that asks for it: one that has just started, or one
    /// that had no room for a client.
    fn again(&mut self) {
        if self.common.channel.is_of_another() {
            self.forget_former_daemon();
        }
        for attachment in &mut self.attachments {
            if let Some(end) = attachment.vni() {
                end.tell_client_again(&mut self.common);
            }
        }
        let nics = self.attachments.iter().map(|attachment| attachment.number()).collect();
        let mine = ToDaemon::Mine { party: self.common.party.0.get(), node: self.name.clone(), nics };
        self.common.channel.write(&mine, Vec::new());
    }

    /// Leaves all NICs that were about to move to memory of ours; these stay with the workers that have their old memory.
    /// The new daemon knows neither our memory nor whether the giver had to be fenced.
    fn forget_former_daemon(&mut self) {
        for attachment in &mut self.attachments {
            // The captures came through the former daemon.
            *attachment.captures(&mut self.common) = None;
            if attachment.is_apart() {
                attachment.hear(&mut self.common, Input::Order(Order::Leave));
            }
        }
        self.attachments.retain(|attachment| !attachment.is_left());
    }
}

/// Returns an attachment for a NIC with this driver and this way to its card.
fn attachment<N, D>(given: Given, common: &Common, told: &D::Told) -> Box<dyn Attached<D>>
where
    N: InPlace + Repoint + Scrub + 'static,
    N::Bus: BundleBus,
    D: FrameHandler,
{
    Box::new(Attachment::<N, D>::new(given, common, told))
}
