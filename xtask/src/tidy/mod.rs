//! `tidy`: the project's rules that the compiler does not know.
//!
//! Each finding is one line: `file:line: what to do`. A warning is only a hint and does not fail the check.

mod arrows;
mod leftovers;
mod paths;
mod size;
mod source;
mod subjects;
mod threats;
mod unsafety;
mod words;

use std::fmt;
use std::fs;
use std::process::Command;

use anyhow::Context;

use crate::checkout::{Checkout, metadata, output};
use crate::tidy::source::Source;

/// A text file of the checkout.
pub struct File {
    /// Path relative to the root, with `/`.
    pub path: String,
    pub text: String,
}

/// A fault to repair, and its place.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    pub path: String,
    /// Line number, from 1.
    pub line: usize,
    /// The repair, as a sentence.
    pub advice: String,
}

impl Finding {
    pub fn new(path: &str, line: usize, advice: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, advice: advice.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.advice)
    }
}

pub fn run(checkout: &Checkout) -> anyhow::Result<bool> {
    println!("$ cargo xtask tidy");
    let files = files(checkout)?;
    let sources = files.iter().filter(|file| file.path.ends_with(".rs")).map(Source::read).collect::<Vec<_>>();

    let mut findings = unsafety::check(&sources, &files);
    findings.extend(sources.iter().flat_map(leftovers::check));
    findings.extend(files.iter().flat_map(paths::check));
    findings.extend(subjects::check(checkout));
    findings.extend(words::check(&sources, &files)?);
    findings.extend(sources.iter().flat_map(words::repeats));
    findings.extend(arrows::check(&metadata(&checkout.root.join("Cargo.toml"))?, &files)?);
    let (of_threats, tally) = threats::check(&files, &sources);
    findings.extend(of_threats);
    findings.sort_unstable();
    for finding in &findings {
        println!("{finding}");
    }
    let warnings = sources.iter().flat_map(size::check).collect::<Vec<_>>();
    for warning in &warnings {
        println!("{}:{}: warning: {}", warning.path, warning.line, warning.advice);
    }
    println!("tidy: {} attacks against the {} rows of the threat model", tally.attacks, tally.rows);
    println!("tidy: {} files, {} findings, {} warnings", files.len(), findings.len(), warnings.len());
    Ok(findings.is_empty())
}

/// Returns every text file that is in git, or that `git add --all` would add.
fn files(checkout: &Checkout) -> anyhow::Result<Vec<File>> {
    let mut list = Command::new("git");
    // The checkout may belong to a user other than CI's. Reading a list of files is harmless.
    list.args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let list = output(list.current_dir(&checkout.root)).context("tidy asks git which files are part of the project")?;
    let mut files = Vec::new();
    for path in list.split(|byte| *byte == 0).filter(|path| !path.is_empty()) {
        let path = str::from_utf8(path).context("a file name is not UTF-8")?;
        // The entry is in the index but deleted, or is a folder with its own repository.
        if !checkout.root.join(path).is_file() {
            continue;
        }
        let bytes = fs::read(checkout.root.join(path)).with_context(|| format!("cannot read {path}"))?;
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(File { path: path.to_owned(), text });
        }
    }
    Ok(files)
}
