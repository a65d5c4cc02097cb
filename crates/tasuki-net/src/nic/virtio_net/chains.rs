//! Queues of frames. Each frame is a chain of two descriptors, a header in the rings' region and a slot, so that a slot
//! holds the frame and nothing else. Chain `k` is the descriptors `2k` and `2k + 1`.
//!
//! All chains of a queue share one header. In the transmit queue it is zeroes: no offload. In the receive queue the
//! device writes to it, and the driver never reads it.
//!
//! # Rules
//!
//! - **C1** The ledger, where the device cannot write, records each chain: the slot, the index at which it was posted,
//!   one more than the index at which it was taken back (0 until then), and the bytes.
//! - **C2** At committed indices, `available` and `handled`: if a chain was posted before `available` and not taken
//!   back before `handled`, the device has it, or has used it for an unhandled frame. Otherwise it is free. This holds
//!   at every store: a chain is posted again only once its last frame is committed as handled, and the driver first
//!   writes the index at which it posts the chain.
//! - **C3** Before it posts any chain, a successor marks every free chain as never posted. Otherwise a chain that a
//!   dead driver had posted and not committed would count as posted once the index has gone on that far.
//! - **C4** The driver commits posted chains before it shows them to the device (T2). Entries of the used ring are not
//!   written again before they are handled, since there are as many as descriptors.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use tasuki_shm::crash;
use tasuki_shm::region::Span;
use tasuki_shm::slots::SlotId;

use super::driver_state::{CHAINS_MAX, Cursor, Loan};
use super::regs::HEADER_LEN;
use super::ring::{NEXT, SplitRing, Used, WRITE, low};
use crate::nic::bus::Iova;
use crate::nic::driver::short;
use crate::nic::driver_state::broken;
use crate::nic::loan::{lend, lend_all, take_back};
use crate::nic::{NicError, NicMemory};

/// Number of words of a chain in the ledger.
const WORDS: usize = 4;
/// Posting index of a chain that was never posted.
const NEVER: u64 = u64::MAX;
/// An index that begins anew starts at a multiple of this, of which the device sees zeroes.
const LAP: u64 = 1 << 16;

/// The ledger's words on a chain (C1).
struct Words<'a> {
    slot: &'a AtomicU64,
    posted: &'a AtomicU64,
    taken: &'a AtomicU64,
    len: &'a AtomicU64,
}

impl Words<'_> {
    /// Returns whether the chain is not free (C2).
    fn is_out(&self, at: Cursor) -> bool {
        let taken = self.taken.load(Relaxed);
        self.posted.load(Relaxed) < at.available && taken.checked_sub(1).is_none_or(|taken| taken >= at.used)
    }

    /// Marks the chain as never posted (C3).
    fn never_posted(&self) {
        self.posted.store(NEVER, Relaxed);
        // E3
        self.taken.store(0, Release);
    }

    #[expect(clippy::cast_possible_truncation, reason = "as many as there are in a slot")]
    fn loan(&self) -> Loan {
        let slot = SlotId::from_word(self.slot.load(Relaxed));
        Loan::new(slot, self.len.load(Relaxed) as u32, self.posted.load(Relaxed) as u32)
    }
}

/// A chain that the device has used.
#[derive(Debug)]
pub struct Done {
    pub chain: u16,
    /// Word of its slot, and the number of bytes posted with it.
    pub slot: u64,
    pub room: u32,
    /// Number of bytes that the device claims to have written.
    pub written: u32,
}

/// A ring of chains, and the slots in them.
#[derive(Debug)]
pub struct Chains {
    pub ring: SplitRing,
    /// Descriptor flag [`WRITE`], if the device writes the slots.
    write: u16,
    /// Words of the chains in the ledger (V1, C1).
    records: Span<AtomicU64>,
    /// For each index, modulo the number of chains: the chain taken back there. It is posted again when our index is
    /// larger by that number.
    order: Box<[u16; CHAINS_MAX]>,
    /// Number of chains minus one.
    mask: u16,
    /// First index of the used ring whose frame the last commit did not count as handled.
    handled: u64,
    /// Head of a chain that the device claimed to have used and did not have. The fault stays even if the device gets
    /// that chain later.
    wrong: Option<u32>,
}

/// Returns a chain's words.
#[inline]
fn words(records: &[AtomicU64], chain: u16) -> Option<Words<'_>> {
    let [slot, posted, taken, len] = records.as_chunks::<WORDS>().0.get(usize::from(chain))?;
    Some(Words { slot, posted, taken, len })
}

impl Chains {
    /// Makes the chains of `ring`, the `queue`th, which has `size` descriptors and continues where it stands. Changes
    /// nothing.
    pub fn new(memory: &NicMemory, queue: usize, ring: SplitRing, size: u16, write: bool) -> Self {
        let records = memory.slot_list(queue, usize::from(size / 2) * WORDS);
        let (handled, order) = (ring.cursor().used, Box::new([0; CHAINS_MAX]));
        Chains { ring, write: if write { WRITE } else { 0 }, records, order, mask: size / 2 - 1, handled, wrong: None }
    }

    /// Returns the number of chains in the queue.
    fn count(&self) -> u16 {
        self.mask + 1
    }

    /// Returns all chains, with their words.
    fn all(&self) -> impl Iterator<Item = (u16, Words<'_>)> {
        (0..self.count()).filter_map(|chain| Some((chain, words(&self.records, chain)?)))
    }

    /// Returns whether this slot came back at this index.
    #[inline]
    pub fn is_at(&self, index: u64, id: SlotId) -> bool {
        let chain = self.order[self.place(index)];
        words(&self.records, chain).is_some_and(|its| its.slot.load(Relaxed) == id.to_word())
    }

    /// Makes every chain begin with this header.
    pub fn describe_headers(&self, header: Iova) {
        (0..self.count()).for_each(|k| self.ring.describe(2 * k, header, HEADER_LEN, NEXT | self.write, 2 * k + 1));
    }

    /// Returns the place of an index in [`order`](Self::order).
    #[inline]
    fn place(&self, index: u64) -> usize {
        usize::from(low(index) & self.mask) % CHAINS_MAX
    }

    /// Gives the device a slot with, or for, a frame of `len` bytes. There must be a free chain.
    #[inline]
    pub fn post(&mut self, arena_at: Iova, slot_len: u64, id: SlotId, len: u32) {
        let index = self.ring.cursor().available;
        let chain = self.order[self.place(index)];
        let Some(its) = words(&self.records, chain) else { return };
        // C2, E3
        its.posted.store(index, Relaxed);
        crash::point("virtio.posting");
        its.slot.store(id.to_word(), Release);
        its.len.store(len.into(), Relaxed);
        its.taken.store(0, Release);
        crash::point("virtio.posted");
        self.ring.describe(2 * chain + 1, arena_at + u64::from(id.index) * slot_len, len, self.write, 0);
        self.ring.push(2 * chain);
    }

    /// Returns the oldest chain that the device has used and the driver has not [taken](Self::take).
    #[inline]
    pub fn peek(&mut self) -> Result<Option<Done>, NicError> {
        if let Some(head) = self.wrong {
            return Err(not_out(head));
        }
        let Some(Used { head, len: written }) = self.ring.peek()? else { return Ok(None) };
        let chain = u16::try_from(head / 2).ok().filter(|_| head % 2 == 0);
        if let Some((chain, its)) = chain.and_then(|chain| Some((chain, words(&self.records, chain)?)))
            // A chain that was used twice may be posted again by now, but not shown to the device yet.
            && its.posted.load(Relaxed) < self.ring.shown()
            && its.taken.load(Relaxed) == 0
        {
            #[expect(clippy::cast_possible_truncation, reason = "as many as there are in a slot")]
            let room = its.len.load(Relaxed) as u32;
            return Ok(Some(Done { chain, slot: its.slot.load(Relaxed), room, written }));
        }
        self.wrong = Some(head);
        Err(not_out(head))
    }

    /// Takes back the chain that `peek` returned.
    #[inline]
    pub fn take(&mut self, chain: u16) {
        let used = self.ring.cursor().used;
        if let Some(its) = words(&self.records, chain) {
            its.taken.store(used + 1, Relaxed);
        }
        crash::point("virtio.taken");
        let place = self.place(used);
        self.order[place] = chain;
        self.ring.take();
    }

    /// Returns the number of chains that can be posted.
    #[inline]
    pub fn room(&self) -> usize {
        let out = self.ring.cursor().available - self.handled;
        usize::from(self.count()).saturating_sub(usize::try_from(out).unwrap_or(usize::MAX))
    }

    /// Returns whether the device has no chain, and every used one was taken.
    pub fn is_empty(&self) -> bool {
        let Cursor { available, used } = self.ring.cursor();
        available == used
    }

    /// Returns whether some chains were taken back and not committed as handled.
    #[inline]
    pub fn has_unhandled(&self) -> bool {
        self.ring.cursor().used != self.handled
    }

    /// Returns the first index whose frame the last commit did not count as handled.
    #[inline]
    pub fn handled(&self) -> u64 {
        self.handled
    }

    /// Returns the driver's indices.
    #[inline]
    pub fn cursor(&self) -> Cursor {
        self.ring.cursor()
    }

    /// Notes that everything before `handled` is committed as handled, and shows posted chains to the device (C4).
    /// Returns whether the device wants to be notified.
    #[inline]
    pub fn committed(&mut self, handled: u64) -> bool {
        self.handled = handled;
        if self.ring.shown() == self.ring.cursor().available {
            return false;
        }
        self.ring.publish();
        self.ring.wants_notification()
    }

    /// Shows the device once more what it was shown.
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Returns the contents of each chain, for a successor that continues the same ring. All received frames are
    /// handled.
    pub fn by_chain(&self) -> impl Iterator<Item = Loan> {
        let at = self.ring.cursor();
        self.all().map(move |(_, its)| if its.is_out(at) { its.loan() } else { Loan::NONE })
    }

    /// Returns the chains that the device has, the oldest first.
    fn oldest_first(&self) -> Vec<u16> {
        let at = self.ring.cursor();
        let mut out: Vec<_> = self.all().filter(|(_, its)| its.is_out(at)).collect();
        out.sort_by_key(|(_, its)| its.posted.load(Relaxed));
        out.into_iter().map(|(chain, _)| chain).collect()
    }

    /// Returns the contents of those chains.
    pub fn loans(&self) -> Vec<Loan> {
        let loan = |chain| words(&self.records, chain).map_or(Loan::NONE, |its| Loan { turn: 0, ..its.loan() });
        self.oldest_first().into_iter().map(loan).collect()
    }

    /// Lends the device the slots that it had, or has used, when a predecessor died, by the ledger (C2). Changes only
    /// our table of slots.
    pub fn lend(&self, memory: &NicMemory) -> Result<(), NicError> {
        let at = self.ring.cursor();
        let out = || self.all().filter(|(_, its)| its.is_out(at));
        let count = out().count() as u64;
        if count != at.available - at.used {
            return Err(broken("the number of slots in a queue", count));
        }
        let slot_len = memory.arena().geometry().slot_len.into();
        if let Some(long) = out().map(|(_, its)| its.len.load(Relaxed)).find(|&len| len > slot_len) {
            return Err(broken("the length of a frame", long));
        }
        lend_all(memory, out().map(|(_, its)| SlotId::from_word(its.slot.load(Relaxed))))
    }

    /// Restores the saved heads of frames that a predecessor had in hand.
    pub fn undo(&self, memory: &NicMemory, queue: usize) -> Result<(), NicError> {
        let at = self.ring.cursor();
        for (_, its) in self.all().filter(|(_, its)| its.is_out(at)) {
            let Some(index) = its.taken.load(Relaxed).checked_sub(1) else { continue };
            let position = short(index);
            if !memory.ledger().saved(queue).any(|saved| saved == position) {
                continue;
            }
            // Hold the slot while its head is restored.
            let mut slot = take_back(memory.arena(), its.slot.load(Relaxed))?;
            memory.ledger().undo(queue, position, &mut slot);
            its.slot.store(lend(memory.arena(), slot).to_word(), Relaxed);
        }
        Ok(())
    }

    /// Takes over the ledger, and clears from it what a predecessor had begun (C3).
    pub fn adopt(&mut self) {
        let at = self.ring.cursor();
        let mut place = at.available;
        for chain in 0..self.count() {
            let Some(its) = words(&self.records, chain) else { continue };
            if its.is_out(at) {
                its.taken.store(0, Relaxed);
            } else {
                its.never_posted();
                let next = self.place(place);
                self.order[next] = chain;
                place += 1;
            }
            crash::point("virtio.adopting");
        }
    }

    /// Fills the chains from a checked driver state that describes the ring as it stands.
    pub fn adopt_kept(&mut self, loans: &[Loan]) {
        let available = self.ring.cursor().available;
        for (chain, loan) in (0..self.count()).zip(loans) {
            let Some(its) = words(&self.records, chain) else { continue };
            if *loan == Loan::NONE {
                its.never_posted();
                continue;
            }
            its.posted.store(available - loan.age(available), Relaxed);
            its.slot.store(loan.slot().to_word(), Relaxed);
            its.len.store(loan.len.into(), Relaxed);
            its.taken.store(0, Relaxed);
        }
        self.adopt();
    }

    /// Makes an empty queue, which the device does not know.
    pub fn empty(&mut self) {
        self.lay_out(0, &[], &[], |_| {});
    }

    /// Fills a queue that the device does not know (yet, or any more). Frames that have `come` appear in it as if the
    /// device had used their chains; `out` is posted.
    pub fn fill(&mut self, memory: &NicMemory, come: &[Loan], out: &[Loan]) {
        let (mut used, mut posted) = (Vec::new(), Vec::new());
        for (chain, (loan, is_come)) in
            (0..).zip(come.iter().map(|loan| (loan, true)).chain(out.iter().map(|loan| (loan, false))))
        {
            let Some(its) = words(&self.records, chain) else { break };
            its.slot.store(loan.slot().to_word(), Relaxed);
            its.len.store(loan.len.into(), Relaxed);
            match is_come {
                true => used.push((chain, loan.len + HEADER_LEN)),
                false => posted.push(chain),
            }
        }
        self.lay_out(LAP, &used, &posted, |chains| chains.post_again(memory, &posted));
    }

    /// Restarts a queue that the device was made to forget: moves its used and unused chains to where it begins anew.
    pub fn begin_anew(&mut self, memory: &NicMemory) -> Result<(), NicError> {
        let mut come = Vec::new();
        while let Some(Done { chain, written, .. }) = self.peek()? {
            come.push((chain, written));
            self.take(chain);
        }
        let out = self.oldest_first();
        let base = self.ring.cursor().available.next_multiple_of(LAP).max(LAP);
        self.lay_out(base, &come, &out, |chains| chains.post_again(memory, &out));
        Ok(())
    }

    /// Posts the contents of these chains, which are the next to be posted.
    fn post_again(&mut self, memory: &NicMemory, chains: &[u16]) {
        let slot_len = memory.arena().geometry().slot_len.into();
        for &chain in chains {
            let Some(loan) = words(&self.records, chain).map(|its| its.loan()) else { continue };
            self.post(memory.arena_at(), slot_len, loan.slot(), loan.len);
        }
    }

    /// Lays the queue out as the device is to find it, beginning at `base`: chains that it has used before, with the
    /// bytes written; then the chains that `post` will post, in order; then free ones.
    fn lay_out(&mut self, base: u64, come: &[(u16, u32)], out: &[u16], post: impl FnOnce(&mut Self)) {
        self.ring.begin_at(base, come.iter().map(|&(chain, len)| Used { head: u32::from(chain) * 2, len }));
        self.handled = self.ring.cursor().used;
        let is_free = |chain: &u16| !out.contains(chain) && !come.iter().any(|(other, _)| other == chain);
        let free: Vec<_> = (0..self.count()).filter(is_free).collect();
        for (index, &chain) in (base..).zip(out.iter().chain(&free)) {
            let place = self.place(index);
            self.order[place] = chain;
        }
        free.iter().filter_map(|&chain| words(&self.records, chain)).for_each(|its| its.never_posted());
        for (index, &(chain, _)) in (self.handled..).zip(come) {
            if let Some(its) = words(&self.records, chain) {
                its.posted.store(index, Relaxed);
                its.taken.store(0, Relaxed);
            }
        }
        post(self);
        self.ring.publish();
    }
}

#[cold]
fn not_out(head: u32) -> NicError {
    NicError::Absurd { what: "a used buffer that it does not have", value: head.into() }
}
