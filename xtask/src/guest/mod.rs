//! A real Linux in QEMU against the real daemon. Nothing here is skipped: what cannot run, fails and
//! says why.

mod archive;
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

use initramfs::Initramfs;
use kernel::Kernel;
use machine::{Accelerator, Boot, Check, Machine, MachineSpec};

use crate::built::{self, Artifact, Kind};
use crate::pool;

/// The daemon that serves the disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BackendKind {
    Cleave,
    /// A second opinion: where a test fails with this one too, the test is at fault.
    QemuStorageDaemon,
}

/// What all cases share.
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

/// Whether there is a guest case of this name.
pub(crate) fn is_case(name: &str) -> bool {
    cases::ALL.iter().any(|case| case.name == name)
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

/// Runs all cases, or only the one named; says how many passed. Logs and images stay where `keep` says so, or a case failed.
pub(crate) fn run(
    root: &Path,
    artifacts: &[Artifact],
    kind: BackendKind,
    keep: Keep,
    only: Option<&str>,
) -> Result<String, String> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("the guest tests boot an x86-64 kernel and need an x86-64 machine".to_owned());
    }
    let target = root.join("target/guest");
    let folder = target.join("run");
    fresh(&folder)?;
    let kernel = fetch_kernel(root)?;
    let initramfs = Initramfs::build(&kernel)?;
    let accelerator = probe(&kernel, &initramfs, &folder)?;
    println!(
        "guest: Linux {}, accelerator {}",
        kernel.release,
        accelerator.name()
    );
    let lab = Lab {
        kernel,
        initramfs,
        accelerator,
        kind,
        program: built::program(artifacts, "cleave")?.to_owned(),
        drive: built::program(artifacts, "drive")?.to_owned(),
        engine_tests: engine_tests(root, artifacts)?,
        folder,
    };
    let start = Instant::now();
    let mut tally = Tally::default();
    let chosen = |case: &&cases::Case| only.is_none_or(|name| name == case.name);
    let chosen: Vec<&cases::Case> = cases::ALL.iter().filter(chosen).collect();
    pool::run(
        &chosen,
        WIDTH,
        |case| {
            let start = Instant::now();
            (cases::run(&lab, case), start.elapsed())
        },
        |case, (outcome, took)| tally.add(case.name, &outcome, took),
    );
    println!("{}", tally.closing_line(start.elapsed()));
    if tally.failed > 0 {
        return Err(
            "guest cases failed; their logs are below target/guest/run, and `--against \
             qemu-storage-daemon` tells a fault of the daemon from one of the test"
                .to_owned(),
        );
    }
    if keep == Keep::No {
        fresh(&lab.folder)?;
    }
    Ok(format!(
        "{} guest cases, {} checks, accelerator {}",
        tally.passed,
        tally.checks,
        accelerator.name()
    ))
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
    fn add(&mut self, name: &str, outcome: &Result<Outcome, String>, took: Duration) {
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

    /// As libtest closes, so that a reader of the log can sum both.
    fn closing_line(&self, took: Duration) -> String {
        format!(
            "test result: {}. {} passed; {} failed; {} ignored; 0 measured; 0 filtered out; finished in {:.2}s",
            if self.failed == 0 { "ok" } else { "FAILED" },
            self.passed,
            self.failed,
            self.ignored,
            took.as_secs_f64()
        )
    }
}

/// The engine's own tests, which run on a polled drive in a guest too.
fn engine_tests(root: &Path, artifacts: &[Artifact]) -> Result<PathBuf, String> {
    let package = root.join("crates/engine");
    let is_it = |found: &&Artifact| {
        found.kind == Kind::Test && found.target == "lib" && found.package == package
    };
    let found = artifacts.iter().find(is_it);
    found
        .map(|found| found.file.clone())
        .ok_or_else(|| format!("cargo built no tests in {}", package.display()))
}

/// The kernel of the guests, downloaded where it is not there.
pub(crate) fn fetch_kernel(root: &Path) -> Result<Kernel, String> {
    Kernel::fetch(&root.join("target/guest/kernel"), &kernel::SMALL)
}

/// Whether what a run leaves behind stays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Keep {
    Yes,
    No,
}

fn fresh(folder: &Path) -> Result<(), String> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))
}

/// KVM where it runs a guest, which a /dev/kvm alone does not prove; TCG otherwise.
pub(crate) fn probe(
    kernel: &Kernel,
    initramfs: &Initramfs,
    folder: &Path,
) -> Result<Accelerator, String> {
    const KVM_LIMIT: Duration = Duration::from_secs(12);
    let image = folder.join("probe.initramfs");
    initramfs.write(&image, include_str!("scripts/probe.sh"), "")?;
    let is_there = Path::new("/dev/kvm").exists();
    let boots = is_there && {
        let spec = MachineSpec {
            accelerator: Accelerator::Kvm,
            cpus: 1,
            devices: Vec::new(),
            pinned_to: None,
            boot: Boot::Linux {
                kernel: &kernel.image,
                initramfs: &image,
                parameters: "",
            },
            log: folder.join("probe.log"),
            limit: KVM_LIMIT,
        };
        Machine::start(&spec)?.expect("alive").is_ok()
    };
    if is_there && !boots {
        println!("guest: /dev/kvm is there, but does not run a guest");
    }
    Ok(if boots {
        Accelerator::Kvm
    } else {
        Accelerator::Tcg
    })
}
