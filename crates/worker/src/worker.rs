//! The worker's loop.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cleave_blk::{Op, OpKind};
use cleave_engine::{Event, Reactor, Store, Wait};
use cleave_guest::{Chain, Epoch, Memory, VringFault};
use rustix::time::ClockId;

use crate::accept::{Acceptance, Begun, InlineRun, Splitting, write_status};
use crate::clock::cpu_ns;
use crate::command::Commands;
use crate::counter::add;
use crate::inbox::Inbox;
use crate::incident::Incident;
use crate::lane::{Lane, State};
use crate::policy::LapWork;
use crate::record::{Laps, RingCheck, RingState, VringEvent};
use crate::slots::{Ended, Next};
use crate::stats::Stats;
use crate::token::Token;
use crate::waiting::Waiting;
use crate::wake::{add_to, signal};
use crate::{Completion, Device, Direction, Tuning};

/// Added to the alarm eventfd's counter when a vring is retired. A worker that cannot go on adds 1.
pub const ALARM_RETIRED: u64 = 1 << 32;

/// Maximum number of vrings that one worker serves. A device has at most this many.
pub const LANES_MAX: u16 = 256;
/// Maximum number of chains that go from one vring to the disk before the other vrings are served. Bounds how
/// long a completion waits behind acceptance.
const TAKE_MAX: usize = 64;
/// `TAKE_MAX` while nothing is in flight: an idle disk gets its first requests early and works on them while
/// the rest of the batch is prepared. Costs one more system call after idleness, and saves a tenth of the
/// response time where guest and disk alternate at depth 32.
const TAKE_MAX_IDLE: usize = 8;
/// Maximum number of descriptors that are read in one lap from all vrings together: a fifth of a millisecond.
/// One chain may have half as many, and 64 of those on each of 256 vrings would delay commands and completions
/// for seconds.
pub(crate) const DESCRIPTORS_MAX: u32 = 1 << 16;
/// Time from a vring's kicks until the disk counts as hanging if no request was seen meanwhile. A guest's firmware
/// may start a disk that nothing reads until the menu of the boot loader ends.
const DOUBT_NS: u64 = 20_000_000_000;
/// Watch slot of the command eventfd. Lane `n` watches its kick in slot `n`.
const COMMAND_WATCH: u16 = LANES_MAX;
/// Large requests of one kind after which the splitter's findings are worth a log line.
const SEEN_WORTH_TELLING: u64 = 200;

/// A write that was pushed while the cache was write-back and completes after the switch to write-through is
/// followed by this op. Its op number is beyond all others. On a stripe the legs are synced one after the
/// other, with op numbers counting down from `SYNC_OP`, because there is room for only one op.
const SYNC: Op<'static> = Op {
    kind: OpKind::Sync,
    leg: 0,
    offset_bytes: 0,
    len_bytes: 0,
    segments: &[],
    skip_bytes: 0,
};
const SYNC_OP: u32 = u32::MAX;
/// A sync for the operator, which no vring asked for.
pub(crate) const OPERATOR: Token = Token {
    lane: u16::MAX,
    head: 0,
    op: SYNC_OP,
};

/// Number of watch slots that a worker needs in its reactor.
pub(crate) const WATCHES: u16 = LANES_MAX + 1;
/// Number of bell slots. Lane `n` uses `2n` for its call and `2n + 1` for its err eventfd.
pub(crate) const BELLS: u16 = LANES_MAX * 2;

/// Bell slot of a lane's call eventfd.
pub(crate) fn call_bell(lane: u16) -> u16 {
    lane * 2
}

/// Bell slot of a lane's err eventfd.
pub(crate) fn err_bell(lane: u16) -> u16 {
    lane * 2 + 1
}

/// Result of one round of acceptance.
#[derive(Debug, Clone, Copy, Default)]
struct Accepted {
    chains: usize,
    /// Those on vrings whose completion mode may spin.
    awaited: usize,
    /// Those that completed inline.
    ended: usize,
    /// A bound of the batch was reached before the ring was empty.
    more: bool,
}

/// Why no more chains were taken.
enum Stop {
    /// The ring is empty, or the store is full. A kick or a completion ends the sleep.
    Drained,
    /// A bound of the batch was reached. Nothing would end a sleep, so the worker must not sleep.
    Budget,
    /// The disk's limits; the lane knows until when.
    OverLimit,
    Breach(Breach),
}

/// A guest's violation that retires its vring.
#[derive(Debug, thiserror::Error)]
enum Breach {
    #[error("head {0} is in flight already")]
    Head(u16),
    #[error(transparent)]
    Vring(VringFault),
}

/// Result of a lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lap {
    /// Call `lap` again.
    Again,
    /// Control asked the worker to exit, and everything is drained.
    Ended,
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
    pub(crate) inbox: Inbox,
    pub(crate) active: ActiveTuning,
    pub(crate) meters: Meters,
    /// Notifies the session that this worker cannot go on, or that a vring was retired.
    pub(crate) alarm: Arc<OwnedFd>,
    /// The frontend truncated the guest's memory file while we used it.
    pub(crate) lost: bool,
}

/// How chains are taken from the vrings.
pub(crate) struct Taking {
    pub(crate) chain: Chain,
    /// The lane that accepts first: the one after the lane that accepted the store's last room. Without this a busy
    /// vring would starve those behind it.
    pub(crate) first: usize,
    /// Rest of `DESCRIPTORS_MAX` in this lap.
    pub(crate) descriptors_left: u32,
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

/// Observes the loop: counts what it did and times some of its laps. Takes no decisions.
pub(crate) struct Meters {
    pub(crate) stats: Arc<Stats>,
    pub(crate) laps: Laps,
}

impl Meters {
    /// Called at the end of a lap, before its system call. `worked`: the lap accepted or completed something.
    #[inline]
    fn lap_ended(&mut self, worked: bool, polled: u64, lanes: &mut [Option<Lane>]) {
        if !worked {
            return self.laps.idled();
        }
        add(&self.stats.laps, 1);
        self.stats.polled.store(polled, Ordering::Relaxed);
        if let Some(ns) = self.laps.length_ns() {
            for lane in lanes.iter_mut().flatten() {
                lane.record.lap_ended(ns);
            }
        }
        self.laps.worked();
    }

    /// Reports to the vring's record whether anything was left in the ring. Nothing is reported for a ring that
    /// is now empty in a lap without a clock reading, which is the most frequent case.
    #[inline]
    fn ring_checked(&self, lane: &mut Lane, accepted: Accepted, has_room: bool) {
        let (seen, left) = lane.vring.seen();
        let state = match accepted.more || !has_room || lane.throttled.is_some() {
            true => RingState::Left,
            // A ring that is not served may still hold what was left in it before.
            false if left == 0 && self.laps.known_ns().is_none() => return lane.record.drained(),
            false => RingState::Drained,
        };
        let check = RingCheck {
            seen,
            left,
            state,
            took: accepted.chains > 0,
        };
        lane.record.ring_checked(check, &self.laps);
    }

    /// Called when the thread has returned from the kernel.
    #[inline]
    pub(crate) fn entered(&mut self, wait: Wait) {
        if wait != Wait::No {
            add(&self.stats.wakeups, 1);
            self.laps.slept();
        }
    }
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
        reactor.watch(COMMAND_WATCH, commands.bell.try_clone()?);
        // Register before the tuning is read: a later change rings the bell, and an earlier one is read here.
        let (bell, stats) = (commands.bell.clone(), Arc::new(Stats::default()));
        // Before control can see this worker and wait for what it orders.
        let orders = device.registry.orders();
        device
            .registry
            .enter(stats.clone(), bell, store.leg_stats());
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
                descriptors_left: 0,
            },
            splitting: Splitting {
                splitter,
                requests: 0,
                large: 0,
            },
            waiting,
            inbox: Inbox::new(commands, orders),
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

    /// One pass: reap, publish, accept, and publish what completed inline. Then at most one system call, which
    /// sleeps if the pacer decides so and nothing has arrived meanwhile.
    pub fn lap(&mut self) -> io::Result<Lap> {
        let (wait, worked) = self.work();
        if wait == Wait::No && !worked {
            std::hint::spin_loop();
        }
        self.reactor.enter(&mut self.store, wait)?;
        self.entered(wait);
        Ok(self.end_lap())
    }

    /// Handles commands at the end of a lap.
    #[inline]
    pub(crate) fn end_lap(&mut self) -> Lap {
        match self.inbox.is_pending || self.has_waiters() {
            true => self.handle_commands(),
            false => Lap::Again,
        }
    }

    /// A lap without its system call: how to enter the reactor, and whether there was work.
    #[inline(always)]
    pub(crate) fn work(&mut self) -> (Wait, bool) {
        let reaped = self.reap();
        if reaped > 0 {
            self.publish();
        }
        self.run_due();
        let accepted = self.accept();
        // Ops that completed in `push`. The kernel's completions wait for the next lap.
        let at_once = match self.store().is_ready() {
            true => self.reap(),
            false => 0,
        };
        if accepted.chains + at_once > 0 {
            self.publish();
        }
        let worked = accepted.chains + reaped + at_once > 0;
        let polled = self.reactor.polled();
        self.meters.lap_ended(worked, polled, &mut self.lanes);
        if self.epoch.is_lost() {
            self.lose_memory();
        }
        // The requests that failed before the storage was back are known by now.
        let [store] = &mut self.store;
        if store.came_back() {
            self.resume_unsent();
        }
        if worked {
            self.waiting.empty_checks = 0;
        }
        let wait = self.pace(LapWork {
            arrived: accepted.awaited as u32,
            ended: (reaped + at_once + accepted.ended) as u32,
            in_flight: self.store().in_flight() as u32,
            more: accepted.more,
        });
        (wait, worked)
    }

    /// Collects completions. Returns how many ops completed.
    pub(crate) fn reap(&mut self) -> usize {
        let mut ended = 0;
        while let Some(event) = self.reactor.reap(&mut self.store) {
            match event {
                Event::Done { done, .. } => {
                    ended += 1;
                    self.op_ended(Token::from_bits(done.token), done.result);
                }
                Event::Woken {
                    slot: COMMAND_WATCH,
                } => self.inbox.is_pending = true,
                // A kick only ends the sleep: every lap checks every ring.
                Event::Woken { slot } => self.kicked(slot),
            }
        }
        ended
    }

    fn kicked(&mut self, slot: u16) {
        if let Some(Some(lane)) = self.lanes.get_mut(usize::from(slot))
            && lane.kicked(&self.device.has_shown)
        {
            let due_ns = self.device.now_ns() + DOUBT_NS;
            lane.doubted_ns = Some(due_ns);
            self.waiting.due_ns = self.waiting.due_ns.into_iter().chain([due_ns]).min();
        }
    }

    /// Warns of vrings that were kicked and have shown no request for a while, if no other vring of the device has.
    pub(crate) fn warn_of_unshared(&mut self, now_ns: u64) {
        let mut empty = None;
        for lane in self.lanes.iter_mut().flatten() {
            let Some(due_ns) = lane.doubted_ns else {
                continue;
            };
            if lane.has_shown(&self.device.has_shown) {
                lane.doubted_ns = None;
            } else if due_ns <= now_ns {
                (lane.doubted_ns, empty) = (None, empty.or(Some(lane.index)));
            } else {
                self.waiting.due_ns = self.waiting.due_ns.into_iter().chain([due_ns]).min();
            }
        }
        if let Some(index) = empty.filter(|_| !self.device.has_shown.load(Ordering::Relaxed)) {
            self.log_rarely(|name| {
                tracing::warn!(
                    "{name}: vring {index}: the guest kicked and its ring has shown no request for {} s. If the disk hangs \
                     in the guest, its memory is not shared: give the VMM's memory backend share=on (libvirt: \
                     <access mode='shared'/>)",
                    DOUBT_NS / 1_000_000_000
                );
            });
        }
    }

    fn op_ended(&mut self, token: Token, result: Result<(), i32>) {
        if token == OPERATOR {
            return self.sync_ended(result);
        }
        let Some(Some(lane)) = self.lanes.get_mut(usize::from(token.lane)) else {
            return;
        };
        // On a stripe, the sync of the next leg replaces the one that has just completed.
        let synced_leg = SYNC_OP - token.op;
        let last_leg = self.device.disk.legs().len() as u32 - 1;
        if synced_leg < last_leg && result.is_ok() {
            // A disk has at most 64 legs, so this does not truncate.
            let leg = synced_leg as u16 + 1;
            let op = token.op - 1;
            return self.push_sync(leg, Token { op, ..token });
        }
        let write_through = self.device.is_write_through(lane.features);
        let ended = match lane
            .slots
            .op_ended(token.head, token.op, result, write_through)
        {
            Next::Wait => return,
            Next::End(ended) => ended,
            Next::Sync => {
                // There is room: the op that has just completed freed it.
                let token = Token {
                    op: SYNC_OP,
                    ..token
                };
                return self.push_sync(0, token);
            }
        };
        self.splitting.requests = self.splitting.requests.saturating_sub(1);
        let mut exact_ns = None;
        let splitting = &mut self.splitting;
        if let Some(timing) = ended.timing
            && splitting.splitter.learns()
        {
            splitting.large -= 1;
            let now_ns = self.device.now_ns();
            match (Direction::of(ended.verb), ended.errno) {
                (Some(direction), None) => {
                    splitting
                        .splitter
                        .ended(direction, ended.len_bytes, now_ns, || {
                            cpu_ns(ClockId::ProcessCPUTime)
                        });
                }
                _ => splitting.splitter.failed(now_ns),
            }
            exact_ns = Some(now_ns.saturating_sub(timing.start_ns));
        }
        if let Some(errno) = ended.errno {
            return self.request_failed(token, &ended, errno);
        }
        lane.record.ended(
            token.head,
            &ended,
            exact_ns,
            &ended.epoch,
            &mut self.meters.laps,
        );
        // Through the epoch in which the request was taken: the table in force may have other memory at this
        // address.
        let used = write_status(&ended.epoch, ended.status_addr, ended.outcome);
        lane.push_used(token.head, used);
    }

    pub(crate) fn push_sync(&mut self, leg: u16, token: Token) {
        let [store] = &mut self.store;
        store.push(
            &mut self.reactor,
            &self.epoch,
            Op { leg, ..SYNC },
            token.to_bits(),
        );
    }

    #[inline]
    pub(crate) fn store(&self) -> &S {
        let [store] = &self.store;
        store
    }

    /// Takes available chains while the store has room for whole requests.
    fn accept(&mut self) -> Accepted {
        let mut accepted = Accepted::default();
        self.taking.descriptors_left = DESCRIPTORS_MAX;
        let count = self.lanes.len();
        let first = if self.taking.first < count {
            self.taking.first
        } else {
            0
        };
        let mut has_room = self.has_room();
        for slot in (first..count).chain(0..first) {
            let had_room = has_room;
            let more = self.accept_lane(slot);
            has_room = self.has_room();
            if let Some(Some(lane)) = self.lanes.get_mut(slot) {
                self.meters.ring_checked(lane, more, has_room);
            }
            accepted.chains += more.chains;
            accepted.ended += more.ended;
            if self.is_awaited(slot) {
                accepted.awaited += more.chains;
            }
            accepted.more |= more.more;
            if had_room && !has_room {
                self.taking.first = slot + 1;
            }
            if self.taking.descriptors_left == 0 || self.store().is_sated() {
                (self.taking.first, accepted.more) = (slot + 1, true);
                break;
            }
        }
        if self.active.is_limited {
            self.note_throttled();
        }
        accepted
    }

    /// Has the next sleep end when the first request may go that waits for the disk's limits.
    #[cold]
    fn note_throttled(&mut self) {
        let lanes = self.lanes.iter().flatten().filter(|lane| lane.takes());
        let due = lanes.filter_map(|lane| Some(lane.throttled?.due_ns));
        let due_ns = due.min();
        self.waiting.throttled = due_ns.is_some();
        self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min();
    }

    fn is_awaited(&self, slot: usize) -> bool {
        let lane = self.lanes.get(slot).and_then(Option::as_ref);
        lane.is_some_and(|lane| lane.completion != Completion::Interrupt)
    }

    pub(crate) fn has_room(&self) -> bool {
        self.store().room() >= self.active.ops_max
    }

    fn accept_lane(&mut self, slot: usize) -> Accepted {
        let Worker {
            lanes,
            reactor,
            store: [store],
            device,
            epoch,
            taking,
            splitting,
            active,
            meters: Meters { laps, .. },
            ..
        } = self;
        let Some(Some(lane)) = lanes.get_mut(slot) else {
            return Accepted::default();
        };
        if !lane.takes() {
            return Accepted::default();
        }
        if active.is_limited && lane.is_throttled(device) {
            return Accepted::default();
        }
        let mut acceptance = Acceptance {
            reactor,
            store,
            device,
            epoch,
            lane_number: slot as u16,
            splitting,
            ended: 0,
            watched: laps.is_timed() || lane.record.watches(),
            run: InlineRun::NONE,
            // The daemon that died has counted the requests which it left in flight.
            is_limited: active.is_limited && lane.vring.again() == 0,
            laps,
        };
        let (chains, stop) = take_batch(&mut acceptance, lane, taking, active);
        let ended = acceptance.ended;
        acceptance.run.count(&mut lane.record);
        if active.is_limited && !matches!(stop, Stop::OverLimit) {
            // Its ring may be empty, and then only a kick tells of the next request.
            lane.throttled = None;
        }
        if let Stop::Breach(breach) = &stop {
            self.retire(slot, breach);
        }
        Accepted {
            chains,
            awaited: 0,
            ended,
            more: matches!(stop, Stop::Budget),
        }
    }

    /// Stops serving a vring after a guest's violation. Requests in flight still complete.
    pub(crate) fn retire(&mut self, slot: usize, why: &dyn std::fmt::Display) {
        let Some(Some(lane)) = self.lanes.get_mut(slot) else {
            return;
        };
        if !matches!(lane.state, State::Stopping(_)) {
            lane.state = State::Retired;
        }
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

    /// The frontend truncated memory that we read. Reads returned zeroes, so nothing of this connection can be
    /// trusted; the session ends it.
    fn lose_memory(&mut self) {
        if std::mem::replace(&mut self.lost, true) {
            return;
        }
        for slot in 0..self.lanes.len() {
            self.retire(slot, &"guest memory was cut off");
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

/// Takes chains until the ring is empty, the store is full or a bound is reached. Returns how many were taken
/// and why it stopped.
#[inline]
fn take_batch<S: Store>(
    acceptance: &mut Acceptance<'_, S>,
    lane: &mut Lane,
    taking: &mut Taking,
    active: &ActiveTuning,
) -> (usize, Stop) {
    let Taking {
        chain,
        descriptors_left,
        ..
    } = taking;
    let mut chains = 0;
    let at_once_max = lane.at_once_max();
    let take_max = match acceptance.store.in_flight() {
        0 => TAKE_MAX_IDLE,
        _ => TAKE_MAX,
    };
    // The disk does not wait for requests that complete inline, so those have a bound of their own.
    let within = |chains: usize, ended| chains - ended < take_max && ended < at_once_max;
    while within(chains, acceptance.ended) && acceptance.store.room() >= active.ops_max {
        match lane.vring.take(chain) {
            Ok(None) => return (chains, Stop::Drained),
            Ok(Some(taken)) if lane.slots.is_taken(taken.head) => {
                return (chains, Stop::Breach(Breach::Head(taken.head)));
            }
            Ok(Some(taken)) => {
                // Also if the chain is given back: what costs time is to read it.
                *descriptors_left = descriptors_left.saturating_sub(chain.descriptors());
                if acceptance.begin(lane, taken, chain) == Begun::OverLimit {
                    lane.vring.untake(taken.head);
                    return (chains, Stop::OverLimit);
                }
            }
            Err(fault) => return (chains, Stop::Breach(Breach::Vring(fault))),
        }
        chains += 1;
        if *descriptors_left == 0 || acceptance.store.is_sated() {
            return (chains, Stop::Budget);
        }
    }
    match within(chains, acceptance.ended) {
        true => (chains, Stop::Drained),
        false => (chains, Stop::Budget),
    }
}
