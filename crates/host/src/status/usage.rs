//! Reads how much of the machine the process uses, and how much it may use.

use std::fs;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of all threads that there have been, user and system.
pub(super) fn cpu_seconds() -> f64 {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9
}

/// Memory of the process that is resident. 0 where the kernel does not say.
#[derive(Debug)]
pub(super) struct ResidentMemory {
    /// All of it, with what it shares with guests.
    pub(super) total_bytes: u64,
    /// Anonymous memory, which no other process has.
    pub(super) private_bytes: u64,
}

impl ResidentMemory {
    pub(super) fn read() -> ResidentMemory {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            number.unwrap_or(0).saturating_mul(1024)
        };
        ResidentMemory {
            total_bytes: bytes("VmRSS:"),
            private_bytes: bytes("RssAnon:"),
        }
    }
}

/// Returns how many files are open. `None`: the kernel does not say. Linux 6.2 and later tell it as the size of this folder; a confined
/// process cannot list it.
pub(super) fn open_files() -> Option<u64> {
    let count = fs::metadata("/proc/self/fd").ok()?.len();
    Some(count).filter(|count| *count > 0)
}

/// Returns how many files may be open.
pub(super) fn open_files_max() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}
