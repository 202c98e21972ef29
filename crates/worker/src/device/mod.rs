//! State that all workers of a device share.

pub(crate) mod cache_note;
pub(crate) mod incident;
pub(crate) mod logs;
pub(crate) mod quota;
pub(crate) mod registry;
pub(crate) mod throttle;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_blk::Cut;
use cleave_blk::SPLIT_OPS_MAX;
use cleave_blk::spec::{ID_BYTES, feature};
use cleave_disk::Disk;

use self::cache_note::CacheNote;
use self::incident::{Incident, IncidentHook};
use self::logs::Logs;
use self::registry::Registry;
use self::throttle::{LimitGroup, LimitLevels, Throttle, VRINGS};
use crate::clock::nanoseconds;
use crate::policy::Budget;
use crate::record::{Recording, Records};
use crate::splitter::SplitState;
use crate::{LegTotals, Pending, Pool, Split, Splitter, Totals, TrialResult, Tuning, WaitState};

/// Settings of workers that cannot change while they run. Those that can are in [`Tuning`].
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// CPUs to pin workers to, round robin. Empty: workers are not pinned.
    pub cpus: Vec<usize>,
    /// Maximum number of ops in flight per worker.
    pub ops: u16,
}

/// Minimum number of ops in flight: the room must suffice for a few whole requests, or none would ever be
/// taken.
const OPS_MIN: u16 = 256;

/// Called by each worker thread when its reactor and its store exist, before it serves anything.
#[derive(Default)]
pub(crate) struct StartHook(Option<Box<dyn Fn() + Send + Sync>>);

impl StartHook {
    pub(crate) fn call(&self) {
        if let Some(hook) = &self.0 {
            hook();
        }
    }
}

impl std::fmt::Debug for StartHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StartHook").field(&self.0.is_some()).finish()
    }
}

/// One disk as the guest sees it.
#[derive(Debug)]
pub struct Device {
    /// The disk that its stores are opened on.
    pub disk: Arc<Disk>,
    /// Answer to GET_ID, padded with zeroes.
    pub serial: [u8; ID_BYTES],
    /// True if the cache is write-back now. The guest can change it with CONFIG_WCE.
    pub writeback: AtomicBool,
    /// The cache was switched off, and what was answered before has not been flushed since.
    owes_flush: AtomicBool,
    /// True if it is write-back for a guest that starts anew.
    has_cache: bool,
    cache_note: Option<Arc<dyn CacheNote>>,
    /// A guest that comes may rely on what is noted: none has come yet, or one was not told that its cache is on.
    is_cache_note_open: AtomicBool,
    /// Settings of its workers.
    pub config: WorkerConfig,
    /// Outlives the workers, so that what they learn is kept.
    splitter: Mutex<Arc<Splitter>>,
    /// Counters and times of its vrings.
    pub records: Records,
    /// Limits of what it logs.
    pub logs: Logs,
    pub(crate) registry: Arc<Registry>,
    pub(crate) budget: Budget,
    pub(crate) throttle: Throttle,
    /// Start of the clock that its workers share.
    pub(crate) began: Instant,
    pub(crate) worker_start: StartHook,
    pub(crate) incidents: IncidentHook,
    /// The guest of the frontend has shown a request, now or before it connected: its memory is shared.
    pub(crate) has_shown: AtomicBool,
    /// A vring has brought requests that an earlier daemon left in flight.
    pub(crate) has_leftovers: AtomicBool,
    /// The vrings that were stopped while requests of an earlier daemon were to be done again.
    hurried: [AtomicBool; VRINGS],
    /// A worker was left behind, and the kernel may still do what it had in flight.
    pub(crate) is_lost: AtomicBool,
    /// The threads that serve it beside other disks. `None`: its workers have threads of their own.
    pub(crate) pool: Option<Arc<Pool>>,
}

impl Device {
    /// Makes a device without workers. `writeback`: the cache mode that the guest finds.
    pub fn new(
        disk: Arc<Disk>,
        serial: [u8; ID_BYTES],
        writeback: bool,
        config: WorkerConfig,
        tuning: Tuning,
    ) -> Device {
        let began = Instant::now();
        let alone = LimitGroup::new(tuning.limits, began);
        let registry = Arc::new(Registry::new(tuning.clone()));
        Device {
            disk,
            serial,
            writeback: AtomicBool::new(writeback),
            owes_flush: AtomicBool::new(false),
            has_cache: writeback,
            cache_note: None,
            is_cache_note_open: AtomicBool::new(true),
            config,
            splitter: Mutex::new(Arc::new(Splitter::new(tuning.split.clone()))),
            records: Records::new(Recording::On),
            logs: Logs::default(),
            throttle: Throttle::join(&alone, &registry, began),
            registry,
            budget: Budget::default(),
            began,
            worker_start: StartHook::default(),
            incidents: IncidentHook::default(),
            has_shown: AtomicBool::new(false),
            has_leftovers: AtomicBool::new(false),
            hurried: [const { AtomicBool::new(false) }; VRINGS],
            is_lost: AtomicBool::new(false),
            pool: None,
        }
    }

    /// Sets what each worker thread calls before it serves anything. By then it has made its rings and opened what it reads,
    /// so its thread can be confined.
    pub fn at_worker_start(mut self, hook: impl Fn() + Send + Sync + 'static) -> Device {
        self.worker_start = StartHook(Some(Box::new(hook)));
        self
    }

    /// Sets what is called when something happens that an operator wants to hear of. It must not wait.
    pub fn at_incident(mut self, hook: impl Fn(Incident) + Send + Sync + 'static) -> Device {
        self.incidents = IncidentHook(Some(Box::new(hook)));
        self
    }

    /// Tells the operator of something that a session did.
    pub fn tell(&self, incident: Incident) {
        self.incidents.call(incident);
    }

    /// Has it noted for the next process when a guest switches the cache off.
    pub fn noting_cache(mut self, note: Option<Arc<dyn CacheNote>>) -> Device {
        self.cache_note = note;
        self
    }

    /// Lets it share the limits of a group. If it has limits of its own, they are those of the group from now on.
    pub fn in_group(mut self, group: &LimitGroup) -> Device {
        let mut tuning = self.tuning().as_ref().clone();
        self.throttle = Throttle::join(group, &self.registry, self.began);
        match tuning.limits.any() {
            true => self.throttle.set(tuning.limits),
            false => {
                tuning.limits = group.limits();
                self.registry.tune(tuning);
            }
        }
        self
    }

    /// Has the threads of a pool serve it. They were confined when the pool started, so the hook of
    /// [`at_worker_start`](Device::at_worker_start) is not called.
    pub fn in_pool(mut self, pool: Option<Arc<Pool>>) -> Device {
        self.pool = pool;
        self
    }

    /// Forgets the guest of the frontend before: a new frontend may have memory that is not shared.
    pub fn begin_session(&self) {
        self.has_shown.store(false, Ordering::Relaxed);
    }

    /// Returns true if its workers share their threads with those of other disks.
    pub fn is_pooled(&self) -> bool {
        self.pool.is_some()
    }

    /// Sets whether request times are recorded.
    pub fn recording(mut self, recording: Recording) -> Device {
        self.records = Records::new(recording);
        self
    }

    /// Returns the nanoseconds since this device was made. All times of records are on this clock.
    pub fn now_ns(&self) -> u64 {
        nanoseconds(self.began)
    }

    /// Returns the levels of its limits' buckets, for a process that goes on with the disk.
    pub fn limit_levels(&self) -> LimitLevels {
        self.throttle.group().levels()
    }

    /// Raises its limits' buckets to the levels that they had in another process.
    pub fn fill_limits(&self, levels: &LimitLevels) {
        self.throttle.group().fill(levels);
    }

    /// Returns the tuning in force.
    pub fn tuning(&self) -> Arc<Tuning> {
        self.registry.tuning()
    }

    /// Changes the tuning. Running workers are woken to adopt it.
    pub fn tune(&self, tuning: Tuning) {
        let mut splitter = self.lock_splitter();
        if *splitter.split() != tuning.split {
            // The findings of the old splitter do not apply to other settings.
            *splitter = Arc::new(Splitter::new(tuning.split.clone()));
        }
        drop(splitter);
        self.throttle.set(tuning.limits);
        self.registry.tune(tuning);
    }

    /// Repeats all held requests. Returns how many there were; `None`: a worker hangs, and could not be told.
    pub fn resume(&self) -> Option<u64> {
        let held = self.records.held();
        self.registry.resume().then_some(held)
    }

    /// Fails all held requests with I/O errors. Returns how many there were; `None`: a worker hangs, and could not be told.
    pub fn fail(&self) -> Option<u64> {
        let held = self.records.held();
        self.registry.fail().then_some(held)
    }

    /// Has the workers take no more requests, until [`go_on`](Device::go_on). Those in flight complete
    /// ([`is_still`](Device::is_still)).
    pub fn quiesce(&self) {
        self.registry.quiesce();
    }

    /// Has the workers take requests again.
    pub fn go_on(&self) {
        self.registry.go_on();
    }

    /// Returns true if the disk is quiesced and nothing is in flight, nor left by an earlier daemon or a worker that failed. Requests
    /// that are held, or wait for a retry, stay where they are.
    pub fn is_still(&self) -> bool {
        // In this order: a worker that is still has noted before what an earlier daemon left, and one that leaves the registry what it
        // leaves itself.
        self.registry.is_still() && !self.is_lost() && self.unsettled_for().is_none()
    }

    /// Returns true if requests may wait for something else than the storage: to be repeated, for the end of a quiet, or until what a
    /// killed daemon sent has ended.
    pub fn may_hold_back(&self) -> bool {
        !self.records.stalled().is_empty()
            || self.registry.quiet().is_some()
            || self.unsettled_for().is_some()
    }

    /// Returns for how long the disk's server may still do what a daemon sent that was killed. `None`: nothing of that kind is
    /// known, or it has ended.
    pub fn unsettled_for(&self) -> Option<Duration> {
        let is_left = self.disk.predecessor_died() || self.has_leftovers.load(Ordering::Relaxed);
        let settled_at = self.disk.settled_at().filter(|_| is_left)?;
        let left = settled_at.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Returns true, once, if a vring that stops may do what an earlier daemon left in flight past the disk's limits.
    pub(crate) fn may_hurry(&self, vring: u16) -> bool {
        let hurried = self.hurried.get(usize::from(vring));
        hurried.is_some_and(|hurried| !hurried.swap(true, Ordering::Relaxed))
    }

    /// Returns true if a worker was left behind with requests in flight, which may still complete at any time. No guest may be
    /// served any more: its newer writes could be overtaken by those.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Has each worker flush its store, for a disk that only they can flush. Returns what they will answer; an `Err` is an errno. A
    /// worker that ends before it has flushed gives no answer: ask all of them again.
    pub fn sync(&self) -> Vec<Pending<Result<(), i32>>> {
        self.registry.sync()
    }

    /// Returns the mode of each running worker: how it waits when it has no work.
    pub fn modes(&self) -> Vec<WaitState> {
        self.registry.modes()
    }

    /// Returns the latest spinning experiment of each running worker and its age, in the order of [`modes`](Device::modes).
    pub fn tried(&self) -> Vec<Option<(TrialResult, Duration)>> {
        let now = self.began.elapsed();
        let ago = |tried: TrialResult| (tried, now.saturating_sub(tried.at));
        let all = self.registry.tried().into_iter();
        all.map(|tried| tried.map(ago)).collect()
    }

    /// Sums over all workers and vrings that ever ran. They never decrease.
    pub fn totals(&self) -> Totals {
        let mut totals = self.registry.totals();
        self.records.add_to(&mut totals);
        totals
    }

    /// Totals of each leg of a stripe over all workers that ever ran. Empty if the disk has one leg.
    pub fn leg_totals(&self) -> Vec<LegTotals> {
        self.registry.leg_totals()
    }

    /// Returns the splitter that all workers share.
    pub(crate) fn splitter(&self) -> Arc<Splitter> {
        self.lock_splitter().clone()
    }

    /// Returns the state of the splitter.
    pub fn split_states(&self) -> Vec<SplitState> {
        self.splitter().states()
    }

    fn lock_splitter(&self) -> MutexGuard<'_, Arc<Splitter>> {
        self.splitter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how long the workers may still spin without finding work, and the size of that budget.
    pub fn spin_left(&self) -> (Duration, Duration) {
        let tuning = self.tuning();
        let left_ns = self.budget.left_ns(nanoseconds(self.began), &tuning);
        let size_ns = Budget::size_ns(&tuning);
        (Duration::from_nanos(left_ns), Duration::from_nanos(size_ns))
    }

    /// Returns the number of ops in flight that each of its workers has room for.
    pub(crate) fn room(&self) -> u16 {
        self.config.ops.max(OPS_MIN)
    }

    /// Returns the maximum number of ops of a request, whether it is split by choice or not.
    pub(crate) fn ops_max(&self, split: &Split) -> usize {
        let by_choice = match split {
            Split::Off => 0,
            Split::Fixed(_) | Split::Auto(_) => SPLIT_OPS_MAX,
        };
        self.cut(0).ops_max().max(by_choice)
    }

    /// Returns how requests are cut for a guest with these features.
    pub(crate) fn cut(&self, features: u64) -> Cut {
        Cut {
            durable: self.is_write_through(features),
            chunk_bytes: None,
            stripe: self.disk.stripe(),
        }
    }

    /// Puts a cache mode in force. That the cache is off is noted before; that it is on again is for the caller to note
    /// ([`note_cache_on`](Device::note_cache_on)), once the guest has been told. If it was on and is off now, a flush is owed.
    pub fn set_writeback(&self, on: bool) {
        if !on {
            self.note_cache_off();
            if self.writeback.load(Ordering::Relaxed) {
                self.owes_flush.store(true, Ordering::Relaxed);
            }
        }
        self.writeback.store(on, Ordering::Relaxed);
    }

    /// Returns true if what the guest was answered before it switched its cache off has not been flushed since. It sends no flush any
    /// more, so until then each request that changes the disk ends with one.
    #[inline]
    pub fn owes_flush(&self) -> bool {
        self.owes_flush.load(Ordering::Relaxed)
    }

    /// Records that all workers have flushed the store since the cache was switched off, or that the guest was told that a flush failed.
    pub fn owe_no_flush(&self) {
        self.owes_flush.store(false, Ordering::Relaxed);
    }

    /// Notes that a guest relies on a cache that is off, although another may be served with one that is on.
    pub fn note_cache_off(&self) {
        self.cache_note.iter().for_each(|note| note.set_off(true));
    }

    /// Takes the note back if the cache is on and no guest may rely on what an earlier process noted.
    pub fn note_cache_on(&self) {
        let is_on = self.writeback.load(Ordering::Relaxed);
        if is_on && !self.is_cache_note_open.load(Ordering::Relaxed) {
            self.cache_note.iter().for_each(|note| note.set_off(false));
        }
    }

    /// Has the next guest get the mode that is noted, if it goes on.
    pub fn reopen_cache_note(&self) {
        self.is_cache_note_open.store(true, Ordering::Relaxed);
    }

    /// Returns true once, if a guest that goes on relies on a cache that is off although it is on here.
    pub fn take_cache_note(&self) -> bool {
        self.is_cache_note_open.swap(false, Ordering::Relaxed)
            && self.cache_note.as_ref().is_some_and(|note| note.is_off())
    }

    /// Returns true if the cache is on for a guest that starts anew.
    pub fn has_cache(&self) -> bool {
        self.has_cache
    }

    /// Returns true if a write must be on stable storage before it completes: the cache is write-through, or the guest did not
    /// negotiate FLUSH and so cannot ask for durability (virtio 1.3 §5.2.5).
    pub(crate) fn is_write_through(&self, features: u64) -> bool {
        !self.writeback.load(Ordering::Relaxed) || features & feature::FLUSH == 0
    }
}

#[cfg(test)]
impl Device {
    /// Makes a disk in memory.
    pub(crate) fn ram() -> Device {
        let spec = cleave_disk::DiskSpec::Ram(1 << 20);
        let disk = Disk::open(&spec, &cleave_disk::OpenOptions::default()).unwrap();
        let config = WorkerConfig {
            cpus: Vec::new(),
            ops: 64,
        };
        let tuning = Tuning::new(Split::Off);
        Device::new(Arc::new(disk), [0; ID_BYTES], true, config, tuning)
    }
}
