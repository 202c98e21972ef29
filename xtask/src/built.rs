//! Builds everything that the tests run, once: every test, benchmark and program of the workspace in one profile. A
//! part of the workspace would get its dependencies with other features, and cargo would build those again; so it is
//! always asked for the whole.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cargo_metadata::{Artifact as Built, Message, TargetKind};

use crate::step::{At, quietly};

/// An executable that cargo has built.
#[derive(Debug, PartialEq)]
pub(crate) struct Artifact {
    /// The folder of its package.
    pub(crate) package: PathBuf,
    /// Its target: `lib`, or the name of a program, example, test or benchmark.
    pub(crate) target: String,
    pub(crate) kind: Kind,
    pub(crate) file: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Program,
    Test,
    Benchmark,
}

/// Builds all tests, benchmarks, examples and programs.
pub(crate) fn everything(root: &Path) -> Result<Vec<Artifact>, String> {
    cargo(root, &["--workspace", "--all-targets"])
}

/// The daemon and the driver of its tests, built as `everything` builds them.
pub(crate) fn programs(root: &Path) -> Result<[PathBuf; 2], String> {
    // Cargo takes the features of dev-dependencies in as soon as an example is asked for, as the tests do.
    let wanted = ["--workspace", "--bin", "cleave", "--example", "drive"];
    let artifacts = cargo(root, &wanted)?;
    let [cleave, drive] = ["cleave", "drive"].map(|name| program(&artifacts, name));
    Ok([cleave?.to_owned(), drive?.to_owned()])
}

/// Builds a part of the workspace as it ships, without what tests add to it; the folder of its programs.
pub(crate) fn released(root: &Path, what: &str) -> Result<PathBuf, String> {
    let target = root.join("target");
    let build = ["cargo", "build", "--locked", "--release"];
    let words: Vec<&str> = build.into_iter().chain(what.split(' ')).collect();
    // A target folder of the caller's would leave an old program here.
    let to = target.to_string_lossy();
    quietly(root, &words, &[("CARGO_TARGET_DIR", &to)])?;
    Ok(target.join("release"))
}

/// Path of a program or an example.
pub(crate) fn program<'a>(artifacts: &'a [Artifact], name: &str) -> Result<&'a Path, String> {
    let is_it = |found: &&Artifact| found.kind == Kind::Program && found.target == name;
    let found = artifacts.iter().find(is_it);
    found
        .map(|found| &*found.file)
        .ok_or(format!("cargo built no program `{name}`"))
}

fn cargo(root: &Path, words: &[&str]) -> Result<Vec<Artifact>, String> {
    let mut command = Command::new("cargo");
    command
        .args([
            "build",
            "--locked",
            "--message-format",
            "json-render-diagnostics",
        ])
        .args(words)
        // A target folder of the caller's would leave old programs where other parts of xtask look for them.
        .env("CARGO_TARGET_DIR", root.join("target"))
        .current_dir(root)
        .stdout(Stdio::piped());
    let mut child = command.spawn().at("cargo")?;
    let printed = child.stdout.take().map(BufReader::new);
    let messages = printed.into_iter().flat_map(Message::parse_stream);
    let artifacts = messages
        .map_while(Result::ok)
        .filter_map(|message| match message {
            Message::CompilerArtifact(built) => artifact(built),
            _ => None,
        });
    let artifacts = artifacts.collect();
    match child.wait().at("cargo")? {
        status if status.success() => Ok(artifacts),
        status => Err(format!("{command:?} ended with {status}")),
    }
}

/// An executable that cargo built.
fn artifact(built: Built) -> Option<Artifact> {
    let (kind, target) = match built.target.kind.first()? {
        TargetKind::Bench => (Kind::Benchmark, built.target.name),
        TargetKind::Lib => (Kind::Test, "lib".to_owned()),
        _ if built.profile.test => (Kind::Test, built.target.name),
        _ => (Kind::Program, built.target.name),
    };
    Some(Artifact {
        package: built.manifest_path.parent()?.into(),
        target,
        kind,
        file: built.executable?.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kind: &str, test: bool, executable: &str) -> Option<Artifact> {
        let line = format!(
            r#"{{"package_id": "a", "manifest_path": "/w/a/Cargo.toml", "features": [], "filenames": [], "fresh": true,
                "target": {{"kind": ["{kind}"], "crate_types": ["bin"], "name": "thing", "src_path": "/w/a/a.rs"}},
                "profile": {{"opt_level": "0", "debug_assertions": true, "overflow_checks": true, "test": {test}}},
                "executable": {executable}}}"#
        );
        artifact(serde_json::from_str(&line).unwrap())
    }

    #[test]
    fn executables_are_sorted_by_their_use() {
        for (word, test, kind, target) in [
            ("bin", false, Kind::Program, "thing"),
            ("example", false, Kind::Program, "thing"),
            ("bin", true, Kind::Test, "thing"),
            ("test", true, Kind::Test, "thing"),
            ("lib", true, Kind::Test, "lib"),
            ("bench", false, Kind::Benchmark, "thing"),
        ] {
            let found = found(word, test, "\"/t/thing-1\"").unwrap();
            assert_eq!((found.kind, &*found.target), (kind, target), "{word}");
            assert_eq!(
                (found.package, found.file),
                ("/w/a".into(), "/t/thing-1".into())
            );
        }
        assert_eq!(found("lib", false, "null"), None);
    }
}
