//! `cargo xtask kill`: the test that kills the daemon, as often as wanted and against the optimised program.

use std::path::Path;
use std::process::Command;

/// Runs it. `words`: `--times N`, `--seed N`.
pub(crate) fn run(root: &Path, words: &[&str]) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args([
        "test",
        "--quiet",
        "--locked",
        "--release",
        "--package",
        "cleave-tests",
        "--test",
        "kill",
        "--",
        "--nocapture",
    ]);
    for pair in words.chunks(2) {
        let variable = match pair.first() {
            Some(&"--times") => "CLEAVE_KILLS",
            Some(&"--seed") => "CLEAVE_TEST_SEED",
            word => return Err(format!("kill takes no {word:?}: --times N, --seed N")),
        };
        let number = pair.get(1).and_then(|value| value.parse::<u64>().ok());
        let number = number.ok_or_else(|| format!("{} takes a number", pair[0]))?;
        command.env(variable, number.to_string());
    }
    let status = command
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    match status.success() {
        true => Ok(()),
        false => Err(format!(
            "the kill test ended with {status}; its report stands above"
        )),
    }
}
