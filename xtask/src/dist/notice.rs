//! `THIRD-PARTY` of the packages: the licences of all crates that are linked into their programs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cargo_metadata::Package;
use cleave_rig::{At, Result, execute, words};
use itertools::Itertools;

use crate::tidy::packages::{self, PLATFORM};

const HEAD: &str = "\
The program contains these crates, each with its licence. The texts that they come with follow; each stands once, below the
crates that it belongs to.
";

/// How the names of files begin that hold licences and notices.
const NOTICES: [&str; 5] = ["LICEN", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// Returns the text of the file for the programs of some of our crates.
pub(super) fn third_party(root: &Path, programs: &[&str]) -> Result<String> {
    let metadata = packages::load(root)?;
    let tree = "cargo tree --locked --edges normal,no-proc-macro --prefix none --target {}";
    let mut line = words(tree, &[&PLATFORM]);
    for program in programs {
        line.extend(words("--package {}", &[program]));
    }
    let linked = execute(root, &line)?;
    let mut text = HEAD.to_owned();
    // The same text comes with many crates.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let of_others = metadata
        .packages
        .iter()
        .filter(|package| package.source.is_some());
    for package in of_others.sorted_by_key(|package| (&package.name, &package.version)) {
        let named = format!("{} {}", package.name, package.version);
        let listed = format!("{} v{}", package.name, package.version);
        if !linked
            .lines()
            .any(|line| line.trim_end_matches(" (*)") == listed)
        {
            continue;
        }
        let licence = package.license.as_deref().unwrap_or("see below");
        text += &format!("\n{named}: {licence}");
        for notice in notices(package)? {
            texts.entry(notice).or_default().push(named.clone());
        }
    }
    text.push('\n');
    for (notice, crates) in texts {
        let (rule, crates, notice) = ("-".repeat(72), crates.join(", "), notice.trim());
        text += &format!("\n{rule}\n{crates}\n\n{notice}\n");
    }
    Ok(text)
}

/// Returns the licences and notices that lie beside the manifest of a crate.
fn notices(package: &Package) -> Result<Vec<String>> {
    let folder = package.manifest_path.parent();
    let folder = folder.ok_or("a manifest without a folder")?;
    let entries = fs::read_dir(folder).at(folder)?.flatten();
    let is_notice = |file: &fs::DirEntry| {
        let name = file.file_name().to_string_lossy().to_uppercase();
        file.path().is_file() && NOTICES.iter().any(|front| name.starts_with(front))
    };
    let files = entries.filter(is_notice).map(|file| file.path()).sorted();
    let texts = files.map(|file| fs::read_to_string(&file).at(file));
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_named_with_its_texts() {
        let text = third_party(&cleave_rig::root(), &["cleave"]).unwrap();
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
