//! The RTL8139C+, a 100 Mb/s card, in its C+ mode: two rings of descriptors instead of one buffer for all.
//!
//! The card has no register that tells or sets its place in a ring: enabling a unit takes it to descriptor 0. So a
//! driver that resumes it writes the rings anew, rotated so that descriptor 0 is where the card must continue
//! (`ring.rs`).
//!
//! It has no MSI-X, so it interrupts by its pin (`bell.rs`). If its [`Bus`] cannot carry that
//! ([`NoIntX`](super::bus::BusError::NoIntX)), it is polled: then [`arm`](Port::arm) always returns [`Armed::Busy`],
//! and its descriptor never becomes readable.

mod bell;
pub mod driver_state;
mod regs;
mod ring;

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tasuki_shm::region::Span;

use self::bell::Bell;
use self::driver_state::{Counts, DriverState, Loan};
use self::regs::{DESCRIPTORS_MAX, RING_ALIGN, ability, bmcr, cpcr, cr, cr9346, dtccr, isr, msr, rcr, tcr, tppoll};
use self::ring::{RxRing, TxRing};
use super::bus::{Bus, Header, pci};
use super::driver_state::{DriverState as _, Head, broken};
use super::register::{Waiting, wait};
use super::{AROUND_PAYLOAD, Failed, Filter, Link, MTU_MIN, Mac, Nic, NicError, NicMemory, NicOptions, PciId, loan};
use crate::port::{Armed, Burst, Port};

/// All parts of a driver except its bus and its memory.
struct Assembly<R> {
    registers: R,
    rx: RxRing,
    tx: TxRing,
    mac: Mac,
    frame_max: u16,
    counts: Counts,
    bell: Bell,
}

/// Supported card.
const CARD: PciId = PciId { vendor: 0x10ec, device: 0x8139 };
/// First revision with a C+ mode.
const REVISION_MIN: u8 = 0x20;
/// Name of the supported card, for errors.
const DRIVER: &str = "the RTL8139C+ (10ec:8139 from revision 0x20 on)";
/// BAR with the registers in memory; BAR 0 has the same in the I/O space.
const REGISTERS: u8 = 1;

/// Maximum MTU in bytes.
const MTU_MAX: u16 = 1500;
/// Layout of the rings' region: both rings, and 64 bytes for counters.
const RX_AT: usize = 0;
const TX_AT: usize = RX_AT + DESCRIPTORS_MAX * 16;
const TALLY_AT: usize = TX_AT + DESCRIPTORS_MAX * 16;
const RINGS_LEN: usize = TALLY_AT + 64;
const _: () = assert!(RX_AT.is_multiple_of(RING_ALIGN) && TX_AT.is_multiple_of(RING_ALIGN));
const _: () = assert!(TALLY_AT.is_multiple_of(dtccr::ALIGN));

/// Time limit in ms for a reset, and for finishing the frames in the card's hands when a unit is switched off: 64
/// frames of the longest at 10 Mb/s take 79 ms.
const STEP_MS: u32 = 1000;
/// How long parking waits for the card to send its ring: a full ring at 100 Mb/s takes 8 ms.
const DRAIN: Duration = Duration::from_millis(10);

/// A running RTL8139C+.
pub struct Rtl8139<B: Bus> {
    bus: B,
    memory: NicMemory,
    registers: B::Registers,
    rx: RxRing,
    tx: TxRing,
    mac: Mac,
    /// Length of the longest frame that is sent, in bytes.
    frame_max: u16,
    counts: Counts,
    bell: Bell,
}

impl<B: Bus> std::fmt::Debug for Rtl8139<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rtl8139")
            .field("mac", &self.mac)
            .field("rx", &self.rx)
            .field("tx", &self.tx)
            .finish_non_exhaustive()
    }
}

fn check_options(options: &NicOptions) -> Result<(), NicError> {
    let wrong = |field, value, must| Err(NicError::Options { field, value, must });
    if !options.ring.is_power_of_two() || !(2..=DESCRIPTORS_MAX).contains(&options.ring.into()) {
        return wrong("ring", options.ring.into(), "its rings have a power of two of descriptors, from 2 to 64");
    }
    if options.scrub {
        return wrong("scrub", 1, "its driver does not keep its memory clean; hand it over cold");
    }
    if options.queues != 1 {
        return wrong("queues", options.queues.into(), "it has one receive queue");
    }
    if !(MTU_MIN..=MTU_MAX).contains(&options.mtu) {
        return wrong("mtu", options.mtu.into(), "its payloads have 68 to 1,500 bytes");
    }
    Ok(())
}

/// Checks that this driver supports the card behind `bus`.
fn check_card(bus: &mut impl Bus) -> Result<(), NicError> {
    let header = Header::of(bus, &[CARD], DRIVER)?;
    // The class word has the revision in its low byte (PCI Local Bus Specification 3.0, section 6.2.1).
    let [revision, ..] = bus.read_config(0x08)?.to_le_bytes();
    match revision < REVISION_MIN {
        true => Err(NicError::OtherCard { found: header.id, driver: DRIVER }),
        false => Ok(()),
    }
}

/// Checks that the memory is large enough.
fn check_memory(memory: &NicMemory, ring: u16) -> Result<(), NicError> {
    let have = memory.rings().len();
    match have < RINGS_LEN {
        true => Err(NicError::Memory { what: "rings", need: RINGS_LEN, have }),
        false => loan::check_stock(memory, ring.into()),
    }
}

fn words(memory: &NicMemory, at: usize, count: usize) -> Span<AtomicU64> {
    memory.rings().span(at, count).expect("the region was seen to be large enough")
}

/// Returns whether the card is gone: a reset card cannot read as all ones.
fn gone(command: u8) -> bool {
    command == u8::MAX
}

/// Returns the bit of MAR that lets a multicast in: the six highest bits of the CRC of its address.
fn hash_bit(mac: Mac) -> u32 {
    let mut crc = u32::MAX;
    for byte in mac.0 {
        for i in 0..8 {
            let carry = ((crc >> 31) ^ u32::from(byte >> i)) & 1;
            crc = (crc << 1) ^ (carry * 0x04c1_1db7);
        }
    }
    crc >> 26
}

impl<B: Bus> Rtl8139<B> {
    fn reset(registers: &B::Registers) -> Result<(), NicError> {
        regs::CR.write(registers, cr::RST);
        wait("a reset", STEP_MS, || {
            let command = regs::CR.read(registers);
            gone(command) || command & cr::RST == 0
        })?;
        if gone(regs::CR.read(registers)) { Err(NicError::Gone) } else { Ok(()) }
    }

    /// Tells the card the places of its rings and switches it on. It begins with descriptor 0 of each.
    ///
    /// The order matters. Set the bases while C+ mode is on, since some cards forget them when it is switched on
    /// (§6.33). Write the high half first, since writing the low half takes over both.
    fn enable(registers: &B::Registers, memory: &NicMemory) {
        regs::CPCR.write(registers, cpcr::CPTX | cpcr::CPRX | cpcr::MULRW | cpcr::DAC);
        regs::THPDS_HI.write(registers, 0);
        regs::THPDS.write(registers, 0);
        let base = |at: usize| (memory.rings_at() + at as u64).halves();
        let (low, high) = base(RX_AT);
        regs::RDSAR_HI.write(registers, high);
        regs::RDSAR.write(registers, low);
        let (low, high) = base(TX_AT);
        regs::TNPDS_HI.write(registers, high);
        regs::TNPDS.write(registers, low);
        regs::CR.write(registers, cr::RE | cr::TE);
    }

    /// Sets what a reset has cleared. The transmitter must be on: before, TCR cannot be written.
    fn configure(registers: &B::Registers) {
        Self::silence(registers);
        regs::MULINT.write(registers, 0);
        regs::ETTHR.write(registers, ETTHR_192);
        regs::TCR.write(registers, tcr::IFG | tcr::MXDMA_1024);
    }

    /// Stops the card's interrupts, and clears their causes.
    fn silence(registers: &B::Registers) {
        regs::IMR.write(registers, 0);
        regs::ISR.write(registers, isr::ALL);
    }

    fn write_filter(registers: &B::Registers, filter: &Filter) {
        let all = filter.promiscuous || filter.all_multicast;
        let hash = filter.multicast.iter().fold(0, |hash, &mac| hash | 1_u64 << hash_bit(mac));
        let [a, b, c, d, e, f, g, h] = if all { u64::MAX } else { hash }.to_le_bytes();
        regs::MAR0.write(registers, u32::from_le_bytes([a, b, c, d]));
        regs::MAR4.write(registers, u32::from_le_bytes([e, f, g, h]));
        let mut accept = rcr::AB | rcr::APM | rcr::MXDMA_1024 | rcr::RXFTH_WHOLE;
        if all || hash != 0 {
            accept |= rcr::AM;
        }
        if filter.promiscuous {
            accept |= rcr::AAP;
        }
        regs::RCR.write(registers, accept);
    }

    fn read_mac(registers: &B::Registers) -> Result<Mac, NicError> {
        let [a, b, c, d] = regs::IDR0.read(registers).to_le_bytes();
        let [e, f, ..] = regs::IDR4.read(registers).to_le_bytes();
        let mac = [a, b, c, d, e, f];
        if mac == [0xff; 6] { Err(NicError::Gone) } else { Ok(Mac(mac)) }
    }

    fn new(bus: B, memory: NicMemory, parts: Assembly<B::Registers>) -> Self {
        let Assembly { registers, rx, tx, mac, frame_max, counts, bell } = parts;
        Rtl8139 { bus, memory, registers, rx, tx, mac, frame_max, counts, bell }
    }

    /// Resets the card and sets it up.
    fn cold(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<Assembly<B::Registers>, NicError> {
        let registers = bus.registers(REGISTERS)?;
        // Reset the card before it may be bus master: if it was left running, it would write to addresses that are ours
        // now.
        Self::reset(&registers)?;
        memory.take_back();
        memory.map_anew(bus)?;
        pci::enable(bus, true)?;
        let bell = Bell::new(bus)?;
        let mac = Self::read_mac(&registers)?;
        let count = usize::from(options.ring);
        let rx = RxRing::new(memory, words(memory, RX_AT, 2 * count), &loan::stock(memory, count)?);
        let tx = TxRing::new(memory, words(memory, TX_AT, 2 * count), count, &[]);
        regs::CR9346.write(&registers, cr9346::UNLOCK);
        Self::enable(&registers, memory);
        Self::configure(&registers);
        Self::write_filter(&registers, &options.filter);
        regs::CR9346.write(&registers, cr9346::LOCK);
        let (frame_max, counts) = (options.mtu + AROUND_PAYLOAD, Counts::default());
        Ok(Assembly { registers, rx, tx, mac, frame_max, counts, bell })
    }

    /// Continues from a driver state. Changes nothing, neither in the card nor in memory, before it writes the rings.
    fn warm(bus: &mut B, memory: &NicMemory, driver_state: &DriverState) -> Result<Assembly<B::Registers>, NicError> {
        driver_state.check(&memory.layout())?;
        loan::check(memory, driver_state.slots())?;
        check_card(bus)?;
        let registers = bus.registers(REGISTERS)?;
        let mac = Self::read_mac(&registers)?;
        driver_state.head.check_mac(mac)?;
        let command = regs::CR.read(&registers);
        if gone(command) {
            return Err(NicError::Gone);
        }
        if command & (cr::RE | cr::TE) != 0 {
            return Err(broken("the card runs, though parked", command.into()));
        }
        let bell = Bell::new(bus)?;
        let count = usize::from(driver_state.head.ring);
        let rx = RxRing::resume(memory, words(memory, RX_AT, 2 * count), driver_state.received());
        let tx = TxRing::new(memory, words(memory, TX_AT, 2 * count), count, driver_state.unsent());
        Self::enable(&registers, memory);
        Ok(Assembly { registers, rx, tx, mac, frame_max: driver_state.frame_max, counts: driver_state.counts, bell })
    }

    /// Switches both units off. Returns the driver state for a successor.
    fn stop(&mut self) -> Result<DriverState, NicError> {
        self.drain()?;
        regs::CR.write(&self.registers, 0);
        wait("the frames in its hands", STEP_MS, || {
            let command = regs::CR.read(&self.registers);
            gone(command) || command & (cr::RE | cr::TE) == 0
        })?;
        self.answers()?;
        // The successor connects the pin anew, and must not find it asserted for us.
        Self::silence(&self.registers);
        self.tx.reap(&self.memory, &mut self.counts)?;
        Ok(self.driver_state())
    }

    /// Returns once the card has answered: earlier writes have arrived there.
    fn answers(&self) -> Result<(), NicError> {
        if gone(regs::CR.read(&self.registers)) { Err(NicError::Gone) } else { Ok(()) }
    }

    /// Tells the card that there is something to send.
    fn poll(&self) {
        regs::TPPOLL.write(&self.registers, tppoll::NPQ);
    }

    /// Gives the card time to send what it has. Frames that it does not send, for want of a link or time, stay where
    /// they are.
    fn drain(&mut self) -> Result<(), NicError> {
        let waiting = Waiting::begin();
        self.poll();
        loop {
            let late = waiting.since() >= DRAIN;
            self.tx.reap(&self.memory, &mut self.counts)?;
            if self.tx.is_empty() || late {
                return Ok(());
            }
            waiting.rest();
        }
    }

    fn driver_state(&self) -> DriverState {
        let (mut rx, mut tx) = ([Loan::default(); DESCRIPTORS_MAX], [Loan::default(); DESCRIPTORS_MAX]);
        let ring = rx.iter_mut().zip(self.rx.loans()).map(|(to, loan)| *to = loan).count();
        let unsent = tx.iter_mut().zip(self.tx.loans()).map(|(to, loan)| *to = loan).count();
        let fits = |count| u16::try_from(count).expect("at most 64");
        DriverState {
            head: Head::of::<DriverState>(&self.memory.layout(), self.mac, fits(ring)),
            frame_max: self.frame_max,
            unsent: fits(unsent),
            reserved: 0,
            rx,
            tx,
            counts: self.counts,
        }
    }

    /// Makes the card write its counters to memory, and returns them; `None` if it does not.
    fn tally(&self) -> Option<[u64; 8]> {
        let (low, high) = (self.memory.rings_at() + TALLY_AT as u64).halves();
        regs::DTCCR_HI.write(&self.registers, high);
        regs::DTCCR.write(&self.registers, low | dtccr::CMD);
        wait("a dump of its counters", STEP_MS, || regs::DTCCR.read(&self.registers) & dtccr::CMD == 0).ok()?;
        let words = words(&self.memory, TALLY_AT, 8);
        Some(std::array::from_fn(|i| words[i].load(Relaxed)))
    }
}

/// Bytes of a frame that are in the FIFO before the card begins to send it, in units of 32: 192, as in 8139cp.
const ETTHR_192: u8 = 6;

impl<B: Bus> Port for Rtl8139<B> {
    type Fault = NicError;

    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, NicError> {
        let starved = self.counts.rx_no_slot;
        let mut received = self.rx.receive(&self.memory, burst, most, &mut self.counts)?;
        if self.counts.rx_no_slot != starved {
            // Sent frames may leave slots to receive into.
            self.tx.reap(&self.memory, &mut self.counts)?;
            received += self.rx.receive(&self.memory, burst, most - received, &mut self.counts)?;
        }
        Ok(received)
    }

    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        self.tx.reap(&self.memory, &mut self.counts)?;
        let taken = self.tx.transmit(&self.memory, burst, self.frame_max, &mut self.counts);
        if taken > 0 {
            self.poll();
        }
        Ok(taken)
    }

    /// An idle poller calls this, so it is here that a removed card is noticed.
    fn arm(&mut self) -> Result<Armed, NicError> {
        // The order matters. If a frame came before its cause was cleared, the look at the ring sees it, since the card
        // has answered in between. If one comes later, it sets its cause again, and the card asserts its pin once IMR
        // lets that through.
        Self::silence(&self.registers);
        self.answers()?;
        if !self.bell.unmask()? {
            return Ok(Armed::Busy);
        }
        regs::IMR.write(&self.registers, isr::RECEIVED);
        match self.rx.is_ready() {
            true => Ok(Armed::Busy),
            false => Ok(Armed::Idle),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }
}

impl<B: Bus> Nic for Rtl8139<B> {
    type Bus = B;
    type DriverState = DriverState;

    fn start(mut bus: B, memory: NicMemory, options: &NicOptions) -> Result<Self, Failed<B>> {
        let checked = check_options(options).and_then(|()| check_memory(&memory, options.ring));
        if let Err(error) = checked.and_then(|()| check_card(&mut bus)) {
            return Err(Failed { error, bus, memory });
        }
        match Self::cold(&mut bus, &memory, options) {
            Ok(parts) => Ok(Self::new(bus, memory, parts)),
            Err(error) => {
                memory.withdraw(&mut bus);
                Err(Failed { error, bus, memory })
            }
        }
    }

    fn resume(mut bus: B, memory: NicMemory, driver_state: &DriverState) -> Result<Self, Failed<B>> {
        match Self::warm(&mut bus, &memory, driver_state) {
            Ok(parts) => {
                let nic = Self::new(bus, memory, parts);
                nic.poll();
                Ok(nic)
            }
            Err(error) => Err(Failed { error, bus, memory }),
        }
    }

    /// Switches both units off. The card reports a unit as off when it has finished its current frame. Frames that come
    /// from then on until the card is resumed are lost, as on any card without a place for them.
    fn park(mut self) -> Result<(B, NicMemory, DriverState), Failed<B>> {
        match self.stop() {
            Ok(driver_state) => Ok((self.bus, self.memory, driver_state)),
            Err(error) => Err(Failed { error, bus: self.bus, memory: self.memory }),
        }
    }

    fn stand_down(self) -> (B, NicMemory) {
        (self.bus, self.memory)
    }

    fn mac(&self) -> Mac {
        self.mac
    }

    fn link(&mut self) -> Result<Link, NicError> {
        self.answers()?;
        let media = regs::MSR.read(&self.registers);
        if media & msr::LINKB != 0 {
            return Ok(Link::Down);
        }
        let speed = if media & msr::SPEED_10 != 0 { 10 } else { 100 };
        let control = regs::BMCR.read(&self.registers);
        let full_duplex = if control & bmcr::ANE == 0 {
            control & bmcr::DUPLEX != 0
        } else {
            let common = regs::ANAR.read(&self.registers) & regs::ANLPAR.read(&self.registers);
            // The best mode that both can do is the agreed one (IEEE 802.3, annex 28B.3).
            common & ability::TX_FULL != 0 || common & (ability::TX | ability::T10_FULL) == ability::T10_FULL
        };
        Ok(Link::Up { speed, full_duplex })
    }

    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        Self::write_filter(&self.registers, filter);
        self.answers()
    }

    fn statistics(&mut self) -> Vec<(&'static str, u64)> {
        let counts = &self.counts;
        let mut all = vec![
            ("rx_packets", counts.rx_packets),
            ("tx_packets", counts.tx_packets),
            ("rx_bytes", counts.rx_bytes),
            ("tx_bytes", counts.tx_bytes),
            ("rx_errors", counts.rx_errors),
            ("tx_errors", counts.tx_errors),
            ("rx_no_slot", counts.rx_no_slot),
            ("tx_dropped", counts.tx_dropped),
            ("rx_frags", counts.rx_frags),
        ];
        let Some(tally) = self.tally() else { return all };
        let part = |word: usize, shift: u32, bits: u32| tally[word] >> shift & (u64::MAX >> (64 - bits));
        all.extend([
            ("tx_ok", tally[0]),
            ("rx_ok", tally[1]),
            ("tx_err", tally[2]),
            ("rx_err", part(3, 0, 32)),
            ("rx_fifo", part(3, 32, 16)),
            ("frame_align", part(3, 48, 16)),
            ("tx_ok_1col", part(4, 0, 32)),
            ("tx_ok_mcol", part(4, 32, 32)),
            ("rx_ok_phys", tally[5]),
            ("rx_ok_bcast", tally[6]),
            ("rx_ok_mcast", part(7, 0, 32)),
            ("tx_abort", part(7, 32, 16)),
            ("tx_underrun", part(7, 48, 16)),
        ]);
        all
    }
}
