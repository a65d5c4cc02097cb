//! Lets a test kill a worker at a place in its code: none of its later code runs, and all that it had published stays.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// Number of places that the worker still passes before it is killed.
    static LIFE: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Panic payload of a killed worker.
struct Killed;

/// A place at which the worker may be killed.
pub fn may_die(_: &'static str) {
    let left = LIFE.get();
    LIFE.set(left.map(|left| left.saturating_sub(1)));
    if left == Some(0) {
        LIFE.set(None);
        resume_unwind(Box::new(Killed));
    }
}

/// Runs `work` until it has passed `places` places or returns. Returns whether it was killed.
pub fn lives_for(places: u32, work: impl FnOnce()) -> bool {
    LIFE.set(Some(places));
    let died = catch_unwind(AssertUnwindSafe(work));
    LIFE.set(None);
    match died {
        Ok(()) => false,
        Err(why) if why.is::<Killed>() => true,
        Err(why) => resume_unwind(why),
    }
}
