//! The registers of the model, and their bits.
//!
//! Source: *Intel 82574 GbE Controller Family Datasheet*, revision 3.4. The § of each group is the section that
//! defines it.

/// A register: its offset in BAR 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reg(pub u32);

impl Reg {
    /// Returns the same register for receive or transmit queue `queue`; `self` is that of queue 0.
    pub const fn of(self, queue: usize) -> Reg {
        Reg(self.0 + 0x100 * queue as u32)
    }

    /// Returns register `index` of an array; `self` is the first.
    pub const fn nth(self, index: usize) -> Reg {
        Reg(self.0 + 4 * index as u32)
    }
}

/// Length of BAR 0 in bytes.
pub const BAR0_LEN: u32 = 128 << 10;

// General, §10.2.2
pub const CTRL: Reg = Reg(0x0_0000);
pub const STATUS: Reg = Reg(0x0_0008);
pub const EECD: Reg = Reg(0x0_0010);
pub const EERD: Reg = Reg(0x0_0014);
pub const CTRL_EXT: Reg = Reg(0x0_0018);
pub const FLA: Reg = Reg(0x0_001c);
pub const MDIC: Reg = Reg(0x0_0020);
pub const FCAL: Reg = Reg(0x0_0028);
pub const FCAH: Reg = Reg(0x0_002c);
pub const FCT: Reg = Reg(0x0_0030);
pub const VET: Reg = Reg(0x0_0038);
pub const FCTTV: Reg = Reg(0x0_0170);
pub const FCRTV: Reg = Reg(0x0_5f40);
pub const LEDCTL: Reg = Reg(0x0_0e00);
pub const EXTCNF_CTRL: Reg = Reg(0x0_0f00);
pub const EXTCNF_SIZE: Reg = Reg(0x0_0f08);
pub const PHY_CTRL: Reg = Reg(0x0_0f10);
pub const PBA: Reg = Reg(0x0_1000);
pub const PBS: Reg = Reg(0x0_1008);
pub const EEMNGCTL: Reg = Reg(0x0_1010);

// PCIe, §10.2.3
pub const GCR: Reg = Reg(0x0_5b00);
pub const GSCL: Reg = Reg(0x0_5b10);
pub const FACTPS: Reg = Reg(0x0_5b30);
pub const SWSM: Reg = Reg(0x0_5b50);
pub const FWSM: Reg = Reg(0x0_5b54);
pub const SW_FW_SYNC: Reg = Reg(0x0_5b5c);
pub const GCR2: Reg = Reg(0x0_5b64);
pub const PBACL: Reg = Reg(0x0_5b68);

// Interrupts, §10.2.4
pub const ICR: Reg = Reg(0x0_00c0);
pub const ITR: Reg = Reg(0x0_00c4);
pub const ICS: Reg = Reg(0x0_00c8);
pub const IMS: Reg = Reg(0x0_00d0);
pub const IMC: Reg = Reg(0x0_00d8);
pub const EIAC: Reg = Reg(0x0_00dc);
pub const IAM: Reg = Reg(0x0_00e0);
pub const IVAR: Reg = Reg(0x0_00e4);
pub const EITR: Reg = Reg(0x0_00e8);

// Receive, §10.2.5
pub const RCTL: Reg = Reg(0x0_0100);
pub const ERT: Reg = Reg(0x0_2008);
pub const FCRTL: Reg = Reg(0x0_2160);
pub const FCRTH: Reg = Reg(0x0_2168);
pub const PSRCTL: Reg = Reg(0x0_2170);
pub const RDBAL: Reg = Reg(0x0_2800);
pub const RDBAH: Reg = Reg(0x0_2804);
pub const RDLEN: Reg = Reg(0x0_2808);
pub const RDH: Reg = Reg(0x0_2810);
pub const RDH1: Reg = RDH.of(1);
pub const RDT: Reg = Reg(0x0_2818);
pub const RDTR: Reg = Reg(0x0_2820);
pub const RXDCTL: Reg = Reg(0x0_2828);
pub const RADV: Reg = Reg(0x0_282c);
pub const RSRPD: Reg = Reg(0x0_2c00);
pub const RAID: Reg = Reg(0x0_2c08);
pub const RXCSUM: Reg = Reg(0x0_5000);
pub const RFCTL: Reg = Reg(0x0_5008);
pub const MTA: Reg = Reg(0x0_5200);
pub const MTA_LEN: usize = 128;
pub const RAL: Reg = Reg(0x0_5400);
pub const RA_COUNT: usize = 16;
pub const VFTA: Reg = Reg(0x0_5600);
pub const VFTA_LEN: usize = 128;
pub const MRQC: Reg = Reg(0x0_5818);
pub const RETA: Reg = Reg(0x0_5c00);
pub const RETA_LEN: usize = 32;
pub const RSSRK: Reg = Reg(0x0_5c80);
pub const RSSRK_LEN: usize = 10;

// Transmit, §10.2.6
pub const TCTL: Reg = Reg(0x0_0400);
pub const TCTL_EXT: Reg = Reg(0x0_0404);
pub const TIPG: Reg = Reg(0x0_0410);
pub const AIT: Reg = Reg(0x0_0458);
pub const TDBAL: Reg = Reg(0x0_3800);
pub const TDBAH: Reg = Reg(0x0_3804);
pub const TDLEN: Reg = Reg(0x0_3808);
pub const TDH: Reg = Reg(0x0_3810);
pub const TDH1: Reg = TDH.of(1);
pub const TDT: Reg = Reg(0x0_3818);
pub const TIDV: Reg = Reg(0x0_3820);
pub const TXDCTL: Reg = Reg(0x0_3828);
pub const TADV: Reg = Reg(0x0_382c);
pub const TARC: Reg = Reg(0x0_3840);

// Diagnostics, §10.2.10: the packet buffer's transmit part
pub const TDFH: Reg = Reg(0x0_3410);
pub const TDFT: Reg = Reg(0x0_3418);
pub const TDFHS: Reg = Reg(0x0_3420);
pub const TDFTS: Reg = Reg(0x0_3428);
pub const TDFPC: Reg = Reg(0x0_3430);

// Statistics, §10.2.7; a read clears each of them
pub const STATISTICS: std::ops::RangeInclusive<u32> = 0x0_4000..=0x0_4124;
pub const MPC: Reg = Reg(0x0_4010);
pub const XONRXC: Reg = Reg(0x0_4048);
pub const XONTXC: Reg = Reg(0x0_404c);
pub const XOFFRXC: Reg = Reg(0x0_4050);
pub const XOFFTXC: Reg = Reg(0x0_4054);
pub const FCRUC: Reg = Reg(0x0_4058);
pub const PRC64: Reg = Reg(0x0_405c);
pub const GPRC: Reg = Reg(0x0_4074);
pub const BPRC: Reg = Reg(0x0_4078);
pub const MPRC: Reg = Reg(0x0_407c);
pub const GPTC: Reg = Reg(0x0_4080);
pub const GORCL: Reg = Reg(0x0_4088);
pub const GORCH: Reg = Reg(0x0_408c);
pub const GOTCL: Reg = Reg(0x0_4090);
pub const GOTCH: Reg = Reg(0x0_4094);
pub const RNBC: Reg = Reg(0x0_40a0);
pub const RUC: Reg = Reg(0x0_40a4);
pub const ROC: Reg = Reg(0x0_40ac);
pub const TORL: Reg = Reg(0x0_40c0);
pub const TORH: Reg = Reg(0x0_40c4);
pub const TOTL: Reg = Reg(0x0_40c8);
pub const TOTH: Reg = Reg(0x0_40cc);
pub const TPR: Reg = Reg(0x0_40d0);
pub const TPT: Reg = Reg(0x0_40d4);
pub const PTC64: Reg = Reg(0x0_40d8);
pub const MPTC: Reg = Reg(0x0_40f0);
pub const BPTC: Reg = Reg(0x0_40f4);
pub const TSCTC: Reg = Reg(0x0_40f8);
pub const IAC: Reg = Reg(0x0_4100);
pub const ICRXDMTC: Reg = Reg(0x0_4120);

// Wake-up and management, §10.2.8 and §10.2.9
pub const WUC: Reg = Reg(0x0_5800);
pub const WUFC: Reg = Reg(0x0_5808);
pub const WUS: Reg = Reg(0x0_5810);
pub const MANC: Reg = Reg(0x0_5820);
pub const MANC2H: Reg = Reg(0x0_5860);

pub mod ctrl {
    pub const FD: u32 = 1 << 0;
    /// The card starts no new bus requests; STATUS shows when the old ones are done.
    pub const GIO_MASTER_DISABLE: u32 = 1 << 2;
    pub const SLU: u32 = 1 << 6;
    pub const SPEED_1000: u32 = 2 << 8;
    pub const SPEED: u32 = 3 << 8;
    pub const FRCSPD: u32 = 1 << 11;
    pub const FRCDPLX: u32 = 1 << 12;
    pub const RST: u32 = 1 << 26;
    pub const RFCE: u32 = 1 << 27;
    pub const TFCE: u32 = 1 << 28;
    pub const VME: u32 = 1 << 30;
    pub const PHY_RST: u32 = 1 << 31;
}

pub mod status {
    pub const FD: u32 = 1 << 0;
    pub const LU: u32 = 1 << 1;
    pub const TXOFF: u32 = 1 << 4;
    pub const SPEED_1000: u32 = 2 << 6;
    pub const ASDV_1000: u32 = 2 << 8;
    pub const PHYRA: u32 = 1 << 10;
    pub const GIO_MASTER: u32 = 1 << 19;
}

pub mod eecd {
    /// An NVM is present.
    pub const PRES: u32 = 1 << 8;
    /// The card has read the NVM after a reset.
    pub const AUTO_RD: u32 = 1 << 9;
    pub const REQ: u32 = 1 << 6;
    pub const GNT: u32 = 1 << 7;
}

pub mod ctrl_ext {
    pub const EE_RST: u32 = 1 << 13;
    pub const EIAME: u32 = 1 << 24;
    pub const IAME: u32 = 1 << 27;
}

pub mod mdic {
    pub const OP_WRITE: u32 = 1;
    pub const OP_READ: u32 = 2;
    pub const R: u32 = 1 << 28;
    pub const I: u32 = 1 << 29;
    pub const E: u32 = 1 << 30;
}

pub mod icr {
    pub const TXDW: u32 = 1 << 0;
    pub const TXQE: u32 = 1 << 1;
    pub const LSC: u32 = 1 << 2;
    pub const RXDMT0: u32 = 1 << 4;
    pub const RXO: u32 = 1 << 6;
    pub const RXT0: u32 = 1 << 7;
    pub const MDAC: u32 = 1 << 9;
    pub const TXD_LOW: u32 = 1 << 15;
    pub const SRPD: u32 = 1 << 16;
    pub const ACK: u32 = 1 << 17;
    pub const MNG: u32 = 1 << 18;
    pub const RXQ0: u32 = 1 << 20;
    pub const TXQ0: u32 = 1 << 22;
    pub const OTHER: u32 = 1 << 24;
    pub const INT_ASSERTED: u32 = 1 << 31;
    /// The causes that OTHER stands for.
    pub const OTHERS: u32 = LSC | RXO | MDAC | SRPD | ACK | MNG;
    /// All causes that can be set.
    pub const ALL: u32 = TXDW | TXQE | RXDMT0 | RXT0 | TXD_LOW | OTHERS | (3 * RXQ0) | (3 * TXQ0) | OTHER;
}

pub mod rctl {
    pub const EN: u32 = 1 << 1;
    pub const UPE: u32 = 1 << 3;
    pub const MPE: u32 = 1 << 4;
    pub const LPE: u32 = 1 << 5;
    pub const BAM: u32 = 1 << 15;
    pub const PMCF: u32 = 1 << 23;
    pub const BSEX: u32 = 1 << 25;
    pub const SECRC: u32 = 1 << 26;
    /// Bits that say where descriptors and bytes go; a driver may change them only while receives are off.
    pub const LAYOUT: u32 = 3 << 10 | 3 << 16 | BSEX | SECRC | 0xf << 27;
}

pub mod rfctl {
    pub const EXSTEN: u32 = 1 << 15;
}

pub mod rxcsum {
    pub const IPOFL: u32 = 1 << 8;
    pub const TUOFL: u32 = 1 << 9;
    pub const PCSD: u32 = 1 << 13;
}

pub mod mrqc {
    pub const RSS: u32 = 1;
    pub const TCP_IPV4: u32 = 1 << 16;
    pub const IPV4: u32 = 1 << 17;
    pub const TCP_IPV6: u32 = 1 << 18;
    pub const IPV6_EX: u32 = 1 << 19;
    pub const IPV6: u32 = 1 << 20;
}

pub mod fcrtl {
    /// Send XON when the buffer has drained.
    pub const XONE: u32 = 1 << 31;
}

pub mod tctl {
    pub const EN: u32 = 1 << 1;
    pub const PSP: u32 = 1 << 3;
    pub const SWXOFF: u32 = 1 << 22;
}

pub mod tarc {
    pub const ENABLE: u32 = 1 << 10;
}

pub mod swsm {
    pub const SMBI: u32 = 1 << 0;
}

/// Status and error bits of a receive descriptor (§7.1.4 and §7.1.5), in the places of the extended form.
pub mod rxd {
    pub const DD: u32 = 1 << 0;
    pub const EOP: u32 = 1 << 1;
    pub const IXSM: u32 = 1 << 2;
    pub const VP: u32 = 1 << 3;
    pub const UDPCS: u32 = 1 << 4;
    pub const TCPCS: u32 = 1 << 5;
    pub const IPCS: u32 = 1 << 6;
    pub const TCPE: u32 = 1 << 29;
    pub const IPE: u32 = 1 << 30;
}

/// Command and status bits of a transmit descriptor (§7.2.10 and §7.2.11), in its second word.
pub mod txd {
    pub const EOP: u64 = 1 << 24;
    pub const IFCS: u64 = 1 << 25;
    /// Legacy descriptor: insert the checksum. The same bit of an extended one is TSE: cut into segments.
    pub const IC: u64 = 1 << 26;
    pub const TSE: u64 = 1 << 26;
    pub const RS: u64 = 1 << 27;
    pub const DEXT: u64 = 1 << 29;
    pub const VLE: u64 = 1 << 30;
    pub const IDE: u64 = 1 << 31;
    pub const DD: u64 = 1 << 32;
    pub const IXSM: u64 = 1 << 40;
    pub const TXSM: u64 = 1 << 41;
    /// Context descriptor: the payload is TCP.
    pub const TCP: u64 = 1 << 24;
    /// Context descriptor: the packet is IPv4.
    pub const IP: u64 = 1 << 25;
}

/// How a register answers reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Holds the written value, in the bits of the mask.
    Plain(u32),
    /// Has side effects.
    Special,
    /// A counter that a read clears.
    Counter,
    /// No register.
    None,
}

/// Returns the kind of the register at an offset, a multiple of 4.
pub fn kind(offset: u32) -> Kind {
    match Reg(offset) {
        CTRL | STATUS | EECD | EERD | CTRL_EXT | MDIC | ICR | ICS | IMS | IMC | RCTL | TCTL | PBA | SWSM
        | EXTCNF_CTRL | RFCTL | MRQC | PBACL | FWSM | FACTPS | EEMNGCTL | WUS | TDFH | TDFT | TDFHS | TDFTS | TDFPC => {
            Kind::Special
        }
        FLA | FCAL | LEDCTL | EXTCNF_SIZE | PHY_CTRL | GCR | GCR2 | GSCL | PBS | SW_FW_SYNC | RXCSUM | PSRCTL
        | TIPG | AIT | TCTL_EXT | WUC | WUFC | MANC | MANC2H => Kind::Plain(u32::MAX),
        FCAH | FCT | VET | FCTTV | FCRTV | ITR | RSRPD | RAID | TIDV | TADV | RADV | ERT => Kind::Plain(0xffff),
        FCRTL => Kind::Plain(0x8000_fff8),
        FCRTH => Kind::Plain(0xfff8),
        EIAC => Kind::Plain(0x01f0_0000),
        IAM => Kind::Plain(super::regs::icr::ALL),
        IVAR => Kind::Plain(0x800f_ffff),
        RDTR => Kind::Plain(0x8000_ffff),
        _ => kind_of_row(offset),
    }
}

fn kind_of_row(offset: u32) -> Kind {
    let within = |first: Reg, count: usize| (first.0..first.0 + 4 * count as u32).contains(&offset);
    if STATISTICS.contains(&offset) {
        return Kind::Counter;
    }
    if within(EITR, 5) {
        return Kind::Plain(0xffff);
    }
    if within(RAL, 2 * RA_COUNT) {
        return Kind::Special;
    }
    if within(MTA, MTA_LEN) || within(VFTA, VFTA_LEN) || within(RETA, RETA_LEN) || within(RSSRK, RSSRK_LEN) {
        return Kind::Plain(u32::MAX);
    }
    // Bit 8 is the queue's number.
    match Reg(offset & !0x100) {
        RDBAL | RDBAH | RDLEN | RDH | RDT | TDBAL | TDBAH | TDLEN | TDH | TDT => Kind::Special,
        RXDCTL | TXDCTL | TARC => Kind::Plain(u32::MAX),
        _ => Kind::None,
    }
}
