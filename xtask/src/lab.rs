//! The lab, which measures and draws. It is a program of its own, so that the checks do not wait until it is compiled; only the
//! names of its commands are known here.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cleave_rig::{At, Result, command, words};

/// The words of a command of the lab, which reads them itself.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct LabArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _all: Vec<OsString>,
}

/// Compiles the lab where it has changed, and becomes it.
pub(crate) fn replace_by(root: &Path, line: &[OsString]) -> Result {
    let manifest = root.join("Cargo.toml");
    let run = "cargo run --quiet --locked --package cleave-lab --manifest-path {} --";
    let mut cargo = command(&words(run, &[&manifest.display()]));
    Err(cargo.args(line).exec()).at("cargo")
}

/// Runs a command of the lab that was built with the tests.
pub(crate) fn run(program: &Path, line: &str) -> Result {
    let mut lab = Command::new(program);
    // What is left on stderr is why it failed.
    lab.args(line.split(' ')).env("CARGO_TERM_QUIET", "true");
    let ended = lab.stdout(Stdio::inherit()).output().at(program)?;
    match ended.status {
        status if status.success() => Ok(()),
        status => {
            let why = String::from_utf8_lossy(&ended.stderr);
            Err(format!("{why}`{line}` ended with {status}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_failure_comes_first() {
        let shell = Path::new("/bin/sh");
        assert_eq!(run(shell, "-c true"), Ok(()));
        let why = run(shell, "-c nonesuch").unwrap_err();
        let first = why.lines().next().unwrap_or_default();
        assert!(first.contains("nonesuch: not found"), "{why}");
        assert!(
            why.ends_with("`-c nonesuch` ended with exit status: 127"),
            "{why}"
        );
    }
}
