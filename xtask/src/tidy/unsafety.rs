//! Unsafe code stands where ARCHITECTURE.md says it may, and is argued for.

use std::collections::BTreeMap;

use crate::tidy::source::{Source, find_word, is_word};
use crate::tidy::{File, Finding};

/// The document and its section that list the files where unsafe code is allowed, as lines of the
/// form "- `crates/tasuki-shm/src/region.rs`: why".
const DOCUMENT: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Where unsafe is allowed";

/// How far above an unsafe block its SAFETY comment may begin, in lines: a checklist of ten points.
const ABOVE: usize = 14;

pub fn check(sources: &[Source], files: &[File]) -> Vec<Finding> {
    let document = files.iter().find(|file| file.path == DOCUMENT);
    let listed = document.map(|file| listed(&file.text)).unwrap_or_default();
    let mut findings = Vec::new();
    for source in sources {
        findings.extend(unargued(source));
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

/// The files that the section lists, with the line of each.
fn listed(text: &str) -> BTreeMap<&str, usize> {
    let lines = (1..).zip(text.lines());
    let section = lines.skip_while(|(_, line)| line.trim_end() != HEADING).skip(1);
    let section = section.take_while(|(_, line)| !line.starts_with("## "));
    section.filter_map(|(number, line)| Some((listed_path(line)?, number))).collect()
}

/// The path in "- `path`: why".
fn listed_path(line: &str) -> Option<&str> {
    let (path, why) = line.strip_prefix("- `")?.split_once('`')?;
    why.starts_with(':').then_some(path)
}

/// The first line that allows unsafe code or has some, from 1.
fn first_unsafe(source: &Source) -> Option<usize> {
    let mut lines = source.numbered();
    lines.find(|(_, line)| allows_unsafe(&line.code) || is_unsafe(&line.code)).map(|(number, _)| number)
}

fn allows_unsafe(code: &str) -> bool {
    code.contains("allow(unsafe_code") || code.contains("expect(unsafe_code")
}

/// Whether an unsafe block or implementation begins here.
fn is_unsafe(code: &str) -> bool {
    let Some(at) = find_word(code, "unsafe") else { return false };
    let next = code[at + "unsafe".len()..].trim_start();
    next.starts_with('{') || find_word(next, "impl") == Some(0)
}

/// The unsafe blocks and implementations without a SAFETY comment that cites an invariant.
fn unargued(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, _) in source.numbered().filter(|(_, line)| is_unsafe(&line.code)) {
        let above = &source.lines[number.saturating_sub(ABOVE + 1)..number];
        let Some(begin) = above.iter().rposition(|line| find_word(&line.comment, "SAFETY").is_some()) else {
            findings.push(Finding::new(source.path, number, "say in a SAFETY comment right above why this is sound"));
            continue;
        };
        if !above[begin..].iter().any(|line| cites_invariant(&line.comment)) {
            let advice = "let the SAFETY comment cite the numbered invariant that it rests on, like M1";
            findings.push(Finding::new(source.path, number, advice));
        }
    }
    findings
}

/// Whether a text has a word like `M1` or `R12`: one capital letter, then digits.
fn cites_invariant(text: &str) -> bool {
    text.split(|c| !is_word(c)).any(|word| {
        let digits = word.strip_prefix(|c: char| c.is_ascii_uppercase());
        digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()))
    })
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

    const ARGUED: &str =
        "#![allow(unsafe_code, reason = \"maps memory\")]\n// SAFETY: mapped (M1).\nunsafe { map() }\n";

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
        assert!(found[0].starts_with("a.rs:1: this file has unsafe code"), "{found:?}");
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
        let found = |text: &str| unargued(&Source::read(&file("a.rs", text))).len();
        assert_eq!(found("// SAFETY:\n// - in bounds: R12.\nunsafe { f() }"), 0);
        assert_eq!(found("// SAFETY: it is fine.\nunsafe { f() }"), 1);
        assert_eq!(found("// In bounds: M1.\nunsafe impl Send for A {}"), 1);
        assert_eq!(found(&format!("// SAFETY: M1.\n{}unsafe {{ f() }}", "x;\n".repeat(ABOVE - 1))), 0);
        assert_eq!(found(&format!("// SAFETY: M1.\n{}unsafe {{ f() }}", "x;\n".repeat(ABOVE))), 1);
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
