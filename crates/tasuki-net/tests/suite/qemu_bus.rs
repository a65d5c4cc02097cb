//! The drivers are tested on a bus over QEMU's qtest socket; here the bus itself is tested.

use tasuki_net::nic::bus::pci::{self, Header};
use tasuki_net::nic::bus::{Bus, BusError, Iova, Registers};
use tasuki_net::nic::{NicMemory, PciId};
use tasuki_shm::arena::Geometry;

use crate::intx;
use crate::qemu::{MEMORY_AT, Machine, regions};
use crate::wait::readable;
use tasuki_testing::PATIENCE;

const SLOTS: Geometry = Geometry { slot_len: 4096, count: 16 };

fn memory() -> NicMemory {
    NicMemory::create(SLOTS, 4096, MEMORY_AT).expect("a little memory")
}

#[test]
fn a_card_shows_who_it_is() {
    let memory = memory();
    for (model, id) in [
        ("e1000e", PciId { vendor: 0x8086, device: 0x10d3 }),
        ("rtl8139", PciId { vendor: 0x10ec, device: 0x8139 }),
        ("virtio-net-pci,disable-legacy=on", PciId { vendor: 0x1af4, device: 0x1041 }),
    ] {
        let Some(machine) = Machine::start(model, "mac=52:54:00:12:34:57", &regions(&memory)) else { return };
        assert_eq!(Header::read(&mut machine.bus()).expect("a header").id, id, "{model}");
    }
}

#[test]
fn only_memory_that_was_announced_can_be_mapped() {
    let (memory, other) = (memory(), memory());
    let Some(machine) = Machine::start("e1000e", "", &regions(&memory)) else { return };
    let mut bus = machine.bus();
    memory.map(&mut bus).expect("announced memory");
    let refusal = other.map(&mut bus).expect_err("memory that QEMU does not know");
    assert!(refusal.to_string().contains("told of memory when it starts"), "{refusal}");
    let elsewhere = bus.map_dma(memory.rings(), Iova(MEMORY_AT.0 + 4096)).expect_err("another address");
    assert!(elsewhere.to_string().contains("map it there"), "{elsewhere}");
}

#[test]
fn an_interrupt_arrives_at_its_own_eventfd() {
    let memory = memory();
    let Some(machine) = Machine::start("e1000e", "", &regions(&memory)) else { return };
    let mut bus = machine.bus();
    let fds = bus.interrupts(3).expect("the card has five");
    assert!(matches!(bus.interrupts(6), Err(BusError::FewInterrupts { have: 5, need: 6 })));
    pci::enable(&mut bus, true).expect("the bus works");
    let registers = bus.registers(0).expect("BAR 0");
    // The 82574's cause OTHER to vector 2, and that cause set by software: IVAR, IMS, ICS.
    registers.write32(0xe4, (8 | 2) << 16);
    registers.write32(0xd0, 1 << 24);
    assert!(!readable(&fds[2], std::time::Duration::ZERO), "nothing has happened yet");
    registers.write32(0xc8, 1 << 24);
    assert!(readable(&fds[2], PATIENCE), "the interrupt of vector 2");
    for (vector, fd) in fds.iter().take(2).enumerate() {
        assert!(!readable(fd, std::time::Duration::ZERO), "no interrupt of vector {vector}");
    }
}

#[test]
fn an_interrupt_pin_rings_once_until_it_is_unmasked() {
    let memory = memory();
    let Some(machine) = Machine::start("rtl8139", "", &regions(&memory)) else { return };
    intx::rings_once_until_it_is_unmasked(&mut machine.bus());
}

#[test]
fn a_card_that_is_gone_reads_as_ones() {
    let memory = memory();
    let Some(mut machine) = Machine::start("e1000e", "", &regions(&memory)) else { return };
    let mut bus = machine.bus();
    let registers = bus.registers(0).expect("BAR 0");
    assert_ne!(registers.read32(8), u32::MAX, "STATUS");
    assert_eq!(registers.read32(1 << 20), u32::MAX, "beyond the BAR");
    machine.end();
    assert_eq!(registers.read32(8), u32::MAX, "STATUS");
    assert!(matches!(bus.read_config(0), Err(BusError::Gone { .. })));
}
