//! A bystander's virtual machine. Its guest sends numbered frames of several flows by two pairs of queues to a node that
//! sends them back, and looks at a queue only when it is interrupted.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::daemon::memifs::{self, ECHO, Program, Tally, WINDOW};
use crate::daemon::vms::theirs::{self, Machine};

/// The machine's address, which the file has, too.
const US: [u8; 6] = [2, 0, 0, 0, 0, 0x76];
const PAIRS: usize = 2;
/// As many descriptors as QEMU's rings have: a guest that waits for a processor must not look full.
const RING: u16 = 256;
/// Number of flows: by those of them that its worker chooses, either pair has frames for the guest.
const FLOWS: u16 = 8;
/// Offset of the number in a frame.
const NUMBER_AT: usize = 14 + 20 + 8;

/// Connects at its node's socket, and begins.
pub fn begin(socket: &Path, rest: Duration, is_packed: bool) -> Program {
    // Without an event index, the guest wants each interrupt.
    let rings = if is_packed { theirs::PACKED } else { 0 };
    let features = theirs::VERSION_1 | theirs::MRG_RXBUF | theirs::PROTOCOL | rings;
    let machine = Machine::start_with(socket, features, RING, PAIRS, std::thread::yield_now);
    Program::of(move |over, back| exchange(machine, rest, over, back))
}

/// Returns the flow of a number.
fn flow(number: u64) -> u16 {
    u16::try_from(number % u64::from(FLOWS)).expect("small")
}

/// Makes a frame of UDP over IPv4, whose number decides its flow and its length.
fn frame(to: [u8; 6], from: [u8; 6], number: u64) -> Vec<u8> {
    let inner = memifs::frame(to, from, number);
    let words = |words: &[u16]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<_>>();
    let (len, port) = (u16::try_from(inner.len() + 14).expect("small"), 5000 + flow(number));
    let ip = words(&[0x800, 0x4500, len, 0, 0, 0x4011, 0, 0xc000, 0x24c, 0xc000, 0x263]);
    [&inner[..12], &ip, &words(&[port, 4000, len - 20, 0]), &inner[14..]].concat()
}

fn exchange(mut machine: Machine, rest: Duration, over: &AtomicBool, back: &AtomicU64) -> Tally {
    let mut tally = Tally::default();
    // The number that is due next of each flow, and how many frames came by each pair.
    let (mut due, mut by) = ([0, 1, 2, 3, 4, 5, 6, 7], [0; PAIRS]);
    loop {
        let ends = over.load(Relaxed);
        if tally.back == tally.sent {
            if ends {
                assert!(tally.sent < u64::from(FLOWS) || !by.contains(&0), "frames came by these pairs: {by:?}");
                return tally;
            }
            std::thread::sleep(rest);
        }
        let pair = |number: u64| usize::from(flow(number)) % PAIRS;
        while !ends
            && tally.sent < tally.back + WINDOW
            && machine.send_by_pair(pair(tally.sent), &frame(ECHO, US, tally.sent))
        {
            tally.sent += 1;
        }
        let mut bells: Vec<_> = machine.calls.iter().step_by(2).map(|call| PollFd::new(call, PollFlags::IN)).collect();
        let soon = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let _ = rustix::event::poll(&mut bells, Some(&soon));
        assert!(!machine.is_hung_up(), "its connection was closed");
        for (pair, by) in by.iter_mut().enumerate() {
            if !machine.was_rung(2 * pair) {
                continue;
            }
            // Others on the VNI may send to all, or to a station that the VNI does not know.
            for came in machine.receive_by_pair(pair).into_iter().filter(|came| came.starts_with(&US)) {
                let number = u64::from_le_bytes(came[NUMBER_AT..NUMBER_AT + 8].try_into().expect("8 bytes"));
                assert!(came == frame(US, ECHO, number), "frame {number} is not what it was");
                let due = &mut due[usize::from(flow(number))];
                assert!(number <= *due, "frame {number} came where {due} is due");
                if number < *due {
                    tally.twice += 1;
                    continue;
                }
                (*due, *by, tally.back) = (*due + u64::from(FLOWS), *by + 1, tally.back + 1);
            }
        }
        back.store(tally.back, Relaxed);
    }
}
