//! Why a process could not be confined, and what the kernel lacks for it.

use std::io;
use std::path::PathBuf;

/// Why a process or a thread could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A path that is to stay within reach cannot be found.
    #[error("cannot confine access to {0}: {1}")]
    Path(PathBuf, #[source] io::Error),
    /// Landlock is there and refuses.
    #[error("cannot confine access to files: {0}")]
    Landlock(String),
    /// The privileges cannot be dropped.
    #[error("cannot drop privileges: {0}")]
    Privileges(#[source] io::Error),
    /// The kernel has seccomp and refuses the filter.
    #[error("cannot confine system calls: {0}")]
    Seccomp(String),
}

/// A limit that this kernel does not have, as the end of a sentence: "this kernel lacks …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// A whole layer.
    Layer(String),
    /// Rules that are newer than the kernel, in a layer that it has.
    Rules(String),
}
