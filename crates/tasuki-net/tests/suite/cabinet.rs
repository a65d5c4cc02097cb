//! A device of nothing but registers, for tests of the bus. It is no NIC.
//!
//! | BAR | bytes  | what it is                                                                        |
//! |-----|--------|-----------------------------------------------------------------------------------|
//! | 0   | 16 KiB | by messages: registers, the doorbell at [`DOORBELL`], the MSI-X table at 0x2000   |
//! | 1   | 8 KiB  | mapped                                                                            |
//! | 2   | 12 KiB | its middle page is mapped                                                         |

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tasuki_shm::region::{Pages, Region};
use tasuki_sim::vfio_user::{self as served, CONFIG, Device, Dma, DmaMemory, MSIX, Server, Turn};

use crate::wait::readable;
use tasuki_testing::PATIENCE;

/// MSI-X vectors.
pub const VECTORS: u32 = 20;
/// Registers for an address, in two halves.
pub const ADDRESS: u32 = 0x08;
/// Doorbell: on a store, the device adds one to the word at its address, and rings the vector that was stored.
pub const DOORBELL: u32 = 0x10;
/// Register that counts how often the doorbell failed to reach memory.
pub const FAULTS: u32 = 0x14;
const TABLE: usize = 0x2000;
const MSIX_CAPABILITY: usize = 0x40;

pub struct Cabinet {
    pub config: [u8; 256],
    pub bar0: Vec<u8>,
    pub bar1: Region,
    pub bar2: Region,
    pub bar2_by_message: Vec<u8>,
    pub dma: Dma,
    pub eventfds: Vec<Option<OwnedFd>>,
    pub resets: u32,
}

impl Cabinet {
    pub fn new() -> Self {
        let region = |len| Region::create("cabinet", len, Pages::Small).unwrap();
        let mut cabinet = Cabinet {
            config: [0; 256],
            bar0: vec![0; 16 << 10],
            bar1: region(8 << 10),
            bar2: region(12 << 10),
            bar2_by_message: vec![0; 12 << 10],
            dma: Dma::default(),
            eventfds: (0..VECTORS).map(|_| None).collect(),
            resets: 0,
        };
        cabinet.switch_on();
        cabinet
    }

    fn switch_on(&mut self) {
        self.config = [0; 256];
        self.config[..4].copy_from_slice(&[0x34, 0x12, 0x78, 0x56]);
        self.config[6] = 1 << 4;
        self.config[0x34] = 0x40;
        let control = u16::try_from(VECTORS - 1).unwrap().to_le_bytes();
        self.config[MSIX_CAPABILITY..][..4].copy_from_slice(&[0x11, 0, control[0], control[1]]);
        self.config[MSIX_CAPABILITY + 4..][..4].copy_from_slice(&0x2000_u32.to_le_bytes());
        self.bar0.fill(0);
        for vector in 0..VECTORS as usize {
            self.bar0[TABLE + 16 * vector + 12] = 1;
        }
    }

    fn word(&self, at: u32) -> u32 {
        u32::from_le_bytes(self.bar0[at as usize..][..4].try_into().unwrap())
    }

    /// Rings the vector if MSI-X is enabled and the vector is not masked.
    fn ring(&self, vector: usize) {
        let enabled = self.config[MSIX_CAPABILITY + 3] & 0xc0 == 0x80;
        let unmasked = self.bar0[TABLE + 16 * vector + 12] & 1 == 0;
        if let (true, true, Some(eventfd)) = (enabled, unmasked, &self.eventfds[vector]) {
            rustix::io::write(eventfd, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    fn doorbell(&mut self) {
        let address = u64::from(self.word(ADDRESS)) | u64::from(self.word(ADDRESS + 4)) << 32;
        let done = self.dma.load_word(address).and_then(|word| self.dma.store_word(address, word + 1));
        match done {
            Ok(()) => self.ring(self.word(DOORBELL) as usize),
            Err(_) => self.bar0[FAULTS as usize] += 1,
        }
    }
}

const MIDDLE: &[(u64, u64)] = &[(4096, 4096)];

impl Device for Cabinet {
    fn region(&self, index: u32) -> served::Region<'_> {
        match index {
            0 => served::Region { len: 16 << 10, ..Default::default() },
            1 => served::Region { len: 8 << 10, memory: Some(self.bar1.fd()), areas: &[] },
            2 => served::Region { len: 12 << 10, memory: Some(self.bar2.fd()), areas: MIDDLE },
            CONFIG => served::Region { len: 256, ..Default::default() },
            _ => served::Region::default(),
        }
    }

    fn vectors(&self, index: u32) -> u32 {
        if index == MSIX { VECTORS } else { 0 }
    }

    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) {
        let from = match region {
            0 => &self.bar0[..],
            2 => &self.bar2_by_message,
            CONFIG => &self.config,
            _ => return into.fill(0xee),
        };
        into.copy_from_slice(&from[usize::try_from(offset).unwrap()..][..into.len()]);
    }

    fn write(&mut self, region: u32, offset: u64, bytes: &[u8]) {
        let to = match region {
            0 => &mut self.bar0[..],
            2 => &mut self.bar2_by_message,
            CONFIG => &mut self.config,
            _ => return,
        };
        to[usize::try_from(offset).unwrap()..][..bytes.len()].copy_from_slice(bytes);
        // The status register is read-only.
        self.config[6..8].copy_from_slice(&[1 << 4, 0]);
        if (region, offset) == (0, DOORBELL.into()) {
            self.doorbell();
        }
    }

    fn dma_map(&mut self, at: u64, memory: DmaMemory) {
        self.dma.map(at, memory);
    }

    fn dma_unmap(&mut self, at: u64) {
        self.dma.unmap(at);
    }

    fn set_irq(&mut self, index: u32, vector: u32, eventfd: Option<OwnedFd>) {
        assert_eq!(index, MSIX);
        self.eventfds[vector as usize] = eventfd;
    }

    fn reset(&mut self) {
        self.switch_on();
        self.resets += 1;
    }
}

/// A cabinet that a thread serves until the value is dropped.
pub struct Served {
    folder: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<(Cabinet, u32)>>,
}

impl Served {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut server = Server::bind(&folder.path().join("s")).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut cabinet = Cabinet::new();
                let mut gone = 0;
                while !stop.load(Ordering::Acquire) {
                    match server.turn(&mut cabinet).unwrap() {
                        Turn::Busy => {}
                        Turn::Gone(breach) => {
                            assert_eq!(breach, None);
                            gone += 1;
                        }
                        Turn::Idle | Turn::Over => _ = readable(&server, Duration::from_millis(10)),
                    }
                }
                (cabinet, gone)
            }
        });
        Served { folder, stop, thread: Some(thread) }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    /// Ends the server; returns the device, and the number of clients that have left it.
    pub fn end(mut self) -> (Cabinet, u32) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let served = thread.join();
            assert!(served.is_ok() || std::thread::panicking(), "the server's thread panicked");
        }
    }
}

/// Returns how often an eventfd rang; waits for the first ring.
pub fn rings(eventfd: &OwnedFd) -> u64 {
    readable(eventfd, PATIENCE);
    rings_now(eventfd)
}

/// Returns how often an eventfd has rung.
pub fn rings_now(eventfd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(eventfd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(_) => 0,
    }
}
