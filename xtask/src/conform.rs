//! `cargo xtask conform`: the hostile, life cycle and recovery tables against any vhost-user-blk back-end.

use std::path::Path;
use std::process::Command;

use crate::step::loudly;

#[derive(clap::Args)]
pub(crate) struct Request {
    /// Start the back-end with this command, in the current folder; {socket}, {disk} and {queues} are filled in
    #[arg(long, value_name = "COMMAND")]
    daemon: String,
    /// Run only the rows whose names contain this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

pub(crate) fn run(root: &Path, request: &Request) -> Result<(), String> {
    let words = "test --quiet --locked --release --package cleave-tests --test hostile -- --daemon";
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args(words.split(' '));
    let here = std::env::current_dir().map_err(|error| format!("the current folder: {error}"))?;
    command.arg(&request.daemon).arg("--from").arg(here);
    if let Some(text) = &request.only {
        command.args(["--only", text]);
    }
    loudly(&mut command)
}
