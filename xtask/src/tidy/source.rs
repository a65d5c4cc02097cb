//! Splits Rust source into code, which the compiler reads, and comments, which people read.

use std::iter::Peekable;
use std::str::Chars;

use crate::tidy::File;

/// A Rust file, line by line.
pub struct Source<'f> {
    pub path: &'f str,
    pub lines: Vec<Line>,
}

/// A line, split into code and comment.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Line {
    /// Code, without the content of strings and characters: `say("")`.
    pub code: String,
    /// Text of the comments. A line comment keeps its slashes after the first; a block comment keeps neither slash nor
    /// star at its ends.
    pub comment: String,
}

impl<'f> Source<'f> {
    pub fn read(file: &'f File) -> Source<'f> {
        Source { path: &file.path, lines: split(&file.text) }
    }

    /// Returns the lines with their numbers, from 1.
    pub fn numbered(&self) -> impl Iterator<Item = (usize, &Line)> {
        (1..).zip(&self.lines)
    }
}

/// Splits a text. Handles nested comments, raw strings, and lifetimes, which are not characters.
pub fn split(text: &str) -> Vec<Line> {
    let mut splitter = Splitter { rest: text.chars().peekable(), lines: vec![Line::default()] };
    while let Some(c) = splitter.rest.next() {
        match (c, splitter.rest.peek().copied()) {
            ('/', Some('/')) => splitter.line_comment(),
            ('/', Some('*')) => splitter.block_comment(),
            ('"', _) => splitter.string(),
            ('r', Some('"' | '#')) if !splitter.inside_word() => splitter.raw_string(),
            ('\'', Some(next)) => splitter.character_or_lifetime(next),
            _ => splitter.code(c),
        }
    }
    splitter.lines
}

struct Splitter<'t> {
    rest: Peekable<Chars<'t>>,
    lines: Vec<Line>,
}

impl Splitter<'_> {
    fn line(&mut self) -> &mut Line {
        if self.lines.is_empty() {
            self.lines.push(Line::default());
        }
        let last = self.lines.len() - 1;
        &mut self.lines[last]
    }

    fn code(&mut self, c: char) {
        match c {
            '\n' => self.lines.push(Line::default()),
            _ => self.line().code.push(c),
        }
    }

    fn comment(&mut self, c: char) {
        match c {
            '\n' => self.lines.push(Line::default()),
            _ => self.line().comment.push(c),
        }
    }

    /// Returns whether the code so far ends within a word that an `r` would continue. The `b` of `br` is not such a
    /// word.
    fn inside_word(&mut self) -> bool {
        let mut before = self.line().code.chars().rev();
        match before.next() {
            Some('b' | 'c') => before.next().is_some_and(is_word),
            last => last.is_some_and(is_word),
        }
    }

    fn line_comment(&mut self) {
        while let Some(c) = self.rest.next_if(|c| *c != '\n') {
            self.comment(c);
        }
    }

    fn block_comment(&mut self) {
        self.rest.next();
        let mut depth = 1;
        while let Some(c) = self.rest.next() {
            match (c, self.rest.peek()) {
                ('/', Some('*')) => depth += 1,
                ('*', Some('/')) => depth -= 1,
                _ => {
                    self.comment(c);
                    continue;
                }
            }
            self.rest.next();
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self) {
        self.code('"');
        while let Some(c) = self.rest.next() {
            match c {
                '"' => break,
                '\\' => self.skipped(1),
                '\n' => self.code('\n'),
                _ => {}
            }
        }
        self.code('"');
    }

    /// Skips `count` characters, but keeps the ends of lines.
    fn skipped(&mut self, count: usize) {
        for _ in 0..count {
            if self.rest.next() == Some('\n') {
                self.code('\n');
            }
        }
    }

    fn raw_string(&mut self) {
        let hashes = self.rest.clone().take_while(|c| *c == '#').count();
        if self.rest.clone().nth(hashes) != Some('"') {
            self.code('r'); // A raw identifier: `r#type`.
            return;
        }
        self.skipped(hashes + 1);
        self.code('"');
        while let Some(c) = self.rest.next() {
            if c == '"' && self.rest.clone().take_while(|c| *c == '#').take(hashes).count() == hashes {
                self.skipped(hashes);
                break;
            }
            if c == '\n' {
                self.code('\n');
            }
        }
        self.code('"');
    }

    fn character_or_lifetime(&mut self, next: char) {
        self.code('\'');
        if next == '\\' {
            self.skipped(2);
            while self.rest.next_if(|c| *c != '\'' && *c != '\n').is_some() {}
        } else if self.rest.clone().nth(1) == Some('\'') {
            self.skipped(1);
        } else {
            return; // A lifetime.
        }
        self.rest.next();
        self.code('\'');
    }
}

pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the position of `word` in `text` where no letter, digit or underscore is next to it.
pub fn find_word(text: &str, word: &str) -> Option<usize> {
    text.match_indices(word).map(|(at, _)| at).find(|at| {
        let before = text[..*at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Vec<String> {
        split(text).into_iter().map(|line| line.code).collect()
    }

    fn comments(text: &str) -> Vec<String> {
        split(text).into_iter().map(|line| line.comment).collect()
    }

    #[test]
    fn comments_are_not_code() {
        assert_eq!(code("a // b\nc /* d\n e /* f */ g */ h"), ["a ", "c ", " h"]);
        assert_eq!(comments("a // b\nc /* d\n e /* f */ g */ h"), ["/ b", " d", " e  f  g "]);
    }

    #[test]
    fn strings_keep_their_quotes_and_nothing_else() {
        assert_eq!(code(r#"say("a \" // b"); x"#), [r#"say(""); x"#]);
        assert_eq!(code("say(\"a\nb\") + 1"), ["say(\"", "\") + 1"]);
        assert_eq!(code("say(r##\"a \"# b\"##) + br\"\\\" + r#type"), ["say(\"\") + b\"\" + r#type"]);
    }

    #[test]
    fn a_lifetime_is_no_character() {
        assert_eq!(code("fn f<'a>(x: &'a str) { '\"' '\\'' '\\u{1F}' }"), ["fn f<'a>(x: &'a str) { '' '' '' }"]);
    }

    #[test]
    fn words_end_where_names_do() {
        assert_eq!(find_word("my_dbg dbg", "dbg"), Some(7));
        assert_eq!(find_word("dbg2", "dbg"), None);
    }
}
