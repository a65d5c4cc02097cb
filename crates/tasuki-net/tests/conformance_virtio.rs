//! The driver of virtio network devices on QEMU's model does what a driver promises, with queues that can be reset and without.
#![allow(clippy::tests_outside_test_module, reason = "a file in tests/ is a test module")]

#[path = "conformance/mod.rs"]
mod conformance;
mod qemu;

use conformance::on_qemu::{Model, OnQemu};
use qemu::QtestBus;
use tasuki_net::nic::virtio_net::VirtioNet;

impl Model for VirtioNet<QtestBus> {
    const NAME: &'static str = "virtio-net-pci";
    const PROPERTIES: &'static str = "disable-legacy=on,host_mtu=9000";
    const MTU_MAX: u16 = 9000;
}
suite!(virtio_on_qemu, super::OnQemu<super::VirtioNet<super::QtestBus>>);
