//! Limits on how much a node sends and receives.

use serde::{Deserialize, Serialize};
use tasuki_relay::message;
use tasuki_tap::{Waiting, packet};
use utoipa::ToSchema;

/// Limits on the frames of a node. Those that it sends too fast wait where its programs put them; those that it is
/// sent too fast are dropped and counted (`dropped_over_rate`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Frames that it sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub send: Option<Limit>,
    /// Frames that it receives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive: Option<Limit>,
}

impl Limits {
    /// Returns both limits, as workers know them: what the node sends, and what it receives.
    pub(super) fn message(self) -> [message::Limit; 2] {
        let [send, receive] = BURSTS_MS;
        [(self.send, send), (self.receive, receive)]
            .map(|(limit, burst_ms)| limit.map(|limit| limit.message(burst_ms)).unwrap_or_default())
    }

    /// Returns the fault of a limit, if there is one.
    pub(super) fn odd(self) -> Option<String> {
        if self.send.is_none() && self.receive.is_none() {
            return Some("limits names no limit; name send, receive, or both, or leave it out".to_owned());
        }
        let set = [("limits.send", self.send), ("limits.receive", self.receive)];
        set.into_iter().find_map(|(key, limit)| limit?.odd().map(|what| format!("{key} {what}")))
    }
}

/// A limit on the frames of one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Megabits (1,000,000 bits) a second, of frames without check sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000)]
    pub mbit: Option<u32>,
    /// Thousands of frames a second. A segment of up to 64 KiB counts as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000)]
    pub kpps: Option<u32>,
    /// After a pause, frames of this many ms go at once; by default 10 ms of those that the node sends, and 200 of those
    /// that it receives: TCP does not reach a limit that drops frames after less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub burst_ms: Option<u32>,
}

/// The bursts of what a node sends and of what it receives, in ms.
const BURSTS_MS: [u32; 2] = [10, 200];

/// How long what a node sends too fast waits in the kernel, in ms, unless its burst is longer. What comes then is dropped: an
/// answer to ARP waits behind it, and neighbours ask for a few seconds.
const WAIT_MS: u64 = 200;

/// The least and the most frames that wait in a queue: TCP begins with ten, and the kernel's own queue has a thousand.
const FRAMES: (u64, u64) = (16, 1000);

/// Bytes of a segment, and of a frame of Ethernet, at most.
const SEGMENT: u64 = 64 << 10;
const FRAME: u64 = 1514;

/// Bits a second from which a node's interface sends segments of 16 KiB at least. They have too few places in a queue for
/// slower nodes; to cut them takes a CPU at 100 to 300 Mbit/s.
const SEGMENTS_FROM: u64 = 50_000_000;

/// Returns the bytes and the frames that a node may send while the last of them waits, if they are limited.
fn waits(limit: message::Limit) -> [Option<u64>; 2] {
    let ms = u64::from(limit.burst_ms).max(WAIT_MS);
    [limit.bits / 8, limit.frames].map(|rate| (rate > 0).then(|| rate * ms / 1000))
}

/// Returns what waits in each of several queues of a namespace's interface, by a limit on what its node sends, with frames of
/// `longest` bytes at most; `None` if there is no limit.
pub(crate) fn in_queue(limit: message::Limit, longest: u64, queues: usize) -> Option<Waiting> {
    let [bytes, frames] = waits(limit);
    let (least, most) = FRAMES;
    let segment = match bytes {
        None => SEGMENT,
        Some(_) if limit.bits < SEGMENTS_FROM => longest.max(FRAME),
        Some(bytes) => (bytes / most).clamp(SEGMENT / 4, SEGMENT),
    };
    let frames = bytes.map(|bytes| bytes / segment).into_iter().chain(frames).min()? / queues.max(1) as u64;
    // What may go at once has room, also if one flow sends it in short frames. A longer burst shares the room.
    let burst_ms = u64::from(limit.burst_ms.min(BURSTS_MS[0]));
    let [bits, at_once] = [limit.bits, limit.frames].map(|rate| rate * burst_ms / 1000);
    let at_once = [(limit.bits, bits / 8 / longest.max(FRAME)), (limit.frames, at_once)];
    let at_once = at_once.into_iter().filter_map(|(rate, frames)| (rate > 0).then_some(frames)).min();
    let frames = frames.max(at_once.unwrap_or(0));
    let [frames, segment] =
        [frames.clamp(least, most), segment].map(|number| u32::try_from(number).expect("few frames, or bytes"));
    Some(Waiting { frames, segment })
}

/// Returns the bytes of room of a packet socket by a limit on what its node sends. The kernel doubles that, as its own parts
/// of a frame count, too.
pub(crate) fn in_socket(limit: message::Limit) -> i32 {
    let [bytes, frames] = waits(limit);
    let bytes = bytes.into_iter().chain(frames.map(|frames| frames * FRAME)).min();
    let room = bytes.and_then(|bytes| i32::try_from((bytes / 2).max(FRAMES.0 * FRAME)).ok());
    room.map_or(packet::ROOM, |room| room.min(packet::ROOM))
}

impl Limit {
    fn message(self, usual_ms: u32) -> message::Limit {
        let Limit { mbit, kpps, burst_ms } = self;
        let each = |value: Option<u32>, unit: u64| u64::from(value.unwrap_or(0)) * unit;
        let burst_ms = burst_ms.unwrap_or(usual_ms);
        message::Limit { bits: each(mbit, 1_000_000), frames: each(kpps, 1000), burst_ms }
    }

    /// Returns the fault of the limit, if there is one.
    fn odd(self) -> Option<String> {
        let Limit { mbit, kpps, burst_ms } = self;
        if mbit.is_none() && kpps.is_none() {
            return Some("names no limit; name mbit, kpps, or both, or leave it out".to_owned());
        }
        let set = [("mbit", mbit, 1_000_000), ("kpps", kpps, 1_000_000), ("burst_ms", burst_ms, 1000)];
        set.into_iter().find_map(|(key, value, most)| {
            let value = value.filter(|value| !(1..=most).contains(value))?;
            Some(format!("has {key} = {value}, which is not in the range 1 to {most}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: message::Limit = message::Limit { bits: 0, frames: 0, burst_ms: 10 };

    fn mbit(mbit: u64) -> message::Limit {
        message::Limit { bits: mbit * 1_000_000, ..NONE }
    }

    #[test]
    fn what_waits_in_a_queue_goes_within_200_ms() {
        for (limit, longest, queues, frames, segment) in [
            (mbit(1), FRAME, 1, 16, 1514),
            (mbit(10), FRAME, 1, 165, 1514),
            (mbit(10), FRAME, 4, 41, 1514),
            (mbit(10), 9014, 1, 27, 9014),
            (mbit(50), FRAME, 1, 76, 16384),
            (mbit(50), FRAME, 4, 41, 16384),
            (message::Limit { burst_ms: 200, ..mbit(50) }, FRAME, 1, 76, 16384),
            (message::Limit { burst_ms: 1000, ..mbit(10) }, FRAME, 4, 206, 1514),
            (mbit(500), FRAME, 1, 762, 16384),
            (mbit(1000), FRAME, 1, 1000, 25000),
            (mbit(1_000_000), FRAME, 1, 1000, 65536),
            (message::Limit { frames: 1000, ..NONE }, FRAME, 1, 200, 65536),
            // The tighter of the two holds, and a burst that is longer.
            (message::Limit { frames: 500, ..mbit(10) }, FRAME, 1, 100, 1514),
            (message::Limit { burst_ms: 1000, ..mbit(1) }, FRAME, 1, 82, 1514),
        ] {
            assert_eq!(in_queue(limit, longest, queues), Some(Waiting { frames, segment }), "{limit:?}, {queues}");
        }
        assert_eq!(in_queue(NONE, FRAME, 1), None);
    }

    #[test]
    fn what_waits_in_a_socket_goes_within_200_ms() {
        let frames = message::Limit { frames: 1000, ..NONE };
        let rooms = [mbit(1), mbit(10), mbit(1_000_000), frames, NONE].map(in_socket);
        assert_eq!(rooms, [24_224, 125_000, packet::ROOM, 151_400, packet::ROOM]);
    }
}
