//! A lease: one shared word that names the present owner of a thing and counts how often it has changed hands.
//!
//! # Rules
//!
//! - **L1** The word decides, never a timeout: the party that wins the compare-and-swap is the holder.
//! - **L2** The epoch grows by one with every take. So an old holder recognises that it was replaced, even if the
//!   same party holds the lease again.
//!
//! # Steps
//!
//! | from             | verb | to               | because                                                            |
//! |------------------|------|------------------|--------------------------------------------------------------------|
//! | held by us, e    | pass | free, e          | we have stopped; the next holder may begin                         |
//! | free, e          | take | held by us, e+1  | the last holder passed it, or there was none                       |
//! | held by other, e | take | held by us, e+1  | the caller knows that the other is dead: only then may it try this |

use std::num::NonZeroU32;
use std::ops::Deref;

use crate::line::{Line, halves};
use crate::sync::{AcqRel, Acquire};

/// Contents of the lease word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenure {
    /// Number of the holder, which the users of the lease agree upon (a process id, say). `None` before the first
    /// take, and between a pass and the next take.
    pub holder: Option<NonZeroU32>,
    /// How often the lease was taken.
    pub epoch: u32,
}

impl Tenure {
    fn to_word(self) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(self.holder.map_or(0, NonZeroU32::get))
    }

    fn from_word(word: u64) -> Self {
        let (holder, epoch) = halves(word);
        Tenure { holder: NonZeroU32::new(holder), epoch }
    }
}

/// The error of a caller whose idea of the lease is out of date.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lease changed hands: it is now in epoch {} with holder {:?}", now.epoch, now.holder)]
pub struct Lost {
    /// Contents of the word at the failed swap.
    pub now: Tenure,
}

/// The word, in memory that all parties can write: word 0 of line 0 of `M`.
#[derive(Debug)]
pub struct Lease<M>(M);

impl<M: Deref<Target = [Line]>> Lease<M> {
    /// Opens the lease in `line`. Zeroed memory is a lease that was never held.
    pub fn new(line: M) -> Self {
        Lease(line)
    }

    /// Returns the present holder and epoch.
    pub fn tenure(&self) -> Tenure {
        Tenure::from_word(self.0[0].word(0).load(Acquire))
    }

    fn swap(&self, from: Tenure, to: Tenure) -> Result<Tenure, Lost> {
        // L1. Acquire: the taker sees all that the giver did. Release: the next taker sees all that we did.
        let swapped = self.0[0].word(0).compare_exchange(from.to_word(), to.to_word(), AcqRel, Acquire);
        swapped.map(|_| to).map_err(|now| Lost { now: Tenure::from_word(now) })
    }

    /// Takes the lease from `from`, as [`tenure`](Self::tenure) returned it, once that holder has passed it on or is
    /// dead.
    pub fn take(&self, from: Tenure, us: NonZeroU32) -> Result<Tenure, Lost> {
        self.swap(from, Tenure { holder: Some(us), epoch: from.epoch.wrapping_add(1) })
    }

    /// Passes on the lease that we hold.
    pub fn pass(&self, ours: Tenure) -> Result<Tenure, Lost> {
        self.swap(ours, Tenure { holder: None, epoch: ours.epoch })
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const RED: NonZeroU32 = NonZeroU32::new(1).unwrap();
    const BLUE: NonZeroU32 = NonZeroU32::new(2).unwrap();

    #[test]
    fn it_has_one_holder_and_a_growing_epoch() {
        let lease = Lease::new(vec![Line::default()]);
        let red = lease.take(lease.tenure(), RED).unwrap();
        assert_eq!(red, Tenure { holder: Some(RED), epoch: 1 });
        let passed = lease.pass(red).unwrap();
        let blue = lease.take(passed, BLUE).unwrap();
        assert_eq!(blue, Tenure { holder: Some(BLUE), epoch: 2 });
        assert_eq!(lease.pass(red), Err(Lost { now: blue }), "an old holder learns that it was replaced");
        assert_eq!(lease.take(passed, RED), Err(Lost { now: blue }), "the second taker loses");
    }
}
