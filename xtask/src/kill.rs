//! `cargo xtask kill`: the test that kills the daemon, as often as wanted and against the optimised program.

use std::path::Path;
use std::process::Command;

use crate::step::loudly;

#[derive(clap::Args)]
pub(crate) struct Request {
    /// Kill the daemon this many times [default: 200]
    #[arg(long, value_name = "N")]
    times: Option<u64>,
    /// Repeat the run of this seed, instead of a new one
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

pub(crate) fn run(root: &Path, request: &Request) -> Result<(), String> {
    let words = "test --quiet --locked --release --package cleave-tests --test kill -- --nocapture";
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args(words.split(' '));
    for (variable, number) in [
        ("CLEAVE_KILLS", request.times),
        ("CLEAVE_TEST_SEED", request.seed),
    ] {
        command.envs(number.map(|number| (variable, number.to_string())));
    }
    loudly(&mut command)
}
