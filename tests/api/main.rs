//! The HTTP interface of `cleave serve` and `cleave node`: what it shows is what was done, its document is true, and nobody who
//! talks to it harms a disk.
#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // tests: shared steps stand outside of #[test] functions

mod about;
mod access;
mod changed;
mod dashboard;
mod document;
mod events;
mod generated_client;
mod hostile;
mod limits;
mod orders;
mod prometheus;
mod shown;

use std::path::Path;

use cleave_tests::http::get;
use serde_json::{Value, json};

/// A disk in memory that does not outlive its node.
pub(crate) fn ram() -> Value {
    json!({"disk": ["ram:1M"], "queues": 1, "persistent": false})
}

/// The report of the disk at a control socket.
pub(crate) fn report(control: &Path) -> Value {
    let disks = get(control, "/v1/disks");
    let id = disks[0]["id"].as_str().unwrap();
    get(control, &format!("/v1/disks/{id}"))
}
