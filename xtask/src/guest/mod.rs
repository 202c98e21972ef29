//! A real Linux in QEMU against the real daemon. Nothing here is skipped: what cannot run, fails and
//! says why.

mod backend;
mod boot_sector;
mod cases;
pub(crate) mod initramfs;
mod iopoll;
pub(crate) mod kernel;
mod libvirt;
pub(crate) mod machine;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::builder::PossibleValuesParser;
use initramfs::Initramfs;
use kernel::Kernel;
use machine::{Accelerator, Boot, Check, Machine, MachineSpec};

use crate::built::{self, Artifact};
use crate::pool;
use crate::step::empty_folder;

/// The daemon that serves the disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum BackendKind {
    Cleave,
    QemuStorageDaemon,
}

/// How the cases run.
#[derive(clap::Args)]
pub(crate) struct Request {
    /// Keep the guests' logs and images below target/guest
    #[arg(long)]
    keep: bool,
    /// Serve the guests' disks with this daemon: a test that fails with QEMU's too is itself at fault
    #[arg(long, value_name = "DAEMON", value_enum, default_value_t = BackendKind::Cleave)]
    pub(crate) against: BackendKind,
}

/// Everything that all cases share.
pub(crate) struct Lab {
    kernel: Kernel,
    initramfs: Initramfs,
    accelerator: Accelerator,
    kind: BackendKind,
    program: PathBuf,
    drive: PathBuf,
    engine_tests: PathBuf,
    folder: PathBuf,
}

/// Names of the cases.
pub(crate) fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(cases::ALL.iter().map(|case| case.name))
}

/// Result of a case.
pub(crate) enum Outcome {
    Checked(Vec<Check>),
    /// Why it cannot run on this machine.
    Ignored(String),
}

/// Cases that run at a time, beside the measurements. Without KVM each takes about one CPU while it boots, and waits
/// in between.
const WIDTH: usize = 2;

/// Runs all cases, or only the one named; reports how many passed. Logs and images stay if asked for, or if a case
/// failed.
pub(crate) fn run(
    root: &Path,
    artifacts: &[Artifact],
    request: &Request,
    only: Option<&str>,
) -> Result<String, String> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("the guest tests boot an x86-64 kernel and need an x86-64 machine".to_owned());
    }
    let lab = Lab::new(root, artifacts, request.against)?;
    let (release, accelerator) = (&lab.kernel.release, lab.accelerator.name());
    println!("guest: Linux {release}, accelerator {accelerator}");
    let start = Instant::now();
    let mut tally = Tally::default();
    let all = cases::ALL.iter();
    let chosen: Vec<_> = all
        .filter(|case| only.is_none_or(|name| name == case.name))
        .collect();
    let run = |case: &&cases::Case| {
        let start = Instant::now();
        (cases::run(&lab, case), start.elapsed())
    };
    pool::run(&chosen, WIDTH, run, |case, ended| {
        tally.add(case.name, &ended)
    });
    println!("{}", tally.closing_line(start.elapsed()));
    if tally.failed > 0 {
        return Err(
            "guest cases failed; their logs are below target/guest/run, and `--against \
             qemu-storage-daemon` tells a fault of the daemon from one of the test"
                .to_owned(),
        );
    }
    if !request.keep {
        empty_folder(&lab.folder)?;
    }
    let (passed, checks) = (tally.passed, tally.checks);
    Ok(format!(
        "{passed} guest cases, {checks} checks, accelerator {accelerator}"
    ))
}

impl Lab {
    fn new(root: &Path, artifacts: &[Artifact], kind: BackendKind) -> Result<Lab, String> {
        let folder = root.join("target/guest/run");
        empty_folder(&folder)?;
        let kernel = fetch_kernel(root)?;
        let initramfs = Initramfs::build(&kernel)?;
        // The engine's own tests run on a polled drive in a guest too.
        let package = root.join("crates/engine");
        let is_engine = |found: &&Artifact| found.target == "lib" && found.package == package;
        let engine_tests = artifacts.iter().find(is_engine);
        let engine_tests = engine_tests.ok_or("cargo built no tests of the engine")?;
        Ok(Lab {
            accelerator: probe(&kernel, &initramfs, &folder)?,
            kernel,
            initramfs,
            kind,
            program: built::program(artifacts, "cleave")?.to_owned(),
            drive: built::program(artifacts, "drive")?.to_owned(),
            engine_tests: engine_tests.file.clone(),
            folder,
        })
    }
}

/// How the cases ended so far.
#[derive(Default)]
struct Tally {
    passed: usize,
    failed: usize,
    ignored: usize,
    checks: usize,
}

impl Tally {
    /// Counts a case, and prints its line.
    fn add(&mut self, name: &str, (outcome, took): &(Result<Outcome, String>, Duration)) {
        let seconds = took.as_secs_f64();
        match outcome {
            Ok(Outcome::Ignored(why)) => {
                self.ignored += 1;
                println!("ignored: guest case {name}: {why}");
            }
            Ok(Outcome::Checked(checks)) => {
                self.passed += 1;
                self.checks += checks.len();
                println!("{name:<16} ok   {seconds:6.1} s  {} checks", checks.len());
            }
            Err(why) => {
                self.failed += 1;
                println!("{name:<16} FAIL {seconds:6.1} s  {why}");
            }
        }
    }

    /// In libtest's format, so that a reader of the log can sum both.
    fn closing_line(&self, took: Duration) -> String {
        let (passed, failed, ignored) = (self.passed, self.failed, self.ignored);
        let verdict = if failed == 0 { "ok" } else { "FAILED" };
        let seconds = took.as_secs_f64();
        format!(
            "test result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out; \
             finished in {seconds:.2}s"
        )
    }
}

/// The kernel of the guests, downloaded where it is not there.
pub(crate) fn fetch_kernel(root: &Path) -> Result<Kernel, String> {
    Kernel::fetch(&root.join("target/guest/kernel"), &kernel::SMALL)
}

/// KVM where it runs a guest, which a /dev/kvm alone does not prove; TCG otherwise.
pub(crate) fn probe(
    kernel: &Kernel,
    initramfs: &Initramfs,
    folder: &Path,
) -> Result<Accelerator, String> {
    const KVM_LIMIT: Duration = Duration::from_secs(12);
    if !Path::new("/dev/kvm").exists() {
        return Ok(Accelerator::Tcg);
    }
    let image = folder.join("probe.initramfs");
    initramfs.write(&image, include_str!("scripts/probe.sh"), "")?;
    let boot = Boot::Linux {
        kernel: &kernel.image,
        initramfs: &image,
        parameters: "",
    };
    let mut machine = Machine::start(&MachineSpec {
        accelerator: Accelerator::Kvm,
        cpus: 1,
        devices: Vec::new(),
        pinned_to: None,
        boot,
        log: folder.join("probe.log"),
        limit: KVM_LIMIT,
    })?;
    if machine.expect("alive").is_ok() {
        return Ok(Accelerator::Kvm);
    }
    println!("guest: /dev/kvm is there, but does not run a guest");
    Ok(Accelerator::Tcg)
}
