//! Our vfio-user server with an independent client: rust-vmm's `vfio_user`, which Cloud Hypervisor uses.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use tasuki_shm::region::{Pages, Region as Memory};
use tasuki_sim::vfio_user::{Device, Dma, DmaMemory, MSIX, Region, Server, Turn};
use vfio_user::Client;

/// A device with one BAR accessed by messages, and one BAR half of which is mapped. A write to the first adds one to
/// the word at DMA address 0x1000, and rings.
struct Shelf {
    bar: Vec<u8>,
    mapped: Memory,
    dma: Dma,
    eventfds: [Option<OwnedFd>; 2],
    resets: u32,
}

impl Device for Shelf {
    fn region(&self, index: u32) -> Region<'_> {
        match index {
            0 => Region { len: 4096, ..Region::default() },
            1 => Region { len: 8192, memory: Some(self.mapped.fd()), areas: &[(4096, 4096)] },
            _ => Region::default(),
        }
    }

    fn vectors(&self, index: u32) -> u32 {
        if index == MSIX { 2 } else { 0 }
    }

    fn read(&mut self, _region: u32, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.bar[usize::try_from(offset).unwrap()..][..into.len()]);
    }

    fn write(&mut self, _region: u32, offset: u64, bytes: &[u8]) {
        self.bar[usize::try_from(offset).unwrap()..][..bytes.len()].copy_from_slice(bytes);
        let word = self.dma.load_word(0x1000).unwrap();
        self.dma.store_word(0x1000, word + 1).unwrap();
        if let Some(eventfd) = &self.eventfds[1] {
            rustix::io::write(eventfd, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    fn dma_map(&mut self, at: u64, memory: DmaMemory) {
        self.dma.map(at, memory);
    }

    fn dma_unmap(&mut self, at: u64) {
        self.dma.unmap(at);
    }

    fn set_irq(&mut self, _index: u32, vector: u32, eventfd: Option<OwnedFd>) {
        self.eventfds[vector as usize] = eventfd;
    }

    fn reset(&mut self) {
        self.resets += 1;
    }
}

#[test]
fn our_server_and_a_foreign_client_understand_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let mut server = Server::bind(&path).unwrap();
    let mapped = Memory::create("bar", 8192, Pages::Small).unwrap();
    let mut shelf = Shelf { bar: vec![0; 4096], mapped, dma: Dma::default(), eventfds: [None, None], resets: 0 };
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        while !stopped.load(Ordering::Acquire) {
            match server.turn(&mut shelf).unwrap() {
                Turn::Gone(None) => break,
                Turn::Gone(breach) => panic!("{breach:?}"),
                Turn::Busy => {}
                Turn::Idle | Turn::Over => {
                    let limit = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                    let _ = rustix::event::poll(&mut [PollFd::new(&server, PollFlags::IN)], Some(&limit));
                }
            }
        }
        shelf
    });
    // Stops the thread, even if a check below fails.
    struct Stop(Arc<AtomicBool>);
    impl Drop for Stop {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let stop = Stop(stop);

    let mut client = Client::new(&path).unwrap();
    let bar = client.region(1).unwrap();
    assert_eq!((bar.size, bar.flags, bar.sparse_areas.len()), (8192, 0xf, 1));
    assert_eq!((bar.sparse_areas[0].offset, bar.sparse_areas[0].size), (4096, 4096));
    assert!(bar.file_offset.is_some());
    assert!(client.region(0).unwrap().file_offset.is_none());
    let memory = Memory::create("memory", 4096, Pages::Small).unwrap();
    client.dma_map(0, 0x1000, 4096, memory.fd().as_raw_fd()).unwrap();
    assert_eq!(client.get_irq_info(2).unwrap().count, 2);
    let eventfds = [(); 2].map(|()| rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    client.set_irqs(2, 0x24, 0, 2, &[eventfds[0].as_raw_fd(), eventfds[1].as_raw_fd()]).unwrap();
    client.region_write(0, 8, &[1, 2, 3, 4]).unwrap();
    let mut bytes = [0; 2];
    client.region_read(0, 9, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 3]);
    let words = memory.span::<std::sync::atomic::AtomicU64>(0, 1).unwrap();
    assert_eq!(words[0].load(Ordering::Acquire), 1);
    let mut count = [0; 8];
    rustix::io::read(&eventfds[1], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    client.dma_unmap(0x1000, 4096).unwrap();
    client.reset().unwrap();
    drop(client);
    let shelf = thread.join().unwrap();
    assert!(shelf.dma.is_empty() && shelf.eventfds.iter().all(Option::is_none));
    assert_eq!(shelf.resets, 1);
    drop(stop);
}
