//! The client of a node's endpoint, as it goes from worker to worker. The driver reports it to the daemon, and workers
//! that do not drive hear of it.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::Result;
use tasuki_net::endpoint::{Connection, Dismissal};
use tasuki_relay::message::{Client, ToDaemon};

use super::VniAttachment;
use super::end::End;
use crate::attachment::Common;
use crate::channel::DaemonChannel;
use crate::endpoint::{pack, unpack};
use crate::handler::FrameHandler;

/// Average interval between reports of a client: a program may come, go and change as often as it likes.
const AGAIN: Duration = Duration::from_millis(20);

/// How far reports may be ahead of that. A set-up or the begin of a migration is a dozen changes in a row; until a change
/// is reported, no successor can go on after it.
const AHEAD: Duration = Duration::from_millis(16 * 20);

/// How far those may be ahead for which a client waits, which are counted apart: the daemon takes 64 reports in a row
/// beside those that waited for it, and then one in 10 ms. A machine needs some four for each pair of queues that it sets up.
const AWAITED_AHEAD: Duration = Duration::from_millis(44 * 20);

/// Least time between two reports of which the second waits for nothing else. Each costs every worker of the node, the
/// keeper and the daemon a descriptor for each of the client's: a machine has up to 138.
const APART: Duration = Duration::from_millis(5);

impl<D: FrameHandler> VniAttachment<D> {
    /// Returns the connection to the node's client, if the node's endpoint has clients, whether this worker drives it
    /// or not.
    pub(super) fn connection(&mut self) -> Option<&mut dyn Connection> {
        match &mut self.end {
            Some(End::Bridge(bridge)) => bridge.endpoint.connection(),
            Some(_) => None,
            None => self.endpoint.as_mut()?.connection(),
        }
    }

    /// Takes note of a client that another worker of the node serves, or served when it passed the lease to us.
    pub fn hear_of_client(&mut self, common: &Common, client: Client, fds: Vec<OwnedFd>) -> Result<()> {
        self.open_endpoint(common)?;
        let parts = unpack(client, fds);
        self.connection().map_or(Ok(()), |connection| connection.go_on(parts)).map_err(anyhow::Error::msg)
    }

    /// Forgets a client that has gone. A driver ignores this: it knows its own client best.
    pub fn forget_client(&mut self, socket: u64) {
        self.connection().into_iter().for_each(|connection| connection.forget(socket));
    }

    /// Reports the connected client if it may have changed. It queues one message at a time, so that a client that
    /// connects and leaves all the time fills no queue.
    #[inline]
    pub(super) fn tell_news_of_client(&mut self, common: &mut Common) {
        if let Some(End::Bridge(bridge)) = &mut self.end
            && let Some(connection) = bridge.endpoint.connection().filter(|it| it.has_news() || it.waits())
            && !common.channel.is_behind()
        {
            let now = Instant::now();
            // After the first of several changes in a row, it waits for the last.
            let may_go = connection.is_settled() && self.news_at <= now + AHEAD && self.told_at + APART <= now;
            if !connection.waits() {
                if self.news_at <= now || may_go {
                    self.tell_client(&mut common.channel);
                }
            } else if connection.has_news() && self.awaited_at <= now + AWAITED_AHEAD {
                let news_at = self.news_at;
                self.tell_client(&mut common.channel);
                (self.news_at, self.awaited_at) = (news_at, self.awaited_at.max(now) + AGAIN);
            } else {
                connection.told();
            }
        }
    }

    /// Returns how soon to report the client, if that is due.
    pub(super) fn news_in(&mut self) -> Option<Duration> {
        let has_news = self.connection().is_some_and(|connection| connection.has_news());
        let now = Instant::now();
        let may_go = (self.told_at + APART).saturating_duration_since(now);
        has_news.then(|| self.news_at.saturating_duration_since(now + AHEAD).max(may_go))
    }

    /// Has the next report wait, after the last one and also after a take: frames have queued up for a worker that has just
    /// taken over, and the daemon has the client as its predecessor left it.
    pub(super) fn news_waits(&mut self) {
        self.told_at = Instant::now();
        self.news_at = self.news_at.max(self.told_at) + AGAIN;
    }

    /// Reports the client for a successor. Sends the client away, to connect again, if no successor can know of it.
    pub(super) fn entrust_client(&mut self, common: &mut Common) {
        self.tell_client(&mut common.channel);
        let is_told = self.told_client.is_some();
        if let Some(connection) = self.connection().filter(|_| !is_told) {
            connection.dismiss(Dismissal::Moved);
        }
    }

    /// Reports the client that is connected, or the one of which this worker last heard, if it has changed.
    fn tell_client(&mut self, channel: &mut DaemonChannel) {
        self.tell_of_change(channel);
        self.connection().into_iter().for_each(Connection::told);
    }

    fn tell_of_change(&mut self, channel: &mut DaemonChannel) {
        let nic = self.given.number;
        let is_known = self.told_client.is_some();
        if is_known && self.connection().is_some_and(|connection| !connection.has_news()) {
            return;
        }
        let Some(parts) = self.connection().map(Connection::parts) else { return };
        let parts = match parts {
            Ok(parts) => parts,
            // The daemon keeps what it has.
            Err(_) if self.connection().is_some_and(Connection::stays_as_told) => return,
            Err(error) => {
                let sentence = format!(
                    "the client will be sent away when its worker is replaced: its descriptors cannot be copied ({error}); raise RLIMIT_NOFILE"
                );
                channel.tell(Some(nic), sentence);
                None
            }
        };
        let now = parts.as_ref().map(|parts| (parts.number, parts.version));
        if now == self.told_client {
            return;
        }
        self.news_waits();
        let before = std::mem::replace(&mut self.told_client, now).map(|(socket, _)| socket);
        if let Some(gone) = before.filter(|before| now.map(|(socket, _)| socket) != Some(*before)) {
            channel.write(&ToDaemon::NoClient { nic, socket: gone }, Vec::new());
        }
        if let Some((client, fds)) = parts.map(pack) {
            channel.write(&ToDaemon::Client { nic, client }, fds);
        }
    }

    /// Reports the client to a daemon that has just started.
    pub fn tell_client_again(&mut self, common: &mut Common) {
        self.told_client = None;
        self.tell_client(&mut common.channel);
    }
}
