//! Runs the suite of all NIC drivers for virtio network devices on QEMU's model, with all the features that the
//! model offers, and with fewer.

use std::marker::PhantomData;
use std::time::Duration;

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{Mac, NicMemory};

use crate::conformance::World;
use crate::conformance::in_place::Twinned;
use crate::conformance::last_owner::{LastOwned, RegistersOf};
use crate::conformance::repoint::Repointed;
use crate::conformance::tricks::Trick;
use crate::conformance::tricks_virtio;
use crate::qemu::{MEMORY_AT, Machine, QtestBus, regions};
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

/// QEMU's model with some properties.
struct OnQemu<P>(Machine, PhantomData<P>);

impl<P: Properties> OnQemu<P> {
    /// Makes a fresh device, which can be made to see any of these memories.
    fn with(memories: &[&NicMemory]) -> Option<Self> {
        let properties = format!("mac={},{}", Self::MAC, P::PROPERTIES);
        let regions: Vec<_> = memories.iter().flat_map(|memory| regions(memory)).collect();
        Some(OnQemu(Machine::start("virtio-net-pci", &properties, &regions)?, PhantomData))
    }
}

impl<P: Properties> World for OnQemu<P> {
    type Nic = VirtioNet<QtestBus>;
    type Bus = QtestBus;

    const MEMORY_AT: Iova = MEMORY_AT;
    const QUEUES: u8 = 1;
    const MTU_MAX: u16 = 9000;
    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x57]);
    const HOLDS_WHILE_PARKED: bool = true;

    fn new(memory: &NicMemory) -> Option<Self> {
        Self::with(&[memory])
    }

    fn bus(&self) -> QtestBus {
        self.0.bus()
    }

    fn try_send(&self, frame: &[u8]) -> bool {
        self.0.wire().try_send_frame(frame)
    }

    fn sender(&self) -> Box<dyn Fn(&[u8]) + Send> {
        let wire = self.0.wire().try_clone();
        Box::new(move |frame| wire.send_frame(frame))
    }

    fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        self.0.wire().receive_frame(limit)
    }

    fn set_link(&mut self, up: bool) {
        self.0.set_link(up);
    }

    fn pull(&mut self) {
        self.0.end();
    }
}

impl<P: Properties> Twinned for OnQemu<P> {
    fn twin(bus: &QtestBus) -> QtestBus {
        bus.clone()
    }
}

impl<P: Properties> Repointed for OnQemu<P> {
    fn with_two(first: &NicMemory, second: &NicMemory) -> Option<Self> {
        Self::with(&[first, second])
    }
}

impl<P: Properties> LastOwned for OnQemu<P> {
    fn tricks() -> Vec<Trick<RegistersOf<Self>>> {
        tricks_virtio::of_virtio_net()
    }

    fn way(bus: &mut QtestBus) -> (u8, u32) {
        tricks_virtio::way(bus)
    }
}
suite!(modern_after_a_hostile_owner, super::OnQemu<super::Modern>: a_cold_start_undoes_what_a_last_owner_leaves);

suite!(modern, super::OnQemu<super::Modern>);
suite!(transitional, super::OnQemu<super::Transitional>);
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
suite_in_place!(transitional_in_place, super::OnQemu<super::Transitional>);
suite_in_place!(flags_in_place, super::OnQemu<super::Flags>);
suite_in_place!(kept_in_place, super::OnQemu<super::Kept>);

suite_repoint!(modern_repointed, super::OnQemu<super::Modern>);
suite_repoint!(flags_repointed, super::OnQemu<super::Flags>);
