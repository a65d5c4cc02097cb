//! Durations for the records of campaigns. No test passes or fails by them.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

/// A list of durations.
#[derive(Debug, Default)]
pub struct Times(pub Vec<Duration>);

impl Times {
    /// Returns the quantile at `thousandths`.
    pub fn at(&self, thousandths: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let place = (thousandths * sorted.len().saturating_sub(1)).div_ceil(1000);
        sorted.get(place).copied().unwrap_or_default()
    }

    /// Returns statistics for a record.
    pub fn to_json(&self) -> Value {
        let ms = |thousandths| (self.at(thousandths).as_secs_f64() * 1e6).round() / 1000.0;
        json!({ "count": self.0.len(), "p50_ms": ms(500), "p99_ms": ms(990), "max_ms": ms(1000) })
    }
}

/// Returns a number from the environment of a campaign.
pub fn asked(name: &str) -> Option<usize> {
    std::env::var(name).ok().and_then(|count| count.parse().ok())
}

/// Prints the observations of a campaign, and writes them to the requested file.
pub fn record(seen: &Value) {
    let text = serde_json::to_string_pretty(seen).expect("plain data");
    println!("{text}");
    if let Some(path) = std::env::var_os("TASUKI_CAMPAIGN_JSON").map(PathBuf::from) {
        std::fs::write(path, text + "\n").expect("a file");
    }
}
