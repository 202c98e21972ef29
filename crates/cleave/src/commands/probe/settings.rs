//! What `cleave probe` is to measure, and where its results go.

use std::path::PathBuf;
use std::time::Duration;

use cleave_config::Storage;
use cleave_disk::Direct;

/// Options of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) disk: Storage,
    pub(crate) depth: Depth,
    pub(crate) writes: bool,
    pub(crate) destructive: bool,
    pub(crate) allow_thin: bool,
    pub(crate) direct: Direct,
    pub(crate) profile: Option<PathBuf>,
    pub(crate) json: Option<PathBuf>,
}

/// How thoroughly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    Quick,
    Full,
    Within(Duration),
}
