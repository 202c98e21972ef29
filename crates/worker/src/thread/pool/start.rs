//! Starts a worker on a thread of a pool, and gives it its turns there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::time::{Duration, Instant};

use cleave_disk::Backing;
use cleave_engine::{AnyStore, ClosedRing, Prepared, Reactor, Rest, Store, Visitor, Wait};
use cleave_guest::Memory;

use super::seat::{Seat, Seated, Turn};
use super::thread::Admission;
use super::{Place, Pool};
use crate::control::Commands;
use crate::counter::add;
use crate::thread::contention::CoreContention;
use crate::wake::signal;
use crate::worker::waiting::Waiting;
use crate::worker::{BELLS, Lap, WATCHES, Worker};
use crate::{Control, Device, SpawnError};

/// Pause between two checks of a polled disk whose worker has failed.
const WIND_DOWN_PAUSE: Duration = Duration::from_millis(1);

impl Pool {
    /// Starts worker `number` of a disk on one of the threads. The rest is as for [`Handle::spawn`](crate::Handle::spawn).
    pub(crate) fn start(
        self: &Arc<Self>,
        number: usize,
        device: Arc<Device>,
        memory: Arc<Memory>,
        alarm: Arc<OwnedFd>,
    ) -> Result<(Control, PoolMember), SpawnError> {
        if matches!(device.disk.backing(), Backing::Model { .. }) {
            let why = "a modelled disk waits by itself, so no pool serves it";
            return Err(io::Error::other(why).into());
        }
        self.place(device, memory, alarm, move |newcomer, reactor| {
            newcomer.open(number, reactor)
        })
    }

    /// Makes the rings of a worker here, because that takes time, and has `seat` make the worker on its thread.
    pub(super) fn place(
        self: &Arc<Self>,
        device: Arc<Device>,
        memory: Arc<Memory>,
        alarm: Arc<OwnedFd>,
        seat: impl FnOnce(Newcomer, Reactor) -> Result<Seat, SpawnError> + Send + 'static,
    ) -> Result<(Control, PoolMember), SpawnError> {
        let (control, commands) = Control::channel_of(true)?;
        let slots = [device.room(), WATCHES, BELLS];
        let prepared = Prepared::new(&[&device.disk], slots, &self.neighbours)?;
        let place = Place::take(self.clone(), Arc::as_ptr(&device).addr());
        let held = device.clone();
        let (made, outcome) = sync_channel(1);
        let (leaves, gone) = channel();
        let has_ended = Arc::new(AtomicBool::new(false));
        let shared = has_ended.clone();
        let admission: Admission = Box::new(move |contention| {
            let reactor = prepared.enable(&leaves).map_err(SpawnError::from);
            let newcomer = Newcomer {
                device,
                memory,
                commands,
                alarm,
                contention: contention.clone(),
                has_ended: shared,
                leaves,
            };
            let (seat, answer) = match reactor.and_then(|reactor| seat(newcomer, reactor)) {
                Ok(seat) => (Some(seat), Ok(())),
                Err(error) => (None, Err(error)),
            };
            // The caller waits for this single answer.
            let _ = made.send(answer);
            seat
        });
        let ended = || SpawnError::Thread(io::Error::other("the pool's thread has ended"));
        let remote = self.threads.get(place.thread).ok_or_else(ended)?;
        remote.admissions.send(admission).map_err(|_| ended())?;
        signal(&remote.bell);
        outcome.recv().map_err(|_| ended())??;
        let member = PoolMember {
            has_ended,
            gone,
            _device: held,
            _place: place,
        };
        Ok((control, member))
    }
}

/// Control's side of a worker in a pool.
#[derive(Debug)]
pub(crate) struct PoolMember {
    has_ended: Arc<AtomicBool>,
    /// Receives the rings of the worker, and is disconnected when the worker is gone.
    gone: Receiver<ClosedRing>,
    /// Keeps the pool's thread from dropping the last reference.
    _device: Arc<Device>,
    _place: Place,
}

impl PoolMember {
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Waits until the worker is gone, and closes its rings.
    pub(crate) fn wait(&self) {
        self.gone.iter().for_each(drop);
    }
}

/// All that a worker needs at its start, on its thread.
pub(super) struct Newcomer {
    device: Arc<Device>,
    memory: Arc<Memory>,
    commands: Commands,
    alarm: Arc<OwnedFd>,
    contention: Arc<CoreContention>,
    has_ended: Arc<AtomicBool>,
    leaves: Sender<ClosedRing>,
}

impl Newcomer {
    /// Opens the store of worker `number` and makes the worker.
    fn open(self, number: usize, mut reactor: Reactor) -> Result<Seat, SpawnError> {
        let ops = self.device.room();
        let store = AnyStore::open(&mut reactor, &self.device.disk, number, ops)?;
        let newcomer = self;
        store.visit(MakeSeat { newcomer, reactor })
    }

    /// Makes the worker over a store.
    pub(super) fn seat<S: Store + 'static>(
        self,
        reactor: Reactor,
        store: S,
    ) -> Result<Seat, SpawnError> {
        let alarm = self.alarm.clone();
        let worker = Worker::with(
            reactor,
            store,
            self.device,
            self.memory,
            self.commands,
            self.alarm,
            Waiting::beside_others(self.contention),
        );
        let worker = Box::new(worker?);
        Ok(Seat::new(worker, alarm, self.has_ended, self.leaves))
    }
}

/// Makes a worker once there is a store.
struct MakeSeat {
    newcomer: Newcomer,
    reactor: Reactor,
}

impl Visitor for MakeSeat {
    type Output = Result<Seat, SpawnError>;

    fn visit<S: Store + 'static>(self, store: S) -> Result<Seat, SpawnError> {
        self.newcomer.seat(self.reactor, store)
    }
}

impl<S: Store> Seated for Worker<S> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.reactor.as_fd()
    }

    fn wake(&mut self) -> io::Result<()> {
        self.entered(Wait::Until(None));
        self.reactor.enter(&mut self.store, Wait::No)
    }

    fn lap(&mut self, at: &mut Instant) -> io::Result<Turn> {
        let (lap, rest, worked) = self.lap_beside_others(*at)?;
        let began = std::mem::replace(at, Instant::now());
        let took_ns = at.duration_since(began).as_nanos() as u64;
        add(&self.meters.stats.cpu_ns, took_ns);
        Ok(match (lap, rest) {
            (Lap::Ended, _) => Turn::Ended,
            (Lap::Again, Rest::None) => Turn::Again { worked },
            (Lap::Again, Rest::Until(deadline)) => Turn::Rest(deadline),
        })
    }

    fn wind_down(&mut self) -> io::Result<Turn> {
        for (slot, _) in (0..).zip(self.lanes.drain(..)) {
            self.reactor.unwatch(slot);
        }
        self.inbox.give_up();
        while self.reactor.reap(&mut self.store).is_some() {}
        if self.prepare_close() {
            return Ok(Turn::Ended);
        }
        let pause = self
            .store()
            .polls()
            .then(|| Instant::now() + WIND_DOWN_PAUSE);
        Ok(match self.reactor.settle(&mut self.store, pause)? {
            Rest::None => Turn::Again { worked: true },
            Rest::Until(deadline) => Turn::Rest(deadline),
        })
    }

    fn leave_behind(mut self: Box<Self>) {
        // Before the session can end.
        self.device.is_lost.store(true, Ordering::Release);
        // A command in a queue that is never dropped would never be answered, and the end of the rings never be seen.
        self.inbox.commands.close();
        self.inbox.give_up();
        self.reactor.disinherit();
        // The other workers of the disk may be asked for a flush when their session ends. Whatever failed may fail here too.
        let [store] = &mut self.store;
        let released = catch_unwind(AssertUnwindSafe(|| store.release_shared()));
        if released.is_err() {
            tracing::error!("a worker panicked when it was left behind");
        }
        std::mem::forget(self);
    }
}
