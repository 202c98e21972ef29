//! Why no engine could be created.

use std::io;

/// Why no engine could be created.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Set-up failed. The message names the sysctl, limit or kernel version that prevents it.
    #[error("{remedy}: {source}")]
    Setup {
        /// The remedy, for an operator.
        remedy: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The device claims to have polled queues but does not accept a polled read.
    #[error(
        "disk {name} cannot be polled: a polled read of its first block failed ({source}); \
         remove --iopoll"
    )]
    Iopoll {
        /// The disk, or the leg of a stripe.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl EngineError {
    /// Returns true if the same attempt may succeed later: the host lacks memory or open files, or the device fails.
    pub fn may_pass(&self) -> bool {
        let (EngineError::Setup { source, .. } | EngineError::Iopoll { source, .. }) = self;
        let lasts = [
            libc::EPERM,
            libc::EACCES,
            libc::ENOSYS,
            libc::EINVAL,
            libc::EOPNOTSUPP,
        ];
        source
            .raw_os_error()
            .is_none_or(|errno| !lasts.contains(&errno))
    }
}

impl From<io::Error> for EngineError {
    /// Finds the remedy for an error while a ring or a store is set up.
    fn from(source: io::Error) -> EngineError {
        let remedy = match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                "io_uring is forbidden here; set the sysctl kernel.io_uring_disabled to 0 \
                 (or add this user to kernel.io_uring_group), and let seccomp pass it"
            }
            Some(libc::ENOSYS) => {
                "this kernel has no io_uring, or a seccomp filter hides it; Linux 5.19 or later is \
                 needed, with the sysctl kernel.io_uring_disabled at 0"
            }
            Some(libc::ENOMEM) => {
                "not enough memory for an io_uring; raise RLIMIT_MEMLOCK (ulimit -l) or the memory \
                 limit of the cgroup"
            }
            Some(libc::EMFILE) => {
                "too many open files for an io_uring; raise RLIMIT_NOFILE (ulimit -n)"
            }
            Some(libc::ENFILE) => {
                "too many open files on this machine for an io_uring; raise the sysctl fs.file-max"
            }
            Some(libc::EINVAL) => {
                "this kernel's io_uring lacks required features; Linux 5.19 or later is needed"
            }
            _ => "cannot set up an io_uring",
        };
        EngineError::Setup { remedy, source }
    }
}
