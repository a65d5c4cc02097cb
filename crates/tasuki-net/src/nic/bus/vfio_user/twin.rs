//! Twin of a bus: a second bus to the same device, for a successor that prepares while its predecessor drives.
//!
//! Both share the connection, and an answer goes to the process that reads first, so they take turns at sending
//! requests (`turns.rs`). Making a twin takes no message to the server: the twin gets everything from its
//! predecessor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::turns::Turns;
use super::wire::{Doorbell, Limits, RegionInfo};
use super::{Connection, Doorbells, Known, Shared, VfioUser, open};
use crate::nic::bus::BusError;

/// Parts of a twin: descriptors, and numbers that are the same in every process.
#[derive(Debug)]
pub struct Twin {
    /// Connection to the server.
    pub connection: Connection,
    /// Memory for taking turns: one memfd for all processes that share the connection.
    pub lock: OwnedFd,
    /// Size of the configuration space in bytes.
    pub config_len: u64,
    /// Whether the device can be reset.
    pub can_reset: bool,
    /// BARs that the predecessor has used.
    pub bars: Vec<BarTwin>,
    /// Eventfds of the enabled vectors: the same ones that ring for the predecessor.
    pub vectors: Vec<OwnedFd>,
}

/// A BAR and its doorbells.
#[derive(Debug)]
pub struct BarTwin {
    /// Number of the BAR.
    pub index: u8,
    /// Size of the BAR in bytes.
    pub len: u64,
    /// Memory of the doorbells.
    pub doorbells: Option<OwnedFd>,
    /// For each doorbell, the register's offset in the BAR and its place in that memory, in bytes.
    pub places: Vec<(u32, u32)>,
}

impl VfioUser {
    /// Returns the parts for a twin of this bus. The twin accesses mapped BARs by messages.
    pub fn twin(&self) -> Result<Twin, BusError> {
        let refused = |source: io::Error| BusError::Refused { doing: "copying a descriptor", source };
        let (socket, lock, limits) = {
            let mut link = self.link.lock();
            (link.copy("making a twin")?, link.turns("making a twin")?, link.limits)
        };
        let Limits { fds, transfer, io_fds } = limits;
        let known = (0..).zip(&self.bars).filter_map(|(index, known)| Some((index, known.as_ref()?)));
        let bars = known.map(|(index, known)| {
            let doorbells = known.doorbells.as_ref();
            let places = doorbells.map_or(&[][..], |doorbells| &doorbells.places);
            Ok(BarTwin {
                index,
                len: known.info.len,
                doorbells: doorbells.map(|doorbells| doorbells.memory.try_clone()).transpose()?,
                places: places.iter().map(|doorbell| (doorbell.offset, doorbell.place)).collect(),
            })
        });
        let vectors = self.vectors.iter().map(OwnedFd::try_clone);
        Ok(Twin {
            lock,
            connection: Connection { socket, fds_max: fds, transfer_max: transfer, io_fds },
            config_len: self.config_len,
            can_reset: self.can_reset,
            bars: bars.collect::<io::Result<_>>().map_err(refused)?,
            vectors: vectors.collect::<io::Result<_>>().map_err(refused)?,
        })
    }

    /// Makes a twin. It may send requests, map memory and write while its predecessor drives. But it must not touch
    /// the driver's own registers, above all the doorbells.
    pub fn from_twin(twin: Twin, timeout: Duration) -> Result<Self, BusError> {
        let Connection { socket, fds_max, transfer_max, io_fds } = twin.connection;
        let mut link = open(socket, Limits { fds: fds_max, transfer: transfer_max, io_fds }, timeout)?;
        let turns = Turns::adopt(twin.lock).map_err(|error| BusError::Refused {
            doing: "sharing the connection to the device's server",
            source: io::Error::other(error),
        })?;
        link.share(turns);
        let behind = link.behind();
        let mut bars: [Option<Known>; 6] = Default::default();
        for bar in twin.bars {
            let Some(known) = bars.get_mut(usize::from(bar.index)) else {
                return Err(BusError::NoBar { index: bar.index });
            };
            let places = bar.places.into_iter().map(|(offset, place)| Doorbell { offset, place }).collect();
            let doorbells = bar.doorbells.and_then(|memory| Doorbells::map(Arc::clone(&behind), memory, places));
            let info = RegionInfo { flags: 0, len: bar.len, offset: 0, areas: Vec::new() };
            *known = Some(Known { info, memory: None, doorbells: doorbells.map(Arc::new) });
        }
        Ok(VfioUser {
            link: Shared(Arc::new(Mutex::new(link))),
            config_len: twin.config_len,
            can_reset: twin.can_reset,
            vectors: twin.vectors,
            bars,
            intx: None,
        })
    }
}
