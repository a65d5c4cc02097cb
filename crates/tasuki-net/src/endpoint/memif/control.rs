//! The server's side of the control channel, as a table: takes a message and its descriptors, and returns the action
//! and the answer.
//!
//! | state      | message                   | result                                           |
//! |------------|---------------------------|--------------------------------------------------|
//! | greeted    | INIT                      | known, if version, mode, id and secret are right |
//! | known      | ADD_REGION with memory    | known, if its number is the next and its size is small enough |
//! | known      | ADD_RING with an eventfd  | known, if it lies within a region that was added |
//! | known      | CONNECT                   | connected, if there is one ring each way         |
//! | any        | DISCONNECT                | gone                                             |
//!
//! The server acknowledges each message but the last, once the caller has carried it out. It refuses everything else,
//! and the refusal is its last message.

use zerocopy::FromBytes;

use super::refusal::{Refusal, Way};
use super::wire::{
    AddRegion, AddRing, Connect, DESCRIPTOR_LEN, Disconnect, Hello, Init, LOG2_RING_MAX, Message, RING_HEADER_LEN,
    TO_SERVER, VERSION, kind, text,
};

/// Maximum number of regions of a client.
pub const REGIONS_MAX: usize = 16;

/// Maximum total size of a client's regions, in bytes. The kernel charges to us the pages that the client makes us
/// touch first.
pub const MEMORY_MAX: u64 = 1 << 30;

/// Length of a secret in bytes.
pub const SECRET_LEN: usize = 24;

/// What a client must know to connect.
#[derive(Clone)]
pub struct Terms {
    /// Interface id that a client asks for.
    pub id: u32,
    /// Secret that a client must send; all zeroes if there is none.
    pub secret: [u8; SECRET_LEN],
    /// Name of the port.
    pub name: String,
}

/// Leaves out the secret, to keep it out of logs.
impl std::fmt::Debug for Terms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Terms { id, name, .. } = self;
        f.debug_struct("Terms").field("id", id).field("name", name).finish_non_exhaustive()
    }
}

/// The secret has more bytes than a client can send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the secret of a memif has {0} bytes; make it {most} at most, which is what DPDK's clients send", most = SECRET_LEN - 1)]
pub struct SecretTooLong(usize);

impl Terms {
    /// Makes the terms of a port with this secret; an empty string stands for none.
    pub fn new(id: u32, secret: &str, name: &str) -> Result<Self, SecretTooLong> {
        if secret.len() >= SECRET_LEN {
            return Err(SecretTooLong(secret.len()));
        }
        Ok(Terms { id, secret: text(secret), name: name.to_owned() })
    }
}

/// Place of a ring, checked against the sizes that its client announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// Direction of the ring.
    pub way: Way,
    /// Number of its region.
    pub region: u16,
    /// Offset of its first byte in the region.
    pub offset: u32,
    /// Base-2 logarithm of its number of descriptors.
    pub log2_size: u8,
}

/// Action to carry out before the answer is sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Deed<D> {
    /// No action.
    Nothing,
    /// Map the next region.
    Map {
        /// Number of the region.
        index: u16,
        /// Size of the region in bytes.
        size: u64,
        /// Memory file of the region.
        memory: D,
    },
    /// Remember a ring and its eventfd.
    Ring(RingPlace, D),
    /// Serve the rings from now on.
    Attach,
    /// Forget the client.
    Forget,
}

/// A part of a connected client, from a predecessor.
#[derive(Debug)]
pub enum Handed<D> {
    /// The next region: its size in bytes and its memory file.
    Region(u64, D),
    /// A ring in the regions before it, and its eventfd.
    Ring(RingPlace, D),
}

/// Stage of a client's handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Greeted,
    Known,
    Connected,
    Gone,
}

/// State of the control channel to one client.
#[derive(Debug)]
pub struct Control {
    stage: Stage,
    /// Sizes of its regions in bytes, as announced.
    sizes: [u64; REGIONS_MAX],
    regions: usize,
    /// Whether it has added the ring to us, and the one from us.
    has: [bool; 2],
    client: [u8; 32],
}

impl Default for Control {
    fn default() -> Self {
        Control { stage: Stage::Greeted, sizes: [0; REGIONS_MAX], regions: 0, has: [false; 2], client: [0; 32] }
    }
}

/// Returns the first message to a client.
pub fn hello(terms: &Terms) -> Message {
    let hello = Hello {
        name: text(&terms.name),
        min_version: VERSION.into(),
        max_version: VERSION.into(),
        max_region: u16::try_from(REGIONS_MAX - 1).expect("a few").into(),
        // The highest ring numbers: one ring each way.
        max_m2s_ring: 0.into(),
        max_s2m_ring: 0.into(),
        max_log2_ring_size: LOG2_RING_MAX,
    };
    Message::with(kind::HELLO, &hello)
}

/// Returns the last message to a client.
pub fn farewell(refusal: Refusal) -> Message {
    let why = text(&refusal.to_string());
    Message::with(kind::DISCONNECT, &Disconnect { code: 1.into(), why })
}

impl Control {
    /// Takes a message and its descriptors. Returns the action, and the answer to send after it.
    pub fn hear<D>(
        &mut self,
        terms: &Terms,
        message: &[u8],
        came: impl IntoIterator<Item = D>,
    ) -> Result<(Deed<D>, Option<Message>), Refusal> {
        let mut came = came.into_iter();
        let (descriptor, more) = (came.next(), came.next());
        let Ok(message) = Message::read_from_bytes(message) else { return Err(Refusal::Length(message.len())) };
        let kind = message.kind.get();
        let takes_one = matches!(kind, kind::ADD_REGION | kind::ADD_RING);
        if more.is_some() || (descriptor.is_some() && !takes_one) {
            return Err(Refusal::Descriptors);
        }
        let ack = Some(Message::bare(kind::ACK));
        match (self.stage, kind) {
            (_, kind::DISCONNECT) => {
                self.stage = Stage::Gone;
                Ok((Deed::Forget, None))
            }
            (Stage::Greeted, kind::INIT) => {
                self.init(terms, &message.body())?;
                Ok((Deed::Nothing, ack))
            }
            (Stage::Known, kind::ADD_REGION) => Ok((self.add_region(&message.body(), descriptor)?, ack)),
            (Stage::Known, kind::ADD_RING) => Ok((self.add_ring(&message.body(), descriptor)?, ack)),
            (Stage::Known, kind::CONNECT) => {
                let connected = Message::with(kind::CONNECTED, &Connect { name: text(&terms.name) });
                Ok((self.connect()?, Some(connected)))
            }
            _ => Err(Refusal::OutOfTurn(kind)),
        }
    }

    fn init(&mut self, terms: &Terms, init: &Init) -> Result<(), Refusal> {
        if init.version.get() != VERSION {
            return Err(Refusal::Version(init.version.get()));
        }
        if init.id.get() != terms.id {
            return Err(Refusal::Id { asked: init.id.get(), here: terms.id });
        }
        // Constant time: it must not depend on the number of right bytes.
        let wrong = init.secret.iter().zip(&terms.secret).fold(0, |wrong, (said, ours)| wrong | (said ^ ours));
        if wrong != 0 {
            return Err(Refusal::Secret);
        }
        if init.mode != 0 {
            return Err(Refusal::Mode(init.mode));
        }
        self.client = init.name;
        self.stage = Stage::Known;
        Ok(())
    }

    fn add_region<D>(&mut self, add: &AddRegion, memory: Option<D>) -> Result<Deed<D>, Refusal> {
        let (index, size) = (add.index.get(), add.size.get());
        if usize::from(index) != self.regions || self.regions == REGIONS_MAX {
            return Err(Refusal::RegionIndex(index));
        }
        let Some(memory) = memory else { return Err(Refusal::RegionMissing(index)) };
        let before: u64 = self.sizes[..self.regions].iter().sum();
        if before.checked_add(size).is_none_or(|all| all > MEMORY_MAX) {
            return Err(Refusal::RegionSize);
        }
        if size == 0 {
            return Err(Refusal::RegionShort(index));
        }
        self.sizes[self.regions] = size;
        self.regions += 1;
        Ok(Deed::Map { index, size, memory })
    }

    fn add_ring<D>(&mut self, add: &AddRing, bell: Option<D>) -> Result<Deed<D>, Refusal> {
        let way = if add.flags.get() & TO_SERVER == 0 { Way::ToClient } else { Way::ToServer };
        let has = &mut self.has[usize::from(way == Way::ToClient)];
        if add.index.get() != 0 {
            return Err(Refusal::RingIndex(way, add.index.get()));
        }
        if *has {
            return Err(Refusal::RingTwice(way));
        }
        if add.private_header_len.get() != 0 {
            return Err(Refusal::RingHeaders(way));
        }
        if add.log2_size > LOG2_RING_MAX {
            return Err(Refusal::RingSize(way));
        }
        let (region, offset) = (add.region.get(), add.offset.get());
        let Some(size) = self.sizes[..self.regions].get(usize::from(region)) else {
            return Err(Refusal::RingRegion(way, region));
        };
        if !offset.is_multiple_of(16) {
            return Err(Refusal::RingCrooked(way));
        }
        let len = (RING_HEADER_LEN + (DESCRIPTOR_LEN << add.log2_size)) as u64;
        if u64::from(offset) + len > *size {
            return Err(Refusal::RingOutside(way));
        }
        let Some(bell) = bell else { return Err(Refusal::RingSilent(way)) };
        *has = true;
        Ok(Deed::Ring(RingPlace { way, region, offset, log2_size: add.log2_size }, bell))
    }

    fn connect<D>(&mut self) -> Result<Deed<D>, Refusal> {
        for (has, way) in self.has.into_iter().zip([Way::ToServer, Way::ToClient]) {
            if !has {
                return Err(Refusal::RingMissing(way));
            }
        }
        self.stage = Stage::Connected;
        Ok(Deed::Attach)
    }

    /// Repeats the handshake with the parts of a client from a predecessor, under the same rules. `name` is the
    /// client's own name. Returns the actions in order.
    pub fn again<D>(name: &str, handed: impl IntoIterator<Item = Handed<D>>) -> (Self, Vec<Result<Deed<D>, Refusal>>) {
        let mut control = Control { stage: Stage::Known, client: text(name), ..Control::default() };
        let mut deeds: Vec<_> = (0..).zip(handed).map(|(i, it)| control.take_over(i, it)).collect();
        deeds.push(control.connect());
        (control, deeds)
    }

    fn take_over<D>(&mut self, i: u16, handed: Handed<D>) -> Result<Deed<D>, Refusal> {
        match handed {
            Handed::Region(size, memory) => {
                self.add_region(&AddRegion { index: i.into(), size: size.into() }, Some(memory))
            }
            Handed::Ring(RingPlace { way, region, offset, log2_size }, bell) => {
                let flags = if way == Way::ToServer { TO_SERVER } else { 0 };
                let (region, offset) = (region.into(), offset.into());
                let add = AddRing {
                    flags: flags.into(),
                    index: 0.into(),
                    region,
                    offset,
                    log2_size,
                    private_header_len: 0.into(),
                };
                self.add_ring(&add, Some(bell))
            }
        }
    }

    /// Returns whether the handshake is done.
    pub fn is_connected(&self) -> bool {
        self.stage == Stage::Connected
    }

    /// Returns the client's own name, as far as it is text.
    pub fn client(&self) -> String {
        let end = self.client.iter().position(|byte| *byte == 0).unwrap_or(self.client.len());
        String::from_utf8_lossy(&self.client[..end]).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_what_clients_can_say_and_is_not_shown() {
        let terms = Terms::new(3, "open sesame", "cave").unwrap();
        assert_eq!(&terms.secret[..12], b"open sesame\0");
        assert!(!format!("{terms:?}").contains("sesame"));
        assert_eq!(Terms::new(3, &"x".repeat(24), "cave").unwrap_err(), SecretTooLong(24));
        assert!(Terms::new(3, &"x".repeat(23), "cave").is_ok());
    }
}
