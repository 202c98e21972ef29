//! `cargo xtask test`: sets the machine up, then runs everything, or the part that is asked for.

use std::path::Path;
use std::thread;
use std::time::Instant;

use crate::bench::{self, instructions};
use crate::built::{self, Artifact, Kind};
use crate::guest::{self, BackendKind};
use crate::suite::Suite;
use crate::{dist, guest_bench, setup};

/// Which tests, and how.
#[derive(clap::Args)]
pub(crate) struct Selection {
    /// Run only these tests
    part: Option<Part>,
    /// Run only this guest case
    #[arg(value_parser = guest::names())]
    case: Option<String>,
    /// Run everything but guests and measurements: two minutes after the build
    #[arg(long, conflicts_with = "part")]
    quick: bool,
    #[command(flatten)]
    guests: guest::Request,
}

#[derive(Clone, Copy, PartialEq, Debug, clap::ValueEnum)]
enum Part {
    Unit,
    Integration,
    Benches,
    Guest,
    Package,
}

impl Selection {
    fn includes(&self, part: Part) -> bool {
        self.part.is_none_or(|only| only == part)
    }

    /// Whether the guests, or the measurements, run.
    fn runs(&self, part: Part) -> bool {
        !self.quick && self.includes(part)
    }

    /// The test binaries to run.
    fn binaries<'a>(&self, root: &Path, artifacts: &'a [Artifact]) -> Vec<&'a Artifact> {
        let part = |found: &Artifact| match found.kind {
            Kind::Program => None,
            _ if found.package == root.join("tests") => Some(Part::Integration),
            Kind::Test => Some(Part::Unit),
            Kind::Benchmark => Some(Part::Benches),
        };
        let is_selected = |found: &&Artifact| part(found).is_some_and(|part| self.includes(part));
        artifacts.iter().filter(is_selected).collect()
    }

    /// Sets the machine up: programs, and kernels where guests are to run.
    fn provide(&self, root: &Path) -> Result<(), String> {
        setup::provide(root)?;
        if self.runs(Part::Guest) {
            guest::fetch_kernel(root)?;
            guest_bench::fetch_kernel(root)?;
        }
        Ok(())
    }
}

/// Runs what was selected; ends at the first part that fails.
pub(crate) fn run(root: &Path, selection: &Selection) -> Result<(), String> {
    let start = Instant::now();
    // Downloads go on while the compiler works.
    let (provided, artifacts) = thread::scope(|scope| {
        let provided = scope.spawn(|| selection.provide(root));
        let artifacts = built::everything(root);
        (provided.join(), artifacts)
    });
    provided.map_err(|_| "setting the machine up panicked")??;
    let artifacts = artifacts?;
    println!("built in {} s", start.elapsed().as_secs());
    let mut passed = Vec::new();
    passed.extend(run_binaries(root, &artifacts, selection)?);
    // Neither judges time, and both wait.
    let (guests, measured) = thread::scope(|scope| {
        let guests = scope.spawn(|| match selection.runs(Part::Guest) {
            false => Ok(None),
            true => guest::run(
                root,
                &artifacts,
                &selection.guests,
                selection.case.as_deref(),
            )
            .map(Some),
        });
        let measured = measure(root, selection);
        (guests.join(), measured)
    });
    passed.extend(guests.map_err(|_| "the guest cases panicked")??);
    passed.extend(measured?);
    // The measurements have built the release.
    if selection.runs(Part::Package) {
        dist::run(root, &dist::Request::checked())?;
        passed.push("the packages".to_owned());
    }
    println!(
        "passed in {} s: {}",
        start.elapsed().as_secs(),
        passed.join("; ")
    );
    Ok(())
}

/// The test binaries; reports how many passed.
fn run_binaries(
    root: &Path,
    artifacts: &[Artifact],
    selection: &Selection,
) -> Result<Option<String>, String> {
    let tests = selection.binaries(root, artifacts);
    if tests.is_empty() {
        return Ok(None);
    }
    let start = Instant::now();
    let program = built::program(artifacts, "cleave")?.to_string_lossy();
    let environment = [("CLEAVE_BIN", &*program)];
    let suite = Suite::new(root, &tests, &environment)?;
    // The compiler works while tests wait.
    let (counted, tested) = thread::scope(|scope| {
        let counted = scope.spawn(|| match selection.part.is_none() && !selection.quick {
            true => instructions::build(root).map(drop),
            false => Ok(()),
        });
        let tested = suite.run_crowd();
        (counted.join(), tested)
    });
    tested.and(suite.run_alone())?;
    counted.map_err(|_| "a build panicked")??;
    let seconds = start.elapsed().as_secs();
    Ok(Some(format!(
        "{} test binaries in {seconds} s",
        tests.len()
    )))
}

/// Counts instructions and runs the measurements, so that they cannot rot; reports what passed. Runs as short as
/// these measure nothing.
fn measure(root: &Path, selection: &Selection) -> Result<Vec<String>, String> {
    let mut passed = Vec::new();
    if selection.runs(Part::Benches) {
        instructions::run(root, &instructions::Request::default())?;
        bench::run(root, &["all", "--smoke"])?;
        passed.push("instructions per I/O, the benchmarks' suites for seconds".to_owned());
    }
    let is_ours = selection.guests.against == BackendKind::Cleave;
    if selection.runs(Part::Guest) && is_ours && selection.case.is_none() {
        guest_bench::run(root, &["--smoke"])?;
        passed.push("a comparison in guests, seconds of each".to_owned());
    }
    Ok(passed)
}

/// The integration tests.
pub(crate) fn integration<'a>(root: &Path, artifacts: &'a [Artifact]) -> Vec<&'a Artifact> {
    let tests = artifacts.iter().filter(|found| found.kind != Kind::Program);
    tests
        .filter(|found| found.package == root.join("tests"))
        .collect()
}
