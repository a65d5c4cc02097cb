//! Uplinks behind VFIO: a namespace on a VNI talks through a card to a station at the other end of the card's wire.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use tasuki_tap::namespace::Namespace;

use crate::serial::Wire;
use crate::traffic::{Station, Traffic, UNANSWERED};
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
        // The unit has left tasukid the means.
        let announced = Namespace::named(name).within(|| {
            let all = std::fs::read_dir("/proc/sys/net/ipv4/conf").expect("settings").flatten();
            let all = all.filter(|it| !["all", "default", "lo"].iter().any(|other| it.file_name() == *other));
            Ok(all
                .map(|it| std::fs::read_to_string(it.path().join("arp_notify")).expect("a setting"))
                .collect::<String>())
        });
        assert_eq!(announced.expect("the namespace"), "1\n");
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

/// Both cards with an uplink each, on a VNI of its own.
fn nodes() -> String {
    let node = |number| format!("[[node]]\nname = \"up{number}\"\nvni = \"lan{number}\"\nwork = \"uplink\"\n");
    (0..WIRES.len()).map(node).collect()
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
/// and killed, tasukid is started anew, and all are killed together.
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
    let outcomes = finish(all);
    println!("the death of both uplinks and tasukid: {outcomes:?}");
    for outcome in outcomes {
        // A neighbour takes back what waits for a node that nobody drives for a second (docs/design/vni.md).
        let most = if outcome.gap > Duration::from_secs(1) { UNANSWERED } else { 0 };
        assert!(outcome.lost <= most && outcome.again <= 2 * BURST, "all died: {outcome:?}\n{}", log());
    }
    shops.into_iter().for_each(Shop::close);
}
