//! A source of numbered frames that checks the returning ones: lost, duplicated, reordered, and the longest time
//! without any.
//!
//! Each frame carries, behind its Ethernet header, a mark, its number and its send time, as docs/design/sim.md
//! describes. The source judges, by number, each returning frame that has the mark, and the source's address as
//! sender or receiver. A program that only receives the frames judges them with [`number_of`](Source::number_of).

use super::{Wire, pause_ns};

const ETHERNET_LEN: usize = 14;

/// EtherType for experiments (IEEE 802).
const KIND: [u8; 2] = [0x88, 0xb5];
const MARK: [u8; 4] = *b"tsk\x01";

/// Length in bytes up to the end of mark, number and time.
const NUMBERED_LEN: usize = ETHERNET_LEN + 4 + 8 + 8;

/// Bytes of the check sequence, which counts in `size` but is not in our frames.
const CRC_LEN: u32 = 4;

/// Bytes on the wire besides frame and check sequence: preamble and gap.
const GAP_LEN: u64 = 20;

/// Numbers, below the highest received one, for which the source knows whether they came back.
const WINDOW: u64 = 1 << 16;

/// Most overdue frames that a source sends at once. Beyond that it skips frames, and its rate falls.
const LATE: u64 = 64;

/// Settings of a source.
#[derive(Debug, Clone)]
pub struct SourceOptions {
    /// Destination address.
    pub to: [u8; 6],
    /// Source address.
    pub from: [u8; 6],
    /// Bytes per frame, check sequence included: 64 to 16,384.
    pub size: u32,
    /// Frames per second; `None` for as many as the card takes.
    pub rate: Option<u64>,
    /// Number of frames to send in all.
    pub count: u64,
    /// Whether PAUSE frames stop the source.
    pub honours_pause: bool,
}

impl SourceOptions {
    /// Returns the frames per second, of `size` bytes, that fill a line of `bits` bits per second.
    pub fn line_rate(bits: u64, size: u32) -> u64 {
        bits / (8 * (u64::from(size) + GAP_LEN))
    }
}

/// Counts of a source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames sent.
    pub sent: u64,
    /// Own frames that came back, each counted once.
    pub received: u64,
    /// Own frames that came back again.
    pub duplicated: u64,
    /// Own frames that came back after one with a higher number.
    pub reordered: u64,
    /// Frames of other senders.
    pub foreign: u64,
    /// Own frames that came back with other bytes.
    pub damaged: u64,
    /// Longest time between two returning frames, in nanoseconds.
    pub longest_gap: u64,
    /// Longest time from sending a frame to its return, in nanoseconds.
    pub longest_trip: u64,
    /// PAUSE frames received.
    pub pauses: u64,
    /// Times that the card asked so late that the source skipped frames instead of sending them at once.
    pub slipped: u64,
}

impl Counts {
    /// Returns the number of frames that were sent and have not come back.
    pub fn lost(&self) -> u64 {
        self.sent - self.received
    }
}

/// A source of numbered frames that checks the frames that come back.
#[derive(Debug)]
pub struct Source {
    options: SourceOptions,
    frame: Box<[u8]>,
    counts: Counts,
    /// Longest gap and trip since the last call of `window`, and the end of that gap.
    window: (u64, u64, u64),
    /// When the next frame is due, in 2^-20 ns.
    due: Option<u128>,
    /// Time between two frames, in 2^-20 ns.
    between: u128,
    /// One past the highest number that came back.
    next: u64,
    /// For each number in the window, whether it came back.
    came: Box<[u64]>,
    last_at: Option<u64>,
    paused: bool,
    /// Long pauses last until they are ended.
    patient: bool,
    /// End of the pause that the card asked for.
    paused_until: u64,
}

/// Longest pause in nanoseconds that a patient source takes as short.
const PATIENT_NS: u64 = 1_000_000;

const PARTS: u32 = 20;

impl Source {
    /// Makes a source that starts with the first call of `receive`.
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
            window: (0, 0, 0),
            due: None,
            between,
            next: 0,
            came,
            last_at: None,
            paused: false,
            patient: false,
            paused_until: 0,
        }
    }

    /// Returns the counts until now.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns whether all frames were sent.
    pub fn is_done(&self) -> bool {
        self.counts.sent >= self.options.count
    }

    /// Returns the longest gap and the longest trip of returning frames since the last call, and when that gap ended, in
    /// nanoseconds.
    pub fn window(&mut self) -> (u64, u64, u64) {
        std::mem::take(&mut self.window)
    }

    /// Stops the source, or lets it go on.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
        self.due = None;
    }

    /// From now on, makes a pause of more than a millisecond last until the next PAUSE frame: on a busy machine, a
    /// driver that does not run for 33 ms has done nothing wrong.
    pub fn be_patient(&mut self) {
        self.patient = true;
    }

    /// Ends the pause that the card asked for.
    pub fn end_pause(&mut self) {
        self.paused_until = 0;
    }

    /// Adds `count` frames to send.
    pub fn add(&mut self, count: u64) {
        self.options.count = self.options.count.saturating_add(count);
    }

    /// Sends no more frames.
    pub fn finish(&mut self) {
        self.options.count = self.options.count.min(self.counts.sent);
    }

    /// Returns the number of a frame that some source numbered; `None` for other frames.
    pub fn number_of(frame: &[u8]) -> Option<u64> {
        let numbered = frame.get(12..NUMBERED_LEN)?;
        let (kind, rest) = numbered.split_first_chunk::<2>()?;
        let (mark, rest) = rest.split_first_chunk::<4>()?;
        let number = rest.first_chunk::<8>()?;
        (*kind == KIND && *mark == MARK).then(|| u64::from_le_bytes(*number))
    }

    /// Returns whether this source sent the frame, turned round or not: other sources number theirs in the same way.
    fn is_ours(&self, frame: &[u8]) -> bool {
        frame[..6] == self.options.from || frame[6..12] == self.options.from
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
        if gap > self.window.0 {
            (self.window.0, self.window.2) = (gap, now);
        }
        let left = frame[26..34].first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let trip = now.saturating_sub(left);
        self.counts.longest_trip = self.counts.longest_trip.max(trip);
        self.window.1 = self.window.1.max(trip);
        if number >= self.next {
            self.forget(self.next, number);
            self.next = number + 1;
            self.mark(number);
            self.counts.received += 1;
        } else if number + WINDOW < self.next || self.mark(number) {
            // Outside the window its earlier return is unknown: it counts as a duplicate, and stays lost.
            self.counts.duplicated += 1;
        } else {
            self.counts.reordered += 1;
            self.counts.received += 1;
        }
    }

    /// Marks the numbers from `from` to `to`, which enter the window, as not come back.
    fn forget(&mut self, from: u64, to: u64) {
        if to - from >= WINDOW {
            self.came.fill(0);
            return;
        }
        for number in from..=to {
            self.came[(number % WINDOW / 64) as usize] &= !(1 << (number % 64));
        }
    }

    /// Marks a number as come back; returns whether it was marked already.
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
        if self.paused || now < self.paused_until || self.counts.sent >= self.options.count {
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
        match (Self::number_of(frame), pause_ns(frame)) {
            (Some(number), _) if self.is_ours(frame) => self.judge(number, frame, now),
            (_, Some(time)) => {
                self.counts.pauses += 1;
                if self.options.honours_pause {
                    self.paused_until = if self.patient && time > PATIENT_NS { u64::MAX } else { now + time };
                    // Frames not sent meanwhile are not made up for.
                    self.due = None;
                }
            }
            _ => self.counts.foreign += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PAUSE, PAUSE_TO};
    use super::*;

    const OPTIONS: SourceOptions =
        SourceOptions { to: [2; 6], from: [4; 6], size: 64, rate: None, count: 1 << 40, honours_pause: true };

    fn sent(source: &mut Source, count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|_| source.receive(0).unwrap().to_vec()).collect()
    }

    #[test]
    fn frames_are_numbered() {
        let mut source = Source::new(OPTIONS);
        let frames = sent(&mut source, 3);
        assert_eq!(
            frames.iter().map(|frame| Source::number_of(frame)).collect::<Vec<_>>(),
            [Some(0), Some(1), Some(2)]
        );
        assert_eq!((frames[0].len(), &frames[0][..6]), (60, &[2; 6][..]));
        // docs/design/sim.md, byte by byte.
        source.receive(0);
        let frame = source.receive(0x0102).unwrap();
        assert_eq!(
            frame[..40],
            [
                &[2; 6][..],
                &[4; 6],
                &[0x88, 0xb5],
                b"tsk\x01",
                &[4, 0, 0, 0, 0, 0, 0, 0],
                &[2, 1, 0, 0, 0, 0, 0, 0],
                &[0, 1, 2, 3, 4, 5]
            ]
            .concat()
        );
        assert_eq!(Source::number_of(&[0; 60]), None);
    }

    #[test]
    fn what_came_back_is_counted_once_and_in_its_order() {
        let mut source = Source::new(OPTIONS);
        let frames = sent(&mut source, 6);
        let mut damaged = frames[5].clone();
        damaged[50] ^= 1;
        for (now, frame) in
            (0..).step_by(100).zip([&frames[0], &frames[3], &frames[1], &frames[3], &frames[1], &damaged, &vec![0; 60]])
        {
            source.send(frame, now);
        }
        source.send(&frames[4], 5000);
        let counts = source.counts();
        assert_eq!((counts.received, counts.lost()), (4, 2), "2 and 5");
        assert_eq!((counts.reordered, counts.duplicated, counts.damaged, counts.foreign), (1, 2, 1, 1));
        assert_eq!((counts.longest_gap, counts.longest_trip), (5000 - 400, 5000));
    }

    #[test]
    fn what_another_source_numbered_is_not_ours() {
        let mut source = Source::new(OPTIONS);
        let mut frame = sent(&mut source, 1).pop().unwrap();
        frame[6..12].fill(6);
        source.send(&frame, 0);
        // Addressed to us it is ours.
        frame[..6].fill(4);
        source.send(&frame, 0);
        assert_eq!((source.counts().foreign, source.counts().received, source.counts().damaged), (1, 1, 0));
    }

    #[test]
    fn a_number_from_far_behind_is_not_taken_for_a_new_one() {
        let mut source = Source::new(OPTIONS);
        let frames = sent(&mut source, 1);
        source.send(&frames[0], 0);
        let last = sent(&mut source, 3 << 16).pop().unwrap();
        source.send(&last, 0);
        source.send(&frames[0], 0);
        let near = Source::number_of(&last).unwrap() - 5;
        let mut frame = last.clone();
        frame[18..26].copy_from_slice(&near.to_le_bytes());
        source.send(&frame, 0);
        let counts = source.counts();
        assert_eq!((counts.received, counts.duplicated, counts.reordered), (3, 1, 1));
    }

    #[test]
    fn a_rate_is_kept_and_lateness_is_not_made_up_for_beyond_64_frames() {
        let mut source =
            Source::new(SourceOptions { rate: Some(SourceOptions::line_rate(1_000_000_000, 64)), ..OPTIONS });
        let mut until = |now| std::iter::from_fn(|| source.receive(now).map(|_| ())).count();
        assert_eq!(until(0), 1);
        // 1,488,095 per second: one in 672 ns.
        assert_eq!((1..=10_000).map(|step| until(step * 67)).sum::<usize>(), 10_000 * 67 / 672);
        assert_eq!(until(1_000_000_000), 65);
        assert_eq!(source.counts().slipped, 1);
    }

    #[test]
    fn a_pause_frame_is_kept() {
        let mut source = Source::new(OPTIONS);
        let mut pause = vec![0; 60];
        pause[..6].copy_from_slice(&PAUSE_TO);
        pause[12..16].copy_from_slice(&PAUSE);
        pause[17] = 10;
        source.send(&pause, 1000);
        assert!(source.receive(1000 + 5119).is_none());
        assert!(source.receive(1000 + 5120).is_some());
        pause[17] = 0xff;
        source.send(&pause, 10_000);
        pause[17] = 0;
        source.send(&pause, 10_001);
        assert!(source.receive(10_002).is_some());
        assert_eq!(source.counts().pauses, 3);
    }
}
