//! Frames to the driver and from it (§5.1.6).

use super::queue::Trouble;
use super::{Device, PAIRS_MAX, QUEUES, WAITING_MAX, feature};
use crate::journal::Class;
use crate::model::Host;
use crate::wire::Wire;

/// Bytes of the header before each frame.
pub const HEADER_LEN: usize = 12;

/// Bytes of the addresses and the type, and room for a VLAN tag.
const AROUND_PAYLOAD: usize = 18;

/// Bytes of the shortest valid frame, and of the longest that passes, without check sequence.
const FRAME_MIN: usize = 14;
const FRAME_MAX: usize = 16384;

/// Most bytes that the device reads at once: a frame with its header, or a command.
pub const PACKET_MAX: usize = HEADER_LEN + FRAME_MAX;

/// Most frames of a queue, or from the wire, per step.
const FRAMES: usize = 64;

/// Header of every received frame: no offloads, one buffer (§5.1.6.4).
const HEADER: [u8; HEADER_LEN] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// Treatment of a received frame.
#[derive(PartialEq, Eq)]
enum Fate {
    Stored,
    NoBuffer,
    /// The frame does not fit into the next buffer.
    Unfit,
}

impl Device {
    /// Sends the driver's frames; returns whether there were any.
    #[inline]
    pub(super) fn transmit(&mut self, pair: usize, host: &mut impl Host, wire: &mut impl Wire) -> bool {
        let place = 2 * pair + 1;
        if !self.queues[place].is_on() || self.faults.stuck_transmit[pair] {
            return false;
        }
        let mut count = 0;
        while count < FRAMES && self.has_chain(place, host) {
            self.send(pair, host, wire);
            self.queues[place].finish(0);
            count += 1;
        }
        self.publish(place, host);
        count > 0
    }

    /// Reads the next chain of a queue into `chain`; returns whether there is one. Fails the device if it is no chain.
    #[inline]
    pub(super) fn has_chain(&mut self, place: usize, host: &mut impl Host) -> bool {
        self.take_chain(place, host).unwrap_or_else(|trouble| {
            self.fail(trouble);
            false
        })
    }

    #[inline]
    fn take_chain(&mut self, place: usize, host: &mut impl Host) -> Result<bool, Trouble> {
        let queue = &mut self.queues[place];
        let Some(head) = queue.next(host)? else { return Ok(false) };
        self.chain.read(queue, head, host)?;
        Ok(true)
    }

    /// Sends the frame in `chain`. Drops and notes an invalid one.
    #[inline]
    fn send(&mut self, pair: usize, host: &mut impl Host, wire: &mut impl Wire) {
        let len = self.chain.readable_len as usize;
        let bad = self.chain.writable_len > 0 || !(HEADER_LEN + FRAME_MIN..=PACKET_MAX).contains(&len);
        if bad || len - HEADER_LEN > self.frame_max() {
            self.journal.note(Class::BadDescriptor, self.now, 2 * pair as u64 + 1, len as u64);
            return;
        }
        if let Err(unmapped) = self.chain.gather(&mut self.packet, host) {
            self.unreachable(unmapped.at);
            return;
        }
        let (header, frame) = self.packet[..len].split_at(HEADER_LEN);
        // Flags and segmentation type are for offloads, none of which is offered; the device alone sets the number
        // of buffers (§5.1.6.2).
        if header[..2] != [0, 0] || header[10..] != [0, 0] {
            let value = header.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
            self.journal.note(Class::BadHeader, self.now, 2 * pair as u64 + 1, value);
        }
        if pair as u16 >= self.steering.transmit_pairs() {
            self.journal.note(Class::InactivePair, self.now, 2 * pair as u64 + 1, len as u64);
        }
        if self.partner {
            self.counts.sent += 1;
            wire.send(frame, self.now);
        }
    }

    /// Returns the length in bytes of the longest frame that driver and device may exchange (§5.1.4.1, §5.1.4.2).
    fn frame_max(&self) -> usize {
        let most = if self.has(feature::MTU) { usize::from(self.options.mtu) + AROUND_PAYLOAD } else { FRAME_MAX };
        most.min(FRAME_MAX)
    }

    /// Takes frames from the wire and delivers them to the driver; returns whether there were any.
    ///
    /// While the card has no room for more waiting frames, it takes none from the wire: a hypervisor's back end then
    /// keeps its frames, too.
    #[inline]
    pub(super) fn receive(&mut self, host: &mut impl Host, wire: &mut impl Wire) -> bool {
        let mut busy = false;
        for pair in 0..usize::from(PAIRS_MAX) {
            while let Some(frame) = self.waiting[pair].pop() {
                if self.deliver(pair, &frame, host) == Fate::NoBuffer {
                    self.waiting[pair].bytes += frame.len();
                    self.waiting[pair].frames.push_front(frame);
                    break;
                }
                busy = true;
            }
        }
        for _ in 0..FRAMES {
            if self.waiting.iter().any(|waiting| waiting.bytes >= WAITING_MAX) {
                break;
            }
            let Some(frame) = wire.receive(self.now) else { break };
            self.arrive(frame, host);
            busy = true;
        }
        for pair in 0..usize::from(PAIRS_MAX) {
            self.publish(2 * pair, host);
        }
        busy
    }

    /// Drops the frames from the wire, for lack of a driver; returns whether there were any.
    pub(super) fn lose(&mut self, wire: &mut impl Wire) -> bool {
        let count = (0..FRAMES).take_while(|_| wire.receive(self.now).is_some()).count();
        self.counts.not_ready += count as u64;
        count > 0
    }

    /// Handles a frame from the wire.
    #[inline]
    fn arrive(&mut self, frame: &[u8], host: &mut impl Host) {
        if !self.partner {
            self.counts.not_ready += 1;
            return;
        }
        if !(FRAME_MIN..=self.frame_max()).contains(&frame.len()) {
            self.counts.unfit += 1;
            return;
        }
        if self.has(feature::CTRL_RX) && !self.filter.passes(frame) {
            self.counts.filtered += 1;
            return;
        }
        let queues = &self.queues;
        let pair = usize::from(self.steering.pair_of(frame, |pair| queues[2 * usize::from(pair)].is_on()));
        let waits = !self.waiting[pair].frames.is_empty();
        if waits || self.deliver(pair, frame, host) == Fate::NoBuffer {
            match self.options.lossy {
                true => self.counts.no_buffer += 1,
                false => self.waiting[pair].push(frame),
            }
        }
    }

    /// Writes a frame to the next buffer of a receive queue.
    #[inline]
    fn deliver(&mut self, pair: usize, frame: &[u8], host: &mut impl Host) -> Fate {
        let place = 2 * pair;
        if !self.queues[place].is_on() || self.faults.stuck_receive[pair] || !self.runs() {
            return Fate::NoBuffer;
        }
        if !self.has_chain(place, host) {
            return Fate::NoBuffer;
        }
        let room = self.chain.writable_len;
        if self.chain.readable_len > 0 {
            self.journal.note(Class::BadDescriptor, self.now, place as u64, self.chain.readable_len);
        }
        // §5.1.4.2. Noted once per queue.
        let needs = HEADER_LEN + FRAME_MIN + usize::from(self.options.mtu);
        if self.has(feature::MTU) && room < needs as u64 && !self.queues[place].too_short {
            self.queues[place].too_short = true;
            self.journal.note(Class::ShortBuffer, self.now, place as u64, room);
        }
        if room < (HEADER_LEN + frame.len()) as u64 {
            // The buffer stays for the next frame.
            self.counts.unfit += 1;
            return Fate::Unfit;
        }
        // A posted write: the card gets no answer.
        if let Err(unmapped) = self.chain.scatter([&HEADER, frame], host) {
            self.unreachable(unmapped.at);
        }
        self.queues[place].finish(HEADER_LEN + frame.len());
        self.counts.received += 1;
        Fate::Stored
    }

    /// Shows the driver a queue's finished chains, and interrupts it if it asked for that.
    #[inline]
    pub(super) fn publish(&mut self, place: usize, host: &mut impl Host) {
        match self.queues[place].publish(self.has(feature::EVENT_IDX), host) {
            Ok(true) => self.interrupt(self.queues[place].vector, 1, host),
            Ok(false) => {}
            Err(trouble) => self.fail(trouble),
        }
    }

    /// Turns notifications off for all queues.
    pub(super) fn quiesce(&mut self, host: &mut impl Host) {
        let event_index = self.has(feature::EVENT_IDX);
        for place in 0..QUEUES {
            if self.queues[place].is_on()
                && let Err(trouble) = self.queues[place].quiesce(event_index, host)
            {
                self.fail(trouble);
            }
        }
    }

    /// Asks for notifications on every queue from which the device needs something; returns whether there is work
    /// already.
    pub(super) fn ask(&mut self, host: &mut impl Host) -> bool {
        let event_index = self.has(feature::EVENT_IDX);
        let mut found = false;
        for place in 0..QUEUES {
            let has_frames = |pair: usize| self.waiting.get(pair).is_some_and(|waiting| !waiting.frames.is_empty());
            // The device needs receive buffers only while frames wait for them.
            let wants = place == QUEUES - 1 || place % 2 == 1 || has_frames(place / 2);
            if !self.queues[place].is_on() || !wants {
                continue;
            }
            match self.queues[place].ask(event_index, host) {
                Ok(some) => found |= some,
                Err(trouble) => self.fail(trouble),
            }
        }
        found
    }
}
