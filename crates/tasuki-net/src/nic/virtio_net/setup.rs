//! Setup of a device: the requested options, what the device allows, and the driver's ends of the queues.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::Device;
use super::chains::Chains;
use super::control::{self, Control};
use super::driver_state::{self, Counts, Cursor, DESCRIPTORS_MAX, DriverState};
use super::queue::{Receiver, Transmitter};
use super::regs::{HEADER_LEN, feature, queue as queues, status};
use super::ring::{Place, SplitRing};
use super::transport::Transport;
use crate::nic::bus::{self, Bus, Header, Iova, Registers, pci};
use crate::nic::driver::Assembly;
use crate::nic::driver_state::broken;
use crate::nic::{AROUND_PAYLOAD, MTU_MIN, Mac, NicError, NicMemory, NicOptions, PciId, loan};

/// Supported devices: the modern one, and the transitional one by its modern interface.
pub const CARDS: [PciId; 2] = [PciId { vendor: 0x1af4, device: 0x1041 }, PciId { vendor: 0x1af4, device: 0x1000 }];
/// Name of the supported devices, for errors.
pub const DRIVER: &str = "virtio network devices (1af4:1041, and 1af4:1000)";

/// Places in the rings' region.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    pub rx: Place,
    pub tx: Place,
    pub control: Place,
    /// Spare queues, as short as can be.
    pub spare: [Place; 2],
    /// Offsets of the header that the device writes, and of the one that it reads.
    rx_header: usize,
    tx_header: usize,
    command: usize,
}

/// Number of descriptors of a spare queue.
pub const SPARE: u16 = 2;

/// Distance in bytes from one header to what follows it.
const HEADER_ROOM: usize = 64;
const _: () = assert!(HEADER_LEN as usize <= HEADER_ROOM);

impl Layout {
    /// Lays out queues of `size` descriptors in `have` bytes.
    pub fn new(have: usize, size: u16) -> Result<Self, NicError> {
        let rx = Place::new(0, size);
        let tx = Place::new(rx.end, size);
        let control = Place::new(tx.end, control::SIZE);
        let rx_header = control.end;
        let tx_header = rx_header + HEADER_ROOM;
        let command = tx_header + HEADER_ROOM;
        let spare_rx = Place::new(command + control::MEMORY_LEN, SPARE);
        let spare_tx = Place::new(spare_rx.end, SPARE);
        let (spare, need) = ([spare_rx, spare_tx], spare_tx.end);
        match need <= have {
            true => Ok(Layout { rx, tx, control, spare, rx_header, tx_header, command }),
            false => Err(NicError::Memory { what: "rings", need, have }),
        }
    }
}

/// What driver and device have agreed on, and the lengths of frames and queues.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    pub features: u64,
    pub ring: u16,
    pub frame_max: u16,
}

impl Terms {
    /// Takes the terms from a checked driver state.
    pub fn of(driver_state: &DriverState) -> Self {
        Terms { features: driver_state.features, ring: driver_state.head.ring, frame_max: driver_state.frame_max }
    }

    /// Returns whether queues can be reset one by one.
    pub fn resets_queues(&self) -> bool {
        self.features & feature::RING_RESET != 0
    }

    /// Returns whether frames can be steered to another pair of queues.
    pub fn steers(&self) -> bool {
        self.features & feature::STEER != 0
    }

    /// Negotiates the requested options with the device.
    fn agree(transport: &Transport<impl Registers>, options: &NicOptions) -> Result<Self, NicError> {
        let features = transport.negotiate(options.mtu)?;
        let (rx, tx) = (transport.queue_size_max(queues::RECEIVE), transport.queue_size_max(queues::TRANSMIT));
        if options.ring > rx.min(tx) {
            return Err(wrong("ring", options.ring.into(), "the device's queues are shorter"));
        }
        Terms::new(transport, features, options)
    }

    /// Makes the terms for these features. The device's network may have an MTU limit of its own.
    pub fn new(transport: &Transport<impl Registers>, features: u64, options: &NicOptions) -> Result<Self, NicError> {
        if transport.mtu(features)?.is_some_and(|mtu| options.mtu > mtu) {
            return Err(wrong(
                "mtu",
                options.mtu.into(),
                "the device has a smaller MTU: lower this one, or raise that (QEMU: host_mtu=)",
            ));
        }
        Ok(Terms { features, ring: options.ring, frame_max: options.mtu + AROUND_PAYLOAD })
    }
}

/// Returns the error for an option that the card cannot do.
pub fn wrong(field: &'static str, value: u64, must: &'static str) -> NicError {
    NicError::Options { field, value, must }
}

pub fn check_options(options: &NicOptions) -> Result<(), NicError> {
    if !options.ring.is_power_of_two() || !(2..=DESCRIPTORS_MAX).contains(&options.ring.into()) {
        let must = "it must be a power of two from 2 to 512 (two descriptors a frame)";
        return Err(wrong("ring", options.ring.into(), must));
    }
    if options.queues != 1 {
        return Err(wrong("queues", options.queues.into(), "this driver uses one receive queue"));
    }
    if options.mtu < MTU_MIN {
        return Err(wrong("mtu", options.mtu.into(), "payloads have at least 68 bytes"));
    }
    Ok(())
}

/// Checks that the memory suffices.
pub fn check_memory(memory: &NicMemory, options: &NicOptions) -> Result<(), NicError> {
    let room = u16::try_from(memory.arena().geometry().slot_len).unwrap_or(u16::MAX);
    if options.mtu.checked_add(AROUND_PAYLOAD).is_none_or(|frame| frame > room) {
        return Err(wrong("mtu", options.mtu.into(), "a frame of it must fit into a slot"));
    }
    Layout::new(memory.rings().len(), options.ring)?;
    loan::check_stock(memory, usize::from(options.ring / 2))
}

/// Makes the driver's ends of the queues for frames, at these cursors. Changes nothing.
pub fn rings(
    memory: &NicMemory,
    terms: Terms,
    [rx, tx]: [Cursor; 2],
) -> Result<([Receiver; 1], Transmitter), NicError> {
    let Terms { features, ring, frame_max } = terms;
    let layout = Layout::new(memory.rings().len(), ring)?;
    let split = |place, cursor| SplitRing::new(memory, place, ring, features & feature::EVENT_IDX != 0, cursor);
    let rx = Chains::new(memory, 0, split(layout.rx, rx).armed(), ring, true);
    let tx = Chains::new(memory, 1, split(layout.tx, tx), ring, false);
    Ok(([Receiver::new(rx, driver_state::room(frame_max))], Transmitter::new(tx, frame_max.into())))
}

impl<B: Bus> Device<B> {
    /// Makes a device that was given `commands` commands so far. Touches neither device nor memory.
    pub fn new(
        memory: &NicMemory,
        (transport, interrupt): (Transport<B::Registers>, OwnedFd),
        (terms, mac): (Terms, Mac),
        commands: u64,
    ) -> Result<Self, NicError> {
        let Terms { features, ring, .. } = terms;
        let layout = Layout::new(memory.rings().len(), ring)?;
        let control = (features & feature::CTRL_RX != 0).then(|| {
            let (event_index, bell) = (features & feature::EVENT_IDX != 0, transport.doorbell(queues::CONTROL));
            Control::new(memory, layout.control, layout.command, event_index, commands, bell)
        });
        let (rx_bell, tx_bell) = (transport.doorbell(queues::RECEIVE), transport.doorbell(queues::TRANSMIT));
        let other_bell = terms.steers().then(|| transport.doorbell(queues::OTHER));
        Ok(Device { transport, control, rx_bell, tx_bell, other_bell, interrupt, layout, terms, mac, quiesce: None })
    }

    /// Resets a device and negotiates with it.
    pub fn cold(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<Self, NicError> {
        let header = Header::of(bus, &CARDS, DRIVER)?;
        let mut transport = Transport::find(bus, &header)?;
        // Reset the device before it may be bus master: if it was left running, it would write to addresses that are
        // ours now.
        transport.reset()?;
        memory.take_back();
        let terms = Terms::agree(&transport, options)?;
        if bus.translates() && terms.features & feature::ACCESS_PLATFORM == 0 {
            return Err(NicError::PastIommu);
        }
        memory.map_anew(bus)?;
        pci::enable(bus, true)?;
        transport.find_pairs(terms.features)?;
        transport.find_bells(terms.features)?;
        let mac = transport.mac()?;
        let interrupt = bus::interrupt(bus)?;
        Self::new(memory, (transport, interrupt), (terms, mac), 0)
    }

    /// Finds a parked device, as its predecessor left it.
    pub fn find(bus: &mut B, driver_state: &DriverState) -> Result<Transport<B::Registers>, NicError> {
        let header = Header::of(bus, &CARDS, DRIVER)?;
        let mut transport = Transport::find(bus, &header)?;
        let found = transport.status()?;
        if found != status::RUNNING {
            return Err(broken("the device was reset after it was parked", found.into()));
        }
        driver_state.head.check_mac(transport.mac()?)?;
        transport.find_pairs(driver_state.features)?;
        transport.choose(driver_state.way.pair);
        transport.find_bells(driver_state.features)?;
        match transport.way() == driver_state.way {
            true => Ok(transport),
            false => Err(broken("the device has its registers elsewhere, at", transport.way().common.base.into())),
        }
    }

    /// Makes the rest of a driver whose queues are empty, and which the device does not know.
    pub fn empty(mut self, memory: &NicMemory) -> Result<Assembly<Self>, NicError> {
        let ([mut rx], mut tx) = rings(memory, self.terms, [Cursor::default(); 2])?;
        rx.chains.empty();
        tx.chains.empty();
        self.control.iter_mut().for_each(Control::begin);
        for place in self.layout.spare {
            // Set the indices to zero.
            SplitRing::new(memory, place, SPARE, false, Cursor::default()).begin_at(0, [].into_iter());
        }
        // Write what all frames have in common.
        let header = |at: usize| -> Iova { memory.rings_at() + at as u64 };
        let sent = memory.rings().span::<AtomicU64>(self.layout.tx_header, HEADER_ROOM / 8);
        sent.expect("the layout was checked against the region").iter().for_each(|word| word.store(0, Relaxed));
        rx.chains.describe_headers(header(self.layout.rx_header));
        tx.chains.describe_headers(header(self.layout.tx_header));
        Ok(Assembly { card: self, rx: [rx], tx, counts: Counts::default() })
    }
}
