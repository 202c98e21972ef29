//! What comparisons share: built programs, a folder for results, CPUs to be pinned to, one measurement.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::environment;
use super::spread::Spread;
use crate::daemon::Daemon;
use crate::setup;
use crate::step::quietly;

/// Driver and daemon on a CPU each, where there are two.
pub(super) const DRIVER_CPU: &str = "0";
pub(super) const DAEMON_CPU: &str = "1";

/// One measurement.
pub(super) struct Figure {
    pub(super) iops: f64,
    pub(super) mean_us: f64,
    pub(super) daemon_cpu_us: f64,
    pub(super) driver_cpu_us: f64,
}

/// Programs, and where the results go.
pub(super) struct Desk {
    pub(super) cleave: PathBuf,
    pub(super) drive: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) results: File,
}

impl Desk {
    pub(super) fn set_up(root: &Path, name: &str, needs: &[(&str, &str)]) -> Result<Desk, String> {
        for (program, package) in needs {
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
        let folder = root.join("target/bench").join(name);
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

    /// A fresh daemon, driven for a warm-up where there is one and then measured.
    pub(super) fn measure(
        &self,
        daemon: &[String],
        warm_up: Option<&str>,
        load: &str,
    ) -> Result<Value, String> {
        let socket = self.socket();
        let running = Daemon::start(
            pinned(DAEMON_CPU, daemon),
            socket.clone(),
            self.folder.join("daemon.log"),
        )?;
        if let Some(load) = warm_up {
            self.drive(load)?;
        }
        let result = self.drive(load)?;
        running.stop()?;
        Ok(result)
    }

    /// Where daemons listen.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("disk.sock")
    }

    /// What the driver prints of a load.
    fn drive(&self, load: &str) -> Result<Value, String> {
        let drive = self.drive.to_string_lossy();
        let socket = self.socket();
        let socket = socket.to_string_lossy();
        let mut words = vec![
            "taskset",
            "--cpu-list",
            DRIVER_CPU,
            &drive,
            "--json",
            "--socket",
            &socket,
        ];
        words.extend(load.split(' '));
        let said = quietly(&self.folder, &words, &[])?;
        serde_json::from_str(&said).map_err(|error| format!("the driver said {said}: {error}"))
    }

    /// Adds a line to the raw data.
    pub(super) fn note(&mut self, line: &Value) -> Result<(), String> {
        writeln!(self.results, "{line}").map_err(|error| format!("results.jsonl: {error}"))
    }
}

impl Figure {
    /// From what the driver prints; a request that failed is no measurement.
    pub(super) fn read(result: &Value) -> Result<Figure, String> {
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

/// Of the same rounds, one by one.
pub(super) fn ratio(own: &[Figure], base: &[Figure], of: fn(&Figure) -> f64) -> String {
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
