//! Runs the suite of all NIC drivers for virtio network devices on our own strict model, with all the features that
//! the model offers, and with fewer.

use std::marker::PhantomData;

use tasuki_net::nic::bus::VfioUser;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{How, Mac};
use tasuki_sim::journal::Class;
use tasuki_sim::virtio_net::{Device, Options, feature};

use crate::conformance::on_sim::{Modelled, OnSim};
use crate::{suite, suite_in_place, suite_repoint};

/// Features that a model lacks.
trait Shape: 'static {
    const WITHOUT: u64;
    const HOW: How = How::Point;
}

/// All features.
struct Whole;
impl Shape for Whole {
    const WITHOUT: u64 = 0;
}

/// All features; received frames are steered to another owner's queue.
struct Steered;
impl Shape for Steered {
    const WITHOUT: u64 = 0;
    const HOW: How = How::Steer;
}

/// Flags enable notifications.
struct Flags;
impl Shape for Flags {
    const WITHOUT: u64 = feature::EVENT_IDX;
}

/// Queues cannot be reset one by one: parking keeps them.
struct Kept;
impl Shape for Kept {
    const WITHOUT: u64 = feature::RING_RESET;
}

/// No command queue.
struct Mute;
impl Shape for Mute {
    const WITHOUT: u64 = feature::CTRL_VQ;
}

/// The model of some shape.
struct Card<S>(PhantomData<S>);

impl<S: Shape> Modelled for Card<S> {
    type Nic = VirtioNet<VfioUser>;
    type Model = Device;

    const HOW: How = S::HOW;
    const QUEUES: u8 = 1;
    const MTU_MAX: u16 = 9000;
    // The other end of its wire keeps frames that the card does not take.
    const HOLDS_WHILE_PARKED: bool = true;

    fn new(mac: Mac) -> Device {
        let features = feature::ALL & !S::WITHOUT;
        Device::new(Options { mac: mac.0, features, mtu: Self::MTU_MAX, ..Options::default() })
    }

    fn waiting(model: &Device) -> usize {
        model.waiting().0
    }

    fn set_removed(model: &mut Device, removed: bool) {
        model.faults.removed = removed;
    }

    fn check(model: &Device, starts: u64) {
        let journal = &model.journal;
        journal.demand_none(&Class::ALWAYS).unwrap();
        // A driver that starts the device resets it; no successor does.
        assert!(journal.count(Class::Reset) <= starts, "a successor was not content");
    }
}

suite!(whole, super::OnSim<super::Card<super::Whole>>);
suite!(flags, super::OnSim<super::Card<super::Flags>>);

// All but `a_parked_nic_touches_no_memory`: a device that cannot be stopped goes on with its buffers.
suite!(kept, super::OnSim<super::Card<super::Kept>>, and
    only_what_is_let_in_arrives
    a_new_filter_replaces_the_old_one
    a_hundred_successors_lose_nothing_under_traffic
    wrong_driver_states_under_traffic_lose_nothing
    interrupts_do_not_block
);

// All but the cases of the filter: without commands the device lets everything in.
suite!(mute, super::OnSim<super::Card<super::Mute>>, and
    a_parked_nic_touches_no_memory
    a_hundred_successors_lose_nothing_under_traffic
    interrupts_do_not_block
);

suite_in_place!(whole_in_place, super::OnSim<super::Card<super::Whole>>);
suite_in_place!(flags_in_place, super::OnSim<super::Card<super::Flags>>);
suite_in_place!(kept_in_place, super::OnSim<super::Card<super::Kept>>);
suite_in_place!(mute_in_place, super::OnSim<super::Card<super::Mute>>);

suite_repoint!(whole_repointed, super::OnSim<super::Card<super::Whole>>);
suite_repoint!(flags_repointed, super::OnSim<super::Card<super::Flags>>);
suite_repoint!(steered, super::OnSim<super::Card<super::Steered>>);
