//! Our vfio-user client with an independent server: rust-vmm's `vfio_user`, which Cloud Hypervisor's tests use.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;

use tasuki_net::nic::bus::vfio_user::TIMEOUT;
use tasuki_net::nic::bus::{Bus, BusError, Header, Iova, Registers, VfioUser};
use tasuki_shm::region::{Pages, Region};
use vfio_bindings::bindings::vfio::{vfio_region_info, vfio_region_sparse_mmap_area};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea};

const VECTORS: u32 = 3;

/// A device with a configuration space and one BAR. A write to the BAR's first word adds one to the first word of
/// its DMA memory, and rings.
struct Peer {
    config: [u8; 256],
    bar: [u8; 4096],
    memory: Option<(u64, u64, File)>,
    eventfds: Vec<File>,
}

impl ServerBackend for Peer {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), io::Error> {
        let from = if region == 7 { &self.config[..] } else { &self.bar };
        let offset = usize::try_from(offset).unwrap();
        data.copy_from_slice(from.get(offset..offset + data.len()).ok_or(io::ErrorKind::InvalidInput)?);
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), io::Error> {
        let to = if region == 7 { &mut self.config[..] } else { &mut self.bar };
        let offset = usize::try_from(offset).unwrap();
        to.get_mut(offset..offset + data.len()).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(data);
        self.config[6..8].copy_from_slice(&[1 << 4, 0]);
        if (region, offset) == (0, 0) {
            let (_, _, memory) = self.memory.as_ref().ok_or(io::ErrorKind::NotFound)?;
            memory.write_all_at(&data[..1], 0)?;
            self.eventfds[2].write_all(&1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> Result<(), io::Error> {
        assert_eq!((flags, offset), (DmaMapFlags::READ_WRITE, 0));
        self.memory = Some((address, size, fd.unwrap()));
        Ok(())
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> Result<(), io::Error> {
        assert!(flags.is_empty());
        let (its_address, its_size, _) = self.memory.take().unwrap();
        assert_eq!((address, size), (its_address, its_size));
        Ok(())
    }

    fn reset(&mut self) -> Result<(), io::Error> {
        self.bar.fill(0);
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> Result<(), io::Error> {
        assert_eq!((index, flags, count), (2, 0x24, 1), "it takes one descriptor in a message");
        self.eventfds.truncate(start as usize);
        self.eventfds.extend(fds);
        Ok(())
    }
}

fn region(index: u32, len: u64, mapped: Option<&Region>) -> ServerRegion {
    let area = |_| SparseArea { area: vfio_region_sparse_mmap_area { offset: 0, size: len } };
    ServerRegion {
        region_info: vfio_region_info {
            argsz: 32,
            flags: if len == 0 { 0 } else { 3 | if mapped.is_some() { 4 } else { 0 } },
            index,
            size: len,
            ..Default::default()
        },
        sparse_areas: mapped.iter().map(area).collect(),
        mmap_fd: mapped.map(|memory| memory.fd().as_raw_fd()),
    }
}

/// Serves one client in a thread; returns the memory of its BAR 1, too.
fn serve() -> (tempfile::TempDir, Region, JoinHandle<()>) {
    let folder = tempfile::tempdir().unwrap();
    let bar1 = Region::create("bar", 8192, Pages::Small).unwrap();
    let regions = (0..9).map(|index| match index {
        0 => region(0, 4096, None),
        1 => region(1, 8192, Some(&bar1)),
        7 => region(7, 256, None),
        other => region(other, 0, None),
    });
    let irqs = (0..5).map(|index| IrqInfo { index, flags: 1, count: if index == 2 { VECTORS } else { 0 } });
    let server = Server::new(&folder.path().join("s"), true, irqs.collect(), regions.collect()).unwrap();
    let mut peer = Peer { config: [0; 256], bar: [0; 4096], memory: None, eventfds: Vec::new() };
    peer.config[..8].copy_from_slice(&[0x34, 0x12, 0x78, 0x56, 0, 0, 1 << 4, 0]);
    peer.config[0x34] = 0x40;
    peer.config[0x40..0x44].copy_from_slice(&[0x11, 0, 2, 0]);
    // The thread ends with its client.
    let thread = std::thread::spawn(move || server.run(&mut peer).unwrap());
    (folder, bar1, thread)
}

#[test]
fn our_client_and_a_foreign_server_understand_each_other() {
    let (folder, bar1, thread) = serve();
    let mut bus = VfioUser::connect(&folder.path().join("s"), TIMEOUT).unwrap();
    assert_eq!(Header::read(&mut bus).unwrap().id.to_string(), "1234:5678");
    let registers = bus.registers(0).unwrap();
    registers.write32(0x10, 0x1122_3344);
    registers.write8(0x11, 0x55);
    assert_eq!(registers.read32(0x10), 0x1122_5544);
    assert!(!registers.is_mapped(0, 4));

    let mapped = bus.registers(1).unwrap();
    assert!(mapped.is_mapped(8188, 4));
    mapped.write32(8188, 9);
    let words = bar1.span::<std::sync::atomic::AtomicU32>(8188, 1).unwrap();
    assert_eq!(words[0].load(std::sync::atomic::Ordering::Relaxed), 9);

    let memory = Region::create("memory", 4096, Pages::Small).unwrap();
    bus.map_dma(&memory, Iova(0x1000)).unwrap();
    let vectors = bus.interrupts(3).unwrap();
    registers.write32(0, 7);
    let mut count = [0; 8];
    // The read comes after the write, so the interrupt has been sent.
    assert_eq!(registers.read32(0), 7);
    rustix::io::read(&vectors[2], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    let words = memory.span::<std::sync::atomic::AtomicU32>(0, 1).unwrap();
    assert_eq!(words[0].load(std::sync::atomic::Ordering::Acquire), 7);
    bus.unmap_dma(Iova(0x1000), 4096).unwrap();

    bus.reset().unwrap();
    assert_eq!(registers.read32(0x10), 0);
    assert!(matches!(bus.read_config(0x200), Err(BusError::Refused { .. })));
    drop((bus, registers, mapped));
    thread.join().unwrap();
}
