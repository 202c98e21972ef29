//! Paths that stay within reach, and their use.

use std::path::{Path, PathBuf};

/// The permitted use of a path. A folder stands for everything beneath it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathAccess {
    /// Opened for reading.
    Read,
    /// Files of this folder are opened for reading and writing, and new ones are made. None is removed. Commands to devices
    /// (`ioctl`) are included.
    ReadWrite,
    /// Sockets and the lock files beside them are made and removed in this folder.
    MakeSockets,
    /// Files of this folder are removed.
    Remove,
    /// Files, sockets and folders are made, written, renamed and removed in this folder.
    Change,
}

/// A path that stays within reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reach {
    /// A file or a folder.
    pub path: PathBuf,
    /// Its use.
    pub access: PathAccess,
}

impl Reach {
    /// Makes one.
    pub fn new(path: impl AsRef<Path>, access: PathAccess) -> Reach {
        Reach {
            path: path.as_ref().to_owned(),
            access,
        }
    }
}
