//! Subjects of commits: short enough for a list.

use std::process::Command;

use super::Finding;
use crate::checkout::{Checkout, output};

/// Maximum number of characters of a subject.
const MOST: usize = 72;

/// Number of commits that are looked at, from the last one on. Older ones stay as they are.
const LOOKED_AT: &str = "-40";

/// Finds subjects that are too long. A checkout without a history has none.
pub fn check(checkout: &Checkout) -> Vec<Finding> {
    let mut command = Command::new("git");
    command.args(["-c", "safe.directory=*", "-C"]).arg(&checkout.root).args([
        "log",
        LOOKED_AT,
        "--no-merges",
        "--format=%h %s",
    ]);
    let log = output(&mut command).unwrap_or_default();
    String::from_utf8_lossy(&log).lines().filter_map(finding).collect()
}

fn finding(line: &str) -> Option<Finding> {
    let (commit, subject) = line.split_once(' ')?;
    let len = subject.chars().count();
    let advice = format!("the subject has {len} characters: say it in {MOST}, and the rest below");
    (len > MOST).then(|| Finding::new(&format!("commit {commit}"), 1, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_of_72_characters_is_the_longest() {
        assert_eq!(finding(&format!("abc {}", "ä".repeat(MOST))), None);
        assert!(finding(&format!("abc {}", "x".repeat(MOST + 1))).is_some());
    }
}
