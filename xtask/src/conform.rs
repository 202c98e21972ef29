//! `cargo xtask conform`: the hostile, life cycle and recovery tables against any vhost-user-blk back-end.

use std::path::Path;
use std::process::Command;

/// Builds and runs the tables. `words`: `--daemon 'CMD {socket} {disk} {queues}'`, `--only TEXT`.
pub(crate) fn run(root: &Path, words: &[&str]) -> Result<(), String> {
    let mut given: Vec<&str> = Vec::new();
    for pair in words.chunks(2) {
        match *pair {
            ["--daemon" | "--only", _] => given.extend(pair.iter()),
            _ => {
                return Err(format!(
                    "conform takes no {:?}: --daemon COMMAND, --only TEXT",
                    pair
                ));
            }
        }
    }
    if !words.contains(&"--daemon") {
        return Err("conform needs --daemon 'COMMAND {socket} {disk} {queues}'".to_owned());
    }
    let mut command = Command::new(env!("CARGO"));
    command
        .current_dir(root)
        .args(["test", "--quiet", "--locked", "--release"])
        .args(["--package", "cleave-tests", "--test", "conform", "--"])
        .args(given);
    let status = command
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    match status.success() {
        true => Ok(()),
        false => Err("the back-end failed a row that a specification demands".to_owned()),
    }
}
