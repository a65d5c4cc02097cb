//! The configuration file to which a world returns after each round, and random variants of it.

use std::fmt;

use tasuki_testing::Dice;

/// Name of the second queue's node of `c`.
pub const SECOND_QUEUE: &str = "c-1";

/// A node or a NIC: its settings, each with its value in TOML.
#[derive(Clone)]
struct Entry {
    kind: &'static str,
    settings: Vec<(&'static str, String)>,
}

impl Entry {
    fn new(kind: &'static str, name: &str, settings: &[(&'static str, &str)]) -> Self {
        let mut entry = Entry { kind, settings: vec![("name", format!("{name:?}"))] };
        settings.iter().for_each(|(key, value)| entry.set(key, value));
        entry
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.settings.iter().find(|(its, _)| *its == key).map(|(_, value)| value.trim_matches('"'))
    }

    fn name(&self) -> &str {
        self.get("name").unwrap_or_default()
    }

    fn set(&mut self, key: &'static str, value: &str) {
        self.unset(key);
        self.settings.push((key, value.to_owned()));
    }

    fn unset(&mut self, key: &str) {
        self.settings.retain(|(its, _)| *its != key);
    }

    fn is_tap(&self) -> bool {
        self.get("work").is_some_and(|work| work.contains("tap = "))
    }
}

/// A configuration file. The part about bystanders is the same in all of them.
#[derive(Clone)]
pub struct File {
    bystanders: String,
    entries: Vec<Entry>,
    /// Two processors on which the daemon may run.
    pub cpus: [u32; 2],
    /// How it differs from the file that a world returns to.
    changes: Vec<String>,
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "file with {:?}", self.changes)
    }
}

impl File {
    /// Makes the file of a world, with this part about bystanders. Namespaces begin with `rooms`, and sockets lie in
    /// `folder`.
    pub fn new(dice: &mut Dice, bystanders: String, rooms: &str, folder: &str, cpus: [u32; 2]) -> Self {
        let tap = |node: &str, host: u8| {
            let tap = format!("netns = \"{rooms}{node}\", name = \"lan\", address = \"198.51.100.{host}/24\"");
            format!("{{ tap = {{ {tap} }} }}")
        };
        let on_lan = |name: &str, work: &str| Entry::new("node", name, &[("vni", "\"lan\""), ("work", work)]);
        let mut a = on_lan("a", &tap("a", 1));
        let mut b = on_lan("b", &tap("b", 2));
        b.set("limits", "{ send = { mbit = 100 }, receive = { mbit = 1000 } }");
        if dice.once_in(3) {
            a.set("bounds", "{ memory_mib = 512, pids = 64 }");
        }
        let mut entries = vec![a, b];
        if !dice.once_in(3) {
            let mut c = on_lan("c", &tap("c", 3));
            c.set("cpus", &format!("{cpus:?}"));
            entries.push(c);
        }
        let others = [
            ("w", format!("{{ interface = {{ name = \"w0\", netns = \"{rooms}w\" }} }}")),
            ("ans", "{ answer = { address = \"198.51.100.77\" } }".to_owned()),
            ("m1", format!("{{ memif = {{ socket = \"{folder}/m1.sock\" }} }}")),
            ("v1", format!("{{ vm = {{ socket = \"{folder}/v1.sock\" }} }}")),
        ];
        entries.extend(others.iter().filter(|_| dice.once_in(2)).map(|(name, work)| on_lan(name, work)));
        let trust = dice.once_in(2);
        for (name, other) in [("red", "blue"), ("blue", "red")] {
            let trusts = if trust { format!("[{other:?}]") } else { "[]".to_owned() };
            entries.push(Entry::new("node", name, &[("work", "\"echo\""), ("trusts", &trusts)]));
        }
        if dice.once_in(2) {
            entries.push(Entry::new("node", "green", &[("work", "\"echo\"")]));
        }
        let nic = |number: usize, node: &str| {
            let device = format!("\"vfio-user:{folder}/c{number}.sock\"");
            let settings = [("device", &*device), ("node", &format!("{node:?}"))];
            Entry::new("nic", &format!("eth{number}"), &settings)
        };
        let mut eth0 = nic(0, "red");
        if dice.once_in(2) {
            eth0.set("standby", "\"blue\"");
        }
        let mut nics = vec![eth0];
        if !dice.once_in(3) {
            nics.push(nic(1, if dice.once_in(2) { "red" } else { "blue" }));
        }
        if dice.once_in(2) {
            entries.push(on_lan("up", "\"uplink\""));
            nics.push(nic(2, "up"));
        }
        entries.extend(nics);
        File { bystanders, entries, cpus, changes: Vec::new() }
    }

    /// Returns the names of all entries of a kind, without bystanders.
    pub fn names(&self, kind: &str) -> Vec<&str> {
        self.entries.iter().filter(|entry| entry.kind == kind).map(Entry::name).collect()
    }

    /// Returns whether it has this node or NIC.
    pub fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| entry.name() == name)
    }

    /// Returns the names of all nodes, also of queues, without bystanders.
    pub fn nodes(&self) -> Vec<&str> {
        let mut nodes = self.names("node");
        nodes.extend(self.has("c").then_some(SECOND_QUEUE));
        nodes
    }

    /// Returns the same without NICs, and without the node that needs one.
    pub fn without_nics(&self) -> Self {
        let mut file = self.clone();
        file.entries.retain(|entry| entry.kind == "node" && entry.name() != "up");
        file
    }

    /// Returns the text.
    pub fn text(&self) -> String {
        let mut text = self.bystanders.clone();
        for entry in &self.entries {
            text += &format!("\n[[{}]]\n", entry.kind);
            entry.settings.iter().for_each(|(key, value)| text += &format!("{key} = {value}\n"));
        }
        text
    }

    /// Returns the text without its end, as a reader sees it while it is written. The bystanders are in it.
    pub fn half(&self, thousandths: usize) -> String {
        let (text, whole) = (self.text(), self.bystanders.len());
        text[..whole + (text.len() - whole) * thousandths / 1000].to_owned()
    }

    /// Returns a file with some changes.
    pub fn variant(&self, dice: &mut Dice) -> Self {
        let mut file = self.clone();
        for _ in 0..=dice.below(4) {
            file.change(dice);
        }
        file
    }

    /// Returns a random entry that `is_one`.
    fn pick(&mut self, dice: &mut Dice, is_one: impl Fn(&Entry) -> bool) -> Option<&mut Entry> {
        let mut those: Vec<_> = self.entries.iter_mut().filter(|entry| is_one(entry)).collect();
        if those.is_empty() {
            return None;
        }
        let at = dice.below(those.len());
        Some(those.swap_remove(at))
    }

    fn change(&mut self, dice: &mut Dice) {
        let is_node = |entry: &Entry| entry.kind == "node";
        let is_on_vni = |entry: &Entry| entry.get("vni").is_some();
        let is_nic = |entry: &Entry| entry.kind == "nic" && entry.name() != "eth2";
        let is_echo = |entry: &Entry| entry.get("work") == Some("echo") && entry.get("vni").is_none();
        let echoes: Vec<String> = self.entries.iter().filter(|it| is_echo(it)).map(|it| it.name().to_owned()).collect();
        let is_in = |names: &'static [&'static str]| move |entry: &Entry| names.contains(&entry.name());
        // The setting, its value (none: the setting goes), and the entry that it is for.
        let (key, value, entry) = match dice.below(23) {
            0 => {
                let Some(name) = self.pick(dice, |_| true).map(|entry| entry.name().to_owned()) else { return };
                return self.remove(&name);
            }
            1 if !self.has("x1") => {
                let vni = *dice.pick(&["\"lan\"", "\"lan2\""]);
                self.changes.push(format!("x1 on {vni}"));
                return self.entries.push(Entry::new("node", "x1", &[("vni", vni), ("work", "\"echo\"")]));
            }
            2 => {
                let (way, of) = (dice.pick(&["send", "receive"]), dice.pick(&["mbit", "kpps"]));
                let limits = format!("{{ {way} = {{ {of} = {} }} }}", dice.pick(&[5, 20, 200, 1000]));
                ("limits", (!dice.once_in(3)).then_some(limits), self.pick(dice, Entry::is_tap))
            }
            3 => {
                let cpu = dice.pick(&self.cpus).to_string();
                ("cpu", Some(cpu), self.pick(dice, |it| is_node(it) && it.get("cpus").is_none()))
            }
            4 => {
                let Some(entry) = self.pick(dice, is_in(&["red", "blue"])) else { return };
                let other = if entry.name() == "red" { "blue" } else { "red" };
                let trusts = if dice.once_in(2) || !echoes.iter().any(|it| it == other) {
                    "[]".to_owned()
                } else {
                    format!("[{other:?}]")
                };
                ("trusts", Some(trusts), Some(entry))
            }
            5 if !echoes.is_empty() => {
                let node = dice.pick(&echoes).clone();
                let entry = self.pick(dice, is_nic);
                ("node", Some(format!("{node:?}")), entry.filter(|nic| nic.get("standby") != Some(&node)))
            }
            6 if !echoes.is_empty() => {
                let node = dice.pick(&echoes).clone();
                let entry = self.pick(dice, is_nic).filter(|nic| nic.get("node") != Some(&node));
                ("standby", (!dice.once_in(3)).then(|| format!("{node:?}")), entry)
            }
            number @ 7..=10 => {
                let Some(entry) = self.pick(dice, Entry::is_tap) else { return };
                let work = entry.get("work").unwrap_or_default().to_owned();
                let work = match number {
                    7 => work.replace(" } }", &format!(", mtu = {} }} }}", dice.pick(&[1400, 1500, 9000]))),
                    8 => work.replace(" } }", ", shortcut = false } }"),
                    9 => work.replace("\"lan\"", "\"lan9\""),
                    _ => work.replace("/24\"", "/25\""),
                };
                // A setting that is there twice is an error, and the file as a whole is refused.
                ("work", Some(work), Some(entry))
            }
            11 => {
                let bounds = format!("{{ memory_mib = {}, pids = {} }}", dice.pick(&[256, 512]), dice.pick(&[32, 64]));
                ("bounds", Some(bounds), self.pick(dice, is_node))
            }
            12 => ("latency_us", Some(dice.pick(&["0", "100"]).to_string()), self.pick(dice, is_on_vni)),
            13 => ("nice", Some(dice.pick(&["0", "-5"]).to_string()), self.pick(dice, is_node)),
            14 => ("spoof", Some("\"allow\"".to_owned()), self.pick(dice, is_on_vni)),
            15 => ("pool_kib", Some("1024".to_owned()), self.pick(dice, is_on_vni)),
            16 => ("ring", Some("512".to_owned()), self.pick(dice, is_nic)),
            17 => {
                let [first, second] = self.cpus;
                ("cpus", dice.once_in(2).then(|| format!("[{second}, {first}]")), self.pick(dice, is_in(&["c"])))
            }
            18 => ("vni", Some("\"lan2\"".to_owned()), self.pick(dice, is_on_vni)),
            19 => ("mac", Some("\"02:00:00:00:00:41\"".to_owned()), self.pick(dice, is_on_vni)),
            20 => ("name", Some("\"other\"".to_owned()), self.pick(dice, |it| is_on_vni(it) && it.name() != "up")),
            21 => {
                let is_one = |it: &&mut Entry| is_on_vni(it) && it.name() != "up";
                let mut those: Vec<_> = self.entries.iter_mut().filter(is_one).collect();
                if those.len() < 2 {
                    return;
                }
                let one = those.swap_remove(dice.below(those.len()));
                let other = those.swap_remove(dice.below(those.len()));
                let names = [one.name(), other.name()].map(|name| format!("{name:?}"));
                one.set("name", &names[1]);
                other.set("name", &names[0]);
                return self.changes.push(format!("{} and {} swap their names", names[0], names[1]));
            }
            _ => ("standby", Some("false".to_owned()), self.pick(dice, |it| is_node(it) && it.name() != "up")),
        };
        let Some(entry) = entry else { return };
        match &value {
            Some(value) => entry.set(key, value),
            None => entry.unset(key),
        }
        let change = format!("{} {key} = {}", entry.name(), value.as_deref().unwrap_or("-"));
        self.changes.push(change);
    }

    /// Removes a node or a NIC, and all that names it.
    fn remove(&mut self, name: &str) {
        self.changes.push(format!("without {name}"));
        let needs = if name == "eth2" { "up" } else { name };
        self.entries.retain(|entry| ![name, needs].contains(&entry.name()) && entry.get("node") != Some(name));
        for entry in &mut self.entries {
            if entry.get("standby") == Some(name) {
                entry.unset("standby");
            }
            if entry.get("trusts").is_some_and(|trusts| trusts.contains(&format!("{name:?}"))) {
                entry.set("trusts", "[]");
            }
        }
    }
}
