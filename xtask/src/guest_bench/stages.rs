//! CPU time of one guest by stage, from the kernel's own accounting of threads.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use crate::guest::machine::Accelerator;
use crate::step::quietly;

/// /proc counts in ticks of 10 ms on every Linux (`USER_HZ`).
const TICK_US: f64 = 10_000.0;

/// Ticks, as they stood at one moment.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub(super) struct Ticks {
    /// In user mode; with KVM this includes what the guest ran.
    user: u64,
    kernel: u64,
    /// The guest's part of `user`, which only KVM tells.
    guest: u64,
}

/// All that is counted for one guest at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    at: Instant,
    vcpus: Ticks,
    /// QEMU's I/O thread, or the daemons: what serves the disk.
    backend: Ticks,
    /// All of QEMU.
    qemu: Ticks,
}

/// The processes and threads to read.
pub(super) struct Watch {
    pub(super) qemu: u32,
    pub(super) daemons: Vec<u32>,
    /// How the names of QEMU's own I/O threads begin, where it has them.
    pub(super) io_thread: Option<&'static str>,
}

/// Microseconds of CPU in each stage between two samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stages {
    pub(super) seconds: f64,
    pub(super) guest_us: f64,
    pub(super) vmm_us: f64,
    pub(super) backend_user_us: f64,
    pub(super) backend_kernel_us: f64,
}

impl Watch {
    /// Reads the clocks; a thread that ended meanwhile counts with its process only.
    pub(super) fn sample(&self) -> Sample {
        let mut sample = Sample {
            at: Instant::now(),
            vcpus: Ticks::default(),
            backend: Ticks::default(),
            qemu: ticks(&format!("/proc/{}/stat", self.qemu)).unwrap_or_default(),
        };
        for daemon in &self.daemons {
            let own = ticks(&format!("/proc/{daemon}/stat")).unwrap_or_default();
            sample.backend.add(own);
        }
        let threads = threads(self.qemu);
        let io: Vec<&str> = self.io_thread.map_or(Vec::new(), |name| {
            let own = threads.iter().filter(|(_, comm)| comm.starts_with(name));
            own.map(|(id, _)| id.as_str()).collect()
        });
        for (id, comm) in &threads {
            let own = || ticks(&format!("/proc/{}/task/{id}/stat", self.qemu)).unwrap_or_default();
            if comm.starts_with("CPU ") {
                sample.vcpus.add(own());
            } else if io.contains(&id.as_str()) || is_worker_of(comm, &io) {
                sample.backend.add(own());
            }
        }
        sample
    }

    /// Moves the vCPUs to a CPU, and QEMU's main loop with them unless it serves the disk; all else stays
    /// where the process started.
    pub(super) fn pin(&self, cpu: &str, main_loop_serves: bool) -> Result<(), String> {
        let main = self.qemu.to_string();
        for (id, comm) in threads(self.qemu) {
            if comm.starts_with("CPU ") || (id == main && !main_loop_serves) {
                let words = ["taskset", "--cpu-list", "--pid", cpu, &id];
                quietly(Path::new("/"), &words, &[])?;
            }
        }
        Ok(())
    }
}

impl Sample {
    pub(super) fn until(&self, end: &Sample, accelerator: Accelerator, io_in_qemu: bool) -> Stages {
        let vcpus = end.vcpus.since(self.vcpus);
        let backend = end.backend.since(self.backend);
        let qemu = end.qemu.since(self.qemu);
        // TCG runs the guest's instructions and the devices' registers in one thread and mode.
        let guest = match accelerator {
            Accelerator::Kvm => vcpus.guest,
            Accelerator::Tcg => vcpus.user,
        };
        let own = if io_in_qemu { backend.sum() } else { 0 };
        let vmm = qemu.sum().saturating_sub(guest + own);
        Stages {
            seconds: end.at.duration_since(self.at).as_secs_f64(),
            guest_us: us(guest),
            vmm_us: us(vmm),
            backend_user_us: us(backend.user),
            backend_kernel_us: us(backend.kernel),
        }
    }
}

impl Stages {
    /// For each of so many requests.
    pub(super) fn per_io(&self, ios: f64) -> Value {
        let each = |us: f64| us / ios.max(1.0);
        json!({
            "guest_us": each(self.guest_us),
            "vmm_us": each(self.vmm_us),
            "backend_user_us": each(self.backend_user_us),
            "backend_kernel_us": each(self.backend_kernel_us),
        })
    }
}

impl Ticks {
    fn add(&mut self, other: Ticks) {
        self.user += other.user;
        self.kernel += other.kernel;
        self.guest += other.guest;
    }

    fn since(self, before: Ticks) -> Ticks {
        Ticks {
            user: self.user.saturating_sub(before.user),
            kernel: self.kernel.saturating_sub(before.kernel),
            guest: self.guest.saturating_sub(before.guest),
        }
    }

    fn sum(self) -> u64 {
        self.user + self.kernel
    }
}

#[allow(clippy::cast_precision_loss, reason = "ticks of one measurement")]
fn us(ticks: u64) -> f64 {
    ticks as f64 * TICK_US
}

/// The kernel's io_uring workers are named after the thread that they work for.
fn is_worker_of(comm: &str, threads: &[&str]) -> bool {
    comm.strip_prefix("iou-wrk-")
        .is_some_and(|id| threads.contains(&id))
}

/// Ids and names of a process's threads.
fn threads(process: u32) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task"));
    let named = |task: std::fs::DirEntry| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let id = task.file_name().to_string_lossy().into_owned();
        Some((id, comm.trim_end().to_owned()))
    };
    tasks
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(named)
        .collect()
}

fn ticks(path: &str) -> Option<Ticks> {
    parse(&std::fs::read_to_string(path).ok()?)
}

/// Fields 14, 15 and 43 of proc_pid_stat(5); the name, field 2, may hold blanks and brackets.
fn parse(stat: &str) -> Option<Ticks> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = behind_name.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse().ok();
    Some(Ticks {
        user: field(14)?,
        kernel: field(15)?,
        guest: field(43)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "7 (CPU 0) (TCG) S 1 1 1 0 -1 4 1 0 0 0 250 31 0 0 20 0 4 0 9 1 1 1 1 1 1 1 1 0 0 0 0 0 0 0 17 0 0 0 0 77 0 0 0 0 0 0 0 0 0";

    fn sample(vcpus: Ticks, backend: Ticks, qemu: Ticks) -> Sample {
        Sample {
            at: Instant::now(),
            vcpus,
            backend,
            qemu,
        }
    }

    fn ticks(user: u64, kernel: u64, guest: u64) -> Ticks {
        Ticks {
            user,
            kernel,
            guest,
        }
    }

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        assert_eq!(parse(STAT), Some(ticks(250, 31, 77)));
        assert_eq!(parse("7 (x) S 1"), None);
    }

    #[test]
    fn stages_add_up_to_what_all_processes_used() {
        let start = sample(Ticks::default(), Ticks::default(), Ticks::default());
        let table = [
            // With KVM the guest's time is known; in TCG it is the thread's user time. A daemon's is beside QEMU's.
            (Accelerator::Kvm, false, (40.0, 60.0, 7.0, 3.0)),
            (Accelerator::Tcg, false, (60.0, 40.0, 7.0, 3.0)),
            (Accelerator::Tcg, true, (60.0, 30.0, 7.0, 3.0)),
        ];
        for (accelerator, io_in_qemu, (guest, vmm, user, kernel)) in table {
            let end = sample(ticks(60, 20, 40), ticks(7, 3, 0), ticks(70, 30, 40));
            let stages = start.until(&end, accelerator, io_in_qemu);
            assert_eq!(
                (
                    stages.guest_us,
                    stages.vmm_us,
                    stages.backend_user_us,
                    stages.backend_kernel_us
                ),
                (
                    guest * TICK_US,
                    vmm * TICK_US,
                    user * TICK_US,
                    kernel * TICK_US
                )
            );
        }
    }

    #[test]
    fn kernel_workers_count_with_the_thread_they_work_for() {
        assert!(is_worker_of("iou-wrk-12", &["11", "12"]));
        assert!(!is_worker_of("iou-wrk-123", &["12"]));
        assert!(!is_worker_of("worker", &["12"]));
    }
}
