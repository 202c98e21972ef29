//! CPU time of one guest by stage, from the kernel's own accounting of threads.

use std::path::Path;

use cleave_rig::daemon::{threads, ticks};
use cleave_rig::guest::Accelerator;
use cleave_rig::{Result, quietly};
use serde_json::{Value, json};

/// /proc counts in ticks of 10 ms on every Linux (`USER_HZ`).
const TICK_US: f64 = 10_000.0;

/// Ticks, as they stood at one moment: in user mode, which with KVM includes the guest's own code; in the kernel; and the
/// guest's part of the first, which only KVM tells.
type CpuTicks = [u64; 3];

/// All that is counted for one guest at one moment.
#[derive(Clone, Copy, Default)]
pub(super) struct CpuSample {
    vcpus: CpuTicks,
    /// QEMU's I/O thread, or the daemons: the threads that serve the disk.
    backend: CpuTicks,
    /// All of QEMU.
    qemu: CpuTicks,
}

/// The processes and threads to read.
pub(super) struct WatchedThreads {
    pub(super) qemu: u32,
    pub(super) daemons: Vec<u32>,
    /// How the names of QEMU's own I/O threads begin, where it has them.
    pub(super) io_thread: Option<&'static str>,
}

impl WatchedThreads {
    /// Reads the clocks; a thread that ended meanwhile counts with its process only.
    pub(super) fn sample(&self) -> CpuSample {
        let process = |id: &u32| ticks_in(&format!("/proc/{id}/stat"));
        let mut sample = CpuSample {
            vcpus: CpuTicks::default(),
            backend: self
                .daemons
                .iter()
                .map(process)
                .fold(CpuTicks::default(), add),
            qemu: process(&self.qemu),
        };
        let threads = threads(self.qemu);
        let is_io = |comm: &str| self.io_thread.is_some_and(|name| comm.starts_with(name));
        let io = threads.iter().filter(|(_, comm)| is_io(comm));
        let io: Vec<&str> = io.map(|(id, _)| id.as_str()).collect();
        for (id, comm) in &threads {
            let own = || ticks_in(&format!("/proc/{}/task/{id}/stat", self.qemu));
            if comm.starts_with("CPU ") {
                sample.vcpus = add(sample.vcpus, own());
            } else if is_io(comm) || is_worker_of(comm, &io) {
                sample.backend = add(sample.backend, own());
            }
        }
        sample
    }

    /// Moves the vCPUs to a CPU, and QEMU's main loop with them unless it serves the disk; all else stays
    /// where the process started.
    pub(super) fn pin(&self, cpu: &str, main_loop_serves: bool) -> Result {
        let main = self.qemu.to_string();
        for (id, comm) in threads(self.qemu) {
            if comm.starts_with("CPU ") || (id == main && !main_loop_serves) {
                quietly(
                    Path::new("/"),
                    &format!("taskset --cpu-list --pid {cpu} {id}"),
                    &[],
                )?;
            }
        }
        Ok(())
    }
}

impl CpuSample {
    /// Microseconds of CPU in each stage until another sample, for each of so many requests.
    pub(super) fn until(
        &self,
        end: &CpuSample,
        accelerator: Accelerator,
        io_in_qemu: bool,
        ios: f64,
    ) -> Value {
        let vcpus = since(end.vcpus, self.vcpus);
        let backend = since(end.backend, self.backend);
        let qemu = since(end.qemu, self.qemu);
        // TCG runs the guest's instructions and the devices' registers in one thread and mode.
        let guest = match accelerator {
            Accelerator::Kvm => vcpus[2],
            Accelerator::Tcg => vcpus[0],
        };
        let own = if io_in_qemu {
            backend[0] + backend[1]
        } else {
            0
        };
        let vmm = (qemu[0] + qemu[1]).saturating_sub(guest + own);
        let each = |ticks: u64| ticks as f64 * TICK_US / ios;
        json!({
            "guest_us": each(guest),
            "vmm_us": each(vmm),
            "backend_user_us": each(backend[0]),
            "backend_kernel_us": each(backend[1]),
        })
    }
}

fn add(one: CpuTicks, other: CpuTicks) -> CpuTicks {
    [0, 1, 2].map(|at| one[at] + other[at])
}

fn since(now: CpuTicks, before: CpuTicks) -> CpuTicks {
    [0, 1, 2].map(|at| now[at].saturating_sub(before[at]))
}

/// Returns true if a thread is an io_uring worker of these. The kernel's io_uring workers are named after the thread that they
/// work for.
fn is_worker_of(comm: &str, threads: &[&str]) -> bool {
    let of = comm.strip_prefix("iou-wrk-");
    of.is_some_and(|id| threads.contains(&id))
}

/// User, kernel and guest time of a process or thread; none where it has ended.
fn ticks_in(path: &str) -> CpuTicks {
    let stat = std::fs::read_to_string(path).unwrap_or_default();
    let found = ticks(&stat, &[14, 15, 43]).and_then(|found| found.try_into().ok());
    found.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_time_of_all_processes() {
        let start = CpuSample::default();
        let (vcpus, backend, qemu) = ([60, 20, 40], [7, 3, 0], [70, 30, 40]);
        let end = CpuSample {
            vcpus,
            backend,
            qemu,
        };
        let table = [
            // With KVM the guest's time is known; in TCG it is the thread's user time. A daemon's is beside QEMU's.
            (Accelerator::Kvm, false, [40.0, 60.0, 7.0, 3.0]),
            (Accelerator::Tcg, false, [60.0, 40.0, 7.0, 3.0]),
            (Accelerator::Tcg, true, [60.0, 30.0, 7.0, 3.0]),
        ];
        let names = ["guest_us", "vmm_us", "backend_user_us", "backend_kernel_us"];
        for (accelerator, io_in_qemu, wanted) in table {
            let stages = start.until(&end, accelerator, io_in_qemu, 2.0);
            let found = names.map(|name| stages[name].as_f64().unwrap() * 2.0 / TICK_US);
            assert_eq!(found, wanted);
        }
    }

    #[test]
    fn kernel_workers_count_with_the_thread_they_work_for() {
        assert!(is_worker_of("iou-wrk-12", &["11", "12"]));
        assert!(!is_worker_of("iou-wrk-123", &["12"]));
        assert!(!is_worker_of("worker", &["12"]));
    }
}
