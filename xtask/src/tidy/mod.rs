//! House rules that neither rustc nor clippy knows.

mod links;
pub(crate) mod packages;

use std::path::Path;

use crate::step::{Result, line};

const FILE_LINES_MAX: usize = 700;

/// Words that no text file has, and why. They are spelt in halves so that this file passes its own rule.
const LEFTOVERS: &[(&str, &str)] = &[
    (concat!("FIX", "ME"), NOTE),
    (concat!("X", "XX"), NOTE),
    (concat!("/wo", "rk/"), FOREIGN),
    (concat!("/ro", "ot/"), FOREIGN),
    (concat!("/ho", "me/"), FOREIGN),
];
const NOTE: &str = "do it, or state the fact and its reason";
const FOREIGN: &str = "this path exists on one machine only";

/// Crates that may contain unsafe code: the doors to guest memory and to the kernel, and the oracle of the tests.
const UNSAFE: &[&str] = &["crates/guest/", "crates/engine/", "crates/client/"];

/// Modules of `std` that the pure values of `blk` have no use for; a list of imports could hide one.
const IMPURE: &[&str] = &["std::fs", "std::net", "std::thread", "std::time", "std::{"];

/// Checks every file that git tracks or would track. Reports all faults at once, one a line.
pub(crate) fn check(root: &Path) -> Result<String> {
    let listing = line(
        root,
        "git ls-files --cached --others --exclude-standard",
        &[],
    )?;
    let mut faults = Vec::new();
    for path in listing.lines() {
        // A deleted file is listed until the deletion is staged, and binary files have no rules.
        let Ok(text) = std::fs::read_to_string(root.join(path)) else {
            continue;
        };
        faults.extend(leftovers(path, &text));
        if path.ends_with(".md") {
            faults.extend(links::broken(root, path, &text));
        }
        if path.ends_with(".rs") {
            faults.extend(source(path, &text));
        }
    }
    match faults.is_empty() {
        true => Ok(format!("{} files", listing.lines().count())),
        false => Err(faults.join("\n")),
    }
}

/// Notes to oneself and paths of a developer's machine, in any text file that we wrote.
fn leftovers(path: &str, text: &str) -> Vec<String> {
    let is_ours = !path.ends_with("Cargo.lock") && !path.starts_with("LICENSE");
    let words = LEFTOVERS.iter().filter(|_| is_ours);
    words
        .flat_map(|(word, why)| find(path, text, word, why))
        .collect()
}

/// Faults of one Rust file.
fn source(path: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if text
        .lines()
        .any(|line| line.trim_start().starts_with("#[ignore"))
    {
        faults.push(format!(
            "{path}: an ignored test never runs; finish or delete it"
        ));
    }
    let lines = code_lines(text);
    if lines > FILE_LINES_MAX && !path.contains("tests/") && !path.ends_with("tests.rs") {
        faults.push(format!(
            "{path}: {lines} lines of code; the limit is {FILE_LINES_MAX}"
        ));
    }
    if path.ends_with("src/lib.rs") || path.ends_with("src/main.rs") {
        let may_be_unsafe = UNSAFE.iter().any(|folder| path.starts_with(folder));
        if !may_be_unsafe && !text.lines().any(|line| line == "#![forbid(unsafe_code)]") {
            faults.push(format!("{path}: #![forbid(unsafe_code)] is missing"));
        }
        let mut head = text.lines().take_while(|line| line.starts_with("//!"));
        let says = |line: &str| line.contains("forbid") || line.contains("must not");
        if path.starts_with("crates/") && !head.any(says) {
            faults.push(format!(
                "{path}: the first `//!` lines do not say what the crate forbids"
            ));
        }
    }
    if path.starts_with("crates/blk/src/") {
        let why = "blk holds pure values: no files, sockets, threads or clocks";
        faults.extend(IMPURE.iter().flat_map(|word| find(path, text, word, why)));
    }
    faults
}

/// A fault for each place at which the word begins.
fn find(path: &str, text: &str, word: &str, why: &str) -> Vec<String> {
    let places = text.match_indices(word).map(|(at, _)| &text[..at]);
    let begins = |before: &&str| !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let line = |before: &str| before.matches('\n').count() + 1;
    let fault = |before| format!("{path}:{}: `{word}`: {why}", line(before));
    places.filter(begins).map(fault).collect()
}

/// Lines that are neither blank nor comments, up to the module of tests.
fn code_lines(text: &str) -> usize {
    let code = text
        .split("\n#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or(text);
    let lines = code.lines().map(str::trim);
    lines
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_and_foreign_paths_are_found_with_their_line() {
        for (word, _) in LEFTOVERS {
            let found = leftovers("a.rs", &format!("a\n// {word}: later"));
            assert!(
                found.len() == 1 && found[0].starts_with("a.rs:2: "),
                "{found:?}"
            );
            assert!(
                leftovers("a.md", &format!("see a{word}x")).is_empty(),
                "{word}"
            );
            assert!(leftovers("Cargo.lock", word).is_empty());
        }
    }

    #[test]
    fn every_rule_for_source_files_finds_its_fault() {
        let long = "use a;\n".repeat(FILE_LINES_MAX + 1);
        let long_tests = format!("use a;\n\n#[cfg(test)]\nmod tests {{\n{long}}}");
        for (path, text, count) in [
            ("crates/disk/src/a.rs", long.as_str(), 1),
            ("crates/disk/src/a.rs", &long[7..], 0),
            ("crates/disk/src/a.rs", &long_tests, 0),
            ("tests/a.rs", &long, 0),
            (
                "tests/a.rs",
                "#[test]\n    #[ignore = \"slow\"]\nfn a() {}",
                1,
            ),
            (
                "crates/disk/src/lib.rs",
                "//! It forbids.\n#![forbid(unsafe_code)]\n",
                0,
            ),
            (
                "crates/disk/src/lib.rs",
                "//! It forbids.\n// #![forbid(unsafe_code)]\n",
                1,
            ),
            (
                "crates/disk/src/lib.rs",
                "//! It does.\n#![forbid(unsafe_code)]\n//! forbid\n",
                1,
            ),
            ("crates/guest/src/lib.rs", "//! It forbids things.\n", 0),
            ("xtask/src/main.rs", "", 1),
            ("crates/blk/src/plan.rs", "use std::time::Instant;", 1),
            ("crates/blk/src/plan.rs", "use std::{fmt, fs};", 1),
            ("crates/blk/src/plan.rs", "use std::num::NonZero;", 0),
            ("crates/disk/src/open.rs", "use std::fs;", 0),
        ] {
            assert_eq!(source(path, text).len(), count, "{path}: {:.80}", text);
        }
    }
}
