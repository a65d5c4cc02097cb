//! The card: its name on the command line, its driver, and the way to it.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tasuki_net::nic::bus::pci::Header;
use tasuki_net::nic::bus::vfio::{Address, Vfio};
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::bus::{Bus, BusError, Iova};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::rtl8139::Rtl8139;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{Filter, Nic, NicError, NicMemory, NicOptions, PciId};
use tasuki_shm::arena::{Arena, Geometry};
use tasuki_shm::region::RegionError;

use crate::model::Model;

/// Bus address at which the card sees its memory. Behind an IOMMU any address will do; this one is above the
/// addresses that firmware reserves.
pub const MEMORY_AT: Iova = Iova(1 << 32);

/// Returns the number of bytes for the rings of any card that we drive, with `ring` descriptors each. That is three
/// rings of 16 bytes a descriptor, or two of 26, and the structures that are as long with each. Keep it small: a
/// taker maps the rings while no worker drives the card.
fn rings_len(ring: u16) -> usize {
    64 * usize::from(ring) + (32 << 10)
}

/// A card, as the command line names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A real card, by its PCI address.
    Vfio(Address),
    /// A card that a vfio-user server serves at this socket.
    VfioUser(PathBuf),
    /// Our own model, which is started for us.
    Sim,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("vfio", address)) if !address.is_empty() => {
                address.parse().map(Device::Vfio).map_err(|error| format!("{error}"))
            }
            Some(("vfio-user", path)) if !path.is_empty() => Ok(Device::VfioUser(path.into())),
            _ if text == "sim" => Ok(Device::Sim),
            _ => Err(format!(
                "{text:?} names no card; write vfio:0000:03:00.0 (a PCI address), vfio-user:PATH (a socket), or sim"
            )),
        }
    }
}

/// A job to do with a card once the way to it and its driver are found.
pub trait Job {
    /// Does the job on a running card. Its frames lie in `arena`.
    fn with<N: Nic>(self, nic: N, arena: Arena) -> Result<()>;
}

/// A driver, named after the cards that it drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// Intel 82574L.
    E1000e,
    /// Realtek RTL8139C+.
    Rtl8139,
    /// virtio-net over PCI.
    VirtioNet,
}

const DRIVERS: [(PciId, Driver, &str); 5] = [
    (PciId { vendor: 0x8086, device: 0x10d3 }, Driver::E1000e, "Intel 82574L, e1000e"),
    (PciId { vendor: 0x8086, device: 0x10f6 }, Driver::E1000e, "Intel 82574L without management, e1000e"),
    (PciId { vendor: 0x10ec, device: 0x8139 }, Driver::Rtl8139, "Realtek RTL8139C+, rtl8139"),
    (PciId { vendor: 0x1af4, device: 0x1041 }, Driver::VirtioNet, "virtio network card, virtio_net"),
    (PciId { vendor: 0x1af4, device: 0x1000 }, Driver::VirtioNet, "virtio network card (transitional), virtio_net"),
];

/// Returns the driver for a card, with a name of the card and the driver.
pub fn driver_of(id: PciId) -> Option<(Driver, &'static str)> {
    DRIVERS.iter().find(|(known, ..)| *known == id).map(|&(_, driver, name)| (driver, name))
}

impl Driver {
    /// Returns the default number of descriptors in a ring.
    pub fn ring(self) -> u16 {
        match self {
            Driver::E1000e | Driver::VirtioNet => 256,
            // The maximum of the card.
            Driver::Rtl8139 => 64,
        }
    }
}

/// Options with which a card is started.
#[derive(Debug, Default)]
pub struct Setup {
    /// Descriptors in each ring; nothing for the driver's default.
    pub ring: Option<u16>,
    /// Filter for received frames.
    pub filter: Filter,
}

/// Bytes in a slot beside a frame's payload: its Ethernet header with a VLAN tag, its check sequence, and the header of a
/// virtio device.
const AROUND: u32 = 14 + 4 + 4 + 12;

/// Returns a geometry with slots for both rings, for a burst on the way, and some to spare. A frame of `mtu` bytes of
/// payload fits into a slot.
fn slots(ring: u16, mtu: u16) -> Geometry {
    // A power of two: an 82574L has buffers of no other length.
    let slot_len = (u32::from(mtu) + AROUND).next_power_of_two().max(4096);
    Geometry { slot_len, count: 2 * u32::from(ring) + 128 }
}

/// Connects to the server of a card at the socket `path`.
pub fn connect(path: &Path) -> Result<VfioUser> {
    ensure!(path.exists(), "there is no socket at {}; start the device's server, or correct the path", path.display());
    let is_socket = path.metadata().is_ok_and(|meta| meta.file_type().is_socket());
    ensure!(is_socket, "{} is not a socket; correct the path", path.display());
    VfioUser::connect(path, TIMEOUT).map_err(|error| match error {
        nobody @ BusError::Refused { .. } => {
            anyhow::Error::new(nobody).context(format!("no device is served at {}; start its server", path.display()))
        }
        other => other.into(),
    })
}

/// Creates memory for a card with rings of `ring` descriptors and payloads of up to `mtu` bytes, which the card sees at
/// `at`.
pub fn memory(ring: u16, mtu: u16, at: Iova) -> Result<NicMemory, RegionError> {
    NicMemory::create(slots(ring, mtu), rings_len(ring), at)
}

/// Finds the way to the card, starts it and does `job`. Calls `show` with the card's configuration header and the
/// numbers of the BARs that have memory.
pub fn open(device: &Device, setup: &Setup, show: impl FnOnce(&Header, &[u8]), job: impl Job) -> Result<()> {
    match device {
        Device::Vfio(address) => start(Vfio::open(*address)?, setup, show, job),
        Device::VfioUser(path) => start(connect(path)?, setup, show, job),
        Device::Sim => {
            let (_model, connection) = Model::start()?;
            let bus = VfioUser::meet(connection, TIMEOUT).context("the model did not answer; it says above why");
            start(bus?, setup, show, job)
        }
    }
}

fn start<B: Bus>(mut bus: B, setup: &Setup, show: impl FnOnce(&Header, &[u8]), job: impl Job) -> Result<()> {
    let found = Header::read(&mut bus)?;
    // A BAR that reads as 0 may be absent, or may have no address yet; so ask the bus.
    let bars: Vec<u8> = (0..6).filter(|&index| bus.registers(index).is_ok()).collect();
    show(&found, &bars);
    let Some((driver, _)) = driver_of(found.id) else {
        let known: Vec<_> = DRIVERS.iter().map(|(id, _, name)| format!("{id} ({name})")).collect();
        bail!("no driver here drives a {}; those that are driven: {}", found.id, known.join("; "));
    };
    let ring = setup.ring.unwrap_or(driver.ring());
    match driver {
        Driver::E1000e => go::<E1000e<B>>(bus, ring, &setup.filter, job),
        Driver::Rtl8139 => go::<Rtl8139<B>>(bus, ring, &setup.filter, job),
        Driver::VirtioNet => go::<VirtioNet<B>>(bus, ring, &setup.filter, job),
    }
}

fn go<N: Nic>(bus: N::Bus, ring: u16, filter: &Filter, job: impl Job) -> Result<()> {
    let options = NicOptions { ring, filter: filter.clone(), ..NicOptions::default() };
    let memory = memory(ring, options.mtu, MEMORY_AT).context("there is no memory for the card")?;
    let arena = memory.arena().clone();
    job.with(N::start(bus, memory, &options).map_err(NicError::from)?, arena)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_named_in_three_ways() {
        assert_eq!("vfio:0000:03:00.0".parse(), Ok(Device::Vfio("0000:03:00.0".parse().unwrap())));
        assert_eq!("vfio-user:/run/nic:1".parse(), Ok(Device::VfioUser("/run/nic:1".into())));
        assert_eq!("sim".parse(), Ok(Device::Sim));
        for nonsense in ["", "eth0", "vfio:", "vfio-user:", "sim:1"] {
            assert!(nonsense.parse::<Device>().unwrap_err().contains("vfio:0000:03:00.0"), "{nonsense}");
        }
    }

    #[test]
    fn a_card_has_one_driver() {
        assert_eq!(driver_of(PciId { vendor: 0x8086, device: 0x10d3 }).unwrap().0, Driver::E1000e);
        assert_eq!(driver_of(PciId { vendor: 0x8086, device: 0x100e }), None);
    }
}
