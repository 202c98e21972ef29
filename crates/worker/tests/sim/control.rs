//! Each command is answered when it has taken effect, and not before.

use std::time::Duration;

use cleave_sim::SimConfig;
use cleave_worker::{Lap, Stopped};

use crate::driver::Ask;
use crate::{Bench, FEATURES, quiet};

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
