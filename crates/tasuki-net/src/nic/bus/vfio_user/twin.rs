//! A second way to a device, for a successor that gets ready while its predecessor drives.
//!
//! Both have the same connection, and an answer goes to whoever reads first: so those that ask take turns (`turns.rs`). A twin is made without a
//! word to the server: what it needs to know, its predecessor has been told.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::turns::Turns;
use super::wire::{Doorbell, Limits, RegionInfo};
use super::{Connection, Doorbells, Known, Shared, VfioUser, open};
use crate::nic::bus::BusError;

/// What a twin is made of: descriptors, and numbers that are the same in every process.
#[derive(Debug)]
pub struct Twin {
    /// The connection.
    pub connection: Connection,
    /// Whose turn it is to ask: one memfd for all that share the connection.
    pub lock: OwnedFd,
    /// Bytes of the configuration space.
    pub config_len: u64,
    /// Whether the device can be reset.
    pub can_reset: bool,
    /// The BARs that the predecessor has used.
    pub bars: Vec<BarTwin>,
    /// The eventfd of each vector that is enabled: the same that ring for the predecessor.
    pub vectors: Vec<OwnedFd>,
}

/// A BAR, and where its doorbells are.
#[derive(Debug)]
pub struct BarTwin {
    /// Which.
    pub index: u8,
    /// Bytes.
    pub len: u64,
    /// The memory of its doorbells.
    pub doorbells: Option<OwnedFd>,
    /// Of each doorbell, the register's offset in the BAR and its place in that memory, in bytes.
    pub places: Vec<(u32, u32)>,
}

impl VfioUser {
    /// What a twin of this bus needs. BARs that are mapped as a whole are reached by messages there.
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

    /// A twin. It may ask, map and write while its predecessor drives, but what belongs to who drives (doorbells, above all) it must leave alone.
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
