//! `cargo xtask sanitize`: the integration tests against a daemon that AddressSanitizer watches.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::step::{At, empty_folder, line};
use crate::suite::Suite;
use crate::{built, fuzz, setup, test};

/// How the daemon is built: a sanitizer is an unstable option, which the pinned compiler takes all the same. `sanitized` leaves
/// the sandbox out unless a test asks for it: the sanitizer's own search for leaks is a process that traces the daemon.
const BUILD: [(&str, &str); 2] = [
    ("RUSTC_BOOTSTRAP", "1"),
    ("RUSTFLAGS", "-Zsanitizer=address --cfg sanitized"),
];

/// Options of the sanitizer. SIGBUS and SIGSEGV are left to the daemon, which lives on when guest memory is cut
/// off. What is freed is kept for a while, so that a late access to it is seen: 4 MiB of it, where 256 would
/// drown what the tests bound. A leak is found when a daemon ends.
const OPTIONS: &str = "handle_sigbus=0:handle_segv=0:halt_on_error=1:detect_leaks=1:\
quarantine_size_mb=4:thread_local_quarantine_size_kb=64";

/// How much more than its usual bound a daemon may grow by in the tests, in KiB: the 4 MiB above, and what the sanitizer's
/// allocator keeps for itself (it gives nothing back, and each thread has a stock of every size). Up to 21 MiB were
/// seen in all, and no more where the repeating tests were five times as long.
const KEPT_KIB: &str = "32768";

/// Builds, tests, and counts the sanitizer's reports; any is a failure.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let start = Instant::now();
    setup::provide(root)?;
    let folder = root.join("target/sanitize");
    let program = build(root, &folder)?;
    let reports = folder.join("reports");
    empty_folder(&reports)?;
    // Daemons of every user report into it.
    std::fs::set_permissions(&reports, std::fs::Permissions::from_mode(0o777)).at(&reports)?;
    let options = format!("{OPTIONS}:log_path={}", reports.join("report").display());
    check(root, &program)?;
    println!(
        "running the integration tests against {}",
        program.display()
    );
    println!("ASAN_OPTIONS={options}");
    let artifacts = built::everything(root)?;
    let tests = test::integration(root, &artifacts);
    let program = program.to_string_lossy();
    let environment = [
        ("CLEAVE_BIN", &*program),
        ("CLEAVE_TEST_KEPT_KIB", KEPT_KIB),
        ("ASAN_OPTIONS", &options),
    ];
    let suite = Suite::new(root, &tests, &environment)?;
    let tests = suite.run_crowd().and(suite.run_alone());
    let count = show(&reports)?;
    if count > 0 {
        return Err(format!(
            "{count} reports of the sanitizer in {}",
            reports.display()
        ));
    }
    tests?;
    println!(
        "passed in {} s: integration tests against a daemon under AddressSanitizer, no report",
        start.elapsed().as_secs()
    );
    Ok(())
}

fn build(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let host = fuzz::host(root)?;
    println!("building the daemon with AddressSanitizer for {host}");
    let target = folder.to_string_lossy();
    // With `--target`, what runs at build time is left unsanitized.
    let words = format!("cargo --locked build --package cleave-daemon --target {host}");
    let environment = [&BUILD[..], &[("CARGO_TARGET_DIR", &*target)]].concat();
    line(root, &words, &environment)?;
    Ok(folder.join(host).join("debug/cleave"))
}

/// Fails where the sanitizer is not in the program: then its silence would mean nothing.
fn check(root: &Path, program: &Path) -> Result<(), String> {
    let output = Command::new(program)
        .arg("--version")
        .env("ASAN_OPTIONS", "help=1")
        .current_dir(root)
        .output()
        .at(program)?;
    match String::from_utf8_lossy(&output.stderr).contains("AddressSanitizer") {
        true => Ok(()),
        false => Err(format!("{} has no sanitizer in it", program.display())),
    }
}

/// Prints the reports; how many there are.
fn show(folder: &Path) -> Result<usize, String> {
    let reports: Vec<_> = std::fs::read_dir(folder).at(folder)?.flatten().collect();
    for report in &reports {
        let path = report.path();
        let text = std::fs::read(&path).at(&path)?;
        println!("--- {}\n{}", path.display(), String::from_utf8_lossy(&text));
    }
    Ok(reports.len())
}
