//! Random operations, several at once: commands, files, deaths, and things that others take away. Each round ends with
//! a mend, after which all is as the file has it. Bystanders notice nothing.
//!
//! The suite runs one short round; `cargo xtask campaign operations` runs them for minutes (`TASUKI_MINUTES`) or for a
//! number of rounds (`TASUKI_ROUNDS`). Some rounds make a world, with a seed of its own: `TASUKI_SEED` begins with it.

mod bystanders;
mod file;
mod machine;
mod world;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::json;
use tasuki_control::housekeeping_cpus;
use tasuki_testing::{Dice, PATIENCE};

use file::File;
use world::World;

use super::rooms::is_impossible;
use super::storm::{self, need_storm};
use super::times::{asked, record};

/// Number of rounds in a world, before it is taken down and checked for remains.
const ROUNDS: usize = 8;
/// Longest time for the daemon to begin or to end, and for anything to go that is about to.
const DAEMON_MAX: Duration = PATIENCE;
/// Number of operations in the suite's round.
const FEW: usize = 4;

/// One operation.
#[derive(Debug, Clone)]
pub enum Operation {
    /// A command.
    Ask(String),
    /// A command that is killed after so many milliseconds.
    Cut(u64, String),
    /// `apply` or `plan`, with a variant of the file.
    File(&'static str, File),
    /// The daemon's file changes, and it is told so.
    Hangup(File),
    /// The daemon's file is written in two steps. Between them this happens.
    Half(&'static str, File, usize),
    /// A capture that ends after so many milliseconds by this signal.
    Capture(String, u64, &'static str),
    /// Workers of a node (those that drive, stand by, or all) are killed.
    Kill(String, &'static str),
    /// They stand still for so many milliseconds.
    Stop(String, &'static str, u64),
    /// The daemon ends by this signal; the next one begins after so many milliseconds, perhaps with another file.
    Daemon(&'static str, u64, Option<File>),
    /// The keeper is killed.
    Keeper,
    /// The daemon, the keeper or a card stands still for so many milliseconds.
    Freeze(&'static str, u64),
    /// A socket of a node is deleted.
    Unlink(&'static str),
    /// A card is pulled out; the next one is there after so many milliseconds.
    Card(usize, u64),
    /// A namespace loses its name, and one of this name is made after so many milliseconds.
    Room(&'static str, u64),
    /// `ip link del` or `set down` in a namespace.
    Link(&'static str, &'static str, &'static str),
    /// Programs of a namespace ask a node at this host number for so many milliseconds, as fast as they can.
    Talk(&'static str, u8, u64),
    /// All that the API shows.
    Look,
    /// A stranger connects at a node's socket, and says something odd.
    Knock(&'static str),
}

/// The chance of an operation, as a weight, and the function that draws one.
type Row = (usize, fn(&mut Draw) -> Operation);

/// All operations.
const TABLE: &[Row] = &[
    (6, |draw| Operation::Ask(draw.remove())),
    (7, |draw| Operation::Ask(draw.add())),
    (10, |draw| Operation::Ask(draw.give())),
    (9, |draw| Operation::Ask(draw.upgrade())),
    (5, |draw| Operation::Ask(draw.stage())),
    (2, |draw| Operation::Ask(format!("worker unstage {}", draw.node()))),
    (2, |draw| Operation::Ask(draw.upgrade_all())),
    (3, |draw| Operation::Ask(draw.standby())),
    (1, |draw| Operation::Ask(format!("config show --to {}/shown.toml", draw.folder))),
    (9, |draw| Operation::File("apply", draw.file())),
    (3, |draw| Operation::File("plan", draw.file())),
    (4, |draw| Operation::Hangup(draw.file())),
    (2, |draw| Operation::Half(draw.of(&["hangup", "apply", "daemon"]), draw.file(), draw.dice.below(1000))),
    (4, |draw| {
        let of = if draw.dice.once_in(2) { draw.node() } else { draw.nic() };
        Operation::Capture(of, draw.ms(&[300, 1000, 3000]), draw.of(&["INT", "KILL"]))
    }),
    (10, |draw| Operation::Kill(draw.node(), draw.of(&["drives", "stands by", "all"]))),
    (4, |draw| Operation::Stop(draw.node(), draw.of(&["drives", "stands by"]), draw.ms(&[100, 500, 5500]))),
    (5, |draw| {
        let other = draw.dice.once_in(3).then(|| draw.file());
        Operation::Daemon(draw.of(&["KILL", "TERM", "INT"]), draw.ms(&[0, 300, 1500]), other)
    }),
    (2, |_| Operation::Keeper),
    (3, |draw| Operation::Freeze(draw.of(&["daemon", "keeper", "card"]), draw.ms(&[100, 500, 3000]))),
    (2, |draw| Operation::Unlink(draw.of(&["m1.sock", "v1.sock"]))),
    (2, |draw| Operation::Card(draw.dice.below(3), draw.ms(&[0, 200, 1000]))),
    (2, |draw| Operation::Room(draw.of(&["a", "b", "c", "d", "w"]), draw.ms(&[0, 500]))),
    (3, |draw| Operation::Link(draw.of(&["a", "b", "c", "d"]), draw.of(&["lan", "lan", "l2"]), "del")),
    (2, |_| Operation::Link("v", "w1", "del")),
    (2, |draw| {
        let (room, name) = *draw.dice.pick(&[("a", "lan"), ("b", "lan"), ("w", "w0"), ("v", "w1")]);
        Operation::Link(room, name, "down")
    }),
    (8, |draw| {
        let to = *draw.dice.pick(&[1, 2, 3, 77, 60, 50, 4]);
        Operation::Talk(draw.of(&["a", "b", "c"]), to, draw.ms(&[300, 1000, 3000]))
    }),
    (3, |_| Operation::Look),
    (2, |draw| Operation::Knock(draw.of(&["m1", "v1", "h", "hv"]))),
    (4, |draw| {
        let words = match draw.dice.below(6) {
            0 => draw.remove(),
            1 => draw.add(),
            2 => draw.give(),
            3 => draw.upgrade(),
            4 => draw.stage(),
            _ => draw.upgrade_all(),
        };
        Operation::Cut(draw.ms(&[5, 20, 100]), words)
    }),
];

/// Draws operations for a world.
struct Draw<'a> {
    dice: Dice,
    base: &'a File,
    rooms: &'a str,
    folder: &'a str,
    /// Whether each time is the shortest.
    is_brief: bool,
}

impl Draw<'_> {
    fn next(&mut self) -> Operation {
        let mut left = self.dice.below(TABLE.iter().map(|(weight, _)| weight).sum());
        let row = TABLE.iter().find(|(weight, _)| {
            let is_it = left < *weight;
            left = left.saturating_sub(*weight);
            is_it
        });
        row.expect("below the sum").1(self)
    }

    fn of(&mut self, words: &[&'static str]) -> &'static str {
        words[self.dice.below(words.len())]
    }

    fn ms(&mut self, times: &[u64]) -> u64 {
        if self.is_brief { times[0] } else { *self.dice.pick(times) }
    }

    fn node(&mut self) -> String {
        (*self.dice.pick(&self.base.nodes())).to_owned()
    }

    fn nic(&mut self) -> String {
        (*self.dice.pick(&self.base.names("nic"))).to_owned()
    }

    fn file(&mut self) -> File {
        self.base.variant(&mut self.dice)
    }

    fn hand_made(&mut self) -> String {
        self.of(&["h1", "h2", "h3"]).to_owned()
    }

    fn remove(&mut self) -> String {
        let node = if self.dice.once_in(2) { self.hand_made() } else { self.node() };
        format!("node remove {node}")
    }

    fn add(&mut self) -> String {
        let node = if self.dice.once_in(6) { self.node() } else { self.hand_made() };
        let (rooms, folder) = (self.rooms, self.folder);
        let way = match self.dice.below(10) {
            0 => "--native --work echo".to_owned(),
            1 => "--native --work answer --address 198.51.100.88".to_owned(),
            2 => format!("--netns {rooms}d --address 198.51.100.4/24"),
            3 => format!("--netns {rooms}d --interface l2 --address 198.51.100.5/24 --send-mbit 50"),
            4 => format!("--memif {folder}/h.sock"),
            5 => format!("--vm {folder}/hv.sock"),
            6 => format!("--link {rooms}w:w0"),
            7 => format!("--netns {rooms}d --queues 2 --address 198.51.100.4/24 --cpu {}", self.base.cpus[0]),
            8 => format!("--queue-of {} --cpu {}", self.of(&["h1", "h2", "c"]), self.base.cpus[1]),
            _ => format!("--netns {rooms}d --no-shortcut --vni lan2"),
        };
        format!("node add {node} {way}")
    }

    fn give(&mut self) -> String {
        let mut words =
            format!("nic give {} --to {}", self.nic(), self.of(&["red", "blue", "green", "red", "blue", "a"]));
        let ways = [
            ("method", &["keep", "mbb", "repoint", "cold"][..]),
            ("inflight", &["deliver", "drop"]),
            ("state", &["place", "store"]),
        ];
        for (number, (option, values)) in ways.into_iter().enumerate() {
            if self.dice.once_in(2 + number) {
                words += &format!(" --{option} {}", self.of(values));
            }
        }
        words
    }

    /// Returns an option that names another program, or the usual one, or nothing.
    fn with(&mut self, of: &str) -> String {
        match self.dice.below(4) {
            0 => format!(" --with {}/other{of}", self.folder),
            1 if self.dice.once_in(3) && !of.is_empty() => " --with /bin/true".to_owned(),
            1 => format!(" --with {}{of}", world::programs().display()),
            _ => String::new(),
        }
    }

    fn upgrade(&mut self) -> String {
        let state = if self.dice.once_in(3) { " --state store" } else { "" };
        format!("worker upgrade {}{}{state}", self.node(), self.with("/tasuki-worker"))
    }

    fn stage(&mut self) -> String {
        format!("worker stage {}{}", self.node(), self.with("/tasuki-worker"))
    }

    fn upgrade_all(&mut self) -> String {
        if self.dice.once_in(4) { "upgrade --workers-only".to_owned() } else { format!("upgrade{}", self.with("")) }
    }

    fn standby(&mut self) -> String {
        let way = *self.dice.pick(&["--node red", "--node blue", "--node green", "--none"]);
        format!("nic standby {} {way}", self.nic())
    }
}

/// Returns whether an operation may replace tasukid and all workers.
fn replaces(operation: &Operation) -> bool {
    match operation {
        Operation::Ask(words) | Operation::Cut(_, words) => words.starts_with("upgrade"),
        _ => false,
    }
}

/// Returns whether this is so in time.
fn within(mut is_so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + DAEMON_MAX;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs operations in some threads, until all are done.
fn run(world: &World, operations: Vec<(Duration, Operation)>, threads: usize) {
    let left = Mutex::new(operations.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((after, operation)) = { left.lock().expect("no panic").next() } {
                    std::thread::sleep(after);
                    world.run(&operation);
                }
            });
        }
    });
}

/// Observations of a campaign.
#[derive(Default)]
struct Seen {
    worlds: usize,
    rounds: usize,
    operations: BTreeMap<String, usize>,
    counted: Vec<String>,
    wrong: Vec<String>,
}

/// Runs rounds in a world of this seed, until one shows something wrong or `goes_on` says no.
fn rounds(seed: u64, few: bool, cpus: [u32; 2], seen: &mut Seen, goes_on: impl Fn(usize) -> bool) {
    println!("operations: a world with TASUKI_SEED={seed}");
    let mut dice = Dice::of(seed);
    let mut world = World::new(&mut dice, few, cpus);
    let begins = Instant::now();
    let mut wrong = world.begin(few);
    println!("operations: its begin took {:.1?}", begins.elapsed());
    let mut number = 0;
    if !wrong.is_empty() {
        println!("operations: wrong at the beginning of TASUKI_SEED={seed}: {wrong:#?}");
        seen.rounds += 1;
    }
    while wrong.is_empty() && number < ROUNDS && goes_on(seen.rounds) {
        let (base, rooms, folder) = (world.file().clone(), world.rooms.clone(), world.folder());
        let (dice, is_brief) = (Dice::of(dice.next()), few);
        let mut draw = Draw { dice, base: &base, rooms: &rooms, folder: &folder, is_brief };
        let count = if few { FEW } else { 7 + draw.dice.below(12) };
        let mut next = |_| (Duration::from_millis(draw.ms(&[0, 0, 10, 50, 200, 600])), draw.next());
        let mut operations: Vec<_> = (0..count).map(&mut next).collect();
        let replaced = operations.iter().any(|(_, operation)| replaces(operation));
        // As if both died together: without a keeper, the next tasukid ends workers.
        let is_of_keeper = |it: &Operation| matches!(it, Operation::Keeper | Operation::Freeze("keeper", _));
        operations.retain(|(_, operation)| !replaced || !is_of_keeper(operation));
        let threads = 2 + draw.dice.below(3);
        for (_, operation) in &operations {
            let shown = format!("{operation:?}");
            let kind = shown.split(['(', ' ']).next().unwrap_or_default();
            *seen.operations.entry(kind.to_owned()).or_default() += 1;
        }
        let begun = Instant::now();
        run(&world, operations.clone(), threads);
        wrong = world.mend_and_check(replaced);
        println!("operations: round {number} took {:.1?}: {}", begun.elapsed(), world.sizes());
        if !wrong.is_empty() {
            println!("operations: wrong after round {number} of TASUKI_SEED={seed}, {threads} at once: {wrong:#?}");
            operations.iter().for_each(|(after, operation)| println!("  {after:?} {operation:?}"));
        }
        (number, seen.rounds) = (number + 1, seen.rounds + 1);
    }
    let show = |world: &World| println!("all that was done, and the log:\n{}\n{}", world.history(), world.rig.log());
    if !wrong.is_empty() {
        show(&world);
    }
    let ends = Instant::now();
    let (counted, at_end) = world.end(!wrong.is_empty());
    println!("operations: its end took {:.1?}", ends.elapsed());
    if !at_end.is_empty() {
        println!("operations: wrong at the end: {at_end:#?}");
        show(&world);
    }
    let place = |it| format!("TASUKI_SEED={seed}, after {number} rounds: {it}");
    seen.wrong.extend(wrong.into_iter().chain(at_end).map(place));
    seen.counted.extend(counted);
    seen.worlds += 1;
}

#[test]
fn after_random_operations_all_is_as_the_file_has_it_and_bystanders_noticed_nothing() {
    need_storm!();
    if let Some(why) = is_impossible() {
        return println!("skipped: {why}");
    }
    let [first, second, ..] = housekeeping_cpus::usable()[..] else { return println!("skipped: needs two CPUs") };
    let _one = storm::alone();
    let mut seen = Seen::default();
    let seed = std::env::var("TASUKI_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut seed = seed.unwrap_or_else(|| Dice::new("operations").next());
    let (minutes, most) = (asked("TASUKI_MINUTES"), asked("TASUKI_ROUNDS"));
    let few = minutes.or(most).is_none();
    let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes as u64));
    let most = most.unwrap_or(if few { 1 } else { usize::MAX });
    let goes_on = |rounds| rounds < most && until.is_none_or(|until| Instant::now() < until);
    while goes_on(seen.rounds) {
        rounds(seed, few, [first, second], &mut seen, goes_on);
        seed = seed.wrapping_add(1);
    }
    record(&json!({
        "worlds": seen.worlds,
        "rounds": seen.rounds,
        "operations": seen.operations,
        "bystanders": seen.counted,
        "wrong": seen.wrong,
    }));
    assert!(seen.wrong.is_empty(), "{:#?}", seen.wrong);
}
