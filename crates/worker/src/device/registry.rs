//! The running workers of a device, and how they learn of a change. The lock is taken by control, and by a worker when it
//! starts, adopts a tuning or ends, never on the data path.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_engine::{LegStats, LegTotals};

use crate::command::Command;
use crate::control::{Control, Pending};
use crate::stats::Stats;
use crate::thread::contention::CoreContention;
use crate::{Totals, TrialResult, Tuning, WaitState};

/// A running worker as control sees it.
#[derive(Debug)]
struct Live {
    stats: Arc<Stats>,
    control: Control,
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
    /// Number of the quiet in force; 0: none. Like the tuning it is a state and not a command: it holds for a worker that starts later
    /// too, and it cannot be lost with the queue of one that fails, which would then seem to have nothing in flight.
    quiet: AtomicU64,
}

#[derive(Debug)]
struct Members {
    tuning: Arc<Tuning>,
    /// How often the disk was quiesced.
    quiets: u64,
    live: Vec<Live>,
    past: Totals,
    past_legs: Vec<LegTotals>,
}

impl Members {
    /// Wakes all workers to adopt a change. The change is stored before that: otherwise a worker could wake, see none, and sleep on.
    fn ring(&self) {
        self.live.iter().for_each(|live| live.control.ring());
    }
}

impl Registry {
    pub(crate) fn new(tuning: Tuning) -> Registry {
        Registry {
            members: Mutex::new(Members {
                tuning: Arc::new(tuning),
                quiets: 0,
                live: Vec::new(),
                past: Totals::default(),
                past_legs: Vec::new(),
            }),
            generation: AtomicU64::new(0),
            quiet: AtomicU64::new(0),
        }
    }

    /// Has all workers flush their store. Returns what each will answer.
    pub(crate) fn sync(&self) -> Vec<Pending<Result<(), i32>>> {
        let members = self.lock();
        members
            .live
            .iter()
            .map(|live| live.control.sync())
            .collect()
    }

    /// Has all workers repeat their held requests. Returns false if one of them hangs, and cannot be told.
    pub(crate) fn resume(&self) -> bool {
        self.order(|| Command::Resume)
    }

    /// Has all workers fail their held requests with I/O errors. Returns false if one of them hangs, and cannot be told.
    pub(crate) fn fail(&self) -> bool {
        self.order(|| Command::Fail)
    }

    fn order(&self, command: impl Fn() -> Command) -> bool {
        let members = self.lock();
        let workers = members.live.iter();
        let untold = workers.filter(|live| !live.control.order(command()));
        untold.count() == 0
    }

    /// Has all workers stop taking requests.
    pub(crate) fn quiesce(&self) {
        let mut members = self.lock();
        if self.quiet().is_none() {
            members.quiets += 1;
            self.quiet.store(members.quiets, Ordering::Release);
            members.ring();
        }
    }

    /// Has all workers take requests again.
    pub(crate) fn go_on(&self) {
        let members = self.lock();
        if self.quiet().is_some() {
            self.quiet.store(0, Ordering::Release);
            members.ring();
        }
    }

    /// Returns the number of the quiet in force. `None`: the disk is not quiesced.
    pub(crate) fn quiet(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.quiet.load(Ordering::Acquire))
    }

    /// Returns true if the disk is quiesced, and no worker has anything in flight.
    pub(crate) fn is_still(&self) -> bool {
        let members = self.lock();
        let still = |worker: &Live| worker.stats.still.load(Ordering::Acquire);
        self.quiet().is_some_and(|quiet| {
            let mut workers = members.live.iter();
            workers.all(|worker| still(worker) == quiet.get())
        })
    }

    /// Returns the tuning in force.
    pub(crate) fn tuning(&self) -> Arc<Tuning> {
        self.lock().tuning.clone()
    }

    /// Puts a tuning in force and wakes all workers to adopt it.
    pub(crate) fn tune(&self, tuning: Tuning) {
        let mut members = self.lock();
        members.tuning = Arc::new(tuning);
        self.generation.fetch_add(1, Ordering::Release);
        members.ring();
    }

    /// Returns the generation of the tuning in force.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn enter(
        &self,
        stats: Arc<Stats>,
        control: Control,
        legs: Arc<[LegStats]>,
        thread: Option<&Arc<CoreContention>>,
    ) {
        let thread = thread.cloned();
        self.lock().live.push(Live {
            stats,
            control,
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
    use std::time::Duration;

    use super::*;
    use crate::Split;
    use crate::control::Commands;
    use crate::counter::add;

    /// Returns a registry with two workers.
    fn two_workers() -> (Registry, Vec<Arc<Stats>>, Vec<Commands>) {
        let registry = Registry::new(Tuning::new(Split::Off));
        let stats: Vec<_> = (0..2).map(|_| Arc::new(Stats::default())).collect();
        let enter = |stats: &Arc<Stats>| {
            let (control, commands) = Control::channel().unwrap();
            registry.enter(stats.clone(), control, Arc::new([]), None);
            commands
        };
        let commands = stats.iter().map(enter).collect();
        (registry, stats, commands)
    }

    /// Returns what a worker has answered; `Err`: nothing so far.
    fn answer<T>(pending: Pending<T>) -> Result<Option<T>, Pending<T>> {
        pending.wait_for(Duration::ZERO)
    }

    #[test]
    fn a_flush_is_not_answered_by_a_worker_that_ends_before_it_has_flushed() {
        let (registry, stats, mut commands) = two_workers();
        let [first, second] = registry.sync().try_into().unwrap();
        let taken = commands[0].queue.try_recv().unwrap();
        let first = answer(first).unwrap_err();
        let Command::Sync(waiter) = taken else {
            panic!("{taken:?}");
        };
        waiter.send(Err(5)).unwrap();
        assert_eq!(answer(first).unwrap(), Some(Err(5)));
        let second = answer(second).unwrap_err();
        registry.leave(&stats[1]);
        drop(commands.pop());
        assert_eq!(answer(second).unwrap(), None);
        assert_eq!(registry.sync().len(), 1);
        registry.leave(&stats[0]);
        assert!(registry.sync().is_empty());
    }

    #[test]
    fn a_worker_that_takes_no_commands_keeps_nobody_waiting() {
        let (registry, _stats, commands) = two_workers();
        assert!(registry.resume());
        for _ in 0..1000 {
            registry.resume();
        }
        assert!(!registry.fail(), "it says that it was not told");
        let [first, _] = registry.sync().try_into().unwrap();
        assert_eq!(answer(first).unwrap(), None, "no room, so it asks again");
        assert!(commands[0].queue.try_iter().count() > 0);
    }

    #[test]
    fn each_quiet_ends_with_its_own_number() {
        let (registry, stats, _commands) = two_workers();
        assert!(registry.quiet().is_none() && !registry.is_still());
        let numbers: Vec<_> = (0..2)
            .map(|_| {
                registry.quiesce();
                let quiet = registry.quiet().unwrap();
                registry.quiesce();
                assert_eq!(registry.quiet(), Some(quiet), "in force already");
                for stats in &stats {
                    assert!(!registry.is_still());
                    stats.still.store(quiet.get(), Ordering::Release);
                }
                assert!(registry.is_still());
                registry.go_on();
                assert!(registry.quiet().is_none() && !registry.is_still());
                quiet
            })
            .collect();
        assert_ne!(numbers[0], numbers[1]);
    }

    #[test]
    fn totals_survive_a_worker_and_a_change_reaches_every_worker() {
        let (registry, stats, commands) = two_workers();
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
        let rung = |commands: &Commands| {
            let bell = &commands.control.bell;
            rustix::io::read(bell, &mut [0; 8]).is_ok()
        };
        assert_eq!((rung(&commands[0]), rung(&commands[1])), (false, true));
    }

    #[test]
    fn the_cpu_time_of_a_worker_that_left_is_kept() {
        let (registry, stats, commands) = two_workers();
        add(&stats[0].cpu_ns, 5);
        let alone = Arc::new(Stats::default());
        let thread = Arc::new(CoreContention::of_this_thread());
        let control = commands[0].control.clone();
        registry.enter(alone.clone(), control, Arc::new([]), Some(&thread));
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
