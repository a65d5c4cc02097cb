//! TAP interfaces: network interfaces whose other end is a descriptor. Reading from it returns the frames that the
//! kernel sends; the kernel receives the frames written to it.
//!
//! | module        | contents                                                  |
//! |---------------|-----------------------------------------------------------|
//! | [`device`]    | turns a descriptor into a TAP device                      |
//! | [`interface`] | the interface: IP address, MAC address, up; by [`netlink`] |
//! | [`namespace`] | work in another network namespace                         |
//! | [`packet`]    | a packet socket for a whole interface                     |
//! | [`shortcut`]  | namespaces that reach each other through the kernel       |
//! | [`program`]   | BPF programs for the shortcut                             |
//!
//! A crate of its own: the daemon, the models' wire and the bench need TAPs, and it depends on none of them.

#![allow(missing_docs, reason = "the audience is ourselves: a comment says what a name cannot")]

pub mod device;
pub mod interface;
pub mod namespace;
pub mod netlink;
pub mod packet;
pub mod program;
pub mod shortcut;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::Errno;

use interface::Interface;
use namespace::Namespace;

/// Most bytes of an interface's name, with the zero after it.
pub const NAME_LEN: usize = 16;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The kernel allows no such interface name.
    #[error(
        "{0:?} cannot be the name of an interface; it must have 1 to 15 bytes, without blanks, slashes, colons and %, and not be \"all\" or \"default\""
    )]
    Name(String),
    /// This process may not create TAP devices.
    #[error("a TAP device needs CAP_NET_ADMIN; run as root, or in a user and network namespace of your own")]
    NotAllowed,
    /// The interface exists and is not a free TAP.
    #[error(
        "the interface {0} exists and is not a free TAP; choose another name, or delete it in its namespace if nobody needs it (ip -n NAMESPACE link delete {0})"
    )]
    Taken(String),
    /// The device was not made for several queues.
    #[error("the interface {0} was made with one queue, and gets no other; make it anew with several")]
    OneQueue(String),
    /// The kernel gives the interface no more queues.
    #[error(
        "the kernel gives the interface {0} no more queues: programs in its namespace have opened others; end these"
    )]
    Full(String),
    /// The device's interface does not exist any more.
    #[error("it is gone, for somebody deleted it, or its namespace ended; remove its nodes and add them again")]
    Gone,
    /// The kernel has no TAP driver.
    #[error("there is no /dev/net/tun; load its module: modprobe tun")]
    Missing,
    /// The kernel refused for another reason.
    #[error("/dev/net/tun gives us no TAP device: {0}")]
    Refused(io::Error),
    /// The network namespace does not exist.
    #[error("there is no network namespace at {}; make it (ip netns add NAME), or name another", .0.display())]
    NoNamespace(PathBuf),
    /// The path is not a network namespace, or may not be used.
    #[error("{} cannot be used as a network namespace ({why}); name another, or run as root", path.display())]
    Namespace {
        path: PathBuf,
        /// The kernel's error.
        why: io::Error,
    },
    /// Its packets have no Ethernet header, or come back at once.
    #[error("the interface {0} has no Ethernet frames, as it is the loopback or a tunnel of IP; name another")]
    NotEthernet(String),
    /// The interface does not exist.
    #[error("there is no interface {0}; make it, or correct the name")]
    NoInterface(String),
    /// The kernel gives no packet socket.
    #[error("the kernel gives no packet socket for the interface ({0}); that needs CAP_NET_RAW and Linux 4.20")]
    NoPacketSocket(io::Error),
    /// The kernel cannot create a veth pair.
    #[error("the kernel makes no pair of interfaces ({0}); load its module: modprobe veth")]
    NoPair(io::Error),
    /// The kernel does not accept the BPF program or its tables.
    #[error("the kernel takes no BPF program for frames ({0}); that needs CAP_BPF and CAP_NET_ADMIN, and Linux 5.12")]
    NoProgram(io::Error),
    /// The VNI has too many namespaces.
    #[error("a VNI has 2048 namespaces, and no more fit; remove one")]
    Crowded,
    /// The TAP does not stand beside a veth end that one of our daemons made.
    #[error("the TAP {0} is not a veth end of a namespace on this VNI")]
    NoVethEnd(String),
    /// The kernel has IPv6 switched off for the interface.
    #[error(
        "the interface {name} cannot have the address {address}, for IPv6 is switched off in its namespace; switch it on (sysctl net.ipv6.conf.default.disable_ipv6=0), or name addresses of IPv4 alone"
    )]
    NoIpv6 {
        /// Name of the interface.
        name: String,
        address: Address,
    },
    /// The interface exists, but a setting of it failed.
    #[error("the interface {name} cannot have {what}: {why}")]
    SetUp {
        /// Name of the interface.
        name: String,
        /// The setting.
        what: String,
        /// The kernel's error.
        why: io::Error,
    },
}

impl TapError {
    fn of(errno: Errno) -> Self {
        match errno {
            Errno::PERM | Errno::ACCESS => TapError::NotAllowed,
            Errno::NOENT | Errno::NODEV | Errno::NXIO => TapError::Missing,
            Errno::BADFD => TapError::Gone,
            errno => TapError::Refused(errno.into()),
        }
    }
}

/// Returns whether the kernel allows `name` for an interface.
pub fn is_name(name: &str) -> bool {
    // With a % it would be a pattern, from which the kernel makes another name.
    let is_odd = |byte: u8| b"/:%\0\x0b".contains(&byte) || byte.is_ascii_whitespace();
    // The last two are folders beside those of interfaces, in /proc/sys/net.
    let is_taken = [".", "..", "all", "default"].contains(&name);
    (1..NAME_LEN).contains(&name.len()) && !is_taken && !name.bytes().any(is_odd)
}

/// An IP address with the prefix length of its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    pub ip: IpAddr,
    /// Prefix length in bits.
    pub prefix: u8,
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(ip, prefix)| {
            let (ip, prefix): (IpAddr, u8) = (ip.parse().ok()?, prefix.parse().ok()?);
            let most = if ip.is_ipv4() { 32 } else { 128 };
            (prefix <= most).then_some(Address { ip, prefix })
        });
        parsed.ok_or_else(|| {
            format!("{text:?} is not an interface's address; write it with its network's length: 192.0.2.2/24")
        })
    }
}

/// Returns an address as a number, and its bits.
fn bits(ip: IpAddr) -> (u128, u8) {
    match ip {
        IpAddr::V4(ip) => (u128::from(ip.to_bits()), 32),
        IpAddr::V6(ip) => (ip.to_bits(), 128),
    }
}

impl Address {
    /// Returns whether no bit of it is set beyond the prefix: it names a network.
    pub fn is_network(&self) -> bool {
        let (bits, len) = bits(self.ip);
        bits.trailing_zeros() >= u32::from(len - self.prefix) || bits == 0
    }

    /// Returns whether an address is one of its network.
    pub fn is_in_network(&self, ip: IpAddr) -> bool {
        let ((ours, len), (its, its_len)) = (bits(self.ip), bits(ip));
        len == its_len && (ours ^ its).checked_shr(u32::from(len - self.prefix)).unwrap_or(0) == 0
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

/// A route by an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The network that it leads to: an address without bits beyond the prefix.
    pub to: Address,
    /// The station that passes packets on; none if the network is on the link itself.
    pub via: Option<IpAddr>,
}

/// The settings of an interface, from when it is made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Station address; by default the kernel chooses one.
    pub mac: Option<[u8; 6]>,
    pub addresses: Vec<Address>,
    pub routes: Vec<Route>,
    /// MTU in bytes; by default 1,500.
    pub mtu: Option<u32>,
    /// Queues of the TAP device.
    pub queues: device::Queues,
}

impl Settings {
    /// Returns the settings with no more than this address.
    pub fn of(address: Option<Address>) -> Self {
        Settings { addresses: address.into_iter().collect(), ..Settings::default() }
    }

    /// Sets up an interface, and brings it up.
    pub fn apply(&self, interface: &Interface) -> Result<(), TapError> {
        self.mac.map_or(Ok(()), |mac| interface.set_mac(mac))?;
        self.mtu.map_or(Ok(()), |mtu| interface.set_mtu(mtu))?;
        self.addresses.iter().try_for_each(|address| interface.add_address(*address))?;
        interface.announce_addresses();
        interface.up()?;
        // An interface that is down has no routes.
        self.routes.iter().try_for_each(|route| interface.add_route(*route))
    }
}

/// Gives the interface of a TAP device another station address. It may have another name by now, or be in another namespace.
///
/// # Errors
/// It is gone, or the kernel refuses.
pub fn set_mac(device: &OwnedFd, mac: [u8; 6]) -> Result<(), TapError> {
    let (name, _) = device::identity(device.as_fd()).map_err(TapError::of)?;
    let its = namespace::Unnamed::of(device::namespace_of(device.as_fd()).map_err(TapError::of)?);
    its.within(|| Interface::find(&name)?.set_mac(mac))
}

/// What waits in each queue of an interface to be sent; the kernel drops what comes then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Number of frames.
    pub frames: u32,
    /// Bytes of an uncut segment, at most; the kernel cuts a longer one before it waits.
    pub segment: u32,
}

/// As the kernel makes a TAP device.
impl Default for Waiting {
    fn default() -> Self {
        Waiting { frames: 1000, segment: 64 << 10 }
    }
}

/// Bounds what waits for the reader of a TAP device. Its interface may have another name by now, or be in another namespace.
///
/// # Errors
/// It is gone, or the kernel refuses.
pub fn bound(device: &OwnedFd, waiting: Waiting) -> Result<(), TapError> {
    let (name, _) = device::identity(device.as_fd()).map_err(TapError::of)?;
    let its = namespace::Unnamed::of(device::namespace_of(device.as_fd()).map_err(TapError::of)?);
    its.within(|| Interface::find(&name)?.bound(waiting))
}

/// A TAP device, whose interface is up. The interface is removed when all descriptors of the device are closed.
#[derive(Debug)]
pub struct Tap {
    /// The descriptor from which frames are read, and to which they are written.
    pub device: OwnedFd,
}

impl Tap {
    /// Creates the interface in `place`, sets it up and brings it up.
    pub fn create(
        place: &Namespace,
        name: &str,
        settings: &Settings,
        before: device::Before,
    ) -> Result<Self, TapError> {
        place.within(|| {
            let device = device::open(name, before, settings.queues)?;
            let interface = Interface::find(name)?;
            settings.apply(&interface)?;
            Ok(Tap { device })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_kernel_takes() {
        assert!(["tap0", "a", "tasuki-wire", "fifteen-bytes-x"].iter().all(|name| is_name(name)));
        assert!(
            !["", ".", "..", "sixteen-bytes-xx", "a b", "a/b", "a:b", "a\u{b}b", "eth%d", "all", "default"]
                .iter()
                .any(|name| is_name(name))
        );
    }

    #[test]
    fn an_address_has_the_length_of_its_network() {
        let address: Address = "192.0.2.2/24".parse().expect("an address");
        assert_eq!((address.prefix, address.to_string()), (24, "192.0.2.2/24".to_owned()));
        assert_eq!("2001:db8::2/64".parse::<Address>().expect("an address").prefix, 64);
        let is_network = |text: &str| text.parse::<Address>().expect("an address").is_network();
        assert!(
            ["0.0.0.0/0", "::/0", "10.0.0.0/8", "10.2.0.0/15", "192.0.2.1/32", "fd00::/8"].into_iter().all(is_network)
        );
        assert!(!["0.0.0.1/0", "10.1.0.0/15", "fd00::1/64"].into_iter().any(is_network));
        for (network, inside, outside) in [
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.1/32", "192.0.2.1", "192.0.2.0"),
            ("0.0.0.0/0", "255.255.255.255", "::"),
            ("fd00:1::/64", "fd00:1::ffff", "fd00:1:0:1::"),
            ("::/0", "ffff::", "0.0.0.0"),
        ] {
            let network: Address = network.parse().expect("an address");
            let has = [inside, outside].map(|ip| network.is_in_network(ip.parse().expect("an address")));
            assert_eq!(has, [true, false], "{network}");
        }
        for nonsense in ["192.0.2.2", "192.0.2/24", "192.0.2.2/33", "2001:db8::/129", "/24", "192.0.2.2/-1", ""] {
            let said = nonsense.parse::<Address>().expect_err(nonsense);
            assert!(said.contains("192.0.2.2/24"), "{said}");
        }
    }
}
