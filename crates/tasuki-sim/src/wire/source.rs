//! A source of numbered frames, and what becomes of them: lost, duplicated, reordered, and for how long nothing came.
//!
//! Each frame carries, behind its Ethernet header, a mark, its number and when it left. Whatever comes back with the mark is
//! judged by its number; who only receives the frames judges them by [`number_of`](Source::number_of).

use super::Wire;

const ETHERNET_LEN: usize = 14;

/// The EtherType for experiments (IEEE 802).
const KIND: [u8; 2] = [0x88, 0xb5];
const MARK: [u8; 4] = *b"tsk\x01";

/// Mark, number, time.
const NUMBERED_LEN: usize = ETHERNET_LEN + 4 + 8 + 8;

/// The check sequence, which is no part of our frames but of their size.
const CRC_LEN: u32 = 4;

/// On the wire besides frame and check sequence: preamble and gap.
const GAP_LEN: u64 = 20;

/// Numbers behind the highest one that came for which it is known whether they came.
const WINDOW: u64 = 1 << 16;

/// Frames that a source which was not asked in time sends at once; beyond that its rate falls, and nothing piles up.
const LATE: u64 = 64;

/// What a source sends.
#[derive(Debug, Clone)]
pub struct SourceOptions {
    /// To whom.
    pub to: [u8; 6],
    /// From whom.
    pub from: [u8; 6],
    /// Bytes of a frame, with its check sequence: 64 to 16,384.
    pub size: u32,
    /// Frames a second; `None` for as many as are taken.
    pub rate: Option<u64>,
    /// Frames in all.
    pub count: u64,
}

impl SourceOptions {
    /// As many frames of a size as fit into a line of so many bits a second.
    pub fn line_rate(bits: u64, size: u32) -> u64 {
        bits / (8 * (u64::from(size) + GAP_LEN))
    }
}

/// What a source has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames that it sent.
    pub sent: u64,
    /// Frames of its own that came back, each counted once.
    pub received: u64,
    /// Frames that came back a second time.
    pub duplicated: u64,
    /// Frames that came back behind one with a higher number.
    pub reordered: u64,
    /// Frames that others sent.
    pub foreign: u64,
    /// Frames of its own that came back with other bytes.
    pub damaged: u64,
    /// The longest time between two frames that came back, in nanoseconds.
    pub longest_gap: u64,
    /// The longest time between a frame's leaving and its coming back, in nanoseconds.
    pub longest_trip: u64,
    /// Times that it was asked so late that it let frames be instead of sending them at once.
    pub slipped: u64,
}

impl Counts {
    /// Frames that were sent and did not come back until now.
    pub fn lost(&self) -> u64 {
        self.sent - self.received
    }
}

/// A source of numbered frames that checks what comes back.
#[derive(Debug)]
pub struct Source {
    options: SourceOptions,
    frame: Box<[u8]>,
    counts: Counts,
    /// When the next frame is due, in nanoseconds and 2^-20 parts of one.
    due: Option<u128>,
    /// What lies between two frames, likewise.
    between: u128,
    /// One past the highest number that came back.
    next: u64,
    /// Whether the numbers in the window came.
    came: Box<[u64]>,
    last_at: Option<u64>,
    paused: bool,
}

const PARTS: u32 = 20;

impl Source {
    /// A source that begins when it is first asked.
    pub fn new(options: SourceOptions) -> Self {
        let len = options.size.clamp(64, 16384) - CRC_LEN;
        let mut frame = vec![0; len as usize].into_boxed_slice();
        frame[..6].copy_from_slice(&options.to);
        frame[6..12].copy_from_slice(&options.from);
        frame[12..14].copy_from_slice(&KIND);
        frame[14..18].copy_from_slice(&MARK);
        for (byte, value) in frame[NUMBERED_LEN..].iter_mut().zip((0..=255).cycle()) {
            *byte = value;
        }
        let between = options.rate.map_or(0, |rate| (1_000_000_000 << PARTS) / u128::from(rate.max(1)));
        let came = vec![0; (WINDOW / 64) as usize].into_boxed_slice();
        Source {
            options,
            frame,
            counts: Counts::default(),
            due: None,
            between,
            next: 0,
            came,
            last_at: None,
            paused: false,
        }
    }

    /// What was counted until now.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether all that it was to send was sent.
    pub fn is_done(&self) -> bool {
        self.counts.sent >= self.options.count
    }

    /// Sends nothing for a while, or goes on.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
        self.due = None;
    }

    /// So many more frames are to be sent.
    pub fn add(&mut self, count: u64) {
        self.options.count = self.options.count.saturating_add(count);
    }

    /// The number that a source gave to a frame, if it is one's.
    pub fn number_of(frame: &[u8]) -> Option<u64> {
        let numbered = frame.get(12..NUMBERED_LEN)?;
        let (kind, rest) = numbered.split_first_chunk::<2>()?;
        let (mark, rest) = rest.split_first_chunk::<4>()?;
        let number = rest.first_chunk::<8>()?;
        (*kind == KIND && *mark == MARK).then(|| u64::from_le_bytes(*number))
    }

    fn judge(&mut self, number: u64, frame: &[u8], now: u64) {
        if number >= self.counts.sent
            || frame.len() != self.frame.len()
            || frame[NUMBERED_LEN..] != self.frame[NUMBERED_LEN..]
        {
            self.counts.damaged += 1;
            return;
        }
        let gap = self.last_at.map_or(0, |last| now.saturating_sub(last));
        self.last_at = Some(now);
        self.counts.longest_gap = self.counts.longest_gap.max(gap);
        let left = frame[26..34].first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        self.counts.longest_trip = self.counts.longest_trip.max(now.saturating_sub(left));
        if number >= self.next {
            self.forget(self.next, number);
            self.next = number + 1;
            self.mark(number);
            self.counts.received += 1;
        } else if number + WINDOW < self.next || self.mark(number) {
            // So old that nobody knows any more: it is counted as a duplicate, and stays lost.
            self.counts.duplicated += 1;
        } else {
            self.counts.reordered += 1;
            self.counts.received += 1;
        }
    }

    /// Nothing is known to have come of the numbers from `from` to `to`, which enter the window.
    fn forget(&mut self, from: u64, to: u64) {
        if to - from >= WINDOW {
            self.came.fill(0);
            return;
        }
        for number in from..=to {
            self.came[(number % WINDOW / 64) as usize] &= !(1 << (number % 64));
        }
    }

    /// A number came; says whether it had come before.
    fn mark(&mut self, number: u64) -> bool {
        let word = &mut self.came[(number % WINDOW / 64) as usize];
        let before = *word >> (number % 64) & 1 == 1;
        *word |= 1 << (number % 64);
        before
    }
}

impl Wire for Source {
    #[inline]
    fn receive(&mut self, now: u64) -> Option<&[u8]> {
        if self.paused || self.counts.sent >= self.options.count {
            return None;
        }
        if self.between != 0 {
            let now = u128::from(now) << PARTS;
            let due = *self.due.get_or_insert(now);
            if now < due {
                return None;
            }
            let earliest = now.saturating_sub(self.between * u128::from(LATE));
            self.counts.slipped += u64::from(due < earliest);
            self.due = Some(due.max(earliest) + self.between);
        }
        self.frame[18..26].copy_from_slice(&self.counts.sent.to_le_bytes());
        self.frame[26..34].copy_from_slice(&now.to_le_bytes());
        self.counts.sent += 1;
        Some(&self.frame)
    }

    #[inline]
    fn send(&mut self, frame: &[u8], now: u64) {
        match Self::number_of(frame) {
            Some(number) => self.judge(number, frame, now),
            None => self.counts.foreign += 1,
        }
    }
}
