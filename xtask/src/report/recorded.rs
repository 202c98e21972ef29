//! A run as it was left behind, whether it came to its end or not.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// A warning that begins so takes a suite's ratios and figures out of the report.
pub(crate) const DISTURBED: &str = "disturbed";

/// The recorded run in a folder.
pub(crate) struct Recorded {
    pub(crate) folder: PathBuf,
    pub(crate) environment: Value,
    /// Measurements of all suites, in the order in which they were made.
    lines: Vec<Value>,
    /// Suite and text.
    pub(crate) warnings: Vec<(String, String)>,
    /// The arguments of the run.
    pub(crate) asked: Value,
    pub(crate) is_complete: bool,
    /// Lines that are no JSON: of a run that was cut off in the middle of one.
    pub(crate) torn: usize,
}

impl Recorded {
    /// Reads a folder; only one without results is refused.
    pub(crate) fn read(folder: &Path) -> Result<Recorded, String> {
        let path = folder.join("results.jsonl");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| format!("{}: {error}; no run lies there", path.display()))?;
        let environment = std::fs::read_to_string(folder.join("environment.json"));
        let environment = environment
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or(Value::Null);
        Ok(Recorded::parse(folder, &text, environment))
    }

    fn parse(folder: &Path, text: &str, environment: Value) -> Recorded {
        let mut run = Recorded {
            folder: folder.to_owned(),
            environment,
            lines: Vec::new(),
            warnings: Vec::new(),
            asked: Value::Null,
            is_complete: false,
            torn: 0,
        };
        for line in text.lines() {
            match serde_json::from_str::<Value>(line) {
                Ok(value) => run.take(value),
                Err(_) => run.torn += 1,
            }
        }
        run
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

    /// The measurements of a suite, without those of its warm-up.
    pub(crate) fn of(&self, suite: &str) -> Vec<&Value> {
        let counts = |line: &&Value| {
            line["suite"].as_str() == Some(suite) && line["is_warm_up"].as_bool() != Some(true)
        };
        self.lines.iter().filter(counts).collect()
    }

    /// Whether others used the CPUs while a suite was measured: its ratios are not judged then, and its figures not kept.
    pub(crate) fn is_disturbed(&self, suite: &str) -> bool {
        let mut warnings = self.warnings.iter();
        warnings.any(|(own, text)| own == suite && text.starts_with(DISTURBED))
    }

    /// How the page calls it.
    pub(crate) fn name(&self) -> String {
        let name = self.folder.file_name();
        name.map_or_else(
            || self.folder.display().to_string(),
            |name| name.to_string_lossy().into_owned(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_run_is_read_as_it_was_written() {
        let folder = std::env::temp_dir().join(format!("xtask-run-{}", std::process::id()));
        let mut run = Run::create(&folder, &json!({"cpu": "a"}), &json!({"seconds": 1})).unwrap();
        run.note("cpu", &json!({"round": 0, "is_warm_up": true}))
            .unwrap();
        run.note("cpu", &json!({"round": 1})).unwrap();
        run.note("tax", &json!({"round": 1})).unwrap();
        run.warn("cpu", "noise").unwrap();
        let killed = Recorded::read(&folder).unwrap();
        assert!(!killed.is_complete);
        run.finish().unwrap();
        let whole = Recorded::read(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(whole.is_complete);
        assert_eq!(whole.of("cpu").len(), 1, "the warm-up does not count");
        assert_eq!(whole.warnings, [("cpu".to_owned(), "noise".to_owned())]);
        assert_eq!(whole.environment["cpu"], "a");
        assert_eq!(whole.asked["seconds"], 1);
    }

    #[test]
    fn a_torn_line_costs_only_itself() {
        let text = "{\"kind\":\"measurement\",\"suite\":\"cpu\"}\n{\"kind\":\"meas";
        let run = Recorded::parse(Path::new("a/b"), text, Value::Null);
        assert_eq!(
            (run.of("cpu").len(), run.torn, run.is_complete),
            (1, 1, false)
        );
        assert_eq!(run.name(), "b");
    }
}
