//! A network interface: found, given addresses, brought up, made as a veth pair, and given a BPF program for its
//! received frames; by route netlink (rtnetlink(7)).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, netdevice};

use crate::device;
use crate::netlink::{Message, Netlink, attributes};
use crate::{Address, Route, Settings, TapError, Waiting};

/// Message types (`<linux/rtnetlink.h>`).
const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const GET_LINK: u16 = 18;
const NEW_ADDRESS: u16 = 20;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_QUEUE: u16 = 36;
const NEW_FILTER: u16 = 44;
const GET_NAMESPACE_ID: u16 = 90;
const GET_STATISTICS: u16 = 94;

/// Create the object if it does not exist.
const CREATE: u16 = 0x0400;
/// Replace it if it exists.
const REPLACE: u16 = 0x0100;
/// Fail if it exists.
const EXCLUSIVE: u16 = 0x0200;

/// Attributes of a link (`<linux/if_link.h>`): its MAC address, its name, its MTU in bytes, the length of its queue in
/// frames, its kind, the namespace to create it in, and the most bytes of a segment.
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_TXQLEN: u16 = 13;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_GSO_MAX_SIZE: u16 = 41;
/// The namespace of a pair's other end, by the number that it has in this one.
const IFLA_LINK_NETNSID: u16 = 37;
/// `struct rtnl_link_stats64`: an attribute, and a bit of what is asked for (`<linux/if_link.h>`). Words of 8 bytes.
const IFLA_STATS_LINK_64: u16 = 1;
const TX_DROPPED: usize = 7;
/// Attributes of a namespace's number (`<linux/net_namespace.h>`): the number, and a descriptor of the namespace.
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// Attributes of IFLA_LINKINFO: the kind, and its data.
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
/// Attribute of a veth pair: the peer (`<linux/veth.h>`).
const VETH_INFO_PEER: u16 = 1;

/// Attributes of an address: the address, and the same for the local end.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// Attributes of a route: the network, the interface's index, and the station that passes packets on.
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
/// Fields of `struct rtmsg`: the main table, routes that an administrator set, the two scopes, and unicast.
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;

/// Attributes of queueing disciplines and filters: the kind, and its options.
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
/// Options of a BPF filter: its descriptor, its displayed name, and that its result is the action
/// (`<linux/pkt_cls.h>`).
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// Where filters for received frames are attached (`<linux/pkt_sched.h>`): TC_H_CLSACT, and its TC_H_MIN_INGRESS.
const CLSACT: u32 = 0xFFFF_FFF1;
const CLSACT_HANDLE: u32 = 0xFFFF_0000;
const INGRESS: u32 = 0xFFFF_FFF2;
/// Frames of every protocol, at the highest priority.
const ALL_FIRST: u32 = 1 << 16 | 0x0003_u16.to_be() as u32;

const IFF_UP: u32 = 1;

/// IFA_F_NODAD. It has no meaning for IPv4.
const NO_DAD: u8 = 0x02;

/// An interface of the network namespace in which it was found; usable from any namespace.
#[derive(Debug)]
pub struct Interface {
    name: String,
    index: u32,
    /// Socket of the namespace in which it was opened.
    netlink: Netlink,
}

/// Returns a `struct ifinfomsg` that sets `flags`.
fn link_of(index: u32, flags: u32) -> Vec<u8> {
    let mut fixed = vec![0; 4];
    fixed.extend_from_slice(&index.to_ne_bytes());
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed
}

/// Returns a `struct tcmsg`.
fn traffic_of(index: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, index, handle, parent, info].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Returns an address as the kernel has it: its family, and its bytes.
fn raw(ip: IpAddr) -> (u8, Vec<u8>) {
    let (family, bytes) = match ip {
        IpAddr::V4(ip) => (AddressFamily::INET, ip.octets().to_vec()),
        IpAddr::V6(ip) => (AddressFamily::INET6, ip.octets().to_vec()),
    };
    (u8::try_from(family.as_raw()).expect("a small number"), bytes)
}

/// Returns the address that the kernel has as these bytes.
fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

/// Returns the value of an attribute, if it is there.
fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(its, _)| *its == kind).map(|(_, value)| value)
}

/// Returns a name as the kernel expects it, with a zero behind.
fn text(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

/// Longest name of an interface, in bytes.
const NAME_MAX: usize = 15;

/// Returns the index of the interface `name` in the socket's network namespace. The error is `NODEV` if there is none.
/// `SIOCGIFINDEX` would say the same, and have the kernel start modprobe(8) for each name that it does not find, and wait.
pub(crate) fn index_of(netlink: &Netlink, name: &str) -> Result<u32, Errno> {
    if name.len() > NAME_MAX {
        return Err(Errno::NODEV);
    }
    let link = netlink.get(Message::new(GET_LINK, 0, &link_of(0, 0)).with(IFLA_IFNAME, &text(name)))?;
    link.get(4..8).and_then(number).ok_or(Errno::BADMSG)
}

/// Returns the kind of the interface with this index, as `ip link add` calls it; `None` for a card.
pub(crate) fn kind_of(netlink: &Netlink, index: u32) -> Result<Option<String>, Errno> {
    let link = netlink.get(Message::new(GET_LINK, 0, &link_of(index, 0)))?;
    let info = link.get(16..).and_then(|its| attribute(its, IFLA_LINKINFO));
    let kind = info.and_then(|info| attribute(info, IFLA_INFO_KIND));
    Ok(kind.map(|kind| String::from_utf8_lossy(kind.strip_suffix(&[0]).unwrap_or(kind)).into_owned()))
}

impl Interface {
    /// Finds the interface `name` in the caller's network namespace.
    pub fn find(name: &str) -> Result<Self, TapError> {
        Self::look(name).map_err(|errno| TapError::SetUp {
            name: name.to_owned(),
            what: "anything done to it".to_owned(),
            why: errno.into(),
        })
    }

    /// Finds the interface `name` as [`find`](Self::find) does; returns `None` if it does not exist, and an error if
    /// the kernel could not look.
    pub fn if_there(name: &str) -> Result<Option<Self>, TapError> {
        match Self::look(name) {
            Ok(interface) => Ok(Some(interface)),
            Err(Errno::NODEV) => Ok(None),
            Err(errno) => Err(TapError::of(errno)),
        }
    }

    fn look(name: &str) -> Result<Self, Errno> {
        let netlink = Netlink::open()?;
        let index = index_of(&netlink, name)?;
        Ok(Interface { name: name.to_owned(), index, netlink })
    }

    /// Returns the names of all interfaces in the caller's network namespace.
    pub fn names() -> Result<BTreeSet<String>, TapError> {
        let all = Netlink::open().and_then(|netlink| netlink.list(Message::new(GET_LINK, 0, &link_of(0, 0))));
        let name = |link: &Vec<u8>| {
            let name = attribute(link.get(16..)?, IFLA_IFNAME)?;
            Some(String::from_utf8_lossy(name.strip_suffix(&[0]).unwrap_or(name)).into_owned())
        };
        Ok(all.map_err(TapError::of)?.iter().filter_map(name).collect())
    }

    /// Creates a veth pair: `name` in the caller's network namespace, which is returned, and `peer` in the namespace
    /// `place`, with the MAC address `mac`. The first has an MTU of `mtu` bytes; the peer has the usual 1,500.
    pub fn create_pair(
        name: &str,
        mtu: u32,
        (peer, mac): (&str, [u8; 6]),
        place: BorrowedFd<'_>,
    ) -> Result<Self, TapError> {
        // From the beginning: systemd-udevd gives one of its own to an interface that has an address by chance
        // (MACAddressPolicy=).
        let other = Message::nested(&link_of(0, 0))
            .with(IFLA_IFNAME, &text(peer))
            .with(IFLA_ADDRESS, &mac)
            .with(IFLA_NET_NS_FD, &place.as_raw_fd().to_ne_bytes())
            .into_value();
        let kind = Message::nested(&[])
            .with(IFLA_INFO_KIND, b"veth")
            .with(IFLA_INFO_DATA, &Message::nested(&[]).with(VETH_INFO_PEER, &other).into_value())
            .into_value();
        let message = Message::new(NEW_LINK, CREATE | EXCLUSIVE, &link_of(0, 0))
            .with(IFLA_IFNAME, &text(name))
            .with(IFLA_MTU, &mtu.to_ne_bytes())
            .with(IFLA_LINKINFO, &kind);
        let failed = |errno: Errno| match errno {
            Errno::PERM | Errno::ACCESS => TapError::NotAllowed,
            Errno::EXIST => TapError::Taken(peer.to_owned()),
            errno => TapError::NoPair(errno.into()),
        };
        Netlink::open().and_then(|netlink| netlink.ask(message)).map_err(failed)?;
        Self::find(name)
    }

    /// Returns the index of the interface in its namespace.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns whether the interface still exists: a veth end goes with its peer, whose namespace may go.
    pub fn is_there(&self) -> bool {
        // Unlike a request by rtnetlink, this waits for no lock that others hold for seconds.
        netdevice::index_to_name(self.netlink.as_fd(), self.index).is_ok_and(|name| name == self.name)
    }

    /// Returns whether the interface has a carrier. A veth end has one while its peer is up.
    ///
    /// # Errors
    /// The kernel does not say: the interface may be gone.
    pub fn has_carrier(&self) -> Result<bool, Errno> {
        // Unlike a request by rtnetlink, this waits for no lock that others hold for seconds.
        let flags = device::flags_of(self.netlink.as_fd(), &self.name)?;
        Ok(i32::from(flags) & libc::IFF_RUNNING != 0)
    }

    /// Returns how many frames were dropped that the interface was to send.
    ///
    /// # Errors
    /// The kernel does not say: the interface may be gone.
    pub fn dropped(&self) -> Result<u64, Errno> {
        // `struct if_stats_msg`.
        let fixed: Vec<u8> =
            [0, self.index, 1 << (IFLA_STATS_LINK_64 - 1)].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let said = self.netlink.get(Message::new(GET_STATISTICS, 0, &fixed))?;
        let counts = said.get(fixed.len()..).and_then(|its| attribute(its, IFLA_STATS_LINK_64));
        let count = counts.and_then(|counts| counts.chunks_exact(8).nth(TX_DROPPED)?.try_into().ok());
        count.map(u64::from_ne_bytes).ok_or(Errno::BADMSG)
    }

    /// Returns whether the other end of this veth pair is in the namespace `place`.
    ///
    /// # Errors
    /// The kernel does not say: the pair may be gone.
    pub fn other_end_is_in(&self, place: BorrowedFd<'_>) -> Result<bool, Errno> {
        let link = self.netlink.get(Message::new(GET_LINK, 0, &link_of(self.index, 0)))?;
        // Only a namespace that is another one has a number here.
        let its = link.get(16..).and_then(|its| attribute(its, IFLA_LINK_NETNSID)).and_then(number);
        let asked = Message::new(GET_NAMESPACE_ID, 0, &[0; 4]).with(NETNSA_FD, &place.as_raw_fd().to_ne_bytes());
        let answer = self.netlink.get(asked)?;
        let named = answer.get(4..).and_then(|answer| attribute(answer, NETNSA_NSID)).and_then(number);
        Ok(its.is_some() && its == named)
    }

    fn ask(&self, what: impl Fn() -> String, message: Message) -> Result<(), TapError> {
        self.netlink.ask(message).map_err(|errno| match errno {
            Errno::PERM | Errno::ACCESS => TapError::NotAllowed,
            errno => TapError::SetUp { name: self.name.clone(), what: what(), why: errno.into() },
        })
    }

    fn link(&self, flags: u32) -> Message {
        Message::new(NEW_LINK, 0, &link_of(self.index, flags))
    }

    /// Has the kernel announce the interface's addresses whenever it comes up: another interface may have had them a moment
    /// ago, and neighbours remember its station address for half a minute. The calling thread is in its namespace. Where
    /// `/proc/sys` cannot be written, neighbours find out by themselves.
    pub fn announce_addresses(&self) {
        for setting in [format!("ipv4/conf/{}/arp_notify", self.name), format!("ipv6/conf/{}/ndisc_notify", self.name)]
        {
            let _ = std::fs::write(format!("/proc/sys/net/{setting}"), "1");
        }
    }

    /// Brings the interface up.
    pub fn up(&self) -> Result<(), TapError> {
        self.ask(|| "its link up".to_owned(), self.link(IFF_UP))
    }

    /// Removes the interface and, if it is a veth end, its peer.
    pub fn delete(&self) -> Result<(), TapError> {
        self.ask(|| "an end".to_owned(), Message::new(DELETE_LINK, 0, &link_of(self.index, 0)))
    }

    /// Sets the MAC address.
    pub fn set_mac(&self, mac: [u8; 6]) -> Result<(), TapError> {
        let name = || format!("the station address {}", mac.map(|byte| format!("{byte:02x}")).join(":"));
        self.ask(name, self.link(0).with(IFLA_ADDRESS, &mac))
    }

    /// Sets the MTU, in bytes behind the header.
    pub fn set_mtu(&self, mtu: u32) -> Result<(), TapError> {
        self.ask(|| format!("frames of {mtu} bytes"), self.link(0).with(IFLA_MTU, &mtu.to_ne_bytes()))
    }

    /// Bounds what waits to be sent.
    pub fn bound(&self, Waiting { frames, segment }: Waiting) -> Result<(), TapError> {
        let bounds = self.link(0).with(IFLA_TXQLEN, &frames.to_ne_bytes());
        let bounds = bounds.with(IFLA_GSO_MAX_SIZE, &segment.to_ne_bytes());
        self.ask(|| format!("a queue of {frames} frames with segments of {segment} bytes"), bounds)
    }

    /// Adds an IP address, if the interface does not have it yet.
    pub fn add_address(&self, address: Address) -> Result<(), TapError> {
        let (family, bytes) = raw(address.ip);
        // `struct ifaddrmsg`. No duplicate address detection: no NIC is behind the interface yet.
        let mut fixed = vec![family, address.prefix, NO_DAD, 0];
        fixed.extend_from_slice(&self.index.to_ne_bytes());
        let message = Message::new(NEW_ADDRESS, CREATE | REPLACE, &fixed);
        let set = self.netlink.ask(message.with(IFA_LOCAL, &bytes).with(IFA_ADDRESS, &bytes));
        set.map_err(|errno| match errno {
            Errno::PERM => TapError::NotAllowed,
            Errno::ACCESS if address.ip.is_ipv6() => TapError::NoIpv6 { name: self.name.clone(), address },
            errno => self.not_set(format!("the address {address}"), errno),
        })
    }

    fn not_set(&self, what: String, errno: Errno) -> TapError {
        TapError::SetUp { name: self.name.clone(), what, why: errno.into() }
    }

    /// Adds a route by the interface, if it does not have it yet.
    pub fn add_route(&self, Route { to, via }: Route) -> Result<(), TapError> {
        let (family, network) = raw(to.ip);
        let scope = if via.is_some() { RT_SCOPE_UNIVERSE } else { RT_SCOPE_LINK };
        let mut fixed = vec![family, to.prefix, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST];
        fixed.extend_from_slice(&[0; 4]);
        let message = Message::new(NEW_ROUTE, CREATE, &fixed).with(RTA_OIF, &self.index.to_ne_bytes());
        let message = if to.prefix > 0 { message.with(RTA_DST, &network) } else { message };
        let message = via.into_iter().fold(message, |message, via| message.with(RTA_GATEWAY, &raw(via).1));
        match self.netlink.ask(message) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(Errno::PERM) => Err(TapError::NotAllowed),
            Err(errno) => {
                let by = via.map(|via| format!(" by way of {via}")).unwrap_or_default();
                Err(self.not_set(format!("the route to {to}{by}"), errno))
            }
        }
    }

    /// Returns the settings of the interface: all addresses, and the routes of the main table.
    pub fn read(&self) -> Result<Settings, TapError> {
        let list = |kind, fixed: &[u8]| {
            let listed = self.netlink.list(Message::new(kind, 0, fixed));
            listed.map_err(|errno| self.not_set("its settings read".to_owned(), errno))
        };
        let index = |bytes: Option<&[u8]>| bytes.and_then(number) == Some(self.index);
        let links = list(GET_LINK, &[0; 16])?;
        let link = links.iter().find(|link| index(link.get(4..8))).and_then(|link| link.get(16..)).unwrap_or_default();
        let addresses = list(GET_ADDRESS, &[0; 8])?;
        let addresses = addresses.iter().filter(|it| index(it.get(4..8))).filter_map(|it| {
            let its = it.get(8..)?;
            // Of IPv4, the other of the two is the far end of a point-to-point link.
            let address = attribute(its, IFA_LOCAL).or_else(|| attribute(its, IFA_ADDRESS))?;
            Some(Address { ip: ip(address)?, prefix: *it.get(1)? })
        });
        let routes = list(GET_ROUTE, &[0; 12])?;
        let routes = routes.iter().filter_map(|route| {
            let its = route.get(12..).filter(|its| index(attribute(its, RTA_OIF)))?;
            let none = if i32::from(*route.first()?) == i32::from(AddressFamily::INET.as_raw()) { 4 } else { 16 };
            let network = attribute(its, RTA_DST).map_or(vec![0; none], <[u8]>::to_vec);
            let to = Address { ip: ip(&network)?, prefix: *route.get(1)? };
            let is_main = route.get(4) == Some(&RT_TABLE_MAIN);
            is_main.then(|| Route { to, via: attribute(its, RTA_GATEWAY).and_then(ip) })
        });
        Ok(Settings {
            mac: attribute(link, IFLA_ADDRESS).and_then(|mac| mac.try_into().ok()),
            addresses: addresses.collect(),
            routes: routes.collect(),
            mtu: attribute(link, IFLA_MTU).and_then(number),
            ..Settings::default()
        })
    }

    /// Returns whether the interface is up.
    pub fn is_up(&self) -> Result<bool, TapError> {
        let links = self.netlink.list(Message::new(GET_LINK, 0, &[0; 16]));
        let links = links.map_err(|errno| self.not_set("its state read".to_owned(), errno))?;
        let its = links.iter().find(|link| link.get(4..8).and_then(number) == Some(self.index));
        Ok(its.and_then(|link| link.get(8..12)).and_then(number).is_some_and(|flags| flags & IFF_UP != 0))
    }

    /// Passes every frame received on the interface to this BPF classifier, whose result is the action. It replaces
    /// the one before.
    pub fn hand_to(&self, program: BorrowedFd<'_>) -> Result<(), TapError> {
        let what = || "a program for received frames".to_owned();
        let queue = Message::new(NEW_QUEUE, CREATE | EXCLUSIVE, &traffic_of(self.index, CLSACT_HANDLE, CLSACT, 0));
        match self.ask(what, queue.with(TCA_KIND, &text("clsact"))) {
            Ok(()) => {}
            Err(TapError::SetUp { why, .. }) if Errno::from_io_error(&why) == Some(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        let options = Message::nested(&[])
            .with(TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes())
            .with(TCA_BPF_NAME, &text("tasuki"))
            .with(TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes())
            .into_value();
        let filter = Message::new(NEW_FILTER, CREATE, &traffic_of(self.index, 1, INGRESS, ALL_FIRST));
        self.ask(what, filter.with(TCA_KIND, &text("bpf")).with(TCA_OPTIONS, &options))
    }
}
