//! A worker on a thread of its own.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use cleave_engine::{EngineError, Uring};
use cleave_guest::Memory;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::command::Commands;
use crate::stats::Stats;
use crate::worker::{BELLS, Lap, WATCHES, Worker, signal};
use crate::{Control, Device};

/// Fewest ops in flight: room for a few whole requests, or nothing would ever be taken.
const OPS_MIN: u16 = 32;

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// No thread, eventfd or memory for one.
    #[error("cannot start a worker thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// A running worker. Dropping it drains what is in flight, then ends the thread.
#[derive(Debug)]
pub struct Handle {
    control: Control,
    stats: Arc<Stats>,
    device: Arc<Device>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// Starts a worker thread and makes its engine there. `alarm` (an eventfd) is written when the
    /// worker cannot go on: guest memory was lost, or the worker itself failed.
    pub fn spawn(
        name: String,
        cpu: Option<usize>,
        device: Arc<Device>,
        memory: Arc<Memory>,
        alarm: Arc<OwnedFd>,
    ) -> Result<Handle, SpawnError> {
        let (control, inbox) = Control::channel()?;
        let (made, outcome) = sync_channel(1);
        let stats = Arc::new(Stats::default());
        let (shared, kept) = (stats.clone(), device.clone());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            pin(cpu);
            let worker = make(device, memory, shared, inbox, alarm.clone());
            // Whoever spawns waits for this one answer.
            match worker {
                Ok(worker) => {
                    let _ = made.send(Ok(()));
                    turn(worker, &alarm);
                }
                Err(error) => {
                    let _ = made.send(Err(error));
                }
            }
        })?;
        let gone = || SpawnError::Thread(std::io::Error::other("the worker ended at once"));
        outcome.recv().map_err(|_| gone())??;
        Ok(Handle {
            control,
            stats,
            device: kept,
            thread: Some(thread),
        })
    }

    /// The worker's counters.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }
}

impl Deref for Handle {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.control.exit();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.device.served.add(self.stats.totals());
    }
}

/// Pins this thread. A CPU that is not there is the operator's mistake, told at start; here it is
/// only a lost preference.
fn pin(cpu: Option<usize>) {
    let Some(cpu) = cpu else { return };
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!("cannot pin a worker to CPU {cpu}: {error}");
    }
}

fn make(
    device: Arc<Device>,
    memory: Arc<Memory>,
    stats: Arc<Stats>,
    commands: Commands,
    alarm: Arc<OwnedFd>,
) -> Result<Worker<Uring>, SpawnError> {
    let engine = Uring::new(
        device.disk.clone(),
        memory.clone(),
        device.config.ops.max(OPS_MIN),
        WATCHES,
        BELLS,
    )?;
    Ok(Worker::new(engine, device, memory, stats, commands, alarm)?)
}

/// Turns until the end. A failure of our own (a broken ring, a panic) ends this device's session
/// and no other: the alarm tells the session, and dropping the worker drains its engine.
fn turn(mut worker: Worker<Uring>, alarm: &OwnedFd) {
    let ended = catch_unwind(AssertUnwindSafe(|| {
        loop {
            match worker.lap() {
                Ok(Lap::Again) => {}
                Ok(Lap::Ended) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }));
    match ended {
        Ok(Ok(())) => return,
        Ok(Err(error)) => tracing::error!("a worker's ring failed: {error}"),
        Err(_) => tracing::error!("a worker panicked; its session ends"),
    }
    signal(alarm);
}
