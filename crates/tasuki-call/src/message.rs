//! The messages of a client's two rings, and their layout in a ring's message.
//!
//! | kind         | ring    | code   | word 0  | words 1 to 6                          |
//! |--------------|---------|--------|---------|---------------------------------------|
//! | RequestBytes | request | method | call id | up to 48 bytes                        |
//! | RequestSlot  | request | method | call id | slot and generation · length in bytes |
//! | Return       | request | 0      | 0       | slot and generation                   |
//! | ReplyBytes   | result  | status | call id | up to 48 bytes                        |
//! | ReplySlot    | result  | status | call id | slot and generation · length in bytes |
//!
//! The tag is `kind: u8`, `length of the inline bytes: u8`, `code: u16`, from the lowest bits up. The reply gives a
//! request's slot back to the client without naming it. `Return` gives a reply's slot back to the server.

use std::num::NonZeroU32;

use tasuki_shm::ring::{MESSAGE_WORDS, Message};
use tasuki_shm::slots::SlotId;
use zerocopy::IntoBytes;

/// Maximum number of bytes inside a ring entry: a line less its stamp and the call id.
pub const INLINE_MAX: usize = 48;

const _: () = assert!(INLINE_MAX == (MESSAGE_WORDS - 1) * 8);

/// Words of a message that carry bytes.
const INLINE_WORDS: usize = MESSAGE_WORDS - 1;

/// Up to [`INLINE_MAX`] bytes, by value.
///
/// Stored as the words that the ring carries: copying them in other widths makes the CPU wait for its own stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inline {
    len: u8,
    words: [u64; INLINE_WORDS],
}

impl Inline {
    /// Zero bytes.
    pub const EMPTY: Inline = Inline { len: 0, words: [0; INLINE_WORDS] };

    /// Copies `bytes`, if they fit.
    #[inline(always)]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let len = u8::try_from(bytes.len()).ok().filter(|len| usize::from(*len) <= INLINE_MAX)?;
        let mut inline = Inline { len, ..Inline::EMPTY };
        let (whole, rest) = bytes.as_chunks::<8>();
        for (word, bytes) in inline.words.iter_mut().zip(whole) {
            *word = u64::from_ne_bytes(*bytes);
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            inline.words[whole.len()] = u64::from_ne_bytes(last);
        }
        Some(inline)
    }

    /// Returns the bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.words.as_bytes()[..self.len.into()]
    }

    #[inline(always)]
    fn from_message(len: u8, message: &Message) -> Self {
        Inline { len, words: std::array::from_fn(|i| message.words[i + 1]) }
    }
}

/// The contents of a request or a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cargo {
    Bytes(Inline),
    Slot { id: SlotId, len: u64 },
}

/// A message of the request ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FromClient {
    Request { call: u64, method: u16, cargo: Cargo },
    Return { id: SlotId },
}

/// A message of the result ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FromServer {
    pub call: u64,
    pub status: u16,
    pub cargo: Cargo,
}

/// The peer sent a message that does not exist in this ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the peer broke the call protocol: a message of kind {kind} and inline length {len} does not belong into this ring"
)]
pub struct NoSuchMessage {
    /// Kind that the message claims.
    pub kind: u8,
    /// Inline length in bytes that the message claims.
    pub len: u8,
}

const REQUEST_BYTES: u8 = 1;
const REQUEST_SLOT: u8 = 2;
const RETURN: u8 = 3;
const REPLY_BYTES: u8 = 4;
const REPLY_SLOT: u8 = 5;

#[inline(always)]
fn encode(kinds: [u8; 2], code: u16, call: u64, cargo: Cargo) -> Message {
    let mut words = [0; MESSAGE_WORDS];
    words[0] = call;
    let (kind, len) = match cargo {
        Cargo::Bytes(inline) => {
            words[1..].copy_from_slice(&inline.words);
            (kinds[0], inline.len)
        }
        Cargo::Slot { id, len } => {
            words[1] = id.to_word();
            words[2] = len;
            (kinds[1], 0)
        }
    };
    Message { tag: tag(kind, len, code), words }
}

#[inline(always)]
fn tag(kind: u8, len: u8, code: u16) -> NonZeroU32 {
    NonZeroU32::new(u32::from(kind) | u32::from(len) << 8 | u32::from(code) << 16).expect("no kind is 0")
}

/// Returns the fields of a tag: kind, inline length, code.
#[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
#[inline(always)]
fn fields(message: &Message) -> (u8, u8, u16) {
    let tag = message.tag.get();
    (tag as u8, (tag >> 8) as u8, (tag >> 16) as u16)
}

#[inline(always)]
fn inline_of(message: &Message, len: u8) -> Option<Cargo> {
    (usize::from(len) <= INLINE_MAX).then(|| Cargo::Bytes(Inline::from_message(len, message)))
}

#[inline(always)]
fn slot_of(message: &Message) -> Cargo {
    Cargo::Slot { id: SlotId::from_word(message.words[1]), len: message.words[2] }
}

impl FromClient {
    #[inline(always)]
    pub fn encode(&self) -> Message {
        match *self {
            FromClient::Request { call, method, cargo } => encode([REQUEST_BYTES, REQUEST_SLOT], method, call, cargo),
            FromClient::Return { id } => encode([RETURN, RETURN], 0, 0, Cargo::Slot { id, len: 0 }),
        }
    }

    #[inline(always)]
    pub fn decode(message: &Message) -> Result<Self, NoSuchMessage> {
        let (kind, len, method) = fields(message);
        let call = message.words[0];
        let cargo = match kind {
            REQUEST_BYTES => inline_of(message, len),
            REQUEST_SLOT => Some(slot_of(message)),
            RETURN => return Ok(FromClient::Return { id: SlotId::from_word(message.words[1]) }),
            _ => None,
        };
        cargo.map(|cargo| FromClient::Request { call, method, cargo }).ok_or(NoSuchMessage { kind, len })
    }
}

impl FromServer {
    #[inline(always)]
    pub fn encode(&self) -> Message {
        encode([REPLY_BYTES, REPLY_SLOT], self.status, self.call, self.cargo)
    }

    #[inline(always)]
    pub fn decode(message: &Message) -> Result<Self, NoSuchMessage> {
        let (kind, len, status) = fields(message);
        let cargo = match kind {
            REPLY_BYTES => inline_of(message, len),
            REPLY_SLOT => Some(slot_of(message)),
            _ => None,
        };
        cargo.map(|cargo| FromServer { call: message.words[0], status, cargo }).ok_or(NoSuchMessage { kind, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cargo() -> impl Strategy<Value = Cargo> {
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..=INLINE_MAX)
                .prop_map(|bytes| Cargo::Bytes(Inline::new(&bytes).unwrap())),
            (any::<u64>(), any::<u64>()).prop_map(|(id, len)| Cargo::Slot { id: SlotId::from_word(id), len }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_what_is_decoded(call in any::<u64>(), code in any::<u16>(), cargo in cargo()) {
            let request = FromClient::Request { call, method: code, cargo };
            prop_assert_eq!(FromClient::decode(&request.encode()), Ok(request));
            let reply = FromServer { call, status: code, cargo };
            prop_assert_eq!(FromServer::decode(&reply.encode()), Ok(reply));
            prop_assert!(FromServer::decode(&request.encode()).is_err(), "a request is no reply");
            prop_assert!(FromClient::decode(&reply.encode()).is_err(), "a reply is no request");
        }

        #[test]
        fn any_message_of_a_peer_is_decoded_or_refused(tag in 1_u32.., words in any::<[u64; MESSAGE_WORDS]>()) {
            let message = Message { tag: NonZeroU32::new(tag).unwrap(), words };
            let _ = FromClient::decode(&message);
            let _ = FromServer::decode(&message);
        }
    }

    #[test]
    fn more_than_fits_is_refused() {
        assert_eq!(Inline::new(&[0; INLINE_MAX + 1]), None);
        assert_eq!(Inline::new(&[0; 300]), None);
    }
}
