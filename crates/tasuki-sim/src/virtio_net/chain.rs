//! Chains of descriptors (§2.7.5).

use super::queue::{Queue, Trouble};
use crate::journal::Class;
use crate::model::{Host, Unmapped};

const DESCRIPTOR_LEN: usize = 16;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

#[derive(Debug, Clone, Copy)]
struct Part {
    at: u64,
    len: u32,
}

/// The buffers of a chain.
#[derive(Debug, Default)]
pub struct Chain {
    /// First the buffers that the device reads, then those that it writes.
    parts: Vec<Part>,
    /// Number of buffers that the device reads.
    readable: usize,
    /// Bytes that the device may read, and bytes that it may write.
    pub readable_len: u64,
    pub writable_len: u64,
}

impl Chain {
    /// Reads the chain that begins with descriptor `head`, an index inside the queue.
    #[inline]
    pub fn read(&mut self, queue: &Queue, head: u16, host: &mut impl Host) -> Result<(), Trouble> {
        self.parts.clear();
        (self.readable, self.readable_len, self.writable_len) = (0, 0, 0);
        let mut index = head;
        // Read two descriptors at a time, since a chain mostly continues with the next one.
        let mut bytes = [0; 2 * DESCRIPTOR_LEN];
        let mut have = None;
        loop {
            let trouble = |value: u64| Trouble { class: Class::BadDescriptor, place: index.into(), value };
            if self.parts.len() == usize::from(queue.size) {
                // The chain loops, or is longer than the queue.
                return Err(trouble(self.parts.len() as u64));
            }
            if have != Some(index) {
                let len = if index + 1 < queue.size { 2 * DESCRIPTOR_LEN } else { DESCRIPTOR_LEN };
                let at = queue.descriptors.wrapping_add(u64::from(index) * DESCRIPTOR_LEN as u64);
                host.read(at, &mut bytes[..len])?;
                have = (len > DESCRIPTOR_LEN).then_some(index + 1);
            } else {
                bytes.copy_within(DESCRIPTOR_LEN.., 0);
                have = None;
            }
            let [at, rest, ..] = bytes.as_chunks::<8>().0 else { unreachable!("32 bytes") };
            let (at, rest) = (u64::from_le_bytes(*at), u64::from_le_bytes(*rest));
            let (len, flags, next) = (rest as u32, (rest >> 32) as u16, (rest >> 48) as u16);
            // Indirect descriptors are not offered.
            if flags & INDIRECT != 0 {
                return Err(trouble(rest));
            }
            if flags & WRITE != 0 {
                self.writable_len += u64::from(len);
            } else if self.readable < self.parts.len() {
                // Readable buffers come before writable ones (§2.7.4.2).
                return Err(trouble(rest));
            } else {
                self.readable_len += u64::from(len);
                self.readable += 1;
            }
            self.parts.push(Part { at, len });
            if flags & NEXT == 0 {
                return Ok(());
            }
            if next >= queue.size {
                return Err(trouble(rest));
            }
            index = next;
        }
    }

    /// Reads all readable buffers into the first bytes of `into`, which must have room.
    #[inline]
    pub fn gather(&self, into: &mut [u8], host: &mut impl Host) -> Result<(), Unmapped> {
        let mut done = 0;
        for &Part { at, len } in &self.parts[..self.readable] {
            let end = done + len as usize;
            host.read(at, &mut into[done..end])?;
            done = end;
        }
        Ok(())
    }

    /// Writes `pieces`, one after the other, to the writable buffers, as far as they have room.
    #[inline]
    pub fn scatter(&self, pieces: [&[u8]; 2], host: &mut impl Host) -> Result<(), Unmapped> {
        let mut parts = self.parts[self.readable..].iter();
        let mut part = Part { at: 0, len: 0 };
        for mut piece in pieces {
            while !piece.is_empty() {
                while part.len == 0 {
                    let Some(next) = parts.next() else { return Ok(()) };
                    part = *next;
                }
                let (now, later) = piece.split_at(piece.len().min(part.len as usize));
                host.write(part.at, now)?;
                part = Part { at: part.at.wrapping_add(now.len() as u64), len: part.len - now.len() as u32 };
                piece = later;
            }
        }
        Ok(())
    }
}
