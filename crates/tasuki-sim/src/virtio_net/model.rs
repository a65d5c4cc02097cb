//! The virtio network device as a [`Model`], for servers.

use super::{Bar, Counts, Device, VECTORS, ones, pci};
use crate::journal::{Class, Journal};
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
        self.now = self.now.max(now);
        if self.faults.removed {
            return ones(width);
        }
        // The window in the configuration space to the structures (§4.1.4.9).
        if offset == pci::WINDOW_DATA
            && let Some((bar, at, width)) = self.window()
        {
            return self.read(bar, at, width, now);
        }
        self.pci.space.read(offset, width)
    }

    fn write_config(&mut self, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if self.faults.removed {
            return;
        }
        if offset == pci::WINDOW_DATA
            && let Some((bar, at, width)) = self.window()
        {
            return self.write(bar, at, width, value & ones(width), now);
        }
        self.pci.space.write(offset, width, value);
    }

    fn read(&mut self, bar: Bar, offset: u32, width: u8, now: u64) -> u32 {
        self.now = self.now.max(now);
        if self.faults.removed || !self.pci.memory_on() {
            return ones(width);
        }
        match bar {
            Bar::Structures => self.read_structure(offset, width) & ones(width),
            Bar::MsiX => self.pci.table_read(offset & !3) >> (8 * (offset & 3)) & ones(width),
        }
    }

    fn write(&mut self, bar: Bar, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if self.faults.removed || !self.pci.memory_on() {
            return;
        }
        match bar {
            Bar::Structures => self.write_structure(offset, width, value),
            Bar::MsiX if width == 4 && offset.is_multiple_of(4) => self.pci.table_write(offset, value),
            Bar::MsiX => self.journal.note(Class::OddAccess, self.now, offset.into(), value.into()),
        }
    }

    fn set_partner(&mut self, there: bool) {
        if std::mem::replace(&mut self.partner, there) != there {
            self.common.stale = true;
            self.changed = true;
        }
    }

    /// Does the work that is due now: takes commands and frames from the driver, and frames from the wire; raises
    /// interrupts. The amount is bounded; returns whether there was any.
    fn step(&mut self, host: &mut impl Host, wire: &mut impl Wire, now: u64) -> bool {
        self.now = self.now.max(now);
        if self.faults.removed {
            return false;
        }
        self.pass_time();
        let mut busy = false;
        if self.runs() && self.pci.master() {
            self.quiesce(host);
            busy |= self.serve_commands(host);
            for pair in 0..usize::from(self.pairs()) {
                busy |= self.transmit(pair, host, wire);
            }
            busy |= self.receive(host, wire);
        } else if self.options.lossy {
            busy |= self.lose(wire);
        }
        self.signal(host);
        busy
    }

    fn doze(&mut self, host: &mut impl Host) -> bool {
        !self.faults.removed && self.runs() && self.pci.master() && self.ask(host)
    }

    fn reset(&mut self, now: u64) {
        self.now = self.now.max(now);
        self.pci.reset();
        self.reset_device();
    }

    fn receives(&self) -> bool {
        self.partner && self.runs() && self.queues[0].is_on()
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
