//! The program from a terminal or a script: its commands, what they print, and what they refuse.
#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // tests: shared steps stand outside of #[test] functions

mod config;
mod conventions;
mod demo_and_probe;
mod disk;
mod doctor;
mod refused;
mod upgrade;
mod view;

use std::path::Path;

use cleave_client::Client;
use cleave_tests::{small, wait_until};

/// Opens a client of the disk at this socket.
pub(crate) fn open(path: &Path) -> Client {
    let mut client = None;
    wait_until(|| {
        client = Client::open(path, &small(2)).ok();
        client.is_some()
    });
    client.unwrap_or_else(|| panic!("not let in at {}", path.display()))
}
