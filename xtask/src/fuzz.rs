//! `cargo xtask fuzz`: runs the fuzz targets of `fuzz/`, one after the other.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use clap::builder::PossibleValuesParser;

use crate::step::{At, line};

/// Instruments the code, as `cargo fuzz` does: counters for libFuzzer, comparisons that it can learn from, and
/// AddressSanitizer. Some of it is unstable, which the pinned compiler takes all the same.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address";

/// An input that takes this long is a find.
const INPUT_SECONDS_MAX: u32 = 20;

#[derive(clap::Args)]
pub(crate) struct Request {
    /// Fuzz each target for this long
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_080))]
    minutes: u32,
    /// Fuzz only these targets [default: all]
    #[arg(value_name = "TARGET", value_parser = PossibleValuesParser::from(all()))]
    targets: Vec<String>,
}

/// Builds and runs. A find is kept and is a failure, after the other targets have had their time.
pub(crate) fn run(root: &Path, request: &Request) -> Result<(), String> {
    let start = Instant::now();
    let targets = match request.targets.is_empty() {
        true => all(),
        false => request.targets.clone(),
    };
    let programs = build(root)?;
    let folder = root.join("target/fuzz");
    let finds = folder.join("finds");
    std::fs::create_dir_all(&finds).at(&finds)?;
    let mut failed = Vec::new();
    for target in &targets {
        println!("{target}: {} min", request.minutes);
        let log = folder.join(format!("{target}.log"));
        match fuzz(root, &programs, target, request.minutes, &log)? {
            true => println!("{target}: {}", last(&log)),
            false => {
                let (finds, log) = (finds.display(), log.display());
                println!("{target}: a find, in {finds}; its output: {log}");
                failed.push(target.as_str());
            }
        }
    }
    if failed.is_empty() {
        let seconds = start.elapsed().as_secs();
        println!("passed in {seconds} s: {}", targets.join(", "));
        return Ok(());
    }
    let (finds, programs) = (finds.display(), programs.display());
    Err(format!(
        "finds of {} in {finds}; run a program of {programs} with such a file to see it again, and make it a test of \
         its crate",
        failed.join(", ")
    ))
}

/// Names of all targets: the files of `fuzz/src/bin`.
fn all() -> Vec<String> {
    let files = std::fs::read_dir(crate::root().join("fuzz/src/bin"));
    let files = files.into_iter().flatten().flatten();
    let names = files.filter_map(|file| Some(file.path().file_stem()?.to_str()?.to_owned()));
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

/// Builds all targets; returns the folder of the programs.
fn build(root: &Path) -> Result<PathBuf, String> {
    let host = host(root)?;
    println!("building the fuzz targets for {host}");
    let target = root.join("target/fuzz/build");
    // With `--target`, what runs at build time is left as it is.
    let words =
        format!("cargo --locked build --release --manifest-path fuzz/Cargo.toml --target {host}");
    let environment = [
        ("RUSTC_BOOTSTRAP", "1"),
        ("RUSTFLAGS", FLAGS),
        ("CARGO_TARGET_DIR", &*target.to_string_lossy()),
    ];
    line(root, &words, &environment)?;
    Ok(target.join(host).join("release"))
}

/// The compiler's own target.
pub(crate) fn host(root: &Path) -> Result<String, String> {
    let version = line(root, "rustc -vV", &[])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc names no host")?.to_owned())
}

/// Runs one target on the corpus of earlier runs and on its seeds; `false`: it found something.
fn fuzz(
    root: &Path,
    programs: &Path,
    target: &str,
    minutes: u32,
    log: &Path,
) -> Result<bool, String> {
    let corpus = root.join("target/fuzz/corpus").join(target);
    std::fs::create_dir_all(&corpus).at(&corpus)?;
    let seeds = root.join("fuzz/seeds").join(target);
    let output = std::fs::File::create(log).at(log)?;
    let finds = root.join("target/fuzz/finds").join(format!("{target}-"));
    let mut command = Command::new(programs.join(target));
    command
        .arg(format!("-max_total_time={}", minutes * 60))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-artifact_prefix={}", finds.display()))
        // It costs a process for each input where threads come and go.
        .arg("-detect_leaks=0")
        .arg("-print_final_stats=1")
        .arg(corpus)
        .args(seeds.exists().then_some(seeds))
        .stdout(output.try_clone().at(log)?)
        .stderr(output);
    let status = command.status().at(target)?;
    if !status.success() {
        // libFuzzer prints nothing for a signal that it does not catch.
        println!("{target}: {status}");
    }
    Ok(status.success())
}

/// Result of a run.
fn last(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map_or("?", str::trim).to_owned()
    };
    let covered = text.lines().rev().find_map(|line| {
        let (_, rest) = line.split_once(" cov: ")?;
        rest.split_whitespace().next()
    });
    format!(
        "{} inputs, {} a second, {} edges covered",
        of("stat::number_of_executed_units:"),
        of("stat::average_exec_per_sec:"),
        covered.unwrap_or("?")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_seeds_and_every_seed_a_target() {
        assert!(all().len() >= 6, "{:?}", all());
        let seeds = std::fs::read_dir(crate::root().join("fuzz/seeds")).unwrap();
        let names = seeds.map(|folder| folder.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        assert_eq!(all(), names);
    }
}
