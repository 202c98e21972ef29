//! `cargo xtask test`: sets the machine up, then runs everything, or the part that is asked for.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use cleave_rig::built::{self, Artifact, ArtifactKind};
use cleave_rig::guest::Kernel;
use cleave_rig::setup;
use cleave_rig::{Result, empty_folder, quietly};

use crate::guest::{self, BackendKind};
use crate::{dist, lab, suite};

/// The tests to run, and how.
#[derive(clap::Args)]
pub(crate) struct Selection {
    /// Run only these tests
    part: Option<Part>,
    /// Run only this guest case
    #[arg(value_parser = guest::names())]
    case: Option<String>,
    /// Run everything but guests, measurements and packages: two minutes after the build
    #[arg(long, conflicts_with = "part")]
    quick: bool,
    #[command(flatten)]
    guests: guest::GuestArgs,
}

/// The tests that need a Ceph cluster, and those that need the program of an earlier release.
const CEPH: &str = "rbd";
const RELEASES: &str = "releases";

/// The variable that names that program.
const EARLIER: &str = "CLEAVE_EARLIER";

#[derive(Clone, Copy, PartialEq, Debug, clap::ValueEnum)]
enum Part {
    Unit,
    Integration,
    Benches,
    Guest,
    Package,
    /// Disks of a Ceph cluster, minutes long: only when it is asked for
    Ceph,
    /// Upgrades from the last release, which it builds, and downgrades to it: only when it is asked for
    ///
    /// With the variable CLEAVE_EARLIER, a program of another release is used.
    Releases,
    /// The examples, whose clients other programs generate and which download these: only when it is asked for
    Examples,
}

impl Selection {
    fn includes(&self, part: Part) -> bool {
        let on_request = [Part::Ceph, Part::Releases, Part::Examples];
        self.part
            .map_or(!on_request.contains(&part), |only| only == part)
    }

    /// Returns true if the guests, or the measurements, run.
    fn runs(&self, part: Part) -> bool {
        !self.quick && self.includes(part)
    }

    /// Returns the guest case to which the guests are restricted.
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
        let folder = root.join("target/guest");
        Kernel::small(&folder)?;
        Kernel::full(&folder)?;
    }
    Ok(())
}

/// Runs what was selected. A part that fails does not keep the next from running; the error names all that failed.
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
    let lab = built::program(&artifacts, "cleave-lab")?;
    let daemon = built::program(&artifacts, "cleave")?;
    println!("built in {} s", start.elapsed().as_secs());
    let mut ended = Ended::new(root)?;
    ended.note("test binaries", run_binaries(root, &artifacts, selection));
    // None of them judges time, and all of them wait.
    let beside = thread::scope(|scope| {
        let guests = scope.spawn(|| match selection.has_guests() {
            false => Ok(None),
            true => guest::run(root, &artifacts, &selection.guests, selection.case()).map(Some),
        });
        let packages = scope.spawn(|| match selection.runs(Part::Package) {
            false => Ok(None),
            true => {
                let programs = daemon.parent().ok_or("a program in no folder")?;
                let options = dist::DistArgs::checked(programs);
                dist::run(root, &options).map(|()| Some("the packages".to_owned()))
            }
        });
        if selection.includes(Part::Examples) {
            let run = || quietly(root, "sh examples/run.sh {}", &[&daemon.display()]).map(drop);
            ended.run(vec![work("examples", "the examples", run)]);
        }
        ended.run(measurements(root, &lab, selection));
        [("packages", packages.join()), ("guests", guests.join())]
    });
    for (name, part) in beside {
        let part = part.unwrap_or_else(|_| Err("they panicked".to_owned()));
        ended.note(name, part);
    }
    ended.verdict(start.elapsed().as_secs())
}

/// How the parts ended.
struct Ended {
    logs: PathBuf,
    passed: Vec<String>,
    failed: Vec<String>,
}

/// A part by its name, and the work, which says what has passed if anything was to be done.
type Work<'a> = (
    &'static str,
    Box<dyn FnOnce() -> Result<Option<String>> + 'a>,
);

impl Ended {
    fn new(root: &Path) -> Result<Ended> {
        let logs = root.join("target/ci/parts");
        empty_folder(&logs)?;
        let (passed, failed) = (Vec::new(), Vec::new());
        Ok(Ended {
            logs,
            passed,
            failed,
        })
    }

    /// Runs parts, each after the other, however they end.
    fn run(&mut self, parts: Vec<Work<'_>>) {
        for (name, work) in parts {
            self.note(name, work());
        }
    }

    /// Notes how a part ended. An error is shown at once, and kept in a file.
    fn note(&mut self, name: &str, ended: Result<Option<String>>) {
        let why = match ended {
            Ok(said) => return self.passed.extend(said),
            Err(why) => why,
        };
        let why = why.trim_end();
        println!("{name} FAIL: {why}");
        let log = self.logs.join(format!("{}.log", name.replace(' ', "-")));
        let place = match std::fs::write(&log, why) {
            Ok(()) => log.display().to_string(),
            Err(error) => format!("{}: {error}", log.display()),
        };
        let first = why.lines().next().unwrap_or_default();
        self.failed.push(format!("  {name}: {first} [{place}]"));
    }

    fn verdict(self, seconds: u64) -> Result {
        let passed = format!("passed in {seconds} s: {}", self.passed.join("; "));
        if self.failed.is_empty() {
            println!("{passed}");
            return Ok(());
        }
        let failed = self.failed.join("\n");
        Err(format!("{passed}\nfailed:\n{failed}"))
    }
}

/// Runs the test binaries; reports how many passed.
fn run_binaries(
    root: &Path,
    artifacts: &[Artifact],
    selection: &Selection,
) -> Result<Option<String>> {
    let part = |found: &Artifact| match found.kind {
        ArtifactKind::Program => None,
        ArtifactKind::Test if found.target == CEPH => Some(Part::Ceph),
        ArtifactKind::Test if found.target == RELEASES => Some(Part::Releases),
        _ if found.package == root.join("tests") => Some(Part::Integration),
        ArtifactKind::Test => Some(Part::Unit),
        ArtifactKind::Benchmark => Some(Part::Benches),
    };
    let is_selected = |found: &&Artifact| part(found).is_some_and(|part| selection.includes(part));
    let tests: Vec<&Artifact> = artifacts.iter().filter(is_selected).collect();
    if tests.is_empty() {
        return Ok(None);
    }
    let start = Instant::now();
    let program = built::program(artifacts, "cleave")?;
    let mut environment = vec![format!("CLEAVE_BIN={}", program.display())];
    if selection.part == Some(Part::Releases) && std::env::var_os(EARLIER).is_none() {
        let earlier = built::earlier(root)?;
        environment.push(format!("{EARLIER}={}", earlier.display()));
    }
    // The compiler works while tests wait.
    suite::run(root, &tests, &environment, || match selection.part {
        None if !selection.quick => built::instructions(root).map(drop),
        _ => Ok(()),
    })?;
    let (count, seconds) = (tests.len(), start.elapsed().as_secs());
    Ok(Some(format!("{count} test binaries in {seconds} s")))
}

/// Counts instructions and runs the measurements, so that they cannot rot. Runs as short as these measure nothing.
fn measurements<'a>(root: &'a Path, lab: &'a Path, selection: &Selection) -> Vec<Work<'a>> {
    let mut parts: Vec<Work<'a>> = Vec::new();
    if selection.runs(Part::Benches) {
        let counting = move || {
            // Built here, where cargo shows how far it is.
            built::instructions(root)?;
            lab::run(lab, "bench instructions")
        };
        parts.push(work("instructions", "instructions per I/O", counting));
        let smoke = move || lab::run(lab, "bench --smoke");
        parts.push(work(
            "benchmarks",
            "the benchmarks' suites for seconds",
            smoke,
        ));
    }
    let is_ours = selection.guests.against == BackendKind::Cleave;
    if selection.runs(Part::Guest) && is_ours && selection.case.is_none() {
        let smoke = move || lab::run(lab, "guest-bench --smoke");
        let said = "a comparison in guests, seconds of each";
        parts.push(work("comparison in guests", said, smoke));
    }
    parts
}

fn work<'a>(name: &'static str, said: &'static str, run: impl FnOnce() -> Result + 'a) -> Work<'a> {
    (
        name,
        Box::new(move || run().map(|()| Some(said.to_owned()))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_fails_does_not_keep_the_others_from_running() {
        let root = std::env::temp_dir().join(format!("cleave-parts-{}", std::process::id()));
        let mut ended = Ended::new(&root).unwrap();
        ended.run(vec![
            work("first part", "one", || {
                Err("broken\nin two lines\n".to_owned())
            }),
            work("second", "two", || Ok(())),
        ]);
        ended.note("third", Err("lost".to_owned()));
        let why = ended.verdict(7).unwrap_err();
        let log = root.join("target/ci/parts/first-part.log");
        let first = format!("  first part: broken [{}]", log.display());
        assert!(why.starts_with("passed in 7 s: two\nfailed:\n"), "{why}");
        assert!(
            why.contains(&first) && why.contains("  third: lost ["),
            "{why}"
        );
        assert_eq!(
            std::fs::read_to_string(log).unwrap(),
            "broken\nin two lines"
        );
        std::fs::remove_dir_all(root).unwrap();
    }
}
