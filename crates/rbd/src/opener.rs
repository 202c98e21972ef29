//! The thread that opens images, in a process whose other threads are confined.
//!
//! librbd starts threads when an image is opened, and they inherit the confinement of the thread that opens it. A thread that opens disks
//! may do less than librbd's need, so it passes the image on to this one.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use crate::RbdError;
use crate::calls::calls;

type Job = Box<dyn FnOnce() + Send>;

static OPENER: OnceLock<SyncSender<Job>> = OnceLock::new();

/// Loads librbd, and starts the thread on which all images are opened from now on. `confine` is called on it first. To be called
/// once, before the process is confined.
pub fn start_opener(confine: impl FnOnce() + Send + 'static) -> Result<(), RbdError> {
    calls()?;
    let (jobs, ordered) = sync_channel::<Job>(0);
    thread().spawn(move || {
        confine();
        for job in ordered {
            // Each on its own: a cluster that does not answer holds up no image of another one. If it cannot be started, the job
            // is dropped, which its caller notices.
            let _ = thread().spawn(job);
        }
    })?;
    let _ = OPENER.set(jobs);
    Ok(())
}

fn thread() -> thread::Builder {
    thread::Builder::new().name("cleave-rbd".to_owned())
}

/// Runs `open` on a thread of the opener, or here if there is none.
pub(crate) fn run<T: Send + 'static>(
    open: impl FnOnce() -> Result<T, RbdError> + Send + 'static,
) -> Result<T, RbdError> {
    let Some(jobs) = OPENER.get() else {
        return open();
    };
    let (to, opened) = sync_channel(1);
    let job: Job = Box::new(move || {
        let _ = to.send(open());
    });
    let answer = jobs.send(job).ok().and_then(|()| opened.recv().ok());
    let lost = || io::Error::other("there is no thread that could open it");
    answer.unwrap_or_else(|| Err(lost().into()))
}
