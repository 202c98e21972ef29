//! Runs test binaries side by side. Most of their time they wait, so a few more run than there are CPUs; those
//! that judge time run by themselves afterwards.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::built::{Artifact, Kind};
use crate::pool;
use crate::step::At;

/// Tests that judge CPU time or latency: binary, and the filter that selects them in it. They run
/// one at a time when all others have ended.
const ALONE: &[(&str, &str)] = &[
    ("tests/pacing", "polling_resumes"),
    ("tests/pacing", "becomes_idle"),
    // A worker that is to poll sleeps while others want its core.
    ("tests/control", "a_change_reaches_a_worker_at_rest"),
    ("tests/life", "polling_spins_only_while_there_is_a_vring"),
    // A frontend that dies has to be followed by the next one within 100 ms.
    ("tests/hostile", "promptness"),
];

/// The binaries that take longest, longest first.
const LONGEST: &[&str] = &[
    "tests/hostile",
    "crates/engine/lib",
    "tests/data",
    "crates/worker/lib",
    "crates/worker/sim",
];

/// Of one binary. Far more than any takes: what hangs must end with its output.
const LIMIT: Duration = Duration::from_secs(400);

/// A run of a binary.
struct Job<'a> {
    artifact: &'a Artifact,
    name: String,
    words: Vec<&'static str>,
}

/// Test binaries, sorted by how they run.
pub(crate) struct Suite<'a> {
    crowd: Vec<Job<'a>>,
    alone: Vec<Job<'a>>,
    logs: PathBuf,
    environment: &'a [(&'a str, &'a str)],
}

impl<'a> Suite<'a> {
    pub(crate) fn new(
        root: &Path,
        artifacts: &[&'a Artifact],
        environment: &'a [(&'a str, &'a str)],
    ) -> Result<Suite<'a>, String> {
        let logs = root.join("target/ci/tests");
        std::fs::create_dir_all(&logs).at(&logs)?;
        let [crowd, alone] = jobs(root, artifacts);
        Ok(Suite {
            crowd,
            alone,
            logs,
            environment,
        })
    }

    /// Runs the tests that a busy machine does not disturb.
    pub(crate) fn run_crowd(&self) -> Result<(), String> {
        let cpus = std::thread::available_parallelism().map_or(1, |count| count.get());
        self.run(&self.crowd, cpus + 2)
    }

    /// Runs the tests that judge time. The caller sees to it that nothing else runs.
    pub(crate) fn run_alone(&self) -> Result<(), String> {
        self.run(&self.alone, 1)
    }

    /// Prints a line and libtest's closing lines for each, and the whole output of each that failed.
    fn run(&self, jobs: &[Job<'a>], width: usize) -> Result<(), String> {
        let mut failed = Vec::new();
        let execute = |job: &Job<'_>| self.execute(job);
        pool::run(jobs, width, execute, |job, report| {
            println!("{}", report.as_deref().unwrap_or_else(|why| why));
            failed.extend(report.is_err().then_some(job.name.clone()));
        });
        match failed.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "failed: {}; their output stands above and in {}",
                failed.join(", "),
                self.logs.display()
            )),
        }
    }

    /// Runs one binary as cargo does, in the package's folder; the report of it.
    fn execute(&self, job: &Job<'_>) -> Result<String, String> {
        let file_name = format!("{}{}.log", job.name.replace('/', "-"), job.words.join("-"));
        let log = self.logs.join(file_name);
        let stdout = File::create(&log).at(&log)?;
        let stderr = stdout.try_clone().at(&log)?;
        let mut command = Command::new(&job.artifact.file);
        if job.artifact.kind == Kind::Test {
            command.args(&job.words);
        }
        command.envs(self.environment.iter().copied());
        command.current_dir(&job.artifact.package);
        let start = Instant::now();
        let child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn();
        let failure = failure(child.at(&job.name)?).at(&job.name)?;
        let seconds = start.elapsed().as_secs_f64();
        let output = std::fs::read(&log).at(&log)?;
        let output = String::from_utf8_lossy(&output);
        let name = &job.name;
        match failure.or_else(|| unmatched(&job.words, &output)) {
            Some(why) => Err(format!(
                "{name:<30} FAIL {seconds:6.1} s: {why}; its output:\n{output}"
            )),
            None => Ok(format!(
                "{name:<30} ok   {seconds:6.1} s{}",
                closing_lines(&output)
            )),
        }
    }
}

/// Waits for a test; why it failed, where it did.
fn failure(mut child: Child) -> std::io::Result<Option<String>> {
    let start = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(None),
            Some(status) => return Ok(Some(format!("ended with {status}"))),
            None if start.elapsed() > LIMIT => {
                child.kill()?;
                child.wait()?;
                return Ok(Some(format!("did not end within {} s", LIMIT.as_secs())));
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// A filter of `ALONE` that selects no test: its test was renamed, and runs among the others.
fn unmatched(words: &[&str], output: &str) -> Option<String> {
    let filter = words.first().filter(|word| **word != "--skip")?;
    let is_empty = output.contains("test result: ok. 0 passed");
    is_empty.then(|| format!("`{filter}` selects no test"))
}

/// Sorts the jobs into those that run side by side and those that run alone.
fn jobs<'a>(root: &Path, artifacts: &[&'a Artifact]) -> [Vec<Job<'a>>; 2] {
    let (mut crowd, mut alone) = (Vec::new(), Vec::new());
    for artifact in artifacts {
        let package = artifact.package.strip_prefix(root);
        let package = package.unwrap_or(&artifact.package).display();
        let name = format!("{package}/{}", artifact.target);
        let filters = ALONE.iter().filter(|(binary, _)| *binary == name);
        let filters: Vec<&str> = filters.map(|(_, filter)| *filter).collect();
        let job = |words| Job {
            artifact,
            name: name.clone(),
            words,
        };
        alone.extend(filters.iter().map(|filter| job(vec![*filter])));
        let skips = filters.iter().flat_map(|filter| ["--skip", *filter]);
        crowd.push(job(skips.collect()));
    }
    // A test that starts late should be short. Then the other integration tests.
    crowd.sort_by_key(|job| {
        let rank = LONGEST.iter().position(|name| *name == job.name);
        (
            rank.unwrap_or(LONGEST.len()),
            !job.name.starts_with("tests/"),
        )
    });
    [crowd, alone]
}

/// The tests that could not run here, and libtest's result, each on a line of its own.
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
        let kind = Kind::Benchmark;
        Artifact {
            package,
            target,
            kind,
            file,
        }
    }

    #[test]
    fn integration_tests_start_first_and_the_listed_ones_run_alone() {
        let all = [
            ("/w/crates/blk", "lib"),
            ("/w/tests", "pacing"),
            ("/w/tests", "life"),
        ];
        let all = all.map(|(package, target)| artifact(package, target, ""));
        let jobs = jobs(Path::new("/w"), &all.iter().collect::<Vec<_>>());
        let names = jobs.map(|jobs| jobs.into_iter().map(|job| job.name).collect::<Vec<_>>());
        assert_eq!(names[0], ["tests/pacing", "tests/life", "crates/blk/lib"]);
        assert_eq!(names[1], ["tests/pacing", "tests/pacing", "tests/life"]);
    }

    #[test]
    fn a_filter_has_to_select_a_test() {
        let (none, one) = (
            "test result: ok. 0 passed; 0",
            "test result: ok. 1 passed; 0",
        );
        let table = [
            (&["old_name"][..], none, true),
            (&["name"], one, false),
            (&["--skip", "name"], none, false),
            (&[], none, false),
        ];
        for (words, output, is_fault) in table {
            assert_eq!(unmatched(words, output).is_some(), is_fault, "{words:?}");
        }
    }

    #[test]
    fn a_binary_that_fails_or_cannot_start_is_named() {
        let root = std::env::temp_dir().join(format!("cleave-suite-{}", std::process::id()));
        let verdict = |file: &str| {
            let found = artifact("/", "thing", file);
            Suite::new(&root, &[&found], &[])?.run_crowd()
        };
        assert_eq!(verdict("/bin/true"), Ok(()));
        for file in ["/bin/false", "/nonexistent"] {
            let why = verdict(file).unwrap_err();
            assert!(why.contains("thing"), "{why}");
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
