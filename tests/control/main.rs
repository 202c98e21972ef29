//! The control socket: what it shows is what was done, and nobody who talks to it harms the disk.
#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // tests: shared steps stand outside of #[test] functions

mod changed;
mod dashboard;
mod hostile;
mod limits;
mod prometheus;
mod shown;
mod view;

use std::path::PathBuf;

use cleave_tests::{Daemon, Scratch};
use serde_json::Value;

/// A daemon with a control socket, and where that is.
pub(crate) fn serve(args: &[&str]) -> (Daemon, PathBuf) {
    let scratch = Scratch::new();
    let (socket, control) = (scratch.join("socket"), scratch.join("control"));
    let mut all = vec![
        "serve".to_owned(),
        "--socket-path".to_owned(),
        socket.display().to_string(),
        "--control".to_owned(),
        control.display().to_string(),
    ];
    all.extend(args.iter().map(|arg| (*arg).to_owned()));
    (Daemon::with_args(scratch, socket, &all), control)
}

/// The report of the disk at a control socket.
pub(crate) fn report(control: &std::path::Path) -> Value {
    let disks = cleave_tests::http::get(control, "/v1/disks");
    let id = disks[0]["id"].as_str().unwrap();
    cleave_tests::http::get(control, &format!("/v1/disks/{id}"))
}
