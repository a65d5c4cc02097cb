//! A frame that carries its path: sender, receiver, number, length, and a sum over all of it.

/// Receiver that means all nodes.
pub const ALL: u32 = u32::MAX;

/// Bytes of the shortest frame that has room for its path.
pub const SHORTEST: usize = 60;

/// Ethernet addresses, an EtherType for experiments (IEEE 802, 7.2), and two bytes that fill the word.
const HEAD: usize = 16;
const SUM_AT: usize = HEAD + 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Sender. No two nodes have the same name, even if they had the same number one after another.
    pub from: u32,
    /// Receiver, or [`ALL`].
    pub to: u32,
    /// Number of the frame, counted separately for each pair and for all.
    pub number: u32,
}

/// Returns the MAC address of a node.
pub fn mac(of: u32) -> [u8; 6] {
    let [a, b, c, d] = of.to_be_bytes();
    if of == ALL { [0xff; 6] } else { [2, 0xc4, a, b, c, d] }
}

impl Path {
    /// Writes a frame with this path that is as long as `room`.
    pub fn write(&self, room: &mut [u8]) {
        let len = u32::try_from(room.len()).expect("a frame's length");
        room[..6].copy_from_slice(&mac(self.to));
        room[6..12].copy_from_slice(&mac(self.from));
        room[12..HEAD].copy_from_slice(&[0x88, 0xb5, 0, 0]);
        for (at, word) in [self.from, self.to, self.number, len].into_iter().enumerate() {
            room[HEAD + 4 * at..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let mut filler = u64::from(self.from) << 32 ^ u64::from(self.to) << 16 ^ u64::from(self.number);
        for chunk in room[SUM_AT + 8..].chunks_mut(8) {
            filler = filler.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            chunk.copy_from_slice(&(filler ^ filler >> 29).to_le_bytes()[..chunk.len()]);
        }
        let sum = sum(room);
        room[SUM_AT..SUM_AT + 8].copy_from_slice(&sum.to_le_bytes());
    }

    /// Returns the path of an intact frame, or a sentence about a damaged one.
    pub fn read(frame: &[u8]) -> Result<Self, String> {
        if frame.len() < SHORTEST {
            return Err(format!("a frame of {} bytes was sent by nobody", frame.len()));
        }
        let word = |at: usize| u32::from_le_bytes(frame[HEAD + 4 * at..][..4].try_into().expect("four bytes"));
        let [from, to, number, len] = [0, 1, 2, 3].map(word);
        let (path, said) =
            (Path { from, to, number }, u64::from_le_bytes(frame[SUM_AT..SUM_AT + 8].try_into().expect("eight bytes")));
        let found = sum(frame);
        if len as usize != frame.len() || said != found || frame[..12] != [mac(to), mac(from)].concat() {
            let len_found = frame.len();
            return Err(format!("{path:?} of {len} bytes came as {len_found} bytes, its sum {said:#x} as {found:#x}"));
        }
        Ok(path)
    }
}

/// Returns a sum over all bytes but its own.
fn sum(frame: &[u8]) -> u64 {
    let add = |sum: u64, part: &[u8]| {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
    };
    let parts = frame[..SUM_AT].chunks(8).chain(frame[SUM_AT + 8..].chunks(8));
    parts.fold(frame.len() as u64, add)
}
