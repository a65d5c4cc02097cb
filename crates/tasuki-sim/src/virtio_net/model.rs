//! The virtio network device as a [`Model`], for servers.

use super::{Bar, Counts, Device, VECTORS};
use crate::journal::Journal;
use crate::model::{Host, Model};
use crate::wire::Wire;

impl Model for Device {
    type Bar = Bar;

    const VECTORS: u16 = VECTORS as u16;

    fn bar(index: u8) -> Option<(Bar, u32)> {
        Bar::at(index)
    }

    /// None: a driver always writes the same value to a queue's notification register, so polled memory would not
    /// show the write.
    fn tails(&self) -> impl Iterator<Item = (u32, u32)> {
        std::iter::empty()
    }

    fn read_config(&mut self, offset: u32, width: u8, now: u64) -> u32 {
        self.read_config(offset, width, now)
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

    fn doze(&mut self, host: &mut impl Host) -> bool {
        !self.faults.removed && self.runs() && self.pci.master() && self.ask(host)
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
        let Counts { received: _, sent: _, not_ready, filtered: _, unfit, no_buffer, rings: _ } = self.counts;
        vec![
            ("it had no driver or no link", not_ready),
            ("they were of a length that fits no buffer", unfit),
            ("no buffer was there", no_buffer),
        ]
    }
}
