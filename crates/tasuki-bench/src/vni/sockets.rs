//! Peers: the same round trips through the kernel, by UNIX datagrams, and by UDP over veth between two network
//! namespaces.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use tasuki_tap::namespace::Namespace;

use super::netns::Namespaces;
use crate::case::Ends;
use crate::orders::Orders;
use crate::sample::Sample;

/// Bytes of a frame before the payload of a UDP datagram: the headers of Ethernet, IP and UDP.
pub const UDP_HEADERS: usize = 14 + 20 + 8;

/// UDP port of each side over veth.
const PORT: u16 = 5202;

/// Makes a pair of UNIX datagram sockets.
pub fn unix() -> Result<Ends> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let (server, client) = pair.context("the kernel gave no pair of sockets")?;
    Ok(Ends { server: vec![server], client: vec![client] })
}

/// Makes a UDP socket in each of two namespaces. The namespaces lose their names at once, and live as long as the
/// sockets.
pub fn veth() -> Result<Ends> {
    let namespaces = Namespaces::over_veth(9000)?;
    let open = |us: usize| -> Result<OwnedFd> {
        let there = Namespace::named(&namespaces.names()[us]);
        let address = |end: usize| (std::net::Ipv4Addr::from(Namespaces::ADDRESSES[end]), PORT);
        let opened = there.within(|| {
            Ok(UdpSocket::bind(address(us)).and_then(|socket| socket.connect(address(1 - us)).map(|()| socket)))
        })?;
        Ok(opened.context("the kernel gave no socket in a namespace")?.into())
    };
    Ok(Ends { server: vec![open(1)?], client: vec![open(0)?] })
}

/// Sends every received datagram back.
pub fn answer<const LEN: usize, const ASLEEP: bool>(mut orders: Orders) -> Result<()> {
    let socket = orders.next_fd()?;
    let mut bytes = [0; LEN];
    for _ in 0..orders.total() {
        one::<ASLEEP>(&socket, &mut bytes)?;
        send(&socket, &bytes, SendFlags::empty()).context("a datagram could not be sent")?;
    }
    Ok(())
}

pub fn trips<const LEN: usize, const ASLEEP: bool>(mut orders: Orders) -> Result<Sample> {
    let socket = orders.next_fd()?;
    let mut bytes = [0; LEN];
    Sample::of_calls(&orders, |number| {
        let byte = number.to_ne_bytes()[0];
        send(&socket, &[byte; LEN], SendFlags::empty()).context("a datagram could not be sent")?;
        one::<ASLEEP>(&socket, &mut bytes)?;
        ensure!(bytes[LEN - 1] == byte, "datagram {number} did not come back as it was sent");
        Ok(())
    })
}

fn one<const ASLEEP: bool>(socket: &OwnedFd, into: &mut [u8]) -> Result<()> {
    let flags = if ASLEEP { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    loop {
        match recv(socket, &mut *into, flags) {
            Ok((len, _)) => {
                ensure!(len == into.len(), "a datagram has {len} bytes");
                return Ok(());
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno).context("a datagram could not be received"),
        }
    }
}
