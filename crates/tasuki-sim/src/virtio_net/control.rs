//! The control queue (§5.1.6.5).

use super::steer::{Rss, Steering};
use super::{Device, QUEUES, feature, filter, net};
use crate::journal::Class;
use crate::model::Host;

/// Most commands per step.
const COMMANDS: usize = 8;

const OK: u8 = 0;
const ERR: u8 = 1;

/// Classes and their commands.
const RX: u8 = 0;
const MAC: u8 = 1;
const MAC_TABLE_SET: u8 = 0;
const MQ: u8 = 4;
const MQ_VQ_PAIRS_SET: u8 = 0;
const MQ_RSS_CONFIG: u8 = 1;

impl Device {
    /// Carries out the driver's commands; returns whether there were any.
    pub(super) fn serve_commands(&mut self, host: &mut impl Host) -> bool {
        let place = QUEUES - 1;
        if !self.queues[place].is_on() {
            return false;
        }
        let mut count = 0;
        while count < COMMANDS && self.has_chain(place, host) {
            self.serve_command(host);
            count += 1;
        }
        self.publish(place, host);
        count > 0
    }

    fn serve_command(&mut self, host: &mut impl Host) {
        let len = self.chain.readable_len;
        let has_room = self.chain.writable_len > 0;
        let mut bytes = std::mem::take(&mut self.packet);
        let done = match usize::try_from(len) {
            Ok(len) if len <= net::PACKET_MAX && has_room => match self.chain.gather(&mut bytes, host) {
                Ok(()) => self.command(&bytes[..len]),
                Err(unmapped) => {
                    self.unreachable(unmapped.at);
                    None
                }
            },
            _ => None,
        };
        self.packet = bytes;
        if done.is_none() {
            let index = self.index_of(QUEUES - 1);
            self.journal.note(Class::BadCommand, self.now, index.into(), len);
        }
        let answer = if done.is_some() { OK } else { ERR };
        if let Err(unmapped) = self.chain.scatter([&[answer], &[]], host) {
            self.unreachable(unmapped.at);
        }
        self.queues[QUEUES - 1].finish(has_room.into());
    }

    /// Carries out one command; returns `None` if it is invalid or not allowed.
    fn command(&mut self, bytes: &[u8]) -> Option<()> {
        let ([class, command], data) = bytes.split_first_chunk()?;
        match (*class, *command) {
            (RX, which) if which < filter::SWITCHES => {
                let needs = if which < filter::EXTRA { feature::CTRL_RX } else { feature::CTRL_RX_EXTRA };
                let &[on @ (0 | 1)] = data else { return None };
                self.has(needs).then(|| self.filter.switch(which, on == 1))
            }
            (MAC, MAC_TABLE_SET) if self.has(feature::CTRL_RX) => self.filter.set_tables(data),
            (MQ, MQ_VQ_PAIRS_SET) if self.has(feature::MQ) => {
                let &[low, high] = data else { return None };
                let pairs = u16::from_le_bytes([low, high]);
                // The driver must have set up all these queues before.
                let are_on = self.queues.iter().take(2 * usize::from(pairs)).all(super::Queue::is_on);
                ((1..=self.pairs()).contains(&pairs) && are_on).then(|| self.steer(Steering::Automatic(pairs)))
            }
            (MQ, MQ_RSS_CONFIG) if self.has(feature::RSS) => {
                let queues = &self.queues;
                let is_on = |pair: u16| queues[2 * usize::from(pair)].is_on();
                let rss = Rss::parse(data, self.pairs(), is_on)?;
                self.steer(Steering::ByTable(rss));
                Some(())
            }
            _ => None,
        }
    }

    /// Changes the steering, for waiting frames too.
    fn steer(&mut self, steering: Steering) {
        self.steering = steering;
        let queues = &self.queues;
        // In the order of the pairs, so that frames that waited for one pair keep their order.
        let waited: Vec<_> = self.waiting.iter_mut().flat_map(|waiting| std::mem::take(waiting).frames).collect();
        for frame in waited {
            let pair = self.steering.pair_of(&frame, |pair| queues[2 * usize::from(pair)].is_on());
            self.waiting[usize::from(pair)].push(&frame);
        }
    }
}
