//! The registers of the 82574L, as a typed table.
//!
//! Source: *Intel 82574 GbE Controller Family Datasheet*, revision 3.4. Registers are described in its chapter 10.2; each group
//! below names the section.

use std::marker::PhantomData;

use crate::nic::bus::Registers;

/// Access of a register that can be read and written.
#[derive(Debug)]
pub enum Rw {}
/// Access of a register that can only be read.
#[derive(Debug)]
pub enum Ro {}
/// Access of a register that can only be written.
#[derive(Debug)]
pub enum Wo {}
/// Access of a register that reading clears.
#[derive(Debug)]
pub enum Cleared {}

/// A register of 32 bits, with access `A`.
#[derive(Debug)]
pub struct Reg<A> {
    offset: u32,
    access: PhantomData<A>,
}

impl<A> Clone for Reg<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Reg<A> {}

impl<A> Reg<A> {
    const fn at(offset: u32) -> Self {
        Reg { offset, access: PhantomData }
    }
}

impl Reg<Rw> {
    /// Returns the same register as read-only, so that it can be read together with others that are.
    pub const fn to_be_read(self) -> Reg<Ro> {
        Reg::at(self.offset)
    }
}

/// `COUNT` registers of the same kind, `STRIDE` bytes apart.
#[derive(Debug)]
pub struct Regs<A, const COUNT: u32, const STRIDE: u32> {
    first: u32,
    access: PhantomData<A>,
}

impl<A, const COUNT: u32, const STRIDE: u32> Regs<A, COUNT, STRIDE> {
    const fn at(first: u32) -> Self {
        Regs { first, access: PhantomData }
    }

    /// Returns register number `index`.
    pub const fn of(&self, index: u32) -> Reg<A> {
        assert!(index < COUNT, "there are not so many of this register");
        Reg::at(self.first + index * STRIDE)
    }
}

// General control: 10.2.2.
pub const CTRL: Reg<Rw> = Reg::at(0x0000); //      Device Control
pub const STATUS: Reg<Ro> = Reg::at(0x0008); //    Device Status
pub const EECD: Reg<Rw> = Reg::at(0x0010); //      EEPROM/Flash Control
pub const CTRL_EXT: Reg<Rw> = Reg::at(0x0018); //  Extended Device Control
pub const MDIC: Reg<Rw> = Reg::at(0x0020); //      MDI Control
pub const FCTTV: Reg<Rw> = Reg::at(0x0170); //     Flow Control Transmit Timer Value
pub const PBA: Reg<Rw> = Reg::at(0x1000); //       Packet Buffer Allocation
pub const FCRTV: Reg<Rw> = Reg::at(0x5f40); //     Flow Control Refresh Threshold Value

// PCIe: 10.2.3.
pub const GCR: Reg<Rw> = Reg::at(0x5b00); //       PCIe Control
pub const GCR2: Reg<Rw> = Reg::at(0x5b64); //      PCIe Control 2

// Interrupts: 10.2.4.
pub const ICR: Reg<Cleared> = Reg::at(0x00c0); //  Interrupt Cause; writing ones clears as well
pub const IMS: Reg<Rw> = Reg::at(0x00d0); //       Interrupt Mask Set
pub const IMC: Reg<Wo> = Reg::at(0x00d8); //       Interrupt Mask Clear
pub const EIAC: Reg<Rw> = Reg::at(0x00dc); //      Interrupt Auto Clear
pub const IVAR: Reg<Rw> = Reg::at(0x00e4); //      Interrupt Vector Allocation
pub const EITR: Regs<Rw, 5, 4> = Regs::at(0x00e8); // Extended Interrupt Throttling

// Receive: 10.2.5.
pub const RCTL: Reg<Rw> = Reg::at(0x0100); //      Receive Control
pub const FCRTL: Reg<Rw> = Reg::at(0x2160); //     Flow Control Receive Threshold Low
pub const FCRTH: Reg<Rw> = Reg::at(0x2168); //     Flow Control Receive Threshold High
pub const RDBAL: Regs<Rw, 2, 0x100> = Regs::at(0x2800); // Descriptor Base Address Low
pub const RDBAH: Regs<Rw, 2, 0x100> = Regs::at(0x2804); // Descriptor Base Address High
pub const RDLEN: Regs<Rw, 2, 0x100> = Regs::at(0x2808); // Descriptor Length
pub const RDH: Regs<Rw, 2, 0x100> = Regs::at(0x2810); // Descriptor Head
pub const RDT: Regs<Rw, 2, 0x100> = Regs::at(0x2818); // Descriptor Tail
pub const RDTR: Reg<Rw> = Reg::at(0x2820); //      Interrupt Delay Timer
pub const RXDCTL: Regs<Rw, 2, 0x100> = Regs::at(0x2828); // Descriptor Control
pub const RADV: Reg<Rw> = Reg::at(0x282c); //      Interrupt Absolute Delay Timer
pub const RXCSUM: Reg<Rw> = Reg::at(0x5000); //    Checksum Control
pub const RFCTL: Reg<Rw> = Reg::at(0x5008); //     Filter Control
pub const MTA: Regs<Rw, 128, 4> = Regs::at(0x5200); // Multicast Table Array
pub const RAL: Regs<Rw, 16, 8> = Regs::at(0x5400); // Address Low
pub const RAH: Regs<Rw, 16, 8> = Regs::at(0x5404); // Address High
pub const MRQC: Reg<Rw> = Reg::at(0x5818); //      Multiple Receive Queues Command
pub const RETA: Regs<Rw, 32, 4> = Regs::at(0x5c00); // Redirection Table
pub const RSSRK: Regs<Rw, 10, 4> = Regs::at(0x5c80); // RSS Random Key

// Transmit: 10.2.6.
pub const TCTL: Reg<Rw> = Reg::at(0x0400); //      Transmit Control
pub const TIPG: Reg<Rw> = Reg::at(0x0410); //      Inter-Packet Gap
pub const TDBAL: Reg<Rw> = Reg::at(0x3800); //     Descriptor Base Address Low
pub const TDBAH: Reg<Rw> = Reg::at(0x3804); //     Descriptor Base Address High
pub const TDLEN: Reg<Rw> = Reg::at(0x3808); //     Descriptor Length
pub const TDH: Reg<Rw> = Reg::at(0x3810); //       Descriptor Head
pub const TDT: Reg<Rw> = Reg::at(0x3818); //       Descriptor Tail
pub const TIDV: Reg<Rw> = Reg::at(0x3820); //      Interrupt Delay Value
pub const TXDCTL: Reg<Rw> = Reg::at(0x3828); //    Descriptor Control
pub const TADV: Reg<Rw> = Reg::at(0x382c); //      Interrupt Absolute Delay Value
pub const TARC0: Reg<Rw> = Reg::at(0x3840); //     Arbitration Count

// Diagnostics: 10.2.10.
pub const TDFH: Reg<Ro> = Reg::at(0x3410); //      Transmit Data FIFO Head
pub const TDFT: Reg<Ro> = Reg::at(0x3418); //      Transmit Data FIFO Tail

// Statistics: 10.2.7. Each counter stops at its highest value.
pub const CRCERRS: Reg<Cleared> = Reg::at(0x4000); // CRC Error
pub const ALGNERRC: Reg<Cleared> = Reg::at(0x4004); // Alignment Error
pub const RXERRC: Reg<Cleared> = Reg::at(0x400c); // Receive Error
pub const MPC: Reg<Cleared> = Reg::at(0x4010); //  Missed Packets
pub const SCC: Reg<Cleared> = Reg::at(0x4014); //  Single Collision
pub const ECOL: Reg<Cleared> = Reg::at(0x4018); // Excessive Collisions
pub const MCC: Reg<Cleared> = Reg::at(0x401c); //  Multiple Collision
pub const LATECOL: Reg<Cleared> = Reg::at(0x4020); // Late Collisions
pub const COLC: Reg<Cleared> = Reg::at(0x4028); // Collision
pub const DC: Reg<Cleared> = Reg::at(0x4030); //   Defer
pub const XONRXC: Reg<Cleared> = Reg::at(0x4048); // XON Received
pub const XONTXC: Reg<Cleared> = Reg::at(0x404c); // XON Transmitted
pub const XOFFRXC: Reg<Cleared> = Reg::at(0x4050); // XOFF Received
pub const XOFFTXC: Reg<Cleared> = Reg::at(0x4054); // XOFF Transmitted
pub const GPRC: Reg<Cleared> = Reg::at(0x4074); // Good Packets Received
pub const BPRC: Reg<Cleared> = Reg::at(0x4078); // Broadcast Packets Received
pub const MPRC: Reg<Cleared> = Reg::at(0x407c); // Multicast Packets Received
pub const GPTC: Reg<Cleared> = Reg::at(0x4080); // Good Packets Transmitted
pub const GORCL: Reg<Ro> = Reg::at(0x4088); //     Good Octets Received, low
pub const GORCH: Reg<Cleared> = Reg::at(0x408c); // and high: reading it clears both
pub const GOTCL: Reg<Ro> = Reg::at(0x4090); //     Good Octets Transmitted, low
pub const GOTCH: Reg<Cleared> = Reg::at(0x4094); // and high: reading it clears both
pub const RNBC: Reg<Cleared> = Reg::at(0x40a0); // Receive No Buffers
pub const RUC: Reg<Cleared> = Reg::at(0x40a4); //  Receive Undersize
pub const RFC: Reg<Cleared> = Reg::at(0x40a8); //  Receive Fragment
pub const ROC: Reg<Cleared> = Reg::at(0x40ac); //  Receive Oversize
pub const TORH: Reg<Cleared> = Reg::at(0x40c4); // Total Octets Received, high: clears low
pub const TOTH: Reg<Cleared> = Reg::at(0x40cc); // Total Octets Transmitted, high: clears low
pub const TPR: Reg<Cleared> = Reg::at(0x40d0); //  Total Packets Received
pub const TPT: Reg<Cleared> = Reg::at(0x40d4); //  Total Packets Transmitted
pub const MPTC: Reg<Cleared> = Reg::at(0x40f0); // Multicast Packets Transmitted
pub const BPTC: Reg<Cleared> = Reg::at(0x40f4); // Broadcast Packets Transmitted

/// Device Control.
pub mod ctrl {
    /// Finish the transactions on the bus, and begin no more.
    pub const GIO_MASTER_DISABLE: u32 = 1 << 2;
    /// Set Link Up: lets the PHY's link reach the MAC. Starts no negotiation.
    pub const SLU: u32 = 1 << 6;
    /// Force Speed.
    pub const FRCSPD: u32 = 1 << 11;
    /// Force Duplex.
    pub const FRCDPLX: u32 = 1 << 12;
    /// Software reset. Clears itself when the device is done.
    pub const RST: u32 = 1 << 26;
    /// Receive Flow Control Enable: pause when the partner asks for it.
    pub const RFCE: u32 = 1 << 27;
    /// Transmit Flow Control Enable: ask the partner to pause.
    pub const TFCE: u32 = 1 << 28;
    /// VLAN Mode Enable: strip VLAN tags.
    pub const VME: u32 = 1 << 30;
    /// PHY reset, too: the link goes down for seconds.
    pub const PHY_RST: u32 = 1 << 31;
}

/// Device Status.
pub mod status {
    /// Full Duplex.
    pub const FD: u32 = 1 << 0;
    /// Link Up.
    pub const LU: u32 = 1 << 1;
    /// Shift of the speed field: 0 is 10 Mb/s, 1 is 100, 2 and 3 are 1,000.
    pub const SPEED_SHIFT: u32 = 6;
    /// The device has requests in progress on the bus, or may begin some.
    pub const GIO_MASTER_ENABLE: u32 = 1 << 19;
}

/// MDI Control: access to the PHY.
pub mod mdic {
    /// Shift of the register number.
    pub const REGISTER_SHIFT: u32 = 16;
    /// PHY address, which is 1.
    pub const PHY: u32 = 1 << 21;
    /// Opcode: write the value to the PHY's register.
    pub const WRITE: u32 = 1 << 26;
    /// Opcode: read the value from the PHY's register.
    pub const READ: u32 = 2 << 26;
    /// Ready: the value is valid.
    pub const R: u32 = 1 << 28;
    /// Error: the value is not valid.
    pub const E: u32 = 1 << 30;
}

/// Registers of the PHY (IEEE 802.3, clauses 22.2.4 and 28.2.4).
pub mod phy {
    /// Control register (clause 22.2.4.1).
    pub const CONTROL: u32 = 0;
    /// Page that the other register numbers refer to: 0 after a reset (the data sheet's 10.2.1).
    pub const PAGE: u32 = 22;
    /// Checked bits of the control register: reset, loopback, negotiation, power down, isolation.
    pub const CONTROL_SOUND: u16 = 1 << 15 | 1 << 14 | 1 << 12 | 1 << 11 | 1 << 10;
    /// Value that resets the PHY. It then negotiates, for a gigabit and full duplex if possible.
    pub const CONTROL_RESET: u16 = 1 << 15 | 1 << 12 | 1 << 9 | 1 << 8 | 1 << 6;
    /// Required value of the checked bits: negotiation is on, all others are off.
    pub const CONTROL_NEGOTIATES: u16 = 1 << 12;
    /// Abilities that the PHY offers after a reset: 10 and 100 Mb/s, both in either duplex, and IEEE 802.3.
    pub const OFFERS: u16 = 0x01e1;
    /// Register with the abilities that our side offers.
    pub const ADVERTISED: u32 = 4;
    /// Register with the abilities that the partner offers.
    pub const PARTNER: u32 = 5;
    /// Ability bit: pauses, and may ask the partner to.
    pub const PAUSE: u16 = 1 << 10;
    /// Ability bit: does only one of the two.
    pub const ASYMMETRIC: u16 = 1 << 11;
}

/// Flow Control Receive Threshold Low.
pub mod fcrtl {
    /// XON Enable: the card tells the partner when it may go on.
    pub const XONE: u32 = 1 << 31;
}

/// EEPROM/Flash Control.
pub mod eecd {
    /// The card has read its configuration from the EEPROM, or has no EEPROM.
    pub const AUTO_RD: u32 = 1 << 9;
}

/// Extended Device Control.
pub mod ctrl_ext {
    /// Must be one, and its neighbour zero (according to the maker's own drivers).
    pub const RESERVED_ONE: u32 = 1 << 22;
    /// See [`RESERVED_ONE`].
    pub const RESERVED_ZERO: u32 = 1 << 23;
    /// An interrupt changes the interrupt mask as `EIAC` says.
    pub const EIAME: u32 = 1 << 24;
    /// Reading the causes changes the interrupt mask.
    pub const IAME: u32 = 1 << 27;
    /// Tells the management firmware that a driver is there.
    pub const DRV_LOAD: u32 = 1 << 28;
    /// Setting a mask bit clears the vector's pending bit.
    pub const PBA_CLR: u32 = 1 << 31;
}

/// PCIe Control, and PCIe Control 2.
pub mod gcr {
    /// Without this bit and the next, completions get lost while the bus sleeps (erratum of the 82574).
    pub const COMPLETIONS: u32 = 1 << 22;
    /// See [`COMPLETIONS`]; this bit is in `GCR2`.
    pub const COMPLETIONS_2: u32 = 1 << 0;
}

/// Interrupt causes, the same in `ICR`, `IMS`, `IMC` and `EIAC`.
pub mod cause {
    /// Receive queue 0 or 1 has written a descriptor back.
    pub const RXQ: u32 = 1 << 20 | 1 << 21;
}

/// Interrupt Vector Allocation.
pub mod ivar {
    /// Maps both receive queues to vector 0.
    pub const RXQ_TO_0: u32 = 1 << 3 | 1 << 7;
}

/// Receive Control.
pub mod rctl {
    /// Enable.
    pub const EN: u32 = 1 << 1;
    /// Unicast Promiscuous.
    pub const UPE: u32 = 1 << 3;
    /// Multicast Promiscuous.
    pub const MPE: u32 = 1 << 4;
    /// Long Packet Enable.
    pub const LPE: u32 = 1 << 5;
    /// Accept broadcasts.
    pub const BAM: u32 = 1 << 15;
    /// Strip the frame check sequence.
    pub const SECRC: u32 = 1 << 26;

    /// Bits of the buffer length: BSIZE, BSEX.
    pub const BUFFER: u32 = 3 << 16 | 1 << 25;

    /// Returns the bits for buffers of this length, if the card supports it.
    pub const fn buffer(bytes: u32) -> Option<u32> {
        // BSEX multiplies the BSIZE length by 16.
        const BSEX: u32 = 1 << 25;
        match bytes {
            2048 => Some(0),
            4096 => Some(BSEX | 3 << 16),
            8192 => Some(BSEX | 2 << 16),
            16384 => Some(BSEX | 1 << 16),
            _ => None,
        }
    }
}

/// Receive Filter Control.
pub mod rfctl {
    /// Extended Status: extended descriptors.
    pub const EXSTEN: u32 = 1 << 15;
}

/// Receive Address High.
pub mod rah {
    /// The address is valid.
    pub const AV: u32 = 1 << 31;
}

/// Receive Checksum Control.
pub mod rxcsum {
    /// The descriptor has the RSS hash instead of a checksum. RSS needs it.
    pub const PCSD: u32 = 1 << 13;
}

/// Multiple Receive Queues Command.
pub mod mrqc {
    /// Two queues, selected by the hash.
    pub const RSS: u32 = 1;
    /// Hashed fields: TCP over IPv4, IPv4, TCP over IPv6 with extensions, IPv6, TCP over IPv6.
    pub const FIELDS: u32 = 1 << 16 | 1 << 17 | 1 << 18 | 1 << 20 | 1 << 21;
}

/// Descriptor Control of receive and transmit queues.
pub mod dctl {
    /// Thresholds count descriptors, and the card writes back each descriptor as soon as it is done (`WTHRESH` = 1).
    pub const EACH: u32 = 1 << 24 | 1 << 16;
    /// Must be one for a transmit queue.
    pub const TX_RESERVED_ONE: u32 = 1 << 22;
}

/// Transmit Control.
pub mod tctl {
    /// Enable.
    pub const EN: u32 = 1 << 1;
    /// Pad Short Packets.
    pub const PSP: u32 = 1 << 3;
    /// Collision Threshold 15 and Collision Distance 63, as the data sheet advises.
    pub const COLLISIONS: u32 = 15 << 4 | 63 << 12;
    /// Multiple Requests (MULR), and a Read Request Threshold (RRTHRESH) of 1, as after a reset. Without them the card
    /// asks for one piece of a frame at a time, and waits for it. May change only while there is nothing to send.
    pub const REQUESTS: u32 = 1 << 28 | 1 << 29;
    /// Software XOFF: sends a PAUSE frame with the time in `FCTTV`. Clears itself.
    pub const SWXOFF: u32 = 1 << 22;
}

/// Transmit Arbitration Count.
pub mod tarc {
    /// Value after a reset (count 3, enabled), with the bit that must be one on the 82574.
    pub const SOUND: u32 = 0x403 | 1 << 26;
}

/// Transmit Inter-Packet Gap: 8, 8 and 6, as the data sheet advises for copper.
pub const TIPG_COPPER: u32 = 8 | 8 << 10 | 6 << 20;

/// Registers of the card, accessed over `R`. Each allows only the accesses of its type.
#[derive(Debug)]
pub struct Mmio<R>(pub R);

impl<R: Registers> Mmio<R> {
    #[inline]
    pub fn read(&self, reg: Reg<impl Readable>) -> u32 {
        self.0.read32(reg.offset)
    }

    #[inline]
    pub fn write(&self, reg: Reg<impl Writable>, value: u32) {
        self.0.write32(reg.offset, value);
    }

    /// Reads consecutive registers, starting with `first`.
    pub fn read_block(&self, first: Reg<impl Readable>, into: &mut [u32]) {
        self.0.read_block(first.offset, into);
    }

    /// Reads `registers` in order.
    pub fn read_each<const N: usize>(&self, registers: [Reg<Ro>; N]) -> [u32; N] {
        self.read_around(registers, 0, [])
    }

    /// Reads `registers` in order, and does the `writes` before the `nth` read.
    pub fn read_around<const N: usize, const W: usize>(
        &self,
        registers: [Reg<Ro>; N],
        nth: usize,
        writes: [(Reg<Rw>, u32); W],
    ) -> [u32; N] {
        let writes = writes.map(|(register, value)| (register.offset, value));
        self.0.read_around(registers.map(|register| register.offset), nth, &writes)
    }

    /// Reads a register that reading clears. It is a method of its own, so that no caller clears one by accident.
    pub fn take(&self, reg: Reg<Cleared>) -> u32 {
        self.0.read32(reg.offset)
    }

    /// Clears bits of a register where writing ones clears them.
    pub fn clear(&self, reg: Reg<Cleared>, bits: u32) {
        self.0.write32(reg.offset, bits);
    }

    /// Clears the bits of `clear`, then sets those of `set`.
    pub fn change(&self, reg: Reg<Rw>, clear: u32, set: u32) {
        self.write(reg, self.read(reg) & !clear | set);
    }
}

/// Access that [`Mmio::read`] accepts.
pub trait Readable {}
impl Readable for Rw {}
impl Readable for Ro {}

/// Access that [`Mmio::write`] accepts.
pub trait Writable {}
impl Writable for Rw {}
impl Writable for Wo {}
