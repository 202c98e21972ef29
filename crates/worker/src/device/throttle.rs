//! Holds a disk to its [`RateLimits`], or several disks to limits that they share: QEMU's leaky buckets, shared by all workers, and
//! fair between the disks and between the vrings of each.
//!
//! A request is admitted while no bucket that it fills is above its size, and is counted afterwards. So a large request passes
//! whole, and the requests after it wait for it (QEMU's `throttle_compute_wait` and `throttle_account`). A bucket leaks with the
//! clock, without a tick: a worker that must wait is told when to ask again.
//!
//! That time is a reservation: the request is admitted if the worker asks then, or later, whichever requests came meanwhile. Each
//! disk, and each vring of a disk, has an account of the service that it had. The time is the one at which the buckets have room,
//! and all others that wait and had less service have caught up. A worker that is late keeps its claim, because the others leave
//! room for it. If it never asks, the others find that room when they ask. So a late worker does not cost the disk throughput.
//! The totals, reads and writes each have such an order: a write that waits for the buckets of writes does not delay a read whose
//! buckets have room.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Instant;

use cleave_blk::{Request, Verb};

use super::registry::Registry;
use crate::clock::nanoseconds;
use crate::{Limit, LimitKind, RateLimits, Tuning};

/// Most vrings of a disk.
pub(crate) const VRINGS: usize = 256;
/// How late a vring may be until the others stop leaving room for it. After that it probably has no requests any more.
const PATIENCE_NS: u64 = 20_000_000;
/// Longest wait for others that may go first while the buckets have room. An empty bucket holds as much, and what leaks after
/// that is lost if the others do not ask.
const ROOM_NS: f64 = 100_000_000.0;
/// Attempts to get the buckets. Another worker has them for a tenth of a microsecond, unless it lost its core meanwhile.
const LOCK_TRIES: u32 = 100;
const SECOND_NS: f64 = 1e9;

/// The cost of a request in each bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Demand {
    pub(crate) is_read: bool,
    /// Bytes that count; none of a discard.
    pub(crate) bytes: u64,
}

impl Demand {
    /// Returns the demand of a request. `None`: it is free. What a flush makes durable was counted before.
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

/// The levels of the buckets of each kind of limit: that of the limit, and that of its burst.
pub type LimitLevels = [[f64; 2]; LimitKind::COUNT];

/// Limits that several disks share: together they get what one disk would. A disk whose [`Device`](crate::Device) is not
/// in a group has one of its own.
#[derive(Debug, Clone)]
pub struct LimitGroup(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<GroupState>,
    /// The settings of its members; a worker does not touch this.
    tuned: Mutex<Vec<(usize, Weak<Registry>)>>,
    /// Start of the clock of the buckets.
    began: Instant,
}

impl Default for LimitGroup {
    fn default() -> LimitGroup {
        LimitGroup::new(RateLimits::default(), Instant::now())
    }
}

impl LimitGroup {
    pub(crate) fn new(limits: RateLimits, began: Instant) -> LimitGroup {
        LimitGroup(Arc::new(Shared {
            state: Mutex::new(GroupState {
                limits,
                buckets: Default::default(),
                leaked_ns: 0,
                least_served: Default::default(),
                members: Vec::new(),
            }),
            tuned: Mutex::default(),
            began,
        }))
    }

    /// Returns the limits in force.
    pub fn limits(&self) -> RateLimits {
        self.state().limits
    }

    /// Returns the levels of its buckets now.
    pub(crate) fn levels(&self) -> LimitLevels {
        self.state().levels(nanoseconds(self.0.began))
    }

    /// Raises its buckets to the levels that they had in another process. A bucket that is fuller stays as it is.
    pub(crate) fn fill(&self, levels: &LimitLevels) {
        self.state().fill(levels, nanoseconds(self.0.began));
    }

    /// Returns how many disks share it.
    pub fn members(&self) -> usize {
        let state = self.state();
        state.members.iter().filter(|member| member.is_here).count()
    }

    /// Puts `limits` in force for all disks of the group, whose workers are woken to adopt them.
    pub fn set(&self, limits: RateLimits) {
        if !self.renew(limits) {
            return;
        }
        for (_, registry) in self.tuned().iter() {
            if let Some(registry) = registry.upgrade() {
                let tuning = Tuning {
                    limits,
                    ..registry.tuning().as_ref().clone()
                };
                registry.tune(tuning);
            }
        }
    }

    /// Replaces the limits. Returns false if they were in force already. As in QEMU, the buckets begin empty. Reservations and shares
    /// begin anew too, because they are measured in the time that requests took under the old limits, which may have been an hour.
    fn renew(&self, limits: RateLimits) -> bool {
        let mut state = self.state();
        if state.limits == limits {
            return false;
        }
        state.limits = limits;
        state.buckets = Default::default();
        state.least_served = Default::default();
        for member in &mut state.members {
            member.begin_anew();
        }
        true
    }

    fn state(&self) -> MutexGuard<'_, GroupState> {
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
    /// Nanoseconds to add to a time on the disk's clock for one on the buckets'.
    ahead_ns: i64,
}

impl Throttle {
    /// Joins a group; `began` is the start of the disk's clock.
    pub(crate) fn join(group: &LimitGroup, registry: &Arc<Registry>, began: Instant) -> Throttle {
        // For both steps, as in `drop`: the place that one leaves is the next one's at once.
        let mut tuned = group.tuned();
        let member = group.state().add_member();
        tuned.push((member, Arc::downgrade(registry)));
        drop(tuned);
        let ahead = began.saturating_duration_since(group.0.began).as_nanos() as i64;
        let behind = group.0.began.saturating_duration_since(began).as_nanos() as i64;
        Throttle {
            group: group.clone(),
            member,
            ahead_ns: ahead - behind,
        }
    }

    /// Returns the limits that it shares.
    pub(crate) fn group(&self) -> &LimitGroup {
        &self.group
    }

    /// Puts `limits` in force for all disks of the group.
    pub(crate) fn set(&self, limits: RateLimits) {
        self.group.set(limits);
    }

    /// Admits a request of a vring and counts it. `Err`: the time at which to ask again, which is `now_ns` if the buckets are in
    /// use.
    pub(crate) fn admit(&self, vring: u16, demand: Demand, now_ns: u64) -> Result<(), u64> {
        let Some(mut state) = self.try_lock() else {
            return Err(now_ns);
        };
        let now_ns = now_ns.saturating_add_signed(self.ahead_ns);
        let asked = state.admit(self.asker(vring), demand, now_ns);
        asked.map_err(|due_ns| due_ns.saturating_add_signed(-self.ahead_ns))
    }

    /// Gives up what was reserved for a vring that is not served any more. If the buckets are in use, its claim ends with
    /// [`PATIENCE_NS`].
    pub(crate) fn leave(&self, vring: u16) {
        let asker = self.asker(vring);
        if let Some(mut state) = self.try_lock() {
            state.members[asker.member].leave(asker.vring);
        }
    }

    fn asker(&self, vring: u16) -> Asker {
        Asker {
            member: self.member,
            vring: usize::from(vring) % VRINGS,
        }
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, GroupState>> {
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
        let mut tuned = self.group.tuned();
        self.group.state().remove_member(self.member);
        tuned.retain(|(member, _)| *member != self.member);
    }
}

#[derive(Debug)]
struct GroupState {
    limits: RateLimits,
    buckets: [Bucket; LimitKind::COUNT],
    /// Time up to which the buckets have leaked.
    leaked_ns: u64,
    /// The least service of the disks that wait, by [`Class`]. A disk that was idle starts from there.
    least_served: [f64; Class::COUNT],
    /// The disks; one that left leaves its place to the next.
    members: Vec<GroupMember>,
}

/// Units above what has leaked away.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    level: f64,
    /// Units above what has leaked away at the burst's own rate.
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

    /// Returns the classes of a request.
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

/// A vring of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asker {
    member: usize,
    vring: usize,
}

/// A disk among those that share the buckets.
#[derive(Debug)]
struct GroupMember {
    is_here: bool,
    accounts: [Account; Class::COUNT],
    /// The least service of its vrings that wait, as [`GroupState::least_served`].
    least_served: [f64; Class::COUNT],
    vrings: Box<[Vring; VRINGS]>,
    /// Index of the first vring that has never had a request, nor has any after it.
    vrings_used: usize,
}

/// A vring of a disk.
#[derive(Debug, Clone, Copy, Default)]
struct Vring {
    accounts: [Account; Class::COUNT],
    /// The request that it waits with, and the time at which to ask again for it.
    waiting: Option<WaitingRequest>,
}

#[derive(Debug, Clone, Copy)]
struct WaitingRequest {
    due_ns: u64,
    /// The class for which it waits longest.
    class: Class,
    is_read: bool,
    /// True if it is admitted at `due_ns` in any case. Otherwise it is judged again then: the others that may come first are more
    /// than it can wait for at once.
    is_reserved: bool,
}

/// The service that a disk or a vring had from the buckets of a class, and what it may still claim.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    /// Service, in nanoseconds of the bucket that its requests fill most.
    served: f64,
    /// The cost of its request that waits, if that has a reservation.
    reserved: f64,
    /// Time up to which others leave it room, while it waits; otherwise 0.
    claims_until_ns: u64,
}

impl WaitingRequest {
    fn admits(self, demand: Demand, now_ns: u64) -> bool {
        self.is_reserved && self.due_ns <= now_ns && self.is_read == demand.is_read
    }
}

impl Account {
    fn claims(&self, now_ns: u64) -> bool {
        self.claims_until_ns > now_ns
    }

    /// Returns the service that this account may have before one that has had `served`: its request that waits, and more until
    /// it has had as much.
    fn before(&self, served: f64) -> f64 {
        match self.served <= served {
            true => self.reserved.max(served - self.served),
            false => 0.0,
        }
    }
}

impl GroupMember {
    fn new() -> GroupMember {
        GroupMember {
            is_here: true,
            accounts: Default::default(),
            least_served: Default::default(),
            vrings: Box::new([Vring::default(); VRINGS]),
            vrings_used: 0,
        }
    }

    /// Forgets what it and its vrings had and claim.
    fn begin_anew(&mut self) {
        self.accounts = Default::default();
        self.least_served = Default::default();
        self.vrings.fill(Vring::default());
        self.vrings_used = 0;
    }

    /// Returns the accounts of its vrings that wait for a class.
    fn claims(&self, class: Class, now_ns: u64) -> impl Iterator<Item = &Account> {
        let at = class as usize;
        let used = match self.accounts[at].claims(now_ns) {
            true => self.vrings_used,
            false => 0,
        };
        let accounts = self.vrings[..used]
            .iter()
            .map(move |vring| &vring.accounts[at]);
        accounts.filter(move |account| account.claims(now_ns))
    }

    fn wait(&mut self, vring: usize, waiting: WaitingRequest, cost: f64) {
        self.vrings[vring].waiting = Some(waiting);
        let account = &mut self.vrings[vring].accounts[waiting.class as usize];
        account.claims_until_ns = waiting.due_ns.saturating_add(PATIENCE_NS);
        account.reserved = if waiting.is_reserved { cost } else { 0.0 };
        self.sum_up(waiting.class);
    }

    /// Ends the wait of a vring. Returns the request that waited, if one did.
    fn leave(&mut self, vring: usize) -> Option<WaitingRequest> {
        let waiting = self.vrings[vring].waiting.take()?;
        let account = &mut self.vrings[vring].accounts[waiting.class as usize];
        (account.claims_until_ns, account.reserved) = (0, 0.0);
        self.sum_up(waiting.class);
        Some(waiting)
    }

    /// Sums up the waits of the vrings: a disk waits as long as one of its vrings does.
    fn sum_up(&mut self, class: Class) {
        let own = &mut self.accounts[class as usize];
        (own.claims_until_ns, own.reserved) = (0, 0.0);
        for vring in &self.vrings[..self.vrings_used] {
            let account = vring.accounts[class as usize];
            own.claims_until_ns = own.claims_until_ns.max(account.claims_until_ns);
            own.reserved = own.reserved.max(account.reserved);
        }
    }
}

impl GroupState {
    fn add_member(&mut self) -> usize {
        let free = self.members.iter().position(|member| !member.is_here);
        let place = free.unwrap_or(self.members.len());
        match self.members.get_mut(place) {
            Some(member) => member.is_here = true,
            None => self.members.push(GroupMember::new()),
        }
        place
    }

    fn remove_member(&mut self, place: usize) {
        let member = &mut self.members[place];
        member.is_here = false;
        member.begin_anew();
    }

    fn admit(&mut self, asker: Asker, demand: Demand, now_ns: u64) -> Result<(), u64> {
        self.leak(now_ns);
        let member = &mut self.members[asker.member];
        member.vrings_used = member.vrings_used.max(asker.vring + 1);
        let waiting = member.leave(asker.vring);
        if !waiting.is_some_and(|waiting| waiting.admits(demand, now_ns))
            && let Some(waiting) = self.judge(asker, demand, now_ns)
        {
            let cost = self.cost(waiting.class, demand);
            self.members[asker.member].wait(asker.vring, waiting, cost);
            return Err(waiting.due_ns);
        }
        for class in Class::of(demand.is_read) {
            self.serve(asker, class, demand, now_ns);
        }
        Ok(())
    }

    /// Returns the request as one that waits. `None`: it may go now.
    fn judge(&mut self, asker: Asker, demand: Demand, now_ns: u64) -> Option<WaitingRequest> {
        let mut longest = None;
        let mut longest_ns = 0.0;
        for class in Class::of(demand.is_read) {
            self.bring_up(asker, class);
            let ahead_ns = self.ahead_ns(asker, class, now_ns);
            let wait_ns = self.wait_ns(class, ahead_ns.min(ROOM_NS));
            if wait_ns > longest_ns {
                longest_ns = wait_ns;
                longest = Some(WaitingRequest {
                    // A float's cast saturates. At least a nanosecond, or it would ask too early.
                    due_ns: now_ns.saturating_add((wait_ns as u64).max(1)),
                    class,
                    is_read: demand.is_read,
                    is_reserved: ahead_ns <= ROOM_NS,
                });
            }
        }
        longest
    }

    /// Raises the service of a vring that was idle, and of its disk, to the least of those that wait: there is no claim to what
    /// was not used.
    fn bring_up(&mut self, asker: Asker, class: Class) {
        let at = class as usize;
        let member = &mut self.members[asker.member];
        let vring = &mut member.vrings[asker.vring].accounts[at];
        vring.served = vring.served.max(member.least_served[at]);
        let disk = &mut member.accounts[at];
        disk.served = disk.served.max(self.least_served[at]);
    }

    /// Returns what others that wait for a class may have first: the vrings of the disk until they have had as much as this one,
    /// and the other disks until they have had as much as this disk will have had then.
    fn ahead_ns(&self, asker: Asker, class: Class, now_ns: u64) -> f64 {
        let own = &self.members[asker.member];
        let served = own.vrings[asker.vring].accounts[class as usize].served;
        let vrings = own.claims(class, now_ns);
        let vrings_ns: f64 = vrings.map(|other| other.before(served)).sum();
        let served = own.accounts[class as usize].served + vrings_ns;
        let disks = self.claims_of_others(asker, class, now_ns);
        vrings_ns + disks.map(|other| other.before(served)).sum::<f64>()
    }

    /// Returns the accounts of the other disks that wait for a class.
    fn claims_of_others(
        &self,
        asker: Asker,
        class: Class,
        now_ns: u64,
    ) -> impl Iterator<Item = &Account> {
        let members = self.members.iter().enumerate();
        let others = members.filter(move |(place, _)| *place != asker.member);
        let accounts = others.map(move |(_, other)| &other.accounts[class as usize]);
        accounts.filter(move |account| account.claims(now_ns))
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

    fn levels(&mut self, now_ns: u64) -> LimitLevels {
        self.leak(now_ns);
        self.buckets
            .map(|bucket| [bucket.level, bucket.burst_level])
    }

    /// Fills the buckets, at most to their sizes: nobody waits longer than for requests of this process.
    fn fill(&mut self, levels: &LimitLevels, now_ns: u64) {
        self.leak(now_ns);
        for (kind, [level, burst_level]) in LimitKind::ALL.into_iter().zip(levels) {
            let (size, burst_size) = Bucket::sizes(self.limits.of(kind));
            let bucket = &mut self.buckets[kind as usize];
            bucket.level = bucket.level.max(level.min(size));
            bucket.burst_level = bucket.burst_level.max(burst_level.min(burst_size));
        }
    }

    /// Returns how long the fullest of the buckets of a class needs until it has room.
    fn wait_ns(&self, class: Class, ahead_ns: f64) -> f64 {
        let wait_ns = |kind| self.buckets[kind as usize].wait_ns(self.limits.of(kind), ahead_ns);
        class.kinds().map(wait_ns).into_iter().fold(0.0, f64::max)
    }

    /// Returns how long the fullest of the buckets of a class takes to leak a request.
    fn cost(&self, class: Class, demand: Demand) -> f64 {
        let costs = class
            .kinds()
            .map(|kind| match self.limits.of(kind).average {
                0 => 0.0,
                average => self.units(kind, demand) / average as f64 * SECOND_NS,
            });
        costs.into_iter().fold(0.0, f64::max)
    }

    /// Returns what a request fills into a bucket.
    fn units(&self, kind: LimitKind, demand: Demand) -> f64 {
        let bytes = demand.bytes as f64;
        match kind {
            LimitKind::BpsTotal | LimitKind::BpsRead | LimitKind::BpsWrite => bytes,
            _ if self.limits.iops_size == 0 => 1.0,
            _ => (bytes / self.limits.iops_size as f64).max(1.0),
        }
    }

    /// Counts a request that is admitted.
    fn serve(&mut self, asker: Asker, class: Class, demand: Demand, now_ns: u64) {
        for kind in class.kinds() {
            let limit = self.limits.of(kind);
            if limit.average > 0 {
                let units = self.units(kind, demand);
                let bucket = &mut self.buckets[kind as usize];
                bucket.level += units;
                if limit.max_length > 1 {
                    bucket.burst_level += units;
                }
            }
        }
        let (at, cost) = (class as usize, self.cost(class, demand));
        let least = |least: f64, other: &Account| least.min(other.served);
        let own = &self.members[asker.member];
        let others = self.claims_of_others(asker, class, now_ns);
        let of_disks = others.fold(own.accounts[at].served, least);
        let served = own.vrings[asker.vring].accounts[at].served;
        let of_vrings = own.claims(class, now_ns).fold(served, least);
        self.least_served[at] = self.least_served[at].max(of_disks);
        let own = &mut self.members[asker.member];
        own.least_served[at] = own.least_served[at].max(of_vrings);
        own.accounts[at].served += cost;
        own.vrings[asker.vring].accounts[at].served += cost;
    }
}

impl Bucket {
    /// Returns how much a bucket holds before requests wait, and how much of a burst.
    fn sizes(limit: Limit) -> (f64, f64) {
        let (average, max) = (limit.average as f64, limit.max as f64);
        match max > 0.0 {
            // A burst is over when all of it has been done at the burst's rate.
            true => (max * limit.max_length.max(1) as f64, max / 10.0),
            // Without one, a tenth of a second's worth, or every other request would wait.
            false => (average / 10.0, 0.0),
        }
    }

    /// Returns how long a request waits if others first fill in what takes `ahead_ns` to leak.
    fn wait_ns(self, limit: Limit, ahead_ns: f64) -> f64 {
        let Limit {
            average,
            max,
            max_length,
        } = limit;
        if average == 0 {
            return 0.0;
        }
        let (average, max) = (average as f64, max as f64);
        let (size, burst_size) = Bucket::sizes(limit);
        let ahead = ahead_ns / SECOND_NS * average;
        let extra = self.level + ahead - size;
        if extra > 0.0 {
            return extra * SECOND_NS / average;
        }
        let extra = self.burst_level + ahead - burst_size;
        match max_length > 1 && extra > 0.0 {
            true => extra * SECOND_NS / max,
            false => 0.0,
        }
    }
}

#[cfg(test)]
mod tests;
