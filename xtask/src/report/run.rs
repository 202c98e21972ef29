//! A folder that is being filled: a line for each measurement, whole on disk before the next begins.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// A run that is under way. Where it is never finished, its report says "incomplete".
pub(crate) struct Run {
    folder: PathBuf,
    results: File,
    bytes: u64,
}

impl Run {
    /// Makes the folder; an older run in it is replaced. `begin` says what was asked for.
    pub(crate) fn create(folder: &Path, environment: &Value, begin: &Value) -> Result<Run, String> {
        let told = |error: std::io::Error| format!("{}: {error}", folder.display());
        std::fs::create_dir_all(folder).map_err(told)?;
        std::fs::write(
            folder.join("environment.json"),
            format!("{environment:#}\n"),
        )
        .map_err(told)?;
        let path = folder.join("results.jsonl");
        // Truncated by its own call, then only appended to: a line lands whole or not at all.
        File::create(&path).map_err(told)?;
        let results = OpenOptions::new().append(true).open(&path).map_err(told)?;
        let mut run = Run {
            folder: folder.to_owned(),
            results,
            bytes: 0,
        };
        run.write(&json!({ "kind": "begin", "asked": begin }))?;
        Ok(run)
    }

    /// Path of the folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A measurement of a suite, with all that is needed to argue with it: command, parameters, round.
    pub(crate) fn note(&mut self, suite: &str, line: &Value) -> Result<(), String> {
        self.put("measurement", suite, line)
    }

    /// Something that a reader must know about a suite; printed too.
    pub(crate) fn warn(&mut self, suite: &str, text: &str) -> Result<(), String> {
        println!("warning: {suite}: {text}");
        self.put("warning", suite, &json!({ "text": text }))
    }

    /// All that was asked for has been measured.
    pub(crate) fn finish(mut self) -> Result<PathBuf, String> {
        self.write(&json!({ "kind": "end" }))?;
        Ok(self.folder)
    }

    fn put(&mut self, kind: &str, suite: &str, line: &Value) -> Result<(), String> {
        let mut whole = json!({ "kind": kind, "suite": suite });
        if let (Some(whole), Some(line)) = (whole.as_object_mut(), line.as_object()) {
            whole.extend(line.clone());
        }
        self.write(&whole)
    }

    fn write(&mut self, line: &Value) -> Result<(), String> {
        let text = format!("{line}\n");
        if let Err(error) = self.results.write_all(text.as_bytes()) {
            // A full disk may have taken half a line: what stays must be lines.
            let _ = self.results.set_len(self.bytes);
            let path = self.folder.join("results.jsonl");
            return Err(format!("{}: {error}", path.display()));
        }
        self.bytes += text.len() as u64;
        Ok(())
    }
}
