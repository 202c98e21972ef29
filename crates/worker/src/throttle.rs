//! Holds a disk to its [`Limits`], or several disks to limits that they share: QEMU's leaky buckets, shared by all workers, and
//! fair between the disks and between the vrings of each.
//!
//! A request is admitted while no bucket that it fills is above its size, and is counted afterwards; so a large one passes
//! whole, and those behind it wait for it (QEMU's `throttle_compute_wait` and `throttle_account`). A bucket leaks with the
//! clock, without a tick: a worker that must wait learns when to ask again. While several disks wait, the one that has had the
//! least goes first, and of its vrings again the one that has had the least. There is such an order for the totals, for reads and
//! for writes: a write that waits for its own buckets delays no read, whose buckets have room.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::registry::Registry;
use crate::{Limit, LimitKind, Limits, Tuning};

/// Most vrings of a disk.
const VRINGS: usize = 256;
/// A vring that does not come for its turn within this has no requests any more, or its worker is late.
const PATIENCE_NS: u64 = 2_000_000;
/// Another worker has the buckets at this moment.
const BUSY_NS: u64 = 1_000;
const SECOND_NS: f64 = 1e9;

/// The cost of a request in each bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Demand {
    pub(crate) is_read: bool,
    /// None of a discard or write-zeroes.
    pub(crate) bytes: u64,
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

    /// Admits a request of a vring and counts it; otherwise the time at which to ask again.
    pub(crate) fn admit(&self, vring: u16, demand: Demand, now_ns: u64) -> Result<(), u64> {
        let Some(mut state) = self.try_lock() else {
            return Err(now_ns + BUSY_NS);
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
        match self.group.0.state.try_lock() {
            Ok(state) => Some(state),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
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
mod tests {
    use super::*;

    /// SplitMix64.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.0;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ (mixed >> 31)) % bound
        }
    }

    const SECOND: u64 = 1_000_000_000;

    fn throttle(text: &str) -> Throttle {
        members(text, 1).remove(0)
    }

    /// Disks that share limits.
    fn members(text: &str, count: usize) -> Vec<Throttle> {
        let began = Instant::now();
        let group = LimitGroup::new(text.parse().unwrap(), began);
        let registry = || Arc::new(Registry::new(Tuning::new(crate::Split::Off)));
        let members = (0..count).map(|_| Throttle::join(&group, &registry(), began));
        members.collect()
    }

    fn read(bytes: u64) -> Demand {
        Demand {
            is_read: true,
            bytes,
        }
    }

    /// QEMU's formula as its documentation has it, written a second time: six named pairs of levels, and nothing else.
    #[derive(Default)]
    struct Qemu {
        levels: [f64; 6],
        bursts: [f64; 6],
        at_ns: u64,
    }

    impl Qemu {
        /// How long a request waits at this moment; one that does not is counted.
        fn ask(&mut self, limits: &Limits, demand: Demand, now_ns: u64) -> f64 {
            let dt = (now_ns - self.at_ns) as f64 / 1e9;
            self.at_ns = now_ns;
            let mut longest = 0.0_f64;
            let own = if demand.is_read {
                [0, 1, 3, 4]
            } else {
                [0, 2, 3, 5]
            };
            for at in 0..6 {
                let Limit {
                    average,
                    max,
                    max_length,
                } = limits.of(LimitKind::ALL[at]);
                self.levels[at] = (self.levels[at] - average as f64 * dt).max(0.0);
                self.bursts[at] = (self.bursts[at] - max as f64 * dt).max(0.0);
                if average == 0 || !own.contains(&at) {
                    continue;
                }
                let length = max_length.max(1);
                let size = if max == 0 {
                    average as f64 / 10.0
                } else {
                    (max * length) as f64
                };
                let mut wait = (self.levels[at] - size) / average as f64;
                if wait <= 0.0 && length > 1 {
                    wait = (self.bursts[at] - max as f64 / 10.0) / max as f64;
                }
                longest = longest.max(wait * 1e9);
            }
            if longest > 0.0 {
                return longest;
            }
            let size = limits.iops_size;
            let ops = if size > 0 && demand.bytes > size {
                demand.bytes as f64 / size as f64
            } else {
                1.0
            };
            for at in own {
                let units = if at < 3 { demand.bytes as f64 } else { ops };
                self.levels[at] += units;
                self.bursts[at] += units;
            }
            0.0
        }
    }

    #[test]
    fn one_vring_is_admitted_exactly_when_qemu_admits_it() {
        exactly_as_qemu(1);
    }

    #[test]
    fn a_group_is_admitted_exactly_when_qemu_admits_one_disk() {
        for count in [2, 3, 16] {
            exactly_as_qemu(count);
        }
    }

    /// One of `count` disks has a request at a time; when it has been admitted, any of them has the next.
    fn exactly_as_qemu(count: usize) {
        for (seed, text) in [
            (1, "iops-total=1000"),
            (2, "iops-read=500,iops-write=2000,bps-total=8M"),
            (3, "bps-total=1M,bps-total-max=10M,bps-total-max-length=3"),
            (
                4,
                "iops-total=100,iops-total-max=2000,iops-total-max-length=4,iops-size=4096",
            ),
            (5, "bps-read=4M,bps-read-max=16M,bps-write=2M,iops-write=50"),
        ] {
            let (group, limits) = (members(text, count), text.parse::<Limits>().unwrap());
            let mut asks = 0;
            let (mut qemu, mut random, mut now_ns) = (Qemu::default(), Random(seed), 0);
            let mut waited = 0;
            for _ in 0..50_000 {
                now_ns += random.below(1_500_000);
                let demand = Demand {
                    is_read: random.below(2) == 0,
                    bytes: 512 << random.below(11),
                };
                let theirs = qemu.ask(&limits, demand, now_ns);
                let ours = group[asks].admit(0, demand, now_ns);
                waited += u32::from(theirs > 0.0);
                match ours {
                    Ok(()) => {
                        assert!(theirs < 1.0, "{text} at {now_ns}: QEMU waits {theirs}");
                        asks = random.below(count as u64) as usize;
                    }
                    Err(due_ns) => {
                        let ours = (due_ns - now_ns) as f64;
                        assert!(
                            (ours - theirs).abs() < 2.0,
                            "{text} at {now_ns}: {ours} {theirs}"
                        );
                    }
                }
            }
            assert!((1000..50_000).contains(&waited), "{text}: {waited} waited");
        }
    }

    /// Vrings of one disk that always have a request of their size; bytes that each was admitted in the seconds after the first.
    fn shares(text: &str, sizes: &[u64], seconds: u64, seed: u64) -> Vec<u64> {
        group_shares(text, &[sizes], seconds, seed).remove(0)
    }

    /// The same for disks that share limits. Each vring has a worker that comes a little late.
    fn group_shares(text: &str, disks: &[&[u64]], seconds: u64, seed: u64) -> Vec<Vec<u64>> {
        let (group, mut random) = (members(text, disks.len()), Random(seed));
        let mut bytes: Vec<Vec<u64>> = disks.iter().map(|sizes| vec![0; sizes.len()]).collect();
        let vrings = disks.iter().enumerate();
        let vrings = vrings.flat_map(|(disk, sizes)| (0..sizes.len()).map(move |at| (disk, at)));
        let mut next: Vec<(u64, usize, usize)> = vrings.map(|(disk, at)| (0, disk, at)).collect();
        loop {
            let first = next.iter_mut().min().unwrap();
            let (now_ns, disk, at) = *first;
            if now_ns > (seconds + 1) * SECOND {
                return bytes;
            }
            match group[disk].admit(at as u16, read(disks[disk][at]), now_ns) {
                Ok(()) if now_ns > SECOND => bytes[disk][at] += disks[disk][at],
                Ok(()) => {}
                Err(due_ns) => first.0 = due_ns + random.below(100_000),
            }
        }
    }

    #[test]
    fn a_group_has_its_rate_in_each_second_with_any_number_of_disks() {
        for count in 1..=16 {
            for (text, size, rate) in [
                ("iops-total=5000", 4096, 5000.0 * 4096.0),
                ("bps-total=100M", 65_536, 104_857_600.0),
                ("iops-read=1000,iops-write=10", 512, 512_000.0),
            ] {
                let one = [size];
                let bytes = group_shares(text, &vec![&one[..]; count], 1, 17);
                let reached = bytes.iter().flatten().sum::<u64>() as f64 / rate;
                assert!(
                    (0.99..1.01).contains(&reached),
                    "{text}, {count}: {reached}"
                );
            }
        }
    }

    fn assert_even(shares: &[u64], what: &str) {
        let mean = shares.iter().sum::<u64>() as f64 / shares.len() as f64;
        for own in shares {
            let share = *own as f64 / mean;
            assert!((0.95..1.05).contains(&share), "{what}: {shares:?}");
        }
    }

    #[test]
    fn disks_of_a_group_get_the_same_whatever_vrings_and_sizes_they_have() {
        let busy = [4096; 16];
        let disks: [&[u64]; 4] = [&busy, &[4096], &[4096, 4096], &[1 << 20]];
        for text in ["iops-total=4000", "bps-total=200M"] {
            let bytes = group_shares(text, &disks, 20, 19);
            let units = |at: usize| match text.starts_with("iops") {
                true => bytes[at].iter().sum::<u64>() / disks[at][0],
                false => bytes[at].iter().sum(),
            };
            assert_even(&[units(0), units(1), units(2), units(3)], text);
            assert_even(&bytes[0], text);
            assert_even(&bytes[2], text);
        }
    }

    #[test]
    fn a_disk_that_leaves_while_it_waits_delays_nobody() {
        let mut group = members("iops-total=10", 3);
        while group[0].admit(0, read(512), 0).is_ok() {}
        let waits = |group: &[Throttle], at: usize| group[at].admit(0, read(512), 0).unwrap_err();
        assert!(waits(&group, 1) < 100_000_002);
        let third = waits(&group, 2);
        group.remove(0);
        group.remove(0);
        assert!(waits(&group, 0) <= third);
        assert_eq!(group[0].group.members(), 1);
        // Its place is another's now, which knows nothing of the one before.
        let registry = Arc::new(Registry::new(Tuning::new(crate::Split::Off)));
        let next = Throttle::join(&group[0].group, &registry, group[0].group.0.began);
        assert_eq!((next.member, next.group.members()), (0, 2));
    }

    #[test]
    fn the_limits_of_the_last_that_sets_them_are_those_of_all() {
        let group = LimitGroup::default();
        let registry = || Arc::new(Registry::new(Tuning::new(crate::Split::Off)));
        let (one, other) = (registry(), registry());
        let began = Instant::now();
        let first = Throttle::join(&group, &one, began);
        let second = Throttle::join(&group, &other, began);
        for (by, text) in [
            (&first, "iops-total=10"),
            (&second, "bps-read=5000000"),
            (&first, "none"),
        ] {
            by.set(text.parse().unwrap());
            assert_eq!(group.limits().to_string(), text);
            // The one that sets them changes its own tuning itself.
            let theirs = if by.member == 0 { &other } else { &one };
            assert_eq!(theirs.tuning().limits.to_string(), text);
        }
    }

    #[test]
    fn clocks_of_disks_that_began_apart_are_one() {
        let (began, registry) = (
            Instant::now(),
            Arc::new(Registry::new(Tuning::new(crate::Split::Off))),
        );
        let group = LimitGroup::new("iops-total=10".parse().unwrap(), began);
        let later = began + std::time::Duration::from_secs(7);
        let (early, late) = (
            Throttle::join(&group, &registry, began),
            Throttle::join(&group, &registry, later),
        );
        while early.admit(0, read(512), 7 * SECOND).is_ok() {}
        let due_ns = late.admit(0, read(512), 0).unwrap_err();
        assert!(due_ns < SECOND, "{due_ns}");
        assert_eq!(late.admit(0, read(512), due_ns + SECOND), Ok(()));
    }

    #[test]
    fn the_rate_is_reached_by_any_number_of_vrings_within_a_per_cent() {
        for count in [1, 2, 4, 16] {
            for (text, size, rate) in [
                ("iops-total=5000", 4096, 5000.0 * 4096.0),
                ("iops-total=100", 4096, 100.0 * 4096.0),
                ("bps-total=100M", 65_536, 104_857_600.0),
            ] {
                let seconds = 10;
                let bytes = shares(text, &vec![size; count], seconds, 7);
                let reached = bytes.iter().sum::<u64>() as f64 / seconds as f64 / rate;
                assert!(
                    (0.99..1.01).contains(&reached),
                    "{text}, {count} vrings: {reached}"
                );
            }
        }
    }

    #[test]
    fn a_greedy_vring_gets_no_more_than_its_share() {
        // Requests of 1 MiB beside those of 4 KiB, by bytes; and sixteen vrings alike, by operations.
        let bytes = shares("bps-total=50M", &[1 << 20, 4096, 4096], 20, 11);
        let mean = bytes.iter().sum::<u64>() as f64 / 3.0;
        for own in &bytes {
            let share = *own as f64 / mean;
            assert!((0.95..1.05).contains(&share), "{bytes:?}");
        }
        let even = shares("iops-total=2000", &[4096; 16], 20, 13);
        let mean = even.iter().sum::<u64>() as f64 / 16.0;
        for own in &even {
            let share = *own as f64 / mean;
            assert!((0.95..1.05).contains(&share), "{even:?}");
        }
    }

    #[test]
    fn a_vring_that_went_away_while_it_waited_delays_the_others_once() {
        let throttle = throttle("iops-total=10");
        let mut now_ns = 0;
        while throttle.admit(0, read(512), now_ns).is_ok() {}
        while throttle.admit(1, read(512), now_ns).is_ok() {}
        // Vring 0 was told to come again and never does.
        let mut admitted = 0;
        while now_ns < 10 * SECOND {
            match throttle.admit(1, read(512), now_ns) {
                Ok(()) => admitted += 1,
                Err(due_ns) => now_ns = due_ns,
            }
        }
        assert!((98..=101).contains(&admitted), "{admitted}");
    }

    /// What counted under other limits, and who waited for them, counts no more: a request took an hour there, or a moment.
    #[test]
    fn other_limits_are_a_new_start_for_all() {
        let (small, large) = (read(512), read(4 << 20));
        let group = members("bps-total=1K", 2);
        assert_eq!(group[0].admit(0, small, 0), Ok(()));
        let due_ns = group[1].admit(0, large, 0).unwrap_err();
        assert_eq!(group[1].admit(0, large, due_ns), Ok(()));
        // The guest of the first disk leaves while it waits.
        assert!(group[0].admit(0, small, due_ns).unwrap_err() > 4000 * SECOND);
        group[0].set("bps-total=100M".parse().unwrap());
        assert_eq!(group[1].admit(0, small, due_ns), Ok(()));

        // Two vrings that always have a request; one of them has had a large one before.
        let throttle = throttle("bps-total=1K");
        assert_eq!(throttle.admit(0, large, 0), Ok(()));
        throttle.set("iops-total=1000".parse().unwrap());
        let (mut next, mut admitted) = ([0; 2], [0_u32; 2]);
        while let Some((at, now_ns)) = next.into_iter().enumerate().min_by_key(|(_, at)| *at)
            && now_ns < 10 * SECOND
        {
            match throttle.admit(at as u16, small, now_ns) {
                Ok(()) => admitted[at] += 1,
                Err(due_ns) => next[at] = due_ns,
            }
        }
        assert!(admitted.iter().all(|count| *count > 4000), "{admitted:?}");
    }

    /// Requests a second of readers and of writers that always have one, in a disk each or all in one.
    fn directions(text: &str, [readers, writers]: [usize; 2], disks: usize) -> [f64; 2] {
        let seconds = 20;
        let (group, mut random) = (members(text, disks), Random(23));
        let mut next = vec![0; readers + writers];
        let mut admitted = [0_u64; 2];
        loop {
            let (at, now_ns) = next
                .iter()
                .copied()
                .enumerate()
                .min_by_key(|(_, at)| *at)
                .unwrap();
            if now_ns > (seconds + 1) * SECOND {
                return admitted.map(|count| count as f64 / seconds as f64);
            }
            let demand = Demand {
                is_read: at < readers,
                bytes: 4096,
            };
            match group[at % disks].admit(at as u16, demand, now_ns) {
                Ok(()) if now_ns > SECOND => admitted[usize::from(!demand.is_read)] += 1,
                Ok(()) => {}
                Err(due_ns) => next[at] = due_ns + random.below(100_000),
            }
        }
    }

    #[test]
    fn reads_and_writes_with_limits_of_their_own_do_not_wait_for_each_other() {
        for (text, vrings, rates) in [
            ("iops-read=1000,iops-write=1", [1, 1], [1000.0, 1.0]),
            ("iops-read=1000,iops-write=1000", [1, 4], [1000.0, 1000.0]),
            ("iops-read=1000,iops-write=500", [15, 1], [1000.0, 500.0]),
            ("iops-read=100,bps-write=2000K", [4, 1], [100.0, 500.0]),
            ("iops-write=100,bps-total=8M", [1, 4], [1948.0, 100.0]),
        ] {
            for disks in [1, vrings[0] + vrings[1]] {
                let reached = directions(text, vrings, disks);
                for (reached, rate) in std::iter::zip(reached, rates) {
                    let part: f64 = reached / rate;
                    assert!(
                        (0.99..1.01).contains(&part),
                        "{text}, {vrings:?}, {disks} disks: {part}"
                    );
                }
            }
        }
    }

    #[test]
    fn at_half_its_rate_a_disk_does_not_notice_its_limit() {
        let (throttle, mut random, mut now_ns) = (throttle("iops-total=1000"), Random(3), 0);
        let mut late = 0;
        for _ in 0..20_000 {
            // Arrivals at random, 500 a second.
            now_ns += random.below(4_000_000);
            late += u32::from(throttle.admit(0, read(4096), now_ns).is_err());
        }
        assert_eq!(late, 0);
    }
}
