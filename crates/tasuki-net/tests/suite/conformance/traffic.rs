//! Traffic that does not stop while a card changes hands.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

use super::frames::{SHORTEST, assert_same, frame, number_of};
use super::{Bench, World, polled};

/// Returns the frame to the card with this number.
pub fn numbered<W: World>(number: u32) -> Vec<u8> {
    frame(W::MAC, number, SHORTEST + number as usize % 1000)
}

/// A thread that sends one [`numbered`] frame after the other, from number 0 on, and the frames that have come.
pub struct Traffic {
    numbered: fn(u32) -> Vec<u8>,
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<usize>>,
    came: BTreeSet<u32>,
    /// Whether the wire keeps the frames in order.
    pub in_order: bool,
}

impl Traffic {
    /// Begins to send to the card of `bench`.
    pub fn start<W: World>(bench: &Bench<W>) -> Self {
        let numbered: fn(u32) -> Vec<u8> = numbered::<W>;
        let (send, stop) = (bench.world.sender(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let sender = std::thread::spawn(move || {
            (0..).take_while(|_| !stopped.load(Relaxed)).map(|number| send(&numbered(number))).count()
        });
        Traffic { numbered, stop, sender: Some(sender), came: BTreeSet::new(), in_order: true }
    }

    /// Checks frames that came: each is whole, none came before, and none is missing if the wire keeps their order.
    /// Returns how many have come so far.
    pub fn check(&mut self, frames: Vec<Vec<u8>>) -> u32 {
        let count = |came: &BTreeSet<u32>| u32::try_from(came.len()).expect("some thousands");
        for received in frames {
            let number = if self.in_order { count(&self.came) } else { number_of(&received) };
            assert_same(&[received], &[(self.numbered)(number)]);
            assert!(self.came.insert(number), "frame {number} came twice");
        }
        count(&self.came)
    }

    /// Sends no more, and checks that each frame came.
    pub fn end<W: World>(mut self, bench: &mut Bench<W>) {
        self.stop.store(true, Relaxed);
        let sender = self.sender.take().expect("it ends once");
        // The sender may wait for room, which only our receiving makes.
        while !sender.is_finished() {
            self.check(bench.poll());
        }
        let sent = u32::try_from(sender.join().expect("the sender sends")).expect("some thousands");
        polled("all frames", || (self.check(bench.poll()) >= sent).then_some(()));
        // A last frame behind everything else on the wire.
        let all = self.check(bench.bring_in(&[(self.numbered)(sent)]));
        assert_eq!(all, sent + 1, "each frame came, once");
    }
}
