//! Limits on how much a node sends and receives.

use serde::{Deserialize, Serialize};
use tasuki_relay::message;
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
