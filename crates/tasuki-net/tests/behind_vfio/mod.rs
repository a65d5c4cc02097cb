//! Cards behind VFIO in the guest that `cargo xtask guest` boots, as worlds for the suite of all drivers.

mod serial;

use std::fs;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::time::Duration;

use serial::{MONITOR, Wire};
use tasuki_net::nic::bus::vfio::{Address, OpenError};
use tasuki_net::nic::bus::{Iova, Vfio};
use tasuki_net::nic::{Mac, Nic, NicMemory, PciId};

use crate::conformance::{Sender, World};

/// Where the kernel lists what is on the bus.
pub fn devices() -> PathBuf {
    PathBuf::from("/sys/bus/pci/devices")
}

/// Where the card is.
pub fn find(id: PciId) -> Address {
    let is = |file: &str, device: &PathBuf, number: u16| {
        fs::read_to_string(device.join(file)).is_ok_and(|text| text.trim() == format!("{number:#06x}"))
    };
    let all = fs::read_dir(devices()).unwrap().map(|device| device.unwrap().path());
    let mut cards = all.filter(|device| is("vendor", device, id.vendor) && is("device", device, id.device));
    let card = cards.next().unwrap_or_else(|| panic!("the guest has no {id}"));
    card.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// Does what the sentence of an error says, line by line: `echo A > B; echo C > D`.
pub fn obey(sentence: &str) {
    let (_, commands) = sentence.split_once(" as root: ").unwrap();
    for command in commands.split("; ").filter(|command| !command.starts_with("modprobe ")) {
        let (text, file) = command.strip_prefix("echo ").unwrap().split_once(" > ").unwrap();
        fs::write(file, text).unwrap_or_else(|error| panic!("{command}: {error}"));
    }
}

/// Opens the card, taking it away from whoever has it.
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

/// Has an 82574L's throttle run out: QEMU 7.2 ends itself if MSI-X is switched off, by new vectors, a reset or the last close, before the
/// timer that follows each interrupt (128 us) has been seen to by its main loop, which nothing here can observe.
pub fn calm() {
    std::thread::sleep(Duration::from_millis(500));
}

/// A driver of a card that the guest has.
pub trait Card: Nic<Bus = Vfio> {
    /// What the guest's monitor, and its ports, call the card's wire: its name in xtask/src/guest.rs.
    const NAME: &'static str;
    /// Who the card is.
    const ID: PciId;
    /// Receive queues that the model has.
    const QUEUES: u8 = 1;
    /// Longest payload that the model can do.
    const MTU_MAX: u16 = 1500;
    /// Whether the model ends QEMU when it is closed too early: see [`calm`].
    const IS_TOUCHY: bool = false;
}

/// The card that `N` drives, behind VFIO.
pub struct BehindVfio<N>(&'static Wire, bool, PhantomData<N>);

impl<N: Card> World for BehindVfio<N> {
    type Nic = N;
    type Bus = Vfio;

    // Above 4 GiB, where the machine's own memory is not, and the IOMMU's other half of an address matters.
    const MEMORY_AT: Iova = Iova(0x2_0000_0000);
    const QUEUES: u8 = N::QUEUES;
    const MTU_MAX: u16 = N::MTU_MAX;
    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x57]);
    // Its back end keeps a frame that the card does not take.
    const HOLDS_WHILE_PARKED: bool = true;

    fn new(_: &NicMemory) -> Option<Self> {
        let wire = Wire::of(N::NAME);
        wire.clear();
        Some(BehindVfio(wire, N::IS_TOUCHY, PhantomData))
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
        MONITOR.lock().expect("nobody panics while asking").ask(&command);
    }

    fn let_frames_move(&self, _: &mut Vfio, sent: usize) {
        // The first of them has come to QEMU, whose main loop moves frames and answers its monitor.
        self.0.wait_until_taken(sent.saturating_sub(1) as u64);
        (0..50).for_each(|_| MONITOR.lock().expect("nobody panics while asking").ask(r#"{"execute":"query-status"}"#));
    }

    fn pull(&mut self) {
        todo!()
    }
}

impl<N> Drop for BehindVfio<N> {
    fn drop(&mut self) {
        if self.1 {
            calm();
        }
    }
}
