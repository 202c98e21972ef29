//! Names that several types have. A reader of two crates takes such types for one.
//!
//! Public types are compared over all crates, private ones within their crate. Types of tests do not count.

use std::collections::BTreeMap;

use itertools::Itertools;

use super::tree::{Crate, Sources};

/// Names that several crates may share, each with the reason.
const SHARED: &[(&str, &str)] = &[];

/// Where a type is declared.
struct Place<'a> {
    /// The folder of its crate.
    krate: &'a str,
    path: &'a str,
    line: usize,
    is_public: bool,
}

impl Place<'_> {
    /// Returns true if a reader meets both types, in one crate or as parts of two.
    fn is_confused_with(&self, other: &Place<'_>) -> bool {
        self.krate == other.krate || self.is_public && other.is_public
    }
}

/// Returns a fault for each name of several types, and for each name in the list of exceptions that has one type.
pub(super) fn doubled(sources: &Sources) -> Vec<String> {
    judged(&types(sources), SHARED)
}

/// Returns the types that are compared, by their names.
fn types(sources: &Sources) -> BTreeMap<&str, Vec<Place<'_>>> {
    let mut types = BTreeMap::<&str, Vec<Place<'_>>>::new();
    for root in sources.keys() {
        let folder = root
            .strip_suffix("/src/lib.rs")
            .or_else(|| root.strip_suffix("/src/main.rs"));
        let is_shipped = |folder: &&str| folder.starts_with("crates/") || *folder == "xtask";
        let Some(krate) = folder.filter(is_shipped) else {
            continue;
        };
        for (path, file) in Crate::read(root, sources).0.into_values() {
            for (line, name, is_public) in file.types() {
                types.entry(name).or_default().push(Place {
                    krate,
                    path,
                    line,
                    is_public,
                });
            }
        }
    }
    types
}

fn judged(types: &BTreeMap<&str, Vec<Place<'_>>>, shared: &[(&str, &str)]) -> Vec<String> {
    let doubled = types.iter().map(|(name, places)| {
        let is_confused = |(at, place): &(usize, &Place<'_>)| {
            let mut others = places.iter().enumerate().filter(|(other, _)| other != at);
            others.any(|(_, other)| place.is_confused_with(other))
        };
        let confused = places.iter().enumerate().filter(is_confused);
        (*name, confused.map(|(_, place)| place).collect_vec())
    });
    let doubled: BTreeMap<_, _> = doubled.filter(|(_, places)| !places.is_empty()).collect();
    let faults = doubled.iter().filter_map(|(name, places)| {
        let is_shared = shared.iter().any(|(known, _)| known == name);
        let lines = places
            .iter()
            .map(|place| format!("{}:{}", place.path, place.line));
        let lines = lines.collect_vec().join(", ");
        (!is_shared).then(|| format!("{lines}: several types are named {name}"))
    });
    let stale = shared
        .iter()
        .filter(|(name, _)| !doubled.contains_key(name));
    let stale =
        stale.map(|(name, _)| format!("xtask/src/tidy/names.rs: only one type is named {name}"));
    faults.chain(stale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(files: &[(&str, &str)], shared: &[(&str, &str)], wanted: &[&str]) {
        let owned = files
            .iter()
            .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
        let sources: Sources = owned.collect();
        assert_eq!(judged(&types(&sources), shared), wanted);
    }

    #[test]
    fn public_types_of_one_name_are_found_in_two_crates() {
        let fault = "crates/a/src/b.rs:2, crates/c/src/lib.rs:1: several types are named Limits";
        let files = [
            ("crates/d/src/lib.rs", "struct Limits;"),
            ("crates/a/src/lib.rs", "mod b;"),
            ("crates/a/src/b.rs", "\npub struct Limits;\nstruct Own;"),
            (
                "crates/c/src/lib.rs",
                "pub(crate) enum Limits {}\nstruct Own;",
            ),
        ];
        check(&files, &[], &[fault]);
        check(&files, &[("Limits", "a reason")], &[]);
    }

    #[test]
    fn a_private_type_counts_within_its_crate() {
        let root = "mod b;\ntype Row = u8;\nunsafe trait Own {}";
        let fault = "crates/a/src/lib.rs:2, crates/a/src/b.rs:1: several types are named Row";
        check(
            &[
                ("crates/a/src/lib.rs", root),
                ("crates/a/src/b.rs", "struct Row;"),
            ],
            &[],
            &[fault],
        );
    }

    #[test]
    fn types_of_tests_functions_and_implementations_do_not_count() {
        let root = "pub struct Row;\nimpl Iterator for Row { type Item = Row; }\nfn f() { struct Row; }\n\
                    #[cfg(test)]\nmod tests { struct Row; }\n#[cfg(test)]\nmod rig;";
        check(
            &[
                ("crates/a/src/lib.rs", root),
                ("crates/a/src/rig.rs", "pub struct Row;"),
                ("crates/a/tests/main.rs", "struct Row;"),
            ],
            &[],
            &[],
        );
    }

    #[test]
    fn an_exception_that_is_not_needed_is_a_fault() {
        let fault = "xtask/src/tidy/names.rs: only one type is named Row";
        check(
            &[("xtask/src/main.rs", "struct Row;")],
            &[("Row", "a reason")],
            &[fault],
        );
    }
}
