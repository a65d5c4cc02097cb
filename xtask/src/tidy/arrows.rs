//! Allowed dependencies between crates: the arrows of the diagram in ARCHITECTURE.md.

use anyhow::Context;
use serde_json::Value;

use crate::tidy::{File, Finding};

/// The crates of the workspace that a crate may depend on, for building and for testing alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum May {
    /// Any of them.
    All,
    Only(&'static [&'static str]),
}

const ARROWS: [(&str, May); 11] = [
    // Compiled and checked alone, also under loom.
    ("tasuki-shm", May::Only(&[])),
    // A protocol with versions of its own, for programs that use nothing else of ours.
    ("tasuki-call", May::Only(&["tasuki-shm", "tasuki-testing"])),
    // Everything that touches devices, guests and the kernel's network. Tested against models and TAPs.
    ("tasuki-net", May::Only(&["tasuki-shm", "tasuki-sim", "tasuki-tap", "tasuki-testing"])),
    // A contract between versions: pure, and independent of our other crates.
    ("tasuki-relay", May::Only(&[])),
    // A model of a device is independent of the drivers whose errors it must find.
    ("tasuki-sim", May::Only(&["tasuki-shm", "tasuki-tap", "tasuki-testing"])),
    // Turns a descriptor into a network interface, for crates that do not know each other.
    ("tasuki-tap", May::Only(&[])),
    // What the tests of several crates share. It is below all of them.
    ("tasuki-testing", May::Only(&[])),
    // Drives a node's ports, and can be replaced while it runs. Tested against models.
    ("tasuki-worker", May::Only(&["tasuki-shm", "tasuki-net", "tasuki-relay", "tasuki-sim", "tasuki-testing"])),
    // Talks to people. Starts workers by path and never links the data path.
    ("tasuki-control", May::Only(&["tasuki-shm", "tasuki-relay", "tasuki-tap", "tasuki-testing"])),
    // Measures everything.
    ("tasuki-bench", May::All),
    // Must build even if nothing else does.
    ("xtask", May::Only(&[])),
];

/// Finds dependencies that are not allowed. `metadata` is the output of `cargo metadata --no-deps` for the
/// workspace.
pub fn check(metadata: &Value, files: &[File]) -> anyhow::Result<Vec<Finding>> {
    let crates = crates(metadata).context("`cargo metadata` has another form than we know")?;
    let members = crates.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
    let mut findings = Vec::new();
    for (name, dependencies) in &crates {
        let manifest = files.iter().find(|file| {
            file.path.ends_with("Cargo.toml") && line_with(&file.text, &format!("name = \"{name}\"")).is_some()
        });
        let path = manifest.map_or("Cargo.toml", |file| file.path.as_str());
        let line = |text: &str| manifest.and_then(|file| line_with(&file.text, text)).unwrap_or(1);
        let Some((_, may)) = ARROWS.iter().find(|(known, _)| known == name) else {
            let advice = format!("list in xtask/src/tidy/arrows.rs the crates that {name} may depend on");
            findings.push(Finding::new(path, line("name ="), advice));
            continue;
        };
        for dependency in dependencies.iter().filter(|dependency| members.contains(&dependency.as_str())) {
            if !allows(*may, dependency) {
                let advice = format!("{name} must not depend on {dependency}; the arrows are in ARCHITECTURE.md");
                findings.push(Finding::new(path, line(dependency), advice));
            }
        }
    }
    Ok(findings)
}

fn allows(may: May, dependency: &str) -> bool {
    match may {
        May::All => true,
        May::Only(names) => names.contains(&dependency),
    }
}

/// Returns the crates of the workspace, each with the names of all its dependencies.
fn crates(metadata: &Value) -> Option<Vec<(String, Vec<String>)>> {
    let packages = metadata["packages"].as_array()?;
    packages
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"].as_array()?.iter();
            let names = dependencies.map(|dependency| Some(dependency["name"].as_str()?.to_owned()));
            Some((package["name"].as_str()?.to_owned(), names.collect::<Option<Vec<_>>>()?))
        })
        .collect()
}

/// Returns the number of the first line, from 1, that begins with `text`.
fn line_with(document: &str, text: &str) -> Option<usize> {
    document.lines().position(|line| line.starts_with(text)).map(|index| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(packages: &Value) -> Vec<String> {
        let manifest = "[package]\nname = \"tasuki-shm\"\n\n[dev-dependencies]\ntasuki-bench.workspace = true\n";
        let files = [File { path: "crates/tasuki-shm/Cargo.toml".to_owned(), text: manifest.to_owned() }];
        let found = check(&serde_json::json!({ "packages": packages }), &files).unwrap();
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_arrow_that_is_not_in_the_diagram_is_found() {
        let found = findings(&serde_json::json!([
            { "name": "tasuki-shm", "dependencies": [{ "name": "rustix" }, { "name": "tasuki-bench" }] },
            { "name": "tasuki-bench", "dependencies": [{ "name": "tasuki-shm" }] },
        ]));
        assert_eq!(
            found,
            [
                "crates/tasuki-shm/Cargo.toml:5: tasuki-shm must not depend on tasuki-bench; the arrows are in ARCHITECTURE.md"
            ]
        );
    }

    #[test]
    fn a_crate_without_a_rule_is_found() {
        let found = findings(&serde_json::json!([{ "name": "tasuki-new", "dependencies": [] }]));
        assert_eq!(found, ["Cargo.toml:1: list in xtask/src/tidy/arrows.rs the crates that tasuki-new may depend on"]);
    }
}
