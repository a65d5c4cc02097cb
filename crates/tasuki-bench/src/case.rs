//! What a case is, and the list of all cases.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};

use crate::cpus::Cores;
use crate::orders::Orders;
use crate::sample::Sample;
use crate::{call, demo, floors, nic, peers, relay, vni};

/// One thing to measure: two processes, one of which serves calls that the other times.
///
/// A role is started by name in a process of its own, so all that a case needs must come through
/// its [`Orders`].
#[derive(Debug)]
pub struct Case {
    /// Short, stable, unique.
    pub name: &'static str,
    /// Where the two roles run.
    pub cores: Cores,
    /// Calls measured per round of a `--quick` run. About a quarter of a second's worth.
    pub calls: u64,
    /// So many times as many in a full run.
    pub full: u64,
    /// Makes the descriptors that the roles are given. Runs in the bench's own process.
    pub prepare: fn() -> Result<Ends>,
    /// Answers [`Orders::total`] calls.
    pub serve: fn(Orders) -> Result<()>,
    /// Makes [`Orders::total`] calls and times all but the warm-up.
    pub measure: fn(Orders) -> Result<Sample>,
}

/// The descriptors that a case prepares, each for the one role that holds it.
#[derive(Debug, Default)]
pub struct Ends {
    /// For the serving role.
    pub server: Vec<OwnedFd>,
    /// For the measuring role.
    pub client: Vec<OwnedFd>,
}

impl Ends {
    /// For cases whose roles find each other by [`Orders::directory`] or [`Orders::shm_prefix`].
    pub fn none() -> Result<Self> {
        Ok(Ends::default())
    }
}

/// The cases of the bench `call`, in the order in which a round runs them.
pub fn of_call() -> Vec<&'static Case> {
    floors::CASES.iter().chain(call::CASES).chain(peers::cases()).collect()
}

/// The cases of the bench `nic`, in the order in which a round runs them.
pub fn of_nic() -> Vec<&'static Case> {
    nic::floors().chain(nic::CASES).collect()
}

/// The cases of the bench `relay`, in the order in which a round runs them.
pub fn of_relay() -> Vec<&'static Case> {
    relay::floors().chain(relay::cases()).collect()
}

/// The cases of the bench `vni`, in the order in which a round runs them.
pub fn of_vni() -> Vec<&'static Case> {
    vni::cases().collect()
}

/// Every case there is.
fn all() -> impl Iterator<Item = &'static Case> {
    of_call().into_iter().chain(nic::CASES).chain(relay::CASES).chain(relay::APART).chain(vni::CASES).chain(demo::CASES)
}

/// The case of that name.
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
