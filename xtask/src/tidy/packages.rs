//! Rules over the dependency graph: who may depend on whom, and under which licences.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Node, NodeDep, PackageId};

/// Our packages, and those of ours that each may need outside of its tests: the arrows of `docs/ARCHITECTURE.md`. A
/// new one is a decision, and is recorded there. The prefix `cleave-` is left out.
const ARROWS: &str = "
blk:
chart:
guest: blk
disk: blk
engine: blk disk guest
worker: blk disk engine guest
session: blk disk guest worker
client: blk
probe: blk chart disk engine guest worker
sandbox:
daemon: blk client disk engine probe sandbox session worker
tests: blk client states
sim: blk engine guest states
states:
benches: blk client disk engine guest sim tests worker
xtask: chart
";

/// The test client is an oracle, and an oracle that shares code with the daemon proves nothing, even in its own tests.
const ORACLE: &str = "client";
const JUDGED: &[&str] = &["guest", "engine", "worker", "session"];

/// Licences that ask for no more than their notice: no copyleft, not even weak copyleft. An expression with
/// parentheses is listed as a whole.
const PERMISSIVE: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "(MIT OR Apache-2.0) AND BSD-3-Clause",
    "(MIT OR Apache-2.0) AND Unicode-3.0",
];

/// The dependency graph for the platform that we ship to.
pub(crate) fn load(root: &Path) -> Result<Metadata, String> {
    let words = ["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"];
    let mut command = MetadataCommand::new();
    command
        .current_dir(root)
        .other_options(words.map(str::to_owned));
    command.exec().map_err(|error| error.to_string())
}

/// Checks the licences of all packages that end up in, or help to build, what the workspace ships.
pub(crate) fn check_licences(metadata: &Metadata) -> Result<String, String> {
    let shipped = shipped(metadata);
    let packages = metadata.packages.iter();
    let faults = packages.filter(|package| shipped.contains(&package.id));
    let faults = faults.filter_map(|package| {
        let named = format!("{} {}", package.name, package.version);
        match &package.license {
            None => Some(format!("{named}: no licence expression")),
            Some(licence) if is_permissive(licence) => None,
            Some(licence) => Some(format!("{named}: {licence} is not on the list")),
        }
    });
    all(faults.collect(), shipped.len())
}

/// Checks the dependencies of our own packages.
pub(crate) fn check_arrows(metadata: &Metadata) -> Result<String, String> {
    let names: BTreeMap<_, _> = metadata
        .packages
        .iter()
        .map(|package| (&package.id, &package.name))
        .collect();
    let own: BTreeSet<_> = metadata.workspace_members.iter().collect();
    let mut faults = Vec::new();
    for node in nodes(metadata).filter(|node| own.contains(&node.id)) {
        let from = names.get(&node.id).map_or("", |name| name.as_str());
        for need in &node.deps {
            let to = names.get(&need.pkg).map_or("", |name| name.as_str());
            faults.extend(arrow(from, to, is_shipped(need)));
        }
        faults.extend(arrow(from, from, false));
    }
    all(faults, own.len())
}

/// The fault of a dependency of one of our packages, if it has one.
fn arrow(from: &str, to: &str, is_shipped: bool) -> Option<String> {
    let short = |name: &str| name.trim_start_matches("cleave-").to_owned();
    let rows = ARROWS.lines().filter_map(|row| row.split_once(':'));
    let rows: BTreeMap<&str, &str> = rows.collect();
    let (own, need) = (short(from), short(to));
    let Some(may) = rows.get(own.as_str()) else {
        return Some(format!("{from} has no row in xtask/src/tidy/packages.rs"));
    };
    if to == "tokio" && own != "daemon" {
        return Some(format!("{from} blocks: tokio stays in the daemon"));
    }
    if own == ORACLE && JUDGED.contains(&need.as_str()) {
        return Some(format!("{from} judges {to} and must not share its code"));
    }
    let is_ours = to == "xtask" || to.starts_with("cleave-");
    let is_refused = is_shipped && is_ours && !may.split(' ').any(|name| name == need);
    is_refused.then(|| format!("{from} must not depend on {to}"))
}

/// Ids of our own packages and of everything that they need outside of tests.
fn shipped(metadata: &Metadata) -> BTreeSet<&PackageId> {
    let needs: BTreeMap<_, _> = nodes(metadata).map(|node| (&node.id, &node.deps)).collect();
    let mut open: Vec<&PackageId> = metadata.workspace_members.iter().collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = open.pop() {
        if seen.insert(id) {
            let needs = needs.get(id).into_iter().copied().flatten();
            open.extend(needs.filter(|need| is_shipped(need)).map(|need| &need.pkg));
        }
    }
    seen
}

fn is_shipped(need: &NodeDep) -> bool {
    let mut kinds = need.dep_kinds.iter();
    kinds.any(|kind| kind.kind != DependencyKind::Development)
}

fn nodes(metadata: &Metadata) -> impl Iterator<Item = &Node> {
    metadata.resolve.iter().flat_map(|resolve| &resolve.nodes)
}

/// Whether an SPDX expression, or the old form `MIT/Apache-2.0`, can be met from the list. AND binds tighter than OR.
fn is_permissive(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    let is_listed = |licence: &str| PERMISSIVE.contains(&licence);
    let mut choices = expression.split(" OR ");
    is_listed(&expression)
        || !expression.contains('(') && choices.any(|choice| choice.split(" AND ").all(is_listed))
}

fn all(faults: Vec<String>, count: usize) -> Result<String, String> {
    match faults.is_empty() {
        true => Ok(format!("{count} packages")),
        false => Err(faults.join("\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_met_as_spdx_says() {
        let table = [
            ("MIT", true),
            ("MPL-2.0", false),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0-only OR MIT", true),
            ("Apache-2.0 AND GPL-2.0-only", false),
            ("Apache-2.0 OR BSD-3-Clause AND GPL-2.0-only", true),
            ("(Apache-2.0 OR BSD-3-Clause) AND GPL-2.0-only", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true),
            ("GPL-2.0-only WITH Classpath-exception-2.0", false),
            ("", false),
            ("MIT Apache-2.0", false),
        ];
        for (expression, is_met) in table {
            assert_eq!(is_permissive(expression), is_met, "{expression}");
        }
    }

    #[test]
    fn arrows_point_one_way_and_tests_may_turn_most_of_them_round() {
        let table = [
            ("cleave-engine", "cleave-disk", true, true),
            ("cleave-disk", "cleave-engine", true, false),
            ("cleave-session", "cleave-engine", true, false),
            ("cleave-guest", "cleave-client", false, true),
            ("cleave-new", "libc", true, false),
            ("cleave-daemon", "tokio", true, true),
            ("cleave-worker", "tokio", false, false),
            ("cleave-client", "cleave-blk", true, true),
            ("cleave-client", "cleave-guest", false, false),
        ];
        for (from, to, is_shipped, is_fine) in table {
            assert_eq!(
                arrow(from, to, is_shipped).is_none(),
                is_fine,
                "{from} → {to}"
            );
        }
    }

    #[test]
    fn dependencies_of_tests_do_not_ship() {
        let metadata = load(&crate::root()).unwrap();
        let shipped = shipped(&metadata);
        let ships = |name: &str| {
            shipped
                .iter()
                .any(|id| id.repr.contains(&format!("#{name}@")))
        };
        assert!(ships("libc") && ships("clap") && !ships("proptest"));
    }
}
