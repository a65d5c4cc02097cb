//! A soft reset points the card at another owner's rings (the data sheet's 6.6, Command Register: RST).
//!
//! The card has no register for its place in a ring, so a new owner's rings begin at their first descriptor, and a
//! reset takes the card there. The reset empties the FIFO and leaves the card's address, its multicast table, its
//! configuration space and the link as they are. It clears the receive filter ([`Accept`]) and the modes of the units,
//! which the taker writes anew.
//!
//! The card has no PAUSE that software could send. Frames are lost from when the giver shuts the filter until the taker
//! opens it: some because the giver must have handled all earlier ones, the rest as on any card whose receive unit is
//! off.

use std::time::{Duration, Instant};

use super::bell::Bell;
use super::driver_state::Counts;
use super::regs::{self, cr, cr9346, rcr};
use super::ring::{RxRing, TxRing};
use super::{
    AROUND_PAYLOAD, Assembly, DRAIN, REGISTERS, RX_AT, Rtl8139, TX_AT, check_card, check_memory, check_options, gone,
    words,
};
use crate::nic::bus::{Bus, Iova, Registers};
use crate::nic::driver_state::broken;
use crate::nic::{Can, Failed, How, Left, Mac, MemoryLayout, NicError, NicMemory, NicOptions, Repoint, loan};

/// Longest time of a frame from the wire to the ring, once no other is let in: the longest at 10 Mb/s takes 1.3 ms.
const LAST: Duration = Duration::from_millis(2);

/// Progress of a giver.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiesce {
    /// When it was told to stop.
    since: Option<Instant>,
    /// When the filter was shut, and its former setting.
    shut: Option<(Instant, Accept)>,
    /// Both units are off.
    off: bool,
}

/// Receive filter of the card.
#[derive(Debug, Clone, Copy)]
struct Accept {
    rcr: u32,
    mar: [u32; 2],
}

impl Accept {
    fn read(registers: &impl Registers) -> Self {
        Accept { rcr: regs::RCR.read(registers), mar: [regs::MAR0.read(registers), regs::MAR4.read(registers)] }
    }

    fn write(self, registers: &impl Registers) {
        regs::MAR0.write(registers, self.mar[0]);
        regs::MAR4.write(registers, self.mar[1]);
        regs::RCR.write(registers, self.rcr);
    }
}

/// A taker with rings of its own: everything but the card.
pub struct Ready<B: Bus> {
    bus: B,
    memory: NicMemory,
    parts: Parts<B::Registers>,
}

/// Parts that a taker has prepared.
struct Parts<R> {
    registers: R,
    rx: RxRing,
    tx: TxRing,
    mac: Mac,
    frame_max: u16,
    accept: Accept,
}

impl<B: Bus> std::fmt::Debug for Ready<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ready").finish_non_exhaustive()
    }
}

impl<B: Bus> Rtl8139<B> {
    /// Prepares everything that the card does not notice.
    fn ready(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<Parts<B::Registers>, NicError> {
        check_options(options)?;
        check_memory(memory, options.ring)?;
        check_card(bus)?;
        let registers = bus.registers(REGISTERS)?;
        let mac = Self::read_mac(&registers)?;
        let accept = Accept::read(&registers);
        if accept.rcr & rcr::ANY == 0 {
            // Only the owner that has shut the filter knows its setting.
            return Err(broken("the card lets nothing in, as if its owner had begun to stop it", accept.rcr.into()));
        }
        memory.take_back();
        let count = usize::from(options.ring);
        let rx = RxRing::new(memory, words(memory, RX_AT, 2 * count), &loan::stock(memory, count)?);
        let tx = TxRing::new(memory, words(memory, TX_AT, 2 * count), count, &[]);
        memory.map_anew(bus)?;
        Ok(Parts { registers, rx, tx, mac, frame_max: options.mtu + AROUND_PAYLOAD, accept })
    }

    /// Resets a card, which then begins with the first descriptors of the rings in `memory`.
    fn begin(registers: &B::Registers, memory: &NicMemory, accept: Accept) -> Result<(), NicError> {
        Self::reset(registers)?;
        regs::CR9346.write(registers, cr9346::UNLOCK);
        Self::enable(registers, memory);
        Self::configure(registers);
        accept.write(registers);
        regs::CR9346.write(registers, cr9346::LOCK);
        Ok(())
    }

    /// Checks that both units are off, as a taker must find them.
    fn check_off(registers: &B::Registers) -> Result<(), NicError> {
        match regs::CR.read(registers) {
            command if gone(command) => Err(NicError::Gone),
            command if command & (cr::RE | cr::TE) != 0 => Err(broken("the card runs, though stopped", command.into())),
            _ => Ok(()),
        }
    }
}

/// The card has one queue.
const CAN: Can = Can { point: true, pauses: false, fenced: false, steer: false };

impl<B: Bus> Repoint for Rtl8139<B> {
    type Ready = Ready<B>;

    fn prepare_rings(
        mut bus: B,
        memory: NicMemory,
        options: &NicOptions,
        how: How,
        _: Iova,
    ) -> Result<Ready<B>, Failed<B>> {
        match CAN.go(how).and_then(|()| Self::ready(&mut bus, &memory, options)) {
            Ok(parts) => Ok(Ready { bus, memory, parts }),
            Err(error) => Err(Failed { error, bus, memory }),
        }
    }

    fn give_up(ready: Ready<B>) -> (B, NicMemory) {
        let Ready { mut bus, memory, .. } = ready;
        // An error means that the mapping was gone already.
        let _ = memory.unmap(&mut bus);
        memory.take_back();
        (bus, memory)
    }

    fn can(&self) -> Can {
        CAN
    }

    /// The card cannot ask its link partner to pause.
    fn quiesce(&mut self, _: How, _: impl FnMut(&mut Self)) {
        self.quiesce = Quiesce { since: Some(Instant::now()), ..Quiesce::default() };
    }

    fn is_quiet(&mut self) -> bool {
        let late = self.quiesce.since.is_none_or(|since| since.elapsed() > DRAIN);
        // The next transmit reports frames that cannot be reaped.
        late || self.tx.reap(&self.memory, &mut self.counts).is_err() || self.tx.is_empty()
    }

    /// First shuts the filter, so that the giver can handle earlier frames while it can still answer; then switches
    /// both units off.
    fn leave(&mut self) -> Result<bool, NicError> {
        if self.quiesce.since.is_none() {
            return Err(broken("it was not quiesced before it was to be left", 0));
        }
        if self.quiesce.off {
            return Ok(!self.rx.is_ready());
        }
        let Some((since, _)) = self.quiesce.shut else {
            let accept = Accept::read(&self.registers);
            if gone(regs::CR.read(&self.registers)) {
                return Err(NicError::Gone);
            }
            regs::RCR.write(&self.registers, accept.rcr & !rcr::ANY);
            self.quiesce.shut = Some((Instant::now(), accept));
            return Ok(false);
        };
        if since.elapsed() < LAST || self.rx.is_ready() {
            return Ok(false);
        }
        self.switch_off()?;
        self.quiesce.off = true;
        Ok(!self.rx.is_ready())
    }

    fn left(&self) -> Left {
        Left::STOPPED
    }

    /// Sends the frames that were unsent; those that had come are still there.
    fn go_back(&mut self) -> Result<(), NicError> {
        let Quiesce { shut, off, .. } = std::mem::take(&mut self.quiesce);
        let Some((_, accept)) = shut else { return Ok(()) };
        if !off {
            accept.write(&self.registers);
            return if gone(regs::CR.read(&self.registers)) { Err(NicError::Gone) } else { Ok(()) };
        }
        // A taker may have run the card in its own memory, and connected the pin to itself.
        self.switch_off()?;
        self.bell = Bell::new(&mut self.bus)?;
        self.tx.reap(&self.memory, &mut self.counts)?;
        let driver_state = self.driver_state();
        let count = usize::from(driver_state.head.ring);
        self.rx = RxRing::resume(&self.memory, words(&self.memory, RX_AT, 2 * count), driver_state.received());
        self.tx = TxRing::new(&self.memory, words(&self.memory, TX_AT, 2 * count), count, driver_state.unsent());
        Self::begin(&self.registers, &self.memory, accept)?;
        self.poll();
        Ok(())
    }

    /// The card is always stopped, so `left` says nothing.
    fn repoint(ready: Ready<B>, _: Left) -> Result<Self, Failed<B>> {
        let Ready { mut bus, memory, parts } = ready;
        let begun = Self::check_off(&parts.registers).and_then(|()| {
            // If the bus does not share the pin's eventfds, this takes the pin away from the giver, which no longer
            // sleeps.
            let bell = Bell::new(&mut bus)?;
            Self::begin(&parts.registers, &memory, parts.accept)?;
            Ok(bell)
        });
        let bell = match begun {
            Ok(bell) => bell,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        let Parts { registers, rx, tx, mac, frame_max, .. } = parts;
        Ok(Self::new(bus, memory, Assembly { registers, rx, tx, mac, frame_max, counts: Counts::default(), bell }))
    }

    fn forget(&mut self, old: &MemoryLayout, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        let outcome = old.unmap_by(|at, len| {
            let unmapped = self.bus.unmap_dma(at, len);
            between(self);
            unmapped
        });
        Ok(outcome?)
    }
}
