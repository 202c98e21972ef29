//! `cargo xtask sanitize`: the integration tests against a daemon that AddressSanitizer watches.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use cleave_rig::built::{self, Artifact, ArtifactKind};
use cleave_rig::setup;
use cleave_rig::{At, Result, empty_folder, quietly, words};

use crate::suite;

/// Options of the sanitizer. SIGBUS and SIGSEGV are left to the daemon, which lives on when guest memory is cut
/// off. Freed memory is kept for a while, so that a late access to it is seen: 4 MiB of it, where 256 would
/// drown what the tests bound. A leak is found when a daemon ends.
const OPTIONS: &str = "handle_sigbus=0:handle_segv=0:halt_on_error=1:detect_leaks=1:\
quarantine_size_mb=4:thread_local_quarantine_size_kb=64";

/// How much more than its usual bound a daemon may grow by in the tests, in KiB: the 4 MiB above, and what the sanitizer's
/// allocator keeps for itself (it gives nothing back, and each thread has a stock of every size). Up to 21 MiB were
/// seen in all, and no more where the repeating tests were five times as long.
const KEPT_KIB: u32 = 32768;

/// Builds, tests, and counts the sanitizer's reports; any is a failure.
pub(crate) fn run(root: &Path) -> Result {
    let start = Instant::now();
    setup::provide(root)?;
    let folder = root.join("target/sanitize");
    let what = "the daemon with AddressSanitizer";
    // `sanitized` leaves the sandbox out unless a test asks for it: the search for leaks is a process that traces the daemon.
    let flags = "-Zsanitizer=address --cfg sanitized";
    let program = built::instrumented(root, what, &folder, flags, "--package cleave")?;
    let program = program.join("debug/cleave").display().to_string();
    let reports = folder.join("reports");
    empty_folder(&reports)?;
    // Daemons of every user report into it.
    std::fs::set_permissions(&reports, std::fs::Permissions::from_mode(0o777)).at(&reports)?;
    let options = format!("{OPTIONS}:log_path={}", reports.join("report").display());
    // Where the sanitizer is not in the program, its silence would mean nothing.
    let line = "\"$0\" --version 2>&1 | grep -q AddressSanitizer";
    let helped = "env ASAN_OPTIONS=help=1 sh -c {} {}";
    quietly(root, helped, &[&line, &program])?;
    println!("running the integration tests against {program}\nASAN_OPTIONS={options}");
    let artifacts = built::everything(root)?;
    let is_test = |found: &&Artifact| {
        found.kind != ArtifactKind::Program && found.package == root.join("tests")
    };
    let tests: Vec<&Artifact> = artifacts.iter().filter(is_test).collect();
    let environment = "CLEAVE_BIN={} CLEAVE_TEST_KEPT_KIB={} ASAN_OPTIONS={}";
    let environment = words(environment, &[&program, &KEPT_KIB, &options]);
    let tests = suite::run(root, &tests, &environment, || Ok(()));
    let line = "tail -vn +1 * 2>/dev/null || true";
    let found = quietly(&reports, "sh -c {}", &[&line])?;
    if !found.is_empty() {
        print!("{found}");
        let reports = reports.display();
        return Err(format!("the sanitizer's reports are in {reports}"));
    }
    tests?;
    let seconds = start.elapsed().as_secs();
    println!(
        "passed in {seconds} s: integration tests against a daemon under AddressSanitizer, no report"
    );
    Ok(())
}
