//! Huge pages for the peer that needs them, given back afterwards.

use std::fs;

use anyhow::{Context, Result, ensure};

/// How many there are.
const TOTAL: &str = "/proc/sys/vm/nr_hugepages";

/// So many of 2 MiB.
const NEEDED: u64 = 512;

/// Huge pages that were made. As many as before are there when this is dropped, whatever went wrong meanwhile.
#[derive(Debug)]
pub struct HugePages {
    /// How many there were, if they were too few.
    before: Option<u64>,
}

impl HugePages {
    /// Sees to it that enough are free.
    pub fn reserve() -> Result<Self> {
        let (total, free) = (count("HugePages_Total:")?, count("HugePages_Free:")?);
        if free >= NEEDED {
            return Ok(HugePages { before: None });
        }
        let advice = format!("it takes {NEEDED} free huge pages of 2 MiB, and {free} are free");
        ensure!(
            count("Hugepagesize:")? == 2048,
            "{advice}; let them be the default (default_hugepagesz=2M for the kernel)"
        );
        let made = fs::write(TOTAL, (total + NEEDED - free).to_string());
        made.with_context(|| format!("{advice}; run this as root, or have root say sysctl vm.nr_hugepages={NEEDED}"))?;
        let pages = HugePages { before: Some(total) };
        let free = count("HugePages_Free:")?;
        ensure!(
            free >= NEEDED,
            "it takes {NEEDED} huge pages of 2 MiB, and the kernel found only {free}; free some memory"
        );
        Ok(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = self.before
            && let Err(error) = fs::write(TOTAL, before.to_string())
        {
            eprintln!("{TOTAL} could not be set to {before} again, as it was: {error}");
        }
    }
}

/// A number of `/proc/meminfo`.
fn count(name: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo cannot be read")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next()).and_then(|number| number.parse().ok());
    number.with_context(|| format!("/proc/meminfo says nothing of {name}"))
}
