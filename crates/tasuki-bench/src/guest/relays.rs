//! The worker of a virtual machine that is killed or replaced, beside that of a NIC in the same daemon. The front end is
//! DPDK's, with 1 GiB of memory that it wrote; both nodes sleep between frames.

use anyhow::{Context, Result, ensure};

use super::idle::front_end;
use super::machine::node;
use crate::interrupt::Interrupt;
use crate::relay::system::System;
use crate::report::{Kind, Row};
use crate::sample::Sample;
use crate::workplace::Workplace;

/// Names of the cases.
pub const NAMES: [&str; 2] = ["guest-takeover", "guest-upgrade"];

/// Packet buffers of the front end, of a page each: they take 1 GiB.
const BUFFERS: &str = "--mbuf-size=4096 --total-num-mbufs=240000";

/// Each node with its NIC or its end.
const GUEST: (&str, &str) = ("vm", "vm@lan");
const CARD: (&str, &str) = ("red", "nic0");

/// Measures, and makes the rows.
pub fn rows(is_quick: bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let place = Workplace::new()?;
    let socket = place.directory().join("vm.sock");
    let card =
        "[[node]]\nname = \"red\"\nwork = \"echo\"\n\n[[nic]]\nname = \"nic0\"\ndevice = \"sim\"\nnode = \"red\"\n";
    let system = System::configured(place.directory(), &(node(GUEST.0, &socket) + card))?;
    system.await_pair(GUEST.0)?;
    let mut front = front_end(&socket, 1280, BUFFERS, interrupt)?;
    ensure!(system.count(GUEST.1, "clients_attached")? > 0, "DPDK's front end does not connect");
    let mut samples: [[Sample; 2]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| Sample::new()));
    for _ in 0..if is_quick { 10 } else { 200 } {
        for (it, (node, nic)) in [GUEST, CARD].into_iter().enumerate() {
            interrupt.check()?;
            samples[0][it].record(system.kill_driver(node, nic)?);
            samples[1][it].record(system.upgrade(node, nic)?);
        }
    }
    let refused = system.count(GUEST.1, "clients_refused")?;
    ensure!(front.is_running()? && refused == 0, "the front end has gone: {}", system.log("sent away"));
    let bars = [1.3, 2.0];
    let mut rows = Vec::new();
    for ((name, [ours, card]), bar) in NAMES.into_iter().zip(&samples).zip(bars) {
        let (ours, card) = (ours.summary(), card.summary());
        for (metric, ours, card) in [("p50", ours.p50, card.p50), ("p99", ours.p99, card.p99)] {
            let row = Row::lower(name, metric, "ns", ours as f64).against("nic", Kind::Peer, card as f64);
            rows.push(row.bar(bar, "nic")?);
        }
    }
    let note = "from the kill, or from the giver's last turn, until the taker drives; the front end stayed connected";
    rows.first_mut().context("there are cases")?.note = Some(note.to_owned());
    Ok(rows)
}
