//! The numbered stream at the guest's wire, and its fate at each relay.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::time::Instant;

use anyhow::{Context, Result};
use tasuki_sim::wire::{Counts, Source, SourceOptions, Wire as _};

use super::machine::MAC;

/// Our MAC address. Its last four bytes carry the number of relays we have seen, which tells the guest that its
/// frames arrive.
const US: [u8; 6] = [0x02, 0, 0, 0, 0, 0];

/// Bytes of a frame with its check sequence: 1 KB of UDP in the paper of S0.
const SIZE: u32 = 1024 + 46;

/// Offset at which the echoing process writes the number of relays so far (crates/tasuki-net/examples/guest_relay).
const RELAYS_AT: usize = 8;

/// Place of the destination address in a received frame.
const TO: std::ops::Range<usize> = 0..6;

/// Fate of the stream.
#[derive(Debug, Default)]
pub struct Seen {
    /// Counts over the whole stream.
    pub counts: Counts,
    /// Gap at each relay, in ns: from the last frame of before the relay to the first of after it.
    pub gaps: Vec<u64>,
    /// Longest time without a frame between relays, in ns; the first entry is from before any relay.
    pub rests: Vec<u64>,
    /// Number of frames missing between relays, likewise; frames missing at a relay count after it.
    pub lost: Vec<u64>,
    /// Most frames under way.
    pub held: u64,
    next: u64,
    last_at: Option<u64>,
}

impl Seen {
    fn note(&mut self, number: u64, relays: usize, now: u64) {
        let gap = self.last_at.map_or(0, |last| now.saturating_sub(last));
        self.last_at = Some(now);
        if relays >= self.rests.len() {
            if !self.rests.is_empty() {
                self.gaps.push(gap);
            }
            // More than one relay, if no frame came between two of them.
            self.rests.resize(relays + 1, 0);
            self.lost.resize(relays + 1, 0);
        } else {
            self.rests[relays] = self.rests[relays].max(gap);
        }
        self.lost[relays] += number.saturating_sub(self.next);
        self.next = self.next.max(number + 1);
    }
}

/// A source of frames, and its wire.
#[derive(Debug)]
pub struct Stream {
    source: Source,
    wire: UnixDatagram,
    seen: Seen,
    began: Instant,
    bytes: Box<[u8]>,
    relays_max: usize,
}

impl Stream {
    /// Starts sending `rate` frames a second. The echoing process changes at most `relays_max` times.
    pub fn begin(wire: UnixDatagram, rate: u64, relays_max: u32) -> Result<Self> {
        let options =
            SourceOptions { to: MAC, from: US, size: SIZE, rate: Some(rate), count: u64::MAX, honours_pause: true };
        Ok(Stream {
            source: Source::new(options),
            wire,
            seen: Seen::default(),
            began: Instant::now(),
            bytes: vec![0; 1 << 16].into_boxed_slice(),
            relays_max: usize::try_from(relays_max)?,
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Sends the due frames. Frames that the wire does not take are lost, as on any wire.
    pub fn send(&mut self) -> Result<()> {
        let now = self.now();
        let seen = u32::try_from(self.seen.rests.len().saturating_sub(1))?.to_be_bytes();
        while let Some(frame) = self.source.receive(now) {
            let bytes = &mut self.bytes[..frame.len()];
            bytes.copy_from_slice(frame);
            bytes[RELAYS_AT..RELAYS_AT + seen.len()].copy_from_slice(&seen);
            match self.wire.send(bytes) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Err(error).context("the guest's end of the wire is gone");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes all received frames; returns whether there were any.
    pub fn receive(&mut self) -> Result<bool> {
        let mut came = false;
        loop {
            let len = match self.wire.recv(&mut self.bytes) {
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(came),
                Err(error) => return Err(error).context("the guest's end of the wire is gone"),
            };
            let now = self.now();
            let frame = &mut self.bytes[..len];
            if Source::number_of(frame).is_some() {
                frame[TO].copy_from_slice(&US);
            }
            let before = self.source.counts();
            self.source.send(frame, now);
            let after = self.source.counts();
            if let Some(number) = Source::number_of(frame)
                && after.received > before.received
            {
                came = true;
                let relays = frame[RELAYS_AT..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
                let relays = usize::try_from(relays)?.min(self.relays_max);
                self.seen.note(number, relays, now);
                self.seen.held = self.seen.held.max(after.sent - number);
            }
        }
    }

    /// Ends the stream and returns its fate. The caller makes sure that no frame is under way any more.
    pub fn end(self) -> Seen {
        Seen { counts: self.source.counts(), ..self.seen }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_is_from_the_last_frame_before_it_to_the_first_after_it() {
        let mut seen = Seen::default();
        // Number, relays so far, time.
        for (number, relays, now) in [(0, 0, 10), (1, 0, 40), (2, 1, 100), (5, 1, 110), (6, 3, 200), (7, 3, 207)] {
            seen.note(number, relays, now);
        }
        assert_eq!(seen.gaps, [60, 90], "two relays without a frame in between are one");
        assert_eq!(seen.rests, [30, 10, 0, 7]);
        assert_eq!(seen.lost, [0, 2, 0, 0]);
    }

    #[test]
    fn what_the_wire_does_not_take_is_lost_and_what_comes_back_is_not() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut stream = Stream::begin(ours, 1_000_000_000, 1).unwrap();
        let mut bytes = [0; 2048];
        let mut frames = Vec::new();
        // Until the wire has no room any more.
        for _ in 0..64 {
            stream.send().unwrap();
        }
        while let Ok(len) = theirs.recv(&mut bytes) {
            frames.push(bytes[..len].to_vec());
        }
        for (number, mut frame) in (0_u32..).zip(frames.clone()) {
            frame[8..12].copy_from_slice(&u32::from(number > 0).to_be_bytes());
            theirs.send(&frame).unwrap();
            stream.receive().unwrap();
        }
        let seen = stream.end();
        assert_eq!(seen.counts.received, frames.len() as u64);
        assert!(seen.counts.lost() > 0 && seen.gaps.len() == 1, "{:?}", seen.counts);
    }
}
