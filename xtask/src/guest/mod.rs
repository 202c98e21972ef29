//! A real Linux in QEMU against the real daemon. A case that cannot run fails and says why;
//! one that is not for this daemon or this QEMU is printed as ignored.

mod backend;
mod bench;
mod boots;
mod cases;
mod iopoll;
mod kit;
mod libvirt;
mod migration;

use std::path::Path;
use std::time::Instant;

use clap::builder::PossibleValuesParser;
use cleave_rig::built::Artifact;
use cleave_rig::{Result, empty_folder, quietly};

use crate::suite;
use cases::GuestCase;
pub(crate) use cases::RBD;
pub(crate) use kit::BackendKind;
use kit::Kit;

/// How the cases run.
#[derive(clap::Args)]
pub(crate) struct GuestArgs {
    /// Keep the guests' logs and images below target/guest
    #[arg(long)]
    keep: bool,
    /// Serve the guests' disks with this daemon: a test that fails with QEMU's too is itself at fault
    #[arg(long, value_name = "DAEMON", value_enum, default_value_t = BackendKind::Cleave)]
    pub(crate) against: BackendKind,
    /// Boot the guests with this QEMU instead of the one in PATH
    #[arg(long, value_name = "PATH")]
    qemu: Option<String>,
}

/// Names of the cases.
pub(crate) fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(cases::ALL.iter().map(|case| case.name))
}

/// Cases that run at a time, beside the measurements. Without KVM each takes about one CPU while it boots, and waits
/// in between.
const WIDTH: usize = 2;

/// Runs all usual cases, or only the one named; reports how many passed. Logs and images stay if asked for, or if a case
/// failed.
pub(crate) fn run(
    root: &Path,
    artifacts: &[Artifact],
    request: &GuestArgs,
    only: Option<&str>,
) -> Result<String> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("the guest tests boot an x86-64 kernel and need an x86-64 machine".to_owned());
    }
    let kit = Kit::new(root, artifacts, request.against, request.qemu.clone())?;
    let (release, accelerator) = (&kit.kernel.release, kit.accelerator.name());
    let version = quietly(root, "{} --version", &[&kit.qemu()])?;
    let version = version.lines().next().unwrap_or_default();
    println!("guest: Linux {release}, accelerator {accelerator}, {version}");
    let start = Instant::now();
    let is_chosen = |case: &&GuestCase| only.map_or(case.is_usual(), |name| name == case.name);
    let chosen: Vec<&GuestCase> = cases::ALL.iter().filter(is_chosen).collect();
    let ended = suite::side_by_side(&chosen, WIDTH, |case| cases::run(&kit, case));
    let counts: Vec<usize> = ended.iter().flatten().copied().flatten().collect();
    let failed = ended.iter().filter(|case| case.is_err()).count();
    let (passed, seconds) = (counts.len(), start.elapsed().as_secs_f64());
    let ignored = ended.len() - passed - failed;
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    // This is libtest's format, so that a reader of the log can sum both.
    println!(
        "test result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out; \
         finished in {seconds:.2}s"
    );
    if failed > 0 {
        let why = "guest cases failed; their logs are below target/guest/run, and `--against qemu-storage-daemon` \
                   tells a fault of the daemon from one of the test";
        return Err(why.to_owned());
    }
    if !request.keep {
        empty_folder(&kit.folder)?;
    }
    let checks: usize = counts.iter().sum();
    Ok(format!(
        "{passed} guest cases, {checks} checks, accelerator {accelerator}"
    ))
}
