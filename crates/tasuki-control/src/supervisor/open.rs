//! Opens cards. The opener of a device has privileges, and ends once the card runs; its driver never has any.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tasuki_relay::message::{DeviceBundle, ToDaemon, lease_page};
use tasuki_relay::wire::{Order, Reason};

use super::card::{Card, LeasePage, Opened, Opener, Opening, Speech};
use super::jobs::Job;
use super::policy;
use super::worker::{Readiness, Worker};
use super::{About, Supervisor, Token, WORKER_TIMEOUT, bundles, epoll_add, iova_of, is_news, now};
use crate::channel::{self, Nothing};
use crate::config::{self, Confine, Device};
use crate::jail::Terms;
use crate::log::plain;
use crate::process::Process;

/// How many messages of an opener are read before the daemon looks after the others.
const MESSAGES_AT_ONCE_MAX: usize = 64;

/// How many sentences an opener may tell users, and how long each may be.
const SENTENCES_MAX: usize = 16;
const SENTENCE_MAX: usize = 1000;

/// Returns an option in a model's wire that would give it something of the machine.
fn out_of_reach(wire: &[String]) -> Option<&str> {
    let words = ["--tap", "--dgram", "--pcap"];
    let reaches = |word: &&String| words.contains(&word.split('=').next().unwrap_or_default());
    wire.iter().find(reaches).map(String::as_str)
}

/// Starts a process that the daemon listens to: first its jail, then its sentences for users.
fn speaking(command: &mut Command, stdin: OwnedFd, terms: Option<Terms>) -> Result<(Process, Speech)> {
    let stdout_is_jails = terms.is_some();
    let (speech, theirs) = Speech::new(terms).context("the kernel has no pipes left")?;
    let stdout = if stdout_is_jails { theirs.try_clone()?.into() } else { Stdio::null() };
    command.stdin(Stdio::from(stdin)).stdout(stdout).stderr(theirs);
    Ok((Process::spawn(command)?, speech))
}

/// Connects to a card's server, which may be any process. Does not wait for one that accepts no connection.
fn connect(path: &Path) -> Result<OwnedFd> {
    let at = path.display();
    let file = path.metadata();
    ensure!(file.is_ok(), "there is no socket at {at}; start the device's server, or correct the path");
    ensure!(file.is_ok_and(|file| file.file_type().is_socket()), "{at} is not a socket; correct the path");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).with_context(|| {
        format!("no server of a device accepts connections at {at}; start one, or end its present client")
    })?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

/// Returns whether the card, and not the worker, is the reason that the worker cannot take the NIC.
fn is_of_the_card(reason: &Reason) -> bool {
    matches!(
        reason,
        Reason::WrongDriverState { .. }
            | Reason::DamagedDriverState { .. }
            | Reason::LeftBehind { .. }
            | Reason::CardGone
    )
}

/// Why a NIC that is astray is opened anew.
pub(super) const ASTRAY: &str = "a worker of another node was to drive it, and may have left it in any state";

impl Supervisor {
    pub(super) fn is_opening(&self) -> bool {
        self.cards.values().any(|card| match card.opening {
            Opening::Model(_) | Opening::Opener(_) => true,
            Opening::NotBefore(_) | Opening::Open => false,
        })
    }

    pub(super) fn go_on_opening(&mut self) {
        if self.adopting {
            return;
        }
        self.begin_anew();
        let numbers: Vec<u32> = self.cards.keys().copied().collect();
        for nic in numbers {
            let may_go_on = |card: &&Card| card.closing.is_none() && !self.unheard.contains(&card.number);
            let Some(card) = self.cards.get(&nic).filter(may_go_on) else { continue };
            let begun = match &card.opening {
                Opening::NotBefore(at) if *at <= now() => self.begin_opening(nic),
                Opening::Model(since) => self.look_for_model(nic, *since),
                Opening::Opener(opener) if now().saturating_sub(opener.since) >= WORKER_TIMEOUT * 2 => {
                    opener.process.kill();
                    Ok(())
                }
                _ => Ok(()),
            };
            if let Err(error) = begun {
                self.not_opened(nic, &super::door::why(&error));
            }
        }
    }

    /// Reopens a NIC that no worker drives and no worker of its node can continue to drive from its last driver's
    /// state, or may. Reopening is the only remedy, also for an operator.
    fn begin_anew(&mut self) {
        let numbers: Vec<u32> = self.cards.keys().copied().collect();
        for nic in numbers {
            let Some(why) = self.is_lost(nic) else { continue };
            let Ok(lease_page) = LeasePage::create() else { continue };
            self.open_anew(nic, lease_page, &why);
        }
    }

    /// Has all workers leave the NIC, so that the card is reset, and opens it once more.
    pub(super) fn open_anew(&mut self, nic: u32, lease_page: LeasePage, why: &str) {
        let having = self.workers.values().filter(|worker| worker.nics.contains_key(&nic)).map(Worker::party);
        for number in having.collect::<Vec<_>>() {
            self.order(nic, number, Order::Leave);
        }
        // A worker that is not trusted may keep what it had of the card, and then the card would not be reset.
        self.end_strangers(Some(nic));
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.give_up(lease_page, now());
        let (name, node) = (card.name().to_owned(), card.node().to_owned());
        let about = About::node(&node).of_nic(&name);
        self.note(about, format!("{name} is opened anew, and frames under way in it are lost: {why}"));
        self.record_nic(nic);
    }

    /// Returns why no worker of its node can or may take a NIC that no worker drives, if the card is the reason.
    pub(super) fn is_lost(&self, nic: u32) -> Option<String> {
        let card =
            self.cards.get(&nic).filter(|card| card.is_parked() && card.vni().is_none() && card.closing.is_none())?;
        let is_open = matches!(card.opening, Opening::Open) && card.opened.is_some() && !card.has_lost_its_model();
        // Of a card that is astray, only a job that gives it to a stranger can make something.
        let is_awaited = |job: &Job| if card.is_astray() { job.gives(nic) } else { job.is_about(nic) };
        if !is_open || self.jobs.iter().any(is_awaited) {
            return None;
        }
        let node = card.node();
        if card.is_astray() {
            return Some(ASTRAY.to_owned());
        }
        let of_node = self.workers.of(node).filter(|worker| worker.counts());
        let readiness: Vec<Option<&Readiness>> = of_node.map(|worker| worker.nics.get(&nic)).collect();
        let lost = |readiness: &Option<&Readiness>| match readiness {
            Some(Readiness::Unfit(reason)) if is_of_the_card(reason) => Some(*reason),
            _ => None,
        };
        let reasons = readiness.iter().map(lost).collect::<Option<Vec<Reason>>>()?;
        let reason = reasons.first()?;
        Some(format!("no worker of node {node} can go on with it ({reason})"))
    }

    fn begin_opening(&mut self, nic: u32) -> Result<()> {
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        if card.vni().is_some() {
            return self.make_end(nic);
        }
        if card.config.device != Device::Sim || card.model.is_some() {
            return self.start_opener(nic);
        }
        self.start_model(nic)
    }

    fn start_model(&mut self, nic: u32) -> Result<()> {
        let Some(card) = self.cards.get(&nic) else { return Ok(()) };
        if let Some(word) = out_of_reach(&card.config.wire).filter(|_| self.config.daemon.confine != Confine::Off) {
            anyhow::bail!(
                "its model is confined, and {word} is out of its reach; serve it yourself (tasuki sim nic --socket PATH {}), and write device = \"vfio-user:PATH\"",
                card.config.wire.join(" ")
            );
        }
        let socket = self.place.model_socket(&card.config.name);
        let _ = std::fs::remove_file(&socket);
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("{} cannot be served at", socket.display()))?;
        let args = ["sim", "nic", "--stdin"].into_iter().map(str::to_owned).chain(card.config.wire.clone());
        let program = self.programs.model.clone();
        let (mut command, terms) = self.card_command(nic, &program, args.collect(), &[])?;
        let model = speaking(&mut command, listener.into(), terms).with_context(|| {
            format!("{} does not start; build it: cargo build --package tasuki-sim", program.display())
        });
        let (model, speech) = model?;
        epoll_add(&self.epoll, model.pidfd(), Token::ModelEnd(nic))?;
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        (card.model, card.speech, card.opening) = (Some(model), Some(speech), Opening::Model(now()));
        self.record_nic(nic);
        self.flush();
        Ok(())
    }

    /// Starts the card's opener once its model serves.
    fn look_for_model(&mut self, nic: u32, since: Duration) -> Result<()> {
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        let (Some(model), Some(speech)) = (&card.model, &mut card.speech) else { return Ok(()) };
        match speech.is_confined(model) {
            Ok(true) => self.start_opener(nic),
            Ok(false) if now().saturating_sub(since) < WORKER_TIMEOUT => Ok(()),
            // The model reports the reason once it has ended.
            _ => {
                model.kill();
                Ok(())
            }
        }
    }

    fn start_opener(&mut self, nic: u32) -> Result<()> {
        let party = self.next_party();
        let scrub = self.config.has_strangers();
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        let device = match &card.config.device {
            Device::Sim => Device::VfioUser(self.place.model_socket(&card.config.name)),
            other => other.clone(),
        };
        let (ours, theirs) = channel::pair().context("the kernel has no sockets left")?;
        let mut args = vec!["open".to_owned(), device.to_string(), "--iova".to_owned(), iova_of(party).to_string()];
        if let Some(ring) = card.config.ring {
            args.extend(["--ring".to_owned(), ring.to_string()]);
        }
        if let Some(mtu) = card.config.mtu {
            args.extend(["--mtu".to_owned(), mtu.to_string()]);
        }
        let joins = |node: &config::Node| node.name == card.config.node && node.work == config::Work::Uplink;
        if self.config.node.iter().any(joins) {
            // Frames for nodes of the VNI bear none of the card's addresses.
            args.push("--promiscuous".to_owned());
        } else {
            // A kernel asks for its neighbours by multicast, and a node gets a TAP while its NIC runs.
            args.push("--all-multicast".to_owned());
        }
        if scrub {
            args.push("--scrub".to_owned());
        }
        let devices: &[&str] = if matches!(device, Device::Vfio(_)) { &["/dev/vfio"] } else { &[] };
        let program = self.worker_program();
        let (mut command, terms) = self.card_command(nic, &program, args, devices)?;
        let opener = speaking(&mut command, theirs, terms);
        let (process, speech) = opener.with_context(|| format!("{} does not start", program.display()))?;
        epoll_add(&self.epoll, process.pidfd(), Token::OpenerEnd(nic))?;
        epoll_add(&self.epoll, ours.as_fd(), Token::OpenerReadable(nic))?;
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        card.opening = Opening::Opener(Opener {
            process,
            socket: ours,
            speech,
            why: None,
            was_connected: false,
            told: 0,
            party,
            since: now(),
        });
        Ok(())
    }

    /// Gives an opener, which is confined by now, the connection to a card's server, which is no part of Tasuki.
    fn show_way(&mut self, nic: u32) -> Result<()> {
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        let path = match &card.config.device {
            Device::VfioUser(path) => path.clone(),
            _ => self.place.model_socket(&card.config.name),
        };
        let Opening::Opener(opener) = &mut card.opening else { return Ok(()) };
        ensure!(!std::mem::replace(&mut opener.was_connected, true), "its opener asks for its card twice");
        let is_confined = opener.speech.is_confined(&opener.process).map_err(anyhow::Error::msg)?;
        ensure!(is_confined, "its opener speaks before it is confined");
        let way = connect(&path)?;
        channel::send(opener.socket.as_fd(), b".", &[way.as_fd()]).context("its opener reads nothing")
    }

    pub(super) fn on_opener_readable(&mut self, nic: u32) {
        for _ in 0..MESSAGES_AT_ONCE_MAX {
            let Some(card) = self.cards.get_mut(&nic) else { return };
            let Opening::Opener(opener) = &mut card.opening else { return };
            let made_by = opener.party;
            let message = match channel::receive(opener.socket.as_fd(), &mut self.room) {
                Ok(message) => message,
                Err(Nothing::Yet) => return,
                Err(nothing) => {
                    if !matches!(nothing, Nothing::Closed) {
                        opener.why = Some(format!("tasukid could not take its device bundle ({nothing})"));
                    }
                    let _ = rustix::event::epoll::delete(&self.epoll, &opener.socket);
                    return;
                }
            };
            match serde_json::from_slice(&message.bytes) {
                // Workers may have the first bundle by the time that a second one comes.
                Ok(ToDaemon::DeviceBundle { bundle, .. })
                    if bundle.fds == message.fds.len() && card.opened.is_none() =>
                {
                    self.opened(nic, bundle, message.fds.trust(), made_by)
                }
                Ok(ToDaemon::Begun { .. }) => {
                    if let Err(error) = self.show_way(nic)
                        && let Some(Card { opening: Opening::Opener(opener), .. }) = self.cards.get_mut(&nic)
                    {
                        opener.why = Some(format!("{error:#}"));
                        opener.process.kill();
                    }
                }
                Ok(ToDaemon::Told { sentence, .. }) if opener.told < SENTENCES_MAX => {
                    opener.told += 1;
                    let name = card.config.name.clone();
                    self.note(About::nic(&name), plain(&sentence, SENTENCE_MAX));
                }
                _ => opener.process.kill(),
            }
        }
    }

    fn opened(&mut self, nic: u32, bundle: DeviceBundle, fds: Vec<std::os::fd::OwnedFd>, made_by: u32) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        if let (Some(why), Opening::Opener(opener)) = (bundles::too_much(nic, card.name(), &bundle), &card.opening) {
            opener.process.kill();
            let name = card.config.name.clone();
            return self.note(About::nic(&name), why);
        }
        // The card was just started: an earlier driver's finding about its link no longer counts.
        card.lease_page.words.store(lease_page::LINK, 0);
        card.opened = Some(Opened { bundle, fds, made_by });
        card.trouble = None;
        card.failures = 0;
        let (name, device) = (card.config.name.clone(), card.config.device.to_string());
        self.note(About::nic(&name), format!("{name} ({device}) is open"));
        self.record_nic(nic);
    }

    pub(super) fn opener_ended(&mut self, nic: u32) {
        self.on_opener_readable(nic);
        let Some(card) = self.cards.get_mut(&nic) else { return };
        if matches!(&card.opening, Opening::Opener(opener) if !opener.process.has_ended()) {
            return;
        }
        let is_open = card.opened.is_some();
        let next = if is_open { Opening::Open } else { Opening::NotBefore(now()) };
        let was = std::mem::replace(&mut card.opening, next);
        let Opening::Opener(Opener { mut process, mut speech, why, .. }) = was else {
            card.opening = was;
            return;
        };
        let (how, is_closing) = (process.ended(), card.closing.is_some());
        if is_open || is_closing {
            return;
        }
        let said = || speech.last();
        let nothing = || format!("the process that was to open it {how}, and did not say why");
        self.not_opened(nic, &why.or_else(said).unwrap_or_else(nothing));
    }

    fn not_opened(&mut self, nic: u32, why: &str) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.failures = card.failures.saturating_add(1);
        let name = card.config.name.clone();
        let trouble = format!("{name} cannot be opened: {why}");
        card.opening = Opening::NotBefore(now() + policy::retry(card.failures));
        if is_news(&mut card.trouble, &trouble) {
            self.note(About::nic(&name), trouble);
        }
    }

    pub(super) fn model_ended(&mut self, nic: u32) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let Some(mut model) = card.model.take_if(|model| model.has_ended()) else { return };
        let how = model.ended();
        let name = card.config.name.clone();
        let _ = std::fs::remove_file(self.place.model_socket(&name));
        if self.stopping.is_some() || card.closing.is_some() {
            return;
        }
        if matches!(card.opening, Opening::Model(_)) {
            let said = card.speech.take().and_then(|mut speech| speech.last());
            let said = said.unwrap_or_else(|| "it did not say why".to_owned());
            return self.not_opened(nic, &format!("its model {how}: {said}"));
        }
        let is_uplink = self.config.node(card.node()).is_some_and(|node| node.work == config::Work::Uplink);
        let (what, it) = if is_uplink { ("the NIC and its node", "both") } else { ("the NIC", "it") };
        let trouble = format!(
            "the model of {name} {how}: the card is gone; take {what} out of the configuration, apply that, and put {it} back"
        );
        if let Some(card) = self.cards.get_mut(&nic) {
            card.trouble = Some(trouble.clone());
        }
        self.record_nic(nic);
        self.note(About::nic(&name), trouble);
    }

    /// Ends models and openers.
    pub(super) fn end_cards(&mut self, is_late: bool) {
        for card in self.cards.values_mut() {
            if let Opening::Opener(opener) = &card.opening {
                opener.process.kill();
            }
            card.let_go(is_late);
        }
    }
}
