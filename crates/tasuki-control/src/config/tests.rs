use std::net::Ipv4Addr;
use std::time::Duration;

use super::*;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("t.toml"), text).map_err(|error| error.to_string())
}

const WHOLE: &str = r#"
[daemon]
hang_after_ms = 100

[[node]]
name = "red"
work = "echo"
trusts = ["blue"]

[[node]]
name = "blue"
work = { source = { rate = 1000, size = 64 } }
cpu = 1
poll = true
standby = false
trusts = ["red"]

[[node]]
name = "green"
work = "sink"
trusts = ["red"]

[[node]]
name = "grey"
work = { answer = { address = "192.0.2.2" } }

[[node]]
name = "pink"
work = { program = { path = "/opt/mine", options = "fast", files = ["/opt/list"], threads = true } }

[[node]]
name = "shop"
work = { tap = { netns = "shop", name = "nic0", address = "192.0.2.3/24" } }

[[nic]]
name = "eth0"
device = "vfio:0000:03:00.0"
node = "red"
ring = 512
"#;

#[test]
fn a_whole_configuration_is_read() {
    let config = parse(WHOLE).unwrap();
    assert_eq!(config.daemon.hang_after(), Duration::from_millis(100));
    assert_eq!(config.daemon.deadline(), Duration::from_secs(1), "a key that is left out has its default");
    assert_eq!(config.node[1].work, Work::Source(Source { rate: 1000, size: 64, to: None }));
    assert_eq!(config.node[3].work, Work::Answer(Answer { address: Ipv4Addr::new(192, 0, 2, 2) }));
    assert!(config.node[0].standby && !config.node[1].standby);
    let program = config.node[4].program().expect("it has one");
    assert_eq!((program.path.as_path(), program.options.as_str()), (Path::new("/opt/mine"), "fast"));
    assert_eq!((&program.files[..], program.threads), (&[PathBuf::from("/opt/list")][..], true));
    assert_eq!(config.node[0].program(), None);
    let nice: Vec<_> =
        ["red", "blue", "pink", "shop"].iter().filter_map(|name| config.node(name)).map(Node::nice).collect();
    assert_eq!(nice, [-20, 0, 0, -20], "pollers and users' programs have no priority");
    let tap = config.tap("shop").expect("it has one");
    assert_eq!((tap.label(), &tap.addresses[..]), ("shop:nic0".to_owned(), &["192.0.2.3/24".parse().unwrap()][..]));
    assert_eq!(config.tap("red"), None);
    assert_eq!(config.nic[0].device, Device::Vfio("0000:03:00.0".to_owned()));
    assert!(config.trust("red", "blue") && config.trust("green", "green"));
    assert!(config.has_strangers(), "green is one to red");
    assert!(!config.trust("green", "red"), "trust is mutual or none");
}

/// Each of these is refused with a sentence that names the place and the allowed values.
#[test]
fn what_means_nothing_is_refused_by_line() {
    let node = "[[node]]\nname = \"red\"\nwork = \"sink\"\n";
    let tap = |node: &str, tap: &str| format!("[[node]]\nname = \"{node}\"\nwork = {{ tap = {{ {tap} }} }}\n");
    let nic = |name: &str, node: &str| format!("[[nic]]\nname = \"{name}\"\ndevice = \"sim\"\nnode = \"{node}\"\n");
    let vm = |node: &str, more: &str| {
        format!("[[node]]\nname = \"{node}\"\nvni = \"lan\"\nwork = {{ vm = {{ socket = \"/s\" }} }}\n{more}")
    };
    let queue = |node: &str, of: &str, more: &str| {
        format!("[[node]]\nname = \"{node}\"\nvni = \"lan\"\nwork = {{ queue = {{ of = \"{of}\" }} }}\n{more}")
    };
    let cases: &[(String, &[&str])] = &[
        (format!("{node}colour = 3\n"), &["t.toml:4: the key `colour` means nothing here", "`trusts`"]),
        (format!("{node}nice = -21\n"), &["node \"red\": nice = -21 is not in the range -20 (before all others) to 0"]),
        (format!("{node}nice = 1\n"), &["node \"red\": nice = 1 is not in the range -20 (before all others) to 0"]),
        (format!("{node}nice = -5\npoll = true\n"), &["with poll = true these never do", "leave one of the two out"]),
        ("[deamon]\n".to_owned(), &["t.toml:1: the key `deamon` means nothing here", "`daemon`"]),
        (
            "[[node]]\nname = \"red\"\nwork = \"dig\"\n".to_owned(),
            &["t.toml:3:", "work = \"dig\" is not known", "`echo`"],
        ),
        ("[[node]]\nname = \"red\"\n".to_owned(), &["t.toml:1: the key `work` is missing"]),
        (
            "[[node]]\nname = \"red\"\nwork = { source = { speed = 1 } }\n".to_owned(),
            &["t.toml:3: the key `speed` means nothing here", "`rate`"],
        ),
        (
            "[[node]]\nname = \"red\"\nwork = { answer = { address = \"192.0.2\" } }\n".to_owned(),
            &["t.toml:3: ", "is not an address to answer for; name one of IPv4"],
        ),
        ("[[node]]\nname = 5\n".to_owned(), &["t.toml:2: name = 5 is not text"]),
        ("[[node\n".to_owned(), &["t.toml:1:"]),
        (format!("{node}{node}"), &["two nodes are called \"red\""]),
        (format!("{node}trusts = [\"pink\"]\n"), &["node \"red\", trusts: there is no node \"pink\", but red"]),
        (
            format!("{node}[[nic]]\nname = \"e\"\ndevice = \"eth0\"\nnode = \"red\"\n"),
            &["t.toml:6: \"eth0\" names no card"],
        ),
        (
            format!("{node}[[nic]]\nname = \"e\"\ndevice = \"sim\"\nnode = \"pink\"\n"),
            &["nic \"e\": there is no node \"pink\""],
        ),
        (
            node.to_owned() + &nic("e", "red") + "standby = \"pink\"\n",
            &["t.toml:8: nic \"e\", standby: there is no node \"pink\", but red; name another, or leave it out"],
        ),
        (
            node.to_owned() + &nic("d", "red") + &nic("e", "red") + "standby = \"red\"\n",
            &["t.toml:12: nic \"e\", standby: node \"red\" has it already; name another node, or leave it out"],
        ),
        (
            format!("{node}[[node]]\nname = \"blue\"\nvni = \"lan\"\nwork = \"sink\"\n")
                + &nic("e", "red")
                + "standby = \"blue\"\n",
            &["t.toml:12: nic \"e\", standby: node \"blue\" is on VNI lan, and has no NIC beside that"],
        ),
        (
            format!("{node}[[node]]\nname = \"up\"\nvni = \"lan\"\nwork = \"uplink\"\n")
                + &nic("e", "up")
                + "standby = \"red\"\n",
            &["t.toml:12: nic \"e\", standby: node \"up\" is an uplink, whose NIC goes to no other node"],
        ),
        ("[daemon]\nfailover_after_ms = 0\n".to_owned(), &["a limit of 0 ms"]),
        (format!("{node}[[nic]]\nname = \"a/b\"\ndevice = \"sim\"\nnode = \"red\"\n"), &["nic \"a/b\": a name is"]),
        (
            "[[node]]\nname = \"red\"\nwork = { source = { size = 9000 } }\n".to_owned(),
            &["a frame has 60 to 1514 bytes"],
        ),
        (
            node.to_owned() + &nic("e", "red") + "ring = 1000\n",
            &["t.toml: nic \"e\": ring = 1000 is not a power of two from 8 to 1024"],
        ),
        (node.to_owned() + &nic("e", "red") + "ring = 4\n", &["ring = 4 is not a power of two from 8 to 1024"]),
        (
            node.to_owned() + &nic("e", "red") + "ring = 1024\nwire = [\"--card\", \"virtio-net\"]\n",
            &["ring = 1024 is not a power of two from 2 to 512"],
        ),
        (
            node.to_owned() + &nic("e", "red").replace("sim", "vfio:0000:03:00.0") + "ring = 2048\n",
            &["ring = 2048 is not a power of two from 2 to 1024"],
        ),
        (
            node.to_owned() + &nic("e", "red").replace("sim", "vfio:0000:03:00.0") + "ring = 0\n",
            &["ring = 0 is not a power of two from 2 to 1024"],
        ),
        (node.to_owned() + &nic("e", "red") + "mtu = 9001\n", &["nic \"e\": mtu = 9001 is not in the range 68 to 9000"]),
        (
            tap("red", "name = \"nic0\", mtu = 9000") + &nic("e", "red") + "mtu = 4000\n",
            &["nic \"e\": the interface of node \"red\" has mtu = 9000, and this NIC 4000: it drops what is longer"],
        ),
        (
            tap("red", "name = \"nic0\"") + &nic("e", "red") + "mtu = 1000\n",
            &["nic \"e\": the interface of node \"red\" has mtu = 1500, and this NIC 1000: it drops what is longer"],
        ),
        (
            node.to_owned() + &tap("blue", "name = \"nic0\", mtu = 9000") + &nic("e", "red") + "standby = \"blue\"\n",
            &["nic \"e\": the interface of node \"blue\" has mtu = 9000, and this NIC 1500: it drops what is longer"],
        ),
        ("[daemon]\ndeadline_ms = 0\n".to_owned(), &["a limit of 0 ms"]),
        ("[daemon]\nmetrics = \"9469\"\n".to_owned(), &["\"9469\" is no address to listen at", "127.0.0.1:9469"]),
        (
            "[[node]]\nname = \"red\"\nwork = { program = { path = \"mine\" } }\n".to_owned(),
            &["node \"red\": its program is named by a path from /, not mine"],
        ),
        (
            "[[node]]\nname = \"red\"\nwork = { program = { options = \"a\" } }\n".to_owned(),
            &["t.toml:3: the key `path`"],
        ),
        (
            "[[node]]\nname = \"red\"\nwork = { program = { path = \"/a\", files = [\"b\"] } }\n".to_owned(),
            &["node \"red\": a file that its program may read is named by a path from /, not b"],
        ),
        (
            format!(
                "[[node]]\nname = \"red\"\nwork = {{ program = {{ path = \"/a\", options = \"{}\" }} }}\n",
                "x".repeat(4097)
            ),
            &["node \"red\": its program's options have 4097 bytes, and may have 4096"],
        ),
        (tap("red", "name = \"a-name-that-is-too-long\""), &["node \"red\", tap", "1 to 15 bytes"]),
        (tap("red", "name = \"t\", address = \"192.0.2.2\""), &["t.toml:3: ", "192.0.2.2/24"]),
        (tap("red", "name = \"t\", address = \"192.0.2.2/40\""), &["t.toml:3: ", "192.0.2.2/24"]),
        (tap("red", "name = \"t\", netns = \"a/b\""), &["node \"red\", tap: netns is a name of `ip netns`"]),
        (tap("red", "netns = \"a\""), &["t.toml:3: the key `name`"]),
        (
            tap("red", "name = \"t\"") + &tap("blue", "name = \"t\", address = \"192.0.2.2/24\""),
            &["node \"red\", tap: node \"blue\" gives t another address"],
        ),
        (
            tap("red", "name = \"t\"") + &tap("blue", "name = \"t\"") + &nic("e", "red") + &nic("f", "blue"),
            &["t stands for one NIC, and \"e\" and \"f\" are both meant for it"],
        ),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { source = { to = \"01:00:00:00:00:01\" } }\n".to_owned(),
            &["t.toml:4: ", "first of them even"],
        ),
        (tap("red", "name = \"t\"") + "pool_kib = 4096\n", &["pool_kib is a setting of a node's end of a VNI"]),
        (tap("red", "name = \"t\"") + "spoof = \"allow\"\n", &["spoof is a setting of a node's end of a VNI"]),
        (
            tap("red", "name = \"t\"") + "vni = \"lan\"\nspoof = \"allow\"\naddresses = [\"192.0.2.1\"]\n",
            &["it may send in others' addresses; leave addresses out"],
        ),
        (tap("red", "name = \"t\"") + "vni = \"lan\"\naddresses = [\"192.0.2.1/24\"]\n", &["t.toml:5: "]),
        (tap("red", "name = \"t\"") + "vni = \"lan\"\nspoof = \"no\"\n", &["t.toml:5: ", "`check` or `allow`"]),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = \"uplink\"\nspoof = \"check\"\n".to_owned() + &nic("e", "red"),
            &["have addresses of their own; leave spoof = \"check\" out"],
        ),
        (tap("red", "name = \"t\"") + "vni = \"lan\"\nlimits = {}\n", &["node \"red\": limits names no limit; name send, receive"]),
        (
            tap("red", "name = \"t\"") + "vni = \"lan\"\nlimits = { send = {} }\n",
            &["node \"red\": limits.send names no limit; name mbit, kpps"],
        ),
        (tap("red", "name = \"t\"") + "vni = \"a b\"\n", &["vni \"a b\": a name is"]),
        (tap("red", "name = \"t\"") + "vni = \"lan\"\nmac = \"1:2\"\n", &["t.toml:5: ", "first of them even"]),
        (tap("red", "name = \"t\"") + "vni = \"lan\"\n" + &nic("e", "red"), &["it is on VNI lan, and NIC \"e\" is meant for it"]),
        (
            "[[node]]\nname = \"red\"\nwork = \"uplink\"\n".to_owned(),
            &["an uplink joins a NIC and a VNI; name the VNI"],
        ),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = \"uplink\"\n".to_owned() + &nic("e", "red") + &nic("f", "red"),
            &["an uplink joins one NIC and a VNI, and \"e\" and \"f\" are both meant for it"],
        ),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = \"uplink\"\n".to_owned(),
            &["an uplink joins a NIC and a VNI; name the NIC ([[nic]] with node = \"red\")"],
        ),
        (
            "[[node]]\nname = \"red\"\nwork = { memif = { socket = \"/a\" } }\n".to_owned(),
            &["memif is a way onto a VNI; name one"],
        ),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { memif = { socket = \"a\" } }\n".to_owned(),
            &["memif: its socket is named by a path from /, not a"],
        ),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { memif = { socket = \"/a\", secret = \"123456789012345678901234\" } }\n"
                .to_owned(),
            &["its secret has 24 bytes, and memif has room for 23"],
        ),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { memif = { socket = \"/a\", secret = \"\" } }\n".to_owned(),
            &["t.toml:4: secret is empty; write one, or leave the key out to let in every client"],
        ),
        (queue("red", "blue", ""), &["node \"red\": it is to serve a queue of node \"blue\", and there is no such node"]),
        (queue("red", "red", ""), &["there is no such node"]),
        (
            "[[node]]\nname = \"blue\"\nvni = \"lan\"\nwork = \"echo\"\n".to_owned() + &queue("red", "blue", ""),
            &["only a network namespace on a VNI and a virtual machine have several queues so far, and node \"blue\" is neither"],
        ),
        (
            vm("blue", "") + &queue("red", "blue", ""),
            &["node \"red\": of stations behind a virtual machine", "give node \"blue\" the address of the machine's card (mac = …) and spoof = \"check\""],
        ),
        (
            vm("blue", "spoof = \"check\"\n") + &queue("red", "blue", "limits = { send = { mbit = 1 } }\n"),
            &["limits is a setting of the whole interface; set it for node \"blue\""],
        ),
        (
            vm("blue", "spoof = \"check\"\n") + &(0..8).map(|at| queue(&format!("red-{at}"), "blue", "")).collect::<String>(),
            &["node \"red-7\": a virtual machine is served by 8 nodes at most, and this would be number 9 for that of node \"blue\"; leave this node out"],
        ),
        (vm("red", "cpus = [0, 1]\n"), &["node \"red-1\": of stations behind a virtual machine"]),
        (
            vm("red", "spoof = \"check\"\ncpus = [0, 1, 2, 3, 4, 5, 6, 7, 8]\n"),
            &["cpus names 9 CPUs, and a virtual machine has 8 workers at most; name fewer"],
        ),
        (
            tap("blue", "name = \"t\", queues = 2") + "vni = \"lan\"\n" + &queue("red", "blue", "").replace("lan", "wan"),
            &["it drives a queue of node \"blue\", which is on VNI lan; name that VNI"],
        ),
        (
            tap("blue", "name = \"t\", queues = 2") + "vni = \"lan\"\n" + &queue("red", "blue", "mac = \"02:00:00:00:00:01\"\n"),
            &["mac is a setting of the whole interface; set it for node \"blue\""],
        ),
        (
            tap("blue", "name = \"t\"") + "vni = \"lan\"\n" + &queue("red", "blue", ""),
            &["the interface of node \"blue\" has 1 of the 2 queues that are driven with this one; raise its queues"],
        ),
        (
            tap("blue", "name = \"t\", queues = 2") + "vni = \"lan\"\n" + &queue("red", "blue", "") + &queue("grey", "blue", ""),
            &["node \"grey\": the interface of node \"blue\" has 2 of the 3 queues"],
        ),
        (tap("red", "name = \"t\", queues = 9") + "vni = \"lan\"\n", &["queues = 9 is not in the range 1 to 8"]),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { interface = { name = \"e0\", netns = \"web\" } }\n".to_owned()
                + "[[node]]\nname = \"blue\"\nvni = \"lan\"\nwork = { interface = { name = \"e0\", netns = \"/var/run/netns/web\" } }\n",
            &["node \"blue\"", "/var/run/netns/web:e0 is node \"red\"'s as well"],
        ),
        (
            tap("red", "name = \"nic0\", mtu = 1279, address = [\"192.0.2.1/24\", \"2001:db8::9/64\"]"),
            &["node \"red\", tap: mtu = 1279 is less than IPv6 needs, 1280 (RFC 8200, section 5), and 2001:db8::9/64 is IPv6"],
        ),
        (
            tap("red", "name = \"nic0\", mtu = 1000, routes = [{ to = \"2001:db8::/32\" }]"),
            &["and 2001:db8::/32 is IPv6; raise the mtu, or leave that out"],
        ),
        (
            "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { interface = { name = \"e0\", netns = \"\" } }\n".to_owned(),
            &["node \"red\": interface: the namespace is empty (netns; before the colon of --link); name one, or leave it out"],
        ),
        (tap("red", "name = \"lo\""), &["an interface lo already; choose another name"]),
        (tap("red", "name = \"t\", address = \"0.0.0.0/0\""), &["address = \"0.0.0.0/0\" is no station's"]),
        (tap("red", "name = \"t\", address = \"224.0.0.1/4\""), &["address = \"224.0.0.1/4\" is no station's"]),
        (
            tap("red", "name = \"t\", address = \"192.0.2.2/24\", routes = [{ to = \"0.0.0.0/0\", via = \"192.0.3.254\" }]"),
            &["the route to 0.0.0.0/0 leads by 192.0.3.254, which is in no network of the interface"],
        ),
        (
            "[[node]]\nname = \"red\"\nwork = \"echo\"\nbounds = { cpu = 0 }\n".to_owned(),
            &["node \"red\", bounds: cpu = 0 is less than its workers need to begin, 1"],
        ),
        (
            "[[node]]\nname = \"red\"\nwork = \"echo\"\nbounds = { memory_mib = 1 }\n".to_owned(),
            &["memory_mib = 1 is less than its workers need to begin, 16"],
        ),
        (
            "[[node]]\nname = \"red\"\nwork = \"echo\"\nbounds = { pids = 4194305 }\n".to_owned(),
            &["node \"red\", bounds: pids = 4194305 is more than the kernel takes, 4194304"],
        ),
        (tap("red", "name = \"t\", queues = 2"), &["queues is a setting of a node's end of a VNI"]),
        (
            tap("red", "name = \"t\"") + "vni = \"lan\"\ncpus = [0, 1]\n" + &queue("red-1", "red", ""),
            &["two nodes are called \"red-1\"; give one another name (with cpus, further queues of node red are called red-1 and so on)"],
        ),
        (tap("red", "name = \"t\"") + "cpus = [0, 1]\n", &["node \"red\": only a network namespace on a VNI and a virtual machine have workers on several CPUs so far"]),
        (
            tap("red", "name = \"t\"") + "vni = \"lan\"\ncpu = 0\ncpus = [0, 1]\n",
            &["cpus names its CPUs, and cpu one; leave one of the two out"],
        ),
        (
            tap("red", "name = \"t\", queues = 3") + "vni = \"lan\"\ncpus = [0, 1]\n",
            &["queues = 3, and cpus names 2: each gets a queue; leave queues out"],
        ),
        (
            tap("red", "name = \"t\"") + "vni = \"lan\"\ncpus = [0, 1, 2, 3, 4, 5, 6, 7, 8]\n",
            &["cpus names 9 CPUs, and an interface has 8 queues at most; name fewer"],
        ),
        (
            tap("abcdefghijklmnopqrstuvw", "name = \"t\"") + "vni = \"lan\"\ncpus = [0, 1]\n",
            &["called abcdefghijklmnopqrstuvw-1 and so on, and a name has 24 characters at most; give it a shorter one"],
        ),
        (
            tap("blue", "name = \"t\", queues = 2") + "vni = \"lan\"\n" + &queue("red", "blue", "limits = { send = { mbit = 1 } }\n"),
            &["limits is a setting of the whole interface; set it for node \"blue\""],
        ),
        (tap("red", "name = \"t\", queues = 2") + "vni = \"lan\"\nspoof = \"allow\"\n", &["leave spoof out, or give it one queue"]),
    ];
    for (text, parts) in cases {
        let said = parse(text).expect_err(text);
        assert!(parts.iter().all(|part| said.contains(part)), "{text}\n{said}");
        assert_eq!(said.lines().count(), 1, "one sentence: {said}");
    }
}

#[test]
fn the_example_is_read() {
    let config = parse(include_str!("../../../../docs/users/example.toml")).unwrap();
    assert_eq!((config.node.len(), config.nic[0].device.clone()), (2, Device::Sim));
}

#[test]
fn a_node_with_several_cpus_stands_for_one_with_each() {
    let node =
        |more: &str, work: &str| format!("[[node]]\nvni = \"lan\"\npool_kib = 512\n{more}\nwork = {{ {work} }}\n");
    let short = node("name = \"red\"\nmac = \"02:00:00:00:00:01\"\ncpus = [2, 5, 3]", "tap = { name = \"t\" }");
    let long = [
        node("name = \"red\"\nmac = \"02:00:00:00:00:01\"\ncpu = 2", "tap = { name = \"t\", queues = 3 }"),
        node("name = \"red-1\"\ncpu = 5", "queue = { of = \"red\" }"),
        node("name = \"red-2\"\ncpu = 3", "queue = { of = \"red\" }"),
    ];
    let parsed = |text: &str| parse(text).expect("it makes sense").node;
    assert_eq!(parsed(&short), parsed(&long.concat()));
    let machine = |more: &str| node(&format!("name = \"red\"\nspoof = \"check\"\n{more}"), "vm = { socket = \"/s\" }");
    let second = node("name = \"red-1\"\ncpu = 5", "queue = { of = \"red\" }");
    assert_eq!(parsed(&machine("cpus = [2, 5]")), parsed(&(machine("cpu = 2") + &second)));
    let one = node("name = \"red\"\ncpus = [4]", "tap = { name = \"t\" }");
    assert_eq!(parsed(&one), parsed(&node("name = \"red\"\ncpu = 4", "tap = { name = \"t\" }")));
    // What is added by hand is one node.
    let by_hand =
        serde_json::json!({ "name": "red", "vni": "lan", "cpus": [0, 1], "work": { "tap": { "name": "t" } } });
    let by_hand = Config::node_of(&by_hand).expect("it can be read");
    let said = Config { node: vec![by_hand], ..Config::default() }.senseless().expect("it stands for two");
    assert!(said.contains("add a node for each further queue of its interface"), "{said}");
}

#[test]
fn a_cpu_that_is_not_there_is_told_of() {
    let node = |cpu: u32| format!("[[node]]\nname = \"red\"\nwork = \"echo\"\ncpu = {cpu}\n");
    let config = |cpu| toml::from_str::<Config>(&node(cpu)).expect("a configuration");
    assert_eq!(stray_cpu(&config(1), |cpu| cpu < 2), None);
    let said = stray_cpu(&config(99), |cpu| cpu < 2).expect("there are two");
    assert!(said.contains("\"red\"") && said.contains("cpu = 99") && said.contains("lscpu --extended"), "{said}");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let said = Config::read(Path::new("/nowhere/tasuki.toml")).unwrap_err().to_string();
    assert!(said.contains("/nowhere/tasuki.toml cannot be read"), "{said}");
}

/// To compare each node with every other one would make a hundred million labels here.
#[test]
fn ten_thousand_nodes_are_checked_and_the_one_at_fault_is_found() {
    let node = |at: usize, netns: usize| {
        let text = format!(
            "[[node]]\nname = \"n{at}\"\nvni = \"lan\"\nwork = {{ tap = {{ name = \"eth0\", netns = \"box{netns}\" }} }}\n"
        );
        toml::from_str::<Config>(&text).expect("a node").node.remove(0)
    };
    let mut config = Config { node: (0..10_000).map(|at| node(at, at)).collect(), ..Config::default() };
    assert_eq!(config.senseless(), None);
    let before = config.clone();
    config.node.push(node(10_000, 7));
    let said = config.senseless().expect("two have one interface");
    assert!(said.starts_with("node \"n10000\": box7:eth0 is node \"n7\"'s as well"), "{said}");
    assert_eq!(config.senseless_beside(&before).as_ref(), Some(&said));
    assert_eq!(config.senseless_beside(&config), None, "a fault of before keeps no other node away");
}

/// As of a node that an earlier version took, and that is at work.
#[test]
fn a_fault_of_before_hides_no_other_and_stays_the_same_while_nodes_come_and_go() {
    let of = |text: &str| toml::from_str::<Config>(text).expect("it is read");
    let tap = |name: &str, netns: &str, more: &str| {
        format!(
            "[[node]]\nname = \"{name}\"\nvni = \"lan\"\n{more}\nwork = {{ tap = {{ name = \"eth0\", netns = \"{netns}\" }} }}\n"
        )
    };
    let odd = tap("odd", "box", "nice = 5\npool_kib = 1\ntrusts = [\"gone\"]");
    let nic = |name: &str, standby: &str| {
        format!("[[nic]]\nname = \"{name}\"\nnode = \"card\"\nstandby = \"{standby}\"\ndevice = \"sim\"\n")
    };
    let card = format!("[[node]]\nname = \"card\"\nwork = \"sink\"\n{}", nic("n", "lost"));
    let before = of(&format!("{odd}{card}"));
    assert_eq!(before.faults().len(), 4, "{:?}", before.faults());
    let beside = |text: String| of(&text).senseless_beside(&before);
    assert_eq!(beside(format!("{odd}{}{card}", tap("new", "other", ""))), None);
    for (text, fault) in [
        (format!("{}{odd}{card}", tap("new", "box", "")), "node \"odd\": box:eth0 is node \"new\"'s as well"),
        (format!("{odd}{card}{}", nic("o", "lost")), "nic \"o\", standby: there is no node \"lost\", but odd, card"),
        (
            format!("{}{card}", odd.replace("\"gone\"", "\"gone\", \"far\"")),
            "node \"odd\", trusts: there is no node \"far\", but odd, card",
        ),
    ] {
        let said = beside(text).unwrap_or_default();
        assert!(said.starts_with(fault), "{fault}: {said}");
    }
}
