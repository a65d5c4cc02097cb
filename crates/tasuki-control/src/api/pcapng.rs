//! The format of a capture. This module makes the blocks around the frames that workers send, and checks those
//! frames.
//!
//! Source: PCAP Now Generic (pcapng), draft-ietf-opsawg-pcapng. All words are little-endian.

/// Types of blocks: 4.1 Section Header, 4.2 Interface Description, 4.3 Enhanced Packet, 4.6 Interface Statistics.
const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
/// Type of the block that holds a frame.
pub const PACKET: u32 = 6;
/// Type of the block that says how many frames were missed.
pub const STATISTICS: u32 = 5;

/// Bytes before a frame in its block, and behind it.
const BEFORE: usize = 28;
const BEHIND: usize = 16;

/// The option of a packet block that gives the frame's direction, and its length.
const FLAGS: u32 = 2 | 4 << 16;

/// Options of the other blocks.
mod option {
    pub const END: u16 = 0;
    pub const SHB_USERAPPL: u16 = 4;
    pub const IF_NAME: u16 = 2;
    pub const IF_MACADDR: u16 = 6;
    pub const IF_TSRESOL: u16 = 9;
    pub const ISB_STARTTIME: u16 = 2;
    pub const ISB_ENDTIME: u16 = 3;
    pub const ISB_IFRECV: u16 = 4;
    pub const ISB_IFDROP: u16 = 5;
}

const LINKTYPE_ETHERNET: u32 = 1;

/// Resolution of time as a power of ten: nanoseconds.
const NANOSECONDS: u8 = 9;

struct Block(Vec<u8>);

impl Block {
    fn new(kind: u32) -> Self {
        let mut block = Block(Vec::with_capacity(128));
        block.word(kind);
        block.word(0);
        block
    }

    fn word(&mut self, word: u32) {
        self.0.extend_from_slice(&word.to_le_bytes());
    }

    fn option(&mut self, code: u16, value: &[u8]) {
        let len = u16::try_from(value.len()).expect("a few bytes");
        self.0.extend_from_slice(&code.to_le_bytes());
        self.0.extend_from_slice(&len.to_le_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.option(option::END, &[]);
        let len = u32::try_from(self.0.len() + 4).expect("a few bytes");
        self.word(len);
        self.0[4..8].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

/// Returns a time as blocks have it: the high half first.
fn time(ns: u64) -> [u8; 8] {
    ns.rotate_left(32).to_le_bytes()
}

/// Returns the block that begins a file.
pub fn section() -> Vec<u8> {
    let mut block = Block::new(SECTION);
    block.word(0x1a2b_3c4d);
    // Version 1.0, and an unknown section length.
    [1, u32::MAX, u32::MAX].into_iter().for_each(|word| block.word(word));
    block.option(option::SHB_USERAPPL, concat!("tasuki ", env!("CARGO_PKG_VERSION")).as_bytes());
    block.end()
}

/// Returns the block of a port.
pub fn interface(name: &str, mac: Option<[u8; 6]>, snap: u32) -> Vec<u8> {
    let mut block = Block::new(INTERFACE);
    block.word(LINKTYPE_ETHERNET);
    block.word(snap);
    block.option(option::IF_NAME, name.as_bytes());
    if let Some(mac) = mac {
        block.option(option::IF_MACADDR, &mac);
    }
    block.option(option::IF_TSRESOL, &[NANOSECONDS]);
    block.end()
}

/// Returns the block with the counts of a port's frames, from one time to another.
pub fn statistics(interface: u32, [from, to]: [u64; 2], frames: u64, missed: u64) -> Vec<u8> {
    let mut block = Block::new(STATISTICS);
    block.word(interface);
    block.0.extend_from_slice(&time(to));
    block.option(option::ISB_STARTTIME, &time(from));
    block.option(option::ISB_ENDTIME, &time(to));
    block.option(option::ISB_IFRECV, &frames.saturating_add(missed).to_le_bytes());
    block.option(option::ISB_IFDROP, &missed.to_le_bytes());
    block.end()
}

fn word_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes)
}

/// Returns a block's word as a length or a position.
fn size_at(bytes: &[u8], at: usize) -> Option<usize> {
    word_at(bytes, at).and_then(|word| usize::try_from(word).ok())
}

/// Checks the first block of `batch`. A worker must send a frame of one of these ports, at most `snap` bytes of it,
/// its direction, and nothing else. Returns the block's length in the batch, and the port.
fn frame(batch: &[u8], interfaces: usize, snap: u32) -> Option<(usize, usize)> {
    let (whole, port, kept) = (size_at(batch, 4)?, size_at(batch, 8)?, size_at(batch, 20)?);
    let is_kept = kept <= size_at(batch, 24)? && kept <= usize::try_from(snap).ok()?;
    let is_one = is_kept && word_at(batch, 0)? == PACKET && port < interfaces;
    let behind = BEFORE + kept.checked_next_multiple_of(4)?;
    let is_whole = whole == behind.checked_add(BEHIND)? && whole <= batch.len();
    let says = || Some([word_at(batch, behind)?, word_at(batch, behind + 8)?, word_at(batch, behind + 12)?]);
    let is_closed = is_one && is_whole && says()? == [FLAGS, 0, word_at(batch, 4)?];
    (is_closed && matches!(word_at(batch, behind + 4)?, 1 | 2)).then_some((whole, port))
}

/// Checks a worker's batch, and counts the frames of each port, up to `most` frames. Returns how many bytes those
/// are; `None` if anything in the batch is malformed.
pub fn accept(batch: &[u8], most: u64, snap: u32, counts: &mut [u64]) -> Option<usize> {
    let mut ports = Vec::new();
    let (mut at, mut taken) = (0, 0);
    while at < batch.len() {
        let (whole, port) = frame(&batch[at..], counts.len(), snap)?;
        at += whole;
        if u64::try_from(ports.len()).is_ok_and(|count| count < most) {
            taken = at;
            ports.push(port);
        }
    }
    ports.into_iter().for_each(|port| counts[port] += 1);
    Some(taken)
}

/// Returns the type and the length of the block that `bytes` begin with, if all of it is there. An error means that
/// there is no block.
pub fn whole_block(bytes: &[u8]) -> Result<Option<(u32, usize)>, Odd> {
    /// No block of Tasuki's is longer.
    const MOST: usize = 1 << 20;
    let (Some(kind), Some(len)) = (word_at(bytes, 0), size_at(bytes, 4)) else { return Ok(None) };
    if !(12..=MOST).contains(&len) || len % 4 != 0 {
        return Err(Odd);
    }
    Ok((bytes.len() >= len).then_some((kind, len)))
}

/// These bytes are not blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the answer is not a capture; rebuild the older of tasuki and tasukid")]
pub struct Odd;

/// Returns the number of missed frames in a block of statistics.
pub fn missed(block: &[u8]) -> Option<u64> {
    let mut at = 20;
    loop {
        let word = word_at(block, at)?;
        let (code, len) = (word & 0xffff, size_at(block, at)? >> 16);
        if code == u32::from(option::ISB_IFDROP) {
            return block.get(at + 4..)?.first_chunk().copied().map(u64::from_le_bytes);
        }
        if code == u32::from(option::END) {
            return None;
        }
        at += 4 + len.next_multiple_of(4);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption as IfOption;
    use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsOption as IsbOption;
    use pcap_file::pcapng::{Block as Read, PcapNgReader};

    /// Returns a frame as workers send it.
    pub fn packet(interface: u32, frame: &[u8], len: u32, direction: u32) -> Vec<u8> {
        let kept = u32::try_from(frame.len()).unwrap();
        let whole = u32::try_from(BEFORE + frame.len().next_multiple_of(4) + BEHIND).unwrap();
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let mut bytes = words(&[PACKET, whole, interface, 0, 77, kept, len]);
        bytes.extend_from_slice(frame);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend_from_slice(&words(&[FLAGS, direction, 0, whole]));
        bytes
    }

    #[test]
    fn another_reader_reads_what_stands_around_frames() {
        let mut file = section();
        file.extend(interface("shop@lan", Some([2, 0, 0, 0, 0, 1]), 96));
        file.extend(packet(0, &[7; 61], 61, 1));
        file.extend(statistics(0, [1, 1 << 40], 1, 5));
        let mut reader = PcapNgReader::new(&file[..]).unwrap();
        let Read::InterfaceDescription(port) = reader.next_block().unwrap().unwrap().into_owned() else { panic!() };
        assert!(port.options.contains(&IfOption::IfName("shop@lan".into())), "{port:?}");
        assert!(port.options.contains(&IfOption::IfTsResol(9)), "{port:?}");
        let Read::EnhancedPacket(packet) = reader.next_block().unwrap().unwrap().into_owned() else { panic!() };
        assert_eq!((packet.timestamp.as_nanos(), &packet.data[..]), (77, &[7; 61][..]));
        let Read::InterfaceStatistics(said) = reader.next_block().unwrap().unwrap().into_owned() else { panic!() };
        assert!(said.options.contains(&IsbOption::IsbIfRecv(6)), "{said:?}");
        assert!(said.options.contains(&IsbOption::IsbIfDrop(5)), "{said:?}");
        assert!(reader.next_block().is_none());
        assert_eq!(missed(&statistics(0, [1, 1 << 40], 1, 5)), Some(5));
    }

    #[test]
    fn frames_are_counted_by_port_and_cut_off_where_there_are_enough() {
        let batch = [packet(0, &[1; 60], 60, 1), packet(1, &[2; 61], 1514, 2), packet(0, &[], 60, 2)];
        let lens: Vec<usize> = batch.iter().map(Vec::len).collect();
        let batch = batch.concat();
        for (most, bytes, expected) in
            [(9, lens.iter().sum(), [2, 1]), (2, lens[0] + lens[1], [1, 1]), (1, lens[0], [1, 0]), (0, 0, [0, 0])]
        {
            let mut counts = [0; 2];
            assert_eq!(accept(&batch, most, 96, &mut counts), Some(bytes));
            assert_eq!(counts, expected);
        }
    }

    /// Each word of a block, changed: only the time, and the frame's length on its wire, may have any value.
    #[test]
    fn what_is_no_frame_is_refused_whole() {
        let sound = packet(0, &[1; 60], 60, 1);
        let two = [sound.clone(), sound.clone()].concat();
        for word in (0..sound.len()).step_by(4).filter(|at| !(BEFORE..BEFORE + 60).contains(at)) {
            for value in [0_u32, 1, 2, 3, 5, 59, 61, 64, 103, 104, 105, 108, 1 << 20, 1 << 31, u32::MAX] {
                let mut batch = two.clone();
                batch[word..word + 4].copy_from_slice(&value.to_le_bytes());
                let is_time = word == 12 || word == 16;
                let is_length = word == 24 && value >= 60;
                let is_other_way = word == sound.len() - 12 && matches!(value, 1 | 2);
                // It takes as many words, and the padding of the last one may have any value.
                let is_filled_up = word == 20 && value == 59;
                let is_same = batch == two;
                let mut counts = [0];
                let taken = accept(&batch, u64::MAX, 96, &mut counts);
                match is_time || is_length || is_other_way || is_filled_up || is_same {
                    true => assert_eq!((taken, counts), (Some(two.len()), [2]), "word {word} is {value}"),
                    false => assert_eq!((taken, counts), (None, [0]), "word {word} is {value}"),
                }
            }
        }
        for len in 1..sound.len() {
            assert_eq!(accept(&sound[..len], u64::MAX, 96, &mut [0]), None, "{len} bytes of it");
        }
        assert_eq!(accept(&sound, u64::MAX, 59, &mut [0]), None, "more than is kept");
    }

    #[test]
    fn blocks_are_passed_on_whole() {
        let sound = section();
        assert_eq!(whole_block(&sound), Ok(Some((SECTION, sound.len()))));
        for len in 0..sound.len() {
            assert_eq!(whole_block(&sound[..len]), Ok(None));
        }
        assert_eq!(whole_block(&[6, 0, 0, 0, 9, 0, 0, 0]), Err(Odd));
        assert_eq!(whole_block(&[6, 0, 0, 0, 0, 0, 0, 1]), Err(Odd));
        assert_eq!(missed(&[0; 20]), None);
        assert_eq!(missed(&[1; 64]), None);
    }
}
