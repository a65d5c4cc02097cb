//! Records the rules that a driver broke: rules for all times, and rules for a driver that takes over a running
//! card.

use std::fmt;

/// A rule that a driver broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Class {
    /// The card was reset (CTRL.RST; a virtio device's status).
    Reset,
    /// The PHY was reset, or its auto-negotiation restarted.
    PhyReset,
    /// The driver wrote a register of the PHY.
    PhyWrite,
    /// The driver changed bits of CTRL that make or force the link.
    LinkWrite,
    /// RDH or TDH was written while the unit was on, which makes the descriptors on the chip invalid.
    HeadWhileEnabled,
    /// The base or length of a ring was written while the unit was on.
    RingWhileEnabled,
    /// A ring has an illegal length: for the 82574L, no multiple of 128 bytes; for virtio, no power of two.
    RingLength,
    /// The base of a ring is not aligned: to 16 bytes; the available and used rings of virtio, to 2 and 4.
    RingAlignment,
    /// A head or tail is outside of its ring.
    TailOutside,
    /// A tail moved back, past descriptors that the card may have fetched.
    TailBackwards,
    /// The driver gave the card an address that it cannot reach.
    UnmappedDma,
    /// A descriptor is invalid.
    BadDescriptor,
    /// The driver accessed a register that does not exist.
    UnknownRegister,
    /// A register was accessed with another width than its own, or at an unaligned offset. All registers of the
    /// 82574L have 32 bits.
    OddAccess,
    /// A register was accessed during a reset.
    DuringReset,
    /// The driver changed a setting that it may change only while the unit, or the queue, is off.
    SetupWhileEnabled,
    /// The driver gave work to a card that may not be bus master.
    NoBusMaster,
    /// A frame went to a queue without a ring.
    NoQueue,
    /// The driver wrote a read-only field.
    ReadOnly,
    /// The driver set device status bits in a wrong order, took one back, or did a step in a state to which it does
    /// not belong.
    StatusOrder,
    /// The driver accepted a feature that was not offered, or without the feature it depends on, or used one that it
    /// had not accepted.
    Feature,
    /// The driver notified the card before DRIVER_OK, for a queue that is off, or with a number that is not the
    /// queue's.
    EarlyRing,
    /// The driver made more chains available than the queue has descriptors, or moved an index back.
    IndexAhead,
    /// The driver made a chain available that the card already holds.
    TwiceAvailable,
    /// A frame's header asks for an offload that was not negotiated.
    BadHeader,
    /// A command is invalid, or not allowed.
    BadCommand,
    /// A buffer is too short for a frame of the negotiated MTU.
    ShortBuffer,
    /// The driver sent frames through an inactive queue pair.
    InactivePair,
}

impl Class {
    const COUNT: usize = Class::InactivePair as usize + 1;

    /// Rules for a driver that takes over a running card: all acts that take the link down.
    pub const COLD: [Class; 4] = [Class::Reset, Class::PhyReset, Class::PhyWrite, Class::LinkWrite];

    /// Rules that no driver may ever break.
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
            Class::BadDescriptor => "wrote an invalid descriptor",
            Class::UnknownRegister => "used a register that does not exist",
            Class::OddAccess => "used a register with an access of another width",
            Class::DuringReset => "used a register while a reset was going on",
            Class::SetupWhileEnabled => "changed a setting that may change only while the unit is off",
            Class::NoBusMaster => "gave work to a card that may not be master of the bus",
            Class::NoQueue => "had frames sent to a queue that has no ring",
            Class::ReadOnly => "wrote a read-only field",
            Class::StatusOrder => "set status bits in a wrong order, took one back, or took a step in the wrong state",
            Class::Feature => {
                "accepted a feature that was not offered or rests on another, or used one that it had not accepted"
            }
            Class::EarlyRing => "told the card of work before DRIVER_OK, or in a queue that is off or the wrong one",
            Class::IndexAhead => "made more chains available than the queue has descriptors, or took some back",
            Class::TwiceAvailable => "made a chain available that the card has already",
            Class::BadHeader => "asked in a frame's header for a feature that was not negotiated",
            Class::BadCommand => "gave an invalid or forbidden command",
            Class::ShortBuffer => "left a buffer that is too short for a frame of the negotiated MTU",
            Class::InactivePair => "sent frames by a pair of queues that is not in use",
        })
    }
}

/// One breach of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub class: Class,
    /// Model time of the breach, in nanoseconds since power-on.
    pub at: u64,
    /// Register offset or memory address.
    pub place: u64,
    /// Value written there.
    pub value: u64,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Entry { class, at, place, value } = self;
        write!(f, "it {class} ({class:?}: {value:#x} at {place:#x}, {at} ns after it was switched on)")
    }
}

/// Breaches of a rule by a driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the driver broke rules {count} times; the first: {first}")]
pub struct Offence {
    /// Number of breaches.
    pub count: u64,
    /// The first breach.
    pub first: Entry,
}

/// Number of entries kept; later ones are only counted.
const KEPT: usize = 1024;

/// The breaches of a driver.
#[derive(Debug)]
pub struct Journal {
    entries: Vec<Entry>,
    counts: [u64; Class::COUNT],
    /// One bit per class.
    panic_on: u32,
}

impl Default for Journal {
    fn default() -> Self {
        Journal { entries: Vec::with_capacity(KEPT), counts: [0; Class::COUNT], panic_on: 0 }
    }
}

impl Journal {
    /// Makes the model panic from now on when one of these rules is broken, so that a test fails where the breach
    /// happens.
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

    /// Returns how often the rule was broken.
    pub fn count(&self, class: Class) -> u64 {
        self.counts[class as usize]
    }

    /// Returns the breaches, oldest first: the first 1024.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns, for each rule among `classes` that was broken, its first breach and the number of breaches.
    pub fn broken(&self, classes: &[Class]) -> Vec<Offence> {
        let broken = classes.iter().filter_map(|&class| self.demand_none(&[class]).err());
        broken.collect()
    }

    /// Checks that none of these rules was broken since the journal was last cleared.
    ///
    /// # Errors
    ///
    /// The first breach, with the number of breaches of all `classes`.
    pub fn demand_none(&self, classes: &[Class]) -> Result<(), Offence> {
        let count = classes.iter().map(|&class| self.count(class)).sum();
        match self.entries.iter().find(|entry| classes.contains(&entry.class)) {
            Some(&first) => Err(Offence { count, first }),
            // All kept entries are of other classes.
            None if count > 0 => {
                let class = classes.iter().copied().find(|&class| self.count(class) > 0).expect("they add up");
                Err(Offence { count, first: Entry { class, at: 0, place: 0, value: 0 } })
            }
            None => Ok(()),
        }
    }

    /// Removes all entries and counts.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.counts = [0; Class::COUNT];
    }
}
