//! The loop.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind};
use cleave_engine::{Event, Reactor, Store, Wait};
use cleave_guest::{Chain, Epoch, Memory, VringFault};
use rustix::time::ClockId;

use crate::accept::{Acceptance, Run, answer};
use crate::command::Commands;
use crate::commands::Inbox;
use crate::lane::{Lane, State};
use crate::pacing::{Waiting, cpu_ns};
use crate::policy::Did;
use crate::record::{Laps, Look, Looked, VringEvent};
use crate::slots::{Ended, Next};
use crate::stats::{Stats, add};
use crate::token::Token;
use crate::{Completion, Device, Direction, Splitter, Tuning};

/// Added to the alarm's counter when a vring is retired; a worker that cannot go on adds 1.
pub const ALARM_RETIRED: u64 = 1 << 32;

/// Most vrings that one worker serves: a device has at most this many.
pub const LANES_MAX: u16 = 256;
/// Chains taken from one vring for the drive before the others have their turn; bounds how long a completion
/// waits behind acceptance.
const TAKE_MAX: usize = 64;
/// As `TAKE_MAX`, while nothing is in flight: an idle drive gets its first requests at once and works on
/// them while the others of the batch are prepared. One system call more where a drive comes out of
/// idleness, for a tenth less of response time where guest and drive take turns at depth 32.
const TAKE_MAX_IDLE: usize = 8;
/// Descriptors that are read in one lap, all vrings together, before commands and completions have their turn:
/// a fifth of a millisecond. (One chain may have half as many, and 64 of them on each of 256 vrings would
/// keep a stop waiting for seconds.)
pub(crate) const DESCRIPTORS_MAX: u32 = 1 << 16;
/// Watch slot of the command eventfd; lane `n` watches its kick in slot `n`.
const COMMAND_WATCH: u16 = LANES_MAX;
/// Large requests of one kind that make what was learnt of them worth a line.
const SEEN_WORTH_TELLING: u64 = 200;
/// A log line that a guest or a disk can cause comes at most this often.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// The op that follows the last of a write which the cache mode overtook, and its number: beyond all
/// others. On a stripe, one leg after the other, counted downwards: there is room for one.
const SYNC: Op<'static> = Op {
    kind: OpKind::Sync,
    leg: 0,
    offset_bytes: 0,
    len_bytes: 0,
    segments: &[],
    skip_bytes: 0,
};
const SYNC_OP: u32 = u32::MAX;

/// Watch slots that a worker needs of its reactor.
pub(crate) const WATCHES: u16 = LANES_MAX + 1;
/// Bell slots: lane `n` calls by `2n` and reports its end by `2n + 1`.
pub(crate) const BELLS: u16 = LANES_MAX * 2;

/// The call eventfd's bell slot of a lane.
pub(crate) fn call_bell(lane: u16) -> u16 {
    lane * 2
}

/// The err eventfd's bell slot of a lane.
pub(crate) fn err_bell(lane: u16) -> u16 {
    lane * 2 + 1
}

/// Result of one round of acceptance.
#[derive(Debug, Clone, Copy, Default)]
struct Took {
    chains: usize,
    /// Of those, on vrings that spinning may be for.
    awaited: usize,
    /// Those that ended on the spot.
    ended: usize,
    /// The budget ended before the ring did.
    more: bool,
}

/// Why no more chains were taken.
enum Stop {
    /// The ring is empty, or the engine full: its completions end the sleep.
    Drained,
    /// The others have their turn; nothing would end a sleep.
    Budget,
    Breach(Breach),
}

/// How a guest broke its vring.
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
    /// Turn again.
    Again,
    /// Control asked for the end, and everything is drained.
    Ended,
}

/// Serves some vrings of one device. `lap` until [`Lap::Ended`].
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
    pub(crate) tuned: Tuned,
    pub(crate) meters: Meters,
    /// Tells the session of what ends it, and of vrings that were retired.
    pub(crate) alarm: Arc<OwnedFd>,
    /// Guest memory was cut off under us.
    pub(crate) lost: bool,
    /// When a line that a guest or a disk can cause was logged last.
    pub(crate) logged: Option<Instant>,
}

/// How chains are taken from the vrings.
pub(crate) struct Taking {
    pub(crate) chain: Chain,
    /// Lane that accepts first: the one behind that which took the store's last room, or a busy vring
    /// would keep those behind it from ever being served.
    pub(crate) first: usize,
    /// Of `DESCRIPTORS_MAX`, in this lap.
    pub(crate) descriptors_left: u32,
}

/// How large requests are split, and what they are split beside.
pub(crate) struct Splitting {
    /// All workers of the disk share it.
    pub(crate) splitter: Arc<Splitter>,
    /// Requests in flight on all vrings; and those of them that the splitter hears of.
    pub(crate) requests: u32,
    pub(crate) large: u32,
}

/// The tuning in force.
pub(crate) struct Tuned {
    pub(crate) tuning: Arc<Tuning>,
    /// Its number in the registry.
    pub(crate) number: u64,
    /// Most ops of a request under it.
    pub(crate) ops_max: usize,
}

/// Watches the loop: counts what it did and times some of its laps. Nothing here decides anything.
pub(crate) struct Meters {
    pub(crate) stats: Arc<Stats>,
    pub(crate) laps: Laps,
}

impl Meters {
    /// A lap is over but for its system call; `worked`: it took or ended something.
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

    /// Tells the record of a vring whether anything was left in it. Most looks have nothing to tell: those at a
    /// ring that is empty now, in laps without a clock reading.
    #[inline]
    fn looked(&self, lane: &mut Lane, took: Took, has_room: bool) {
        let (seen, left) = lane.vring.seen();
        let looked = match took.more || !has_room {
            true => Looked::Left,
            // A ring that is not served may hold what was left in it before.
            false if left == 0 && self.laps.known_ns().is_none() => return lane.record.drained(),
            false => Looked::Drained,
        };
        let look = Look {
            seen,
            left,
            looked,
            took: took.chains > 0,
        };
        lane.record.looked(look, &self.laps);
    }

    /// The thread is back from the kernel.
    #[inline]
    fn entered(&mut self, wait: Wait) {
        if wait != Wait::No {
            add(&self.stats.wakeups, 1);
            self.laps.slept();
        }
    }
}

impl<S: Store> Worker<S> {
    /// Puts a worker together, whose guest has this memory.
    pub fn new(
        mut reactor: Reactor,
        store: S,
        device: Arc<Device>,
        memory: Arc<Memory>,
        commands: Commands,
        alarm: Arc<OwnedFd>,
    ) -> io::Result<Worker<S>> {
        reactor.watch(COMMAND_WATCH, commands.bell.try_clone()?);
        // Known to control first: a change that comes from here on rings the bell, and one that came
        // before is found.
        let (bell, stats) = (commands.bell.clone(), Arc::new(Stats::default()));
        device
            .registry
            .enter(stats.clone(), bell, store.leg_stats());
        let number = device.registry.turn();
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
            waiting: Waiting::new(),
            inbox: Inbox::new(commands, device.registry.orders()),
            tuned: Tuned {
                number,
                ops_max,
                tuning,
            },
            meters: Meters {
                stats,
                laps: Laps::new(device.began, device.records.is_on()),
            },
            device,
            alarm,
            lost: false,
            logged: None,
        })
    }

    /// One turn: reap, publish, accept, and what could be done on the spot; then at most one
    /// system call, which sleeps if the pacer says so and nothing came in meanwhile.
    pub fn lap(&mut self) -> io::Result<Lap> {
        let reaped = self.reap();
        if reaped > 0 {
            self.publish();
        }
        self.attend_due();
        let took = self.accept();
        // Ops that ended in `push`; the kernel's completions are for the next lap.
        let at_once = match self.store().is_ready() {
            true => self.reap(),
            false => 0,
        };
        if took.chains + at_once > 0 {
            self.publish();
        }
        let worked = took.chains + reaped + at_once > 0;
        let polled = self.reactor.polled();
        self.meters.lap_ended(worked, polled, &mut self.lanes);
        if self.epoch.is_lost() {
            self.lose_memory();
        }
        if worked {
            self.waiting.vain_looks = 0;
        }
        let wait = self.pace(Did {
            arrived: took.awaited as u32,
            ended: (reaped + at_once + took.ended) as u32,
            in_flight: self.store().in_flight() as u32,
            more: took.more,
        });
        if wait == Wait::No && !worked {
            std::hint::spin_loop();
        }
        self.reactor.enter(&mut self.store, wait)?;
        self.meters.entered(wait);
        match self.inbox.is_pending || self.waits() {
            true => Ok(self.handle_commands()),
            false => Ok(Lap::Again),
        }
    }

    /// Collects what has ended; how many ops that were.
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
                // A kick only ends the sleep: every lap looks at every ring.
                Event::Woken { slot } => self.kicked(slot),
            }
        }
        ended
    }

    fn kicked(&mut self, slot: u16) {
        if let Some(Some(lane)) = self.lanes.get_mut(usize::from(slot)) {
            lane.record.count(VringEvent::Kick);
        }
    }

    fn op_ended(&mut self, token: Token, result: Result<(), i32>) {
        let Some(Some(lane)) = self.lanes.get_mut(usize::from(token.lane)) else {
            return;
        };
        // Of the syncs below, the next leg's takes the place of the one that has ended.
        let synced_leg = SYNC_OP - token.op;
        let last_leg = self.device.disk.legs().len() as u32 - 1;
        if synced_leg < last_leg && result.is_ok() {
            // At most 64 legs.
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
                // There is room: the op that has just ended made it.
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
        // Through the memory in which it was taken, whatever the table in force has there.
        let used = answer(&ended.epoch, ended.status_addr, ended.outcome);
        lane.push_used(token.head, used);
    }

    fn push_sync(&mut self, leg: u16, token: Token) {
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

    /// Takes what is available, as far as there is room for whole requests.
    fn accept(&mut self) -> Took {
        let mut took = Took::default();
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
                self.meters.looked(lane, more, has_room);
            }
            took.chains += more.chains;
            took.ended += more.ended;
            if self.is_awaited(slot) {
                took.awaited += more.chains;
            }
            took.more |= more.more;
            if had_room && !has_room {
                self.taking.first = slot + 1;
            }
            if self.taking.descriptors_left == 0 {
                (self.taking.first, took.more) = (slot + 1, true);
                break;
            }
        }
        took
    }

    fn is_awaited(&self, slot: usize) -> bool {
        let lane = self.lanes.get(slot).and_then(Option::as_ref);
        lane.is_some_and(|lane| lane.completion != Completion::Interrupt)
    }

    pub(crate) fn has_room(&self) -> bool {
        self.store().room() >= self.tuned.ops_max
    }

    fn accept_lane(&mut self, slot: usize) -> Took {
        let Worker {
            lanes,
            reactor,
            store: [store],
            device,
            epoch,
            taking,
            splitting,
            tuned,
            meters: Meters { laps, .. },
            ..
        } = self;
        let Some(Some(lane)) = lanes.get_mut(slot) else {
            return Took::default();
        };
        if !lane.takes() {
            return Took::default();
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
            run: Run::NONE,
            laps,
        };
        let (chains, stop) = take_batch(&mut acceptance, lane, taking, tuned.ops_max);
        let ended = acceptance.ended;
        acceptance.run.count(&mut lane.record);
        if let Stop::Breach(breach) = &stop {
            self.retire(slot, breach);
        }
        Took {
            chains,
            awaited: 0,
            ended,
            more: matches!(stop, Stop::Budget),
        }
    }

    /// Stops serving a vring whose guest broke it. Requests in flight still end.
    pub(crate) fn retire(&mut self, slot: usize, why: &dyn std::fmt::Display) {
        let Some(Some(lane)) = self.lanes.get_mut(slot) else {
            return;
        };
        if !matches!(lane.state, State::Stopping(_)) {
            lane.state = State::Retired;
        }
        lane.record.count(VringEvent::Retired);
        let index = lane.index;
        self.inbox.unsettled = true;
        self.update_wish();
        self.reactor.ring(err_bell(slot as u16));
        add_to(&self.alarm, ALARM_RETIRED);
        self.log_rarely(|name| tracing::warn!("{name}: vring {index} is retired: {why}"));
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
        let error = io::Error::from_raw_os_error(errno.unwrap_or(0));
        self.log_rarely(|name| {
            tracing::warn!(
                "{name}: {verb:?} of {len_bytes} bytes at {offset_bytes} failed: {error}"
            )
        });
    }

    /// Logs at most once in [`LOG_EVERY`]: whatever is said here, a guest or a disk can cause at will.
    pub(crate) fn log_rarely(&mut self, line: impl FnOnce(&str)) {
        let now = Instant::now();
        if self
            .logged
            .is_none_or(|then| now.duration_since(then) >= LOG_EVERY)
        {
            self.logged = Some(now);
            line(self.device.disk.name());
        }
    }

    /// The frontend cut memory that we looked at: what was read there were zeroes, so nothing of this
    /// connection can be trusted. The session ends it.
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

impl<S: Store> Drop for Worker<S> {
    /// Waits for the I/O in flight. What the splitter knows is logged with the last worker.
    fn drop(&mut self) {
        self.reactor.close(&mut self.store);
        self.device.registry.leave(&self.meters.stats);
        let name = self.device.disk.name();
        self.splitting.splitter.forget(self.splitting.large);
        if self.device.registry.is_empty() {
            let states = self.splitting.splitter.states().into_iter();
            for state in states.filter(|state| state.requests >= SEEN_WORTH_TELLING) {
                tracing::info!("{name}: {state}");
            }
        }
    }
}

/// Takes chains while there is room for whole requests, and time; how many, and why no more.
#[inline]
fn take_batch<S: Store>(
    acceptance: &mut Acceptance<'_, S>,
    lane: &mut Lane,
    taking: &mut Taking,
    ops_max: usize,
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
    // No drive waits for what was done on the spot, so that has a bound of its own.
    let within = |chains: usize, ended| chains - ended < take_max && ended < at_once_max;
    while within(chains, acceptance.ended) && acceptance.store.room() >= ops_max {
        match lane.vring.take(chain) {
            Ok(None) => return (chains, Stop::Drained),
            Ok(Some(taken)) if lane.slots.is_taken(taken.head) => {
                return (chains, Stop::Breach(Breach::Head(taken.head)));
            }
            Ok(Some(taken)) => acceptance.begin(lane, taken, chain),
            Err(fault) => return (chains, Stop::Breach(Breach::Vring(fault))),
        }
        chains += 1;
        *descriptors_left = descriptors_left.saturating_sub(chain.descriptors());
        if *descriptors_left == 0 {
            return (chains, Stop::Budget);
        }
    }
    match within(chains, acceptance.ended) {
        true => (chains, Stop::Drained),
        false => (chains, Stop::Budget),
    }
}

/// Writes one of our own eventfds; full is as good as written.
pub(crate) fn signal(fd: &OwnedFd) {
    add_to(fd, 1);
}

fn add_to(fd: &OwnedFd, count: u64) {
    let _ = rustix::io::write(fd, &count.to_ne_bytes());
}
