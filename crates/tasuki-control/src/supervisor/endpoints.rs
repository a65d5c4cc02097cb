//! The endpoints of nodes on a VNI, except TAPs: the daemon makes them, gives their descriptors to the nodes' workers,
//! and keeps them for the next daemon.
//!
//! The daemon keeps a connected client's descriptors beside the endpoint's own, and gives them to every worker of the
//! node. So the next driver goes on with the client. The daemon does not look into them, as a stranger made them; and a
//! worker that lies about them lies to its own node.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::AddressFamily;
use serde::{Deserialize, Serialize};
use tasuki_relay::message::{self, ToWorker};
use tasuki_shm::wake::is_eventfd;
use tasuki_tap::namespace::{Identity, Namespace, Unnamed};
use tasuki_tap::packet::{self, Link};

use super::card::Card;
use super::deposits::{Found, Key};
use super::link_news::{LOOK_AT_CABLE, LinkNews};
use super::sockets::Look;
use super::worker::{Worker, why_missed};
use super::{About, Supervisor, is_news, now};
use crate::api::peer::Peer;
use crate::bucket::Bucket;
use crate::endpoint::Kind;
use crate::endpoint::interface::Interface;
use crate::foreign::{self, Foreign};
use crate::{channel, config};

/// Bytes of a client's name, at most: memif has 32 for it, of which each may have become three.
const NAME_MAX: usize = 96;

/// Pause before a worker is asked again for a client for which the daemon had no room.
const CLIENT_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// How many sentences of programs that come and leave users hear of an endpoint at once, and how often after that.
const CLIENT_EVENTS_AT_ONCE_MAX: u32 = 20;
const CLIENT_EVENT_EVERY: Duration = Duration::from_secs(10);

/// How often users hear of other names of an interface at once, and after that.
const RENAMES_AT_ONCE_MAX: u32 = 5;
const RENAME_EVERY: Duration = Duration::from_secs(10);

/// Bytes of a client's description, at most.
const TEXT_MAX: usize = 8192;

/// An endpoint, as far as it exists.
#[derive(Debug)]
pub struct Endpoint {
    /// Name of its node.
    node: String,
    /// Its node's work, which has its settings.
    pub(super) work: config::Work,
    fd: Option<OwnedFd>,
    /// The mark that told it from others when it was made, and the one with which it was adopted.
    pub(super) mark: Option<String>,
    pub(super) adopted: Option<String>,
    /// It was made or adopted, and the driver may have the one before. That is not looked after before a time.
    pub(super) was_remade: bool,
    pub(super) not_before: Duration,
    pub(super) client: Option<Connected>,
    /// How often users hear that programs come and leave.
    pub(super) client_events: Bucket,
    /// Looks at the memory of the machine that is connected.
    pub(super) look: Option<Look>,
    /// Why programs do not find its socket, if it was deleted.
    pub(super) lost: Option<String>,
    /// Its interface is a bridge.
    is_bridge: bool,
    /// Its interface was gone when the daemon looked last.
    pub is_gone: bool,
    /// Its interface was there, and no namespace had the name of its own.
    is_nameless: bool,
    /// The interface's name and link when the daemon looked last, and what users hear of the link.
    link: Option<Link>,
    link_news: LinkNews,
    /// The name that it has in place of the one by which the next daemon would look for it, and how often users hear of it.
    other_name: Option<String>,
    renames: Bucket,
}

/// Text of a client's entry in the keeper.
#[derive(Debug, Serialize, Deserialize)]
struct ClientText {
    #[serde(flatten)]
    client: message::Client,
    /// The node at which it is connected. An earlier daemon does not say it.
    node: Option<String>,
}

/// A connected client.
#[derive(Debug)]
pub(super) struct Connected {
    message: message::Client,
    /// Its socket first.
    pub(super) fds: Foreign,
    /// Inode number of that socket.
    pub(super) socket: u64,
}

impl Connected {
    /// Returns `None` if this cannot be a client.
    fn new(message: message::Client, fds: Foreign) -> Option<Self> {
        let message::Client { name, text } = &message;
        if name.len() > NAME_MAX || text.len() > TEXT_MAX || !(1..=message::CLIENT_FDS_MAX).contains(&fds.len()) {
            return None;
        }
        // All that front ends and clients of memif bring. To close another file can take as long as its file system or its peer
        // likes, and the keeper and each process that tasukid starts have to close these, too.
        let is_unix = |fd: &OwnedFd| rustix::net::sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX);
        let is_a_clients = |fd: &OwnedFd| foreign::seals(fd).is_some() || is_unix(fd) || is_eventfd(fd.as_fd());
        if !is_unix(&fds[0]) || !fds.iter().all(is_a_clients) {
            return None;
        }
        let socket = rustix::fs::fstat(&fds[0]).ok()?.st_ino;
        Some(Connected { message, fds, socket })
    }

    /// Returns whether this is the same client, in the same state.
    fn is(&self, other: &Connected) -> bool {
        self.socket == other.socket && self.message == other.message
    }

    /// Returns the process that connected, if it is seen from here.
    pub(super) fn process(&self) -> Option<Peer> {
        Peer::of(&self.fds[0]).ok().filter(|peer| peer.pid != 0)
    }

    /// Returns whether it has more descriptors than earlier workers and daemons take.
    fn needs_many_fds(&self) -> bool {
        self.fds.len() > message::NARROW_FDS_MAX
    }

    /// Tells a worker of it. One that cannot hear of it is not told, and refuses to get ready.
    fn tell(&self, worker: &Worker, nic: u32) -> Result<(), Errno> {
        if self.needs_many_fds() && !worker.takes_many_fds() {
            return Ok(());
        }
        worker.write(&ToWorker::Client { nic, client: self.message.clone() }, &channel::lend(&self.fds))
    }
}

impl Endpoint {
    /// Returns the endpoint of a node, not made yet, under its label.
    pub fn of(node: &config::Node) -> Option<(String, Self)> {
        let label = node.endpoint()?.label();
        let work = node.work.clone();
        let client_events = Bucket::new(CLIENT_EVENTS_AT_ONCE_MAX, CLIENT_EVENT_EVERY, now());
        let end = Endpoint {
            node: node.name.clone(),
            work,
            fd: None,
            mark: None,
            adopted: None,
            was_remade: false,
            not_before: Duration::ZERO,
            client: None,
            client_events,
            look: None,
            lost: None,
            is_bridge: false,
            is_gone: false,
            is_nameless: false,
            link: None,
            link_news: LinkNews::new(now()),
            other_name: None,
            renames: Bucket::new(RENAMES_AT_ONCE_MAX, RENAME_EVERY, now()),
        };
        Some((label, end))
    }

    /// Changes its settings to those of its node. Its label stays.
    pub fn set(&mut self, node: &config::Node) {
        self.work = node.work.clone();
    }

    /// Returns its mark.
    pub fn mark(&self) -> Option<String> {
        self.mark.clone()
    }

    /// Returns what the keeper gets: the descriptor, if it exists, and its mark.
    pub fn deposit(&self) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        Some((self.mark.clone()?, vec![self.fd.as_ref()?.as_fd()]))
    }

    /// Returns what the keeper gets of the client that is connected: text and descriptors.
    pub fn client_deposit(&self) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        let Connected { message, fds, .. } = self.client.as_ref()?;
        let text = ClientText { client: message.clone(), node: Some(self.node.clone()) };
        Some((serde_json::to_string(&text).expect("plain data"), channel::lend(fds)))
    }

    /// Makes it, unless it exists.
    pub fn make(&mut self) -> Result<&OwnedFd> {
        if self.fd.is_none() {
            self.make_again()?;
        }
        self.fd.as_ref().context("it was just made")
    }

    /// Adopts the descriptor of an earlier daemon, unless it is of no use any more. Workers that live go on with one whose
    /// name is another one's by now: it is looked after then.
    fn adopt(&mut self, mark: String, fd: Option<OwnedFd>, lives: bool) {
        let now = self.work.endpoint().and_then(|kind| kind.mark());
        let is_its = |fd: &OwnedFd| now.as_ref() == Some(&mark) && !self.has_no_interface(fd);
        self.fd = fd.filter(|fd| lives || is_its(fd));
        self.look_at_kind();
        (self.adopted, self.mark, self.was_remade) = (Some(mark.clone()), Some(mark), true);
    }

    /// Returns whether it is a socket of an interface that is gone, or not in the namespace any more that has the name.
    fn has_no_interface(&self, fd: &OwnedFd) -> bool {
        let config::Work::Interface(interface) = &self.work else { return false };
        let is_elsewhere =
            || identity_of(fd).zip(interface.place().identity()).is_some_and(|(is_in, named)| is_in != named);
        packet::is_gone(fd) || is_elsewhere()
    }

    /// Returns its interface, if it is one, as the kernel knows it: the namespace, and the number there.
    fn interface(&self) -> Option<(Identity, u32)> {
        let fd = self.fd.as_ref().filter(|_| matches!(self.work, config::Work::Interface(_)))?;
        Some((identity_of(fd)?, packet::index(fd)?))
    }

    /// Returns whether a program is connected.
    pub fn has_client(&self) -> bool {
        self.client.is_some()
    }

    /// Returns the pid of the process that connected, if it is seen from here.
    pub fn process(&self) -> Option<u32> {
        self.client.as_ref().and_then(Connected::process).map(|peer| peer.pid)
    }

    /// Makes it anew. What workers have of it goes on for those that are connected.
    pub(super) fn make_again(&mut self) -> Result<()> {
        let kind = self.work.endpoint().context("the node has none")?;
        self.fd = Some(kind.make()?);
        (self.mark, self.was_remade, self.is_gone) = (kind.mark(), true, false);
        self.look_at_kind();
        Ok(())
    }

    fn look_at_kind(&mut self) {
        let is_interface = matches!(self.work, config::Work::Interface(_));
        self.is_bridge = self.fd.as_ref().is_some_and(|fd| is_interface && packet::is_bridge(fd));
    }

    /// Returns a sentence if its interface is a bridge. That works, and costs all ports of the bridge their bandwidth: a bridge
    /// learns from frames that come in at a port alone, and those of the VNI come from the bridge itself.
    pub(super) fn why_flooded(&self) -> Option<String> {
        let config::Work::Interface(bridge) = self.work.clone() else { return None };
        let (label, name) = (bridge.label(), &bridge.name);
        let pair = Interface { name: "tasuki0".to_owned(), ..bridge.clone() }.label();
        let place = if bridge.netns.is_some() { "in its namespace" } else { "beside it" };
        (self.is_bridge && !self.is_gone).then(|| format!(
            "the interface {label} of node {} is a bridge, which sends frames for nodes of the VNI to all its ports, too, for it does not learn their addresses: make a pair of interfaces of its MTU {place} (ip link add tasuki0 mtu N type veth peer name tasuki1 mtu N), bring both up, give the bridge one (ip link set tasuki1 master {name}), and let the node have the other instead ({pair})",
            self.node
        ))
    }

    /// Looks whether its interface is gone. Returns whether that is news.
    pub fn has_lost_its_interface(&mut self) -> bool {
        let is_gone = self.fd.as_ref().is_some_and(|fd| self.has_no_interface(fd));
        !std::mem::replace(&mut self.is_gone, is_gone) && is_gone
    }

    /// Looks at the name and the link of its interface, if it is one that is there. Returns news of the link, as a sentence,
    /// and whether it is news that it, or its namespace, has another name or none.
    fn look_at_link(&mut self) -> (Option<String>, bool) {
        let config::Work::Interface(interface) = &self.work else { return (None, false) };
        // The socket keeps a namespace that has lost its name, and is of use.
        let place = interface.place();
        let is_nameless = place != Namespace::Own && self.fd.is_some() && !self.is_gone && place.identity().is_none();
        let was_nameless = std::mem::replace(&mut self.is_nameless, is_nameless);
        let link = self.fd.as_ref().filter(|_| !self.is_gone).and_then(packet::link);
        let remedy = match &link {
            Some(link) if !link.is_up => format!("bring the interface up (ip link set {} up)", link.name),
            _ => LOOK_AT_CABLE.to_owned(),
        };
        let news = self.link_news.look(link.as_ref().map(up_or_down), &remedy, now());
        let sentence = news.map(|news| format!("the link of {} {news}", interface.label()));
        let name = |link: &Option<Link>| link.as_ref().map(|link| link.name.clone());
        let (was, is) = (name(&self.link), name(&link));
        self.link = link;
        if was == is || is_nameless {
            return (sentence, is_nameless && !was_nameless && self.renames.take(now()));
        }
        // The configured name may be another one by which the kernel finds it, too. To ask that means to enter its namespace.
        let index = self.fd.as_ref().and_then(packet::index);
        let is_found = || packet::index_of(&place, &interface.name) == index;
        self.other_name = is.filter(|is| *is != interface.name && !is_found());
        (sentence, self.other_name.is_some() && self.renames.take(now()))
    }

    /// Removes it. Not when the daemon exits alone: then the next daemon has it.
    pub fn close(self) {
        if let (Some(_), Some(kind)) = (self.fd, self.work.endpoint()) {
            kind.remove();
        }
    }
}

fn up_or_down(link: &Link) -> &'static str {
    if link.is_up && link.has_carrier { "up" } else { "down" }
}

/// Returns which namespace the interface of a packet socket is in.
fn identity_of(socket: &OwnedFd) -> Option<Identity> {
    Unnamed::of(packet::namespace_of(socket).ok()?).identity()
}

/// Returns that the client of this node cannot be kept.
fn no_room(node: &str) -> String {
    format!(
        "tasukid may open no more descriptors, and lacks those of the program that is connected to node {node}: a fresh worker would send it away; raise LimitNOFILE= of tasukid (ulimit -Hn)"
    )
}

impl Supervisor {
    /// Adopts the endpoints of an earlier daemon, and makes the others, except those of which workers of the nodes in
    /// `living` have the only descriptor.
    pub(super) fn begin_endpoints(&mut self, living: &[String], found: &mut Found) {
        self.endpoints = self.config.node.iter().filter_map(Endpoint::of).collect();
        let of_living: Vec<String> =
            living.iter().filter_map(|node| Some(self.config.node(node)?.endpoint()?.label())).collect();
        for (label, end) in &mut self.endpoints {
            if let Some((mark, fds)) = found.remove(&Key::Endpoint(label.clone())) {
                end.adopt(mark, fds.into_iter().next(), of_living.contains(label));
            }
            let client = found.remove(&Key::Client(label.clone())).and_then(|(text, fds)| {
                let fds = Foreign::new(fds);
                let ClientText { client, node } = serde_json::from_str(&text).ok()?;
                // The state of another node's client is in that node's memory. This client has to connect anew.
                let is_ours = of_living.contains(label) || node.is_none_or(|node| node == end.node);
                Some((client, fds)).filter(|_| is_ours)
            });
            end.client = client.and_then(|(client, fds)| Connected::new(client, fds));
            end.look_at_memory();
        }
        // The others are of nodes that are gone. An earlier daemon may have taken descriptors of any kind for them.
        for (_, (_, fds)) in found.iter_mut().filter(|(key, _)| matches!(key, Key::Client(_))) {
            drop(Foreign::new(std::mem::take(fds)));
        }
        let labels: Vec<String> = self.endpoints.keys().filter(|label| !of_living.contains(label)).cloned().collect();
        for label in labels {
            // A node that was added by hand is in no file that could be mended. Its worker is started once the
            // endpoint exists.
            if let Err(error) = self.make_endpoint(&label) {
                self.note(About::default(), format!("{label} is not served yet: {error:#}"));
            }
        }
    }

    /// Makes the endpoint of this label, unless it exists.
    fn make_endpoint(&mut self, label: &str) -> Result<&OwnedFd> {
        let mut end = self.endpoints.remove(label).with_context(|| format!("there is no endpoint {label}"))?;
        let made = self.make_alone(&mut end);
        let end = self.endpoints.entry(label.to_owned()).or_insert(end);
        made.and_then(|()| end.make())
    }

    /// Makes an endpoint that is not among the others yet, unless it exists. An interface has several names, and one that two
    /// nodes had would give each frame to both, and to each other.
    pub(super) fn make_alone(&self, end: &mut Endpoint) -> Result<()> {
        let is_new = end.fd.is_none();
        end.make()?;
        let its = end.interface().filter(|_| is_new);
        let ends = || self.endpoints.values().find(|other| its.is_some() && other.interface() == its);
        let taps = || self.taps.values().find(|tap| its.is_some_and(|its| tap.is_at(its)));
        let node = ends().map(|other| &other.node).or_else(|| taps().and_then(|tap| tap.node.as_ref()));
        let Some(node) = node else { return Ok(()) };
        end.fd = None;
        bail!("the interface is node {node:?}'s as well, by another name; on a VNI each node has its own")
    }

    /// Returns the description and the descriptor for a worker of this node, if it is to have an endpoint.
    pub(super) fn endpoint_for(&mut self, node: &str) -> Result<Option<(message::Endpoint, OwnedFd)>> {
        let Some(config) = self.config.node(node) else { return Ok(None) };
        let Some(kind) = config.endpoint() else { return Ok(None) };
        let (label, text, limits, latency_us) = (kind.label(), kind.text(), config.limits(), config.latency_us);
        let kind = kind.kind().to_owned();
        let room = matches!(config.work, config::Work::Interface(_)).then(|| config::in_socket(limits[0]));
        let description = message::Endpoint { kind, label: label.clone(), text, limits, latency_us };
        let fd = self.make_endpoint(&label)?.try_clone()?;
        room.into_iter().for_each(|bytes| packet::set_room(&fd, bytes));
        self.mark_deposit(Key::Endpoint(label));
        Ok(Some((description, fd)))
    }

    /// Returns the endpoint at which a worker serves clients by way of an end of a VNI: its own node's, or none.
    fn endpoint_of(&mut self, number: u32, nic: u32) -> Option<&mut Endpoint> {
        let node = self.node_with_end(number, nic)?;
        let label = node.endpoint().filter(|kind| kind.socket().is_some())?.label();
        self.endpoints.get_mut(&label)
    }

    /// Returns a worker's node, if that has this end of a VNI.
    fn node_with_end(&self, number: u32, nic: u32) -> Option<&config::Node> {
        let node = &self.workers.get(&number)?.record.node;
        let is_its = |card: &Card| card.vni().is_some() && card.config.node == *node;
        self.cards.get(&nic).filter(|card| is_its(card))?;
        self.config.node(node)
    }

    /// Returns whether a worker serves queues of another node's machine by way of this end.
    pub(super) fn is_borrower(&self, number: u32, nic: u32) -> bool {
        self.node_with_end(number, nic).is_some_and(|it| it.queue_of().is_some() && self.config.shares_machine(it))
    }

    /// Handles a worker's report of a client that it serves, or has heard of: the node's other workers are to know
    /// the client, too. The driver's report counts more; a report from a worker that has just passed the lease goes
    /// to the worker that has it.
    pub(super) fn on_client(&mut self, number: u32, nic: u32, client: message::Client, fds: Foreign) {
        let is_often = self.workers.get_mut(&number).is_some_and(|worker| !worker.client_reports.take(now()));
        if is_often {
            return self.kill_worker(number, "reports its node's client too often".to_owned());
        }
        if self.is_borrower(number, nic) {
            return self.on_borrower(number, nic, true);
        }
        let holder = self.cards.get(&nic).and_then(|card| card.holder());
        if self.endpoint_of(number, nic).is_none() {
            return self.kill_worker(number, format!("speaks of a client at NIC {nic}, where its node has none"));
        }
        let Some(connected) = Connected::new(client, fds) else {
            return self.kill_worker(number, "sent descriptors that are not a client's".to_owned());
        };
        self.clear_client_trouble(number, nic);
        let Some(end) = self.endpoint_of(number, nic) else { return };
        let knows = end.client.as_ref().is_some_and(|known| known.is(&connected));
        if knows {
            return;
        }
        if end.client.is_none() || holder.is_none_or(|holder| holder == number) {
            let needs_many_fds = connected.needs_many_fds();
            let is_new = end.client.as_ref().is_none_or(|client| client.socket != connected.socket);
            let process = is_new.then(|| connected.process());
            end.client = Some(connected);
            end.look_at_memory();
            if let Some(process) = process {
                self.note_client(number, nic, process);
            }
            self.mark_client_deposit(number);
            self.note_many_fds(nic, needs_many_fds);
            return self.tell_others_of_client(nic, number);
        }
        if let Some(worker) = holder.and_then(|holder| self.workers.get(&holder)) {
            // If the driver does not hear of it, the client finds its socket closed.
            let _ = connected.tell(worker, nic);
        }
    }

    /// Handles a report of a client whose descriptors this daemon may not open. It asks for it again: a worker that
    /// goes on without the client sends it away.
    pub(super) fn on_client_without_descriptors(&mut self, number: u32, nic: u32) {
        let is_often = self.workers.get_mut(&number).is_some_and(|worker| !worker.client_reports.take(now()));
        if !is_often && self.is_borrower(number, nic) {
            // Its descriptor is of no use here.
            return self.on_borrower(number, nic, true);
        }
        if is_often || self.endpoint_of(number, nic).is_none() {
            return self.kill_worker(number, "reports a client too often, or at an end that is not its own".to_owned());
        }
        let (Some(worker), Some(card)) = (self.workers.get_mut(&number), self.cards.get_mut(&nic)) else { return };
        worker.asked.client_at = Some(now() + CLIENT_RETRY_PAUSE);
        let (node, name, trouble) = (worker.record.node.clone(), card.name().to_owned(), no_room(&worker.record.node));
        if is_news(&mut card.trouble, &trouble) {
            self.note(About::worker(&node, number).of_nic(&name), trouble);
        }
    }

    fn clear_client_trouble(&mut self, number: u32, nic: u32) {
        let (Some(worker), Some(card)) = (self.workers.get_mut(&number), self.cards.get_mut(&nic)) else { return };
        worker.asked.client_at = None;
        card.trouble.take_if(|trouble| *trouble == no_room(&worker.record.node));
    }

    /// Asks for clients for which there was no room.
    pub(super) fn ask_for_clients(&mut self) {
        for worker in self.workers.values_mut().filter(|worker| worker.serves() && !worker.asked.again) {
            let is_busy = self.jobs.iter().any(|job| job.node() == worker.record.node);
            if !is_busy && worker.asked.client_at.take_if(|at| *at <= now()).is_some() {
                worker.asked.again = worker.write(&ToWorker::Again, &[]).is_ok();
            }
        }
    }

    /// Handles a worker's report that a client is gone.
    pub(super) fn on_client_gone(&mut self, number: u32, nic: u32, socket: u64) {
        if self.is_borrower(number, nic) {
            return self.on_borrower(number, nic, false);
        }
        self.clear_client_trouble(number, nic);
        let Some(end) = self.endpoint_of(number, nic) else { return };
        if end.client.take_if(|client| client.socket == socket).is_none() {
            return;
        }
        self.note_client_gone(number, nic);
        self.mark_client_deposit(number);
        self.note_many_fds(nic, false);
        for (nic, worker) in self.hearers_of_client(nic, number) {
            // A worker that does not hear of it finds out when it goes on.
            if let Some(worker) = self.workers.get(&worker) {
                let _ = worker.write(&ToWorker::NoClient { nic, socket }, &[]);
            }
        }
    }

    /// Returns the workers that are to hear of the client at an end, except `but`, each with its own end: those of the end, and
    /// those of the nodes that serve the same machine.
    fn hearers_of_client(&self, nic: u32, but: u32) -> Vec<(u32, u32)> {
        let node = self.cards.get(&nic).map(|card| card.node().to_owned()).unwrap_or_default();
        let borrowers = self.config.borrowers_of(&node).filter_map(|node| Some(self.end_on_vni(&node.name)?.number));
        let ends = std::iter::once(nic).chain(borrowers);
        let hear = |nic: u32| {
            let has_it = move |worker: &&Worker| worker.nics.contains_key(&nic) && worker.party() != but;
            self.workers.values().filter(has_it).map(move |worker| (nic, worker.party()))
        };
        ends.flat_map(hear).collect()
    }

    /// Notes that a program has connected. What an earlier one was told does not hold for it.
    fn note_client(&mut self, number: u32, nic: u32, process: Option<Peer>) {
        if let Some(card) = self.cards.get_mut(&nic).filter(|card| card.holder() == Some(number)) {
            card.trouble = None;
        }
        let by = process.map_or_else(
            || "a process that tasukid does not see".to_owned(),
            |it| format!("process {} ({})", it.pid, it.program),
        );
        self.note_of_client(number, nic, |label| format!("a program has connected to {label}: {by}"));
    }

    fn note_client_gone(&mut self, number: u32, nic: u32) {
        self.note_of_client(number, nic, |label| format!("the program at {label} has left"));
    }

    /// Notes this, but not all of programs that come and leave again and again.
    fn note_of_client(&mut self, number: u32, nic: u32, sentence: impl FnOnce(&str) -> String) {
        let Some(client_events) = self.endpoint_of(number, nic).map(|end| &mut end.client_events) else { return };
        let left_out = client_events.left_out(now());
        if !client_events.take(now()) {
            return;
        }
        let Some(node) = self.workers.get(&number).map(|worker| worker.record.node.clone()) else { return };
        let label = self.config.node(&node).and_then(config::Node::label).unwrap_or_default();
        if let Some(count) = left_out {
            self.note(
                About::node(&node),
                format!("{count} events of programs that came to {label} and left are left out"),
            );
        }
        self.note(About::node(&node), sentence(&label));
    }

    /// Takes note of whether an end has a client that earlier workers cannot hear of. Those that have the end would serve
    /// nobody: they are ended.
    fn note_many_fds(&mut self, nic: u32, needs_many_fds: bool) {
        let version = if needs_many_fds { message::vni::WIDE_VERSION } else { message::vni::VERSION };
        let Some(opened) = self.cards.get_mut(&nic).and_then(|card| card.opened.as_mut()) else { return };
        if std::mem::replace(&mut opened.bundle.version, version) == version {
            return;
        }
        self.mark_deposit(Key::Card(nic));
        let is_too_old =
            |worker: &&Worker| needs_many_fds && worker.nics.contains_key(&nic) && !worker.takes_many_fds();
        let too_old: Vec<u32> = self.workers.values().filter(is_too_old).map(Worker::party).collect();
        for number in too_old {
            self.kill_worker(
                number,
                "is from before virtual machines of more than 8 pairs of queues, and its node has one".to_owned(),
            );
        }
    }

    /// Returns where a client is connected that earlier daemons cannot keep, if there is one.
    pub(super) fn client_with_many_fds(&self) -> Option<String> {
        let mut ends = self.endpoints.iter();
        ends.find(|(_, end)| end.client.as_ref().is_some_and(Connected::needs_many_fds)).map(|(label, _)| label.clone())
    }

    fn mark_client_deposit(&mut self, number: u32) {
        let node = self.workers.get(&number).and_then(|worker| self.config.node(&worker.record.node));
        let label = node.and_then(config::Node::endpoint).map(|kind| kind.label());
        label.into_iter().for_each(|label| self.mark_deposit(Key::Client(label)));
    }

    /// Tells all workers of an end except `but` about the client that is connected there.
    fn tell_others_of_client(&mut self, nic: u32, but: u32) {
        self.hearers_of_client(nic, but).into_iter().for_each(|(nic, number)| self.tell_client(nic, number));
    }

    /// Tells all workers of an end that do not drive it about the client.
    pub(super) fn tell_all_of_client(&mut self, nic: u32) {
        let holder = self.cards.get(&nic).and_then(|card| card.holder());
        self.tell_others_of_client(nic, holder.unwrap_or(0));
    }

    /// Tells a worker that was given an end about the client that is connected there, if any.
    pub(super) fn tell_client(&mut self, nic: u32, number: u32) {
        let Some(node) = self.node_with_end(number, nic) else { return };
        let Some(kind) = self.config.interface_node(node).endpoint().filter(|kind| kind.socket().is_some()) else {
            return;
        };
        let Some(client) = self.endpoints.get(&kind.label()).and_then(|end| end.client.as_ref()) else { return };
        let told = self.workers.get(&number).map_or(Ok(()), |worker| client.tell(worker, nic));
        if why_missed(told).is_some() {
            self.kill_worker(number, "does not take messages about its node's client".to_owned());
        }
    }

    /// Tells users of interfaces whose link goes down or comes back, and of those with another name. Neither stops a worker.
    pub(super) fn tell_of_endpoints_links(&mut self) {
        let looks = self.endpoints.values_mut().map(|end| (end.node.clone(), end.look_at_link()));
        for (node, (link, is_renamed)) in looks.collect::<Vec<_>>() {
            let renamed = is_renamed.then(|| self.why_renamed(&node)).flatten();
            link.into_iter().chain(renamed).for_each(|sentence| self.note(About::node(&node), sentence));
        }
    }

    /// Returns whether the link of the interface for which an end stands is `up` or `down`, if it stands for one.
    pub(super) fn link_behind(&self, card: &Card) -> Option<&'static str> {
        let node = self.config.node(card.node()).filter(|_| card.vni().is_some())?;
        match node.endpoint() {
            Some(endpoint) => self.endpoints.get(&endpoint.label())?.link.as_ref().map(up_or_down),
            None => self.veth_end_of(&node.name)?.has_link().map(|is_up| if is_up { "up" } else { "down" }),
        }
    }

    /// Returns a sentence if the node's interface has another name by now, or its namespace has none.
    pub(super) fn why_renamed(&self, name: &str) -> Option<String> {
        let label = self.config.node(name)?.endpoint()?.label();
        let end = self.endpoints.get(&label)?;
        let goes_on = "its workers go on, but if they die together with tasukid, the next ones";
        if end.is_nameless {
            return Some(format!(
                "the namespace of the interface {label} of node {name} has lost its name: {goes_on} do not find it; give it the name again (ip netns attach)"
            ));
        }
        let other = end.other_name.as_ref()?;
        let remedy = match self.by_hand.contains(name) {
            true => "remove the node and add it with that name",
            false => "change the file",
        };
        Some(format!(
            "the interface {label} of node {name} is called {other} by now: {goes_on} look for the former name; rename it back, or {remedy}"
        ))
    }

    /// Removes all endpoints.
    pub(super) fn close_endpoints(&mut self) {
        std::mem::take(&mut self.endpoints).into_values().for_each(Endpoint::close);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;

    use rustix::event::EventfdFlags;
    use rustix::fs::MemfdFlags;

    use super::*;

    /// A descriptor of another kind can take an hour to close, also as the last one of many.
    ///
    /// row: T25, row: T124
    #[test]
    fn a_client_brings_memory_eventfds_and_unix_sockets_and_nothing_else() {
        let socket = || OwnedFd::from(UnixStream::pair().expect("a socket").0);
        let memory = || rustix::fs::memfd_create("client", MemfdFlags::ALLOW_SEALING).expect("memory");
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let is_one = |fds: Vec<OwnedFd>| {
            let message = message::Client { name: "vm".to_owned(), text: String::new() };
            Connected::new(message, Foreign::new(fds)).is_some()
        };
        // As a second front end comes: its socket is one of the others.
        assert!(is_one(vec![socket(), memory(), eventfd(), socket(), memory(), eventfd()]));
        let tcp = || OwnedFd::from(TcpListener::bind("127.0.0.1:0").expect("a socket"));
        let file = || OwnedFd::from(std::fs::File::open("/proc/self/status").expect("a file"));
        let pipe = || rustix::pipe::pipe().expect("a pipe").1;
        for other in [tcp, file, pipe] {
            assert!(!is_one(vec![other()]) && !is_one(vec![socket(), memory(), eventfd(), other()]));
        }
        assert!(!is_one(vec![memory(), socket()]), "the connection comes first");
    }
}
