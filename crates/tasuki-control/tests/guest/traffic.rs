//! Numbered frames that a card's partner sends, and has to have back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::serial::Wire;

/// Frames that are not back at most: they all have room in a card's ring, so those that are under way when nobody drives a card are in the card's hands.
const UNANSWERED: u32 = 128;

/// What comes back comes within this time.
const QUIET: Duration = Duration::from_secs(10);

/// The station address of each card.
const CARD: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x57];

/// What became of the frames.
#[derive(Debug)]
pub struct Outcome {
    /// Frames sent,
    pub sent: u32,
    /// those of them that never came back,
    pub lost: u32,
    /// those that came more than once, with each time that was too much,
    pub again: u32,
    /// frames that nobody has sent to the card, once its own come back,
    pub foreign: u32,
    /// and the longest time in which none came back.
    pub gap: Duration,
}

/// Traffic that goes on until it is finished.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Outcome>,
    first: Receiver<()>,
}

impl Traffic {
    /// Begins on a card's wire, and waits for the first frames that come back.
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

    /// Lets it go on for a while.
    pub fn for_a_while(&self) {
        std::thread::sleep(Duration::from_millis(500));
    }

    /// Sends nothing more, and waits for what is under way.
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
        let patience = Duration::from_millis(if times.len() as u32 - back < UNANSWERED { 0 } else { 5 });
        while let Some(frame) = wire.take(patience) {
            if frame.get(12..14) != Some(&[0x88, 0xb5]) {
                foreign += u32::from(back >= 100);
                continue;
            }
            let number =
                frame.get(14..18).and_then(|bytes| bytes.first_chunk()).map(|bytes| u32::from_le_bytes(*bytes));
            // What a test before this one had under way may come late.
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

/// The frame with this number, for experiments (IEEE 802, local).
fn frame(number: u32) -> Vec<u8> {
    let mut bytes = [&CARD[..], &[0x02, 0, 0, 0, 0, 1, 0x88, 0xb5], &number.to_le_bytes()].concat();
    bytes.resize(60 + number as usize % 1000, 0);
    bytes
}
