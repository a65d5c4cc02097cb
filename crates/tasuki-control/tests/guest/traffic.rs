//! Numbered frames that a card's partner sends, and expects back: plain ones of the card, or datagrams of a station
//! behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::serial::Wire;
use crate::wait::until;

/// Most unanswered frames. They all have room in a card's ring, so the card holds those under way while no worker
/// drives it.
pub const UNANSWERED: u32 = 128;

/// Time within which a frame comes back, or never.
const QUIET: Duration = Duration::from_secs(10);

/// Station address of the cards.
const CARD: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x57];

/// Outcome of the traffic.
#[derive(Debug)]
#[expect(dead_code, reason = "some of it is printed only")]
pub struct Outcome {
    /// Frames sent.
    pub sent: u32,
    /// Frames sent that never came back.
    pub lost: u32,
    /// Number of repeated returns: each time beyond the first counts.
    pub again: u32,
    /// Frames from the card that the partner never sent, counted once its own frames come back.
    pub foreign: u32,
    /// Longest time in which no frame came back.
    pub gap: Duration,
}

/// Traffic that goes on until `finish`.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Outcome>,
    first: Receiver<()>,
}

impl Traffic {
    /// Starts traffic with the worker of a card, and waits for the first frame that comes back.
    pub fn begin(wire: &'static str) -> Traffic {
        Self::start(wire, None)
    }

    /// Starts traffic with a station that is reached through a card, and waits for the first frame that comes back.
    pub fn to(wire: &'static str, station: Station) -> Traffic {
        Self::start(wire, Some(station))
    }

    fn start(wire: &'static str, station: Option<Station>) -> Traffic {
        let stop = Arc::new(AtomicBool::new(false));
        let (back, first) = channel();
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            run(Wire::of(wire), station.as_ref(), &told, || {
                let _ = back.send(());
            })
        });
        let traffic = Traffic { stop, thread, first };
        traffic.first.recv_timeout(QUIET * 6).expect("frames that are sent to the card come back");
        traffic
    }

    /// Lets the traffic go on for 500 ms.
    pub fn for_a_while(&self) {
        std::thread::sleep(Duration::from_millis(500));
    }

    /// Stops sending, and waits for frames under way.
    pub fn finish(self) -> Outcome {
        self.stop.store(true, Relaxed);
        self.thread.join().expect("the wire works")
    }
}

fn run(wire: &Wire, station: Option<&Station>, stop: &AtomicBool, mut first: impl FnMut()) -> Outcome {
    wire.clear();
    let frame = |number| station.map_or_else(|| frame(number), |station| station.datagram(number));
    let mut times: Vec<u32> = Vec::new();
    let (mut back, mut again, mut foreign, mut gap, mut last) = (0, 0, 0, Duration::ZERO, Instant::now());
    loop {
        let sent = u32::try_from(times.len()).expect("not so many");
        let is_over = stop.load(Relaxed);
        if is_over && (back == sent || last.elapsed() > QUIET) {
            return Outcome { sent, lost: sent - back, again, foreign, gap };
        }
        if !is_over && sent - back < UNANSWERED && wire.try_send(&frame(sent)) {
            times.push(0);
        }
        // The sender sleeps when it may not send: the guest has few CPUs, and the emulation makes them slow.
        let patience =
            Duration::from_millis(if u32::try_from(times.len()).expect("few") - back < UNANSWERED { 0 } else { 5 });
        while let Some(frame) = wire.take(patience) {
            let (kind, at) = if station.is_some() { (IPV4, 42) } else { (EXPERIMENT, 14) };
            if frame.get(12..14) != Some(&kind) {
                // A station asks for its partner's address from time to time.
                let is_answered = station.is_some_and(|_| answer(&frame).is_some_and(|answer| wire.try_send(&answer)));
                foreign += u32::from(back >= 100 && station.is_none() && !is_answered);
                continue;
            }
            let number = frame.get(at..).and_then(|bytes| bytes.first_chunk()).map(|bytes| u32::from_le_bytes(*bytes));
            // Frames of an earlier test may come late.
            let Some(times) = number.and_then(|number| times.get_mut(number as usize)) else { continue };
            *times += 1;
            if *times == 1 {
                back += 1
            } else {
                again += 1
            }
            gap = gap.max(last.elapsed());
            last = Instant::now();
            if back == 100 {
                first();
            }
            if patience > Duration::ZERO {
                break;
            }
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// EtherTypes: of experiments (IEEE 802, local), of ARP and of IPv4.
const EXPERIMENT: [u8; 2] = [0x88, 0xb5];
const ARP: [u8; 2] = [0x08, 0x06];
const IPV4: [u8; 2] = [0x08, 0x00];

/// Addresses of the partner; the second is for documentation (RFC 5737).
const PARTNER: [u8; 6] = [0x02, 0, 0, 0, 0, 1];
const PARTNERS_IP: [u8; 4] = [192, 0, 2, 1];

/// Makes the frame with this number.
fn frame(number: u32) -> Vec<u8> {
    let mut bytes = [&CARD[..], &PARTNER, &EXPERIMENT, &number.to_le_bytes()].concat();
    bytes.resize(60 + number as usize % 1000, 0);
    bytes
}

/// A program behind a card that sends datagrams back.
pub struct Station {
    mac: [u8; 6],
    ip: [u8; 4],
    port: u16,
}

impl Station {
    /// Asks for the station's address by ARP until it answers.
    pub fn find(wire: &Wire, ip: [u8; 4], port: u16) -> Station {
        let mac = until("the station answers ARP", || {
            wire.send(&arp(1, [0xff; 6], [0; 6], ip));
            let frame = wire.take(Duration::from_millis(200))?;
            let is_its = frame.get(12..14) == Some(&ARP) && frame.get(20..22) == Some(&[0, 2]);
            frame.get(22..28).filter(|_| is_its && frame.get(28..32) == Some(&ip))?.try_into().ok()
        });
        Station { mac, ip, port }
    }

    /// Makes the datagram with this number: Ethernet, IPv4 (RFC 791) and UDP without a checksum (RFC 768).
    fn datagram(&self, number: u32) -> Vec<u8> {
        let payload = 18 + number % 1000;
        let len = u16::try_from(28 + payload).expect("a frame's length");
        let mut ip =
            [&[0x45, 0], &len.to_be_bytes()[..], &[0, 0, 0x40, 0, 64, 17, 0, 0], &PARTNERS_IP, &self.ip].concat();
        let sum: u32 = ip.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        let sum = [(); 2].iter().fold(sum, |sum, ()| (sum & 0xffff) + (sum >> 16));
        let sum = u16::try_from(sum).expect("few words");
        ip[10..12].copy_from_slice(&(!sum).to_be_bytes());
        let udp = [self.port, self.port, len - 20, 0].map(u16::to_be_bytes).concat();
        let mut bytes = [&self.mac[..], &PARTNER, &IPV4, &ip, &udp, &number.to_le_bytes()].concat();
        bytes.resize(14 + usize::from(len), 0);
        bytes
    }
}

/// Makes an ARP message of the partner (RFC 826): a request (1) or a reply (2).
fn arp(operation: u8, to: [u8; 6], mac: [u8; 6], ip: [u8; 4]) -> Vec<u8> {
    let fixed = [0, 1, 8, 0, 6, 4, 0, operation];
    let mut bytes = [&to[..], &PARTNER, &ARP, &fixed, &PARTNER, &PARTNERS_IP, &mac, &ip].concat();
    bytes.resize(60, 0);
    bytes
}

/// Returns the partner's answer to an ARP request for its address.
fn answer(frame: &[u8]) -> Option<Vec<u8>> {
    let is_for_it = frame.get(12..14)? == ARP && frame.get(20..22)? == [0, 1] && frame.get(38..42)? == PARTNERS_IP;
    let (mac, ip) = (frame.get(22..28)?.try_into().ok()?, frame.get(28..32)?.try_into().ok()?);
    is_for_it.then(|| arp(2, mac, mac, ip))
}
