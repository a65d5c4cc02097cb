//! Registers and descriptors of the RTL8139C+: *Realtek RTL8139C(L)+*, rev. 1.6. Registers are in the order of their
//! offsets, as in the data sheet; descriptors are those of the C+ mode. Bits were checked against Linux's 8139cp and
//! QEMU's model.

use crate::nic::register::{Register, Ro, Rw, Wo};

pub const IDR0: Register<u32, Ro> = Register::at(0x00); //     ID registers 0 to 3: the card's address
pub const IDR4: Register<u32, Ro> = Register::at(0x04); //     ID registers 4 and 5
pub const MAR0: Register<u32, Rw> = Register::at(0x08); //     Multicast registers 0 to 3: a hash of 64 bits
pub const MAR4: Register<u32, Rw> = Register::at(0x0c); //     Multicast registers 4 to 7
pub const DTCCR: Register<u32, Rw> = Register::at(0x10); //    Dump Tally Counter Command, low
pub const DTCCR_HI: Register<u32, Rw> = Register::at(0x14); // and high
pub const TNPDS: Register<u32, Wo> = Register::at(0x20); //    Transmit Normal Priority Descriptors, low
pub const TNPDS_HI: Register<u32, Wo> = Register::at(0x24); // and high
pub const THPDS: Register<u32, Wo> = Register::at(0x28); //    Transmit High Priority Descriptors, low
pub const THPDS_HI: Register<u32, Wo> = Register::at(0x2c); // and high
pub const CR: Register<u8, Rw> = Register::at(0x37); //        Command
pub const IMR: Register<u16, Rw> = Register::at(0x3c); //      Interrupt Mask
pub const ISR: Register<u16, Rw> = Register::at(0x3e); //      Interrupt Status: writing ones clears
pub const TCR: Register<u32, Rw> = Register::at(0x40); //      Transmit Configuration
pub const RCR: Register<u32, Rw> = Register::at(0x44); //      Receive Configuration
pub const CR9346: Register<u8, Rw> = Register::at(0x50); //    93C46 Command: locks the configuration registers
pub const MSR: Register<u8, Ro> = Register::at(0x58); //       Media Status
pub const MULINT: Register<u16, Rw> = Register::at(0x5c); //   Multiple Interrupt Select
pub const BMCR: Register<u16, Ro> = Register::at(0x62); //     Basic Mode Control
pub const ANAR: Register<u16, Ro> = Register::at(0x66); //     Auto-Negotiation Advertisement
pub const ANLPAR: Register<u16, Ro> = Register::at(0x68); //   Auto-Negotiation Link Partner Ability
pub const TPPOLL: Register<u8, Wo> = Register::at(0xd9); //    Transmit Priority Polling
pub const CPCR: Register<u16, Rw> = Register::at(0xe0); //     C+ Command, §6.33
pub const RDSAR: Register<u32, Wo> = Register::at(0xe4); //    Receive Descriptor Start Address, low
pub const RDSAR_HI: Register<u32, Wo> = Register::at(0xe8); // and high
pub const ETTHR: Register<u8, Rw> = Register::at(0xec); //     Early Transmit Threshold

pub mod cr {
    /// Reset. Clears itself when the card is done.
    pub const RST: u8 = 1 << 4;
    /// Receiver enable.
    pub const RE: u8 = 1 << 3;
    /// Transmitter enable.
    pub const TE: u8 = 1 << 2;
}

/// Causes, in [`IMR`] and [`ISR`].
pub mod isr {
    /// Receive OK: a frame has come.
    pub const ROK: u16 = 1 << 0;
    /// Receive error: a frame with an error has come, and also took a descriptor.
    pub const RER: u16 = 1 << 1;
    /// Receive descriptor unavailable: a frame came and found none.
    pub const RDU: u16 = 1 << 4;
    /// Receive FIFO overflow.
    pub const FOVW: u16 = 1 << 6;
    /// All causes that leave frames to receive, or require room to be made.
    pub const RECEIVED: u16 = ROK | RER | RDU | FOVW;
    /// All causes.
    pub const ALL: u16 = u16::MAX;
}

pub mod tcr {
    /// Interframe gap: the standard one of 9.6 µs (at 10 Mb/s).
    pub const IFG: u32 = 3 << 24;
    /// DMA bursts of 1,024 bytes.
    pub const MXDMA_1024: u32 = 6 << 8;
}

pub mod rcr {
    /// Accept unicast frames for any station.
    pub const AAP: u32 = 1 << 0;
    /// Accept frames for our own address.
    pub const APM: u32 = 1 << 1;
    /// Accept multicasts whose hash has a one in MAR.
    pub const AM: u32 = 1 << 2;
    /// Accept broadcasts.
    pub const AB: u32 = 1 << 3;
    /// DMA bursts of 1,024 bytes.
    pub const MXDMA_1024: u32 = 6 << 8;
    /// Receive FIFO threshold: transfer whole frames.
    pub const RXFTH_WHOLE: u32 = 7 << 13;
}

pub mod cr9346 {
    /// Unlocks the configuration registers for writing.
    pub const UNLOCK: u8 = 0xc0;
    /// Locks the configuration registers.
    pub const LOCK: u8 = 0;
}

pub mod msr {
    /// The link is down.
    pub const LINKB: u8 = 1 << 2;
    /// The speed is 10 Mb/s, else 100.
    pub const SPEED_10: u8 = 1 << 3;
}

pub mod bmcr {
    /// Auto-negotiation enable.
    pub const ANE: u16 = 1 << 12;
    /// Full duplex, without auto-negotiation.
    pub const DUPLEX: u16 = 1 << 8;
}

/// Abilities in [`ANAR`] and [`ANLPAR`].
pub mod ability {
    /// 100BASE-TX, full duplex.
    pub const TX_FULL: u16 = 1 << 8;
    /// 100BASE-TX.
    pub const TX: u16 = 1 << 7;
    /// 10BASE-T, full duplex.
    pub const T10_FULL: u16 = 1 << 6;
}

pub mod tppoll {
    /// There are frames in the normal priority ring.
    pub const NPQ: u8 = 1 << 6;
}

pub mod cpcr {
    /// The transmitter uses C+ descriptors.
    pub const CPTX: u16 = 1 << 0;
    /// The receiver uses C+ descriptors.
    pub const CPRX: u16 = 1 << 1;
    /// Multiple reads and writes on the bus.
    pub const MULRW: u16 = 1 << 3;
    /// Addresses of 64 bits (dual address cycle).
    pub const DAC: u16 = 1 << 4;
}

pub mod dtccr {
    /// Dump now. Clears itself when the counters are in memory.
    pub const CMD: u32 = 1 << 3;
    /// Alignment of the address in bytes.
    pub const ALIGN: usize = 64;
}

/// Maximum number of descriptors in a ring, and the alignment of a ring's address in bytes.
pub const DESCRIPTORS_MAX: usize = 64;
pub const RING_ALIGN: usize = 256;

/// The first word of a descriptor, in both rings.
pub mod descriptor {
    /// The card owns the descriptor.
    pub const OWN: u32 = 1 << 31;
    /// End of ring: the next one is the first.
    pub const EOR: u32 = 1 << 30;
    /// First segment of a frame.
    pub const FS: u32 = 1 << 29;
    /// Last segment of a frame.
    pub const LS: u32 = 1 << 28;
}

/// The first word of a receive descriptor that the card has given back.
pub mod received {
    /// Error summary: check sequence, runt, watchdog, alignment.
    pub const RES: u32 = 1 << 20;
    /// The FIFO overflowed: part of the frame may be missing. The summary does not say so. Linux's 8139cp drops such a frame.
    pub const FOVF: u32 = 1 << 22;
    /// Length of the frame in bytes, including its check sequence.
    pub const LENGTH: u32 = 0x1fff;
}

/// The first word of a transmit descriptor that the card has given back.
pub mod sent {
    /// Error summary: underrun, collisions out of window, link failure, too many collisions.
    pub const TES: u32 = 1 << 23;
}
