//! The Intel 82574L, as its data sheet describes it: a state machine without threads, clocks or memory of its own.
//!
//! Whoever has a [`Device`] gives it register accesses, frames and the time, and lets it [`step`](Device::step). Only in a step
//! does it reach the host's memory, raise interrupts and put frames on the wire; a register access changes its state at once.
//!
//! Where the data sheet leaves something open, the model does what is harder on a driver; docs/design/sim.md lists these places.
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
use pci::{Effect, Pci};
use receive::ReceiveRing;
use regs::{BAR0_LEN, Kind, Reg, ctrl, ctrl_ext, eecd, icr, rctl, status, swsm, tctl};
use transmit::{Packet, TransmitRing};

use crate::journal::{Class, Journal};
use crate::model::Host;
use crate::wire::Wire;

pub use receive::Fate;

/// What a BAR of the card is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// BAR 0: the registers.
    Registers,
    /// BAR 2: address and data port of the same.
    Ports,
    /// BAR 3: MSI-X table and pending bits.
    MsiX,
}

impl Bar {
    /// What is behind BAR `index`, and how many bytes.
    pub fn at(index: u8) -> Option<(Bar, u32)> {
        match index {
            0 => Some((Bar::Registers, BAR0_LEN)),
            2 => Some((Bar::Ports, 32)),
            3 => Some((Bar::MsiX, 16 << 10)),
            _ => None,
        }
    }
}

/// How a card is made.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its address, as in its NVM.
    pub mac: [u8; 6],
    /// From a reset, or a negotiation's begin, to the link, in nanoseconds.
    pub link_up_ns: u64,
    /// From a reset until the NVM is read and the address stands in RAL and RAH, in nanoseconds.
    pub nvm_load_ns: u64,
    /// Bits per second at which frames leave; `None` for as fast as the model runs.
    pub transmit_rate: Option<u64>,
    /// Overwrite receive buffers when the card fetches their descriptors: what a driver reads there too early is rubbish.
    pub poison: bool,
    /// A message whose cause is in EIAC masks that cause as well, as QEMU's model has it. The data sheet says only that the
    /// cause is cleared; a driver should be content with either.
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

/// What a test makes the card do wrong.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// It is out of its socket: every register reads as ones, nothing is written, nothing moves.
    pub removed: bool,
    /// It fills no descriptor of these receive queues any more.
    pub stuck_receive: [bool; 2],
    /// It fetches no descriptor of these transmit queues any more.
    pub stuck_transmit: [bool; 2],
    /// So many interrupts get lost.
    pub lost_interrupts: u32,
    /// It says that every frame has so many bytes.
    pub receive_length: Option<u16>,
    /// It writes the receive descriptor of this queue that it wrote back last once more, whoever has that now.
    pub repeat_write_back: Option<usize>,
    /// It writes there, once, where it has no business.
    pub stray_write: Option<u64>,
}

/// What no register of the card counts: frames that it never saw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unseen {
    /// Came while receives were off (RCTL.EN): MPC does not count them.
    pub receive_off: u64,
    /// Came while there was no link.
    pub no_link: u64,
    /// Went to a queue that has no ring.
    pub no_queue: u64,
    /// Did not pass the address filter.
    pub filtered: u64,
    /// Found the packet buffer full: MPC counts them too, until it is read.
    pub overflow: u64,
}

/// From a reset to when registers may be accessed again, in nanoseconds (§10.2.2.1, CTRL.RST).
const RESET_NS: u64 = 1_000;

/// Receive frames that a step takes from the wire before it gives them to the host, and how often.
const PULLED: usize = 32;
const PULLS: usize = 2;

/// An 82574L.
#[derive(Debug)]
pub struct Device {
    options: Options,
    /// What is written and read back, and the counters.
    registers: Box<[u32]>,
    /// What a driver did that it must not do.
    pub journal: Journal,
    /// What the card shall do wrong.
    pub faults: Faults,
    pci: Pci,
    irq: interrupt::Interrupts,
    link: link::Link,
    flow: flow::Flow,
    fifo: Fifo,
    receive: [ReceiveRing; 2],
    transmit: [TransmitRing; 2],
    packet: Packet,
    /// The receive addresses, as 48-bit numbers; more than that where there is none.
    addresses: [u64; regs::RA_COUNT],
    unseen: Unseen,
    now: u64,
    /// Until then a reset goes on.
    reset_until: u64,
    /// Until then the receive unit, which was switched off, goes on with what it has.
    receive_until: u64,
    /// From then on the next frame may leave.
    send_at: u64,
    /// When the step before this one was.
    stepped_at: u64,
    io_address: u32,
}

impl Device {
    /// A card as it is when power has just come on.
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

    /// As when power comes on, or the bus is reset.
    pub fn reset(&mut self, now: u64) {
        self.now = self.now.max(now);
        self.pci.reset();
        self.reset_phy();
        self.reset_mac(20 | 20 << 16);
    }

    /// Has the other end of the cable plugged in (as it is at first), or taken out.
    pub fn set_partner(&mut self, there: bool) {
        self.link.partner = there;
    }

    /// Whether frames can pass.
    pub fn link(&self) -> bool {
        self.link.up
    }

    /// Whether frames can pass and the driver has switched the receive unit on.
    pub fn receives(&self) -> bool {
        self.link.up && self.get(regs::RCTL) & rctl::EN != 0
    }

    /// What the tails of both receive rings and of both transmit rings hold.
    pub fn tails(&self) -> [u32; 4] {
        model::TAILS.map(|offset| self.get(Reg(offset)))
    }

    /// What no register counts.
    pub fn unseen(&self) -> Unseen {
        self.unseen
    }

    /// Frames, and bytes of the receive packet buffer, that wait for descriptors.
    pub fn waiting(&self) -> (usize, usize) {
        (self.fifo.len(), self.fifo.used())
    }

    /// MSI-X switched on or off and its vectors unmasked or masked, as a system does for a driver that has interrupts by it.
    pub fn enable_msix(&mut self, on: bool) {
        self.pci.enable_msix(on);
    }

    /// Masks or unmasks one MSI-X vector, as its table entry does.
    pub fn mask_vector(&mut self, vector: usize, masked: bool) {
        self.pci.mask_vector(vector, masked);
    }

    /// Address and data of an MSI-X vector's message, as they stand in the table.
    pub fn message(&self, vector: usize) -> Option<(u64, u32)> {
        self.pci.message(vector)
    }

    /// Reads `width` (1, 2 or 4) bytes of the configuration space.
    pub fn read_config(&self, offset: u32, width: u8) -> u32 {
        if self.faults.removed { ones(width) } else { self.pci.read(offset, width) }
    }

    /// Writes `width` (1, 2 or 4) bytes of the configuration space.
    pub fn write_config(&mut self, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if !self.faults.removed && self.pci.write(offset, width, value) == Effect::PowerUp {
            self.reset_mac(20 | 20 << 16);
        }
    }

    /// Reads `width` (1, 2 or 4) bytes behind a BAR.
    pub fn read(&mut self, bar: Bar, offset: u32, width: u8, now: u64) -> u32 {
        self.now = self.now.max(now);
        if self.faults.removed {
            return ones(width);
        }
        if !self.pci.memory_on() && bar != Bar::Ports {
            self.pci.unsupported_request();
            return ones(width);
        }
        let shift = 8 * (offset & 3);
        match (bar, offset) {
            (Bar::Registers, _) => {
                if width != 4 || shift != 0 {
                    self.journal.note(Class::OddAccess, self.now, offset.into(), width.into());
                }
                self.read_register(offset & !3) >> shift & ones(width)
            }
            (Bar::MsiX, _) => self.pci.table_read(offset & !3) >> shift & ones(width),
            (Bar::Ports, 0) => self.io_address,
            (Bar::Ports, 4) => self.read_register(self.io_address & !3),
            (Bar::Ports, _) => 0,
        }
    }

    /// Writes `width` (1, 2 or 4) bytes behind a BAR.
    pub fn write(&mut self, bar: Bar, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if self.faults.removed {
            return;
        }
        if !self.pci.memory_on() && bar != Bar::Ports {
            self.pci.unsupported_request();
            return;
        }
        match (bar, offset) {
            _ if width != 4 || offset & 3 != 0 => {
                self.journal.note(Class::OddAccess, self.now, offset.into(), value.into());
            }
            (Bar::Registers, _) => self.write_register(offset, value),
            (Bar::MsiX, _) => self.pci.table_write(offset, value),
            (Bar::Ports, 0) => self.io_address = value,
            (Bar::Ports, 4) => self.write_register(self.io_address & !3, value),
            (Bar::Ports, _) => {}
        }
    }

    /// Does what is to be done now: takes frames from the wire, moves them to memory, sends what the driver wants sent, raises
    /// interrupts. A bounded amount of it; says whether there was anything.
    pub fn step(&mut self, host: &mut impl Host, wire: &mut impl Wire, now: u64) -> bool {
        self.now = self.now.max(now);
        if self.faults.removed {
            return false;
        }
        self.pass_time();
        // Before anything is taken from the wire: who is to pause longer is told so before its pause is over, however late this step is.
        let mut busy = self.send_pause(wire);
        for _ in 0..PULLS {
            let mut pulled = 0;
            // Not more at once than the buffer holds anyway: how often the model is stepped is not the wire's business.
            while pulled < PULLED && self.fifo.used() <= self.fifo.capacity() / 2 {
                let Some(frame) = wire.receive(self.now) else { break };
                self.receive_from_wire(frame, now);
                self.pause_at_once(wire);
                pulled += 1;
            }
            busy |= self.deliver(host) || pulled > 0;
            if pulled < PULLED {
                break;
            }
        }
        if self.fifo.used() > self.fifo.capacity() / 2 {
            // The host has no room: what the wire brings now fills the buffer and then gets lost.
            for _ in 0..PULLED {
                let Some(frame) = wire.receive(self.now) else { break };
                self.receive_from_wire(frame, now);
                self.pause_at_once(wire);
                busy = true;
            }
        }
        busy |= self.send_pause(wire);
        busy |= self.transmit(host, wire);
        self.stray(host);
        self.signal(host);
        self.stepped_at = self.now;
        busy
    }

    fn stray(&mut self, host: &mut impl Host) {
        if let Some(at) = self.faults.stray_write.take() {
            // A posted write: the card does not learn what became of it.
            let _ = host.write(at, &[0xa5; 64]);
        }
        let ring = self.faults.repeat_write_back.take().and_then(|queue| self.receive.get(queue));
        if let Some((at, descriptor)) = ring.and_then(|ring| ring.last) {
            let _ = host.write(at, &descriptor);
        }
    }

    /// Whether the card may read and write memory now.
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

    /// Counters stay at their highest value.
    #[inline]
    fn count(&mut self, reg: Reg, by: u32) {
        self.set(reg, self.get(reg).saturating_add(by));
    }

    /// The same of one that is two registers wide.
    #[inline]
    fn count_wide(&mut self, low: Reg, high: Reg, by: u64) {
        let sum = (u64::from(self.get(high)) << 32 | u64::from(self.get(low))).saturating_add(by);
        self.set(low, sum as u32);
        self.set(high, (sum >> 32) as u32);
    }

    /// CTRL.RST and stronger. PBA is the one register that keeps what was written before a software reset, since only then
    /// does it come into force (§10.2.2.19).
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
            (regs::TIPG, 0x0060_2006),
            (regs::TARC, 0x0000_0403),
            (regs::TARC.of(1), 0x0000_0403),
            (regs::RXDCTL, 0x0001_0000),
            (regs::RXDCTL.of(1), 0x0001_0000),
            // The link's management: nobody but the host reads the NVM.
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
            // Write-only.
            regs::ICS | regs::IMC => 0,
            regs::RDH => self.receive[0].cursors.head,
            regs::RDH1 => self.receive[1].cursors.head,
            regs::TDH => self.transmit[0].cursors.head,
            regs::TDH1 => self.transmit[1].cursors.head,
            // In words of eight bytes, from the one that is sent next to the one that is written next: a packet of which the end has not come waits.
            regs::TDFT => self.packet.waiting().div_ceil(8),
            regs::TDFH | regs::TDFHS | regs::TDFTS | regs::TDFPC => 0,
            regs::SWSM => {
                // Reading the semaphore takes it, if it was free.
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
                    // FPD: flush what waits.
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
            regs::PBACL => self.pci.clear_pending(value),
            regs::RCTL => self.write_rctl(value),
            regs::RFCTL | regs::MRQC => {
                if value != self.get(reg) && self.get(regs::RCTL) & rctl::EN != 0 {
                    self.journal.note(Class::SetupWhileEnabled, self.now, reg.0.into(), value.into());
                }
                self.set(reg, value);
            }
            regs::TCTL => self.write_tctl(value),
            // In force after the next reset.
            regs::PBA => self.set(reg, value & 0xffff),
            regs::SWSM | regs::EXTCNF_CTRL => self.set(reg, value),
            regs::FWSM | regs::FACTPS | regs::EEMNGCTL | regs::WUS => {}
            // A driver that writes these knows what it does: it would have the card send what lies there.
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
