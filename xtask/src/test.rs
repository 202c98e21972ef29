//! `cargo xtask test`: sets the machine up, then runs everything, or the part that is asked for.

use std::path::Path;
use std::thread;
use std::time::Instant;

use crate::bench::{self, instructions};
use crate::built::{self, Artifact, Kind};
use crate::guest::{self, BackendKind, Keep};
use crate::suite::Suite;
use crate::{guest_bench, setup};

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
    /// All that runs in two minutes: no guests, no measurements.
    Quick,
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
                "unit" => selection.choose(Part::Unit)?,
                "integration" => selection.choose(Part::Integration)?,
                "benches" => selection.choose(Part::Benches)?,
                "guest" => selection.choose(Part::Guest)?,
                name if selection.part == Part::Guest && guest::is_case(name) => {
                    selection.case = Some(name.to_owned());
                }
                "--quick" => selection.choose(Part::Quick)?,
                "--keep" => selection.keep = Keep::Yes,
                "--against" if words.next() == Some(&"qemu-storage-daemon") => {
                    selection.against = BackendKind::QemuStorageDaemon;
                }
                "--against" => return Err("--against takes `qemu-storage-daemon`".to_owned()),
                other => {
                    return Err(format!(
                        "`{other}` is no part of the tests: unit, integration, benches, guest or --quick"
                    ));
                }
            }
        }
        Ok(selection)
    }

    fn choose(&mut self, part: Part) -> Result<(), String> {
        if self.part != Part::All {
            return Err("one part of the tests at a time".to_owned());
        }
        self.part = part;
        Ok(())
    }
}

/// Runs what was selected; ends at the first part that fails.
pub(crate) fn run(root: &Path, selection: &Selection) -> Result<(), String> {
    let start = Instant::now();
    // The network is waited for while the compiler works.
    let (provided, artifacts) = thread::scope(|scope| {
        let provided = scope.spawn(|| provide(root, selection.part));
        let artifacts = built::everything(root);
        (provided.join(), artifacts)
    });
    provided.map_err(|_| "setting the machine up panicked")??;
    let artifacts = artifacts?;
    println!("built in {} s", start.elapsed().as_secs());
    let cleave = built::program(&artifacts, "cleave")?;
    let mut passed = Vec::new();
    let tests = selection.part.binaries(root, &artifacts);
    if !tests.is_empty() {
        let start = Instant::now();
        let program = cleave.to_string_lossy();
        let environment = [("CLEAVE_BIN", &*program)];
        let suite = Suite::new(root, &tests, &environment)?;
        // The compiler works while tests wait.
        let (counted, tested) = thread::scope(|scope| {
            let counted = scope.spawn(|| match selection.part {
                Part::All => instructions::build(root).map(drop),
                _ => Ok(()),
            });
            let tested = suite.run_crowd();
            (counted.join(), tested)
        });
        tested.and(suite.run_alone())?;
        counted.map_err(|_| "a build panicked")??;
        passed.push(format!(
            "{} test binaries in {} s",
            tests.len(),
            start.elapsed().as_secs()
        ));
    }
    // Neither judges time, and both wait.
    let (guests, measured) = thread::scope(|scope| {
        let guests = scope.spawn(|| run_guests(root, &artifacts, selection));
        let measured = measure(root, selection);
        (guests.join(), measured)
    });
    passed.extend(guests.map_err(|_| "the guest cases panicked")??);
    passed.extend(measured?);
    println!(
        "passed in {} s: {}",
        start.elapsed().as_secs(),
        passed.join("; ")
    );
    Ok(())
}

/// The guest cases, where they were selected; says what passed.
fn run_guests(
    root: &Path,
    artifacts: &[Artifact],
    selection: &Selection,
) -> Result<Option<String>, String> {
    if !matches!(selection.part, Part::All | Part::Guest) {
        return Ok(None);
    }
    let case = selection.case.as_deref();
    guest::run(root, artifacts, selection.against, selection.keep, case).map(Some)
}

/// Counts instructions and runs the measurements, so that they cannot rot; says what passed. Runs as short as
/// these measure nothing.
fn measure(root: &Path, selection: &Selection) -> Result<Vec<String>, String> {
    let mut passed = Vec::new();
    if matches!(selection.part, Part::All | Part::Benches) {
        instructions::run(root, &instructions::Request::default())?;
        bench::run(root, &["all", "--smoke"])?;
        passed.push("instructions per I/O, the benchmarks' suites for seconds".to_owned());
    }
    let compares = selection.against == BackendKind::Cleave && selection.case.is_none();
    if matches!(selection.part, Part::All | Part::Guest) && compares {
        guest_bench::run(root, &["--smoke"])?;
        passed.push("a comparison in guests, seconds of each".to_owned());
    }
    Ok(passed)
}

/// The integration tests.
pub(crate) fn integration<'a>(root: &Path, artifacts: &'a [Artifact]) -> Vec<&'a Artifact> {
    Part::Integration.binaries(root, artifacts)
}

/// Sets the machine up: programs, and kernels where guests are to run.
fn provide(root: &Path, part: Part) -> Result<(), String> {
    setup::provide(root)?;
    if matches!(part, Part::All | Part::Guest) {
        guest::fetch_kernel(root)?;
        guest_bench::fetch_kernel(root)?;
    }
    Ok(())
}

impl Part {
    /// The test binaries that belong to it.
    fn binaries<'a>(self, root: &Path, artifacts: &'a [Artifact]) -> Vec<&'a Artifact> {
        let is_integration = |found: &Artifact| found.package == root.join("tests");
        let belongs = |found: &&Artifact| match (self, found.kind) {
            (_, Kind::Program) | (Part::Guest, _) => false,
            (Part::All | Part::Quick, _) => true,
            (Part::Benches, kind) => kind == Kind::Benchmark,
            (Part::Unit, kind) => kind == Kind::Test && !is_integration(found),
            (Part::Integration, _) => is_integration(found),
        };
        artifacts.iter().filter(belongs).collect()
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
        let quick = Selection::parse(&["--quick"]).unwrap();
        assert_eq!((quick.part, quick.keep), (Part::Quick, Keep::No));
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
            &["guest", "--quick"],
        ] {
            assert!(Selection::parse(words).is_err(), "{words:?}");
        }
    }
}
