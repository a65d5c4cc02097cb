//! Counts tests by parsing the output of `cargo test … --no-fail-fast -- --show-output`.

use std::fmt;
use std::ops::AddAssign;

/// Numbers of passed, failed and skipped tests, with the reasons for skipping.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Tally {
    pub passed: u32,
    pub failed: u32,
    pub skipped: u32,
    /// One entry per skipped test: the text that it printed after `skipped: `.
    pub reasons: Vec<String>,
    /// Lines that failing tests printed, each test's after its name. The closing report repeats them, because the end
    /// of a long log is the part that is kept and read.
    pub failures: Vec<String>,
}

/// Number of lines kept of a failing test's output: the first ones, with the panic.
const KEPT_LINES: usize = 40;

impl Tally {
    /// Returns a tally of `count` skipped tests with the same reason.
    pub fn skip(count: u32, reason: &str) -> Tally {
        Tally { skipped: count, reasons: vec![reason.to_owned(); count as usize], ..Tally::default() }
    }

    /// Returns a tally of one test with this name.
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

/// Parses the output of `cargo test` line by line.
#[derive(Debug, Default)]
pub struct Reader {
    tally: Tally,
    /// Number of tests of the current program that printed a reason for skipping themselves. The harness will count
    /// them as passed.
    skip_themselves: u32,
    /// Number of test programs whose result line said FAILED, and number of programs that cargo reports as failed. The
    /// second number is higher if a program died before it could print its result.
    results_failed: u32,
    programs_failed: u32,
    /// Whether the current lines belong to the output of passing tests.
    in_successes: bool,
    /// Within the output of failing tests: number of lines that may still be kept.
    keeps: Option<usize>,
    /// Whether the test whose output is being shown has printed a reason for skipping itself.
    said_why: bool,
}

impl Reader {
    /// Reads one line. Returns whether to show it; the output of passing tests is not shown.
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
            // The heading comes once before the output of the failing tests, and once more before their names.
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

    /// Reads a result line: `ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`
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

    /// Returns the sum. `succeeded` is cargo's exit status. A stage that failed without a failed test (it did not
    /// compile, or a test program died) counts as at least one failure.
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
