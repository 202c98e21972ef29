//! Runs test binaries side by side. Most of their time they wait, so a few more run than there are CPUs; those
//! that judge time run by themselves afterwards.

use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use cleave_rig::built::{Artifact, ArtifactKind};
use cleave_rig::{At, Result, words};

use crate::step::logged;

/// Tests that judge CPU time or latency: binary, and the filter that selects them in it. They run
/// one at a time when all others have ended.
const ALONE: &[(&str, &str)] = &[
    ("tests/data", "pacing::polling_resumes"),
    ("tests/data", "pacing::an_adaptive_disk_that_becomes_idle"),
    // A worker that is to poll sleeps while others want its core.
    ("tests/api", "changed::a_change_reaches_a_worker_at_rest"),
    ("tests/serve", "process::polling_spins_only_while"),
    (
        "crates/session/lib",
        "a_tuning_reaches_sleeping_and_busy_workers",
    ),
    // A frontend that leaves or dies has to be followed by the next one within 100 ms.
    ("tests/serve", "frontends::the_next_frontend"),
    ("tests/hostile", "promptness"),
    ("tests/hostile", "our_daemon_passes_a_row_of_each_table"),
    // Compares latencies.
    ("tests/node", "scale::the_faults_of_two_disks"),
    // Hundreds of threads open disks at once.
    ("tests/node", "scale::hundreds_of_disks_start"),
    // Their guests go before all else on a CPU.
    ("tests/node", "pool::neighbours_do_not_feel"),
    ("tests/node", "do_not_hold_up_others"),
    ("tests/node", "delays_its_disk_alone"),
];

/// Tests that judge times of milliseconds and wait for most of their time: two of them run at a time, before those that run alone.
const PAIRED: &[(&str, &str)] = &[
    // Compares rates that it measures, with a server that takes its time.
    ("tests/nbd", "speed::a_probe_finds_that_pieces_pay"),
    // A client that is late leaves its share to the others.
    ("tests/api", "limits::disks_of_a_group_share_its_limits"),
    // An end within half a second of its deadline.
    ("tests/faults", "storage::a_hanging_"),
    // Count what goes over a connection in two seconds.
    ("tests/nbd", "speed::several_connections_hide"),
    ("tests/nbd", "speed::short_answers_over_tcp"),
];

/// The binaries that take longest, longest first, and how many of their tests run at a time for each CPU: more than one where
/// tests wait for most of their time.
const LONGEST: &[(&str, usize)] = &[
    ("tests/nbd", 2),
    ("tests/node", 2),
    ("crates/engine/lib", 4),
    ("tests/data", 1),
    ("tests/api", 2),
    ("tests/serve", 2),
    ("tests/hostile", 1),
    ("tests/faults", 1),
    ("tests/cli", 1),
    ("crates/worker/lib", 1),
    ("crates/worker/sim", 1),
];

/// Time limit of one binary, in seconds: far more than any needs. It ends one that hangs, so that its output is shown.
const LIMIT: u32 = 900;

/// A run of a binary.
struct Job<'a> {
    artifact: &'a Artifact,
    name: String,
    /// Arguments for libtest.
    filters: Vec<&'static str>,
}

/// Runs test binaries; prints a line and libtest's closing lines for each, and the whole output of each that failed.
/// `meanwhile` runs beside those that a busy machine does not disturb.
pub(crate) fn run(
    root: &Path,
    artifacts: &[&Artifact],
    environment: &[String],
    meanwhile: impl FnOnce() -> Result + Send,
) -> Result {
    let logs = root.join("target/ci/tests");
    std::fs::create_dir_all(&logs).at(&logs)?;
    let [crowd, paired, alone] = jobs(root, artifacts);
    let execute = |job: &Job<'_>| {
        let report = execute(job, &logs, environment);
        println!("{}", report.as_deref().unwrap_or_else(|why| why));
        report.is_err().then(|| job.name.clone())
    };
    let (other, mut failed) = thread::scope(|scope| {
        let other = scope.spawn(meanwhile);
        let ended = side_by_side(&crowd, cpus() + 2, execute);
        (other.join(), ended)
    });
    failed.extend(side_by_side(&paired, 2, execute));
    failed.extend(side_by_side(&alone, 1, execute));
    let failed: Vec<String> = failed.into_iter().flatten().collect();
    if failed.is_empty() {
        return other.map_err(|_| "a build panicked")?;
    }
    let (names, logs) = (failed.join(", "), logs.display());
    Err(format!(
        "failed: {names}; their output stands above and in {logs}"
    ))
}

fn cpus() -> usize {
    thread::available_parallelism().map_or(1, |count| count.get())
}

/// Runs `work` on every job, `width` at a time, in the order given; the results come as they end.
pub(crate) fn side_by_side<J: Sync, R: Send>(
    jobs: &[J],
    width: usize,
    work: impl Fn(&J) -> R + Sync,
) -> Vec<R> {
    let next = Mutex::new(jobs.iter());
    let (to, results) = channel();
    thread::scope(|scope| {
        for to in vec![to; width] {
            let (next, work) = (&next, &work);
            scope.spawn(move || {
                // A poisoned lock: another job panicked, which the scope reports when all have ended.
                while let Some(job) = next.lock().ok().and_then(|mut jobs| jobs.next()) {
                    // The receiver outlives the scope.
                    let _ = to.send(work(job));
                }
            });
        }
    });
    results.iter().collect()
}

/// Runs one binary as cargo does, in the package's folder; the report of it.
fn execute(job: &Job<'_>, logs: &Path, environment: &[String]) -> Result<String> {
    let (artifact, name, filters) = (job.artifact, &job.name, &job.filters);
    let log = logs.join(format!(
        "{}{}.log",
        name.replace('/', "-"),
        filters.join("-")
    ));
    // In the foreground, where the terminal's signals reach the test.
    let timeout = "timeout --foreground --signal=KILL {} {}";
    let timeout = words(timeout, &[&LIMIT, &artifact.file.display()]);
    let mut line = [words("env", &[]), environment.to_vec(), timeout].concat();
    if artifact.kind == ArtifactKind::Test {
        line.extend(filters.iter().map(|word| (*word).to_owned()));
        if let Some((_, per_cpu)) = LONGEST.iter().find(|row| row.0 == *name) {
            line.extend(words("--test-threads {}", &[&(per_cpu * cpus())]));
        }
    }
    let start = Instant::now();
    let ended = logged(&artifact.package, &log, &line);
    let seconds = start.elapsed().as_secs_f64();
    let output = std::fs::read(&log).at(&log)?;
    let output = String::from_utf8_lossy(&output);
    let why = ended.err().or_else(|| unmatched(filters, &output));
    let Some(why) = why else {
        let closing = closing_lines(&output);
        return Ok(format!("{name:<30} ok   {seconds:6.1} s{closing}"));
    };
    let killed = format!("status: 137, by a signal or after {LIMIT} s");
    let why = why.replace("status: 137", &killed);
    Err(format!(
        "{name:<30} FAIL {seconds:6.1} s: {why}; its output:\n{output}"
    ))
}

/// Returns a filter of `ALONE` or `PAIRED` that selects no test: its test was renamed, and runs among the others.
fn unmatched(filters: &[&str], output: &str) -> Option<String> {
    let filter = filters.first().filter(|word| **word != "--skip")?;
    let is_empty = output.contains("test result: ok. 0 passed");
    is_empty.then(|| format!("`{filter}` selects no test"))
}

/// Sorts the jobs into those that run side by side, two at a time, and alone.
fn jobs<'a>(root: &Path, artifacts: &[&'a Artifact]) -> [Vec<Job<'a>>; 3] {
    let name = |artifact: &Artifact| {
        let package = artifact.package.strip_prefix(root);
        let package = package.unwrap_or(&artifact.package).display();
        format!("{package}/{}", artifact.target)
    };
    let selected = |table: &[(&str, &'static str)]| {
        let rows = table.iter().flat_map(|(binary, filter)| {
            let found = artifacts.iter().filter(|found| name(found) == *binary);
            found.map(|artifact| Job {
                artifact,
                name: name(artifact),
                filters: vec![*filter],
            })
        });
        rows.collect::<Vec<_>>()
    };
    let rest = artifacts.iter().map(|artifact| {
        let name = name(artifact);
        let apart = ALONE.iter().chain(PAIRED).filter(|row| row.0 == name);
        Job {
            artifact,
            filters: apart.flat_map(|row| ["--skip", row.1]).collect(),
            name,
        }
    });
    let mut crowd: Vec<Job<'_>> = rest.collect();
    // A test that starts late should be short. Then the other integration tests.
    crowd.sort_by_key(|job| {
        let rank = LONGEST.iter().position(|row| row.0 == job.name);
        let is_unit = !job.name.starts_with("tests/");
        (rank.unwrap_or(LONGEST.len()), is_unit)
    });
    [crowd, selected(PAIRED), selected(ALONE)]
}

/// Returns the tests that could not run here, and libtest's result, each on a line of its own.
fn closing_lines(output: &str) -> String {
    let is_ignored = |line: &&str| {
        line.starts_with("ignored: ") || line.starts_with("test ") && line.contains(" ... ignored")
    };
    // A test that runs its own binary again has more such results above; a benchmark has none.
    let mut backwards = output.lines().rev();
    let result = backwards.find(|line| line.starts_with("test result:"));
    let lines = output.lines().filter(is_ignored).chain(result);
    lines.map(|line| format!("\n{line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(package: &str, target: &str, file: &str) -> Artifact {
        let (package, target, file) = (package.into(), target.to_owned(), file.into());
        Artifact {
            package,
            target,
            kind: ArtifactKind::Benchmark,
            file,
        }
    }

    #[test]
    fn the_listed_tests_run_alone_and_integration_tests_first() {
        let all = [
            ("/w/crates/blk", "lib"),
            ("/w/tests", "serve"),
            ("/w/tests", "data"),
        ];
        let all = all.map(|(package, target)| artifact(package, target, ""));
        let [crowd, paired, alone] = jobs(Path::new("/w"), &all.each_ref());
        let names = |jobs: Vec<Job<'_>>| jobs.into_iter().map(|job| job.name).collect::<Vec<_>>();
        assert_eq!(
            names(crowd),
            ["tests/data", "tests/serve", "crates/blk/lib"]
        );
        assert_eq!(
            names(alone),
            ["tests/data", "tests/data", "tests/serve", "tests/serve"]
        );
        assert!(paired.is_empty());
    }

    #[test]
    fn a_binary_that_fails_or_selects_no_test_is_named() {
        let root = std::env::temp_dir().join(format!("cleave-suite-{}", std::process::id()));
        for (file, is_fine) in [("/bin/true", true), ("/bin/false", false), ("/none", false)] {
            let verdict = run(&root, &[&artifact("/", "thing", file)], &[], || Ok(()));
            let is_named = verdict.is_err_and(|why| why.contains("thing"));
            assert_eq!(is_named, !is_fine, "{file}");
        }
        std::fs::remove_dir_all(root).unwrap();
        let none = "test result: ok. 0 passed; 0";
        assert!(unmatched(&["old_name"], none).is_some());
        assert!(unmatched(&["--skip", "name"], none).is_none());
        assert!(unmatched(&["name"], "test result: ok. 1 passed; 0").is_none());
    }
}
