//! Jobs side by side, on a bounded number of threads.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;

/// Runs `work` on every job, `width` at a time, in the order given. `done` gets each result on the calling
/// thread, in the order in which they end.
pub(crate) fn run<J: Sync, R: Send>(
    jobs: &[J],
    width: usize,
    work: impl Fn(&J) -> R + Sync,
    mut done: impl FnMut(&J, R),
) {
    let next = Mutex::new(jobs.iter());
    let (to, results) = channel();
    thread::scope(|scope| {
        for _ in 0..width.clamp(1, jobs.len().max(1)) {
            let (to, next, work) = (to.clone(), &next, &work);
            scope.spawn(move || {
                // A poisoned lock: another job panicked, which the scope reports when all have ended.
                while let Some(job) = next.lock().ok().and_then(|mut jobs| jobs.next()) {
                    // The receiver lives as long as the scope.
                    let _ = to.send((job, work(job)));
                }
            });
        }
        drop(to);
        for (job, result) in results {
            done(job, result);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_job_runs_once_and_never_more_than_the_width_at_a_time() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let jobs: Vec<u32> = (0..50).collect();
        let work = |job: &u32| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            thread::yield_now();
            now.fetch_sub(1, Ordering::SeqCst);
            job * 2
        };
        let mut ended = Vec::new();
        run(&jobs, 3, work, |job, double| ended.push((*job, double)));
        ended.sort_unstable();
        assert!(ended.into_iter().eq(jobs.iter().map(|job| (*job, job * 2))));
        assert!((1..=3).contains(&most.into_inner()));
    }
}
