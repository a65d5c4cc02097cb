//! QEMU's models as worlds.

use std::marker::PhantomData;
use std::time::Duration;

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::{Mac, Nic, NicMemory};

use super::{Sender, World};
use crate::qemu::{MEMORY_AT, Machine, QtestBus, regions};

/// A driver for a card of which QEMU has a model.
pub trait Model: Nic<Bus = QtestBus> {
    /// QEMU's name of the model.
    const NAME: &'static str;
    /// Further properties of the model.
    const PROPERTIES: &'static str = "";
    /// Number of receive queues of the model.
    const QUEUES: u8 = 1;
    /// Longest payload of the model, in bytes.
    const MTU_MAX: u16 = 1500;
}

/// QEMU's model of the card that `N` drives.
pub struct OnQemu<N>(Machine, PhantomData<N>);

impl<N: Model> OnQemu<N> {
    /// Makes a fresh card, which can be made to see any of these memories.
    pub fn with(memories: &[&NicMemory]) -> Option<Self> {
        let comma = if N::PROPERTIES.is_empty() { "" } else { "," };
        let properties = format!("mac={}{comma}{}", Self::MAC, N::PROPERTIES);
        let regions: Vec<_> = memories.iter().flat_map(|memory| regions(memory)).collect();
        Some(OnQemu(Machine::start(N::NAME, &properties, &regions)?, PhantomData))
    }
}

impl<N: Model> World for OnQemu<N> {
    type Nic = N;
    type Bus = QtestBus;

    const MEMORY_AT: Iova = MEMORY_AT;
    const QUEUES: u8 = N::QUEUES;
    const MTU_MAX: u16 = N::MTU_MAX;
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
