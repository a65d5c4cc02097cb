//! `campaign`: repeats the suite's random trials thousands of times. The observations are kept as a record, like a
//! benchmark's.

use std::path::PathBuf;

use clap::Subcommand;

use crate::checkout::Checkout;
use crate::stream;

#[derive(Subcommand)]
pub enum Campaign {
    /// Kill workers, stand-bys, openers, keeper and daemon by SIGKILL at random times under traffic: single, double
    /// and triple faults. Needs root
    Kills {
        /// Number of single faults; for every 20 of them come three double faults, one double fault in a storm, and
        /// one triple fault with the daemon
        #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
        kills: u32,
        /// Run one kind of faults only
        #[arg(long, value_parser = ["singles", "doubles", "storm", "triples"])]
        only: Option<String>,
        /// Seed of victims and times, as an earlier run printed it
        #[arg(long)]
        seed: Option<u64>,
        /// Write the observations to this file
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Freeze a driving worker at random times under traffic; measure how long a freeze takes, and the locks that the
    /// worker holds then. Needs root
    Freezes {
        /// Number of freezes for each card
        #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
        freezes: u32,
        /// Seed of the times, as an earlier run printed it
        #[arg(long)]
        seed: Option<u64>,
        /// Write the observations to this file
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Run random operations, several at once, and check after each round that all is as the configuration file has it,
    /// and that nodes that no operation touched lost nothing. Needs root
    Operations {
        /// Begin no round after so many minutes
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
        minutes: u32,
        /// Number of rounds at most
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: Option<u32>,
        /// Seed of the first world, as an earlier campaign printed it
        #[arg(long)]
        seed: Option<u64>,
        /// Write the observations to this file
        #[arg(long)]
        json: Option<PathBuf>,
    },
}

/// Runs a campaign. Returns whether it passed.
pub fn run(checkout: &Checkout, campaign: &Campaign) -> anyhow::Result<bool> {
    let (test, asked, seed, json) = match campaign {
        Campaign::Kills { kills, only, seed, json } => (
            "daemon::deaths::whoever_dies_alone_or_with_others_nothing_is_lost_and_nobody_is_asked",
            [Some(("TASUKI_KILLS", kills.to_string())), only.clone().map(|only| ("TASUKI_KILLS_ONLY", only))],
            seed,
            json,
        ),
        Campaign::Freezes { freezes, seed, json } => (
            "daemon::freezes::a_worker_that_is_frozen_at_any_time_stops_and_goes_on_and_nothing_is_lost",
            [Some(("TASUKI_FREEZES", freezes.to_string())), None],
            seed,
            json,
        ),
        Campaign::Operations { minutes, rounds, seed, json } => (
            "daemon::operations::after_random_operations_all_is_as_the_file_has_it_and_bystanders_noticed_nothing",
            [Some(("TASUKI_MINUTES", minutes.to_string())), rounds.map(|rounds| ("TASUKI_ROUNDS", rounds.to_string()))],
            seed,
            json,
        ),
    };
    let mut programs = checkout.cargo("build");
    if !stream::succeeds(programs.args(["--workspace", "--bins", "--all-features"]))? {
        return Ok(false);
    }
    let mut command = checkout.cargo("test");
    command.args(["--package", "tasuki-control", "--all-features", "--test", "suite", "--", "--nocapture", "--exact"]);
    command.arg(test).envs(asked.into_iter().flatten()).envs(seed.map(|seed| ("TASUKI_SEED", seed.to_string())));
    if let Some(json) = json {
        // The test runs in another folder.
        command.env("TASUKI_CAMPAIGN_JSON", std::path::absolute(json)?);
    }
    stream::succeeds(&mut command)
}
