//! The ioctls of VFIO, each as a function. Constants and structures: `<linux/vfio.h>`, by `vfio-bindings`.
//!
//! # Invariants
//!
//! - **V1** The argument of an ioctl points to a live value of the structure that the ioctl takes. The value is as
//!   long as the structure's `argsz` says.
//! - **V2** A number that an ioctl returned as a new descriptor belongs to no other owner.
#![allow(unsafe_code, reason = "the ioctls of VFIO")]

use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};
use vfio_bindings::bindings::vfio::{
    VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_GROUP_FLAGS_VIABLE, VFIO_IRQ_INFO_EVENTFD,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_TYPE1v2_IOMMU, vfio_device_info, vfio_group_status,
    vfio_iommu_type1_dma_map, vfio_irq_info,
};

use super::super::Part;

/// Returns the number of an ioctl in VFIO's range. All are `_IO(';', n)`, whatever argument they take.
const fn number(of: u8) -> Opcode {
    opcode::none(b';', 100 + of)
}

const GET_API_VERSION: Opcode = number(0);
const CHECK_EXTENSION: Opcode = number(1);
const SET_IOMMU: Opcode = number(2);
const GROUP_GET_STATUS: Opcode = number(3);
const GROUP_SET_CONTAINER: Opcode = number(4);
const GROUP_GET_DEVICE_FD: Opcode = number(6);
const DEVICE_GET_INFO: Opcode = number(7);
const DEVICE_GET_REGION_INFO: Opcode = number(8);
const DEVICE_GET_IRQ_INFO: Opcode = number(9);
const DEVICE_SET_IRQS: Opcode = number(10);
const DEVICE_RESET: Opcode = number(11);
const IOMMU_MAP_DMA: Opcode = number(13);
const IOMMU_UNMAP_DMA: Opcode = number(14);

struct Call {
    opcode: Opcode,
    argument: *mut c_void,
}

// SAFETY: it passes opcode and argument to the kernel unchanged; the caller ensures that they are valid (V1).
unsafe impl Ioctl for Call {
    type Output = IoctlOutput;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<IoctlOutput> {
        Ok(out)
    }
}

/// Calls an ioctl that takes a number, or nothing.
fn with_number(fd: BorrowedFd<'_>, opcode: Opcode, number: usize) -> io::Result<i32> {
    let call = Call { opcode, argument: std::ptr::without_provenance_mut(number) };
    // SAFETY: the ioctls called this way take a number and write nowhere (V1).
    Ok(unsafe { rustix::ioctl::ioctl(fd, call) }?)
}

/// Calls an ioctl that takes a structure.
fn with<T>(fd: BorrowedFd<'_>, opcode: Opcode, argument: &mut T) -> io::Result<i32> {
    let call = Call { opcode, argument: std::ptr::from_mut(argument).cast() };
    // SAFETY: each is called with the structure that it takes, which lives for the duration of the call (V1).
    Ok(unsafe { rustix::ioctl::ioctl(fd, call) }?)
}

/// Calls an ioctl that takes a structure followed by more data, in words.
fn with_words(fd: BorrowedFd<'_>, opcode: Opcode, words: &mut [u64]) -> io::Result<i32> {
    let call = Call { opcode, argument: words.as_mut_ptr().cast() };
    // SAFETY: the first word has `argsz`, which is at most the length of `words` (V1).
    Ok(unsafe { rustix::ioctl::ioctl(fd, call) }?)
}

/// Returns the size of a structure in bytes, for its `argsz`.
fn argsz<T>() -> u32 {
    u32::try_from(size_of::<T>()).expect("the structures of VFIO are small")
}

/// Returns the version of the interface: 0.
pub fn api_version(container: BorrowedFd<'_>) -> io::Result<i32> {
    with_number(container, GET_API_VERSION, 0)
}

/// Returns whether the kernel has type 1 IOMMUs (those of PCs).
pub fn has_type1(container: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(with_number(container, CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU as usize)? == 1)
}

/// Returns whether no other driver has a device of the group.
pub fn is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let mut status = vfio_group_status { argsz: argsz::<vfio_group_status>(), flags: 0 };
    with(group, GROUP_GET_STATUS, &mut status)?;
    Ok(status.flags & VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Joins the group to the container: its devices see memory through the container from now on.
pub fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    with(group, GROUP_SET_CONTAINER, &mut container.as_raw_fd()).map(|_| ())
}

/// Switches the IOMMU on for the container's groups.
pub fn set_type1(container: BorrowedFd<'_>) -> io::Result<()> {
    with_number(container, SET_IOMMU, VFIO_TYPE1v2_IOMMU as usize).map(|_| ())
}

/// Opens a device of the group by its PCI address.
pub fn open_device(group: BorrowedFd<'_>, address: &CStr) -> io::Result<OwnedFd> {
    let call = Call { opcode: GROUP_GET_DEVICE_FD, argument: address.as_ptr().cast_mut().cast() };
    // SAFETY: it takes a zero-terminated string, and only reads it (V1).
    let fd = unsafe { rustix::ioctl::ioctl(group, call) }?;
    // SAFETY: the kernel has just made this descriptor for us (V2).
    let device = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::CLOEXEC)?;
    Ok(device)
}

/// Returns the flags of a device, and its numbers of regions and of kinds of interrupt.
pub fn device_info(device: BorrowedFd<'_>) -> io::Result<(u32, u32, u32)> {
    let mut info = vfio_device_info { argsz: argsz::<vfio_device_info>(), ..Default::default() };
    with(device, DEVICE_GET_INFO, &mut info)?;
    Ok((info.flags, info.num_regions, info.num_irqs))
}

/// Returns the kernel's description of a region: `struct vfio_region_info` and its capabilities.
pub fn region_info(device: BorrowedFd<'_>, index: u32) -> io::Result<Vec<u8>> {
    let mut words = [0_u64; 512];
    words[0] = word(u32::try_from(size_of_val(&words)).expect("4096"), 0);
    words[1] = word(index, 0);
    with_words(device, DEVICE_GET_REGION_INFO, &mut words)?;
    let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    let argsz = u32::from_ne_bytes(bytes[..4].try_into().expect("four bytes")) as usize;
    Ok(bytes[..argsz.clamp(32, bytes.len())].to_vec())
}

/// Packs two consecutive 32-bit fields of a structure.
fn word(first: u32, second: u32) -> u64 {
    let [[a, b, c, d], [e, f, g, h]] = [first.to_ne_bytes(), second.to_ne_bytes()];
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// Returns the number of MSI-X vectors that can ring an eventfd.
pub fn count_vectors(device: BorrowedFd<'_>) -> io::Result<u32> {
    count_interrupts(device, VFIO_PCI_MSIX_IRQ_INDEX)
}

/// Returns whether the device has an interrupt pin.
pub fn has_intx(device: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(count_interrupts(device, VFIO_PCI_INTX_IRQ_INDEX)? > 0)
}

/// Returns the number of interrupts of a kind that can ring an eventfd.
fn count_interrupts(device: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let mut info = vfio_irq_info { argsz: argsz::<vfio_irq_info>(), index, ..Default::default() };
    with(device, DEVICE_GET_IRQ_INFO, &mut info)?;
    Ok(if info.flags & VFIO_IRQ_INFO_EVENTFD == 0 { 0 } else { info.count })
}

/// Enables MSI-X, with an eventfd for each of the first vectors. Without eventfds, disables it.
pub fn set_vectors(device: BorrowedFd<'_>, eventfds: &[BorrowedFd<'_>]) -> io::Result<()> {
    set_interrupts(device, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_IRQ_SET_ACTION_TRIGGER, eventfds)
}

/// Enables the interrupt pin, with an eventfd that it rings and one that unmasks it. Without eventfds, disables it.
pub fn set_intx(device: BorrowedFd<'_>, eventfds: Option<(BorrowedFd<'_>, BorrowedFd<'_>)>) -> io::Result<()> {
    let Some((rings, unmasks)) = eventfds else {
        return set_interrupts(device, VFIO_PCI_INTX_IRQ_INDEX, VFIO_IRQ_SET_ACTION_TRIGGER, &[]);
    };
    // The order matters: an interrupt that is not enabled has no mask.
    set_interrupts(device, VFIO_PCI_INTX_IRQ_INDEX, VFIO_IRQ_SET_ACTION_TRIGGER, &[rings])?;
    set_interrupts(device, VFIO_PCI_INTX_IRQ_INDEX, VFIO_IRQ_SET_ACTION_UNMASK, &[unmasks])
}

/// Connects the first interrupts of a kind to eventfds, for `action`. Without eventfds, disconnects and disables
/// them.
fn set_interrupts(device: BorrowedFd<'_>, index: u32, action: u32, eventfds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let data = if eventfds.is_empty() { VFIO_IRQ_SET_DATA_NONE } else { VFIO_IRQ_SET_DATA_EVENTFD };
    let count = u32::try_from(eventfds.len()).expect("at most 2048 vectors");
    // `struct vfio_irq_set`: argsz, flags, index, start, count; then the descriptors.
    let mut fields = vec![20 + 4 * count, data | action, index, 0, count];
    fields.extend(eventfds.iter().map(|eventfd| eventfd.as_raw_fd().cast_unsigned()));
    let mut words = fields.chunks(2).map(|pair| word(pair[0], pair.get(1).copied().unwrap_or(0))).collect::<Vec<_>>();
    with_words(device, DEVICE_SET_IRQS, &mut words).map(|_| ())
}

pub fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    with_number(device, DEVICE_RESET, 0).map(|_| ())
}

/// Lets the container's devices reach a part of a memory region. The kernel pins its pages until they are unmapped.
pub fn map_dma(container: BorrowedFd<'_>, part: &Part<'_>) -> io::Result<()> {
    let mut map = vfio_iommu_type1_dma_map {
        argsz: argsz::<vfio_iommu_type1_dma_map>(),
        flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: (part.memory.address() + part.from) as u64,
        iova: part.at.0,
        size: part.len as u64,
    };
    with(container, IOMMU_MAP_DMA, &mut map).map(|_| ())
}

/// Unmaps memory. Returns the number of bytes that were mapped there.
pub fn unmap_dma(container: BorrowedFd<'_>, at: u64, len: u64) -> io::Result<u64> {
    // `struct vfio_iommu_type1_dma_unmap`: argsz, flags, iova, size.
    let mut words = [word(24, 0), at, len];
    with_words(container, IOMMU_UNMAP_DMA, &mut words)?;
    Ok(words[2])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use tasuki_shm::region::Region;

    use super::super::super::Iova;
    use super::*;

    /// The values of `<linux/vfio.h>`, on the machines where `_IO` is the plain combination.
    #[test]
    fn the_numbers_are_the_kernels() {
        assert_eq!(GET_API_VERSION, 0x3b64);
        assert_eq!(IOMMU_MAP_DMA, 0x3b71);
    }

    #[test]
    fn what_is_no_vfio_refuses_everything() {
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_fd();
        let memory = Region::create("test", 4096, tasuki_shm::region::Pages::Small).unwrap();
        let errors = [
            api_version(fd).map(|_| ()),
            has_type1(fd).map(|_| ()),
            is_viable(fd).map(|_| ()),
            set_container(fd, fd),
            set_type1(fd),
            open_device(fd, c"0000:00:00.0").map(|_| ()),
            device_info(fd).map(|_| ()),
            region_info(fd, 0).map(|_| ()),
            count_vectors(fd).map(|_| ()),
            set_vectors(fd, &[fd, fd, fd]),
            set_vectors(fd, &[]),
            has_intx(fd).map(|_| ()),
            set_intx(fd, Some((fd, fd))),
            set_intx(fd, None),
            reset(fd),
            map_dma(fd, &Part::all(&memory, Iova(0))),
            unmap_dma(fd, 0, 4096).map(|_| ()),
        ];
        for (i, error) in errors.into_iter().enumerate() {
            assert_eq!(error.unwrap_err().raw_os_error(), Some(25), "{i}: ENOTTY");
        }
    }
}
