//! Cards behind VFIO and an IOMMU, and calls that another kernel than the host's answers otherwise. Runs only in the guest that
//! `cargo xtask guest` boots.
//!
//! The guest has an 82574L (QEMU's e1000e), which the kernel's driver holds at first, and a virtio-net and an
//! RTL8139 without a driver.
#![allow(clippy::tests_outside_test_module, reason = "an integration test")]

mod behind_vfio;
#[path = "../suite/conformance/mod.rs"]
#[allow(dead_code, reason = "a suite's parts for other worlds")]
mod conformance;
mod freezes;
mod intx;
#[path = "../suite/intx.rs"]
mod intx_case;
mod modules;
#[path = "../suite/net.rs"]
#[allow(dead_code, reason = "the other suite uses the rest of it")]
mod net;
#[path = "../suite/process.rs"]
#[allow(dead_code, reason = "the other suite uses the rest of it")]
mod process;
#[path = "../suite/qemu/mod.rs"]
#[allow(dead_code, reason = "the other suite uses the rest of it")]
mod qemu;
mod repoint;
#[path = "../suite/udp_parts.rs"]
mod udp_parts;
#[path = "../suite/wait.rs"]
mod wait;

use std::fs;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use behind_vfio::{BehindVfio, Card, calm, devices, find, obey, open};
use conformance::last_owner::{LastOwned, RegistersOf};
use conformance::tricks::{self, Trick};
use conformance::tricks_virtio;
use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;
use tasuki_net::nic::bus::vfio::{Descriptors, OpenError, Places};
use tasuki_net::nic::bus::{Bus, BusError, Capability, Header, Iova, Registers, Vfio, pci};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{NicMemory, PciId};
use tasuki_shm::region::{Pages, Region};
use tasuki_testing::PATIENCE;

const E1000E: PciId = PciId { vendor: 0x8086, device: 0x10d3 };
const VIRTIO_NET: PciId = PciId { vendor: 0x1af4, device: 0x1041 };

/// Makes tests for a driver: the suite of all drivers, and the cases specific to VFIO.
macro_rules! card {
    ($name:ident, $nic:ty) => {
        mod $name {
            crate::suite!(suite, crate::BehindVfio<$nic>);

            #[test]
            fn a_successor_goes_on_by_descriptors() {
                crate::behind_vfio::a_successor_goes_on_by_descriptors::<$nic>();
            }

            #[test]
            fn a_card_without_power_is_refused() {
                crate::behind_vfio::a_card_without_power_is_refused::<$nic>();
            }
        }
    };
}

impl Card for E1000e<Vfio> {
    const NAME: &'static str = "e1000e";
    const ID: PciId = E1000E;
    const QUEUES: u8 = 2;
    const MTU_MAX: u16 = 9000;
    // QEMU's model maps a frame's buffer in one piece, and drops frames that lie in two pages which are not
    // neighbours.
    const MTU_SENT: u16 = 4096 - 14;
    const IS_TOUCHY: bool = true;
}
card!(e1000e, crate::E1000e<crate::Vfio>);

impl conformance::in_place::Twinned for behind_vfio::BehindVfio<E1000e<Vfio>> {
    fn twin(bus: &Vfio) -> Vfio {
        Vfio::from_twin(bus.twin().unwrap()).unwrap()
    }
}
suite_in_place!(e1000e_in_place, crate::behind_vfio::BehindVfio<crate::E1000e<crate::Vfio>>);

impl conformance::repoint::Repointed for behind_vfio::BehindVfio<E1000e<Vfio>> {
    fn with_two(first: &NicMemory, _: &NicMemory) -> Option<Self> {
        conformance::World::new(first)
    }
}
suite_repoint!(e1000e_repointed, crate::behind_vfio::BehindVfio<crate::E1000e<crate::Vfio>>);

impl LastOwned for BehindVfio<E1000e<Vfio>> {
    const LACKS: &'static [(&'static str, &'static str)] = &[
        (
            "a packet without an end",
            "QEMU keeps a packet that has no end where no register shows it: TDFH and TDFT stay as they are (a known hole)",
        ),
        ("the same in queue 1", "the same"),
    ];
    // Each takes long under emulation, and the conformance suite tries all on QEMU's card.
    const SPARSE: usize = 12;

    fn tricks() -> Vec<Trick<RegistersOf<Self>>> {
        tricks::of_an_82574l()
    }

    fn calm() {
        calm();
    }
}
suite_last_owner!(e1000e_after_a_hostile_owner, crate::behind_vfio::BehindVfio<crate::E1000e<crate::Vfio>>);

impl Card for VirtioNet<Vfio> {
    const NAME: &'static str = "virtio_net";
    const ID: PciId = VIRTIO_NET;
    const MTU_MAX: u16 = 9000;
}
card!(virtio_net, crate::VirtioNet<crate::Vfio>);

impl conformance::in_place::Twinned for behind_vfio::BehindVfio<VirtioNet<Vfio>> {
    fn twin(bus: &Vfio) -> Vfio {
        Vfio::from_twin(bus.twin().unwrap()).unwrap()
    }
}
suite_in_place!(virtio_net_in_place, crate::behind_vfio::BehindVfio<crate::VirtioNet<crate::Vfio>>);

impl conformance::repoint::Repointed for behind_vfio::BehindVfio<VirtioNet<Vfio>> {
    fn with_two(first: &NicMemory, _: &NicMemory) -> Option<Self> {
        conformance::World::new(first)
    }
}
suite_repoint!(virtio_net_repointed, crate::behind_vfio::BehindVfio<crate::VirtioNet<crate::Vfio>>);

impl LastOwned for BehindVfio<VirtioNet<Vfio>> {
    fn tricks() -> Vec<Trick<RegistersOf<Self>>> {
        tricks_virtio::of_virtio_net()
    }

    fn way(bus: &mut Vfio) -> (u8, u32) {
        tricks_virtio::way(bus)
    }
}
suite!(virtio_net_after_a_hostile_owner, crate::behind_vfio::BehindVfio<crate::VirtioNet<crate::Vfio>>:
    a_cold_start_undoes_what_a_last_owner_leaves
);

// Of the 82574L, by the names of its data sheet (section 10.1).
const STATUS: u32 = 0x0008;
const ICR: u32 = 0x00c0;
const ICS: u32 = 0x00c8;
const IMS: u32 = 0x00d0;
const IMC: u32 = 0x00d8;
const IVAR: u32 = 0x00e4;
const RCTL: u32 = 0x0100;
const TCTL: u32 = 0x0400;
const TDBAL: u32 = 0x3800;
const TDBAH: u32 = 0x3804;
const TDLEN: u32 = 0x3808;
const TDH: u32 = 0x3810;
const TDT: u32 = 0x3818;

fn region(pages: usize) -> Region {
    Region::create("guest", pages * 4096, Pages::Small).unwrap()
}

/// Returns whether an eventfd rings.
fn rings(eventfd: &OwnedFd) -> bool {
    let rang = wait::readable(eventfd, PATIENCE);
    calm();
    rang
}

/// The first test, by its name: afterwards the kernel's driver no longer holds the card.
#[test]
fn a_card_held_by_the_kernel_is_ours_by_the_words_of_the_error() {
    let address = find(E1000E);
    match Vfio::open(address) {
        Err(error @ OpenError::HeldByKernel { .. }) => {
            assert!(error.to_string().contains("held by the kernel driver e1000e;"), "{error}");
            obey(&error.to_string());
        }
        other => panic!("{other:?}"),
    }
    let driver = fs::read_link(devices().join(address.to_string()).join("driver")).unwrap();
    assert!(driver.ends_with("vfio-pci"));
    Vfio::open(address).unwrap();
}

#[test]
fn a_card_that_nobody_holds_is_ours_by_the_words_of_the_error() {
    let address = find(VIRTIO_NET);
    match Vfio::open(address) {
        Err(error @ OpenError::NoDriver(_)) => obey(&error.to_string()),
        other => panic!("{other:?}"),
    }
    let mut bus = Vfio::open(address).unwrap();
    let header = Header::read(&mut bus).unwrap();
    assert_eq!(header.id, VIRTIO_NET);
    assert!(header.capability(Capability::VENDOR).is_some() && header.capability(Capability::MSI_X).is_some());
}

#[test]
fn a_card_that_somebody_has_open_is_busy() {
    let _bus = open(E1000E);
    match Vfio::open(find(E1000E)) {
        Err(error @ OpenError::Busy(_)) => {
            assert!(error.to_string().starts_with("another process has /dev/vfio/"), "{error}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ids_and_registers_are_read() {
    let mut bus = open(E1000E);
    let header = Header::read(&mut bus).unwrap();
    assert_eq!((header.id, header.class), (E1000E, 0x02_0000));
    assert!(bus.read_config(0x40).is_ok() && bus.read_config(4096).is_err());
    let registers = bus.registers(0).unwrap();
    assert!(registers.is_mapped(STATUS, 4), "by loads and stores");
    assert_ne!(registers.read32(STATUS), u32::MAX);
    registers.write32(TDBAL, 0x1234_5670);
    assert_eq!(registers.read32(TDBAL), 0x1234_5670);
    assert!(matches!(bus.registers(4), Err(BusError::NoBar { index: 4 })));
    // The BAR with the I/O ports.
    let _ports = bus.registers(2);
}

/// On the virtio-net, because QEMU's e1000e has no function-level reset.
#[test]
fn a_reset_resets_and_leaves_the_device_reachable() {
    let mut bus = open(VIRTIO_NET);
    let header = Header::read(&mut bus).unwrap();
    // Virtio 1.2, 4.1.4: the capability of type 1 says where the common configuration is; 4.1.4.3: the device's
    // status in it.
    let mut capabilities = header.capabilities.iter().filter(|capability| capability.id == Capability::VENDOR);
    let is_common = |bus: &mut Vfio, at: u16| bus.read_config(at).unwrap() >> 24 == 1;
    let common = capabilities.find(|capability| is_common(&mut bus, capability.offset)).unwrap().offset;
    let [bar, ..] = bus.read_config(common + 4).unwrap().to_le_bytes();
    let status = bus.read_config(common + 8).unwrap() + 0x14;
    let registers = bus.registers(bar).unwrap();
    registers.write8(status, 1);
    assert_eq!(registers.read8(status), 1);
    pci::enable(&mut bus, true).unwrap();
    let command = bus.read_config(4).unwrap() & 0xffff;
    bus.reset().unwrap();
    assert_eq!(registers.read8(status), 0, "and it still decodes its memory");
    assert_eq!(bus.read_config(4).unwrap() & 0xffff, command);
}

/// Makes the card ring a vector: nothing is pending, the cause "other" goes to the vector (10.2.4.9), is let through
/// (10.2.4.5), and is set by hand (10.2.4.4).
fn provoke(registers: &impl Registers, vector: u32) {
    registers.write32(IMC, u32::MAX);
    registers.write32(ICR, u32::MAX);
    registers.write32(IVAR, (8 | vector) << 16);
    registers.write32(IMS, 1 << 24);
    registers.write32(ICS, 1 << 24);
}

#[test]
fn interrupts_arrive_and_more_can_be_had() {
    let mut bus = open(E1000E);
    let registers = bus.registers(0).unwrap();
    bus.reset().unwrap();
    // A message is a write to memory, so the card must be bus master.
    pci::enable(&mut bus, true).unwrap();
    assert!(matches!(bus.interrupts(6), Err(BusError::FewInterrupts { have: 5, need: 6 })));
    for count in [1, 5] {
        let vectors = bus.interrupts(count).unwrap();
        assert_eq!(vectors.len(), usize::from(count));
        let flags = vectors.iter().map(|vector| rustix::fs::fcntl_getfl(vector).unwrap());
        assert!(flags.into_iter().all(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK)), "nobody waits for one");
        let last = u32::from(count) - 1;
        provoke(&registers, last);
        assert!(rings(&vectors[last as usize]), "vector {last} of {count}");
        calm();
    }
    bus.reset().unwrap();
    let vectors = bus.interrupts(5).unwrap();
    rustix::io::read(&vectors[4], &mut [0; 8]).unwrap();
    provoke(&registers, 4);
    assert!(rings(&vectors[4]), "after a reset they are what they were");
}

/// Makes the card fetch one descriptor (3.3.3: legacy, 64 bytes, with its status wanted back); returns whether it
/// came back done.
fn transmits(registers: &impl Registers, memory: &Region, at: Iova) -> bool {
    let descriptor = memory.span::<AtomicU64>(0, 2).unwrap();
    descriptor[0].store((at + 4096).0, Ordering::Relaxed);
    descriptor[1].store(0x0b << 24 | 64, Ordering::Release);
    // Loopback (10.2.5.1), so that nothing gets onto the wire.
    registers.write32(RCTL, 1 << 6);
    registers.write32(TCTL, 0);
    registers.write32(TDBAL, u32::try_from(at.0 & 0xffff_ffff).unwrap());
    registers.write32(TDBAH, u32::try_from(at.0 >> 32).unwrap());
    registers.write32(TDLEN, 128);
    registers.write32(TDH, 0);
    registers.write32(TDT, 0);
    registers.write32(TCTL, 1 << 1 | 1 << 3);
    registers.write32(TDT, 1);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(20) {
        if descriptor[1].load(Ordering::Acquire) >> 32 & 1 == 1 {
            return true;
        }
        if registers.read32(TDH) == 1 && begin.elapsed() > Duration::from_secs(2) {
            return false;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn the_card_reaches_what_it_was_given_and_nothing_else() {
    let mut bus = open(E1000E);
    let registers = bus.registers(0).unwrap();
    bus.reset().unwrap();
    pci::enable(&mut bus, true).unwrap();
    let memory = region(2);
    // Above 4 GiB, so the upper half of the address matters.
    let at = Iova(0x2_0000_0000);
    bus.map_dma(&memory, at).unwrap();
    assert!(transmits(&registers, &memory, at));
    assert!(matches!(bus.map_dma(&memory, at), Err(BusError::Dma { .. })), "there is something there");
    assert!(matches!(bus.map_dma(&memory, Iova(1 << 60)), Err(BusError::Dma { .. })), "beyond the IOMMU");
    assert!(matches!(bus.map_dma(&memory, at + 1), Err(BusError::Dma { .. })));
    bus.unmap_dma(at, memory.len()).unwrap();
    assert!(matches!(bus.unmap_dma(at, memory.len()), Err(BusError::Dma { .. })));
    assert!(!transmits(&registers, &memory, at), "it is out of its reach");
    bus.map_dma(&memory, at).unwrap();
    assert!(transmits(&registers, &memory, at));
}

#[test]
fn descriptors_are_handed_on_while_the_card_stays_as_it_is() {
    let mut bus = open(E1000E);
    let registers = bus.registers(0).unwrap();
    bus.reset().unwrap();
    pci::enable(&mut bus, true).unwrap();
    let (memory, at) = (region(2), Iova(0x10_0000));
    bus.map_dma(&memory, at).unwrap();
    registers.write32(TDBAL, 0x1234_5670);
    drop(registers);
    let descriptors: Descriptors = bus.into_descriptors().unwrap();

    let mut bus = Vfio::from_descriptors(descriptors).unwrap();
    let registers = bus.registers(0).unwrap();
    assert_eq!(registers.read32(TDBAL), 0x1234_5670, "nobody reset it");
    assert!(transmits(&registers, &memory, at), "its memory is still mapped");
    let vectors = bus.interrupts(2).unwrap();
    provoke(&registers, 1);
    assert!(rings(&vectors[1]));
}

#[test]
fn memory_beyond_the_limit_is_refused_with_the_numbers() {
    let mut bus = open(E1000E);
    let before = rustix::process::getrlimit(Resource::Memlock);
    let small = Rlimit { current: Some(64 << 10), maximum: before.maximum };
    rustix::process::setrlimit(Resource::Memlock, small).unwrap();
    // Root may lock any amount; a thread that has dropped that capability may not.
    let unprivileged = || {
        let mut sets = rustix::thread::capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        rustix::thread::set_capabilities(None, sets).unwrap();
        (bus.map_dma(&region(8), Iova(0)), bus.map_dma(&region(9), Iova(0x10_0000)))
    };
    let (fits, refused) = std::thread::scope(|scope| scope.spawn(unprivileged).join().unwrap());
    rustix::process::setrlimit(Resource::Memlock, before).unwrap();
    fits.unwrap();
    match refused {
        Err(BusError::Memlock { need, limit }) => assert_eq!((need, limit), (17 * 4096, 64 << 10)),
        other => panic!("{other:?}"),
    }
    bus.unmap_dma(Iova(0), 8 * 4096).unwrap();
}

#[test]
fn a_card_that_is_not_there_is_missing() {
    let nowhere = "0000:ff:1f.7".parse().unwrap();
    assert!(matches!(Descriptors::open(nowhere, &Places::default()), Err(OpenError::NoDevice(_))));
}
