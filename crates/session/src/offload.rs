//! Threads for what may block for ever: closing, asking and writing descriptors that a frontend sent.
//!
//! Such a descriptor can be anything, and some things block whoever closes them: a TCP socket that
//! lingers until unread data is gone, a pipe that somebody else holds locked, a file whose server does
//! not answer. No thread that serves anybody does that, unless it knows that the kind is harmless. A
//! unix socket holds whatever is queued in it, so it is never harmless.
//!
//! At most `THREADS_MAX` threads are lost at a time. While all of them are blocked, further jobs wait;
//! with `WAITING_MAX` of those, [`is_full`] holds: no frontend is accepted and no descriptor is taken
//! from a frontend until a thread comes back.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
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

/// Drops something that is, or holds, a descriptor of a frontend.
pub fn close<T: Send + 'static>(held: T) {
    run(move || drop(held));
}

/// Ends a connection with a frontend. That learns of it at once, even where no thread is left to close it.
pub fn hang_up<T: AsFd + Send + 'static>(stream: T) {
    // Fails where the frontend has left already.
    let _ = shutdown(&stream, Shutdown::Both);
    close(stream);
}

/// Nothing more that may have to be closed should be taken now.
pub fn is_full() -> bool {
    lock().is_full()
}

/// Waits at most so long until it is not full: a crowd of jobs that do not block passes. Whether it is.
pub(crate) fn stays_full(time: Duration) -> bool {
    let waited = TAKEN.wait_timeout_while(lock(), time, |pool| pool.is_full());
    waited.unwrap_or_else(PoisonError::into_inner).0.is_full()
}

/// Runs a job, as soon as there is a thread for it.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) {
    let mut pool = lock();
    pool.waiting.push_back(Box::new(job));
    // Where no thread can be made, the job waits for the next attempt; it must not be dropped here.
    let _ = spawn(&mut pool);
}

/// Runs a job that lasts on a thread of its own, or not at all.
pub(crate) fn start(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut pool = lock();
    pool.waiting.push_front(Box::new(job));
    let started = spawn(&mut pool);
    // The lock was held, so the job is still the first; it is dropped after that is released.
    let refused = started.is_err().then(|| pool.waiting.pop_front());
    drop(pool);
    drop(refused);
    started
}

fn spawn(pool: &mut Pool) -> io::Result<()> {
    if pool.threads >= THREADS_MAX {
        return Err(io::Error::other(
            "all threads wait for descriptors of frontends",
        ));
    }
    let builder = thread::Builder::new().name("offload".to_owned());
    builder.spawn(work)?;
    pool.threads += 1;
    Ok(())
}

fn work() {
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
