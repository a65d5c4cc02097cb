//! Finds leftovers that the author meant to remove or finish.

use crate::tidy::Finding;
use crate::tidy::source::{Line, Source, find_word};

pub fn check(source: &Source) -> Vec<Finding> {
    let found = source.numbered().filter_map(|(number, line)| Some((number, advice(line)?)));
    found.map(|(number, advice)| Finding::new(source.path, number, advice)).collect()
}

fn advice(line: &Line) -> Option<String> {
    let code = line.code.as_str();
    for name in ["todo", "unimplemented"] {
        if find_word(code, name).is_some_and(|at| code[at + name.len()..].starts_with('!')) {
            return Some(format!("write the code that `{name}!` stands for, or leave the function out"));
        }
    }
    if find_word(code, "dbg").is_some_and(|at| code[at + "dbg".len()..].starts_with('!')) {
        return Some("take `dbg!` out".to_owned());
    }
    if code.contains("#[ignore") {
        return Some(
            "a test that cannot run prints `skipped: ` and the reason, and returns; see CONTRIBUTING.md".to_owned(),
        );
    }
    let word = ["FIXME", "XXX"].into_iter().find(|word| find_word(&line.comment, word).is_some())?;
    Some(format!("do the work that {word} names, or write it down where its reader will look"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::source::split;

    fn finds(text: &str) -> bool {
        advice(&split(text)[0]).is_some()
    }

    #[test]
    fn leftovers_are_found() {
        for text in
            ["todo!()", "let x = unimplemented!();", "dbg!(x)", "#[ignore = \"slow\"]", "x // FIXME: y", "/* XXX */"]
        {
            assert!(finds(text), "{text}");
        }
    }

    #[test]
    fn words_that_look_alike_are_not() {
        for text in ["say(\"todo!()\")", "// todo!()", "my_todo!()", "\"FIXME\"", "// mkstemp XXXXXX", "fn todo() {}"] {
            assert!(!finds(text), "{text}");
        }
    }
}
