//! Huge pages for the peer that needs them, returned afterwards.

use std::fs;

use anyhow::{Context, Result, ensure};

/// Number of huge pages in the kernel's pool.
const TOTAL: &str = "/proc/sys/vm/nr_hugepages";

/// Needed number of free 2 MiB pages.
const NEEDED: u64 = 512;

/// Reserved huge pages. Dropping it restores the earlier number, also after a failure.
#[derive(Debug)]
pub struct HugePages {
    /// Earlier number, if it was too low.
    before: Option<u64>,
}

impl HugePages {
    /// Makes sure that enough huge pages are free.
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

/// Returns a number of `/proc/meminfo`.
fn count(name: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo cannot be read")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next()).and_then(|number| number.parse().ok());
    number.with_context(|| format!("/proc/meminfo says nothing of {name}"))
}
