//! Uplinks behind VFIO: a namespace on a VNI talks through a card to a station at the other end of the card's wire.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use tasuki_tap::namespace::Namespace;

use crate::serial::Wire;
use crate::traffic::{Station, Traffic};
use crate::unit::{self, Unit, ask, kill, lives, log, property, run};
use crate::wait::until;
use crate::{BURST, WIRES, assert_none_lost, cards_of, finish};

/// Address of the namespaces, for documentation (RFC 5737). Each has a VNI of its own.
const SHOP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// UDP port of the programs in the namespaces.
const PORT: u16 = 7;

/// A network namespace with a program that sends each datagram back.
struct Shop {
    over: Arc<AtomicBool>,
    program: JoinHandle<()>,
}

impl Shop {
    /// Makes the namespace after tasukid has begun, as an operator may: the unit must see it all the same.
    fn open(name: &str, vni: &str) -> Shop {
        if !Path::new("/run/netns").join(name).exists() {
            run("ip", &["netns", "add", name]);
        }
        ask(&["node", "add", name, "--vni", vni, "--netns", name, "--address", &format!("{SHOP}/24")]);
        let bound = || Namespace::named(name).within(|| Ok(UdpSocket::bind((SHOP, PORT)).ok())).ok().flatten();
        let socket = until("the namespace has its address", bound);
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let program = std::thread::spawn(move || {
            let mut bytes = [0; 2048];
            while !told.load(Relaxed) {
                let Ok((len, from)) = socket.recv_from(&mut bytes) else { continue };
                socket.send_to(&bytes[..len], from).expect("it can be sent");
            }
        });
        Shop { over, program }
    }

    fn close(self) {
        self.over.store(true, Relaxed);
        self.program.join().expect("it goes on");
    }
}

/// Both cards with an uplink each, and a second uplink on each VNI that may take the card.
fn nodes() -> String {
    let node = |name: &str, number: usize, trusts: &str| {
        format!(
            "[[node]]\nname = \"{name}{number}\"\nvni = \"lan{number}\"\nwork = \"uplink\"\ntrusts = [\"{trusts}{number}\"]\n"
        )
    };
    (0..WIRES.len()).map(|number| node("up", number, "spare") + &node("spare", number, "up")).collect()
}

/// Waits until one worker of the node drives the card and the node's end, and another stands by.
fn is_whole(node: &str) {
    until("one worker drives both, and another stands by", || {
        let drivers: Vec<_> = driven(node).into_iter().collect::<Option<_>>()?;
        let workers = ask(&["worker", "list"]);
        let mut workers = workers.as_array().expect("workers").iter();
        let stands_by = workers.any(|worker| worker["node"] == node && worker["is"] == "stands by");
        (drivers.len() == 2 && drivers[0] == drivers[1] && stands_by).then_some(())
    });
}

/// Returns the driver of each NIC of a node, and of its end.
fn driven(node: &str) -> Vec<Option<u64>> {
    let nics = ask(&["nic", "list"]);
    let its = nics.as_array().expect("NICs").iter().filter(|nic| nic["node"] == node);
    its.map(|nic| nic["worker"].as_u64().filter(|_| nic["is"] == "driven")).collect()
}

fn traffic() -> Vec<Traffic> {
    WIRES.into_iter().map(|wire| Traffic::to(wire, Station::find(Wire::of(wire), SHOP.octets(), PORT))).collect()
}

/// All that is done to an uplink while its namespace and the station behind the card's wire talk: workers are upgraded
/// and killed, tasukid is started anew, all are killed together, and the card goes to another uplink and back.
#[test]
fn namespaces_behind_cards_lose_nothing_while_uplinks_are_replaced() {
    let unit = Unit::with(&nodes(), ["up0", "up1"]);
    let uplinks = ["up0", "up1"];
    uplinks.into_iter().for_each(is_whole);
    let shops = [Shop::open("shop0", "lan0"), Shop::open("shop1", "lan1")];

    let quiet = traffic();
    quiet[0].for_a_while();
    assert_none_lost("nothing", &finish(quiet), 0);

    let all = traffic();
    for node in ["up0", "up1", "shop0", "shop1"] {
        ask(&["worker", "upgrade", node]);
        all[0].for_a_while();
    }
    uplinks.into_iter().for_each(is_whole);
    assert_none_lost("worker upgrade", &finish(all), 0);

    let all = traffic();
    run("systemctl", &["restart", unit::UNIT]);
    all[0].for_a_while();
    assert_none_lost("systemctl restart", &finish(all), 0);

    uplinks.into_iter().for_each(is_whole);
    let all = traffic();
    for (node, nic) in [("up0", "eth0"), ("up1", "eth1")] {
        kill(&[unit.driver(nic)]);
        is_whole(node);
        all[0].for_a_while();
    }
    // A killed uplink may have handled a burst each way.
    assert_none_lost("SIGKILL of an uplink's worker", &finish(all), 2 * BURST);

    let (keeper, daemon) = (unit.keeper(), unit.pid());
    let held = cards_of(keeper);
    let all = traffic();
    let dead: Vec<u32> = uplinks.into_iter().flat_map(|node| unit.workers(node)).chain([daemon]).collect();
    assert_eq!(dead.len(), 5, "two workers each, and tasukid");
    kill(&dead);
    until("all are dead", || dead.iter().all(|pid| !lives(*pid)).then_some(()));
    assert_eq!(cards_of(keeper), held, "the keeper has the cards when nobody else has them");
    until("systemd starts another tasukid", || {
        (property("ActiveState") == "active" && unit.pid() != daemon).then_some(())
    });
    uplinks.into_iter().for_each(is_whole);
    all[0].for_a_while();
    assert_none_lost("the death of both uplinks and tasukid", &finish(all), 2 * BURST);
    shops.into_iter().for_each(Shop::close);
}

/// A card goes from one uplink to another of the same VNI and back, by each method.
#[test]
fn a_card_goes_from_uplink_to_uplink_and_its_station_is_found_there() {
    let unit = Unit::with(&nodes(), ["up0", "up1"]);
    ["up0", "up1"].into_iter().for_each(is_whole);
    let shops = [Shop::open("shop0", "lan0"), Shop::open("shop1", "lan1")];
    for (number, wire) in WIRES.into_iter().enumerate() {
        let nic = format!("eth{number}");
        for method in ["keep", "repoint", "cold"] {
            for to in ["spare", "up"] {
                let to = format!("{to}{number}");
                unit.has_a_worker(&to);
                let relay = ask(&["nic", "give", &nic, "--to", &to, "--method", method])["relays"][0].clone();
                assert_eq!((&relay["done"], &relay["method"]), (&true.into(), &method.into()), "{relay}\n{}", log());
                is_whole(&to);
                let one = Traffic::to(wire, Station::find(Wire::of(wire), SHOP.octets(), PORT));
                one.for_a_while();
                let outcome = one.finish();
                println!("{nic} at {to} by {method}: {outcome:?}");
                assert_eq!((outcome.lost, outcome.again), (0, 0), "{nic} at {to} by {method}: {outcome:?}\n{}", log());
            }
        }
    }
    shops.into_iter().for_each(Shop::close);
    let faults = run("journalctl", &["--dmesg", "--no-pager", "--output", "cat"]);
    let is_ours =
        |line: &&str| line.contains("DMAR:") && line.contains("fault addr") && !line.contains("fault addr 0x0 ");
    let faults: Vec<_> = faults.lines().filter(is_ours).collect();
    println!("{} faults of the IOMMU in all tests so far", faults.len());
}
