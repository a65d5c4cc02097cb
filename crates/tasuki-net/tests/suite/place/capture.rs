//! Captures the frames on an interface with Wireshark's tools, which check the checksums independently.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use rustix::process::{Pid, Signal};

use super::Place;
use crate::process::is_installed;
use tasuki_testing::{PATIENCE, Program};

/// A running capture.
pub struct Capture {
    process: Program,
    file: PathBuf,
}

/// State of the checksum of a segment or a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sum {
    Good,
    /// It covers the pseudo header alone: the sender left the rest to the card.
    Partial,
    /// It is zero, written as 0xffff, as Linux does for TCP too (`skb_checksum_help`). Wireshark calls that wrong
    /// (RFC 1624).
    OtherZero,
    Bad,
    /// There is none, or the frame is a fragment.
    None,
}

/// A captured frame.
#[derive(Debug)]
pub struct Seen {
    /// Its sender.
    pub from: String,
    pub len: usize,
    pub sum: Sum,
    /// State of the IPv4 header's checksum.
    pub header: Sum,
}

/// Returns whether the necessary programs are installed; prints a line if not.
pub fn is_possible() -> bool {
    let is_there = ["dumpcap", "tshark"].iter().all(|program| is_installed(program));
    if !is_there {
        println!("skipped: needs tshark: apt-get install tshark");
    }
    is_there
}

impl Capture {
    /// Starts a capture on a namespace's interface; it runs when this returns.
    pub fn start(place: &Place, folder: &Path) -> Self {
        let file = folder.join(format!("{}.pcapng", place.0));
        let mut command = place.command("dumpcap");
        command.args(["-q", "-i", "nic0", "-B", "64", "-w"]).arg(&file);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut capture = Capture { process: Program(child.expect("dumpcap starts")), file };
        let (said, says) = channel();
        let lines = BufReader::new(capture.process.0.stderr.take().expect("a pipe")).lines();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| {
                let _ = said.send(line);
            });
        });
        let mut all = Vec::new();
        while !all.last().is_some_and(|line: &String| line.starts_with("File:")) {
            all.push(says.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("dumpcap does not capture: {all:?}")));
        }
        capture
    }

    /// Ends the capture after the last frame, and returns its frames.
    pub fn finish(mut self) -> Vec<Seen> {
        rustix::process::kill_process(Pid::from_child(&self.process.0), Signal::INT).expect("it was not reaped");
        let status = self.process.0.wait().expect("it is our child");
        assert!(status.success(), "dumpcap {status}");
        let fields = [
            "frame.len",
            "ip.src",
            "ipv6.src",
            "ip.dst",
            "ipv6.dst",
            "ip.len",
            "ip.hdr_len",
            "ipv6.plen",
            "ip.proto",
            "ipv6.nxt",
            "tcp.checksum",
            "udp.checksum",
            "tcp.checksum_calculated",
            "tcp.checksum.status",
            "udp.checksum.status",
            "ip.checksum.status",
        ];
        let mut command = Command::new("tshark");
        command.args(["-n", "-r"]).arg(&self.file).args([
            "-2",
            "-T",
            "fields",
            "-E",
            "separator=,",
            "-E",
            "occurrence=f",
        ]);
        for check in ["ip.check_checksum", "tcp.check_checksum", "udp.check_checksum"] {
            command.args(["-o", &format!("{check}:TRUE")]);
        }
        command.args(fields.iter().flat_map(|field| ["-e", field]));
        let done = command.stderr(Stdio::null()).output().expect("tshark starts");
        assert!(done.status.success(), "tshark {}", done.status);
        let text = String::from_utf8(done.stdout).expect("tshark writes text");
        text.lines().filter_map(|line| seen(&line.split(',').collect::<Vec<_>>())).collect()
    }
}

/// Parses tshark's fields of a TCP or UDP frame.
fn seen(fields: &[&str]) -> Option<Seen> {
    let [
        len,
        from4,
        from6,
        to4,
        to6,
        total4,
        header4,
        total6,
        proto4,
        proto6,
        tcp,
        udp,
        right,
        tcp_status,
        udp_status,
        header,
    ] = fields.try_into().expect("as many fields as were asked for");
    let is_v4 = !from4.is_empty();
    let (from, to) = if is_v4 { (from4, to4) } else { (from6, to6) };
    let (sum, status) = if tcp.is_empty() { (udp, udp_status) } else { (tcp, tcp_status) };
    let sum = u32::from_str_radix(sum.strip_prefix("0x")?, 16).expect("a number");
    let number = |text: &str| text.parse::<u32>().unwrap_or_else(|_| panic!("{text:?} in {fields:?}"));
    let of_payload = if is_v4 { number(total4) - number(header4) } else { number(total6) };
    let words = |address: &str| match address.parse().expect("an address") {
        std::net::IpAddr::V4(v4) => words_of(&v4.octets()),
        std::net::IpAddr::V6(v6) => words_of(&v6.octets()),
    };
    let mut pseudo = words(from) + words(to) + of_payload + number(if is_v4 { proto4 } else { proto6 });
    while pseudo > 0xffff {
        pseudo = (pseudo & 0xffff) + (pseudo >> 16);
    }
    let sum = match status_of(status) {
        Sum::Bad if sum == pseudo => Sum::Partial,
        Sum::Bad if sum == 0xffff && right == "0x0000" => Sum::OtherZero,
        status => status,
    };
    Some(Seen { from: from.to_owned(), len: number(len) as usize, sum, header: status_of(header) })
}

fn words_of(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum()
}

/// Parses Wireshark's `proto_checksum_vals`.
fn status_of(text: &str) -> Sum {
    match text {
        "0" | "Bad" => Sum::Bad,
        "1" | "Good" => Sum::Good,
        _ => Sum::None,
    }
}
