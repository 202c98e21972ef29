//! What `cargo metadata` says about packages and who depends on whom.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::step::quietly;

/// One package of the dependency graph.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) licence: Option<String>,
    pub(crate) manifest: PathBuf,
    /// Ids of what it needs at run time or to build, and of what only its tests need.
    pub(crate) needs: Vec<String>,
    pub(crate) needs_in_tests: Vec<String>,
}

/// All packages by id, and which of them are ours.
pub(crate) struct Metadata {
    pub(crate) packages: BTreeMap<String, Package>,
    pub(crate) members: BTreeSet<String>,
}

impl Metadata {
    /// Asks cargo, for the platform we ship to.
    pub(crate) fn load(root: &Path) -> Result<Metadata, String> {
        let words = ["cargo", "metadata", "--format-version", "1", "--locked"];
        let platform = ["--filter-platform", "x86_64-unknown-linux-gnu"];
        Metadata::parse(&quietly(root, &[&words[..], &platform].concat(), &[])?)
    }

    /// Reads the JSON that `cargo metadata --format-version 1` prints.
    pub(crate) fn parse(text: &str) -> Result<Metadata, String> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| format!("cargo metadata: {error}"))?;
        let mut packages = BTreeMap::new();
        for package in list(&value["packages"]) {
            packages.insert(text_of(&package["id"]), parse_package(package));
        }
        for node in list(&value["resolve"]["nodes"]) {
            if let Some(package) = packages.get_mut(&text_of(&node["id"])) {
                add_needs(package, node);
            }
        }
        let members = list(&value["workspace_members"])
            .iter()
            .map(text_of)
            .collect();
        Ok(Metadata { packages, members })
    }

    /// Everything that ends up in, or helps to build, what the workspace ships.
    pub(crate) fn shipped(&self) -> BTreeSet<&str> {
        let mut seen: BTreeSet<&str> = self.members.iter().map(String::as_str).collect();
        let mut open: VecDeque<&str> = seen.iter().copied().collect();
        while let Some(id) = open.pop_front() {
            for need in self
                .packages
                .get(id)
                .iter()
                .flat_map(|package| &package.needs)
            {
                if seen.insert(need) {
                    open.push_back(need);
                }
            }
        }
        seen
    }

    /// Our own packages.
    pub(crate) fn own(&self) -> impl Iterator<Item = &Package> {
        self.members.iter().filter_map(|id| self.packages.get(id))
    }

    /// Names of packages by their ids.
    pub(crate) fn names<'a>(&'a self, ids: &'a [String]) -> impl Iterator<Item = &'a str> {
        ids.iter()
            .filter_map(|id| self.packages.get(id))
            .map(|package| package.name.as_str())
    }
}

fn parse_package(package: &Value) -> Package {
    Package {
        name: text_of(&package["name"]),
        version: text_of(&package["version"]),
        licence: package["license"].as_str().map(str::to_owned),
        manifest: PathBuf::from(text_of(&package["manifest_path"])),
        needs: Vec::new(),
        needs_in_tests: Vec::new(),
    }
}

fn add_needs(package: &mut Package, node: &Value) {
    for dependency in list(&node["deps"]) {
        let id = text_of(&dependency["pkg"]);
        let kinds = list(&dependency["dep_kinds"]);
        let is_dev = |kind: &Value| kind["kind"].as_str() == Some("dev");
        if kinds.iter().any(|kind| !is_dev(kind)) {
            package.needs.push(id.clone());
        }
        if kinds.iter().any(is_dev) {
            package.needs_in_tests.push(id);
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dev_dependencies_do_not_ship_and_build_dependencies_do() {
        let json = r#"{
            "packages": [
                {"id": "a", "name": "a", "version": "1", "license": "MIT", "manifest_path": "/a/Cargo.toml"},
                {"id": "b", "name": "b", "version": "1", "license": null, "manifest_path": "/b/Cargo.toml"},
                {"id": "c", "name": "c", "version": "1", "license": null, "manifest_path": "/c/Cargo.toml"},
                {"id": "d", "name": "d", "version": "1", "license": null, "manifest_path": "/d/Cargo.toml"}],
            "resolve": {"nodes": [
                {"id": "a", "deps": [
                    {"pkg": "b", "dep_kinds": [{"kind": "build"}, {"kind": "dev"}]},
                    {"pkg": "c", "dep_kinds": [{"kind": "dev"}]}]},
                {"id": "b", "deps": [{"pkg": "d", "dep_kinds": [{"kind": null}]}]}]},
            "workspace_members": ["a"]}"#;
        let metadata = Metadata::parse(json).unwrap();
        assert_eq!(
            metadata.shipped().into_iter().collect::<Vec<_>>(),
            ["a", "b", "d"]
        );
        let a = metadata.own().next().unwrap();
        assert_eq!(
            metadata.names(&a.needs_in_tests).collect::<Vec<_>>(),
            ["b", "c"]
        );
        assert_eq!(a.licence.as_deref(), Some("MIT"));
    }

    #[test]
    fn what_is_not_json_is_refused() {
        assert!(Metadata::parse("error: no such file").is_err());
    }
}
