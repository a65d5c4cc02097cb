//! Keeps the driver's memory clean.

use super::VirtioNet;
use crate::nic::Scrub;
use crate::nic::bus::Bus;
use crate::nic::scrub::Dirt;
use crate::port::Burst;

impl<B: Bus> Scrub for VirtioNet<B> {
    fn keep_clean(&mut self) {
        self.dirt = Some(Dirt::of(&self.memory));
    }

    fn wipe_free(&mut self) {
        // The next receive or transmit reports a device that writes what it must not.
        let _ = self.tx.reap(self.memory.arena());
        self.commit(&Burst::new());
        if let Some(dirt) = &mut self.dirt {
            dirt.wipe_free(self.memory.arena());
        }
    }

    fn wipe_rest(&mut self) -> bool {
        self.wipe_free();
        self.memory.ledger().wipe_saved();
        self.tx.chains.is_empty()
    }
}
