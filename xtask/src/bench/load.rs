//! A load on a disk, as arguments of our driver and of fio.

use std::path::Path;

use super::cpus::Cpus;
use super::fio::Job;

/// How the driving side waits for completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wait {
    /// As a guest does.
    Sleep,
    /// Spins on the used ring. fio waits in the kernel all the same: that is what the bare disk is.
    Poll,
}

/// Random requests for some time.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) block_bytes: u32,
    /// In flight on each vring.
    pub(super) depth: u32,
    pub(super) queues: u32,
    pub(super) wait: Wait,
    pub(super) read_percent: u32,
    pub(super) seconds: f64,
    /// Driven before it counts.
    pub(super) warm_up: f64,
}

impl Load {
    /// 4 KiB reads on one vring.
    pub(super) fn reads(depth: u32, wait: Wait, seconds: f64) -> Load {
        Load {
            block_bytes: 4096,
            depth,
            queues: 1,
            wait,
            read_percent: 100,
            seconds,
            // Until the worker runs, memory is touched and caches are warm.
            warm_up: seconds / 10.0,
        }
    }

    /// The same for another time.
    pub(super) fn with_seconds(&self, seconds: f64) -> Load {
        Load {
            seconds,
            ..self.clone()
        }
    }

    /// The driver's options.
    pub(super) fn words(&self) -> String {
        let wait = match self.wait {
            Wait::Sleep => "--sleep",
            Wait::Poll => "--poll",
        };
        format!(
            "{wait} --seconds {} --warm-up {} --depth {} --queues {} --bs {} --mix {}",
            self.seconds,
            self.warm_up,
            self.depth,
            self.queues,
            self.block_bytes,
            self.read_percent
        )
    }

    /// The same of fio: as many in flight, from one thread for each vring.
    pub(super) fn job<'a>(&self, disk: &'a Path, cpus: &'a Cpus) -> Job<'a> {
        Job {
            disk,
            block_bytes: self.block_bytes,
            depth: self.depth,
            threads: self.queues,
            read_percent: self.read_percent,
            seconds: self.seconds,
            warm_up: self.warm_up,
            cpus: &cpus.driver,
        }
    }
}
