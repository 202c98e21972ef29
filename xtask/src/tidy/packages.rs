//! Rules over the dependency graph: who may depend on whom, and under which licences.

use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};
use cleave_rig::{At, Result, words};

use crate::step::unless;

/// Our packages, and those of ours that each may need outside of its tests: the arrows of `docs/ARCHITECTURE.md`. A
/// new one is a decision, and is recorded there. The prefix `cleave-` is left out.
const ARROWS: &str = "
blk:
chart:
guest: blk
nbd:
rbd:
rig:
lab: chart rig
disk: blk nbd rbd
engine: blk disk guest nbd rbd
worker: blk disk engine guest
session: blk disk guest worker
client: blk
config: blk disk worker
api: config
probe: blk disk engine guest worker
sandbox:
host: api blk config disk engine probe sandbox session worker
cleave: api blk client config disk engine host probe
tests: api blk client states
sim: blk engine guest states
states:
benches: blk client disk engine guest sim tests worker
xtask: rig
";

/// Those of our packages that wait for many things at once. All others block.
const ASYNC: &[&str] = &["host", "cleave"];

/// The test client is an oracle, and an oracle that shares code with the daemon proves nothing, even in its own tests.
const ORACLE: &str = "client";
const JUDGED: &[&str] = &["guest", "engine", "worker", "session"];

/// Licences that ask for no more than their notice: no copyleft, not even weak copyleft. An expression with
/// parentheses is listed as a whole.
const PERMISSIVE: &str = "0BSD, Apache-2.0, Apache-2.0 WITH LLVM-exception, BSD-2-Clause, BSD-3-Clause, BSL-1.0, \
CC0-1.0, ISC, MIT, MIT-0, Unicode-3.0, Unlicense, Zlib, (MIT OR Apache-2.0) AND BSD-3-Clause, \
(MIT OR Apache-2.0) AND Unicode-3.0";

/// The platform that we ship to: that of this machine.
pub(crate) const PLATFORM: &str = match cfg!(target_arch = "aarch64") {
    true => "aarch64-unknown-linux-gnu",
    false => "x86_64-unknown-linux-gnu",
};

/// Loads its dependency graph.
pub(crate) fn load(root: &Path) -> Result<Metadata> {
    let words = words("--locked --filter-platform {}", &[&PLATFORM]);
    let mut command = MetadataCommand::new();
    command.current_dir(root).other_options(words);
    command.exec().at("cargo metadata")
}

/// Checks the licences of all packages that the workspace ships, or that help to build or test it.
pub(crate) fn check_licences(metadata: &Metadata) -> Result<String> {
    let faults = metadata.packages.iter().filter_map(|package| {
        let licence = package.license.as_deref();
        let licence = licence.unwrap_or("no licence expression");
        let (name, version) = (&package.name, &package.version);
        (!is_permissive(licence)).then(|| format!("{name} {version}: {licence} is not on the list"))
    });
    unless(
        &faults.collect::<Vec<_>>(),
        format!("{} packages", metadata.packages.len()),
    )
}

/// Checks the dependencies of our own packages.
pub(crate) fn check_arrows(metadata: &Metadata) -> Result<String> {
    let own = metadata.workspace_packages();
    let faults = own.iter().flat_map(|package| {
        let name = package.name.as_str();
        let needs = package.dependencies.iter().filter_map(move |need| {
            arrow(name, &need.name, need.kind != DependencyKind::Development)
        });
        // One without dependencies has a row too.
        needs.chain(arrow(name, name, false))
    });
    unless(
        &faults.collect::<Vec<_>>(),
        format!("{} packages", own.len()),
    )
}

/// Returns the fault of a dependency of one of our packages, if it has one.
fn arrow(from: &str, to: &str, is_shipped: bool) -> Option<String> {
    let [own, need] = [from, to].map(|name| name.trim_start_matches("cleave-"));
    let mut rows = ARROWS.lines().filter_map(|row| row.split_once(':'));
    let Some((_, may)) = rows.find(|row| row.0 == own) else {
        return Some(format!("{from} has no row in xtask/src/tidy/packages.rs"));
    };
    if to == "tokio" && !ASYNC.contains(&own) {
        return Some(format!("{from} blocks: tokio stays in {ASYNC:?}"));
    }
    if own == ORACLE && JUDGED.contains(&need) {
        return Some(format!("{from} judges {to} and must not share its code"));
    }
    let is_ours = to == "xtask" || to.starts_with("cleave-");
    let is_refused = is_shipped && is_ours && !may.split(' ').any(|name| name == need);
    is_refused.then(|| format!("{from} must not depend on {to}"))
}

/// Returns true if an SPDX expression, or the old form `MIT/Apache-2.0`, can be met from the list. AND binds tighter than OR.
fn is_permissive(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    let is_listed = |licence: &str| PERMISSIVE.split(", ").any(|known| known == licence);
    let mut choices = expression.split(" OR ");
    is_listed(&expression)
        || !expression.contains('(') && choices.any(|choice| choice.split(" AND ").all(is_listed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_met_as_spdx_says() {
        for met in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0-only OR MIT",
            "Apache-2.0 OR BSD-3-Clause AND GPL-2.0-only",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
        ] {
            assert!(is_permissive(met), "{met}");
        }
        for unmet in [
            "MPL-2.0",
            "Apache-2.0 AND GPL-2.0-only",
            "(Apache-2.0 OR BSD-3-Clause) AND GPL-2.0-only",
            "",
        ] {
            assert!(!is_permissive(unmet), "{unmet}");
        }
    }

    #[test]
    fn arrows_point_one_way_and_tests_may_turn_most_of_them_round() {
        for (from, to, is_shipped, is_fine) in [
            ("cleave-engine", "cleave-disk", true, true),
            ("cleave-disk", "cleave-engine", true, false),
            ("cleave-guest", "cleave-client", false, true),
            ("cleave-new", "libc", true, false),
            ("cleave-host", "tokio", true, true),
            ("cleave", "cleave-host", true, true),
            ("cleave", "cleave-worker", true, false),
            ("cleave-worker", "tokio", false, false),
            ("cleave-client", "cleave-guest", false, false),
        ] {
            assert_eq!(
                arrow(from, to, is_shipped).is_none(),
                is_fine,
                "{from} → {to}"
            );
        }
    }
}
