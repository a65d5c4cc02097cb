//! The envelope of a driver state: fields around a driver's bytes by which a reader knows that they are the bytes
//! that were written.
//!
//! | bytes   | contents                                                                              |
//! |---------|---------------------------------------------------------------------------------------|
//! | 0..4    | mark: four ASCII letters                                                              |
//! | 4..8    | CRC-32C of all that follows, the envelope's own fields included                       |
//! | 8..12   | version of the envelope, 1                                                            |
//! | 12..16  | kind of the driver state: vendor and device of the card that the driver is named for  |
//! | 16..20  | version of the driver's layout                                                        |
//! | 20..24  | epoch of the lease in which it was written                                            |
//! | 24..28  | length of the driver's bytes                                                          |
//! | 28..32  | zero                                                                                  |
//! | 32..    | the driver's bytes                                                                    |
//!
//! All fields are in the machine's byte order; a driver state never leaves the machine. The mark is written last: an
//! envelope whose writer died has no mark.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the envelope.
pub const VERSION: u32 = 1;
/// Length of the envelope before the driver's bytes, in bytes.
pub const HEAD: usize = size_of::<Head>();
/// Maximum length of a driver's bytes: no driver writes as many, so a longer length is invalid.
pub const LEN_MAX: usize = 1 << 20;

const MAGIC: u32 = u32::from_ne_bytes(*b"SASH");

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Head {
    magic: u32,
    checksum: u32,
    envelope: u32,
    kind: u32,
    version: u32,
    epoch: u32,
    len: u32,
    zero: u32,
}

const _: () = assert!(HEAD == 32);
/// Offset in bytes from which the checksum covers everything.
const COVERED: usize = 8;

/// A driver state in its envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverState<'b> {
    /// Kind of the driver state: its driver.
    pub kind: u32,
    /// Version of the driver's layout.
    pub version: u32,
    /// Epoch in which it was written.
    pub epoch: u32,
    /// The driver's bytes.
    pub bytes: &'b [u8],
}

/// A driver state could not be written for lack of room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a driver state of {len} bytes needs {need} with its envelope, and there are {have} (a driver's state has at most {LEN_MAX}); make the NIC's driver state memory larger"
)]
pub struct NoRoom {
    /// Length of the driver's bytes.
    pub len: usize,
    /// Length with the envelope, in bytes.
    pub need: usize,
    /// Bytes available.
    pub have: usize,
}

/// Reason why a driver state must not be used. The giver still has the state that it wrote, and can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotADriverState {
    /// No driver state was written, or not to its end.
    #[error(
        "no driver state stands there ({have} bytes, mark {mark:#010x}): nobody wrote one to its end; let the giver go on, or start the card anew"
    )]
    Absent {
        /// Number of bytes there.
        have: usize,
        /// Value in the place of the mark.
        mark: u32,
    },
    /// The driver state is shorter than its length field says.
    #[error(
        "the driver state says that it has {says} bytes, and {have} are there; it was cut, or is damaged: let the giver go on, or start the card anew"
    )]
    Cut {
        /// Length that it says, in bytes.
        says: u32,
        /// Number of bytes there.
        have: usize,
    },
    /// The bytes are not those that were written.
    #[error(
        "the driver state is damaged: its checksum is {is:#010x} and should be {should:#010x}; let the giver go on, or start the card anew"
    )]
    Damaged {
        /// Checksum of the bytes there.
        is: u32,
        /// Checksum in the envelope.
        should: u32,
    },
    /// The envelope is of a later version, and undamaged.
    #[error(
        "the driver state has an envelope of version {version}, and this program opens {VERSION}; upgrade, or hand the NIC over by the store"
    )]
    Envelope {
        /// Version of the envelope.
        version: u32,
    },
    /// The driver state is of another driver, or of another version of its layout.
    #[error(
        "the driver state is of {kind:#010x} version {version}, and {want_kind:#010x} version {want_version} is wanted; hand the NIC over by the store, or cold"
    )]
    Other {
        /// Kind of the driver state.
        kind: u32,
        /// Version of the driver's layout.
        version: u32,
        /// Kind that is wanted.
        want_kind: u32,
        /// Version that is wanted.
        want_version: u32,
    },
    /// The driver state was written in another tenure: it is an old one.
    #[error(
        "the driver state was written in epoch {epoch}, and the lease was passed in epoch {want}; its giver did not write one: let it go on, or start the card anew"
    )]
    Stale {
        /// Epoch in which it was written.
        epoch: u32,
        /// Epoch in which it should have been written.
        want: u32,
    },
}

impl<'b> DriverState<'b> {
    /// Writes the envelope to `memory`, the mark last. Returns the number of bytes written.
    pub fn write(&self, memory: &mut [u8]) -> Result<usize, NoRoom> {
        let (len, have) = (self.bytes.len(), memory.len());
        let need = HEAD.saturating_add(len);
        let room = NoRoom { len, need, have };
        let bytes = u32::try_from(len).ok().filter(|_| len <= LEN_MAX).ok_or(room)?;
        let memory = memory.get_mut(..need).ok_or(room)?;
        let DriverState { kind, version, epoch, .. } = *self;
        let head = Head { magic: 0, checksum: 0, envelope: VERSION, kind, version, epoch, len: bytes, zero: 0 };
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&head.as_bytes()[COVERED..]), self.bytes);
        memory[..HEAD].copy_from_slice(Head { checksum, ..head }.as_bytes());
        memory[HEAD..].copy_from_slice(self.bytes);
        memory[..4].copy_from_slice(&MAGIC.to_ne_bytes());
        Ok(need)
    }

    /// Reads an envelope from `memory`, which may be longer. `memory` must be a copy that no other process can
    /// write.
    pub fn read(memory: &'b [u8]) -> Result<Self, NotADriverState> {
        let absent = |mark| NotADriverState::Absent { have: memory.len(), mark };
        let (head, rest) = Head::read_from_prefix(memory).map_err(|_| absent(0))?;
        if head.magic != MAGIC {
            return Err(absent(head.magic));
        }
        let cut = NotADriverState::Cut { says: head.len, have: rest.len() };
        let len = usize::try_from(head.len).ok().filter(|&len| len <= LEN_MAX).ok_or(cut)?;
        let bytes = rest.get(..len).ok_or(cut)?;
        let is = crc32c::crc32c_append(crc32c::crc32c(&head.as_bytes()[COVERED..]), bytes);
        if is != head.checksum {
            return Err(NotADriverState::Damaged { is, should: head.checksum });
        }
        if head.envelope != VERSION || head.zero != 0 {
            return Err(NotADriverState::Envelope { version: head.envelope });
        }
        Ok(DriverState { kind: head.kind, version: head.version, epoch: head.epoch, bytes })
    }

    /// [`read`](Self::read) for a driver that wants this kind and version, from the tenure in which the lease was
    /// passed.
    pub fn read_as(memory: &'b [u8], kind: u32, version: u32, epoch: u32) -> Result<&'b [u8], NotADriverState> {
        let driver_state = DriverState::read(memory)?;
        if (driver_state.kind, driver_state.version) != (kind, version) {
            let (want_kind, want_version) = (kind, version);
            return Err(NotADriverState::Other {
                kind: driver_state.kind,
                version: driver_state.version,
                want_kind,
                want_version,
            });
        }
        match driver_state.epoch == epoch {
            true => Ok(driver_state.bytes),
            false => Err(NotADriverState::Stale { epoch: driver_state.epoch, want: epoch }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(kind: u32, version: u32, epoch: u32, bytes: &[u8], beyond: usize) -> Vec<u8> {
        let mut memory = vec![0xa5; HEAD + bytes.len() + beyond];
        assert_eq!(DriverState { kind, version, epoch, bytes }.write(&mut memory), Ok(HEAD + bytes.len()));
        memory
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_was_written_is_read(
            numbers in any::<[u32; 3]>(),
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            beyond in 0..9_usize,
        ) {
            let [kind, version, epoch] = numbers;
            let memory = written(kind, version, epoch, &bytes, beyond);
            prop_assert_eq!(DriverState::read(&memory), Ok(DriverState { kind, version, epoch, bytes: &bytes }));
            prop_assert_eq!(DriverState::read_as(&memory, kind, version, epoch), Ok(&bytes[..]));
            let stale = DriverState::read_as(&memory, kind, version, epoch ^ 1);
            prop_assert_eq!(stale, Err(NotADriverState::Stale { epoch, want: epoch ^ 1 }));
            let other = matches!(DriverState::read_as(&memory, kind, version ^ 1, epoch), Err(NotADriverState::Other { .. }));
            prop_assert!(other);
        }

        #[test]
        fn any_bytes_are_refused_or_honest(
            marked in any::<bool>(),
            len in prop_oneof![0..64_u32, any::<u32>()],
            bytes in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut bytes = bytes;
            if marked && bytes.len() >= HEAD {
                bytes[..4].copy_from_slice(b"SASH");
                bytes[24..28].copy_from_slice(&len.to_ne_bytes());
            }
            if let Ok(driver_state) = DriverState::read(&bytes) {
                let again = written(driver_state.kind, driver_state.version, driver_state.epoch, driver_state.bytes, 0);
                prop_assert_eq!(&again[..], &bytes[..again.len()], "the same as if it had been written");
            }
        }
    }

    #[test]
    fn any_bit_flipped_is_noticed() {
        let memory = written(0x8086_10d3, 7, 3, &[0x11, 0, 0xff, 4, 5, 6, 7, 8, 9, 10, 11], 0);
        for bit in 0..memory.len() * 8 {
            let mut flipped = memory.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let error = DriverState::read(&flipped).expect_err("a flipped bit");
            assert!(error.to_string().contains("; "), "the error gives a remedy: {error}");
        }
    }

    #[test]
    fn two_bits_flipped_are_noticed_too() {
        // CRC-32C has a Hamming distance of 4 or more up to 2³¹ bits; for a short message the test can try all
        // pairs.
        let memory = written(1, 2, 3, &[0x5a; 16], 0);
        let bits = memory.len() * 8;
        for (first, second) in (0..bits).flat_map(|first| (first + 1..bits).map(move |second| (first, second))) {
            let mut flipped = memory.clone();
            [first, second].iter().for_each(|bit| flipped[bit / 8] ^= 1 << (bit % 8));
            assert!(DriverState::read(&flipped).is_err(), "bits {first} and {second}");
        }
    }

    #[test]
    fn what_a_writer_died_over_is_no_driver_state() {
        let whole = written(1, 2, 3, b"cursors", 0);
        for end in 0..whole.len() {
            assert!(DriverState::read(&whole[..end]).is_err());
        }
        let mut unmarked = whole;
        unmarked[..4].fill(0);
        assert_eq!(DriverState::read(&unmarked), Err(NotADriverState::Absent { have: 39, mark: 0 }));
    }

    #[test]
    fn room_is_needed_for_all_of_it() {
        let driver_state = DriverState { kind: 1, version: 1, epoch: 1, bytes: &[1, 2, 3] };
        assert_eq!(driver_state.write(&mut [0; 34]), Err(NoRoom { len: 3, need: 35, have: 34 }));
        assert_eq!(driver_state.write(&mut [0; 35]), Ok(35));
        let long = vec![0; LEN_MAX + 1];
        assert!(DriverState { bytes: &long, ..driver_state }.write(&mut vec![0; LEN_MAX + HEAD + 1]).is_err());
    }

    #[test]
    fn the_checksum_is_crc_32c() {
        // RFC 3720, appendix B.4: 32 bytes of zeroes.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
    }
}
