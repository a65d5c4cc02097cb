//! Settings of the daemon.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Settings of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Milliseconds after which a driver that has not looked for work counts as hung.
    #[schema(minimum = 1)]
    pub hang_after_ms: u64,
    /// Milliseconds a giver or a taker may take for its part of a relay.
    #[schema(minimum = 1)]
    pub deadline_ms: u64,
    /// Milliseconds a worker may take to map a NIC and to check that it understands it.
    #[schema(minimum = 1)]
    pub prepare_ms: u64,
    /// Milliseconds for which no worker of its node has driven a NIC, its last one being dead, after which the NIC goes to
    /// its stand-by node.
    #[schema(minimum = 1)]
    pub failover_after_ms: u64,
    /// Whether a node whose workers keep dying waits before the next worker starts.
    pub restart: Restart,
    /// The treatment of a worker whose process cannot be confined as intended.
    pub confine: Confine,
    /// Range of users, of which each node gets one: the first and the last, by number, as 65536-99999.
    #[schema(value_type = String, pattern = "^[0-9]+-[0-9]+$")]
    pub uids: Uids,
    /// The address at which anybody may read the counts for Prometheus (`/metrics`); none by default.
    #[serde(deserialize_with = "listened_at")]
    #[schema(value_type = Option<String>)]
    pub metrics: Option<SocketAddr>,
    /// The default worker program, from `/`; by default `tasuki-worker` beside the daemon, or on the PATH.
    #[schema(value_type = Option<String>, pattern = "^/")]
    pub worker: Option<PathBuf>,
}

fn listened_at<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(|_| {
        serde::de::Error::custom(format!(
            "{text:?} is no address to listen at; write it with a port, as 127.0.0.1:9469"
        ))
    })
}

impl Default for Daemon {
    fn default() -> Self {
        Daemon {
            hang_after_ms: 1000,
            deadline_ms: 1000,
            prepare_ms: 10_000,
            // As long as the longest pause before a fresh worker: five have been tried by then.
            failover_after_ms: 1000,
            restart: Restart::Careful,
            confine: Confine::Strict,
            uids: Uids::default(),
            metrics: None,
            worker: None,
        }
    }
}

impl Daemon {
    pub fn hang_after(&self) -> Duration {
        Duration::from_millis(self.hang_after_ms)
    }

    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    pub fn prepare(&self) -> Duration {
        Duration::from_millis(self.prepare_ms)
    }

    pub fn failover_after(&self) -> Duration {
        Duration::from_millis(self.failover_after_ms)
    }
}

/// When a dead worker is replaced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// After pauses that grow to a second.
    #[default]
    Careful,
    /// At once, always, for operators who kill workers on purpose.
    Always,
}

/// The treatment of a worker that cannot be confined as docs/design/worker.md says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Confine {
    /// It is not started.
    Strict,
    /// It is started, and `tasuki status` lists the missing restrictions.
    BestEffort,
    /// The daemon confines nothing before the worker begins: for tests whose workers are scripts, and a debugger.
    /// The worker's runtime still confines itself.
    Off,
}

/// Users by number, the first and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Uids(u32, u32);

impl Default for Uids {
    fn default() -> Self {
        // Neither systemd nor adduser assigns these, and no container gets them (systemd's UIDS-GIDS).
        Uids(65536, 99999)
    }
}

impl TryFrom<String> for Uids {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let ends = text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
        match ends {
            Some((first, last)) if 0 < first && first <= last && last < u32::MAX - 1 => Ok(Uids(first, last)),
            _ => Err(format!("{text:?} names no users; write the first and the last, without root, as 65536-99999")),
        }
    }
}

impl From<Uids> for String {
    fn from(Uids(first, last): Uids) -> String {
        format!("{first}-{last}")
    }
}

impl Uids {
    /// Returns whether the range includes a user.
    pub fn has(&self, uid: u32) -> bool {
        (self.0..=self.1).contains(&uid)
    }

    /// Returns all users of the range, from a place that `seed` determines.
    pub fn from(self, seed: u32) -> impl Iterator<Item = u32> {
        let count = self.1 - self.0 + 1;
        (0..count).map(move |step| self.0 + (seed % count + step) % count)
    }
}
