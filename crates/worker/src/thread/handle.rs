//! Control's handle of a worker, and a worker on a thread of its own.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use cleave_disk::Disk;
use cleave_engine::{AnyStore, EngineError, Reactor, Store, Visitor};
use cleave_guest::Memory;

use super::cpu::pin;
use super::pool::PoolMember;
use crate::control::Commands;
use crate::wake::signal;
use crate::worker::{BELLS, Lap, WATCHES, Worker};
use crate::{Control, Device, SpawnError};

/// A running worker. Dropping the handle drains what is in flight, then ends the worker.
#[derive(Debug)]
pub struct Handle {
    control: Control,
    runs: Runs,
}

/// Where a worker runs.
#[derive(Debug)]
pub(crate) enum Runs {
    /// On a thread of its own. `None`: it was joined.
    Alone(Option<JoinHandle<()>>),
    InPool(PoolMember),
}

impl Handle {
    pub(crate) fn new(control: Control, runs: Runs) -> Handle {
        Handle { control, runs }
    }

    /// Starts worker `number` of its device: in the device's pool if it has one, otherwise on a thread of its own, on
    /// which its reactor and store are made. `alarm` is an eventfd: it is written when the worker cannot continue (guest memory was lost, or the worker failed), and
    /// `ALARM_RETIRED` is added when a vring is retired.
    pub fn spawn(
        number: usize,
        cpu: Option<usize>,
        device: Arc<Device>,
        memory: Arc<Memory>,
        alarm: Arc<OwnedFd>,
    ) -> Result<Handle, SpawnError> {
        if let Some(pool) = device.pool.clone() {
            let (control, member) = pool.start(number, device, memory, alarm)?;
            return Ok(Handle::new(control, Runs::InPool(member)));
        }
        let (control, inbox) = Control::channel()?;
        let (made, outcome) = sync_channel(1);
        let name = format!("cleave-w{number}");
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            pin(cpu);
            let start = Start {
                number,
                device,
                memory,
                commands: inbox,
                alarm,
            };
            // The spawning thread waits for this single answer.
            let made = |answer| {
                let _ = made.send(answer);
            };
            start.run(made);
        })?;
        let gone = || SpawnError::Thread(std::io::Error::other("the worker ended at once"));
        outcome.recv().map_err(|_| gone())??;
        Ok(Handle::new(control, Runs::Alone(Some(thread))))
    }

    /// Returns true if the worker has ended. A worker that failed never releases buffers that the kernel may still write to.
    pub fn has_ended(&self) -> bool {
        match &self.runs {
            Runs::Alone(thread) => thread.as_ref().is_none_or(JoinHandle::is_finished),
            Runs::InPool(member) => member.has_ended(),
        }
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
        match &mut self.runs {
            Runs::Alone(thread) => {
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
            Runs::InPool(member) => member.wait(),
        }
    }
}

/// Makes a reactor with room for all watches and bells of a worker, and for `ops` ops in flight.
pub fn reactor(disk: &Disk, ops: u16) -> Result<Reactor, EngineError> {
    Reactor::new(&[disk], ops, WATCHES, BELLS)
}

/// All that a worker's thread needs at its start.
struct Start {
    number: usize,
    device: Arc<Device>,
    memory: Arc<Memory>,
    commands: Commands,
    alarm: Arc<OwnedFd>,
}

impl Start {
    /// Makes the reactor and the store, reports success or failure through `made`, and runs the loop.
    fn run(self, made: impl FnOnce(Result<(), SpawnError>)) {
        let ops = self.device.room();
        let opened = reactor(&self.device.disk, ops).and_then(|mut reactor| {
            let store = AnyStore::open(&mut reactor, &self.device.disk, self.number, ops)?;
            Ok((reactor, store))
        });
        match opened {
            Ok((reactor, store)) => store.visit(RunWorker {
                start: self,
                reactor,
                made,
            }),
            Err(error) => made(Err(error.into())),
        }
    }
}

/// Starts the loop once there is a store.
struct RunWorker<F> {
    start: Start,
    reactor: Reactor,
    made: F,
}

impl<F: FnOnce(Result<(), SpawnError>)> Visitor for RunWorker<F> {
    type Output = ();

    fn visit<S: Store + 'static>(self, store: S) {
        let Start {
            device,
            memory,
            commands,
            alarm,
            ..
        } = self.start;
        let shared = device.clone();
        match Worker::new(self.reactor, store, device, memory, commands, alarm.clone()) {
            Ok(worker) => {
                shared.worker_start.call();
                (self.made)(Ok(()));
                run_laps(worker, &alarm);
            }
            Err(error) => (self.made)(Err(error.into())),
        }
    }
}

/// Runs laps until the worker ends. A failure of our own (a broken ring, a panic) ends only this device's
/// session: the alarm notifies the session, and dropping the worker drains its store.
fn run_laps<S: Store>(mut worker: Worker<S>, alarm: &OwnedFd) {
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
        Ok(Err(error)) => {
            tracing::error!("a worker's io_uring failed, so its session ends: {error}")
        }
        Err(_) => tracing::error!("a worker panicked; its session ends"),
    }
    signal(alarm);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cleave_blk::Op;
    use cleave_engine::{Done, Wait};
    use cleave_guest::Epoch;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// A store with a mistake.
    struct Mistaken(End);

    /// How it ends.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum End {
        Whole,
        InFlight,
        Panic,
    }

    impl Store for Mistaken {
        fn room(&self) -> usize {
            1
        }
        fn in_flight(&self) -> usize {
            0
        }
        fn push(&mut self, _: &mut Reactor, _: &Epoch, _: Op<'_>, _: u64) {}
        fn reap(&mut self) -> Option<Done> {
            None
        }
        fn is_ready(&self) -> bool {
            false
        }
        fn before_enter(&mut self, _: &mut Reactor, _: Wait) -> Option<Duration> {
            panic!("told to panic")
        }
        fn close(&mut self, _: &mut Reactor) -> bool {
            assert_ne!(self.0, End::Panic, "told to panic");
            self.0 == End::Whole
        }
    }

    #[test]
    fn the_hook_runs_on_the_worker_thread_before_it_is_handed_out() {
        let seen = Arc::new(std::sync::Mutex::new(None));
        let told = seen.clone();
        let hook = move || *told.lock().unwrap() = std::thread::current().name().map(str::to_owned);
        let device = Arc::new(Device::ram().at_worker_start(hook));
        let alarm = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let memory = Memory::new(Vec::new()).unwrap();
        let _handle = Handle::spawn(3, None, device, memory, alarm).unwrap();
        assert_eq!(seen.lock().unwrap().as_deref(), Some("cleave-w3"));
    }

    /// A write that it leaves in flight could overtake those of the next frontend, so there must be none, and a copy of the disk could
    /// have half of it, so the disk is never still.
    #[test]
    fn a_panic_ends_its_worker_and_raises_the_alarm() {
        for end in [End::Whole, End::InFlight, End::Panic] {
            let device = Arc::new(Device::ram());
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let alarm = Arc::new(eventfd(0, flags).unwrap());
            let (_control, commands) = Control::channel().unwrap();
            let reactor = reactor(&device.disk, 64).unwrap();
            let memory = Memory::new(Vec::new()).unwrap();
            let worker = Worker::new(
                reactor,
                Mistaken(end),
                device.clone(),
                memory,
                commands,
                alarm.clone(),
            )
            .unwrap();
            let ended = catch_unwind(AssertUnwindSafe(|| run_laps(worker, &alarm)));
            assert_eq!(ended.is_err(), end == End::Panic);
            assert!(rustix::io::read(&alarm, &mut [0; 8]).is_ok());
            assert_eq!(device.is_lost(), end != End::Whole, "{end:?}");
            device.quiesce();
            assert_eq!(device.is_still(), end == End::Whole, "{end:?}");
        }
    }
}
