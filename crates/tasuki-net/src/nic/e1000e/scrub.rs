//! Keeps the memory of a driver clean.

use arrayvec::ArrayVec;
use tasuki_shm::arena::Slot;

use super::E1000e;
use crate::nic::Scrub;
use crate::nic::bus::Bus;
use crate::nic::scrub::Dirt;
use crate::port::Burst;

/// Number of slots that are wiped and posted at once.
const CHUNK: usize = 64;

impl<B: Bus> E1000e<B> {
    /// Gives the free slots to the card's receive rings, wiped of older frames.
    pub(super) fn refill_clean(&mut self) {
        let Some(dirt) = &mut self.dirt else { return };
        for ring in &mut self.receive {
            loop {
                let most = ring.room().min(CHUNK);
                let mut clean = ArrayVec::<Slot, CHUNK>::new();
                while clean.len() < most {
                    let Some(mut slot) = self.memory.arena().take() else { break };
                    dirt.wipe(&mut slot);
                    clean.push(slot);
                }
                let count = clean.len();
                // The arena supplies free slots in the order in which they are taken.
                drop(clean);
                ring.refill_some(&self.memory, count);
                if count < CHUNK {
                    break;
                }
            }
        }
    }
}

impl<B: Bus> Scrub for E1000e<B> {
    fn keep_clean(&mut self) {
        self.dirt = Some(Dirt::of(&self.memory));
    }

    fn wipe_free(&mut self) {
        self.transmit.reclaim(self.memory.arena());
        self.commit(&Burst::new());
        if let Some(dirt) = &mut self.dirt {
            dirt.wipe_free(self.memory.arena());
        }
    }

    fn wipe_rest(&mut self) -> bool {
        self.wipe_free();
        self.memory.ledger().wipe_saved();
        self.transmit.unsent() == 0
    }
}
