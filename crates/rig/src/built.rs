//! Builds everything that the tests run, once: every test, benchmark and program of the workspace in one profile. A
//! part of the workspace would get its dependencies with other features, and cargo would build those again; so it is
//! always asked for the whole.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use cargo_metadata::{Artifact as Built, Message, TargetKind};

use crate::command::{At, Result, command, quietly, words};

/// An executable that cargo has built.
pub struct Artifact {
    /// The folder of its package.
    pub package: PathBuf,
    /// Its target: `lib`, or the name of a program, example, test or benchmark.
    pub target: String,
    /// The kind of the target.
    pub kind: ArtifactKind,
    /// The executable.
    pub file: PathBuf,
}

/// The purpose of an executable.
#[derive(Clone, Copy, PartialEq)]
pub enum ArtifactKind {
    /// A program, or an example.
    Program,
    /// Tests of a library, a program, or by themselves.
    Test,
    /// Benchmarks.
    Benchmark,
}

/// Builds all tests, benchmarks, examples and programs.
pub fn everything(root: &Path) -> Result<Vec<Artifact>> {
    cargo(root, "--workspace --all-targets")
}

/// Builds the daemon and the driver of its tests, as `everything` builds them.
pub fn programs(root: &Path) -> Result<[PathBuf; 2]> {
    // Cargo takes the features of dev-dependencies in as soon as an example is asked for, as the tests do.
    let built = cargo(root, "--workspace --bin cleave --example drive")?;
    Ok([program(&built, "cleave")?, program(&built, "drive")?])
}

/// Builds the daemon and the driver of its tests as they are released.
pub fn for_release(root: &Path) -> Result<[PathBuf; 2]> {
    println!("building for release");
    let drive = cargo(root, "--release -p cleave-client --example drive")?;
    let daemon = cargo(root, "--release -p cleave")?;
    Ok([program(&daemon, "cleave")?, program(&drive, "drive")?])
}

/// Builds the program whose instructions are counted, as a release is built: with the same crates as the daemon, which are not
/// built a second time.
pub fn instructions(root: &Path) -> Result<PathBuf> {
    let options = "--release -p cleave -p cleave-benches --bin instructions";
    program(&cargo(root, options)?, "instructions")
}

/// Builds the programs of all packages as they are released: the daemon without the features that tests add to it. Returns their
/// folder.
pub fn released(root: &Path) -> Result<PathBuf> {
    for options in [
        "-p cleave",
        "-p cleave-lab",
        "-p cleave-client --example drive",
    ] {
        cargo(root, &format!("--release {options}"))?;
    }
    Ok(root.join("target/release"))
}

/// Builds the daemon of the last release before this commit, from the history of this clone, below target/earlier.
pub fn earlier(root: &Path) -> Result<PathBuf> {
    // Such commits have these subjects.
    let found = "git log -1 --format=%h --grep={} HEAD^";
    let commit = quietly(root, found, &[&"^release: make this "])?;
    let commit = commit.trim();
    if commit.is_empty() {
        return Err("the history of this clone has no release: fetch all of it".to_owned());
    }
    let source = root.join("target/earlier").join(commit);
    std::fs::create_dir_all(&source).at(&source)?;
    let unpack = "sh -c {} {} {}";
    let pipe = "git -C \"$0\" archive \"$1\" | tar -x";
    quietly(&source, unpack, &[&pipe, &root.display(), &commit])?;
    println!("building the last release, {commit}");
    program(&cargo(&source, "--workspace --bin cleave")?, "cleave")
}

/// Returns the path of a program or an example.
pub fn program(artifacts: &[Artifact], name: &str) -> Result<PathBuf> {
    let is_it = |found: &&Artifact| found.kind == ArtifactKind::Program && found.target == name;
    let found = artifacts.iter().find(is_it).map(|found| found.file.clone());
    found.ok_or(format!("cargo built no program `{name}`"))
}

/// Builds with unstable options, which the pinned compiler accepts nevertheless. Returns the folder of the programs.
pub fn instrumented(
    root: &Path,
    what: &str,
    target: &Path,
    flags: &str,
    words: &str,
) -> Result<PathBuf> {
    let version = quietly(root, "rustc -vV", &[])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.ok_or("rustc names no host")?;
    println!("building {what} for {host}");
    // With `--target`, the programs that run at build time are left as they are.
    let environment = "env RUSTC_BOOTSTRAP=1 RUSTFLAGS={} CARGO_TARGET_DIR={}";
    let line = format!("{environment} cargo --locked build {words} --target {host}");
    quietly(root, &line, &[&flags, &target.display()])?;
    Ok(target.join(host))
}

/// Returns the executables that cargo builds.
fn cargo(root: &Path, options: &str) -> Result<Vec<Artifact>> {
    let line =
        format!("nice cargo build --locked --message-format json-render-diagnostics {options}");
    let mut command = command(&words(&line, &[]));
    // A target folder of the caller's would leave old programs where xtask looks for them.
    command.env("CARGO_TARGET_DIR", root.join("target"));
    // Clippy's compiler, which builds the tests in `.ci/run`, optimises less.
    if options.starts_with("--release") {
        command.env("RUSTC_WORKSPACE_WRAPPER", "");
    }
    let output = command.current_dir(root).stderr(Stdio::inherit()).output();
    let output = output.at("cargo")?;
    let messages = Message::parse_stream(&*output.stdout).map_while(std::result::Result::ok);
    let artifacts = messages.filter_map(|message| match message {
        Message::CompilerArtifact(built) => artifact(built),
        _ => None,
    });
    match output.status {
        status if status.success() => Ok(artifacts.collect()),
        status => Err(format!("`{line}` ended with {status}")),
    }
}

/// Returns the executable of a message of cargo's, if it is about one.
fn artifact(built: Built) -> Option<Artifact> {
    let (kind, target) = match built.target.kind.first()? {
        TargetKind::Bench => (ArtifactKind::Benchmark, built.target.name),
        TargetKind::Lib => (ArtifactKind::Test, "lib".to_owned()),
        _ if built.profile.test => (ArtifactKind::Test, built.target.name),
        _ => (ArtifactKind::Program, built.target.name),
    };
    Some(Artifact {
        package: built.manifest_path.parent()?.into(),
        target,
        kind,
        file: built.executable?.into(),
    })
}
