//! Opening and probing.

use std::io;
use std::path::PathBuf;

/// Whether the page cache is bypassed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direct {
    /// O_DIRECT or refuse.
    On,
    /// Through the page cache.
    Off,
    /// O_DIRECT where it works.
    Auto,
}

/// How a disk is opened.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Opened without write permission; lock shared.
    pub read_only: bool,
    /// Page cache or not.
    pub direct: Direct,
    /// Logical block to tell the guest instead of the probed one.
    pub block_bytes: Option<u32>,
    /// Offer discard and unmapping write-zeroes where the store can.
    pub discard: bool,
}

/// Why a disk cannot be opened. Each line names the thing and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system refused.
    #[error("cannot open {path}: {source}")]
    Io {
        /// What was opened.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}
