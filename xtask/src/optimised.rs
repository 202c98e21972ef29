//! `cargo xtask kill` and `conform`: one of the integration tests against the optimised program, as its arguments say.

use std::path::Path;

use cleave_rig::{At, Result, command, words};

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
    let times = request.times.map(|times| format!("CLEAVE_KILLS={times}"));
    let seed = request.seed.map(|seed| format!("CLEAVE_TEST_SEED={seed}"));
    let environment = times.into_iter().chain(seed).collect();
    let line = "faults kill:: -- --nocapture";
    test(root, environment, words(line, &[]))
}

pub(crate) fn conform(root: &Path, request: &Conform) -> Result {
    let here = std::env::current_dir().at("the current folder")?;
    let line = "hostile -- --daemon {} --from {}";
    let mut test_words = words(line, &[&request.daemon, &here.display()]);
    let only = request.only.iter().flat_map(|text| ["--only", text]);
    test_words.extend(only.map(str::to_owned));
    test(root, Vec::new(), test_words)
}

/// Fails unless the test passes; its output goes where ours goes.
fn test(root: &Path, environment: Vec<String>, test: Vec<String>) -> Result {
    let cargo = "cargo test --quiet --locked --release --package cleave-tests --test";
    let line = [words("env", &[]), environment, words(cargo, &[]), test].concat();
    match command(&line).current_dir(root).status().at("cargo")? {
        status if status.success() => Ok(()),
        status => Err(format!("`{}` ended with {status}", line.join(" "))),
    }
}
