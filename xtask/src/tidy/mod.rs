//! The house rules that neither rustc nor clippy knows. Rules are functions over text, so that each
//! is tested on strings; only this file reads the tree.

mod leftovers;
mod links;
mod rooms;
mod sizes;
mod source;

use std::collections::BTreeSet;
use std::path::Path;

use crate::metadata::Metadata;
use crate::step::quietly;
use source::Source;

const ALLOW_FILE: &str = "xtask/tidy-allow.txt";

/// Checks the whole tree; all faults at once, a line each.
pub(crate) fn check(root: &Path, metadata: &Metadata) -> Result<String, String> {
    let paths = tracked(root)?;
    let allowed = read(root, ALLOW_FILE)?;
    let mut faults = Vec::new();
    let mut oversized = Vec::new();
    for path in &paths {
        // A file deleted but not yet committed is listed, and binary files have no rules.
        let Ok(text) = std::fs::read_to_string(root.join(path)) else {
            continue;
        };
        faults.extend(leftovers::anywhere(path, &text));
        if path.ends_with(".rs") {
            let source = Source::new(path, &text);
            faults.extend(leftovers::in_rust(&source));
            faults.extend(rooms::in_source(&source));
            oversized.extend(sizes::oversized(&source));
        }
        if path.ends_with(".md") {
            faults.extend(links::broken(path, &text, |target| {
                std::fs::read_to_string(root.join(target))
                    .ok()
                    .or_else(|| root.join(target).exists().then(String::new))
            }));
        }
    }
    faults.extend(sizes::judge(&oversized, &allowed, ALLOW_FILE));
    for package in metadata.own() {
        faults.extend(rooms::arrows(metadata, package));
    }
    if faults.is_empty() {
        Ok(format!("{} files", paths.len()))
    } else {
        Err(faults.join("\n"))
    }
}

/// What git tracks or would track; a new file is judged before it is added.
fn tracked(root: &Path) -> Result<BTreeSet<String>, String> {
    let words = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ];
    Ok(quietly(root, &words, &[])?
        .lines()
        .map(str::to_owned)
        .collect())
}

fn read(root: &Path, path: &str) -> Result<String, String> {
    std::fs::read_to_string(root.join(path)).map_err(|error| format!("{path}: {error}"))
}
