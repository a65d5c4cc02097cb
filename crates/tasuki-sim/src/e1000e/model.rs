//! The 82574L as a [`Model`], for servers.

use super::pci::VECTORS;
use super::{Bar, Device, Unseen, regs};
use crate::journal::Journal;
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
        Device::read_config(self, offset, width)
    }

    fn write_config(&mut self, offset: u32, width: u8, value: u32, now: u64) {
        self.write_config(offset, width, value, now);
    }

    fn read(&mut self, bar: Bar, offset: u32, width: u8, now: u64) -> u32 {
        self.read(bar, offset, width, now)
    }

    fn write(&mut self, bar: Bar, offset: u32, width: u8, value: u32, now: u64) {
        self.write(bar, offset, width, value, now);
    }

    fn set_partner(&mut self, there: bool) {
        self.set_partner(there);
    }

    fn step(&mut self, host: &mut impl Host, wire: &mut impl Wire, now: u64) -> bool {
        self.step(host, wire, now)
    }

    /// The tail registers show all work, so there is nothing to request.
    fn doze(&mut self, _: &mut impl Host) -> bool {
        false
    }

    fn reset(&mut self, now: u64) {
        self.reset(now);
    }

    fn receives(&self) -> bool {
        self.receives()
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
