//! What a runtime asks of the plugin: its environment, and the network configuration on standard input (§2, §3).

use std::ffi::OsString;
use std::io::Read;

use serde_json::{Map, Value};

use super::attachment::{Attachment, Front, is_identifier};
use super::{Failure, code};

/// Versions of the specification that the plugin speaks, oldest first.
pub const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// Bytes of a network configuration, at most, with the result of an earlier call.
const INPUT_MAX: u64 = 1 << 20;

/// An operation (§2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Add,
    Delete,
    Check,
    Collect,
    Status,
    Version,
}

/// The operations: their names, the version that brought each, and the variables that each needs.
const COMMANDS: [(&str, Command, &str, &[&str]); 6] = [
    ("ADD", Command::Add, "0.3.1", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
    ("DEL", Command::Delete, "0.3.1", &["CNI_CONTAINERID", "CNI_IFNAME"]),
    ("CHECK", Command::Check, "0.4.0", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
    ("GC", Command::Collect, "1.1.0", &[]),
    ("STATUS", Command::Status, "1.1.0", &[]),
    ("VERSION", Command::Version, "0.3.1", &[]),
];

/// A call, checked as far as the daemon is not needed for that.
#[derive(Debug)]
pub struct Call {
    pub command: Command,
    /// The version of the specification that the network configuration is of.
    pub version: &'static str,
    /// The container's interface; parts that the operation does not have are empty, but for the network.
    pub its: Attachment,
    /// Extra arguments, by name.
    pub arguments: Vec<(String, String)>,
    /// Folders with plugins.
    pub path: Option<OsString>,
    /// The network configuration, as it came and as it was read.
    pub text: Vec<u8>,
    pub input: Map<String, Value>,
}

/// Splits CNI_ARGS.
fn arguments(text: &str) -> Result<Vec<(String, String)>, Failure> {
    let pairs = text.split(';').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').ok_or_else(|| {
            let sentence = format!("CNI_ARGS: {pair:?} is no pair; write NAME=VALUE, and semicolons between");
            Failure::new(code::ENVIRONMENT, sentence)
        })?;
        Ok((name.to_owned(), value.to_owned()))
    });
    pairs.collect()
}

/// Reads a network configuration: its text, and its keys.
pub fn read_input(input: impl Read) -> Result<(Vec<u8>, Map<String, Value>), Failure> {
    let mut text = Vec::new();
    input.take(INPUT_MAX + 1).read_to_end(&mut text).map_err(|error| {
        Failure::new(code::INPUT, format!("the network configuration cannot be read from standard input: {error}"))
    })?;
    if text.len() as u64 > INPUT_MAX {
        let sentence = format!("the network configuration has more than {INPUT_MAX} bytes; shorten it");
        return Err(Failure::new(code::NO_JSON, sentence));
    }
    let input = serde_json::from_slice(&text).map_err(|error| {
        let sentence =
            format!("the network configuration is no JSON object ({error}); a runtime writes one to standard input");
        Failure::new(code::NO_JSON, sentence)
    })?;
    Ok((text, input))
}

impl Call {
    /// Reads a call from its environment, which `variable` returns by name, and its standard input.
    pub fn read(variable: impl Fn(&str) -> Option<OsString>, input: impl Read) -> Result<Self, Failure> {
        let wrong = |sentence: String| Failure::new(code::ENVIRONMENT, sentence);
        let of = |name: &str| match variable(name).unwrap_or_default().into_string() {
            Ok(text) => Ok(text),
            Err(_) => Err(wrong(format!("{name} is not text; write UTF-8"))),
        };
        let command = of("CNI_COMMAND")?;
        let known = COMMANDS.iter().find(|(name, ..)| *name == command);
        let (_, command, since, needs) = known.ok_or_else(|| match command.is_empty() {
            true => wrong(
                "CNI_COMMAND is not set: a container's runtime starts this program; docs/users/containers.md says how"
                    .to_owned(),
            ),
            false => wrong(format!("CNI_COMMAND is {command:?}; ADD, DEL, CHECK, GC, STATUS and VERSION are known")),
        })?;
        if *command == Command::Version {
            // Its answer does not depend on what the input says, so it may say anything.
            return Ok(Call::of_version(read_input(input).unwrap_or_default().1));
        }
        let missing: Vec<&str> =
            needs.iter().copied().filter(|name| of(name).is_ok_and(|its| its.is_empty())).collect();
        if !missing.is_empty() {
            return Err(wrong(format!("{}: not set; the runtime has to set each", missing.join(", "))));
        }
        let [id, netns, ifname] = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"].map(of);
        let (id, netns, ifname) = (id?, netns?, ifname?);
        if needs.contains(&"CNI_CONTAINERID") && !is_identifier(&id) {
            return Err(wrong(format!(
                "CNI_CONTAINERID is {id:?}; an ID begins with a letter or digit, and goes on with these, dots, - and _"
            )));
        }
        if needs.contains(&"CNI_IFNAME") && !tasuki_tap::is_name(&ifname) {
            return Err(wrong(format!("CNI_IFNAME: {}", tasuki_tap::TapError::Name(ifname))));
        }
        if ifname == "lo" {
            return Err(wrong(
                "CNI_IFNAME: each network namespace has an interface lo already; name another".to_owned(),
            ));
        }
        if needs.contains(&"CNI_NETNS") && !netns.starts_with('/') {
            return Err(wrong(format!("CNI_NETNS is {netns:?}; name a network namespace by its path from /")));
        }
        let arguments = arguments(&of("CNI_ARGS")?)?;
        let (text, input) = read_input(input)?;
        let version = version(&input)?;
        let name = input.get("name").unwrap_or(&Value::Null);
        let Some(name) = name.as_str().filter(|name| is_identifier(name)).map(str::to_owned) else {
            let found = if name.is_null() {
                "the network has no name".to_owned()
            } else {
                format!("the network's name is {name}")
            };
            let sentence =
                format!("{found}; a name begins with a letter or digit, and goes on with these, dots, - and _");
            return Err(Failure::new(code::CONFIGURATION, sentence));
        };
        let path = variable("CNI_PATH");
        let its = Attachment { front: Front::Cni, network: name, id, netns, ifname };
        let call = Call { command: *command, version, its, arguments, path, text, input };
        if !call.is_at_least(since) {
            let sentence = format!(
                "network {} is of version {version}, which has no such operation; write cniVersion {since} or later",
                call.its.network
            );
            return Err(Failure::new(code::VERSION, sentence));
        }
        Ok(call)
    }

    fn of_version(input: Map<String, Value>) -> Self {
        let version = version(&input).unwrap_or(VERSIONS[VERSIONS.len() - 1]);
        let (its, text, arguments) = (Attachment::default(), Vec::new(), Vec::new());
        Call { command: Command::Version, version, its, arguments, path: None, text, input }
    }

    /// Returns whether the network configuration is of this version of the specification, or of a later one.
    pub fn is_at_least(&self, version: &str) -> bool {
        let at = |version: &str| VERSIONS.iter().position(|known| *known == version);
        at(self.version) >= at(version)
    }

    /// Returns the last argument of this name.
    pub fn argument(&self, name: &str) -> Option<&str> {
        self.arguments.iter().rev().find(|(its, _)| its == name).map(|(_, value)| &value[..])
    }
}

/// Returns the version of the specification that a network configuration names.
fn version(input: &Map<String, Value>) -> Result<&'static str, Failure> {
    let named = input.get("cniVersion").unwrap_or(&Value::Null);
    VERSIONS.into_iter().find(|version| *version == named).ok_or_else(|| {
        let found = match named {
            // Before 0.2.0 there was no such key.
            Value::Null => "the network configuration has no cniVersion".to_owned(),
            named => format!("cniVersion = {named} is not spoken here"),
        };
        let all = VERSIONS.map(|version| format!("{version:?}")).join(", ");
        Failure::new(code::VERSION, format!("{found}; write one of {all}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: [(&str, &str); 5] = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "4f3c"),
        ("CNI_NETNS", "/run/netns/a"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_ARGS", "IgnoreUnknown=1;MAC=02:00:00:00:00:01"),
    ];
    const NETWORK: &str = r#"{ "cniVersion": "1.1.0", "name": "lan", "type": "tasuki-cni" }"#;

    fn read(change: (&str, &str), input: &str) -> Result<Call, Failure> {
        let value = |name: &str| match name == change.0 {
            true => Some(change.1),
            false => WHOLE.iter().find(|(its, _)| *its == name).map(|(_, value)| *value),
        };
        Call::read(|name| value(name).map(OsString::from), input.as_bytes())
    }

    #[test]
    fn a_whole_call_is_read() {
        let call = read(("", ""), NETWORK).expect("a call");
        assert_eq!((call.command, &call.its.key()[..]), (Command::Add, "lan/4f3c/eth0"));
        assert_eq!((call.argument("MAC"), call.argument("IP")), (Some("02:00:00:00:00:01"), None));
        assert!(call.is_at_least("0.4.0") && call.is_at_least("1.1.0"));
        let old = read(("", ""), &NETWORK.replace("1.1.0", "0.4.0")).expect("a call");
        assert!(old.is_at_least("0.3.1") && !old.is_at_least("1.0.0"));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_the_code_for_it() {
        let cases: &[((&str, &str), &str, u32, &str)] = &[
            (("CNI_COMMAND", ""), NETWORK, 4, "CNI_COMMAND"),
            (("CNI_COMMAND", "add"), NETWORK, 4, "CNI_COMMAND"),
            (("CNI_CONTAINERID", ""), NETWORK, 4, "CNI_CONTAINERID"),
            (("CNI_CONTAINERID", "../x"), NETWORK, 4, "CNI_CONTAINERID"),
            (("CNI_CONTAINERID", "a/b"), NETWORK, 4, "CNI_CONTAINERID"),
            (("CNI_IFNAME", "sixteen-bytes-xx"), NETWORK, 4, "CNI_IFNAME"),
            (("CNI_IFNAME", "a/b"), NETWORK, 4, "CNI_IFNAME"),
            (("CNI_NETNS", ""), NETWORK, 4, "CNI_NETNS"),
            (("CNI_NETNS", "run/netns/a"), NETWORK, 4, "CNI_NETNS"),
            (("CNI_ARGS", "MAC"), NETWORK, 4, "CNI_ARGS"),
            (("", ""), "", 6, "JSON"),
            (("", ""), "[]", 6, "JSON"),
            (("", ""), r#"{ "cniVersion": "1.1.0", "name": "../x" }"#, 7, "name"),
            (("", ""), r#"{ "cniVersion": "1.1.0" }"#, 7, "name"),
            (("", ""), r#"{ "cniVersion": "1.1.0", "name": 5 }"#, 7, "name is 5;"),
            (("", ""), r#"{ "name": "lan" }"#, 1, "has no cniVersion; write one of \"0.3.1\""),
            (("", ""), r#"{ "cniVersion": 1, "name": "lan" }"#, 1, "cniVersion = 1 is not spoken here"),
            (("", ""), r#"{ "cniVersion": "2.0.0", "name": "lan" }"#, 1, "2.0.0"),
            (("CNI_COMMAND", "CHECK"), r#"{ "cniVersion": "0.3.1", "name": "lan" }"#, 1, "0.4.0"),
            (("CNI_COMMAND", "GC"), r#"{ "cniVersion": "1.0.0", "name": "lan" }"#, 1, "1.1.0"),
        ];
        for (change, input, code, part) in cases {
            let failure = read(*change, input).expect_err(input);
            let said = format!("{}; {}", failure.msg, failure.details);
            assert!(failure.code == *code && said.contains(part), "{change:?} {input}: {failure:?}");
        }
        let long = format!(r#"{{ "cniVersion": "1.1.0", "name": "lan", "x": "{}" }}"#, "x".repeat(1 << 20));
        assert_eq!(read(("", ""), &long).expect_err("too long").code, 6);
    }

    #[test]
    fn versions_are_told_whatever_the_input_says() {
        for (input, version) in [("", "1.1.0"), (r#"{ "cniVersion": "0.4.0" }"#, "0.4.0"), ("nonsense", "1.1.0")] {
            let call = read(("CNI_COMMAND", "VERSION"), input).expect("an answer");
            assert_eq!((call.command, call.version), (Command::Version, version));
        }
    }
}
