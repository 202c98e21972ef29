//! A worker: what it owns, how it begins, and how it ends. `lap.rs` is its loop.

pub(crate) mod accept;
mod allowance;
mod commands;
mod complete;
mod due;
pub(crate) mod inbox;
mod lap;
pub(crate) mod meters;
mod pacing;
mod stalled;
mod status;
mod take;
pub(crate) mod waiting;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cleave_engine::{Reactor, Store};
use cleave_guest::{Chain, Epoch, MarkingBudget, Memory};

use self::accept::Splitting;
use self::allowance::LapAllowance;
use self::inbox::CommandInbox;
pub use self::lap::Lap;
use self::meters::Meters;
use self::waiting::Waiting;
use crate::control::Commands;
use crate::device::incident::Incident;
use crate::lane::{Lane, LaneState};
use crate::record::{Laps, VringEvent};
use crate::slots::Ended;
use crate::stats::Stats;
use crate::wake::{add_to, signal};
use crate::{Device, Tuning};

/// Added to the alarm eventfd's counter when a vring is retired. A worker that cannot continue adds 1.
pub const ALARM_RETIRED: u64 = 1 << 32;

/// Maximum number of vrings that one worker serves. A device has at most this many.
pub const LANES_MAX: u16 = 256;
/// Watch slot of the command eventfd. Lane `n` watches its kick in slot `n`.
const COMMAND_WATCH: u16 = LANES_MAX;
/// Large requests of one kind after which the splitter's findings are worth a log line.
const SEEN_WORTH_TELLING: u64 = 200;

/// Number of watch slots that a worker needs in its reactor.
pub(crate) const WATCHES: u16 = LANES_MAX + 1;
/// Number of bell slots. Lane `n` uses `2n` for its call and `2n + 1` for its err eventfd.
pub(crate) const BELLS: u16 = LANES_MAX * 2;

/// Returns the bell slot of a lane's call eventfd.
pub(crate) fn call_bell(lane: u16) -> u16 {
    lane * 2
}

/// Returns the bell slot of a lane's err eventfd.
pub(crate) fn err_bell(lane: u16) -> u16 {
    lane * 2 + 1
}

/// Serves some vrings of one device. Call `lap` until it returns [`Lap::Ended`].
pub struct Worker<S: Store> {
    pub(crate) reactor: Reactor,
    /// The disk's store on this thread.
    pub(crate) store: [S; 1],
    pub(crate) device: Arc<Device>,
    /// The memory table in force.
    pub(crate) epoch: Epoch,
    pub(crate) lanes: Vec<Option<Lane>>,
    pub(crate) taking: Taking,
    pub(crate) splitting: Splitting,
    pub(crate) waiting: Waiting,
    pub(crate) publishing: Publishing,
    pub(crate) inbox: CommandInbox,
    pub(crate) active: ActiveTuning,
    pub(crate) meters: Meters,
    /// Notifies the session that this worker cannot continue, or that a vring was retired.
    pub(crate) alarm: Arc<OwnedFd>,
    /// The frontend truncated the guest's memory file while we used it.
    pub(crate) lost: bool,
}

/// How chains are taken from the vrings.
pub(crate) struct Taking {
    pub(crate) chain: Chain,
    /// The lane that accepts first: the one after the lane that accepted the store's last room. Without this a busy
    /// vring would starve those after it.
    pub(crate) first: usize,
    /// The lane that repeats stalled requests first, for the same reason.
    pub(crate) first_again: usize,
    pub(crate) allowance: LapAllowance,
}

/// How answers are published.
pub(crate) struct Publishing {
    /// The lane that publishes first: the one after the lane that used the budget up. Without this a vring whose answers
    /// take long to mark would starve those after it.
    pub(crate) first: usize,
    /// Rest of what the marking of answers may take in this lap.
    pub(crate) marking: MarkingBudget,
}

/// The tuning in force.
pub(crate) struct ActiveTuning {
    pub(crate) tuning: Arc<Tuning>,
    /// Its generation in the registry.
    pub(crate) generation: u64,
    /// Maximum number of ops of a request under this tuning.
    pub(crate) ops_max: usize,
    /// Requests are limited.
    pub(crate) is_limited: bool,
}

impl<S: Store> Worker<S> {
    /// Makes a worker whose guest has this memory. It has the calling thread for itself.
    pub fn new(
        reactor: Reactor,
        store: S,
        device: Arc<Device>,
        memory: Arc<Memory>,
        commands: Commands,
        alarm: Arc<OwnedFd>,
    ) -> io::Result<Worker<S>> {
        let waiting = Waiting::new();
        Worker::with(reactor, store, device, memory, commands, alarm, waiting)
    }

    /// Makes a worker that waits in this way.
    pub(crate) fn with(
        mut reactor: Reactor,
        store: S,
        device: Arc<Device>,
        memory: Arc<Memory>,
        commands: Commands,
        alarm: Arc<OwnedFd>,
        waiting: Waiting,
    ) -> io::Result<Worker<S>> {
        let (control, stats) = (commands.control.clone(), Arc::new(Stats::default()));
        reactor.watch(COMMAND_WATCH, control.bell.try_clone()?);
        // Register before the tuning is read: a later change rings the bell, and an earlier one is read here.
        device.registry.enter(
            stats.clone(),
            control,
            store.leg_stats(),
            waiting.own_thread(),
        );
        let generation = device.registry.generation();
        let tuning = device.tuning();
        let splitter = device.splitter();
        let ops_max = device.ops_max(splitter.split());
        Ok(Worker {
            reactor,
            store: [store],
            epoch: Epoch::from(memory),
            lanes: Vec::new(),
            taking: Taking {
                chain: Chain::new(),
                first: 0,
                first_again: 0,
                allowance: LapAllowance::new(),
            },
            splitting: Splitting {
                splitter,
                requests: 0,
                large: 0,
            },
            waiting,
            publishing: Publishing {
                first: 0,
                marking: MarkingBudget::of_a_turn(),
            },
            inbox: CommandInbox::new(commands),
            active: ActiveTuning {
                generation,
                ops_max,
                is_limited: tuning.limits.any(),
                tuning,
            },
            meters: Meters {
                stats,
                laps: Laps::new(device.began, device.records.is_on()),
            },
            device,
            alarm,
            lost: false,
        })
    }

    #[inline]
    pub(crate) fn store(&self) -> &S {
        let [store] = &self.store;
        store
    }

    /// Stops serving a vring after a guest's violation. Requests in flight still complete.
    pub(crate) fn retire(&mut self, slot: usize, why: &dyn std::fmt::Display) {
        let Some(Some(lane)) = self.lanes.get_mut(slot) else {
            return;
        };
        if !matches!(lane.state, LaneState::Stopping(_)) {
            lane.state = LaneState::Retired;
        }
        lane.finishes = false;
        lane.leave_limits(&self.device);
        lane.record.count(VringEvent::Retired);
        let index = lane.index;
        self.inbox.holds_old_memory = true;
        self.update_wait_mode();
        self.reactor.ring(err_bell(slot as u16));
        add_to(&self.alarm, ALARM_RETIRED);
        let is_told = self.device.logs.retired.log(|more| {
            let name = self.device.disk.name();
            tracing::warn!("{name}: vring {index} is retired: {why}{more}");
        });
        if is_told {
            self.device.incidents.call(Incident::Retired {
                vring: index,
                why: why.to_string(),
            });
        }
        self.abandon(slot);
    }

    pub(crate) fn report(&mut self, ended: &Ended) {
        let Ended {
            verb,
            offset_bytes,
            len_bytes,
            errno,
            ..
        } = *ended;
        let errno = errno.unwrap_or(0);
        let error = io::Error::from_raw_os_error(errno);
        let is_told = self.log_rarely(|name| {
            tracing::warn!(
                "{name}: {verb:?} of {len_bytes} bytes at {offset_bytes} failed: {error}"
            )
        });
        if is_told {
            self.device.incidents.call(Incident::Failed {
                offset_bytes,
                len_bytes,
                errno,
            });
        }
    }

    /// Logs at most once a second over all workers of the disk, because a guest or a disk can cause these lines at will. Returns
    /// whether it did.
    pub(crate) fn log_rarely(&self, line: impl FnOnce(&str)) -> bool {
        let device = &self.device;
        device.logs.others.log(|_| line(device.disk.name()))
    }

    /// Returns true if a page is not there of the table in force, or of an earlier one in which a vring still shows its answers.
    #[cold]
    fn has_lost_memory(&self) -> bool {
        let mut lanes = self.lanes.iter().flatten();
        self.epoch.is_lost() || lanes.any(|lane| lane.vring.is_lost())
    }

    /// Notes that a page of guest memory is not there: the frontend cut its file, or the host has lost it or has none. Reads returned
    /// zeroes, so nothing of this connection can be trusted; the session ends it. No request is answered any more.
    fn lose_memory(&mut self) {
        if std::mem::replace(&mut self.lost, true) {
            return;
        }
        for slot in 0..self.lanes.len() {
            if let Some(Some(lane)) = self.lanes.get_mut(slot) {
                lane.left = true;
            }
            self.retire(slot, &"a page of guest memory is not there");
        }
        signal(&self.alarm);
    }
}

/// The end of a worker's store. If it panics, or leaves I/O in flight, no frontend may be served any more.
struct Closing {
    device: Arc<Device>,
    has_ended: bool,
}

impl Drop for Closing {
    fn drop(&mut self) {
        if !self.has_ended {
            // Before the session can end.
            self.device.is_lost.store(true, Ordering::Release);
        }
    }
}

impl<S: Store> Drop for Worker<S> {
    /// Waits for the I/O in flight. The last worker of the disk logs what the splitter has learnt.
    fn drop(&mut self) {
        let mut closing = Closing {
            device: self.device.clone(),
            has_ended: false,
        };
        closing.has_ended = self.reactor.close(&mut self.store);
        drop(closing);
        self.device.registry.leave(&self.meters.stats);
        let name = self.device.disk.name();
        self.splitting.splitter.forget(self.splitting.large);
        if self.device.registry.is_empty() {
            let states = self.splitting.splitter.states().into_iter();
            for state in states.filter(|state| state.requests >= SEEN_WORTH_TELLING) {
                let logs = &self.device.logs;
                logs.learnt
                    .log(|more| tracing::info!("{name}: {state}{more}"));
            }
        }
    }
}
