//! Every driver of a NIC, on models that nobody here wrote and on our own strict one, does what a driver promises.
#![allow(clippy::tests_outside_test_module, reason = "a file in tests/ is a test module")]

#[path = "conformance/mod.rs"]
#[allow(dead_code, reason = "a suite's parts for other tests")]
mod conformance;
mod qemu;

use conformance::on_qemu::{Model, OnQemu};
use conformance::on_sim::OnSim;
use qemu::QtestBus;
use tasuki_net::nic::e1000e::E1000e;

impl Model for E1000e<QtestBus> {
    const NAME: &'static str = "e1000e";
    const QUEUES: u8 = 2;
    const MTU_MAX: u16 = 9000;
}
suite!(e1000e_on_qemu, super::OnQemu<super::E1000e<super::QtestBus>>);
suite!(e1000e_on_our_model, super::OnSim);
