//! Unsafe code is only in the files that ARCHITECTURE.md lists, and a comment argues for each piece of it.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::source::{Source, find_word, is_word};
use crate::tidy::{File, Finding};

/// The document and its section that list the files where unsafe code is allowed. Each entry is a line of the form
/// "- `crates/tasuki-shm/src/region.rs`: why".
const DOCUMENT: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Where unsafe is allowed";

/// Maximum number of lines between an unsafe block and the start of its SAFETY comment: a checklist of ten points.
const ABOVE: usize = 14;

/// Minimum number of words in an argument, without the tag: "as above".
const ARGUMENT: usize = 2;

pub fn check(sources: &[Source], files: &[File]) -> Vec<Finding> {
    let document = files.iter().find(|file| file.path == DOCUMENT);
    let listed = document.map(|file| listed(&file.text)).unwrap_or_default();
    let mut findings = Vec::new();
    for source in sources {
        findings.extend(unargued(source, &defined_for(source, sources)));
        if let Some(line) = first_unsafe(source)
            && !listed.contains_key(source.path)
        {
            let advice =
                format!("this file has unsafe code: list it in {DOCUMENT} under `{HEADING}`, or move the code");
            findings.push(Finding::new(source.path, line, advice));
        }
    }
    for (path, line) in listed {
        match sources.iter().find(|source| source.path == path) {
            None => findings.push(Finding::new(DOCUMENT, line, format!("{path} does not exist: take it off the list"))),
            Some(source) if !source.lines.iter().any(|line| allows_unsafe(&line.code)) => {
                findings.push(Finding::new(
                    DOCUMENT,
                    line,
                    format!("{path} allows no unsafe code: take it off the list"),
                ));
            }
            Some(_) => {}
        }
    }
    findings
}

/// Returns the files that the section lists, with the line number of each.
fn listed(text: &str) -> BTreeMap<&str, usize> {
    let lines = (1..).zip(text.lines());
    let section = lines.skip_while(|(_, line)| line.trim_end() != HEADING).skip(1);
    let section = section.take_while(|(_, line)| !line.starts_with("## "));
    section.filter_map(|(number, line)| Some((listed_path(line)?, number))).collect()
}

/// Returns the path in "- `path`: why".
fn listed_path(line: &str) -> Option<&str> {
    let (path, why) = line.strip_prefix("- `")?.split_once('`')?;
    why.starts_with(':').then_some(path)
}

/// Returns the number of the first line, from 1, that allows or contains unsafe code.
fn first_unsafe(source: &Source) -> Option<usize> {
    let mut lines = source.numbered();
    lines.find(|(_, line)| allows_unsafe(&line.code) || is_unsafe(&line.code)).map(|(number, _)| number)
}

fn allows_unsafe(code: &str) -> bool {
    code.contains("allow(unsafe_code") || code.contains("expect(unsafe_code")
}

/// Returns whether an unsafe block or implementation begins on this line.
fn is_unsafe(code: &str) -> bool {
    let Some(at) = find_word(code, "unsafe") else { return false };
    let next = code[at + "unsafe".len()..].trim_start();
    next.starts_with('{') || find_word(next, "impl") == Some(0)
}

/// Returns the tags of the invariants that a file may cite: its own, and those of the modules around it.
fn defined_for<'a>(source: &Source<'a>, sources: &'a [Source<'a>]) -> BTreeSet<&'a str> {
    let is_around = |other: &&Source| {
        let module = other.path.strip_suffix(".rs").unwrap_or(other.path);
        let module = module.strip_suffix("/mod").unwrap_or(module);
        other.path == source.path || source.path.strip_prefix(module).is_some_and(|rest| rest.starts_with('/'))
    };
    let lines = sources.iter().filter(is_around).flat_map(|other| &other.lines);
    lines.filter_map(|line| definition(&line.comment)).collect()
}

/// Returns the tag that a line "- **M1** …" defines.
fn definition(comment: &str) -> Option<&str> {
    let (_, after) = comment.split_once("- **")?;
    let (tag, _) = after.split_once("** ")?;
    is_tag(tag).then_some(tag)
}

/// Finds the unsafe blocks and implementations without a SAFETY comment that argues from existing invariants.
fn unargued(source: &Source, defined: &BTreeSet<&str>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, _) in source.numbered().filter(|(_, line)| is_unsafe(&line.code)) {
        let above = &source.lines[number.saturating_sub(ABOVE + 1)..number];
        let Some(begin) = above.iter().rposition(|line| find_word(&line.comment, "SAFETY").is_some()) else {
            findings.push(Finding::new(source.path, number, "say in a SAFETY comment right above why this is sound"));
            continue;
        };
        let words = || above[begin..].iter().flat_map(|line| line.comment.split(|c| !is_word(c)));
        let words = || words().filter(|word| !word.is_empty() && *word != "SAFETY");
        let mut tags = words().filter(|word| is_tag(word)).peekable();
        let advice = match tags.peek() {
            None => "let the SAFETY comment cite the numbered invariant that it rests on, like M1".to_owned(),
            Some(_) => match tags.find(|tag| !defined.contains(tag)) {
                Some(tag) => {
                    format!("{tag} is defined neither here nor in a module around this: say it, as \"- **{tag}** …\"")
                }
                None if words().filter(|word| !is_tag(word)).count() < ARGUMENT => {
                    "a tag alone is no argument: let the SAFETY comment say why the invariant makes this sound"
                        .to_owned()
                }
                None => continue,
            },
        };
        findings.push(Finding::new(source.path, number, advice));
    }
    findings
}

/// Returns whether a word is a tag like `M1` or `R12`: one capital letter, then digits.
fn is_tag(word: &str) -> bool {
    let digits = word.strip_prefix(|c: char| c.is_ascii_uppercase());
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    fn advice(files: &[File]) -> Vec<String> {
        let sources = files.iter().filter(|file| file.path.ends_with(".rs")).map(Source::read).collect::<Vec<_>>();
        check(&sources, files).iter().map(ToString::to_string).collect()
    }

    const ARGUED: &str = "//! - **M1** It stays.\n#![allow(unsafe_code, reason = \"maps memory\")]\n// SAFETY: it is mapped (M1).\nunsafe { map() }\n";

    fn document(lines: &str) -> File {
        file(
            DOCUMENT,
            &format!(
                "# Map\n- `not/in/the/section.rs`: x\n\n{HEADING}\n\nFew.\n\n{lines}\n\n## Next\n- `nor/here.rs`: x\n"
            ),
        )
    }

    #[test]
    fn a_listed_and_argued_file_passes() {
        assert!(advice(&[file("a.rs", ARGUED), document("- `a.rs`: it maps memory")]).is_empty());
    }

    #[test]
    fn an_unlisted_file_is_found() {
        let found = advice(&[file("a.rs", ARGUED), document("")]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("a.rs:2: this file has unsafe code"), "{found:?}");
        assert_eq!(advice(&[file("a.rs", ARGUED)]), found, "a missing document lists nothing");
    }

    #[test]
    fn a_list_that_is_out_of_date_is_found() {
        let found = advice(&[file("a.rs", "fn safe() {}"), document("- `a.rs`: it maps\n- `gone.rs`: it mapped")]);
        assert_eq!(
            found,
            [
                "ARCHITECTURE.md:8: a.rs allows no unsafe code: take it off the list",
                "ARCHITECTURE.md:9: gone.rs does not exist: take it off the list"
            ]
        );
    }

    #[test]
    fn an_entry_says_why() {
        assert_eq!(listed_path("- `a.rs`: why"), Some("a.rs"));
        assert_eq!(listed_path("- `a.rs`"), None);
        assert_eq!(listed_path("`a.rs`: why"), None);
    }

    #[test]
    fn an_argument_cites_an_invariant_and_stands_close() {
        let defined = BTreeSet::from(["M1", "R12"]);
        let found = |text: &str| unargued(&Source::read(&file("a.rs", text)), &defined).len();
        assert_eq!(found("// SAFETY:\n// - in bounds: R12.\nunsafe { f() }"), 0);
        assert_eq!(found("// SAFETY: in bounds (R13).\nunsafe { f() }"), 1);
        assert_eq!(found("// SAFETY: in bounds (M1, R13).\nunsafe { f() }"), 1);
        assert_eq!(found("// SAFETY: M1.\nunsafe { f() }"), 1);
        assert_eq!(found("// SAFETY: as above (M1).\nunsafe { f() }"), 0);
        assert_eq!(found("// SAFETY: it is fine.\nunsafe { f() }"), 1);
        assert_eq!(found("// In bounds: M1.\nunsafe impl Send for A {}"), 1);
        assert_eq!(found(&format!("// SAFETY: by rule M1.\n{}unsafe {{ f() }}", "x;\n".repeat(ABOVE - 1))), 0);
        assert_eq!(found(&format!("// SAFETY: by rule M1.\n{}unsafe {{ f() }}", "x;\n".repeat(ABOVE))), 1);
    }

    #[test]
    fn an_invariant_is_defined_in_the_file_or_around_it() {
        let cites = "#![allow(unsafe_code)]\n// SAFETY: it stays mapped (M1).\nunsafe { f() }\n";
        let defines = "//! - **M1** It stays.\n";
        let list = || document("- `a/b.rs`: x");
        let found = |path: &str, text: &str| advice(&[file("a/b.rs", cites), file(path, text), list()]).len();
        assert_eq!(found("a.rs", defines), 0);
        assert_eq!(found("a/mod.rs", defines), 0);
        assert_eq!(found("a.rs", "//! M1 is what it rests on."), 1);
        assert_eq!(found("a/c.rs", defines), 1, "another module's");
        assert_eq!(found("b.rs", defines), 1);
    }

    #[test]
    fn talk_of_unsafe_code_is_not_unsafe_code() {
        assert!(!is_unsafe("#![allow(unsafe_code)]"));
        assert!(!is_unsafe("unsafe fn f();"));
        assert!(is_unsafe("let x = unsafe {"));
        assert!(is_unsafe("unsafe  impl Sync for A {}"));
        assert!(first_unsafe(&Source::read(&file("a.rs", "// unsafe {\nlet a = \"unsafe {\";"))).is_none());
    }
}
