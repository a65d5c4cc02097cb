//! The device's end of a split virtqueue (§2.7), with its state outside the queue's memory.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use super::common::NO_VECTOR;
use crate::journal::Class;
use crate::model::{Host, Unmapped};

/// Most descriptors of a queue.
pub const SIZE_MAX: u16 = 1024;
/// Most descriptors of the control queue.
pub const CONTROL_SIZE: u16 = 64;

/// Entries of the available ring read at once.
const ENTRIES: usize = 32;

/// Flag for no notifications (used ring) or no interrupts (available ring).
const NO: u16 = 1;

/// An error from which the device cannot recover.
#[derive(Debug, Clone, Copy)]
pub struct Trouble {
    pub class: Class,
    /// An address, or a descriptor's index.
    pub place: u64,
    pub value: u64,
}

/// The device cannot reach the queue's memory.
impl From<Unmapped> for Trouble {
    fn from(Unmapped { at }: Unmapped) -> Self {
        Trouble { class: Class::UnmappedDma, place: at, value: 1 }
    }
}

#[derive(Debug, Default)]
pub struct Queue {
    /// Most descriptors that the driver may choose.
    pub size_max: u16,
    pub size: u16,
    /// Addresses of the descriptor table, the available ring and the used ring.
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub vector: u16,
    on: bool,
    /// End of the present reset.
    pub reset_until: Option<u64>,
    /// The driver reset this queue alone, and may enable it again.
    pub was_reset: bool,
    /// A too short buffer was noted already.
    pub too_short: bool,
    /// The queue's memory was mapped at least once.
    reached: bool,
    /// Available index at the last look.
    seen: u16,
    /// First descriptors of the chains that the device holds, in the order in which they became available; and, for
    /// each descriptor, whether such a chain begins there.
    heads: VecDeque<u16>,
    has: Vec<bool>,
    /// Elements not yet written to the used ring.
    finished: Vec<u8>,
    /// Used index, and its value at the last decision whether to interrupt.
    used_index: u16,
    told: u16,
    /// The driver is to notify the device of work: so at the beginning.
    asked: bool,
}

impl Queue {
    /// Resets the queue to its initial state (§2.6.1).
    pub fn reset(&mut self, size_max: u16) {
        *self = Queue { size_max, size: size_max, vector: NO_VECTOR, asked: true, ..Queue::default() };
    }

    /// Switches the queue on.
    pub fn enable(&mut self) {
        self.on = true;
        self.was_reset = false;
        self.has = vec![false; self.size.into()];
        self.heads.reserve(self.size.into());
    }

    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Returns the address of entry `index` of the available ring.
    fn entry(&self, index: u16) -> u64 {
        self.available.wrapping_add(4 + 2 * u64::from(index & (self.size - 1)))
    }

    /// Returns the address of used_event, the index at which the driver wants an interrupt, behind the available
    /// ring.
    fn used_event(&self) -> u64 {
        self.available.wrapping_add(4 + 2 * u64::from(self.size))
    }

    /// Returns the address of avail_event, the index at which the device wants a notification, behind the used ring.
    fn avail_event(&self) -> u64 {
        self.used.wrapping_add(4 + 8 * u64::from(self.size))
    }

    /// Returns the first descriptor of the oldest chain that the device holds.
    #[inline]
    pub fn next(&mut self, host: &mut impl Host) -> Result<Option<u16>, Trouble> {
        if self.heads.is_empty() {
            self.look(host)?;
        }
        Ok(self.heads.front().copied())
    }

    /// Takes the chains that became available since the last look; returns whether there were any. Later changes to
    /// their entries in the available ring have no effect.
    fn look(&mut self, host: &mut impl Host) -> Result<bool, Trouble> {
        let index = match host.read16(self.available.wrapping_add(2)) {
            // The driver has left and its memory is gone, so there is no work. The poll is no fault of the driver.
            Err(_) if self.reached => return Ok(false),
            index => index?,
        };
        self.reached = true;
        let mut count = index.wrapping_sub(self.seen);
        if count == 0 {
            return Ok(false);
        }
        if usize::from(count) + self.heads.len() > self.size.into() {
            return Err(Trouble { class: Class::IndexAhead, place: self.available + 2, value: index.into() });
        }
        while count > 0 {
            let run = count.min(ENTRIES as u16).min(self.size - (self.seen & (self.size - 1)));
            let mut bytes = [0; 2 * ENTRIES];
            let at = self.entry(self.seen);
            let entries = &mut bytes[..2 * usize::from(run)];
            host.read(at, entries)?;
            for entry in entries.as_chunks::<2>().0 {
                self.take(u16::from_le_bytes(*entry), at)?;
            }
            self.seen = self.seen.wrapping_add(run);
            count -= run;
        }
        Ok(true)
    }

    fn take(&mut self, head: u16, at: u64) -> Result<(), Trouble> {
        let trouble = |class| Trouble { class, place: at, value: head.into() };
        match self.has.get_mut(usize::from(head)) {
            None => Err(trouble(Class::BadDescriptor)),
            Some(true) => Err(trouble(Class::TwiceAvailable)),
            Some(has) => {
                *has = true;
                self.heads.push_back(head);
                Ok(())
            }
        }
    }

    /// Marks the oldest chain as finished, with `len` bytes written.
    #[inline]
    pub fn finish(&mut self, len: usize) {
        let Some(head) = self.heads.pop_front() else { return };
        self.has[usize::from(head)] = false;
        self.finished.extend(u32::from(head).to_le_bytes());
        self.finished.extend((len as u32).to_le_bytes());
    }

    /// Shows the driver the finished chains, the elements before the index; returns whether it wants an interrupt.
    pub fn publish(&mut self, event_index: bool, host: &mut impl Host) -> Result<bool, Trouble> {
        if self.finished.is_empty() {
            return Ok(false);
        }
        let mut elements = &self.finished[..];
        while !elements.is_empty() {
            let index = usize::from(self.used_index & (self.size - 1));
            let run = elements.len().min(8 * (usize::from(self.size) - index));
            let (now, later) = elements.split_at(run);
            host.write(self.used.wrapping_add(4 + 8 * index as u64), now)?;
            self.used_index = self.used_index.wrapping_add((run / 8) as u16);
            elements = later;
        }
        self.finished.clear();
        host.write16(self.used.wrapping_add(2), self.used_index)?;
        let new = self.used_index;
        let old = std::mem::replace(&mut self.told, new);
        // A device's read does not pass its writes. Here, too, the driver must be able to see the index before the
        // device reads whether the driver wants an interrupt.
        fence(Ordering::SeqCst);
        match event_index {
            true => {
                let event = host.read16(self.used_event())?;
                Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
            }
            false => Ok(host.read16(self.available)? & NO == 0),
        }
    }

    /// Asks for a notification of further work, and looks once more; returns whether there is some.
    pub fn ask(&mut self, event_index: bool, host: &mut impl Host) -> Result<bool, Trouble> {
        self.asked = true;
        // The card gets no answer to its writes.
        let _ = match event_index {
            true => host.write16(self.avail_event(), self.seen),
            false => host.write16(self.used, 0),
        };
        fence(Ordering::SeqCst);
        self.look(host)
    }

    /// Turns notifications off. With event indices, only one index in 65,536 causes one anyway until the device asks
    /// again.
    pub fn quiesce(&mut self, event_index: bool, host: &mut impl Host) -> Result<(), Trouble> {
        if !std::mem::replace(&mut self.asked, false) {
            return Ok(());
        }
        // The look shows at once whether the queue's memory is mapped.
        self.look(host)?;
        if !event_index {
            // The card gets no answer to its writes.
            let _ = host.write16(self.used, NO);
        }
        Ok(())
    }
}
