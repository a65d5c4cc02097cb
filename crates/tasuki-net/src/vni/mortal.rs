//! A worker that a test kills at a place in its code: nothing of it runs after that, and all that it had published stands.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// How many places are passed until the worker is killed.
    static LIFE: Cell<Option<u32>> = const { Cell::new(None) };
}

/// What a worker that is killed unwinds with.
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

/// Has a worker work until it has passed so many places, or is through; says whether it was killed.
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
