//! Checks the threat model against its tests. Each row has a unique number and names existing tests, and each attack
//! names its row.

use std::collections::BTreeSet;

use crate::tidy::source::{Source, is_word};
use crate::tidy::{File, Finding};

/// Page with the rows.
const PAGE: &str = "docs/design/threat-model.md";

/// Numbers of rows and attacks found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of rows on the page.
    pub rows: usize,
    /// Number of attacks in tests, one for each row that they name.
    pub attacks: usize,
}

pub fn check(files: &[File], sources: &[Source]) -> (Vec<Finding>, Tally) {
    let Some(page) = files.iter().find(|file| file.path == PAGE) else { return Default::default() };
    let mut findings = Vec::new();
    let mut rows = BTreeSet::new();
    for (number, row) in (1..).zip(page.text.lines()).filter(|(_, line)| is_row(line)) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        match row_id(cells[0]) {
            Some(id) if rows.insert(id) => {}
            _ => findings.push(Finding::new(PAGE, number, "give this row a number of its own, as T11")),
        }
        let tests = tests(cells[cells.len() - 1]);
        if tests.is_empty() {
            findings.push(Finding::new(PAGE, number, "name a test of this row in its last column, as `module::test`"));
        }
        let missing = tests.iter().filter(|(module, test)| !is_there(sources, module, test));
        findings.extend(missing.map(|(module, test)| {
            Finding::new(PAGE, number, format!("there is no test {test} in {module}.rs; name one that there is"))
        }));
    }
    let mut tally = Tally { rows: rows.len(), attacks: 0 };
    for file in files.iter().filter(|file| file.path.ends_with(".rs") && file.path.contains("/tests/")) {
        for (number, line) in (1..).zip(file.text.lines()) {
            for id in attacks(line) {
                tally.attacks += 1;
                if !rows.contains(id) {
                    findings.push(Finding::new(&file.path, number, format!("{PAGE} has no row {id}")));
                }
            }
        }
    }
    findings.extend(sources.iter().filter(|source| is_of_attacks(source)).flat_map(without_row));
    (findings, tally)
}

/// Returns whether a line is a row of a table, but neither of its first two.
fn is_row(line: &str) -> bool {
    line.starts_with("| ") && !["| row |", "| what |"].iter().any(|head| line.starts_with(head))
}

/// Returns the text if it is a row number: T and digits.
fn row_id(text: &str) -> Option<&str> {
    let digits = text.strip_prefix('T')?;
    (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

/// Returns the tests that a cell names as `module::test` or `module::tests::test`.
fn tests(cell: &str) -> Vec<(&str, &str)> {
    let quoted = cell.split('`').skip(1).step_by(2);
    quoted.filter_map(|path| Some((path.split_once("::")?.0, path.rsplit_once("::")?.1))).collect()
}

fn is_there(sources: &[Source], module: &str, test: &str) -> bool {
    let (file, folder) = (format!("/{module}.rs"), format!("/{module}/"));
    let function = format!("fn {test}(");
    let is_its = |source: &&Source| source.path.ends_with(&file) || source.path.contains(&folder);
    sources.iter().filter(is_its).any(|source| source.lines.iter().any(|line| line.code.contains(&function)))
}

/// Returns the rows that a line of a test names: `row: T11` in a comment, or "T11" in a table.
fn attacks(line: &str) -> impl Iterator<Item = &str> {
    let ids = |mark: &'static str, after: &'static str| {
        line.match_indices(mark).filter_map(move |(at, _)| {
            let rest = &line[at + mark.len()..];
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            row_id(&rest[..end]).filter(|_| rest[end..].starts_with(after))
        })
    };
    ids("row: ", "").chain(ids("\"", "\""))
}

/// Returns whether a file's head says that it contains attacks of the page.
fn is_of_attacks(source: &Source) -> bool {
    let head = source.lines.iter().take_while(|line| line.code.trim().is_empty());
    source.path.contains("/tests/") && head.clone().any(|line| line.comment.contains(PAGE))
}

/// Finds tests in such a file that name no row.
fn without_row(source: &Source) -> Vec<Finding> {
    let is_test = |(_, line): &(usize, &crate::tidy::source::Line)| line.code.trim() == "#[test]";
    let says_row = |number: usize| {
        let above = source.lines[..number - 1].iter().rev().take_while(|line| !line.comment.is_empty());
        above.into_iter().any(|line| line.comment.contains("row: T") || line.comment.contains("rows: "))
    };
    let tests = source.numbered().filter(is_test).filter(|(number, _)| !says_row(*number));
    tests
        .map(|(number, _)| {
            Finding::new(source.path, number, format!("say above this test which row of {PAGE} it attacks: `row: T11`"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    const HEAD: &str = "| row | who | tests |\n|---|---|---|\n";

    fn checked(page: &str, test: &str) -> (Vec<String>, Tally) {
        let files = [file(PAGE, &format!("{HEAD}{page}")), file("crates/a/tests/attacks.rs", test)];
        let sources: Vec<Source> = files[1..].iter().map(Source::read).collect();
        let (findings, tally) = check(&files, &sources);
        (findings.iter().map(|finding| format!("{}: {}", finding.line, finding.advice)).collect(), tally)
    }

    const TEST: &str = "//! Attacks of docs/design/threat-model.md.\n\n/// row: T1\n#[test]\nfn a() {}\nconst ALL: &[(&str, &str)] = &[(\"T1\", \"x\"), (\"T2\", \"y\")];\n";

    #[test]
    fn rows_name_tests_and_attacks_rows() {
        let (found, tally) = checked("| T1 | x | `attacks::a` |\n| T2 | y | as `attacks::tests::a`, too |\n", TEST);
        assert_eq!((found, tally), (vec![], Tally { rows: 2, attacks: 3 }));
    }

    #[test]
    fn what_is_not_there_is_found() {
        let (found, _) = checked("| T1 | x | `attacks::b` |\n| y | z | none |\n", TEST);
        let parts =
            ["there is no test b in attacks.rs", "a number of its own", "name a test of this row", "has no row T2"];
        assert!(
            found.len() == 4 && parts.iter().all(|part| found.iter().any(|found| found.contains(part))),
            "{found:?}"
        );
        let (found, _) =
            checked("| T1 | x | `attacks::a` |\n| T2 | x | `attacks::a` |\n", &TEST.replace("/// row: T1\n", ""));
        assert!(
            found.len() == 1 && found[0].contains("4: ") || found[0].contains("3: say above this test"),
            "{found:?}"
        );
    }
}
