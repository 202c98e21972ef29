//! The loop.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind, Verb};
use cleave_engine::{Engine, Event, Wait};
use cleave_guest::{Chain, Memory};

use crate::accept::{Acceptance, answer, nanoseconds};
use crate::command::Commands;
use crate::lane::{Lane, State};
use crate::pacer::{Pace, Pacer, Seen};
use crate::slots::{Ended, Next, Timing};
use crate::stats::{Stats, add};
use crate::token::Token;
use crate::{Device, Split, Splitter};

/// Most vrings that one worker serves: a device has at most this many.
pub const LANES_MAX: u16 = 256;
/// Chains taken from one vring before the others have their turn; bounds how long a completion waits
/// behind acceptance.
const TAKE_MAX: usize = 64;
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

/// Watch slots that a worker needs of its engine.
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

/// What one round of acceptance did.
#[derive(Debug, Clone, Copy, Default)]
struct Took {
    chains: usize,
    /// The budget ended before the ring did.
    more: bool,
}

/// What became of a turn of the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lap {
    /// Turn again.
    Again,
    /// Control asked for the end, and everything is drained.
    Ended,
}

/// Serves some vrings of one device on one engine. `lap` until [`Lap::Ended`].
pub struct Worker<E> {
    pub(crate) engine: E,
    pub(crate) device: Arc<Device>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) pacer: Pacer,
    pub(crate) stats: Arc<Stats>,
    pub(crate) commands: Commands,
    pub(crate) alarm: Arc<OwnedFd>,
    pub(crate) lanes: Vec<Option<Lane>>,
    /// Lane that accepts first: the one behind that which took the engine's last room, or a busy vring
    /// would keep those behind it from ever being served.
    pub(crate) first: usize,
    pub(crate) chain: Chain,
    /// Waiters for the old memory to be let go.
    pub(crate) binds: Vec<SyncSender<()>>,
    /// Control has something under way: do not sleep before it is looked at.
    pub(crate) busy_control: bool,
    /// Vrings that control waits for.
    pub(crate) stopping: usize,
    pub(crate) exiting: bool,
    pub(crate) lost: bool,
    pub(crate) said: Option<Instant>,
    pub(crate) splitter: Splitter,
    /// The splitter's time runs from here.
    pub(crate) clock: Instant,
    /// Requests in flight on all vrings.
    pub(crate) requests: u32,
}

impl<E: Engine> Worker<E> {
    /// Puts a worker together; `engine` must be bound to `memory`.
    pub fn new(
        mut engine: E,
        device: Arc<Device>,
        memory: Arc<Memory>,
        stats: Arc<Stats>,
        commands: Commands,
        alarm: Arc<OwnedFd>,
    ) -> io::Result<Worker<E>> {
        let learnt = device.learnt.take();
        let splitter = learnt.unwrap_or_else(|| Splitter::new(device.config.split.clone()));
        engine.watch(COMMAND_WATCH, commands.bell.try_clone()?);
        Ok(Worker {
            engine,
            pacer: Pacer::new(device.config.completion),
            device,
            memory,
            stats,
            commands,
            alarm,
            lanes: Vec::new(),
            first: 0,
            chain: Chain::new(),
            binds: Vec::new(),
            busy_control: true,
            stopping: 0,
            exiting: false,
            lost: false,
            said: None,
            splitter,
            clock: Instant::now(),
            requests: 0,
        })
    }

    /// One turn: reap, publish, accept, and what could be done on the spot; then at most one
    /// system call, which sleeps if the pacer says so and nothing came in meanwhile.
    pub fn lap(&mut self) -> io::Result<Lap> {
        let reaped = self.reap();
        self.publish();
        let took = self.accept();
        let at_once = if took.chains > 0 { self.reap() } else { 0 };
        self.publish();
        if took.chains + reaped + at_once > 0 {
            add(&self.stats.laps, 1);
        }
        if self.memory.is_lost() {
            self.lose_memory();
        }
        let wait = self.pace(took.more);
        if wait == Wait::No && took.chains + reaped + at_once == 0 {
            std::hint::spin_loop();
        }
        self.engine.enter(wait)?;
        if self.busy_control || self.waits() {
            return Ok(self.control());
        }
        Ok(Lap::Again)
    }

    /// Collects what has ended; how many events there were.
    fn reap(&mut self) -> usize {
        let mut events = 0;
        while let Some(event) = self.engine.reap() {
            events += 1;
            match event {
                Event::Done { token, result } => self.op_ended(Token::from_bits(token), result),
                Event::Woken {
                    slot: COMMAND_WATCH,
                } => self.busy_control = true,
                // A kick only ends the sleep: every lap looks at every ring.
                Event::Woken { .. } => {}
            }
        }
        events
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
            return self
                .engine
                .push(Op { leg, ..SYNC }, Token { op, ..token }.to_bits());
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
                return self.engine.push(SYNC, token.to_bits());
            }
        };
        self.requests = self.requests.saturating_sub(1);
        if let Some(Timing { choice, start_ns }) = ended.timing
            && choice.is_timed()
        {
            let now_ns = nanoseconds(self.clock);
            let latency_ns = now_ns.saturating_sub(start_ns);
            self.splitter
                .ended(choice, ended.len_bytes, latency_ns, now_ns);
        }
        count(&self.stats, &ended);
        let used = answer(&self.memory, ended.status_addr, ended.outcome);
        lane.push_used(token.head, used);
        if ended.errno.is_some() {
            self.report(&ended);
        }
    }

    /// Shows the guest all that was pushed: one index store and at most one call a vring.
    fn publish(&mut self) {
        for (slot, lane) in (0..).zip(&mut self.lanes) {
            let Some(lane) = lane else { continue };
            if !lane.dirty {
                continue;
            }
            lane.dirty = false;
            if lane.vring.publish() {
                add(&self.stats.calls, 1);
                self.engine.ring(call_bell(slot));
            }
        }
    }

    /// Takes what is available, as far as there is room for whole requests.
    fn accept(&mut self) -> Took {
        let mut took = Took::default();
        let count = self.lanes.len();
        let first = if self.first < count { self.first } else { 0 };
        for slot in (first..count).chain(0..first) {
            let had_room = self.has_room();
            let more = self.accept_lane(slot);
            took.chains += more.chains;
            took.more |= more.more;
            if had_room && !self.has_room() {
                self.first = slot + 1;
            }
        }
        took
    }

    fn has_room(&self) -> bool {
        self.engine.room() >= self.device.ops_max()
    }

    fn accept_lane(&mut self, slot: usize) -> Took {
        let Worker {
            lanes,
            engine,
            device,
            memory,
            stats,
            chain,
            splitter,
            clock,
            requests,
            ..
        } = self;
        let Some(Some(lane)) = lanes.get_mut(slot) else {
            return Took::default();
        };
        if !lane.is_running() {
            return Took::default();
        }
        let mut acceptance = Acceptance {
            engine,
            device,
            memory,
            stats,
            lane_number: slot as u16,
            splitter,
            clock: *clock,
            requests,
        };
        let ops_max = device.ops_max();
        let mut chains = 0;
        while chains < TAKE_MAX && acceptance.engine.room() >= ops_max {
            match lane.vring.take(chain) {
                Ok(None) => {
                    return Took {
                        chains,
                        more: false,
                    };
                }
                Ok(Some(taken)) if lane.slots.is_taken(taken.head) => {
                    self.retire(
                        slot,
                        &format_args!("head {} is in flight already", taken.head),
                    );
                    return Took {
                        chains,
                        more: false,
                    };
                }
                Ok(Some(taken)) => acceptance.begin(lane, taken, chain),
                Err(fault) => {
                    self.retire(slot, &fault);
                    return Took {
                        chains,
                        more: false,
                    };
                }
            }
            chains += 1;
        }
        // Out of room the engine's completions end the sleep; out of budget nothing would.
        Took {
            chains,
            more: chains == TAKE_MAX,
        }
    }

    /// How the coming `enter` may wait.
    fn pace(&mut self, more: bool) -> Wait {
        let mut seen = Seen {
            ready: more || self.busy_control || self.is_due(),
            serving: false,
            kickless: false,
        };
        for lane in self.lanes.iter().flatten() {
            seen.serving |= lane.is_running();
            seen.kickless |= lane.is_running() && !lane.has_kick;
        }
        match self.pacer.next(seen) {
            Pace::Spin => Wait::No,
            Pace::Sleep if self.arm() => Wait::No,
            Pace::Sleep => Wait::Until(None),
        }
    }

    /// Asks all guests for kicks; `true` when one had added work before it could see that.
    fn arm(&mut self) -> bool {
        let (engine, device) = (&self.engine, &self.device);
        let mut work = false;
        for lane in self.lanes.iter_mut().flatten() {
            // With the engine full, completions come first and every lap looks at the rings again.
            let ops_max = device.ops_max();
            if lane.is_running() && engine.room() >= ops_max {
                work |= lane.vring.arm();
            }
        }
        work
    }

    /// Stops serving a vring whose guest broke it. What is in flight still ends.
    pub(crate) fn retire(&mut self, slot: usize, why: &dyn std::fmt::Display) {
        let Some(Some(lane)) = self.lanes.get_mut(slot) else {
            return;
        };
        if matches!(lane.state, State::Running | State::Disabled) {
            lane.state = State::Retired;
        }
        let index = lane.index;
        add(&self.stats.retired, 1);
        self.engine.ring(err_bell(slot as u16));
        self.say(|name| tracing::warn!("{name}: vring {index} is retired: {why}"));
    }

    fn report(&mut self, ended: &Ended) {
        let Ended {
            verb,
            offset_bytes,
            len_bytes,
            errno,
            ..
        } = *ended;
        let error = io::Error::from_raw_os_error(errno.unwrap_or(0));
        self.say(|name| {
            tracing::warn!(
                "{name}: {verb:?} of {len_bytes} bytes at {offset_bytes} failed: {error}"
            )
        });
    }

    /// Logs at most once in [`LOG_EVERY`]: whatever is said here, a guest or a disk can cause at will.
    fn say(&mut self, line: impl FnOnce(&str)) {
        let now = Instant::now();
        if self
            .said
            .is_none_or(|then| now.duration_since(then) >= LOG_EVERY)
        {
            self.said = Some(now);
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

impl<E> Drop for Worker<E> {
    /// What was learnt about splitting stays with the device, and what came of it is told.
    fn drop(&mut self) {
        let name = self.device.disk.name();
        for state in self.splitter.states() {
            if state.seen >= SEEN_WORTH_TELLING {
                tracing::info!("{name}: {state}");
            }
        }
        let blank = Splitter::new(Split::Off);
        self.device
            .learnt
            .keep(std::mem::replace(&mut self.splitter, blank));
    }
}

/// Counts a request that has ended.
fn count(stats: &Stats, ended: &Ended) {
    if ended.errno.is_some() {
        return add(&stats.failed, 1);
    }
    match ended.verb {
        Verb::Read => {
            add(&stats.reads, 1);
            add(&stats.read_bytes, ended.len_bytes);
        }
        Verb::Write => {
            add(&stats.writes, 1);
            add(&stats.write_bytes, ended.len_bytes);
        }
        _ => add(&stats.others, 1),
    }
}

/// Writes one of our own eventfds; full is as good as written.
pub(crate) fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}
