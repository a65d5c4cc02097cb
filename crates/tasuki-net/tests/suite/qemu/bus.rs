//! A bus over the qtest protocol: a line of text for each access, and a line for the reply.
//!
//! The protocol: the comment at the head of QEMU's softmmu/qtest.c.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use tasuki_net::nic::bus::pci::{self, Capability, Header};
use tasuki_net::nic::bus::{BarKind, Bus, BusError, IntX, Iova, Part, Registers};
use tasuki_shm::region::Region;

use super::qtest::Qtest;
use super::{BELL, Bell, CARD};

/// Bus address of the first BAR: in the hole below 4 GiB that the machine leaves to PCI.
const BARS_AT: u64 = 0xe000_0000;
/// Bus address of the doorbell.
const BELL_AT: u32 = 0xd000_0000;
/// Offset of the doorbell in the registers of an ivshmem device.
const DOORBELL: u32 = 12;

/// Memory that QEMU was given at its start.
#[derive(Clone)]
pub struct Announced {
    /// Device and inode number of the file.
    file: (u64, u64),
    at: Iova,
    len: usize,
}

impl Announced {
    pub fn of(region: &Region, at: Iova) -> Self {
        let stat = rustix::fs::fstat(region).expect("a descriptor of ours");
        Announced { file: (stat.st_dev, stat.st_ino), at, len: region.len() }
    }
}

/// The bus to a card of QEMU's.
#[derive(Clone)]
pub struct QtestBus {
    qtest: Arc<Mutex<Qtest>>,
    announced: Vec<Announced>,
    vectors: Arc<[OwnedFd]>,
    /// Address and length of each BAR.
    bars: [Option<(u64, u32)>; 6],
    /// Keeps the bell's server alive.
    _bell: Arc<Bell>,
}

impl QtestBus {
    pub(super) fn new(qtest: Arc<Mutex<Qtest>>, announced: Vec<Announced>, vectors: Vec<OwnedFd>, bell: Bell) -> Self {
        let mut bus = QtestBus { qtest, announced, vectors: vectors.into(), bars: [None; 6], _bell: Arc::new(bell) };
        bus.assign().expect("a fresh machine's bus works");
        bus
    }

    /// Assigns addresses to the BARs, as a BIOS does.
    fn assign(&mut self) -> Result<(), BusError> {
        self.write_config_of(BELL, 0x10, BELL_AT)?;
        // Memory decoding.
        self.write_config_of(BELL, 0x04, 1 << 1)?;
        let mut next = BARS_AT;
        let kinds = Header::read(self)?.bars;
        for (i, kind) in (0_u8..).zip(kinds) {
            let offset = 0x10 + 4 * u16::from(i);
            if !matches!(kind, BarKind::Memory32 | BarKind::Memory64) {
                continue;
            }
            self.write_config(offset, u32::MAX)?;
            let mask = self.read_config(offset)? & !0xf;
            if mask == 0 {
                continue;
            }
            let len = !mask + 1;
            let at = next.next_multiple_of(len.into());
            self.write_config(offset, u32::try_from(at).expect("the hole ends below 4 GiB"))?;
            if kind == BarKind::Memory64 {
                self.write_config(offset + 4, 0)?;
            }
            self.bars[usize::from(i)] = Some((at, len));
            next = at + u64::from(len);
        }
        Ok(())
    }

    fn ask(&self, doing: &'static str, command: &str) -> Result<u64, BusError> {
        let mut qtest = self.qtest.lock().expect("nobody panics while asking");
        qtest.ask(command).map_err(|error| match error.kind() {
            io::ErrorKind::Other => BusError::Protocol { what: error.to_string() },
            _ => BusError::Gone { doing },
        })
    }

    fn choose(&self, slot: u8, offset: u16) -> Result<(), BusError> {
        let address = 1 << 31 | u32::from(slot) << 11 | u32::from(offset & 0xfc);
        self.ask("choosing a word of the configuration space", &format!("outl 0xcf8 {address:#x}")).map(drop)
    }

    fn read_config_of(&self, slot: u8, offset: u16) -> Result<u32, BusError> {
        self.choose(slot, offset)?;
        let word = self.ask("reading the configuration space", "inl 0xcfc")?;
        u32::try_from(word).map_err(|_| BusError::Protocol { what: format!("a word of 32 bits is {word:#x}") })
    }

    fn write_config_of(&self, slot: u8, offset: u16, value: u32) -> Result<(), BusError> {
        self.choose(slot, offset)?;
        self.ask("writing the configuration space", &format!("outl 0xcfc {value:#x}")).map(drop)
    }

    /// Returns the announced memory of `file`, if there is any.
    fn announced_at(&self, file: (u64, u64)) -> Option<&Announced> {
        self.announced.iter().find(|announced| announced.file == file)
    }
}

impl Bus for QtestBus {
    type Registers = QtestRegisters;

    fn read_config(&mut self, offset: u16) -> Result<u32, BusError> {
        // The ports reach the first 256 bytes only, as on a plain PCI bus.
        if offset > 0xff { Ok(u32::MAX) } else { self.read_config_of(CARD, offset) }
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), BusError> {
        if offset > 0xff { Ok(()) } else { self.write_config_of(CARD, offset, value) }
    }

    fn registers(&mut self, index: u8) -> Result<QtestRegisters, BusError> {
        let (at, len) = self.bars.get(usize::from(index)).copied().flatten().ok_or(BusError::NoBar { index })?;
        let command = self.read_config(0x04)? & 0xffff;
        // Only if necessary: a write to this register makes QEMU's e1000e retry the frames that wait for it, and
        // lose one if it is switched off.
        if command & 1 << 1 == 0 {
            self.write_config(0x04, command | 1 << 1)?;
        }
        Ok(QtestRegisters { bus: self.clone(), at, len })
    }

    fn map_part(&mut self, Part { memory, from, at, .. }: Part<'_>) -> Result<(), BusError> {
        let wanted = Announced::of(memory, Iova(at.0.wrapping_sub(from as u64)));
        match self.announced_at(wanted.file) {
            Some(announced) if announced.at == wanted.at && announced.len == wanted.len => Ok(()),
            Some(announced) => {
                let why = format!("QEMU was started with this memory at {}; map it there", announced.at);
                Err(BusError::Dma { at, len: wanted.len, why })
            }
            None => {
                let why = "QEMU must be told of memory when it starts; name it to Machine::start".into();
                Err(BusError::Dma { at, len: wanted.len, why })
            }
        }
    }

    /// Does nothing, since the memory belongs to the machine. Fails if the memory was never mapped.
    fn unmap_dma(&mut self, at: Iova, len: usize) -> Result<(), BusError> {
        let has = |it: &Announced| it.at <= at && at + len as u64 <= it.at + it.len as u64;
        match self.announced.iter().any(has) {
            true => Ok(()),
            false => Err(BusError::Dma { at, len, why: "no memory was mapped there".into() }),
        }
    }

    fn interrupts(&mut self, count: u16) -> Result<Vec<OwnedFd>, BusError> {
        let Some(msi_x) = Header::read(self)?.capability(Capability::MSI_X) else {
            return Err(BusError::FewInterrupts { have: 0, need: count });
        };
        let control = self.read_config(msi_x.offset)?;
        let size = u16::try_from(control >> 16 & 0x7ff).expect("eleven bits") + 1;
        let have = size.min(u16::try_from(self.vectors.len()).expect("a handful"));
        if have < count {
            return Err(BusError::FewInterrupts { have, need: count });
        }
        let table = self.read_config(msi_x.offset + 4)?;
        let [index, ..] = (table & 7).to_le_bytes();
        let registers = self.registers(index)?;
        for vector in 0..u32::from(count) {
            let entry = (table & !7) + 16 * vector;
            registers.write32(entry, BELL_AT + DOORBELL);
            registers.write32(entry + 4, 0);
            registers.write32(entry + 8, Bell::message(vector));
            // Unmask the vector.
            registers.write32(entry + 12, 0);
        }
        // MSI-X enabled, and the function as a whole unmasked.
        self.write_config(msi_x.offset, control & !(1 << 30) | 1 << 31)?;
        let fds = self.vectors.iter().take(count.into()).map(OwnedFd::try_clone);
        fds.collect::<io::Result<_>>()
            .map_err(|source| BusError::Refused { doing: "duplicating the descriptor of an interrupt", source })
    }

    fn intx(&mut self) -> Result<IntX, BusError> {
        let [_, pin, ..] = self.read_config(0x3c)?.to_le_bytes();
        if pin != 1 {
            return Err(BusError::NoIntX { why: format!("its pin is {pin}, and this machine listens to INTA# only") });
        }
        pci::allow_intx(self)?;
        Qtest::listen(&self.qtest).map_err(|source| BusError::Refused { doing: "listening to an interrupt", source })
    }

    /// Resets the card by function-level reset, if it has that (PCI Express Base Specification 5.0, section 6.6.2).
    fn reset(&mut self) -> Result<(), BusError> {
        const EXPRESS: u8 = 0x10;
        let capability = Header::read(self)?.capability(EXPRESS);
        let able = match capability {
            Some(capability) => self.read_config(capability.offset + 4)? >> 28 & 1 == 1,
            None => false,
        };
        let Some(capability) = capability.filter(|_| able) else {
            let source = io::Error::new(io::ErrorKind::Unsupported, "the card has no reset of its function");
            return Err(BusError::Refused { doing: "resetting the card", source });
        };
        let control = self.read_config(capability.offset + 8)? & 0xffff;
        self.write_config(capability.offset + 8, control | 1 << 15)?;
        self.assign()?;
        pci::enable(self, false)
    }
}

/// Registers of a card of QEMU's.
pub struct QtestRegisters {
    bus: QtestBus,
    at: u64,
    len: u32,
}

impl QtestRegisters {
    fn read(&self, message: char, offset: u32) -> u64 {
        if offset >= self.len {
            return u64::MAX;
        }
        let at = self.at + u64::from(offset);
        // As on a real bus, a card that is gone reads as ones.
        self.bus.ask("reading a register", &format!("read{message} {at:#x}")).unwrap_or(u64::MAX)
    }

    fn write(&self, message: char, offset: u32, value: u32) {
        if offset < self.len {
            let at = self.at + u64::from(offset);
            // Writes to it are lost.
            let _ = self.bus.ask("writing a register", &format!("write{message} {at:#x} {value:#x}"));
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low bits are what was asked for, or all are ones")]
impl Registers for QtestRegisters {
    fn read8(&self, offset: u32) -> u8 {
        self.read('b', offset) as u8
    }

    fn read16(&self, offset: u32) -> u16 {
        self.read('w', offset) as u16
    }

    fn read32(&self, offset: u32) -> u32 {
        self.read('l', offset) as u32
    }

    fn write8(&self, offset: u32, value: u8) {
        self.write('b', offset, value.into());
    }

    fn write16(&self, offset: u32, value: u16) {
        self.write('w', offset, value.into());
    }

    fn write32(&self, offset: u32, value: u32) {
        self.write('l', offset, value);
    }
}
