//! The configuration as a file that another tasukid begins with, or the same one on another day.

use serde::Serialize;

use super::{Config, Nic, Node, before};
use crate::log::plain;

/// Begins each line that is not of the file that was applied.
const OURS: &str = "#= ";
/// Begins the first line.
const HEAD: &str = "#= tasuki config show: ";
/// The last line.
const END: &str = "#= The end: a copy without this line was cut off.";

/// What some editors begin a file with: a mark of its encoding. TOML has it nowhere else.
pub fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Returns whether the end is missing of what [`file()`] wrote. What is left would be a configuration of less.
pub fn is_cut_off(text: &str) -> bool {
    text.starts_with(HEAD) && !text.lines().any(|line| line == END)
}

/// Nodes and NICs, each under a header of its own.
#[derive(Serialize)]
struct Lists<'a> {
    #[serde(skip_serializing_if = "is_empty")]
    node: &'a [Node],
    #[serde(skip_serializing_if = "is_empty")]
    nic: &'a [Nic],
}

/// An empty list would be a key of the table before it.
fn is_empty<T>(list: &&[T]) -> bool {
    list.is_empty()
}

fn comment(line: &str) -> String {
    format!("{OURS}{}\n", plain(line, usize::MAX))
}

/// Returns a file with the `[daemon]` and `[api]` of the configuration `applied`, and with these nodes and NICs. If
/// these are the same as there, it is that text. `origin` and `notes` become comments. It has no fault that `now` does not have,
/// the configuration at work. An error is a sentence.
pub fn file(
    applied: &str,
    nodes: &[Node],
    nics: &[Nic],
    now: &Config,
    origin: &str,
    notes: &[String],
) -> Result<String, String> {
    // Not the whole error, which quotes the line.
    let wrong = |error: toml::de::Error| error.message().to_owned();
    let applied = without_mark(applied);
    let mut table: toml::Table = applied.parse().map_err(wrong)?;
    // Another version may have applied it: what this one refuses is left out.
    let as_it_is = toml::from_str::<Config>(applied);
    let is_whole = as_it_is.is_ok();
    let before =
        as_it_is.or_else(|error| before::read(&mut table).map(|(config, _)| config).map_err(|_| wrong(error)))?;
    let is_in = |nodes: &[Node], nics: &[Nic], other: &Config| {
        nodes.len() == other.node.len()
            && nics.len() == other.nic.len()
            && nodes.iter().all(|node| other.node.contains(node))
            && nics.iter().all(|nic| other.nic.contains(nic))
    };
    let is_same = is_whole && is_in(nodes, nics, &before);
    let mut text = format!("{HEAD}{}\n", plain(origin, usize::MAX));
    if !is_same {
        text += &comment(
            "Nodes and NICs are as they are now, also what was changed by hand. That file's comments are left out.",
        );
    }
    notes.iter().for_each(|note| text += &comment(note));
    if is_same {
        let its_own = applied.lines().filter(|line| !line.starts_with(OURS));
        its_own.for_each(|line| text += &format!("{line}\n"));
    } else {
        table.retain(|key, _| key != "node" && key != "nic");
        for part in [toml::to_string(&table), toml::to_string(&Lists { node: nodes, nic: nics })] {
            text += &format!("\n{}", part.map_err(|error| error.to_string())?);
        }
    }
    text += &format!("{END}\n");
    let again: Config = toml::from_str(&text).map_err(wrong)?;
    match again.senseless_beside(now) {
        None if is_in(nodes, nics, &again) && (&again.daemon, &again.api) == (&before.daemon, &before.api) => Ok(text),
        None => Err("it would be read as another one".to_owned()),
        Some(why) => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const EVERY_KEY: &str = include_str!("../../tests/every-key.toml");

    fn parse(text: &str) -> Config {
        Config::parse(Path::new("t.toml"), text).expect("a configuration")
    }

    #[test]
    fn what_is_written_is_read_as_the_same() {
        let all = parse(EVERY_KEY);
        let same = file(EVERY_KEY, &all.node, &all.nic, &Config::default(), "generation 1", &[]).expect("a file");
        assert!(same.contains("# Every key that a configuration may have.\n"), "comments stay: {same}");
        let again = file(&same, &all.node, &all.nic, &Config::default(), "generation 1", &[]);
        assert_eq!(again.as_deref(), Ok(&same[..]), "nothing adds up");
        let fewer =
            file(EVERY_KEY, &all.node, &all.nic[1..], &Config::default(), "generation 1", &["so it is".to_owned()])
                .expect("a file");
        let read = parse(&fewer);
        assert_eq!((read.node, &read.nic[..], read.daemon, read.api), (all.node, &all.nic[1..], all.daemon, all.api));
        assert!(fewer.contains("\n#= so it is\n"), "{fewer}");
        let none = file(EVERY_KEY, &[], &[], &Config::default(), "a\nb", &[]).expect("a file");
        assert_eq!((parse(&none).node, parse(&none).api), (vec![], parse(EVERY_KEY).api), "{none}");
    }

    #[test]
    fn what_another_version_applied_is_written_without_what_this_one_refuses() {
        let all = parse(EVERY_KEY);
        let later = EVERY_KEY.replacen("daemon = {", "daemon = { later = 1,", 1);
        assert!(Config::parse(Path::new("t.toml"), &later).is_err());
        let text = file(&later, &all.node, &all.nic, &Config::default(), "generation 1", &[]).expect("a file");
        let again = parse(&text);
        assert_eq!((again.node, again.nic, again.daemon, again.api), (all.node, all.nic, all.daemon, all.api));
    }

    #[test]
    fn a_fault_that_is_at_work_is_written_and_no_other() {
        let text = "[[node]]\nname = \"a\"\nwork = \"sink\"\nnice = 5\n";
        let now: Config = toml::from_str(text).expect("it is read");
        let written = file(text, &now.node, &[], &now, "generation 1", &[]).expect("a file");
        assert!(written.contains(text), "{written}");
        let other = [Node { nice: Some(6), ..now.node[0].clone() }];
        let said = file(text, &other, &[], &now, "generation 1", &[]).unwrap_err();
        assert!(said.starts_with("node \"a\": nice = 6 is not in the range"), "{said}");
    }

    #[test]
    fn a_file_of_an_editor_that_marks_its_encoding_and_ends_lines_in_two_is_written_too() {
        let all = parse(EVERY_KEY);
        let marked = format!("\u{feff}{}", EVERY_KEY.replace('\n', "\r\n"));
        assert_eq!(parse(&marked).node, all.node);
        for nics in [&all.nic[..], &all.nic[1..]] {
            let written = file(&marked, &all.node, nics, &Config::default(), "generation 1", &[]).expect("a file");
            assert_eq!((parse(&written).node, &parse(&written).nic[..]), (all.node.clone(), nics));
            // Kept in such an editor.
            let kept = format!("\u{feff}{}", written.replace('\n', "\r\n"));
            let again = file(&kept, &all.node, nics, &Config::default(), "generation 1", &[]).expect("a file");
            assert_eq!(again.matches(HEAD).count(), 1, "nothing adds up: {again}");
            let cut_off = kept.split_once(END).expect("an end").0;
            assert!(Config::parse(Path::new("t.toml"), cut_off).is_err_and(|it| it.to_string().contains("cut off")));
        }
    }

    #[test]
    fn a_copy_that_was_cut_off_is_refused_wherever_that_was() {
        let all = parse(EVERY_KEY);
        let whole = file(EVERY_KEY, &all.node, &all.nic[1..], &Config::default(), "generation 1", &[]).expect("a file");
        for len in HEAD.len()..whole.len() - 1 {
            assert!(is_cut_off(&whole[..len]), "at {len}");
        }
        let said = Config::parse(Path::new("t.toml"), &whole[..whole.rfind("[[node]]").expect("nodes")]);
        let said = said.expect_err("it is not whole").to_string();
        assert!(said.contains("this file is cut off") && said.lines().count() == 1, "{said}");
        parse(&format!("{whole}[[node]]\nname = \"more\"\nwork = \"sink\"\n"));
    }
}
