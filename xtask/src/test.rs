//! `cargo xtask test`: sets the machine up, then runs everything, or the part that is asked for.

use std::path::Path;
use std::thread;
use std::time::Instant;

use crate::bench::{self, instructions};
use crate::built::{self, Artifact, Kind};
use crate::guest::{self, BackendKind};
use crate::step::Result;
use crate::{dist, guest_bench, setup, suite};

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

/// The tests that need a Ceph cluster.
const CEPH: &str = "rbd";

#[derive(Clone, Copy, PartialEq, Debug, clap::ValueEnum)]
enum Part {
    Unit,
    Integration,
    Benches,
    Guest,
    Package,
    /// Disks of a Ceph cluster, minutes long: only when it is asked for
    Ceph,
}

impl Selection {
    fn includes(&self, part: Part) -> bool {
        self.part.map_or(part != Part::Ceph, |only| only == part)
    }

    /// Whether the guests, or the measurements, run.
    fn runs(&self, part: Part) -> bool {
        !self.quick && self.includes(part)
    }

    /// The guest case to which the guests are restricted.
    fn case(&self) -> Option<&str> {
        match self.part {
            Some(Part::Ceph) => Some(guest::RBD),
            _ => self.case.as_deref(),
        }
    }

    fn has_guests(&self) -> bool {
        self.runs(Part::Guest) || self.part == Some(Part::Ceph)
    }
}

/// Sets the machine up: programs, and kernels where guests are to run.
fn provide(root: &Path, has_guests: bool) -> Result {
    setup::provide(root)?;
    if has_guests {
        guest::fetch_kernel(root)?;
        guest_bench::fetch_kernel(root)?;
    }
    Ok(())
}

/// Runs what was selected; ends at the first part that fails.
pub(crate) fn run(root: &Path, selection: &Selection) -> Result {
    let start = Instant::now();
    // Downloads go on while the compiler works.
    let (provided, artifacts) = thread::scope(|scope| {
        let provided = scope.spawn(|| provide(root, selection.has_guests()));
        let artifacts = built::everything(root);
        (provided.join(), artifacts)
    });
    provided.map_err(|_| "setting the machine up panicked")??;
    let artifacts = artifacts?;
    println!("built in {} s", start.elapsed().as_secs());
    let mut passed = run_binaries(root, &artifacts, selection)?;
    // Neither judges time, and both wait.
    let (guests, measured) = thread::scope(|scope| {
        let guests = scope.spawn(|| match selection.has_guests() {
            false => Ok(Vec::new()),
            true => guest::run(root, &artifacts, &selection.guests, selection.case()),
        });
        let measured = measure(root, selection);
        (guests.join(), measured)
    });
    passed.extend(guests.map_err(|_| "the guest cases panicked")??);
    passed.extend(measured?.into_iter().map(str::to_owned));
    let seconds = start.elapsed().as_secs();
    println!("passed in {seconds} s: {}", passed.join("; "));
    Ok(())
}

/// The test binaries; reports how many passed.
fn run_binaries(root: &Path, artifacts: &[Artifact], selection: &Selection) -> Result<Vec<String>> {
    let part = |found: &Artifact| match found.kind {
        Kind::Program => None,
        Kind::Test if found.target == CEPH => Some(Part::Ceph),
        _ if found.package == root.join("tests") => Some(Part::Integration),
        Kind::Test => Some(Part::Unit),
        Kind::Benchmark => Some(Part::Benches),
    };
    let is_selected = |found: &&Artifact| part(found).is_some_and(|part| selection.includes(part));
    let tests: Vec<&Artifact> = artifacts.iter().filter(is_selected).collect();
    if tests.is_empty() {
        return Ok(Vec::new());
    }
    let start = Instant::now();
    let program = built::program(artifacts, "cleave")?;
    let environment = [format!("CLEAVE_BIN={}", program.display())];
    // The compiler works while tests wait.
    suite::run(root, &tests, &environment, || match selection.part {
        None if !selection.quick => instructions::build(root).map(drop),
        _ => Ok(()),
    })?;
    let (count, seconds) = (tests.len(), start.elapsed().as_secs());
    Ok(vec![format!("{count} test binaries in {seconds} s")])
}

/// Counts instructions and runs the measurements, so that they cannot rot; reports what passed. Runs as short as
/// these measure nothing.
fn measure(root: &Path, selection: &Selection) -> Result<Vec<&'static str>> {
    let mut passed = Vec::new();
    if selection.runs(Part::Benches) {
        instructions::run(root, &instructions::Counting::default())?;
        bench::run(root, &bench::Options::smoke())?;
        passed.push("instructions per I/O, the benchmarks' suites for seconds");
    }
    let is_ours = selection.guests.against == BackendKind::Cleave;
    if selection.runs(Part::Guest) && is_ours && selection.case.is_none() {
        guest_bench::run(root, &guest_bench::Options::smoke())?;
        passed.push("a comparison in guests, seconds of each");
    }
    // The measurements have built the release.
    if selection.runs(Part::Package) {
        dist::run(root, &dist::Request::checked())?;
        passed.push("the packages");
    }
    Ok(passed)
}
