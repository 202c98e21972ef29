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
    // A file deleted but not yet committed is listed, and binary files have no rules.
    let texts = paths.iter().filter_map(|path| {
        let text = std::fs::read_to_string(root.join(path)).ok()?;
        Some((path.as_str(), text))
    });
    let texts: Vec<(&str, String)> = texts.collect();
    for (path, text) in &texts {
        faults.extend(leftovers::anywhere(path, text));
        if path.ends_with(".md") {
            faults.extend(links::broken(path, text, |target| content(root, target)));
        }
    }
    let mut oversized = Vec::new();
    for source in sources(&texts) {
        faults.extend(leftovers::in_rust(&source));
        faults.extend(rooms::in_source(&source));
        oversized.extend(sizes::oversized(&source));
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

/// The Rust files, those told apart that a parent declares as tests.
fn sources<'a>(texts: &'a [(&'a str, String)]) -> Vec<Source<'a>> {
    let rust = texts.iter().filter(|(path, _)| path.ends_with(".rs"));
    let mut sources: Vec<Source<'_>> = rust.map(|(path, text)| Source::new(path, text)).collect();
    let tests: BTreeSet<String> = sources
        .iter()
        .flat_map(|source| source::declared_tests(source.path, &source.code))
        .collect();
    for source in &mut sources {
        if tests.contains(source.path) {
            source.production.clear();
        }
    }
    sources
}

/// What a link may lead to: the text of a file, nothing where a folder or a picture stands.
fn content(root: &Path, target: &str) -> Option<String> {
    let path = root.join(target);
    let text = std::fs::read_to_string(&path).ok();
    text.or_else(|| path.exists().then(String::new))
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
