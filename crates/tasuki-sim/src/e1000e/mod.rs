//! The Intel 82574L as its data sheet describes it: a state machine without threads, clocks or memory of its own.
//!
//! The owner of a [`Device`] passes it register accesses, frames and the time, and calls
//! [`step`](crate::model::Model::step). Only a step accesses the host's memory, raises interrupts and puts frames on the
//! wire; a register access changes the device's state at once.
//!
//! Where the data sheet leaves a choice, the model takes the one that is harder on a driver; docs/design/sim.md lists
//! these places.
#![allow(clippy::cast_possible_truncation, reason = "registers and descriptors are cut into their fields everywhere")]

mod fifo;
mod flow;
mod interrupt;
mod link;
mod model;
mod offload;
mod pci;
mod receive;
mod regs;
mod ring;
mod rss;
mod transmit;

use fifo::Fifo;
use pci::Pci;
use receive::ReceiveRing;
use regs::{BAR0_LEN, Kind, Reg, ctrl, ctrl_ext, eecd, icr, rctl, status, swsm, tctl};
use transmit::{Packet, TransmitRing};

use crate::journal::{Class, Journal};
use crate::model::Host;

pub use receive::Fate;

/// A BAR of the card, by its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// BAR 0: the registers.
    Registers,
    /// BAR 2: address and data port for access to the registers.
    Ports,
    /// BAR 3: MSI-X table and pending bits.
    MsiX,
}

impl Bar {
    /// Returns the kind and length in bytes of BAR `index`.
    pub fn at(index: u8) -> Option<(Bar, u32)> {
        match index {
            0 => Some((Bar::Registers, BAR0_LEN)),
            2 => Some((Bar::Ports, 32)),
            3 => Some((Bar::MsiX, 16 << 10)),
            _ => None,
        }
    }
}

/// Properties of a card.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ethernet address in the NVM.
    pub mac: [u8; 6],
    /// Nanoseconds from a reset, or the start of auto-negotiation, until the link is up.
    pub link_up_ns: u64,
    /// Nanoseconds from a reset until the card has read the NVM and set RAL and RAH to its address.
    pub nvm_load_ns: u64,
    /// Line rate for sent frames in bits per second; `None` for as fast as the model runs.
    pub transmit_rate: Option<u64>,
    /// Overwrite receive buffers when the card fetches their descriptors: a driver that reads a buffer too early
    /// reads rubbish.
    pub poison: bool,
    /// A message whose cause is in EIAC masks that cause as well, as in QEMU's model. The data sheet says only that
    /// the cause is cleared; a driver should work with either.
    pub eiac_masks: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mac: [0x02, 0x00, 0x00, 0x74, 0x00, 0x01],
            link_up_ns: 2_200_000_000,
            nvm_load_ns: 2_000_000,
            transmit_rate: None,
            poison: false,
            eiac_masks: false,
        }
    }
}

/// Faults that a test injects into the card.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// The card is unplugged: every register reads as ones, writes are ignored, and no frame moves.
    pub removed: bool,
    /// Receive queues for which the card stops filling descriptors.
    pub stuck_receive: [bool; 2],
    /// Transmit queues for which the card stops fetching descriptors.
    pub stuck_transmit: [bool; 2],
    /// Number of interrupts that the card loses, from the next one on.
    pub lost_interrupts: u32,
    /// Length in bytes that the card reports for every frame.
    pub receive_length: Option<u16>,
    /// Queue whose last written-back receive descriptor the card writes once more, whether or not the card still
    /// owns it.
    pub repeat_write_back: Option<usize>,
    /// Address that the card overwrites once, although the driver gave it no buffer there.
    pub stray_write: Option<u64>,
}

/// Frames that the card dropped and, overflow aside, counts in no register.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unseen {
    /// Arrived while receives were off (RCTL.EN): MPC does not count them.
    pub receive_off: u64,
    /// Arrived without a link.
    pub no_link: u64,
    /// Went to a queue without a ring.
    pub no_queue: u64,
    /// Failed the address filter.
    pub filtered: u64,
    /// Found the packet buffer full. MPC counts them too, until it is read.
    pub overflow: u64,
}

/// Nanoseconds from a reset until registers may be accessed again (§10.2.2.1, CTRL.RST).
const RESET_NS: u64 = 1_000;

/// Frames that a step takes from the wire before it delivers them to the host, and how many times per step it does
/// so.
const PULLED: usize = 32;
const PULLS: usize = 2;

/// An 82574L.
#[derive(Debug)]
pub struct Device {
    options: Options,
    /// Registers that only hold their value, and the counters.
    registers: Box<[u32]>,
    /// Rules that the driver broke.
    pub journal: Journal,
    /// Faults to inject.
    pub faults: Faults,
    pci: Pci,
    irq: interrupt::Interrupts,
    link: link::Link,
    flow: flow::Flow,
    fifo: Fifo,
    receive: [ReceiveRing; 2],
    transmit: [TransmitRing; 2],
    packet: Packet,
    /// The receive addresses as 48-bit numbers; `u64::MAX` for an unused entry.
    addresses: [u64; regs::RA_COUNT],
    unseen: Unseen,
    now: u64,
    /// End of the present reset.
    reset_until: u64,
    /// Until this time the receive unit, though switched off, still delivers the frames in its buffer.
    receive_until: u64,
    /// Earliest time at which the next frame may leave.
    send_at: u64,
    /// Time of the previous step.
    stepped_at: u64,
    io_address: u32,
}

impl Device {
    /// Makes a card in its power-on state.
    pub fn new(options: Options) -> Self {
        let mac = options.mac;
        let mut device = Device {
            options,
            registers: vec![0; BAR0_LEN as usize / 4].into_boxed_slice(),
            journal: Journal::default(),
            faults: Faults::default(),
            pci: Pci::new(mac),
            irq: interrupt::Interrupts::default(),
            link: link::Link::new(mac),
            flow: flow::Flow::default(),
            fifo: Fifo::new(0),
            receive: Default::default(),
            transmit: Default::default(),
            packet: Packet::default(),
            addresses: [u64::MAX; regs::RA_COUNT],
            unseen: Unseen::default(),
            now: 0,
            reset_until: 0,
            receive_until: 0,
            send_at: 0,
            stepped_at: 0,
            io_address: 0,
        };
        device.reset_mac(20 | 20 << 16);
        device
    }

    /// Returns whether the link is up.
    pub fn link(&self) -> bool {
        self.link.up
    }

    /// Returns the tails of both receive rings, then of both transmit rings.
    pub fn tails(&self) -> [u32; 4] {
        model::TAILS.map(|offset| self.get(Reg(offset)))
    }

    /// Returns the numbers of dropped frames.
    pub fn unseen(&self) -> Unseen {
        self.unseen
    }

    /// Returns how many frames, and how many bytes of the receive packet buffer, wait for descriptors.
    pub fn waiting(&self) -> (usize, usize) {
        (self.fifo.len(), self.fifo.used())
    }

    /// Switches MSI-X on and unmasks its vectors, or off and masks them, as a system does for a driver that uses
    /// MSI-X.
    pub fn enable_msix(&mut self, on: bool) {
        self.pci.function.enable_msix(on);
    }

    /// Masks or unmasks one MSI-X vector, as its table entry does.
    pub fn mask_vector(&mut self, vector: usize, masked: bool) {
        self.pci.function.mask_vector(vector, masked);
    }

    /// Returns address and data of an MSI-X vector's message, as the table holds them.
    pub fn message(&self, vector: usize) -> Option<(u64, u32)> {
        self.pci.function.message(vector)
    }

    fn stray(&mut self, host: &mut impl Host) {
        if let Some(at) = self.faults.stray_write.take() {
            // A posted write: the card gets no answer.
            let _ = host.write(at, &[0xa5; 64]);
        }
        let ring = self.faults.repeat_write_back.take().and_then(|queue| self.receive.get(queue));
        if let Some((at, descriptor)) = ring.and_then(|ring| ring.last) {
            let _ = host.write(at, &descriptor);
        }
    }

    /// Returns whether the card may access the host's memory now.
    fn may_dma(&self) -> bool {
        self.pci.master() && self.get(regs::CTRL) & ctrl::GIO_MASTER_DISABLE == 0
    }

    #[inline]
    fn get(&self, reg: Reg) -> u32 {
        self.registers[reg.0 as usize / 4]
    }

    #[inline]
    fn set(&mut self, reg: Reg, value: u32) {
        self.registers[reg.0 as usize / 4] = value;
    }

    /// Adds to a counter. Counters stop at their highest value.
    #[inline]
    fn count(&mut self, reg: Reg, by: u32) {
        self.set(reg, self.get(reg).saturating_add(by));
    }

    /// Adds to a counter that is two registers wide.
    #[inline]
    fn count_wide(&mut self, low: Reg, high: Reg, by: u64) {
        let sum = (u64::from(self.get(high)) << 32 | u64::from(self.get(low))).saturating_add(by);
        self.set(low, sum as u32);
        self.set(high, (sum >> 32) as u32);
    }

    /// Resets the MAC: CTRL.RST, or a stronger reset. PBA alone keeps its value over a software reset, since that is
    /// when a new value comes into force (§10.2.2.19).
    fn reset_mac(&mut self, pba: u32) {
        self.registers.fill(0);
        for (reg, value) in [
            (regs::CTRL, ctrl::FD | ctrl::SPEED_1000),
            (regs::STATUS, status::PHYRA),
            (regs::FCAL, 0x00c2_8001),
            (regs::FCAH, 0x0000_0100),
            (regs::FCT, 0x0000_8808),
            (regs::VET, 0x0000_8100),
            (regs::PBA, pba),
            // Sixteen attempts, a distance of 64 bytes, padding, several requests at once (RRTHRESH 1, MULR).
            (regs::TCTL, 0x3003_f0f8),
            (regs::TIPG, 0x0060_2006),
            (regs::TARC, 0x0000_0403),
            (regs::TARC.of(1), 0x0000_0403),
            (regs::RXDCTL, 0x0001_0000),
            (regs::RXDCTL.of(1), 0x0001_0000),
            // Configuration done: only the host reads the NVM.
            (regs::EEMNGCTL, 1 << 18),
        ] {
            self.set(reg, value);
        }
        self.addresses = [u64::MAX; regs::RA_COUNT];
        self.irq.reset();
        self.flow = flow::Flow::default();
        self.fifo.reset((pba as usize & 0xffff) << 10);
        self.receive = Default::default();
        self.transmit = Default::default();
        self.packet.clear();
        self.renegotiate();
        self.irq.cause = 0;
        self.reload_nvm();
        self.reset_until = self.now + RESET_NS;
        self.receive_until = 0;
    }

    fn set_address(&mut self, index: usize, low: u32, high: u32) {
        self.set(regs::RAL.nth(2 * index), low);
        self.set(regs::RAL.nth(2 * index + 1), high);
        let [a, b, c, d] = low.to_le_bytes();
        let [e, f, ..] = high.to_le_bytes();
        let valid = high >> 31 == 1;
        // Address select (AS): only "destination" makes a filter.
        let destination = high >> 16 & 3 == 0;
        self.addresses[index] = if valid && destination { receive::address(&[a, b, c, d, e, f]) } else { u64::MAX };
    }

    fn read_register(&mut self, offset: u32) -> u32 {
        self.pass_time();
        let reg = Reg(offset);
        if self.now < self.reset_until && self.reset_until > RESET_NS {
            self.journal.note(Class::DuringReset, self.now, offset.into(), 0);
            return if reg == regs::CTRL { self.get(reg) | ctrl::RST } else { 0 };
        }
        match regs::kind(offset) {
            Kind::None => {
                self.journal.note(Class::UnknownRegister, self.now, offset.into(), 0);
                0
            }
            Kind::Plain(_) => self.get(reg),
            Kind::Counter => {
                let value = self.get(reg);
                self.set(reg, 0);
                value
            }
            Kind::Special => self.read_special(reg),
        }
    }

    fn read_special(&mut self, reg: Reg) -> u32 {
        match reg {
            regs::STATUS => self.read_status(),
            regs::EECD => self.read_eecd(),
            regs::EERD => self.read_eerd(),
            regs::MDIC => self.read_mdic(),
            regs::ICR => self.read_icr(),
            regs::IMS => self.irq.mask,
            // Write-only registers.
            regs::ICS | regs::IMC => 0,
            regs::RDH => self.receive[0].cursors.head,
            regs::RDH1 => self.receive[1].cursors.head,
            regs::TDH => self.transmit[0].cursors.head,
            regs::TDH1 => self.transmit[1].cursors.head,
            // In words of eight bytes. TDFH, the next word to send, reads 0, so TDFT is the length of the data that
            // waits: a packet whose last descriptor has not come.
            regs::TDFT => self.packet.waiting().div_ceil(8),
            regs::TDFH | regs::TDFHS | regs::TDFTS | regs::TDFPC => 0,
            regs::SWSM => {
                // A read takes the semaphore if it is free.
                let value = self.get(reg);
                self.set(reg, value | swsm::SMBI);
                value
            }
            _ => self.get(reg),
        }
    }

    fn write_register(&mut self, offset: u32, value: u32) {
        self.pass_time();
        if self.now < self.reset_until && self.reset_until > RESET_NS {
            self.journal.note(Class::DuringReset, self.now, offset.into(), value.into());
            return;
        }
        let reg = Reg(offset);
        match regs::kind(offset) {
            Kind::None => self.journal.note(Class::UnknownRegister, self.now, offset.into(), value.into()),
            Kind::Plain(mask) => {
                self.set(reg, value & mask);
                if reg == regs::RDTR && value >> 31 == 1 {
                    // FPD: flush the delayed causes.
                    let causes = std::mem::take(&mut self.irq.receive_delay.causes);
                    self.raise(causes);
                    self.set(reg, value & 0xffff);
                }
            }
            Kind::Counter => {}
            Kind::Special => self.write_special(reg, value),
        }
    }

    fn write_special(&mut self, reg: Reg, value: u32) {
        match reg {
            regs::CTRL => self.write_ctrl(value),
            regs::CTRL_EXT => {
                self.set(reg, value & !ctrl_ext::EE_RST);
                if value & ctrl_ext::EE_RST != 0 {
                    self.reload_nvm();
                }
            }
            regs::EECD => self.set(reg, value & eecd::REQ),
            regs::EERD => self.write_eerd(value),
            regs::MDIC => self.write_mdic(value),
            regs::STATUS => self.set(reg, value & status::PHYRA),
            regs::ICR => {
                self.clear_causes(value);
                if self.get(regs::CTRL_EXT) & ctrl_ext::IAME != 0 {
                    self.mask_causes(self.get(regs::IAM));
                }
            }
            regs::ICS => self.raise(value & icr::ALL),
            regs::IMS => self.irq.mask |= value & icr::ALL,
            regs::IMC => self.mask_causes(value),
            regs::PBACL => self.pci.function.clear_pending(value),
            regs::RCTL => self.write_rctl(value),
            regs::RFCTL | regs::MRQC => {
                if value != self.get(reg) && self.get(regs::RCTL) & rctl::EN != 0 {
                    self.journal.note(Class::SetupWhileEnabled, self.now, reg.0.into(), value.into());
                }
                self.set(reg, value);
            }
            regs::TCTL => self.write_tctl(value),
            // Comes into force with the next reset.
            regs::PBA => self.set(reg, value & 0xffff),
            regs::SWSM | regs::EXTCNF_CTRL => self.set(reg, value),
            regs::FWSM | regs::FACTPS | regs::EEMNGCTL | regs::WUS => {}
            // A driver that writes these pointers does so on purpose, to send the contents of the packet buffer; the
            // model ignores it.
            regs::TDFH | regs::TDFT | regs::TDFHS | regs::TDFTS | regs::TDFPC => {}
            _ => self.write_row(reg, value),
        }
    }

    fn write_row(&mut self, reg: Reg, value: u32) {
        if (regs::RAL.0..regs::RAL.0 + 8 * regs::RA_COUNT as u32).contains(&reg.0) {
            let index = (reg.0 - regs::RAL.0) as usize / 8;
            let (low, high) = (regs::RAL.nth(2 * index), regs::RAL.nth(2 * index + 1));
            // Writing the lower half makes the address invalid until the upper half is written (§10.2.5.25).
            match reg == low {
                true => self.set_address(index, value, self.get(high)),
                false => self.set_address(index, self.get(low), value & 0x8003_ffff),
            }
        } else if reg.0 < regs::TDBAL.0 {
            self.write_receive_ring(reg, value);
        } else {
            self.write_transmit_ring(reg, value);
        }
    }

    fn write_ctrl(&mut self, value: u32) {
        if value & ctrl::RST != 0 {
            self.journal.note(Class::Reset, self.now, regs::CTRL.0.into(), value.into());
            self.reset_mac(self.get(regs::PBA));
            return;
        }
        let before = self.get(regs::CTRL);
        if value & ctrl::PHY_RST != 0 {
            self.journal.note(Class::PhyReset, self.now, regs::CTRL.0.into(), value.into());
            self.reset_phy();
        }
        let link = ctrl::SLU | ctrl::FRCSPD | ctrl::FRCDPLX | ctrl::SPEED | ctrl::FD;
        if (before ^ value) & link != 0 {
            self.journal.note(Class::LinkWrite, self.now, regs::CTRL.0.into(), value.into());
        }
        self.set(regs::CTRL, value & !ctrl::PHY_RST);
        self.pass_time();
    }

    fn write_tctl(&mut self, value: u32) {
        self.set(regs::TCTL, value & !tctl::SWXOFF);
        if value & tctl::SWXOFF != 0 {
            self.flow.software_pause = true;
        }
    }
}

fn ones(width: u8) -> u32 {
    u32::MAX >> (32 - 8 * u32::from(width.clamp(1, 4)))
}
