//! Containers of podman on a VNI: `tasuki-netavark`, called as netavark calls a plugin. Needs root.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tasuki_tap::interface::Interface;

use super::containers::{has_eth0, nodes, others, reaches_desk};
use super::rooms::{Exchange, Room};
use super::vnis::{DESK, SHOP, World};

const PLUGIN: &str = env!("CARGO_BIN_EXE_tasuki-netavark");

/// Input of `create`, as podman 5.4.2 wrote it for `podman network create -d … --subnet … --dns …`.
const CREATE: &str = r#"{"name":"lan","id":"c36eccadb9c3f05f51db1ac208d884750a87382d6db0b3078ea0be3534735274","driver":"tasuki","created":"0001-01-01T00:00:00Z","subnets":[{"subnet":"192.0.2.0/24"},{"subnet":"fd00::/64"}],"ipv6_enabled":false,"internal":false,"dns_enabled":true,"network_dns_servers":["192.0.2.53"],"options":{"mtu":"9000","vni":"lan"}}"#;

/// Input of `setup` and `teardown`, as netavark 1.14.0 wrote it for `podman run --network lan:ip=…,mac=… -p 8080:80`.
const SETUP: &str = r#"{"container_id":"b8d8b7069fde0069be973d78cdd3933e0e9e9101850b9dd03c16072332c31ef0","container_name":"web","port_mappings":[{"container_port":80,"host_ip":"","host_port":8080,"protocol":"tcp","range":1}],"network":{"dns_enabled":true,"driver":"tasuki","id":"c36eccadb9c3f05f51db1ac208d884750a87382d6db0b3078ea0be3534735274","internal":false,"ipv6_enabled":true,"name":"lan","network_interface":null,"options":{"vni":"lan","mtu":"9000"},"ipam_options":null,"subnets":[{"gateway":"192.0.2.254","lease_range":null,"subnet":"192.0.2.0/24"},{"gateway":"fd00::fe","lease_range":null,"subnet":"fd00::/64"}],"routes":[{"destination":"198.51.100.0/24","gateway":"192.0.2.9","metric":null}],"network_dns_servers":["192.0.2.53"]},"network_options":{"aliases":["b8d8b7069fde"],"interface_name":"eth0","static_ips":["192.0.2.1","fd00::1"],"static_mac":"02:00:00:00:00:05","options":null}}"#;

/// Calls the plugin; returns its answer, or what it says is wrong, and what it writes to podman's terminal.
fn call(words: &[&str], input: &str) -> (Result<Value, String>, String) {
    let mut plugin = Command::new(PLUGIN);
    plugin.args(words).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut plugin = plugin.spawn().expect("a program");
    // A plugin that refuses its arguments reads nothing.
    let _ = plugin.stdin.take().expect("a pipe").write_all(input.as_bytes());
    let output = plugin.wait_with_output().expect("an end");
    let noted = String::from_utf8_lossy(&output.stderr).into_owned();
    let answer = match output.stdout.is_empty() {
        true => Value::Null,
        false => serde_json::from_slice(&output.stdout).expect("JSON"),
    };
    match output.status.code() {
        Some(0) => (Ok(answer), noted),
        Some(1) => (Err(answer["error"].as_str().expect("a sentence").to_owned()), noted),
        code => panic!("it ended with {code:?}: {answer} {noted}"),
    }
}

/// A world with two containers that podman connects.
struct Podman {
    world: World,
    /// What netavark writes for each.
    web: Value,
    other: Value,
}

impl Podman {
    fn new() -> Option<Self> {
        let world = World::new()?;
        let mut web: Value = serde_json::from_str(SETUP).expect("JSON");
        web["network"]["options"]["dir"] = json!(world.rig.dir());
        let mut other = web.clone();
        (other["container_id"], other["port_mappings"]) = (json!("beef"), Value::Null);
        let its = &mut other["network_options"];
        (its["static_ips"], its["static_mac"]) = (json!([DESK, "fd00::2"]), Value::Null);
        Some(Podman { world, web, other })
    }

    fn call(&self, verb: &str, room: &Room, input: &Value) -> Result<Value, String> {
        call(&[verb, &room.path()], &input.to_string()).0
    }

    fn setup(&self, room: &Room, input: &Value) -> Value {
        self.call("setup", room, input).unwrap_or_else(|why| panic!("{why}\n{}", self.world.rig.log()))
    }

    fn teardown(&self, room: &Room, input: &Value) {
        let ended = self.call("teardown", room, input);
        assert_eq!(ended, Ok(Value::Null), "{}", self.world.rig.log());
    }
}

#[test]
fn podman_has_containers_on_a_vni_and_they_go_on_while_workers_and_daemon_are_replaced() {
    let Some(mut podman) = Podman::new() else { return };
    let mut network: Value = serde_json::from_str(CREATE).expect("JSON");
    network["options"]["dir"] = json!(podman.world.rig.dir());
    assert_eq!(call(&["create"], &network.to_string()).0, Ok(network), "it is kept as it is");
    let (given, noted) = call(&["setup", &podman.world.shop.path()], &podman.web.to_string());
    let address = |ip: &str, gateway: &str| json!({ "ipnet": ip, "gateway": gateway });
    let addresses = [address("192.0.2.1/24", "192.0.2.254"), address("fd00::1/64", "fd00::fe")];
    let interface = json!({ "mac_address": "02:00:00:00:00:05", "subnets": addresses });
    let whole = json!({
        "dns_search_domains": [], "dns_server_ips": ["192.0.2.53"], "interfaces": { "eth0": interface },
    });
    assert_eq!(given, Ok(whole), "{}", podman.world.rig.log());
    assert!(noted.contains("-p 8080:80") && noted.lines().count() == 1, "ports are not forwarded: {noted}");
    podman.setup(&podman.world.desk, &podman.other);
    // The kernel has it all.
    let (shop, rig) = (&podman.world.shop, &podman.world.rig);
    let found = shop.within(|| Interface::find("eth0").and_then(|its| its.read()).expect("its settings"));
    assert_eq!((found.mac, found.mtu), (Some([2, 0, 0, 0, 0, 5]), Some(9000)));
    for (to, via) in [("0.0.0.0/0", "192.0.2.254"), ("::/0", "fd00::fe"), ("198.51.100.0/24", "192.0.2.9")] {
        let via = Some(via.parse().expect("an address"));
        assert!(found.routes.iter().any(|it| it.to.to_string() == to && it.via == via), "{to}: {found:?}");
    }
    reaches_desk(rig, shop);
    let twice = podman.call("setup", shop, &podman.web).expect_err("it is there");
    let way_out = format!("is on the network already; remove it first (tasuki node remove {})", nodes(rig)[0].1);
    assert!(twice.ends_with(&way_out), "{twice}");
    let exchange = Exchange::begin([(shop, SHOP), (&podman.world.desk, DESK)]);
    exchange.goes_on(rig, 200);
    let [(container, node), _] = &nodes(rig)[..] else { panic!("two nodes") };
    assert!(container.starts_with("netavark:lan/b8d8b7069fde0069") && container.ends_with("/eth0"), "{container}");
    assert!(node.starts_with("ctr-b8d8b7069fde-"), "{node} shows the ID as podman does");
    rig.ask(&["worker", "upgrade", node]);
    podman.world.rig.kill_driver(node);
    podman.world.rig.kill_daemon();
    podman.world.rig.start();
    podman.world.rig.await_pair(node);
    exchange.goes_on(&podman.world.rig, 200);
    let tally = exchange.end();
    assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", podman.world.rig.log());
    for _ in 0..2 {
        podman.teardown(&podman.world.shop, &podman.web);
        assert!(!has_eth0(&podman.world.shop) && has_eth0(&podman.world.desk));
    }
    // The node has to go, also if its network makes no sense any more, or its namespace is gone.
    podman.other["network"]["options"]["mtu"] = json!("many");
    let ended = call(&["teardown", "/run/netns/no-such-room"], &podman.other.to_string());
    assert_eq!((ended, nodes(&podman.world.rig)), ((Ok(Value::Null), String::new()), vec![]));
    podman.world.end();
}

#[test]
fn what_ended_while_no_daemon_was_at_work_starts_again_and_leaves_no_address_behind() {
    let Some(mut podman) = Podman::new() else { return };
    podman.setup(&podman.world.shop, &podman.web);
    let room = Room::new();
    podman.setup(&room, &podman.other);
    podman.world.rig.kill_daemon();
    for verb in ["teardown", "setup"] {
        let failed = podman.call(verb, &podman.world.desk, &podman.web).expect_err("no daemon");
        assert!(failed.contains("no tasukid is at work in ") && failed.contains("; start it"), "{failed}");
    }
    drop(room);
    podman.world.rig.start();
    assert_eq!(nodes(&podman.world.rig).len(), 2, "nobody has told the daemon");
    // podman starts it with the same ID, in another namespace.
    podman.setup(&podman.world.desk, &podman.web);
    let room = &podman.world.desk;
    assert_eq!((nodes(&podman.world.rig).len(), has_eth0(room), has_eth0(&podman.world.shop)), (1, true, false));
    podman.teardown(room, &podman.web);
    podman.world.end();
}

/// podman asks for one at a time, unless it was killed and begins anew.
#[test]
fn of_two_calls_for_one_interface_none_takes_the_others_away_and_none_waits_in_vain() {
    let Some(podman) = Podman::new() else { return };
    let shop = &podman.world.shop;
    for _ in 0..4 {
        let ended = std::thread::scope(|scope| {
            let calls: Vec<_> = (0..3).map(|_| scope.spawn(|| podman.call("setup", shop, &podman.web))).collect();
            calls.into_iter().map(|call| call.join().expect("an end")).collect::<Vec<_>>()
        });
        assert!(ended.iter().any(Result::is_ok), "{ended:?}");
        let odd = ended.iter().filter_map(|it| it.as_ref().err()).find(|why| why.contains("is not at work after"));
        assert_eq!(odd, None, "{}", podman.world.rig.log());
        assert_eq!((nodes(&podman.world.rig).len(), has_eth0(shop)), (1, true), "{ended:?}");
        podman.teardown(shop, &podman.web);
    }
    podman.world.end();
}

#[test]
fn a_caller_that_does_not_listen_to_what_is_noted_has_its_answer() {
    let Some(podman) = Podman::new() else { return };
    let (ours, theirs) = rustix::pipe::pipe().expect("a pipe");
    drop(ours);
    let mut plugin = Command::new(PLUGIN);
    plugin.args(["setup", &podman.world.shop.path()]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(theirs);
    let mut plugin = plugin.spawn().expect("a program");
    let input = podman.web.to_string();
    plugin.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it reads");
    let output = plugin.wait_with_output().expect("an end");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("02:00:00:00:00:05"), "{}: {said}", output.status);
    podman.teardown(&podman.world.shop, &podman.web);
    podman.world.end();
}

/// row: T131
#[test]
fn what_podman_cannot_have_meant_is_refused_in_a_sentence_and_nothing_happens() {
    let Some(podman) = Podman::new() else { return };
    let set = |at: &str, value: &Value| {
        let mut input = podman.web.clone();
        *input.pointer_mut(at).expect("it is there") = value.clone();
        input.to_string()
    };
    let shop = podman.world.shop.path();
    let rooms = [
        ("/run/netns/no-such-room", "no network namespace at"),
        ("relative", "relative"),
        ("/dev/zero", "/dev/zero is no network namespace; name one"),
        ("/proc/self/ns/net", "is the network namespace that this plugin runs in itself; name the container's"),
        ("", "name"),
    ];
    let whole = podman.web.to_string();
    let rooms = rooms.map(|(room, part)| (vec!["setup", room], whole.clone(), part));
    let odd = [
        ("/container_id", json!("../../etc"), "\"../../etc\" is no name of a network, and no ID of a container; "),
        ("/network/name", json!("a/b"), "\"a/b\" is no name of a network"),
        ("/network_options/interface_name", json!("../x"), "../x"),
        ("/network_options/interface_name", json!("lo"), "has an interface lo already"),
        ("/network_options/interface_name", json!("eth%d"), "\"eth%d\" cannot be the name of an interface"),
        ("/network_options/interface_name", json!("all"), "\"all\" cannot be the name of an interface"),
        (
            "/network_options/interface_name",
            json!("\u{e9}th0"),
            "\"\u{e9}th0\" cannot be the name of a container's interface; ",
        ),
        ("/container_id", json!("a".repeat(300)), "have 318 characters together"),
        ("/network_options/static_mac", json!("01:00:00:00:00:01"), "01:00:00:00:00:01"),
        ("/network_options/static_ips", json!(["203.0.113.1"]), "no subnet of it has the address 203.0.113.1"),
        ("/network_options/options", json!({ "host_interface_name": "x" }), "host_interface_name=x of a container"),
        ("/network/options/mtu", json!("9"), "mtu = 9"),
        ("/network/options/dir", json!("/nowhere"), "no tasukid is at work in /nowhere; "),
        ("/network/subnets/0/subnet", json!("x"), "x"),
        ("/network", json!(5), "netavark's input cannot be read (invalid type: integer `5`"),
    ];
    let odd = odd.map(|(at, value, part)| (vec!["setup", &shop], set(at, &value), part));
    let rest = [
        (vec!["setup", &shop], "nonsense".to_owned(), "is no JSON object"),
        (vec!["setup", &shop], String::new(), "is no JSON object"),
        (vec!["teardown", &shop], "{}".to_owned(), "missing field `container_id`"),
        (vec!["update"], String::new(), "\"update\" is not known here; podman starts this program"),
    ];
    for (words, input, part) in rooms.into_iter().chain(odd).chain(rest) {
        let (answer, noted) = call(&words, &input);
        let said = answer.expect_err(part);
        assert!(said.contains(part) && said.lines().count() == 1 && noted.is_empty(), "{words:?}: {said} {noted}");
    }
    assert!(nodes(&podman.world.rig).is_empty() && !has_eth0(&podman.world.shop));
    podman.world.end();
}

/// The same by netavark itself, as podman starts it.
#[test]
fn netavark_itself_goes_with_it() {
    // Debian 12's (1.4) knows no plugins.
    let knows_plugins = |netavark: &std::path::PathBuf| {
        let said = Command::new(netavark).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
        let said = String::from_utf8_lossy(&said).into_owned();
        let mut numbers = said.split(|byte: char| !byte.is_ascii_digit()).filter_map(|number| number.parse().ok());
        numbers.next().zip(numbers.next()) >= Some((1_u32, 6_u32))
    };
    let netavark = others("netavark", &["/usr/lib/podman", "/usr/libexec/podman"]).filter(knows_plugins);
    let Some(netavark) = netavark else {
        return println!("skipped: needs netavark, 1.6 or later: cargo install netavark");
    };
    let Some(podman) = Podman::new() else { return };
    let plugins = podman.world.rig.path("netavark");
    std::fs::create_dir(&plugins).expect("a folder");
    std::os::unix::fs::symlink(PLUGIN, plugins.join("tasuki")).expect("a link");
    let ask = |verb: &str, room: &Room, container: &Value| {
        let input = json!({
            "container_id": container["container_id"], "container_name": "web",
            "networks": { "lan": container["network_options"] }, "network_info": { "lan": container["network"] },
        });
        let mut its = Command::new(&netavark);
        its.arg("--config").arg(&plugins).arg("--plugin-directory").arg(&plugins);
        // Its rules for firewalls are for bridges.
        its.args([verb, &room.path()]).env("NETAVARK_FW", "none").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut its = its.spawn().expect("a program");
        its.stdin.take().expect("a pipe").write_all(input.to_string().as_bytes()).expect("it reads");
        let output = its.wait_with_output().expect("an end");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "netavark {verb}: {said}\n{}", podman.world.rig.log());
        said
    };
    let containers = [(&podman.world.shop, &podman.web), (&podman.world.desk, &podman.other)];
    let given = containers.map(|(room, container)| ask("setup", room, container));
    assert!(given[0].contains("192.0.2.1/24") && given[0].contains("02:00:00:00:00:05"), "{}", given[0]);
    for address in [DESK, "fd00::2"] {
        podman.world.ping(3, "0.01", address);
    }
    containers.iter().for_each(|(room, container)| drop(ask("teardown", room, container)));
    assert_eq!(nodes(&podman.world.rig), []);
    podman.world.end();
}
