//! Cards out of their boxes. Who opens a device has privileges, and ends when the card runs; who drives it never has any.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tasuki_relay::letter::{Kit, ToDaemon, board};
use tasuki_relay::wire::{Order, Reason};

use super::card::{Board, Kept, Opener, Opening};
use super::policy;
use super::worker::{Fit, Worker};
use super::{About, PATIENCE, Supervisor, Token, iova_of, kits, now, watch};
use crate::channel::{self, Nothing};
use crate::config::{self, Device};
use crate::process::Process;

/// Of what an opener says to people, so much is repeated.
const SAYS_MAX: usize = 2000;

/// Whether it is the card that a worker cannot go on with, and not the worker that cannot go on.
fn is_of_the_card(reason: &Reason) -> bool {
    matches!(
        reason,
        Reason::WrongSash { .. } | Reason::DamagedSash { .. } | Reason::LeftBehind { .. } | Reason::CardGone
    )
}

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
            let Some(card) = self.cards.get(&nic) else { continue };
            let begun = match &card.opening {
                Opening::NotBefore(at) if *at <= now() => self.begin_opening(nic),
                Opening::Model(since) => self.look_for_model(nic, *since),
                Opening::Opener(opener) if now().saturating_sub(opener.since) >= PATIENCE * 2 => {
                    opener.process.kill();
                    Ok(())
                }
                _ => Ok(()),
            };
            if let Err(error) = begun {
                self.not_opened(nic, &format!("{error:#}"));
            }
        }
    }

    /// A NIC that nobody drives, and with which no worker of its node can go on from where its last driver left it: it is opened anew. Nobody else could help it, and
    /// a person could do no more.
    fn begin_anew(&mut self) {
        let numbers: Vec<u32> = self.cards.keys().copied().collect();
        for nic in numbers {
            let Some(reason) = self.is_lost(nic) else { continue };
            let Ok(board) = Board::create() else { continue };
            let having = self.workers.values().filter(|worker| worker.nics.contains_key(&nic)).map(Worker::party);
            for number in having.collect::<Vec<_>>() {
                self.order(nic, number, Order::Leave);
            }
            let Some(card) = self.cards.get_mut(&nic) else { continue };
            card.give_up(board, now());
            let (name, node) = (card.name().to_owned(), card.node.clone());
            let about = About { node: Some(&node), nic: Some(&name), worker: None };
            self.note(about, format!("{name} is opened anew, and what was under way in it is lost: no worker of node {node} can go on with it ({reason})"));
            self.record_nic(nic);
        }
    }

    /// Why no worker of its node can go on with a NIC that nobody drives, if the card is why.
    fn is_lost(&self, nic: u32) -> Option<Reason> {
        let card = self.cards.get(&nic).filter(|card| card.is_parked() && card.vni().is_none())?;
        let is_open = matches!(card.opening, Opening::Open) && card.kept.is_some() && !card.has_lost_its_model();
        if !is_open || self.jobs.iter().any(|job| job.is_about(nic)) {
            return None;
        }
        let of_node = self.workers.values().filter(|worker| worker.record.node == card.node && worker.counts());
        let fits: Vec<Option<&Fit>> = of_node.map(|worker| worker.nics.get(&nic)).collect();
        let lost = |fit: &Option<&Fit>| match fit {
            Some(Fit::Unfit(reason)) if is_of_the_card(reason) => Some(*reason),
            _ => None,
        };
        fits.iter().map(lost).collect::<Option<Vec<Reason>>>()?.first().copied()
    }

    fn begin_opening(&mut self, nic: u32) -> Result<()> {
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        if card.vni().is_some() {
            return self.make_end(nic);
        }
        if card.config.device != Device::Sim || card.model.is_some() {
            return self.start_opener(nic);
        }
        let socket = self.place.model_socket(&card.config.name);
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(&self.programs.model);
        command.args(["sim", "nic", "--socket"]).arg(&socket).args(&card.config.wire);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let program = self.programs.model.display();
        let model = Process::spawn(&mut command)
            .with_context(|| format!("{program} does not start; build it: cargo build --package tasuki-sim"))?;
        watch(&self.epoll, model.pidfd(), Token::ModelEnd(nic))?;
        (card.model, card.opening) = (Some(model), Opening::Model(now()));
        self.record_nic(nic);
        self.flush();
        Ok(())
    }

    /// A model serves once its socket is there.
    fn look_for_model(&mut self, nic: u32, since: Duration) -> Result<()> {
        let Some(card) = self.cards.get(&nic) else { return Ok(()) };
        let socket = self.place.model_socket(card.name());
        if socket.exists() {
            return self.start_opener(nic);
        }
        anyhow::ensure!(now().saturating_sub(since) < PATIENCE, "its model does not serve at {}", socket.display());
        Ok(())
    }

    fn start_opener(&mut self, nic: u32) -> Result<()> {
        let party = self.next_party();
        let (scrub, has_taps) = (self.config.has_strangers(), !self.taps.is_empty());
        let Some(card) = self.cards.get_mut(&nic) else { return Ok(()) };
        let device = match &card.config.device {
            Device::Sim => Device::VfioUser(self.place.model_socket(&card.config.name)),
            other => other.clone(),
        };
        let (ours, theirs) = channel::pair().context("the kernel has no sockets left")?;
        let (says, stderr) = std::io::pipe().context("the kernel has no pipes left")?;
        let program = &self.programs.worker;
        let mut command = Command::new(program);
        command.arg("open").arg(device.to_string()).args(["--iova", &iova_of(party).to_string()]);
        if let Some(ring) = card.config.ring {
            command.args(["--ring", &ring.to_string()]);
        }
        let joins = |node: &config::Node| node.name == card.config.node && node.work == config::Work::Uplink;
        if self.config.node.iter().any(joins) {
            // What is for nodes of the VNI is none of the card's addresses.
            command.arg("--promiscuous");
        } else if has_taps {
            // A kernel asks for its neighbours by multicast.
            command.arg("--all-multicast");
        }
        if scrub {
            command.arg("--scrub");
        }
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::from(stderr));
        let process = Process::spawn(&mut command).with_context(|| format!("{} does not start", program.display()))?;
        watch(&self.epoll, process.pidfd(), Token::OpenerEnd(nic))?;
        watch(&self.epoll, ours.as_fd(), Token::OpenerSays(nic))?;
        card.opening = Opening::Opener(Opener { process, socket: ours, says, why: None, party, since: now() });
        Ok(())
    }

    pub(super) fn opener_says(&mut self, nic: u32) {
        loop {
            let Some(card) = self.cards.get_mut(&nic) else { return };
            let Opening::Opener(opener) = &mut card.opening else { return };
            let made_by = opener.party;
            let message = match channel::receive(opener.socket.as_fd(), &mut self.room) {
                Ok(message) => message,
                Err(Nothing::Yet) => return,
                Err(nothing) => {
                    let is_over = matches!(nothing, Nothing::Closed);
                    opener.why = (!is_over).then(|| format!("tasukid could not take what it is made of ({nothing})"));
                    let _ = rustix::event::epoll::delete(&self.epoll, &opener.socket);
                    return;
                }
            };
            match serde_json::from_slice(&message.bytes) {
                Ok(ToDaemon::Kit { kit, .. }) if kit.fds == message.fds.len() => {
                    self.opened(nic, kit, message.fds.trust(), made_by)
                }
                Ok(ToDaemon::Told { sentence, .. }) => {
                    let name = card.config.name.clone();
                    self.note(About::nic(&name), sentence);
                }
                _ => opener.process.kill(),
            }
        }
    }

    fn opened(&mut self, nic: u32, kit: Kit, fds: Vec<std::os::fd::OwnedFd>, made_by: u32) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        if let (Some(why), Opening::Opener(opener)) = (kits::too_much(nic, card.name(), &kit), &card.opening) {
            opener.process.kill();
            let name = card.config.name.clone();
            return self.note(About::nic(&name), why);
        }
        // It was just started: what a driver of before found of its link says nothing of it.
        card.board.words.store(board::LINK, 0);
        card.kept = Some(Kept { kit, fds, made_by });
        card.trouble = None;
        card.failures = 0;
        let (name, device) = (card.config.name.clone(), card.config.device.to_string());
        self.note(About::nic(&name), format!("{name} ({device}) is open"));
        self.record_nic(nic);
    }

    pub(super) fn opener_ended(&mut self, nic: u32) {
        self.opener_says(nic);
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let is_open = card.kept.is_some();
        let next = if is_open { Opening::Open } else { Opening::NotBefore(now()) };
        let was = std::mem::replace(&mut card.opening, next);
        let Opening::Opener(Opener { mut process, mut says, why, .. }) = was else {
            card.opening = was;
            return;
        };
        let how = process.ended();
        if is_open {
            return;
        }
        // It is dead, so this ends.
        let mut text = Vec::new();
        let _ = says.by_ref().take(SAYS_MAX as u64).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).map(str::trim);
        let why = why.unwrap_or_else(|| match last {
            Some(line) => line.strip_prefix("tasuki: ").unwrap_or(line).to_owned(),
            None => format!("the process that was to open it {how}, and did not say why"),
        });
        self.not_opened(nic, &why);
    }

    fn not_opened(&mut self, nic: u32, why: &str) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.failures = card.failures.saturating_add(1);
        let name = card.config.name.clone();
        let trouble = format!("{name} cannot be opened: {why}");
        card.opening = Opening::NotBefore(now() + policy::retry(card.failures));
        let is_news = card.trouble.as_ref() != Some(&trouble);
        card.trouble = Some(trouble.clone());
        if is_news {
            self.note(About::nic(&name), trouble);
        }
    }

    pub(super) fn model_ended(&mut self, nic: u32) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let Some(mut model) = card.model.take() else { return };
        let how = model.ended();
        let name = card.config.name.clone();
        let _ = std::fs::remove_file(self.place.model_socket(&name));
        if self.stopping.is_some() {
            return;
        }
        if matches!(self.cards[&nic].opening, Opening::Model(_)) {
            return self.not_opened(nic, &format!("its model {how}; tasukid's log says why"));
        }
        let trouble =
            format!("the model of {name} {how}: the card is gone. Stop all (tasuki stop) and start tasukid anew");
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
            // Nobody holds a connection to it any more.
            card.kept = None;
            match &card.model {
                Some(model) if is_late => model.kill(),
                Some(model) => model.ask_to_end(),
                None => {}
            }
        }
    }
}
