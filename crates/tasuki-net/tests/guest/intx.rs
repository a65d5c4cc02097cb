//! INTx through VFIO: the interrupts of an RTL8139, which has no others.

use std::time::Instant;

use tasuki_net::nic::bus::{Bus, Iova, Registers, Vfio};
use tasuki_net::nic::rtl8139::Rtl8139;
use tasuki_net::nic::{Mac, Nic, NicMemory, NicOptions, PciId};
use tasuki_net::port::{Armed, Burst, Frame, Port};
use tasuki_shm::arena::{Arena, Geometry};

use super::open;
use super::wait::readable;
use tasuki_testing::PATIENCE;

const RTL8139: PciId = PciId { vendor: 0x10ec, device: 0x8139 };

// Transmit Configuration, and the bits that loop sent frames back.
const TCR: u32 = 0x40;
const TCR_LOOPBACK: u32 = 3 << 17;

#[test]
fn a_pin_rings_once_until_it_is_unmasked() {
    crate::intx_case::rings_once_until_it_is_unmasked(&mut open(RTL8139));
}

/// Sends a frame to the card's own address, which comes back.
fn send(nic: &mut Rtl8139<Vfio>, arena: &Arena, number: u32) -> Vec<u8> {
    let Mac(mac) = nic.mac();
    let mut bytes = [&mac[..], &mac, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    bytes.resize(60, 0x5a);
    let mut slot = arena.take().unwrap();
    slot.bytes_mut()[..60].copy_from_slice(&bytes);
    let mut burst = Burst::from_iter([Frame { slot, len: 60 }]);
    assert_eq!(nic.transmit(&mut burst).unwrap(), 1);
    bytes
}

#[test]
fn each_frame_wakes_who_sleeps_for_it_whoever_drives_the_card() {
    let bus = open(RTL8139);
    let memory = memory(Iova(1 << 32));
    let arena = memory.arena().clone();
    let options = NicOptions { ring: 8, ..NicOptions::default() };
    let mut nic = Rtl8139::start(bus, memory, &options).unwrap();
    for number in 0..12 {
        // Set loopback without the driver's knowledge: this card's wire has no partner.
        let (bus, memory, driver_state) = nic.park().unwrap();
        let mut bus = match number % 2 {
            0 => bus,
            // Reopen the bus as another process would.
            _ => Vfio::from_descriptors(bus.into_descriptors().unwrap()).unwrap(),
        };
        let registers = bus.registers(1).unwrap();
        nic = Rtl8139::resume(bus, memory, &driver_state).unwrap();
        come_back_and_wake(&mut nic, &registers, &arena, number);
    }
}

fn memory(at: Iova) -> NicMemory {
    NicMemory::create(Geometry { slot_len: 4096, count: 64 }, 4096, at).unwrap()
}

/// Sends two frames, checks that they come back and wake a sleeping driver.
fn come_back_and_wake(nic: &mut Rtl8139<Vfio>, registers: &impl Registers, arena: &Arena, number: u32) {
    registers.write32(TCR, registers.read32(TCR) | TCR_LOOPBACK);
    assert_eq!(nic.arm().unwrap(), Armed::Idle, "nothing has come");
    let sent = [send(nic, arena, 2 * number), send(nic, arena, 2 * number + 1)];
    assert!(readable(&nic.fd(), PATIENCE), "frame {number} was slept through");
    let (mut came, begin) = (Burst::new(), Instant::now());
    while came.len() < 2 {
        nic.receive(&mut came).unwrap();
        assert!(begin.elapsed() < PATIENCE, "{} frames came", came.len());
        std::thread::yield_now();
    }
    assert_eq!([came[0].bytes(), came[1].bytes()], [&sent[0][..], &sent[1]]);
}
