//! rust-vmm's `virtio-queue` as the judge of a split ring.
//!
//! It ends a chain without a word where a driver broke a rule: at a loop, at a descriptor that does not exist. The chain
//! that it gives is whole if its last descriptor has no successor.
//!
//! Where our end differs on purpose, both are right:
//!
//! - **D1** Ours takes chains of 256 descriptors and of 256 pieces at most, in the ring and in a table (Q4). A queue may have
//!   more.
//! - **D2** Ours refuses a descriptor that names a table and has a successor: no driver may make one (2.7.5.3.1).
//! - **D3** Ours refuses a table of more descriptors than the queue: no driver may make one (2.7.5.3.1).
//! - **D4** Ours wants all of a table in the memory, also what lies behind the last descriptor of the chain.
//! - **D5** Ours wants each part of a ring in one region, by the front end's addresses.
//! - **D6** Ours asks for no kicks, where the driver names a place, by a place that it has passed. The judge leaves the last
//!   one there.
//! - **D7** Ours goes by the driver's flag for interrupts. The judge does not know it.
//!
//! Ours takes descriptors that lie at a multiple of 8 bytes. No driver may place them there (2.7), the judge refuses them,
//! and they are not tried.

use std::sync::atomic::Ordering;

use tasuki_net::virtq::{Head, PIECES_MAX};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::memory::{Memory, Places};
use super::{Broken, Judge, Taken};

pub struct Split {
    queue: Queue,
    /// The driver's index at the last look.
    known: u16,
    shown: u16,
}

impl Split {
    /// Opens a ring whose descriptors, available ring and used ring have these addresses, at this chain.
    pub fn new(memory: &Memory, size: u16, places: [u64; 3], next: u16, has_event_index: bool) -> Result<Self, Broken> {
        let mut queue = Queue::new(32768).expect("no queue is longer");
        queue.try_set_size(size).map_err(|_| Broken)?;
        let [descriptors, available, used] = places.map(GuestAddress);
        queue.try_set_desc_table_address(descriptors).map_err(|_| Broken)?;
        queue.try_set_avail_ring_address(available).map_err(|_| Broken)?;
        queue.try_set_used_ring_address(used).map_err(|_| Broken)?;
        queue.set_event_idx(has_event_index);
        queue.set_ready(true);
        let size = u64::from(size);
        // D5
        let parts = places.into_iter().zip([16 * size, 6 + 2 * size, 6 + 8 * size]);
        if !queue.is_valid(&memory.theirs) || !parts.into_iter().all(|(at, len)| Memory::is_in_one(at, len)) {
            return Err(Broken);
        }
        queue.set_next_avail(next);
        let done = queue.used_idx(&memory.theirs, Ordering::Acquire).expect("it was checked").0;
        queue.set_next_used(done);
        Ok(Split { queue, known: next, shown: done })
    }

    fn descriptor(&self, memory: &Memory, at: u16) -> Descriptor {
        let at = self.queue.desc_table() + 16 * u64::from(at);
        memory.theirs.read_obj(GuestAddress(at)).expect("it was checked")
    }

    /// Returns whether our end takes this chain, which the judge takes (D1 to D4).
    fn is_for_us(&self, memory: &Memory, head: u16) -> bool {
        let mut at = head;
        for _ in 0..PIECES_MAX {
            let descriptor = self.descriptor(memory, at);
            if descriptor.refers_to_indirect_table() {
                let is_there = memory.is_there(descriptor.addr().0, descriptor.len());
                return is_there && !descriptor.has_next() && descriptor.len() / 16 <= self.queue.size().into();
            }
            if !descriptor.has_next() {
                return true;
            }
            at = descriptor.next();
        }
        false
    }

    /// Returns the index of the first descriptor of the next chain, and all descriptors but those that name a table; both
    /// as the last look at the driver's index has them.
    fn next(&mut self, memory: &Memory) -> Result<Option<(u16, Vec<Descriptor>)>, Broken> {
        let index = GuestAddress(self.queue.avail_ring() + 2);
        let now: u16 = memory.theirs.read_obj(index).expect("it was checked");
        memory.theirs.write_obj(self.known.to_le(), index).expect("it was checked");
        let mut chains = self.queue.iter(&memory.theirs).map_err(|_| Broken);
        let next = chains.as_mut().map(|chains| chains.next().map(|chain| (chain.head_index(), chain.collect())));
        memory.theirs.write_obj(now, index).expect("it was checked");
        next.map_err(|_| Broken)
    }

    fn pieces(&self, memory: &Memory, head: u16, descriptors: &[Descriptor]) -> Result<(Places, Places), Broken> {
        let is_whole = descriptors.last().is_some_and(|last| !last.has_next());
        if !is_whole || !self.is_for_us(memory, head) {
            return Err(Broken);
        }
        let (mut readable, mut writable) = (Places::new(), Places::new());
        for descriptor in descriptors {
            let places = if descriptor.is_write_only() { &mut writable } else { &mut readable };
            memory.add_to(places, (descriptor.addr().0, descriptor.len())).map_err(|()| Broken)?;
        }
        // D1
        let direct = self.direct(memory, head);
        let in_table = descriptors.len() - direct;
        let is_short = [readable.len(), writable.len(), in_table].into_iter().all(|count| count <= PIECES_MAX);
        if is_short { Ok((readable, writable)) } else { Err(Broken) }
    }

    /// Stores the used index once more.
    pub fn show_again(&self, memory: &Memory) {
        let (done, index) = (self.queue.next_used(), self.queue.used_ring() + 2);
        memory.theirs.write_obj(done.to_le(), GuestAddress(index)).expect("it was checked");
    }

    /// Returns the number of descriptors in the ring that name no table.
    fn direct(&self, memory: &Memory, head: u16) -> usize {
        let (mut at, mut count) = (head, 0);
        loop {
            let descriptor = self.descriptor(memory, at);
            if descriptor.refers_to_indirect_table() {
                return count;
            }
            count += 1;
            if !descriptor.has_next() {
                return count;
            }
            at = descriptor.next();
        }
    }
}

impl Judge for Split {
    /// The next chain and the next completion.
    type State = (u16, u16);

    fn look(&mut self, memory: &Memory) -> Result<bool, Broken> {
        self.queue.iter(&memory.theirs).map_err(|_| Broken)?;
        self.known = self.queue.avail_idx(&memory.theirs, Ordering::Acquire).expect("it was checked").0;
        Ok(self.known != self.queue.next_avail())
    }

    fn take(&mut self, memory: &Memory) -> Result<Option<Taken>, Broken> {
        let next = self.queue.next_avail();
        if self.known == next && !self.look(memory)? {
            return Ok(None);
        }
        let Some((head, descriptors)) = self.next(memory)? else { return Ok(None) };
        let pieces = self.pieces(memory, head, &descriptors);
        if pieces.is_err() {
            self.queue.set_next_avail(next);
        }
        let (readable, writable) = pieces?;
        Ok(Some((Head { id: head, slots: 0 }, readable, writable)))
    }

    fn put_back(&mut self, _: Head) {
        self.queue.go_to_previous_position();
    }

    fn complete(&mut self, memory: &Memory, head: Head, len: u32) {
        let index = GuestAddress(self.queue.used_ring() + 2);
        let before: u16 = memory.theirs.read_obj(index).expect("it was checked");
        self.queue.add_used(&memory.theirs, head.id, len).expect("a head that it gave");
        // Ours shows it later.
        memory.theirs.write_obj(before, index).expect("it was checked");
    }

    fn show(&mut self, memory: &Memory) -> Option<bool> {
        let done = self.queue.next_used();
        if self.shown == done {
            return Some(false);
        }
        self.shown = done;
        memory.theirs.write_obj(done.to_le(), GuestAddress(self.queue.used_ring() + 2)).expect("it was checked");
        let wants = self.queue.needs_notification(&memory.theirs).expect("it was checked");
        // D7
        Some(wants && (self.queue.event_idx_enabled() || memory.half(self.queue.avail_ring()) & 1 == 0))
    }

    fn want_kicks(&mut self, memory: &Memory, yes: bool) {
        if yes {
            self.queue.enable_notification(&memory.theirs).expect("it was checked");
            return;
        }
        self.queue.disable_notification(&memory.theirs).expect("it was checked");
        if self.queue.event_idx_enabled() {
            // D6
            let event = self.queue.used_ring() + 4 + 8 * u64::from(self.queue.size());
            let passed = self.queue.next_avail().wrapping_sub(1);
            memory.theirs.write_obj(passed.to_le(), GuestAddress(event)).expect("it was checked");
        }
    }

    fn positions(&self) -> (u16, u16) {
        (self.queue.next_avail(), self.queue.next_used())
    }

    fn state(&self) -> (u16, u16) {
        self.positions()
    }

    fn rewind(&mut self, memory: &Memory, (next, done): (u16, u16)) {
        self.queue.set_next_avail(next);
        self.queue.set_next_used(done);
        // It forgets the completions that it has counted.
        self.queue.needs_notification(&memory.theirs).expect("it was checked");
    }
}
