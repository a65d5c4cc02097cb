//! Table of authority: the verdict on each report of each worker. A report that an honest worker cannot make in any
//! order of events is a breach. It costs that worker its life, and no other worker loses anything. Any report of a
//! worker that was never given the device is a breach.

use super::Is;
use crate::table::listed;
use crate::wire::Report;

listed! {
    /// Kind of a report.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Says {
        /// Its standing.
        Hello,
        /// It could go on at once.
        Ready,
        /// It cannot take the device.
        Unfit,
        /// It has passed the lease.
        Released,
        /// It keeps the lease.
        Kept,
        /// It has won the lease and drives.
        Taken,
        /// It waits for the lease no more.
        Lost,
        /// It has held the lease and passed it back.
        Failed,
        /// It was replaced while it held the lease.
        Replaced,
    }
}

impl Says {
    /// Returns the kind of a report.
    pub fn of(report: Report) -> Self {
        match report {
            Report::Hello { .. } => Says::Hello,
            Report::Ready => Says::Ready,
            Report::Unfit(_) => Says::Unfit,
            Report::Released { .. } => Says::Released,
            Report::Kept { .. } => Says::Kept,
            Report::Taken { .. } => Says::Taken,
            Report::Lost { .. } => Says::Lost,
            Report::Failed { .. } => Says::Failed,
            Report::Replaced { .. } => Says::Replaced,
        }
    }
}

/// Verdict on a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The report is heard.
    Hear,
    /// The report may have been true when it was sent, and means nothing now.
    Stale,
    /// The worker has no right to send the report.
    Breach,
}

/// A row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// For a worker in any of these conditions.
    pub of: &'static [Is],
    /// When it sends this report.
    pub says: Says,
    /// The verdict is this.
    pub then: Verdict,
    /// Reason for the verdict.
    pub because: &'static str,
}

/// Returns the verdict on a report, and the reason. A report that no row allows is a breach.
pub(super) fn verdict(rules: &[Rule], is: Is, says: Says) -> (Verdict, &'static str) {
    let rule = rules.iter().find(|rule| rule.says == says && rule.of.contains(&is));
    rule.map_or((Verdict::Breach, "no rule allows it"), |rule| (rule.then, rule.because))
}

/// The table.
#[rustfmt::skip]
pub const AUTHORITY: &[Rule] = {
    use Is::*;
    use Verdict::*;
    const AT_ITS_END: &[Is] = &[Left, Condemned, Fenced, Dead];
    const BEFORE: &str = "the worker sent it before it heard that its part is over";
    const LATER: &str = "the lease word said so before the report came";
    &[
        Rule { of: &[Unheard, Given, Ready, Waiting, Holding, Late, Unfit, Silent], says: Says::Hello, then: Hear, because: "a worker may always say how it stands" },
        Rule { of: AT_ITS_END, says: Says::Hello, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Given, Ready, Silent], says: Says::Ready, then: Hear, because: "it was told to prepare" },
        Rule { of: &[Waiting, Late], says: Says::Ready, then: Stale, because: "it was told twice to prepare, and to take since" },
        Rule { of: &[Holding], says: Says::Ready, then: Breach, because: "the driver was not told to prepare" },
        Rule { of: &[Unfit], says: Says::Ready, then: Breach, because: "a worker that cannot take the device cannot take it later" },
        Rule { of: AT_ITS_END, says: Says::Ready, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Given, Late, Unfit, Silent], says: Says::Unfit, then: Hear, because: "it was told to prepare" },
        Rule { of: &[Ready, Waiting], says: Says::Unfit, then: Breach, because: "a worker that is ready says by Failed that it cannot go on" },
        Rule { of: &[Holding], says: Says::Unfit, then: Breach, because: "the driver was not told to prepare" },
        Rule { of: AT_ITS_END, says: Says::Unfit, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Holding, Late, Silent], says: Says::Released, then: Hear, because: "only the driver passes the lease" },
        Rule { of: &[Ready, Waiting], says: Says::Released, then: Stale, because: LATER },
        Rule { of: &[Given, Unfit], says: Says::Released, then: Breach, because: "it did not drive" },
        Rule { of: AT_ITS_END, says: Says::Released, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Holding, Late, Silent], says: Says::Kept, then: Hear, because: "only the driver keeps the lease" },
        Rule { of: &[Ready, Waiting], says: Says::Kept, then: Stale, because: LATER },
        Rule { of: &[Given, Unfit], says: Says::Kept, then: Breach, because: "it did not drive" },
        Rule { of: AT_ITS_END, says: Says::Kept, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Ready, Waiting, Late, Silent], says: Says::Taken, then: Hear, because: "it was told to take; the lease word says whether it did" },
        Rule { of: &[Holding], says: Says::Taken, then: Stale, because: LATER },
        Rule { of: &[Given, Unfit], says: Says::Taken, then: Breach, because: "it was not told to take" },
        Rule { of: AT_ITS_END, says: Says::Taken, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Given, Ready, Waiting, Late, Unfit, Silent], says: Says::Lost, then: Hear, because: "a worker may always say that it waits for nothing" },
        Rule { of: &[Holding], says: Says::Lost, then: Stale, because: LATER },
        Rule { of: AT_ITS_END, says: Says::Lost, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Ready, Waiting, Holding, Late, Silent], says: Says::Failed, then: Hear, because: "it was told to take" },
        Rule { of: &[Given, Unfit], says: Says::Failed, then: Breach, because: "it was not told to take" },
        Rule { of: AT_ITS_END, says: Says::Failed, then: Stale, because: BEFORE },

        Rule { of: &[Unheard, Ready, Holding, Silent], says: Says::Replaced, then: Hear, because: "it held the lease" },
        Rule { of: &[Given, Waiting, Late, Unfit], says: Says::Replaced, then: Breach, because: "it did not hold the lease" },
        Rule { of: AT_ITS_END, says: Says::Replaced, then: Stale, because: BEFORE },
    ]
};

/// Returns the pairs that have no row, or more than one, with their number of rows. The table must have no such
/// pairs.
#[cfg(test)]
pub fn gaps(rules: &[Rule]) -> Vec<(Is, Says, usize)> {
    use crate::table::All;

    let pairs = Is::ALL.iter().flat_map(|&is| Says::ALL.iter().map(move |&says| (is, says)));
    let counted = pairs.map(|(is, says)| {
        let of = rules.iter().filter(|rule| rule.says == says).flat_map(|rule| rule.of);
        (is, says, of.filter(|&&of| of == is).count())
    });
    counted.filter(|&(_, _, count)| count != 1).collect()
}

/// Formats the table as a document shows it.
pub fn to_markdown(rules: &[Rule]) -> String {
    let row = |rule: &Rule| {
        let of: Vec<_> = rule.of.iter().map(|is| format!("{is:?}")).collect();
        format!("| {} | {:?} | {:?} | {} |\n", of.join(", "), rule.says, rule.then, rule.because)
    };
    "| worker | report | verdict | because |\n|---|---|---|---|\n".to_owned()
        + &rules.iter().map(row).collect::<String>()
}
