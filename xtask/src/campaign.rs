//! `campaign`: what the suite tries a few times, thousands of times. What was seen is kept as a record, like a benchmark's.

use std::path::PathBuf;

use clap::Subcommand;

use crate::checkout::Checkout;
use crate::stream;

#[derive(Subcommand)]
pub enum Campaign {
    /// SIGKILLs of workers, stand-bys, openers, keeper and daemon at random times under traffic: single, double and triple faults. Needs root
    Kills {
        /// Single faults; for 20 of them there are three double faults, one in a storm and one with the daemon
        #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
        kills: u32,
        /// One kind of faults alone
        #[arg(long, value_parser = ["singles", "doubles", "storm", "triples"])]
        only: Option<String>,
        /// The seed of victims and times, as an earlier run printed it
        #[arg(long)]
        seed: Option<u64>,
        /// Write what was seen there
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Freezes of a worker that drives at random times under traffic: how long they take, and what it holds then. Needs root
    Freezes {
        /// Of each card
        #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
        freezes: u32,
        /// The seed of the times, as an earlier run printed it
        #[arg(long)]
        seed: Option<u64>,
        /// Write what was seen there
        #[arg(long)]
        json: Option<PathBuf>,
    },
}

/// Runs it; whether all held that has to.
pub fn run(checkout: &Checkout, campaign: &Campaign) -> anyhow::Result<bool> {
    let (test, asked, seed, json) = match campaign {
        Campaign::Kills { kills, only, seed, json } => (
            "deaths::whoever_dies_alone_or_with_others_nothing_is_lost_and_nobody_is_asked",
            [Some(("TASUKI_KILLS", kills.to_string())), only.clone().map(|only| ("TASUKI_KILLS_ONLY", only))],
            seed,
            json,
        ),
        Campaign::Freezes { freezes, seed, json } => (
            "freezes::a_worker_that_is_frozen_at_any_time_stops_and_goes_on_and_nothing_is_lost",
            [Some(("TASUKI_FREEZES", freezes.to_string())), None],
            seed,
            json,
        ),
    };
    let mut programs = checkout.cargo("build");
    if !stream::succeeds(programs.args(["--workspace", "--bins", "--all-features"]))? {
        return Ok(false);
    }
    let mut command = checkout.cargo("test");
    command.args(["--package", "tasuki-control", "--all-features", "--test", "daemon", "--", "--nocapture", "--exact"]);
    command.arg(test).envs(asked.into_iter().flatten()).envs(seed.map(|seed| ("TASUKI_SEED", seed.to_string())));
    if let Some(json) = json {
        // The test's folder is another.
        command.env("TASUKI_CAMPAIGN_JSON", std::path::absolute(json)?);
    }
    stream::succeeds(&mut command)
}
