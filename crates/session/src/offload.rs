//! Threads for operations that may never return: closing, querying and writing descriptors that a frontend
//! sent.
//!
//! Such a descriptor can be anything, and closing some kinds blocks: a TCP socket that lingers until unread
//! data is gone, a pipe that another process holds locked, a file whose server does not answer. A serving
//! thread closes only descriptors that are known to be harmless. A unix socket can hold any of these in its
//! queue, so it is never harmless.
//!
//! Each disk has such threads of its own, because its frontend can block all of them. At most `THREADS_MAX` of them can be
//! blocked at a time. While all of them are, further jobs wait. With `WAITING_MAX` waiting jobs the disk [is full](Offload::is_full):
//! no frontend of it, and no descriptor of a frontend, is accepted until a thread is free.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{fmt, io, thread};

use rustix::net::{Shutdown, shutdown};

const THREADS_MAX: usize = 8;
const WAITING_MAX: usize = 64;
/// Maximum wait for jobs that do not block: they may only have had no CPU yet. Longer in tests, whose machine may be late.
const FREE_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Jobs {
    threads: usize,
    waiting: VecDeque<Job>,
}

impl Jobs {
    fn is_full(&self) -> bool {
        self.waiting.len() >= WAITING_MAX
    }
}

#[derive(Default)]
struct JobQueue {
    jobs: Mutex<Jobs>,
    /// Notified when a job leaves the queue, and when a thread ends.
    freed: Condvar,
}

/// Called by each thread when it starts.
static AT_START: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Sets what each of these threads calls when it starts, for example to confine itself. Only the first call counts.
pub fn at_start(hook: impl Fn() + Send + Sync + 'static) {
    let _ = AT_START.set(Box::new(hook));
}

/// The threads of one disk. They are made on demand, and end when nothing waits.
#[derive(Clone, Default)]
pub struct Offload(Arc<JobQueue>);

impl fmt::Debug for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offload").finish_non_exhaustive()
    }
}

impl Offload {
    /// Drops a value that is, or holds, a descriptor of a frontend.
    pub fn close<T: Send + 'static>(&self, held: T) {
        self.run(move || drop(held));
    }

    /// Ends a connection with a frontend. The frontend notices at once, even if all threads are blocked.
    pub fn hang_up<T: AsFd + Send + 'static>(&self, stream: T) {
        // Fails if the frontend has left already.
        let _ = shutdown(&stream, Shutdown::Both);
        self.close(stream);
    }

    /// Returns true if nothing may be accepted now that may have to be closed here.
    pub fn is_full(&self) -> bool {
        self.lock().is_full()
    }

    /// Returns the number of jobs that have not ended.
    pub fn jobs(&self) -> usize {
        let jobs = self.lock();
        jobs.threads + jobs.waiting.len()
    }

    /// Waits until it is no longer full, since jobs that do not block finish soon. Returns true if it is still full.
    pub(crate) fn stays_full(&self) -> bool {
        self.wait_while(Jobs::is_full).is_full()
    }

    /// Runs a job as soon as a thread is free.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut jobs = self.lock();
        jobs.waiting.push_back(Box::new(job));
        // If no thread can be made, the job waits for the next attempt. It must not be dropped here.
        let _ = self.spawn(&mut jobs);
    }

    /// Runs a long job on its own thread, or fails if none becomes free.
    pub(crate) fn start(&self, job: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut jobs = self.wait_while(|jobs| jobs.threads >= THREADS_MAX);
        jobs.waiting.push_front(Box::new(job));
        let started = self.spawn(&mut jobs);
        // The lock was held, so the job is still the first one. It is dropped after the lock is released.
        let refused = started.is_err().then(|| jobs.waiting.pop_front());
        drop(jobs);
        drop(refused);
        started
    }

    fn spawn(&self, jobs: &mut Jobs) -> io::Result<()> {
        if jobs.threads >= THREADS_MAX {
            return Err(io::Error::other(
                "all threads of this disk are blocked by descriptors of frontends",
            ));
        }
        let builder = thread::Builder::new().name("offload".to_owned());
        let offload = self.clone();
        builder.spawn(move || offload.work())?;
        jobs.threads += 1;
        Ok(())
    }

    fn work(&self) {
        if let Some(hook) = AT_START.get() {
            hook();
        }
        loop {
            let mut jobs = self.lock();
            let Some(job) = jobs.waiting.pop_front() else {
                jobs.threads -= 1;
                drop(jobs);
                return self.0.freed.notify_all();
            };
            drop(jobs);
            self.0.freed.notify_all();
            job();
        }
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs() == 0
    }

    fn wait_while(&self, is_so: impl Fn(&Jobs) -> bool) -> MutexGuard<'_, Jobs> {
        let freed = &self.0.freed;
        let waited = freed.wait_timeout_while(self.lock(), FREE_WITHIN, |jobs| is_so(jobs));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Values that are, or hold, descriptors of frontends. Those that are not taken out are dropped by a thread of an [`Offload`].
///
/// A function that may return early keeps them in this, because a plain value would be closed on the thread that runs the function.
pub struct Offloaded<T: Send + 'static> {
    held: Vec<T>,
    offload: Offload,
}

impl<T: Send + 'static> Offloaded<T> {
    /// Has these threads drop what is not taken out.
    pub fn new(held: Vec<T>, offload: &Offload) -> Offloaded<T> {
        let offload = offload.clone();
        Offloaded { held, offload }
    }

    /// Takes all of them out.
    pub fn into_vec(mut self) -> Vec<T> {
        std::mem::take(&mut self.held)
    }
}

impl<T: Send + 'static> Default for Offloaded<T> {
    fn default() -> Offloaded<T> {
        Vec::new().into()
    }
}

/// With a thread of its own.
impl<T: Send + 'static> From<Vec<T>> for Offloaded<T> {
    fn from(held: Vec<T>) -> Offloaded<T> {
        Offloaded::new(held, &Offload::default())
    }
}

impl<T: Send + 'static> Deref for Offloaded<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.held
    }
}

impl<T: Send + 'static> DerefMut for Offloaded<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.held
    }
}

impl<T: fmt::Debug + Send + 'static> fmt::Debug for Offloaded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.held.fmt(f)
    }
}

impl<T: Send + 'static> Drop for Offloaded<T> {
    fn drop(&mut self) {
        if !self.held.is_empty() {
            self.offload.close(std::mem::take(&mut self.held));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A frontend that sends several pipes on a busy host: the threads that close the first of them have not run yet.
    #[test]
    fn a_long_job_waits_for_threads_that_are_not_blocked() {
        let offload = Offload::default();
        let (release, released) = channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for _ in 0..THREADS_MAX {
            let released = released.clone();
            offload.run(move || {
                let _ = released.lock().map(|released| released.recv());
            });
        }
        let (done, is_done) = channel();
        let late = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(release);
        });
        offload.start(move || done.send(()).unwrap()).unwrap();
        is_done.recv().unwrap();
        late.join().unwrap();
    }

    /// Tells where it was dropped.
    struct Dropped(Sender<thread::ThreadId>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.send(thread::current().id()).unwrap();
        }
    }

    #[test]
    fn what_is_not_taken_out_is_dropped_by_another_thread() {
        let (sender, receiver) = channel();
        let us = thread::current().id();
        let mut all = Offloaded::from(vec![Dropped(sender.clone()), Dropped(sender.clone())]);
        drop(all.pop());
        assert_eq!(receiver.recv().unwrap(), us);
        drop(all);
        assert_ne!(receiver.recv().unwrap(), us);
        drop(Offloaded::from(vec![Dropped(sender)]).into_vec());
        assert_eq!(receiver.recv().unwrap(), us);
        assert!(receiver.recv().is_err(), "one was dropped twice");
    }
}
