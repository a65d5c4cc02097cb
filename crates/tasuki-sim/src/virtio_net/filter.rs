//! The receive filter (§5.1.6.5.1, §5.1.6.5.2).

/// Most addresses in a table: with more, the filter accepts all addresses of the kind.
const TABLE_MAX: usize = 64;

const BROADCAST: u64 = 0xffff_ffff_ffff;
const GROUP: u64 = 1 << 40;

/// Switches of the filter, in the order of the commands that set them.
const PROMISC: u8 = 0;
const ALLMULTI: u8 = 1;
const ALLUNI: u8 = 2;
const NOMULTI: u8 = 3;
const NOUNI: u8 = 4;
const NOBCAST: u8 = 5;
/// First switch that requires CTRL_RX_EXTRA, and the number of switches.
pub const EXTRA: u8 = ALLUNI;
pub const SWITCHES: u8 = NOBCAST + 1;

#[derive(Debug)]
pub struct Filter {
    own: u64,
    /// One bit per switch.
    switches: u8,
    unicast: Table,
    multicast: Table,
}

#[derive(Debug)]
enum Table {
    These(Vec<u64>),
    /// The driver gave too many addresses.
    All,
}

impl Table {
    fn of(addresses: &[[u8; 6]]) -> Self {
        match addresses.len() {
            0..=TABLE_MAX => Table::These(addresses.iter().map(|bytes| address(bytes)).collect()),
            _ => Table::All,
        }
    }

    fn has(&self, address: u64) -> bool {
        match self {
            Table::These(addresses) => addresses.contains(&address),
            Table::All => true,
        }
    }
}

/// Returns an Ethernet address as a number.
#[inline]
fn address(bytes: &[u8]) -> u64 {
    bytes[..6].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Filter {
    pub fn new(mac: [u8; 6]) -> Self {
        let none = || Table::These(Vec::new());
        Filter { own: address(&mac), switches: 0, unicast: none(), multicast: none() }
    }

    pub fn switch(&mut self, which: u8, on: bool) {
        self.switches = self.switches & !(1 << which) | u8::from(on) << which;
    }

    /// Sets both tables from a command's data; returns `None` if they are malformed.
    pub fn set_tables(&mut self, bytes: &[u8]) -> Option<()> {
        let (unicast, rest) = table(bytes)?;
        let (multicast, rest) = table(rest)?;
        let is_group = |bytes: &[u8; 6]| bytes[0] & 1 == 1;
        if !rest.is_empty() || unicast.iter().any(is_group) || !multicast.iter().all(is_group) {
            return None;
        }
        (self.unicast, self.multicast) = (Table::of(unicast), Table::of(multicast));
        Some(())
    }

    #[inline]
    pub fn passes(&self, frame: &[u8]) -> bool {
        let on = |which: u8| self.switches >> which & 1 != 0;
        let to = address(frame);
        on(PROMISC)
            || match to {
                BROADCAST => !on(NOBCAST),
                to if to & GROUP != 0 => !on(NOMULTI) && (on(ALLMULTI) || self.multicast.has(to)),
                to => !on(NOUNI) && (to == self.own || on(ALLUNI) || self.unicast.has(to)),
            }
    }
}

/// Splits a `struct virtio_net_ctrl_mac` off; returns its addresses and the bytes after it.
fn table(bytes: &[u8]) -> Option<(&[[u8; 6]], &[u8])> {
    let (count, rest) = bytes.split_first_chunk()?;
    let len = usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(6)?;
    let (addresses, rest) = rest.split_at_checked(len)?;
    Some((addresses.as_chunks().0, rest))
}
