//! `cargo xtask bench ring`: a disk that touches no data, so that what is measured is the ring alone.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::Effort;
use super::environment;
use super::spread::Spread;
use crate::daemon::Daemon;
use crate::setup;
use crate::step::quietly;

/// A daemon, and how it waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Subject {
    QemuStorageDaemon,
    CleaveInterrupt,
    CleavePoll,
}

const SUBJECTS: [Subject; 3] = [
    Subject::QemuStorageDaemon,
    Subject::CleaveInterrupt,
    Subject::CleavePoll,
];

const SERVE_INTERRUPT: &str = "serve --disk null:1G --queues 1 --workers 1 --log warn \
     --completion interrupt --socket-path";
const SERVE_POLL: &str = "serve --disk null:1G --queues 1 --workers 1 --log warn \
     --completion poll --socket-path";

/// What is asked of it: 4 KiB random reads on one vring.
struct Point {
    depth: u32,
    /// As the driver's option says.
    wait: &'static str,
}

const POINTS: &[Point] = &[
    Point {
        depth: 1,
        wait: "--sleep",
    },
    Point {
        depth: 1,
        wait: "--poll",
    },
    Point {
        depth: 32,
        wait: "--sleep",
    },
    Point {
        depth: 32,
        wait: "--poll",
    },
    Point {
        depth: 128,
        wait: "--sleep",
    },
    Point {
        depth: 128,
        wait: "--poll",
    },
];

/// Driver and daemon on a CPU each, where there are two.
const DRIVER_CPU: &str = "0";
const DAEMON_CPU: &str = "1";

/// One measurement.
struct Figure {
    iops: f64,
    mean_us: f64,
    daemon_cpu_us: f64,
    driver_cpu_us: f64,
}

/// Programs, and where the results go.
struct Desk {
    cleave: PathBuf,
    drive: PathBuf,
    folder: PathBuf,
    results: File,
}

/// Measures, writes `target/bench/ring`, prints the ratios.
pub(super) fn run(root: &Path, effort: &Effort) -> Result<(), String> {
    let mut desk = Desk::set_up(root)?;
    println!(
        "pinned: driver to CPU {DRIVER_CPU}, daemon to CPU {DAEMON_CPU}; 4 KiB random reads, one vring, null disk"
    );
    println!(
        "{} rounds of {} s after one of warm-up; every daemon is started afresh for each figure",
        effort.rounds, effort.seconds
    );
    let mut figures: Vec<[Vec<Figure>; 3]> = POINTS.iter().map(|_| Default::default()).collect();
    for round in 0..=effort.rounds {
        for (point, figures) in POINTS.iter().zip(&mut figures) {
            // Forth and back, so that whatever drifts meets each as often early as late.
            let mut order = [0, 1, 2];
            if round % 2 == 1 {
                order.reverse();
            }
            for at in order {
                let figure = desk.measure(SUBJECTS[at], point, round, effort.seconds)?;
                if round > 0 {
                    figures[at].push(figure);
                }
            }
        }
        println!("round {round} of {} done", effort.rounds);
    }
    report(&figures);
    println!("raw data: {}", desk.folder.display());
    Ok(())
}

impl Desk {
    fn set_up(root: &Path) -> Result<Desk, String> {
        for (program, package) in [
            ("qemu-storage-daemon", "qemu-system-common"),
            ("taskset", "util-linux"),
        ] {
            setup::find(program).ok_or(format!(
                "{program} is missing; run: apt-get install {package}"
            ))?;
        }
        let count = std::thread::available_parallelism().map_or(1, |count| count.get());
        if count < 2 {
            return Err("driver and daemon need a CPU each; this machine has one".to_owned());
        }
        println!("building for release");
        let target = root.join("target").to_string_lossy().into_owned();
        for what in ["-p cleave-daemon", "-p cleave-client --example drive"] {
            let build = ["cargo", "build", "--release", "--locked"];
            let words: Vec<&str> = build.into_iter().chain(what.split(' ')).collect();
            // An own target folder of the caller's would leave an old program here.
            quietly(root, &words, &[("CARGO_TARGET_DIR", &target)])?;
        }
        let cleave = root.join("target/release/cleave");
        let folder = root.join("target/bench/ring");
        std::fs::create_dir_all(&folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
        let pinning = json!({ "driver_cpu": DRIVER_CPU, "daemon_cpu": DAEMON_CPU });
        let environment = environment::describe(root, &cleave, &pinning);
        let write = |name: &str, text: &str| {
            std::fs::write(folder.join(name), text).map_err(|error| format!("{name}: {error}"))
        };
        write("environment.json", &format!("{environment:#}\n"))?;
        let results = File::create(folder.join("results.jsonl"))
            .map_err(|error| format!("results.jsonl: {error}"))?;
        Ok(Desk {
            cleave,
            drive: root.join("target/release/examples/drive"),
            folder,
            results,
        })
    }

    /// A fresh daemon, driven once; a line in the results.
    fn measure(
        &mut self,
        subject: Subject,
        point: &Point,
        round: u32,
        seconds: f64,
    ) -> Result<Figure, String> {
        let socket = self.folder.join("disk.sock");
        let daemon_words = subject.command(&self.cleave, &socket);
        let daemon = Daemon::start(
            pinned(DAEMON_CPU, &daemon_words),
            socket.clone(),
            self.folder.join("daemon.log"),
        )?;
        let driver_words = self.driver(point, &socket, seconds);
        let words: Vec<&str> = driver_words.iter().map(String::as_str).collect();
        let said = quietly(
            &self.folder,
            &[&["taskset", "--cpu-list", DRIVER_CPU], &words[..]].concat(),
            &[],
        )?;
        daemon.stop()?;
        let result: Value = serde_json::from_str(&said)
            .map_err(|error| format!("the driver said {said}: {error}"))?;
        let line = json!({
            "suite": "ring", "round": round, "is_warm_up": round == 0, "subject": format!("{subject:?}"),
            "depth": point.depth, "wait": point.wait, "daemon": daemon_words, "driver": driver_words, "result": result,
        });
        writeln!(self.results, "{line}").map_err(|error| format!("results.jsonl: {error}"))?;
        Figure::read(&result)
    }

    fn driver(&self, point: &Point, socket: &Path, seconds: f64) -> Vec<String> {
        let text = format!(
            "--seconds {seconds} --depth {} --bs 4096 {} --json",
            point.depth, point.wait
        );
        let mut words = vec![
            self.drive.to_string_lossy().into_owned(),
            "--socket".to_owned(),
            socket.to_string_lossy().into_owned(),
        ];
        words.extend(text.split(' ').map(str::to_owned));
        words
    }
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Subject::QemuStorageDaemon => "qemu-storage-daemon null-co",
            Subject::CleaveInterrupt => "cleave interrupt",
            Subject::CleavePoll => "cleave poll",
        }
    }

    fn command(self, cleave: &Path, socket: &Path) -> Vec<String> {
        let socket = socket.to_string_lossy();
        let (program, options, last) = match self {
            Subject::QemuStorageDaemon => (
                Path::new("qemu-storage-daemon"),
                "--blockdev driver=null-co,node-name=disk,size=1073741824,read-zeroes=off --export",
                format!(
                    "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=1,\
                     addr.type=unix,addr.path={socket}"
                ),
            ),
            Subject::CleaveInterrupt => (cleave, SERVE_INTERRUPT, socket.into_owned()),
            Subject::CleavePoll => (cleave, SERVE_POLL, socket.into_owned()),
        };
        let mut words = vec![program.to_string_lossy().into_owned()];
        words.extend(options.split(' ').map(str::to_owned));
        words.push(last);
        words
    }
}

impl Figure {
    /// From what the driver prints; a request that failed is no measurement.
    fn read(result: &Value) -> Result<Figure, String> {
        let number = |name: &str| {
            result[name]
                .as_f64()
                .ok_or(format!("no `{name}` in {result}"))
        };
        if number("failed")? > 0.0 {
            return Err(format!("requests failed: {result}"));
        }
        Ok(Figure {
            iops: number("iops")?,
            mean_us: number("mean_us")?,
            daemon_cpu_us: number("daemon_cpu_us")?,
            driver_cpu_us: number("driver_cpu_us")?,
        })
    }
}

fn pinned(cpu: &str, words: &[String]) -> Command {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", cpu]).args(words);
    command
}

fn report(figures: &[[Vec<Figure>; 3]]) {
    println!("\nratios to qemu-storage-daemon: median of the rounds (least–most)");
    println!(
        "{:<18} {:<28} {:>9} {:>8} {:>22} {:>10} {:>10} {:>22}",
        "depth, driver",
        "daemon",
        "kIOPS",
        "mean us",
        "IOPS ratio",
        "daemon us",
        "driver us",
        "daemon CPU/IO ratio"
    );
    for (point, subjects) in POINTS.iter().zip(figures) {
        for (subject, own) in SUBJECTS.iter().zip(subjects) {
            let median = |of: fn(&Figure) -> f64| {
                let values: Vec<f64> = own.iter().map(of).collect();
                Spread::of(&values).map_or(f64::NAN, |spread| spread.median)
            };
            println!(
                "{:<18} {:<28} {:>9.1} {:>8.2} {:>22} {:>10.3} {:>10.3} {:>22}",
                format!("{}, {}", point.depth, point.wait.trim_start_matches("--")),
                subject.name(),
                median(|figure| figure.iops) / 1e3,
                median(|figure| figure.mean_us),
                ratio(own, &subjects[0], |figure| figure.iops),
                median(|figure| figure.daemon_cpu_us),
                median(|figure| figure.driver_cpu_us),
                ratio(own, &subjects[0], |figure| figure.daemon_cpu_us),
            );
        }
    }
}

/// Of the same rounds, one by one.
fn ratio(own: &[Figure], base: &[Figure], of: fn(&Figure) -> f64) -> String {
    let ratios: Vec<f64> = own
        .iter()
        .zip(base)
        .map(|(own, base)| of(own) / of(base))
        .collect();
    Spread::of(&ratios).map_or_else(String::new, |spread| spread.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(iops: f64) -> Figure {
        Figure {
            iops,
            mean_us: 1.0,
            daemon_cpu_us: 1.0,
            driver_cpu_us: 1.0,
        }
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        // The medians' ratio would be 2; two of three rounds say 3.
        let own = [figure(30.0), figure(20.0), figure(3.0)];
        let base = [figure(10.0), figure(20.0), figure(1.0)];
        assert_eq!(ratio(&own, &base, |figure| figure.iops), "3.00 (1.00–3.00)");
    }

    #[test]
    fn a_run_with_failed_requests_is_no_measurement() {
        let mut result = json!({"iops": 1.0, "mean_us": 1.0, "daemon_cpu_us": 1.0, "driver_cpu_us": 1.0, "failed": 0});
        assert!(Figure::read(&result).is_ok());
        result["failed"] = json!(1);
        assert!(Figure::read(&result).is_err());
        assert!(Figure::read(&json!({"iops": 1.0})).is_err());
    }
}
