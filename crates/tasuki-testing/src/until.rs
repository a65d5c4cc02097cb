//! Waiting for a condition.

use std::time::{Duration, Instant};

/// A wait longer than this is a failure, even on a machine that does ten other things.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `is_so` returns true. Panics after [`PATIENCE`].
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    found(what, || is_so().then_some(()));
}

/// Waits until `ask` returns a value. Panics after [`PATIENCE`].
#[track_caller]
pub fn found<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
