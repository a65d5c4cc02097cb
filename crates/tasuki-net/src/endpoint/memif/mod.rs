//! A node that is a program with a memif: a DPDK or VPP client connects to it, and is on a VNI.
//!
//! We are memif's server, so the memory between us is the client's: it makes it, hands it over, and can write all of it
//! at any time. docs/design/vni.md says what that may and may not do to us. A node serves one client at a time, and any
//! number in succession. One copy takes a frame from the client's memory into the node's pool; one copy takes a frame
//! from its sender's pool into the client's buffers. Clients know neither missing checksums nor GSO packets to be cut, so
//! the node [finishes](crate::vni::finish) unfinished frames in a private copy.
//!
//! | module      | contents                                         |
//! |-------------|--------------------------------------------------|
//! | [`wire`]    | messages, and the layout of a ring               |
//! | [`control`] | the exchange with a client, as a table           |
//! | [`refusal`] | reasons why a client is sent away                |
//! | [`ring`]    | a ring in a client's memory, and its regions     |
//! | [`ledger`]  | our place in its rings, for a successor          |
//! | [`client`]  | one client: socket, memory, rings, bells         |
//! | `giver`     | frames from the VNI into a client's buffers      |
//!
//! A client outlives its server. All its parts go to a [successor](Connection::go_on), which continues in the middle of
//! its rings, even if the predecessor was killed. A frame's receiver sees it before its sender learns that it is gone,
//! so a death loses none. A frame that the receiver has seen and the sender has not been told of comes twice: up to a
//! burst each way.

pub mod client;
pub mod control;
mod giver;
pub mod ledger;
pub mod refusal;
pub mod ring;
pub mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::SocketType;
use serde::{Deserialize, Serialize};
use tasuki_shm::line::Line;
use tasuki_shm::region::Span;

use super::egress::WAIT;
use super::listener::Listener;
use super::{Connection, Dismissal, Dropped, Egress, Endpoint, Given, Parts, Recovery};
use crate::port::Armed;
use crate::switch::CheckedPrefix;
use crate::vni::ledger::point;
use crate::vni::offload::HEADER_LEN;
use crate::vni::{Incoming, PIECE_MAX};
use client::{Attached, Client, End, Inherited, dismiss, name_of};
use control::Terms;
use giver::Giver;
use ledger::Ledger;
use refusal::{Refusal, Way};
use ring::Chain;

/// Number of frames taken from the client before the node turns to frames for it.
const TAKES: usize = 32;

/// Number of turns between two looks at the control channel, while frames flow.
const ATTEND_EVERY: u32 = 64;

/// How soon the node looks again after it asked the client to ring: the client may have put a frame there and looked
/// before it could see the request.
const SECOND_LOOK: Duration = Duration::from_micros(100);

/// Maximum number of connections that are accepted in one turn.
const ACCEPTS: usize = 4;

/// What a client must know to be let in.
#[derive(Debug, Serialize, Deserialize)]
pub struct Text {
    /// Interface number by which the client asks for the port.
    pub id: u32,
    /// Secret of at most 23 bytes; empty if the client needs none.
    pub secret: String,
}

/// Opens the socket at which a node serves clients.
pub(super) fn open(listener: OwnedFd, text: &str, node: &str) -> Result<Box<dyn Endpoint>, String> {
    let older = "rebuild the older of the two";
    if rustix::net::sockopt::socket_type(&listener) != Ok(SocketType::SEQPACKET) {
        return Err(format!("what the daemon sent as the node's socket of memif is none; {older}"));
    }
    let Text { id, secret } = serde_json::from_str(text)
        .map_err(|error| format!("the daemon does not say what a client of memif must know ({error}); {older}"))?;
    let terms = Terms::new(id, &secret, node).map_err(|error| error.to_string())?;
    let memif = Memif::new(listener, terms).map_err(|error| format!("memif cannot be served: {error}"))?;
    Ok(Box::new(memif))
}

/// Counts of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clients {
    /// Number of clients that were connected.
    pub attached: u64,
    /// Number of clients that have left.
    pub left: u64,
    /// Number of clients that were sent away, including those that came while another was connected.
    pub refused: u64,
    /// Why the last one was sent away, until it is told.
    pub why: Option<Refusal>,
}

/// A socket to which memif clients connect, and the client.
#[derive(Debug)]
pub struct Memif {
    listener: Listener,
    terms: Terms,
    client: Option<Box<Client>>,
    /// The client of a predecessor, until the endpoint begins to serve.
    inherited: Option<Inherited>,
    /// Our place in the client's rings, once the endpoint serves.
    ledger: Option<Ledger>,
    /// The client has changed or gone, and the caller has not asked for its parts since.
    has_news: bool,
    /// Counts of the clients so far.
    pub clients: Clients,
    /// Copy of a frame that is being finished.
    copy: Box<[u8]>,
    /// Pieces of the frame in hand.
    chain: Chain,
    turns: u32,
    /// The control channel may have a message.
    must_hear: bool,
    /// When the client began to have few or no buffers posted. Frames wait for it briefly.
    stalls: Option<Instant>,
    /// Whether the client was told that it need not ring; `None` if unknown.
    is_quiesced: Option<bool>,
    /// The client was told to ring, and may not have seen that when it last sent.
    in_doubt: bool,
    /// The rule that the client broke in this turn.
    broken: Option<Refusal>,
}

impl Memif {
    /// Serves clients that connect to `listener`, a socket that keeps message boundaries (`SOCK_SEQPACKET`). Its
    /// creator decides which programs may connect.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(listener: OwnedFd, terms: Terms) -> io::Result<Self> {
        Ok(Memif {
            listener: Listener::new(listener)?,
            terms,
            client: None,
            inherited: None,
            ledger: None,
            has_news: false,
            clients: Clients::default(),
            copy: vec![0; PIECE_MAX - HEADER_LEN].into(),
            chain: Chain::default(),
            turns: 0,
            must_hear: true,
            stalls: None,
            is_quiesced: Some(false),
            in_doubt: false,
            broken: None,
        })
    }

    /// Returns the client's own name, if one is connected.
    pub fn client(&self) -> Option<String> {
        self.client.as_ref().filter(|client| client.attached.is_some()).map(|client| client.name())
    }

    fn attached(&mut self) -> Option<&mut Attached> {
        self.client.as_mut()?.attached.as_mut()
    }

    /// Goes on with a client that a predecessor served, if there is none yet.
    fn go_on_now(&mut self, inherited: Inherited) {
        if self.client.as_ref().is_some_and(|client| inherited.is(client)) {
            return;
        }
        let client = match inherited.0 {
            Err((socket, refusal)) => Err((socket, refusal)),
            Ok(client) if self.client.is_some() => Err((client.into_socket(), Refusal::Busy(self.terms.id))),
            Ok(client) => Ok(client),
        };
        match (client, &mut self.ledger) {
            (Ok(client), Some(ledger)) => {
                let client = self.client.insert(client);
                let watched = self.listener.watch(client.socket()).map_err(|_| End::Refused(Refusal::Moved));
                match watched.and_then(|()| client.go_on(&self.terms, ledger)) {
                    Ok(()) => self.serve(None),
                    Err(end) => self.end(end),
                }
            }
            (Ok(client), None) => self.inherited = Some(Inherited(Ok(client))),
            (Err((socket, refusal)), _) => {
                self.note(refusal);
                self.has_news = true;
                dismiss(&socket, refusal);
            }
        }
    }

    fn take_from_client(&mut self, egress: &mut Egress<'_>) -> Result<usize, Refusal> {
        let Self { client, chain, is_quiesced, .. } = self;
        let Some(attached) = client.as_mut().and_then(|client| client.attached.as_mut()) else { return Ok(0) };
        if attached.from.look()? == 0 {
            return Ok(0);
        }
        if is_quiesced.replace(true) != Some(true) {
            attached.from.want_rings(false);
        }
        let mut count = 0;
        let Attached { regions, from, .. } = attached;
        while count < TAKES && from.next(regions, chain)? {
            if !egress.send(chain.len, |bytes| regions.copy_to(chain, bytes)) {
                break;
            }
            from.read(&chain.places);
            count += 1;
        }
        Ok(count)
    }

    /// Reads the client's messages, and accepts new connections.
    fn hear(&mut self) {
        self.must_hear = false;
        self.hear_client();
        for _ in 0..ACCEPTS {
            let Some(socket) = self.listener.accept() else { return };
            // A program that begins anew may have left a moment ago.
            self.hear_client();
            if self.client.is_some() {
                self.note(Refusal::Busy(self.terms.id));
                dismiss(&socket, Refusal::Busy(self.terms.id));
                continue;
            }
            match Client::greet(socket, &self.terms, Instant::now()) {
                Ok(client) if self.listener.watch(client.socket()).is_ok() => self.client = Some(Box::new(client)),
                _ => self.clients.left += 1,
            }
        }
    }

    fn hear_client(&mut self) {
        let Some(client) = &mut self.client else { return };
        let was_attached = client.attached.is_some();
        match client.hear(&self.terms) {
            Ok(()) if !was_attached && client.attached.is_some() => {
                self.ledger.iter_mut().for_each(Ledger::begin);
                // The client may ring from the start: do not write into its rings before it has put something there.
                self.serve(Some(false));
                self.clients.attached += 1;
            }
            Ok(()) => {}
            Err(end) => self.end(end),
        }
    }

    /// Begins to serve a connected client. `is_quiesced` says whether it was told that it need not ring; `None` if
    /// unknown.
    fn serve(&mut self, is_quiesced: Option<bool>) {
        self.has_news = true;
        let Some(Client { attached: Some(attached), .. }) = self.client.as_deref() else { return };
        if self.listener.watch(attached.bell.as_fd()).is_err() {
            return self.end(Refusal::RingSilent(Way::ToServer).into());
        }
        self.stalls = None;
        (self.is_quiesced, self.in_doubt) = (is_quiesced, false);
    }

    /// Drops the client and everything kept of it.
    fn end(&mut self, end: End) {
        let Some(client) = self.client.take() else { return };
        self.has_news = true;
        self.unwatch(&client);
        self.stalls = None;
        match end {
            End::Left => {
                self.clients.left += 1;
                client.hang_up();
            }
            End::Refused(refusal) => {
                self.note(refusal);
                client.dismiss(refusal);
            }
        }
    }

    /// Ends the watches: the client may have the descriptors open too, so closing ours would not.
    fn unwatch(&self, client: &Client) {
        self.listener.unwatch(client.socket());
        if let Some(attached) = &client.attached {
            self.listener.unwatch(attached.bell.as_fd());
        }
    }

    fn note(&mut self, refusal: Refusal) {
        self.clients.refused += 1;
        self.clients.why = Some(refusal);
    }
}

impl Endpoint for Memif {
    /// A frame stays in the client's ring until it is committed.
    fn recovery(&self) -> Recovery {
        Recovery::Own
    }

    fn begin(&mut self, page: Span<Line>) {
        self.ledger = Some(Ledger::over(page));
        self.inherited.take().into_iter().for_each(|inherited| self.go_on_now(inherited));
    }

    fn attend(&mut self) {
        self.turns = self.turns.wrapping_add(1);
        let in_handshake = self.client.as_ref().is_some_and(|client| client.attached.is_none());
        if self.must_hear || in_handshake || self.turns.is_multiple_of(ATTEND_EVERY) {
            self.hear();
        }
    }

    /// A GSO packet makes dozens of frames, and several arrive at once: a ring that is short of buffers is not filled to
    /// the brim. Without a client, frames are dropped.
    fn is_ready(&mut self) -> bool {
        let Some(attached) = self.attached() else { return true };
        match attached.to.look() {
            Ok(count) if usize::from(count) >= attached.to.size().div_ceil(4) => {
                self.stalls = None;
                true
            }
            Ok(_) => self.stalls.get_or_insert_with(Instant::now).elapsed() >= WAIT,
            Err(refusal) => {
                self.broken = Some(refusal);
                false
            }
        }
    }

    #[inline]
    fn give(&mut self, incoming: &Incoming<'_>, front: &CheckedPrefix, dropped: &mut Dropped) -> Given {
        let Self { client, ledger, copy, chain, broken, .. } = self;
        match (client.as_mut().and_then(|client| client.attached.as_mut()), ledger) {
            (Some(attached), Some(ledger)) => {
                let mut giver = Giver { attached, ledger, given: 0, dropped, copy, chain, broken };
                giver.give(incoming, front);
                Given::Taken(giver.given)
            }
            _ => {
                dropped.away += 1;
                Given::Taken(0)
            }
        }
    }

    /// If we died later, frames that the client has not seen would be lost.
    #[inline]
    fn show(&mut self) {
        let Self { client, ledger, .. } = self;
        if let (Some(Client { attached: Some(attached), .. }), Some(ledger)) = (client.as_deref_mut(), ledger) {
            attached.to.show(ledger);
        }
    }

    fn ring(&mut self) {
        point("memif.ringing");
        self.attached().into_iter().for_each(|attached| attached.ring());
    }

    fn take(&mut self, egress: &mut Egress<'_>) -> usize {
        if self.broken.is_some() {
            return 0;
        }
        self.take_from_client(egress).unwrap_or_else(|refusal| {
            self.broken = Some(refusal);
            0
        })
    }

    /// Gives the client its descriptors back.
    fn commit(&mut self) {
        let Self { client, ledger, .. } = self;
        if let (Some(Client { attached: Some(attached), .. }), Some(ledger)) = (client.as_deref_mut(), ledger) {
            attached.from.let_go(ledger);
        }
        if let Some(refusal) = self.broken.take() {
            self.end(refusal.into());
        }
    }

    fn arm(&mut self, waits: bool) -> Armed {
        if let Some(Client { attached: Some(attached), .. }) = self.client.as_deref_mut() {
            if self.is_quiesced.replace(false) != Some(false) {
                attached.from.want_rings(true);
                self.in_doubt = true;
            }
            if !waits && attached.from.look() != Ok(0) {
                return Armed::Busy;
            }
        }
        Armed::Idle
    }

    fn wake(&mut self) {
        self.must_hear = true;
        self.in_doubt = false;
        if let Some(Client { attached: Some(attached), .. }) = self.client.as_deref() {
            tasuki_shm::wake::drain(attached.bell.as_fd());
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.listener.fd())
    }

    fn again_in(&self) -> Option<Duration> {
        self.in_doubt.then_some(SECOND_LOOK)
    }

    fn tick(&mut self, now: Instant, _: &mut Dropped) -> bool {
        self.must_hear = true;
        self.listener.tick();
        if self.client.as_ref().is_some_and(|client| client.is_late(now)) {
            self.end(Refusal::TooSlow.into());
        }
        self.client.as_ref().is_some_and(|client| client.attached.is_none())
    }

    /// Tells a client in its handshake to connect anew.
    fn finish(&mut self) {
        if self.client.as_ref().is_some_and(|client| client.attached.is_none()) {
            self.end(Refusal::Moved.into());
        }
    }

    fn release(&mut self) {
        self.ledger = None;
        if let Some(client) = self.client.take() {
            self.unwatch(&client);
            // It is ours again if the successor gives the lease back.
            self.inherited = client.attached.is_some().then_some(Inherited(Ok(client)));
        }
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        vec![("clients_attached", self.clients.attached), ("clients_refused", self.clients.refused)]
    }

    /// A client hears it, too, and may not show it.
    fn trouble(&mut self) -> Option<String> {
        let is_news = |why: &Refusal| !matches!(why, Refusal::Moved | Refusal::Over);
        let why = self.clients.why.take().filter(is_news)?;
        Some(format!("a client of memif was sent away: {why}"))
    }

    fn connection(&mut self) -> Option<&mut dyn Connection> {
        Some(self)
    }
}

impl Connection for Memif {
    fn has_news(&self) -> bool {
        self.has_news
    }

    fn parts(&mut self) -> io::Result<Option<Parts>> {
        self.has_news = false;
        match (&self.client, &self.inherited) {
            (Some(client), _) => client.parts(),
            (None, Some(inherited)) => inherited.parts(),
            (None, None) => Ok(None),
        }
    }

    fn go_on(&mut self, parts: Parts) -> Result<(), String> {
        let inherited = Inherited::new(parts)?;
        if self.ledger.is_some() {
            self.go_on_now(inherited);
        } else {
            self.inherited = Some(inherited);
        }
        Ok(())
    }

    fn forget(&mut self, number: u64) {
        self.inherited.take_if(|inherited| name_of(inherited.socket()) == number);
    }

    fn dismiss(&mut self, why: Dismissal) {
        self.end(match why {
            Dismissal::Over => Refusal::Over.into(),
            Dismissal::Moved => Refusal::Moved.into(),
        });
    }
}

#[cfg(test)]
mod tests;
