//! The 82574L as a [`Model`], for servers.

use super::pci::{Effect, VECTORS};
use super::regs::rctl;
use super::{Bar, Device, PULLED, PULLS, Unseen, ones, regs};
use crate::journal::{Class, Journal};
use crate::model::{Host, Model};
use crate::wire::Wire;

/// The registers that a driver writes for every burst: the tails of both receive and both transmit rings.
pub(super) const TAILS: [u32; 4] = [regs::RDT.0, regs::RDT.of(1).0, regs::TDT.0, regs::TDT.of(1).0];

impl Model for Device {
    type Bar = Bar;

    const VECTORS: u16 = VECTORS as u16;

    fn bar(index: u8) -> Option<(Bar, u32)> {
        // Only a BIOS needs the ports.
        Bar::at(index).filter(|(bar, _)| *bar != Bar::Ports)
    }

    fn tails(&self) -> impl Iterator<Item = (u32, u32)> {
        TAILS.into_iter().zip(self.tails())
    }

    fn read_config(&mut self, offset: u32, width: u8, _: u64) -> u32 {
        if self.faults.removed { ones(width) } else { self.pci.read(offset, width) }
    }

    fn write_config(&mut self, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if !self.faults.removed && self.pci.write(offset, width, value) == Effect::PowerUp {
            self.reset_mac(20 | 20 << 16);
        }
    }

    fn read(&mut self, bar: Bar, offset: u32, width: u8, now: u64) -> u32 {
        self.now = self.now.max(now);
        if self.faults.removed {
            return ones(width);
        }
        if !self.pci.memory_on() && bar != Bar::Ports {
            self.pci.unsupported_request();
            return ones(width);
        }
        let shift = 8 * (offset & 3);
        match (bar, offset) {
            (Bar::Registers, _) => {
                if width != 4 || shift != 0 {
                    self.journal.note(Class::OddAccess, self.now, offset.into(), width.into());
                }
                self.read_register(offset & !3) >> shift & ones(width)
            }
            (Bar::MsiX, _) => self.pci.function.table_read(offset & !3) >> shift & ones(width),
            (Bar::Ports, 0) => self.io_address,
            (Bar::Ports, 4) => self.read_register(self.io_address & !3),
            (Bar::Ports, _) => 0,
        }
    }

    fn write(&mut self, bar: Bar, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if self.faults.removed {
            return;
        }
        if !self.pci.memory_on() && bar != Bar::Ports {
            self.pci.unsupported_request();
            return;
        }
        match (bar, offset) {
            _ if width != 4 || offset & 3 != 0 => {
                self.journal.note(Class::OddAccess, self.now, offset.into(), value.into());
            }
            (Bar::Registers, _) => self.write_register(offset, value),
            (Bar::MsiX, _) => self.pci.function.table_write(offset, value),
            (Bar::Ports, 0) => self.io_address = value,
            (Bar::Ports, 4) => self.write_register(self.io_address & !3, value),
            (Bar::Ports, _) => {}
        }
    }

    fn set_partner(&mut self, there: bool) {
        self.link.partner = there;
    }

    /// Does the work that is due now: takes frames from the wire, moves them to memory, sends the driver's frames,
    /// raises interrupts. The amount is bounded; returns whether there was any.
    fn step(&mut self, host: &mut impl Host, wire: &mut impl Wire, now: u64) -> bool {
        self.now = self.now.max(now);
        if self.faults.removed {
            return false;
        }
        self.pass_time();
        // Renew a pause before taking frames from the wire: the partner must get the PAUSE frame before its timer
        // ends, however late this step is.
        let mut busy = self.send_pause(wire);
        for _ in 0..PULLS {
            let mut pulled = 0;
            // Take no more at once than the buffer holds anyway, so that the rate of steps makes no difference to
            // the wire.
            while pulled < PULLED && self.fifo.used() <= self.fifo.capacity() / 2 {
                let Some(frame) = wire.receive(self.now) else { break };
                self.receive_from_wire(frame, now);
                self.pause_at_once(host, wire);
                pulled += 1;
            }
            busy |= self.deliver(host) || pulled > 0;
            if pulled < PULLED {
                break;
            }
        }
        if self.fifo.used() > self.fifo.capacity() / 2 {
            // The host has no descriptors: further frames fill the buffer, then get lost.
            for _ in 0..PULLED {
                let Some(frame) = wire.receive(self.now) else { break };
                self.receive_from_wire(frame, now);
                self.pause_at_once(host, wire);
                busy = true;
            }
        }
        busy |= self.send_pause(wire);
        busy |= self.transmit(host, wire);
        self.stray(host);
        self.signal(host);
        self.stepped_at = self.now;
        busy
    }

    /// The tail registers show all work, so there is nothing to request.
    fn doze(&mut self, _: &mut impl Host) -> bool {
        false
    }

    fn reset(&mut self, now: u64) {
        self.now = self.now.max(now);
        self.pci.reset();
        self.reset_phy();
        self.reset_mac(20 | 20 << 16);
    }

    fn receives(&self) -> bool {
        self.link.up && self.get(regs::RCTL) & rctl::EN != 0
    }

    fn journal(&self) -> &Journal {
        &self.journal
    }

    fn dropped(&self) -> Vec<(&'static str, u64)> {
        let Unseen { receive_off, no_link, no_queue, filtered: _, overflow } = self.unseen;
        vec![
            ("its receive unit was off", receive_off),
            ("its packet buffer was full", overflow),
            ("its queue had no ring", no_queue),
            ("there was no link", no_link),
        ]
    }
}
