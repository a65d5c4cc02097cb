//! A device that the kernel gives to user space through VFIO: groups and type 1 IOMMUs (the kernel's
//! Documentation/driver-api/vfio.rst).
//!
//! There are only three descriptors: the container limits what the device may reach, the group is the IOMMU's unit,
//! and the device is the device itself. A process that holds them can go on with the device, so they can be passed
//! in and out.

mod ioctls;
mod sysfs;

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use tasuki_shm::region::PAGE_LEN;
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
};

use super::bar::{Bar, Far};
use super::mmio::Mmio;
use super::vfio_user::RegionInfo;
use super::{Bus, BusError, IntX, Iova, Part, pci};
pub use sysfs::{Address, BadAddress, OpenError, Places};

/// Descriptors of an opened device.
#[derive(Debug)]
pub struct Descriptors {
    /// Container: it limits what the device may reach.
    pub container: OwnedFd,
    /// Group of the device. It stays open for as long as the device is.
    pub group: OwnedFd,
    /// The device itself.
    pub device: OwnedFd,
}

impl Descriptors {
    /// Opens the device at `address`, alone in a container of its own.
    pub fn open(address: Address, places: &Places) -> Result<Self, OpenError> {
        let kernel = |doing| move |source| OpenError::Kernel { doing, source };
        let group_file = places.group(address)?;
        let container = open(&places.container())?;
        let version = ioctls::api_version(container.as_fd()).map_err(kernel("asking for VFIO's version"))?;
        let type1 = ioctls::has_type1(container.as_fd()).map_err(kernel("asking for type 1 IOMMUs"))?;
        if version.cast_unsigned() != VFIO_API_VERSION || !type1 {
            return Err(OpenError::Kernel {
                doing: "asking for type 1 IOMMUs",
                source: io::ErrorKind::Unsupported.into(),
            });
        }
        let group = open(&group_file)?;
        if !ioctls::is_viable(group.as_fd()).map_err(kernel("asking for the group"))? {
            return Err(OpenError::Kernel { doing: "asking for a whole group", source: Errno::BUSY.into() });
        }
        ioctls::set_container(group.as_fd(), container.as_fd()).map_err(kernel("joining group and container"))?;
        ioctls::set_type1(container.as_fd()).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => OpenError::NoRemapping(address),
            _ => OpenError::Kernel { doing: "switching the IOMMU on", source },
        })?;
        let name = CString::new(address.to_string()).expect("an address has no zero in it");
        let device = ioctls::open_device(group.as_fd(), &name).map_err(kernel("opening the device"))?;
        Ok(Descriptors { container, group, device })
    }
}

fn open(path: &Path) -> Result<OwnedFd, OpenError> {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => Ok(file.into()),
        Err(error) => Err(sysfs::cannot_open(path, error)),
    }
}

/// Parts of a second bus to a device: its descriptors, and the eventfds of its interrupts.
#[derive(Debug)]
pub struct Twin {
    /// Descriptors of the device.
    pub descriptors: Descriptors,
    /// Eventfds of the enabled vectors.
    pub vectors: Vec<OwnedFd>,
    /// Eventfds of the interrupt pin, if it is enabled.
    pub intx: Option<IntX>,
}

/// A device behind VFIO.
#[derive(Debug)]
pub struct Vfio {
    container: OwnedFd,
    group: OwnedFd,
    device: Arc<OwnedFd>,
    config_at: u64,
    config_len: u64,
    can_reset: bool,
    /// Eventfds of the enabled vectors.
    vectors: Vec<OwnedFd>,
    /// Interrupt pin, if it is enabled.
    intx: Option<IntX>,
    /// Number of bytes that this bus has mapped for the device. The kernel reports the whole process's locked memory
    /// in a file only, and a confined worker that opens a file is killed.
    mapped: u64,
}

impl Vfio {
    /// Lets the kernel ring the eventfds of all vectors, and no others.
    fn connect_vectors(&self) -> Result<(), BusError> {
        // An earlier process may have enabled fewer vectors, or others.
        let _ = ioctls::set_vectors(self.device.as_fd(), &[]);
        let vectors = self.vectors.iter().map(AsFd::as_fd).collect::<Vec<_>>();
        ioctls::set_vectors(self.device.as_fd(), &vectors).map_err(refused("setting up interrupts"))
    }

    /// Opens the device at `address`.
    pub fn open(address: Address) -> Result<Self, OpenError> {
        Ok(Self::from_descriptors(Descriptors::open(address, &Places::default())?)?)
    }

    /// Continues with a device that another process has opened. That process's mappings still exist, and its
    /// interrupts arrive where they did until [`interrupts`](Bus::interrupts) is called.
    pub fn from_descriptors(descriptors: Descriptors) -> Result<Self, BusError> {
        let Descriptors { container, group, device } = descriptors;
        let (flags, _, irqs) = ioctls::device_info(device.as_fd()).map_err(refused("asking for the device"))?;
        if flags & VFIO_DEVICE_FLAGS_PCI == 0 || irqs <= VFIO_PCI_MSIX_IRQ_INDEX {
            return Err(BusError::Protocol {
                what: format!("its device has flags {flags:#x}, which is no PCI device"),
            });
        }
        let config = region_info(&device, VFIO_PCI_CONFIG_REGION_INDEX)?;
        Ok(Vfio {
            container,
            group,
            device: Arc::new(device),
            config_at: config.offset,
            config_len: config.len,
            can_reset: flags & VFIO_DEVICE_FLAGS_RESET != 0,
            vectors: Vec::new(),
            mapped: 0,
            intx: None,
        })
    }

    /// Returns the descriptors, for a successor. Registers that still exist keep the device open and go on working.
    pub fn into_descriptors(self) -> Result<Descriptors, BusError> {
        let device = match Arc::try_unwrap(self.device) {
            Ok(device) => device,
            Err(shared) => shared.try_clone().map_err(refused("handing out the device"))?,
        };
        Ok(Descriptors { container: self.container, group: self.group, device })
    }

    /// Returns the parts for a twin of this bus: a second bus to the device, for a successor that prepares while its
    /// predecessor drives.
    pub fn twin(&self) -> Result<Twin, BusError> {
        let copy = |descriptor: &OwnedFd| descriptor.try_clone().map_err(refused("copying a descriptor"));
        let (container, group, device) = (copy(&self.container)?, copy(&self.group)?, copy(&self.device)?);
        let vectors = self.vectors.iter().map(copy).collect::<Result<_, _>>()?;
        let intx = self.intx.as_ref().map(IntX::try_clone).transpose().map_err(refused("copying a descriptor"))?;
        Ok(Twin { descriptors: Descriptors { container, group, device }, vectors, intx })
    }

    /// Makes a twin. Its interrupts ring the predecessor's eventfds, and are not touched.
    pub fn from_twin(twin: Twin) -> Result<Self, BusError> {
        Ok(Vfio { vectors: twin.vectors, intx: twin.intx, ..Self::from_descriptors(twin.descriptors)? })
    }

    fn config_offset(&self, offset: u16) -> Result<u64, BusError> {
        match offset.is_multiple_of(4) && u64::from(offset) + 4 <= self.config_len {
            true => Ok(self.config_at + u64::from(offset)),
            false => Err(refused("an access outside of the configuration space")(io::ErrorKind::InvalidInput.into())),
        }
    }
}

/// Returns the error for a refusal at a step. A device that was removed is gone.
fn refused(doing: &'static str) -> impl Fn(io::Error) -> BusError {
    move |source| match source.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NODEV | Errno::NXIO) => BusError::Gone { doing },
        _ => BusError::Refused { doing, source },
    }
}

/// Parses with the vfio-user type: vfio-user took the kernel's description of regions.
fn region_info(device: &OwnedFd, index: u32) -> Result<RegionInfo, BusError> {
    let bytes = ioctls::region_info(device.as_fd(), index).map_err(refused("asking for a region"))?;
    RegionInfo::parse(&bytes, index).map_err(|what| BusError::Protocol { what })
}

impl Bus for Vfio {
    type Registers = VfioRegisters;

    fn translates(&self) -> bool {
        true
    }

    fn read_config(&mut self, offset: u16) -> Result<u32, BusError> {
        let mut bytes = [0; 4];
        let doing = "reading the configuration space";
        let at = self.config_offset(offset)?;
        match rustix::io::pread(&*self.device, &mut bytes, at) {
            Ok(4) => Ok(u32::from_le_bytes(bytes)),
            Ok(_) => Err(BusError::Gone { doing }),
            Err(errno) => Err(refused(doing)(errno.into())),
        }
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), BusError> {
        let doing = "writing the configuration space";
        let at = self.config_offset(offset)?;
        match rustix::io::pwrite(&*self.device, &value.to_le_bytes(), at) {
            Ok(4) => Ok(()),
            Ok(_) => Err(BusError::Gone { doing }),
            Err(errno) => Err(refused(doing)(errno.into())),
        }
    }

    fn registers(&mut self, index: u8) -> Result<VfioRegisters, BusError> {
        if index > 5 {
            return Err(BusError::NoBar { index });
        }
        let info = region_info(&self.device, index.into())?;
        let both = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
        if info.len == 0 || info.flags & both != both {
            return Err(BusError::NoBar { index });
        }
        // The kernel gives nobody the memory of a device that does not decode it.
        pci::decode(self)?;
        let far = File { device: Arc::clone(&self.device), at: info.offset };
        Ok(Bar::new(far, info.len, &info.areas, |start, len| {
            Mmio::of_device(self.device.as_fd(), info.offset.checked_add(start)?, len).ok()
        }))
    }

    fn map_part(&mut self, part: Part<'_>) -> Result<(), BusError> {
        let Part { len, at, .. } = part;
        let dma = |why: String| BusError::Dma { at, len, why };
        if !at.0.is_multiple_of(PAGE_LEN as u64) || at.0.checked_add(len as u64).is_none() {
            return Err(dma(
                "the address is not on a whole page, or the end is beyond the last; choose another".to_owned()
            ));
        }
        let lock = Lock::of_this_process(self.mapped + len as u64);
        lock.check()?;
        let mapped = ioctls::map_dma(self.container.as_fd(), &part).map_err(|source| {
            match source.raw_os_error().map(Errno::from_raw_os_error) {
                // A capability in a user namespace does not count.
                Some(Errno::NOMEM) if lock.limit.is_some_and(|limit| lock.need > limit) => lock.error(),
                Some(Errno::NOMEM) => dma(lock.refused()),
                Some(Errno::EXIST) => {
                    dma("the device has memory there already; unmap it, or choose another address".to_owned())
                }
                Some(Errno::INVAL | Errno::FAULT) => {
                    dma(format!("the IOMMU does not reach that address ({source}); choose a lower one"))
                }
                _ => dma(source.to_string()),
            }
        });
        mapped.map(|()| self.mapped += len as u64)
    }

    fn unmap_dma(&mut self, at: Iova, len: usize) -> Result<(), BusError> {
        let dma = |why: String| BusError::Dma { at, len, why };
        match ioctls::unmap_dma(self.container.as_fd(), at.0, len as u64) {
            Ok(gone) if gone == len as u64 => {
                // A taker also unmaps its giver's memory, which the taker never mapped.
                self.mapped = self.mapped.saturating_sub(gone);
                Ok(())
            }
            Ok(0) => Err(dma(NOTHING_THERE.to_owned())),
            Ok(gone) => Err(dma(format!("{gone} bytes were mapped there"))),
            Err(source) => Err(dma(format!("the kernel refused to let go of it: {source}"))),
        }
    }

    /// Enables all vectors at once, as the kernel requires. A caller that asks for more later, or a successor,
    /// switches them off for a moment, and must look at its rings afterwards.
    fn interrupts(&mut self, count: u16) -> Result<Vec<OwnedFd>, BusError> {
        let before = self.vectors.len();
        if before < count.into() {
            let have = ioctls::count_vectors(self.device.as_fd()).map_err(refused("asking for interrupts"))?;
            if have < count.into() {
                return Err(BusError::FewInterrupts { have: u16::try_from(have).unwrap_or(u16::MAX), need: count });
            }
            for _ in self.vectors.len()..count.into() {
                let vector = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
                self.vectors.push(vector.map_err(|errno| refused("making an eventfd")(errno.into()))?);
            }
            if let Err(error) = self.connect_vectors() {
                self.vectors.truncate(before);
                return Err(error);
            }
        }
        let copy = |vector: &OwnedFd| vector.try_clone().map_err(refused("making an eventfd"));
        self.vectors.iter().take(count.into()).map(copy).collect()
    }

    /// Switches an earlier process's setup off first, which also removes its mask. A device that cannot say whether
    /// it asserts its pin (before PCI 2.3) cannot share the pin, so the kernel may refuse.
    fn intx(&mut self) -> Result<IntX, BusError> {
        let copy = |intx: &IntX| intx.try_clone().map_err(refused("making an eventfd"));
        if let Some(intx) = &self.intx {
            return copy(intx);
        }
        let device = Arc::clone(&self.device);
        if !ioctls::has_intx(device.as_fd()).map_err(refused("asking for its interrupt"))? {
            return Err(BusError::NoIntX { why: "it has none, or it is not connected".to_owned() });
        }
        pci::allow_intx(self)?;
        let intx = IntX::create().map_err(refused("making an eventfd"))?;
        let _ = ioctls::set_intx(device.as_fd(), None);
        let eventfds = Some((intx.rings.as_fd(), intx.unmasks.as_fd()));
        ioctls::set_intx(device.as_fd(), eventfds).map_err(|source| {
            match refused("setting up its interrupt")(source) {
                BusError::Refused { source, .. } => {
                    BusError::NoIntX { why: format!("the kernel refuses it ({source})") }
                }
                other => other,
            }
        })?;
        copy(self.intx.insert(intx))
    }

    fn renew(&mut self) -> Result<(), BusError> {
        pci::enable_again(self)?;
        if let Some(intx) = &self.intx {
            let eventfds = Some((intx.rings.as_fd(), intx.unmasks.as_fd()));
            let _ = ioctls::set_intx(self.device.as_fd(), None);
            ioctls::set_intx(self.device.as_fd(), eventfds).map_err(refused("setting up its interrupt"))?;
        }
        if self.vectors.is_empty() { Ok(()) } else { self.connect_vectors() }
    }

    fn reset(&mut self) -> Result<(), BusError> {
        if !self.can_reset {
            return Err(refused("a reset")(io::ErrorKind::Unsupported.into()));
        }
        ioctls::reset(self.device.as_fd()).map_err(refused("a reset"))
    }
}

/// Registers of a device behind VFIO.
pub type VfioRegisters = Bar<File>;

/// Registers that are accessed by reading and writing the device's file.
#[derive(Debug)]
pub struct File {
    device: Arc<OwnedFd>,
    at: u64,
}

impl Far for File {
    fn read(&self, offset: u32, into: &mut [u8]) -> bool {
        let len = into.len();
        rustix::io::pread(&*self.device, into, self.at + u64::from(offset)) == Ok(len)
    }

    fn write(&self, offset: u32, bytes: &[u8]) {
        // Ignore the error: as on a real bus, a lost write goes unnoticed.
        let _ = rustix::io::pwrite(&*self.device, bytes, self.at + u64::from(offset));
    }
}

/// The kernel returns the same in both cases. (Since Linux 6.0, every holder of the container can unmap anything.
/// Before that, only the process that had mapped memory could unmap it. So no taker could unmap its giver's memory,
/// and no process that of a process that had ended.)
const NOTHING_THERE: &str = "nothing is mapped there, or another process has mapped it and this kernel is older than Linux 6.0; use a newer one";

/// Limit of the memory that a process may lock, checked before it asks for more. Memory that a device can reach
/// cannot be moved or swapped out, so it counts as locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lock {
    /// Number of bytes that would be locked afterwards.
    need: u64,
    /// Number of bytes that may be locked, or `None` for any number.
    limit: Option<u64>,
    /// Whether the limit does not apply.
    privileged: bool,
}

impl Lock {
    fn of_this_process(need: u64) -> Self {
        let capabilities = rustix::thread::capabilities(None);
        Lock {
            need,
            limit: rustix::process::getrlimit(Resource::Memlock).current,
            privileged: capabilities.is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK)),
        }
    }

    fn check(self) -> Result<(), BusError> {
        match self.limit {
            Some(limit) if self.need > limit && !self.privileged => Err(self.error()),
            _ => Ok(()),
        }
    }

    /// Returns the text for a refusal by the kernel although the limit seems high enough.
    fn refused(self) -> String {
        let limit = self.limit.map_or("any number of".to_owned(), |limit| limit.to_string());
        format!(
            "the kernel cannot lock it, or this process, which may lock {limit} bytes, has locked too much already; raise the limit (`ulimit -l`, or \
             LimitMEMLOCK= of its service), or free memory"
        )
    }

    fn error(self) -> BusError {
        BusError::Memlock { need: self.need, limit: self.limit.unwrap_or(u64::MAX) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_that_may_be_locked_is_said_with_both_numbers() {
        let lock = Lock { need: 64 << 20, limit: Some(8 << 20), privileged: false };
        assert_eq!(
            lock.check().unwrap_err().to_string(),
            "the device is to reach 67108864 bytes of memory, which must be locked, and this process may lock 8388608; raise the limit to \
             65536 KiB (`ulimit -l`, or LimitMEMLOCK= of its service), or give it CAP_IPC_LOCK"
        );
        assert_eq!(
            lock.refused(),
            "the kernel cannot lock it, or this process, which may lock 8388608 bytes, has locked too much already; raise the limit \
             (`ulimit -l`, or LimitMEMLOCK= of its service), or free memory"
        );
        assert!(Lock { privileged: true, ..lock }.check().is_ok());
        assert!(Lock { limit: None, ..lock }.check().is_ok());
        assert!(Lock { limit: Some(64 << 20), ..lock }.check().is_ok());
    }

    #[test]
    fn descriptors_of_something_else_are_refused() {
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        let refused = Vfio::from_descriptors(Descriptors { container: file(), group: file(), device: file() });
        let sentence = refused.unwrap_err().to_string();
        assert_eq!(sentence, "asking for the device was refused: Inappropriate ioctl for device (os error 25)");
    }

    #[test]
    fn a_device_that_was_removed_is_gone() {
        assert!(matches!(refused("x")(Errno::NODEV.into()), BusError::Gone { doing: "x" }));
        assert!(matches!(refused("x")(Errno::INVAL.into()), BusError::Refused { .. }));
    }
}
