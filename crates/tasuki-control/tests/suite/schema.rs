//! The JSON Schema of the configuration: it takes what tasukid takes, and refuses what a schema can know to be wrong.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tasuki_control::config::Config;

/// Reads a schema and instances, and prints whether each is valid.
const VALIDATOR: &str = "import json, sys, jsonschema
schema, instances = json.load(sys.stdin)
jsonschema.Draft7Validator.check_schema(schema)
print(json.dumps([jsonschema.Draft7Validator(schema).is_valid(it) for it in instances]))";

/// A configuration with every key there is.
const EVERY_KEY: &str = include_str!("../every-key.toml");

/// Lines after a node's name and work: keys that there are not, and values of other types, units and ranges.
const OF_A_NODE: &[&str] = &[
    "colour = 3",
    "cpu = \"3\"",
    "cpu = -1",
    "cpu = 1.5",
    "poll = \"no\"",
    "standby = 0",
    "nice = 1",
    "nice = -21",
    "trusts = \"blue\"",
    "trusts = [1]",
    "vni = \"a b\"",
    "container = \"a b\"",
    "vni = \"lan\"\nmac = 3",
    "vni = \"lan\"\nmac = \"01:00:00:00:00:01\"",
    "vni = \"lan\"\nspoof = \"no\"",
    "vni = \"lan\"\npool_kib = 4",
    "vni = \"lan\"\npool_kib = \"2 MiB\"",
    "vni = \"lan\"\naddresses = \"192.0.2.1\"",
    "bounds = { memory = \"1G\" }",
    "bounds = { memory_mib = \"1G\" }",
];

/// Values of `work`.
const OF_WORK: &[&str] = &[
    "3",
    "\"Sink\"",
    "\"tap\"",
    "{ }",
    "{ echo = 1 }",
    "{ sink = { }, source = { } }",
    "{ source = 3 }",
    "{ source = { size = 9000 } }",
    "{ source = { rate = -1 } }",
    "{ source = { speed = 1 } }",
    "{ answer = { } }",
    "{ answer = { address = 4 } }",
    "{ program = \"/a\" }",
    "{ program = { path = \"mine\" } }",
    "{ tap = { name = \"a-name-that-is-too-long\" } }",
    "{ tap = { name = \"t\", shortcut = \"yes\" } }",
    "{ tap = { name = \"t\" }, echo = {} }",
    "{ tap = { name = \"t\", address = 3 } }",
    "{ tap = { name = \"t\", address = [3] } }",
    "{ tap = { name = \"t\", mtu = 67 } }",
    "{ tap = { name = \"t\", mtu = 65522 } }",
    "{ tap = { name = \"t\", routes = [\"0.0.0.0/0\"] } }",
    "{ tap = { name = \"t\", routes = [{ to = \"0.0.0.0/0\", by = \"192.0.2.1\" }] } }",
];

/// Values of `work` of a node on a VNI.
const OF_WORK_ON_A_VNI: &[&str] = &[
    "{ memif = { socket = \"a\" } }",
    "{ tap = { name = \"t\" } }\ncpus = []",
    "{ memif = { socket = \"/a\", secret = \"123456789012345678901234\" } }",
    "{ memif = { socket = \"/a\", secret = \"\" } }",
    "{ vm = { socket = \"/a\" } }\nlatency_us = 10001",
    "{ vm = { socket = \"/a\", latency_us = 1 } }",
    "{ vm = { socket = \"/a\", mtu = 67 } }",
    "{ interface = { name = \"\" } }",
    "{ tap = { name = \"t\" } }\nlimits = { send = { mbit = 0 } }",
    "{ tap = { name = \"t\" } }\nlimits = { send = { gbit = 1 } }",
    "{ tap = { name = \"t\" } }\nlimits = { send = { mbit = 1, burst_ms = 1001 } }",
];

/// Whole files.
const OF_ALL: &[&str] = &[
    "node = 3",
    "work = \"sink\"",
    "[deamon]",
    "[[daemon]]",
    "[node]\nname = \"red\"\nwork = \"sink\"",
    "[[node]]\nname = \"red\"",
    "[[node]]\nwork = \"sink\"",
    "[[node]]\nname = \"Red\"\nwork = \"sink\"",
    "[daemon]\ndeadline_ms = 0",
    "[daemon]\ndeadline = \"1s\"",
    "[daemon]\ndeadline_ms = \"1s\"",
    "[daemon]\nrestart = \"often\"",
    "[daemon]\nconfine = true",
    "[daemon]\nuids = 65536",
    "[daemon]\nuids = \"root\"",
    "[daemon]\nworker = \"worker\"",
    "[daemon]\nmetrics = 9469",
    "[api]\nread = \"user:0\"",
    "[api]\nread = [\"root\"]",
    "[api]\nwrite = [\"user:0\"]",
];

/// As in [`OF_ALL`], after a node `red`.
const OF_A_NIC: &[&str] = &[
    "name = \"e\"\nnode = \"red\"",
    "name = \"e\"\nnode = \"red\"\ndevice = \"eth0\"",
    "name = \"e\"\nnode = \"red\"\ndevice = \"vfio-user:a\"",
    "name = \"e\"\nnode = \"red\"\ndevice = \"sim\"\nwire = \"--echo\"",
    "name = \"e\"\nnode = \"red\"\ndevice = \"sim\"\nring = -1",
    "name = \"e\"\nnode = \"red\"\ndevice = \"vfio:0000:03:00.0\"\nring = 1",
    "name = \"e\"\nnode = \"red\"\ndevice = \"sim\"\nring = 2048",
    "name = \"a/b\"\nnode = \"red\"\ndevice = \"sim\"",
    "name = \"e\"\nnode = [\"red\"]\ndevice = \"sim\"",
];

fn from_root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn schema() -> String {
    let said = Command::new(env!("CARGO_BIN_EXE_tasuki")).args(["config", "schema"]).output().expect("a program");
    String::from_utf8(said.stdout).expect("text")
}

/// Returns which of these files a validator takes that is none of ours, or why there is none.
fn valid(schema: &str, files: &[String]) -> Result<Vec<bool>, &'static str> {
    let instances: Vec<Value> = files.iter().map(|text| toml::from_str(text).expect(text)).collect();
    let schema: Value = serde_json::from_str(schema).expect("JSON");
    let mut python = Command::new("python3");
    python.args(["-c", VALIDATOR]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut python = python.spawn().map_err(|_| "needs python3: apt-get install python3-jsonschema")?;
    let stdin = python.stdin.take().expect("a pipe");
    let sent = serde_json::to_writer(stdin, &json!([schema, instances]));
    let said = python.wait_with_output().expect("a process");
    let why = String::from_utf8_lossy(&said.stderr);
    if why.contains("No module named 'jsonschema'") {
        return Err("needs jsonschema: apt-get install python3-jsonschema");
    }
    assert!(sent.is_ok() && said.status.success(), "{why}");
    Ok(serde_json::from_slice(&said.stdout).expect("JSON"))
}

#[test]
fn the_copy_in_the_repository_is_the_one_that_is_printed() {
    let copy = fs::read_to_string(from_root("docs/tasuki.schema.json")).expect("a file");
    assert!(
        copy == schema(),
        "write it anew: cargo run -p tasuki-control --bin tasuki -- config schema >docs/tasuki.schema.json"
    );
}

#[test]
fn it_takes_every_file_that_ships_and_every_key() {
    let examples = fs::read_dir(from_root("examples")).expect("a folder").flatten().map(|entry| entry.path());
    let examples = examples.filter(|path| path.extension().is_some_and(|it| it == "toml"));
    let others = ["docs/users/example.toml", "contrib/debian/tasuki.toml"].map(from_root);
    let files: Vec<String> = examples
        .chain(others)
        .map(|path| fs::read_to_string(path).expect("a file"))
        .chain([EVERY_KEY.to_owned()])
        .collect();
    assert!(files.len() > 6, "there are examples");
    for text in &files {
        Config::parse(Path::new("t.toml"), text).expect("tasukid takes it");
    }
    let schema = schema();
    let keys: Value = serde_json::from_str(&schema).expect("JSON");
    let objects = keys["definitions"].as_object().expect("an object").values().chain([&keys]);
    for key in objects.filter_map(|it| it["properties"].as_object()).flat_map(|it| it.keys()) {
        assert!(EVERY_KEY.contains(key), "the test knows no {key}");
    }
    match valid(&schema, &files) {
        Ok(valid) => assert_eq!(valid, vec![true; files.len()]),
        Err(why) => println!("skipped: {why}"),
    }
}

#[test]
fn it_refuses_keys_types_units_and_ranges_that_tasukid_refuses() {
    let node = "[[node]]\nname = \"red\"\n";
    let of_a_node = OF_A_NODE.iter().map(|lines| format!("{node}work = {{ tap = {{ name = \"t\" }} }}\n{lines}\n"));
    let of_work = OF_WORK.iter().map(|work| format!("{node}work = {work}\n"));
    let on_a_vni = OF_WORK_ON_A_VNI.iter().map(|work| format!("{node}vni = \"lan\"\nwork = {work}\n"));
    let of_a_nic = OF_A_NIC.iter().map(|lines| format!("{node}work = \"sink\"\n[[nic]]\n{lines}\n"));
    let of_all = OF_ALL.iter().map(|text| format!("{text}\n"));
    let files: Vec<String> = of_a_node.chain(of_work).chain(on_a_vni).chain(of_a_nic).chain(of_all).collect();
    for text in &files {
        Config::parse(Path::new("t.toml"), text).expect_err(text);
    }
    match valid(&schema(), &files) {
        Ok(valid) => {
            let taken: Vec<_> =
                files.iter().zip(valid).filter(|(_, is_valid)| *is_valid).map(|(text, _)| text).collect();
            assert!(taken.is_empty(), "it takes {taken:#?}");
        }
        Err(why) => println!("skipped: {why}"),
    }
}
