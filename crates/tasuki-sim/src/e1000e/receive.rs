//! Receiving: frames from the wire pass the filters, wait in the packet buffer, and go to the host's memory (§7.1,
//! §10.2.5).

use super::fifo::{Found, Waiting};
use super::regs::{self, Reg, ctrl, icr, mrqc, rctl, rfctl, rxcsum, rxd};
use super::ring::Cursors;
use super::{Device, interrupt::DELAY_NS, offload};
use crate::journal::Class;
use crate::model::Host;

pub(super) const DESCRIPTOR_LEN: usize = 16;

/// Most descriptors that the card fetches or writes back at once.
pub(super) const BATCH: usize = 32;

/// Bytes of the shortest frame, of the longest ordinary one, and of the longest with RCTL.LPE; each with its check
/// sequence.
const MIN_LEN: usize = 64;
const MAX_LEN: usize = 1522;
const MAX_LONG_LEN: usize = 16384;
const CRC_LEN: usize = 4;
const VLAN_TAG_LEN: usize = 4;

/// Nanoseconds for which the card still delivers from its packet buffer after RCTL.EN was cleared. The data sheet
/// says only that the card finishes work that it had begun; drivers wait for 10 ms and more. A frame of full length
/// takes 12 µs on the wire.
const STOP_NS: u64 = 20_000;

/// Contents of poisoned memory.
const POISON: [u8; 64] = [0x6b; 64];

/// The card's treatment of a frame from the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The frame waits in the packet buffer, or is in the host's memory already.
    Stored,
    /// The frame passed no filter, or was for the card itself (PAUSE).
    Filtered,
    /// The link is down.
    NoLink,
    /// Receives are off. MPC does not count it.
    Off,
    /// The packet buffer is full. MPC counts it.
    Overflow,
    /// The frame is too long (ROC counts it).
    TooLong,
    /// The frame's queue has no ring.
    NoQueue,
}

/// A receive ring as the card sees it.
#[derive(Debug, Default)]
pub(super) struct ReceiveRing {
    pub cursors: Cursors,
    /// Buffer addresses of the fetched descriptors, from the head on.
    fetched: [u64; BATCH],
    /// Descriptors to write back: those right before the head.
    written: WriteBack,
    /// Address and contents of the descriptor written back last.
    pub last: Option<(u64, [u8; DESCRIPTOR_LEN])>,
}

#[derive(Debug)]
struct WriteBack {
    bytes: [u8; BATCH * DESCRIPTOR_LEN],
    count: usize,
}

impl Default for WriteBack {
    fn default() -> Self {
        WriteBack { bytes: [0; BATCH * DESCRIPTOR_LEN], count: 0 }
    }
}

/// Returns an Ethernet address as a number.
#[inline]
pub(super) fn address(bytes: &[u8]) -> u64 {
    bytes[..6].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Device {
    /// Takes a frame (without its check sequence) from the wire.
    pub fn receive_from_wire(&mut self, frame: &[u8], now: u64) -> Fate {
        self.now = self.now.max(now);
        if !self.link.up || self.faults.removed {
            self.unseen.no_link += 1;
            return Fate::NoLink;
        }
        let control = self.get(regs::RCTL);
        if control & rctl::EN == 0 {
            self.unseen.receive_off += 1;
            return Fate::Off;
        }
        let wire_len = (frame.len() + CRC_LEN).max(MIN_LEN);
        self.count(regs::TPR, 1);
        self.count_wide(regs::TORL, regs::TORH, wire_len as u64);
        if frame.len() < 14 {
            self.count(regs::RUC, 1);
            return Fate::Filtered;
        }
        let longest = if control & rctl::LPE != 0 { MAX_LONG_LEN } else { MAX_LEN };
        if wire_len > longest {
            self.count(regs::ROC, 1);
            return Fate::TooLong;
        }
        if let Some(quanta) = self.pause_of(frame) {
            self.pause(quanta);
            if control & rctl::PMCF == 0 {
                return Fate::Filtered;
            }
        } else if !self.passes(frame, control) {
            self.unseen.filtered += 1;
            return Fate::Filtered;
        }
        self.accept(frame, wire_len, control)
    }

    /// Applies the address filter (§7.1.1).
    #[inline]
    fn passes(&self, frame: &[u8], control: u32) -> bool {
        let to = address(frame);
        if to & 1 << 40 == 0 {
            return control & rctl::UPE != 0 || self.addresses.contains(&to);
        }
        if to == 0xffff_ffff_ffff && control & rctl::BAM != 0 {
            return true;
        }
        // RCTL.MO selects the 12 upper bits that are the index: 47:36, 46:35, 45:34 or 43:32 of the address as it is
        // sent.
        let upper = u32::from(u16::from_le_bytes([frame[4], frame[5]]));
        let index = (upper >> [4, 3, 2, 0][(control >> 12 & 3) as usize] & 0xfff) as usize;
        control & rctl::MPE != 0
            || self.addresses.contains(&to)
            || self.get(regs::MTA.nth(index / 32)) >> (index % 32) & 1 != 0
    }

    fn accept(&mut self, frame: &[u8], wire_len: usize, control: u32) -> Fate {
        let (queue, rss) = self.scale(frame);
        let ring = &self.receive[usize::from(queue)];
        if ring.cursors.len == 0 {
            self.unseen.no_queue += 1;
            self.journal.note(Class::NoQueue, self.now, queue.into(), frame.len() as u64);
            return Fate::NoQueue;
        }
        if ring.cursors.available() <= self.fifo.of_queue(usize::from(queue)) {
            // Counted whether or not the packet buffer has room for the frame.
            self.count(regs::RNBC, 1);
        }
        if !self.fifo.fits(wire_len) {
            self.count(regs::MPC, 1);
            self.unseen.overflow += 1;
            self.raise(icr::RXO);
            return Fate::Overflow;
        }
        self.count_received(frame, wire_len);
        let mut found = Found { queue, rss, status: self.checked(frame), vlan: 0 };
        // CTRL.VME: the tag goes to the descriptor.
        let strip = self.get(regs::CTRL) & ctrl::VME != 0 && frame.len() >= 18 && frame[12..14] == self.vlan_type();
        let (head, rest) = if strip { (&frame[..12], &frame[16..]) } else { (&frame[..12], &frame[12..]) };
        let mut data_len = wire_len - CRC_LEN;
        if strip {
            found.status |= rxd::VP;
            found.vlan = u16::from_be_bytes([frame[14], frame[15]]);
            data_len -= VLAN_TAG_LEN;
        }
        if control & rctl::SECRC == 0 {
            let crc = offload::crc32([frame, &[0; MIN_LEN][..(wire_len - CRC_LEN).saturating_sub(frame.len())]]);
            let pad = &[0; MIN_LEN][..data_len.saturating_sub(head.len() + rest.len())];
            // The padding lies between the frame and its check sequence.
            match pad.is_empty() {
                true => self.fifo.push([head, rest, &crc.to_le_bytes()], data_len + CRC_LEN, wire_len, found),
                false => {
                    let mut whole = [0; MIN_LEN];
                    whole[..12].copy_from_slice(head);
                    whole[12..12 + rest.len()].copy_from_slice(rest);
                    self.fifo.push([&whole[..data_len], &crc.to_le_bytes(), &[]], data_len + CRC_LEN, wire_len, found);
                }
            }
        } else {
            self.fifo.push([head, rest, &[]], data_len, wire_len, found);
        }
        Fate::Stored
    }

    pub(super) fn vlan_type(&self) -> [u8; 2] {
        (self.get(regs::VET) as u16).to_be_bytes()
    }

    fn count_received(&mut self, frame: &[u8], wire_len: usize) {
        self.count(regs::GPRC, 1);
        self.count_wide(regs::GORCL, regs::GORCH, wire_len as u64);
        self.count(regs::PRC64.nth(size_class(wire_len)), 1);
        match frame[0] & 1 {
            1 if frame[..6] == [0xff; 6] => self.count(regs::BPRC, 1),
            1 => self.count(regs::MPRC, 1),
            _ => {}
        }
    }

    /// Returns the descriptor's checksum bits for the frame (§7.1.10).
    fn checked(&self, frame: &[u8]) -> u32 {
        let on = self.get(regs::RXCSUM) & (rxcsum::IPOFL | rxcsum::TUOFL);
        if on == 0 { rxd::IXSM } else { offload::check(frame, on & rxcsum::IPOFL != 0, on & rxcsum::TUOFL != 0) }
    }

    /// Returns the bytes in a receive buffer (RCTL.BSIZE, BSEX, FLXBUF).
    fn buffer_len(&self) -> usize {
        let control = self.get(regs::RCTL);
        match (control >> 27 & 0xf, control & rctl::BSEX != 0, control >> 16 & 3) {
            (0, false, size) => 2048 >> size,
            // 0 is reserved.
            (0, true, 0) => 2048,
            (0, true, size) => 32768 >> size,
            (flexible, ..) => flexible as usize * 1024,
        }
    }

    /// Moves waiting frames to the host's memory; returns whether there were any.
    #[inline]
    pub(super) fn deliver(&mut self, host: &mut impl Host) -> bool {
        let mut queues = 0_u32;
        let on = self.get(regs::RCTL) & rctl::EN != 0 || self.now < self.receive_until;
        if self.fifo.front().is_none() || !on || !self.may_dma() {
            return false;
        }
        let buffer_len = self.buffer_len();
        while let Some(frame) = self.fifo.front() {
            let queue = usize::from(frame.queue);
            if self.faults.stuck_receive[queue] || !self.fetch(queue, host) {
                break;
            }
            queues |= 1 << queue;
            self.fill(frame, queue, buffer_len, host);
        }
        for queue in 0..2 {
            self.write_back(queue, host);
            if queues >> queue & 1 != 0 {
                self.delivered(queue);
            }
        }
        queues != 0
    }

    /// Fetches descriptors if none is left on the chip; returns whether one is there.
    #[inline]
    fn fetch(&mut self, queue: usize, host: &mut impl Host) -> bool {
        let ring = &mut self.receive[queue];
        if ring.cursors.next < ring.cursors.end {
            return true;
        }
        if ring.cursors.hung || ring.cursors.len == 0 || ring.cursors.head == ring.cursors.tail {
            return false;
        }
        if ring.written.count == BATCH {
            self.write_back(queue, host);
        }
        let ring = &mut self.receive[queue];
        let count = (ring.cursors.run(ring.cursors.head) as usize).min(BATCH);
        let mut bytes = [0; BATCH * DESCRIPTOR_LEN];
        let at = ring.cursors.base + u64::from(ring.cursors.head) * DESCRIPTOR_LEN as u64;
        if host.read(at, &mut bytes[..count * DESCRIPTOR_LEN]).is_err() {
            ring.cursors.hung = true;
            self.unreachable(at, true);
            return false;
        }
        for (buffer, descriptor) in
            ring.fetched.iter_mut().zip(bytes[..count * DESCRIPTOR_LEN].as_chunks::<DESCRIPTOR_LEN>().0)
        {
            *buffer = u64::from_le_bytes(*descriptor.first_chunk().expect("16 bytes"));
        }
        ring.cursors.next = 0;
        ring.cursors.end = count;
        if self.options.poison {
            self.poison(queue, host);
        }
        count > 0
    }

    #[cold]
    fn poison(&mut self, queue: usize, host: &mut impl Host) {
        let len = self.buffer_len();
        let ring = &self.receive[queue];
        for buffer in &ring.fetched[..ring.cursors.end] {
            for at in (0..len).step_by(POISON.len()) {
                // An unreachable buffer is reported when a frame comes.
                let _ = host.write(buffer.wrapping_add(at as u64), &POISON);
            }
        }
    }

    /// Notes an access to unmapped memory. The card sees an error only for reads, since its writes are posted.
    #[cold]
    pub(super) fn unreachable(&mut self, at: u64, read: bool) {
        self.journal.note(Class::UnmappedDma, self.now, at, read.into());
        if read {
            self.pci.master_abort();
        }
    }

    /// Writes the part of a frame that fits one descriptor's buffer to the host.
    #[inline]
    fn fill(&mut self, frame: Waiting, queue: usize, buffer_len: usize, host: &mut impl Host) {
        let ring = &mut self.receive[queue];
        let buffer = ring.fetched[ring.cursors.next];
        ring.cursors.next += 1;
        let bytes = self.fifo.bytes(&frame, buffer_len);
        let (len, failed) = (bytes.len(), host.write(buffer, bytes).is_err());
        let last = frame.done + len == frame.len;
        let extended = self.get(regs::RFCTL) & rfctl::EXSTEN != 0;
        let hash = self.get(regs::RXCSUM) & rxcsum::PCSD != 0 && self.get(regs::MRQC) & 3 == mrqc::RSS;
        let said = self.faults.receive_length.unwrap_or(len as u16);
        let descriptor = match extended {
            true => extended_descriptor(&frame, said, last, hash),
            false => legacy_descriptor(buffer, &frame, said, last),
        };
        let ring = &mut self.receive[queue];
        let at = ring.written.count * DESCRIPTOR_LEN;
        ring.written.bytes[at..at + DESCRIPTOR_LEN].copy_from_slice(&descriptor);
        ring.written.count += 1;
        ring.cursors.head += 1;
        let wraps = ring.cursors.head == ring.cursors.len;
        if wraps {
            // `write_back` counts backwards from the head, so call it before the head wraps.
            self.write_back(queue, host);
            self.receive[queue].cursors.head = 0;
        } else if ring.written.count == BATCH {
            self.write_back(queue, host);
        }
        self.fifo.advance(len);
        if failed {
            self.unreachable(buffer, false);
        }
    }

    /// Writes the used descriptors back, all at once. RDH counts them already.
    #[inline]
    fn write_back(&mut self, queue: usize, host: &mut impl Host) {
        let ring = &mut self.receive[queue];
        let count = std::mem::take(&mut ring.written.count);
        if count == 0 {
            return;
        }
        let at = ring.cursors.base + u64::from(ring.cursors.head.wrapping_sub(count as u32)) * DESCRIPTOR_LEN as u64;
        let bytes = &ring.written.bytes[..count * DESCRIPTOR_LEN];
        let failed = host.write(at, bytes).is_err();
        if let Some(last) = bytes.last_chunk() {
            ring.last = Some((at + (count as u64 - 1) * DESCRIPTOR_LEN as u64, *last));
        }
        if failed {
            self.unreachable(at, false);
        }
    }

    /// Raises the causes for frames delivered to a queue, now or after the delay.
    fn delivered(&mut self, queue: usize) {
        let causes = icr::RXT0 | self.of_queue(icr::RXQ0, queue);
        let delay = u64::from(self.get(regs::RDTR) & 0xffff) * DELAY_NS;
        if delay == 0 {
            self.raise(causes);
        } else {
            let absolute = u64::from(self.get(regs::RADV)) * DELAY_NS;
            self.irq.receive_delay.add(causes, self.now, delay, absolute);
        }
        let ring = &self.receive[queue];
        // RCTL.RDMTS: few descriptors are left.
        let threshold = ring.cursors.len >> ((self.get(regs::RCTL) >> 8 & 3) + 1);
        if ring.cursors.available() <= threshold {
            self.count(regs::ICRXDMTC, 1);
            self.raise(icr::RXDMT0 | self.of_queue(icr::RXQ0, queue));
        }
    }

    pub(super) fn write_rctl(&mut self, value: u32) {
        let before = self.get(regs::RCTL);
        let both = before & value & rctl::EN != 0;
        if both && (before ^ value) & rctl::LAYOUT != 0 {
            self.journal.note(Class::SetupWhileEnabled, self.now, regs::RCTL.0.into(), value.into());
        }
        if before & rctl::EN == 0 && value & rctl::EN != 0 {
            // The card fetches descriptors anew.
            self.receive.iter_mut().for_each(|ring| ring.cursors.forget());
            if !self.pci.master() {
                self.journal.note(Class::NoBusMaster, self.now, regs::RCTL.0.into(), value.into());
            }
        }
        if before & !value & rctl::EN != 0 {
            self.receive_until = self.now + STOP_NS;
        }
        self.set(regs::RCTL, value);
    }

    /// Writes one of RDBAL to RDT of either queue.
    pub(super) fn write_receive_ring(&mut self, reg: Reg, value: u32) {
        let enabled = self.get(regs::RCTL) & rctl::EN != 0;
        let regs = [regs::RDBAL, regs::RDBAH, regs::RDLEN, regs::RDH, regs::RDT];
        self.write_ring(reg, regs, enabled, value, |device, queue| &mut device.receive[queue].cursors);
    }
}

/// Returns which of the six counters by size counts a frame.
pub(super) fn size_class(wire_len: usize) -> usize {
    match wire_len {
        ..65 => 0,
        65..128 => 1,
        128..256 => 2,
        256..512 => 3,
        512..1024 => 4,
        _ => 5,
    }
}

/// Builds a legacy descriptor (§7.1.4): the address stays; then length, checksum, status, errors, VLAN tag.
fn legacy_descriptor(buffer: u64, frame: &Waiting, len: u16, last: bool) -> [u8; DESCRIPTOR_LEN] {
    let status = rxd::DD | if last { rxd::EOP | frame.status } else { 0 };
    // The extended form has the errors in bits 31:24, this form in a byte of their own.
    let errors = status >> 24;
    let low = u64::from(len) | u64::from(status & 0xff) << 32 | u64::from(errors) << 40 | u64::from(frame.vlan) << 48;
    both(buffer, low)
}

/// Builds an extended descriptor (§7.1.5): MRQ, RSS hash; status and errors, length, VLAN tag.
fn extended_descriptor(frame: &Waiting, len: u16, last: bool, hash: bool) -> [u8; DESCRIPTOR_LEN] {
    let status = rxd::DD | if last { rxd::EOP | frame.status } else { 0 };
    let (kind, value) = if hash { frame.rss } else { (0, 0) };
    let multiple = u32::from(kind) | u32::from(frame.queue) << 8;
    both(
        u64::from(multiple) | u64::from(value) << 32,
        u64::from(status) | u64::from(len) << 32 | u64::from(frame.vlan) << 48,
    )
}

#[inline]
fn both(first: u64, second: u64) -> [u8; DESCRIPTOR_LEN] {
    (u128::from(second) << 64 | u128::from(first)).to_le_bytes()
}
