//! Requests that the disk fails and that are not reported: held for the operator, or repeated after a pause.

use std::time::{Duration, Instant};

use cleave_blk::spec::status;
use cleave_guest::{Memory, Vring};
use cleave_tests::Stopwatch;
use cleave_worker::record::StalledRequests;
use cleave_worker::{CompletionPolicy, Lap, Stopped, Tuning, VringStart};

use crate::driver::{Answer, Ask, Driver, Part};
use crate::{Bench, DISK_BYTES, FEATURES, inflight_region, kept_vring, quiet, vring};

pub(super) const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const ENOTCONN: i32 = 107;
pub(super) const ALL: std::ops::Range<usize> = 0..DISK_BYTES;

/// A disk that takes some laps for each op, with this policy.
pub(super) fn bench(seed: u64, on_error: &str) -> Bench {
    let mut bench = Bench::new(quiet(seed), FEATURES);
    set_policy(&mut bench, on_error);
    bench
}

fn set_policy(bench: &mut Bench, on_error: &str) {
    order_policy(bench, on_error);
    heard(bench);
}

/// Sets it, before the worker was told.
fn order_policy(bench: &Bench, on_error: &str) {
    bench.device.tune(Tuning {
        on_error: on_error.parse().unwrap(),
        ..Tuning::clone(&bench.device.tuning())
    });
}

/// Runs laps until the worker has handled all its commands.
pub(super) fn heard(bench: &mut Bench) {
    let enabled = bench.control.enable(0, true);
    bench.carry_out(enabled);
}

pub(super) fn break_disk(bench: &Bench, range: std::ops::Range<usize>, errno: i32) {
    bench.store.lock().unwrap().failing = Some((range, errno));
}

pub(super) fn mend_disk(bench: &Bench) {
    bench.store.lock().unwrap().failing = None;
}

/// Runs more laps than any request takes.
pub(super) fn settle(bench: &mut Bench) {
    settle_for(bench, 60);
}

pub(super) fn settle_for(bench: &mut Bench, laps: u32) {
    for _ in 0..laps {
        bench.lap();
    }
}

pub(super) fn stalled(bench: &Bench) -> Option<StalledRequests> {
    let all = bench.device.records.stalled();
    assert!(all.len() <= 1);
    all.first().map(|(index, stalled)| {
        assert_eq!(*index, 0);
        *stalled
    })
}

/// Goes on until a request is stalled. One with retries is not at the moment at which it is done again.
pub(super) fn stalls(bench: &mut Bench) -> StalledRequests {
    let began = Instant::now();
    loop {
        if let Some(stalled) = stalled(bench) {
            return stalled;
        }
        assert!(began.elapsed() < Duration::from_secs(60));
        bench.lap();
    }
}

pub(super) fn held(bench: &Bench) -> u32 {
    stalled(bench).map_or(0, |stalled| stalled.held)
}

pub(super) fn write(sector: u64, byte: u8) -> Ask {
    Ask::write(sector, vec![byte; 512], 512, true)
}

/// Runs laps until `n` requests have completed.
pub(super) fn collect(bench: &mut Bench, n: usize) -> Vec<Answer> {
    let (mut answers, began) = (Vec::new(), Instant::now());
    while answers.len() < n {
        assert!(began.elapsed() < Duration::from_secs(20), "{answers:?}");
        bench.lap();
        answers.extend(bench.driver.collect(|_| 0));
    }
    answers
}

pub(super) fn statuses(answers: &[Answer]) -> Vec<u8> {
    answers.iter().map(|answer| answer.status).collect()
}

/// Holds writes of the bytes 1 to n, each to its own sector. More than are in flight at a time, since each is
/// retried until all have failed.
pub(super) fn hold_writes(bench: &mut Bench, n: u8) {
    break_disk(bench, ALL, ENOSPC);
    set_policy(bench, "retry:60");
    for byte in 1..=n {
        bench.driver.submit(&write(byte.into(), byte)).unwrap();
    }
    until(bench, |shown| {
        shown.is_some_and(|shown| shown.retrying == u32::from(n))
    });
    set_policy(bench, "hold");
    until(bench, |shown| {
        shown.is_some_and(|shown| shown.held == u32::from(n))
    });
    assert!(bench.driver.collect(|_| 0).is_empty());
}

/// Runs laps until the displayed value satisfies `is_so`.
pub(super) fn until(bench: &mut Bench, is_so: impl Fn(Option<StalledRequests>) -> bool) {
    let began = Instant::now();
    while !is_so(stalled(bench)) {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{:?}",
            stalled(bench)
        );
        bench.lap();
    }
}

pub(super) fn watch_pushes(bench: &Bench) {
    bench.store.lock().unwrap().pushed = Some(Vec::new());
}

/// Sectors of the ops since then.
pub(super) fn pushed(bench: &Bench) -> Vec<u64> {
    let pushed = bench.store.lock().unwrap().pushed.take().unwrap();
    pushed.into_iter().map(|offset| offset / 512).collect()
}

#[test]
fn a_held_request_is_displayed_and_closes_its_vring_until_it_is_repeated() {
    for seed in 0..20 {
        let mut bench = bench(seed, "hold");
        break_disk(&bench, 512..1024, ENOSPC);
        bench.driver.submit(&write(9, 9)).unwrap();
        let bad = bench.driver.submit(&write(1, 1)).unwrap();
        // It was in flight at the same time, and completes as usual.
        let [other] = &collect(&mut bench, 1)[..] else {
            panic!("one answer")
        };
        assert!(other.head != bad && other.status == status::OK);
        settle(&mut bench);
        let shown = stalled(&bench).unwrap();
        let now_ns = bench.device.now_ns();
        let StalledRequests {
            held,
            retrying,
            verb,
            sector,
            errno,
            since_ns,
        } = shown;
        assert_eq!(
            (held, retrying, verb, sector, errno),
            (1, 0, "write", 1, ENOSPC)
        );
        assert!(0 < since_ns && since_ns < now_ns);
        // No new request is taken, even if its part of the disk works.
        bench.driver.submit(&write(10, 10)).unwrap();
        settle(&mut bench);
        assert!(bench.driver.collect(|_| 0).is_empty());
        assert_eq!(bench.store.lock().unwrap().now[10 * 512], 0);
        // Repeated while the disk still fails, so it is held again. The other one may be taken before it fails.
        assert_eq!(bench.device.resume(), Some(1));
        settle(&mut bench);
        assert_eq!(stalled(&bench), Some(shown), "since it first failed");
        let early = bench.driver.collect(|_| 0);
        assert!(early.iter().all(|answer| answer.head != bad));
        mend_disk(&bench);
        assert_eq!(bench.device.resume(), Some(1));
        let answers = collect(&mut bench, 2 - early.len());
        assert!(
            early
                .iter()
                .chain(&answers)
                .all(|answer| answer.status == status::OK)
        );
        assert_eq!((stalled(&bench), bench.device.resume()), (None, Some(0)));
        {
            let store = bench.store.lock().unwrap();
            assert_eq!([store.now[512], store.now[5120]], [1, 10]);
        }
        let totals = bench.totals();
        assert_eq!((totals.failed, totals.held, totals.redone), (0, 2, 2));
        assert_eq!(totals.writes, 3);
        settle(&mut bench);
        let [record] = &bench.device.records.all()[..] else {
            panic!("one record")
        };
        assert_eq!(record.in_flight().0, 0);
        assert_eq!(bench.ask(&Ask::read(1, 512, 512, true)).data, [1; 512]);
    }
}

/// A request may be sent after the policy changed, and before the worker looks at its bell.
#[test]
fn a_policy_counts_for_every_request_that_fails_after_it_was_set() {
    let mut tried = 0;
    for (seed, laps) in (0..12).flat_map(|seed| (0..4).map(move |laps| (seed, laps))) {
        let mut bench = bench(seed, "report");
        break_disk(&bench, ALL, EIO);
        bench.driver.submit(&write(1, 1)).unwrap();
        settle_for(&mut bench, laps);
        if bench.driver.collect(|_| 0).is_empty() {
            tried += 1;
            order_policy(&bench, "hold");
            settle(&mut bench);
            assert!(bench.driver.collect(|_| 0).is_empty(), "{seed} {laps}");
            assert_eq!(held(&bench), 1);
        }
    }
    assert!(tried > 12, "{tried}");
}

#[test]
fn held_requests_fail_on_the_operators_order() {
    let mut bench = bench(1, "hold");
    hold_writes(&mut bench, 5);
    assert_eq!(bench.device.fail(), Some(5));
    let answers = collect(&mut bench, 5);
    for answer in &answers {
        assert_eq!((answer.status, answer.used_bytes), (status::IOERR, 1));
    }
    let totals = bench.totals();
    assert_eq!((totals.failed, totals.writes, held(&bench)), (5, 0, 0));
    mend_disk(&bench);
    // The vring continues.
    assert_eq!(bench.ask(&write(7, 7)).status, status::OK);
}

/// Independent of the order in which they failed, and before later requests, also if there is room for only a
/// few at a time.
#[test]
fn held_requests_are_repeated_in_the_order_in_which_they_were_taken() {
    for (seed, ops) in (0..10).zip([64, 8].into_iter().cycle()) {
        let config = cleave_sim::SimConfig {
            delay_max: 20,
            ops,
            ..quiet(seed)
        };
        let mut bench = Bench::new(config, FEATURES);
        hold_writes(&mut bench, 12);
        // A request that arrives meanwhile.
        bench.driver.submit(&write(100, 100)).unwrap();
        settle(&mut bench);
        // Some fail again.
        break_disk(&bench, 5 * 512..8 * 512, EIO);
        watch_pushes(&bench);
        assert_eq!(bench.device.resume(), Some(12));
        let answers = collect(&mut bench, 9);
        settle(&mut bench);
        // The last one arrived later, and may have been taken before the first one failed again.
        let late = bench.driver.collect(|_| 0);
        let all = answers.iter().chain(&late);
        assert!(all.clone().all(|answer| answer.status == status::OK));
        let taken = pushed(&bench);
        assert_eq!(taken[..12], (1..=12).collect::<Vec<_>>(), "seed {seed}");
        assert!(matches!(taken[12..], [] | [100]), "seed {seed}");
        assert_eq!(all.count(), taken.len() - 3);
        let shown = stalled(&bench).unwrap();
        assert_eq!((shown.held, shown.sector, shown.errno), (3, 5, EIO));
        mend_disk(&bench);
        watch_pushes(&bench);
        assert_eq!(bench.device.resume(), Some(3));
        let left = 3 + 13 - taken.len();
        assert_eq!(collect(&mut bench, left).len(), left);
        assert_eq!(pushed(&bench), [5, 6, 7, 100][..left], "seed {seed}");
    }
}

/// Other disks may share the thread.
#[test]
fn a_lap_repeats_as_many_requests_as_it_takes_new_ones() {
    const HELD: usize = 12;
    let mut bench = bench(24, "hold");
    hold_writes(&mut bench, HELD as u8);
    mend_disk(&bench);
    bench.store.lock().unwrap().sated_after = Some(3);
    assert_eq!(bench.device.resume(), Some(HELD as u64));
    let mut laps = Vec::new();
    let began = Instant::now();
    while laps.iter().sum::<usize>() < HELD {
        watch_pushes(&bench);
        bench.lap();
        laps.push(pushed(&bench).len());
        assert!(began.elapsed() < Duration::from_secs(20), "{laps:?}");
    }
    laps.retain(|pushed| *pushed > 0);
    assert_eq!(laps, [3; HELD / 3]);
    assert_eq!(statuses(&collect(&mut bench, HELD)), [status::OK; HELD]);
    assert_eq!(stalled(&bench), None);
}

#[test]
fn other_vrings_go_on() {
    let mut bench = bench(4, "hold");
    hold_writes(&mut bench, 1);
    let elsewhere = 0x8000_0000;
    let mut other = Driver::at(elsewhere);
    let regions = [&bench.driver, &other].map(|driver| {
        let parts = [Part::Rings, Part::Requests];
        parts.map(|part| driver.region(part))
    });
    let memory = Memory::new(regions.into_iter().flatten().collect()).unwrap();
    let bound = bench.control.bind(memory);
    bench.carry_out(bound);
    let started = bench.control.start(VringStart {
        layout: Driver::layout_at(elsewhere),
        ..vring(1)
    });
    bench.carry_out(started).unwrap();
    other.submit(&Ask::flush()).unwrap();
    settle(&mut bench);
    let answers = other.collect(|_| 0);
    assert_eq!(statuses(&answers), [status::OK]);
    assert_eq!(held(&bench), 1);
    mend_disk(&bench);
    bench.device.resume();
    assert_eq!(statuses(&collect(&mut bench, 1)), [status::OK]);
}

#[test]
fn a_retry_succeeds_after_pauses_and_the_guest_sees_no_error() {
    let mut bench = bench(5, "retry:20");
    break_disk(&bench, 512..1024, EIO);
    bench.driver.submit(&write(1, 1)).unwrap();
    let began = Instant::now();
    while bench.totals().redone < 4 {
        bench.lap();
        assert!(began.elapsed() < Duration::from_secs(60));
    }
    // 10, 20, 40 and 80 ms.
    assert!(began.elapsed() >= Duration::from_millis(150));
    settle(&mut bench);
    let shown = stalls(&mut bench);
    assert_eq!((shown.held, shown.retrying, shown.errno), (0, 1, EIO));
    assert!(shown.since_ns > 0);
    // The vring stays open meanwhile.
    assert_eq!(bench.ask(&write(9, 9)).status, status::OK);
    mend_disk(&bench);
    assert_eq!(statuses(&collect(&mut bench, 1)), [status::OK]);
    settle(&mut bench);
    assert_eq!((stalled(&bench), bench.totals().failed), (None, 0));
    assert_eq!(bench.store.lock().unwrap().now[512], 1);
}

#[test]
fn a_retry_that_runs_out_is_reported_or_held() {
    for (policy, is_held) in [("retry:1", false), ("retry:1:hold", true)] {
        let mut bench = bench(6, policy);
        break_disk(&bench, ALL, EIO);
        let (began, watch) = (Instant::now(), Stopwatch::start());
        bench.driver.submit(&write(1, 1)).unwrap();
        let mut answers = Vec::new();
        while answers.is_empty() && held(&bench) == 0 {
            bench.lap();
            answers = bench.driver.collect(|_| 0);
            assert!(began.elapsed() < Duration::from_secs(60));
        }
        let took = began.elapsed();
        assert!(took >= Duration::from_secs(1), "{took:?}");
        let took = watch.elapsed();
        assert!(took < Duration::from_secs(3), "{took:?}");
        // 10, 20, … 640 ms, and once more at the end; fewer if this machine is late for some.
        let redone = bench.totals().redone;
        assert!((1..=7).contains(&redone), "{redone}");
        assert_eq!(held(&bench), u32::from(is_held));
        if !is_held {
            assert_eq!(statuses(&answers), [status::IOERR]);
            assert_eq!((stalled(&bench), bench.totals().failed), (None, 1));
            continue;
        }
        // Its time is over, so it is held again without another second of tries.
        let redone = bench.totals().redone;
        bench.device.resume();
        settle(&mut bench);
        assert_eq!((held(&bench), bench.totals().redone), (1, redone + 1));
        mend_disk(&bench);
        bench.device.resume();
        assert_eq!(statuses(&collect(&mut bench, 1)), [status::OK]);
    }
}

#[test]
fn each_error_has_the_policy_of_its_kind_and_a_flush_is_reported() {
    let rows: [(&str, Ask, i32, bool); 9] = [
        ("read=hold", Ask::read(1, 512, 512, true), EIO, true),
        ("read=hold", write(1, 1), EIO, false),
        ("write=hold", write(1, 1), EIO, true),
        ("write=hold", Ask::zero(1, 1, false), EIO, true),
        ("write=hold", Ask::zero(1, 1, true), EIO, true),
        ("write=hold,enospc=report", write(1, 1), ENOSPC, false),
        ("enospc=hold", write(1, 1), ENOSPC, true),
        // EINVAL, EFAULT.
        ("hold", write(1, 1), 22, false),
        ("hold", write(1, 1), 14, false),
    ];
    for (policy, ask, errno, is_held) in rows {
        let mut bench = bench(7, policy);
        break_disk(&bench, ALL, errno);
        bench.driver.submit(&ask).unwrap();
        settle(&mut bench);
        let answers = bench.driver.collect(|_| 0);
        assert_eq!(held(&bench), u32::from(is_held), "{policy} {errno}");
        let expected: &[u8] = if is_held { &[] } else { &[status::IOERR] };
        assert_eq!(statuses(&answers), expected, "{policy} {errno}");
    }
    let config = cleave_sim::SimConfig {
        fail_per_mille: 1000,
        ..quiet(7)
    };
    let mut bench = Bench::new(config, FEATURES);
    set_policy(&mut bench, "hold");
    assert_eq!(bench.ask(&Ask::flush()).status, status::IOERR);
}

/// A retry cannot succeed any more, or would prove nothing: the disk has to be opened again.
#[test]
fn after_a_failed_sync_writes_are_reported_and_reads_are_not() {
    for policy in ["hold", "retry:60"] {
        let mut bench = bench(8, policy);
        bench.device.disk.mark_sync_failed();
        break_disk(&bench, ALL, EIO);
        for ask in [write(1, 1), Ask::zero(1, 1, false), Ask::zero(1, 1, true)] {
            assert_eq!(bench.ask(&ask).status, status::IOERR, "{policy}");
        }
        bench.driver.submit(&Ask::read(1, 512, 512, true)).unwrap();
        settle(&mut bench);
        stalls(&mut bench);
    }
}

/// The policy in force at the failure decides. A held request stays held.
#[test]
fn a_changed_policy_applies_to_later_failures() {
    let mut bench = bench(9, "hold");
    hold_writes(&mut bench, 3);
    set_policy(&mut bench, "report");
    settle(&mut bench);
    assert_eq!(held(&bench), 3);
    bench.device.resume();
    assert_eq!(statuses(&collect(&mut bench, 3)), [status::IOERR; 3]);
    assert_eq!(bench.ask(&write(9, 9)).status, status::IOERR);
    set_policy(&mut bench, "retry:60");
    settle(&mut bench);
    bench.driver.submit(&write(1, 1)).unwrap();
    settle(&mut bench);
    assert_eq!(stalls(&mut bench).retrying, 1);
    set_policy(&mut bench, "report");
    assert_eq!(statuses(&collect(&mut bench, 1)), [status::IOERR]);
}

#[test]
fn stopping_a_vring_fails_its_stalled_requests() {
    for policy in ["hold", "retry:60", "retry:60:hold"] {
        let mut bench = bench(10, policy);
        break_disk(&bench, ALL, EIO);
        for byte in 1..=4 {
            bench.driver.submit(&write(byte.into(), byte)).unwrap();
        }
        settle(&mut bench);
        stalls(&mut bench);
        let began = Instant::now();
        let mut stopped = bench.control.stop(0);
        let base = loop {
            bench.lap();
            match stopped.wait_for(Duration::ZERO) {
                Ok(Some(Stopped::At(base))) => break base,
                Ok(other) => panic!("{policy}: {other:?}"),
                Err(again) => stopped = again,
            }
            assert!(began.elapsed() < Duration::from_secs(30), "{policy}");
        };
        assert_eq!(base, 4);
        let answers = bench.driver.collect(|_| 0);
        assert_eq!(statuses(&answers), [status::IOERR; 4], "{policy}");
        assert_eq!((stalled(&bench), bench.driver.in_flight()), (None, 0));
    }
}

/// If the frontend keeps the requests in flight, they wait for the next daemon or connection.
#[test]
fn stopping_a_kept_vring_leaves_its_stalled_requests_in_the_region() {
    for policy in ["hold", "retry:60"] {
        let region = inflight_region();
        let mut bench = bench(10, policy);
        assert_eq!(bench.restart_from(&region), Stopped::At(0));
        break_disk(&bench, ALL, EIO);
        for byte in 1..=4 {
            bench.driver.submit(&write(byte.into(), byte)).unwrap();
        }
        settle(&mut bench);
        stalls(&mut bench);
        let stopped = bench.control.stop(0);
        assert_eq!(bench.carry_out(stopped), Stopped::Left, "{policy}");
        assert_eq!((stalled(&bench), bench.driver.in_flight()), (None, 4));
        mend_disk(&bench);
        let started = bench.control.start(kept_vring(&region));
        bench.carry_out(started).unwrap();
        assert_eq!(statuses(&collect(&mut bench, 4)), [status::OK; 4]);
        // Afterwards nothing is left.
        let stopped = bench.control.stop(0);
        assert_eq!(bench.carry_out(stopped), Stopped::At(4));
    }
}

/// A stop does not wait for requests that fail after the stop was requested either.
#[test]
fn a_request_that_fails_while_its_vring_stops_completes() {
    for seed in 0..20 {
        let config = cleave_sim::SimConfig {
            delay_max: 30,
            ..quiet(seed)
        };
        let mut bench = Bench::new(config, FEATURES);
        set_policy(&mut bench, "hold");
        break_disk(&bench, ALL, EIO);
        for byte in 1..=4 {
            bench.driver.submit(&write(byte.into(), byte)).unwrap();
        }
        bench.lap();
        let mut stopped = bench.control.stop(0);
        let mut laps = 0;
        loop {
            bench.lap();
            laps += 1;
            assert!(laps < 1000, "seed {seed}");
            match stopped.wait_for(Duration::ZERO) {
                Ok(base) => break assert_eq!(base, Some(Stopped::At(4))),
                Err(again) => stopped = again,
            }
        }
        let answers = bench.driver.collect(|_| 0);
        assert_eq!(statuses(&answers), [status::IOERR; 4], "seed {seed}");
    }
}

#[test]
fn an_exiting_worker_and_a_retired_vring_fail_held_requests() {
    let mut bench = bench(11, "hold");
    hold_writes(&mut bench, 3);
    bench.control.exit();
    let mut laps = 0;
    while bench.lap() == Lap::Again {
        laps += 1;
        assert!(laps < 1000);
    }
    let answers = bench.driver.collect(|_| 0);
    assert_eq!(statuses(&answers), [status::IOERR; 3]);

    let mut bench = self::bench(12, "retry:60");
    break_disk(&bench, ALL, EIO);
    bench.driver.submit(&write(1, 1)).unwrap();
    settle(&mut bench);
    bench.driver.submit_raw(crate::driver::SIZE);
    settle(&mut bench);
    let answers = bench.driver.collect(|_| 0);
    assert_eq!(statuses(&answers), [status::IOERR]);
    assert_eq!(stalled(&bench), None);
}

#[test]
fn a_held_request_does_not_keep_memory_and_is_repeated_in_the_new_table() {
    for rings_stay in [false, true] {
        let mut bench = bench(13, "hold");
        let table = |bench: &Bench, parts: &[Part]| {
            Memory::new(
                parts
                    .iter()
                    .map(|part| bench.driver.region(*part))
                    .collect(),
            )
            .unwrap()
        };
        let memory = table(&bench, &[Part::Rings, Part::Requests]);
        let bound = bench.control.bind(memory.clone());
        bench.carry_out(bound);
        hold_writes(&mut bench, 3);
        let rest: &[Part] = if rings_stay { &[Part::Rings] } else { &[] };
        let next = table(&bench, rest);
        let departure = memory.departing(&next);
        drop(memory);
        let bound = bench.control.bind(next);
        bench.carry_out(bound);
        settle(&mut bench);
        assert!(departure.is_over_within(Duration::ZERO), "{rings_stay}");
        assert_eq!(held(&bench), 3);
        if !rings_stay {
            // There is no memory to read the chains from: they wait, at no cost.
            mend_disk(&bench);
            let redone = bench.totals().redone;
            bench.device.resume();
            settle(&mut bench);
            assert_eq!(bench.totals().redone, redone);
        }
        let back = table(&bench, &[Part::Rings, Part::Requests]);
        let bound = bench.control.bind(back);
        bench.carry_out(bound);
        mend_disk(&bench);
        bench.device.resume();
        let answers = collect(&mut bench, 3);
        assert_eq!(statuses(&answers), [status::OK; 3], "{rings_stay}");
        let store = bench.store.lock().unwrap();
        assert!((1..=3).all(|n| store.now[n * 512] == n as u8));
    }
}

/// A chain that the guest has changed meanwhile is treated as a new one.
#[test]
fn a_chain_that_changed_while_it_was_held_is_a_new_chain() {
    let mut bench = bench(14, "hold");
    break_disk(&bench, ALL, ENOSPC);
    let head = bench.driver.submit(&write(1, 1)).unwrap();
    settle(&mut bench);
    assert_eq!(held(&bench), 1);
    bench.driver.break_chain(head);
    bench.device.resume();
    let [answer] = &collect(&mut bench, 1)[..] else {
        panic!("one answer")
    };
    assert_eq!((answer.head, answer.used_bytes), (head, 0));
    assert_eq!(stalled(&bench), None);
    let [record] = &bench.device.records.all()[..] else {
        panic!("one record")
    };
    assert_eq!(record.in_flight().0, 0);
    mend_disk(&bench);
    assert_eq!(bench.ask(&write(1, 2)).status, status::OK);
}

/// Tells the worker that the way to the storage is there again.
fn come_back(bench: &Bench) {
    bench.store.lock().unwrap().came_back = true;
}

/// An NBD server that is back needs no operator. An error of the disk does.
#[test]
fn requests_that_found_no_way_to_the_storage_are_repeated_when_it_is_back() {
    for errno in [EIO, ENOTCONN] {
        let mut bench = bench(20, "hold");
        break_disk(&bench, ALL, errno);
        bench.driver.submit(&write(1, 1)).unwrap();
        settle(&mut bench);
        mend_disk(&bench);
        settle(&mut bench);
        assert_eq!(held(&bench), 1);
        come_back(&bench);
        if errno == EIO {
            settle(&mut bench);
            assert_eq!((held(&bench), bench.totals().redone), (1, 0));
            bench.device.resume();
        }
        assert_eq!(statuses(&collect(&mut bench, 1)), [status::OK]);
        assert_eq!((held(&bench), bench.totals().redone), (0, 1));
        assert_eq!(bench.ask(&write(2, 2)).status, status::OK);
    }
}

/// The guest's requests go to the disk when it is no longer quiesced.
#[test]
fn storage_that_is_back_is_given_nothing_while_the_disk_is_quiesced() {
    let mut bench = bench(21, "hold");
    break_disk(&bench, ALL, ENOTCONN);
    bench.driver.submit(&write(1, 1)).unwrap();
    settle(&mut bench);
    mend_disk(&bench);
    bench.device.quiesce();
    settle(&mut bench);
    come_back(&bench);
    settle(&mut bench);
    assert!(bench.device.is_still());
    assert_eq!(bench.totals().redone, 0);
    assert!(bench.driver.collect(|_| 0).is_empty());
    bench.device.go_on();
    assert_eq!(statuses(&collect(&mut bench, 1)), [status::OK]);
}

/// A server may let us in and hang up again and again.
#[test]
fn requests_that_fail_each_time_the_storage_is_back_are_repeated_less_and_less_often() {
    let mut bench = bench(22, "hold");
    break_disk(&bench, ALL, ENOTCONN);
    bench.driver.submit(&write(1, 1)).unwrap();
    settle(&mut bench);
    let began = Instant::now();
    while bench.totals().redone < 6 {
        come_back(&bench);
        bench.lap();
        assert!(began.elapsed() < Duration::from_secs(20));
    }
    // At once, and after 20, 40, 80, 160 and 320 ms.
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(620), "{took:?}");
    mend_disk(&bench);
    let answers = loop {
        come_back(&bench);
        bench.lap();
        let answers = bench.driver.collect(|_| 0);
        if !answers.is_empty() {
            break answers;
        }
        assert!(began.elapsed() < Duration::from_secs(20));
    };
    assert_eq!(statuses(&answers), [status::OK]);
}

/// A held request costs nothing, and a retried one costs a timer.
#[test]
fn a_worker_sleeps_without_a_timer_while_requests_are_held() {
    for completion in [
        CompletionPolicy::Poll,
        CompletionPolicy::Adaptive,
        CompletionPolicy::Interrupt,
    ] {
        let mut bench = bench(15, "hold");
        hold_writes(&mut bench, 2);
        bench.device.tune(Tuning {
            completion,
            ..Tuning::clone(&bench.device.tuning())
        });
        settle(&mut bench);
        let waits = |bench: &mut Bench| {
            bench.store.lock().unwrap().waits = [0; 2];
            settle_for(bench, 5);
            bench.store.lock().unwrap().waits
        };
        assert_eq!(waits(&mut bench), [0, 5], "{completion}");
        if completion != CompletionPolicy::Interrupt {
            continue;
        }
        set_policy(&mut bench, "retry:60");
        bench.device.resume();
        until(&mut bench, |shown| {
            shown.is_some_and(|shown| shown.held == 0)
        });
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            bench.lap();
        }
        // The pause is one second by now.
        let redone = bench.totals().redone;
        let [timed, endless] = waits(&mut bench);
        assert!(timed > 0 && endless == 0, "{timed} {endless}");
        assert!(bench.totals().redone <= redone + 2);
    }
}

/// Only the end of other requests makes room, and that wakes the worker. A disk that hangs may be full for hours.
#[test]
fn a_worker_sleeps_without_a_timer_while_requests_are_due_and_the_store_is_full() {
    let mut bench = bench(25, "retry:60");
    bench.device.tune(Tuning {
        completion: CompletionPolicy::Interrupt,
        ..Tuning::clone(&bench.device.tuning())
    });
    heard(&mut bench);
    break_disk(&bench, ALL, EIO);
    for sector in 1..=3 {
        bench.driver.submit(&write(sector, 1)).unwrap();
    }
    until(&mut bench, |shown| {
        shown.is_some_and(|shown| shown.retrying == 3)
    });
    let redone = bench.totals().redone;
    mend_disk(&bench);
    bench.store.lock().unwrap().is_full = true;
    let began = Instant::now();
    loop {
        bench.store.lock().unwrap().waits = [0; 2];
        settle_for(&mut bench, 5);
        let waits = bench.store.lock().unwrap().waits;
        if waits == [0, 5] {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{waits:?}");
    }
    assert_eq!(bench.totals().redone, redone);
    bench.store.lock().unwrap().is_full = false;
    assert_eq!(statuses(&collect(&mut bench, 3)), [status::OK; 3]);
    assert_eq!(bench.totals().redone, redone + 3);
    assert_eq!(stalled(&bench), None);
}

/// While the ring is not in memory there is no place for an answer. The order must not be lost: the guest waits for it.
#[test]
fn held_requests_that_fail_while_their_ring_is_away_are_answered_when_it_is_back() {
    let mut bench = bench(16, "hold");
    hold_writes(&mut bench, 3);
    let bound = bench.control.bind(Memory::new(Vec::new()).unwrap());
    bench.carry_out(bound);
    settle(&mut bench);
    assert_eq!(held(&bench), 3);
    bench.device.fail();
    settle(&mut bench);
    let bound = bench.control.bind(bench.driver.memory());
    bench.carry_out(bound);
    let answers = collect(&mut bench, 3);
    assert_eq!(statuses(&answers), [status::IOERR; 3]);
    assert_eq!((stalled(&bench), bench.totals().failed), (None, 3));
    // The vring continues.
    mend_disk(&bench);
    assert_eq!(bench.ask(&write(7, 7)).status, status::OK);
}

/// An answer without a status would pass for a success, as would a request that is done again.
#[test]
fn held_requests_whose_memory_is_lost_stay_in_the_region() {
    for part in [Part::Requests, Part::Rings] {
        let region = inflight_region();
        let mut bench = bench(19, "hold");
        assert_eq!(bench.restart_from(&region), Stopped::At(0));
        hold_writes(&mut bench, 3);
        mend_disk(&bench);
        watch_pushes(&bench);
        bench.driver.lose(part);
        // It reads their headers again.
        bench.device.resume();
        settle(&mut bench);
        assert!(crate::is_rung(&bench.alarm));
        let stopped = bench.control.stop(0);
        assert_eq!(bench.carry_out(stopped), Stopped::Left);
        assert!(pushed(&bench).is_empty());
        let whole = Driver::new();
        let mut next = Vring::new(whole.memory(), Driver::layout(), FEATURES, 0).unwrap();
        next.keep(region.journal(0).unwrap());
        assert_eq!(next.again(), 3);
    }
}

/// Without a region nobody can repeat them. A position would claim that they were answered.
#[test]
fn a_vring_that_is_stopped_while_its_ring_is_away_does_not_pass_off_held_requests_as_answered() {
    let mut bench = bench(18, "hold");
    hold_writes(&mut bench, 3);
    let bound = bench.control.bind(Memory::new(Vec::new()).unwrap());
    bench.carry_out(bound);
    settle(&mut bench);
    let failed = bench.totals().failed;
    let stopped = bench.control.stop(0);
    assert_eq!(bench.carry_out(stopped), Stopped::Left);
    assert_eq!((stalled(&bench), bench.totals().failed), (None, failed));
    assert_eq!(bench.driver.in_flight(), 3);
}

/// A vring that stops takes the requests of an earlier daemon first, but none may go to a disk that is quiesced.
#[test]
fn a_vring_that_is_stopped_while_the_disk_is_quiesced_leaves_what_an_earlier_daemon_left() {
    let region = inflight_region();
    let mut bench = bench(17, "hold");
    assert_eq!(bench.restart_from(&region), Stopped::At(0));
    hold_writes(&mut bench, 3);
    mend_disk(&bench);
    bench.device.quiesce();
    assert_eq!(bench.restart_from(&region), Stopped::Left);
    watch_pushes(&bench);
    assert_eq!(bench.restart_from(&region), Stopped::Left);
    assert!(pushed(&bench).is_empty());
    bench.device.go_on();
    assert_eq!(statuses(&collect(&mut bench, 3)), [status::OK; 3]);
}
