//! The way of a frame out of the guest's memory, and which of its rings a turn looks at.

use super::*;

/// Number of frames taken from the guest before the node turns to frames for it.
const TAKES: usize = 32;

/// Which of the rings by which the guest sends a turn looks at.
#[derive(Debug, Default)]
pub(super) struct Polling {
    /// Bits of the pairs that had nothing to send after their driver was asked to kick. A turn looks at one of them, and at
    /// the others once they kick.
    pub(super) idle: Pairs,
    /// Bits of the pairs whose driver was told that it need not kick.
    kicks_off: Pairs,
    /// Bits of the pairs that have sent since a turn checked whether they are idle.
    sent: Pairs,
    /// The pair from which the next turn takes first.
    first: usize,
}

impl Polling {
    /// Has the next turn look at all rings.
    pub(super) fn look_at_all(&mut self) {
        (self.idle, self.kicks_off) = (0, 0);
    }
}

impl Guest {
    /// Returns the number of frames taken, also before the guest broke a rule. Each pair is the first in its turn.
    pub(super) fn take_from_guest(&mut self, egress: &mut Egress<'_>) -> usize {
        let Some(front_end) = &self.front_end else { return 0 };
        let Device { pairs, running, first: start, .. } = front_end.device;
        if pairs == 0 {
            return 0;
        }
        let (mut count, mut goes_on, first) = (0, true, self.polling.first);
        let also = start + self.turns as usize % pairs;
        let (bits, below) = (running & !self.polling.idle | 1 << also, (1 << first) - 1);
        for pair in numbers((bits & !below).into()).chain(numbers((bits & below).into())) {
            if !goes_on || count >= TAKES {
                break;
            }
            let took;
            (took, goes_on) = self.take_from_pair(pair, TAKES - count, egress);
            if count == 0 && took > 0 {
                self.polling.first = (pair + 1) % PAIRS_MAX;
            }
            count += took;
            if egress.waits.for_room() {
                // `Waits` times one frame alone: it is the next one.
                self.polling.first = pair;
            }
        }
        let bit = 1 << also;
        if pairs > 1 && goes_on && (self.polling.sent | self.polling.idle) & bit == 0 {
            self.go_idle(bit);
        }
        self.polling.sent &= !bit;
        count
    }

    /// Asks the drivers of these pairs to kick when they send, and looks once more: the pairs without a frame are idle then.
    /// Returns whether all are.
    pub(super) fn go_idle(&mut self, bits: Pairs) -> bool {
        let Some(front_end) = &mut self.front_end else { return true };
        let mut idle = 0;
        for pair in numbers(bits.into()) {
            let Some(queue) = front_end.device.queue_of(2 * pair + FROM_GUEST) else { continue };
            queue.want_kicks(true);
            self.polling.kicks_off &= !(1 << pair);
            if queue.look() != Ok(false) {
                return false;
            }
            idle |= Pairs::from(front_end.device.kicks_for(pair)) << pair;
        }
        self.polling.idle |= idle;
        true
    }

    /// Takes up to `most` frames that the guest sends by a pair. Returns their number, and whether more can be sent.
    fn take_from_pair(&mut self, pair: usize, most: usize, egress: &mut Egress<'_>) -> (usize, bool) {
        let Self { front_end, chain, polling, broken, counts, .. } = self;
        let Some(front_end) = front_end else { return (0, false) };
        let header = header_len(&front_end.device);
        let Device { memory, queues, touched, .. } = &mut front_end.device;
        let ring = 2 * pair + FROM_GUEST;
        let Some(queue) = &mut queues[ring] else { return (0, true) };
        match queue.look() {
            Ok(false) => return (0, true),
            Ok(true) => {}
            Err(rule) => {
                *broken = Some(rule.into());
                return (0, false);
            }
        }
        let bit = 1 << pair;
        (polling.idle, polling.sent, *touched) = (polling.idle & !bit, polling.sent | bit, *touched | 1 << ring);
        if polling.kicks_off & bit == 0 {
            polling.kicks_off |= bit;
            queue.want_kicks(false);
        }
        let before = counts::lost(egress.dropped);
        let (count, bytes, goes_on) = match queue {
            Queue::Split(ring) => take_frames(ring, memory, chain, header, most, egress),
            Queue::Packed(ring) => take_frames(ring, memory, chain, header, most, egress),
        };
        counts.sent(pair, (count, bytes), before, egress.dropped);
        let goes_on = goes_on.unwrap_or_else(|rule| {
            *broken = Some(rule.into());
            false
        });
        (count, goes_on)
    }
}

/// Takes up to `most` frames that the guest sends by a ring. Returns their number and that of their bytes, and whether more
/// can be sent.
#[inline]
fn take_frames<R: Ring>(
    ring: &mut R,
    memory: &DriverMemory,
    chain: &mut Chain,
    header: usize,
    most: usize,
    egress: &mut Egress<'_>,
) -> (usize, usize, Result<bool, Broken>) {
    let mut bytes = 0;
    let fetch = |ring: &mut R, ahead| {
        ring.address_ahead(ahead).into_iter().for_each(|address| memory.prefetch_to_read(address, FETCHED));
    };
    (0..AHEAD).for_each(|ahead| fetch(ring, ahead));
    for count in 0..most {
        fetch(ring, AHEAD);
        match ring.take(memory, chain) {
            Ok(true) => {}
            Ok(false) => return (count, bytes, Ok(true)),
            Err(rule) => return (count, bytes, Err(rule)),
        }
        let pieces = &chain.readable;
        let len = len_of(pieces).saturating_sub(header);
        // The header and the addresses, in one read.
        let mut front = [0; LONG_HEADER + 14];
        memory.copy_to(pieces, 0, &mut front[..header + 14]);
        let offload = Offload::read_from_bytes(&front[..HEADER_LEN]).expect("it has this length");
        let addresses = front[header..header + 14].first_chunk().expect("they are 14 bytes");
        let goes_on = egress.send_unfinished(len, &offload, addresses, |room| _ = memory.copy_to(pieces, header, room));
        if !goes_on {
            ring.put_back(chain.head);
            return (count, bytes, Ok(false));
        }
        bytes += len;
        ring.complete(chain.head, 0);
    }
    (most, bytes, Ok(true))
}
