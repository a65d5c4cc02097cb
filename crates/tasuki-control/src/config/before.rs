//! Reads what another version of tasukid took and this one refuses. Nodes live by it, and must not end because of one key:
//! that key is left out, and the rest counts.

use serde_path_to_error::Segment;
use toml::Value;

use super::Config;

/// Reads a configuration, and leaves in `value` what counts of it. Returns the places that are left out, too, or `None` if a whole
/// node or NIC would be.
pub(super) fn read(value: &mut Value) -> Option<(Config, Vec<String>)> {
    let mut left_out = Vec::new();
    loop {
        match serde_path_to_error::deserialize(value.clone()) {
            Ok(config) => return Some((config, left_out)),
            // Its own words may quote a secret.
            Err(error) => left_out.push(take_out(value, error.path().iter())?),
        }
    }
}

/// Takes what is at the end of a path out, or the innermost thing around it that is there. Returns its name.
fn take_out<'a>(value: &mut Value, path: impl Iterator<Item = &'a Segment>) -> Option<String> {
    let mut path: Vec<String> = path
        .map_while(|segment| match segment {
            Segment::Seq { index } => Some(index.to_string()),
            Segment::Map { key } => Some(key.clone()),
            Segment::Enum { variant } => Some(variant.clone()),
            Segment::Unknown => None,
        })
        .collect();
    while let Some((last, before)) = path.split_last() {
        let is_whole = path.len() <= 2 && ["node", "nic"].contains(&&path[0][..]);
        if is_whole {
            return None;
        }
        let named = named(value, &path);
        let parent = before.iter().try_fold(&mut *value, |value, part| within(value, part));
        let is_taken = parent.is_some_and(|parent| match parent {
            Value::Table(table) => table.remove(last).is_some(),
            Value::Array(all) => {
                let at = last.parse().ok().filter(|at| *at < all.len());
                at.map(|at: usize| all.remove(at)).is_some()
            }
            _ => false,
        });
        if is_taken {
            return Some(named);
        }
        path.pop();
    }
    None
}

fn within<'v>(value: &'v mut Value, part: &str) -> Option<&'v mut Value> {
    match value {
        Value::Table(table) => table.get_mut(part),
        Value::Array(all) => all.get_mut(part.parse::<usize>().ok()?),
        _ => None,
    }
}

/// Returns a place as a user knows it: `limits.send of node "web"`.
fn named(value: &Value, path: &[String]) -> String {
    match path {
        [kind, at, rest @ ..] if kind == "node" || kind == "nic" => {
            let it = value.get(kind).and_then(|all| all.get(at.parse::<usize>().ok()?)?.get("name"));
            let name = it.and_then(Value::as_str).unwrap_or(at);
            format!("{} of {kind} {name:?}", rest.join("."))
        }
        _ => path.join("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_is_left_out_and_no_node() {
        let of = |text: &str| read(&mut toml::from_str(text).expect("TOML"));
        let (config, left_out) = of("[api]\nread = [\"user:nobody of this name\", \"user:7\"]\n[later]\nx = 1\n\
            [[node]]\nname = \"a\"\nwork = { memif = { socket = \"/s\", secret = \"\", later = 1 } }\nvni = \"lan\"\nnice = true\ncpus = []\n\
            [[node]]\nname = \"b\"\nwork = \"sink\"\n[[nic]]\nname = \"n\"\nnode = \"b\"\ndevice = \"sim\"\nring = 70000\n")
        .expect("it is read");
        let mut left_out: Vec<_> = left_out.iter().map(|it| &it[..]).collect();
        left_out.sort_unstable();
        let expected = [
            "api.read.0",
            "cpus of node \"a\"",
            "later",
            "nice of node \"a\"",
            "ring of nic \"n\"",
            "work.memif.later of node \"a\"",
            "work.memif.secret of node \"a\"",
        ];
        assert_eq!(left_out, expected);
        assert_eq!((config.node.len(), config.nic.len(), config.api.read.len()), (2, 1, 1));
        for whole in [
            "[[node]]\nname = \"a\"\nwork = \"later\"\n",
            "[[node]]\nname = \"a\"\nwork = { later = {} }\n",
            "node = 7\n",
        ] {
            assert!(of(whole).is_none(), "{whole}");
        }
    }
}
