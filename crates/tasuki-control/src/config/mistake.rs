//! Turns the TOML reader's errors into sentences that quote the faulty text and name a replacement. The reader's own
//! words are those of Rust's types (`expected struct Source`); an error that is not known here is passed on as it is.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::schema;

/// Works that need more than their name, and the least that they need.
const EXAMPLES: [(&str, &str); 8] = [
    ("answer", "{ address = \"192.0.2.77\" }"),
    ("interface", "{ name = \"eth1\" }"),
    ("memif", "{ socket = \"/run/web.sock\" }"),
    ("program", "{ path = \"/opt/mine\" }"),
    ("queue", "{ of = \"web\" }"),
    ("source", "{ rate = 1000 }"),
    ("tap", "{ name = \"nic0\" }"),
    ("vm", "{ socket = \"/run/web.sock\" }"),
];

fn example(work: &str) -> Option<&'static str> {
    EXAMPLES.iter().find(|(name, _)| *name == work).map(|(_, table)| *table)
}

/// Stands for a value that is not quoted. Every user who may read events gets these sentences, and only the file's owner
/// may know its secrets.
const UNSAID: &str = "…";

/// The place of an error.
struct Place<'a> {
    /// The text there.
    found: &'a str,
    /// The key of which it is the value.
    key: Option<&'a str>,
}

impl<'a> Place<'a> {
    fn of(text: &'a str, span: Range<usize>) -> Self {
        let before = text.get(..span.start).unwrap_or_default();
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let found = text.get(span).unwrap_or_default().lines().next().unwrap_or_default().trim();
        Place { found, key: key_before(&before[start..]) }
    }

    /// Returns the key and its value, as they stand there.
    fn shown(&self) -> String {
        self.key.map_or_else(|| self.found.to_owned(), |key| format!("{key} = {}", self.found))
    }

    /// Returns the text to write there instead.
    fn instead(&self, value: &str) -> String {
        self.key.map_or_else(|| value.to_owned(), |key| format!("{key} = {value}"))
    }
}

/// Returns the key of the value that comes next on a line.
fn key_before(line: &str) -> Option<&str> {
    let (before, _) = line.rsplit_once('=')?;
    let key = before.trim_end().trim_matches(['"', '\'']);
    let at = key.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-').map_or(0, |at| at + 1);
    Some(&key[at..]).filter(|key| !key.is_empty())
}

/// Returns the sentence for the reader's `message` about this place in the text.
pub fn sentence(text: &str, span: Option<Range<usize>>, message: &str) -> String {
    let span = span.unwrap_or(0..0);
    let mut place = Place::of(text, span.clone());
    let message = message.trim().replace('\n', "; ");
    match DeTable::parse(text) {
        Err(_) => of_toml(&place, &message),
        Ok(table) => {
            let path = path_to(table.get_ref(), &span).unwrap_or_default();
            let is_header = place.key.is_none();
            if path.last() == Some(&"secret") || !is_header && place.found.starts_with(['[', '{']) {
                place.found = UNSAID;
            }
            // A message that `of_word` does not know is a sentence of this crate.
            of_word(&place, &path, &message).unwrap_or(message)
        }
    }
}

/// Returns the keys that lead to the value at this place, if there is one.
fn path_to<'t>(table: &'t DeTable<'_>, span: &Range<usize>) -> Option<Vec<&'t str>> {
    table.iter().find_map(|(key, value)| {
        let rest = if value.span() == *span { Vec::new() } else { path_within(value.get_ref(), span)? };
        Some([vec![&**key.get_ref()], rest].concat())
    })
}

fn path_within<'t>(value: &'t DeValue<'_>, span: &Range<usize>) -> Option<Vec<&'t str>> {
    match value {
        DeValue::Table(table) => path_to(table, span),
        DeValue::Array(all) => all.iter().find_map(|value| path_within(value.get_ref(), span)),
        _ => None,
    }
}

/// Returns the line, from 1, in which a NIC's stand-by node is named.
pub fn line_of_standby(text: &str, nic: &str) -> usize {
    #[derive(serde::Deserialize)]
    struct Nics {
        nic: Vec<Named>,
    }
    #[derive(serde::Deserialize)]
    struct Named {
        name: String,
        standby: Option<toml::Spanned<String>>,
    }
    let nics = toml::from_str(text).map_or(Vec::new(), |Nics { nic }| nic);
    let named = nics.into_iter().find(|it| it.name == nic).and_then(|it| it.standby);
    let before = named.and_then(|it| text.get(..it.span().start)).unwrap_or_default();
    before.matches('\n').count() + 1
}

/// Returns the sentence for a text that is not valid TOML.
fn of_toml(place: &Place<'_>, message: &str) -> String {
    match message {
        "duplicate key" => format!("`{}` is there twice; leave one out", place.found.trim_matches(['[', ']'])),
        // The keys cannot be told from the values here, so nothing is quoted.
        _ if message.starts_with("string values must be quoted") => {
            "no value can be read here; write text in quotes, and numbers, true and false without".to_owned()
        }
        _ => format!("this line is not valid TOML ({message}); correct it"),
    }
}

/// Returns the sentence for a key or a value that may not be there.
fn of_word(place: &Place<'_>, path: &[&str], message: &str) -> Option<String> {
    if let Some((name, rest)) = named(message, "unknown field `") {
        return Some(format!("the key `{name}` means nothing here; there {}", there_are(rest)));
    }
    if let Some((name, rest)) = named(message, "unknown variant `") {
        return Some(format!("{} is not known; there {}", place.instead(&format!("{name:?}")), there_are(rest)));
    }
    if let Some((name, _)) = named(message, "missing field `") {
        return Some(format!("the key `{name}` is missing; add {name} = …"));
    }
    if message.starts_with("invalid type: ") || message.starts_with("invalid value: ") {
        return of_type(place, path, message.rsplit_once(", expected ")?.1);
    }
    if message.starts_with("expected table, found ") {
        let name = place.key?;
        return Some(format!("{name} has no settings; write work = {name:?}"));
    }
    match message {
        "wanted string or table" if path.last() != Some(&"work") => {
            Some(format!("{} is not known; there are `{}`", place.shown(), schema::words_of(path).join("`, `")))
        }
        "wanted string or table" => Some(format!(
            "{} is not a work; write {}, or a table, as {}",
            place.shown(),
            place.instead("\"echo\""),
            with_example("source")
        )),
        "invalid IP address syntax" => of_type(place, path, "IP address"),
        _ if message.starts_with("wanted exactly 1 element") => {
            Some("a node does one thing with frames, and this names several or none; write one".to_owned())
        }
        _ => None,
    }
}

/// If the message begins like this and then names something in backticks, returns the name, and the rest of the
/// message.
fn named<'a>(message: &'a str, begins: &str) -> Option<(&'a str, &'a str)> {
    message.strip_prefix(begins)?.split_once('`')
}

/// Returns the names there are, out of `, expected one of ...`.
fn there_are(rest: &str) -> String {
    let rest = rest.trim_start_matches(", expected ");
    rest.strip_prefix("one of ").map_or_else(|| format!("is {rest}"), |all| format!("are {all}"))
}

fn with_example(work: &str) -> String {
    format!("work = {{ {work} = {} }}", example(work).unwrap_or("{ … }"))
}

/// Returns the least and the most of a type of numbers; beyond TOML's own there is no most.
fn range_of_type(expected: &str) -> Option<[Option<i64>; 2]> {
    Some(match expected {
        "u8" => [Some(0), Some(i64::from(u8::MAX))],
        "u16" => [Some(0), Some(i64::from(u16::MAX))],
        "u32" => [Some(0), Some(i64::from(u32::MAX))],
        "u64" => [Some(0), None],
        "i32" => [Some(i64::from(i32::MIN)), Some(i64::from(i32::MAX))],
        _ => return None,
    })
}

/// Returns the sentence for a value of another type.
fn of_type(place: &Place<'_>, path: &[&str], expected: &str) -> Option<String> {
    let shown = place.shown();
    let bare = place.found.trim_matches('"');
    if place.found.starts_with('[') && place.key.is_none() {
        let name = place.found.trim_matches(['[', ']']);
        return Some(match expected {
            "a sequence" => format!("[{name}] can be there more than once; write [[{name}]]"),
            _ => format!("[[{name}]] is there only once; write [{name}]"),
        });
    }
    if let Some([least, most]) = range_of_type(expected) {
        let [its_least, its_most] = schema::range_of(path);
        let (least, most) = (its_least.or(least).unwrap_or_default(), its_most.or(most));
        let to = most.map(|most| format!(" to {most}")).unwrap_or_default();
        let quotes = if place.found.starts_with(['"', '\'']) { ", without quotes" } else { "" };
        return Some(match (place.found.parse::<i64>(), most) {
            (Ok(_), Some(most)) => format!("{shown} is not in the range {least} to {most}; write a number in it"),
            (Ok(_), None) => format!("{shown} is less than {least}; write a whole number from {least}"),
            (Err(_), _) => format!("{shown} is not a valid number; write a whole one from {least}{to}{quotes}"),
        });
    }
    Some(match expected {
        "a boolean" => format!("{shown} is neither true nor false; write one of these, without quotes"),
        "a string" => format!("{shown} is not text; put it in quotes"),
        "IP address" => format!("{shown} is not an IP address; write one alone, as \"192.0.2.1\""),
        "path string" => format!("{shown} is not a path; write one from /, in quotes"),
        "a sequence" if place.found.starts_with('"') => {
            // A list of numbers, if that is one.
            match bare.parse::<u32>() {
                Ok(_) => format!("{shown} is not a list; write {}", place.instead(&format!("[{bare}]"))),
                Err(_) if path.last() == Some(&"cpus") => {
                    format!("{shown} is not a list; write numbers, as {}", place.instead("[0, 1]"))
                }
                Err(_) => format!("{shown} is not a list; write {}", place.instead(&format!("[{}]", place.found))),
            }
        }
        "a sequence" => format!("{shown} is not a list; write one in brackets"),
        "newtype variant" => {
            format!("{shown} needs settings; write for example {}", with_example(bare))
        }
        _ if expected.starts_with("struct ") => {
            let table = place.key.and_then(example).unwrap_or("{ … }");
            format!("{shown} is not a table; write for example {}", place.instead(table))
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;

    /// Lines after a node's name and work, and the sentence for each.
    const OF_A_NODE: &[(&str, &str)] = &[
        ("poll = \"no\"", "poll = \"no\" is neither true nor false; write one of these, without quotes"),
        ("standby = 0", "standby = 0 is neither true nor false; write one of these, without quotes"),
        ("poll = yes", "no value can be read here; write text in quotes, and numbers, true and false without"),
        ("cpu =", "no value can be read here; write text in quotes, and numbers, true and false without"),
        ("cpu = \"3\"", "cpu = \"3\" is not a valid number; write a whole one from 0 to 4294967295, without quotes"),
        ("cpu = -1", "cpu = -1 is not in the range 0 to 4294967295; write a number in it"),
        ("cpu = 1.5", "cpu = 1.5 is not a valid number; write a whole one from 0 to 4294967295"),
        ("latency_us = -1", "latency_us = -1 is not in the range 0 to 10000; write a number in it"),
        ("nice = 0.5", "nice = 0.5 is not a valid number; write a whole one from -20 to 0"),
        (
            "limits = { receive = { mbit = 0.5 } }",
            "mbit = 0.5 is not a valid number; write a whole one from 1 to 1000000",
        ),
        ("bounds = { cpu = -1 }", "cpu = -1 is not in the range 0 to 4294967295; write a number in it"),
        ("trusts = \"blue\"", "trusts = \"blue\" is not a list; write trusts = [\"blue\"]"),
        ("cpus = \"2\"", "cpus = \"2\" is not a list; write cpus = [2]"),
        ("cpus = \"0-3\"", "cpus = \"0-3\" is not a list; write numbers, as cpus = [0, 1]"),
        ("cpus = []", "cpus names no CPU; name one at least, or leave it out"),
        ("trusts = 3", "trusts = 3 is not a list; write one in brackets"),
        ("trusts = [1]", "trusts = 1 is not text; put it in quotes"),
        (
            "trusts = [\"a\" \"b\"]",
            "this line is not valid TOML (missing comma between array elements, expected `,`); correct it",
        ),
        ("name = \"blue\"", "`name` is there twice; leave one out"),
        ("spoof = true", "spoof = true is not known; there are `check`, `allow`"),
        (
            "addresses = [\"192.0.2.1/24\"]",
            "addresses = \"192.0.2.1/24\" is not an IP address; write one alone, as \"192.0.2.1\"",
        ),
        ("addresses = [1]", "addresses = 1 is not an IP address; write one alone, as \"192.0.2.1\""),
        ("mac = 3", "mac = 3 is not text; put it in quotes"),
        ("cpus: 3", "this line is not valid TOML (key with no value, expected `=`); correct it"),
    ];

    /// Values of `work`, and the sentence for each.
    const OF_WORK: &[(&str, &str)] = &[
        ("3", "work = 3 is not a work; write work = \"echo\", or a table, as work = { source = { rate = 1000 } }"),
        (
            "\"Sink\"",
            "work = \"Sink\" is not known; there are `echo`, `sink`, `answer`, `tap`, `queue`, `memif`, `vm`, `interface`, `uplink`, `source`, `program`",
        ),
        ("\"tap\"", "work = \"tap\" needs settings; write for example work = { tap = { name = \"nic0\" } }"),
        ("{ echo = 1 }", "echo has no settings; write work = \"echo\""),
        ("{ source = 3 }", "source = 3 is not a table; write for example source = { rate = 1000 }"),
        (
            "{ program = \"/a\" }",
            "program = \"/a\" is not a table; write for example program = { path = \"/opt/mine\" }",
        ),
        ("{ source = { size = 70000 } }", "size = 70000 is not in the range 60 to 1514; write a number in it"),
        ("{ source = { rate = -1 } }", "rate = -1 is less than 0; write a whole number from 0"),
        (
            "{ tap = { name = \"t\", mtu = \"9000\" } }",
            "mtu = \"9000\" is not a valid number; write a whole one from 68 to 65521, without quotes",
        ),
        ("{ tap = { name = \"t\", queues = -1 } }", "queues = -1 is not in the range 1 to 8; write a number in it"),
        ("{ source = { speed = 1 } }", "the key `speed` means nothing here; there are `rate`, `size`, `to`"),
        ("{ answer = { } }", "the key `address` is missing; add address = …"),
        (
            "{ tap = { name = \"t\", shortcut = \"yes\" } }",
            "shortcut = \"yes\" is neither true nor false; write one of these, without quotes",
        ),
        (
            "{ tap = { name = \"t\" }, echo = {} }",
            "a node does one thing with frames, and this names several or none; write one",
        ),
        ("{ memif = { socket = 3 } }", "socket = 3 is not a path; write one from /, in quotes"),
    ];

    /// Whole files, and the sentence for each, with the line.
    const OF_ALL: &[(&str, &str)] = &[
        ("node = 3", "1: node = 3 is not a list; write one in brackets"),
        ("[node]\nname = \"red\"\nwork = \"sink\"", "1: [node] can be there more than once; write [[node]]"),
        ("\n[[daemon]]", "2: [[daemon]] is there only once; write [daemon]"),
        ("[daemon]\nhang_after_ms = -1", "2: hang_after_ms = -1 is less than 1; write a whole number from 1"),
        ("[[nic]]\nname = \"e\"\nmtu = 1.5", "3: mtu = 1.5 is not a valid number; write a whole one from 68 to 9000"),
        ("[daemon]\n\n[daemon]", "3: `daemon` is there twice; leave one out"),
        ("[daemon]\nconfine = false", "2: confine = false is not known; there are `strict`, `best-effort`, `off`"),
        ("[daemon]\nrestart = \"often\"", "2: restart = \"often\" is not known; there is `careful` or `always`"),
        ("[[node]", "1: this line is not valid TOML (unclosed array table, expected `]`); correct it"),
        ("work = \"sink\"", "1: the key `work` means nothing here; there are `daemon`, `api`, `node`, `nic`"),
        ("[[nic]]\nname = \"e\"\nnode = \"red\"", "1: the key `device` is missing; add device = …"),
        (
            "[[nic]]\nname = \"e\"\nnode = \"red\"\ndevice = \"eth0\"",
            "4: \"eth0\" names no card; write sim, vfio-user:PATH or vfio:0000:03:00.0 (a PCI address)",
        ),
    ];

    #[test]
    fn a_mistake_is_said_with_what_stands_there_and_what_to_write() {
        let of_a_node = OF_A_NODE
            .iter()
            .map(|(line, said)| (format!("[[node]]\nname = \"red\"\nwork = \"sink\"\n{line}\n"), format!("4: {said}")));
        let of_work = OF_WORK
            .iter()
            .map(|(work, said)| (format!("[[node]]\nname = \"red\"\nwork = {work}\n"), format!("3: {said}")));
        let of_all = OF_ALL.iter().map(|(text, said)| (format!("{text}\n"), (*said).to_owned()));
        for (text, said) in of_a_node.chain(of_work).chain(of_all) {
            let error = Config::parse(Path::new("t.toml"), &text).expect_err(&text);
            assert_eq!(error.to_string(), format!("t.toml:{said}"), "{text}");
        }
    }

    #[test]
    fn a_secret_is_in_no_sentence() {
        let works = [
            "{ memif = { socket = \"/a\", secret = \"hush } }",
            "{ memif = { socket = \"/a\", secret = \"hush\"\" } }",
            "{ memif = { socket = \"/a\", secret = hush } }",
            "{ memif = { socket = \"/a\", secret: \"hush\" } }",
            "{ memif = { socket = \"/a\" secret = \"hush\" } }",
            "{ memif = { socket = \"/a\", secrt = \"hush }",
            "{ memif = { socket = \"/a\", secret = \"\"\"\nhush\\q\"\"\" } }",
            "{ memif = { socket = \"/a\", 'secret' = 1972 } }",
            "{ memif = { socket = \"/a\", secret = [\"hush\"] } }",
            "{ memif = { socket = \"/a\", secret = { is = \"hush\" } } }",
            "{ memif = [{ socket = \"/a\", secret = \"hush\" }] }",
            "{ memif = { socket = { secret = \"hush\" } } }",
            "[\"memif\", { secret = \"hush\" }]",
            "\"echo\"\nmemif.secret = \"hush",
            "\"echo\"\nsecret = \"hush",
            "\"echo\"\nsecret = \"hush\"",
            "{ memif = { socket = \"/a\", secret = \"hush\", secret = \"hush\" } }",
            "{ memif = { socket = \"/a\", secret = \"hush\", id = -1 } }",
            "{ memif = { socket = \"/a\", secret = \"hush hush hush hush hush\" } }",
        ];
        for work in works {
            let text = format!("[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = {work}\n");
            let said = Config::parse(Path::new("t.toml"), &text).expect_err(&text).to_string();
            assert!(!said.contains("hush") && !said.contains("1972"), "{text}: {said}");
        }
    }
}
