//! The throttle against QEMU's formula, and its shares, in simulated time.

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

/// Makes disks that share limits.
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
    /// Returns how long a request waits at this moment. A request that does not wait is counted.
    fn ask(&mut self, limits: &RateLimits, demand: Demand, now_ns: u64) -> f64 {
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

/// Compares with QEMU's results. One of `count` disks has a request at a time; when it has been admitted, any of them has the
/// next.
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
        let (group, limits) = (members(text, count), text.parse::<RateLimits>().unwrap());
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

/// Returns the bytes that each vring of one disk was admitted in the seconds after the first. Each always has a request of its
/// size.
fn shares(text: &str, sizes: &[u64], seconds: u64, seed: u64) -> Vec<u64> {
    group_shares(text, &[sizes], seconds, seed).remove(0)
}

/// Returns the bytes that each vring of disks with shared limits was admitted. Each vring has a worker that comes a little late.
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

#[test]
fn a_vring_that_finds_the_buckets_in_use_asks_again_at_once() {
    let throttle = throttle("iops-total=10");
    let used = throttle.group.state();
    assert_eq!(throttle.admit(0, read(512), 7), Err(7));
    drop(used);
    assert_eq!(throttle.admit(0, read(512), 7), Ok(()));
}

/// As in QEMU, whose write-zeroes pass the limits as writes of as many bytes.
#[test]
fn write_zeroes_count_their_bytes_and_discards_none() {
    let of = |verb| {
        Demand::of(&Request {
            verb,
            offset_bytes: 0,
            len_bytes: 128 << 20,
        })
    };
    let writes = |bytes| {
        Some(Demand {
            is_read: false,
            bytes,
        })
    };
    assert_eq!(of(Verb::WriteZeroes { unmap: false }), writes(128 << 20));
    assert_eq!(of(Verb::WriteZeroes { unmap: true }), writes(128 << 20));
    assert_eq!(of(Verb::Write), writes(128 << 20));
    assert_eq!(of(Verb::Discard), writes(0));
    assert_eq!(of(Verb::Flush), None);
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

/// The place in the group that one leaves is given to the next at once.
#[test]
fn a_disk_that_joins_while_another_leaves_hears_of_new_limits() {
    let (group, began) = (LimitGroup::default(), Instant::now());
    let registry = || Arc::new(Registry::new(Tuning::new(crate::Split::Off)));
    let (one, other) = (registry(), registry());
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            for _ in 0..300_000 {
                drop(Throttle::join(&group, &other, began));
            }
        });
        while !others.is_finished() {
            let _joined = Throttle::join(&group, &one, began);
            let tuned = group.tuned();
            let mut known = tuned.iter().filter_map(|(_, registry)| registry.upgrade());
            assert!(known.any(|registry| Arc::ptr_eq(&registry, &one)));
        }
    });
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

/// A vring of a disk, with requests of one size.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    disk: usize,
    bytes: u64,
    /// How long after the time that it was told it asks again.
    late_ns: u64,
    /// Longest pause between two requests.
    pause_ns: u64,
}

/// Returns the requests a second of each vring, after the first second.
fn rates(text: &str, loads: &[Load], seconds: u64) -> Vec<f64> {
    let disks = loads.iter().map(|load| load.disk + 1).max().unwrap_or(0);
    let (group, mut random) = (members(text, disks), Random(29));
    let mut next = vec![0; loads.len()];
    let mut admitted = vec![0_u64; loads.len()];
    while let Some((at, now_ns)) = next.iter().copied().enumerate().min_by_key(|(_, at)| *at)
        && now_ns < (seconds + 1) * SECOND
    {
        let load = &loads[at];
        match group[load.disk].admit(at as u16, read(load.bytes), now_ns) {
            Ok(()) => {
                admitted[at] += u64::from(now_ns > SECOND);
                next[at] = now_ns + random.below(load.pause_ns + 1);
            }
            Err(due_ns) => next[at] = due_ns + load.late_ns,
        }
        let state = group[0].group.state();
        let size = state.limits.of(LimitKind::IopsTotal).average as f64 / 10.0;
        let above = state.buckets[LimitKind::IopsTotal as usize].level - size;
        assert!(
            above <= 1.0 + loads.len() as f64,
            "{text}, {loads:?}: {above}"
        );
    }
    let rate = |count: u64| count as f64 / seconds as f64;
    admitted.into_iter().map(rate).collect()
}

/// Returns vrings of one disk, or of a disk each, that always have a request and ask late.
fn late(late_ns: &[u64], disks: usize) -> Vec<Load> {
    let load = |(at, late_ns)| Load {
        disk: at % disks,
        bytes: 4096,
        late_ns,
        pause_ns: 0,
    };
    late_ns.iter().copied().enumerate().map(load).collect()
}

#[test]
fn late_workers_cost_neither_the_rate_nor_a_share() {
    for iops in [5000, 80_000] {
        for late_ns in [20_000, 1_500_000, 3_000_000] {
            for vrings in [
                vec![0, late_ns],
                vec![0, 0, late_ns],
                vec![0, late_ns, late_ns],
            ] {
                for disks in [1, vrings.len()] {
                    let rates = rates(&format!("iops-total={iops}"), &late(&vrings, disks), 5);
                    let what = format!("{iops}, late by {vrings:?}, {disks} disks: {rates:?}");
                    let reached = rates.iter().sum::<f64>() / f64::from(iops);
                    assert!((0.99..1.01).contains(&reached), "{what}");
                    let share = f64::from(iops) / vrings.len() as f64;
                    assert!(rates.iter().all(|rate| *rate > 0.97 * share), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_worker_that_is_very_late_has_its_request_and_leaves_the_rest_to_the_others() {
    for (late_ns, least) in [(30_000_000, 30.0), (300_000_000, 3.0)] {
        for disks in [1, 2] {
            let rates = rates("iops-total=5000", &late(&[0, late_ns], disks), 10);
            assert!(
                rates[1] > least && rates[0] + rates[1] > 4990.0,
                "{rates:?}"
            );
        }
    }
}

#[test]
fn shares_are_even_if_a_request_costs_more_than_the_buckets_hold() {
    for (text, rate) in [("iops-total=10", 10.0), ("iops-total=1", 1.0)] {
        for disks in [1, 4] {
            let rates = rates(text, &late(&[0, 1_500_000, 0, 0], disks), 1000);
            let even = |reached: &f64| (0.97..1.03).contains(&(4.0 * reached / rate));
            assert!(rates.iter().all(even), "{text}: {rates:?}");
        }
    }
}

/// A large request leaves room for those that had less. A vring with a small request now and then does not need it.
#[test]
fn room_that_is_left_for_others_is_not_lost() {
    for disk in [0, 1] {
        let large = Load {
            bytes: 1 << 20,
            ..Load::default()
        };
        let small = Load {
            disk,
            bytes: 4096,
            pause_ns: 2 * SECOND,
            ..Load::default()
        };
        let rates = rates("bps-total=1M", &[large, small], 300);
        let reached = rates[0] + rates[1] * 4096.0 / 1_048_576.0;
        assert!((0.97..1.01).contains(&reached), "{rates:?}");
    }
}

#[test]
fn a_vring_that_leaves_while_it_waits_delays_nobody() {
    let throttle = throttle("iops-total=10");
    while throttle.admit(0, read(512), 0).is_ok() {}
    let due_ns = throttle.admit(1, read(512), 0).unwrap_err();
    let after_ns = throttle.admit(2, read(512), 0).unwrap_err();
    throttle.leave(1);
    assert_eq!(throttle.admit(2, read(512), 0), Err(due_ns));
    assert!(due_ns < after_ns);
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

/// Turns and shares were reckoned in the time that requests took under the old limits, which may be an hour.
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

/// Returns the requests a second of readers and of writers that always have one, in a disk each or all in one.
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

/// Returns how many reads of a byte a disk is admitted at once.
fn admitted(disk: &Throttle, now_ns: u64) -> usize {
    let mut requests = 0;
    while disk.admit(0, read(1), now_ns).is_ok() {
        requests += 1;
    }
    disk.leave(0);
    requests
}

#[test]
fn a_burst_that_was_used_is_not_had_again_in_the_next_process() {
    let limits =
        "iops-total=10,iops-total-max=100,bps-read=1,bps-read-max=1000,bps-read-max-length=4";
    let before = throttle(limits);
    assert_eq!(admitted(&before, 0), 101);
    let levels = before.group.state().levels(0);
    assert_eq!(levels[LimitKind::IopsTotal as usize], [101.0, 0.0]);
    assert_eq!(levels[LimitKind::BpsRead as usize], [101.0, 101.0]);

    // The clock of the next one has another beginning.
    let next = throttle(limits);
    next.group.state().fill(&levels, 77 * SECOND);
    assert_eq!(admitted(&next, 77 * SECOND), 1, "what was above the size");
    assert_eq!(
        admitted(&next, 79 * SECOND),
        20,
        "what has leaked away since"
    );
    // A disk that comes later with lower levels leaves the buckets of its group as they are.
    next.group.state().fill(&Default::default(), 79 * SECOND);
    assert_eq!(admitted(&next, 79 * SECOND), 0);
}

#[test]
fn levels_that_no_request_can_reach_keep_nobody_waiting() {
    for level in [f64::INFINITY, f64::NAN, 1e300, -1e300] {
        let disk =
            throttle("iops-total=10,bps-total=1000,bps-total-max=2000,bps-total-max-length=3");
        let levels = [[level; 2]; LimitKind::COUNT];
        disk.group.state().fill(&levels, 0);
        assert!(admitted(&disk, 0) > 0, "{level}");
    }
}
