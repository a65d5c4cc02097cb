//! Runs the suite of all NIC drivers, on models from others and on our own strict one.

use tasuki_net::nic::NicOptions;
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::bus::{Bus, Registers};
use tasuki_net::nic::e1000e::E1000e;

use crate::conformance::last_owner::{LastOwned, RegistersOf};
use crate::conformance::on_qemu::{Model, OnQemu};
use crate::conformance::on_sim::OnSim;
use crate::conformance::tricks::{self, Trick};
use crate::conformance::{World, memory};
use crate::qemu::QtestBus;
use crate::wait::readable;
use crate::{suite, suite_in_place, suite_last_owner, suite_repoint};
use tasuki_testing::PATIENCE;

impl Model for E1000e<QtestBus> {
    type Nic = Self;

    const NAME: &'static str = "e1000e";
    const QUEUES: u8 = 2;
    const MTU_MAX: u16 = 9000;
}
suite!(e1000e_on_qemu, super::OnQemu<super::E1000e<super::QtestBus>>);
suite!(e1000e_on_our_model, super::OnSim);

suite_in_place!(e1000e_in_place_on_qemu, super::OnQemu<super::E1000e<super::QtestBus>>);

suite_in_place!(e1000e_in_place_on_our_model, super::OnSim);

suite_repoint!(e1000e_repointed_on_qemu, super::OnQemu<super::E1000e<super::QtestBus>>);

impl LastOwned for OnQemu<E1000e<QtestBus>> {
    const LACKS: &'static [(&'static str, &'static str)] = &[
        (
            "a packet without an end",
            "QEMU keeps a packet that has no end where no register shows it: TDFH and TDFT stay as they are (a known hole)",
        ),
        ("the same in queue 1", "the same"),
    ];

    // The driver passes all of them; each takes a tenth of a second, mostly waiting.
    const SPARSE: usize = 3;

    fn tricks() -> Vec<Trick<RegistersOf<Self>>> {
        tricks::of_an_82574l()
    }
}
suite_last_owner!(e1000e_after_a_hostile_owner_on_qemu, super::OnQemu<super::E1000e<super::QtestBus>>);

suite_repoint!(e1000e_repointed_on_our_model, super::OnSim);

/// On our model, over vfio-user: a server that does not mask INTA#, and rings at each new assertion.
#[test]
fn a_pin_that_nobody_masks_rings_each_time_that_it_is_asserted() {
    let Some(world) = <OnSim>::new(&memory::<OnSim>(&NicOptions::default())) else { return };
    let mut bus = world.bus();
    let registers = bus.registers(0).expect("BAR 0");
    // The 82574L's ICR, ICS, IMS, IMC, and its cause LSC.
    let (icr, ics, ims, imc, cause) = (0xc0, 0xc8, 0xd0, 0xd8, 1 << 2);
    let intx = bus.intx().expect("the card has INTA#");
    registers.write32(ims, cause);
    for _ in 0..3 {
        registers.write32(ics, cause);
        assert!(readable(&intx.rings, PATIENCE), "the card asserts it");
        rustix::io::read(&intx.rings, &mut [0; 8]).expect("it rang");
        rustix::io::write(&intx.unmasks, &1_u64.to_ne_bytes()).expect("an eventfd");
        assert_ne!(registers.read32(icr) & cause, 0, "and not, once its cause was read");
    }
    // A client that connects while the pin is asserted is told so.
    registers.write32(ics, cause);
    assert!(readable(&intx.rings, PATIENCE), "the card asserts it");
    let connection = bus.into_connection().expect("the connection works");
    let mut bus = VfioUser::from_connection(connection, TIMEOUT).expect("the connection works");
    let intx = bus.intx().expect("the card has INTA#");
    assert!(readable(&intx.rings, PATIENCE), "it is asserted still");
    bus.registers(0).expect("BAR 0").write32(imc, cause);
}
