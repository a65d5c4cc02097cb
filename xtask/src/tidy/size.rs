//! Size limits that code should rarely exceed. Exceeding one gives a warning.

use crate::tidy::Finding;
use crate::tidy::source::{Source, find_word};

/// Maximum number of lines of a file: as many as one reads in a sitting.
const FILE_MAX: usize = 600;

/// Maximum number of lines of a function, with its signature: as many as one sees at once. Source: TigerStyle.
const FUNCTION_MAX: usize = 70;

pub fn check(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if source.lines.len() > FILE_MAX {
        let advice = format!("{} lines: see whether it is two files (from {FILE_MAX})", source.lines.len());
        findings.push(Finding::new(source.path, 1, advice));
    }
    for (name, line, length) in functions(source) {
        if length > FUNCTION_MAX {
            let advice = format!("fn {name} has {length} lines: see whether it is two functions (from {FUNCTION_MAX})");
            findings.push(Finding::new(source.path, line, advice));
        }
    }
    findings
}

/// Returns every function with a body: its name, the number of its first line (from 1), and its length in lines.
fn functions(source: &Source) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    for (number, line) in source.numbered() {
        let Some(at) = find_word(&line.code, "fn") else { continue };
        let name = line.code[at + 2..].trim_start().split(['(', '<']).next().unwrap_or_default();
        // `fn(u32)` is a type.
        if name.is_empty() {
            continue;
        }
        let first = std::iter::once(&line.code[at..]);
        let rest = source.lines[number..].iter().map(|line| line.code.as_str());
        if let Some(length) = body_end(first.chain(rest)) {
            found.push((name.to_owned(), number, length));
        }
    }
    found
}

/// Returns the number of lines until all opened brackets have closed, the last with a brace. Returns `None` if a
/// semicolon comes before any brace: a declaration.
fn body_end<'c>(lines: impl Iterator<Item = &'c str>) -> Option<usize> {
    let mut depth = 0_u32;
    for (number, line) in (1..).zip(lines) {
        for c in line.chars() {
            match c {
                '{' | '(' | '[' => depth += 1,
                '}' | ')' | ']' => depth = depth.checked_sub(1)?,
                ';' if depth == 0 => return None,
                _ => {}
            }
            if c == '}' && depth == 0 {
                return Some(number);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn lengths(text: &str) -> Vec<(String, usize, usize)> {
        let file = File { path: "a.rs".to_owned(), text: text.to_owned() };
        functions(&Source::read(&file))
    }

    #[test]
    fn a_function_ends_with_its_body() {
        let text = "impl A {\n    fn one(\n        a: [u8; 4],\n    ) -> fn(u8) {\n        { b }\n    }\n    fn two() { '}' }\n}";
        assert_eq!(lengths(text), [("one".to_owned(), 2, 5), ("two".to_owned(), 7, 1)]);
    }

    #[test]
    fn a_declaration_has_no_body() {
        assert_eq!(lengths("trait A { fn one(&self) -> [u8; 4]; }\nstruct B { f: fn(u8) }"), []);
    }

    #[test]
    fn long_functions_and_files_are_named() {
        let text = format!("fn long() {{\n{}}}\n{}", "x;\n".repeat(FUNCTION_MAX - 1), "\n".repeat(FILE_MAX));
        let file = File { path: "a.rs".to_owned(), text };
        assert_eq!(check(&Source::read(&file)).len(), 2);
    }
}
