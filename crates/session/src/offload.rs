//! Threads for operations that may block for ever: closing, querying and writing descriptors that a frontend
//! sent.
//!
//! Such a descriptor can be anything, and closing some kinds blocks: a TCP socket that lingers until unread
//! data is gone, a pipe that another process holds locked, a file whose server does not answer. A serving
//! thread closes only descriptors that are known to be harmless. A unix socket can hold any of these in its
//! queue, so it is never harmless.
//!
//! At most `THREADS_MAX` threads can be blocked at a time. While all of them are, further jobs wait. With
//! `WAITING_MAX` waiting jobs [`is_full`] is true: no frontend, and no descriptor of a frontend, is accepted
//! until a thread is free.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{io, thread};

use rustix::net::{Shutdown, shutdown};

const THREADS_MAX: usize = 32;
const WAITING_MAX: usize = 64;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Pool {
    threads: usize,
    waiting: VecDeque<Job>,
}

impl Pool {
    fn is_full(&self) -> bool {
        self.waiting.len() >= WAITING_MAX
    }
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    threads: 0,
    waiting: VecDeque::new(),
});

/// Notified when a job leaves the queue.
static TAKEN: Condvar = Condvar::new();

/// Called by each thread when it starts.
static AT_START: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Sets what each of these threads calls when it starts, for example to confine itself. Only the first call counts.
pub fn at_start(hook: impl Fn() + Send + Sync + 'static) {
    let _ = AT_START.set(Box::new(hook));
}

/// Drops a value that is, or holds, a descriptor of a frontend.
pub fn close<T: Send + 'static>(held: T) {
    run(move || drop(held));
}

/// Ends a connection with a frontend. The frontend notices at once, even if all threads are blocked.
pub fn hang_up<T: AsFd + Send + 'static>(stream: T) {
    // Fails if the frontend has left already.
    let _ = shutdown(&stream, Shutdown::Both);
    close(stream);
}

/// Whether nothing may be accepted now that may have to be closed here.
pub fn is_full() -> bool {
    lock().is_full()
}

/// Waits for at most `time` until it is no longer full, since jobs that do not block finish soon. Returns
/// whether it is still full.
pub(crate) fn stays_full(time: Duration) -> bool {
    let waited = TAKEN.wait_timeout_while(lock(), time, |pool| pool.is_full());
    waited.unwrap_or_else(PoisonError::into_inner).0.is_full()
}

/// Runs a job as soon as a thread is free.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) {
    let mut pool = lock();
    pool.waiting.push_back(Box::new(job));
    // If no thread can be made, the job waits for the next attempt. It must not be dropped here.
    let _ = spawn(&mut pool);
}

/// Runs a long job on its own thread, or fails.
pub(crate) fn start(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut pool = lock();
    pool.waiting.push_front(Box::new(job));
    let started = spawn(&mut pool);
    // The lock was held, so the job is still the first one. It is dropped after the lock is released.
    let refused = started.is_err().then(|| pool.waiting.pop_front());
    drop(pool);
    drop(refused);
    started
}

fn spawn(pool: &mut Pool) -> io::Result<()> {
    if pool.threads >= THREADS_MAX {
        return Err(io::Error::other(
            "all threads are blocked by descriptors of frontends",
        ));
    }
    let builder = thread::Builder::new().name("offload".to_owned());
    builder.spawn(work)?;
    pool.threads += 1;
    Ok(())
}

fn work() {
    if let Some(hook) = AT_START.get() {
        hook();
    }
    loop {
        let mut pool = lock();
        let Some(job) = pool.waiting.pop_front() else {
            pool.threads -= 1;
            return;
        };
        drop(pool);
        TAKEN.notify_all();
        job();
    }
}

fn lock() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}
