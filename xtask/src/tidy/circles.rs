//! Circles of files. Files of a crate that need each other, directly or through others, can be neither read nor changed one at a
//! time.
//!
//! A file needs the files that define the names which it imports or writes as a path. A re-export stands for the file that it leads to, and
//! counts only if its own file uses the name. Code that only tests have does not count, nor does a method that is called on a value.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use itertools::Itertools;

use super::tree::{Crate, Sources, joined};

/// Imports that a name is followed through, from one re-export to the next.
const HOPS_MAX: usize = 16;

/// Returns a fault for each group of files that are tied by circles.
pub(super) fn tied(sources: &Sources) -> Vec<String> {
    let is_root = |path: &&String| path.ends_with("/lib.rs") || path.ends_with("/main.rs");
    let roots = sources.keys().filter(is_root);
    roots
        .flat_map(|root| Crate::read(root, sources).circles())
        .collect()
}

/// For each module the modules that it needs, each with the first line that does.
type Needs<'a> = BTreeMap<&'a str, BTreeMap<&'a str, usize>>;

impl Crate<'_> {
    /// Describes the shortest circle of each group of files that need each other.
    fn circles(&self) -> Vec<String> {
        let needs = self.needs();
        let starts = needs.keys().copied();
        let trips = starts.map(|start| (start, Trip::from(start, &needs)));
        let trips: BTreeMap<&str, Trip<'_>> = trips.collect();
        let groups = trips.iter().filter_map(|(start, trip)| {
            let is_tied = |other: &&&str| trips[**other].reached.contains(start);
            let tied = trip.reached.iter().filter(is_tied).collect_vec();
            // The first of a group speaks for all.
            (tied.first() == Some(&start)).then_some(tied)
        });
        let circles = groups.map(|tied| {
            let ways = tied.iter().map(|module| &trips[**module].back);
            let shortest = ways.flatten().min_by_key(|way| way.len());
            let shortest = shortest.into_iter().flatten();
            let steps = shortest.tuple_windows().map(|(from, to)| {
                let (file, other) = (self.0[*from].0, self.0[*to].0);
                format!("{file}:{} needs {other}", needs[from][to])
            });
            let steps = steps.collect_vec().join(", ");
            format!("a circle of files: {steps}; {} files are tied", tied.len())
        });
        circles.collect()
    }

    fn needs(&self) -> Needs<'_> {
        let mut needs = Needs::new();
        for (module, (_, file)) in &self.0 {
            let own = needs.entry(module.as_str()).or_default();
            for (line, path) in file.needed() {
                let definer = self.definer(module, &path, 0);
                if let Some(other) = definer.filter(|other| other != module) {
                    own.entry(other).or_insert(line);
                }
            }
        }
        needs
    }

    /// Returns the module that defines what a path names as seen from `module`, or `None` for a module and for what other
    /// crates define.
    fn definer(&self, module: &str, path: &[&str], hops: usize) -> Option<&str> {
        let (mut at, _) = self.0.get_key_value(module)?;
        for (index, &name) in path.iter().enumerate() {
            let next = match name {
                "self" => at.clone(),
                "crate" => String::new(),
                "super" => parent(at).to_owned(),
                _ => joined(at, name),
            };
            if let Some((module, _)) = self.0.get_key_value(&next) {
                at = module;
                continue;
            }
            let file = &self.0[at].1;
            let Some(import) = file.imports.iter().find(|import| import.name == name) else {
                // A module whose file is elsewhere needs nothing of this crate.
                let is_defined = index > 0 && !file.modules().contains(&name);
                return is_defined.then_some(at);
            };
            let path = [&import.path, &path[index + 1..]].concat();
            let behind = (hops < HOPS_MAX).then(|| self.definer(at, &path, hops + 1));
            return behind.flatten();
        }
        None
    }
}

/// The modules that can be reached from one, and the shortest way back to it.
struct Trip<'a> {
    reached: BTreeSet<&'a str>,
    back: Option<Vec<&'a str>>,
}

impl<'a> Trip<'a> {
    fn from(start: &'a str, needs: &Needs<'a>) -> Trip<'a> {
        let mut trip = Trip {
            reached: BTreeSet::new(),
            back: None,
        };
        let mut ways = VecDeque::from([vec![start]]);
        while let Some(way) = ways.pop_front() {
            for next in way.last().into_iter().flat_map(|last| needs[last].keys()) {
                if trip.reached.insert(next) {
                    let longer = [&way[..], &[next]].concat();
                    if *next == start {
                        trip.back = Some(longer);
                    } else {
                        ways.push_back(longer);
                    }
                }
            }
        }
        trip
    }
}

fn parent(module: &str) -> &str {
    module.rsplit_once("::").map_or("", |(parent, _)| parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the faults of a crate of these files.
    fn of(files: &[(&str, &str)]) -> Vec<String> {
        let sources = files
            .iter()
            .map(|(path, text)| (format!("a/src/{path}"), (*text).to_owned()));
        tied(&sources.collect())
    }

    #[test]
    fn a_circle_is_named_with_its_lines() {
        let faults = of(&[
            (
                "lib.rs",
                "mod b;\nmod c;\nmod d;\npub use b::B;\npub use d::D;",
            ),
            (
                "b.rs",
                "use crate::{\n    d::{Q, R as S},\n};\npub struct B;",
            ),
            ("c.rs", "// One line more.\nfn f() { crate::B::new(); }"),
            ("d.rs", "mod e;\nuse crate::c;\n\nfn f() { c::f() }"),
            ("d/e.rs", "use super::D;"),
        ]);
        let circle = "a circle of files: a/src/b.rs:2 needs a/src/d.rs, a/src/d.rs:4 needs a/src/c.rs, \
             a/src/c.rs:2 needs a/src/b.rs; 3 files are tied";
        assert_eq!(faults, [circle]);
    }

    #[track_caller]
    fn judged(parent: &str, child: &str, is_circle: bool) {
        for path in ["b.rs", "b/mod.rs"] {
            let faults = of(&[("lib.rs", parent), (path, child)]);
            assert_eq!(
                !faults.is_empty(),
                is_circle,
                "{parent} {child}: {faults:?}"
            );
        }
    }

    #[test]
    fn a_parent_needs_its_module_if_it_uses_what_that_defines() {
        let child = "use super::P; pub struct B;";
        for (parent, is_circle) in [
            ("mod b; pub struct P;", false),
            ("mod b; pub use b::B; pub struct P;", false),
            ("mod b; pub use b::B; pub struct P(B);", true),
            ("mod b; use b::B; pub struct P;", true),
            ("mod b; pub struct P(b::B);", true),
            ("#[cfg(test)] mod b; pub struct P(b::B);", false),
            ("mod b; pub use std::P; fn f(_: b::B) {}", false),
        ] {
            judged(parent, child, is_circle);
        }
        judged(
            "mod b; use b::B;",
            "pub struct B; fn f(_: crate::B) {}",
            false,
        );
        let elsewhere = "#[path = \"../d.rs\"] mod d; mod b; use b::B;";
        judged(elsewhere, "use crate::d::D; pub struct B(D);", false);
    }

    #[test]
    fn a_module_needs_its_parent_if_shipped_code_of_it_does() {
        let parent = "mod b; pub struct P; fn f() { b::g() }";
        for (child, is_circle) in [
            ("use crate::{x::Y, P as Q};", true),
            ("use super::*;", true),
            ("fn g(_: super::P) {}", true),
            ("fn g(_: &'static P) { other::P }", false),
            ("/* super::P */ // super::P", false),
            (r##"f(r#""super::P"#, "\"super::P", '"', '\'')"##, false),
            ("#[cfg(test)] mod tests { use super::super::P; }", false),
            ("#[cfg(not(test))] use super::P;", true),
            ("#[cfg(test)] use x::{Y, Z}; use super::P;", true),
        ] {
            judged(parent, child, is_circle);
        }
    }
}
