//! Containers on a VNI: `tasuki-cni`, called as a container's runtime calls it. Needs root.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};
use tasuki_tap::interface::Interface;

use super::rig::{Rig, pid, signal, until};
use super::rooms::{Exchange, Room};
use super::vnis::{DESK, SHOP, World};

const PLUGIN: &str = env!("CARGO_BIN_EXE_tasuki-cni");

/// Folders in which Debian and runtimes have plugins.
const USUAL: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// A plugin that assigns addresses: it notes its calls, prints the result that it finds for the container, and fails if
/// it is to. What is behind its address is in tasuki-cni's hands alone, so the real one is not needed for this.
const IPAM: &str = r#"cat >/dev/null
cd "$(dirname "$0")"
echo "$CNI_COMMAND $CNI_CONTAINERID" >>calls
if [ -e "fails-$CNI_COMMAND" ]; then
    echo '{ "cniVersion": "1.1.0", "code": 11, "msg": "no address is free", "details": "free one" }'
    exit 1
fi
if [ "$CNI_COMMAND" = ADD ]; then cat "result-$CNI_CONTAINERID"; fi
"#;

/// Why a call failed, as the plugin prints it.
#[derive(Debug)]
struct Failed {
    code: u64,
    /// Its message and its details.
    said: String,
}

/// A world whose containers are its rooms, and a runtime.
struct Runtime {
    world: World,
}

impl Runtime {
    fn new() -> Option<Self> {
        let world = World::new()?;
        let runtime = Runtime { world };
        fs::create_dir(runtime.folder()).expect("a folder");
        tasuki_testing::script(&runtime.folder().join("assign"), IPAM);
        Some(runtime)
    }

    /// Returns the folder of plugins.
    fn folder(&self) -> PathBuf {
        self.world.rig.path("plugins")
    }

    /// Says what the plugin is to assign to a container.
    fn assigns(&self, id: &str, result: &Value) {
        fs::write(self.folder().join(format!("result-{id}")), result.to_string()).expect("a file");
    }

    /// Returns the calls of the plugin that assigns addresses since the last time.
    fn assigned(&self) -> String {
        let path = self.folder().join("calls");
        let calls = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        calls.lines().collect::<Vec<_>>().join(", ")
    }

    /// Returns a network configuration with these keys besides.
    fn network(&self, more: &Value) -> Value {
        let mut network = json!({
            "cniVersion": "1.1.0", "name": "pods", "type": "tasuki-cni", "vni": "lan", "dir": self.world.rig.dir(),
            "ipam": { "type": "assign" },
        });
        let more = more.as_object().expect("keys").clone();
        network.as_object_mut().expect("keys").extend(more);
        network
    }

    /// Calls the plugin with these variables besides its command.
    fn call(&self, command: &str, variables: &[(&str, &str)], input: &str) -> Result<Value, Failed> {
        let mut plugin = Command::new(PLUGIN);
        plugin.env_clear().env("CNI_COMMAND", command).env("CNI_PATH", self.folder()).env("PATH", "/usr/bin:/bin");
        plugin.envs(variables.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut plugin = plugin.spawn().expect("a program");
        // A plugin that refuses its environment reads nothing.
        let _ = plugin.stdin.take().expect("a pipe").write_all(input.as_bytes());
        let output = plugin.wait_with_output().expect("an end");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer: Value = match output.stdout.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&output.stdout).expect("JSON"),
        };
        if output.status.success() {
            return Ok(answer);
        }
        assert_eq!(answer["cniVersion"].as_str().map(|version| version.split('.').count()), Some(3), "{answer}");
        let word = |key: &str| answer[key].as_str().expect("a text").to_owned();
        Err(Failed {
            code: answer["code"].as_u64().expect("a code"),
            said: format!("{}; {}", word("msg"), word("details")),
        })
    }

    /// Calls the plugin for the interface eth0 of a container.
    fn ask(&self, command: &str, id: &str, room: Option<&Room>, network: &Value) -> Result<Value, Failed> {
        let path = room.map(Room::path).unwrap_or_default();
        let variables = [("CNI_CONTAINERID", id), ("CNI_IFNAME", "eth0"), ("CNI_NETNS", &path)];
        self.call(command, &variables, &network.to_string())
    }

    /// Calls the plugin for the interface eth0 of a container in the shop, and does not wait for its answer.
    fn call_beside(&self, command: &str, id: &str, network: &Value) -> Child {
        let mut plugin = Command::new(PLUGIN);
        plugin.env_clear().env("CNI_COMMAND", command).env("CNI_PATH", self.folder()).env("PATH", "/usr/bin:/bin");
        plugin.env("CNI_CONTAINERID", id).env("CNI_IFNAME", "eth0").env("CNI_NETNS", self.world.shop.path());
        let mut plugin = plugin.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a program");
        plugin.stdin.take().expect("a pipe").write_all(network.to_string().as_bytes()).expect("it reads");
        plugin
    }

    fn add(&self, id: &str, room: &Room, network: &Value) -> Value {
        self.ask("ADD", id, Some(room), network).unwrap_or_else(|no| panic!("{no:?}\n{}", self.world.rig.log()))
    }

    fn ends(&self, command: &str, id: &str, network: &Value) {
        self.ask(command, id, None, network).unwrap_or_else(|no| panic!("{no:?}\n{}", self.world.rig.log()));
    }

    /// Returns the name of a container's node.
    fn node(&self, id: &str) -> String {
        let container = format!("pods/{id}/eth0");
        nodes(&self.world.rig).into_iter().find(|(its, _)| *its == container).expect("a node").1
    }
}

/// Returns the container and the name of each node.
pub fn nodes(rig: &Rig) -> Vec<(String, String)> {
    let nodes = rig.json(&["node", "list"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    nodes.as_array().expect("a list").iter().map(|node| (text(&node["container"]), text(&node["name"]))).collect()
}

pub fn has_eth0(room: &Room) -> bool {
    room.within(|| Interface::find("eth0").is_ok())
}

/// Runs a program in a room; returns whether it succeeds, and its output.
pub fn runs(room: &Room, words: &[&str]) -> (bool, String) {
    let output = room.within(|| Command::new(words[0]).args(&words[1..]).output().expect("a program"));
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// Checks that long packets of IPv4, and IPv6, go from a container to the one at [`DESK`] and back.
pub fn reaches_desk(rig: &Rig, room: &Room) {
    for words in [&["-i", "0.01", "-M", "do", "-s", "8000", DESK][..], &["-6", "-i", "0.01", "fd00::2"]] {
        assert_eq!(room.ping(3, words), None, "{}", rig.log());
    }
}

/// IDs of two containers.
const ONE: &str = "4F3C0123456789abcdef";
const OTHER: &str = "beef";

/// Returns a runtime with two containers on its network, and the results: the second is of the oldest version.
fn with_two() -> Option<(Runtime, Value, [Value; 2])> {
    let runtime = Runtime::new()?;
    let network = runtime.network(&json!({ "mtu": 9000, "dns": { "nameservers": ["192.0.2.53"] } }));
    let old = runtime.network(&json!({ "cniVersion": "0.3.1", "mtu": 9000 }));
    for (id, v4, v6) in [(ONE, SHOP, "fd00::1/64"), (OTHER, DESK, "fd00::2/64")] {
        let result = json!({
            "ips": [{ "address": format!("{v4}/24"), "gateway": "192.0.2.254" }, { "address": v6 }],
            "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "198.51.100.0/24", "gw": "192.0.2.9" }],
            "dns": { "domain": "unused" },
        });
        runtime.assigns(id, &result);
    }
    runtime.call("STATUS", &[], &network.to_string()).expect("all is there");
    let results = [runtime.add(ONE, &runtime.world.shop, &network), runtime.add(OTHER, &runtime.world.desk, &old)];
    Some((runtime, network, results))
}

#[test]
fn a_container_has_its_interface_as_its_network_says() {
    let Some((runtime, network, [given, old])) = with_two() else { return };
    let (shop, rig) = (&runtime.world.shop, &runtime.world.rig);
    assert_eq!((&given["cniVersion"], &given["dns"]["nameservers"][0]), (&json!("1.1.0"), &json!("192.0.2.53")));
    let interface = &given["interfaces"][0];
    let words = [&interface["name"], &interface["sandbox"], &interface["mtu"]];
    assert_eq!(words, [&json!("eth0"), &json!(shop.path()), &json!(9000)]);
    let address = json!({ "address": format!("{SHOP}/24"), "gateway": "192.0.2.254", "interface": 0 });
    assert_eq!((&given["ips"][0], given["routes"].as_array().map(Vec::len)), (&address, Some(2)));
    let versions = old["ips"].as_array().expect("a list").iter().map(|ip| &ip["version"]).collect::<Vec<_>>();
    assert_eq!((versions, old["interfaces"][0].get("mtu")), (vec![&json!("4"), &json!("6")], None));
    assert_eq!(old["dns"]["domain"], "unused", "a network that says nothing has the plugin's word");
    // The kernel has it all.
    let found = shop.within(|| Interface::find("eth0").and_then(|its| its.read()).expect("its settings"));
    let mac = found.mac.expect("Ethernet").map(|byte| format!("{byte:02x}")).join(":");
    assert_eq!((interface["mac"].as_str(), found.mtu), (Some(&mac[..]), Some(9000)));
    for (to, via) in [("0.0.0.0/0", "192.0.2.254"), ("198.51.100.0/24", "192.0.2.9")] {
        let via = Some(via.parse().expect("an address"));
        assert!(found.routes.iter().any(|it| it.to.to_string() == to && it.via == via), "{to}: {found:?}");
    }
    reaches_desk(rig, shop);
    let twice = runtime.ask("ADD", ONE, Some(shop), &network).expect_err("it is there");
    assert!(
        twice.said.contains("is on the network already; remove it first (DEL, or tasuki node remove cni-"),
        "{twice:?}"
    );
    [ONE, OTHER].iter().for_each(|id| runtime.ends("DEL", id, &network));
    runtime.world.end();
}

/// A container with CAP_NET_ADMIN can do so. The runtime would give this machine no container any more.
#[test]
fn containers_that_delete_their_interfaces_leave_their_network_ready() {
    let Some((runtime, network, _)) = with_two() else { return };
    for room in [&runtime.world.shop, &runtime.world.desk] {
        let (done, said) = runs(room, &["ip", "link", "delete", "eth0"]);
        assert!(done, "{said}");
    }
    let rig = &runtime.world.rig;
    let is_in_trouble = |id: &&str| {
        let (name, status) = (runtime.node(id), rig.json(&["status"]));
        let node = status["nodes"].as_array().expect("nodes").iter().find(|node| node["name"] == name).cloned();
        node.is_some_and(|node| node["trouble"].is_string())
    };
    until(rig, "both are in trouble", || [ONE, OTHER].iter().all(is_in_trouble));
    runtime.call("STATUS", &[], &network.to_string()).expect("others may come");
    [ONE, OTHER].iter().for_each(|id| runtime.ends("DEL", id, &network));
    runtime.world.end();
}

/// Its node is found again by the daemon's registry alone.
#[test]
fn a_container_goes_on_while_workers_and_daemon_are_replaced_and_is_checked_until_it_is_gone() {
    let Some((mut runtime, network, [given, _])) = with_two() else { return };
    let mut checked = network.clone();
    checked["prevResult"] = given;
    let check = |runtime: &Runtime| runtime.ask("CHECK", ONE, Some(&runtime.world.shop), &checked);
    check(&runtime).expect("it is as it was");
    let exchange = Exchange::begin([(&runtime.world.shop, SHOP), (&runtime.world.desk, DESK)]);
    exchange.goes_on(&runtime.world.rig, 200);
    let node = runtime.node(ONE);
    assert!(node.starts_with("cni-4f3c01234567-"), "{node} shows the ID as runtimes do");
    let file = runtime.world.rig.ask(&["config", "show"]);
    assert!(!file.contains("[[node]]") && file.contains("nodes of containers, 2 of them"), "{file}");
    runtime.world.rig.ask(&["worker", "upgrade", &node]);
    runtime.world.rig.kill_driver(&node);
    runtime.world.rig.kill_daemon();
    runtime.world.rig.start();
    runtime.world.rig.await_pair(&node);
    exchange.goes_on(&runtime.world.rig, 200);
    let tally = exchange.end();
    assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", runtime.world.rig.log());
    check(&runtime).expect("it is as it was");
    let (done, said) = runs(&runtime.world.shop, &["ip", "link", "set", "eth0", "mtu", "1400"]);
    assert!(done, "{said}");
    let differs = check(&runtime).expect_err("it is otherwise");
    assert!(differs.code == 100 && differs.said.contains("MTU 9000"), "{differs:?}");
    let (done, said) = runs(&runtime.world.shop, &["ip", "link", "set", "eth0", "mtu", "9000", "down"]);
    assert!(done, "{said}");
    let differs = check(&runtime).expect_err("it is down");
    assert!(differs.code == 100 && differs.said.contains("its interface eth0 is down"), "{differs:?}");
    runtime.assigned();
    for _ in 0..2 {
        runtime.ends("DEL", ONE, &network);
        assert!(!has_eth0(&runtime.world.shop) && has_eth0(&runtime.world.desk));
    }
    assert_eq!(runtime.assigned(), format!("DEL {ONE}, DEL {ONE}"));
    let gone = check(&runtime).expect_err("it is gone");
    assert_eq!(gone.code, 3, "{gone:?}");
    runtime.ends("DEL", OTHER, &network);
    assert_eq!(nodes(&runtime.world.rig), []);
    runtime.world.end();
}

#[test]
fn an_address_that_went_to_another_container_is_reached_there_at_once() {
    let Some(runtime) = Runtime::new() else { return };
    let network = runtime.network(&json!({}));
    let room = Room::new();
    let result = |address: &str| json!({ "ips": [{ "address": format!("{address}/24") }] });
    [("a", SHOP), ("b", DESK), ("c", DESK)].iter().for_each(|(id, address)| runtime.assigns(id, &result(address)));
    runtime.add("a", &runtime.world.shop, &network);
    runtime.add("b", &runtime.world.desk, &network);
    let (done, said) = runs(&runtime.world.shop, &["ping", "-c", "1", "-W", "20", DESK]);
    assert!(done, "{said}\n{}", runtime.world.rig.log());
    runtime.ends("DEL", "b", &network);
    // Its frames go by its worker, and the interface is a TAP itself.
    let given = runtime.add("c", &room, &runtime.network(&json!({ "check_addresses": true })));
    let mac = given["interfaces"][0]["mac"].as_str().expect("an address");
    // Nobody asks for it: it is the newcomer that says so.
    until(&runtime.world.rig, "its neighbours know", || {
        runs(&runtime.world.shop, &["ip", "neigh", "show", DESK]).1.contains(mac)
    });
    ["a", "c"].iter().for_each(|id| runtime.ends("DEL", id, &network));
    runtime.world.end();
}

#[test]
fn a_call_that_fails_half_way_leaves_nothing() {
    let Some(mut runtime) = Runtime::new() else { return };
    let network = runtime.network(&json!({}));
    let add = |runtime: &Runtime, id: &str| {
        runtime.ask("ADD", id, Some(&runtime.world.shop), &network).expect_err("a failure")
    };
    let nothing_is_left = |runtime: &Runtime, calls: &str| {
        assert_eq!(
            (nodes(&runtime.world.rig), runtime.assigned(), has_eth0(&runtime.world.shop)),
            (vec![], calls.to_owned(), false)
        );
    };
    // The daemon makes the interface, and the kernel refuses a route by a network that comes later.
    let ips = json!([{ "address": "192.0.2.1/24" }]);
    runtime.assigns(
        "a",
        &json!({ "ips": ips, "routes": [{ "dst": "0.0.0.0/0", "gw": "203.0.113.1" }, { "dst": "203.0.113.0/24" }] }),
    );
    let failed = add(&runtime, "a");
    assert!(failed.code == 100 && failed.said.contains("the route to 0.0.0.0/0 by way of 203.0.113.1"), "{failed:?}");
    nothing_is_left(&runtime, "ADD a, DEL a");
    // A route with settings that would be dropped without a word.
    runtime.assigns("b", &json!({ "ips": ips, "routes": [{ "dst": "0.0.0.0/0", "table": 7 }] }));
    let failed = add(&runtime, "b");
    assert!(failed.code == 2 && failed.said.contains("table = 7"), "{failed:?}");
    nothing_is_left(&runtime, "ADD b, DEL b");
    // Nothing can be assigned.
    fs::write(runtime.folder().join("fails-ADD"), "").expect("a file");
    let failed = add(&runtime, "c");
    assert_eq!((failed.code, &failed.said[..]), (11, "ipam: assign: no address is free; free one"));
    nothing_is_left(&runtime, "ADD c, DEL c");
    fs::remove_file(runtime.folder().join("fails-ADD")).expect("a file");
    // No daemon is at work: nothing is assigned, and nothing freed that may be in use.
    runtime.assigns("d", &json!({ "ips": ips }));
    runtime.add("d", &runtime.world.shop, &network);
    runtime.world.rig.kill_daemon();
    let failed = runtime.ask("ADD", "e", Some(&runtime.world.desk), &network).expect_err("no daemon");
    assert!(failed.code == 11 && failed.said.contains("no tasukid is at work in "), "{failed:?}");
    let failed = runtime.ask("DEL", "d", None, &network).expect_err("no daemon");
    assert!(failed.code == 11 && failed.said.contains("; start it"), "{failed:?}");
    let failed = runtime.call("STATUS", &[], &network.to_string()).expect_err("no daemon");
    assert_eq!(failed.code, 50, "{failed:?}");
    assert_eq!(runtime.assigned(), "ADD d");
    runtime.world.rig.start();
    runtime.ends("DEL", "d", &network);
    nothing_is_left(&runtime, "DEL d");
    runtime.world.end();
}

#[test]
fn a_container_starts_and_ends_while_a_configuration_is_applied() {
    let Some(runtime) = Runtime::new() else { return };
    let (network, rig) = (runtime.network(&json!({})), &runtime.world.rig);
    runtime.assigns("a", &json!({ "ips": [{ "address": "192.0.2.1/24" }] }));
    let file = "\n[[node]]\nname = \"file\"\nwork = \"sink\"\n";
    for command in ["ADD", "DEL"] {
        rig.configure(|text| text + file);
        rig.ask(&["apply"]);
        // The node cannot go while its worker stands still.
        let worker = pid(&rig.await_worker("file", "idle"));
        signal(worker, Signal::STOP);
        rig.configure(|text| text.replace(file, ""));
        std::thread::scope(|scope| {
            let applied = scope.spawn(|| rig.ask(&["apply"]));
            until(rig, "it is being applied", || rig.ask(&["status"]).contains("is being applied"));
            let called = scope.spawn(|| runtime.ask(command, "a", Some(&runtime.world.shop), &network));
            // Of DEL nothing is seen as yet.
            until(rig, "addresses are assigned", || command == "DEL" || runtime.folder().join("calls").exists());
            signal(worker, Signal::CONT);
            let called = called.join().expect("an end");
            assert!(called.is_ok(), "{command}: {called:?}\n{}", rig.log());
            applied.join().expect("it is applied");
        });
        assert_eq!((runtime.assigned(), has_eth0(&runtime.world.shop)), (format!("{command} a"), command == "ADD"));
    }
    runtime.world.end();
}

#[test]
fn a_container_that_ended_while_no_daemon_was_at_work_starts_again() {
    let Some(mut runtime) = Runtime::new() else { return };
    let network = runtime.network(&json!({}));
    runtime.assigns("a", &json!({ "ips": [{ "address": "192.0.2.1/24" }] }));
    let room = Room::new();
    runtime.add("a", &room, &network);
    let node = runtime.node("a");
    // Its namespace is there, without its interface: somebody else may have moved that.
    let failed = runtime.ask("ADD", "a", Some(&runtime.world.shop), &network).expect_err("it is there");
    assert!(failed.said.contains("is on the network already"), "{failed:?}");
    runtime.world.rig.kill_daemon();
    let failed = runtime.ask("DEL", "a", Some(&room), &network).expect_err("no daemon");
    assert_eq!(failed.code, 11, "{failed:?}");
    drop(room);
    runtime.world.rig.start();
    let says = || runtime.world.rig.ask(&["status"]);
    until(&runtime.world.rig, "it is told what to do", || {
        says().contains(&format!("remove the node (tasuki node remove {node}), and start the container anew"))
    });
    runtime.add("a", &runtime.world.shop, &network);
    assert_eq!(runtime.assigned(), "ADD a, DEL a, ADD a", "its address was free before it was assigned again");
    assert_eq!((nodes(&runtime.world.rig).len(), has_eth0(&runtime.world.shop)), (1, true));
    runtime.ends("DEL", "a", &network);
    runtime.world.end();
}

/// It dies before the registry has the change, and after that; each time before its answer.
#[test]
fn a_container_starts_and_ends_though_the_daemon_dies_before_its_answer() {
    let Some(mut runtime) = Runtime::new() else { return };
    let network = runtime.network(&json!({}));
    runtime.assigns("a", &json!({ "ips": [{ "address": "192.0.2.1/24" }] }));
    let places = [("ADD", ["daemon.adding", "daemon.added"]), ("DEL", ["daemon.left", "daemon.removed"])];
    for (command, place) in places.into_iter().flat_map(|(command, places)| places.map(|place| (command, place))) {
        if (command, runtime.world.rig.json(&["node", "list"])) == ("DEL", json!([])) {
            runtime.add("a", &runtime.world.shop, &network);
        }
        runtime.assigned();
        runtime.world.rig.kill_daemon();
        runtime.world.rig.start_to_die(Some(format!("{place}:1")));
        until(&runtime.world.rig, "tasukid serves", || runtime.world.rig.tasuki(&["status"]).status.success());
        let calls = runtime.call_beside(command, "a", &network);
        runtime.world.rig.daemon_ends();
        runtime.world.rig.start();
        let called = calls.wait_with_output().expect("an end");
        let said = String::from_utf8_lossy(&called.stdout);
        assert!(called.status.success(), "{place}: {said}\n{}", runtime.world.rig.log());
        assert_eq!((runtime.assigned(), has_eth0(&runtime.world.shop)), (format!("{command} a"), command == "ADD"));
        assert_eq!(nodes(&runtime.world.rig).len(), usize::from(command == "ADD"));
        if place == "daemon.adding" {
            runtime.ends("DEL", "a", &network);
        }
    }
    runtime.world.end();
}

#[test]
fn containers_that_are_not_valid_any_more_are_collected_and_no_other_node() {
    let Some(runtime) = Runtime::new() else { return };
    let network = runtime.network(&json!({}));
    let other_network = runtime.network(&json!({ "name": "pods.other" }));
    let rooms = [Room::new(), Room::new()];
    for (number, id) in (1..).zip(["a", "b", "c"]) {
        runtime.assigns(id, &json!({ "ips": [{ "address": format!("192.0.2.{number}/24") }] }));
    }
    runtime.add("a", &runtime.world.shop, &network);
    runtime.add("b", &runtime.world.desk, &network);
    runtime.add("c", &rooms[0], &other_network);
    runtime.world.add("hand", &rooms[1], "192.0.2.9", &[]);
    runtime.assigned();
    let collect = |valid: Option<Value>| {
        let mut network = network.clone();
        valid.into_iter().for_each(|valid| network["cni.dev/valid-attachments"] = valid);
        runtime.call("GC", &[], &network.to_string()).expect("a collection");
        nodes(&runtime.world.rig).into_iter().map(|(container, _)| container).collect::<Vec<_>>()
    };
    let valid = json!([{ "containerID": "b", "ifname": "eth0" }, { "containerID": "a", "ifname": "eth1" }]);
    assert_eq!(collect(None), ["pods/a/eth0", "pods/b/eth0", "pods.other/c/eth0", ""], "nothing is known of them");
    assert_eq!(collect(Some(valid)), ["pods/b/eth0", "pods.other/c/eth0", ""]);
    assert_eq!(collect(Some(Value::Null)), ["pods.other/c/eth0", ""], "none is valid");
    assert_eq!(runtime.assigned(), "GC , GC , GC ");
    // Where no node can be removed, no address is free.
    let mut away = network.clone();
    (away["dir"], away["cni.dev/valid-attachments"]) = (json!(runtime.world.rig.path("nowhere")), json!([]));
    assert_eq!(runtime.call("GC", &[], &away.to_string()).expect_err("no tasukid").code, 11);
    assert_eq!(runtime.assigned(), "");
    runtime.ends("DEL", "c", &other_network);
    runtime.world.end();
}

/// row: T131
/// row: T132
#[test]
fn a_call_that_means_harm_is_refused_and_nothing_else_happens() {
    let Some(runtime) = Runtime::new() else { return };
    let (network, rig) = (runtime.network(&json!({})), &runtime.world.rig);
    let text = network.to_string();
    runtime.assigns("a", &json!({ "ips": [{ "address": "192.0.2.1/24" }] }));
    let (file, fifo) = (rig.path("tasuki.toml"), rig.path("fifo"));
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).expect("a FIFO");
    let room = runtime.world.shop.path();
    let user_namespace = room.replace("/net", "/user");
    let [file, fifo] = [&file, &fifo].map(|path| path.display().to_string());
    let long = "a".repeat(300);
    let cases: &[(&str, &str, u64)] = &[
        ("CNI_NETNS", "/run/netns/no-such-room", 3),
        ("CNI_NETNS", &file, 4),
        ("CNI_NETNS", &fifo, 4),
        ("CNI_NETNS", "/dev/zero", 4),
        ("CNI_NETNS", "/", 4),
        ("CNI_NETNS", "/proc/self/ns/net", 4),
        ("CNI_NETNS", &user_namespace, 4),
        ("CNI_NETNS", "relative", 4),
        ("CNI_CONTAINERID", "../../etc", 4),
        ("CNI_CONTAINERID", "a/eth0", 4),
        ("CNI_CONTAINERID", "a b", 4),
        ("CNI_CONTAINERID", &long, 7),
        ("CNI_IFNAME", "../x", 4),
        ("CNI_IFNAME", "lo", 4),
        ("CNI_ARGS", "MAC", 4),
        ("CNI_ARGS", "MAC=ff:ff:ff:ff:ff:ff", 7),
        ("CNI_PATH", "/nowhere", 7),
    ];
    for (name, value, code) in cases {
        let mut variables = vec![("CNI_CONTAINERID", "a"), ("CNI_IFNAME", "eth0"), ("CNI_NETNS", &room)];
        variables.push((name, value));
        let failed = runtime.call("ADD", &variables, &text).expect_err(value);
        assert_eq!(failed.code, *code, "{name}={value}: {failed:?}");
        assert_eq!(failed.said.lines().count(), 1, "{failed:?}");
    }
    let inputs = [
        (json!({ "ipam": { "type": "../plugins/assign" } }), 7),
        (json!({ "ipam": { "type": "" } }), 7),
        (json!({ "ipam": { "type": 5 } }), 7),
        (json!({ "ipam": "assign" }), 7),
        (json!({ "name": "../pods" }), 7),
        (json!({ "dir": "/nowhere/at/all" }), 11),
        (json!({ "trusts": ["x"] }), 2),
        (json!({ "work": "echo" }), 2),
        (json!({ "prevResult": {} }), 7),
        (json!({ "cpu": 99_999 }), 7),
    ];
    for (more, code) in inputs {
        let failed = runtime.ask("ADD", "a", Some(&runtime.world.shop), &runtime.network(&more)).expect_err("refused");
        assert_eq!(failed.code, code, "{more}: {failed:?}");
    }
    // The container has made a TAP of this name, and let go of it: the daemon could take it for a free one.
    let (done, said) = runs(&runtime.world.shop, &["ip", "tuntap", "add", "eth0", "mode", "tap"]);
    assert!(done, "{said}");
    let failed = runtime.ask("ADD", "a", Some(&runtime.world.shop), &network).expect_err("it is taken");
    assert!(failed.code == 4 && failed.said.contains("has an interface eth0 already"), "{failed:?}");
    let (done, said) = runs(&runtime.world.shop, &["ip", "link", "delete", "eth0"]);
    assert!(done && nodes(&runtime.world.rig).is_empty(), "{said}");
    assert_eq!(runtime.assigned(), "ADD a, DEL a", "the daemon alone knows which CPUs there are");

    // A container that takes its interface away harms itself, and its runtime cleans up all the same.
    runtime.add("a", &runtime.world.shop, &network);
    let (done, said) = runs(&runtime.world.shop, &["ip", "link", "delete", "eth0"]);
    assert!(done, "{said}");
    runtime.ends("DEL", "a", &network);
    assert_eq!(nodes(&runtime.world.rig), []);
    runtime.world.end();
}

/// Returns the path of a program that others have written, in PATH or one of these folders.
pub fn others(name: &str, folders: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(folders.iter().map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

#[test]
fn the_reference_runtime_and_the_plugin_that_assigns_addresses_from_a_subnet_go_with_it() {
    let Some(cnitool) = others("cnitool", &USUAL) else {
        return println!("skipped: needs cnitool: go install github.com/containernetworking/cni/cnitool@v1.3.0");
    };
    let Some(host_local) = others("host-local", &USUAL) else {
        return println!("skipped: needs host-local: apt-get install containernetworking-plugins");
    };
    let Some(runtime) = Runtime::new() else { return };
    std::os::unix::fs::symlink(PLUGIN, runtime.folder().join("tasuki-cni")).expect("a link");
    let speaks =
        Command::new(&host_local).env("CNI_COMMAND", "VERSION").stdin(Stdio::null()).output().expect("a program");
    let is_new = String::from_utf8_lossy(&speaks.stdout).contains("1.1.0");
    let state = runtime.world.rig.path("addresses");
    let subnet = |subnet: &str| json!([{ "subnet": subnet }]);
    let network = json!({
        "cniVersion": if is_new { "1.1.0" } else { "1.0.0" },
        "name": "tasuki-test",
        "plugins": [{
            "type": "tasuki-cni", "vni": "lan", "dir": runtime.world.rig.dir(),
            "ipam": {
                "type": "host-local", "dataDir": state, "ranges": [subnet("198.51.100.0/24"), subnet("fd00:1::/64")],
                "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
            },
        }],
    });
    let nets = runtime.world.rig.path("net.d");
    fs::create_dir(&nets).expect("a folder");
    fs::write(nets.join("10-tasuki.conflist"), network.to_string()).expect("a file");
    let (ours, theirs) = (runtime.folder(), host_local.parent().expect("a folder"));
    let folders = std::env::join_paths([ours.as_path(), theirs]).expect("a list");
    let ask = |verb: &str, room: &Room| {
        let mut tool = Command::new(&cnitool);
        tool.args([verb, "tasuki-test", &room.path()]).env("NETCONFPATH", &nets).env("CNI_PATH", &folders);
        let output = tool.env("CNI_IFNAME", "eth0").stdin(Stdio::null()).output().expect("a program");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "cnitool {verb}: {said}\n{}", runtime.world.rig.log());
        said
    };
    let rooms = [&runtime.world.shop, &runtime.world.desk];
    let given = rooms.map(|room| ask("add", room));
    assert!(given[1].contains("198.51.100.3/24") && given[1].contains("fd00:1::3/64"), "{}", given[1]);
    for address in ["198.51.100.3", "fd00:1::3"] {
        runtime.world.ping(3, "0.01", address);
    }
    rooms.iter().for_each(|room| drop(ask("check", room)));
    if is_new {
        ask("status", rooms[0]);
        ask("gc", rooms[0]);
        assert_eq!(nodes(&runtime.world.rig), [], "it names no valid container");
    }
    rooms.iter().for_each(|room| drop(ask("del", room)));
    assert_eq!(nodes(&runtime.world.rig), []);
    let leases = fs::read_dir(state.join("tasuki-test")).expect("a folder").flatten();
    let left: Vec<_> =
        leases.map(|entry| entry.file_name()).filter(|name| !name.to_string_lossy().starts_with(['l'])).collect();
    assert!(left.is_empty(), "all addresses are free: {left:?}");
    runtime.world.end();
}
