//! Runs the suite of all NIC drivers for virtio network devices on QEMU's model, with all the features that the
//! model offers, and with fewer.

use tasuki_net::nic::virtio_net::VirtioNet;

use crate::conformance::last_owner::{LastOwned, RegistersOf};
use crate::conformance::on_qemu::{Model, OnQemu};
use crate::conformance::tricks::Trick;
use crate::conformance::tricks_virtio;
use crate::qemu::QtestBus;
use crate::{suite, suite_in_place, suite_repoint};

/// Properties of a model.
trait Properties {
    const PROPERTIES: &'static str;
}

/// The modern device.
struct Modern;
impl Properties for Modern {
    const PROPERTIES: &'static str = "disable-legacy=on,host_mtu=9000";
}

/// The transitional device, which also has the modern interface.
struct Transitional;
impl Properties for Transitional {
    const PROPERTIES: &'static str = "disable-legacy=off,disable-modern=off,host_mtu=9000";
}

/// Without event indices: flags enable notifications.
struct Flags;
impl Properties for Flags {
    const PROPERTIES: &'static str = "disable-legacy=on,host_mtu=9000,event_idx=off";
}

/// Without the reset of single queues: parking keeps them.
struct Kept;
impl Properties for Kept {
    const PROPERTIES: &'static str = "disable-legacy=on,host_mtu=9000,queue_reset=off";
}

impl<P: Properties> Model for P {
    type Nic = VirtioNet<QtestBus>;

    const NAME: &'static str = "virtio-net-pci";
    const PROPERTIES: &'static str = P::PROPERTIES;
    const MTU_MAX: u16 = 9000;
}

impl LastOwned for OnQemu<Modern> {
    fn tricks() -> Vec<Trick<RegistersOf<Self>>> {
        tricks_virtio::of_virtio_net()
    }

    fn way(bus: &mut QtestBus) -> (u8, u32) {
        tricks_virtio::way(bus)
    }
}

suite!(modern_after_a_hostile_owner, super::OnQemu<super::Modern>: a_cold_start_undoes_what_a_last_owner_leaves);

suite!(modern, super::OnQemu<super::Modern>);
// Of the two devices only the ID differs, and whether BAR 0 has the legacy registers, which no driver here uses.
suite!(transitional, super::OnQemu<super::Transitional>:
    frames_arrive_whole_and_in_order
    frames_leave_whole_and_in_order
    a_successor_goes_on_exactly
    a_parked_card_can_be_started_anew
    drivers_take_turns_under_traffic_without_a_loss
);
suite!(flags, super::OnQemu<super::Flags>);

// All but `a_parked_nic_touches_no_memory`: a device that cannot be stopped goes on with its buffers.
suite!(kept, super::OnQemu<super::Kept>, and
    only_what_is_let_in_arrives
    a_new_filter_replaces_the_old_one
    a_hundred_successors_lose_nothing_under_traffic
    wrong_driver_states_under_traffic_lose_nothing
    interrupts_do_not_block
);

suite_in_place!(modern_in_place, super::OnQemu<super::Modern>);
suite_in_place!(flags_in_place, super::OnQemu<super::Flags>);
suite_in_place!(kept_in_place, super::OnQemu<super::Kept>);

suite_repoint!(modern_repointed, super::OnQemu<super::Modern>);
suite_repoint!(flags_repointed, super::OnQemu<super::Flags>);
