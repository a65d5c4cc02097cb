//! Sending: descriptors, checksums, segmentation, and status write-back (§7.2, §10.2.6).

use super::receive::{BATCH, DESCRIPTOR_LEN, size_class};
use super::regs::{self, Reg, ctrl, icr, tarc, tctl, txd};
use super::ring::Cursors;
use super::{Device, interrupt::DELAY_NS, offload};
use crate::journal::Class;
use crate::model::Host;
use crate::wire::Wire;

/// Bytes of the longest packet that descriptors can form: the most that TCP segmentation takes, and its headers.
const PACKET_MAX: usize = 256 << 10;

/// Bytes of the longest frame sent, without its check sequence.
const FRAME_MAX: usize = 16384;

/// Bytes of the shortest frame, without its check sequence.
const MIN_LEN: usize = 60;

/// Bytes of the shortest packet in legacy descriptors, and of an Ethernet header.
const LEGACY_MIN: usize = 17;
const HEADER_LEN: usize = 14;

/// Bytes on the wire besides the frame: check sequence, preamble, gap.
const OVERHEAD: u64 = 24;

/// Most frames that a queue sends in a step.
const FRAMES: usize = 64;

/// A transmit ring as the card sees it.
#[derive(Debug, Default)]
pub(super) struct TransmitRing {
    pub cursors: Cursors,
    /// Descriptors that the card fetched, from the head on.
    fetched: [[u64; 2]; BATCH],
    /// The last context descriptor.
    context: Context,
}

/// Contents of a context descriptor (§7.2.11.1).
#[derive(Debug, Default, Clone, Copy)]
struct Context {
    /// IP checksum, as offsets in the packet: first byte covered, place of the checksum, last byte covered (0: to
    /// the end).
    ip: (usize, usize, usize),
    /// The same for the TCP or UDP checksum.
    transport: (usize, usize, usize),
    payload_len: usize,
    header_len: usize,
    segment_len: usize,
    tcp: bool,
    ipv4: bool,
}

/// The packet that the card is assembling.
#[derive(Debug)]
pub(super) struct Packet {
    bytes: Box<[u8]>,
    len: usize,
    /// Second word of its first descriptor: the data sheet takes the options from there.
    options: Option<u64>,
    /// The queue of its descriptors.
    queue: usize,
    /// The packet is faulty and will not be sent.
    spoilt: bool,
    /// A frame made from the packet: headers and a segment.
    segment: Box<[u8]>,
}

impl Default for Packet {
    fn default() -> Self {
        let buffer = |len| vec![0; len].into_boxed_slice();
        Packet {
            bytes: buffer(PACKET_MAX),
            len: 0,
            options: None,
            queue: 0,
            spoilt: false,
            segment: buffer(FRAME_MAX + 4),
        }
    }
}

impl Packet {
    /// Returns the bytes of a packet whose last descriptor has not come; at least 1 once a packet has begun.
    pub fn waiting(&self) -> u32 {
        if self.options.is_some() { self.len.max(1) as u32 } else { 0 }
    }

    pub fn clear(&mut self) {
        (self.len, self.options, self.spoilt) = (0, None, false);
    }
}

impl Device {
    /// Sends the driver's frames, a bounded number; returns whether there was anything to do.
    pub(super) fn transmit(&mut self, host: &mut impl Host, wire: &mut impl Wire) -> bool {
        let busy = (0..2).any(|queue| self.transmit[queue].cursors.head != self.transmit[queue].cursors.tail);
        if !busy || self.get(regs::TCTL) & tctl::EN == 0 || !self.link.up || !self.may_dma() {
            return false;
        }
        let mut sent = false;
        for queue in 0..2 {
            let on = self.get(regs::TARC.of(queue)) & tarc::ENABLE != 0 && !self.faults.stuck_transmit[queue];
            // A begun packet is finished before the other queue gets its turn.
            let other = self.packet.options.is_some() && self.packet.queue != queue;
            if on && !other {
                sent |= self.transmit_queue(queue, host, wire);
            }
        }
        sent
    }

    fn transmit_queue(&mut self, queue: usize, host: &mut impl Host, wire: &mut impl Wire) -> bool {
        let mut frames = 0;
        let mut causes = 0;
        let mut delayed = 0;
        let mut moved = false;
        while frames < FRAMES && !self.paused() && self.now >= self.send_at && self.fetch_transmit(queue, host) {
            let ring = &mut self.transmit[queue];
            let descriptor = ring.fetched[ring.cursors.next];
            let place = ring.cursors.head;
            ring.cursors.next += 1;
            let end = self.take_descriptor(queue, descriptor, host, wire);
            frames += usize::from(end);
            moved = true;
            if descriptor[1] & txd::RS != 0 || self.get(regs::IVAR) >> 31 == 1 {
                if descriptor[1] & txd::RS != 0 {
                    self.report(queue, place, descriptor[1], host);
                }
                // IDE: delay the cause (TIDV, TADV).
                match descriptor[1] & txd::IDE != 0 && self.get(regs::TIDV) != 0 {
                    true => delayed |= icr::TXDW,
                    false => causes |= icr::TXDW,
                }
            }
            let ring = &mut self.transmit[queue];
            ring.cursors.head = if ring.cursors.head + 1 >= ring.cursors.len { 0 } else { ring.cursors.head + 1 };
        }
        let ring = &self.transmit[queue];
        if moved && ring.cursors.head == ring.cursors.tail {
            causes |= icr::TXQE;
        }
        if causes != 0 {
            self.raise(causes | self.of_queue(icr::TXQ0, queue));
        }
        if delayed != 0 {
            let [delay, absolute] = [regs::TIDV, regs::TADV].map(|reg| u64::from(self.get(reg)) * DELAY_NS);
            let causes = delayed | self.of_queue(icr::TXQ0, queue);
            self.irq.transmit_delay.add(causes, self.now, delay, absolute);
        }
        moved
    }

    /// Fetches descriptors if none is left on the chip; returns whether one is there.
    fn fetch_transmit(&mut self, queue: usize, host: &mut impl Host) -> bool {
        let ring = &mut self.transmit[queue];
        if ring.cursors.next < ring.cursors.end {
            return true;
        }
        if ring.cursors.hung || ring.cursors.len == 0 || ring.cursors.head == ring.cursors.tail {
            return false;
        }
        let run = ring.cursors.run(ring.cursors.head);
        let count = (run as usize).min(BATCH);
        let mut bytes = [0; BATCH * DESCRIPTOR_LEN];
        let at = ring.cursors.base + u64::from(ring.cursors.head) * DESCRIPTOR_LEN as u64;
        if host.read(at, &mut bytes[..count * DESCRIPTOR_LEN]).is_err() {
            ring.cursors.hung = true;
            self.unreachable(at, true);
            return false;
        }
        for (to, words) in
            ring.fetched.iter_mut().zip(bytes[..count * DESCRIPTOR_LEN].as_chunks::<8>().0.as_chunks::<2>().0)
        {
            *to = words.map(u64::from_le_bytes);
        }
        (ring.cursors.next, ring.cursors.end) = (0, count);
        true
    }

    /// Writes a descriptor's status back: sets DD.
    fn report(&mut self, queue: usize, place: u32, second: u64, host: &mut impl Host) {
        let ring = &self.transmit[queue];
        let at = ring.cursors.base + u64::from(place) * DESCRIPTOR_LEN as u64 + 8;
        if host.write(at, &(second | txd::DD).to_le_bytes()).is_err() {
            self.unreachable(at, false);
        }
    }

    /// Carries out a descriptor; returns whether it ended a packet.
    fn take_descriptor(
        &mut self,
        queue: usize,
        [at, second]: [u64; 2],
        host: &mut impl Host,
        wire: &mut impl Wire,
    ) -> bool {
        let kind = second >> 20 & 0xf;
        let len = match (second & txd::DEXT != 0, kind) {
            (false, _) => second & 0xffff,
            (true, 0) => {
                self.transmit[queue].context = Context::read(at, second);
                self.count(regs::TSCTC, u32::from(second & txd::TSE != 0));
                return false;
            }
            (true, 1) => second & 0xf_ffff,
            (true, _) => {
                self.journal.note(Class::BadDescriptor, self.now, at, second);
                return false;
            }
        } as usize;
        if self.packet.options.is_none() {
            self.packet.options = Some(second);
            self.packet.queue = queue;
        }
        self.gather(at, len, second, host);
        if second & txd::EOP == 0 {
            return false;
        }
        self.end_packet(queue, second, wire);
        self.packet.clear();
        true
    }

    /// Appends a descriptor's bytes to the packet.
    fn gather(&mut self, at: u64, len: usize, second: u64, host: &mut impl Host) {
        let from = self.packet.len;
        if from + len > PACKET_MAX {
            self.journal.note(Class::BadDescriptor, self.now, at, second);
            self.packet.spoilt = true;
            return;
        }
        self.packet.len += len;
        if len > 0 && host.read(at, &mut self.packet.bytes[from..from + len]).is_err() {
            self.unreachable(at, true);
            self.packet.spoilt = true;
        }
    }

    fn end_packet(&mut self, queue: usize, last: u64, wire: &mut impl Wire) {
        let options = self.packet.options.unwrap_or(0);
        let context = self.transmit[queue].context;
        let len = self.packet.len;
        let cut = options & txd::DEXT != 0 && options & txd::TSE != 0;
        // A legacy descriptor must have 16 bytes at least (§7.2.10.1), and the maker's drivers send none of less than 17.
        let shortest = if options & txd::DEXT == 0 { LEGACY_MIN } else { HEADER_LEN };
        if self.packet.spoilt || len < shortest || !cut && len > FRAME_MAX || cut && !context.can_cut(len) {
            if !self.packet.spoilt {
                self.journal.note(Class::BadDescriptor, self.now, len as u64, options);
            }
            return;
        }
        // VLE and the tag are taken from the last descriptor.
        let tag = (last & txd::VLE != 0 && self.get(regs::CTRL) & ctrl::VME != 0).then_some((last >> 48) as u16);
        if cut {
            self.cut(context, options, tag, wire);
            return;
        }
        let frame = &mut self.packet.bytes[..len];
        if options & txd::DEXT == 0 {
            // CSO in 23:16, CSS in 47:40.
            if options & txd::IC != 0 {
                insert(frame, ((options >> 40 & 0xff) as usize, (options >> 16 & 0xff) as usize, 0));
            }
        } else {
            if options & txd::IXSM != 0 {
                insert(frame, context.ip);
            }
            if options & txd::TXSM != 0 {
                insert(frame, context.transport);
            }
        }
        self.send(len, tag, options & txd::IFCS != 0, wire);
    }

    /// Sends the first `len` bytes of the packet as a frame.
    #[inline]
    fn send(&mut self, len: usize, tag: Option<u16>, check: bool, wire: &mut impl Wire) {
        let kind = self.vlan_type();
        let Packet { bytes, segment, .. } = &mut self.packet;
        let (frame, mut len) = match tag {
            None => (bytes, len),
            Some(tag) => {
                segment[..12].copy_from_slice(&bytes[..12]);
                segment[12..14].copy_from_slice(&kind);
                segment[14..16].copy_from_slice(&tag.to_be_bytes());
                segment[16..len + 4].copy_from_slice(&bytes[12..len]);
                (segment, len + 4)
            }
        };
        if check {
            // TCTL.PSP pads. Without it, a short frame leaves as it is, and no partner accepts it.
            if len < MIN_LEN && self.registers[regs::TCTL.0 as usize / 4] & tctl::PSP != 0 {
                frame[len..MIN_LEN].fill(0);
                len = MIN_LEN;
            }
        } else if len > 4 {
            // The driver supplied the check sequence; frames on our wire have none.
            len -= 4;
        }
        wire.send(&frame[..len], self.now);
        let first = [frame[0], frame[1], frame[2], frame[3], frame[4], frame[5]];
        self.count_sent(first, len + 4);
    }

    fn count_sent(&mut self, to: [u8; 6], wire_len: usize) {
        self.count(regs::GPTC, 1);
        self.count(regs::TPT, 1);
        self.count_wide(regs::GOTCL, regs::GOTCH, wire_len as u64);
        self.count_wide(regs::TOTL, regs::TOTH, wire_len as u64);
        self.count(regs::PTC64.nth(size_class(wire_len)), 1);
        match to[0] & 1 {
            1 if to == [0xff; 6] => self.count(regs::BPTC, 1),
            1 => self.count(regs::MPTC, 1),
            _ => {}
        }
        if let Some(rate) = self.options.transmit_rate {
            let bits = (wire_len as u64 + OVERHEAD - 4) * 8;
            // The frame may have begun at the previous step, but no earlier, since no step had looked for it.
            self.send_at = self.send_at.max(self.stepped_at) + bits * 1_000_000_000 / rate.max(1);
        }
    }

    /// Does TCP segmentation (§7.2.6): puts the headers before each piece of the payload, with new lengths, numbers
    /// and checksums.
    fn cut(&mut self, context: Context, options: u64, tag: Option<u16>, wire: &mut impl Wire) {
        let header = context.header_len;
        let total = self.packet.len.min(header + context.payload_len);
        // The driver put the pseudo header's sum, without the length, into the checksum field.
        let whole = std::mem::take(&mut self.packet.bytes);
        let mut from = header;
        let mut index = 0;
        let mut buffer = std::mem::take(&mut self.packet.segment);
        while from < total {
            let len = context.segment_len.min(total - from);
            let frame = &mut buffer[..header + len];
            frame[..header].copy_from_slice(&whole[..header]);
            frame[header..].copy_from_slice(&whole[from..from + len]);
            context.number(frame, index, from - header, from + len == total);
            if options & txd::IXSM != 0 {
                insert(frame, context.ip);
            }
            if options & txd::TXSM != 0 {
                insert(frame, context.transport);
            }
            self.send_piece(frame, tag, wire);
            from += len;
            index += 1;
        }
        (self.packet.bytes, self.packet.segment) = (whole, buffer);
    }

    fn send_piece(&mut self, frame: &[u8], tag: Option<u16>, wire: &mut impl Wire) {
        let mut tagged = [0; FRAME_MAX + 4];
        let mut len = frame.len();
        tagged[..12].copy_from_slice(&frame[..12]);
        let at = match tag {
            Some(tag) => {
                tagged[12..14].copy_from_slice(&self.vlan_type());
                tagged[14..16].copy_from_slice(&tag.to_be_bytes());
                len += 4;
                16
            }
            None => 12,
        };
        tagged[at..len].copy_from_slice(&frame[12..]);
        let len = len.max(MIN_LEN);
        wire.send(&tagged[..len], self.now);
        self.count_sent([frame[0], frame[1], frame[2], frame[3], frame[4], frame[5]], len + 4);
    }

    /// Writes one of TDBAL to TDT of either queue.
    pub(super) fn write_transmit_ring(&mut self, reg: Reg, value: u32) {
        let enabled = self.get(regs::TCTL) & tctl::EN != 0;
        let regs = [regs::TDBAL, regs::TDBAH, regs::TDLEN, regs::TDH, regs::TDT];
        self.write_ring(reg, regs, enabled, value, |device, queue| &mut device.transmit[queue].cursors);
    }
}

impl Context {
    fn read(first: u64, second: u64) -> Self {
        let byte = |at: u32| (first >> at & 0xff) as usize;
        let word = |at: u32| (first >> at & 0xffff) as usize;
        Context {
            ip: (byte(0), byte(8), word(16)),
            transport: (byte(32), byte(40), word(48)),
            payload_len: (second & 0xf_ffff) as usize,
            header_len: (second >> 40 & 0xff) as usize,
            segment_len: (second >> 48 & 0xffff) as usize,
            tcp: second & txd::TCP != 0,
            ipv4: second & txd::IP != 0,
        }
    }

    /// Returns whether a packet of `len` bytes can be cut into segments.
    fn can_cut(&self, len: usize) -> bool {
        self.segment_len > 0
            && self.header_len >= 34
            && self.header_len < len
            && self.header_len + self.segment_len <= FRAME_MAX
            && self.ip.0 + 8 <= self.header_len
            && self.transport.0 + 8 + 6 * usize::from(self.tcp) <= self.header_len
    }

    /// Sets lengths, identification, sequence number and flags in the headers of segment `index`, which begins
    /// `offset` bytes into the payload.
    fn number(&self, frame: &mut [u8], index: u16, offset: usize, last: bool) {
        let len = frame.len();
        let (ip, transport) = (self.ip.0, self.transport.0);
        let get = |frame: &[u8], at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let put = |frame: &mut [u8], at: usize, value: u16| frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
        if self.ipv4 {
            put(frame, ip + 2, (len - ip) as u16);
            let id = get(frame, ip + 4).wrapping_add(index);
            put(frame, ip + 4, id);
        } else {
            put(frame, ip + 4, (len - ip).saturating_sub(40) as u16);
        }
        if self.tcp {
            let [high, low] = [get(frame, transport + 4), get(frame, transport + 6)].map(u32::from);
            let sequence = (high << 16 | low).wrapping_add(offset as u32);
            put(frame, transport + 4, (sequence >> 16) as u16);
            put(frame, transport + 6, sequence as u16);
            if !last {
                // Only the last segment has FIN and PSH.
                frame[transport + 13] &= !0x09;
            }
        } else {
            put(frame, transport + 4, (len - transport) as u16);
        }
        // The pseudo header's sum, in the checksum field, lacks the length.
        let at = self.transport.1;
        if at + 2 <= frame.len() {
            let sum = u64::from(get(frame, at)) + (len - transport) as u64;
            put(frame, at, offload::fold(sum));
        }
    }
}

/// Computes the checksum from `start` to `end` (the last byte, or 0 for all) and puts it at `at`. Bytes beyond the
/// frame are left out.
fn insert(frame: &mut [u8], (start, at, end): (usize, usize, usize)) {
    let end = if end == 0 { frame.len() } else { (end + 1).min(frame.len()) };
    if start >= end || at + 2 > frame.len() {
        return;
    }
    let sum = !offload::fold(offload::add(0, &frame[start..end]));
    // A checksum of zero is sent as ones, as UDP requires (§7.2.5).
    let sum = if sum == 0 { 0xffff } else { sum };
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}
