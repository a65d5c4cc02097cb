//! Reads what another version of tasukid took and this one refuses. Nodes live by it, and must not end because of one key:
//! that key is left out, and the rest counts.

use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;
use toml::{Table, Value};

use super::{Config, Node};

/// Without these, a node could do more than it was allowed, would be at another place, would lose queues, or would not be as its
/// workers were made.
const NEEDED: [&str; 13] = [
    "vni",
    "mac",
    "netns",
    "spoof",
    "addresses",
    "secret",
    "shortcut",
    "limits",
    "bounds",
    "cpus",
    "queues",
    "pool_kib",
    "container",
];

/// Reads a configuration, and leaves in `table` what counts of it beside nodes and NICs. Returns the places that are left
/// out, too.
///
/// # Errors
/// The place that is refused, and must not be left out.
pub(super) fn read(table: &mut Table) -> Result<(Config, Vec<String>), String> {
    let mut left_out = Vec::new();
    let node: Vec<Node> = list(table, "node", &mut left_out)?;
    let nic = list(table, "nic", &mut left_out)?;
    // It would be one node, and not several.
    if let Some(node) = node.iter().find(|node| !node.cpus.is_empty() && node.odd_cpus().is_some()) {
        return Err(format!("cpus of node {:?}", node.name));
    }
    let node = node.into_iter().flat_map(Node::for_each_cpu).collect();
    let mut rest = Value::Table(std::mem::take(table));
    let (config, places) = one::<Config>(&mut rest)?;
    left_out.extend(places);
    *table = rest.as_table().cloned().unwrap_or_default();
    Ok((Config { node, nic, ..config }, left_out))
}

/// Takes the nodes or NICs out of `table`, and reads each for itself: there may be thousands of them, and a key that is left
/// out costs another reading.
fn list<T: DeserializeOwned>(table: &mut Table, kind: &str, left_out: &mut Vec<String>) -> Result<Vec<T>, String> {
    let all = match table.remove(kind) {
        None => Vec::new(),
        Some(Value::Array(all)) => all,
        Some(_) => return Err(kind.to_owned()),
    };
    let each = |value: Value| {
        let whole = named(kind, &value);
        let (it, places) = whole_one(kind, value)?;
        left_out.extend(places.into_iter().map(|place| format!("{place} of {whole}")));
        Ok(it)
    };
    all.into_iter().map(each).collect()
}

/// Reads a node or NIC. Returns the places in it that are left out, too.
///
/// # Errors
/// As for [`read`].
pub(super) fn whole_one<T: DeserializeOwned>(kind: &str, mut value: Value) -> Result<(T, Vec<String>), String> {
    let whole = named(kind, &value);
    one(&mut value).map_err(|place| if place.is_empty() { whole } else { format!("{place} of {whole}") })
}

fn named(kind: &str, value: &Value) -> String {
    format!("{kind} {:?}", value.get("name").and_then(Value::as_str).unwrap_or_default())
}

fn one<T: DeserializeOwned>(value: &mut Value) -> Result<(T, Vec<String>), String> {
    let mut left_out = Vec::new();
    loop {
        match serde_path_to_error::deserialize(value.clone()) {
            Ok(it) => return Ok((it, left_out)),
            // Its own words may quote a secret.
            Err(error) => left_out.push(take_out(value, error.path().iter())?),
        }
    }
}

/// Takes what is at the end of a path out, or the innermost thing around it that is there. Returns its place.
///
/// # Errors
/// The place of what must stay; none, if that is the whole.
fn take_out<'a>(value: &mut Value, path: impl Iterator<Item = &'a Segment>) -> Result<String, String> {
    let mut path: Vec<String> = path
        .map_while(|segment| match segment {
            Segment::Seq { index } => Some(index.to_string()),
            Segment::Map { key } => Some(key.clone()),
            Segment::Enum { variant } => Some(variant.clone()),
            Segment::Unknown => None,
        })
        .collect();
    while let Some((last, before)) = path.split_last() {
        let list = before.join(".");
        let taken = match before.iter().try_fold(&mut *value, |value, part| within(value, part)) {
            Some(Value::Table(table)) => table.remove(last).map(|_| path.join(".")),
            Some(Value::Array(all)) => {
                let at = last.parse().ok().filter(|at| *at < all.len());
                at.map(|at: usize| match all.remove(at) {
                    // It is no secret, and its number would be another one's in the file.
                    Value::String(text) if list.starts_with("api.") => format!("{text:?} of {list}"),
                    _ => format!("{list} (one of them)"),
                })
            }
            _ => None,
        };
        match taken {
            Some(place) if path.iter().any(|key| NEEDED.contains(&&key[..])) => return Err(place),
            Some(place) => return Ok(place),
            None => path.pop(),
        };
    }
    Err(String::new())
}

fn within<'v>(value: &'v mut Value, part: &str) -> Option<&'v mut Value> {
    match value {
        Value::Table(table) => table.get_mut(part),
        Value::Array(all) => all.get_mut(part.parse::<usize>().ok()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<(Config, Vec<String>), String> {
        read(&mut text.parse().expect("TOML"))
    }

    #[test]
    fn what_is_refused_is_left_out_and_no_node() {
        let (config, mut left_out) = of("[api]\nread = [\"user:nobody of this name\", \"user:7\", \"user:nor this\"]\n[later]\nx = 1\n\
            [[node]]\nname = \"a\"\nwork = { memif = { socket = \"/s\", secret = \"x\", later = 1 } }\nvni = \"lan\"\nnice = true\n\
            [[node]]\nname = \"b\"\nwork = \"sink\"\ntrusts = [\"a\", 7]\n\
            [[nic]]\nname = \"n\"\nnode = \"b\"\ndevice = \"sim\"\nring = 70000\n")
        .expect("it is read");
        left_out.sort_unstable();
        let expected = [
            "\"user:nobody of this name\" of api.read",
            "\"user:nor this\" of api.read",
            "later",
            "nice of node \"a\"",
            "ring of nic \"n\"",
            "trusts (one of them) of node \"b\"",
            "work.memif.later of node \"a\"",
        ];
        assert_eq!(left_out, expected);
        assert_eq!((config.node.len(), config.nic.len(), config.api.read.len()), (2, 1, 1));
        for whole in ["work = \"later\"\n", "work = { later = {} }\n", ""] {
            assert_eq!(of(&format!("[[node]]\nname = \"a\"\n{whole}")).unwrap_err(), "node \"a\"", "{whole}");
        }
        assert_eq!(of("node = 7\n").unwrap_err(), "node");
    }

    #[test]
    fn no_key_is_left_out_that_restricts_a_node_or_says_where_it_is() {
        for (keys, tap, place) in [
            ("vni = 7", "", "vni"),
            ("spoof = \"later\"", "", "spoof"),
            ("addresses = [\"192.0.2.1\", \"later\"]", "", "addresses (one of them)"),
            ("limits = { send = { later = 1 } }", "", "limits.send.later"),
            ("bounds = { later = 1 }", "", "bounds.later"),
            ("cpus = []", "", "cpus"),
            ("cpus = [0, -1]", "", "cpus (one of them)"),
            // All of it is read, and it would be one node without its queues.
            ("vni = \"lan\"\ncpus = [0, 0]", "", "cpus"),
            ("", ", netns = 7", "work.tap.netns"),
            ("", ", shortcut = \"no\"", "work.tap.shortcut"),
        ] {
            let text =
                format!("[[node]]\nname = \"a\"\nwork = {{ tap = {{ name = \"t\"{tap} }} }}\nnice = true\n{keys}\n");
            assert_eq!(of(&text).map(|it| it.1), Err(format!("{place} of node \"a\"")), "{text}");
        }
        let memif = "[[node]]\nname = \"a\"\nvni = \"lan\"\nwork = { memif = { socket = \"/s\", secret = \"\" } }\n";
        assert_eq!(of(memif).unwrap_err(), "work.memif.secret of node \"a\"");
    }
}
