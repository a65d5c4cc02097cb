//! One word per thing: retired words stay out, and a comment says more than the name below it.

use anyhow::{Context, ensure};

use crate::tidy::source::Source;
use crate::tidy::{File, Finding};

/// The table of retired words.
const TABLE: &str = "docs/renamed.toml";

/// A row of the table.
#[derive(Debug, PartialEq, Eq)]
struct Retired<'t> {
    old: &'t str,
    new: &'t str,
    camel: &'t str,
    /// Whether only types may not have this name; variables may.
    only_types: bool,
    /// Whether comments and pages must not use the word, either: it is no word of ordinary English.
    in_prose: bool,
    /// Parts of paths. The row applies to files whose path contains one of them; to all files if there are none.
    within: Vec<&'t str>,
}

/// Returns the rows of the table. Each is an inline table on one line.
fn rows(table: &str) -> anyhow::Result<Vec<Retired<'_>>> {
    let row = |line: &'_ str| line.trim_start().starts_with("{ old");
    let rows = table.lines().filter(|line| row(line)).map(|line| {
        let text = |key: &str| {
            let (_, rest) = line.split_once(&format!("{key} = \""))?;
            rest.split_once('"').map(|(value, _)| value)
        };
        let need = |key| text(key).with_context(|| format!("{TABLE}: a row lacks {key}: {line}"));
        let list = line.split_once("within = [").and_then(|(_, rest)| rest.split_once(']')).map_or("", |it| it.0);
        let within = list.split('"').skip(1).step_by(2).collect();
        let old = need("old")?;
        let only_types = line.contains("types = true");
        let in_prose = line.contains("prose = true");
        Ok(Retired { old, new: need("new")?, camel: need("camel")?, only_types, in_prose, within })
    });
    let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(!rows.is_empty(), "{TABLE} has no rows");
    Ok(rows)
}

impl Retired<'_> {
    fn is_of(&self, path: &str) -> bool {
        self.within.is_empty() || self.within.iter().any(|part| path.contains(part))
    }

    /// Returns whether a part of an identifier is the word, or its plural.
    fn is(&self, part: &str) -> bool {
        part.strip_prefix(self.old).is_some_and(|rest| matches!(rest, "" | "s" | "es"))
    }

    fn is_in(&self, identifier: &str) -> bool {
        let is_type = identifier.starts_with(char::is_uppercase) && identifier.contains(char::is_lowercase);
        (is_type || !self.only_types) && parts(identifier).iter().any(|part| self.is(part))
    }
}

/// Returns the words of a text; an identifier is one word.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Returns the words within an identifier, in lower case.
fn parts(identifier: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut before = '_';
    for c in identifier.chars() {
        if c == '_' || c.is_uppercase() && before.is_lowercase() {
            parts.push(String::new());
        }
        if c != '_' {
            parts.last_mut().expect("there is one").extend(c.to_lowercase());
        }
        before = c;
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// Finds retired words that are in use again.
pub fn check(sources: &[Source], files: &[File]) -> anyhow::Result<Vec<Finding>> {
    let table = files.iter().find(|file| file.path == TABLE).with_context(|| format!("{TABLE} is missing"))?;
    let rows = rows(&table.text)?;
    let mut findings = Vec::new();
    let mut find = |path: &str, number, word: &str, row: &Retired| {
        let Retired { old, new, camel, .. } = row;
        findings.push(Finding::new(
            path,
            number,
            format!("`{word}`: {old} was retired; write {new} ({camel}), as {TABLE} has it"),
        ));
    };
    for source in sources.iter().filter(|source| !source.path.starts_with("xtask/src/tidy")) {
        for (number, line) in source.numbered() {
            for row in rows.iter().filter(|row| row.is_of(source.path)) {
                let in_code = words(&line.code).find(|word| row.is_in(word));
                let in_comment = words(&line.comment).find(|word| row.in_prose && row.is(&word.to_lowercase()));
                in_code.or(in_comment).into_iter().for_each(|word| find(source.path, number, word, row));
            }
        }
    }
    let pages = files.iter().filter(|file| file.path.ends_with(".md") && !file.path.contains("/records/"));
    for page in pages {
        for (number, line) in (1..).zip(page.text.lines()) {
            for row in rows.iter().filter(|row| row.in_prose && row.is_of(&page.path)) {
                let word = words(line).find(|word| row.is(&word.to_lowercase()));
                word.into_iter().for_each(|word| find(&page.path, number, word, row));
            }
        }
    }
    Ok(findings)
}

/// Words that add nothing to a name.
const EMPTY: [&str; 24] = [
    "a", "all", "an", "and", "are", "as", "for", "has", "in", "is", "it", "its", "of", "on", "one", "our", "that",
    "the", "their", "these", "this", "to", "was", "with",
];

/// Finds one-line comments that only repeat the name of the item below.
pub fn repeats(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, window) in (2..).zip(source.lines.windows(3)) {
        let [before, doc, item] = window else { continue };
        let is_one_line = doc.code.trim().is_empty() && before.comment.is_empty() && item.comment.is_empty();
        let Some(text) = doc.comment.strip_prefix("//").filter(|_| is_one_line) else { continue };
        if let Some(name) = name_of(&item.code)
            && says_no_more(text, name)
        {
            let advice = format!("say more than the name `{name}` does, or take the comment out");
            findings.push(Finding::new(source.path, number, advice));
        }
    }
    findings
}

/// Returns the name that a line of code defines.
fn name_of(code: &str) -> Option<&str> {
    const BEFORE: [&str; 14] = [
        "pub", "crate", "super", "const", "static", "unsafe", "async", "fn", "struct", "enum", "trait", "type", "mod",
        "in",
    ];
    words(code).find(|word| !BEFORE.contains(word))
}

fn says_no_more(text: &str, name: &str) -> bool {
    let of_name = parts(name);
    let is_of_name = |word: &str| {
        of_name
            .iter()
            .any(|part| word == part || word.strip_suffix('s') == Some(part) || part.strip_suffix('s') == Some(word))
    };
    let mut said = words(text).map(str::to_lowercase).filter(|word| !EMPTY.contains(&word.as_str())).peekable();
    said.peek().is_some() && said.all(|word| is_of_name(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: &str = r#"rename = [
    { old = "sash", new = "driver state", snake = "driver_state", camel = "DriverState", prose = true },
    { old = "told", types = true, new = "outcome", snake = "told", camel = "Outcome", within = ["relay/", "x/"] },
]"#;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
        let files = [file(TABLE, ROWS), file(path, text)];
        let sources: Vec<_> = files.iter().filter(|file| file.path.ends_with(".rs")).map(Source::read).collect();
        let found = check(&sources, &files).unwrap();
        found.into_iter().map(|finding| finding.advice.split('`').nth(1).unwrap().to_owned()).collect()
    }

    #[test]
    fn a_retired_word_is_found_in_identifiers_and_where_english_has_none_in_prose() {
        assert_eq!(findings("a.rs", "fn to_sash(sashes: WriteSash) {}"), ["to_sash"], "one a line");
        assert_eq!(findings("a.rs", "// A sash, once."), ["sash"]);
        assert_eq!(findings("a.md", "The Sash."), ["Sash"]);
        assert_eq!(findings("a.rs", "fn sashay() {} // Told so."), [""; 0]);
        assert_eq!(findings("relay/a.rs", "let told: Told = 1;"), ["Told"], "a type alone");
        assert_eq!(findings("other/a.rs", "let told: Told = 1;"), [""; 0]);
    }

    #[test]
    fn a_table_without_rows_is_no_table() {
        assert!(rows("rename = []").is_err());
        assert!(rows("    { old = \"a\" }").is_err_and(|error| error.to_string().contains("lacks new")));
    }

    #[test]
    fn a_comment_that_repeats_the_name_is_found() {
        let finds = |text: &str| {
            let text = format!("struct S {{\n{text}\n}}");
            let file = File { path: "a.rs".to_owned(), text };
            !repeats(&Source::read(&file)).is_empty()
        };
        assert!(finds("/// Its number.\npub number: u32,"));
        assert!(finds("    /// The lease page.\n    pub(super) lease_pages: X,"));
        assert!(finds("/// Frames received.\nreceived_frames: u64,"));
        assert!(!finds("/// Its number, from 1.\npub number: u32,"));
        assert!(!finds("/// Its number.\n/// Never 0.\npub number: u32,"));
        assert!(!finds("// Number.\npub number: u32,"), "no doc comment");
    }
}
