//! Interrupts: causes, masks, vectors, and how often they may come (§7.4, §10.2.4).

use super::pci::VECTORS;
use super::regs::{ctrl_ext, icr};
use super::{Device, regs};
use crate::model::{Host, Interrupt};

/// The unit of ITR and EITR, in nanoseconds.
const THROTTLE_NS: u64 = 256;

/// The unit of RDTR, RADV, TIDV and TADV, in nanoseconds.
pub(super) const DELAY_NS: u64 = 1024;

#[derive(Debug, Default)]
pub(super) struct Interrupts {
    /// ICR, without the bit that says that an interrupt is asserted.
    pub cause: u32,
    /// IMS.
    pub mask: u32,
    /// Causes that a message was sent for and that were neither cleared nor masked since.
    signalled: u32,
    /// When each vector may fire again; MSI and INTx use the first.
    next_at: [u64; VECTORS],
    intx: bool,
    /// Whether INTx was deasserted since the host was told of it, if only for a moment.
    released: bool,
    /// When the causes of frames received or sent, which wait to be joined by others, are raised: causes, timer, last moment.
    pub receive_delay: Delay,
    pub transmit_delay: Delay,
}

impl Interrupts {
    /// All is forgotten, but the host has yet to learn that INTx is asserted no more.
    pub fn reset(&mut self) {
        *self = Interrupts { intx: self.intx, released: true, ..Interrupts::default() };
    }
}

/// Causes that are raised a while after what caused them.
#[derive(Debug, Default)]
pub(super) struct Delay {
    pub causes: u32,
    at: u64,
    last_at: u64,
}

impl Delay {
    /// Another packet: waits `delay` from now on, but not beyond `absolute` after the first.
    pub fn add(&mut self, causes: u32, now: u64, delay: u64, absolute: u64) {
        if self.causes == 0 {
            self.last_at = if absolute == 0 { u64::MAX } else { now.saturating_add(absolute) };
        }
        self.causes |= causes;
        self.at = now.saturating_add(delay);
    }

    fn due(&mut self, now: u64) -> u32 {
        if self.causes != 0 && now >= self.at.min(self.last_at) { std::mem::take(&mut self.causes) } else { 0 }
    }
}

impl Device {
    /// Sets causes in ICR, and the one that stands for all which belong to no queue.
    pub(super) fn raise(&mut self, causes: u32) {
        self.irq.cause |= causes;
        if causes & icr::OTHERS != 0 && self.pci.msix() {
            self.irq.cause |= icr::OTHER;
        }
    }

    /// The causes that say the same of one receive queue (`RXQ0`) or transmit queue (`TXQ0`), which exist only with MSI-X.
    pub(super) fn of_queue(&self, first: u32, queue: usize) -> u32 {
        if self.pci.msix() { first << queue } else { 0 }
    }

    /// Reading ICR clears it when all is masked or an interrupt is asserted, and not otherwise (§10.2.4.1).
    pub(super) fn read_icr(&mut self) -> u32 {
        let asserted = self.irq.cause & self.irq.mask != 0;
        let value = self.irq.cause | if asserted { icr::INT_ASSERTED } else { 0 };
        if asserted || self.irq.mask == 0 {
            self.clear_causes(u32::MAX);
            if asserted && self.get(regs::CTRL_EXT) & ctrl_ext::IAME != 0 {
                self.mask_causes(self.get(regs::IAM));
            }
        }
        value
    }

    pub(super) fn clear_causes(&mut self, causes: u32) {
        self.irq.cause &= !causes;
        self.irq.signalled &= self.irq.cause;
        self.irq.released |= self.irq.signalled == 0;
    }

    pub(super) fn mask_causes(&mut self, causes: u32) {
        self.irq.mask &= !causes;
        self.irq.signalled &= self.irq.mask;
        self.irq.released |= self.irq.signalled == 0;
    }

    /// The causes that IVAR gives to a vector.
    fn causes_of(&self, vector: usize) -> u32 {
        let ivar = self.get(regs::IVAR);
        let causes = [icr::RXQ0, icr::RXQ0 << 1, icr::TXQ0, icr::TXQ0 << 1, icr::OTHER];
        let mine = |i: usize| (ivar >> (4 * i) & 0xf) as usize == (vector | 8);
        causes.iter().enumerate().filter(|(i, _)| mine(*i)).fold(0, |all, (_, cause)| all | cause)
    }

    /// Sends what is to be sent.
    #[inline]
    pub(super) fn signal(&mut self, host: &mut impl Host) {
        let mut late = self.irq.receive_delay.due(self.now);
        late |= self.irq.transmit_delay.due(self.now);
        if late != 0 {
            self.raise(late);
        }
        let due = self.irq.cause & self.irq.mask & !self.irq.signalled;
        if due == 0 && self.pci.pending() == 0 && !self.irq.intx {
            return;
        }
        if !self.pci.master() && (self.pci.msix() || self.pci.msi()) {
            // A message is a write to memory.
            return;
        }
        match (self.pci.msix(), self.pci.msi()) {
            (true, _) => self.signal_msix(host),
            (false, msi) => self.signal_one(msi, host),
        }
    }

    fn signal_msix(&mut self, host: &mut impl Host) {
        self.set_intx(false, host);
        if self.lose(self.pci.pending() != 0) {
            self.pci.clear_pending(u32::MAX);
        }
        self.pci.fire_pending(host);
        for vector in 0..VECTORS {
            let due = self.irq.cause & self.irq.mask & !self.irq.signalled & self.causes_of(vector);
            // What OTHER stands for must itself be unmasked.
            let other = due & icr::OTHER != 0 && self.irq.cause & self.irq.mask & icr::OTHERS == 0;
            let due = if other { due & !icr::OTHER } else { due };
            if due == 0 || self.now < self.irq.next_at[vector] {
                continue;
            }
            self.irq.signalled |= due;
            self.irq.next_at[vector] = self.now + u64::from(self.get(regs::EITR.nth(vector))) * THROTTLE_NS;
            self.count(regs::IAC, 1);
            if !self.lose(true) {
                self.pci.fire(vector, host);
            }
            // Auto-clear and auto-mask, as the message leaves (§10.2.4.7, CTRL_EXT.EIAME).
            let cleared = due & self.get(regs::EIAC);
            self.clear_causes(cleared);
            if self.options.eiac_masks {
                self.mask_causes(cleared);
            }
            if self.get(regs::CTRL_EXT) & ctrl_ext::EIAME != 0 {
                self.mask_causes(due & self.get(regs::IAM));
            }
        }
    }

    fn signal_one(&mut self, msi: bool, host: &mut impl Host) {
        let asserted = self.irq.cause & self.irq.mask;
        let due = asserted & !self.irq.signalled;
        if due != 0 && self.now >= self.irq.next_at[0] {
            self.irq.signalled |= due;
            self.irq.next_at[0] = self.now + u64::from(self.get(regs::ITR)) * THROTTLE_NS;
            self.count(regs::IAC, 1);
            if msi && !self.lose(true) {
                host.interrupt(Interrupt::Msi);
            }
        }
        // Both edges, where it was asserted anew since: whoever counts edges would wait for ever for the second.
        if std::mem::take(&mut self.irq.released) {
            self.set_intx(false, host);
        }
        self.set_intx(!msi && self.irq.signalled != 0 && self.pci.intx_allowed(), host);
    }

    fn set_intx(&mut self, level: bool, host: &mut impl Host) {
        if level != self.irq.intx {
            self.irq.intx = level;
            self.pci.set_intx(level);
            if !(level && self.lose(true)) {
                host.interrupt(Interrupt::IntX(level));
            }
        }
    }

    /// Whether the interrupt that is about to leave is one that a test wants lost.
    fn lose(&mut self, leaves: bool) -> bool {
        let lose = leaves && self.faults.lost_interrupts > 0;
        self.faults.lost_interrupts -= u32::from(lose);
        lose
    }
}
