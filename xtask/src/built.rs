//! Builds everything that the tests run, once: every test, benchmark and program of the workspace in one profile. A part of the
//! workspace would get its dependencies with other features, and cargo would build those again; so it is always
//! asked for the whole. Only xtask stands apart, since `cargo xtask` has built it by itself already.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

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

const WORKSPACE: &[&str] = &["--workspace", "--exclude", "xtask"];

/// Builds all tests, benchmarks, examples and programs.
pub(crate) fn everything(root: &Path) -> Result<Vec<Artifact>, String> {
    let mut artifacts = cargo(root, &[WORKSPACE, &["--all-targets"]].concat())?;
    artifacts.extend(cargo(root, &["--package", "xtask", "--all-targets"])?);
    Ok(artifacts)
}

/// The daemon and the driver of its tests, built as `everything` builds them.
pub(crate) fn programs(root: &Path) -> Result<[PathBuf; 2], String> {
    // Cargo takes the features of dev-dependencies in as soon as an example is asked for, as the tests do.
    let wanted = ["--bin", "cleave", "--example", "drive"];
    let artifacts = cargo(root, &[WORKSPACE, &wanted].concat())?;
    Ok([
        program(&artifacts, "cleave")?.to_owned(),
        program(&artifacts, "drive")?.to_owned(),
    ])
}

/// Where a program or an example lies.
pub(crate) fn program<'a>(artifacts: &'a [Artifact], name: &str) -> Result<&'a Path, String> {
    let is_it = |found: &&Artifact| found.kind == Kind::Program && found.target == name;
    let found = artifacts.iter().find(is_it);
    found
        .map(|found| found.file.as_path())
        .ok_or(format!("cargo built no program `{name}`"))
}

fn cargo(root: &Path, words: &[&str]) -> Result<Vec<Artifact>, String> {
    let mut command = Command::new("cargo");
    command
        .args(["build", "--locked"])
        .args(words)
        .args(["--message-format", "json-render-diagnostics"])
        // A target folder of the caller's would leave old programs where other parts of xtask look for them.
        .env("CARGO_TARGET_DIR", root.join("target"))
        .current_dir(root)
        .stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| format!("{command:?}: {error}"))?;
    let printed = child.stdout.take().map(BufReader::new);
    let lines = printed.into_iter().flat_map(BufRead::lines);
    let artifacts = lines
        .map_while(Result::ok)
        .filter_map(|line| artifact(&line))
        .collect();
    match child.wait() {
        Ok(status) if status.success() => Ok(artifacts),
        Ok(status) => Err(format!("{command:?} ended with {status}")),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

/// The executable that a line of cargo's JSON names.
fn artifact(line: &str) -> Option<Artifact> {
    let line: Value = serde_json::from_str(line).ok()?;
    let is_test = line["profile"]["test"].as_bool()?;
    let target = &line["target"];
    let (kind, name) = match target["kind"][0].as_str()? {
        "bench" => (Kind::Benchmark, target["name"].as_str()?),
        "lib" => (Kind::Test, "lib"),
        _ if is_test => (Kind::Test, target["name"].as_str()?),
        _ => (Kind::Program, target["name"].as_str()?),
    };
    Some(Artifact {
        package: Path::new(line["manifest_path"].as_str()?)
            .parent()?
            .to_owned(),
        target: name.to_owned(),
        kind,
        file: line["executable"].as_str()?.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(kind: &str, test: bool, executable: &str) -> String {
        format!(
            "{{\"reason\":\"compiler-artifact\",\"manifest_path\":\"/w/crates/a/Cargo.toml\",\
             \"target\":{{\"kind\":[\"{kind}\"],\"name\":\"thing\"}},\"profile\":{{\"test\":{test}}},\
             \"executable\":{executable}}}"
        )
    }

    #[test]
    fn executables_are_sorted_by_what_they_are_for() {
        let table = [
            ("bin", false, Kind::Program, "thing"),
            ("example", false, Kind::Program, "thing"),
            ("bin", true, Kind::Test, "thing"),
            ("test", true, Kind::Test, "thing"),
            ("lib", true, Kind::Test, "lib"),
            ("bench", false, Kind::Benchmark, "thing"),
            ("bench", true, Kind::Benchmark, "thing"),
        ];
        for (word, test, kind, target) in table {
            let found = artifact(&line(word, test, "\"/t/thing-1\"")).unwrap();
            let wanted = Artifact {
                package: "/w/crates/a".into(),
                target: target.to_owned(),
                kind,
                file: "/t/thing-1".into(),
            };
            assert_eq!(found, wanted, "{word}");
        }
    }

    #[test]
    fn lines_without_an_executable_are_passed_over() {
        for text in [
            line("lib", false, "null"),
            "{\"reason\":\"build-finished\",\"success\":true}".to_owned(),
            "warning: noise".to_owned(),
        ] {
            assert_eq!(artifact(&text), None, "{text}");
        }
    }

    #[test]
    fn a_program_is_found_by_its_name_and_not_among_tests() {
        let artifacts: Vec<Artifact> = [
            ("bin", true, "\"/t/test\""),
            ("bin", false, "\"/t/program\""),
        ]
        .iter()
        .filter_map(|(kind, test, file)| artifact(&line(kind, *test, file)))
        .collect();
        assert_eq!(program(&artifacts, "thing"), Ok(Path::new("/t/program")));
        assert!(program(&artifacts, "other").is_err());
    }
}
