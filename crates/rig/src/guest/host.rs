//! Work that other programs do for the guests, in a shell script.

use std::path::Path;
use std::process::Command;

use crate::command::{At, Result};

const SCRIPT: &str = include_str!("scripts/host.sh");

/// Runs a function of the script in a folder; returns its output.
pub(super) fn run(folder: &Path, words: &[&str]) -> Result<Vec<u8>> {
    let mut command = Command::new("sh");
    let output = command
        .args(["-ec", SCRIPT, "sh"])
        .args(words)
        .current_dir(folder)
        .output()
        .at("sh")?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!(
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}
