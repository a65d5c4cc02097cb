//! What a driver did that it must not do, never or not while it hands a card over.

use std::fmt;

/// A rule that a driver broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Class {
    /// The card was reset (CTRL.RST; a virtio device's status).
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
    /// A ring has a length that the card cannot have: for the 82574L, one that is no multiple of 128 bytes; for virtio, no power of two.
    RingLength,
    /// The base of a ring is not aligned as it must be: to 16 bytes, and parts of virtio's to 2 and 4.
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
    /// A register was not accessed by as many bits as it has, at a multiple of their bytes: 32 in the 82574L.
    OddAccess,
    /// A register was accessed while a reset was going on.
    DuringReset,
    /// Something was changed that may be changed only while the unit, or the queue, is off.
    SetupWhileEnabled,
    /// Work was given to a card that is not allowed to be master of the bus.
    NoBusMaster,
    /// A frame went to a queue that has no ring.
    NoQueue,
    /// What can only be read was written.
    ReadOnly,
    /// Bits of the device's status were set in an order that is none, or one was taken back; or what comes before or after was done too late or too early.
    StatusOrder,
    /// A feature was accepted that was not offered, or without the one that it rests on, or used without having been accepted.
    Feature,
    /// The card was told of work before DRIVER_OK, or in a queue that is off, or by a number that is not the queue's.
    EarlyRing,
    /// More chains were made available than the queue has descriptors, or an index went back.
    IndexAhead,
    /// A chain was made available that the card has already.
    TwiceAvailable,
    /// The header of a frame asks for what was not agreed on.
    BadHeader,
    /// A command makes no sense, or is not allowed.
    BadCommand,
    /// A buffer is too short for a frame of the MTU that was agreed on.
    ShortBuffer,
    /// Frames were sent by a pair of queues that is not in use.
    InactivePair,
}

impl Class {
    const COUNT: usize = Class::InactivePair as usize + 1;

    /// What a driver must not do when it takes a running card over: all that makes the link go down.
    pub const COLD: [Class; 4] = [Class::Reset, Class::PhyReset, Class::PhyWrite, Class::LinkWrite];

    /// What a driver must never do.
    pub const ALWAYS: [Class; 24] = [
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
        Class::ReadOnly,
        Class::StatusOrder,
        Class::Feature,
        Class::EarlyRing,
        Class::IndexAhead,
        Class::TwiceAvailable,
        Class::BadHeader,
        Class::BadCommand,
        Class::ShortBuffer,
        Class::InactivePair,
    ];
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Class::Reset => "reset the card",
            Class::PhyReset => "reset the PHY, or began its negotiation anew",
            Class::PhyWrite => "wrote a register of the PHY",
            Class::LinkWrite => "changed bits of CTRL that make or force the link",
            Class::HeadWhileEnabled => "wrote RDH or TDH while the unit was on",
            Class::RingWhileEnabled => "wrote the base or the length of a ring while the unit was on",
            Class::RingLength => "gave a ring a length that the card cannot have",
            Class::RingAlignment => "gave a ring a base that is not aligned as it must be",
            Class::TailOutside => "set a head or tail outside of its ring",
            Class::TailBackwards => "moved a tail back, behind descriptors that the card may have fetched",
            Class::UnmappedDma => "sent the card to memory that it cannot reach",
            Class::BadDescriptor => "wrote a descriptor that makes no sense",
            Class::UnknownRegister => "used a register that there is not",
            Class::OddAccess => "used a register not by as many bits as it has",
            Class::DuringReset => "used a register while a reset was going on",
            Class::SetupWhileEnabled => "changed what may be changed only while the unit is off",
            Class::NoBusMaster => "gave work to a card that is not allowed to be master of the bus",
            Class::NoQueue => "had frames sent to a queue that has no ring",
            Class::ReadOnly => "wrote what can only be read",
            Class::StatusOrder => "set bits of the status in an order that is none, took one back, or did in the wrong state what belongs to another",
            Class::Feature => "accepted a feature that was not offered or rests on another, or used one that it had not accepted",
            Class::EarlyRing => "told the card of work before DRIVER_OK, or in a queue that is off or another",
            Class::IndexAhead => "made more chains available than the queue has descriptors, or took some back",
            Class::TwiceAvailable => "made a chain available that the card has already",
            Class::BadHeader => "asked in the header of a frame for what was not agreed on",
            Class::BadCommand => "gave a command that makes no sense, or that it must not give",
            Class::ShortBuffer => "left a buffer that is too short for a frame of the MTU that was agreed on",
            Class::InactivePair => "sent frames by a pair of queues that is not in use",
        })
    }
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
        write!(f, "it {class} ({class:?}: {value:#x} at {place:#x}, {at} ns after it was switched on)")
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

    /// The first time of each rule that was broken among `classes`, with how often it was.
    pub fn broken(&self, classes: &[Class]) -> Vec<Offence> {
        let broken = classes.iter().filter_map(|&class| self.demand_none(&[class]).err());
        broken.collect()
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
