//! `cargo xtask fuzz`: runs the fuzz targets of `fuzz/`, one after the other.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::step::quietly;

/// Instruments the code, as `cargo fuzz` does: counters for libFuzzer, comparisons that it can learn from, and
/// AddressSanitizer. Some of it is unstable, which the pinned compiler takes all the same.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address";

/// An input that takes this long is a find.
const INPUT_SECONDS_MAX: u32 = 20;

/// Targets, and for how long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    /// For each target.
    minutes: u32,
    /// None named: all.
    targets: Vec<&'a str>,
}

impl<'a> Request<'a> {
    pub(crate) fn parse(words: &[&'a str]) -> Result<Request<'a>, String> {
        let mut request = Request {
            minutes: 1,
            targets: Vec::new(),
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "--minutes" => {
                    let minutes = words.next().and_then(|minutes| minutes.parse().ok());
                    request.minutes = minutes.ok_or("--minutes takes a number")?;
                }
                option if option.starts_with('-') => {
                    return Err(format!("fuzz takes no `{option}`"));
                }
                target => request.targets.push(target),
            }
        }
        Ok(request)
    }

    /// The targets to run, of those that there are.
    fn chosen(&self, all: Vec<String>) -> Result<Vec<String>, String> {
        match self
            .targets
            .iter()
            .find(|named| all.iter().all(|one| one != *named))
        {
            Some(unknown) => Err(format!(
                "there is no target `{unknown}`; there are {}",
                all.join(", ")
            )),
            None if self.targets.is_empty() => Ok(all),
            None => Ok(self
                .targets
                .iter()
                .map(|named| (*named).to_owned())
                .collect()),
        }
    }
}

/// Builds and runs. A find is kept and is a failure, after the other targets have had their time.
pub(crate) fn run(root: &Path, request: &Request<'_>) -> Result<(), String> {
    let start = Instant::now();
    let targets = request.chosen(all(root)?)?;
    let programs = build(root)?;
    let folder = root.join("target/fuzz");
    let finds = folder.join("finds");
    std::fs::create_dir_all(&finds).map_err(|error| format!("{}: {error}", finds.display()))?;
    let mut failed = Vec::new();
    for target in &targets {
        println!("{target}: {} min", request.minutes);
        let log = folder.join(format!("{target}.log"));
        match fuzz(root, &programs, target, request.minutes, &log)? {
            true => println!("{target}: {}", last(&log)),
            false => {
                println!(
                    "{target}: a find, in {}; its output: {}",
                    finds.display(),
                    log.display()
                );
                failed.push(target.as_str());
            }
        }
    }
    match failed.is_empty() {
        true => {
            println!(
                "passed in {} s: {}",
                start.elapsed().as_secs(),
                targets.join(", ")
            );
            Ok(())
        }
        false => Err(format!(
            "finds of {} in {}; run a program of {} with such a file to see it again, and make it a test of the crate \
             concerned",
            failed.join(", "),
            finds.display(),
            programs.display()
        )),
    }
}

/// Names of all targets: the files of `fuzz/src/bin`.
fn all(root: &Path) -> Result<Vec<String>, String> {
    let folder = root.join("fuzz/src/bin");
    let told = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(told)? {
        let path = entry.map_err(told)?.path();
        let stem = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned());
        names.extend(stem);
    }
    names.sort_unstable();
    Ok(names)
}

/// Where the programs are.
fn build(root: &Path) -> Result<PathBuf, String> {
    let said = quietly(root, &["rustc", "-vV"], &[])?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.ok_or("rustc does not say what machine this is")?;
    println!("building the fuzz targets for {host}");
    let target = root.join("target/fuzz/build");
    // With `--target`, what runs at build time is left as it is.
    let words = [
        "cargo",
        "--locked",
        "build",
        "--release",
        "--manifest-path",
        "fuzz/Cargo.toml",
        "--target",
        host,
    ];
    let environment = [
        ("RUSTC_BOOTSTRAP", "1"),
        ("RUSTFLAGS", FLAGS),
        ("CARGO_TARGET_DIR", &*target.to_string_lossy()),
    ];
    quietly(root, &words, &environment)?;
    Ok(target.join(host).join("release"))
}

/// Runs one target on what it has learnt before and on its seeds; `false`: it found something.
fn fuzz(
    root: &Path,
    programs: &Path,
    target: &str,
    minutes: u32,
    log: &Path,
) -> Result<bool, String> {
    let told = |error: std::io::Error| format!("{target}: {error}");
    let corpus = root.join("target/fuzz/corpus").join(target);
    std::fs::create_dir_all(&corpus).map_err(told)?;
    let seeds = root.join("fuzz/seeds").join(target);
    let output = std::fs::File::create(log).map_err(told)?;
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
        .stdout(output.try_clone().map_err(told)?)
        .stderr(output);
    if seeds.exists() {
        command.arg(seeds);
    }
    let status = command.status().map_err(told)?;
    if !status.success() {
        // libFuzzer says nothing of a signal that it does not catch.
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
    fn words_choose_time_and_targets() {
        let request = Request::parse(&["chain", "--minutes", "30", "session"]).unwrap();
        assert_eq!(
            (request.minutes, &request.targets[..]),
            (30, &["chain", "session"][..])
        );
        let there = || ["chain", "control", "session"].map(str::to_owned).to_vec();
        assert_eq!(request.chosen(there()).unwrap(), ["chain", "session"]);
        let all = Request::parse(&[]).unwrap();
        assert_eq!(all.chosen(there()).unwrap(), there());
        let unknown = Request::parse(&["chains"]).unwrap().chosen(there());
        assert!(unknown.unwrap_err().contains("there are chain, control"));
        for wrong in [&["--minutes"][..], &["--minutes", "x"], &["--hours", "1"]] {
            assert!(Request::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn every_target_has_seeds_and_every_seed_a_target() {
        let root = crate::root();
        let targets = all(&root).unwrap();
        assert!(targets.len() >= 6, "{targets:?}");
        let folders = std::fs::read_dir(root.join("fuzz/seeds")).unwrap();
        let mut seeded: Vec<String> = folders
            .map(|folder| folder.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        seeded.sort_unstable();
        assert_eq!(targets, seeded);
    }
}
