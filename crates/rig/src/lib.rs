//! Runs the programs that tests and measurements need: builds by cargo, daemons, and guests in QEMU; and reads the commands of the
//! pages. This crate forbids judging: it says how a program ended and what it said. Which of that is a fault is for the tests of
//! `xtask`, and what it is worth for the measurements of `lab`.
#![forbid(unsafe_code)]

pub mod built;
mod command;
pub mod daemon;
pub mod guest;
pub mod pages;
pub mod setup;

use std::path::{Path, PathBuf};

pub use command::{At, PINNED, Result, command, empty_folder, execute, quietly, words};

/// Returns the workspace's top folder: these programs are always run by cargo from their own checkout.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}
