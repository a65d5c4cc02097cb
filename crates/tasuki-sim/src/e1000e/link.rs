//! The parts between MAC and cable: NVM, PHY, auto-negotiation (§4.6, §6, §10.2.2).

use super::Device;
use super::regs::{self, ctrl, eecd, icr, mdic, status};
use crate::journal::Class;

/// Nanoseconds that the card takes to read a word of the NVM.
const NVM_WORD_NS: u64 = 10_000;

/// Nanoseconds that an access to a PHY register takes: 64 bits at 2.5 MHz.
const MDIO_NS: u64 = 26_000;

/// Sum of all words of an NVM.
const NVM_SUM: u16 = 0xbaba;
const NVM_WORDS: usize = 64;

/// Address of the only PHY.
const PHY_ADDRESS: u32 = 1;

/// PHY registers (IEEE 802.3 clause 22, and the 82574's own, §10.2.1).
mod phy {
    pub const CONTROL: usize = 0;
    pub const STATUS: usize = 1;
    pub const ID1: usize = 2;
    pub const ID2: usize = 3;
    pub const ADVERTISED: usize = 4;
    pub const PARTNER: usize = 5;
    pub const EXPANSION: usize = 6;
    pub const CONTROL_1000: usize = 9;
    pub const STATUS_1000: usize = 10;
    pub const EXTENDED_STATUS: usize = 15;
    pub const SPECIFIC_STATUS: usize = 17;

    pub const RESET: u16 = 1 << 15;
    pub const LOOPBACK: u16 = 1 << 14;
    pub const POWER_DOWN: u16 = 1 << 11;
    pub const ISOLATE: u16 = 1 << 10;
    /// Each of these bits alone cuts the PHY off from its partner.
    pub const ALONE: u16 = LOOPBACK | POWER_DOWN | ISOLATE;
    pub const RESTART: u16 = 1 << 9;
    pub const NEGOTIATED: u16 = 1 << 5;
    pub const LINK: u16 = 1 << 2;
}

#[derive(Debug)]
pub(super) struct Link {
    pub up: bool,
    /// When auto-negotiation ends, while it goes on.
    up_at: Option<u64>,
    /// Whether a partner is at the other end of the cable.
    pub partner: bool,
    phy: [u16; 32],
    nvm: [u16; NVM_WORDS],
    /// When the card will have read its NVM after a reset.
    nvm_at: u64,
    nvm_loaded: bool,
    /// Register value and completion time of the access that a write to EERD or MDIC began; time 0: none.
    eerd: (u32, u64),
    mdic: (u32, u64),
    mdic_interrupts: bool,
}

impl Link {
    pub fn new(mac: [u8; 6]) -> Self {
        let mut nvm = [0xffff; NVM_WORDS];
        for (word, pair) in nvm.iter_mut().zip(mac.as_chunks::<2>().0) {
            *word = u16::from_le_bytes(*pair);
        }
        // Identity, from Initialization Control 1 (§6.1.1) on.
        nvm[0x0a..0x10].copy_from_slice(&[0x062b, 0xa01f, 0x8086, 0x10d3, 0x8086, 0x0000]);
        let sum = nvm[..NVM_WORDS - 1].iter().fold(0_u16, |sum, word| sum.wrapping_add(*word));
        nvm[NVM_WORDS - 1] = NVM_SUM.wrapping_sub(sum);
        let mut link = Link {
            up: false,
            up_at: None,
            partner: true,
            phy: [0; 32],
            nvm,
            nvm_at: 0,
            nvm_loaded: false,
            eerd: (0, 0),
            mdic: (0, 0),
            mdic_interrupts: false,
        };
        link.reset_phy();
        link
    }

    fn reset_phy(&mut self) {
        self.phy = [0; 32];
        self.phy[phy::CONTROL] = 0x1140;
        self.phy[phy::STATUS] = 0x7949;
        self.phy[phy::ID1] = 0x0141;
        self.phy[phy::ID2] = 0x0cb1;
        self.phy[phy::ADVERTISED] = 0x0de1;
        self.phy[phy::EXPANSION] = 0x0004;
        self.phy[phy::CONTROL_1000] = 0x0e00;
        self.phy[phy::EXTENDED_STATUS] = 0x3000;
    }

    fn mac(&self) -> [u8; 6] {
        let [a, b, c] = [0, 1, 2].map(|i: usize| self.nvm[i].to_le_bytes());
        [a[0], a[1], b[0], b[1], c[0], c[1]]
    }
}

impl Device {
    /// Applies the changes that are due by now: NVM loaded, MDIC access completed, link up or down.
    pub(super) fn pass_time(&mut self) {
        if !self.link.nvm_loaded && self.now >= self.link.nvm_at {
            self.link.nvm_loaded = true;
            let [a, b, c, d, e, f] = self.link.mac();
            self.set_address(0, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0x80]));
        }
        if self.link.mdic_interrupts && self.now >= self.link.mdic.1 {
            self.link.mdic_interrupts = false;
            self.raise(icr::MDAC);
        }
        let wanted =
            self.link.partner && self.get(regs::CTRL) & ctrl::SLU != 0 && self.link.phy[phy::CONTROL] & phy::ALONE == 0;
        match (wanted, self.link.up, self.link.up_at) {
            (true, false, None) => self.link.up_at = Some(self.now + self.options.link_up_ns),
            (true, false, Some(at)) if self.now >= at => self.set_link(true),
            (false, true, _) => self.set_link(false),
            (false, false, Some(_)) => self.link.up_at = None,
            _ => {}
        }
    }

    fn set_link(&mut self, up: bool) {
        self.link.up = up;
        self.link.up_at = None;
        self.raise(icr::LSC);
    }

    /// Takes the link down; it comes up again after auto-negotiation, if it may.
    pub(super) fn renegotiate(&mut self) {
        if self.link.up {
            self.set_link(false);
        }
        self.link.up_at = None;
    }

    /// Starts to read the NVM again, as after a reset of the MAC.
    pub(super) fn reload_nvm(&mut self) {
        self.link.nvm_loaded = false;
        self.link.nvm_at = self.now + self.options.nvm_load_ns;
        self.link.eerd = (0, 0);
        self.link.mdic = (0, 0);
        self.link.mdic_interrupts = false;
    }

    pub(super) fn reset_phy(&mut self) {
        self.link.reset_phy();
        self.renegotiate();
    }

    pub(super) fn read_status(&self) -> u32 {
        let mut value = status::FD | status::SPEED_1000 | status::ASDV_1000;
        if self.link.up {
            value |= status::LU;
        }
        if self.now < self.flow.paused_until {
            value |= status::TXOFF;
        }
        if self.get(regs::STATUS) & status::PHYRA != 0 {
            value |= status::PHYRA;
        }
        if self.get(regs::CTRL) & ctrl::GIO_MASTER_DISABLE == 0 {
            value |= status::GIO_MASTER;
        }
        value
    }

    pub(super) fn read_eecd(&self) -> u32 {
        let loaded = if self.link.nvm_loaded { eecd::AUTO_RD } else { 0 };
        // A request for direct access is granted at once, since the NVM has no other user.
        let granted = if self.get(regs::EECD) & eecd::REQ != 0 { eecd::REQ | eecd::GNT } else { 0 };
        eecd::PRES | loaded | granted
    }

    pub(super) fn write_eerd(&mut self, value: u32) {
        if value & 1 != 0 {
            self.link.eerd = (value & 0xfffc, self.now + NVM_WORD_NS);
        }
    }

    pub(super) fn read_eerd(&self) -> u32 {
        let (value, at) = self.link.eerd;
        if at == 0 || self.now < at {
            return value;
        }
        let word = self.link.nvm.get((value >> 2) as usize).copied().unwrap_or(0xffff);
        value | 1 << 1 | u32::from(word) << 16
    }

    pub(super) fn write_mdic(&mut self, value: u32) {
        let register = (value >> 16 & 0x1f) as usize;
        let mut answer = value & !(mdic::R | mdic::E);
        if value >> 21 & 0x1f != PHY_ADDRESS {
            // No PHY has this address.
            answer |= mdic::E | 0xffff;
        } else if value >> 26 & 3 == mdic::OP_READ {
            answer = answer & !0xffff | u32::from(self.read_phy(register));
        } else if value >> 26 & 3 == mdic::OP_WRITE {
            self.journal.note(Class::PhyWrite, self.now, register as u64, (value & 0xffff).into());
            self.write_phy(register, value as u16);
        } else {
            answer |= mdic::E;
        }
        self.link.mdic = (answer, self.now + MDIO_NS);
        self.link.mdic_interrupts = value & mdic::I != 0;
    }

    pub(super) fn read_mdic(&self) -> u32 {
        let (value, at) = self.link.mdic;
        match at {
            0 => mdic::R,
            _ if self.now < at => value & !(mdic::R | mdic::E),
            _ => value | mdic::R,
        }
    }

    fn read_phy(&self, register: usize) -> u16 {
        let value = self.link.phy[register];
        match (register, self.link.up) {
            (phy::STATUS, true) => value | phy::LINK | phy::NEGOTIATED,
            // The partner has all our abilities, PAUSE included.
            (phy::PARTNER, true) => 0xcde1,
            (phy::EXPANSION, true) => value | 1,
            (phy::STATUS_1000, true) => 0x7c00,
            // 1000 Mb/s, full duplex, resolved, up.
            (phy::SPECIFIC_STATUS, true) => 0xac00,
            _ => value,
        }
    }

    fn write_phy(&mut self, register: usize, value: u16) {
        match register {
            phy::CONTROL => {
                if value & (phy::RESET | phy::RESTART) != 0 {
                    self.journal.note(Class::PhyReset, self.now, 0, value.into());
                    self.renegotiate();
                }
                if value & phy::RESET != 0 {
                    self.link.reset_phy();
                } else {
                    self.link.phy[phy::CONTROL] = value & !phy::RESTART;
                }
            }
            phy::STATUS
            | phy::ID1
            | phy::ID2
            | phy::PARTNER
            | phy::EXPANSION
            | phy::STATUS_1000
            | phy::EXTENDED_STATUS
            | phy::SPECIFIC_STATUS => {}
            _ => self.link.phy[register] = value,
        }
    }
}
