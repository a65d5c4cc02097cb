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
pub fn found<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    ask_again(what, ask, || std::thread::sleep(Duration::from_micros(200)))
}

/// Like [`found`], for an `ask` that does the work itself, such as driving a card: it pauses only for other threads.
#[track_caller]
pub fn polled<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    ask_again(what, ask, std::thread::yield_now)
}

#[track_caller]
fn ask_again<T>(what: &str, mut ask: impl FnMut() -> Option<T>, pause: impl Fn()) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        pause();
    }
}
