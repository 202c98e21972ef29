//! Holds a disk to its [`Limits`]: QEMU's leaky buckets, shared by the disk's workers, and fair between its vrings.
//!
//! A request is admitted while no bucket that it fills is above its size, and is counted afterwards; so a large one passes
//! whole, and those behind it wait for it (QEMU's `throttle_compute_wait` and `throttle_account`). A bucket leaks with the
//! clock, without a tick: a worker that must wait learns when to ask again. While several vrings wait, the one that has had
//! the least goes first.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Limit, LimitKind, Limits};

/// Most vrings of a disk.
const VRINGS: usize = 256;
/// A vring that does not come for its turn within this has no requests any more, or its worker is late.
const PATIENCE_NS: u64 = 2_000_000;
/// Another worker has the buckets at this moment.
const BUSY_NS: u64 = 1_000;
const SECOND_NS: f64 = 1e9;

/// What a request is counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Demand {
    pub(crate) is_read: bool,
    /// None of a discard or write-zeroes.
    pub(crate) bytes: u64,
}

/// A disk's buckets. A worker never waits for the lock: a request is asked for again instead.
#[derive(Debug)]
pub(crate) struct Throttle {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limits: Limits,
    buckets: [Bucket; LimitKind::COUNT],
    /// Up to then the buckets have leaked.
    leaked_ns: u64,
    /// How much service the vring has had that was admitted last: where one begins that comes anew.
    now_served: f64,
    turns: Box<[Turn; VRINGS]>,
}

/// Units above what has leaked away.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    level: f64,
    /// The same against the burst's own rate.
    burst_level: f64,
}

/// A vring among those that share the buckets.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    /// Service that it has had, in nanoseconds of the bucket that its requests fill most.
    served: f64,
    /// Of its last request.
    last: f64,
    /// It was told to ask again at this time.
    due_ns: Option<u64>,
}

impl Throttle {
    pub(crate) fn new(limits: Limits) -> Throttle {
        Throttle {
            state: Mutex::new(State {
                limits,
                buckets: Default::default(),
                leaked_ns: 0,
                now_served: 0.0,
                turns: Box::new([Turn::default(); VRINGS]),
            }),
        }
    }

    /// Other limits; as in QEMU, buckets begin empty.
    pub(crate) fn set(&self, limits: Limits) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.limits != limits {
            state.limits = limits;
            state.buckets = Default::default();
        }
    }

    /// Admits a request of a vring and counts it; otherwise the time at which to ask again.
    pub(crate) fn admit(&self, vring: u16, demand: Demand, now_ns: u64) -> Result<(), u64> {
        match self.try_lock() {
            Some(mut state) => state.admit(usize::from(vring) % VRINGS, demand, now_ns),
            None => Err(now_ns + BUSY_NS),
        }
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}

impl State {
    fn admit(&mut self, vring: usize, demand: Demand, now_ns: u64) -> Result<(), u64> {
        self.leak(now_ns);
        // One that had nothing to do for a while has no claim to what it did not use.
        let served = match self.turns[vring].due_ns {
            Some(_) => self.turns[vring].served,
            None => self.turns[vring].served.max(self.now_served),
        };
        let before_ns = self.before(vring, served, now_ns);
        let wait_ns = self.wait_ns(demand.is_read) + before_ns;
        if wait_ns > 0.0 {
            // A float's cast saturates. At least a nanosecond, or it would ask in vain.
            let due_ns = now_ns.saturating_add((wait_ns as u64).max(1));
            let turn = &mut self.turns[vring];
            (turn.served, turn.due_ns) = (served, Some(due_ns));
            return Err(due_ns);
        }
        let cost = self.count(demand);
        self.turns[vring] = Turn {
            served: served + cost,
            last: cost,
            due_ns: None,
        };
        self.now_served = self.now_served.max(served);
        Ok(())
    }

    /// How long the vrings will take that wait, and have had less.
    fn before(&mut self, vring: usize, served: f64, now_ns: u64) -> f64 {
        let mut before_ns = 0.0;
        for (other, turn) in self.turns.iter_mut().enumerate() {
            let Some(due_ns) = turn.due_ns.filter(|_| other != vring) else {
                continue;
            };
            if due_ns + PATIENCE_NS < now_ns {
                turn.due_ns = None;
            } else if turn.served < served {
                before_ns += turn.last.max(1.0);
            }
        }
        before_ns
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

    /// How long the fullest of the buckets that such a request fills needs.
    fn wait_ns(&self, is_read: bool) -> f64 {
        let waits =
            kinds(is_read).map(|kind| self.buckets[kind as usize].wait_ns(self.limits.of(kind)));
        waits.into_iter().fold(0.0, f64::max)
    }

    /// Counts a request; how long the fullest of its buckets takes to leak it.
    fn count(&mut self, demand: Demand) -> f64 {
        let mut most_ns = 0.0_f64;
        let size = self.limits.iops_size as f64;
        let operations = match self.limits.iops_size {
            0 => 1.0,
            _ => (demand.bytes as f64 / size).max(1.0),
        };
        for kind in kinds(demand.is_read) {
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

/// The buckets that a request fills.
fn kinds(is_read: bool) -> [LimitKind; 4] {
    match is_read {
        true => [
            LimitKind::BpsTotal,
            LimitKind::BpsRead,
            LimitKind::IopsTotal,
            LimitKind::IopsRead,
        ],
        false => [
            LimitKind::BpsTotal,
            LimitKind::BpsWrite,
            LimitKind::IopsTotal,
            LimitKind::IopsWrite,
        ],
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
        Throttle::new(text.parse().unwrap())
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
            let (throttle, limits) = (throttle(text), text.parse::<Limits>().unwrap());
            let (mut qemu, mut random, mut now_ns) = (Qemu::default(), Random(seed), 0);
            let mut waited = 0;
            for _ in 0..50_000 {
                now_ns += random.below(1_500_000);
                let demand = Demand {
                    is_read: random.below(2) == 0,
                    bytes: 512 << random.below(11),
                };
                let theirs = qemu.ask(&limits, demand, now_ns);
                let ours = throttle.admit(0, demand, now_ns);
                waited += u32::from(theirs > 0.0);
                match ours {
                    Ok(()) => assert!(theirs < 1.0, "{text} at {now_ns}: QEMU waits {theirs}"),
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

    /// Vrings that always have a request of their size, each with a worker that comes a little late; units that each was
    /// admitted in the seconds after the first.
    fn shares(text: &str, sizes: &[u64], seconds: u64, seed: u64) -> Vec<u64> {
        let (throttle, mut random) = (throttle(text), Random(seed));
        let mut next = vec![0_u64; sizes.len()];
        let mut bytes = vec![0; sizes.len()];
        loop {
            let vring = (0..sizes.len()).min_by_key(|vring| next[*vring]).unwrap();
            let now_ns = next[vring];
            if now_ns > (seconds + 1) * SECOND {
                return bytes;
            }
            match throttle.admit(vring as u16, read(sizes[vring]), now_ns) {
                Ok(()) if now_ns > SECOND => bytes[vring] += sizes[vring],
                Ok(()) => {}
                Err(due_ns) => next[vring] = due_ns + random.below(100_000),
            }
        }
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
