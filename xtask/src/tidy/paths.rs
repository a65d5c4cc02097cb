//! Committed files must not name folders of the machine that they were written on.

use crate::tidy::source::is_word;
use crate::tidy::{File, Finding};

/// Folders in which people and machines work on this project.
const FOLDERS: [&str; 3] = ["work", "root", "farm"];

pub fn check(file: &File) -> Vec<Finding> {
    let lines = (1..).zip(file.text.lines());
    let found = lines.filter_map(|(number, line)| Some((number, named_folder(line)?)));
    found
        .map(|(number, folder)| {
            let advice = format!("/{folder} is a folder of one machine: name the file relative to the checkout");
            Finding::new(&file.path, number, advice)
        })
        .collect()
}

/// Returns the first of [`FOLDERS`] that a line names by an absolute path.
fn named_folder(line: &str) -> Option<&'static str> {
    FOLDERS.into_iter().find(|folder| {
        line.match_indices(folder).any(|(at, _)| {
            let before = line[..at].strip_suffix('/');
            let after = line[at + folder.len()..].chars().next();
            before.is_some_and(|before| !continues_a_path(before)) && !after.is_some_and(|c| is_word(c) || c == '-')
        })
    })
}

/// Returns whether a `/` after this text continues a path, as in `net/work`, `./work`, `~/work`, `${base}/work`.
fn continues_a_path(text: &str) -> bool {
    text.chars().next_back().is_some_and(|c| is_word(c) || "./~})*-<>".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_of_a_machine_are_found() {
        for folder in FOLDERS {
            for line in [
                format!("/{folder}/a"),
                format!("see `/{folder}`"),
                format!("cd /{folder} && b"),
                format!("\"/{folder}/a\""),
            ] {
                assert_eq!(named_folder(&line), Some(folder), "{line}");
            }
        }
    }

    #[test]
    fn other_paths_are_not() {
        for line in
            ["net/work/a", "./root/a", "~/work", "${base}/farm", "https://example.org/work/", "/workshop", "work/root"]
        {
            assert_eq!(named_folder(line), None, "{line}");
        }
    }
}
