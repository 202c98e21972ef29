//! Each command is answered when it has taken effect, and not before.

use std::time::Duration;

use cleave_blk::spec::status;
use cleave_sim::SimConfig;
use cleave_worker::{Lap, Pending, Stopped};

use crate::driver::Ask;
use crate::{Bench, CHUNK, FEATURES, LEGS, quiet};

/// A disk that takes some laps for each op.
fn slow(seed: u64) -> Bench {
    let config = SimConfig {
        delay_max: 30,
        ..quiet(seed)
    };
    Bench::new(config, FEATURES)
}

#[test]
fn a_stop_is_answered_only_when_all_requests_are_complete() {
    for seed in 0..50 {
        let mut bench = slow(seed);
        for n in 0..8 {
            bench
                .driver
                .submit(&Ask::read(n * 8, 4096, 4096, true))
                .unwrap();
        }
        bench.lap();
        let mut stopped = bench.control.stop(0);
        bench.driver.submit(&Ask::read(0, 512, 512, true)).unwrap();
        let mut laps = 0;
        let base = loop {
            bench.lap();
            laps += 1;
            assert!(laps < 1000, "seed {seed}: never stopped");
            match stopped.wait_for(Duration::ZERO) {
                Ok(Some(Stopped::At(base))) => break base,
                Ok(other) => panic!("{other:?}"),
                Err(again) => stopped = again,
            }
        };
        let answers = bench.driver.collect(|_| 4096);
        assert_eq!(
            answers.len(),
            usize::from(base),
            "seed {seed}: a drained vring has answered all requests"
        );
        assert!((8..=9).contains(&base));
        assert_eq!(bench.driver.in_flight(), 9 - answers.len());
    }
}

#[test]
fn a_disabled_vring_is_kept_and_checked_when_enabled() {
    let mut bench = Bench::new(quiet(4), FEATURES);
    let disabled = bench.control.enable(0, false);
    bench.carry_out(disabled);
    bench.driver.submit(&Ask::read(0, 512, 512, false)).unwrap();
    for _ in 0..20 {
        bench.lap();
    }
    assert!(bench.driver.collect(|_| 512).is_empty());
    bench.control.enable(0, true);
    for _ in 0..20 {
        bench.lap();
    }
    assert_eq!(
        bench.driver.collect(|_| 512).len(),
        1,
        "no kick arrived, and none was needed"
    );
}

/// Runs laps until a command is answered.
pub(crate) fn answer<T>(bench: &mut Bench, mut pending: Pending<T>) -> T {
    for _ in 0..1000 {
        bench.lap();
        match pending.wait_for(Duration::ZERO) {
            Ok(answer) => return answer.unwrap(),
            Err(again) => pending = again,
        }
    }
    panic!("no answer");
}

/// An operator may ask again while a flush is under way. The later one also covers what was written since.
#[test]
fn an_ordered_flush_is_answered_when_the_store_has_flushed() {
    let mut bench = slow(6);
    for byte in 1..4 {
        let write = Ask::write(0, vec![byte; 512], 512, true);
        assert_eq!(bench.ask(&write).status, status::OK);
        let [first] = bench.device.sync().try_into().unwrap();
        let [second] = bench.device.sync().try_into().unwrap();
        bench.lap();
        let [third] = bench.device.sync().try_into().unwrap();
        for flush in [first, second, third] {
            assert_eq!(answer(&mut bench, flush), Ok(()));
            assert_eq!(bench.store.lock().unwrap().durable[..512], [byte; 512]);
        }
    }
}

/// A guest moves without a flush of its own, so every leg counts.
#[test]
fn an_ordered_flush_of_a_stripe_covers_all_legs() {
    for failing_leg in [None, Some(0), Some(LEGS as u64 - 1)] {
        let config = SimConfig {
            ops: 2048,
            fail_at: failing_leg.map(|leg| LEGS as u64 + leg),
            ..quiet(8)
        };
        let mut bench = Bench::striped(config, FEATURES);
        for (leg, byte) in (0..LEGS as u64).zip(1..) {
            let sector = leg * u64::from(CHUNK) / 512;
            let write = Ask::write(sector, vec![byte; 512], 512, true);
            assert_eq!(bench.ask(&write).status, status::OK);
        }
        let [flush] = bench.device.sync().try_into().unwrap();
        let flushed = answer(&mut bench, flush);
        let Some(leg) = failing_leg else {
            assert_eq!(flushed, Ok(()));
            let store = bench.store.lock().unwrap();
            let first = |leg| store.durable[leg * store.leg_bytes];
            assert_eq!([0, 1, 2, 3].map(first), [1, 2, 3, 4]);
            continue;
        };
        assert_eq!(flushed, Err(5), "leg {leg}");
    }
}

#[test]
fn an_ordered_flush_that_fails_is_answered_and_one_at_the_end_is_not() {
    let config = SimConfig {
        fail_at: Some(0),
        ..quiet(7)
    };
    let mut bench = Bench::new(config, FEATURES);
    let [failing] = bench.device.sync().try_into().unwrap();
    assert_eq!(answer(&mut bench, failing), Err(5));
    let [flush] = bench.device.sync().try_into().unwrap();
    assert_eq!(answer(&mut bench, flush), Ok(()));
    bench.control.exit();
    let [last] = bench.device.sync().try_into().unwrap();
    while bench.lap() == Lap::Again {}
    let last = last.wait_for(Duration::ZERO).unwrap_err();
    let Bench { worker, device, .. } = bench;
    drop(worker);
    assert_eq!(last.wait(), None);
    assert!(device.sync().is_empty());
}

#[test]
fn an_exit_drains_first() {
    let mut bench = slow(5);
    for n in 0..8 {
        bench
            .driver
            .submit(&Ask::write(n * 8, vec![1; 4096], 4096, true))
            .unwrap();
    }
    bench.lap();
    bench.control.exit();
    let mut laps = 0;
    while bench.lap() == Lap::Again {
        laps += 1;
        assert!(laps < 1000);
    }
    assert_eq!(bench.driver.collect(|_| 0).len(), 8);
}
