//! The disk that an operator gives to be measured, and what may be done to it.

use std::path::{Path, PathBuf};

use clap::Args;
use cleave_rig::{At, Result};

use crate::occupied;

/// A disk and its permissions.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DiskOptions {
    /// Use a filled file or device instead of a file of its own
    #[arg(long = "disk", value_name = "DISK")]
    pub(crate) path: Option<PathBuf>,
    /// Accept a disk that was never filled
    #[arg(long)]
    pub(crate) allow_thin: bool,
    /// Write to --disk if it is empty and unused: fill it, and run the suites that write
    #[arg(long)]
    destructive: bool,
    /// Write to --disk although it holds something: names the disk again
    #[arg(long, value_name = "DISK", requires = "path")]
    overwrite: Option<PathBuf>,
}

impl DiskOptions {
    /// Returns true if suites may write to the disk.
    pub(crate) fn may_be_written(&self) -> bool {
        self.destructive || self.overwrite.is_some()
    }

    /// Returns an error if the disk is not there, or is to be written and holds something or is in use.
    pub(crate) fn check(&self) -> Result {
        let Some(disk) = &self.path else {
            return Ok(());
        };
        std::fs::metadata(disk).at(format!("--disk {}", disk.display()))?;
        match self.may_be_written() {
            true => occupied::refuse(disk, self.overwrite.as_deref()),
            false => Ok(()),
        }
    }

    /// Returns the disk.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }
}
