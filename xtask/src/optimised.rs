//! `cargo xtask kill` and `conform`: one of the integration tests against the optimised program, as its arguments say.

use std::path::Path;
use std::process::Command;

use crate::step::{At, Result};

#[derive(clap::Args)]
pub(crate) struct Kill {
    /// Kill the daemon this many times [default: 200]
    #[arg(long, value_name = "N")]
    times: Option<u64>,
    /// Repeat the run of this seed, instead of a new one
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

#[derive(clap::Args)]
pub(crate) struct Conform {
    /// Start the back-end with this command, in the current folder; {socket}, {disk} and {queues} are filled in
    #[arg(long, value_name = "COMMAND")]
    daemon: String,
    /// Run only the rows whose names contain this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

pub(crate) fn kill(root: &Path, request: &Kill) -> Result {
    let mut command = test(root, "kill");
    for (name, value) in [
        ("CLEAVE_KILLS", request.times),
        ("CLEAVE_TEST_SEED", request.seed),
    ] {
        command.envs(value.map(|value| (name, value.to_string())));
    }
    run(command.arg("--nocapture"))
}

pub(crate) fn conform(root: &Path, request: &Conform) -> Result {
    let here = std::env::current_dir().at("the current folder")?;
    let mut command = test(root, "hostile");
    command
        .args(["--daemon", &request.daemon, "--from"])
        .arg(here);
    command.args(request.only.iter().flat_map(|text| ["--only", text]));
    run(&mut command)
}

fn test(root: &Path, name: &str) -> Command {
    let words = "test --quiet --locked --release --package cleave-tests --test";
    let mut command = Command::new("cargo");
    command
        .current_dir(root)
        .args(words.split(' '))
        .args([name, "--"]);
    command
}

/// Fails unless the command succeeds; its output goes where ours goes.
fn run(command: &mut Command) -> Result {
    match command.status().at("cargo")? {
        status if status.success() => Ok(()),
        status => Err(format!("{command:?} ended with {status}")),
    }
}
