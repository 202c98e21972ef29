//! A run's folder: a line for each measurement, whole on disk before the next begins, beside a description of the machine.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, quietly};
use serde_json::{Value, json};

use crate::equipment::Equipment;

/// A warning that begins so takes a suite's ratios and figures out of the report.
pub(crate) const DISTURBED: &str = "disturbed";

/// A run that is under way. Where it is never finished, its report says "incomplete".
pub(crate) struct Run {
    folder: PathBuf,
    results: File,
    bytes: u64,
}

impl Run {
    /// Makes the folder; an older run in it is replaced. Beside the command line stands what it was taken for.
    pub(crate) fn create(folder: &Path, environment: &Value, asked: Value) -> Result<Run> {
        std::fs::create_dir_all(folder).at(folder)?;
        let text = format!("{environment:#}\n");
        std::fs::write(folder.join("environment.json"), text).at(folder)?;
        let path = folder.join("results.jsonl");
        // Truncated by its own call, then only appended to: a line lands whole or not at all.
        File::create(&path).at(&path)?;
        let results = OpenOptions::new().append(true).open(&path).at(&path)?;
        let mut run = Run {
            folder: folder.to_owned(),
            results,
            bytes: 0,
        };
        let words: Vec<String> = std::env::args().skip(1).collect();
        let asked = merged(asked, &json!({ "words": words }));
        run.write(&json!({ "kind": "begin", "asked": asked }))?;
        Ok(run)
    }

    /// Path of the folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A measurement of a suite, with all that is needed to argue with it: command, parameters, round.
    pub(crate) fn note(&mut self, suite: &str, line: &Value) -> Result {
        let kind = json!({ "kind": "measurement", "suite": suite });
        self.write(&merged(kind, line))
    }

    /// Something that a reader must know about a suite; printed too.
    pub(crate) fn warn(&mut self, suite: &str, text: &str) -> Result {
        println!("warning: {suite}: {text}");
        self.write(&json!({ "kind": "warning", "suite": suite, "text": text }))
    }

    /// Notes that all that was asked for has been measured.
    pub(crate) fn finish(mut self) -> Result<PathBuf> {
        self.write(&json!({ "kind": "end" }))?;
        Ok(self.folder)
    }

    fn write(&mut self, line: &Value) -> Result {
        let text = format!("{line}\n");
        let written = self.results.write_all(text.as_bytes());
        if written.is_err() {
            // A full disk may have taken half a line; only whole lines may stay.
            let _ = self.results.set_len(self.bytes);
        }
        self.bytes += text.len() as u64;
        written.at(self.folder.join("results.jsonl"))
    }
}

/// Returns an object with the fields of another.
pub(crate) fn merged(mut object: Value, more: &Value) -> Value {
    if let (Some(object), Some(more)) = (object.as_object_mut(), more.as_object()) {
        object.extend(more.clone());
    }
    object
}

/// A run as it was left behind, whether it came to its end or not.
#[derive(Default)]
pub(crate) struct RecordedRun {
    pub(crate) folder: PathBuf,
    pub(crate) environment: Value,
    /// Measurements of all suites, in the order in which they were made.
    pub(crate) lines: Vec<Value>,
    /// Suite and text.
    pub(crate) warnings: Vec<(String, String)>,
    /// The arguments of the run.
    pub(crate) asked: Value,
    pub(crate) is_complete: bool,
    /// Lines that are not JSON: a run may be cut off in the middle of one.
    pub(crate) torn: usize,
}

impl RecordedRun {
    /// Reads a folder; only one without results is refused.
    pub(crate) fn read(folder: &Path) -> Result<RecordedRun> {
        let text = std::fs::read_to_string(folder.join("results.jsonl"))
            .map_err(|error| format!("{}: {error}; no run lies there", folder.display()))?;
        let environment = std::fs::read_to_string(folder.join("environment.json"));
        let mut run = RecordedRun {
            folder: folder.to_owned(),
            environment: serde_json::from_str(&environment.unwrap_or_default()).unwrap_or_default(),
            ..RecordedRun::default()
        };
        for line in text.lines() {
            match serde_json::from_str::<Value>(line) {
                Ok(value) => run.take(value),
                Err(_) => run.torn += 1,
            }
        }
        Ok(run)
    }

    fn take(&mut self, line: Value) {
        let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        match line["kind"].as_str() {
            Some("begin") => self.asked = line["asked"].clone(),
            Some("end") => self.is_complete = true,
            Some("warning") => self.warnings.push((text("suite"), text("text"))),
            _ => self.lines.push(line),
        }
    }

    /// Returns the measurements of a suite, without those of its warm-up.
    pub(crate) fn of(&self, suite: &str) -> Vec<&Value> {
        let counts = |line: &&Value| line["suite"] == suite && line["is_warm_up"] != true;
        self.lines.iter().filter(counts).collect()
    }

    /// Returns true if others used the CPUs while a suite was measured: its ratios are not judged then, and its figures not kept.
    pub(crate) fn is_disturbed(&self, suite: &str) -> bool {
        let mut warnings = self.warnings.iter();
        warnings.any(|(own, text)| own == suite && text.starts_with(DISTURBED))
    }

    /// Returns how the page calls it.
    pub(crate) fn name(&self) -> String {
        let name = self.folder.file_name().unwrap_or(self.folder.as_os_str());
        name.to_string_lossy().into_owned()
    }
}

/// Kernel, processor, memory, versions, revision, and further facts that the caller knows.
pub(crate) fn environment(equipment: &Equipment, program: &Path, more: &Value) -> Value {
    let program = program.display().to_string();
    let said = |line: &str| {
        let text = quietly(Path::new("/"), line, &[&program]);
        let text = text.unwrap_or_else(|why| format!("unknown: {why}"));
        text.lines().next().unwrap_or_default().to_owned()
    };
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    // The first value of a `name : value` file.
    let field = |path: &str, name: &str| {
        let text = read(path);
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        let value = pairs.find(|(key, _)| key.trim() == name);
        value.map_or("unknown".to_owned(), |(_, value)| value.trim().to_owned())
    };
    let facts = json!({
        "kernel": said("uname -srvm"),
        "cpu": field("/proc/cpuinfo", "model name"),
        "cpus_online": said("nproc --all"),
        "memory": field("/proc/meminfo", "MemTotal"),
        "hypervisor": read("/proc/cpuinfo").contains(" hypervisor"),
        "io_uring_disabled": read("/proc/sys/kernel/io_uring_disabled").trim(),
        "load_at_start": read("/proc/loadavg").trim(),
        "cleave": said("{} --version"),
        "fio": said("fio --version"),
        "not_measured": "ublk and vhost-blk: no suite drives them",
        "qemu_storage_daemon": said("qemu-storage-daemon --version"),
    });
    merged(merged(facts, &equipment.revision()), more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_as_it_was_written_and_a_torn_line_costs_only_itself() {
        let folder = std::env::temp_dir().join(format!("xtask-run-{}", std::process::id()));
        let mut run = Run::create(&folder, &json!({"cpu": "a"}), json!({"seconds": 1})).unwrap();
        for (suite, line) in [
            ("cpu", json!({"round": 0, "is_warm_up": true})),
            ("cpu", json!({"round": 1})),
            ("tax", json!({"round": 1})),
        ] {
            run.note(suite, &line).unwrap();
        }
        run.warn("cpu", "noise").unwrap();
        let killed = RecordedRun::read(&folder).unwrap();
        assert!(!killed.is_complete);
        let path = run.finish().unwrap().join("results.jsonl");
        let mut whole = OpenOptions::new().append(true).open(path).unwrap();
        whole.write_all(b"{\"kind\":\"meas").unwrap();
        let whole = RecordedRun::read(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((whole.is_complete, whole.torn), (true, 1));
        assert_eq!(whole.of("cpu").len(), 1, "the warm-up does not count");
        assert_eq!(whole.warnings, [("cpu".to_owned(), "noise".to_owned())]);
        assert_eq!(whole.environment["cpu"], "a");
        assert_eq!(whole.asked["seconds"], 1);
    }
}
