//! Cards behind VFIO in the guest that `cargo xtask guest` boots, as worlds for the suite of all drivers.
//!
//! Another card needs a line of `CARDS` in xtask/src/guest.rs, and here, in main.rs, a [`Card`] and a
//! `card!`.

mod serial;

use std::fs::{self, OpenOptions};
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serial::Wire;
use tasuki_net::nic::bus::vfio::{Address, OpenError};
use tasuki_net::nic::bus::{Iova, Vfio};
use tasuki_net::nic::{Mac, Nic, NicError, NicMemory, NicOptions, PciId};
use tasuki_net::port::Armed;

use crate::conformance::frames::{assert_same, frames, mixed};
use crate::conformance::{Bench, Sender, World, memory};
use crate::wait::readable;
use tasuki_testing::{PATIENCE, polled};

/// Returns the folder in which the kernel lists PCI devices.
pub fn devices() -> PathBuf {
    PathBuf::from("/sys/bus/pci/devices")
}

/// Returns the address of the card.
pub fn find(id: PciId) -> Address {
    let is = |file: &str, device: &PathBuf, number: u16| {
        fs::read_to_string(device.join(file)).is_ok_and(|text| text.trim() == format!("{number:#06x}"))
    };
    let all = fs::read_dir(devices()).unwrap().map(|device| device.unwrap().path());
    let mut cards = all.filter(|device| is("vendor", device, id.vendor) && is("device", device, id.device));
    let card = cards.next().unwrap_or_else(|| panic!("the guest has no {id}"));
    card.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// Executes the commands in the sentence of an error: `echo A > B; echo C > D`.
pub fn obey(sentence: &str) {
    let (_, commands) = sentence.split_once(" as root: ").unwrap();
    for command in commands.split("; ").filter(|command| !command.starts_with("modprobe ")) {
        let (text, file) = command.strip_prefix("echo ").unwrap().split_once(" > ").unwrap();
        fs::write(file, text).unwrap_or_else(|error| panic!("{command}: {error}"));
    }
}

/// Opens the card, taking it away from its present holder.
pub fn open(id: PciId) -> Vfio {
    let address = find(id);
    match Vfio::open(address) {
        Ok(bus) => bus,
        Err(error @ (OpenError::HeldByKernel { .. } | OpenError::NoDriver(_))) => {
            obey(&error.to_string());
            Vfio::open(address).unwrap()
        }
        Err(error) => panic!("{error}"),
    }
}

/// Switches the power of the card's slot on or off. (PCI Express 3.0, 7.8.10: Power Controller Control, in the root
/// port above the card.)
fn set_power(card: Address, on: bool) {
    const POWER_OFF: u16 = 1 << 10;
    let card = fs::canonicalize(devices().join(card.to_string())).unwrap();
    let port = card.parent().unwrap().join("config");
    let port = OpenOptions::new().read(true).write(true).open(port).unwrap();
    let mut config = [0; 256];
    port.read_exact_at(&mut config, 0).unwrap();
    // Walk from the first capability to that of PCI Express.
    let mut at = usize::from(config[0x34]);
    while config[at] != 0x10 {
        at = usize::from(config[at + 1]);
        assert_ne!(at, 0, "the card's port is none of PCI Express");
    }
    let at = at + 0x18;
    let control = u16::from_le_bytes([config[at], config[at + 1]]) & !POWER_OFF;
    let control = if on { control } else { control | POWER_OFF };
    port.write_all_at(&control.to_le_bytes(), at as u64).unwrap();
}

/// A card whose slot has no power. Dropping it restores the power.
struct Powerless(Address);

impl Powerless {
    fn cut(card: Address) -> Powerless {
        set_power(card, false);
        Powerless(card)
    }
}

impl Drop for Powerless {
    fn drop(&mut self) {
        set_power(self.0, true);
    }
}

/// Lets an 82574L's throttle run out.
///
/// QEMU 7.2 ends itself if MSI-X is switched off (by new vectors, a reset or the last close) before its main loop
/// has handled the timer that follows each interrupt by 128 us.
pub fn calm() {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(2) {
        std::thread::yield_now();
    }
    turn_main_loop();
}

/// Lets QEMU's main loop, which moves frames and handles timers, run a few times: it answers the monitor, too.
fn turn_main_loop() {
    (0..4).for_each(|_| serial::ask(r#"{"execute":"query-status"}"#));
}

/// The driver of a card of the guest.
pub trait Card: Nic<Bus = Vfio> {
    /// Name of the card's wire at the guest's monitor and ports: its name in xtask/src/guest.rs.
    const NAME: &'static str;
    /// PCI id of the card.
    const ID: PciId;
    /// Number of receive queues of the model.
    const QUEUES: u8 = 1;
    /// Longest payload of the model, in bytes.
    const MTU_MAX: u16 = 1500;
    /// Longest payload that the model can send from behind an IOMMU, in bytes.
    const MTU_SENT: u16 = Self::MTU_MAX;
    /// Whether closing too early ends QEMU (see [`calm`]), and whether a parked card loses frames at its wire when
    /// its command register is written, as VFIO does to switch vectors on.
    const IS_TOUCHY: bool = false;
}

/// The card that `N` drives, behind VFIO: its wire, and whether it is touchy.
pub struct BehindVfio<N>(&'static Wire, bool, PhantomData<N>);

impl<N: Card> World for BehindVfio<N> {
    type Nic = N;
    type Bus = Vfio;

    // Above 4 GiB: the machine's own memory is not there, and the upper half of an IOMMU address matters.
    const MEMORY_AT: Iova = Iova(0x2_0000_0000);
    const QUEUES: u8 = N::QUEUES;
    const MTU_MAX: u16 = N::MTU_MAX;
    const MTU_SENT: u16 = N::MTU_SENT;
    const CANNOT_PULL: Option<&'static str> =
        Some("QEMU answers for the registers of a card that is not there with zeroes, and any real bus with ones");
    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x57]);
    // The back end keeps a frame that the card does not take.
    const HOLDS_WHILE_PARKED: bool = true;

    fn new(_: &NicMemory) -> Option<Self> {
        let wire = Wire::of(N::NAME);
        wire.clear();
        let mut world = BehindVfio(wire, N::IS_TOUCHY, PhantomData);
        // A failed test may have left the card unplugged.
        world.set_link(true);
        Some(world)
    }

    fn bus(&self) -> Vfio {
        open(N::ID)
    }

    fn try_send(&self, frame: &[u8]) -> bool {
        self.0.try_send(frame)
    }

    fn sender(&self) -> Sender {
        let wire = self.0;
        Box::new(move |frame| wire.send(frame))
    }

    fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        self.0.take(limit)
    }

    fn set_link(&mut self, up: bool) {
        let name = N::NAME;
        let command = format!(r#"{{"execute":"set_link","arguments":{{"name":"{name}","up":{up}}}}}"#);
        serial::ask(&command);
    }

    fn let_frames_move(&self, _: &mut Vfio, sent: usize) {
        // Wait until the first of them has come to QEMU.
        self.0.wait_until_taken(sent.saturating_sub(1) as u64);
        turn_main_loop();
    }

    fn pull(&mut self) {
        unreachable!("it says that it cannot");
    }
}

/// Drops the world before its card.
impl<N> Drop for BehindVfio<N> {
    fn drop(&mut self) {
        if self.1 {
            calm();
        }
    }
}

/// The successor has only the descriptors of the bus, as if they had come over a socket.
pub fn a_successor_goes_on_by_descriptors<N: Card>() {
    let options = NicOptions { ring: 64, ..NicOptions::default() };
    let Some(mut bench) = Bench::<BehindVfio<N>>::start(&options) else { return };
    let mac = BehindVfio::<N>::MAC;
    for round in 0..4 {
        let sent = frames(mac, 101 * round, mixed(101));
        let (before, rest) = sent.split_at(50);
        let (waiting, last) = rest.split_at(50);
        assert_same(&bench.bring_in(before), before);
        // The next call handles the frames that came, and the ring is full again.
        assert!(bench.poll().is_empty(), "nothing comes twice");
        // Frames that the successor finds, in the rings or on the wire.
        let send = |world: &BehindVfio<N>| waiting.iter().for_each(|frame| world.0.send(frame));
        if N::IS_TOUCHY {
            send(&bench.world);
            let all = u64::from(101 * round + 100);
            polled("frames in the rings", || (bench.counter("rx_packets") == Some(all)).then_some(()));
        }
        bench.hand_over(|world, bus, _| {
            match N::IS_TOUCHY {
                true => calm(),
                false => send(world),
            }
            Vfio::from_descriptors(bus.into_descriptors().unwrap()).unwrap()
        });
        let mut came = Vec::new();
        while came.len() < waiting.len() {
            came.extend(bench.receive());
        }
        assert_same(&came, waiting);
        // Now nothing is there, and the next frame's interrupt goes to this successor.
        assert_eq!(bench.nic().arm().unwrap(), Armed::Idle);
        bench.world.0.send(&last[0]);
        assert!(readable(&bench.nic().fd(), PATIENCE), "no interrupt came to the successor");
        assert_same(&bench.receive(), last);
        let out = frames(mac, 101 * round, mixed(100));
        assert_same(&bench.bring_out(&out), &out);
    }
}

/// A card that is present and answers nothing harms no process, and works again as soon as it answers.
pub fn a_card_without_power_is_refused<N: Card>() {
    let options = NicOptions::default();
    let address = find(N::ID);
    let descriptors = open(N::ID).into_descriptors().unwrap();
    let copy = |descriptor: &OwnedFd| descriptor.try_clone().unwrap();
    // The kernel does not reset the card until it is back: only then is the last of these closed.
    let open_still = [&descriptors.container, &descriptors.group, &descriptors.device].map(copy);
    let bus = Vfio::from_descriptors(descriptors).unwrap();
    let powerless = Powerless::cut(address);
    let error = N::start(bus, memory::<BehindVfio<N>>(&options), &options).err().expect("nobody answers");
    assert!(matches!(error.error, NicError::Gone | NicError::Bus(_)), "{error}");
    drop(powerless);
    drop((error, open_still));

    let Some(mut bench) = Bench::<BehindVfio<N>>::start(&options) else { return };
    let sent = frames(BehindVfio::<N>::MAC, 0, mixed(20));
    assert_same(&bench.bring_in(&sent), &sent);
}
