//! QEMU's models as worlds.

use std::marker::PhantomData;
use std::time::Duration;

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::{InPlace, Mac, Nic, NicMemory, Repoint};

use super::in_place::Twinned;
use super::repoint::Repointed;
use super::{Sender, World};
use crate::qemu::{MEMORY_AT, Machine, QtestBus, regions};

/// One of QEMU's models of cards.
pub trait Model {
    /// The driver of the card.
    type Nic: Nic<Bus = QtestBus>;
    /// QEMU's name of the model.
    const NAME: &'static str;
    /// Further properties of the model.
    const PROPERTIES: &'static str = "";
    /// Number of receive queues of the model.
    const QUEUES: u8 = 1;
    /// Longest payload of the model, in bytes.
    const MTU_MAX: u16 = 1500;
}

/// A card of QEMU's.
pub struct OnQemu<M>(Machine, PhantomData<M>);

impl<M: Model> OnQemu<M> {
    /// Makes a fresh card, which can be made to see any of these memories.
    fn with(memories: &[&NicMemory]) -> Option<Self> {
        let comma = if M::PROPERTIES.is_empty() { "" } else { "," };
        let properties = format!("mac={}{comma}{}", Self::MAC, M::PROPERTIES);
        let regions: Vec<_> = memories.iter().flat_map(|memory| regions(memory)).collect();
        Some(OnQemu(Machine::start(M::NAME, &properties, &regions)?, PhantomData))
    }
}

impl<M: Model> World for OnQemu<M> {
    type Nic = M::Nic;
    type Bus = QtestBus;

    const MEMORY_AT: Iova = MEMORY_AT;
    const QUEUES: u8 = M::QUEUES;
    const MTU_MAX: u16 = M::MTU_MAX;
    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x57]);
    // The back end keeps a frame that the card does not take.
    const HOLDS_WHILE_PARKED: bool = true;

    fn new(memory: &NicMemory) -> Option<Self> {
        Self::with(&[memory])
    }

    fn bus(&self) -> QtestBus {
        self.0.bus()
    }

    fn try_send(&self, frame: &[u8]) -> bool {
        self.0.wire().try_send_frame(frame)
    }

    fn sender(&self) -> Sender {
        let wire = self.0.wire().try_clone();
        Box::new(move |frame| wire.send_frame(frame))
    }

    fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        self.0.wire().receive_frame(limit)
    }

    fn set_link(&mut self, up: bool) {
        self.0.set_link(up);
    }

    fn pull(&mut self) {
        self.0.end();
    }
}

impl<M: Model<Nic: InPlace>> Twinned for OnQemu<M> {
    fn twin(bus: &QtestBus) -> QtestBus {
        bus.clone()
    }
}

impl<M: Model<Nic: InPlace + Repoint>> Repointed for OnQemu<M> {
    fn with_two(first: &NicMemory, second: &NicMemory) -> Option<Self> {
        Self::with(&[first, second])
    }
}
