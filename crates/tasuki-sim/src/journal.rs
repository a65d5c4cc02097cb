//! What a driver did that it must not do, never or not while it hands a card over.

use std::fmt;

/// A rule that a driver broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Class {
    /// The card was reset (CTRL.RST).
    Reset,
    /// The PHY was reset, or its negotiation begun anew.
    PhyReset,
    /// A register of the PHY was written.
    PhyWrite,
    /// Bits of CTRL that make or force the link were changed.
    LinkWrite,
    /// RDH or TDH was written while the unit was on: descriptors on the chip are invalid then.
    HeadWhileEnabled,
    /// Base or length of a ring was written while the unit was on.
    RingWhileEnabled,
    /// The length of a ring is no multiple of 128 bytes, or more than a register holds.
    RingLength,
    /// The base of a ring is no multiple of 16.
    RingAlignment,
    /// A head or tail is outside of its ring.
    TailOutside,
    /// A tail was moved back: descriptors were taken away that the card may have fetched.
    TailBackwards,
    /// The card was sent to memory that it cannot reach.
    UnmappedDma,
    /// A descriptor makes no sense.
    BadDescriptor,
    /// There is no such register.
    UnknownRegister,
    /// A register was not accessed by 32 bits at a multiple of 4.
    OddAccess,
    /// A register was accessed within a microsecond of a reset.
    DuringReset,
    /// Something was changed that may be changed only while the unit is off.
    SetupWhileEnabled,
    /// Work was given to a card that is not allowed to be master of the bus.
    NoBusMaster,
    /// A frame went to a queue that has no ring.
    NoQueue,
}

impl Class {
    const COUNT: usize = Class::NoQueue as usize + 1;

    /// What a driver must not do when it takes a running card over: all that makes the link go down.
    pub const COLD: [Class; 4] = [Class::Reset, Class::PhyReset, Class::PhyWrite, Class::LinkWrite];

    /// What a driver must never do.
    pub const ALWAYS: [Class; 14] = [
        Class::HeadWhileEnabled,
        Class::RingWhileEnabled,
        Class::RingLength,
        Class::RingAlignment,
        Class::TailOutside,
        Class::TailBackwards,
        Class::UnmappedDma,
        Class::BadDescriptor,
        Class::UnknownRegister,
        Class::OddAccess,
        Class::DuringReset,
        Class::SetupWhileEnabled,
        Class::NoBusMaster,
        Class::NoQueue,
    ];
}

/// One time that a rule was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The rule.
    pub class: Class,
    /// When, in nanoseconds of the model's time.
    pub at: u64,
    /// Where: a register's offset or an address in memory.
    pub place: u64,
    /// What was written there.
    pub value: u64,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Entry { class, at, place, value } = self;
        write!(f, "{class:?} at {at} ns: {value:#x} at {place:#x}")
    }
}

/// A driver did what was not allowed to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the driver did {count} times what it must not; the first: {first}")]
pub struct Offence {
    /// How often.
    pub count: u64,
    /// The first time.
    pub first: Entry,
}

/// Entries that are kept; what comes after them is counted.
const KEPT: usize = 1024;

/// What a driver did that it must not do.
#[derive(Debug)]
pub struct Journal {
    entries: Vec<Entry>,
    counts: [u64; Class::COUNT],
    /// One bit a class.
    panic_on: u32,
}

impl Default for Journal {
    fn default() -> Self {
        Journal { entries: Vec::with_capacity(KEPT), counts: [0; Class::COUNT], panic_on: 0 }
    }
}

impl Journal {
    /// From now on the model panics when one of these rules is broken, so that a test fails where it happens.
    pub fn panic_on(&mut self, classes: &[Class]) {
        self.panic_on = classes.iter().fold(0, |bits, &class| bits | 1 << class as u8);
    }

    pub(crate) fn note(&mut self, class: Class, at: u64, place: u64, value: u64) {
        let entry = Entry { class, at, place, value };
        assert!(self.panic_on >> class as u8 & 1 == 0, "the driver must not do this: {entry}");
        self.counts[class as usize] += 1;
        if self.entries.len() < KEPT {
            self.entries.push(entry);
        }
    }

    /// How often a rule was broken.
    pub fn count(&self, class: Class) -> u64 {
        self.counts[class as usize]
    }

    /// What was done, oldest first: the first thousand times or so.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// None of these rules was broken since the journal was last cleared.
    pub fn demand_none(&self, classes: &[Class]) -> Result<(), Offence> {
        let count = classes.iter().map(|&class| self.count(class)).sum();
        match self.entries.iter().find(|entry| classes.contains(&entry.class)) {
            Some(&first) => Err(Offence { count, first }),
            // All that was kept was of other classes.
            None if count > 0 => {
                let class = classes.iter().copied().find(|&class| self.count(class) > 0).expect("they add up");
                Err(Offence { count, first: Entry { class, at: 0, place: 0, value: 0 } })
            }
            None => Ok(()),
        }
    }

    /// Forgets all of it.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.counts = [0; Class::COUNT];
    }
}
