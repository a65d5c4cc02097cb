//! The device's end of a split virtqueue (§2.7), and what is known of it besides its memory.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use super::common::NO_VECTOR;
use crate::journal::Class;
use crate::model::{Host, Unmapped};

/// Most descriptors of a queue.
pub const SIZE_MAX: u16 = 1024;
/// Most descriptors of the queue for commands.
pub const CONTROL_SIZE: u16 = 64;

/// Entries of the available ring that are read at once.
const ENTRIES: usize = 32;

/// In the flags of the used ring: no notifications. In those of the available ring: no interrupts.
const NO: u16 = 1;

/// What a device does not get over.
#[derive(Debug, Clone, Copy)]
pub struct Trouble {
    pub class: Class,
    /// Where: an address, or a descriptor's index.
    pub place: u64,
    pub value: u64,
}

/// A queue's memory cannot be reached.
impl From<Unmapped> for Trouble {
    fn from(Unmapped { at }: Unmapped) -> Self {
        Trouble { class: Class::UnmappedDma, place: at, value: 1 }
    }
}

#[derive(Debug, Default)]
pub struct Queue {
    /// Descriptors that it can have.
    pub size_max: u16,
    pub size: u16,
    /// Addresses of the descriptors, of the available ring and of the used ring.
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub vector: u16,
    on: bool,
    /// Until then a reset goes on.
    pub reset_until: Option<u64>,
    /// It was reset by itself, and may be enabled again.
    pub was_reset: bool,
    /// That its buffers are too short was noted.
    pub too_short: bool,
    /// Its memory was there once.
    reached: bool,
    /// The available index as it was seen last.
    seen: u16,
    /// Chains that the device has, in the order in which they were made available, and for each descriptor whether one begins there.
    heads: VecDeque<u16>,
    has: Vec<bool>,
    /// Elements of the used ring that are not yet written.
    finished: Vec<u8>,
    /// The used index, and what it was when it was last decided whether to interrupt.
    used_index: u16,
    told: u16,
    /// The driver was asked to say when there is work: as it is in the beginning.
    asked: bool,
}

impl Queue {
    /// All is as it was (§2.6.1).
    pub fn reset(&mut self, size_max: u16) {
        *self = Queue { size_max, size: size_max, vector: NO_VECTOR, asked: true, ..Queue::default() };
    }

    /// Begins to use it.
    pub fn enable(&mut self) {
        self.on = true;
        self.was_reset = false;
        self.has = vec![false; self.size.into()];
        self.heads.reserve(self.size.into());
    }

    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Where entry `index` of the available ring is.
    fn entry(&self, index: u16) -> u64 {
        self.available.wrapping_add(4 + 2 * u64::from(index & (self.size - 1)))
    }

    /// Where the driver says at which index it wants an interrupt: behind the available ring.
    fn used_event(&self) -> u64 {
        self.available.wrapping_add(4 + 2 * u64::from(self.size))
    }

    /// Where the device says at which index it wants a notification: behind the used ring.
    fn avail_event(&self) -> u64 {
        self.used.wrapping_add(4 + 8 * u64::from(self.size))
    }

    /// The first descriptor of the oldest chain that the device has.
    #[inline]
    pub fn next(&mut self, host: &mut impl Host) -> Result<Option<u16>, Trouble> {
        if self.heads.is_empty() {
            self.look(host)?;
        }
        Ok(self.heads.front().copied())
    }

    /// Takes what was made available since the last look; says whether there was something. What is changed in the available ring
    /// afterwards comes too late.
    fn look(&mut self, host: &mut impl Host) -> Result<bool, Trouble> {
        let index = match host.read16(self.available.wrapping_add(2)) {
            // Whose driver went away and took its memory along has no work. That we poll is nobody's fault.
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

    /// The device is done with the oldest chain, to which it wrote `len` bytes.
    #[inline]
    pub fn finish(&mut self, len: usize) {
        let Some(head) = self.heads.pop_front() else { return };
        self.has[usize::from(head)] = false;
        self.finished.extend(u32::from(head).to_le_bytes());
        self.finished.extend((len as u32).to_le_bytes());
    }

    /// Shows the driver what was finished, the elements before the index; says whether it wants an interrupt for that.
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
        // No read of a device passes its writes; here the index must be seen before we look whether the driver wants to hear of it.
        fence(Ordering::SeqCst);
        match event_index {
            true => {
                let event = host.read16(self.used_event())?;
                Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
            }
            false => Ok(host.read16(self.available)? & NO == 0),
        }
    }

    /// Asks for a notification when there is more work, and looks once more; says whether there is some.
    pub fn ask(&mut self, event_index: bool, host: &mut impl Host) -> Result<bool, Trouble> {
        self.asked = true;
        // Of a write the card learns nothing.
        let _ = match event_index {
            true => host.write16(self.avail_event(), self.seen),
            false => host.write16(self.used, 0),
        };
        fence(Ordering::SeqCst);
        self.look(host)
    }

    /// No notifications are wanted for now. With indices there are none anyhow until they are asked for, but one in 65,536.
    pub fn quiesce(&mut self, event_index: bool, host: &mut impl Host) -> Result<(), Trouble> {
        if !std::mem::replace(&mut self.asked, false) {
            return Ok(());
        }
        // Whether its memory is there shows at once.
        self.look(host)?;
        if !event_index {
            // Of a write the card learns nothing.
            let _ = host.write16(self.used, NO);
        }
        Ok(())
    }
}
