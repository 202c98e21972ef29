//! The files of a crate that ship, as its modules tell them.

use std::collections::BTreeMap;

use super::imports::File;

/// Texts of files, by their paths.
pub(super) type Sources = BTreeMap<String, String>;

/// The files of a crate and their paths, by the names of their modules. The name of the root is empty.
#[derive(Default)]
pub(super) struct Crate<'a>(pub(super) BTreeMap<String, (&'a str, File<'a>)>);

impl<'a> Crate<'a> {
    /// Reads the crate with this root.
    pub(super) fn read(root: &'a str, sources: &'a Sources) -> Crate<'a> {
        let mut tree = Crate::default();
        tree.add("", root, sources);
        tree
    }

    /// Adds a file and those of its modules.
    fn add(&mut self, module: &str, path: &'a str, sources: &'a Sources) {
        let file = File::parse(&sources[path]);
        let stem = path.trim_end_matches(".rs");
        let owners = ["/lib", "/main", "/mod"];
        let folder = owners.iter().find_map(|owner| stem.strip_suffix(owner));
        let folder = folder.unwrap_or(stem);
        for name in file.modules() {
            let places = [
                format!("{folder}/{name}.rs"),
                format!("{folder}/{name}/mod.rs"),
            ];
            let child = places.iter().find_map(|place| sources.get_key_value(place));
            if let Some((path, _)) = child {
                self.add(&joined(module, name), path, sources);
            }
        }
        self.0.insert(module.to_owned(), (path, file));
    }
}

/// Returns the name of a module in another.
pub(super) fn joined(module: &str, name: &str) -> String {
    match module {
        "" => name.to_owned(),
        parent => format!("{parent}::{name}"),
    }
}
