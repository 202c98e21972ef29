//! The steps of the demonstration, and running one.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cleave_client::{Client, OffsetOrder, Sample, Stop, Verify, Workload, WorkloadTotals};
use cleave_host::Failure;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

/// Seed of the pattern that fills the disk.
const SEED: u64 = 0x00c1_ea5e_0001;

const MIB: u32 = 1 << 20;
/// Large requests: several, so that the disk is kept busy.
const LARGE_DEPTH: u16 = 8;

/// Guest memory for data: the deepest step of large requests, and room to spare.
pub(super) const DATA_BYTES: u64 = 16 << 20;

/// Longest latency told apart.
const LATENCY_MAX_NS: u64 = 100_000_000_000;

/// One thing that is done to the disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct DemoStep {
    /// Its name in the output.
    pub(super) name: &'static str,
    pub(super) read: bool,
    pub(super) block_bytes: u32,
    pub(super) depth: u16,
    pub(super) order: OffsetOrder,
    pub(super) verify: bool,
    pub(super) stop: Stop,
    pub(super) size_bytes: u64,
}

/// Result of a step.
#[derive(Debug)]
pub(super) struct StepResult {
    pub(super) step: DemoStep,
    pub(super) tally: WorkloadTotals,
    /// Nanoseconds.
    pub(super) latency: Histogram<u64>,
    /// Per request; `None` where the system does not tell.
    pub(super) daemon_cpu_us: Option<f64>,
    pub(super) driver_cpu_us: f64,
}

/// Fill, verify, measure. Everything that is measured was written before: an area never written answers
/// faster than any disk.
pub(super) fn steps(size_bytes: u64, time: Duration) -> Vec<DemoStep> {
    let whole = |name, read| DemoStep {
        name,
        read,
        block_bytes: MIB,
        depth: LARGE_DEPTH,
        order: OffsetOrder::Sequential,
        verify: true,
        stop: Stop::Requests(size_bytes / u64::from(MIB)),
        size_bytes,
    };
    let random = |name, read, depth| DemoStep {
        name,
        read,
        block_bytes: 4096,
        depth,
        order: OffsetOrder::Random,
        // Writes repeat the pattern, so that all can be verified again at the end; reads are not looked
        // at here, which would be measured as the driver's CPU.
        verify: !read,
        stop: Stop::After(time),
        size_bytes,
    };
    vec![
        whole("filled with a pattern", false),
        whole("read back and verified", true),
        random("random reads", true, 1),
        random("random reads", true, 32),
        random("random writes", false, 1),
        random("random writes", false, 32),
        whole("read and verified again", true),
    ]
}

impl DemoStep {
    /// Share done, 0 to 1.
    pub(super) fn share(&self, so_far: &SoFar) -> f64 {
        match self.stop {
            Stop::Requests(all) => so_far.requests as f64 / all.max(1) as f64,
            Stop::After(time) => so_far.elapsed.as_secs_f64() / time.as_secs_f64().max(1e-9),
        }
        .min(1.0)
    }

    fn workload<'a>(&self, abort: &'a AtomicBool) -> Workload<'a> {
        Workload {
            read_percent: if self.read { 100 } else { 0 },
            order: self.order,
            stop: self.stop,
            verify: if self.verify {
                Verify::Pattern(SEED)
            } else {
                Verify::Off
            },
            abort: Some(abort),
            ..Workload::reads(
                self.block_bytes,
                self.depth,
                self.size_bytes,
                Duration::ZERO,
            )
        }
    }
}

/// A step's progress.
#[derive(Debug, Clone, Copy)]
pub(super) struct SoFar {
    pub(super) requests: u64,
    pub(super) elapsed: Duration,
}

/// A step that is being taken.
#[derive(Debug)]
pub(super) struct Running {
    shared: Arc<Shared>,
    start: Instant,
    ending: oneshot::Receiver<Result<(Client, StepResult), String>>,
}

#[derive(Debug, Default)]
struct Shared {
    requests: AtomicU64,
    abort: AtomicBool,
}

impl Running {
    /// Drives the client on a thread of its own, which gives it back.
    pub(super) fn start(step: &DemoStep, client: Client, daemon: u32) -> Result<Running, Failure> {
        let shared = Arc::new(Shared::default());
        let (tell, ending) = oneshot::channel();
        let (step, seen) = (*step, Arc::clone(&shared));
        thread::Builder::new()
            .name("driver".to_owned())
            .spawn(move || {
                // Nobody waits any more only when the demonstration is over.
                let _ = tell.send(drive(&step, client, daemon, &seen));
            })
            .map_err(|error| Failure::run(format!("cannot start a driver: {error}")))?;
        Ok(Running {
            shared,
            start: Instant::now(),
            ending,
        })
    }

    /// How far it is.
    pub(super) fn so_far(&self) -> SoFar {
        SoFar {
            requests: self.shared.requests.load(Ordering::Relaxed),
            elapsed: self.start.elapsed(),
        }
    }

    /// Waits for its end.
    pub(super) async fn ended(&mut self) -> Result<(Client, StepResult), String> {
        match (&mut self.ending).await {
            Ok(ended) => ended,
            Err(_) => Err("the driver failed".to_owned()),
        }
    }

    /// Starts no more requests.
    pub(super) fn abort(&self) {
        self.shared.abort.store(true, Ordering::Relaxed);
    }
}

fn drive(
    step: &DemoStep,
    mut client: Client,
    daemon: u32,
    shared: &Shared,
) -> Result<(Client, StepResult), String> {
    let mut latency =
        Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3).map_err(|error| error.to_string())?;
    let (daemon_before, driver_before) = (DaemonCpu::of(daemon), driver_cpu());
    let [queue, ..] = client.queues() else {
        return Err("the daemon offers no vring".to_owned());
    };
    let tally = queue
        .run(&step.workload(&shared.abort), |sample: Sample| {
            latency.saturating_record(sample.latency_ns.max(1));
            shared.requests.fetch_add(1, Ordering::Relaxed);
        })
        .map_err(|error| error.to_string())?;
    let (daemon_after, driver_after) = (DaemonCpu::of(daemon), driver_cpu());
    if !step.read {
        queue.flush().map_err(|error| format!("flush: {error}"))?;
    }
    if tally.failed > 0 {
        return Err(format!("{} requests failed", tally.failed));
    }
    let requests = tally.requests().max(1) as f64;
    let each_us = |cpu: Duration| cpu.as_secs_f64() * 1e6 / requests;
    let daemon_cpu_us = match (daemon_before, daemon_after) {
        (Some(before), Some(after)) => Some(each_us(after.since(&before))),
        _ => None,
    };
    let row = StepResult {
        step: *step,
        tally,
        latency,
        daemon_cpu_us,
        driver_cpu_us: each_us(driver_after.saturating_sub(driver_before)),
    };
    Ok((client, row))
}

/// User and system time of this process: beside the driver it only draws the progress line.
fn driver_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// CPU time of another process so far, by thread.
#[derive(Debug, Clone, Default)]
struct DaemonCpu(HashMap<String, u64>);

impl DaemonCpu {
    /// Nanoseconds on a CPU, the first field of `/proc/PID/task/TID/schedstat`: `/proc/PID/stat` counts
    /// whole clock ticks, which a short step is not. `None` where the kernel keeps no such count.
    fn of(id: u32) -> Option<DaemonCpu> {
        let mut threads = HashMap::new();
        for thread in std::fs::read_dir(format!("/proc/{id}/task")).ok()? {
            let thread = thread.ok()?;
            // A thread may end while we look.
            if let Ok(text) = std::fs::read_to_string(thread.path().join("schedstat")) {
                let ns = text.split(' ').next()?.parse().ok()?;
                threads.insert(thread.file_name().to_string_lossy().into_owned(), ns);
            }
        }
        (!threads.is_empty()).then_some(DaemonCpu(threads))
    }

    /// CPU time since an earlier reading.
    fn since(&self, before: &DaemonCpu) -> Duration {
        let used = self.0.iter().map(|(thread, ns)| {
            let earlier = before.0.get(thread).copied().unwrap_or(0);
            ns.saturating_sub(earlier)
        });
        Duration::from_nanos(used.sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_counts_threads_that_came_later() {
        let cpu = |threads: &[(&str, u64)]| {
            DaemonCpu(
                threads
                    .iter()
                    .map(|(id, ns)| ((*id).to_owned(), *ns))
                    .collect(),
            )
        };
        let (before, after) = (cpu(&[("1", 100), ("2", 50)]), cpu(&[("1", 130), ("3", 7)]));
        assert_eq!(after.since(&before), Duration::from_nanos(37));
        assert!(DaemonCpu::of(std::process::id()).is_some());
        assert!(DaemonCpu::of(u32::MAX).is_none());
    }

    #[test]
    fn whatever_is_measured_was_written_and_verified_before() {
        let steps = steps(64 << 20, Duration::from_secs(1));
        assert!(!steps[0].read && steps[0].verify && steps[0].stop == Stop::Requests(64));
        assert!(steps[1].read && steps[1].verify && steps[1].stop == Stop::Requests(64));
        assert!(steps.iter().all(|step| step.read || step.verify));
        for step in &steps {
            assert!(u64::from(step.block_bytes) * u64::from(step.depth) <= DATA_BYTES);
        }
    }

    #[test]
    fn progress_is_a_share() {
        let step = steps(64 << 20, Duration::from_secs(2))[0];
        let at = |requests| {
            step.share(&SoFar {
                requests,
                elapsed: Duration::ZERO,
            })
        };
        assert_eq!((at(0), at(32), at(640)), (0.0, 0.5, 1.0));
    }
}
