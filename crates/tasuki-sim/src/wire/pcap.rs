//! Records the frames on a wire to a pcap file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::Wire;

/// Magic number of the classic format with times in nanoseconds; it shows the writer's byte order.
const MAGIC: u32 = 0xa1b2_3c4d;
const VERSION: [u16; 2] = [2, 4];
const SNAP_LEN: u32 = 1 << 18;
/// LINKTYPE_ETHERNET.
const ETHERNET: u32 = 1;

/// A wire whose frames are recorded, in both directions, in the order in which the card saw them.
#[derive(Debug)]
pub struct Recorded<W> {
    wire: W,
    file: BufWriter<File>,
    /// The first error; nothing is written after it.
    failed: Option<io::Error>,
}

impl<W: Wire> Recorded<W> {
    /// Records the frames on `wire` to a new file, which replaces an existing one.
    pub fn create(wire: W, path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&MAGIC.to_ne_bytes())?;
        VERSION.iter().try_for_each(|number| file.write_all(&number.to_ne_bytes()))?;
        // Time zone and accuracy are unused.
        [0, 0, SNAP_LEN, ETHERNET].iter().try_for_each(|number| file.write_all(&number.to_ne_bytes()))?;
        Ok(Recorded { wire, file, failed: None })
    }

    /// Returns the recorded wire.
    pub fn wire(&mut self) -> &mut W {
        &mut self.wire
    }

    /// Ends the recording and returns the wire.
    pub fn into_wire(mut self) -> io::Result<W> {
        self.flush()?;
        Ok(self.wire)
    }

    /// Flushes the file. Returns the first error since the start, once.
    pub fn flush(&mut self) -> io::Result<()> {
        self.failed.take().map_or(Ok(()), Err)?;
        self.file.flush()
    }
}

fn write(file: &mut BufWriter<File>, failed: &mut Option<io::Error>, frame: &[u8], now: u64) {
    if failed.is_some() {
        return;
    }
    let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let len = frame.len() as u64;
    let head = [now / 1_000_000_000, now % 1_000_000_000, len, len].map(|n| number(n).to_ne_bytes());
    *failed = file.write_all(head.as_flattened()).and_then(|()| file.write_all(frame)).err();
}

impl<W: Wire> Wire for Recorded<W> {
    fn receive(&mut self, now: u64) -> Option<&[u8]> {
        let frame = self.wire.receive(now)?;
        write(&mut self.file, &mut self.failed, frame, now);
        Some(frame)
    }

    fn send(&mut self, frame: &[u8], now: u64) {
        write(&mut self.file, &mut self.failed, frame, now);
        self.wire.send(frame, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Source, SourceOptions};

    #[test]
    fn what_passes_stands_in_the_file_with_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wire.pcap");
        let options = SourceOptions { to: [2; 6], from: [4; 6], size: 64, rate: None, count: 1, honours_pause: false };
        let mut wire = Recorded::create(Source::new(options), &path).unwrap();
        let came = wire.receive(3_000_000_007).unwrap().to_vec();
        wire.send(&[9; 61], 4_000_000_000);
        wire.flush().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let (head, rest) = bytes.split_at(24);
        let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|w| u32::from_ne_bytes(*w)).collect::<Vec<_>>();
        assert_eq!((words(head)[0], words(head)[5]), (MAGIC, ETHERNET));
        assert_eq!(words(&rest[..16]), [3, 7, 60, 60]);
        assert_eq!(rest[16..76], came);
        assert_eq!(words(&rest[76..92]), [4, 0, 61, 61]);
        assert_eq!(rest[92..], [9; 61]);
    }
}
