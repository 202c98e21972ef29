//! Control's side of a worker.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use cleave_engine::{EngineError, Uring};
use cleave_guest::Memory;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::command::{Command, Commands, Signal};
use crate::stats::Stats;
use crate::worker::{BELLS, Lap, WATCHES, Worker, signal};
use crate::{Device, VringStart};

/// Commands that may wait in the queue: control waits for most answers, so few ever do.
const COMMANDS_MAX: usize = 64;

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

/// The answer to a command, once it is carried out.
#[derive(Debug)]
pub struct Pending<T>(Receiver<T>);

impl<T> Pending<T> {
    /// Waits for it; `None` when the worker is gone.
    pub fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }

    /// Waits for it at most so long; `Err(self)` to wait on, `Ok(None)` when the worker is gone.
    pub fn wait_for(self, time: Duration) -> Result<Option<T>, Pending<T>> {
        match self.0.recv_timeout(time) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(self),
        }
    }
}

/// A running worker. Dropping it drains what is in flight, then ends the thread.
#[derive(Debug)]
pub struct Handle {
    commands: SyncSender<Command>,
    bell: Arc<OwnedFd>,
    stats: Arc<Stats>,
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
        let bell = Arc::new(
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(std::io::Error::from)?,
        );
        let (commands, queue) = sync_channel(COMMANDS_MAX);
        let (made, outcome) = sync_channel(1);
        let stats = Arc::new(Stats::default());
        let inbox = Commands {
            queue,
            bell: bell.clone(),
        };
        let shared = stats.clone();
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
            commands,
            bell,
            stats,
            thread: Some(thread),
        })
    }

    /// The worker's counters.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }

    /// Hands a vring over; answered when it is served.
    pub fn start(&self, start: VringStart) -> Pending<()> {
        self.ask(|done| Command::Start(Box::new(start), done))
    }

    /// Drains a vring and takes it back; answers its position when nothing of it is in flight
    /// (`None`: no such vring).
    pub fn stop(&self, index: u16) -> Pending<Option<u16>> {
        self.ask(|done| Command::Stop(index, done))
    }

    /// Serves or keeps a vring; answered when the worker has seen it. An enabled ring is looked at
    /// without a kick, since the kick may have come before.
    pub fn enable(&self, index: u16, enabled: bool) -> Pending<()> {
        self.ask(|done| Command::Enable(index, enabled, done))
    }

    /// Changes the kick of a running vring.
    pub fn set_kick(&self, index: u16, kick: Option<OwnedFd>) -> Pending<()> {
        self.ask(|done| Command::Signal(index, Signal::Kick(kick), done))
    }

    /// Changes the call of a running vring, and writes it once.
    pub fn set_call(&self, index: u16, call: Option<OwnedFd>) -> Pending<()> {
        self.ask(|done| Command::Signal(index, Signal::Call(call), done))
    }

    /// Changes the err descriptor of a running vring.
    pub fn set_err(&self, index: u16, err: Option<OwnedFd>) -> Pending<()> {
        self.ask(|done| Command::Signal(index, Signal::Err(err), done))
    }

    /// A new memory table: live at once, answered when no op refers to the old one. A vring that the
    /// new table does not cover is retired.
    pub fn bind(&self, memory: Arc<Memory>) -> Pending<()> {
        self.ask(|done| Command::Bind(memory, done))
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Pending<T> {
        let (done, answer) = sync_channel(1);
        // A worker that is gone drops the command and with it `done`: the answer is `None`.
        let _ = self.commands.send(command(done));
        signal(&self.bell);
        Pending(answer)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Exit);
        signal(&self.bell);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
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
        device.config.ops,
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
