//! A crate is a prohibition: who may depend on whom, and what a room must not reach for.

use super::source::{Source, line_at};
use crate::metadata::{Metadata, Package};

/// A package of ours and those of ours that it may need outside of its tests. The arrows of
/// `docs/ARCHITECTURE.md`; a new one is a decision, and is recorded there.
const ARROWS: &[(&str, &[&str])] = &[
    ("cleave-blk", &[]),
    ("cleave-guest", &["cleave-blk"]),
    ("cleave-disk", &["cleave-blk"]),
    (
        "cleave-engine",
        &["cleave-blk", "cleave-disk", "cleave-guest"],
    ),
    (
        "cleave-worker",
        &["cleave-blk", "cleave-disk", "cleave-engine", "cleave-guest"],
    ),
    (
        "cleave-session",
        &["cleave-blk", "cleave-disk", "cleave-guest", "cleave-worker"],
    ),
    ("cleave-client", &["cleave-blk"]),
    (
        "cleave-probe",
        // It runs ops as a worker does, in memory of its own; of the worker it needs the splitter's
        // words alone, which its profile is written in.
        &[
            "cleave-blk",
            "cleave-disk",
            "cleave-engine",
            "cleave-guest",
            "cleave-worker",
        ],
    ),
    (
        "cleave-daemon",
        // The engine for its probe alone: what the host lacks is said at the start, not at the first I/O.
        &[
            "cleave-blk",
            "cleave-client",
            "cleave-disk",
            "cleave-engine",
            "cleave-probe",
            "cleave-session",
            "cleave-worker",
        ],
    ),
    (
        "cleave-tests",
        &["cleave-blk", "cleave-client", "cleave-states"],
    ),
    (
        "cleave-sim",
        &[
            "cleave-blk",
            "cleave-engine",
            "cleave-guest",
            "cleave-states",
        ],
    ),
    ("cleave-states", &[]),
    (
        // The tests for how the program is built and started, where it is timed over its socket.
        "cleave-benches",
        &[
            "cleave-blk",
            "cleave-client",
            "cleave-disk",
            "cleave-engine",
            "cleave-guest",
            "cleave-sim",
            "cleave-tests",
            "cleave-worker",
        ],
    ),
    ("xtask", &[]),
];

/// Where unsafe code may be: the two doors of the daemon, the oracle beside it, and a benchmark whose
/// allocator counts.
const UNSAFE_ROOMS: &[&str] = &[
    "crates/guest/",
    "crates/engine/",
    "crates/client/",
    "benches/splitter.rs",
];

/// What may use tokio: control, never data.
const TOKIO_ROOMS: &[&str] = &["cleave-daemon"];

/// Dependencies that a package must not have, also not for its tests where they share code with it:
/// the client is the oracle, and an oracle that shares code with the accused proves nothing.
const ORACLE: &str = "cleave-client";
const ACCUSED: &[&str] = &[
    "cleave-guest",
    "cleave-engine",
    "cleave-worker",
    "cleave-session",
];

/// Modules of `std` that pure values have no use for.
const IMPURE: &[&str] = &["fs", "net", "thread", "time"];

/// Faults of one package's dependencies.
pub(super) fn arrows(metadata: &Metadata, package: &Package) -> Vec<String> {
    let name = package.name.as_str();
    let manifest = package.manifest.display();
    let Some((_, may)) = ARROWS.iter().find(|(own, _)| *own == name) else {
        return vec![format!(
            "{manifest}: {name} has no row in xtask/src/tidy/rooms.rs"
        )];
    };
    let is_ours = |need: &&str| ARROWS.iter().any(|(own, _)| own == need);
    let mut faults: Vec<String> = metadata
        .names(&package.needs)
        .filter(|need| is_ours(need) && !may.contains(need))
        .map(|need| format!("{manifest}: {name} must not depend on {need}"))
        .collect();
    for need in metadata
        .names(&package.needs)
        .chain(metadata.names(&package.needs_in_tests))
    {
        if need == "tokio" && !TOKIO_ROOMS.contains(&name) {
            faults.push(format!(
                "{manifest}: tokio stays in the daemon, {name} blocks"
            ));
        }
        if name == ORACLE && ACCUSED.contains(&need) {
            faults.push(format!("{manifest}: the oracle shares no code with {need}"));
        }
    }
    faults
}

/// Faults of one source file.
pub(super) fn in_source(source: &Source<'_>) -> Vec<String> {
    let mut faults = Vec::new();
    let path = source.path;
    if is_root(path) {
        if !UNSAFE_ROOMS.iter().any(|room| path.starts_with(room))
            && !source.code.contains("#![forbid(unsafe_code)]")
        {
            faults.push(format!("{path}: #![forbid(unsafe_code)] is missing"));
        }
        if path.starts_with("crates/") && !says_what_it_forbids(source.text) {
            faults.push(format!(
                "{path}: its first `//!` lines do not say what the crate forbids"
            ));
        }
    }
    if path.starts_with("crates/blk/src/") {
        for (module, at) in std_modules(&source.production) {
            if IMPURE.contains(&module) {
                let line = line_at(&source.production, at);
                faults.push(format!(
                    "{path}:{line}: blk is pure values, without std::{module}"
                ));
            }
        }
    }
    faults
}

fn is_root(path: &str) -> bool {
    path.ends_with("src/lib.rs") || path.ends_with("src/main.rs")
}

fn says_what_it_forbids(text: &str) -> bool {
    let mut head = text.lines().take_while(|line| line.starts_with("//!"));
    head.any(|line| line.contains("forbid"))
}

/// Modules named right behind `std::`, in braces or not, and where.
fn std_modules(code: &str) -> Vec<(&str, usize)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("std::") {
        let rest = &code[at + "std::".len()..];
        match rest.strip_prefix('{') {
            None => found.push((first_word(rest), at)),
            Some(list) => found.extend(top_level(list).map(|item| (first_word(item), at))),
        }
    }
    found
}

fn first_word(text: &str) -> &str {
    text.trim_start()
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()
        .unwrap_or_default()
}

/// The items of a `{a, b::{c, d}}` list whose opening brace is already behind.
fn top_level(list: &str) -> impl Iterator<Item = &str> {
    let mut nesting = 1_u32;
    let mut end = list.len();
    let mut cuts = Vec::new();
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'{' => nesting += 1,
            b'}' => nesting -= 1,
            b',' if nesting == 1 => cuts.push(at),
            _ => {}
        }
        if nesting == 0 {
            end = at;
            break;
        }
    }
    cuts.push(end);
    let mut from = 0;
    cuts.into_iter().map(move |cut| {
        let item = &list[from..cut];
        from = cut + 1;
        item
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(path: &str, text: &str) -> Vec<String> {
        in_source(&Source::new(path, text))
    }

    #[test]
    fn a_crate_forbids_unsafe_code_save_the_three_doors() {
        let bare = "//! It forbids things.\n";
        let strict = "//! It forbids things.\n#![forbid(unsafe_code)]\n";
        for path in [
            "crates/blk/src/lib.rs",
            "crates/daemon/src/main.rs",
            "xtask/src/main.rs",
        ] {
            assert_eq!(faults(path, bare).len(), 1, "{path}");
            assert!(faults(path, strict).is_empty(), "{path}");
        }
        assert!(faults("crates/guest/src/lib.rs", bare).is_empty());
        let commented = "//! It forbids things.\n// #![forbid(unsafe_code)]\n";
        assert_eq!(faults("crates/blk/src/lib.rs", commented).len(), 1);
    }

    #[test]
    fn a_crates_first_lines_say_what_it_forbids() {
        let late = "//! It does things.\n#![forbid(unsafe_code)]\n//! It forbids.\n";
        assert_eq!(faults("crates/disk/src/lib.rs", late).len(), 1);
        assert!(faults("crates/disk/src/open.rs", "").is_empty());
    }

    #[test]
    fn blk_has_no_clock_file_or_thread_however_it_is_imported() {
        let at = "crates/blk/src/plan.rs";
        assert_eq!(faults(at, "use std::time::Instant;").len(), 1);
        assert_eq!(
            faults(at, "use std::{fmt, io::{self, fs}, thread};").len(),
            1
        );
        assert_eq!(faults(at, "fn a() { std::fs::read(b) }").len(), 1);
        assert!(faults(at, "use std::{fmt, num::{NonZero, time}};").is_empty());
        assert!(faults(at, "#[cfg(test)]\nmod tests { use std::time::Instant; }").is_empty());
        assert!(faults("crates/disk/src/open.rs", "use std::fs;").is_empty());
    }

    fn graph(name: &str, need: &str, kind: &str) -> Vec<String> {
        let json = format!(
            r#"{{"packages": [{{"id": "1", "name": "{name}"}}, {{"id": "2", "name": "{need}"}}],
                "resolve": {{"nodes": [
                    {{"id": "1", "deps": [{{"pkg": "2", "dep_kinds": [{{"kind": {kind}}}]}}]}}]}},
                "workspace_members": ["1"]}}"#
        );
        let metadata = Metadata::parse(&json).unwrap();
        let package = metadata.own().next().unwrap();
        arrows(&metadata, package)
    }

    #[test]
    fn arrows_point_one_way() {
        assert!(graph("cleave-engine", "cleave-disk", "null").is_empty());
        assert_eq!(graph("cleave-disk", "cleave-engine", "null").len(), 1);
        assert_eq!(graph("cleave-session", "cleave-engine", "null").len(), 1);
        assert!(graph("cleave-guest", "cleave-client", r#""dev""#).is_empty());
        assert_eq!(graph("cleave-new", "libc", "null").len(), 1);
    }

    #[test]
    fn tokio_stays_in_the_daemon_also_in_tests() {
        assert!(graph("cleave-daemon", "tokio", "null").is_empty());
        assert_eq!(graph("cleave-session", "tokio", "null").len(), 1);
        assert_eq!(graph("cleave-worker", "tokio", r#""dev""#).len(), 1);
    }

    #[test]
    fn the_oracle_shares_no_code_with_the_accused_also_in_tests() {
        assert!(graph("cleave-client", "cleave-blk", "null").is_empty());
        assert_eq!(graph("cleave-client", "cleave-guest", r#""dev""#).len(), 1);
    }
}
