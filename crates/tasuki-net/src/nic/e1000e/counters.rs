//! Counts of the card, under the names that `ethtool -S` shows for it.

use std::time::{Duration, Instant};

use super::driver_state::COUNTERS;
use super::regs::{self, Cleared, Mmio, Reg, Ro};
use super::ring::Dropped;
use crate::nic::NicError;
use crate::nic::bus::Registers;
use crate::nic::driver_state::check_counts;

/// Register or registers of a counter.
enum Source {
    Word(Reg<Cleared>),
    /// Low and high half: reading the high half clears both.
    Pair(Reg<Ro>, Reg<Cleared>),
}
use Source::{Pair, Word};

/// Counters in the order of the driver state. The order is part of its version.
const SOURCES: [(&str, Source); 26] = [
    ("rx_packets", Word(regs::GPRC)),
    ("tx_packets", Word(regs::GPTC)),
    ("rx_bytes", Pair(regs::GORCL, regs::GORCH)),
    ("tx_bytes", Pair(regs::GOTCL, regs::GOTCH)),
    ("rx_broadcast", Word(regs::BPRC)),
    ("tx_broadcast", Word(regs::BPTC)),
    ("rx_multicast", Word(regs::MPRC)),
    ("tx_multicast", Word(regs::MPTC)),
    ("collisions", Word(regs::COLC)),
    ("rx_crc_errors", Word(regs::CRCERRS)),
    ("rx_no_buffer_count", Word(regs::RNBC)),
    ("rx_missed_errors", Word(regs::MPC)),
    ("tx_aborted_errors", Word(regs::ECOL)),
    ("tx_window_errors", Word(regs::LATECOL)),
    ("tx_deferred_ok", Word(regs::DC)),
    ("tx_single_coll_ok", Word(regs::SCC)),
    ("tx_multi_coll_ok", Word(regs::MCC)),
    ("rx_long_length_errors", Word(regs::ROC)),
    ("rx_short_length_errors", Word(regs::RUC)),
    ("rx_align_errors", Word(regs::ALGNERRC)),
    ("rx_flow_control_xon", Word(regs::XONRXC)),
    ("rx_flow_control_xoff", Word(regs::XOFFRXC)),
    ("tx_flow_control_xon", Word(regs::XONTXC)),
    ("tx_flow_control_xoff", Word(regs::XOFFTXC)),
    ("rx_frame_errors", Word(regs::RXERRC)),
    ("rx_fragment_errors", Word(regs::RFC)),
];

const LONG: usize = 17;
const SHORT: usize = 18;
/// Counters that add up to `rx_errors`: check sequence, length, alignment, and the PHY's errors.
const ERRORS: [usize; 5] = [9, LONG, SHORT, 19, 24];
pub(super) const XOFF_SENT: usize = 23;

/// Index of the first counter of the driver, after those of the card.
const OURS: usize = SOURCES.len();
const _: () = assert!(OURS + 3 <= COUNTERS);

/// Time between two readings. Each counter stops at its highest value: that of frames within 48 minutes, if short ones
/// come at a gigabit.
const EVERY: Duration = Duration::from_secs(600);

/// Time until a driver's first reading: no predecessor says when its last one was. Frames that waited go first.
const SOON: Duration = Duration::from_secs(10);

/// Counts since the card was started, of this driver and its predecessors.
#[derive(Debug, Clone)]
pub struct Counters {
    accumulated: Box<[u64; COUNTERS]>,
    pub dropped: Dropped,
    /// Number of frames that could not be sent.
    pub refused: u64,
    /// Time of the next reading, once the driver has looked for the first time.
    due: Option<Instant>,
}

impl Counters {
    /// Returns counters at zero, and clears the card's.
    pub fn start(mmio: &Mmio<impl Registers>) -> Self {
        let mut counters = Counters::resume(&[0; COUNTERS]);
        counters.collect(mmio);
        counters.accumulated.fill(0);
        counters
    }

    /// Checks that a predecessor can have counted this.
    pub fn check(accumulated: &[u64; COUNTERS]) -> Result<(), NicError> {
        check_counts(&[accumulated[OURS], accumulated[OURS + 1], accumulated[OURS + 2]])
    }

    /// Continues the counts of a predecessor, which must be [checked](Self::check).
    pub fn resume(accumulated: &[u64; COUNTERS]) -> Self {
        let dropped = Dropped { errors: accumulated[OURS], too_long: accumulated[OURS + 1] };
        Counters { accumulated: Box::new(*accumulated), dropped, refused: accumulated[OURS + 2], due: None }
    }

    /// Returns the counts for a successor.
    pub fn to_driver_state(&self) -> [u64; COUNTERS] {
        let mut words = *self.accumulated;
        words[OURS..OURS + 3].copy_from_slice(&[self.dropped.errors, self.dropped.too_long, self.refused]);
        words
    }

    /// [Collects](Self::collect) before one of the card's counters is full. Returns whether it was time for that.
    pub fn now_and_then(&mut self, mmio: &Mmio<impl Registers>, now: Instant) -> bool {
        let is_due = now >= *self.due.get_or_insert(now + SOON);
        if is_due {
            self.collect(mmio);
            self.due = Some(now + EVERY);
        }
        is_due
    }

    /// Adds the card's counts since the last call.
    pub fn collect(&mut self, mmio: &Mmio<impl Registers>) {
        let counted: [u64; SOURCES.len()] = std::array::from_fn(|i| match SOURCES[i].1 {
            Word(reg) => u64::from(mmio.take(reg)),
            Pair(low, high) => u64::from(mmio.read(low)) | u64::from(mmio.take(high)) << 32,
        });
        // The driver does not use the totals that include bad frames. But QEMU's model copies them into those of
        // good frames with each frame, so they must be cleared at the same time.
        for reg in [regs::TPR, regs::TPT, regs::TORH, regs::TOTH] {
            mmio.take(reg);
        }
        // A card that was pulled out meanwhile reads as ones, which are no counts.
        if mmio.read(regs::STATUS) != u32::MAX {
            self.accumulated.iter_mut().zip(counted).for_each(|(sum, counted)| *sum = sum.saturating_add(counted));
        }
    }

    /// Returns the number of PAUSE frames that the card has sent since the last call, and adds it to the counts.
    pub fn collect_xoff_sent(&mut self, mmio: &Mmio<impl Registers>) -> u64 {
        let sent = u64::from(mmio.take(regs::XOFFTXC));
        let sum = &mut self.accumulated[XOFF_SENT];
        *sum = sum.saturating_add(sent);
        sent
    }

    /// Returns all counts by name. The card may report any values, so additions saturate.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        let sums = &self.accumulated;
        let mut list: Vec<_> = SOURCES.iter().zip(sums.iter()).map(|((name, _), sum)| (*name, *sum)).collect();
        let sum = |counts: &[u64]| counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
        let Dropped { errors, too_long } = self.dropped;
        list.push(("rx_errors", sum(&[sum(&ERRORS.map(|i| sums[i])), errors, too_long])));
        list.push(("rx_length_errors", sum(&[sums[LONG], sums[SHORT], too_long])));
        list.push(("tx_dropped", self.refused));
        list
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A card that counts good frames received, up to the highest value; all else reads as zeros.
    struct Card(Cell<u32>);

    impl Registers for &Card {
        fn read8(&self, _: u32) -> u8 {
            0
        }

        fn read16(&self, _: u32) -> u16 {
            0
        }

        fn read32(&self, offset: u32) -> u32 {
            if offset == 0x4074 { self.0.take() } else { 0 }
        }

        fn write8(&self, _: u32, _: u8) {}

        fn write16(&self, _: u32, _: u16) {}

        fn write32(&self, _: u32, _: u32) {}
    }

    /// The shortest frames at a gigabit, for four hours, with a successor each so many seconds.
    #[test]
    fn no_counter_is_full_before_it_is_read() {
        const RATE: u32 = 1_488_096;
        for successor_each in [u64::MAX, 3600, 601, 15] {
            let card = Card(Cell::new(0));
            let mmio = Mmio(&card);
            let mut counters = Counters::start(&mmio);
            let mut now = Instant::now();
            for second in 1..=4 * 3600 {
                card.0.set(card.0.get().saturating_add(RATE));
                now += Duration::from_secs(1);
                if second % successor_each == 0 {
                    counters = Counters::resume(&counters.to_driver_state());
                }
                counters.now_and_then(&mmio, now);
            }
            counters.collect(&mmio);
            assert_eq!(counters.accumulated[0], 4 * 3600 * u64::from(RATE), "a successor each {successor_each} s");
        }
    }
}
