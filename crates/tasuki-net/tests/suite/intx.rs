//! Tests a bus's guarantees for an interrupt pin, on an RTL8139.

use std::time::Duration;

use tasuki_net::nic::bus::{Bus, Registers};

use crate::wait::readable;
use tasuki_testing::{PATIENCE, polled};

// Registers of the RTL8139, with the names of its data sheet, and the cause TimeOut, which its timer sets.
const IMR: u32 = 0x3c;
const ISR: u32 = 0x3e;
const TCTR: u32 = 0x48;
const TIMER_INT: u32 = 0x54;
const TIME_OUT: u16 = 1 << 14;

/// The pin rings when it is asserted. Unmasking it while it is asserted rings again, and an event while it is masked
/// is not lost.
pub fn rings_once_until_it_is_unmasked(bus: &mut impl Bus) {
    let registers = bus.registers(1).expect("BAR 1");
    registers.write16(IMR, 0);
    registers.write16(ISR, u16::MAX);
    let intx = bus.intx().expect("the card has INTA#");
    let rang = |limit: Duration| readable(&intx.rings, limit) && rustix::io::read(&intx.rings, &mut [0; 8]).is_ok();
    let unmask = || rustix::io::write(&intx.unmasks, &1_u64.to_ne_bytes()).expect("an eventfd");
    // Starts the timer, and waits until it has run out.
    let time_out = || {
        registers.write32(TIMER_INT, 1000);
        registers.write32(TCTR, 0);
        polled("the timer runs out", || (registers.read16(ISR) & TIME_OUT != 0).then_some(()));
    };
    time_out();
    assert!(!rang(Duration::ZERO), "the card lets nothing through");
    registers.write16(IMR, TIME_OUT);
    assert!(rang(PATIENCE), "the pin is asserted");
    for _ in 0..2 {
        unmask();
        assert!(rang(PATIENCE), "it still is");
    }
    for _ in 0..2 {
        registers.write16(ISR, u16::MAX);
        time_out();
        assert!(!rang(Duration::ZERO), "it was asserted again, and is masked");
        unmask();
        assert!(rang(PATIENCE), "it is asserted");
    }
    let same = bus.intx().expect("there is one");
    rustix::io::write(&same.unmasks, &1_u64.to_ne_bytes()).expect("an eventfd");
    assert!(rang(PATIENCE), "whoever asks twice has the same");
    registers.write16(IMR, 0);
}
