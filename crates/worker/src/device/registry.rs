//! The running workers of a device, and how they learn of a change. The lock is taken by control and when a
//! worker starts or ends, never on the data path.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_engine::{LegStats, LegTotals};

use crate::stats::Stats;
use crate::thread::contention::CoreContention;
use crate::wake::signal;
use crate::{Totals, TrialResult, Tuning, WaitState};

/// A running worker as control sees it.
#[derive(Debug)]
struct Live {
    stats: Arc<Stats>,
    /// Wakes the worker, which then checks whether the tuning has changed.
    bell: Arc<OwnedFd>,
    legs: Arc<[LegStats]>,
    /// Counts the CPU time of the worker. `None`: its thread serves others as well, and the worker counts it.
    thread: Option<Arc<CoreContention>>,
}

impl Live {
    fn add_to(&self, sum: &mut Totals) {
        sum.add(&self.stats);
        sum.cpu_ns += self.thread.as_ref().map_or(0, |thread| thread.ran_ns());
    }
}

/// The workers of a device, the tuning in force, and the totals of workers that have ended.
#[derive(Debug)]
pub(crate) struct Registry {
    members: Mutex<Members>,
    /// Counts changes of the tuning. A worker compares it with the generation that it has adopted.
    generation: AtomicU64,
    resumes: AtomicU64,
    fails: AtomicU64,
    /// Odd: the disk is quiesced. Counts the changes, so that each worker can say which of them it has carried out.
    quiet: AtomicU64,
    syncs: AtomicU64,
}

/// A flush that the operator asked for, and the workers that do it.
#[derive(Debug)]
pub struct Syncing {
    number: u64,
    workers: Vec<Arc<Stats>>,
}

/// How such a flush ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Synced {
    /// Each worker has flushed.
    Done,
    /// A worker's flush failed.
    Failed,
    /// A worker ended before it had flushed: ask again.
    Undone,
}

/// How often the operator ordered that held requests be repeated, and failed. A worker compares them with those that it
/// has carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Orders {
    pub(crate) resumes: u64,
    pub(crate) fails: u64,
    /// Number of the change after which the disk is quiesced (odd) or not.
    pub(crate) quiet: u64,
    /// How often the operator ordered a flush of the store.
    pub(crate) syncs: u64,
}

impl Orders {
    /// Returns true if the workers are to take no requests.
    pub(crate) fn is_quiet(self) -> bool {
        self.quiet % 2 == 1
    }
}

#[derive(Debug)]
struct Members {
    tuning: Arc<Tuning>,
    live: Vec<Live>,
    past: Totals,
    past_legs: Vec<LegTotals>,
}

impl Registry {
    pub(crate) fn new(tuning: Tuning) -> Registry {
        Registry {
            members: Mutex::new(Members {
                tuning: Arc::new(tuning),
                live: Vec::new(),
                past: Totals::default(),
                past_legs: Vec::new(),
            }),
            generation: AtomicU64::new(0),
            resumes: AtomicU64::new(0),
            fails: AtomicU64::new(0),
            quiet: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
        }
    }

    /// Has all workers flush their store. `None`: there is no worker.
    pub(crate) fn sync(&self) -> Option<Syncing> {
        // One that starts later has read the number by then, and is not waited for.
        let members = self.order(&self.syncs);
        let workers: Vec<_> = members.live.iter().map(|live| live.stats.clone()).collect();
        let number = self.orders().syncs;
        (!workers.is_empty()).then_some(Syncing { number, workers })
    }

    /// Returns how a flush ended; `None`: it is not over.
    pub(crate) fn synced(&self, syncing: &Syncing) -> Option<Synced> {
        let members = self.lock();
        let mut is_over = true;
        for stats in &syncing.workers {
            let ended = stats.synced.load(Ordering::Acquire);
            let is_there = || {
                members
                    .live
                    .iter()
                    .any(|live| Arc::ptr_eq(&live.stats, stats))
            };
            match (ended >> 1 >= syncing.number, ended & 1 == 1) {
                (true, true) => {}
                (true, false) => return Some(Synced::Failed),
                (false, _) if !is_there() => return Some(Synced::Undone),
                (false, _) => is_over = false,
            }
        }
        is_over.then_some(Synced::Done)
    }

    /// Has all workers repeat their held requests.
    pub(crate) fn resume(&self) {
        drop(self.order(&self.resumes));
    }

    /// Has all workers fail their held requests with I/O errors.
    pub(crate) fn fail(&self) {
        drop(self.order(&self.fails));
    }

    /// Has all workers stop taking requests, or take them again.
    pub(crate) fn quiesce(&self, quiet: bool) {
        let is_quiet = self.orders().is_quiet();
        if quiet != is_quiet {
            drop(self.order(&self.quiet));
        }
    }

    /// Returns true if the disk is quiesced, and no worker has anything in flight.
    pub(crate) fn is_still(&self) -> bool {
        let members = self.lock();
        let orders = self.orders();
        let is_still = |worker: &Live| worker.stats.still.load(Ordering::Acquire) == orders.quiet;
        orders.is_quiet() && members.live.iter().all(is_still)
    }

    fn order(&self, counter: &AtomicU64) -> MutexGuard<'_, Members> {
        let members = self.lock();
        // Before the bells are rung, as in `tune`.
        counter.fetch_add(1, Ordering::Release);
        for worker in &members.live {
            signal(&worker.bell);
        }
        members
    }

    pub(crate) fn orders(&self) -> Orders {
        Orders {
            resumes: self.resumes.load(Ordering::Acquire),
            fails: self.fails.load(Ordering::Acquire),
            quiet: self.quiet.load(Ordering::Acquire),
            syncs: self.syncs.load(Ordering::Acquire),
        }
    }

    /// Returns the tuning in force.
    pub(crate) fn tuning(&self) -> Arc<Tuning> {
        self.lock().tuning.clone()
    }

    /// Puts a tuning in force and wakes all workers to adopt it.
    pub(crate) fn tune(&self, tuning: Tuning) {
        let mut members = self.lock();
        members.tuning = Arc::new(tuning);
        // Before the bells are rung: otherwise a worker could wake, see no change, and sleep on the old tuning.
        self.generation.fetch_add(1, Ordering::Release);
        for worker in &members.live {
            signal(&worker.bell);
        }
    }

    /// Returns the generation of the tuning in force.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn enter(
        &self,
        stats: Arc<Stats>,
        bell: Arc<OwnedFd>,
        legs: Arc<[LegStats]>,
        thread: Option<&Arc<CoreContention>>,
    ) {
        let thread = thread.cloned();
        self.lock().live.push(Live {
            stats,
            bell,
            legs,
            thread,
        });
    }

    /// Removes the worker and adds its counters to the sum under one lock, so that no reader counts them twice
    /// or misses them.
    pub(crate) fn leave(&self, stats: &Arc<Stats>) {
        let mut members = self.lock();
        let place = members
            .live
            .iter()
            .position(|live| Arc::ptr_eq(&live.stats, stats));
        if let Some(place) = place {
            let live = members.live.remove(place);
            live.add_to(&mut members.past);
            add_legs(&mut members.past_legs, &live.legs);
        }
    }

    /// Totals of each leg of a stripe over all workers that ever ran. Empty if the disk has one leg.
    pub(crate) fn leg_totals(&self) -> Vec<LegTotals> {
        let members = self.lock();
        let mut sums = members.past_legs.clone();
        for live in &members.live {
            add_legs(&mut sums, &live.legs);
        }
        sums
    }

    /// Returns true if no worker runs.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().live.is_empty()
    }

    /// Returns the mode of each running worker: how it waits when it has no work.
    pub(crate) fn modes(&self) -> Vec<WaitState> {
        let members = self.lock();
        members.live.iter().map(|live| live.stats.mode()).collect()
    }

    /// Returns the latest spinning experiment of each running worker.
    pub(crate) fn tried(&self) -> Vec<Option<TrialResult>> {
        let members = self.lock();
        members.live.iter().map(|live| live.stats.tried()).collect()
    }

    /// Returns the sum over all workers that ever ran, without the counters of vrings.
    pub(crate) fn totals(&self) -> Totals {
        let members = self.lock();
        let mut sum = members.past;
        for live in &members.live {
            live.add_to(&mut sum);
        }
        sum
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        // No code here panics in the middle of a change, so a poisoned lock is still consistent.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add_legs(sums: &mut Vec<LegTotals>, legs: &[LegStats]) {
    sums.resize(sums.len().max(legs.len()), LegTotals::default());
    for (sum, leg) in sums.iter_mut().zip(legs) {
        *sum += leg.totals();
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::Split;
    use crate::counter::add;

    /// Returns a registry with two workers.
    fn two_workers() -> (Registry, Vec<Arc<Stats>>, Vec<Arc<OwnedFd>>) {
        let registry = Registry::new(Tuning::new(Split::Off));
        let bells: Vec<_> = (0..2)
            .map(|_| {
                let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
                Arc::new(eventfd(0, flags).unwrap())
            })
            .collect();
        let stats: Vec<_> = (0..2).map(|_| Arc::new(Stats::default())).collect();
        for (stats, bell) in stats.iter().zip(&bells) {
            registry.enter(stats.clone(), bell.clone(), Arc::new([]), None);
        }
        (registry, stats, bells)
    }

    #[test]
    fn a_flush_is_undone_if_a_worker_leaves_before_it_has_flushed() {
        let (registry, stats, _bells) = two_workers();
        let flushed = |worker: &Stats, syncing: &Syncing, is_ok: bool| {
            let ended = syncing.number << 1 | u64::from(is_ok);
            worker.synced.store(ended, Ordering::Release);
        };
        let first = registry.sync().unwrap();
        flushed(&stats[0], &first, true);
        assert_eq!(registry.synced(&first), None);
        registry.leave(&stats[1]);
        assert_eq!(registry.synced(&first), Some(Synced::Undone));
        let second = registry.sync().unwrap();
        assert_eq!(registry.synced(&second), None);
        flushed(&stats[0], &second, true);
        registry.leave(&stats[0]);
        assert_eq!(registry.synced(&second), Some(Synced::Done));
        assert!(registry.sync().is_none());
        let (registry, stats, _bells) = two_workers();
        let failed = registry.sync().unwrap();
        flushed(&stats[1], &failed, false);
        assert_eq!(registry.synced(&failed), Some(Synced::Failed));
    }

    #[test]
    fn totals_survive_a_worker_and_a_change_reaches_every_worker() {
        let (registry, stats, bells) = two_workers();
        for stats in &stats {
            add(&stats.laps, 5);
        }
        assert_eq!((registry.totals().laps, registry.modes().len()), (10, 2));
        registry.leave(&stats[0]);
        registry.leave(&stats[0]);
        assert_eq!((registry.totals().laps, registry.modes().len()), (10, 1));
        let before = registry.generation();
        let changed = Tuning {
            spin_cpu_max: 7,
            ..Tuning::new(Split::Off)
        };
        registry.tune(changed.clone());
        assert_ne!(registry.generation(), before);
        assert_eq!(*registry.tuning(), changed);
        let rung = |bell: &OwnedFd| rustix::io::read(bell, &mut [0; 8]).is_ok();
        assert_eq!((rung(&bells[0]), rung(&bells[1])), (false, true));
    }

    #[test]
    fn the_cpu_time_of_a_worker_that_left_is_kept() {
        let (registry, stats, bells) = two_workers();
        add(&stats[0].cpu_ns, 5);
        let alone = Arc::new(Stats::default());
        let thread = Arc::new(CoreContention::of_this_thread());
        registry.enter(alone.clone(), bells[0].clone(), Arc::new([]), Some(&thread));
        // The scheduler counts what a thread ran when it leaves the core.
        std::thread::sleep(std::time::Duration::from_millis(1));
        let counted = registry.totals().cpu_ns;
        assert!(counted > 5, "{counted}");
        for left in [&alone, &stats[0]] {
            registry.leave(left);
            assert!(registry.totals().cpu_ns >= counted);
        }
        let past = registry.totals().cpu_ns;
        assert_eq!(registry.totals().cpu_ns, past);
    }
}
