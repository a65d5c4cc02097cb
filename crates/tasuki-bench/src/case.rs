//! Definition of a case, and the list of all cases.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};

use crate::cpus::Cores;
use crate::orders::Orders;
use crate::sample::Sample;
use crate::{call, demo, floors, nic, peers, relay, vni};

/// One thing to measure: two processes, one of which serves calls that the other times.
///
/// The bench starts a role by name in a process of its own. Everything a case needs must therefore come through its
/// [`Orders`].
#[derive(Debug)]
pub struct Case {
    /// Short, stable, unique name.
    pub name: &'static str,
    pub cores: Cores,
    /// Number of calls measured per round of a `--quick` run; about a quarter of a second's worth.
    pub calls: u64,
    /// Factor by which a full run multiplies `calls`.
    pub full: u64,
    /// Makes the descriptors for the two roles. Runs in the bench's own process.
    pub prepare: fn() -> Result<Ends>,
    /// Answers [`Orders::total`] calls.
    pub serve: Serve,
    /// Makes [`Orders::total`] calls and times all but the warm-up.
    pub measure: Measure,
}

/// A role that answers, and one that measures.
pub type Serve = fn(Orders) -> Result<()>;
pub type Measure = fn(Orders) -> Result<Sample>;

/// Descriptors that a case prepares, by the role that holds them.
#[derive(Debug, Default)]
pub struct Ends {
    pub server: Vec<OwnedFd>,
    pub client: Vec<OwnedFd>,
}

impl Ends {
    /// Returns no descriptors, for cases whose roles find each other by [`Orders::directory`] or
    /// [`Orders::shm_prefix`].
    pub fn none() -> Result<Self> {
        Ok(Ends::default())
    }
}

/// Returns the cases of the bench `call`, in the order in which a round runs them.
pub fn of_call() -> Vec<&'static Case> {
    floors::CASES.iter().chain(call::CASES).chain(peers::cases()).collect()
}

/// Returns the cases of the bench `nic`, in the order in which a round runs them.
pub fn of_nic() -> Vec<&'static Case> {
    nic::floors().chain(nic::CASES).collect()
}

/// Returns the cases of the bench `relay`, in the order in which a round runs them.
pub fn of_relay() -> Vec<&'static Case> {
    relay::floors().chain(relay::cases()).collect()
}

/// Returns the cases of the bench `vni`, in the order in which a round runs them.
pub fn of_vni() -> Vec<&'static Case> {
    vni::cases().collect()
}

fn all() -> impl Iterator<Item = &'static Case> {
    of_call().into_iter().chain(nic::CASES).chain(relay::CASES).chain(relay::APART).chain(vni::CASES).chain(demo::CASES)
}

/// Returns the case of that name.
pub fn find(name: &str) -> Result<&'static Case> {
    all().find(|case| case.name == name).with_context(|| format!("there is no case named {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_one_case() {
        let mut names: Vec<_> = all().map(|case| case.name).collect();
        let before = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), before);
    }

    #[test]
    fn an_unknown_case_is_named_in_the_refusal() {
        assert!(find("pigeon").unwrap_err().to_string().contains("pigeon"));
    }
}
