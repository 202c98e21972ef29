//! `cargo xtask fuzz`: runs the fuzz targets of `fuzz/`, one after the other.

use std::path::Path;
use std::time::Instant;

use clap::builder::PossibleValuesParser;
use cleave_rig::built;
use cleave_rig::{At, Result, words};
use itertools::Itertools;

use crate::step::logged;

/// Instruments the code, as `cargo fuzz` does: counters for libFuzzer, comparisons that it can learn from, and
/// AddressSanitizer.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address";

/// One target on the corpus of earlier runs and on its seeds. An input that takes 20 s is a find. Looking for leaks costs a
/// process for each input where threads come and go.
const RUN: &str = "{} -max_total_time={} -timeout=20 -artifact_prefix=finds/{}- -detect_leaks=0 -print_final_stats=1 \
corpus/{} {}";

#[derive(clap::Args)]
pub(crate) struct FuzzArgs {
    /// Fuzz each target for this long
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_080))]
    minutes: u32,
    /// Fuzz only these targets [default: all]
    #[arg(value_name = "TARGET", value_parser = PossibleValuesParser::from(names("src/bin")))]
    targets: Vec<String>,
}

/// Builds and runs. A find is kept and is a failure, after the other targets have had their time.
pub(crate) fn run(root: &Path, request: &FuzzArgs) -> Result {
    let start = Instant::now();
    let targets = match request.targets.is_empty() {
        true => names("src/bin"),
        false => request.targets.clone(),
    };
    let folder = root.join("target/fuzz");
    let options = "--release --manifest-path fuzz/Cargo.toml";
    let build = folder.join("build");
    let programs = built::instrumented(root, "the fuzz targets", &build, FLAGS, options)?;
    let programs = programs.join("release");
    let finds = folder.join("finds");
    std::fs::create_dir_all(&finds).at(&finds)?;
    let mut failed = Vec::new();
    for target in &targets {
        println!("{target}: {} min", request.minutes);
        std::fs::create_dir_all(folder.join("corpus").join(target)).at(target)?;
        let log = folder.join(format!("{target}.log"));
        let (program, seconds) = (programs.join(target), request.minutes * 60);
        let seeds = root.join("fuzz/seeds").join(target);
        let values: [&dyn std::fmt::Display; 5] = [
            &program.display(),
            &seconds,
            target,
            target,
            &seeds.display(),
        ];
        match logged(&folder, &log, &words(RUN, &values)) {
            Ok(()) => println!("{target}: {}", result(&log)),
            Err(why) => {
                let (finds, log) = (finds.display(), log.display());
                // libFuzzer prints nothing for a signal that it does not catch.
                println!("{target}: {why}\n{target}: a find, in {finds}; its output: {log}");
                failed.push(target.as_str());
            }
        }
    }
    if failed.is_empty() {
        let seconds = start.elapsed().as_secs();
        println!("passed in {seconds} s: {}", targets.join(", "));
        return Ok(());
    }
    let (failed, finds, programs) = (failed.join(", "), finds.display(), programs.display());
    Err(format!(
        "finds of {failed} in {finds}; run a program of {programs} with such a file to see it again, and make it a \
         test of its crate"
    ))
}

/// Names in a folder below `fuzz`: of all targets in `src/bin`.
fn names(folder: &str) -> Vec<String> {
    let files = std::fs::read_dir(cleave_rig::root().join("fuzz").join(folder));
    let files = files.into_iter().flatten().flatten();
    let names = files.filter_map(|file| Some(file.path().file_stem()?.to_str()?.to_owned()));
    names.sorted().collect()
}

/// Result of a run.
fn result(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let last = |name: &str| {
        let found = text.rsplit_once(name).map(|(_, rest)| rest);
        found
            .and_then(|rest| rest.split_whitespace().next())
            .unwrap_or("?")
    };
    let inputs = last("stat::number_of_executed_units:");
    let pace = last("stat::average_exec_per_sec:");
    let edges = last(" cov: ");
    format!("{inputs} inputs, {pace} a second, {edges} edges covered")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_seeds_and_every_seed_a_target() {
        assert!(names("src/bin").len() >= 6);
        assert_eq!(names("src/bin"), names("seeds"));
    }
}
