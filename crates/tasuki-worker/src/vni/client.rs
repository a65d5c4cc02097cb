//! The client of a node with a memif, as it goes from worker to worker. The driver reports it to the daemon, and
//! workers that do not drive hear of it.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::Result;
use tasuki_net::memif::client::{Inherited, Parts, name_of};
use tasuki_net::memif::refusal::Refusal;
use tasuki_relay::message::{Client, ToDaemon};

use super::VniAttachment;
use super::end::End;
use crate::attachment::Common;
use crate::handler::FrameHandler;
use crate::memif;

impl<D: FrameHandler> VniAttachment<D> {
    /// Takes note of a memif client that another worker of the node serves, or served when it passed the lease to
    /// us.
    pub fn hear_of_client(&mut self, client: Client, fds: Vec<OwnedFd>) -> Result<()> {
        let inherited = Inherited::new(memif::unpack(client, fds)?);
        match &mut self.end {
            None => self.client = Some(inherited),
            Some(End::Memif(end)) => end.go_on(inherited),
            Some(_) => {}
        }
        Ok(())
    }

    /// Forgets a client that has gone. A driver ignores this: it knows its own client best.
    pub fn forget_client(&mut self, socket: u64) {
        self.client.take_if(|client| name_of(client.socket()) == socket);
    }

    /// Reports the connected client if it may have changed. It queues one message at a time, so that a client that
    /// connects and leaves all the time fills no queue.
    #[inline]
    pub(super) fn tell_news_of_client(&mut self, common: &mut Common) {
        if let Some(End::Memif(end)) = &mut self.end
            && end.has_news()
            && !common.channel.is_behind()
        {
            self.tell_client(common);
        }
    }

    /// Reports the client for a successor. Sends the client away, to connect again, if no successor can know of it.
    pub(super) fn entrust_client(&mut self, common: &mut Common) {
        self.tell_client(common);
        if let Some(End::Memif(end)) = &mut self.end
            && end.client().is_some()
            && self.told_client.is_none()
        {
            end.dismiss(Refusal::Moved);
        }
    }

    /// Reports the connected client if it has changed.
    fn tell_client(&mut self, common: &mut Common) {
        let Some(End::Memif(end)) = &mut self.end else { return };
        if !common.memif.as_ref().is_some_and(|memif| memif.keeps) {
            return;
        }
        let parts = end.parts();
        self.write_client(common, parts);
    }

    fn write_client(&mut self, common: &mut Common, parts: std::io::Result<Option<Parts>>) {
        let nic = self.given.number;
        let parts = parts.unwrap_or_else(|error| {
            let sentence = format!(
                "the client of memif will be sent away when its worker is replaced: its descriptors cannot be copied ({error}); raise RLIMIT_NOFILE"
            );
            common.channel.tell(Some(nic), sentence);
            None
        });
        let socket = parts.as_ref().map(|parts| name_of(parts.socket.as_fd()));
        if socket == self.told_client {
            return;
        }
        if let Some(gone) = std::mem::replace(&mut self.told_client, socket) {
            common.channel.write(&ToDaemon::NoClient { nic, socket: gone }, Vec::new());
        }
        if let Some((client, fds)) = parts.map(memif::pack) {
            common.channel.write(&ToDaemon::Client { nic, client }, fds);
        }
    }

    /// Reports to a daemon that has just started the connected client, or the client of which this worker last
    /// heard.
    pub fn tell_client_again(&mut self, common: &mut Common) {
        self.told_client = None;
        match (&self.end, &self.client) {
            (Some(_), _) => self.tell_client(common),
            (None, Some(client)) if common.memif.as_ref().is_some_and(|memif| memif.keeps) => {
                let parts = client.parts();
                self.write_client(common, parts);
            }
            _ => {}
        }
    }
}
