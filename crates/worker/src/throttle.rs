//! Holds a disk to its [`Limits`], or several disks to limits that they share: QEMU's leaky buckets, shared by all workers, and
//! fair between the disks and between the vrings of each.
//!
//! A request is admitted while no bucket that it fills is above its size, and is counted afterwards; so a large one passes
//! whole, and those behind it wait for it (QEMU's `throttle_compute_wait` and `throttle_account`). A bucket leaks with the
//! clock, without a tick: a worker that must wait learns when to ask again. While several disks wait, the one that has had the
//! least goes first, and of its vrings again the one that has had the least. There is such an order for the totals, for reads and
//! for writes: a write that waits for its own buckets delays no read, whose buckets have room.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Instant;

use cleave_blk::{Request, Verb};

use crate::registry::Registry;
use crate::{Limit, LimitKind, Limits, Tuning};

/// Most vrings of a disk.
const VRINGS: usize = 256;
/// A vring that does not come for its turn within this has no requests any more, or its worker is late.
const PATIENCE_NS: u64 = 2_000_000;
/// Attempts to get the buckets. Another worker has them for a tenth of a microsecond, unless it lost its core meanwhile.
const LOCK_TRIES: u32 = 100;
const SECOND_NS: f64 = 1e9;

/// The cost of a request in each bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Demand {
    pub(crate) is_read: bool,
    /// None of a discard.
    pub(crate) bytes: u64,
}

impl Demand {
    /// The demand of a request. `None`: it is free. What a flush makes durable was counted before.
    pub(crate) fn of(request: &Request) -> Option<Demand> {
        let (is_read, bytes) = match request.verb {
            Verb::Flush | Verb::GetId => return None,
            Verb::Read => (true, request.len_bytes),
            Verb::Write | Verb::WriteZeroes { .. } => (false, request.len_bytes),
            Verb::Discard => (false, 0),
        };
        Some(Demand { is_read, bytes })
    }
}

/// Limits that several disks share: together they get what one disk would. Disks whose [`Device`](crate::Device) is in no
/// group have one of their own.
#[derive(Debug, Clone)]
pub struct LimitGroup(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// The settings of its members; a worker does not touch this.
    tuned: Mutex<Vec<(usize, Weak<Registry>)>>,
    /// Start of the clock of the buckets.
    began: Instant,
}

impl Default for LimitGroup {
    fn default() -> LimitGroup {
        LimitGroup::new(Limits::default(), Instant::now())
    }
}

impl LimitGroup {
    pub(crate) fn new(limits: Limits, began: Instant) -> LimitGroup {
        LimitGroup(Arc::new(Shared {
            state: Mutex::new(State {
                limits,
                buckets: Default::default(),
                leaked_ns: 0,
                now_served: Default::default(),
                members: Vec::new(),
                waiting: Vec::new(),
            }),
            tuned: Mutex::default(),
            began,
        }))
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.state().limits
    }

    /// How many disks share it.
    pub fn members(&self) -> usize {
        self.state().members.iter().flatten().count()
    }

    /// Other limits; as in QEMU, buckets begin empty. Turns and shares begin anew too: they are reckoned in the time that requests
    /// took under the limits before, which may have been an hour. Whether they are others.
    fn set(&self, limits: Limits) -> bool {
        let mut state = self.state();
        if state.limits == limits {
            return false;
        }
        state.limits = limits;
        state.buckets = Default::default();
        state.now_served = Default::default();
        state.waiting.clear();
        for member in state.members.iter_mut().flatten() {
            *member = Member::new();
        }
        true
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tuned(&self) -> MutexGuard<'_, Vec<(usize, Weak<Registry>)>> {
        self.0.tuned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk's place among those that share its limits. A worker never waits for the lock: a request is asked for again instead.
#[derive(Debug)]
pub(crate) struct Throttle {
    group: LimitGroup,
    member: usize,
    /// From the disk's clock to that of the buckets.
    ahead_ns: i64,
}

impl Throttle {
    /// Joins a group; `began` is the start of the disk's clock.
    pub(crate) fn join(group: &LimitGroup, registry: &Arc<Registry>, began: Instant) -> Throttle {
        let member = group.state().add_member();
        group.tuned().push((member, Arc::downgrade(registry)));
        let ahead = began.saturating_duration_since(group.0.began).as_nanos() as i64;
        let behind = group.0.began.saturating_duration_since(began).as_nanos() as i64;
        Throttle {
            group: group.clone(),
            member,
            ahead_ns: ahead - behind,
        }
    }

    /// Other limits for all disks of the group: those of the last one that sets them are in force. The workers of the other
    /// disks are woken to adopt them.
    pub(crate) fn set(&self, limits: Limits) {
        if !self.group.set(limits) {
            return;
        }
        for (member, registry) in self.group.tuned().iter() {
            if *member != self.member
                && let Some(registry) = registry.upgrade()
            {
                let tuning = Tuning {
                    limits,
                    ..registry.tuning().as_ref().clone()
                };
                registry.tune(tuning);
            }
        }
    }

    /// Admits a request of a vring and counts it; otherwise the time at which to ask again, which is `now_ns` if the buckets are
    /// in use.
    pub(crate) fn admit(&self, vring: u16, demand: Demand, now_ns: u64) -> Result<(), u64> {
        let Some(mut state) = self.try_lock() else {
            return Err(now_ns);
        };
        let now_ns = now_ns.saturating_add_signed(self.ahead_ns);
        let asker = Asker {
            member: self.member,
            vring: usize::from(vring) % VRINGS,
        };
        let asked = state.admit(asker, demand, now_ns);
        asked.map_err(|due_ns| due_ns.saturating_add_signed(-self.ahead_ns))
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        for _ in 0..LOCK_TRIES {
            match self.group.0.state.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.group.state().remove_member(self.member);
        self.group
            .tuned()
            .retain(|(member, _)| *member != self.member);
    }
}

#[derive(Debug)]
struct State {
    limits: Limits,
    buckets: [Bucket; LimitKind::COUNT],
    /// Up to then the buckets have leaked.
    leaked_ns: u64,
    /// Service of the disk that was admitted last, by [`Class`]. A disk that begins to wait starts from there.
    now_served: [f64; Class::COUNT],
    /// The disks; one that left leaves its place to the next.
    members: Vec<Option<Member>>,
    /// The vrings that were told to ask again. It has room for all, so a worker allocates nothing.
    waiting: Vec<Asker>,
}

/// Units above what has leaked away.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    level: f64,
    /// The same against the burst's own rate.
    burst_level: f64,
}

/// The buckets that requests of a direction have in common. Those that wait for one class have their turn among themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Total,
    Read,
    Write,
}

impl Class {
    const COUNT: usize = 3;

    /// The classes of a request.
    fn of(is_read: bool) -> [Class; 2] {
        match is_read {
            true => [Class::Total, Class::Read],
            false => [Class::Total, Class::Write],
        }
    }

    fn kinds(self) -> [LimitKind; 2] {
        match self {
            Class::Total => [LimitKind::BpsTotal, LimitKind::IopsTotal],
            Class::Read => [LimitKind::BpsRead, LimitKind::IopsRead],
            Class::Write => [LimitKind::BpsWrite, LimitKind::IopsWrite],
        }
    }
}

/// A disk among those that share the buckets.
#[derive(Debug)]
struct Member {
    /// By [`Class`].
    service: [Service; Class::COUNT],
    /// How many of its vrings wait for each.
    waiting: [usize; Class::COUNT],
    /// As [`State::now_served`], between its vrings.
    now_served: [f64; Class::COUNT],
    turns: Box<[Turn; VRINGS]>,
}

impl Member {
    fn new() -> Member {
        Member {
            service: Default::default(),
            waiting: Default::default(),
            now_served: Default::default(),
            turns: Box::new([Turn::default(); VRINGS]),
        }
    }
}

/// A vring of a disk.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    service: [Service; Class::COUNT],
    /// It was told to ask again at this time, because of this class.
    due: Option<(u64, Class)>,
}

/// The share of the buckets of a class that a disk or a vring has had.
#[derive(Debug, Clone, Copy, Default)]
struct Service {
    /// In nanoseconds of the bucket that its requests fill most.
    served: f64,
    /// Of its last request.
    last: f64,
}

impl Service {
    fn add(&mut self, cost: f64) {
        self.served += cost;
        self.last = cost;
    }

    /// How much longer one waits that has had `served`, if this one waits too: those go first that have had less.
    fn before(self, served: f64) -> f64 {
        match self.served < served {
            true => self.last.max(1.0),
            false => 0.0,
        }
    }
}

/// A vring of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asker {
    member: usize,
    vring: usize,
}

impl State {
    fn add_member(&mut self) -> usize {
        let member = Member::new();
        let free = self.members.iter().position(Option::is_none);
        let place = free.unwrap_or(self.members.len());
        match self.members.get_mut(place) {
            Some(empty) => *empty = Some(member),
            None => self.members.push(Some(member)),
        }
        let room = (self.members.len() * VRINGS).saturating_sub(self.waiting.len());
        self.waiting.reserve(room);
        place
    }

    fn remove_member(&mut self, place: usize) {
        self.waiting.retain(|asker| asker.member != place);
        if let Some(member) = self.members.get_mut(place) {
            *member = None;
        }
    }

    fn admit(&mut self, asker: Asker, demand: Demand, now_ns: u64) -> Result<(), u64> {
        self.leak(now_ns);
        self.forget_late(asker, now_ns);
        let classes = Class::of(demand.is_read);
        let mut longest = (0.0, Class::Total);
        for class in classes {
            self.bring_up(asker, class);
            let wait_ns = self.wait_ns(class) + self.before(asker, class);
            if wait_ns > longest.0 {
                longest = (wait_ns, class);
            }
        }
        let (wait_ns, class) = longest;
        if wait_ns > 0.0 {
            // A float's cast saturates. At least a nanosecond, or it would ask in vain.
            let due_ns = now_ns.saturating_add((wait_ns as u64).max(1));
            self.leave(asker);
            self.wait(asker, due_ns, class);
            return Err(due_ns);
        }
        self.leave(asker);
        for class in classes {
            let cost = self.count(class, demand);
            if let Some(Some(member)) = self.members.get_mut(asker.member) {
                let (at, turn) = (class as usize, &mut member.turns[asker.vring]);
                self.now_served[at] = self.now_served[at].max(member.service[at].served);
                member.now_served[at] = member.now_served[at].max(turn.service[at].served);
                member.service[at].add(cost);
                turn.service[at].add(cost);
            }
        }
        Ok(())
    }

    /// One that had nothing to do for a while has no claim to what it did not use.
    fn bring_up(&mut self, asker: Asker, class: Class) {
        let Some(Some(member)) = self.members.get_mut(asker.member) else {
            return;
        };
        let (at, turn) = (class as usize, &mut member.turns[asker.vring]);
        if member.waiting[at] == 0 {
            let served = &mut member.service[at].served;
            *served = served.max(self.now_served[at]);
        }
        if turn.due.is_none_or(|(_, waits_for)| waits_for != class) {
            let served = &mut turn.service[at].served;
            *served = served.max(member.now_served[at]);
        }
    }

    /// Notes that a vring waits.
    fn wait(&mut self, asker: Asker, due_ns: u64, class: Class) {
        if let Some(Some(member)) = self.members.get_mut(asker.member) {
            member.turns[asker.vring].due = Some((due_ns, class));
            member.waiting[class as usize] += 1;
            self.waiting.push(asker);
        }
    }

    /// Notes that a vring does not wait.
    fn leave(&mut self, asker: Asker) {
        if let Some(Some(member)) = self.members.get_mut(asker.member)
            && let Some((_, class)) = member.turns[asker.vring].due.take()
        {
            member.waiting[class as usize] -= 1;
            self.waiting.retain(|other| *other != asker);
        }
    }

    /// Those that did not come for their turn have no more claim to it.
    fn forget_late(&mut self, asker: Asker, now_ns: u64) {
        let members = &mut self.members;
        self.waiting.retain(|other| {
            let Some(Some(member)) = members.get_mut(other.member) else {
                return false;
            };
            let turn = &mut member.turns[other.vring];
            let is_late = |due_ns: u64| due_ns.saturating_add(PATIENCE_NS) < now_ns;
            match turn.due {
                Some((due_ns, class)) if *other != asker && is_late(due_ns) => {
                    turn.due = None;
                    member.waiting[class as usize] -= 1;
                    false
                }
                _ => true,
            }
        });
    }

    /// Time for those that wait for a class and have had less of it. Each such disk has one request before this one, and so has
    /// each such vring of this disk.
    fn before(&self, asker: Asker, class: Class) -> f64 {
        let Some(Some(own)) = self.members.get(asker.member) else {
            return 0.0;
        };
        let at = class as usize;
        let of_disk = own.service[at].served;
        let of_vring = own.turns[asker.vring].service[at].served;
        let mut before_ns = 0.0;
        for (place, member) in self.members.iter().enumerate() {
            match member {
                Some(member) if place != asker.member && member.waiting[at] > 0 => {
                    before_ns += member.service[at].before(of_disk);
                }
                _ => {}
            }
        }
        let others = self.waiting.iter();
        let others = others.filter(|other| other.member == asker.member && **other != asker);
        let turns = others.map(|other| &own.turns[other.vring]);
        let turns = turns.filter(|turn| turn.due.is_some_and(|(_, waits_for)| waits_for == class));
        before_ns
            + turns
                .map(|turn| turn.service[at].before(of_vring))
                .sum::<f64>()
    }

    fn leak(&mut self, now_ns: u64) {
        let seconds = now_ns.saturating_sub(self.leaked_ns) as f64 / SECOND_NS;
        self.leaked_ns = self.leaked_ns.max(now_ns);
        for kind in LimitKind::ALL {
            let Limit { average, max, .. } = self.limits.of(kind);
            let bucket = &mut self.buckets[kind as usize];
            bucket.level = (bucket.level - average as f64 * seconds).max(0.0);
            bucket.burst_level = (bucket.burst_level - max as f64 * seconds).max(0.0);
        }
    }

    /// How long the fullest of the buckets of a class needs.
    fn wait_ns(&self, class: Class) -> f64 {
        let waits = class
            .kinds()
            .map(|kind| self.buckets[kind as usize].wait_ns(self.limits.of(kind)));
        waits.into_iter().fold(0.0, f64::max)
    }

    /// Counts a request; how long the fullest of the buckets of a class takes to leak it.
    fn count(&mut self, class: Class, demand: Demand) -> f64 {
        let mut most_ns = 0.0_f64;
        let size = self.limits.iops_size as f64;
        let operations = match self.limits.iops_size {
            0 => 1.0,
            _ => (demand.bytes as f64 / size).max(1.0),
        };
        for kind in class.kinds() {
            let limit = self.limits.of(kind);
            if limit.average == 0 {
                continue;
            }
            let units = match kind {
                LimitKind::BpsTotal | LimitKind::BpsRead | LimitKind::BpsWrite => {
                    demand.bytes as f64
                }
                _ => operations,
            };
            let bucket = &mut self.buckets[kind as usize];
            bucket.level += units;
            if limit.max_length > 1 {
                bucket.burst_level += units;
            }
            most_ns = most_ns.max(units / limit.average as f64 * SECOND_NS);
        }
        most_ns
    }
}

impl Bucket {
    fn wait_ns(self, limit: Limit) -> f64 {
        let Limit {
            average,
            max,
            max_length,
        } = limit;
        if average == 0 {
            return 0.0;
        }
        let (average, max) = (average as f64, max as f64);
        let (size, burst_size) = match max > 0.0 {
            // A burst is over when all of it has been done at the burst's rate.
            true => (max * max_length.max(1) as f64, max / 10.0),
            // Without one, a tenth of a second's worth, or every other request would wait.
            false => (average / 10.0, 0.0),
        };
        let extra = self.level - size;
        if extra > 0.0 {
            return extra * SECOND_NS / average;
        }
        let extra = self.burst_level - burst_size;
        match max_length > 1 && extra > 0.0 {
            true => extra * SECOND_NS / max,
            false => 0.0,
        }
    }
}

#[cfg(test)]
mod tests;
