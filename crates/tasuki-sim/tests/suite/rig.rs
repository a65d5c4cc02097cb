//! An 82574L on a [`Bench`]; the test does each access of a driver.

use std::ops::Deref;

use tasuki_sim::e1000e::{Bar, Device, Options};

pub use crate::bench::*;

pub const CTRL: u32 = 0x0000;
pub const STATUS: u32 = 0x0008;
pub const EECD: u32 = 0x0010;
pub const EERD: u32 = 0x0014;
pub const CTRL_EXT: u32 = 0x0018;
pub const MDIC: u32 = 0x0020;
pub const ICR: u32 = 0x00c0;
pub const ICS: u32 = 0x00c8;
pub const IMS: u32 = 0x00d0;
pub const IMC: u32 = 0x00d8;
pub const EIAC: u32 = 0x00dc;
pub const IAM: u32 = 0x00e0;
pub const IVAR: u32 = 0x00e4;
pub const EITR: u32 = 0x00e8;
pub const RCTL: u32 = 0x0100;
pub const FCTTV: u32 = 0x0170;
pub const TCTL: u32 = 0x0400;
pub const PBA: u32 = 0x1000;
pub const FCRTL: u32 = 0x2160;
pub const FCRTH: u32 = 0x2168;
pub const RDBAL: u32 = 0x2800;
pub const RDBAH: u32 = 0x2804;
pub const RDLEN: u32 = 0x2808;
pub const RDH: u32 = 0x2810;
pub const RDT: u32 = 0x2818;
pub const RDTR: u32 = 0x2820;
pub const RADV: u32 = 0x282c;
pub const TDBAL: u32 = 0x3800;
pub const TDBAH: u32 = 0x3804;
pub const TDLEN: u32 = 0x3808;
pub const TDH: u32 = 0x3810;
pub const TDT: u32 = 0x3818;
pub const TIDV: u32 = 0x3820;
pub const TARC0: u32 = 0x3840;
pub const MPC: u32 = 0x4010;
pub const XONRXC: u32 = 0x4048;
pub const XONTXC: u32 = 0x404c;
pub const XOFFRXC: u32 = 0x4050;
pub const XOFFTXC: u32 = 0x4054;
pub const GPRC: u32 = 0x4074;
pub const GPTC: u32 = 0x4080;
pub const GORCL: u32 = 0x4088;
pub const GORCH: u32 = 0x408c;
pub const GOTCL: u32 = 0x4090;
pub const RNBC: u32 = 0x40a0;
pub const ROC: u32 = 0x40ac;
pub const TPR: u32 = 0x40d0;
pub const RXCSUM: u32 = 0x5000;
pub const RFCTL: u32 = 0x5008;
pub const MTA: u32 = 0x5200;
pub const RAL: u32 = 0x5400;
pub const RAH: u32 = 0x5404;
pub const MRQC: u32 = 0x5818;
pub const SWSM: u32 = 0x5b50;
pub const RETA: u32 = 0x5c00;
pub const RSSRK: u32 = 0x5c80;

pub const SLU: u32 = 1 << 6;
pub const RST: u32 = 1 << 26;
pub const RFCE: u32 = 1 << 27;
pub const TFCE: u32 = 1 << 28;
pub const VME: u32 = 1 << 30;
pub const LU: u32 = 1 << 1;
pub const EN: u32 = 1 << 1;
pub const BAM: u32 = 1 << 15;
pub const SECRC: u32 = 1 << 26;
pub const LSC: u32 = 1 << 2;
pub const RXDMT0: u32 = 1 << 4;
pub const RXO: u32 = 1 << 6;
pub const RXT0: u32 = 1 << 7;
pub const RXQ0: u32 = 1 << 20;
pub const TXQ0: u32 = 1 << 22;
pub const OTHER: u32 = 1 << 24;

/// Offsets of the parts of the card's memory.
pub const RX_RING: [usize; 2] = [0x0000, 0x1000];
pub const TX_RING: [usize; 2] = [0x2000, 0x3000];
pub const TX_BUFFERS: usize = 0x10000;
pub const RX_BUFFERS: [usize; 2] = [0x40000, 0xa0000];

pub struct Rig(Bench<Device>);

impl Deref for Rig {
    type Target = Bench<Device>;

    fn deref(&self) -> &Bench<Device> {
        &self.0
    }
}

/// Contents of a receive descriptor after its write-back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    pub status: u32,
    pub len: usize,
    pub hash: u32,
    pub kind: u32,
    pub vlan: u16,
}

impl Rig {
    /// Makes a card on its bus: memory decoding and bus mastering on, MSI-X enabled as by a system.
    pub fn new() -> Self {
        Self::with_options(Options { mac: MAC, ..Options::default() })
    }

    pub fn with_options(options: Options) -> Self {
        Rig(Bench::new(Device::new(options)))
    }

    /// Makes a card with its link up and the NVM read.
    pub fn linked() -> Self {
        let rig = Self::new();
        rig.link_up();
        rig
    }

    /// Makes a linked card with receive ring 0 and transmit ring 0 of `count` descriptors each, and receive buffers
    /// posted to all but one.
    pub fn running(count: u32) -> Self {
        let rig = Self::linked();
        rig.receive_ring(0, count);
        rig.transmit_ring(0, count);
        rig.write(RCTL, EN | BAM | SECRC);
        rig.write(TCTL, EN | 1 << 3);
        rig
    }

    pub fn link_up(&self) {
        self.write(CTRL, self.read(CTRL) | SLU);
        self.card.advance(3_000_000_000);
        assert_eq!(self.read(STATUS) & LU, LU);
        self.read(ICR);
    }

    pub fn read(&self, offset: u32) -> u32 {
        self.card.read(Bar::Registers, offset, 4)
    }

    pub fn write(&self, offset: u32, value: u32) {
        self.card.write(Bar::Registers, offset, 4, value);
    }

    pub fn receive_ring(&self, queue: usize, count: u32) {
        for i in 0..count as usize {
            self.post(queue, i);
        }
        let base = 0x100 * queue as u32;
        let at = AT + RX_RING[queue] as u64;
        self.write(RFCTL, 1 << 15);
        self.write(RDBAL + base, at as u32);
        self.write(RDBAH + base, (at >> 32) as u32);
        self.write(RDLEN + base, count * 16);
        self.write(RDH + base, 0);
        self.write(RDT + base, count - 1);
    }

    /// Writes receive descriptor `index` as a driver posts it.
    pub fn post(&self, queue: usize, index: usize) {
        self.store(RX_RING[queue] + 16 * index, AT + (RX_BUFFERS[queue] + index * BUFFER_LEN) as u64);
        self.store(RX_RING[queue] + 16 * index + 8, 0);
    }

    pub fn transmit_ring(&self, queue: usize, count: u32) {
        let base = 0x100 * queue as u32;
        let at = AT + TX_RING[queue] as u64;
        self.write(TDBAL + base, at as u32);
        self.write(TDBAH + base, (at >> 32) as u32);
        self.write(TDLEN + base, count * 16);
        self.write(TDH + base, 0);
        self.write(TDT + base, 0);
    }

    pub fn transmit_descriptor(&self, queue: usize, index: usize, first: u64, second: u64) {
        self.store(TX_RING[queue] + 16 * index, first);
        self.store(TX_RING[queue] + 16 * index + 8, second);
    }

    /// Puts a frame into transmit buffer `index`; returns its bus address.
    pub fn transmit_buffer(&self, index: usize, bytes: &[u8]) -> u64 {
        self.store_bytes(TX_BUFFERS + index * BUFFER_LEN, bytes);
        AT + (TX_BUFFERS + index * BUFFER_LEN) as u64
    }

    /// Sends a frame with a legacy descriptor: EOP, IFCS, RS.
    pub fn send(&self, index: usize, frame: &[u8]) {
        let at = self.transmit_buffer(index, frame);
        self.transmit_descriptor(0, index, at, frame.len() as u64 | 0x0b << 24);
        self.write(TDT, index as u32 + 1);
    }

    /// Returns extended receive descriptor `index`, if the card wrote it back.
    pub fn received(&self, queue: usize, index: usize) -> Option<Received> {
        let first = self.load(RX_RING[queue] + 16 * index);
        let second = self.load(RX_RING[queue] + 16 * index + 8);
        (second & 1 == 1).then_some(Received {
            status: second as u32,
            len: (second >> 32) as usize & 0xffff,
            hash: (first >> 32) as u32,
            kind: first as u32,
            vlan: (second >> 48) as u16,
        })
    }

    pub fn receive_bytes(&self, queue: usize, index: usize, len: usize) -> Vec<u8> {
        self.load_bytes(RX_BUFFERS[queue] + index * BUFFER_LEN, len)
    }
}

/// Returns a frame to the card's own address, of `len` bytes without check sequence, with its number at the end.
pub fn frame(len: usize, number: u8) -> Vec<u8> {
    frame_to(&MAC, len, number)
}

pub fn frame_to(to: &[u8; 6], len: usize, number: u8) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
    frame[..6].copy_from_slice(to);
    frame[6..12].copy_from_slice(&[0x02, 0, 0, 0, 0, 0x99]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame[len - 1] = number;
    frame
}
