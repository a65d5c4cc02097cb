//! The way of a frame out of the guest's memory, and which of its rings a turn looks at.

use super::*;

/// Number of frames taken from the guest before the node turns to frames for it.
const TAKES: usize = 32;

impl Guest {
    /// Returns the number of frames taken, also before the guest broke a rule. Each pair is the first in its turn.
    pub(super) fn take_from_guest(&mut self, egress: &mut Egress<'_>) -> usize {
        let Some(machine) = &self.machine else { return 0 };
        let (pairs, running) = (machine.device.pairs, machine.device.running);
        if pairs == 0 {
            return 0;
        }
        let (mut count, mut goes_on, first) = (0, true, self.first);
        let also = self.turns as usize % pairs;
        let (bits, below) = (running & !self.calm | 1 << also, (1 << first) - 1);
        for pair in numbers((bits & !below).into()).chain(numbers((bits & below).into())) {
            if !goes_on || count >= TAKES {
                break;
            }
            let took;
            (took, goes_on) = self.take_from_pair(pair, TAKES - count, egress);
            if count == 0 && took > 0 {
                self.first = (pair + 1) % PAIRS_MAX;
            }
            count += took;
            if egress.waits.for_room() {
                // That frame is the next one: how long a frame waits is counted for one at a time.
                self.first = pair;
            }
        }
        let bit = 1 << also;
        if pairs > 1 && goes_on && self.sent & bit == 0 && self.calm & bit == 0 {
            self.calm(bit);
        }
        self.sent &= !bit;
        count
    }

    /// Asks the drivers of these pairs to kick when they send. Those of which none has sent meanwhile are calm. Returns
    /// whether all are, or are to be looked at without a kick.
    pub(super) fn calm(&mut self, bits: Pairs) -> bool {
        let Some(machine) = &mut self.machine else { return true };
        let mut calm = 0;
        for pair in numbers(bits.into()) {
            let Some(queue) = machine.device.queue_of(2 * pair + FROM_GUEST) else { continue };
            queue.want_kicks(true);
            self.hushed &= !(1 << pair);
            if queue.look() != Ok(false) {
                return false;
            }
            calm |= Pairs::from(machine.device.kicks_for(pair)) << pair;
        }
        self.calm |= calm;
        true
    }

    /// Takes up to `most` frames that the guest sends by a pair. Returns their number, and whether more can be sent.
    fn take_from_pair(&mut self, pair: usize, most: usize, egress: &mut Egress<'_>) -> (usize, bool) {
        let Self { machine, chain, calm, hushed, sent, broken, counts, .. } = self;
        let Some(machine) = machine else { return (0, false) };
        let header = header_len(&machine.device);
        let Device { memory, queues, touched, .. } = &mut machine.device;
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
        (*calm, *sent, *touched) = (*calm & !bit, *sent | bit, *touched | 1 << ring);
        if *hushed & bit == 0 {
            *hushed |= bit;
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
