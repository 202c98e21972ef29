//! `cargo xtask test`: sets the machine up, then runs everything, or the part that is asked for.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::bench::{self, instructions};
use crate::guest::{self, BackendKind, Keep};
use crate::guest_bench;
use crate::setup;

/// Which tests, and how.
#[derive(Debug, PartialEq)]
pub(crate) struct Selection {
    part: Part,
    /// The only guest case to run; `None`: all of them.
    case: Option<String>,
    keep: Keep,
    against: BackendKind,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Part {
    All,
    Unit,
    Integration,
    Benches,
    Guest,
}

impl Selection {
    /// Reads the words behind `cargo xtask test`.
    pub(crate) fn parse(words: &[&str]) -> Result<Selection, String> {
        let mut selection = Selection {
            part: Part::All,
            case: None,
            keep: Keep::No,
            against: BackendKind::Cleave,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "unit" => selection.part = Part::Unit,
                "integration" => selection.part = Part::Integration,
                "benches" => selection.part = Part::Benches,
                "guest" => selection.part = Part::Guest,
                name if selection.part == Part::Guest && guest::is_case(name) => {
                    selection.case = Some(name.to_owned());
                }
                "--keep" => selection.keep = Keep::Yes,
                "--against" if words.next() == Some(&"qemu-storage-daemon") => {
                    selection.against = BackendKind::QemuStorageDaemon;
                }
                "--against" => return Err("--against takes `qemu-storage-daemon`".to_owned()),
                other => {
                    return Err(format!(
                        "`{other}` is no part of the tests: unit, integration, benches or guest"
                    ));
                }
            }
        }
        Ok(selection)
    }
}

/// Runs what was selected; ends at the first part that fails.
pub(crate) fn run(root: &Path, selection: &Selection) -> Result<(), String> {
    let start = Instant::now();
    let mut passed = Vec::new();
    setup::provide(root)?;
    // The integration and guest tests run the program itself, which `cargo test` alone does not build.
    if selection.against == BackendKind::Cleave {
        cargo(root, &["build", "--package", "cleave-daemon"])?;
    }
    match selection.part {
        Part::All => cargo(root, &["test", "--workspace"])?,
        Part::Unit => cargo(root, &["test", "--workspace", "--exclude", "cleave-tests"])?,
        Part::Integration => cargo(root, &["test", "--package", "cleave-tests"])?,
        Part::Benches | Part::Guest => {}
    }
    match selection.part {
        Part::All => passed.push("unit, property, simulation and integration tests".to_owned()),
        Part::Unit => passed.push("unit, property and simulation tests".to_owned()),
        Part::Integration => passed.push("integration tests".to_owned()),
        Part::Benches | Part::Guest => {}
    }
    if matches!(selection.part, Part::All | Part::Benches) {
        // Each benchmark once, untimed and so not built for release; then what can be judged on any machine.
        cargo(root, &["test", "--package", "cleave-benches", "--benches"])?;
        instructions::run(root, &instructions::Request::default())?;
        // The suites against peers too, so that they cannot rot; what they measure in so short a time is not judged.
        bench::run(root, &["all", "--smoke"])?;
        passed.push("benchmarks once, instructions per I/O".to_owned());
    }
    if matches!(selection.part, Part::All | Part::Guest) {
        let case = selection.case.as_deref();
        passed.push(guest::run(root, selection.against, selection.keep, case)?);
        if selection.against == BackendKind::Cleave && case.is_none() {
            guest_bench::run(root, &["--smoke"])?;
            passed.push("a comparison in guests, seconds of each".to_owned());
        }
    }
    println!(
        "passed in {} s: {}",
        start.elapsed().as_secs(),
        passed.join("; ")
    );
    Ok(())
}

fn cargo(root: &Path, words: &[&str]) -> Result<(), String> {
    let line = format!("cargo --locked {}", words.join(" "));
    println!("running {line}");
    let status = Command::new("cargo")
        .arg("--locked")
        .args(words)
        // Where the guest tests look for the program; one built elsewhere would leave an old one here.
        .env("CARGO_TARGET_DIR", root.join("target"))
        .current_dir(root)
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{line}` ended with {status}")),
        Err(error) => Err(format!("cannot run cargo: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_options_are_read_in_any_order() {
        let all = Selection::parse(&[]).unwrap();
        assert_eq!(
            all,
            Selection {
                part: Part::All,
                case: None,
                keep: Keep::No,
                against: BackendKind::Cleave
            }
        );
        let guest =
            Selection::parse(&["--keep", "guest", "--against", "qemu-storage-daemon"]).unwrap();
        let one = Selection::parse(&["guest", "iopoll"]).unwrap();
        assert_eq!(one.case.as_deref(), Some("iopoll"));
        let benches = Selection::parse(&["benches"]).unwrap();
        assert_eq!((benches.part, benches.keep), (Part::Benches, Keep::No));
        assert_eq!((guest.part, guest.keep), (Part::Guest, Keep::Yes));
        assert_eq!(guest.against, BackendKind::QemuStorageDaemon);
    }

    #[test]
    fn unknown_words_are_refused() {
        for words in [
            &["gust"][..],
            &["iopoll"],
            &["guest", "iopol"],
            &["--against"],
            &["--against", "spdk"],
        ] {
            assert!(Selection::parse(words).is_err(), "{words:?}");
        }
    }
}
