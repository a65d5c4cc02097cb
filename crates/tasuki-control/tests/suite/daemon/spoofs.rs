//! Frames with foreign source addresses from a namespace's programs go nowhere. Needs root.
//!
//! Attacks of docs/design/threat-model.md.

use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use super::vnis::{DESK, SHOP, World};

/// An IP address that no node has.
const FORGED: &str = "192.0.2.66";

/// row: T82
#[test]
fn a_namespace_whose_addresses_are_known_sends_in_no_other() {
    let Some(mut world) = World::new() else { return };
    world.rig.kill_daemon();
    let node = |name: &str, path: &str, address: &str| {
        let tap = format!("{{ tap = {{ netns = {path:?}, name = \"lan0\", address = \"{address}/24\" }} }}");
        format!("[[node]]\nname = {name:?}\nvni = \"lan\"\naddresses = [{address:?}]\nwork = {tap}\n\n")
    };
    let nodes = node("shop", &world.shop.path(), SHOP) + &node("desk", &world.desk.path(), DESK);
    world.rig.configure(|text| text + &nodes);
    world.rig.start();
    world.await_pairs();
    let add = ["addr", "add", &format!("{FORGED}/24"), "dev", "lan0"].map(str::to_owned);
    let added = world.shop.within(|| Command::new("ip").args(&add).status());
    assert!(added.is_ok_and(|status| status.success()), "ip (iproute2) gives it another address");
    let bind = |address: &str| UdpSocket::bind((address, 7000)).expect("an address of the interface");
    let (own, forged) = world.shop.within(|| (bind(SHOP), bind(FORGED)));
    let desk = world.desk.within(|| bind(DESK));
    desk.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    let (to, mut room) = ((DESK, 7000), [0; 16]);
    // From here on both know each other's station address.
    own.send_to(b"first", to).expect("a way there");
    assert_eq!(desk.recv(&mut room).expect("it comes"), 5);
    for round in 0..20 {
        forged.send_to(b"forged", to).expect("a way there");
        own.send_to(b"own", to).expect("a way there");
        let (len, from) = desk.recv_from(&mut room).expect("it comes");
        assert_eq!((&room[..len], from.ip().to_string().as_str()), (&b"own"[..], SHOP), "round {round}");
    }
    world.end();
}
