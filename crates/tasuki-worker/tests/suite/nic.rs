//! `nic probe` and `nic run` as a user runs them: real processes, the model beside them, and checks that nothing is
//! left behind.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tasuki_sim::vfio_user::{CONFIG, Device, DmaMemory, Region, Server, Turn};
use tasuki_testing::{PATIENCE, process, until};

use crate::programs::{Model, Program, children_of, folder, frames_of, need_model, number, worker};

/// Starts the worker, with an empty folder for its temporary files.
fn run(words: &[&str], own: &Path) -> Program {
    Program::start(worker().args(words).env("TMPDIR", own))
}

fn is_empty(folder: &Path) -> bool {
    folder.read_dir().expect("the folder").next().is_none()
}

/// Returns a count of the card from a summary.
fn count(said: &str, name: &str) -> Option<u64> {
    let words = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.into_iter().find(|words| words.first() == Some(&name))?.get(1)?.parse().ok()
}

#[test]
fn probe_says_what_the_model_is() {
    need_model!();
    let own = folder();
    let ended = run(&["probe", "sim"], own.path()).end();
    assert_eq!((ended.code, ended.errors.as_str()), (Some(0), ""));
    let lines: Vec<_> = ended.said.lines().collect();
    assert_eq!(
        lines,
        [
            "card      8086:10d3 (Intel 82574L, e1000e), class 020000",
            "BAR 0     memory, 32-bit",
            "BAR 3     memory, 32-bit",
            "address   02:00:00:74:00:01",
            "link      up, 1000 Mb/s, full duplex",
        ]
    );
    assert!(is_empty(own.path()), "nothing is left behind");
}

#[test]
fn a_source_on_the_model_sends_as_many_as_it_was_told() {
    need_model!();
    let own = folder();
    let ended = run(&["run", "sim", "--source", "--count", "300", "--size", "100"], own.path()).end();
    assert_eq!((ended.code, ended.errors.as_str()), (Some(0), ""));
    assert!(ended.said.contains("sent     300 frames, 30000 bytes"), "{}", ended.said);
    assert_eq!(count(&ended.said, "tx_packets"), Some(300), "more than the ring holds, and the card has sent them all");
    assert!(is_empty(own.path()), "nothing is left behind");
    // The model confirms that they were sent.
    let file = own.path().join("frames.pcap");
    let words = ["--link-up", "10", "--pcap", file.to_str().expect("UTF-8")];
    let mut model = Model::start(own.path(), &words);
    let device = format!("vfio-user:{}", model.socket.display());
    let ended = run(&["run", &device, "--source", "--count", "300", "--rate", "3000"], own.path()).end();
    assert_eq!((ended.code, ended.errors.as_str()), (Some(0), ""));
    model.program.signal(Signal::INT);
    let ended = model.program.end();
    assert_eq!((ended.code, ended.errors.as_str()), (Some(0), ""));
    // The frames on the wire include the PAUSE frame of a card that is parked.
    let numbers: Vec<_> = frames_of(&file).iter().filter_map(|frame| number(frame)).collect();
    assert_eq!(numbers, (0..300).collect::<Vec<_>>(), "{}", ended.said);
    assert!(!model.socket.exists());
}

#[test]
fn an_echo_sends_back_all_that_a_source_sends() {
    need_model!();
    let place = folder();
    // 500 frames arrive while the driver does not run for a second: the ring holds them.
    let model = Model::start(place.path(), &["--source", "1500", "--rate", "500", "--link-up", "10"]);
    let device = format!("vfio-user:{}", model.socket.display());
    let ended = run(&["run", &device, "--echo", "--count", "1500", "--ring", "1024"], place.path()).end();
    assert_eq!((ended.code, ended.errors.as_str()), (Some(0), ""));
    assert!(
        ended.said.contains("received 1500 frames") && ended.said.contains("sent     1500 frames"),
        "{}",
        ended.said
    );
    assert!(ended.said.contains("numbered 1500 frames: 0 missing, 0 late or twice"), "{}", ended.said);
    let model = model.program.end();
    assert_eq!((model.code, model.errors.as_str()), (Some(0), ""));
    assert!(model.said.contains("sent 1500, came back 1500, lost 0"), "{}", model.said);
    assert!(model.said.contains("twice 0, out of order 0, damaged 0, from others 0"), "{}", model.said);
    assert!(!model.said.contains("must not"), "a start is no offence: {}", model.said);
    assert!(is_empty(place.path()), "the socket is gone");
}

#[test]
fn a_sink_writes_what_it_took_in_and_the_model_calls_nothing_lost() {
    need_model!();
    let place = folder();
    let model = Model::start(place.path(), &["--source", "400", "--rate", "500", "--size", "128", "--link-up", "10"]);
    let (device, file) = (format!("vfio-user:{}", model.socket.display()), place.path().join("frames.pcap"));
    let words = ["run", &device, "--sink", "--count", "400", "--ring", "1024", "--pcap", file.to_str().expect("UTF-8")];
    let ended = run(&words, place.path()).end();
    assert_eq!((ended.code, ended.errors.as_str()), (Some(0), ""));
    assert!(ended.said.contains("numbered 400 frames: 0 missing, 0 late or twice"), "{}", ended.said);
    let frames = frames_of(&file);
    assert!(frames.iter().all(|frame| frame.len() == 124), "without their check sequences");
    assert_eq!(frames.iter().map(|frame| number(frame)).collect::<Vec<_>>(), (0..400).map(Some).collect::<Vec<_>>());
    let model = model.program.end();
    assert_eq!(model.code, Some(0));
    assert!(model.said.contains("sent 400, and none came back"), "{}", model.said);
    assert!(!model.said.contains("lost") && !model.said.contains("must not"), "{}", model.said);
}

/// Builds a frame as docs/design/sim.md lays it out, or one without a number.
fn frame(number: Option<u64>) -> Vec<u8> {
    let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 9]].concat();
    frame.extend([0x88, 0xb5]);
    if let Some(number) = number {
        frame.extend([0x74, 0x73, 0x6b, 0x01]);
        frame.extend(number.to_le_bytes());
    }
    frame.resize(60, 0);
    frame
}

#[test]
fn an_interrupt_ends_a_run_with_a_summary_that_says_what_is_missing() {
    need_model!();
    let place = folder();
    let (ours, its) = (place.path().join("ours"), place.path().join("its"));
    let wire = UnixDatagram::bind(&ours).expect("a socket");
    wire.set_nonblocking(true).expect("a socket");
    let paths = [&its, &ours].map(|path| path.to_str().expect("UTF-8"));
    let model = Model::start(place.path(), &["--dgram", paths[0], paths[1], "--link-up", "10"]);
    let device = format!("vfio-user:{}", model.socket.display());
    let mut program = run(&["run", &device, "--echo"], place.path());
    let mut bytes = [0; 2048];
    // Frames that arrive before the program receives are lost, so repeat until it answers.
    until("an echo", || {
        let _ = wire.send_to(&frame(None), &its);
        wire.recv(&mut bytes).is_ok()
    });
    for number in [7, 8, 11, 12, 9] {
        until("room on the wire", || wire.send_to(&frame(Some(number)), &its).is_ok());
        // One after the other, so that the lengths of the sockets' queues do not matter.
        let back = |bytes: &[u8]| bytes[18..26] == number.to_le_bytes() && bytes[14..18] == *b"tsk\x01";
        until("its echo", || wire.recv(&mut bytes).is_ok() && back(&bytes));
        assert_eq!(bytes[..12], [[2, 0, 0, 0, 0, 9], [0xff; 6]].concat(), "turned round");
    }
    program.signal(Signal::INT);
    let ended = program.end();
    assert_eq!((ended.code, ended.errors.as_str()), (Some(0), ""));
    assert!(ended.said.contains("numbered 5 frames: 1 missing, 1 late or twice"), "{}", ended.said);
    // The model stays for the next driver, until it is told to end.
    let mut model = model.program;
    assert!(model.is_running());
    model.signal(Signal::TERM);
    let model = model.end();
    assert_eq!((model.code, model.errors.as_str()), (Some(0), ""));
    assert!(!model.said.contains("must not"), "{}", model.said);
}

#[test]
fn an_interrupt_before_the_link_is_up_is_heard() {
    need_model!();
    let place = folder();
    let model = Model::start(place.path(), &["--link-up", "3600000"]);
    let mut program = run(&["run", &format!("vfio-user:{}", model.socket.display()), "--sink"], place.path());
    until("its handler", || program.handles(Signal::INT));
    program.signal(Signal::INT);
    let ended = program.end();
    assert_eq!(ended.code, Some(1));
    assert!(ended.sentence().contains("the link did not come up"), "{}", ended.errors);
}

#[test]
fn a_worker_that_is_killed_leaves_no_model_and_no_folder() {
    need_model!();
    let own = folder();
    let mut program = run(&["run", "sim", "--sink"], own.path());
    let mut model = None;
    until("its model", || {
        model = children_of(program.id()).into_iter().find(|(_, name)| name == "tasuki-sim").map(|(id, _)| id);
        model.is_some()
    });
    let model = model.expect("just found");
    program.signal(Signal::KILL);
    assert_eq!(program.end().code, None);
    until("the model's end", || !process::lives(model));
    assert!(is_empty(own.path()), "nothing is left behind");
}

#[test]
fn what_cannot_be_is_one_sentence_and_leaves_nothing() {
    let place = folder();
    let path = |name: &str| place.path().join(name);
    std::fs::write(path("file"), "no socket").expect("a file");
    // A server that has died leaves its socket behind.
    drop(UnixListener::bind(path("stale")).expect("a socket"));
    let hasty = UnixListener::bind(path("hasty")).expect("a socket");
    let hanging_up = std::thread::spawn(move || hasty.accept().map(drop));
    let named = |name: &str| format!("vfio-user:{}", path(name).display());
    let (own, before) = (folder(), place.path().read_dir().expect("the folder").count());
    let cases = [
        (vec!["probe", "vfio:0000:ff:1f.7"], 1, "no PCI device 0000:ff:1f.7"),
        (vec!["probe", "vfio:eth0"], 2, "\"eth0\" is no PCI address"),
        (vec!["probe", "eth0"], 2, "\"eth0\" names no card; write vfio:0000:03:00.0"),
        (vec!["probe"], 2, "<DEVICE>"),
        (vec!["run", "sim"], 2, "--sink|--source|--echo"),
        (vec!["run", "sim", "--sink", "--echo"], 2, "cannot be used with"),
        (vec!["run", "sim", "--source", "--size", "59"], 2, "59 is not in 60..=1514"),
        (vec!["run", "sim", "--source", "--size", "1515"], 2, "1515 is not in 60..=1514"),
        (vec!["run", "sim", "--source", "--rate", "0"], 2, "0 is not in 1.."),
        (vec!["run", "sim", "--source", "--to", "52:54"], 2, "\"52:54\" is not an Ethernet address"),
        (vec!["run", "sim", "--source", "--to", "+1:2:3:4:5:6"], 2, "is not an Ethernet address"),
        (vec!["run", "sim", "--sink", "--size", "100"], 2, "cannot be used with"),
    ];
    let served = [
        ("nothing", "there is no socket at"),
        ("file", "is not a socket; correct the path"),
        ("stale", "no device is served at"),
        ("hasty", "the device is gone"),
    ];
    for (words, code, what) in cases {
        run(&words, own.path()).end().is_refused(code, what);
    }
    for (name, what) in served {
        run(&["probe", &named(name)], own.path()).end().is_refused(1, what);
    }
    hanging_up.join().expect("a thread").expect("somebody came");
    assert!(is_empty(own.path()), "nothing is left behind");
    assert_eq!(place.path().read_dir().expect("the folder").count(), before);
}

#[test]
fn what_the_card_cannot_do_is_said_and_leaves_nothing() {
    need_model!();
    let own = folder();
    let missing = own.path().join("no/frames.pcap");
    run(&["run", "sim", "--sink", "--ring", "5"], own.path()).end().is_refused(1, "the card cannot have ring = 5");
    let words = ["run", "sim", "--sink", "--pcap", missing.to_str().expect("UTF-8")];
    run(&words, own.path()).end().is_refused(1, "frames.pcap cannot be written");
    assert!(is_empty(own.path()), "nothing is left behind");
}

/// A device that no driver knows: 256 bytes of configuration space and nothing else.
struct Stranger([u8; 256]);

impl Device for Stranger {
    fn region(&self, index: u32) -> Region<'_> {
        Region { len: if index == CONFIG { 256 } else { 0 }, ..Region::default() }
    }
    fn vectors(&self, _: u32) -> u32 {
        0
    }
    fn read(&mut self, _: u32, offset: u64, into: &mut [u8]) {
        let from = &self.0[usize::try_from(offset).expect("below 256")..];
        into.copy_from_slice(&from[..into.len()]);
    }
    fn write(&mut self, _: u32, _: u64, _: &[u8]) {}
    fn dma_map(&mut self, _: u64, _: DmaMemory) {
        panic!("nobody knows how to drive it");
    }
    fn dma_unmap(&mut self, _: u64) {}
    fn set_irq(&mut self, _: u32, _: u32, _: Option<OwnedFd>) {}
    fn reset(&mut self) {
        panic!("nobody knows how to drive it");
    }
}

#[test]
fn a_card_that_no_driver_drives_is_named_and_left_alone() {
    let (place, mut config) = (folder(), [0; 256]);
    // An 82540EM.
    config[..4].copy_from_slice(&[0x86, 0x80, 0x0e, 0x10]);
    let mut server = Server::bind(&place.path().join("s")).expect("a socket");
    let mut program = run(&["probe", &format!("vfio-user:{}", place.path().join("s").display())], place.path());
    let mut device = Stranger(config);
    until("a probe", || {
        while server.turn(&mut device).expect("a server") == Turn::Busy {}
        !program.is_running()
    });
    let ended = program.end();
    assert_eq!(ended.code, Some(1));
    assert!(ended.said.contains("card      8086:100e (no driver here)"), "{}", ended.said);
    assert!(
        ended.errors.contains("no driver here drives a 8086:100e; those that are driven: 8086:10d3"),
        "{}",
        ended.errors
    );
    assert_eq!(ended.errors.lines().count(), 1, "{}", ended.errors);
}

#[test]
fn a_card_that_belongs_to_the_kernel_is_left_to_it() {
    let devices = Path::new("/sys/bus/pci/devices").read_dir().into_iter().flatten().flatten();
    let held = devices
        .map(|entry| entry.path())
        .find(|path| path.join("driver").read_link().is_ok_and(|driver| !driver.ends_with("vfio-pci")));
    let Some(held) = held else {
        println!("skipped: needs a PCI device that a kernel driver holds");
        return;
    };
    let address = held.file_name().and_then(|name| name.to_str()).expect("an address").to_owned();
    let own = folder();
    let ended = run(&["probe", &format!("vfio:{address}")], own.path()).end();
    assert_eq!((ended.code, ended.said.as_str()), (Some(1), ""));
    // Which of the two depends on the machine; either names the device and the remedy.
    let sentence = ended.sentence();
    assert!(sentence.contains(&address), "{sentence}");
    assert!(sentence.contains("is held by the kernel driver") || sentence.contains("is behind no IOMMU"), "{sentence}");
    assert!(held.join("driver").exists(), "it was not taken away");
}

const _: () = assert!(PATIENCE.as_secs() >= Duration::from_secs(10).as_secs());
