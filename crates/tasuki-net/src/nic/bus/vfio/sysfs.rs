//! Checks in the file system for obstacles to driving a device through VFIO.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::BusError;

/// Address of a device on the PCI buses of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Domain: the tree of buses. Mostly 0.
    pub domain: u32,
    /// Bus in the domain.
    pub bus: u8,
    /// Device on the bus, below 32.
    pub device: u8,
    /// Function of the device, below 8.
    pub function: u8,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// The given text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no PCI address; it looks like 0000:03:00.0, and `lspci -D` lists those that there are")]
pub struct BadAddress(pub String);

impl FromStr for Address {
    type Err = BadAddress;

    /// Parses `0000:03:00.0`, or `03:00.0` in domain 0.
    fn from_str(text: &str) -> Result<Self, BadAddress> {
        parse(text).ok_or_else(|| BadAddress(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Address> {
    let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit()) && digits.contains(&text.len());
        is_hex.then(|| u32::from_str_radix(text, 16).ok())?
    };
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
    let address = Address {
        domain: hex(domain, 4..=8)?,
        bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
        device: u8::try_from(hex(device, 2..=2)?).ok()?,
        function: u8::try_from(hex(function, 1..=1)?).ok()?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

/// Reason why a device cannot be driven through VFIO. Each variant has its own remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no device at this address.
    #[error("there is no PCI device {0}; `lspci -D` lists those that there are")]
    NoDevice(Address),
    /// No IOMMU limits which memory the device can reach.
    #[error(
        "{0} is behind no IOMMU, so it cannot be kept to the memory that it is given; switch the IOMMU on in the firmware (VT-d, AMD-Vi), \
         and on Intel boot with intel_iommu=on"
    )]
    NoIommu(Address),
    /// A driver of the kernel has the device.
    #[error(
        "{address} is held by the kernel driver {driver}; take it away from there as root: echo vfio-pci > \
         /sys/bus/pci/devices/{address}/driver_override; echo {address} > /sys/bus/pci/drivers/{driver}/unbind; echo {address} > \
         /sys/bus/pci/drivers_probe"
    )]
    HeldByKernel {
        /// Address of the device.
        address: Address,
        /// Name of the driver.
        driver: String,
    },
    /// No driver has the device, not even VFIO's.
    #[error(
        "{0} has no driver; give it to VFIO as root: modprobe vfio-pci; echo vfio-pci > /sys/bus/pci/devices/{0}/driver_override; echo {0} > \
         /sys/bus/pci/drivers_probe"
    )]
    NoDriver(Address),
    /// The IOMMU cannot separate the device from another one, which a driver of the kernel has.
    #[error(
        "{address} is in IOMMU group {group} together with {other}, which the kernel driver {driver} holds; unbind that one too, or move the \
         card to another slot"
    )]
    GroupShared {
        /// Address of the device.
        address: Address,
        /// Number of the IOMMU group.
        group: u32,
        /// Address of the other device.
        other: String,
        /// Name of the other device's driver.
        driver: String,
    },
    /// The kernel has no VFIO. The field is the missing file.
    #[error("{0} does not exist, so the kernel's VFIO is not there; modprobe vfio-pci")]
    NoVfio(PathBuf),
    /// This user may not open the file.
    #[error("this user may not open {0}; as root, give it to them: chown USER {0}")]
    NoPermission(PathBuf),
    /// The device filter of a unit or of a container bars the file.
    #[error(
        "the kernel bars {0} from this process, by the device filter of its unit or container; under systemd, where VFIO was loaded after tasukid \
         began: systemctl daemon-reload, and systemctl restart tasukid"
    )]
    Filtered(PathBuf),
    /// Another process has the file open.
    #[error("another process has {0} open; end it (`fuser -v {0}` names it)")]
    Busy(PathBuf),
    /// The platform cannot keep the device from forging interrupts.
    #[error(
        "the IOMMU of {0} does not remap interrupts, so the kernel does not let go of it; switch interrupt remapping on in the firmware, or, if \
         you trust the device, modprobe vfio_iommu_type1 allow_unsafe_interrupts=1"
    )]
    NoRemapping(Address),
    /// The kernel refused for another reason.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// Step that was refused.
        doing: &'static str,
        /// Reason that the kernel gave.
        source: io::Error,
    },
    /// The device was opened but is unusable.
    #[error("{0}")]
    Bus(#[from] BusError),
}

/// Directories where the kernel shows its devices and lets them be opened: `/sys` and `/dev`, except in tests.
#[derive(Debug, Clone)]
pub struct Places {
    /// The `/sys` directory.
    pub sys: PathBuf,
    /// The `/dev` directory.
    pub dev: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Places { sys: "/sys".into(), dev: "/dev".into() }
    }
}

impl Places {
    /// Returns the file of the IOMMU group that the device is in, unless an obstacle is visible.
    pub fn group(&self, address: Address) -> Result<PathBuf, OpenError> {
        let device = self.sys.join("bus/pci/devices").join(address.to_string());
        if !device.exists() {
            return Err(OpenError::NoDevice(address));
        }
        let group = target_name(&device.join("iommu_group")).and_then(|name| name.parse::<u32>().ok());
        let group = group.ok_or(OpenError::NoIommu(address))?;
        match target_name(&device.join("driver")) {
            None => return Err(OpenError::NoDriver(address)),
            Some(driver) if !is_vfio(&driver) => return Err(OpenError::HeldByKernel { address, driver }),
            Some(_) => {}
        }
        if let Some((other, driver)) = self.held_neighbour(group) {
            return Err(OpenError::GroupShared { address, group, other, driver });
        }
        let file = self.dev.join("vfio").join(group.to_string());
        if file.exists() { Ok(file) } else { Err(OpenError::NoVfio(file)) }
    }

    /// Returns a device of the group that a driver of the kernel has, and that driver.
    fn held_neighbour(&self, group: u32) -> Option<(String, String)> {
        let devices = self.sys.join(format!("kernel/iommu_groups/{group}/devices"));
        let mut devices = fs::read_dir(devices).ok()?.flatten();
        devices.find_map(|device| {
            let driver = target_name(&device.path().join("driver"))?;
            // The kernel keeps bridges for itself, and pci-stub drives nothing: see vfio_dev_driver_allowed() in the
            // kernel.
            let allowed = is_vfio(&driver) || ["pci-stub", "pcieport"].contains(&driver.as_str());
            (!allowed).then(|| (device.file_name().to_string_lossy().into_owned(), driver))
        })
    }

    /// Returns the file that containers are opened from.
    pub fn container(&self) -> PathBuf {
        self.dev.join("vfio/vfio")
    }
}

/// Returns whether this is `vfio-pci`, or a maker's replacement like `mlx5_vfio_pci`.
fn is_vfio(driver: &str) -> bool {
    driver.contains("vfio")
}

/// Returns the last component of a link's target.
fn target_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Returns the error for a file that cannot be opened.
pub fn cannot_open(path: &Path, source: io::Error) -> OpenError {
    use rustix::io::Errno;
    let path = path.to_owned();
    match source.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => OpenError::NoVfio(path),
        Some(Errno::ACCESS) => OpenError::NoPermission(path),
        Some(Errno::PERM) => OpenError::Filtered(path),
        Some(Errno::BUSY) => OpenError::Busy(path),
        _ => OpenError::Kernel { doing: "opening VFIO", source },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;

    use super::*;

    const CARD: &str = "0000:03:00.0";

    /// A machine with one card in group 7, which a test builds up.
    struct Machine {
        folder: tempfile::TempDir,
    }

    impl Machine {
        fn new() -> Self {
            let machine = Machine { folder: tempfile::tempdir().unwrap() };
            machine.device(CARD);
            machine
        }

        fn path(&self, path: &str) -> PathBuf {
            let path = self.folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        }

        fn device(&self, address: &str) {
            fs::create_dir_all(self.path(&format!("sys/bus/pci/devices/{address}"))).unwrap();
        }

        fn driver(self, address: &str, driver: &str) -> Self {
            let link = self.path(&format!("sys/bus/pci/devices/{address}/driver"));
            symlink(format!("../../../../bus/pci/drivers/{driver}"), link).unwrap();
            self
        }

        fn in_group(self, address: &str) -> Self {
            let link = self.path(&format!("sys/bus/pci/devices/{address}/iommu_group"));
            symlink("../../../kernel/iommu_groups/7", link).unwrap();
            let device = self.path(&format!("sys/bus/pci/devices/{address}"));
            symlink(device, self.path(&format!("sys/kernel/iommu_groups/7/devices/{address}"))).unwrap();
            self
        }

        fn vfio(self) -> Self {
            fs::write(self.path("dev/vfio/7"), "").unwrap();
            self
        }

        fn group(&self, address: &str) -> Result<PathBuf, String> {
            let places = Places { sys: self.path("sys"), dev: self.path("dev") };
            places.group(address.parse().unwrap()).map_err(|error| error.to_string())
        }
    }

    #[test]
    fn a_card_that_is_ready_has_its_group() {
        for driver in ["vfio-pci", "mlx5_vfio_pci"] {
            let machine = Machine::new().in_group(CARD).driver(CARD, driver).vfio();
            assert_eq!(machine.group(CARD), Ok(machine.path("dev/vfio/7")));
        }
    }

    #[test]
    fn a_card_that_is_not_there() {
        let refused = Machine::new().group("0000:04:00.0").unwrap_err();
        assert_eq!(refused, "there is no PCI device 0000:04:00.0; `lspci -D` lists those that there are");
    }

    #[test]
    fn a_card_behind_no_iommu() {
        let refused = Machine::new().driver(CARD, "e1000e").group(CARD).unwrap_err();
        assert_eq!(
            refused,
            "0000:03:00.0 is behind no IOMMU, so it cannot be kept to the memory that it is given; switch the IOMMU on in the \
             firmware (VT-d, AMD-Vi), and on Intel boot with intel_iommu=on"
        );
    }

    #[test]
    fn a_card_that_the_kernel_drives() {
        let refused = Machine::new().in_group(CARD).driver(CARD, "e1000e").vfio().group(CARD).unwrap_err();
        assert_eq!(
            refused,
            "0000:03:00.0 is held by the kernel driver e1000e; take it away from there as root: \
             echo vfio-pci > /sys/bus/pci/devices/0000:03:00.0/driver_override; \
             echo 0000:03:00.0 > /sys/bus/pci/drivers/e1000e/unbind; echo 0000:03:00.0 > /sys/bus/pci/drivers_probe"
        );
    }

    #[test]
    fn a_card_that_nobody_drives() {
        let refused = Machine::new().in_group(CARD).vfio().group(CARD).unwrap_err();
        assert_eq!(
            refused,
            "0000:03:00.0 has no driver; give it to VFIO as root: modprobe vfio-pci; \
             echo vfio-pci > /sys/bus/pci/devices/0000:03:00.0/driver_override; \
             echo 0000:03:00.0 > /sys/bus/pci/drivers_probe"
        );
    }

    #[test]
    fn a_card_whose_neighbour_the_kernel_drives() {
        let neighbour = "0000:03:00.1";
        let machine = Machine::new().in_group(CARD).driver(CARD, "vfio-pci").vfio();
        machine.device(neighbour);
        let machine = machine.in_group(neighbour);
        assert!(machine.group(CARD).is_ok(), "one that nobody drives is in nobody's way");
        let refused = machine.driver(neighbour, "snd_hda_intel").group(CARD).unwrap_err();
        assert_eq!(
            refused,
            "0000:03:00.0 is in IOMMU group 7 together with 0000:03:00.1, which the kernel driver snd_hda_intel holds; \
             unbind that one too, or move the card to another slot"
        );
        let machine = Machine::new().in_group(CARD).driver(CARD, "vfio-pci").vfio();
        machine.device(neighbour);
        assert!(machine.in_group(neighbour).driver(neighbour, "pcieport").group(CARD).is_ok(), "a bridge is neither");
    }

    #[test]
    fn a_kernel_without_vfio() {
        let machine = Machine::new().in_group(CARD).driver(CARD, "vfio-pci");
        let file = machine.path("dev/vfio/7");
        let refused = machine.group(CARD).unwrap_err();
        let sentence =
            format!("{} does not exist, so the kernel's VFIO is not there; modprobe vfio-pci", file.display());
        assert_eq!(refused, sentence);
    }

    #[test]
    fn a_file_that_cannot_be_opened() {
        let path = Path::new("/dev/vfio/7");
        let refused = |errno: i32| cannot_open(path, io::Error::from_raw_os_error(errno)).to_string();
        assert_eq!(refused(13), "this user may not open /dev/vfio/7; as root, give it to them: chown USER /dev/vfio/7");
        assert!(refused(1).starts_with("the kernel bars /dev/vfio/7 from this process, by the device filter"));
        assert_eq!(refused(16), "another process has /dev/vfio/7 open; end it (`fuser -v /dev/vfio/7` names it)");
        assert!(refused(19).starts_with("/dev/vfio/7 does not exist"));
        assert_eq!(refused(24), "the kernel refused while opening VFIO: Too many open files (os error 24)");
    }

    #[test]
    fn addresses() {
        let card = Address { domain: 0, bus: 3, device: 0x1f, function: 7 };
        assert_eq!("0000:03:1f.7".parse(), Ok(card));
        assert_eq!("03:1f.7".parse(), Ok(card));
        assert_eq!("10000:03:1F.7".parse(), Ok(Address { domain: 0x10000, ..card }));
        for bad in ["", ".", "3", "03:00", "0000:03:00", "03:20.0", "03:00.8", "3:0.0", "000:03:00.0", "+003:03:00.0"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
        for bad in ["03:00.0 ", "0000:03:00.0/../..", "03:00.0\0", "a:b:c.d", "0:0000:03:00.0", "03:0é.0"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
        assert_eq!(
            "eth0".parse::<Address>().unwrap_err().to_string(),
            "\"eth0\" is no PCI address; it looks like 0000:03:00.0, and `lspci -D` lists those that there are"
        );
    }

    proptest! {
        #[test]
        fn an_address_is_read_as_it_is_written(domain: u32, bus: u8, device in 0_u8..32, function in 0_u8..8) {
            let address = Address { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn any_text_is_an_address_or_none(text: String) {
            let _ = text.parse::<Address>();
        }
    }
}
