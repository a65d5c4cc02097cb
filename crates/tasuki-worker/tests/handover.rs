//! A NIC that goes to another node, whose worker has memory of its own: with real processes, under traffic, and with deaths at every step.
#![allow(clippy::tests_outside_test_module, reason = "the whole file is tests")]

mod daemon;

use daemon::{Model, Nic, Node, Worker, model_program, nothing_is_lost, taken};
use tasuki_relay::letter::{Inflight, Work};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Report};

const FRAMES: u64 = 20_000;
const RATE: u64 = 10_000;

macro_rules! need_model {
    () => {
        if model_program().is_none() {
            return println!("skipped: needs tasuki-sim beside the worker: cargo build --package tasuki-sim");
        }
    };
}

fn model(folder: &tempfile::TempDir) -> Model {
    Model::start(folder.path(), &["--source", &FRAMES.to_string(), "--rate", &RATE.to_string()])
}

/// Two nodes.
fn nodes(folder: &tempfile::TempDir) -> [Node; 2] {
    [Node::new(folder.path(), Work::Echo), Node::beside(folder.path(), Work::Echo, 1000)]
}

/// Has `giver` hand the NIC to a fresh worker of `node`, which has memory of its own.
fn repoint(node: &mut Node, giver: &mut Worker, nic: &mut Nic) -> Worker {
    let mut taker = node.worker(&[]);
    taker.give_apart(nic);
    let (kit, fds) = taker.ready_apart(nic).expect("a worker that lives");
    giver.plan_handover(nic, Method::Repoint, Inflight::Deliver);
    let epoch = nic.tenure().epoch;
    let (released, took) = giver.pass_to(&mut taker, nic);
    assert_eq!(released, Report::Released { epoch }, "{:?}", giver.told);
    assert_eq!(took, Report::Taken { epoch: epoch + 1 }, "{:?}", taker.told);
    giver.order(nic, Order::Leave);
    assert_eq!(giver.process.end(), Some(0));
    (nic.kit, nic.fds) = (kit, fds);
    taker
}

#[test]
fn a_nic_is_pointed_at_the_memory_of_another_node_and_back_under_traffic() {
    need_model!();
    let folder = tempfile::tempdir().expect("a place for sockets");
    let model = model(&folder);
    let mut nic = Nic::open(&model.socket, &["--promiscuous"]);
    let [mut red, mut blue] = nodes(&folder);
    let mut driver = red.ready(&nic, &[]);
    taken(driver.grant(&nic));
    let (mut pauses, mut sent) = (Vec::new(), 0);
    for turn in 0..20 {
        let node = if turn % 2 == 0 { &mut blue } else { &mut red };
        let mut taker = repoint(node, &mut driver, &mut nic);
        pauses.push(nic.pause());
        sent += driver.pulse(tasuki_relay::letter::pulse::SENT);
        std::mem::swap(&mut driver, &mut taker);
    }
    pauses.sort_unstable();
    println!("pauses: {:?} in the middle, {:?} at most", pauses[10], pauses[19]);
    driver.until_sent(FRAMES - sent);
    drop((driver, nic));
    nothing_is_lost(&model.report(), FRAMES);
}
