//! `tasuki config`: the JSON Schema of the configuration.

use anyhow::Result;
use clap::Subcommand;

use super::write;
use crate::config;

/// Subcommands about the configuration.
#[derive(Debug, Subcommand)]
pub enum Configs {
    /// Print the JSON Schema of configurations: editors complete and check a file by it.
    Schema,
}

/// Carries one of them out.
pub fn run(configs: &Configs) -> Result<()> {
    match configs {
        Configs::Schema => write(&config::schema::text()).map(drop),
    }
}
