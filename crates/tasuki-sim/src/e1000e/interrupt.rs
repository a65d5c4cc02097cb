//! Interrupts: causes, masks, vectors, and throttling (§7.4, §10.2.4).

use super::pci::VECTORS;
use super::regs::{ctrl_ext, icr};
use super::{Device, regs};
use crate::model::{Host, Interrupt};

/// Unit of ITR and EITR, in nanoseconds.
const THROTTLE_NS: u64 = 256;

/// Unit of RDTR, RADV, TIDV and TADV, in nanoseconds.
pub(super) const DELAY_NS: u64 = 1024;

#[derive(Debug, Default)]
pub(super) struct Interrupts {
    /// ICR, without the bit for an asserted interrupt.
    pub cause: u32,
    /// IMS.
    pub mask: u32,
    /// Causes for which a message was sent, and that were neither cleared nor masked since.
    signalled: u32,
    /// Earliest time for the next interrupt of each vector; MSI and INTx use the first.
    next_at: [u64; VECTORS],
    intx: bool,
    /// Whether INTx was deasserted, if only for a moment, since the host last heard of it.
    released: bool,
    /// Delayed causes of received and of sent frames, which wait for more frames.
    pub receive_delay: Delay,
    pub transmit_delay: Delay,
}

impl Interrupts {
    /// Resets all state, but keeps INTx: the host has yet to hear that it is deasserted.
    pub fn reset(&mut self) {
        *self = Interrupts { intx: self.intx, released: true, ..Interrupts::default() };
    }
}

/// Causes that are raised a while after their event.
#[derive(Debug, Default)]
pub(super) struct Delay {
    pub causes: u32,
    at: u64,
    last_at: u64,
}

impl Delay {
    /// Adds the causes of another packet: they wait for `delay` from now on, but at most `absolute` after the first.
    /// Times in nanoseconds; `absolute` 0 means no limit.
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
    /// Sets causes in ICR and, with MSI-X, OTHER for those that belong to no queue.
    pub(super) fn raise(&mut self, causes: u32) {
        self.irq.cause |= causes;
        if causes & icr::OTHERS != 0 && self.pci.function.msix() {
            self.irq.cause |= icr::OTHER;
        }
    }

    /// Returns the cause of receive queue (`RXQ0`) or transmit queue (`TXQ0`) `queue`; without MSI-X there is none,
    /// and the result is 0.
    pub(super) fn of_queue(&self, first: u32, queue: usize) -> u32 {
        if self.pci.function.msix() { first << queue } else { 0 }
    }

    /// Reads ICR. The read clears it only if all causes are masked or an interrupt is asserted (§10.2.4.1).
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

    /// Returns the causes that IVAR assigns to a vector.
    fn causes_of(&self, vector: usize) -> u32 {
        let ivar = self.get(regs::IVAR);
        let causes = [icr::RXQ0, icr::RXQ0 << 1, icr::TXQ0, icr::TXQ0 << 1, icr::OTHER];
        let mine = |i: usize| (ivar >> (4 * i) & 0xf) as usize == (vector | 8);
        causes.iter().enumerate().filter(|(i, _)| mine(*i)).fold(0, |all, (_, cause)| all | cause)
    }

    /// Raises the interrupts that are due.
    #[inline]
    pub(super) fn signal(&mut self, host: &mut impl Host) {
        let mut late = self.irq.receive_delay.due(self.now);
        late |= self.irq.transmit_delay.due(self.now);
        if late != 0 {
            self.raise(late);
        }
        let due = self.irq.cause & self.irq.mask & !self.irq.signalled;
        if due == 0 && self.pci.function.pending() == 0 && !self.irq.intx {
            return;
        }
        if !self.pci.master() && (self.pci.function.msix() || self.pci.msi()) {
            // A message is a write to memory, for which the card must be bus master.
            return;
        }
        match (self.pci.function.msix(), self.pci.msi()) {
            (true, _) => self.signal_msix(host),
            (false, msi) => self.signal_one(msi, host),
        }
    }

    fn signal_msix(&mut self, host: &mut impl Host) {
        self.set_intx(false, host);
        if self.lose(self.pci.function.pending() != 0) {
            self.pci.function.clear_pending(u32::MAX);
        }
        self.pci.function.fire_pending(host);
        for vector in 0..VECTORS {
            let due = self.irq.cause & self.irq.mask & !self.irq.signalled & self.causes_of(vector);
            // OTHER needs one of the causes it stands for, unmasked.
            let other = due & icr::OTHER != 0 && self.irq.cause & self.irq.mask & icr::OTHERS == 0;
            let due = if other { due & !icr::OTHER } else { due };
            if due == 0 || self.now < self.irq.next_at[vector] {
                continue;
            }
            self.irq.signalled |= due;
            self.irq.next_at[vector] = self.now + u64::from(self.get(regs::EITR.nth(vector))) * THROTTLE_NS;
            self.count(regs::IAC, 1);
            if !self.lose(true) {
                self.pci.function.fire(vector, host);
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
        // Show both edges if it was released and asserted again since: a host that counts edges would wait for the
        // second for ever.
        if std::mem::take(&mut self.irq.released) {
            self.set_intx(false, host);
        }
        self.set_intx(!msi && self.irq.signalled != 0 && self.pci.function.intx_allowed(), host);
    }

    fn set_intx(&mut self, level: bool, host: &mut impl Host) {
        if level != self.irq.intx {
            self.irq.intx = level;
            self.pci.function.set_intx(level);
            if !(level && self.lose(true)) {
                host.interrupt(Interrupt::IntX(level));
            }
        }
    }

    /// Returns whether a test wants the interrupt that is about to leave lost, and counts it.
    fn lose(&mut self, leaves: bool) -> bool {
        let lose = leaves && self.faults.lost_interrupts > 0;
        self.faults.lost_interrupts -= u32::from(lose);
        lose
    }
}
