//! `THIRD-PARTY` of the packages: the licences of all crates that are linked into the program.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata, Package, PackageId, TargetKind};

use crate::step::{At, Result};
use crate::tidy::packages;

const HEAD: &str = "\
The program contains these crates, each with its licence. The texts that they come with follow; each stands once, below the
crates that it belongs to.
";

/// The text of the file.
pub(super) fn third_party(root: &Path) -> Result<String> {
    let metadata = packages::load(root)?;
    let linked = linked(&metadata);
    let mut text = HEAD.to_owned();
    // The same text comes with many crates.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in linked {
        let named = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref().unwrap_or("see below");
        // Writing to a `String` cannot fail.
        let _ = write!(text, "\n{named}: {licence}");
        for notice in notices(package)? {
            texts.entry(notice).or_default().push(named.clone());
        }
    }
    text.push('\n');
    for (notice, crates) in texts {
        let rule = "-".repeat(72);
        let _ = write!(
            text,
            "\n{rule}\n{}\n\n{}\n",
            crates.join(", "),
            notice.trim()
        );
    }
    Ok(text)
}

/// Crates of others that end up in the program, by name.
fn linked(metadata: &Metadata) -> Vec<&Package> {
    let nodes = metadata.resolve.iter().flat_map(|resolve| &resolve.nodes);
    let needs: BTreeMap<_, _> = nodes.map(|node| (&node.id, &node.deps)).collect();
    let found = |id: &PackageId| metadata.packages.iter().find(|package| package.id == *id);
    let is_linked = |package: &Package| {
        let mut kinds = package.targets.iter().flat_map(|target| &target.kind);
        !kinds.any(|kind| *kind == TargetKind::ProcMacro)
    };
    let daemon = metadata
        .packages
        .iter()
        .filter(|package| package.name == "cleave-daemon");
    let mut open: Vec<&Package> = daemon.collect();
    let mut seen = BTreeSet::new();
    while let Some(package) = open.pop() {
        if !is_linked(package) || !seen.insert((&package.name, &package.id)) {
            continue;
        }
        let normal = needs.get(&package.id).into_iter().copied().flatten();
        let normal = normal.filter(|need| {
            let mut kinds = need.dep_kinds.iter();
            kinds.any(|kind| kind.kind == DependencyKind::Normal)
        });
        open.extend(normal.filter_map(|need| found(&need.pkg)));
    }
    let of_others = seen.into_iter().filter_map(|(_, id)| found(id));
    of_others
        .filter(|package| package.source.is_some())
        .collect()
}

/// The licences and notices that lie beside the manifest of a crate.
fn notices(package: &Package) -> Result<Vec<String>> {
    let folder = package
        .manifest_path
        .parent()
        .ok_or("a manifest without a folder")?;
    let entries = fs::read_dir(folder).at(folder)?.flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).collect();
    files.retain(|file| {
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .to_uppercase();
        let words = [
            "LICENSE",
            "LICENCE",
            "COPYING",
            "COPYRIGHT",
            "NOTICE",
            "UNLICENSE",
        ];
        file.is_file() && words.iter().any(|word| name.starts_with(word))
    });
    files.sort();
    files
        .iter()
        .map(|file| fs::read_to_string(file).at(file))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_named_with_its_texts() {
        let text = third_party(&crate::root()).unwrap();
        for (named, is_linked) in [
            ("\nrustix ", true),
            ("\ntokio ", true),
            ("\nproptest ", false),
            ("\nclap_derive ", false),
            ("\ncleave-", false),
        ] {
            assert_eq!(text.contains(named), is_linked, "{named:?}");
        }
        assert!(text.contains("Permission is hereby granted, free of charge"));
        assert_eq!(
            text.matches("Apache License\n").count(),
            text.matches("END OF TERMS").count()
        );
    }
}
