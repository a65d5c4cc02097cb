//! Captures while packets flow, workers are replaced and killed, and a reader stalls; and a check that nothing
//! remains of them afterwards. All but the refusals need root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{ChildStderr, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use rustix::process::Signal;
use tasuki_testing::Program;
use tasuki_testing::process::descriptors;

use super::real;
use super::rig::{NODES, Rig, pid, signal, until};
use super::rooms::{BURST, Exchange, Stream, deaths};
use super::vnis::{DESK, SHOP, World};

/// Longest wait for data of a capture.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// `tasuki capture` into a file.
pub struct Capture {
    program: Program,
    said: BufReader<ChildStderr>,
    file: PathBuf,
}

impl Capture {
    /// Starts a capture and waits until it is under way. It contains all frames from now on.
    pub fn begin(rig: &Rig, file: &str, words: &[&str]) -> Self {
        let file = rig.path(file);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki"));
        command.arg("--dir").arg(rig.dir()).arg("capture").args(words).arg("-w").arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut program = Program::start(&mut command);
        let said = BufReader::new(program.0.stderr.take().expect("it was asked for"));
        let mut capture = Capture { program, said, file };
        let said = capture.line();
        assert!(said.starts_with("tasuki: capturing "), "{said}\n{}", rig.log());
        capture
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("text");
        line
    }

    /// Waits until the capture ends by itself. Returns its messages and its file.
    fn ends(mut self) -> (String, Seen) {
        let said = self.line();
        let status = self.program.0.wait().expect("its end");
        assert!(status.success(), "{said}");
        (said, Seen::read(&fs::read(&self.file).expect("a file")))
    }

    /// Interrupts the capture with ^C, then like [`ends`](Self::ends).
    pub fn end(self) -> (String, Seen) {
        self.program.signal(Signal::INT);
        self.ends()
    }
}

/// A captured frame, as a reader independent of ours parses it.
#[derive(Debug)]
pub struct Frame {
    port: String,
    inbound: bool,
    pub at: Duration,
    len: u32,
    bytes: Vec<u8>,
}

/// Contents of a capture file.
#[derive(Debug, Default)]
pub struct Seen {
    ports: Vec<String>,
    pub frames: Vec<Frame>,
    missed: Vec<u64>,
}

impl Seen {
    fn read(bytes: &[u8]) -> Self {
        let mut reader = PcapNgReader::new(bytes).expect("a capture");
        let mut seen = Seen::default();
        while let Some(block) = reader.next_block() {
            match block.expect("a whole block") {
                Block::InterfaceDescription(port) => {
                    assert!(port.options.contains(&InterfaceDescriptionOption::IfTsResol(9)), "{port:?}");
                    let name = port.options.iter().find_map(|option| match option {
                        InterfaceDescriptionOption::IfName(name) => Some(name.to_string()),
                        _ => None,
                    });
                    seen.ports.push(name.expect("a name"));
                }
                Block::EnhancedPacket(packet) => {
                    let inbound = match packet.options[..] {
                        [EnhancedPacketOption::Flags(flags @ 1..=2)] => flags == 1,
                        ref other => panic!("{other:?}"),
                    };
                    let port = seen.ports[usize::try_from(packet.interface_id).expect("a number")].clone();
                    let (at, len, bytes) = (packet.timestamp, packet.original_len, packet.data.into_owned());
                    seen.frames.push(Frame { port, inbound, at, len, bytes });
                }
                Block::InterfaceStatistics(said) => {
                    seen.missed.extend(said.options.iter().filter_map(|option| match option {
                        InterfaceStatisticsOption::IsbIfDrop(missed) => Some(*missed),
                        _ => None,
                    }));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(seen.missed.len(), seen.ports.len(), "each port is said what became of it, at the end");
        seen
    }

    /// Counts each datagram number of an exchange, by direction.
    fn datagrams(&self) -> [BTreeMap<u64, u32>; 2] {
        const UDP: usize = 14 + 20;
        const LEN: usize = UDP + 8 + 64;
        let mut seen = [BTreeMap::new(), BTreeMap::new()];
        for frame in self.frames.iter().filter(|frame| frame.bytes.len() == LEN && frame.bytes[23] == 17) {
            let number = u64::from_le_bytes(frame.bytes[UDP + 8..][..8].try_into().expect("8 bytes"));
            *seen[usize::from(frame.inbound)].entry(number).or_insert(0) += 1;
        }
        seen
    }
}

/// Returns the numbers of `sent` datagrams that are not in it exactly once, with their counts.
fn not_once(seen: &BTreeMap<u64, u32>, sent: u64) -> Vec<(u64, u32)> {
    assert!(seen.len() as u64 <= sent, "{} of {sent}", seen.len());
    (0..sent).map(|number| (number, seen.get(&number).copied().unwrap_or(0))).filter(|(_, times)| *times != 1).collect()
}

fn is_captured(rig: &Rig, node: &str) -> bool {
    let nodes = rig.json(&["node", "list"]);
    let mut nodes = nodes.as_array().expect("a list").iter();
    nodes.find(|it| it["name"] == node).is_some_and(|it| it["captured"] == true)
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970")
}

#[test]
fn every_frame_is_in_it_with_its_direction_and_through_every_relay() {
    let Some(world) = World::with_both() else { return };
    let began = now();
    let of_node = Capture::begin(&world.rig, "shop.pcapng", &["shop"]);
    let of_port = Capture::begin(&world.rig, "desk.pcapng", &["desk@lan", "--snap", "106"]);
    assert!(is_captured(&world.rig, "shop") && is_captured(&world.rig, "desk"));
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 300);
    for node in ["shop", "desk", "shop"] {
        world.rig.ask(&["worker", "upgrade", node]);
        world.await_pairs();
        exchange.goes_on(&world.rig, 200);
    }
    let tally = exchange.end();
    let [(said, shop), (_, desk)] = [of_node.end(), of_port.end()];
    assert_eq!((tally.back, &shop.missed[..], &desk.missed[..]), (tally.sent, &[0][..], &[0][..]));
    assert_eq!((&shop.ports[..], &desk.ports[..]), (&["shop@lan".to_owned()][..], &["desk@lan".to_owned()][..]));
    for (name, seen) in [("shop", &shop), ("desk", &desk)] {
        for (way, seen) in ["out", "in"].into_iter().zip(seen.datagrams()) {
            let odd = not_once(&seen, tally.sent);
            assert!(odd.is_empty(), "{name}, {way}: {odd:?} of {}\n{}", tally.sent, world.rig.log());
        }
        let ended = now();
        assert!(seen.frames.iter().all(|frame| frame.at >= began && frame.at <= ended), "by the wall's clock");
    }
    assert!(said.contains(&format!("{} frames were captured, and none missed", shop.frames.len())), "{said}");
    // The frame's source address also tells the speaker, independently of the capture's direction.
    let mac = |frame: &Frame| frame.bytes[6..12].to_vec();
    let udp = shop.frames.iter().filter(|frame| frame.bytes[12..14] == [8, 0] && frame.bytes[23] == 17);
    let speakers: BTreeSet<(bool, Vec<u8>)> = udp.map(|frame| (frame.inbound, mac(frame))).collect();
    assert_eq!(speakers.len(), 2, "{speakers:?}");
    until(&world.rig, "nobody looks on", || !is_captured(&world.rig, "shop") && !is_captured(&world.rig, "desk"));
    tshark_agrees(&world.rig, "shop.pcapng", &shop);
    world.end();
}

/// Checks that tshark (Wireshark) parses the file to the same result.
fn tshark_agrees(rig: &Rig, file: &str, seen: &Seen) {
    let mut command = Command::new("tshark");
    command.args(["-n", "-r"]).arg(rig.path(file)).args(["-T", "fields", "-e", "frame.time_epoch"]);
    command.args(["-e", "frame.interface_name", "-e", "frame.packet_flags_direction", "-e", "frame.len"]);
    let Ok(output) = command.env("HOME", rig.dir()).stdin(Stdio::null()).output() else {
        return println!("skipped: what Wireshark reads: needs tshark: apt-get install tshark");
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), seen.frames.len());
    for (line, frame) in lines.iter().zip(&seen.frames) {
        let direction = if frame.inbound { "0x00000001" } else { "0x00000002" };
        let at = format!("{}.{:09}", frame.at.as_secs(), frame.at.subsec_nanos());
        assert_eq!(*line, format!("{at}\t{}\t{direction}\t{}", frame.port, frame.len));
    }
}

#[test]
fn it_goes_on_when_a_worker_is_killed_and_ends_with_the_count() {
    let Some(world) = World::with_both() else { return };
    let all = Capture::begin(&world.rig, "all.pcapng", &["shop"]);
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 200);
    for node in ["shop", "desk"] {
        world.rig.kill_driver(node);
        exchange.goes_on(&world.rig, 200);
    }
    let few = Capture::begin(&world.rig, "few.pcapng", &["shop", "--count", "37", "--snap", "60"]);
    let (said, few) = few.ends();
    assert!(said.contains("37 frames were captured, and none missed"), "{said}");
    assert_eq!(few.frames.len(), 37);
    assert!(few.frames.iter().any(|frame| frame.len == 106), "how long it was is known");
    assert!(few.frames.iter().all(|frame| frame.bytes.len() == 60.min(frame.bytes.len())), "no more is kept");
    let tally = exchange.end();
    let (_, all) = all.end();
    let killed = deaths(&world.rig);
    assert_eq!(killed, 2);
    for seen in all.datagrams() {
        // The dead worker's burst in hand may be missing, and its frames copied but not passed on may come twice.
        let odd = not_once(&seen, tally.sent).len() as u64;
        assert!(odd <= 2 * BURST * killed, "{odd} of {tally:?}");
    }
    world.end();
}

#[test]
fn it_ends_with_the_node_also_where_it_is_of_its_port() {
    let Some(world) = World::with_both() else { return };
    let [of_node, of_port] = ["shop", "shop@lan"].map(|name| Capture::begin(&world.rig, name, &[name]));
    world.rig.ask(&["node", "remove", "shop"]);
    world.rig.await_event("shop is captured no more");
    world.rig.await_event("shop@lan is captured no more");
    for capture in [of_node, of_port] {
        let (said, seen) = capture.ends();
        assert_eq!(&seen.missed[..], &[0], "{said}");
    }
    // The old capture does not continue with a new node of the same name.
    world.add("shop", &world.shop, SHOP, &[]);
    world.await_pairs();
    assert!(!is_captured(&world.rig, "shop"));
    world.end();
}

/// Counts the descriptors of the daemon and of the drivers.
fn look(world: &World) -> [usize; 3] {
    let [shop, desk] = ["shop", "desk"].map(|node| descriptors(pid(&world.rig.await_pair(node).0)));
    [descriptors(world.rig.daemon_pid()), shop, desk]
}

#[test]
fn nothing_is_left_of_it_when_whoever_looked_on_is_killed() {
    let Some(mut world) = World::with_both() else { return };
    let before = look(&world);
    for flows in [true, false] {
        let captures = [("one", "shop"), ("two", "shop"), ("three", "desk@lan")];
        let captures = captures.map(|(file, of)| Capture::begin(&world.rig, file, &[of]));
        let exchange = flows.then(|| world.exchange());
        exchange.iter().for_each(|exchange| exchange.goes_on(&world.rig, 100));
        assert_ne!(look(&world), before);
        // Drop them while frames flow, and while none do.
        captures.into_iter().for_each(drop);
        until(&world.rig, "the daemon knows", || !is_captured(&world.rig, "shop") && !is_captured(&world.rig, "desk"));
        exchange.iter().for_each(|exchange| exchange.goes_on(&world.rig, 100));
        until(&world.rig, "nothing is left", || look(&world) == before);
        let tally = exchange.map(Exchange::end).unwrap_or_default();
        assert_eq!(tally.back, tally.sent, "{tally:?}");
    }
    // A capture does not outlive the daemon; workers notice its end by themselves.
    let mut capture = Capture::begin(&world.rig, "four", &["shop"]);
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 100);
    world.rig.kill_daemon();
    let said = capture.line();
    assert!(said.contains("tasukid hung up") && said.contains("how many were missed is not known"), "{said}");
    exchange.goes_on(&world.rig, 100);
    world.rig.start();
    world.await_pairs();
    until(&world.rig, "nothing is left", || look(&world)[1..] == before[1..]);
    let again = Capture::begin(&world.rig, "five", &["shop", "-c", "5"]);
    assert_eq!(again.ends().1.frames.len(), 5);
    let tally = exchange.end();
    assert_eq!(tally.back, tally.sent, "{tally:?}");
    world.end();
}

/// Requests a capture, and reads only the head of the response.
fn ask_and_sleep(rig: &Rig) -> (UnixStream, u32) {
    let mut stream = UnixStream::connect(rig.dir().join("api.sock")).expect("a daemon");
    stream.set_read_timeout(Some(READ_TIMEOUT)).expect("a limit");
    stream.write_all(b"GET /v1/nodes/shop/capture HTTP/1.1\r\nhost: tasukid\r\n\r\n").expect("room");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("an answer");
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("text");
    assert!(head.contains("200 OK") && head.contains("application/x-pcapng"), "{head}");
    let number = head.lines().find_map(|line| line.strip_prefix("tasuki-capture: ")).expect("a number");
    (stream, number.parse().expect("a number"))
}

#[test]
fn a_capture_ends_well_also_if_nobody_reads_what_it_says() {
    let Some(world) = World::with_both() else { return };
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let file = world.rig.path("unheard.pcapng").display().to_string();
    let mut command = world.rig.command(&["capture", "shop", "-c", "3", "-w", &file]);
    let mut capture = Program::start(command.stdout(Stdio::null()).stderr(writer));
    until(&world.rig, "it is captured", || is_captured(&world.rig, "shop"));
    let exchange = world.exchange();
    assert!(capture.0.wait().expect("its end").success());
    exchange.end();
    world.end();
}

#[test]
fn who_does_not_read_holds_up_nobody_and_learns_how_much_was_missed() {
    let Some(mut world) = World::with_both() else { return };
    let (mut sleeper, number) = ask_and_sleep(&world.rig);
    let stream = Stream::begin(&world.shop, &world.desk, DESK, Duration::ZERO);
    stream.goes_on(&world.rig, 128 << 20);
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 100);
    stream.end();
    let tally = exchange.end();
    assert_eq!(tally.back, tally.sent, "{tally:?}");
    // Another capture works all the same, and the daemon answers.
    let other = Capture::begin(&world.rig, "other", &["shop", "-c", "3"]);
    let pinging = world.exchange();
    assert_eq!(other.ends().1.frames.len(), 3);
    pinging.end();
    let mut ending = UnixStream::connect(world.rig.dir().join("api.sock")).expect("a daemon");
    let request = format!("DELETE /v1/captures/{number} HTTP/1.1\r\nhost: tasukid\r\nconnection: close\r\n\r\n");
    ending.write_all(request.as_bytes()).expect("room");
    let mut said = String::new();
    ending.read_to_string(&mut said).expect("an answer");
    assert!(said.contains("200 OK") && said.contains("the capture of shop ends"), "{said}");
    let mut chunks = Vec::new();
    while !chunks.ends_with(b"0\r\n\r\n") {
        let mut bytes = vec![0; 1 << 16];
        let len = sleeper.read(&mut bytes).expect("what was written");
        if len == 0 {
            break;
        }
        chunks.extend_from_slice(&bytes[..len]);
    }
    let seen = Seen::read(&unchunked(&chunks).expect("all of it"));
    println!("{} frames seen, {:?} missed", seen.frames.len(), seen.missed);
    assert!(seen.missed[0] > 0 && !seen.frames.is_empty());
    until(&world.rig, "it is over", || !is_captured(&world.rig, "shop"));
    // A capture without a reader does not keep the daemon from ending.
    let (_sleeper, _) = ask_and_sleep(&world.rig);
    let stream = Stream::begin(&world.shop, &world.desk, DESK, Duration::ZERO);
    stream.goes_on(&world.rig, 64 << 20);
    signal(world.rig.daemon_pid(), Signal::TERM);
    world.rig.daemon_ends();
    stream.goes_on(&world.rig, 1 << 20);
    stream.end();
    world.rig.start();
    world.end();
}

/// Decodes a body in chunks (RFC 9112, 7.1).
fn unchunked(mut chunks: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let end = chunks.windows(2).position(|two| two == b"\r\n")?;
        let len = usize::from_str_radix(std::str::from_utf8(&chunks[..end]).ok()?, 16).ok()?;
        if len == 0 {
            return Some(whole);
        }
        whole.extend_from_slice(chunks.get(end + 2..end + 2 + len)?);
        chunks = chunks.get(end + 2 + len + 2..)?;
    }
}

/// Returns the number of a frame of the model's source (docs/design/sim.md).
fn number(frame: &Frame) -> Option<u64> {
    let (kind, rest) = frame.bytes.get(12..34)?.split_first_chunk::<6>()?;
    (*kind == [0x88, 0xb5, b't', b's', b'k', 1]).then(|| rest.first_chunk().copied().map(u64::from_le_bytes))?
}

#[test]
fn a_nic_is_seen_whoever_has_it() {
    let Some((mut rig, model)) = real::with_model(NODES, real::ENDLESS, "2000") else { return };
    rig.start();
    rig.await_pair("red");
    let of_nic = Capture::begin(&rig, "eth0.pcapng", &["eth0"]);
    let of_red = Capture::begin(&rig, "red.pcapng", &["red"]);
    until(&rig, "frames flow", || real::moves(&rig) > 0);
    rig.ask(&["worker", "upgrade", "red"]);
    rig.await_pair("red");
    rig.ask(&["worker", "upgrade", "red", "--state", "store"]);
    rig.await_pair("red");
    rig.ask(&["nic", "give", "eth0", "--to", "blue", "--method", "keep"]);
    rig.await_pair("blue");
    assert!(is_captured(&rig, "blue") && !is_captured(&rig, "red"), "what red had is blue's");
    rig.ask(&["nic", "give", "eth0", "--to", "red", "--method", "repoint"]);
    rig.await_pair("red");
    model.finish();
    real::until_quiet(&rig);
    let [(_, eth0), (_, red)] = [of_nic.end(), of_red.end()];
    let said = real::stop(&mut rig, model);
    let lost = said.contains("lost 0");
    let count = said.split_once("sent ").and_then(|(_, rest)| rest.split(',').next()?.parse::<u64>().ok());
    let frames = count.expect("a count");
    assert_eq!(
        (&eth0.ports[..], &red.ports[..], &eth0.missed[..]),
        (&["eth0".to_owned()][..], &["eth0".to_owned()][..], &[0][..])
    );
    let numbers = |seen: &Seen, inbound: bool| {
        let mut numbers: BTreeMap<u64, u32> = BTreeMap::new();
        let frames = seen.frames.iter().filter(|frame| frame.inbound == inbound);
        frames.filter_map(number).for_each(|number| *numbers.entry(number).or_default() += 1);
        numbers
    };
    // The source began before the capture did.
    let [came, went] = [true, false].map(|inbound| numbers(&eth0, inbound));
    let first = *came.keys().next().expect("frames");
    assert_eq!(went.values().max(), Some(&1), "what goes goes once");
    if lost {
        assert_eq!(went.len() as u64, frames - *went.keys().next().expect("frames"), "from {first} on\n{said}");
        assert!((first..frames).all(|number| came.contains_key(&number)), "{} of {frames}", came.len());
    }
    let of_red = numbers(&red, true).len();
    assert!(
        of_red > 0 && of_red < came.len(),
        "{of_red} of {}: what passed while it was blue's is not red's",
        came.len()
    );
}

#[test]
fn what_cannot_be_captured_is_refused_with_a_sentence() {
    let rig = Rig::new();
    rig.await_pair("red");
    for (words, parts) in [
        (&["capture", "nobody"][..], &["there is no node and no NIC \"nobody\"", "red", "eth0"][..]),
        (&["capture", "red", "--nic"], &["there is no NIC \"red\"; there are: eth0\n"]),
        (&["capture", "green"], &["node green has no NIC and is on no VNI"]),
        (&["capture", "red", "-w", "/nowhere/at/all"], &["/nowhere/at/all cannot be written"]),
    ] {
        let said = rig.tasuki(words);
        let said = (said.status.code(), String::from_utf8_lossy(&said.stderr).into_owned());
        assert!(said.0 == Some(1) && parts.iter().all(|part| said.1.contains(part)), "{words:?}: {said:?}");
    }
    until(&rig, "nothing is left of it", || !is_captured(&rig, "red"));
}
