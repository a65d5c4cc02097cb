//! Counts tests, by reading along with `cargo test … --no-fail-fast -- --show-output`.

use std::fmt;
use std::ops::AddAssign;

/// How many tests passed, failed and were skipped, and why the latter.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Tally {
    pub passed: u32,
    pub failed: u32,
    pub skipped: u32,
    /// One entry per skipped test: what it said after `skipped: `.
    pub reasons: Vec<String>,
    /// The lines that failing tests printed, each test's after its name. A closing report repeats
    /// them: the end of a long log is the part that is kept and read.
    pub failures: Vec<String>,
}

/// Lines that are kept of what one failing test printed: its first ones, with the panic.
const KEPT_LINES: usize = 40;

impl Tally {
    /// `count` tests that could not run, for one reason.
    pub fn skip(count: u32, reason: &str) -> Tally {
        Tally { skipped: count, reasons: vec![reason.to_owned(); count as usize], ..Tally::default() }
    }

    /// One test of this name.
    pub fn one(passed: bool, name: &str) -> Tally {
        let failures = if passed { Vec::new() } else { vec![name.to_owned()] };
        Tally { passed: passed.into(), failed: (!passed).into(), failures, ..Tally::default() }
    }
}

impl AddAssign<&Tally> for Tally {
    fn add_assign(&mut self, other: &Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.reasons.extend_from_slice(&other.reasons);
        self.failures.extend_from_slice(&other.failures);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Reads `cargo test`'s lines one by one.
#[derive(Debug, Default)]
pub struct Reader {
    tally: Tally,
    /// Tests of the program being read that printed why they skip themselves. The harness will
    /// count them among the passed ones.
    skip_themselves: u32,
    /// Test programs whose result line said FAILED, and those that cargo says failed. There are
    /// more of the second kind when a program died before it could count.
    results_failed: u32,
    programs_failed: u32,
    /// Inside the part of the output that shows what passing tests printed.
    in_successes: bool,
    /// Inside the part that shows what failing tests printed: lines that may still be kept.
    keeps: Option<usize>,
    /// The test whose output is being shown has said why it skips itself.
    said_why: bool,
}

impl Reader {
    /// Says whether the line is worth showing: what a passing test printed is not.
    pub fn line(&mut self, line: &str) -> bool {
        self.count(line);
        if let Some(left) = self.keeps
            && left > 0
            && !line.is_empty()
            && line != "failures:"
        {
            self.tally.failures.push(line.to_owned());
            self.keeps = Some(left - 1);
        }
        !self.in_successes
    }

    fn count(&mut self, line: &str) {
        if line == "successes:" {
            self.in_successes = true;
        } else if line == "failures:" {
            self.in_successes = false;
            // It stands before what they printed, and once more before their names.
            self.keeps = if self.keeps.is_some() { None } else { Some(0) };
        } else if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            self.said_why = false;
            self.keeps = self.keeps.and(Some(KEPT_LINES));
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            self.result(counts);
        } else if line.starts_with("error: test failed") || line.starts_with("error: doctest failed") {
            self.programs_failed += 1;
            self.tally.failures.push(line.to_owned());
        } else if let Some(reason) = line.strip_prefix("skipped: ")
            && self.in_successes
            && !self.said_why
        {
            self.said_why = true;
            self.skip_themselves += 1;
            self.tally += &Tally::skip(1, reason);
        }
    }

    /// `ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`
    fn result(&mut self, counts: &str) {
        self.in_successes = false;
        self.keeps = None;
        if counts.starts_with("FAILED") {
            self.results_failed += 1;
        }
        let (_, counts) = counts.split_once(". ").unwrap_or_default();
        for count in counts.split("; ") {
            let Some((number, what)) = count.split_once(' ') else { continue };
            let Ok(number) = number.parse::<u32>() else { continue };
            match what {
                "passed" => self.tally.passed += number.saturating_sub(self.skip_themselves),
                "failed" => self.tally.failed += number,
                "ignored" => self.tally += &Tally::skip(number, "ignored by the test harness"),
                _ => {}
            }
        }
        self.skip_themselves = 0;
    }

    /// The sum. `succeeded` is what cargo's exit status says: a stage that failed without a failed
    /// test (it did not compile, or a test program died) counts at least one failure.
    pub fn finish(mut self, succeeded: bool) -> Tally {
        self.tally.failed += self.programs_failed.saturating_sub(self.results_failed);
        if !succeeded && self.tally.failed == 0 {
            self.tally.failed = 1;
        }
        self.tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(output: &str, succeeded: bool) -> Tally {
        let mut reader = Reader::default();
        output.lines().for_each(|line| {
            reader.line(line);
        });
        reader.finish(succeeded)
    }

    const OK: &str = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s";

    #[test]
    fn results_of_all_programs_add_up() {
        let failed =
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        let complaint = "error: test failed, to rerun pass `-p tasuki-shm --test ring`";

        let sum = tally(&[OK, failed, complaint, OK].join("\n"), false);

        assert_eq!(sum.to_string(), "7 passed, 2 failed, 0 skipped");
    }

    #[test]
    fn a_test_that_skips_itself_is_not_a_passed_one() {
        let sum = tally(
            &[
                "successes:",
                "",
                "---- one stdout ----",
                "seed 7",
                "skipped: needs strace",
                "skipped: a second reason of the same test",
                "",
                "successes:",
                "    one",
                OK,
                OK,
            ]
            .join("\n"),
            true,
        );

        assert_eq!(sum.to_string(), "5 passed, 0 failed, 1 skipped");
        assert_eq!(sum.reasons, ["needs strace"]);
    }

    #[test]
    fn a_test_that_fails_is_not_skipped_whatever_it_prints() {
        let sum = tally(
            &[
                "failures:",
                "---- one stdout ----",
                "skipped: needs strace",
                "failures:",
                "    one",
                "test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
                "error: test failed, to rerun pass `--lib`",
            ]
            .join("\n"),
            false,
        );

        assert_eq!(sum.to_string(), "0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn what_a_failing_test_printed_is_kept_and_what_a_passing_one_printed_is_not_shown() {
        let output = [
            "successes:",
            "---- one stdout ----",
            "seed 7",
            "failures:",
            "",
            "---- two stdout ----",
            "two panicked at here",
            "failures:",
            "    two",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "error: test failed, to rerun pass `--lib`",
        ];
        let mut reader = Reader::default();

        let shown: Vec<_> = output.into_iter().filter(|line| reader.line(line)).collect();

        assert!(!shown.contains(&"seed 7") && shown.contains(&"two panicked at here"));
        let kept = ["---- two stdout ----", "two panicked at here", "error: test failed, to rerun pass `--lib`"];
        assert_eq!(reader.finish(false).failures, kept);
    }

    #[test]
    fn a_program_that_died_counts_as_a_failure() {
        let died = "error: test failed, to rerun pass `-p tasuki-shm --test crash`";
        assert_eq!(tally(&[OK, died].join("\n"), false).to_string(), "3 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn what_does_not_compile_counts_as_a_failure() {
        assert_eq!(tally("error: could not compile `tasuki-shm`", false).to_string(), "0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn an_ignored_test_is_a_skipped_one() {
        let ignored = "test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(tally(ignored, true).to_string(), "1 passed, 0 failed, 2 skipped");
    }
}
