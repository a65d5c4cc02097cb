//! Numbered frames that a card's partner sends, and expects back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::serial::Wire;

/// Most unanswered frames. They all have room in a card's ring, so the card holds those under way while no worker
/// drives it.
const UNANSWERED: u32 = 128;

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
    /// Starts traffic on a card's wire, and waits for the first frame that comes back.
    pub fn begin(wire: &'static str) -> Traffic {
        let stop = Arc::new(AtomicBool::new(false));
        let (back, first) = channel();
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            run(Wire::of(wire), &told, || {
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

fn run(wire: &Wire, stop: &AtomicBool, mut first: impl FnMut()) -> Outcome {
    wire.clear();
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
            if frame.get(12..14) != Some(&[0x88, 0xb5]) {
                foreign += u32::from(back >= 100);
                continue;
            }
            let number =
                frame.get(14..18).and_then(|bytes| bytes.first_chunk()).map(|bytes| u32::from_le_bytes(*bytes));
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

/// Makes the frame with this number, of an EtherType for experiments (IEEE 802, local).
fn frame(number: u32) -> Vec<u8> {
    let mut bytes = [&CARD[..], &[0x02, 0, 0, 0, 0, 1, 0x88, 0xb5], &number.to_le_bytes()].concat();
    bytes.resize(60 + number as usize % 1000, 0);
    bytes
}
