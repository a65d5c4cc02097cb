//! Cases for drivers whose card had an untrusted owner. That owner plays its tricks, lets go and is fenced. The next
//! owner works, or refuses the card and starts it anew. `tests/suite/last_owner.rs` plays the same tricks on our strict
//! model, whose journal and wire see more than a forgiving one's.

use std::time::Duration;

use tasuki_net::nic::bus::{Bus, Registers};
use tasuki_net::nic::{Failed, How, InPlace, Nic, NicMemory, NicOptions, Repoint};
use tasuki_net::port::{Armed, Port};
use tasuki_shm::region::Region;

use super::Bench;
use super::frames::{SHORTEST, assert_same, frame, frames, mixed};
use super::repoint::Repointed;
use super::tricks::{self, Hostile, Trick};
use crate::wait::readable;
use tasuki_testing::PATIENCE;

/// A card's registers in a world.
pub type RegistersOf<W> = <<W as super::World>::Bus as Bus>::Registers;

/// A world in which a last owner can play tricks.
pub trait LastOwned: Repointed {
    /// Tricks that cannot be played here, and why.
    const LACKS: &'static [(&'static str, &'static str)] = &[];
    /// Tries one register of this many, unless TASUKI_ALL_REGISTERS is set.
    const SPARSE: usize = 1;

    /// Returns the tricks of its last owner.
    fn tricks() -> Vec<Trick<RegistersOf<Self>>>;

    /// Returns the BAR for the tricks, and the offset of the common registers in it.
    fn way(_: &mut Self::Bus) -> (u8, u32) {
        (0, 0)
    }

    /// Lets the card come to rest, if it must before its vectors are reconnected.
    fn calm() {}
}

/// Outcome for the next owner.
#[derive(Debug)]
enum Outcome {
    Took,
    Refused(String),
}

fn options() -> NicOptions {
    NicOptions { ring: 64, ..NicOptions::default() }
}

/// A driven card, and the memory of its next owner.
struct Turns<W: LastOwned> {
    bench: Bench<W>,
    next: Option<NicMemory>,
    /// Memory of the present driver's rings.
    rings: Region,
    at: tasuki_net::nic::bus::Iova,
}

fn rings_of(memory: &NicMemory) -> Region {
    Region::adopt(memory.parts().expect("descriptors are free").rings).expect("the memory of rings")
}

impl<W: LastOwned> Turns<W> {
    fn start() -> Option<Self> {
        let first = super::memory::<W>(&options());
        let count = first.arena().geometry().count;
        let at = W::MEMORY_AT + (1 << 30);
        let geometry = tasuki_shm::arena::Geometry { slot_len: 4096, count };
        let second = NicMemory::create(geometry, 256 << 10, at).expect("a little memory");
        let world = W::with_two(&first, &second)?;
        let (arena, at, rings) = (first.arena().clone(), first.layout().rings_at, rings_of(&first));
        let nic = Nic::start(world.bus(), first, &options()).expect("the card starts");
        Some(Turns { bench: Bench::over(world, nic, arena), next: Some(second), rings, at })
    }

    /// Makes a turn: the owner lets go, plays its trick and is fenced, and the next one takes the card, or starts it
    /// anew.
    fn turn(&mut self, trick: impl FnOnce(&Hostile<RegistersOf<W>>), is_cold: bool) -> Outcome {
        let outcome = self.change_hands(trick, is_cold);
        self.works();
        outcome
    }

    /// Drains the wire: its frames are the last owner's own.
    fn clear_wire(&self, quiet: Duration) {
        while self.bench.world.take(quiet).is_some() {}
    }

    fn change_hands(&mut self, trick: impl FnOnce(&Hostile<RegistersOf<W>>), is_cold: bool) -> Outcome {
        let memory = self.next.take().expect("the next owner's memory");
        let mut bus = W::twin(self.bench.nic().bus());
        let (bar, common) = W::way(&mut bus);
        let registers = bus.registers(bar).expect("the card's registers");
        let (arena, next_at, next_rings) = (memory.arena().clone(), memory.layout().rings_at, rings_of(&memory));
        let bus = W::twin(self.bench.nic().bus());
        let ready = match is_cold {
            true => Err((bus, memory)),
            false => Ok(W::Nic::prepare_rings(bus, memory, &options(), How::Fenced(W::MAC), self.at).expect("it can")),
        };
        self.bench.quiesce_and_stop();
        trick(&Hostile {
            registers,
            common,
            rings: Region::adopt(self.rings.fd().try_clone_to_owned().expect("a descriptor")).expect("it"),
            old: self.at,
            next: next_at,
        });
        self.clear_wire(Duration::from_millis(5));
        W::calm();
        let giver = self.bench.take();
        let left = giver.left();
        let (_bus, old) = giver.stand_down();
        let (outcome, nic) = match ready.map(|ready| W::Nic::repoint(ready, left)) {
            Ok(Ok(nic)) => (Outcome::Took, nic),
            Ok(Err(Failed { error, bus, memory })) => {
                (Outcome::Refused(error.to_string()), self.start_anew(bus, memory))
            }
            Err((bus, memory)) => (Outcome::Took, self.start_anew(bus, memory)),
        };
        self.bench.put(nic, arena);
        self.bench.nic().forget(&old.layout(), |_| ()).expect("it was mapped");
        (self.next, self.rings, self.at) = (Some(old), next_rings, next_at);
        self.bench.wait_for_link(true);
        outcome
    }

    /// Starts a card as a worker does that got it from an untrusted node.
    fn start_anew(&mut self, mut bus: W::Bus, memory: NicMemory) -> W::Nic {
        // Not every card supports a reset.
        let _ = bus.reset();
        bus.renew().expect("the bus works");
        self.bench.world.expect_start();
        W::Nic::start(bus, memory, &options()).expect("the card starts anew")
    }

    /// Checks that frames come and go unchanged, that nothing else comes, and that one wakes a sleeping driver.
    fn works(&mut self) {
        let sent = frames(W::MAC, 0, mixed(24));
        assert_same(&self.bench.bring_in(&sent), &sent);
        assert_same(&self.bench.bring_out(&sent), &sent);
        assert_eq!(self.bench.world.take(Duration::ZERO), None, "nobody has sent this");
        while self.bench.nic().arm().expect("the card works") == Armed::Busy {}
        let one = frame(W::MAC, 1, SHORTEST);
        while !self.bench.world.try_send(&one) {}
        assert!(readable(&self.bench.nic().fd(), PATIENCE), "nobody is woken");
        assert_same(&self.bench.receive(), &[one]);
        // Until then the card rings no more.
        while self.bench.nic().arm().expect("the card works") == Armed::Busy {}
    }
}

/// Returns the tricks that can be played here; prints why the others cannot.
fn played<W: LastOwned>() -> impl Iterator<Item = Trick<RegistersOf<W>>> {
    W::tricks().into_iter().filter(|trick| match W::LACKS.iter().find(|(name, _)| *name == trick.name) {
        Some((name, why)) => {
            println!("skipped: {name}: {why}");
            false
        }
        None => true,
    })
}

pub fn what_a_last_owner_leaves_is_undone_or_refused<W: LastOwned>() {
    let Some(mut turns) = Turns::<W>::start() else { return };
    for Trick { name, does, refused } in played::<W>() {
        let outcome = turns.turn(does, false);
        println!("{name}: {outcome:?}");
        match (&outcome, refused) {
            (Outcome::Took, None) => {}
            (Outcome::Refused(why), Some(what)) if why.contains(what) => {}
            _ => panic!("{name}: {outcome:?}, and not {refused:?}"),
        }
    }
}

pub fn a_cold_start_undoes_what_a_last_owner_leaves<W: LastOwned>() {
    let Some(mut turns) = Turns::<W>::start() else { return };
    for Trick { name, does, .. } in played::<W>() {
        turns.turn(does, true);
        println!("{name}: undone");
    }
}

pub fn whatever_stands_in_any_register_the_next_owner_works_or_refuses<W: LastOwned>() {
    let Some(mut turns) = Turns::<W>::start() else { return };
    let (mut took, mut refused, mut kept_nothing) = (0, 0, Vec::new());
    let sparse = if std::env::var_os("TASUKI_ALL_REGISTERS").is_some() { 1 } else { W::SPARSE };
    for (index, offset) in tricks::registers().into_iter().step_by(sparse).enumerate() {
        // All ones; or a value like an address in the next owner's memory, and a small number.
        let value = [u32::MAX, 2, u32::MAX, 0x0001_0080][index % 4];
        let mut keeps = true;
        let outcome = turns.change_hands(
            |hostile| {
                let before = hostile.registers.read32(offset);
                hostile.write(offset, value);
                keeps = hostile.registers.read32(offset) != before;
            },
            false,
        );
        // After a moved head or tail, the last owner's own ring sends frames again, or in part.
        if (0x3800..=0x3818).contains(&offset) {
            turns.clear_wire(Duration::from_millis(50));
        }
        turns.works();
        if !keeps {
            kept_nothing.push(format!("{offset:#06x}"));
        }
        match outcome {
            Outcome::Took => took += 1,
            Outcome::Refused(why) => {
                println!("{offset:#06x} = {value:#x}: refused: {why}");
                refused += 1;
                // QEMU's card keeps state over its reset, so the driver would refuse it each time: use a fresh one.
                drop(turns);
                turns = Turns::start().expect("there was one before");
            }
        }
    }
    println!("{took} taken, {refused} refused");
    // The test wrote these registers all the same.
    if !kept_nothing.is_empty() {
        println!("skipped: this card shows no other value once written at {}", kept_nothing.join(" "));
    }
    assert!(took > 8 * refused, "{took} taken, {refused} refused");
}
