//! The opener, which has the rights that a worker has not. It takes a card out of its box, starts it, hands its
//! device bundle to the daemon, and ends. The card runs on, and no worker drives it yet.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{SendFlags, SocketType};
use rustix::process::Signal;
use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::bus::pci::Header;
use tasuki_net::nic::bus::vfio::Vfio;
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{Filter, InPlace, Link, NicError, NicOptions, Repoint};
use tasuki_relay::message::{Can, PROTOCOL_VERSION, ToDaemon};

use crate::device::{self, Device, Driver};
use crate::{bundle, channel};

/// Time for which the opener waits for the link: negotiation takes two to three seconds. After that it goes on
/// without a link.
const NEGOTIATION: Duration = Duration::from_secs(5);

/// Options with which a card is opened.
#[derive(Debug)]
pub struct How {
    /// The card.
    pub device: Device,
    /// Descriptors in each ring; nothing for the driver's default.
    pub ring: Option<u16>,
    /// Maximum payload of a frame in bytes.
    pub mtu: u16,
    /// Bus address at which the card sees its memory.
    pub iova: u64,
    /// Whether the card accepts every frame.
    pub promiscuous: bool,
    /// Whether the card accepts every multicast frame.
    pub all_multicast: bool,
    /// Whether the memory is kept clean, for nodes that do not trust each other.
    pub scrub: bool,
}

/// Opens a card for the daemon at the other end of standard input.
pub fn open(how: &How) -> Result<()> {
    let socket = std::io::stdin();
    let kind = rustix::net::sockopt::socket_type(&socket);
    ensure!(
        kind == Ok(SocketType::SEQPACKET),
        "standard input is not the daemon's socket; tasukid starts this, and `tasuki nic probe` looks at a card by hand"
    );
    // If the daemon dies, the next daemon opens the card itself, and a card's server may serve only one connection
    // at a time. So end with the daemon.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let (message, fds) = match &how.device {
        Device::Vfio(address) => start(Vfio::open(*address)?, how)?,
        Device::VfioUser(_) => start(meet(socket.as_fd())?, how)?,
        Device::Sim => bail!("the opener starts no model: tasukid does, and names its socket as vfio-user:PATH"),
    };
    let message = serde_json::to_vec(&message)?;
    channel::send(socket.as_fd(), &message, &fds, SendFlags::empty())
        .context("the daemon did not take the card's descriptors")
}

/// Connects to the server of a card. The server is not part of Tasuki, so the daemon gives the connection only to a
/// process that is confined.
fn meet(daemon: BorrowedFd<'_>) -> Result<VfioUser> {
    let message = serde_json::to_vec(&ToDaemon::Begun {
        protocol_version: PROTOCOL_VERSION,
        reads: Vec::new(),
        unconfined: Vec::new(),
    })?;
    channel::send(daemon, &message, &[], SendFlags::empty()).context("the daemon is gone")?;
    let connection = channel::receive_one(daemon).context("the daemon gave no connection to the card's server")?;
    VfioUser::meet(connection, TIMEOUT).map_err(Into::into)
}

fn start<B: BundleBus>(mut bus: B, how: &How) -> Result<(ToDaemon, Vec<OwnedFd>)> {
    let found = Header::read(&mut bus)?.id;
    match device::driver_of(found) {
        Some((driver @ Driver::E1000e, _)) => go::<E1000e<B>>(bus, driver, how),
        Some((driver @ Driver::VirtioNet, _)) => go::<VirtioNet<B>>(bus, driver, how),
        Some((Driver::Rtl8139, name)) => bail!(
            "a {found} ({name}) cannot be gone on with while it runs, which tasukid needs; drive it by hand with `tasuki nic run`"
        ),
        None => bail!("no driver here drives a {found}; `tasuki nic probe` says which cards are driven"),
    }
}

fn go<N: InPlace + Repoint>(bus: N::Bus, driver: Driver, how: &How) -> Result<(ToDaemon, Vec<OwnedFd>)>
where
    N::Bus: BundleBus,
{
    let ring = how.ring.unwrap_or(driver.ring());
    let filter = Filter { promiscuous: how.promiscuous, all_multicast: how.all_multicast, ..Filter::default() };
    let options = NicOptions { ring, mtu: how.mtu, filter, scrub: how.scrub, ..NicOptions::default() };
    let memory = device::memory(ring, how.mtu, Iova(how.iova)).context("there is no memory for the card")?;
    let (parts, layout) = (memory.parts()?, memory.layout());
    let mut nic = N::start(bus, memory, &options).map_err(NicError::from)?;
    let until = Instant::now() + NEGOTIATION;
    while nic.link()? == Link::Down && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let its = nic.can();
    let can =
        Can { in_place: true, spare_queue: its.steer, repoint: its.point, pauses: its.pauses, fenced: its.fenced };
    let (bundle, fds) = bundle::pack(&nic, driver, &options, (parts, layout), &bundle::wake()?, can)?;
    Ok((ToDaemon::DeviceBundle { bundle }, fds))
}
