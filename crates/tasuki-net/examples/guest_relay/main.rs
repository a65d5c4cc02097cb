//! The guest's program of `cargo xtask bench relay`: it sends back the frames that reach the guest's 82574L while
//! the card changes hands again and again, by unloading and loading the kernel's driver, or between two processes of
//! ours. The bench is at the other end of the wire.
//!
//! ```text
//! guest_relay lkm N          the kernel's driver, N times
//! guest_relay handover N     two processes, N times, that share the card's memory
//! guest_relay repoint N      the same, each with memory of its own
//! ```
//!
//! A returned frame has the number of relays so far in the last four bytes of its source address: the bench sees on
//! the wire which owner sent it. A frame from the bench has there the number of relays that the bench has seen. The
//! bench reads this program's standard output, line by line, after [`SAYS`].

mod handover;
mod kernel;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use handover::Method;

/// A result whose error is a sentence for the bench.
type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Prefix of each line for the bench.
const SAYS: &str = "relay: ";

/// Time that the first owner drives before the first relay: the undisturbed stream.
const AT_REST: Duration = Duration::from_secs(3);

/// Time without a frame after which the stream counts as ended.
const SILENCE: Duration = Duration::from_secs(2);

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(30);

/// The EtherType for experiments, which the bench's frames have.
const KIND: u16 = 0x88b5;

/// Offset of the EtherType in a frame.
const KIND_AT: usize = 12;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let count = |word: &str| word.parse::<u32>().map_err(|_| format!("{word} is no number of relays").into());
    let done = match words[..] {
        ["lkm", number] => count(number).and_then(kernel::relays),
        ["handover", number] => count(number).and_then(|count| handover::relays(Method::Keep, count)),
        ["repoint", number] => count(number).and_then(|count| handover::relays(Method::Repoint, count)),
        ["other", "handover"] => handover::other(Method::Keep),
        ["other", "repoint"] => handover::other(Method::Repoint),
        _ => Err("say `lkm N`, `handover N` or `repoint N`; cargo xtask bench relay does".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{SAYS}failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Turns a frame of the bench round and writes the number of relays into it; returns the number that the bench has
/// seen.
fn turn_round(frame: &mut [u8], relays: u32) -> Option<u32> {
    if frame.get(KIND_AT..KIND_AT + 2) != Some(&KIND.to_be_bytes()[..]) {
        return None;
    }
    let seen = frame[8..12].first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
    frame.copy_within(6..12, 0);
    frame[6..8].copy_from_slice(&[2, 0]);
    frame[8..12].copy_from_slice(&relays.to_be_bytes());
    seen
}

/// Waits until `met` returns true.
fn wait(what: &str, mut met: impl FnMut() -> Fallible<bool>) -> Fallible<()> {
    let began = Instant::now();
    while !met()? {
        if began.elapsed() > PATIENCE {
            return Err(format!("{what} did not happen within {} s", PATIENCE.as_secs()).into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns the folder below `all` that belongs to the 82574L; `device` is the path from there to the device ID.
fn of_the_card(all: &str, device: &str) -> Fallible<Option<PathBuf>> {
    for folder in std::fs::read_dir(all)? {
        let folder = folder?.path();
        if std::fs::read_to_string(folder.join(device)).is_ok_and(|id| id.trim() == "0x10d3") {
            return Ok(Some(folder));
        }
    }
    Ok(None)
}
